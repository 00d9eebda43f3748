package ratelimit

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// trialParts is into how many parts a trial divides the calls of a statement that failed.
	trialParts = 8
	// maxFailures is how many parts of a trial may fail, and maxSilence for how long, while none is decided. Then the error is taken
	// for one that concerns all.
	maxFailures = 16
	maxSilence  = 3 * time.Second
	// waryFor is how many statements wait for no lock for long, after one that all its callers had given up.
	waryFor = 100
	// maxSlow bounds the slow keys that are remembered.
	maxSlow = 1000
)

// trial decides the calls of a statement that failed by some of its keys: apart, so that only those who asked for these fail.
type trial struct {
	err      error // the statement's
	patient  bool  // it was for slow keys already: calls that are blocked in the trial, too, are told err
	hasty    bool  // it was to wait for no lock for long itself
	parts    int
	failures int       // since the last part that was decided
	since    time.Time // when that was
	decided  map[groupID]struct{}
}

// progress notes that a call was decided. A call that is in no trial has a nil one.
func (t *trial) progress(ds []demand) {
	if t == nil {
		return
	}
	t.failures, t.since = 0, time.Now()
	for i := range ds {
		t.decided[ds[i].id()] = struct{}{}
	}
}

// tell is what a call is told that fails with err in a trial: if it was blocked, for which it had less time, the error of the
// statement that was tried apart.
func (t *trial) tell(err error) error {
	if blocked(err) {
		return t.err
	}
	return err
}

// has says whether a call for a key was decided in the trial.
func (t *trial) has(id groupID) bool {
	if t == nil {
		return false
	}
	_, decided := t.decided[id]
	return decided
}

// concernsSome says whether an error may be due to some of a statement's keys, and means that nothing was consumed. Not so what
// breaks a connection, or holds for the server or this role: that is an error for all.
func concernsSome(err error) bool {
	state := sqlState(err)
	if len(state) != 5 || !notCommitted(err) || errors.As(err, new(*pgconn.ConnectError)) {
		return false
	}
	switch state[:2] {
	case "0A", "25", "26", "28", "3D", "3F", "42", "53", "57":
		return state == "57014" // a statement_timeout
	}
	return state != stateIsolation
}

// blocked says whether an error is due to another transaction, which was in the way for too long: lock_timeout,
// statement_timeout, or conflicts.
func blocked(err error) bool {
	state := sqlState(err)
	return state == "55P03" || state == "57014" || state == "40001" || state == "40P01"
}

// tryApart puts the calls of a statement that failed by some of its keys, by which nothing was consumed, back in front of the queue,
// to be decided apart: in parts that are divided again, and wait for no row for long, down to the calls for the same keys.
// If these were blocked, the keys are slow, and the calls go again, as patiently as the server says. It returns the error that the
// calls of the batch are to be told, if that is all they get.
func (c *Coalescer) tryApart(b *batch, err error) (told error) {
	sets := b.sets()
	c.mu.Lock()
	defer c.mu.Unlock()
	first := b.waiters[0]
	t := first.trial
	if b.trying {
		if t.failures++; t.failures >= maxFailures || time.Since(t.since) > maxSilence {
			return c.giveUp(b, t, err)
		}
	}
	switch {
	case len(sets) > 1:
		if !b.trying {
			t = &trial{err: err, patient: b.slow, hasty: b.hasty(), since: time.Now(), decided: map[groupID]struct{}{}}
		}
		parts := min(trialParts, len(sets))
		for i, set := range sets {
			for _, w := range set {
				w.trial, w.part = t, t.parts+1+i*parts/len(sets)
			}
		}
		t.parts += parts
	case sqlState(err) == stateSharded: // an ordinary call combines the rows
		for _, w := range b.waiters {
			w.lone, w.part = true, 0
		}
	case blocked(err) && b.trying && !t.patient:
		for _, w := range b.waiters {
			w.part = 0
		}
		c.suspect(first.ds, t)
	default:
		if blocked(err) {
			c.suspect(first.ds, t)
		}
		if b.trying {
			err = t.tell(err)
		}
		return err
	}
	c.putBack(b)
	return nil
}

// putBack puts the calls of a batch back in front of the queue. c.mu is held.
func (c *Coalescer) putBack(b *batch) {
	b.flight.cancel()
	b.waiters = slices.DeleteFunc(b.waiters, func(w *waiter) bool { return w.left })
	for _, w := range b.waiters {
		w.flight = nil
	}
	c.queue = slices.Insert(c.queue, 0, b.waiters...)
}

// giveUp ends a trial of which the batch was a part: its calls that still wait are told an error with those of the batch. If no
// statement has waited for them for as long as the server lets it, they go together instead, as patiently. c.mu is held.
func (c *Coalescer) giveUp(b *batch, t *trial, err error) (told error) {
	if t.hasty && blocked(err) {
		c.wary = 0
		c.putBack(b)
		for _, w := range c.queue {
			if w.trial == t {
				w.trial, w.part = nil, 0
			}
		}
		return nil
	}
	b.flight.cancel()
	c.queue = slices.DeleteFunc(c.queue, func(w *waiter) bool {
		if w.trial == t {
			b.waiters = append(b.waiters, w)
		}
		return w.trial == t
	})
	b.flight = newFlight(b.waiters)
	return t.tell(err)
}

// suspect remembers that a call was blocked: its keys are slow, but for those of which others were decided in the trial, if it
// is of one. Unless it asks for some already: then it was those. c.mu is held.
func (c *Coalescer) suspect(ds []demand, t *trial) {
	if c.asksSlow(ds) {
		return
	}
	if c.slow == nil || len(c.slow) >= maxSlow {
		c.slow = map[groupID]struct{}{}
	}
	for i := range ds {
		if id := ds[i].id(); !t.has(id) {
			c.slow[id] = struct{}{}
		}
	}
	if t == nil || t.patient {
		return
	}
	for _, w := range c.queue { // no need to try these
		if w.trial == t && c.asksSlow(w.ds) {
			w.part = 0
		}
	}
}

// trust forgets that the keys of a call that was decided were slow. c.mu is held.
func (c *Coalescer) trust(ds []demand) {
	if len(c.slow) == 0 {
		return
	}
	for i := range ds {
		delete(c.slow, ds[i].id())
	}
}

// asksSlow says whether a call asks for slow keys. c.mu is held.
func (c *Coalescer) asksSlow(ds []demand) bool {
	if len(c.slow) == 0 {
		return false
	}
	return slices.ContainsFunc(ds, c.isSlow)
}

func (c *Coalescer) isSlow(d demand) bool {
	_, slow := c.slow[d.id()]
	return slow
}

// sameSlow says whether two calls ask for the same slow keys, or for none. c.mu is held.
func (c *Coalescer) sameSlow(a, b []demand) bool {
	if len(c.slow) == 0 {
		return true
	}
	return slices.Equal(c.slowOf(a), c.slowOf(b))
}

func (c *Coalescer) slowOf(ds []demand) (ids []groupID) {
	for i := range ds {
		if c.isSlow(ds[i]) {
			ids = append(ids, ds[i].id())
		}
	}
	return ids
}

// sets are the calls of a batch, those for exactly the same keys together.
func (b *batch) sets() (sets [][]*waiter) {
	places := map[string]int{}
	of := b.of
	for _, w := range b.waiters {
		keys := fmt.Sprint(of[:len(w.ds)])
		of = of[len(w.ds):]
		place, found := places[keys]
		if !found {
			place = len(sets)
			places[keys] = place
			sets = append(sets, nil)
		}
		sets[place] = append(sets[place], w)
	}
	return sets
}

package ratelimit

import (
	"cmp"
	"slices"
	"time"
)

const (
	// maxBlamed bounds how many blamed keys are remembered: some may never be asked for again.
	maxBlamed = 1 << 13
	// maxFailures is after how many failures calls are no longer decided again.
	maxFailures = 8
	// maxSharedFailures is the same for calls that share a key with all failed calls.
	maxSharedFailures = 4
)

// next frees the keys of the batch, and moves calls that can share a statement from the queue to it. If no call is ready,
// it gives up the place. If a call has to be sent by itself, it leaves the place to that call.
func (c *Coalescer) next(b *batch) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vacate(b)
	c.apartFlying = c.apartFlying && !b.apart
	b.apart = false
	for {
		clear(c.held)
		first := slices.IndexFunc(c.queue, c.ready)
		if first < 0 {
			c.release()
			return false
		}
		w := c.queue[first]
		apart := c.apart(w)
		if w.lone {
			c.queue = slices.Delete(c.queue, first, first+1)
			c.busy.add(w.ds)
			c.apartFlying = c.apartFlying || apart
			w.direct, w.apart = true, apart
			w.done <- struct{}{}
			c.fill()
			return false
		}
		if !apart {
			if wait := c.takeTurn(); wait > 0 {
				c.mu.Unlock()
				time.Sleep(wait)
				c.mu.Lock()
				continue
			}
		}
		b.apart = apart
		c.take(b, first)
		c.apartFlying = c.apartFlying || apart
		c.fill()
		return true
	}
}

// apart reports whether a call must not share a statement with calls for other keys. c.mu is held.
func (c *Coalescer) apart(w *waiter) bool { return w.again || c.blamed.has(w.ds) }

// waits reports whether a call has to wait for calls at the database. c.mu is held.
func (c *Coalescer) waits(ds []demand, apart bool) bool {
	return c.busy.has(ds) || apart && c.apartFlying
}

// ready reports whether a queued call may be sent. If not, later calls must not overtake it with one of its keys. (For one
// key, and the first time, no note is needed: the same reason holds up the later calls too.) c.mu is held.
func (c *Coalescer) ready(w *waiter) bool {
	if !c.waits(w.ds, c.apart(w)) && !c.held.has(w.ds) {
		return true
	}
	if len(w.ds) > 1 || w.again {
		c.held.add(w.ds)
	}
	return false
}

// take moves the first ready call, and the calls that can share its statement, from the queue to the batch. c.mu is held.
func (c *Coalescer) take(b *batch, first int) {
	leader, rest := c.queue[first], c.queue[:first]
	for i, w := range c.queue[first:] {
		together := w == leader || c.ready(w) && c.together(leader, w, b.apart)
		if together && (w.lone || w.now != leader.now) || len(b.waiters) == maxBatch {
			rest = append(rest, c.queue[first+i:]...)
			break
		}
		if together {
			b.waiters = append(b.waiters, w)
		} else {
			rest = append(rest, w)
		}
	}
	clear(c.queue[len(rest):])
	c.queue = rest
	c.occupy(b)
	b.flight = newFlight(b.waiters)
}

// together reports whether a call may share another's statement. Calls that are apart may if both ask for the same single
// key, or if the same keys of both are blamed. c.mu is held.
func (c *Coalescer) together(leader, w *waiter, apart bool) bool {
	switch {
	case !apart:
		return !c.apart(w)
	case len(leader.ds) == 1 && len(w.ds) == 1:
		return leader.ds[0].id() == w.ds[0].id()
	case leader.alone || w.alone:
		return false
	}
	blamed := c.blamedOf(leader.ds)
	return len(blamed) > 0 && slices.Equal(blamed, c.blamedOf(w.ds))
}

// blamedOf are the blamed keys among the demands'. c.mu is held.
func (c *Coalescer) blamedOf(ds []demand) (ids []groupID) {
	for i := range ds {
		if id := ds[i].id(); c.blamed.has(ds[i : i+1]) {
			ids = append(ids, id)
		}
	}
	return ids
}

// occupy notes that the keys of a batch are at the database. c.mu is held.
func (c *Coalescer) occupy(b *batch) {
	for _, w := range b.waiters {
		c.busy.add(w.ds)
		for i := range w.ds {
			b.busy = append(b.busy, w.ds[i].id())
		}
	}
}

// vacate notes that they no longer are. c.mu is held.
func (c *Coalescer) vacate(b *batch) {
	for _, id := range b.busy {
		delete(c.busy, id)
	}
	clear(b.busy)
	b.busy = b.busy[:0]
}

// fill uses the second place for queued calls. c.mu is held.
func (c *Coalescer) fill() {
	if len(c.queue) > 0 && c.flying < maxInFlight {
		c.takePlace()
		go c.flush()
	}
}

// takeTurn is how long the pace makes a statement wait. With 0, it may begin, and the next one is due a pace later. c.mu is
// held.
func (c *Coalescer) takeTurn() time.Duration {
	if c.Pace <= 0 {
		return 0
	}
	now := time.Now()
	if wait := c.due.Sub(now); wait > 0 {
		return wait
	}
	c.due = now.Add(c.Pace)
	return 0
}

// separate puts the undecided calls of a batch back at the front of the queue: to be sent by themselves or, after a
// timeout, apart.
func (c *Coalescer) separate(b *batch, timeout error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b.flight.cancel()
	b.waiters = slices.DeleteFunc(b.waiters, func(w *waiter) bool { return w.left })
	slices.SortStableFunc(b.waiters, func(v, w *waiter) int { return cmp.Compare(len(v.ds), len(w.ds)) }) // single keys are decided sooner
	if !c.apartFlying && !slices.ContainsFunc(c.queue, func(w *waiter) bool { return w.again }) {
		c.failures = 0 // all earlier calls are decided
	}
	for _, w := range b.waiters {
		w.flight, w.lone, w.again, w.alone, w.err = nil, timeout == nil, timeout != nil, timeout != nil && b.apart, timeout
	}
	c.queue = slices.Insert(c.queue, 0, b.waiters...)
}

// timedOut reports whether the server ended a slow statement, perhaps because it waited for a lock. Nothing was decided.
func timedOut(err error) bool {
	state := sqlState(err)
	return state == "55P03" || state == "57014" // lock_not_available, query_canceled
}

// judge learns from the end of a statement for these demands alone. c.mu is held.
func (c *Coalescer) judge(ds []demand, apart bool, err error) {
	switch {
	case err == nil && apart:
		c.failures = 0
		c.blamed.remove(ds)
	case timedOut(err):
		guilty := c.blamedOf(ds) // blamed before; the others only share their statement
		if len(c.blamed) > maxBlamed {
			clear(c.blamed)
		}
		c.blamed.add(ds)
		if !apart {
			return
		}
		if len(guilty) < len(ds) {
			c.failures++
		}
		if len(guilty) > 0 && len(guilty) < len(ds) && c.failures >= maxSharedFailures {
			c.giveUp(func(w *waiter) bool {
				return w.alone && anyOf(w.ds, func(d *demand) bool { return slices.Contains(guilty, d.id()) })
			})
		}
	case err != nil && apart && sqlState(err) == "": // there is no connection
		c.failures = maxFailures
	}
	if c.failures >= maxFailures {
		c.failures = 0
		c.giveUp(func(w *waiter) bool { return w.again })
	}
}

// giveUp returns their last error to calls that would be decided again. c.mu is held.
func (c *Coalescer) giveUp(on func(w *waiter) bool) {
	c.queue = slices.DeleteFunc(c.queue, func(w *waiter) bool {
		if on(w) {
			w.done <- struct{}{}
			return true
		}
		return false
	})
}

// keySet is a set of keys of limits.
type keySet map[groupID]struct{}

// has reports whether one of the keys is in the set.
func (s keySet) has(ds []demand) bool {
	if len(s) == 0 {
		return false
	}
	for i := range ds {
		if _, found := s[ds[i].id()]; found {
			return true
		}
	}
	return false
}

func (s *keySet) add(ds []demand) {
	if *s == nil {
		*s = keySet{}
	}
	for i := range ds {
		(*s)[ds[i].id()] = struct{}{}
	}
}

func (s keySet) remove(ds []demand) {
	for i := range ds {
		delete(s, ds[i].id())
	}
}

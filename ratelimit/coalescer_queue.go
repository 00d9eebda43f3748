package ratelimit

import (
	"cmp"
	"slices"
	"time"
)

const (
	// maxBlamed bounds the keys that are remembered: nobody may ask for them again.
	maxBlamed = 1 << 13
	// maxFailures is after how many failures no more calls are decided again.
	maxFailures = 8
	// maxSharedFailures is the same for calls that share a key with all those that failed.
	maxSharedFailures = 4
)

// next frees the keys of the batch, and moves calls that can share a statement from the queue to it. If none may go, it gives up the
// place, or leaves it to a call that goes alone.
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

// apart says whether a call is to share no statement with calls for other keys. c.mu is held.
func (c *Coalescer) apart(w *waiter) bool { return w.again || c.blamed.has(w.ds) }

// waits says whether a call has to wait for others that are at the database. c.mu is held.
func (c *Coalescer) waits(ds []demand, apart bool) bool {
	return c.busy.has(ds) || apart && c.apartFlying
}

// ready says whether a call in the queue may go. If it may not, nobody behind it goes first with one of its keys. (If it asks for one
// key and is not decided again, what holds it up holds up those behind it, too.) c.mu is held.
func (c *Coalescer) ready(w *waiter) bool {
	if !c.waits(w.ds, c.apart(w)) && !c.held.has(w.ds) {
		return true
	}
	if len(w.ds) > 1 || w.again {
		c.held.add(w.ds)
	}
	return false
}

// take moves the first call that is ready and those that can share its statement from the queue to the batch. c.mu is held.
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

// together says whether a call may share the statement of another. Where that is apart, they are for one key, or for others beside one
// that is blamed. c.mu is held.
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

// blamedOf is those of the keys that are blamed. c.mu is held.
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

// vacate notes that they are no more. c.mu is held.
func (c *Coalescer) vacate(b *batch) {
	for _, id := range b.busy {
		delete(c.busy, id)
	}
	clear(b.busy)
	b.busy = b.busy[:0]
}

// fill gives a second place to those who still wait. c.mu is held.
func (c *Coalescer) fill() {
	if len(c.queue) > 0 && c.flying < maxInFlight {
		c.flying++
		go c.flush()
	}
}

// takeTurn is how long a statement still has to wait, by the pace. 0: it may begin, and the next is due a pace later. c.mu is held.
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

// separate puts the calls of a batch of which nothing was decided back in front of the queue: to go alone, or, after a timeout, apart.
func (c *Coalescer) separate(b *batch, timeout error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b.flight.cancel()
	b.waiters = slices.DeleteFunc(b.waiters, func(w *waiter) bool { return w.left })
	slices.SortStableFunc(b.waiters, func(v, w *waiter) int { return cmp.Compare(len(v.ds), len(w.ds)) }) // single keys are soon decided
	if !c.apartFlying && !slices.ContainsFunc(c.queue, func(w *waiter) bool { return w.again }) {
		c.failures = 0 // all of before is decided
	}
	for _, w := range b.waiters {
		w.flight, w.lone, w.again, w.alone, w.err = nil, timeout == nil, timeout != nil, timeout != nil && b.apart, timeout
	}
	c.queue = slices.Insert(c.queue, 0, b.waiters...)
}

// timedOut says whether the server has ended a statement that took long, perhaps since it waited for a lock. Nothing was decided.
func timedOut(err error) bool {
	state := sqlState(err)
	return state == "55P03" || state == "57014" // lock_not_available, query_canceled
}

// judge learns from how a statement for these demands alone has ended. c.mu is held.
func (c *Coalescer) judge(ds []demand, apart bool, err error) {
	switch {
	case err == nil && apart:
		c.failures = 0
		c.blamed.remove(ds)
	case timedOut(err):
		guilty := c.blamedOf(ds) // again and again, beside others
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
				return w.alone && slices.ContainsFunc(w.ds, func(d demand) bool { return slices.Contains(guilty, d.id()) })
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

// giveUp tells calls that are to be decided again the error that they have. c.mu is held.
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

// has says whether one of the keys is in the set.
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

package ratelimit

import (
	"context"
	"errors"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrClosed is returned by [Limiter.Consume] and [Limiter.Charge] on a [Coalescer] that was closed. Nothing was sent.
var ErrClosed = errors.New("coalescer closed")

// Coalescer is a [DB] for many calls at once that are in no transaction. Calls that arrive while others are at the database are
// decided together, by one statement and one commit, or two (group commit for limits). It serves one hot key as well as many.
// Only Pool is required. A Coalescer must not be copied after its first use, nor its fields be changed. Its methods are safe for
// concurrent use, also by different limiters. A struct that embeds a *Coalescer coalesces, too. An idle Coalescer has no goroutines.
//
// Nothing is approximate. Each call of [Limiter.Consume] and [Limiter.Charge] is granted or denied against what the calls before
// it left, and has the result that it would have had on the pool. A call for several limits is all or nothing. Calls for the same
// key are decided in the order of their arrival, except that later calls may overtake one that waits for a row, or for another of
// its keys.
//
// At most two connections are in use, and no key is at the database on both. A call that meets no others goes straight to the pool,
// unless there is a Pace. Nothing is delayed on purpose, except that callers that were just answered may ask again before the next
// statement is sent.
//
// [Limiter.Check], [Limiter.Refund] and [Limiter.Reset] are not coalesced: they go straight to the pool. Limits with [Shards]
// gain less, since a call for one is a statement of its own. So do limiters with a [Limiter.Clock]: only calls whose clocks
// say the same are decided together.
//
// # Contexts
//
// If ctx is over while a call waits for others to be decided, it returns at once, and nothing is consumed. If it has been sent, it
// returns at once, too, but it may have been granted: the error matches [ErrUnknownOutcome]. A statement does not run under the
// context of any of its callers. It is given up when the contexts of all of them are over.
//
// # Errors
//
// An error that concerns the connection, the server or the role fails all calls of the statement; as with a single call, a
// connection that breaks leaves open what was consumed ([ErrUnknownOutcome]). After any other error nothing was consumed, and the
// calls are decided again, apart: only those for a key with which a statement fails again return its error. (If nothing but
// errors comes of that, it fails all, after some 16 statements or 3 seconds.) A statement that could not be serialized, or was
// ended to break a deadlock, is run again, as [Limiter.InTx] does: in the end, the error matches [ErrAttemptsExhausted].
//
// # Locked rows
//
// Calls for a key whose row another transaction has locked wait for it on one connection, and return the server's error
// if its lock_timeout or statement_timeout ends that. Meanwhile calls for other keys are decided on the second connection.
//
// The first time, calls for other keys may be in the statement that waits, and wait with it. With a lock_timeout they are decided
// within some milliseconds after that, and calls for the locked key return its error after about twice the time, or later if other
// locked keys are before them. Without a timeout they wait until the row is free, or the contexts of all calls of the statement are
// over; the next statements wait for no lock for long, to find out which key it was. So set a lock_timeout on the pool's
// sessions, 200 ms for example, give each call a context with a deadline, and do not coalesce a limit that transactions consume
// and then stay open.
type Coalescer struct {
	// Pool is where statements are sent. It is required. The Coalescer does not own it: close the Coalescer first.
	Pool *pgxpool.Pool

	// AsyncCommit lets the Coalescer's transactions commit with synchronous_commit = off: they do not wait until the commit is
	// on disk. The default is the server's setting. If the server crashes, what was consumed in its last moments (up to three
	// times wal_writer_delay, 0.6 s by default) is forgotten, and those tokens may be granted again.
	AsyncCommit bool

	// Pace is for floods: a statement begins no sooner than Pace after the one before it, so that more calls share each, and the
	// processors have time for others. The default, 0, is no pace. With 3 ms there are at most 333 statements a second, and a
	// call, or [Coalescer.Close], waits up to 3 ms longer, unless there was no other for so long.
	//
	// Calls that share no statement keep to no pace: those for limits with [Shards], [Limiter.Check], [Limiter.Refund] and
	// [Limiter.Reset]. Nor does a statement that is run again, or that decides what the one before it could not. Do not combine
	// Pace with a [Limiter.Clock]: calls at different instants are a statement each, and keep to it.
	Pace time.Duration

	// OnBatch, if it is not nil, is called for each statement that has decided calls, with how many it has decided: 1 for a call
	// that went straight to the pool. It is called from several goroutines at once, while the calls wait for their answers: it
	// should be quick. It must not use the Coalescer, which could wait for itself, nor panic: that ends the process, since no
	// caller can recover it.
	OnBatch func(calls int)

	begin    atomic.Bool // the database's default isolation level is not READ COMMITTED
	skipSums atomic.Bool // sums would have decided too few keys of the last batch: the next goes to _ratelimit_coalesce at once

	mu     sync.Mutex
	queue  []*waiter      // in order of arrival, but calls that are decided again come first; empty if flying is 0
	flying int            // the places that are taken: statements at the database, or about to be
	busy   [slots]traffic // of each key, by demand.slot
	sent   uint32         // statements, so far
	due    time.Time      // with a Pace: when the next statement may begin
	closed bool           // nothing is let in any more
	landed chan struct{}  // made by Close, which waits for it; closed when flying is 0

	slow       map[groupID]struct{} // keys that held a statement up: their calls go apart
	slowFlying bool                 // and one statement of these is at the database
	wary       int                  // so many statements are to wait for no lock for long
}

// coalescer is how it is found in a DB, by coalescerOf.
func (c *Coalescer) coalescer() *Coalescer { return c }

// Close waits until every call that has arrived is decided, however long the database takes. Later Consumes and Charges return
// [ErrClosed]: close it when the last caller has returned, after http.Server.Shutdown for example, and before the pool.
func (c *Coalescer) Close() {
	c.mu.Lock()
	c.closed = true
	if c.flying == 0 {
		c.mu.Unlock()
		return
	}
	if c.landed == nil {
		c.landed = make(chan struct{})
	}
	landed := c.landed
	c.mu.Unlock()
	<-landed
}

// QueryRow goes straight to the pool.
func (c *Coalescer) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return c.Pool.QueryRow(ctx, sql, args...)
}

const (
	// maxInFlight is how many statements are at the database at once: while one commits, the next is on its way.
	maxInFlight = 2
	// maxBatch bounds the calls of a statement.
	maxBatch = 1024
	// slots is how many keys at the database are told apart. Two that share a slot go one after another.
	slots = 1 << 12
)

// traffic is what a Coalescer has at the database for a key.
type traffic struct {
	calls int32
	since uint32 // Coalescer.sent, with the last of them
	held  bool   // while choose looks at the queue: for an earlier call
}

// The SQLSTATEs that _ratelimit_coalesce refuses a batch with.
const (
	stateSharded   = "RL002" // rows have to be combined first
	stateIsolation = "RL003" // not a READ COMMITTED transaction
)

// waiter is a call that waits for its decision.
type waiter struct {
	ds  []demand
	now pgtype.Timestamptz
	// done is sent to once it is decided, or, if direct is set, once it has a place to go by itself.
	done chan struct{}

	// Guarded by Coalescer.mu.
	lone    bool    // cannot share a statement
	arrived uint32  // Coalescer.sent at that time
	direct  bool    // has been given a place to go by itself
	slow    bool    // it then goes for slow keys
	left    bool    // does not wait any more
	flight  *flight // of its statement; nil: none yet
	trial   *trial  // that it is, or was, in
	part    int     // of the trial; 0: it is not, or not any more

	// The answer.
	err    error
	answer answer
}

// flight is the way of one statement.
type flight struct {
	ctx     context.Context
	cancel  context.CancelFunc
	waiting int            // how many wait for it; guarded by Coalescer.mu
	decided bool           // the same
	told    sync.WaitGroup // those who wait, from when it is decided until each has its answer
}

// newFlight puts waiters on a flight, those who have left too. Coalescer.mu is held.
func newFlight(waiters []*waiter) *flight {
	f := &flight{}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	for _, w := range waiters {
		w.flight = f
		if !w.left {
			f.waiting++
		}
	}
	if f.waiting == 0 {
		f.cancel()
	}
	return f
}

var waiters = sync.Pool{New: func() any { return &waiter{done: make(chan struct{}, 1)} }}

// decide decides a call: at once, if there is a place and its keys are not at the database, or together with those that wait.
func (c *Coalescer) decide(ctx context.Context, asked *call, result *Result) error {
	for i := range asked.demands {
		d := &asked.demands[i]
		d.slot = slotOf(d)
	}
	lone := asked.goesAlone()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	if c.flying < maxInFlight && !c.waits(asked.demands) {
		c.flying++
		if len(c.queue) == 0 && (lone || c.takeTurn() == 0) {
			c.sent++
			slow := c.depart(asked.demands)
			c.mu.Unlock()
			return c.direct(ctx, asked, result, slow)
		}
		go c.flush()
	}
	w := waiters.Get().(*waiter)
	w.ds, w.now, w.lone, w.arrived = asked.demands, asked.now, lone, c.sent
	c.queue = append(c.queue, w)
	c.mu.Unlock()

	select {
	case <-w.done:
	case <-ctx.Done():
		left, sent := c.leave(w)
		switch {
		case sent:
			return unknownUnless(ctx.Err())
		case left:
			return ctx.Err()
		}
		<-w.done
	}
	err, direct, slow, flight := w.err, w.direct, w.slow, w.flight
	if err == nil && !direct {
		result.fill(asked, &w.answer)
	}
	*w = waiter{done: w.done}
	waiters.Put(w)
	if direct {
		return c.direct(ctx, asked, result, slow)
	}
	flight.told.Done()
	return err
}

// leave takes a waiter out, unless it has been decided or has got a place. It may have been sent by then. When the last one of
// a statement goes, that is given up.
func (c *Coalescer) leave(w *waiter) (left, sent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch f := w.flight; {
	case w.direct || f != nil && f.decided:
		return false, false
	case f == nil:
		c.queue = slices.DeleteFunc(c.queue, func(other *waiter) bool { return other == w })
	default:
		w.left = true
		if f.waiting--; f.waiting == 0 {
			c.wary = waryFor
			f.cancel()
		}
		return true, true
	}
	return true, false
}

// takeTurn is how long a statement still has to wait, by the Pace. 0: it may begin, and the next is due a pace later. c.mu is held.
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

// direct decides one call the ordinary way, in the place that it has.
func (c *Coalescer) direct(ctx context.Context, asked *call, result *Result, slow bool) (err error) {
	defer func() { c.land(ctx, asked.demands, slow, err) }()
	err = c.retry(ctx, defaultAttempts, false, func(db wire) error {
		return asked.ask(ctx, db, result)
	})
	c.observe(1, err)
	return err
}

// land gives the place of a call that went by itself to those that wait.
func (c *Coalescer) land(ctx context.Context, ds []demand, slow bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.occupy(ds, -1)
	c.slowFlying = c.slowFlying && !slow
	switch {
	case err == nil:
		c.trust(ds)
	case ctx.Err() != nil:
		c.wary = waryFor
	case blocked(err):
		c.suspect(ds, nil)
	}
	if len(c.queue) > 0 {
		go c.flush()
		return
	}
	c.release()
}

// release gives up a place. c.mu is held.
func (c *Coalescer) release() {
	c.flying--
	if c.flying == 0 && c.landed != nil {
		close(c.landed)
	}
}

// flush decides what waits, until nothing does that may go.
func (c *Coalescer) flush() {
	b := batches.Get().(*batch)
	for c.next(b) {
		b.group()
		err := c.coalesce(b)
		if concernsSome(err) && b.flight.ctx.Err() == nil {
			if err = c.tryApart(b, err); err == nil {
				continue
			}
		}
		c.decided(b, err)
		b.flight.told.Wait() // so that those who have more to ask at once share the next statement
	}
	batches.Put(b)
}

// next lands the batch, and moves calls that can share a statement from the queue to it. If there are none, it gives the place to a
// call that goes alone, or up.
func (c *Coalescer) next(b *batch) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, slot := range b.slots {
		c.busy[slot].calls--
	}
	c.slowFlying = c.slowFlying && !b.slow
	b.slots, b.slow = b.slots[:0], false
	b.clear()
	more := c.choose(b)
	for len(b.waiters) > 0 && !b.waiters[0].lone && b.waiters[0].part == 0 {
		wait := c.takeTurn()
		if wait == 0 {
			break
		}
		b.clear()
		c.mu.Unlock()
		time.Sleep(wait)
		c.mu.Lock()
		more = c.choose(b)
	}
	if len(b.waiters) == 0 {
		c.release()
		return false
	}
	c.sent++
	for _, w := range b.waiters {
		b.slow = c.depart(w.ds) || b.slow
	}
	if w := b.waiters[0]; w.lone {
		c.queue = slices.DeleteFunc(c.queue, func(other *waiter) bool { return other == w })
		w.direct, w.slow = true, b.slow
		w.done <- struct{}{}
		b.slow = false
		b.clear()
	} else {
		for _, w := range b.waiters {
			for i := range w.ds {
				b.slots = append(b.slots, w.ds[i].slot)
			}
		}
		b.trying, b.wary = b.waiters[0].part > 0, c.wary > 0
		c.wary = max(c.wary-1, 0)
		b.flight = newFlight(b.waiters)
		c.queue = slices.DeleteFunc(c.queue, func(w *waiter) bool { return w.flight != nil })
	}
	if more && c.flying < maxInFlight {
		c.flying++
		go c.flush()
	}
	return b.flight != nil
}

// choose copies calls from the front of the queue to the batch: those that may go, and can share a statement; or one that goes
// alone. A call that waits for one of its keys is overtaken only once by others for its other keys. more says that other calls may
// go, too. c.mu is held.
func (c *Coalescer) choose(b *batch) (more bool) {
	for _, w := range c.queue {
		if len(b.waiters) == maxBatch || len(b.waiters) == 1 && b.waiters[0].lone {
			more = true
			break
		}
		waits := c.waits(w.ds)
		if !waits && (len(b.waiters) == 0 || c.joins(w, b.waiters[0])) {
			b.waiters = append(b.waiters, w)
			continue
		}
		more = more || !waits
		if (!waits || c.overtaken(w)) && !c.asksSlow(w.ds) {
			for i := range w.ds {
				if slot := w.ds[i].slot; slot != 0 && c.busy[slot].calls == 0 {
					c.busy[slot].held = true
					b.held = append(b.held, slot)
				}
			}
		}
	}
	for _, slot := range b.held {
		c.busy[slot].held = false
	}
	b.held = b.held[:0]
	return more
}

// joins says whether a call can share a statement with the first one of it.
func (c *Coalescer) joins(w, first *waiter) bool {
	return !w.lone && w.now == first.now && w.part == first.part && (w.part == 0 || w.trial == first.trial) && c.sameSlow(w.ds, first.ds)
}

// waits says whether a call has to wait until others land: those for the same key, since at the database it would only wait
// for the row; or those for slow keys, if it asks for one. So locked rows take one place of the two. c.mu is held.
func (c *Coalescer) waits(ds []demand) bool {
	for i := range ds {
		if t := &c.busy[ds[i].slot]; t.calls > 0 || t.held {
			return true
		}
	}
	return c.slowFlying && c.asksSlow(ds)
}

// overtaken says whether a call waits for a key that was sent for others since it came, or is held. c.mu is held.
func (c *Coalescer) overtaken(w *waiter) bool {
	for i := range w.ds {
		if t := &c.busy[w.ds[i].slot]; t.held || t.calls > 0 && int32(t.since-w.arrived) > 0 {
			return true
		}
	}
	return false
}

// depart notes that a call goes to the database, and whether that is for slow keys. c.mu is held.
func (c *Coalescer) depart(ds []demand) (slow bool) {
	c.occupy(ds, 1)
	for i := range ds {
		c.busy[ds[i].slot].since = c.sent
	}
	slow = c.asksSlow(ds)
	c.slowFlying = c.slowFlying || slow
	return slow
}

// occupy counts n calls for keys. c.mu is held.
func (c *Coalescer) occupy(ds []demand, n int32) {
	for i := range ds {
		if slot := ds[i].slot; slot != 0 {
			c.busy[slot].calls += n
		}
	}
}

// slotOf is where Coalescer.busy counts the calls for a demand's key: 0, where none are counted, if that has several rows.
func slotOf(d *demand) uint16 {
	if d.limit.shards > 1 {
		return 0
	}
	return uint16(1 + maphash.Comparable(seed, groupID{d.limit.name, d.key})%(slots-1))
}

// decided tells the waiters of a batch. Those that have left do not look.
func (c *Coalescer) decided(b *batch, err error) {
	c.observe(len(b.waiters), err)
	c.mu.Lock()
	b.flight.decided = true
	b.flight.told.Add(b.flight.waiting)
	if err == nil {
		for _, w := range b.waiters {
			w.trial.progress(w.ds)
			c.trust(w.ds)
		}
	}
	c.mu.Unlock()
	b.flight.cancel()
	for _, w := range b.waiters {
		w.err = err
		w.done <- struct{}{}
	}
}

// split tells the waiters of a batch, and makes a batch of the others, who were not decided with them. These change flights
// first: while the old one says that it is decided, none of them could leave.
func (c *Coalescer) split(b *batch, err error, others []*waiter) {
	c.mu.Lock()
	flight := newFlight(others)
	c.mu.Unlock()
	c.decided(b, err)
	b.clear()
	b.waiters, b.flight = append(b.waiters, others...), flight
	b.group()
}

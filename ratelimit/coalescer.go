package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// ErrClosed is returned by [Limiter.Consume] and [Limiter.Charge] on a [Coalescer] that was closed. Nothing was sent.
var ErrClosed = errors.New("coalescer closed")

// Coalescer is a [DB] for calls outside a transaction, of which there are many at once: those that arrive while others are at
// the database are decided together, by one statement and one commit, or two (group commit for limits). It is made for one hot key
// as much as for many. Only its Pool is required. It must not be copied after its first use, nor its fields be changed. Its methods
// are safe for concurrent use, also by different limiters. A struct that embeds a *Coalescer coalesces, too.
//
// Nothing is approximate: each call of [Limiter.Consume] and [Limiter.Charge] is granted or denied against what those
// before it left, in the order of their arrival (but for those whose statement waits for a row, or leaves them to a second one:
// later calls may overtake them), and its result is the one that a call on the pool would have had. A call for several limits is
// all or nothing. Unless there is a [Pace], a call that meets no others goes straight to the pool, and nothing is delayed on
// purpose, but to let those who were just answered ask again. An idle Coalescer has no goroutines. At most two connections are in
// use.
//
// A row that another transaction has locked holds up all calls that share its statement. If the server's lock_timeout or
// statement_timeout ends that, they are decided again, each key apart: only the calls for the locked key return the error. (After
// eight errors in a row, all do.) Until a statement for that key succeeds, its calls go on one connection, and the
// others on the second. Without a timeout, the first
// calls wait until the row is free or their contexts are over. So set a lock_timeout on the pool's sessions, 200 ms for
// example, give each call a context with a deadline, and do not coalesce a limit that transactions consume and then stay open.
//
// [Limiter.Check], [Limiter.Refund] and [Limiter.Reset] are not coalesced: they go straight to the pool. Limits with
// [Shards] and limiters with a [Limiter.Clock] gain less: a call for a sharded limit is a statement of its own, and only
// calls whose clocks say the same are decided together.
//
// If ctx is over while a call waits for others to be decided, it returns at once and nothing is consumed. If it has been
// sent, the call returns at once as well, but it may have been granted, as with any answer that is lost on its way. The
// statement does not run under the context of any of the callers: it is given up when the contexts of all of them are over.
//
// After any other error, all calls of the statement return it and none of them is granted; as with a single call, a
// connection that breaks leaves open what was consumed ([ErrUnknownOutcome]). A statement that could not be serialized, or was the
// victim of a deadlock, is run again, at most 30 times: after that, the error matches [ErrAttemptsExhausted].
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

	mu      sync.Mutex
	queue   []*waiter            // in order of arrival, those that are decided again first; empty if flying is 0
	flying  int                  // calls or batches at the database, or about to be
	busy    map[groupID]int      // the calls of these for each key
	held    map[groupID]struct{} // while the queue is looked through: keys of calls that cannot go yet, which none may overtake
	due     time.Time            // with a pace: when the next statement may begin
	closed  bool                 // nothing is let in any more
	drained chan struct{}        // made by Close, which waits for it; closed when flying is 0

	// Keys that may be locked, and how often their statements have failed since. A call for one of them is apart: it shares no
	// statement with calls for other keys.
	suspects    map[groupID]int
	apartFlying bool // calls that are apart have a place, of which they get one at a time
	failures    int  // of their statements, since the last that was decided
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
	if c.drained == nil {
		c.drained = make(chan struct{})
	}
	drained := c.drained
	c.mu.Unlock()
	<-drained
}

// QueryRow goes straight to the pool.
func (c *Coalescer) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return c.Pool.QueryRow(ctx, sql, args...)
}

const (
	// maxInFlight is how many calls or batches are at the database at once: while one commits, the next is on its way. No key is
	// in both, since the second would only wait for the row.
	maxInFlight = 2
	// maxBatch bounds the calls of a statement.
	maxBatch = 1024
	// maxSuspects bounds the keys that are remembered.
	maxSuspects = 8 * maxBatch
	// maxFailures is how many statements of calls that are apart may fail one after another. Then the table is locked, say, and all
	// calls that have waited for a first statement fail. After maxKeyFailures those do that ask for the same key.
	maxFailures    = 8
	maxKeyFailures = 3
)

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
	lone   bool    // cannot share a statement
	direct bool    // has been given a place to go by itself
	apart  bool    // that is the place of the calls that are apart
	left   bool    // does not wait any more
	flight *flight // of its statement; nil: none yet

	// The answer. err is that of the statement before, while the call waits to be decided again.
	err    error
	answer answer
}

// flight is the way of one statement.
type flight struct {
	ctx     context.Context
	cancel  context.CancelFunc
	waiting int            // how many wait for it; guarded by Coalescer.mu
	decided bool           // the same
	told    sync.WaitGroup // those of them who do not know their answer yet, once it is decided
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

// decide decides a call: at once, if few enough others are at the database, or together with those that wait.
func (c *Coalescer) decide(ctx context.Context, asked *call, result *Result) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return ErrClosed
	}
	lone := asked.goesAlone()
	if c.flying < maxInFlight && !c.waits(asked.demands) {
		c.flying++
		if len(c.queue) == 0 && !c.apart(asked.demands) && (lone || c.takeTurn() == 0) {
			for i := range asked.demands {
				c.occupy(asked.demands[i].id())
			}
			c.mu.Unlock()
			return c.direct(ctx, asked, result, false)
		}
		go c.flush()
	}
	w := waiters.Get().(*waiter)
	w.ds, w.now, w.lone = asked.demands, asked.now, lone
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
	err, direct, apart, flight := w.err, w.direct, w.apart, w.flight
	if err == nil && !direct {
		result.fill(asked, &w.answer)
	}
	*w = waiter{done: w.done}
	waiters.Put(w)
	if direct {
		return c.direct(ctx, asked, result, apart)
	}
	if flight != nil {
		flight.told.Done()
	}
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
			f.cancel()
		}
		return true, true
	}
	return true, false
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

// landed gives the place of a call that went by itself to those that wait.
func (c *Coalescer) landed(ctx context.Context, ds []demand, apart bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range ds {
		c.vacate(ds[i].id())
	}
	c.apartFlying = c.apartFlying && !apart
	switch ended := timedOut(err) || ctx.Err() != nil; {
	case apart:
		c.tried(ds, err, ended)
	case ended:
		c.suspect(ds)
	}
	if len(c.queue) > 0 {
		go c.flush()
		return
	}
	c.release()
}

// occupy notes that a call for a key goes to the database. c.mu is held.
func (c *Coalescer) occupy(id groupID) {
	if c.busy == nil {
		c.busy = map[groupID]int{}
	}
	c.busy[id]++
}

// vacate notes that a call for a key has come back from it. c.mu is held.
func (c *Coalescer) vacate(id groupID) {
	if c.busy[id]--; c.busy[id] == 0 {
		delete(c.busy, id)
	}
}

// waits says whether a call has to wait for others that are at the database, though there is a place. c.mu is held.
func (c *Coalescer) waits(ds []demand) bool {
	for i := range ds {
		if c.busy[ds[i].id()] > 0 {
			return true
		}
	}
	return c.apartFlying && c.apart(ds)
}

// release gives up a place. c.mu is held.
func (c *Coalescer) release() {
	c.flying--
	if c.flying == 0 && c.drained != nil {
		close(c.drained)
	}
}

// flush decides what waits, until nothing does that may go.
func (c *Coalescer) flush() {
	b := batches.Get().(*batch)
	for c.next(b) {
		b.group()
		err := c.coalesce(b)
		switch state := sqlState(err); {
		case state == stateSharded || len(state) == 5 && (state[:2] == "22" || state[:2] == "23"):
			// Rows to be combined first, or text that the server cannot store: it concerns only some.
			c.separate(b, err, true)
		case timedOut(err) && len(b.groups) > 1 && b.flight.ctx.Err() == nil:
			c.separate(b, err, false)
		default:
			c.decided(b, err)
			b.flight.told.Wait() // so that those who have more to ask at once share the next statement
		}
		b.clear()
	}
	batches.Put(b)
}

// next lands the batch, and moves calls that can share a statement from the queue to it. If there are none, it gives the place to a
// call that goes alone, or up.
func (c *Coalescer) next(b *batch) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range b.asked {
		c.vacate(id)
	}
	c.apartFlying = c.apartFlying && !b.apart
	b.asked, b.apart = b.asked[:0], false
	for {
		clear(c.held)
		first := slices.IndexFunc(c.queue, c.ready)
		if first < 0 {
			c.release()
			return false
		}
		w := c.queue[first]
		apart := c.apart(w.ds)
		if w.lone || apart && len(w.ds) > 1 {
			c.queue = slices.Delete(c.queue, first, first+1)
			for i := range w.ds {
				c.occupy(w.ds[i].id())
			}
			c.apartFlying = c.apartFlying || apart
			w.direct, w.apart = true, apart
			w.done <- struct{}{}
			c.fill()
			return false
		}
		if apart {
			c.apartFlying, b.apart = true, true
		} else if wait := c.takeTurn(); wait > 0 {
			c.mu.Unlock()
			time.Sleep(wait)
			c.mu.Lock()
			continue
		}
		c.take(b, first)
		c.fill()
		return true
	}
}

// ready says whether a call in the queue may go. If it may not, none behind it may go first with one of its keys. c.mu is held.
func (c *Coalescer) ready(w *waiter) bool {
	waits := c.waits(w.ds)
	for i := 0; i < len(w.ds) && !waits && len(c.held) > 0; i++ {
		_, waits = c.held[w.ds[i].id()]
	}
	if waits && len(w.ds) > 1 { // a single key is busy
		if c.held == nil {
			c.held = map[groupID]struct{}{}
		}
		for i := range w.ds {
			c.held[w.ds[i].id()] = struct{}{}
		}
	}
	return !waits
}

// take moves the first call that is ready and those that can share its statement from the queue to the batch. c.mu is held.
func (c *Coalescer) take(b *batch, first int) {
	leader, rest := c.queue[first], c.queue[:first]
	for i, w := range c.queue[first:] {
		together := c.ready(w) && !c.apart(w.ds)
		if b.apart {
			together = len(w.ds) == 1 && w.ds[0].id() == leader.ds[0].id()
		}
		if together && (w.lone || w.now != leader.now) || len(b.waiters) == maxBatch {
			rest = append(rest, c.queue[first+i:]...)
			break
		}
		if together {
			b.waiters = append(b.waiters, w)
			for i := range w.ds {
				b.asked = append(b.asked, w.ds[i].id())
			}
		} else {
			rest = append(rest, w)
		}
	}
	clear(c.queue[len(rest):])
	c.queue = rest
	for _, id := range b.asked {
		c.occupy(id)
	}
	b.flight = newFlight(b.waiters)
}

// fill gives a second place to those who still wait. c.mu is held.
func (c *Coalescer) fill() {
	if len(c.queue) > 0 && c.flying < maxInFlight {
		c.flying++
		go c.flush()
	}
}

// decided tells the waiters of a batch. Those that have left do not look.
func (c *Coalescer) decided(b *batch, err error) {
	c.observe(len(b.waiters), err)
	c.mu.Lock()
	switch ended := timedOut(err) || b.flight.ctx.Err() != nil; {
	case b.apart:
		c.tried(b.waiters[0].ds, err, ended)
	case ended:
		for _, w := range b.waiters {
			c.suspect(w.ds)
		}
	}
	b.flight.decided = true
	b.flight.told.Add(b.flight.waiting)
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

// separate puts the calls of a batch of which nothing was decided back in front of the queue, to go alone or apart.
func (c *Coalescer) separate(b *batch, err error, alone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b.flight.cancel()
	b.waiters = slices.DeleteFunc(b.waiters, func(w *waiter) bool { return w.left })
	slices.SortStableFunc(b.waiters, func(v, w *waiter) int { return cmp.Compare(len(v.ds), len(w.ds)) }) // which are soon decided
	for _, w := range b.waiters {
		w.lone, w.flight, w.err = alone, nil, err
		if !alone {
			c.suspect(w.ds)
		}
	}
	c.queue = slices.Insert(c.queue, 0, b.waiters...)
}

// timedOut says whether the server has ended a statement that took long, perhaps since it waited for a lock. Nothing was decided.
func timedOut(err error) bool {
	state := sqlState(err)
	return state == "55P03" || state == "57014" // lock_not_available, query_canceled
}

// apart says whether a call is to share no statement with calls for other keys. c.mu is held.
func (c *Coalescer) apart(ds []demand) bool {
	if len(c.suspects) == 0 {
		return false
	}
	for i := range ds {
		if _, found := c.suspects[ds[i].id()]; found {
			return true
		}
	}
	return false
}

// suspect notes that one of the keys may be locked, since a statement for them and others was ended. c.mu is held.
func (c *Coalescer) suspect(ds []demand) {
	if c.suspects == nil || len(c.suspects) > maxSuspects { // nobody may ask for them again
		c.suspects = map[groupID]int{}
	}
	for i := range ds {
		c.suspects[ds[i].id()] += 0
	}
}

// tried notes how the statement of calls that are apart has ended. c.mu is held.
func (c *Coalescer) tried(ds []demand, err error, ended bool) {
	switch {
	case err == nil:
		c.failures = 0
		for i := range ds {
			delete(c.suspects, ds[i].id())
		}
	case ended:
		c.failures++
		c.suspect(ds)
		for i := range ds {
			c.suspects[ds[i].id()]++
		}
		c.queue = slices.DeleteFunc(c.queue, func(w *waiter) bool {
			hopeless := w.err != nil && !w.lone && (c.failures == maxFailures || slices.ContainsFunc(w.ds, func(d demand) bool {
				return c.suspects[d.id()] >= maxKeyFailures
			}))
			if hopeless {
				w.done <- struct{}{}
			}
			return hopeless
		})
		c.failures %= maxFailures
	}
}

// direct decides one call the ordinary way, in the place that it has.
func (c *Coalescer) direct(ctx context.Context, asked *call, result *Result, apart bool) (err error) {
	defer func() { c.landed(ctx, asked.demands, apart, err) }()
	err = c.retry(ctx, func(db wire) error {
		return asked.ask(ctx, db, result)
	})
	c.observe(1, err)
	return err
}

// observe tells of a statement.
func (c *Coalescer) observe(calls int, err error) {
	if err == nil && c.OnBatch != nil {
		c.OnBatch(calls)
	}
}

// retry runs a statement in a transaction of its own, again if it could not be serialized.
func (c *Coalescer) retry(ctx context.Context, statement func(db wire) error) error {
	for attempt := 1; ; attempt++ {
		begin := c.begin.Load()
		err := c.once(ctx, begin, statement)
		if sqlState(err) == stateIsolation && !begin {
			c.begin.Store(true)
			continue
		}
		switch {
		case err == nil || !retryable(err):
			return err
		case attempt == defaultAttempts:
			return exhausted(attempt, err)
		case !pause(ctx, attempt):
			return exhausted(attempt, fmt.Errorf("%w; the last attempt: %w", over(ctx), err))
		}
	}
}

// once runs a statement in a transaction of its own. If begin, that is told to be READ COMMITTED.
func (c *Coalescer) once(ctx context.Context, begin bool, statement func(db wire) error) error {
	var db DB = c.Pool
	switch {
	case begin:
		committing := false
		err := pgx.BeginTxFunc(ctx, c.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if c.AsyncCommit {
				if _, err := tx.Exec(ctx, asyncCommit); err != nil {
					return err
				}
			}
			err := statement(wire{tx, false})
			committing = err == nil
			return err
		})
		if committing {
			err = unknownUnless(err)
		}
		return err
	case c.AsyncCommit:
		db = asyncDB{c.Pool}
	}
	return statement(wire{db, true})
}

// asyncCommit holds until the end of the transaction.
const asyncCommit = "SELECT set_config('synchronous_commit', 'off', true)"

// asyncDB sends asyncCommit ahead of a statement, in one round trip, which is one implicit transaction.
type asyncDB struct{ *pgxpool.Pool }

func (db asyncDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	var batch pgx.Batch
	batch.Queue(asyncCommit)
	batch.Queue(sql, args...)
	return asyncRow{db.SendBatch(ctx, &batch)}
}

type asyncRow struct{ results pgx.BatchResults }

func (r asyncRow) Scan(dest ...any) error {
	_, err := r.results.Exec()
	if err == nil {
		err = r.results.QueryRow().Scan(dest...)
	}
	if closeErr := r.results.Close(); err == nil {
		err = closeErr // of the commit
	}
	return err
}

// coalesce decides a batch. Where it can, it first asks each key for the sum of its calls, which is quicker. Calls that this decides
// are told at once; _ratelimit_coalesce decides the rest.
func (c *Coalescer) coalesce(b *batch) error {
	sums := b.sums()
	ask := sums && !c.skipSums.Load()
	if ask {
		var answer dbsqlc.CoalesceRow
		err := c.once(b.flight.ctx, c.begin.Load(), func(db wire) (err error) {
			answer, err = b.consumeSums(b.flight.ctx, db)
			return err
		})
		switch {
		case retryable(err) || sqlState(err) == stateIsolation: // nothing was decided
			ask = false
		case err != nil:
			return err
		default:
			c.skipSums.Store(tooMany(len(b.groups)-len(answer.Ord), len(b.groups)))
			if len(answer.Ord) == 0 {
				break
			}
			others := b.keep(&answer)
			err := b.settle(&answer)
			if len(others) == 0 {
				return err
			}
			c.split(b, err, others)
		}
	}
	var row dbsqlc.CoalesceRow
	err := c.retry(b.flight.ctx, func(db wire) (err error) {
		row, err = db.queries().Coalesce(b.flight.ctx, b.args)
		return err
	})
	if err != nil {
		return err
	}
	err = b.settle(&row)
	if sums && !ask {
		c.skipSums.Store(tooMany(b.undecided(), len(b.groups)))
	}
	return err
}

// tooMany says whether to ask for sums does not pay if so many of the keys are left undecided. One in eight is an estimate, from
// what the two statements cost.
func tooMany(undecided, keys int) bool { return 8*undecided > keys }

package ratelimit

import (
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
// all or nothing. Unless there is a Pace, a call that meets no others goes straight to the pool, and nothing is delayed on
// purpose, but to let those who were just answered ask again. An idle Coalescer has no goroutines. At most two connections are in
// use.
//
// A row that another transaction has locked holds up all calls that share its statement. If the server's lock_timeout or
// statement_timeout ends that, they are decided again: each key by itself, and a call for several limits by itself. Only those for
// the locked row return the error. Until a statement for that key succeeds, its calls have one connection, and the others the
// second. (After eight errors in a row, all calls of the first statement return its error: the table is locked, say.
// After four, those do that share a limit with all that failed.)
//
// Without a timeout, the calls of the first statement, and later ones for its keys, wait until the row is free or their contexts are
// over. So set a lock_timeout on the sessions of a pool for the Coalescer alone (RuntimeParams["lock_timeout"] = "200ms", for
// example: transactions on it would fail with that, too), give each call a context with a deadline, and do not coalesce a limit
// that transactions consume and then stay open.
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
	queue   []*waiter     // in order of arrival, those that are decided again first; empty if flying is 0
	flying  int           // calls or batches at the database, or about to be
	due     time.Time     // with a Pace: when the next of them may begin
	closed  bool          // nothing is let in any more
	drained chan struct{} // made by Close, which waits for it; closed when flying is 0

	busy keySet // at the database. Each key is in one statement there: a second would only wait for the row
	held keySet // of calls for several keys that wait in the queue, and are not to be overtaken. It is as of the last look at it

	// A call is apart if it is decided again, or asks for a blamed key.
	blamed      keySet // the server has ended the last statement for this key alone: its row may be locked
	apartFlying bool   // a statement of calls that are apart is at the database; there is one at a time
	failures    int    // of these, each for a key that was not blamed yet, one after another
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
	// maxInFlight is how many calls or batches are at the database at once: while one commits, the next is on its way.
	maxInFlight = 2
	// maxBatch bounds the calls of a statement.
	maxBatch = 1024
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
	again  bool    // the server has ended its statement: it is decided apart, or returns err
	alone  bool    // and has done so again, of calls for one blamed key: it is decided by itself
	direct bool    // has been given a place to go by itself
	apart  bool    // that is the place of the calls that are apart
	left   bool    // does not wait any more
	flight *flight // of its statement; nil: none yet

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
	lone, blamed := asked.goesAlone(), c.blamed.has(asked.demands)
	if len(c.queue) == 0 {
		clear(c.held)
	}
	if c.flying < maxInFlight && !c.waits(asked.demands, blamed) && !c.held.has(asked.demands) {
		c.flying++
		if len(c.queue) == 0 && !blamed && (lone || c.takeTurn() == 0) {
			c.busy.add(asked.demands)
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
		if len(w.ds) > 1 || w.again { // others may have been held up by it alone
			c.fill()
		}
	default:
		w.left = true
		if f.waiting--; f.waiting == 0 {
			f.cancel()
		}
		return true, true
	}
	return true, false
}

// landed gives the place of a call that went by itself to those that wait.
func (c *Coalescer) landed(ctx context.Context, ds []demand, apart bool, err error) {
	over := ctx.Err() != nil // then an error says nothing of the keys
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy.remove(ds)
	c.apartFlying = c.apartFlying && !apart
	if err == nil || !over {
		c.judge(ds, apart, err)
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
			c.separate(b, nil)
		case timedOut(err) && b.shared() && b.flight.ctx.Err() == nil:
			c.separate(b, err)
		default:
			c.decided(b, err)
			b.flight.told.Wait() // so that those who have more to ask at once share the next statement
		}
		b.clear()
	}
	batches.Put(b)
}

// decided tells the waiters of a batch. Those that have left do not look.
func (c *Coalescer) decided(b *batch, err error) {
	c.observe(len(b.waiters), err)
	c.mu.Lock()
	if err == nil || !b.shared() && b.flight.ctx.Err() == nil { // else it was given up, and nothing is known
		for _, w := range b.waiters {
			c.judge(w.ds, b.apart, err)
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
	b.flight.waiting -= flight.waiting
	c.mu.Unlock()
	c.decided(b, err)
	b.clear()
	b.waiters, b.flight = append(b.waiters, others...), flight
	b.group()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vacate(b)
	c.occupy(b)
	c.fill()
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

package ratelimit

import (
	"context"
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

// Coalescer is a [DB] for many concurrent calls outside transactions. Calls that arrive while others are at the database
// are decided together, by one statement and one commit, or two (group commit for limits). Only Pool is required. A
// Coalescer must not be copied after its first use, nor its fields changed. Its methods are safe for concurrent use, also
// by different limiters. A struct that embeds a *Coalescer coalesces too.
//
// Nothing is approximate. [Limiter.Consume], [Limiter.Wait], [Limiter.Reserve] and [Limiter.Charge] are decided in order of
// arrival, with the result of a call on the pool. A call for several limits is all or nothing. (A call that waits for a
// locked row, or for a second statement, can be overtaken.) They use at most two connections, but for a denial of a
// calendar's old debt, which is asked again on the pool. A lone call goes straight to the pool. Limiters with a
// [Limiter.Clock] gain less.
//
// These calls share no statement. They go straight to the pool, in no order with the others, and use as many connections as it
// has: calls for a limit with [Shards]; [Limiter.Reserve] and [Limiter.Wait] for a window, and Reserve for several limits;
// [Limiter.Take], [Limiter.Check], [Limiter.Balance], [Limiter.Refund], [Limiter.Reset] and [Limiter.Move]. Many of them that wait
// for a locked row can take all connections of the pool.
//
// A row that another transaction has locked holds up all calls that share its statement. So use a pool of its own with a
// lock_timeout (RuntimeParams["lock_timeout"] = "200ms"), and give each call a context with a deadline. After the timeout,
// the calls are decided again, and only calls for the locked row return the error. Do not coalesce a limit that
// transactions consume and then stay open.
//
// Canceled while queued: nothing is consumed. Canceled after sending: [ErrUnknownOutcome]. Other calls are not affected. An
// error of the statement is returned to all its calls, and none is granted. A broken connection is [ErrUnknownOutcome]. A
// serialization failure or a deadlock is retried, up to 30 attempts: then the error matches [ErrAttemptsExhausted].
// docs/contention.md has the details.
type Coalescer struct {
	// Pool is where statements are sent. Required. The Coalescer does not own the pool: close the Coalescer first.
	Pool *pgxpool.Pool

	// AsyncCommit makes the Coalescer's transactions commit with synchronous_commit = off: they do not wait for the disk.
	// The default is the server's setting. If the server crashes, the consumption of its last moments is forgotten, up to
	// three times wal_writer_delay (0.6 s by default). Those tokens may be granted again.
	AsyncCommit bool

	// Pace is the least time between the starts of two statements, for floods. Then more calls share each statement, and
	// the processors have time for other work. The default, 0, is no pace. With 3 ms, there are at most 333 statements a
	// second, and a call, or [Coalescer.Close], waits up to 3 ms longer. After 3 ms without a statement, there is no wait.
	//
	// Calls that share no statement ignore the pace. So do retried statements, and statements for calls that the one before
	// could not decide. Do not combine Pace with a [Limiter.Clock]: calls at different instants are separate statements, and
	// each waits for the pace.
	Pace time.Duration

	// OnBatch, if not nil, is called for each statement that has decided calls, with the number of calls. A call that went
	// straight to the pool counts as 1. It is called by several goroutines at once, while the calls wait for their answers:
	// it should be quick. It must not use the Coalescer, which could wait for itself. It must not panic: no caller could
	// recover the panic, so the process would end.
	OnBatch func(calls int)

	begin    atomic.Bool // the database's default isolation level is not READ COMMITTED: use BEGIN
	skipSums atomic.Bool // sums would have decided too few keys of the last batch: send the next one to _ratelimit_coalesce at once

	calls sync.WaitGroup // calls, and places in use

	mu     sync.Mutex
	queue  []*waiter // in order of arrival, calls to be decided again first; empty if flying is 0
	flying int       // places in use: calls or batches at the database, or about to be sent
	due    time.Time // with a Pace: when the next one may begin
	closed bool      // no further calls are accepted

	busy keySet // keys at the database. Each is in one statement there: a second one would only wait for the row
	held keySet // keys of queued calls that must not be overtaken, as of the last scan of the queue

	// A call is apart if it is decided again, or asks for a blamed key. It shares no statement with other calls.
	blamed      keySet // the last statement for this key alone timed out: its row may be locked
	apartFlying bool   // a statement of calls that are apart is at the database; there is at most one
	failures    int    // of such statements in a row, each for a key that was not blamed yet
}

// coalescer lets coalescerOf find a Coalescer in a DB.
func (c *Coalescer) coalescer() *Coalescer { return c }

// Close waits until every call that has arrived is decided, however long the database takes, but not for a Wait that
// sleeps. Later calls of Consume, Wait, Reserve and Take return [ErrClosed]; a Charge goes straight to the pool. So close it after
// the last caller has returned, for example after http.Server.Shutdown, and before the pool.
func (c *Coalescer) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.calls.Wait()
}

// QueryRow sends the query straight to the pool.
func (c *Coalescer) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return c.Pool.QueryRow(ctx, sql, args...)
}

const (
	// maxInFlight is how many calls or batches are at the database at once: while one commits, the next is on its way.
	maxInFlight = 2
	// maxBatch bounds the calls of a statement.
	maxBatch = 1024
)

// SQLSTATEs with which the database refuses a batch.
const (
	stateSharded   = "RL002" // rows of shards have to be combined first
	stateIsolation = "RL003" // not a READ COMMITTED transaction
	stateForeign   = "RL004" // a guard (ratelimit_refuse) refused a key
)

// waiter is a call that waits for its decision.
type waiter struct {
	ds  []demand
	now pgtype.Timestamptz
	// done receives once the call is decided or, if direct is set, once it may be sent by itself.
	done chan struct{}

	// Guarded by Coalescer.mu.
	lone   bool    // its statement failed for a reason that other calls may not share: it is sent by itself
	again  bool    // its statement timed out: it is decided apart, or returns err
	alone  bool    // that timed out too, with calls for one blamed key: it is decided by itself
	direct bool    // it may be sent by itself
	apart  bool    // it is sent in the place for calls that are apart
	left   bool    // its caller no longer waits
	flight *flight // its statement; nil: none yet

	// The answer.
	err    error
	answer answer
}

// flight is one statement on its way to the database and back.
type flight struct {
	ctx     context.Context
	cancel  context.CancelFunc
	waiting int            // callers that wait for it; guarded by Coalescer.mu
	decided bool           // guarded by Coalescer.mu
	told    sync.WaitGroup // once it is decided: callers that do not have their answer yet
}

// newFlight puts waiters on a flight, including waiters that have left. Coalescer.mu is held.
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

// decide decides a call: at once if a place at the database is free, or else together with other calls in the queue. A call
// that shares no statement needs no place.
func (c *Coalescer) decide(ctx context.Context, asked *call, result *Result) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		if asked.does.settles {
			return c.send(ctx, asked, result)
		}
		return fmt.Errorf("the Coalescer is %w", ErrClosed)
	}
	c.calls.Add(1)
	defer c.calls.Done()
	if asked.goesAlone() {
		c.mu.Unlock()
		return c.send(ctx, asked, result)
	}
	blamed := c.blamed.has(asked.demands)
	if len(c.queue) == 0 {
		clear(c.held)
	}
	if c.flying < maxInFlight && !c.waits(asked.demands, blamed) && !c.held.has(asked.demands) {
		c.takePlace()
		if len(c.queue) == 0 && !blamed && c.takeTurn() == 0 {
			c.busy.add(asked.demands)
			c.mu.Unlock()
			return c.direct(ctx, asked, result, false)
		}
		go c.flush()
	}
	w := waiters.Get().(*waiter)
	w.ds, w.now = asked.demands, asked.now
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
	unsure := false
	if err == nil && !direct {
		if unsure = asked.unsure(&w.answer); !unsure {
			result.fill(asked, &w.answer)
		}
	}
	*w = waiter{done: w.done}
	waiters.Put(w)
	if direct {
		return c.direct(ctx, asked, result, apart)
	}
	if flight != nil {
		flight.told.Done()
	}
	if unsure {
		asked.lookBack()
		return c.send(ctx, asked, result)
	}
	return err
}

// leave takes a waiter out, unless it is decided or has a place. sent says that its statement is at the database. When the
// last waiter of a statement leaves, the statement is canceled.
func (c *Coalescer) leave(w *waiter) (left, sent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch f := w.flight; {
	case w.direct || f != nil && f.decided:
		return false, false
	case f == nil:
		c.queue = slices.DeleteFunc(c.queue, func(other *waiter) bool { return other == w })
		if len(w.ds) > 1 || w.again { // others may have waited for this one alone
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

// landed gives the place of a call that was sent by itself to the queue.
func (c *Coalescer) landed(ctx context.Context, ds []demand, apart bool, err error) {
	over := ctx.Err() != nil // then an error says nothing about the keys
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

// takePlace takes a place. c.mu is held, and c is not closed or has calls.
func (c *Coalescer) takePlace() {
	c.flying++
	c.calls.Add(1)
}

// release gives up a place. c.mu is held.
func (c *Coalescer) release() {
	c.flying--
	c.calls.Done()
}

// flush decides queued calls until none is ready.
func (c *Coalescer) flush() {
	b := batches.Get().(*batch)
	for c.next(b) {
		b.group()
		err := c.coalesce(b)
		switch state := sqlState(err); {
		case ofSomeCalls(state):
			c.separate(b, nil)
		case timedOut(err) && b.shared() && b.flight.ctx.Err() == nil:
			c.separate(b, err)
		default:
			c.decided(b, err)
			b.flight.told.Wait() // so that callers that ask again at once share the next statement
		}
		b.clear()
	}
	batches.Put(b)
}

// ofSomeCalls reports whether an error may be due to some of a statement's calls, and the others would be decided without
// them: rows to combine first, a key of another server, a text that the server cannot store, or what a trigger or a policy
// of the application raises, with whatever SQLSTATE. Nothing was decided. Errors of the connection, the server, the schema
// or the isolation level are those of every call.
func ofSomeCalls(state string) bool {
	if len(state) != 5 || state == "55P03" || state == stateIsolation || state == "40003" { // see timedOut; statement_completion_unknown
		return false
	}
	switch state[:2] {
	case "42":
		return state == "42501" // a policy may refuse a key
	case "08", "25", "28", "3D", "3F", "53", "57", "58", "F0", "XX":
		return false
	}
	return true
}

// decided gives the waiters of a batch their answers. Waiters that have left do not read them.
func (c *Coalescer) decided(b *batch, err error) {
	c.observe(len(b.waiters), err)
	c.mu.Lock()
	if err == nil || !b.shared() && b.flight.ctx.Err() == nil { // else it was canceled, and nothing is known
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

// split answers the waiters of a batch, and makes a batch of the others, which the statement did not decide. The others
// change flights first: they could not leave a flight that counts as decided.
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

// direct sends one call by itself, in the place that it has.
func (c *Coalescer) direct(ctx context.Context, asked *call, result *Result, apart bool) (err error) {
	defer func() { c.landed(ctx, asked.demands, apart, err) }()
	return c.send(ctx, asked, result)
}

// send sends one call as a statement of its own.
func (c *Coalescer) send(ctx context.Context, asked *call, result *Result) error {
	err := c.retry(ctx, func(db wire) error {
		return asked.ask(ctx, db, result)
	})
	c.observe(1, err)
	return err
}

// observe reports a statement to OnBatch.
func (c *Coalescer) observe(calls int, err error) {
	if err == nil && c.OnBatch != nil {
		c.OnBatch(calls)
	}
}

// retry runs a statement in a transaction of its own, again after a serialization failure or a deadlock.
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

// once runs a statement in a transaction of its own. With begin, it is an explicit READ COMMITTED transaction.
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

// asyncCommit lasts until the end of the transaction.
const asyncCommit = "SELECT set_config('synchronous_commit', 'off', true)"

// asyncDB sends asyncCommit before a statement, in the same round trip and implicit transaction.
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

// coalesce decides a batch. If it can, it first asks for the sum of each key's calls, which is faster. Calls that this
// decides are answered at once. _ratelimit_coalesce decides the rest.
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

// tooMany reports whether sums do not pay, because they leave so many of the keys undecided. One in eight is an estimate
// from the costs of the two statements.
func tooMany(undecided, keys int) bool { return 8*undecided > keys }

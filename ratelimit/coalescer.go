package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/inschema"
)

// Coalescer is a [DB] for many concurrent calls outside transactions. Calls that arrive while others are at the
// database are decided together, exactly, mostly by one statement and one commit. It must not be copied after its first
// use, nor its fields changed. It is safe for concurrent use.
//
// These calls share no statement, and use as many connections as the pool has: those for a limit with [Shards];
// [Limiter.Reserve] and [Limiter.Wait] for a window, and Reserve for several limits; all verbs but Consume, Wait,
// Reserve and Charge. The others use at most two, with Ahead three.
//
// A row that another transaction has locked holds up all calls that share its statement. So use a pool of its own with
// a lock_timeout, and give each call a context with a deadline.
//
// Canceled while queued: nothing is consumed. Canceled after sending, or a broken connection: [ErrUnknownOutcome]. Any
// other error of the statement is returned to all its calls, and none is granted; after 30 attempts to serialize it,
// [ErrAttemptsExhausted]. docs/contention.md has the details.
type Coalescer struct {
	// Pool is where statements are sent. Required. Close the Coalescer first.
	Pool *pgxpool.Pool

	// AsyncCommit lets commits not wait for the disk (synchronous_commit = off; the default is the server's setting). A
	// crash of the server may grant again what was taken in the last three times wal_writer_delay, 0.6 s by default.
	AsyncCommit bool

	// Pace is the least time between the starts of two statements, for floods. The default, 0, is no pace. It is 0.1 ms
	// to 10 s; anything else is [ErrInvalid], at the first call. Calls that share no statement ignore it. Do not
	// combine it with a [Limiter.Clock].
	Pace time.Duration

	// Ahead lets a statement take tokens for calls that are still to come, which are then granted in memory. The
	// default, 0, is off. It is 1 ms to 1 s; anything else is [ErrInvalid] at the first call, as is AsyncCommit beside
	// it.
	//
	// A token bucket then grants at most capacity + rate × (T + Ahead) in any span T. What is not used in time comes
	// back, of a bucket less what the rate has refilled. It is lost if the process dies, or if an answer is lost or
	// takes longer than a second and 3 × Ahead. Denials are remembered, and other processes' Reset or Block is not
	// seen, for at most Ahead. It is for Consume of whole tokens.
	Ahead time.Duration

	// OnBatch, if not nil, is called for each statement that has decided calls, with their number. A call that went
	// straight to the pool counts as 1. With Ahead, calls decided in memory since are included. It is called by several
	// goroutines at once: it should be quick, must not use the Coalescer, and must not panic.
	OnBatch func(calls int)

	begin    atomic.Bool // the database's default isolation level is not READ COMMITTED: use BEGIN
	skipSums atomic.Bool // sums would have decided too few keys of the last batch: send the next one to ratelimit._coalesce at once

	calls sync.WaitGroup // calls, and goroutines that send batches

	mu       sync.Mutex
	closed   bool // no further calls are accepted
	serves   bool // it has been called
	schema   string
	schedule schedule

	memory memory // with Ahead
}

// The bounds of a pace: any statement is longer than the least.
const (
	leastPace = 100 * time.Microsecond
	mostPace  = 10 * time.Second
)

// coalescer lets coalescerOf find a Coalescer in a DB.
func (c *Coalescer) coalescer() *Coalescer { return c }

// Close waits until every call that has arrived is decided, but not for a Wait that sleeps, and then gives back what is
// ahead. If ctx ends before, the error matches ctx's, and the rest goes on in the background. Later calls of Consume,
// Wait, Reserve and Take return [ErrClosed]. Close it after the last caller, before the Limiter and the pool.
func (c *Coalescer) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		c.calls.Wait()
		c.closeAhead()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		return fmt.Errorf("ratelimit: close: %w: calls have not been decided, or what is ahead has not come back", over(ctx))
	}
	if err := c.memory.lost; err != nil {
		return fmt.Errorf("ratelimit: close: what was ahead may be lost: %w", inner{err})
	}
	return nil
}

// QueryRow sends the query straight to the pool.
func (c *Coalescer) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return c.Pool.QueryRow(ctx, sql, args...)
}

// goesAlone reports whether the call can share no statement with others.
func (c *call) goesAlone() bool {
	return sharded(c.demands) || c.reserves() || c.does.upTo || c.tooMuch()
}

// SQLSTATEs with which the database refuses a batch.
const (
	stateSharded   = "RL002" // rows of shards have to be combined first
	stateIsolation = "RL003" // not a READ COMMITTED transaction
	stateForeign   = "RL004" // a guard (ratelimit.refuse) refused a key
)

// join decides a call: at once if a place at the database is free, or else together with other calls in the queue. A call
// that shares no statement needs no place.
func (c *Coalescer) join(ctx context.Context, asked *call, result *Result) error {
	if _, err := inschema.Text("", asked.schema); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if c.Pace != 0 && (c.Pace < leastPace || c.Pace > mostPace) {
		return fmt.Errorf("%w: a Coalescer's Pace of %v is not between %v and %v (a bare number in Go is nanoseconds)", ErrInvalid, c.Pace, leastPace, mostPace)
	}
	foreseeable, queued := false, false
	if c.Ahead != 0 {
		if err := c.checkAhead(); err != nil {
			return err
		}
		if foreseeable = ctx.Err() == nil && c.memory.foreseeable(asked); foreseeable {
			var decided bool
			if decided, queued = c.recall(asked, result); decided {
				return nil
			}
		}
	}
	c.mu.Lock()
	if !c.serves {
		c.serves, c.schema = true, asked.schema
	}
	if !inschema.Same(c.schema, asked.schema) {
		c.mu.Unlock()
		return fmt.Errorf("%w: a Coalescer serves the limits of one schema", ErrInvalid)
	}
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
	w := c.schedule.arrive(asked.demands, asked.now, queued, c.now(), c.Pace)
	c.startAndUnlock()
	if w == nil {
		sent := c.memory.now()
		err := c.direct(ctx, asked, result, false)
		if foreseeable && err == nil {
			c.learn(asked, asked.answered, sent)
		}
		return err
	}

	select {
	case <-w.done:
	case <-ctx.Done():
		c.mu.Lock()
		left, sent := c.schedule.leave(w)
		c.startAndUnlock()
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
			asked.fillRows(result, &w.answer)
			if foreseeable {
				c.learn(asked, &w.answer, flight.sent)
			}
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

// startAndUnlock starts the place that the schedule has taken, if any, and unlocks. Every event of the schedule ends with it: a
// plain Unlock would leave that place unused.
func (c *Coalescer) startAndUnlock() {
	if c.schedule.start {
		c.schedule.start = false
		c.calls.Go(c.flush)
	}
	c.mu.Unlock()
}

// now is the present time, which only a pace needs.
func (c *Coalescer) now() (now time.Time) {
	if c.Pace > 0 {
		now = time.Now()
	}
	return now
}

// flush decides queued calls until none is ready.
func (c *Coalescer) flush() {
	b := batches.Get().(*batch)
	for c.next(b) {
		extras := c.askAhead(b)
		b.group()
		err := c.coalesce(b)
		c.takeAhead(b, extras, err)
		c.landed(b, err, nil)
		b.flight.told.Wait() // so that callers that ask again at once share the next statement
		b.clear()
	}
	batches.Put(b)
}

// next asks the schedule for the next batch, and waits for its turn.
func (c *Coalescer) next(b *batch) bool {
	for {
		c.mu.Lock()
		send, wait := c.schedule.next(b, c.now(), c.Pace)
		c.startAndUnlock()
		if wait == 0 {
			return send
		}
		time.Sleep(wait)
	}
}

// landed gives the waiters of a batch their answers, unless they are queued again, and returns the flight of the others, if any.
// Waiters that have left do not read their answers.
func (c *Coalescer) landed(b *batch, err error, others []*waiter) *flight {
	c.reportBatch(b.calls(), err)
	c.mu.Lock()
	again, flightOfOthers := c.schedule.landed(b, err, others)
	c.startAndUnlock()
	b.flight.cancel()
	if again {
		return nil
	}
	for _, w := range b.waiters {
		w.err = err
		w.done <- struct{}{}
	}
	return flightOfOthers
}

// split answers the waiters of a batch, and makes a batch of the others, which the statement did not decide.
func (c *Coalescer) split(b *batch, err error, others []*waiter) {
	flight := c.landed(b, err, others)
	b.clear()
	b.waiters, b.flight = append(b.waiters, others...), flight
	b.group()
}

// direct sends one call by itself, in the place that it has.
func (c *Coalescer) direct(ctx context.Context, asked *call, result *Result, apart bool) (err error) {
	ended := false
	defer func() { // also if the context is the caller's own and panics
		c.mu.Lock()
		c.schedule.landedAlone(asked.demands, apart, ended, err)
		c.startAndUnlock()
	}()
	err = c.send(ctx, asked, result)
	ended = ctx.Err() != nil // not later: it may need the Coalescer, and it may end while this waits for the lock
	return err
}

// send sends one call as a statement of its own.
func (c *Coalescer) send(ctx context.Context, asked *call, result *Result) error {
	err := c.commit(ctx, func(db wire) error {
		return asked.ask(ctx, db, result)
	})
	c.reportBatch(1, err)
	return err
}

// reportBatch reports a statement to OnBatch, with what memory has decided since the one before.
func (c *Coalescer) reportBatch(calls int, err error) {
	if err != nil || c.OnBatch == nil {
		return
	}
	if c.Ahead != 0 {
		calls += int(c.memory.unreported.Swap(0))
	}
	if calls > 0 {
		c.OnBatch(calls)
	}
}

// commit runs a statement in a transaction of its own, again after a serialization failure or a deadlock.
func (c *Coalescer) commit(ctx context.Context, statement func(db wire) error) error {
	for attempt := 1; ; attempt++ {
		begin := c.begin.Load()
		err := c.attempt(ctx, begin, statement)
		if sqlState(err) == stateIsolation && !begin {
			c.begin.Store(true)
			continue
		}
		switch {
		case err == nil || !retryable(err):
			return err
		case attempt == defaultAttempts:
			return exhausted(attempt, err)
		case !backOff(ctx, attempt):
			return exhausted(attempt, fmt.Errorf("%w; the last attempt: %w", over(ctx), err))
		}
	}
}

// attempt runs a statement in a transaction of its own. With begin, it is an explicit READ COMMITTED transaction.
func (c *Coalescer) attempt(ctx context.Context, begin bool, statement func(db wire) error) error {
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
			err := statement(wire{tx, c.schema, false})
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
	return statement(wire{db, c.schema, true})
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
// decides are answered at once. ratelimit._coalesce decides the rest.
func (c *Coalescer) coalesce(b *batch) error {
	sums := b.sums()
	ask := sums && !c.skipSums.Load()
	if ask {
		var answer dbsqlc.CoalesceRow
		err := c.attempt(b.flight.ctx, c.begin.Load(), func(db wire) (err error) {
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
			err := b.answerAll(&answer)
			if len(others) == 0 {
				return err
			}
			c.split(b, err, others)
		}
	}
	var row dbsqlc.CoalesceRow
	err := c.commit(b.flight.ctx, func(db wire) (err error) {
		row, err = db.queries().Coalesce(b.flight.ctx, b.args)
		return err
	})
	if err != nil {
		return err
	}
	err = b.answerAll(&row)
	if sums && !ask {
		c.skipSums.Store(tooMany(b.undecided(), len(b.groups)))
	}
	return err
}

// tooMany reports whether sums do not pay, because they leave so many of the keys undecided. One in eight is an estimate
// from the costs of the two statements.
func tooMany(undecided, keys int) bool { return 8*undecided > keys }

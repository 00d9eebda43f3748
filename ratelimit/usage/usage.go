// Package usage records in the database what was granted and denied, for operators who have only psql, and for
// dashboards. A denial leaves no row by itself.
//
//	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
//		Program: "shop", Limits: []ratelimit.Limit{signUps}, Usage: &usage.Recorder{DB: pool},
//	})
//
// Without [ratelimit.Open], set the Observer of a Limiter to [Recorder.Observe], and call [Recorder.Run] in the background.
//
// A [Recorder] adds up, in the process, and writes the sums every ten seconds, to two tables of package migrations. Two
// functions read them:
//
//	SELECT * FROM ratelimit.usage('sendMessage', since => now() - interval '3 hours')   -- minute by minute
//	SELECT * FROM ratelimit.denials('sendMessage', since => now() - interval '3 hours') -- the most denied keys
//
// With Open, Options.Observer is a second observer, such as one of package observe. Without, Join of package observe joins two.
// A Recorder that is Options.Usage and an observer, too, counts twice.
//
// These are statistics. No decision depends on them, and no call waits for them. A process that is killed loses the counts
// of its last ten seconds.
package usage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/ratelimit"
)

// Defaults of a [Recorder].
const (
	DefaultEvery = 10 * time.Second
	DefaultKeep  = 30 * 24 * time.Hour
)

// Bounds of a Recorder. Their text is in its comment.
const (
	maxLimits  = 1000 // names
	maxMinutes = 60   // of each limit, that wait to be written
	maxHours   = 2    // likewise
	maxKeys    = 256  // denied keys of each limit and hour that are counted
	maxWorst   = 100  // of these, written by each flush

	// A flush is several statements if there are more rows.
	maxRows = 1000 // of ratelimit.usage, give or take one limit's
	maxKept = 5000 // of ratelimit.denials, likewise

	flushTimeout = 5 * time.Second
	sweepAtLeast = time.Hour // how often rows are deleted if there is nothing to write
)

// others is the name for limits beyond maxLimits.
const others = "(others)"

// Recorder counts decisions and writes the counts to the database. Only DB is required. A Recorder is safe for concurrent
// use. After its first use, it must not be copied, nor its fields changed. Use one for each schema, by all limiters of the
// process: a flush for another schema than the first is an error that matches [ratelimit.ErrInvalid].
//
// It counts each request of a call, by limit and by the minute of [ratelimit.Result.At]:
//
//   - Consume, Take, Reserve, Wait, Hold and Once: requests that were granted, that were denied, and that failed: the database failed, or
//     the request was invalid or above the capacity. Canceled calls, such as a Wait that was given up, and transactions that have
//     to run again (SQLSTATE 40001 and 40P01) are not failures. In a denied call, requests that would have been granted are not
//     counted. Nor is a Hold or a Once whose id is known.
//   - The tokens taken, by Charge, by Settle and by a Wait that was given up as well, and the tokens refunded, by Settle and Release as well.
//   - How long the granted work has to wait, for reservations and Wait.
//
// Check and Reset are not counted. In a transaction, a decision is counted when it is made, and stays counted if the
// transaction rolls back or runs again. The counts agree with the calls exactly, except as the next paragraph says.
//
// If a flush fails, its counts are kept for the next one, up to 60 minutes with calls of each limit; older ones are dropped.
// If the outcome of a flush is unknown, since no answer came, its counts are dropped: nothing is counted twice, and one
// flush may be missing. OnError is told of both.
//
// Of each limit, the most denied keys are found with 256 counters (Space-Saving by Metwally, Agrawal and El Abbadi, 2005).
// Up to 256 denied keys between two flushes are counted exactly. Among more, a key with more than 1/256 of the denials is
// found, and its number is a lower bound. The 100 worst keys of each limit and hour are stored. So a flood of keys costs
// little memory and few rows. At most 1,000 limits are told apart. Those beyond are counted together, without keys, as a
// limit "(others)".
type Recorder struct {
	// DB is a pool: a *pgxpool.Pool, [ratelimit.SQL] of a *sql.DB, or a [ratelimit.Coalescer], whose pool is used. Required.
	// A connection or a transaction is [ratelimit.ErrInvalid]. Its role needs SELECT, INSERT, UPDATE and DELETE on ratelimit.usage and ratelimit.denials. A flush uses one
	// connection, and waits for 2 seconds at most for a row that another transaction has locked.
	DB ratelimit.DB

	// Schema is that of [ratelimit.Limiter]. With [ratelimit.Open], that of its Options counts, and another one here is an error.
	Schema string

	// Every is the time from one flush to the next. 0: DefaultEvery, 10 seconds. Less than 1 ms is an error.
	Every time.Duration

	// Keep is how long rows are kept, a minute at least. 0: DefaultKeep, 30 days. Flushes delete older rows, of all limits and programs: the
	// shortest Keep of all programs counts. A flush deletes 1,000 rows of each table and some more, so that a shorter Keep
	// takes effect little by little.
	Keep time.Duration

	// HashKey converts a denied key before it is stored, for example into an HMAC, since keys may be personal data. It is
	// called during flushes. nil: keys are stored as in ratelimit.limits.
	HashKey func(key string) string

	// OnError is called by Run for each flush that failed, and when counts were dropped. nil: the error is logged by
	// slog.Default().
	OnError func(err error)

	limits   atomic.Pointer[map[string]*limit] // by name; copied to be changed
	growing  sync.Mutex                        // held to add a limit
	dropped  atomic.Int64                      // requests that were not recorded, and of which nobody was told yet
	flushing sync.Mutex                        // held by a flush
	swept    time.Time                         // the last flush that was answered; guarded by flushing
	schema   string                            // of the first flush; guarded by flushing
}

// Run writes the counts every [Recorder.Every] until ctx ends, and once more then. The last flush takes at most 5 seconds,
// as does each. If a row is locked for 2 seconds, the last flush is tried once more. Run returns the error of the last
// flush, or an error that matches [ratelimit.ErrInvalid] at once if a field is invalid. Let the program wait for Run before
// it closes the pool, and end ctx after the last call of a limiter.
func (r *Recorder) Run(ctx context.Context) error {
	if err := r.Validate(); err != nil {
		return err
	}
	every := r.Every
	if every == 0 {
		every = DefaultEvery
	}
	next := time.NewTimer(rand.N(every)) // processes that start together do not flush together
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			err := r.flushInTime(ctx, true)
			r.tell(err)
			return err
		case <-next.C:
			next.Reset(every)
			r.tell(r.flushInTime(ctx, false))
		}
	}
}

// flushInTime flushes although ctx may have ended or may end: an interrupted flush would lose its counts.
func (r *Recorder) flushInTime(ctx context.Context, last bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	err := r.Flush(ctx)
	if last && sqlState(err) == "55P03" { // a locked row, and no later flush will write what is kept
		err = r.Flush(ctx)
	}
	return err
}

func (r *Recorder) tell(err error) {
	if n := r.dropped.Swap(0); n > 0 {
		err = errors.Join(err, fmt.Errorf("usage: %d requests are missing in ratelimit.usage: their flush was not answered, or the database was away for too long", n))
	}
	switch {
	case err == nil:
	case r.OnError != nil:
		r.OnError(err)
	default:
		slog.Warn("rate limits: usage was not recorded", slog.Any("error", visible.Error(err)))
	}
}

// Validate returns an error that matches [ratelimit.ErrInvalid] if a field is invalid, or nil. [ratelimit.Open], [Recorder.Run]
// and [Recorder.Flush] call it. It sends nothing.
func (r *Recorder) Validate() error {
	coalescer, coalesces := r.DB.(*ratelimit.Coalescer)
	switch {
	case handles.IsNil(r.DB), coalesces && coalescer.Pool == nil:
		return fmt.Errorf("%w: the DB of a usage.Recorder is nil: set it to a pool", ratelimit.ErrInvalid)
	case handles.IsOne(r.DB):
		return fmt.Errorf("%w: the DB of a usage.Recorder is a %s, which cannot be used beside other work: set it to a pool", ratelimit.ErrInvalid, handles.Type(r.DB))
	case r.Schema != "" && inschema.Check(r.Schema) != nil:
		return fmt.Errorf("%w: Schema of a usage.Recorder: %w", ratelimit.ErrInvalid, inschema.Check(r.Schema))
	case r.Every != 0 && r.Every < time.Millisecond:
		return fmt.Errorf("%w: Every of a usage.Recorder is %v: it must be 1ms or more, or 0 for %v (a bare number in Go is nanoseconds)", ratelimit.ErrInvalid, r.Every, DefaultEvery)
	case r.Keep != 0 && r.Keep < time.Minute: // older rows of everybody are deleted
		return fmt.Errorf("%w: Keep of a usage.Recorder is %v: it must be a minute or more, or 0 for %v (a bare number in Go is nanoseconds)", ratelimit.ErrInvalid, r.Keep, DefaultKeep)
	}
	return nil
}

// sqlState is the SQLSTATE in an error's chain, or empty.
func sqlState(err error) string {
	if sqlErr := (interface{ SQLState() string })(nil); errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

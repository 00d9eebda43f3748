package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Limiter decides requests. [Open] makes one for a program, with everything that belongs to it. The zero value is ready, too: it
// uses the database's clock, and has no observer, no overrides and nothing in the background. A Limiter is safe for concurrent use.
// After its first use, it must not be copied, nor its fields changed.
//
// The verbs are [Limiter.Consume], [Limiter.Wait], [Limiter.Reserve], [Limiter.Take], [Limiter.Check], [Limiter.Balance],
// [Limiter.Charge], [Limiter.Refund], [Limiter.Reset], [Limiter.Move], [Limiter.ConsumeEach], [Limiter.Pause],
// [Limiter.Resume], [Limiter.Hold], [Limiter.Settle], [Limiter.Release] and [Limiter.Once]; [Limiter.During] holds while a function runs. They take one request or several, but Wait takes
// one, and Move two. It is one statement, and one round trip unless the driver needs more. Outside a transaction, Consume and Charge of one
// limit are a plain UPDATE, and a second statement if that takes nothing: at a denial or a first use.
//
// [Limiter.Override], [Limiter.Block], [Limiter.Restore] and [Limiter.Unblock] write down what people decide about a limit. They need a Limiter of
// Open: any other follows no overrides, and is not bound by what they say.
//
// A denial, by Consume, Wait, Reserve, Take, Check, Hold, During or Once, is a [*DeniedError]. Every other error matches [ErrInvalid], [ErrExceedsCapacity],
// [ErrClosed], [ErrAttemptsExhausted] (of a [Coalescer]), [ErrHoldLost] (of Settle, Release and During) or [ErrUnknownOutcome], or is the error of the database or
// the context. Except for ErrUnknownOutcome and errors of Reset, Move, Pause, Resume and During, an error means that
// nothing was consumed or given back. A canceled Wait may not get all tokens back, as its comment says.
//
// A Limiter remembers the definition of each name. Another definition of that name is [ErrInvalid], since both would grant, or
// one would cut what the other has saved up. The numbers of a key, by [Limit.With], and overrides are no other definition. To
// change a definition while the process runs, make a new Limiter. Only the first 1,000 names are remembered.
type Limiter struct {
	// Clock tells the time, for tests and replays. It is called by several goroutines at once. Its time must stay between
	// the years 1000 and 9999. If Clock is nil, the time is that of the database, the one clock that all
	// processes share.
	Clock func() time.Time

	// Schema is where package migrations has made the limiter's tables and functions. "" is ratelimit. Another name has at most 51 bytes of
	// letters, digits, spaces, _ and -: anything else is [ErrInvalid]. A [Coalescer] serves one schema: a call for another is ErrInvalid.
	Schema string

	// Observer is called after every call of a verb, before the call returns, with its outcome: for metrics, logs and
	// alarms. Package observe has Join, which makes one of several. A denial leaves no row that could be looked up later. Check can report a denial
	// too: look at the Verb, and do not count it, since a check refuses nothing.
	//
	// In a transaction, the decision holds only if the transaction commits. If a transaction is run again, the calls of
	// each attempt are reported. Package observe, a module of its own, has metrics and logs for this field.
	//
	// Observer is called by several goroutines at once, possibly while the transaction holds the lock of the limit's row.
	// It should be quick, and must not use the transaction. It must not panic: for a call by QueueConsume on a pool's
	// batch, pgx would not give the connection back.
	Observer func(ctx context.Context, d Decision)

	// OnRetry is called when [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] or [Limiter.Retry] is about to try again: after
	// which attempt, where 1 is the first, and its error, a serialization failure or a deadlock. It is called by several goroutines at once.
	OnRetry func(ctx context.Context, attempt int, err error)

	queues      queues // for hot limits
	renewals    renewals
	waits       waits // for a hold
	definitions definitions
	overrides   *overrides // nil: none are followed
	life        *life      // nil: Open did not make it
}

// Decision describes one call of a verb, for [Limiter.Observer].
type Decision struct {
	// Verb is the verb that was called: "consume" (QueueConsume and ConsumeEach too), "wait", "reserve", "take", "check", "balance", "charge",
	// "refund", "reset", "move", "pause", "resume", "hold", "settle", "release" or "once". A During is its "hold", "settle" and "release". A Wait is reported when it ends. If its ctx ended, its "refund" is reported before.
	Verb string

	// Result is the caller's result. For Reset, Move, Pause and Resume, and if Err is set and is not a *DeniedError, its requests hold only Limit,
	// Key and Count. That of a Wait whose ctx ended has Taken and Delay, too.
	Result Result
	Err    error // the caller's error

	// Took is the time of the call, including the wait for transactions that hold the row. For the first statement in InTx,
	// it also includes BEGIN and, with Hot, the wait for the turn in the database. A Wait's sleep is not in it.
	Took time.Duration
}

// now is the time of [Limiter.Clock]; NULL: there is none, and that of the database counts.
func (l *Limiter) now() (now pgtype.Timestamptz, err error) {
	if l.Clock != nil {
		now, err = timestamp("the clock's time", l.Clock())
	}
	return now, err
}

// observe reports a call to the observer.
func (l *Limiter) observe(ctx context.Context, v verb, took time.Duration, result Result, err error) {
	if l.Observer != nil {
		l.Observer(ctx, Decision{Verb: string(v), Result: result, Err: err, Took: took})
	}
}

package ratelimit

import (
	"context"
	"time"
)

// Limiter decides requests. The zero value is ready to use: with the database's clock, and nobody observing. A Limiter is
// safe for concurrent use; once it is used it must not be copied, nor its fields be changed.
//
// A Limiter remembers how each limit refills. A limit of the same name with another kind, period or [Start] is an error that matches
// [ErrInvalid], since both would grant. Plans of one name may differ in rate, capacity, maxReserved and shards. To change how a limit
// refills while the process runs, make a new Limiter. After 1,000 names, further ones are not remembered.
//
// The verbs are [Limiter.Consume], [Limiter.Check], [Limiter.Charge], [Limiter.Refund] and [Limiter.Reset]. Each takes one
// request or several, and is one statement and, where the driver needs no more, one round trip. Their errors match [ErrInvalid],
// [ErrExceedsCapacity], [ErrClosed], [ErrAttemptsExhausted] (of a [Coalescer]) or [ErrUnknownOutcome], or are the database's or the context's; a denial, by Consume or
// Check, is an [*DeniedError]. But for ErrUnknownOutcome, and Reset, an error means that nothing was consumed or given back.
type Limiter struct {
	// Clock tells the time, for tests and replays; it may be called from several goroutines at once. nil is the database's
	// clock_timestamp(), the one clock that all processes share. It must stay between the years 1000 and 9999.
	Clock func() time.Time

	// Observer is called after every call of a verb, before it returns, with what came of it: for metrics, logs, alarms. A
	// denial leaves no row behind that one could look up later. Check's error may be a denial as well: look at the Verb, and
	// do not count it as one, since nothing was refused to anybody. In a transaction the decision holds only if that commits; where
	// one is run again, each attempt's calls are told. Package observe, a module of its own, has metrics and logs to put here.
	//
	// It is called from several goroutines at once, and while the transaction may hold the lock of the limit's row: it should
	// be quick, and must not use the transaction. Nor should it panic: of a call by QueueConsume on a pool's batch, pgx would not
	// give the connection back.
	Observer func(ctx context.Context, d Decision)

	// OnRetry is called when [Limiter.InTx], [Limiter.InSQLTx] or [Limiter.SendTx] is about to run a transaction again: so many
	// attempts have failed, the last with err. It is called from several goroutines at once.
	OnRetry func(ctx context.Context, failed int, err error)

	queues      queues // for hot limits
	definitions definitions
}

// Decision is what an observer is told.
type Decision struct {
	Verb Verb

	// Result is the caller's. If Err is set and no *DeniedError, and for reset, its requests hold only Limit, Key and
	// Count.
	Result Result
	Err    error // the caller's

	// Took is the time of the call, with the wait for other transactions that hold the row; first in InTx, also BEGIN and, with
	// Hot, the wait for the turn in the database.
	Took time.Duration
}

// observe tells the observer what came of a call.
func (l *Limiter) observe(ctx context.Context, v Verb, began time.Time, result Result, err error) {
	if l.Observer != nil {
		l.Observer(ctx, Decision{Verb: v, Result: result, Err: err, Took: time.Since(began)})
	}
}

package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Limiter decides requests. [Open] makes one for a program. The zero value is ready, too: it has no observer, no
// overrides and nothing in the background. A Limiter is safe for concurrent use; after its first use, it must not be
// copied, nor its fields changed.
//
// A denial is a [*DeniedError]. The table at [ErrDenied] says which verb returns which errors, and what was consumed
// then.
//
// A Limiter remembers the definitions of the first 1,000 names. Another definition of a name is [ErrInvalid]; numbers
// by [Limit.With] and overrides are none.
type Limiter struct {
	// Clock tells the time, between the years 1000 and 9999, for tests and replays. It is called by several goroutines
	// at once. nil: the database's. A removed override ends at the database's time.
	Clock func() time.Time

	// Schema is where package migrations has made the tables and functions. "" is ratelimit. Another name has at most
	// 51 bytes of letters, digits, spaces, _ and -, or is [ErrInvalid], as is a call on a [Coalescer] that serves
	// another schema.
	Schema string

	// Observer is called after every call of a verb, before the call returns: for metrics and logs (package observe).
	// In a transaction, the decision holds only if that commits, and the calls of each attempt are reported. A Check
	// refuses nothing: do not count its denials.
	//
	// It is called by several goroutines at once: it should be quick, must not use the transaction, and must not panic.
	Observer func(ctx context.Context, d Decision)

	// OnRetry is called when [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] or [Limiter.Retry] is about to try
	// again: after which attempt, from 1, and its error. It is called by several goroutines at once.
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
	// Verb is the verb that was called, as its method in lower case. QueueConsume and ConsumeEach are "consume". A
	// During is its "hold", "settle" and "release". A Wait is reported when it ends, after its "refund" if its ctx
	// ended.
	Verb string

	// Result is the caller's result. If nothing was decided, its requests hold only Limit, Key and Count, and of a Wait
	// whose ctx ended Taken and Delay. Of a Release that found nothing, Remaining is NaN: not known.
	Result Result
	Err    error // the caller's error

	// Took is the time of the call, without a Wait's sleep. The first statement in InTx includes BEGIN and the
	// database's wait for a turn.
	Took time.Duration

	// Ahead reports whether a [Coalescer] with Ahead decided the call in memory.
	Ahead bool
}

// fields is what is known of a Limiter's exported fields: functions cannot be compared.
type fields struct {
	schema                   string
	clock, observer, onRetry bool
}

func (l *Limiter) fields() fields {
	return fields{l.Schema, l.Clock != nil, l.Observer != nil, l.OnRetry != nil}
}

// changed is the error of a Limiter of Open whose fields are not those of its Options.
func (l *Limiter) changed(asked []Request) error {
	if l.life == nil || l.fields() == l.life.fields {
		return nil
	}
	return invalidCall(asked, "a field of the Limiter was changed after Open: set it in Options")
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
		l.Observer(ctx, Decision{Verb: string(v), Result: result, Err: err, Took: took, Ahead: result.ahead})
	}
}

// timestamp checks an instant given by the caller. The lower bound leaves room for the grids of fixed windows, which begin
// within 292 years of the year 1.
func timestamp(what string, t time.Time) (pgtype.Timestamptz, error) {
	t = t.UTC()
	if t.Year() < 1000 || t.Year() > 9999 {
		return pgtype.Timestamptz{}, fmt.Errorf("%s, %v, is not between the years 1000 and 9999", what, t)
	}
	return pgtype.Timestamptz{Time: t, Valid: true}, nil
}

// Package observe makes metrics and logs of what a limiter decides: [Metrics] by OpenTelemetry, [Log] by log/slog.
//
//	metrics, err := observe.NewMetrics(otel.GetMeterProvider())
//	if err != nil {
//		return err
//	}
//	log := &observe.Log{}
//	limits := ratelimit.Limiter{
//		Observer: observe.Join(metrics.Decision, log.Decision),
//		OnRetry:  metrics.Retry,
//	}
//	coalescer := &ratelimit.Coalescer{Pool: pool, OnBatch: metrics.Batch}
//
// In a transaction, what is observed is what was decided; if the transaction then rolls back, or InTx runs it again, the tokens
// come back, and the observation stays.
package observe

import (
	"context"
	"errors"

	"github.com/txlimit/txlimit/ratelimit"
)

// Join makes one observer of several, which are called in order.
func Join(observers ...func(context.Context, ratelimit.Decision)) func(context.Context, ratelimit.Decision) {
	return func(ctx context.Context, d ratelimit.Decision) {
		for _, observe := range observers {
			observe(ctx, d)
		}
	}
}

// What can come of a call, or of one request of it.
const (
	granted         = "granted"
	denied          = "denied"
	wouldDeny       = "would_deny"       // a check, which refuses nothing
	withheld        = "withheld"         // a request that another one of the same call kept from being granted
	exceedsCapacity = "exceeds_capacity" // can never be granted
	invalid         = "invalid"
	conflict        = "conflict" // the transaction has to run again: SQLSTATE 40001 or 40P01
	canceled        = "canceled" // the caller did not wait for the answer
	failed          = "error"
)

// outcome is what came of a call with that context.
func outcome(ctx context.Context, d ratelimit.Decision) string {
	state := sqlState(d.Err)
	switch {
	case d.Err == nil:
		return granted
	case errors.Is(d.Err, ratelimit.ErrDenied) && d.Verb == ratelimit.VerbCheck:
		return wouldDeny
	case errors.Is(d.Err, ratelimit.ErrDenied):
		return denied
	case errors.Is(d.Err, ratelimit.ErrExceedsCapacity):
		return exceedsCapacity
	case errors.Is(d.Err, ratelimit.ErrInvalid):
		return invalid
	case state == "40001" || state == "40P01":
		return conflict
	case errors.Is(d.Err, context.Canceled), state == "57014" && errors.Is(ctx.Err(), context.Canceled): // which lib/pq hides
		return canceled
	default:
		return failed
	}
}

// sqlState is the SQLSTATE in an error's chain, or empty.
func sqlState(err error) string {
	if sqlErr := (interface{ SQLState() string })(nil); errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

// limitName is the name of a limit. That of a mistaken one may be anything, too much or not even UTF-8.
func limitName(limit ratelimit.Limit) string {
	if limit.Validate() != nil {
		return other
	}
	return limit.Name()
}

// other stands for what would be too many values, as in OpenTelemetry's conventions.
const other = "_OTHER"

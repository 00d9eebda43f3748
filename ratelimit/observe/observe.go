// Package observe reports a limiter's decisions: [Metrics] to OpenTelemetry, [Log] to log/slog.
//
//	metrics, err := observe.NewMetrics(otel.GetMeterProvider())
//	if err != nil {
//		return err
//	}
//	log := &observe.Log{}
//	limits := ratelimit.Limiter{
//		Observer: observe.Join(metrics.Observe, log.Observe),
//		OnRetry:  metrics.Retry,
//	}
//	coalescer := &ratelimit.Coalescer{Pool: pool, OnBatch: metrics.Batch}
//
// In a transaction, a decision is observed when it is made. If the transaction then rolls back, or InTx runs it again, the
// tokens come back, but the observation stays.
package observe

import (
	"context"
	"errors"

	"github.com/txlimit/txlimit/ratelimit"
)

// Outcomes of a call, or of one request in it.
const (
	granted         = "granted"
	denied          = "denied"
	wouldDeny       = "would_deny"       // a check, which refuses nothing
	withheld        = "withheld"         // a request that would have been granted, in a call that another request denied
	exceedsCapacity = "exceeds_capacity" // can never be granted
	invalid         = "invalid"
	conflict        = "conflict" // the transaction has to run again: SQLSTATE 40001 or 40P01
	canceled        = "canceled" // the caller did not wait for the answer
	failed          = "error"
)

// outcome is the outcome of a call with that context.
func outcome(ctx context.Context, d ratelimit.Decision) string {
	state := sqlState(d.Err)
	switch {
	case d.Err == nil:
		return granted
	case errors.Is(d.Err, ratelimit.ErrDenied) && d.Verb == "check":
		return wouldDeny
	case errors.Is(d.Err, ratelimit.ErrDenied):
		return denied
	case errors.Is(d.Err, ratelimit.ErrExceedsCapacity):
		return exceedsCapacity
	case errors.Is(d.Err, ratelimit.ErrInvalid):
		return invalid
	case state == "40001" || state == "40P01":
		return conflict
	case errors.Is(d.Err, context.Canceled), state == "57014" && errors.Is(ctx.Err(), context.Canceled): // lib/pq hides the context's error
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

// Join makes one [ratelimit.Limiter.Observer] of several. It calls them in order, and passes over nil.
func Join(observers ...func(ctx context.Context, d ratelimit.Decision)) func(ctx context.Context, d ratelimit.Decision) {
	return func(ctx context.Context, d ratelimit.Decision) {
		for _, observe := range observers {
			if observe != nil {
				observe(ctx, d)
			}
		}
	}
}

// limitName is the name of a limit. The name of an invalid limit may be too long, or not even UTF-8.
func limitName(limit ratelimit.Limit) string {
	if limit.Validate() != nil {
		return other
	}
	return limit.Name()
}

// other stands for a set of values that would be too large, as in OpenTelemetry's conventions.
const other = "_OTHER"

package observe

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/txlimit/txlimit/ratelimit"
)

// Metrics counts and measures with OpenTelemetry:
//
//	ratelimit.decisions             counter    requests, by limit, verb and outcome
//	ratelimit.call.duration         histogram  seconds that a call took, by verb, outcome and, if there is only one, limit.
//	                                           It includes the wait for transactions that hold the row. For the first call
//	                                           in InTx with Hot, it includes the wait for the turn in the database
//	ratelimit.reservation.wait      histogram  seconds that the work of a Reserve or Wait has to wait, for each limit of the
//	                                           call that owes tokens. One without a wait is not in it
//	ratelimit.tx.retries            counter    transactions that InTx, InSQLTx, SendTx and Retry ran again, by SQLSTATE
//	ratelimit.coalesced.batch.size  histogram  calls decided by one statement of a Coalescer; 1 is included
//
// The attributes:
//
//	ratelimit.limit    the limit's name, "_OTHER" if its definition is invalid. Names should be few, and not made of user input
//	ratelimit.verb     consume, wait, reserve, take, check, balance, charge, refund, reset, move, pause, resume, hold, settle, release
//	                   or once
//	ratelimit.outcome  granted; denied; withheld (a request that would have been granted, in a call that another request
//	                   denied); would_deny (a check, which takes nothing, where Consume would be denied); exceeds_capacity
//	                   (can never be granted); invalid; conflict (40001 or 40P01: the transaction has to run again);
//	                   canceled (by the caller); error
//	ratelimit.ahead    true: a Coalescer with Ahead decided the call in memory
//	error.type         of the outcome error, and of retries: the SQLSTATE, "deadline_exceeded" or "_OTHER"
//
// There is no attribute for the key: each user would be a separate time series, and keys are personal data.
//
// A Metrics is safe for concurrent use.
type Metrics struct {
	decisions, retries metric.Int64Counter
	duration, wait     metric.Float64Histogram
	batch              metric.Int64Histogram
}

// NewMetrics makes the instruments.
func NewMetrics(provider metric.MeterProvider) (*Metrics, error) {
	meter := provider.Meter("github.com/txlimit/txlimit/ratelimit/observe")
	var m Metrics
	var errs [5]error
	m.decisions, errs[0] = meter.Int64Counter("ratelimit.decisions", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that were decided."))
	m.duration, errs[1] = meter.Float64Histogram("ratelimit.call.duration", metric.WithUnit("s"),
		metric.WithDescription("Duration of calls, with the wait for transactions that hold the row and, for the first call in InTx with Hot, for the turn."),
		metric.WithExplicitBucketBoundaries(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10))
	m.wait, errs[2] = meter.Float64Histogram("ratelimit.reservation.wait", metric.WithUnit("s"),
		metric.WithDescription("How long granted reservations have to wait for their tokens."),
		metric.WithExplicitBucketBoundaries(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4*3600, 24*3600))
	m.retries, errs[3] = meter.Int64Counter("ratelimit.tx.retries", metric.WithUnit("{transaction}"),
		metric.WithDescription("Transactions that were run again because the database could not serialize them."))
	m.batch, errs[4] = meter.Int64Histogram("ratelimit.coalesced.batch.size", metric.WithUnit("{call}"),
		metric.WithDescription("Calls that one statement of a Coalescer decided."),
		metric.WithExplicitBucketBoundaries(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
	return &m, errors.Join(errs[:]...)
}

// Observe is for [ratelimit.Limiter.Observer].
func (m *Metrics) Observe(ctx context.Context, d ratelimit.Decision) {
	result := outcome(ctx, d)
	call := []attribute.KeyValue{attribute.String("ratelimit.verb", d.Verb)}
	if result == failed {
		call = append(call, errorType(d.Err))
	}
	if d.Ahead {
		call = append(call, attribute.Bool("ratelimit.ahead", true))
	}
	limits := map[string]bool{}
	for _, s := range d.Result.Requests {
		name, of := attribute.String("ratelimit.limit", limitName(s.Limit)), result
		if (result == denied || result == wouldDeny) && s.OK {
			of = withheld
		}
		limits[name.Value.AsString()] = true
		m.decisions.Add(ctx, 1, metric.WithAttributes(call...), metric.WithAttributes(name, attribute.String("ratelimit.outcome", of)))
		if s.Delay > 0 && d.Err == nil {
			m.wait.Record(ctx, s.Delay.Seconds(), metric.WithAttributes(name))
		}
	}
	call = append(call, attribute.String("ratelimit.outcome", result))
	if len(limits) == 1 {
		call = append(call, attribute.String("ratelimit.limit", limitName(d.Result.Requests[0].Limit)))
	}
	m.duration.Record(ctx, d.Took.Seconds(), metric.WithAttributes(call...))
}

// Retry is for [ratelimit.Limiter.OnRetry].
func (m *Metrics) Retry(ctx context.Context, _ int, err error) {
	m.retries.Add(ctx, 1, metric.WithAttributes(errorType(err)))
}

// Batch is for OnBatch of a [ratelimit.Coalescer].
func (m *Metrics) Batch(calls int) {
	m.batch.Record(context.Background(), int64(calls))
}

func errorType(err error) attribute.KeyValue {
	kind := other
	if state := sqlState(err); state != "" {
		kind = state
	} else if errors.Is(err, context.DeadlineExceeded) {
		kind = "deadline_exceeded"
	}
	return attribute.String("error.type", kind)
}

package ratelimit

import (
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Result is the answer to one call. All instants are by the clock that decided, the database's or [Limiter.Clock], in
// UTC, to the microsecond.
//
// It has the keys; LogValue, for slog, has none. encoding/json refuses the infinite numbers of an [Unlimited] limit.
type Result struct {
	// OK reports whether the call was granted. Several requests are granted all together or not at all.
	OK bool

	// At is the instant of the decision. If the call waited for a locked row, and was then granted, it is the instant
	// at which the wait began. Its receipt has the same instant, so of a token bucket less comes back.
	At time.Time

	// RetryAt of a denied call is the first instant at which the same call would be granted if nothing else consumed in
	// between, at most the end of the year 9999. It is zero if the call was granted, or if waiting does not help. Of a
	// block it is when no block denies any more. What comes after overrides that end counts, as far as it is known.
	//
	// For several requests, it is the latest RetryAt among them, or later if overrides end meanwhile.
	RetryAt time.Time

	// RetryAfter of a denied call is the time from At to RetryAt. A timer set to it works even if the local clock is
	// wrong. It is 146 years if waiting does not help: look whether RetryAt is zero before you wait. Of a granted call
	// it is 0.
	RetryAfter time.Duration

	// Remaining is the lowest balance of the call's requests, and ResetAt the latest of their resets. See [Status].
	Remaining float64
	ResetAt   time.Time

	// Repeated reports whether nothing was done, since it was done before: by a Hold without an end, whose id is held,
	// by a Settle of a hold that is settled, and by a Once whose id is known. Of a Hold and a Once, Requests have the
	// Counts of the first call, and no Remaining and ResetAt.
	Repeated bool

	// Requests has the status of each request of the call, in order.
	Requests []Status

	schema      string         // of a grant; empty: the default
	receipt     *receipt       // after a refund: the rest
	balances    []Balance      // of Balance
	pausedUntil time.Time      // of a Pause
	ahead       bool           // it was decided in memory
	held        held           // of a verb about holds
	known       Reason         // of a Hold that is denied since its id is known
	runAt       algebra.Micros // of a grant: when the work may run
	takenAt     algebra.Micros // of a grant in memory or of one window: when the tokens were taken; 0: at At

	sooner func(local pgtype.Timestamptz) algebra.Micros // of a Wait: what runAt would be by the overrides of now; nil: as it is
}

// delay is how long the work of a granted call has to wait.
func (r *Result) delay() time.Duration {
	if !r.OK || r.At.IsZero() { // a verb that decides nothing has no instant
		return 0
	}
	return r.runAt.Time().Sub(r.At)
}

// Status is the answer to one request, as of the end of the call. Requests for the same limit and key share their
// numbers.
type Status struct {
	Limit Limit
	Key   string  // as stored: see [Limit.Key]; empty for a limit without keys
	Count float64 // tokens asked for; of a Take, the most; of a Repeated Hold or Once, see Result

	// Taken is how many tokens the call took, or a Check would take. It is 0 if the call was denied.
	Taken float64

	// Refunded is how many tokens a refund gave back, if it commits.
	Refunded float64

	// OK reports whether this request was granted. In a denied call, it reports whether it would have been granted by
	// itself. Where a plan or a block denies, the other limits are not asked: OK is true, and Remaining and ResetAt are
	// zero.
	OK bool

	// Remaining is the balance in tokens, below zero if tokens are owed. If a sharded limit took from one shard, it is
	// an estimate: that shard's balance times the number of shards. Of an [Unlimited] limit, it is +Inf.
	Remaining float64

	// ResetAt is when a token bucket will be full if nothing is consumed, or when the next window begins. If the rate
	// is 0, it is zero.
	ResetAt time.Time

	// RetryAt is [Result.RetryAt] for this request alone.
	RetryAt time.Time

	// Delay is how long the work of a [Limiter.Reserve] or [Limiter.Wait] has to wait for the tokens of this request.
	Delay time.Duration

	took    took
	upTo    bool // of a Take: Count is the most
	returns bool // of a denied Hold: others hold tokens of the key, which may come back before RetryAt
}

// took is the part of the answer that a receipt needs: the tokens left in all rows that were taken from, and the number of
// rows. With 0 rows, nothing was consumed, or it was granted without a row.
type took struct {
	held    float64
	rows    int
	rowless bool
}

// neverAfter is a RetryAfter that never comes: half of the longest duration, so that a caller may add to it.
const neverAfter time.Duration = math.MaxInt64 / 2

// setRetryAt sets when a denied call should be tried again: algebra.Forever is never.
func (r *Result) setRetryAt(at algebra.Micros) {
	r.RetryAt, r.RetryAfter = instant(at), neverAfter
	if at < algebra.Forever {
		r.RetryAfter = min(r.RetryAt.Sub(r.At), neverAfter)
	}
}

// instant is a time of the answer; the zero time stands for algebra.Forever.
func instant(at algebra.Micros) time.Time {
	if at >= algebra.Forever {
		return time.Time{}
	}
	return at.Time()
}

// unanswered is the result of a call that has no answer.
func unanswered(v verb, requests []Request) Result {
	result := Result{Requests: make([]Status, len(requests))}
	for i, r := range requests {
		result.Requests[i] = Status{Limit: r.limit, Key: r.key, Count: r.tokens, upTo: v == verbTake}
	}
	return result
}

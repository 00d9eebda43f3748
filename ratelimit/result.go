package ratelimit

import (
	"math"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Result is the answer to one call. All instants are on the clock that decided, the database's unless [Limiter.Clock] is
// set, in UTC and to the microsecond.
type Result struct {
	// OK says whether the call was granted. Several requests are granted all together or not at all.
	OK bool

	// At is the instant of the decision: what [Limiter.Refund] wants to know of a consumption. A call that had to wait for
	// another transaction that held the row, and was then granted, has the instant at which it began to wait.
	At time.Time

	// RetryAt is when the work may run, if the call was granted: at once, or for a reservation when what it owes will have
	// been refilled. If it was denied, it is the first instant at which the very same call would be granted if nobody else
	// consumed in between. For several requests it is the latest of theirs. It is never later than the year 9999.
	RetryAt time.Time

	// RetryAfter is the time from At to RetryAt, measured on the clock that decided: a timer needs no agreement
	// on what time it is.
	RetryAfter time.Duration

	// Remaining is the least balance of the call's requests, and ResetAt the latest of their resets: those of the one request,
	// if there is but one. See [Status].
	Remaining float64
	ResetAt   time.Time

	// Requests answers each request of the call, in order.
	Requests []Status
}

// Status is the answer to one request, as it stands after the call. Requests of one call for the same limit and key share
// their numbers.
type Status struct {
	Limit Limit
	Key   string  // as stored: see [Limit.Key]; empty for a limit without keys
	Count float64 // tokens asked for

	// OK says whether this request was granted or, in a call that was denied, would have been without the others.
	OK bool

	// Remaining is the balance in tokens; what reservations and charges owe is below zero. For a sharded limit that
	// took from one shard it is an estimate: what the shard holds, times the number of shards.
	Remaining float64

	// ResetAt is when a token bucket will be full if nobody consumes, or when the fixed window's next window begins.
	ResetAt time.Time

	// RetryAt is the same as [Result.RetryAt], for this request alone.
	RetryAt time.Time
}

// fill works out what the answer means for the requests. taken says that its rows are those after the demands were granted.
func (r *Result) fill(ds []demand, a *answer, taken bool) {
	retryAt, remaining, resetAt := a.at, math.Inf(1), algebra.Min
	for i := range ds {
		d := &ds[i]
		s, at, reset := status(d, a, a.rows[i], taken)
		retryAt, remaining, resetAt = max(retryAt, at), min(remaining, s.Remaining), max(resetAt, reset)
		for _, request := range d.requests {
			of := &r.Requests[request]
			s.Limit, s.Key, s.Count = of.Limit, of.Key, of.Count
			*of = s
		}
	}
	r.OK = a.granted
	r.At = a.at.Time()
	r.RetryAt = retryAt.Time()
	r.RetryAfter = r.RetryAt.Sub(r.At) // saturates at 292 years
	r.Remaining, r.ResetAt = remaining, resetAt.Time()
}

// status is what the rows of a demand mean for its requests. at is its RetryAt, and reset its ResetAt.
func status(d *demand, a *answer, rows []algebra.Row, taken bool) (s Status, at, reset algebra.Micros) {
	numbers, shards, now := d.limit.forKey(d.key), d.limit.shards, a.at
	if taken && len(rows) == 1 { // one shard speaks for all
		for len(rows) < shards {
			rows = append(rows, rows[0])
		}
	}
	s.OK = taken || numbers.Enough(rows, shards, d.count, d.floor, now)
	s.Remaining = numbers.Total(rows, now)
	if numbers.Window {
		reset = min(numbers.UpTo(now)+algebra.Micros(numbers.Period.Microseconds()), algebra.Max)
	} else {
		reset = numbers.When(rows, shards, numbers.Capacity, 0, now)
	}
	switch {
	case taken:
		at = numbers.When(rows, shards, 0, 0, now)
	case !s.OK:
		at = numbers.When(rows, shards, d.count, d.floor, now)
	case a.granted: // by a check: when the work might run
		at = numbers.When(numbers.Take(rows, shards, d.count, now), shards, 0, 0, now)
	default:
		at = now
	}
	s.RetryAt, s.ResetAt = at.Time(), reset.Time()
	return s, at, reset
}

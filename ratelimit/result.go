package ratelimit

import (
	"math"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Result is the answer to one call. All instants are by the clock that decided, which is the database's unless
// [Limiter.Clock] is set. They are in UTC, to the microsecond.
type Result struct {
	// OK reports whether the call was granted. Several requests are granted all together or not at all.
	OK bool

	// At is the instant of the decision. If the call waited for another transaction that held the row, and was then
	// granted, it is the instant at which the wait began.
	At time.Time

	// RetryAt of a granted call is when the work may run: at once or, for a reservation, when its tokens will have been
	// refilled. RetryAt of a denied call is the first instant at which the same call would be granted if nothing else
	// consumed in between. For several requests, it is the latest RetryAt among them; with a reservation among them, the call
	// may be granted earlier. It is never later than the year 9999. It is zero if the call is denied by policy: then waiting
	// does not help (see [DeniedError]).
	RetryAt time.Time

	// RetryAfter is the time from At to RetryAt, by the clock that decided. A timer set to it works even if the local clock
	// is wrong. After a denial by policy it is the longest duration there is, 292 years.
	RetryAfter time.Duration

	// Remaining is the lowest balance of the call's requests, and ResetAt the latest of their resets. See [Status].
	Remaining float64
	ResetAt   time.Time

	// Requests has the status of each request of the call, in order.
	Requests []Status

	receipt *receipt // after a refund: the rest
}

// Status is the answer to one request, as of the end of the call. Requests of one call for the same limit and key share
// their numbers.
type Status struct {
	Limit Limit
	Key   string  // as stored: see [Limit.Key]; empty for a limit without keys
	Count float64 // tokens asked for; with [Request.UpTo], the most

	// Taken is how many tokens a Consume or Charge took, or a Consume instead of this Check would take: Count or, with
	// [Request.UpTo], as many as were there. It is 0 if the call was denied, and after any other verb.
	Taken float64

	// Refunded is how many tokens a refund gave back, to within rounding: as many as break no promise, and no more than fill the
	// limit. It holds if the transaction of the refund commits. After any other verb it is 0.
	Refunded float64

	// OK reports whether this request was granted. In a denied call, it reports whether the request would have been granted
	// by itself. In a call denied by policy, the other limits are not asked: OK is true, and Remaining, ResetAt and RetryAt
	// are zero.
	OK bool

	// Remaining is the balance in tokens. It is below zero if reservations or charges owe tokens. If a sharded limit took
	// from one shard, it is an estimate: that shard's balance times the number of shards. Of an [Unlimited] limit, it is +Inf.
	Remaining float64

	// ResetAt is when a token bucket will be full if nothing is consumed, or when the next window begins. If the limit's rate
	// is 0, it is zero.
	ResetAt time.Time

	// RetryAt is [Result.RetryAt] for this request alone.
	RetryAt time.Time

	took took
	upTo bool // Count is the most
}

// took is the part of the answer that a receipt needs: the tokens left in all rows that were taken from, and the number of
// rows. With 0 rows, nothing was consumed, or it was granted without a row.
type took struct {
	held    float64
	rows    int
	rowless bool
}

// fill works out the results of the requests from the answer to the call.
func (r *Result) fill(c *call, a *answer) {
	var refunded []float64
	if c.verb == VerbRefund {
		refunded, r.receipt = c.receipt.refund(c.demands, c.rowless, a), c.receipt
	}
	if c.verb == VerbCheck {
		a.taken = c.upTo(a)
	}
	w := c.waiting(a)
	retryAt, remaining, resetAt := w.retryAt, math.Inf(1), algebra.Min
	for i := range c.demands {
		requests := c.demands[i].requests
		s := &r.Requests[requests[0]]
		at, reset := c.status(s, i, a, w)
		retryAt, remaining, resetAt = max(retryAt, at), min(remaining, s.Remaining), max(resetAt, reset)
		if refunded != nil {
			s.Refunded = refunded[i]
		}
		for _, request := range requests {
			of := &r.Requests[request]
			of.OK, of.Remaining, of.RetryAt, of.ResetAt, of.Refunded, of.took = s.OK, s.Remaining, s.RetryAt, s.ResetAt, s.Refunded, s.took
			of.Taken = 0
			switch {
			case !a.granted || refunded != nil:
			case c.demands[i].most > 0:
				of.Taken = a.taken
			default:
				of.Taken = of.Count
			}
		}
	}
	r.OK = a.granted
	r.At = a.at.Time()
	r.RetryAt = retryAt.Time()
	r.RetryAfter = r.RetryAt.Sub(r.At) // saturates at 292 years
	r.Remaining, r.ResetAt = remaining, resetAt.Time()
	if c.rowless != nil {
		r.fillRowless(c, a)
	}
}

// upTo is how many tokens each demand with UpTo could take: the same number for all.
func (c *call) upTo(a *answer) float64 {
	n := math.Inf(1)
	for i := range c.demands {
		d := &c.demands[i]
		if d.most > 0 {
			n = min(n, d.numbers.Whole(a.rows[i], d.limit.shards, d.most, a.at))
		}
	}
	return n
}

// waiting is about reservations of algebra.Reserve (see call.reserves) that were not made, because of a check or a denial.
type waiting struct {
	asked   []algebra.Demand // empty: there are no such reservations
	lefts   []float64        // the balance that each limit would have left
	retryAt algebra.Micros   // when all of them would be granted, or else now
}

func (c *call) waiting(a *answer) (w waiting) {
	w.retryAt = a.at
	if !c.reserves() || a.granted && c.verb != VerbCheck {
		return w
	}
	for i := range c.demands {
		d := &c.demands[i]
		w.asked = append(w.asked, algebra.Demand{
			Limit: d.reaching(a.rows[i], a.at), Rows: a.rows[i], Shards: d.limit.shards, Count: d.count, Floor: d.floor,
		})
	}
	_, w.lefts, _ = algebra.Reserve(w.asked, a.at, c.within)
	if !a.granted {
		w.retryAt = algebra.WhenReserved(w.asked, a.at, c.within)
	}
	return w
}

// status works out the status of a demand's requests from its rows. at is the RetryAt, and reset the ResetAt.
func (c *call) status(s *Status, i int, a *answer, w waiting) (at, reset algebra.Micros) {
	d, rows, taken := &c.demands[i], a.rows[i], a.granted && c.verb != VerbCheck
	s.took = took{}
	if taken && c.consumes() {
		s.took.rows = len(rows)
		for _, row := range rows {
			s.took.held += row.Value
		}
	}
	shards, now := d.limit.shards, a.at
	if taken && len(rows) == 1 && c.verb != VerbRefund { // estimate all shards from one
		for len(rows) < shards {
			rows = append(rows, rows[0])
		}
	}
	numbers := d.reaching(rows, now)
	s.OK = taken || numbers.Enough(rows, shards, d.count, d.floor, now)
	s.Remaining = numbers.Total(rows, now)
	if numbers.Window {
		reset = numbers.NextWindow(now)
	} else {
		reset = numbers.When(rows, shards, numbers.Capacity, 0, now)
	}
	switch {
	case taken:
		at = numbers.When(rows, shards, 0, 0, now)
	case w.asked != nil && a.granted:
		at = numbers.When(numbers.Spread(rows, shards, w.lefts[i], now), shards, 0, 0, now)
	case w.asked != nil:
		if s.OK = w.asked[i].Enough(w.lefts[i]); s.OK {
			at = now
		} else if at = algebra.WhenReserved(w.asked[i:i+1], now, c.within); at == now { // alone, it would wait less and forfeit less
			at = w.retryAt
		}
	case !s.OK:
		at = numbers.When(rows, shards, d.count, d.floor, now)
	case a.granted && d.count == 0: // by a check, which reads the debt
		at = numbers.When(rows, shards, 0, 0, now)
	case a.granted: // by a check: when the work might run
		at = numbers.When(numbers.Take(rows, shards, d.count, now), shards, 0, 0, now)
	default:
		at = now
	}
	s.RetryAt, s.ResetAt = at.Time(), reset.Time()
	return at, reset
}

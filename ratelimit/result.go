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

	// At is the instant of the decision. A call that had to wait for another transaction that held the row, and was then granted,
	// has the instant at which it began to wait.
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

	receipt *receipt // of a refund: what is left
}

// Status is the answer to one request, as it stands after the call. Requests of one call for the same limit and key share
// their numbers.
type Status struct {
	Limit Limit
	Key   string  // as stored: see [Limit.Key]; empty for a limit without keys
	Count float64 // tokens asked for

	// Refunded is how many of them a refund gave back: what harms no promise, and no more than fills the limit. Otherwise it is 0.
	Refunded float64

	// OK says whether this request was granted or, in a call that was denied, would have been without the others.
	OK bool

	// Remaining is the balance in tokens; what reservations and charges owe is below zero. For a sharded limit that
	// took from one shard it is an estimate: what the shard holds, times the number of shards.
	Remaining float64

	// ResetAt is when a token bucket will be full if nobody consumes, or when the fixed window's next window begins.
	ResetAt time.Time

	// RetryAt is the same as [Result.RetryAt], for this request alone.
	RetryAt time.Time

	took took
}

// took is what a receipt has to say of a request that was consumed: what the rows that it took from held afterwards, together, and how
// many they were. None: nothing was consumed.
type took struct {
	held float64
	rows int
}

// fill works out what the answer to a call means for its requests.
func (r *Result) fill(c *call, a *answer) {
	var refunded []float64
	if c.verb == VerbRefund {
		refunded, r.receipt = c.receipt.refund(c.demands, a), c.receipt
	}
	w := c.waiting(a)
	retryAt, remaining, resetAt := w.retryAt, math.Inf(1), algebra.Min
	for i := range c.demands {
		s, at, reset := c.status(i, a, w)
		retryAt, remaining, resetAt = max(retryAt, at), min(remaining, s.Remaining), max(resetAt, reset)
		if refunded != nil {
			s.Refunded = refunded[i]
		}
		for _, request := range c.demands[i].requests {
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

// waiting is what there is to say of reservations that may forfeit tokens (see forfeits), and were not made: by a check or a denial.
type waiting struct {
	asked   []algebra.Demand // none: there are no such reservations
	lefts   []float64        // what each limit would have left
	retryAt algebra.Micros   // when all of them would be granted; otherwise now
}

func (c *call) waiting(a *answer) (w waiting) {
	w.retryAt = a.at
	if !forfeits(c.demands) || a.granted && c.verb != VerbCheck {
		return w
	}
	for i, d := range c.demands {
		w.asked = append(w.asked, algebra.Demand{
			Limit: d.limit.forKey(d.key), Rows: a.rows[i], Shards: d.limit.shards, Count: d.count, Floor: d.floor,
		})
	}
	_, w.lefts, _ = algebra.Reserve(w.asked, a.at)
	if !a.granted {
		w.retryAt = algebra.WhenReserved(w.asked, a.at)
	}
	return w
}

// status is what the rows of a demand mean for its requests. at is its RetryAt, and reset its ResetAt.
func (c *call) status(i int, a *answer, w waiting) (s Status, at, reset algebra.Micros) {
	d, rows, taken := &c.demands[i], a.rows[i], a.granted && c.verb != VerbCheck
	if taken && c.verb == VerbConsume {
		s.took.rows = len(rows)
		for _, row := range rows {
			s.took.held += row.Value
		}
	}
	numbers, shards, now := d.limit.forKey(d.key), d.limit.shards, a.at
	if taken && len(rows) == 1 && c.verb != VerbRefund { // one shard speaks for all
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
	case w.asked != nil && a.granted:
		at = numbers.When(numbers.Spread(rows, shards, w.lefts[i], now), shards, 0, 0, now)
	case w.asked != nil:
		if s.OK = w.asked[i].Enough(w.lefts[i]); s.OK {
			at = now
		} else if at = algebra.WhenReserved(w.asked[i:i+1], now); at == now { // alone, it would wait less and forfeit less
			at = w.retryAt
		}
	case !s.OK:
		at = numbers.When(rows, shards, d.count, d.floor, now)
	case a.granted && d.count == 0: // by a check, which reads what is owed
		at = numbers.When(rows, shards, 0, 0, now)
	case a.granted: // by a check: when the work might run
		at = numbers.When(numbers.Take(rows, shards, d.count, now), shards, 0, 0, now)
	default:
		at = now
	}
	s.RetryAt, s.ResetAt = at.Time(), reset.Time()
	return s, at, reset
}

package ratelimit

import (
	"math"

	"github.com/txlimit/txlimit/internal/algebra"
)

// fillRows works out the results of the requests from the rows in the answer to the call.
func (c *call) fillRows(r *Result, a *answer) {
	if c.does.answers == balances {
		r.balances = c.balances(a)
	}
	var refunded []float64
	if c.does.refunds {
		refunded, r.receipt = c.receipt.refund(c.demands, c.rowless, a), c.receipt
	}
	w := c.deniedReservation(a)
	retryAt, runAt, remaining, resetAt := w.retryAt, a.at, math.Inf(1), algebra.Min
	for i := range c.demands {
		requests := c.demands[i].requests
		s := &r.Requests[requests[0]]
		at, reset := c.status(s, i, a, w)
		if remaining, resetAt = min(remaining, s.Remaining), max(resetAt, reset); a.granted {
			s.Delay = at.Time().Sub(a.at.Time())
			runAt = max(runAt, at)
		} else if retryAt = max(retryAt, at); !s.OK {
			s.RetryAt = instant(at)
		}
		if refunded != nil {
			s.Refunded = refunded[i]
		}
		for _, request := range requests {
			of := &r.Requests[request]
			of.OK, of.Remaining, of.RetryAt, of.ResetAt, of.Refunded, of.Delay, of.took, of.returns = s.OK, s.Remaining, s.RetryAt, s.ResetAt, s.Refunded, s.Delay, s.took, s.returns
			of.Taken = c.taken(a, of)
		}
	}
	r.OK = a.granted
	r.At = a.at.Time()
	if len(c.demands) == 1 && c.demands[0].numbers.Window { // after a wait, a later window than that of At
		for _, row := range a.rows[0] {
			if row.TS > a.at {
				r.takenAt = max(r.takenAt, row.TS)
			}
		}
	}
	if r.runAt = runAt; !r.OK {
		if len(c.demands) > 1 && !c.does.holds && (anyOf(c.demands, c.overrideEnds) || anyOf(c.rowless, c.overrideEnds)) { // what one gets, another may lose meanwhile
			retryAt = c.grantedAt(a, 0, len(c.demands))
		}
		r.setRetryAt(retryAt)
		if anyOf(c.demands, c.overrideEnds) { // it ends here once that is sure
			r.RetryAfter = min(r.RetryAfter+c.overrides.moment(c.local).doubt(), neverAfter)
		}
	}
	if c.verb == verbWait && a.granted && c.overrides != nil && runAt > a.at {
		r.sooner = c.sooner(a)
	}
	r.Remaining, r.ResetAt = remaining, instant(resetAt)
	if c.rowless != nil {
		c.fillRowless(r, a)
	}
}

// taken is how many tokens the call took for a request, or would have taken if it is a Check.
func (c *call) taken(a *answer, s *Status) float64 {
	switch {
	case !a.granted || !c.does.takes && !c.does.deniable:
		return 0
	case c.does.upTo:
		return a.taken
	}
	return s.Count
}

// deniedReservation is about a call by the rule of algebra.Reserve (see call.reserves) that was denied.
type deniedReservation struct {
	asked   []algebra.Demand // empty: the call is none
	lefts   []float64        // the balance that each limit would have left
	retryAt algebra.Micros   // when all of them would be granted, or else now
}

func (c *call) deniedReservation(a *answer) (w deniedReservation) {
	w.retryAt = a.at
	if !c.reserves() || a.granted {
		return w
	}
	all := make([]*demand, len(c.demands))
	for i := range c.demands {
		all[i] = &c.demands[i]
	}
	w.asked = c.reserved(all, a, a.at)
	_, w.lefts, _ = algebra.Reserve(w.asked, a.at, c.within)
	w.retryAt = c.grantedAt(a, 0, len(c.demands))
	return w
}

// status works out the status of a demand's requests from its rows. at is when the work may run or, after a denial, when the
// demand alone would be granted: algebra.Forever if never. reset is the ResetAt.
func (c *call) status(s *Status, i int, a *answer, w deniedReservation) (at, reset algebra.Micros) {
	d, rows, taken := &c.demands[i], a.rows[i], a.granted && c.does.writes != never
	s.took = took{}
	if taken && c.does.receipt() {
		s.took.rows = len(rows)
		for _, row := range rows {
			s.took.held += row.Value
		}
	}
	if d.limit.slots {
		return c.slotsStatus(s, d, rows, a, i)
	}
	shards, now := d.limit.shards, a.at
	if taken && len(rows) == 1 && !c.does.refunds { // estimate all shards from one
		for len(rows) < shards {
			rows = append(rows, rows[0])
		}
	}
	numbers := d.reaching(rows, now)
	s.OK = taken || !d.tooMuch && numbers.Enough(rows, d.count, d.floor, now)
	s.Remaining = numbers.Shown(numbers.Total(rows, now))
	if numbers.Window {
		reset = numbers.NextWindow(now)
	} else {
		reset = c.fullAt(d, rows, now)
	}
	switch at = now; {
	case a.granted && c.does.owes == upToMaxReserved:
		at = c.repaidAt(d, rows, now)
	case a.granted:
	case w.asked != nil:
		if s.OK = !d.tooMuch && w.asked[i].Enough(w.lefts[i]); s.OK {
			at = now
		} else if at = c.grantedAt(a, i, i+1); at == now { // alone, it would wait less and forfeit less
			at = w.retryAt
		}
	case !s.OK:
		at = c.grantedAt(a, i, i+1)
		s.returns = i < len(a.held.freeAt) && a.held.freeAt[i] < algebra.Forever
	}
	s.ResetAt = instant(reset)
	return at, reset
}

// slotsStatus works out the status of the requests for slots, as call.status does.
func (c *call) slotsStatus(s *Status, d *demand, rows []algebra.Row, a *answer, i int) (at, reset algebra.Micros) {
	s.Remaining = d.limit.numbers.Capacity + d.numbers.Total(rows, a.at)
	s.OK = a.granted || !d.tooMuch && s.Remaining >= d.count
	if s.OK {
		return a.at, algebra.Min
	}
	freeAt := algebra.Forever
	if i < len(a.held.freeAt) {
		freeAt = a.held.freeAt[i]
	}
	used := -d.numbers.Total(rows, a.at)
	at = when(a.at, [][]span{c.spans(c.does, d)}, func(present []*demand, from, _ algebra.Micros) algebra.Micros {
		if from > a.at && (len(present) == 0 || used+d.count <= present[0].limit.numbers.Capacity) { // an override has ended
			return from
		}
		return max(from, freeAt) // by the slots there are now: the server says no more
	})
	return at, algebra.Min
}

// fillRowless fills in the results of requests for limits without rows, and takes them into account in the call's.
func (c *call) fillRowless(r *Result, a *answer) {
	refused := c.refusal() != ""
	if refused {
		for i := range r.Requests {
			r.Requests[i].OK = true // unless it is the one that denies
		}
		r.setRetryAt(c.blockedUntil(a.at, c.asides, c.rowless)) // what comes after it may deny, too
	}
	for i := range c.rowless {
		d := &c.rowless[i]
		left := d.limit.numbers.Capacity
		if d.limit.blocked {
			left = 0
		}
		r.Remaining = min(r.Remaining, left)
		for _, request := range d.requests {
			s := &r.Requests[request]
			s.OK, s.Remaining = true, left
			if left > 0 {
				s.ResetAt = r.At
			}
			if refused && d.refused() {
				s.OK = false
				s.RetryAt = instant(c.blockedUntil(a.at, c.rowless[i:i+1]))
			}
			if !d.limit.empty() { // of a rate of 0, nothing is charged
				s.Taken = c.taken(a, s)
			}
			s.took.rowless = c.does.receipt() && r.OK
		}
		if left > 0 && r.ResetAt.Before(r.At) {
			r.ResetAt = r.At
		}
	}
}

package ratelimit

import (
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// A limit without rows needs no database: a rate of 0 grants nothing, and an unlimited limit grants everything. A blocked limit may have
// rows, but they do not decide. Nothing is sent for such demands, except by the verbs about holds: an id counts all the same.

func (l *Limit) unlimited() bool { return l.err == nil && l.numbers.Rate > algebra.MaxTokens }

// empty reports whether the limit grants nothing by definition: a rate of 0, or no slots.
func (l *Limit) empty() bool {
	if l.slots {
		return l.numbers.Capacity == 0
	}
	return l.numbers.Rate == 0
}

// grantsNothing reports whether the limit is empty or blocked.
func (l *Limit) grantsNothing() bool { return l.empty() || l.blocked }

// rowless reports whether the limit has no rows. It must be valid.
func (l *Limit) rowless() bool { return !l.slots && l.numbers.Rate == 0 || l.unlimited() }

// withoutRows takes the demands without rows out of all demands. It reuses the memory of all.
func withoutRows(all []demand, rowless func(d *demand) bool) (others, taken []demand) {
	for i := range all {
		if rowless(&all[i]) {
			taken = append(taken, all[i])
		}
	}
	if taken == nil {
		return all, nil
	}
	return slices.DeleteFunc(all, func(d demand) bool { return rowless(&d) }), taken
}

// refusal is why the call is denied without asking. It is empty if it is not.
func (c *call) refusal() (reason Reason) {
	for i := range c.rowless {
		d := &c.rowless[i]
		switch {
		case !c.does.deniable || !d.limit.grantsNothing() || d.count == 0:
		case d.limit.empty():
			return ReasonPlan
		default:
			reason = ReasonBlock
		}
	}
	return reason
}

// blockedText describes a block.
func (l Limit) blockedText() string {
	if l.until == algebra.Forever {
		return "blocked"
	}
	return "blocked until " + l.until.Time().Add(time.Second-1).Format(time.RFC3339) // rounded up
}

// byPolicy is the answer to a call that is decided without the database, or nil.
func (c *call) byPolicy() *answer {
	reason := c.refusal()
	if reason == "" && (len(c.demands) > 0 || c.rowless == nil || c.does.holds) {
		return nil
	}
	c.asides, c.demands = c.demands, nil // after a denial, they are not asked
	a := &answer{granted: reason == "", at: c.overrides.now(c.local)}
	if len(c.rowless) > 0 {
		a.taken = c.rowless[0].most // nothing bounds it
	}
	return a
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
			if refused && left == 0 && d.count > 0 {
				s.OK = false
				s.RetryAt = instant(c.blockedUntil(a.at, c.rowless[i:i+1]))
			}
			s.Taken = c.taken(a, s)
			s.took.rowless = c.does.receipt() && r.OK
		}
		if left > 0 && r.ResetAt.Before(r.At) {
			r.ResetAt = r.At
		}
	}
}

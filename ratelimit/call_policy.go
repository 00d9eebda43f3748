package ratelimit

import (
	"math"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// A limit without rows is decided by its definition: a rate of 0 grants nothing, and an unlimited limit grants everything.
// Nothing is sent for it.

func (l *Limit) unlimited() bool { return l.err == nil && l.numbers.Rate > algebra.MaxTokens }

// grantsNothing reports whether the limit has a rate of 0 or is blocked.
func (l *Limit) grantsNothing() bool { return l.numbers.Rate == 0 || l.blocked }

// rowless reports whether the limit has no rows. It must be valid.
func (l *Limit) rowless() bool { return l.grantsNothing() || l.unlimited() }

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

// deniedByPolicy reports whether the call wants a token of a limit with a rate of 0.
func (c *call) deniedByPolicy() bool {
	return c.does.deniable && anyOf(c.rowless, func(d *demand) bool { return d.limit.grantsNothing() && d.count > 0 })
}

// blockedUntil is when the last block ends of those that deny the call: algebra.Forever if one has no end, or a rate is 0.
func (c *call) blockedUntil() algebra.Micros {
	until := algebra.Min
	for _, d := range c.rowless {
		switch {
		case !d.limit.grantsNothing() || d.count == 0:
		case d.limit.numbers.Rate == 0: // whatever ends
			return algebra.Forever
		default:
			until = max(until, d.limit.until)
		}
	}
	return until
}

// reason is why a call is denied.
func (c *call) reason() Reason {
	switch {
	case !c.deniedByPolicy():
		return ReasonQuota
	case anyOf(c.rowless, func(d *demand) bool { return d.limit.numbers.Rate == 0 && d.count > 0 }):
		return ReasonPlan
	}
	return ReasonBlock
}

// blockedText describes a block.
func (l Limit) blockedText() string {
	if l.until == algebra.Forever {
		return "blocked"
	}
	return "blocked until " + l.until.Time().Format(time.RFC3339)
}

// byPolicy is the answer to a call that is decided without the database, or nil.
func (c *call) byPolicy() *answer {
	denied := c.deniedByPolicy()
	if !denied && (len(c.demands) > 0 || c.rowless == nil) {
		return nil
	}
	c.demands = nil // after a denial, they are not asked
	return &answer{granted: !denied, at: c.overrides.now(c.local)}
}

// fillRowless fills in the results of requests for limits without rows, and takes them into account in the call's.
func (r *Result) fillRowless(c *call, a *answer) {
	denied := c.deniedByPolicy()
	if denied {
		for i := range r.Requests {
			r.Requests[i].OK = true // unless it is the one that denies
		}
		r.RetryAt, r.RetryAfter = time.Time{}, math.MaxInt64
		if until := c.blockedUntil(); until < algebra.Forever {
			r.RetryAt = until.Time()
			r.RetryAfter = r.RetryAt.Sub(r.At)
		}
	}
	for _, d := range c.rowless {
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
			if denied && left == 0 && d.count > 0 {
				s.OK = false
				if d.limit.numbers.Rate > 0 && d.limit.until < algebra.Forever {
					s.RetryAt = d.limit.until.Time()
				}
			}
			switch {
			case !r.OK || !c.does.takes && c.verb != VerbCheck:
			case d.most > 0 && c.demands == nil: // nothing bounds it
				s.Taken = d.most
			case d.most > 0:
				s.Taken = a.taken
			default:
				s.Taken = s.Count
			}
			s.took.rowless = c.does.receipt() && r.OK
		}
		if left > 0 && r.ResetAt.Before(r.At) {
			r.ResetAt = r.At
		}
	}
}

package ratelimit

import (
	"fmt"
	"time"
	"unique"

	"github.com/txlimit/txlimit/internal/calendar"
)

// Varies says that some keys have numbers of their own: see [Limit.With]. Within idle, any of these numbers fills a row
// from 0: a token bucket of capacity 100 and rate 10 per minute needs ten minutes. A window needs as many windows as
// the capacity is rates, rounded up: 48 hours for a day of the calendar, 8 days for a week, 32 for a month, 93 for a
// quarter, 367 for a year.
//
// Every call for such a key needs With: a bare one takes by the definition's numbers, and cuts what the key has saved
// up.
func Varies(idle time.Duration) Option {
	return option{"Varies", func(c *Config) { c.Varies = calendar.PeriodText(idle) }}
}

// With is the same limit with other numbers for one key, such as a customer's own quota: [Rate], [Capacity], [Zone] and
// [Anchor]. A capacity that is the rate follows the rate. With a rate of 0, the key is denied everything, and nothing
// is charged, refunded, reset or moved. The definition must say [Varies], and the numbers must fill a row within that
// time, or the limit is [ErrInvalid].
//
// If the numbers are in a row of the database, read that row FOR NO KEY UPDATE in the READ COMMITTED transaction that
// consumes: see docs/plans.md.
func (l Limit) With(options ...Option) Limit {
	if l.Validate() != nil {
		return l
	}
	l = l.program()
	defined := l.definition()
	c, asDefined := l.Config(), defined.Config()
	switch {
	case c.Capacity == nil || l.slots:
	case *asDefined.Capacity == *asDefined.Rate && *c.Capacity == *c.Rate:
		c.Capacity = nil // it follows the rate
	case *c.Rate == 0:
		c.Capacity = asDefined.Capacity
	}
	c.MaxReserved = asDefined.MaxReserved
	allowed := []string{"Rate", "Capacity"}
	switch {
	case l.slots:
		allowed = []string{"Capacity"}
	case l.onCalendar():
		allowed = append(allowed, "Zone", "Anchor")
	}
	var named Config
	mistakes := c.set(options, allowed)
	named.set(options, allowed)
	if named.Rate != nil && *named.Rate == 0 {
		c.Capacity, c.MaxReserved = named.Capacity, nil
	}
	if !defined.doesVary() {
		l.err = fmt.Errorf("%w: limit %q: its definition does not say that it varies: With needs Varies there", ErrInvalid, l.name)
		return l
	}
	own, err := c.limit(mistakes)
	if err == nil && own != defined {
		own.defined = handle(unique.Make(defined))
	}
	return own
}

// handle stands for the limit that With or an override made another one from. So limits stay small, and equal limits
// have equal handles.
type handle unique.Handle[Limit]

// definition is the limit as it was defined, without what With or an override changed.
func (l Limit) definition() Limit {
	for l.defined != (handle{}) {
		l = unique.Handle[Limit](l.defined).Value()
	}
	return l.unblocked()
}

// program is the limit as the program has it, without what an override changed: that has an end.
func (l Limit) program() Limit {
	if l.overridden {
		return unique.Handle[Limit](l.defined).Value()
	}
	return l.unblocked()
}

// markOverridden is the limit, marked for an override to change its numbers: it remembers what it was.
func (l Limit) markOverridden() Limit {
	if !l.overridden {
		l.defined, l.overridden = handle(unique.Make(l)), true
	}
	return l
}

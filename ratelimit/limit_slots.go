package ratelimit

import (
	"fmt"
	"math"
	"slices"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
)

// maxSlots bounds how many slots there are.
const maxSlots = 1e9

// slotsVary is Config.Varies of slots that vary. Nothing is refilled, so there is no time to name.
var slotsVary = calendar.PeriodText(0)

// Slots defines a limit of how many may be held at once: at most n, by [Limiter.Hold], until they are settled or
// released, or their hold expires. n is 0 to 1e9; with 0 nothing is granted ([ReasonPlan]). A request is for a whole
// number of slots, 1 by default ([Request.Count]).
//
// A new n counts at once; a smaller one lets holders run. The only option is [Varies], of 0: then keys may have an n of
// their own, by [Limit.With] with [Capacity]. Every verb but Hold, Settle, Release, During, Balance, and those about
// overrides, is [ErrInvalid].
func Slots(name string, n int, options ...Option) Limit {
	capacity := float64(n)
	return define(Config{Kind: kindSlots, Name: name, Capacity: &capacity}, options)
}

// setSlots sets the numbers of slots, and returns what is wrong in them.
func (l *Limit) setSlots(c Config) (mistakes []string) {
	l.slots = true
	l.numbers = algebra.Limit{Period: slotsPeriod}
	switch {
	case c.Capacity == nil:
		mistakes = append(mistakes, "capacity is missing")
	case !wholeSlots(*c.Capacity):
		mistakes = append(mistakes, fmt.Sprintf("capacity %v is not a whole number between 0 and %v", *c.Capacity, maxSlots))
	default:
		l.numbers.Capacity = *c.Capacity
	}
	for field, set := range map[string]bool{
		"rate": c.Rate != nil, "period": c.Period != "", "maxReserved": c.MaxReserved != nil,
		"start": c.Start != nil, "shards": c.Shards != 0, "zone": c.Zone != "", "anchor": c.Anchor != "",
	} {
		if set {
			mistakes = append(mistakes, fmt.Sprintf("%s is set, but kind %q has only a name, a capacity and varies", field, c.Kind))
		}
	}
	slices.Sort(mistakes)
	if c.Varies != "" {
		idle, unit, err := calendar.ParsePeriod(c.Varies)
		if l.slotsVary = err == nil && unit == "" && idle == 0; !l.slotsVary {
			mistakes = append(mistakes, fmt.Sprintf("varies %q of kind %q is not %q: nothing is refilled", c.Varies, c.Kind, slotsVary))
		}
	}
	return mistakes
}

// unknown reports whether the Limiter knows the name alone, and the database how to end a hold: as slots without
// shards, it has no numbers.
func (l *Limit) unknown() bool { return l.slots && l.shards == 0 }

// wholeSlots reports whether there can be so many slots.
func wholeSlots(n float64) bool { return n >= 0 && n <= maxSlots && n == math.Trunc(n) }

// doesVary reports whether keys may have numbers of their own.
func (l *Limit) doesVary() bool { return l.varies > 0 || l.slotsVary }

// withSlots is the limit with the slots of an override or, if doubtful, with those if they are fewer.
func (l Limit) withSlots(defined Limit, n float64, doubtful bool) Limit {
	if math.IsNaN(n) {
		return defined
	}
	if l.numbers.Capacity = math.Floor(n); doubtful {
		l.numbers.Capacity = min(l.numbers.Capacity, defined.numbers.Capacity)
	}
	return l
}

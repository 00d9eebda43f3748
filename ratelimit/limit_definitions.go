package ratelimit

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
)

// definitions remembers the first definition that a [Limiter] was asked for under each name. Two limits of one name that
// refill by different clocks would both grant, so the second one is refused. Limits without rows are not remembered. The
// zero value is ready.
type definitions struct {
	byName atomic.Pointer[map[string]*Limit] // replaced as a whole, never changed
	mu     sync.Mutex                        // held while byName is replaced
}

// maxDefinitions bounds how many names are remembered. Further names are not checked.
const maxDefinitions = 1000

// check refuses demands whose limit was defined differently before. It takes no lock for known names.
func (d *definitions) check(ds []demand) error {
	unknown := false
	var known map[string]*Limit
	if m := d.byName.Load(); m != nil {
		known = *m
	}
	for i := range ds {
		limit := &ds[i].limit
		first := known[limit.name]
		if first != nil && !sameRefill(first, limit) {
			return twoDefinitions(first, limit)
		}
		unknown = unknown || first == nil
	}
	if unknown && len(known) < maxDefinitions {
		return d.add(ds)
	}
	return nil
}

// add remembers the limits of the demands.
func (d *definitions) add(ds []demand) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	known := map[string]*Limit{}
	if m := d.byName.Load(); m != nil {
		known = maps.Clone(*m)
	}
	for _, demand := range ds {
		limit := demand.limit
		first := known[limit.name]
		switch {
		case first != nil && !sameRefill(first, &limit): // another call has defined it meanwhile
			return twoDefinitions(first, &limit)
		case first == nil && len(known) < maxDefinitions:
			known[limit.name] = &limit
		}
	}
	d.byName.Store(&known)
	return nil
}

// sameRefill reports whether two limits of one name may be plans of one limit. Plans differ only in rate, capacity,
// maxReserved and shards, and in the zone and anchor of a calendar window.
func sameRefill(a, b *Limit) bool {
	return a.numbers.Window == b.numbers.Window && a.calendar.Unit == b.calendar.Unit && a.numbers.Period == b.numbers.Period &&
		a.hasStart == b.hasStart && a.numbers.Start == b.numbers.Start
}

// twoDefinitions is the error for two definitions of one name.
func twoDefinitions(a, b *Limit) error {
	return programError{fmt.Errorf("%w: limit %q has two definitions, %q and %q: use one of them, give each its own name, or make a new Limiter to change it", ErrInvalid, a.name, a, b)}
}

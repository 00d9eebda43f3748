package ratelimit

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
)

// definitions are the limits that a [Limiter] was asked for first under their names. A name of two limits that refill by different
// clocks would be granted by both, so the second is refused. The zero value is ready.
type definitions struct {
	byName atomic.Pointer[map[string]*Limit] // replaced, never changed
	mu     sync.Mutex                        // held to replace it
}

// maxDefinitions bounds how many names are remembered. Others are not checked.
const maxDefinitions = 1000

// check refuses demands of limits that were defined otherwise before. It takes no lock for names that it knows.
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

// add remembers the limits of demands.
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
		case first != nil && !sameRefill(first, &limit): // another call was faster
			return twoDefinitions(first, &limit)
		case first == nil && len(known) < maxDefinitions:
			known[limit.name] = &limit
		}
	}
	d.byName.Store(&known)
	return nil
}

// sameRefill says whether two limits of a name may be plans of one limit, which differ in rate, capacity, maxReserved and shards alone.
func sameRefill(a, b *Limit) bool {
	return a.numbers.Window == b.numbers.Window && a.numbers.Period == b.numbers.Period &&
		a.hasStart == b.hasStart && a.numbers.Start == b.numbers.Start
}

// twoDefinitions is the error for two limits of one name.
func twoDefinitions(a, b *Limit) error {
	return programError{fmt.Errorf("%w: limit %q has two definitions: %q and %q", ErrInvalid, a.name, a, b)}
}

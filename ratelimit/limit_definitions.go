package ratelimit

import (
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
)

// definitions remembers the definition that a [Limiter] was first asked for under each name. A second one is refused:
// both would grant, or cut what the other has saved up. The zero value is ready.
type definitions struct {
	byName atomic.Pointer[map[string]*Limit] // replaced as a whole, never changed
	mu     sync.Mutex                        // held while byName is replaced
	listed bool                              // byName has all limits of the program: others are refused
}

// maxDefinitions bounds how many names are remembered. Of further names, only the requests of one call are compared.
const maxDefinitions = 1000

// only makes the list all that there is.
func (d *definitions) only(limits []Limit) {
	all := make(map[string]*Limit, len(limits))
	for _, l := range limits {
		all[l.name] = &l
	}
	d.byName.Store(&all)
	d.listed = true
}

// of is the definition of a name, if it is known.
func (d *definitions) of(name string) (Limit, bool) {
	if m := d.byName.Load(); m != nil && (*m)[name] != nil {
		return *(*m)[name], true
	}
	return Limit{}, false
}

// check refuses requests whose limit was defined differently before. It takes no lock for known names.
func (d *definitions) check(requests []Request) error {
	unknown := false
	var known map[string]*Limit
	if m := d.byName.Load(); m != nil {
		known = *m
	}
	for i := range requests {
		limit := &requests[i].limit
		if limit.unknown() {
			continue
		}
		first := known[limit.name]
		if first != nil && !limit.definedAs(first) {
			return twoDefinitions(first, limit)
		}
		if first == nil && d.listed {
			return fmt.Errorf("%w: limit %q is not in Options.Limits of Open: nobody publishes or sweeps it", ErrInvalid, limit.name)
		}
		unknown = unknown || first == nil
	}
	switch {
	case !unknown:
		return nil
	case len(known) < maxDefinitions:
		return d.add(requests)
	case len(requests) > 1:
		_, err := withDefinitions(known, requests)
		return err
	}
	return nil
}

// add remembers the limits of the requests.
func (d *definitions) add(requests []Request) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var known map[string]*Limit
	if m := d.byName.Load(); m != nil {
		known = *m
	}
	all, err := withDefinitions(known, requests)
	if err != nil {
		return err
	}
	for i := len(requests) - 1; len(all) > maxDefinitions; i-- {
		if name := requests[i].limit.name; known[name] == nil {
			delete(all, name)
		}
	}
	d.byName.Store(&all)
	return nil
}

// withDefinitions is the known definitions and those of the requests. Two of one name are an error.
func withDefinitions(known map[string]*Limit, requests []Request) (map[string]*Limit, error) {
	all := make(map[string]*Limit, len(known)+len(requests))
	maps.Copy(all, known)
	for i := range requests {
		limit := &requests[i].limit
		if limit.unknown() {
			continue
		}
		if first := all[limit.name]; first == nil {
			definition := limit.definition()
			all[limit.name] = &definition
		} else if !limit.definedAs(first) {
			return nil, twoDefinitions(first, limit)
		}
	}
	return all, nil
}

// definedAs reports whether the limit has this definition.
func (l *Limit) definedAs(definition *Limit) bool {
	if l.defined == (handle{}) {
		return *l == *definition
	}
	return l.definition() == *definition
}

// twoDefinitions is the error for two definitions of one name, or for two numbers of one key.
func twoDefinitions(a, b *Limit) error {
	if x, y := a.definition(), b.definition(); x != y {
		return fmt.Errorf("%w: limit %q has two definitions, %q and %q: use one of them, give each its own name, or make a new Limiter to change it", ErrInvalid, a.name, x, y)
	}
	return fmt.Errorf("%w: limit %q: one call asks for one key with two numbers, %q and %q", ErrInvalid, a.name, a, b)
}

// definitionsOnly refuses a list of limits unless each is a definition, of a name of its own.
func definitionsOnly(limits []Limit) error {
	byName := make(map[string]*Limit, len(limits))
	for i := range limits {
		l := &limits[i]
		if err := l.Validate(); err != nil {
			return err
		}
		if *l != l.definition() {
			return fmt.Errorf("%w: limit %q is in the list with the numbers of one key, %q: list its definition", ErrInvalid, l.name, l)
		}
		if first := byName[l.name]; first != nil && *first == *l {
			return fmt.Errorf("%w: limit %q is in the list twice: list it once", ErrInvalid, l.name)
		} else if first != nil {
			return fmt.Errorf("%w: limit %q is in the list twice, as %q and %q: a name has one definition", ErrInvalid, l.name, first, l)
		}
		byName[l.name] = l
	}
	return nil
}

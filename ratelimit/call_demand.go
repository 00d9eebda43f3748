package ratelimit

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// demand is the sum of a call's requests for one limit and key.
type demand struct {
	limit    Limit
	key      string
	numbers  algebra.Limit // the limit's numbers for the key and, of a calendar, the time of the call
	count    float64
	floor    float64 // the lowest balance that may be left
	need     float64 // the lowest balance that is enough: count + floor, summed up without rounding floor
	reserve  bool    // the work may wait for its tokens
	most     float64 // with UpTo: the most tokens to take. Then count is 1. Otherwise 0
	requests []int
}

func (d *demand) id() groupID { return groupID{d.limit.name, d.key} }

// demands validates the requests and adds up the requests for the same limit and key. The result is in the order in which
// the database locks. Demands of limits without rows are apart.
func demands(v Verb, requests []Request, now pgtype.Timestamptz) (ds, rowless []demand, err error) {
	if ds, err = addUp(v, requests); err != nil {
		return nil, nil, err
	}
	if takesUpTo(ds) && anyOf(ds, func(d *demand) bool { return d.reserve }) {
		return nil, nil, fmt.Errorf("%w: a call with UpTo takes what is there, and cannot Reserve", ErrInvalid)
	}
	for i := range ds {
		if err := ds[i].validate(v); err != nil {
			return nil, nil, err
		}
	}
	ds, rowless = withoutRows(ds, func(d *demand) bool { return d.limit.rowless() })
	boundUpTo(ds, rowless)
	setNumbers(v, ds, now)
	slices.SortFunc(ds, func(a, b demand) int {
		return cmp.Or(strings.Compare(a.limit.name, b.limit.name), strings.Compare(a.key, b.key))
	})
	for i := 1; i < len(ds); i++ {
		if a, b := &ds[i-1].limit, &ds[i].limit; a.name == b.name && !sameRefill(a, b) {
			return nil, nil, twoDefinitions(a, b)
		}
	}
	return ds, rowless, nil
}

// addUp adds up the requests for the same limit and key.
func addUp(v Verb, requests []Request) ([]demand, error) {
	if len(requests) == 0 {
		return nil, fmt.Errorf("%w: the call has no requests", ErrInvalid)
	}
	ds := make([]demand, 0, len(requests))
	var index map[[2]string]int // nil for a single request
	if len(requests) > 1 {
		index = make(map[[2]string]int, len(requests))
	}
	for i := range requests {
		r := &requests[i] // a copy of each would cost time
		if r.err != nil {
			return nil, r.err
		}
		if r.limit.name == "" { // the zero Request
			return nil, r.limit.Validate()
		}
		if !countable(r.tokens) {
			return nil, fmt.Errorf("%w: limit %q: count %v is neither 0 nor between %v and %v", ErrInvalid, r.limit.name, r.tokens, algebra.MinTokens, algebra.MaxTokens)
		}
		id := [2]string{r.limit.name, r.key}
		at, found := index[id]
		if !found {
			at = len(ds)
			if index != nil {
				index[id] = at
			}
			ds = append(ds, demand{limit: r.limit, key: r.key, floor: math.Inf(-1), need: math.Inf(-1)})
		}
		d := &ds[at]
		if found && d.limit != r.limit {
			return nil, twoDefinitions(&d.limit, &r.limit)
		}
		tokens := r.tokens
		if v != VerbReset && (r.upTo || d.most > 0) {
			if err := r.validateUpTo(v, found); err != nil {
				return nil, err
			}
			d.most, tokens = tokens, 1
		}
		// Requests for one key are granted one after another. Each must leave its own floor, and each later one leaves less
		// than the one before.
		d.count += tokens
		d.need = max(d.need, d.count+r.floor(v))
		d.floor = max(d.floor-tokens, r.floor(v))
		d.reserve = d.reserve || v == VerbWait || r.reserve && (v == VerbConsume || v == VerbCheck)
		d.requests = append(d.requests, i)
	}
	return ds, nil
}

// setNumbers sets the demands' numbers. A calendar's windows are listed around now.
func setNumbers(v Verb, ds []demand, now pgtype.Timestamptz) {
	waits := v == VerbRefund || anyOf(ds, func(d *demand) bool { return d.reserve })
	for i := range ds {
		d := &ds[i]
		d.numbers = d.limit.forKey(d.key)
		if d.limit.onCalendar() {
			at := time.Now()
			if now.Valid {
				at = now.Time
			}
			d.numbers.Windows = d.limit.windows(algebra.At(at), waits)
			d.numbers.Start = (*d.numbers.Windows)[0]
		}
	}
}

// validateUpTo refuses UpTo where it has no meaning. again: the call has another request for the same limit and key.
func (r *Request) validateUpTo(v Verb, again bool) error {
	switch {
	case v != VerbConsume && v != VerbCheck:
		return fmt.Errorf("%w: limit %q: UpTo is for Consume and Check, not for %s", ErrInvalid, r.limit.name, v)
	case again:
		return fmt.Errorf("%w: limit %q: two requests for one key, and one of them has UpTo", ErrInvalid, r.limit.name)
	case r.tokens < 1:
		return fmt.Errorf("%w: limit %q: up to %v tokens is less than 1", ErrInvalid, r.limit.name, r.tokens)
	}
	return nil
}

// validate refuses a count that can never be granted.
func (d *demand) validate(v Verb) error {
	if d.count > algebra.MaxTokens && v != VerbReset {
		return fmt.Errorf("%w: limit %q: count %v in one call is above %v", ErrInvalid, d.limit.name, d.count, algebra.MaxTokens)
	}
	if v == VerbRefund || v == VerbReset || d.limit.grantsNothing() { // the last is a denial by policy
		return nil
	}
	capacity := d.limit.numbers.Capacity
	if v == VerbWait && d.count > capacity && capacity > 0 {
		return fmt.Errorf("%w: limit %q: no wait for %v tokens, since at most %v can be had at once", ErrExceedsCapacity, d.limit.name, d.count, capacity)
	}
	if left := capacity - d.count; left < d.floor {
		if d.need <= capacity { // too much only by rounding
			d.floor = left
			return nil
		}
		return fmt.Errorf("%w: limit %q: %v tokens can never be granted, since at most %v can be had at once",
			ErrExceedsCapacity, d.limit.name, d.count, capacity-d.floor)
	}
	return nil
}

// floor is the lowest balance that the request by itself may leave.
func (r *Request) floor(v Verb) float64 {
	switch {
	case v == VerbCharge, v == VerbCheck && r.tokens == 0: // which reads the balance, even a debt
		return math.Inf(-1)
	case r.reserve, v == VerbWait:
		return -r.limit.maxOwed()
	default:
		return 0
	}
}

// anyOf reports whether is holds for any of the demands. They are large: slices.ContainsFunc would copy each.
func anyOf(ds []demand, is func(d *demand) bool) bool {
	for i := range ds {
		if is(&ds[i]) {
			return true
		}
	}
	return false
}

// forfeits reports whether a grant may forfeit tokens while its work waits (see algebra.Reserve). Only two kinds can: a
// reservation of a window, and a reservation in a call for several limits, which wait for each other.
func forfeits(ds []demand) bool {
	return anyOf(ds, func(d *demand) bool { return d.reserve && (len(ds) > 1 || d.limit.numbers.Window) })
}

// takesUpTo reports whether any of the demands has UpTo.
func takesUpTo(ds []demand) bool {
	return anyOf(ds, func(d *demand) bool { return d.most > 0 })
}

// sharded reports whether any of the limits has shards.
func sharded(ds []demand) bool {
	return anyOf(ds, func(d *demand) bool { return d.limit.shards > 1 })
}

// leastUpTo is the least number of tokens that any of the demands takes UpTo, or +Inf.
func leastUpTo(ds []demand) float64 {
	least := math.Inf(1)
	for _, d := range ds {
		if d.most > 0 {
			least = min(least, d.most)
		}
	}
	return least
}

// boundUpTo makes the demands with UpTo take no more than those without rows do, since all take the same number.
func boundUpTo(ds, rowless []demand) {
	if rowless == nil {
		return
	}
	for i := range ds {
		ds[i].most = min(ds[i].most, leastUpTo(rowless))
	}
}

package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/visible"
)

// demand is the sum of a call's requests for one limit and key.
type demand struct {
	limit    Limit
	key      string
	numbers  algebra.Limit // the limit's numbers for the key and, of a calendar, the time of the call
	count    float64
	floor    float64 // the lowest balance that may be left, but for the tolerance: see lowest
	most     float64 // of a Take: the most tokens to take. Then count is 1. Otherwise 0
	tooMuch  bool    // the numbers can never grant it
	requests []int
	picks    [2]int32 // the shards to look at first, once the statement was made
}

// lowest is the lowest balance that may be left. The database gets it as the floor.
func (d *demand) lowest() float64 {
	if d.limit.slots {
		return algebra.Limit{}.Lowest(d.floor) // as the database has them
	}
	return d.limit.numbers.Lowest(d.floor)
}

func (d *demand) id() limitKey { return limitKey{d.limit.name, d.key} }

// demands validates the requests and adds up the requests for the same limit and key. The result is in the order in which
// the database locks. Demands of limits without rows are apart. With [ErrExceedsCapacity], it returns the demands too.
func demands(does *rules, requests []Request, now pgtype.Timestamptz) (ds, rowless []demand, err error) {
	if ds, err = addUp(does, requests); err != nil {
		return nil, nil, err
	}
	for i := range ds {
		switch wrong := ds[i].validate(does); {
		case errors.Is(wrong, ErrExceedsCapacity):
			ds[i].tooMuch = true
			err = cmp.Or(err, wrong)
		case wrong != nil:
			return nil, nil, wrong
		}
	}
	ds, rowless = withoutRows(ds, does.rowless)
	setNumbers(does, ds, now, false)
	return ds, rowless, err
}

// addUp adds up the requests for the same limit and key, and sorts them by these.
func addUp(does *rules, requests []Request) ([]demand, error) {
	if len(requests) == 0 {
		return nil, invalidCall(nil, "the call has no requests")
	}
	ds, places := make([]demand, 0, len(requests)), make([]int, len(requests)) // a demand is large: places are sorted in its stead
	for i := range places {
		places[i] = i
	}
	slices.SortFunc(places, func(i, j int) int {
		a, b := &requests[i], &requests[j]
		if c := strings.Compare(a.limit.name, b.limit.name); c != 0 {
			return c
		}
		return cmp.Or(strings.Compare(a.key, b.key), i-j) // those for one key stay in their order
	})
	for n, i := range places {
		r := &requests[i] // a copy of each would cost time
		if r.err != nil {
			return nil, r.err
		}
		if r.limit.name == "" { // the zero Request
			return nil, r.limit.Validate()
		}
		if !countable(r.tokens) {
			return nil, fmt.Errorf("%w: limit %q: count %v is neither 0 nor between %v and %v", ErrBadRequest, r.limit.name, r.tokens, algebra.MinTokens, algebra.MaxTokens)
		}
		if r.every {
			return nil, fmt.Errorf("%w: limit %q: EveryKey is only for Override, Block, Restore and Unblock", ErrInvalid, r.limit.name)
		}
		if r.limit.slots && !does.slots {
			return nil, fmt.Errorf("%w: limit %q has slots, which only Hold takes, and only Settle and Release give back", ErrInvalid, r.limit.name)
		}
		if does.pauses && (r.limit.numbers.Window || r.limit.unlimited()) {
			return nil, fmt.Errorf("%w: limit %q is no token bucket, and only these can be paused", ErrInvalid, r.limit.name)
		}
		last := len(ds) - 1
		found := last >= 0 && ds[last].key == r.key && ds[last].limit.name == r.limit.name
		if found && does.each && ds[last].limit == r.limit {
			found = false
		}
		if !found {
			last++
			ds = append(ds, demand{limit: r.limit, key: r.key, floor: does.floor(&r.limit), requests: places[n:n]})
		}
		d := &ds[last]
		if found && d.limit != r.limit {
			return nil, twoDefinitions(&d.limit, &r.limit)
		}
		tokens := r.tokens
		if does.ignoresCount || does.pauses && !r.counts {
			tokens = 0
		}
		if found && does.pauses && !does.ignoresCount {
			return nil, fmt.Errorf("%w: limit %q: a Pause has two requests for one key", ErrInvalid, r.limit.name)
		}
		if does.upTo {
			if found {
				return nil, fmt.Errorf("%w: limit %q: a Take has two requests for one key", ErrInvalid, r.limit.name)
			}
			d.most, tokens = tokens, 1
		}
		d.count += tokens
		d.requests = append(d.requests, i)
	}
	return ds, nil
}

// validate refuses a count that is no count, and one that can never be granted.
func (d *demand) validate(does *rules) error {
	if does.ignoresCount {
		return nil
	}
	if d.count > algebra.MaxTokens {
		return fmt.Errorf("%w: limit %q: count %v in one call is above %v", ErrBadRequest, d.limit.name, d.count, algebra.MaxTokens)
	}
	if d.limit.slots && does.deniable && !(d.count >= 1 && d.count == math.Trunc(d.count)) {
		return fmt.Errorf("%w: limit %q: count %v of slots is not a whole number of at least 1", ErrBadRequest, d.limit.name, d.count)
	}
	if does.refunds || does.holds && !does.deniable || d.limit.grantsNothing() { // the last is denied without asking
		return nil
	}
	capacity := d.limit.numbers.Capacity
	if d.limit.slots { // its floor has them
		capacity = 0
	}
	if does.atMostFull && capacity > 0 && !d.limit.numbers.Holds(d.count) {
		return fmt.Errorf("%w: limit %q: no wait for %s tokens, since at most %s can be had at once",
			ErrExceedsCapacity, d.limit.name, visible.Number(d.count), visible.Number(capacity))
	}
	if capacity-d.count < d.lowest() {
		hint := ""
		if !d.limit.slots && capacity == d.limit.numbers.Rate && capacity < 1 {
			hint = " (the capacity is the rate, unless Capacity is given)"
		}
		return fmt.Errorf("%w: limit %q: %s tokens can never be granted, since at most %s can be had at once%s",
			ErrExceedsCapacity, d.limit.name, visible.Number(d.count), visible.Number(capacity-d.floor), hint)
	}
	return nil
}

// noCounts refuses a Count where it means nothing.
func noCounts(what string, requests []Request) error {
	for i := range requests {
		if requests[i].tokens != 1 {
			return invalidCall(requests[i:i+1], what+" has no Count: it is about the key")
		}
	}
	return nil
}

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

// anyOf reports whether is holds for any of the demands. They are large: slices.ContainsFunc would copy each.
func anyOf(ds []demand, is func(d *demand) bool) bool {
	for i := range ds {
		if is(&ds[i]) {
			return true
		}
	}
	return false
}

// sharded reports whether any of the limits has shards.
func sharded(ds []demand) bool {
	return anyOf(ds, func(d *demand) bool { return d.limit.shards > 1 })
}

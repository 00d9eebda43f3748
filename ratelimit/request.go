package ratelimit

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Request asks for tokens of a limit. It is a value: its methods return changed copies.
type Request struct {
	limit   Limit
	key     string
	tokens  float64
	reserve bool
	err     error
}

// Key makes a request for one token of a key's share of the limit: a user, a team, an address. A key of several parts
// ("eu", userID) is stored as "eu|userID", with a backslash before each "|" and backslash of the parts, so that no other
// parts make the same key.
//
// No part may be empty: an empty user id must not be everybody's bucket. A limit without keys is asked for with
// [Limit.Global]. The key is stored in the clear; hash what should not be (an address, an e-mail).
func (l Limit) Key(parts ...string) Request {
	r := Request{limit: l, tokens: 1, err: l.Validate()}
	if len(parts) == 0 {
		parts = []string{""}
	}
	for i, part := range parts {
		if part == "" && r.err == nil {
			r.err = fmt.Errorf("%w: limit %q: part %d of the key is empty; Global asks for a limit without keys", ErrInvalid, l.name, i+1)
		}
	}
	r.key = joinKey(parts)
	if r.err == nil {
		if err := checkText("key", r.key, MaxKeyLen); err != nil {
			r.err = fmt.Errorf("%w: limit %q: %w", ErrInvalid, l.name, err)
		}
	}
	return r
}

// Global makes a request for one token of a limit that has no keys. It is stored with an empty key.
func (l Limit) Global() Request {
	return Request{limit: l, tokens: 1, err: l.Validate()}
}

// Count sets how many tokens are asked for, a fraction if need be. The default is 1. A [Limiter.Check] of 0 reads the balance, and
// is never denied. A [Limiter.Consume] of 0 is denied while the limit is in debt.
func (r Request) Count(tokens float64) Request {
	r.tokens = tokens
	return r
}

// Reserve lets the request take tokens that are not there yet, down to a balance of -maxReserved. The result's RetryAt
// then says when they will have been refilled, which is when the work may run.
func (r Request) Reserve() Request {
	r.reserve = true
	return r
}

// escape keeps the parts of a key apart.
var escape = strings.NewReplacer(`\`, `\\`, `|`, `\|`)

// joinKey joins the parts with "|".
func joinKey(parts []string) string {
	if len(parts) == 1 {
		return escape.Replace(parts[0])
	}
	escaped := make([]string, len(parts))
	for i, part := range parts {
		escaped[i] = escape.Replace(part)
	}
	return strings.Join(escaped, "|")
}

// verb is what is done with requests.
type verb string

const (
	verbConsume verb = "consume"
	verbCheck   verb = "check"
	verbCharge  verb = "charge"
	verbRefund  verb = "refund"
	verbReset   verb = "reset"
)

// demand is what a call asks of one limit and key: the sum of all its requests for them.
type demand struct {
	limit    Limit
	key      string
	count    float64
	floor    float64 // the lowest balance that may be left
	need     float64 // the least balance that is enough: count + floor, summed up without rounding floor
	requests []int
}

// demands validates the requests and adds up those for the same limit and key, sorted in the order in which the database
// locks.
func demands(v verb, requests []Request) ([]demand, error) {
	if len(requests) == 0 {
		return nil, fmt.Errorf("%w: no request", ErrInvalid)
	}
	ds := make([]demand, 0, len(requests))
	var index map[[2]string]int // of several
	if len(requests) > 1 {
		index = make(map[[2]string]int, len(requests))
	}
	for i, r := range requests {
		if r.err == nil {
			r.err = r.limit.Validate() // the zero Request
		}
		if r.err != nil {
			return nil, r.err
		}
		if !countable(r.tokens) {
			return nil, fmt.Errorf("%w: limit %q: count %v is neither 0 nor between %v and %v", ErrInvalid, r.limit.name, r.tokens, MinTokens, MaxTokens)
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
		if d.limit != r.limit {
			return nil, fmt.Errorf("%w: limit %q is asked for with two definitions in one call", ErrInvalid, r.limit.name)
		}
		// Requests for one key are granted one after another: each may leave no less than its own floor, and those
		// after it leave less than it did.
		d.count += r.tokens
		d.need = max(d.need, d.count+r.floor(v))
		d.floor = max(d.floor-r.tokens, r.floor(v))
		d.requests = append(d.requests, i)
	}
	for i := range ds {
		d := &ds[i]
		if d.count > MaxTokens && v != verbReset {
			return nil, fmt.Errorf("%w: limit %q: count %v in one call is above %v", ErrInvalid, d.limit.name, d.count, MaxTokens)
		}
		if v == verbRefund || v == verbReset {
			continue
		}
		if left := d.limit.numbers.Capacity - d.count; left < d.floor {
			if d.need <= d.limit.numbers.Capacity { // it is enough but for rounding
				d.floor = left
				continue
			}
			return nil, fmt.Errorf("%w: limit %q: %v tokens can never be granted, since at most %v can be had at once",
				ErrExceedsCapacity, d.limit.name, d.count, d.limit.numbers.Capacity-d.floor)
		}
	}
	slices.SortFunc(ds, func(a, b demand) int {
		return cmp.Or(strings.Compare(a.limit.name, b.limit.name), strings.Compare(a.key, b.key))
	})
	return ds, nil
}

// floor is the lowest balance that the request alone may leave.
func (r Request) floor(v verb) float64 {
	switch {
	case v == verbCharge, v == verbCheck && r.tokens == 0: // which asks what the balance is, be it a debt
		return math.Inf(-1)
	case r.reserve:
		return -r.limit.maxReserved
	default:
		return 0
	}
}

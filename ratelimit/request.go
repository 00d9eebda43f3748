package ratelimit

import (
	"fmt"
	"strings"
)

// Request asks for tokens of a limit. It is a value: its methods return changed copies.
type Request struct {
	limit   Limit
	key     string
	tokens  float64
	upTo    bool // tokens is the most
	reserve bool
	err     error
}

// Key makes a request for one token of a key's share of the limit. A key is, for example, a user, a team or an address.
// Several parts ("eu", userID) are stored as "eu|userID", with a backslash before each "|" and backslash of the parts. So
// different parts never make the same key.
//
// A key is valid UTF-8 without NUL, at most 1024 bytes long. No part may be empty: a missing user id must not count for all
// users together. For a limit without keys, use [Limit.Global]. The key is stored in the clear. Hash keys that should not
// be readable, such as an address or an e-mail.
//
// Keys are compared byte by byte. Make an e-mail address or a name canonical first, as the application compares it, or one
// user has several keys: Key(strings.ToLower(norm.NFC.String(strings.TrimSpace(email)))), with norm from
// golang.org/x/text/unicode/norm. The id of the user that was found is a better key.
func (l Limit) Key(parts ...string) Request {
	r := Request{limit: l, tokens: 1, err: l.Validate()}
	if len(parts) == 0 {
		parts = []string{""}
	}
	for i, part := range parts {
		if part == "" && r.err == nil {
			r.err = fmt.Errorf("%w: limit %q: part %d of the key is empty (for a limit without keys, use Global)", ErrInvalid, l.name, i+1)
		}
	}
	r.key = joinKey(parts)
	if r.err == nil {
		if err := checkText("key", r.key, maxKeyLen); err != nil {
			r.err = fmt.Errorf("%w: limit %q: %w", ErrInvalid, l.name, err)
		}
	}
	return r
}

// Global makes a request for one token of a limit that has no keys. It is stored with an empty key.
func (l Limit) Global() Request {
	return Request{limit: l, tokens: 1, err: l.Validate()}
}

// Count sets how many tokens are asked for: 0, or 1e-15 to 1e15, fractions included. The default is 1. A [Limiter.Check] of
// 0 reads the balance, and is never denied. A [Limiter.Consume] of 0 is denied while the limit is in debt.
func (r Request) Count(tokens float64) Request {
	r.tokens, r.upTo = tokens, false
	return r
}

// UpTo asks for what is there, instead of a Count: the largest whole number of tokens that the limit has, at least 1 and at
// most the given number, which may be above the capacity. [Status.Taken] says how many were taken. It is for workers that
// fetch work in batches: take up to 100, and fetch as many jobs as were taken. If there is not one whole token, the call is
// denied, and RetryAt is when there will be one. To give back what is not needed, [Limiter.Refund] a Count.
//
// All requests with UpTo of one call take the same number: as many as each of their limits has, and each of them allows.
// Requests without UpTo take their Count, as always, or the call is denied.
//
// UpTo is for [Limiter.Consume] and [Limiter.Check]; a check says how many a Consume would take. A call with UpTo has no
// request with Reserve, and no second request for the same limit and key. Otherwise it is [ErrInvalid].
func (r Request) UpTo(tokens int) Request {
	r.tokens, r.upTo = float64(tokens), true
	return r
}

// Reserve lets the request take tokens that are not there yet, down to a balance of -maxReserved. The result's RetryAt is
// the instant at which they will have been refilled, and so at which the work may run.
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

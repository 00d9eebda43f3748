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
	reserve bool
	err     error
}

// Key makes a request for one token of a key's share of the limit: a user, a team, an address. A key of several parts
// ("eu", userID) is stored as "eu|userID", with a backslash before each "|" and backslash of the parts, so that no other
// parts make the same key.
//
// No part may be empty: an empty user id must not be everybody's bucket. A limit without keys is asked for with
// [Limit.Global]. The key is stored in the clear; hash what should not be (an address, an e-mail).
//
// Keys are compared byte by byte. Make an e-mail address or a name canonical first, as the application compares it, or one
// user has several keys: Key(strings.ToLower(norm.NFC.String(strings.TrimSpace(email)))), norm being
// golang.org/x/text/unicode/norm. Better, count by the id of the user that was found.
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

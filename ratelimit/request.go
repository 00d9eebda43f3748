package ratelimit

import (
	"fmt"
	"strings"
)

// Request asks for tokens of a limit. It is a value: its methods return changed copies.
type Request struct {
	limit  Limit
	key    string
	tokens float64
	err    error
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
	r := l.Global()
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
	return Request{limit: l.program(), tokens: 1, err: l.Validate()}
}

// Count sets how many tokens are asked for: 0, or 1e-15 to 1e15, fractions included. The default is 1. A [Limiter.Consume] of
// 0 is denied while the limit is in debt.
func (r Request) Count(tokens float64) Request {
	r.tokens = tokens
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

package ratelimit

import (
	"fmt"
	"math"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/keytext"
)

// Request asks for tokens of a limit. It is a value: its methods return changed copies. Valid requests of equal limits,
// with the same key and the same Count, are equal (==), and may be keys of a map. %v shows the key; slog does not. A
// request without Count is not equal to one with Count(1).
type Request struct {
	limit  Limit
	key    string
	tokens float64
	counts bool // Count was called
	every  bool // it is of EveryKey
	err    error
}

// Key makes a request for one token of a key's share of the limit: a user, a team, an address. For a limit without
// keys, use [Limit.Global]. No part may be empty.
//
// One part is stored exactly as it is. Several parts ("eu", userID) are joined by "|", with a backslash before each "|"
// and each backslash of a part, as the SQL function ratelimit.key does. The one part "eu|ann" and the two parts "eu"
// and "ann" are one row. So give all keys of a limit one part, or all of them several.
//
// A key is valid UTF-8 without NUL, at most 1024 bytes long, and stored in the clear: hash what should not be readable.
// Keys are compared byte by byte.
func (l Limit) Key(parts ...string) Request {
	r := l.Global()
	if len(parts) == 0 {
		parts = []string{""}
	}
	for i, part := range parts {
		if part == "" && r.err == nil {
			r.err = fmt.Errorf("%w: limit %q: part %d of the key is empty (for a limit without keys, use Global)", ErrBadRequest, l.name, i+1)
		}
	}
	r.key = keytext.Join(parts...)
	if r.err == nil {
		if err := checkText("key", r.key, maxKeyLen); err != nil {
			r.err = fmt.Errorf("%w: limit %q: %w", ErrBadRequest, l.name, err)
		}
	}
	return r
}

// Global makes a request for one token of a limit that has no keys. It is stored with an empty key. Pause, Resume, Reset, Override, Block,
// Restore and Unblock fail (SQLSTATE 22023) if the limit has rows, and all have keys: a net for a forgotten key, and no promise.
func (l Limit) Global() Request {
	return Request{limit: l.program(), tokens: 1, err: l.Validate()}
}

// EveryKey makes a request for every key of the limit that has no override of its own, for [Limiter.Override], [Limiter.Block],
// [Limiter.Restore] and [Limiter.Unblock]. In any other verb, it is [ErrInvalid].
func (l Limit) EveryKey() Request {
	r := l.Global()
	r.every = true
	return r
}

// Count sets how many tokens are asked for: at most 1e15, fractions included. The default is 1 where tokens are taken;
// docs/holds.md, Without a Count, has the other verbs. Less than 1e-15 is 0. A [Limiter.Consume] of 0 is denied while
// the limit is in debt or blocked. Rounding alone never denies: a call may lack a billionth of the capacity, and at
// most 0.001 tokens.
func (r Request) Count(tokens float64) Request {
	r.counts = true
	if r.tokens = tokens; math.Abs(tokens) < algebra.MinTokens {
		r.tokens = 0
	}
	return r
}

// limitKey is a limit, by its name, and a key.
type limitKey struct{ name, key string }

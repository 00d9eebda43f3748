// Package inflight lets the middlewares hold slots while a handler runs, without an exported name of package ratelimit,
// which sets both functions when it starts.
package inflight

import (
	"context"
	"time"
)

// Slots is a func(requests []ratelimit.Request) bool: it reports whether one of them asks for slots.
var Slots any

// During is a func(ctx, *ratelimit.Limiter, ratelimit.DB, Work[ratelimit.Request, ratelimit.Held],
// ...ratelimit.Request) (ratelimit.Result, error). Its error is that of the hold: then nothing was served.
var During any

// Work is what runs while it holds. Its id is of this call alone, and free once it has ended.
type Work[Request, Held any] struct {
	ID     string
	Within time.Duration // bounds the decision, and the end

	Serve func(ctx context.Context, held Held)
	Used  func() []Request // after Serve, also if it panicked: what was used; what it does not name, as held
	Ended func(error)      // how the hold has ended; nil: well
}

// Package follow lets tests say when a Limiter reads its overrides. In a program, ratelimit.Open does that.
package follow

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Settings are how overrides are followed: DB is a ratelimit.DB, and the rest is as in ratelimit.Options.
type Settings struct {
	DB interface {
		QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	}
	Every   time.Duration
	Listen  bool
	OnError func(err error)
}

// Package ratelimit sets these. A limiter is a *ratelimit.Limiter.
var (
	Set  func(limiter any, s Settings)                // it follows; nothing is read yet
	With func(limiter, other any)                     // it follows together with another one
	Load func(ctx context.Context, limiter any) error // reads everything
	Run  func(ctx context.Context, limiter any)       // follows until ctx ends
)

// By makes a *ratelimit.Limiter follow, and returns it.
func By[L any](limiter *L, s Settings) *L {
	Set(limiter, s)
	return limiter
}

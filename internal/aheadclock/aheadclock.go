// Package aheadclock lets tests say what time it is for a Coalescer with Ahead. In a program, it is that of the process and of the database.
package aheadclock

import "time"

// Package ratelimit sets these. A coalescer is a *ratelimit.Coalescer.
var (
	// Set gives it a clock, which is that of its Limiters, too, and a monotonic one: the latest that the clock has shown. Then memory decides calls
	// of a Limiter.Clock, and nothing comes back or is refilled by itself.
	Set func(coalescer any, now, latest func() time.Time)
	// Sweep gives back what is no longer of use.
	Sweep func(coalescer any)
	// Refill takes more.
	Refill func(coalescer any)
)

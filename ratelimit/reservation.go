package ratelimit

import "time"

// Reservation is what [Limiter.Reserve] has taken. Its instants are by the clock that decided, in UTC, to the
// microsecond.
type Reservation struct {
	// At is as in [Result].
	At time.Time

	// RetryAt is when the work may run: when all its tokens will have been refilled, or At if they are there.
	RetryAt time.Time

	// Delay is the time from At to RetryAt. A timer set to it works even if the local clock is wrong.
	Delay time.Duration

	// Remaining, below zero if tokens are owed, ResetAt and Requests are as in [Result].
	Remaining float64
	ResetAt   time.Time

	// Requests has the status of each request, in order.
	Requests []Status

	receipt Receipt
}

// Receipt is the text to store with the work, for a later [Limiter.Refund]. It is empty if nothing was taken. The
// JSON of a Reservation does not have it: store this text.
func (r Reservation) Receipt() Receipt { return r.receipt }

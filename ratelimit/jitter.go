package ratelimit

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"time"
)

// Jitter spreads what would all happen at the same instant: it returns an instant from at on, and before at + span. The same
// key gets the same share of the span each time, in every process; the shares of different keys are spread evenly. It
// is never earlier than at, and it is at itself if span is less than 2 µs.
//
// Reservations of one fixed window, for example, may all run at the instant at which another begins. Spread over a part of
// the period, they do not come in one moment, nor later than in the window that their tokens are taken from:
//
//	runAt := ratelimit.Jitter(result.RetryAt, 10*time.Second, userID)
//
// The share is h / 2^64, and the delay that share of the span, rounded down to a microsecond, which is what a timestamptz
// holds; h is the first 64 bits of the SHA-256 of the key, whose parts are joined as those of [Limit.Key]. To have a key take
// another place for another limit, make the limit's name a part.
func Jitter(at time.Time, span time.Duration, key ...string) time.Time {
	if span < 0 {
		return at
	}
	hash := sha256.Sum256([]byte(joinKey(key)))
	micros, _ := bits.Mul64(binary.BigEndian.Uint64(hash[:]), uint64(span.Microseconds()))
	return at.Add(time.Duration(micros) * time.Microsecond)
}

package ratelimit

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"time"

	"github.com/txlimit/txlimit/internal/keytext"
)

// Jitter spreads events of one instant. It returns an instant from at on and before at + span, or at itself if span is
// less than 2 µs. The same key gets the same share of the span each time, in every process.
//
//	runAt := ratelimit.Jitter(reserved.RetryAt, 10*time.Second, userID)
//
// The delay is span × h / 2^64, rounded down to a microsecond. Here h is the first 64 bits of the SHA-256 of the key.
func Jitter(at time.Time, span time.Duration, key string, more ...string) time.Time {
	if span < 0 {
		return at
	}
	hash := sha256.Sum256([]byte(keytext.Join(append([]string{key}, more...)...)))
	micros, _ := bits.Mul64(binary.BigEndian.Uint64(hash[:]), uint64(span.Microseconds()))
	return at.Add(time.Duration(micros) * time.Microsecond)
}

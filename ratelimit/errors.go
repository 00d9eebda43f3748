package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// ErrInvalid is matched by the errors for a limit or a request that is wrong in itself. Nothing was sent to the server.
var ErrInvalid = errors.New("ratelimit: invalid")

// ErrExceedsCapacity is matched by the error for a count that can never be granted: above the capacity or, when reserving,
// above capacity + maxReserved. Waiting does not help. Nothing was sent to the server.
var ErrExceedsCapacity = errors.New("ratelimit: count exceeds capacity")

// ExceededError is what [Limiter.Consume] returns for a denial. It is no SQL error: the transaction stays usable, and
// nothing was consumed.
type ExceededError struct {
	// Result tells when to try again, and of every request of the call: those that are not OK were denied.
	Result
}

// Error names every limit that denied, but not the keys, which may be personal data; they are in the Result. What remains
// is rounded down, the wait up.
func (e *ExceededError) Error() string {
	var b strings.Builder
	b.WriteString("ratelimit: exceeded: ")
	for i, s := range e.Denied() {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s (%v asked, %v of %v remaining)", s.Limit.Name(), s.Count, math.Floor(s.Remaining*1000)/1000, s.Limit.Capacity())
	}
	fmt.Fprintf(&b, "; retry in %v", (e.RetryAfter + time.Millisecond - 1).Truncate(time.Millisecond))
	return b.String()
}

// Denied lists the requests that were denied.
func (e *ExceededError) Denied() []Status {
	var denied []Status
	for _, s := range e.Requests {
		if !s.OK {
			denied = append(denied, s)
		}
	}
	return denied
}

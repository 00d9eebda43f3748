package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// ErrInvalid is matched by the errors for a limit or a request that is wrong in itself: from [New], [Limit.Validate], every
// verb, [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx], [Limiter.Sweep] and [Retry]. Nothing was sent to the server.
var ErrInvalid = errors.New("ratelimit: invalid")

// ErrExceedsCapacity is matched by the error for a count that can never be granted: above the capacity or, when reserving,
// above capacity + maxReserved. [Limiter.Consume] and [Limiter.Check] return it. Waiting does not help. Nothing was sent to
// the server.
var ErrExceedsCapacity = errors.New("ratelimit: count exceeds capacity")

// ExceededError is what [Limiter.Consume] returns for a denial. It is no SQL error: the transaction stays usable, and
// nothing was consumed. On a batch ([Limiter.QueueConsume]) it stands for a SQL error, and the transaction is aborted.
type ExceededError struct {
	// Result tells when to try again, and of every request of the call: those that are not OK were denied.
	Result
}

// Error names every limit that denied, but not the keys, which may be personal data; they are in the Result. What remains
// is rounded down, the wait up.
func (e *ExceededError) Error() string {
	type bucket struct{ name, key string }
	asked := map[bucket]float64{}
	for _, s := range e.Denied() {
		asked[bucket{s.Limit.name, s.Key}] += s.Count
	}
	var denied []string
	for _, s := range e.Denied() {
		id := bucket{s.Limit.name, s.Key}
		if count, first := asked[id]; first {
			delete(asked, id)
			denied = append(denied, fmt.Sprintf("%s (%v asked, %v of %v remaining%s)", s.Limit.name, count,
				math.Floor(s.Remaining*1000)/1000, s.Limit.Capacity(), s.Limit.reservable()))
		}
	}
	wait := e.RetryAfter
	if rest := wait % time.Millisecond; rest > 0 && wait < math.MaxInt64-time.Millisecond {
		wait += time.Millisecond - rest
	}
	return fmt.Sprintf("ratelimit: exceeded: %s; retry in %v", strings.Join(denied, ", "), wait)
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

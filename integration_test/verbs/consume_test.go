package verbs_test

import (
	"errors"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestTokenBucketGrantsItsCapacityThenItsRate(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(20))
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		limiter, clock := harness.NewLimiter()
		for i := range 20 {
			result, err := limiter.Consume(t.Context(), db, limit.Key("ann"))
			if err != nil || !result.OK || result.Requests[0].Remaining != float64(19-i) || !result.At.Equal(harness.Noon) || !result.RetryAt.IsZero() {
				t.Fatalf("call %d: %+v, %v", i, result, err)
			}
		}
		result, err := limiter.Consume(t.Context(), db, limit.Key("ann"))
		var exceeded *ratelimit.DeniedError
		if !errors.As(err, &exceeded) || result.OK || exceeded.RetryAfter != 6*time.Second {
			t.Fatalf("call 21: %+v, %v; want a denial for 6 s", result, err)
		}
		clock.Advance(6*time.Second - time.Microsecond)
		if _, err := limiter.Consume(t.Context(), db, limit.Key("ann")); !errors.As(err, &exceeded) {
			t.Fatalf("a microsecond early: %v, want a denial", err)
		}
		clock.Advance(time.Microsecond)
		if _, err := limiter.Consume(t.Context(), db, limit.Key("ann")); err != nil {
			t.Fatalf("at RetryAt: %v", err)
		}
		if _, err := limiter.Consume(t.Context(), db, limit.Key("bob")); err != nil {
			t.Fatalf("another key: %v", err)
		}
	})
}

// README.md in this folder shows this test.
func TestConsumeTakesTokens(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.Capacity(20))
		w.Grant(limit.Key("ann").Count(15))
		w.Deny(limit.Key("ann").Count(6))
		w.Clock.Advance(6 * time.Second) // one token is refilled
		w.Grant(limit.Key("ann").Count(6))
		w.Holds(limit.Key("ann"), 0)
	})
}

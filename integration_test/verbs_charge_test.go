package integration_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestChargeIsUnconditional(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.MaxReserved(5))
		window := ratelimit.FixedWindow("calls", 10, time.Minute, ratelimit.Start(noon), ratelimit.MaxReserved(0))
		charge := func(requests ...ratelimit.Request) ratelimit.Result {
			w.Helper()
			result, err := w.limiter.Charge(w.Context(), w.db, requests...)
			if err != nil || !result.OK {
				w.Fatalf("charge: %+v, %v", result, err)
			}
			return result
		}

		result := charge(limit.Key("ann").Count(30)) // without a row, and above the capacity and maxReserved
		if result.Requests[0].Remaining != -20 {
			w.Fatalf("charged: %+v", result)
		}
		w.retries(result, 2*time.Minute)
		charge(limit.Key("ann").Count(10.5).Reserve())
		w.holds(limit.Key("ann"), -30.5)
		w.deny(limit.Key("ann").Count(0))
		w.deny(limit.Key("ann").Reserve())

		w.holds(limit.Key("bob"), 10)
		result = charge(limit.Key("bob").Count(1), window.Key("bob").Count(25), limit.Key("ann").Count(1))
		if r := result.Requests; r[0].Remaining != 9 || r[1].Remaining != -15 || r[2].Remaining != -31.5 {
			w.Fatalf("charged: %+v", result)
		}
		if r := result.Requests; !r[0].RetryAt.Equal(noon) || !r[1].RetryAt.Equal(noon.Add(2*time.Minute)) {
			w.Fatalf("charged: %+v", result)
		}
		w.retries(result, 189*time.Second)

		w.clock.Advance(2*time.Minute - time.Microsecond)
		w.deny(window.Key("bob").Count(0))
		w.clock.Advance(time.Microsecond)
		w.grant(window.Key("bob").Count(5))
		w.deny(window.Key("bob"))
	})
}

func TestChargeCountsWhatIsThere(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute)
		w.grant(limit.Global().Count(10))
		w.clock.Advance(30 * time.Second)
		if _, err := w.limiter.Charge(w.Context(), w.db, limit.Global().Count(7)); err != nil {
			w.Fatal(err)
		}
		w.holds(limit.Global(), -2)
	})
}

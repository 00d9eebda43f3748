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
			if err != nil || !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
				w.Fatalf("charge: %+v, %v", result, err)
			}
			return result
		}

		result := charge(limit.Key("ann").Count(30)) // without a row, and above the capacity and maxReserved
		if result.Requests[0].Remaining != -20 {
			w.Fatalf("charged: %+v", result)
		}
		w.owes(limit.Key("ann"), 2*time.Minute)
		charge(limit.Key("ann").Count(10.5))
		w.holds(limit.Key("ann"), -30.5)
		w.deny(limit.Key("ann").Count(0))
		w.denyReserve(limit.Key("ann"))

		w.holds(limit.Key("bob"), 10)
		result = charge(limit.Key("bob").Count(1), window.Key("bob").Count(25), limit.Key("ann").Count(1))
		if r := result.Requests; r[0].Remaining != 9 || r[1].Remaining != -15 || r[2].Remaining != -31.5 {
			w.Fatalf("charged: %+v", result)
		}
		for i, s := range result.Requests {
			if !s.OK || !s.RetryAt.IsZero() || s.Taken != s.Count {
				w.Fatalf("charged, request %d: %+v", i, s)
			}
		}
		w.grant(limit.Key("bob").Count(0))
		w.owes(window.Key("bob"), 2*time.Minute)
		w.owes(limit.Key("ann"), 189*time.Second)

		w.clock.Advance(2*time.Minute - time.Microsecond)
		w.deny(window.Key("bob").Count(0))
		w.clock.Advance(time.Microsecond)
		w.grant(window.Key("bob").Count(5))
		w.deny(window.Key("bob"))

		// What was refilled before the charge is there.
		w.grant(limit.Global().Count(10))
		w.clock.Advance(30 * time.Second)
		charge(limit.Global().Count(7))
		w.holds(limit.Global(), -2)
	})
}

package verbs_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestChargeIsUnconditional(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.MaxReserved(5))
		window := ratelimit.FixedWindow("calls", 10, time.Minute, ratelimit.Start(harness.Noon), ratelimit.MaxReserved(0))
		charge := func(requests ...ratelimit.Request) ratelimit.Result {
			w.Helper()
			result, err := w.Limiter.Charge(w.Context(), w.DB, requests...)
			if err != nil || !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
				w.Fatalf("charge: %+v, %v", result, err)
			}
			return result
		}

		result := charge(limit.Key("ann").Count(30)) // without a row, and above the capacity and maxReserved
		if result.Requests[0].Remaining != -20 {
			w.Fatalf("charged: %+v", result)
		}
		w.Owes(limit.Key("ann"), 2*time.Minute)
		charge(limit.Key("ann").Count(10.5))
		w.Holds(limit.Key("ann"), -30.5)
		w.Deny(limit.Key("ann").Count(0))
		w.DenyReserve(limit.Key("ann"))

		w.Holds(limit.Key("bob"), 10)
		result = charge(limit.Key("bob").Count(1), window.Key("bob").Count(25), limit.Key("ann").Count(1))
		if r := result.Requests; r[0].Remaining != 9 || r[1].Remaining != -15 || r[2].Remaining != -31.5 {
			w.Fatalf("charged: %+v", result)
		}
		for i, s := range result.Requests {
			if !s.OK || !s.RetryAt.IsZero() || s.Taken != s.Count {
				w.Fatalf("charged, request %d: %+v", i, s)
			}
		}
		w.Grant(limit.Key("bob").Count(0))
		w.Owes(window.Key("bob"), 2*time.Minute)
		w.Owes(limit.Key("ann"), 189*time.Second)

		w.Clock.Advance(2*time.Minute - time.Microsecond)
		w.Deny(window.Key("bob").Count(0))
		w.Clock.Advance(time.Microsecond)
		w.Grant(window.Key("bob").Count(5))
		w.Deny(window.Key("bob"))

		// What was refilled before the charge is there.
		w.Grant(limit.Global().Count(10))
		w.Clock.Advance(30 * time.Second)
		charge(limit.Global().Count(7))
		w.Holds(limit.Global(), -2)
	})
}

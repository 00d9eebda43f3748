package verbs_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestResetMakesLimitsFullAgain(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket, bare := ratelimit.TokenBucket("bucket", 10, time.Minute), ratelimit.TokenBucket("bare", 10, time.Minute)
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(4))
		reset := func(requests ...ratelimit.Request) {
			w.Helper()
			if err := w.Limiter.Reset(w.Context(), w.DB, requests...); err != nil {
				w.Fatalf("reset: %v", err)
			}
		}
		reset(bucket.Key("nobody"), window.Global(), sharded.Key("nobody")) // missing rows

		all := []ratelimit.Request{bucket.Key("ann"), bucket.Key("bob"), bare.Global(), window.Key("ann"), sharded.Key("ann"), sharded.Global()}
		for _, request := range all {
			w.Do(harness.Second(w.Limiter.Charge(w.Context(), w.DB, request.Count(30))))
		}
		reset(bucket.Key("ann"))
		w.Holds(bucket.Key("ann"), 10)
		for _, request := range all[1:] {
			w.Holds(request, -20)
		}
		reset(bare.Global(), sharded.Key("ann"), bucket.Key("ann"))
		w.Holds(bare.Global(), 10)
		w.Holds(sharded.Key("ann"), 10)
		w.Holds(bucket.Key("bob"), -20)
		w.Holds(sharded.Global(), -20)
		w.Holds(window.Key("ann"), -20)
		reset(all...)
		reset(all[0], all[0]) // the same limit twice
		if rows := w.Rows(); rows != "" {
			w.Fatalf("rows after all were reset:\n%s", rows)
		}
		// A capacity below the default count does not matter.
		reset(ratelimit.TokenBucket("none saved", 10, time.Minute, ratelimit.Capacity(0)).Key("ann"), bucket.Key("ann"))
	})
}

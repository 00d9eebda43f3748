package verbs_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// Known defects of the implementation that this library is modelled on, and two traps in the article about it.

func TestDefectAClockThatStepsBackTakesAWindowsTokens(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(harness.Noon)),
			ratelimit.FixedWindow("rollover", 10, time.Minute, ratelimit.Start(harness.Noon), ratelimit.Capacity(30)),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3)),
		} {
			w.Clock.At = harness.Noon
			ann, full := limit.Key("ann"), limit.Capacity()
			w.Grant(ann.Count(2))
			for _, back := range []time.Duration{time.Microsecond, time.Second, time.Minute, 61 * time.Second, 1000 * time.Hour} {
				w.Clock.At = harness.Noon.Add(-back)
				w.Holds(ann, full-2) // unchanged
				w.Grant(ann.Count(0))
				w.Clock.At = harness.Noon
				w.Holds(ann, full-2)
			}
			w.Clock.At = harness.Noon.Add(-90 * time.Second)
			w.Grant(ann.Count(full - 2))
			w.Deny(ann.Count(0.001))
			w.Clock.At = harness.Noon.Add(-time.Microsecond) // the tokens up to noon have been added before
			w.Deny(ann.Count(0.001))
			w.Clock.At = harness.Noon
			w.Deny(ann.Count(0.001))
			w.Clock.At = harness.Noon.Add(time.Minute)
			w.Holds(ann, 10)
		}
	})
}

func TestDefectANegativeCountMints(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute)
		w.Grant(limit.Key("ann").Count(10))
		for _, count := range []float64{-1, -1e-9, -1e300, math.Inf(-1)} {
			w.Refuse(ratelimit.ErrInvalid, limit.Key("ann").Count(count))
			w.RefuseReserve(ratelimit.ErrInvalid, limit.Key("ann").Count(count))
			w.Refuse(ratelimit.ErrInvalid, limit.Key("bob"), limit.Key("ann").Count(count))
			w.Refuse(ratelimit.ErrInvalid, limit.Key("ann").Count(5), limit.Key("ann").Count(count)) // though the sum is above 0
			_, err := w.Limiter.Charge(w.Context(), w.DB, limit.Key("ann").Count(count))
			if !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("charge %v: %v", count, err)
			}
			_, err = w.Limiter.Refund(w.Context(), w.DB, harness.ReceiptOf(harness.Noon, limit.Key("ann").Count(10)), limit.Key("ann").Count(count))
			if !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("refund %v: %v", count, err)
			}
			w.SQLFails("22023", `SELECT ratelimit._consume('messages', 'ann', 10, '1 min', 10, NULL, $1, 0, $2)`, count, harness.Noon)
			_, err = w.DB.Exec(w.Context(), `SELECT ratelimit._refund('{messages}', '{ann}', '{10}', '{1 min}', '{10}', '{NULL}', ARRAY[$1::float8], '{10}', '{0}', '{1}', $2, $2, $2)`, count, harness.Noon)
			w.Do(err)
		}
		w.Holds(limit.Key("ann"), 0)
	})
}

func TestALargeReservationIsNotStarvedByAStreamOfSmallRequests(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3)),
		} {
			w.Clock.At = harness.Noon
			key := limit.Key("team")
			w.Grant(key.Count(10))

			// A large request that only asks is starved: small requests take each refill before it asks again.
			small := func() (granted int) {
				for {
					if _, err := w.Limiter.Consume(w.Context(), w.DB, key); err != nil {
						return granted
					}
					granted++
				}
			}
			for range 20 {
				w.Clock.Advance(6*time.Second + time.Millisecond)
				if small() != 1 {
					w.Fatal("the stream of small requests was not granted one")
				}
				w.Deny(key.Count(8))
			}

			// A large request that reserves gets an instant, and later requests do not push it back.
			result := w.Reserve(key.Count(8))
			if result.Delay <= 40*time.Second || result.Delay > 48*time.Second {
				w.Fatalf("reserved for %v from now", result.Delay)
			}
			for w.Clock.At.Before(result.RetryAt) {
				if n := small(); n != 0 {
					w.Fatalf("%d small requests overtook the reservation", n)
				}
				if again := w.Deny(key.Count(0)); !again.RetryAt.Equal(result.RetryAt) {
					w.Fatalf("the reservation was for %v and is now for %v", result.RetryAt, again.RetryAt)
				}
				w.Clock.Advance(min(3*time.Second, result.RetryAt.Sub(w.Clock.At)))
			}
			w.Grant(key.Count(0)) // it runs
			w.Clock.Advance(6*time.Second + time.Millisecond)
			if small() != 1 {
				w.Fatal("after it, the small requests must be granted again")
			}
		}
	})
}

// In the article's code, a maxReserved of 0 means no bound.
func TestTrapMaxReservedZeroIsABound(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, options := range [][]ratelimit.Option{{}, {ratelimit.Shards(3)}} {
			name := strings.Repeat("x", 1+len(options))
			zero := ratelimit.TokenBucket(name+"zero", 10, time.Minute, append(options, ratelimit.MaxReserved(0))...).Key("ann")
			unset := ratelimit.TokenBucket(name+"unset", 10, time.Minute, options...).Key("ann")
			w.Reserve(zero.Count(10), unset.Count(10))
			w.DenyReserve(zero.Count(0.001))
			w.Reserve(unset.Count(1000))
			if got := harness.DeniedBy(w.DenyReserve(unset.Count(1), zero.Count(1))); len(got) != 1 || got[0].Limit.Name() != name+"zero" {
				w.Fatalf("denied by %+v, want the one that may owe nothing", got)
			}
		}
	})
}

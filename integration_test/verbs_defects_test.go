package integration_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// Known defects of the implementation that this library is modelled on, and two traps in the article about it.

// sqlFails runs a statement in a savepoint and wants it to fail with a SQLSTATE ("": any).
func (w world) sqlFails(state, sql string, args ...any) {
	w.Helper()
	tx := w.begin()
	_, err := tx.Exec(w.Context(), sql, args...)
	if got := sqlState(err); got == "" || state != "" && got != state {
		w.Errorf("%s %v: %v, want SQLSTATE %s", sql, args, err, state)
	}
	w.do(tx.Rollback(w.Context()))
}

func TestDefectAClockThatStepsBackTakesAWindowsTokens(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(noon)),
			ratelimit.FixedWindow("rollover", 10, time.Minute, ratelimit.Start(noon), ratelimit.Capacity(30)),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3)),
		} {
			w.clock.now = noon
			ann, full := limit.Key("ann"), limit.Capacity()
			w.grant(ann.Count(2))
			for _, back := range []time.Duration{time.Microsecond, time.Second, time.Minute, 61 * time.Second, 1000 * time.Hour} {
				w.clock.now = noon.Add(-back)
				w.holds(ann, full-2) // unchanged
				w.grant(ann.Count(0))
				w.clock.now = noon
				w.holds(ann, full-2)
			}
			w.clock.now = noon.Add(-90 * time.Second)
			w.grant(ann.Count(full - 2))
			w.deny(ann.Count(0.001))
			w.clock.now = noon.Add(-time.Microsecond) // the tokens up to noon have been added before
			w.deny(ann.Count(0.001))
			w.clock.now = noon
			w.deny(ann.Count(0.001))
			w.clock.now = noon.Add(time.Minute)
			w.holds(ann, 10)
		}
	})
}

func TestDefectANegativeCountMints(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute)
		w.grant(limit.Key("ann").Count(10))
		for _, count := range []float64{-1, -1e-9, -1e300, math.Inf(-1)} {
			w.refuse(ratelimit.ErrInvalid, limit.Key("ann").Count(count))
			w.refuseReserve(ratelimit.ErrInvalid, limit.Key("ann").Count(count))
			w.refuse(ratelimit.ErrInvalid, limit.Key("bob"), limit.Key("ann").Count(count))
			w.refuse(ratelimit.ErrInvalid, limit.Key("ann").Count(5), limit.Key("ann").Count(count)) // though the sum is above 0
			_, err := w.limiter.Charge(w.Context(), w.db, limit.Key("ann").Count(count))
			if !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("charge %v: %v", count, err)
			}
			_, err = w.limiter.Refund(w.Context(), w.db, receiptOf(noon, limit.Key("ann").Count(10)), limit.Key("ann").Count(count))
			if !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("refund %v: %v", count, err)
			}
			w.sqlFails("22023", `SELECT ratelimit._consume('messages', 'ann', 10, '1 min', 10, NULL, $1, 0, $2)`, count, noon)
			_, err = w.db.Exec(w.Context(), `SELECT ratelimit._refund('{messages}', '{ann}', '{10}', '{1 min}', '{10}', '{NULL}', ARRAY[$1::float8], '{10}', '{0}', '{1}', $2, $2, $2)`, count, noon)
			w.do(err)
		}
		w.holds(limit.Key("ann"), 0)
	})
}

func TestALargeReservationIsNotStarvedByAStreamOfSmallRequests(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3)),
		} {
			w.clock.now = noon
			key := limit.Key("team")
			w.grant(key.Count(10))

			// A large request that only asks is starved: small requests take each refill before it asks again.
			small := func() (granted int) {
				for {
					if _, err := w.limiter.Consume(w.Context(), w.db, key); err != nil {
						return granted
					}
					granted++
				}
			}
			for range 20 {
				w.clock.Advance(6*time.Second + time.Millisecond)
				if small() != 1 {
					w.Fatal("the stream of small requests was not granted one")
				}
				w.deny(key.Count(8))
			}

			// A large request that reserves gets an instant, and later requests do not push it back.
			result := w.reserve(key.Count(8))
			if result.Delay <= 40*time.Second || result.Delay > 48*time.Second {
				w.Fatalf("reserved for %v from now", result.Delay)
			}
			for w.clock.now.Before(result.RetryAt) {
				if n := small(); n != 0 {
					w.Fatalf("%d small requests overtook the reservation", n)
				}
				if again := w.deny(key.Count(0)); !again.RetryAt.Equal(result.RetryAt) {
					w.Fatalf("the reservation was for %v and is now for %v", result.RetryAt, again.RetryAt)
				}
				w.clock.Advance(min(3*time.Second, result.RetryAt.Sub(w.clock.now)))
			}
			w.grant(key.Count(0)) // it runs
			w.clock.Advance(6*time.Second + time.Millisecond)
			if small() != 1 {
				w.Fatal("after it, the small requests must be granted again")
			}
		}
	})
}

// In the article's code, a maxReserved of 0 means no bound.
func TestTrapMaxReservedZeroIsABound(t *testing.T) {
	behaviour(t, func(w world) {
		for _, options := range [][]ratelimit.Option{{}, {ratelimit.Shards(3)}} {
			name := strings.Repeat("x", 1+len(options))
			zero := ratelimit.TokenBucket(name+"zero", 10, time.Minute, append(options, ratelimit.MaxReserved(0))...).Key("ann")
			unset := ratelimit.TokenBucket(name+"unset", 10, time.Minute, options...).Key("ann")
			w.reserve(zero.Count(10), unset.Count(10))
			w.denyReserve(zero.Count(0.001))
			w.reserve(unset.Count(1000))
			if got := deniedBy(w.denyReserve(unset.Count(1), zero.Count(1))); len(got) != 1 || got[0].Limit.Name() != name+"zero" {
				w.Fatalf("denied by %+v, want the one that may owe nothing", got)
			}
		}
	})
}

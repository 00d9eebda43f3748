package verbs_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestKeysNeverCollide: neither do several parts with one, nor any key with the limit without keys.
func TestKeysNeverCollide(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("messages", 1, time.Minute)
		keys := [][]string{
			{"a", "b"}, {`a\`, "b"}, {"a", "|b"}, {"a|", "b"}, {`a\\`, "b"}, {`a`, `\|b`}, {"a", "b", "c"}, {"a|b", "c"}, {"a", "b|c"},
			{"|", "|"}, {`\`, `\`}, {`\|`, "|"}, {"|", `\|`}, {`\|`, `\`}, {"A", "b"}, {"a ", "b"}, {"b", "a"},
			// One part, which no several parts are stored as.
			{"a||b"}, {`a\|b`}, {"|"}, {`\`}, {`\|`}, {`C:\a|b`}, {"|a|b"}, {`a|b\`},
			{"global"}, {"*"}, {" "}, {"''"}, {"NULL"},
		}
		w.Grant(limit.Global())
		for _, parts := range keys {
			w.Grant(limit.Key(parts...))
		}
		for _, parts := range keys {
			w.Deny(limit.Key(parts...))
		}
		w.Deny(limit.Global())
		if key := w.Check(limit.Global()).Requests[0].Key; key != "" {
			w.Fatalf("the key of the limit without keys is %q", key)
		}
	})
}

func TestAFixedWindowsGridGoesThroughItsStart(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for i, start := range []time.Time{
			harness.Noon.Add(-30 * time.Minute), harness.Noon.Add(30 * time.Minute), harness.Noon.Add(-30*time.Minute - 10_000*time.Hour),
			harness.Noon.Add(30*time.Minute + 1_000_000*time.Hour), time.Date(1, 1, 1, 0, 30, 0, 0, time.UTC), time.Date(9999, 12, 31, 23, 30, 0, 0, time.UTC),
			harness.Noon.Add(30 * time.Minute).In(time.FixedZone("Kathmandu", 5*3600+45*60)),
		} {
			w.Clock.At = harness.Noon
			limit := ratelimit.FixedWindow(fmt.Sprint("calls", i), 2, time.Hour, ratelimit.Start(start))
			result := w.Grant(limit.Key("ann").Count(2)) // a start in the future denies nothing
			if at := result.Requests[0].ResetAt; !at.Equal(harness.Noon.Add(30 * time.Minute)) {
				w.Fatalf("start %v: the next window begins at %v", start, at)
			}
			w.Retries(w.Deny(limit.Key("ann")), 30*time.Minute)
			w.Clock.Advance(30*time.Minute - time.Microsecond)
			w.Deny(limit.Key("ann"))
			w.Clock.Advance(time.Microsecond)
			w.Grant(limit.Key("ann").Count(2))
			w.Retries(w.Deny(limit.Key("ann")), time.Hour)
		}
	})
}

// In floating point, 3.3 seconds divided by 1.1 are less than 3.
func TestAFixedWindowMissesNoWindowByRounding(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("calls", 10, 1100*time.Millisecond, ratelimit.Capacity(30), ratelimit.Start(harness.Noon)).Key("ann")
		w.Grant(limit.Count(30))
		w.Clock.Advance(3300*time.Millisecond - time.Microsecond)
		w.Holds(limit, 20)
		w.Clock.Advance(time.Microsecond)
		w.Holds(limit, 30)
		w.Grant(limit.Count(30))
	})
}

func TestAFixedWindowWithoutAStartHasAGridPerKey(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("calls", 2, time.Hour)
		offset := func(request ratelimit.Request) time.Duration {
			w.Helper()
			at := w.Check(request).Requests[0].ResetAt
			if left := at.Sub(w.Clock.At); left <= 0 || left > time.Hour {
				w.Fatalf("at %v the next window begins at %v", w.Clock.At, at)
			}
			return time.Duration(at.UnixMicro()*1000) % time.Hour
		}
		seen := map[time.Duration]string{}
		random := harness.NewRand(w.T)
		for i := range 20 {
			key := fmt.Sprint("user ", i)
			first := offset(limit.Key(key))
			if other, there := seen[first]; there {
				w.Fatalf("%q and %q begin together", key, other)
			}
			seen[first] = key
			for range 5 {
				w.Clock.Advance(time.Duration(random.Int64N(int64(5 * time.Hour))))
				_, err := w.Limiter.Charge(w.Context(), w.DB, limit.Key(key))
				w.Do(err)
				if now := offset(limit.Key(key)); now != first {
					w.Fatalf("%q began at %v, and now at %v", key, first, now)
				}
			}
		}
		other := ratelimit.FixedWindow("other", 5, time.Hour)
		if a, b := offset(limit.Key("user 1")), offset(other.Key("user 1")); a != b {
			w.Errorf("two limits begin at %v and %v for one key", a, b)
		}
		if offset(limit.Global()) == offset(other.Global()) {
			w.Error("two limits have one grid without keys")
		}
	})
}

func TestDeletingAnIdleRowChangesNoDecision(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		random := harness.NewRand(w.T)
		for _, limit := range []ratelimit.Limit{
			ratelimit.FixedWindow("hashed", 3, time.Minute, ratelimit.Capacity(5)),
			ratelimit.FixedWindow("started", 2, time.Minute, ratelimit.Start(harness.Noon.Add(time.Second))),
			ratelimit.TokenBucket("bucket", 3, time.Minute, ratelimit.Capacity(5)),
			ratelimit.TokenBucket("sharded", 3, time.Minute, ratelimit.Capacity(5), ratelimit.Shards(3)),
		} {
			w.Clock.At = harness.Noon
			key, deleted := limit.Key("ann"), 0
			for step := range 60 {
				w.Clock.Advance(time.Duration(random.Int64N(int64(time.Minute))))
				count := float64(random.IntN(3))
				if w.Balance(key) == limit.Capacity() {
					before := []any{w.Check(key.Count(count)), w.Check(key.Count(limit.Capacity())), w.Balances(key), w.WouldReserve(key.Count(9))}
					w.Do(harness.Second(w.DB.Exec(w.Context(), "DELETE FROM ratelimit.limits WHERE name = $1", limit.Name())))
					after := []any{w.Check(key.Count(count)), w.Check(key.Count(limit.Capacity())), w.Balances(key), w.WouldReserve(key.Count(9))}
					if !reflect.DeepEqual(before, after) {
						w.Fatalf("%s, step %d: was\n%+v, is\n%+v", limit.Name(), step, before, after)
					}
					deleted++
				}
				_, _ = w.Limiter.Consume(w.Context(), w.DB, key.Count(count))
			}
			if deleted < 3 {
				w.Fatalf("%s: %d rows deleted: this tested too little", limit.Name(), deleted)
			}
		}

		// Later calls, too: of two keys with the same windows and requests, one is swept whenever it is idle.
		limit := ratelimit.FixedWindow("swept", 3, time.Minute, ratelimit.Start(harness.Noon), ratelimit.Capacity(5))
		for step := range 100 {
			w.Clock.Advance(time.Duration(random.Int64N(int64(time.Minute))))
			if w.Balance(limit.Key("swept")) == 5 {
				_, err := w.DB.Exec(w.Context(), "DELETE FROM ratelimit.limits WHERE name = 'swept' AND key = 'swept'")
				w.Do(err)
			}
			count := float64(random.IntN(5))
			kept, _ := w.Limiter.Consume(w.Context(), w.DB, limit.Key("kept").Count(count))
			swept, _ := w.Limiter.Consume(w.Context(), w.DB, limit.Key("swept").Count(count))
			swept.Requests[0].Key = "kept"
			if !reflect.DeepEqual(kept, swept) {
				w.Fatalf("step %d: kept %+v, swept %+v", step, kept, swept)
			}
		}
	})
}

func TestWithACapacityOfZeroEverythingIsReserved(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.Capacity(0), ratelimit.MaxReserved(15)),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Capacity(0), ratelimit.MaxReserved(15), ratelimit.Start(harness.Noon)),
		} {
			w.Clock.At = harness.Noon
			key := limit.Key("ann")
			w.Refuse(ratelimit.ErrExceedsCapacity, key)
			w.Refuse(ratelimit.ErrExceedsCapacity, key.Count(1e-9))
			w.Grant(key.Count(0))
			w.Holds(key, 0)
			w.Runs(w.Reserve(key.Count(10)), time.Minute)
			w.Reserve(key.Count(5))
			w.DenyReserve(key)
			w.RefuseReserve(ratelimit.ErrExceedsCapacity, key.Count(16))
			w.Clock.Advance(24 * time.Hour) // an idle limit does not exceed its capacity
			w.Holds(key, 0)
			w.Refuse(ratelimit.ErrExceedsCapacity, key)
			w.Runs(w.Reserve(key.Count(10)), time.Minute)
		}
	})
}

// TestTheCapacityIsWhatAnIdleLimitSaves: it is the rate unless set. One below the rate caps the burst, and one above it rolls over.
func TestTheCapacityIsWhatAnIdleLimitSaves(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for i, c := range []struct {
			capacity float64 // 0: not set
			after    []float64
		}{{0, []float64{10, 10, 10}}, {4, []float64{4, 4, 4}}, {25, []float64{10, 20, 25, 25}}} {
			var options []ratelimit.Option
			if c.capacity > 0 {
				options = append(options, ratelimit.Capacity(c.capacity))
			}
			bucket := ratelimit.TokenBucket(fmt.Sprint("bucket ", i), 10, time.Minute, options...)
			window := ratelimit.FixedWindow(fmt.Sprint("window ", i), 10, time.Minute, append(options, ratelimit.Start(harness.Noon))...)
			most := c.after[len(c.after)-1]
			w.Clock.At = harness.Noon
			w.Grant(bucket.Global().Count(most), window.Global().Count(most))
			for idle, want := range c.after {
				w.Clock.Advance(time.Duration(idle+1) * time.Minute)
				for _, limit := range []ratelimit.Limit{bucket, window} {
					w.Holds(limit.Global(), want)
					w.Grant(limit.Global().Count(want))
					w.Deny(limit.Global().Count(0.001))
					w.Refuse(ratelimit.ErrExceedsCapacity, limit.Global().Count(most+0.001))
				}
			}
			w.Clock.Advance(24 * time.Second)
			w.Holds(bucket.Global(), 4)
			w.Holds(window.Global(), 0)
		}
		// A debt is paid at the full rate, then the balance grows up to the capacity. Tokens that are not taken in a window are there in the next.
		for capacity, want := range map[float64][]float64{4: {-7, 3, 4}, 25: {-7, 3, 13, 23, 25}} {
			w.Clock.At = harness.Noon
			window := ratelimit.FixedWindow(fmt.Sprint("debt ", capacity), 10, time.Minute, ratelimit.Capacity(capacity), ratelimit.Start(harness.Noon)).Global()
			w.Charge(window.Count(capacity + 17))
			for _, left := range want {
				w.Clock.Advance(time.Minute)
				w.Holds(window, left)
			}
		}
	})
}

func TestRatesAndCountsMayBeFractional(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("slow", 0.25, time.Second, ratelimit.Capacity(1.5))
		key := limit.Key("ann")
		w.Grant(key.Count(1.25))
		w.Holds(key, 0.25)
		w.Retries(w.Deny(key.Count(0.5)), time.Second)
		w.Retries(w.Deny(key.Count(1.5)), 5*time.Second)
		w.Refuse(ratelimit.ErrExceedsCapacity, key.Count(1.75))
		w.Grant(key.Count(0.125))
		w.Grant(key.Count(0.125))
		w.Retries(w.Deny(key.Count(0.0625)), 250*time.Millisecond)
		w.Clock.Advance(250 * time.Millisecond)
		w.Grant(key.Count(0.0625))

		monthly := ratelimit.FixedWindow("monthly", 0.5, time.Hour, ratelimit.Capacity(2), ratelimit.Start(harness.Noon))
		w.Grant(monthly.Key("ann").Count(2))
		w.Retries(w.Deny(monthly.Key("ann")), 2*time.Hour-250*time.Millisecond)
		w.Clock.At = harness.Noon.Add(2*time.Hour - time.Microsecond)
		w.Deny(monthly.Key("ann"))
		w.Clock.At = harness.Noon.Add(2 * time.Hour)
		w.Grant(monthly.Key("ann"))
	})
}

func TestMaxReservedUnsetZeroAndPositiveAreThreeThings(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		unset := ratelimit.TokenBucket("unset", 10, time.Minute).Key("ann")
		zero := ratelimit.TokenBucket("zero", 10, time.Minute, ratelimit.MaxReserved(0)).Key("ann")
		five := ratelimit.TokenBucket("five", 10, time.Minute, ratelimit.MaxReserved(5)).Key("ann")

		w.Runs(w.Reserve(unset.Count(1e6)), 99_999*time.Minute)
		w.Reserve(unset.Count(1e6))

		w.Reserve(zero.Count(10))
		w.Retries(w.DenyReserve(zero), 6*time.Second)
		w.RefuseReserve(ratelimit.ErrExceedsCapacity, zero.Count(11))

		w.Runs(w.Reserve(five.Count(9)), 0)
		w.Deny(five.Count(2)) // maxReserved is for Reserve
		w.Runs(w.Reserve(five.Count(4)), 18*time.Second)
		w.Retries(w.DenyReserve(five.Count(3)), 6*time.Second) // only the part beyond maxReserved counts
		w.Retries(w.Deny(five), 24*time.Second)
		w.Reserve(five.Count(2))
		w.RefuseReserve(ratelimit.ErrExceedsCapacity, five.Count(15.5))
		w.Clock.Advance(time.Hour)
		// Above the capacity, within capacity + maxReserved.
		w.Refuse(ratelimit.ErrExceedsCapacity, five.Count(15))
		w.Runs(w.Reserve(five.Count(15)), 30*time.Second)
		w.Retries(w.DenyReserve(five.Count(15)), 90*time.Second)
		w.Clock.Advance(90 * time.Second)
		w.Runs(w.Reserve(five.Count(15)), 30*time.Second)
	})
}

func TestAReservationsRetryAtIsWhenTheWorkMayRun(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		window := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(harness.Noon)).Key("ann")
		w.Clock.Advance(20 * time.Minute)
		w.Runs(w.Reserve(window.Count(10)), 0)
		w.Runs(w.Reserve(window.Count(1)), 40*time.Minute)
		w.Runs(w.Reserve(window.Count(9)), 40*time.Minute)
		w.Runs(w.Reserve(window.Count(11)), 160*time.Minute)
		w.Runs(w.Reserve(window.Count(0)), 160*time.Minute)
		w.Holds(window, -21)
	})
}

func TestChangingALimitTakesEffectAtTheNextCallAndNeverMints(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		anew := func() harness.World { // a new Limiter, since one refuses two definitions of a name
			w.Limiter = &ratelimit.Limiter{Clock: w.Clock.Now}
			return w
		}
		bucket := func(rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.TokenBucket("limit", rate, period, options...).Key("ann")
		}
		window := func(rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.FixedWindow("limit", rate, period, append(options, ratelimit.Start(harness.Noon))...).Key("ann")
		}

		// The capacity. A higher one adds no tokens, a lower one cuts the balance.
		anew().Grant(bucket(10, time.Minute).Count(4))
		anew().Holds(bucket(10, time.Minute, ratelimit.Capacity(1000)), 6)
		anew().Holds(bucket(10, time.Minute, ratelimit.Capacity(2)), 2)
		anew().Grant(bucket(10, time.Minute, ratelimit.Capacity(2)).Count(1))
		anew().Holds(bucket(10, time.Minute, ratelimit.Capacity(1000)), 1)
		anew().Refuse(ratelimit.ErrExceedsCapacity, bucket(10, time.Minute, ratelimit.Capacity(2)).Count(3)) // though the row exists
		anew().Holds(bucket(10, time.Minute, ratelimit.Capacity(0)), 0)

		// The rate and the period.
		w.Clock.Advance(6 * time.Second)
		anew().Holds(bucket(10, time.Minute), 2)
		anew().Holds(bucket(20, time.Minute), 3)
		anew().Holds(bucket(10, 30*time.Second), 3)
		anew().Grant(bucket(10, time.Minute).Count(2))
		anew().Holds(bucket(1e6, time.Minute), 0)

		// The kind changes at the same instant: nothing is added either way.
		anew().Holds(window(10, time.Minute), 0)
		anew().Grant(window(10, time.Minute).Count(0))
		anew().Holds(bucket(10, time.Minute), 0)
		w.Clock.At = harness.Noon.Add(time.Minute)
		anew().Holds(window(10, time.Minute), 10)
		anew().Grant(window(10, time.Minute).Count(10))
		anew().Holds(bucket(10, time.Minute), 0)
		anew().Holds(window(10, time.Second), 0)
		anew().Holds(window(10, time.Hour), 0)
		anew().Holds(window(1000, time.Minute), 0)

		// A debt stays, whatever the new numbers.
		anew().Reserve(bucket(10, time.Minute).Count(20))
		for _, request := range []ratelimit.Request{
			bucket(100, time.Minute), bucket(10, time.Hour), bucket(10, time.Minute, ratelimit.Capacity(0)), bucket(10, time.Minute, ratelimit.MaxReserved(0)),
			window(10, time.Minute), window(10, time.Minute, ratelimit.Capacity(100)), window(10, time.Hour, ratelimit.MaxReserved(3)),
		} {
			anew().Holds(request, -20)
			anew().Deny(request.Count(0))
		}
		anew().DenyReserve(bucket(10, time.Minute, ratelimit.MaxReserved(5)))
	})
}

// docs/concepts.md has this recipe: with capacity + rate × window ≤ N, no window of that length has more than N, wherever
// it begins.
func TestAtMostNInAnyWindow(t *testing.T) {
	const n, window = 100, time.Hour
	for _, capacity := range []float64{1, 20, 99} {
		t.Run(fmt.Sprint("capacity ", capacity), func(t *testing.T) {
			harness.Behaviour(t, func(w harness.World) {
				r := harness.NewRand(w.T)
				limit := ratelimit.TokenBucket("api", n-capacity, window, ratelimit.Capacity(capacity), ratelimit.MaxReserved(30))
				type work struct {
					at     time.Time
					tokens float64
				}
				var done []work
				for round := 0; round < 40 || len(done) < 3 && round < 1000; round++ { // with a capacity of 99, one more token takes an hour
					w.Clock.Advance(time.Duration(r.Int64N(int64(harness.OneOf(r, time.Second, time.Minute, 30*time.Minute)))).Truncate(time.Microsecond))
					request := limit.Global().Count(harness.OneOf(r, 1, capacity, 1+math.Floor(r.Float64()*capacity)))
					result, err := harness.Decide(w.Context(), w.Limiter, w.DB, r.IntN(3) == 0, request)
					if err == nil {
						done = append(done, work{result.RunAt, result.Requests[0].Count})
					} else if !harness.Denied(err) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
						w.Fatal(err)
					}
				}
				if len(done) < 3 {
					w.Errorf("only %d calls were granted: this tested too little", len(done))
				}
				for _, first := range done {
					total := 0.0
					for _, other := range done {
						if since := other.at.Sub(first.at); since >= 0 && since <= window {
							total += other.tokens
						}
					}
					if total > n+1e-9 {
						w.Errorf("%v in the hour from %v, want at most %d", total, first.at, n)
					}
				}
			})
		})
	}
}

// The cost of that recipe: a caller that takes everything gets N in the first window, and N less the capacity in each later
// one.
func TestWhatAtMostNInAnyWindowCosts(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, clock := harness.NewLimiter()
	limit := ratelimit.TokenBucket("api", 80, time.Hour, ratelimit.Capacity(20))
	for hour, want := range []int{100, 80, 80} {
		granted, end := 0, harness.Noon.Add(time.Duration(hour+1)*time.Hour)
		for clock.At.Before(end) {
			result, err := limiter.Consume(t.Context(), pool, limit.Global())
			switch {
			case err == nil:
				granted++
			case harness.Denied(err):
				clock.Advance(result.RetryAfter)
			default:
				t.Fatal(err)
			}
		}
		if granted < want-1 || granted > want {
			t.Errorf("hour %d: %d were granted, want %d", hour+1, granted, want)
		}
	}
}

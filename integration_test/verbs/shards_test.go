package verbs_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

// shardValues returns the values of a key's rows, in order of shard.
func shardValues(w harness.World, name, key string) []float64 {
	w.Helper()
	var list []byte
	var values []float64
	w.Do(w.DB.QueryRow(w.Context(), `SELECT coalesce(json_agg(value ORDER BY shard), '[]') FROM ratelimit.limits WHERE name = $1 AND key = $2`, name, key).Scan(&list))
	w.Do(json.Unmarshal(list, &values))
	return values
}

// picking returns a context in which calls look at these two shards first.
func picking(w harness.World, a, b int) context.Context {
	return shardpick.With(w.Context(), func(int) (int, int) { return a, b })
}

// grantFrom consumes from one of two shards, or from all shards if neither has enough.
func grantFrom(w harness.World, a, b int, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.Limiter.Consume(picking(w, a, b), w.DB, requests...)
	if err != nil {
		w.Fatalf("denied, want a grant: %+v, %v", result, err)
	}
	return result
}

// reserveFrom reserves as grantFrom consumes.
func reserveFrom(w harness.World, a, b int, requests ...ratelimit.Request) ratelimit.Reservation {
	w.Helper()
	reserved, err := w.Limiter.Reserve(picking(w, a, b), w.DB, requests...)
	if err != nil {
		w.Fatalf("denied, want a reservation: %+v, %v", reserved, err)
	}
	return reserved
}

func TestAShardedLimitGrantsExactlyItsCapacity(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for n := 2; n <= 5; n++ {
			for i, limit := range []ratelimit.Limit{
				harness.Sharded(fmt.Sprint("bucket", n), n),
				ratelimit.FixedWindow(fmt.Sprint("window", n), 10, time.Minute, ratelimit.Shards(n), ratelimit.Start(harness.Noon)),
			} {
				for _, count := range []float64{10, 7, 5.5} { // above capacity/shards, without rows
					key := limit.Key("fresh", fmt.Sprint(count))
					w.Grant(key.Count(count))
					w.Holds(key, 10-count)
					if values := shardValues(w, limit.Name(), "fresh|"+fmt.Sprint(count)); len(values) != n {
						w.Fatalf("%d shards: rows %v", n, values)
					}
					if count < 10 {
						w.Grant(key.Count(10 - count))
					}
					w.Deny(key.Count(1e-6))
				}
				for range 10 {
					w.Grant(limit.Key("one by one"))
				}
				w.Deny(limit.Key("one by one").Count(1e-6))
				w.Refuse(ratelimit.ErrExceedsCapacity, limit.Key("one by one").Count(10.001))
				if i == 0 {
					w.Retries(w.Check(limit.Key("one by one").Count(0.5)), 3*time.Second)
				}
			}
			w.Clock.Advance(time.Minute)
			for _, name := range []string{"bucket", "window"} {
				limit := harness.Sharded(name+fmt.Sprint(n), n)
				if name == "window" {
					limit = ratelimit.FixedWindow(name+fmt.Sprint(n), 10, time.Minute, ratelimit.Shards(n), ratelimit.Start(harness.Noon))
				}
				w.Grant(limit.Key("one by one").Count(6))
				w.Grant(limit.Key("one by one").Count(4))
				w.Deny(limit.Key("one by one").Count(1e-6))
			}
			w.Clock.At = harness.Noon
		}
	})
}

func TestShardsAreCombinedBeforeADenial(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("hot", 100, time.Minute, ratelimit.Shards(5))
		key := limit.Key("ann")
		w.Grant(key.Count(10)) // 18 in each
		for i := range 18 {
			grantFrom(w, i%2, i%2, key.Count(2)) // all that is in shards 0 and 1
		}
		if values := shardValues(w, "hot", "ann"); !slices.Equal(values, []float64{0, 0, 18, 18, 18}) {
			w.Fatalf("shards hold %v", values)
		}
		grantFrom(w, 0, 1, key.Count(40)) // more than any two shards have
		for _, value := range shardValues(w, "hot", "ann") {
			if !harness.Near(value, 14.0/5) {
				w.Fatalf("shards hold %v, want 14 spread evenly", shardValues(w, "hot", "ann"))
			}
		}
		w.Retries(w.Deny(key.Count(24)), 6*time.Second)
		grantFrom(w, 3, 4, key.Count(14))
		w.Deny(key.Count(0.001))
	})
}

func TestWhatShardsHoldIsNotDeniedForARoundingError(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := harness.Sharded("hot", 49) // 49 times 8/49 is less than 8
		w.Grant(limit.Key("ann").Count(2))
		w.Grant(limit.Key("ann").Count(8))
		w.Deny(limit.Key("ann").Count(0.001))

		// Reserved together with another limit.
		limit, other := harness.Sharded("reserved", 49, ratelimit.MaxReserved(0)), ratelimit.TokenBucket("other", 10, time.Minute).Global()
		w.Reserve(limit.Key("ann").Count(2), other)
		w.Reserve(limit.Key("ann").Count(8), other)
		w.DenyReserve(limit.Key("ann").Count(0.001), other)
	})
}

func TestReservationsAreSharedByAllShards(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := harness.Sharded("tokens", 4, ratelimit.MaxReserved(6))
		key := limit.Key("red")
		w.Runs(reserveFrom(w, 0, 1, key.Count(9)), 0)
		w.Runs(reserveFrom(w, 0, 1, key.Count(3)), 12*time.Second)
		w.Runs(reserveFrom(w, 2, 3, key.Count(4)), 36*time.Second)
		w.Holds(key, -6)
		for _, value := range shardValues(w, "tokens", "red") {
			if !harness.Near(value, -1.5) {
				w.Fatalf("shards hold %v, want the debt spread evenly", shardValues(w, "tokens", "red"))
			}
		}
		w.Retries(w.DenyReserve(key.Count(2)), 12*time.Second)
		w.Retries(w.Deny(key.Count(0)), 36*time.Second)
		w.RefuseReserve(ratelimit.ErrExceedsCapacity, key.Count(17))
		w.Clock.Advance(12 * time.Second)
		w.Reserve(key.Count(2))
		w.DenyReserve(key.Count(1))
		w.Clock.Advance(time.Hour)
		w.Reserve(key.Count(16))
		w.Holds(key, -6)

		// In a call for several limits, no single shard may owe what all shards may owe together.
		several, other := harness.Sharded("several", 2, ratelimit.MaxReserved(5)).Key("red"), ratelimit.TokenBucket("other", 100, time.Minute).Key("red")
		w.Grant(several.Count(10), other)
		for i := range 5 {
			reserveFrom(w, i%2, i%2, several, other)
		}
		for i := range 2 {
			if _, err := w.Limiter.Reserve(picking(w, i, i), w.DB, several, other); !harness.Denied(err) {
				w.Fatalf("shard %d: %v, want a denial", i, err)
			}
		}
		w.Holds(several, -5)

		plenty := harness.Sharded("without a bound", 3).Key("red")
		w.Runs(w.Reserve(plenty.Count(30)), 2*time.Minute)
		w.Holds(plenty, -20)
	})
}

func TestCheckRefundAndResetSeeAllShards(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("hot", 40, time.Minute, ratelimit.Shards(4))
		key := limit.Key("ann")
		consumed := grantFrom(w, 0, 1, key.Count(4)) // 9 in each
		second := grantFrom(w, 2, 2, key.Count(9))
		third := grantFrom(w, 3, 3, key.Count(5))
		before := w.Rows()
		for range 10 { // whatever two shards a check would pick
			result := w.Check(key.Count(22))
			if !result.OK || !harness.Near(result.Requests[0].Remaining, 22) {
				w.Fatalf("check: %+v", result)
			}
			if result := w.Check(key.Count(23)); result.OK {
				w.Fatalf("check: %+v", result)
			}
		}
		if w.Rows() != before {
			w.Fatal("check wrote")
		}
		w.Refund(consumed.Receipt(), key.Count(4))
		w.Holds(key, 26)
		w.Refund(second.Receipt(), key.Count(9))
		w.Holds(key, 35)
		w.Refund(third.Receipt(), key.Count(5))
		w.Holds(key, 40)
		if values := shardValues(w, "hot", "ann"); len(values) != 4 {
			w.Fatalf("shards hold %v", values)
		}
		w.Grant(key.Count(40))
		w.Deny(key)
		w.Do(w.Limiter.Reset(w.Context(), w.DB, key))
		if values := shardValues(w, "hot", "ann"); len(values) != 0 {
			w.Fatalf("after a reset shards hold %v", values)
		}
		w.Grant(key.Count(40))
		w.Charge(key.Count(15))
		w.Holds(key, -15)

		window := ratelimit.FixedWindow("window", 9, time.Hour, ratelimit.Shards(3), ratelimit.Start(harness.Noon)).Key("ann")
		consumed = w.Grant(window.Count(9))
		w.Clock.Advance(59 * time.Minute)
		w.Refund(consumed.Receipt(), window.Count(2))
		w.Holds(window, 2)
		w.Clock.Advance(time.Minute)
		w.Grant(window.Count(9))
		w.Refund(consumed.Receipt(), window.Count(2))
		w.Holds(window, 0)
	})
}

func TestChangingTheNumberOfShardsNeitherMintsNorForgets(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		orders := [][]int{{1, 3, 5, 2, 1}, {5, 1, 2, 3, 4}, {2, 4, 2, 4, 1}}
		for o, order := range orders {
			for _, kind := range []string{"token bucket", "fixed window"} {
				for _, owed := range []float64{0, 3, 10, 31} { // 10 tokens, 7, none, and a debt
					w := w
					w.Clock.At = harness.Noon
					name := fmt.Sprint(kind, o, owed)
					with := func(n int) ratelimit.Request {
						c := ratelimit.Config{Kind: kind, Name: name, Rate: new(10.0), Period: "1m", Shards: n}
						if kind == "fixed window" {
							c.Start = &harness.Noon
						}
						limit, err := c.Limit()
						w.Do(err)
						return limit.Key("ann")
					}
					w.Charge(with(order[0]).Count(owed))
					want := 10 - owed
					for step, n := range order {
						w = w.Redeployed()
						w.Holds(with(n), want)
						if want >= 1 {
							w.Refuse(ratelimit.ErrExceedsCapacity, with(n).Count(11))
							if want < 10 {
								w.Deny(with(n).Count(want + 0.001))
							}
							w.Grant(with(n).Count(1))
							want--
						} else {
							w.Deny(with(n).Count(max(want, 0) + 0.001))
							w.Charge(with(n).Count(1))
							want--
						}
						w.Holds(with(n), want)
						if values := shardValues(w, name, "ann"); len(values) != n {
							w.Fatalf("%s, step %d: %d rows, want %d", name, step, len(values), n)
						}
					}
					// The refill is that of one limit, whatever its number of rows.
					last := order[len(order)-1]
					w.Clock.Advance(time.Minute)
					w.Holds(with(last), min(want+10, 10))
					w.Redeployed().Holds(with(last%5+1), min(want+10, 10))
				}
			}
		}
	})
}

func TestAMissingShardIsNotAFullOne(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := harness.Sharded("hot", 5)
		key := limit.Key("ann")
		w.Grant(key.Count(10))
		w.Charge(key.Count(5))
		_, err := w.DB.Exec(w.Context(), "DELETE FROM ratelimit.limits WHERE shard >= 3")
		w.Do(err)
		w.Holds(key, -3) // the debt of the remaining rows
		w.Deny(key)
		w.Clock.Advance(time.Hour)
		w.Holds(key, 10)
		w.Grant(key.Count(10))
		w.Deny(key.Count(0.001))
		if values := shardValues(w, "hot", "ann"); len(values) != 5 {
			w.Fatalf("shards hold %v", values)
		}
	})
}

func TestOneCallMixesShardedLimitsAndOthers(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		hot := harness.Sharded("hot", 3, ratelimit.MaxReserved(5)).Global()
		user := ratelimit.TokenBucket("user", 10, time.Minute).Key("ann")
		window := ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(harness.Noon), ratelimit.Shards(2)).Key("ann")

		result := w.Grant(user.Count(4), hot.Count(7), window.Count(6))
		if r := result.Requests; r[0].Remaining != 6 || !harness.Near(r[1].Remaining, 3) || !harness.Near(r[2].Remaining, 4) {
			w.Fatalf("granted: %+v", result)
		}
		before := w.Rows()
		result = w.Deny(user.Count(7), hot.Count(4), window.Count(4))
		if r := result.Requests; r[0].OK || r[1].OK || !r[2].OK || !harness.Near(r[1].Remaining, 3) {
			w.Fatalf("denied: %+v", result)
		}
		w.Retries(result, 6*time.Second)
		w.Deny(user.Count(6), hot.Count(3), window.Count(5))
		w.DenyReserve(user.Count(6), hot.Count(9), window.Count(4))
		if w.Rows() != before {
			w.Fatal("a denial wrote")
		}
		w.Runs(w.Reserve(hot.Count(8), user.Count(6), window.Count(4)), 30*time.Second)
		w.Holds(hot, -5)
		w.Holds(user, -1) // until then, 5 of its capacity of 10 are refilled
		w.Holds(window, 0)
		w.DenyReserve(hot.Count(1))
		w.Do(w.Limiter.Reset(w.Context(), w.DB, hot, user, window))
		w.Grant(hot.Count(5), hot.Count(5), window.Count(5), window.Count(5), user)
		w.Deny(hot.Count(0.1))
	})
}

// In READ COMMITTED, a call takes from the fuller of two shards. At higher levels it takes from the first: reading the
// other would conflict with every transaction that writes it.
func TestShardpickChoosesTheShards(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var level string
		w.Do(w.DB.QueryRow(w.Context(), "SHOW transaction_isolation").Scan(&level))
		limit := ratelimit.TokenBucket("hot", 50, time.Minute, ratelimit.Shards(5))
		key := limit.Key("ann")
		w.Grant(key.Count(5)) // 9 in each
		want := []float64{9, 9, 9, 9, 9}
		for _, row := range []struct{ a, b, from int }{{2, 2, 2}, {4, 1, 1}, {1, 4, 4}, {1, 2, 1}, {2, 3, 3}, {0, 0, 0}, {0, 4, 0}} {
			if level != "read committed" {
				row.from = row.a
			}
			result := grantFrom(w, row.a, row.b, key)
			want[row.from]--
			if values := shardValues(w, "hot", "ann"); !slices.Equal(values, want) {
				w.Fatalf("between %d and %d: shards hold %v, want %v", row.a, row.b, values, want)
			}
			if estimate := 5 * want[row.from]; result.Requests[0].Remaining != estimate {
				w.Fatalf("remaining %v, want the estimate %v", result.Requests[0].Remaining, estimate)
			}
		}
	})
}

func TestShardedLimitsAreExactForConcurrentCallers(t *testing.T) {
	t.Parallel()
	for n := 2; n <= 5; n++ {
		t.Run(fmt.Sprint(n, " shards"), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 6)
			limiter := &ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
			limit := ratelimit.TokenBucket("hot", 100, time.Hour, ratelimit.Shards(n))
			var granted atomic.Int64
			var wg sync.WaitGroup
			for g := range 6 {
				wg.Go(func() {
					for {
						count := float64(1 + g%3)
						_, err := limiter.Consume(t.Context(), pool, limit.Global().Count(count))
						if errors.As(err, new(*ratelimit.DeniedError)) {
							return
						}
						if err != nil {
							t.Error(err)
							return
						}
						granted.Add(int64(count))
					}
				})
			}
			wg.Wait()
			// The last caller for 1 was denied, so less than 1 is left. With whole tokens, nothing is left.
			if granted.Load() != 100 {
				t.Errorf("granted %d of 100", granted.Load())
			}
		})
	}
}

// Above READ COMMITTED, a call that reads a shard and does not take from it would conflict with a transaction that does. So
// the call looks only at the first of its two shards.
func TestAboveReadCommittedDifferentShardsDoNotConflict(t *testing.T) {
	t.Parallel()
	limit, other := ratelimit.TokenBucket("limit", 100, time.Hour, ratelimit.Shards(2)), ratelimit.TokenBucket("other", 100, time.Hour, ratelimit.Shards(2))
	for name, requests := range map[string][]ratelimit.Request{"one": {limit.Global()}, "several": {limit.Global(), other.Global()}} {
		for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
			t.Run(fmt.Sprint(name, ", ", level), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 3)
				limiter, _ := harness.NewLimiter()
				harness.Succeeds(t, harness.Second(limiter.Charge(t.Context(), pool, limit.Global(), other.Global())))
				var txs [2]pgx.Tx
				for i := range txs {
					var err error
					if txs[i], err = pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level}); err != nil {
						t.Fatal(err)
					}
					defer txs[i].Rollback(context.WithoutCancel(t.Context()))
					if _, err := txs[i].Exec(t.Context(), "SELECT FROM ratelimit.limits WHERE false"); err != nil { // the snapshot
						t.Fatal(err)
					}
				}
				for i, tx := range txs {
					ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
					defer cancel()
					ctx = shardpick.With(ctx, func(int) (int, int) { return i, 1 - i })
					if _, err := limiter.Consume(ctx, tx, requests...); err != nil {
						t.Fatalf("%d: %v", i, err)
					}
				}
				for i, tx := range txs {
					if err := tx.Commit(t.Context()); err != nil {
						t.Errorf("%d: %v", i, err)
					}
				}
			})
		}
	}
}

// A call that waited for a shard, and finds too little there, locks all shards from the first on. It must not keep its lock
// on that shard: it could deadlock with a call that holds the first shard and waits for that one. A reservation must not
// become the debt of that shard alone.
func TestAShardThatIsFoundWantingIsNotHeld(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 20, time.Hour, ratelimit.Shards(2), ratelimit.MaxReserved(5))
	other := ratelimit.TokenBucket("other", 20, time.Hour)
	five := limit.Global().Count(5)
	for name, c := range map[string]struct {
		reserve  bool
		requests []ratelimit.Request
		grants   int // of 5 and of 11 out of the 12 that are left
	}{
		"one":               {false, []ratelimit.Request{five}, 1},
		"one, reserved":     {true, []ratelimit.Request{five}, 2},
		"several":           {false, []ratelimit.Request{five, other.Global()}, 1},
		"several, reserved": {true, []ratelimit.Request{five, other.Global()}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 5)
			limiter, _ := harness.NewLimiter()
			second := shardpick.With(t.Context(), func(int) (int, int) { return 1, 1 })
			if _, err := limiter.Charge(t.Context(), pool, limit.Global().Count(0), other.Global()); err != nil {
				t.Fatal(err)
			}
			tx, err := pool.Begin(t.Context())
			harness.Succeeds(t, err)
			if _, err := limiter.Consume(second, tx, limit.Global().Count(8)); err != nil { // 2 are left in the second
				t.Fatal(err)
			}
			answers := make(chan error, 2)
			go func() {
				_, err := harness.Decide(second, limiter, pool, c.reserve, c.requests...)
				answers <- err
			}()
			harness.Waiting(t, pool, 1)
			go func() {
				_, err := limiter.Consume(t.Context(), pool, limit.Global().Count(11))
				answers <- err
			}()
			harness.Waiting(t, pool, 2) // holds the first, waits for the second
			harness.Succeeds(t, tx.Commit(t.Context()))
			grants := 0
			for range 2 {
				if err := <-answers; err == nil {
					grants++
				} else if !harness.Denied(err) {
					t.Error(err)
				}
			}
			if grants != c.grants {
				t.Errorf("%d of the calls for 5 and for 11 were granted, want %d", grants, c.grants)
			}
		})
	}
}

// A charge that waited for a shard, and finds too little there, becomes a debt of all shards.
func TestAChargeThatWaitedForAShardIsSharedByAll(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limiter, _ := harness.NewLimiter()
	limit := ratelimit.TokenBucket("limit", 20, time.Hour, ratelimit.Shards(2))
	other := ratelimit.TokenBucket("other", 20, time.Hour)
	second := shardpick.With(t.Context(), func(int) (int, int) { return 1, 1 })
	if _, err := limiter.Charge(t.Context(), pool, limit.Global().Count(0), other.Global()); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := limiter.Consume(second, tx, limit.Global().Count(8)); err != nil { // 2 are left in the second
		t.Fatal(err)
	}
	charged := make(chan error, 1)
	go func() {
		_, err := limiter.Charge(second, pool, limit.Global().Count(5), other.Global())
		charged <- err
	}()
	harness.Waiting(t, pool, 1)
	harness.Succeeds(t, tx.Commit(t.Context()))
	harness.Succeeds(t, <-charged)
	var shards, equal int
	err = pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE value = 3.5) FROM ratelimit.limits WHERE name = 'limit'`).Scan(&shards, &equal)
	if err != nil || shards != 2 || equal != 2 {
		t.Errorf("%d of %d shards hold 3.5, want both: %v", equal, shards, err)
	}
}

func TestTwoVersionsWithDifferentShardsAtOnceAreExact(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	var granted atomic.Int64
	var wg sync.WaitGroup
	for g := range 6 {
		limiter := &ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
		limit := ratelimit.TokenBucket("hot", 100, time.Hour, ratelimit.Shards(1+g%3))
		wg.Go(func() {
			for {
				_, err := limiter.Consume(t.Context(), pool, limit.Global())
				if errors.As(err, new(*ratelimit.DeniedError)) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				granted.Add(1)
			}
		})
	}
	wg.Wait()
	if granted.Load() != 100 {
		t.Errorf("granted %d of 100", granted.Load())
	}
}

// All shards owe the same amount. A sum of them, one by one, was always rounded in the same direction. So small counts
// changed nothing, without end.
func TestWhatEqualShardsOweIsNotRoundedAway(t *testing.T) {
	const calls = 10
	harness.Behaviour(t, func(w harness.World) {
		for _, c := range []struct {
			capacity float64
			shards   int
			count    float64
		}{{1e15, 100, 1}, {1e9, 100, 1e-6}} {
			limit := ratelimit.TokenBucket(fmt.Sprint(c), c.capacity, time.Hour, ratelimit.Shards(c.shards), ratelimit.MaxReserved(c.capacity))
			w.Grant(limit.Global().Count(c.capacity))
			w.Reserve(limit.Global().Count(0.999 * c.capacity))
			before := w.Balance(limit.Global())
			for range calls {
				w.Reserve(limit.Global().Count(c.count))
			}
			if fell, want := before-w.Balance(limit.Global()), calls*c.count; fell < 0.8*want || fell > 1.2*want {
				w.Errorf("%v: the balance fell by %v, want %v", c, fell, want)
			}
		}
	})
}

func TestAFullShardedLimitHoldsItsCapacityHoweverItDivides(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, c := range []struct {
			capacity float64
			shards   int
		}{{1e7, 11}, {5e7, 12}, {1e9, 6}, {10, 3}, {1e15, 100}, {1e15, 49}} {
			limit := ratelimit.TokenBucket(fmt.Sprint(c), c.capacity, time.Minute, ratelimit.Shards(c.shards))
			w.Grant(limit.Global())
			w.Clock.Advance(24 * time.Hour)
			w.Holds(limit.Global(), c.capacity)
			w.Grant(limit.Global().Count(c.capacity))
		}
	})
}

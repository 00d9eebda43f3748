package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// couldTake is how many whole tokens could be taken now.
func couldTake(w harness.World, request ratelimit.Request) int {
	w.Helper()
	tx := w.Begin()
	n, _, err := w.Limiter.Take(w.Context(), tx, 1e15, request)
	if err != nil && !harness.Denied(err) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
		w.Fatal(err)
	}
	w.Do(tx.Rollback(w.Context()))
	return n
}

// proves reads a balance and proves its NextAt and ResetAt: at NextAt more whole tokens can be taken than now, and a
// microsecond earlier they cannot.
func proves(w harness.World, request ratelimit.Request) ratelimit.Balance {
	w.Helper()
	b, now := w.Balances(request)[0], w.Clock.At
	defer func() { w.Clock.At = now }()
	if !b.At.Equal(now) || !harness.Near(b.Used, b.Capacity-b.Remaining) {
		w.Fatalf("at %v: %+v", now, b)
	}
	had := couldTake(w, request)
	switch {
	case b.NextAt.IsZero():
		if float64(had+1) <= b.Capacity {
			w.Fatalf("%d can be taken, and never more: %+v", had, b)
		}
	default:
		if !b.NextAt.After(now) {
			w.Fatalf("at %v: %+v", now, b)
		}
		w.Clock.At = harness.Before(b.Limit, b.NextAt)
		if w.Clock.At.Before(now) {
			w.Clock.At = now
		}
		if n := couldTake(w, request); n != had {
			w.Fatalf("%d could be taken at %v, and %d just before NextAt: %+v", had, now, n, b)
		}
		w.Clock.At = b.NextAt
		if n := couldTake(w, request); n <= had {
			w.Fatalf("%d could be taken at %v, and %d at NextAt: %+v", had, now, n, b)
		}
	}
	switch b.Limit.Config().Kind {
	case "token bucket": // it is full at ResetAt
		w.Clock.At = b.ResetAt
		w.Holds(request, b.Capacity)
		if b.ResetAt.After(now) {
			w.Clock.At = harness.Before(b.Limit, b.ResetAt)
			if early := w.Balance(request); early >= b.Capacity && w.Clock.At.After(now) {
				w.Fatalf("full before ResetAt: %+v", b)
			}
		} else if b.Remaining != b.Capacity {
			w.Fatalf("not full: %+v", b)
		}
	default: // the next window begins at ResetAt
		if !b.ResetAt.After(now) {
			w.Fatalf("at %v: %+v", now, b)
		}
		w.Clock.At = b.ResetAt.Add(-time.Microsecond)
		if early := w.Balances(request)[0]; !harness.Near(early.Remaining, b.Remaining) || !early.ResetAt.Equal(b.ResetAt) {
			w.Fatalf("%+v, and just before ResetAt %+v", b, early)
		}
		w.Clock.At = b.ResetAt
		next, want := w.Balances(request)[0], min(b.Remaining+*b.Limit.Config().Rate, b.Capacity)
		full := b.Limit.Config().Shards > 1 && next.Remaining >= b.Remaining && next.Remaining < want // a shard holds its part at most
		if !harness.Near(next.Remaining, want) && !full || !next.ResetAt.After(b.ResetAt) {
			w.Fatalf("%+v, and at ResetAt %+v", b, next)
		}
	}
	return b
}

// balanceLimits are limits of 10 tokens, which get 10 a minute, an hour or a day.
func balanceLimits(shards int) []ratelimit.Limit {
	sharded := ratelimit.Shards(shards)
	return []ratelimit.Limit{
		ratelimit.TokenBucket(fmt.Sprint("bucket", shards), 10, time.Minute, sharded),
		ratelimit.FixedWindow(fmt.Sprint("window", shards), 10, time.Hour, sharded, ratelimit.Start(harness.Noon.Add(-20*time.Minute))),
		ratelimit.FixedWindow(fmt.Sprint("hashed", shards), 10, time.Hour, sharded),
		ratelimit.FixedWindow(fmt.Sprint("saving", shards), 4, time.Hour, sharded, ratelimit.Capacity(10)),
		ratelimit.CalendarWindow(fmt.Sprint("calendar", shards), 10, ratelimit.Day, sharded, ratelimit.Zone("Europe/Berlin")),
		ratelimit.TokenBucket(fmt.Sprint("fraction", shards), 3, time.Minute, sharded, ratelimit.Capacity(10.5)),
	}
}

func TestBalanceSaysWhatIsThere(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			for _, limit := range balanceLimits(shards) {
				w.Run(limit.Name(), func(t *testing.T) {
					w := harness.World{T: t, DB: w.DB, Limiter: w.Limiter, Clock: w.Clock}
					w.Clock.At = harness.Noon
					ann := limit.Key("ann")
					says := func(remaining float64) {
						w.Helper()
						if b := proves(w, ann); !harness.Near(b.Remaining, remaining) || b.Capacity != limit.Capacity() || b.Limit != limit || b.Key != "ann" ||
							b.Decides != "definition" || !b.Until.IsZero() {
							w.Fatalf("%+v, want %v left", b, remaining)
						}
					}
					full := limit.Capacity()
					says(full) // a missing row
					w.Grant(ann.Count(3))
					says(full - 3)
					w.Grant(ann.Count(0.25))
					says(full - 3.25)
					w.Grant(ann.Count(full - 3.25))
					says(0)
					w.Reserve(ann.Count(7)) // which waits
					says(-7)
					w.Reserve(ann.Count(1))
					says(-8)
					w.Charge(ann.Count(10))
					says(-18)
					w.Clock.Advance(30 * time.Second)
					proves(w, ann)
					w.Clock.At = harness.Noon.Add(-10 * time.Second) // the clock steps back
					proves(w, ann)
				})
			}
		}
	})
}

func TestBalanceOfALimitThatNeverHasAWholeToken(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for i, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("half", 10, time.Minute, ratelimit.Capacity(0.5)),
			ratelimit.TokenBucket("none", 10, time.Minute, ratelimit.Capacity(0)),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Capacity(0.5)),
		} {
			for _, charge := range []float64{0, 0.25, 7} {
				w.Charge(limit.Key("ann").Count(charge))
				if b := proves(w, limit.Key("ann")); !b.NextAt.IsZero() || b.ResetAt.IsZero() {
					w.Errorf("limit %d: %+v", i, b)
				}
			}
		}
	})
}

func TestBalanceOfPlansWithoutRows(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		balances := w.Balances(enterprise.Key("ann").Count(1000), free.Key("bob"), enterprise.Global(), ratelimit.CalendarWindow("other", 0, ratelimit.Month).Key("ann"))
		for i, b := range balances {
			unlimited := i%2 == 0
			switch {
			case !b.At.Equal(harness.Noon) || !b.NextAt.IsZero() || !b.ResetAt.IsZero() || b.Decides != "definition" || !b.Until.IsZero():
				w.Errorf("%d: %+v", i, b)
			case unlimited && (!math.IsInf(b.Remaining, 1) || !math.IsNaN(b.Used) || !math.IsInf(b.Capacity, 1)):
				w.Errorf("unlimited: %+v", b)
			case !unlimited && (b.Remaining != 0 || b.Used != 0 || b.Capacity != 0):
				w.Errorf("a rate of 0: %+v", b)
			}
		}
		// Beside a limit with rows, which is asked.
		api := ratelimit.TokenBucket("api", 10, time.Minute).Key("ann")
		w.Grant(api.Count(4))
		balances = w.Balances(free.Key("ann"), api, enterprise.Key("bob"))
		if balances[0].Capacity != 0 || balances[1].Remaining != 6 || !math.IsInf(balances[2].Remaining, 1) {
			w.Errorf("%+v", balances)
		}
		if key := balances[2].Key; key != "bob" {
			w.Errorf("the key is %q", key)
		}
	})
}

func TestBalanceAnswersInTheOrderOfItsRequests(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		z, a := ratelimit.TokenBucket("z", 10, time.Minute), ratelimit.TokenBucket("a", 10, time.Minute, ratelimit.Shards(2))
		w.Grant(z.Key("ann").Count(1), a.Key("ann").Count(2), z.Key("bob").Count(3))
		requests := []ratelimit.Request{z.Key("bob"), z.Key("ann").Count(5), a.Key("ann"), z.Key("bob").Count(0), a.Global(), z.Key("ann")}
		balances := w.Balances(requests...)
		for i, want := range []string{"z bob 7", "z ann 9", "a ann 8", "z bob 7", "a  10", "z ann 9"} {
			if got := fmt.Sprintf("%s %s %v", balances[i].Limit.Name(), balances[i].Key, balances[i].Remaining); got != want {
				w.Errorf("balance %d is %q, want %q", i, got, want)
			}
		}
		if len(balances) != len(requests) || !reflect.DeepEqual(balances[0], balances[3]) || !reflect.DeepEqual(balances[1], balances[5]) {
			w.Errorf("two requests for one key: %+v", balances)
		}
	})
}

// TestBalanceOfACustomersMonth: 3 of 10 are left, the next in 6 minutes, and it resets on 1 December.
func TestBalanceOfACustomersMonth(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		w.Clock.At = harness.UTC("2026-11-30 23:30:00")
		text := func(request ratelimit.Request) string {
			w.Helper()
			b := proves(w, request)
			return fmt.Sprintf("%v of %v left, next in %v, resets on %s", math.Floor(b.Remaining), b.Capacity, b.NextAt.Sub(b.At), b.ResetAt.Format("2 Jan"))
		}
		hourly := ratelimit.TokenBucket("hourly", 10, time.Hour).Key("ann")
		month := ratelimit.CalendarWindow("month", 10, ratelimit.Month).Key("ann")
		w.Grant(hourly.Count(7), month.Count(7))
		if got := text(hourly); got != "3 of 10 left, next in 6m0s, resets on 1 Dec" {
			w.Errorf("hourly: %s", got)
		}
		if got := text(month); got != "3 of 10 left, next in 30m0s, resets on 1 Dec" {
			w.Errorf("a month: %s", got)
		}

		// A customer whose month begins on the 31st, in Tokyo: in November, on the 30th.
		tokyo := ratelimit.CalendarWindow("tokyo", 10, ratelimit.Month, ratelimit.Zone("Asia/Tokyo"), ratelimit.Anchor("2026-01-31")).Key("acme")
		w.Grant(tokyo.Count(7))
		if b, want := proves(w, tokyo), harness.UTC("2026-12-30 15:00:00"); !b.NextAt.Equal(want) || !b.ResetAt.Equal(want) || b.Used != 7 {
			w.Errorf("%+v, want a reset at %v", b, want)
		}
		// A debt of 14 months: the next whole token is there in the fifteenth.
		w.Charge(tokyo.Count(3 + 140))
		if b, want := proves(w, tokyo), harness.UTC("2028-02-28 15:00:00"); b.Remaining != -140 || b.Used != 150 || !b.NextAt.Equal(want) {
			w.Errorf("%+v, want a token at %v", b, want)
		}
	})
}

// TestBalanceUnderOverrides covers what decides about a key: other numbers, no limit, a block, and a block over numbers.
func TestBalanceUnderOverrides(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		api, window := ratelimit.TokenBucket("api", 10, time.Minute), ratelimit.FixedWindow("window", 10, 24*time.Hour, ratelimit.Shards(2))
		follow.By(w.Limiter, follow.Settings{DB: pool})
		w.Do(follow.Load(w.Context(), w.Limiter))
		end := harness.Scan[time.Time](w, pool, "SELECT date_trunc('second', now()) + interval '1 hour'").UTC()
		w.Clock.At = end.Add(-time.Hour)
		now := w.Clock.At
		decided := func(by string, until time.Time, request ratelimit.Request) ratelimit.Balance {
			w.Helper()
			w.Do(follow.Load(w.Context(), w.Limiter))
			b := w.Balances(request)[0]
			if b.Decides != by || !b.Until.Equal(until) || !b.At.Equal(now) {
				w.Fatalf("%+v, want it decided by %s until %v", b, by, until)
			}
			return b
		}
		// granted wants a Consume of 1 to be granted at NextAt, and not before.
		granted := func(b ratelimit.Balance, request ratelimit.Request) {
			w.Helper()
			defer func() { w.Clock.At = now }()
			w.Clock.At = b.NextAt.Add(-time.Microsecond)
			if _, err := w.Limiter.Check(w.Context(), w.DB, request); !harness.Denied(err) {
				w.Fatalf("before NextAt %v, want a denial: %+v", err, b)
			}
			w.Clock.At = b.NextAt
			if _, err := w.Limiter.Check(w.Context(), w.DB, request); err != nil {
				w.Fatalf("at NextAt: %v, %+v", err, b)
			}
		}
		ends := func(name, key string) {
			w.Helper()
			harness.Scan[int](w, pool, "SELECT ratelimit.restore($1, $2)", name, key)
		}
		for _, limit := range []ratelimit.Limit{api, window} {
			ann, other := limit.Key("ann"), limit.Key("other")
			name := limit.Name()
			w.Grant(ann.Count(4))
			decided("definition", time.Time{}, ann)

			// A block with an end. What is used is still said.
			harness.Scan[int64](w, pool, "SELECT ratelimit.block($1, 'ann', until => $2)", name, end)
			b := decided("block", end, ann)
			if b.Remaining != 0 || !harness.Near(b.Used, 4) || b.Capacity != 10 || !b.NextAt.Equal(end) || b.Limit != limit {
				w.Fatalf("blocked: %+v", b)
			}
			granted(b, ann)
			if got, want := w.Balances(ann)[0].ResetAt, b.ResetAt; !got.Equal(want) || got.IsZero() {
				w.Fatalf("blocked: resets at %v, want %v", got, want)
			}
			decided("definition", time.Time{}, other)

			// In debt, the block may end before the first token is there.
			w.Charge(ann.Count(6 + 1000))
			if b = decided("block", end, ann); !harness.Near(b.Remaining, -1000) || !b.NextAt.After(end) {
				w.Fatalf("blocked in debt: %+v", b)
			}
			granted(b, ann)
			w.Do(w.Limiter.Reset(w.Context(), w.DB, ann))
			w.Grant(other.Count(2))

			// Other numbers. They add no tokens to a row.
			ends(name, "ann")
			decided("definition", time.Time{}, ann)
			w.Grant(ann.Count(0)) // a row
			harness.Scan[int64](w, pool, "SELECT ratelimit.override($1, 'ann', rate => 20, forever => true)", name)
			if b = decided("override", time.Time{}, ann); !harness.Near(b.Remaining, 10) || !harness.Near(b.Used, 10) || b.Capacity != 20 || b.Limit.Capacity() != 20 {
				w.Fatalf("other numbers: %+v", b)
			}
			proves(w, ann)
			harness.Scan[int64](w, pool, "SELECT ratelimit.override($1, 'ann', capacity => 15, until => $2)", name, end)
			if b = decided("override", end, ann); !harness.Near(b.Remaining, 10) || b.Capacity != 15 {
				w.Fatalf("other numbers with an end: %+v", b)
			}

			// A block over numbers, with an end and without.
			harness.Scan[int64](w, pool, "SELECT ratelimit.block($1, 'ann', until => $2)", name, end)
			if b = decided("block", end, ann); b.Remaining != 0 || !harness.Near(b.Used, 5) || b.Capacity != 15 || !b.NextAt.Equal(end) {
				w.Fatalf("a block over numbers: %+v", b)
			}
			harness.Scan[int64](w, pool, "SELECT ratelimit.block($1, 'ann', forever => true)", name)
			if b = decided("block", time.Time{}, ann); b.Remaining != 0 || b.Capacity != 15 || !b.NextAt.IsZero() || b.ResetAt.IsZero() {
				w.Fatalf("a block without an end: %+v", b)
			}

			// No limit, and a block over that.
			ends(name, "ann")
			harness.Scan[int64](w, pool, "SELECT ratelimit.unlimited($1, 'ann', until => $2)", name, end)
			if b = decided("override", end, ann); !math.IsInf(b.Remaining, 1) || !math.IsNaN(b.Used) || !math.IsInf(b.Capacity, 1) || !b.NextAt.IsZero() || !b.ResetAt.IsZero() {
				w.Fatalf("unlimited: %+v", b)
			}
			harness.Scan[int64](w, pool, "SELECT ratelimit.block($1, 'ann', until => $2)", name, end.Add(-time.Minute))
			if b = decided("block", end.Add(-time.Minute), ann); b.Remaining != 0 || !math.IsNaN(b.Used) || !math.IsInf(b.Capacity, 1) || !b.NextAt.Equal(end.Add(-time.Minute)) {
				w.Fatalf("a block over no limit: %+v", b)
			}
			granted(b, ann)

			// All keys, but for those of their own.
			harness.Scan[int64](w, pool, "SELECT ratelimit.block($1, every_key => true, forever => true)", name)
			decided("block", end.Add(-time.Minute), ann)
			if b = decided("block", time.Time{}, other); b.Remaining != 0 || !harness.Near(b.Used, 2) || !b.NextAt.IsZero() {
				w.Fatalf("all keys are blocked: %+v", b)
			}
			decided("block", time.Time{}, limit.Global())
		}

		// A plan that grants nothing is no better after a block.
		harness.Scan[int64](w, pool, "SELECT ratelimit.block('exports.free', 'ann', until => $1)", end)
		if b := decided("block", end, free.Key("ann")); b.Remaining != 0 || b.Capacity != 0 || !b.NextAt.IsZero() {
			w.Fatalf("a blocked plan: %+v", b)
		}
		// An override that has no effect decides nothing.
		harness.Scan[int64](w, pool, "SELECT ratelimit.override('exports.free', 'bob', capacity => 5, until => $1)", end)
		if b := decided("definition", time.Time{}, free.Key("bob")); b.Capacity != 0 {
			w.Fatalf("a plan with a capacity: %+v", b)
		}
		half := ratelimit.TokenBucket("half", 10, time.Minute, ratelimit.Capacity(0.5))
		harness.Scan[int64](w, pool, "SELECT ratelimit.block('half', 'ann', until => $1)", end)
		if b := decided("block", end, half.Key("ann")); !b.NextAt.IsZero() {
			w.Fatalf("a block of what never has a token: %+v", b)
		}
	})
}

// TestBalanceWritesNothing, and takes no transaction id, on every handle.
func TestBalanceWritesNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var requests []ratelimit.Request
		for _, shards := range []int{1, 3} {
			for _, limit := range balanceLimits(shards) {
				requests = append(requests, limit.Key("ann"), limit.Key("missing"))
			}
		}
		var xid *string
		w.Balances(requests...)
		w.Do(w.DB.QueryRow(w.Context(), "SELECT pg_current_xact_id_if_assigned()::text").Scan(&xid))
		if xid != nil || w.Rows() != "" {
			w.Fatalf("it took transaction id %s, and wrote %q", *xid, w.Rows())
		}
		for i, request := range requests {
			if i%2 == 0 {
				w.Charge(request.Count(float64(3 * (i % 6))))
			}
		}
		before := w.Rows()
		for range 2 {
			w.Balances(requests...)
			for _, request := range requests {
				w.Balances(request)
			}
			w.Clock.Advance(time.Hour)
		}
		if after := w.Rows(); after != before {
			w.Fatalf("it wrote:\n%s\nbecame\n%s", before, after)
		}
	})
}

// TestBalanceWaitsForNoLock: it reads the committed rows while a transaction holds them, and nobody waits for it.
func TestBalanceWaitsForNoLock(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limiter, _ := harness.NewLimiter()
	requests := []ratelimit.Request{
		ratelimit.TokenBucket("bucket", 10, time.Hour).Key("ann"), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(harness.Noon), ratelimit.Shards(2)).Key("ann"),
		ratelimit.CalendarWindow("calendar", 10, ratelimit.Day).Key("ann"),
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	consume := func(db ratelimit.DB) {
		t.Helper()
		harness.Succeeds(t, harness.Second(limiter.Consume(ctx, db, requests...)))
	}
	consume(pool)
	holder, err := pool.Begin(ctx)
	harness.Succeeds(t, err)
	defer holder.Rollback(context.WithoutCancel(ctx))
	consume(holder)
	reads := func(what string, db ratelimit.DB, want float64) {
		t.Helper()
		balances, err := limiter.Balance(ctx, db, requests...)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for _, b := range balances {
			if !harness.Near(b.Remaining, want) {
				t.Errorf("%s: %s has %v left, want %v", what, b.Limit.Name(), b.Remaining, want)
			}
		}
	}
	reads("the holder", holder, 8) // its own calls
	reads("a pool", pool, 9)
	reads("a coalescer", coalescer, 9)
	for _, level := range harness.Levels {
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
		harness.Succeeds(t, err)
		defer tx.Rollback(context.WithoutCancel(ctx))
		reads(string(level), tx, 9)
	}
	harness.Succeeds(t, holder.Commit(ctx))
	reads("a pool, later", pool, 8)
	consume(pool) // though three transactions have read the rows, and are open
	reads("at last", coalescer, 7)
}

func TestAnObserverSeesBalances(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var seen []ratelimit.Decision
	limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }}
	ann := ratelimit.TokenBucket("api", 10, time.Hour).Key("ann")
	harness.Succeeds(t, harness.Second(limiter.Charge(t.Context(), pool, ann.Count(15))))
	harness.Succeeds(t, harness.Second(limiter.Balance(t.Context(), pool, ann)))
	_, err := limiter.Balance(t.Context(), pool)
	if verbs := []string{seen[0].Verb, seen[1].Verb, seen[2].Verb}; !slices.Equal(verbs, []string{"charge", "balance", "balance"}) {
		t.Errorf("saw %v", verbs)
	}
	if d := seen[1]; d.Err != nil || !d.Result.OK || d.Result.Requests[0].Taken != 0 || d.Result.Requests[0].Delay != 0 || d.Result.Remaining > -4.9 {
		t.Errorf("%+v", d)
	}
	if d := seen[2]; !errors.Is(d.Err, ratelimit.ErrInvalid) || !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("%+v", d)
	}
}

// TestBalanceIsExact proves NextAt and ResetAt of random limits on random rows.
func TestBalanceIsExact(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	tx, err := harness.NewPool(t, 1).Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	nexts, proved := 0, harness.Sized(800, 300)
	for n := range proved {
		shards := harness.OneOf(r, 1, 1, 1, 1+r.IntN(5), 11)
		limit := harness.RandomLimit(r, "limit", shards)
		clock := &harness.Clock{At: harness.Noon.Add(time.Duration(r.Int64N(4e17)-2e17) / 1000 * 1000)}
		w := harness.World{T: t, DB: tx, Limiter: &ratelimit.Limiter{Clock: clock.Now}, Clock: clock}
		request := limit.Key(fmt.Sprint(n))
		if rows := harness.OneOf(r, shards, shards, 0); rows > 0 {
			share := limit.Capacity() / float64(shards) * harness.OneOf(r, 0, 1, r.Float64(), r.Float64(), -r.Float64(), -10*r.Float64())
			for shard := range rows {
				value, ts := share, clock.At.Add(-time.Duration(harness.OneOf(r, 0, 0, 1, r.Int64N(1e6)))*time.Microsecond)
				if share > 0 && shards > 1 { // shards share a debt evenly, so their rows are equal
					value *= r.Float64()
				}
				harness.Insert(t, tx, fmt.Sprint(n), shard, shards, value, ts)
			}
		}
		b := w.Balances(request)[0]
		if b.NextAt.Year() == 9999 || b.ResetAt.Year() == 9999 || b.Capacity > 1e14 {
			continue // out of range, or a microsecond refills less than the sums round
		}
		if !b.NextAt.IsZero() {
			nexts++
		}
		proves(w, request)
	}
	if nexts < proved/4 {
		t.Errorf("%d of %d had a NextAt: this tested too little", nexts, proved)
	}
}

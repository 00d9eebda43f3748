package model_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// The numbers of a limit change while it is used. These are the bounds for the sum of two versions' grants in any span of
// time, whether the versions run by turns or at once.
//
//   - Two token buckets, or two fixed windows with the same period and start: at most the larger capacity, the larger rate's
//     refill in the span, and the larger maxReserved. The number of shards does not matter.
//   - Otherwise, each version refills by its own rule, the bucket continuously, the window at its own instants: at most the
//     larger capacity (and maxReserved), and both refills in the span.
//   - If the first version is not used again after the second, the span is divided: the refill of the first until its last
//     use, and of the second from then on.

// version is one of the two definitions of a limit.
type version struct {
	ratelimit.Limit
	numbers algebra.Limit
}

func newVersion(limit ratelimit.Limit) version { return version{limit, harness.Numbers(limit, "k")} }

// refill returns the tokens that are refilled after one instant, up to another.
func (v version) refill(from, to algebra.Micros) float64 {
	if v.numbers.Window {
		return float64(v.numbers.UpTo(to)-v.numbers.UpTo(from)) / float64(v.numbers.Period.Microseconds()) * v.numbers.Rate
	}
	return float64(to-from) / float64(v.numbers.Period.Microseconds()) * v.numbers.Rate
}

func (v version) reserved() float64 {
	if m := v.Config().MaxReserved; m != nil {
		return *m
	}
	return 0
}

// all returns the largest count that one request can be granted for a key with a balance. A request that waits for a later
// window forfeits the rest of the present one, unless its count exceeds the capacity.
func (v version) all(balance float64) float64 {
	const less = 1 - 1e-12 // leaves room for rounding
	most := balance + v.reserved()
	if !v.numbers.Window || !v.numbers.Holds(most*less) {
		return most * less
	}
	all := balance
	for refill := v.numbers.Rate; v.Capacity()-refill+v.reserved() > all; refill += v.numbers.Rate {
		all = max(all, min(balance+refill, most, v.Capacity()-refill+v.reserved()))
	}
	return all * less
}

// grants reports whether a count is granted for a key with a balance.
func (v version) grants(balance, count float64, now algebra.Micros) bool {
	d := algebra.Demand{Limit: v.numbers, Rows: []algebra.Row{{Value: balance, TS: now}}, Shards: 1, Count: count, Lowest: v.numbers.Lowest(-v.reserved())}
	_, _, granted := algebra.Reserve([]algebra.Demand{d}, now, algebra.Forever)
	return granted
}

// versions are two definitions. The second replaces the first.
type versions [2]version

// alike reports whether both versions refill at the same instants.
func (vs versions) alike() bool {
	a, b := vs[0].numbers, vs[1].numbers
	return !a.Window && !b.Window || a.Window && b.Window && a.Period == b.Period && a.Start == b.Start
}

// most returns the most that may be granted after one instant, up to another, and the most at the first instant.
func (vs versions) most(from, to algebra.Micros) float64 {
	a, b := vs[0].refill(from, to), vs[1].refill(from, to)
	refill := a + b
	if vs.alike() {
		refill = max(a, b)
	}
	return vs.full() + refill
}

// full returns the most that can be granted at once.
func (vs versions) full() float64 {
	return max(vs[0].Capacity(), vs[1].Capacity()) + max(vs[0].reserved(), vs[1].reserved())
}

// randomVersion makes a definition with one of a few rates and periods, so that two of them are often alike.
func randomVersion(r *rand.Rand) version {
	rate := harness.OneOf(r, 1.0, 3, 10, 100)
	c := ratelimit.Config{
		Name: "changing", Kind: harness.OneOf(r, "token bucket", "fixed window"), Rate: &rate,
		Period: harness.OneOf(r, "1s", "1m", "1m", "7s", "1h"), Shards: harness.OneOf(r, 1, 1, 2, 5),
	}
	if r.IntN(2) == 0 {
		capacity := harness.OneOf(r, rate/2, 2*rate, 50)
		c.Capacity = &capacity
	}
	if r.IntN(3) == 0 {
		maxReserved := harness.OneOf(r, 0, 5, rate)
		c.MaxReserved = &maxReserved
	}
	if c.Kind == "fixed window" && r.IntN(3) == 0 {
		start := harness.Noon.Add(time.Duration(r.IntN(3)) * 17 * time.Second)
		c.Start = &start
	}
	limit, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return newVersion(limit)
}

// TestNumbersThatChangeMintNothing plays random sequences that take all they can. The versions take turns, or change once.
func TestNumbersThatChangeMintNothing(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	if _, err := pool.Exec(t.Context(), "SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	limiter, clock := harness.NewLimiter()
	program := func() *ratelimit.Limiter { return &ratelimit.Limiter{Clock: limiter.Clock} } // a Limiter refuses two definitions
	reached := 0
	for n := 0; n < 50 || reached < 30; n++ { // until enough sequences reached the bound, as two of three do
		if n == 200 {
			t.Fatalf("the bound was reached only %d times", reached)
		}
		vs := versions{randomVersion(r), randomVersion(r)}
		once, now := r.IntN(2) == 0, 0
		step := min(vs[0].numbers.Period, vs[1].numbers.Period)
		programs := [2]*ratelimit.Limiter{program(), program()}
		if err := programs[0].Reset(t.Context(), pool, vs[0].Key("k")); err != nil {
			t.Fatal(err)
		}
		var grants []harness.Taken
		changed := algebra.Max // the last use of the first version, if the version changes once
		for i := range 60 {
			clock.Advance(harness.OneOf(r, 0, time.Duration(r.Int64N(int64(step))), time.Duration(r.Int64N(int64(3*step))), step/10).Truncate(time.Microsecond))
			switch {
			case !once:
				now = r.IntN(2)
			case i == 30:
				now = 1
				if len(grants) > 0 {
					changed = grants[len(grants)-1].To
				}
			}
			v := vs[now]
			request := v.Key("k")
			balances, err := programs[now].Balance(t.Context(), pool, request)
			if err != nil {
				t.Fatal(err)
			}
			remaining, at := balances[0].Remaining, algebra.At(clock.At)
			tokens := v.all(remaining)
			if tokens <= 1e-6 {
				continue
			}
			if fewer := tokens * r.Float64(); r.IntN(3) == 0 && v.grants(remaining, fewer, at) {
				tokens = fewer
			}
			reserve := v.Config().MaxReserved != nil
			if _, err := harness.Decide(t.Context(), programs[now], pool, reserve, request.Count(tokens)); err != nil {
				t.Fatalf("%v: %v of %+v: %v", v, tokens, balances, err)
			}
			grants = append(grants, harness.Taken{From: at, To: at, Tokens: tokens})
		}
		most := vs.most
		if once && vs[0].Config().Shards <= 1 && vs[1].Config().Shards <= 1 {
			// A new version refills a row from the row's last use. The last use of a shard may be long before the limit's.
			most = func(from, to algebra.Micros) float64 {
				return vs.full() + vs[0].refill(from, max(from, min(to, changed))) + vs[1].refill(max(from, min(to, changed)), to)
			}
		}
		above, from, to := harness.Worst(grants, most)
		if above > 1e-6 {
			t.Errorf("%d: %v\nand %v\nonce %v: %v tokens too many from %v to %v", n, vs[0], vs[1], once, above, from.Time(), to.Time())
		}
		if above > -1e-6 {
			reached++
		}
	}
}

// TestNumbersThatChangeUnderTraffic changes the numbers at random moments, for some callers or for all, while transactions
// of all levels run at once.
func TestNumbersThatChangeUnderTraffic(t *testing.T) {
	t.Parallel()
	bucket := func(rate float64, period time.Duration, options ...ratelimit.Option) version {
		return newVersion(ratelimit.TokenBucket("changing", rate, period, options...))
	}
	window := func(rate float64, period time.Duration, options ...ratelimit.Option) version {
		return newVersion(ratelimit.FixedWindow("changing", rate, period, options...))
	}
	for name, vs := range map[string]versions{
		"rate":            {bucket(20, time.Second), bucket(60, time.Second, ratelimit.Capacity(20))},
		"capacity":        {bucket(20, time.Second, ratelimit.Capacity(5)), bucket(20, time.Second, ratelimit.Capacity(50))},
		"maxReserved":     {bucket(20, time.Second, ratelimit.MaxReserved(0)), bucket(20, time.Second, ratelimit.MaxReserved(20))},
		"shards":          {bucket(40, time.Second, ratelimit.Shards(2)), bucket(40, time.Second, ratelimit.Shards(5))},
		"sharded or not":  {window(40, time.Second, ratelimit.Shards(4)), window(40, time.Second)},
		"period":          {bucket(20, time.Second), bucket(20, 200*time.Millisecond)},
		"rate of windows": {window(20, time.Second), window(60, time.Second)},
		"window's period": {window(20, 700*time.Millisecond), window(30, time.Second)},
		"window's start":  {window(20, 1500*time.Millisecond, ratelimit.Start(harness.Noon)), window(20, 1500*time.Millisecond, ratelimit.Start(harness.Noon.Add(time.Second)))},
		"kind":            {bucket(30, time.Second), window(30, time.Second)},
		"everything":      {bucket(20, 300*time.Millisecond, ratelimit.Shards(3), ratelimit.MaxReserved(5)), window(50, time.Second, ratelimit.Capacity(70))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			changeUnderTraffic(t, vs)
		})
	}
}

func changeUnderTraffic(t *testing.T, vs versions) {
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 8)
	var programs [2]ratelimit.Limiter // a Limiter refuses two definitions
	var flips, granted atomic.Int64
	var mu sync.Mutex
	var grants []harness.Taken
	var failed atomic.Pointer[error]
	enough := func() bool { return granted.Load() >= 20 && flips.Load() >= 5 }
	begin := time.Now()
	goOn := func() bool { // a busy machine needs longer
		since := time.Since(begin)
		return since < harness.Sized(4*time.Second, 500*time.Millisecond) || since < time.Minute && !enough() && failed.Load() == nil
	}
	var wg sync.WaitGroup
	flipping := rand.New(rand.NewPCG(r.Uint64(), 0))
	wg.Go(func() {
		for goOn() {
			time.Sleep(time.Duration(flipping.IntN(int(100 * time.Millisecond))))
			flips.Add(1)
		}
	})
	for g := range 8 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for goOn() {
				version := int(flips.Load()) % 2
				if g < 4 {
					version = g % 2 // not deployed yet
				}
				request := vs[version].Key("k").Count(float64(1 + r.IntN(3)))
				var result harness.Answered
				limiter, reserve := &programs[version], vs[version].Config().MaxReserved != nil
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) (err error) {
					result, err = harness.Decide(ctx, limiter, tx, reserve, request)
					return err
				}, ratelimit.Isolation(harness.OneOf(r, harness.Levels...)), ratelimit.Attempts(1000))
				var end time.Time
				if err == nil {
					err = pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&end)
				}
				switch {
				case harness.Denied(err):
					time.Sleep(time.Millisecond)
				case errors.Is(err, ratelimit.ErrExceedsCapacity):
				case err != nil:
					failed.Store(&err)
					return
				default:
					mu.Lock()
					grants = append(grants, harness.Taken{From: algebra.At(result.At), To: algebra.At(end), Tokens: result.Requests[0].Count})
					mu.Unlock()
					granted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
	above, from, to := harness.Worst(grants, vs.most)
	t.Logf("%d grants, %d changes; the fullest span is %.1f tokens below the bound", len(grants), flips.Load(), -above)
	if above > 1e-6 {
		t.Errorf("%v\nand %v\n%v tokens too many from %v to %v", vs[0], vs[1], above, from.Time(), to.Time())
	}
	if !enough() {
		t.Errorf("%d grants and %d changes: this tested too little", len(grants), flips.Load())
	}
}

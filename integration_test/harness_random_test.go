package integration_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

var seedFlag = flag.Uint64("seed", 0, "replay the random tests with this seed (0: a new one)")

// chaos is how long the chaos tests cancel calls, run into timeouts and kill connections at random.
var chaos = flag.Duration("chaos", 2*time.Second, "how long each chaos test lasts")

// whole makes the random tests as large as they are before a release (make race).
var whole = flag.Bool("whole", false, "random tests of full size, which is twice the usual one")

// sized returns how large a random test is: n with -whole, half of it usually, and short with -short. All of them make every
// assertion. n is a number of cases or a duration.
func sized[T int | time.Duration](n, short T) T {
	switch {
	case testing.Short():
		return short
	case *whole:
		return n
	default:
		return max(n/2, short)
	}
}

// someOf is all of the values or, with -short, n of them.
func someOf[T any](t testing.TB, n int, values ...T) []T {
	t.Helper()
	if !testing.Short() {
		return values
	}
	values = slices.Clone(values)
	newRand(t).Shuffle(len(values), func(i, j int) { values[i], values[j] = values[j], values[i] })
	return values[:n]
}

// long leaves a test of more than ten seconds to make long. CI has it in make race or make matrix, which run its area whole.
func long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("make long runs it")
	}
}

// newRand makes a random source. If the test fails, it prints how to replay it.
func newRand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("replay: go test ./integration_test -run '%s' -seed %d -short=%t -whole=%t", t.Name(), seed, testing.Short(), *whole)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

func oneOf[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// before is an instant before at, at which a limit that has just enough at that instant lacks more than the tolerance: twice as much,
// since a large debt is rounded by more than a microsecond refills.
func before(limit ratelimit.Limit, at time.Time) time.Time {
	c, back := limit.Config(), time.Microsecond
	if c.Kind == "token bucket" {
		back += time.Duration(2*tolerance(limit) / *c.Rate * float64(period(c))).Truncate(time.Microsecond) + time.Microsecond
	}
	return at.Add(-back)
}

// tolerance is what rounding may lack of a limit: one shard may be the last to be refilled, so it is as much as all of them.
func tolerance(limit ratelimit.Limit) float64 {
	c := limit.Config()
	if c.Capacity == nil {
		return 0
	}
	most := *c.Capacity + *c.Rate // a debt has the rate in its tolerance
	if c.MaxReserved != nil {
		most += *c.MaxReserved
	}
	return float64(c.Shards) * min(1e-9*most, 1e-3)
}

// randomTokens returns a number of tokens about as large as limit, whole or not.
func randomTokens(r *rand.Rand, limit float64) float64 {
	return oneOf(r, 0, 1, 1, 2, 0.1, float64(r.IntN(int(limit)+2)), limit*r.Float64(), limit, limit/3)
}

// period is the period of a limit without a calendar.
func period(c ratelimit.Config) time.Duration {
	fixed, unit, err := calendar.ParsePeriod(c.Period)
	if err != nil || unit != "" {
		panic(fmt.Sprint(c.Period, " ", err))
	}
	return fixed
}

func randomLimit(r *rand.Rand, name string, shards int) ratelimit.Limit {
	rate := oneOf(r, 1, 3, 10, 0.5, 1.0/3, 100*r.Float64(), 40_000, 1e-3, 1e7, 1e9*r.Float64())
	period := oneOf(r, time.Second, time.Minute, time.Hour, 7*time.Second, 24*time.Hour, 100*24*time.Hour,
		100*time.Millisecond+time.Duration(r.IntN(1e9))*time.Microsecond, 100*time.Millisecond)
	c := ratelimit.Config{Kind: "token bucket", Name: name, Rate: &rate, Period: period.String(), Shards: shards}
	if r.IntN(2) == 0 {
		capacity := oneOf(r, 0, rate/2, 2*rate, rate*10*r.Float64())
		c.Capacity = &capacity
	}
	if r.IntN(2) == 0 {
		maxReserved := oneOf(r, 0, rate, 5*rate*r.Float64())
		c.MaxReserved = &maxReserved
	}
	if r.IntN(2) == 0 {
		c.Kind = "fixed window"
		if r.IntN(2) == 0 {
			start := noon.Add(time.Duration(r.Int64N(int64(4e17)) - 2e17)).Truncate(time.Second)
			c.Start = &start
		}
	}
	limit, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return limit
}

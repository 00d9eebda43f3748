package harness

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

// SeedFlag is the seed of all random tests.
var SeedFlag = flag.Uint64("seed", 0, "replay the random tests with this seed (0: a new one)")

// Chaos is how long the chaos tests cancel calls, run into timeouts and kill connections at random.
var Chaos = flag.Duration("chaos", 2*time.Second, "how long each chaos test lasts")

// Whole makes the random tests as large as they are before a release (make race).
var Whole = flag.Bool("whole", false, "random tests of full size, which is twice the usual one")

// Sized returns how large a random test is: n with -whole, half of it usually, and short with -short. All of them make every
// assertion. n is a number of cases or a duration.
func Sized[T int | time.Duration](n, short T) T {
	switch {
	case testing.Short():
		return short
	case *Whole:
		return n
	default:
		return max(n/2, short)
	}
}

// SomeOf is all of the values or, with -short, n of them.
func SomeOf[T any](t testing.TB, n int, values ...T) []T {
	t.Helper()
	if !testing.Short() {
		return values
	}
	values = slices.Clone(values)
	NewRand(t).Shuffle(len(values), func(i, j int) { values[i], values[j] = values[j], values[i] })
	return values[:n]
}

// Long leaves a test of more than ten seconds to make long. CI has it in make race or make matrix, which run its area whole.
func Long(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("make long runs it")
	}
}

// NewRand makes a random source. If the test fails, it prints how to replay it.
func NewRand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := *SeedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Cleanup(func() {
		if t.Failed() {
			dir, _ := os.Getwd()
			t.Logf("replay: go test ./integration_test/%s -run '%s' -seed %d -short=%t -whole=%t", filepath.Base(dir), t.Name(), seed, testing.Short(), *Whole)
		}
	})
	return rand.New(rand.NewPCG(seed, 0))
}

// OneOf is one of the values.
func OneOf[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// Before is an instant before at, at which a limit that has just enough at that instant lacks more than the tolerance: twice as much,
// since a large debt is rounded by more than a microsecond refills.
func Before(limit ratelimit.Limit, at time.Time) time.Time {
	c, back := limit.Config(), time.Microsecond
	if c.Kind == "token bucket" {
		back += time.Duration(2*Tolerance(limit) / *c.Rate * float64(Period(c))).Truncate(time.Microsecond) + time.Microsecond
	}
	return at.Add(-back)
}

// Tolerance is what rounding may lack of a limit: one shard may be the last to be refilled, so it is as much as all of them.
func Tolerance(limit ratelimit.Limit) float64 {
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

// RandomTokens returns a number of tokens about as large as limit, whole or not.
func RandomTokens(r *rand.Rand, limit float64) float64 {
	return OneOf(r, 0, 1, 1, 2, 0.1, float64(r.IntN(int(limit)+2)), limit*r.Float64(), limit, limit/3)
}

// Period is the period of a limit without a calendar.
func Period(c ratelimit.Config) time.Duration {
	fixed, unit, err := calendar.ParsePeriod(c.Period)
	if err != nil || unit != "" {
		panic(fmt.Sprint(c.Period, " ", err))
	}
	return fixed
}

// RandomLimit is a token bucket or a fixed window with odd numbers.
func RandomLimit(r *rand.Rand, name string, shards int) ratelimit.Limit {
	rate := OneOf(r, 1, 3, 10, 0.5, 1.0/3, 100*r.Float64(), 40_000, 1e-3, 1e7, 1e9*r.Float64())
	period := OneOf(r, time.Second, time.Minute, time.Hour, 7*time.Second, 24*time.Hour, 100*24*time.Hour,
		100*time.Millisecond+time.Duration(r.IntN(1e9))*time.Microsecond, 100*time.Millisecond)
	c := ratelimit.Config{Kind: "token bucket", Name: name, Rate: &rate, Period: period.String(), Shards: shards}
	if r.IntN(2) == 0 {
		capacity := OneOf(r, 0, rate/2, 2*rate, rate*10*r.Float64())
		c.Capacity = &capacity
	}
	if r.IntN(2) == 0 {
		maxReserved := OneOf(r, 0, rate, 5*rate*r.Float64())
		c.MaxReserved = &maxReserved
	}
	if r.IntN(2) == 0 {
		c.Kind = "fixed window"
		if r.IntN(2) == 0 {
			start := Noon.Add(time.Duration(r.Int64N(int64(4e17)) - 2e17)).Truncate(time.Second)
			c.Start = &start
		}
	}
	limit, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return limit
}

// Patience is the page's with a database on a busy machine.
const Patience = 5 * time.Minute

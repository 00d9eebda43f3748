package verbs_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestRetryAtIsExact denies random requests on random rows at random instants, in the database. Then it repeats each
// request: one microsecond before RetryAt it is still denied, and at RetryAt it is granted. Work that was reserved may run
// at its RetryAt, when the balance is back at zero, and no microsecond earlier. For a token bucket, the tolerance is added to that
// microsecond.
func TestRetryAtIsExact(t *testing.T) {
	t.Parallel()
	for _, part := range harness.SomeOf(t, 1, 0, 1, 2, 3) {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			r := harness.NewRand(t)
			tx, err := harness.NewPool(t, 1).Begin(t.Context())
			harness.Succeeds(t, err)
			defer tx.Rollback(t.Context())
			_, clock := harness.NewLimiter()
			denials, debts := 0, 0
			for n := range harness.Sized(4000, 800) {
				shards := harness.OneOf(r, 1, 1, 1, 1, 1+r.IntN(5), 11, 38)
				limit := harness.RandomLimit(r, "limit", shards)
				a := harness.Ask{Limit: limit, Key: fmt.Sprint(n), Count: harness.RandomTokens(r, limit.Capacity())}
				reserve := r.IntN(2) == 0
				now := harness.Noon.Add(time.Duration(r.Int64N(4e17)-2e17) / 1000 * 1000)
				var value float64
				var ts time.Time
				debt := r.IntN(2) == 0
				for shard := range shards {
					if debt && shard > 0 { // shards share a debt evenly, so their rows are equal
						harness.Insert(t, tx, a.Key, shard, shards, value, ts)
						continue
					}
					ts = now.Add(time.Duration(harness.OneOf(r, 0, -1, -r.Int64N(1e6), -r.Int64N(1e12), r.Int64N(1e9))) * time.Microsecond)
					value = limit.Capacity() / float64(shards) * harness.OneOf(r, 0, 0, r.Float64(), 1)
					if debt {
						value *= -harness.OneOf(r, 1.0, 10)
					}
					harness.Insert(t, tx, a.Key, shard, shards, value, ts)
				}
				var exceeded *ratelimit.DeniedError
				never := false
				at := func(now time.Time) (harness.Answered, bool) {
					t.Helper()
					clock.At = now
					result, err := harness.Decide(t.Context(), &ratelimit.Limiter{Clock: clock.Now}, tx, reserve, a.Request())
					if never = errors.Is(err, ratelimit.ErrExceedsCapacity); err != nil && !never && !errors.As(err, &exceeded) {
						t.Fatalf("case %d: %+v at %v: %v", n, a, now, err)
					}
					return result, err == nil
				}
				result, granted := at(now)
				if never {
					continue
				}
				if !granted {
					if result.RetryAt.Year() == 9999 {
						c := limit.Config()
						if seconds := (a.Count + 11*limit.Capacity()) / *c.Rate * harness.Period(c).Seconds(); seconds < 1e11 {
							t.Fatalf("case %d: %+v denied at %v forever, although %v s refill everything", n, a, now, seconds)
						}
						continue // the instant would be out of range
					}
					denials++
					if early := harness.Before(limit, result.RetryAt); early.After(now) {
						if _, granted := at(early); granted {
							t.Fatalf("case %d: %+v denied at %v until %v, but granted earlier", n, a, now, result.RetryAt)
						}
					}
					again, granted := at(result.RetryAt)
					if !granted {
						t.Fatalf("case %d: %+v denied at %v until %v, and then denied again until %v", n, a, now, result.RetryAt, again.RetryAt)
					}
					result = again
				}
				if run := result.RunAt; run.After(clock.At) && run.Year() < 9999 {
					debts++
					if balance := check(t, clock, tx, a, run); balance < -1e-8*max(a.Count, limit.Capacity(), *limit.Config().Rate) {
						t.Fatalf("case %d: %+v may run at %v, when %v is still owed", n, a, run, -balance)
					}
					if balance := check(t, clock, tx, a, harness.Before(limit, run)); balance >= 0 {
						t.Fatalf("case %d: %+v may run at %v, but nothing is owed before", n, a, run)
					}
				}
			}
			if denials < harness.Sized(500, 100) || debts < harness.Sized(200, 40) {
				t.Errorf("%d denials and %d debts: this tested too little", denials, debts)
			}
		})
	}
}

// check returns the balance at an instant.
func check(t *testing.T, clock *harness.Clock, db ratelimit.DB, a harness.Ask, now time.Time) float64 {
	t.Helper()
	clock.At = now
	return harness.ReadBalance(t, &ratelimit.Limiter{Clock: clock.Now}, db, a.Request())
}

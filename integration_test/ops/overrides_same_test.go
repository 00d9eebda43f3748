package ops_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestOverridesThatEndReadAlikeInSQL: when reserved work may run, when a limit is full, and what is left are the same in SQL by hand, also
// with decimals.
func TestOverridesThatEndReadAlikeInSQL(t *testing.T) {
	t.Parallel()
	e := newEnding(t, harness.Sized(400, 100))
	e.exec("UPDATE ratelimit.limits SET value = value + 0.1 / shards WHERE hashtext(name) % 2 = 0")
	e.exec("UPDATE ratelimit.overrides SET rate = rate * 1.1, capacity = capacity * 0.7 WHERE random() < 0.3 AND NOT name IN (SELECT name FROM ratelimit.definitions WHERE zone IS NOT NULL)")
	harness.Succeeds(t, follow.Load(t.Context(), e.limits))
	waits, resets := 0, 0
	for _, limit := range e.all {
		e.asked = []string{limit.Name()}
		for _, verb := range []string{"try", "reserve"} {
			count := harness.OneOf(e.r, 0.1, 0.3, 1, 2.7, limit.Capacity())
			var want, got struct {
				granted        bool
				left           float64
				runAt, resetAt *time.Time
			}
			_, never := e.at(e.base, func(db ratelimit.DB) error {
				if verb == "try" {
					r, err := e.limits.Consume(t.Context(), db, limit.Key("k").Count(count))
					want.granted, want.left, want.resetAt = err == nil, r.Remaining, &r.ResetAt
					return err
				}
				r, err := e.limits.Reserve(t.Context(), db, limit.Key("k").Count(count))
				want.granted, want.left, want.resetAt, want.runAt = err == nil, r.Remaining, &r.ResetAt, &r.RetryAt
				return err
			})
			if never != nil || verb == "reserve" && !want.granted {
				continue
			}
			_, _ = e.at(e.base, func(db ratelimit.DB) error {
				err := db.QueryRow(t.Context(), "SELECT granted, remaining, retry_at, reset_at FROM ratelimit._by_hand($1, $2, 'k', count => $3, now => $4)", verb, limit.Name(), count, e.base).
					Scan(&got.granted, &got.left, &got.runAt, &got.resetAt)
				return err
			})
			same := func(a, b *time.Time) bool {
				none := func(t *time.Time) bool { return t == nil || t.IsZero() }
				return none(a) && none(b) || !none(a) && !none(b) && a.Equal(*b)
			}
			if want.runAt != nil && want.runAt.After(e.base) {
				waits++
			}
			resets++
			if got.granted != want.granted || got.left != want.left || !same(got.resetAt, want.resetAt) || want.runAt != nil && !same(got.runAt, want.runAt) {
				t.Errorf("%s of %v of %v at %v: SQL says %v, %v, run %v, reset %v; the library %v, %v, run %v, reset %v\n%s", verb, count, limit, e.base,
					got.granted, got.left, got.runAt, got.resetAt, want.granted, want.left, want.runAt, want.resetAt, e.chains())
			}
		}
	}
	t.Logf("%d waits, %d resets", waits, resets)
}

// TestTheEndOfAnOverrideThatDoesNotDecideChangesNothing: an override of every key ends beside one of the key, while reserved work waits.
func TestTheEndOfAnOverrideThatDoesNotDecideChangesNothing(t *testing.T) {
	t.Parallel()
	e := newEnding(t, 0)
	for n := range 60 {
		limit := ratelimit.TokenBucket(fmt.Sprint("bare ", n), 7, time.Hour, ratelimit.Capacity(3), ratelimit.MaxReserved(100))
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), e.pool, "web", limit))
		e.exec("INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ($1, 'k', 0, 1, $2, $3)", limit.Name(), -5-15*e.r.Float64(),
			e.base.Add(-time.Duration(e.r.Int64N(1e9))*time.Microsecond))
		runAt := func() (at time.Time) {
			harness.Succeeds(t, follow.Load(t.Context(), e.limits))
			_, _ = e.at(e.base, func(db ratelimit.DB) error {
				r, err := e.limits.Reserve(t.Context(), db, limit.Key("k").Count(0.3))
				at = r.RetryAt
				return err
			})
			return at
		}
		e.exec("INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, until) VALUES ($1, 'k', 'numbers', 6.1, 3, $2)", limit.Name(), e.base.Add(100*time.Hour))
		want := runAt()
		e.exec("INSERT INTO ratelimit.overrides (name, key, effect, rate, until) VALUES ($1, NULL, 'numbers', 0.7, $2)", limit.Name(), e.base.Add(time.Duration(1+e.r.Int64N(1e9))*time.Microsecond))
		if got := runAt(); !got.Equal(want) || !want.After(e.base) {
			t.Errorf("%v: may run at %v, beside another override at %v", limit, want, got)
		}
	}
}

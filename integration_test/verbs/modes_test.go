package verbs_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// inEveryMode runs a test in every query mode of pgx, on a pool with the server's settings and on one with strange ones.
func inEveryMode(t *testing.T, test func(t *testing.T, pool *pgxpool.Pool)) {
	t.Helper()
	t.Parallel()
	for _, mode := range harness.ExecModes {
		for _, settings := range []map[string]string{nil, harness.Strange} {
			t.Run(fmt.Sprint(mode, settings), func(t *testing.T) {
				t.Parallel()
				harness.NeedsMode(t, mode)
				test(t, harness.Reconfigured(t, harness.NewPool(t, 1), func(c *pgxpool.Config) {
					c.MaxConns = 2
					c.ConnConfig.DefaultQueryExecMode = mode
					harness.StartWith(t, c.ConnConfig, settings)
				}))
			})
		}
	}
}

func TestEveryQueryExecModeGivesTheSameAnswers(t *testing.T) {
	inEveryMode(t, func(t *testing.T, pool *pgxpool.Pool) {
		limiter, clock := harness.NewLimiter()
		w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
		bucket := ratelimit.TokenBucket("o'bucket", 10, time.Minute, ratelimit.MaxReserved(1.5)).Key(`a\'n"n`)
		window := ratelimit.FixedWindow("window", 0.1, 900*time.Millisecond).Global()
		sharded := ratelimit.TokenBucket("sharded", 1e15, 290*365*24*time.Hour, ratelimit.Shards(2)).Key("ann")
		first := w.Grant(bucket.Count(9.5))
		w.Retries(w.Deny(bucket), 3*time.Second)
		w.Runs(w.Reserve(bucket.Count(2)), 9*time.Second)
		second := w.Grant(window.Count(0.1), sharded.Count(1e15))
		w.Deny(window.Count(0.05), sharded)
		_, err := limiter.Charge(t.Context(), pool, bucket)
		w.Do(err)
		_, err = limiter.Charge(t.Context(), pool, bucket, window, sharded)
		w.Do(err)
		w.Holds(bucket, -3.5)
		w.Refund(first.Receipt(), bucket.Count(0.5))
		w.Refund(second.Receipt(), sharded.Count(1))
		w.Holds(bucket, -3)
		w.Holds(sharded, 0)
		w.Do(limiter.Reset(t.Context(), pool, bucket, window))
		w.Holds(bucket, 10)
	})
}

// Values from the database must arrive to the last bit and the microsecond, or RetryAt would be wrong.
func TestEveryQueryExecModeIsExact(t *testing.T) {
	inEveryMode(t, func(t *testing.T, pool *pgxpool.Pool) {
		limiter, clock := harness.NewLimiter()
		clock.At = time.Date(1066, 10, 14, 9, 0, 0, 123456000, time.UTC) // when time zones had odd seconds
		w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
		third := 1.0 / 3
		limit := ratelimit.TokenBucket("thirds", 7.0/3, time.Hour, ratelimit.Capacity(1e6), ratelimit.Shards(1))
		single, several := limit.Key("single"), []ratelimit.Request{limit.Key("a").Count(third), limit.Key("b").Count(third)}
		if got := w.Grant(single.Count(third)).Requests[0].Remaining; got != 1e6-third {
			t.Errorf("one limit: %v remain, want %v", got, 1e6-third)
		}
		for i, s := range w.Grant(several...).Requests {
			if s.Remaining != 1e6-third {
				t.Errorf("limit %d of two: %v remain, want %v", i, s.Remaining, 1e6-third)
			}
		}
		w.Grant(single.Count(1e6 - 1)) // two thirds are left
		denied := w.Deny(single)
		if !denied.At.Equal(clock.At) {
			t.Errorf("decided at %v, want %v", denied.At, clock.At)
		}
		at := algebra.At(clock.At)
		if want := harness.Numbers(limit, "single").When([]algebra.Row{{Value: denied.Remaining, TS: at}}, 1, 0, at).Time(); !denied.RetryAt.Equal(want) {
			t.Errorf("denied until %v, want %v", denied.RetryAt, want)
		}
		clock.At = harness.Before(limit, denied.RetryAt)
		w.Deny(single)
		clock.At = denied.RetryAt
		w.Grant(single)
		clock.At = time.Date(9999, 12, 31, 23, 59, 59, 999999000, time.UTC)
		w.Grant(ratelimit.FixedWindow("calls", 1, 7*24*time.Hour).Key("ann"), ratelimit.FixedWindow("others", 1, time.Hour, ratelimit.Start(time.Time{}.Add(time.Hour))).Key("bob"))
	})
}

// The library compares the result of one statement for several calls with its own sums. A lost bit would be an error.
func TestEveryQueryExecModeCoalesces(t *testing.T) {
	inEveryMode(t, func(t *testing.T, pool *pgxpool.Pool) {
		coalescer := &ratelimit.Coalescer{Pool: pool}
		defer harness.CloseCoalescer(t, coalescer)
		var limiter ratelimit.Limiter
		thirds := ratelimit.TokenBucket("thirds", 7.0/3, time.Second, ratelimit.Capacity(10))
		window := ratelimit.FixedWindow("window", 1.0/3, 900*time.Millisecond, ratelimit.Capacity(7))
		errs := make(chan error)
		for g := range 16 {
			go func() {
				for range 10 {
					_, err := limiter.Consume(t.Context(), coalescer, thirds.Key(fmt.Sprint(g%3)).Count(1.0/3), window.Key("k").Count(0.1))
					if err == nil || harness.Denied(err) {
						_, err = limiter.Charge(t.Context(), coalescer, thirds.Key(fmt.Sprint(g%3)).Count(0.7))
					}
					errs <- err
				}
			}()
		}
		for range 16 * 10 {
			if err := <-errs; err != nil && !harness.Denied(err) {
				t.Error(err)
			}
		}
	})
}

func TestEveryQueryExecModeTakesBatches(t *testing.T) {
	inEveryMode(t, func(t *testing.T, pool *pgxpool.Pool) {
		limiter, clock := harness.NewLimiter()
		w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
		limit := ratelimit.TokenBucket("thirds", 10.0/3, time.Hour)
		sharded := ratelimit.FixedWindow("sharded", 10.0/3, time.Hour, ratelimit.Shards(2))
		for i := range 4 {
			var batch pgx.Batch
			one := harness.Queue(t, limiter, &batch, limit.Key("ann"))
			batch.Queue("SELECT 1")
			several := harness.Queue(t, limiter, &batch, limit.Key("bob"), sharded.Key("ann"))
			err := limiter.SendTx(t.Context(), pool, &batch)
			if i == 3 {
				if !harness.Denied(err) || one.RetryAt.Equal(harness.Noon) {
					t.Errorf("%v, %+v, want a denial", err, one)
				}
				break
			}
			if want := 10.0/3 - float64(i+1); err != nil || !harness.Near(one.Requests[0].Remaining, want) || !harness.Near(several.Requests[0].Remaining, want) {
				t.Errorf("%+v, %+v, %v, want %v left", one, several, err, want)
			}
		}
		w.Holds(limit.Key("ann"), 10.0/3-3)
	})
}

// Adaptive calls a service as often as it can take, and finds that rate itself: a second without failures raises the rate
// by 10, a second with failures halves it, between 5 and 60 per second (AIMD, as in TCP). The rate is a row, so all
// processes share it. A new rate creates no tokens: the balance is cut to the capacity.
//
//	go run ./examples/adaptive
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

// The example's clock. A second passes when all its calls have been answered, so the output is always the same.
var now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

var limits *ratelimit.Limiter // of Open

// calls varies: its rate is found while the program runs. Any rate fills the bucket within a second.
var calls = ratelimit.TokenBucket("calls", 20, time.Second, ratelimit.Varies(time.Second))

// atPresent returns the limit with the present rate.
func atPresent(ctx context.Context, pool *pgxpool.Pool) (ratelimit.Limit, error) {
	var rate float64
	err := pool.QueryRow(ctx, "SELECT rate FROM services WHERE name = 'search'").Scan(&rate)
	return calls.With(ratelimit.Rate(rate)), err
}

// adapt sets the rate according to the counted failures.
func adapt(ctx context.Context, pool *pgxpool.Pool, failed int) error {
	_, err := pool.Exec(ctx, `
		UPDATE services
		   SET rate = least(60, greatest(5, CASE WHEN $1 > 0 THEN floor(rate / 2) ELSE rate + 10 END))
		 WHERE name = 'search'`, failed)
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "adaptive", Limits: []ratelimit.Limit{calls},
		Clock:        func() time.Time { return now },
		NoBackground: true, // an application follows its overrides, and sweeps
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	_, err = pool.Exec(ctx, "CREATE TABLE services (name text, rate float8); INSERT INTO services VALUES ('search', 20)")
	if err != nil {
		return err
	}
	var canTake, taken atomic.Int64 // the service's health, which the caller cannot see
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if taken.Add(1) > canTake.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer service.Close()
	coalescer := &ratelimit.Coalescer{Pool: pool} // many calls at once, outside of transactions
	defer demo.Close(ctx, coalescer)

	fmt.Println("second  it can take  rate  granted  failed")
	for second, health := range []int64{50, 50, 50, 50, 50, 10, 10, 10, 10, 10, 50, 50, 50} {
		canTake.Store(health)
		taken.Store(0)
		limit, err := atPresent(ctx, pool)
		if err != nil {
			return err
		}
		var granted, failed atomic.Int64
		errs := make([]error, 100) // all callers of this second
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				_, err := limits.Consume(ctx, coalescer, limit.Global())
				if errors.Is(err, ratelimit.ErrDenied) {
					return
				} else if errs[i] = err; err != nil {
					return
				}
				granted.Add(1)
				response, err := service.Client().Head(service.URL)
				if errs[i] = err; err == nil && response.StatusCode != http.StatusOK {
					failed.Add(1)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			return err
		}
		fmt.Printf("%6d %12d %5.0f %8d %7d\n", second+1, health, limit.Capacity(), granted.Load(), failed.Load())
		if granted.Load() != int64(limit.Capacity()) || failed.Load() != max(0, granted.Load()-health) {
			return errors.New("want as many grants as the rate, and a failure for each call that the service cannot take")
		}
		if err := adapt(ctx, pool, int(failed.Load())); err != nil {
			return err
		}
		now = now.Add(time.Second)
	}

	fmt.Println("then, at the same instant:")
	for _, step := range []struct {
		failed    int
		rate      float64
		remaining float64
	}{{1, 24, 23}, {0, 34, 22}, {0, 44, 21}, {0, 54, 20}, {0, 60, 19}} {
		if err := adapt(ctx, pool, step.failed); err != nil {
			return err
		}
		limit, err := atPresent(ctx, pool)
		if err != nil {
			return err
		}
		result, err := limits.Consume(ctx, pool, limit.Global())
		if err != nil {
			return err
		}
		fmt.Printf("rate %v, one call granted, %v remaining\n", limit.Capacity(), result.Remaining)
		if limit.Capacity() != step.rate || result.Remaining != step.remaining {
			return fmt.Errorf("want rate %v and %v remaining", step.rate, step.remaining)
		}
	}
	return nil
}

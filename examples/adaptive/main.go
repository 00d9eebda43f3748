// Adaptive calls a service no more often than it can take, and finds out by itself how often that is: a second without
// failures raises the rate by 10, one with failures halves it, between 5 and 60 per second (AIMD, as TCP does). The rate is
// a row, so that all processes share it. Redefining a limit mints no tokens: what it holds is clamped to its capacity.
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

// Of the story: its seconds pass when all calls of one have been answered, so that it is the same each time.
var now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

var limits = ratelimit.Limiter{Clock: func() time.Time { return now }}

// calls is the limit as of now.
func calls(ctx context.Context, pool *pgxpool.Pool) (ratelimit.Limit, error) {
	var rate float64
	err := pool.QueryRow(ctx, "SELECT rate FROM services WHERE name = 'search'").Scan(&rate)
	return ratelimit.TokenBucket("calls", rate, time.Second), err
}

// adapt sets the rate by the failures that were counted.
func adapt(ctx context.Context, pool *pgxpool.Pool, failed int) error {
	_, err := pool.Exec(ctx, `
		UPDATE services
		   SET rate = least(60, greatest(5, CASE WHEN $1 > 0 THEN floor(rate / 2) ELSE rate + 10 END))
		 WHERE name = 'search'`, failed)
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, "CREATE TABLE services (name text, rate float8); INSERT INTO services VALUES ('search', 20)")
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
	coalescer := &ratelimit.Coalescer{Pool: pool} // many calls at once, and no transaction of their own
	defer coalescer.Close()

	fmt.Println("second  it can take  rate  granted  failed")
	for second, health := range []int64{50, 50, 50, 50, 50, 10, 10, 10, 10, 10, 50, 50, 50} {
		canTake.Store(health)
		taken.Store(0)
		limit, err := calls(ctx, pool)
		if err != nil {
			return err
		}
		var granted, failed atomic.Int64
		errs := make([]error, 100) // all that want to call in this second
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
			return errors.New("want as many granted as the rate says, and as many failed as are too many for the service")
		}
		if err := adapt(ctx, pool, int(failed.Load())); err != nil {
			return err
		}
		now = now.Add(time.Second)
	}

	fmt.Println("then, while no time passes:")
	for _, step := range []struct {
		failed    int
		rate      float64
		remaining float64
	}{{1, 24, 23}, {0, 34, 22}, {0, 44, 21}, {0, 54, 20}, {0, 60, 19}} {
		if err := adapt(ctx, pool, step.failed); err != nil {
			return err
		}
		limit, err := calls(ctx, pool)
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

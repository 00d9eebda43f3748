package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

// measure prints what a fetch costs, and how many jobs a second the table gives away beside the backlog.
func measure(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	fmt.Printf("backlog of one tenant: %d jobs\n", *backlog)
	for _, c := range []struct{ what, before string }{
		{"the query of a fetch, with jobs_waiting", ""},
		{"the same without it", "DROP INDEX jobs_waiting"},
	} {
		took, err := timed(ctx, pool, c.before)
		if err != nil {
			return err
		}
		fmt.Printf("%-44s %10.2f ms\n", c.what, took.Seconds()*1e3)
	}

	// Rates and slots that never deny, so that only the work of dispatching is measured.
	for _, request := range []ratelimit.Request{rates.Global(), slots.Global()} {
		numbers := []ratelimit.Option{ratelimit.Capacity(1e6)}
		if request == rates.Global() {
			numbers = append(numbers, ratelimit.Rate(1e6))
		}
		if _, err := limits.Override(ctx, pool, request, ratelimit.Terms{Forever: true, Reason: "measured", Who: "dispatch"}, numbers...); err != nil {
			return err
		}
	}
	for _, weight := range []int{1, 10, 50} {
		if _, err := pool.Exec(ctx, "UPDATE tenants SET weight = $1 WHERE id = 'flood'", weight); err != nil {
			return err
		}
		for _, workers := range []int{1, 4} {
			n, err := throughput(ctx, pool, limits, workers)
			if err != nil {
				return err
			}
			fmt.Printf("jobs a second, %2d a fetch, %d workers:        %10.0f\n", weight, workers, n)
		}
	}
	return beside(ctx, pool, limits)
}

// beside prints what examples/river-dispatch prints, of the same work: 20 jobs a second of the tenant with the backlog, for 20 seconds, and two jobs a
// second of small tenants.
func beside(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	if _, err := limits.Override(ctx, pool, rates.Key("flood"), ratelimit.Terms{Forever: true, Reason: "measured", Who: "dispatch"}, ratelimit.Rate(20), ratelimit.Capacity(10)); err != nil {
		return err
	}
	before := fetched.Load()
	cost, err := demo.Costs(ctx, pool, "jobs", func(ctx context.Context, own *pgxpool.Pool) error {
		for _, sql := range []string{
			"UPDATE tenants SET weight = 10 WHERE id = 'flood'",
			"INSERT INTO tenants SELECT 'measured ' || n, 1 FROM generate_series(1, 40) AS n",
			"TRUNCATE starts",
			"VACUUM ANALYZE jobs",
		} {
			if _, err := own.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	}, func(ctx context.Context, own *pgxpool.Pool) error {
		stop, worked := make(chan struct{}), make(chan error, 1)
		go func() { worked <- work(ctx, own, limits, 1, stop, func(job) { time.Sleep(20 * time.Millisecond) }) }()
		for n := range 40 {
			if _, err := own.Exec(ctx, "INSERT INTO jobs (tenant) VALUES ('measured ' || $1::int)", n+1); err != nil {
				return err
			}
			time.Sleep(500 * time.Millisecond)
		}
		close(stop)
		return <-worked
	})
	if err != nil {
		return err
	}
	cost.Fetched = int(fetched.Load() - before)
	err = pool.QueryRow(ctx, `
		SELECT count(*), extract(epoch FROM max(s.held - j.due) FILTER (WHERE s.tenant LIKE 'measured %'))::float8
		  FROM starts AS s JOIN jobs AS j ON j.id = s.job`).Scan(&cost.Jobs, &cost.Waited)
	if err != nil {
		return err
	}
	fmt.Printf("%s\n%s\n", demo.CostHeader, cost.Line("a table of its own"))
	return nil
}

// timed is how long the query of a fetch takes, the best of five.
func timed(ctx context.Context, pool *pgxpool.Pool, before string) (best time.Duration, err error) {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	for _, sql := range []string{begin, before} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return 0, err
		}
	}
	best = time.Hour
	for range 5 {
		began := time.Now()
		rows, err := tx.Query(ctx, oldest)
		if err == nil {
			_, err = pgx.CollectRows(rows, pgx.RowToMap)
		}
		if err != nil {
			return 0, err
		}
		best = min(best, time.Since(began))
	}
	return best, nil
}

// throughput is how many jobs a second workers start and finish in three seconds.
func throughput(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter, workers int) (float64, error) {
	var before, after int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM starts WHERE ended IS NOT NULL").Scan(&before); err != nil {
		return 0, err
	}
	began, stop := time.Now(), make(chan struct{})
	time.AfterFunc(3*time.Second, func() { close(stop) })
	errs := make([]error, workers)
	var working sync.WaitGroup
	for i := range workers {
		working.Go(func() { errs[i] = work(ctx, pool, limits, i, stop, func(job) {}) })
	}
	working.Wait()
	took := time.Since(began)
	for _, err := range errs {
		if err != nil {
			return 0, err
		}
	}
	err := pool.QueryRow(ctx, "SELECT count(*) FROM starts WHERE ended IS NOT NULL").Scan(&after)
	return float64(after-before) / took.Seconds(), err
}

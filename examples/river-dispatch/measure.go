package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

// mode is when a denied job runs again.
type mode int

const (
	spread   mode = iota // later than RetryAt, spread over a time that doubles
	atOnce               // at RetryAt
	reserved             // it was inserted with a reservation, so it is denied by slots alone
)

// measure prints what a job costs while one tenant has a backlog beyond its rate, in each mode.
func measure(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	const perSecond = 20 // of the tenant with the backlog
	for _, o := range []struct {
		request ratelimit.Request
		number  ratelimit.Option
	}{{rates.Key("flood"), ratelimit.Rate(perSecond)}, {slots.Global(), ratelimit.Capacity(50)}, {inAll.Global(), ratelimit.Capacity(50)}} {
		if _, err := limits.Override(ctx, pool, o.request, ratelimit.Terms{Forever: true, Reason: "measured", Who: "river-dispatch"}, o.number); err != nil {
			return err
		}
	}
	fmt.Printf("backlog of one tenant: %d jobs, of which %d a second may run\n%s\n", *backlog, perSecond, demo.CostHeader)
	for _, m := range []struct {
		mode mode
		what string
	}{{reserved, "reserved when inserted"}, {spread, "snoozed and spread"}, {atOnce, "snoozed until RetryAt"}} {
		cost, err := demo.Costs(ctx, pool, "river_job",
			func(ctx context.Context, own *pgxpool.Pool) error { return prepare(ctx, own, limits, m.mode) },
			func(ctx context.Context, own *pgxpool.Pool) error { return runFor20s(ctx, own, limits, m.mode) })
		if err != nil {
			return err
		}
		err = pool.QueryRow(ctx, `
			SELECT (SELECT count(*) FROM river_job WHERE state = 'completed'), (SELECT sum(attempt + coalesce((metadata->>'snoozes')::int, 0)) FROM river_job),
			       (SELECT extract(epoch FROM max(held - created_at))::float8 FROM runs JOIN river_job ON id = job WHERE tenant LIKE 'small %')`).
			Scan(&cost.Jobs, &cost.Fetched, &cost.Waited)
		if err != nil {
			return err
		}
		fmt.Println(cost.Line(m.what))
	}
	return nil
}

// prepare empties the queue and fills it with the backlog.
func prepare(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter, m mode) error {
	if _, err := pool.Exec(ctx, "TRUNCATE river_job, runs"); err != nil {
		return err
	}
	if err := limits.Reset(ctx, pool, rates.Key("flood")); err != nil {
		return err
	}
	jobs, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	if err != nil {
		return err
	}
	if m != reserved {
		err = insert(ctx, jobs, "flood", *backlog)
	}
	for done := 0; m == reserved && done < *backlog && err == nil; done += 100 {
		err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			for range min(100, *backlog-done) {
				if err := insertReserved(ctx, tx, jobs, limits, "flood"); err != nil {
					return err
				}
			}
			return nil
		}, ratelimit.Isolation(pgx.ReadCommitted))
	}
	if err == nil {
		_, err = pool.Exec(ctx, "VACUUM ANALYZE river_job")
	}
	return err
}

// insertReserved inserts a job for the instant at which its token will be there.
func insertReserved(ctx context.Context, tx pgx.Tx, jobs *river.Client[pgx.Tx], limits *ratelimit.Limiter, tenant string) error {
	r, err := limits.Reserve(ctx, tx, rates.Key(tenant))
	if err != nil {
		return err
	}
	options := &river.InsertOpts{}
	if r.Delay > 0 {
		options.ScheduledAt = r.RetryAt
	}
	_, err = jobs.InsertTx(ctx, tx, email{Tenant: tenant}, options)
	return err
}

// runFor20s runs the jobs for 20 seconds, and inserts a job of a small tenant twice a second.
func runFor20s(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter, m mode) error {
	jobs, err := newRiver(pool, river.QueueDefault, 20, &worker{limits: limits, pool: pool, number: 1, mode: m})
	if err == nil {
		err = jobs.Start(ctx)
	}
	for n := 0; n < 40 && err == nil; n++ {
		tenant := fmt.Sprintf("small %d %d", m, n)
		if m == reserved {
			err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error { return insertReserved(ctx, tx, jobs, limits, tenant) })
		} else {
			err = insert(ctx, jobs, tenant, 1)
		}
		time.Sleep(500 * time.Millisecond)
	}
	if err != nil {
		return err
	}
	return jobs.Stop(ctx)
}

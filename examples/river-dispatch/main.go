// River-dispatch does with River what examples/dispatch does with a table of its own. Each tenant has a rate and a number of jobs at once, and
// there is a number of jobs at once for all tenants together. River fetches by itself, so a job asks when it runs, by During, and is snoozed if it is
// denied. Workers are processes, and two of them are killed. docs/dispatch.md explains it.
//
//	go run ./examples/river-dispatch                       # checks itself
//	go run ./examples/river-dispatch -backlog 500 -measure
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/examples/internal/timeline"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	backlog  = flag.Int("backlog", 40, "the jobs of the tenant that floods the queue")
	measured = flag.Bool("measure", false, "measure what snoozing costs")
)

// Every tenant has 5 jobs a second, 10 in a burst, and 4 at once. All together have 10 at once.
var (
	rates = ratelimit.TokenBucket("jobsPerTenant", 5, time.Second, ratelimit.Capacity(10), ratelimit.MaxReserved(1e6))
	slots = ratelimit.Slots("jobsAtOnce", 4)
	inAll = ratelimit.Slots("jobsAtOnceInAll", 10)
)

const (
	ttl     = 20 * time.Second // how long a dead worker's slots stay taken, since During extends them meanwhile; a minute is a good one
	timeout = 30 * time.Second // of a job
	rescue  = 31 * time.Second // after which River takes a job's worker for dead; longer than the timeout
)

const schema = `
	-- For the checks at the end: each run of a job, and the instant of its token. A hold that had to wait may be granted by slots that came back after
	-- that instant, so what runs at once is counted from began on.
	CREATE TABLE runs (
		job bigint NOT NULL, tenant text NOT NULL, worker int NOT NULL,
		held timestamptz NOT NULL, began timestamptz NOT NULL DEFAULT clock_timestamp(), ended timestamptz);
	CREATE INDEX ON runs (held)`

func main() {
	flag.Parse()
	if url := os.Getenv(asWorker); url != "" {
		if err := workAsProcess(context.Background(), url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if *measured {
		demo.Serve(story) // for as long as it takes
		return
	}
	demo.Main(story)
}

func open(ctx context.Context, pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
	return ratelimit.Open(ctx, pool, ratelimit.Options{Program: "river-dispatch", Limits: []ratelimit.Limit{rates, slots, inAll}})
}

func story(ctx context.Context, pool *pgxpool.Pool) error {
	limits, err := open(ctx, pool)
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	if err == nil {
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	}
	if err == nil {
		_, err = pool.Exec(ctx, schema)
	}
	if err != nil {
		return err
	}
	if *measured {
		return measure(ctx, pool, limits)
	}
	jobs, err := newRiver(pool, "nothing", 1, &worker{limits: limits, pool: pool})
	if err != nil {
		return err
	}
	if err := killed(ctx, pool, jobs); err != nil {
		return err
	}

	// A backlog of one tenant, and then one job of each of the others.
	if err := insert(ctx, jobs, "flood", *backlog); err != nil {
		return err
	}
	for n := range 20 {
		if err := insert(ctx, jobs, fmt.Sprint("small ", n+1), 1); err != nil {
			return err
		}
	}
	var workers []*exec.Cmd
	var stops []func() error
	for n := range 3 {
		worker, stop, err := process(ctx, pool, n+1)
		if err != nil {
			return err
		}
		workers, stops = append(workers, worker), append(stops, stop)
	}
	if err := until(ctx, pool, "SELECT count(*) = 0 FROM river_job JOIN runs ON job = id AND worker < 0 WHERE state = 'running' AND attempted_at > now() - interval '31 seconds'"); err != nil {
		return err
	}
	if err := jobs.Stop(ctx); err != nil { // a worker is River's leader now, and looks for jobs whose worker is dead
		return err
	}
	if err := until(ctx, pool, "SELECT bool_and(state IN ('completed', 'discarded', 'cancelled')) FROM river_job"); err != nil {
		return err
	}
	for i, worker := range workers {
		if err := errors.Join(stops[i](), worker.Wait()); err != nil {
			return err
		}
	}
	return check(ctx, pool, limits)
}

// killed has one worker die at work, and another one before it commits the end of its job.
func killed(ctx context.Context, pool *pgxpool.Pool, jobs *river.Client[pgx.Tx]) error {
	if err := jobs.Start(ctx); err != nil { // of another queue: River's leader is not killed, or the others would wait for its term to end
		return err
	}
	if err := until(ctx, pool, "SELECT count(*) = 1 FROM river_leader"); err != nil {
		return err
	}
	for _, number := range []int{dies, hangs} {
		if err := insert(ctx, jobs, "unlucky", 1); err != nil {
			return err
		}
		worker, _, err := process(ctx, pool, number)
		if err == nil {
			err = until(ctx, pool, fmt.Sprintf("SELECT count(*) = 1 FROM runs WHERE worker = %d", number))
		}
		if err == nil && number == hangs {
			err = worker.Process.Kill()
		}
		if err != nil {
			return err
		}
		if err := worker.Wait(); err == nil {
			return errors.New("the worker was not killed")
		}
		if _, err := pool.Exec(ctx, "UPDATE runs SET ended = clock_timestamp() WHERE worker = $1", number); err != nil {
			return err
		}
	}
	return nil
}

// insert inserts jobs of a tenant.
func insert(ctx context.Context, jobs *river.Client[pgx.Tx], tenant string, n int) error {
	many := make([]river.InsertManyParams, n)
	for i := range many {
		many[i].Args = email{Tenant: tenant}
	}
	_, err := jobs.InsertManyFast(ctx, many)
	return err
}

// until asks until the answer is true.
func until(ctx context.Context, pool *pgxpool.Pool, query string) error {
	for {
		var yes bool
		if err := pool.QueryRow(ctx, query).Scan(&yes); err != nil || yes {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// check compares what was run with tokens, slots, and River's own table.
func check(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	var jobs, snoozed, snoozes int
	err := pool.QueryRow(ctx, `
		SELECT count(*), count(*) FILTER (WHERE metadata ? 'snoozes'), coalesce(sum((metadata->>'snoozes')::int), 0) FROM river_job`).Scan(&jobs, &snoozed, &snoozes)
	if err != nil {
		return err
	}
	fmt.Printf("%d jobs of %d tenants, some of them snoozed: %v\n", jobs, 22, snoozed > 0)
	fmt.Fprintf(os.Stderr, "%d jobs were snoozed, %d times in all\n", snoozed, snoozes)
	if snoozed == 0 {
		return errors.New("no job was snoozed")
	}
	for _, c := range []struct{ what, query string }{
		{"jobs that are not completed", "SELECT count(*) FROM river_job WHERE state <> 'completed'"},
		{"jobs that did not end once, in a worker that lived", `
			SELECT count(*) FROM river_job AS j WHERE (SELECT count(r.ended) FROM runs AS r WHERE r.job = j.id AND r.worker > 0) <> 1`},
		{"runs that did not end", "SELECT count(*) FROM runs WHERE ended IS NULL"},
		{"jobs with more attempts than runs, so that a snooze was counted", `
			SELECT count(*) FROM river_job AS j WHERE attempt <> (SELECT count(*) FROM runs AS r WHERE r.job = j.id)`},
		{"jobs of dead workers that were not run again", `
			SELECT 2 - count(DISTINCT r.job) FROM runs AS r JOIN runs AS d ON d.job = r.job AND d.worker < 0 WHERE r.worker > 0`},
		{"jobs at once of a tenant, beyond its 4 slots", overlap("tenant", 4)},
		{"jobs at once in all, beyond 10", overlap("true", 10)},
	} {
		var n int
		if err := pool.QueryRow(ctx, c.query).Scan(&n); err != nil {
			return fmt.Errorf("%s: %w", c.what, err)
		}
		fmt.Printf("%s: %d\n", c.what, n)
		if n != 0 {
			return fmt.Errorf("%s: %d", c.what, n)
		}
	}
	return errors.Join(tokens(ctx, pool, limits), free(ctx, pool, limits))
}

// overlap is the query for how many runs of a group overlap, beyond some.
func overlap(group string, most int) string {
	return fmt.Sprintf(`
		SELECT greatest(0, max(at_once) - %d) FROM (
			SELECT sum(d) OVER (PARTITION BY %s ORDER BY at, d) AS at_once
			  FROM (SELECT tenant, began AS at, 1 AS d FROM runs UNION ALL SELECT tenant, ended, -1 FROM runs) AS e) AS s`, most, group)
}

// tokens wants each tenant to have what its runs have left: no token is gone without a run, and none was run without one. The tokens of dead
// workers come back at some instant after their time: then there are as many as if they had never been taken, or fewer. A run's token was taken between
// held and began: a hold may have waited, and of a full limit the refill meanwhile is lost.
func tokens(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	rows, err := pool.Query(ctx, "SELECT DISTINCT tenant FROM runs ORDER BY 1")
	if err != nil {
		return err
	}
	tenants, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	c := rates.Config()
	for _, tenant := range tenants {
		balances, err := limits.Balance(ctx, pool, rates.Key(tenant))
		if err != nil {
			return err
		}
		var left [2]float64 // with the tokens of dead workers, and without
		for i, of := range []string{"began, 1::float8 FROM runs WHERE true", "held, 1::float8 FROM runs WHERE worker > 0"} {
			events, err := timeline.Read(ctx, pool, fmt.Sprintf("SELECT %s AND tenant = '%s'", of, tenant))
			if err != nil {
				return err
			}
			left[i] = timeline.Left(append(events, timeline.Event{At: balances[0].At}), *c.Capacity, *c.Rate, time.Second)
		}
		if got := balances[0].Remaining; got < left[0]-1e-6 || got > left[1]+1e-6 {
			return fmt.Errorf("tenant %s has %v tokens, and by its runs %v to %v", tenant, got, left[0], left[1])
		}
	}
	fmt.Printf("tokens and runs agree, of %d tenants\n", len(tenants))
	return nil
}

// free wants every slot to be back.
func free(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	balances, err := limits.Balance(ctx, pool, inAll.Global(), slots.Key("flood"), slots.Key("unlucky"))
	if err != nil {
		return err
	}
	used := math.Max(balances[0].Used, math.Max(balances[1].Used, balances[2].Used))
	fmt.Printf("slots in use: %v\n", used)
	if used != 0 {
		return errors.New("a slot is lost")
	}
	return nil
}

// Dispatch hands out the jobs of many tenants from one table, fairly: each tenant has a rate, a number of jobs at once, and a weight. A
// backlog of one tenant delays nobody else. Workers are processes, and two of them are killed. docs/dispatch.md explains it.
//
//	go run ./examples/dispatch                          # checks itself
//	go run ./examples/dispatch -backlog 1000000 -measure
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/examples/internal/timeline"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	backlog  = flag.Int("backlog", 20000, "the jobs of the tenant that floods the table")
	measured = flag.Bool("measure", false, "measure jobs a second without rates, and a fetch without its index")
)

// Every tenant has 5 jobs a second, 20 in a burst, and 8 at once. (A tenant with other numbers: an override, or With.)
var (
	rates = ratelimit.TokenBucket("jobsPerTenant", 5, time.Second, ratelimit.Capacity(20))
	slots = ratelimit.Slots("jobsAtOnce", 8)
)

const lease = 2 * time.Second // how long a job may take; then its worker is taken for dead

const schema = `
	CREATE TABLE tenants (id text PRIMARY KEY, weight int NOT NULL); -- at most so many jobs of it in one fetch
	CREATE TABLE jobs (
		id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		tenant  text NOT NULL REFERENCES tenants,
		due     timestamptz NOT NULL DEFAULT now(),
		state   text NOT NULL DEFAULT 'waiting', -- running, done
		token   text,        -- Held.Token: whose it is
		lease   timestamptz  -- the worker's time is over then
	);
	-- The two indexes that a fetch needs.
	CREATE INDEX jobs_waiting ON jobs (tenant, due, id) WHERE state = 'waiting';
	CREATE INDEX jobs_running ON jobs (lease) WHERE state = 'running';

	-- For the checks at the end: every fetch, every start of a job with the instant of its token, and when a small tenant's job was committed.
	CREATE TABLE asked (job bigint NOT NULL, at timestamptz NOT NULL);
	CREATE TABLE fetches (began timestamptz NOT NULL, ended timestamptz NOT NULL, refunded int NOT NULL, denied int NOT NULL);
	CREATE TABLE starts (job bigint NOT NULL, tenant text NOT NULL, worker int NOT NULL, began timestamptz NOT NULL, taken timestamptz NOT NULL, held timestamptz NOT NULL, ended timestamptz,
		running timestamptz NOT NULL DEFAULT clock_timestamp()); -- a hold that had to wait may have a slot that came back after its instant
	CREATE INDEX ON starts (job);

	INSERT INTO tenants VALUES ('flood', 10), ('gold', 3), ('free', 1);
	INSERT INTO tenants SELECT 'small ' || n, 1 FROM generate_series(1, 20) AS n`

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

func story(ctx context.Context, pool *pgxpool.Pool) error {
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "dispatch", Limits: []ratelimit.Limit{rates, slots}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	began := time.Now()
	_, err = pool.Exec(ctx, `INSERT INTO jobs (tenant) SELECT 'flood' FROM generate_series(1, $1::int)`, *backlog)
	if err == nil {
		_, err = pool.Exec(ctx, `INSERT INTO jobs (tenant) SELECT tenant FROM (VALUES ('gold'), ('free')) AS t (tenant), generate_series(1, 40)`)
	}
	if err == nil {
		_, err = pool.Exec(ctx, "VACUUM ANALYZE jobs")
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%d jobs inserted in %v\n", *backlog, time.Since(began).Round(time.Millisecond))
	if *measured {
		return measure(ctx, pool, limits)
	}

	// A worker that is killed before COMMIT has taken nothing: no job, no token, no slot.
	if err := startProcess(ctx, pool, dies).Wait(); err == nil {
		return errors.New("the worker was not killed before its commit")
	}
	if err := nothingTaken(ctx, pool, limits); err != nil {
		return err
	}

	if err := weights(ctx, pool, limits); err != nil {
		return err
	}

	if err := lastSlot(ctx, pool, limits); err != nil {
		return err
	}

	// A worker that is killed at work: its jobs are started again once their time is over.
	victim := startProcess(ctx, pool, hangs)
	for taken := 0; taken == 0; time.Sleep(10 * time.Millisecond) {
		if err := pool.QueryRow(ctx, "SELECT count(*) FROM starts WHERE worker = $1", hangs).Scan(&taken); err != nil {
			return err
		}
	}
	if err := victim.Process.Kill(); err != nil {
		return err
	}
	_ = victim.Wait() // "signal: killed"

	var workers []*exec.Cmd
	var stops []func() error
	for range 3 {
		worker, stop := startStoppable(ctx, pool)
		workers, stops = append(workers, worker), append(stops, stop)
	}
	if err := smallTenants(ctx, pool); err != nil {
		return err
	}
	for i, worker := range workers {
		if err := errors.Join(stops[i](), worker.Wait()); err != nil {
			return err
		}
	}
	return check(ctx, pool, limits)
}

// smallTenants inserts a job of one small tenant after another, and waits until all of them, and those of the killed worker, are done, and
// until a tenant had no token.
func smallTenants(ctx context.Context, pool *pgxpool.Pool) error {
	for n := range 20 {
		var id int64
		if err := pool.QueryRow(ctx, "INSERT INTO jobs (tenant) VALUES ('small ' || $1::int) RETURNING id", n+1).Scan(&id); err != nil {
			return err
		}
		if _, err := pool.Exec(ctx, "INSERT INTO asked VALUES ($1, clock_timestamp())", id); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	for {
		var left, denied int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM jobs AS j WHERE state <> 'done'
			AND (tenant <> 'flood' OR EXISTS (SELECT FROM starts AS s WHERE s.job = j.id AND s.worker = $1))`, hangs).Scan(&left)
		if err == nil {
			err = pool.QueryRow(ctx, "SELECT coalesce(sum(denied), 0) FROM fetches").Scan(&denied)
		}
		if err != nil || left == 0 && denied > 0 {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// nothingTaken wants no job to be started, and no token to be gone.
func nothingTaken(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	var jobs, holds int
	err := pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM jobs WHERE state <> 'waiting'), (SELECT count(*) FROM ratelimit.holds)").Scan(&jobs, &holds)
	if err != nil {
		return err
	}
	balances, err := limits.Balance(ctx, pool, rates.Key("flood"), slots.Key("flood"))
	if err != nil {
		return err
	}
	fmt.Printf("killed before its commit: %d jobs started, %v tokens gone, %v slots in use\n", jobs, balances[0].Used, balances[1].Used)
	if jobs+holds != 0 || balances[0].Used != 0 || balances[1].Used != 0 {
		return errors.New("a worker that was killed before its commit has taken something")
	}
	return nil
}

// check compares what was started with tokens, slots, weights and fetches.
func check(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	for _, c := range []struct{ what, query string }{
		{"jobs that were started twice within their time", `
			SELECT count(*) FROM starts AS a JOIN starts AS b ON a.job = b.job AND a.ctid <> b.ctid AND a.held <= b.held
			 WHERE b.held < coalesce(a.ended, a.held + interval '2 seconds')`},
		{"jobs that are done, and have no finished start, or two", `
			SELECT count(*) FROM jobs AS j WHERE state = 'done' AND (SELECT count(s.ended) FROM starts AS s WHERE s.job = j.id) <> 1`},
		{"jobs of the killed worker that were not started again", fmt.Sprintf(`
			SELECT count(*) FROM jobs AS j JOIN starts AS s ON s.job = j.id AND s.worker = %d WHERE j.state <> 'done'`, hangs)},
		{"more jobs at once than a tenant's slots", `
			SELECT greatest(0, max(at_once) - 8) FROM (
				SELECT sum(d) OVER (PARTITION BY tenant ORDER BY at, d) AS at_once FROM (
					SELECT tenant, running AS at, 1 AS d FROM starts
					UNION ALL SELECT tenant, coalesce(ended, held + interval '2 seconds'), -1 FROM starts) AS e) AS s`},
		{"fetches that passed over the only job of a small tenant, beyond one", `
			SELECT greatest(0, max(n) - 1) FROM (
				SELECT count(f) AS n FROM asked AS a JOIN starts AS s ON s.job = a.job
				  LEFT JOIN fetches AS f ON f.began > a.at AND f.ended < s.began GROUP BY a.job) AS c`},
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
	if err := tokens(ctx, pool, limits); err != nil {
		return err
	}
	var starts, fetches, refunded, denied int
	var took time.Duration
	err := pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM starts), count(*), sum(refunded), sum(denied), max(ended) - min(began) FROM fetches`).
		Scan(&starts, &fetches, &refunded, &denied, &took)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%d jobs in %d fetches, %.0f a second; %d tokens refunded for want of a slot, %d jobs denied by the rate\n",
		starts, fetches, float64(starts)/took.Seconds(), refunded, denied)
	return nil
}

// weights wants one fetch to start as many jobs of each tenant as its weight and its slots say, beside the backlog.
func weights(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	started, err := fetch(ctx, pool, limits, 0)
	if err != nil {
		return err
	}
	n := map[string]int{}
	for _, j := range started {
		n[j.tenant]++
		if err := finish(ctx, pool, limits, j); err != nil {
			return err
		}
	}
	fmt.Printf("one fetch, of tenants with weights 10, 3 and 1, and 8 slots each: %d, %d and %d jobs\n", n["flood"], n["gold"], n["free"])
	if n["flood"] != 8 || n["gold"] != 3 || n["free"] != 1 {
		return errors.New("not as their weights are")
	}
	return nil
}

// lastSlot has another transaction take all slots of a tenant between the moment at which a fetch looks and the moment at which it holds. The
// tokens of these jobs go back in the transaction of the fetch, and the other tenants' jobs are started.
func lastSlot(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	other, err := limits.Hold(ctx, tx, "gold/faster", time.Minute, slots.Key("gold").Count(8))
	if err != nil {
		return err
	}
	var started []job
	fetched := make(chan error, 1)
	go func() {
		var err error
		started, err = fetch(ctx, pool, limits, 0)
		fetched <- err
	}()
	for waits := 0; waits == 0; time.Sleep(10 * time.Millisecond) {
		if err := pool.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", int32(tx.Conn().PgConn().PID())).Scan(&waits); err != nil {
			return err
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	if err := <-fetched; err != nil {
		return err
	}
	n := map[string]int{}
	for _, j := range started {
		n[j.tenant]++
		if err := finish(ctx, pool, limits, j); err != nil {
			return err
		}
	}
	var refunded int
	if err := pool.QueryRow(ctx, "SELECT sum(refunded) FROM fetches").Scan(&refunded); err != nil {
		return err
	}
	fmt.Printf("no slot left for gold: %d of its jobs started, %d tokens refunded; %d of free started\n", n["gold"], refunded, n["free"])
	if n["gold"] != 0 || refunded != 3 || n["free"] != 1 {
		return errors.New("a job was started without a slot, or a token was kept without a job")
	}
	_, err = limits.Release(ctx, pool, other.Token, slots.Key("gold").Count(8))
	return err
}

// tokens wants each tenant to have what is left by its starts: no token is gone without a job, and no job was started without one. A refund
// gives back what is still missing: if the bucket was full, what was refilled between taking and refunding is not.
func tokens(ctx context.Context, pool *pgxpool.Pool, limits *ratelimit.Limiter) error {
	tenants, err := pool.Query(ctx, "SELECT DISTINCT tenant FROM starts ORDER BY 1")
	if err != nil {
		return err
	}
	names, err := collect(tenants)
	if err != nil {
		return err
	}
	c := rates.Config()
	var between float64 // seconds, of all refunds
	if err := pool.QueryRow(ctx, "SELECT coalesce(sum(refunded * extract(epoch FROM ended - began)), 0)::float8 FROM fetches").Scan(&between); err != nil {
		return err
	}
	for _, tenant := range names {
		balances, err := limits.Balance(ctx, pool, rates.Key(tenant))
		if err != nil {
			return err
		}
		events, err := timeline.Read(ctx, pool, fmt.Sprintf("SELECT taken, 1::float8 FROM starts WHERE tenant = '%s'", tenant))
		if err != nil {
			return err
		}
		events = append(events, timeline.Event{At: balances[0].At}) // until now
		want, got := timeline.Left(events, *c.Capacity, *c.Rate, time.Second), balances[0].Remaining
		if got < want-1e-6-between**c.Rate || got > want+1e-6 {
			return fmt.Errorf("tenant %s has %v tokens, and by its %d jobs %v", tenant, got, len(events)-1, want)
		}
	}
	fmt.Printf("tokens and jobs agree, of %d tenants\n", len(names))
	return nil
}

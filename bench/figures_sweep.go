package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// sweepP99 sweeps n idle keys while 16 goroutines consume, and compares the latencies with the latencies between sweeps. The keys belong
// to ten limits, so that there are ten sweeps, with pauses in between.
func sweepP99(n int) func(ctx context.Context, e *env) (outcome, error) {
	return func(ctx context.Context, e *env) (outcome, error) {
		const goroutines, parts = 16, 10
		n, slice := e.few(n), e.moment(250*time.Millisecond)
		pool, err := e.newPool(ctx, goroutines+1, nil) // the sweep has a connection, too
		if err != nil {
			return outcome{}, err
		}
		var all []ratelimit.Limit
		for part := range parts {
			all = append(all, ratelimit.TokenBucket(fmt.Sprint("limit ", part), 1e6, time.Second, ratelimit.Capacity(1e9)))
		}
		if err := fillIdle(ctx, pool, all, n); err != nil {
			return outcome{}, err
		}
		if err := e.report(ctx, pool, thousands(float64(n))+" idle rows, and one in use to every fifty"); err != nil {
			return outcome{}, err
		}

		busy := (n/parts + 49) / 50
		load := &side{name: "load", goroutines: goroutines, call: func(ctx context.Context, _ int) error {
			_, err := limits.Consume(ctx, pool, all[rand.IntN(parts)].Key(fmt.Sprint(50*rand.IntN(busy), " in use")))
			return err
		}}
		if _, err := load.run(ctx, e.moment(2*time.Second)); err != nil { // warms up
			return outcome{}, err
		}
		var with, without tally
		var deleted int64
		for part, limit := range all {
			took := time.Duration(0)
			swept := make(chan error, 1)
			var over atomic.Bool
			go func() {
				n, err := limits.Sweep(ctx, pool, limit)
				deleted += n
				over.Store(true)
				swept <- err
			}()
			for begin := time.Now(); !over.Load(); took = time.Since(begin) {
				t, err := load.run(ctx, slice)
				if err != nil {
					return outcome{}, errors.Join(err, <-swept)
				}
				with.add(t)
			}
			if err := <-swept; err != nil {
				return outcome{}, err
			}
			for begin := time.Now(); time.Since(begin) < min(took, 8*time.Second); {
				t, err := load.run(ctx, slice)
				if err != nil {
					return outcome{}, err
				}
				without.add(t)
			}
			fmt.Fprintf(e.out, "  part %d of %d: %s rows deleted so far\n", part+1, parts, thousands(float64(deleted)))
		}
		if deleted != int64(n) {
			return outcome{}, fmt.Errorf("%d rows deleted, %d were idle", deleted, n)
		}
		rate := float64(deleted) / with.elapsed.Seconds()
		fmt.Fprintf(e.out, "  consume, with a sweep %v\n  consume, without      %v\n  %s rows/s swept\n", &with, &without, thousands(rate))

		if err := e.report(ctx, pool, "after the sweep"); err != nil {
			return outcome{}, err
		}
		if _, err := pool.Exec(ctx, "VACUUM ratelimit.limits"); err != nil {
			return outcome{}, err
		}
		if err := e.report(ctx, pool, "after VACUUM"); err != nil {
			return outcome{}, err
		}
		if err := fillIdle(ctx, pool, all, n); err != nil {
			return outcome{}, err
		}
		if err := e.report(ctx, pool, "after as many new keys"); err != nil {
			return outcome{}, err
		}
		if err := e.hourOfUpdates(ctx); err != nil {
			return outcome{}, err
		}
		a, b := with.latencies.quantile(0.99), without.latencies.quantile(0.99)
		return outcome{
			value: a.Seconds() / b.Seconds(),
			note:  fmt.Sprintf("%s : %s, %s rows/s swept meanwhile", short(a), short(b), thousands(rate)),
		}, nil
	}
}

// fillIdle inserts n idle rows, spread over the limits. For every fifty of them, it also inserts a row that is in use, unless the row
// exists.
func fillIdle(ctx context.Context, pool *pgxpool.Pool, all []ratelimit.Limit, n int) error {
	for _, limit := range all {
		_, err := pool.Exec(ctx, `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts)
			SELECT $1, CASE WHEN used THEN i || ' in use' ELSE (random() * 1e9)::bigint || '-' || i END, 0, 1, 1e9 - 1,
			       now() - CASE WHEN used THEN interval '0' ELSE interval '3 hours' + i * interval '1 ms' END
			  FROM generate_series(0, $2::integer - 1) AS i, (VALUES (false), (true)) AS v (used)
			 WHERE NOT used OR i % 50 = 0
			ON CONFLICT DO NOTHING`, limit.Name(), n/len(all))
		if err != nil {
			return err
		}
	}
	_, err := pool.Exec(ctx, "ANALYZE ratelimit.limits")
	return err
}

// report prints the sizes of the table and its index.
func (e *env) report(ctx context.Context, pool *pgxpool.Pool, when string) error {
	var table, index float64
	if err := pool.QueryRow(ctx, "SELECT pg_table_size('ratelimit.limits'), pg_indexes_size('ratelimit.limits')").Scan(&table, &index); err != nil {
		return err
	}
	fmt.Fprintf(e.out, "  %s: table %.1f MB, index %.1f MB\n", when, table/1e6, index/1e6)
	return nil
}

// hourOfUpdates makes the updates of an hour at 100 per second, on 1,000 keys, as fast as possible. So autovacuum, with its defaults, has
// less time for them than in an hour.
func (e *env) hourOfUpdates(ctx context.Context) error {
	const n, goroutines = 1000, 16
	updates := int64(e.few(360_000))
	pool, err := e.newPool(ctx, goroutines, nil)
	if err != nil {
		return err
	}
	limit := plenty(goroutines).limit(1)
	if err := fill(ctx, pool, "ratelimit.limits", limit.Name(), n); err != nil {
		return err
	}
	if err := e.report(ctx, pool, thousands(n)+" rows"); err != nil {
		return err
	}
	pick := anyKey(n)
	begin := time.Now()
	var done atomic.Int64
	load := &side{name: "updates", goroutines: goroutines, call: func(ctx context.Context, worker int) error {
		if done.Add(1) > updates {
			time.Sleep(time.Millisecond)
			return nil
		}
		_, err := limits.Consume(ctx, pool, limit.Key(pick(worker)))
		return err
	}}
	for done.Load() < updates {
		if _, err := load.run(ctx, e.moment(time.Second)); err != nil {
			return err
		}
	}
	took := time.Since(begin)
	if err := e.report(ctx, pool, fmt.Sprintf("after %s updates in %s", thousands(float64(updates)), short(took))); err != nil {
		return err
	}
	// Postgres publishes the statistics a little later.
	for until := time.Now().Add(e.moment(20 * time.Second)); ; time.Sleep(200 * time.Millisecond) {
		var all, hot, dead, vacuums int64
		err := pool.QueryRow(ctx, `SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup, autovacuum_count FROM pg_stat_user_tables
			WHERE relid = 'ratelimit.limits'::regclass`).Scan(&all, &hot, &dead, &vacuums)
		if err != nil {
			return err
		}
		if all >= updates || time.Now().After(until) {
			fmt.Fprintf(e.out, "  of %s updates %.2f %% were heap-only; %s dead rows are left, autovacuum ran %d times\n",
				thousands(float64(all)), 100*float64(hot)/float64(all), thousands(float64(dead)), vacuums)
			return nil
		}
	}
}

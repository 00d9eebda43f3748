// Queue does with a plain table what examples/river does with River. One transaction reserves the tokens of a call and
// inserts the call into the table, with the instant at which it may run. Workers take due calls with SKIP LOCKED.
//
//	go run ./examples/queue
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/examples/internal/timeline"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	minute = 3 * time.Second // shortened, so that the example ends in seconds

	documents = 20
	parts     = 10 // calls per document
	tokens    = 600
	perMinute = 40000
	atOnce    = 6000
)

var (
	limits    *ratelimit.Limiter // of Open
	llmTokens = ratelimit.TokenBucket("llmTokens", perMinute, minute, ratelimit.Capacity(atOnce), ratelimit.MaxReserved(3*perMinute))
)

const schema = `
	CREATE TABLE jobs (
		id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		run_at  timestamptz NOT NULL,
		payload jsonb NOT NULL,
		receipt text NOT NULL, -- Reservation.Receipt: it refunds a job that is canceled, or costs less (examples/settle)
		state   text NOT NULL DEFAULT 'waiting',
		ran_at  timestamptz
	);
	CREATE INDEX ON jobs (run_at) WHERE state = 'waiting'`

// enqueue reserves the tokens for a document and enqueues its calls: all or nothing.
func enqueue(ctx context.Context, tx pgx.Tx, document int) error {
	for part := range parts {
		reserved, err := limits.Reserve(ctx, tx, llmTokens.Global().Count(tokens))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `
			INSERT INTO jobs (run_at, receipt, payload) VALUES ($1, $2, jsonb_build_array($3::int, $4::int))`,
			reserved.RetryAt, reserved.Receipt(), document, part)
		if err != nil {
			return err
		}
	}
	return nil
}

// runDue runs one due job, if there is one. The job's row stays locked meanwhile: no other worker sees it, and if this
// worker dies, it is free again. (Work of more than a few seconds should not keep a transaction open: see examples/settle.)
func runDue(ctx context.Context, pool *pgxpool.Pool, call func(tx pgx.Tx, id int64) error) (ran bool, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		err := tx.QueryRow(ctx, `
			SELECT id FROM jobs
			 WHERE state = 'waiting' AND run_at <= now()
			 ORDER BY run_at LIMIT 1
			   FOR UPDATE SKIP LOCKED`).Scan(&id)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := call(tx, id); err != nil {
			return err
		}
		ran = true
		_, err = tx.Exec(ctx, "UPDATE jobs SET state = 'done', ran_at = now() WHERE id = $1", id) // the instant that run_at was compared with
		return err
	})
	return ran && err == nil, err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "queue", Limits: []ratelimit.Limit{llmTokens}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	kill := func(tx pgx.Tx) error {
		_, err := pool.Exec(ctx, "SELECT pg_terminate_backend($1, 10000)", tx.Conn().PgConn().PID())
		return err
	}

	// A connection that is killed between reserve and commit loses the tokens and the jobs. The document is enqueued again.
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(enqueue(ctx, tx, 0), kill(tx))
	})
	if err == nil {
		return errors.New("a transaction was committed on a connection that was killed before")
	}
	if err := count(ctx, pool, "connection killed between reserve and commit", 0, 0); err != nil {
		return err
	}

	enqueuing, enqueueCtx := errgroup.WithContext(ctx)
	for document := range documents {
		enqueuing.Go(func() error {
			return limits.InTx(enqueueCtx, pool, func(ctx context.Context, tx pgx.Tx) error {
				return enqueue(ctx, tx, document)
			}, ratelimit.Hot(llmTokens.Global()))
		})
	}

	// Workers run the jobs meanwhile. One worker loses its connection during the 50th call.
	var calls, done atomic.Int64
	working, workCtx := errgroup.WithContext(ctx)
	for range 8 {
		working.Go(func() error {
			for done.Load() < documents*parts {
				killed := false
				ran, err := runDue(workCtx, pool, func(tx pgx.Tx, _ int64) error {
					if killed = calls.Add(1) == 50; killed {
						return kill(tx)
					}
					return nil // an application calls the language model here
				})
				switch {
				case ran:
					done.Add(1)
				case err != nil && !killed:
					return err
				case err == nil:
					time.Sleep(5 * time.Millisecond)
				}
			}
			return nil
		})
	}
	if err := errors.Join(enqueuing.Wait(), working.Wait()); err != nil {
		return err
	}
	if err := count(ctx, pool, "20 documents enqueued and run", documents*parts, documents*parts); err != nil {
		return err
	}
	fmt.Printf("calls: %d, one of them twice, since its worker was killed\n", calls.Load())
	if calls.Load() != documents*parts+1 {
		return fmt.Errorf("%d calls, want %d", calls.Load(), documents*parts+1)
	}
	return check(ctx, pool)
}

// count wants a number of jobs, and a number of finished ones. While there are no jobs, the limit must have no row.
func count(ctx context.Context, pool *pgxpool.Pool, what string, wantJobs, wantDone int) error {
	var jobs, done, rows int
	err := pool.QueryRow(ctx, `
		SELECT count(*), count(*) FILTER (WHERE state = 'done'), (SELECT count(*) FROM ratelimit.limits)
		  FROM jobs`).Scan(&jobs, &done, &rows)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %d jobs, %d of them done\n", what, jobs, done)
	if jobs != wantJobs || done != wantDone || rows != min(jobs, 1) {
		return fmt.Errorf("%d jobs, %d done, %d rows of limits, want %d, %d and %d", jobs, done, rows, wantJobs, wantDone, min(wantJobs, 1))
	}
	return nil
}

// check compares the instants of all jobs with the limit.
func check(ctx context.Context, pool *pgxpool.Pool) error {
	var early int
	var late time.Duration
	err := pool.QueryRow(ctx, "SELECT count(*) FILTER (WHERE ran_at < run_at), max(ran_at - run_at) FROM jobs").Scan(&early, &late)
	if err != nil {
		return err
	}
	due, err := timeline.Read(ctx, pool, fmt.Sprintf("SELECT run_at, %d::float8 FROM jobs", tokens))
	if err != nil {
		return err
	}
	ran, err := timeline.Read(ctx, pool, fmt.Sprintf("SELECT ran_at, %d::float8 FROM jobs", tokens))
	if err != nil {
		return err
	}
	const rate = perMinute / (float64(minute) / float64(time.Second)) // per second
	dueBurst, ranBurst := timeline.Burst(due, perMinute, minute), timeline.Burst(ran, perMinute, minute)
	fmt.Fprintf(os.Stderr, "up to %v late; when they ran, over no span of time more than the rate and %.0f tokens\n", late, ranBurst)
	fmt.Printf("%d of them ran before its instant; when they might, over no span of time more than the rate and %.0f tokens, of %d allowed\n",
		early, dueBurst, atOnce)
	if early != 0 || dueBurst > atOnce+rate*1e-6 || ranBurst > atOnce+rate*(late.Seconds()+1e-6) {
		return fmt.Errorf("%d early; the rate and %v tokens were due, %v ran over some span, up to %v late", early, dueBurst, ranBurst, late)
	}
	return nil
}

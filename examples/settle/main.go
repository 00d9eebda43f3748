// Settle reserves the estimated cost of a job, and corrects it when the cost is known. The correction is in the transaction
// that marks the job as done. So it happens exactly once, however often the result is delivered and whatever crashes in
// between.
//
//	go run ./examples/settle
package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits *ratelimit.Limiter // of Open

	// What each team may spend per day, in tokens of a language model. (The day begins now, so that it does not end during
	// the example.)
	dailyTokens = ratelimit.FixedWindow("dailyTokens", 1_000_000, 24*time.Hour, ratelimit.Start(time.Now().Add(-time.Minute).Truncate(time.Second)))
)

const schema = `
	CREATE TABLE jobs (
		id       bigint PRIMARY KEY,
		team     text NOT NULL,
		estimate float8 NOT NULL,
		receipt  text NOT NULL, -- Reservation.Receipt: a refund needs it
		run_at   timestamptz NOT NULL,
		state    text NOT NULL DEFAULT 'waiting', -- then running, then done
		cost     float8
	)`

// enqueue reserves the estimate and inserts the job's row.
func enqueue(ctx context.Context, pool *pgxpool.Pool, id int, team string, estimate float64) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		reserved, err := limits.Reserve(ctx, tx, dailyTokens.Key(team).Count(estimate))
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO jobs (id, team, estimate, receipt, run_at) VALUES ($1, $2, $3, $4, $5)",
			id, team, estimate, reserved.Receipt(), reserved.RetryAt)
		return err
	})
}

// take gives a due job to a worker. It commits before the work begins, which may take long. (If the worker dies, the job
// stays running. The application must set it to waiting again, after more time than any job takes. It is still settled
// once.)
func take(ctx context.Context, pool *pgxpool.Pool) (id int, err error) {
	err = pool.QueryRow(ctx, `
		UPDATE jobs SET state = 'running'
		 WHERE id = (SELECT id FROM jobs WHERE state = 'waiting' AND run_at <= now() ORDER BY run_at LIMIT 1 FOR UPDATE SKIP LOCKED)
		RETURNING id`).Scan(&id)
	return id, err
}

// settle marks the job as done and corrects its estimate. Only the first settlement that commits finds the job running.
func settle(ctx context.Context, tx pgx.Tx, id int, cost float64) (first bool, err error) {
	var team string
	var estimate float64
	var receipt ratelimit.Receipt
	err = tx.QueryRow(ctx, `
		UPDATE jobs SET state = 'done', cost = $2
		 WHERE id = $1 AND state = 'running'
		RETURNING team, estimate, receipt`, id, cost).Scan(&team, &estimate, &receipt)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil // it is settled
	case err != nil:
		return false, err
	case cost > estimate: // the cost is booked even if it exceeds the limit
		_, err = limits.Charge(ctx, tx, dailyTokens.Key(team).Count(cost-estimate))
	case cost < estimate: // gives nothing back if the job's day is over: the new day has all its tokens
		var refunded ratelimit.Result
		if refunded, err = limits.Refund(ctx, tx, receipt, dailyTokens.Key(team).Count(estimate-cost)); err != nil {
			return false, err
		}
		_, err = tx.Exec(ctx, "UPDATE jobs SET receipt = $2 WHERE id = $1", id, refunded.Receipt()) // for what is left
	}
	return true, err
}

func main() { demo.Main(story) }

const (
	jobs     = 40
	estimate = 1500
)

// costOf returns the cost that the model reports: above or below the estimate, and once equal to it.
func costOf(id int) float64 { return float64(600 + id*100%1300) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "settle", Limits: []ratelimit.Limit{dailyTokens}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	enqueuing, enqueueCtx := errgroup.WithContext(ctx)
	enqueuing.SetLimit(8)
	for id := range jobs {
		enqueuing.Go(func() error { return enqueue(enqueueCtx, pool, id, "blue", estimate) })
	}
	if err := enqueuing.Wait(); err != nil {
		return err
	}
	if err := balance(ctx, pool, "reserved", jobs*estimate); err != nil {
		return err
	}

	// Each job runs, and its result is delivered three times at once. One settlement in five loses its connection before
	// its commit, and is retried.
	var deliveries, kills, settled atomic.Int64
	deliver := func(ctx context.Context, id int, cost float64) error {
		for kill := deliveries.Add(1)%5 == 0; ; kill = false {
			var first bool
			err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
				if first, err = settle(ctx, tx, id, cost); err != nil || !kill {
					return err
				}
				_, err = pool.Exec(ctx, "SELECT pg_terminate_backend($1, 10000)", tx.Conn().PgConn().PID())
				return err
			})
			if kill && err != nil {
				kills.Add(1)
				continue
			}
			if err == nil && first {
				settled.Add(1)
			}
			return err
		}
	}
	working, workCtx := errgroup.WithContext(ctx)
	for range 4 {
		working.Go(func() error {
			for {
				id, err := take(workCtx, pool)
				if errors.Is(err, pgx.ErrNoRows) {
					return nil
				}
				if err != nil {
					return err
				}
				cost := costOf(id) // an application calls the language model here
				delivering, deliverCtx := errgroup.WithContext(workCtx)
				for range 3 {
					delivering.Go(func() error { return deliver(deliverCtx, id, cost) })
				}
				if err := delivering.Wait(); err != nil {
					return err
				}
			}
		})
	}
	if err := working.Wait(); err != nil {
		return err
	}
	fmt.Printf("%d results delivered, %d connections killed before the commit: %d jobs settled\n", deliveries.Load(), kills.Load(), settled.Load())
	if settled.Load() != jobs {
		return fmt.Errorf("%d jobs were settled, want %d", settled.Load(), jobs)
	}

	var done int
	var estimated, spent float64
	err = pool.QueryRow(ctx, "SELECT count(*), sum(estimate), sum(cost) FROM jobs WHERE state = 'done'").Scan(&done, &estimated, &spent)
	if err != nil {
		return err
	}
	fmt.Printf("%d jobs done: %.0f tokens estimated, %.0f spent\n", done, estimated, spent)
	if done != jobs || spent == estimated {
		return fmt.Errorf("%d jobs are done, want %d; %v tokens spent of %v estimated", done, jobs, spent, estimated)
	}
	return balance(ctx, pool, "settled", spent)
}

// balance wants exactly this number of tokens to have been taken.
func balance(ctx context.Context, pool *pgxpool.Pool, what string, taken float64) error {
	balances, err := limits.Balance(ctx, pool, dailyTokens.Key("blue"))
	if err != nil {
		return err
	}
	left := balances[0].Remaining
	fmt.Printf("%s: the team has %.0f of %.0f tokens left\n", what, left, dailyTokens.Capacity())
	if left != dailyTokens.Capacity()-taken {
		return fmt.Errorf("%v tokens are left, want %v", left, dailyTokens.Capacity()-taken)
	}
	return nil
}

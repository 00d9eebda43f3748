// Leaky-bucket sends webhooks to a receiver that takes two per second and no burst. Webhooks wait in a queue of limited
// length, and are sent at even intervals.
//
//	go run ./examples/leaky-bucket
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	interval = 500 * time.Millisecond
	queue    = 8
)

var (
	limits *ratelimit.Limiter // of Open

	// With a capacity of 0, nothing is saved up: every webhook must reserve, and waits for its token. MaxReserved is the
	// length of the queue.
	webhooks = ratelimit.TokenBucket("webhooks", 1, interval, ratelimit.Capacity(0), ratelimit.MaxReserved(queue))
)

// send waits for its turn in the queue, and then sends. The queue is the limit's row, so all processes share it.
func send(ctx context.Context, pool *pgxpool.Pool, receiver string) error {
	turn, err := limits.Reserve(ctx, pool, webhooks.Key(receiver))
	if err != nil {
		return err // the queue is full
	}
	if turn.Delay > queue*interval {
		return fmt.Errorf("a wait of %v, want a queue of %d", turn.Delay, queue)
	}
	select {
	case <-time.After(turn.Delay):
	case <-ctx.Done():
		return ctx.Err() // a refund is possible, but later webhooks keep their instants
	}
	_, err = pool.Exec(ctx, "INSERT INTO sent (turn, at) VALUES ($1, clock_timestamp())", turn.RetryAt) // an application sends here
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "leaky-bucket", Limits: []ratelimit.Limit{webhooks}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	if _, err := pool.Exec(ctx, "CREATE TABLE sent (turn timestamptz, at timestamptz)"); err != nil {
		return err
	}

	// All at once. A webhook that finds no place in the queue gets the time when there will be one.
	const senders = 20
	errs := make([]error, senders)
	var wg sync.WaitGroup
	for i := range senders {
		wg.Go(func() { errs[i] = send(ctx, pool, "https://example.com/hook") })
	}
	wg.Wait()
	sent, denied := 0, 0
	for _, err := range errs {
		var full *ratelimit.DeniedError
		switch {
		case errors.As(err, &full):
			denied++
			if full.RetryAfter > interval {
				return fmt.Errorf("%w, want a place within %v", full, interval)
			}
		case err != nil:
			return err
		default:
			sent++
		}
	}
	fmt.Printf("%d webhooks at once: %d find a place in the queue, the others get the time of the next free place\n", senders, queue)
	fmt.Fprintf(os.Stderr, "%d sent, %d denied\n", sent, denied)
	if sent < queue { // more are sent if they did not all ask within an interval
		return fmt.Errorf("%d sent, want %d", sent, queue)
	}

	rows, err := pool.Query(ctx, "SELECT turn - min(turn) OVER (), at - turn FROM sent ORDER BY turn")
	if err != nil {
		return err
	}
	var turn, late time.Duration
	n := 0
	_, err = pgx.ForEachRow(rows, []any{&turn, &late}, func() error {
		turn = turn.Round(time.Millisecond) // it is rounded up to the microsecond
		if n < queue {
			fmt.Printf("   %v after the first\n", turn)
		}
		fmt.Fprintf(os.Stderr, "   %v late\n", late)
		if want := time.Duration(n) * interval; turn != want || late < 0 {
			return fmt.Errorf("turn %d is %v after the first, and was sent %v after it, want %v and later", n, turn, late, want)
		}
		n++
		return nil
	})
	return err
}

// Sign-ups lets 100 people sign up per day for the whole site, however many come at once. All transactions want the same
// row. With Hot they take turns instead of conflicting, and no transaction is retried.
//
//	go run ./examples/sign-ups
package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits *ratelimit.Limiter // of Open

	// Days begin an hour ago, so that none ends during the example.
	signUps = ratelimit.FixedWindow("signUps", 100, 24*time.Hour, ratelimit.Start(time.Now().Add(-time.Hour).Truncate(time.Second)))

	transactions atomic.Int64 // for the output
)

func signUp(ctx context.Context, pool *pgxpool.Pool, email string) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error { // SERIALIZABLE
		transactions.Add(1)
		if _, err := limits.Consume(ctx, tx, signUps.Global()); err != nil { // first, so that it is sent with BEGIN
			return err
		}
		_, err := tx.Exec(ctx, "INSERT INTO users (email) VALUES ($1)", email)
		return err // this returns the token
	}, ratelimit.Hot(signUps.Global()))
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "sign-ups", Limits: []ratelimit.Limit{signUps}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	if _, err := pool.Exec(ctx, "CREATE TABLE users (email text PRIMARY KEY)"); err != nil {
		return err
	}

	const people = 250
	errs := make([]error, people)
	var wg sync.WaitGroup
	for i := range people {
		wg.Go(func() { errs[i] = signUp(ctx, pool, fmt.Sprintf("user%d@example.com", i)) })
	}
	wg.Wait()

	in, denied := 0, 0
	for _, err := range errs {
		if err == nil {
			in++
		} else if denial, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
			denied++
			if wait := denial.RetryAfter.Round(time.Hour); wait != 23*time.Hour {
				return fmt.Errorf("told to wait for %v, want 23h", wait)
			}
		} else {
			return err
		}
	}
	var users int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM users").Scan(&users); err != nil {
		return err
	}
	fmt.Printf("%d people at once: %d are in, %d were denied, and may retry in 23h\n", people, in, denied)
	fmt.Printf("%d transactions ran, so %d were retries; there are %d users\n", transactions.Load(), transactions.Load()-people, users)
	if in != 100 || denied != 150 || users != 100 || transactions.Load() != people {
		return errors.New("want 100 in, 150 denied, 100 users, and one transaction for each")
	}
	return nil
}

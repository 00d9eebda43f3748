// Quickstart runs five short stories about rate limits in a Postgres, and checks the result of each.
//
//	go run ./examples/quickstart
//	go run ./examples/quickstart -console    # and then shows the page for operators
//
// Each story is a function below, to copy from. The program takes about ten seconds, mostly waiting for tokens. It exits
// with 0 only if every story ended as expected.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// An application has one Limiter and a variable for each of its limits.
var (
	limits *ratelimit.Limiter // of Open

	// 10 new accounts per hour for the whole site.
	signUps = ratelimit.TokenBucket("signUps", 10, time.Hour)

	// Each user may send 5 messages in a burst, and 20 per minute in the long run: one every 3 seconds.
	sendMessage = ratelimit.TokenBucket("sendMessage", 20, time.Minute, ratelimit.Capacity(5))

	// A user may have 3 exports per day.
	exports = ratelimit.TokenBucket("exports", 3, 24*time.Hour)

	// A user may have one password reset mail per hour. The mail provider accepts 1,000 mails per day, and its days begin
	// at midnight UTC.
	passwordResets = ratelimit.TokenBucket("passwordResets", 1, time.Hour)
	mailQuota      = ratelimit.FixedWindow("mailQuota", 1000, 24*time.Hour,
		ratelimit.Start(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))

	// Each team may use 60,000 tokens of a language model per minute, 2,000 at once, and queue for the tokens of two
	// minutes.
	llmTokens = ratelimit.TokenBucket("llmTokens", 60_000, time.Minute,
		ratelimit.Capacity(2000), ratelimit.MaxReserved(120_000))
)

func main() {
	page := flag.Bool("console", false, "then serve the page for operators, until Ctrl-C")
	flag.Parse()
	if *page {
		demo.Serve(func(ctx context.Context, pool *pgxpool.Pool) error { return serve(ctx, pool, os.Stdout) })
		return
	}
	demo.Main(func(ctx context.Context, pool *pgxpool.Pool) error {
		if err := start(ctx, pool); err != nil {
			return err
		}
		defer demo.Close(ctx, limits)
		return run(ctx, pool, os.Stdout)
	})
	fmt.Println("To see these limits on a page, and change them: go run ./examples/quickstart -console")
}

// start is what a program does so that operators can see its limits and change them: docs/start-and-stop.md.
func start(ctx context.Context, pool *pgxpool.Pool) (err error) {
	limits, err = ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "quickstart",
		Limits:  []ratelimit.Limit{signUps, sendMessage, exports, passwordResets, mailQuota, llmTokens},
		Usage:   &usage.Recorder{DB: pool, Every: time.Second}, // so that the page shows them soon
	})
	return err
}

func run(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	_, err := pool.Exec(ctx, `
		CREATE TABLE users (
			id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			email text NOT NULL
		);
		CREATE TABLE messages (
			id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			sender  text NOT NULL,
			body    text NOT NULL,
			sent_at timestamptz NOT NULL DEFAULT clock_timestamp()
		);
		CREATE TABLE jobs (
			id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			prompt     text NOT NULL,
			run_at     timestamptz NOT NULL,
			started_at timestamptz
		)`)
	if err != nil {
		return err
	}
	for i, act := range []struct {
		title string
		play  func(context.Context, *pgxpool.Pool, io.Writer) error
	}{
		{"32 people sign up at once, 10 per hour are let in", manySignUps},
		{"Ann sends messages until she is denied, and waits", burstThenWait},
		{"A rollback returns the tokens", rollbackReturnsTokens},
		{"Two limits in one call, all or nothing", twoLimits},
		{"Language model tokens are reserved, the work is scheduled in the same commit", reserveAndSchedule},
	} {
		fmt.Fprintf(out, "\n%d. %s\n", i+1, act.title)
		if err := act.play(ctx, pool, out); err != nil {
			return fmt.Errorf("act %d: %w", i+1, err)
		}
	}

	fmt.Fprintln(out, "\nAll rows of the limits, select * from ratelimit.limits:")
	if err := demo.PrintTable(ctx, pool, out, "SELECT * FROM ratelimit.limits ORDER BY name, key, shard"); err != nil {
		return err
	}
	fmt.Fprintln(out, "\nEvery story ended as expected.")
	return nil
}

// signUp makes an account, if the limit allows one more.
func signUp(ctx context.Context, pool *pgxpool.Pool, email string) error {
	// SERIALIZABLE, and retried after a serialization failure.
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO users (email) VALUES ($1)", email); err != nil {
			return err
		}
		// Last, since the limit's row is locked from here to the end of the transaction. A denial is an error, and an error
		// rolls back the INSERT.
		_, err := limits.Consume(ctx, tx, signUps.Global())
		return err
	})
}

// The limit and the business row commit together: however many sign up at once, there are as many users as the limit
// allows.
func manySignUps(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	const people = 32
	errs := make([]error, people)
	var wg sync.WaitGroup
	for i := range people {
		wg.Go(func() { errs[i] = signUp(ctx, pool, fmt.Sprintf("user%d@example.com", i)) })
	}
	wg.Wait()

	committed := 0
	var denial *ratelimit.DeniedError
	for _, err := range errs {
		if err == nil {
			committed++
		} else if denied, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
			denial = denied
		} else {
			return err
		}
	}
	var users int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM users").Scan(&users); err != nil {
		return err
	}
	fmt.Fprintf(out, "   %d transactions, SERIALIZABLE: %d committed, %d denied; %d users in the table\n",
		people, committed, people-committed, users)
	if committed != 10 || users != 10 {
		return fmt.Errorf("%d transactions committed and there are %d users, want 10", committed, users)
	}
	fmt.Fprintf(out, "   one of the denials: %v\n", denial)
	return nil
}

// send stores a message, if its sender's limit allows one more. It returns the time, by the database's clock.
func send(ctx context.Context, pool *pgxpool.Pool, sender, text string) (sentAt time.Time, err error) {
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := limits.Consume(ctx, tx, sendMessage.Key(sender)); err != nil {
			return err
		}
		return tx.QueryRow(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2) RETURNING sent_at", sender, text).Scan(&sentAt)
	}, ratelimit.Isolation(pgx.ReadCommitted)) // limits are exact at every level
	return sentAt, err
}

// A denial says when the same call will be granted.
func burstThenWait(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	sent := 0
	var err error
	for err == nil {
		if _, err = send(ctx, pool, "ann", "hello"); err == nil {
			sent++
		}
	}
	denial, denied := errors.AsType[*ratelimit.DeniedError](err)
	if !denied {
		return err
	}
	retryAt := denial.RetryAt
	fmt.Fprintf(out, "   %d messages sent, then: %v\n", sent, denial)
	fmt.Fprintf(out, "   RetryAt %s, RetryAfter %v\n", clock(retryAt), denial.RetryAfter)
	if sent < 5 {
		return fmt.Errorf("a burst of %d messages, want 5", sent)
	}

	for {
		// The database measured RetryAfter, so this machine's clock does not matter.
		if err := wait(ctx, denial.RetryAfter); err != nil {
			return err
		}
		sentAt, err := send(ctx, pool, "ann", "hello again")
		if denial, denied = errors.AsType[*ratelimit.DeniedError](err); denied {
			continue // another caller was faster
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "   waited, and sent the next one at %s\n", clock(sentAt))
		if sentAt.Before(retryAt) {
			return fmt.Errorf("sent at %v, want no earlier than %v", sentAt, retryAt)
		}
		return nil
	}
}

// If a transaction does not commit, its tokens come back: work that was not done costs nothing.
func rollbackReturnsTokens(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	if _, err := limits.Consume(ctx, pool, exports.Key("bob")); err != nil { // on the pool: its own transaction
		return err
	}
	before, err := balance(ctx, pool, exports.Key("bob"))
	if err != nil {
		return err
	}

	errDiskFull := errors.New("disk full")
	var during float64
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		result, err := limits.Consume(ctx, tx, exports.Key("bob").Count(2))
		if err != nil {
			return err
		}
		during = result.Remaining
		return errDiskFull
	})
	if !errors.Is(err, errDiskFull) {
		return errors.Join(errors.New("the transaction did not end as its function did"), err)
	}

	after, err := balance(ctx, pool, exports.Key("bob"))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "   Bob has %.2f exports left; %.2f in a transaction that takes 2; after its rollback %.2f\n", before, during, after)
	if during >= before-1 || after < before {
		return fmt.Errorf("%v exports left before, %v in the transaction, %v after its rollback", before, during, after)
	}
	return nil
}

// balance returns what a key has left. It writes nothing.
func balance(ctx context.Context, db ratelimit.DB, request ratelimit.Request) (float64, error) {
	balances, err := limits.Balance(ctx, db, request)
	if err != nil {
		return 0, err
	}
	return balances[0].Remaining, nil
}

// If one of the limits denies, the others lose nothing.
func twoLimits(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	sendResetMail := func(user string) error {
		_, err := limits.Consume(ctx, pool, passwordResets.Key(user), mailQuota.Global())
		return err
	}
	quotaRow := func() (value float64, err error) {
		err = pool.QueryRow(ctx, "SELECT value FROM ratelimit.limits WHERE name = $1", mailQuota.Name()).Scan(&value)
		return value, err
	}

	if err := sendResetMail("ann"); err != nil {
		return err
	}
	before, err := quotaRow()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "   Ann's first mail: granted, %v left in the mail quota\n", before)

	err = sendResetMail("ann")
	denial, denied := errors.AsType[*ratelimit.DeniedError](err)
	if !denied {
		return errors.Join(errors.New("the second mail was not denied"), err)
	}
	after, err := quotaRow()
	if err != nil {
		return err
	}
	for _, status := range denial.Requests {
		if !status.OK {
			fmt.Fprintf(out, "   her second one:   denied by %s, %v left in the mail quota\n", status.Limit.Name(), after)
		}
	}
	if before != 999 || after != before {
		return fmt.Errorf("the mail quota went from %v to %v, want 999 both times", before, after)
	}
	return nil
}

// Reserve takes tokens that are not there yet, and says when they will be. The job is committed with them, and due at that
// time.
func reserveAndSchedule(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	for _, prompt := range []string{"summarize", "translate", "explain"} {
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			reserved, err := limits.Reserve(ctx, tx, llmTokens.Key("team 7").Count(2000))
			if err != nil {
				return err // the tokens of two minutes are already reserved
			}
			_, err = tx.Exec(ctx, "INSERT INTO jobs (prompt, run_at) VALUES ($1, $2)", prompt, reserved.RetryAt)
			return err
		})
		if err != nil {
			return err
		}
	}
	for {
		ran, next, err := runDueJob(ctx, pool)
		if err != nil {
			return err
		}
		if !ran && next == 0 {
			break
		}
		if err := wait(ctx, next); err != nil {
			return err
		}
	}
	if err := demo.PrintTable(ctx, pool, out, "SELECT *, started_at - run_at AS late FROM jobs ORDER BY run_at"); err != nil {
		return err
	}

	var ran, early int
	err := pool.QueryRow(ctx, "SELECT count(started_at), count(*) FILTER (WHERE started_at < run_at) FROM jobs").Scan(&ran, &early)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "   %d jobs ran, %d of them too early\n", ran, early)
	if ran != 3 || early != 0 {
		return fmt.Errorf("%d jobs ran, %d of them too early, want 3 and none", ran, early)
	}
	return nil
}

// runDueJob runs one job that is due by the database's clock. If none is due, it returns the time until the next one, or 0.
func runDueJob(ctx context.Context, pool *pgxpool.Pool) (ran bool, next time.Duration, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id int64
		err := tx.QueryRow(ctx, `
			SELECT id, greatest(run_at - clock_timestamp(), '0')
			  FROM jobs
			 WHERE started_at IS NULL
			 ORDER BY run_at LIMIT 1
			   FOR UPDATE SKIP LOCKED`).Scan(&id, &next)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil || next > 0 {
			return err
		}
		ran = true
		// An application calls the language model here.
		_, err = tx.Exec(ctx, "UPDATE jobs SET started_at = clock_timestamp() WHERE id = $1", id)
		return err
	})
	return ran, next, err
}

// wait waits for d, or until ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func clock(t time.Time) string { return t.Format("15:04:05.000000 MST") }

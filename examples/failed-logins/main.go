// Failed-logins allows five guesses of a user's password, and one more every three minutes. It counts a guess before it
// looks at the password, so concurrent guesses count, too. It counts on the pool, so the count stays when a failed login
// rolls back. A successful login makes the limit full again.
//
// Who uses up the five guesses is locked out: for 15 minutes at first, and four times as long each time within a day. A
// lockout is a block, which no refund and no reset undoes. An operator can end it.
//
//	go run ./examples/failed-logins
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/crypto/bcrypt"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits       *ratelimit.Limiter // of Open
	failedLogins = ratelimit.TokenBucket("failedLogins", 5, 15*time.Minute)

	passwordsChecked atomic.Int64 // for the output
)

const ann = "auth0|ann" // an id as a login provider gives it: Go and SQL write the key alike

func login(ctx context.Context, pool *pgxpool.Pool, user, password string) error {
	// Before the transaction begins: inside, this call would need a second connection.
	guess, err := limits.Consume(ctx, pool, failedLogins.Key(user))
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO sessions (user_name) VALUES ($1)", user); err != nil {
			return err
		}
		var hash []byte
		if err := tx.QueryRow(ctx, "SELECT hash FROM users WHERE name = $1", user).Scan(&hash); err != nil {
			return err
		}
		passwordsChecked.Add(1)
		if err := bcrypt.CompareHashAndPassword(hash, []byte(password)); err != nil {
			return err // rolls back the session, but not the count
		}
		return limits.Reset(ctx, tx, failedLogins.Key(user)) // removes the past guesses: commits with the session
	})
	if err != nil && guess.Remaining < 1 { // the last guess, which only one of concurrent calls has
		return errors.Join(err, lockOut(ctx, pool, user))
	}
	return err
}

// lockOut blocks a user, each time for longer.
func lockOut(ctx context.Context, pool *pgxpool.Pool, user string) error {
	_, err := pool.Exec(ctx, `
		SELECT ratelimit_block('failedLogins', $1, until => now() + interval '15 minutes' * 4 ^ least(count(*), 5), reason => 'wrong passwords')
		  FROM rate_limit_overrides
		 WHERE name = 'failedLogins' AND key = $1 AND effect = 'block' AND made_at > now() - interval '1 day'`, user)
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "failed-logins", Limits: []ratelimit.Limit{failedLogins}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	const tables = "CREATE TABLE users (name text, hash bytea); CREATE TABLE sessions (user_name text)"
	if _, err := pool.Exec(ctx, tables); err != nil {
		return err
	}
	for _, user := range []string{ann, "bob"} {
		hash, err := bcrypt.GenerateFromPassword([]byte(user+"'s password"), bcrypt.DefaultCost)
		if err != nil {
			return err
		}
		if _, err := pool.Exec(ctx, "INSERT INTO users VALUES ($1, $2)", user, hash); err != nil {
			return err
		}
	}

	if err := login(ctx, pool, "bob", "bobby"); !errors.Is(err, bcrypt.ErrMismatchedHashAndPassword) {
		return fmt.Errorf("bob's wrong password: %w", err)
	}
	if err := expect(ctx, pool, "bob mistypes his password", "bob", 0, 4); err != nil {
		return err
	}
	if err := login(ctx, pool, "bob", "bob's password"); err != nil {
		return err
	}
	if err := expect(ctx, pool, "bob logs in", "bob", 1, 5); err != nil {
		return err
	}

	for _, lockout := range []time.Duration{15 * time.Minute, time.Hour, 4 * time.Hour} {
		if err := guessAtOnce(ctx, pool, lockout); err != nil {
			return err
		}
		// An operator who knows that it is ann ends the lockout.
		if _, err := pool.Exec(ctx, "SELECT ratelimit_unblock('failedLogins', $1)", ann); err != nil {
			return err
		}
		if err := limits.Overrides.Load(ctx); err != nil {
			return err
		}
		if err := login(ctx, pool, ann, ann+"'s password"); err != nil {
			return err
		}
		fmt.Println("an operator ends the lockout, and ann logs in")
	}
	return nil
}

// guessAtOnce has somebody guess ann's password, who then is locked out.
func guessAtOnce(ctx context.Context, pool *pgxpool.Pool, lockout time.Duration) error {
	passwordsChecked.Store(0)
	var denials atomic.Int64
	var wg sync.WaitGroup
	for guess := range 50 {
		wg.Go(func() {
			if errors.Is(login(ctx, pool, ann, fmt.Sprint(guess)), ratelimit.ErrDenied) {
				denials.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Printf("50 guesses of ann's at once: %d were compared with the password, %d were denied\n", passwordsChecked.Load(), denials.Load())
	if passwordsChecked.Load() != 5 || denials.Load() != 45 {
		return errors.New("want 5 and 45")
	}
	if err := limits.Reset(ctx, pool, failedLogins.Key(ann)); err != nil { // does not end a lockout
		return err
	}
	if err := limits.Overrides.Load(ctx); err != nil { // otherwise it is followed within a second
		return err
	}
	denial, denied := errors.AsType[*ratelimit.DeniedError](login(ctx, pool, ann, ann+"'s password"))
	if !denied {
		return errors.New("ann was not denied")
	}
	fmt.Printf("ann is locked out, whether right or wrong, for %v\n", denial.RetryAfter.Round(time.Minute))
	if denial.RetryAfter.Round(time.Minute) != lockout {
		return fmt.Errorf("want %v", lockout)
	}
	return nil
}

// expect prints the balance and the number of sessions in the database, and checks them.
func expect(ctx context.Context, pool *pgxpool.Pool, what, user string, wantSessions int, wantGuesses float64) error {
	var sessions int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM sessions WHERE user_name = $1", user).Scan(&sessions); err != nil {
		return err
	}
	balances, err := limits.Balance(ctx, pool, failedLogins.Key(user))
	if err != nil {
		return err
	}
	guesses := math.Floor(balances[0].Remaining)
	fmt.Printf("%-28s %d sessions, %v guesses left\n", what+":", sessions, guesses)
	if sessions != wantSessions || guesses != wantGuesses {
		return fmt.Errorf("want %d sessions and %v guesses", wantSessions, wantGuesses)
	}
	return nil
}

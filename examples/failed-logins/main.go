// Failed-logins bounds the guesses of passwords three ways at once: at an account from one address, at an account from
// everywhere, and from one address at all accounts. The first bound is the strict one. So guesses from one address do not lock
// the account for its owner.
//
// A login takes a token of each limit before it looks at the password, so concurrent guesses count, too. It takes them on the
// pool, so they stay taken when a failed login rolls back. A successful login gives its own tokens back. It gives back no others:
// or else a login to an account of one's own would make up for guesses at others. An address that tries one password at all accounts is
// blocked for a day.
//
// A login cannot be told from a guess before the password is known. So Capacity is the number of logins that can run at once,
// and of guesses.
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
	limits *ratelimit.Limiter // of Open

	failedLogins    = ratelimit.TokenBucket("failedLogins", 5, 15*time.Minute, ratelimit.Capacity(20)) // of an account and an address
	failedByAccount = ratelimit.TokenBucket("failedByAccount", 100, 24*time.Hour)
	failedByAddress = ratelimit.TokenBucket("failedByAddress", 100, time.Hour)

	passwordsChecked atomic.Int64 // for the output
)

// guess returns what a try of a password takes. account is the user's id, or the name as the application compares it. address is
// that of httplimit.ClientIP.
func guess(account, address string) []ratelimit.Request {
	return []ratelimit.Request{failedLogins.Key(account, address), failedByAccount.Key(account), failedByAddress.Key(address)}
}

func login(ctx context.Context, pool *pgxpool.Pool, account, address, password string) error {
	// Before the transaction begins: inside, this call would need a second connection.
	taken, err := limits.Consume(ctx, pool, guess(account, address)...)
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO sessions (user_name) VALUES ($1)", account); err != nil {
			return err
		}
		var hash []byte
		if err := tx.QueryRow(ctx, "SELECT hash FROM users WHERE name = $1", account).Scan(&hash); err != nil {
			return err
		}
		passwordsChecked.Add(1)
		if err := bcrypt.CompareHashAndPassword(hash, []byte(password)); err != nil {
			return err // rolls back the session, but not the count
		}
		_, err := limits.Refund(ctx, tx, taken.Receipt()) // last, since it locks the keys: commits with the session
		return err
	})
}

func main() { demo.Main(story) }

const (
	ann, bob       = "auth0|ann", "auth0|bob" // ids as a login provider gives them: Go and SQL write the keys alike
	home, attacker = "192.0.2.7", "203.0.113.9"
)

func story(ctx context.Context, pool *pgxpool.Pool) error {
	// The clock stands still, so that the numbers are always the same. An application has no Clock: it uses the database's.
	noon := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "failed-logins", Limits: []ratelimit.Limit{failedLogins, failedByAccount, failedByAddress},
		Clock: func() time.Time { return noon },
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost) // an application takes a higher cost
	if err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, "CREATE TABLE users (name text PRIMARY KEY, hash bytea); CREATE TABLE sessions (user_name text)"); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, "INSERT INTO users SELECT unnest($1 || ARRAY(SELECT 'user-' || n FROM generate_series(0, 199) AS n)), $2", []string{ann, bob}, hash); err != nil {
		return err
	}

	always := func(text string) func(int) string { return func(int) string { return text } }
	for _, crowd := range []struct {
		who              string
		logins           int
		account, address func(i int) string
		password         string
		in, wrong        int64 // the rest is denied
	}{
		{"20 programs of bob's log in at once", 20, always(bob), always(home), "secret", 20, 0},
		{"bob mistypes his password", 1, always(bob), always(home), "secert", 0, 1},
		{"bob logs in", 1, always(bob), always(home), "secret", 1, 0},
		{"somebody guesses ann's, at once", 50, always(ann), always(attacker), "guess", 0, 20},
		{"then knows it", 1, always(ann), always(attacker), "secret", 0, 0},
		{"ann, at home", 1, always(ann), always(home), "secret", 1, 0},
		{"200 addresses guess ann's", 200, always(ann), func(i int) string { return fmt.Sprint("198.51.100.", i) }, "guess", 0, 80},
		{"one address tries a password at 200 accounts", 200, func(i int) string { return fmt.Sprint("user-", i) }, always("203.0.113.10"), "123456", 0, 100},
	} {
		passwordsChecked.Store(0)
		var in, denied atomic.Int64
		var wg sync.WaitGroup
		for i := range crowd.logins {
			wg.Go(func() {
				switch err := login(ctx, pool, crowd.account(i), crowd.address(i), crowd.password); {
				case err == nil:
					in.Add(1)
				case errors.Is(err, ratelimit.ErrDenied):
					denied.Add(1)
				case !errors.Is(err, bcrypt.ErrMismatchedHashAndPassword):
					fmt.Println(err)
				}
			})
		}
		wg.Wait()
		wrong := passwordsChecked.Load() - in.Load()
		fmt.Printf("%-45s %3d in, %3d wrong, %3d denied\n", crowd.who+":", in.Load(), wrong, denied.Load())
		if in.Load() != crowd.in || wrong != crowd.wrong || in.Load()+wrong+denied.Load() != int64(crowd.logins) {
			return fmt.Errorf("want %d in, %d wrong", crowd.in, crowd.wrong)
		}
	}
	if err := left(ctx, pool, bob, home, 19, 99, 99); err != nil { // of all these logins, one has failed
		return err
	}

	// The address that tries all accounts gets no more guesses for a day, whatever is refilled meanwhile. This program knows at once.
	const spray = "203.0.113.10"
	if _, err := limits.Block(ctx, pool, failedByAddress.Key(spray), ratelimit.Terms{For: 24 * time.Hour, Reason: "one password at 200 accounts", Who: "login"}); err != nil {
		return err
	}
	denial, denied := errors.AsType[*ratelimit.DeniedError](login(ctx, pool, bob, spray, "secret"))
	if !denied || denial.Reason != ratelimit.ReasonBlock {
		return errors.New("the address was not blocked")
	}
	fmt.Println("the address is blocked for a day, even with bob's password")

	// Too many addresses lock the account even for its owner. That is the price of a bound from everywhere.
	if denial, denied = errors.AsType[*ratelimit.DeniedError](login(ctx, pool, ann, home, "secret")); !denied {
		return errors.New("ann was not denied")
	}
	fmt.Printf("ann must wait for %v: %v\n", denial.RetryAfter, denial)
	if err := limits.Reset(ctx, pool, failedByAccount.Key(ann)); err != nil {
		return err
	}
	if err := login(ctx, pool, ann, home, "secret"); err != nil {
		return err
	}
	fmt.Println("an operator resets the account's limit, and ann logs in")
	return left(ctx, pool, ann, attacker, 0, 100, 80)
}

// left prints how many guesses are left, and checks them.
func left(ctx context.Context, pool *pgxpool.Pool, account, address string, want ...float64) error {
	balances, err := limits.Balance(ctx, pool, guess(account, address)...)
	if err != nil {
		return err
	}
	fmt.Printf("%s from %s:", account, address)
	for i, balance := range balances {
		guesses := math.Floor(balance.Remaining)
		fmt.Printf(" %v of %s", guesses, balance.Limit.Name())
		if guesses != want[i] {
			return fmt.Errorf("want %v", want[i])
		}
	}
	fmt.Println()
	return nil
}

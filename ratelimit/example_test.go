package ratelimit_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/ratelimit"
)

// In the caller's own transaction: the message and its token are committed together, or neither is.
func ExampleLimiter_Consume() {
	sendMessage := ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(2))

	send := func(ctx context.Context, tx pgx.Tx, userID, text string) error {
		if _, err := limits.Consume(ctx, tx, sendMessage.Key(userID)); err != nil {
			return err // denied, and the error rolls the transaction back
		}
		_, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", userID, text)
		return err
	}

	for range 3 {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return send(ctx, tx, "ann", "hello") })
		if exceeded, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			fmt.Println("denied, try again in", exceeded.RetryAfter.Truncate(time.Minute)+time.Minute)
		} else if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("sent")
		}
	}
	// Output:
	// sent
	// sent
	// denied, try again in 6m0s
}

// "x of y used", for a page: a balance is never a denial.
func ExampleLimiter_Balance() {
	apiCalls := ratelimit.CalendarWindow("apiCalls", 10, ratelimit.Month)
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}

	if _, err := limits.Consume(ctx, pool, apiCalls.Key("acme").Count(7)); err != nil {
		fmt.Println(err)
		return
	}
	balances, err := limits.Balance(ctx, pool, apiCalls.Key("acme"), apiCalls.Key("globex"))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, b := range balances {
		fmt.Printf("%s: %v of %v used, resets on %s\n", b.Key, b.Used, b.Capacity, b.ResetAt.Format("2 Jan"))
	}
	// Output:
	// acme: 7 of 10 used, resets on 1 Dec
	// globex: 0 of 10 used, resets on 1 Dec
}

// Check writes nothing.
func ExampleLimiter_Check() {
	uploads := ratelimit.TokenBucket("uploads", 20, time.Hour)

	if _, err := limits.Consume(ctx, pool, uploads.Key("ann").Count(15)); err != nil {
		fmt.Println(err)
		return
	}
	var denied *ratelimit.DeniedError
	if _, err := limits.Check(ctx, pool, uploads.Key("ann").Count(6)); errors.As(err, &denied) {
		fmt.Println("six more in", denied.RetryAfter.Truncate(time.Minute)+time.Minute)
	}
	// Output:
	// six more in 3m0s
}

// A cost that is known only afterwards: what the estimate fell short of is booked, however little is left.
func ExampleLimiter_Charge() {
	llmTokens := ratelimit.TokenBucket("llmTokens", 6000, time.Hour)

	if _, err := limits.Consume(ctx, pool, llmTokens.Key("team 7").Count(5000)); err != nil { // the estimate
		fmt.Println(err)
		return
	}
	result, err := limits.Charge(ctx, pool, llmTokens.Key("team 7").Count(1500)) // it was 6500
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%.0f left\n", result.Remaining)
	// Output:
	// -500 left
}

// What an estimate was too high by is given back, by the time at which it was consumed.
func ExampleLimiter_Refund() {
	credits := ratelimit.TokenBucket("credits", 100, 24*time.Hour)

	consumed, err := limits.Consume(ctx, pool, credits.Key("ann").Count(40))
	if err != nil {
		fmt.Println(err)
		return
	}
	result, err := limits.Refund(ctx, pool, consumed.Receipt(), credits.Key("ann").Count(30)) // it took only 10
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%.0f left\n", result.Remaining)
	// Output:
	// 90 left
}

func ExampleLimiter_Hold() {
	renders := ratelimit.Slots("renders", 2) // of each customer, at once
	llmBudget := ratelimit.CalendarWindow("llmBudget", 100_000, ratelimit.Month)

	held, err := limits.Hold(ctx, pool, "acme/job 17", 5*time.Minute,
		renders.Key("acme"), llmBudget.Key("acme").Count(2000)) // the estimate
	if err != nil {
		fmt.Println(err)
		return
	}
	// Store held.Token with the job, and work.
	result, err := limits.Settle(ctx, pool, held.Token, renders.Key("acme"), llmBudget.Key("acme").Count(1500))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(result.Requests[1].Refunded, "tokens came back")

	// The job is delivered a second time.
	_, err = limits.Hold(ctx, pool, "acme/job 17", 5*time.Minute, renders.Key("acme"), llmBudget.Key("acme").Count(2000))
	if denial, is := errors.AsType[*ratelimit.DeniedError](err); is {
		fmt.Println(denial.Reason)
	}
	// Output:
	// 500 tokens came back
	// settled
}

func ExampleLimiter_During() {
	renders, rendersInAll := ratelimit.Slots("renders", 2), ratelimit.Slots("rendersInAll", 10)
	type task struct{ ID, Customer string }
	render := func(context.Context, task) error { return nil }

	work := func(job task) {
		id := job.Customer + "/render/" + job.ID
		err := limits.During(ctx, pool, id, time.Minute,
			func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
				return nil, render(ctx, job) // which must end when ctx does
			}, renders.Key(job.Customer), rendersInAll.Global())
		denial, denied := errors.AsType[*ratelimit.DeniedError](err)
		switch {
		case err == nil:
			fmt.Println("done")
		case denied && denial.Reason == ratelimit.ReasonSettled:
			fmt.Println("it was done before: drop it")
		case denied && denial.RetryAt.IsZero():
			fmt.Println("waiting does not help:", denial)
		case denied:
			fmt.Println("try again after", denial.RetryAfter)
		default:
			fmt.Println("it failed, or lost its slot: try again:", err)
		}
	}

	work(task{"18", "acme"})
	work(task{"18", "acme"}) // delivered again
	// Output:
	// done
	// it was done before: drop it
}

func ExampleWaitUpTo() {
	renders := ratelimit.Slots("renders", 2)
	id := "acme/render/19"
	work := func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) { return nil, nil }
	err := limits.During(ratelimit.WaitUpTo(ctx, 5*time.Second), pool, id, time.Minute, work, renders.Key("acme"))
	fmt.Println(err)
	// Output:
	// <nil>
}

func ExampleLimiter_Once() {
	apiCalls := ratelimit.CalendarWindow("countedCalls", 1000, ratelimit.Month)
	type call struct{ ID, Customer string }

	fails := true
	handle := func(_ context.Context, _ pgx.Tx, event call) error {
		if fails = !fails; !fails {
			return errors.New("the handler failed")
		}
		fmt.Println(event.ID, "is handled")
		return nil
	}
	for _, event := range []call{{"event 1", "acme"}, {"event 1", "acme"}, {"event 1", "acme"}} {
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			first, _, err := limits.Once(ctx, tx, "stripe/"+event.ID, 7*24*time.Hour, apiCalls.Key(event.Customer))
			if err != nil || !first { // denied; or it was handled before
				return err
			}
			return handle(ctx, tx, event)
		})
		fmt.Println("delivered:", err)
	}
	// Output:
	// delivered: the handler failed
	// event 1 is handled
	// delivered: <nil>
	// delivered: <nil>
}

func ExampleSlots() {
	projects := ratelimit.Slots("projects", 1) // of each team

	// In the transaction that inserts the project:
	if _, err := limits.Hold(ctx, pool, "project 17", ratelimit.Forever, projects.Key("team 7")); err != nil {
		fmt.Println(err)
		return
	}
	_, err := limits.Hold(ctx, pool, "project 18", ratelimit.Forever, projects.Key("team 7"))
	fmt.Println("a second project:", errors.Is(err, ratelimit.ErrDenied))

	// In the transaction that deletes it:
	if released, err := limits.Release(ctx, pool, "project 17", projects.Key("team 7")); err != nil || !released {
		fmt.Println(released, err)
		return
	}
	_, err = limits.Hold(ctx, pool, "project 18", ratelimit.Forever, projects.Key("team 7"))
	fmt.Println("after that:", err)
	// Output:
	// a second project: true
	// after that: <nil>
}

// Failed logins: each try is consumed on the pool, before the login's transaction begins, so that it outlives its rollback
// and needs no second connection. A success makes the limit full again. The key has two parts, so that guesses from one address
// do not lock the account for its owner.
func ExampleLimiter_Reset() {
	failedLogins := ratelimit.TokenBucket("failedLogins", 3, 15*time.Minute)

	login := func(userID, address, password string) error {
		if _, err := limits.Consume(ctx, pool, failedLogins.Key(userID, address)); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if password != "correct horse" {
				return errors.New("wrong password")
			}
			return limits.Reset(ctx, tx, failedLogins.Key(userID, address))
		})
	}

	for _, password := range []string{"123456", "qwerty", "correct horse", "correct", "horse", "horse horse", "correct horse"} {
		err := login("ann", "203.0.113.9", password)
		if errors.Is(err, ratelimit.ErrDenied) {
			err = errors.New("denied")
		}
		fmt.Printf("%s: %v\n", password, err)
	}
	fmt.Println("from home:", login("ann", "192.0.2.7", "correct horse"))
	// Output:
	// 123456: wrong password
	// qwerty: wrong password
	// correct horse: <nil>
	// correct: wrong password
	// horse: wrong password
	// horse horse: wrong password
	// correct horse: denied
	// from home: <nil>
}

// A count that outlives the rollback of the transaction in which it turns out to be due. Most often, such a count can be made
// before the transaction begins: see the example of Reset.
func ExampleOutsideTx() {
	badCoupons := ratelimit.TokenBucket("badCoupons", 3, 24*time.Hour)

	err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ('ann', 'an order with a coupon')"); err != nil {
			return err
		}
		_, err := limits.Consume(ctx, pool, badCoupons.Key("ann"))
		fmt.Println("on the pool it is refused:", errors.Is(err, ratelimit.ErrInvalid))
		if _, err := limits.Consume(ratelimit.OutsideTx(ctx), pool, badCoupons.Key("ann")); err != nil {
			return err
		}
		return errors.New("there is no such coupon")
	})
	fmt.Println(err)

	balances, err := limits.Balance(ctx, pool, badCoupons.Key("ann"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%.0f more\n", balances[0].Remaining)
	// Output:
	// on the pool it is refused: true
	// there is no such coupon
	// 2 more
}

// A SERIALIZABLE transaction, which is run again when Postgres could not serialize it. An error rolls it back.
func ExampleLimiter_InTx() {
	invite := ratelimit.TokenBucket("invite", 5, time.Hour)

	for _, guests := range []int{3, 6} {
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			for range guests {
				if _, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ('ann', 'come in')"); err != nil {
					return err
				}
			}
			// Last, since the limit's row is locked from here to the end of the transaction.
			_, err := limits.Consume(ctx, tx, invite.Key("ann").Count(float64(guests)))
			return err
		})
		switch {
		case errors.Is(err, ratelimit.ErrExceedsCapacity):
			fmt.Println(guests, "guests are more than can ever be granted at once")
		case err != nil:
			fmt.Println(err)
		default:
			fmt.Println(guests, "guests are invited")
		}
	}
	var messages int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM messages WHERE body = 'come in'").Scan(&messages); err != nil {
		fmt.Println(err)
	}
	fmt.Println(messages, "messages")
	// Output:
	// 3 guests are invited
	// 6 guests are more than can ever be granted at once
	// 3 messages
}

// On database/sql, with any driver for Postgres: the question and its token are committed together, or neither is.
func ExampleLimiter_InSQLTx() {
	askQuestion := ratelimit.TokenBucket("askQuestion", 2, 24*time.Hour)
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()

	for _, userID := range []string{"ann", "bob", "eve"} {
		err := limits.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, "INSERT INTO messages (sender, body) VALUES ($1, 'why?')", userID); err != nil {
				return err
			}
			_, err := limits.Consume(ctx, ratelimit.SQL(tx), askQuestion.Global())
			return err
		})
		if errors.Is(err, ratelimit.ErrDenied) {
			fmt.Println(userID, "was denied")
		} else if err != nil {
			fmt.Println(err)
		}
	}
	var questions int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM messages WHERE body = 'why?'").Scan(&questions); err != nil {
		fmt.Println(err)
	}
	fmt.Println(questions, "questions")
	// Output:
	// eve was denied
	// 2 questions
}

// A reservation takes tokens that are not there yet, and says when they will be: the job that is to run then is stored in
// the same transaction. With River it would be
//
//	_, err = jobs.InsertTx(ctx, tx, args, &river.InsertOpts{ScheduledAt: reserved.RetryAt})
func ExampleLimiter_Reserve() {
	promptTokens := ratelimit.TokenBucket("promptTokens", 6000, time.Hour, ratelimit.Capacity(2000), ratelimit.MaxReserved(4000))

	for _, prompt := range []string{"summarize", "translate", "explain", "rhyme"} {
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			reserved, err := limits.Reserve(ctx, tx, promptTokens.Key("team 7").Count(2000))
			if err != nil {
				return err // so much is reserved already that it may not queue up
			}
			fmt.Println(prompt, "may run in", reserved.Delay.Round(time.Minute))
			_, err = tx.Exec(ctx, "INSERT INTO jobs (prompt, run_at) VALUES ($1, $2)", prompt, reserved.RetryAt)
			return err
		})
		if exceeded, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			fmt.Println(prompt, "may be asked again in", exceeded.RetryAfter.Truncate(time.Minute)+time.Minute)
		} else if err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// summarize may run in 0s
	// translate may run in 20m0s
	// explain may run in 40m0s
	// rhyme may be asked again in 20m0s
}

// A worker fetches work in batches: up to 100 e-mails, and no more than the provider still allows this hour.
func ExampleLimiter_Take() {
	sends := ratelimit.TokenBucket("sends", 50, time.Hour)

	fetch := func(ctx context.Context, tx pgx.Tx) (addresses []string, err error) {
		taken, result, err := limits.Take(ctx, tx, 100, sends.Global())
		if err != nil {
			return nil, err // denied: there is not one token, until RetryAt
		}
		rows, err := tx.Query(ctx, `
			DELETE FROM emails
			 WHERE id IN (SELECT id FROM emails ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
			RETURNING address`, taken)
		if err != nil {
			return nil, err
		}
		addresses, err = pgx.CollectRows(rows, pgx.RowTo[string])
		if unused := taken - len(addresses); err == nil && unused > 0 {
			_, err = limits.Refund(ctx, tx, result.Receipt(), sends.Global().Count(float64(unused)))
		}
		return addresses, err
	}

	if _, err := pool.Exec(ctx, "INSERT INTO emails (address) SELECT 'user-' || i FROM generate_series(1, 60) AS i"); err != nil {
		fmt.Println(err)
	}
	for range 3 {
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			addresses, err := fetch(ctx, tx)
			if err == nil {
				fmt.Println("fetched", len(addresses))
			}
			return err
		})
		if exceeded, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			fmt.Println("denied for", exceeded.RetryAfter.Truncate(time.Minute)+time.Minute)
			err = limits.Reset(ctx, pool, sends.Global()) // the hour is over
		}
		if err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// fetched 50
	// denied for 2m0s
	// fetched 10
}

// A worker fetches jobs of many customers. What is denied is fetched later, and delays nobody else.
func ExampleLimiter_ConsumeEach() {
	perCustomer := ratelimit.TokenBucket("webhooks", 2, time.Hour)
	jobs := []string{"acme 1", "acme 2", "acme 3", "globex 1"} // in an application, of a SELECT ... FOR UPDATE SKIP LOCKED
	var granted, later []string
	err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		granted, later = nil, nil // it may run again
		requests := make([]ratelimit.Request, len(jobs))
		for i, job := range jobs {
			customer, _, _ := strings.Cut(job, " ")
			requests[i] = perCustomer.Key(customer)
		}
		decided, err := limits.ConsumeEach(ctx, tx, requests...) // one for each job
		if err != nil {
			return err
		}
		for i := range decided.Granted() {
			granted = append(granted, jobs[i])
		}
		for i := range decided.Denied() {
			later = append(later, jobs[i])
		}
		return nil
	})
	fmt.Println(granted, later, err)
	// Output:
	// [acme 1 acme 2 globex 1] [acme 3] <nil>
}

// One limit that many transactions want at once: they wait their turn before they take a connection, and none runs in vain.
func ExampleHot() {
	signUps := ratelimit.TokenBucket("signUps", 10, 24*time.Hour)

	var wg sync.WaitGroup
	for i := range 30 {
		wg.Go(func() {
			err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := limits.Consume(ctx, tx, signUps.Global()); err != nil { // with the ctx that the function is given
					return err
				}
				_, err := tx.Exec(ctx, "INSERT INTO users (email) VALUES ($1)", fmt.Sprintf("user%d@example.com", i))
				return err
			}, ratelimit.Hot(signUps.Global()))
			var exceeded *ratelimit.DeniedError
			if err != nil && !errors.As(err, &exceeded) {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()

	var users int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM users").Scan(&users); err != nil {
		fmt.Println(err)
	}
	fmt.Println(users, "users")
	// Output:
	// 10 users
}

// For calls that are in no transaction, and of which there are many at once: those that wait are decided by one statement
// and one commit.
func ExampleCoalescer() {
	requests := ratelimit.TokenBucket("requests", 100, 24*time.Hour)
	coalescer := &ratelimit.Coalescer{Pool: pool} // one for the process
	defer func() { _ = coalescer.Close(ctx) }()   // after the server, before the pool

	var granted atomic.Int64
	var wg sync.WaitGroup
	for range 300 {
		wg.Go(func() {
			if _, err := limits.Consume(ctx, coalescer, requests.Key("ann")); err == nil {
				granted.Add(1)
			}
		})
	}
	wg.Wait()
	fmt.Println(granted.Load(), "granted")
	// Output:
	// 100 granted
}

// Many of the calls are granted in memory. Close gives back what was not used.
func ExampleCoalescer_ahead() {
	month := ratelimit.CalendarWindow("month", 100_000, ratelimit.Month)
	coalescer := &ratelimit.Coalescer{Pool: pool, Ahead: 50 * time.Millisecond}
	defer func() { _ = coalescer.Close(ctx) }() // gives back what is ahead
	for range 300 {
		if _, err := limits.Consume(ctx, coalescer, month.Key("ann")); err != nil {
			fmt.Println(err)
			return
		}
	}
	balance, err := limits.Balance(ctx, pool, month.Key("ann"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(balance[0].Used >= 300, "for others")
	// Output:
	// true for others
}

// BEGIN, the row, the limit and COMMIT in one round trip. A denial stops them all.
func ExampleLimiter_SendTx() {
	postReview := ratelimit.TokenBucket("postReview", 1, time.Hour)

	post := func(userID, text string) error {
		batch := &pgx.Batch{}
		batch.Queue("INSERT INTO messages (sender, body) VALUES ($1, $2)", userID, text)
		if _, err := limits.QueueConsume(ctx, batch, postReview.Key(userID)); err != nil {
			return err
		}
		return limits.SendTx(ctx, pool, batch) // SERIALIZABLE, and sent again if it could not be serialized
	}

	fmt.Println("first:", post("ann", "a fine limiter"))
	var exceeded *ratelimit.DeniedError
	fmt.Println("second denied:", errors.As(post("ann", "a fine limiter"), &exceeded))
	var stored int
	if err := pool.QueryRow(ctx, "SELECT count(*) FROM messages WHERE body = 'a fine limiter'").Scan(&stored); err != nil {
		fmt.Println(err)
	}
	fmt.Println(stored, "stored")
	// Output:
	// first: <nil>
	// second denied: true
	// 1 stored
}

// In the background of a server: every so often, the rows of keys that have been full for an hour are deleted. It ends with ctx.
func ExampleLimiter_Sweep() {
	visits := ratelimit.TokenBucket("visits", 100, time.Minute)
	uploads := ratelimit.FixedWindow("uploads", 10, 24*time.Hour)

	_, err := pool.Exec(ctx, "INSERT INTO ratelimit.limits VALUES ('visits', 'once, long ago', 0, 1, 99, now() - interval '1 day')")
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for ctx.Err() == nil {
		deleted, err := limits.Sweep(ctx, pool, visits, uploads)
		fmt.Println(deleted, "deleted", err)
		time.AfterFunc(10*time.Millisecond, stop) // the server shuts down
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Minute):
		}
	}
	// Output:
	// 1 deleted <nil>
}

// A limit from a configuration file. Unset and 0 are different things.
func ExampleConfig_Limit() {
	var config ratelimit.Config
	err := json.Unmarshal([]byte(`{"name": "calls", "kind": "token bucket", "rate": 10, "period": "1m", "maxReserved": 0}`), &config)
	if err != nil {
		fmt.Println(err)
		return
	}
	limit, err := config.Limit()
	fmt.Println(limit, err)

	config.Rate, config.Period = new(-1.0), "soon"
	_, err = config.Limit()
	fmt.Println(err)
	// Output:
	// calls: token bucket, 10 per 1m, capacity 10, at most 0 reserved <nil>
	// ratelimit: invalid: limit "calls": period "soon" is not a duration, such as "1h30m", "1d" or "1w"; rate -1 is neither 0 nor between 1e-15 and 1e+15
}

// Keys are stored in the clear, and whoever reads the table or a backup of it reads them. Of what is personal data, an address or
// an e-mail, store a keyed hash: without the secret, which is not in the database, nobody can try out whose it is (a plain hash
// of an e-mail is found by hashing a list of them). The same secret for all processes, and for as long as the rows are to count.
func ExampleLimit_Key_personalData() {
	secret := []byte("32 random bytes from the vault") // of crypto/rand, not in the code
	hashed := func(personal string) string {
		mac := hmac.New(sha256.New, secret)
		mac.Write([]byte(strings.ToLower(personal))) // the same person, the same key
		return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	resetMails := ratelimit.TokenBucket("resetMails", 5, time.Hour)

	result, err := limits.Consume(ctx, pool, resetMails.Key(hashed("Ann@example.org")))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(result.Requests[0].Key, "has", result.Remaining, "left")
	// Output:
	// xi3YOnD-jhzOnUrj3TtZVu5une4d-O_kUV98LhM1KCw has 4 left
}

// A denial is an error. It says when to try again, and which of the limits denied.
func ExampleDeniedError() {
	perUser := ratelimit.TokenBucket("reportsPerUser", 10, time.Hour, ratelimit.Capacity(1))
	perTeam := ratelimit.TokenBucket("reportsPerTeam", 100, time.Hour)

	for range 2 {
		_, err := limits.Consume(ctx, pool, perUser.Key("ann"), perTeam.Key("acme"))
		var denied *ratelimit.DeniedError
		switch {
		case err == nil:
			fmt.Println("granted")
		case errors.As(err, &denied) && denied.RetryAt.IsZero():
			fmt.Println(denied) // a plan without it, or a block without an end: waiting does not help
		case errors.As(err, &denied):
			fmt.Println("denied, retry in", denied.RetryAfter.Truncate(time.Minute)+time.Minute)
			for _, status := range denied.Requests {
				if !status.OK {
					fmt.Printf("%s has %.0f left\n", status.Limit.Name(), status.Remaining)
				}
			}
		default:
			fmt.Println(err) // the request is wrong, or the database cannot be reached
		}
	}
	// Output:
	// granted
	// denied, retry in 6m0s
	// reportsPerUser has 0 left
}

// A token bucket is refilled continuously, here by one token a second, up to its capacity. This is the picture in
// docs/concepts.md.
func ExampleTokenBucket() {
	apiCalls := ratelimit.TokenBucket("apiCalls", 60, time.Minute, ratelimit.Capacity(5))

	noon := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	now := noon
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for _, call := range []struct{ second, count int }{{1, 3}, {2, 2}, {3, 3}, {4, 3}} {
		now = noon.Add(time.Duration(call.second) * time.Second)
		result, err := limits.Consume(ctx, pool, apiCalls.Global().Count(float64(call.count)))
		switch {
		case errors.Is(err, ratelimit.ErrDenied):
			fmt.Printf("%d s: %d denied, %v left, retry in %v\n", call.second, call.count, result.Remaining, result.RetryAfter)
		case err != nil:
			fmt.Println(err)
		default:
			fmt.Printf("%d s: %d granted, %v left\n", call.second, call.count, result.Remaining)
		}
	}
	// Output:
	// 1 s: 3 granted, 2 left
	// 2 s: 2 granted, 1 left
	// 3 s: 3 denied, 2 left, retry in 1s
	// 4 s: 3 granted, 0 left
}

// A fixed window is refilled at the start of each window, and not in between. This is the picture in docs/concepts.md.
func ExampleFixedWindow() {
	noon := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	exports := ratelimit.FixedWindow("exports", 4, time.Minute, ratelimit.Start(noon))

	now := noon
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for _, call := range []struct{ second, count int }{{10, 3}, {40, 1}, {50, 1}, {90, 2}, {120, 1}} {
		now = noon.Add(time.Duration(call.second) * time.Second)
		result, err := limits.Consume(ctx, pool, exports.Global().Count(float64(call.count)))
		switch {
		case errors.Is(err, ratelimit.ErrDenied):
			fmt.Printf("%d s: %d denied, %v left, retry in %v\n", call.second, call.count, result.Remaining, result.RetryAfter)
		case err != nil:
			fmt.Println(err)
		default:
			fmt.Printf("%d s: %d granted, %v left\n", call.second, call.count, result.Remaining)
		}
	}
	// Output:
	// 10 s: 3 granted, 1 left
	// 40 s: 1 granted, 0 left
	// 50 s: 1 denied, 0 left, retry in 10s
	// 90 s: 2 granted, 2 left
	// 120 s: 1 granted, 3 left
}

// A calendar's month is as long as it is. Where it has no 31st, the window begins on its last day.
func ExampleUnlimited() {
	plans := map[string]ratelimit.Limit{
		"free":       ratelimit.TokenBucket("exports.free", 0, 24*time.Hour), // none
		"pro":        ratelimit.TokenBucket("exports.pro", 100, 24*time.Hour),
		"enterprise": ratelimit.Unlimited("exports.enterprise"),
	}
	for _, plan := range []string{"free", "pro", "enterprise"} {
		result, err := limits.Consume(ctx, pool, plans[plan].Key("user-9"))
		if denied, ok := errors.AsType[*ratelimit.DeniedError](err); ok && denied.Reason == ratelimit.ReasonPlan {
			fmt.Println("your plan does not include this")
		}
		fmt.Println(plan, result.OK, result.Remaining)
	}
	// Output:
	// your plan does not include this
	// free false 0
	// pro true 99
	// enterprise true +Inf
}

// One customer has a quota and a billing day of its own.
func ExampleLimit_With() {
	monthly := ratelimit.CalendarWindow("monthlyCalls", 10_000, ratelimit.Month, ratelimit.Varies(32*24*time.Hour))
	acme := monthly.With(ratelimit.Rate(50_000), ratelimit.Anchor("2026-01-15"))

	now := time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for _, request := range []ratelimit.Request{monthly.Key("customer-7"), acme.Key("acme")} {
		result, err := limits.Consume(ctx, pool, request)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(result.Remaining, "left until", result.ResetAt)
	}
	// Output:
	// 9999 left until 2026-03-01 00:00:00 +0000 UTC
	// 49999 left until 2026-02-15 00:00:00 +0000 UTC
}

func ExampleCalendarWindow() {
	apiCalls := ratelimit.CalendarWindow("apiCalls", 10_000, ratelimit.Month,
		ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor("2026-01-31"))

	now := time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for range 3 {
		result, err := limits.Consume(ctx, pool, apiCalls.Key("customer-7").Count(10_000))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println("all taken until", result.ResetAt)
		now = result.ResetAt
	}
	// Output:
	// all taken until 2026-02-27 23:00:00 +0000 UTC
	// all taken until 2026-03-30 22:00:00 +0000 UTC
	// all taken until 2026-04-29 22:00:00 +0000 UTC
}

// Each reservation lowers the balance, below zero if need be. The job may run when the refill has brought it back to zero.
// This is the picture in docs/concepts.md.
func ExampleLimiter_Reserve_runTimes() {
	renders := ratelimit.TokenBucket("renders", 60, time.Minute, ratelimit.Capacity(5), ratelimit.MaxReserved(5))

	noon := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	now := noon
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for second, job := range []string{"A", "B", "C", "D"} {
		now = noon.Add(time.Duration(second+1) * time.Second)
		reserved, err := limits.Reserve(ctx, pool, renders.Global().Count(4))
		if denied, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
			fmt.Printf("%s at %d s: denied, balance %v, ask again at %v\n", job, second+1, denied.Remaining, denied.RetryAt.Sub(noon))
		} else if err != nil {
			fmt.Println(err)
		} else {
			fmt.Printf("%s at %d s: balance %v, may run at %v\n", job, second+1, reserved.Remaining, reserved.RetryAt.Sub(noon))
		}
	}
	// Output:
	// A at 1 s: balance 1, may run at 1s
	// B at 2 s: balance -2, may run at 4s
	// C at 3 s: balance -5, may run at 8s
	// D at 4 s: denied, balance -4, ask again at 7s
}

// A test sets the clock, and works in a transaction that it rolls back.
func ExampleLimiter_clock() {
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	invitations := ratelimit.TokenBucket("invitations", 10, time.Hour, ratelimit.Capacity(1))

	tx, err := pool.Begin(ctx)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tx.Rollback(ctx) // the test leaves nothing behind

	_, err = limits.Consume(ctx, tx, invitations.Key("ann"))
	fmt.Println("first granted:", err == nil)
	_, err = limits.Consume(ctx, tx, invitations.Key("ann"))
	fmt.Println("second denied:", errors.Is(err, ratelimit.ErrDenied))
	now = now.Add(6 * time.Minute)
	_, err = limits.Consume(ctx, tx, invitations.Key("ann"))
	fmt.Println("six minutes later granted:", err == nil)
	// Output:
	// first granted: true
	// second denied: true
	// six minutes later granted: true
}

// After an unknown outcome, the caller tries again with the same id. The id, which the caller has chosen, is the primary key
// of the business row: if the first try was committed after all, the second changes nothing.
func ExampleLimiter_InTx_unknownOutcome() {
	if _, err := pool.Exec(ctx, "CREATE TABLE orders (id text PRIMARY KEY, buyer text)"); err != nil {
		fmt.Println(err)
		return
	}
	placeOrder := ratelimit.TokenBucket("placeOrder", 10, 24*time.Hour)

	order := func(id, buyer string) error {
		return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			inserted, err := tx.Exec(ctx, "INSERT INTO orders (id, buyer) VALUES ($1, $2) ON CONFLICT DO NOTHING", id, buyer)
			if err != nil {
				return err
			}
			if inserted.RowsAffected() == 0 {
				return nil // an earlier try was committed, and its token with it
			}
			_, err = limits.Consume(ctx, tx, placeOrder.Key(buyer))
			return err
		})
	}

	err := order("order 17", "ann")
	for range 3 {
		if !errors.Is(err, ratelimit.ErrUnknownOutcome) {
			break
		}
		err = order("order 17", "ann")
	}
	fmt.Println(err)

	err = order("order 17", "ann") // as if the answer to the first COMMIT had been lost
	fmt.Println(err)
	balances, err := limits.Balance(ctx, pool, placeOrder.Key("ann"))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%.0f of 10 left\n", balances[0].Remaining)
	// Output:
	// <nil>
	// <nil>
	// 9 of 10 left
}

// A Coalescer should have a pool of its own, with a lock_timeout: a row that another transaction has locked then fails the
// calls for that row, and no others.
func ExampleCoalescer_lockTimeout() {
	config := pool.Config() // or that of pgxpool.ParseConfig
	config.MaxConns = 2
	config.ConnConfig.RuntimeParams["lock_timeout"] = "200ms"
	own, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer own.Close()
	coalescer := &ratelimit.Coalescer{Pool: own}
	defer func() { _ = coalescer.Close(ctx) }()

	searches := ratelimit.TokenBucket("searches", 100, time.Hour)
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := limits.Consume(ctx, tx, searches.Key("ann")); err != nil {
			return err
		}
		// The row is locked until this transaction ends.
		_, err := limits.Consume(ctx, coalescer, searches.Key("ann"))
		var pgErr *pgconn.PgError
		fmt.Println("lock timeout for ann:", errors.As(err, &pgErr) && pgErr.Code == "55P03")
		_, err = limits.Consume(ctx, coalescer, searches.Key("bob"))
		fmt.Println("granted to bob:", err == nil)
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	// Output:
	// lock timeout for ann: true
	// granted to bob: true
}

// A refund to a token bucket gives back what has not been refilled since. Status.Refunded says how many tokens came back.
func ExampleLimiter_Refund_refilledSince() {
	noon := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	lookups := ratelimit.TokenBucket("lookups", 60, time.Minute, ratelimit.Capacity(10)) // one a second

	now := noon
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for second := range 6 {
		key := fmt.Sprintf("refunded after %d s", second)
		now = noon
		result, err := limits.Consume(ctx, pool, lookups.Key(key).Count(5))
		if err != nil {
			fmt.Println(err)
			return
		}
		now = noon.Add(time.Duration(second) * time.Second)
		result, err = limits.Refund(ctx, pool, result.Receipt(), lookups.Key(key).Count(5))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s: %v came back\n", key, result.Requests[0].Refunded)
	}
	// Output:
	// refunded after 0 s: 5 came back
	// refunded after 1 s: 4 came back
	// refunded after 2 s: 3 came back
	// refunded after 3 s: 2 came back
	// refunded after 4 s: 1 came back
	// refunded after 5 s: 0 came back
}

// InTx at another isolation level. In READ COMMITTED, transactions that want the same row wait for each other.
func ExampleIsolation() {
	postQuestion := ratelimit.TokenBucket("postQuestion", 10, time.Hour)
	user, text := "ann", "how so?"

	err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", user, text); err != nil {
			return err
		}
		_, err := limits.Consume(ctx, tx, postQuestion.Key(user))
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted)) // without it: SERIALIZABLE
	fmt.Println(err)
	// Output:
	// <nil>
}

// An operator raises a limit for one key, here from SQL. The program follows without a deploy.
func ExampleLimiter_Override() {
	sendMessage, signUps := ratelimit.TokenBucket("sendMessage", 10, time.Hour), ratelimit.FixedWindow("signUps", 100, time.Hour)
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "web", Limits: []ratelimit.Limit{sendMessage, signUps}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = limits.Close(ctx) }()

	// The business row and the numbers are committed together.
	err = limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := limits.Override(ctx, tx, signUps.Key("acme"),
			ratelimit.Terms{For: 2 * time.Hour, Reason: "their conference", Who: "bea"}, ratelimit.Rate(500))
		return err
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	balances, err := limits.Balance(ctx, pool, signUps.Key("acme")) // this process knows at once, others within two seconds
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("acme:", balances[0].Limit)
	// Output: acme: signUps: fixed window, 500 per 1h, capacity 500
}

// A lockout that grows: an address that guesses on while it is denied is blocked for a day.
func ExampleLimiter_Block() {
	failedByAddress := ratelimit.TokenBucket("failedByAddress", 5, time.Hour)
	deniedGuesses := ratelimit.TokenBucket("deniedGuesses", 3, 24*time.Hour)
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "logins", Limits: []ratelimit.Limit{failedByAddress, deniedGuesses}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = limits.Close(ctx) }()
	guess := func(address string) error {
		_, err := limits.Consume(ctx, pool, failedByAddress.Key(address))
		if denial, denied := errors.AsType[*ratelimit.DeniedError](err); !denied || denial.Reason == ratelimit.ReasonBlock {
			return err
		}
		_, again := limits.Consume(ctx, pool, deniedGuesses.Key(address))
		if errors.Is(again, ratelimit.ErrDenied) {
			_, again = limits.Block(ctx, pool, failedByAddress.Key(address),
				ratelimit.Terms{For: 24 * time.Hour, Reason: "guesses passwords", Who: "login"})
		}
		return errors.Join(err, again)
	}

	for n := 1; n <= 10; n++ {
		if denial, denied := errors.AsType[*ratelimit.DeniedError](guess("203.0.113.9")); denied {
			fmt.Println("guess", n, "is denied:", denial.Reason)
		}
	}
	ended, err := limits.Unblock(ctx, pool, failedByAddress.Key("203.0.113.9"), ratelimit.End{Who: "bea"})
	fmt.Println(ended, "block ended,", err)
	// Output:
	// guess 6 is denied: quota
	// guess 7 is denied: quota
	// guess 8 is denied: quota
	// guess 9 is denied: quota
	// guess 10 is denied: block
	// 1 block ended, <nil>
}

// Messages lets each user send five messages in a burst, and one more every ten minutes. The limit and the message are one
// commit: a message that is not stored costs nothing.
//
//	go run ./examples/messages
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits      *ratelimit.Limiter // of Open
	sendMessage = ratelimit.TokenBucket("sendMessage", 6, time.Hour, ratelimit.Capacity(5))
)

// send stores a message. The table's CHECK refuses a message that is too long, after the token has been taken.
func send(ctx context.Context, pool *pgxpool.Pool, sender, body string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := limits.Consume(ctx, tx, sendMessage.Key(sender)); err != nil {
			return err // a denial rolls the transaction back
		}
		_, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", sender, body)
		return err // an error rolls back the token, too
	})
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "messages", Limits: []ratelimit.Limit{sendMessage}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	_, err = pool.Exec(ctx, "CREATE TABLE messages (sender text, body text CONSTRAINT body_length CHECK (length(body) <= 20))")
	if err != nil {
		return err
	}

	for _, message := range []struct{ sender, body string }{
		{"ann", "hello"},
		{"ann", "is anybody there?"},
		{"ann", "this one is too long to be stored"},
		{"ann", "so is this one, and it costs nothing either"},
		{"ann", "hello?"},
		{"ann", "hello??"},
		{"ann", "hello???"},
		{"ann", "hello????"},
		{"bob", "Ann, I am here."},
	} {
		err := send(ctx, pool, message.sender, message.body)
		answer := "sent"
		if denial, denied := errors.AsType[*ratelimit.DeniedError](err); denied {
			answer = fmt.Sprintf("denied, wait %v", denial.RetryAfter.Truncate(time.Minute)+time.Minute)
		} else if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "23514" {
			answer = "not stored: violates " + refused.ConstraintName
		} else if err != nil {
			return err
		}
		left, err := remaining(ctx, pool, message.sender)
		if err != nil {
			return err
		}
		fmt.Printf("%s: %-45q %-33s %.0f left\n", message.sender, message.body, answer, left)
	}

	var fromAnn, fromBob int
	err = pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE sender = 'ann'), count(*) FILTER (WHERE sender = 'bob')
		FROM messages`).Scan(&fromAnn, &fromBob)
	if err != nil {
		return err
	}
	fmt.Printf("in the table: %d messages of ann, %d of bob\n", fromAnn, fromBob)
	if fromAnn != 5 || fromBob != 1 {
		return fmt.Errorf("%d messages of ann and %d of bob, want 5 and 1", fromAnn, fromBob)
	}
	return nil
}

// remaining returns what a user has left.
func remaining(ctx context.Context, pool *pgxpool.Pool, user string) (float64, error) {
	balances, err := limits.Balance(ctx, pool, sendMessage.Key(user))
	if err != nil {
		return 0, err
	}
	return balances[0].Remaining, nil
}

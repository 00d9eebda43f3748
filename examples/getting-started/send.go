package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits      ratelimit.Limiter // the zero value is ready
	sendMessage = ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(3))
)

func send(ctx context.Context, tx pgx.Tx, user, text string) error {
	if _, err := limits.Consume(ctx, tx, sendMessage.Key(user)); err != nil {
		return err // a *ratelimit.DeniedError says when to try again
	}
	_, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", user, text)
	return err // an error rolls back the row and the token
}

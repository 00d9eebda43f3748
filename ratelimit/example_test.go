package ratelimit_test

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

var (
	limits       ratelimit.Limiter // the zero value is ready
	sendMessage  = ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20))
	failedLogins = ratelimit.FixedWindow("failedLogins", 5, 15*time.Minute)
	llmTokens    = ratelimit.TokenBucket("llmTokens", 40_000, time.Minute, ratelimit.Shards(10), ratelimit.MaxReserved(80_000))

	pool                    *pgxpool.Pool
	db                      *sql.DB
	userID, team, text, job string
	errWrongPassword        = errors.New("wrong password")
	passwordOK              = func(context.Context, pgx.Tx, string) (bool, error) { return true, nil }
	estimate                = func(string) float64 { return 1_500 }
	ctx                     = context.Background()
)

// In a transaction that the caller has: denied means an error, and the error means rollback.
func ExampleLimiter_Consume() {
	send := func(ctx context.Context, tx pgx.Tx) error {
		if _, err := limits.Consume(ctx, tx, sendMessage.Key(userID)); err != nil {
			return err // *ratelimit.ExceededError: which limits, RetryAt, RetryAfter
		}
		_, err := tx.Exec(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", userID, text)
		return err
	}
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return send(ctx, tx) })
	var exceeded *ratelimit.ExceededError
	if errors.As(err, &exceeded) {
		time.Sleep(exceeded.RetryAfter)
	}
}

// The same in one round trip: the row, the limit and COMMIT are sent together, and a denial stops them all.
func ExampleLimiter_SendTx() {
	send := func(ctx context.Context) error {
		var batch pgx.Batch
		batch.Queue("INSERT INTO messages (sender, body) VALUES ($1, $2)", userID, text)
		if _, err := limits.QueueConsume(ctx, &batch, sendMessage.Key(userID)); err != nil {
			return err
		}
		return limits.SendTx(ctx, pool, &batch) // *ratelimit.ExceededError: nothing was written
	}
	_ = send(ctx)
}

// Failed logins: consume first, on the pool and before the login's transaction begins, so that it outlives its rollback and
// needs no second connection; reset on success.
func ExampleLimiter_Reset() {
	login := func(ctx context.Context) error {
		if _, err := limits.Consume(ctx, pool, failedLogins.Key(userID)); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			ok, err := passwordOK(ctx, tx, userID)
			if err != nil {
				return err
			}
			if !ok {
				return errWrongPassword
			}
			return limits.Reset(ctx, tx, failedLogins.Key(userID))
		})
	}
	_ = login(ctx)
}

// On database/sql, and with what is built on it: sqlx, GORM, bun, ent.
func ExampleSQL() {
	send := func(ctx context.Context, tx *sql.Tx) error {
		if _, err := limits.Consume(ctx, ratelimit.SQL(tx), sendMessage.Key(userID)); err != nil {
			return err // *ratelimit.ExceededError
		}
		_, err := tx.ExecContext(ctx, "INSERT INTO messages (sender, body) VALUES ($1, $2)", userID, text)
		return err
	}
	err := limits.InSQLTx(ctx, db, send) // SERIALIZABLE, and run again when Postgres could not serialize it
	if errors.Is(err, context.DeadlineExceeded) {
		return
	}
}

// Reserve and schedule in one commit. With River it would be
//
//	_, err = jobs.InsertTx(ctx, tx, args, &river.InsertOpts{ScheduledAt: result.RetryAt})
func ExampleLimiter_InTx() {
	err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		result, err := limits.Consume(ctx, tx, llmTokens.Key(team).Count(estimate(job)).Reserve())
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO jobs (args, scheduled_at) VALUES ($1, $2)", job, result.RetryAt)
		return err
	})
	if errors.Is(err, ratelimit.ErrExceedsCapacity) {
		return // it will never fit: split it
	}
}

package tx_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// writing are all verbs that write.
func writing(limiter *ratelimit.Limiter, request ratelimit.Request) map[string]func(ctx context.Context, db ratelimit.DB) error {
	return map[string]func(ctx context.Context, db ratelimit.DB) error{
		"consume": func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Consume(ctx, db, request)
			return err
		},
		"charge": func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Charge(ctx, db, request)
			return err
		},
		"refund": func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Refund(ctx, db, harness.ReceiptOf(time.Now(), request), request)
			return err
		},
		"reset": func(ctx context.Context, db ratelimit.DB) error { return limiter.Reset(ctx, db, request) },
		"pause": func(ctx context.Context, db ratelimit.DB) error {
			return harness.Second(limiter.Pause(ctx, db, time.Millisecond, request.Count(1e6)))
		},
		"resume": func(ctx context.Context, db ratelimit.DB) error { return limiter.Resume(ctx, db, request) },
		"move": func(ctx context.Context, db ratelimit.DB) error {
			return limiter.Move(ctx, db, request, ratelimit.TokenBucket("more messages", 5000, time.Hour).Key(rand.Text()))
		},
	}
}

// beginning are the functions that begin a transaction of their own on a pool.
func beginning(limiter *ratelimit.Limiter, limit ratelimit.Limit, db ratelimit.DB) map[string]func(ctx context.Context) error {
	all := map[string]func(ctx context.Context) error{
		"Publish": func(ctx context.Context) error { return limiter.Publish(ctx, db, "web", limit) },
		"Sweep":   func(ctx context.Context) error { return harness.Second(limiter.Sweep(ctx, db, limit)) },
	}
	if pool, ok := db.(*pgxpool.Pool); ok {
		all["a transaction"] = func(ctx context.Context) error {
			return limiter.InTx(ctx, pool, func(context.Context, pgx.Tx) error { return nil })
		}
		all["SendTx"] = func(ctx context.Context) error { return limiter.SendTx(ctx, pool, &pgx.Batch{}) }
	}
	return all
}

// refusesToWrite wants every verb that writes to be refused before anything is sent. The pool's only connection belongs to
// the transaction, so nothing could be sent.
func refusesToWrite(ctx context.Context, t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, db ratelimit.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), what) || !strings.Contains(err.Error(), "OutsideTx(ctx)") {
			t.Errorf("%s: %v, want it refused", what, err)
		}
	}
	for verb, write := range writing(limiter, request) {
		refused(verb, write(ctx, db))
	}
	for what, begin := range beginning(limiter, ratelimit.TokenBucket("messages", 1000, time.Hour), db) {
		refused(what, begin(ctx))
	}
}

// writes wants every verb that writes to be granted.
func writes(ctx context.Context, t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, db ratelimit.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	for verb, write := range writing(limiter, request) {
		if err := write(ctx, db); err != nil {
			t.Errorf("%s: %v", verb, err)
		}
	}
}

// TestWritingOnThePoolInsideItsTransactionIsRefused on every handle whose pool is known, whatever the limiter.
func TestWritingOnThePoolInsideItsTransactionIsRefused(t *testing.T) {
	t.Parallel()
	var limiter, another ratelimit.Limiter
	request := ratelimit.TokenBucket("messages", 1000, time.Hour).Key("ann")
	t.Run("pgx", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 1)
		var kept context.Context
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			kept = ctx
			refusesToWrite(ctx, t, &limiter, request, pool)
			refusesToWrite(ctx, t, &another, request, &ratelimit.Coalescer{Pool: pool})
			writes(ctx, t, &limiter, request, tx)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		writes(kept, t, &limiter, request, pool) // the transaction has ended, so writing is allowed
	})
	t.Run("database/sql", func(t *testing.T) {
		t.Parallel()
		withEveryDriver(t, func(t *testing.T, db *sql.DB) {
			var kept context.Context
			errAbandoned := errors.New("abandoned")
			err := limiter.InSQLTx(t.Context(), db, func(ctx context.Context, tx *sql.Tx) error {
				kept = ctx
				refusesToWrite(ctx, t, &another, request, ratelimit.SQL(db))
				if err := another.InSQLTx(ctx, db, func(context.Context, *sql.Tx) error { return nil }); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "OutsideTx(ctx)") {
					t.Errorf("InSQLTx: %v, want it refused", err)
				}
				writes(ctx, t, &limiter, request, ratelimit.SQL(tx))
				return errAbandoned
			})
			if !errors.Is(err, errAbandoned) {
				t.Fatal(err)
			}
			writes(kept, t, &limiter, request, ratelimit.SQL(db))
		})
	})
}

func TestAllEnclosingPoolsCount(t *testing.T) {
	t.Parallel()
	var limiter ratelimit.Limiter
	request := ratelimit.TokenBucket("messages", 1000, time.Hour).Key("ann")
	outer, elsewhere := harness.NewPool(t, 1), harness.NewPool(t, 1)
	inner := harness.OpenSQL(t, "pgx", harness.NewMigrated(t), 1)
	err := limiter.InTx(t.Context(), outer, func(ctx context.Context, outerTx pgx.Tx) error {
		outerCtx := ctx
		err := limiter.InSQLTx(ctx, inner, func(ctx context.Context, innerTx *sql.Tx) error {
			refusesToWrite(ctx, t, &limiter, request, outer)
			refusesToWrite(ctx, t, &limiter, request, ratelimit.SQL(inner))
			writes(ctx, t, &limiter, request, elsewhere)
			writes(ctx, t, &limiter, request, outerTx)
			writes(ctx, t, &limiter, request, ratelimit.SQL(innerTx))
			return nil
		})
		refusesToWrite(outerCtx, t, &limiter, request, outer)
		writes(outerCtx, t, &limiter, request, ratelimit.SQL(inner))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestReadingOnThePoolInsideItsTransactionIsAllowed(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	var limiter ratelimit.Limiter
	request := ratelimit.TokenBucket("messages", 10, time.Hour).Key("ann")
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := limiter.Consume(ctx, tx, request); err != nil {
			return err
		}
		result, err := limiter.Check(ctx, pool, request)
		if err != nil {
			return err
		}
		balances, err := limiter.Balance(ctx, pool, request)
		if err != nil {
			return err
		}
		if result.Remaining != 10 || balances[0].Remaining != 10 {
			t.Errorf("%v and %v remain, want the committed 10", result.Remaining, balances[0].Remaining)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestOutsideTxOutlivesTheRollback also shows that each attempt consumes again.
func TestOutsideTxOutlivesTheRollback(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	var limiter ratelimit.Limiter
	failed, messages := ratelimit.TokenBucket("failed logins", 10, 10000*time.Hour), ratelimit.TokenBucket("messages", 10, 10000*time.Hour)
	errAbandoned := errors.New("abandoned")
	attempts := 0
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		attempts++
		if _, err := limiter.Consume(ctx, tx, messages.Key("ann"), messages.Key("held")); err != nil {
			return err
		}
		if _, err := limiter.Consume(ratelimit.OutsideTx(ctx), pool, failed.Key("ann")); err != nil {
			return err
		}
		if attempts < 3 {
			_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
			return err
		}
		for what, begin := range beginning(&limiter, messages, pool) {
			if err := begin(ratelimit.OutsideTx(ctx)); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		// A transaction begun with such a context refuses its own pool again.
		err := limiter.InTx(ratelimit.OutsideTx(ctx), pool, func(ctx context.Context, _ pgx.Tx) error {
			_, err := limiter.Consume(ctx, pool, failed.Key("ann"))
			return err
		})
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%v, want the inner transaction's pool refused", err)
		}
		// The call waits for the row that the transaction holds, until its context is over.
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		if _, err := limiter.Consume(ratelimit.OutsideTx(short), pool, messages.Key("held")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v, want a wait for the transaction's row", err)
		}
		return errAbandoned
	})
	if !errors.Is(err, errAbandoned) || attempts != 3 {
		t.Fatalf("%d attempts: %v", attempts, err)
	}
	for want, limit := range map[float64]ratelimit.Limit{7: failed, 10: messages} {
		if left := harness.ReadBalance(t, &limiter, pool, limit.Key("ann")); left < want || left > want+0.01 {
			t.Errorf("%s: %v remain, want %v", limit.Name(), left, want)
		}
	}
}

// wrappedPool is a pool inside an application's type.
type wrappedPool struct{ *pgxpool.Pool }

// TestPoolsThatAreNotRecognized: they behave as the docs of OutsideTx say.
func TestPoolsThatAreNotRecognized(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	other := harness.Connect(t, pool.Config().ConnString(), 1)
	var limiter ratelimit.Limiter
	request := ratelimit.TokenBucket("messages", 1000, time.Hour).Key("ann")
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	err = limiter.InTx(t.Context(), pool, func(ctx context.Context, _ pgx.Tx) error {
		for _, db := range []ratelimit.DB{wrappedPool{pool}, &wrappedPool{pool}, other, conn, conn.Conn()} {
			writes(ctx, t, &limiter, request, db)
		}
		writes(t.Context(), t, &limiter, request, pool)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = limiter.InTx(t.Context(), conn, func(ctx context.Context, _ pgx.Tx) error {
		writes(ctx, t, &limiter, request, conn) // it is in the transaction
		writes(ctx, t, &limiter, ratelimit.TokenBucket("messages", 1000, time.Hour).Key("bob"), pool)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

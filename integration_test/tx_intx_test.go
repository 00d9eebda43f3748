package integration_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// newJobs makes a pool with a table of business rows.
func newJobs(t *testing.T, conns int) *pgxpool.Pool {
	t.Helper()
	pool := newPool(t, conns)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE jobs (n int PRIMARY KEY, done int NOT NULL DEFAULT 0); INSERT INTO jobs VALUES (1), (2)"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		eventually(t, "every connection is given back", func() bool { return pool.Stat().AcquiredConns() == 0 }) // a broken connection takes a little longer
	})
	return pool
}

func jobs(t *testing.T, pool *pgxpool.Pool, sql string) (n int) {
	t.Helper()
	if err := pool.QueryRow(context.WithoutCancel(t.Context()), "SELECT "+sql+" FROM jobs").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// conflict is a function for InTx that conflicts every time.
func conflict(limiter *ratelimit.Limiter, pool *pgxpool.Pool, limit ratelimit.Limit, attempts *int) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		*attempts++
		if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (3)"); err != nil {
			return err
		}
		if _, err := limiter.Charge(ratelimit.OutsideTx(ctx), pool, limit.Global()); err != nil {
			return err
		}
		_, err := limiter.Charge(ctx, tx, limit.Global())
		return err
	}
}

// TestNestedRetriesDoNotMultiply: after an inner transaction has used up its attempts, the outer one is not retried.
func TestNestedRetriesDoNotMultiply(t *testing.T) {
	t.Parallel()
	pool := newJobs(t, 4)
	var limiter ratelimit.Limiter
	inner := func(ctx context.Context) error {
		err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
			return err
		}, ratelimit.Attempts(2))
		return fmt.Errorf("wrapped: %w", err)
	}
	outer := map[string]func(once func(ctx context.Context) error) error{
		"Retry": func(once func(ctx context.Context) error) error {
			return new(ratelimit.Limiter).Retry(t.Context(), once)
		},
		"InTx": func(once func(ctx context.Context) error) error {
			return limiter.InTx(t.Context(), pool, func(ctx context.Context, _ pgx.Tx) error { return once(ctx) })
		},
	}
	for name, retry := range outer {
		calls := 0
		err := retry(func(ctx context.Context) error { calls++; return inner(ctx) })
		if calls != 1 || !gaveUpAfter(err, 2) || sqlState(err) != "40001" {
			t.Errorf("%s: %d calls, %v", name, calls, err)
		}
	}

	// A Coalescer retries by itself.
	_, err := pool.Exec(t.Context(), `CREATE SEQUENCE tries;
		CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN PERFORM nextval(''tries''); RAISE serialization_failure USING DETAIL = ''Reason code: none''; END';
		CREATE TRIGGER conflict BEFORE INSERT ON rate_limits FOR EACH ROW EXECUTE FUNCTION conflict()`)
	if err != nil {
		t.Fatal(err)
	}
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	calls := 0
	err = new(ratelimit.Limiter).Retry(t.Context(), func(ctx context.Context) error {
		calls++
		_, err := limiter.Consume(ctx, coalescer, ratelimit.TokenBucket("messages", 10, time.Hour).Key("ann"))
		return err
	})
	var tries int
	if err := pool.QueryRow(t.Context(), "SELECT last_value FROM tries").Scan(&tries); err != nil {
		t.Fatal(err)
	}
	if want := `ratelimit: consume: limit "messages": attempts ran out after 30: ERROR: serialization_failure (SQLSTATE 40001): Reason code: none`; calls != 1 || tries != 30 ||
		!errors.Is(err, ratelimit.ErrAttemptsExhausted) || err.Error() != want {
		t.Errorf("%d calls, %d tries: %v, want %s", calls, tries, err, want)
	}
}

func TestInTxEndsWithItsContext(t *testing.T) {
	t.Parallel()
	pool := newJobs(t, 4)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("messages", 10, time.Hour)

	t.Run("during a pause", func(t *testing.T) {
		reason := errors.New("the caller went home")
		ctx, cancel := context.WithCancelCause(t.Context())
		attempts := 0
		lose := conflict(&limiter, pool, limit, &attempts)
		err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			err := lose(ctx, tx)
			if attempts == 2 {
				cancel(reason)
			}
			return err
		})
		var pgErr *pgconn.PgError
		if !gaveUpAfter(err, 2) || !errors.Is(err, context.Canceled) || !errors.Is(err, reason) || !errors.As(err, &pgErr) {
			t.Errorf("%d attempts, %v", attempts, err)
		}
	})
	t.Run("before it begins", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := limiter.InTx(ctx, pool, func(context.Context, pgx.Tx) error { t.Error("called"); return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
	t.Run("in the function", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (4)"); err != nil {
				return err
			}
			cancel()
			_, err := tx.Exec(ctx, "SELECT 1")
			return err
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	})
	t.Run("between two statements", func(t *testing.T) { // it is rolled back, and its connection can be used again
		ctx, cancel := context.WithCancel(t.Context())
		var conn *pgx.Conn
		err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			conn = tx.Conn()
			_, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (6)")
			cancel()
			return cmp.Or(err, ctx.Err())
		})
		if !errors.Is(err, context.Canceled) || conn.IsClosed() {
			t.Errorf("%v, closed: %v", err, conn.IsClosed())
		}
	})
	t.Run("before COMMIT", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var conn *pgx.Conn
		err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			conn = tx.Conn()
			_, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (5)")
			cancel()
			return err
		})
		if !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrUnknownOutcome) || conn.IsClosed() {
			t.Errorf("%v, closed: %v", err, conn.IsClosed())
		}
	})
	if n := jobs(t, pool, "count(*)"); n != 2 {
		t.Errorf("%d rows: something was committed", n)
	}
}

func TestInTxReturnsOtherErrorsAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := newJobs(t, 2)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("messages", 1, time.Hour)
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("denied")); err != nil {
		t.Fatal(err)
	}
	mine := errors.New("mine")
	for name, row := range map[string]struct {
		then  func(ctx context.Context, tx pgx.Tx) error
		check func(err error) bool
	}{
		"its own error": {
			func(context.Context, pgx.Tx) error { return mine },
			func(err error) bool { return err == mine }, //nolint:errorlint // it must not be wrapped
		},
		"a wrapped error": {
			func(context.Context, pgx.Tx) error { return fmt.Errorf("what I did: %w", mine) },
			func(err error) bool { return errors.Is(err, mine) && err.Error() == "what I did: mine" },
		},
		"a denial": {
			func(ctx context.Context, tx pgx.Tx) error {
				_, err := limiter.Consume(ctx, tx, limit.Key("denied"))
				return err
			},
			func(err error) bool { return errors.As(err, new(*ratelimit.DeniedError)) },
		},
		"a unique violation": {
			func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (1)")
				return err
			},
			func(err error) bool { return sqlState(err) == "23505" },
		},
		"a COMMIT without an answer": { // it may be committed, so it is not retried
			func(_ context.Context, tx pgx.Tx) error { return tx.Conn().PgConn().Conn().Close() },
			func(err error) bool {
				return err != nil && sqlState(err) == "" && strings.HasPrefix(err.Error(), "ratelimit: commit: ") && !errors.Is(err, ratelimit.ErrAttemptsExhausted)
			},
		},
		"a conflict that it hid": {
			func(context.Context, pgx.Tx) error { return errors.New((&pgconn.PgError{Code: "40001"}).Error()) },
			func(err error) bool { return err != nil && !errors.Is(err, ratelimit.ErrAttemptsExhausted) },
		},
	} {
		attempts := 0
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			attempts++
			if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (3)"); err != nil {
				return err
			}
			if _, err := limiter.Consume(ctx, tx, limit.Key("rolled back")); err != nil {
				return err
			}
			return row.then(ctx, tx)
		})
		if !row.check(err) || attempts != 1 {
			t.Errorf("%s: %d attempts, %v", name, attempts, err)
		}
		if n := jobs(t, pool, "count(*)"); n != 2 {
			t.Errorf("%s: %d rows, want it rolled back", name, n)
		}
		if result, err := limiter.Check(t.Context(), pool, limit.Key("rolled back")); err != nil || !result.OK {
			t.Errorf("%s: the tokens did not come back: %+v, %v", name, result, err)
		}
	}
}

// Two limits and a business row, many transactions at once on few connections: each is all there or not at all, and none is
// lost.
func TestInTxUnderContentionKeepsEverythingTogether(t *testing.T) {
	t.Parallel()
	pool := newJobs(t, 4)
	limiter := ratelimit.Limiter{Clock: func() time.Time { return noon }}
	limit := ratelimit.TokenBucket("jobs", 20, time.Hour)
	var granted, denied atomic.Int64
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 5 {
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES ($1)", 100+g*10+i); err != nil {
						return err
					}
					_, err := limiter.Consume(ctx, tx, limit.Global())
					return err
				}, ratelimit.Attempts(1000))
				switch {
				case err == nil:
					granted.Add(1)
				case errors.As(err, new(*ratelimit.DeniedError)):
					denied.Add(1)
				default:
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if granted.Load() != 20 || denied.Load() != 20 {
		t.Errorf("%d granted, %d denied, want 20 each", granted.Load(), denied.Load())
	}
	if n := jobs(t, pool, "count(*)"); n != 22 {
		t.Errorf("%d rows, want 22", n)
	}
}

func TestInTxSaysHowManyAttemptsItTookWhenTheContextEndsWithinOne(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	var limiter ratelimit.Limiter
	ctx, cancel := context.WithCancel(t.Context())
	attempts := 0
	err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if attempts++; attempts == 3 {
			cancel()
			_, err := tx.Exec(ctx, "SELECT 1")
			return err
		}
		_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
		return err
	})
	if !gaveUpAfter(err, 3) || !errors.Is(err, context.Canceled) || sqlState(err) != "40001" {
		t.Errorf("%v, want the error of 3 attempts, with the cancellation and the conflict", err)
	}
	eventually(t, "every connection is given back", func() bool { return pool.Stat().AcquiredConns() == 0 }) // a broken connection takes a little longer
}

// In a transaction, BEGIN causes only a warning, and COMMIT would end the outer transaction.
func TestAConnectionInATransactionIsRefused(t *testing.T) {
	t.Parallel()
	pool := newJobs(t, 2)
	var limiter ratelimit.Limiter
	boom := errors.New("boom")
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "UPDATE jobs SET done = done + 1"); err != nil {
			return err
		}
		err := limiter.InTx(ctx, tx.Conn(), func(context.Context, pgx.Tx) error {
			t.Error("the function was run")
			return nil
		})
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("InTx: %v", err)
		}
		var batch pgx.Batch
		batch.Queue("UPDATE jobs SET done = done + 1")
		if err := limiter.SendTx(ctx, tx.Conn(), &batch); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("SendTx: %v", err)
		}
		return boom
	})
	if n := jobs(t, pool, "sum(done)"); !errors.Is(err, boom) || n != 0 {
		t.Errorf("%v, done %d times; want boom and 0", err, n)
	}
}

package tx_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestNestedRetriesDoNotMultiply: after an inner transaction has used up its attempts, the outer one is not retried.
func TestNestedRetriesDoNotMultiply(t *testing.T) {
	t.Parallel()
	pool := harness.NewJobs(t, 4)
	var limiter ratelimit.Limiter
	inner := func(ctx context.Context) error {
		err := limiter.InTx(ratelimit.OutsideTx(ctx), pool, func(ctx context.Context, tx pgx.Tx) error {
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
		if calls != 1 || !harness.GaveUpAfter(err, 2) || harness.SQLState(err) != "40001" {
			t.Errorf("%s: %d calls, %v", name, calls, err)
		}
	}

	// A Coalescer retries by itself.
	_, err := pool.Exec(t.Context(), `CREATE SEQUENCE tries;
		CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN PERFORM nextval(''tries''); RAISE serialization_failure USING DETAIL = ''Reason code: none''; END';
		CREATE TRIGGER conflict BEFORE INSERT ON ratelimit.limits FOR EACH ROW EXECUTE FUNCTION conflict()`)
	if err != nil {
		t.Fatal(err)
	}
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
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

// A context that ends between statements rolls back, and the connection can be used again.
func TestInTxKeepsTheConnectionWhenItsContextEnds(t *testing.T) {
	t.Parallel()
	pool := harness.NewJobs(t, 4)
	for _, end := range []error{nil, context.Canceled} { // before COMMIT, and in the function
		ctx, cancel := context.WithCancel(t.Context())
		var conn *pgx.Conn
		err := new(ratelimit.Limiter).InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			conn = tx.Conn()
			_, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (5)")
			cancel()
			return cmp.Or(err, end)
		})
		if !errors.Is(err, context.Canceled) || conn.IsClosed() {
			t.Errorf("%v, closed: %v", err, conn.IsClosed())
		}
	}
}

package integration_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// onEveryHandle runs a behaviour test on every handle that a limiter works on, in a schema of its own each: a pool and a
// connection (each call its own transaction), and a transaction at each isolation level, which is committed at the end and
// must still be usable then.
func onEveryHandle(t *testing.T, test func(t *testing.T, db ratelimit.DB)) {
	t.Helper()
	t.Run("pool", func(t *testing.T) {
		t.Parallel()
		test(t, newPool(t, 2))
	})
	t.Run("conn", func(t *testing.T) {
		t.Parallel()
		test(t, acquire(t, newPool(t, 1)))
	})
	for _, level := range levels {
		t.Run("tx "+string(level), func(t *testing.T) {
			t.Parallel()
			tx, err := acquire(t, newPool(t, 1)).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			test(t, tx)
			if err := tx.Commit(t.Context()); err != nil {
				t.Errorf("the transaction was not usable at the end: %v", err)
			}
		})
	}
}

func acquire(t *testing.T, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Release)
	return conn.Conn()
}

// clock is a clock that stands still until it is set.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time          { return c.now }
func (c *clock) Advance(d time.Duration) { c.now = c.now.Add(d) }

// noon is an ordinary instant.
var noon = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func newLimiter() (*ratelimit.Limiter, *clock) {
	c := &clock{now: noon}
	return &ratelimit.Limiter{Clock: c.Now}, c
}

// denied says whether an error is a denial.
func denied(err error) bool {
	var exceeded *ratelimit.ExceededError
	return errors.As(err, &exceeded)
}

// sqlState is the SQLSTATE of an error, or empty.
func sqlState(err error) string {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code
	}
	return ""
}

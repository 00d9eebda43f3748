package integration_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// onEveryHandle runs a behaviour test on every handle that a limiter works on, with no limits there before: pools and
// connections (each call its own transaction), and transactions, which are committed at the end and must still be usable then;
// on pgx and on database/sql with two drivers. pgx's transactions come at each isolation level.
func onEveryHandle(t *testing.T, test func(t *testing.T, db ratelimit.DB)) {
	t.Helper()
	t.Run("pool", func(t *testing.T) {
		t.Parallel()
		test(t, connect(t, sweptSchema(t), 2))
	})
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run("pool in mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, reconfigured(t, connect(t, sweptSchema(t), 2), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
		})
	}
	t.Run("conn", func(t *testing.T) {
		t.Parallel()
		test(t, acquire(t, connect(t, sweptSchema(t), 1)))
	})
	for _, level := range levels {
		t.Run("tx "+string(level), func(t *testing.T) {
			t.Parallel()
			tx, err := acquire(t, connect(t, sweptSchema(t), 1)).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			test(t, tx)
			if err := tx.Commit(t.Context()); err != nil {
				t.Errorf("the transaction was not usable at the end: %v", err)
			}
		})
	}
	for _, driver := range drivers {
		onEverySQLHandle(t, driver, test)
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

// serverPID is the process of the server in which a transaction runs. (The connection may know PgBouncer's instead.)
func serverPID(t testing.TB, tx ratelimit.DB) (pid int) {
	t.Helper()
	if err := tx.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

// sqlState is the SQLSTATE of an error, or empty.
func sqlState(err error) string {
	var sqlErr interface{ SQLState() string } // *pgconn.PgError, *pq.Error
	if errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

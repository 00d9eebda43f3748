package harness

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
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

// Refusing is a DB on which every statement fails with this error of the server.
type Refusing struct{ Code string }

// QueryRow fails.
func (r Refusing) QueryRow(context.Context, string, ...any) pgx.Row { return r }

// Scan has the error.
func (r Refusing) Scan(...any) error { return &pgconn.PgError{Code: r.Code, Message: "no"} }

// Checked is a pool on which the check of the schema succeeds, and db answers the rest.
type Checked struct {
	*pgxpool.Pool
	Schema, DB ratelimit.DB
}

// QueryRow asks one of the two.
func (c Checked) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if strings.Contains(sql, "ratelimit.schema()") {
		return c.Schema.QueryRow(ctx, sql, args...)
	}
	return c.DB.QueryRow(ctx, sql, args...)
}

// Handle is a DB on which the tests also run their own statements.
type Handle interface {
	ratelimit.DB
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Querier is a handle of pgx.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// The longest names and keys that a limit may have.
const (
	MaxNameLen = 255  // bytes
	MaxKeyLen  = 1024 // bytes, of all parts together
	MaxShards  = 100
)

// TxBeginner is the argument of InTx, sqlTxBeginner of InSQLTx.
type (
	TxBeginner interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}
	sqlTxBeginner interface {
		BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
	}
)

// OnEveryHandle runs a behaviour test on every handle that a limiter works on: pools and connections, where each call is
// its own transaction, and transactions. It runs on pgx, at each isolation level, and on database/sql with two drivers.
// There are no limits before the test. A transaction is committed at the end, and must still be usable then. What a handle
// does depends on PgBouncer, but not on the version of PostgreSQL. With -short, three handles stand for all.
func OnEveryHandle(t *testing.T, test func(t *testing.T, db Handle)) {
	t.Helper()
	t.Run("pool", func(t *testing.T) {
		t.Parallel()
		test(t, ReusedPool(t, 2, 0))
	})
	if testing.Short() && !Server.Pooled() {
		onTx(t, pgx.Serializable, test)
		onSQLPool(t, "postgres", test)
		return
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run("pool in mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, ReusedPool(t, 2, mode))
		})
	}
	t.Run("conn", func(t *testing.T) {
		t.Parallel()
		test(t, Acquire(t, ReusedPool(t, 1, 0)))
	})
	for _, level := range Levels {
		onTx(t, level, test)
	}
	for _, driver := range Drivers {
		onEverySQLHandle(t, driver, test)
	}
}

// onTx runs a behaviour test in a transaction of pgx.
func onTx(t *testing.T, level pgx.TxIsoLevel, test func(t *testing.T, db Handle)) {
	t.Helper()
	t.Run("tx "+string(level), func(t *testing.T) {
		t.Parallel()
		tx, err := Acquire(t, ReusedPool(t, 1, 0)).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		if err != nil {
			t.Fatal(err)
		}
		test(t, tx)
		if err := tx.Commit(t.Context()); err != nil {
			t.Errorf("the transaction was not usable at the end: %v", err)
		}
	})
}

// ExecModes are the query modes of pgx.
var ExecModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// InQueryModes runs a test in each query mode of pgx, on a pool of one connection to what open makes.
func InQueryModes(t *testing.T, open func(t testing.TB, conns int) *pgxpool.Pool, test func(t *testing.T, pool *pgxpool.Pool)) {
	t.Helper()
	for _, mode := range ExecModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			NeedsMode(t, mode)
			test(t, Reconfigured(t, open(t, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
		})
	}
}

// Reconfigured makes another pool for the same database.
func Reconfigured(t *testing.T, pool *pgxpool.Pool, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	change(config)
	other, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Close)
	return other
}

// WrapConns wraps a pool's connections.
func WrapConns(c *pgxpool.Config, wrap func(conn net.Conn) net.Conn) {
	dial := c.ConnConfig.DialFunc
	c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return wrap(conn), nil
	}
}

// Acquire takes a connection for the test.
func Acquire(t *testing.T, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Release)
	return conn.Conn()
}

// Clock is a clock that stands still until it is set.
type Clock struct{ At time.Time }

// Now is what a Limiter asks.
func (c *Clock) Now() time.Time { return c.At }

// Advance lets time go on.
func (c *Clock) Advance(d time.Duration) { c.At = c.At.Add(d) }

// Noon is an ordinary instant.
var Noon = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// NewLimiter makes a limiter whose clock stands at noon.
func NewLimiter() (*ratelimit.Limiter, *Clock) {
	c := &Clock{At: Noon}
	return &ratelimit.Limiter{Clock: c.Now}, c
}

// Denied reports whether an error is a denial.
func Denied(err error) bool {
	var exceeded *ratelimit.DeniedError
	return errors.As(err, &exceeded)
}

// GaveUpAfter reports whether an error says that a transaction gave up after so many attempts.
func GaveUpAfter(err error, attempts int) bool {
	return errors.Is(err, ratelimit.ErrAttemptsExhausted) && strings.Contains(err.Error(), fmt.Sprintf("ratelimit: attempts ran out after %d: ", attempts))
}

// ServerPID returns the pid of the backend that runs a transaction. (The connection may know only PgBouncer's pid.)
func ServerPID(t testing.TB, tx ratelimit.DB) (pid int) {
	t.Helper()
	if err := tx.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

// SQLState is the SQLSTATE of an error, or empty.
func SQLState(err error) string {
	var sqlErr interface{ SQLState() string } // *pgconn.PgError, *pq.Error
	if errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

// Eventually waits until so returns true.
func Eventually(t testing.TB, what string, so func() bool) {
	t.Helper()
	for until := time.Now().Add(Patience); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Errorf("timed out waiting until %s", what)
			return
		}
	}
}

// Waiting waits until so many sessions wait for a lock on a transaction that has written to the test's table.
func Waiting(t *testing.T, pool *pgxpool.Pool, sessions int) {
	t.Helper()
	for until := time.Now().Add(Patience); time.Now().Before(until); time.Sleep(time.Millisecond) {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT w.pid) FROM pg_locks AS w
			JOIN pg_locks AS l ON l.pid = w.pid AND l.relation = 'ratelimit.limits'::regclass AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) WHERE NOT w.granted`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		if n >= sessions {
			return
		}
	}
	t.Fatalf("want %d sessions waiting for a lock", sessions)
}

// WaitingFor waits until a session waits for a transaction.
func WaitingFor(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx) {
	t.Helper()
	pid := ServerPID(t, tx)
	for n, deadline := 0, time.Now().Add(Patience); n == 0; time.Sleep(time.Millisecond) {
		err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))", pid).Scan(&n)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("nobody waits: %v", err)
		}
	}
}

// Coalesce makes many calls at once on a Coalescer, so that it decides some of them together. It closes the Coalescer and
// returns one of the errors.
func Coalesce(ctx context.Context, coalescer *ratelimit.Coalescer, call func(ctx context.Context, db ratelimit.DB) error) error {
	defer func() { _ = coalescer.Close(ctx) }() // a failing database may have lost what was ahead
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 4 {
				if err := call(ctx, coalescer); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Succeeds ends the test if something has failed.
func Succeeds(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// MustExec runs one or several statements.
func MustExec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	err := pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		_, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// TableOf returns all rows as text.
func TableOf(t *testing.T, pool *pgxpool.Pool) (rows string) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(r::text, E'\n' ORDER BY name, key, shard), '') FROM ratelimit.limits AS r`).Scan(&rows); err != nil {
		t.Fatal(err)
	}
	return rows
}

// ReceiptOf makes a receipt for requests granted at an instant, by limits that were full before. They run at once.
func ReceiptOf(at time.Time, requests ...ratelimit.Request) ratelimit.Receipt {
	unsent, _ := new(ratelimit.Limiter).Consume(context.Background(), nil, requests...)
	type part struct {
		Limit  string  `json:"limit"`
		Key    string  `json:"key"`
		Count  float64 `json:"count"`
		Held   float64 `json:"held"`
		Rows   int     `json:"rows"`
		Shards int     `json:"shards"`
	}
	var parts []part
	for _, s := range unsent.Requests {
		c := s.Limit.Config()
		if i := slices.IndexFunc(parts, func(p part) bool { return p.Limit == s.Limit.Name() && p.Key == s.Key }); i >= 0 {
			parts[i].Count += s.Count
			parts[i].Held -= s.Count
			continue
		}
		parts = append(parts, part{s.Limit.Name(), s.Key, s.Count, *c.Capacity - s.Count, c.Shards, c.Shards})
	}
	text, err := json.Marshal(map[string]any{"v": 1, "at": at, "runAt": at, "taken": parts})
	if err != nil { // JSON cannot write this count or instant, so no receipt has it
		return "{}"
	}
	return ratelimit.Receipt(text)
}

// Blocked waits until another session waits for a lock of the transaction.
func Blocked(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx, n int) {
	t.Helper()
	pid := ServerPID(t, tx)
	for until := time.Now().Add(Patience); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if Scan[int](t, pool, fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE %d = ANY (pg_blocking_pids(pid)) OR datname = current_database() AND wait_event_type = 'Lock' AND query ~ 'ratelimit._wire_|^-- name: Update'", pid)) >= n {
			return
		}
	}
	t.Fatal("nobody waits")
}

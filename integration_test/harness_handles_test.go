package integration_test

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

// handle is a DB on which the tests also run their own statements.
type handle interface {
	ratelimit.DB
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// querier is a handle of pgx.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// The longest names and keys that a limit may have.
const (
	maxNameLen = 255  // bytes
	maxKeyLen  = 1024 // bytes, of all parts together
	maxShards  = 100
)

// txBeginner is the argument of InTx, sqlTxBeginner of InSQLTx.
type (
	txBeginner interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}
	sqlTxBeginner interface {
		BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
	}
)

// onEveryHandle runs a behaviour test on every handle that a limiter works on: pools and connections, where each call is
// its own transaction, and transactions. It runs on pgx, at each isolation level, and on database/sql with two drivers.
// There are no limits before the test. A transaction is committed at the end, and must still be usable then. What a handle
// does depends on PgBouncer, but not on the version of PostgreSQL. With -short, three handles stand for all.
func onEveryHandle(t *testing.T, test func(t *testing.T, db handle)) {
	t.Helper()
	t.Run("pool", func(t *testing.T) {
		t.Parallel()
		test(t, reusedPool(t, 2, 0))
	})
	if testing.Short() && !server.Pooled() {
		onTx(t, pgx.Serializable, test)
		onSQLPool(t, "postgres", test)
		return
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run("pool in mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, reusedPool(t, 2, mode))
		})
	}
	t.Run("conn", func(t *testing.T) {
		t.Parallel()
		test(t, acquire(t, reusedPool(t, 1, 0)))
	})
	for _, level := range levels {
		onTx(t, level, test)
	}
	for _, driver := range drivers {
		onEverySQLHandle(t, driver, test)
	}
}

// onTx runs a behaviour test in a transaction of pgx.
func onTx(t *testing.T, level pgx.TxIsoLevel, test func(t *testing.T, db handle)) {
	t.Helper()
	t.Run("tx "+string(level), func(t *testing.T) {
		t.Parallel()
		tx, err := acquire(t, reusedPool(t, 1, 0)).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		if err != nil {
			t.Fatal(err)
		}
		test(t, tx)
		if err := tx.Commit(t.Context()); err != nil {
			t.Errorf("the transaction was not usable at the end: %v", err)
		}
	})
}

// execModes are the query modes of pgx.
var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// inQueryModes runs a test in each query mode of pgx, on a pool of one connection to what open makes.
func inQueryModes(t *testing.T, open func(t testing.TB, conns int) *pgxpool.Pool, test func(t *testing.T, pool *pgxpool.Pool)) {
	t.Helper()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			needsMode(t, mode)
			test(t, reconfigured(t, open(t, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }))
		})
	}
}

// reconfigured makes another pool for the same database.
func reconfigured(t *testing.T, pool *pgxpool.Pool, change func(*pgxpool.Config)) *pgxpool.Pool {
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

// wrapConns wraps a pool's connections.
func wrapConns(c *pgxpool.Config, wrap func(conn net.Conn) net.Conn) {
	dial := c.ConnConfig.DialFunc
	c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return wrap(conn), nil
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

// denied reports whether an error is a denial.
func denied(err error) bool {
	var exceeded *ratelimit.DeniedError
	return errors.As(err, &exceeded)
}

// gaveUpAfter reports whether an error says that a transaction gave up after so many attempts.
func gaveUpAfter(err error, attempts int) bool {
	return errors.Is(err, ratelimit.ErrAttemptsExhausted) && strings.Contains(err.Error(), fmt.Sprintf("ratelimit: attempts ran out after %d: ", attempts))
}

// serverPID returns the pid of the backend that runs a transaction. (The connection may know only PgBouncer's pid.)
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

// eventually waits until so returns true.
func eventually(t testing.TB, what string, so func() bool) {
	t.Helper()
	for until := time.Now().Add(patience); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Errorf("timed out waiting until %s", what)
			return
		}
	}
}

// waiting waits until so many sessions wait for a lock on a transaction that has written to the test's table.
func waiting(t *testing.T, pool *pgxpool.Pool, sessions int) {
	t.Helper()
	for until := time.Now().Add(patience); time.Now().Before(until); time.Sleep(time.Millisecond) {
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

// waitingFor waits until a session waits for a transaction.
func waitingFor(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx) {
	t.Helper()
	pid := serverPID(t, tx)
	for n, deadline := 0, time.Now().Add(patience); n == 0; time.Sleep(time.Millisecond) {
		err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))", pid).Scan(&n)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("nobody waits: %v", err)
		}
	}
}

// coalesce makes many calls at once on a Coalescer, so that it decides some of them together. It closes the Coalescer and
// returns one of the errors.
func coalesce(ctx context.Context, coalescer *ratelimit.Coalescer, call func(ctx context.Context, db ratelimit.DB) error) error {
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

// succeeds ends the test if something has failed.
func succeeds(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mustExec runs one or several statements.
func mustExec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	err := pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		_, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// tableOf returns all rows as text.
func tableOf(t *testing.T, pool *pgxpool.Pool) (rows string) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT coalesce(string_agg(r::text, E'\n' ORDER BY name, key, shard), '') FROM ratelimit.limits AS r`).Scan(&rows); err != nil {
		t.Fatal(err)
	}
	return rows
}

// receiptOf makes a receipt for requests granted at an instant, by limits that were full before. They run at once.
func receiptOf(at time.Time, requests ...ratelimit.Request) ratelimit.Receipt {
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

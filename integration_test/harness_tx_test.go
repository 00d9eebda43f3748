package integration_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// txWay is a way to run a function in a transaction, and to run it again after a conflict.
type txWay struct {
	limiter *ratelimit.Limiter
	pool    *pgxpool.Pool // to look at the same database, which has the table jobs
	inUse   func() int    // connections that are taken
	begins  bool          // the library begins the transaction, so there are Isolation and Hot

	// in runs the function. Its context must not be used for other transactions on the same pool.
	in func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error

	// another is another process on the same database: it has a limiter and connections of its own.
	another func(t *testing.T) txWay
}

// levels are the isolation levels that it can run at, each with the options for it.
func (w txWay) levels() map[pgx.TxIsoLevel][]ratelimit.TxOption {
	if !w.begins { // whoever begins it says at which
		return map[pgx.TxIsoLevel][]ratelimit.TxOption{pgx.Serializable: nil}
	}
	options := map[pgx.TxIsoLevel][]ratelimit.TxOption{}
	for _, level := range levels {
		options[level] = []ratelimit.TxOption{ratelimit.Isolation(level)}
	}
	return options
}

// nobodyQueues checks what must hold when no transaction runs.
func (w txWay) nobodyQueues(t *testing.T) {
	t.Helper()
	if n := queued(w.limiter); n != 0 {
		t.Errorf("%d queues are left behind", n)
	}
	// A connection whose wait was cancelled is closed in the background.
	eventually(t, "no connection is taken", func() bool { return w.inUse() == 0 })
}

// newJobs makes a pool with a table of business rows.
func newJobs(t testing.TB, conns int) *pgxpool.Pool {
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

// inWay runs a test in a way. At the end, nobody may queue.
func inWay(t *testing.T, name string, open func(t *testing.T, w *txWay), test func(t *testing.T, w txWay)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		pool := newJobs(t, 4)
		var process func(t *testing.T) txWay
		process = func(t *testing.T) txWay {
			w := txWay{limiter: new(ratelimit.Limiter), pool: pool, begins: true, another: process}
			open(t, &w)
			return w
		}
		w := process(t)
		test(t, w)
		w.nobodyQueues(t)
	})
}

// everyTx runs a test of transactions in every way: InTx, InSQLTx, and Retry with a transaction of an ORM, on every handle that they take.
func everyTx(t *testing.T, conns int, test func(t *testing.T, w txWay)) {
	t.Helper()
	everyBegunTx(t, conns, test)
	for _, driver := range drivers {
		inWay(t, "Retry of an ORM with "+driver, func(t *testing.T, w *txWay) {
			db := openSQLWay(t, w, driver, conns)
			w.begins = false
			w.in = func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error {
				return w.limiter.Retry(ctx, func(ctx context.Context) error {
					tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
					if err != nil {
						return err
					}
					defer tx.Rollback() //nolint:errcheck // after COMMIT there is nothing to roll back
					if err := fn(ctx, onSQL(tx)); err != nil {
						return err
					}
					return tx.Commit()
				}, options...)
			}
		}, test)
	}
}

// everyBegunTx is the part of everyTx in which the library begins the transaction: InTx and InSQLTx.
func everyBegunTx(t *testing.T, conns int, test func(t *testing.T, w txWay)) {
	t.Helper()
	none := func() int { return 0 }
	inTx := func(w *txWay, db txBeginner) {
		w.in = func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error {
			return w.limiter.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx) }, options...)
		}
	}
	inWay(t, "InTx on a pool", func(t *testing.T, w *txWay) {
		pool := connect(t, w.pool.Config().ConnString(), conns)
		w.inUse = func() int { return int(pool.Stat().AcquiredConns()) }
		inTx(w, pool)
	}, test)
	if conns == 1 {
		inWay(t, "InTx on a pool's connection", func(t *testing.T, w *txWay) {
			conn, err := w.pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(conn.Release)
			w.inUse = none
			inTx(w, conn)
		}, test)
		inWay(t, "InTx on a connection", func(t *testing.T, w *txWay) {
			w.inUse = none
			inTx(w, acquire(t, w.pool))
		}, test)
	}
	for _, driver := range drivers {
		inSQLTx := func(w *txWay, db sqlTxBeginner) {
			w.in = func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error {
				return w.limiter.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error { return fn(ctx, onSQL(tx)) }, options...)
			}
		}
		inWay(t, "InSQLTx of "+driver, func(t *testing.T, w *txWay) { inSQLTx(w, openSQLWay(t, w, driver, conns)) }, test)
		if conns == 1 {
			inWay(t, "InSQLTx on a connection of "+driver, func(t *testing.T, w *txWay) {
				conn, err := openSQLWay(t, w, driver, conns).Conn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { conn.Close() }) //nolint:errcheck // returns it to the pool
				w.inUse = none
				inSQLTx(w, conn)
			}, test)
		}
	}
}

// openSQLWay opens the pool of database/sql of a way.
func openSQLWay(t *testing.T, w *txWay, driver string, conns int) *sql.DB {
	t.Helper()
	db := openSQL(t, driver, w.pool.Config().ConnString(), conns)
	w.inUse = func() int { return db.Stats().InUse }
	return db
}

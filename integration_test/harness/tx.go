package harness

import (
	"context"
	"database/sql"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// TxWay is a way to run a function in a transaction, and to run it again after a conflict.
type TxWay struct {
	Limiter *ratelimit.Limiter
	Pool    *pgxpool.Pool // to look at the same database, which has the table jobs
	InUse   func() int    // connections that are taken
	Begins  bool          // the library begins the transaction, so there are Isolation and Hot

	// In runs the function. Its context must not be used for other transactions on the same pool.
	In func(ctx context.Context, fn func(ctx context.Context, tx Handle) error, options ...ratelimit.TxOption) error

	// Another is another process on the same database: it has a limiter and connections of its own.
	Another func(t *testing.T) TxWay
}

// Levels are the isolation levels that it can run at, each with the options for it.
func (w TxWay) Levels() map[pgx.TxIsoLevel][]ratelimit.TxOption {
	if !w.Begins { // whoever begins it says at which
		return map[pgx.TxIsoLevel][]ratelimit.TxOption{pgx.Serializable: nil}
	}
	options := map[pgx.TxIsoLevel][]ratelimit.TxOption{}
	for _, level := range Levels {
		options[level] = []ratelimit.TxOption{ratelimit.Isolation(level)}
	}
	return options
}

// NobodyQueues checks what must hold when no transaction runs.
func (w TxWay) NobodyQueues(t *testing.T) {
	t.Helper()
	if n := Queued(w.Limiter); n != 0 {
		t.Errorf("%d queues are left behind", n)
	}
	// A connection whose wait was cancelled is closed in the background.
	Eventually(t, "no connection is taken", func() bool { return w.InUse() == 0 })
}

// NewJobs makes a pool with a table of business rows.
func NewJobs(t testing.TB, conns int) *pgxpool.Pool {
	t.Helper()
	pool := NewPool(t, conns)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE jobs (n int PRIMARY KEY, done int NOT NULL DEFAULT 0); INSERT INTO jobs VALUES (1), (2)"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		Eventually(t, "every connection is given back", func() bool { return pool.Stat().AcquiredConns() == 0 }) // a broken connection takes a little longer
	})
	return pool
}

// Jobs is an aggregate of the business rows.
func Jobs(t *testing.T, pool *pgxpool.Pool, sql string) (n int) {
	t.Helper()
	if err := pool.QueryRow(context.WithoutCancel(t.Context()), "SELECT "+sql+" FROM jobs").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// inWay runs a test in a way. At the end, nobody may queue.
func inWay(t *testing.T, name string, open func(t *testing.T, w *TxWay), test func(t *testing.T, w TxWay)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		pool := NewJobs(t, 4)
		var process func(t *testing.T) TxWay
		process = func(t *testing.T) TxWay {
			w := TxWay{Limiter: new(ratelimit.Limiter), Pool: pool, Begins: true, Another: process}
			open(t, &w)
			return w
		}
		w := process(t)
		test(t, w)
		w.NobodyQueues(t)
	})
}

// EveryTx runs a test of transactions in every way: InTx, InSQLTx, and Retry with a transaction of an ORM, on every handle that they take.
func EveryTx(t *testing.T, conns int, test func(t *testing.T, w TxWay)) {
	t.Helper()
	EveryBegunTx(t, conns, test)
	for _, driver := range Drivers {
		inWay(t, "Retry of an ORM with "+driver, func(t *testing.T, w *TxWay) {
			db := openSQLWay(t, w, driver, conns)
			w.Begins = false
			w.In = func(ctx context.Context, fn func(ctx context.Context, tx Handle) error, options ...ratelimit.TxOption) error {
				return w.Limiter.Retry(ctx, func(ctx context.Context) error {
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

// EveryBegunTx is the part of EveryTx in which the library begins the transaction: InTx and InSQLTx.
func EveryBegunTx(t *testing.T, conns int, test func(t *testing.T, w TxWay)) {
	t.Helper()
	none := func() int { return 0 }
	inTx := func(w *TxWay, db TxBeginner) {
		w.In = func(ctx context.Context, fn func(ctx context.Context, tx Handle) error, options ...ratelimit.TxOption) error {
			return w.Limiter.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx) }, options...)
		}
	}
	inWay(t, "InTx on a pool", func(t *testing.T, w *TxWay) {
		pool := Connect(t, w.Pool.Config().ConnString(), conns)
		w.InUse = func() int { return int(pool.Stat().AcquiredConns()) }
		inTx(w, pool)
	}, test)
	if conns == 1 {
		inWay(t, "InTx on a pool's connection", func(t *testing.T, w *TxWay) {
			conn, err := w.Pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(conn.Release)
			w.InUse = none
			inTx(w, conn)
		}, test)
		inWay(t, "InTx on a connection", func(t *testing.T, w *TxWay) {
			w.InUse = none
			inTx(w, Acquire(t, w.Pool))
		}, test)
	}
	for _, driver := range Drivers {
		inSQLTx := func(w *TxWay, db sqlTxBeginner) {
			w.In = func(ctx context.Context, fn func(ctx context.Context, tx Handle) error, options ...ratelimit.TxOption) error {
				return w.Limiter.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error { return fn(ctx, onSQL(tx)) }, options...)
			}
		}
		inWay(t, "InSQLTx of "+driver, func(t *testing.T, w *TxWay) { inSQLTx(w, openSQLWay(t, w, driver, conns)) }, test)
		if conns == 1 {
			inWay(t, "InSQLTx on a connection of "+driver, func(t *testing.T, w *TxWay) {
				conn, err := openSQLWay(t, w, driver, conns).Conn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { conn.Close() }) //nolint:errcheck // returns it to the pool
				w.InUse = none
				inSQLTx(w, conn)
			}, test)
		}
	}
}

// openSQLWay opens the pool of database/sql of a way.
func openSQLWay(t *testing.T, w *TxWay, driver string, conns int) *sql.DB {
	t.Helper()
	db := OpenSQL(t, driver, w.Pool.Config().ConnString(), conns)
	w.InUse = func() int { return db.Stats().InUse }
	return db
}

// Queue queues a call, and wants no error.
func Queue(t *testing.T, limiter *ratelimit.Limiter, batch *pgx.Batch, requests ...ratelimit.Request) *ratelimit.Result {
	t.Helper()
	result, err := limiter.QueueConsume(t.Context(), batch, requests...)
	if err != nil {
		t.Fatal(err)
	}
	if result.OK {
		t.Fatal("it is granted before it was sent")
	}
	return result
}

// WithoutAutovacuum is SQL that keeps a table from being vacuumed and analyzed, or its partitions.
func WithoutAutovacuum(table string) string { return Stored(table, "autovacuum_enabled = false") }

// Stored is SQL that sets a storage parameter of a table, or of its partitions.
func Stored(table, parameter string) string {
	return `DO $$ DECLARE t regclass; BEGIN
		FOR t IN SELECT c.oid FROM pg_class AS c LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
		          WHERE c.relkind = 'r' AND '` + table + `'::regclass IN (c.oid, i.inhparent) LOOP
			EXECUTE format('ALTER TABLE %s SET (` + parameter + `)', t);
		END LOOP;
	END $$`
}

// Queued returns the number of queues: of hot limits, keys and shards. Those that share a view count once.
func Queued(limiter *ratelimit.Limiter) int {
	return reflect.ValueOf(limiter).Elem().FieldByName("queues").FieldByName("byStripe").Len()
}

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
	pool    *pgxpool.Pool // to look at the same schema, which has the table jobs
	inUse   func() int    // connections that are taken
	begins  bool          // the library begins the transaction, so there are Isolation and Hot

	// in runs the function. Its context must not be used for other transactions on the same pool.
	in func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error
}

// everyTx runs a test of transactions in every way: InTx, InSQLTx, and Retry with a transaction of an ORM, on every handle that they take.
// At the end, all connections must be free.
func everyTx(t *testing.T, conns int, test func(t *testing.T, w txWay)) {
	t.Helper()
	way := func(name string, open func(t *testing.T, w *txWay)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := txWay{limiter: new(ratelimit.Limiter), pool: newJobs(t, 4), begins: true}
			open(t, &w)
			test(t, w)
		})
	}
	inTx := func(w *txWay, db txBeginner) {
		w.in = func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error {
			return w.limiter.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx) }, options...)
		}
	}
	way("InTx on a pool", func(t *testing.T, w *txWay) {
		pool := connect(t, w.pool.Config().ConnString(), conns)
		w.inUse = func() int { return int(pool.Stat().AcquiredConns()) }
		inTx(w, pool)
	})
	none := func() int { return 0 }
	if conns == 1 {
		way("InTx on a pool's connection", func(t *testing.T, w *txWay) {
			conn, err := w.pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(conn.Release)
			w.inUse = none
			inTx(w, conn)
		})
		way("InTx on a connection", func(t *testing.T, w *txWay) {
			w.inUse = none
			inTx(w, acquire(t, w.pool))
		})
	}
	for _, driver := range drivers {
		inSQLTx := func(w *txWay, db sqlTxBeginner) {
			w.in = func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error {
				return w.limiter.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error { return fn(ctx, onSQL(tx)) }, options...)
			}
		}
		open := func(t *testing.T, w *txWay) *sql.DB {
			db := openSQL(t, driver, w.pool.Config().ConnString(), conns)
			w.inUse = func() int { return db.Stats().InUse }
			return db
		}
		way("InSQLTx of "+driver, func(t *testing.T, w *txWay) { inSQLTx(w, open(t, w)) })
		if conns == 1 {
			way("InSQLTx on a connection of "+driver, func(t *testing.T, w *txWay) {
				conn, err := open(t, w).Conn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { conn.Close() }) //nolint:errcheck // returns it to the pool
				w.inUse = none
				inSQLTx(w, conn)
			})
		}
		way("Retry of an ORM with "+driver, func(t *testing.T, w *txWay) {
			db := open(t, w)
			w.begins = false
			w.in = func(ctx context.Context, fn func(ctx context.Context, tx handle) error, options ...ratelimit.TxOption) error {
				var attempts []ratelimit.RetryOption
				for _, option := range options {
					attempts = append(attempts, option.(ratelimit.RetryOption))
				}
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
				}, attempts...)
			}
		})
	}
}

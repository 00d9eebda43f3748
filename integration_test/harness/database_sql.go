package harness

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/lib/pq"

	"github.com/txlimit/txlimit/ratelimit"
)

// Drivers are the drivers of database/sql that the behaviour tests use: pgx's and lib/pq.
var Drivers = []string{"pgx", "postgres"}

// OpenSQL makes a pool of database/sql for a URL.
func OpenSQL(t testing.TB, driver, url string, conns int) *sql.DB {
	t.Helper()
	db, err := newSQL(t, driver, url, conns)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		allGivenBack(t, db)
		db.Close()
	})
	return db
}

// reusedSQL returns a pool that other tests have used before.
func reusedSQL(t testing.TB, driver string, conns int) *sql.DB {
	t.Helper()
	return reused(t, fmt.Sprint(driver, " ", conns), func(url string) (*sql.DB, error) {
		return newSQL(t, driver, url, conns)
	}, func(ctx context.Context, db *sql.DB, sql string) error {
		allGivenBack(t, db)
		_, err := db.ExecContext(ctx, sql)
		return err
	}, func(db *sql.DB) { db.Close() })
}

func newSQL(t testing.TB, driver, url string, conns int) (*sql.DB, error) {
	t.Helper()
	if driver == "postgres" {
		if url = ForAll(t, url); Server.Pooled() {
			url += "&binary_parameters=yes" // without it, the driver parses and executes in two round trips
		}
	}
	db, err := sql.Open(driver, url)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	return db, nil
}

func allGivenBack(t testing.TB, db *sql.DB) {
	t.Helper()
	Eventually(t, "every connection is given back", func() bool { return db.Stats().InUse == 0 }) // a broken connection takes a little longer
}

// PgError returns an error of the server as pgx's type, whatever the driver.
func PgError(t testing.TB, err error) *pgconn.PgError {
	t.Helper()
	if pqErr, ok := errors.AsType[*pq.Error](err); ok {
		return &pgconn.PgError{Code: string(pqErr.Code), Message: pqErr.Message, Detail: pqErr.Detail, Hint: pqErr.Hint}
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		t.Fatalf("%v, want an error of the server", err)
	}
	return pgErr
}

// SQLDB is a handle of database/sql.
type SQLDB struct {
	ratelimit.DB
	On Execer
}

// Execer is a pool, a connection or a transaction of database/sql.
type Execer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func onSQL(on Execer) SQLDB { return SQLDB{ratelimit.SQL(on), on} }

// Exec does not say how many rows it affected.
func (d SQLDB) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	_, err := d.On.ExecContext(ctx, query, args...)
	return pgconn.CommandTag{}, err
}

// SQLHandle is a handle of database/sql under test.
type SQLHandle struct {
	SQLDB
	begin func(ctx context.Context) (Tx, error)
}

// onEverySQLHandle is the part of OnEveryHandle for database/sql. With pgx's driver, it runs a transaction at each
// isolation level.
func onEverySQLHandle(t *testing.T, driver string, test func(t *testing.T, db Handle)) {
	t.Helper()
	onSQLPool(t, driver, test)
	t.Run(driver+" sql.Conn", func(t *testing.T) {
		t.Parallel()
		conn, err := reusedSQL(t, driver, 1).Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() }) //nolint:errcheck // returns it to the pool
		test(t, SQLHandle{onSQL(conn), beginOn(conn)})
	})
	isolations := []sql.IsolationLevel{sql.LevelSerializable}
	if driver == "pgx" {
		isolations = append(isolations, sql.LevelReadCommitted, sql.LevelRepeatableRead)
	}
	for _, level := range isolations {
		t.Run(driver+" sql.Tx "+level.String(), func(t *testing.T) {
			t.Parallel()
			begun, err := reusedSQL(t, driver, 1).BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
			if err != nil {
				t.Fatal(err)
			}
			test(t, SQLHandle{onSQL(begun), func(ctx context.Context) (Tx, error) { return beginSavepoint(ctx, begun) }})
			if err := begun.Commit(); err != nil {
				t.Errorf("the transaction was not usable at the end: %v", err)
			}
		})
	}
}

// onSQLPool runs a behaviour test on a pool of database/sql.
func onSQLPool(t *testing.T, driver string, test func(t *testing.T, db Handle)) {
	t.Helper()
	t.Run(driver+" sql.DB", func(t *testing.T) {
		t.Parallel()
		db := reusedSQL(t, driver, 2)
		test(t, SQLHandle{onSQL(db), beginOn(db)})
	})
}

func beginOn(db sqlTxBeginner) func(ctx context.Context) (Tx, error) {
	return func(ctx context.Context) (Tx, error) {
		begun, err := db.BeginTx(ctx, nil)
		return sqlTx{onSQL(begun), begun}, err
	}
}

// sqlTx is a transaction.
type sqlTx struct {
	SQLDB
	tx *sql.Tx
}

func (t sqlTx) Commit(context.Context) error   { return t.tx.Commit() }
func (t sqlTx) Rollback(context.Context) error { return t.tx.Rollback() }

// savepoint is a savepoint in a transaction of database/sql, which has no API for savepoints.
type savepoint struct{ sqlTx }

func beginSavepoint(ctx context.Context, t *sql.Tx) (Tx, error) {
	_, err := t.ExecContext(ctx, "SAVEPOINT inside")
	return savepoint{sqlTx{onSQL(t), t}}, err
}

func (s savepoint) Commit(ctx context.Context) error {
	_, err := s.tx.ExecContext(ctx, "RELEASE SAVEPOINT inside")
	return err
}

func (s savepoint) Rollback(ctx context.Context) error {
	_, err := s.tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT inside")
	return err
}

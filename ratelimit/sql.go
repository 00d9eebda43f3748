package ratelimit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/handles"
)

// sqlQuerier is the handle that SQL takes.
type sqlQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// SQL makes a [DB] from a *sql.Tx, *sql.Conn, *sql.DB, or any other type with the same method, with any driver for
// Postgres (pgx's stdlib, lib/pq) in any of its modes.
//
// Make it where it is needed: it holds only the handle. With sqlx and bun, pass the *sqlx.Tx or the bun.Tx; with GORM,
// tx.Statement.ConnPool; with ent, a transaction generated with the feature sql/execquery. A nil handle makes a nil DB,
// which every verb refuses with [ErrInvalid]. Send other statements on the handle: the DB sends arguments as text.
func SQL(
	db interface {
		QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	},
) DB {
	if db = unwrapped(db); handles.IsNil(db) {
		return nil
	}
	return sqlDB{db}
}

// unwrapped is the *sql.Tx, *sql.Conn or *sql.DB inside a handle of bun. Bun formats queries itself: it looks for
// question marks to put the arguments in, finds none, and sends no arguments.
func unwrapped(db sqlQuerier) sqlQuerier {
	v := reflect.Indirect(reflect.ValueOf(db))
	if v.Kind() != reflect.Struct || v.Type().PkgPath() != "github.com/uptrace/bun" {
		return db
	}
	for _, name := range []string{"Tx", "Conn", "DB"} {
		if field, ok := v.Type().FieldByName(name); ok {
			if embedded, err := v.FieldByIndexErr(field.Index); err == nil {
				if inner, ok := reflect.TypeAssert[sqlQuerier](embedded); ok {
					return inner
				}
			}
		}
	}
	return db
}

// sqlDB is a DB on database/sql.
type sqlDB struct{ db sqlQuerier }

// Handle is for package internal/outcome, which tells pools from connections.
func (d sqlDB) Handle() any { return d.db }

// QueryRow sends the query when the row is scanned. As in pgx, a pgx.QueryRewriter as the first argument rewrites the
// query. Without one, the arguments are sent as text.
func (d sqlDB) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	var rewriter pgx.QueryRewriter
	if len(args) > 0 {
		rewriter, _ = args[0].(pgx.QueryRewriter)
	}
	var err error
	if rewriter != nil {
		query, args, err = rewriter.RewriteQuery(ctx, nil, query, args[1:])
	} else {
		args, err = texts(args)
	}
	return sqlRow(func(dest []any) error {
		if err != nil {
			return err
		}
		r, _ := rewriter.(*reply)
		return d.run(ctx, query, args, dest, r)
	})
}

type sqlRow func(dest []any) error

func (scan sqlRow) Scan(dest ...any) error { return scan(dest) }

// run runs a query to its end, and scans its row.
func (d sqlDB) run(ctx context.Context, query string, args, dest []any, r *reply) (err error) {
	on := d.db
	if pool, ok := on.(interface {
		Conn(ctx context.Context) (*sql.Conn, error)
	}); ok {
		// On a pool, database/sql repeats a query if the driver reports a bad connection. Some drivers report it too late,
		// after the query reached the server: pgx's in the simple protocol, and lib/pq. On a connection it runs once.
		conn, err := pool.Conn(ctx)
		if err != nil {
			return unsentError{err}
		}
		defer func() { _ = conn.Close() }() // it goes back to the pool
		on = conn
	}
	if r != nil {
		r.sentAt = time.Now()
	}
	rows, err := on.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer func() {
		// Outside a transaction, an answered query is not committed before its end.
		if closeErr := rows.Close(); err == nil {
			err = closeErr
		}
	}()
	scanned := false
	for rows.Next() {
		if !scanned {
			if err := rows.Scan(dest...); err != nil {
				return err
			}
			scanned = true
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if !scanned {
		return sql.ErrNoRows
	}
	return nil
}

// sqlTxBeginner is the handle that InSQLTx takes.
type sqlTxBeginner interface {
	BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
}

// InSQLTx is [Limiter.InTx] for database/sql, on a *sql.DB or a *sql.Conn, with the same options.
//
// In fn, a verb that writes on [SQL] of the same *sql.DB, and another InSQLTx on it, are [ErrInvalid] ([OutsideTx]), as
// is a level that database/sql does not know. If fn calls tx.Commit or tx.Rollback, also in a defer, the error matches
// [ErrUnknownOutcome]. A COMMIT as text is only seen before another attempt.
//
// As always with database/sql, the transaction is rolled back as soon as ctx ends, even while fn runs. A *sql.Conn must
// not be in a transaction: that is not detected.
func (l *Limiter) InSQLTx(
	ctx context.Context,
	db interface {
		BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
	},
	fn func(ctx context.Context, tx *sql.Tx) error,
	options ...TxOption,
) error {
	if handles.IsNil(db) || fn == nil {
		return fmt.Errorf("%w: the database or the function is nil", ErrInvalid)
	}
	return l.inTx(ctx, db, options, func(ctx context.Context, isolation pgx.TxIsoLevel, t turn) (*transaction, error) {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sqlLevels[isolation]})
		if err != nil {
			return nil, err
		}
		if len(t) > 0 {
			if _, err := tx.ExecContext(ctx, lockQuery(l.Schema, t.views()...)); err != nil {
				_ = tx.Rollback()
				return nil, err
			}
		}
		return &transaction{
			run: func(ctx context.Context) error {
				err := fn(ctx, tx)
				if err == nil || ctx.Err() != nil { // with ctx, database/sql rolls back
					return err
				}
				if retryable(err) { // SAVEPOINT fails differently where a COMMIT as text has ended the transaction
					_, ended := tx.ExecContext(ctx, "SAVEPOINT txlimit")
					if sqlState(ended) == "25P01" {
						return endedByFunction(err)
					}
				}
				if errors.Is(tx.Rollback(), sql.ErrTxDone) {
					return endedByFunction(err)
				}
				return err
			},
			rollback: func(context.Context) error { return tx.Rollback() },
			commit: func(ctx context.Context) error {
				err := tx.Commit()
				if errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil {
					return unsentError{fmt.Errorf("%w: %w", ctx.Err(), err)} // database/sql has rolled it back
				}
				return err
			},
		}, nil
	})
}

var sqlLevels = map[pgx.TxIsoLevel]sql.IsolationLevel{
	pgx.ReadUncommitted: sql.LevelReadUncommitted,
	pgx.ReadCommitted:   sql.LevelReadCommitted,
	pgx.RepeatableRead:  sql.LevelRepeatableRead,
	pgx.Serializable:    sql.LevelSerializable,
}

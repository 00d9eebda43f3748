package ratelimit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5"
)

// sqlQuerier is what SQL takes.
type sqlQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// SQL makes a [DB] of a handle of database/sql (a *sql.Tx, *sql.Conn or *sql.DB, or what has the same method), on any driver for Postgres (pgx's stdlib, lib/pq) in any of its modes. Every
// verb works on it as on pgx: in a transaction a call is part of it, on a connection or a pool it is one of its own. Make it
// where it is needed; it holds nothing but the handle.
//
//	_, err := limits.Consume(ctx, ratelimit.SQL(tx), sendMessage.Key(userID))
//
// Of the ORMs, a *sqlx.Tx and a bun.Tx can be passed as they are, of GORM the tx.Statement.ConnPool, and of ent a transaction
// generated with the feature sql/execquery.
//
// A nil handle makes a nil DB, which every verb refuses with [ErrInvalid]. The DB is for the verbs; statements of your own are
// better off with the handle: on the DB, arguments go as text, and QueryRow scans as database/sql does.
func SQL(
	db interface {
		QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	},
) DB {
	if db = unwrapped(db); isNil(db) {
		return nil
	}
	return sqlDB{db}
}

// unwrapped is the *sql.Tx, *sql.Conn or *sql.DB that a handle of bun's embeds. That itself formats queries: it would look for
// question marks to put the arguments in, and send none.
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

// sqlDB asks on database/sql.
type sqlDB struct{ db sqlQuerier }

// QueryRow asks when the row is scanned. As in pgx, a pgx.QueryRewriter in front of the arguments has its way; else they go as text.
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
		return d.run(ctx, query, args, dest)
	})
}

type sqlRow func(dest []any) error

func (scan sqlRow) Scan(dest ...any) error { return scan(dest) }

// run runs a query to its end, and scans its row.
func (d sqlDB) run(ctx context.Context, query string, args, dest []any) (err error) {
	on := d.db
	if pool, ok := on.(interface {
		Conn(ctx context.Context) (*sql.Conn, error)
	}); ok {
		// On a pool, database/sql runs a query again when the driver says that the connection was bad. Some say so too late, when
		// it has reached the server: pgx's in the simple protocol, and lib/pq. On a connection it is run once.
		conn, err := pool.Conn(ctx)
		if err != nil {
			return unsentError{err}
		}
		defer func() { _ = conn.Close() }() // it goes back to the pool
		on = conn
	}
	rows, err := on.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer func() {
		// What has been answered outside a transaction is not committed before the end.
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

// unsentError is one that came before anything was sent.
type unsentError struct{ error }

// SafeToRetry is what pgconn.SafeToRetry asks.
func (unsentError) SafeToRetry() bool { return true }

func (e unsentError) Unwrap() error { return e.error }

// sqlTxBeginner is what InSQLTx takes.
type sqlTxBeginner interface {
	BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
}

// InSQLTx is [Limiter.InTx] for database/sql, on a *sql.DB or a *sql.Conn: SERIALIZABLE unless told otherwise, run again when the database could not
// serialize it or ended a deadlock with it, be it at COMMIT, rolled back when fn panics, and with the same options.
//
//	err := limits.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error {
//		_, err := limits.Consume(ctx, ratelimit.SQL(tx), signUps.Global())
//		return err
//	})
//
// In fn, a verb that writes on [SQL] of the same *sql.DB is an error that matches [ErrInvalid]: see [OutsideTx].
//
// As always with database/sql, the transaction is rolled back as soon as ctx ends, behind the back of fn; with [Hot], its turn may
// then be given away before the server has heard of it. A *sql.Conn must not be in a transaction, which would not be found out and
// whose rollback would be lost. A level of [Isolation] that database/sql does not know is an error
// that matches [ErrInvalid].
func (l *Limiter) InSQLTx(
	ctx context.Context,
	db interface {
		BeginTx(ctx context.Context, options *sql.TxOptions) (*sql.Tx, error)
	},
	fn func(ctx context.Context, tx *sql.Tx) error,
	options ...TxOption,
) error {
	if isNil(db) || fn == nil {
		return fmt.Errorf("%w: no database, or no function to run", ErrInvalid)
	}
	return l.inTx(ctx, db, options, func(ctx context.Context, isolation pgx.TxIsoLevel, t turn) (*transaction, error) {
		level, ok := sqlLevels[isolation]
		if !ok {
			return nil, fmt.Errorf("%w: isolation level %q", ErrInvalid, isolation)
		}
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
		if err != nil {
			return nil, err
		}
		if len(t) > 0 {
			if _, err := tx.ExecContext(ctx, lockQuery(t.views()...)); err != nil {
				_ = tx.Rollback()
				return nil, err
			}
		}
		return &transaction{
			run:      func(ctx context.Context) error { return fn(ctx, tx) },
			rollback: func(context.Context) error { return tx.Rollback() },
			commit: func(ctx context.Context) error {
				err := tx.Commit()
				if errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil {
					return fmt.Errorf("%w: %w", ctx.Err(), err) // database/sql has rolled it back
				}
				return err
			},
		}, nil
	})
}

var sqlLevels = map[pgx.TxIsoLevel]sql.IsolationLevel{
	"":                  sql.LevelDefault,
	pgx.ReadUncommitted: sql.LevelReadUncommitted,
	pgx.ReadCommitted:   sql.LevelReadCommitted,
	pgx.RepeatableRead:  sql.LevelRepeatableRead,
	pgx.Serializable:    sql.LevelSerializable,
}

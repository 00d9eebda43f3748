package orms_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jmoiron/sqlx"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestSqlx(t *testing.T) {
	t.Parallel()
	type message struct{ Body string }
	t.Run("BeginTxx", func(t *testing.T) {
		t.Parallel()
		conns := open(t, "postgres")
		db := sqlx.NewDb(conns, "postgres")
		fits(t, conns, func(ctx context.Context, body string, finish finish) (err error) {
			tx, err := db.BeginTxx(ctx, serializable)
			if err != nil {
				return err
			}
			defer func() {
				if err != nil {
					err = errors.Join(err, tx.Rollback())
				}
			}()
			insert := func(body string) error {
				_, err := tx.NamedExecContext(ctx, "INSERT INTO messages (body) VALUES (:body)", message{body})
				return err
			}
			if err := insert(body); err != nil {
				return err
			}
			if err := finish(ratelimit.SQL(tx), insert); err != nil {
				return err
			}
			return tx.Commit()
		})
	})
	t.Run("InSQLTx", func(t *testing.T) { // a *sqlx.DB begins transactions of database/sql
		t.Parallel()
		conns := open(t, "postgres")
		db := sqlx.NewDb(conns, "postgres")
		fits(t, conns, func(ctx context.Context, body string, finish finish) error {
			err := limits.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error {
				insert := func(body string) error {
					_, err := tx.ExecContext(ctx, "INSERT INTO messages (body) VALUES ($1)", body)
					return err
				}
				if err := insert(body); err != nil {
					return err
				}
				return finish(ratelimit.SQL(tx), insert)
			}, ratelimit.Attempts(1))
			type sqlError interface {
				error
				SQLState() string
			}
			if conflict, ok := errors.AsType[sqlError](err); ok { // for Retry, which does not retry an error of exhausted attempts
				return conflict
			}
			return err
		})
	})
}

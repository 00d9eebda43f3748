package orms_test

import (
	"context"
	"errors"
	"testing"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"

	"github.com/txlimit/txlimit/integration_test/orms/ent"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestEnt(t *testing.T) {
	t.Parallel()
	conns := open(t, "pgx")
	client := ent.NewClient(ent.Driver(entsql.OpenDB(dialect.Postgres, conns)))
	fits(t, conns, func(ctx context.Context, body string, finish finish) (err error) {
		tx, err := client.BeginTx(ctx, serializable)
		if err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, tx.Rollback())
			}
		}()
		insert := func(body string) error { return tx.Message.Create().SetBody(body).Exec(ctx) }
		if err := insert(body); err != nil {
			return err
		}
		if err := finish(ratelimit.SQL(tx), insert); err != nil {
			return err
		}
		return tx.Commit()
	})
}

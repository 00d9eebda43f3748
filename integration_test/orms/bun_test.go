package orms_test

import (
	"context"
	"testing"

	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestBun(t *testing.T) {
	t.Parallel()
	type Message struct {
		bun.BaseModel `bun:"table:messages"`
		ID            int64 `bun:",pk,autoincrement"`
		Body          string
	}
	conns := open(t, "pgx")
	db := bun.NewDB(conns, pgdialect.New())
	fits(t, conns, func(ctx context.Context, body string, finish finish) error {
		return db.RunInTx(ctx, serializable, func(ctx context.Context, tx bun.Tx) error {
			insert := func(body string) error {
				_, err := tx.NewInsert().Model(&Message{Body: body}).Exec(ctx)
				return err
			}
			if err := insert(body); err != nil {
				return err
			}
			return finish(ratelimit.SQL(tx), insert)
		})
	})

	// All of bun's handles work.
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() //nolint:errcheck // returns it to the pool
	limit := ratelimit.TokenBucket("any handle", 3, 1e9)
	for _, handle := range []bun.IDB{db, conn} {
		if _, err := limits.Consume(t.Context(), ratelimit.SQL(handle), limit.Key("ann")); err != nil {
			t.Errorf("%T: %v", handle, err)
		}
	}
}

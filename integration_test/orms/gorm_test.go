package orms_test

import (
	"context"
	"testing"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestGORM(t *testing.T) {
	t.Parallel()
	type Message struct {
		ID   int64
		Body string
	}
	for name, prepare := range map[string]bool{"plain": false, "PrepareStmt": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conns := open(t, "pgx")
			db, err := gorm.Open(postgres.New(postgres.Config{Conn: conns}), &gorm.Config{PrepareStmt: prepare, Logger: logger.Discard})
			if err != nil {
				t.Fatal(err)
			}
			fits(t, conns, func(ctx context.Context, body string, finish finish) error {
				return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
					insert := func(body string) error { return tx.Create(&Message{Body: body}).Error }
					if err := insert(body); err != nil {
						return err
					}
					return finish(ratelimit.SQL(tx.Statement.ConnPool), insert)
				}, serializable)
			})
		})
	}
}

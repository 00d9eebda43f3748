package orms_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestGORM(t *testing.T) {
	t.Parallel()
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

type Message struct {
	ID   int64
	Body string
}

var sendMessage = ratelimit.TokenBucket("sendMessage", 2, time.Hour)

// docs/databases.md shows sendGORM.
func sendGORM(ctx context.Context, db *gorm.DB, userID, text string) error {
	return limits.Retry(ctx, func(ctx context.Context) error {
		return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			if err := tx.Create(&Message{Body: text}).Error; err != nil {
				return err
			}
			_, err := limits.Consume(ctx, ratelimit.SQL(tx.Statement.ConnPool), sendMessage.Key(userID))
			return err
		}, &sql.TxOptions{Isolation: sql.LevelSerializable})
	})
}

func TestTheGORMOfTheDocs(t *testing.T) {
	t.Parallel()
	conns := open(t, "pgx")
	db, err := gorm.Open(postgres.New(postgres.Config{Conn: conns}), &gorm.Config{Logger: logger.Discard})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		if err := sendGORM(t.Context(), db, "ann", "hello"); (err == nil) != (i < 2) || err != nil && !errors.Is(err, ratelimit.ErrDenied) {
			t.Errorf("message %d: %v", i, err)
		}
	}
	var messages int64
	if err := db.Model(&Message{}).Count(&messages).Error; err != nil || messages != 2 {
		t.Errorf("%d messages, want 2: %v", messages, err)
	}
}

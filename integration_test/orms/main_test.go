// Package orms_test tests the limiter in the transactions of GORM, sqlx, bun and ent, on a real Postgres.
package orms_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "github.com/lib/pq"              // the driver "postgres"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/ratelimit"
)

var server *postgres.Server

func TestMain(m *testing.M) {
	os.Exit(postgres.RunTests(m, &server))
}

// The clock stands still, so the sums are exact.
var limits = ratelimit.Limiter{Clock: func() time.Time { return time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC) }}

var serializable = &sql.TxOptions{Isolation: sql.LevelSerializable}

// send is an application's function that uses an ORM. In one SERIALIZABLE transaction, it inserts a message with this body,
// and calls finish with the transaction's DB and a function that inserts another message.
type send func(ctx context.Context, body string, finish finish) error

type finish func(db ratelimit.DB, insert func(body string) error) error

// consume takes a token. A denial rolls back.
func consume(ctx context.Context, request ratelimit.Request) finish {
	return func(db ratelimit.DB, _ func(body string) error) error {
		_, err := limits.Consume(ctx, db, request)
		return err
	}
}

// open makes a database with the limiter's table and messages, and opens it with a driver of database/sql.
func open(t *testing.T, driver string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, migrated.NewDatabase(t, server))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections leaked", n)
		}
		db.Close()
	})
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE messages (id bigserial PRIMARY KEY, body text NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	return db
}

// fits tests the limiter in the transactions of an ORM.
func fits(t *testing.T, db *sql.DB, send send) {
	t.Helper()
	ctx := t.Context()
	limit := ratelimit.TokenBucket("messages", 2, time.Hour)
	expect := func(when string, messages int, tokens float64) {
		t.Helper()
		var n int
		if err := db.QueryRowContext(ctx, "SELECT count(*) FROM messages").Scan(&n); err != nil || n != messages {
			t.Errorf("%s: %d messages, want %d: %v", when, n, messages, err)
		}
		balances, err := limits.Balance(ctx, ratelimit.SQL(db), limit.Key("ann"))
		if err != nil || balances[0].Remaining != tokens {
			t.Errorf("%s: %+v, want %v tokens left: %v", when, balances, tokens, err)
		}
	}
	if err := send(ctx, "hello", consume(ctx, limit.Key("ann"))); err != nil {
		t.Error(err)
	}
	expect("after a commit", 1, 1)

	mine := errors.New("mine")
	err := send(ctx, "never", func(db ratelimit.DB, _ func(string) error) error {
		if _, err := limits.Consume(ctx, db, limit.Key("ann")); err != nil {
			t.Error(err)
		}
		return mine
	})
	if !errors.Is(err, mine) {
		t.Errorf("%v, want an error of the function's own", err)
	}
	expect("after a rollback", 1, 1)

	err = send(ctx, "too much", func(db ratelimit.DB, insert func(string) error) error {
		if _, err := limits.Consume(ctx, db, limit.Key("ann").Count(2)); !errors.As(err, new(*ratelimit.DeniedError)) {
			t.Errorf("%v, want a denial", err)
		}
		if err := insert("denied"); err != nil {
			return err
		}
		_, err := limits.Consume(ctx, db, limit.Key("ann"))
		return err
	})
	if err != nil {
		t.Errorf("a denial left the transaction unusable: %v", err)
	}
	expect("after a denial and a commit", 3, 0)

	if err := send(ctx, "never", consume(ctx, limit.Key("ann"))); !errors.As(err, new(*ratelimit.DeniedError)) {
		t.Errorf("%v, want a denial", err)
	}
	expect("after a denial that rolls back", 3, 0)

	// All at once: each message has its token, and no 40001 reaches the caller.
	const goroutines, each = 8, 5
	hot := ratelimit.TokenBucket("hot", goroutines*each, time.Hour)
	var attempts atomic.Int64
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range each {
				err := limits.Retry(ctx, func(ctx context.Context) error {
					attempts.Add(1)
					return send(ctx, fmt.Sprint(g, " ", i), consume(ctx, hot.Global()))
				}, ratelimit.Attempts(1000))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d attempts for %d commits", attempts.Load(), goroutines*each)
	if attempts.Load() == goroutines*each {
		t.Error("no transaction was retried: this test has not seen a serialization failure")
	}
	expect("after a crowd", 3+goroutines*each, 0)
	if _, err := limits.Consume(ctx, ratelimit.SQL(db), hot.Global()); !errors.As(err, new(*ratelimit.DeniedError)) {
		t.Errorf("%v, want no token left for later calls", err)
	}
}

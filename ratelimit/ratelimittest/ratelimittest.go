// Package ratelimittest is a database in memory for unit tests of code that uses package ratelimit. It decides as Postgres
// does, to the last bit, by a clock that the test moves:
//
//	func TestOneMessageAMinute(t *testing.T) {
//		db := ratelimittest.New(t)
//		service := Service{Limits: &ratelimit.Limiter{}, DB: db}
//		// the first message is sent, the second is denied
//		db.Advance(time.Minute)
//		// the third is sent
//	}
//
// It has rate limits and nothing else: any other SQL is an error. Test SQL of your own on a Postgres. Everything that takes
// a [ratelimit.DB] works on it, and so do [ratelimit.Limiter.InTx], with nested transactions, and
// [ratelimit.Limiter.SendTx]. A [ratelimit.Coalescer], [ratelimit.SQL] and [ratelimit.Limiter.InSQLTx] need a handle of
// Postgres, and [ratelimit.Limiter.Sweep] is an error. In a test, use a [*DB] in their place.
package ratelimittest

import (
	"context"
	"errors"
	"maps"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
)

// DB is a database in memory, empty at first: all limits are full. It takes the place of a *pgxpool.Pool. It is safe for
// concurrent use.
//
// No call ever waits for another, so a test cannot hang in it. Where Postgres would wait for a row that another transaction
// has written, the later COMMIT fails with SQLSTATE 40001 here, at every isolation level. InTx and SendTx run such a
// transaction again. Code that begins transactions by itself sees the error, as it would in SERIALIZABLE.
//
// A transaction has no connection: its Conn is nil.
type DB struct {
	mu       sync.Mutex
	table    inmemory.Table // what is committed
	now      algebra.Micros
	sleepers []sleeper
	open     int // transactions that have not ended
	over     bool
}

var errOver = errors.New("ratelimittest: the test of this database has ended")

// New makes a database for one test. A transaction that is still open when the test ends is an error of the test.
func New(t testing.TB) *DB {
	t.Helper()
	db := &DB{table: inmemory.Table{}, now: algebra.At(start)}
	t.Cleanup(func() {
		db.mu.Lock()
		defer db.mu.Unlock()
		db.over = true
		if db.open > 0 {
			t.Errorf("ratelimittest: at the end of the test, %d transactions are neither committed nor rolled back", db.open)
		}
	})
	return db
}

// InMemory is for package ratelimit, which knows the type by it.
func (db *DB) InMemory(inmemory.Mark) inmemory.Table {
	db.mu.Lock()
	defer db.mu.Unlock()
	return maps.Clone(db.table)
}

// QueryRow runs a statement of package ratelimit. Any other statement is an error.
func (db *DB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	db.mu.Lock()
	defer db.mu.Unlock()
	s := db.begin(inmemory.ReadCommitted, false)
	answer := s.run(ctx, sql, args)
	if answer.err == nil {
		answer.err = s.commit()
	}
	return answer
}

// BeginTx begins a transaction. Of the options, only the isolation level can be set.
func (db *DB) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	level, known := levels[options.IsoLevel]
	if options.IsoLevel = ""; !known || options != (pgx.TxOptions{}) {
		return nil, errors.New("ratelimittest: an option of the transaction is not known")
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.over {
		return nil, errOver
	}
	return &tx{session: db.begin(level, true)}, nil
}

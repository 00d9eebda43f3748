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
// Nearly everything that takes a [ratelimit.DB] works on it, and so do [ratelimit.Limiter.InTx], with nested transactions,
// [ratelimit.Limiter.SendTx] and [ratelimit.Limiter.Sweep]. [ratelimit.Limiter.Override], [ratelimit.Limiter.Block],
// [ratelimit.Limiter.Restore] and [ratelimit.Limiter.Unblock] need a Limiter of [ratelimit.Open], here as on Postgres. With
// NoBackground, it needs no Close, and its own blocks hold at once:
//
//	limits, err := ratelimit.Open(t.Context(), db, ratelimit.Options{NoPublish: true, NoSweep: true, NoBackground: true})
//
// What it cannot do, test on a Postgres, where [NewSchema] makes a schema for a test:
//
//   - It has no holds: [ratelimit.Limiter.Hold], Settle, Release, During and Once, and [ratelimit.Slots] in any verb, are [ratelimit.ErrInvalid].
//   - It has rate limits and nothing else: any other SQL is an error, the SQL functions of txlimit too.
//   - There are no locks: nothing waits. Transactions that change the same key conflict instead.
//   - There are no isolation levels: a transaction sees each key as it was when the transaction first used it.
//   - Nothing is published: a sweep minds no other program's definitions.
//   - A [ratelimit.Coalescer], [ratelimit.SQL] and [ratelimit.Limiter.InSQLTx] need a handle of Postgres. In a test, use a [*DB] in
//     their place.
package ratelimittest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

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
type DB struct{ memory *inmemory.DB }

// New makes a database for one test. A transaction that is still open when the test ends is an error of the test.
func New(t testing.TB) *DB {
	t.Helper()
	db := &DB{inmemory.New()}
	t.Cleanup(func() {
		if open := db.memory.End(); open > 0 {
			t.Errorf("ratelimittest: at the end of the test, %d transactions are neither committed nor rolled back", open)
		}
	})
	return db
}

// Now is the database's clock, to the microsecond, in UTC. It stands still unless the test moves it. At first it is noon on
// 1 January 2030. A Limiter needs no Clock: its calls on this database are decided by this one. (Only for
// [ratelimit.Limiter.QueueConsume] of a calendar window, set [ratelimit.Limiter.Clock] to Now.)
//
// In a bubble of testing/synctest, set [ratelimit.Limiter.Clock] to time.Now instead: then time.Sleep moves the clock. Overrides and
// blocks are made by the database's own clock all the same: call Set(time.Now()) before each of them.
func (db *DB) Now() time.Time { return db.memory.Now() }

// Advance moves the clock by d, which may be negative.
func (db *DB) Advance(d time.Duration) { db.memory.Advance(d) }

// Set sets the clock. It panics if t is not between the years 1000 and 9999.
func (db *DB) Set(t time.Time) { db.memory.Set(t) }

// SleepUntil waits until another goroutine has moved the clock to t, or until ctx ends, and returns the error of ctx.
// [ratelimit.Limiter.Wait] sleeps by it. It can take the place of a timer in code under test that waits for a RetryAt.
func (db *DB) SleepUntil(ctx context.Context, t time.Time) error { return db.memory.SleepUntil(ctx, t) }

// InMemory is for package ratelimit, which knows the type by it.
func (db *DB) InMemory() any { return db.memory.InMemory() }

// QueryRow runs a statement of package ratelimit. Any other statement is an error.
func (db *DB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return db.memory.QueryRow(ctx, sql, args...)
}

// BeginTx begins a transaction. Of the options, only the isolation level can be set.
func (db *DB) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	return db.memory.BeginTx(ctx, options)
}

// SendBatch runs the statements of a batch in one transaction, which the batch may begin and commit itself.
func (db *DB) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	return db.memory.SendBatch(ctx, batch)
}

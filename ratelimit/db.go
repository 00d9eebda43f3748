package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/handles"
)

// DB is where a limiter works: a pgx.Tx, *pgx.Conn or *pgxpool.Pool, or any other type with this method; a
// [*Coalescer]; [SQL] of a handle of database/sql; or package ratelimittest's, in memory.
//
// On a transaction, a call is part of the transaction. On a connection or a pool, a call is a transaction of its own,
// at the database's default isolation level. If that level is above READ COMMITTED, put the call in [Limiter.Retry].
// Inside [Limiter.InTx] or [Limiter.InSQLTx] on the same pool, a call that writes is refused: see [OutsideTx].
type DB interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// inMemory is a database in memory, or a transaction on one: see package ratelimittest. Its clock, which the test moves, is taken for
// the clock of the process too: the windows of calendars are listed around it.
type inMemory interface {
	InMemory() any
	Now() time.Time
}

func isInMemory(db DB) bool {
	_, is := db.(inMemory)
	return is
}

// clockOf is the clock of a database in memory; of another, NULL.
func clockOf(db DB) pgtype.Timestamptz {
	if m, ok := db.(inMemory); ok && !handles.IsNil(db) {
		return pgtype.Timestamptz{Time: m.Now(), Valid: true}
	}
	return pgtype.Timestamptz{}
}

// coalescerOf returns the Coalescer that a DB is or embeds. A struct that embeds one has its method.
func coalescerOf(db DB) (c *Coalescer, ok bool) {
	if d, ok := db.(interface{ coalescer() *Coalescer }); ok {
		return d.coalescer(), true
	}
	return nil, false
}

// noDatabaseText is for the error if noDatabase.
const noDatabaseText = "the DB is nil, or is a Coalescer without a Pool"

// noDatabase reports whether a DB is nil, or a Coalescer without a pool.
func noDatabase(db DB) bool {
	c, ok := coalescerOf(db)
	return handles.IsNil(db) || ok && (c == nil || c.Pool == nil)
}

// connOf is the connection of a handle. It is nil for a pool, and for a handle of another type.
func connOf(db any) *pgx.Conn {
	switch db := db.(type) {
	case *pgx.Conn:
		return db
	case *pgxpool.Conn:
		return db.Conn()
	}
	return nil
}

// inTransaction reports whether a connection is in a transaction, which COMMIT would end too early. (BEGIN inside one is
// only a warning.)
func inTransaction(db any) bool {
	conn := connOf(db)
	if conn == nil || conn.IsClosed() {
		return false
	}
	status := conn.PgConn().TxStatus()
	return status == 'T' || status == 'E'
}

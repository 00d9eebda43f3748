package ratelimit

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// DB is where a limiter works: a pgx.Tx, *pgx.Conn or *pgxpool.Pool, or what else has their method. A [*Coalescer] is a DB,
// too, for many calls that are in no transaction; and [SQL] makes one of a handle of database/sql.
//
// On a transaction, a call is part of it. On a connection or a pool, a call is a transaction of its own, at the database's default
// level: if that is above READ COMMITTED, put the call in [Retry]. Make it before a transaction of the same goroutine begins. Inside
// [Limiter.InTx] or [Limiter.InSQLTx] on the same pool, a call that writes is refused: see [OutsideTx].
type DB interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// isTx says whether a handle is a transaction of the caller's, which is what can be committed.
func isTx(db DB) bool {
	handle := any(db)
	if onSQL, ok := db.(sqlDB); ok {
		handle = onSQL.db
	}
	switch handle.(type) {
	case interface {
		Commit(ctx context.Context) error
	}, interface{ Commit() error }:
		return true
	}
	return false
}

// coalescerOf is the Coalescer that a DB is, or that it embeds: a struct that does has the method, too.
func coalescerOf(db DB) (c *Coalescer, ok bool) {
	if d, ok := db.(interface{ coalescer() *Coalescer }); ok {
		return d.coalescer(), true
	}
	return nil, false
}

// noDatabase says whether there is nothing to ask: no handle, or a Coalescer without a pool.
func noDatabase(db DB) bool {
	c, ok := coalescerOf(db)
	return isNil(db) || ok && (c == nil || c.Pool == nil)
}

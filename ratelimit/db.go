package ratelimit

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// DB is where a limiter works: the three methods that pgx.Tx, *pgx.Conn and *pgxpool.Pool have in common. A [*Coalescer] is a DB,
// too, for many calls that are in no transaction; and [SQL] makes one of a handle of database/sql.
//
// On a transaction, a call is part of it. On a connection or a pool, a call is a transaction of its own, at the database's default
// level: if that is above READ COMMITTED, put the call in [Retry]. Make it before a transaction of the same goroutine begins. Inside
// [Limiter.InTx] or [Limiter.InSQLTx] on the same pool, a call that writes is refused: see [OutsideTx].
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
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

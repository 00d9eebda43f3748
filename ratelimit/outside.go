package ratelimit

import (
	"context"
	"database/sql"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
)

// OutsideTx returns a context with which a verb may write on a pool inside a transaction of the same pool. Without it, inside the
// function of [Limiter.InTx] or [Limiter.InSQLTx], [Limiter.Consume], [Limiter.Charge], [Limiter.Refund] and [Limiter.Reset] on the
// pool return an error that matches [ErrInvalid], and send nothing: most often, tx was meant. [Limiter.Check], which only reads, is
// allowed.
//
// Use it for a count that outlives a rollback and cannot be made before the transaction begins:
//
//	_, err := limits.Consume(ratelimit.OutsideTx(ctx), pool, failedLogins.Key(user))
//
// Such a call is a transaction of its own. Each attempt of InTx makes it again. It takes a second connection of the pool, which is
// not there if every connection is held by a caller that wants another.
//
// It hangs, until its context is over, if the transaction around it has consumed the same limit and key: it waits for the row, and
// the transaction for it. Postgres does not see this deadlock, and whether the call took its tokens after all is unknown. So use a limit that the transaction does not, and a deadline.
//
// The pool is recognized as a *pgxpool.Pool, [SQL] of a *sql.DB, or a [Coalescer]; all enclosing transactions count. These are not
// found out: a pool in a type of your own or of others (a *sqlx.DB), another pool or a connection for the same database, a context
// that is not made from fn's, and transactions that this package has not begun, such as an ORM's in [Retry].
func OutsideTx(ctx context.Context) context.Context {
	return context.WithValue(ctx, openTxKey{}, (*openTx)(nil))
}

// openTx is a transaction on a pool, for the context of its function, which may be kept when the transaction has ended.
type openTx struct {
	pool   any     // as poolOf has it
	around *openTx // whose function has begun it; nil: none
	ended  atomic.Bool
}

type openTxKey struct{}

// within returns a context that says that a transaction is open on db, until end is called. If db is no pool, nothing has to be said.
func within(ctx context.Context, db any) (_ context.Context, end func()) {
	pool := poolOf(db)
	if pool == nil {
		return ctx, func() {}
	}
	around, _ := ctx.Value(openTxKey{}).(*openTx)
	open := &openTx{pool: pool, around: around}
	return context.WithValue(ctx, openTxKey{}, open), func() { open.ended.Store(true) }
}

// errOutside is the error of a verb that would write outside the transaction that ctx is in, on the pool of that transaction, or nil.
func errOutside(ctx context.Context, v Verb, db DB) error {
	pool := poolOf(db)
	if pool == nil || v == VerbCheck {
		return nil
	}
	open, _ := ctx.Value(openTxKey{}).(*openTx)
	for ; open != nil; open = open.around {
		if open.pool == pool && !open.ended.Load() {
			return programError{fmt.Errorf("%w: %s on the pool inside a transaction of that pool would not be part of it: "+
				"pass tx instead of the pool, or OutsideTx(ctx) if this is meant", ErrInvalid, v)}
		}
	}
	return nil
}

// poolOf is the *pgxpool.Pool or *sql.DB on which a handle works, or nil.
func poolOf(db any) any {
	switch db := db.(type) {
	case *pgxpool.Pool, *sql.DB:
		return db
	case sqlDB:
		return poolOf(db.db)
	case interface{ coalescer() *Coalescer }:
		return db.coalescer().Pool
	}
	return nil
}

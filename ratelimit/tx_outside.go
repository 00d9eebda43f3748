package ratelimit

import (
	"context"
	"database/sql"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/handles"
)

// OutsideTx returns a context that allows a verb to write on a pool inside the function of an [Limiter.InTx] or
// [Limiter.InSQLTx] on the same pool. Without it, such a verb is [ErrInvalid], and so are InTx, InSQLTx,
// [Limiter.SendTx], [Limiter.Publish] and [Limiter.Sweep].
//
// Such a call is a transaction of its own: it outlives a rollback, and each attempt of InTx makes it again. It takes a
// second connection. If the surrounding transaction has consumed the same limit and key, it hangs until its context
// ends, and its outcome is unknown. So use another limit, and a deadline.
//
// Not recognized are a pool in another type, such as a *sqlx.DB; another pool, or a connection, for the same database;
// a context that does not derive from fn's; and a transaction begun outside this package.
func OutsideTx(ctx context.Context) context.Context {
	return context.WithValue(ctx, openTxKey{}, (*openTx)(nil))
}

// openTx is a transaction on a pool, in the context of its function. The context may outlive the transaction.
type openTx struct {
	pool   any     // the result of poolOf
	around *openTx // the transaction around it; nil: none
	ended  atomic.Bool
	follow atomic.Pointer[overrides] // that the transaction has changed; nil: it has not
}

type openTxKey struct{}

// withOpenTx returns a context that says that a transaction is open on db, until end is called. If db is not a pool, it returns
// ctx.
//
// After a commit, end reads the overrides that the transaction has changed.
func withOpenTx(ctx context.Context, db any) (_ context.Context, end func(committed bool)) {
	pool := poolOf(db)
	if pool == nil {
		return ctx, func(bool) {}
	}
	around, _ := ctx.Value(openTxKey{}).(*openTx)
	open := &openTx{pool: pool, around: around}
	return context.WithValue(ctx, openTxKey{}, open), func(committed bool) {
		open.ended.Store(true)
		if changed := open.follow.Load(); committed && changed != nil {
			changed.follow(ctx)
		}
	}
}

// ofPool is a connection of db, if that is a pool, until release is called; else db.
func ofPool(ctx context.Context, db DB) (on DB, release func(), err error) {
	switch pool := poolOf(db).(type) {
	case *pgxpool.Pool:
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return nil, nil, err
		}
		return conn, conn.Release, nil
	case *sql.DB:
		conn, err := pool.Conn(ctx)
		if err != nil {
			return nil, nil, err
		}
		return SQL(conn), func() { _ = conn.Close() }, nil
	}
	return db, func() {}, nil
}

// whenCommitted has overrides read when ctx's transaction is committed.
func whenCommitted(ctx context.Context, changed *overrides) {
	if open, _ := ctx.Value(openTxKey{}).(*openTx); open != nil {
		open.follow.Store(changed)
	}
}

// errOutside is the error of a verb that would write on the pool of ctx's transaction, but outside that transaction; or
// nil.
func errOutside(ctx context.Context, v verb, db DB, requests []Request) error {
	if does := verbs[v]; does != nil && does.writes == never || !outside(ctx, db) { // nil: it is about overrides
		return nil
	}
	return invalidCall(requests, outsideText(string(v), "pass tx instead of the pool"))
}

// outside reports whether db is the pool of a transaction that is open in ctx: what is sent on it would not be part of that.
func outside(ctx context.Context, db any) bool {
	open, _ := ctx.Value(openTxKey{}).(*openTx)
	if open == nil || handles.IsNil(db) {
		return false
	}
	for ; open != nil; open = open.around {
		if open.pool == poolOf(db) && !open.ended.Load() {
			return true
		}
	}
	return false
}

func outsideText(what, instead string) string {
	return what + " on the pool inside a transaction of that pool would not be part of it: " + instead + ", or OutsideTx(ctx) if this is meant"
}

// poolOf is the *pgxpool.Pool, *sql.DB or database in memory of a handle, or nil.
func poolOf(db any) any {
	switch db := db.(type) {
	case *pgxpool.Pool, *sql.DB:
		return db
	case sqlDB:
		return poolOf(db.db)
	case interface {
		inMemory
		txBeginner
	}:
		return db
	case interface{ coalescer() *Coalescer }:
		return db.coalescer().Pool
	}
	return nil
}

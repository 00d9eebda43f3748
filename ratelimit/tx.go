package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// txBeginner is what InTx takes.
type txBeginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// TxOption changes how [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] and [Retry] run a transaction.
type TxOption func(*txOptions)

type txOptions struct {
	isolation pgx.TxIsoLevel
	isolated  bool // isolation was asked for
	attempts  int
	hot       []Request
}

func newTxOptions(options []TxOption) txOptions {
	o := txOptions{isolation: pgx.Serializable, attempts: defaultAttempts}
	for _, option := range options {
		option(&o)
	}
	return o
}

// Isolation sets the isolation level. The default is pgx.Serializable.
func Isolation(level pgx.TxIsoLevel) TxOption {
	return func(o *txOptions) { o.isolation, o.isolated = level, true }
}

// Attempts sets how often the transaction is tried at the most. The default is 30, which with the pauses in between takes
// about 5 s; less than 1 is 1.
func Attempts(n int) TxOption { return func(o *txOptions) { o.attempts = max(n, 1) } }

const (
	defaultAttempts = 30

	// The pause before another attempt is random, up to a bound that doubles from the first to the last of these.
	firstPause = 25 * time.Millisecond
	lastPause  = 400 * time.Millisecond
)

// rollbackTimeout bounds a rollback, which has to happen when ctx is already over.
const rollbackTimeout = 5 * time.Second

// InTx runs fn in a transaction, SERIALIZABLE unless told otherwise, and commits it. db is a *pgxpool.Pool, a *pgxpool.Conn or a
// *pgx.Conn; a connection that is in a transaction already, which COMMIT would end, is [ErrInvalid]. If the database could not serialize it
// (SQLSTATE 40001) or ended a deadlock with it (40P01), be it at COMMIT, it is rolled back and run again from the start:
// so fn must not do anything that a rollback does not undo. When the attempts run out, or ctx after the first, the error matches
// [ErrAttemptsExhausted].
//
// fn must pass on the errors of its statements, wrapped or not, such that errors.As finds them (%w, not %v): an error that
// hides its SQLSTATE is not retried. Any other error of fn, a denial among them, rolls back and is returned as it is. If
// fn panics, or its goroutine exits, the transaction is rolled back.
//
// On a *pgxpool.Pool, a connection is taken before fn, and the transaction begins with fn's first statement (or tx.Conn). If that is
// a verb on tx itself, not on a wrapper of it, BEGIN is sent with it and costs no round trip. (In pgx's default mode, a connection that meets a
// query, BEGIN among them, for the first time prepares it in one more.) If it cannot begin, all statements of fn fail, nothing runs
// outside it, and InTx returns why, even if fn hides it. (A first statement whose own context is over is not sent, and is not the
// first: the next one is.) On any other db it begins before fn.
//
// With [Hot], transactions that want the same limits wait their turn instead of conflicting.
//
// In fn, consume on tx. A verb that writes on db itself, where that is a pool, is an error that matches [ErrInvalid], unless its
// context is of [OutsideTx].
//
// An error of COMMIT that is not one of the above (the connection broke) leaves open whether the transaction was
// committed: it matches [ErrUnknownOutcome], and the transaction is not run again. After any other error nothing was committed.
func (l *Limiter) InTx(
	ctx context.Context,
	db interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	},
	fn func(ctx context.Context, tx pgx.Tx) error,
	options ...TxOption,
) error {
	if isNil(db) || fn == nil {
		return fmt.Errorf("%w: no database, or no function to run", ErrInvalid)
	}
	if inTransaction(db) {
		return errInTransaction
	}
	return l.inTx(ctx, db, options, func(ctx context.Context, isolation pgx.TxIsoLevel, t turn) (*transaction, error) {
		conn, release, err := acquire(ctx, db)
		if err != nil {
			return nil, err
		}
		if conn == nil {
			return beginAtOnce(ctx, db, isolation, t, fn)
		}
		tx := &lateTx{ctx: ctx, conn: conn, isolation: isolation, turn: t}
		return &transaction{
			run: func(ctx context.Context) error {
				if connOf(db) != nil { // fn may know it, and use it beside tx
					if err := tx.begin(ctx); err != nil {
						return err
					}
				}
				err := fn(ctx, tx)
				if err == nil {
					err = tx.begin(ctx) // where fn had no statement
				}
				if tx.failed != nil && !errors.Is(err, tx.failed) { // fn may hide it
					return tx.failed
				}
				if err == nil && conn.IsClosed() && !tx.ended { // fn may hide that, too; COMMIT cannot be sent
					return fmt.Errorf("ratelimit: commit: %w", pgconn.ErrConnClosed)
				}
				return err
			},
			commit: func(ctx context.Context) error {
				defer release()
				return tx.Commit(ctx)
			},
			rollback: func(ctx context.Context) error {
				defer release()
				return tx.Rollback(ctx) // pgx closes a connection that it cannot roll back: either way it is undone
			},
		}, nil
	})
}

// beginAtOnce is for a handle that is no pool or connection of pgx's: BEGIN and the lock are a round trip each, before fn.
func beginAtOnce(ctx context.Context, db txBeginner, isolation pgx.TxIsoLevel, t turn, fn func(ctx context.Context, tx pgx.Tx) error) (*transaction, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: isolation})
	if err != nil {
		return nil, err
	}
	return &transaction{
		run: func(ctx context.Context) error {
			if len(t) > 0 {
				if _, err := tx.Exec(ctx, lockQuery(t.views()...)); err != nil {
					return beginFailed(t, err)
				}
			}
			return fn(ctx, tx)
		},
		commit:   tx.Commit,
		rollback: tx.Rollback,
	}, nil
}

// acquire is connOf, or for a pool one of its connections, until it is released.
func acquire(ctx context.Context, db txBeginner) (conn *pgx.Conn, release func(), err error) {
	pool, ok := db.(*pgxpool.Pool)
	if !ok {
		return connOf(db), func() {}, nil
	}
	c, err := pool.Acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	return c.Conn(), c.Release, nil
}

// connOf is the connection that a handle is, or nil: for a pool, or a handle of the caller's own.
func connOf(db txBeginner) *pgx.Conn {
	switch db := db.(type) {
	case *pgx.Conn:
		return db
	case *pgxpool.Conn:
		return db.Conn()
	}
	return nil
}

var errInTransaction = fmt.Errorf("%w: the connection is in a transaction already, which COMMIT would end", ErrInvalid)

// inTransaction says whether a connection is in a transaction, which COMMIT would end too early. (BEGIN in one is only a warning.)
func inTransaction(db txBeginner) bool {
	conn := connOf(db)
	if conn == nil || conn.IsClosed() {
		return false
	}
	status := conn.PgConn().TxStatus()
	return status == 'T' || status == 'E'
}

// Retry runs fn until its error is not one of a transaction that could not be serialized (SQLSTATE 40001) or was ended to
// break a deadlock (40P01), within the bounds of [Limiter.InTx]. It is for the transaction function of an ORM, which begins,
// commits and rolls back, at the isolation level that it is told:
//
//	err := ratelimit.Retry(ctx, func(ctx context.Context) error {
//		return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error { ... }, &sql.TxOptions{Isolation: sql.LevelSerializable})
//	})
//
// fn must not do anything that a rollback does not undo, and must pass on the errors of its statements and of COMMIT such that
// errors.As finds them (%w, not %v). Its other errors are returned as they are. When the attempts run out, or ctx during a
// pause, the error matches [ErrAttemptsExhausted]. Retries may be nested: an error that matches it already, of an InTx or a
// [Coalescer] in fn for example, is returned as it is, so that attempts do not multiply.
//
// The one option is [Attempts]. [Isolation] and [Hot], which only a transaction begun by this package could keep to, are
// errors that match [ErrInvalid].
func Retry(ctx context.Context, fn func(ctx context.Context) error, options ...TxOption) error {
	o := newTxOptions(options)
	if fn == nil {
		return fmt.Errorf("%w: no function to run", ErrInvalid)
	}
	if o.isolated || len(o.hot) > 0 {
		return fmt.Errorf("%w: Retry begins no transaction: Isolation and Hot are for InTx and InSQLTx", ErrInvalid)
	}
	return retry(ctx, o.attempts, nil, func() (committing bool, err error) { return true, fn(ctx) })
}

// retry runs a transaction until it could be serialized. committing says that its error leaves open whether it was committed.
func retry(ctx context.Context, attempts int, onRetry func(ctx context.Context, failed int, err error), once func() (committing bool, err error)) error {
	gaveUp := func(attempts int, err error) error { return fmt.Errorf("ratelimit: %w", exhausted(attempts, err)) }
	var conflict error // of the last attempt that could not be serialized
	for attempt := 1; ; attempt++ {
		committing, err := once()
		switch {
		case err != nil && retryable(err):
			conflict = err
		case conflict != nil && !committing && ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return gaveUp(attempt, fmt.Errorf("%w; the attempt before: %w", err, conflict))
		default:
			return err
		}
		if attempt == attempts {
			return gaveUp(attempt, err)
		}
		if !pause(ctx, attempt) {
			return gaveUp(attempt, fmt.Errorf("%w; the last attempt: %w", over(ctx), err))
		}
		if onRetry != nil {
			onRetry(ctx, attempt, err)
		}
	}
}

// exhausted is the error of the last attempt, with the reason that the server gave for a 40001 in its text, if the error is pgx's.
func exhausted(attempts int, err error) error {
	reason := ""
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "40001" && pgErr.Detail != "" {
		reason = ": " + pgErr.Detail
	}
	return fmt.Errorf("%w after %d: %w%s", ErrAttemptsExhausted, attempts, err, reason)
}

// pause waits before the next attempt, unless ctx is over before.
func pause(ctx context.Context, attempt int) bool {
	select {
	case <-time.After(rand.N(min(firstPause<<min(attempt-1, 10), lastPause))):
		return true
	case <-ctx.Done():
		return false
	}
}

// over is the error of a context that is over, and its cause if it has another.
func over(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != ctx.Err() { //nolint:errorlint // they are the same if there is no cause
		return fmt.Errorf("%w: %w", ctx.Err(), cause)
	}
	return ctx.Err()
}

// transaction is one that has begun, or begins with its first statement. Either commit or rollback is called, once, and lets go of
// its connection.
type transaction struct {
	run, commit, rollback func(ctx context.Context) error
}

// beginner makes a transaction. Before anything in it takes a snapshot, the views of the turn are locked, if there is one.
type beginner func(ctx context.Context, isolation pgx.TxIsoLevel, t turn) (*transaction, error)

// inTx runs transactions until one could be serialized.
func (l *Limiter) inTx(ctx context.Context, db any, options []TxOption, begin beginner) error {
	o := newTxOptions(options)
	hot, err := o.turns(ctx)
	if err != nil {
		return err
	}
	return retry(ctx, o.attempts, l.OnRetry, func() (committing bool, err error) { return l.once(ctx, db, o.isolation, hot, begin) })
}

// once runs one transaction, when it is its turn on the hot limits. committing says that its error is that of COMMIT.
func (l *Limiter) once(ctx context.Context, db any, isolation pgx.TxIsoLevel, hot []demand, begin beginner) (committing bool, err error) {
	var t turn
	if len(hot) > 0 {
		var leave func()
		if t, leave, err = l.queues.enter(ctx, hot); err != nil {
			return false, err
		}
		defer leave()
		ctx = context.WithValue(ctx, turnKey{}, t)
	}
	ctx, end := within(ctx, db)
	defer end()
	tx, err := begin(ctx, isolation, t)
	if err != nil {
		return false, beginFailed(t, err)
	}
	defer func() {
		if !committing {
			rollbackCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
			defer cancel()
			_ = tx.rollback(rollbackCtx)
		}
	}()
	if err := tx.run(ctx); err != nil {
		return false, err
	}
	if ctx.Err() != nil { // no driver would send COMMIT, but not every one says so
		return false, fmt.Errorf("ratelimit: commit: %w", over(ctx))
	}
	committing = true // which ends the transaction, whatever it returns
	if err := tx.commit(ctx); err != nil {
		return true, fmt.Errorf("ratelimit: commit: %w", unknownUnless(err))
	}
	return true, nil
}

// beginFailed explains the error of a transaction that did not begin, or could not lock what it queues for.
func beginFailed(t turn, err error) error {
	what := "begin"
	if len(t) > 0 {
		what += ", with a turn on " + t.String()
	}
	state := sqlState(err) // undefined_table, insufficient_privilege; the latter also for a database that one may not connect to
	if (state == "42P01" || state == "42501") && !errors.As(err, new(*pgconn.ConnectError)) {
		return fmt.Errorf("ratelimit: %s: %w (has the schema of package migrations been migrated, is it in the search_path, "+
			"and has this role UPDATE on the views rate_limits_turn_00 to _31?)", what, err)
	}
	return fmt.Errorf("ratelimit: %s: %w", what, err)
}

// isNil says whether a handle is nil, or an interface that holds a nil pointer.
func isNil(db any) bool {
	v := reflect.ValueOf(db)
	return !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil()
}

// retryable says whether the whole transaction should be run again. What has been, as often as it may, should not.
func retryable(err error) bool {
	state := sqlState(err)
	return (state == "40001" || state == "40P01") && !errors.Is(err, ErrAttemptsExhausted)
}

// sqlState is the SQLSTATE in an error's chain, or empty. Every driver's error has the method.
func sqlState(err error) string {
	if sqlErr := (interface{ SQLState() string })(nil); errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inschema"
)

// txBeginner is the handle that InTx takes.
type txBeginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// TxOption changes how [Limiter.InTx], [Limiter.InSQLTx] and [Limiter.SendTx] run a transaction, and [Attempts] how [Limiter.Retry] runs its
// function. It is [Isolation], [Attempts] or [Hot]. Where it means nothing, it is [ErrInvalid], as is nil.
type TxOption interface{ set(o *txOptions) }

type txOption func(*txOptions)

func (option txOption) set(o *txOptions) { option(o) }

type txOptions struct {
	isolation pgx.TxIsoLevel
	attempts  int
	hot       []Request
	begins    string // the name of an option for a transaction that this package begins
}

func newTxOptions(options []TxOption) (txOptions, error) {
	o := txOptions{isolation: pgx.Serializable, attempts: defaultAttempts}
	for _, option := range options {
		if option == nil {
			return o, fmt.Errorf("%w: a TxOption is nil", ErrInvalid)
		}
		option.set(&o)
	}
	if _, known := sqlLevels[o.isolation]; !known {
		return o, fmt.Errorf("%w: Postgres has no isolation level %q: pass one of pgx's, such as pgx.ReadCommitted", ErrInvalid, o.isolation)
	}
	return o, nil
}

// Isolation sets the isolation level, one of the four of pgx. The default is pgx.Serializable.
func Isolation(level pgx.TxIsoLevel) TxOption {
	return txOption(func(o *txOptions) { o.isolation, o.begins = level, "Isolation" })
}

// Attempts sets how often the transaction, or the function of [Limiter.Retry], is tried at most. The default is 30, which
// takes about 5 s with the pauses in between. A number below 1 is 1.
func Attempts(n int) TxOption { return txOption(func(o *txOptions) { o.attempts = max(n, 1) }) }

const (
	defaultAttempts = 30

	// The pause before another attempt is random, up to a bound that doubles from firstPause to lastPause.
	firstPause = 25 * time.Millisecond
	lastPause  = 400 * time.Millisecond
)

// rollbackTimeout bounds a rollback, which must happen even when ctx has ended.
const rollbackTimeout = 5 * time.Second

// InTx runs fn in a transaction and commits it. The transaction is SERIALIZABLE unless [Isolation] says otherwise.
// After a serialization failure (SQLSTATE 40001) or a deadlock (40P01), also at COMMIT, it is rolled back and run
// again. So fn must not do anything that a rollback does not undo. When the attempts run out, or ctx ends after the
// first, the error matches [ErrAttemptsExhausted].
//
// Any other error of fn rolls back and is returned as it is. A panic rolls back, too. fn must return the errors of its
// statements such that errors.As finds them (%w, not %v), or they are not retried. If the connection breaks at COMMIT,
// the error matches [ErrUnknownOutcome].
//
// db is a *pgxpool.Pool, a *pgxpool.Conn or a *pgx.Conn, and in no transaction. In fn, consume on tx: a verb that
// writes on db itself, if db is a pool, is [ErrInvalid] without [OutsideTx], as is another InTx on it. fn must not end
// the transaction: after tx.Rollback, the error matches pgx.ErrTxCommitRollback; after tx.Commit, or a COMMIT or
// ROLLBACK as text, the error is ErrUnknownOutcome.
func (l *Limiter) InTx(
	ctx context.Context,
	db interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	},
	fn func(ctx context.Context, tx pgx.Tx) error,
	options ...TxOption,
) error {
	if handles.IsNil(db) || fn == nil {
		return fmt.Errorf("%w: the database or the function is nil", ErrInvalid)
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
			return l.beginAtOnce(ctx, db, isolation, t, fn)
		}
		tx := &lateTx{ctx: ctx, conn: conn, isolation: isolation, turn: t, schema: l.Schema}
		return &transaction{
			run: func(ctx context.Context) error {
				if connOf(db) != nil { // fn may use the connection beside tx
					if err := tx.begin(ctx); err != nil {
						return err
					}
				}
				err := fn(ctx, tx)
				if err == nil {
					err = tx.begin(ctx) // fn had no statement
				}
				if tx.failed != nil && !errors.Is(err, tx.failed) { // fn may hide it
					return tx.failed
				}
				if tx.maybeCommitted() {
					return endedByFunction(err)
				}
				if err == nil && conn.IsClosed() && !tx.ended { // fn may hide that too; COMMIT cannot be sent
					return fmt.Errorf("ratelimit: commit: %w", pgconn.ErrConnClosed)
				}
				return err
			},
			commit: func(ctx context.Context) error {
				defer release()
				if tx.rolledBack {
					return fmt.Errorf("%w: the function has rolled it back, which it must not do", pgx.ErrTxCommitRollback)
				}
				return tx.Commit(ctx)
			},
			rollback: func(ctx context.Context) error {
				defer release()
				return tx.Rollback(ctx) // if that fails, pgx closes the connection, which also rolls back
			},
		}, nil
	})
}

// beginAtOnce is for a handle that is not a pool or a connection of pgx: BEGIN and the lock are a round trip each, before
// fn.
func (l *Limiter) beginAtOnce(ctx context.Context, db txBeginner, isolation pgx.TxIsoLevel, t turn, fn func(ctx context.Context, tx pgx.Tx) error) (*transaction, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: isolation})
	if err != nil {
		return nil, err
	}
	return &transaction{
		run: func(ctx context.Context) error {
			if len(t) > 0 {
				if _, err := tx.Exec(ctx, lockQuery(l.Schema, t.views()...)); err != nil {
					return beginFailed(t, err)
				}
			}
			err := fn(ctx, tx)
			if err == nil || !errors.Is(rollBack(ctx, tx.Rollback), pgx.ErrTxClosed) {
				return err
			}
			if inMemory, ok := tx.(interface{ Committed() bool }); ok && !inMemory.Committed() { // of others, nobody knows
				return err
			}
			return endedByFunction(err)
		},
		commit:   tx.Commit,
		rollback: tx.Rollback,
	}, nil
}

// endedByFunction is the error of a transaction that its function has ended, perhaps by a commit. err is the function's.
func endedByFunction(err error) error {
	ended := fmt.Errorf("ratelimit: commit: %w: the function has ended the transaction itself, which it must not do", ErrUnknownOutcome)
	if err == nil {
		return ended
	}
	return fmt.Errorf("%w; and then: %w", ended, beside{inner{err}})
}

// acquire is connOf or, for a pool, one of its connections until release is called.
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

var errInTransaction = fmt.Errorf("%w: the connection is in a transaction already, which COMMIT would end", ErrInvalid)

// Retry runs fn again after a serialization failure (SQLSTATE 40001) or a deadlock (40P01), within the bounds of
// [Limiter.InTx]. It is for the transaction function of an ORM (docs/databases.md), and for calls outside transactions,
// on a database whose default isolation level is above READ COMMITTED.
//
// fn must not do anything that a rollback does not undo. It must return the errors of its statements and of COMMIT such
// that errors.As finds them (%w, not %v). When the attempts run out, or ctx ends during a pause, the error matches
// [ErrAttemptsExhausted]. The only option is [Attempts].
func (l *Limiter) Retry(ctx context.Context, fn func(ctx context.Context) error, options ...TxOption) error {
	o, err := newTxOptions(options)
	switch {
	case err != nil:
		return err
	case o.begins != "":
		return fmt.Errorf("%w: %s is for a transaction that this package begins, and Retry begins none", ErrInvalid, o.begins)
	case fn == nil:
		return fmt.Errorf("%w: the function is nil", ErrInvalid)
	}
	return retry(ctx, o.attempts, l.OnRetry, func() (committing bool, err error) { return true, fn(ctx) })
}

// retry runs a transaction until it could be serialized. committing says that its error leaves open whether it was
// committed.
func retry(ctx context.Context, attempts int, onRetry func(ctx context.Context, attempt int, err error), run func() (committing bool, err error)) error {
	gaveUp := func(attempts int, err error) error { return fmt.Errorf("ratelimit: %w", exhausted(attempts, err)) }
	var conflict error // of the last attempt that could not be serialized
	for attempt := 1; ; attempt++ {
		committing, err := run()
		switch {
		case err != nil && retryable(err):
			conflict = err
		case conflict != nil && !committing && ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return gaveUp(attempt, fmt.Errorf("%w; the attempt before: %w", inner{err}, inner{conflict}))
		default:
			return err
		}
		if attempt == attempts {
			return gaveUp(attempt, err)
		}
		if !backOff(ctx, attempt) {
			return gaveUp(attempt, fmt.Errorf("%w; the last attempt: %w", over(ctx), inner{err}))
		}
		if onRetry != nil {
			onRetry(ctx, attempt, err)
		}
	}
}

// exhausted wraps the error of the last attempt. For a 40001 of pgx, the text includes the reason that the server gave.
func exhausted(attempts int, err error) error {
	reason := ""
	if pgErr := (*pgconn.PgError)(nil); errors.As(err, &pgErr) && pgErr.Code == "40001" && pgErr.Detail != "" {
		reason = ": " + pgErr.Detail
	}
	return fmt.Errorf("%w after %d: %w%s", ErrAttemptsExhausted, attempts, inner{err}, reason)
}

// backOff waits before the next attempt. It returns false if ctx ends first.
func backOff(ctx context.Context, attempt int) bool {
	select {
	case <-time.After(rand.N(min(firstPause<<min(attempt-1, 10), lastPause))):
		return true
	case <-ctx.Done():
		return false
	}
}

// over is the error of a context that has ended, and its cause if there is another.
func over(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != ctx.Err() { //nolint:errorlint // they are the same if there is no cause
		return fmt.Errorf("%w: %w", ctx.Err(), inner{cause})
	}
	return ctx.Err()
}

// transaction is a transaction that has begun, or begins with its first statement. Either commit or rollback is called,
// once, and releases the connection.
type transaction struct {
	run, commit, rollback func(ctx context.Context) error
}

// beginner makes a transaction. It locks the views of the turn, if there is one, before anything takes a snapshot.
type beginner func(ctx context.Context, isolation pgx.TxIsoLevel, t turn) (*transaction, error)

// inTx runs a transaction until it could be serialized.
func (l *Limiter) inTx(ctx context.Context, db any, options []TxOption, begin beginner) error {
	o, err := newTxOptions(options)
	if err != nil {
		return err
	}
	hot, err := o.turns(ctx)
	if err != nil {
		return err
	}
	if outside(ctx, db) {
		return fmt.Errorf("%w: %s", ErrInvalid, outsideText("a transaction", "use tx"))
	}
	if l.Schema != "" && len(hot) > 0 {
		if err := inschema.Check(l.Schema); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	return retry(ctx, o.attempts, l.OnRetry, func() (committing bool, err error) { return l.attempt(ctx, db, o.isolation, hot, begin) })
}

// attempt runs one transaction, when its turn on the hot limits has come. committing says that the error is COMMIT's.
func (l *Limiter) attempt(ctx context.Context, db any, isolation pgx.TxIsoLevel, hot []demand, begin beginner) (committing bool, err error) {
	var t turn
	if len(hot) > 0 {
		var leave func()
		if t, leave, err = l.queues.enter(ctx, hot); err != nil {
			return false, err
		}
		defer leave()
		ctx = context.WithValue(ctx, turnKey{}, t)
	}
	ctx, end := withOpenTx(ctx, db)
	committed := false
	defer func() { end(committed) }()
	tx, err := begin(ctx, isolation, t)
	if err != nil {
		return false, beginFailed(t, err)
	}
	defer func() {
		if !committing {
			_ = rollBack(ctx, tx.rollback)
		}
	}()
	if err := tx.run(ctx); err != nil {
		return false, err
	}
	if ctx.Err() != nil { // no driver would send COMMIT, but some return no error
		return false, fmt.Errorf("ratelimit: commit: %w", over(ctx))
	}
	committing = true // COMMIT ends the transaction, with or without an error
	if err := tx.commit(ctx); err != nil {
		return true, fmt.Errorf("ratelimit: commit: %w", unknownUnless(err))
	}
	committed = true
	return true, nil
}

// rollBack rolls back, also if ctx has ended.
func rollBack(ctx context.Context, rollback func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	return rollback(ctx)
}

// beginFailed explains the error of a transaction that did not begin, or could not lock the views of its turn.
func beginFailed(t turn, err error) error {
	what := "begin"
	if len(t) > 0 {
		what += ", with a turn on " + t.String()
	}
	state := sqlState(err) // undefined_table, insufficient_privilege; the latter also if the role may not connect
	if (state == "42P01" || state == "3F000" || state == "42501") && !errors.As(err, new(*pgconn.ConnectError)) {
		return fmt.Errorf("ratelimit: %s: %w (has the schema of package migrations been migrated, "+
			"and has this role UPDATE on the views ratelimit.turn_00 to _31, which ratelimit.grant gives?)", what, inner{err})
	}
	return fmt.Errorf("ratelimit: %s: %w", what, inner{err})
}

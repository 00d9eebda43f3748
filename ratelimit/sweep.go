package ratelimit

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// Sweep deletes the rows of limits that say nothing, and returns how many: those of keys that have been full for an hour. A
// missing row means the same, so that no decision changes, and the table holds the keys that are in use instead of all
// that ever were. Run it every so often, in one process or in all of them:
//
//	for ctx.Err() == nil {
//		deleted, err := limits.Sweep(ctx, pool, sendMessage, signUps, llmTokens)
//		slog.Info("swept", "rows", deleted, "error", err)
//		select {
//		case <-ctx.Done():
//		case <-time.After(10 * time.Minute):
//		}
//	}
//
// It looks at all rows of the limits, 1000 at a time in the order of their keys, each thousand in a short READ COMMITTED transaction
// of its own, and pauses in between for three times as long as a thousand has taken. It never waits for a row that another transaction
// has locked, nor for another sweep, but leaves the row to the next. A call for a row that is being deleted waits for that
// transaction; in REPEATABLE READ and SERIALIZABLE that is a conflict (SQLSTATE 40001), as with any other writer. So db must be a connection or a pool, or [SQL]
// of a *sql.DB or *sql.Conn, or a [Coalescer], whose pool it is then. A transaction, which would hold all locks to its end, is an
// error that matches [ErrInvalid] (but for a *sql.Conn in one, which is not found out), as are wrong limits, none, and two of one name.
//
// When ctx is over or the database fails, what is deleted stays deleted; it is counted, except for a thousand whose commit was not
// answered. The next Sweep begins anew.
//
// # Whose numbers
//
// What a full row is follows from the limits' numbers, which are in the program alone. Rows of a limit that it has no more are
// never swept: delete them by name. While processes with different numbers of a limit run side by side, sweep it by the largest
// capacity and the slowest rate of them, or leave it out: a key that is full by a smaller capacity, once its row is deleted,
// is full by a larger one as well. (The hour makes up for it where it refills the difference, as it does for most limits by the
// second or minute.) After that, sweep by the new numbers.
//
// # What is not exactly the same
//
// A clock that steps back by more than an hour comes to instants at which a key whose row was deleted was not full yet. Until it
// has caught up, such a key may be granted up to its capacity too much, once.
//
// A sharded limit whose rows are gone begins as on its first use: what is taken first is taken evenly from all shards, so that all
// of them are refilled. With its rows, it would have been taken from one, and been refilled more slowly. Neither grants more than
// the limit without shards.
func (l *Limiter) Sweep(ctx context.Context, db DB, limits ...Limit) (deleted int64, err error) {
	if len(limits) == 0 {
		return 0, fmt.Errorf("%w: no limit to sweep", ErrInvalid)
	}
	names := map[string]bool{}
	for _, limit := range limits {
		if err := limit.Validate(); err != nil {
			return 0, err
		}
		if names[limit.name] {
			return 0, fmt.Errorf("%w: limit %q is to be swept twice in one call", ErrInvalid, limit.name)
		}
		names[limit.name] = true
	}
	inTx, err := l.readCommitted(db)
	if err != nil {
		return 0, err
	}
	for _, limit := range limits {
		n, err := l.sweep(ctx, inTx, limit)
		deleted += n
		if err != nil {
			return deleted, explain("sweep", fmt.Errorf("limit %q: %w", limit.name, err))
		}
	}
	return deleted, nil
}

// sweep deletes the rows of one limit that say nothing.
func (l *Limiter) sweep(ctx context.Context, inTx inReadCommitted, limit Limit) (deleted int64, err error) {
	args := dbsqlc.SweepParams{
		Name: limit.name, Rate: limit.numbers.Rate, Period: limit.numbers.Period, Kind: string(limit.Config().Kind),
		Capacity: limit.numbers.Capacity, Start: nullable(pgtype.Timestamptz{Time: limit.start, Valid: limit.hasStart}),
	}
	for {
		begin := time.Now()
		if l.Clock != nil {
			now, err := timestamp("the clock's time", l.Clock())
			if err != nil {
				return deleted, err
			}
			args.Now = nullable(now)
		}
		var row dbsqlc.SweepRow
		err = inTx(ctx, func(ctx context.Context, tx DB) (err error) {
			row, err = wire{db: tx}.queries().Sweep(ctx, args)
			return err
		})
		if err != nil {
			return deleted, err
		}
		deleted += int64(row.Deleted.Int32)
		select {
		case <-ctx.Done():
			return deleted, ctx.Err()
		case <-time.After(3 * time.Since(begin)): // others want the processor and the disk, too
		}
		if !row.Next.Valid {
			return deleted, nil
		}
		args.First = row.Next.String
	}
}

// inReadCommitted runs fn in a READ COMMITTED transaction of its own.
type inReadCommitted func(ctx context.Context, fn func(ctx context.Context, tx DB) error) error

// readCommitted is how transactions are run on a DB, if it is not in one already.
func (l *Limiter) readCommitted(db DB) (inReadCommitted, error) {
	if noDatabase(db) {
		return nil, fmt.Errorf("%w: no database", ErrInvalid)
	}
	level := Isolation(pgx.ReadCommitted)
	if coalescer, ok := coalescerOf(db); ok {
		db = coalescer.Pool
	}
	switch db := db.(type) {
	case txBeginner:
		if inTransaction(db) {
			break
		}
		return func(ctx context.Context, fn func(ctx context.Context, tx DB) error) error {
			return l.InTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx) }, level)
		}, nil
	case sqlDB:
		beginner, ok := db.db.(sqlTxBeginner)
		if !ok {
			break
		}
		return func(ctx context.Context, fn func(ctx context.Context, tx DB) error) error {
			return l.InSQLTx(ctx, beginner, func(ctx context.Context, tx *sql.Tx) error { return fn(ctx, SQL(tx)) }, level)
		}, nil
	}
	return nil, fmt.Errorf("%w: a sweep needs a connection or a pool, to make transactions of its own; %T is none, or is in a transaction",
		ErrInvalid, db)
}

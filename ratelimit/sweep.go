package ratelimit

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/handles"
)

// Sweep deletes the rows of keys that have been full for an hour, and returns how many it deleted. No decision changes.
// A Limiter from [Open] does it in the background. It also ends expired holds of all limits, and forgets those that are
// over.
//
// db is a connection, a pool, [SQL] of a *sql.DB or *sql.Conn, or a [Coalescer], whose pool it uses. A transaction is
// [ErrInvalid] (it is not detected on a *sql.Conn), and so are the pool of a transaction inside its function
// ([OutsideTx]), no limits, two of one name, and one made by [Limit.With]. The role needs the word consume or operate
// (ratelimit.grant).
//
// A row must be full by the limit passed, by every definition of its name that was published within 7 days, and by
// every override within a day. Of a limit that [Varies], it must be unused for so long, and not in debt. It works in
// READ COMMITTED transactions of 1000 rows, and skips locked rows. A call for a row that is being deleted waits; above
// READ COMMITTED it gets 40001. After an error, deleted rows stay deleted. The error joins one for each limit that
// could not be swept.
func (l *Limiter) Sweep(ctx context.Context, db DB, limits ...Limit) (deleted int64, err error) {
	if len(limits) == 0 {
		return 0, fmt.Errorf("%w: no limit to sweep", ErrInvalid)
	}
	if err := definitionsOnly(limits); err != nil {
		return 0, err
	}
	if outside(ctx, db) {
		return 0, fmt.Errorf("%w: %s", ErrInvalid, outsideText("Sweep", "sweep before or after it"))
	}
	inTx, err := l.readCommitted(db)
	if err != nil {
		return 0, err
	}
	deleted, errs := l.sweepAll(ctx, func(ctx context.Context, _, step string, fn func(ctx context.Context, tx DB) error) error {
		if step == sweepEnds { // no other program is asked, nor told
			return nil
		}
		return inTx(ctx, fn)
	}, limits)
	return deleted, errors.Join(errs...)
}

// sweepAll sweeps the limits in order. If the server refuses one, for example by a timeout, the others are swept all the same.
func (l *Limiter) sweepAll(ctx context.Context, run sweepStep, limits []Limit) (deleted int64, errs []error) {
	for _, limit := range limits {
		if limit.rowless() && limit.varies == 0 {
			continue
		}
		n, err := l.sweep(ctx, run, limit)
		deleted += n
		if err != nil && !errors.Is(err, errNotItsTurn) {
			errs = append(errs, explain("sweep", fmt.Errorf("limit %q: %w", limit.name, inner{err})))
			if state := sqlState(err); ctx.Err() != nil || state == "" && !errors.Is(err, errSweepLocked) || state == "42883" || state == "3F000" { // the others would fail alike
				return deleted, errs
			}
		}
	}
	if err := l.sweepHolds(ctx, run); err != nil && !errors.Is(err, errNotItsTurn) {
		errs = append(errs, explain("sweep", fmt.Errorf("holds: %w", inner{err})))
	}
	return deleted, errs
}

// sweep deletes the rows of one limit that mean the same as no row.
func (l *Limiter) sweep(ctx context.Context, run sweepStep, limit Limit) (deleted int64, err error) {
	args := dbsqlc.SweepParams{
		Name: limit.name, Rate: limit.numbers.Rate, Period: limit.numbers.Period, Kind: limit.Config().Kind,
		Capacity: limit.numbers.Capacity, Start: nullable(pgtype.Timestamptz{Time: limit.start, Valid: limit.hasStart}),
	}
	if limit.varies > 0 {
		args.Varies = pgtype.Interval{Days: int32(limit.varies / day), Microseconds: (limit.varies % day).Microseconds(), Valid: true}
	}
	if limit.onCalendar() {
		months, days := limit.calendar.Step()
		args.Unit = pgtype.Interval{Months: int32(months), Days: int32(days), Valid: true}
	}
	err = l.sweepBatches(ctx, run, limit.name, func(ctx context.Context, tx DB, now *time.Time) (more bool, done func(), err error) {
		args.Now = now
		row, err := query(ctx, wire{db: tx, schema: l.Schema}, (*dbsqlc.Queries).Sweep, args)
		return row.Next.Valid, func() {
			deleted += int64(row.Deleted.Int32)
			args.First = row.Next.String
		}, err
	})
	return deleted, err
}

// sweepHolds gives back expired holds, and deletes the rows of those that are over, of all limits.
func (l *Limiter) sweepHolds(ctx context.Context, run sweepStep) error {
	var args dbsqlc.SweepHoldsParams
	return l.sweepBatches(ctx, run, "", func(ctx context.Context, tx DB, now *time.Time) (more bool, done func(), err error) {
		if isInMemory(tx) { // which has none
			return false, func() {}, nil
		}
		args.Now = now
		row, err := wire{db: tx, schema: l.Schema}.queries().SweepHolds(ctx, args)
		return row.NextName.Valid, func() {
			args.AfterName, args.AfterKey, args.AfterID = row.NextName.String, row.NextKey.String, row.NextID.String
		}, err
	})
}

// sweepStep runs a step of the pass over a limit ("": all holds) in a transaction: a batch, or, after the last one, nothing.
type sweepStep func(ctx context.Context, name, step string, fn func(ctx context.Context, tx DB) error) error

// The steps, as ratelimit._sweep_turn knows them.
const (
	sweepBegins = "begin"
	sweepGoesOn = "go on"
	sweepEnds   = "end"
)

// sweepBatches runs batches, each in a transaction, until there is no more. done is called after the COMMIT.
func (l *Limiter) sweepBatches(
	ctx context.Context, run sweepStep, name string, batch func(ctx context.Context, tx DB, now *time.Time) (more bool, done func(), err error),
) error {
	for step := sweepBegins; ; step = sweepGoesOn {
		begin := time.Now()
		now, err := l.now()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
		var more bool
		var done func()
		err = run(ctx, name, step, func(ctx context.Context, tx DB) (err error) {
			more, done, err = batch(ctx, tx, nullable(now))
			return err
		})
		if err != nil {
			return err
		}
		done()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(3*time.Since(begin), 10*time.Second)): // leaves the processor and the disk to other work, and is no death
		}
		if !more {
			return run(ctx, name, sweepEnds, func(context.Context, DB) error { return nil })
		}
	}
}

// inReadCommitted runs fn in a READ COMMITTED transaction of its own, whatever transaction of the caller's is open.
type inReadCommitted func(ctx context.Context, fn func(ctx context.Context, tx DB) error) error

// readCommitted is how transactions are run on a DB that is not in a transaction.
func (l *Limiter) readCommitted(db DB) (inReadCommitted, error) {
	if noDatabase(db) {
		return nil, fmt.Errorf("%w: %s", ErrInvalid, noDatabaseText)
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
			return l.InTx(OutsideTx(ctx), db, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, tx) }, level)
		}, nil
	case sqlDB:
		beginner, ok := db.db.(sqlTxBeginner)
		if !ok {
			break
		}
		return func(ctx context.Context, fn func(ctx context.Context, tx DB) error) error {
			return l.InSQLTx(OutsideTx(ctx), beginner, func(ctx context.Context, tx *sql.Tx) error { return fn(ctx, SQL(tx)) }, level)
		}, nil
	}
	return nil, fmt.Errorf("%w: Sweep needs a pool, or a connection that is not in a transaction, for transactions of its own; this is a %s",
		ErrInvalid, handles.Type(db))
}

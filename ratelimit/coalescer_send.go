package ratelimit

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// observe tells of a statement.
func (c *Coalescer) observe(calls int, err error) {
	if err == nil && c.OnBatch != nil {
		c.OnBatch(calls)
	}
}

// retry runs a statement in a transaction of its own, again if it could not be serialized.
func (c *Coalescer) retry(ctx context.Context, attempts int, hasty bool, statement func(db wire) error) error {
	for attempt := 1; ; attempt++ {
		begin := c.begin.Load()
		err := c.once(ctx, begin, hasty, statement)
		if sqlState(err) == stateIsolation && !begin {
			c.begin.Store(true)
			continue
		}
		switch {
		case err == nil || !retryable(err):
			return err
		case attempt == attempts:
			return exhausted(attempt, err)
		case !pause(ctx, attempt):
			return exhausted(attempt, fmt.Errorf("%w; the last attempt: %w", over(ctx), err))
		}
	}
}

// once runs a statement in a transaction of its own. If begin, that is told to be READ COMMITTED; if hasty, to wait for no lock for
// long.
func (c *Coalescer) once(ctx context.Context, begin, hasty bool, statement func(db wire) error) error {
	settings := c.settings(hasty)
	if begin {
		committing := false
		err := pgx.BeginTxFunc(ctx, c.Pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if settings != "" {
				if _, err := tx.Exec(ctx, settings); err != nil {
					return err
				}
			}
			err := statement(wire{tx, false})
			committing = err == nil
			return err
		})
		if committing {
			err = unknownUnless(err)
		}
		return err
	}
	var db DB = c.Pool
	if settings != "" {
		db = settingDB{c.Pool, settings}
	}
	return statement(wire{db, true})
}

// settings is a query that holds until the end of the transaction. Empty: none is needed.
func (c *Coalescer) settings(hasty bool) string {
	const async, haste = "set_config('synchronous_commit', 'off', true)", "set_config('lock_timeout', '20ms', true)"
	switch {
	case c.AsyncCommit && hasty:
		return "SELECT " + async + ", " + haste
	case c.AsyncCommit:
		return "SELECT " + async
	case hasty:
		return "SELECT " + haste
	}
	return ""
}

// settingDB sends settings ahead of a statement, in one round trip, which is one implicit transaction.
type settingDB struct {
	*pgxpool.Pool
	settings string
}

func (db settingDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	var both pgx.Batch
	both.Queue(db.settings)
	both.Queue(sql, args...)
	return settingRow{db.SendBatch(ctx, &both)}
}

type settingRow struct{ results pgx.BatchResults }

func (r settingRow) Scan(dest ...any) error {
	_, err := r.results.Exec()
	if err == nil {
		err = r.results.QueryRow().Scan(dest...)
	}
	if closeErr := r.results.Close(); err == nil {
		err = closeErr // of the commit
	}
	return err
}

// coalesce decides a batch. Where it can, it first asks each key for the sum of its calls, which is quicker. Calls that this decides
// are told at once; _ratelimit_coalesce decides the rest.
func (c *Coalescer) coalesce(b *batch) error {
	sums := b.sums()
	ask := sums && !c.skipSums.Load()
	if ask {
		var answer dbsqlc.CoalesceRow
		err := c.once(b.flight.ctx, c.begin.Load(), b.hasty(), func(db wire) (err error) {
			answer, err = b.consumeSums(b.flight.ctx, db)
			return err
		})
		switch {
		case retryable(err) || sqlState(err) == stateIsolation: // nothing was decided
			ask = false
		case err != nil:
			return err
		default:
			c.skipSums.Store(tooMany(len(b.groups)-len(answer.Ord), len(b.groups)))
			if len(answer.Ord) == 0 {
				break
			}
			others := b.keep(&answer)
			err := b.settle(&answer)
			if len(others) == 0 {
				return err
			}
			c.split(b, err, others)
		}
	}
	var row dbsqlc.CoalesceRow
	err := c.retry(b.flight.ctx, b.attempts(), b.hasty(), func(db wire) (err error) {
		row, err = db.queries().Coalesce(b.flight.ctx, b.args)
		return err
	})
	if err != nil {
		return err
	}
	err = b.settle(&row)
	if sums && !ask {
		c.skipSums.Store(tooMany(b.undecided(), len(b.groups)))
	}
	return err
}

// tooMany says whether to ask for sums does not pay if so many of the keys are left undecided. One in eight is an estimate, from
// what the two statements cost.
func tooMany(undecided, keys int) bool { return 8*undecided > keys }

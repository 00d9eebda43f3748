package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// QueueConsume queues a [Limiter.Consume] on the caller's batch, so that it costs no round trip of its own. What is wrong
// with the requests ([ErrInvalid], [ErrExceedsCapacity]) is returned at once, and nothing is queued. Otherwise the result
// is filled in, and [Limiter.Observer] called, when the batch has been sent and its results are read: by
// [Limiter.SendTx], or by Close of the pgx.BatchResults. Until then it is not OK. As in any transaction, what it says holds if
// that is committed: with SendTx, if it returns nil.
//
// Here a denial is an error in SQL too (SQLSTATE PT429), so that it stops the batch: the statements after it do not run, and
// Close returns the [*DeniedError]. What becomes of the statements before it depends on where the batch is sent:
//
//   - with [Limiter.SendTx]: the transaction is rolled back;
//   - on a connection or a pool: a batch that has no BEGIN in it is a transaction of its own, and is rolled back;
//   - on a transaction of the caller's: that is aborted, as by any SQL error, and can only be rolled back, as far as to a
//     savepoint of pgx's Begin if the batch is sent on that.
//
// To go on after a denial, Consume in the transaction instead. Do so too where most calls are denied: as an error, a denial
// costs more than a grant, and the server logs it (the names of the limits, their numbers, and no keys).
//
// Let Close read the results. Whoever reads them one by one (Exec, Query, QueryRow) gets what a server sends, a
// *pgconn.PgError for a denial, and the result is not filled in. In the function of a [Limiter.InTx] with [Hot], ctx must be
// the one that it is given: of a limit with shards it says which one was chosen. Otherwise only the Observer is given ctx. The
// Observer is told how long the answer was waited for once its turn to be read had come.
func (l *Limiter) QueueConsume(ctx context.Context, batch *pgx.Batch, requests ...Request) (*Result, error) {
	if batch == nil {
		return nil, fmt.Errorf("%w: no batch", ErrInvalid)
	}
	began := time.Now()
	requests = slices.Clone(requests)
	c, err := l.newCall(VerbConsume, "", requests)
	result := unanswered(requests)
	if err != nil {
		l.observe(ctx, VerbConsume, began, result, err)
		return nil, err
	}

	s := c.statement(ctx, true)
	r := replyTo(s.args, false)
	batch.Queue(s.sql, s.args...).Fn = func(results pgx.BatchResults) (err error) {
		began := time.Now()
		r.row = results.QueryRow()
		result = unanswered(requests) // SendTx may have sent the batch before
		a, err := s.read(r, s.demands)
		if denial, ok := denialIn(err, s.demands); ok {
			a, err = denial, nil
		}
		if err == nil {
			c.fill(&result, a)
		}
		result, err = c.conclude(result, err)
		l.observe(ctx, VerbConsume, began, result, err)
		return err
	}
	return &result, nil
}

package ratelimit

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/inschema"
)

// QueueConsume queues a [Limiter.Consume] on a batch of the caller's, so that it needs no round trip of its own. An invalid
// request ([ErrInvalid], [ErrExceedsCapacity]) is returned at once, and nothing is queued. So is a denial by policy (see
// [DeniedError]). If all limits are [Unlimited], nothing is queued either, and the result is filled in at once.
//
// The result is filled in, and [Limiter.Observer] called, when the batch's results are read: by [Limiter.SendTx], or by
// Close of the pgx.BatchResults. Until then, it is not OK. As in any transaction, the result holds only if the transaction
// commits. With SendTx, it holds if SendTx returns nil.
//
// In a batch, a denial is an error in SQL too (SQLSTATE PT429). It stops the batch: the statements after it do not run, and
// Close returns the [*DeniedError]. The effect on the statements before it depends on where the batch is sent:
//
//   - With [Limiter.SendTx], the transaction is rolled back.
//   - On a connection or a pool, a batch without BEGIN is a transaction of its own, and is rolled back. On a distributed table of Citus
//     it is none: each statement commits by itself. Use SendTx there.
//   - On a transaction of the caller's, the transaction is aborted, as by any SQL error, and must be rolled back. If the
//     batch was sent on a nested transaction (pgx's Begin), a rollback to its savepoint is enough.
//
// To go on after a denial, call Consume in the transaction instead. Do the same if most calls are denied: as an error, a
// denial costs more than a grant. The server logs it, with the limits' names and numbers and without keys.
//
// If the answer is lost outside a transaction, Close's error matches [ErrUnknownOutcome], since the implicit commit may have been
// reached. If the answer came and the commit then failed, Close returns pgx's error as it is.
//
// Let Close read the results. Code that reads them one by one (Exec, Query, QueryRow) gets the server's *pgconn.PgError for
// a denial, and the result is not filled in.
//
// In the function of a [Limiter.InTx] with [Hot], pass the ctx of that function: for a limit with shards, it names the
// chosen shard. Otherwise ctx is only passed to the Observer. The Observer's Took is the wait for the answer, from the
// moment at which it is the next to be read.
func (l *Limiter) QueueConsume(ctx context.Context, batch *pgx.Batch, requests ...Request) (*Result, error) {
	if batch == nil {
		return nil, invalidCall(requests, "the batch is nil")
	}
	began := time.Now()
	requests = slices.Clone(requests)
	c, err := l.newCall(verbConsume, about{}, requests, nil)
	if l.life.closed() {
		err = limiterClosed(verbConsume, requests)
	}
	if err != nil {
		result := unanswered(verbConsume, requests)
		l.observe(ctx, verbConsume, time.Since(began), result, err)
		return nil, err
	}
	result := unanswered(verbConsume, c.requests)
	if a := c.byPolicy(); a != nil {
		c.fill(&result, a)
		result, err = c.conclude(result, nil)
		l.observe(ctx, verbConsume, time.Since(began), result, err)
		if err != nil {
			return nil, err
		}
		return &result, nil
	}

	s := c.statement(ctx, true)
	if s.sql, err = inschema.SQL(s.sql, l.Schema); err != nil {
		return nil, invalidCall(requests, err.Error())
	}
	r := replyTo(s.args, true, s.asks)
	batch.Queue(s.sql, s.args...).Fn = func(results pgx.BatchResults) (err error) {
		began := time.Now()
		r.row = results.QueryRow()
		result = unanswered(verbConsume, c.requests) // SendTx may send the batch several times
		a, err := r.read(s)
		err = r.unknownIfSent(err)
		if denial, ok := denialIn(err, s.demands); ok {
			a, err = denial, nil
		}
		if err == nil {
			c.fill(&result, a)
		}
		result, err = c.conclude(result, err)
		l.observe(ctx, verbConsume, time.Since(began), result, err)
		return err
	}
	return &result, nil
}

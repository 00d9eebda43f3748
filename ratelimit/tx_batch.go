package ratelimit

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/inschema"
)

// QueueConsume queues a [Limiter.Consume] on a batch of the caller's. [Limiter.SendTx], or Close of the
// pgx.BatchResults, fills the result in. It holds if the transaction commits. An invalid request and a denial by policy
// (see [DeniedError]) are returned at once, and nothing is queued.
//
// In a batch, a denial is an error in SQL too (SQLSTATE PT429), which the server logs. It stops the batch, and Close
// returns the [*DeniedError]. SendTx rolls back. A batch without BEGIN is a transaction of its own, and rolled back
// (not on a distributed table of Citus). A transaction of the caller's is aborted, and must be rolled back, or the
// nested one.
//
// Let Close read the results, or a denial is the server's *pgconn.PgError. If the answer is lost outside a transaction,
// Close's error matches [ErrUnknownOutcome]. In the function of a [Limiter.InTx] with [Hot], pass the ctx of that
// function.
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

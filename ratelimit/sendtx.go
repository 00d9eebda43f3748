package ratelimit

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// batchTxBeginner is what SendTx sends a transaction to.
type batchTxBeginner interface {
	txBeginner
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// SendTx runs the queries of a batch in a transaction, SERIALIZABLE unless told otherwise, on a *pgxpool.Pool, a *pgxpool.Conn or a
// *pgx.Conn: BEGIN, the batch and COMMIT are sent together, in one round trip. (In pgx's default mode, a connection that meets a query for the first time prepares it
// in one more.) An error of a query, a denial among them, stops the batch, rolls it back, in another round trip, and is returned; the
// connection is left clean and goes back to its pool.
//
// If the database could not serialize the transaction (SQLSTATE 40001) or ended a deadlock with it (40P01), be it at COMMIT,
// it is sent again, within the bounds of [Limiter.InTx]; when they run out, the error matches [ErrAttemptsExhausted]. The batch is not
// used up: copies of its queries are sent. It can be sent again, but not by two goroutines at once. It must not begin or end a
// transaction itself. The option [Hot] is refused.
//
// Functions that were set for the results of the queries (by the methods Query, QueryRow and Exec of pgx.QueuedQuery) are
// called with each attempt. COMMIT is on its way by then: where no query failed, an error that such a function returns rolls
// nothing back. It keeps those after it from being called, and SendTx returns it when the transaction is committed.
//
// If the connection broke or ctx was over when it had been sent, the error matches [ErrUnknownOutcome], since COMMIT may have
// reached the server with the rest: the batch is not sent again.
func (l *Limiter) SendTx(
	ctx context.Context,
	db interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
		SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	},
	batch *pgx.Batch,
	options ...TxOption,
) error {
	o := newTxOptions(options)
	if isNil(db) || batch == nil {
		return fmt.Errorf("%w: no database, or no batch to send", ErrInvalid)
	}
	if inTransaction(db) {
		return errInTransaction
	}
	if len(o.hot) > 0 {
		return fmt.Errorf("%w: SendTx does not queue: Hot is for InTx", ErrInvalid)
	}
	var failed error
	err := retry(ctx, o.attempts, l.OnRetry, func() (open bool, err error) {
		failed, err = sendOnce(ctx, db, o.isolation, batch)
		return errors.Is(err, ErrUnknownOutcome), err
	})
	if err == nil {
		return failed
	}
	return err
}

// sendOnce sends the batch in one transaction. If there is no err, it was committed, and failed is the error of a function
// that read its results.
func sendOnce(ctx context.Context, db batchTxBeginner, isolation pgx.TxIsoLevel, batch *pgx.Batch) (failed, err error) {
	// BEGIN, copies of the queries, since pgx sends none twice, and COMMIT.
	sent := pgx.Batch{QueuedQueries: make([]*pgx.QueuedQuery, 0, len(batch.QueuedQueries)+2)}
	sent.BeginTx(pgx.TxOptions{IsoLevel: isolation})
	for i, q := range batch.QueuedQueries {
		sent.Queue(q.SQL, q.Arguments...).Fn = func(results pgx.BatchResults) error {
			if q.Fn == nil {
				return read(results, &sent, 1)
			}
			if failed = q.Fn(results); failed == nil {
				return nil
			}
			// Is it the batch that has failed? Read on to COMMIT, calling nobody.
			return read(results, &sent, len(batch.QueuedQueries)-i)
		}
	}
	committing := false
	sent.Queue("commit").Fn = func(results pgx.BatchResults) error {
		committing = true
		return read(results, &sent, 1)
	}

	results := db.SendBatch(ctx, &sent)
	tx := results.Tx()
	committed := false
	defer func() {
		rollbackCtx := ctx
		if !committed { // Close may have panicked
			var cancel context.CancelFunc
			rollbackCtx, cancel = context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
			defer cancel()
		}
		_ = tx.Rollback(rollbackCtx) // after COMMIT it only lets go of the connection
	}()
	err = results.Close()
	if err == nil {
		committed = true
		return failed, nil
	}
	var preparing pgx.ErrPreprocessingBatch
	switch {
	case tx.Conn() == nil: // there was none to send it on
		return nil, fmt.Errorf("ratelimit: begin: %w", err)
	case sqlState(err) != "" && sqlState(err) == sqlState(failed) || sqlState(err) == denialState && errors.As(failed, new(*DeniedError)):
		return nil, failed // the same, by somebody who knows more about it
	case errors.As(err, &preparing) && isConsume(preparing.SQL()): // our query, whose function may be missing
		return nil, explain(string(VerbConsume), err)
	case committing:
		return nil, fmt.Errorf("ratelimit: commit: %w", unknownUnless(err))
	case failed != nil && sqlState(err) == "": // it may have left its row unread, which is an error in pgx's modes without a pipeline
		return nil, unknownUnless(fmt.Errorf("%w; and then: %w", failed, err))
	}
	return nil, unknownUnless(err)
}

// read reads n results, up to an error.
func read(results pgx.BatchResults, batch *pgx.Batch, n int) error {
	for range n {
		if _, err := results.Exec(); err != nil {
			return keepPrepared(batch, err)
		}
	}
	return nil
}

// keepPrepared returns a query's error. pgx prepares the queries of a batch that failed anew, since that may be why. Where it is not,
// pgx shall find none in it, so that a flood of denials, or of conflicts, is not one of preparations.
func keepPrepared(batch *pgx.Batch, err error) error {
	if retryable(err) || sqlState(err) == denialState {
		batch.QueuedQueries = nil
	}
	return err
}

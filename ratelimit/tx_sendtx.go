package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/handles"
)

// batchTxBeginner is the handle that SendTx takes.
type batchTxBeginner interface {
	txBeginner
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// SendTx sends BEGIN, a batch and COMMIT together, in one round trip. An error of a query, such as a denial, stops the
// batch: the transaction is rolled back, and SendTx returns the error. Isolation and retries are those of
// [Limiter.InTx]. If the connection breaks or ctx ends after the batch was sent, the error matches [ErrUnknownOutcome],
// and the batch is not sent again.
//
// db is a *pgxpool.Pool, a *pgxpool.Conn or a *pgx.Conn. Two goroutines must not send the batch at once. A query that
// begins or ends a transaction, such as COMMIT, is [ErrInvalid]. So are the option [Hot], and the pool of a transaction
// inside its function: see [OutsideTx].
//
// Functions that read results (of pgx.QueuedQuery) are called in each attempt, after COMMIT was sent. So an error of
// one rolls nothing back, and matches ErrUnknownOutcome, not [ErrDenied].
func (l *Limiter) SendTx(
	ctx context.Context,
	db interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
		SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	},
	batch *pgx.Batch,
	options ...TxOption,
) error {
	o, err := newTxOptions(options)
	if err != nil {
		return err
	}
	if handles.IsNil(db) || batch == nil {
		return fmt.Errorf("%w: the database or the batch is nil", ErrInvalid)
	}
	if inTransaction(db) {
		return errInTransaction
	}
	if outside(ctx, db) {
		return fmt.Errorf("%w: %s", ErrInvalid, outsideText("SendTx", "send the batch by tx"))
	}
	if len(o.hot) > 0 {
		return fmt.Errorf("%w: SendTx does not queue: Hot is for InTx", ErrInvalid)
	}
	for _, q := range batch.QueuedQueries {
		if m := controlsTx.FindStringSubmatch(q.SQL); m != nil && m[2] == "" {
			return fmt.Errorf("%w: SendTx begins and ends the transaction: a batch has no %s", ErrInvalid, strings.ToUpper(m[1]))
		}
	}
	var failed error
	err = retry(ctx, o.attempts, l.OnRetry, func() (open bool, err error) {
		failed, err = sendOnce(ctx, db, o.isolation, batch)
		return errors.Is(err, ErrUnknownOutcome), err
	})
	if err == nil && failed != nil {
		return committedError{beside{failed}}
	}
	return err
}

// controlsTx finds a statement that begins or ends a transaction, after spaces and comments. ROLLBACK TO, its second group, does neither.
var controlsTx = regexp.MustCompile(`(?i)^(?:[\s;]|--.*\n|/\*(?:[^*]|\*+[^*/])*\*+/)*` +
	`(begin|start|commit|end|abort|prepare\s+transaction|rollback(?:\s+(?:work|transaction))?(\s+to)?)(?:[\s;]|--|/\*|$)`)

// sendOnce sends the batch in one transaction. If err is nil, the transaction was committed, and failed is the error of a
// function that read its results.
func sendOnce(ctx context.Context, db batchTxBeginner, isolation pgx.TxIsoLevel, batch *pgx.Batch) (failed, err error) {
	// BEGIN, copies of the queries (pgx sends no query twice), and COMMIT.
	sent := pgx.Batch{QueuedQueries: make([]*pgx.QueuedQuery, 0, len(batch.QueuedQueries)+2)}
	sent.BeginTx(pgx.TxOptions{IsoLevel: isolation})
	refused := false // failed is the denial of a call that QueueConsume has queued
	for i, q := range batch.QueuedQueries {
		sent.Queue(q.SQL, q.Arguments...).Fn = func(results pgx.BatchResults) error {
			if q.Fn == nil {
				return read(results, &sent, 1)
			}
			if failed = q.Fn(results); failed == nil {
				return nil
			}
			refused = replyOf(q) != nil && errors.Is(failed, ErrDenied)
			// The function or the batch may have failed: read on to COMMIT, without calling functions.
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
		_ = tx.Rollback(rollbackCtx) // after COMMIT it only releases the connection
	}()
	err = results.Close()
	if err == nil {
		committed = true
		return failed, nil
	}
	open := !notCommitted(err) // failed says nothing about it: it may be about anything
	var preparing pgx.ErrPreprocessingBatch
	switch {
	case sqlState(err) != "" && sqlState(err) == sqlState(failed) || sqlState(err) == denialState && refused:
		err = failed // the same error, with more details
	case tx.Conn() == nil: // there was no connection to send it on
		return nil, fmt.Errorf("ratelimit: begin: %w", err)
	case errors.As(err, &preparing) && queuedBy(batch, preparing.SQL()) != nil: // our query, whose function may be missing
		err = explainCall(verbConsume, queuedBy(batch, preparing.SQL()), err)
	case committing:
		return nil, fmt.Errorf("ratelimit: commit: %w", unknownUnless(err))
	case failed != nil && sqlState(err) == "": // the function may have left its row unread, an error in pgx's modes without a pipeline
		if open {
			failed = beside{failed}
		}
		err = fmt.Errorf("%w; and then: %w", failed, err)
	}
	if open {
		return nil, unknown(err)
	}
	return nil, err
}

// queuedBy are the requests of the calls that QueueConsume has queued by this query.
func queuedBy(batch *pgx.Batch, sql string) (requests []Request) {
	for _, q := range batch.QueuedQueries {
		if r := replyOf(q); r != nil && q.SQL == sql {
			requests = append(requests, r.asks.(*call).requests...)
		}
	}
	return requests
}

// replyOf is the reply to a query that QueueConsume has queued; of another query, it is nil.
func replyOf(q *pgx.QueuedQuery) *reply {
	if len(q.Arguments) == 0 {
		return nil
	}
	r, _ := q.Arguments[0].(*reply)
	return r
}

package ratelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
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
	c, err := l.newCall(verbConsume, time.Time{}, requests)
	result := unanswered(requests)
	if err != nil {
		l.observe(ctx, verbConsume, began, result, err)
		return nil, err
	}

	// take runs twice: now it only has the statement noted down, with its arguments; when the results are read, by decide, the answer
	// is there.
	var note note
	_ = c.take(ctx, &queries{Queries: *dbsqlc.New(&note), orRaise: true}, nil) // errNoted
	row := new(wireRow)
	batch.Queue(note.sql, row.prependTo(note.args)...).Fn = func(results pgx.BatchResults) (err error) {
		began := time.Now()
		result, err = c.decide(ctx, asked{results: results, row: row})
		l.observe(ctx, verbConsume, began, result, err)
		return err
	}
	return &result, nil
}

// note is a database that only notes the query it is asked.
type note struct {
	DB
	sql  string
	args []any
}

var errNoted = errors.New("ratelimit: queued on a batch")

func (n *note) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	n.sql, n.args = sql, args
	return n
}

// Scan has no row yet.
func (n *note) Scan(...any) error { return errNoted }

// asked is the querier of what was asked already: it reads the answer, be it a row or the SQL error that is a denial.
type asked struct {
	querier // nil: a batch does not reset
	results pgx.BatchResults
	row     *wireRow // which knows in what form
}

func (a asked) Consume(context.Context, dbsqlc.ConsumeParams) (consumeRow, error) {
	row, err := oneLimit(a.record())
	if denial, ok := denialIn(err, 1); ok && len(denial.rows) == 1 {
		return consumeRow{at: denial.at, row: denial.rows[0]}, nil
	}
	return row, err
}

func (a asked) ConsumeSharded(context.Context, dbsqlc.ConsumeShardedParams) (applyRow, error) {
	return a.rowOrDenial(1)
}

func (a asked) ConsumeSeveral(_ context.Context, arg dbsqlc.ConsumeSeveralParams) (applyRow, error) {
	return a.rowOrDenial(len(arg.Names))
}

func (a asked) Apply(_ context.Context, arg dbsqlc.ApplyParams) (applyRow, error) {
	return a.rowOrDenial(len(arg.Names))
}

// rowOrDenial is the answer for so many limits.
func (a asked) rowOrDenial(limits int) (applyRow, error) {
	row, err := anyLimits(a.record())
	if denial, ok := denialIn(err, limits); ok {
		return denial, nil
	}
	return row, err
}

func (a asked) record() (record []byte, err error) {
	a.row.Row = a.results.QueryRow()
	err = a.row.Scan(&record)
	return record, err
}

// denialState is the SQLSTATE of a denial.
const denialState = "PT429"

// denialIn is the answer of ratelimit_apply that ratelimit_raise put into an error, for so many limits. Anybody may raise a
// PT429: what is not to the letter what ratelimit_raise writes is no denial of ours.
func denialIn(err error, limits int) (row applyRow, ok bool) {
	if err == nil { // before pgErr is allocated
		return row, false
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != denialState {
		return row, false
	}
	var detail struct {
		At    *int64    `json:"at"`
		Ord   []int32   `json:"ord"`
		Value []float64 `json:"value"`
		Ts    []int64   `json:"ts"`
	}
	decoder := json.NewDecoder(strings.NewReader(pgErr.Detail))
	decoder.DisallowUnknownFields()
	if decoder.Decode(&detail) != nil || decoder.More() || detail.At == nil || len(detail.Value) != len(detail.Ord) || len(detail.Ts) != len(detail.Ord) {
		return row, false
	}
	row = applyRow{at: algebra.Micros(*detail.At), ord: detail.Ord}
	for i, ord := range detail.Ord {
		if ord < 1 || int(ord) > limits {
			return row, false
		}
		row.rows = append(row.rows, algebra.Row{Value: detail.Value[i], TS: algebra.Micros(detail.Ts[i])})
	}
	return row, true
}

// BatchTxBeginner is what [Limiter.SendTx] sends a transaction to: a *pgxpool.Pool, a *pgxpool.Conn or a *pgx.Conn, but
// not a pgx.Tx, which has begun already.
type BatchTxBeginner interface {
	TxBeginner
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// SendTx runs the queries of a batch in a transaction, SERIALIZABLE unless told otherwise: BEGIN, the batch and COMMIT are
// sent together, in one round trip. (In pgx's default mode, a connection that meets a query for the first time prepares it
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
func (l *Limiter) SendTx(ctx context.Context, db BatchTxBeginner, batch *pgx.Batch, options ...TxOption) error {
	o := newTxOptions(options)
	if db == nil || batch == nil {
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
func sendOnce(ctx context.Context, db BatchTxBeginner, isolation pgx.TxIsoLevel, batch *pgx.Batch) (failed, err error) {
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
	case errors.As(err, &preparing) && strings.Contains(preparing.SQL(), "record_send(ratelimit_"): // our query, whose function may be missing
		return nil, explain(verbConsume, err)
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

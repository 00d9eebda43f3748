package ratelimit

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// lateTx is the transaction that InTx passes to its function. On a pool, it begins with the first statement. If that is one
// of this package's, BEGIN, the locks of a turn and the statement share a round trip. Otherwise BEGIN and the locks take
// one.
type lateTx struct {
	ctx       context.Context // the context of InTx
	conn      *pgx.Conn
	isolation pgx.TxIsoLevel
	turn      turn
	schema    string

	tx     pgx.Tx // nil: no statement yet
	failed error  // why it did not begin: later statements fail with it, and tx is closed or aborted
	ended  bool   // the connection may have another owner by now

	committed  bool // perhaps: by COMMIT, or by a statement that ended the transaction
	rolledBack bool // nothing is committed
}

// HandleType is for package internal/handles.
func (t *lateTx) HandleType() string { return "transaction of InTx" }

// beginning begins the transaction, and locks the views of the turn before anything takes a snapshot.
func (t *lateTx) beginning() *pgx.Batch {
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{IsoLevel: t.isolation})
	for _, view := range t.turn.views() { // one by one, so that each of these queries stays prepared
		batch.Queue(lockQuery(t.schema, view))
	}
	return batch
}

// canceled reports whether a statement's context has ended, but not InTx's. Then the statement is not sent, and the next one
// can begin the transaction.
func (t *lateTx) canceled(ctx context.Context) bool { return ctx.Err() != nil && t.ctx.Err() == nil }

// begin begins the transaction if it has not begun.
func (t *lateTx) begin(ctx context.Context) error {
	if t.tx == nil {
		if t.canceled(ctx) {
			return beginFailed(t.turn, over(ctx))
		}
		results := t.conn.SendBatch(ctx, t.beginning())
		t.tx = results.Tx()
		if err := results.Close(); err != nil {
			t.failed = beginFailed(t.turn, err)
		}
	}
	return t.failed
}

// queryOwn sends a query of this package. The first query of the transaction is sent with BEGIN. Only this package's
// queries are: in a batch, the arguments of others may mean something else.
func (t *lateTx) queryOwn(ctx context.Context, sql string, args []any) pgx.Row {
	if t.tx != nil || t.canceled(ctx) {
		return t.QueryRow(ctx, sql, args...)
	}
	r := &firstReply{late: t, batch: t.beginning()}
	r.batch.Queue(sql, args...)
	r.results = t.conn.SendBatch(ctx, r.batch)
	t.tx = r.results.Tx()
	return r
}

func (t *lateTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if err := t.begin(ctx); err != nil {
		return failedResults(err).QueryRow()
	}
	return t.tx.QueryRow(ctx, sql, args...)
}

// firstReply is the answer to the query that was sent with BEGIN.
type firstReply struct {
	late    *lateTx
	batch   *pgx.Batch
	results pgx.BatchResults
}

func (r *firstReply) Scan(dest ...any) error {
	before := r.batch.Len() - 1                // BEGIN, and the locks of a turn
	query := r.batch.QueuedQueries[before].SQL // as it was sent, since read may drop it
	if err := read(r.results, r.batch, before); err != nil {
		var preparing pgx.ErrPreprocessingBatch
		if !errors.As(err, &preparing) || preparing.SQL() != query { // else the query is ours, and its function may be missing
			err = beginFailed(r.late.turn, err)
		}
		r.late.failed = err
		_ = r.results.Close()
		return err
	}
	err := r.results.QueryRow().Scan(dest...)
	if err != nil {
		err = keepPrepared(r.batch, err)
	}
	if closeErr := r.results.Close(); err == nil {
		err = closeErr
	}
	return err
}

// failedResults makes results that all fail with err.
func failedResults(err error) pgx.BatchResults { return pgx.FailedBatchResults(new(pgx.Batch), err) }

func (t *lateTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := t.begin(ctx); err != nil {
		return failedResults(err).Query()
	}
	return t.tx.Query(ctx, sql, args...)
}

func (t *lateTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if err := t.begin(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	return t.tx.Exec(ctx, sql, args...)
}

func (t *lateTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if err := t.begin(ctx); err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	return t.tx.SendBatch(ctx, batch)
}

func (t *lateTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if err := t.begin(ctx); err != nil {
		return 0, err
	}
	return t.tx.CopyFrom(ctx, table, columns, rows)
}

func (t *lateTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	return t.tx.Prepare(ctx, name, sql)
}

func (t *lateTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := t.begin(ctx); err != nil {
		return nil, err
	}
	return t.tx.Begin(ctx)
}

func (t *lateTx) LargeObjects() pgx.LargeObjects {
	_ = t.begin(t.ctx)
	return t.tx.LargeObjects()
}

// Conn begins the transaction, because statements sent on the connection must be part of it. If it cannot begin, Conn
// closes the connection, so that nothing can be sent outside it.
func (t *lateTx) Conn() *pgx.Conn {
	if t.begin(t.ctx) != nil && !t.ended && t.conn.PgConn().TxStatus() == 'I' {
		_ = t.conn.Close(t.ctx)
	}
	return t.conn
}

func (t *lateTx) Commit(ctx context.Context) error {
	if err := t.begin(ctx); err != nil {
		return err
	}
	t.maybeCommitted()
	t.ended = true
	err := t.tx.Commit(ctx)
	t.committed = t.committed || err == nil || !notCommitted(err)
	return err
}

// maybeCommitted reports whether the function has ended the transaction, and not by Rollback. Nobody can tell which statement it was.
func (t *lateTx) maybeCommitted() bool {
	if t.tx != nil && t.failed == nil && !t.ended && !t.conn.IsClosed() && t.conn.PgConn().TxStatus() == 'I' {
		t.committed = true
	}
	return t.committed
}

// Rollback also keeps a transaction that has not begun from beginning later.
func (t *lateTx) Rollback(ctx context.Context) error {
	t.rolledBack = t.rolledBack || !t.maybeCommitted()
	t.ended = true
	if t.tx == nil {
		t.tx = pgx.FailedBatchResults(t.beginning(), pgx.ErrTxClosed).Tx()
		return nil
	}
	return t.tx.Rollback(ctx)
}

// read reads n results, up to the first error.
func read(results pgx.BatchResults, batch *pgx.Batch, n int) error {
	for range n {
		if _, err := results.Exec(); err != nil {
			return keepPrepared(batch, err)
		}
	}
	return nil
}

// keepPrepared returns a query's error. pgx prepares the queries of a failed batch again, in case that was the cause. After
// a denial or a conflict it was not, so pgx gets an empty batch: a flood of denials must not prepare anything.
func keepPrepared(batch *pgx.Batch, err error) error {
	if retryable(err) || sqlState(err) == denialState {
		batch.QueuedQueries = nil
	}
	return err
}

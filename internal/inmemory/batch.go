package inmemory

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// SendBatch runs the statements of a batch in one transaction, which the batch may begin and commit itself.
func (db *DB) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if ctx.Err() != nil {
		return pgx.FailedBatchResults(batch, ctx.Err())
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	level, begins := beginning(batch)
	s := db.begin(level, begins)
	r := &results{batch: batch}
	if begins {
		r.tx = &tx{session: s}
	}
	for i, q := range batch.QueuedQueries {
		var answer row
		switch {
		case i == 0 && begins:
			answer.err = s.usable(ctx)
		case begins && q.SQL == "commit" && s.usable(ctx) == nil:
			answer.err = s.commit()
		case s.ended:
			answer.err = errors.New("ratelimittest: nothing can be sent after the COMMIT of a batch")
		default:
			answer = s.run(ctx, q.SQL, q.Arguments)
		}
		r.answers = append(r.answers, answer)
	}
	if !begins {
		r.commit = s.commit()
	}
	return r
}

// beginning reports whether a batch begins a transaction, by pgx's Batch.BeginTx, and its level.
func beginning(batch *pgx.Batch) (level Isolation, begins bool) {
	if len(batch.QueuedQueries) == 0 {
		return level, false
	}
	text, begins := strings.CutPrefix(batch.QueuedQueries[0].SQL, "begin")
	return levels[pgx.TxIsoLevel(strings.TrimPrefix(text, " isolation level "))], begins
}

func (t *tx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if ctx.Err() != nil {
		return pgx.FailedBatchResults(batch, ctx.Err())
	}
	r := &results{batch: batch}
	err := t.use(func() error {
		for _, q := range batch.QueuedQueries {
			r.answers = append(r.answers, t.run(ctx, q.SQL, q.Arguments))
		}
		return nil
	})
	if err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	return r
}

// results are the answers to a batch. They are read as pgx's are.
type results struct {
	batch   *pgx.Batch
	answers []row
	read    int
	commit  error
	err     error // the first that was read
	closed  bool
	tx      pgx.Tx
}

func (r *results) next() row {
	switch {
	case r.err != nil:
		return row{err: r.err}
	case r.closed || r.read == len(r.answers):
		return row{err: errors.New("ratelimittest: there are no more results")}
	}
	answer := r.answers[r.read]
	r.read++
	r.err = answer.err
	return answer
}

func (r *results) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, r.next().err }

func (r *results) QueryRow() pgx.Row { return r.next() }

// Query is for statements with many rows, which would be an error.
func (r *results) Query() (pgx.Rows, error) {
	err := r.next().err
	if err == nil {
		err = errors.New("ratelimittest: use QueryRow")
	}
	return failed(err).Query()
}

func (r *results) Close() error {
	for r.err == nil && !r.closed && r.read < len(r.batch.QueuedQueries) {
		if fn := r.batch.QueuedQueries[r.read].Fn; fn != nil {
			if err := fn(r); err != nil {
				r.err = err
			}
		} else {
			r.next()
		}
	}
	r.closed = true
	if r.err == nil {
		r.err = r.commit
	}
	return r.err
}

func (r *results) Tx() pgx.Tx { return r.tx }

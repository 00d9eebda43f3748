package ratelimit

import (
	"context"
	"math"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// queries are sqlc's, with the answers of Consume, ConsumeSharded, ConsumeSeveral and Apply unpacked. Each is one value, the
// function's row by record_send: to have columns of it, the function would have to stand in FROM, which costs the server 6 % more
// instructions for one limit.
type queries struct {
	dbsqlc.Queries
	db      wire // what Queries asks, by a pointer: do not copy. In a batch, that asks a note instead
	orRaise bool // a denial is a SQL error, as it has to be in a batch
}

// queriesOn are the queries of a DB; commits is wire's.
func queriesOn(db DB, commits bool) *queries {
	q := &queries{db: wire{db, commits}}
	q.Queries = *dbsqlc.New(&q.db)
	return q
}

// consumeRow is the answer for one limit without shards: a ratelimit_decision, what became of its row.
type consumeRow struct {
	granted bool
	at      algebra.Micros
	row     algebra.Row
}

// applyRow is the answer for any number of limits: a ratelimit_decisions.
type applyRow struct {
	granted bool
	at      algebra.Micros
	ord     []int32 // of each row, the place of its limit; nil: one row for each limit, in order
	rows    []algebra.Row
}

func (q *queries) Consume(ctx context.Context, arg dbsqlc.ConsumeParams) (consumeRow, error) {
	arg.OrRaise = q.orRaise
	return oneLimit(q.Queries.Consume(ctx, arg))
}

func (q *queries) ConsumeSharded(ctx context.Context, arg dbsqlc.ConsumeShardedParams) (applyRow, error) {
	arg.OrRaise = q.orRaise
	return anyLimits(q.Queries.ConsumeSharded(ctx, arg))
}

func (q *queries) ConsumeSeveral(ctx context.Context, arg dbsqlc.ConsumeSeveralParams) (applyRow, error) {
	arg.OrRaise = q.orRaise
	return anyLimits(q.Queries.ConsumeSeveral(ctx, arg))
}

func (q *queries) Apply(ctx context.Context, arg dbsqlc.ApplyParams) (applyRow, error) {
	arg.OrRaise = q.orRaise
	return anyLimits(q.Queries.Apply(ctx, arg))
}

func (q *queries) Refund(ctx context.Context, arg dbsqlc.RefundParams) (applyRow, error) {
	return anyLimits(q.Queries.Refund(ctx, arg))
}

func oneLimit(answer []byte, err error) (consumeRow, error) {
	if err != nil {
		return consumeRow{}, err
	}
	r := record{rest: answer}
	r.expect(4)
	row := consumeRow{granted: r.boolean(), at: r.instant(), row: algebra.Row{Value: r.float(), TS: r.instant()}}
	if !r.ended() {
		return consumeRow{}, errRecord
	}
	return row, nil
}

func anyLimits(answer []byte, err error) (applyRow, error) {
	if err != nil {
		return applyRow{}, err
	}
	r := record{rest: answer}
	r.expect(5)
	row := applyRow{granted: r.boolean(), at: r.instant()}
	ord := r.array(pgtype.Int4ArrayOID, pgtype.Int4OID, 4)
	values := r.array(pgtype.Float8ArrayOID, pgtype.Float8OID, 8)
	ts := r.array(pgtype.TimestamptzArrayOID, pgtype.TimestamptzOID, 8)
	if !r.ended() || values == nil || ts == nil || len(ts) != len(values) || ord != nil && len(ord) != len(values) {
		return applyRow{}, errRecord
	}
	for i := range values {
		row.rows = append(row.rows, algebra.Row{Value: math.Float64frombits(values[i]), TS: sinceY2K(ts[i])})
		if ord != nil {
			row.ord = append(row.ord, int32(ord[i]))
		}
	}
	return row, nil
}

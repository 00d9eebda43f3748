package ratelimit

import (
	"context"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// queries are sqlc's, with the answers of Consume, ConsumeSharded, ConsumeSeveral and Apply unpacked. Each is one value, the
// function's row by record_send: to have columns of it, the function would have to stand in FROM, which costs the server 6 % more
// instructions for one limit.
type queries struct {
	dbsqlc.Queries
	orRaise bool // a denial is a SQL error, as it has to be in a batch
}

// queriesOn are the queries of a DB; commits is wire's.
func queriesOn(db DB, commits bool) *queries { return &queries{*dbsqlc.New(wire{db, commits}), false} }

// consumeRow is the answer for one limit without shards: a ratelimit_decision, what became of its row.
type consumeRow struct {
	Granted pgtype.Bool
	At      pgtype.Timestamptz
	Value   pgtype.Float8
	Ts      pgtype.Timestamptz
}

// applyRow is the answer for any number of limits: a ratelimit_decisions.
type applyRow struct {
	Granted pgtype.Bool
	At      pgtype.Timestamptz
	Ord     []int32
	Value   []float64
	Ts      []pgtype.Timestamptz
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

func oneLimit(answer []byte, err error) (row consumeRow, _ error) {
	err = unpack(answer, err, &row.Granted, &row.At, &row.Value, &row.Ts)
	return row, err
}

func anyLimits(answer []byte, err error) (row applyRow, _ error) {
	err = unpack(answer, err, &row.Granted, &row.At, &row.Ord, &row.Value, &row.Ts)
	return row, err
}

// unpack reads an answer, if there is one. What cannot be read may have been committed: here it is not known on what it was asked.
func unpack(answer []byte, err error, dest ...any) error {
	if err != nil {
		return err
	}
	return unknownUnless(scanRecord(answer, dest...))
}

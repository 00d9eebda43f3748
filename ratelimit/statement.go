package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/shardpick"
)

// take takes all of the demands or nothing, the shortest way.
func (c *call) take(ctx context.Context, q querier, result *Result) error {
	switch {
	case len(c.demands) == 1:
		return c.consume(ctx, q, result)
	case !sharded(c.demands):
		return c.consumeSeveral(ctx, q, result)
	}
	return c.apply(ctx, q, result)
}

// consume is the short way for one demand.
func (c *call) consume(ctx context.Context, q querier, result *Result) error {
	d := c.demands[0]
	if d.limit.shards == 1 {
		row, err := q.Consume(ctx, consumeParams(d, nullable(c.now)))
		if err != nil {
			return err
		}
		answer(result, c.demands, []state{{taken: row.granted, rows: []algebra.Row{row.row}}}, row.at, row.granted)
		if !result.OK {
			denied.remember(d, result.RetryAfter)
		}
		return nil
	}
	numbers := d.limit.forKey(d.key)
	a, b := pick(ctx, d)
	row, err := q.ConsumeSharded(ctx, dbsqlc.ConsumeShardedParams{
		Name: d.limit.name, Key: d.key,
		Rate: numbers.Rate, Period: numbers.Period, Capacity: numbers.Capacity, Start: nullable(start(numbers)), Shards: int32(d.limit.shards),
		Count: d.count, Floor: d.floor, ShardA: a, ShardB: b, Now: nullable(c.now),
	})
	if err != nil {
		return err
	}
	applied(c.demands, row, row.granted, result)
	return nil
}

// consumeParams asks for one demand, of a limit without shards.
func consumeParams(d demand, now *time.Time) dbsqlc.ConsumeParams {
	numbers := d.limit.forKey(d.key)
	return dbsqlc.ConsumeParams{
		Name: d.limit.name, Key: d.key,
		Rate: numbers.Rate, Period: numbers.Period, Capacity: numbers.Capacity, Start: nullable(start(numbers)),
		Count: d.count, Floor: d.floor, Now: now, ExpectDenial: denied.expect(d),
	}
}

// consumeSeveral is the short way for several demands without shards.
func (c *call) consumeSeveral(ctx context.Context, q querier, result *Result) error {
	n := len(c.demands)
	args := dbsqlc.ConsumeSeveralParams{
		Names: make([]string, n), Keys: make([]string, n),
		Rates: make([]float64, n), Periods: make([]time.Duration, n), Capacities: make([]float64, n), Starts: make([]pgtype.Timestamptz, n),
		Counts: make([]float64, n), Floors: make([]float64, n), Now: nullable(c.now),
	}
	for i, d := range c.demands { // in lock order, as demands puts them
		numbers := d.limit.forKey(d.key)
		args.Names[i], args.Keys[i] = d.limit.name, d.key
		args.Rates[i], args.Periods[i], args.Capacities[i], args.Starts[i] = numbers.Rate, numbers.Period, numbers.Capacity, start(numbers)
		args.Counts[i], args.Floors[i] = d.count, d.floor
	}
	row, err := q.ConsumeSeveral(ctx, args)
	if err != nil {
		return err
	}
	applied(c.demands, row, row.granted, result)
	return nil
}

// apply is the way for any number of demands.
func (c *call) apply(ctx context.Context, q querier, result *Result) error {
	args := dbsqlc.ApplyParams{Op: string(c.verb), ConsumedAt: nullable(c.consumedAt), Now: nullable(c.now)}
	if c.verb == VerbCharge {
		args.Op = string(VerbConsume) // without a floor
	}
	for _, d := range c.demands {
		numbers := d.limit.forKey(d.key)
		a, b := pick(ctx, d)
		args.Names = append(args.Names, d.limit.name)
		args.Keys = append(args.Keys, d.key)
		args.Rates = append(args.Rates, numbers.Rate)
		args.Periods = append(args.Periods, numbers.Period)
		args.Capacities = append(args.Capacities, numbers.Capacity)
		args.Starts = append(args.Starts, start(numbers))
		args.Shards = append(args.Shards, int32(d.limit.shards))
		args.Counts = append(args.Counts, d.count)
		args.Floors = append(args.Floors, d.floor)
		args.ShardA = append(args.ShardA, a)
		args.ShardB = append(args.ShardB, b)
	}
	row, err := q.Apply(ctx, args)
	if err != nil {
		return err
	}
	applied(c.demands, row, row.granted && c.verb != VerbCheck, result)
	return nil
}

// applied fills in the result from the answer of ratelimit_apply. taken says that its rows are those after a grant.
func applied(ds []demand, row applyRow, taken bool, result *Result) {
	states := make([]state, len(ds))
	for i := range row.rows {
		place := i
		if row.ord != nil {
			place = int(row.ord[i]) - 1
		}
		s := &states[place]
		s.rows = append(s.rows, row.rows[i])
	}
	for i := range states {
		states[i].taken = taken
	}
	answer(result, ds, states, row.at, row.granted)
}

func (c *call) reset(ctx context.Context, q querier) error {
	var args dbsqlc.ResetParams
	for _, d := range c.demands {
		args.Names = append(args.Names, d.limit.name)
		args.Keys = append(args.Keys, d.key)
	}
	return q.Reset(ctx, args)
}

// pick chooses two shards to take from: the one that the transaction has queued for, or any two.
func pick(ctx context.Context, d demand) (a, b int32) {
	if shard, ok := hotShard(ctx, d.limit, d.key); ok {
		return int32(shard), int32(shard)
	}
	x, y := shardpick.Two(ctx, d.limit.shards)
	return int32(x), int32(y)
}

// start is the argument of that name: NULL for a token bucket.
func start(numbers algebra.Limit) pgtype.Timestamptz {
	return pgtype.Timestamptz{Time: numbers.Start.Time(), Valid: numbers.Window}
}

// nullable is an instant as sqlc's parameters have it; nil is NULL. As an argument, an any, a nil pointer allocates nothing; a
// pgtype.Timestamptz does, NULL or not. (at is a copy so that t itself stays off the heap.)
func nullable(t pgtype.Timestamptz) *time.Time {
	if !t.Valid {
		return nil
	}
	at := t.Time
	return &at
}

package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/decide"
	"github.com/txlimit/txlimit/internal/shardpick"
)

// statement is the shortest statement that decides the call. With orRaise, a denial is a SQL error, which stops a batch.
func (c *call) statement(ctx context.Context, orRaise bool) statement {
	if c.orRaise = orRaise; orRaise { // a statement in a batch cannot be asked again
		c.lookBack()
	}
	s := c.shortest(ctx, orRaise)
	s.asks = c
	return s
}

func (c *call) shortest(ctx context.Context, orRaise bool) statement {
	takesCounts, now := c.takesCounts(), nullable(c.now)
	switch {
	case c.verb == verbReset:
		return reset(c.demands)
	case c.does.moves:
		return c.move(now)
	case c.verb == verbPause:
		return c.pause(now)
	case c.verb == verbResume:
		return c.resume(now)
	case c.does.holds && c.does.deniable:
		return c.holdStatement(ctx, now)
	case c.does.holds:
		return c.settleStatement(now)
	case c.does.refunds:
		return refund(c.receipt, c.demands, now)
	case takesCounts && len(c.demands) == 1 && sharded(c.demands):
		return consumeSharded(ctx, &c.demands[0], now, orRaise)
	case takesCounts && len(c.demands) == 1:
		return consume(c.demands[0], now, deniedLately.expect(c.demands[0]), orRaise)
	case takesCounts && !sharded(c.demands):
		return consumeSeveral(c.demands, now, orRaise)
	}
	return c.apply(ctx, now, orRaise)
}

// takesCounts reports whether the call takes its counts, all or none.
func (c *call) takesCounts() bool {
	return c.does.takes && !c.reserves() && !c.does.upTo && !c.tooMuch()
}

// consume takes one demand of a limit without shards.
func consume(d demand, now *time.Time, expectDenial, orRaise bool) statement {
	numbers := d.numbers
	return statement{sql: dbsqlc.Consume, demands: 1, read: readOne, args: arguments(
		d.limit.name, d.key,
		numbers.Rate, numbers.Period, numbers.Capacity, nullable(start(numbers)),
		d.count, d.lowest(), now, expectDenial, orRaise,
		windows(numbers),
	)}
}

// consumeSharded takes one demand of a limit with shards.
func consumeSharded(ctx context.Context, d *demand, now *time.Time, orRaise bool) statement {
	numbers := d.numbers
	d.pick(ctx)
	return statement{sql: dbsqlc.ConsumeSharded, demands: 1, read: readSeveral, args: arguments(
		d.limit.name, d.key,
		numbers.Rate, numbers.Period, numbers.Capacity, nullable(start(numbers)),
		int32(d.limit.shards), d.count, d.lowest(),
		d.picks[0], d.picks[1], now, orRaise,
		windows(numbers),
	)}
}

// consumeSeveral takes all demands or none, of limits without shards.
func consumeSeveral(ds []demand, now *time.Time, orRaise bool) statement {
	c := columnsOf(ds)
	return statement{sql: dbsqlc.ConsumeSeveral, demands: len(ds), read: readSeveral, args: arguments(
		c.names, c.keys,
		c.rates, c.periods, c.capacities, c.starts,
		c.counts, c.floors, now, orRaise,
		c.windows, c.firsts, c.lasts,
	)}
}

// noBound is NULL for the argument within, boxed once.
var noBound any = pgtype.Interval{}

// apply takes any demands, all or none, or reports whether it would.
func (c *call) apply(ctx context.Context, now *time.Time, orRaise bool) statement {
	within := noBound
	if c.within != algebra.Forever {
		within = pgtype.Interval{Microseconds: int64(c.within), Valid: true}
	}
	a, b := picks(ctx, c.demands)
	columns := columnsOf(c.demands)
	sql, names, keys := columns.choose(dbsqlc.ApplyOne, dbsqlc.Apply)
	return statement{sql: sql, demands: len(c.demands), read: readSeveral, args: arguments(
		c.op(), names, keys,
		columns.rates, columns.periods, columns.capacities, columns.starts,
		shardsOf(c.demands), columns.counts, columns.floors,
		a, b,
		c.reserves(), now, orRaise,
		columns.windows, columns.firsts, columns.lasts, columns.mosts, within,
	)}
}

// op is the operation on the demands.
func (c *call) op() string {
	if c.tooMuch() && !c.does.each { // the rows say when it will be granted
		return decide.Check
	}
	return c.does.op
}

// refund gives the demands back.
func refund(r *receipt, ds []demand, now *time.Time) statement {
	c := columnsOf(ds)
	taken, held, parts := make([]float64, len(ds)), make([]float64, len(ds)), make([]float64, len(ds))
	for i, d := range ds {
		t := r.algebra(r.find(d.limit.name, d.key))
		taken[i], held[i], parts[i] = t.Count, t.Held, t.Part
	}
	sql, names, keys := c.choose(dbsqlc.RefundOne, dbsqlc.Refund)
	return statement{sql: sql, demands: len(ds), read: readSettled, args: arguments(
		names, keys,
		c.rates, c.periods, c.capacities, c.starts,
		c.counts, taken, held, parts,
		pgtype.Timestamptz{Time: r.At, Valid: true}, pgtype.Timestamptz{Time: r.RunAt, Valid: true}, now,
		c.windows, c.firsts, c.lasts,
	)}
}

func reset(ds []demand) statement {
	names, keys := make([]string, len(ds)), make([]string, len(ds))
	for i, d := range ds {
		names[i], keys[i] = d.limit.name, d.key
	}
	return statement{sql: dbsqlc.Reset, demands: len(ds), read: readUnused[int32], args: arguments(names, keys)}
}

// columns are demands as arrays, in the order of the demands, which is the order of the locks.
type columns struct {
	names, keys []string
	rates       []float64
	periods     []time.Duration
	capacities  []float64
	starts      []pgtype.Timestamptz
	counts      []float64
	floors      []float64

	// The windows of all calendars, one list after another. A limit's list is from firsts to lasts, which are NULL for other
	// kinds. Without calendars, all are nil.
	windows       []pgtype.Timestamptz
	firsts, lasts []pgtype.Int4

	mosts []float64 // of a Take; otherwise nil
}

func columnsOf(ds []demand) columns {
	n := len(ds)
	c := columns{
		names: make([]string, n), keys: make([]string, n),
		rates: make([]float64, n), periods: make([]time.Duration, n), capacities: make([]float64, n), starts: make([]pgtype.Timestamptz, n),
		counts: make([]float64, n), floors: make([]float64, n),
	}
	for i, d := range ds {
		numbers := d.numbers
		c.names[i], c.keys[i] = d.limit.name, d.key
		c.rates[i], c.periods[i], c.capacities[i], c.starts[i] = numbers.Rate, numbers.Period, numbers.Capacity, start(numbers)
		c.counts[i], c.floors[i] = d.count, d.lowest()
		if d.most > 0 {
			if c.mosts == nil {
				c.mosts = make([]float64, n)
			}
			c.mosts[i] = d.most
		}
		if list := windows(numbers); list != nil {
			if c.windows == nil {
				c.firsts, c.lasts = make([]pgtype.Int4, n), make([]pgtype.Int4, n)
			}
			c.firsts[i] = pgtype.Int4{Int32: int32(len(c.windows) + 1), Valid: true}
			c.windows = append(c.windows, list...)
			c.lasts[i] = pgtype.Int4{Int32: int32(len(c.windows)), Valid: true}
		}
	}
	return c
}

// choose returns the query for one demand or the one for several, with its names and keys.
func (c *columns) choose(one, several string) (sql string, names, keys any) {
	if len(c.names) == 1 {
		return one, c.names[0], c.keys[0]
	}
	return several, c.names, c.keys
}

// pick chooses two shards to take from: twice the shard that the transaction has queued for, or any two.
func (d *demand) pick(ctx context.Context) {
	a, hot := hotShard(ctx, d.limit, d.key)
	b := a
	if !hot {
		a, b = shardpick.Two(ctx, d.limit.shards)
	}
	d.picks = [2]int32{int32(a), int32(b)}
}

// picks chooses two shards for each demand.
func picks(ctx context.Context, ds []demand) (a, b []int32) {
	a, b = make([]int32, len(ds)), make([]int32, len(ds))
	for i := range ds {
		ds[i].pick(ctx)
		a[i], b[i] = ds[i].picks[0], ds[i].picks[1]
	}
	return a, b
}

// shardsOf are the numbers of shards of the demands' limits.
func shardsOf(ds []demand) []int32 {
	shards := make([]int32, len(ds))
	for i := range ds {
		shards[i] = int32(ds[i].limit.shards)
	}
	return shards
}

// start is the argument of that name: NULL for a token bucket.
func start(numbers algebra.Limit) pgtype.Timestamptz {
	if !numbers.Window {
		return pgtype.Timestamptz{}
	}
	return pgtype.Timestamptz{Time: numbers.Start.Time(), Valid: true}
}

// windows is the argument of that name: NULL unless the limit is a calendar window.
func windows(numbers algebra.Limit) []pgtype.Timestamptz {
	if numbers.Windows == nil {
		return nil
	}
	list := make([]pgtype.Timestamptz, len(*numbers.Windows))
	for i, at := range *numbers.Windows {
		list[i] = pgtype.Timestamptz{Time: at.Time(), Valid: true}
	}
	return list
}

// nullable is an instant as an argument; nil is NULL. In an any, a nil pointer allocates nothing; a pgtype.Timestamptz
// always does. (at is a copy, so that t stays off the heap.)
func nullable(t pgtype.Timestamptz) *time.Time {
	if !t.Valid {
		return nil
	}
	at := t.Time
	return &at
}

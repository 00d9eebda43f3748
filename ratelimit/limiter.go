package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/internal/shardpick"
)

// DB is where a limiter works: the three methods that pgx.Tx, *pgx.Conn and *pgxpool.Pool have in common. On a transaction,
// a call is part of it. On a connection or a pool, a call is a transaction of its own: make it before another transaction of
// the same goroutine begins, since inside it would need a second connection of the pool, and would wait for ever for a row
// that the transaction itself has locked. It is at the database's default level: if that is above READ COMMITTED, put it in
// [Retry]. A [*Coalescer] is a DB, too, for many calls that are in no transaction; and [SQL]
// makes one of a handle of database/sql.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Limiter decides requests. The zero value is ready to use: with the database's clock, and nobody observing. A Limiter is
// safe for concurrent use; once it is used it must not be copied, nor its fields be changed.
//
// The verbs are [Limiter.Consume], [Limiter.Check], [Limiter.Charge], [Limiter.Refund] and [Limiter.Reset]. Each takes one
// request or several, and is one statement and, where the driver needs no more, one round trip. Their errors match [ErrInvalid],
// [ErrExceedsCapacity], [ErrClosed] or [ErrUnknownOutcome], or are the database's or the context's; a denial, by Consume or
// Check, is an [*DeniedError]. But for ErrUnknownOutcome, and Reset, an error means that nothing was consumed or given back.
type Limiter struct {
	// Clock tells the time, for tests and replays; it may be called from several goroutines at once. nil is the database's
	// clock_timestamp(), the one clock that all processes share. It must stay between the years 1000 and 9999.
	Clock func() time.Time

	// Observer is called after every call of a verb, before it returns, with what came of it: for metrics, logs, alarms. A
	// denial leaves no row behind that one could look up later. Check's error may be a denial as well: look at the Verb, and
	// do not count it as one, since nothing was refused to anybody. In a transaction the decision holds only if that commits; where
	// one is run again, each attempt's calls are told. Package observe, a module of its own, has metrics and logs to put here.
	//
	// It is called from several goroutines at once, and while the transaction may hold the lock of the limit's row: it should
	// be quick, and must not use the transaction. Nor should it panic: of a call by QueueConsume on a pool's batch, pgx would not
	// give the connection back.
	Observer func(ctx context.Context, d Decision)

	// OnRetry is called when [Limiter.InTx], [Limiter.InSQLTx] or [Limiter.SendTx] is about to run a transaction again: so many
	// attempts have failed, the last with err. It is called from several goroutines at once.
	OnRetry func(ctx context.Context, failed int, err error)

	queues queues // for hot limits
}

// Decision is what an observer is told.
type Decision struct {
	Verb string // consume, check, charge, refund or reset

	// Result is the caller's. If Err is set and no *DeniedError, and for reset, its requests hold only Limit, Key and
	// Count.
	Result Result
	Err    error // the caller's

	// Took is the time of the call, with the wait for other transactions that hold the row; first in InTx, also BEGIN and, with
	// Hot, the wait for the turn in the database.
	Took time.Duration
}

// Consume takes the tokens of all requests, or of none. A denial is an [*DeniedError], and the result beside it says the
// same: what is denied must not look like a success to a caller who forgets to look.
//
// In a transaction, let the error roll it back, or go on: nothing was consumed and the transaction is usable. What was
// consumed comes back if the transaction rolls back.
func (l *Limiter) Consume(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbConsume, time.Time{}, requests)
}

// Check answers as Consume would now, and writes nothing. A denial is an [*DeniedError], as Consume's is, with the result beside it.
//
// To read a balance, check a count of 0: [Result.Remaining] is the answer. Such a check is never denied, even if the limit is in debt.
// Do not check first and consume later where Consume alone would do: in between, others consume.
func (l *Limiter) Check(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbCheck, time.Time{}, requests)
}

// Charge takes the tokens unconditionally, below -maxReserved if need be: a cost that has already been incurred, such as
// what an estimate fell short of. It is always OK; RetryAt is when what is owed will have been refilled.
func (l *Limiter) Charge(ctx context.Context, db DB, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbCharge, time.Time{}, requests)
}

// Refund gives tokens back: all or part of what was consumed at that instant, [Result.At] of the consumption. It never
// fills a limit above its capacity, and it gives nothing back to a fixed window once the window of the consumption is over:
// that would break the present window's cap. (The window of Result.At: for a consumption that waited for the row into the next
// one, that is over, too.) It is always OK; RetryAt is when what is still owed will have been refilled.
//
// Like every statement, it does not see what was committed after the snapshot of a REPEATABLE READ or SERIALIZABLE
// transaction: if the very first use of the key was, there is nothing to give back to, and nothing is.
//
// A rollback refunds by itself. To refund exactly once, do it in the transaction that marks the work as undone.
func (l *Limiter) Refund(ctx context.Context, db DB, consumedAt time.Time, requests ...Request) (Result, error) {
	return l.do(ctx, db, verbRefund, consumedAt, requests)
}

// Reset makes the limits full again for these keys, debts included. How much a request asks for does not matter. Rows that were
// committed after the snapshot of a REPEATABLE READ or SERIALIZABLE transaction are not seen, and stay: what it is to forget
// must have been consumed before it began.
func (l *Limiter) Reset(ctx context.Context, db DB, requests ...Request) error {
	_, err := l.do(ctx, db, verbReset, time.Time{}, requests)
	return err
}

func (l *Limiter) do(ctx context.Context, db DB, v verb, consumedAt time.Time, requests []Request) (result Result, err error) {
	began := time.Now()
	c, err := l.newCall(v, consumedAt, requests)
	if db == nil {
		err = fmt.Errorf("%w: no database", ErrInvalid)
	}
	if err == nil {
		result, err = c.decide(ctx, querierOn(db, v))
	} else {
		result = unanswered(requests)
	}
	l.observe(ctx, v, began, result, err)
	return result, err
}

// querierOn is how a database is asked for a verb. What writes in a transaction of its own can end with an unknown outcome.
func querierOn(db DB, v verb) querier {
	if coalescer, ok := db.(*Coalescer); ok && (v == verbConsume || v == verbCharge) {
		return coalescing{coalescer: coalescer}
	}
	return queriesOn(db, v != verbCheck && !isTx(db))
}

// isTx says whether a handle is a transaction of the caller's, which is what can be committed.
func isTx(db DB) bool {
	handle := any(db)
	if onSQL, ok := db.(sqlDB); ok {
		handle = onSQL.db
	}
	switch handle.(type) {
	case interface {
		Commit(ctx context.Context) error
	}, interface{ Commit() error }:
		return true
	}
	return false
}

// querier is how the database is asked: by queries; by those whose answer is there already (asked), when a batch is read; or by a
// coalescer with its own (coalescing).
type querier interface {
	Consume(ctx context.Context, arg dbsqlc.ConsumeParams) (consumeRow, error)
	ConsumeSharded(ctx context.Context, arg dbsqlc.ConsumeShardedParams) (applyRow, error)
	ConsumeSeveral(ctx context.Context, arg dbsqlc.ConsumeSeveralParams) (applyRow, error)
	Apply(ctx context.Context, arg dbsqlc.ApplyParams) (applyRow, error)
	Reset(ctx context.Context, arg dbsqlc.ResetParams) error
}

// call is one use of a verb, as newCall has validated it.
type call struct {
	verb       verb
	requests   []Request
	demands    []demand
	consumedAt pgtype.Timestamptz // of a refund
	now        pgtype.Timestamptz // NULL: by the database's clock
}

func (l *Limiter) newCall(v verb, consumedAt time.Time, requests []Request) (c call, err error) {
	c = call{verb: v, requests: requests}
	if c.demands, err = demands(v, requests); err != nil {
		return c, err
	}
	if l.Clock != nil {
		if c.now, err = timestamp("the clock's time", l.Clock()); err != nil {
			return c, err
		}
	}
	if v == verbRefund {
		c.consumedAt, err = timestamp("the time of consumption", consumedAt)
	}
	return c, err
}

// unanswered is the result of a call about which nothing is known.
func unanswered(requests []Request) Result {
	result := Result{Requests: make([]Status, len(requests))}
	for i, r := range requests {
		result.Requests[i] = Status{Limit: r.limit, Key: r.key, Count: r.tokens}
	}
	return result
}

// decide asks the database, and makes what the caller gets of the answer. It may be called again: SendTx may send a batch again.
func (c *call) decide(ctx context.Context, q querier) (Result, error) {
	result := unanswered(c.requests)
	var err error
	switch coalesced, ok := q.(coalescing); {
	case ok:
		err = coalesced.coalescer.decide(ctx, c, &result)
	case c.verb == verbReset:
		err = c.reset(ctx, q)
		result.OK = err == nil
	case c.verb == verbConsume || c.verb == verbCharge:
		err = c.take(ctx, q, &result)
	default:
		err = c.apply(ctx, q, &result)
	}
	switch {
	case err != nil: // perhaps after an answer, at COMMIT
		return unanswered(c.requests), explain(c.verb, err)
	case (c.verb == verbConsume || c.verb == verbCheck) && !result.OK:
		return result, &DeniedError{Result: result}
	}
	return result, nil
}

// observe tells the observer what came of a call.
func (l *Limiter) observe(ctx context.Context, v verb, began time.Time, result Result, err error) {
	if l.Observer != nil {
		l.Observer(ctx, Decision{Verb: string(v), Result: result, Err: err, Took: time.Since(began)})
	}
}

// explain says what the library did when the database failed.
func explain(v verb, err error) error {
	if sqlState(err) == "42883" { // undefined_function, which has several causes
		return fmt.Errorf("ratelimit: %s: %w (has the schema of package migrations been migrated, is it in the search_path, and may this role use it?)", v, err)
	}
	return fmt.Errorf("ratelimit: %s: %w", v, err)
}

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

// sharded says whether any of the limits is.
func sharded(ds []demand) bool {
	return slices.ContainsFunc(ds, func(d demand) bool { return d.limit.shards > 1 })
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

// pick chooses two shards to take from: the one that the transaction has queued for, or any two.
func pick(ctx context.Context, d demand) (a, b int32) {
	if shard, ok := hotShard(ctx, d.limit, d.key); ok {
		return int32(shard), int32(shard)
	}
	x, y := shardpick.Two(ctx, d.limit.shards)
	return int32(x), int32(y)
}

// apply is the way for any number of demands.
func (c *call) apply(ctx context.Context, q querier, result *Result) error {
	args := dbsqlc.ApplyParams{Op: string(c.verb), ConsumedAt: nullable(c.consumedAt), Now: nullable(c.now)}
	if c.verb == verbCharge {
		args.Op = string(verbConsume) // without a floor
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
	applied(c.demands, row, row.granted && c.verb != verbCheck, result)
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

// timestamp checks an instant that the caller gave. The grids of fixed windows begin in the first 292 years.
func timestamp(what string, t time.Time) (pgtype.Timestamptz, error) {
	t = t.UTC()
	if t.Year() < 1000 || t.Year() > 9999 {
		return pgtype.Timestamptz{}, fmt.Errorf("%w: %s, %v, is not between the years 1000 and 9999", ErrInvalid, what, t)
	}
	return pgtype.Timestamptz{Time: t, Valid: true}, nil
}

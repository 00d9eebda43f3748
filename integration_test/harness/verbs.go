package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

// Answered is the answer to any verb.
type Answered struct {
	ratelimit.Result           // of a reservation, without what its receipt needs
	RunAt            time.Time // when the work of a grant may run
	Slip             ratelimit.Receipt
	took             int // by a Take
	balances         []ratelimit.Balance
}

// Delay is how long the work of a grant has to wait.
func (d Answered) Delay() time.Duration { return d.RunAt.Sub(d.At) }

// Decide consumes or, if told to, reserves.
func Decide(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB, reserve bool, requests ...ratelimit.Request) (Answered, error) {
	if !reserve {
		result, err := l.Consume(ctx, db, requests...)
		if err != nil {
			return Answered{Result: result}, err
		}
		return Answered{Result: result, RunAt: result.At, Slip: result.Receipt()}, nil
	}
	r, err := l.Reserve(ctx, db, requests...)
	if err != nil {
		if denial, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
			return Answered{Result: ResultIn(denial)}, err
		}
		return Answered{}, err
	}
	return Answered{
		Result: ratelimit.Result{OK: true, At: r.At, Remaining: r.Remaining, ResetAt: r.ResetAt, Requests: r.Requests},
		RunAt:  r.RetryAt, Slip: r.Receipt(),
	}, nil
}

// KeysOf are the requests without their counts, for the verbs that are about keys.
func KeysOf(requests ...ratelimit.Request) (keys []ratelimit.Request) {
	for _, r := range requests {
		keys = append(keys, r.Count(1))
	}
	return keys
}

// ReadBalances reads balances with a limiter.
func ReadBalances(t testing.TB, limiter *ratelimit.Limiter, db ratelimit.DB, requests ...ratelimit.Request) []ratelimit.Balance {
	t.Helper()
	balances, err := limiter.Balance(t.Context(), db, KeysOf(requests...)...)
	if err != nil {
		t.Fatal(err)
	}
	return balances
}

// ReadBalance returns the tokens that a request's limit and key have.
func ReadBalance(t testing.TB, limiter *ratelimit.Limiter, db ratelimit.DB, request ratelimit.Request) float64 {
	t.Helper()
	return ReadBalances(t, limiter, db, request)[0].Remaining
}

// Owes wants a debt that will have been refilled d from now.
func (w World) Owes(request ratelimit.Request, d time.Duration) {
	w.Helper()
	w.Retries(w.Deny(request.Count(0)), d)
}

// RefuseReserve reserves and wants an error before anything is sent.
func (w World) RefuseReserve(target error, requests ...ratelimit.Request) {
	w.Helper()
	if reserved, err := w.Limiter.Reserve(w.Context(), w.DB, requests...); !errors.Is(err, target) || !reserved.RetryAt.IsZero() || reserved.Receipt() != "" {
		w.Fatalf("%+v, %v, want %v", reserved, err, target)
	}
}

// WouldReserve makes a reservation and rolls it back.
func (w World) WouldReserve(requests ...ratelimit.Request) ratelimit.Reservation {
	w.Helper()
	tx := w.Begin()
	reserved, err := w.Limiter.Reserve(w.Context(), tx, requests...)
	w.Do(err)
	w.Do(tx.Rollback(w.Context()))
	return reserved
}

// Take takes at most a number of tokens of each request, and wants a grant of n.
func (w World) Take(n, most int, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	took, result, err := w.Limiter.Take(w.Context(), w.DB, most, requests...)
	if err != nil || !result.OK || took != n || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
		w.Fatalf("took %d: %+v, %v, want %d of at most %d", took, result, err, n, most)
	}
	for i, s := range result.Requests {
		if !s.OK || s.Taken != float64(n) || s.Count != float64(most) {
			w.Fatalf("request %d: %+v, want %d taken of at most %d", i, s, n, most)
		}
	}
	w.summed(result)
	return result
}

// DenyTake takes and wants a denial.
func (w World) DenyTake(most int, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	took, result, err := w.Limiter.Take(w.Context(), w.DB, most, requests...)
	exceeded, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok || took != 0 || result.OK || len(DeniedBy(result)) == 0 || !SaysTheSame(exceeded, result) {
		w.Fatalf("took %d: %+v, %v, want a denial", took, result, err)
	}
	for i, s := range result.Requests {
		if s.Taken != 0 {
			w.Fatalf("request %d of a denial took %v", i, s.Taken)
		}
	}
	w.summed(result)
	return result
}

// ResultOf is the result of a Hold, as its Observer has it.
func ResultOf(held ratelimit.Held, err error) ratelimit.Result {
	if denial, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
		return ResultIn(denial)
	}
	return ratelimit.Result{OK: err == nil, At: held.At, Repeated: held.Repeated, Remaining: held.Remaining, ResetAt: held.ResetAt, Requests: held.Requests}
}

// UTC parses an instant in UTC.
func UTC(text string) time.Time {
	t, err := time.Parse("2006-01-02 15:04:05.999999", text)
	if err != nil {
		panic(err)
	}
	return t
}

// RandomAnchor is an anchor of this century, often with a time of day.
func RandomAnchor(r *rand.Rand) string {
	anchor := time.Date(2000+r.IntN(60), 1, 1+r.IntN(365), 0, 0, 0, 0, time.UTC)
	return calendar.AnchorText(anchor.Add(OneOf(r, 0, time.Duration(r.IntN(24))*time.Hour, time.Duration(r.IntN(24*60*60))*time.Second)))
}

// SQLFails runs a statement in a savepoint and wants it to fail with a SQLSTATE ("": any).
func (w World) SQLFails(state, sql string, args ...any) {
	w.Helper()
	tx := w.Begin()
	_, err := tx.Exec(w.Context(), sql, args...)
	if got := SQLState(err); got == "" || state != "" && got != state {
		w.Errorf("%s %v: %v, want SQLSTATE %s", sql, args, err, state)
	}
	w.Do(tx.Rollback(w.Context()))
}

// InOrder has the results at the places of their requests.
func InOrder(decided ratelimit.EachResult, err error) ([]ratelimit.Result, error) {
	all := maps.Collect(decided.Granted())
	maps.Insert(all, decided.Denied())
	results := make([]ratelimit.Result, len(all))
	for place, result := range all {
		results[place] = result
	}
	return results, err
}

// Strange are settings of a session that change the text form of values.
var Strange = map[string]string{
	"datestyle": "German", "timezone": "Europe/Dublin", "intervalstyle": "sql_standard", "extra_float_digits": "-15", "bytea_output": "escape",
}

// Pause pauses keys for so long.
func (w World) Pause(lasts time.Duration, requests ...ratelimit.Request) {
	w.Helper()
	until, err := w.Limiter.Pause(w.Context(), w.DB, lasts, requests...)
	if w.Do(err); lasts < time.Microsecond && !until.IsZero() || lasts >= time.Microsecond && until.Before(w.Clock.At.Add(lasts)) {
		w.Fatalf("paused until %v, for %v", until, lasts)
	}
}

// Steady are a token every six seconds, at most twenty, in that many shards.
func Steady(shards int) ratelimit.Limit {
	return ratelimit.TokenBucket(fmt.Sprintf("steady in %d", shards), 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(shards))
}

// Unasked is a database that must not receive any statement.
type Unasked struct{ *testing.T }

// QueryRow ends the test.
func (db Unasked) QueryRow(_ context.Context, sql string, _ ...any) pgx.Row {
	db.Fatalf("it was sent %s", sql)
	return nil
}

// Refund also checks the number of refunded tokens in the result.
func (w World) Refund(receipt ratelimit.Receipt, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	before := ReadBalances(w, &ratelimit.Limiter{Clock: w.Limiter.Clock}, w.DB, requests...) // no observer sees it
	result, err := w.Limiter.Refund(w.Context(), w.DB, receipt, requests...)
	if err != nil || !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
		w.Fatalf("refund: %+v, %v", result, err)
	}
	for i, status := range result.Requests {
		if back := status.Remaining - before[i].Remaining; !Near(status.Refunded, back) {
			w.Fatalf("%v refunded to %s by its result, %v by its balances", status.Refunded, status.Limit.Name(), back)
		}
	}
	return result
}

// Insert writes a row.
func Insert(t *testing.T, db Handle, key string, shard, shards int, value float64, ts time.Time) {
	t.Helper()
	_, err := db.Exec(t.Context(), `INSERT INTO ratelimit.limits VALUES ('limit', $1, $2, $3, $4, $5)`, key, shard, shards, value, ts)
	Succeeds(t, err)
}

// Charge charges, and wants a grant.
func (w World) Charge(requests ...ratelimit.Request) {
	w.Helper()
	result, err := w.Limiter.Charge(w.Context(), w.DB, requests...)
	if err != nil || !result.OK {
		w.Fatalf("charge: %+v, %v", result, err)
	}
}

// Sharded is a bucket of ten tokens in n shards.
func Sharded(name string, n int, options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket(name, 10, time.Minute, append(options, ratelimit.Shards(n))...)
}

// SentOn is how often each named statement of the library ran on the only connection of a pool. Postgres counts plans: an execution has one.
func SentOn(t *testing.T, pool *pgxpool.Pool) map[string]int {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT substring(statement FROM '-- name: (\w+)'), generic_plans + custom_plans FROM pg_prepared_statements`)
	Succeeds(t, err)
	sent := map[string]int{}
	var name *string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&name, &n}, func() error {
		if name != nil && n > 0 {
			sent[*name] = n
		}
		return nil
	})
	Succeeds(t, err)
	return sent
}

// OneConnection is a pool of one connection to the database of another, in a query mode that prepares statements.
func OneConnection(t *testing.T, pool *pgxpool.Pool, settings map[string]string) *pgxpool.Pool {
	t.Helper()
	return Reconfigured(t, pool, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		StartWith(t, c.ConnConfig, settings)
	})
}

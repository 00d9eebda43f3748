package verbs_test

import (
	"context"
	"errors"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestAGrantOnAPoolIsOneUpdate counts the statements of calls by kind of limit and by what is asked.
func TestAGrantOnAPoolIsOneUpdate(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	all := harness.NewPool(t, 4)
	for _, kind := range []struct {
		update string
		limit  ratelimit.Limit
	}{
		{"UpdateBucket", ratelimit.TokenBucket("bucket", 3, time.Hour, ratelimit.Capacity(3), ratelimit.MaxReserved(3))},
		{"UpdateWindow", ratelimit.FixedWindow("window", 3, 1000*time.Hour)},
		{"UpdateCalendar", ratelimit.CalendarWindow("calendar", 3, ratelimit.Year, ratelimit.Zone("Europe/Berlin"))},
	} {
		t.Run(kind.update, func(t *testing.T) {
			for _, step := range []struct {
				name string
				call func(pool *pgxpool.Pool, r ratelimit.Request) error
				want map[string]int // by statement
			}{
				{"a grant", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					result, err := limits.Consume(t.Context(), pool, r)
					if err == nil && math.Round(result.Remaining) != 1 {
						t.Errorf("%v are left", result.Remaining)
					}
					return err
				}, map[string]int{kind.update: 1}},
				{"a charge", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					result, err := limits.Charge(t.Context(), pool, r.Count(5))
					if err == nil && math.Round(result.Remaining) != -3 {
						t.Errorf("%v are left", result.Remaining)
					}
					return err
				}, map[string]int{kind.update: 1}},
				{"a call of a Coalescer, alone", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					c := &ratelimit.Coalescer{Pool: pool}
					defer harness.CloseCoalescer(t, c)
					_, err := limits.Consume(t.Context(), c, r)
					return err
				}, map[string]int{kind.update: 1}},
				{"the same, AsyncCommit", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					c := &ratelimit.Coalescer{Pool: pool, AsyncCommit: true}
					defer harness.CloseCoalescer(t, c)
					_, err := limits.Consume(t.Context(), c, r)
					return err
				}, map[string]int{kind.update: 1}},
				{"a first use", func(pool *pgxpool.Pool, _ ratelimit.Request) error {
					return harness.Second(limits.Consume(t.Context(), pool, kind.limit.Key("first, of a "+kind.update)))
				}, map[string]int{kind.update: 1, "Consume": 1}},
				{"a denial, and one that is expected", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					for range 2 {
						if _, err := limits.Consume(t.Context(), pool, r.Count(3)); !errors.Is(err, ratelimit.ErrDenied) {
							return errors.Join(errors.New("not denied"), err)
						}
					}
					return nil
				}, map[string]int{kind.update: 1, "Consume": 2}},
				{"a key that was sharded before", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					if _, err := all.Exec(t.Context(), "UPDATE ratelimit.limits SET shards = 2 WHERE key = 'a key that was sharded before'"); err != nil {
						return err
					}
					_, err := limits.Consume(t.Context(), pool, r)
					return err
				}, map[string]int{kind.update: 1, "Consume": 1}},
				{"a reservation", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					return harness.Second(limits.Reserve(t.Context(), pool, r))
				}, map[string]int{}},
				{"by a clock", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					l := ratelimit.Limiter{Clock: time.Now}
					_, err := l.Consume(t.Context(), pool, r)
					return err
				}, map[string]int{"Consume": 1}},
				{"on a connection that is in a transaction", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					return pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
						return pgx.BeginFunc(t.Context(), conn, func(pgx.Tx) error { return harness.Second(limits.Consume(t.Context(), conn.Conn(), r)) })
					})
				}, map[string]int{"Consume": 1}},
				{"in a transaction", func(pool *pgxpool.Pool, r ratelimit.Request) error {
					return limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						return harness.Second(limits.Consume(ctx, tx, r))
					}, ratelimit.Isolation(pgx.ReadCommitted))
				}, map[string]int{"Consume": 1}},
			} {
				r := kind.limit.Key(step.name)
				harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), all, r)))
				pool := harness.OneConnection(t, all, nil)
				if err := step.call(pool, r); err != nil {
					t.Fatalf("%s: %v", step.name, err)
				}
				sent := harness.SentOn(t, pool)
				for _, name := range []string{"UpdateBucket", "UpdateWindow", "UpdateCalendar", "Consume"} {
					if step.name == "a reservation" && name == "Consume" { // or Apply
						continue
					}
					if sent[name] != step.want[name] {
						t.Errorf("%s: sent %v, want %v", step.name, sent, step.want)
					}
				}
			}
		})
	}
}

// TestAnUpdateIsNotTriedInVain denies, on one connection, a different key each time: the UPDATE takes nothing.
func TestAnUpdateIsNotTriedInVain(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	pool := harness.OneConnection(t, harness.NewPool(t, 2), nil)
	limit := ratelimit.TokenBucket("bucket", 1e-3, time.Hour, ratelimit.Capacity(1))
	const n = 300
	for i := range n {
		harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, limit.Key(strconv.Itoa(i)))))
	}
	sent := harness.SentOn(t, pool)
	if sent["Consume"] != n || sent["UpdateBucket"] > 12 {
		t.Fatalf("%d first uses: %v", n, sent)
	}
	// Grants are UPDATEs again after a while, and every one of them then.
	plenty := ratelimit.TokenBucket("plenty", 1e6, time.Second)
	for range 1200 {
		harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, plenty.Global())))
	}
	before := harness.SentOn(t, pool)
	for i := range 50 { // an UPDATE that misses in every third call is worth nothing
		harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, limit.Key("new "+strconv.Itoa(i)))))
		for range 2 {
			harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, plenty.Global())))
		}
	}
	after := harness.SentOn(t, pool)
	if after["UpdateBucket"]-before["UpdateBucket"] > 70 || after["Consume"]-before["Consume"] < 130 {
		t.Fatalf("100 grants and 50 first uses: from %v to %v", before, after)
	}
	// A first use in ten calls costs nothing but itself.
	for range 1200 { // until the UPDATEs are the rule again
		harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, plenty.Global())))
	}
	before = harness.SentOn(t, pool)
	for i := range 20 {
		harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, limit.Key("newer "+strconv.Itoa(i)))))
		for range 9 {
			harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, plenty.Global())))
		}
	}
	if after = harness.SentOn(t, pool); after["UpdateBucket"] != before["UpdateBucket"]+200 || after["Consume"] != before["Consume"]+20 {
		t.Fatalf("180 grants, 20 first uses among them: from %v to %v", before, after)
	}
}

// TestTheUpdateReadsNothingAboveReadCommitted also shows why: on a table that is scanned, callers of different keys would conflict.
func TestTheUpdateReadsNothingAboveReadCommitted(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			var limits ratelimit.Limiter
			all := harness.NewPool(t, 2)
			pool := harness.Reconfigured(t, all, func(c *pgxpool.Config) {
				c.MaxConns = 8
				harness.StartWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": level})
			})
			limit := ratelimit.TokenBucket("above "+level, 1e-6, time.Hour, ratelimit.Capacity(1e6)) // of its own: a denial of another test is remembered
			var wg sync.WaitGroup
			const workers, each = 8, 40
			for worker := range workers {
				r := limit.Key(strconv.Itoa(worker))
				harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), all, r)))
				wg.Go(func() {
					for range each {
						err := limits.Retry(t.Context(), func(ctx context.Context) error { return harness.Second(limits.Consume(ctx, pool, r)) })
						if err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			for worker := range workers {
				balance, err := limits.Balance(t.Context(), all, limit.Key(strconv.Itoa(worker)))
				if err != nil || balance[0].Used < each+1-1e-3 || balance[0].Used > each+1 {
					t.Errorf("key %d: %+v, %v", worker, balance, err)
				}
			}
			one := harness.OneConnection(t, all, map[string]string{"default_transaction_isolation": level})
			rows, err := one.Query(t.Context(), `EXPLAIN (ANALYZE, COSTS off, TIMING off, SUMMARY off)
				UPDATE ratelimit.limits SET value = value - 1 WHERE name = 'bucket' AND current_setting('transaction_isolation') = 'read committed'`)
			harness.Succeeds(t, err)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if plan := strings.Join(lines, "\n"); err != nil || !strings.Contains(plan, "One-Time Filter") || !strings.Contains(plan, "never executed") {
				t.Errorf("%v\n%s", err, plan)
			}
			if harness.Server.Pooled() {
				return
			}
			for range 20 {
				harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), one, limit.Key("0"))))
			}
			if sent := harness.SentOn(t, one); sent["Consume"] != 20 || sent["UpdateBucket"] == 0 || sent["UpdateBucket"] > 5 {
				t.Errorf("20 grants: %v", sent)
			}
		})
	}
}

// TestTheUpdateUsesTheIndexOfASmallTable looks at the plans that are kept. A plan that scans would do so until the next ANALYZE, though the
// table has grown since.
func TestTheUpdateUsesTheIndexOfASmallTable(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	all := harness.NewPool(t, 1)
	pool := harness.OneConnection(t, all, map[string]string{"plan_cache_mode": "force_generic_plan"})
	kinds := []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 1e6, time.Second),
		ratelimit.FixedWindow("window", 1e6, time.Second),
		ratelimit.CalendarWindow("calendar", 1e6, ratelimit.Year),
	}
	for _, limit := range kinds {
		for _, db := range []ratelimit.DB{all, pool} {
			harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), db, limit.Key("small table"))))
		}
	}
	harness.MustExec(t, pool, "VACUUM ANALYZE ratelimit.limits")
	// The texts are the name and the key, by which a partition is chosen.
	rows, err := pool.Query(t.Context(), `SELECT format('EXPLAIN EXECUTE %I (%s)', name, (SELECT string_agg(CASE type WHEN 'text'::regtype THEN quote_literal('small table') ELSE 'NULL' END, ', ') FROM unnest(parameter_types) AS type))
		FROM pg_prepared_statements WHERE statement LIKE '-- name: Update%'`)
	harness.Succeeds(t, err)
	explain, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(explain) != len(kinds) {
		t.Fatal(explain, err)
	}
	for _, sql := range explain {
		rows, err := pool.Query(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		harness.Succeeds(t, err)
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if all := strings.Join(plan, "\n"); err != nil || !strings.Contains(all, "Index Scan") || strings.Contains(all, "Seq Scan") {
			t.Errorf("%v\n%s", err, all)
		}
	}
}

// TestWhereOnlyTheFunctionsMayBeUsed has a role that may call the engine's functions, and use no table.
func TestWhereOnlyTheFunctionsMayBeUsed(t *testing.T) {
	t.Parallel()
	var limits ratelimit.Limiter
	all := harness.NewPool(t, 2)
	role := harness.CreateRole(t, all)
	harness.MustExec(t, all, harness.Execute(role)+"; GRANT USAGE ON SCHEMA ratelimit TO "+role)
	harness.MustExec(t, all, "ALTER FUNCTION ratelimit._consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, timestamptz[]) SECURITY DEFINER")
	var failed harness.Statements
	pool := harness.Reconfigured(t, all, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.Tracer = &failed
		harness.StartWith(t, c.ConnConfig, map[string]string{"role": role})
	})
	limit := ratelimit.TokenBucket("by functions alone", 1e-6, time.Hour, ratelimit.Capacity(10))
	for i := range 10 {
		result, err := limits.Consume(t.Context(), pool, limit.Global())
		if err != nil || math.Round(result.Remaining) != float64(9-i) {
			t.Fatalf("call %d: %+v, %v", i, result, err)
		}
	}
	if _, err := limits.Consume(t.Context(), pool, limit.Global()); !errors.Is(err, ratelimit.ErrDenied) {
		t.Fatal(err)
	}
	if len(failed.Failed) > 1 || !harness.Server.Pooled() && len(failed.Failed) != 1 {
		t.Errorf("the server refused %v: once a connection is enough", failed.Failed)
	}
}

// hinting is a DB that writes a comment for a router into each statement.
type hinting struct{ *pgxpool.Pool }

func (h hinting) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return h.Pool.QueryRow(ctx, "/* shard: 1 */ "+sql, args...)
}

func TestAHintThatADBAddsIsSent(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	all := harness.NewPool(t, 1)
	pool := harness.OneConnection(t, all, nil)
	limit := ratelimit.TokenBucket("hinted", 1e6, time.Second)
	for _, db := range []ratelimit.DB{all, hinting{pool}} {
		harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), db, limit.Key("a"))))
	}
	var hinted int
	err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '/* shard: 1 */ -- name: Consume%'").Scan(&hinted)
	if sent := harness.SentOn(t, pool); err != nil || hinted != 1 || sent["UpdateBucket"] != 0 {
		t.Errorf("%d, %v, %v", hinted, sent, err)
	}
}

// interrupted cancels a context when an UPDATE took nothing.
type interrupted struct{ cancel func() }

func (interrupted) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (i interrupted) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) { i.cancel() }

// TestBetweenTheUpdateAndTheFunctionTheOutcomeIsKnown ends a call there. Nothing was taken, and the error does not say that perhaps it was.
func TestBetweenTheUpdateAndTheFunctionTheOutcomeIsKnown(t *testing.T) {
	t.Parallel()
	var limits ratelimit.Limiter
	all := harness.NewPool(t, 2)
	limit := ratelimit.TokenBucket("interrupted", 1e-6, time.Hour, ratelimit.Capacity(10))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pool := harness.Reconfigured(t, all, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		c.ConnConfig.Tracer = interrupted{cancel}
	})
	_, err := limits.Consume(ctx, pool, limit.Global())
	if !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Error(err)
	}
	balance, err := limits.Balance(t.Context(), all, limit.Global())
	if err != nil || balance[0].Used != 0 {
		t.Errorf("%+v, %v", balance, err)
	}
}

// TestAnUpdateDecidesAsTheFunction compares a call without a clock with the function at the instant of its decision, on copies of one row.
func TestAnUpdateDecidesAsTheFunction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	random := harness.NewRand(t)
	for i := range 300 {
		var limits ratelimit.Limiter
		rate, capacity := float64(1+random.IntN(50)), float64(1+random.IntN(50))
		if random.IntN(3) == 0 {
			rate, capacity = rate/10, 1+capacity/10
		}
		name, call, options := "limit "+strconv.Itoa(i), limits.Consume, []ratelimit.Option{ratelimit.Capacity(capacity)}
		floor, count := 0.0, float64(1+random.IntN(5))
		if random.IntN(3) == 0 {
			floor, call = math.Inf(-1), limits.Charge
		}
		if count > capacity && floor == 0 {
			count = 1
		}
		period := time.Duration(1+random.IntN(100)) * time.Second
		limit := ratelimit.TokenBucket(name, rate, period, options...)
		switch random.IntN(3) {
		case 0:
			limit = ratelimit.FixedWindow(name, rate, period, options...)
		case 1:
			limit = ratelimit.CalendarWindow(name, rate, []ratelimit.Unit{ratelimit.Day, ratelimit.Month}[random.IntN(2)], options...)
		}
		value, ago := float64(random.IntN(80)-30)/float64(1+random.IntN(3)), time.Duration(random.Int64N(int64(200*time.Second)))-10*time.Second
		if random.IntN(4) == 0 {
			ago *= 10_000
		}
		var ts, tsAfter, tsBy time.Time
		var after, by float64
		if err := pool.QueryRow(t.Context(), `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts)
			VALUES ($1, 'a', 0, 1, least($2::float8, $3::float8), now() - $4::interval) RETURNING value, ts`, name, value, capacity, ago).Scan(&value, &ts); err != nil {
			t.Fatal(err)
		}
		result, err := call(t.Context(), pool, limit.Key("a").Count(count))
		if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
			t.Fatal(err)
		}
		const swap = `WITH old AS (SELECT value, ts FROM ratelimit.limits WHERE name = $1)
			UPDATE ratelimit.limits AS r SET value = $2, ts = $3 FROM old WHERE r.name = $1 RETURNING old.value, old.ts`
		harness.Succeeds(t, pool.QueryRow(t.Context(), swap, name, value, ts).Scan(&after, &tsAfter))
		at := ratelimit.Limiter{Clock: func() time.Time { return result.At }}
		again := at.Consume
		if floor != 0 {
			again = at.Charge
		}
		byFunction, err := again(t.Context(), pool, limit.Key("a").Count(count))
		if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
			t.Fatal(err)
		}
		harness.Succeeds(t, pool.QueryRow(t.Context(), swap, name, 0, ts).Scan(&by, &tsBy))
		if by != after || !tsBy.Equal(tsAfter) || byFunction.OK != result.OK || byFunction.Remaining != result.Remaining || !byFunction.RetryAt.Equal(result.RetryAt) || !byFunction.ResetAt.Equal(result.ResetAt) {
			t.Fatalf("%v, a row of %v, %v ago, %v:\n%+v\nby the function:\n%+v", limit, value, ago, count, result, byFunction)
		}
	}
}

// TestAnUpdateAndTheFunctionAgree plays grants and denials of one key on connections that send the UPDATE and on such that do not, at once.
func TestAnUpdateAndTheFunctionAgree(t *testing.T) {
	t.Parallel()
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 1e-6, time.Hour, ratelimit.Capacity(500)),
		ratelimit.FixedWindow("window", 500, 1000*time.Hour),
		ratelimit.CalendarWindow("calendar", 500, ratelimit.Year),
	} {
		t.Run(limit.Name(), func(t *testing.T) {
			t.Parallel()
			var limits ratelimit.Limiter
			all := harness.NewPool(t, 8)
			var granted atomic.Int64
			var wg sync.WaitGroup
			clock := ratelimit.Limiter{Clock: time.Now}
			for worker := range 8 {
				wg.Go(func() {
					l := &limits
					if worker%2 == 1 {
						l = &clock // by the function
					}
					for range 100 {
						_, err := l.Consume(t.Context(), all, limit.Global())
						switch {
						case err == nil:
							granted.Add(1)
						case !errors.Is(err, ratelimit.ErrDenied):
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if granted.Load() != 500 {
				t.Errorf("%d of 500 were granted", granted.Load())
			}
		})
	}
}

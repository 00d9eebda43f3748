package holds_test

import (
	"context"
	"errors"
	"fmt"
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

// TestAHoldOnAPoolIsOneStatement counts the statements of calls by kind of limit and by what is asked.
func TestAHoldOnAPoolIsOneStatement(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	all := harness.NewPool(t, 4)
	byClock := &ratelimit.Limiter{Clock: time.Now}
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 3, time.Hour, ratelimit.Capacity(3)),
		ratelimit.FixedWindow("window", 3, 1000*time.Hour),
		ratelimit.CalendarWindow("calendar", 3, ratelimit.Year, ratelimit.Zone("Europe/Berlin")),
		ratelimit.Slots("slots", 3),
	} {
		t.Run(limit.Name(), func(t *testing.T) {
			t.Parallel()
			isSlots := limit.Name() == "slots"
			var limits *ratelimit.Limiter
			hold := func(db ratelimit.DB, id string, requests ...ratelimit.Request) ratelimit.Held {
				t.Helper()
				held, err := limits.Hold(t.Context(), db, id, time.Minute, requests...)
				if err != nil || held.Token == "" || held.Until.Sub(held.At) < time.Minute || held.Until.Sub(held.At) > 2*time.Minute {
					t.Fatalf("%+v, %v", held, err)
				}
				return held
			}
			settle := func(db ratelimit.DB, token string, repeated bool, requests ...ratelimit.Request) {
				t.Helper()
				result, err := limits.Settle(t.Context(), db, token, requests...)
				if err != nil || !result.OK || result.Repeated != repeated {
					t.Fatalf("%+v, %v", result, err)
				}
			}
			refused := func(db ratelimit.DB, id string, reason ratelimit.Reason, r ratelimit.Request) {
				t.Helper()
				_, err := limits.Hold(t.Context(), db, id, time.Minute, r)
				if denial, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || denial.Reason != reason {
					t.Fatalf("%v, want a denial, %s", err, reason)
				}
			}
			for _, step := range []struct {
				name string
				call func(pool *pgxpool.Pool, r ratelimit.Request)
				want map[string]int // by statement
				used float64        // afterwards
			}{
				{"a hold", func(pool *pgxpool.Pool, r ratelimit.Request) {
					if held := hold(pool, "a", r); math.Round(held.Remaining) != 2 {
						t.Errorf("%v are left", held.Remaining)
					}
				}, map[string]int{"UpdateHold": 1}, 1},
				{"a hold without an end", func(pool *pgxpool.Pool, r ratelimit.Request) {
					if held, err := limits.Hold(t.Context(), pool, "a", ratelimit.Forever, r); err != nil || !held.Until.IsZero() || held.Token != "a" {
						t.Errorf("%+v, %v", held, err)
					}
					settle(pool, "a", false, r.Count(1))
				}, map[string]int{"UpdateHold": 1, "Settle": 1}, 1},
				{"a settle", func(pool *pgxpool.Pool, r ratelimit.Request) {
					settle(pool, hold(pool, "a", r.Count(2)).Token, false, r.Count(2))
				},
					map[string]int{"UpdateHold": 1, "UpdateSettle": 1}, 2},
				{"a settle of all", func(pool *pgxpool.Pool, r ratelimit.Request) { settle(pool, hold(pool, "a", r.Count(2)).Token, false) },
					map[string]int{"UpdateHold": 1, "UpdateSettle": 1}, 2},
				{"a settle of less", func(pool *pgxpool.Pool, r ratelimit.Request) {
					settle(pool, hold(pool, "a", r.Count(2)).Token, false, r.Count(1))
				},
					map[string]int{"UpdateHold": 1, "Settle": 1}, 1},
				{"a settle twice", func(pool *pgxpool.Pool, r ratelimit.Request) {
					token := hold(pool, "a", r).Token
					settle(pool, token, false, r.Count(1))
					settle(pool, token, true, r.Count(1))
				}, map[string]int{"UpdateHold": 1, "UpdateSettle": 2, "Settle": 1}, 1},
				{"a release", func(pool *pgxpool.Pool, r ratelimit.Request) {
					if err := harness.Second(limits.Release(t.Context(), pool, hold(pool, "a", r).Token)); err != nil {
						t.Error(err)
					}
				}, map[string]int{"UpdateHold": 1}, 0},
				{"a duplicate", func(pool *pgxpool.Pool, r ratelimit.Request) {
					hold(pool, "a", r)
					refused(pool, "a", ratelimit.ReasonHeld, r)
				}, map[string]int{"UpdateHold": 2, "Hold": 1}, 1},
				{"a denial", func(pool *pgxpool.Pool, r ratelimit.Request) {
					hold(pool, "a", r.Count(3))
					refused(pool, "b", ratelimit.ReasonQuota, r)
				}, map[string]int{"UpdateHold": 2, "Hold": 1}, 3},
				{"a denial that is expected", func(pool *pgxpool.Pool, r ratelimit.Request) {
					if isSlots {
						return
					}
					if _, err := limits.Consume(t.Context(), all, r.Count(3)); err != nil {
						t.Error(err)
					}
					if _, err := limits.Consume(t.Context(), all, r.Count(3)); !harness.Denied(err) {
						t.Error(err)
					}
					refused(pool, "a", ratelimit.ReasonQuota, r.Count(3))
				}, map[string]int{"Hold": 1}, 3},
				{"an id that has expired", func(pool *pgxpool.Pool, r ratelimit.Request) {
					hold(pool, "a", r.Count(2))
					harness.MustExec(t, all, fmt.Sprintf(`UPDATE ratelimit.limits SET lapses = '-infinity' WHERE key = 'an id that has expired' AND name = '%[1]s';
						UPDATE ratelimit.holds SET until = now() WHERE key = 'an id that has expired' AND name = '%[1]s'`, limit.Name()))
					hold(pool, "a", r.Count(2))
				}, map[string]int{"UpdateHold": 2, "Hold": 1}, 2},
				{"a first use", func(pool *pgxpool.Pool, _ ratelimit.Request) { hold(pool, "a", limit.Key("new")) },
					map[string]int{"UpdateHold": 1, "Hold": 1}, 0},
				{"a key that was sharded before", func(pool *pgxpool.Pool, r ratelimit.Request) {
					if !isSlots {
						harness.MustExec(t, all, "UPDATE ratelimit.limits SET shards = 2 WHERE key = 'a key that was sharded before' AND name = '"+limit.Name()+"'")
						hold(pool, "a", r)
					}
				}, map[string]int{"UpdateHold": 1, "Hold": 1}, 1},
				{"with an unlimited limit", func(pool *pgxpool.Pool, r ratelimit.Request) {
					held := hold(pool, "a", r, ratelimit.Unlimited("unlimited").Key(limit.Name()))
					settle(pool, held.Token, false)
					if n := harness.Scan[int](t, all, "SELECT count(*) FROM ratelimit.holds WHERE key = $1 AND state = 'settled'", limit.Name()); n != 1 {
						t.Errorf("%d rows of the unlimited limit are settled", n)
					}
				}, map[string]int{"Hold": 1, "Settle": 1}, 1},
				{"of two limits", func(pool *pgxpool.Pool, r ratelimit.Request) {
					settle(pool, hold(pool, "a", r, ratelimit.TokenBucket("second", 100, time.Hour).Key(limit.Name())).Token, false)
				}, map[string]int{"Hold": 1, "Settle": 1}, 1},
				{"by a clock", func(pool *pgxpool.Pool, r ratelimit.Request) {
					limits = byClock
					settle(pool, hold(pool, "a", r).Token, false)
				}, map[string]int{"Hold": 1, "Settle": 1}, 1},
				{"in a transaction", func(pool *pgxpool.Pool, r ratelimit.Request) {
					err := limits.InTx(t.Context(), pool, func(_ context.Context, tx pgx.Tx) error {
						settle(tx, hold(tx, "a", r).Token, false)
						return nil
					}, ratelimit.Isolation(pgx.ReadCommitted))
					if err != nil {
						t.Error(err)
					}
				}, map[string]int{"Hold": 1, "Settle": 1}, 1},
				{"once", func(pool *pgxpool.Pool, r ratelimit.Request) {
					if isSlots {
						return
					}
					for _, repeated := range []bool{false, true} {
						_, result, err := limits.Once(t.Context(), pool, "event", time.Hour, r)
						if err != nil || result.Repeated != repeated || (result.Receipt() == "") != repeated {
							t.Errorf("%+v, %v", result, err)
						}
					}
					if got := harness.Lines(t, all, "SELECT state, token, unit FROM ratelimit.holds WHERE id = 'event' AND name = '"+limit.Name()+"'"); got != "(once,,tokens)" {
						t.Error(got)
					}
				}, map[string]int{"UpdateHold": 2, "Hold": 1}, 1},
			} {
				limits = new(ratelimit.Limiter)
				r := limit.Key(step.name)
				if isSlots && strings.HasPrefix(step.name, "a settle") || isSlots && step.name == "a hold without an end" { // slots are freed
					step.used, step.want = 0, map[string]int{"UpdateHold": step.want["UpdateHold"], "Settle": step.want["UpdateSettle"] + step.want["Settle"]}
					if step.name == "a settle twice" {
						step.want["Settle"] = 2
					}
				}
				if isSlots && step.used == 1 && step.want["Settle"] > 0 {
					step.used = 0
				}
				before, err := limits.Hold(t.Context(), all, "before", time.Minute, r) // so there is a row
				if err == nil {
					err = harness.Second(limits.Release(t.Context(), all, before.Token))
				}
				if err != nil {
					t.Fatal(err)
				}
				pool := harness.OneConnection(t, all, nil)
				step.call(pool, r)
				sent := harness.SentOn(t, pool)
				if isSlots && len(sent) == 0 { // not for slots
					continue
				}
				if isSlots && step.name == "a key that was sharded before" {
					continue
				}
				for _, name := range []string{"UpdateHold", "UpdateSettle", "Hold", "Settle"} {
					if step.name == "a release" && name == "Settle" {
						continue // which releases, too
					}
					if sent[name] != step.want[name] {
						t.Errorf("%s: sent %v, want %v", step.name, sent, step.want)
					}
				}
				if balance, err := limits.Balance(t.Context(), all, r); err != nil || math.Round(balance[0].Used) != step.used {
					t.Errorf("%s: %+v, %v: want %v used", step.name, balance, err, step.used)
				}
			}
		})
	}
}

// TestAPlainHoldDecidesAsTheFunction compares a call without a clock with the function at the instant of its decision, on copies of one row.
func TestAPlainHoldDecidesAsTheFunction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	random := harness.NewRand(t)
	for i := range 300 {
		var limits ratelimit.Limiter
		rate, capacity := float64(1+random.IntN(50)), float64(1+random.IntN(50))
		name, options := "limit "+strconv.Itoa(i), []ratelimit.Option{ratelimit.Capacity(capacity)}
		count := float64(1 + random.IntN(int(min(capacity, 5))))
		period := time.Duration(1+random.IntN(100)) * time.Second
		limit := ratelimit.TokenBucket(name, rate, period, options...)
		switch random.IntN(4) {
		case 0:
			limit = ratelimit.FixedWindow(name, rate, period, options...)
		case 1:
			limit = ratelimit.CalendarWindow(name, rate, []ratelimit.Unit{ratelimit.Day, ratelimit.Month}[random.IntN(2)], options...)
		case 2:
			limit = ratelimit.Slots(name, int(capacity))
		}
		value := float64(random.IntN(80) - 5) // few denials: after many, the plain statement is not sent
		if limit.Config().Kind == "slots" {
			value = -float64(random.IntN(int(capacity-count) + 2))
		}
		ago := time.Duration(random.Int64N(int64(200*time.Second))) - 40*time.Second
		if random.IntN(4) == 0 {
			ago *= 10_000
		}
		var ts time.Time
		if err := pool.QueryRow(t.Context(), `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts)
			VALUES ($1, 'a', 0, 1, least($2::float8, $3::float8), now() - $4::interval) RETURNING value, ts`, name, value, capacity, ago).Scan(&value, &ts); err != nil {
			t.Fatal(err)
		}
		ttl := []time.Duration{time.Minute, 12345678 * time.Microsecond, 366 * 24 * time.Hour, ratelimit.Forever}[random.IntN(4)]
		call := func(l *ratelimit.Limiter) (ratelimit.Result, time.Time, error) {
			held, err := l.Hold(t.Context(), pool, "id", ttl, limit.Key("a").Count(count))
			return harness.ResultOf(held, err), held.Until, err
		}
		if ttl > 0 && limit.Config().Kind != "slots" && random.IntN(3) == 0 {
			call = func(l *ratelimit.Limiter) (ratelimit.Result, time.Time, error) {
				_, result, err := l.Once(t.Context(), pool, "id", ttl, limit.Key("a").Count(count))
				return result, time.Time{}, err
			}
		}
		rows := func(at time.Time) string {
			t.Helper()
			return harness.Scan[string](t, pool, `WITH h AS (DELETE FROM ratelimit.holds WHERE name = $1 RETURNING *), r AS (SELECT * FROM ratelimit.limits WHERE name = $1)
				SELECT ROW(r.value, r.ts, r.lapses <= h.until, h.key, h.id, h.state, h.unit, h.token IS NULL, h.count, h.taken_at, h.rest, h.part,
				    CASE WHEN h.until BETWEEN $3::timestamptz + $2 AND $3::timestamptz + $2 + interval '1 minute' THEN 'in time' ELSE h.until::text END)::text
				  FROM r LEFT JOIN h ON true`, name, max(ttl, 0), at)
		}
		result, expires, err := call(&limits)
		if err != nil && !harness.Denied(err) {
			t.Fatal(err)
		}
		plain := rows(result.At)
		harness.MustExec(t, pool, fmt.Sprintf("UPDATE ratelimit.limits SET value = %v, ts = '%s', lapses = NULL WHERE name = '%s'", value, ts.UTC().Format("2006-01-02 15:04:05.999999Z07:00"), name))
		byFunction, expiresBy, errBy := call(&ratelimit.Limiter{Clock: func() time.Time { return result.At }})
		by := rows(result.At)
		if (err == nil) != (errBy == nil) || plain != by || byFunction.OK != result.OK || byFunction.Remaining != result.Remaining || !byFunction.ResetAt.Equal(result.ResetAt) ||
			!byFunction.RetryAt.Equal(result.RetryAt) || byFunction.Receipt() != result.Receipt() || expires.Sub(expiresBy).Abs() > time.Minute || expires.IsZero() != expiresBy.IsZero() {
			t.Fatalf("%v, a row of %v, %v ago, %v for %v:\n%s\n%+v\nby the function:\n%s\n%+v", limit, value, ago, count, ttl, plain, result, by, byFunction)
		}
		harness.MustExec(t, pool, "DELETE FROM ratelimit.limits WHERE name = '"+name+"'")
	}
}

// TestAPlainSettleDecidesAsTheFunction: of a hold whose tokens were all used, both change the state alone.
func TestAPlainSettleDecidesAsTheFunction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	var limits ratelimit.Limiter
	const unchanged = `SELECT r.name, r.key, r.value, r.ts, h.id, h.unit, h.token, h.count, h.taken_at, h.rest, h.part
		FROM ratelimit.limits AS r JOIN ratelimit.holds AS h USING (name, key) ORDER BY 1, 2`
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 100, time.Hour), ratelimit.FixedWindow("window", 100, 1000*time.Hour), ratelimit.CalendarWindow("calendar", 100, ratelimit.Year),
	} {
		for key, by := range map[string]*ratelimit.Limiter{"plain": &limits, "function": {Clock: time.Now}} {
			held, err := limits.Hold(t.Context(), pool, "a", time.Minute, limit.Key(key).Count(7))
			if err != nil {
				t.Fatal(err)
			}
			before := harness.Lines(t, pool, unchanged)
			result, err := by.Settle(t.Context(), pool, held.Token, limit.Key(key).Count(7))
			if err != nil || !result.OK || result.Repeated || result.Requests[0].Refunded != 0 || result.Requests[0].Taken != 0 || math.Round(result.Remaining) != 93 {
				t.Errorf("%s, %s: %+v, %v", limit.Name(), key, result, err)
			}
			if after := harness.Lines(t, pool, unchanged); after != before {
				t.Errorf("%s, %s: from %s to %s", limit.Name(), key, before, after)
			}
			if n := harness.Scan[int](t, pool, `SELECT count(*) FROM ratelimit.holds WHERE name = $1 AND key = $2 AND state = 'settled'
				AND until BETWEEN now() + interval '1 day' - interval '1 minute' AND now() + interval '1 day'`, limit.Name(), key); n != 1 {
				t.Errorf("%s, %s: it is not settled for a day", limit.Name(), key)
			}
		}
	}
}

// TestAPlainHoldIsUndone has deliveries of one id that wait for another one, and that have taken when it commits. What they took comes
// back, and nobody is told anything else than who looks first.
func TestAPlainHoldIsUndone(t *testing.T) {
	for _, test := range []struct {
		name      string
		new       bool // the key has no row
		unlimited bool // the one that they wait for knows the limit as unlimited: it has no row of ratelimit.limits, so they wait at the INSERT
		slots     bool
		commits   bool
		granted   int64
		used      float64
	}{
		{name: "a row", commits: true, used: 1},
		{name: "a row, rolled back", granted: 1, used: 1},
		{name: "a new key", new: true, commits: true, used: 1},
		{name: "a new key, rolled back", new: true, granted: 1, used: 1},
		{name: "unlimited", unlimited: true, commits: true},
		{name: "unlimited, rolled back", unlimited: true, granted: 1, used: 1},
		{name: "unlimited, a new key", unlimited: true, new: true, commits: true},
		{name: "slots", slots: true, commits: true, used: 1},
		{name: "slots, rolled back", slots: true, granted: 1, used: 1},
	} {
		for _, level := range harness.SomeOf(t, 1, harness.Levels...) {
			t.Run(test.name+", "+string(level), func(t *testing.T) {
				t.Parallel()
				var limits, other ratelimit.Limiter
				all := harness.NewPool(t, 4)
				pool := harness.Reconfigured(t, all, func(c *pgxpool.Config) {
					c.MaxConns = 4
					harness.StartWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": string(level)})
				})
				limit, first := ratelimit.TokenBucket("limit", 1e-6, time.Hour, ratelimit.Capacity(100)), ratelimit.TokenBucket("limit", 1e-6, time.Hour, ratelimit.Capacity(100))
				if test.slots {
					limit, first = ratelimit.Slots("limit", 100), ratelimit.Slots("limit", 100)
				}
				if test.unlimited {
					first = ratelimit.Unlimited("limit")
				}
				if !test.new {
					held, err := limits.Hold(t.Context(), all, "before", time.Minute, limit.Key("k"))
					if err == nil {
						err = harness.Second(limits.Release(t.Context(), all, held.Token))
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				tx := beginAt(t, all, pgx.ReadCommitted)
				if _, err := other.Hold(t.Context(), tx, "job", time.Minute, first.Key("k")); err != nil {
					t.Fatal(err)
				}
				var granted atomic.Int64
				var wait sync.WaitGroup
				const callers = 3
				for range callers {
					wait.Go(func() {
						err := limits.Retry(t.Context(), func(ctx context.Context) error {
							_, err := limits.Hold(ctx, pool, "job", time.Minute, limit.Key("k"))
							return err
						})
						denial, ok := errors.AsType[*ratelimit.DeniedError](err)
						switch {
						case err == nil:
							granted.Add(1)
						case !ok || denial.Reason != ratelimit.ReasonHeld || errors.Is(err, ratelimit.ErrUnknownOutcome):
							t.Error(err)
						}
					})
				}
				harness.Blocked(t, all, tx, callers)
				end := tx.Rollback
				if test.commits {
					end = tx.Commit
				}
				if err := end(t.Context()); err != nil {
					t.Fatal(err)
				}
				wait.Wait()
				balance, err := limits.Balance(t.Context(), all, limit.Key("k"))
				if err != nil || granted.Load() != test.granted || math.Round(balance[0].Used) != test.used {
					t.Errorf("%d were granted, and %+v, %v is used: want %d, and %v", granted.Load(), balance, err, test.granted, test.used)
				}
				if n := harness.Scan[int](t, all, "SELECT count(*) FROM ratelimit.holds WHERE state = 'held'"); n != 1 {
					t.Errorf("%d holds", n)
				}
			})
		}
	}
}

// TestAJobThatIsDeliveredAtOnce has each job delivered to every worker at the same instant, on the pool and in transactions of every level. One takes.
func TestAJobThatIsDeliveredAtOnce(t *testing.T) {
	t.Parallel()
	const jobs = 40
	all := harness.NewPool(t, 12)
	window := ratelimit.FixedWindow("once", 1000, 1000*time.Hour)
	for name, requests := range map[string][]ratelimit.Request{
		"bucket":       {ratelimit.TokenBucket("bucket", 1e-6, time.Hour, ratelimit.Capacity(1000)).Key("k")},
		"slots":        {ratelimit.Slots("slots", 1000).Key("k")},
		"once":         {window.Key("k")},
		"once, of two": {window.Key("l"), ratelimit.TokenBucket("sharded", 1e-6, time.Hour, ratelimit.Capacity(1000), ratelimit.Shards(3)).Key("l")},
	} {
		var limits ratelimit.Limiter
		for job := range jobs {
			var granted, repeated atomic.Int64
			var wait sync.WaitGroup
			for _, level := range []pgx.TxIsoLevel{"", "", "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
				wait.Go(func() {
					again := false
					err := inLevel(t, &limits, all, level, func(db ratelimit.DB) (err error) {
						if strings.HasPrefix(name, "once") {
							_, result, err := limits.Once(t.Context(), db, fmt.Sprint("job ", job), time.Hour, requests...)
							again = result.Repeated
							return err
						}
						_, err = limits.Hold(t.Context(), db, fmt.Sprint("job ", job), time.Hour, requests...)
						return err
					})
					switch {
					case harness.Denied(err) && !strings.HasPrefix(name, "once") || err == nil && again:
						repeated.Add(1)
					case err != nil:
						t.Error(err)
					default:
						granted.Add(1)
					}
				})
			}
			wait.Wait()
			if granted.Load() != 1 || repeated.Load() != 5 {
				t.Errorf("%s: job %d was granted %d times, and repeated %d times", name, job, granted.Load(), repeated.Load())
			}
		}
		for _, r := range requests {
			if balance, err := limits.Balance(t.Context(), all, r); err != nil || math.Round(balance[0].Used) != jobs {
				t.Errorf("%s: %+v, %v", name, balance, err)
			}
		}
	}
	got := harness.Lines(t, all, "SELECT name, key, count(*) FROM ratelimit.holds GROUP BY 1, 2 ORDER BY 1, 2")
	if got != "(bucket,k,40)\n(once,k,40)\n(once,l,40)\n(sharded,l,40)\n(slots,k,40)" {
		t.Error(got)
	}
}

// TestAPlainHoldReadsNothingAboveReadCommitted: there, it would also conflict with the holds of other keys.
func TestAPlainHoldReadsNothingAboveReadCommitted(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	for _, level := range []string{"repeatable read", "serializable"} {
		var limits ratelimit.Limiter
		all := harness.NewPool(t, 2)
		pool := harness.OneConnection(t, all, map[string]string{"default_transaction_isolation": level})
		r := ratelimit.TokenBucket("bucket", 1e-6, time.Hour, ratelimit.Capacity(1000)).Key(level)
		const n = 20
		for i := range n {
			held, err := limits.Hold(t.Context(), pool, strconv.Itoa(i), time.Minute, r)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := limits.Settle(t.Context(), pool, held.Token); err != nil {
				t.Fatal(err)
			}
		}
		if sent := harness.SentOn(t, pool); sent["Hold"] != n || sent["Settle"] != n || sent["UpdateHold"]+sent["UpdateSettle"] == 0 || sent["UpdateHold"]+sent["UpdateSettle"] > 10 {
			t.Errorf("%s: %v", level, sent)
		}
	}
}

// TestAPlainHoldUsesTheIndexesOfSmallTables looks at the plans that are kept, as TestTheUpdateUsesTheIndexOfASmallTable does.
func TestAPlainHoldUsesTheIndexesOfSmallTables(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	all := harness.NewPool(t, 1)
	pool := harness.OneConnection(t, all, map[string]string{"plan_cache_mode": "force_generic_plan"})
	r := ratelimit.TokenBucket("bucket", 1e6, time.Second).Key("small tables")
	for i, db := range []ratelimit.DB{all, all, pool} {
		if _, err := limits.Consume(t.Context(), all, ratelimit.TokenBucket("bucket", 1e6, time.Second).Key(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
		held, err := limits.Hold(t.Context(), db, strconv.Itoa(i), time.Minute, r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := limits.Settle(t.Context(), db, held.Token); err != nil {
			t.Fatal(err)
		}
	}
	harness.MustExec(t, pool, "VACUUM ANALYZE ratelimit.limits, ratelimit.holds")
	rows, err := pool.Query(t.Context(), `SELECT format('EXPLAIN EXECUTE %I (%s)', name, array_to_string(array_fill('NULL'::text, ARRAY[cardinality(parameter_types)]), ', '))
		FROM pg_prepared_statements WHERE statement ~ '^-- name: Update(Hold|Settle)'`)
	if err != nil {
		t.Fatal(err)
	}
	explain, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(explain) != 2 {
		t.Fatal(explain, err)
	}
	for _, sql := range explain {
		rows, err := pool.Query(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if all := strings.Join(plan, "\n"); err != nil || strings.Count(all, "holds_pkey") != 1 || strings.Contains(all, "Seq Scan") {
			t.Errorf("%v\n%s", err, all)
		}
	}
}

// TestAPlainHoldIsRefusedWhereTheTableIsDistributed: as the function refuses it.
func TestAPlainHoldIsRefusedWhereTheTableIsDistributed(t *testing.T) {
	t.Parallel()
	var limits ratelimit.Limiter
	pool := harness.NewPool(t, 2)
	r := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("k")
	held, err := limits.Hold(t.Context(), pool, "a", time.Minute, r)
	if err != nil {
		t.Fatal(err)
	}
	harness.MustExec(t, pool, "CREATE OR REPLACE FUNCTION ratelimit._distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN true")
	if _, err := limits.Hold(t.Context(), pool, "b", time.Minute, r); harness.SQLState(err) != "0A000" {
		t.Error(err)
	}
	if err := harness.Second(limits.Release(t.Context(), pool, held.Token)); err != nil { // by the function
		t.Error(err)
	}
}

// TestAPlainHoldLastsFromItsTaking: what it waited is not of the work's time.
func TestAPlainHoldLastsFromItsTaking(t *testing.T) {
	t.Parallel()
	var limits ratelimit.Limiter
	pool := harness.NewPool(t, 3)
	r := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("k")
	if _, err := limits.Hold(t.Context(), pool, "before", time.Minute, r); err != nil {
		t.Fatal(err)
	}
	tx := beginAt(t, pool, pgx.ReadCommitted)
	harness.MustExecIn(t, tx, "SELECT FROM ratelimit.limits FOR UPDATE")
	done := make(chan ratelimit.Held)
	go func() {
		held, err := limits.Hold(context.Background(), pool, "a", 100*time.Millisecond, r)
		if err != nil {
			t.Error(err)
		}
		done <- held
	}()
	harness.Blocked(t, pool, tx, 1)
	time.Sleep(200 * time.Millisecond)
	waited := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if held := <-done; held.Until.Before(waited.Add(100*time.Millisecond)) || !held.At.Before(waited) {
		t.Errorf("decided at %v, until %v; waited until %v", held.At, held.Until, waited)
	}
}

// TestAPlainSettleEndsWhatIsHeldAlone: a Settle that used what the token says, of a hold that is not what the token says.
func TestAPlainSettleEndsWhatIsHeldAlone(t *testing.T) {
	t.Parallel()
	window := ratelimit.FixedWindow("window", 10, 1000*time.Hour).Key("k")
	expire := func(t *testing.T, pool *pgxpool.Pool) {
		harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now()")
	}
	for name, test := range map[string]func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool){
		"given back while it waits": func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool) {
			held, err := limits.Hold(t.Context(), pool, "dead", time.Minute, window.Count(6))
			if err != nil {
				t.Fatal(err)
			}
			expire(t, pool)
			tx := beginAt(t, pool, pgx.ReadCommitted)
			if _, err := limits.Hold(t.Context(), tx, "next", time.Minute, window.Count(7)); err != nil {
				t.Fatal(err)
			}
			done := make(chan error)
			go func() {
				result, err := limits.Settle(context.Background(), pool, held.Token)
				if err == nil && result.Requests[0].Taken != 6 {
					err = fmt.Errorf("%+v", result)
				}
				done <- err
			}()
			harness.Blocked(t, pool, tx, 1)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			wantUsed(t, limits, pool, window, 13)
		},
		"another's": func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool) {
			held, err := limits.Hold(t.Context(), pool, "a", time.Minute, window.Count(6))
			if err != nil {
				t.Fatal(err)
			}
			expire(t, pool)
			again, err := limits.Hold(t.Context(), pool, "a", time.Minute, window.Count(6))
			if err != nil {
				t.Fatal(err)
			}
			fresh := harness.Reconfigured(t, pool, func(*pgxpool.Config) {}) // on which no plain statement has missed
			if _, err := limits.Settle(t.Context(), fresh, held.Token); !errors.Is(err, ratelimit.ErrHoldLost) {
				t.Error(err)
			}
			if _, err := limits.Settle(t.Context(), pool, again.Token, window.Count(2)); err != nil {
				t.Error(err)
			}
			wantUsed(t, limits, pool, window, 2)
		},
		"more than the token says": func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool) {
			held, err := limits.Hold(t.Context(), pool, "a", time.Minute, window.Count(6))
			if err != nil {
				t.Fatal(err)
			}
			result, err := limits.Settle(t.Context(), pool, strings.Replace(held.Token, ",6]", ",2]", 1))
			if err != nil || result.Requests[0].Refunded != 4 {
				t.Errorf("%+v, %v", result, err)
			}
			wantUsed(t, limits, pool, window, 2)
		},
		"slots before": func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool) {
			held, err := new(ratelimit.Limiter).Hold(t.Context(), pool, "a", time.Minute, ratelimit.Slots("window", 10).Key("k"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := limits.Settle(t.Context(), pool, held.Token, window.Count(1)); err != nil {
				t.Error(err)
			}
			if got := harness.Lines(t, pool, "SELECT value FROM ratelimit.limits"); got != "(0)" {
				t.Error(got)
			}
		},
		"a key that is sharded now": func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool) {
			held, err := limits.Hold(t.Context(), pool, "a", time.Minute, window.Count(6))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := new(ratelimit.Limiter).Consume(t.Context(), pool, ratelimit.FixedWindow("window", 10, 1000*time.Hour, ratelimit.Shards(2)).Key("k")); err != nil {
				t.Fatal(err)
			}
			result, err := limits.Settle(t.Context(), pool, held.Token)
			if err != nil || math.Round(result.Remaining) != 3 {
				t.Errorf("%+v, %v", result, err)
			}
		},
		"reset": func(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool) {
			held, err := limits.Hold(t.Context(), pool, "a", time.Minute, window.Count(6))
			if err != nil {
				t.Fatal(err)
			}
			tx := beginAt(t, pool, pgx.ReadCommitted)
			if err := limits.Reset(t.Context(), tx, window); err != nil {
				t.Fatal(err)
			}
			done := make(chan error)
			go func() {
				_, err := limits.Settle(context.Background(), pool, held.Token)
				done <- err
			}()
			harness.Blocked(t, pool, tx, 1)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			wantUsed(t, limits, pool, window, 0) // the reset came first, and has forgotten what was taken
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, new(ratelimit.Limiter), harness.NewPool(t, 4))
		})
	}
}

func wantUsed(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool, r ratelimit.Request, used float64) {
	t.Helper()
	if balance, err := limits.Balance(t.Context(), pool, r); err != nil || math.Round(balance[0].Used) != used {
		t.Errorf("%+v, %v: want %v used", balance, err, used)
	}
}

// TestAPlainHoldIsNotTriedInVain denies slots again and again. The UPDATEs of other limits go on.
func TestAPlainHoldIsNotTriedInVain(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	pool := harness.OneConnection(t, harness.NewPool(t, 2), nil)
	slots, plenty := ratelimit.Slots("slots", 1).Key("k"), ratelimit.TokenBucket("plenty", 1e6, time.Second).Key("k")
	if _, err := limits.Hold(t.Context(), pool, "a", time.Minute, slots); err != nil {
		t.Fatal(err)
	}
	const n = 300
	for range n {
		if _, err := limits.Hold(t.Context(), pool, "b", time.Minute, slots); !harness.Denied(err) {
			t.Fatal(err)
		}
		if _, err := limits.Consume(t.Context(), pool, plenty); err != nil {
			t.Fatal(err)
		}
	}
	if sent := harness.SentOn(t, pool); sent["Hold"] != n+1 || sent["UpdateHold"] > 12 || sent["UpdateBucket"] != n || sent["Consume"] != 1 {
		t.Errorf("%v", sent)
	}
}

// A key whose Holds are denied leaves the plain statements of other keys as they are.
func TestADeniedHoldIsRemembered(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	var limits ratelimit.Limiter
	pool := harness.OneConnection(t, harness.NewPool(t, 2), nil)
	empty, plenty := ratelimit.TokenBucket("empty", 1, time.Hour).Key("k"), ratelimit.TokenBucket("plenty", 1e6, time.Second).Key("k")
	harness.Succeeds(t, harness.Second(limits.Hold(t.Context(), pool, "first", time.Minute, empty, plenty)))
	const n = 100
	began := time.Now()
	for i := range n {
		if _, err := limits.Hold(t.Context(), pool, "denied", time.Minute, empty); !harness.Denied(err) {
			t.Fatal(err)
		}
		held, err := limits.Hold(t.Context(), pool, fmt.Sprint("granted ", i), time.Minute, plenty)
		harness.Succeeds(t, err)
		harness.Succeeds(t, harness.Second(limits.Settle(t.Context(), pool, held.Token)))
	}
	// The denied one is tried once a second.
	if sent, took := harness.SentOn(t, pool), time.Since(began); took > n/10*time.Second {
		t.Logf("%v in %v: this tested too little", sent, took)
	} else if sent["UpdateSettle"] < n-10 || sent["UpdateHold"] < n-10 {
		t.Errorf("%v in %v, want a plain statement for nearly each Hold and Settle of the other key", sent, took)
	}
}

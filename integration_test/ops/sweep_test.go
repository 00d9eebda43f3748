package ops_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestASweepDeletesWhatSaysNothing writes rows by hand. A row must have been full at 11:00, an hour before noon.
func TestASweepDeletesWhatSaysNothing(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket("l", 10, time.Minute, ratelimit.Capacity(20))
	window := ratelimit.FixedWindow("l", 10, time.Hour, ratelimit.Capacity(20), ratelimit.Start(harness.Noon.Add(30*time.Minute)))
	long := ratelimit.FixedWindow("l", 10, 30*24*time.Hour, ratelimit.Start(harness.Noon.Add(-2*time.Hour)))
	none := ratelimit.TokenBucket("l", 10, time.Minute, ratelimit.Capacity(0))
	pool := harness.ReusedPool(t, 1, 0)
	for _, test := range []struct {
		what  string
		limit ratelimit.Limit
		rows  string // shard, shards, value, ts; several with semicolons
		gone  bool
	}{
		{"full for an hour", bucket, "0, 1, 20, '2026-07-01 11:00Z'", true},
		{"and a microsecond less", bucket, "0, 1, 20, '2026-07-01 11:00:00.000001Z'", false},
		{"full since 11:00", bucket, "0, 1, 0, '2026-07-01 10:58Z'", true},
		{"full since just after", bucket, "0, 1, 0, '2026-07-01 10:58:00.000001Z'", false},
		{"full now, not an hour ago", bucket, "0, 1, 0, '2026-07-01 11:30Z'", false},
		{"more than the capacity", bucket, "0, 1, 1e9, '2026-07-01 11:00Z'", true},
		{"in debt, long ago", bucket, "0, 1, -1000, '2026-06-01Z'", true},
		{"in deep debt", bucket, "0, 1, -1e9, '2026-06-01Z'", false},
		{"in infinite debt", bucket, "0, 1, '-Infinity', '2026-06-01Z'", false},
		{"in the future", bucket, "0, 1, 1e9, '2026-07-01 12:00:01Z'", false},
		{"in the far future", bucket, "0, 1, 1e9, 'infinity'", false},
		{"before all time", bucket, "0, 1, 1e9, '-infinity'", false},
		{"NaN, which is full", bucket, "0, 1, 'NaN', '2026-07-01 11:00Z'", true},
		{"Infinity, which is full", bucket, "0, 1, 'Infinity', '2026-07-01 11:00Z'", true},
		{"an invalid number of shards", bucket, "0, 0, 20, '2026-06-01Z'", false},

		{"nothing saved up, nothing owed", none, "0, 1, 0, '2026-07-01 11:00Z'", true},
		{"nothing saved up, debt paid", none, "0, 1, -10, '2026-07-01 10:59Z'", true},
		{"nothing saved up, debt not paid", none, "0, 1, -10.001, '2026-07-01 10:59Z'", false},

		{"the window of 11:00 began full", window, "0, 1, 20, '2026-07-01 10:30Z'", true},
		{"not from its beginning", window, "0, 1, 20, '2026-07-01 10:31Z'", false},
		{"two windows ago", window, "0, 1, 0, '2026-07-01 08:30Z'", true},
		{"late in the window before that", window, "0, 1, 0, '2026-07-01 09:29:59Z'", true},
		{"one window ago", window, "0, 1, 0, '2026-07-01 09:30Z'", false},
		{"one window ago, with the rest", window, "0, 1, 10, '2026-07-01 09:30Z'", true},
		{"used up in this window", long, "0, 1, 0, '2026-07-01 10:00Z'", false},
		{"used up in the last window", long, "0, 1, 0, '2026-06-30 10:00Z'", true},

		{"all three shards", bucket, "0, 3, 0, '2026-07-01 10:58Z'; 1, 3, 0, '2026-07-01 10:58Z'; 2, 3, 0, '2026-07-01 10:58Z'", true},
		{"two of three shards are full", bucket, "0, 3, 0, '2026-07-01 10:58Z'; 1, 3, 0, '2026-07-01 10:58Z'; 2, 3, 0, '2026-07-01 10:59Z'", false},
		{"a shard is missing", bucket, "0, 3, 7, '2026-06-01Z'; 2, 3, 7, '2026-06-01Z'", false},
		{"a shard too many", bucket, "0, 1, 20, '2026-06-01Z'; 1, 2, 20, '2026-06-01Z'", false},
		{"two shards of a window", window, "0, 2, 5, '2026-07-01 09:30Z'; 1, 2, 5, '2026-07-01 09:30Z'", true},
		{"two shards of a window, one full", window, "0, 2, 5, '2026-07-01 09:30Z'; 1, 2, 4, '2026-07-01 09:30Z'", false},
	} {
		t.Run(test.what, func(t *testing.T) {
			limiter, clock := harness.NewLimiter()
			w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
			_, err := w.DB.Exec(t.Context(), "TRUNCATE ratelimit.limits")
			w.Do(err)
			var want int64
			for row := range strings.SplitSeq(test.rows, ";") {
				for _, name := range []string{"l", "other"} { // which is not swept
					_, err := w.DB.Exec(t.Context(), fmt.Sprintf("INSERT INTO ratelimit.limits VALUES ('%s', '', %s)", name, row))
					w.Do(err)
				}
				if test.gone {
					want++
				}
			}
			rows := w.Rows()
			if deleted := w.Sweep(test.limit); deleted != want {
				t.Errorf("%d rows deleted, want %d of\n%s", deleted, want, rows)
			}
			if want == 0 && w.Rows() != rows {
				t.Errorf("nothing to delete, but the sweep has written to or locked\n%s\nnow\n%s", rows, w.Rows())
			}
			if got := strings.Count(w.Rows(), "(other,"); got != 1+strings.Count(test.rows, ";") {
				t.Errorf("%d rows are left of the other limit", got)
			}
		})
	}
}

// Without a start, every key has its own grid of windows. The sweep must use it, whatever the key's characters.
func TestASweepKnowsTheGridOfEveryKey(t *testing.T) {
	t.Parallel()
	limiter, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: harness.ReusedPool(t, 1, 0), Limiter: limiter, Clock: clock}
	limit := ratelimit.FixedWindow("sign-ups ü", 10, 24*time.Hour)
	requests := []ratelimit.Request{limit.Global()}
	for i := range 40 {
		requests = append(requests, limit.Key(fmt.Sprintf("%d ünïcode '|\\", i)))
	}
	for _, request := range requests {
		w.Grant(request.Count(10))
	}
	var resets []time.Time // the ends of all keys' windows
	for _, request := range requests {
		resets = append(resets, w.Balances(request)[0].ResetAt)
	}
	slices.SortFunc(resets, time.Time.Compare)
	var deleted int64
	for i, reset := range resets {
		clock.At = reset.Add(time.Hour - time.Microsecond)
		deleted += w.Sweep(limit)
		if deleted != int64(i) {
			t.Fatalf("%d rows deleted a microsecond before the %d. is full for an hour", deleted, i+1)
		}
		clock.Advance(time.Microsecond)
		deleted += w.Sweep(limit)
	}
	if deleted != int64(len(requests)) || w.Rows() != "" {
		t.Errorf("%d rows deleted, left are\n%s", deleted, w.Rows())
	}
}

// TestASweepChangesNoDecision plays random sequences of every verb at random instants, with some sweeps, on Postgres,
// on a database in memory that is swept, too, and on one that never is. All must agree on each answer and on what is left.
// The clock steps back and forth, by up to an hour.
func TestASweepChangesNoDecision(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for i := range 2 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playSweeps(t, 800, false)
		})
	}
}

// TestASweepOfLimitsThatChangeAndAreSharded does the same with limits whose numbers and shards change, on Postgres and on
// the swept database in memory. (A sharded limit without rows first takes from all shards, so more of them are refilled.)
func TestASweepOfLimitsThatChangeAndAreSharded(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for i := range 2 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playSweeps(t, 800, true)
		})
	}
}

func playSweeps(t *testing.T, calls int, changing bool) {
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	if _, err := pool.Exec(t.Context(), "SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	_, clock := harness.NewLimiter()
	swept, never := inmemory.New(), inmemory.New()
	limits := make([]ratelimit.Limit, 4)
	latest := clock.At
	granted, denied := 0, 0
	var deleted, back int64
	// Until everything has happened often enough.
	for n := 0; n < calls || granted < calls/4 || denied < calls/100 || deleted < int64(calls/50) || back < int64(calls/20); n++ {
		if n == 5*calls {
			t.Fatalf("%d grants, %d denials, %d rows swept and %d calls at a clock that was set back, of %d calls: this tested too little", granted, denied, deleted, back, n)
		}
		for i := range limits {
			if changing && (n == 0 || r.IntN(40) == 0) {
				limits[i] = harness.RandomLimit(r, fmt.Sprintf("limit %d", i), 1+r.IntN(4))
			} else if !changing && n%100 == 0 { // other keys, with their own rows
				limits[i] = harness.RandomLimit(r, fmt.Sprintf("limit %d after %d", i, n), 1)
			}
		}
		d := time.Duration(harness.OneOf(r, 0, 0, 1, r.Int64N(1e6), r.Int64N(1e6), r.Int64N(1e10), r.Int64N(1e11), -r.Int64N(18e8))) * time.Microsecond
		clock.At = harness.MaxTime(clock.At.Add(d), latest.Add(-time.Hour))
		if clock.At.Before(latest) {
			back++
		}
		latest = harness.MaxTime(latest, clock.At)

		if r.IntN(4) == 0 {
			some := slices.DeleteFunc(slices.Clone(limits), func(ratelimit.Limit) bool { return r.IntN(4) == 0 })
			if len(some) == 0 {
				continue
			}
			// The sweep is as of the latest instant that the clock has shown: a clock that stepped back may reach it again.
			sweeper := ratelimit.Limiter{Clock: func() time.Time { return latest }}
			got, err := sweeper.Sweep(t.Context(), pool, some...)
			if want, wrong := sweeper.Sweep(t.Context(), swept, some...); err != nil || wrong != nil || got != want {
				t.Fatalf("call %d at %v: swept %v: %d rows, %v; in memory %d, %v", n, clock.At, some, got, err, want, wrong)
			}
			deleted += got
		} else {
			verb := harness.OneOf(r, "consume", "consume", "consume", "reserve", "reserve", "take", "check", "balance", "charge", "refund", "reset")
			var asks []harness.Ask
			var requests []ratelimit.Request
			for range harness.OneOf(r, 1, 1, 1, 2, 3, 4) {
				limit := harness.OneOf(r, limits...)
				a := harness.Ask{Limit: limit, Key: harness.OneOf(r, "", "a", "b", "c"), Count: harness.RandomTokens(r, limit.Capacity())}
				asks, requests = append(asks, a), append(requests, a.Request())
			}
			if verb == "take" {
				asks = harness.RandomTake(r, asks)
			}
			var receipt ratelimit.Receipt
			if verb == "refund" {
				receipt = harness.ReceiptOf(clock.At.Add(-time.Duration(r.Int64N(1e13))), requests...)
			}
			pick := harness.RandomPick(rand.New(rand.NewPCG(r.Uint64(), 0)))

			do := func(db ratelimit.DB) (harness.Answered, error) {
				return harness.Call(shardpick.With(t.Context(), pick.Again()), &ratelimit.Limiter{Clock: clock.Now}, db, verb, receipt, asks)
			}
			result, err := do(pool)
			story := fmt.Sprintf("call %d at %v: %s %+v -> %+v, %v", n, clock.At, verb, asks, result, err)
			if err != nil && !errors.Is(err, ratelimit.ErrExceedsCapacity) && !errors.As(err, new(*ratelimit.DeniedError)) {
				t.Fatal(story)
			}
			memories := map[string]*inmemory.DB{"swept": swept}
			if !changing {
				memories["never swept"] = never
			}
			for name, memory := range memories {
				if want, wantErr := do(memory); !reflect.DeepEqual(result, want) || harness.TextOf(err) != harness.TextOf(wantErr) {
					t.Fatalf("%s\nin memory, %s: %+v, %v", story, name, want, wantErr)
				}
			}
			switch {
			case err == nil:
				granted++
			case errors.As(err, new(*ratelimit.DeniedError)):
				denied++
			}
		}
		table, memory := harness.ReadTable(t, pool), swept.InMemory().(inmemory.Table)
		if !maps.EqualFunc(table, memory, slices.Equal) {
			t.Fatalf("call %d at %v\nthe table: %v\nin memory: %v", n, clock.At, table, memory)
		}
		for id, rows := range never.InMemory().(inmemory.Table) {
			i := slices.IndexFunc(limits, func(l ratelimit.Limit) bool { return l.Name() == id.Name })
			if i < 0 {
				continue // an older limit
			}
			for _, then := range []time.Time{clock.At, latest.Add(-time.Hour)} {
				full := harness.Numbers(limits[i], id.Key)
				if a, b := full.Total(values(memory[id]), algebra.At(then)), full.Total(values(rows), algebra.At(then)); a != b {
					t.Fatalf("call %d at %v: %v, of %v, holds %v, without sweeps %v: %v and %v", n, then, id, limits[i], a, b, memory[id], rows)
				}
			}
		}
	}
	t.Logf("%d grants, %d denials, %d rows swept, %d calls before an instant that the clock had shown", granted, denied, deleted, back)
}

// values are rows for the algebra.
func values(rows []inmemory.Row) (all []algebra.Row) {
	for _, row := range rows {
		all = append(all, row.Row)
	}
	return all
}

// idle writes rows of the limit l for keys "0", "1", ... that have been full for a long time.
func idle(t *testing.T, db harness.Handle, n int) {
	t.Helper()
	_, err := db.Exec(t.Context(), fmt.Sprintf(`INSERT INTO ratelimit.limits SELECT 'l', i::text, 0, 1, 1e9, '2026-01-01' FROM generate_series(0, %d) AS i`, n-1))
	if err != nil {
		t.Fatal(err)
	}
}

// countRows counts the table's rows.
func countRows(t *testing.T, db ratelimit.DB) (n int64) {
	t.Helper()
	if err := db.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.limits").Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// A sweep works on every handle on which it can begin its own transactions, READ COMMITTED whatever the default is.
// Elsewhere it is refused.
func TestWhereASweepWorks(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.NeedsSession(t, "since default_transaction_isolation is set for the session")
	url := pool.Config().ConnString() + "&default_transaction_isolation=serializable"
	limiter, _ := harness.NewLimiter()
	limit := ratelimit.TokenBucket("l", 10, time.Minute)
	strict := harness.Connect(t, url, 2)
	acquired, err := strict.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer acquired.Release()
	coalescer := &ratelimit.Coalescer{Pool: strict}
	defer harness.CloseCoalescer(t, coalescer)
	pgxDB, pqDB := harness.OpenSQL(t, "pgx", url, 2), harness.OpenSQL(t, "postgres", url, 2)
	sqlConn, err := pqDB.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer sqlConn.Close() //nolint:errcheck // returns it to the pool
	exec := harness.Reconfigured(t, strict, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	simple := harness.Reconfigured(t, strict, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol })
	handles := map[string]ratelimit.DB{
		"pool": strict, "pool in mode exec": exec, "pool in mode simple_protocol": simple, "pgxpool.Conn": acquired, "conn": acquired.Conn(),
		"coalescer": coalescer, "pgx sql.DB": ratelimit.SQL(pgxDB), "postgres sql.DB": ratelimit.SQL(pqDB), "postgres sql.Conn": ratelimit.SQL(sqlConn),
	}
	for name, db := range handles {
		idle(t, pool, 2500)
		if deleted, err := limiter.Sweep(t.Context(), db, limit); err != nil || deleted != 2500 || countRows(t, pool) != 0 {
			t.Errorf("%s: %d rows deleted, %v", name, deleted, err)
		}
	}

	idle(t, pool, 10)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	sqlTx, err := pgxDB.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sqlTx.Rollback() //nolint:errcheck // it only reads
	window := ratelimit.FixedWindow("w", 10, time.Minute)
	for name, test := range map[string]struct {
		db     ratelimit.DB
		limits []ratelimit.Limit
	}{
		"pgx.Tx":                  {tx, []ratelimit.Limit{limit}},
		"its conn":                {tx.Conn(), []ratelimit.Limit{limit}},
		"sql.Tx":                  {ratelimit.SQL(sqlTx), []ratelimit.Limit{limit}},
		"nil":                     {nil, []ratelimit.Limit{limit}},
		"a nil pool":              {(*pgxpool.Pool)(nil), []ratelimit.Limit{limit}},
		"a nil pgxpool.Conn":      {(*pgxpool.Conn)(nil), []ratelimit.Limit{limit}},
		"a nil coalescer":         {(*ratelimit.Coalescer)(nil), []ratelimit.Limit{limit}},
		"a nil sql.DB":            {ratelimit.SQL((*sql.DB)(nil)), []ratelimit.Limit{limit}},
		"no limits":               {pool, nil},
		"the zero limit":          {pool, []ratelimit.Limit{limit, {}}},
		"a limit that is invalid": {pool, []ratelimit.Limit{limit, ratelimit.TokenBucket("x", -1, time.Minute)}},
		"a name twice":            {pool, []ratelimit.Limit{limit, window, limit}},
	} {
		if deleted, err := limiter.Sweep(t.Context(), test.db, test.limits...); !errors.Is(err, ratelimit.ErrInvalid) || deleted != 0 || countRows(t, pool) != 10 {
			t.Errorf("%s: %d rows deleted, %v", name, deleted, err)
		}
	}
	if _, err := tx.Exec(t.Context(), "SELECT 1"); err != nil {
		t.Errorf("the transaction is not usable any more: %v", err)
	}
	far := ratelimit.Limiter{Clock: func() time.Time { return time.Date(999, 1, 1, 0, 0, 0, 0, time.UTC) }}
	if _, err := far.Sweep(t.Context(), pool, limit); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("a clock out of range: %v", err)
	}
	if _, err := limiter.Sweep(t.Context(), harness.Connect(t, harness.NewDatabase(t), 1), limit); harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "been migrated") {
		t.Errorf("without the schema: %v", err)
	}
}

// Rows that a transaction has locked stay, and the sweep does not wait. If one shard of a key is locked, all of them stay.
func TestASweepLeavesWhatIsLocked(t *testing.T) {
	t.Parallel()
	limiter, clock := harness.NewLimiter()
	pool := harness.NewPool(t, 3)
	w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
	limit, sharded := ratelimit.TokenBucket("l", 10, time.Minute), ratelimit.TokenBucket("s", 10, time.Minute, ratelimit.Shards(3))
	for _, key := range []string{"free", "locked"} {
		w.Grant(limit.Key(key), sharded.Key(key))
	}
	clock.Advance(2 * time.Hour)
	holder := w.Begin()
	_, err := holder.Exec(t.Context(), "SELECT FROM ratelimit.limits WHERE key = 'locked' AND shard = (shards - 1) FOR UPDATE")
	w.Do(err)
	for _, want := range []int64{4, 0} {
		if deleted := w.Sweep(limit, sharded); deleted != want || countRows(t, pool) != 4 {
			t.Errorf("%d rows deleted, want %d; left are\n%s", deleted, want, w.Rows())
		}
	}
	w.Do(holder.Rollback(t.Context()))

	// The key is as full as before.
	w.Holds(sharded.Key("locked"), 10)
	if deleted := w.Sweep(limit, sharded); deleted != 4 {
		t.Errorf("%d rows deleted after they were unlocked", deleted)
	}
}

// A call that wants a row that a sweep is deleting waits for the sweep's commit. Then it gets what a full limit grants: in
// READ COMMITTED at once, at higher levels when the transaction is retried.
func TestWhoMeetsASweep(t *testing.T) {
	t.Parallel()
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			for _, limit := range []ratelimit.Limit{
				ratelimit.TokenBucket("bucket", 10, time.Minute), ratelimit.FixedWindow("window", 10, time.Minute),
				ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(2)),
			} {
				limiter, clock := harness.NewLimiter()
				w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
				request := limit.Key("ann").Count(10)
				w.Grant(request)
				clock.Advance(2 * time.Hour)

				sweeper, err := pool.Begin(t.Context())
				w.Do(err)
				defer sweeper.Rollback(context.WithoutCancel(t.Context()))
				var deleted int
				w.Do(sweeper.QueryRow(t.Context(), "SELECT deleted FROM ratelimit._sweep($1, 10, '1 minute', $2, NULL, NULL, '', NULL, $3)",
					limit.Name(), limit.Config().Kind, clock.At).Scan(&deleted))
				if deleted != limit.Config().Shards {
					t.Fatalf("%d rows deleted", deleted)
				}
				retries := 0
				limiter.OnRetry = func(_ context.Context, _ int, failed error) {
					retries++
					if harness.SQLState(failed) != "40001" {
						t.Error(failed)
					}
				}
				done := make(chan error, 1)
				go func() {
					done <- limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						_, err := limiter.Consume(ctx, tx, request)
						return err
					}, ratelimit.Isolation(level))
				}()
				harness.WaitingFor(t, pool, sweeper)
				w.Do(sweeper.Commit(t.Context()))
				if err := <-done; err != nil {
					t.Errorf("%v: %v", limit, err)
				}
				if again := level != pgx.ReadCommitted; (retries > 0) != again {
					t.Errorf("%v: run again %d times", limit, retries)
				}
				w.Holds(request, 0)
			}
		})
	}
}

// A cancelled sweep returns the number of deleted rows, and leaves a usable connection.
func TestASweepThatIsGivenUp(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limiter, clock := harness.NewLimiter()
	idle(t, pool, 20_000)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	batches := 0
	limiter.Clock = func() time.Time {
		if batches++; batches == 4 {
			cancel()
		}
		return clock.At
	}
	deleted, err := limiter.Sweep(ctx, pool, ratelimit.TokenBucket("l", 10, time.Minute))
	if !errors.Is(err, context.Canceled) || deleted < 2000 || deleted > 3000 || countRows(t, pool) != 20_000-deleted {
		t.Errorf("%d rows deleted, %v; %d are left", deleted, err, countRows(t, pool))
	}
	limiter.Clock = clock.Now
	rest, err := limiter.Sweep(t.Context(), pool, ratelimit.TokenBucket("l", 10, time.Minute))
	if err != nil || deleted+rest != 20_000 || countRows(t, pool) != 0 {
		t.Errorf("%d and %d rows deleted, %v", deleted, rest, err)
	}
}

// Several sweeps at once do not wait for each other, and count no row twice.
func TestSeveralSweepsAtOnce(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limiter, _ := harness.NewLimiter()
	idle(t, pool, 10_000)
	var deleted atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			n, err := limiter.Sweep(t.Context(), pool, ratelimit.TokenBucket("l", 10, time.Minute))
			if err != nil {
				t.Error(err)
			}
			deleted.Add(n)
		})
	}
	wg.Wait()
	if left := countRows(t, pool); deleted.Load() != 10_000 || left != 0 { // a row that one sweep skipped is deleted by the sweep that had locked it
		t.Errorf("%d rows deleted, %d are left", deleted.Load(), left)
	}
}

// TestSweepsAmongTraffic consumes keys in bursts, on every kind of handle and at every level, about as often as they become
// full. Meanwhile sweeps delete them as soon as they are full: their clock is an hour ahead. The grants give an upper bound
// of each key's balance, which must never be negative. Nor may much be lost.
func TestSweepsAmongTraffic(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 12)
	pgxDB, pqDB := harness.OpenSQL(t, "pgx", url, 4), harness.OpenSQL(t, "postgres", url, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 100, time.Second, ratelimit.Capacity(10)),
		ratelimit.FixedWindow("window", 10, 100*time.Millisecond),
		ratelimit.TokenBucket("sharded", 100, time.Second, ratelimit.Capacity(12), ratelimit.Shards(3)),
	}
	var ahead time.Duration // the database's clock minus this process'
	var now time.Time
	if err := pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	ahead = time.Until(now) - time.Millisecond // about the longest time for the answer; and some time passes before the sweep

	var limiter ratelimit.Limiter
	var retries atomic.Int64
	limiter.OnRetry = func(_ context.Context, _ int, failed error) {
		if retries.Add(1); harness.SQLState(failed) != "40001" {
			t.Errorf("run again after %v", failed)
		}
	}
	errRollback := errors.New("changed my mind")
	inTx := func(level pgx.TxIsoLevel) func(context.Context, ratelimit.Request, bool) (ratelimit.Result, error) {
		return func(ctx context.Context, request ratelimit.Request, rollback bool) (result ratelimit.Result, err error) {
			err = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				if result, err = limiter.Consume(ctx, tx, request); err == nil && rollback {
					err = errRollback
				}
				return err
			}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
			return result, err
		}
	}
	on := func(db ratelimit.DB) func(context.Context, ratelimit.Request, bool) (ratelimit.Result, error) {
		return func(ctx context.Context, request ratelimit.Request, _ bool) (ratelimit.Result, error) {
			return limiter.Consume(ctx, db, request)
		}
	}
	ways := []func(ctx context.Context, request ratelimit.Request, rollback bool) (ratelimit.Result, error){
		inTx(pgx.ReadCommitted), inTx(pgx.RepeatableRead), inTx(pgx.Serializable), on(pool), on(coalescer), on(coalescer), on(ratelimit.SQL(pqDB)),
		func(ctx context.Context, request ratelimit.Request, _ bool) (result ratelimit.Result, err error) {
			err = limiter.InSQLTx(ctx, pgxDB, func(ctx context.Context, tx *sql.Tx) error {
				result, err = limiter.Consume(ctx, ratelimit.SQL(tx), request)
				return err
			}, ratelimit.Attempts(1000))
			return result, err
		},
	}

	sweeping, stop := context.WithCancel(t.Context())
	var deleted int64
	var sweeps sync.WaitGroup
	sweeps.Go(func() {
		sweeper := ratelimit.Limiter{Clock: func() time.Time { return time.Now().Add(ahead + time.Hour) }}
		for sweeping.Err() == nil {
			n, err := sweeper.Sweep(sweeping, pool, limits...)
			deleted += n
			if err != nil && sweeping.Err() == nil {
				t.Errorf("a sweep: %v", err)
			}
		}
	})
	defer sweeps.Wait()
	defer stop()

	type account struct {
		balance float64 // upper bound, after the latest grant
		last    time.Time
	}
	accounts := map[harness.RowsOf]*account{}
	var expected, granted float64
	bursts := 0
	for begin := time.Now(); time.Since(begin) < 3*time.Second || bursts < 45; bursts++ {
		limit, key := limits[bursts%3], harness.OneOf(r, "a", "b")
		n := harness.Numbers(limit, key)
		refill := func(from, to time.Time) float64 {
			if n.Window {
				return float64(n.UpTo(algebra.At(to))-n.UpTo(algebra.At(from))) / float64(n.Period.Microseconds()) * n.Rate
			}
			return to.Sub(from).Seconds() / n.Period.Seconds() * n.Rate
		}
		var mu sync.Mutex
		var grants []time.Time
		var wg sync.WaitGroup
		for _, way := range ways {
			rollback := r.IntN(4) == 0
			wg.Go(func() {
				for range 4 {
					result, err := way(t.Context(), limit.Key(key), rollback)
					switch {
					case harness.Denied(err):
						return
					case err == nil:
						mu.Lock()
						grants = append(grants, result.At)
						mu.Unlock()
					case !errors.Is(err, errRollback) && harness.SQLState(err) != "40001":
						t.Errorf("%v: %v", limit, err)
						return
					}
				}
			})
		}
		wg.Wait()
		if len(grants) == 0 {
			continue
		}
		id := harness.RowsOf{Name: limit.Name(), Key: key}
		acc := accounts[id]
		first, last := slices.MinFunc(grants, time.Time.Compare), slices.MaxFunc(grants, time.Time.Compare)
		if acc == nil {
			acc = &account{balance: n.Capacity, last: first}
			accounts[id] = acc
		}
		before := min(acc.balance+refill(acc.last, first), n.Capacity)
		acc.balance, acc.last = before+refill(first, last)-float64(len(grants)), last
		if acc.balance < -1e-6 {
			t.Fatalf("burst %d, %v, %s: %d grants from %v to %v, where at most %v were available", bursts, limit, key, len(grants), first, last, acc.balance+float64(len(grants)))
		}
		expected += min(before, 2*float64(len(ways)))
		granted += float64(len(grants))
		time.Sleep(time.Duration(r.IntN(60)) * time.Millisecond)
	}
	stop()
	sweeps.Wait()
	t.Logf("%d bursts: %v grants where %.0f were available when they began; %d rows swept meanwhile, %d transactions retried", bursts, granted, expected, deleted, retries.Load())
	if deleted < int64(bursts)/10 || granted < 0.7*expected {
		t.Errorf("%d rows swept among %d bursts, %v grants of %.0f: too few", deleted, bursts, granted, expected)
	}
}

// A sweep walks the primary key, whatever the table had when its plan was made: each batch reads only the rows that it
// looks at.
func TestASweepWalksThePrimaryKey(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	conn := harness.Acquire(t, pool)
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	for _, rows := range []string{"0", "1", "40", "6000"} { // when the plan is made
		exec(`TRUNCATE ratelimit.limits`)
		exec(`INSERT INTO ratelimit.limits SELECT 'l', i::text, 0, 1, 10, now() FROM generate_series(1, ` + rows + `) AS i`)
		exec(`ANALYZE ratelimit.limits`)
		for range 10 {
			exec(`SELECT ratelimit.sweep('l', 10, '1 min')`)
		}
		exec(`INSERT INTO ratelimit.limits SELECT n, i::text, 0, 1, 10, CASE WHEN i % 100 = 0 THEN '2026-01-01' ELSE now() END
			FROM generate_series(1, 6000) AS i, (VALUES ('a'), ('l'), ('z')) AS v (n) ON CONFLICT (name, key, shard) DO UPDATE SET ts = EXCLUDED.ts`)
		counted := func() (scans, read int) {
			t.Helper()
			if err := conn.QueryRow(t.Context(), `SELECT sum(seq_scan), sum(coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables
				WHERE relid = 'ratelimit.limits'::regclass OR relid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'ratelimit.limits'::regclass)`).Scan(&scans, &read); err != nil {
				t.Fatal(err)
			}
			return scans, read
		}
		var total, batches int
		for next := new(""); next != nil; batches++ {
			first := *next
			exec("BEGIN")
			scansBefore, readBefore := counted()
			var deleted int
			err := conn.QueryRow(t.Context(), `SELECT deleted, next FROM ratelimit.sweep('l', 10, '1 min', first => $1)`, first).Scan(&deleted, &next)
			if err != nil {
				t.Fatal(err)
			}
			scans, read := counted()
			exec("COMMIT")
			if scans, read = scans-scansBefore, read-readBefore; scans > 0 || read > 1000+2*deleted+10 {
				t.Fatalf("planned at %s rows, from %q on: %d rows deleted by %d sequential scans and %d rows read by index", rows, first, deleted, scans, read)
			}
			total += deleted
		}
		if total != 60 || batches < 6 {
			t.Errorf("planned at %s rows: %d rows deleted in %d batches, want 60", rows, total, batches)
		}
	}
	var indexes int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_index WHERE indrelid = 'ratelimit.limits'::regclass").Scan(&indexes); err != nil || indexes != 1 {
		t.Errorf("the table has %d indexes, %v: with more than the primary key, updates are not heap-only", indexes, err)
	}
}

// With sweeps, the table's size follows the keys in use, not all keys ever used.
func TestTheTableStaysSmall(t *testing.T) { // not parallel: VACUUM keeps rows that another test's transaction might still see
	pool := harness.NewPool(t, 1)
	if _, err := pool.Exec(t.Context(), "SET synchronous_commit = off"); err != nil {
		t.Fatal(err)
	}
	limiter, clock := harness.NewLimiter()
	limit := ratelimit.TokenBucket("l", 10, time.Minute)
	size := func() (bytes int64) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), "SELECT pg_total_relation_size('ratelimit.limits')").Scan(&bytes); err != nil {
			t.Fatal(err)
		}
		return bytes
	}
	var first int64
	for day := range 5 {
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits SELECT 'l', md5($1 || '-' || i), 0, 1, 9, $2 FROM generate_series(1, 5000) AS i`, fmt.Sprint(day), clock.At)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			if _, err := limiter.Consume(t.Context(), pool, limit.Key("always")); err != nil {
				t.Fatal(err)
			}
			clock.Advance(6 * time.Second)
		}
		if day == 1 {
			first = size()
		}
		clock.Advance(24 * time.Hour)
		if _, err := limiter.Sweep(t.Context(), pool, limit); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), "VACUUM ratelimit.limits"); err != nil {
			t.Fatal(err)
		}
	}
	if last := size(); countRows(t, pool) > 1 || last > first*3/2 {
		t.Errorf("%d rows; %d bytes after two days, %d after five", countRows(t, pool), first, last)
	}
}

func TestTheSweepFunctionRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	idle(t, pool, 10)
	for arguments, text := range map[string]string{
		`'', 10, '1 minute'`:                              `name must have 1 to 255 bytes, not`,
		`NULL, 10, '1 minute'`:                            `name must have 1 to 255 bytes, not`,
		`'l', 'NaN', '1 minute'`:                          `1e15, not NaN`,
		`'l', 10, '0'`:                                    `years, not 00:00:00`,
		`'l', 10, '1 minute', 'window'`:                   `not 'window'`,
		`'l', 10, '1 minute', capacity => '-1'`:           `1e15, not -1`,
		`'l', 10, '1 minute', start => '2026-07-01'`:      `start must be NULL for a token bucket, not 20`,
		`'l', 10, '1 minute', first => NULL`:              `first must be a key or '', not NULL`,
		`'l', 10, '1 month', kind => 'fixed window'`:      `without months`,
		`'l', 10, '1 minute', 'fixed window', 'Infinity'`: `1e15, not Infinity`,
		`'l', 10, '1 minute', first => '', kind => NULL`:  `'calendar window', not NULL`,
		`'l', NULL, '1 minute'`:                           `rate must be between 1e-15 and 1e15, not NULL`,
		`'l', varies => '1 hour'`:                         `rate must be 0 or between 1e-15 and 1e15, not NULL`,
		`'l', 10, '1 minute', varies => '0'`:              `years, not 00:00:00`,
		`'l', 10, '1 minute', varies => '59 seconds'`:     `varies must be at least 60 s`,
		`'l', 0, '1 minute'`:                              `rate must be between 1e-15 and 1e15, not 0`,
		`'m'`:                                             `no program has published it`,
	} {
		if _, err := pool.Exec(t.Context(), "SELECT * FROM ratelimit.sweep("+arguments+")"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), text) {
			t.Errorf("ratelimit.sweep(%s): %v, want %q", arguments, err, text)
		}
	}
	for _, now := range []string{"infinity", "-infinity"} {
		_, err := pool.Exec(t.Context(), "SELECT * FROM ratelimit._sweep('l', 10, '1 minute', 'token bucket', NULL, NULL, '', NULL, $1)", now)
		if harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "now must be finite, not "+now) {
			t.Errorf("a sweep at %s: %v", now, err)
		}
	}
	for _, level := range harness.Levels[1:] { // at these levels, it would conflict with every user of a row that it has read
		err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "SELECT * FROM ratelimit.sweep('l', 10, '1 minute')")
			return err
		})
		if harness.SQLState(err) != "RL003" {
			t.Errorf("%s: %v, want RL003", level, err)
		}
	}
	if n := countRows(t, pool); n != 10 {
		t.Errorf("%d rows are left", n)
	}
	// A key with more rows than a batch does not stop the sweep. Such a key can only be made by hand.
	if _, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits SELECT 'l', '0', i, 1, 1, now() FROM generate_series(1, 2500) AS i`); err != nil {
		t.Fatal(err)
	}
	if deleted, err := new(ratelimit.Limiter).Sweep(t.Context(), pool, ratelimit.TokenBucket("l", 10, time.Minute)); err != nil || deleted != 9 {
		t.Errorf("%d rows deleted, %v", deleted, err)
	}
}

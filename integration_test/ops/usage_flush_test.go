package ops_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// Processes that write the same rows, keys that come and go among them, neither deadlock nor lose a count, at any isolation level.
func TestProcessesFlushAtOnce(t *testing.T) {
	t.Parallel()
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			const processes, flushes, limits = 4, 12, 5
			r := harness.NewRand(t)
			seeds := r.Perm(processes)
			var running sync.WaitGroup
			dbs := make([]*counting, processes)
			for p := range processes {
				dbs[p] = &counting{states: map[string]int{}, Pool: harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
					c.MaxConns = 1
					harness.StartWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": string(level)})
				})}
				running.Go(func() {
					recorder := &usage.Recorder{DB: dbs[p], Keep: 1e6 * time.Hour}
					now := harness.Noon
					limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return now }}
					for f := range flushes {
						// Two hours, and minutes of its own: or else the first row of usage would let one process in at a time.
						now = harness.Noon.Add(time.Duration(f*7%3)*45*time.Minute + time.Duration(p)*time.Minute)
						for i := range limits {
							// One key that all have, and more than 100 that come and go. Each process has others that are its worst,
							// which come first in what it writes.
							deny(t, limiter, fmt.Sprint("limit ", (i+seeds[p])%limits), "all", 1)
							for k := range 40 {
								deny(t, limiter, fmt.Sprint("limit ", (i+seeds[p])%limits), fmt.Sprint("key ", (k+f*30+p*20)%200), 1+(k+p)%2)
							}
						}
						for tries := 0; ; tries++ {
							err := recorder.Flush(t.Context())
							if err == nil {
								break
							}
							// On a busy machine, somebody may have to wait for two seconds.
							if tries > 20 || !errors.Is(err, ratelimit.ErrAttemptsExhausted) && harness.SQLState(err) != "55P03" {
								t.Error(err)
								return
							}
						}
					}
				})
			}
			running.Wait()
			for name, u := range usageOf(t, pool) {
				if want := int64(processes * flushes * (1 + 60)); u.Denied != want {
					t.Errorf("%s: %d denied, want %d", name, u.Denied, want)
				}
			}
			for key, n := range denialsOf(t, pool) {
				if want := int64(processes * flushes); strings.HasSuffix(key, " all") && n != want {
					t.Errorf("%s: %d, want %d", key, n, want)
				}
			}
			for _, db := range dbs {
				delete(db.states, "55P03")
				if n := db.states["40P01"]; n > 0 || level == pgx.ReadCommitted && len(db.states) > 0 {
					t.Errorf("errors by SQLSTATE: %v", db.states)
				}
			}
			// Once nobody else writes, there are 100 keys of each hour.
			recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
			for _, at := range []time.Time{harness.Noon, harness.Noon.Add(time.Hour)} {
				limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return at }}
				for i := range limits {
					deny(t, limiter, fmt.Sprint("limit ", i), "all", 1)
				}
			}
			flush(t, recorder)
			var most int
			if err := pool.QueryRow(t.Context(), `SELECT max(n) FROM (SELECT count(*) AS n FROM ratelimit.denials GROUP BY name, hour) AS c`).Scan(&most); err != nil || most != 100 {
				t.Errorf("%d keys of a limit and hour, %v, want 100", most, err)
			}
		})
	}
}

// Of the keys of an hour, the most denied ones stay; of those denied as often, the latest.
func TestTheMostDeniedKeysStay(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
	now := harness.Noon
	limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return now }}
	for i := range 90 {
		deny(t, limiter, "limit", fmt.Sprint("worse ", i), 2)
	}
	deny(t, limiter, "other", "ann", 1)
	flush(t, recorder)
	for i := range 90 {
		now = now.Add(time.Second)
		deny(t, limiter, "limit", fmt.Sprint("once ", i), 1)
	}
	flush(t, recorder)
	keys := denialsOf(t, pool)
	for i := range 90 {
		_, worse := keys[fmt.Sprint("limit worse ", i)]
		_, once := keys[fmt.Sprint("limit once ", i)]
		if !worse || once != (i >= 80) {
			t.Errorf("key %d: %v, %v", i, worse, once)
		}
	}
	if len(keys) != 101 || keys["other ann"] != 1 {
		t.Errorf("%d keys, of the other limit %d", len(keys), keys["other ann"])
	}
}

// Processes flush in any order.
func TestTheLastDenialIsTheLast(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	for _, later := range []time.Duration{20 * time.Second, 30 * time.Second, 10 * time.Second} {
		recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
		limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return harness.Noon.Add(later) }}
		deny(t, limiter, "limit", "ann", 1)
		flush(t, recorder)
	}
	var last time.Time
	if err := pool.QueryRow(t.Context(), `SELECT last_denied FROM ratelimit.denials('limit', $1)`, harness.Noon).Scan(&last); err != nil || !last.Equal(harness.Noon.Add(30*time.Second)) {
		t.Errorf("%v, %v", last, err)
	}
}

func TestOldUsageGoesLittleByLittle(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, `
		INSERT INTO ratelimit.usage SELECT 'old', date_trunc('minute', now(), 'UTC') - interval '49 hours' - n * interval '1 minute', 1, 0, 0, 1, 0, 0 FROM generate_series(1, 2500) AS n;
		INSERT INTO ratelimit.usage SELECT 'new', date_trunc('minute', now(), 'UTC') - interval '47 hours' - n * interval '1 minute', 1, 0, 0, 1, 0, 0 FROM generate_series(1, 30) AS n;
		INSERT INTO ratelimit.denials SELECT 'old', date_trunc('hour', now(), 'UTC') - interval '50 hours', 'key ' || n, 1, 1, now() FROM generate_series(1, 2500) AS n;
		INSERT INTO ratelimit.denials SELECT 'new', date_trunc('hour', now(), 'UTC') - interval '46 hours', 'key ' || n, 1, 1, now() FROM generate_series(1, 30) AS n`)
	recorder := &usage.Recorder{DB: pool, Keep: 48 * time.Hour}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	left := func(want string) {
		t.Helper()
		var got string
		if err := pool.QueryRow(t.Context(), `SELECT concat_ws(' ', (SELECT count(*) FROM ratelimit.usage WHERE name = 'old'), (SELECT count(*) FROM ratelimit.usage WHERE name = 'new'),
			(SELECT count(*) FROM ratelimit.denials WHERE name = 'old'), (SELECT count(*) FROM ratelimit.denials WHERE name = 'new'))`).Scan(&got); err != nil || got != want {
			t.Errorf("%s rows are left, %v, want %s", got, err, want)
		}
	}
	flush(t, recorder) // with nothing to write
	left("1500 30 1500 30")
	flush(t, recorder) // not again within the hour
	left("1500 30 1500 30")
	// Two more for each row that is added; nobody waits for a row that somebody has locked.
	holder, err := harness.Connect(t, pool.Config().ConnString(), 1).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), `SELECT FROM ratelimit.usage WHERE name = 'old' ORDER BY minute LIMIT 7 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	deny(t, limiter, "added", "ann", 1)
	flush(t, recorder)
	left("498 30 498 30")
	deny(t, limiter, "added", "ann", 1)
	flush(t, recorder)
	left("7 30 0 30")
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	deny(t, limiter, "added", "ann", 1)
	flush(t, recorder)
	left("0 30 0 30")
	if got := usageOf(t, pool)["added"]; got.Denied != 3 {
		t.Errorf("added %+v", got)
	}
}

// network is a way to a server that can be cut.
type network struct {
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func (n *network) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cut {
		return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("the network is cut")}
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err == nil {
		n.conns = append(n.conns, conn)
	}
	return conn, err
}

func (n *network) set(cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = cut
	if cut {
		for _, conn := range n.conns {
			_ = conn.Close()
		}
		n.conns = nil
	}
}

// The database is away, and comes back: what was counted meanwhile is written then, by Run as well.
func TestUsageWaitsForTheDatabase(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	var way network
	pool := harness.Reconfigured(t, harness.Connect(t, url, 2), func(c *pgxpool.Config) { c.ConnConfig.DialFunc = way.dial })
	var told atomic.Int64
	recorder := &usage.Recorder{DB: pool, Every: 5 * time.Millisecond, HashKey: func(key string) string { return "hash of " + key }}
	recorder.OnError = func(err error) {
		if strings.Contains(err.Error(), "missing") {
			t.Error(err)
		}
		told.Add(1)
	}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	for range 3 {
		deny(t, limiter, "limit", "ann", 10)
		flush(t, recorder)
		way.set(true)
		deny(t, limiter, "limit", "ann", 10)
		for range 3 {
			if err := recorder.Flush(t.Context()); err == nil {
				t.Error("flushed over no network")
			}
			deny(t, limiter, "limit", "bob", 1)
		}
		way.set(false)
		flush(t, recorder)
	}
	want := map[string]int64{"limit hash of ann": 60, "limit hash of bob": 9}
	if u := usageOf(t, pool)["limit"]; u.Denied != 69 || !maps.Equal(denialsOf(t, pool), want) {
		t.Errorf("recorded %+v, %v, want %v", u, denialsOf(t, pool), want)
	}

	// Run goes on.
	way.set(true)
	ctx, end := context.WithCancel(t.Context())
	ran := make(chan error)
	go func() { ran <- recorder.Run(ctx) }()
	deny(t, limiter, "limit", "ann", 5)
	harness.Eventually(t, "somebody is told", func() bool { return told.Load() > 2 })
	way.set(false)
	elsewhere := harness.Connect(t, url, 1)
	harness.Eventually(t, "Run has written", func() bool { return usageOf(t, elsewhere)["limit"].Denied == 74 })
	way.set(true)
	deny(t, limiter, "limit", "ann", 5)
	end()
	if err := <-ran; err == nil {
		t.Error("the last flush has not failed")
	}
	way.set(false)
	flush(t, recorder) // by hand: it was kept
	if u := usageOf(t, elsewhere)["limit"]; u.Denied != 79 {
		t.Errorf("recorded %+v", u)
	}
}

// A row that somebody has locked holds a flush up for two seconds. Then it is known that nothing was written.
func TestALockedRowOfUsageLosesNothing(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	recorder := &usage.Recorder{DB: pool}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return harness.Noon }}
	recorder.Keep = 1e6 * time.Hour
	deny(t, limiter, "limit", "ann", 1)
	flush(t, recorder)
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), "UPDATE ratelimit.usage SET granted = 5"); err != nil {
		t.Fatal(err)
	}
	deny(t, limiter, "limit", "ann", 1)
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	if err := recorder.Flush(ctx); harness.SQLState(err) != "55P03" {
		t.Errorf("%v, want 55P03", err)
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	flush(t, recorder)
	if u := usageOf(t, pool)["limit"]; u.Denied != 2 || u.Granted != 5 || denialsOf(t, pool)["limit ann"] != 2 {
		t.Errorf("recorded %+v, %v", u, denialsOf(t, pool))
	}
}

// The last flush tries once more if a row was locked for two seconds: what it keeps, no later one would write.
func TestALockedRowAtTheEndLosesNothing(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), "LOCK TABLE ratelimit.denials"); err != nil {
		t.Fatal(err)
	}
	failed := 0
	recorder := &usage.Recorder{OnError: func(err error) { t.Error(err) }, DB: watched{pool, func(err error) {
		if failed++; failed > 1 || harness.SQLState(err) != "55P03" {
			t.Errorf("try %d: %v, want one that fails, with 55P03", failed, err)
		}
		if err := holder.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
	}}}
	deny(t, &ratelimit.Limiter{Observer: recorder.Observe}, "limit", "ann", 1)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := recorder.Run(ended); err != nil || failed != 1 {
		t.Errorf("%v after %d tries that failed", err, failed)
	}
	if n := usageOf(t, pool)["limit"].Denied; n != 1 {
		t.Errorf("%d denials are recorded, want 1", n)
	}
}

// watched is a pool that tells of the errors of its rows.
type watched struct {
	*pgxpool.Pool
	failed func(err error)
}

func (w watched) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return watchedRow{w.Pool.QueryRow(ctx, sql, args...), w.failed}
}

type watchedRow struct {
	pgx.Row
	failed func(err error)
}

func (r watchedRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	if err != nil {
		r.failed(err)
	}
	return err
}

// deaf is a pool whose answers are lost, of statements that have run or not.
type deaf struct {
	*pgxpool.Pool
	before, after bool
}

type lostRow struct{}

func (lostRow) Scan(...any) error { return io.ErrUnexpectedEOF }

func (d *deaf) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if d.before {
		return lostRow{}
	}
	row := d.Pool.QueryRow(ctx, sql, args...)
	if d.after {
		var n int
		if err := row.Scan(&n); err != nil {
			return row
		}
		return lostRow{}
	}
	return row
}

// A flush whose answer is lost is not written again: its counts are there once, or missing, and somebody is told.
func TestAnUnknownFlushIsNotCountedTwice(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	db := &deaf{Pool: pool}
	var told []string
	recorder := &usage.Recorder{DB: db, OnError: func(err error) { told = append(told, err.Error()) }}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	for _, step := range []struct {
		before, after bool
		want          int64
	}{{false, false, 3}, {false, true, 6}, {true, false, 6}, {false, false, 9}} {
		db.before, db.after = step.before, step.after
		deny(t, limiter, "limit", "ann", 3)
		if err := recorder.Flush(t.Context()); (err != nil) != (step.before || step.after) {
			t.Errorf("%+v: %v", step, err)
		}
		if u := usageOf(t, pool)["limit"]; u.Denied != step.want || denialsOf(t, pool)["limit ann"] != step.want {
			t.Errorf("%+v: recorded %+v, %v", step, u, denialsOf(t, pool))
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := recorder.Run(ended); err != nil || len(told) != 1 || !strings.Contains(told[0], "usage: 6 requests are missing in ratelimit.usage") {
		t.Errorf("%v, told %q", err, told)
	}
}

// A key that the database refuses does not stop the rest.
func TestAKeyThatCannotBeStoredStopsNoFlush(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	bad := true
	recorder := &usage.Recorder{DB: pool, HashKey: func(key string) string {
		if bad {
			return "\xff"
		}
		return key
	}}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	deny(t, limiter, "limit", "ann", 3)
	if err := recorder.Flush(t.Context()); harness.SQLState(err) != "22021" || !strings.Contains(err.Error(), "the denied keys were left out") {
		t.Error(err)
	}
	bad = false
	deny(t, limiter, "limit", "ann", 2)
	flush(t, recorder)
	if u := usageOf(t, pool)["limit"]; u.Denied != 5 || denialsOf(t, pool)["limit ann"] != 2 {
		t.Errorf("recorded %+v, %v", u, denialsOf(t, pool))
	}
}

// A key that is too long for an index is refused by every flush, and is left out too. A full disk, which leaves nothing behind, loses nothing.
func TestUsageWaitsForResources(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	key := "ann"
	recorder := &usage.Recorder{DB: pool, HashKey: func(string) string { return key }}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	flushes := func(state, part string) {
		t.Helper()
		deny(t, limiter, "limit", "ann", 1)
		if err := recorder.Flush(t.Context()); harness.SQLState(err) != state || !strings.Contains(err.Error(), part) {
			t.Errorf("%v, want %s", err, state)
		}
	}
	var long strings.Builder // that cannot be compressed
	for long.Len() < 20_000 {
		long.WriteString(rand.Text())
	}
	key = long.String()
	flushes("54000", "the denied keys were left out")

	harness.MustExec(t, pool, "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE disk_full; END $$")
	harness.MustExec(t, pool, "CREATE TRIGGER no_room BEFORE INSERT ON ratelimit.usage EXECUTE FUNCTION no_room()")
	key = "\xff" // refused at once, and the rest then finds the disk full
	flushes("22021", "disk_full")
	key = "ann"
	flushes("53100", "disk_full")
	harness.MustExec(t, pool, "DROP TRIGGER no_room ON ratelimit.usage")
	flush(t, recorder)
	if u := usageOf(t, pool)["limit"]; u.Denied != 3 || denialsOf(t, pool)["limit ann"] != 2 {
		t.Errorf("recorded %+v, %v", u, denialsOf(t, pool))
	}
}

func TestUsageNeedsTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 1)
	role := harness.CreateRole(t, owner)
	harness.MustExec(t, owner, harness.Execute(role)+"; GRANT USAGE ON SCHEMA ratelimit TO "+role)
	recorder := &usage.Recorder{DB: harness.AsRole(t, owner, role, 1)}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
	deny(t, limiter, "sendMessage", "ann", 3)
	if err := recorder.Flush(t.Context()); harness.SQLState(err) != "42501" {
		t.Errorf("%v, want 42501", err)
	}
	harness.GrantWork(t, owner, role, "consume")
	flush(t, recorder)
	if u := usageOf(t, owner)["sendMessage"]; u.Denied != 3 {
		t.Errorf("recorded %+v", u)
	}
	// What the page asks.
	reader := harness.AsRole(t, owner, role, 1)
	var name string
	var denials, granted int64
	var last time.Time
	if err := reader.QueryRow(t.Context(), harness.DocSQL(t, "docs/operations.md", "FROM ratelimit.usage(since")).Scan(&name, &denials, &granted, &last); err != nil || name != "sendMessage" || denials != 3 || granted != 0 {
		t.Errorf("%s, %d, %d, %v", name, denials, granted, err)
	}
	var key string
	var asked float64
	if err := reader.QueryRow(t.Context(), harness.DocSQL(t, "docs/operations.md", "ratelimit.denials('sendMessage'")).Scan(&name, &key, &denials, &asked, &last); err != nil ||
		key != "ann" || denials != 3 || asked != 3 || time.Since(last).Abs() > time.Hour {
		t.Errorf("%s, %d, %v, %v, %v", key, denials, asked, last, err)
	}
}

// The functions read by limit and time, along an index, and add up hours.
func TestUsageIsReadByIndex(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, `
		INSERT INTO ratelimit.usage SELECT 'limit ' || l, timestamptz '2026-07-01 12:00Z' + m * interval '1 minute', 1, m, 0, 1, 0, 0
		  FROM generate_series(1, 50) AS l, generate_series(0, 599) AS m;
		INSERT INTO ratelimit.denials SELECT 'limit ' || l, timestamptz '2026-07-01 12:00Z' + h * interval '1 hour', 'key ' || k, k, 2 * k, timestamptz '2026-07-01 12:30Z' + h * interval '1 hour'
		  FROM generate_series(1, 50) AS l, generate_series(0, 9) AS h, generate_series(1, 50) AS k;
		ANALYZE ratelimit.usage; ANALYZE ratelimit.denials`)
	at := time.Date(2026, time.July, 1, 20, 0, 30, 0, time.UTC)
	type rows struct {
		n, granted int64
		first      time.Time
	}
	for name, want := range map[string]rows{"limit 7": {120, 120, at.Truncate(time.Minute)}, "": {6000, 6000, at.Truncate(time.Minute)}, "none": {}} {
		var got rows
		var first *time.Time
		if err := pool.QueryRow(t.Context(), `SELECT count(*), coalesce(sum(granted), 0)::bigint, min(minute) FROM ratelimit.usage(nullif($1, ''), $2)`, name, at).Scan(&got.n, &got.granted, &first); err != nil {
			t.Fatal(err)
		}
		if first != nil {
			got.first = first.UTC()
		}
		if got != want {
			t.Errorf("%q: %+v, want %+v", name, got, want)
		}
	}
	var keys []string
	found, err := pool.Query(t.Context(), `SELECT concat_ws('|', key, denied, asked, last_denied = '2026-07-01 21:30Z') FROM ratelimit.denials('limit 7', $1) LIMIT 2`, at)
	if err == nil {
		keys, err = pgx.CollectRows(found, pgx.RowTo[string])
	}
	if want := []string{"key 50|100|200|t", "key 49|98|196|t"}; err != nil || !slices.Equal(keys, want) {
		t.Errorf("%q, %v, want %q", keys, err, want)
	}
	if got := harness.Lines(t, pool, "SELECT count(DISTINCT name) > 1, max(denied) = max(denied) FILTER (WHERE place = 1) FROM ratelimit.denials(since => '2000-01-01') WITH ORDINALITY AS d (name, key, denied, asked, last_denied, place)"); got != "(t,t)" {
		t.Errorf("the denials of all limits: %s", got)
	}
	for sql, index := range map[string]string{
		`SELECT count(*) FROM ratelimit.usage('limit 7', '2026-07-01 20:00Z')`: "ratelimit.usage_pkey",
		`SELECT count(*) FROM ratelimit.usage(since => '2026-07-01 21:50Z')`:   "ratelimit.usage_minute_name_key",
	} {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		const counters = `SELECT pg_stat_get_xact_tuples_returned($1::regclass), pg_stat_get_xact_numscans('ratelimit.usage'::regclass)`
		var rows, entries, scans, entriesBefore, scansBefore int // the planner looks up a few entries, too
		if err = tx.QueryRow(t.Context(), counters, index).Scan(&entriesBefore, &scansBefore); err == nil {
			if err = tx.QueryRow(t.Context(), sql).Scan(&rows); err == nil {
				err = tx.QueryRow(t.Context(), counters, index).Scan(&entries, &scans)
			}
		}
		entries, scans = entries-entriesBefore, scans-scansBefore
		if _ = tx.Rollback(t.Context()); err != nil || rows < 100 || entries < rows || entries > rows+20 || scans != 0 {
			t.Errorf("%s: %d rows, %d entries of the index, %d scans of the table, %v", sql, rows, entries, scans, err)
		}
	}
	for sql, index := range map[string]string{
		`SELECT * FROM ratelimit.usage WHERE name = 'limit 7' AND minute > timestamptz '2026-07-01 20:00Z'`:                                 "usage_pkey",
		`SELECT * FROM ratelimit.usage WHERE minute > timestamptz '2026-07-01 21:50Z' ORDER BY minute, name`:                                "usage_minute_name_key",
		`SELECT * FROM ratelimit.denials WHERE name = 'limit 7' AND hour > timestamptz '2026-07-01 20:00Z'`:                                 "(name = 'limit 7'::text)", // by either index, from PostgreSQL 18 on
		`SELECT name, key, denied FROM ratelimit.denials WHERE hour > timestamptz '2026-07-01 20:00Z'`:                                      "denials_hour_name_key_key",
		`SELECT ctid FROM ratelimit.usage WHERE minute < timestamptz '2026-07-01 13:00Z' ORDER BY minute LIMIT 1000 FOR UPDATE SKIP LOCKED`: "usage_minute_name_key",
		`SELECT ctid FROM ratelimit.denials WHERE hour < timestamptz '2026-07-01 13:00Z' ORDER BY hour LIMIT 1000 FOR UPDATE SKIP LOCKED`:   "denials_hour_name_key_key",
	} {
		lines, err := pool.Query(t.Context(), "EXPLAIN "+sql)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := pgx.CollectRows(lines, pgx.RowTo[string])
		if text := strings.Join(plan, "\n"); err != nil || !strings.Contains(text, index) || strings.Contains(text, "Seq Scan") || strings.Contains(text, "Filter:") {
			t.Errorf("%s, %v:\n%s", sql, err, text)
		}
	}
}

// What a flush costs: go test ./integration_test -run '^$' -bench UsageFlush
func BenchmarkUsageFlush(b *testing.B) {
	for _, bench := range []struct {
		name         string
		limits, keys int  // denied keys of each limit
		fresh        bool // each flush has other keys, as in a flood
	}{
		{"1 limit", 1, 0, false},
		{"10 limits", 10, 0, false},
		{"10 limits, 10 denied keys each", 10, 10, false},
		{"1 limit, 100 denied keys", 1, 100, false},
		{"1 limit, 100 other denied keys each time", 1, 100, true},
		{"10 limits, 100 other denied keys each time", 10, 100, true},
		{"1000 limits", 1000, 0, false},
	} {
		b.Run(bench.name, func(b *testing.B) {
			pool := harness.NewPool(b, 1)
			recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
			now := harness.Noon
			limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return now }}
			free := make([]ratelimit.Request, bench.limits)
			for i := range free {
				free[i] = ratelimit.Unlimited(fmt.Sprint("limit ", i)).Key("ann")
			}
			var took time.Duration
			for n := range b.N {
				now = now.Add(usage.DefaultEvery)
				for i := range free {
					if _, err := limiter.Consume(b.Context(), unreached{}, free[i]); err != nil {
						b.Fatal(err)
					}
					for k := range bench.keys {
						if bench.fresh {
							k += n * bench.keys
						}
						deny(b, limiter, fmt.Sprint("limit ", i), fmt.Sprint("key ", k), 1)
					}
				}
				begin := time.Now()
				flush(b, recorder)
				took += time.Since(begin)
			}
			b.ReportMetric(float64(took.Microseconds())/1000/float64(b.N), "ms/flush")
			b.ReportMetric(0, "ns/op") // with what is to be flushed
		})
	}
}

package integration_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// used is a row of rate_limit_usage, or a sum of rows.
type used struct {
	Granted, Denied, Failed  int64
	Tokens, Refunded, Waited float64
}

func (u *used) add(more used) {
	u.Granted += more.Granted
	u.Denied += more.Denied
	u.Failed += more.Failed
	u.Tokens += more.Tokens
	u.Refunded += more.Refunded
	u.Waited += more.Waited
}

// usageOf is the sums of rate_limit_usage by limit.
func usageOf(t testing.TB, pool *pgxpool.Pool) map[string]used {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT name, sum(granted)::bigint, sum(denied)::bigint, sum(failed)::bigint, sum(tokens), sum(refunded), sum(waited)
		FROM rate_limit_usage GROUP BY name`)
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]used{}
	var name string
	var u used
	if _, err := pgx.ForEachRow(rows, []any{&name, &u.Granted, &u.Denied, &u.Failed, &u.Tokens, &u.Refunded, &u.Waited}, func() error {
		sums[name] = u
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return sums
}

// denialsOf is the sums of rate_limit_denials by limit and key.
func denialsOf(t testing.TB, pool *pgxpool.Pool) map[string]int64 {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT name || ' ' || key, sum(denied)::bigint FROM rate_limit_denials GROUP BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]int64{}
	var name string
	var n int64
	if _, err := pgx.ForEachRow(rows, []any{&name, &n}, func() error { sums[name] = n; return nil }); err != nil {
		t.Fatal(err)
	}
	return sums
}

func flush(t testing.TB, r *usage.Recorder) {
	t.Helper()
	if err := r.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// noError is for OnError, where there ought to be none.
func noError(t testing.TB) func(error) {
	return func(err error) { t.Errorf("OnError: %v", err) }
}

// deny has a limiter deny so often, without the database: by a limit with a rate of 0.
func deny(t testing.TB, limiter *ratelimit.Limiter, name, key string, times int) {
	t.Helper()
	request := ratelimit.TokenBucket(name, 0, time.Minute).Key(key)
	for range times {
		if _, err := limiter.Consume(t.Context(), unreached{}, request); !denied(err) {
			t.Fatal(err)
		}
	}
}

// unreached is the database of calls that are decided without one.
type unreached struct{}

func (unreached) QueryRow(context.Context, string, ...any) pgx.Row { panic("asked") }

func TestUsageSaysWhatCallersCounted(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 6)
	recorder := &usage.Recorder{DB: pool, Every: 20 * time.Millisecond, OnError: noError(t)}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
	running, end := context.WithCancel(t.Context())
	ran := make(chan error)
	go func() { ran <- recorder.Run(running) }()

	perUser := ratelimit.TokenBucket("perUser", 20, time.Hour)
	perSite := ratelimit.FixedWindow("perSite", 1e6, time.Hour)
	queue := ratelimit.TokenBucket("queue", 100, time.Second, ratelimit.Capacity(1))
	var mu sync.Mutex
	want, wantKeys := map[string]used{}, map[string]int64{}
	count := func(name string, u used) {
		sum := want[name]
		sum.add(u)
		want[name] = sum
	}
	var callers sync.WaitGroup
	for g := range 4 {
		callers.Go(func() {
			for i := range 60 {
				user := perUser.Key(fmt.Sprint("user ", i%3))
				result, err := limiter.Consume(t.Context(), pool, user.Count(2), perSite.Global())
				mu.Lock()
				switch {
				case err == nil:
					count("perUser", used{Granted: 1, Tokens: 2})
					count("perSite", used{Granted: 1, Tokens: 1})
				case denied(err):
					count("perUser", used{Denied: 1})
					wantKeys["perUser "+result.Requests[0].Key]++
				default:
					t.Error(err)
				}
				mu.Unlock()
				if i%10 == 0 {
					if _, err = limiter.Charge(t.Context(), pool, perSite.Key("fees").Count(0.5)); err != nil {
						t.Error(err)
					}
					reserved, err := limiter.Consume(t.Context(), pool, queue.Key(fmt.Sprint(g)).Reserve())
					if err != nil {
						t.Error(err)
					}
					refunded, err := limiter.Refund(t.Context(), pool, reserved.Receipt(), queue.Key(fmt.Sprint(g)))
					if err != nil {
						t.Error(err)
					}
					_, err = limiter.Consume(t.Context(), pool, perUser.Key("ann").Count(21)) // above the capacity
					if !errors.Is(err, ratelimit.ErrExceedsCapacity) {
						t.Error(err)
					}
					mu.Lock()
					count("perSite", used{Tokens: 0.5})
					count("queue", used{Granted: 1, Tokens: 1, Waited: reserved.RetryAfter.Seconds(), Refunded: refunded.Requests[0].Refunded})
					count("perUser", used{Failed: 1})
					mu.Unlock()
				}
			}
		})
	}
	callers.Wait()
	end()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	got := usageOf(t, pool)
	if len(got) != len(want) {
		t.Errorf("limits %v, want %v", got, want)
	}
	for name, u := range want {
		g := got[name]
		if g.Granted != u.Granted || g.Denied != u.Denied || g.Failed != u.Failed || !near(g.Tokens, u.Tokens) || !near(g.Refunded, u.Refunded) || !near(g.Waited, u.Waited) {
			t.Errorf("%s: recorded %+v, callers counted %+v", name, g, u)
		}
	}
	if u := want["perUser"]; u.Granted < 30 || u.Denied < 30 {
		t.Errorf("the callers counted too little: %+v", want)
	}
	if got := denialsOf(t, pool); !maps.Equal(got, wantKeys) {
		t.Errorf("denied keys %v, callers counted %v", got, wantKeys)
	}
	var off int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM rate_limit_usage WHERE minute <> date_trunc('minute', minute, 'UTC') OR minute < now() - interval '1 hour' OR minute > now()`).Scan(&off); err != nil || off != 0 {
		t.Errorf("%d rows at other times, %v", off, err)
	}
}

// Whatever the pool, the rows are the same, to the microsecond.
func TestUsageIsWrittenByEveryDriver(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T, url string) ratelimit.DB{
		"pgx": func(t *testing.T, url string) ratelimit.DB { return connect(t, url, 1) },
		"pgx, exec": func(t *testing.T, url string) ratelimit.DB {
			return reconfigured(t, connect(t, url, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
		},
		"pgx, simple protocol": func(t *testing.T, url string) ratelimit.DB {
			return reconfigured(t, connect(t, url, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol })
		},
		"another time zone": func(t *testing.T, url string) ratelimit.DB {
			return reconfigured(t, connect(t, url, 1), func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
				startWith(t, c.ConnConfig, map[string]string{"TimeZone": "Asia/Kathmandu", "DateStyle": "SQL, DMY", "IntervalStyle": "sql_standard"})
			})
		},
		"serializable": func(t *testing.T, url string) ratelimit.DB {
			return reconfigured(t, connect(t, url, 1), func(c *pgxpool.Config) {
				startWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
			})
		},
		"coalescer":            func(t *testing.T, url string) ratelimit.DB { return &ratelimit.Coalescer{Pool: connect(t, url, 1)} },
		"database/sql":         func(t *testing.T, url string) ratelimit.DB { return ratelimit.SQL(openSQL(t, "pgx", url, 1)) },
		"database/sql, lib/pq": func(t *testing.T, url string) ratelimit.DB { return ratelimit.SQL(openSQL(t, "postgres", url, 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := newMigrated(t)
			recorder := &usage.Recorder{DB: open(t, url), Keep: 1e6 * time.Hour}
			now := noon.Add(17*time.Minute + 3*time.Second + 123456*time.Microsecond)
			limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return now }}
			hostile := `a "b" \c, {d} 'é' NULL` + "\n"
			for range 2 {
				deny(t, limiter, hostile, hostile, 2)
				if _, err := limiter.Consume(t.Context(), unreached{}, ratelimit.Unlimited("free").Key("NULL").Count(0.1)); err != nil {
					t.Fatal(err)
				}
				flush(t, recorder)
			}
			pool := connect(t, url, 1)
			tell := func(sql string, want []string) {
				t.Helper()
				rows, err := pool.Query(t.Context(), sql)
				if err != nil {
					t.Fatal(err)
				}
				got, err := pgx.CollectRows(rows, pgx.RowTo[string])
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("%q, %v, want %q", got, err, want)
				}
			}
			tell(`SELECT concat_ws('|', name, minute = '2026-07-01 12:17Z', granted, denied, failed, tokens, refunded, waited) FROM rate_limit_usage ORDER BY name`,
				[]string{hostile + "|t|0|4|0|0|0|0", "free|t|2|0|0|0.2|0|0"})
			key := strings.ReplaceAll(hostile, `\`, `\\`) // as Key makes it of one part
			tell(`SELECT concat_ws('|', name, hour = '2026-07-01 12:00Z', key, denied, asked, last_denied = '2026-07-01 12:17:03.123456Z') FROM rate_limit_denials`,
				[]string{hostile + "|t|" + key + "|4|4|t"})
		})
	}
}

// usageWorker, in the environment, makes of the tests a process that consumes: see workOnUsage.
const usageWorker = "TXLIMIT_TEST_USAGE_WORKER"

// workOnUsage consumes until it is killed, or its input ends. It prints each decision before it is recorded ("+", or "-" and the
// key), "flush" before a flush and "flushed" after it. All that was printed before "flush" is in it.
func workOnUsage(url string) int {
	ctx := context.Background()
	pool, err := openPool(ctx, url, 4, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer pool.Close()
	recorder := &usage.Recorder{DB: pool}
	var mu sync.Mutex
	limiter := &ratelimit.Limiter{Observer: func(ctx context.Context, d ratelimit.Decision) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case d.Err == nil:
			fmt.Println("+")
		case denied(d.Err):
			fmt.Println("- " + d.Result.Requests[0].Key)
		default:
			fmt.Fprintln(os.Stderr, d.Err)
		}
		recorder.Decision(ctx, d)
	}}
	flush := func() {
		mu.Lock()
		fmt.Println("flush")
		mu.Unlock()
		if err := recorder.Flush(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return
		}
		mu.Lock()
		fmt.Println("flushed")
		mu.Unlock()
	}
	var stop atomic.Bool
	limit := ratelimit.TokenBucket("worked", 20, time.Second, ratelimit.Capacity(1))
	var callers sync.WaitGroup
	for g := range 2 {
		callers.Go(func() {
			for i := g; !stop.Load(); i++ {
				_, _ = limiter.Consume(ctx, pool, limit.Key(fmt.Sprint("user-", i%3))) // the observer has it
			}
		})
	}
	callers.Go(func() {
		for !stop.Load() {
			flush()
			time.Sleep(5 * time.Millisecond)
		}
	})
	_, _ = io.Copy(io.Discard, os.Stdin)
	stop.Store(true)
	callers.Wait()
	flush()
	return 0
}

// decided is what a worker has printed.
type decided struct {
	granted int64
	denied  map[string]int64
}

func newDecided() decided { return decided{denied: map[string]int64{}} }

func (c *decided) add(more decided) {
	c.granted += more.granted
	for key, n := range more.denied {
		c.denied[key] += n
	}
}

// readWorker reads what a worker prints to its end: all, and what a flush had that was answered.
func readWorker(r io.Reader) (all, flushed decided) {
	all, flushed = newDecided(), newDecided()
	flushing := newDecided()
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		switch line := lines.Text(); {
		case line == "+":
			all.granted++
		case strings.HasPrefix(line, "- "):
			all.denied[line[2:]]++
		case line == "flush":
			flushing = decided{all.granted, maps.Clone(all.denied)}
		case line == "flushed":
			flushed = flushing
		}
	}
	return all, flushed
}

// Killed processes lose what they have counted since their last flush, or since the flush that was under way. Nothing is counted
// twice. A process that ends in order loses nothing.
func TestKilledProcessesLoseOneFlushEach(t *testing.T) {
	t.Parallel()
	url := newMigrated(t)
	pool := connect(t, url, 2)
	r := newRand(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	most, least := newDecided(), newDecided()
	var mu sync.Mutex
	var workers sync.WaitGroup
	for i := range 5 {
		killed, lines := i < 4, 50+r.IntN(400)
		workers.Go(func() {
			cmd := exec.Command(self)
			cmd.Env = append(os.Environ(), usageWorker+"="+url)
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Error(err)
				return
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Error(err)
				return
			}
			if err := cmd.Start(); err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = cmd.Process.Kill() }()
			read, write := io.Pipe()
			go func() { // ends the worker after some lines
				lines := lines
				from := bufio.NewReader(out)
				for {
					line, err := from.ReadString('\n')
					_, _ = io.WriteString(write, line)
					if err != nil {
						_ = write.Close()
						return
					}
					if lines--; lines == 0 && killed {
						_ = cmd.Process.Kill()
					} else if lines == 0 {
						_ = in.Close()
					}
				}
			}()
			all, flushed := readWorker(read)
			if err := cmd.Wait(); (err != nil) != killed {
				t.Errorf("worker %d, killed %v: %v", i, killed, err)
			}
			if !killed && (flushed.granted != all.granted || !maps.Equal(flushed.denied, all.denied)) {
				t.Errorf("worker %d has ended before its last flush: %v, %v", i, flushed, all)
			}
			mu.Lock()
			defer mu.Unlock()
			most.add(all)
			least.add(flushed)
		})
	}
	workers.Wait()
	// A killed worker's last flush may still be under way.
	eventually(t, "no worker's session is left", func() bool {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%_ratelimit_record_usage%' AND pid <> pg_backend_pid()
			AND datname = current_database()`).Scan(&n)
		return err == nil && n == 0
	})
	got := usageOf(t, pool)["worked"]
	var mostDenied, leastDenied int64
	keys := denialsOf(t, pool)
	for key, n := range most.denied {
		mostDenied += n
		leastDenied += least.denied[key]
		if got := keys["worked "+key]; got > n || got < least.denied[key] {
			t.Errorf("%s: recorded %d denials, want %d to %d", key, got, least.denied[key], n)
		}
	}
	if got.Granted > most.granted || got.Granted < least.granted || got.Denied > mostDenied || got.Denied < leastDenied || got.Tokens != float64(got.Granted) || got.Failed != 0 {
		t.Errorf("recorded %+v, want %d to %d granted and %d to %d denied", got, least.granted, most.granted, leastDenied, mostDenied)
	}
	if least.granted == 0 || leastDenied == 0 {
		t.Errorf("the workers did too little: %v", least)
	}
	t.Logf("granted %d of %d to %d, denied %d of %d to %d", got.Granted, least.granted, most.granted, got.Denied, leastDenied, mostDenied)
}

// A million keys are denied, with flushes in between: memory and rows do not grow, and the frequent key is found. It does not run
// beside other tests, which would use memory too.
func TestAFloodOfDeniedKeys(t *testing.T) {
	pool := newPool(t, 1)
	recorder := &usage.Recorder{DB: pool}
	now := noon
	limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return now }}
	recorder.Keep = 1e6 * time.Hour
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what pools have put aside goes at the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const all, frequent = 1_000_000, 50 // every 50th denial is of one key
	deny(t, limiter, "flood", "worst", 1)
	flush(t, recorder)
	worst := int64(1)
	var heaps []int64
	for i := range all {
		deny(t, limiter, "flood", fmt.Sprintf("2001:db8:%x:%x::/64", i>>16, i&0xffff), 1)
		if i%frequent == 0 {
			deny(t, limiter, "flood", "worst", 1)
			worst++
		}
		if i%100_000 == 99_999 {
			heaps = append(heaps, heap())
			now = now.Add(10 * time.Second)
			flush(t, recorder)
			var rows, keys int
			if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM rate_limit_usage), (SELECT count(*) FROM rate_limit_denials)`).Scan(&rows, &keys); err != nil || rows > 2 || keys != 100 {
				t.Errorf("after %d keys: %d rows of usage and %d of denials, %v, want 2 at most and 100", i+1, rows, keys, err)
			}
		}
	}
	t.Logf("bytes in use before each flush: %d", heaps)
	if grown := slices.Max(heaps) - heaps[0]; grown > 4<<20 { // 900,000 keys more would be ten times as much
		t.Errorf("the heap grew by %d bytes", grown)
	}
	if got := usageOf(t, pool)["flood"]; got.Denied != all+worst {
		t.Errorf("recorded %+v, want %d denied", got, all+worst)
	}
	var key string
	var n int64
	if err := pool.QueryRow(t.Context(), `SELECT key, denied FROM ratelimit_denials('flood', since => $1) LIMIT 1`, noon).Scan(&key, &n); err != nil || key != "worst" || n > worst || n < worst*9/10 {
		t.Errorf("the worst key is %q with %d denials, %v, want at most %d", key, n, err, worst)
	}
}

// counting notes the errors of a pool's statements, which a recorder hides if it tries again.
type counting struct {
	*pgxpool.Pool
	mu     sync.Mutex
	states map[string]int
}

type countedRow struct {
	pgx.Row
	of *counting
}

func (c *counting) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return countedRow{c.Pool.QueryRow(ctx, sql, args...), c}
}

func (r countedRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	if err != nil {
		r.of.mu.Lock()
		defer r.of.mu.Unlock()
		r.of.states[sqlState(err)]++
	}
	return err
}

// Processes that write the same rows, keys that come and go among them, neither deadlock nor lose a count, at any isolation level.
func TestProcessesFlushAtOnce(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 4)
			const processes, flushes, limits = 4, 12, 5
			r := newRand(t)
			seeds := r.Perm(processes)
			var running sync.WaitGroup
			dbs := make([]*counting, processes)
			for p := range processes {
				dbs[p] = &counting{states: map[string]int{}, Pool: reconfigured(t, pool, func(c *pgxpool.Config) {
					c.MaxConns = 1
					startWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": string(level)})
				})}
				running.Go(func() {
					recorder := &usage.Recorder{DB: dbs[p], Keep: 1e6 * time.Hour}
					now := noon
					limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return now }}
					for f := range flushes {
						// Two hours, and minutes of its own: or else the first row of usage would let one process in at a time.
						now = noon.Add(time.Duration(f*7%3)*45*time.Minute + time.Duration(p)*time.Minute)
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
							if tries > 20 || !errors.Is(err, ratelimit.ErrAttemptsExhausted) && sqlState(err) != "55P03" {
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
			for _, at := range []time.Time{noon, noon.Add(time.Hour)} {
				limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return at }}
				for i := range limits {
					deny(t, limiter, fmt.Sprint("limit ", i), "all", 1)
				}
			}
			flush(t, recorder)
			var most int
			if err := pool.QueryRow(t.Context(), `SELECT max(n) FROM (SELECT count(*) AS n FROM rate_limit_denials GROUP BY name, hour) AS c`).Scan(&most); err != nil || most != 100 {
				t.Errorf("%d keys of a limit and hour, %v, want 100", most, err)
			}
		})
	}
}

// Of the keys of an hour, the most denied ones stay; of those denied as often, the latest.
func TestTheMostDeniedKeysStay(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
	now := noon
	limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return now }}
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
	pool := newPool(t, 1)
	for _, later := range []time.Duration{20 * time.Second, 30 * time.Second, 10 * time.Second} {
		recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
		limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return noon.Add(later) }}
		deny(t, limiter, "limit", "ann", 1)
		flush(t, recorder)
	}
	var last time.Time
	if err := pool.QueryRow(t.Context(), `SELECT last_denied FROM ratelimit_denials('limit', $1)`, noon).Scan(&last); err != nil || !last.Equal(noon.Add(30*time.Second)) {
		t.Errorf("%v, %v", last, err)
	}
}

func TestOldUsageGoesLittleByLittle(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	mustExec(t, pool, `
		INSERT INTO rate_limit_usage SELECT 'old', date_trunc('minute', now(), 'UTC') - interval '49 hours' - n * interval '1 minute', 1, 0, 0, 1, 0, 0 FROM generate_series(1, 2500) AS n;
		INSERT INTO rate_limit_usage SELECT 'new', date_trunc('minute', now(), 'UTC') - interval '47 hours' - n * interval '1 minute', 1, 0, 0, 1, 0, 0 FROM generate_series(1, 30) AS n;
		INSERT INTO rate_limit_denials SELECT 'old', date_trunc('hour', now(), 'UTC') - interval '50 hours', 'key ' || n, 1, 1, now() FROM generate_series(1, 2500) AS n;
		INSERT INTO rate_limit_denials SELECT 'new', date_trunc('hour', now(), 'UTC') - interval '46 hours', 'key ' || n, 1, 1, now() FROM generate_series(1, 30) AS n`)
	recorder := &usage.Recorder{DB: pool, Keep: 48 * time.Hour}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
	left := func(want string) {
		t.Helper()
		var got string
		if err := pool.QueryRow(t.Context(), `SELECT concat_ws(' ', (SELECT count(*) FROM rate_limit_usage WHERE name = 'old'), (SELECT count(*) FROM rate_limit_usage WHERE name = 'new'),
			(SELECT count(*) FROM rate_limit_denials WHERE name = 'old'), (SELECT count(*) FROM rate_limit_denials WHERE name = 'new'))`).Scan(&got); err != nil || got != want {
			t.Errorf("%s rows are left, %v, want %s", got, err, want)
		}
	}
	flush(t, recorder) // with nothing to write
	left("1500 30 1500 30")
	flush(t, recorder) // not again within the hour
	left("1500 30 1500 30")
	// Two more for each row that is added; nobody waits for a row that somebody has locked.
	holder, err := connect(t, pool.Config().ConnString(), 1).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), `SELECT FROM rate_limit_usage WHERE name = 'old' ORDER BY minute LIMIT 7 FOR UPDATE`); err != nil {
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
	url := newMigrated(t)
	var way network
	pool := reconfigured(t, connect(t, url, 2), func(c *pgxpool.Config) { c.ConnConfig.DialFunc = way.dial })
	var told atomic.Int64
	recorder := &usage.Recorder{DB: pool, Every: 5 * time.Millisecond, HashKey: func(key string) string { return "hash of " + key }}
	recorder.OnError = func(err error) {
		if strings.Contains(err.Error(), "missing") {
			t.Error(err)
		}
		told.Add(1)
	}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
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
	eventually(t, "somebody is told", func() bool { return told.Load() > 2 })
	way.set(false)
	elsewhere := connect(t, url, 1)
	eventually(t, "Run has written", func() bool { return usageOf(t, elsewhere)["limit"].Denied == 74 })
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
	pool := newPool(t, 3)
	recorder := &usage.Recorder{DB: pool}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return noon }}
	recorder.Keep = 1e6 * time.Hour
	deny(t, limiter, "limit", "ann", 1)
	flush(t, recorder)
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), "UPDATE rate_limit_usage SET granted = 5"); err != nil {
		t.Fatal(err)
	}
	deny(t, limiter, "limit", "ann", 1)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := recorder.Flush(ctx); sqlState(err) != "55P03" {
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
	pool := newPool(t, 1)
	db := &deaf{Pool: pool}
	var told []string
	recorder := &usage.Recorder{DB: db, OnError: func(err error) { told = append(told, err.Error()) }}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
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
	if err := recorder.Run(ended); err != nil || len(told) != 1 || !strings.Contains(told[0], "usage: 6 requests are missing in rate_limit_usage") {
		t.Errorf("%v, told %q", err, told)
	}
}

// A key that the database refuses does not stop the rest.
func TestAKeyThatCannotBeStoredStopsNoFlush(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	bad := true
	recorder := &usage.Recorder{DB: pool, HashKey: func(key string) string {
		if bad {
			return "\xff"
		}
		return key
	}}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
	deny(t, limiter, "limit", "ann", 3)
	if err := recorder.Flush(t.Context()); sqlState(err) != "22021" || !strings.Contains(err.Error(), "the denied keys were left out") {
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
	pool := newPool(t, 1)
	key := "ann"
	recorder := &usage.Recorder{DB: pool, HashKey: func(string) string { return key }}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
	flushes := func(state, part string) {
		t.Helper()
		deny(t, limiter, "limit", "ann", 1)
		if err := recorder.Flush(t.Context()); sqlState(err) != state || !strings.Contains(err.Error(), part) {
			t.Errorf("%v, want %s", err, state)
		}
	}
	var long strings.Builder // that cannot be compressed
	for long.Len() < 20_000 {
		long.WriteString(rand.Text())
	}
	key = long.String()
	flushes("54000", "the denied keys were left out")

	mustExec(t, pool, "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE disk_full; END $$")
	mustExec(t, pool, "CREATE TRIGGER no_room BEFORE INSERT ON rate_limit_usage EXECUTE FUNCTION no_room()")
	key = "\xff" // refused at once, and the rest then finds the disk full
	flushes("22021", "disk_full")
	key = "ann"
	flushes("53100", "disk_full")
	mustExec(t, pool, "DROP TRIGGER no_room ON rate_limit_usage")
	flush(t, recorder)
	if u := usageOf(t, pool)["limit"]; u.Denied != 3 || denialsOf(t, pool)["limit ann"] != 2 {
		t.Errorf("recorded %+v, %v", u, denialsOf(t, pool))
	}
}

func TestUsageNeedsTheDocumentedGrants(t *testing.T) {
	t.Parallel()
	owner := newPool(t, 1)
	role := createRole(t, owner)
	mustExec(t, owner, "GRANT USAGE ON SCHEMA "+schemaOf(t, owner)+" TO "+role)
	recorder := &usage.Recorder{DB: asRole(t, owner, role, 1)}
	limiter := &ratelimit.Limiter{Observer: recorder.Decision}
	deny(t, limiter, "sendMessage", "ann", 3)
	if err := recorder.Flush(t.Context()); sqlState(err) != "42501" {
		t.Errorf("%v, want 42501", err)
	}
	mustExec(t, owner, named(docSQL(t, "docs/operations.md", "ON app.rate_limit_usage"), schemaOf(t, owner), role))
	flush(t, recorder)
	if u := usageOf(t, owner)["sendMessage"]; u.Denied != 3 {
		t.Errorf("recorded %+v", u)
	}
	// What the page asks.
	reader := asRole(t, owner, role, 1)
	var name string
	var denials, granted int64
	var last time.Time
	if err := reader.QueryRow(t.Context(), docSQL(t, "docs/operations.md", "FROM ratelimit_usage(since")).Scan(&name, &denials, &granted, &last); err != nil || name != "sendMessage" || denials != 3 || granted != 0 {
		t.Errorf("%s, %d, %d, %v", name, denials, granted, err)
	}
	var key string
	var asked float64
	if err := reader.QueryRow(t.Context(), docSQL(t, "docs/operations.md", "ratelimit_denials('sendMessage'")).Scan(&key, &denials, &asked, &last); err != nil ||
		key != "ann" || denials != 3 || asked != 3 || time.Since(last).Abs() > time.Hour {
		t.Errorf("%s, %d, %v, %v, %v", key, denials, asked, last, err)
	}
}

// The functions read by limit and time, along an index, and add up hours.
func TestUsageIsReadByIndex(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	mustExec(t, pool, `
		INSERT INTO rate_limit_usage SELECT 'limit ' || l, timestamptz '2026-07-01 12:00Z' + m * interval '1 minute', 1, m, 0, 1, 0, 0
		  FROM generate_series(1, 50) AS l, generate_series(0, 599) AS m;
		INSERT INTO rate_limit_denials SELECT 'limit ' || l, timestamptz '2026-07-01 12:00Z' + h * interval '1 hour', 'key ' || k, k, 2 * k, timestamptz '2026-07-01 12:30Z' + h * interval '1 hour'
		  FROM generate_series(1, 50) AS l, generate_series(0, 9) AS h, generate_series(1, 50) AS k;
		ANALYZE rate_limit_usage; ANALYZE rate_limit_denials`)
	at := time.Date(2026, time.July, 1, 20, 0, 30, 0, time.UTC)
	type rows struct {
		n, granted int64
		first      time.Time
	}
	for name, want := range map[string]rows{"limit 7": {120, 120, at.Truncate(time.Minute)}, "": {6000, 6000, at.Truncate(time.Minute)}, "none": {}} {
		var got rows
		var first *time.Time
		if err := pool.QueryRow(t.Context(), `SELECT count(*), coalesce(sum(granted), 0)::bigint, min(minute) FROM ratelimit_usage(nullif($1, ''), $2)`, name, at).Scan(&got.n, &got.granted, &first); err != nil {
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
	found, err := pool.Query(t.Context(), `SELECT concat_ws('|', key, denied, asked, last_denied = '2026-07-01 21:30Z') FROM ratelimit_denials('limit 7', $1) LIMIT 2`, at)
	if err == nil {
		keys, err = pgx.CollectRows(found, pgx.RowTo[string])
	}
	if want := []string{"key 50|100|200|t", "key 49|98|196|t"}; err != nil || !slices.Equal(keys, want) {
		t.Errorf("%q, %v, want %q", keys, err, want)
	}
	for sql, index := range map[string]string{
		`SELECT * FROM ratelimit_usage('limit 7', '2026-07-01 20:00Z')`:                                                                      "rate_limit_usage_pkey",
		`SELECT name, sum(denied) FROM ratelimit_usage(since => '2026-07-01 21:50Z') GROUP BY name`:                                          "rate_limit_usage_minute_name_key",
		`SELECT * FROM rate_limit_usage WHERE name = 'limit 7' AND minute > timestamptz '2026-07-01 20:00Z'`:                                 "rate_limit_usage_pkey",
		`SELECT * FROM rate_limit_usage WHERE minute > timestamptz '2026-07-01 21:50Z' ORDER BY minute, name`:                                "rate_limit_usage_minute_name_key",
		`SELECT * FROM rate_limit_denials WHERE name = 'limit 7' AND hour > timestamptz '2026-07-01 20:00Z'`:                                 "(name = 'limit 7'::text)", // by either index, from PostgreSQL 18 on
		`SELECT name, key, denied FROM rate_limit_denials WHERE hour > timestamptz '2026-07-01 20:00Z'`:                                      "rate_limit_denials_hour_name_key_key",
		`SELECT ctid FROM rate_limit_usage WHERE minute < timestamptz '2026-07-01 13:00Z' ORDER BY minute LIMIT 1000 FOR UPDATE SKIP LOCKED`: "rate_limit_usage_minute_name_key",
		`SELECT ctid FROM rate_limit_denials WHERE hour < timestamptz '2026-07-01 13:00Z' ORDER BY hour LIMIT 1000 FOR UPDATE SKIP LOCKED`:   "rate_limit_denials_hour_name_key_key",
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
			pool := newPool(b, 1)
			recorder := &usage.Recorder{DB: pool, Keep: 1e6 * time.Hour}
			now := noon
			limiter := &ratelimit.Limiter{Observer: recorder.Decision, Clock: func() time.Time { return now }}
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

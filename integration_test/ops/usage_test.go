package ops_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
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

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// used is a row of ratelimit.usage, or a sum of rows.
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

// usageOf is the sums of ratelimit.usage by limit.
func usageOf(t testing.TB, pool *pgxpool.Pool) map[string]used {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT name, sum(granted)::bigint, sum(denied)::bigint, sum(failed)::bigint, sum(tokens), sum(refunded), sum(waited)
		FROM ratelimit.usage GROUP BY name`)
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

// denialsOf is the sums of ratelimit.denials by limit and key.
func denialsOf(t testing.TB, pool *pgxpool.Pool) map[string]int64 {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT name || ' ' || key, sum(denied)::bigint FROM ratelimit.denials GROUP BY 1`)
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

// deny has a limiter deny so often, without the database: by a limit with a rate of 0.
func deny(t testing.TB, limiter *ratelimit.Limiter, name, key string, times int) {
	t.Helper()
	request := ratelimit.TokenBucket(name, 0, time.Minute).Key(key)
	for range times {
		if _, err := limiter.Consume(t.Context(), unreached{}, request); !harness.Denied(err) {
			t.Fatal(err)
		}
	}
}

// unreached is the database of calls that are decided without one.
type unreached struct{}

func (unreached) QueryRow(context.Context, string, ...any) pgx.Row { panic("asked") }

func TestUsageSaysWhatCallersCounted(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	recorder := &usage.Recorder{DB: pool, Every: 20 * time.Millisecond, OnError: harness.NoError(t)}
	limiter := &ratelimit.Limiter{Observer: recorder.Observe}
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
				case harness.Denied(err):
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
					both := []ratelimit.Request{queue.Key(fmt.Sprint(g)), perSite.Key("queues")} // the second has its tokens at once
					reserved, err := limiter.Reserve(t.Context(), pool, both...)
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
					count("perSite", used{Granted: 1, Tokens: 1.5})
					count("queue", used{Granted: 1, Tokens: 1, Waited: reserved.Delay.Seconds(), Refunded: refunded.Requests[0].Refunded})
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
		if g.Granted != u.Granted || g.Denied != u.Denied || g.Failed != u.Failed || !harness.Near(g.Tokens, u.Tokens) || !harness.Near(g.Refunded, u.Refunded) || !harness.Near(g.Waited, u.Waited) {
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
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.usage WHERE minute <> date_trunc('minute', minute, 'UTC') OR minute < now() - interval '1 hour' OR minute > now()`).Scan(&off); err != nil || off != 0 {
		t.Errorf("%d rows at other times, %v", off, err)
	}
}

// Five of six callers leave while they wait. They were granted nothing, and what they took shows beside what came back.
func TestUsageOfWaitsThatWereGivenUp(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	recorder := &usage.Recorder{DB: pool}
	limit := ratelimit.TokenBucket("third party", 1, time.Hour, ratelimit.Capacity(1))
	now := time.Now().Truncate(time.Microsecond)
	asked := 0
	var leave context.CancelFunc
	limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time {
		if asked++; asked == 2 { // by the call, and by its sleep
			leave()
		}
		return now
	}}
	for i := range 6 {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Hour)
		asked, leave = 0, func() {
			if i == 3 { // a caller behind this one, whose wait is not counted here: what it took cannot come back
				if _, err := (&ratelimit.Limiter{Clock: func() time.Time { return now }}).Reserve(t.Context(), pool, limit.Global()); err != nil {
					t.Error(err)
				}
			}
			cancel()
		}
		_, err := limiter.Wait(ctx, pool, limit.Global())
		if cancel(); (i == 0) != (err == nil) || i > 0 && !errors.Is(err, context.Canceled) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	flush(t, recorder)
	if got, want := usageOf(t, pool)["third party"], (used{Granted: 1, Tokens: 6, Refunded: 4}); got != want {
		t.Errorf("recorded %+v, want %+v", got, want)
	}
}

// Whatever the pool, the rows are the same, to the microsecond.
func TestUsageIsWrittenByEveryDriver(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T, url string) ratelimit.DB{
		"pgx": func(t *testing.T, url string) ratelimit.DB { return harness.Connect(t, url, 1) },
		"pgx, exec": func(t *testing.T, url string) ratelimit.DB {
			return harness.Reconfigured(t, harness.Connect(t, url, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
		},
		"pgx, simple protocol": func(t *testing.T, url string) ratelimit.DB {
			return harness.Reconfigured(t, harness.Connect(t, url, 1), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol })
		},
		"another time zone": func(t *testing.T, url string) ratelimit.DB {
			return harness.Reconfigured(t, harness.Connect(t, url, 1), func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
				harness.StartWith(t, c.ConnConfig, map[string]string{"TimeZone": "Asia/Kathmandu", "DateStyle": "SQL, DMY", "IntervalStyle": "sql_standard"})
			})
		},
		"serializable": func(t *testing.T, url string) ratelimit.DB {
			return harness.Reconfigured(t, harness.Connect(t, url, 1), func(c *pgxpool.Config) {
				harness.StartWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
			})
		},
		"coalescer": func(t *testing.T, url string) ratelimit.DB {
			return &ratelimit.Coalescer{Pool: harness.Connect(t, url, 1)}
		},
		"database/sql": func(t *testing.T, url string) ratelimit.DB { return ratelimit.SQL(harness.OpenSQL(t, "pgx", url, 1)) },
		"database/sql, lib/pq": func(t *testing.T, url string) ratelimit.DB {
			return ratelimit.SQL(harness.OpenSQL(t, "postgres", url, 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := harness.NewMigrated(t)
			recorder := &usage.Recorder{DB: open(t, url), Keep: 1e6 * time.Hour}
			now := harness.Noon.Add(17*time.Minute + 3*time.Second + 123456*time.Microsecond)
			limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return now }}
			hostile := `a "b" \c, {d} 'é' NULL` + "\n"
			for range 2 {
				deny(t, limiter, hostile, hostile, 2)
				if _, err := limiter.Consume(t.Context(), unreached{}, ratelimit.Unlimited("free").Key("NULL").Count(0.1)); err != nil {
					t.Fatal(err)
				}
				flush(t, recorder)
			}
			pool := harness.Connect(t, url, 1)
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
			tell(`SELECT concat_ws('|', name, minute = '2026-07-01 12:17Z', granted, denied, failed, tokens, refunded, waited) FROM ratelimit.usage ORDER BY name`,
				[]string{hostile + "|t|0|4|0|0|0|0", "free|t|2|0|0|0.2|0|0"})
			tell(`SELECT concat_ws('|', name, hour = '2026-07-01 12:00Z', key, denied, asked, last_denied = '2026-07-01 12:17:03.123456Z') FROM ratelimit.denials`,
				[]string{hostile + "|t|" + hostile + "|4|4|t"})
		})
	}
}

// usageWorker, in the environment, makes of the tests a process that consumes: see workOnUsage.
const usageWorker = "TXLIMIT_TEST_USAGE_WORKER"

// workOnUsage consumes until it is killed, or its input ends. It prints each decision before it is recorded ("+", or "-" and the
// key), "flush" before a flush and "flushed" after it. All that was printed before "flush" is in it.
func workOnUsage(url string) error {
	ctx := context.Background()
	pool, err := harness.OpenPool(ctx, url, 4, 0)
	if err != nil {
		return err
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
		case harness.Denied(d.Err):
			fmt.Println("- " + d.Result.Requests[0].Key)
		default:
			fmt.Fprintln(os.Stderr, d.Err)
		}
		recorder.Observe(ctx, d)
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
	return nil
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
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 2)
	r := harness.NewRand(t)
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
	harness.Eventually(t, "no worker's session is left", func() bool {
		var n int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query LIKE '%ratelimit._record_usage%' AND pid <> pg_backend_pid()
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

// Many keys are denied, a million with -whole, with flushes in between: memory and rows do not grow, and the frequent key is found. It does not run
// beside other tests, which would use memory too.
func TestAFloodOfDeniedKeys(t *testing.T) {
	pool := harness.NewPool(t, 1)
	recorder := &usage.Recorder{DB: pool}
	now := harness.Noon
	limiter := &ratelimit.Limiter{Observer: recorder.Observe, Clock: func() time.Time { return now }}
	recorder.Keep = 1e6 * time.Hour
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what pools have put aside goes at the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	const frequent = 50 // every 50th denial is of one key
	all := harness.Sized(1_000_000, 200_000)
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
		if (i+1)%(all/10) == 0 {
			heaps = append(heaps, heap())
			now = now.Add(10 * time.Second)
			flush(t, recorder)
			var rows, keys int
			if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM ratelimit.usage), (SELECT count(*) FROM ratelimit.denials)`).Scan(&rows, &keys); err != nil || rows > 2 || keys != 100 {
				t.Errorf("after %d keys: %d rows of usage and %d of denials, %v, want 2 at most and 100", i+1, rows, keys, err)
			}
		}
	}
	t.Logf("bytes in use before each flush: %d", heaps)
	if grown := slices.Max(heaps) - heaps[0]; grown > 4<<20 { // a million keys more would be ten times as much
		t.Errorf("the heap grew by %d bytes", grown)
	}
	if got := usageOf(t, pool)["flood"]; got.Denied != int64(all)+worst {
		t.Errorf("recorded %+v, want %d denied", got, int64(all)+worst)
	}
	var key string
	var n int64
	if err := pool.QueryRow(t.Context(), `SELECT key, denied FROM ratelimit.denials('flood', since => $1) LIMIT 1`, harness.Noon).Scan(&key, &n); err != nil || key != "worst" || n > worst || n < worst*9/10 {
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
		r.of.states[harness.SQLState(err)]++
	}
	return err
}

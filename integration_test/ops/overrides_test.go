package ops_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

var manyOverrides = flag.Int("overrides", 50_000, "how many overrides TestManyOverrides loads")

// following loads the overrides and follows them until the end of the test.
func following(t testing.TB, limits *ratelimit.Limiter, s follow.Settings) *ratelimit.Limiter {
	t.Helper()
	harness.Succeeds(t, follow.Load(t.Context(), follow.By(limits, s)))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { follow.Run(ctx, limits) })
	t.Cleanup(func() { stop(); running.Wait() })
	return limits
}

// soon is the tests' interval between polls.
const soon = 20 * time.Millisecond

func TestAnOverrideIsFollowed(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	api := ratelimit.TokenBucket("api", 10, time.Hour)
	limits := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool, Every: soon})
	becomes := func(key, want string) {
		t.Helper()
		harness.Eventually(t, want, func() bool { return harness.LimitInForce(t, limits, pool, api.Key(key)) == want })
	}
	const defined = "api: token bucket, 10 per 1h, capacity 10"
	becomes("ann", defined)
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => 20, max_reserved => 3, until => now() + interval '1 hour')")
	becomes("ann", "api: token bucket, 20 per 1h, capacity 20, at most 3 reserved")
	becomes("bob", defined)
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', every_key => true, capacity => 5, forever => true)")
	becomes("bob", "api: token bucket, 10 per 1h, capacity 5")
	becomes("ann", "api: token bucket, 20 per 1h, capacity 20, at most 3 reserved")
	harness.Scan[int64](t, pool, "SELECT ratelimit.unlimited('api', 'bob', forever => true)")
	becomes("bob", "api: unlimited")
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'ann', forever => true)")
	becomes("ann", "api: blocked")
	harness.Scan[int](t, pool, "SELECT ratelimit.unblock('api', 'ann')")
	becomes("ann", "api: token bucket, 20 per 1h, capacity 20, at most 3 reserved")
	for _, key := range []string{"'ann'", "'bob'", "every_key => true"} {
		if n := harness.Scan[int](t, pool, "SELECT ratelimit.restore('api', "+key+")"); n != 1 {
			t.Errorf("%s: %d restored", key, n)
		}
	}
	becomes("ann", defined)
	becomes("bob", defined)

	// The override ends by itself, at its end by the database's clock.
	until := harness.Scan[time.Time](t, pool, "SELECT now() + interval '3 seconds'")
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'carl', until => $1)", until)
	becomes("carl", "api: blocked until "+until.UTC().Add(time.Second-1).Format(time.RFC3339)) // rounded up
	becomes("carl", defined)
	if now := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()"); now.Before(until.Add(-50 * time.Millisecond)) {
		t.Errorf("it ended %v early", until.Sub(now))
	}
	// A row that is deleted by hand disappears when all rows are read again.
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'carl', forever => true)")
	becomes("carl", "api: blocked")
	harness.MustExec(t, pool, "DELETE FROM ratelimit.overrides")
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	becomes("carl", defined)
}

// TestABlockHolds: nothing is granted before the block ends, on every handle, whatever else is done with the blocked key.
func TestABlockHolds(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		api := ratelimit.TokenBucket("api", 10, time.Minute)
		follow.By(w.Limiter, follow.Settings{DB: pool})
		w.Do(follow.Load(w.Context(), w.Limiter))
		granted, reserved := w.Grant(api.Key("ann").Count(4)), w.Reserve(api.Key("ann").Count(20))
		until := harness.Scan[time.Time](w, pool, "SELECT date_trunc('second', now()) + interval '1 hour'").UTC()
		harness.Scan[int64](w, pool, "SELECT ratelimit.block('api', 'ann', until => $1)", until)
		w.Do(follow.Load(w.Context(), w.Limiter))
		for range 2 {
			ann := api.Key("ann")
			for _, result := range []ratelimit.Result{w.Deny(ann), w.DenyReserve(ann), w.Deny(ann.Count(100)), w.DenyTake(3, ann)} {
				if !result.RetryAt.Equal(until) || result.RetryAfter != until.Sub(w.Clock.At) || result.Remaining != 0 || !result.Requests[0].RetryAt.Equal(until) {
					w.Fatalf("%+v, want RetryAt %v", result, until)
				}
			}
			if result := w.Deny(api.Key("bob"), api.Key("ann")); !result.RetryAt.Equal(until) || !result.Requests[0].OK || result.Requests[1].OK {
				w.Fatalf("beside another key: %+v", result)
			}
			if _, err := w.Limiter.Check(w.Context(), w.DB, api.Key("ann")); !harness.Denied(err) || !strings.Contains(err.Error(), "api (1 asked, blocked until ") {
				w.Fatalf("check: %v", err)
			}
			// Each of these makes the balance larger.
			_, err := w.Limiter.Refund(w.Context(), w.DB, granted.Receipt(), api.Key("ann").Count(2))
			w.Do(err)
			_, err = w.Limiter.Refund(w.Context(), w.DB, reserved.Receipt(), api.Key("ann").Count(10))
			w.Do(err)
			w.Do(w.Limiter.Reset(w.Context(), w.DB, api.Key("ann")))
			w.Clock.Advance(10 * time.Minute)
		}
		// A charge still counts.
		if charged, err := w.Limiter.Charge(w.Context(), w.DB, api.Key("ann").Count(15)); err != nil || charged.Remaining != -5 {
			w.Fatalf("charged %+v, %v", charged, err)
		}
		w.Grant(api.Key("bob"))
		w.Clock.At = until // long enough for all debts
		w.Grant(api.Key("ann"))
	})
}

// TestALimitOfAResultIsTheProgramsOwn: its requests do not keep the numbers of an override that has ended.
func TestALimitOfAResultIsTheProgramsOwn(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		follow.By(w.Limiter, follow.Settings{DB: pool})
		w.Clock.At = harness.Scan[time.Time](w, pool, "SELECT now() + interval '1 hour'").UTC() // so that an override has ended once it is removed
		api := ratelimit.TokenBucket("api", 10, time.Minute, ratelimit.Varies(time.Hour))
		for key, own := range map[string]ratelimit.Limit{"ann": api, "bob": api.With(ratelimit.Rate(20))} {
			for _, override := range []string{
				"ratelimit.block('api', $1, forever => true)", "ratelimit.unlimited('api', $1, forever => true)", "ratelimit.override('api', $1, rate => 1, capacity => 1, forever => true)",
			} {
				harness.Scan[int64](w, pool, "SELECT "+override, key)
				w.Do(follow.Load(w.Context(), w.Limiter))
				checked, _ := w.Limiter.Check(w.Context(), w.DB, own.Key(key))
				of := []ratelimit.Limit{checked.Requests[0].Limit, w.Balances(own.Key(key))[0].Limit}
				if override != "ratelimit.block('api', $1, forever => true)" && (of[0] == own || of[1] == own) {
					w.Errorf("%s, %s: %v, want the numbers in force", key, override, of)
				}
				harness.Scan[int](w, pool, "SELECT ratelimit.restore('api', $1)", key)
				w.Do(follow.Load(w.Context(), w.Limiter))
				for _, limit := range of {
					for _, request := range []ratelimit.Request{limit.Key(key), limit.With().Key(key)} {
						if b := w.Balances(request)[0]; b.Limit != own || b.Decides != "definition" {
							w.Errorf("%s, %s: %+v after its end, want %v", key, override, b, own)
						}
					}
				}
			}
		}
	})
}

// TestAnOverrideThatCommitsLateIsNotMissed: a transaction takes its id before others that commit and are polled first.
func TestAnOverrideThatCommitsLateIsNotMissed(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	limits := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool, Every: soon})
	is := func(key string, blocked bool) func() bool {
		return func() bool {
			return (harness.LimitInForce(t, limits, pool, api.Key(key)) == "api: blocked") == blocked
		}
	}
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'removed late', forever => true)")
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(t.Context())
	harness.Scan[int64](t, tx, "SELECT ratelimit.block('api', 'late', forever => true)")
	harness.Scan[int](t, tx, "SELECT ratelimit.unblock('api', 'removed late')")
	savepoint, err := tx.Begin(t.Context())
	harness.Succeeds(t, err)
	harness.Scan[int64](t, savepoint, "SELECT ratelimit.block('api', 'late, in a savepoint', forever => true)")
	harness.Succeeds(t, savepoint.Commit(t.Context()))
	for begin, i := time.Now(), 0; time.Since(begin) < harness.Sized(10*time.Second, time.Second); i++ {
		key := fmt.Sprintf("at once %d", i)
		harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', $1, forever => true)", key)
		harness.Eventually(t, key, is(key, true))
	}
	if is("late", true)() || is("removed late", false)() {
		t.Fatal("in force before the commit")
	}
	harness.Succeeds(t, tx.Commit(t.Context()))
	harness.Eventually(t, "what was committed late", is("late", true))
	harness.Eventually(t, "what was committed late in a savepoint", is("late, in a savepoint", true))
	harness.Eventually(t, "what was removed late", is("removed late", false))
}

// TestTheTableOfOverridesInTrouble: invalid rows, a missing table, and a role that may not read the table.
func TestTheTableOfOverridesInTrouble(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	harness.MustExec(t, pool, "ALTER TABLE ratelimit.overrides DROP CONSTRAINT overrides_effect_check")
	var told atomic.Int64
	var last atomic.Pointer[error]
	limits := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool, Every: soon, OnError: func(err error) { told.Add(1); last.Store(&err) }})
	for _, values := range []string{"'nonsense', 1, NULL, NULL", "'numbers', 0, NULL, NULL", "'numbers', 'NaN', NULL, NULL", "'numbers', '-Infinity', NULL, NULL",
		"'numbers', 1, -7, NULL", "'numbers', 1, 1e300, NULL", "'numbers', 1, 1, 'Infinity'"} {
		before := told.Load()
		harness.MustExec(t, pool, "INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, max_reserved) VALUES ('api', 'ann', "+values+")")
		harness.Eventually(t, "word of "+values, func() bool { return told.Load() > before })
		if err := *last.Load(); !strings.Contains(err.Error(), "is passed over") || !strings.Contains(err.Error(), `limit "api"`) {
			t.Errorf("%s: told %v", values, err)
		}
	}
	if got := harness.LimitInForce(t, limits, pool, api.Key("ann")); got != api.String() {
		t.Errorf("rows that are wrong made %s", got)
	}
	harness.MustExec(t, pool, "INSERT INTO ratelimit.overrides (name, key, effect, until) VALUES ('api', 'no end', 'block', 'infinity'), ('api', 'never', 'block', '-infinity')")
	harness.Eventually(t, "a block until infinity", func() bool { return harness.LimitInForce(t, limits, pool, api.Key("no end")) == "api: blocked" })
	if got := harness.LimitInForce(t, limits, pool, api.Key("never")); got != api.String() {
		t.Errorf("a block until -infinity made %s", got)
	}

	harness.MustExec(t, pool, "ALTER TABLE ratelimit.overrides RENAME TO away")
	before := told.Load()
	harness.Eventually(t, "word of the table", func() bool { return told.Load() > before+2 })
	if err := *last.Load(); harness.SQLState(err) != "42P01" {
		t.Errorf("told %v", err)
	}
	if got := harness.LimitInForce(t, limits, pool, api.Key("no end")); got != "api: blocked" {
		t.Errorf("without the table, a blocked key has %s", got)
	}
	if _, err := limits.Consume(t.Context(), pool, api.Key("ann")); err != nil {
		t.Errorf("without the table, another key: %v", err)
	}
	fresh := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	if err := follow.Load(t.Context(), fresh); harness.SQLState(err) != "42P01" {
		t.Errorf("a first load without the table: %v", err)
	}
	harness.MustExec(t, pool, "ALTER TABLE ratelimit.away RENAME TO overrides")
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'afterwards', forever => true)")
	harness.Eventually(t, "a block after the trouble", func() bool { return harness.LimitInForce(t, limits, pool, api.Key("afterwards")) == "api: blocked" })
}

// TestManyOverrides loads as many overrides as -overrides says, and measures their memory.
func TestManyOverrides(t *testing.T) { // not parallel: it measures the heap
	pool := harness.NewPool(t, 4)
	n := *manyOverrides
	harness.MustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.overrides (name, key, effect, rate) SELECT 'api', 'user-' || i, 'numbers', 1 + i %% 100 FROM generate_series(1, %d) AS i", n))
	heap := func() float64 {
		runtime.GC()
		runtime.GC() // empties each sync.Pool
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	before, begin := heap(), time.Now()
	limits := follow.By(new(ratelimit.Limiter), follow.Settings{DB: pool, Every: soon})
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	took := time.Since(begin)
	perOverride := (heap() - before) / float64(n)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { follow.Run(ctx, limits) })
	defer running.Wait()
	defer stop()
	api := ratelimit.TokenBucket("api", 1e6, time.Hour)
	for _, i := range []int{1, n / 2, n} {
		want := fmt.Sprintf("api: token bucket, %d per 1h, capacity %d", 1+i%100, 1+i%100)
		if got := harness.LimitInForce(t, limits, pool, api.Key(fmt.Sprintf("user-%d", i))); got != want {
			t.Errorf("user-%d has %s, want %s", i, got, want)
		}
	}
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'user-1', forever => true)")
	harness.Eventually(t, "one more", func() bool { return harness.LimitInForce(t, limits, pool, api.Key("user-1")) == "api: blocked" })
	t.Logf("%d overrides: loaded in %v, %.0f bytes each", n, took.Round(time.Millisecond), perOverride)
	if perOverride > 1000 {
		t.Errorf("%.0f bytes for each override", perOverride)
	}
	runtime.KeepAlive(limits)
}

// A worker is another process: this test binary, started with the environment variable. It follows the overrides in the
// schema at that URL. It prints each grant, and each change of the limit that its calls use.
const (
	workerURL    = "TXLIMIT_TEST_OVERRIDES_WORKER"
	workerListen = "TXLIMIT_TEST_OVERRIDES_LISTEN"
)

var steered = ratelimit.TokenBucket("steered", 20, time.Second)

// overridesWorker is the main function of a worker.
func overridesWorker(url string) error {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	limits, capacity := follow.By(new(ratelimit.Limiter), follow.Settings{DB: pool, Listen: os.Getenv(workerListen) != ""}), -1.0
	if err := follow.Load(ctx, limits); err != nil {
		return err
	}
	go follow.Run(ctx, limits)
	for {
		var result ratelimit.Result
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
			result, err = limits.Consume(ctx, tx, steered.Key("k"))
			return err
		}, ratelimit.Isolation(pgx.ReadCommitted))
		if err != nil && !harness.Denied(err) {
			return err
		}
		var end time.Time
		if err := pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&end); err != nil {
			return err
		}
		if result.OK {
			fmt.Println("granted", algebra.At(result.At), algebra.At(end))
		}
		if c := result.Requests[0].Limit.Capacity(); c != capacity {
			capacity = c
			fmt.Println("capacity", capacity, algebra.At(end))
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// Every role can notify whom it likes, and no role but an operator's changes overrides. So notifications that tell of no change cause few polls,
// and those that do are heard at once, before and after.
func TestNotificationsThatTellOfNothing(t *testing.T) {
	harness.NeedsSession(t, "LISTEN")
	t.Parallel()
	other := harness.NewPool(t, 1)
	pool, sent := harness.Traced(t, other, 4, nil)
	const every = 300 * time.Millisecond // 17 times in 5 s
	limiter := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool, Every: every, Listen: true})
	limit := harness.Slow("limit", 10)
	harness.Eventually(t, "LISTEN", func() bool { return sent.Count("LISTEN") > 0 })
	blocked := func(key string) time.Duration {
		t.Helper()
		harness.MustExec(t, other, "SELECT ratelimit.block('limit', '"+key+"', forever => true)")
		began := time.Now()
		harness.Eventually(t, "a block of "+key, func() bool {
			_, err := limiter.Consume(t.Context(), pool, limit.Key(key))
			denial, is := errors.AsType[*ratelimit.DeniedError](err)
			return is && denial.Reason == ratelimit.ReasonBlock
		})
		return time.Since(began)
	}
	polls := func() int { return sent.Count("ratelimit._overrides(") }
	blocked("before")
	before := polls()
	if before == 0 {
		t.Fatal("the polls are not counted")
	}
	began := time.Now()
	for time.Since(began) < 5*time.Second {
		harness.MustExec(t, other, "NOTIFY \"ratelimit.overrides\"")
		time.Sleep(time.Millisecond)
	}
	took := time.Since(began)
	if n, most := polls()-before, 10+2*int(took/every)+2; n > most {
		t.Errorf("%d polls in %v, want at most %d", n, took, most)
	}
	blocked("during")
	time.Sleep(12 * every)
	blocked("after") // by a poll, so that the next one is far
	for i := range 5 {
		if took := blocked(fmt.Sprint("after ", i)); took < every/2 {
			return
		}
	}
	t.Error("no change is heard at once any more")
}

// TestOverridesInFourProcesses overrides a limit and restores it, again and again, under the traffic of four processes. Two
// of them listen. All must follow the change. In any span of time, they grant no more than the larger capacity and the
// larger rate allow.
func TestOverridesInFourProcesses(t *testing.T) {
	harness.NeedsSession(t, "LISTEN")
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 4)
	var mu sync.Mutex
	var grants []harness.Taken
	seen := map[int]map[float64]algebra.Micros{} // by worker and capacity: when first, since the last change
	for i := range 4 {
		seen[i] = map[float64]algebra.Micros{}
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), workerURL+"="+url)
		if i >= 2 {
			cmd.Env = append(cmd.Env, workerListen+"=1")
		}
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		harness.Succeeds(t, err)
		harness.Succeeds(t, cmd.Start())
		var reading sync.WaitGroup
		reading.Go(func() {
			for lines := bufio.NewScanner(out); lines.Scan(); {
				var g harness.Taken
				var capacity float64
				var at algebra.Micros
				mu.Lock()
				if n, _ := fmt.Sscanf(lines.Text(), "granted %d %d", &g.From, &g.To); n == 2 {
					g.Tokens = 1
					grants = append(grants, g)
				} else if n, _ := fmt.Sscanf(lines.Text(), "capacity %g %d", &capacity, &at); n == 2 {
					seen[i][capacity] = at
				}
				mu.Unlock()
			}
		})
		t.Cleanup(func() { _ = cmd.Process.Kill(); reading.Wait(); _ = cmd.Wait() })
	}
	// everywhere waits until all four processes use a capacity. It returns how long that took since an instant: for the
	// processes that poll, and for those that listen.
	everywhere := func(capacity float64, since algebra.Micros) (last [2]time.Duration) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("capacity %v in all processes", capacity), func() bool {
			mu.Lock()
			defer mu.Unlock()
			last = [2]time.Duration{}
			for i := range 4 {
				at, ok := seen[i][capacity]
				if !ok || at < since {
					return false
				}
				last[i/2] = max(last[i/2], time.Duration(at-since)*time.Microsecond)
			}
			return true
		})
		return last
	}
	everywhere(20, 0)
	rounds, slowest := harness.Sized(6, 3), [2]time.Duration{}
	for range rounds {
		if t.Failed() {
			return
		}
		now := func() algebra.Micros { return algebra.At(harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")) }
		since := now()
		harness.Scan[int64](t, pool, "SELECT ratelimit.override('steered', 'k', rate => 60, capacity => 40, forever => true)")
		up := everywhere(40, since)
		since = now()
		harness.Scan[int](t, pool, "SELECT ratelimit.restore('steered', 'k')")
		down := everywhere(20, since)
		for i := range slowest {
			slowest[i] = max(slowest[i], up[i], down[i])
		}
	}
	mu.Lock()
	defer mu.Unlock()
	bound := func(from, to algebra.Micros) float64 { return 40 + float64(to-from)/1e6*60 }
	above, from, to := harness.Worst(grants, bound)
	t.Logf("%d grants; %d changes were in force everywhere after at most %v by polling, %v by listening; the fullest span is %.1f tokens below the bound",
		len(grants), 2*rounds, slowest[0].Round(time.Millisecond), slowest[1].Round(time.Millisecond), -above)
	if above > 1e-6 {
		t.Errorf("%v tokens too many from %v to %v", above, from.Time(), to.Time())
	}
	if len(grants) < 20 {
		t.Errorf("%d grants: this tested too little", len(grants))
	}
}

// TestWhatIsAddedToARaisedLimit: the difference of the capacities is added once, shard by shard.
func TestWhatIsAddedToARaisedLimit(t *testing.T) {
	t.Parallel()
	for name, options := range map[string][]ratelimit.Option{"one row": nil, "shards": {ratelimit.Shards(4)}} {
		pool := harness.NewPool(t, 4)
		api := ratelimit.FixedWindow("api", 10, 24*time.Hour, options...)
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", api))
		limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
		load := func() {
			harness.Succeeds(t, follow.Load(t.Context(), limits))
		}
		left := func() float64 {
			t.Helper()
			return harness.ReadBalance(t, limits, pool, api.Key("ann"))
		}
		load()
		harness.Succeeds(t, harness.Second(limits.Charge(t.Context(), pool, api.Key("ann").Count(8))))
		id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => 25, forever => true)")
		load()
		if got := left(); !harness.Near(got, 2) {
			t.Errorf("%s: raised, %v are left, want 2", name, got)
		}
		for range 2 {
			if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1)", id); added != 15 {
				t.Errorf("%s: %v added, want 15", name, added)
			}
			if got := left(); !harness.Near(got, 17) {
				t.Errorf("%s: %v are left, want 17", name, got)
			}
		}
		harness.Scan[int](t, pool, "SELECT ratelimit.restore('api', 'ann')")
		load()
		if got := left(); !harness.Near(got, 10) {
			t.Errorf("%s: restored, %v are left, want the capacity, 10", name, got)
		}
		for _, wrong := range []int64{id, 0, harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'ann', forever => true)")} {
			var added float64
			err := pool.QueryRow(t.Context(), "SELECT ratelimit.add($1)", wrong).Scan(&added)
			if wrong == id && added != 15 || wrong != id && harness.SQLState(err) != "22023" {
				t.Errorf("%s: override %d: %v added, %v", name, wrong, added, err)
			}
		}
	}
}

// TestWhatIsAddedAfterAnOlderOverride: the override before decides the capacity until now, also where only the program knows a key's numbers.
func TestWhatIsAddedAfterAnOlderOverride(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 24)
	day := 24 * time.Hour
	publish := func(deployed ...ratelimit.Limit) {
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", append(deployed,
			ratelimit.FixedWindow("fixed", 10, day), ratelimit.FixedWindow("varying", 10, day, ratelimit.Varies(3*day)))...))
	}
	publish(ratelimit.FixedWindow("lowered", 28, day), ratelimit.FixedWindow("alive", 25, day))
	harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '4 days', first_at = now() - interval '4 days'")
	publish(ratelimit.FixedWindow("lowered", 25, day))
	harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '4 days' WHERE NOT current")
	publish(ratelimit.FixedWindow("lowered", 10, day), ratelimit.FixedWindow("alive", 10, day))
	harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '4 days', alive_until = now() + interval '3 minutes' WHERE NOT current AND name = 'alive'")
	var adding sync.WaitGroup // each waits for two seconds
	for i, test := range []struct {
		limit, before, now string // arguments of ratelimit.override; before is empty: there is none
		capacity           string
		added              float64
		refused            string
	}{
		{"varying", "capacity => 20", "capacity => 30", "NULL", 0, "capacity must be given, not NULL: only the program knows that of this key"},
		{"varying", "capacity => 20", "capacity => 30", "20", 10, ""},
		{"varying", "capacity => 20", "capacity => 30", "25", 5, ""}, // which the program had before
		{"varying", "capacity => 20", "capacity => 30", "15", 0, "capacity must be NULL or at least 20, which holds under override"},
		{"varying", "rate => 20", "capacity => 30", "NULL", 0, "capacity must be given, not NULL: only the program knows that of this key"},
		{"varying", "rate => 20", "capacity => 30", "12", 18, ""},
		{"varying", "rate => 20, capacity => 20", "capacity => 30", "20", 10, ""},
		{"varying", "rate => 20, capacity => 20", "rate => 30", "NULL", 0, "gives no capacity"},
		{"varying", "", "capacity => 30", "NULL", 0, "capacity must be given, not NULL"},
		{"varying", "", "capacity => 30", "12", 18, ""},
		{"varying", "", "rate => 30", "12", 0, "gives no capacity"},
		{"varying", "block", "capacity => 30", "NULL", 0, "the key had the effect 'block' before override"},
		{"varying", "block", "capacity => 30", "12", 18, ""},
		{"fixed", "capacity => 20", "capacity => 30", "NULL", 10, ""},
		{"fixed", "capacity => 20", "capacity => 30", "10", 0, "capacity must be NULL or at least 20, which holds under override"},
		{"fixed", "capacity => 1", "capacity => 30", "NULL", 20, ""}, // the key may have used the 10 of before
		{"fixed", "rate => 20", "rate => 30", "20", 10, ""},
		{"fixed", "capacity => 20", "rate => 30", "NULL", 10, ""}, // which replaces the one before as a whole
		{"fixed", "", "capacity => 30", "12", 18, ""},
		{"fixed", "", "rate => 30", "NULL", 20, ""},
		{"fixed", "", "rate => 30", "-1", 0, "capacity must be 0 or between 1e-15 and 1e15, not -1"},
		{"fixed", "block", "rate => 30", "NULL", 0, "the key had the effect 'block' before override"},
		{"fixed", "block", "rate => 30", "10", 20, ""},
		{"lowered", "", "capacity => 30", "NULL", 5, ""}, // to 10, from 25 of which the key may have used all
		{"lowered", "capacity => 1", "capacity => 30", "NULL", 5, ""},
		{"lowered", "", "capacity => 30", "10", 20, ""},
		{"alive", "", "capacity => 30", "NULL", 5, ""},                    // a program still has 25
		{"lowered", "max_reserved => 5", "capacity => 30", "NULL", 5, ""}, // made long ago
	} {
		key := fmt.Sprintf("key %d", i)
		harness.MustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('%s', '%s', 0, 1, 0, now())", test.limit, key))
		switch test.before {
		case "":
		case "block":
			harness.MustExec(t, pool, fmt.Sprintf("SELECT ratelimit.block('%s', '%s', forever => true)", test.limit, key))
		default:
			harness.MustExec(t, pool, fmt.Sprintf("SELECT ratelimit.override('%s', '%s', %s, forever => true)", test.limit, key, test.before))
			harness.MustExec(t, pool, fmt.Sprintf("UPDATE ratelimit.overrides SET made_at = made_at - interval '6 days' WHERE key = '%s' AND max_reserved IS NOT NULL", key))
		}
		id := harness.Scan[int64](t, pool, fmt.Sprintf("SELECT ratelimit.override('%s', '%s', %s, forever => true)", test.limit, key, test.now))
		adding.Go(func() {
			var added, value float64
			err := pool.QueryRow(t.Context(), fmt.Sprintf("SELECT ratelimit.add($1, %s)", test.capacity), id).Scan(&added)
			if test.refused == "" && (err != nil || added != test.added) || test.refused != "" && (harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), test.refused)) {
				t.Errorf("%+v: %v added, %v", test, added, err)
			}
			if err := pool.QueryRow(t.Context(), "SELECT value FROM ratelimit.limits WHERE key = $1", key).Scan(&value); err != nil || value != test.added {
				t.Errorf("%+v: the row has %v, %v", test, value, err)
			}
		})
	}
	adding.Wait()
	// Where no program publishes, the capacity is passed.
	harness.MustExec(t, pool, "DELETE FROM ratelimit.definitions; INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('unpublished', 'ann', 0, 1, 0, now())")
	id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('unpublished', 'ann', capacity => 30, forever => true)")
	if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1, 12)", id); added != 18 {
		t.Errorf("unpublished: %v added, want 18", added)
	}
}

// TestASweepMindsOverrides: a row stays if it is full by the limit's own numbers, but not by an override's.
func TestASweepMindsOverrides(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", api))
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', capacity => 100000, forever => true)")
	harness.MustExec(t, pool, "INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('api', 'ann', 0, 1, 0, now() - interval '3 hours')")
	var limits ratelimit.Limiter // which does not follow them
	for _, step := range []struct {
		then    string
		deletes int64
	}{
		{"SELECT 1", 0},
		{"SELECT ratelimit.restore('api', 'ann')", 0}, // a process may not know yet
		{"UPDATE ratelimit.overrides SET removed_at = now() - interval '25 hours'", 1},
	} {
		harness.MustExec(t, pool, step.then)
		deleted, err := limits.Sweep(t.Context(), pool, api)
		harness.MustExec(t, pool, "INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('api', 'ann', 0, 1, 0, now() - interval '3 hours') ON CONFLICT DO NOTHING")
		byHand := harness.Scan[int64](t, pool, "SELECT deleted FROM ratelimit.sweep('api')")
		if err != nil || deleted != step.deletes || byHand != step.deletes {
			t.Errorf("%s: %d deleted by Sweep, %v, and %d by hand, want %d", step.then, deleted, err, byHand, step.deletes)
		}
	}
	// The history goes after a year, except for what was added.
	harness.MustExec(t, pool, `INSERT INTO ratelimit.overrides (name, key, effect, until, made_at, added)
		SELECT 'gone', k, CASE k WHEN 'reset' THEN k ELSE 'block' END,
		       CASE k WHEN 'reset' THEN '-infinity' WHEN 'for good' THEN NULL WHEN 'lately' THEN now() - interval '11 months' ELSE now() - interval '13 months' END,
		       now() - interval '14 months', CASE k WHEN 'added' THEN 1 END
		  FROM unnest('{reset,for good,lately,long ago,added}'::text[]) AS k`)
	_, err := limits.Sweep(t.Context(), pool, api)
	if got := harness.Scan[string](t, pool, "SELECT string_agg(key, ', ' ORDER BY key) FROM ratelimit.overrides WHERE name = 'gone'"); err != nil || got != "added, for good, lately" {
		t.Errorf("of the history, %s are left, %v", got, err)
	}
}

// TestOverridesThatEndInTheFarFuture have no end. The functions want that said.
func TestOverridesThatEndInTheFarFuture(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", api))
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	for i, until := range []string{"infinity", "294276-12-31 00:00+00", "10000-01-01 00:00+00"} {
		byHand, byFunction := fmt.Sprintf("by hand %d", i), fmt.Sprintf("by function %d", i)
		harness.MustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.overrides (name, key, effect, until) VALUES ('api', '%s', 'block', '%s')", byHand, until))
		for _, said := range []string{"", "until => NULL", "forever => NULL", "until => '" + until + "'", "until => '" + until + "', forever => NULL", "until => now() + interval '1 hour', forever => true"} {
			if _, err := pool.Exec(t.Context(), strings.Replace(fmt.Sprintf("SELECT ratelimit.block('api', '%s', %s)", byFunction, said), ", )", ")", 1)); harness.SQLState(err) != "22023" {
				t.Errorf("%s: %v", said, err)
			}
		}
		harness.MustExec(t, pool, fmt.Sprintf("SELECT ratelimit.block('api', '%s', forever => true)", byFunction))
		if err := follow.Load(t.Context(), limits); err != nil {
			t.Fatalf("%s: %v", until, err)
		}
		for _, key := range []string{byHand, byFunction} {
			if got := harness.LimitInForce(t, limits, pool, api.Key(key)); got != "api: blocked" {
				t.Errorf("%s until %s: %s", key, until, got)
			}
			if end := harness.Scan[*time.Time](t, pool, "SELECT retry_at FROM ratelimit.try('api', $1) WHERE NOT granted", key); end != nil {
				t.Errorf("%s until %s: by hand, it ends at %v", key, until, end)
			}
			if end := harness.Scan[string](t, pool, "SELECT retry_at::text FROM ratelimit.keys('api', keys => ARRAY[$1::text])", key); end != "infinity" && !strings.Contains(end, "294276") && !strings.Contains(end, "10000") {
				t.Errorf("%s until %s: in the list of keys, it ends at %v", key, until, end)
			}
		}
	}
}

// slowDB answers a poll late, and holds back what is asked of it.
type slowDB struct {
	ratelimit.DB
	before, after time.Duration
}

func (d slowDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	time.Sleep(d.before)
	row := d.DB.QueryRow(ctx, sql, args...)
	time.Sleep(d.after)
	return row
}

// TestASlowPollEndsNoBlockEarly: the time that a poll takes is not taken for a difference of the clocks.
func TestASlowPollEndsNoBlockEarly(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	for _, slow := range []slowDB{{pool, time.Second, 0}, {pool, 0, time.Second}} {
		key := fmt.Sprint(slow.before)
		harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', $1, until => clock_timestamp() + interval '2 seconds')", key)
		limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: slow})
		harness.Succeeds(t, follow.Load(t.Context(), limits))
		harness.Eventually(t, "the block ends", func() bool { _, err := limits.Consume(t.Context(), pool, api.Key(key)); return !harness.Denied(err) })
		if early := harness.Scan[time.Duration](t, pool, "SELECT until - clock_timestamp() FROM ratelimit.overrides WHERE key = $1", key); early > 0 {
			t.Errorf("%+v: it ended %v early", slow, early)
		}
		harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', $1, capacity => 2, until => clock_timestamp() + interval '2 seconds')", key)
		harness.Succeeds(t, follow.Load(t.Context(), limits))
		result, err := limits.Consume(t.Context(), pool, api.Key(key).Count(8))
		if !harness.Denied(err) {
			t.Fatalf("%+v: 8 of a capacity of 2: %v", slow, err)
		}
		time.Sleep(result.RetryAfter)
		if result, err = limits.Consume(t.Context(), pool, api.Key(key).Count(8)); err != nil {
			t.Errorf("%+v: after RetryAfter, %v at %v", slow, err, result.At)
		}
	}
}

// TestToBeToldMayLoad: OnError may load again on the same connection, as somebody who wants to know more does.
func TestToBeToldMayLoad(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, "INSERT INTO ratelimit.overrides (name, key, effect, rate) VALUES ('api', 'ann', 'numbers', 'NaN')")
	told := 0
	limits := new(ratelimit.Limiter)
	follow.By(limits, follow.Settings{DB: pool, OnError: func(error) {
		if told++; told < 3 {
			if err := follow.Load(t.Context(), limits); err != nil {
				t.Error(err)
			}
		}
	}})
	if err := follow.Load(t.Context(), limits); err != nil || told != 3 {
		t.Errorf("told %d times, %v, want 3", told, err)
	}
}

// TestAddRefusesAShortTimeout: ratelimit.add waits for the programs, and a short statement_timeout would cancel it. The next call adds all.
func TestAddRefusesAShortTimeout(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets a timeout")
	pool := harness.NewPool(t, 1)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", ratelimit.TokenBucket("limit", 10, time.Hour)))
	harness.MustExec(t, pool, "INSERT INTO ratelimit.limits VALUES ('limit', 'ann', 0, 1, 0, now())")
	id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('limit', 'ann', rate => 30, forever => true)")
	for _, timeout := range []string{"50ms", "1s", "2s"} {
		_, err := pool.Exec(t.Context(), fmt.Sprintf("SET statement_timeout = '%s'; SELECT ratelimit.add(%d)", timeout, id))
		if harness.SQLState(err) != "55000" || !strings.Contains(err.Error(), "nothing was added: the call waits for 2 seconds") {
			t.Errorf("with a timeout of %s: %v, want 55000", timeout, err)
		}
	}
	harness.MustExec(t, pool, "RESET statement_timeout")
	if value := harness.Scan[float64](t, pool, "SELECT value FROM ratelimit.limits"); value != 0 {
		t.Errorf("the cancelled call added %v", value)
	}
	if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add(max(id)) FROM ratelimit.overrides"); added != 20 {
		t.Errorf("added %v, want 20", added)
	}
}

// TestWhatIsAddedStays: a transaction that overrides stays open for long. Programs know of it two seconds after its commit, and until then cut
// what is added.
func TestWhatIsAddedStays(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	api := ratelimit.FixedWindow("api", 50, 24*time.Hour)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", api))
	limits := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool}) // by polls, a second apart
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, api.Key("ann").Count(50))))
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(t.Context())
	id := harness.Scan[int64](t, tx, "SELECT ratelimit.override('api', 'ann', rate => 500, forever => true)")
	time.Sleep(2500 * time.Millisecond)
	harness.Succeeds(t, tx.Commit(t.Context()))
	stop := make(chan struct{})
	var running sync.WaitGroup
	running.Go(func() { // a program that writes the row
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				_, _ = limits.Charge(t.Context(), pool, api.Key("ann").Count(0))
			}
		}
	})
	added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1)", id)
	harness.Eventually(t, "the program knows", func() bool {
		return harness.LimitInForce(t, limits, pool, api.Key("ann")) == "api: fixed window, 500 per 1d, capacity 500"
	})
	close(stop)
	running.Wait()
	if value := harness.Scan[float64](t, pool, "SELECT value FROM ratelimit.limits"); added != 450 || value != 450 {
		t.Errorf("%v added, and %v are there", added, value)
	}
}

// TestWhatIsAddedAgainAndAgain: override, add, restore, three times: at most the larger capacity is granted.
func TestWhatIsAddedAgainAndAgain(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for name, limit := range map[string]ratelimit.Limit{
		"window": ratelimit.FixedWindow("api", 100, 24*time.Hour), "bucket": ratelimit.TokenBucket("api", 100, 24*time.Hour), "calendar": ratelimit.CalendarWindow("api", 100, ratelimit.Month),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 2)
			harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", limit))
			limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
			granted := 0
			use := func() {
				t.Helper()
				harness.Succeeds(t, follow.Load(t.Context(), limits))
				n, _, err := limits.Take(t.Context(), pool, 10_000, limit.Key("ann"))
				if granted += n; err != nil && !harness.Denied(err) {
					t.Fatal(err)
				}
			}
			use()
			for _, rate := range []int{500, 500, 600} {
				harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => 1, forever => true)") // what is lower brings nothing
				id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => $1, forever => true)", rate)
				harness.Scan[float64](t, pool, "SELECT ratelimit.add($1)", id)
				use()
				harness.Scan[int](t, pool, "SELECT ratelimit.restore('api', 'ann')")
				use()
			}
			if granted != 600 {
				t.Errorf("%d granted, want 600, the largest capacity", granted)
			}
			// A reset does not change that.
			harness.Scan[int64](t, pool, "SELECT ratelimit.reset('api', 'ann')")
			use()
			reset := harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => 500, forever => true)")
			if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1)", reset); added != 0 {
				t.Errorf("%v added after a reset, want 0", added)
			}
			harness.Scan[int](t, pool, "SELECT ratelimit.restore('api', 'ann')")
			// Once the limit has filled up, it may be raised again.
			harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET added_at = added_at - interval '1 year'; UPDATE ratelimit.limits SET value = 0, ts = now()")
			id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => 500, forever => true)")
			if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1)", id); added != 400 {
				t.Errorf("%v added after a year, want 400", added)
			}
		})
	}
}

// TestASlowPollBringsNoOverrideBack: polls that wait for a lock say little about the database's clock. What has ended stays so.
func TestASlowPollBringsNoOverrideBack(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	hourly := ratelimit.TokenBucket("api", 1, time.Hour)
	limits := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool, Every: soon})
	until := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp() + interval '1 second'")
	for _, call := range []string{"ratelimit.unlimited('api', 'free', until => $1)", "ratelimit.override('api', 'raised', rate => 1000000, until => $1)"} {
		harness.Scan[int64](t, pool, "SELECT "+call, until)
	}
	harness.Eventually(t, "they are in force", func() bool {
		return harness.LimitInForce(t, limits, pool, hourly.Key("free")) == "api: unlimited" && harness.LimitInForce(t, limits, pool, hourly.Key("raised")) != hourly.String()
	})
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(t.Context())
	harness.MustExecIn(t, tx, "LOCK TABLE ratelimit.overrides IN ACCESS EXCLUSIVE MODE")
	time.Sleep(3 * time.Second)
	harness.Succeeds(t, tx.Rollback(t.Context()))
	for begin := time.Now(); time.Since(begin) < 2*time.Second; time.Sleep(5 * time.Millisecond) {
		for _, key := range []string{"free", "raised"} {
			if got := harness.LimitInForce(t, limits, pool, hourly.Key(key)); got != hourly.String() {
				t.Fatalf("%s: %s, %v after its end", key, got, harness.Scan[time.Duration](t, pool, "SELECT clock_timestamp() - $1::timestamptz", until))
			}
		}
	}
}

// TestNoProgramFollowsAnOverrideThatIsNotValid: nor does SQL, the tool or the page, and what is older decides.
func TestNoProgramFollowsAnOverrideThatIsNotValid(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limit := ratelimit.TokenBucket("api", 10, time.Hour)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "app", limit))
	harness.MustExec(t, pool, "SELECT ratelimit.override('api', 'ann', rate => 20, forever => true)")
	harness.MustExec(t, pool, "INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity) VALUES ('api', 'ann', 'numbers', 'NaN', NULL), ('api', 'ann', 'numbers', 0, NULL), ('api', 'ann', 'numbers', 30, 'Infinity')")
	if rate := harness.Scan[float64](t, pool, "SELECT rate FROM ratelimit._numbers('api', 'ann', now())"); rate != 20 {
		t.Errorf("SQL uses a rate of %v", rate)
	}
	limits := follow.By(new(ratelimit.Limiter), follow.Settings{DB: pool, OnError: func(error) {}})
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	balances, err := limits.Balance(t.Context(), pool, limit.Key("ann"))
	if err != nil || balances[0].Capacity != 20 {
		t.Errorf("the library uses %+v, %v", balances, err)
	}
	if n := harness.Scan[int](t, pool, "SELECT ratelimit.restore('api', 'ann')"); n != 4 {
		t.Errorf("%d of 4 are ended", n)
	}
}

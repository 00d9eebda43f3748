package ops_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// versionOf opens a process of a program whose version has this rate.
func versionOf(t *testing.T, pool *pgxpool.Pool, rate float64, change func(o *ratelimit.Options)) *ratelimit.Limiter {
	t.Helper()
	o := ratelimit.Options{Program: "web", Limits: []ratelimit.Limit{ratelimit.TokenBucket("api", rate, time.Hour)}, NoSweep: true, OnError: func(error) {}}
	if change != nil {
		change(&o)
	}
	return harness.Open(t, pool, o)
}

// publishedRate is what SQL without numbers uses.
func publishedRate(t *testing.T, pool *pgxpool.Pool) float64 {
	t.Helper()
	rate := harness.Scan[float64](t, pool, "SELECT rate FROM ratelimit._numbers('api', 'ann', now())")
	if shown := harness.Scan[float64](t, pool, "SELECT rate FROM ratelimit.definitions WHERE name = 'api' AND current"); shown != rate {
		t.Errorf("SQL uses a rate of %v, and the tool shows %v", rate, shown)
	}
	return rate
}

// die lets the processes of a version be silent for longer than the bound.
func die(t *testing.T, pool *pgxpool.Pool, rate float64) {
	t.Helper()
	harness.MustExec(t, pool, fmt.Sprintf(`UPDATE ratelimit.definitions SET alive_until = now() - interval '1 second'
		WHERE list IN (SELECT list FROM ratelimit.definitions WHERE name = 'api' AND rate = %v)`, rate))
}

// TestTheNewestVersionInUseCounts: whoever starts again, of the versions of a program that are in use, the one published last has its numbers
// in SQL, tool and page.
func TestTheNewestVersionInUseCounts(t *testing.T) {
	t.Parallel()
	t.Run("a rolling deploy, and a rollback", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 4)
		wants := func(when string, rate float64) {
			t.Helper()
			if got := publishedRate(t, pool); got != rate {
				t.Errorf("%s: a rate of %v, want %v", when, got, rate)
			}
		}
		versionOf(t, pool, 9, nil)
		wants("the first version", 9)
		versionOf(t, pool, 70, nil)
		wants("the second version", 70)
		versionOf(t, pool, 9, nil)
		wants("a process of the first version starts again", 70)
		if _, err := pool.Exec(t.Context(), "SELECT ratelimit.consume('api', 'ann', count => 60)"); err != nil {
			t.Error(err)
		}
		die(t, pool, 70)
		versionOf(t, pool, 9, nil)
		wants("the second version has gone", 9)
		versionOf(t, pool, 70, nil)
		wants("the second version comes back", 70)
		die(t, pool, 9)
		die(t, pool, 70)
		wants("nobody runs", 70)
	})
	t.Run("processes without background", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 4)
		short := func(rate float64) {
			t.Helper()
			harness.CloseLimiter(t, versionOf(t, pool, rate, func(o *ratelimit.Options) { o.NoBackground = true }))
		}
		short(9)
		if got := publishedRate(t, pool); got != 9 {
			t.Errorf("the first process: a rate of %v", got)
		}
		for _, rate := range []float64{70, 9, 70, 9} {
			short(rate)
			if got := publishedRate(t, pool); got != 70 {
				t.Errorf("after a process of rate %v: a rate of %v", rate, got)
			}
		}
		versionOf(t, pool, 9, nil) // one that stays: its version is in use, and no other
		if got := publishedRate(t, pool); got != 9 {
			t.Errorf("beside a process that runs: a rate of %v", got)
		}
		short(70)
		if got := publishedRate(t, pool); got != 9 {
			t.Errorf("a short process beside one that runs: a rate of %v", got)
		}
	})
	t.Run("an operator publishes an older list again", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		for i, rate := range []float64{9, 70, 9, 70, 9} {
			if i < 3 {
				harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", ratelimit.TokenBucket("api", rate, time.Hour)))
			} else if counts := harness.Scan[bool](t, pool, "SELECT counts FROM ratelimit.publish('web', jsonb_build_array(jsonb_build_object('name', 'api', 'kind', 'token bucket', 'rate', $1::float8, 'period', '1 hour')))", rate); !counts {
				t.Errorf("published %v by hand, and it does not count", rate)
			}
			if got := publishedRate(t, pool); got != rate {
				t.Errorf("published %v: a rate of %v", rate, got)
			}
		}
		if n := harness.Scan[int](t, pool, "SELECT count(alive_until) FROM ratelimit.definitions"); n != 0 {
			t.Errorf("%d lists are in use, and no process is", n)
		}
	})
	t.Run("SQL of an older version that has a limit more", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 4)
		more := ratelimit.TokenBucket("old", 5, time.Hour)
		versionOf(t, pool, 9, func(o *ratelimit.Options) { o.Limits = append(o.Limits, more) })
		versionOf(t, pool, 70, nil)
		harness.MustExec(t, pool, "SELECT ratelimit.consume('old', 'ann')")
		harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET alive_until = now() WHERE name = 'old'")
		if _, err := pool.Exec(t.Context(), "SELECT ratelimit.consume('old', 'ann')"); harness.SQLState(err) != "22023" {
			t.Errorf("of a version that nobody uses: %v", err)
		}
	})
	t.Run("what was replaced just now stays", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		for _, rate := range []float64{9, 70} {
			harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", ratelimit.TokenBucket("api", rate, time.Hour)))
			if rate == 9 {
				harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '30 days'")
			}
		}
		if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.definitions WHERE published_at > now() - interval '1 minute'"); n != 2 {
			t.Errorf("%d of 2 lists are known", n)
		}
	})
	t.Run("what is in use stays", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 4)
		versionOf(t, pool, 9, nil)
		versionOf(t, pool, 70, nil)
		harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '6 days 23 hours' WHERE NOT current")
		versionOf(t, pool, 9, nil) // or a heartbeat
		versionOf(t, pool, 71, nil)
		if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.definitions WHERE rate = 9 AND published_at > now() - interval '1 minute'"); n != 1 {
			t.Error("a version in use was forgotten")
		}
	})
}

// TestAnUnchangedListTakesNoLock opens while another session publishes, and holds its lock and every row.
func TestAnUnchangedListTakesNoLock(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	versionOf(t, pool, 9, nil)
	versionOf(t, pool, 70, nil)
	holder, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), holder, "other", ratelimit.TokenBucket("elsewhere", 1, time.Hour)))
	for name, change := range map[string]string{
		"just alive":              "SELECT 1",
		"to be marked":            "UPDATE ratelimit.definitions SET alive_until = now() + interval '3 minutes' WHERE program = 'web'",
		"to be marked, and older": "UPDATE ratelimit.definitions SET alive_until = now() + interval '3 minutes', published_at = published_at - interval '2 hours' WHERE program = 'web'",
	} {
		harness.MustExec(t, pool, change)
		for _, rate := range []float64{9, 70} {
			ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
			limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
				Program: "web", Limits: []ratelimit.Limit{ratelimit.TokenBucket("api", rate, time.Hour)}, NoSweep: true, OnError: func(error) {},
			})
			cancel()
			if err != nil {
				t.Fatalf("%s, rate %v: %v", name, rate, err)
			}
			harness.CloseLimiter(t, limits)
		}
		if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.definitions WHERE program = 'web' AND alive_until < now() + interval '3 minutes 30 seconds'"); n != 0 {
			t.Errorf("%s: %d definitions are not marked as in use", name, n)
		}
	}
	harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET alive_until = now() + interval '3 minutes' WHERE program = 'web'")
	harness.Succeeds(t, harness.Second(holder.Exec(t.Context(), "SELECT FROM ratelimit.definitions FOR UPDATE")))
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "web", Limits: []ratelimit.Limit{ratelimit.TokenBucket("api", 70, time.Hour)}, NoSweep: true, OnError: func(error) {},
	})
	if err != nil {
		t.Fatalf("rows are locked: %v", err)
	}
	harness.CloseLimiter(t, limits)
}

// TestOpenTellsOfOtherNumbers: of another program, and of another version in use.
func TestOpenTellsOfOtherNumbers(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var mu sync.Mutex
	var told []error
	telling := func(o *ratelimit.Options) {
		o.OnError = func(err error) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, err)
		}
	}
	wants := func(when string, texts ...string) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if len(told) != len(texts) {
			t.Fatalf("%s: told %q, want %q", when, told, texts)
		}
		for i, text := range texts {
			if !strings.Contains(told[i].Error(), "other numbers are published") || !strings.Contains(told[i].Error(), text) {
				t.Errorf("%s: %v, want %q", when, told[i], text)
			}
		}
		told = nil
	}
	versionOf(t, pool, 9, telling)
	wants("alone")
	versionOf(t, pool, 70, telling)
	wants("a newer version")
	versionOf(t, pool, 9, telling)
	wants("an older version", `another version of program "web" is in use`)
	versionOf(t, pool, 70, func(o *ratelimit.Options) { telling(o); o.Program = "worker" })
	wants("the same numbers")
	versionOf(t, pool, 50, func(o *ratelimit.Options) { telling(o); o.Program = "cron" })
	wants("other numbers", "limit 'api': token bucket, 50 per 01:00:00, capacity 50, and program 'web' has published token bucket, 70 per 01:00:00, capacity 70", "program 'worker'")
	for _, own := range []ratelimit.Limit{ratelimit.TokenBucket("own", 9, time.Hour), ratelimit.FixedWindow("own", 9, time.Hour)} {
		wants("the first version")
		versionOf(t, pool, 0, func(o *ratelimit.Options) { telling(o); o.Program, o.Limits = "alone", []ratelimit.Limit{own} })
	}
	wants("an older version of another kind", "limit 'own': fixed window, 9 per 01:00:00, capacity 9, and program 'alone' has published token bucket")
}

// Lists as JSON, for ratelimit.publish.
const (
	bucketList = `[{"name": "api", "kind": "token bucket", "rate": 9, "period": "1 hour"}]`
	windowList = `[{"name": "api", "kind": "fixed window", "rate": 9, "period": "1 hour"}]`
	bothList   = `[{"name": "api", "kind": "token bucket", "rate": 9, "period": "1 hour"}, {"name": "also", "kind": "unlimited"}]`
)

// lateLists are those whose processes are silent.
const lateLists = "UPDATE ratelimit.definitions SET alive_until = now() - interval '1 second' WHERE program = 'web' AND "

// TestAConflictStopsNoHeartbeat: a list that was published stays in use, whatever another program has published meanwhile.
func TestAConflictStopsNoHeartbeat(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	harness.MustBeat(t, pool, "web", bucketList)
	harness.MustBeat(t, pool, "web", windowList)
	harness.MustExec(t, pool, lateLists+"kind = 'token bucket'")
	harness.MustBeat(t, pool, "worker", windowList)
	harness.MustExec(t, pool, lateLists+"kind = 'fixed window'") // the newer version dies, and one of the older version is there again
	for range 2 {
		counts, others, err := harness.Beats(t, pool, "web", bucketList)
		if err != nil || !counts || len(others) != 1 || !strings.Contains(others[0], "token bucket, 9 per 01:00:00, capacity 9, and program 'worker' has published fixed window") {
			t.Errorf("counts: %t, others: %q, %v", counts, others, err)
		}
	}
	if got := harness.Lines(t, pool, "SELECT kind, alive_until > now() + interval '4 minutes' FROM ratelimit.definitions WHERE program = 'web' AND current"); got != `("token bucket",t)` {
		t.Errorf("current: %s", got)
	}
	if _, _, err := harness.Beats(t, pool, "cron", bucketList); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "both would grant") {
		t.Errorf("a list that is new: %v", err)
	}
}

// TestAKindInUseIsRefused: of a list that does not count, too.
func TestAKindInUseIsRefused(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	versionOf(t, pool, 9, nil)
	versionOf(t, pool, 9, func(o *ratelimit.Options) { o.Limits = []ratelimit.Limit{ratelimit.Unlimited("elsewhere")} })
	opens := func() error {
		limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{
			Program: "worker", Limits: []ratelimit.Limit{ratelimit.FixedWindow("api", 9, time.Hour)}, NoSweep: true, NoBackground: true, OnError: func(error) {},
		})
		if err == nil {
			harness.CloseLimiter(t, limits)
		}
		return err
	}
	if err := opens(); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "no older version of 'web' has run for five minutes") {
		t.Errorf("an older version runs: %v", err)
	}
	harness.MustExec(t, pool, "BEGIN; SELECT ratelimit.withdraw('web'); SELECT ratelimit.publish('worker', '"+windowList+"'); ROLLBACK") // withdrawn
	if err := opens(); harness.SQLState(err) != "22023" {
		t.Errorf("not withdrawn after all: %v", err)
	}
	harness.MustExec(t, pool, lateLists+"kind = 'token bucket'")
	if err := opens(); err != nil {
		t.Errorf("it no longer runs: %v", err)
	}
}

// TestACalendarInUseIsRefused: two programs with windows that begin at other instants would both grant, as those of another start do.
func TestACalendarInUseIsRefused(t *testing.T) {
	t.Parallel()
	calendar := func(period, rest string) string {
		return `[{"name": "api", "kind": "calendar window", "rate": 10, "period": "` + period + `"` + rest + `}]`
	}
	for _, c := range []struct{ period, first, second, want string }{
		{"1 day", "", `, "zone": "Europe/Berlin"`, "rate limit 'api': program 'two' defines a calendar window of 1 day in Europe/Berlin from 2001-01-01 00:00:00, and program 'one' a calendar window of 1 day in UTC from 2001-01-01 00:00:00: both would grant"},
		{"1 day", "", `, "zone": "UTC", "anchor": "2026-05-05"`, ""},
		{"1 day", "", `, "anchor": "2001-01-01 15:00"`, "in UTC from 2001-01-01 15:00:00, and program 'one'"},
		{"7 days", "", `, "anchor": "2001-01-02"`, "both would grant"},
		{"7 days", "", `, "anchor": "2000-12-25"`, ""},
		{"1 month", `, "anchor": "2026-01-31"`, `, "anchor": "2026-04-30"`, "both would grant"},
		{"1 month", `, "anchor": "2026-01-31"`, `, "anchor": "2024-03-31"`, ""},
		{"3 months", "", `, "anchor": "2001-02-01"`, "both would grant"},
		{"3 months", "", `, "anchor": "2000-10-01"`, ""},
		{"1 year", "", `, "anchor": "2001-02-01"`, "both would grant"},
		{"1 year", "", `, "anchor": "2026-01-01"`, ""},
		{"1 day", "", `, "zone": "Europe/Berlin", "varies": "2 days"`, ""}, // keys have zones of their own
		{"1 day", `, "varies": "2 days"`, `, "zone": "Europe/Berlin"`, ""},
		{"1 day", "", `, "zone": "Europe/Berlin", "capacity": 20, "max_reserved": 5`, "both would grant"},
	} {
		t.Run(c.period+c.first+c.second, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 2)
			harness.MustExec(t, pool, "SELECT ratelimit.publish('one', '"+calendar(c.period, c.first)+"')")
			harness.MustExec(t, pool, "SELECT ratelimit.publish('one', '"+calendar(c.period, c.second)+"'); SELECT ratelimit.publish('one', '"+calendar(c.period, c.first)+"')") // one program may change it
			_, err := pool.Exec(t.Context(), "SELECT ratelimit.publish('two', '"+calendar(c.period, c.second)+"')")
			if c.want == "" {
				harness.Succeeds(t, err)
			} else if harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	t.Run("before", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		berlin := calendar("1 day", `, "zone": "Europe/Berlin"`)
		harness.MustBeat(t, pool, "web", berlin)
		harness.MustExec(t, pool, lateLists+"true")
		harness.MustBeat(t, pool, "web", windowList)
		harness.MustExec(t, pool, lateLists+"true; SELECT ratelimit.withdraw('web')")
		harness.MustBeat(t, pool, "worker", calendar("1 day", ""))
		counts, others, err := harness.Beats(t, pool, "web", berlin)
		if err != nil || !counts || len(others) != 1 || !strings.Contains(others[0], "in UTC from 2001-01-01") {
			t.Errorf("a list that was published before: counts: %t, others: %q, %v", counts, others, err)
		}
		if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "cron", ratelimit.CalendarWindow("api", 10, ratelimit.Day, ratelimit.Zone("Asia/Tokyo"))); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "both would grant") {
			t.Errorf("a list that is new: %v", err)
		}
	})
}

// TestAListIsAsOldAsItWas: whoever uses it again, and whatever is left of it.
func TestAListIsAsOldAsItWas(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]struct {
		change string
		rows   int
		known  bool
	}{
		"in use lately":              {"SELECT 1", 2, true},
		"a row is gone":              {"DELETE FROM ratelimit.definitions WHERE name = 'also' AND NOT current", 1, true},
		"8 days ago":                 {"UPDATE ratelimit.definitions SET published_at = now() - interval '8 days' WHERE NOT current", 1, true},
		"8 days ago, and 6 days ago": {"UPDATE ratelimit.definitions SET published_at = now() - interval '6 days 12 hours' - CASE name WHEN 'also' THEN interval '1 day' ELSE interval '0' END WHERE NOT current", 2, true},
		"11 months ago":              {"UPDATE ratelimit.definitions SET published_at = now() - interval '11 months' WHERE NOT current", 1, true},
		"13 months ago":              {"UPDATE ratelimit.definitions SET published_at = now() - interval '13 months' WHERE NOT current", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 2)
			harness.MustBeat(t, pool, "web", bothList)
			list := harness.Scan[string](t, pool, "SELECT DISTINCT list FROM ratelimit.definitions")
			harness.MustBeat(t, pool, "web", bucketList)
			harness.MustExec(t, pool, lateLists+"true; UPDATE ratelimit.definitions SET first_at = first_at - interval '14 months'; "+left.change)
			harness.MustBeat(t, pool, "web", windowList)
			if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.definitions WHERE list = '"+list+"'"); n != left.rows {
				t.Errorf("%d rows of the list are left, want %d", n, left.rows)
			}
			if left.rows == 1 && name != "a row is gone" {
				if _, err := pool.Exec(t.Context(), "SELECT ratelimit.block('also', 'ann', forever => true)"); harness.SQLState(err) != "22023" {
					t.Errorf("a name of long ago is known: %v", err)
				}
				if _, err := pool.Exec(t.Context(), "SELECT ratelimit.sweep('also')"); harness.SQLState(err) != "22023" {
					t.Errorf("a name of long ago is swept: %v", err)
				}
			}
			if counts := harness.MustBeat(t, pool, "web", bothList); counts == left.known {
				t.Errorf("an old version comes back: it counts is %t", counts)
			}
			if n := harness.Scan[int](t, pool, "SELECT count(DISTINCT (first_at, published_at, alive_until))::integer FROM ratelimit.definitions WHERE list = '"+list+"'"); n != 1 {
				t.Errorf("the rows of one list have %d different instants", n)
			}
		})
	}
}

// TestPublishersSeeEachOther: on a database whose level is higher, too.
func TestPublishersSeeEachOther(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			main := harness.NewPool(t, 2)
			pool, _ := harness.Traced(t, main, 4, map[string]string{"default_transaction_isolation": string(level)})
			rates := []float64{9, 70, 71, 72}
			failures := make(chan error, len(rates))
			for _, rate := range rates {
				go func() {
					failures <- new(ratelimit.Limiter).Publish(context.WithoutCancel(t.Context()), pool, "web", ratelimit.TokenBucket("api", rate, time.Hour))
				}()
			}
			for range rates {
				if err := <-failures; err != nil {
					t.Error(err)
				}
			}
			if n := harness.Scan[int](t, main, "SELECT count(*)::integer FROM ratelimit.definitions WHERE current"); n != 1 {
				t.Errorf("%d lists of one program are current", n)
			}
			versionOf(t, pool, 9, nil)
			tx, err := pool.Begin(t.Context())
			harness.Succeeds(t, err)
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			if _, err := tx.Exec(t.Context(), "SELECT ratelimit._publish('web', $1, true)", bucketList); err != nil {
				t.Errorf("a heartbeat: %v", err)
			}
			if err, want := new(ratelimit.Limiter).Publish(t.Context(), tx, "web", ratelimit.TokenBucket("api", 73, time.Hour)), map[bool]string{true: "RL003"}[level != pgx.ReadCommitted]; harness.SQLState(err) != want {
				t.Errorf("in a transaction: %v, want %q", err, want)
			}
		})
	}
}

// TestOpenWaitsForItsOwnPublish, which a program does when it migrates: then its list is in use, and counts.
func TestOpenWaitsForItsOwnPublish(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	versionOf(t, pool, 9, nil)
	holder, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), holder, "web", ratelimit.TokenBucket("api", 70, time.Hour)))
	opened := make(chan error, 1)
	told := make(chan error, 8)
	go func() {
		limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{
			Program: "web", Limits: []ratelimit.Limit{ratelimit.TokenBucket("api", 70, time.Hour)}, NoSweep: true,
			OnError: func(err error) {
				if strings.Contains(err.Error(), "other numbers are published") {
					told <- err
				}
			},
		})
		if err == nil {
			err = limits.Close(context.WithoutCancel(t.Context()))
		}
		opened <- err
	}()
	harness.WaitingFor(t, pool, holder)
	harness.Succeeds(t, holder.Commit(t.Context()))
	harness.Succeeds(t, <-opened)
	if got := publishedRate(t, pool); got != 70 {
		t.Errorf("a rate of %v", got)
	}
	if len(told) > 0 {
		t.Errorf("told: %v", <-told)
	}
	if !harness.Scan[bool](t, pool, "SELECT bool_and(alive_until > clock_timestamp()) FROM ratelimit.definitions WHERE program = 'web' AND current") {
		t.Error("the list is not said to be in use")
	}
}

// TestAHeartbeatLocksNoRowBeforeTheTable: who publishes has the table, and then wants the rows.
func TestAHeartbeatLocksNoRowBeforeTheTable(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.MustBeat(t, pool, "web", bucketList)
	harness.MustBeat(t, pool, "web", windowList)
	harness.MustExec(t, pool, lateLists+"true")
	holder, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), holder, "other", ratelimit.Unlimited("elsewhere")))
	type answer struct {
		counts bool
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		var a answer
		a.err = pool.QueryRow(t.Context(), "SELECT counts FROM ratelimit._publish('web', $1, true)", bucketList).Scan(&a.counts)
		answered <- a
	}()
	harness.WaitingFor(t, pool, holder)
	if _, err := holder.Exec(t.Context(), "SELECT FROM ratelimit.definitions WHERE program = 'web' FOR UPDATE NOWAIT"); err != nil {
		t.Errorf("a heartbeat that waits for the table holds rows: %v", err)
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	if a := <-answered; a.err != nil || !a.counts {
		t.Errorf("counts: %t, %v", a.counts, a.err)
	}
}

package ops_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestOneDefinitionPerName: a name has one definition, in a list, a Limiter and a call. Where programs or versions of one
// differ, the newest counts for SQL, and a sweep minds all of them.
func TestOneDefinitionPerName(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	hourly, other := ratelimit.TokenBucket("api", 1000, time.Hour), ratelimit.TokenBucket("api", 2000, time.Hour)
	varying := ratelimit.TokenBucket("api", 1000, time.Hour, ratelimit.Varies(24*time.Hour))
	own := varying.With(ratelimit.Rate(5000))
	publish := func(t *testing.T, pool *pgxpool.Pool, program string, limits ...ratelimit.Limit) {
		t.Helper()
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, program, limits...))
	}
	numbers := func(t *testing.T, pool *pgxpool.Pool) string { // that SQL without numbers goes by
		t.Helper()
		return harness.Lines(t, pool, "SELECT effect, kind, rate, capacity FROM ratelimit._numbers('api', 'ann', now(), varying => true)")
	}
	// left writes a row that is empty for so long, and says whether a sweep by the limit, and one by hand, leave it.
	left := func(t *testing.T, pool *pgxpool.Pool, idle string, limit ratelimit.Limit) bool {
		t.Helper()
		row := "INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('api', 'ann', 0, 1, 0, now() - interval '" + idle + "') ON CONFLICT (name, key, shard) DO UPDATE SET ts = excluded.ts"
		harness.MustExec(t, pool, row)
		bySweep, err := new(ratelimit.Limiter).Sweep(t.Context(), pool, limit)
		harness.Succeeds(t, err)
		harness.MustExec(t, pool, row)
		byHand := harness.Scan[int64](t, pool, "SELECT deleted FROM ratelimit.sweep('api')")
		if byHand != bySweep {
			t.Fatalf("idle for %s: Sweep deleted %d rows, and ratelimit.sweep %d", idle, bySweep, byHand)
		}
		return bySweep == 0
	}

	t.Run("a list", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		for name, limits := range map[string][]ratelimit.Limit{
			"other numbers": {hourly, other}, "twice": {hourly, hourly}, "unlimited": {hourly, ratelimit.Unlimited("api")},
			"a rate of 0": {ratelimit.TokenBucket("api", 0, time.Hour), hourly}, "With": {own}, "a definition and With": {varying, own},
		} {
			if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "web", limits...); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), `"api"`) {
				t.Errorf("%s: Publish: %v", name, err)
			}
			if _, err := new(ratelimit.Limiter).Sweep(t.Context(), pool, limits...); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), `"api"`) {
				t.Errorf("%s: Sweep: %v", name, err)
			}
		}
		if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.definitions"); n != 0 {
			t.Errorf("%d definitions are published", n)
		}
	})

	t.Run("a Limiter", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		var limiter ratelimit.Limiter
		consume := func(requests ...ratelimit.Request) error {
			return harness.Second(limiter.Consume(t.Context(), pool, requests...))
		}
		if err := consume(varying.Key("ann"), own.Key("bob"), varying.With(ratelimit.Capacity(10)).Key("cid")); err != nil {
			t.Error(err)
		}
		for _, second := range []ratelimit.Limit{hourly, other, ratelimit.Unlimited("api"), ratelimit.TokenBucket("api", 0, time.Hour)} {
			err := consume(second.Key("ann"))
			if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), varying.String()) || !strings.Contains(err.Error(), second.String()) {
				t.Errorf("%v: %v, want an error that names both", second, err)
			}
			if err := new(ratelimit.Limiter).Reset(t.Context(), pool, second.Key("ann"), hourly.Key("bob")); second != hourly && !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%v in one call with another: %v", second, err)
			}
		}
		if err := consume(own.Key("ann")); err != nil {
			t.Error(err)
		}
	})

	t.Run("two programs", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		publish(t, pool, "web", hourly)
		publish(t, pool, "worker", other)
		if got := numbers(t, pool); got != `(numbers,"token bucket",2000,2000)` {
			t.Errorf("the newest: %s", got)
		}
		publish(t, pool, "web", varying)
		if got := numbers(t, pool); got != `(varies,"token bucket",,)` {
			t.Errorf("the newest varies: %s", got)
		}
		publish(t, pool, "worker", other)
		if got := numbers(t, pool); got != `(varies,"token bucket",,)` {
			t.Errorf("one varies: %s", got)
		}
		err := new(ratelimit.Limiter).Publish(t.Context(), pool, "worker", ratelimit.FixedWindow("api", 1000, time.Hour))
		if harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "both would grant") {
			t.Errorf("another kind: %v", err)
		}
		if !left(t, pool, "24 hours", varying) || left(t, pool, "26 hours", varying) {
			t.Error("a sweep does not mind that keys have numbers of their own")
		}
	})

	t.Run("a rolling deploy", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		before, after := ratelimit.TokenBucket("api", 100, time.Hour, ratelimit.Capacity(1000)), hourly
		for range 3 { // old and new processes start in any order
			publish(t, pool, "web", before)
			publish(t, pool, "web", after)
		}
		if got := harness.Lines(t, pool, "SELECT definition, current FROM ratelimit.definitions ORDER BY rate"); got != "(\"token bucket, 100 per 01:00:00, capacity 1000\",f)\n(\"token bucket, 1000 per 01:00:00, capacity 1000\",t)" {
			t.Errorf("published:\n%s", got)
		}
		if got := numbers(t, pool); got != `(numbers,"token bucket",1000,1000)` {
			t.Errorf("the newest: %s", got)
		}
		if !left(t, pool, "10 hours", after) || left(t, pool, "12 hours", after) {
			t.Error("a sweep does not mind the old version")
		}
		harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '6 days 23 hours' WHERE NOT current")
		if !left(t, pool, "10 hours", after) {
			t.Error("a sweep does not mind what was current within 7 days")
		}
		harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '7 days 1 hour'")
		if left(t, pool, "10 hours", after) {
			t.Error("a sweep minds what was replaced long ago")
		}
		publish(t, pool, "web", after)
		if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.definitions"); n != 2 {
			t.Errorf("%d lists are known", n)
		}
		harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '367 days'")
		publish(t, pool, "web", after)
		if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.definitions"); n != 1 {
			t.Errorf("%d definitions are kept for over a year", n)
		}
	})

	t.Run("a rollback", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		for _, month := range []ratelimit.Limit{ratelimit.TokenBucket("api", 1000, 30*24*time.Hour), ratelimit.CalendarWindow("api", 1000, ratelimit.Month)} {
			harness.MustExec(t, pool, "DELETE FROM ratelimit.definitions")
			publish(t, pool, "web", month)
			publish(t, pool, "web", hourly) // by mistake
			for _, idle := range []string{"3 hours", "90 days"} {
				if !left(t, pool, idle, hourly) {
					t.Errorf("%v: a mistaken version refills a key that was idle for %s", month, idle)
				}
			}
			publish(t, pool, "web", month)
			if !left(t, pool, "3 hours", month) || !left(t, pool, "90 days", month) {
				t.Errorf("%v: rolled back, a key is refilled", month)
			}
			harness.MustExec(t, pool, "UPDATE ratelimit.definitions SET published_at = now() - interval '7 days 1 hour' WHERE NOT current")
			if !left(t, pool, "3 hours", month) || left(t, pool, "90 days", month) {
				t.Errorf("%v: later, its rows are not swept as usual", month)
			}
		}
		// The version that does not know the mistake sweeps its own numbers and those that are published.
		publish(t, pool, "other", ratelimit.Unlimited("elsewhere"))
		harness.MustExec(t, pool, "DELETE FROM ratelimit.definitions WHERE name = 'api'")
		publish(t, pool, "web", hourly)
		if n, err := new(ratelimit.Limiter).Sweep(t.Context(), pool, ratelimit.TokenBucket("api", 1000, 30*24*time.Hour)); n != 0 || err != nil {
			t.Errorf("not published, and another period: %d rows deleted, %v", n, err)
		}
	})

	t.Run("windows", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		from := func(start time.Time) ratelimit.Limit {
			return ratelimit.FixedWindow("api", 10, time.Hour, ratelimit.Start(start))
		}
		publish(t, pool, "web", from(harness.Noon))
		publish(t, pool, "web", from(harness.Noon.Add(-7*time.Hour))) // the same grid
		if left(t, pool, "4 hours", from(harness.Noon)) {
			t.Error("two starts of one grid")
		}
		for _, differs := range []ratelimit.Limit{from(harness.Noon.Add(time.Minute)), ratelimit.FixedWindow("api", 10, time.Hour)} {
			publish(t, pool, "web", differs)
			if !left(t, pool, "400 hours", differs) {
				t.Errorf("%v: two grids", differs)
			}
			harness.MustExec(t, pool, "DELETE FROM ratelimit.definitions WHERE current")
		}
	})

	t.Run("without the right to see them", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		role := harness.CreateRole(t, pool)
		harness.MustExec(t, pool, harness.Execute(role)+"; GRANT USAGE ON SCHEMA ratelimit TO "+role+"; GRANT ALL ON ratelimit.limits, ratelimit.holds TO "+role)
		sweeper := harness.AsRole(t, pool, role, 1)
		for _, table := range []string{"definitions", "overrides", ""} {
			_, err := new(ratelimit.Limiter).Sweep(t.Context(), sweeper, hourly)
			if table == "" && err != nil || table != "" && (harness.SQLState(err) != "42501" || !strings.Contains(err.Error(), table)) {
				t.Errorf("%v, want a missing right on %q", err, table)
			}
			if table != "" {
				harness.MustExec(t, pool, "GRANT SELECT ON ratelimit."+table+" TO "+role)
			}
		}
	})
}

// TestASweepOfALimitThatVaries deletes what no key's own numbers can need.
func TestASweepOfALimitThatVaries(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	row := func(key string, value float64, idle string, shards int) {
		t.Helper()
		for shard := range shards {
			harness.MustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('api', '%s', %d, %d, %g, now() - interval '%s')", key, shard, shards, value, idle))
		}
	}
	day := 24 * time.Hour
	for name, limit := range map[string]ratelimit.Limit{
		"bucket":  ratelimit.TokenBucket("api", 10, time.Hour, ratelimit.Varies(3*day)),
		"rate 0":  ratelimit.TokenBucket("api", 0, time.Hour, ratelimit.Varies(3*day)),
		"window":  ratelimit.FixedWindow("api", 10, time.Hour, ratelimit.Varies(3*day)),
		"day":     ratelimit.CalendarWindow("api", 10, ratelimit.Day, ratelimit.Varies(3*day)),
		"sharded": ratelimit.TokenBucket("api", 10, time.Hour, ratelimit.Shards(3), ratelimit.Varies(3*day)),
	} {
		harness.MustExec(t, pool, "TRUNCATE ratelimit.limits, ratelimit.overrides, ratelimit.definitions")
		shards := limit.Config().Shards
		row("idle", 0, "73 hours 1 minute", shards)
		row("full", 1000, "73 hours 1 minute", shards)
		row("used", 0, "72 hours 59 minutes", shards)
		row("full, and used", 10, "72 hours 59 minutes", shards)
		row("in debt", -1e-9, "700 days", shards)
		row("no debt, but for rounding", -5e-17, "700 days", shards)
		for _, key := range []string{"overridden", "blocked", "unlimited", "was blocked", "was blocked long ago"} {
			row(key, 5, "700 days", shards)
		}
		harness.MustExec(t, pool, `SELECT ratelimit.override('api', 'overridden', rate => 5, forever => true), ratelimit.block('api', 'blocked', forever => true), ratelimit.unlimited('api', 'unlimited', forever => true),
			ratelimit.block('api', 'was blocked', forever => true), ratelimit.block('api', 'was blocked long ago', forever => true), ratelimit.block('other', every_key => true, forever => true);
			UPDATE ratelimit.overrides SET removed_at = now() - CASE key WHEN 'was blocked' THEN interval '23 hours' ELSE interval '25 hours' END WHERE key LIKE 'was%'`)
		sweep := func() string {
			if _, err := new(ratelimit.Limiter).Sweep(t.Context(), pool, limit); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			return harness.Scan[string](t, pool, "SELECT coalesce(string_agg(DISTINCT key, '; '), '') FROM ratelimit.limits")
		}
		harness.MustExec(t, pool, "SELECT ratelimit.block('api', every_key => true, forever => true)")
		if got := sweep(); strings.Count(got, ";") != 10 {
			t.Errorf("%s: an override of all keys; left are %s", name, got)
		}
		harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET until = now() - interval '23 hours' WHERE key IS NULL")
		if got := sweep(); strings.Count(got, ";") != 10 {
			t.Errorf("%s: an override of all keys that ended less than a day ago; left are %s", name, got)
		}
		harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET until = now() - interval '25 hours' WHERE key IS NULL")
		// A version before has a longer time.
		longer := limit.Config()
		longer.Varies = "4d"
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", must(longer.Limit())))
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", limit))
		if got := sweep(); got != "blocked; full; full, and used; idle; in debt; overridden; unlimited; used; was blocked" {
			t.Errorf("%s: a version before varies within 4 days; left are %s", name, got)
		}
		harness.MustExec(t, pool, "DELETE FROM ratelimit.definitions WHERE NOT current")
		if got := sweep(); got != "blocked; full, and used; in debt; overridden; unlimited; used; was blocked" {
			t.Errorf("%s: left are %s", name, got)
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// TestASweepMindsAllDefinitionsAndOverrides: what is full by the largest capacity and the slowest rate is full by each.
func TestASweepMindsAllDefinitionsAndOverrides(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	const free, pro = `{"name": "api", "kind": "token bucket", "rate": 10, "period": "1 hour"}`, `{"name": "api", "kind": "token bucket", "rate": 100, "period": "1 hour"}`
	const none, varying = `{"name": "api", "kind": "token bucket", "rate": 0, "period": "1 day"}`, `{"name": "api", "kind": "token bucket", "rate": 0, "period": "1 hour", "varies": "3 days"}`
	const unlimited, longer = `{"name": "api", "kind": "unlimited"}`, `{"name": "api", "kind": "token bucket", "rate": 7, "period": "1 hour", "varies": "4 days"}`
	for name, tt := range map[string]struct {
		published []string // each by a program of its own
		given     string
		overrides string
		want      string
	}{
		"two programs":               {[]string{free, pro}, "", "", "rate 10, capacity 100"},
		"a given one":                {[]string{pro}, "10, '1 hour', 'token bucket', NULL, NULL, NULL", "", "rate 10, capacity 100"},
		"a given one alone":          {nil, "10, '1 hour', 'token bucket', 5, NULL, NULL", "", "rate 10, capacity 5"},
		"a given one of more":        {[]string{free}, "10, '1 hour', 'token bucket', 500, NULL, NULL", "", "rate 10, capacity 500"},
		"another period":             {[]string{free}, "10, '2 hours', 'token bucket', NULL, NULL, NULL", "", "nothing"},
		"another kind":               {[]string{free}, "10, '1 hour', 'fixed window', NULL, NULL, NULL", "", "nothing"},
		"a capacity that is a rate":  {[]string{free, pro}, "", "('numbers', 'api', 'ann', 500, NULL, NULL)", "rate 10, capacity 500"},
		"an override that had none":  {[]string{none}, "", "('numbers', 'api', 'ann', 500, NULL, NULL)", "rate 500, capacity 500"},
		"nothing, and unlimited":     {[]string{none, unlimited}, "", "", "nothing"},
		"unlimited, and a given one": {[]string{unlimited}, "10, '1 hour', 'token bucket', NULL, NULL, NULL", "", "rate 10, capacity 10"},
		"what ended an hour ago":     {[]string{free}, "", "('numbers', 'api', 'ann', 1, 500, now() - interval '1 hour')", "rate 1, capacity 500"},
		"what ended two days ago":    {[]string{free}, "", "('numbers', 'api', 'ann', 1, 500, now() - interval '2 days')", "rate 10, capacity 10"},
		"another limit's":            {[]string{free}, "", "('numbers', 'other', 'ann', 1, 500, NULL)", "rate 10, capacity 10"},
		"all vary":                   {[]string{varying, longer}, "", "('numbers', 'api', 'ann', 1, 500, NULL)", "varies 4 days"},
		"some vary":                  {[]string{varying, pro}, "", "('numbers', 'api', 'ann', 1, 500, NULL)", "rate 1, capacity 500, varies 3 days"},
		"a given one varies":         {nil, "10, '1 hour', 'token bucket', 20, NULL, '5 hours'", "", "varies 05:00:00"},
		"all keys have an override":  {[]string{varying}, "", "('numbers', 'api', NULL, 1, 500, NULL)", "nothing"},
	} {
		harness.MustExec(t, pool, "TRUNCATE ratelimit.overrides, ratelimit.definitions")
		for _, definition := range tt.published {
			harness.MustExec(t, pool, "SELECT ratelimit.publish(gen_random_uuid()::text, '["+definition+"]')")
		}
		if tt.overrides != "" {
			harness.MustExec(t, pool, "INSERT INTO ratelimit.overrides (effect, name, key, rate, capacity, until) VALUES "+tt.overrides)
		}
		given := tt.given
		if given == "" {
			given = "NULL, NULL, 'token bucket', NULL, NULL, NULL"
		}
		got := harness.Scan[string](t, pool, `SELECT CASE WHEN nothing THEN 'nothing' ELSE concat_ws(', ', 'rate ' || rate, 'capacity ' || capacity, 'varies ' || varies) END
			FROM ratelimit._sweep_numbers('api', `+given+`)`)
		if got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

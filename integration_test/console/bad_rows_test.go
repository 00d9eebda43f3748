package console_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// badRows are rows by hand that no program writes.
var badRows = []string{
	"INSERT INTO ratelimit.usage VALUES ('signUps', 'infinity', 1, 1, 1, 1, 1, 1)",
	"INSERT INTO ratelimit.usage VALUES ('signUps', '-infinity', 1, 1, 1, 1, 1, 1)",
	"INSERT INTO ratelimit.usage VALUES ('signUps', date_trunc('minute', now()), 9223372036854775807, 9223372036854775807, 9223372036854775807, 1, 1, 1)",
	"INSERT INTO ratelimit.usage VALUES ('other', date_trunc('minute', now()), 9223372036854775807, 9223372036854775807, 9223372036854775807, 1, 1, 1)",
	"INSERT INTO ratelimit.usage VALUES ('signUps', date_trunc('minute', now()) - interval '1 minute', 9223372036854775807, 9223372036854775807, 1, 1, 1, 1)",
	"INSERT INTO ratelimit.usage SELECT 'signUps', date_trunc('minute', now()) - n * interval '1 minute', 1, 1, 1, 1.7e308, 1.7e308, 1.7e308 FROM generate_series(2, 3) AS n",
	"INSERT INTO ratelimit.usage VALUES ('signUps', date_trunc('minute', now()) - interval '4 minutes', 1, 1, 1, 'NaN', 'Infinity', '-Infinity')",
	"INSERT INTO ratelimit.denials SELECT 'signUps', date_trunc('hour', now(), 'UTC') - n * interval '1 hour', 'b', 1, 1.7e308, now() FROM generate_series(0, 1) AS n",
	"INSERT INTO ratelimit.denials VALUES ('signUps', 'infinity', 'acme', 1, 1, now())",
	"INSERT INTO ratelimit.denials VALUES ('signUps', date_trunc('hour', now(), 'UTC'), 'acme', 9223372036854775807, 1, 'infinity')",
	"INSERT INTO ratelimit.denials VALUES ('signUps', date_trunc('hour', now(), 'UTC') - interval '1 hour', 'acme', 9223372036854775807, 1, '-infinity')",
	"INSERT INTO ratelimit.overrides (name, key, effect, rate, made_at) VALUES ('signUps', 'acme', 'numbers', 5, 'infinity')",
	"INSERT INTO ratelimit.overrides (name, effect, rate, made_at) VALUES ('signUps', 'numbers', 5, '-infinity')",
	"INSERT INTO ratelimit.overrides (name, effect, rate, removed_at, removed_by) VALUES ('signUps', 'numbers', 5, 'infinity', 'x')",
	"INSERT INTO ratelimit.overrides (name, key, effect, reason) VALUES ('signUps', 'x', 'block', repeat('x', 5000))",
	"INSERT INTO ratelimit.overrides (name, key, effect, made_by) VALUES ('signUps', 'x', 'block', repeat('x', 256))",
	"INSERT INTO ratelimit.overrides (name, key, effect, removed_by) VALUES ('signUps', 'x', 'block', repeat('x', 256))",
	"UPDATE ratelimit.definitions SET published_at = 'infinity'",
	"UPDATE ratelimit.definitions SET start = 'infinity' WHERE name = 'window'",
	"UPDATE ratelimit.definitions SET capacity = NULL WHERE name = 'seats'",
	"UPDATE ratelimit.definitions SET capacity = NULL WHERE name = 'signUps'",
	"UPDATE ratelimit.definitions SET period = NULL, rate = NULL WHERE name = 'window'",
}

// finiteRows are allowed, and no year that JSON can write.
var finiteRows = []string{
	"INSERT INTO ratelimit.overrides (name, key, effect, made_at, until) VALUES ('signUps', 'acme', 'block', '290000-01-01', '290000-01-01')",
	"INSERT INTO ratelimit.overrides (name, key, effect, until) VALUES ('signUps', 'acme', 'block', 'infinity')",
	"INSERT INTO ratelimit.usage VALUES ('signUps', '290000-01-01', 1, 1, 1, 1, 1, 1)",
	"INSERT INTO ratelimit.denials VALUES ('signUps', '290000-01-01', 'acme', 1, 1, '290000-01-01')",
	"INSERT INTO ratelimit.holds VALUES ('signUps', 'acme', 'a', 'held', 'tokens', NULL, 'NaN', 'infinity', 'NaN', 'NaN', 'infinity'), ('signUps', 'acme', 'b', 'nonsense', 'x', NULL, 'Infinity', '-infinity', 0, 1, '-infinity')",
	"INSERT INTO ratelimit.holds VALUES ('signUps', 'acme', '', 'held', 'x', gen_random_uuid(), '-Infinity', '290000-01-01', 0, 1, '290000-01-01'), ('signUps', 'acme', repeat('x', 1000), 'held', 'slots', NULL, 1e300, '-infinity', 0, 1, '-infinity')",
	"INSERT INTO ratelimit.holds VALUES ('seats', 'acme', E'\\x1b[31m', 'held', 'slots', gen_random_uuid(), 'NaN', 'infinity', 0, 1, '-infinity'), ('seats', '', 'c', 'held', 'slots', gen_random_uuid(), 'Infinity', 'infinity', 0, 1, '-infinity'), ('seats', 'acme', 'd', 'held', 'tokens', gen_random_uuid(), '-Infinity', now(), 'Infinity', 0, 'infinity')",
	"INSERT INTO ratelimit.limits VALUES ('seats', 'acme', 0, 1, 'NaN', now()), ('seats', '', 0, 1, '-Infinity', 'infinity'), ('seats', 'x', 3, 4, 'Infinity', '-infinity')",
}

// One bad row neither gets into the tables nor, if it is there all the same, keeps an operator from the page.
func TestOneBadRowBlindsNobody(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "token bucket", "rate": 10, "period": "1 hour"}, {"name": "window", "kind": "fixed window", "rate": 10, "period": "1 hour"}, {"name": "seats", "kind": "slots", "capacity": 2}]`)
	harness.MustExec(t, pool, "SELECT ratelimit.consume('signUps', 'acme')")
	for _, sql := range badRows {
		if _, err := pool.Exec(t.Context(), sql); harness.SQLState(err) != "23514" {
			t.Errorf("%s: %v, want a check that fails", sql, err)
		}
	}
	// As in a table of an older version, or one that was restored without checks.
	harness.MustExec(t, pool, `DO $$ DECLARE c record; BEGIN
		FOR c IN SELECT conrelid::regclass AS t, conname FROM pg_constraint WHERE contype = 'c' AND connamespace = 'ratelimit'::regnamespace AND conrelid::regclass::text ~ '(usage|denials|overrides|definitions)$'
		LOOP EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', c.t, c.conname); END LOOP; END $$`)
	p := harness.NewConsole(t, pool, "ann")
	for _, sql := range append(badRows, finiteRows...) {
		if sql == badRows[3] || sql == badRows[2] {
			harness.MustExec(t, pool, "DELETE FROM ratelimit.usage WHERE minute = date_trunc('minute', now())")
		}
		harness.MustExec(t, pool, sql)
		for _, page := range []string{"", "?span=6h", "limit?name=signUps", "limit?name=signUps&q=a", "limit?name=signUps&span=month", "key?name=signUps&key=acme", "key?name=signUps", "usage.json?name=signUps", "limit?name=window", "limit?name=seats", "key?name=seats&key=acme", "key?name=seats", "key?name=seats&key=x"} {
			p.Get(http.StatusOK, page)
		}
	}
}

// A row whose ts is infinite is shown as broken, and all others as they are, on the page and in SQL.
func TestARowWithAnInfiniteTime(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "bucket", "kind": "token bucket", "rate": 10, "period": "1000 hours"}, {"name": "window", "kind": "fixed window", "rate": 10, "period": "1000 hours"},
		{"name": "calendar", "kind": "calendar window", "rate": 10, "period": "1 year"}]`)
	p := harness.NewConsole(t, pool, "ann")
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	for _, limit := range []string{"bucket", "window", "calendar"} {
		exec("SELECT ratelimit.consume($1, 'sound', count => 10)", limit)
		for key, ts := range map[string][2]string{"ahead": {"infinity", "now"}, "past": {"now", "-infinity"}, "both": {"infinity", "-infinity"}} {
			exec("INSERT INTO ratelimit.limits SELECT $1, $2, n - 1, 2, 1, ($3::text[])[n]::timestamptz FROM generate_series(1, 2) AS n", limit, key, []string{ts[0], ts[1]})
		}
		const sql = "SELECT string_agg(key || ' ' || coalesce(remaining::text, 'NULL') || ' ' || (retry_at = 'infinity'), ', ' ORDER BY key) FROM ratelimit.keys($1) WHERE retry_at IS NOT NULL"
		want := "ahead NULL true, both NULL true, past NULL true, sound 0 false"
		if got := harness.Scan[string](t, pool, strings.Replace(sql, "remaining::text", "round(remaining::numeric)::text", 1), limit); got != want {
			t.Errorf("%s: %s, want %s", limit, got, want)
		}
		for _, key := range []string{"ahead", "past", "both"} {
			if text := p.Get(http.StatusOK, "key?name="+limit+"&key="+key); !strings.Contains(text, "Broken row") {
				t.Errorf("%s, %s: the page does not say that the row is broken", limit, key)
			}
		}
		if text := p.Get(http.StatusOK, "limit?name="+limit+"&q=s"); !strings.Contains(text, "sound") {
			t.Errorf("%s: the other key is not listed", limit)
		}
		p.Get(http.StatusOK, "limit?name="+limit+"&q=a")
		if swept := harness.Scan[int](t, pool, "SELECT deleted FROM ratelimit.sweep($1)", limit); swept != 0 {
			t.Errorf("%s: %d rows are swept", limit, swept)
		}
		exec("SELECT ratelimit.reset($1, 'past')", limit)
		exec("SELECT ratelimit.consume($1, 'past')", limit)
	}
}

// A role with the documented grants decides, and cannot rewrite who decided what.
func TestNobodyRewritesTheHistory(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	role := harness.CreateRole(t, pool)
	harness.GrantWork(t, pool, role, "operate")
	conn := harness.Acquire(t, pool)
	if _, err := conn.Exec(t.Context(), "SELECT ratelimit.block('x', 'before', forever => true); SET ROLE "+role+"; SELECT ratelimit.block('x', 'k', reason => 'r', who => 'somebody', forever => true); SELECT ratelimit.restore('x', 'k', who => 'somebody')"); err != nil {
		t.Fatal(err)
	}
	var by, as, removedBy, removedAs, session string
	err := conn.QueryRow(t.Context(), "SELECT made_by, made_as, removed_by, removed_as, session_user FROM ratelimit.overrides WHERE key = 'k'").Scan(&by, &as, &removedBy, &removedAs, &session)
	if err != nil || by != "somebody" || as != session || removedBy != "somebody" || removedAs != session {
		t.Errorf("made by %q as %q, removed by %q as %q, %v", by, as, removedBy, removedAs, err)
	}
	for _, column := range columnsOf(t, pool, "ratelimit.overrides") {
		if _, err := conn.Exec(t.Context(), "UPDATE ratelimit.overrides SET "+column+" = DEFAULT"); harness.SQLState(err) != "42501" {
			t.Errorf("it may write %s: %v", column, err)
		}
	}
	for _, sql := range []string{
		"DELETE FROM ratelimit.overrides", "TRUNCATE ratelimit.overrides",
		"INSERT INTO ratelimit.overrides (name, key, effect, made_as) VALUES ('x', 'k', 'unlimited', 'x')", "INSERT INTO ratelimit.overrides (name, key, effect, made_at) VALUES ('x', 'k', 'unlimited', '2000-01-01')",
		"INSERT INTO ratelimit.overrides (id, name, key, effect) OVERRIDING SYSTEM VALUE VALUES (9223372036854775807, 'x', 'k', 'unlimited')",
	} {
		if _, err := conn.Exec(t.Context(), sql); harness.SQLState(err) != "42501" {
			t.Errorf("%s: %v", sql, err)
		}
	}
	if _, err := conn.Exec(t.Context(), "RESET ROLE"); err != nil {
		t.Fatal(err)
	}
	// The functions that write with the rights of their owner are for this role alone, and no other schema takes their names over.
	other := harness.CreateRole(t, pool)
	harness.MustExec(t, pool, harness.Execute(other)+"; GRANT USAGE ON SCHEMA ratelimit TO "+other)
	for _, sql := range []string{"SELECT ratelimit.restore('x', 'before')", "SELECT ratelimit.unblock('x', 'before')", "SELECT ratelimit.add(1)"} {
		if _, err := conn.Exec(t.Context(), "SET ROLE "+other+"; "+sql); harness.SQLState(err) != "42501" {
			t.Errorf("%s: %v", sql, err)
		}
	}
	for _, sql := range []string{
		"RESET ROLE; CREATE TEMPORARY TABLE overrides (LIKE ratelimit.overrides); GRANT ALL ON pg_temp.overrides TO " + role,
		"SET ROLE " + role + "; SELECT ratelimit.restore('x', 'before')", "RESET ROLE; DROP TABLE pg_temp.overrides",
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides WHERE removed_at IS NULL"); n != 0 {
		t.Errorf("%d are in force, and all were restored", n)
	}
}

func columnsOf(t *testing.T, pool *pgxpool.Pool, table string) (columns []string) {
	t.Helper()
	columns = harness.Scan[[]string](t, pool, "SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = $1::text::regclass AND attnum > 0 AND NOT attisdropped", table)
	if len(columns) < 17 {
		t.Fatalf("the columns of %s: %q", table, columns)
	}
	return columns
}

package sql_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// published are the limits that the tests of SQL without numbers publish.
var published = []ratelimit.Limit{
	ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.Capacity(20), ratelimit.MaxReserved(5)),
	ratelimit.FixedWindow("window", 7, 36*time.Hour+time.Microsecond, ratelimit.Start(harness.Noon)),
	ratelimit.FixedWindow("sharded", 12, time.Hour, ratelimit.Shards(3)),
	ratelimit.CalendarWindow("calendar", 5, ratelimit.Month, ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor("2026-01-31 15:00:05")),
	ratelimit.Unlimited("open"),
	ratelimit.TokenBucket("none", 0, time.Hour),
	ratelimit.TokenBucket("varying", 3, 24*time.Hour, ratelimit.Varies(24*time.Hour)),
	ratelimit.CalendarWindow("varying month", 3, ratelimit.Month, ratelimit.Varies(32*24*time.Hour)),
}

func publishedPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := harness.NewPool(t, 4)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", published...))
	return pool
}

// TestByHandWithoutNumbers: the numbers are those that were published. It decides by the same clock as a call with the numbers, so
// the two take turns on one key and, at the same instants, give the same answers on two.
func TestByHandWithoutNumbers(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	for name, all := range map[string]string{
		"bucket":   "10, '1 minute', capacity => 20, max_reserved => 5",
		"window":   "7, '36:00:00.000001', kind => 'fixed window', start => '2026-01-01 12:00+00'",
		"calendar": "5, '1 month', kind => 'calendar window', zone => 'Europe/Berlin', anchor => '2026-01-31 15:00:05'",
		"none":     "0, '1 hour'",
	} {
		if name == "window" {
			all = strings.Replace(all, "2026-01-01 12:00+00", harness.Noon.Format(time.RFC3339), 1)
		}
		for i := range 12 {
			at := harness.Noon.Add(time.Duration(i*i) * time.Hour).Format(time.RFC3339)
			more := fmt.Sprintf("count => %d, now => '%s'", 1+i%4, at)
			function, numbers := "try", strings.Replace(all, ", max_reserved => 5", "", 1)
			if name != "none" && i%3 == 0 {
				function, numbers = "reserve", all
			}
			with := harness.Lines(t, pool, fmt.Sprintf("SELECT * FROM ratelimit._by_hand('%s', '%s', 'with', %s, %s)", function, name, numbers, more))
			without := harness.Lines(t, pool, fmt.Sprintf("SELECT * FROM ratelimit._by_hand('%s', '%s', 'without', %s)", function, name, more))
			if with != without || with == "" {
				t.Errorf("%s at %s: with numbers\n%s\nwithout\n%s", name, at, with, without)
			}
		}
	}
	// What may be owed is for reservations alone.
	for i, want := range []bool{true, false} {
		if granted := harness.Scan[bool](t, pool, "SELECT granted FROM ratelimit._by_hand('try', 'bucket', 'owes', count => $1, now => $2)", 20-18*i, harness.Noon); granted != want {
			t.Errorf("call %d of a bucket that may owe 5 to reservations: granted %v, want %v", i+1, granted, want)
		}
	}
	// The keys have the windows of the anchor, too.
	at := harness.Noon.Format(time.RFC3339)
	harness.MustExec(t, pool, "SELECT ratelimit._by_hand('consume', 'calendar', 'used up', count => 5, now => '"+at+"')")
	with := harness.Lines(t, pool, "SELECT * FROM ratelimit._keys('calendar', 5, '1 month', 'calendar window', NULL, NULL, 'Europe/Berlin', '2026-01-31 15:00:05', '{used up}', '"+at+"')")
	without := harness.Lines(t, pool, "SELECT * FROM ratelimit._keys('calendar', NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, '{used up}', '"+at+"')")
	if with != without || !strings.Contains(with, ":00:05") {
		t.Errorf("the keys of a calendar: with numbers\n%s\nwithout\n%s", with, without)
	}
	if got := harness.Scan[float64](t, pool, "SELECT remaining FROM ratelimit.consume('sharded', 'ann', count => 4)"); !harness.Near(got, 8) {
		t.Errorf("sharded: %v remain, want 8", got)
	}
	if got := harness.Scan[string](t, pool, "SELECT remaining::text || ' ' || taken FROM ratelimit.take('open', 'ann', most => 1000000000)"); got != "Infinity 1000000000" {
		t.Errorf("unlimited: %s", got)
	}
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.consume('none', 'ann')"); harness.SQLState(err) != "PT429" {
		t.Errorf("a rate of 0: %v", err)
	}
}

// TestByHandUnderOverrides: without numbers, overrides count. With numbers, they do not.
func TestByHandUnderOverrides(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	harness.MustExec(t, pool, `
		SELECT ratelimit.override('bucket', 'raised', rate => 100, forever => true), ratelimit.override('bucket', 'both', rate => 100, capacity => 100, forever => true),
		       ratelimit.block('bucket', 'blocked', until => '9000-01-01 00:00+00'), ratelimit.block('bucket', 'for good', forever => true), ratelimit.block('none', 'blocked', forever => true),
		       ratelimit.unlimited('bucket', 'free', forever => true), ratelimit.override('bucket', 'for good', capacity => 30, forever => true), ratelimit.override('calendar', every_key => true, rate => 2, forever => true);
		SELECT ratelimit.override('varying', 'ann', rate => 5, capacity => 5, forever => true), ratelimit.block('varying', 'eve', forever => true), ratelimit.unlimited('varying month', 'ann', forever => true),
		       ratelimit.override('varying', 'half', rate => 5, forever => true)`)
	harness.MustExec(t, pool, "DELETE FROM ratelimit.overrides AS o WHERE o.name = 'own'; INSERT INTO ratelimit.overrides (name, key, effect) VALUES ('own', 'blocked', 'block')") // of a limit that nobody publishes
	for call, want := range map[string]string{
		"'bucket', 'raised', count => 20":                      "t 0",
		"'bucket', 'both', count => 60":                        "t 40",
		"'bucket', 'blocked'":                                  "f 0 9000-01-01",
		"'bucket', 'blocked', count => 0":                      "f 0 9000-01-01",
		"'bucket', 'for good', count => 1e-16":                 "f 0",
		"'bucket', 'for good'":                                 "f 0",
		"'bucket', 'free', count => 1e12":                      "t Infinity",
		"'bucket', 'other', count => 20":                       "t 0",
		"'calendar', 'ann', count => 2":                        "t 0",
		"'varying', 'ann', count => 5":                         "t 0",
		"'varying', 'eve'":                                     "f 0",
		"'varying', 'bob', 7, '1 day'":                         "t 6",
		"'varying', 'half', 7, '1 day'":                        "t 4",
		"'varying month', 'ann'":                               "t Infinity",
		"'bucket', 'blocked', 10, '1 minute', capacity => 20":  "f 0 9000-01-01",
		"'bucket', 'for good', 10, '1 minute', capacity => 20": "f 0",
		"'bucket', 'free', 10, '1 minute', capacity => 20":     "t Infinity",
		"'own', 'free', 3, '1 hour'":                           "t 2",
		"'own', 'blocked', 3, '1 hour'":                        "f 0",
		"'none', 'blocked', count => 0":                        "f 0",
		"'own', 'blocked'":                                     "f 0",
	} {
		got := harness.Scan[string](t, pool, `SELECT concat_ws(' ', granted, floor(remaining), CASE WHEN NOT granted THEN to_char(retry_at AT TIME ZONE 'UTC', 'YYYY-MM-DD') END) FROM ratelimit.try(`+call+`)`)
		if got != want {
			t.Errorf("ratelimit.try(%s): %s, want %s", call, got, want)
		}
	}
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET ts = ts + interval '1 hour'") // nothing is refilled meanwhile
	keys := harness.Lines(t, pool, `SELECT key, floor(remaining) AS left, capacity, ceil(used), retry_at = 'infinity' OR retry_at > '8000-01-01' AS blocked FROM ratelimit.keys('bucket') ORDER BY key COLLATE "C"`)
	const want = "(blocked,0,20,,t)\n(both,40,100,60,)\n(\"for good\",0,30,,t)\n(free,Infinity,,,)\n(other,0,20,20,f)\n(raised,0,20,20,f)"
	if keys != want {
		t.Errorf("ratelimit.keys:\n%s\nwant\n%s", keys, want)
	}
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET ts = ts - interval '1 hour'")
	if some := harness.Lines(t, pool, "SELECT key FROM ratelimit.keys('bucket', keys => '{both,other,nobody}') ORDER BY key"); some != "(both)\n(other)" {
		t.Errorf("ratelimit.keys of some: %s", some)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.block('bucket', every_key => true, forever => true)")
	if all := harness.Lines(t, pool, "SELECT key FROM ratelimit.keys('bucket') WHERE retry_at = 'infinity' ORDER BY key COLLATE \"C\""); all != "(blocked)\n(\"for good\")\n(other)" { // the block of every key follows
		t.Errorf("everybody is blocked but those with overrides of their own: %s", all)
	}
	const notKnown = "(ann,0)\n(bob,)\n(eve,0)\n(half,)"
	if varying := harness.Lines(t, pool, "SELECT key, floor(remaining) FROM ratelimit.keys('varying') ORDER BY key"); varying != notKnown {
		t.Errorf("of keys with numbers of their own: %s, want %s", varying, notKnown)
	}
	if known := harness.Lines(t, pool, "SELECT key, floor(remaining) FROM ratelimit.keys('varying', 7, '1 day', keys => '{bob,half}') ORDER BY key"); known != "(bob,6)\n(half,4)" {
		t.Errorf("with numbers: %s", known)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.override('varying', every_key => true, rate => 4, capacity => 4, forever => true)")
	if all := harness.Lines(t, pool, "SELECT key, floor(remaining) FROM ratelimit.keys('varying') ORDER BY key"); all != "(ann,0)\n(bob,4)\n(eve,0)\n(half,)" {
		t.Errorf("numbers for all keys: %s", all)
	}
	if open := harness.Lines(t, pool, "SELECT * FROM ratelimit.keys('open')"); open != "" {
		t.Errorf("the keys of an unlimited limit: %s", open)
	}
}

// TestByHandKeysSaysWhatFollowsABlock: ratelimit.keys and ratelimit.try say when a blocked key is granted again, whether it has a row or not.
func TestByHandKeysSaysWhatFollowsABlock(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	const x, y = "9000-01-01 00:00:00+00", "9001-01-01 00:00:00+00"
	for _, c := range []struct {
		name, all string // the limit, and what is decided of every key
		want      string
	}{
		{"bucket", "", x},
		{"bucket", "block('bucket', every_key => true, until => '" + y + "')", y},
		{"bucket", "block('bucket', every_key => true, forever => true)", "infinity"},
		{"bucket", "block('bucket', every_key => true, until => '8000-01-01')", x},
		{"bucket", "unlimited('bucket', every_key => true, until => '" + y + "')", x},
		{"bucket", "override('bucket', every_key => true, rate => 1, until => '" + y + "')", x},
		{"none", "", "infinity"},
		{"none", "block('none', every_key => true, until => '" + y + "')", "infinity"},
		{"none", "override('none', every_key => true, rate => 1, until => '" + y + "')", x},
		{"none", "override('none', every_key => true, rate => 1, until => '8000-01-01')", "infinity"},
		{"none", "override('none', 'ann', rate => 1, forever => true)", x},
		{"none", "unlimited('none', every_key => true, until => '" + y + "')", x},
		{"open", "", x},
		{"open", "block('open', every_key => true, until => '" + y + "')", y},
		{"varying", "", x},
		{"varying", "block('varying', every_key => true, until => '" + y + "')", y},
	} {
		for _, row := range []string{"", "INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('" + c.name + "', 'ann', 0, 1, 1, now())"} {
			err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				sql := row + "; SELECT ratelimit.block('" + c.name + "', 'ann', until => '" + x + "')"
				if c.all != "" {
					sql += ", ratelimit." + c.all
				}
				if _, err := tx.Exec(t.Context(), "SET LOCAL TimeZone = 'UTC'; "+sql); err != nil {
					return err
				}
				var listed, tried string
				if err := tx.QueryRow(t.Context(), `SELECT (SELECT retry_at::text FROM ratelimit.keys($1) WHERE key = 'ann'), (SELECT coalesce(retry_at, 'infinity')::text FROM ratelimit.try($1, 'ann'))`, c.name).Scan(&listed, &tried); err != nil {
					return err
				}
				if listed != c.want || tried != c.want {
					t.Errorf("%s, blocked until %s, and then %q, row %t: ratelimit.keys says %s, ratelimit.try %s, want %s", c.name, x, c.all, row != "", listed, tried, c.want)
				}
				reason := "block"
				if c.name == "none" && !strings.Contains(c.all, "override") && !strings.Contains(c.all, "unlimited") {
					reason = "plan"
				}
				_, err := tx.Exec(t.Context(), "SELECT ratelimit.consume($1, 'ann')", c.name)
				if e := harness.PgError(t, err); !strings.Contains(e.Detail, `"reason" : "`+reason+`"`) {
					t.Errorf("%s, blocked, and %q: %s, want the reason %s", c.name, c.all, e.Detail, reason)
				}
				return harness.ErrRollBack
			})
			if !errors.Is(err, harness.ErrRollBack) {
				t.Errorf("%s, %q: %v", c.name, c.all, err)
			}
		}
	}
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "worker", ratelimit.Slots("no slots", 0)))
	harness.MustExec(t, pool, "SELECT ratelimit.block('no slots', 'ann', forever => true)")
	_, err := pool.Exec(t.Context(), "SELECT ratelimit.hold('no slots', 'ann', 'job', ttl => '1 minute')")
	if e := harness.PgError(t, err); !strings.Contains(e.Detail, `"reason" : "plan"`) {
		t.Errorf("blocked, and without slots: %s", e.Detail)
	}
}

// TestSteeringRefusesWhatIsWrong: 22023 and a text that says what to do.
func TestSteeringRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	for call, text := range map[string]string{
		"ratelimit.consume('varying', 'ann')":                                                                                 "rate limit 'varying': the numbers of this key are the program's",
		"ratelimit.consume('varying month', 'ann', count => 0)":                                                               "rate limit 'varying month': the numbers of this key are the program's",
		"ratelimit.consume('bucket', 'ann', 10, '2 hours')":                                                                   "kind, period, start, zone and anchor must be those that a program has published, a token bucket of 00:01:00, not a token bucket of 02:00:00",
		"ratelimit.try('bucket', 'ann', 10, '1 minute', kind => 'fixed window')":                                              "not a fixed window of 00:01:00",
		"ratelimit.take('bucket', 'ann', 10, '1 minute', most => 2)":                                                          "rate and capacity must be those that a program has published, not 10 and 10",
		"ratelimit.reserve('bucket', 'ann', 20, '1 minute', capacity => 40)":                                                  "not 20 and 40",
		`ratelimit.consume_all('[{"name": "varying", "key": "ann", "rate": 9, "period": "1 hour"}]')`:                         "a token bucket of 1 day, not a token bucket of 01:00:00",
		"ratelimit.consume('calendar', 'ann', 5, '1 month', kind => 'calendar window')":                                       "in Europe/Berlin from",
		"ratelimit.consume('typo', 'ann')":                                                                                    "rate limit 'typo': no program has published it",
		"ratelimit.override('open', 'ann', rate => 5, forever => true)":                                                       "it is defined as unlimited: numbers change nothing of it, but ratelimit.block does",
		"ratelimit.keys('typo')":                                                                                              "no program has published it",
		"ratelimit.restore('typo', 'ann')":                                                                                    "nobody knows it: no program has published it, and it has no row and no override",
		"ratelimit.unblock('typo', every_key => true)":                                                                        "nobody knows it",
		"ratelimit.resume('typo', 'ann')":                                                                                     "nobody knows it",
		"ratelimit.reset('typo', 'ann')":                                                                                      "nobody knows it",
		"ratelimit.reset('typo', 'ann', who => 'ben')":                                                                        "nobody knows it",
		"ratelimit.release('typo', 'ann', 'job', who => 'ben')":                                                               "nobody knows it",
		"ratelimit.holds('typo', 'ann')":                                                                                      "nobody knows it",
		"ratelimit.usage('typo')":                                                                                             "nobody knows it",
		"ratelimit.sweep('typo')":                                                                                             "no program has published it",
		"ratelimit.consume('bucket', '')":                                                                                     "key must have 1 to 1024 bytes, not",
		"ratelimit.consume('bucket', 'ann', count => 21)":                                                                     "count must be at most 20, not 21: more can never be granted",
		"ratelimit.override('typo', 'ann', rate => 1, forever => true)":                                                       "no program has published a limit of this name, but 'none', 'open', 'bucket', 'window', 'sharded', 'varying', 'calendar', 'varying month'",
		"ratelimit.override('bucket', 'ann', forever => true)":                                                                "rate, capacity or max_reserved must be given, not NULL",
		"ratelimit.override('bucket', '', rate => 1, forever => true)":                                                        "key must have 1 to 1024 bytes, not 0; global => true is for a limit without keys",
		"ratelimit.override('bucket', NULL, rate => 1, forever => true)":                                                      "key must be given, not NULL: every_key => true is for every key, global => true for a limit without keys",
		"ratelimit.restore('bucket')":                                                                                         "key must be given, not NULL",
		"ratelimit.unblock('bucket', (SELECT 'ann' WHERE false))":                                                             "key must be given, not NULL",
		"ratelimit.block('bucket', 'ann', forever => true, every_key => true)":                                                "key must be NULL, and global false, with every_key => true",
		"ratelimit.block('bucket', forever => true, every_key => true, global => true)":                                       "key must be NULL, and global false, with every_key => true",
		"ratelimit.block('bucket', 'ann', forever => true, global => true)":                                                   "key must be NULL with global => true",
		"ratelimit.block('bucket', 'ann', forever => true, every_key => NULL)":                                                "global and every_key must be true or false, not NULL",
		"ratelimit.override('bucket', repeat('k', 1025), rate => 1, forever => true)":                                         "key must have 1 to 1024 bytes, not 1025",
		"ratelimit.override('bucket', 'ann', rate => 0, forever => true)":                                                     "rate must be between 1e-15 and 1e15, not 0",
		"ratelimit.override('bucket', 'ann', rate => 'NaN', forever => true)":                                                 "between 1e-15 and 1e15, not NaN",
		"ratelimit.override('bucket', 'ann', capacity => -1, forever => true)":                                                "capacity must be 0 or between 1e-15 and 1e15, not -1",
		"ratelimit.override('bucket', 'ann', max_reserved => 'Infinity', forever => true)":                                    "max_reserved must be 0 or between 1e-15 and 1e15, not Infinity",
		"ratelimit.override(NULL, 'ann', rate => 1, forever => true)":                                                         "name must have 1 to 255 bytes, not",
		"ratelimit.block('bucket', 'ann', until => now())":                                                                    "until must be in the future, not 20",
		"ratelimit.unlimited('bucket', 'ann', until => '2000-01-01 00:00Z')":                                                  "until must be in the future, not 20",
		"ratelimit.restore('bucket', 'ann', 'nonsense')":                                                                      "effect must be 'numbers', 'block', 'unlimited' or NULL, which is all of them, not 'nonsense'",
		"ratelimit.block('bucket', 'k', reason => repeat('é', 2048) || 'x', forever => true)":                                 "reason is longer than 4096 bytes",
		"ratelimit.block('bucket', 'k', reason => repeat('x', 100 * 1024 * 1024), forever => true)":                           "reason is longer than 4096 bytes",
		"ratelimit.unlimited('bucket', 'k', who => repeat('é', 128), forever => true)":                                        "who is longer than 255 bytes",
		"ratelimit.restore('bucket', 'k', who => repeat('x', 256))":                                                           "who is longer than 255 bytes",
		"ratelimit.unblock('bucket', 'k', who => repeat('x', 256))":                                                           "who is longer than 255 bytes",
		"ratelimit.publish('p', NULL)":                                                                                        "definitions must be a JSON array, not",
		`ratelimit.publish('p', '{"name": "x"}')`:                                                                             "definitions must be a JSON array, not",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 minute", "maxReserve": 5}]')`: "a definition has no field maxReserve",
		`ratelimit.publish('p', '[{"name": "x", "max_reserved": 1, "maxReserved": 5}]')`:                                      "definition 1: max_reserved is there twice, once as maxReserved",
		`ratelimit.publish('p', '[{"name": "x", "rate": 1, "period": "1 hour"}]')`:                                            "rate limit 'x': kind must be 'token bucket', 'fixed window', 'calendar window', 'slots' or 'unlimited', not NULL",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": -1, "period": "1 hour"}]')`:                   "rate must be 0 or between 1e-15 and 1e15, not -1",
		`ratelimit.publish('p', '[{"name": "x", "kind": "unlimited"}, 7]')`:                                                   "definition 2 must be a JSON object, not number",
		`ratelimit.publish('p', '[{"name": "x", "kind": "unlimited", "rate": 1}]')`:                                           "an unlimited limit must have no field but name and kind",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 0, "period": "1 minute", "capacity": 3}]')`:   "capacity and max_reserved must be NULL or 0 with a rate of 0, not 3 and NULL",
		"ratelimit.add(NULL)": "id must be of an override in force that changes numbers, not NULL: there is no override of this id",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 15:00Z"}]')`:              "2026-01-31 15:00, not '2026-01-31 15:00Z'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31T15:00"}]')`:               "2026-01-31 15:00, not '2026-01-31T15:00'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 15:00+02"}]')`:            "2026-01-31 15:00, not '2026-01-31 15:00+02'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 15:00:05.5"}]')`:          "2026-01-31 15:00, not '2026-01-31 15:00:05.5'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 3 PM"}]')`:                "2026-01-31 15:00, not '2026-01-31 3 PM'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 24:00"}]')`:               "2026-01-31 15:00, not '2026-01-31 24:00'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 23:59:60"}]')`:            "2026-01-31 15:00, not '2026-01-31 23:59:60'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "zone": "CET-1CEST,M3.5.0/2,M10.5.0/3"}]')`:     "zone must be 'UTC' or a name with a slash",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "31.1.2026"}]')`:                      "2026-01-31 15:00, not '31.1.2026'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "infinity"}]')`:                       "2026-01-31 15:00, not 'infinity'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "now"}]')`:                            "2026-01-31 15:00, not 'now'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "10000-01-01"}]')`:                    "2026-01-31 15:00, not '10000-01-01'",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-01-31 15:00 Europe/Berlin"}]')`: "2026-01-31 15:00, not '2026-01-31 15:00 Europe/Berlin'",
		"ratelimit.publish('p', '[]')":                                                                                                            "definitions must not be empty. To withdraw what program 'p' has published: SELECT ratelimit.withdraw('p')",
		"ratelimit.withdraw('nobody')":                                                                                                            "program must be one that has published limits, not 'nobody'",
		"ratelimit.withdraw(NULL)":                                                                                                                "program must be one that has published limits, not NULL",
		`ratelimit.publish('', '[{"name": "x", "kind": "unlimited"}]')`:                                                                           "program must have 1 to 255 bytes, not 0",
		`ratelimit.publish('p', '[{"kind": "unlimited"}]')`:                                                                                       "name must have 1 to 255 bytes, not",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 1}]')`:                                                            "without months and years, not NULL",
		`ratelimit.publish('p', '[{"name": "x", "kind": "unlimited"}, {"name": "x", "kind": "unlimited"}]')`:                                      "rate limit 'x': name is in the list twice, but a name has one definition",
		`ratelimit.publish('p', '[{"name": "x", "kind": "unlimited", "varies": "1 day"}]')`:                                                       "an unlimited limit must have no field but name and kind",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 minute", "varies": "0"}]')`:                       "without months and years, not 00:00:00",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 minute", "varies": "1 month"}]')`:                 "without months and years, not 1 mon",
		`ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 minute", "capacity": 61, "varies": "1 hour"}]')`:  "varies must be at least 3660 s, which its numbers need to fill a row, not 3600 s",
		`ratelimit.publish('p', '[{"name": "x", "kind": "fixed window", "rate": 2, "period": "1 minute", "capacity": 3, "varies": "1 minute"}]')`: "varies must be at least 120 s, which its numbers need",
		`ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 2, "period": "1 month", "varies": "31 days"}]')`:               "varies must be at least 2764800 s, which its numbers need",
		`ratelimit.publish('p', '[{"name": "bucket", "kind": "fixed window", "rate": 1, "period": "1 minute"}]')`:                                 "rate limit 'bucket': program 'p' defines a fixed window of 00:01:00, and program 'web' a token bucket of 00:01:00: both would grant",
		`ratelimit.publish('p', '[{"name": "bucket", "kind": "token bucket", "rate": 1, "period": "2 minutes"}]')`:                                "program 'p' defines a token bucket of 00:02:00",
		`ratelimit.publish('p', '[{"name": "window", "kind": "fixed window", "rate": 1, "period": "36:00:00.000001"}]')`:                          "both would grant",
	} {
		_, err := pool.Exec(t.Context(), "SELECT "+call)
		if harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %q", call, err, text)
		}
	}
	if rows := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides"); rows != 0 {
		t.Errorf("%d overrides", rows)
	}
}

// TestPublishReadsFieldsAsRatelimitAllDoes: a field of another type, or a number that no double can be, is 22023 and names limit and field.
func TestPublishReadsFieldsAsRatelimitAllDoes(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	for definition, want := range map[string]string{
		`{"name": "x", "kind": "token bucket", "rate": "abc", "period": "1 hour"}`:                       `rate limit 'x': rate must be a JSON number, not string`,
		`{"name": "x", "kind": "token bucket", "rate": "10", "period": "1 hour"}`:                        `rate limit 'x': rate must be a JSON number, not string`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": 60}`:                                 `rate limit 'x': period must be a JSON string, not number`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 minutte"}`:                        `rate limit 'x': period: invalid input syntax for type interval`,
		`{"name": "x", "kind": "token bucket", "rate": 1e400, "period": "1 hour"}`:                       `rate limit 'x': rate: "1`,
		`{"name": "x", "kind": "token bucket", "rate": 1e-400, "period": "1 hour"}`:                      `rate limit 'x': rate: "0.`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "capacity": true}`:         `rate limit 'x': capacity must be a JSON number, not boolean`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "capacity": null}`:         `rate limit 'x': capacity is null: leave it out`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "max_reserved": [1]}`:      `rate limit 'x': max_reserved must be a JSON number, not array`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "shards": 1.5}`:            `rate limit 'x': shards must be a whole number between 1 and 100, not 1.5`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "shards": 101}`:            `rate limit 'x': shards must be a whole number between 1 and 100, not 101`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "shards": 1e300}`:          `rate limit 'x': shards must be a whole number between 1 and 100, not 1e+300`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "shards": "2"}`:            `rate limit 'x': shards must be a JSON number, not string`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "varies": 0}`:              `rate limit 'x': varies must be a JSON string, not number`,
		`{"name": "x", "kind": "token bucket", "rate": 1, "period": "1 hour", "varies": "soon"}`:         `rate limit 'x': varies: invalid input syntax for type interval`,
		`{"name": "x", "kind": "fixed window", "rate": 1, "period": "1 hour", "start": 0}`:               `rate limit 'x': start must be a JSON string, not number`,
		`{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "zone": 1}`:              `rate limit 'x': zone must be a JSON string, not number`,
		`{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": 2026}`:         `rate limit 'x': anchor must be a JSON string, not number`,
		`{"name": "x", "kind": "calendar window", "rate": 1, "period": "1 day", "anchor": "2026-02-31"}`: `rate limit 'x': anchor: date/time field value out of range`,
		`{"name": "x", "kind": 7}`:              `rate limit 'x': kind must be a JSON string, not number`,
		`{"name": 7, "kind": "unlimited"}`:      `definition 2: name must be a JSON string, not number`,
		`{"name": null, "kind": "unlimited"}`:   `definition 2: name is null: leave it out`,
		`{"kind": "token bucket", "rate": "1"}`: `definition 2: rate must be a JSON number, not string`,
	} {
		_, err := pool.Exec(t.Context(), "SELECT ratelimit.publish('p', $1::text::jsonb)", `[{"name": "good", "kind": "unlimited"}, `+definition+`]`)
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "22023" || !strings.HasPrefix(pgErr.Message, want) {
			t.Errorf("%s: %v, want %q", definition, err, want)
		}
	}
	harness.MustExec(t, pool, `SELECT ratelimit.publish('p', '[{"name": "x", "kind": "token bucket", "rate": 1e1, "period": "1 hour", "shards": 2.0}]')`)
	if got := harness.Lines(t, pool, "SELECT definition, shards FROM ratelimit.definitions"); got != `("token bucket, 10 per 01:00:00, capacity 10, 2 shards",2)` {
		t.Error(got)
	}
}

// TestAMistypedNameIsToldTheNearest of those that are published, and not all of them.
func TestAMistypedNameIsToldTheNearest(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limits := []ratelimit.Limit{ratelimit.TokenBucket("sendMessage", 1, time.Hour), ratelimit.TokenBucket("signUps", 1, time.Hour)}
	for i := range 488 {
		limits = append(limits, ratelimit.TokenBucket(fmt.Sprintf("plan %d", i), 1, time.Hour))
	}
	for _, list := range [][]ratelimit.Limit{{ratelimit.TokenBucket("sendMessages", 1, time.Hour)}, limits} { // the first counts no more
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", list...))
	}
	for name, nearest := range map[string]string{
		"sendmessage": "'sendMessage'", "sendMesage": "'sendMessage'", "SIGNUPS": "'signUps'", "singUps": "'signUps'", "messages": "'sendMessage'", "plan 4711": "'plan 471'", "x": "'plan 0'",
	} {
		_, err := pool.Exec(t.Context(), "SELECT ratelimit.block($1, 'ann', forever => true)", name)
		want := "no program has published a limit of this name, but " + nearest + ", "
		if harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), " and 480 others") || strings.Count(err.Error(), "', '") != 9 {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}

func TestPublish(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	publish := func(program string, limits ...ratelimit.Limit) {
		t.Helper()
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, program, limits...))
	}
	current := func() string {
		return harness.Lines(t, pool, "SELECT program, name, definition FROM ratelimit.definitions WHERE current ORDER BY 1, 2, 3")
	}
	old := ratelimit.TokenBucket("api", 10, time.Minute)
	publish("web", old, ratelimit.Unlimited("open"))
	publish("worker", ratelimit.TokenBucket("api", 30, time.Minute)) // other numbers, or another version of them
	if got, want := current(), `(web,api,"token bucket, 10 per 00:01:00, capacity 10")`+"\n(web,open,unlimited)\n"+`(worker,api,"token bucket, 30 per 00:01:00, capacity 30")`; got != want {
		t.Errorf("published:\n%s\nwant\n%s", got, want)
	}
	// All processes of a program start at once.
	failures := make(chan error, 8)
	for range 8 {
		go func() {
			failures <- new(ratelimit.Limiter).Publish(context.WithoutCancel(t.Context()), pool, "web", ratelimit.TokenBucket("api", 5, time.Minute))
		}()
	}
	for range 8 {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
	if got, want := current(), `(web,api,"token bucket, 5 per 00:01:00, capacity 5")`+"\n"+`(worker,api,"token bucket, 30 per 00:01:00, capacity 30")`; got != want {
		t.Errorf("published again:\n%s\nwant\n%s", got, want)
	}
	if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "web", ratelimit.TokenBucket("api", 1, 0)); err == nil || harness.SQLState(err) != "" {
		t.Errorf("an invalid limit: %v", err)
	}
	if err := new(ratelimit.Limiter).Publish(t.Context(), nil, "web", old); err == nil {
		t.Error("without a DB, it worked")
	}
	if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "web", []ratelimit.Limit{}...); !errors.Is(err, ratelimit.ErrInvalid) || harness.SQLState(err) != "" {
		t.Errorf("no limits: %v", err)
	}
	withdrawn := func() int { return harness.Scan[int](t, pool, "SELECT ratelimit.withdraw('web')") }
	if first, again := withdrawn(), withdrawn(); first != 1 || again != 0 {
		t.Errorf("%d and %d limits were withdrawn", first, again)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.withdraw('worker')")
	if got := current(); got != "" {
		t.Errorf("of nothing:\n%s", got)
	}
}

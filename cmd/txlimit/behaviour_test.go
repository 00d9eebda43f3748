package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/ratelimit"
)

// parse reads what a command printed with --json.
func parse[T any](t *testing.T, r result) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(r.out), &v); err != nil {
		t.Fatalf("%v: %s", err, r)
	}
	return v
}

// limitsRead is what `limits` prints, as far as these tests read it. A ratelimit.Config refuses fields that it does not know.
type limitsRead struct {
	Limits []struct {
		KeyCount      int64
		KeyCountExact bool
		LastHour      *lastHour
	}
	UsageUnreadable bool
}

// newPublished makes a database in which a program has published limits.
func newPublished(t *testing.T, limits ...ratelimit.Limit) *world {
	t.Helper()
	w := newMigrated(t)
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "api", limits...); err != nil {
		t.Fatal(err)
	}
	return w
}

// What else show says is compared with the library by TestEverySourceSaysTheSame.
func TestShowSaysUntilWhenTokensAreOwed(t *testing.T) {
	limit := ratelimit.FixedWindow("window", 2, 1000*time.Hour, ratelimit.Capacity(5))
	w := newPublished(t, limit)
	var limiter ratelimit.Limiter
	for key, charge := range map[string]float64{"owes": 8, "has": 3} {
		if _, err := limiter.Charge(t.Context(), w.conn, limit.Key(key).Count(charge)); err != nil {
			t.Fatal(err)
		}
		k := parse[keyDetails](t, w.run("show", "window", key, "--json"))
		owing, err := limiter.Check(t.Context(), w.conn, limit.Key(key).Count(0)) // denied while tokens are owed
		if (err != nil) != (key == "owes") || (k.OwedUntil != nil) != (key == "owes") || k.OwedUntil != nil && !k.OwedUntil.Equal(owing.RetryAt) {
			t.Errorf("%s: show says owed until %v, and Check says %v, %v", key, k.OwedUntil, owing.RetryAt, err)
		}
	}
}

func TestAnInstantAheadIsNeverTooEarly(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 27, 12, 0, 0, 1000, time.UTC)
	for wait, want := range map[time.Duration]string{
		1: "2026-11-27 12:00:01Z (in 1ms)", 999_999 * time.Microsecond: "2026-11-27 12:00:01Z (in 1s)", 2*time.Second + 1: "2026-11-27 12:00:03Z (in 2.1s)",
		time.Minute + 1: "2026-11-27 12:01:01Z (in 1m01s)", time.Hour + time.Second: "2026-11-27 13:00:02Z (in 1h01m)", 24*time.Hour + 1: "2026-11-28 12:00:01Z (in 1d01h)",
	} {
		if t1 := at.Add(wait); until(&t1, at) != want {
			t.Errorf("%v: %s, want %s", wait, until(&t1, at), want)
		}
	}
}

// TestShowIsOfOneSnapshot: an override that commits while show reads is in all of what it says, or in none of it.
func TestShowIsOfOneSnapshot(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 10, 100000*time.Hour))
	w.sql("SELECT ratelimit.consume('l', 'k', rate => 10, period => '100000 hours')")
	for i, change := range []string{"ratelimit.override('l', 'k', rate => 500, forever => true)", "ratelimit.block('l', 'k', forever => true)"} {
		for _, args := range [][]string{{"show", "l", "k"}, {"show", "l", "k", "--json"}} {
			// It has read which overrides are in force when it comes to the definitions.
			w.sql("BEGIN; LOCK TABLE ratelimit.definitions")
			shown := make(chan result, 1)
			go func() { shown <- w.run(args...) }()
			for waits := false; !waits; time.Sleep(10 * time.Millisecond) {
				// Without pg_stat_activity, which does not change in a transaction.
				if err := w.conn.QueryRow(t.Context(), "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid)))", int32(w.conn.PgConn().PID())).Scan(&waits); err != nil {
					t.Fatal(err)
				}
				if len(shown) > 0 {
					t.Fatalf("it did not wait: %s", <-shown)
				}
			}
			w.sql("SELECT " + change)
			w.sql("COMMIT")
			r := <-shown
			r.wants(t, exitOK)
			if len(args) > 3 {
				k := parse[keyDetails](t, r)
				if k.Override != nil || len(k.History) > 0 || k.Reason != "" || *k.Denied || *k.Numbers.Rate != 10 || *k.Remaining < 9 {
					t.Errorf("%d: %s", i, r)
				}
			} else if r.wants(t, exitOK, "balance +9(\\.\\d+)? of 10", "denied +no"); strings.Contains(r.out, "override") || strings.Contains(r.out, "in force") {
				t.Errorf("%d: %s", i, r)
			}
			w.sql("DELETE FROM ratelimit.overrides")
		}
	}
}

// snapshotSeen is an output that asks, at each Write, how many snapshots the sessions of an application hold.
type snapshotSeen struct {
	w      *world
	most   int
	writes int
}

func (s *snapshotSeen) Write(b []byte) (int, error) {
	var held int
	err := s.w.conn.QueryRow(s.w.t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND (backend_xmin IS NOT NULL OR xact_start IS NOT NULL)", s.w.name).Scan(&held)
	s.most, s.writes = max(s.most, held), s.writes+1
	return len(b), err
}

// TestAnAnswerIsPrintedWithoutASnapshot: a pager in which somebody reads for hours holds back no vacuum.
func TestAnAnswerIsPrintedWithoutASnapshot(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, 100000*time.Hour))
	w.sql("SELECT ratelimit.consume('l', 'k', rate => 1, period => '100000 hours'), ratelimit.hold('l', 'other', 'job', 0, forever => true), ratelimit.block('l', every_key => true, forever => true)")
	w.sql("INSERT INTO ratelimit.denials VALUES ('l', date_trunc('hour', now(), 'UTC'), 'k', 1, 1, now())")
	w.url += "&application_name=" + w.name
	for _, args := range [][]string{
		{"limits"}, {"keys", "l"}, {"keys", "l", "--all"}, {"keys", "l", "--denied"}, {"show", "l", "k"}, {"show", "l"}, {"show", "l", ""}, {"overrides"}, {"overrides", "--all"}, {"holds", "l"}, {"locks", "--old", "1h"},
	} {
		for _, args := range [][]string{args, append([]string{"--json"}, args...)} {
			seen := &snapshotSeen{w: w}
			w.change = func(a *app) { a.stdout, a.stderr = seen, seen }
			if r := w.run(args...); seen.most > 0 || seen.writes == 0 {
				t.Errorf("%d writes, during which it has at most %d transactions open: %s", seen.writes, seen.most, r)
			}
		}
	}
}

func TestManyKeysAreEstimated(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("many", 1, time.Hour))
	w.sql("INSERT INTO ratelimit.limits SELECT 'many', 'key' || n, 0, 1, 0, now() FROM generate_series(1, 5000) AS n")
	w.sql("ANALYZE ratelimit.limits")
	for _, count := range []bool{false, true} {
		args := []string{"limits", "--json"}
		if count {
			args = append(args, "--count")
		}
		l := parse[limitsRead](t, w.run(args...)).Limits[0]
		if l.KeyCountExact != count || l.KeyCount < 4000 || l.KeyCount > 6000 || count && l.KeyCount != 5000 {
			t.Errorf("%q: %d keys, exact: %v", args, l.KeyCount, l.KeyCountExact)
		}
	}
	w.run("limits").wants(t, exitOK, `many .* ~[0-9],`)
	w.run("limits", "--count").wants(t, exitOK, ` 5,000 `)
	if n := strings.Count(w.run("keys", "many").out, "\n"); n != 21 {
		t.Errorf("%d lines, want a title and 20 keys", n)
	}
}

// evil is a key that would clear the screen.
const evil = "\x1b[2J\x07|\u202eevil\n\u009b31m\x7f\u2066\u200b\ufeff\U000e0041"

func TestNoEscapeReachesTheTerminal(t *testing.T) {
	limit := ratelimit.TokenBucket("name\x1b[31m", 1, 100000*time.Hour)
	w := newMigrated(t)
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "pro\x1b[31mgram", limit); err != nil {
		t.Fatal(err)
	}
	name := limit.Name()
	w.sql("SELECT ratelimit.consume($1, $2, rate => 1, period => '100000 hours')", name, evil)
	w.sql("INSERT INTO ratelimit.denials VALUES ($1, date_trunc('hour', now(), 'UTC'), $2, 1, 1, now())", name, evil)
	w.sql("INSERT INTO ratelimit.holds VALUES ($1, $2, $2, 'held', $2, NULL, 1, now(), 0, 1, 'infinity')", name, evil)
	bad := regexp.MustCompile(`[\x00-\x09\x0b-\x1f\x7f\x{80}-\x{9f}\p{Cf}]`)
	for _, args := range [][]string{
		{"limits"},
		{"locks"},
		{"override", name, evil, "--rate", "3", "--reason", evil, "--who", evil, "--for", "1h"},
		{"block", name, evil, "--reason", evil, "--forever"},
		{"keys", name},
		{"keys", name, "--denied"},
		{"keys", evil},
		{"show", name, evil},
		{"show", evil, evil},
		{"overrides"},
		{"overrides", "--all"},
		{"unblock", name, evil},
		{"unblock", name, evil},
		{"reset", name, evil, "--yes"},
		{"reset", name, evil, "--yes"},
		{"reset", name, evil},
		{"holds", name},
		{"holds", name, evil},
		{"holds", evil},
		{"release", name, evil, evil},
		{"release", name, evil, evil, "--yes", "--reason", evil, "--who", evil},
		{"release", name, evil, "~" + evil, "--yes"},
		{"restore", name, evil, "--who", evil},
		{"sweep"},
		{"publish", evil},
		{evil},
		{"limits", evil},
		{"limits", "--" + evil},
		{"override", name, "--rate", evil, "--forever"},
		{"override", name, "x", "--rate", "1", "--until", evil},
		{"replay", "--log", evil + ".csv", "--time", evil, "-c", evil},
		{"replay", "--log", evil + ".csv", "--time", evil, "-c", "1/1h"},
		{"replay", "--query", "SELECT now(), " + "'" + evil + "'", "-c", "1/1h"},
		{"replay", "--query", evil, "-c", "1/1h"},
		{"migrate", evil},
	} {
		for _, args := range [][]string{args, append([]string{"--json"}, args...)} {
			r := w.run(args...)
			if s := bad.FindString(r.out + r.errOut); s != "" {
				t.Errorf("%q prints %q: %q", args, s, r.out+r.errOut)
			}
		}
	}
	// JSON says the same all the same.
	if list := parse[overrideList](t, w.run("overrides", "--all", "--json")); len(list.Overrides) < 2 || list.Overrides[0].Effect != effectReset || *list.Overrides[0].Key != evil || list.Overrides[1].Reason != evil {
		t.Errorf("%+v", list)
	}
}

func TestKeysThatNoServerTakes(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour))
	long := strings.Repeat("é", 512) // 1024 bytes
	for _, row := range []struct{ text, want string }{
		{"\xff", "is not valid UTF-8"}, {"a\x00b", "has a NUL byte"}, {long + "k", "has 1025 bytes, and 1024 are allowed"}, {strings.Repeat("k", 100_000), "has 100000 bytes, and 1024 are allowed"},
	} {
		key, id := row.text, strings.Replace(row.want, "1024 are", "255 are", 1)
		for _, command := range [][]string{
			{"show", "l", key}, {"block", "l", key, "--forever"}, {"reset", "l", key, "--yes"}, {"holds", "l", key}, {"release", "l", key, "x", "--yes"}, {"release", "l", "x", key, "--yes"}, {"override", "l", key, "--rate", "2", "--forever"}, {"unblock", "l", key},
			{"unlimited", "l", key, "--forever"}, {"restore", "l", key}, {"show", "l", "--part", key}, {"release", "l", "x", "--part", key, "--yes"}, {"release", "l", key, "--part", "x", "--yes"},
			{"show", key}, {"keys", key}, {"overrides", key}, {"sweep", "l", key}, {"holds", key}, {"reset", key, "k", "--yes"}, {"release", key, "x", "--yes"}, {"replay", "--query", "SELECT now()", "--published", key},
		} {
			r := w.run(command...)
			if r.code == exitUsage || command[0] == "block" && r.code != exitError {
				t.Errorf("%.30q: exit status %d: %.300s", command, r.code, r.errOut)
			}
			if want := []string{"txlimit: the key " + row.want + "\n", "txlimit: the id " + id + "\n", "txlimit: the name of the limit " + id + "\n"}; r.code != exitError || r.out != "" || !slices.Contains(want, r.errOut) {
				t.Errorf("%.30q: exit status %d: %.300s%.300s", command, r.code, r.out, r.errOut)
			}
		}
	}
	w.run("show", "l", long).wants(t, exitOK, "denied +no")
	w.run("show", "l", "--part", long[:512], "--part", long[:510]).wants(t, exitOK, "denied +no") // and a bar between them
	w.run("show", "l", "--part", long[:512], "--part", long[:512]).wants(t, exitError, "^txlimit: the key has 1025 bytes")
}

// A role that may do nothing, or only look, is told what to grant for each command. Granted that, it can.
func TestMissingGrants(t *testing.T) {
	for _, row := range []struct {
		work string
		args []string
	}{
		{look, []string{"limits"}}, {look, []string{"keys", "l"}}, {look, []string{"keys", "l", "--denied"}}, {look, []string{"show", "l", "k"}}, {look, []string{"overrides"}},
		{look, []string{"holds", "l"}}, {look, []string{"locks"}}, {look, []string{"replay", "--log", "testdata/messages.csv", "--time", "created_at", "--skip-mistakes", "--published", "l"}},
		{operate, []string{"override", "l", "k", "--rate", "2", "--add", "--forever"}}, {operate, []string{"block", "l", "k", "--forever"}}, {operate, []string{"unblock", "l", "k"}}, {operate, []string{"unlimited", "l", "k", "--forever"}},
		{operate, []string{"restore", "l", "k"}}, {operate, []string{"reset", "l", "k", "--yes"}}, {operate, []string{"release", "l", "k", "job", "--yes"}},
		{consume, []string{"sweep"}}, {consume, []string{"publish", "testdata/array.json", "--program", "other"}}, {consume, []string{"withdraw", "api"}},
	} {
		t.Run(row.args[0], func(t *testing.T) {
			w := newPublished(t, ratelimit.TokenBucket("l", 1, 100000*time.Hour))
			w.sql("SELECT ratelimit.consume('l', 'k', rate => 1, period => '100000 hours'), ratelimit.override('l', 'k', rate => 2, forever => true), ratelimit.hold('l', 'k', 'job', 0, forever => true)")
			w.sql("INSERT INTO ratelimit.limits VALUES ('l', 'full', 0, 1, 2, now() - interval '1 day')")
			role := w.newRole()
			sql := fmt.Sprintf("SELECT ratelimit.grant('%s', '%s')", role, row.work)
			refused := func(what string) {
				t.Helper()
				if r := w.as(role, row.args...); r.code != exitError || !strings.Contains(r.errOut, "permission denied for "+what) || !strings.HasSuffix(r.errOut, ". Have the owner of the schema run: "+sql+"\n") {
					t.Error(r)
				}
			}
			refused("schema ratelimit")
			if row.work != look {
				w.sql("SELECT ratelimit.grant($1, 'look')", role)
				refused("")
			}
			w.sql(sql)
			if r := w.as(role, row.args...); r.code != exitOK && r.code != exitNothing {
				t.Error(r)
			}
		})
	}
}

// A role that may not read what was counted is told so: it is not as if nothing was counted.
func TestUsageThatMayNotBeRead(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour))
	w.sql("INSERT INTO ratelimit.usage VALUES ('l', date_trunc('minute', now()), 3, 2, 0, 3, 0, 0)")
	w.sql("INSERT INTO ratelimit.denials VALUES ('l', date_trunc('hour', now(), 'UTC'), 'k', 2, 2, now())")
	role := w.newRole()
	w.sql("SELECT ratelimit.grant('" + role + "', 'look'); REVOKE SELECT ON ratelimit.usage, ratelimit.denials FROM " + role)
	grant := "Have the owner of the schema run: SELECT ratelimit.grant\\('" + role + "', 'look'\\)\n"
	w.as(role, "limits").wants(t, exitOK, "may not read what was counted. "+grant)
	w.as(role, "show", "l", "k").wants(t, exitOK, "may not read what was counted. "+grant)
	if l := parse[limitsRead](t, w.as(role, "limits", "--json")); !l.UsageUnreadable || l.Limits[0].LastHour != nil {
		t.Errorf("%+v", l)
	}
	if k := parse[keyDetails](t, w.as(role, "show", "l", "k", "--json")); !k.Unreadable || k.Denials != nil {
		t.Errorf("%+v", k)
	}
	w.sql("SELECT ratelimit.grant($1, 'look')", role)
	if r := w.as(role, "limits", "--json"); r.errOut != "" || parse[limitsRead](t, r).Limits[0].LastHour.Denied != 2 {
		t.Error(r)
	}
	if r := w.as(role, "show", "l", "k", "--json"); r.errOut != "" || parse[keyDetails](t, r).Denials[0].Denied != 2 {
		t.Error(r)
	}
	// Tables that are not there are none of the role's business.
	w.sql("DROP TABLE ratelimit.denials CASCADE")
	if r := w.as(role, "show", "l", "k", "--json"); r.code != exitOK || r.errOut != "" || parse[keyDetails](t, r).Unreadable {
		t.Error(r)
	}
}

// newRole makes a role without rights.
func (w *world) newRole() string {
	role := w.name + "_role"
	w.sql("CREATE ROLE " + role)
	w.t.Cleanup(func() {
		if _, err := w.conn.Exec(context.WithoutCancel(w.t.Context()), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			w.t.Error(err)
		}
	})
	return role
}

// as runs a command as another role.
func (w *world) as(role string, args ...string) result {
	w.t.Helper()
	url := w.url
	w.url += "&options=-c%20role%3D" + role
	defer func() { w.url = url }()
	return w.run(args...)
}

// A trigger of the application's can undo an override in its own transaction.
func TestAnOverrideThatCannotBeReadBack(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("signUps", 5, time.Hour))
	w.sql("CREATE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN DELETE FROM ratelimit.overrides WHERE id = NEW.id; RETURN NULL; END'")
	w.sql("CREATE TRIGGER undo AFTER INSERT ON ratelimit.overrides FOR EACH ROW EXECUTE FUNCTION undo()")
	w.run("block", "signUps", "acme", "--reason", "r", "--forever").wants(t, exitError, `the override #\d+ cannot be read back, so it was not made`)
}

func TestReasonsWhyNothingIsThere(t *testing.T) {
	w := newMigrated(t)
	w.schema = "no_such_schema"
	for _, args := range [][]string{
		{"limits"}, {"keys", "l"}, {"keys", "l", "--denied"}, {"show", "l"}, {"overrides"}, {"locks"}, {"override", "l", "k", "--rate", "2", "--forever"}, {"block", "l", "k", "--forever"},
		{"unblock", "l", "k"}, {"unlimited", "l", "k", "--forever"}, {"restore", "l", "k"}, {"reset", "l", "k", "--yes"}, {"sweep"},
		{"publish", "testdata/array.json", "--program", "other"}, {"withdraw", "api"}, {"holds", "l"}, {"release", "l", "k", "job"}, {"replay", "--log", "testdata/messages.csv", "--time", "1", "--published", "l"},
	} {
		w.run(args...).wants(t, exitError, `^txlimit: there is no schema no_such_schema \(database \S+, on host \S+, role \S+\)\. Is that the right database\? Other schemas have them: --schema ratelimit\. If one was renamed, do not migrate: docs/operations\.md#rename-or-move-the-schema\n$`)
	}
	w.run("migrate", "status").wants(t, exitNothing, "Run `txlimit --schema no_such_schema migrate`: the schema no_such_schema is behind")
	w.run("migrate", "down", "--yes").wants(t, exitNothing, "Nothing to undo")
	w.run("limits").wants(t, exitError, "there is no schema no_such_schema ") // it was not made
	w.sql("CREATE SCHEMA app; CREATE TABLE app.limits (user_id text)")        // which is somebody else's
	w.schema = "app"
	w.run("limits").wants(t, exitError, `there are no rate limits in the schema app \(.*Other schemas have them: --schema ratelimit\. If one was renamed, do not migrate: docs/operations\.md#rename-or-move-the-schema\n$`)
	w.run("migrate", "status").wants(t, exitNothing, "Run `txlimit --schema app migrate`: the schema app is behind")
	w.run("migrate").wants(t, exitError, `the schema "app" has tables of somebody else`)
	w.schema = `a"; DROP`
	w.run("limits").wants(t, exitUsage, "--schema: the schema's name .* may have only letters, digits, spaces, _ and -")
	w.schema = ""
	w.sql("DROP FUNCTION ratelimit._states")
	w.run("publish", "testdata/array.json", "--program", "api").wants(t, exitOK)
	w.run("keys", "sendMessage").wants(t, exitError, "The schema is older than this program: run `txlimit migrate`")
}

// A key to which the program gives a rate of 0 has no capacity, and may owe nothing, whatever is defined.
func TestARateOf0OfAKeyIsGiven(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 10, time.Hour, ratelimit.Capacity(20), ratelimit.MaxReserved(5), ratelimit.Varies(24*time.Hour)))
	for _, args := range [][]string{{"--rate=0"}, {"--rate=0", "--capacity=0"}} {
		k := parse[keyDetails](t, w.run(append([]string{"show", "l", "k", "--json"}, args...)...))
		if k.Reason != ratelimit.ReasonPlan || k.Remaining == nil || *k.Remaining != 0 {
			t.Errorf("%q: denied by %q, %v remain", args, k.Reason, k.Remaining)
		}
		w.run(append([]string{"keys", "l", "--all"}, args...)...).wants(t, exitNothing)
	}
}

// The override in force is found although a hundred newer ones have ended, and one without an end in the calendar is no error.
func TestShowFindsTheOverrideInForce(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour))
	w.sql("SELECT ratelimit.block('l', 'k', forever => true, reason => 'abuse')")
	w.sql("SELECT ratelimit.override('l', 'k', rate => 1 + n, forever => true) FROM generate_series(1, 120) AS n")
	w.sql("SELECT ratelimit.restore('l', 'k', 'numbers')")
	k := parse[keyDetails](t, w.run("show", "l", "k", "--json"))
	if k.Override == nil || k.Override.Effect != effectBlock || k.Override.Until != nil || k.Reason != ratelimit.ReasonBlock || k.RetryAt != nil || len(k.History) != 100 {
		t.Errorf("%+v, denied %q until %v, %d overrides", k.Override, k.Reason, k.RetryAt, len(k.History))
	}
	w.run("show", "l", "k").wants(t, exitOK, `denied +yes, blocked by override #[0-9]+, for good`)
	w.run("reset", "l", "k", "--yes").wants(t, exitNothing, "It is blocked all the same")
	w.run("overrides").wants(t, exitOK, `block +for good`)
	w.run("keys", "l", "--all").wants(t, exitOK, `k .* block`)
	// One for every key goes after the key's own, though it is newer.
	w.sql("SELECT ratelimit.unlimited('l', every_key => true, forever => true)")
	if k := parse[keyDetails](t, w.run("show", "l", "k", "--json")); k.Override.Effect != effectBlock {
		t.Errorf("%+v", k.Override)
	}
	if k := parse[keyDetails](t, w.run("show", "l", "other", "--json")); k.Override.Effect != effectUnlimited {
		t.Errorf("%+v", k.Override)
	}
	w.sql("UPDATE ratelimit.overrides SET until = '-infinity'")
	w.run("overrides", "--all", "--limit", "0").wants(t, exitOK, "expired")
}

// A limit that denies everything stays so under an override that leaves its rate, and is shown as what it is.
func TestALimitOfNothingUnderAnOverride(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("never", 0, time.Hour))
	w.sql("SELECT ratelimit.override('never', 'k', capacity => 5, max_reserved => 2, forever => true)")
	r := w.run("show", "never", "k")
	r.wants(t, exitOK, "denied +yes, by policy", "balance +0\n", "override +#[0-9]+: capacity 5, at most 2 reserved")
	if strings.Contains(r.out, "cannot read") {
		t.Error(r)
	}
	if _, err := new(ratelimit.Limiter).Consume(t.Context(), w.conn, ratelimit.TokenBucket("never", 0, time.Hour).Key("k")); err == nil {
		t.Error("granted")
	}
	w.sql("SELECT ratelimit.override('never', 'k', rate => 3, forever => true)")
	w.run("show", "never", "k").wants(t, exitOK, "denied +no", "balance +3 of 3")
}

// A definition of another version, or of another hand, is text too.
func TestADefinitionThatCannotBeRead(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour))
	w.sql("ALTER TABLE ratelimit.definitions DROP CONSTRAINT IF EXISTS definitions_kind_check")
	w.sql("UPDATE ratelimit.definitions SET kind = $1", "k\x1b[31m\u202eind")
	r := w.run("limits")
	r.wants(t, exitOK, "which this program cannot read")
	if strings.ContainsAny(r.out+r.errOut, "\x1b\u202e") {
		t.Errorf("%q", r.out+r.errOut)
	}
}

func TestPublishTakesNothingAfterTheLimits(t *testing.T) {
	w := newMigrated(t)
	const limits = `[{"name": "l", "kind": "token bucket", "rate": 1, "period": "1h"}]`
	for _, more := range []string{"]", "}", " [ ]", "x", ",", "{}", "\x00"} {
		r := w.runWith(t.Context(), limits+more, "publish", "-", "--program", "api")
		r.wants(t, exitError, "has something after the limits")
	}
	w.run("limits").wants(t, exitNothing)
	w.runWith(t.Context(), limits+" \n", "publish", "-", "--program", "api").wants(t, exitOK)
}

// full is a disk without room.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestOutputThatCannotBeWritten(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour))
	w.change = func(a *app) { a.stdout = full{} }
	for _, args := range [][]string{{"limits"}, {"limits", "--json"}, {"overrides", "--json"}, {"block", "l", "k", "--forever"}, {"show", "l", "k"}, {"--help"}} {
		w.run(args...).wants(t, exitError, "the command has run, but its output could not be written: no space left on device")
	}
	w.run("keys").wants(t, exitUsage, "the name of the limit is missing") // the first mistake counts
	w.change = nil
	w.run("show", "l", "k").wants(t, exitOK, "blocked by override")
}

func TestWhoMayMigrate(t *testing.T) {
	w := newMigrated(t)
	role := w.newRole()
	const who = " To migrate is for the owner of the schema or, while there is none, for a role with CREATE on the database\n$"
	w.as(role, "migrate", "status").wants(t, exitError, "permission denied for .*"+who)
	w.schema = "theirs"
	w.as(role, "migrate").wants(t, exitError, "permission denied for database .*"+who)
	w.sql("CREATE SCHEMA theirs AUTHORIZATION " + role)
	w.run("migrate").wants(t, exitError, `belongs to the role "`+role+`"`)
	w.as(role, "migrate").wants(t, exitOK, "up 00001_engine.sql")
	w.as(role, "limits").wants(t, exitNothing)
}

// A schema that was made by SQL, not by goose, and whose name needs quotes, is as good.
func TestAnotherSchema(t *testing.T) {
	w := newWorld(t)
	w.schema = "a b"
	w.sql(w.run("migrate", "sql").out)
	w.run("migrate", "status").wants(t, exitOK, "by migrate sql\n.* was made by `txlimit migrate sql`, not noted by goose: no migration is left to run.*tells goose what is there.\n$")
	// What the message says to do helps.
	w.sql("ALTER FUNCTION ratelimit.add RENAME TO was_add")
	w.run("migrate", "status").wants(t, exitOK, "but other functions.*an unreleased build made the schema.*rename it, run `txlimit --schema 'a b' migrate`")
	w.sql(`ALTER SCHEMA "a b" RENAME TO before`)
	w.run("migrate").wants(t, exitOK, "up 00001_engine.sql\nthe schema a b has version 1 now\n$")
	w.sql("DROP SCHEMA before CASCADE")

	w.run("migrate", "sql", "--json").wants(t, exitUsage, "prints SQL, not JSON")
	if err := (&ratelimit.Limiter{Schema: w.schema}).Publish(t.Context(), w.conn, "api", ratelimit.TokenBucket("logins", 5, time.Hour), ratelimit.TokenBucket("sendMessage", 20, 100000*time.Hour)); err != nil {
		t.Fatal(err)
	}
	w.hang()
	w.run("locks").wants(t, exitOK, "logins dave", "in the way")
	w.run("__complete", "keys", "send").wants(t, exitOK, "^sendMessage\n")
	w.run("replay", "--log", "testdata/messages.csv", "--time", "created_at", "--skip-mistakes", "--published", "sendMessage").wants(t, exitOK)
	w.sql("SELECT ratelimit.consume('sendMessage', 'k', count => 20)")
	w.run("override", "sendMessage", "k", "--capacity", "30", "--add", "--forever").wants(t, exitOK, "added 10 tokens")
	w.sql("ALTER FUNCTION ratelimit.add RENAME TO was_add")
	w.run("override", "sendMessage", "k", "--capacity", "40", "--add", "--forever").wants(t, exitError, `nothing was added: .*To try again: SELECT "a b".add\(\d+\)\n`)
	w.as(w.newRole(), "block", "sendMessage", "k", "--forever").wants(t, exitError, `permission denied for schema a b\. Have the owner of the schema run: SELECT "a b".grant\('\w+', 'operate'\)\n$`)
	w.schema = ""
	w.run("limits").wants(t, exitError, "there is no schema ratelimit .* Other schemas have them: --schema 'a b'\\. If one was renamed, do not migrate: .*\n$")
}

func TestProcessesThatMigrateAtOnce(t *testing.T) {
	w := newWorld(t)
	results := make(chan result)
	for range 4 {
		go func() { results <- w.runWith(w.t.Context(), "", "migrate", "--json") }()
	}
	ran := 0
	for range 4 {
		r := <-results
		r.wants(t, exitOK)
		ran += len(parse[migrated](t, r).Migrations)
	}
	if ran != 1 {
		t.Errorf("%d migrations were run, want each once", ran)
	}
}

func TestNoConnection(t *testing.T) {
	w := newWorld(t)
	good := w.url
	for url, want := range map[string]string{
		"postgres://app:secret@127.0.0.1:1/db":         "cannot connect: .*127.0.0.1:1.*Say where the database is with --database, DATABASE_URL, or PGHOST",
		"postgres://app:secret@[::1/db":                "DATABASE_URL is not a way to a database",
		strings.Replace(good, w.name, "no_such_db", 1): `cannot connect: .*no_such_db`,
	} {
		w.url = url
		r := w.run("limits")
		r.wants(t, map[bool]int{true: exitUsage, false: exitError}[strings.Contains(url, "[::1/")], want)
		if strings.Contains(r.errOut, "secret") {
			t.Errorf("the password is printed: %s", r.errOut)
		}
	}
	// A server without TLS is no reason, if the connection without TLS says more.
	if plain := strings.Replace(good, "sslmode=disable", "sslmode=prefer", 1); plain == good {
		t.Errorf("no sslmode in %s", good)
	} else {
		w.url = strings.Replace(plain, w.name, "no_such_db", 1)
		if r := w.run("limits"); strings.Contains(r.errOut, "tls error") || !strings.Contains(r.errOut, `"no_such_db" does not exist`) {
			t.Error(r)
		}
	}
	w.url = good
	// The flag goes before the environment.
	w.run("--database", good, "migrate").wants(t, exitOK)
	// Without both, libpq's variables count, which pgx reads.
	config, err := pgx.ParseConfig(good)
	if err != nil {
		t.Fatal(err)
	}
	w.url = ""
	a := &app{getenv: func(string) string { return "" }}
	if c, err := a.config(); err != nil || c.Host == "" {
		t.Errorf("%v, %v", c, err)
	}
	w.run("--database", fmt.Sprintf("host=%s port=%d user=%s dbname=%s sslmode=disable", config.Host, config.Port, config.User, config.Database), "limits").
		wants(t, exitNothing)
}

// A schema that was renamed is not behind: to migrate does not help. The functions in it name the schema in which they were made.
func TestARenamedSchema(t *testing.T) {
	w := newMigrated(t)
	w.sql("ALTER SCHEMA ratelimit RENAME TO renamed")
	w.schema = "renamed"
	const renamed = `was it renamed\? docs/operations.md#rename-or-move-the-schema`
	w.run("show", "api", "ann").wants(t, exitError, `ratelimit.* does not exist.*`+renamed)
	w.run("migrate").wants(t, exitError, renamed)
	w.sql(`CREATE SCHEMA "ratelimit"`)
	w.run("show", "api", "ann").wants(t, exitError, `ratelimit\..* does not exist.*`+renamed)
	w.run("migrate").wants(t, exitError, renamed)
}

func TestLocks(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("sendMessage", 1, time.Hour, ratelimit.Capacity(9)))
	w.sql("SELECT ratelimit.consume('sendMessage', 'user-17')")
	r := w.run("locks", "--json")
	report := parse[lockReport](t, r)
	if len(report.Sessions) != 0 {
		t.Errorf("before: %s", r)
	}

	holder, turn := w.connect(), w.connect()
	begin := func(conn *pgx.Conn, sql string) uint32 {
		if _, err := conn.Exec(t.Context(), "BEGIN; "+sql); err != nil {
			t.Fatal(err)
		}
		return conn.PgConn().PID()
	}
	held := begin(holder, "SELECT ratelimit.consume('sendMessage', 'user-17')")
	turnHeld := begin(turn, "LOCK TABLE ratelimit.turn_07")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	waiting := []uint32{}
	for _, sql := range []string{
		"SELECT ratelimit.consume('sendMessage', 'user-17')",
		"SELECT ratelimit.consume('sendMessage', 'user-17')",
		"BEGIN; LOCK TABLE ratelimit.turn_07",
	} {
		conn := w.connect()
		waiting = append(waiting, conn.PgConn().PID())
		go func() {
			_, _ = conn.Exec(ctx, sql) // is cancelled
			ended <- struct{}{}
		}()
	}
	defer func() {
		cancel()
		for range waiting {
			<-ended
		}
	}()
	byPID := map[uint32]session{}
	for tries := 0; ; tries++ { // until all of them wait, and it is seen for what
		r = w.run("locks", "--old", "1ms", "--json")
		report = parse[lockReport](t, r)
		clear(byPID)
		unseen := 0
		for _, s := range report.Sessions {
			if byPID[uint32(s.PID)] = s; s.WaitsFor == "a row" {
				unseen++
			}
		}
		if len(byPID) == 5 && unseen == 0 || tries == 1000 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, pid := range []uint32{held, turnHeld} {
		if s := byPID[pid]; !s.InTheWay || len(s.BlockedBy) > 0 || s.State != "idle in transaction" || s.Seconds == nil {
			t.Errorf("in the way: %+v: %s", s, r)
		}
	}
	for i, want := range []string{"sendMessage user-17", "sendMessage user-17", "its turn (turn_07)"} {
		if s := byPID[waiting[i]]; s.InTheWay || s.WaitsFor != want || len(s.BlockedBy) == 0 {
			t.Errorf("waiting for %s: %+v", want, s)
		}
	}
	if !slices.ContainsFunc(report.Old, func(o oldTransaction) bool { return uint32(o.PID) == held && o.Written && o.Holder == "session" }) {
		t.Errorf("the old transaction is not listed: %s", r)
	}
	w.run("locks", "--old", "1ms").wants(t, exitOK, "WAITS FOR", "in the way", fmt.Sprintf(`SELECT pg_terminate_backend\(%d\)`, held), "sendMessage user-17", "Old, and in the way", fmt.Sprintf("To end %d: ", held))

	// A report reads on one snapshot, and has written nothing.
	reader := w.connect()
	reportPID := begin(reader, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM ratelimit.limits")
	r = w.run("locks", "--old", "1ms", "--json")
	i := slices.IndexFunc(parse[lockReport](t, r).Old, func(o oldTransaction) bool { return uint32(o.PID) == reportPID })
	if i < 0 {
		t.Fatalf("the old snapshot is not listed: %s", r)
	}
	if o := parse[lockReport](t, r).Old[i]; o.Written || !o.Snapshot || o.Since == nil || o.QueryStart == nil || o.State != "idle in transaction" || !strings.Contains(o.Query, "REPEATABLE READ") {
		t.Errorf("%+v", o)
	}
	w.run("locks", "--old", "1ms").wants(t, exitOK, fmt.Sprintf(`%d +\S+ +\S+ +\S+ +idle in transaction +\S+ +snapshot `, reportPID), fmt.Sprintf(`To end %d: SELECT pg_terminate_backend\(%[1]d\)`, reportPID))
	if r := w.run("locks", "--old", "1h", "--json"); slices.ContainsFunc(parse[lockReport](t, r).Old, func(o oldTransaction) bool { return uint32(o.PID) == reportPID }) {
		t.Errorf("it is not old yet: %s", r)
	}
	// Between its statements a READ COMMITTED transaction that has not written holds nothing back.
	if _, err := reader.Exec(t.Context(), "ROLLBACK; BEGIN; SELECT count(*) FROM ratelimit.limits"); err != nil {
		t.Fatal(err)
	}
	if r := w.run("locks", "--old", "1ms", "--json"); slices.ContainsFunc(parse[lockReport](t, r).Old, func(o oldTransaction) bool { return uint32(o.PID) == reportPID }) {
		t.Errorf("READ COMMITTED holds no snapshot: %s", r)
	}

	// A role that may see less is told so, and still sees who is in the way.
	role := w.newRole()
	w.sql("GRANT USAGE ON SCHEMA ratelimit TO " + role)
	w.as(role, "locks").wants(t, exitOK, "GRANT pg_monitor TO "+role, fmt.Sprintf(`SELECT pg_terminate_backend\(%d\)`, held), "a row")
	w.sql("GRANT pg_monitor TO " + role)
	if r := w.as(role, "locks"); strings.Contains(r.errOut, "pg_monitor") || !strings.Contains(r.out, "idle in transaction") {
		t.Error(r)
	}

	// What has to wait gives up, and says where to look.
	w.change = func(a *app) { a.patience = 500 * time.Millisecond }
	w.run("reset", "sendMessage", "user-17", "--yes").wants(t, exitError, "`txlimit locks` shows which")
	// An override is in force, although the addition has to wait.
	w.run("override", "sendMessage", "user-17", "--capacity", "20", "--add", "--forever").wants(t, exitError, `#\d+ is in force, but nothing was added: .*To try again: SELECT ratelimit.add\(\d+\)`)
	w.run("overrides").wants(t, exitOK, "capacity 20")

	// Interrupted, it ends.
	w.change = func(a *app) { a.patience = time.Minute }
	interrupted, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	w.runWith(interrupted, "", "reset", "sendMessage", "user-17", "--yes").wants(t, exitError, "interrupted")
}

func TestNoErrorHasAPassword(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"postgres://u:s3cr3t@host:port/db", "host=h password = s3cr3t port=x", "host=h passwd=s3cr3t port=x", "PASSWORD=s3cr3t port=x", "host=h password='s3cr3t", "u:s3cr3t@h/db", "postgres//u:s3cr3t@h/db",
		"postgres://u:a@s3cr3t@h:x/db", "postgres://u:a/s3cr3t@h:x/db", "postgres://u:s3 cr3t@h/db", "postgres://u:%zzs3cr3t@h/db", "mysql://u:s3cr3t@h/db", "postgres://u:x`: s3cr3t@h:x/db", "postgres://u:x (s3cr3t@h:x/db",
		"host=h port=s3cr3t", "postgres://u@h:s3cr3t/db", "postgres://h/db?sslmode=s3cr3t", "host=h connect_timeout=s3cr3t", "host=h sslrootcert=s3cr3t sslmode=verify-ca", "host=h service=s3cr3t", "s3cr3t", "postgres://u:s3cr3t@127.0.0.1:1/db", "\x00s3cr3t",
	} {
		for _, inEnvironment := range []bool{false, true} {
			for _, command := range []string{"limits", "console", "migrate"} {
				w := &world{t: t, url: text}
				args := []string{command, "-d", text}
				if inEnvironment {
					args = args[:1]
				}
				r := w.run(args...)
				if r.code == exitOK || regexp.MustCompile(`s3 ?cr3t`).MatchString(r.out+r.errOut) {
					t.Errorf("%s", r)
				}
			}
		}
	}
	w := &world{t: t}
	w.run("limits", "-d", "postgres://u:s3cr3t@host:port/db").wants(t, exitUsage, "--database is not a way to a database: invalid port. Write postgres://user@host:5432/db")
}

func TestCompletion(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("sendMessage", 1, time.Hour), ratelimit.TokenBucket("signUps", 1, time.Hour), ratelimit.TokenBucket("other", 1, time.Hour))
	w.sql("SELECT ratelimit.consume('sendMessage', k, rate => 1, period => '1 hour') FROM unnest(ARRAY['user-1', 'user-2', 'admin', $1]) AS k", "user-"+evil)
	w.sql("SELECT ratelimit.hold('sendMessage', 'x', id, 0, forever => true) FROM unnest(ARRAY['job-1', 'job-2', 'my-job', 'job 3']) AS id")
	w.sql("SELECT ratelimit.hold('signUps', id => 'job-4', count => 0, forever => true, global => true)")
	for words, want := range map[string][]string{
		"holds s":                              {"sendMessage", "signUps"},
		"holds sendMessage adm":                {"admin"},
		"release o":                            {"other"},
		"release sendMessage adm":              {"admin"},
		"release sendMessage x job":            {"job-1", "job-2"},
		"release sendMessage admin job":        {},
		"release sendMessage x job-1 j":        {},
		"release signUps j":                    {"job-4"},
		"release signUps --part eu --part x j": {},
		"keys s":                               {"sendMessage", "signUps"},
		"keys x":                               {},
		"show sendMessage user":                {"user-1", "user-2"},
		"reset sendMessage a":                  {"admin"},
		"reset sendMessage a b":                {},
		"sweep signUps s":                      {"sendMessage"},
		"block s":                              {"sendMessage", "signUps"},
		"overrides o":                          {"other"},
		"lo":                                   {"locks"},
		"show no'such user":                    {},
		"limits --da":                          {"--database"},
		"migrate s":                            {"status", "sql"},
		"restore sendMessage adm":              {"admin"},
		"restore --effect ":                    {"numbers", "block", "unlimited"},
		"replay --published si":                {"signUps"},
		"unlimited sendMessage ad":             {"admin"},
	} {
		r := w.run(append([]string{"__complete"}, strings.Split(words, " ")...)...)
		got := []string{}
		for line := range strings.Lines(r.out) {
			if word, _, _ := strings.Cut(strings.TrimSpace(line), "\t"); word != "" && word[0] != ':' {
				got = append(got, word)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q\n%s", words, got, want, r)
		}
	}
	w.url = "postgres://127.0.0.1:1/none"
	if r := w.run("__complete", "keys", "s"); strings.Contains(r.out, "send") || strings.Contains(r.errOut, "cannot connect") {
		t.Errorf("without a database: %s", r)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		w.run("completion", shell).wants(t, exitOK, "txlimit")
	}
}

func TestEveryCommandHasHelp(t *testing.T) {
	t.Parallel()
	w := &world{t: t, url: "postgres://127.0.0.1:1/none"}
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		path := strings.Fields(c.CommandPath())[1:]
		if c.Name() == "help" || len(path) > 0 && path[0] == "completion" {
			return
		}
		r := w.run(append(path, "--help")...)
		r.wants(t, exitOK, "(?s)Usage:\n  txlimit.*--database.*Exit status:\n  0  done")
		if len(path) == 1 && (c.Example == "" || len(c.Long) < 80) {
			t.Errorf("%q has no example, or little help", path)
		}
		for line := range strings.Lines(c.Long) {
			if len(line) > 89 && line[0] != ' ' {
				t.Errorf("%q: a long line: %s", path, line)
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	root := (&app{getenv: os.Getenv}).root()
	visit(root)
	if n := len(root.Commands()); n < 15 {
		t.Errorf("%d commands", n)
	}
	w.run("--version").wants(t, exitOK, "^txlimit ")
	w.run().wants(t, exitUsage, "a command is missing: limits, keys")
	w.run("shwo").wants(t, exitUsage, `there is no command "shwo". Did you mean show\?`)
}

// A key with numbers of its own: nothing is computed with those of the definition, and with its own it is what the program says.
func TestAKeyWithNumbersOfItsOwn(t *testing.T) {
	definition := ratelimit.CalendarWindow("exports", 1000, "month", ratelimit.Zone("Europe/Berlin"), ratelimit.Varies(64*24*time.Hour))
	w := newPublished(t, definition)
	var limiter ratelimit.Limiter
	anchor := time.Now().UTC().AddDate(0, 0, -10) // the window of the definition began at another instant, except on the 11th
	own := definition.With(ratelimit.Rate(20), ratelimit.Capacity(30), ratelimit.Zone("America/New_York"), ratelimit.Anchor(anchor.Format(time.DateOnly)))
	request := own.Key("acme")
	for _, count := range []float64{30, 0} {
		if _, err := limiter.Consume(t.Context(), w.conn, request.Count(count)); err != nil {
			t.Fatal(err)
		}
	}
	_, err := limiter.Consume(t.Context(), w.conn, request)
	denied, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok {
		t.Fatal(err)
	}

	show := func(args ...string) keyDetails {
		t.Helper()
		return parse[keyDetails](t, w.run(append([]string{"show", "exports", "acme", "--json"}, args...)...))
	}
	k := show()
	if k.Numbers != nil || k.Remaining != nil || k.Denied != nil || k.RetryAt != nil || k.FullAt != nil || k.Unknown == nil || *k.Stored != 0 || k.LastUse == nil {
		t.Errorf("%+v", k)
	}
	w.run("show", "exports", "acme").wants(t, exitOK, "balance +not known: the numbers of this key are the program's. Give them: --rate, --capacity, --zone and --anchor", "stored +0 tokens", "denied +not known")
	numbers := []string{"--rate", "20", "--capacity", "30", "--zone", "America/New_York", "--anchor", anchor.Format(time.DateOnly)}
	k = show(numbers...)
	if *k.Remaining != 0 || k.Reason != ratelimit.ReasonQuota || !k.RetryAt.Equal(denied.RetryAt) || k.Unknown != nil || *k.Numbers.Capacity != 30 || k.Numbers.Zone != "America/New_York" {
		t.Errorf("%+v: the program says %v", k, denied.RetryAt)
	}
	list := parse[keyList](t, w.run("keys", "exports", "--json")).Keys
	if len(list) != 1 || list[0].Remaining != nil || list[0].Denied != nil || list[0].Unknown == nil || *list[0].Stored != 0 || list[0].LastUse == nil {
		t.Errorf("%+v", list)
	}
	list = parse[keyList](t, w.run(append([]string{"keys", "exports", "--json"}, numbers...)...)).Keys
	if len(list) != 1 || *list[0].Remaining != 0 || !*list[0].Denied || !list[0].RetryAt.Equal(denied.RetryAt) || list[0].Unknown != nil {
		t.Errorf("%+v", list)
	}

	// An override of numbers leaves zone and anchor to the program.
	w.sql("SELECT ratelimit.override('exports', 'acme', rate => 40, capacity => 50, forever => true)")
	if k = show(); k.Numbers != nil || k.Remaining != nil || k.Override == nil {
		t.Errorf("%+v", k)
	}
	if k = show(numbers[4:]...); *k.Numbers.Rate != 40 || *k.Numbers.Capacity != 50 || *k.Remaining != 0 || !k.RetryAt.Equal(denied.RetryAt) {
		t.Errorf("%+v", k)
	}
	w.sql("SELECT ratelimit.block('exports', 'acme', forever => true)")
	if k = show(); k.Reason != ratelimit.ReasonBlock || k.Remaining != nil {
		t.Errorf("%+v", k)
	}
	w.sql("SELECT ratelimit.unblock('exports', 'acme')")
	w.sql("SELECT ratelimit.unlimited('exports', 'acme', forever => true)")
	if k = show(); *k.Denied || k.Reason != "" || k.Remaining != nil {
		t.Errorf("%+v", k)
	}
	// A key without a row is full, but it may have a rate of 0.
	w.run("show", "exports", "other").wants(t, exitOK, "denied +no, unless its rate is 0")
	if k = parse[keyDetails](t, w.run("show", "exports", "other", "--json")); k.Denied != nil || k.Remaining != nil || k.Unknown == nil || k.Stored != nil {
		t.Errorf("%+v", k)
	}
}

// The newest definition counts, and the others are shown as what they are.
func TestOneDefinitionCounts(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, 100000*time.Hour, ratelimit.Capacity(10)))
	w.run("show", "l", "k").wants(t, exitOK, "balance +10 of 10")
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "worker", ratelimit.TokenBucket("l", 2, 100000*time.Hour, ratelimit.Capacity(20))); err != nil {
		t.Fatal(err)
	}
	r := w.run("show", "l", "k")
	r.wants(t, exitOK, "defined +token bucket, 2 per .*, capacity 20 .of worker.\n +api, since 20.*: token bucket, 1 per .*, capacity 10\n", "balance +20 of 20")
	type details struct {
		Numbers  struct{ Capacity float64 }
		Programs []string
		Others   []struct {
			Program         string
			Capacity        float64
			Counts, Current bool
		}
	}
	k := parse[details](t, w.run("show", "l", "k", "--json"))
	if k.Numbers.Capacity != 20 || !slices.Equal(k.Programs, []string{"worker"}) || len(k.Others) != 1 || k.Others[0].Program != "api" || k.Others[0].Capacity != 10 || k.Others[0].Counts || !k.Others[0].Current {
		t.Errorf("%+v", k)
	}
	w.run("limits").wants(t, exitOK, `l +worker +token bucket, 2 per.*\n +api +since 20.*Z: token bucket, 1 per`)
	// It is withdrawn.
	w.run("withdraw", "worker").wants(t, exitOK, "^withdrew 1 limit of worker\n$")
	w.run("withdraw", "worker").wants(t, exitNothing, "worker has published no limits, or they were withdrawn before")
	w.run("withdraw", "wroker").wants(t, exitError, "program must be one that has published limits, not 'wroker'.*SELECT DISTINCT d.program FROM ratelimit.definitions")
	w.run("withdraw").wants(t, exitUsage, "withdraw takes the name of one program")
	w.run("show", "l", "k").wants(t, exitOK, "defined +token bucket, 1 per .*capacity 10 .of api.\n +worker, until 20.*capacity 20", "balance +10 of 10")
	// A program that agrees is one more that has it.
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "mailer", ratelimit.TokenBucket("l", 1, 100000*time.Hour, ratelimit.Capacity(10))); err != nil {
		t.Fatal(err)
	}
	w.run("show", "l", "k").wants(t, exitOK, "defined .* .of mailer, api.")
}

// An override for every key says whom it does not reach, and whom it does.
func TestAnOverrideOfEveryKeySaysWhomItReaches(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour), ratelimit.TokenBucket("v", 1, time.Hour, ratelimit.Varies(24*time.Hour)))
	const itsOwn = "Keys to which the program gives numbers of their own get these, too"
	r := w.run("override", "l", "--rate", "5", "--yes", "--forever")
	r.wants(t, exitOK)
	if strings.Contains(r.out, "of its own") || strings.Contains(r.out, itsOwn) {
		t.Error(r)
	}
	w.sql("SELECT ratelimit.block('l', 'a', forever => true), ratelimit.override('l', 'b', rate => 3, forever => true), ratelimit.override('l', 'b', rate => 4, forever => true), ratelimit.block('v', 'c', until => now() + interval '1 hour')")
	w.run("override", "l", "--rate", "6", "--yes", "--forever").wants(t, exitOK, "2 keys have overrides of their own, and keep them")
	w.run("override", "v", "--rate", "6", "--yes", "--forever").wants(t, exitOK, "1 key has an override of its own, and keeps it. "+itsOwn)
	if r := w.run("block", "v", "--yes", "--forever"); strings.Contains(r.out, itsOwn) || !strings.Contains(r.out, "1 key has an override of its own") {
		t.Error(r)
	}
	w.runWith(t.Context(), "n\n", "override", "v", "--rate", "7", "--forever").wants(t, exitError, "1 key has .* get these, too. Give every key of v other numbers?")
	if d := parse[decided](t, w.run("override", "l", "--rate", "6", "--yes", "--json", "--forever")); d.KeysWith == nil || *d.KeysWith != 2 {
		t.Errorf("%+v", d)
	}
	// What would be added to a key depends on its own capacity.
	w.sql("INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('v', 'd', 0, 1, 0, now())")
	w.run("override", "v", "d", "--rate", "20", "--add", "--forever").wants(t, exitUsage, "--add needs --capacity, and --capacity-now")
	w.run("overrides", "v").wants(t, exitOK)
	if r := w.run("overrides", "v"); strings.Contains(r.out, "rate 20") {
		t.Errorf("it was overridden nevertheless: %s", r)
	}
	w.run("override", "v", "d", "--rate", "20", "--capacity", "20", "--capacity-now", "9", "--add", "--forever").wants(t, exitOK, "added 11 tokens")
	// An override in force knows it, unless it has no capacity.
	w.run("override", "v", "e", "--rate", "3", "--forever").wants(t, exitOK)
	w.run("override", "v", "e", "--rate", "20", "--capacity", "20", "--add", "--forever").wants(t, exitUsage, "--add needs --capacity-now")
	w.run("override", "v", "e", "--rate", "20", "--capacity", "20", "--capacity-now", "9", "--add", "--forever").wants(t, exitOK, "added nothing")
	w.run("override", "v", "e", "--rate", "25", "--add", "--forever").wants(t, exitUsage, "--add needs --capacity\n")
	w.run("override", "v", "e", "--capacity", "25", "--capacity-now", "19", "--add", "--forever").wants(t, exitUsage, "--capacity-now 19 is below the capacity in force: override #[0-9]+ has 20")
	w.run("override", "l", "b", "--capacity", "25", "--capacity-now", "3", "--add", "--forever").wants(t, exitUsage, "--capacity-now 3 is below the capacity in force: override #[0-9]+ has 4")
	w.run("override", "v", "e", "--capacity", "25", "--capacity-now", "22", "--add", "--forever").wants(t, exitOK, "added nothing")
	w.run("show", "v", "d").wants(t, exitOK, "balance +11(\\.[0-9]+)? of 20") // rate and capacity are the override's
	// What an ended override has added is not added again.
	w.run("restore", "v", "d").wants(t, exitOK)
	w.run("override", "v", "d", "--capacity", "20", "--capacity-now", "9", "--add", "--forever").wants(t, exitOK, "added nothing: .*, or ended overrides have added as much already")

	// One program that says so is enough, if another one published later.
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "worker", ratelimit.TokenBucket("l", 1, time.Hour, ratelimit.Varies(24*time.Hour))); err != nil {
		t.Fatal(err)
	}
	if err := new(ratelimit.Limiter).Publish(t.Context(), w.conn, "api", ratelimit.TokenBucket("l", 2, time.Hour)); err != nil {
		t.Fatal(err)
	}
	w.run("override", "l", "d", "--rate", "20", "--add", "--forever").wants(t, exitUsage, "--add needs --capacity, and --capacity-now")
	w.run("override", "l", "--rate", "20", "--yes", "--forever").wants(t, exitOK, itsOwn)
}

// Only lines without an event are mistakes that can be left out. A report on a part of a log is worse than none.
func TestReplaySkipsLinesOnly(t *testing.T) {
	t.Parallel()
	w := &world{t: t, url: "postgres://127.0.0.1:1/none"} // a log needs no database
	dir := t.TempDir()
	log := func(name, text string) string {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return dir + "/" + name
	}
	const line, combined = "2026-07-01T12:00:00Z,ann\n", `192.0.2.1 - - [01/Jul/2026:12:00:01 +0000] "POST /login HTTP/1.1" 401 12` + "\n"
	before := "at,user\n" + strings.Repeat(line, 100)
	short, long := before+"2026-07-01T12:00:00Z,\"bob\n"+strings.Repeat(line, 900), before+"2026-07-01T12:00:00Z,\"bob\n"+strings.Repeat(line, 60_000)
	for _, row := range []struct {
		args []string
		want string
	}{
		{[]string{"--log", log("short.csv", short), "--time", "at", "--key", "user"}, "^txlimit: replay: line 102: a quote in the record that begins there is not closed where it should be"},
		{[]string{"--log", log("long.csv", long), "--time", "at", "--key", "user"}, "^txlimit: replay: line 102: the record that begins there is longer than 1048576 bytes .is a quote not closed"},
		{[]string{"--log", log("header.csv", `at,"user"x`+"\n"+line), "--time", "at", "--key", "user"}, "^txlimit: replay: line 1: "},
		{[]string{"--log", log("good.csv", before), "--time", "at", "--key", "nosuch"}, `^txlimit: replay: line 1: there is no column "nosuch"\n`},
		{[]string{"--log", log("good.log", combined), "--key", "nosuch"}, `^txlimit: the combined format has no field "nosuch": it has host,`},
		{[]string{"--log", log("good.log", combined), "--key", "host", "--time", "t"}, "^txlimit: the combined format has one time"},
	} {
		r := w.run(append([]string{"replay", "-c", "10/1h", "--skip-mistakes"}, row.args...)...)
		r.wants(t, exitError, row.want)
		if strings.Contains(r.errOut, "left out") || r.out != "" {
			t.Errorf("%v reports on a part: %s", row.args, r)
		}
	}
	w.run("replay", "-c", "10/1h", "--skip-mistakes", "--log", log("bad.csv", before+"0999-07-01T12:00:00Z,ann\n2026-07-01T12:00:00Z,x\"\x1by\n"+line), "--time", "at", "--key", "user").
		wants(t, exitOK, "^101 events of 1 keys", "(?m)^2 lines with mistakes left out. The first: line 102: the time is not in the years 1000 to 9999\n$")
	// No line has the member: why is what a user needs.
	w.run("replay", "-c", "10/1h", "--skip-mistakes", "--log", log("a.jsonl", `{"at": "2026-07-01T12:00:00Z"}`+"\n"), "--time", "at", "--key", "user\u202e").
		wants(t, exitNothing, `^1 line with mistakes left out. The first: line 1: the key "user.u202e" is missing\nThere are no events.\n$`)
}

func TestReplayWritesAPicture(t *testing.T) {
	t.Parallel()
	w := &world{t: t, url: "postgres://127.0.0.1:1/none"} // a log needs no database
	svg := t.TempDir() + "/report.svg"
	w.run("replay", "--log", "testdata/messages.csv", "--time", "created_at", "--key", "user_id", "-c", "1/1h", "--skip-mistakes", "--svg", svg).wants(t, exitOK, "2 keys")
	if text, err := os.ReadFile(svg); err != nil || !strings.HasPrefix(string(text), "<svg ") || !strings.Contains(string(text), "candidate: token bucket, 1 per 1h") {
		t.Errorf("%v: %.100s", err, text)
	}
	dir := t.TempDir()
	for name, log := range map[string]string{
		"a.jsonl": `{"at": "2026-07-01T12:00:00Z", "user": {"id": 7}}` + "\n" + `{"at": "2026-07-01T12:00:01Z", "user": {"id": 7}}` + "\n",
		"a.log": `192.0.2.1 - - [01/Jul/2026:12:00:01 +0000] "POST /login HTTP/1.1" 401 12` + "\n" +
			`192.0.2.1 - - [01/Jul/2026:12:00:00 +0000] "POST /login HTTP/1.1" 401 12` + "\n",
	} {
		if err := os.WriteFile(dir+"/"+name, []byte(log), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	r := w.run("replay", "--log", dir+"/a.jsonl", "--time", "at", "--key", "user.id", "-c", "1/1h", "--json")
	if p := parse[replayed](t, r); p.Events != 2 || p.Candidates[0].Denied != 1 || p.Candidates[0].MostDenied[0].Key != "7" {
		t.Error(r)
	}
	w.run("replay", "--log", dir+"/a.log", "--key", "host", "-c", "1/1h").wants(t, exitError, "see --reorder")
	r = w.run("replay", "--log", dir+"/a.log", "--key", "host", "--reorder", "1m", "-c", "1/1h", "--json")
	if p := parse[replayed](t, r); p.Events != 2 || p.Candidates[0].Denied != 1 {
		t.Error(r)
	}
}

// A block changes no numbers: those of the newest override that is none hold beside it, as for Balance.
func TestABlockOverNumbers(t *testing.T) {
	limit := ratelimit.TokenBucket("l", 10, 100000*time.Hour)
	w := newPublished(t, limit)
	w.sql("SELECT ratelimit.override('l', 'k', rate => 500, forever => true)")
	w.sql("INSERT INTO ratelimit.limits VALUES ('l', 'k', 0, 1, 400, now())")
	w.sql("SELECT ratelimit.block('l', 'k', until => now() + interval '1 hour')")
	w.run("show", "l", "k").wants(t, exitOK, "override +#2: block", `in force +token bucket, 500 per .*by override #1`, `balance +400(\.\d+)? of 500`, "denied +yes, blocked by override #2")
	// The key's blocks leave the numbers of every key.
	w.sql("SELECT ratelimit.override('l', every_key => true, rate => 30, forever => true), ratelimit.block('l', 'other', forever => true)")
	w.run("show", "l", "other").wants(t, exitOK, "balance +30 of 30", "denied +yes, blocked")
	// And one over no limit leaves that.
	w.sql("SELECT ratelimit.unlimited('l', 'k', forever => true), ratelimit.block('l', 'k', forever => true)")
	w.run("show", "l", "k").wants(t, exitOK, "balance +unlimited: nothing is taken", "denied +yes, blocked by override")
}

// A database or a role may have set another encoding. The arguments are UTF-8 all the same.
func TestKeysAreUTF8WhateverTheSessionIs(t *testing.T) {
	w := newPublished(t, ratelimit.TokenBucket("l", 1, time.Hour))
	separator := "?"
	if strings.Contains(w.url, "?") {
		separator = "&"
	}
	w.url += separator + "client_encoding=LATIN1"
	w.run("block", "l", "é日", "--forever").wants(t, exitOK)
	var key string
	if err := w.conn.QueryRow(t.Context(), "SELECT key FROM ratelimit.overrides").Scan(&key); err != nil || key != "é日" {
		t.Errorf("the key é日 is stored as %q, %v", key, err)
	}
}

// TestNoNumberDependsOnTheSession: a role or a URL may have settings that change how values are written.
func TestNoNumberDependsOnTheSession(t *testing.T) {
	w := newMigrated(t)
	w.sql(`SELECT ratelimit.publish('api', '[{"name": "slow", "kind": "token bucket", "rate": 1, "period": "1000 days", "capacity": 1000},
		{"name": "monthly", "kind": "calendar window", "rate": 10.125, "period": "1 month", "zone": "Europe/Berlin"}]')`)
	w.sql(`INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('slow', 'acme', 0, 2, 218.5, now()), ('slow', 'acme', 1, 2, 219.123456789, now())`)
	w.sql(`SELECT ratelimit.override('slow', 'acme', capacity => 2000.125, until => '9000-01-02 03:04Z'), ratelimit.block('slow', 'bob', until => '2950-12-04 03:00Z')`)
	w.sql(`CREATE TABLE calls AS SELECT 'acme' AS key, '2026-11-27 18:00Z'::timestamptz + n * interval '1 second' AS at, 1.125::float8 AS tokens FROM generate_series(1, 20) AS n`)
	since := regexp.MustCompile(`\(in [^)]*\)|20\d\d-\S+ \d\d:\d\d:\d\dZ`)
	plain, query := w.url, "SELECT at, key, tokens FROM calls ORDER BY at"
	strange := "&DateStyle=German&IntervalStyle=sql_standard&extra_float_digits=-15&bytea_output=escape&TimeZone=Europe/Dublin"
	for _, args := range [][]string{
		{"limits"}, {"keys", "slow", "--all"}, {"show", "slow", "acme"}, {"show", "slow", "bob"}, {"show", "monthly", "acme"}, {"overrides"}, {"locks"},
		{"migrate", "status"}, {"replay", "--query", query, "--candidate", "5/10s"},
	} {
		w.url = plain
		want := w.run(args...)
		w.url = plain + strange
		got := w.run(args...)
		if want.code != 0 && want.code != 3 || since.ReplaceAllString(got.String(), "") != since.ReplaceAllString(want.String(), "") {
			t.Errorf("%s\nin a session with other settings, %s", want, got)
		}
	}
	w.url = plain + strange
	w.run("show", "slow", "bob").wants(t, 0, `2950-12-04 03:00:00Z \(in more than 292 years\)`)
}

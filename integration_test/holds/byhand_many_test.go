package holds_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestHoldMany: each id is held once, all or none, and is a hold as any other.
func TestHoldMany(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 5, forever => true)")
	acme := projectsByHand.With(ratelimit.Capacity(5)).Key("acme")
	many := func(want int, ids string) {
		t.Helper()
		if got := harness.Scan[int](t, pool, "SELECT ratelimit.hold_many('projects', 'acme', $1)", strings.Fields(ids)); got != want {
			t.Errorf("%s: %d were taken, want %d", ids, got, want)
		}
	}
	released := func(want int, ids string) {
		t.Helper()
		if got := harness.Scan[int](t, pool, "SELECT ratelimit.release_many('projects', 'acme', $1)", strings.Fields(ids)); got != want {
			t.Errorf("%s: %d were released, want %d", ids, got, want)
		}
	}
	denied := func(state, text, ids string) (d string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), "SELECT ratelimit.hold_many('projects', 'acme', $1)", strings.Fields(ids))
		e, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || e.Code != state || !strings.Contains(e.Message+e.Detail, text) {
			t.Errorf("%s: %v", ids, err)
			return ""
		}
		return e.Detail
	}
	value := func(want float64) {
		t.Helper()
		if got := harness.Scan[float64](t, pool, "SELECT value FROM ratelimit.limits WHERE name = 'projects' AND key = 'acme'"); got != want {
			t.Errorf("value %v, want %v", got, want)
		}
	}
	many(0, "")
	many(3, "c a b a")
	many(0, "a b")
	many(1, "a d")
	value(-4)
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 3, forever => true)")
	many(0, "a b") // although there are fewer by now
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 5, forever => true)")
	harness.Eventually(t, "the Limiter follows", func() bool {
		b, err := h.limits.Balance(t.Context(), pool, acme)
		return err == nil && b[0].Capacity == 5
	})
	if d := denied("PT429", "rate limit exceeded: projects", "e f"); !strings.Contains(d, `"remaining" : 1`) || !strings.Contains(d, `"retry_at" : null`) {
		t.Error(d)
	}
	value(-4)
	if got := harness.Scan[int](t, pool, "SELECT ratelimit.release_many('projects', 'globex', '{a}')"); got != 0 { // another's of that id
		t.Errorf("%d were released", got)
	}
	released(2, "a d x")
	released(0, "a d x")
	value(-2)
	if got := harness.Lines(t, pool, "SELECT id, count, until, expired FROM ratelimit.holds('projects', 'acme')"); got != "(c,1,,f)\n(b,1,,f)" && got != "(b,1,,f)\n(c,1,,f)" {
		t.Error(got)
	}
	if held := h.holds("b", ratelimit.Forever, acme); !held.Repeated {
		t.Errorf("%+v", held)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.hold('projects', 'acme', 'two', 2, forever => true)")
	released(3, "b two c")
	value(0)

	// Ids with another past: in time, settled, expired, lapsed.
	first := h.holds("job", time.Hour, acme)
	denied("PT409", `"reason" : "held"`, "e job")
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.release_many('projects', 'acme', '{job,x}')"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "not a hold of slots without an end") {
		t.Error(err)
	}
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now() - interval '1 second' WHERE id = 'job'")
	many(2, "e job")
	value(-2)
	h.lost(first.Token, acme)
	second := h.holds("done", time.Hour, acme)
	h.settle(second.Token, []float64{1}, acme)
	denied("PT409", `"reason" : "settled"`, "done f")
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now() WHERE id = 'done'")
	many(1, "done e")
	value(-3)

	// One that has expired makes room for others, and one that has not says when.
	h.holds("job 2", time.Hour, acme)
	third := h.holds("job 3", time.Hour, acme)
	if d := denied("PT429", "rate limit exceeded: projects", "f"); !strings.Contains(d, `"retry_at" : "`+third.Until.UTC().Format("2006-01-02T15")[:10]) {
		t.Error(d)
	}
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now() - interval '1 second' WHERE id = 'job 3'")
	many(1, "f")
	value(-5)
	harness.MustExec(t, pool, "SELECT ratelimit.block('projects', 'acme', forever => true)")
	released(1, "f") // goes on
	denied("PT429", "rate limit exceeded: projects", "g")
	value(-4)
}

// TestHoldManyOfExpired: slots of more expired holds than one call gives back (1000) are free: of others, and of the same ids.
func TestHoldManyOfExpired(t *testing.T) {
	t.Parallel()
	pool, _ := holdingByHand(t)
	harness.MustExec(t, pool, "SELECT ratelimit.override('renders', k, capacity => 3000, forever => true), ratelimit.hold_many('renders', k, array_agg('old' || i)) FROM unnest('{others,same}'::text[]) AS k, generate_series(1, 3000) AS i GROUP BY k")
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET token = gen_random_uuid(), until = now() - interval '1 second'")
	for key, id := range map[string]string{"others": "new", "same": "old"} {
		if got := harness.Scan[int](t, pool, "SELECT ratelimit.hold_many('renders', $1, (SELECT array_agg($2 || i) FROM generate_series(1, 2500) AS i))", key, id); got != 2500 {
			t.Errorf("%s: %d were taken", key, got)
		}
		if got := harness.Lines(t, pool, "SELECT value, (SELECT count(*) FROM ratelimit.holds WHERE key = '"+key+"' AND state = 'held') FROM ratelimit.limits WHERE key = '"+key+"'"); got != "(-2500,2500)" {
			t.Errorf("%s: in use and held: %s", key, got)
		}
	}
}

// TestSlotsOfARowAboveZero: a program that took the name for a token bucket has left tokens in the row of slots. They are no slots: no more are granted or shown than
// there are.
func TestSlotsOfARowAboveZero(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	acme := rendersByHand.Key("acme")
	harness.MustExec(t, pool, "INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('renders', 'acme', 0, 1, 999, now())")
	above := func() { t.Helper(); harness.MustExec(t, pool, "UPDATE ratelimit.limits SET value = 21.6") }
	value := func(want float64) {
		t.Helper()
		if got := harness.Scan[float64](t, pool, "SELECT value FROM ratelimit.limits"); got != want {
			t.Errorf("value %v, want %v", got, want)
		}
	}
	above()
	h.has(acme, 2)
	if got := harness.Lines(t, pool, "SELECT s.used, s.free, k.remaining FROM ratelimit._free_slots('renders', 'acme', 2, now(), 1) AS s, ratelimit.keys('renders', keys => '{acme}') AS k"); got != "(0,2,2)" {
		t.Errorf("used and free: %s", got)
	}
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.hold_many('renders', 'acme', '{a,b,c}')"); harness.SQLState(err) != "22023" {
		t.Errorf("more than there are: %v", err)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.override('renders', 'acme', capacity => 1, until => now() + interval '1 hour')")
	if d := denies(t, pool, "rate limit exceeded: renders", "SELECT token FROM ratelimit.hold('renders', 'acme', 'a', 2, forever => true)"); *d.Remaining != 1 || d.RetryAt == nil || *d.RetryAfter > 3600 { // when the override ends
		t.Errorf("%+v", d)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.restore('renders', 'acme')")
	if got := harness.Scan[int](t, pool, "SELECT ratelimit.hold_many('renders', 'acme', '{a,b}')"); got != 2 {
		t.Errorf("%d were taken", got)
	}
	value(-2)
	denies(t, pool, "rate limit exceeded: renders", "SELECT ratelimit.hold_many('renders', 'acme', '{c}')::text")
	harness.MustExec(t, pool, "SELECT ratelimit.release_many('renders', 'acme', '{a,b}')")
	for _, ttl := range []time.Duration{ratelimit.Forever, time.Hour} { // the function, and the plain statement
		above()
		h.holds(fmt.Sprint(ttl), ttl, acme)
		value(-1)
		harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1, who => 'ann')", fmt.Sprint(ttl))
	}
}

func TestHoldManyRefuses(t *testing.T) {
	t.Parallel()
	pool, _ := holdingByHand(t)
	for sql, want := range map[string]string{
		"ratelimit.hold_many('renders', 'acme')":                        "ids must not be NULL",
		"ratelimit.hold_many('renders', 'acme', '{a,NULL}')":            "id must have 1 to 255 bytes, not NULL",
		"ratelimit.hold_many('renders', 'acme', '{a,~b}')":              "id must not begin with ~",
		"ratelimit.hold_many('renders', NULL, '{a}')":                   "key must have 1 to 1024 bytes, not NULL",
		"ratelimit.hold_many('rendrs', 'acme', '{a}')":                  "no program has published it",
		"ratelimit.hold_many('projects', 'acme', '{a}')":                "the numbers of this key are the program's",
		"ratelimit.hold_many('budget', 'acme', '{a}')":                  "many ids hold slots, and it has none",
		"ratelimit.hold_many('renders', 'acme', '{a}', global => true)": "key must be NULL with global => true",
		"ratelimit.release_many(NULL, 'acme', '{a}')":                   "name must have 1 to 255 bytes, not NULL",
		"ratelimit.release_many('renders', 'acme')":                     "ids must not be NULL",
		"ratelimit.recount('renders')":                                  "key must have 1 to 1024 bytes, not NULL",
		"ratelimit.recount('budget', 'acme')":                           "it has no slots",
	} {
		if _, err := pool.Exec(t.Context(), "SELECT "+sql); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", sql, err, want)
		}
	}
	harness.MustExec(t, pool, "SELECT ratelimit.hold('budget', 'acme', 'a', forever => true)")
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.release_many('budget', 'acme', '{a}')"); harness.SQLState(err) != "22023" {
		t.Error(err)
	}
	if got := harness.Scan[int](t, pool, "SELECT ratelimit.hold_many('noGlobal', ids => '{a,b}', global => true) FROM ratelimit.publish('b', '[{\"name\": \"noGlobal\", \"kind\": \"slots\", \"capacity\": 2}]')"); got != 2 {
		t.Error(got)
	}
}

// TestHoldManyAboveReadCommitted: what the snapshot misses is 40001, and never granted or "there was none".
func TestHoldManyAboveReadCommitted(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for _, sql := range []string{"SELECT ratelimit.hold_many('renders', $1, '{x}')", "SELECT ratelimit.release_many('renders', $1, '{id}')", "SELECT ratelimit.recount('renders', $1)"} {
			key := string(level) + sql[7:28]
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			harness.MustExecIn(t, tx, "SELECT count(*) FROM ratelimit.limits")
			h.holds("id", ratelimit.Forever, rendersByHand.Key(key))
			if _, err := tx.Exec(t.Context(), sql, key); harness.SQLState(err) != "40001" {
				t.Errorf("%s: %s: %v, want 40001", level, sql, err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			err = pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				harness.MustExecIn(t, tx, strings.Replace(sql, "$1", "'"+strings.ReplaceAll(key, "'", "''")+"'", 1))
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// TestHoldManyMeetsAMark: a slot that was released while its hold was on its way is not taken. A mark of the future, of before the clock stepped back, bars
// nothing.
func TestHoldManyMeetsAMark(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	acme := projectsByHand.Key("acme")
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 5, forever => true)")
	h.holds("first", ratelimit.Forever, acme)
	left := 4.0
	for sql, id := range map[string]string{"SELECT ratelimit.hold_many('projects', 'acme', '{many}')": "many", "SELECT ratelimit.hold('projects', 'acme', 'one', forever => true)": "one"} {
		locks := beginAt(t, pool, pgx.ReadCommitted)
		harness.MustExecIn(t, locks, "SELECT 1 FROM ratelimit.limits FOR UPDATE")
		came := make(chan error, 1)
		go func() {
			_, err := pool.Exec(t.Context(), sql)
			came <- err
		}()
		harness.Blocked(t, pool, locks, 1)
		if harness.Scan[bool](t, pool, "SELECT ratelimit.release('projects', 'acme', $1)", id) {
			t.Error("it was not held yet")
		}
		if err := locks.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-came; harness.SQLState(err) != "40001" {
			t.Errorf("%s: %v, want 40001", sql, err)
		}
		harness.MustExec(t, pool, "UPDATE ratelimit.holds SET taken_at = now() + interval '1 hour' WHERE state = 'released'")
		harness.MustExec(t, pool, sql)
		left--
		h.has(acme, left)
	}
}

// TestAReleaseFollowsItsHold: a release by the token waits for a hold of the same id, which moves the row of the first, expired, to another id.
func TestAReleaseFollowsItsHold(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	acme := budgetByHand.Key("acme")
	first := h.holds("job", time.Hour, acme.Count(40))
	harness.MustExec(t, pool, "DELETE FROM ratelimit.limits; UPDATE ratelimit.holds SET until = now() - interval '1 second'")
	second := beginAt(t, pool, pgx.ReadCommitted)
	harness.Succeeds(t, harness.Second(h.limits.Hold(t.Context(), second, "job", time.Hour, acme)))
	released := make(chan error, 1)
	go func() {
		_, err := pool.Exec(t.Context(), "SELECT ratelimit.release('budget', 'acme', $1)", first.Token)
		released <- err
	}()
	harness.Blocked(t, pool, second, 1)
	harness.Succeeds(t, second.Commit(t.Context()))
	harness.Succeeds(t, <-released)
	if got := harness.Lines(t, pool, "SELECT id, state FROM ratelimit.holds"); got != "(job,held)" {
		t.Errorf("what is left: %s", got)
	}
}

// TestHoldManyRace: sessions hold, release and recount the same ids, one by one and many at once. The value is what is held.
func TestHoldManyRace(t *testing.T) {
	t.Parallel()
	pool, _ := holdingByHand(t)
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 4, forever => true)")
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 60 {
				ids := []string{fmt.Sprint((worker + i) % 3), fmt.Sprint((worker * i) % 5)}
				for _, sql := range []string{
					"SELECT ratelimit.hold_many('projects', 'acme', $1)", "SELECT ratelimit.hold('projects', 'acme', ($1::text[])[1], forever => true)", "SELECT ratelimit.recount('projects', 'acme') WHERE $1::text[] IS NOT NULL",
					"SELECT ratelimit.release('projects', 'acme', ($1::text[])[2])", "SELECT ratelimit.release_many('projects', 'acme', $1)",
				}[i%2*3:] {
					if _, err := pool.Exec(t.Context(), sql, ids); err != nil && harness.SQLState(err) != "PT429" && harness.SQLState(err) != "40001" { // it was released meanwhile
						t.Errorf("%s: %v", sql, err)
					}
				}
				if got := harness.Lines(t, pool, "SELECT value, held FROM ratelimit.limits AS r, LATERAL (SELECT count(*) AS held FROM ratelimit.holds WHERE state = 'held') AS h WHERE r.value <> -held OR held > 4"); got != "" {
					t.Error(got)
				}
			}
		})
	}
	wg.Wait()
}

// TestSlotsOfATable: triggers keep the slots of a table right through what statements do, and a recount mends what they cannot see.
func TestSlotsOfATable(t *testing.T) {
	t.Parallel()
	pool, _ := holdingByHand(t)
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/holds.md", "CREATE FUNCTION projects_come"))
	harness.MustExec(t, pool, "CREATE TABLE teams (id text PRIMARY KEY)")
	harness.MustExec(t, pool, "INSERT INTO teams VALUES ('a'), ('b')")
	harness.MustExec(t, pool, "ALTER TABLE projects ADD FOREIGN KEY (team) REFERENCES teams ON DELETE CASCADE ON UPDATE CASCADE")
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', k, capacity => 10000, forever => true) FROM unnest(ARRAY['a', 'b']) AS k")
	agrees := func(what string, a, b int) {
		t.Helper()
		got := harness.Lines(t, pool, `SELECT k, coalesce(0 - (SELECT value FROM ratelimit.limits WHERE name = 'projects' AND key = k), 0),
			(SELECT count(*) FROM ratelimit.holds WHERE name = 'projects' AND key = k AND state = 'held'), (SELECT count(*) FROM projects WHERE team = k) FROM unnest(ARRAY['a', 'b']) AS k ORDER BY k`)
		if want := fmt.Sprintf("(a,%d,%d,%d)\n(b,%d,%d,%d)", a, a, a, b, b, b); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	begin := time.Now()
	harness.MustExec(t, pool, "INSERT INTO projects SELECT 'p' || i, 'a' FROM generate_series(1, 10000) AS i")
	t.Logf("10,000 rows in %v", time.Since(begin))
	agrees("many", 10000, 0)
	if _, err := pool.Exec(t.Context(), "INSERT INTO projects VALUES ('one more', 'a'), ('other', 'b')"); harness.SQLState(err) != "PT429" {
		t.Error(err)
	}
	agrees("denied", 10000, 0)
	harness.MustExec(t, pool, "UPDATE projects SET team = 'b' WHERE id <= 'p2'")
	moved := harness.Scan[int](t, pool, "SELECT count(*) FROM projects WHERE team = 'b'")
	agrees("moved", 10000-moved, moved)
	harness.MustExec(t, pool, "UPDATE projects SET id = id WHERE team = 'b'")
	agrees("nothing changed", 10000-moved, moved)
	harness.MustExec(t, pool, "UPDATE projects SET team = CASE team WHEN 'a' THEN 'b' ELSE 'a' END")
	agrees("changed places", moved, 10000-moved)
	harness.MustExec(t, pool, "DELETE FROM teams WHERE id = 'b'")
	agrees("a cascade", moved, 0)

	// A restore of one table, or a TRUNCATE of it.
	harness.MustExec(t, pool, "TRUNCATE ratelimit.limits")
	if got := harness.Scan[float64](t, pool, "SELECT ratelimit.recount('projects', 'a')"); got != float64(moved) {
		t.Errorf("%v in use, want %d", got, moved)
	}
	agrees("recounted", moved, 0)
	harness.MustExec(t, pool, "TRUNCATE projects") // fires no trigger for rows
	harness.MustExec(t, pool, "SELECT ratelimit.release_many('projects', 'a', (SELECT array_agg(id) FROM ratelimit.holds('projects', 'a')))")
	agrees("emptied", 0, 0)
	harness.MustExec(t, pool, "INSERT INTO projects VALUES ('x', 'a'), ('y', 'a')")
	harness.MustExec(t, pool, "DELETE FROM ratelimit.holds")
	if got := harness.Scan[float64](t, pool, "SELECT ratelimit.recount('projects', 'a')"); got != 0 {
		t.Errorf("%v in use", got)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.hold_many('projects', 'a', array_agg(id)) FROM projects")
	agrees("taken up again", 2, 0)
}

// TestASweepBesideARecount: a sweep has found a key without rows. While it reads the holds, a recount counts them. It ends none of those then: their
// slots would stay in use.
func TestASweepBesideARecount(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets a role")
	pool, h := holdingByHand(t)
	h.holds("job", time.Hour, rendersByHand.Key("acme"))
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now() - interval '1 second'")
	harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")

	// A policy keeps the sweep waiting where it reads a hold: only of a role that is bound by it.
	role := harness.CreateRole(t, pool)
	harness.MustExec(t, pool, "CREATE FUNCTION waits() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock_shared(45); RETURN true; END'")
	harness.MustExec(t, pool, "ALTER TABLE ratelimit.holds ENABLE ROW LEVEL SECURITY; CREATE POLICY waits ON ratelimit.holds TO "+role+" USING (waits()) WITH CHECK (true)")
	harness.MustExec(t, pool, harness.Execute(role)+"; GRANT USAGE ON SCHEMA ratelimit TO "+role+"; GRANT ALL ON ALL TABLES IN SCHEMA ratelimit TO "+role)
	recount := beginAt(t, pool, pgx.ReadCommitted)
	harness.MustExecIn(t, recount, "SELECT pg_advisory_xact_lock(45)")
	ended := make(chan error, 1)
	go func() {
		ended <- pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SET LOCAL ROLE "+role); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), "SELECT ratelimit._sweep_key('renders', 'acme', NULL)")
			return err
		})
	}()
	harness.WaitingFor(t, pool, recount)
	harness.MustExecIn(t, recount, "SELECT ratelimit.recount('renders', 'acme')")
	if err := recount.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	counted := "SELECT value, (SELECT count(*) FROM ratelimit.holds WHERE state = 'held') FROM ratelimit.limits"
	if got := harness.Lines(t, pool, counted); got != "(-1,1)" {
		t.Errorf("in use and held: %s", got)
	}
	harness.MustExec(t, pool, "SELECT ratelimit._sweep_holds('', '', '', NULL)")
	if got := harness.Lines(t, pool, counted); got != "(0,0)" {
		t.Errorf("after the next sweep: %s", got)
	}
}

// TestAReleaseBesideARecount: a release has found a key without rows, and waits for a hold that a recount has counted. It fails then, and frees the
// slot when it is called again: else that would stay in use for good. A recount that comes after a release does not count its hold.
func TestAReleaseBesideARecount(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		pool, h := holdingByHand(t)
		h.holds("1", ratelimit.Forever, rendersByHand.Key("acme"))
		h.holds("2", ratelimit.Forever, rendersByHand.Key("acme"))
		harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")
		counted := func(want string) {
			t.Helper()
			if got := harness.Lines(t, pool, "SELECT value, (SELECT count(*) FROM ratelimit.holds WHERE state = 'held') FROM ratelimit.limits"); got != want {
				t.Errorf("%s: in use and held: %s, want %s", level, got, want)
			}
		}

		recount := beginAt(t, pool, pgx.ReadCommitted)
		harness.MustExecIn(t, recount, "SELECT ratelimit.recount('renders', 'acme')")
		release := beginAt(t, pool, level)
		ended := make(chan error, 1)
		go func() {
			ended <- harness.Second(release.Exec(t.Context(), "SELECT ratelimit.release('renders', 'acme', '1')"))
		}()
		harness.WaitingFor(t, pool, recount)
		harness.Succeeds(t, recount.Commit(t.Context()))
		if err := <-ended; harness.SQLState(err) != "40001" {
			t.Errorf("%s: %v, want 40001", level, err)
		}
		harness.Succeeds(t, release.Rollback(t.Context()))
		counted("(-2,2)")
		if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', '1')") {
			t.Errorf("%s: there is no such hold", level)
		}
		counted("(-1,1)")

		h.holds("1", ratelimit.Forever, rendersByHand.Key("acme"))
		harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")
		release = beginAt(t, pool, level)
		harness.MustExecIn(t, release, "SELECT ratelimit.release('renders', 'acme', '1')")
		go func() { ended <- harness.Second(pool.Exec(t.Context(), "SELECT ratelimit.recount('renders', 'acme')")) }()
		harness.WaitingFor(t, pool, release)
		harness.Succeeds(t, release.Commit(t.Context()))
		harness.Succeeds(t, <-ended)
		counted("(-1,1)")
	}
}

// TestAReleaseBesideAConsume: a row that a Consume inserts meanwhile began full, so nothing is missed, and the release does not fail.
func TestAReleaseBesideAConsume(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	h.holds("1", ratelimit.Forever, budgetByHand.Key("acme").Count(5))
	harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")
	other := beginAt(t, pool, pgx.ReadCommitted)
	harness.MustExecIn(t, other, "SELECT FROM ratelimit.holds FOR UPDATE")
	ended := make(chan error, 1)
	go func() {
		ended <- harness.Second(pool.Exec(t.Context(), "SELECT ratelimit.release('budget', 'acme', '1')"))
	}()
	harness.WaitingFor(t, pool, other)
	harness.MustExecIn(t, other, "SELECT ratelimit.consume('budget', 'acme', count => 7)")
	harness.Succeeds(t, other.Commit(t.Context()))
	harness.Succeeds(t, <-ended)
	if got := harness.Lines(t, pool, "SELECT r.value BETWEEN 93 AND 94, (SELECT count(*) FROM ratelimit.holds) FROM ratelimit.limits AS r"); got != "(t,0)" {
		t.Errorf("7 of 100 taken, and held: %s", got)
	}
}

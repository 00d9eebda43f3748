package holds_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	rendersByHand  = ratelimit.Slots("renders", 2)
	projectsByHand = ratelimit.Slots("projects", 5, ratelimit.Varies(0))
	budgetByHand   = ratelimit.TokenBucket("budget", 1, 1000*time.Hour, ratelimit.Capacity(100))
	wideByHand     = ratelimit.TokenBucket("wide", 1, 1000*time.Hour, ratelimit.Capacity(100), ratelimit.Shards(4))
)

// holdingByHand publishes limits, and returns a holder by the database's clock.
func holdingByHand(t *testing.T) (*pgxpool.Pool, holder) {
	t.Helper()
	pool := harness.NewPool(t, 6)
	limits := harness.Open(t, pool, ratelimit.Options{Program: "api", NoSweep: true, Limits: []ratelimit.Limit{
		rendersByHand, projectsByHand, budgetByHand, wideByHand, ratelimit.Unlimited("free"), ratelimit.TokenBucket("none", 0, time.Hour), ratelimit.Slots("noSlots", 0),
	}})
	return pool, holder{t, limits, pool, nil}
}

// denies wants a denial of SQL by hand, and returns its numbers.
func denies(t *testing.T, db ratelimit.DB, message, sql string) (d struct {
	Name       string
	Remaining  *float64
	RetryAt    *time.Time `json:"retry_at"`
	RetryAfter *float64   `json:"retry_after"`
	Reason     string
}) {
	t.Helper()
	var token string
	err := db.QueryRow(t.Context(), sql).Scan(&token)
	e, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || e.Code != map[bool]string{true: "PT429", false: "PT409"}[strings.HasPrefix(message, "rate limit exceeded: ")] || e.Message != message {
		t.Fatalf("%s: %v, want %q", sql, err, message)
	}
	if err := json.Unmarshal([]byte(e.Detail), &d); err != nil {
		t.Fatalf("%s: %v", e.Detail, err)
	}
	if strings.Contains(e.Message+e.Detail+e.Hint, "acme") {
		t.Errorf("the error has the key: %v %s %s", e, e.Detail, e.Hint)
	}
	return d
}

// TestHoldByHand: holds by SQL are those of the Go library, and the other way round.
func TestHoldByHand(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	acme := rendersByHand.Key("acme")
	before := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")
	var token string
	var expires, at time.Time
	var repeated bool
	var remaining float64
	if err := pool.QueryRow(t.Context(), "SELECT * FROM ratelimit.hold('renders', 'acme', 'jöb 1', ttl => '1 hour')").Scan(&token, &expires, &repeated, &remaining, &at); err != nil {
		t.Fatal(err)
	}
	if repeated || remaining != 1 || at.Before(before) || expires.Sub(at) < time.Hour || expires.Sub(at) > time.Hour+time.Minute || !strings.HasPrefix(token, "~") {
		t.Errorf("%q until %v, %t, %v, %v", token, expires, repeated, remaining, at)
	}
	h.has(acme, 1)
	if d := denies(t, pool, "rate limit 'renders': an id is held already", "SELECT token FROM ratelimit.hold('renders', 'acme', 'jöb 1', ttl => '1 hour')"); d.Reason != "held" || !d.RetryAt.Equal(expires) || d.Remaining != nil {
		t.Errorf("%+v", d)
	}
	two := h.holds("job 2", 30*time.Minute, acme)
	d := denies(t, pool, "rate limit exceeded: renders", "SELECT token FROM ratelimit.hold('renders', 'acme', 'job 3', ttl => '1 hour')")
	if d.Reason != "quota" || !d.RetryAt.Equal(two.Until) || d.Remaining == nil || *d.Remaining != 0 || *d.RetryAfter > 1800 {
		t.Errorf("%+v", d)
	}
	if got := harness.Lines(t, pool, "SELECT id, count, since >= '"+before.Format(time.RFC3339Nano)+"', until - since > '29 minutes', expired FROM ratelimit.holds('renders', 'acme')"); got != "(\"jöb 1\",1,t,t,f)\n(\"job 2\",1,t,t,f)" {
		t.Error(got)
	}

	// Go ends a hold of SQL, and SQL one of Go. A second time is no error.
	for _, want := range []bool{true, false} {
		if got := harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1)", two.Token); got != want {
			t.Errorf("released: %t, want %t", got, want)
		}
	}
	h.lost(two.Token, acme)
	h.settle(token, []float64{1}) // which has the list
	h.has(acme, 2)
	other := rendersByHand.Key("other")
	both := h.holds("both", time.Hour, acme, other)
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.release('renders', 'another', $1)", both.Token); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "of other limits or keys") {
		t.Error(err)
	}
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'other', $1)", both.Token) {
		t.Error("nothing was released")
	}
	h.has(acme, 2)
	h.has(other, 2)
	if d := denies(t, pool, "rate limit 'renders': an id is settled: its work was done within a day", "SELECT token FROM ratelimit.hold('renders', 'acme', 'jöb 1', ttl => '1 hour')"); d.Reason != "settled" || d.RetryAt != nil {
		t.Errorf("%+v", d)
	}
	if got := harness.Lines(t, pool, "SELECT * FROM ratelimit.holds('renders', 'acme')"); got != "" {
		t.Error(got)
	}
	if harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1)", token) {
		t.Error("a settled hold was released")
	}
	// The token of an ended hold does not end the next one of the id.
	again := harness.Scan[string](t, pool, "SELECT token FROM ratelimit.hold('renders', 'acme', 'job 2', ttl => '1 hour')")
	if harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1)", two.Token) || !harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1)", again) {
		t.Error("the token of another hold")
	}

	// The length of an id in a token is in bytes.
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', token) FROM ratelimit.hold('renders', 'acme', 'ö1', ttl => '1 hour')") {
		t.Error("the token of an id with an ö")
	}

	// An expired hold is one until somebody needs it.
	expired := harness.Scan[string](t, pool, "SELECT token FROM ratelimit.hold('renders', 'acme', 'dead', 2, ttl => '1 hour')")
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now() - interval '1 second' WHERE id = 'dead'")
	if got := harness.Lines(t, pool, "SELECT id, count, expired FROM ratelimit.holds('renders', 'acme')"); got != "(dead,2,t)" {
		t.Error(got)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.hold('renders', 'acme', 'alive', ttl => '1 hour')")
	if harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1)", expired) {
		t.Error("a lost hold was released")
	}
	h.has(acme, 1)
	// The hold is in the transaction.
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	harness.MustExecIn(t, tx, "SELECT ratelimit.hold('renders', 'acme', 'never', ttl => '1 hour')")
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.has(acme, 1)
}

// TestHoldByHandWithoutAnEnd: the id is the token, and asking again takes nothing.
func TestHoldByHandWithoutAnEnd(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	team := projectsByHand.With(ratelimit.Capacity(2)).Key("acme")
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 2, forever => true)") // the number of this key
	for _, want := range []string{"(p1,,f,1)", "(p1,,t,)"} {
		if got := harness.Lines(t, pool, "SELECT token, until, repeated, remaining FROM ratelimit.hold('projects', 'acme', 'p1', forever => true)"); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if d := denies(t, pool, "rate limit 'projects': an id is held already", "SELECT token FROM ratelimit.hold('projects', 'acme', 'p1', ttl => '1 hour')"); d.RetryAt != nil || d.Reason != "held" {
		t.Errorf("%+v", d)
	}
	h.holds("p2", ratelimit.Forever, team)
	if d := denies(t, pool, "rate limit exceeded: projects", "SELECT token FROM ratelimit.hold('projects', 'acme', 'p3', forever => true)"); d.RetryAt != nil || *d.Remaining != 0 {
		t.Errorf("%+v", d)
	}
	for _, want := range []bool{true, false} {
		if got := harness.Scan[bool](t, pool, "SELECT ratelimit.release('projects', 'acme', 'p2')"); got != want {
			t.Errorf("released: %t, want %t", got, want)
		}
	}
	h.has(team, 1)
	h.release("p1", team)
	h.has(team, 2)
	if got := harness.Lines(t, pool, "SELECT ratelimit.release('projects', 'acme', 'p1'), (ratelimit.hold('projects', 'acme', 'p1', forever => true)).token"); got != "(f,p1)" {
		t.Errorf("a release of nothing and a hold in one statement: %s", got)
	}
	if got := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides WHERE effect = 'release'"); got != 0 {
		t.Errorf("%d releases were written down, and nobody said who", got)
	}
}

// TestHoldByHandOfTokens: what comes back is by the rule of refunds, of windows, shards and limits without rows, too.
func TestHoldByHandOfTokens(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	for _, limit := range []ratelimit.Limit{budgetByHand, wideByHand} {
		var token string
		var remaining float64
		if err := pool.QueryRow(t.Context(), "SELECT token, remaining FROM ratelimit.hold($1, 'acme', 'job', 20, ttl => '1 hour')", limit.Name()).Scan(&token, &remaining); err != nil || remaining < 19.9 {
			t.Fatalf("%v: %v remain, %v", limit, remaining, err)
		}
		if got := harness.ReadBalance(t, h.limits, pool, limit.Key("acme")); got < 80 || got > 80.1 {
			t.Errorf("%v has %v", limit, got)
		}
		message := "rate limit exceeded: " + limit.Name()
		if d := denies(t, pool, message, "SELECT token FROM ratelimit.hold('"+limit.Name()+"', 'acme', 'other', 81, ttl => '1 hour')"); d.RetryAt == nil || *d.RetryAfter < 3000000 || *d.Remaining < 80 {
			t.Errorf("%+v", d)
		}
		// Under a block, and by an operator who says so, it is released by its id.
		harness.MustExec(t, pool, "SELECT ratelimit.block('"+limit.Name()+"', 'acme', until => now() + interval '1 hour')")
		if d := denies(t, pool, message, "SELECT token FROM ratelimit.hold('"+limit.Name()+"', 'acme', 'other', 0, ttl => '1 hour')"); *d.RetryAfter > 3600 || *d.RetryAfter < 3500 || *d.Remaining != 0 {
			t.Errorf("%+v", d)
		}
		if !harness.Scan[bool](t, pool, "SELECT ratelimit.release($1, 'acme', $2)", limit.Name(), token) {
			t.Error("nothing was released")
		}
		harness.MustExec(t, pool, "SELECT ratelimit.unblock('"+limit.Name()+"', 'acme')")
		allBack := func() bool { // once the Limiter has heard what is in force
			got := harness.ReadBalance(t, h.limits, pool, limit.Key("acme"))
			return got >= 99.9 && got <= 100
		}
		harness.Eventually(t, limit.Name()+" has all after the release", allBack)
		// While an override lifts the limit, nothing is held; what was held before comes back.
		token = harness.Scan[string](t, pool, "SELECT token FROM ratelimit.hold($1, 'acme', 'lifted', 30, ttl => '1 hour')", limit.Name())
		harness.MustExec(t, pool, "SELECT ratelimit.unlimited('"+limit.Name()+"', 'acme', forever => true)")
		if got := harness.Lines(t, pool, "SELECT remaining FROM ratelimit.hold('"+limit.Name()+"', 'acme', 'during', 1000, ttl => '1 hour')"); got != "(Infinity)" {
			t.Error(got)
		}
		for _, id := range []string{token, harness.Scan[string](t, pool, "SELECT ratelimit.release($1, 'acme', 'during', who => 'ann')::text", limit.Name())} {
			if id != "true" && !harness.Scan[bool](t, pool, "SELECT ratelimit.release($1, 'acme', $2)", limit.Name(), id) {
				t.Error("nothing was released")
			}
		}
		harness.MustExec(t, pool, "SELECT ratelimit.restore('"+limit.Name()+"', 'acme')")
		harness.Eventually(t, limit.Name()+" has all after the second release", allBack)
		// A key whose rows were swept is full.
		harness.MustExec(t, pool, "SELECT ratelimit.hold('"+limit.Name()+"', 'swept', 'job', 5, forever => true)")
		harness.MustExec(t, pool, "DELETE FROM ratelimit.limits WHERE key = 'swept'")
		if got := harness.Lines(t, pool, "SELECT repeated, remaining FROM ratelimit.hold('"+limit.Name()+"', 'swept', 'job', 5, forever => true)"); got != "(t,)" {
			t.Error(got)
		}
		if !harness.Scan[bool](t, pool, "SELECT ratelimit.release($1, 'swept', 'job')", limit.Name()) || harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.limits WHERE key = 'swept'") != 0 {
			t.Error("a release of a full key")
		}
	}
	// Limits without rows.
	if got := harness.Lines(t, pool, "SELECT token, remaining FROM ratelimit.hold('free', 'acme', 'a', 1000, forever => true)"); got != "(a,Infinity)" {
		t.Error(got)
	}
	if got := harness.Lines(t, pool, "SELECT id, count FROM ratelimit.holds('free', 'acme')"); got != "(a,0)" {
		t.Error(got)
	}
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('free', 'acme', 'a')") {
		t.Error("nothing was released")
	}
	for _, name := range []string{"none", "noSlots"} {
		if d := denies(t, pool, "rate limit exceeded: "+name, "SELECT token FROM ratelimit.hold('"+name+"', 'acme', 'a', ttl => '1 hour')"); d.RetryAt != nil || *d.Remaining != 0 {
			t.Errorf("%+v", d)
		}
	}
	// More than the numbers grant now, but not for good.
	harness.MustExec(t, pool, "SELECT ratelimit.override('budget', 'small', capacity => 10, until => now() + interval '1 hour')")
	if d := denies(t, pool, "rate limit exceeded: budget", "SELECT token FROM ratelimit.hold('budget', 'small', 'a', 50, forever => true)"); d.RetryAt == nil {
		t.Errorf("%+v", d)
	}
	// So of slots: an override that ends makes room for the definition.
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'small', capacity => 5, forever => true), ratelimit.override('projects', 'small', capacity => 1, until => now() + interval '1 hour'), ratelimit.hold('projects', 'small', 'long', forever => true)")
	small := projectsByHand.Key("small")
	harness.Eventually(t, "the Limiter follows", func() bool {
		b, err := h.limits.Balance(t.Context(), pool, small)
		return err == nil && b[0].Capacity == 1
	})
	for count, call := range map[int]string{1: "hold('projects', 'small', 'a', forever => true)", 4: "hold('projects', 'small', 'a', 4, ttl => '2 hours')", 3: "hold_many('projects', 'small', '{a,b,c}')"} {
		d := denies(t, pool, "rate limit exceeded: projects", "SELECT (ratelimit."+call+")::text")
		if d.RetryAt == nil || *d.RetryAfter > 3600 || *d.RetryAfter < 3500 || *d.Remaining != 0 {
			t.Errorf("%s: %+v", call, d)
		}
		_, err := h.limits.Hold(t.Context(), pool, "a", time.Hour, small.Count(float64(count)))
		if denied, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || !denied.RetryAt.Equal(*d.RetryAt) {
			t.Errorf("%d: %v, want RetryAt %v", count, err, *d.RetryAt)
		}
	}
	for _, call := range []string{"hold('projects', 'small', 'a', 6, ttl => '2 hours')", "hold_many('projects', 'small', '{a,b,c,d,e,f}')"} {
		if _, err := pool.Exec(t.Context(), "SELECT ratelimit."+call); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "must be at most 1, not 6: more can never be granted") {
			t.Errorf("%s: %v", call, err)
		}
	}
	if _, err := h.limits.Hold(t.Context(), pool, "a", time.Hour, small.Count(6)); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
		t.Error(err)
	}
	// Limits without keys.
	token := harness.Scan[string](t, pool, "SELECT token FROM ratelimit.hold('budget', id => 'job', count => 60, ttl => '1 hour', global => true)")
	if got := harness.Lines(t, pool, "SELECT key, id, count, unit FROM ratelimit.holds('budget', global => true)"); got != "(\"\",job,60,tokens)" {
		t.Error(got)
	}
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('budget', id => $1, global => true)", token) {
		t.Error("nothing was released")
	}
	if got := harness.ReadBalance(t, h.limits, pool, budgetByHand.Global()); got < 99.9 {
		t.Errorf("%v remain", got)
	}
}

// TestAnOperatorReleasesAHold: by its id, and the history says who.
func TestAnOperatorReleasesAHold(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	acme := rendersByHand.Key("acme")
	held := h.holds("job 1", time.Hour, acme)
	for _, who := range []string{"", ", reason => '', who => ''"} {
		if _, err := pool.Exec(t.Context(), "SELECT ratelimit.release('renders', 'acme', 'job 1'"+who+")"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "this hold has an end: pass its token instead of its id") {
			t.Error(err)
		}
	}
	h.has(acme, 1)
	h.holds("job 0", time.Hour, acme) // one that has ended is none, whether a sweep has come or not
	harness.MustExec(t, pool, "UPDATE ratelimit.holds SET until = now() - interval '1 second' WHERE id = 'job 0'")
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = now() - interval '1 second' WHERE name = 'renders'")
	if got := harness.Lines(t, pool, "SELECT ratelimit.release('renders', 'acme', 'job 0'), ratelimit.release_many('renders', 'acme', '{job 0}')"); got != "(f,0)" {
		t.Error(got)
	}
	if released, err := h.limits.Release(t.Context(), pool, "job 0", acme); released || err != nil {
		t.Errorf("%t, %v", released, err)
	}
	for _, want := range []bool{true, false} {
		if got := harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', 'job 1', reason => 'its worker hangs', who => 'ann')"); got != want {
			t.Errorf("released: %t, want %t", got, want)
		}
	}
	h.has(acme, 2)
	h.lost(held.Token, acme)
	h.holds("job 2", ratelimit.Forever, acme)
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', 'job 2', who => 'bob')") {
		t.Error("nothing was released")
	}
	if got := harness.Lines(t, pool, "SELECT name, key, effect, reason, made_by, made_as = session_user, until FROM ratelimit.overrides ORDER BY id"); got != "(renders,acme,release,\"job 1: its worker hangs\",ann,t,-infinity)\n(renders,acme,release,\"job 2\",bob,t,-infinity)" {
		t.Error(got)
	}
	// It is no override: nothing is in force, and programs do not see it.
	if got := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit._in_force('renders', '{acme}', now())"); got != 0 {
		t.Errorf("%d are in force", got)
	}
	h.holds("job 3", time.Hour, acme)

	p := harness.NewConsole(t, pool, "ann")
	p.Get(200, "key?name=renders&key=acme", "release", "job 1: its worker hangs", "ann", "done")

	// One whom nobody has told the token, and one who would say a wrong one.
	for _, id := range []string{"never", "~0123456789abcdef0123456789abcdef5:job 3", "~0123456789abcdef0123456789abcdef5:job 3[[\"renders\",\"acme\",1]]"} {
		if harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1, who => 'ann')", id) {
			t.Errorf("%s was released", id)
		}
	}
}

func TestHoldByHandRefuses(t *testing.T) {
	t.Parallel()
	pool, _ := holdingByHand(t)
	const published = "no program has published it"
	for sql, want := range map[string]string{
		"ratelimit.hold('renders', 'acme', ttl => '1 hour')":                                                   "id must have 1 to 255 bytes, not NULL",
		"ratelimit.hold('renders', 'acme', '', ttl => '1 hour')":                                               "id must have 1 to 255 bytes, not 0",
		"ratelimit.hold('renders', 'acme', repeat('x', 256), ttl => '1 hour')":                                 "id must have 1 to 255 bytes, not 256",
		"ratelimit.hold('renders', 'acme', '~x', ttl => '1 hour')":                                             "id must not begin with ~",
		"ratelimit.hold('renders', 'acme', E'a\\nb', ttl => '1 hour')":                                         "must have no control characters",
		"ratelimit.hold('renders', 'acme', E'a\\u0085b', ttl => '1 hour')":                                     "must have no control characters",
		"ratelimit.hold('renders', 'acme', 'a')":                                                               "ttl must be between 100 milliseconds and 366 days, not NULL; forever => true",
		"ratelimit.hold('renders', 'acme', 'a', ttl => '99 milliseconds')":                                     "not 00:00:00.099",
		"ratelimit.hold('renders', 'acme', 'a', ttl => '367 days')":                                            "not 367 days",
		"ratelimit.hold('renders', 'acme', 'a', ttl => '-1 second')":                                           "not -00:00:01",
		"ratelimit.hold('renders', 'acme', 'a', ttl => '1 hour', forever => true)":                             "ttl must be NULL with forever => true, not 01:00:00",
		"ratelimit.hold('renders', 'acme', 'a', forever => NULL)":                                              "forever must be true or false, not NULL",
		"ratelimit.hold('renders', NULL, 'a', forever => true)":                                                "key must have 1 to 1024 bytes, not NULL",
		"ratelimit.hold('renders', 'acme', 'a', forever => true, global => true)":                              "key must be NULL with global => true",
		"ratelimit.hold('renders', 'acme', 'a', 1.5, forever => true)":                                         "count of slots must be a whole number between 1 and 1e9, not 1.5",
		"ratelimit.hold('renders', 'acme', 'a', 0, forever => true)":                                           "count of slots must be a whole number between 1 and 1e9, not 0",
		"ratelimit.hold('renders', 'acme', 'a', 3, forever => true)":                                           "count must be at most 2, not 3: more can never be granted",
		"ratelimit.hold('budget', 'acme', 'a', -1, forever => true)":                                           "count must be 0 or between 1e-15 and 1e15, not -1",
		"ratelimit.hold('budget', 'acme', 'a', 101, forever => true)":                                          "count must be at most 100, not 101: more can never be granted",
		"ratelimit.hold('rendrs', 'acme', 'a', forever => true)":                                               published,
		"ratelimit.hold(NULL, 'acme', 'a', forever => true)":                                                   published,
		"ratelimit.hold('projects', 'acme', 'a', forever => true)":                                             "the numbers of this key are the program's",
		"ratelimit.release(NULL, 'acme', 'a')":                                                                 "name must have 1 to 255 bytes, not NULL",
		"ratelimit.release('renders', NULL, 'a')":                                                              "key must have 1 to 1024 bytes, not NULL",
		"ratelimit.release('renders', 'acme')":                                                                 "id must have 1 to 255 bytes, not NULL",
		"ratelimit.release('renders', 'acme', '~x')":                                                           "the token cannot be read: it was altered",
		`ratelimit.release('renders', 'acme', '~0123456789abcdef0123456789abcdef1:x[["renders"')`:              "of other limits or keys, or was altered",
		`ratelimit.release('renders', 'acme', '~0123456789abcdef0123456789abcdef1:x{"renders": "acme"}')`:      "of other limits or keys, or was altered",
		"ratelimit.release('renders', 'acme', '~0123456789abcdef0123456789abcdef9:short')":                     "the token cannot be read: it was altered",
		"ratelimit.release('renders', 'acme', '~0123456789abcdef0123456789abcdef1:ö')":                         "the token cannot be read: it was altered",
		"ratelimit.release('renders', 'acme', '~0123456789abcdef0123456789abcdef1:x' || repeat(' ', 1048576))": "the token cannot be read: it was altered",
		"ratelimit.release('renders', 'acme', 'a', reason => repeat('x', 3801))":                               "the reason is longer than 3800 bytes",
		"ratelimit.release('renders', 'acme', 'a', who => repeat('x', 256))":                                   "who is longer than 255 bytes",
		"ratelimit.holds(NULL, 'acme')":                                                                        "name must have 1 to 255 bytes, not NULL",
		"ratelimit.holds('renders')":                                                                           "key must have 1 to 1024 bytes, not NULL",
	} {
		_, err := pool.Exec(t.Context(), "SELECT * FROM "+sql)
		if harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", sql, err, want)
		}
		if e, ok := errors.AsType[*pgconn.PgError](err); ok && strings.Contains(e.Hint, "Pass") {
			t.Errorf("%s: the hint names arguments that there are not: %s", sql, e.Hint)
		}
	}
	if n := harness.Scan[int](t, pool, "SELECT (SELECT count(*) FROM ratelimit.limits) + (SELECT count(*) FROM ratelimit.holds)"); n != 0 {
		t.Errorf("%d rows were written", n)
	}
	// Of tokens, the numbers must be known to give them back.
	harness.MustExec(t, pool, "SELECT ratelimit.hold('budget', 'acme', 'a', 5, forever => true), ratelimit.hold('renders', 'acme', 'a', forever => true), ratelimit.withdraw('api')")
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.release('budget', 'acme', 'a')"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), published) {
		t.Error(err)
	}
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', 'a')") {
		t.Error("slots are given back whatever their number")
	}
}

// TestHoldByHandAboveReadCommitted: a hold that the snapshot misses is 40001, and never "there was none".
func TestHoldByHandAboveReadCommitted(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		id := string(level)
		tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		if err != nil {
			t.Fatal(err)
		}
		harness.MustExecIn(t, tx, "SELECT count(*) FROM ratelimit.limits")
		h.holds(id, ratelimit.Forever, rendersByHand.Key("acme"))
		if _, err := tx.Exec(t.Context(), "SELECT ratelimit.release('renders', 'acme', $1)", id); harness.SQLState(err) != "40001" {
			t.Errorf("%s: %v, want 40001", level, err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		err = pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			if !harness.Scan[bool](t, tx, "SELECT ratelimit.release('renders', 'acme', $1)", id) || harness.Scan[bool](t, tx, "SELECT ratelimit.release('renders', 'acme', $1)", id) {
				t.Error("it is released once")
			}
			harness.MustExecIn(t, tx, "SELECT ratelimit.hold('renders', 'acme', 'next', forever => true), ratelimit.release('renders', 'acme', 'next')")
			harness.MustExecIn(t, tx, "SELECT ratelimit.hold('renders', 'acme', 'mine', ttl => '1 hour')")
			if harness.Scan[bool](t, tx, "SELECT ratelimit.release('renders', 'acme', '~0123456789abcdef0123456789abcdef4:mine')") || !harness.Scan[bool](t, tx, "SELECT ratelimit.release('renders', 'acme', 'mine', who => 'ann')") {
				t.Error("another token ends a hold")
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		h.has(rendersByHand.Key("acme"), 2)
	}
}

// TestHoldByHandThatHasEnded: to release by its id a hold that has expired or is settled is no error, and changes nothing, as in Go: what a worker is
// late with is charged. So no DELETE fails by its trigger.
func TestHoldByHandThatHasEnded(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	acme := budgetByHand.Key("acme")
	lapsed := h.holds("expired", time.Hour, rendersByHand.Key("acme"))
	expired := h.holds("expired", time.Hour, acme.Count(40))
	h.settle(h.holds("endless", ratelimit.Forever, rendersByHand.Key("acme")).Token, []float64{1}, rendersByHand.Key("acme"))
	settled := h.holds("settled", time.Hour, rendersByHand.Key("acme"), acme.Count(10))
	h.settle(settled.Token, []float64{1, 0}, rendersByHand.Key("acme"), acme.Count(10))
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity'; UPDATE ratelimit.holds SET until = now() - interval '1 second' WHERE id = 'expired'")
	harness.MustExec(t, pool, `INSERT INTO ratelimit.holds (name, key, id, state, unit, count, taken_at, rest, part, until)
		SELECT 'renders', 'a', 'over ' || i, 'settled', 'slots', 1, now() - interval '2 days', 0, 1, now() - interval '1 day' FROM generate_series(1, 2100) AS i`)
	sweeps := 0
	for i, name := range []string{"budget", "renders"} {
		for next := new(string); next != nil; sweeps++ {
			next = harness.Scan[*string](t, pool, "SELECT next FROM ratelimit.sweep($1, first => $2)", name, *next)
		}
		if got := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.holds WHERE state = 'lapsed'"); got != i+1 {
			t.Errorf("the sweep of %s: %d holds lapsed, want %d: its own", name, got, i+1)
		}
	}
	if sweeps < 4 {
		t.Errorf("%d sweeps: each ends at most a thousand holds", sweeps)
	}
	before := harness.Lines(t, pool, "SELECT name, id, state, count FROM ratelimit.holds WHERE state <> 'released' ORDER BY id, name")
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		tx := beginAt(t, pool, level)
		for _, name := range []string{"renders", "budget"} {
			for _, id := range []string{"expired", "settled", "endless", "never"} {
				if harness.Scan[bool](t, tx, "SELECT ratelimit.release($1, 'acme', $2)", name, id) || harness.Scan[bool](t, tx, "SELECT ratelimit.release($1, 'acme', $2, reason => 'late')", name, id) {
					t.Errorf("%s: %s of %s was released", level, id, name)
				}
			}
		}
		harness.Succeeds(t, tx.Commit(t.Context()))
	}
	if after := harness.Lines(t, pool, "SELECT name, id, state, count FROM ratelimit.holds WHERE state <> 'released' ORDER BY id, name"); after != before || strings.Count(after, "lapsed") != 2 || strings.Contains(after, "over ") {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	if harness.Scan[bool](t, pool, "SELECT ratelimit.release('renders', 'acme', $1)", lapsed.Token) {
		t.Error("a lapsed hold was released by its token")
	}
	harness.Succeeds(t, harness.Second(h.limits.Settle(t.Context(), pool, expired.Token, acme.Count(30))))
	if got := harness.ReadBalance(t, h.limits, pool, acme); got < 60 || got > 60.1 {
		t.Errorf("%v of 100 remain, of which 10 and 30 were used", got)
	}

	// Once the id is taken again for one of its limits, its token ends what is left.
	late := h.holds("late", time.Hour, rendersByHand.Key("bob"), budgetByHand.Key("bob").Count(40))
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity' WHERE key = 'bob'; UPDATE ratelimit.holds SET until = now() - interval '1 second' WHERE name = 'budget' AND key = 'bob'")
	h.holds("late", time.Hour, budgetByHand.Key("bob").Count(40))
	if !harness.Scan[bool](t, pool, "SELECT ratelimit.release('budget', 'bob', $1)", late.Token) {
		t.Error("nothing was released")
	}
	h.has(rendersByHand.Key("bob"), 2)
}

// TestHoldsByHandRace: many sessions hold and release the same ids. A release that says true is of one hold.
func TestHoldsByHandRace(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	var held, released, most int
	var mu sync.Mutex
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for i := range 60 {
				id := fmt.Sprint("id ", (worker+i)%3)
				var repeated bool
				err := pool.QueryRow(t.Context(), "SELECT repeated FROM ratelimit.hold('renders', 'acme', $1, forever => true)", id).Scan(&repeated)
				mu.Lock()
				if err == nil && !repeated {
					held++
				} else if err != nil && harness.SQLState(err) != "PT429" && harness.SQLState(err) != "40001" { // it was released meanwhile
					t.Error(err)
				}
				mu.Unlock()
				var was bool
				var n int
				err = errors.Join(pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.holds('renders', 'acme')").Scan(&n),
					pool.QueryRow(t.Context(), "SELECT ratelimit.release('renders', 'acme', $1, who => 'ann')", id).Scan(&was))
				mu.Lock()
				if most = max(most, n); err != nil {
					t.Error(err)
				} else if was {
					released++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	left := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.holds('renders', 'acme')")
	if trace := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides WHERE effect = 'release'"); held != released+left || trace != released || most > 2 || held == 0 {
		t.Errorf("%d held, %d released, %d written down, %d left, at most %d at once", held, released, trace, left, most)
	}
	h.has(rendersByHand.Key("acme"), float64(2-left))
}

// TestDocsHoldBySQL runs the SQL of docs/holds.md: as an application, as an operator, and in a trigger.
func TestDocsHoldBySQL(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	owner, h := holdingByHand(t)
	harness.MustExec(t, owner, "SELECT ratelimit.override('projects', 'team 7', capacity => 2, forever => true), ratelimit.override('projects', 'team 8', capacity => 3, forever => true)")
	as := func(work string) *pgxpool.Pool {
		role := harness.CreateRole(t, owner)
		harness.GrantWork(t, owner, role, work)
		return harness.AsRole(t, owner, role, 2)
	}
	app, operator, looker := as("consume"), as("operate"), as("look")

	harness.MustExec(t, app, harness.DocSQL(t, "docs/holds.md", "SELECT token, until FROM ratelimit.hold"))
	listing := harness.DocSQL(t, "docs/holds.md", "SELECT * FROM ratelimit.holds")
	for _, pool := range []*pgxpool.Pool{app, operator, looker} {
		if got := harness.Lines(t, pool, "SELECT id, count, expired FROM ("+strings.TrimSuffix(listing, ";")+") AS w"); got != "(\"acme/job 17\",1,f)" {
			t.Error(got)
		}
	}
	harness.MustExec(t, app, harness.DocSQL(t, "docs/holds.md", "ratelimit.release('projects', 'team 7', 'project 17')"))
	harness.WantRefused(t, looker, harness.DocSQL(t, "docs/holds.md", "its worker hangs"), "SELECT ratelimit.hold('renders', 'acme', 'x', forever => true)",
		"SELECT ratelimit.release(name, key, '~'||replace(token::text, '-', '')||octet_length(id)||':'||id||json_build_array(json_build_array(name, key, count))) FROM ratelimit.holds WHERE token IS NOT NULL")
	harness.WantRefused(t, app, harness.DocSQL(t, "docs/holds.md", "its worker hangs")) // it may not write the history
	harness.MustExec(t, operator, "SELECT ratelimit.block('budget', 'acme', forever => true)")
	harness.MustExec(t, operator, harness.DocSQL(t, "docs/holds.md", "its worker hangs"))
	h.has(rendersByHand.Key("acme"), 2)
	for _, id := range []string{"never", "~0123456789abcdef0123456789abcdef5:job 3[[\"renders\",\"acme\",1]]"} { // for which an operator may leave no mark
		harness.MustExec(t, operator, "SELECT ratelimit.release('renders', 'acme', '"+id+"')")
	}
	if got := harness.Lines(t, owner, "SELECT key, reason, made_by FROM ratelimit.overrides WHERE effect = 'release'"); got != "(acme,\"acme/job 17: its worker hangs\",ann)" {
		t.Error(got)
	}

	harness.MustExec(t, owner, harness.DocSQL(t, "docs/holds.md", "CREATE FUNCTION projects_come"))
	harness.MustExec(t, owner, "CREATE TABLE teams (id text PRIMARY KEY); INSERT INTO teams VALUES ('team 7'), ('team 8'); ALTER TABLE projects ADD FOREIGN KEY (team) REFERENCES teams ON DELETE CASCADE")
	conn := harness.Acquire(t, owner)
	for _, step := range []struct{ sql, state, want string }{
		{"INSERT INTO projects VALUES ('a', 'team 8'), ('b', 'team 7'), ('c', 'team 8'), ('d', 'team 7'), ('e', 'team 7')", "22023", "[]"},
		{"INSERT INTO projects VALUES ('a', 'team 8'), ('b', 'team 7'), ('c', 'team 8'), ('d', 'team 7')", "", "[a c b d]"},
		{"INSERT INTO projects VALUES ('e', 'team 7')", "PT429", "[a c b d]"},
		{"DELETE FROM projects WHERE id IN ('a', 'b'); INSERT INTO projects VALUES ('e', 'team 7')", "", "[c d e]"},
		{"DELETE FROM projects WHERE id = 'none'", "", "[c d e]"},
		{"DELETE FROM teams WHERE id = 'team 7'", "", "[c]"},
	} {
		_, err := conn.PgConn().Exec(t.Context(), step.sql).ReadAll()
		if got := fmt.Sprint(harness.Scan[[]string](t, owner, "SELECT array(SELECT id FROM ratelimit.holds('projects', 'team 8') UNION ALL SELECT id FROM ratelimit.holds('projects', 'team 7'))")); harness.SQLState(err) != step.state || got != step.want {
			t.Errorf("%s: %v, and %s are held, want %s", step.sql, err, got, step.want)
		}
	}
}

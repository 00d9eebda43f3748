package holds_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestTheConsoleReleasesWhatWasSeen: a form ends the hold that the page showed, and none that came under its id afterwards.
func TestTheConsoleReleasesWhatWasSeen(t *testing.T) {
	t.Parallel()
	pool, h := holdingByHand(t)
	p := harness.NewConsole(t, pool, "ann")
	const acme = "key?name=renders&key=acme"
	if text := p.Get(http.StatusOK, acme, "2 of 2 slots free"); strings.Contains(text, "h-holds\">") || strings.Contains(text, `value="reset"`) {
		t.Error("there are holds on the page, or a reset of slots")
	}
	h.holds("job 1", time.Hour, rendersByHand.Key("acme"))
	seen := func() url.Values {
		page := p.Get(http.StatusOK, acme, "1 slot", "1 h left")
		_, since, _ := strings.Cut(page, `name="since" value="`)
		since, _, _ = strings.Cut(since, `"`)
		return url.Values{"action": {"release"}, "id": {"job 1"}, "since": {since}, "reason": {"it hangs"}}
	}
	form := seen()
	p.Post(http.StatusBadRequest, "limit?name=renders", form, "Nothing was changed", "on the page of its key")
	p.Post(http.StatusBadRequest, acme, url.Values{"action": {"release"}, "id": {"job 1"}, "since": {"yesterday"}}, "Nothing was changed", "on the page of its key")
	p.Post(http.StatusOK, acme, form, "Released: what it held came back", "2 of 2 slots free", "job 1: it hangs")
	p.Post(http.StatusOK, acme, form, "That hold had ended already")
	h.holds("job 1", time.Hour, rendersByHand.Key("acme"))
	p.Post(http.StatusOK, acme, form, "That hold had ended already", "1 of 2 slots free")
	if got := harness.Lines(t, pool, "SELECT key, reason, made_by FROM ratelimit.overrides WHERE effect = 'release'"); got != "(acme,\"job 1: it hangs\",ann)" {
		t.Error(got)
	}
	harness.NewConsole(t, pool, "").Post(http.StatusForbidden, acme, seen())

	// No more than 20, and how many there are. What is hostile is text.
	harness.MustExec(t, pool, "SELECT ratelimit.override('renders', 'many', capacity => 100, forever => true), ratelimit.hold('renders', 'many', '<b>' || i, forever => true) FROM generate_series(1, 25) AS i")
	if text := p.Get(http.StatusOK, "key?name=renders&key=many", "the oldest 20 of 25"); strings.Count(text, `name="since"`) != 20 || strings.Contains(text, "<b>") {
		t.Error("not 20 holds, or markup")
	}
}

// TestSlotsAreDefined: programs publish slots, SQL and overrides know their number, and no other kind has the same name.
func TestSlotsAreDefined(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	renders, varying := ratelimit.Slots("renders", 2), ratelimit.Slots("projects", 5, ratelimit.Varies(0))
	limits := harness.Open(t, pool, ratelimit.Options{Program: "api", Limits: []ratelimit.Limit{renders, varying}, NoSweep: true})
	h := holder{t, limits, pool, nil}
	type row struct{ key, want string }
	wants := func(name string, rows ...row) {
		t.Helper()
		for _, r := range rows {
			if got := harness.Lines(t, pool, "SELECT effect, kind, rate, period, capacity, shards, varies FROM ratelimit._numbers('"+name+"', '"+r.key+"', now(), varying => true)"); got != r.want {
				t.Errorf("%s, %s: %s, want %s", name, r.key, got, r.want)
			}
		}
	}
	wants("renders", row{"acme", "(numbers,slots,,,2,,)"})
	wants("projects", row{"acme", "(varies,slots,,,,,00:00:00)"})

	for sql, want := range map[string]string{
		`SELECT ratelimit.publish('web', '[{"name": "renders", "kind": "token bucket", "rate": 1, "period": "1 second"}]')`: `program "web" defines a token bucket of 00:00:01, and program "api" slots: both would grant`,
		`SELECT ratelimit.publish('web', '[{"name": "x", "kind": "slots", "capacity": 2.5}]')`:                              "capacity of slots must be a whole number between 0 and 1e9, not 2.5",
		`SELECT ratelimit.publish('web', '[{"name": "x", "kind": "slots"}]')`:                                               "capacity of slots must be a whole number between 0 and 1e9, not NULL",
		`SELECT ratelimit.publish('web', '[{"name": "x", "kind": "slots", "capacity": 2, "rate": 1}]')`:                     "slots must have no field but name, kind, capacity and varies",
		`SELECT ratelimit.publish('web', '[{"name": "x", "kind": "slots", "capacity": 2, "varies": "1 day"}]')`:             "varies of slots must be 0",
		`SELECT ratelimit.publish('web', '[{"name": "x", "kind": "bucket", "capacity": 2}]')`:                               `''slots'' or ''unlimited'', not ''bucket''`,
		`SELECT ratelimit.override('renders', 'acme', rate => 3, forever => true)`:                                          "rate and max_reserved must be NULL for slots",
		`SELECT ratelimit.override('renders', 'acme', capacity => 2.5, forever => true)`:                                    "capacity of slots must be a whole number between 0 and 1e9, not 2.5",
		`SELECT ratelimit.consume('renders', 'acme')`:                                                                       "it has slots, which only ratelimit.hold takes",
		`SELECT ratelimit.try('renders', 'acme')`:                                                                           "it has slots, which only ratelimit.hold takes",
		`SELECT ratelimit.reserve('renders', 'acme')`:                                                                       "it has slots, which only ratelimit.hold takes",
		`SELECT ratelimit.take('renders', 'acme', most => 2)`:                                                               "it has slots, which only ratelimit.hold takes",
		`SELECT * FROM ratelimit.consume_all('[{"name": "renders", "key": "acme"}]')`:                                       "it has slots, which only ratelimit.hold takes",
		`SELECT ratelimit.consume('projects', 'acme')`:                                                                      "the numbers of this key are the program's",
		`SELECT * FROM ratelimit.sweep('renders', kind => 'slots', capacity => 2, rate => 1)`:                               "rate, period, start and varies must be NULL for slots",
		`SELECT * FROM ratelimit.keys('renders', kind => 'slots', capacity => 2)`:                                           "rate must be between 1e-15 and 1e15, not NULL",
	} {
		_, err := pool.Exec(t.Context(), sql)
		if want = strings.ReplaceAll(want, "''", "'"); err == nil || harness.SQLState(err) != "22023" || !strings.Contains(strings.ReplaceAll(err.Error(), `"`, `'`), strings.ReplaceAll(want, `"`, `'`)) {
			t.Errorf("%s: %v, want %s", sql, err, want)
		}
	}

	keys := func() string {
		t.Helper()
		return harness.Lines(t, pool, "SELECT key, remaining, CASE WHEN retry_at = 'infinity' THEN 'never' WHEN retry_at IS NOT NULL THEN 'later' END FROM ratelimit.keys('renders') ORDER BY key")
	}
	one, two := h.holds("1", time.Minute, renders.Key("acme")), h.holds("2", ratelimit.Forever, renders.Key("acme"))
	h.holds("3", ratelimit.Forever, renders.Key("other"))
	h.holds("4", ratelimit.Forever, renders.Key("stuck").Count(2))
	if got := keys(); got != "(acme,0,later)\n(other,1,)\n(stuck,0,never)" {
		t.Error(got)
	}
	// An override of the capacity is another number.
	harness.MustExec(t, pool, "SELECT ratelimit.override('renders', 'acme', capacity => 3, forever => true)")
	harness.MustExec(t, pool, "SELECT ratelimit.block('renders', 'other', forever => true)")
	harness.MustExec(t, pool, "SELECT ratelimit.unlimited('renders', 'stuck', forever => true)")
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 7, forever => true)")
	if got := keys(); got != "(acme,1,)\n(other,0,never)\n(stuck,Infinity,)" {
		t.Error(got)
	}
	wants("renders", row{"acme", "(numbers,slots,,,3,,)"})
	wants("projects", row{"acme", "(numbers,slots,,,7,,00:00:00)"})
	harness.MustExec(t, pool, "SELECT ratelimit.override('renders', 'acme', capacity => 1, until => clock_timestamp() + interval '10 seconds')")
	// Then the older one follows, which has a slot left.
	if got := harness.Lines(t, pool, "SELECT remaining FROM ratelimit.keys('renders', keys => '{acme}') WHERE retry_at = (SELECT max(until) FROM ratelimit.overrides)"); got != "(-1)" {
		t.Error(got)
	}
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.add(min(id)) FROM ratelimit.overrides"); err == nil || !strings.Contains(err.Error(), "it has slots, and nothing is added to them") {
		t.Error(err)
	}

	for what, number := range map[string]ratelimit.Option{"a rate": ratelimit.Rate(1), "half a slot": ratelimit.Capacity(1.5), "a debt": ratelimit.MaxReserved(1)} {
		if _, err := limits.Override(t.Context(), pool, renders.Key("new"), ratelimit.Terms{Forever: true}, number); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Override of %s: %v", what, err)
		}
	}
	if _, err := limits.Override(t.Context(), pool, renders.Key("new"), ratelimit.Terms{Forever: true}, ratelimit.Capacity(9)); err != nil {
		t.Error(err)
	}
	wants("renders", row{"new", "(numbers,slots,,,9,,)"})

	// Slots in use are not reset. The row of those that are not is swept.
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.reset('renders', 'acme')"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "slots in use cannot be reset") {
		t.Error(err)
	}
	sweep := func(want int64) {
		t.Helper()
		harness.MustExec(t, pool, "UPDATE ratelimit.limits SET ts = now() - interval '2 hours'")
		if n, err := limits.Sweep(t.Context(), pool, renders, varying); err != nil || n != want {
			t.Errorf("%d rows were swept, want %d: %v", n, want, err)
		}
	}
	sweep(0)
	h.release(one.Token)
	sweep(0)
	h.release(two.Token, renders.Key("acme"))
	sweep(1)
	harness.MustExec(t, pool, "SELECT ratelimit.reset('renders', 'acme')")
	h.holds("5", time.Minute, varying.With(ratelimit.Capacity(1)).Key("a"))
	if got := harness.Lines(t, pool, "SELECT key, remaining, retry_at FROM ratelimit.keys('projects')"); got != "(a,,)" {
		t.Error(got)
	}
}

// holds wants a grant, by the database's clock.
func (h holder) holds(id string, ttl time.Duration, requests ...ratelimit.Request) ratelimit.Held {
	h.Helper()
	held, err := h.limits.Hold(h.Context(), h.db, id, ttl, requests...)
	if err != nil || held.Token == "" {
		h.Fatalf("Hold %s: %+v, %v", id, held, err)
	}
	return held
}

// TestHoldsAreResetAndSwept: after a reset, nothing of a hold comes back. A sweep gives expired holds back.
func TestHoldsAreResetAndSwept(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		budget, renders := harness.Slow("budget", 100), ratelimit.Slots("renders", 2)
		ann := budget.Key("ann")
		held := h.hold("job", time.Minute, ann.Count(80))
		other := h.hold("other job", time.Minute, budget.Key("bob").Count(80))
		if err := h.limits.Reset(t.Context(), db, ann); err != nil {
			t.Fatal(err)
		}
		h.has(ann, 100)
		h.release(held.Token, ann)
		h.has(ann, 100)
		again := h.hold("job", time.Minute, ann.Count(50))
		h.settle(other.Token, []float64{20}, budget.Key("bob").Count(60))
		if err := h.limits.Reset(t.Context(), db, ann); err != nil {
			t.Fatal(err)
		}
		h.settle(again.Token, []float64{-10}, ann.Count(60)) // more than was held
		h.has(ann, 90)
		cat := budget.Key("cat") // what was taken since stays taken
		held = h.hold("job", time.Minute, cat.Count(80))
		if err := h.limits.Reset(t.Context(), db, cat); err != nil {
			t.Fatal(err)
		}
		h.hold("next job", time.Minute, cat.Count(50))
		h.release(held.Token, cat)
		h.has(cat, 50)
		dan := budget.Key("dan") // without an end, too
		h.hold("thing", ratelimit.Forever, dan.Count(80))
		harness.Succeeds(t, h.limits.Reset(t.Context(), db, dan))
		h.hold("thing", ratelimit.Forever, dan.Count(50))
		h.has(dan, 50)
		if err := h.limits.Reset(t.Context(), db, renders.Key("ann")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Reset of slots: %v", err)
		}
	})
	t.Run("sweep", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		limits, clock := harness.NewLimiter()
		h := holder{t, limits, pool, clock}
		budget, renders, unknown := harness.Slow("budget", 100), ratelimit.Slots("renders", 2), harness.Slow("unknown", 100)
		if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "api", budget, renders); err != nil {
			t.Fatal(err)
		}
		for i := range 5 {
			h.hold("job", time.Minute, budget.Key(string(rune('a'+i))).Count(80), renders.Key(string(rune('a'+i))))
		}
		h.hold("job", time.Minute, unknown.Key("a").Count(80))
		h.hold("long", time.Hour, renders.Key("a"))
		h.once(false, "event", budget.Key("f"))
		const states = "SELECT name, state, count(*) FROM ratelimit.holds GROUP BY name, state ORDER BY name, state"
		clock.Advance(2 * time.Minute)
		if _, err := limits.Sweep(t.Context(), pool, budget); err != nil {
			t.Fatal(err)
		}
		if got := harness.Lines(t, pool, "SELECT name, sum(value)::int FROM ratelimit.limits GROUP BY name ORDER BY name"); got != "(budget,599)\n(renders,-1)\n(unknown,20)" {
			t.Error(got)
		}
		if got := harness.Lines(t, pool, states); got != "(budget,lapsed,5)\n(budget,once,1)\n(renders,held,1)\n(renders,lapsed,5)\n(unknown,held,1)" {
			t.Error(got)
		}
		clock.Advance(8 * 24 * time.Hour)
		if _, err := limits.Sweep(t.Context(), pool, budget); err != nil {
			t.Fatal(err)
		}
		if got := harness.Lines(t, pool, states); got != "(renders,lapsed,1)\n(unknown,held,1)" {
			t.Error(got)
		}
		if _, err := pool.Exec(t.Context(), "DELETE FROM ratelimit.limits WHERE name = 'unknown'"); err != nil { // as a sweep that knows the numbers does: the key is full
			t.Fatal(err)
		}
		if _, err := limits.Sweep(t.Context(), pool, budget); err != nil {
			t.Fatal(err)
		}
		if got := harness.Lines(t, pool, states); got != "(renders,lapsed,1)\n(unknown,lapsed,1)" {
			t.Error(got)
		}
	})
	t.Run("in the background", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 4)
		renders := ratelimit.Slots("renders", 2)
		limits := harness.Open(t, pool, ratelimit.Options{Program: "api", Limits: []ratelimit.Limit{renders}, SweepEvery: time.Second})
		h := holder{t, limits, pool, nil}
		h.holds("job", 100*time.Millisecond, renders.Global())
		for deadline := time.Now().Add(harness.Patience); harness.Lines(t, pool, "SELECT state FROM ratelimit.holds") != "(lapsed)"; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("nobody gave the slot back")
			}
		}
	})
}

// TestTheToolAndThePageShowSlots: keys, show and the page have how many there are, in use and free.
func TestTheToolAndThePageShowSlots(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 4)
	renders, varying, none := ratelimit.Slots("renders", 3), ratelimit.Slots("projects", 5, ratelimit.Varies(0)), ratelimit.Slots("none", 0)
	if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "api", renders, varying, none); err != nil {
		t.Fatal(err)
	}
	h := holder{t, new(ratelimit.Limiter), pool, nil}
	h.holds("1", time.Hour, renders.Key("acme").Count(2))
	h.holds("2", 100*time.Millisecond, renders.Key("acme"))
	h.holds("3", time.Hour, renders.Key("full").Count(3))
	h.holds("4", ratelimit.Forever, renders.Key("stuck").Count(3))
	h.holds("5", ratelimit.Forever, varying.Key("acme").Count(4))
	harness.MustExec(t, pool, "SELECT pg_sleep(0.11)")
	tool := func(wants []string, args ...string) {
		t.Helper()
		wantsTool(t, url, wants, args...)
	}
	tool([]string{"KEY FREE IN USE DENIED UNTIL OVERRIDE", "full 0 3 20", "stuck 0 3 one is released -"}, "keys", "renders")
	tool([]string{"acme 1 2 - -"}, "keys", "renders", "--all")
	tool([]string{`"remaining": 1`, `"used": 2`}, "keys", "renders", "--all", "--json")
	tool([]string{"slots 1 of 3 free, 2 in use", "denied no: a slot would be granted now"}, "show", "renders", "acme")
	tool([]string{"slots 0 of 3 free, 3 in use", "denied yes, until 20", "at the latest, unless a hold is extended: all are in use"}, "show", "renders", "full")
	tool([]string{"slots 0 of 3 free, 3 in use", "denied yes, until a slot is released: all are in use"}, "show", "renders", "stuck")
	tool([]string{"slots 3 of 3 free, 0 in use"}, "show", "renders", "new")
	tool([]string{"slots 4 in use; how many there are is not known"}, "show", "projects", "acme")
	tool([]string{"slots 6 of 10 free, 4 in use"}, "show", "projects", "acme", "--capacity", "10")
	tool([]string{"acme not known 4 not known -"}, "keys", "projects")
	tool([]string{"acme 6 4 - -"}, "keys", "projects", "--all", "--capacity", "10")
	tool([]string{"none has no rows: 0 slots"}, "keys", "none")
	tool([]string{"slots 0 of 0 free, 0 in use", "yes, by policy: there are no slots"}, "show", "none", "acme")
	tool([]string{"renders api 3 slots 3", "projects api 5 slots, which vary 1"}, "limits")
	tool([]string{"renders 0 1"}, "sweep", "renders")
	tool([]string{"has slots, and nothing is added to them"}, "override", "renders", "acme", "--capacity", "5", "--add", "--forever")
	tool([]string{"rate and max_reserved must be NULL for slots"}, "override", "renders", "acme", "--rate", "5", "--forever")
	tool([]string{"slots cannot be replayed"}, "replay", "--log", "/dev/null", "--format", "json", "--time", "t", "--published", "renders")

	page := harness.NewConsole(t, pool, "ann")
	page.Get(200, "key?name=renders&key=acme", "1 of 3 slots free", "2 in use.")
	page.Get(200, "key?name=renders&key=full", "0 of 3 slots free", "3 in use. Denied now. One is free in", "at the latest, unless its hold is extended")
	page.Get(200, "key?name=renders&key=stuck", "0 of 3 slots free", "3 in use. Denied until one is released.")
	page.Get(200, "key?name=projects&key=acme", "4 slots in use", "How many this key has is the program's.")
	page.Get(200, "key?name=projects&key=acme&capacity=10", "6 of 10 slots free", "By the number that was given.")
	page.Get(200, "key?name=none&key=acme", "0 of 0 slots free", "Denied: there are no slots.")
	page.Get(200, "limit?name=renders&search=", "at most 3 at once")
	page.Get(200, "limit?name=projects&q=acme", "4 in use")

	harness.MustExec(t, pool, "SELECT ratelimit.override('renders', every_key => true, capacity => 2, until => date_trunc('second', now() + interval '30 minutes'))")
	until := harness.Scan[time.Time](t, pool, "SELECT until FROM ratelimit.overrides").UTC()
	harness.MustExec(t, pool, "SELECT ratelimit.block('renders', 'stuck', forever => true)")
	harness.MustExec(t, pool, "SELECT ratelimit.unlimited('renders', 'full', forever => true)")
	harness.MustExec(t, pool, "SELECT ratelimit.override('projects', 'acme', capacity => 4, forever => true)")
	tool([]string{"acme 0 2 20", "stuck 0 3 for good #2 block", "full unlimited 3 - #3 unlimited"}, "keys", "renders", "--all")
	tool([]string{"slots 0 of 2 free, 2 in use", "denied yes, until " + until.Format("2006-01-02 15:04:05Z") + " (in"}, "show", "renders", "acme")
	tool([]string{"slots unlimited: 3 in use", "denied no: a slot would be granted now"}, "show", "renders", "full")
	tool([]string{"slots 0 of 4 free, 4 in use"}, "show", "projects", "acme")
	page.Get(200, "key?name=renders&key=acme", "0 of 2 slots free", "2 in use.")
	page.Get(200, "key?name=projects&key=acme", "0 of 4 slots free", "Denied until one is released.")
}

// TestDocsCountSlotsAgain runs the SQL of docs/holds.md.
func TestDocsCountSlotsAgain(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	renders := ratelimit.Slots("renders", 3)
	h := holder{t, new(ratelimit.Limiter), pool, nil}
	h.holds("1", time.Hour, renders.Key("acme").Count(2))
	h.holds("2", time.Hour, renders.Key("other"))
	h.holds("1", time.Hour, harness.Slow("budget", 100).Key("acme").Count(10))
	who := harness.DocSQL(t, "docs/holds.md", "SELECT * FROM ratelimit.holds")
	if got := harness.Lines(t, pool, "SELECT id, count, expired FROM ("+strings.TrimSuffix(who, ";")+") AS w"); got != "(1,2,f)" {
		t.Error(got)
	}
	harness.MustExec(t, pool, "DELETE FROM ratelimit.limits WHERE key = 'acme' AND name = 'renders'")
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET value = -3 WHERE key = 'other'")
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/holds.md", "SELECT ratelimit.recount(name,"))
	h.has(renders.Key("acme"), 1)
	h.has(renders.Key("other"), 2)
	harness.MustExec(t, pool, "TRUNCATE ratelimit.holds")
	h.has(renders.Key("acme"), 1)
	if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "api", renders); err != nil {
		t.Fatal(err)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.recount('renders', 'acme')")
	h.has(renders.Key("acme"), 3)
}

// wantsTool runs txlimit, and wants that it prints some texts, of one space between words.
func wantsTool(t *testing.T, url string, wants []string, args ...string) {
	t.Helper()
	binary, err := harness.BuiltTool()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(t.Context(), binary, args...)
	command.Env = []string{"DATABASE_URL=" + url, "HOME=" + t.TempDir()}
	out, _ := command.CombinedOutput()
	text := strings.Join(strings.Fields(string(out)), " ")
	for _, want := range wants {
		if !strings.Contains(text, want) {
			t.Errorf("%s: no %q in\n%s", strings.Join(args, " "), want, out)
		}
	}
	if len(args) > 0 && args[len(args)-1] == "--json" && !json.Valid(out) {
		t.Errorf("%s: no JSON: %s", strings.Join(args, " "), out)
	}
}

// TestAnOlderVersionsLimitIsOverriddenAsWhatItIs: only a version that still runs defines the names, and the newest one does not. SQL goes by
// them, so an override does, too.
func TestAnOlderVersionsLimitIsOverriddenAsWhatItIs(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	harness.MustBeat(t, pool, "web", `[{"name": "rooms", "kind": "slots", "capacity": 3},
		{"name": "api", "kind": "token bucket", "rate": 10, "period": "1000 hours"},
		{"name": "own", "kind": "token bucket", "rate": 10, "period": "1 hour", "varies": "1 day"}]`)
	harness.MustBeat(t, pool, "web", `[{"name": "other", "kind": "unlimited"}]`)
	if got := harness.Lines(t, pool, "SELECT name FROM ratelimit.definitions WHERE current"); got != "(other)" {
		t.Fatalf("current: %s", got)
	}
	refuses := func(sql, want string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", sql, err, want)
		}
	}
	refuses("SELECT ratelimit.override('rooms', 'acme', rate => 5, forever => true)", "rate and max_reserved must be NULL for slots")
	refuses("SELECT ratelimit.override('rooms', 'acme', capacity => 2.5, forever => true)", "capacity of slots must be a whole number between 0 and 1e9, not 2.5")

	// Tokens that are added to slots are slots that nobody has.
	take := func() (n int) {
		t.Helper()
		for ; n < 20; n++ {
			if _, err := pool.Exec(t.Context(), "SELECT ratelimit.hold('rooms', 'acme', gen_random_uuid()::text, ttl => '1 hour')"); harness.SQLState(err) == "PT429" {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		return n
	}
	if n := take(); n != 3 {
		t.Errorf("%d of 3 slots are held", n)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.override('rooms', 'acme', capacity => 10, forever => true)")
	refuses("SELECT ratelimit.add(max(id)) FROM ratelimit.overrides", "it has slots, and nothing is added to them")
	refuses("SELECT ratelimit.add(max(id), 3) FROM ratelimit.overrides", "it has slots, and nothing is added to them")
	if n := take(); n != 7 {
		t.Errorf("%d of 7 more slots are held", n)
	}

	// A capacity that is the rate follows a new rate, also where the capacity before is given.
	harness.MustExec(t, pool, "SELECT ratelimit.consume('api', 'ann')")
	harness.MustExec(t, pool, "SELECT ratelimit.override('api', 'ann', rate => 30, forever => true)")
	if got := harness.Lines(t, pool, "SELECT ratelimit.add((SELECT max(id) FROM ratelimit.overrides), 10)"); got != "(20)" {
		t.Errorf("%s tokens were added, want 20", got)
	}

	var notices []string
	config := pool.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notices = append(notices, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	harness.Succeeds(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	if _, err := conn.Exec(t.Context(), "SELECT ratelimit.override('own', every_key => true, rate => 5, forever => true)"); err != nil || len(notices) != 1 || !strings.Contains(notices[0], "keys with numbers of their own") {
		t.Errorf("notices: %q, %v", notices, err)
	}
}

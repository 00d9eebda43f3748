package world_test

import (
	"context"
	"encoding/json"
	"fmt"
	"html"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
)

// This file has the ways of an operator to ask and to steer: the tool, the page, what was counted. Answers are by the database's clock, and in a
// world it is years later.

// worldClockSQL gives a database functions in place of Postgres' own, for sessions that begin with the setting world.now: there, it is that
// instant, and nobody sleeps. In others, nothing is changed. A program that is migrated afterwards uses them.
const worldClockSQL = `
DO $$ BEGIN
    IF current_database() NOT LIKE 'world\_%' THEN
        RAISE EXCEPTION 'only the database of a world may have its clock, and not %', current_database();
    END IF;
END $$;
ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO real_clock_timestamp;
ALTER FUNCTION pg_catalog.now() RENAME TO real_now;
ALTER FUNCTION pg_catalog.pg_sleep(double precision) RENAME TO real_pg_sleep;
CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
RETURN coalesce(nullif(pg_catalog.current_setting('world.now', true), '')::timestamptz, pg_catalog.real_clock_timestamp());
CREATE FUNCTION pg_catalog.now() RETURNS timestamptz LANGUAGE sql STABLE
RETURN coalesce(nullif(pg_catalog.current_setting('world.now', true), '')::timestamptz, pg_catalog.real_now());
CREATE FUNCTION pg_catalog.pg_sleep(double precision) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(pg_catalog.current_setting('world.now', true), '') = '' THEN
        PERFORM pg_catalog.real_pg_sleep($1);
    END IF;
END $$;`

// newWorldDatabase is a migrated database of its own, whose sessions may have a clock of their own.
func newWorldDatabase(w *everything) (databaseURL string) {
	w.Helper()
	name := fmt.Sprintf("world_%x", rand.Uint64())
	run := func(at, sql string) {
		w.Helper()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(w.Context()), harness.Patience)
		defer cancel()
		if _, err := harness.OnConn(ctx, at, func(ctx context.Context, conn *pgx.Conn) (any, error) {
			return conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		}); err != nil {
			w.Fatal(err)
		}
	}
	run(harness.Server.URL(), "CREATE DATABASE "+name)
	w.Cleanup(func() { run(harness.Server.URL(), "DROP DATABASE "+name+" WITH (FORCE)") })
	databaseURL = withParameter(harness.Server.URL(), "dbname", name)
	run(databaseURL, worldClockSQL)
	harness.Migrate(w, databaseURL)
	return databaseURL
}

// withParameter is a connection string, a URL or words, with a parameter more.
func withParameter(conn, name, value string) string {
	u, err := url.Parse(conn)
	if err != nil || u.Scheme == "" {
		return conn + " " + name + "='" + value + "'"
	}
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	return u.String()
}

// present is the URL of sessions for which it is as late as in the world.
func (w *everything) present() string {
	return withParameter(w.url, "world.now", w.clock.At.Format(time.RFC3339Nano))
}

// session is such a session, which sleeps for nothing.
func (w *everything) session(do func(conn *pgx.Conn)) {
	conn, err := pgx.Connect(w.Context(), w.present())
	w.must(err)
	defer conn.Close(context.WithoutCancel(w.Context()))
	do(conn)
}

// named are the arguments of the tool that name a limit and a key, as a person would write them. No key: every key.
func (w *everything) named(limit int, key *int) (args []string) {
	name := w.limits[limit].Name()
	var parts []string
	if key != nil {
		parts = w.keys[*key]
	}
	if len(parts) < 2 {
		return append([]string{"--", name}, parts...)
	}
	for _, part := range parts {
		args = append(args, "--part="+part)
	}
	return append(args, "--", name)
}

// tool runs txlimit on a database, and reads the JSON that it prints.
func (w *everything) tool(databaseURL string, into any, args ...string) {
	binary, err := harness.BuiltTool()
	w.must(err)
	cmd := exec.CommandContext(w.Context(), binary, args...)
	cmd.Env = []string{"DATABASE_URL=" + databaseURL, "HOME=" + w.home}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if nothing := cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == 3; err != nil && !nothing {
		w.failf("txlimit %q: %v: %s%s", args, err, out, stderr.String())
	}
	if err := json.Unmarshal(out, into); err != nil {
		w.failf("txlimit %q: %v: %s", args, err, out)
	}
}

// numbersOf are the numbers of a key that the program alone knows, as flags of the tool and as fields of the page.
func (w *everything) numbersOf(id worldKey) (flags []string, fields url.Values) {
	fields = url.Values{}
	c := w.own(id.limit, id.key).Config()
	if w.limits[id.limit].Config().Varies == "" {
		return nil, fields
	}
	add := func(name, value string) {
		flags = append(flags, "--"+name+"="+value)
		fields.Set(name, value)
	}
	add("rate", strconv.FormatFloat(*c.Rate, 'g', -1, 64))
	add("capacity", strconv.FormatFloat(*c.Capacity, 'g', -1, 64))
	if c.Kind == "calendar window" {
		add("zone", c.Zone)
		add("anchor", c.Anchor)
	}
	return flags, fields
}

// worldShown is what the tool says of a key: what show says, and what keys says.
type worldShown struct {
	Key             string
	At              time.Time // of show
	Remaining       *float64
	FullAt, RetryAt *time.Time
	NotBefore       *time.Time
	PausedUntil     *time.Time
	DeniedNow       *bool
	DeniedReason    ratelimit.Reason // of show
	Unknown         *string
	Override        *struct{ ID int64 } // of show
	Effect          string              // of keys
}

// worldListed is what the tool says of a limit.
type worldListed struct {
	Limit    string
	LastHour *struct{ Granted, Denied int64 }
}

// asksTool wants the tool to say of a key what the library says.
func (w *everything) asksTool(p *worldProgram, id worldKey) {
	if !w.hasClock {
		return
	}
	w.meets(id, "ask-tool")
	b, name := w.balances(p, id)[0], w.limits[id.limit].Name()
	flags, _ := w.numbersOf(id)
	args := append(append([]string{"show", "--json"}, flags...), w.named(id.limit, &id.key)...)
	var s worldShown
	w.tool(w.present(), &s, args...)
	what := fmt.Sprintf("%v: %s, and txlimit %q says %s", id, balanceText(b), args, asText(s))
	o := w.inForce(id, w.clock.At)
	if !s.At.Equal(w.clock.At) || s.Unknown != nil || (o == nil) != (s.Override == nil) || o != nil && s.Override.ID != o.id {
		w.failf("%s, want it at %v by %+v", what, w.clock.At, o)
	}
	w.shown(p, id, b, s, what)
	if one := w.try(p, w.clock.At, "consume", 1, w.request(id.limit, id.key)); !w.uneven(b) && !one.never && s.DeniedReason != one.reason && (b.Capacity >= 1 || one.reason != "" && one.reason != ratelimit.ReasonQuota) {
		w.failf("%s, and a call for one token: %v, %s", what, one, one.reason)
	}
	if b.Limit.Config().Kind == "token bucket" && b.Capacity > 0 && b.Decides != "block" && len(w.pending(id)) == 0 && !w.far(b.ResetAt, id) && !w.clock.At.Before(w.latest) {
		full := w.clock.At
		if s.FullAt != nil {
			full = *s.FullAt
		}
		if d := full.Sub(b.ResetAt).Abs(); d > b.ResetAt.Sub(w.before(b.Limit, b.ResetAt)) {
			w.failf("%s", what)
		}
	}

	var list struct{ Keys []worldShown }
	w.tool(w.present(), &list, append(append([]string{"keys", "--json", "--all", "--limit=0"}, flags...), "--", name)...)
	stored := ""
	if key := w.stored(id.key); key != nil {
		stored = *key
	}
	found := false
	for _, k := range list.Keys {
		if k.Key != stored {
			continue
		}
		found = true
		if what := fmt.Sprintf("%v: %s, and txlimit keys says %s", id, balanceText(b), asText(k)); k.Unknown != nil || k.Effect == "block" != (b.Decides == "block") {
			w.failf("%s", what)
		} else {
			w.shown(p, id, b, k, what)
		}
	}
	if !found && (w.ownBlock(id) || b.Decides == "definition" && b.Remaining != b.Capacity) {
		w.failf("%v: %s, and txlimit keys does not list it", id, balanceText(b))
	}
}

func asText(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// shown wants what is shown of a key to be what the library says.
func (w *everything) shown(p *worldProgram, id worldKey, b ratelimit.Balance, s worldShown, what string) {
	one := w.try(p, w.clock.At, "consume", 1, w.request(id.limit, id.key))
	holds := b.Capacity >= 1 || b.Capacity == 0 // one token, or nothing at all
	uneven := w.uneven(b)
	if s.DeniedNow == nil || holds && !uneven && *s.DeniedNow == one.granted {
		w.failf("%s, and a call for one token: %v", what, one)
	}
	switch {
	case b.Decides == "block":
	case math.IsInf(b.Capacity, 1):
		if s.Remaining != nil {
			w.failf("%s", what)
		}
		return
	case s.Remaining == nil, math.Abs(*s.Remaining-b.Remaining) > w.slack(b):
		w.failf("%s", what)
	}
	if !holds || uneven || one.granted || one.never || w.holdsLess(id) {
		return
	}
	if known := !one.permanent; known != (s.RetryAt != nil) && !(known && w.far(one.retryAt, id)) {
		w.failf("%s, and a call for one token: %v", what, one)
	} else if known && s.RetryAt != nil && !w.far(one.retryAt, id) && !w.agrees(p, []worldKey{id}, worldAnswer{retryAt: *s.RetryAt}, worldAnswer{retryAt: one.retryAt}) {
		w.failf("%s, and a call for one token: %v", what, one)
	}
}

// steers makes an override in a way, and returns its id. By the tool and the page, it is made now by the real clock: the newest wins.
func (w *everything) steers(on ratelimit.DB, way string, o *worldOverride, key *string) (id int64) {
	function := map[string]string{"numbers": "override", "block": "block", "unlimited": "unlimited"}[o.effect]
	number := func(f *float64) string { return strconv.FormatFloat(*f, 'g', -1, 64) }
	switch way {
	case "tool":
		args := []string{function, "--json", "--yes", "--reason=a world"}
		if o.rate != nil {
			args = append(args, "--rate="+number(o.rate))
		}
		if o.capacity != nil {
			args = append(args, "--capacity="+number(o.capacity))
		}
		if !o.until.IsZero() {
			args = append(args, "--until="+o.until.Format(time.RFC3339Nano))
		} else {
			args = append(args, "--forever")
		}
		var made struct{ Override struct{ ID int64 } }
		w.tool(w.url, &made, append(args, w.named(o.limit, o.key)...)...)
		return made.Override.ID
	case "page":
		form := url.Values{"action": {o.effect}, "reason": {"a world"}, "end": {"never"}, "sure": {"1"}}
		if o.rate != nil {
			form.Set("rate", number(o.rate))
		}
		if o.capacity != nil {
			form.Set("capacity", number(o.capacity))
		}
		if !o.until.IsZero() {
			form.Set("end", o.until.Format(time.RFC3339Nano))
		}
		w.post(o.limit, key, form)
		w.must(w.pool.QueryRow(w.Context(), "SELECT max(id) FROM ratelimit.overrides").Scan(&id))
		return id
	}
	if way == "go" {
		limits, request := w.programs[0].limits, w.limit(o.limit).EveryKey()
		if o.key != nil {
			request = w.request(o.limit, *o.key)
		}
		var numbers []ratelimit.Option
		if o.rate != nil {
			numbers = append(numbers, ratelimit.Rate(*o.rate))
		}
		if o.capacity != nil {
			numbers = append(numbers, ratelimit.Capacity(*o.capacity))
		}
		var err error
		switch o.effect {
		case "numbers":
			id, err = limits.Override(w.Context(), on, request, ratelimit.Terms{Until: o.until, Forever: o.until.IsZero(), Reason: "a world", Who: "ann"}, numbers...)
		case "block":
			id, err = limits.Block(w.Context(), on, request, ratelimit.Terms{Until: o.until, Forever: o.until.IsZero(), Reason: "a world", Who: "ann"})
		default:
			return w.steers(on, "", o, key)
		}
		w.must(err)
		return id
	}
	var until *time.Time
	if !o.until.IsZero() {
		until = &o.until
	}
	name := w.limits[o.limit].Name()
	if o.effect == "numbers" {
		w.must(on.QueryRow(w.Context(), "SELECT ratelimit.override($1, $2, rate => $3, capacity => $4, until => $5, forever => $5::timestamptz IS NULL, every_key => $2::text IS NULL)", name, key, o.rate, o.capacity, until).Scan(&id))
	} else {
		w.must(on.QueryRow(w.Context(), "SELECT ratelimit."+function+"($1, $2, until => $3, forever => $3::timestamptz IS NULL, every_key => $2::text IS NULL)", name, key, until).Scan(&id))
	}
	return id
}

// post sends a form of the page of a key, or of a limit without one, and returns what was done.
func (w *everything) post(limit int, key *string, form url.Values) (done string) {
	path, values := w.pageOf(limit, key)
	request := httptest.NewRequestWithContext(w.Context(), http.MethodPost, path+"?"+values.Encode(), strings.NewReader(form.Encode()))
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	request.Header.Set("Sec-Fetch-Site", "same-origin")
	recorder := httptest.NewRecorder()
	w.asAnn().ServeHTTP(recorder, request)
	to, err := url.Parse(recorder.Header().Get("Location"))
	if err != nil || recorder.Code != http.StatusSeeOther {
		w.failf("POST %s?%s %v: %d: %s", path, values.Encode(), form, recorder.Code, shownText(recorder.Body.String()))
	}
	return to.Query().Get("done")
}

// pageOf is the page of a limit or of a key, which may be changed there.
func (w *everything) pageOf(limit int, key *string) (path string, values url.Values) {
	path, values = "/limit", url.Values{"name": {w.limits[limit].Name()}}
	if key != nil {
		path = "/key"
		values.Set("key", *key)
	}
	return path, values
}

// asAnn is the console of somebody who may write.
func (w *everything) asAnn() *console.Handler {
	return &console.Handler{DB: w.pool, Timeout: harness.Patience, Who: func(*http.Request) string { return "ann" }}
}

// shownFor is the overrides that the page of a limit or of a key shows.
func (w *everything) shownFor(limit int, key *string) string {
	path, values := w.pageOf(limit, key)
	recorder := httptest.NewRecorder()
	w.asAnn().ServeHTTP(recorder, httptest.NewRequestWithContext(w.Context(), http.MethodGet, path+"?"+values.Encode(), nil))
	if recorder.Code != http.StatusOK {
		w.failf("GET %s?%s: %d: %s", path, values.Encode(), recorder.Code, shownText(recorder.Body.String()))
	}
	return harness.ShownOn(recorder.Body.String())
}

// page fetches a page of the console.
func (w *everything) page(path string, values url.Values) (body string) {
	w.session(func(conn *pgx.Conn) {
		recorder := httptest.NewRecorder()
		(&console.Handler{DB: conn, Timeout: harness.Patience}).ServeHTTP(recorder, httptest.NewRequestWithContext(w.Context(), http.MethodGet, path+"?"+values.Encode(), nil))
		if body = recorder.Body.String(); recorder.Code != http.StatusOK {
			w.failf("GET %s?%s: %d: %s", path, values.Encode(), recorder.Code, shownText(body))
		}
	})
	return body
}

// shownText is the text of a piece of HTML.
func shownText(body string) string {
	return strings.Join(strings.Fields(html.UnescapeString(harness.Tags.ReplaceAllString(body, " "))), " ")
}

var (
	shownBalance = regexp.MustCompile(`(?s)<div id="balance"[^>]*>(.*?)</div>`)
	shownSums    = regexp.MustCompile(`(?s)<dl class="sums"[^>]*>(.*?)</dl>`)
	shownLeft    = regexp.MustCompile(`^Balance (\S+) of (\S+) tokens`)
	shownCounts  = regexp.MustCompile(`^Denied (\S+) Granted (\S+) Denied of all .* Tokens taken (\S+)`)
)

// asksPage wants the page of a key to show what the library says.
func (w *everything) asksPage(p *worldProgram, id worldKey) {
	if !w.hasClock {
		return
	}
	w.meets(id, "ask-page")
	b := w.balances(p, id)[0]
	_, fields := w.numbersOf(id)
	fields.Set("name", w.limits[id.limit].Name())
	if key := w.stored(id.key); key != nil {
		fields.Set("key", *key)
	}
	match := shownBalance.FindStringSubmatch(w.page("/key", fields))
	if match == nil {
		w.failf("the page of %v has no balance", id)
	}
	text := shownText(match[1])
	what := fmt.Sprintf("%v: %s, and its page says %q", id, balanceText(b), text)
	begins := func(with string) bool { return strings.HasPrefix(text, "Balance "+with) }
	switch {
	case begins("No key"): // and other keys have rows
		if w.keys[id.key] != nil || b.Remaining != b.Capacity {
			w.failf("%s", what)
		}
		return
	case b.Decides == "block", math.IsInf(b.Capacity, 1), *b.Limit.Config().Rate == 0:
		if begins("Blocked") != (b.Decides == "block") || begins("Unlimited") != (b.Decides != "block" && math.IsInf(b.Capacity, 1)) || begins("Denied") != (b.Decides != "block" && b.Capacity == 0) {
			w.failf("%s", what)
		}
		return
	}
	left := shownLeft.FindStringSubmatch(text)
	if left == nil || !w.isShown(left[1], b.Remaining, w.slack(b)) || !w.isShown(left[2], b.Capacity, 0) {
		w.failf("%s", what)
	}
	if b.Capacity < 1 || w.uneven(b) {
		return
	}
	one := w.try(p, w.clock.At, "consume", 1, w.request(id.limit, id.key))
	forGood := !one.granted && one.result.RetryAt.IsZero()
	if strings.Contains(text, "Denied now") != (!one.granted && !forGood) || strings.Contains(text, "Denied for good") != forGood {
		w.failf("%s, and a call for one token: %v", what, one)
	}
}

// isShown reports whether a number of a page is this one, to the digits that are shown.
func (w *everything) isShown(text string, f, slack float64) bool {
	n, err := strconv.ParseFloat(strings.ReplaceAll(strings.ReplaceAll(text, ",", ""), "−", "-"), 64)
	w.must(err)
	digit := 0.01
	switch size := math.Abs(f); {
	case size >= 1e15 || size < 1e-3:
		digit = max(0.01*size, 1e-15)
	case size >= 100:
		digit = 1
	case size < 1:
		digit = 0.001
	}
	return n >= f-digit-slack && n <= f+1e-5*digit+1e-6+slack
}

// worldCount is what a program is to count of a key.
type worldCount struct {
	of                      worldKey
	at                      time.Time // zero: the real time
	granted, denied, failed int64
	tokens, refunded        float64
}

func (c *worldCount) add(other worldCount) {
	c.granted, c.denied, c.failed = c.granted+other.granted, c.denied+other.denied, c.failed+other.failed
	c.tokens, c.refunded = c.tokens+other.tokens, c.refunded+other.refunded
}

// counts notes what the callers of a call have learned. alone: what the call says of each key, where the way does not tell.
func (w *everything) counts(at time.Time, ids []worldKey, count float64, t, alone worldAnswer) {
	of := t.result.Requests
	if len(of) != len(ids) {
		of = alone.result.Requests
	}
	for i, id := range ids {
		c := worldCount{of: id, at: at}
		switch {
		case t.granted:
			c.granted, c.tokens = 1, count
			if len(t.result.Requests) == len(ids) {
				c.tokens = t.result.Requests[i].Taken
			}
		case t.never:
			c.failed, c.at = 1, time.Time{}
		case len(of) == len(ids) && !of[i].OK:
			c.denied = 1
		}
		w.counted = append(w.counted, c)
	}
}

// flush writes down what the programs have counted. They keep the denials of two hours at most until then.
func (w *everything) flush() {
	for _, p := range w.programs {
		w.must(p.recorder.Flush(w.Context()))
	}
}

// usage wants the tables to have what the world has counted.
func (w *everything) usage() {
	w.flush()
	for i, limit := range w.limits {
		var want, got worldCount
		denials := map[string]int64{}
		for _, c := range w.counted {
			if c.of.limit != i {
				continue
			}
			want.add(c)
			if c.denied > 0 {
				key := ""
				if stored := w.stored(c.of.key); stored != nil {
					key = *stored
				}
				denials[key] += c.denied
			}
		}
		w.must(w.pool.QueryRow(w.Context(), `SELECT coalesce(sum(granted), 0)::bigint, coalesce(sum(denied), 0)::bigint, coalesce(sum(failed), 0)::bigint, coalesce(sum(tokens), 0), coalesce(sum(refunded), 0)
			FROM ratelimit.usage($1, since => '2000-01-01')`, limit.Name()).Scan(&got.granted, &got.denied, &got.failed, &got.tokens, &got.refunded))
		if got.granted != want.granted || got.denied != want.denied || got.failed != want.failed || !harness.Near(got.tokens, want.tokens) || !harness.Near(got.refunded, want.refunded) {
			w.failf("usage of %v: %+v, but callers have counted %+v", limit, got, want)
		}
		rows, err := w.pool.Query(w.Context(), "SELECT key, denied FROM ratelimit.denials($1, since => '2000-01-01')", limit.Name())
		w.must(err)
		var key string
		var n int64
		_, err = pgx.ForEachRow(rows, []any{&key, &n}, func() error {
			if denials[key] != n {
				w.failf("denials of %v, key %q: %d, but callers have counted %d", limit, key, n, denials[key])
			}
			delete(denials, key)
			return nil
		})
		w.must(err)
		for key, n := range denials {
			w.failf("no denials of %v, key %q, but callers have counted %d", limit, key, n)
		}
	}
}

// since is what the world has counted of a limit from a minute on.
func (w *everything) since(limit int, minute time.Time) (sum worldCount) {
	for _, c := range w.counted {
		if c.of.limit == limit && !c.at.IsZero() && !c.at.Truncate(time.Minute).Before(minute) {
			sum.add(c)
		}
	}
	return sum
}

// asksUsage wants the tables, the tool and the page to say what the world has counted.
func (w *everything) asksUsage(id worldKey) {
	w.usage()
	w.meets(id, "ask-usage")
	if !w.hasClock {
		return
	}
	name, now := w.limits[id.limit].Name(), w.clock.At
	var list struct{ Limits []worldListed }
	w.tool(w.present(), &list, "limits", "--json")
	want := w.since(id.limit, now.Add(-time.Hour-time.Minute+1))
	for _, l := range list.Limits {
		if l.Limit != name {
			continue
		}
		if got := l.LastHour; got == nil && want.granted+want.denied > 0 || got != nil && (got.Granted != want.granted || got.Denied != want.denied) {
			w.failf("txlimit limits says of %s at %v: %s, but callers have counted %+v", name, now, asText(got), want)
		}
	}
	match := shownSums.FindStringSubmatch(w.page("/limit", url.Values{"name": {name}}))
	if match == nil {
		w.failf("the page of %s has no sums", name)
	}
	text := shownText(match[1])
	want = w.since(id.limit, now.Truncate(time.Minute).Add(time.Minute-time.Hour))
	got := shownCounts.FindStringSubmatch(text)
	if got == nil || !w.isShown(got[1], float64(want.denied), 0) || !w.isShown(got[2], float64(want.granted), 0) || !w.isShown(got[3], want.tokens, 1e-9*want.tokens) {
		w.failf("the page of %s at %v says %q, but callers have counted %+v", name, now, text, want)
	}
}

// openWorld connects a world to its database.
func (w *everything) openWorld() {
	w.Helper()
	super, err := harness.OnConn(w.Context(), harness.Server.URL(), func(ctx context.Context, conn *pgx.Conn) (super bool, err error) {
		err = conn.QueryRow(ctx, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user").Scan(&super)
		return super, err
	})
	w.must(err)
	if w.hasClock = super && !harness.Server.Pooled(); w.hasClock { // a pooler does not pass the setting on
		w.url = newWorldDatabase(w)
	} else {
		w.url = harness.NewMigrated(w)
	}
	w.pool, w.sqlDB, w.home = harness.Connect(w, w.url, 12), harness.OpenSQL(w, "pgx", w.url, 2), w.TempDir()
	if !harness.Server.Pooled() {
		w.lossy = w.newLossyPool()
	}
}

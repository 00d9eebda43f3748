package console_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
)

func TestEveryActionOfTheConsole(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1000 hours"}, {"name": "site", "kind": "token bucket", "rate": 5, "period": "1000 hours"}]`)
	p := harness.NewConsole(t, pool, "ann")
	const acme = "key?name=signUps&key=acme"
	if !harness.Takes(t, pool, "signUps", "acme", 10) || harness.Takes(t, pool, "signUps", "acme", 1) {
		t.Fatal("the limit is not used up")
	}
	p.Get(http.StatusOK, acme, "0 of 10 tokens", "Denied now")

	// Other numbers, for two hours, and the difference at once.
	session := harness.Scan[string](t, pool, "SELECT SESSION_USER")
	begin := time.Now()
	p.Post(http.StatusOK, acme, url.Values{"action": {"numbers"}, "rate": {"25"}, "end": {"2h"}, "reason": {"their conference"}, "add": {"1"}},
		"the difference of the capacities is added", "15 of 25 tokens", "their conference", "by ann (as "+session+"), for this key, 2 h left", "15 added", "annas "+session+", ")
	if took := time.Since(begin); took < 2*time.Second {
		t.Errorf("the difference was added after %v, when programs may not know of the override", took)
	}
	if !harness.Takes(t, pool, "signUps", "acme", 15) || harness.Takes(t, pool, "signUps", "acme", 1) {
		t.Error("the difference is not there, or more than it")
	}
	// Without the difference at once; the page offers it.
	offered := p.Post(http.StatusOK, acme, url.Values{"action": {"numbers"}, "capacity": {"40"}, "end": {"never"}, "reason": {"more"}}, "Every program follows within two seconds", "Add the difference now", "0 of 40 tokens")
	_, id, _ := strings.Cut(offered, `name="id" value="`)
	id, _, _ = strings.Cut(id, `"`)
	p.Post(http.StatusBadRequest, "key?name=site&key=x", url.Values{"action": {"add"}, "id": {id}}, "There is no such override")
	p.Post(http.StatusOK, acme, url.Values{"action": {"add"}, "id": {id}}, "The difference of the capacities is added", "15 of 40 tokens")

	p.Post(http.StatusOK, acme, url.Values{"action": {"restore"}}, "Restored", "ended by ann", "as defined")
	p.Post(http.StatusOK, acme, url.Values{"action": {"numbers"}, "rate": {"25"}, "end": {"2h"}, "reason": {"again"}, "add": {"1"}},
		"Nothing was added", "or ended overrides have added as much already")
	p.Post(http.StatusOK, acme, url.Values{"action": {"restore"}}, "Restored")
	p.Post(http.StatusOK, acme, url.Values{"action": {"restore"}}, "nothing in force to end")

	p.Post(http.StatusOK, acme, url.Values{"action": {"block"}, "end": {"15m"}, "reason": {"abuse"}}, "Blocked", "15 min left")
	p.Post(http.StatusBadRequest, acme, url.Values{"action": {"reset"}, "reason": {strings.Repeat("x", 4097)}}, "The reason has 4097 bytes")
	p.Post(http.StatusOK, acme, url.Values{"action": {"reset"}, "reason": {"their loop is mended"}}, "It goes on", "Blocked", "reset", "their loop is mended", "done")
	p.Post(http.StatusOK, acme, url.Values{"action": {"reset"}}, "It goes on", "Blocked") // it is full, so nothing is written down
	if got := harness.Scan[string](t, pool, "SELECT string_agg(concat_ws(' ', key, reason, made_by, made_as = session_user), ', ') FROM ratelimit.overrides WHERE effect = 'reset'"); got != "acme their loop is mended ann t" {
		t.Errorf("the trace of the reset: %s", got)
	}
	if harness.Takes(t, pool, "signUps", "acme", 1) {
		t.Error("a blocked key was granted")
	}
	p.Post(http.StatusOK, acme, url.Values{"action": {"restore"}}, "Restored", "10 of 10 tokens")
	if !harness.Takes(t, pool, "signUps", "acme", 10) {
		t.Error("the key did not go on")
	}
	p.Post(http.StatusOK, acme, url.Values{"action": {"unlimited"}, "end": {"2099-01-01 12:00"}, "reason": {"a load test"}}, "Unlimited", "1 Jan 2099, 12:00")
	if !harness.Takes(t, pool, "signUps", "acme", 1000) {
		t.Error("an unlimited key was denied")
	}

	// For every key, only if it is meant.
	every := url.Values{"action": {"block"}, "end": {"1h"}, "reason": {"an incident"}}
	p.Post(http.StatusBadRequest, "limit?name=signUps", every, "you mean every key")
	every.Set("sure", "1")
	p.Post(http.StatusOK, "limit?name=signUps", every, "blocked for every key")
	if harness.Takes(t, pool, "signUps", "initech", 1) || !harness.Takes(t, pool, "signUps", "acme", 1000) {
		t.Error("the block for every key is not in force, or the key has lost its own override")
	}
	p.Get(http.StatusOK, "", "blocked", "2 overrides")
	p.Get(http.StatusOK, "key?name=signUps&key=initech", "Blocked", "for every key", "End it for every key")
	p.Post(http.StatusOK, "limit?name=signUps", url.Values{"action": {"restore"}}, "Restored")
	if !harness.Takes(t, pool, "signUps", "initech", 1) {
		t.Error("the block for every key was not ended")
	}

	// Nor by an address whose key was emptied.
	for _, form := range []url.Values{
		{"action": {"block"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"unlimited"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"numbers"}, "rate": {"8"}, "end": {"1h"}, "reason": {"r"}},
	} {
		for _, path := range []string{"key?name=signUps", "key?name=signUps&key="} {
			p.Post(http.StatusBadRequest, path, form, "Nothing was changed", "you mean every key")
		}
	}
	if !harness.Takes(t, pool, "signUps", "initech", 1) {
		t.Error("every key was blocked without a question")
	}
	every.Set("sure", "1")
	emptied := p.Post(http.StatusOK, "key?name=signUps", every, "Blocked. Every program denies")
	if n := strings.Count(emptied, `name="sure"`); n != 3 || harness.Takes(t, pool, "signUps", "initech", 1) {
		t.Errorf("%d questions, or the block is not in force", n)
	}
	p.Post(http.StatusOK, "key?name=signUps", url.Values{"action": {"restore"}}, "Restored")

	// A limit with keys has no balance without one, and nothing to add to.
	if text := p.Get(http.StatusOK, "key?name=signUps", "This limit has 2 keys with rows", "Find one"); strings.Contains(text, `name="add"`) || strings.Contains(text, "of 10 <") || strings.Contains(text, `value="reset"`) {
		t.Error("the page has a balance of no key, or changes it")
	}

	// A limit without keys.
	limiter := new(ratelimit.Limiter)
	site := ratelimit.TokenBucket("site", 5, 1000*time.Hour).Global()
	if _, err := limiter.Consume(t.Context(), pool, site.Count(5)); err != nil {
		t.Fatal(err)
	}
	whole := url.Values{"action": {"numbers"}, "rate": {"8"}, "end": {"1d"}, "reason": {"r"}, "add": {"1"}}
	p.Post(http.StatusBadRequest, "key?name=site", whole, "you mean every key")
	whole.Set("sure", "1")
	p.Post(http.StatusOK, "key?name=site", whole, "3 of 8 tokens", "(no key)")
	p.Post(http.StatusOK, "key?name=site", url.Values{"action": {"reset"}}, "8 of 8 tokens")
}

// What cannot be done says so on the page, changes nothing, and keeps what was filled in.
func TestTheConsoleRefusesBadForms(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1 hour"}]`)
	p := harness.NewConsole(t, pool, "ann")
	const acme = "key?name=signUps&key=acme"
	numbers := func(pairs ...string) url.Values {
		v := url.Values{"action": {"numbers"}, "rate": {"20"}, "end": {"2h"}, "reason": {"why not"}}
		for i := 0; i < len(pairs); i += 2 {
			v.Set(pairs[i], pairs[i+1])
		}
		return v
	}
	for _, test := range []struct {
		form url.Values
		want string
	}{
		{numbers("reason", " "), "Give a reason"},
		{numbers("reason", "\xff"), "not valid UTF-8"},
		{numbers("end", ""), "Say when it ends"},
		{numbers("end", "soon"), "The end is not understood"},
		{numbers("end", "0d"), "The end is not understood"},
		{numbers("end", "-1h"), "The end is not understood"},
		{numbers("end", "99999999999h"), "The end is not understood"},
		{numbers("end", "2001-01-01"), "The end has passed"},
		{numbers("rate", ""), "Give a rate"},
		{numbers("rate", "many"), "The rate is not a number"},
		{numbers("rate", "NaN"), "The rate is not a number"},
		{numbers("rate", "2,5"), "The rate is not a number. Write 2.5, 1000 or 1,000."},
		{numbers("capacity", "1,0000"), "The capacity is not a number"},
		{numbers("capacity", ",100"), "The capacity is not a number"},
		{numbers("capacity", "1.000,5"), "The capacity is not a number"},
		{numbers("rate", "-1"), "rate"},
		{numbers("rate", "0"), "rate"},
		{numbers("capacity", "1e300"), "capacity"},
		{numbers("max_reserved", "inf"), "owed is not a number"},
		{numbers("action", "drop"), "another version of the page"},
		{numbers("action", ""), "another version of the page"},
		{url.Values{"action": {"add"}, "id": {"1; DROP TABLE ratelimit.limits"}}, "The number of the override is missing"},
		{url.Values{"action": {"add"}, "id": {"12345"}}, "There is no such override"},
		{url.Values{"action": {"restore"}, "effect": {"everything"}}, "Effect must be 'numbers', 'block', 'unlimited' or NULL"},
	} {
		p.Post(http.StatusBadRequest, acme, test.form, "Nothing was changed.", test.want)
	}
	if kept := p.Post(http.StatusBadRequest, acme, numbers("end", "soon"), "Nothing was changed."); !strings.Contains(kept, `value="why not"`) || !strings.Contains(kept, `value="soon"`) || !strings.Contains(kept, "open") {
		t.Error("what was filled in is lost")
	}
	p.Post(http.StatusNotFound, "limit?name=nobodysLimit", url.Values{"action": {"reset"}}, "no such limit")
	p.Post(http.StatusBadRequest, acme, numbers("reason", strings.Repeat("x", 70000)), "too large")
	for path, status := range map[string]int{
		"limit": http.StatusNotFound, "key?key=x": http.StatusNotFound, "nowhere": http.StatusNotFound, "assets/nothing.js": http.StatusNotFound, "assets/": http.StatusNotFound,
		"?page=100": http.StatusNotFound, "?page=-1": http.StatusOK, "?page=x": http.StatusOK, "?span=x": http.StatusOK, "limit?name=signUps&span=%00": http.StatusOK,
		"limit?name=%ff": http.StatusBadRequest, "key?name=signUps&key=%00": http.StatusBadRequest, "limit?name=%zz": http.StatusBadRequest, "key?name=a;b": http.StatusBadRequest,
		"limit?name=" + strings.Repeat("n", 256): http.StatusBadRequest, "key?name=signUps&key=" + strings.Repeat("k", 1025): http.StatusBadRequest, "?q=" + strings.Repeat("q", 1025): http.StatusBadRequest,
		"key?name=signUps&key=" + strings.Repeat("k", 1024): http.StatusOK, "key?name=nobody&key=knows": http.StatusOK, "usage.json?name=nobody": http.StatusOK,
		"key?name=signUps&key=acme&rate=%27%3B--": http.StatusOK, "key?name=signUps&key=acme&anchor=" + strings.Repeat("9", 101): http.StatusBadRequest, "limit?name=signUps&q=%25%5F%27%5C": http.StatusOK, "limit?name=signUps&q=%F4%8F%BF%BF": http.StatusOK,
	} {
		p.Get(status, path)
	}
	var overrides int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.overrides").Scan(&overrides); err != nil || overrides != 0 {
		t.Errorf("%d overrides, %v", overrides, err)
	}
}

// A page that only reads writes nothing, whatever is sent to it; and another site's form changes nothing.
func TestWhoMayWriteOnTheConsole(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1 hour"}]`)
	if !harness.Takes(t, pool, "signUps", "acme", 10) {
		t.Fatal("denied")
	}
	before := harness.TableOf(t, pool)
	forms := []url.Values{
		{"action": {"reset"}}, {"action": {"restore"}}, {"action": {"add"}, "id": {"1"}}, {"action": {"block"}, "end": {"1h"}, "reason": {"r"}, "sure": {"1"}},
		{"action": {"unlimited"}, "end": {"1h"}, "reason": {"r"}, "sure": {"1"}}, {"action": {"numbers"}, "rate": {"99"}, "end": {"1h"}, "reason": {"r"}, "sure": {"1"}},
	}
	nobody := harness.NewConsole(t, pool, "")
	if text := nobody.Get(http.StatusOK, "key?name=signUps&key=acme", "read-only"); strings.Contains(text, `method="post"`) {
		t.Error("a page that only reads has forms")
	}
	if text := nobody.Get(http.StatusOK, "limit?name=signUps", "read-only"); strings.Contains(text, `method="post"`) {
		t.Error("a page that only reads has forms")
	}
	ann := harness.NewConsole(t, pool, "ann")
	for _, form := range forms {
		for _, path := range []string{"key?name=signUps&key=acme", "limit?name=signUps"} {
			nobody.Post(http.StatusForbidden, path, form, "Read-only", "Nothing was changed")
			for _, headers := range []http.Header{
				{"Sec-Fetch-Site": {"cross-site"}, "Origin": {"https://evil.example"}},
				{"Sec-Fetch-Site": {"same-site"}, "Origin": {"https://other.app.example"}},
				{"Origin": {"https://evil.example"}},
				{"Origin": {"null"}},
			} {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ann.URL+path, strings.NewReader(form.Encode()))
				if err != nil {
					t.Fatal(err)
				}
				r.Header = headers.Clone()
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				ann.Send(r, http.StatusForbidden, "Another site sent this", "Nothing was changed")
			}
		}
	}
	for _, path := range []string{"", "usage.json?name=signUps", "assets/console.js", "nowhere"} {
		ann.Post(http.StatusMethodNotAllowed, path, forms[0])
	}
	for _, method := range []string{http.MethodPut, http.MethodDelete, http.MethodPatch, http.MethodOptions, "FOO"} {
		r, err := http.NewRequestWithContext(t.Context(), method, ann.URL+"key?name=signUps&key=acme", nil)
		if err != nil {
			t.Fatal(err)
		}
		ann.Send(r, http.StatusMethodNotAllowed)
	}
	// A GET changes nothing, though it looks like a form.
	ann.Get(http.StatusOK, "key?name=signUps&key=acme&action=reset")
	var overrides int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.overrides").Scan(&overrides); err != nil || overrides != 0 {
		t.Errorf("%d overrides, %v", overrides, err)
	}
	if after := harness.TableOf(t, pool); after != before {
		t.Errorf("there was\n%s\nand now\n%s", before, after)
	}
}

// forbiddenDB is a database that nothing may ask.
type forbiddenDB struct{ t *testing.T }

func (db forbiddenDB) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	db.t.Error("a page of another site has reached the database")
	return nil, errors.New("forbidden")
}

// Pages of other sites can neither read what the console knows, nor keep its database busy.
func TestOtherSitesGetNothingFromTheConsole(t *testing.T) {
	t.Parallel()
	fetch := func(site, mode, dest string) http.Header {
		return http.Header{"Sec-Fetch-Site": {site}, "Sec-Fetch-Mode": {mode}, "Sec-Fetch-Dest": {dest}}
	}
	asked := false
	h := &console.Handler{DB: forbiddenDB{t}, Who: func(*http.Request) string { asked = true; return "ann" }}
	status := func(h http.Handler, method, path string, header http.Header) int {
		r := httptest.NewRequest(method, path, nil)
		r.Header = header
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	for _, site := range []string{"cross-site", "same-site"} {
		for _, header := range []http.Header{
			fetch(site, "no-cors", "image"), fetch(site, "no-cors", "script"), fetch(site, "no-cors", "style"), fetch(site, "cors", "empty"), fetch(site, "no-cors", "empty"), fetch(site, "navigate", "iframe"),
			fetch(site, "navigate", "frame"), fetch(site, "navigate", "object"), fetch(site, "navigate", "embed"), fetch(site, "websocket", "websocket"), {"Sec-Fetch-Site": {site}}, {"Origin": {"https://evil.example"}}, {"Origin": {"null"}},
		} {
			for _, method := range []string{http.MethodGet, http.MethodHead} {
				for _, path := range []string{"/", "/limit?name=signUps", "/key?name=signUps&key=a", "/usage.json?name=signUps", "/assets/console.js"} {
					if got := status(h, method, path, header); got != http.StatusForbidden {
						t.Errorf("%s %s with %v: %d", method, path, header, got)
					}
				}
			}
		}
		if got := status(h, http.MethodHead, "/", fetch(site, "navigate", "document")); got != http.StatusForbidden {
			t.Errorf("a HEAD that says it navigates: %d", got)
		}
	}
	if asked {
		t.Error("the application was asked who a page of another site is")
	}
	pool := harness.NewPool(t, 2)
	for _, header := range []http.Header{
		{}, fetch("none", "navigate", "document"), fetch("same-origin", "navigate", "document"), fetch("same-origin", "cors", "empty"), fetch("cross-site", "navigate", "document"), fetch("same-site", "navigate", "document"),
	} {
		if got := status(&console.Handler{DB: pool}, http.MethodGet, "/", header); got != http.StatusOK {
			t.Errorf("with %v: %d", header, got)
		}
	}
}

// Names, keys, reasons and people are text, wherever they stand.
func TestMarkupOnTheConsoleIsText(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	evil := `"><script>alert(1)</script><img src=x onerror=alert(2)>'` + "`{{.}}${1}"
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.publish($1, jsonb_build_array(jsonb_build_object('name', $2::text, 'kind', 'token bucket', 'rate', 10, 'period', '1 hour')))", evil, evil); err != nil {
		t.Fatal(err)
	}
	if !harness.Takes(t, pool, evil, evil, 3) {
		t.Fatal("denied")
	}
	harness.RecordUsage(t, pool, evil, 1, 2, evil, "javascript:alert(1)", "\u202eevil\n")
	p := harness.NewConsole(t, pool, evil)
	q := "?" + url.Values{"name": {evil}, "key": {evil}, "q": {evil}}.Encode()
	p.Post(http.StatusOK, "key"+q, url.Values{"action": {"block"}, "end": {"1h"}, "reason": {evil}}, "Blocked")
	for path, status := range map[string]int{
		q: http.StatusOK, "limit" + q: http.StatusOK, "key" + q: http.StatusOK, "limit?name=" + url.QueryEscape(evil): http.StatusOK, "usage.json" + q: http.StatusOK,
		"limit?done=" + url.QueryEscape(evil) + "&name=" + url.QueryEscape(evil): http.StatusOK, "key" + q + "&span=" + url.QueryEscape(evil) + "&rate=" + url.QueryEscape(evil) + "&zone=" + url.QueryEscape(evil): http.StatusOK,
		"limit?name=" + url.QueryEscape("<script>"): http.StatusNotFound, url.PathEscape(evil): http.StatusNotFound,
	} {
		text := p.Get(status, path)
		for _, markup := range []string{"<script>", "<img", "onerror=alert(2)>'", `href="javascript:`, "\u202e"} {
			if strings.Contains(text, markup) && !(markup == "onerror=alert(2)>'" && !strings.Contains(text, "<img")) {
				t.Errorf("%s has %q in it:\n%s", path, markup, text)
			}
		}
	}
	p.Post(http.StatusBadRequest, "key"+q, url.Values{"action": {evil}, "end": {evil}, "reason": {evil}, "rate": {evil}}, "another version")
}

func TestHeadersOfTheConsole(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	p := harness.NewConsole(t, pool, "ann")
	for _, path := range []string{"", "nowhere", "usage.json?name=x", "assets/console.css"} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		policy := answer.Header.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self';", "style-src 'self';", "frame-ancestors 'none'", "form-action 'self'", "base-uri 'none'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("%s: no %s in %q", path, want, policy)
			}
		}
		if strings.Contains(policy, "unsafe") {
			t.Errorf("%s: %q", path, policy)
		}
		for field, want := range map[string]string{"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "same-origin", "Cache-Control": "no-store",
			"Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin"} {
			if got := answer.Header.Get(field); got != want {
				t.Errorf("%s: %s: %s, want %s", path, field, got, want)
			}
		}
	}
	// Mounted without its slash, it leads to itself.
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://app.example/admin/limits?x=y", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.RequestURI = "/admin/limits?x=y"
	w := httptest.NewRecorder()
	http.StripPrefix("/admin/limits", &console.Handler{DB: pool}).ServeHTTP(w, r)
	if w.Code != http.StatusPermanentRedirect || w.Header().Get("Location") != "limits/" {
		t.Errorf("%d, %s", w.Code, w.Header().Get("Location"))
	}
}

// A page may be older than somebody else's decision. What it ends is what it has shown, or nothing.
func TestTheConsoleEndsNothingThatItHasNotShown(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	harness.Publish(t, pool, `[{"name": "logins", "kind": "fixed window", "rate": 10, "period": "1000 hours"}]`)
	p := harness.NewConsole(t, pool, "ann")
	inForce := func() string {
		return harness.Scan[string](t, pool, "SELECT coalesce(string_agg(id::text, ' ' ORDER BY id), '') FROM ratelimit.overrides WHERE removed_at IS NULL")
	}
	for path, key := range map[string]any{"key?name=logins&key=ann": "ann", "limit?name=logins": nil, "key?name=logins": nil} {
		decides := func(effect, who string) (id int64) {
			return harness.Scan[int64](t, pool, "SELECT ratelimit."+effect+"('logins', $1::text, reason => 'stolen credentials', who => $2, forever => true, every_key => $1 IS NULL)", key, who)
		}
		ends := func(shown string) url.Values { return url.Values{"action": {"restore"}, "shown": {shown}} }
		first := decides("unlimited", "ann")
		stale := harness.ShownOn(p.Get(http.StatusOK, path, "unlimited"))
		if stale != fmt.Sprint(first) {
			t.Fatalf("%s shows %q, want %d", path, stale, first)
		}

		// Another operator blocks.
		block := decides("block", "b\u202en")
		for _, shown := range []string{stale, "", "0"} {
			text := p.Post(http.StatusBadRequest, path, ends(shown), "Nothing was changed.", fmt.Sprintf(`Override %d (block, by "b\u202en")`, block), "Load the page again", "blocked")
			if got := inForce(); got != fmt.Sprint(first, " ", block) {
				t.Fatalf("%s: %q ends overrides: there are %s", path, shown, got)
			}
			if got := harness.ShownOn(text); got != fmt.Sprintf("%d,%d", block, first) {
				t.Errorf("%s: the new page shows %q", path, got)
			}
		}
		p.Post(http.StatusBadRequest, path, ends("1;2"), "another version of the page")
		p.Post(http.StatusBadRequest, path, ends(strings.Repeat("1,", 50)+"1"), "another version of the page")

		// Another one decides something that does not hold, under the block. Of one effect only, it does not matter.
		stale = harness.ShownOn(p.Get(http.StatusOK, path))
		under := decides("unlimited", "eve")
		p.Post(http.StatusBadRequest, path, ends(stale), "Nothing was changed.", fmt.Sprintf("Override %d (unlimited, by eve)", under))
		of := ends(stale)
		of.Set("effect", "block")
		p.Post(http.StatusOK, path, of, "Restored")
		if got := inForce(); got != fmt.Sprint(first, " ", under) {
			t.Errorf("%s: the end of the block leaves %s", path, got)
		}

		// Somebody has ended one of them already: the others end.
		stale = harness.ShownOn(p.Get(http.StatusOK, path))
		harness.MustExec(t, pool, fmt.Sprintf("UPDATE ratelimit.overrides SET removed_at = now() WHERE id = %d", under))
		p.Post(http.StatusOK, path, ends(stale), "Restored")
		p.Post(http.StatusOK, path, ends(stale), "nothing in force to end")

		// A block is committed after the page has begun to end what it has shown: it stays in force.
		decides("unlimited", "ann")
		stale = harness.ShownOn(p.Get(http.StatusOK, path))
		late, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := late.Exec(t.Context(), "LOCK TABLE ratelimit.overrides IN EXCLUSIVE MODE"); err != nil { // others read
			t.Fatal(err)
		}
		if err := late.QueryRow(t.Context(), "SELECT ratelimit.block('logins', $1::text, every_key => $1 IS NULL, who => 'ben', forever => true)", key).Scan(&block); err != nil {
			t.Fatal(err)
		}
		var posted sync.WaitGroup
		posted.Go(func() { p.Post(http.StatusOK, path, ends(stale), "Restored", "blocked") })
		harness.WaitingFor(t, pool, late)
		if err := late.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		posted.Wait()
		if got := inForce(); got != fmt.Sprint(block) {
			t.Errorf("%s: there is %s, want the late block %d", path, got, block)
		}

		// A form has the newest ones. There may be more.
		for range 60 {
			decides("unlimited", "ann")
		}
		stale = harness.ShownOn(p.Get(http.StatusOK, path))
		if n := strings.Count(stale, ","); n != 49 {
			t.Errorf("%s: a form of %d overrides", path, n+1)
		}
		block = decides("block", "ben")
		p.Post(http.StatusBadRequest, path, ends(stale), fmt.Sprintf("Override %d (block, by ben)", block))
		p.Post(http.StatusOK, path, url.Values{"action": {"restore"}}, "Restored")
		if got := inForce(); got != "" {
			t.Errorf("%s: there is %s", path, got)
		}
	}
}

// What the database refuses, or cannot do, is a page that says so, and the page tells nothing that is not the reader's business.
func TestTheConsoleWithoutItsDatabase(t *testing.T) {
	t.Parallel()
	empty := harness.Connect(t, harness.NewDatabase(t), 2)
	harness.NewConsole(t, empty, "ann").Get(http.StatusInternalServerError, "", "tables are not there", "Migrate the schema")

	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1 hour"}]`)
	role := harness.CreateRole(t, pool)
	harness.GrantWork(t, pool, role, "look")
	reader := harness.NewConsole(t, harness.AsRole(t, pool, role, 2), "ann")
	for _, path := range []string{"", "limit?name=signUps&q=a", "key?name=signUps&key=acme", "usage.json?name=signUps"} {
		reader.Get(http.StatusOK, path)
	}
	for _, form := range []url.Values{{"action": {"reset"}}, {"action": {"block"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"restore"}}} {
		reader.Post(http.StatusForbidden, "key?name=signUps&key=acme", form, "The database refuses this", "Permission denied")
	}
	harness.GrantWork(t, pool, role, "operate")
	for _, form := range []url.Values{
		{"action": {"reset"}}, {"action": {"block"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"restore"}}, {"action": {"unlimited"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"restore"}},
		{"action": {"numbers"}, "rate": {"20"}, "end": {"1h"}, "reason": {"r"}, "add": {"1"}},
	} {
		reader.Post(http.StatusOK, "key?name=signUps&key=acme", form)
	}

	pool.Close()
	harness.NewConsole(t, pool, "ann").Get(http.StatusServiceUnavailable, "", "cannot be reached")
}

// consoleFor mounts a console of the test's own making.
func consoleFor(t *testing.T, h *console.Handler) harness.ConsolePage {
	t.Helper()
	h.Who = func(*http.Request) string { return "ann" }
	server := httptest.NewServer(http.StripPrefix("/admin/limits", h))
	t.Cleanup(server.Close)
	return harness.ConsolePage{T: t, URL: server.URL + "/admin/limits/"}
}

// An override whose difference cannot be added is in force all the same, and the page says so, though the database is away by then.
func TestTheConsoleSaysThatHalfIsDone(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	harness.Publish(t, pool, `[{"name": "signUps", "kind": "fixed window", "rate": 10, "period": "1000 hours"}]`)
	if !harness.Takes(t, pool, "signUps", "acme", 10) {
		t.Fatal("denied")
	}
	const acme = "key?name=signUps&key=acme"
	form := url.Values{"action": {"numbers"}, "rate": {"25"}, "end": {"2h"}, "reason": {"their conference"}, "add": {"1"}}

	// Somebody has locked the key's row for longer than the page waits.
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), "SELECT FROM ratelimit.limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	p := consoleFor(t, &console.Handler{DB: pool, Timeout: 5 * time.Second})
	text := p.Post(http.StatusServiceUnavailable, acme, form, "The override is in force. It is number 1. The difference of the capacities may be missing: the database took too long.", "Add the difference now", "rate 25")
	if strings.Contains(text, "Nothing was changed") || strings.Contains(text, "Try again") || strings.Contains(text, `value="their conference"`) {
		t.Errorf("it asks to override again:\n%s", text)
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		p.Post(http.StatusOK, acme, url.Values{"action": {"add"}, "id": {"1"}}, "15 of 25 tokens")
	}

	// The connection is lost for good.
	p = consoleFor(t, &console.Handler{DB: lostOnceMade{harness.Connect(t, pool.Config().ConnString(), 2), pool}})
	p.Post(http.StatusServiceUnavailable, acme, form, "The override is in force. It is number 2.", "the database cannot be reached")
}

// lostOnceMade is a pool that is closed once a second override is made.
type lostOnceMade struct {
	*pgxpool.Pool
	other *pgxpool.Pool
}

func (db lostOnceMade) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	var made bool
	if err := db.other.QueryRow(ctx, "SELECT count(*) = 2 FROM ratelimit.overrides").Scan(&made); err != nil {
		return nil, err
	}
	if made {
		db.Close()
	}
	return db.Pool.BeginTx(ctx, options)
}

// What cannot be added now is refused with the reason, as the tool does, and not promised.
func TestTheConsoleAddsNothingToAPausedKey(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Publish(t, pool, `[{"name": "mails", "kind": "token bucket", "rate": 10, "period": "1000 hours"}]`)
	if !harness.Takes(t, pool, "mails", "acme", 10) {
		t.Fatal("denied")
	}
	harness.MustExec(t, pool, "SELECT ratelimit.pause('mails', 'acme', clock_timestamp() + interval '1 hour')")
	const acme = "key?name=mails&key=acme"
	promises := func(text string) {
		t.Helper()
		for _, not := range []string{"SQLSTATE", "never twice", "may be missing", "The database failed"} {
			if strings.Contains(text, not) {
				t.Errorf("%q in\n%s", not, text)
			}
		}
	}
	p := harness.NewConsole(t, pool, "ann")
	promises(p.Post(http.StatusBadRequest, acme, url.Values{"action": {"numbers"}, "rate": {"25"}, "end": {"2h"}, "reason": {"their conference"}, "add": {"1"}},
		"The override is in force. It is number 1. Nothing was added to the balance. Override 1: nothing was added: the key is paused until 20", "once the pause is over"))
	add := url.Values{"action": {"add"}, "id": {"1"}}
	promises(p.Post(http.StatusBadRequest, acme, add, "Nothing was added to the balance. Override 1: nothing was added: the key is paused until 20", "Add the difference now"))
	harness.MustExec(t, pool, "SELECT ratelimit.resume('mails', 'acme')")
	promises(consoleFor(t, &console.Handler{DB: pool, Timeout: time.Second}).Post(http.StatusBadRequest, acme, add, "Nothing was added to the balance. Override 1: nothing was added: the call waits for 2 seconds"))
	p.Post(http.StatusOK, acme, add, "The difference of the capacities is added", "15 of 25 tokens")
}

// A page writes in READ COMMITTED, where nothing has to be run again, and reads periods, whatever the role's defaults are.
func TestTheConsoleUnderOtherDefaults(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 2)
	harness.Publish(t, owner, `[{"name": "signUps", "kind": "calendar window", "rate": 10, "period": "1 month"}, {"name": "logins", "kind": "fixed window", "rate": 10, "period": "1000 hours"}]`)
	harness.MustExec(t, owner, `CREATE FUNCTION level() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF current_setting('transaction_isolation') <> 'read committed' THEN RAISE 'written in %', current_setting('transaction_isolation'); END IF;
		RETURN NULL; END $$`)
	for _, table := range []string{"ratelimit.limits", "ratelimit.overrides"} {
		harness.MustExec(t, owner, "CREATE TRIGGER level AFTER INSERT OR UPDATE OR DELETE ON "+table+" EXECUTE FUNCTION level()")
	}
	pool := harness.Reconfigured(t, owner, func(c *pgxpool.Config) {
		harness.StartWith(t, c.ConnConfig, map[string]string{
			"default_transaction_isolation": "serializable", "default_transaction_read_only": "on", "IntervalStyle": "iso_8601", "TimeZone": "Asia/Tokyo",
		})
	})
	p := harness.NewConsole(t, pool, "ann")
	p.Get(http.StatusOK, "", "10 per month")
	p.Get(http.StatusOK, "limit?name=signUps", "10 per month")
	if !harness.Takes(t, owner, "logins", "acme", 10) {
		t.Fatal("denied")
	}
	for _, form := range []url.Values{
		{"action": {"numbers"}, "rate": {"1,025.5"}, "end": {"2h"}, "reason": {"r"}, "add": {"1"}}, {"action": {"restore"}},
		{"action": {"block"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"unlimited"}, "end": {"1h"}, "reason": {"r"}}, {"action": {"reset"}},
	} {
		p.Post(http.StatusOK, "key?name=logins&key=acme", form)
	}
	var rate float64
	if err := owner.QueryRow(t.Context(), "SELECT rate FROM ratelimit.overrides WHERE effect = 'numbers'").Scan(&rate); err != nil || rate != 1025.5 {
		t.Errorf("rate %v, %v", rate, err)
	}
}

// Whatever people and programs have written, no character is unseen, nor turns the text around it.
func TestNothingOnTheConsoleIsUnseen(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	unseen := func(s string) string { return s + "\u202e\u200b\x1b[31m" }
	name := unseen("name")
	if _, err := pool.Exec(t.Context(), `SELECT ratelimit.publish($1, jsonb_build_array(jsonb_build_object('name', $2::text, 'kind', 'token bucket', 'rate', 10, 'period', '1 hour'),
		jsonb_build_object('name', 'never', 'kind', 'token bucket', 'rate', 0, 'period', '1 hour')))`, unseen("program"), name); err != nil {
		t.Fatal(err)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.publish('other', '[{\"name\": \"free\", \"kind\": \"unlimited\"}]')")
	if !harness.Takes(t, pool, name, unseen("key"), 3) {
		t.Fatal("denied")
	}
	harness.RecordUsage(t, pool, name, 1, 2, unseen("key"))
	p := harness.NewConsole(t, pool, unseen("ann"))
	q := "?" + url.Values{"name": {name}, "key": {unseen("key")}}.Encode()
	form := url.Values{"action": {"numbers"}, "rate": {"20"}, "end": {"1h"}, "reason": {unseen("reason")}, "sure": {"1"}}
	p.Post(http.StatusOK, "key"+q, form, `"ann\u202e\u200b\x1b[31m"`)
	p.Post(http.StatusOK, "key"+q, url.Values{"action": {"restore"}})
	p.Post(http.StatusOK, "key"+q, form)
	p.Post(http.StatusOK, "limit"+q, form)
	// The names that the database lists, and what the reader gave.
	seen := func(path, text string) {
		t.Helper()
		for _, attribute := range regexp.MustCompile(`value="[^"]*"`).FindAllString(text, -1) { // a field has what was typed
			text = strings.Replace(text, attribute, "", 1)
		}
		if i := strings.IndexFunc(text, func(r rune) bool { return r != '\n' && !strconv.IsPrint(r) }); i >= 0 {
			t.Errorf("%s has %q in it", path, text[max(0, i-100):i+20])
		}
	}
	unknown := "key?" + url.Values{"name": {unseen("name") + "s"}, "key": {"x"}}.Encode()
	seen(unknown, p.Post(http.StatusBadRequest, unknown, form, "Nothing was changed.", `no program has published a limit of this name, but 'name\u202e\u200b\u001b[31m', 'free', 'never'`))
	harness.MustExec(t, pool, `SELECT ratelimit.publish('own', '[{"name": "own", "kind": "calendar window", "rate": 10, "period": "1 month", "varies": "40d"}]')`)
	zone := "key?" + url.Values{"name": {"own"}, "key": {"x"}, "zone": {unseen("Europe")}}.Encode()
	seen(zone, p.Get(http.StatusBadRequest, zone, "Europe"))
	for path, contains := range map[string][]string{
		"": {"name", "program"}, "limit" + q: {"name", "key", "program", "reason", "ann"}, "key" + q: {"name", "key", "program", "reason", "ann"},
		"limit" + q + "&q=" + url.QueryEscape(unseen("found")): {"found"}, "?q=" + url.QueryEscape(unseen("found")): {"found"}, "key?name=never&key=x": {"program"},
	} {
		for i := range contains {
			contains[i] = fmt.Sprintf("%q", unseen(contains[i]))
		}
		seen(path, p.Get(http.StatusOK, path, contains...))
	}
}

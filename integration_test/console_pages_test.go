package integration_test

import (
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/console"
)

// What is read of a page: its text, and what charts say to those who do not see them.
var (
	tags       = regexp.MustCompile(`<[^>]*>`)
	attributes = regexp.MustCompile(`(?s).*?(?:aria-label="([^"]*)"|$)`)
)

// consolePage is a console that is mounted as an application would mount it.
type consolePage struct {
	*testing.T
	url string
}

// newConsole mounts a console under /admin/limits/ for a person; "" is nobody.
func newConsole(t *testing.T, db txBeginner, who string) consolePage {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("/admin/limits/", http.StripPrefix("/admin/limits", &console.Handler{DB: db, Who: func(*http.Request) string { return who }}))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return consolePage{t, server.URL + "/admin/limits/"}
}

// get wants a page.
func (p consolePage) get(status int, path string, contains ...string) string {
	p.Helper()
	r, err := http.NewRequestWithContext(p.Context(), http.MethodGet, p.url+path, nil)
	if err != nil {
		p.Fatal(err)
	}
	return p.send(r, status, contains...)
}

// post wants what a form leads to, redirects followed.
func (p consolePage) post(status int, path string, form url.Values, contains ...string) string {
	p.Helper()
	r, err := http.NewRequestWithContext(p.Context(), http.MethodPost, p.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		p.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	return p.send(r, status, contains...)
}

func (p consolePage) send(r *http.Request, status int, contains ...string) string {
	p.Helper()
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		p.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		p.Fatal(err)
	}
	text := strings.Join(strings.Fields(html.UnescapeString(tags.ReplaceAllString(string(body), ""))+attributes.ReplaceAllString(string(body), "$1 ")), " ")
	if answer.StatusCode != status {
		p.Fatalf("%s %s: %s, want %d:\n%s", r.Method, r.URL, answer.Status, status, text)
	}
	for _, want := range contains {
		if !strings.Contains(text, want) {
			p.Fatalf("%s %s: no %q in\n%s", r.Method, r.URL, want, text)
		}
	}
	return string(body)
}

// publish has the program "api" publish limits, by SQL.
func publish(t *testing.T, pool *pgxpool.Pool, definitions string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit_publish('api', $1)", definitions); err != nil {
		t.Fatal(err)
	}
}

// recordUsage adds counts of this minute, as a recorder does.
func recordUsage(t *testing.T, pool *pgxpool.Pool, name string, granted, denied int64, keys ...string) {
	t.Helper()
	now := time.Now().UTC()
	var names []string
	var hours, last []time.Time
	var each []int64
	var asked []float64
	for i := range keys {
		names, hours, last = append(names, name), append(hours, now.Truncate(time.Hour)), append(last, now)
		each, asked = append(each, int64(i+1)), append(asked, float64(i+1))
	}
	_, err := pool.Exec(t.Context(), `SELECT _ratelimit_record_usage(ARRAY[$1], ARRAY[$2::timestamptz], ARRAY[$3::bigint], ARRAY[$4::bigint], '{0}', ARRAY[$3::float8], '{0}', '{0}',
		$5, $6, $7, $8, $9, $10, '30 days')`, name, now.Truncate(time.Minute), granted, denied, names, hours, keys, each, asked, last)
	if err != nil {
		t.Fatal(err)
	}
}

func TestTheConsoleShowsLimitsAndKeys(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	publish(t, pool, `[{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1 minute", "capacity": 20},
		{"name": "signUps", "kind": "fixed window", "rate": 100, "period": "1 hour"},
		{"name": "reports", "kind": "calendar window", "rate": 5, "period": "1 month", "zone": "Europe/Berlin", "anchor": "2026-01-31 15:00"},
		{"name": "free", "kind": "unlimited"}, {"name": "never", "kind": "token bucket", "rate": 0, "period": "1 hour"},
		{"name": "plans", "kind": "token bucket", "rate": 1, "period": "1 hour"}, {"name": "plans", "kind": "token bucket", "rate": 9, "period": "1 hour"}]`)
	limiter := new(ratelimit.Limiter)
	bucket := ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20))
	for _, request := range []ratelimit.Request{bucket.Key("user-17").Count(15), ratelimit.FixedWindow("signUps", 100, time.Hour).Key("acme").Count(40), ratelimit.TokenBucket("unpublished", 1, time.Hour).Key("x")} {
		if _, err := limiter.Consume(t.Context(), pool, request); err != nil {
			t.Fatal(err)
		}
	}
	recordUsage(t, pool, "sendMessage", 1200, 34, "user-16", "user-17")
	recordUsage(t, pool, "signUps", 7, 56)
	p := newConsole(t, pool, "ann")

	list := p.get(http.StatusOK, "", "90 denied and 1,207 granted", "34 denied and 1,200 granted", "10 per minute, at most 20 at once", "unpublished", "2 plans", "denies everything")
	if strings.Index(list, "signUps") > strings.Index(list, "sendMessage") {
		t.Error("the limit that denies most is not the first")
	}
	if n := strings.Count(list, ">not counted<"); n != 5 || strings.Contains(list, "Failed") {
		t.Errorf("%d limits are not counted, want 5, or some have failed", n)
	}
	if _, err := pool.Exec(t.Context(), "INSERT INTO rate_limit_usage VALUES ('free', now() - interval '7 days', 1, 0, 0, 1, 0, 0), ('never', date_trunc('minute', now()), 0, 9, 4321, 0, 0, 0)"); err != nil {
		t.Fatal(err)
	}
	failed := p.get(http.StatusOK, "", "99 denied", "Failed", "4,321")
	if n := strings.Count(failed, ">not counted<"); n != 3 {
		t.Errorf("%d limits are not counted, want 3: one was counted a week ago", n)
	}
	found := p.get(http.StatusOK, "?q=SIGN", "signUps")
	if strings.Contains(found, "sendMessage") {
		t.Error("a search finds what it should not")
	}
	p.get(http.StatusOK, "limit?name=sendMessage", "1,200", "user-17", "user-16", "10 per minute")
	p.get(http.StatusOK, "limit?name=sendMessage&q=user-1", "user-17", "Used, beginning with “user-1”")
	p.get(http.StatusOK, "limit?name=plans", "1 per hour", "9 per hour")
	p.get(http.StatusOK, "limit?name=reports", "calendar window, Europe/Berlin from 2026-01-31 15:00")
	p.get(http.StatusOK, "limit?name=unpublished", "No program publishes this limit")
	p.get(http.StatusOK, "key?name=sendMessage&key=user-17", "5", "of 20 tokens", "Full in", "2 times")
	p.get(http.StatusOK, "key?name=sendMessage&key=user-16", "Once, last")
	p.get(http.StatusOK, "key?name=sendMessage", "This limit has 1 key with rows")
	p.get(http.StatusOK, "key?name=sendMessage&key=user-18", "20 of 20 tokens", "nothing is stored")
	p.get(http.StatusOK, "key?name=signUps&key=acme", "60 of 100 tokens")
	p.get(http.StatusOK, "key?name=reports&key=acme", "5 of 5 tokens", "5 per month")
	p.get(http.StatusOK, "key?name=free&key=acme", "Unlimited")
	p.get(http.StatusOK, "key?name=never&key=acme", "Denied")
	p.get(http.StatusOK, "key?name=plans&key=acme", "1 of 1 tokens", "9 left")
	p.get(http.StatusOK, "key?name=unpublished&key=x", "Not known")
	p.get(http.StatusNotFound, "limit?name=nowhere", "There is no such limit")
	usage := p.get(http.StatusOK, "usage.json?name=sendMessage")
	if !strings.Contains(usage, ",1200]") || !strings.Contains(usage, ",34]") {
		t.Errorf("the chart has %s", usage)
	}

	p.post(http.StatusOK, "key?name=sendMessage&key=user-17", url.Values{"action": {"block"}, "end": {"2h"}, "reason": {"a flood"}}, "Blocked. Every program denies", "a flood", "ann")
}

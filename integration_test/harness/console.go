package harness

import (
	"html"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit/console"
)

// Takes asks a limit without numbers, as programs with overrides do, and returns what is granted of a count.
func Takes(t *testing.T, pool *pgxpool.Pool, name, key string, count float64) bool {
	t.Helper()
	var ok bool
	if err := pool.QueryRow(t.Context(), "SELECT granted FROM ratelimit.try($1, $2, count => $3)", name, key, count).Scan(&ok); err != nil {
		t.Fatal(err)
	}
	return ok
}

// What is read of a page: its text, and what charts say to those who do not see them.
var (
	Tags       = regexp.MustCompile(`<[^>]*>`)
	attributes = regexp.MustCompile(`(?s).*?(?:aria-label="([^"]*)"|$)`)
)

// ConsolePage is a console that is mounted as an application would mount it.
type ConsolePage struct {
	*testing.T
	URL string
}

// NewConsole mounts a console under /admin/limits/ for a person; "" is nobody.
func NewConsole(t *testing.T, db TxBeginner, who string) ConsolePage {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("/admin/limits/", http.StripPrefix("/admin/limits", &console.Handler{DB: db, Who: func(*http.Request) string { return who }}))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return ConsolePage{t, server.URL + "/admin/limits/"}
}

// Get wants a page.
func (p ConsolePage) Get(status int, path string, contains ...string) string {
	p.Helper()
	r, err := http.NewRequestWithContext(p.Context(), http.MethodGet, p.URL+path, nil)
	if err != nil {
		p.Fatal(err)
	}
	return p.Send(r, status, contains...)
}

// Post wants what a form leads to, redirects followed. A form that ends overrides has those that the page shows, unless it says which.
func (p ConsolePage) Post(status int, path string, form url.Values, contains ...string) string {
	p.Helper()
	if form.Get("action") == "restore" && !form.Has("shown") {
		r, err := http.NewRequestWithContext(p.Context(), http.MethodGet, p.URL+path, nil)
		if err != nil {
			p.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			p.Fatal(err)
		}
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			p.Fatal(err)
		}
		form = maps.Clone(form)
		form.Set("shown", ShownOn(string(body)))
	}
	r, err := http.NewRequestWithContext(p.Context(), http.MethodPost, p.URL+path, strings.NewReader(form.Encode()))
	if err != nil {
		p.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	return p.Send(r, status, contains...)
}

// ShownOn is the overrides that a page has shown, as its form has them that ends them; "" if it has none.
func ShownOn(body string) string {
	_, after, _ := strings.Cut(body, `name="shown" value="`)
	ids, _, _ := strings.Cut(after, `"`)
	return ids
}

// Send sends a request, and returns the page, which contains the words.
func (p ConsolePage) Send(r *http.Request, status int, contains ...string) string {
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
	text := strings.Join(strings.Fields(html.UnescapeString(Tags.ReplaceAllString(string(body), ""))+attributes.ReplaceAllString(string(body), "$1 ")), " ")
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

// Publish has the program "api" publish limits, by SQL.
func Publish(t *testing.T, pool *pgxpool.Pool, definitions string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.publish('api', $1)", definitions); err != nil {
		t.Fatal(err)
	}
}

// RecordUsage adds counts of this minute, as a recorder does.
func RecordUsage(t *testing.T, pool *pgxpool.Pool, name string, granted, denied int64, keys ...string) {
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
	_, err := pool.Exec(t.Context(), `SELECT ratelimit._record_usage(ARRAY[$1], ARRAY[$2::timestamptz], ARRAY[$3::bigint], ARRAY[$4::bigint], '{0}', ARRAY[$3::float8], '{0}', '{0}',
		$5, $6, $7, $8, $9, $10, '30 days')`, name, now.Truncate(time.Minute), granted, denied, names, hours, keys, each, asked, last)
	if err != nil {
		t.Fatal(err)
	}
}

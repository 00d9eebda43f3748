package console

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// What others have written is here as they published it: uPlot 1.6.32 from npm. assets/README.md says how to renew it.
func TestTheVendoredFilesAreAsPublished(t *testing.T) {
	t.Parallel()
	listed := readme(t)
	for name, want := range map[string]string{
		"uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
		"uPlot.min.css":     "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
		"uPlot.LICENSE":     "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
	} {
		content, err := assets.ReadFile("assets/" + name)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(content)
		if got := hex.EncodeToString(sum[:]); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		if !strings.Contains(listed, want) {
			t.Errorf("assets/README.md does not name the checksum of %s", name)
		}
	}
	if license := read(t, "assets/uPlot.LICENSE"); !strings.Contains(license, "MIT License") || !strings.Contains(license, "Leon Sorokin") {
		t.Errorf("the licence is %q", license)
	}
}

func TestAssetsAreKeptByTheirHash(t *testing.T) {
	t.Parallel()
	h := new(Handler) // needs no database for them
	for _, name := range []string{"console.css", "console.js", "uPlot.iife.min.js", "uPlot.min.css"} {
		url, err := assetURL(name)
		if err != nil {
			t.Fatal(err)
		}
		for target, cached := range map[string]string{"/" + url: "private, max-age=31536000, immutable", "/assets/" + name: "no-store", "/assets/" + name + "?old": "no-store"} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))
			if w.Code != http.StatusOK || w.Header().Get("Cache-Control") != cached || w.Body.Len() == 0 {
				t.Errorf("%s: %d, %q, %d bytes", target, w.Code, w.Header().Get("Cache-Control"), w.Body.Len())
			}
			if kind := w.Header().Get("Content-Type"); !strings.HasPrefix(kind, "text/") {
				t.Errorf("%s: %s", target, kind)
			}
		}
	}
	for _, path := range []string{"/assets/", "/assets/../console.go", "/assets/README.md", "/assets/.."} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.URL.Path = path
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != http.StatusNotFound {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
}

// Nothing in templates or scripts needs more than the Content-Security-Policy allows.
func TestNothingIsInline(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"layout", "parts", "limits", "limit", "key", "error"} {
		text := read(t, "templates/"+name+".html")
		for _, inline := range []string{" style=", "<style", "onclick", "onload", "javascript:", "http://", "https://"} {
			if strings.Contains(text, inline) {
				t.Errorf("%s.html has %q", name, inline)
			}
		}
		if n := strings.Count(text, "<script"); n != strings.Count(text, "<script src=") {
			t.Errorf("%s.html has a script of its own", name)
		}
	}
	for _, danger := range []string{"innerHTML", "insertAdjacentHTML", "document.write", "eval("} {
		if strings.Contains(read(t, "assets/console.js"), danger) {
			t.Errorf("console.js has %s", danger)
		}
	}
}

func readme(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("assets/README.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func read(t *testing.T, name string) string {
	t.Helper()
	fs := assets
	if strings.HasPrefix(name, "templates/") {
		fs = templateFiles
	}
	content, err := fs.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestEnds(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	never := time.Time{}
	for text, want := range map[string]time.Time{
		"never": never, " Never ": never,
		"90s": now.Add(90 * time.Second), "15m": now.Add(15 * time.Minute), "2h": now.Add(2 * time.Hour), "1h30m": now.Add(90 * time.Minute), "1h 30m": now.Add(90 * time.Minute),
		"3d": now.Add(72 * time.Hour), "1w": now.Add(7 * 24 * time.Hour), "2 d": now.Add(48 * time.Hour),
		"2026-07-01 18:00": now.Add(6 * time.Hour), "2026-07-01T18:00": now.Add(6 * time.Hour), "2026-07-01T18:00:00+02:00": now.Add(4 * time.Hour), "2026-07-02": now.Add(12 * time.Hour),
	} {
		got, err := parseEnd(text, now)
		switch {
		case err != nil:
			t.Errorf("%q: %v", text, err)
		case (got == nil) != want.IsZero(), got != nil && !got.Equal(want):
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	for _, text := range []string{"", " ", "soon", "0s", "-1h", "0d", "-1d", "1.5d", "99999d", "9999w", "d", "w", "2026-07-01 12:00", "2026-07-01", "2026-13-01", "1h1", "2562048h"} {
		if got, err := parseEnd(text, now); err == nil {
			t.Errorf("%q: %v, want an error", text, got)
		}
	}
}

func TestNumbersAreReadable(t *testing.T) {
	t.Parallel()
	for f, want := range map[float64]string{
		0: "0", 1: "1", -3: "−3", 1234567: "1,234,567", -1234: "−1,234", 0.4156: "0.415", 12.999: "12.99", 99.999: "99.99", 123.9: "123", 0.00012: "0.00012", 1e15: "1e+15", 2.5e17: "2.5e+17", -0.5: "−0.5", 9.996e15: "9.99e+15", -6.98392385e16: "-6.99e+16", 0.00012996: "0.000129", -0.00012004: "-0.000121",
	} {
		if got := number(f); got != want {
			t.Errorf("%v: %s, want %s", f, got, want)
		}
	}
	for _, test := range []struct {
		part, other int64
		want        string
	}{{0, 0, "–"}, {0, 5, "0 %"}, {5, 0, "100 %"}, {1, 100000, "< 0.1 %"}, {100000, 1, "> 99.9 %"}, {1, 49, "2.0 %"}, {87, 13, "87 %"}} {
		if got := percent(test.part, test.other); got != test.want {
			t.Errorf("%d of %d: %s, want %s", test.part, test.other, got, test.want)
		}
	}
	for d, want := range map[time.Duration]string{
		0: "under 1 s", time.Second: "1 s", 61 * time.Second: "1 min 1 s", time.Hour: "1 h", 25*time.Hour + 59*time.Second: "1 d 1 h", 24*time.Hour + time.Minute: "1 d", 1000 * 24 * time.Hour: "1,000 d", math.MaxInt64: "more than 292 years",
	} {
		if got := inTwoUnits(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
	// Who comes back then is not too early.
	now := time.Now()
	for d, want := range map[time.Duration]string{
		time.Millisecond: "under 1 s", 1001 * time.Millisecond: "2 s", time.Minute + 1: "1 min 1 s", time.Hour + time.Second: "1 h 1 min",
		2*time.Hour - 1: "2 h", 24*time.Hour + time.Second: "1 d 1 h", 1000 * 24 * time.Hour: "1,000 d", math.MaxInt64: "more than 292 years",
	} {
		if got := in(now, now.Add(d)); got != want {
			t.Errorf("in %v: %s, want %s", d, got, want)
		}
	}
}

// Keys that begin with a prefix are from the prefix on, and below what above returns.
func TestAbove(t *testing.T) {
	t.Parallel()
	for prefix, want := range map[string]string{"a": "b", "user-1": "user-2", "a\U0010ffff": "b", "\ud7ff": "\ue000", "ä": "å", "a\x7f": "a\u0080", "z\u07ff": "z\u0800", "\uffff": "\U00010000"} {
		got := above(prefix)
		if got == nil || *got != want {
			t.Errorf("%q: %v, want %q", prefix, got, want)
			continue
		}
		if !utf8.ValidString(*got) || *got <= prefix+"\U0010ffff" && prefix != "a\U0010ffff" && !strings.HasPrefix(*got, prefix) && *got <= prefix {
			t.Errorf("%q: %q is not above", prefix, *got)
		}
	}
	for _, prefix := range []string{"", "\U0010ffff"} {
		if got := above(prefix); got != nil {
			t.Errorf("%q: %q", prefix, *got)
		}
	}
}

// A small chart shows a denial among a million grants, and nothing outside of its frame.
func TestASmallChartShowsEveryDenial(t *testing.T) {
	t.Parallel()
	s := listSpans[1]
	now := time.Date(2026, 7, 1, 12, 3, 0, 0, time.UTC)
	first := s.since(now)
	if !first.Equal(time.Date(2026, 7, 1, 9, 5, 0, 0, time.UTC)) {
		t.Fatalf("it begins at %v", first)
	}
	chart := draw([]binRow{{At: first.Add(-s.Bin), Denied: 9}, {At: first, Granted: 1e6, Denied: 1}, {At: first.Add(35 * s.Bin), Granted: 10}, {At: first.Add(36 * s.Bin), Denied: 9}}, s, now)
	if chart.Denied != "M0.50 0.00h4.00v1.50h-4.00z" || strings.Count(chart.Granted, "M") != 2 || !strings.Contains(chart.Label, "1 denied and 1,000,010 granted in the last 3 hours") {
		t.Errorf("%+v", chart)
	}
	if empty := draw(nil, s, now); empty.Granted != "" || empty.Denied != "" {
		t.Errorf("%+v", empty)
	}
}

func TestWithoutADatabaseItSaysSo(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	new(Handler).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusServiceUnavailable || !bytes.Contains(w.Body.Bytes(), []byte("The database cannot be reached")) {
		t.Errorf("%d: %s", w.Code, w.Body)
	}
}

// Mounted with its prefix, every page is a 404 that says why.
func TestAHandlerWithItsPrefix(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.Handle("/admin/limits/", new(Handler))
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/admin/limits/", nil))
	if w.Code != http.StatusNotFound || !strings.Contains(w.Body.String(), "mount it with http.StripPrefix") {
		t.Errorf("%d: %s", w.Code, w.Body)
	}
}

// hostileError is the error of a database that has a key in it.
type hostileError struct{}

func (hostileError) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	return nil, errors.New("no \x1b[2J\u009b31m\x7f\u202e\n connection")
}

// Not parallel: the log is every test's.
func TestTheLogHasNothingThatATerminalObeys(t *testing.T) {
	var logged bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewJSONHandler(&logged, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	h := &Handler{DB: hostileError{}}
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/limit?name=%C2%9B31m", nil))
	if text := logged.String(); !strings.Contains(text, "connection") || strings.ContainsAny(text, "\x1b\u009b\x7f\u202e") {
		t.Errorf("%q", text)
	}
}

// stuckDB has a connection for nobody, and counts who waits for one.
type stuckDB struct {
	waiting atomic.Int32
	end     chan struct{}
}

func (db *stuckDB) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	db.waiting.Add(1)
	<-db.end
	return nil, errors.New("stuck")
}

// silentDB has connections whose server answers no more after the first statement has failed.
type silentDB struct{}

func (silentDB) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) { return silentTx{}, nil }

type silentTx struct{ pgx.Tx }

func (silentTx) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errors.New("refused")
}

func (silentTx) Rollback(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// A server that does not answer to ROLLBACK keeps a page, and its place among the connections, for a few seconds.
func TestARollbackHasADeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := &Handler{DB: silentDB{}, Who: func(*http.Request) string { return "ann" }}
		for i := range 3 * connections {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			if i%2 == 1 {
				r = httptest.NewRequest(http.MethodPost, "/key?name=a&key=b", strings.NewReader("action=reset"))
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			}
			w, start := httptest.NewRecorder(), time.Now()
			h.ServeHTTP(w, r)
			if took := time.Since(start); took > patience || !strings.Contains(w.Body.String(), "The database cannot be reached") {
				t.Errorf("%d after %v: %s", w.Code, took, w.Body)
			}
		}
	})
}

// A page that cannot be read soon is refused, and leaves the pool alone.
func TestThePageTakesTwoConnections(t *testing.T) {
	t.Parallel()
	db := &stuckDB{end: make(chan struct{})}
	h := &Handler{DB: db, Who: func(*http.Request) string { return "ann" }}
	const readers = 40
	answers := make(chan *httptest.ResponseRecorder, readers)
	for i := range readers {
		go func() {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodGet, []string{"/", "/limit?name=a", "/key?name=a&key=b", "/usage.json?name=a"}[i%4], nil)
			if i%8 == 7 {
				r = httptest.NewRequest(http.MethodPost, "/key?name=a&key=b", strings.NewReader("action=reset"))
				r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			}
			h.ServeHTTP(w, r)
			answers <- w
		}()
	}
	for range readers - connections {
		if w := <-answers; w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" || !strings.Contains(w.Body.String(), "Too many people") {
			t.Errorf("%d, Retry-After %q", w.Code, w.Header().Get("Retry-After"))
		}
	}
	if n := db.waiting.Load(); n != connections {
		t.Errorf("%d connections were asked for at once", n)
	}
	close(db.end)
	for range connections {
		if w := <-answers; w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") != "" {
			t.Errorf("%d", w.Code)
		}
	}
}

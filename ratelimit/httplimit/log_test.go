package httplimit_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// Without an Observer, a database that is down is logged. (Not parallel: the default logger is shared.)
func TestWithoutAnObserverFailuresAreLogged(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // nothing listens there
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var log bytes.Buffer
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	for _, open := range []bool{false, true} {
		log.Reset()
		limit := httplimit.Middleware{Limiter: new(ratelimit.Limiter), DB: pool, FailOpen: open,
			Requests: func(*http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{ratelimit.TokenBucket("limit", 1, time.Hour).Key("ann@example.org")}, nil
			},
		}
		called := false
		handler := limit.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called = true }))
		for until := time.Now().Add(5 * time.Minute); ; time.Sleep(10 * time.Millisecond) { // until a probe has failed
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
			if called == open || time.Now().After(until) {
				break
			}
		}
		if called != open || !strings.Contains(log.String(), "level=ERROR") || !strings.Contains(log.String(), "connection refused") || strings.Contains(log.String(), "ann@") {
			t.Errorf("FailOpen %v: called %v, logged %q", open, called, log.String())
		}
	}
}

// Without an Observer, requests that cannot be counted are logged: their key is empty, or the limit never has a whole token.
func TestWithoutAnObserverInvalidKeysAreLogged(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // never asked
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for want, asked := range map[string]ratelimit.Request{
		"the key is empty": ratelimit.TokenBucket("limit", 1, time.Hour).Key(""),
		"the capacity is the rate, unless Capacity is": ratelimit.TokenBucket("limit", 0.5, time.Hour).Key("ann"),
	} {
		log.Reset()
		limit := httplimit.Middleware{Limiter: new(ratelimit.Limiter), DB: pool, Requests: func(*http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{asked}, nil
		}}
		w := httptest.NewRecorder()
		limit.Handler(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		if w.Code != http.StatusBadRequest || !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), want) {
			t.Errorf("status %d, logged %q, want %q", w.Code, log.String(), want)
		}
	}
}

// Without an Observer, missing requests are logged. Otherwise it looks as if there were no limit.
func TestWithoutAnObserverNoRequestsAreLogged(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // never asked
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	limit := httplimit.Middleware{Limiter: new(ratelimit.Limiter), DB: pool, FailOpen: true,
		Requests: func(*http.Request) ([]ratelimit.Request, error) { return nil, nil },
	}
	w := httptest.NewRecorder()
	limit.Handler(http.NotFoundHandler()).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	if w.Code != http.StatusInternalServerError || !strings.Contains(log.String(), "level=ERROR") || !strings.Contains(log.String(), "ErrNotLimited") {
		t.Errorf("status %d, logged %q", w.Code, log.String())
	}
}

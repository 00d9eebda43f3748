package httplimit_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// FailOpen passes what the database could not decide, and nothing else: not what is closed.
func TestFailOpenPassesNoLimiterThatIsNotReady(t *testing.T) {
	t.Parallel()
	down, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // nothing listens there
	if err != nil {
		t.Fatal(err)
	}
	defer down.Close()
	db := ratelimittest.New(t)
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	closed, err := ratelimit.Open(t.Context(), db, ratelimit.Options{Program: "p", Limits: []ratelimit.Limit{limit}})
	if err == nil {
		err = closed.Close(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	coalescer := &ratelimit.Coalescer{Pool: down}
	if err := coalescer.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for name, test := range map[string]struct {
		limiter *ratelimit.Limiter
		db      ratelimit.DB
		want    error // nil: it passes
	}{
		"the database is down":    {new(ratelimit.Limiter), down, nil},
		"the limiter is closed":   {closed, db, ratelimit.ErrClosed},
		"the Coalescer is closed": {new(ratelimit.Limiter), coalescer, ratelimit.ErrClosed},
	} {
		var got httplimit.Decision
		limit := httplimit.Middleware{Limiter: test.limiter, DB: test.db, FailOpen: true,
			Requests: func(*http.Request) ([]ratelimit.Request, error) { return []ratelimit.Request{limit.Key("ann")}, nil },
			Observer: func(_ *http.Request, d httplimit.Decision) { got = d },
		}
		called := false
		handler := limit.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called = true }))
		wait := 20 * time.Second // until a probe has failed
		if test.want != nil {
			wait = 0
		}
		for until := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
			if called || time.Now().After(until) {
				break
			}
		}
		if called != (test.want == nil) || got.Status != http.StatusServiceUnavailable || test.want != nil && !errors.Is(got.Err, test.want) {
			t.Errorf("%s: called %v, %d, %v", name, called, got.Status, got.Err)
		}
	}
}

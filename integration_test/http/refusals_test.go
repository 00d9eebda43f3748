package http_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

func TestHTTPAHostileKeyIsTheClientsErrorAndNeverAGrant(t *testing.T) {
	t.Parallel()
	perUser := ratelimit.TokenBucket("perUser", 10, time.Minute)
	for _, coalesced := range []bool{false, true} {
		s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perUser.Key(r.URL.Query().Get("user"))}, nil
		})
		s.Limit.FailOpen = true // the database is not at fault
		if coalesced {
			coalescer := &ratelimit.Coalescer{Pool: s.Pool}
			t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
			s.Limit.DB = coalescer
		}
		s.Serve()
		for _, user := range []string{"", "%00", "ann%00", "%ff", "%c3%28", strings.Repeat("a", 1025), strings.Repeat("%7c", 1025)} {
			got := s.Get("/?user=" + user)
			if got.Status != 400 || got.Header.Get("Retry-After") != "" || got.Header.Get("RateLimit") != "" {
				t.Errorf("%.20q: %+v", user, got)
			}
			s.Problem(got)
		}
		for _, user := range []string{"';drop table ratelimit.limits;--", "|", `\`, "\r\nX: y", strings.Repeat("a", 1024), "名前"} {
			if got := s.Get("/?user=" + url.QueryEscape(user)); got.Status != 200 {
				t.Errorf("%.20q: %+v", user, got)
			}
		}
		if n := s.Called.Load(); n != 6 {
			t.Errorf("the handler was called %d times", n)
		}
	}
}

// This server cannot store the key, though others could. It does answer, so FailOpen does not apply: a client cannot choose
// a key that passes.
func TestHTTPAKeyThatTheServerDoesNotStoreIsTheClientsErrorAndNeverAGrant(t *testing.T) {
	t.Parallel()
	perUser := ratelimit.TokenBucket("perUser", 1, time.Minute)
	for constraint, state := range map[string]string{
		"convert_to(key, 'LATIN1') IS NOT NULL": "22P05", // as in a database with that encoding
		"key <> '日本'":                           "23514",
	} {
		s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perUser.Key(r.URL.Query().Get("user"))}, nil
		})
		s.Limit.FailOpen = true
		if _, err := s.Pool.Exec(t.Context(), "ALTER TABLE ratelimit.limits ADD CHECK ("+constraint+")"); err != nil {
			t.Fatal(err)
		}
		s.Serve()
		got := s.Get("/?user=" + url.QueryEscape("日本"))
		if d := s.Observed(); got.Status != 400 || got.Header.Get("Retry-After") != "" || len(d) != 1 || harness.SQLState(d[0].Err) != state || d[0].Passed || s.Called.Load() != 0 {
			t.Errorf("%s: %+v, %+v", constraint, got, d)
		}
		s.Problem(got)
		s.Wants("/?user=ann", 200, `"perUser";r=0;t=60`, "")
	}
}

func TestHTTPTheServersMistakesAre500AndNeverAGrant(t *testing.T) {
	t.Parallel()
	good := ratelimit.TokenBucket("good", 10, time.Minute)
	pool := harness.NewPool(t, 4)
	for name, breakIt := range map[string]func(m *httplimit.Middleware){
		"nothing asked":    func(m *httplimit.Middleware) { m.Requests = harness.Always() },
		"an empty list":    func(m *httplimit.Middleware) { m.Requests = harness.Always([]ratelimit.Request{}...) },
		"the zero limit":   func(m *httplimit.Middleware) { m.Requests = harness.Always(ratelimit.Limit{}.Key("ann")) },
		"the zero request": func(m *httplimit.Middleware) { m.Requests = harness.Always(good.Key("ann"), ratelimit.Request{}) },
		"a limit that is invalid": func(m *httplimit.Middleware) {
			m.Requests = harness.Always(ratelimit.TokenBucket("x", -1, time.Minute).Key("ann"))
		},
		"two limits with one name": func(m *httplimit.Middleware) {
			m.Requests = harness.Always(good.Key("ann"), ratelimit.TokenBucket("good", 9, time.Minute).Key("ann"))
		},
		"two definitions of one name": func(m *httplimit.Middleware) {
			m.Requests = harness.Always(good.Key("ann"), ratelimit.TokenBucket("good", 10, time.Hour).Key("bob"))
		},
		"a name with another definition": func(m *httplimit.Middleware) {
			if _, err := m.Limiter.Consume(t.Context(), pool, ratelimit.TokenBucket("good", 10, time.Hour).Key("bob")); err != nil {
				t.Error(err)
			}
		},
		"an error": func(m *httplimit.Middleware) {
			m.Requests = func(*http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{good.Key("ann")}, errors.New("password of the database: hunter2")
			}
		},
		"a mistake": func(m *httplimit.Middleware) {
			m.Requests = func(*http.Request) ([]ratelimit.Request, error) { return nil, ratelimit.Limit{}.Validate() }
		},
		"a status that is invalid": func(m *httplimit.Middleware) {
			m.Requests = func(*http.Request) ([]ratelimit.Request, error) { return nil, &httplimit.StatusError{Status: 200} }
		},
	} {
		s := harness.NewSiteOn(t, pool, harness.Always(good.Key("ann")))
		s.Limit.FailOpen = true
		breakIt(&s.Limit)
		s.Serve()
		got := s.Get("/")
		s.Problem(got)
		if d := s.Observed(); got.Status != 500 || strings.Contains(got.Body, "hunter2") || len(d) != 1 || d[0].Err == nil || d[0].Status != 500 || d[0].Passed || s.Called.Load() != 0 {
			t.Errorf("%s: %+v, %+v", name, got, d)
		}
	}
}

func TestHTTPRequestsAreRefusedWithAStatusOfTheCallersChoice(t *testing.T) {
	t.Parallel()
	perKey := ratelimit.TokenBucket("perKey", 10, time.Minute)
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		if r.URL.Path == "/gone" {
			return nil, fmt.Errorf("wrapped: %w", &httplimit.StatusError{Status: 410})
		}
		if r.URL.Path == "/bad" {
			return nil, fmt.Errorf("wrapped: %w", ratelimit.ErrBadRequest)
		}
		key, err := httplimit.APIKey(r, "X-API-Key")
		if err != nil {
			return nil, err
		}
		return []ratelimit.Request{perKey.Key(key)}, nil
	}).Serve()
	got := s.Get("/")
	if problem := s.Problem(got); got.Status != 401 || problem["title"] != "Unauthorized" || problem["detail"] != "The header field X-Api-Key is missing." {
		t.Errorf("no key: %+v", got)
	}
	if got := s.Get("/", "X-API-Key", "one", "X-API-Key", "another"); got.Status != 400 || s.Problem(got)["detail"] != "The header field X-Api-Key occurs more than once, with different values." {
		t.Errorf("two keys: %+v", got)
	}
	if got := s.Get("/gone"); got.Status != 410 || s.Problem(got)["detail"] != nil {
		t.Errorf("gone: %+v", got)
	}
	if got := s.Get("/bad"); got.Status != 400 || s.Problem(got)["title"] != "Bad Request" {
		t.Errorf("a bad request: %+v", got)
	}
	for range 2 {
		if got := s.Get("/", "X-API-Key", strings.Repeat("s3cret", 1000)); got.Status != 200 {
			t.Errorf("a key: %+v", got)
		}
	}
	if rows := s.World().Rows(); strings.Contains(rows, "s3cret") || strings.Count(rows, "\n") != 0 {
		t.Errorf("stored: %s", rows)
	}
}

func TestHTTPTheUsersOwnHandlerMayRefuse(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{limit.Key("ann").Count(httplimit.Cost(r.URL.Query().Get("n"), 1))}, nil
	})
	s.Limit.Refused = func(w http.ResponseWriter, _ *http.Request, d httplimit.Decision) {
		if exceeded, ok := errors.AsType[*ratelimit.DeniedError](d.Err); ok {
			http.Error(w, fmt.Sprintf("come back in %v", exceeded.RetryAfter), http.StatusServiceUnavailable) // not the default
			return
		}
		http.Error(w, "no", d.Status)
	}
	s.Serve().Get("/")
	if got := s.Wants("/", 503, `"limit";r=0;t=60`, "60"); got.Body != "come back in 1m0s\n" || !strings.HasPrefix(got.Header.Get("Content-Type"), "text/plain") {
		t.Errorf("%+v", got)
	}
	if got := s.Wants("/?n=2", 400, ``, ""); got.Body != "no\n" {
		t.Errorf("%+v", got)
	}
}

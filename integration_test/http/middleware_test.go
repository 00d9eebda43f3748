package http_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/gorilla/mux"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

func TestHTTPClientsAreToldWhereTheyStand(t *testing.T) {
	t.Parallel()
	handles := map[string]func(pool *pgxpool.Pool) ratelimit.DB{
		"pool": func(pool *pgxpool.Pool) ratelimit.DB { return pool },
		"coalescer": func(pool *pgxpool.Pool) ratelimit.DB {
			coalescer := &ratelimit.Coalescer{Pool: pool}
			t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
			return coalescer
		},
		"database/sql": func(pool *pgxpool.Pool) ratelimit.DB {
			db := stdlib.OpenDBFromPool(pool)
			t.Cleanup(func() { _ = db.Close() })
			return ratelimit.SQL(db)
		},
	}
	for name, handle := range handles {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			burst := ratelimit.TokenBucket("burst", 3, time.Minute)
			s := harness.NewSite(t, harness.Always(burst.Key("ann")))
			s.Limit.DB = handle(s.Pool)
			s.Serve()
			s.Wants("/", 200, `"burst";r=2;t=20`, "")
			s.Wants("/", 200, `"burst";r=1;t=40`, "")
			if got := s.Do(http.MethodHead, "/"); got.Status != 200 || got.Header.Get("RateLimit") != `"burst";r=0;t=60` || got.Body != "" {
				t.Fatalf("HEAD: %+v", got)
			}
			got := s.Wants("/", 429, `"burst";r=0;t=20`, "20")
			want := map[string]any{
				"type":  "https://iana.org/assignments/http-problem-types#quota-exceeded",
				"title": "Request cannot be satisfied as assigned quota has been exceeded", "status": 429.0,
				"violated-policies": []any{"burst"},
			}
			if problem := s.Problem(got); !reflect.DeepEqual(problem, want) {
				t.Errorf("problem %v, want %v", problem, want)
			}
			if got := s.Do(http.MethodHead, "/"); got.Status != 429 || got.Header.Get("Retry-After") != "20" || got.Body != "" || got.Header.Get("Content-Type") != "application/problem+json" {
				t.Fatalf("HEAD: %+v", got)
			}
			for _, header := range []http.Header{got.Header, s.Do(http.MethodDelete, "/").Header} {
				if policy := harness.List(t, header, "RateLimit-Policy"); !reflect.DeepEqual(policy, []harness.Item{{Name: "burst", Params: map[string]any{"q": int64(3), "w": int64(60)}}}) {
					t.Errorf("policy: %v", policy)
				}
				if limit := harness.List(t, header, "RateLimit"); !reflect.DeepEqual(limit, []harness.Item{{Name: "burst", Params: map[string]any{"r": int64(0), "t": int64(20)}}}) {
					t.Errorf("limit: %v", limit)
				}
			}
			s.Clock.Advance(18999999 * time.Microsecond)
			s.Wants("/", 429, `"burst";r=0;t=2`, "2")
			s.Clock.Advance(time.Second)
			s.Wants("/", 429, `"burst";r=0;t=1`, "1") // a microsecond is rounded up to a second
			s.Clock.Advance(time.Second)              // as Retry-After said
			s.Wants("/", 200, `"burst";r=0;t=60`, "")
			if n := s.Called.Load(); n != 4 {
				t.Errorf("the handler was called %d times", n)
			}
			var statuses []int
			for _, d := range s.Observed() {
				if d.Passed != (d.Err == nil) || d.Passed != (d.Status == 0) || harness.Denied(d.Err) != (d.Status == 429) || len(d.Result.Requests) != 1 {
					t.Errorf("observed %+v", d)
				}
				statuses = append(statuses, d.Status)
			}
			if want := []int{0, 0, 0, 429, 429, 429, 429, 429, 0}; !slices.Equal(statuses, want) {
				t.Errorf("observed %v, want %v", statuses, want)
			}
		})
	}
}

// Whatever the limits and their balances, a library that is not ours parses the numbers.
func TestHTTPFieldsAreReadBackByAnotherLibrary(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	var requests []ratelimit.Request
	s := harness.NewSite(t, func(*http.Request) ([]ratelimit.Request, error) { return requests, nil })
	s.Limit.LegacyFields = true
	s.Limit.ObserveOnly = true // so that requests that can never be granted get fields, too
	s.Serve()
	outcomes := map[int]int{}
	for n := range 150 {
		requests = nil
		for i := range 1 + r.IntN(3) {
			name := harness.OneOf(r, "burst", `qu"o\te`, "café", "per%cent", "new\r\nline", "tab\t;r=1, \"x\"", "\x7f", "名前", "a b:c=?*+")
			limit := harness.RandomLimit(r, fmt.Sprint(name, n, i), harness.OneOf(r, 1, 1, 3))
			requests = append(requests, harness.OneOf(r, limit.Key("ann"), limit.Global()).Count(harness.RandomTokens(r, min(limit.Capacity(), 1e9))))
		}
		for range 3 { // from the second time on, many are denied
			s.Clock.Advance(time.Duration(r.Int64N(1e9)) * time.Microsecond)
			got := s.Get("/")
			d := s.Observed()[0]
			outcomes[d.Status]++
			s.ReadBack(got, d)
		}
	}
	t.Logf("%v", outcomes)
	if min(outcomes[0], outcomes[429], outcomes[400]) < 10 {
		t.Error("this tested too little")
	}
}

func TestHTTPPartitionKeysAreBytesThatTellNothing(t *testing.T) {
	t.Parallel()
	perUser := ratelimit.TokenBucket("perUser", 10, time.Minute)
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{perUser.Key(r.URL.Query().Get("user"))}, nil
	})
	s.Limit.PartitionSecret = []byte("a secret of this test")
	s.Serve()
	seen := map[string]string{}
	for _, user := range []string{"ann@example.org", "bob@example.org", "ann@example.org"} {
		got := s.Get("/?user=" + url.QueryEscape(user))
		policy, limit := harness.List(t, got.Header, "RateLimit-Policy"), harness.List(t, got.Header, "RateLimit")
		pk, ok := policy[0].Params["pk"].([]byte)
		if !ok || len(pk) != 12 || !reflect.DeepEqual(limit[0].Params["pk"], policy[0].Params["pk"]) || bytes.Contains(pk, []byte(user[:3])) {
			t.Fatalf("%v, %v", policy, limit)
		}
		if before, found := seen[user]; found && before != string(pk) {
			t.Errorf("%s has two", user)
		}
		seen[user] = string(pk)
	}
	if seen["ann@example.org"] == seen["bob@example.org"] {
		t.Error("ann and bob have the same")
	}
}

// User, tenant and site in one call. The plan selects the limit; a header field or a parameter sets the cost.
func TestHTTPSeveralLimitsAreChosenAndPricedByTheRequest(t *testing.T) {
	t.Parallel()
	plans := map[string]ratelimit.Limit{
		"free": ratelimit.TokenBucket("free", 10, time.Minute),
		"pro":  ratelimit.TokenBucket("pro", 100, time.Minute),
	}
	perTenant := ratelimit.FixedWindow("perTenant", 20, time.Hour, ratelimit.Start(harness.Noon))
	perSite := ratelimit.TokenBucket("perSite", 1000, time.Minute)
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		q := r.URL.Query()
		cost := httplimit.Cost(r.Header.Get("X-Cost"), httplimit.Cost(q.Get("n"), 1))
		return []ratelimit.Request{
			plans[q.Get("plan")].Key(q.Get("user")).Count(cost), perTenant.Key(q.Get("tenant")).Count(cost), perSite.Global().Count(cost),
		}, nil
	}).Serve()

	s.Wants("/?plan=free&user=ann&tenant=acme", 200, `"free";r=9;t=6, "perTenant";r=19;t=3600, "perSite";r=999;t=1`, "")
	s.Wants("/?plan=pro&user=bob&tenant=acme&n=2.5", 200, `"pro";r=97;t=2, "perTenant";r=16;t=3600, "perSite";r=996;t=1`, "")
	for _, nonsense := range []string{"NaN", "-5", "Inf", "lots", "%00"} {
		before := s.World().Balance(perTenant.Key("other"))
		if got := s.Get("/?plan=pro&user=eve&tenant=other&n=" + nonsense); got.Status != 200 {
			t.Fatalf("%s: %+v", nonsense, got)
		}
		s.World().Holds(perTenant.Key("other"), before-1)
	}
	if got := s.Get("/?plan=pro&user=eve&tenant=other&n=1", "X-Cost", "5"); got.Status != 200 {
		t.Fatalf("%+v", got)
	}
	s.World().Holds(perTenant.Key("other"), 10)

	// The tenant has 16.5 left. Bob would have enough, but nothing is taken from bob's limit.
	got := s.Wants("/?plan=pro&user=bob&tenant=acme&n=17", 429, `"pro";r=97, "perTenant";r=16;t=3600, "perSite";r=986`, "3600")
	if problem := s.Problem(got); !reflect.DeepEqual(problem["violated-policies"], []any{"perTenant"}) {
		t.Errorf("%v", problem)
	}
	s.World().Holds(plans["pro"].Key("bob"), 97.5)
	s.Wants("/?plan=pro&user=bob&tenant=acme&n=10", 200, `"pro";r=87;t=8, "perTenant";r=6;t=3600, "perSite";r=976;t=2`, "")
	got = s.Wants("/?plan=free&user=ann&tenant=acme&n=9.5", 429, `"free";r=9;t=3, "perTenant";r=6;t=3600, "perSite";r=976`, "3600")
	if problem := s.Problem(got); !reflect.DeepEqual(problem["violated-policies"], []any{"free", "perTenant"}) {
		t.Errorf("%v", problem)
	}

	// A request that can never be granted is the client's error, and waiting does not help.
	for _, n := range []string{"10.5", "1e15", "1e16", "1e300"} {
		got = s.Get("/?plan=free&user=ann&tenant=acme&n=" + n)
		if got.Status != 400 || got.Header.Get("Retry-After") != "" || got.Header.Get("RateLimit") != "" ||
			got.Header.Get("RateLimit-Policy") != `"free";q=10;w=60, "perTenant";q=20;w=3600, "perSite";q=1000;w=60` {
			t.Errorf("%s: %+v", n, got)
		}
		if problem := s.Problem(got); problem["type"] != "about:blank" || problem["title"] != "Bad Request" {
			t.Errorf("%s: %v", n, problem)
		}
	}
	s.Observed()
	if got := s.Get("/?plan=unheard-of&user=ann&tenant=acme"); got.Status != 500 || s.Problem(got)["detail"] != nil { // the map returns the zero Limit
		t.Errorf("no such plan: %+v", got)
	}
	if d := s.Observed(); len(d) != 1 || !errors.Is(d[0].Err, ratelimit.ErrInvalid) || d[0].Passed {
		t.Errorf("no such plan: %+v", d)
	}
}

func TestHTTPRequestsThatAreSaidNotToBeLimitedPassUnasked(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	pool := harness.NewPool(t, 4)
	for name, requests := range map[string]func(*http.Request) ([]ratelimit.Request, error){
		"as it is": func(*http.Request) ([]ratelimit.Request, error) { return nil, httplimit.ErrNotLimited },
		"wrapped": func(*http.Request) ([]ratelimit.Request, error) {
			return nil, fmt.Errorf("health: %w", httplimit.ErrNotLimited)
		},
		"with requests, which must be ignored": func(*http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{limit.Key("ann")}, httplimit.ErrNotLimited
		},
	} {
		s := harness.NewSiteOn(t, pool, requests)
		s.Limit.Failed = func(int) bool { return true }
		s.Serve()
		for range 2 {
			got := s.Get("/health")
			if got.Status != 200 || got.Body != "hello" || got.Header.Get("RateLimit") != "" || got.Header.Get("RateLimit-Policy") != "" || len(s.Observed()) != 0 {
				t.Errorf("%s: %+v", name, got)
			}
		}
		if rows := s.World().Rows(); rows != "" {
			t.Errorf("%s: %s", name, rows)
		}
	}
}

func TestHTTPClientsBehindAProxyCannotChooseTheirAddress(t *testing.T) {
	t.Parallel()
	perIP := ratelimit.FixedWindow("perIP", 5, time.Hour, ratelimit.Start(harness.Noon))
	clients := httplimit.ClientIP{TrustedProxies: 1}
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{perIP.Key(clients.Key(r))}, nil
	}).Serve()
	// proxied sends a request as a client's proxy does. The proxy appends the client's address to what the client sent.
	proxied := func(i int, address string) int {
		lie := fmt.Sprintf("198.51.100.%d", i)
		if i%2 == 0 {
			return s.Get("/", "X-Forwarded-For", lie, "X-Forwarded-For", "garbage", "X-Forwarded-For", address).Status
		}
		return s.Get("/", "X-Forwarded-For", lie+", "+address).Status
	}
	for _, address := range []string{"203.0.113.7", "203.0.113.8", "::ffff:203.0.113.9"} {
		for i := range 8 {
			if want := map[bool]int{true: 200, false: 429}[i < 5]; proxied(i, address) != want {
				t.Errorf("request %d of %s is not %d", i, address, want)
			}
		}
	}
	for i := range 8 { // eight addresses of one customer
		if want := map[bool]int{true: 200, false: 429}[i < 5]; proxied(i, fmt.Sprintf("2001:db8:1:2::%x", i)) != want {
			t.Errorf("request %d of 2001:db8:1:2::/64 is not %d", i, want)
		}
	}
	for i := range 8 { // an invalid address counts as the proxy's
		if want := map[bool]int{true: 200, false: 429}[i < 5]; proxied(i, strings.Repeat("x", i)) != want {
			t.Errorf("request %d of nowhere is not %d", i, want)
		}
	}
	rows, _ := s.Pool.Query(t.Context(), "SELECT key FROM ratelimit.limits ORDER BY key")
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if want := []string{"127.0.0.1", "2001:db8:1:2::/64", "203.0.113.7", "203.0.113.8", "203.0.113.9"}; err != nil || !slices.Equal(keys, want) {
		t.Errorf("keys %q, want %q, %v", keys, want, err)
	}
}

// The server is behind a CDN that sets a header field; here the CDN is at 127.0.0.1. The CDN is behind its own edges.
func TestHTTPClientsBehindACDNCannotChooseTheirAddress(t *testing.T) {
	t.Parallel()
	perIP := ratelimit.FixedWindow("perIP", 5, time.Hour, ratelimit.Start(harness.Noon))
	for name, row := range map[string]struct {
		clients httplimit.ClientIP
		proxied func(lie, address string) []string // the fields that the server receives
	}{
		"networks": {
			httplimit.ClientIP{TrustedNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("192.0.2.0/24")}},
			func(lie, address string) []string {
				return []string{"X-Forwarded-For", lie, "X-Forwarded-For", address + ", 192.0.2.1", "CF-Connecting-IP", lie}
			},
		},
		"a header field": {
			httplimit.ClientIP{TrustedNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, ClientHeader: "CF-Connecting-IP"},
			func(lie, address string) []string {
				return []string{"X-Forwarded-For", lie, "CF-Connecting-IP", address}
			},
		},
		"a header field that must not be trusted": {
			httplimit.ClientIP{TrustedProxies: 1, TrustedNetworks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, ClientHeader: "CF-Connecting-IP"},
			func(lie, address string) []string { // past the CDN
				return []string{"X-Forwarded-For", lie + ", " + address, "CF-Connecting-IP", lie}
			},
		},
	} {
		s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perIP.Key(row.clients.Key(r))}, nil
		}).Serve()
		for _, address := range []string{"203.0.113.7", "::ffff:203.0.113.8", "2001:db8:1:2::3"} {
			for i := range 8 {
				want := map[bool]int{true: 200, false: 429}[i < 5]
				lie := []string{"198.51.100.1", "192.0.2.9", "127.0.0.1", "garbage", "::1", "fe80::1%x", "", "::ffff:192.0.2.9"}[i]
				if got := s.Get("/", row.proxied(lie, address)...); got.Status != want {
					t.Errorf("%s: request %d of %s, which claims %s: %d, want %d", name, i, address, lie, got.Status, want)
				}
			}
		}
		rows, _ := s.Pool.Query(t.Context(), "SELECT key FROM ratelimit.limits ORDER BY key")
		keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if want := []string{"2001:db8:1:2::/64", "203.0.113.7", "203.0.113.8"}; err != nil || !slices.Equal(keys, want) {
			t.Errorf("%s: keys %q, want %q, %v", name, keys, want, err)
		}
	}
}

// A CORS handler around the middleware: preflights cost nothing, and scripts can read the fields, even of a denial.
func TestHTTPScriptsOfOtherOriginsReadTheFields(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	s := harness.NewSite(t, harness.Always(limit.Key("ann")))
	s.Limit.ExposeFields = true
	limited := s.Limit.Handler(s)
	s.ServeHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://app.example.org")
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		w.Header().Set("Access-Control-Expose-Headers", "ETag")
		limited.ServeHTTP(w, r)
	}))
	for _, want := range []int{200, 429} {
		preflight := s.Do(http.MethodOptions, "/", "Origin", "https://app.example.org", "Access-Control-Request-Method", "GET")
		if preflight.Status != 204 || preflight.Header.Get("RateLimit") != "" {
			t.Errorf("preflight: %+v", preflight)
		}
		got := s.Get("/", "Origin", "https://app.example.org")
		exposed := got.Header.Values("Access-Control-Expose-Headers")
		if got.Status != want || !slices.Equal(exposed, []string{"ETag, RateLimit-Policy, RateLimit, Retry-After"}) || got.Header.Get("Access-Control-Allow-Origin") == "" {
			t.Errorf("%+v", got)
		}
	}
}

func TestHTTPObserveOnlyDecidesAndReportsAndLetsEverythingPass(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		q := r.URL.Query()
		if q.Has("error") {
			return nil, &httplimit.StatusError{Status: 401}
		}
		return []ratelimit.Request{limit.Key(q.Get("user")).Count(httplimit.Cost(q.Get("n"), 1))}, nil
	})
	s.Limit.ObserveOnly = true
	s.Limit.Failed = func(status int) bool { return status != 200 } // a denied request refunds nothing
	s.Handle = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("fail") {
			w.WriteHeader(http.StatusTeapot)
		}
	}
	s.Serve()
	for _, row := range []struct {
		path          string
		limit         string
		answer, would int
	}{
		{"/?user=ann&fail", `"limit";r=1;t=1800`, 418, 0},
		{"/?user=ann", `"limit";r=0;t=3600`, 200, 0}, // and is refunded
		{"/?user=ann&fail", `"limit";r=0;t=3600`, 418, 0},
		{"/?user=ann", `"limit";r=0;t=1800`, 200, 429},
		{"/?user=ann", `"limit";r=0;t=1800`, 200, 429},
		{"/?user=ann&n=3", ``, 200, 400},
		{"/?user=%00", ``, 200, 400},
		{"/?error", ``, 200, 401},
	} {
		got := s.Wants(row.path, row.answer, row.limit, "")
		d := s.Observed()
		if len(d) != 1 || d[0].Status != row.would || (d[0].Err == nil) != (row.would == 0) || !d[0].Passed {
			t.Errorf("%s: %+v, observed %+v", row.path, got, d)
		}
	}
	s.World().Holds(limit.Key("ann"), 0)
}

func TestHTTPJitterSpreadsThoseWhoWereDeniedTogether(t *testing.T) {
	t.Parallel()
	limit := ratelimit.FixedWindow("limit", 0.5, 100*time.Second, ratelimit.Capacity(1), ratelimit.Start(harness.Noon))
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{limit.Key(r.URL.Query().Get("user"))}, nil
	})
	s.Limit.Jitter = 0.5
	s.Serve()
	waits := map[string]int{}
	for i := range 60 {
		path := fmt.Sprint("/?user=", i)
		s.Get(path)
		first, second := s.Get(path), s.Get(path)
		wait := first.Header.Get("Retry-After")
		if first.Status != 429 || second.Header.Get("Retry-After") != wait || first.Header.Get("RateLimit") != `"limit";r=0;t=200` {
			t.Fatalf("%+v, %+v", first, second)
		}
		waits[wait]++
	}
	for wait, n := range waits {
		var seconds int
		if _, err := fmt.Sscan(wait, &seconds); err != nil || seconds < 200 || seconds > 300 || n > 6 {
			t.Errorf("Retry-After: %s %d times", wait, n)
		}
	}
}

// The middleware is a func(http.Handler) http.Handler, so routers can use it. Values that a router puts into the request
// are there.
func TestHTTPWorksWithRoutersAsItIs(t *testing.T) {
	t.Parallel()
	hello := func(param func(r *http.Request) string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello %s", param(r)) }
	}
	perClient := ratelimit.TokenBucket("perClient", 2, time.Minute)
	perName := ratelimit.TokenBucket("perName", 1, time.Hour)
	for name, route := range map[string]func(all, one func(http.Handler) http.Handler) http.Handler{
		"net/http": func(all, one func(http.Handler) http.Handler) http.Handler {
			mux := http.NewServeMux()
			mux.Handle("GET /hello/{name}", one(hello(func(r *http.Request) string { return r.PathValue("name") })))
			return all(mux)
		},
		"chi": func(all, one func(http.Handler) http.Handler) http.Handler {
			router := chi.NewRouter()
			router.Use(all)
			router.With(one).Get("/hello/{name}", hello(func(r *http.Request) string { return chi.URLParam(r, "name") }))
			return router
		},
		"gorilla/mux": func(all, one func(http.Handler) http.Handler) http.Handler {
			router := mux.NewRouter()
			router.Use(all)
			sub := router.PathPrefix("/hello").Subrouter()
			sub.Use(one)
			sub.HandleFunc("/{name}", hello(func(r *http.Request) string { return mux.Vars(r)["name"] })).Methods(http.MethodGet)
			return router
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{perClient.Key(httplimit.ClientIP{}.Key(r))}, nil
			})
			one := s.Limit
			one.Requests = func(r *http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{perName.Key(r.URL.Path)}, nil
			}
			s.ServeHandler(route(s.Limit.Handler, one.Handler))
			got := s.Get("/hello/ann")
			if got.Status != 200 || got.Body != "hello ann" || !slices.Equal(got.Header.Values("RateLimit"), []string{`"perClient";r=1;t=30`, `"perName";r=0;t=3600`}) ||
				len(harness.List(t, got.Header, "RateLimit-Policy")) != 2 {
				t.Errorf("%+v", got)
			}
			got = s.Get("/hello/ann")
			if got.Status != 429 || got.Header.Get("Retry-After") != "3600" || !slices.Equal(got.Header.Values("RateLimit"), []string{`"perName";r=0;t=3600`}) || !reflect.DeepEqual(s.Problem(got)["violated-policies"], []any{"perName"}) {
				t.Errorf("%+v", got)
			}
			got = s.Get("/hello/bob")
			if got.Status != 429 || got.Header.Get("Retry-After") != "30" || !reflect.DeepEqual(s.Problem(got)["violated-policies"], []any{"perClient"}) {
				t.Errorf("%+v", got)
			}
		})
	}
}

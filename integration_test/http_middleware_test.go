package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/go-chi/chi/v5"
	"github.com/gorilla/mux"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// site is a web site with the middleware before it, on a real Postgres and a real port. Its clock stands at noon.
type site struct {
	*testing.T
	pool  *pgxpool.Pool
	clock *clock
	limit httplimit.Middleware

	handle func(w http.ResponseWriter, r *http.Request) // nil: says hello
	called atomic.Int64                                 // how often the handler was
	url    string
	client *http.Client

	mu        sync.Mutex
	decisions []httplimit.Decision
}

// newSite makes a site, not yet serving.
func newSite(t *testing.T, requests func(r *http.Request) ([]ratelimit.Request, error)) *site {
	t.Helper()
	return newSiteOn(t, newPool(t, 4), requests)
}

func newSiteOn(t *testing.T, pool *pgxpool.Pool, requests func(r *http.Request) ([]ratelimit.Request, error)) *site {
	t.Helper()
	limiter, clock := newLimiter()
	s := &site{T: t, pool: pool, clock: clock}
	s.limit = httplimit.Middleware{
		Limiter: limiter, DB: s.pool, Requests: requests,
		Observer: func(_ *http.Request, d httplimit.Decision) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.decisions = append(s.decisions, d)
		},
	}
	return s
}

// always asks for the same, whatever the request.
func always(requests ...ratelimit.Request) func(*http.Request) ([]ratelimit.Request, error) {
	return func(*http.Request) ([]ratelimit.Request, error) { return requests, nil }
}

// ServeHTTP is the site's handler, behind the middleware.
func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.called.Add(1)
	if s.handle != nil {
		s.handle(w, r)
		return
	}
	_, _ = io.WriteString(w, "hello")
}

// serve begins to serve, until the end of the test.
func (s *site) serve() *site { return s.serveHandler(s.limit.Handler(s)) }

func (s *site) serveHandler(handler http.Handler) *site {
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handlers that panic
	server.Start()
	s.Cleanup(server.Close)
	s.url, s.client = server.URL, server.Client()
	return s
}

// answer is what a client got.
type answer struct {
	Status int
	Header http.Header
	Body   string
}

// get asks for a path, with header fields.
func (s *site) get(path string, header ...string) answer {
	s.Helper()
	return s.do(http.MethodGet, path, header...)
}

func (s *site) do(method, path string, header ...string) answer {
	s.Helper()
	got, err := s.try(s.Context(), method, path, header...)
	if err != nil {
		s.Fatal(err)
	}
	return got
}

func (s *site) try(ctx context.Context, method, path string, header ...string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, s.url+path, nil)
	if err != nil {
		return answer{}, err
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	response, err := s.client.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, string(body)}, err
}

// wants holds a path's answer against a status, RateLimit and Retry-After.
func (s *site) wants(path string, status int, limit, retryAfter string) answer {
	s.Helper()
	got := s.get(path)
	if got.Status != status || got.Header.Get("RateLimit") != limit || got.Header.Get("Retry-After") != retryAfter {
		s.Fatalf("%s: %d, RateLimit: %s, Retry-After: %s, %s; want %d, %s, %s; observed %+v", path,
			got.Status, got.Header.Get("RateLimit"), got.Header.Get("Retry-After"), got.Body, status, limit, retryAfter, s.observed())
	}
	return got
}

// observed returns the decisions since it was last called.
func (s *site) observed() []httplimit.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	decisions := s.decisions
	s.decisions = nil
	return decisions
}

// world is for looking at the limits from outside.
func (s *site) world() world { return world{s.T, s.pool, s.limit.Limiter, s.clock} }

// item is a member of a list, as the structured-fields library reads it.
type item struct {
	Name   string
	Params map[string]any
}

// list has a header field read by a library that knows RFC 9651, and nothing of us.
func list(t *testing.T, header http.Header, name string) []item {
	t.Helper()
	if header.Values(name) == nil {
		return nil
	}
	members, err := httpsfv.UnmarshalList(header.Values(name))
	if err != nil {
		t.Fatalf("%s: %q: %v", name, header.Values(name), err)
	}
	var items []item
	for _, member := range members {
		i, isItem := member.(httpsfv.Item)
		text, isString := i.Value.(string)
		if !isItem || !isString {
			t.Fatalf("%s: %q: %#v is no String", name, header.Values(name), member)
		}
		read := item{text, map[string]any{}}
		for _, param := range i.Params.Names() {
			read.Params[param], _ = i.Params.Get(param)
		}
		items = append(items, read)
	}
	return items
}

// problem has the body of a refusal read.
func (s *site) problem(got answer) map[string]any {
	s.Helper()
	var problem map[string]any
	if got.Header.Get("Content-Type") != "application/problem+json" || json.Unmarshal([]byte(got.Body), &problem) != nil ||
		problem["status"] != float64(got.Status) {
		s.Fatalf("no problem details: %+v", got)
	}
	return problem
}

func TestHTTPClientsAreToldWhereTheyStand(t *testing.T) {
	t.Parallel()
	handles := map[string]func(pool *pgxpool.Pool) ratelimit.DB{
		"pool": func(pool *pgxpool.Pool) ratelimit.DB { return pool },
		"coalescer": func(pool *pgxpool.Pool) ratelimit.DB {
			coalescer := &ratelimit.Coalescer{Pool: pool}
			t.Cleanup(coalescer.Close)
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
			s := newSite(t, always(burst.Key("ann")))
			s.limit.DB = handle(s.pool)
			s.serve()
			s.wants("/", 200, `"burst";r=2;t=20`, "")
			s.wants("/", 200, `"burst";r=1;t=40`, "")
			if got := s.do(http.MethodHead, "/"); got.Status != 200 || got.Header.Get("RateLimit") != `"burst";r=0;t=60` || got.Body != "" {
				t.Fatalf("HEAD: %+v", got)
			}
			got := s.wants("/", 429, `"burst";r=0;t=20`, "20")
			want := map[string]any{
				"type":  "https://iana.org/assignments/http-problem-types#quota-exceeded",
				"title": "Request cannot be satisfied as assigned quota has been exceeded", "status": 429.0,
				"violated-policies": []any{"burst"},
			}
			if problem := s.problem(got); !reflect.DeepEqual(problem, want) {
				t.Errorf("problem %v, want %v", problem, want)
			}
			if got := s.do(http.MethodHead, "/"); got.Status != 429 || got.Header.Get("Retry-After") != "20" || got.Body != "" || got.Header.Get("Content-Type") != "application/problem+json" {
				t.Fatalf("HEAD: %+v", got)
			}
			for _, header := range []http.Header{got.Header, s.do(http.MethodDelete, "/").Header} {
				if policy := list(t, header, "RateLimit-Policy"); !reflect.DeepEqual(policy, []item{{"burst", map[string]any{"q": int64(3), "w": int64(60)}}}) {
					t.Errorf("policy: %v", policy)
				}
				if limit := list(t, header, "RateLimit"); !reflect.DeepEqual(limit, []item{{"burst", map[string]any{"r": int64(0), "t": int64(20)}}}) {
					t.Errorf("limit: %v", limit)
				}
			}
			s.clock.Advance(18999999 * time.Microsecond)
			s.wants("/", 429, `"burst";r=0;t=2`, "2")
			s.clock.Advance(time.Second)
			s.wants("/", 429, `"burst";r=0;t=1`, "1") // a microsecond is a second
			s.clock.Advance(time.Second)              // as Retry-After said
			s.wants("/", 200, `"burst";r=0;t=60`, "")
			if n := s.called.Load(); n != 4 {
				t.Errorf("the handler was called %d times", n)
			}
			var statuses []int
			for _, d := range s.observed() {
				if d.Passed != (d.Err == nil) || d.Passed != (d.Status == 0) || denied(d.Err) != (d.Status == 429) || len(d.Result.Requests) != 1 {
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

// Whatever limits there are, and however they stand, a library that we did not write reads the numbers back.
func TestHTTPFieldsAreReadBackByAnotherLibrary(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	var requests []ratelimit.Request
	s := newSite(t, func(*http.Request) ([]ratelimit.Request, error) { return requests, nil })
	s.limit.LegacyFields = true
	s.limit.ObserveOnly = true // so that what can never be granted is told of, too
	s.serve()
	outcomes := map[int]int{}
	for n := range 150 {
		requests = nil
		for i := range 1 + r.IntN(3) {
			name := oneOf(r, "burst", `qu"o\te`, "café", "per%cent", "new\r\nline", "tab\t;r=1, \"x\"", "\x7f", "名前", "a b:c=?*+")
			limit := randomLimit(r, fmt.Sprint(name, n, i), oneOf(r, 1, 1, 3))
			requests = append(requests, oneOf(r, limit.Key("ann"), limit.Global()).Count(randomTokens(r, min(limit.Capacity(), 1e9))))
		}
		for range 3 { // the second time, much is denied
			s.clock.Advance(time.Duration(r.Int64N(1e9)) * time.Microsecond)
			got := s.get("/")
			d := s.observed()[0]
			outcomes[d.Status]++
			s.readBack(got, d)
		}
	}
	t.Logf("%v", outcomes)
	if min(outcomes[0], outcomes[429], outcomes[400]) < 10 {
		t.Error("this tested too little")
	}
}

// readBack holds the fields of an answer against what was decided.
func (s *site) readBack(got answer, d httplimit.Decision) {
	s.Helper()
	integer := func(v float64) int64 { return int64(math.Floor(min(max(v, 0), 999_999_999_999_999))) }
	ceil := func(d time.Duration) int64 { return int64(d/time.Second) + map[bool]int64{true: 1}[d%time.Second > 0] }
	policy, limit := list(s.T, got.Header, "RateLimit-Policy"), list(s.T, got.Header, "RateLimit")
	known := d.Err == nil || denied(d.Err)
	if n := len(d.Result.Requests); got.Status != 200 || len(policy) != n || known && len(limit) != n || !known && limit != nil {
		s.Fatalf("%+v: %d, %v, %v", d, got.Status, policy, limit)
	}
	for i, status := range d.Result.Requests {
		c := status.Limit.Config()
		wantPolicy := map[string]any{"q": integer(*c.Capacity)}
		refill := *c.Capacity * time.Duration(c.Period).Seconds() / c.Rate
		if c.Kind == ratelimit.KindFixedWindow && *c.Capacity < c.Rate {
			refill = time.Duration(c.Period).Seconds()
		}
		if refill = math.Round(refill*1e6) / 1e6; refill >= 1 {
			wantPolicy["w"] = int64(math.Ceil(refill))
		}
		name, err := url.PathUnescape(policy[i].Name)
		if err != nil || name != c.Name || !reflect.DeepEqual(policy[i].Params, wantPolicy) {
			s.Fatalf("%v: %q, %v, %v, want %v", status.Limit, name, err, policy[i].Params, wantPolicy)
		}
		if !known {
			continue
		}
		wantLimit := map[string]any{"r": integer(status.Remaining)}
		switch {
		case !status.OK:
			wantLimit["t"] = ceil(status.RetryAt.Sub(d.Result.At))
		case d.Result.OK:
			wantLimit["t"] = ceil(status.ResetAt.Sub(d.Result.At))
		}
		if limit[i].Name != policy[i].Name || !reflect.DeepEqual(limit[i].Params, wantLimit) {
			s.Fatalf("%+v: %v, want %v", status, limit[i], wantLimit)
		}
	}
	if legacy := got.Header.Get("X-RateLimit-Remaining"); (legacy != "") != known || legacy != got.Header.Get("RateLimit-Remaining") {
		s.Fatalf("%+v: %v", d, got.Header)
	}
}

func TestHTTPPartitionKeysAreBytesThatTellNothing(t *testing.T) {
	t.Parallel()
	perUser := ratelimit.TokenBucket("perUser", 10, time.Minute)
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{perUser.Key(r.URL.Query().Get("user"))}, nil
	})
	s.limit.PartitionSecret = []byte("a secret of this test")
	s.serve()
	seen := map[string]string{}
	for _, user := range []string{"ann@example.org", "bob@example.org", "ann@example.org"} {
		got := s.get("/?user=" + url.QueryEscape(user))
		policy, limit := list(t, got.Header, "RateLimit-Policy"), list(t, got.Header, "RateLimit")
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

// User, tenant and site in one call; the limit by the plan, the cost by a header field or a parameter.
func TestHTTPSeveralLimitsAreChosenAndPricedByTheRequest(t *testing.T) {
	t.Parallel()
	plans := map[string]ratelimit.Limit{
		"free": ratelimit.TokenBucket("free", 10, time.Minute),
		"pro":  ratelimit.TokenBucket("pro", 100, time.Minute),
	}
	perTenant := ratelimit.FixedWindow("perTenant", 20, time.Hour, ratelimit.Start(noon))
	perSite := ratelimit.TokenBucket("perSite", 1000, time.Minute)
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		q := r.URL.Query()
		cost := httplimit.Cost(r.Header.Get("X-Cost"), httplimit.Cost(q.Get("n"), 1))
		return []ratelimit.Request{
			plans[q.Get("plan")].Key(q.Get("user")).Count(cost), perTenant.Key(q.Get("tenant")).Count(cost), perSite.Global().Count(cost),
		}, nil
	}).serve()

	s.wants("/?plan=free&user=ann&tenant=acme", 200, `"free";r=9;t=6, "perTenant";r=19;t=3600, "perSite";r=999;t=1`, "")
	s.wants("/?plan=pro&user=bob&tenant=acme&n=2.5", 200, `"pro";r=97;t=2, "perTenant";r=16;t=3600, "perSite";r=996;t=1`, "")
	for _, nonsense := range []string{"NaN", "-5", "Inf", "lots", "%00"} {
		before := s.world().balance(perTenant.Key("other"))
		if got := s.get("/?plan=pro&user=eve&tenant=other&n=" + nonsense); got.Status != 200 {
			t.Fatalf("%s: %+v", nonsense, got)
		}
		s.world().holds(perTenant.Key("other"), before-1)
	}
	if got := s.get("/?plan=pro&user=eve&tenant=other&n=1", "X-Cost", "5"); got.Status != 200 {
		t.Fatalf("%+v", got)
	}
	s.world().holds(perTenant.Key("other"), 10)

	// The tenant has 16.5 left: bob would have enough, but is taken nothing from.
	got := s.wants("/?plan=pro&user=bob&tenant=acme&n=17", 429, `"pro";r=97, "perTenant";r=16;t=3600, "perSite";r=986`, "3600")
	if problem := s.problem(got); !reflect.DeepEqual(problem["violated-policies"], []any{"perTenant"}) {
		t.Errorf("%v", problem)
	}
	s.world().holds(plans["pro"].Key("bob"), 97.5)
	s.wants("/?plan=pro&user=bob&tenant=acme&n=10", 200, `"pro";r=87;t=8, "perTenant";r=6;t=3600, "perSite";r=976;t=2`, "")
	got = s.wants("/?plan=free&user=ann&tenant=acme&n=9.5", 429, `"free";r=9;t=3, "perTenant";r=6;t=3600, "perSite";r=976`, "3600")
	if problem := s.problem(got); !reflect.DeepEqual(problem["violated-policies"], []any{"free", "perTenant"}) {
		t.Errorf("%v", problem)
	}

	// What can never be granted is the client's error, and waiting does not help.
	for _, n := range []string{"10.5", "1e15", "1e16", "1e300"} {
		got = s.get("/?plan=free&user=ann&tenant=acme&n=" + n)
		if got.Status != 400 || got.Header.Get("Retry-After") != "" || got.Header.Get("RateLimit") != "" ||
			got.Header.Get("RateLimit-Policy") != `"free";q=10;w=60, "perTenant";q=20;w=3600, "perSite";q=1000;w=60` {
			t.Errorf("%s: %+v", n, got)
		}
		if problem := s.problem(got); problem["type"] != "about:blank" || problem["title"] != "Bad Request" {
			t.Errorf("%s: %v", n, problem)
		}
	}
	s.observed()
	if got := s.get("/?plan=unheard-of&user=ann&tenant=acme"); got.Status != 500 || s.problem(got)["detail"] != nil { // the zero Limit: the map's fault
		t.Errorf("no such plan: %+v", got)
	}
	if d := s.observed(); len(d) != 1 || !errors.Is(d[0].Err, ratelimit.ErrInvalid) || d[0].Passed {
		t.Errorf("no such plan: %+v", d)
	}
}

func TestHTTPRequestsThatAreSaidNotToBeLimitedPassUnasked(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	pool := newPool(t, 4)
	for name, requests := range map[string]func(*http.Request) ([]ratelimit.Request, error){
		"as it is": func(*http.Request) ([]ratelimit.Request, error) { return nil, httplimit.ErrNotLimited },
		"wrapped": func(*http.Request) ([]ratelimit.Request, error) {
			return nil, fmt.Errorf("health: %w", httplimit.ErrNotLimited)
		},
		"with requests, which are not looked at": func(*http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{limit.Key("ann")}, httplimit.ErrNotLimited
		},
	} {
		s := newSiteOn(t, pool, requests)
		s.limit.Failed = func(int) bool { return true }
		s.serve()
		for range 2 {
			got := s.get("/health")
			if got.Status != 200 || got.Body != "hello" || got.Header.Get("RateLimit") != "" || got.Header.Get("RateLimit-Policy") != "" || len(s.observed()) != 0 {
				t.Errorf("%s: %+v", name, got)
			}
		}
		if rows := s.world().rows(); rows != "" {
			t.Errorf("%s: %s", name, rows)
		}
	}
}

func TestHTTPClientsBehindAProxyCannotChooseTheirAddress(t *testing.T) {
	t.Parallel()
	perIP := ratelimit.FixedWindow("perIP", 5, time.Hour, ratelimit.Start(noon))
	clients := httplimit.ClientIP{TrustedProxies: 1}
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{perIP.Key(clients.Key(r))}, nil
	}).serve()
	// proxied sends as the proxy of a client at that address does, which appends to what the client wrote.
	proxied := func(i int, address string) int {
		lie := fmt.Sprintf("198.51.100.%d", i)
		if i%2 == 0 {
			return s.get("/", "X-Forwarded-For", lie, "X-Forwarded-For", "garbage", "X-Forwarded-For", address).Status
		}
		return s.get("/", "X-Forwarded-For", lie+", "+address).Status
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
	for i := range 8 { // what is no address counts for the proxy
		if want := map[bool]int{true: 200, false: 429}[i < 5]; proxied(i, strings.Repeat("x", i)) != want {
			t.Errorf("request %d of nowhere is not %d", i, want)
		}
	}
	rows, _ := s.pool.Query(t.Context(), "SELECT key FROM rate_limits ORDER BY key")
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if want := []string{"127.0.0.1", "2001:db8:1:2::/64", "203.0.113.7", "203.0.113.8", "203.0.113.9"}; err != nil || !slices.Equal(keys, want) {
		t.Errorf("keys %q, want %q, %v", keys, want, err)
	}
}

func TestHTTPAHostileKeyIsTheClientsErrorAndNeverAGrant(t *testing.T) {
	t.Parallel()
	perUser := ratelimit.TokenBucket("perUser", 10, time.Minute)
	for _, coalesced := range []bool{false, true} {
		s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perUser.Key(r.URL.Query().Get("user"))}, nil
		})
		s.limit.FailOpen = true // it is not the database's fault
		if coalesced {
			coalescer := &ratelimit.Coalescer{Pool: s.pool}
			t.Cleanup(coalescer.Close)
			s.limit.DB = coalescer
		}
		s.serve()
		for _, user := range []string{"", "%00", "ann%00", "%ff", "%c3%28", strings.Repeat("a", 1025), strings.Repeat("%7c", 600)} {
			got := s.get("/?user=" + user)
			if got.Status != 400 || got.Header.Get("Retry-After") != "" || got.Header.Get("RateLimit") != "" {
				t.Errorf("%.20q: %+v", user, got)
			}
			s.problem(got)
		}
		for _, user := range []string{"';drop table rate_limits;--", "|", `\`, "\r\nX: y", strings.Repeat("a", 1024), "名前"} {
			if got := s.get("/?user=" + url.QueryEscape(user)); got.Status != 200 {
				t.Errorf("%.20q: %+v", user, got)
			}
		}
		if n := s.called.Load(); n != 6 {
			t.Errorf("the handler was called %d times", n)
		}
	}
}

// What this server does not store, though others would: it answers, so no key of a client's choice makes it pass.
func TestHTTPAKeyThatTheServerDoesNotStoreIsTheClientsErrorAndNeverAGrant(t *testing.T) {
	t.Parallel()
	perUser := ratelimit.TokenBucket("perUser", 1, time.Minute)
	for constraint, state := range map[string]string{
		"convert_to(key, 'LATIN1') IS NOT NULL": "22P05", // as a database whose encoding is that
		"key <> '日本'":                           "23514",
	} {
		s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perUser.Key(r.URL.Query().Get("user"))}, nil
		})
		s.limit.FailOpen = true
		if _, err := s.pool.Exec(t.Context(), "ALTER TABLE rate_limits ADD CHECK ("+constraint+")"); err != nil {
			t.Fatal(err)
		}
		s.serve()
		got := s.get("/?user=" + url.QueryEscape("日本"))
		if d := s.observed(); got.Status != 400 || got.Header.Get("Retry-After") != "" || len(d) != 1 || sqlState(d[0].Err) != state || d[0].Passed || s.called.Load() != 0 {
			t.Errorf("%s: %+v, %+v", constraint, got, d)
		}
		s.problem(got)
		s.wants("/?user=ann", 200, `"perUser";r=0;t=60`, "")
	}
}

func TestHTTPTheServersMistakesAre500AndNeverAGrant(t *testing.T) {
	t.Parallel()
	good := ratelimit.TokenBucket("good", 10, time.Minute)
	pool := newPool(t, 4)
	for name, breakIt := range map[string]func(m *httplimit.Middleware){
		"no limiter":       func(m *httplimit.Middleware) { m.Limiter = nil },
		"no database":      func(m *httplimit.Middleware) { m.DB = nil },
		"no requests":      func(m *httplimit.Middleware) { m.Requests = nil },
		"nothing asked":    func(m *httplimit.Middleware) { m.Requests = always() },
		"an empty list":    func(m *httplimit.Middleware) { m.Requests = always([]ratelimit.Request{}...) },
		"the zero limit":   func(m *httplimit.Middleware) { m.Requests = always(ratelimit.Limit{}.Key("ann")) },
		"the zero request": func(m *httplimit.Middleware) { m.Requests = always(good.Key("ann"), ratelimit.Request{}) },
		"a limit that is none": func(m *httplimit.Middleware) {
			m.Requests = always(ratelimit.TokenBucket("x", -1, time.Minute).Key("ann"))
		},
		"two limits with one name": func(m *httplimit.Middleware) {
			m.Requests = always(good.Key("ann"), ratelimit.TokenBucket("good", 9, time.Minute).Key("ann"))
		},
		"two definitions of one name": func(m *httplimit.Middleware) {
			m.Requests = always(good.Key("ann"), ratelimit.TokenBucket("good", 10, time.Hour).Key("bob"))
		},
		"a name that was defined otherwise": func(m *httplimit.Middleware) {
			if _, err := m.Limiter.Consume(t.Context(), pool, ratelimit.TokenBucket("good", 10, time.Hour).Key("bob")); err != nil {
				t.Error(err)
			}
		},
		"a Coalescer without a pool": func(m *httplimit.Middleware) { m.DB = &ratelimit.Coalescer{} },
		"an error": func(m *httplimit.Middleware) {
			m.Requests = func(*http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{good.Key("ann")}, errors.New("password of the database: hunter2")
			}
		},
		"a status that is none": func(m *httplimit.Middleware) {
			m.Requests = func(*http.Request) ([]ratelimit.Request, error) { return nil, &httplimit.StatusError{Status: 200} }
		},
	} {
		s := newSiteOn(t, pool, always(good.Key("ann")))
		s.limit.FailOpen = true
		breakIt(&s.limit)
		s.serve()
		got := s.get("/")
		s.problem(got)
		if d := s.observed(); got.Status != 500 || strings.Contains(got.Body, "hunter2") || len(d) != 1 || d[0].Err == nil || d[0].Status != 500 || d[0].Passed || s.called.Load() != 0 {
			t.Errorf("%s: %+v, %+v", name, got, d)
		}
	}
}

func TestHTTPRequestsAreRefusedWithAStatusOfTheCallersChoice(t *testing.T) {
	t.Parallel()
	perKey := ratelimit.TokenBucket("perKey", 10, time.Minute)
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		if r.URL.Path == "/gone" {
			return nil, fmt.Errorf("wrapped: %w", &httplimit.StatusError{Status: 410})
		}
		key, err := httplimit.APIKey(r, "X-API-Key")
		if err != nil {
			return nil, err
		}
		return []ratelimit.Request{perKey.Key(key)}, nil
	}).serve()
	got := s.get("/")
	if problem := s.problem(got); got.Status != 401 || problem["title"] != "Unauthorized" || problem["detail"] != "The header field X-Api-Key is missing." {
		t.Errorf("no key: %+v", got)
	}
	if got := s.get("/", "X-API-Key", "one", "X-API-Key", "another"); got.Status != 400 || s.problem(got)["detail"] != "The header field X-Api-Key occurs more than once, with different values." {
		t.Errorf("two keys: %+v", got)
	}
	if got := s.get("/gone"); got.Status != 410 || s.problem(got)["detail"] != nil {
		t.Errorf("gone: %+v", got)
	}
	for range 2 {
		if got := s.get("/", "X-API-Key", strings.Repeat("s3cret", 1000)); got.Status != 200 {
			t.Errorf("a key: %+v", got)
		}
	}
	if rows := s.world().rows(); strings.Contains(rows, "s3cret") || strings.Count(rows, "\n") != 0 {
		t.Errorf("stored: %s", rows)
	}
}

// Parallel guesses never exceed the limit, successes cost nothing.
func TestHTTPOfParallelGuessesNoMoreThanTheLimitAreTried(t *testing.T) {
	t.Parallel()
	const limit, guesses = 5, 60
	failures := ratelimit.TokenBucket("failedLogins", limit, time.Hour)
	for _, coalesced := range []bool{false, true} {
		s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{failures.Key(r.URL.Query().Get("user"))}, nil
		})
		if coalesced {
			coalescer := &ratelimit.Coalescer{Pool: s.pool}
			t.Cleanup(coalescer.Close)
			s.limit.DB = coalescer
		}
		var wrong atomic.Int64
		s.limit.Failed = func(status int) bool { return status == http.StatusUnauthorized }
		s.handle = func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Query().Get("password") != "right" {
				wrong.Add(1)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			_, _ = io.WriteString(w, "welcome")
		}
		s.serve()

		// Many successes, one after another and at once, leave the limit full.
		for range 2 * limit {
			if got := s.get("/?user=ann&password=right"); got.Status != 200 || got.Body != "welcome" {
				t.Fatalf("%+v", got)
			}
		}
		s.world().holds(failures.Key("ann"), limit)
		statuses := s.inParallel(limit, func(int) string { return "/?user=ann&password=right" })
		if statuses[200] != limit {
			t.Fatalf("as many at once as the limit allows: %v", statuses)
		}
		s.world().holds(failures.Key("ann"), limit)

		statuses = s.inParallel(guesses, func(i int) string { return fmt.Sprint("/?user=ann&password=", i) })
		if statuses[401] != limit || statuses[429] != guesses-limit || wrong.Load() != limit {
			t.Errorf("guesses: %v, %d tried", statuses, wrong.Load())
		}
		if got := s.get("/?user=ann&password=right"); got.Status != 429 {
			t.Errorf("then the right one: %+v", got)
		}

		// Right and wrong ones together: the wrong ones are never more than the limit, and it is they that are gone.
		wrong.Store(0)
		statuses = s.inParallel(guesses, func(i int) string {
			return "/?user=bob&password=" + map[bool]string{true: "right", false: "wrong"}[i%3 == 0]
		})
		if n := wrong.Load(); n > limit || int64(statuses[401]) != n {
			t.Errorf("a mixture: %v, %d tried", statuses, n)
		}
		s.world().holds(failures.Key("bob"), limit-float64(wrong.Load()))
	}
}

// Where transactions are SERIALIZABLE unless they say otherwise, those that want one row fail all but one. That is no failure of
// the database: such a request is neither refused nor, with FailOpen, let through, and a refund is not lost.
func TestHTTPWhatCouldNotBeSerializedIsRunAgain(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	for _, open := range []bool{false, true} {
		pool := reconfigured(t, newPool(t, 8), func(c *pgxpool.Config) {
			startWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
		})
		s := newSiteOn(t, pool, always(limit.Key("ann")))
		var conflicts atomic.Int64
		s.limit.Limiter.Observer = func(_ context.Context, d ratelimit.Decision) {
			if sqlState(d.Err) == "40001" {
				conflicts.Add(1)
			}
		}
		s.limit.FailOpen = open
		s.limit.Failed = func(status int) bool { return status == http.StatusNotFound }
		found, goOn := make(chan struct{}), make(chan struct{})
		s.handle = func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/found" {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			close(found)
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		}
		s.serve()
		s.get("/") // so that there is a row
		conflicts.Store(0)

		tx := s.hold(limit.Key("ann").Count(5)) // of 10, 4 are left
		var replies []func() (answer, error)
		for range 5 { // the pool has 8
			replies = append(replies, s.send(t.Context(), "/"))
		}
		s.waitsFor(tx)
		s.world().do(tx.Commit(t.Context()))
		statuses := map[int]int{}
		for _, reply := range replies {
			got, err := reply()
			if err != nil {
				t.Error(err)
			}
			statuses[got.Status]++
		}
		if statuses[404] != 4 || statuses[429] != 1 || s.called.Load() != 5 || conflicts.Load() == 0 {
			t.Errorf("%v, the handler was called %d times, %d conflicts", statuses, s.called.Load(), conflicts.Load())
		}

		s.world().do(s.limit.Limiter.Reset(t.Context(), pool, limit.Key("ann")))
		s.get("/")
		conflicts.Store(0)
		s.observed()
		reply := s.send(t.Context(), "/found")
		select {
		case <-found:
		case <-time.After(10 * time.Second):
			t.Fatal("the handler was not called")
		}
		tx = s.hold(limit.Key("ann"))
		close(goOn)
		s.waitsFor(tx)
		s.world().do(tx.Commit(t.Context()))
		if got, err := reply(); err != nil || got.Status != 200 || conflicts.Load() == 0 {
			t.Errorf("%+v, %v, %d conflicts", got, err, conflicts.Load())
		}
		if d := s.observed(); len(d) != 1 {
			t.Errorf("the refund: %+v", d)
		}
		s.world().holds(limit.Key("ann"), 8)
	}
}

// inParallel sends n requests at once and counts the statuses.
func (s *site) inParallel(n int, path func(i int) string) map[int]int {
	s.Helper()
	statuses := map[int]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			got, err := s.try(s.Context(), http.MethodGet, path(i))
			if err != nil {
				s.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			statuses[got.Status]++
		})
	}
	close(start)
	wg.Wait()
	return statuses
}

func TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 10, time.Hour)
	clientGone := make(chan struct{})
	pool := newPool(t, 4)
	for name, row := range map[string]struct {
		handle func(w http.ResponseWriter, r *http.Request)
		leave  bool // the client goes while the handler runs
		counts bool
	}{
		"nothing is 200":  {func(http.ResponseWriter, *http.Request) {}, false, false},
		"a 401":           {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, false, true},
		"a flushed 200":   {func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() }, false, false},
		"a panic":         {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, false, true},
		"a panic, at 200": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK); panic("late") }, false, true},
		"a success that its client did not wait for": {func(w http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
			w.WriteHeader(http.StatusOK)
		}, true, false},
		"a failure that its client did not wait for": {func(w http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
			w.WriteHeader(http.StatusUnauthorized)
		}, true, true},
		"a handler that gave up with its client": {func(_ http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
		}, true, true},
	} {
		s := newSiteOn(t, pool, always(failures.Key(name).Count(2)))
		s.limit.Failed = func(status int) bool { return status == http.StatusUnauthorized }
		finished := make(chan struct{})
		s.handle = row.handle
		handler := s.limit.Handler(s)
		s.serveHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer close(finished)
			handler.ServeHTTP(w, r)
		}))
		ctx, leave := context.WithCancel(t.Context())
		if row.leave {
			go func() { <-clientGone; leave() }()
		}
		_, _ = s.try(ctx, http.MethodGet, "/")
		leave()
		<-finished
		s.world().holds(failures.Key(name), map[bool]float64{true: 8, false: 10}[row.counts])
		if d := s.observed(); len(d) != 1 || d[0].Err != nil {
			t.Errorf("%s: observed %+v", name, d)
		}
	}
}

func TestHTTPARefundBelongsToTheWindowOfItsConsumption(t *testing.T) {
	t.Parallel()
	failures := ratelimit.FixedWindow("failures", 10, time.Hour, ratelimit.Start(noon))
	s := newSite(t, always(failures.Key("ann")))
	s.limit.Failed = func(status int) bool { return status >= 400 }
	s.handle = func(http.ResponseWriter, *http.Request) {
		s.clock.Advance(time.Hour)
		if _, err := s.limit.Limiter.Consume(t.Context(), s.pool, failures.Key("ann").Count(3)); err != nil {
			t.Error(err)
		}
	}
	s.serve().get("/")
	s.world().holds(failures.Key("ann"), 7)
}

func TestHTTPARefundThatFailsIsObservedAndTheTokensStayTaken(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 10, time.Hour)
	s := newSite(t, always(failures.Key("ann")))
	cut := newCut(t, s.pool)
	s.limit.DB = cut.pool
	s.limit.Failed = func(int) bool { return false }
	s.handle = func(http.ResponseWriter, *http.Request) { cut.off(false) }
	if got := s.serve().get("/"); got.Status != 200 {
		t.Errorf("%+v", got)
	}
	d := s.observed()
	if len(d) != 2 || d[0].Err != nil || d[1].Err == nil || d[1].Status != 0 || !d[1].Passed || !strings.Contains(d[1].Err.Error(), "refund") {
		t.Errorf("%+v", d)
	}
	s.world().holds(failures.Key("ann"), 9)
}

// cut is a pool whose network can fail: its connections break, and new ones are refused, or nobody answers.
type cut struct {
	pool *pgxpool.Pool
	mu   sync.Mutex
	dead func(ctx context.Context) error // nil: it works
	open []net.Conn
}

func newCut(t *testing.T, like *pgxpool.Pool) *cut {
	t.Helper()
	c := &cut{}
	config := like.Config()
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c.mu.Lock()
		dead := c.dead
		c.mu.Unlock()
		if dead != nil {
			return nil, dead(ctx)
		}
		conn, err := dial(ctx, network, addr)
		if err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.open = append(c.open, conn)
		}
		return conn, err
	}
	var err error
	if c.pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.pool.Close)
	return c
}

// off breaks it. The function that is returned mends it.
func (c *cut) off(nobodyAnswers bool) (on func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	mended := make(chan struct{})
	c.dead = func(ctx context.Context) error {
		if nobodyAnswers {
			select {
			case <-ctx.Done():
			case <-mended:
			}
		}
		return errors.New("no connection to the database")
	}
	for _, conn := range c.open {
		_ = conn.Close()
	}
	c.open = nil
	return func() {
		close(mended)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dead = nil
	}
}

func TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	for _, row := range []struct {
		name           string
		open, observe  bool
		hang, coalesce bool
		status         int
	}{
		{"closed", false, false, false, false, 503},
		{"closed, coalesced", false, false, false, true, 503},
		{"closed, nobody answers", false, false, true, false, 503},
		{"open", true, false, false, false, 200},
		{"open, coalesced", true, false, false, true, 200},
		{"open, nobody answers", true, false, true, true, 200},
		{"observing", false, true, false, false, 200},
		{"observing, nobody answers", false, true, true, false, 200},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, always(limit.Key("ann")))
			cut := newCut(t, s.pool)
			s.limit.DB = cut.pool
			if row.coalesce {
				coalescer := &ratelimit.Coalescer{Pool: cut.pool}
				t.Cleanup(coalescer.Close)
				s.limit.DB = coalescer
			}
			s.limit.FailOpen, s.limit.ObserveOnly = row.open, row.observe
			s.serve()
			s.wants("/", 200, `"limit";r=1;t=1800`, "")
			s.observed()

			on := cut.off(row.hang)
			s.limit.Timeout = 200 * time.Millisecond
			down := &site{T: t, limit: s.limit}
			down.serve()
			for range 3 {
				begin := time.Now()
				got := down.get("/")
				d := s.observed()
				if got.Status != row.status || got.Header.Get("RateLimit-Policy") != `"limit";q=2;w=3600` || got.Header.Get("RateLimit") != "" || got.Header.Get("Retry-After") != "" {
					t.Errorf("%+v", got)
				}
				if len(d) != 1 || d[0].Err == nil || d[0].Status != 503 || d[0].Passed != (row.status == 200) {
					t.Errorf("observed %+v", d)
				}
				if row.status == 503 && (s.problem(got)["title"] != "Service Unavailable" || strings.Contains(got.Body, "connection")) {
					t.Errorf("%s", got.Body)
				}
				if took := time.Since(begin); took > 10*time.Second {
					t.Errorf("took %v", took)
				}
			}
			if want := map[bool]int64{true: 3}[row.status == 200]; down.called.Load() != want {
				t.Errorf("the handler was called %d times", down.called.Load())
			}

			on()
			s.wants("/", 200, `"limit";r=0;t=3600`, "")
			if got := s.get("/"); (got.Status == 429) == row.observe {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A row that a transaction holds has the statement wait: then it is killed, takes too long, or its client goes.
func TestHTTPAStatementThatIsKilledUnderItGrantsNothing(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	for _, open := range []bool{false, true} {
		s := newSite(t, always(limit.Key("ann")))
		s.limit.FailOpen = open
		s.serve()
		s.get("/")
		tx := s.hold(limit.Key("ann"))
		s.observed()
		want := map[bool]int{true: 200, false: 503}[open]
		called := s.called.Load()

		reply := s.send(t.Context(), "/")
		if _, err := s.pool.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, s.waitsFor(tx)); err != nil {
			t.Fatal(err)
		}
		got, err := reply()
		if d := s.observed(); err != nil || got.Status != want || len(d) != 1 || d[0].Status != 503 || d[0].Passed != open {
			t.Errorf("killed: %+v, %v, %+v", got, err, d)
		}

		s.limit.Timeout = 100 * time.Millisecond
		impatient := &site{T: t, limit: s.limit}
		got = impatient.serve().get("/")
		if d := s.observed(); got.Status != want || len(d) != 1 || d[0].Status != 503 || !errors.Is(d[0].Err, context.DeadlineExceeded) || d[0].Passed != open {
			t.Errorf("too slow: %+v, %+v", got, d)
		}

		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		reply = s.send(ctx, "/")
		s.waitsFor(tx)
		leave()
		if _, err := reply(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		var d []httplimit.Decision
		for deadline := time.Now().Add(10 * time.Second); len(d) == 0 && time.Now().Before(deadline); d = s.observed() {
			time.Sleep(time.Millisecond)
		}
		if len(d) != 1 || d[0].Status != 499 || d[0].Passed || !errors.Is(d[0].Err, context.Canceled) {
			t.Errorf("the client is gone, which is no fault of the database: %+v", d)
		}
		if n := s.called.Load() - called; n != int64(map[bool]int{true: 1}[open]) {
			t.Errorf("the handler was called %d times", n)
		}
		s.nothingWaitsFor(tx) // else it may still be granted
		s.world().do(tx.Rollback(t.Context()))
		s.world().holds(limit.Key("ann"), 1)
	}
}

// hold has a transaction hold the rows of a grant: until it ends, and no longer than the test, whose site is closed after it.
func (s *site) hold(requests ...ratelimit.Request) pgx.Tx {
	s.Helper()
	tx, err := s.pool.Begin(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := s.limit.Limiter.Consume(s.Context(), tx, requests...); err != nil {
		s.Fatal(err)
	}
	return tx
}

// send sends a request. The function that is returned waits for the answer.
func (s *site) send(ctx context.Context, path string) (reply func() (answer, error)) {
	var got answer
	var err error
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		got, err = s.try(ctx, http.MethodGet, path)
	}()
	return func() (answer, error) {
		<-answered
		return got, err
	}
}

// waitsFor waits until a statement waits for a transaction, and returns its backend's process.
func (s *site) waitsFor(tx pgx.Tx) (pid int) {
	s.Helper()
	return s.waiting(tx, true)
}

// nothingWaitsFor waits until none does: the server may yet have to hear that it is not waited for any more.
func (s *site) nothingWaitsFor(tx pgx.Tx) {
	s.Helper()
	s.waiting(tx, false)
}

func (s *site) waiting(tx pgx.Tx, want bool) (pid int) {
	s.Helper()
	blocker := serverPID(s.T, tx)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := s.pool.QueryRow(s.Context(), `SELECT pid FROM pg_stat_activity WHERE pg_blocking_pids(pid) @> ARRAY[$1::int]`, blocker).Scan(&pid)
		waits, failed := err == nil, err != nil && !errors.Is(err, pgx.ErrNoRows)
		if waits == want && !failed {
			return pid
		}
		if failed || time.Now().After(deadline) {
			s.Fatalf("something waits: %v, want %v; %v", waits, want, err)
		}
	}
}

func TestHTTPObserveOnlyDecidesAndReportsAndLetsEverythingPass(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		q := r.URL.Query()
		if q.Has("error") {
			return nil, &httplimit.StatusError{Status: 401}
		}
		return []ratelimit.Request{limit.Key(q.Get("user")).Count(httplimit.Cost(q.Get("n"), 1))}, nil
	})
	s.limit.ObserveOnly = true
	s.limit.Failed = func(status int) bool { return status != 200 } // of which those that are denied give nothing back
	s.handle = func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("fail") {
			w.WriteHeader(http.StatusTeapot)
		}
	}
	s.serve()
	for _, row := range []struct {
		path          string
		limit         string
		answer, would int
	}{
		{"/?user=ann&fail", `"limit";r=1;t=1800`, 418, 0},
		{"/?user=ann", `"limit";r=0;t=3600`, 200, 0}, // and gives it back
		{"/?user=ann&fail", `"limit";r=0;t=3600`, 418, 0},
		{"/?user=ann", `"limit";r=0;t=1800`, 200, 429},
		{"/?user=ann", `"limit";r=0;t=1800`, 200, 429},
		{"/?user=ann&n=3", ``, 200, 400},
		{"/?user=%00", ``, 200, 400},
		{"/?error", ``, 200, 401},
	} {
		got := s.wants(row.path, row.answer, row.limit, "")
		d := s.observed()
		if len(d) != 1 || d[0].Status != row.would || (d[0].Err == nil) != (row.would == 0) || !d[0].Passed {
			t.Errorf("%s: %+v, observed %+v", row.path, got, d)
		}
	}
	s.world().holds(limit.Key("ann"), 0)
}

func TestHTTPTheUsersOwnHandlerMayRefuse(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 1, time.Minute)
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{limit.Key("ann").Count(httplimit.Cost(r.URL.Query().Get("n"), 1))}, nil
	})
	s.limit.Refused = func(w http.ResponseWriter, _ *http.Request, d httplimit.Decision) {
		if exceeded, ok := errors.AsType[*ratelimit.DeniedError](d.Err); ok {
			http.Error(w, fmt.Sprintf("come back in %v", exceeded.RetryAfter), http.StatusServiceUnavailable) // not what it would have been
			return
		}
		http.Error(w, "no", d.Status)
	}
	s.serve().get("/")
	if got := s.wants("/", 503, `"limit";r=0;t=60`, "60"); got.Body != "come back in 1m0s\n" || !strings.HasPrefix(got.Header.Get("Content-Type"), "text/plain") {
		t.Errorf("%+v", got)
	}
	if got := s.wants("/?n=2", 400, ``, ""); got.Body != "no\n" {
		t.Errorf("%+v", got)
	}
}

func TestHTTPJitterSpreadsThoseWhoWereDeniedTogether(t *testing.T) {
	t.Parallel()
	limit := ratelimit.FixedWindow("limit", 0.5, 100*time.Second, ratelimit.Capacity(1), ratelimit.Start(noon))
	s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{limit.Key(r.URL.Query().Get("user"))}, nil
	})
	s.limit.Jitter = 0.5
	s.serve()
	waits := map[string]int{}
	for i := range 60 {
		path := fmt.Sprint("/?user=", i)
		s.get(path)
		first, second := s.get(path), s.get(path)
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

// As it is: the middleware is a func(http.Handler) http.Handler, and what routers put into the request is there.
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
			s := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{perClient.Key(httplimit.ClientIP{}.Key(r))}, nil
			})
			one := s.limit
			one.Requests = func(r *http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{perName.Key(r.URL.Path)}, nil
			}
			s.serveHandler(route(s.limit.Handler, one.Handler))
			got := s.get("/hello/ann")
			if got.Status != 200 || got.Body != "hello ann" || !slices.Equal(got.Header.Values("RateLimit"), []string{`"perClient";r=1;t=30`, `"perName";r=0;t=3600`}) ||
				len(list(t, got.Header, "RateLimit-Policy")) != 2 {
				t.Errorf("%+v", got)
			}
			got = s.get("/hello/ann")
			if got.Status != 429 || got.Header.Get("Retry-After") != "3600" || !slices.Equal(got.Header.Values("RateLimit"), []string{`"perName";r=0;t=3600`}) || !reflect.DeepEqual(s.problem(got)["violated-policies"], []any{"perName"}) {
				t.Errorf("%+v", got)
			}
			got = s.get("/hello/bob")
			if got.Status != 429 || got.Header.Get("Retry-After") != "30" || !reflect.DeepEqual(s.problem(got)["violated-policies"], []any{"perClient"}) {
				t.Errorf("%+v", got)
			}
		})
	}
}

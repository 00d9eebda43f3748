package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// site is a web site behind the middleware, on a real Postgres and a real port. Its clock stands at noon.
type site struct {
	*testing.T
	pool  *pgxpool.Pool
	clock *clock
	limit httplimit.Middleware

	handle func(w http.ResponseWriter, r *http.Request) // nil: says hello
	called atomic.Int64                                 // calls of the handler
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

// always returns a function that asks for the same requests, whatever the HTTP request.
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

// serve starts serving. It stops at the end of the test.
func (s *site) serve() *site { return s.serveHandler(s.limit.Handler(s)) }

func (s *site) serveHandler(handler http.Handler) *site {
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handlers that panic
	server.Start()
	s.Cleanup(server.Close)
	s.url, s.client = server.URL, server.Client()
	return s
}

// answer is the response that a client received.
type answer struct {
	Status int
	Header http.Header
	Body   string
}

// get sends a GET request for a path, with header fields.
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

// wants compares the response for a path with a status, RateLimit and Retry-After.
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

// world returns a world for reading the limits without the middleware.
func (s *site) world() world { return world{s.T, s.pool, s.limit.Limiter, s.clock} }

// item is a member of a list, as the structured-fields library reads it.
type item struct {
	Name   string
	Params map[string]any
}

// list parses a header field with a library for RFC 9651 that is not ours.
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

// problem parses the body of a refusal.
func (s *site) problem(got answer) map[string]any {
	s.Helper()
	var problem map[string]any
	if got.Header.Get("Content-Type") != "application/problem+json" || json.Unmarshal([]byte(got.Body), &problem) != nil ||
		problem["status"] != float64(got.Status) {
		s.Fatalf("no problem details: %+v", got)
	}
	return problem
}

// readBack compares the fields of a response with the decision.
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
		refill := *c.Capacity * period(c).Seconds() / *c.Rate
		if c.Kind == "fixed window" && *c.Capacity < *c.Rate {
			refill = period(c).Seconds()
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

// hold makes a transaction hold the rows of a grant. It ends with the test at the latest, before the site is closed.
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

// send sends a request. The returned function waits for the response.
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

// waitsFor waits until a statement waits for a transaction, and returns the pid of its backend.
func (s *site) waitsFor(tx pgx.Tx) (pid int) {
	s.Helper()
	return s.waiting(tx, true)
}

// nothingWaitsFor waits until no statement waits for the transaction. The server may notice a cancellation a little later.
func (s *site) nothingWaitsFor(tx pgx.Tx) {
	s.Helper()
	s.waiting(tx, false)
}

func (s *site) waiting(tx pgx.Tx, want bool) (pid int) {
	s.Helper()
	blocker := serverPID(s.T, tx)
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
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

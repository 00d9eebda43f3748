package harness

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// Site is a web site behind the middleware, on a real Postgres and a real port. Its clock stands at noon.
type Site struct {
	*testing.T
	Pool  *pgxpool.Pool
	Clock *Clock
	Limit httplimit.Middleware

	Handle func(w http.ResponseWriter, r *http.Request) // nil: says hello
	Called atomic.Int64                                 // calls of the handler
	URL    string
	Client *http.Client

	mu        sync.Mutex
	decisions []httplimit.Decision
}

// NewSite makes a site, not yet serving.
func NewSite(t *testing.T, requests func(r *http.Request) ([]ratelimit.Request, error)) *Site {
	t.Helper()
	return NewSiteOn(t, NewPool(t, 4), requests)
}

// NewSiteOn is NewSite on a pool.
func NewSiteOn(t *testing.T, pool *pgxpool.Pool, requests func(r *http.Request) ([]ratelimit.Request, error)) *Site {
	t.Helper()
	limiter, clock := NewLimiter()
	s := &Site{T: t, Pool: pool, Clock: clock}
	s.Limit = httplimit.Middleware{
		Limiter: limiter, DB: s.Pool, Requests: requests,
		Observer: func(_ *http.Request, d httplimit.Decision) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.decisions = append(s.decisions, d)
		},
	}
	return s
}

// Always returns a function that asks for the same requests, whatever the HTTP request.
func Always(requests ...ratelimit.Request) func(*http.Request) ([]ratelimit.Request, error) {
	return func(*http.Request) ([]ratelimit.Request, error) { return requests, nil }
}

// ServeHTTP is the site's handler, behind the middleware.
func (s *Site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.Called.Add(1)
	if s.Handle != nil {
		s.Handle(w, r)
		return
	}
	_, _ = io.WriteString(w, "hello")
}

// Serve starts serving. It stops at the end of the test.
func (s *Site) Serve() *Site { return s.ServeHandler(s.Limit.Handler(s)) }

// ServeHandler is Serve with the middleware around something else.
func (s *Site) ServeHandler(handler http.Handler) *Site {
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handlers that panic
	server.Start()
	s.Cleanup(server.Close)
	s.URL, s.Client = server.URL, server.Client()
	return s
}

// Answer is the response that a client received.
type Answer struct {
	Status int
	Header http.Header
	Body   string
}

// Get sends a GET request for a path, with header fields.
func (s *Site) Get(path string, header ...string) Answer {
	s.Helper()
	return s.Do(http.MethodGet, path, header...)
}

// Do sends a request with another method.
func (s *Site) Do(method, path string, header ...string) Answer {
	s.Helper()
	got, err := s.Try(s.Context(), method, path, header...)
	if err != nil {
		s.Fatal(err)
	}
	return got
}

// Try is Do where the request may fail.
func (s *Site) Try(ctx context.Context, method, path string, header ...string) (Answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, s.URL+path, nil)
	if err != nil {
		return Answer{}, err
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	response, err := s.Client.Do(r)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return Answer{response.StatusCode, response.Header, string(body)}, err
}

// Wants compares the response for a path with a status, RateLimit and Retry-After.
func (s *Site) Wants(path string, status int, limit, retryAfter string) Answer {
	s.Helper()
	got := s.Get(path)
	if got.Status != status || got.Header.Get("RateLimit") != limit || got.Header.Get("Retry-After") != retryAfter {
		s.Fatalf("%s: %d, RateLimit: %s, Retry-After: %s, %s; want %d, %s, %s; observed %+v", path,
			got.Status, got.Header.Get("RateLimit"), got.Header.Get("Retry-After"), got.Body, status, limit, retryAfter, s.Observed())
	}
	return got
}

// Observed returns the decisions since it was last called.
func (s *Site) Observed() []httplimit.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	decisions := s.decisions
	s.decisions = nil
	return decisions
}

// World returns a world for reading the limits without the middleware.
func (s *Site) World() World { return World{s.T, s.Pool, s.Limit.Limiter, s.Clock} }

// Item is a member of a list, as the structured-fields library reads it.
type Item struct {
	Name   string
	Params map[string]any
}

// List parses a header field with a library for RFC 9651 that is not ours.
func List(t *testing.T, header http.Header, name string) []Item {
	t.Helper()
	if header.Values(name) == nil {
		return nil
	}
	members, err := httpsfv.UnmarshalList(header.Values(name))
	if err != nil {
		t.Fatalf("%s: %q: %v", name, header.Values(name), err)
	}
	var items []Item
	for _, member := range members {
		i, isItem := member.(httpsfv.Item)
		text, isString := i.Value.(string)
		if !isItem || !isString {
			t.Fatalf("%s: %q: %#v is no String", name, header.Values(name), member)
		}
		read := Item{text, map[string]any{}}
		for _, param := range i.Params.Names() {
			read.Params[param], _ = i.Params.Get(param)
		}
		items = append(items, read)
	}
	return items
}

// Problem parses the body of a refusal.
func (s *Site) Problem(got Answer) map[string]any {
	s.Helper()
	var problem map[string]any
	if got.Header.Get("Content-Type") != "application/problem+json" || json.Unmarshal([]byte(got.Body), &problem) != nil ||
		problem["status"] != float64(got.Status) {
		s.Fatalf("no problem details: %+v", got)
	}
	return problem
}

// ReadBack compares the fields of a response with the decision.
func (s *Site) ReadBack(got Answer, d httplimit.Decision) {
	s.Helper()
	integer := func(v float64) int64 { return int64(math.Floor(min(max(v, 0), 999_999_999_999_999))) }
	ceil := func(d time.Duration) int64 { return int64(d/time.Second) + map[bool]int64{true: 1}[d%time.Second > 0] }
	policy, limit := List(s.T, got.Header, "RateLimit-Policy"), List(s.T, got.Header, "RateLimit")
	known := d.Err == nil || Denied(d.Err)
	if n := len(d.Result.Requests); got.Status != 200 || len(policy) != n || known && len(limit) != n || !known && limit != nil {
		s.Fatalf("%+v: %d, %v, %v", d, got.Status, policy, limit)
	}
	for i, status := range d.Result.Requests {
		c := status.Limit.Config()
		wantPolicy := map[string]any{"q": integer(*c.Capacity)}
		refill := *c.Capacity * Period(c).Seconds() / *c.Rate
		if c.Kind == "fixed window" && *c.Capacity < *c.Rate {
			refill = Period(c).Seconds()
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

// InParallel sends n requests at once and counts the statuses.
func (s *Site) InParallel(n int, path func(i int) string) map[int]int {
	s.Helper()
	statuses := map[int]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			got, err := s.Try(s.Context(), http.MethodGet, path(i))
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

// Hold makes a transaction hold the rows of a grant. It ends with the test at the latest, before the site is closed.
func (s *Site) Hold(requests ...ratelimit.Request) pgx.Tx {
	s.Helper()
	tx, err := s.Pool.Begin(s.Context())
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := s.Limit.Limiter.Consume(s.Context(), tx, requests...); err != nil {
		s.Fatal(err)
	}
	return tx
}

// Send sends a request. The returned function waits for the response.
func (s *Site) Send(ctx context.Context, path string) (reply func() (Answer, error)) {
	var got Answer
	var err error
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		got, err = s.Try(ctx, http.MethodGet, path)
	}()
	return func() (Answer, error) {
		<-answered
		return got, err
	}
}

// WaitsFor waits until a statement waits for a transaction, and returns the pid of its backend.
func (s *Site) WaitsFor(tx pgx.Tx) (pid int) {
	s.Helper()
	return s.waiting(tx, true)
}

// NothingWaitsFor waits until no statement waits for the transaction. The server may notice a cancellation a little later.
func (s *Site) NothingWaitsFor(tx pgx.Tx) {
	s.Helper()
	s.waiting(tx, false)
}

func (s *Site) waiting(tx pgx.Tx, want bool) (pid int) {
	s.Helper()
	blocker := ServerPID(s.T, tx)
	for deadline := time.Now().Add(Patience); ; time.Sleep(5 * time.Millisecond) {
		err := s.Pool.QueryRow(s.Context(), `SELECT pid FROM pg_stat_activity WHERE pg_blocking_pids(pid) @> ARRAY[$1::int]`, blocker).Scan(&pid)
		waits, failed := err == nil, err != nil && !errors.Is(err, pgx.ErrNoRows)
		if waits == want && !failed {
			return pid
		}
		if failed || time.Now().After(deadline) {
			s.Fatalf("something waits: %v, want %v; %v", waits, want, err)
		}
	}
}

// The methods of the limited service. Say answers with the words that it receives, Chat with those of each message.
const (
	MethodSay  = "/txlimit.test.Echo/Say"
	MethodChat = "/txlimit.test.Echo/Chat"
)

// Cut is a pool whose network can fail: its connections break, and new ones are refused or never answered.
type Cut struct {
	Pool *pgxpool.Pool
	mu   sync.Mutex
	dead func(ctx context.Context) error // nil: it works
	open []net.Conn
}

// NewCut makes a pool like another one, whose connections can be cut.
func NewCut(t *testing.T, like *pgxpool.Pool) *Cut {
	t.Helper()
	c := &Cut{}
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
	if c.Pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Pool.Close)
	return c
}

// Off breaks the network. The returned function repairs it.
func (c *Cut) Off(nobodyAnswers bool) (on func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	mended := make(chan struct{})
	c.dead = func(ctx context.Context) error {
		if nobodyAnswers {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-mended:
			}
		}
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
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

// InFlight has requests run until they are let go.
type InFlight struct {
	Begun chan context.Context
	End   chan struct{}
}

// NewInFlight makes a handler of no request yet.
func NewInFlight() *InFlight { return &InFlight{make(chan context.Context), make(chan struct{})} }

// Run waits for its end, or its context's.
func (f *InFlight) Run(ctx context.Context) {
	f.Begun <- ctx
	select {
	case <-f.End:
	case <-ctx.Done():
	}
}

package integration_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// load is how long the load test runs.
var load = flag.Duration("load", 3*time.Second, "how long the load test of httplimit lasts, at least")

// tally has the counts of one side.
type tally struct{ ok, denied, other atomic.Int64 }

func (c *tally) count(status int) {
	switch status {
	case http.StatusOK:
		c.ok.Add(1)
	case http.StatusTooManyRequests:
		c.denied.Add(1)
	default:
		c.other.Add(1)
	}
}

func (c *tally) String() string {
	return fmt.Sprintf("%d granted, %d denied, %d others", c.ok.Load(), c.denied.Load(), c.other.Load())
}

// TestHTTPUnderLoad lets 50 clients send three times the requests that the limit grants to a real server. In one run they
// come back when Retry-After says, in the other at any time. Each side counts. -load sets the duration.
func TestHTTPUnderLoad(t *testing.T) {
	for name, polite := range map[string]bool{"who honour Retry-After": true, "who do not": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			underLoad(t, polite)
		})
	}
}

func underLoad(t *testing.T, polite bool) {
	const clients, rate, capacity = 50, 100, 20
	limit := ratelimit.TokenBucket("site", rate, time.Second, ratelimit.Capacity(capacity))
	s := newSite(t, always(limit.Global()))
	coalescer := &ratelimit.Coalescer{Pool: s.pool}
	t.Cleanup(coalescer.Close)
	s.limit.Limiter, s.limit.DB = &ratelimit.Limiter{}, coalescer // on the database's clock
	s.serve()
	s.client.Transport.(*http.Transport).MaxIdleConnsPerHost = clients

	r := newRand(t)
	ctx, stop := context.WithTimeout(t.Context(), *load+time.Minute)
	defer stop()
	begin := time.Now()
	var client tally
	var waits, grantedAfterwards atomic.Int64
	enough := func() bool { // a busy machine takes longer
		return client.ok.Load() >= 3*capacity && client.denied.Load() > 0 && (!polite || grantedAfterwards.Load() > 0)
	}
	var wg sync.WaitGroup
	for range clients {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			// Three times the rate in total, at random instants. A client that waits for Retry-After does not catch up.
			pace := int64(clients * time.Second / (3 * rate))
			waited := false
			for wait := time.Duration(r.Int64N(pace)); sleep(ctx, wait); wait = time.Duration(r.Int64N(2 * pace)) {
				got, err := s.try(t.Context(), http.MethodGet, "/")
				if err != nil {
					t.Error(err)
					return
				}
				client.count(got.Status)
				seconds := consistent(t, got, capacity)
				if waited && got.Status == http.StatusOK {
					grantedAfterwards.Add(1)
				}
				if time.Since(begin) >= *load && enough() {
					stop()
				}
				if waited = polite && got.Status == http.StatusTooManyRequests; waited {
					waits.Add(1)
					if !sleep(ctx, time.Duration(seconds)*time.Second) {
						return
					}
				}
			}
		})
	}
	wg.Wait()

	var server tally
	var first, last time.Time // on the database's clock
	for _, d := range s.observed() {
		server.count(map[bool]int{true: http.StatusOK, false: d.Status}[d.Err == nil])
		if at := d.Result.At; first.IsZero() || at.Before(first) {
			first = at
		}
		if at := d.Result.At; at.After(last) {
			last = at
		}
	}
	bound := capacity + rate*last.Sub(first).Seconds()
	t.Logf("in %v:\n  the server counted %v, and called the handler %d times; the limit allows %.1f\n  the clients counted %v; they waited %d times, and were granted %d times when they came back",
		last.Sub(first).Round(time.Millisecond), &server, s.called.Load(), bound, &client, waits.Load(), grantedAfterwards.Load())
	granted := server.ok.Load()
	if float64(granted) > bound {
		t.Errorf("%d granted, the limit allows %.1f", granted, bound)
	}
	if granted != client.ok.Load() || server.denied.Load() != client.denied.Load() || server.other.Load()+client.other.Load() != 0 || s.called.Load() != granted {
		t.Error("the sides counted differently")
	}
	if !enough() {
		t.Error("this tested too little")
	}
}

// consistent compares the fields of a response with each other, and returns Retry-After.
func consistent(t *testing.T, got answer, capacity int64) (retryAfter int64) {
	limit := list(t, got.Header, "RateLimit")
	if len(limit) != 1 || got.Header.Get("RateLimit-Policy") == "" {
		t.Errorf("%+v", got)
		return 1
	}
	remaining, isInt := limit[0].Params["r"].(int64)
	reset, _ := limit[0].Params["t"].(int64)
	retryAfter, err := strconv.ParseInt(got.Header.Get("Retry-After"), 10, 64)
	switch {
	case !isInt || remaining < 0 || remaining >= capacity: // a token was taken, or none was left
		t.Errorf("%d: %v", got.Status, limit)
	case got.Status == http.StatusOK && got.Header.Values("Retry-After") != nil:
		t.Errorf("granted, with Retry-After: %d", retryAfter)
	case got.Status == http.StatusTooManyRequests && (err != nil || remaining != 0 || retryAfter < reset):
		t.Errorf("denied: %v, Retry-After: %q", limit, got.Header.Get("Retry-After"))
	}
	return max(retryAfter, 1)
}

// sleep waits, unless ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// What the middleware adds to a request, beside the commit of one row. Slices of 10 requests take turns. On a machine that does other work,
// the fastest slice says more than the median. Each commit waits for the disk.
//
//	go test ./integration_test -run '^$' -bench Middleware -benchtime 300x
func BenchmarkMiddleware(b *testing.B) {
	pool := newPool(b, 4)
	for _, sql := range []string{"CREATE TABLE counters (id bigint PRIMARY KEY, n bigint NOT NULL)", "INSERT INTO counters VALUES (1, 0)"} {
		if _, err := pool.Exec(b.Context(), sql); err != nil {
			b.Fatal(err)
		}
	}
	key := func(*http.Request) string { return "ann" }
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	limited := func(limit ratelimit.Limit) http.Handler {
		return (&httplimit.Middleware{Limiter: &ratelimit.Limiter{}, DB: pool, Requests: httplimit.By(limit, key)}).Handler(handler)
	}
	ways := []struct {
		name    string
		handler http.Handler
		status  int
		took    []time.Duration
	}{
		{name: "nothing", handler: handler, status: http.StatusOK},
		{name: "update", status: http.StatusOK, handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, err := pool.Exec(r.Context(), "UPDATE counters SET n = n + 1 WHERE id = $1", 1); err != nil {
				b.Error(err)
			}
			handler(w, r)
		})},
		{name: "granted", handler: limited(ratelimit.TokenBucket("site", 1e9, time.Second)), status: http.StatusOK},
		{name: "denied", handler: limited(ratelimit.TokenBucket("denies", 1, 1000*time.Hour)), status: http.StatusTooManyRequests},
	}
	serve := func(h http.Handler) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/", nil))
		return w.Code
	}
	for _, way := range ways {
		serve(way.handler) // which prepares, and takes what the denied one has
	}
	const slice = 10
	for b.Loop() {
		for i := range ways {
			began := time.Now()
			for range slice {
				if status := serve(ways[i].handler); status != ways[i].status {
					b.Fatalf("%s: status %d", ways[i].name, status)
				}
			}
			ways[i].took = append(ways[i].took, time.Since(began)/slice)
		}
	}
	for _, way := range ways {
		slices.Sort(way.took)
		b.ReportMetric(float64(way.took[0].Nanoseconds())/1000, "µs-"+way.name)
		b.ReportMetric(float64(way.took[len(way.took)/2].Nanoseconds())/1000, "µs-"+way.name+"-median")
	}
}

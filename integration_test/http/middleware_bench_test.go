package http_test

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// What the middleware adds to a request, beside the commit of one row. Slices of 10 requests take turns. On a machine that does other work,
// the fastest slice says more than the median. Each commit waits for the disk.
//
//	go test ./integration_test -run '^$' -bench Middleware -benchtime 300x
func BenchmarkMiddleware(b *testing.B) {
	pool := harness.NewPool(b, 4)
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

package integration_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
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

package http_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// Each request takes an estimate of 10 of 100 tokens, and one of 100 calls.
func TestHTTPTheCostIsWhatTheHandlerSays(t *testing.T) {
	t.Parallel()
	tokens := ratelimit.TokenBucket("tokens", 100, time.Hour)
	calls := ratelimit.FixedWindow("calls", 100, time.Hour, ratelimit.Start(harness.Noon))
	pool := harness.NewPool(t, 4)
	clientGone := make(chan struct{})
	say := func(t *testing.T, r *http.Request, cost float64) {
		if err := httplimit.SetCost(r.Context(), tokens, cost); err != nil {
			t.Error(err)
		}
	}
	for name, row := range map[string]struct {
		handle        func(t *testing.T, w http.ResponseWriter, r *http.Request)
		leave         bool // the client leaves while the handler runs
		tokens, calls float64
	}{
		"nothing is said": {func(*testing.T, http.ResponseWriter, *http.Request) {}, false, 90, 99},
		"more":            {func(t *testing.T, _ http.ResponseWriter, r *http.Request) { say(t, r, 25) }, false, 75, 99},
		"more than there is": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			say(t, r, 130)
		}, false, -30, 99},
		"less":             {func(t *testing.T, _ http.ResponseWriter, r *http.Request) { say(t, r, 2.5) }, false, 97.5, 99},
		"nothing was used": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) { say(t, r, 0) }, false, 100, 99},
		"the estimate":     {func(t *testing.T, _ http.ResponseWriter, r *http.Request) { say(t, r, 10) }, false, 90, 99},
		"more and more, as it streams": {func(t *testing.T, w http.ResponseWriter, r *http.Request) {
			for i := range 5 {
				_, _ = io.WriteString(w, "word ")
				w.(http.Flusher).Flush() // the server's own writer
				say(t, r, float64(i))
			}
		}, false, 96, 99},
		"two limits, one for more and one for less": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			say(t, r, 4)
			if err := httplimit.SetCost(r.Context(), calls, 3); err != nil {
				t.Error(err)
			}
		}, false, 96, 97},
		"less, and then a panic": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			say(t, r, 4)
			panic(http.ErrAbortHandler)
		}, false, 96, 99},
		"more, and then a panic": {func(t *testing.T, w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusOK)
			say(t, r, 40)
			panic("late")
		}, false, 60, 99},
		"a panic, and nothing is said": {func(*testing.T, http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, false, 90, 99},
		"more, when the client has gone": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
			say(t, r, 30)
		}, true, 70, 99},
		"less, when the client has gone": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
			say(t, r, 3)
		}, true, 97, 99},
		"by several goroutines": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			var parts sync.WaitGroup
			for range 8 {
				parts.Go(func() { say(t, r, 7) })
			}
			parts.Wait()
		}, false, 93, 99},
	} {
		for _, coalesced := range []bool{false, true} {
			key := fmt.Sprint(name, coalesced)
			s := harness.NewSiteOn(t, pool, harness.Always(calls.Key(key), tokens.Key(key).Count(10)))
			if coalesced {
				coalescer := &ratelimit.Coalescer{Pool: s.Pool}
				t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
				s.Limit.DB = coalescer
			}
			s.Limit.Settle = true
			finished := make(chan struct{})
			s.Handle = func(w http.ResponseWriter, r *http.Request) { row.handle(t, w, r) }
			handler := s.Limit.Handler(s)
			s.ServeHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer close(finished)
				handler.ServeHTTP(w, r)
			}))
			ctx, leave := context.WithCancel(t.Context())
			if row.leave {
				go func() { <-clientGone; leave() }()
			}
			got, err := s.Try(ctx, http.MethodGet, "/")
			leave()
			<-finished
			if err == nil && got.Header.Get("RateLimit") != `"calls";r=99;t=3600, "tokens";r=90;t=360` {
				t.Errorf("%s: %+v", key, got)
			}
			s.World().Holds(tokens.Key(key), row.tokens)
			s.World().Holds(calls.Key(key), row.calls)
			if d := s.Observed(); len(d) != 1 || d[0].Err != nil {
				t.Errorf("%s: observed %+v", key, d)
			}
		}
	}
}

// A program closes its limits although a request still runs: the server's Shutdown had not enough time.
func TestHTTPTheCostIsSettledAfterClose(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	for name, row := range map[string]struct{ cost, left float64 }{"more": {130, -30}, "less": {4, 96}} {
		for _, coalesced := range []bool{false, true} {
			o := harness.Opening(pool)
			o.NoSweep = true
			limits, err := ratelimit.Open(t.Context(), pool, o)
			if err != nil {
				t.Fatal(err)
			}
			request := harness.OpenedBucket.Key(fmt.Sprint(name, coalesced))
			coalescer := &ratelimit.Coalescer{Pool: pool}
			var settled []httplimit.Decision
			limit := httplimit.Middleware{Limiter: limits, DB: pool, Requests: harness.Always(request.Count(10)), Settle: true,
				Observer: func(_ *http.Request, d httplimit.Decision) { settled = append(settled, d) },
			}
			if coalesced {
				limit.DB = coalescer
			}
			handler := limit.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				harness.CloseCoalescer(t, coalescer)
				harness.CloseLimiter(t, limits)
				if err := httplimit.SetCost(r.Context(), harness.OpenedBucket, row.cost); err != nil {
					t.Error(err)
				}
			}))
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
			if left := harness.ReadBalance(t, new(ratelimit.Limiter), pool, request); left < row.left || left > row.left+1 {
				t.Errorf("%s, coalesced %v: %v left, want %v", name, coalesced, left, row.left)
			}
			if len(settled) != 1 || settled[0].Err != nil {
				t.Errorf("%s, coalesced %v: observed %+v", name, coalesced, settled)
			}
		}
	}
}

func TestHTTPACostAboveTheEstimateIsOwed(t *testing.T) {
	t.Parallel()
	tokens := ratelimit.TokenBucket("tokens", 3600, time.Hour, ratelimit.Capacity(100))
	s := harness.NewSite(t, harness.Always(tokens.Key("ann").Count(10)))
	s.Limit.Settle = true
	s.Handle = func(_ http.ResponseWriter, r *http.Request) {
		if err := httplimit.SetCost(r.Context(), tokens, 150); err != nil {
			t.Error(err)
		}
	}
	s.Serve()
	s.Wants("/", 200, `"tokens";r=90;t=10`, "")
	s.Wants("/", 429, `"tokens";r=0;t=60`, "60") // a debt of 50, and a count of 10
	s.Clock.Advance(60*time.Second - time.Microsecond)
	s.Wants("/", 429, `"tokens";r=9;t=1`, "1")
	s.Clock.Advance(time.Microsecond)
	s.Wants("/", 200, `"tokens";r=0;t=100`, "")
}

// However many requests run at once, the tokens gone in the end are their exact cost.
func TestHTTPManyCostsAtOnceAddUp(t *testing.T) {
	t.Parallel()
	const clients, each = 8, 10
	for _, coalesced := range []bool{false, true} {
		r := harness.NewRand(t)
		bucket := ratelimit.TokenBucket("bucket", 1e6, time.Hour)
		window := ratelimit.FixedWindow("window", 1e6, time.Hour, ratelimit.Start(harness.Noon))
		costs := map[string]float64{}
		total := 0.0
		for i := range clients * each {
			cost := float64(r.IntN(200))
			costs[fmt.Sprint("/", i)] = cost
			total += cost
		}
		s := harness.NewSite(t, harness.Always(bucket.Key("ann").Count(60), bucket.Key("ann").Count(40), window.Global().Count(100)))
		if coalesced {
			coalescer := &ratelimit.Coalescer{Pool: s.Pool}
			t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
			s.Limit.DB = coalescer
		}
		s.Limit.Settle, s.Limit.Timeout = true, 5*time.Minute // no machine is too slow
		s.Handle = func(_ http.ResponseWriter, r *http.Request) {
			cost := costs[r.URL.Path]
			if err := errors.Join(httplimit.SetCost(r.Context(), bucket, cost), httplimit.SetCost(r.Context(), window, 2*cost)); err != nil {
				t.Error(err)
			}
			if int(cost)%7 == 0 {
				panic(http.ErrAbortHandler)
			}
		}
		s.Serve()
		var sending sync.WaitGroup
		for client := range clients {
			sending.Go(func() {
				for i := range each {
					_, _ = s.Try(t.Context(), http.MethodPost, fmt.Sprint("/", client*each+i)) // some handlers panic
				}
			})
		}
		sending.Wait()
		want := [2]float64{1e6 - total, 1e6 - 2*total}
		var left [2]float64
		harness.Eventually(t, fmt.Sprint("the balance is ", want), func() bool { // an aborted client may get its error before the settlement
			left = [2]float64{s.World().Balance(bucket.Key("ann")), s.World().Balance(window.Global())}
			return left == want
		})
		if left != want {
			t.Errorf("coalesced %v: %v are left, want %v", coalesced, left, want)
		}
	}
}

// The database fails while the handler runs. Both settlements fail and are observed, and the taken tokens stay taken.
func TestHTTPACostThatCannotBeSettledIsObservedAndTheEstimateStays(t *testing.T) {
	t.Parallel()
	more := ratelimit.TokenBucket("more", 100, time.Hour)
	less := ratelimit.TokenBucket("less", 100, time.Hour)
	s := harness.NewSite(t, harness.Always(more.Key("ann").Count(10), less.Key("ann").Count(10)))
	cut := harness.NewCut(t, s.Pool)
	s.Limit.DB = cut.Pool
	s.Limit.Settle = true
	s.Limit.FailOpen = true
	s.Handle = func(_ http.ResponseWriter, r *http.Request) {
		s.World().Do(errors.Join(httplimit.SetCost(r.Context(), more, 50), httplimit.SetCost(r.Context(), less, 5)))
		cut.Off(false)
	}
	if got := s.Serve().Get("/"); got.Status != 200 {
		t.Errorf("%+v", got)
	}
	d := s.Observed()
	if len(d) != 3 || d[0].Err != nil {
		t.Fatalf("observed %+v", d)
	}
	for i, verb := range []string{"charge", "refund"} {
		if d := d[i+1]; d.Err == nil || d.Status != 0 || !d.Passed || !strings.Contains(d.Err.Error(), verb) {
			t.Errorf("observed %+v", d)
		}
	}
	s.World().Holds(more.Key("ann"), 90)
	s.World().Holds(less.Key("ann"), 90)
}

// A charge that waits for a locked row takes no longer than the timeout. The refund of another limit has its own timeout.
func TestHTTPACostIsNotWaitedForForEver(t *testing.T) {
	t.Parallel()
	more := ratelimit.TokenBucket("more", 100, time.Hour)
	less := ratelimit.TokenBucket("less", 100, time.Hour)
	s := harness.NewSite(t, harness.Always(more.Key("ann").Count(10), less.Key("ann").Count(10)))
	s.Limit.Settle = true
	s.Handle = func(_ http.ResponseWriter, r *http.Request) {
		s.World().Do(errors.Join(httplimit.SetCost(r.Context(), more, 50), httplimit.SetCost(r.Context(), less, 5)))
		s.Hold(more.Key("ann"))
	}
	if got := s.Serve().Get("/"); got.Status != 200 {
		t.Errorf("%+v", got)
	}
	d := s.Observed()
	if len(d) != 2 || d[0].Err != nil || !errors.Is(d[1].Err, context.DeadlineExceeded) || !strings.Contains(d[1].Err.Error(), "charge") {
		t.Fatalf("observed %+v", d)
	}
	s.World().Holds(more.Key("ann"), 90)
	s.World().Holds(less.Key("ann"), 95)
}

func TestHTTPACostThatMakesNoSenseIsAnErrorAndTheEstimateStays(t *testing.T) {
	t.Parallel()
	tokens := ratelimit.TokenBucket("tokens", 100, time.Hour)
	other := ratelimit.TokenBucket("other", 100, time.Hour)
	var requests []ratelimit.Request
	var unlimited error
	s := harness.NewSite(t, func(*http.Request) ([]ratelimit.Request, error) { return requests, unlimited })
	requests = []ratelimit.Request{tokens.Key("ann").Count(10), tokens.Key("bob").Count(20)}
	s.Limit.Settle = true
	var ctx context.Context
	invalid := func(ctx context.Context, limit ratelimit.Limit, cost float64, why string) {
		t.Helper()
		if err := httplimit.SetCost(ctx, limit, cost); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), limit.Name()) {
			t.Errorf("%v of %v: %v", cost, limit.Name(), err)
		}
	}
	s.Handle = func(_ http.ResponseWriter, r *http.Request) {
		ctx = r.Context()
		for _, cost := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 1.1e15} {
			invalid(ctx, tokens, cost, "is not between 0 and 1e+15")
		}
		invalid(ctx, other, 5, "did not ask for this limit")
		invalid(ctx, ratelimit.Limit{}, 5, "did not ask for this limit")
		invalid(t.Context(), tokens, 5, "no Middleware with Settle")
	}
	s.Serve().Get("/")
	invalid(ctx, tokens, 5, "has returned")
	s.World().Holds(tokens.Key("ann"), 90)
	s.World().Holds(tokens.Key("bob"), 80)

	// A difference of less than any valid count is no difference.
	requests = []ratelimit.Request{tokens.Key("eve").Count(0.3)}
	for _, cost := range []float64{math.Nextafter(0.3, 0), math.Nextafter(0.3, 1)} {
		s.Handle = func(_ http.ResponseWriter, r *http.Request) {
			s.World().Do(httplimit.SetCost(r.Context(), tokens, cost))
		}
		s.Get("/")
	}
	if d := s.Observed(); len(d) != 3 || d[1].Err != nil || d[2].Err != nil {
		t.Errorf("observed %+v", d)
	}

	// Each key of a limit pays the cost.
	requests = []ratelimit.Request{tokens.Key("ann").Count(10), tokens.Key("bob").Count(20)}
	s.Handle = func(_ http.ResponseWriter, r *http.Request) { s.World().Do(httplimit.SetCost(r.Context(), tokens, 15)) }
	s.Get("/")
	s.World().Holds(tokens.Key("ann"), 75)
	s.World().Holds(tokens.Key("bob"), 65)

	// A request that took nothing has nothing to settle: no error, and no charge.
	s.Handle = func(_ http.ResponseWriter, r *http.Request) {
		s.World().Do(httplimit.SetCost(r.Context(), tokens, 50))
	}
	s.Limit.ObserveOnly = true
	observing := &harness.Site{T: t, Limit: s.Limit}
	observing.Handle = s.Handle
	observing.ServeHandler(s.Limit.Handler(observing))
	requests = []ratelimit.Request{tokens.Key("ann").Count(99)}
	observing.Get("/")
	unlimited = httplimit.ErrNotLimited
	observing.Get("/")
	if n := observing.Called.Load(); n != 2 {
		t.Errorf("the handler was called %d times", n)
	}
	s.World().Holds(tokens.Key("ann"), 75)
	for _, d := range s.Observed() {
		if d.Err != nil && d.Status != 429 {
			t.Errorf("observed %+v", d)
		}
	}
}

func TestHTTPACostIsForTheMiddlewareThatAskedForTheLimit(t *testing.T) {
	t.Parallel()
	outer := ratelimit.TokenBucket("outer", 100, time.Hour)
	inner := ratelimit.TokenBucket("inner", 100, time.Hour)
	s := harness.NewSite(t, harness.Always(outer.Key("ann").Count(10)))
	s.Limit.Settle = true
	within := s.Limit
	var limited error
	within.Requests = func(*http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{inner.Key("ann").Count(10)}, limited
	}
	s.Handle = func(_ http.ResponseWriter, r *http.Request) {
		s.World().Do(httplimit.SetCost(r.Context(), outer, 1))
		s.World().Do(httplimit.SetCost(r.Context(), inner, 30))
	}
	s.ServeHandler(s.Limit.Handler(within.Handler(s)))
	s.Get("/")
	s.World().Holds(outer.Key("ann"), 99)
	s.World().Holds(inner.Key("ann"), 70)
	limited = httplimit.ErrNotLimited
	s.Get("/")
	s.World().Holds(outer.Key("ann"), 98)
	s.World().Holds(inner.Key("ann"), 70)
}

// A limit on failures of different cost. A success costs nothing, whatever cost the handler has set.
func TestHTTPACostOfASuccessIsNothingIfOnlyFailuresCount(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 100, time.Hour)
	s := harness.NewSite(t, harness.Always(failures.Key("ann").Count(10)))
	s.Limit.Settle = true
	s.Limit.Failed = func(status int) bool { return status == http.StatusUnauthorized }
	s.Handle = func(w http.ResponseWriter, r *http.Request) {
		s.World().Do(httplimit.SetCost(r.Context(), failures, 15))
		if r.URL.Path == "/wrong" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}
	s.Serve().Get("/right")
	s.World().Holds(failures.Key("ann"), 100)
	s.Get("/wrong")
	s.World().Holds(failures.Key("ann"), 85)
}

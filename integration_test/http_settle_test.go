package integration_test

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

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// Each request takes an estimate of 10 of 100 tokens, and one of 100 calls.
func TestHTTPTheCostIsWhatTheHandlerSays(t *testing.T) {
	t.Parallel()
	tokens := ratelimit.TokenBucket("tokens", 100, time.Hour)
	calls := ratelimit.FixedWindow("calls", 100, time.Hour, ratelimit.Start(noon))
	pool := newPool(t, 4)
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
			s := newSiteOn(t, pool, always(calls.Key(key), tokens.Key(key).Count(10)))
			if coalesced {
				coalescer := &ratelimit.Coalescer{Pool: s.pool}
				t.Cleanup(func() { closeCoalescer(t, coalescer) })
				s.limit.DB = coalescer
			}
			s.limit.Settle = true
			finished := make(chan struct{})
			s.handle = func(w http.ResponseWriter, r *http.Request) { row.handle(t, w, r) }
			handler := s.limit.Handler(s)
			s.serveHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer close(finished)
				handler.ServeHTTP(w, r)
			}))
			ctx, leave := context.WithCancel(t.Context())
			if row.leave {
				go func() { <-clientGone; leave() }()
			}
			got, err := s.try(ctx, http.MethodGet, "/")
			leave()
			<-finished
			if err == nil && got.Header.Get("RateLimit") != `"calls";r=99;t=3600, "tokens";r=90;t=360` {
				t.Errorf("%s: %+v", key, got)
			}
			s.world().holds(tokens.Key(key), row.tokens)
			s.world().holds(calls.Key(key), row.calls)
			if d := s.observed(); len(d) != 1 || d[0].Err != nil {
				t.Errorf("%s: observed %+v", key, d)
			}
		}
	}
}

// A program closes its limits although a request still runs: the server's Shutdown had not enough time.
func TestHTTPTheCostIsSettledAfterClose(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	for name, row := range map[string]struct{ cost, left float64 }{"more": {130, -30}, "less": {4, 96}} {
		for _, coalesced := range []bool{false, true} {
			o := opening(pool)
			o.NoSweep = true
			limits, err := ratelimit.Open(t.Context(), pool, o)
			if err != nil {
				t.Fatal(err)
			}
			request := openedBucket.Key(fmt.Sprint(name, coalesced))
			coalescer := &ratelimit.Coalescer{Pool: pool}
			var settled []httplimit.Decision
			limit := httplimit.Middleware{Limiter: limits, DB: pool, Requests: always(request.Count(10)), Settle: true,
				Observer: func(_ *http.Request, d httplimit.Decision) { settled = append(settled, d) },
			}
			if coalesced {
				limit.DB = coalescer
			}
			handler := limit.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				closeCoalescer(t, coalescer)
				closeLimiter(t, limits)
				if err := httplimit.SetCost(r.Context(), openedBucket, row.cost); err != nil {
					t.Error(err)
				}
			}))
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
			if left := readBalance(t, new(ratelimit.Limiter), pool, request); left < row.left || left > row.left+1 {
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
	s := newSite(t, always(tokens.Key("ann").Count(10)))
	s.limit.Settle = true
	s.handle = func(_ http.ResponseWriter, r *http.Request) {
		if err := httplimit.SetCost(r.Context(), tokens, 150); err != nil {
			t.Error(err)
		}
	}
	s.serve()
	s.wants("/", 200, `"tokens";r=90;t=10`, "")
	s.wants("/", 429, `"tokens";r=0;t=60`, "60") // a debt of 50, and a count of 10
	s.clock.Advance(60*time.Second - time.Microsecond)
	s.wants("/", 429, `"tokens";r=9;t=1`, "1")
	s.clock.Advance(time.Microsecond)
	s.wants("/", 200, `"tokens";r=0;t=100`, "")
}

// However many requests run at once, the tokens gone in the end are their exact cost.
func TestHTTPManyCostsAtOnceAddUp(t *testing.T) {
	t.Parallel()
	const clients, each = 8, 10
	for _, coalesced := range []bool{false, true} {
		r := newRand(t)
		bucket := ratelimit.TokenBucket("bucket", 1e6, time.Hour)
		window := ratelimit.FixedWindow("window", 1e6, time.Hour, ratelimit.Start(noon))
		costs := map[string]float64{}
		total := 0.0
		for i := range clients * each {
			cost := float64(r.IntN(200))
			costs[fmt.Sprint("/", i)] = cost
			total += cost
		}
		s := newSite(t, always(bucket.Key("ann").Count(60), bucket.Key("ann").Count(40), window.Global().Count(100)))
		if coalesced {
			coalescer := &ratelimit.Coalescer{Pool: s.pool}
			t.Cleanup(func() { closeCoalescer(t, coalescer) })
			s.limit.DB = coalescer
		}
		s.limit.Settle, s.limit.Timeout = true, 5*time.Minute // no machine is too slow
		s.handle = func(_ http.ResponseWriter, r *http.Request) {
			cost := costs[r.URL.Path]
			if err := errors.Join(httplimit.SetCost(r.Context(), bucket, cost), httplimit.SetCost(r.Context(), window, 2*cost)); err != nil {
				t.Error(err)
			}
			if int(cost)%7 == 0 {
				panic(http.ErrAbortHandler)
			}
		}
		s.serve()
		var sending sync.WaitGroup
		for client := range clients {
			sending.Go(func() {
				for i := range each {
					_, _ = s.try(t.Context(), http.MethodPost, fmt.Sprint("/", client*each+i)) // some handlers panic
				}
			})
		}
		sending.Wait()
		want := [2]float64{1e6 - total, 1e6 - 2*total}
		var left [2]float64
		eventually(t, fmt.Sprint("the balance is ", want), func() bool { // an aborted client may get its error before the settlement
			left = [2]float64{s.world().balance(bucket.Key("ann")), s.world().balance(window.Global())}
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
	s := newSite(t, always(more.Key("ann").Count(10), less.Key("ann").Count(10)))
	cut := newCut(t, s.pool)
	s.limit.DB = cut.pool
	s.limit.Settle = true
	s.limit.FailOpen = true
	s.handle = func(_ http.ResponseWriter, r *http.Request) {
		s.world().do(errors.Join(httplimit.SetCost(r.Context(), more, 50), httplimit.SetCost(r.Context(), less, 5)))
		cut.off(false)
	}
	if got := s.serve().get("/"); got.Status != 200 {
		t.Errorf("%+v", got)
	}
	d := s.observed()
	if len(d) != 3 || d[0].Err != nil {
		t.Fatalf("observed %+v", d)
	}
	for i, verb := range []string{"charge", "refund"} {
		if d := d[i+1]; d.Err == nil || d.Status != 0 || !d.Passed || !strings.Contains(d.Err.Error(), verb) {
			t.Errorf("observed %+v", d)
		}
	}
	s.world().holds(more.Key("ann"), 90)
	s.world().holds(less.Key("ann"), 90)
}

// A charge that waits for a locked row takes no longer than the timeout. The refund of another limit has its own timeout.
func TestHTTPACostIsNotWaitedForForEver(t *testing.T) {
	t.Parallel()
	more := ratelimit.TokenBucket("more", 100, time.Hour)
	less := ratelimit.TokenBucket("less", 100, time.Hour)
	s := newSite(t, always(more.Key("ann").Count(10), less.Key("ann").Count(10)))
	s.limit.Settle = true
	s.handle = func(_ http.ResponseWriter, r *http.Request) {
		s.world().do(errors.Join(httplimit.SetCost(r.Context(), more, 50), httplimit.SetCost(r.Context(), less, 5)))
		s.hold(more.Key("ann"))
	}
	if got := s.serve().get("/"); got.Status != 200 {
		t.Errorf("%+v", got)
	}
	d := s.observed()
	if len(d) != 2 || d[0].Err != nil || !errors.Is(d[1].Err, context.DeadlineExceeded) || !strings.Contains(d[1].Err.Error(), "charge") {
		t.Fatalf("observed %+v", d)
	}
	s.world().holds(more.Key("ann"), 90)
	s.world().holds(less.Key("ann"), 95)
}

func TestHTTPACostThatMakesNoSenseIsAnErrorAndTheEstimateStays(t *testing.T) {
	t.Parallel()
	tokens := ratelimit.TokenBucket("tokens", 100, time.Hour)
	other := ratelimit.TokenBucket("other", 100, time.Hour)
	var requests []ratelimit.Request
	var unlimited error
	s := newSite(t, func(*http.Request) ([]ratelimit.Request, error) { return requests, unlimited })
	requests = []ratelimit.Request{tokens.Key("ann").Count(10), tokens.Key("bob").Count(20)}
	s.limit.Settle = true
	var ctx context.Context
	invalid := func(ctx context.Context, limit ratelimit.Limit, cost float64, why string) {
		t.Helper()
		if err := httplimit.SetCost(ctx, limit, cost); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), why) || !strings.Contains(err.Error(), limit.Name()) {
			t.Errorf("%v of %v: %v", cost, limit.Name(), err)
		}
	}
	s.handle = func(_ http.ResponseWriter, r *http.Request) {
		ctx = r.Context()
		for _, cost := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -1, 1.1e15} {
			invalid(ctx, tokens, cost, "is not between 0 and 1e+15")
		}
		invalid(ctx, other, 5, "did not ask for this limit")
		invalid(ctx, ratelimit.Limit{}, 5, "did not ask for this limit")
		invalid(t.Context(), tokens, 5, "no Middleware with Settle")
	}
	s.serve().get("/")
	invalid(ctx, tokens, 5, "has returned")
	s.world().holds(tokens.Key("ann"), 90)
	s.world().holds(tokens.Key("bob"), 80)

	// A difference of less than any valid count is no difference.
	requests = []ratelimit.Request{tokens.Key("eve").Count(0.3)}
	for _, cost := range []float64{math.Nextafter(0.3, 0), math.Nextafter(0.3, 1)} {
		s.handle = func(_ http.ResponseWriter, r *http.Request) {
			s.world().do(httplimit.SetCost(r.Context(), tokens, cost))
		}
		s.get("/")
	}
	if d := s.observed(); len(d) != 3 || d[1].Err != nil || d[2].Err != nil {
		t.Errorf("observed %+v", d)
	}

	// Each key of a limit pays the cost.
	requests = []ratelimit.Request{tokens.Key("ann").Count(10), tokens.Key("bob").Count(20)}
	s.handle = func(_ http.ResponseWriter, r *http.Request) { s.world().do(httplimit.SetCost(r.Context(), tokens, 15)) }
	s.get("/")
	s.world().holds(tokens.Key("ann"), 75)
	s.world().holds(tokens.Key("bob"), 65)

	// A request that took nothing has nothing to settle: no error, and no charge.
	s.handle = func(_ http.ResponseWriter, r *http.Request) {
		s.world().do(httplimit.SetCost(r.Context(), tokens, 50))
	}
	s.limit.ObserveOnly = true
	observing := &site{T: t, limit: s.limit}
	observing.handle = s.handle
	observing.serveHandler(s.limit.Handler(observing))
	requests = []ratelimit.Request{tokens.Key("ann").Count(99)}
	observing.get("/")
	unlimited = httplimit.ErrNotLimited
	observing.get("/")
	if n := observing.called.Load(); n != 2 {
		t.Errorf("the handler was called %d times", n)
	}
	s.world().holds(tokens.Key("ann"), 75)
	for _, d := range s.observed() {
		if d.Err != nil && d.Status != 429 {
			t.Errorf("observed %+v", d)
		}
	}
}

func TestHTTPACostIsForTheMiddlewareThatAskedForTheLimit(t *testing.T) {
	t.Parallel()
	outer := ratelimit.TokenBucket("outer", 100, time.Hour)
	inner := ratelimit.TokenBucket("inner", 100, time.Hour)
	s := newSite(t, always(outer.Key("ann").Count(10)))
	s.limit.Settle = true
	within := s.limit
	var limited error
	within.Requests = func(*http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{inner.Key("ann").Count(10)}, limited
	}
	s.handle = func(_ http.ResponseWriter, r *http.Request) {
		s.world().do(httplimit.SetCost(r.Context(), outer, 1))
		s.world().do(httplimit.SetCost(r.Context(), inner, 30))
	}
	s.serveHandler(s.limit.Handler(within.Handler(s)))
	s.get("/")
	s.world().holds(outer.Key("ann"), 99)
	s.world().holds(inner.Key("ann"), 70)
	limited = httplimit.ErrNotLimited
	s.get("/")
	s.world().holds(outer.Key("ann"), 98)
	s.world().holds(inner.Key("ann"), 70)
}

// A limit on failures of different cost. A success costs nothing, whatever cost the handler has set.
func TestHTTPACostOfASuccessIsNothingIfOnlyFailuresCount(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 100, time.Hour)
	s := newSite(t, always(failures.Key("ann").Count(10)))
	s.limit.Settle = true
	s.limit.Failed = func(status int) bool { return status == http.StatusUnauthorized }
	s.handle = func(w http.ResponseWriter, r *http.Request) {
		s.world().do(httplimit.SetCost(r.Context(), failures, 15))
		if r.URL.Path == "/wrong" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}
	s.serve().get("/right")
	s.world().holds(failures.Key("ann"), 100)
	s.get("/wrong")
	s.world().holds(failures.Key("ann"), 85)
}

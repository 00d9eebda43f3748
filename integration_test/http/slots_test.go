package http_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

func TestHTTPAtMostNRequestsAreInFlight(t *testing.T) {
	t.Parallel()
	renders := ratelimit.Slots("renders", 2)
	for name, end := range map[string]func(f *harness.InFlight, leave func()){
		"it ends":           func(f *harness.InFlight, _ func()) { f.End <- struct{}{} },
		"it panics":         func(f *harness.InFlight, _ func()) { f.End <- struct{}{} },
		"its client leaves": func(_ *harness.InFlight, leave func()) { leave() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, f := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{renders.Key(r.URL.Path)}, nil
			}), harness.NewInFlight()
			bob := harness.NewInFlight()
			s.Limit.LegacyFields = true
			s.Handle = func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/bob" {
					bob.Run(r.Context())
					return
				}
				if name == "it panics" { // the answer has begun, or the client would try again
					w.(http.Flusher).Flush()
				}
				if f.Run(r.Context()); name == "it panics" {
					panic(http.ErrAbortHandler)
				}
			}
			coalescer := &ratelimit.Coalescer{Pool: s.Pool}
			t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
			s.Limit.DB = coalescer
			s.Serve()
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			var replies []func() (harness.Answer, error)
			for range 2 {
				replies = append(replies, s.Send(ctx, "/acme"))
				<-f.Begun
			}
			got := s.Wants("/acme", 429, `"renders";r=0`, "")
			if got.Header.Get("RateLimit-Policy") != `"renders";q=2` || got.Header.Values("X-RateLimit-Reset") != nil || s.Problem(got)["violated-policies"] == nil {
				t.Errorf("%+v", got)
			}
			other := s.Send(t.Context(), "/bob") // another customer
			<-bob.Begun
			for range replies {
				end(f, leave)
			}
			for _, reply := range replies {
				_, _ = reply()
			}
			harness.Eventually(t, "the slots are free", func() bool { return s.World().Balance(renders.Key("/acme")) == 2 })
			s.World().Holds(renders.Key("/bob"), 1)
			if name != "it panics" {
				again := s.Send(t.Context(), "/acme")
				<-f.Begun
				f.End <- struct{}{}
				if got, err := again(); err != nil || got.Status != 200 || got.Header.Get("RateLimit") != `"renders";r=1` || got.Header.Values("X-RateLimit-Reset") != nil {
					t.Errorf("%+v, %v", got, err)
				}
			}
			bob.End <- struct{}{}
			_, _ = other()
			if rows := holdRows(s); rows != 0 {
				t.Errorf("%d rows of holds are left", rows)
			}
		})
	}
}

// holdRows is how many rows ratelimit.holds has.
func holdRows(s *harness.Site) (rows int) {
	if err := s.Pool.QueryRow(s.Context(), `SELECT count(*) FROM ratelimit.holds`).Scan(&rows); err != nil {
		s.Fatal(err)
	}
	return rows
}

// A request that asks for a rate and a slot gets both or none. What it has really cost is settled when it ends.
func TestHTTPSlotsBesideARate(t *testing.T) {
	t.Parallel()
	renders, calls := ratelimit.Slots("renders", 1), ratelimit.TokenBucket("calls", 60, time.Minute, ratelimit.Capacity(10))
	pool := harness.NewPool(t, 4)
	for name, row := range map[string]struct {
		handle func(t *testing.T, w http.ResponseWriter, r *http.Request)
		left   float64 // of 10 calls, of which it asks for 4
	}{
		"nothing is said": {func(*testing.T, http.ResponseWriter, *http.Request) {}, 6},
		"less": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			if err := httplimit.SetCost(r.Context(), calls, 1); err != nil {
				t.Error(err)
			}
			if err := httplimit.SetCost(r.Context(), renders, 1); !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("a cost of slots: %v", err)
			}
		}, 9},
		"more, and a panic": {func(t *testing.T, _ http.ResponseWriter, r *http.Request) {
			if err := httplimit.SetCost(r.Context(), calls, 9); err != nil {
				t.Error(err)
			}
			panic(http.ErrAbortHandler)
		}, 1},
		"a success is free": {func(_ *testing.T, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }, 10},
	} {
		s := harness.NewSiteOn(t, pool, harness.Always(renders.Key(name), calls.Key(name).Count(2), calls.Key(name).Count(2)))
		s.Limit.Settle = true
		if name == "a success is free" {
			s.Limit.Failed = func(status int) bool { return status >= 500 }
		}
		begun, goOn := make(chan bool), make(chan bool)
		s.Handle = func(w http.ResponseWriter, r *http.Request) {
			begun <- true
			<-goOn
			row.handle(t, w, r)
		}
		s.Serve()
		reply := s.Send(t.Context(), "/")
		<-begun
		s.Wants("/", 429, `"renders";r=0, "calls";r=6`, "") // nothing is taken, and when it is free is not known
		s.World().Holds(calls.Key(name), 6)
		s.World().Grant(calls.Key(name).Count(3))
		s.Wants("/", 429, `"renders";r=0, "calls";r=3;t=1`, "1") // both deny
		close(goOn)
		_, _ = reply()
		s.World().Holds(renders.Key(name), 1)
		s.World().Holds(calls.Key(name), row.left-3)
		for _, d := range s.Observed() {
			if d.Err != nil && d.Status != 429 {
				t.Errorf("%s: observed %+v", name, d)
			}
		}
	}
}

func TestHTTPWhatEndsAHeldRequest(t *testing.T) {
	t.Parallel()
	renders := ratelimit.Slots("renders", 1)
	pool := harness.NewPool(t, 4)
	serve := func(key string) (*harness.Site, *harness.InFlight) {
		s, f := harness.NewSiteOn(t, pool, harness.Always(renders.Key(key))), harness.NewInFlight()
		s.Handle = func(_ http.ResponseWriter, r *http.Request) { f.Run(r.Context()) }
		return s.Serve(), f
	}
	t.Run("its process dies", func(t *testing.T) {
		s, f := serve("dies")
		first := s.Send(t.Context(), "/")
		<-f.Begun
		var id string
		var expires time.Time
		if err := pool.QueryRow(t.Context(), `SELECT id, until FROM ratelimit.holds WHERE key = 'dies'`).Scan(&id, &expires); err != nil ||
			!strings.HasPrefix(id, "http/") || !strings.Contains(id, fmt.Sprintf("/%d/", os.Getpid())) || !expires.Equal(harness.Noon.Add(time.Minute)) {
			t.Fatalf("%q, until %v, %v", id, expires, err)
		}
		s.Get("/")
		s.Clock.Advance(time.Minute + time.Second) // in which nobody has extended it
		second := s.Send(t.Context(), "/")
		<-f.Begun
		f.End <- struct{}{}
		f.End <- struct{}{}
		_, _ = first()
		_, _ = second()
	})
	t.Run("an operator frees it", func(t *testing.T) {
		s, f := serve("freed")
		reply := s.Send(t.Context(), "/")
		ctx := <-f.Begun
		if _, err := pool.Exec(t.Context(), `SELECT ratelimit.release(name, key, id, reason => 'it hangs', who => 'ann') FROM ratelimit.holds WHERE key = 'freed'`); err != nil {
			t.Fatal(err)
		}
		if _, err := reply(); err != nil { // after the next extension, in 20 seconds
			t.Error(err)
		}
		d := s.Observed()
		if !errors.Is(context.Cause(ctx), ratelimit.ErrHoldLost) || len(d) != 2 || !d[1].Passed || d[1].Status != 0 || !errors.Is(d[1].Err, ratelimit.ErrHoldLost) {
			t.Errorf("%v, observed %+v", context.Cause(ctx), d)
		}
	})
	t.Run("it is not asked", func(t *testing.T) {
		s := harness.NewSiteOn(t, pool, harness.Always(renders.Key("unasked")))
		cut := harness.NewCut(t, pool)
		s.Limit.DB, s.Limit.Timeout = cut.Pool, 200*time.Millisecond
		s.Serve()
		on := cut.Off(false)
		defer on()
		got := s.Get("/")
		if got.Status != 503 || got.Header.Get("RateLimit-Policy") != `"renders";q=1` || s.Called.Load() != 0 {
			t.Errorf("%+v", got)
		}
		s.Limit.FailOpen = true
		open := &harness.Site{T: t, Limit: s.Limit}
		open.Serve()
		harness.Eventually(t, "a request passes", func() bool { return open.Get("/").Status == 200 })
		if d := s.Observed(); !d[len(d)-1].FailedOpen {
			t.Errorf("observed %+v", d)
		}
	})
	t.Run("a plan without slots", func(t *testing.T) {
		s := harness.NewSiteOn(t, pool, harness.Always(ratelimit.Slots("none", 0).Key("ann")))
		s.Serve().Wants("/", 403, `"none";r=0`, "")
		s.Limit.ObserveOnly = true
		observing := &harness.Site{T: t, Limit: s.Limit}
		observing.Serve().Wants("/", 200, `"none";r=0`, "")
	})
}

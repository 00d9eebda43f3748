package integration_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// inFlight has requests run until they are let go.
type inFlight struct {
	begun chan context.Context
	end   chan struct{}
}

func newInFlight() *inFlight { return &inFlight{make(chan context.Context), make(chan struct{})} }

// run waits for its end, or its context's.
func (f *inFlight) run(ctx context.Context) {
	f.begun <- ctx
	select {
	case <-f.end:
	case <-ctx.Done():
	}
}

func TestHTTPAtMostNRequestsAreInFlight(t *testing.T) {
	t.Parallel()
	renders := ratelimit.Slots("renders", 2)
	for name, end := range map[string]func(f *inFlight, leave func()){
		"it ends":           func(f *inFlight, _ func()) { f.end <- struct{}{} },
		"it panics":         func(f *inFlight, _ func()) { f.end <- struct{}{} },
		"its client leaves": func(_ *inFlight, leave func()) { leave() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, f := newSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
				return []ratelimit.Request{renders.Key(r.URL.Path)}, nil
			}), newInFlight()
			bob := newInFlight()
			s.limit.LegacyFields = true
			s.handle = func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/bob" {
					bob.run(r.Context())
					return
				}
				if name == "it panics" { // the answer has begun, or the client would try again
					w.(http.Flusher).Flush()
				}
				if f.run(r.Context()); name == "it panics" {
					panic(http.ErrAbortHandler)
				}
			}
			coalescer := &ratelimit.Coalescer{Pool: s.pool}
			t.Cleanup(func() { closeCoalescer(t, coalescer) })
			s.limit.DB = coalescer
			s.serve()
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			var replies []func() (answer, error)
			for range 2 {
				replies = append(replies, s.send(ctx, "/acme"))
				<-f.begun
			}
			got := s.wants("/acme", 429, `"renders";r=0`, "")
			if got.Header.Get("RateLimit-Policy") != `"renders";q=2` || got.Header.Values("X-RateLimit-Reset") != nil || s.problem(got)["violated-policies"] == nil {
				t.Errorf("%+v", got)
			}
			other := s.send(t.Context(), "/bob") // another customer
			<-bob.begun
			for range replies {
				end(f, leave)
			}
			for _, reply := range replies {
				_, _ = reply()
			}
			eventually(t, "the slots are free", func() bool { return s.world().balance(renders.Key("/acme")) == 2 })
			s.world().holds(renders.Key("/bob"), 1)
			if name != "it panics" {
				again := s.send(t.Context(), "/acme")
				<-f.begun
				f.end <- struct{}{}
				if got, err := again(); err != nil || got.Status != 200 || got.Header.Get("RateLimit") != `"renders";r=1` || got.Header.Values("X-RateLimit-Reset") != nil {
					t.Errorf("%+v, %v", got, err)
				}
			}
			bob.end <- struct{}{}
			_, _ = other()
			if rows := holdRows(s); rows != 0 {
				t.Errorf("%d rows of holds are left", rows)
			}
		})
	}
}

// holdRows is how many rows ratelimit.holds has.
func holdRows(s *site) (rows int) {
	if err := s.pool.QueryRow(s.Context(), `SELECT count(*) FROM ratelimit.holds`).Scan(&rows); err != nil {
		s.Fatal(err)
	}
	return rows
}

// A request that asks for a rate and a slot gets both or none. What it has really cost is settled when it ends.
func TestHTTPSlotsBesideARate(t *testing.T) {
	t.Parallel()
	renders, calls := ratelimit.Slots("renders", 1), ratelimit.TokenBucket("calls", 60, time.Minute, ratelimit.Capacity(10))
	pool := newPool(t, 4)
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
		s := newSiteOn(t, pool, always(renders.Key(name), calls.Key(name).Count(2), calls.Key(name).Count(2)))
		s.limit.Settle = true
		if name == "a success is free" {
			s.limit.Failed = func(status int) bool { return status >= 500 }
		}
		begun, goOn := make(chan bool), make(chan bool)
		s.handle = func(w http.ResponseWriter, r *http.Request) {
			begun <- true
			<-goOn
			row.handle(t, w, r)
		}
		s.serve()
		reply := s.send(t.Context(), "/")
		<-begun
		s.wants("/", 429, `"renders";r=0, "calls";r=6`, "") // nothing is taken, and when it is free is not known
		s.world().holds(calls.Key(name), 6)
		s.world().grant(calls.Key(name).Count(3))
		s.wants("/", 429, `"renders";r=0, "calls";r=3;t=1`, "1") // both deny
		close(goOn)
		_, _ = reply()
		s.world().holds(renders.Key(name), 1)
		s.world().holds(calls.Key(name), row.left-3)
		for _, d := range s.observed() {
			if d.Err != nil && d.Status != 429 {
				t.Errorf("%s: observed %+v", name, d)
			}
		}
	}
}

func TestHTTPWhatEndsAHeldRequest(t *testing.T) {
	t.Parallel()
	renders := ratelimit.Slots("renders", 1)
	pool := newPool(t, 4)
	serve := func(key string) (*site, *inFlight) {
		s, f := newSiteOn(t, pool, always(renders.Key(key))), newInFlight()
		s.handle = func(_ http.ResponseWriter, r *http.Request) { f.run(r.Context()) }
		return s.serve(), f
	}
	t.Run("its process dies", func(t *testing.T) {
		s, f := serve("dies")
		first := s.send(t.Context(), "/")
		<-f.begun
		var id string
		var expires time.Time
		if err := pool.QueryRow(t.Context(), `SELECT id, until FROM ratelimit.holds WHERE key = 'dies'`).Scan(&id, &expires); err != nil ||
			!strings.HasPrefix(id, "http/") || !strings.Contains(id, fmt.Sprintf("/%d/", os.Getpid())) || !expires.Equal(noon.Add(time.Minute)) {
			t.Fatalf("%q, until %v, %v", id, expires, err)
		}
		s.get("/")
		s.clock.Advance(time.Minute + time.Second) // in which nobody has extended it
		second := s.send(t.Context(), "/")
		<-f.begun
		f.end <- struct{}{}
		f.end <- struct{}{}
		_, _ = first()
		_, _ = second()
	})
	t.Run("an operator frees it", func(t *testing.T) {
		s, f := serve("freed")
		reply := s.send(t.Context(), "/")
		ctx := <-f.begun
		if _, err := pool.Exec(t.Context(), `SELECT ratelimit.release(name, key, id, reason => 'it hangs', who => 'ann') FROM ratelimit.holds WHERE key = 'freed'`); err != nil {
			t.Fatal(err)
		}
		if _, err := reply(); err != nil { // after the next extension, in 20 seconds
			t.Error(err)
		}
		d := s.observed()
		if !errors.Is(context.Cause(ctx), ratelimit.ErrHoldLost) || len(d) != 2 || !d[1].Passed || d[1].Status != 0 || !errors.Is(d[1].Err, ratelimit.ErrHoldLost) {
			t.Errorf("%v, observed %+v", context.Cause(ctx), d)
		}
	})
	t.Run("it is not asked", func(t *testing.T) {
		s := newSiteOn(t, pool, always(renders.Key("unasked")))
		cut := newCut(t, pool)
		s.limit.DB, s.limit.Timeout = cut.pool, 200*time.Millisecond
		s.serve()
		on := cut.off(false)
		defer on()
		got := s.get("/")
		if got.Status != 503 || got.Header.Get("RateLimit-Policy") != `"renders";q=1` || s.called.Load() != 0 {
			t.Errorf("%+v", got)
		}
		s.limit.FailOpen = true
		open := &site{T: t, limit: s.limit}
		open.serve()
		eventually(t, "a request passes", func() bool { return open.get("/").Status == 200 })
		if d := s.observed(); !d[len(d)-1].FailedOpen {
			t.Errorf("observed %+v", d)
		}
	})
	t.Run("a plan without slots", func(t *testing.T) {
		s := newSiteOn(t, pool, always(ratelimit.Slots("none", 0).Key("ann")))
		s.serve().wants("/", 403, `"none";r=0`, "")
		s.limit.ObserveOnly = true
		observing := &site{T: t, limit: s.limit}
		observing.serve().wants("/", 200, `"none";r=0`, "")
	})
}

func TestRPCAtMostNCallsAreInFlight(t *testing.T) {
	renders, calls := ratelimit.Slots("renders", 1), ratelimit.TokenBucket("calls", 60, time.Minute)
	rpcs(t, func(o *office, serve func() rpcClient) {
		f := newInFlight()
		o.handle = func(ctx context.Context, words string) error {
			if words == "wait" {
				f.run(ctx)
			}
			return ctx.Err()
		}
		client := serve()
		full := func() {
			o.Helper()
			_, s := client.say(o.Context(), "hello")
			if delay, violations := o.denial(s); s.Code() != codes.ResourceExhausted || delay != -1 || violations != "renders 1" || strings.Contains(s.Message(), "retry") {
				o.Errorf("%v, %v, %s", s, delay, violations)
			}
		}
		ended := make(chan codes.Code)
		go func() {
			_, s := client.say(o.Context(), "wait")
			ended <- s.Code()
		}()
		<-f.begun
		full()
		f.end <- struct{}{}
		if code := <-ended; code != codes.OK {
			o.Error(code)
		}
		talk := client.chat(o.Context()) // is held until it ends, not until a message does
		for range 2 {
			if got, s := talk.tell("hello"); got != "hello" {
				o.Fatalf("%q, %v", got, s)
			}
			full()
		}
		if _, s := talk.tell(""); s.Code() != codes.OK {
			o.Error(s)
		}
		eventually(o.T, "the stream's slot is free", func() bool { return o.world().balance(renders.Key("ann")) == 1 })
		ctx, leave := context.WithCancel(o.Context())
		talk = client.chat(ctx)
		if got, s := talk.tell("hello"); got != "hello" {
			o.Fatalf("%q, %v", got, s)
		}
		full()
		leave()
		_, _ = talk.tell("bye") // Connect's client notices then
		eventually(o.T, "the slot of a client that left is free", func() bool { return o.world().balance(renders.Key("ann")) == 1 })
		o.world().holds(calls.Key("ann"), 57)
		for _, d := range o.observed() {
			if d.Err != nil && d.Code != codes.ResourceExhausted {
				o.Errorf("observed %+v", d)
			}
		}
	}, renders.Key("ann"), calls.Key("ann"))
}

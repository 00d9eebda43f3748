package http_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 10, time.Hour)
	clientGone := make(chan struct{})
	pool := harness.NewPool(t, 4)
	for name, row := range map[string]struct {
		handle func(w http.ResponseWriter, r *http.Request)
		leave  bool // the client leaves while the handler runs
		counts bool
	}{
		"nothing is 200": {func(http.ResponseWriter, *http.Request) {}, false, false},
		"a 401":          {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, false, true},
		"a flushed 200":  {func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() }, false, false},
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
		"a panic after its client has left": {func(_ http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
			panic(r.Context().Err())
		}, true, true},
		"a handler that gave up with its client": {func(_ http.ResponseWriter, r *http.Request) {
			clientGone <- struct{}{}
			<-r.Context().Done()
		}, true, true},
	} {
		s := harness.NewSiteOn(t, pool, harness.Always(failures.Key(name).Count(2)))
		s.Limit.Failed = func(status int) bool { return status == http.StatusUnauthorized }
		finished := make(chan struct{})
		s.Handle = row.handle
		handler := s.Limit.Handler(s)
		s.ServeHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer close(finished)
			handler.ServeHTTP(w, r)
		}))
		ctx, leave := context.WithCancel(t.Context())
		if row.leave {
			go func() { <-clientGone; leave() }()
		}
		_, _ = s.Try(ctx, http.MethodGet, "/")
		leave()
		<-finished
		s.World().Holds(failures.Key(name), map[bool]float64{true: 8, false: 10}[row.counts])
		if d := s.Observed(); len(d) != 1 || d[0].Err != nil {
			t.Errorf("%s: observed %+v", name, d)
		}
	}
}

// A panic is a 500, as a handler that recovers would answer, unless another answer has begun. What a client saw is what Failed is asked.
func TestHTTPAPanicIsA500UnlessAnAnswerHasBegun(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 10, time.Hour)
	pool := harness.NewPool(t, 4)
	for name, row := range map[string]struct {
		handle func(w http.ResponseWriter, r *http.Request)
		asked  int // the status that Failed is asked about
		seen   int // by the client; 0: no answer
	}{
		"a panic":      {func(http.ResponseWriter, *http.Request) { panic("a bug") }, 500, 0},
		"an abort":     {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 500, 0},
		"nil":          {func(http.ResponseWriter, *http.Request) { panic(nil) }, 500, 0}, //nolint:govet // on purpose
		"an early one": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusEarlyHints); panic("a bug") }, 500, 0},
		"after a 200": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
			panic("late")
		}, 200, 200},
		"an abort after a 401": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusUnauthorized)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}, 401, 401},
		"after a 401 that nobody has seen": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized); panic("late") }, 401, 0},
		"in the middle of a body": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "hel")
			w.(http.Flusher).Flush()
			panic("late")
		}, 200, 200},
	} {
		for rule, failed := range map[string]func(status int) bool{
			"below 500":    func(status int) bool { return status < 500 },
			"401":          func(status int) bool { return status == http.StatusUnauthorized },
			"400 and more": func(status int) bool { return status >= 400 },
		} {
			key := name + ", " + rule
			s := harness.NewSiteOn(t, pool, harness.Always(failures.Key(key).Count(2)))
			asked := make(chan int, 1)
			s.Limit.Failed = func(status int) bool {
				asked <- status
				return failed(status)
			}
			s.Handle = row.handle
			finished := make(chan any, 1)
			handler := s.Limit.Handler(s)
			s.ServeHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				defer func() { // the panic goes on to the server
					p := recover()
					finished <- p
					panic(p)
				}()
				handler.ServeHTTP(w, r)
			}))
			response, err := s.Client.Get(s.URL)
			seen := 0
			if err == nil {
				seen = response.StatusCode
				response.Body.Close()
			}
			if p := <-finished; p == nil || seen != row.seen || <-asked != row.asked {
				t.Errorf("%s: panicked with %v, the client saw %d, want %d; Failed must be asked about %d", key, p, seen, row.seen, row.asked)
			}
			s.World().Holds(failures.Key(key), map[bool]float64{true: 8, false: 10}[failed(row.asked)])
		}
	}
}

func TestHTTPARefundBelongsToTheWindowOfItsConsumption(t *testing.T) {
	t.Parallel()
	failures := ratelimit.FixedWindow("failures", 10, time.Hour, ratelimit.Start(harness.Noon))
	s := harness.NewSite(t, harness.Always(failures.Key("ann")))
	s.Limit.Failed = func(status int) bool { return status >= 400 }
	s.Handle = func(http.ResponseWriter, *http.Request) {
		s.Clock.Advance(time.Hour)
		if _, err := s.Limit.Limiter.Consume(t.Context(), s.Pool, failures.Key("ann").Count(3)); err != nil {
			t.Error(err)
		}
	}
	s.Serve().Get("/")
	s.World().Holds(failures.Key("ann"), 7)
}

func TestHTTPARefundThatFailsIsObservedAndTheTokensStayTaken(t *testing.T) {
	t.Parallel()
	failures := ratelimit.TokenBucket("failures", 10, time.Hour)
	s := harness.NewSite(t, harness.Always(failures.Key("ann")))
	cut := harness.NewCut(t, s.Pool)
	s.Limit.DB = cut.Pool
	s.Limit.Failed = func(int) bool { return false }
	s.Handle = func(http.ResponseWriter, *http.Request) { cut.Off(false) }
	if got := s.Serve().Get("/"); got.Status != 200 {
		t.Errorf("%+v", got)
	}
	d := s.Observed()
	if len(d) != 2 || d[0].Err != nil || d[1].Err == nil || d[1].Status != 0 || !d[1].Passed || !strings.Contains(d[1].Err.Error(), "refund") {
		t.Errorf("%+v", d)
	}
	s.World().Holds(failures.Key("ann"), 9)
}

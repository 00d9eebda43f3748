// Provider: twenty workers call a provider that has a limit of its own. Its first 429 pauses the limit of all of them (Pause), in every
// process, until the instant that the provider names. Then they go on at full speed. Headers of several providers are read by until.
//
//	go run ./examples/provider
package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	workers = 20
	calls   = 300 // of all workers together
)

// What we may call: 100 a second, 20 at once. Somebody else in our company uses the same account, so the provider may stop us earlier.
var provider = ratelimit.TokenBucket("provider", 100, time.Second, ratelimit.Capacity(20))

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "provider", Limits: []ratelimit.Limit{provider}})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits)
	stopping := &server{full: 60, stop: 2 * time.Second}
	endpoint := httptest.NewServer(stopping)
	defer endpoint.Close()

	w := worker{limits: limits, pool: pool, url: endpoint.URL}
	working, ctx := errgroup.WithContext(ctx)
	for range workers {
		working.Go(func() error { return w.work(ctx) })
	}
	if err := working.Wait(); err != nil {
		return err
	}
	return errors.Join(w.check(), stopping.check())
}

// worker calls the provider. All workers share it, as several processes share the database.
type worker struct {
	limits *ratelimit.Limiter
	pool   *pgxpool.Pool
	url    string

	mu       sync.Mutex
	done     int
	granted  []time.Time // by the database's clock
	denied   []*ratelimit.DeniedError
	pausedAt time.Time // when the first pause was committed
	until    time.Time // and its end
}

// work calls until there is nothing left to do.
func (w *worker) work(ctx context.Context) error {
	for w.next() {
		for stopped := true; stopped; {
			err := w.token(ctx)
			if err == nil {
				stopped, err = w.call(ctx)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// token takes a token, and waits for it without taking it before: a token that was reserved before a pause may be used in it.
func (w *worker) token(ctx context.Context) error {
	for {
		result, err := w.limits.Consume(ctx, w.pool, provider.Global())
		denied, ok := errors.AsType[*ratelimit.DeniedError](err)
		w.mu.Lock()
		switch {
		case err == nil:
			w.granted = append(w.granted, result.At)
		case ok:
			w.denied = append(w.denied, denied)
		}
		w.mu.Unlock()
		if !ok || denied.RetryAt.IsZero() {
			return err // such as a block without an end: waiting does not help
		}
		wait := min(denied.RetryAfter, time.Hour) // a block may last for centuries, and may be lifted
		select {
		case <-time.After(wait + rand.N(20*time.Millisecond)): // not all at once
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// next reports whether there is another call to make.
func (w *worker) next() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done++
	return w.done <= calls
}

// call makes one call. If the provider has none left, it stops everybody.
func (w *worker) call(ctx context.Context) (stopped bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url, http.NoBody)
	if err != nil {
		return false, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	remaining, told := left(response.Header)
	if stopped = response.StatusCode == http.StatusTooManyRequests; stopped {
		remaining, told = 0, true
	}
	wait, says := retryAfter(response.Header, time.Now())
	if stopped && !says {
		wait = 30 * time.Second // a provider that does not say
	}
	if !told || remaining > 0 {
		return stopped, nil
	}
	end, err := w.limits.Pause(ctx, w.pool, wait, provider.Global().Count(remaining))
	if err != nil || end.IsZero() { // or it answers again already
		return stopped, err
	}
	return stopped, w.note(ctx, end)
}

// note notes for the check at the end when the first pause was committed, and until when the limit is paused.
func (w *worker) note(ctx context.Context, end time.Time) error {
	balances, err := w.limits.Balance(ctx, w.pool, provider.Global())
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pausedAt.IsZero() {
		w.pausedAt = balances[0].At
	}
	if end.After(w.until) {
		w.until = end
	}
	return nil
}

// check wants nothing to be granted from the first pause on to its end, and everything after it that the limit has.
func (w *worker) check() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	meanwhile, last := 0, time.Time{}
	for _, at := range w.granted {
		if at.After(w.pausedAt) && at.Before(w.until) {
			meanwhile++
		}
		if at.After(last) {
			last = at
		}
	}
	var slowest time.Duration
	for _, r := range w.denied {
		if !r.At.Before(w.until) {
			slowest = max(slowest, r.RetryAfter)
		}
	}
	fmt.Printf("calls granted between the first pause and its end: %d\n", meanwhile)
	fmt.Printf("after it, a denied call has to wait for one token, 10ms, or less: %v\n", slowest <= 10*time.Millisecond)
	fmt.Fprintf(os.Stderr, "the pause took %v; %d calls were made in the %v after it\n", w.until.Sub(w.pausedAt).Round(time.Millisecond), len(w.granted), last.Sub(w.until).Round(time.Millisecond))
	if w.until.IsZero() || meanwhile > 0 || slowest > 10*time.Millisecond {
		return fmt.Errorf("paused from %v to %v: %d calls were granted in it, and one had to wait for %v after it", w.pausedAt, w.until, meanwhile, slowest)
	}
	return nil
}

// server is the provider: it answers so many calls, and then 429 until it has rested.
type server struct {
	full int           // calls before it stops
	stop time.Duration // for how long

	mu      sync.Mutex
	calls   int
	refused int
	until   time.Time // it has stopped until then
}

func (s *server) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.calls++
	if s.until.IsZero() && s.calls > s.full {
		s.until = now.Add(s.stop)
	}
	if now.Before(s.until) {
		s.refused++
		w.Header().Set("Retry-After", strconv.Itoa(int(s.stop/time.Second)))
		w.Header().Set("X-Ratelimit-Remaining", "0")
		w.WriteHeader(http.StatusTooManyRequests)
		return
	}
	w.Header().Set("X-Ratelimit-Remaining", strconv.Itoa(s.full))
}

// check wants every call to be answered once. Those that were on their way when the provider stopped were refused: of each worker, one.
func (s *server) check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Printf("calls answered: %d\n", s.calls-s.refused)
	fmt.Printf("calls refused: at least one, at most one of each worker: %v\n", s.refused >= 1 && s.refused <= workers)
	if s.calls-s.refused != calls || s.refused < 1 || s.refused > workers {
		return fmt.Errorf("%d calls, of which %d were refused: want %d answered, and at most %d refused", s.calls, s.refused, calls, workers)
	}
	return nil
}

// Wait runs the workers of two processes, which call a third party that takes 20 calls per second. Each call waits for its
// turn, in order of arrival, so none is refused. A caller with too little time is denied at once. A caller that stops
// waiting returns its token.
//
//	go run ./examples/wait
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	rate    = 20 // calls per second
	workers = 4  // of both processes together
	calls   = 40
)

var (
	geocoder = ratelimit.TokenBucket("geocoder", rate, time.Second, ratelimit.Capacity(1))
	reports  = ratelimit.TokenBucket("reports", 1, time.Minute)
)

// thirdParty takes 20 calls per second. Its burst exceeds the limit's by one call per worker, for calls that are a little
// late.
type thirdParty struct {
	mu              sync.Mutex
	tokens          float64
	last            time.Time
	called, refused int
}

func (p *thirdParty) call() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.tokens = min(p.tokens+rate*now.Sub(p.last).Seconds(), 1+workers)
	p.last = now
	p.called++
	if p.tokens < 1 {
		p.refused++
		return
	}
	p.tokens--
}

// work calls the third party for each job. It asks the database once for each call.
func work(ctx context.Context, limits *ratelimit.Limiter, pool *pgxpool.Pool, jobs <-chan int, p *thirdParty) error {
	for range jobs {
		if _, err := limits.Wait(ctx, pool, geocoder.Global()); err != nil {
			return err
		}
		p.call()
	}
	return nil
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	var process [2]*ratelimit.Limiter
	for i := range process {
		limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{Program: "wait", Limits: []ratelimit.Limit{geocoder, reports}})
		if err != nil {
			return err
		}
		defer demo.Close(ctx, limits)
		process[i] = limits
	}
	jobs := make(chan int, calls)
	for i := range calls {
		jobs <- i
	}
	close(jobs)
	p := &thirdParty{tokens: 1 + workers, last: time.Now()}
	errs := make([]error, workers)
	began := time.Now()
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() { errs[i] = work(ctx, process[i%2], pool, jobs, p) })
	}
	wg.Wait()
	took := time.Since(began)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	fmt.Printf("%d calls by %d workers: %d refused by the third party\n", p.called, workers, p.refused)
	fmt.Fprintf(os.Stderr, "   they took %v\n", took)
	if least := (calls - 1) * time.Second / rate; p.refused > 0 || took < least-time.Millisecond {
		return fmt.Errorf("%d refused, in %v, want none in at least %v", p.refused, took, least)
	}

	// The second report may run in a minute. A caller with ten seconds is denied at once.
	limits := process[0]
	if _, err := limits.Wait(ctx, pool, reports.Key("ann")); err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := limits.Wait(short, pool, reports.Key("ann"))
	var denied *ratelimit.DeniedError
	if !errors.As(err, &denied) || short.Err() != nil {
		return fmt.Errorf("%w, want a denial", err)
	}
	fmt.Printf("with ten seconds left: denied at once, to try again in %v\n", denied.RetryAfter.Round(10*time.Second))

	// A caller with more time waits. If it stops waiting, its token is returned.
	patient, giveUp := context.WithCancel(ctx)
	time.AfterFunc(100*time.Millisecond, giveUp)
	_, err = limits.Wait(patient, pool, reports.Key("ann"))
	if !errors.Is(err, context.Canceled) {
		return fmt.Errorf("%w, want canceled", err)
	}
	left, err := limits.Balance(ctx, pool, reports.Key("ann"))
	if err != nil {
		return err
	}
	fmt.Printf("given up: %.0f tokens owed\n", max(-left[0].Remaining, 0))
	return nil
}

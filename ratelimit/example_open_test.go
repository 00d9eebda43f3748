package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

var (
	signUps     = ratelimit.FixedWindow("signUps", 100, time.Hour)
	sendMessage = ratelimit.TokenBucket("sendMessage", 10, time.Hour, ratelimit.Capacity(3))
)

// A server with everything: overrides, usage, sweeps, and a clean shutdown.
func ExampleOpen() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := runShop(ctx, pool.Config().ConnString()); err != nil {
		panic(err)
	}
	fmt.Println("stopped")
	// Output: stopped
}

func runShop(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "shop",
		Limits:  []ratelimit.Limit{signUps, sendMessage},
		Usage:   &usage.Recorder{DB: pool},
	})
	if err != nil {
		return err
	}
	coalescer := &ratelimit.Coalescer{Pool: pool}
	server := &http.Server{Addr: ":8080", Handler: shop(limits, coalescer), ReadHeaderTimeout: time.Minute}
	workers := newWorkers(pool, limits)
	go func() { _ = server.ListenAndServe() }()

	<-ctx.Done() // the signal
	return shutDown(ctx, server, workers, coalescer, limits, pool)
}

func shutDown(ctx context.Context, server *http.Server, workers jobWorkers, coalescer *ratelimit.Coalescer, limits *ratelimit.Limiter, pool *pgxpool.Pool) error {
	ctx = context.WithoutCancel(ctx)
	stopping, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	errs := []error{
		server.Shutdown(stopping), // no more requests
		workers.Stop(stopping),    // such as a River client: no more jobs
	}
	if errs[0] != nil {
		_ = server.Close() // a handler that goes on has a context that ends now
	}
	closing, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	errs = append(errs, coalescer.Close(closing)) // if there is one: its waiting calls are decided
	errs = append(errs, limits.Close(closing))    // the last counts are written
	pool.Close()                                  // waits for connections that are in use
	return errors.Join(errs...)
}

// A process that lives a second has nothing in the background. Close writes its usage.
func ExampleOptions_noBackground() {
	nightly := func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
			Program: "nightly", Limits: []ratelimit.Limit{signUps}, Usage: &usage.Recorder{DB: pool}, NoBackground: true,
		})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, limits.Close(ctx)) }()
		_, err = limits.Consume(ctx, pool, signUps.Global())
		return err
	}
	if err := nightly(ctx, pool); err != nil {
		panic(err)
	}
	fmt.Println("done")
	// Output: done
}

// A script that only blocks. It needs no list of limits, and a pool of one connection is enough.
func ExampleOpen_script() {
	ctx := context.Background()
	script := func() error {
		limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{NoPublish: true, NoSweep: true, NoBackground: true})
		if err != nil {
			return err
		}
		_, err = limits.Block(ctx, pool, sendMessage.Key("user-17"),
			ratelimit.Terms{For: time.Hour, Reason: "spam", Who: "cleanup"})
		return err
	}
	if err := script(); err != nil {
		panic(err)
	}
	fmt.Println("blocked")
	// Output: blocked
}

// jobWorkers stands for the client of a job queue.
type jobWorkers interface {
	Stop(ctx context.Context) error
}

type noWorkers struct{ stopped chan struct{} }

func (w noWorkers) Stop(context.Context) error {
	close(w.stopped)
	return nil
}

// newWorkers ends the example by pressing Ctrl-C.
func newWorkers(*pgxpool.Pool, *ratelimit.Limiter) noWorkers {
	self, err := os.FindProcess(os.Getpid())
	if err == nil {
		err = self.Signal(os.Interrupt)
	}
	if err != nil {
		panic(err)
	}
	return noWorkers{make(chan struct{})}
}

func shop(*ratelimit.Limiter, ratelimit.DB) http.Handler { return http.NewServeMux() }

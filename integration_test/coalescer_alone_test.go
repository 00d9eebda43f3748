package integration_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// TestCallsThatShareNoStatementGoToThePool, although both places of the Coalescer are taken. Close waits for them.
func TestCallsThatShareNoStatementGoToThePool(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limiter, clock := newLimiter()
	sharded := slow("sharded", 10, ratelimit.Shards(3))
	window := ratelimit.FixedWindow("window", 10, time.Hour)
	bucket := slow("bucket", 10)
	release := holdFlights(t, coalescer, pool)
	for name, do := range map[string]func() error{
		"shards": func() error {
			_, err := limiter.Consume(t.Context(), coalescer, sharded.Key("a"), bucket.Key("a"))
			return err
		},
		"charge":  func() error { _, err := limiter.Charge(t.Context(), coalescer, sharded.Key("a")); return err },
		"up to":   func() error { _, err := limiter.Consume(t.Context(), coalescer, bucket.Key("b").UpTo(3)); return err },
		"reserve": func() error { _, err := limiter.Consume(t.Context(), coalescer, window.Key("a").Reserve()); return err },
		"several": func() error {
			_, err := limiter.Consume(t.Context(), coalescer, bucket.Key("c").Reserve(), bucket.Key("d").Reserve())
			return err
		},
		"wait": func() error { _, err := limiter.Wait(t.Context(), coalescer, window.Key("b")); return err },
	} {
		if err := do(); err != nil { // it would wait for the held places
			t.Errorf("%s: %v", name, err)
		}
	}
	release()

	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), tx, sharded.Key("a").Count(5)); err != nil {
		t.Fatal(err)
	}
	clock.Advance(time.Microsecond)
	var wg sync.WaitGroup
	var closed, decided atomic.Bool
	wg.Go(func() {
		if _, err := limiter.Consume(t.Context(), coalescer, sharded.Key("a").Count(2)); err != nil {
			t.Error(err)
		}
		decided.Store(true)
	})
	waiting(t, pool, 1)
	wg.Go(func() {
		coalescer.Close()
		closed.Store(true)
	})
	eventually(t, "the Coalescer takes no more calls", func() bool {
		_, err := limiter.Consume(t.Context(), coalescer, sharded.Key("b"))
		return errors.Is(err, ratelimit.ErrClosed)
	})
	time.Sleep(20 * time.Millisecond)
	if closed.Load() {
		t.Error("Close did not wait for a call that has its own statement")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if !decided.Load() {
		t.Error("the call was not decided")
	}
}

package integration_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// Calls are decided together only if their clocks show the same time.
func TestCoalescerDecidesEachCallByItsOwnClock(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	results, errs := make([]ratelimit.Result, 6), make([]error, 6)
	release := holdFlights(t, coalescer, pool)
	var wg sync.WaitGroup
	at := func(i int) time.Time { return noon.Add(time.Duration(i/2) * time.Minute) }
	for i := range results {
		limiter := &ratelimit.Limiter{Clock: func() time.Time { return at(i) }}
		a := newArrival(t.Context())
		wg.Go(func() { results[i], errs[i] = limiter.Consume(a, coalescer, limit.Key(fmt.Sprint(i))) })
		<-a.arrived
	}
	release()
	wg.Wait()
	for i, result := range results {
		if errs[i] != nil || !result.At.Equal(at(i)) {
			t.Errorf("call %d: %v, decided at %v, want %v", i, errs[i], result.At, at(i))
		}
	}
}

// Tokens that were refilled while a statement waited count.
func TestCoalescerReadsTheClockAfterWaiting(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, 200*time.Millisecond)
	k, other := limit.Key("k"), ratelimit.TokenBucket("other", 2, time.Hour).Key("k")
	t.Run("batch", func(t *testing.T) { refilledWhileWaiting(t, false, k, k, other) })
	t.Run("batch, with a row", func(t *testing.T) { refilledWhileWaiting(t, true, k, k, other) })
	t.Run("keys", func(t *testing.T) { refilledWhileWaiting(t, true, k, k, limit.Key("other")) })
	t.Run("sum", func(t *testing.T) { refilledWhileWaiting(t, false, k, k) })
}

func refilledWhileWaiting(t *testing.T, rows bool, requests ...ratelimit.Request) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	var limiter ratelimit.Limiter
	if rows { // otherwise the transaction makes the row
		for _, request := range slices.Compact(slices.Clone(requests)) {
			if _, err := limiter.Consume(t.Context(), pool, request.Count(0)); err != nil {
				t.Fatal(err)
			}
		}
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release := holdFlights(t, coalescer, pool)
	if _, err := limiter.Consume(t.Context(), tx, requests[0].Count(2)); err != nil {
		t.Fatal(err)
	}
	f := enqueue(t, coalescer, nil, requests...)
	release()
	waiting(t, pool, 1)
	time.Sleep(250 * time.Millisecond) // by the database's clock, too
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.wg.Wait()
	for _, err := range f.errs {
		if err != nil {
			t.Error(err)
		}
	}
}

package integration_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// With a pace, the first call is sent at once. Later calls share a statement when it is due.
func TestCoalescerPace(t *testing.T) {
	t.Parallel()
	const pace = 2 * time.Second
	pool := newPool(t, 4)
	var mu sync.Mutex
	var batches []int
	coalescer := &ratelimit.Coalescer{Pool: pool, Pace: pace, OnBatch: func(calls int) {
		mu.Lock()
		defer mu.Unlock()
		batches = append(batches, calls)
	}}
	limit := slow("limit", 100)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("other")); err != nil { // this makes its row
		t.Fatal(err)
	}
	begin := time.Now()
	if _, err := limiter.Consume(t.Context(), coalescer, limit.Global()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took >= pace {
		t.Errorf("the first call took %v", took)
	}
	// A caller that leaves before that has taken nothing.
	ctx, cancel := context.WithTimeout(t.Context(), pace/20)
	defer cancel()
	if _, err := limiter.Consume(ctx, coalescer, limit.Global()); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("%v, want only the context's error", err)
	}
	f := enqueue(t, coalescer, nil, limit.Global(), limit.Global(), limit.Key("other"))
	f.wg.Wait()
	if took := time.Since(begin); took < pace {
		t.Errorf("the next statement began at %v", took)
	}
	if err := errors.Join(f.errs...); err != nil || remaining(t, pool, limit.Global()) > 97.1 {
		t.Errorf("%v; %v tokens are left, want 97", err, remaining(t, pool, limit.Global()))
	}
	coalescer.Close()
	if !slices.Equal(batches, []int{1, 3}) {
		t.Errorf("statements for %v calls, want 1 and 3", batches)
	}
}

// Under any load, there are no more statements than the pace allows. All calls are decided as without a pace.
func TestCoalescerPaceUnderLoad(t *testing.T) {
	t.Parallel()
	const pace, calls = 20 * time.Millisecond, 4000
	pool := newPool(t, 4)
	var statements, decided, granted atomic.Int64
	coalescer := &ratelimit.Coalescer{Pool: pool, Pace: pace, OnBatch: func(calls int) {
		statements.Add(1)
		decided.Add(int64(calls))
	}}
	limit := slow("limit", calls/4)
	var limiter ratelimit.Limiter
	begin := time.Now()
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			for range calls / 100 {
				switch _, err := limiter.Consume(t.Context(), coalescer, limit.Global()); {
				case err == nil:
					granted.Add(1)
				case !denied(err):
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	coalescer.Close()
	took := time.Since(begin)
	if most := int64(took/pace) + 1; statements.Load() > most || decided.Load() != calls || granted.Load() != calls/4 {
		t.Errorf("%d statements in %v, at most %d; %d calls decided, %d granted", statements.Load(), took, most, decided.Load(), granted.Load())
	}
}

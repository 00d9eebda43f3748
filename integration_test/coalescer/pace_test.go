package coalescer_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// With a pace, the first call is sent at once. Later calls share a statement when it is due.
func TestCoalescerPace(t *testing.T) {
	t.Parallel()
	const pace = 2 * time.Second
	pool := harness.NewPool(t, 4)
	var mu sync.Mutex
	var batches []int
	coalescer := &ratelimit.Coalescer{Pool: pool, Pace: pace, OnBatch: func(calls int) {
		mu.Lock()
		defer mu.Unlock()
		batches = append(batches, calls)
	}}
	limit := harness.Slow("limit", 100)
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
	f := harness.Enqueue(t, coalescer, nil, limit.Global(), limit.Global(), limit.Key("other"))
	f.Wg.Wait()
	if took := time.Since(begin); took < pace {
		t.Errorf("the next statement began at %v", took)
	}
	if err := errors.Join(f.Errs...); err != nil || harness.Remaining(t, pool, limit.Global()) > 97.1 {
		t.Errorf("%v; %v tokens are left, want 97", err, harness.Remaining(t, pool, limit.Global()))
	}
	harness.CloseCoalescer(t, coalescer)
	if !slices.Equal(batches, []int{1, 3}) {
		t.Errorf("statements for %v calls, want 1 and 3", batches)
	}
}

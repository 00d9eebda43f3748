package coalescer_test

import (
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

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
	pool := harness.NewPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
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
	release := harness.HoldFlights(t, coalescer, pool)
	if _, err := limiter.Consume(t.Context(), tx, requests[0].Count(2)); err != nil {
		t.Fatal(err)
	}
	f := harness.Enqueue(t, coalescer, nil, requests...)
	release()
	harness.Waiting(t, pool, 1)
	time.Sleep(250 * time.Millisecond) // by the database's clock, too
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.Wg.Wait()
	for _, err := range f.Errs {
		if err != nil {
			t.Error(err)
		}
	}
}

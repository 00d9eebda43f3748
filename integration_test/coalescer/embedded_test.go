package coalescer_test

import (
	"math"
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// A caller's struct that embeds a Coalescer has its methods, and coalesces.
func TestAStructThatEmbedsACoalescerCoalesces(t *testing.T) {
	t.Parallel()
	type named struct {
		*ratelimit.Coalescer
		name string
	}
	pool, s := harness.Traced(t, harness.NewPool(t, 2), 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	db := named{coalescer, "limits"}
	var limiter ratelimit.Limiter
	limit := harness.Slow("limit", 100)
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.Enqueue(t, db, nil, limit.Key("a"), limit.Key("b"), limit.Key("a"))
	release()
	f.Wg.Wait()
	for i, err := range f.Errs {
		if err != nil {
			t.Errorf("call %d on %s: %v", i, db.name, err)
		}
	}
	if n := s.Count("ratelimit._coalesce"); n != 1 {
		t.Errorf("%d statements for 3 calls, want 1", n)
	}
	if left := math.Floor(harness.Remaining(t, db, limit.Key("a"))); left != 98 {
		t.Errorf("%v tokens left of 100, want 98", left)
	}
	if _, err := limiter.Sweep(t.Context(), db, limit); err != nil {
		t.Errorf("sweep on %s: %v", db.name, err)
	}
}

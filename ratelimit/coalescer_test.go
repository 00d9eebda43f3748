package ratelimit_test

import (
	"errors"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestACoalescerWithoutAPoolIsInvalid(t *testing.T) {
	t.Parallel()
	ctx, limiter, coalescer := t.Context(), ratelimit.Limiter{}, &ratelimit.Coalescer{}
	limit := ratelimit.TokenBucket("limit", 1, time.Second)
	errs := map[string]error{"reset": limiter.Reset(ctx, coalescer, limit.Global())}
	_, errs["consume"] = limiter.Consume(ctx, coalescer, limit.Global())
	_, errs["check"] = limiter.Check(ctx, coalescer, limit.Global())
	_, errs["charge"] = limiter.Charge(ctx, coalescer, limit.Global())
	_, errs["refund"] = limiter.Refund(ctx, coalescer, "", limit.Global())
	_, errs["sweep"] = limiter.Sweep(ctx, coalescer, limit)
	for verb, err := range errs {
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", verb, err)
		}
	}
	if err := coalescer.Close(ctx); err != nil {
		t.Error(err)
	}
	for name, db := range map[string]ratelimit.DB{"nil": (*ratelimit.Coalescer)(nil), "embedded nil": struct{ *ratelimit.Coalescer }{}} {
		if _, err := limiter.Consume(ctx, db, limit.Global()); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("consume on %s: %v, want ErrInvalid", name, err)
		}
		if _, err := limiter.Sweep(ctx, db, limit); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("sweep on %s: %v, want ErrInvalid", name, err)
		}
	}
}

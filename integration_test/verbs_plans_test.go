package integration_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// The plans of one limit.
var (
	free       = ratelimit.TokenBucket("exports", 0, time.Hour)
	pro        = ratelimit.TokenBucket("exports", 100, time.Hour)
	enterprise = ratelimit.Unlimited("exports")
)

// denyByPolicy consumes and checks, which must be denied for good.
func (w world) denyByPolicy(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	before := w.rows()
	result := w.deny(requests...)
	checked, err := w.limiter.Check(w.Context(), w.db, requests...)
	for _, denied := range []ratelimit.Result{result, checked} {
		if !errors.Is(err, ratelimit.ErrDenied) || !denied.At.Equal(w.clock.now) || !denied.RetryAt.IsZero() || denied.RetryAfter != math.MaxInt64 || denied.Receipt() != "" {
			w.Fatalf("%+v, %v, want a denial for good", denied, err)
		}
		for _, s := range denied.Requests {
			if !s.OK && (!s.RetryAt.IsZero() || s.Remaining != 0) {
				w.Fatalf("%+v, want a denial for good", s)
			}
		}
	}
	if text := err.Error(); !strings.HasPrefix(text, "ratelimit: denied by policy: exports (") || strings.Contains(text, "retry") {
		w.Fatalf("the error says %q", text)
	}
	if after := w.rows(); after != before {
		w.Fatalf("the table was\n%s\nand is\n%s", before, after)
	}
	return result
}

func TestARateOfZeroDeniesByPolicy(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			free, ratelimit.FixedWindow("exports", 0, time.Hour, ratelimit.Start(noon), ratelimit.Capacity(0), ratelimit.MaxReserved(0)),
			ratelimit.CalendarWindow("exports", 0, ratelimit.Month, ratelimit.Shards(3)),
		} {
			w.denyByPolicy(limit.Key("ann"))
			w.denyByPolicy(limit.Key("ann").Count(1e15).Reserve())
			w.denyByPolicy(limit.Global().Count(1e-15))
			w.holds(limit.Key("ann"), 0)
			granted := w.grant(limit.Key("ann").Count(0))
			if !granted.RetryAt.Equal(noon) || !granted.ResetAt.IsZero() || granted.Remaining != 0 {
				w.Fatalf("0 tokens: %+v", granted)
			}
			w.refuse(ratelimit.ErrInvalid, limit.Key("ann").Count(-1))
			w.refuse(ratelimit.ErrInvalid, limit.Key(""))
		}
	})
}

package holds_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// once wants a grant: repeated, or not.
func (h holder) once(repeated bool, id string, requests ...ratelimit.Request) ratelimit.Result {
	h.Helper()
	first, result, err := h.limits.Once(h.Context(), h.db, id, time.Hour, requests...)
	if err != nil || !result.OK || first == repeated || result.Repeated != repeated || (result.Receipt() == "") != repeated {
		h.Fatalf("Once %s: %+v, %v, want repeated: %v", id, result, err, repeated)
	}
	for _, s := range result.Requests {
		if want := s.Count; !s.OK || repeated && s.Taken != 0 || !repeated && s.Taken != want {
			h.Fatalf("Once %s: %+v", id, s)
		}
	}
	return result
}

// notOnce wants a denial.
func (h holder) notOnce(reason ratelimit.Reason, id string, requests ...ratelimit.Request) {
	h.Helper()
	first, result, err := h.limits.Once(h.Context(), h.db, id, time.Hour, requests...)
	var denial *ratelimit.DeniedError
	if first || !errors.As(err, &denial) || denial.Reason != reason || result.OK || result.Receipt() != "" {
		h.Fatalf("Once %s: %+v, %v, want a denial, %s", id, result, err, reason)
	}
}

func TestOnceCountsOnce(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		a, b := harness.Slow("a", 10).Key("k"), harness.Slow("b", 10).Key("k")
		first := h.once(false, "event 1", a.Count(4))
		h.once(true, "event 1", a.Count(4))
		if again := h.once(true, "event 1", a.Count(1), b.Count(2)); again.Requests[0].Count != 4 || again.Requests[1].Count != 2 {
			t.Errorf("with other counts: %+v", again)
		}
		h.has(a, 6)
		h.once(false, "event 1", b)                                  // each limit by itself,
		h.once(false, "event 1", harness.Slow("a", 10).Key("other")) // and each key
		h.notOnce(ratelimit.ReasonQuota, "event 2", a.Count(7))
		h.has(a, 6)
		h.once(false, "event 2", a.Count(6)) // no denial is remembered
		h.notOnce(ratelimit.ReasonQuota, "event 3", a)
		h.once(true, "event 1", a.Count(4)) // before any denial
		h.once(true, "event 2", a, harness.Slow("c", 10).Key("k"))
		h.has(harness.Slow("c", 10).Key("k"), 10)

		// A refund leaves the id counted.
		if _, err := h.limits.Refund(t.Context(), db, first.Receipt()); err != nil {
			t.Fatal(err)
		}
		h.has(a, 4)
		h.once(true, "event 1", a.Count(4))

		h.clock.Advance(time.Hour - time.Microsecond)
		h.once(true, "event 1", a)
		h.clock.Advance(time.Microsecond)
		h.once(false, "event 1", a)
		h.once(true, "event 1", a)
	})
}

func TestOnceOfEveryKind(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		for i, limit := range []ratelimit.Limit{
			ratelimit.FixedWindow("window", 10, time.Hour), ratelimit.CalendarWindow("month", 10, ratelimit.Month),
			ratelimit.TokenBucket("sharded", 10, 100*time.Hour, ratelimit.Shards(4)), ratelimit.Unlimited("unlimited"),
		} {
			id, r := fmt.Sprint("event ", i), limit.Global()
			first := h.once(false, id, r.Count(6))
			h.once(true, id, r.Count(6))
			if limit.Name() == "unlimited" {
				continue
			}
			h.has(r, 4)
			if _, err := h.limits.Refund(t.Context(), db, first.Receipt(), r.Count(5)); err != nil {
				t.Fatal(err)
			}
			h.has(r, 9)
			h.once(false, id+" again", r.Count(9))
			h.once(true, id+" again", r.Count(9))
			h.notOnce(ratelimit.ReasonQuota, "another", r)
		}
		// Several, all or nothing.
		a, b := harness.Slow("a", 10).Key("k"), harness.Slow("b", 10).Key("k")
		h.once(false, "both", b.Count(3), a.Count(2), a.Count(1), ratelimit.Unlimited("unlimited").Global())
		h.once(true, "both", a.Count(3), b.Count(3))
		h.notOnce(ratelimit.ReasonQuota, "neither", a, b.Count(8))
		h.notOnce(ratelimit.ReasonPlan, "neither", a, ratelimit.TokenBucket("no plan", 0, time.Hour).Key("k"))
		h.has(a, 7)
		h.has(b, 7)
	})
}

// TestOnceAndHold: they know each other's ids.
func TestOnceAndHold(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		a := ratelimit.FixedWindow("a", 10, 1000*time.Hour).Key("k")
		h.once(false, "counted", a)
		h.refused(ratelimit.ReasonSettled, "counted", time.Minute, a)
		h.refused(ratelimit.ReasonSettled, "counted", ratelimit.Forever, a)
		h.lost("counted", a.Count(1)) // nobody settles it,
		h.release("counted", a)       // nor makes it be forgotten
		h.once(true, "counted", a)
		h.has(a, 9)

		held := h.hold("held", time.Minute, a.Count(3))
		h.once(true, "held", a)
		h.settle(held.Token, []float64{2}, a.Count(1))
		h.once(true, "held", a)
		h.has(a, 8)

		// What a hold held comes back when it has expired, whoever asks for its id.
		held = h.hold("expired", time.Minute, a.Count(8))
		h.clock.Advance(time.Minute)
		h.once(false, "expired", a.Count(2))
		h.refused(ratelimit.ReasonSettled, "expired", time.Minute, a) // it is no hold now
		h.lost(held.Token, a.Count(1))
		h.release(held.Token, a.Count(0))
		h.once(true, "expired", a)
		h.has(a, 6)
		held = h.hold("lapsed", time.Minute, a.Count(6))
		h.clock.Advance(time.Minute)
		h.once(false, "another", a)
		h.once(false, "lapsed", a)
		h.lost(held.Token, a.Count(1))
		h.has(a, 4)
	})
}

func TestOnceRefuses(t *testing.T) {
	pool := harness.NewPool(t, 2)
	limits := new(ratelimit.Limiter)
	a := harness.Slow("a", 10).Key("k")
	for name, row := range map[string]struct {
		id       string
		keep     time.Duration
		requests []ratelimit.Request
		text     string
	}{
		"no id":      {"", time.Hour, []ratelimit.Request{a}, "id"},
		"a token":    {"~x", time.Hour, []ratelimit.Request{a}, "id"},
		"no keep":    {"x", 0, []ratelimit.Request{a}, "keep 0s"},
		"forever":    {"x", ratelimit.Forever, []ratelimit.Request{a}, "keep Forever is not between 100ms and 8784h0m0s"},
		"too long":   {"x", 367 * 24 * time.Hour, []ratelimit.Request{a}, "keep"},
		"too short":  {"x", 99 * time.Millisecond, []ratelimit.Request{a}, "keep"},
		"slots":      {"x", time.Hour, []ratelimit.Request{ratelimit.Slots("slots", 2).Key("k")}, "which only Hold takes"},
		"no request": {"x", time.Hour, nil, "no requests"},
	} {
		if _, _, err := limits.Once(t.Context(), pool, row.id, row.keep, row.requests...); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), row.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestOnceUnderABlock denies, also an id that was counted. An unlimited key counts ids.
func TestOnceUnderABlock(t *testing.T) {
	pool := harness.NewPool(t, 2)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	a := harness.Slow("a", 10).Key("k")
	load := func(sql string) {
		harness.MustExec(t, pool, sql)
		if err := follow.Load(t.Context(), limits); err != nil {
			t.Fatal(err)
		}
	}
	load("SELECT ratelimit.unlimited('a', 'k', forever => true)")
	h := holder{t, limits, pool, nil}
	h.once(false, "event", a.Count(100))
	h.once(true, "event", a.Count(100))
	if got := harness.Lines(t, pool, "SELECT state, unit, count, token FROM ratelimit.holds"); got != "(once,none,0,)" {
		t.Error(got)
	}
	load("SELECT ratelimit.block('a', 'k', forever => true)")
	h.notOnce(ratelimit.ReasonBlock, "event", a)
}

// inLevel runs fn on the pool, or in a transaction.
func inLevel(t *testing.T, limits *ratelimit.Limiter, pool *pgxpool.Pool, level pgx.TxIsoLevel, fn func(db ratelimit.DB) error) error {
	t.Helper()
	if level == "" {
		return fn(pool)
	}
	return limits.InTx(t.Context(), pool, func(_ context.Context, tx pgx.Tx) error { return fn(tx) }, ratelimit.Isolation(level), ratelimit.Attempts(1000))
}

// TestOnceOnACoalescer: a call about an id shares no statement with others.
func TestOnceOnACoalescer(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	c := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, c)
	limits, a := new(ratelimit.Limiter), harness.Slow("a", 1000).Key("k")
	var wait sync.WaitGroup
	for range 40 {
		wait.Go(func() {
			if _, _, err := limits.Once(t.Context(), c, "event", time.Hour, a); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if got := harness.ReadBalance(t, limits, pool, a); got < 999 || got > 1000 {
		t.Errorf("%v tokens are left", got)
	}
}

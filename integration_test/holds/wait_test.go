package holds_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// Callers of one Limiter are served in the order in which they came. Those of another are served, too.
func TestHoldsAreWaitedForInTurn(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	slots := ratelimit.Slots("slots", 1)
	var mu sync.Mutex
	var order []int
	seen := map[string]int{}
	limits := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) {
		mu.Lock()
		defer mu.Unlock()
		seen[fmt.Sprint(d.Verb, " ", d.Err == nil)]++
	}}
	first, err := limits.Hold(t.Context(), pool, "acme/first", time.Minute, slots.Key("acme"))
	harness.Succeeds(t, err)
	patient := ratelimit.WaitUpTo(t.Context(), 10*time.Minute)
	var waiting sync.WaitGroup
	for i := range 5 {
		waiting.Go(func() {
			if err := limits.During(patient, pool, fmt.Sprint("acme/", i), time.Minute, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				_, err := limits.Hold(ctx, pool, "acme/inside", time.Minute, slots.Key("acme")) // waits for nothing
				if !harness.Denied(err) {
					t.Error(err)
				}
				return nil, nil
			}, slots.Key("acme")); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(50 * time.Millisecond)
	}
	var others sync.WaitGroup
	others.Go(func() { // another process
		held, err := new(ratelimit.Limiter).Hold(patient, pool, "acme/other", time.Minute, slots.Key("acme"))
		harness.Succeeds(t, err)
		harness.Succeeds(t, harness.Second(new(ratelimit.Limiter).Settle(t.Context(), pool, held.Token)))
	})
	_, err = limits.Hold(ratelimit.WaitUpTo(t.Context(), 300*time.Millisecond), pool, "acme/hasty", time.Minute, slots.Key("acme"))
	if denial, is := errors.AsType[*ratelimit.DeniedError](err); !is || denial.Reason != ratelimit.ReasonQuota {
		t.Errorf("after its time: %v", err)
	}
	gone, leave := context.WithCancel(patient)
	time.AfterFunc(200*time.Millisecond, leave)
	if _, err := limits.Hold(gone, pool, "acme/gone", time.Minute, slots.Key("acme")); !errors.Is(err, context.Canceled) || harness.Denied(err) {
		t.Errorf("a caller that left: %v", err)
	}
	harness.Succeeds(t, harness.Second(limits.Release(t.Context(), pool, first.Token)))
	waiting.Wait()
	others.Wait()
	if !slices.IsSorted(order) || len(order) != 5 {
		t.Errorf("served in the order %v", order)
	}
	if seen["hold true"] != 6 || seen["hold false"] != 5+2 { // each is seen once
		t.Errorf("observed %v", seen)
	}
}

// What waiting does not mend comes at once.
func TestWhatWaitingDoesNotMendComesAtOnce(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	slots, rate := ratelimit.Slots("slots", 1), ratelimit.TokenBucket("rate", 1, time.Hour)
	limits := new(ratelimit.Limiter)
	patient := ratelimit.WaitUpTo(t.Context(), 10*time.Minute)
	held, err := limits.Hold(patient, pool, "acme/1", time.Minute, slots.Key("acme"))
	harness.Succeeds(t, err)
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, rate.Key("acme"))))
	began := time.Now()
	for what, row := range map[string]struct {
		id     string
		asks   []ratelimit.Request
		reason ratelimit.Reason
	}{
		"an id that is held":       {"acme/1", []ratelimit.Request{slots.Key("acme")}, ratelimit.ReasonHeld},
		"a plan":                   {"acme/2", []ratelimit.Request{slots.Key("acme"), ratelimit.Slots("none", 0).Key("acme")}, ratelimit.ReasonPlan},
		"tokens of another hour":   {"acme/2", []ratelimit.Request{rate.Key("acme")}, ratelimit.ReasonQuota},
		"these, and a slot":        {"acme/2", []ratelimit.Request{slots.Key("acme"), rate.Key("acme")}, ratelimit.ReasonQuota},
		"more than there ever are": {"acme/2", []ratelimit.Request{slots.Key("acme").Count(2)}, ""},
	} {
		_, err := limits.Hold(patient, pool, row.id, time.Minute, row.asks...)
		denial, is := errors.AsType[*ratelimit.DeniedError](err)
		if is != (row.reason != "") || is && denial.Reason != row.reason || err == nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := limits.Hold(patient, tx, "acme/2", time.Minute, slots.Key("acme")); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "WaitUpTo in a transaction") {
		t.Error(err)
	}
	if _, err := limits.Hold(ratelimit.WaitUpTo(t.Context(), 5), pool, "acme/2", time.Minute, slots.Key("acme")); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "WaitUpTo of 5ns is less than 1ms") {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Minute {
		t.Errorf("it took %v", took)
	}
	soon := ratelimit.TokenBucket("soon", 1, time.Second)
	for range 2 { // tokens that come in time
		if _, err := limits.Hold(patient, pool, fmt.Sprint("acme/", time.Now()), time.Minute, soon.Key("acme")); err != nil {
			t.Error(err)
		}
	}
	harness.Succeeds(t, harness.Second(limits.Release(t.Context(), pool, held.Token)))
	held, err = limits.Hold(patient, pool, "acme/1", time.Minute, rate.Key("globex")) // tokens that are held may come back
	harness.Succeeds(t, err)
	time.AfterFunc(100*time.Millisecond, func() {
		harness.Succeeds(t, harness.Second(new(ratelimit.Limiter).Release(context.Background(), pool, held.Token, rate.Key("globex"))))
	})
	harness.Succeeds(t, harness.Second(limits.Hold(patient, pool, "acme/2", time.Minute, rate.Key("globex"))))

	calls := ratelimit.TokenBucket("calls", 1, time.Hour, ratelimit.Capacity(10)).Key("acme") // tokens whose hold ends in a pause
	harness.Succeeds(t, harness.Second(limits.Hold(patient, pool, "dead", time.Hour, calls.Count(10))))
	harness.Succeeds(t, harness.Second(limits.Pause(t.Context(), pool, 2*time.Second, calls)))
	harness.MustExec(t, pool, "UPDATE ratelimit.holds SET until = clock_timestamp() WHERE id = 'dead'")
	harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = clock_timestamp() WHERE name = 'calls'")
	harness.Succeeds(t, harness.Second(limits.Hold(patient, pool, "acme/3", time.Minute, calls.Count(5))))
}

// A Hold of a token extends it, whatever is held: it lasts until ttl from now, at least.
func TestAHoldIsExtendedByItsToken(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limits, clock := harness.NewLimiter()
	slots, budget := ratelimit.Slots("slots", 1), ratelimit.TokenBucket("budget", 10, time.Hour)
	held, err := limits.Hold(t.Context(), pool, "acme/1", time.Minute, slots.Key("acme"), budget.Key("acme").Count(4))
	harness.Succeeds(t, err)
	clock.Advance(50 * time.Second)
	for _, row := range []struct{ ttl, want time.Duration }{{5 * time.Minute, 5 * time.Minute}, {time.Second, 5 * time.Minute}} { // never shorter
		again, err := limits.Hold(t.Context(), pool, held.Token, row.ttl)
		if err != nil || again.Token != held.Token || !again.At.Equal(clock.At) || !again.Until.Equal(clock.At.Add(row.want)) {
			t.Errorf("%+v, %v", again, err)
		}
		if until := harness.Scan[time.Time](t, pool, "SELECT min(until) FROM ratelimit.holds"); !until.Equal(clock.At.Add(row.want)) {
			t.Errorf("until %v", until)
		}
	}
	clock.Advance(4 * time.Minute)
	if _, err := limits.Hold(t.Context(), pool, "acme/2", time.Minute, slots.Key("acme")); !harness.Denied(err) {
		t.Error(err)
	}
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	for what, ask := range map[string]func() error{
		"in a transaction": func() error { return harness.Second(limits.Hold(t.Context(), tx, held.Token, time.Minute)) },
		"with requests": func() error {
			return harness.Second(limits.Hold(t.Context(), pool, held.Token, time.Minute, slots.Key("acme")))
		},
		"without an end":        func() error { return harness.Second(limits.Hold(t.Context(), pool, held.Token, ratelimit.Forever)) },
		"a token that is wrong": func() error { return harness.Second(limits.Hold(t.Context(), pool, held.Token[:40], time.Minute)) },
	} {
		if err := ask(); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	harness.Succeeds(t, harness.Second(limits.Settle(t.Context(), pool, held.Token, budget.Key("acme").Count(4))))
	if _, err := limits.Hold(t.Context(), pool, held.Token, time.Minute); !errors.Is(err, ratelimit.ErrHoldLost) {
		t.Errorf("after it was settled: %v", err)
	}
	// The tokens come back to who asks after its end, and the slot does not. The error names what is lost.
	held, err = limits.Hold(t.Context(), pool, "acme/3", time.Minute, slots.Key("globex"), budget.Key("globex").Count(4))
	harness.Succeeds(t, err)
	clock.Advance(2 * time.Minute)
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, budget.Key("globex"))))
	if _, err := limits.Hold(t.Context(), pool, held.Token, time.Minute); !errors.Is(err, ratelimit.ErrHoldLost) ||
		!strings.HasSuffix(err.Error(), `limit "budget": it was ended, or given back; the others are extended: Release the Token`) {
		t.Errorf("of its tokens alone: %v", err)
	}
}

// All that a worker holds, of one limit, is ended by its tokens, or by what its ids begin with.
func TestAllHoldsOfAWorkerEnd(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	slots := ratelimit.Slots("renders", 5)
	limits := new(ratelimit.Limiter)
	harness.Succeeds(t, limits.Publish(t.Context(), pool, "shop", slots))
	for i := range 5 {
		harness.Succeeds(t, harness.Second(limits.Hold(t.Context(), pool, fmt.Sprintf("worker-%d/acme/render/%d", i/3, i), time.Hour, slots.Key("acme"))))
	}
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/holds.md", "starts_with(id, 'worker-1/')"))
	if free := harness.ReadBalance(t, limits, pool, slots.Key("acme")); free != 2 {
		t.Errorf("%v slots are free", free)
	}
}

// A settled id is known for a day. Once of an unlimited limit knows it for as long as the caller says.
func TestAnIDIsKnownForLongerByOnce(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limits, clock := harness.NewLimiter()
	slots, handled := ratelimit.Slots("slots", 1), ratelimit.Unlimited("handled")
	for day, repeated := range []bool{false, true, true, false} {
		held, err := limits.Hold(t.Context(), pool, "stripe/1", time.Minute, slots.Key("acme"))
		harness.Succeeds(t, err)
		_, result, err := limits.Once(t.Context(), pool, "stripe/1", 72*time.Hour, handled.Global())
		if err != nil || result.Repeated != repeated {
			t.Errorf("day %d: %+v, %v", day, result, err)
		}
		harness.Succeeds(t, harness.Second(limits.Settle(t.Context(), pool, held.Token)))
		clock.Advance(25 * time.Hour)
	}
}

package holds_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// holder is a limiter on a handle, for tests of holds.
type holder struct {
	*testing.T
	limits *ratelimit.Limiter
	db     harness.Handle
	clock  *harness.Clock
}

func newHolder(t *testing.T, db harness.Handle) holder {
	limits, clock := harness.NewLimiter()
	return holder{t, limits, db, clock}
}

// hold wants a grant.
func (h holder) hold(id string, ttl time.Duration, requests ...ratelimit.Request) ratelimit.Held {
	h.Helper()
	held, err := h.limits.Hold(h.Context(), h.db, id, ttl, requests...)
	if err != nil || held.Repeated || held.Token == "" {
		h.Fatalf("Hold %s: %+v, %v", id, held, err)
	}
	if want := held.At.Add(ttl); ttl > 0 && !held.Until.Equal(want) || ttl < 0 && !held.Until.IsZero() {
		h.Fatalf("Hold %s ends at %v, at %v for %v", id, held.Until, held.At, ttl)
	}
	return held
}

// refused wants a denial with this reason, and returns when it says to try again.
func (h holder) refused(reason ratelimit.Reason, id string, ttl time.Duration, requests ...ratelimit.Request) time.Time {
	h.Helper()
	held, err := h.limits.Hold(h.Context(), h.db, id, ttl, requests...)
	var denial *ratelimit.DeniedError
	if !errors.As(err, &denial) || denial.Reason != reason || held.Token != "" || held.Requests != nil {
		h.Fatalf("Hold %s: %+v, %v, want a denial, %s", id, held, err, reason)
	}
	if reason == ratelimit.ReasonQuota && strings.Contains(err.Error(), "by policy") {
		h.Fatalf("Hold %s: %v", id, err)
	}
	return denial.RetryAt
}

// settle wants a Settle to give so much back, of each request; below zero, to charge it.
func (h holder) settle(token string, moved []float64, requests ...ratelimit.Request) {
	h.Helper()
	result, err := h.limits.Settle(h.Context(), h.db, token, requests...)
	if err != nil || !result.OK || result.Repeated || len(result.Requests) != len(moved) {
		h.Fatalf("Settle: %+v, %v", result, err)
	}
	for i, s := range result.Requests {
		if s.Refunded-s.Taken != moved[i] || min(s.Refunded, s.Taken) != 0 {
			h.Fatalf("Settle: %v came back and %v was charged of %s, want %v", s.Refunded, s.Taken, s.Limit.Name(), moved[i])
		}
	}
}

// lost wants a Settle whose hold is not there.
func (h holder) lost(token string, requests ...ratelimit.Request) ratelimit.Result {
	h.Helper()
	result, err := h.limits.Settle(h.Context(), h.db, token, requests...)
	if !errors.Is(err, ratelimit.ErrHoldLost) || result.OK {
		h.Fatalf("Settle: %+v, %v, want ErrHoldLost", result, err)
	}
	return result
}

func (h holder) release(token string, requests ...ratelimit.Request) {
	h.Helper()
	if err := harness.Second(h.limits.Release(h.Context(), h.db, token, requests...)); err != nil {
		h.Fatal(err)
	}
}

// has wants a balance.
func (h holder) has(request ratelimit.Request, remaining float64) {
	h.Helper()
	if got := harness.ReadBalance(h, h.limits, h.db, request); got != remaining {
		h.Fatalf("the balance of %v is %v, want %v", request, got, remaining)
	}
}

func TestHoldsOfSlots(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		renders := ratelimit.Slots("renders", 2)
		acme := renders.Key("acme")
		h.has(acme, 2)
		one := h.hold("job 1", time.Minute, acme)
		if one.Remaining != 1 || one.Requests[0].Taken != 1 || !strings.HasPrefix(one.Token, "~") {
			t.Fatalf("%+v", one)
		}
		h.clock.Advance(10 * time.Second)
		two := h.hold("job 2", time.Minute, acme)
		h.has(acme, 0)
		if at := h.refused(ratelimit.ReasonQuota, "job 3", time.Minute, acme); !at.Equal(one.Until) {
			t.Fatalf("retry at %v, want %v", at, one.Until)
		}
		// The holder of the last slot is no stranger.
		if at := h.refused(ratelimit.ReasonHeld, "job 2", time.Minute, acme); !at.Equal(two.Until) {
			t.Fatalf("retry at %v, want %v", at, two.Until)
		}
		h.hold("job 1", time.Minute, renders.Key("other"))
		if long := h.hold("long", 366*24*time.Hour-time.Microsecond, renders.Key("other")); long.Until.Sub(long.At) != 366*24*time.Hour-time.Microsecond {
			t.Fatalf("held from %v until %v", long.At, long.Until)
		}
		h.release(one.Token)
		h.has(acme, 1)
		h.refused(ratelimit.ReasonHeld, "job 2", time.Minute, acme) // with room, too
		h.has(acme, 1)
		h.limits.Observer = func(_ context.Context, d ratelimit.Decision) {
			if !math.IsNaN(d.Result.Remaining) || !math.IsNaN(d.Result.Requests[0].Remaining) {
				t.Errorf("released nothing, and no row was read: %+v", d.Result)
			}
		}
		h.release(one.Token)
		h.limits.Observer = nil
		h.has(acme, 1)
		h.lost(one.Token, acme)
		three := h.hold("job 1", time.Minute, acme)
		h.lost(one.Token, acme) // another token
		h.release(one.Token, acme)
		h.has(acme, 0)
		h.settle(two.Token, []float64{1}, acme)
		h.has(acme, 1)
		if result, err := h.limits.Settle(t.Context(), db, two.Token, acme); err != nil || !result.OK || !result.Repeated || result.Remaining != 1 || result.Requests[0].Remaining != 1 {
			t.Fatalf("a second Settle: %+v, %v", result, err)
		}
		h.has(acme, 1)
		if at := h.refused(ratelimit.ReasonSettled, "job 2", time.Minute, acme); !at.IsZero() {
			t.Fatalf("retry at %v", at)
		}
		h.has(acme, 1)

		// An expired hold counts as free, and is given back when it is needed.
		h.hold("job 4", time.Hour, acme)
		h.clock.Advance(time.Minute)
		h.has(acme, 1)
		five := h.hold("job 5", time.Minute, acme)
		h.lost(three.Token, acme)
		h.has(acme, 0)
		h.clock.Advance(time.Minute)
		h.hold("job 5", time.Minute, acme) // its own
		h.lost(five.Token, acme)           // under another token
		h.has(acme, 0)
		h.clock.Advance(24 * time.Hour)
		h.hold("job 2", time.Minute, acme) // forgotten after a day
	})
}

func TestHoldsWithoutAnEnd(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		projects := ratelimit.Slots("projects", 2).Key("team")
		if held := h.hold("p1", ratelimit.Forever, projects); held.Token != "p1" {
			t.Fatalf("the token is %q", held.Token)
		}
		held, err := h.limits.Hold(t.Context(), db, "p1", ratelimit.Forever, projects.Count(2))
		if err != nil || !held.Repeated || held.Token != "p1" || held.Requests[0].Taken != 0 || held.Requests[0].Count != 1 {
			t.Fatalf("again: %+v, %v", held, err)
		}
		h.has(projects, 1)
		if at := h.refused(ratelimit.ReasonHeld, "p1", time.Minute, projects); !at.IsZero() {
			t.Fatalf("retry at %v", at)
		}
		// Another limit is not held under the id: it is no repetition.
		h.refused(ratelimit.ReasonHeld, "p1", ratelimit.Forever, projects, ratelimit.Slots("other", 1).Global())
		h.hold("p2", ratelimit.Forever, projects)
		h.clock.Advance(1000 * time.Hour)
		if at := h.refused(ratelimit.ReasonQuota, "p3", ratelimit.Forever, projects); !at.IsZero() {
			t.Fatalf("retry at %v", at)
		}
		if held, err := h.limits.Hold(t.Context(), db, "p2", ratelimit.Forever, projects); err != nil || !held.Repeated {
			t.Fatalf("again, when it is full: %+v, %v", held, err)
		}
		h.release("p2", projects)
		h.hold("p2", ratelimit.Forever, projects) // the id is free at once
		h.release("p1", projects)
		for id, held := range map[string]bool{"p1": false, "never": false, "p2": true} {
			if released, err := h.limits.Release(t.Context(), db, id, projects); err != nil || released != held {
				t.Fatalf("%q was released: %v, %v", id, released, err)
			}
		}
		h.has(projects, 2)
	})
}

func TestHoldsOfTokens(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		budget := ratelimit.FixedWindow("budget", 100, time.Hour, ratelimit.Start(harness.Noon))
		bucket := ratelimit.TokenBucket("bucket", 60, time.Hour, ratelimit.Capacity(100))
		monthly := ratelimit.CalendarWindow("monthly", 100, ratelimit.Month)
		for _, limit := range []ratelimit.Limit{budget, bucket, monthly} {
			r := limit.Global()
			token := h.hold("less", time.Minute, r.Count(60)).Token
			h.has(r, 40)
			h.settle(token, []float64{25}, r.Count(35))
			h.has(r, 65)
			token = h.hold("more", time.Minute, r.Count(20)).Token
			h.settle(token, []float64{-10}, r.Count(30))
			h.has(r, 35)
			token = h.hold("all", time.Minute, r.Count(5)).Token
			h.settle(token, []float64{0})
			h.has(r, 30)
			token = h.hold("nothing", time.Minute, r.Count(5)).Token
			h.release(token)
			h.has(r, 30)
			h.refused(ratelimit.ReasonQuota, "too much", time.Minute, r.Count(31))
		}

		// What nobody settled comes back.
		token := h.hold("dead", time.Minute, budget.Global().Count(30)).Token
		h.has(budget.Global(), 0)
		h.clock.Advance(time.Minute)
		h.has(budget.Global(), 30)
		other := h.hold("next", time.Minute, budget.Global().Count(20)).Token
		h.has(budget.Global(), 10)
		// It comes late: it kept nothing, so all that it used is charged.
		h.settle(token, []float64{-10}, budget.Global().Count(10))
		h.has(budget.Global(), 0)
		h.settle(other, []float64{5}, budget.Global().Count(15))
		h.clock.Advance(time.Minute)
		token = h.hold("too late", time.Minute, budget.Global().Count(5)).Token
		h.clock.Advance(time.Hour)
		h.hold("full", time.Minute, budget.Global().Count(100))
		h.settle(token, []float64{-45}, budget.Global().Count(50)) // nobody needed it: as if in time
	})
}

// TestHoldsSettleInTheNextWindow: what is left of a window that is over does not come back, and what is more is charged.
func TestHoldsSettleInTheNextWindow(t *testing.T) {
	h := newHolder(t, harness.ReusedPool(t, 2, 0))
	r := ratelimit.FixedWindow("budget", 100, time.Hour, ratelimit.Start(harness.Noon)).Global()
	less, more := h.hold("less", 2*time.Hour, r.Count(40)).Token, h.hold("more", 2*time.Hour, r.Count(40)).Token
	h.clock.Advance(time.Hour)
	h.has(r, 100)
	h.settle(less, []float64{0}, r.Count(10))
	h.settle(more, []float64{-5}, r.Count(45))
	h.has(r, 95)
}

func TestHoldsAreAllOrNothing(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		mine, all := ratelimit.Slots("mine", 2), ratelimit.Slots("all", 3).Global()
		budget := ratelimit.TokenBucket("budget", 1, 1000*time.Hour, ratelimit.Capacity(10)).Global()
		free := ratelimit.Unlimited("free").Global()
		a := h.hold("a", time.Minute, mine.Key("ann"), all, budget.Count(3), free)
		h.hold("b", time.Minute, mine.Key("ann"), all, budget.Count(3))
		h.refused(ratelimit.ReasonQuota, "c", time.Minute, mine.Key("ann"), all, budget.Count(3))
		h.refused(ratelimit.ReasonQuota, "c", time.Minute, mine.Key("bob"), all, budget.Count(5))
		h.has(all, 1)
		h.has(mine.Key("bob"), 2)
		h.has(budget, 4)
		// An id that one of the limits knows takes nothing of the others.
		h.refused(ratelimit.ReasonHeld, "a", time.Minute, mine.Key("bob"), all)
		h.refused(ratelimit.ReasonHeld, "a", time.Minute, mine.Key("bob"), free)
		h.has(mine.Key("bob"), 2)
		h.has(all, 1)
		h.settle(a.Token, []float64{1, 1, 0, 0})
		h.has(all, 2)
		h.has(budget, 4)

		// What is not named was used as held. To free one earlier, take two holds.
		named := h.hold("named", time.Minute, mine.Key("eve"), budget.Count(4))
		h.settle(named.Token, []float64{3, 1}, budget.Count(1))
		h.settle(h.hold("as held", time.Minute, mine.Key("eve"), budget.Count(2)).Token, []float64{1, 0}, mine.Key("eve"))
		h.release(h.hold("not used", time.Minute, mine.Key("eve"), all).Token, all)
		h.release(h.hold("used", time.Minute, mine.Key("eve"), budget).Token, budget.Count(1))
		h.has(budget, 0)
		h.has(mine.Key("eve"), 2)
		h.has(all, 2)
		harness.Succeeds(t, h.limits.Reset(t.Context(), db, budget))

		// If one of them is lost, nothing is settled. The others are released, with what was used.
		d := h.hold("d", time.Minute, mine.Key("cat"), budget.Count(4))
		h.clock.Advance(time.Minute)
		h.hold("e", time.Minute, mine.Key("cat").Count(2))
		result := h.lost(d.Token)
		if result.Requests[0].OK || !result.Requests[1].OK {
			t.Fatalf("lost: %+v", result)
		}
		h.lost(d.Token, budget.Count(1))
		before := harness.ReadBalance(t, h.limits, db, budget)
		h.release(d.Token, budget.Count(1))
		if left := harness.ReadBalance(t, h.limits, db, budget); math.Abs(left-before+1) > 0.001 {
			t.Fatalf("%v are left of %v", left, before)
		}
		h.settle(h.hold("count", time.Hour, mine.Key("dan").Count(2)).Token, []float64{2})
	})
}

func TestHoldsOnShards(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		r := ratelimit.FixedWindow("sharded", 100, time.Hour, ratelimit.Shards(4)).Global()
		one := h.hold("one", time.Minute, r.Count(10))
		h.refused(ratelimit.ReasonHeld, "one", time.Minute, r.Count(10))
		h.has(r, 90)
		two := h.hold("two", time.Minute, r.Count(80))
		h.refused(ratelimit.ReasonHeld, "two", time.Minute, r.Count(80))
		h.has(r, 10)
		h.release(one.Token)
		h.settle(two.Token, []float64{50}, r.Count(30))
		h.has(r, 70)
		h.hold("dead", time.Minute, r.Count(30)) // several come back together
		h.hold("dead, too", time.Minute, r.Count(40))
		h.clock.Advance(time.Minute)
		h.hold("next", time.Minute, r.Count(70))
		h.has(r, 0)
	})
}

// TestHoldsOfUnlimited: the id counts, and no tokens move, also if the limit is none any more.
func TestHoldsOfUnlimited(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		token := h.hold("a", time.Minute, ratelimit.Unlimited("calls").Key("ann")).Token
		h.refused(ratelimit.ReasonHeld, "a", time.Minute, ratelimit.Unlimited("calls").Key("ann"))
		var count float64
		if err := db.QueryRow(t.Context(), "SELECT count FROM ratelimit.holds WHERE name = 'calls' AND id = 'a'").Scan(&count); err != nil || count != 0 {
			t.Fatalf("the row says that %v are held, %v", count, err)
		}
		h.limits = &ratelimit.Limiter{Clock: h.clock.Now}
		calls := ratelimit.TokenBucket("calls", 10, time.Hour).Key("ann")
		h.hold("b", time.Minute, calls.Count(10))
		h.settle(token, []float64{0}, calls.Count(5))
		h.has(calls, 0)
		h.limits = &ratelimit.Limiter{Clock: h.clock.Now}
		h.hold("c", time.Minute, ratelimit.Unlimited("calls").Key("ann"))
		h.clock.Advance(time.Minute)
		h.hold("c", time.Minute, ratelimit.Unlimited("calls").Key("ann")) // its own has expired

		budget := harness.Slow("budget", 10).Key("ann") // what an expired hold took is still owed when its id is held without tokens
		lost := h.hold("d", time.Minute, budget.Count(8)).Token
		h.clock.Advance(time.Minute)
		h.limits = &ratelimit.Limiter{Clock: h.clock.Now}
		h.hold("d", time.Minute, ratelimit.Unlimited("budget").Key("ann"))
		h.limits = &ratelimit.Limiter{Clock: h.clock.Now}
		h.lost(lost, budget.Count(8))
		h.hold("e", time.Minute, budget.Count(10))
		h.refused(ratelimit.ReasonHeld, "d", time.Minute, budget)
	})
}

// TestWhoSettlesFirstMakesNoDifference: a charge above the limit swallows nothing of what others give back, and no job waits for it.
func TestWhoSettlesFirstMakesNoDifference(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		h.clock.At = harness.Noon.Add(-6 * time.Hour)
		for _, limit := range []ratelimit.Limit{
			harness.Slow("bucket", 100), harness.Slow("shards", 100, ratelimit.Shards(2)), ratelimit.FixedWindow("window", 100, 1000*time.Hour),
			ratelimit.FixedWindow("saves up", 50, 1000*time.Hour, ratelimit.Capacity(100)), ratelimit.CalendarWindow("month", 100, ratelimit.Month),
		} {
			r := limit.Key("a")
			first, second := h.hold("1", time.Hour, r.Count(50)).Token, h.hold("2", time.Hour, r.Count(50)).Token
			h.settle(first, []float64{-1}, r.Count(51))
			h.settle(second, []float64{45}, r.Count(5))
			h.has(r, 44)

			r = limit.Key("b")
			h.hold("1", time.Second, r.Count(50))
			second = h.hold("2", time.Hour, r.Count(50)).Token
			h.settle(second, []float64{-10}, r.Count(60))
			h.clock.Advance(time.Second)
			h.hold("3", time.Hour, r.Count(40)) // of what the dead worker had
			h.refused(ratelimit.ReasonQuota, "4", time.Hour, r.Count(1))

			r = limit.Key("c")
			consumed, err := h.limits.Consume(t.Context(), db, r.Count(100))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := h.limits.Charge(t.Context(), db, r.Count(1)); err != nil {
				t.Fatal(err)
			}
			if refund, err := h.limits.Refund(t.Context(), db, consumed.Receipt(), r.Count(45)); err != nil || refund.Requests[0].Refunded != 45 {
				t.Fatalf("%v: %+v, %v", limit, refund, err)
			}
			h.has(r, 44)
		}
	})
}

func TestHoldsRefuse(t *testing.T) {
	h := newHolder(t, harness.ReusedPool(t, 2, 0))
	ctx, db := t.Context(), h.db
	slots, tokens := ratelimit.Slots("slots", 2).Key("a"), ratelimit.TokenBucket("tokens", 10, time.Hour).Key("a")
	token := h.hold("job", time.Minute, slots, tokens).Token
	check := func(name string, err error, want error, text string) {
		t.Helper()
		if !errors.Is(err, want) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %v with %q", name, err, want, text)
		}
	}
	hold := func(id string, ttl time.Duration, requests ...ratelimit.Request) error {
		_, err := h.limits.Hold(ctx, db, id, ttl, requests...)
		return err
	}
	settle := func(token string, requests ...ratelimit.Request) error {
		_, err := h.limits.Settle(ctx, db, token, requests...)
		return err
	}
	for _, ttl := range []time.Duration{0, -2, -time.Hour, 99 * time.Millisecond, 367 * 24 * time.Hour} {
		check("ttl", hold("x", ttl, slots), ratelimit.ErrInvalid, "ttl")
	}
	for _, id := range []string{"", "~a", "a\nb", "a\x00", "\xff", "\u0085", strings.Repeat("x", 256)} {
		check("id", hold(id, time.Minute, slots), ratelimit.ErrInvalid, "id")
	}
	for _, count := range []float64{0, 0.5, 1.5} {
		check("count", hold("x", time.Minute, slots.Count(count)), ratelimit.ErrInvalid, "whole number")
	}
	check("too much", hold("x", time.Minute, slots.Count(3)), ratelimit.ErrExceedsCapacity, "slots")
	check("too much", hold("x", time.Minute, tokens.Count(11)), ratelimit.ErrExceedsCapacity, "tokens")
	check("none", hold("x", time.Minute), ratelimit.ErrInvalid, "no requests (to extend a hold, pass its Token")
	check("a token with requests", hold(token, time.Minute, slots), ratelimit.ErrBadRequest, "to extend a hold, pass no requests")
	check("an endless extension", hold(token, ratelimit.Forever), ratelimit.ErrInvalid, "ttl Forever is not between")
	check("too many", hold("x", time.Minute, slices.Repeat([]ratelimit.Request{slots}, 1001)...), ratelimit.ErrInvalid, "at most 1000 requests, not 1001")
	check("no Count", settle(token, slots, tokens), ratelimit.ErrInvalid, "needs the Count")
	for _, bad := range []string{"", "~", token[:30], "~" + token, strings.Replace(token, "3:job", "9:job", 1), token + "x", strings.Replace(token, "3:job", "200:job", 1),
		token[:strings.Index(token, "[")] + "[" + strings.Repeat(`["slots","a",1],`, 1000) + `["slots","a",1]]`} {
		check("token", settle(bad, slots), ratelimit.ErrInvalid, "token")
		check("token", harness.Second(h.limits.Release(ctx, db, bad, slots)), ratelimit.ErrInvalid, "token")
	}
	release := func(token string, requests ...ratelimit.Request) error {
		return harness.Second(h.limits.Release(ctx, db, token, requests...))
	}
	for _, end := range []func(token string, requests ...ratelimit.Request) error{settle, release} {
		for _, other := range []ratelimit.Request{ratelimit.Slots("slots", 2).Key("b"), ratelimit.Slots("other", 2).Key("a"), ratelimit.TokenBucket("tokens", 10, time.Hour).Global()} {
			check("what is not held", end(token, slots, other.Count(1)), ratelimit.ErrInvalid, "other limits or keys")
		}
		check("the id in place of the token", end("job", slots, tokens.Count(1)), ratelimit.ErrHoldLost, "pass its Token")
		check("the same of tokens", end("job", tokens.Count(1)), ratelimit.ErrHoldLost, "pass its Token")
	}
	if denied, ok := errors.AsType[*ratelimit.DeniedError](hold("job", time.Minute, slots)); !ok || denied.Reason != ratelimit.ReasonHeld {
		t.Error("an id has ended the hold")
	}
	check("no list", settle("an id"), ratelimit.ErrInvalid, "name them by requests")
	h.limits = &ratelimit.Limiter{Clock: h.clock.Now}
	vary := ratelimit.Slots("vary", 1, ratelimit.Varies(0))
	h.settle(h.hold("job", time.Minute, vary.With(ratelimit.Capacity(2)).Key("a").Count(2)).Token, []float64{2}) // it needs no numbers
	check("no slots", hold("x", time.Minute, ratelimit.Slots("no slots", 0).Key("a")), ratelimit.ErrDenied, "no slots")

	// Every other verb refuses slots.
	_, err := h.limits.Consume(ctx, db, slots)
	check("Consume", err, ratelimit.ErrInvalid, "which only Hold takes")
	_, err = h.limits.Wait(ctx, db, slots)
	check("Wait", err, ratelimit.ErrInvalid, "which only Hold takes")
	_, err = h.limits.Reserve(ctx, db, slots)
	check("Reserve", err, ratelimit.ErrInvalid, "which only Hold takes")
	_, _, err = h.limits.Take(ctx, db, 1, slots)
	check("Take", err, ratelimit.ErrInvalid, "which only Hold takes")
	_, err = h.limits.Check(ctx, db, tokens, slots)
	check("Check", err, ratelimit.ErrInvalid, "which only Hold takes")
	_, err = h.limits.Charge(ctx, db, slots)
	check("Charge", err, ratelimit.ErrInvalid, "which only Hold takes")
	result, err := h.limits.Consume(ctx, db, tokens)
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.limits.Refund(ctx, db, result.Receipt(), slots)
	check("Refund", err, ratelimit.ErrInvalid, "which only Hold takes")
	check("Reset", h.limits.Reset(ctx, db, slots), ratelimit.ErrInvalid, "which only Hold takes")
	check("Move", h.limits.Move(ctx, db, tokens, slots), ratelimit.ErrInvalid, "which only Hold takes")
	_, err = h.limits.QueueConsume(ctx, &pgx.Batch{}, slots)
	check("QueueConsume", err, ratelimit.ErrInvalid, "which only Hold takes")
	h.has(slots, 1)
}

// TestWhatADeadWorkerHeldIsThere: once its time is over, for every verb and every list, before any sweep.
func TestWhatADeadWorkerHeldIsThere(t *testing.T) {
	t.Parallel()
	other := ratelimit.TokenBucket("other", 10, time.Hour)
	wants := func(got, want any, err error) error {
		if err == nil && got != want {
			err = fmt.Errorf("%v, want %v", got, want)
		}
		return err
	}
	verbs := map[string]func(h holder, limit ratelimit.Limit, r ratelimit.Request) error{
		"Check": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Second(h.limits.Check(h.Context(), h.db, r))
		},
		"Consume": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Second(h.limits.Consume(h.Context(), h.db, r))
		},
		"Wait": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Second(h.limits.Wait(h.Context(), h.db, r))
		},
		"Once": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Third(h.limits.Once(h.Context(), h.db, "event", time.Hour, r))
		},
		"Hold": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Second(h.limits.Hold(h.Context(), h.db, "another", time.Minute, r))
		},
		"several": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Second(h.limits.Consume(h.Context(), h.db, other.Key("a"), r))
		},
		"a Coalescer": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			return harness.Second(h.limits.Consume(h.Context(), &ratelimit.Coalescer{Pool: h.db.(*pgxpool.Pool)}, r))
		},
		"Balance": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error { h.has(r, 10); return nil },
		"Take": func(h holder, limit ratelimit.Limit, _ ratelimit.Request) error {
			h.hold("half", time.Minute, limit.Key("half").Count(5))
			h.clock.Advance(time.Minute)
			for _, key := range []string{"a", "half"} {
				if n, _, err := h.limits.Take(h.Context(), h.db, 10, limit.Key(key)); n != 10 || err != nil {
					return wants(n, 10, err)
				}
			}
			return nil
		},
		"what is left after a Consume": func(h holder, limit ratelimit.Limit, _ ratelimit.Request) error {
			var errs []error
			for key, db := range map[string]ratelimit.DB{"alone": h.db, "beside another": h.db, "coalesced": &ratelimit.Coalescer{Pool: h.db.(*pgxpool.Pool)}} {
				r := limit.Key(key)
				h.hold("job", time.Minute, r.Count(5))
				h.clock.Advance(time.Minute)
				asks := []ratelimit.Request{r, other.Key(key)}
				if key != "beside another" {
					asks = asks[:1]
				}
				result, err := h.limits.Consume(h.Context(), db, asks...)
				if err != nil || !harness.Near(result.Requests[0].Remaining, 9) {
					errs = append(errs, err, fmt.Errorf("%s: %v remain", key, result.Requests[0].Remaining))
				}
			}
			return errors.Join(errs...)
		},
		"Reserve": func(h holder, _ ratelimit.Limit, r ratelimit.Request) error {
			reserved, err := h.limits.Reserve(h.Context(), h.db, r)
			return wants(reserved.Delay, time.Duration(0), err)
		},
		"ConsumeEach": func(h holder, limit ratelimit.Limit, r ratelimit.Request) error {
			all := []ratelimit.Request{limit.Key("b"), limit.Key("c"), limit.Key("d"), limit.Key("e")}
			if _, err := harness.InOrder(h.limits.ConsumeEach(h.Context(), h.db, all...)); err != nil { // they have rows
				return err
			}
			results, err := harness.InOrder(h.limits.ConsumeEach(h.Context(), h.db, append(all, r)...))
			return wants(err == nil && results[4].OK, true, err)
		},
		"a list": func(h holder, _ ratelimit.Limit, _ ratelimit.Request) error {
			var left float64
			err := h.db.(*pgxpool.Pool).QueryRow(h.Context(), "SELECT remaining FROM ratelimit._keys('limit', NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, '{a}', $1)", h.clock.At).Scan(&left)
			return wants(left, 10.0, err)
		},
	}
	for name, limit := range map[string]ratelimit.Limit{
		"a bucket":   ratelimit.TokenBucket("limit", 10, 1e9*time.Second),
		"its shards": ratelimit.TokenBucket("limit", 10, 1e9*time.Second, ratelimit.Shards(2)),
		"a window":   ratelimit.FixedWindow("limit", 10, 1000*time.Hour, ratelimit.Start(harness.Noon.Add(-time.Hour))),
		"a calendar": ratelimit.CalendarWindow("limit", 10, ratelimit.Year),
	} {
		pool := harness.NewPool(t, 4)
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", limit, other))
		for verb, do := range verbs {
			t.Run(verb+" of "+name, func(t *testing.T) {
				harness.MustExec(t, pool, "TRUNCATE ratelimit.limits, ratelimit.holds")
				h, r := newHolder(t, pool), limit.Key("a")
				if name == "its shards" { // of which there were others then
					before := newHolder(t, h.db)
					before.hold("job", time.Minute, ratelimit.TokenBucket("limit", 10, 1e9*time.Second).Key("a").Count(10))
					harness.Succeeds(t, harness.Second(h.limits.Consume(t.Context(), h.db, r.Count(0))))
				} else {
					h.hold("job", time.Minute, r.Count(10))
				}
				harness.Succeeds(t, wants(harness.Denied(harness.Second(h.limits.Consume(t.Context(), h.db, r))), true, nil))
				h.clock.Advance(time.Minute)
				if err := do(h, limit, r.Count(10)); err != nil {
					t.Error(err)
				}
			})
		}
	}

	// Who may not give it back is denied, and no more.
	h := newHolder(t, harness.NewPool(t, 2))
	r := ratelimit.TokenBucket("limit", 10, 1e9*time.Second).Key("a").Count(10)
	h.hold("job", time.Minute, r)
	h.clock.Advance(time.Minute)
	pool := h.db.(*pgxpool.Pool)
	for _, calls := range []string{"'{1}', '{10}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}'", "'{}', '{}', '{}', '{1}', '{1}', '{1}', '{NULL}', '{10}', '{0}'"} { // a batch leaves it to a call alone
		_, err := pool.Exec(t.Context(), "SELECT ratelimit._coalesce('{limit}', '{10}', '{1000000000 s}', '{10}', '{a}', '{1}', '{}', "+calls+", $1)", h.clock.At)
		if harness.SQLState(err) != "RL002" {
			t.Errorf("coalesced, %s: %v", calls, err)
		}
	}
	role := harness.CreateRole(t, pool)
	harness.MustExec(t, pool, harness.Execute(role)+"; GRANT USAGE ON SCHEMA ratelimit TO "+role+"; GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.limits TO "+role)
	reads, err := pool.BeginTx(t.Context(), pgx.TxOptions{AccessMode: pgx.ReadOnly})
	harness.Succeeds(t, err)
	defer reads.Rollback(context.WithoutCancel(t.Context()))
	for i, db := range []harness.Handle{reads, harness.AsRole(t, pool, role, 1)} { // which reserves
		what := []string{"in a transaction that only reads", "without a right"}[i]
		if _, err := h.limits.Consume(t.Context(), db, r); !harness.Denied(err) {
			t.Errorf("%s: %v", what, err)
		}
		if reserved, err := h.limits.Reserve(t.Context(), db, r); what == "without a right" && (err != nil || reserved.Delay < 1e8*time.Second) {
			t.Errorf("%s: %+v, %v", what, reserved, err)
		}
	}
}

// TestADeadWorkersTokensAtTheEdges: what comes back is once and whole, whatever is in its way.
func TestADeadWorkersTokensAtTheEdges(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket("tokens", 1000, 1000*time.Second)
	month := ratelimit.CalendarWindow("month", 2000, ratelimit.Month)
	days := ratelimit.CalendarWindow("days", 10, ratelimit.Day, ratelimit.Shards(2))
	small := ratelimit.TokenBucket("small", 10, 10*time.Second, ratelimit.MaxReserved(10))
	free, pro := ratelimit.CalendarWindow("free", 10, ratelimit.Month), ratelimit.CalendarWindow("pro", 100, ratelimit.Month)
	window := ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(harness.Noon))
	consumes := func(h holder, r ratelimit.Request) bool {
		result, err := h.limits.Consume(h.Context(), h.db, r)
		if err != nil && !harness.Denied(err) {
			h.Fatal(err)
		}
		return result.OK
	}
	for name, play := range map[string]func(h holder){
		"more of them than are ended at once, the oldest for nothing": func(h holder) {
			r := month.Key("a")
			h.hold("job", time.Minute, r.Count(1))
			harness.MustExec(h.T, h.db.(*pgxpool.Pool), `INSERT INTO ratelimit.holds SELECT name, key, 'copy ' || i, state, unit, gen_random_uuid(), CASE WHEN i > 1000 THEN 1 ELSE 0 END, taken_at, rest, part, until - interval '1 s' * (2000 - i)
				FROM ratelimit.holds, generate_series(1, 1500) AS i`)
			harness.MustExec(h.T, h.db.(*pgxpool.Pool), "UPDATE ratelimit.limits SET value = value - 500")
			h.clock.Advance(time.Minute)
			h.has(r, 2000)
			if !consumes(h, r.Count(1900)) {
				h.Error("denied")
			}
		},
		"a shard that is older than a calendar's list": func(h holder) {
			r := days.Key("a")
			consumes(h, r)
			h.clock.Advance(20 * 24 * time.Hour)
			h.hold("job", time.Minute, r.Count(5))
			h.clock.Advance(time.Minute)
			h.has(r, 10)
			if !consumes(h, r.Count(8)) {
				h.Error("denied")
			}
			h.has(r, 2)
		},
		"a denied call and a sweep in a pause": func(h holder) {
			r := bucket.Key("a")
			h.hold("job", time.Minute, r.Count(1000))
			h.clock.Advance(50 * time.Second)
			harness.Succeeds(h.T, harness.Second(h.limits.Pause(h.Context(), h.db, 20*time.Second, r)))
			h.clock.Advance(11 * time.Second)
			if consumes(h, r) {
				h.Error("granted in the pause")
			}
			_, err := h.db.(*pgxpool.Pool).Exec(h.Context(), "SELECT ratelimit._sweep_holds('', '', '', $1)", h.clock.At)
			harness.Succeeds(h.T, err)
			h.clock.Advance(10 * time.Second)
			if left := harness.ReadBalance(h.T, h.limits, h.db, r); left < 900 {
				h.Errorf("%v remain", left)
			}
		},
		"a reservation beside another": func(h holder) {
			r := small.Key("a")
			h.hold("job", time.Second, r.Count(10))
			h.clock.Advance(time.Second / 2)
			harness.Succeeds(h.T, harness.Second(h.limits.Reserve(h.Context(), h.db, r.Count(2))))
			h.clock.Advance(700 * time.Millisecond)
			left := harness.ReadBalance(h.T, h.limits, h.db, r)
			harness.Succeeds(h.T, harness.Second(h.limits.Reserve(h.Context(), h.db, r.Count(3))))
			if now := harness.ReadBalance(h.T, h.limits, h.db, r); !harness.Near(left, 7.2) || !harness.Near(now, 4.2) { // 10, less 0.8 that somebody waits for, and 2
				h.Errorf("%v remain of %v, of which 3 were reserved", now, left)
			}
		},
		"a pause of a second": func(h holder) { // by the server's clock
			harness.MustExec(h.T, h.db.(*pgxpool.Pool), `DO $$
				BEGIN
					INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts, lapses) VALUES ('short', '', 0, 1, 0, clock_timestamp() + interval '900 ms', '-infinity');
					INSERT INTO ratelimit.holds VALUES ('short', '', 'job', 'held', 'tokens', gen_random_uuid(), 5, clock_timestamp() - interval '10 s', 0, 1, clock_timestamp() - interval '1 s');
					IF ((ratelimit._apply('check', '{short}', '{""}', '{1}', '{1 minute}', '{10}', '{NULL}', '{1}', '{4}', '{0}', '{0}', '{0}')).granted
						OR (ratelimit._consume('short', '', 1, '1 minute', 10, NULL, 4, 0)).granted) AND clock_timestamp() < (SELECT ts FROM ratelimit.limits WHERE name = 'short') THEN
						RAISE 'granted in the pause';
					END IF;
				END $$`)
		},
		"a move": func(h holder) {
			h.hold("job", time.Minute, free.Key("a").Count(10))
			h.clock.Advance(time.Minute)
			harness.Succeeds(h.T, h.limits.Move(h.Context(), h.db, free.Key("a"), pro.Key("a")))
			h.has(pro.Key("a"), 100)
		},
		"a window that is over beside a calendar, ended by who knows neither": func(h holder) {
			token := h.hold("job", time.Hour, window.Key("a").Count(6), month.Key("a")).Token
			h.clock.Advance(time.Minute)
			consumes(h, window.Key("a").Count(8))
			harness.Succeeds(h.T, harness.Second((&ratelimit.Limiter{Clock: h.clock.Now}).Release(h.Context(), h.db, token)))
			h.has(window.Key("a"), 2)
		},
		"what is unlimited now, ended by who does not know it": func(h holder) {
			r := window.Key("a")
			token := h.hold("job", time.Second, r.Count(5)).Token
			h.clock.Advance(time.Minute / 2)
			h.hold("another", time.Second, r.Count(10)) // which gives back the first
			harness.MustExec(h.T, h.db.(*pgxpool.Pool), "SELECT ratelimit.unlimited('window', 'a', who => 'ann', forever => true)")
			next := &ratelimit.Limiter{Clock: h.clock.Now}
			harness.Succeeds(h.T, harness.Second(next.Settle(h.Context(), h.db, token)))
			h.has(r, 0)
		},
		"a reader whose clock was read before the key was used": func(h holder) {
			r := month.Key("a")
			h.hold("job", time.Minute, r.Count(400))
			h.hold("another", time.Minute, bucket.Key("a").Count(400))
			h.clock.Advance(time.Minute + time.Second/2)
			consumes(h, r)
			consumes(h, bucket.Key("a"))
			h.clock.Advance(-time.Second / 2)
			h.has(r, 1999)
			if left := harness.ReadBalance(h.T, h.limits, h.db, bucket.Key("a")); left < 990 {
				h.Errorf("%v remain", left)
			}
		},
		"a window that has fewer tokens than when it was held": func(h holder) {
			r := window.Key("a")
			h.hold("job", time.Second, r.Count(1))
			harness.MustExec(h.T, h.db.(*pgxpool.Pool), "UPDATE ratelimit.limits SET value = 19; UPDATE ratelimit.holds SET rest = 19") // as an override of 20 leaves it
			h.clock.Advance(time.Second)
			if !consumes(h, r.Count(10)) {
				h.Error("denied")
			}
			h.has(r, 0)
		},
		"who takes from a full bucket ends what has expired": func(h holder) {
			pool, r, byFunction := h.db.(*pgxpool.Pool), bucket.Key("a").Count(1000), &ratelimit.Limiter{Clock: time.Now}
			l := new(ratelimit.Limiter)
			batch := func(statement string) func() error { // which leaves the key to a call of its own
				return func() error {
					if _, err := pool.Exec(h.Context(), statement); err != nil && !strings.Contains(err.Error(), "RL002") {
						return err
					}
					return harness.Second(l.Consume(h.Context(), pool, r))
				}
			}
			for way, take := range map[string]func() error{
				"Consume":         func() error { return harness.Second(l.Consume(h.Context(), pool, r)) },
				"by the function": func() error { return harness.Second(byFunction.Consume(h.Context(), pool, r)) },
				"by hand": func() error {
					return harness.Second(pool.Exec(h.Context(), "SELECT ratelimit.consume('tokens', 'a', count => 1000)"))
				},
				"Hold":             func() error { return harness.Second(l.Hold(h.Context(), pool, "id", time.Hour, r)) },
				"Charge":           func() error { return harness.Second(l.Charge(h.Context(), pool, r)) },
				"of two":           func() error { return harness.Second(l.Consume(h.Context(), pool, r, month.Key("a"))) },
				"ConsumeEach":      func() error { return harness.Second(l.ConsumeEach(h.Context(), pool, r, bucket.Key("b"))) },
				"a batch of sums":  batch("SELECT ratelimit._consume_keys('tokens', '{a}', 1000, '1000 s', 1000, '{1000}')"),
				"a batch":          batch("SELECT ratelimit._coalesce('{tokens}', '{1000}', '{1000 s}', '{1000}', '{a}', '{1}', '{}', '{1}', '{1000}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')"),
				"a batch, of asks": batch("SELECT ratelimit._coalesce('{tokens}', '{1000}', '{1000 s}', '{1000}', '{a}', '{1}', '{}', '{}', '{}', '{}', '{1}', '{1}', '{1}', '{NULL}', '{1000}', '{0}')"),
			} {
				harness.MustExec(h.T, pool, `TRUNCATE ratelimit.limits, ratelimit.holds;
					INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts, lapses) VALUES ('tokens', 'a', 0, 1, 1000, now() - interval '1 s', now() - interval '1 s'), ('month', 'a', 0, 1, 1000, now(), NULL);
					INSERT INTO ratelimit.holds SELECT 'tokens', 'a', u, 'held', 'tokens', gen_random_uuid(), 500, now() - interval '2 s', 0, 1, now() + make_interval(secs => u::integer) FROM unnest('{-1,900}'::text[]) AS u`)
				if err := take(); err != nil {
					h.Errorf("%s: %v", way, err)
				}
				if left := harness.ReadBalance(h.T, l, pool, r); left > 200 { // refilled meanwhile
					h.Errorf("%s: %v remain, once the expired hold has given back", way, left)
				}
				if next := harness.Scan[bool](h.T, pool, "SELECT bool_and(r.lapses <= h.until AND r.lapses > now()) FROM ratelimit.limits AS r JOIN ratelimit.holds AS h ON h.key = r.key AND h.state = 'held' AND h.name = r.name"); !next {
					h.Errorf("%s: the row does not say when the next one expires", way)
				}
			}
		},
		"a row whose holds have all been settled": func(h holder) {
			r := bucket.Key("a")
			h.settle(h.hold("job", time.Second, r.Count(5)).Token, []float64{0}, r.Count(5))
			h.clock.Advance(time.Minute)
			consumes(h, r)
			if lapses := harness.Scan[*time.Time](h.T, h.db.(*pgxpool.Pool), "SELECT lapses FROM ratelimit.limits"); lapses != nil {
				h.Errorf("every call still looks for what expires at %v", lapses)
			}
		},
		"a sweep of what is full": func(h holder) {
			pool := h.db.(*pgxpool.Pool)
			harness.MustExec(h.T, pool, `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts, lapses) SELECT 'tokens', k, 0, 1, 1000, now() - interval '2 h', now() - interval '2 h' FROM unnest('{live,dead,none}'::text[]) AS k;
				INSERT INTO ratelimit.holds SELECT 'tokens', k, 'id', 'held', 'tokens', gen_random_uuid(), 1, now() - interval '3 h', 0, 1, now() + CASE k WHEN 'live' THEN interval '1 h' ELSE interval '-2 h' END FROM unnest('{live,dead}'::text[]) AS k`)
			harness.Succeeds(h.T, harness.Second(new(ratelimit.Limiter).Sweep(h.Context(), pool, bucket)))
			if rows := harness.Scan[string](h.T, pool, "SELECT (SELECT string_agg(key, ' ') FROM ratelimit.limits) || ', ' || (SELECT string_agg(key || ' ' || state, ', ' ORDER BY key) FROM ratelimit.holds)"); rows != "live, dead lapsed, live held" {
				h.Error(rows)
			}
		},
		"a denial beside what gives nothing": func(h holder) {
			r := bucket.Key("a")
			h.hold("job", time.Minute, r.Count(30))
			consumes(h, r.Count(970))
			h.clock.Advance(time.Minute)
			if consumes(h, r.Count(500)) {
				h.Error("granted")
			}
			if held := harness.Scan[int](h.T, h.db.(*pgxpool.Pool), "SELECT count(*) FROM ratelimit.holds WHERE state = 'held'"); held != 1 {
				h.Error("the denial has ended it")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := harness.NewPool(t, 2)
			harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", bucket, month, days, small, free, pro, window))
			play(newHolder(t, pool))
		})
	}
}

// TestADeployEndsJobsOfTheVersionBefore: a program that does not know some limits any more ends what they hold. What was not used of tokens
// comes back by the numbers that are published.
func TestADeployEndsJobsOfTheVersionBefore(t *testing.T) {
	t.Parallel()
	both, slots := ratelimit.Slots("both", 2).Key("a"), ratelimit.Slots("slots", 2).Key("a")
	bucket, calendar := ratelimit.TokenBucket("tokens", 10, time.Hour), ratelimit.CalendarWindow("month", 10, ratelimit.Month)
	tokens, month := bucket.Key("a"), calendar.Key("a")
	for _, published := range []bool{false, true} {
		for _, verb := range []string{"Settle", "Release"} {
			for n, kept := range []bool{true, false, true} {
				named := []ratelimit.Request{both}[:n/2]
				t.Run(fmt.Sprintf("%s, published %t, rows %t, named %d", verb, published, kept, len(named)), func(t *testing.T) {
					h := newHolder(t, harness.NewPool(t, 2))
					token := h.hold("job", time.Minute, both, slots, tokens.Count(4), month.Count(3)).Token
					if published {
						if err := new(ratelimit.Limiter).Publish(t.Context(), h.db, "api", bucket, calendar); err != nil {
							t.Fatal(err)
						}
					}
					if !kept { // a sweep has deleted them, or an operator
						if _, err := h.db.Exec(t.Context(), "DELETE FROM ratelimit.limits WHERE name <> 'both'"); err != nil {
							t.Fatal(err)
						}
					}
					next := &ratelimit.Limiter{Clock: h.clock.Now}
					if harness.ReadBalance(t, next, h.db, both) != 1 { // which it knows then
						t.Fatal("one is held")
					}
					var result ratelimit.Result
					var err error
					if verb == "Settle" {
						result, err = next.Settle(t.Context(), h.db, token, named...)
					} else {
						err = harness.Second(next.Release(t.Context(), h.db, token, named...))
					}
					if err != nil {
						t.Fatal(err)
					}
					for _, s := range result.Requests {
						if known := s.Limit.Name() == "both"; s.Limit.Validate() != nil || !s.OK || math.IsNaN(s.Remaining) == known || math.IsNaN(s.Limit.Capacity()) == known {
							t.Errorf("%+v", s)
						}
					}
					if verb == "Settle" && (len(result.Requests) != 4 || result.Requests[2].Limit.String() != "tokens: not known" || !math.IsNaN(result.Remaining)) {
						t.Errorf("%+v", result)
					}
					left := map[bool][]float64{true: {6, 7}, false: {10, 10}}[kept && (verb == "Settle" || !published)]
					h.has(both, 2)
					h.has(slots, 2)
					h.has(tokens, left[0])
					h.has(month, left[1])
					if verb == "Release" {
						h.hold("job", time.Minute, both)
					} else if result, err := next.Settle(t.Context(), h.db, token); err != nil || !result.Repeated {
						t.Errorf("again: %+v, %v", result, err)
					}
				})
			}
		}
	}
}

// TestHoldsRetryAt: when enough of the holds have ended that a request wants.
func TestHoldsRetryAt(t *testing.T) {
	h := newHolder(t, harness.ReusedPool(t, 2, 0))
	slots := ratelimit.Slots("slots", 3).Global()
	for i := range 3 {
		h.hold(string(rune('c'-i)), time.Duration(3-i)*time.Minute, slots)
	}
	start := h.clock.At
	for want := range 3 {
		if at := h.refused(ratelimit.ReasonQuota, "x", time.Minute, slots.Count(float64(want+1))); !at.Equal(start.Add(time.Duration(want+1) * time.Minute)) {
			t.Errorf("%d slots: %v", want+1, at)
		}
	}
}

// TestHoldsLateInTheNextWindow: what lapsed in a window is not charged to the next one.
func TestHoldsLateInTheNextWindow(t *testing.T) {
	h := newHolder(t, harness.ReusedPool(t, 2, 0))
	r := ratelimit.FixedWindow("budget", 100, time.Hour, ratelimit.Start(harness.Noon)).Global()
	token := h.hold("late", time.Minute, r.Count(100)).Token
	h.clock.Advance(time.Minute)
	h.hold("next", time.Minute, r.Count(100))
	h.clock.Advance(time.Hour)
	h.settle(token, []float64{0}, r.Count(70))
	h.has(r, 100)
}

// TestAnIDThatIsTakenFromALateWorker: of what the late one has used, a Settle charges nothing, since the work is another's, and a Release charges it once.
func TestAnIDThatIsTakenFromALateWorker(t *testing.T) {
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		h.clock.At = harness.Noon.Add(-6 * time.Hour)
		for _, limit := range []ratelimit.Limit{
			harness.Slow("bucket", 100), harness.Slow("shards", 100, ratelimit.Shards(2)), ratelimit.FixedWindow("window", 100, 1e6*time.Hour), ratelimit.CalendarWindow("month", 100, ratelimit.Month),
		} {
			for i, beside := range [][]ratelimit.Request{nil, {ratelimit.Slots("slots", 1).Key(limit.Name())}} {
				r := limit.Key(fmt.Sprint(i))
				used := func(tokens float64) []ratelimit.Request {
					return append([]ratelimit.Request{r.Count(tokens)}, beside...)
				}
				var late []string
				for range 3 { // it is delivered three times
					late = append(late, h.hold("job", time.Minute, used(10)...).Token)
					h.clock.Advance(time.Minute)
				}
				old := late[0] // for longer than a late one is remembered
				last := h.hold("job", time.Hour, used(10)...).Token
				has := func(want float64) {
					h.Helper()
					if got := harness.ReadBalance(h, h.limits, db, r); math.Abs(got-want) > 1e-3 {
						h.Fatalf("%v, %d: %v remain, want %v", limit, i, got, want)
					}
				}
				has(90)
				h.lost(late[1], used(7)...)
				has(90)
				for range 2 {
					h.release(late[1], used(7)...)
					has(83)
				}
				h.lost(late[1], used(7)...)
				h.release(late[2], used(12)...)
				has(71)
				h.refused(ratelimit.ReasonHeld, "job", time.Minute, used(1)...)
				if err := harness.Second(h.limits.Settle(t.Context(), db, last, used(2)...)); err != nil {
					t.Fatal(err)
				}
				has(79)
				h.clock.Advance(7 * 24 * time.Hour)
				before := harness.ReadBalance(h, h.limits, db, r)
				h.release(old, used(7)...)
				has(before)
				h.clock.Advance(-7 * 24 * time.Hour)
			}
		}
	})
}

// TestASettleSaysWhatABalanceSays: with what other holds of the key have given back meanwhile.
func TestASettleSaysWhatABalanceSays(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	slots := ratelimit.Slots("slots", 3)
	for way, limits := range map[string]*ratelimit.Limiter{"plain": {}, "function": {Clock: time.Now}} {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 1, time.Hour, ratelimit.Capacity(10)), ratelimit.FixedWindow("window", 10, 1e6*time.Hour),
			ratelimit.CalendarWindow("year", 10, ratelimit.Year), ratelimit.FixedWindow("shards", 10, 1e6*time.Hour, ratelimit.Shards(2)),
		} {
			for what, row := range map[string]struct {
				used   float64 // 0: it is not named
				late   bool    // it ended before the other
				beside bool    // a slot
			}{
				"as held": {used: 3}, "less": {used: 2}, "more": {used: 4}, "not named": {},
				"late, as held": {used: 3, late: true}, "late, less": {used: 2, late: true}, "late, more": {used: 4, late: true}, "late, not named": {late: true},
				"beside a slot": {used: 3, beside: true}, "beside a slot, not named": {beside: true},
			} {
				key := way + what
				asks := func(count float64) []ratelimit.Request {
					requests := []ratelimit.Request{limit.Key(key).Count(count), slots.Key(limit.Name() + key)}
					if !row.beside {
						requests = requests[:1]
					}
					return requests
				}
				held, err := limits.Hold(t.Context(), pool, "a", time.Minute, asks(3)...)
				harness.Succeeds(t, err)
				harness.Succeeds(t, harness.Second(limits.Hold(t.Context(), pool, "b", time.Minute, asks(4)...)))
				harness.MustExec(t, pool, "UPDATE ratelimit.limits SET lapses = '-infinity' WHERE lapses IS NOT NULL; UPDATE ratelimit.holds SET until = now() - interval '1 ms' WHERE id = 'b' AND state = 'held'")
				if row.late {
					harness.MustExec(t, pool, "UPDATE ratelimit.holds SET until = now() - interval '2 ms' WHERE id = 'a' AND state = 'held'")
				}
				named := asks(row.used)
				if row.used == 0 {
					named = nil
				}
				result, err := limits.Settle(t.Context(), pool, held.Token, named...)
				harness.Succeeds(t, err)
				balances, err := limits.Balance(t.Context(), pool, limit.Key(key), slots.Key(limit.Name()+key))
				harness.Succeeds(t, err)
				for i, s := range result.Requests {
					if b := balances[i]; math.Abs(s.Remaining-b.Remaining) > 0.01 || s.ResetAt.Sub(b.ResetAt).Abs() > time.Minute {
						t.Errorf("%s, %v, %s: %v remain, until %v; a balance says %v, until %v", way, s.Limit, what, s.Remaining, s.ResetAt, b.Remaining, b.ResetAt)
					}
				}
			}
		}
	}
}

// TestHoldsReleaseOfWhatWasUsed: work that failed pays for what it used, and its id is free.
func TestHoldsReleaseOfWhatWasUsed(t *testing.T) {
	h := newHolder(t, harness.ReusedPool(t, 2, 0))
	r, slots := ratelimit.FixedWindow("budget", 100, time.Hour, ratelimit.Start(harness.Noon)).Global(), ratelimit.Slots("slots", 1).Global()
	h.release(h.hold("job", time.Minute, r.Count(60), slots).Token, r.Count(25), slots)
	h.has(r, 75)
	h.release(h.hold("job", time.Minute, r.Count(60), slots).Token, r, slots)
	h.has(r, 75)
	h.hold("job", time.Minute, slots)
}

// TestHoldsOfACalendarComeBack: also those that nobody settled.
func TestHoldsOfACalendarComeBack(t *testing.T) {
	h := newHolder(t, harness.ReusedPool(t, 2, 0))
	r := ratelimit.CalendarWindow("monthly", 100, ratelimit.Month, ratelimit.Zone("Europe/Berlin")).Global()
	h.hold("dead", time.Minute, r.Count(80))
	h.clock.Advance(time.Minute)
	h.release(h.hold("next", time.Minute, r.Count(80)).Token)
	h.has(r, 100)
}

// TestHoldsOlderThanTheList: a call lists about a hundred windows of a calendar. What is held since before them is settled, released, given back and swept as
// what is held since the day before yesterday: its window is over, so nothing comes back of it to another one, and late work is charged to none. More than was
// held is charged now.
func TestHoldsOlderThanTheList(t *testing.T) {
	for _, days := range []int{2, 101, 102, 103, 150, 360} {
		t.Run(strconv.Itoa(days), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 2)
			h := newHolder(t, pool)
			daily := ratelimit.CalendarWindow("daily", 10, ratelimit.Day, ratelimit.Zone("Europe/Berlin"))
			if err := new(ratelimit.Limiter).Publish(t.Context(), pool, "test", daily); err != nil {
				t.Fatal(err)
			}
			const year = 365 * 24 * time.Hour
			less, more, released := h.hold("less", year, daily.Key("a").Count(6)), h.hold("more", year, daily.Key("b").Count(6)), h.hold("released", year, daily.Key("c").Count(6))
			reclaimed, swept := h.hold("reclaimed", time.Hour, daily.Key("d").Count(6)), h.hold("swept", time.Hour, daily.Key("e").Count(6))
			if _, err := h.limits.Charge(t.Context(), pool, daily.Key("a").Count(34)); err != nil { // four days of debt
				t.Fatal(err)
			}
			h.clock.Advance(time.Duration(days) * 24 * time.Hour)
			h.settle(less.Token, []float64{0}, daily.Key("a").Count(2))
			h.has(daily.Key("a"), min(10, -30+10*float64(days)))
			h.settle(more.Token, []float64{-3}, daily.Key("b").Count(9))
			h.has(daily.Key("b"), 7)
			h.release(released.Token)
			h.has(daily.Key("c"), 10)
			for of, held := range map[string]ratelimit.Held{"d": reclaimed, "e": swept} {
				if of == "d" { // the denial writes nothing
					h.hold("all", time.Hour, daily.Key(of).Count(10))
					h.refused(ratelimit.ReasonQuota, "too much", time.Hour, daily.Key(of))
				}
				if _, err := pool.Exec(t.Context(), "SELECT ratelimit._sweep_holds('', '', '', $1)", h.clock.At); err != nil {
					t.Fatal(err)
				}
				want := 0.0 // all came back in its window
				if days > 110 {
					want = 6 // which is not known
				}
				if got := harness.Scan[float64](t, pool, "SELECT rest FROM ratelimit.holds WHERE key = '"+of+"' AND state = 'lapsed'"); got != want {
					t.Errorf("%s: %v were kept, want %v", of, got, want)
				}
				if days < 7 { // then the hold is forgotten
					h.settle(held.Token, []float64{-3}, daily.Key(of).Count(9))
				} else {
					harness.Succeeds(t, harness.Second(h.limits.Charge(t.Context(), pool, daily.Key(of).Count(3))))
				}
			}
			h.has(daily.Key("d"), -3)
			h.has(daily.Key("e"), 7)
		})
	}
}

// TestHoldsInAPause: of a hold that is settled, released or over, nothing comes back.
func TestHoldsInAPause(t *testing.T) {
	t.Parallel()
	harness.OnEveryHandle(t, func(t *testing.T, db harness.Handle) {
		h := newHolder(t, db)
		w := harness.World{T: t, DB: db, Limiter: h.limits, Clock: h.clock}
		limit := harness.Steady(1)
		for key, end := range map[string]func(token string, r ratelimit.Request, used float64){
			"settled":  func(token string, r ratelimit.Request, used float64) { h.settle(token, []float64{used}, r.Count(2)) },
			"released": func(token string, r ratelimit.Request, _ float64) { h.release(token, r) },
		} {
			r := limit.Key(key)
			token := h.hold("job 1", time.Hour, r.Count(8)).Token
			w.Pause(time.Minute, r)
			end(token, r, 0)
			w.Holds(r, 0)
			token = h.hold("job 2", time.Hour, limit.Key(key+" 2").Count(8)).Token
			w.Pause(time.Minute, limit.Key(key+" 2"))
			w.Charge(limit.Key(key + " 2").Count(5))
			end(token, limit.Key(key+" 2"), 0)
			w.Holds(limit.Key(key+" 2"), -5) // as after the charge: who settles first makes no difference
		}
		r := limit.Key("over")
		h.hold("job 3", time.Second, r.Count(8))
		w.Pause(time.Minute, r)
		for _, then := range []time.Duration{2 * time.Second, 57500 * time.Millisecond} { // the last by a clock that is behind the server's
			h.clock.Advance(then)
			h.refused(ratelimit.ReasonQuota, "job 4", time.Minute, r)
			w.Holds(r, 0)
		}
	})
}

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

// TestARateOfZeroDeniesTheOthers: one limit of a call denies by policy, and the others are not asked.
func TestARateOfZeroDeniesTheOthers(t *testing.T) {
	behaviour(t, func(w world) {
		api, open := ratelimit.TokenBucket("api", 5, time.Minute).Key("ann"), ratelimit.Unlimited("open").Key("ann")
		month := ratelimit.CalendarWindow("month", 5, ratelimit.Month).Key("ann")
		w.grant(api.Count(2), month.Count(2))
		for _, requests := range [][]ratelimit.Request{
			{api, open, free.Key("ann")}, {free.Key("ann"), month, api}, {api.Reserve(), free.Key("ann").Reserve(), free.Key("bob")},
			{api.Count(5), free.Key("ann").Count(0), free.Key("ann").Count(2)},
		} {
			for i, s := range w.denyByPolicy(requests...).Requests {
				switch {
				case s.OK == (s.Limit.Name() == "exports"):
					w.Fatalf("request %d: %+v", i, s)
				case s.Limit.Name() == "open" && (!math.IsInf(s.Remaining, 1) || !s.RetryAt.Equal(noon)):
					w.Fatalf("the unlimited one: %+v", s)
				case s.Limit.Name() == "api" && (s.Remaining != 0 || !s.RetryAt.IsZero() || !s.ResetAt.IsZero()):
					w.Fatalf("one that is not asked: %+v", s)
				}
			}
		}
		w.refuse(ratelimit.ErrExceedsCapacity, api.Count(6), free.Key("ann"))
		w.refuse(ratelimit.ErrInvalid, api.Count(-1), free.Key("ann"))
		w.grant(api, free.Key("ann").Count(0)) // nothing is wanted of it
		w.holds(api, 2)
		w.holds(month, 3)
	})
}

func TestUnlimited(t *testing.T) {
	behaviour(t, func(w world) {
		limit := enterprise.Key("ann")
		for _, request := range []ratelimit.Request{limit, limit.Count(0), limit.Count(1e15), limit.Count(1e15).Reserve(), enterprise.Global()} {
			granted := w.grant(request)
			if !granted.At.Equal(noon) || !granted.RetryAt.Equal(noon) || !granted.ResetAt.Equal(noon) || granted.RetryAfter != 0 || !math.IsInf(granted.Remaining, 1) {
				w.Fatalf("granted %+v", granted)
			}
			if checked := w.check(request); !checked.OK || checked.Receipt() != "" || !math.IsInf(checked.Remaining, 1) {
				w.Fatalf("checked %+v", checked)
			}
			if charged, err := w.limiter.Charge(w.Context(), w.db, request); err != nil || !charged.OK || charged.Receipt() != "" {
				w.Fatalf("charged %+v, %v", charged, err)
			}
			w.do(w.limiter.Reset(w.Context(), w.db, request))
		}
		w.refuse(ratelimit.ErrInvalid, limit.Count(-1))
		w.refuse(ratelimit.ErrInvalid, limit.Count(1e15), limit.Count(1e15))
		w.refuse(ratelimit.ErrInvalid, limit, pro.Key("ann")) // two plans for one key
		if rows := w.rows(); rows != "" {
			w.Fatalf("the table has\n%s", rows)
		}
	})
}

// TestUnlimitedBesideOthers: only the others are asked, and they decide.
func TestUnlimitedBesideOthers(t *testing.T) {
	behaviour(t, func(w world) {
		for _, api := range []ratelimit.Request{
			ratelimit.TokenBucket("api", 5, time.Minute).Key("ann"),
			ratelimit.CalendarWindow("sharded", 5, ratelimit.Day, ratelimit.Shards(2)).Key("ann"),
		} {
			for range 5 {
				granted := w.grant(enterprise.Key("ann").Count(1000), api)
				if granted.Remaining == math.Inf(1) || granted.ResetAt.Equal(noon) {
					w.Fatalf("%+v, want the numbers of the other limit", granted)
				}
			}
			denied := w.deny(api, enterprise.Key("ann").Count(1000))
			if got := deniedBy(denied); len(got) != 1 || got[0].Limit.Name() == "exports" || denied.RetryAt.IsZero() {
				w.Fatalf("%+v, want a denial by the other limit", denied)
			}
			if alone := w.deny(api); !alone.RetryAt.Equal(denied.RetryAt) {
				w.Fatalf("retry at %v beside an unlimited one, and %v without", denied.RetryAt, alone.RetryAt)
			}
		}
		if rows := w.rows(); strings.Contains(rows, "exports") {
			w.Fatalf("the table has\n%s", rows)
		}
	})
}

// TestAReceiptOfAnotherPlan: what was granted without a row gives nothing back, even if the plan has changed meanwhile, and the
// reverse.
func TestAReceiptOfAnotherPlan(t *testing.T) {
	behaviour(t, func(w world) {
		refund := func(receipt ratelimit.Receipt, request ratelimit.Request, want float64) ratelimit.Receipt {
			w.Helper()
			result, err := w.limiter.Refund(w.Context(), w.db, receipt, request)
			if err != nil || !result.OK || result.Requests[0].Refunded != want {
				w.Fatalf("%+v, %v, want %v refunded", result, err, want)
			}
			return result.Receipt()
		}
		refuse := func(receipt ratelimit.Receipt, request ratelimit.Request) {
			w.Helper()
			if _, err := w.limiter.Refund(w.Context(), w.db, receipt, request); !errors.Is(err, ratelimit.ErrInvalid) {
				w.Fatalf("%v, want ErrInvalid", err)
			}
		}
		w.grant(pro.Key("ann").Count(50))
		unlimited := w.grant(enterprise.Key("ann").Count(10)).Receipt()
		for _, later := range []ratelimit.Limit{enterprise, pro, free} {
			rest := refund(unlimited, later.Key("ann").Count(4), 0)
			refuse(rest, later.Key("ann").Count(7))
			refuse(rest, later.Key("bob").Count(1))
			if rest = refund(rest, later.Key("ann").Count(6), 0); rest != "" {
				w.Fatalf("the receipt has %q left", rest)
			}
			w.holds(pro.Key("ann"), 50)
		}
		taken := w.grant(pro.Key("ann").Count(10)).Receipt()
		for _, later := range []ratelimit.Limit{enterprise, free} {
			refund(taken, later.Key("ann").Count(10), 0)
			w.holds(pro.Key("ann"), 40)
		}

		// One receipt of both kinds: each is given back as it was taken.
		api := ratelimit.TokenBucket("api", 5, time.Minute).Key("ann")
		both := w.grant(enterprise.Key("ann"), api.Count(3))
		result, err := w.limiter.Refund(w.Context(), w.db, both.Receipt(), pro.Key("ann"), api.Count(3))
		if err != nil || result.Requests[0].Refunded != 0 || result.Requests[1].Refunded != 3 || result.Receipt() != "" {
			w.Fatalf("%+v, %v", result, err)
		}
		w.holds(pro.Key("ann"), 40)
		w.holds(api, 5)
	})
}

// TestPlansOfOneNameMayHaveNoRows: nothing and everything are plans beside numbers, of any kind.
func TestPlansOfOneNameMayHaveNoRows(t *testing.T) {
	behaviour(t, func(w world) {
		w.grant(enterprise.Key("cid").Count(1000))
		w.denyByPolicy(free.Key("ann"))
		window := ratelimit.FixedWindow("exports", 100, time.Hour)
		w.grant(window.Key("bob").Count(100))
		w.deny(window.Key("bob"))
		w.grant(enterprise.Key("cid").Count(1000), window.Key("dan"), ratelimit.TokenBucket("exports", 0, time.Minute).Key("eve").Count(0))
		w.refuse(ratelimit.ErrInvalid, pro.Key("ann"))                                              // a bucket, after a window
		w.refuse(ratelimit.ErrInvalid, window.Key("a"), enterprise.Key("b"), pro.Key("c"))          // or beside one
		w.grant(ratelimit.Unlimited("exports").Key("bob"))                                          // bob changes plans
		w.denyByPolicy(ratelimit.CalendarWindow("exports", 0, ratelimit.Month).Key("bob"))          // to and fro,
		w.deny(ratelimit.FixedWindow("exports", 50, time.Hour, ratelimit.Capacity(100)).Key("bob")) // and is still out of tokens
		w.clock.Advance(2 * time.Hour)                                                              // until they are refilled
		w.grant(ratelimit.FixedWindow("exports", 100, time.Hour).Key("bob").Count(100))
	})
}

func TestByHandARateOfZeroDeniesByPolicy(t *testing.T) {
	behaviour(t, func(w world) {
		for _, arguments := range []string{
			"'exports', 'ann', 0, '1 hour'", "'exports', 'ann', 0, '1 hour', 1e15, 'fixed window', reserve => true, capacity => 0",
			"'exports', 'ann', 0, '1 month', kind => 'calendar window', reserve => true, shards => 5, max_reserved => 0",
			"'exports', NULL, 0, '1 hour', 1e-15, global => true",
		} {
			var ok, never bool
			var remaining float64
			var at time.Time
			w.do(w.db.QueryRow(w.Context(), "SELECT ok, remaining, at, num_nulls(retry_at, retry_after, reset_at) = 3 FROM ratelimit("+arguments+", now => '2026-07-01 12:00:00+00')").
				Scan(&ok, &remaining, &at, &never))
			if ok || remaining != 0 || !never || !at.Equal(noon) {
				w.Fatalf("%s: %v, %v, %v, %v", arguments, ok, remaining, at, never)
			}
		}
		var ok, now bool
		w.do(w.db.QueryRow(w.Context(), "SELECT ok, retry_at = at AND retry_after = '0' FROM ratelimit('exports', 'ann', 0, '1 hour', 0)").Scan(&ok, &now))
		if !ok || !now {
			w.Fatalf("0 tokens: %v, %v", ok, now)
		}
		savepoint := w.begin()
		err := savepoint.QueryRow(w.Context(), "SELECT ok FROM ratelimit_or_raise('exports', 'ann', 0, '1 hour')").Scan(&ok)
		var sqlErr interface{ SQLState() string }
		if !errors.As(err, &sqlErr) || sqlErr.SQLState() != "PT429" {
			w.Fatalf("%v, want PT429", err)
		}
		w.do(savepoint.Rollback(w.Context()))
		if rows := w.rows(); rows != "" {
			w.Fatalf("the table has\n%s", rows)
		}
	})
}

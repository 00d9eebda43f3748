package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// The plans of an application.
var (
	free       = ratelimit.TokenBucket("exports.free", 0, time.Hour)
	pro        = ratelimit.TokenBucket("exports.pro", 100, time.Hour)
	enterprise = ratelimit.Unlimited("exports.enterprise")
)

// denyByPolicy consumes, reserves and checks. Each must be denied permanently.
func denyByPolicy(w harness.World, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	before := w.Rows()
	result, reserved := w.Deny(requests...), w.DenyReserve(requests...)
	checked, err := w.Limiter.Check(w.Context(), w.DB, requests...)
	denial, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok || denial.Reason != ratelimit.ReasonPlan || !denial.RetryAt.IsZero() {
		w.Fatalf("%+v, want a permanent denial by a plan", err)
	}
	for _, denied := range []ratelimit.Result{result, reserved, checked} {
		if !denied.At.Equal(w.Clock.At) || !denied.RetryAt.IsZero() || denied.RetryAfter != math.MaxInt64/2 || denied.Receipt() != "" {
			w.Fatalf("%+v, %v, want a permanent denial", denied, err)
		}
		for _, s := range denied.Requests {
			if !s.OK && (!s.RetryAt.IsZero() || s.Remaining != 0) {
				w.Fatalf("%+v, want a permanent denial", s)
			}
		}
	}
	if text := err.Error(); !strings.HasPrefix(text, "ratelimit: denied by policy: exports.free (") || strings.Contains(text, "retry") {
		w.Fatalf("the error says %q", text)
	}
	if after := w.Rows(); after != before {
		w.Fatalf("the table was\n%s\nand is\n%s", before, after)
	}
	return result
}

func TestARateOfZeroDeniesByPolicy(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []ratelimit.Limit{
			free, ratelimit.FixedWindow("exports.free", 0, time.Hour, ratelimit.Start(harness.Noon), ratelimit.Capacity(0), ratelimit.MaxReserved(0)),
			ratelimit.CalendarWindow("exports.free", 0, ratelimit.Month, ratelimit.Shards(3)),
			ratelimit.CalendarWindow("exports.free", 5, ratelimit.Month, ratelimit.MaxReserved(3), ratelimit.Varies(32*24*time.Hour)).With(ratelimit.Rate(0)),
		} {
			w := w.Redeployed()
			denyByPolicy(w, limit.Key("ann"))
			denyByPolicy(w, limit.Key("ann").Count(1e15))
			denyByPolicy(w, limit.Global().Count(1e-15))
			w.Holds(limit.Key("ann"), 0)
			granted := w.Grant(limit.Key("ann").Count(0))
			if !granted.At.Equal(harness.Noon) || !granted.ResetAt.IsZero() || granted.Remaining != 0 {
				w.Fatalf("0 tokens: %+v", granted)
			}
			w.Refuse(ratelimit.ErrInvalid, limit.Key("ann").Count(-1))
			w.Refuse(ratelimit.ErrInvalid, limit.Key(""))
		}
	})
}

// TestARateOfZeroDeniesTheOthers: one limit of a call denies by policy, and the call does not ask the others.
func TestARateOfZeroDeniesTheOthers(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		api, open := ratelimit.TokenBucket("api", 5, time.Minute).Key("ann"), ratelimit.Unlimited("open").Key("ann")
		month := ratelimit.CalendarWindow("month", 5, ratelimit.Month).Key("ann")
		w.Grant(api.Count(2), month.Count(2))
		for _, requests := range [][]ratelimit.Request{
			{api, open, free.Key("ann")}, {free.Key("ann"), month, api}, {api, free.Key("ann"), free.Key("bob")},
			{api.Count(5), free.Key("ann").Count(0), free.Key("ann").Count(2)},
		} {
			for i, s := range denyByPolicy(w, requests...).Requests {
				switch {
				case s.OK == (s.Limit.Name() == "exports.free"):
					w.Fatalf("request %d: %+v", i, s)
				case s.Limit.Name() == "open" && (!math.IsInf(s.Remaining, 1) || !s.RetryAt.IsZero()):
					w.Fatalf("the unlimited one: %+v", s)
				case s.Limit.Name() == "api" && (s.Remaining != 0 || !s.RetryAt.IsZero() || !s.ResetAt.IsZero()):
					w.Fatalf("a limit that is not asked: %+v", s)
				}
			}
		}
		w.Refuse(ratelimit.ErrExceedsCapacity, api.Count(6), free.Key("ann"))
		w.Refuse(ratelimit.ErrInvalid, api.Count(-1), free.Key("ann"))
		w.Grant(api, free.Key("ann").Count(0)) // a count of 0
		w.Holds(api, 2)
		w.Holds(month, 3)
	})
}

func TestAnUnlimitedLimitGrantsEverything(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := enterprise.Key("ann")
		for _, request := range []ratelimit.Request{limit, limit.Count(0), limit.Count(1e15), enterprise.Global()} {
			w.Runs(w.Reserve(request), 0)
			granted := w.Grant(request)
			if !granted.At.Equal(harness.Noon) || !granted.ResetAt.Equal(harness.Noon) || !math.IsInf(granted.Remaining, 1) {
				w.Fatalf("granted %+v", granted)
			}
			if checked := w.Check(request); !checked.OK || checked.Receipt() != "" || !math.IsInf(checked.Remaining, 1) {
				w.Fatalf("checked %+v", checked)
			}
			if charged, err := w.Limiter.Charge(w.Context(), w.DB, request); err != nil || !charged.OK || charged.Receipt() != "" {
				w.Fatalf("charged %+v, %v", charged, err)
			}
			w.Do(w.Limiter.Reset(w.Context(), w.DB, limit))
		}
		w.Refuse(ratelimit.ErrInvalid, limit.Count(-1))
		w.Refuse(ratelimit.ErrInvalid, limit.Count(1e15), limit.Count(1e15))
		if rows := w.Rows(); rows != "" {
			w.Fatalf("the table has\n%s", rows)
		}
	})
}

// TestAnUnlimitedLimitBesideOthers: the call asks only the other limits, and they decide.
func TestAnUnlimitedLimitBesideOthers(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, api := range []ratelimit.Request{
			ratelimit.TokenBucket("api", 5, time.Minute).Key("ann"),
			ratelimit.CalendarWindow("sharded", 5, ratelimit.Day, ratelimit.Shards(2)).Key("ann"),
		} {
			for range 5 {
				granted := w.Grant(enterprise.Key("ann").Count(1000), api)
				if granted.Remaining == math.Inf(1) || granted.ResetAt.Equal(harness.Noon) {
					w.Fatalf("%+v, want the numbers of the other limit", granted)
				}
			}
			denied := w.Deny(api, enterprise.Key("ann").Count(1000))
			if got := harness.DeniedBy(denied); len(got) != 1 || got[0].Limit.Name() == "exports.enterprise" || denied.RetryAt.IsZero() {
				w.Fatalf("%+v, want a denial by the other limit", denied)
			}
			if alone := w.Deny(api); !alone.RetryAt.Equal(denied.RetryAt) {
				w.Fatalf("retry at %v beside an unlimited one, and %v without", denied.RetryAt, alone.RetryAt)
			}
		}
		if rows := w.Rows(); strings.Contains(rows, "exports") {
			w.Fatalf("the table has\n%s", rows)
		}
	})
}

// TestAReceiptOfAnotherDefinition: a grant without a row gives nothing back, even if the limit was defined anew since then. The
// reverse holds, too.
func TestAReceiptOfAnotherDefinition(t *testing.T) {
	bucket, open := ratelimit.TokenBucket("exports", 100, time.Hour, ratelimit.Varies(time.Hour)), ratelimit.Unlimited("exports")
	none := bucket.With(ratelimit.Rate(0))
	harness.Behaviour(t, func(w harness.World) {
		later := w.Redeployed()
		refund := func(w harness.World, receipt ratelimit.Receipt, request ratelimit.Request, want float64) ratelimit.Receipt {
			w.Helper()
			result, err := w.Limiter.Refund(w.Context(), w.DB, receipt, request)
			if err != nil || !result.OK || result.Requests[0].Refunded != want {
				w.Fatalf("%+v, %v, want %v refunded", result, err, want)
			}
			return result.Receipt()
		}
		refuse := func(w harness.World, receipt ratelimit.Receipt, request ratelimit.Request) {
			w.Helper()
			if _, err := w.Limiter.Refund(w.Context(), w.DB, receipt, request); !errors.Is(err, ratelimit.ErrInvalid) {
				w.Fatalf("%v, want ErrInvalid", err)
			}
		}
		w.Grant(bucket.Key("ann").Count(50))
		unlimited := later.Grant(open.Key("ann").Count(10)).Receipt()
		for _, now := range []struct {
			harness.World
			ratelimit.Limit
		}{{later, open}, {w, bucket}, {w, none}} {
			rest := refund(now.World, unlimited, now.Key("ann").Count(4), 0)
			refuse(now.World, rest, now.Key("ann").Count(7))
			refuse(now.World, rest, now.Key("bob").Count(1))
			if rest = refund(now.World, rest, now.Key("ann").Count(6), 0); rest != "" {
				w.Fatalf("the receipt has %q left", rest)
			}
			w.Holds(bucket.Key("ann"), 50)
		}
		taken := w.Grant(bucket.Key("ann").Count(10)).Receipt()
		refund(later, taken, open.Key("ann").Count(10), 0)
		refund(w, taken, none.Key("ann").Count(10), 0)
		w.Holds(bucket.Key("ann"), 40)

		// A receipt of both kinds: each request is given back as it was taken.
		api := ratelimit.TokenBucket("api", 5, time.Minute).Key("ann")
		both := later.Grant(open.Key("ann"), api.Count(3))
		result, err := w.Limiter.Refund(w.Context(), w.DB, both.Receipt(), bucket.Key("ann"), api.Count(3))
		if err != nil || result.Requests[0].Refunded != 0 || result.Requests[1].Refunded != 3 || result.Receipt() != "" {
			w.Fatalf("%+v, %v", result, err)
		}
		w.Holds(bucket.Key("ann"), 40)
		w.Holds(api, 5)
	})
}

func TestByHandARateOfZeroDeniesByPolicy(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, arguments := range []string{
			"'exports', 'ann', 0, '1 hour'", "'exports', 'ann', 0, '1 hour', 1e15, 'fixed window', capacity => 0",
			"'exports', 'ann', 0, '1 month', kind => 'calendar window', shards => 5", "'exports', NULL, 0, '1 hour', 1e-15, global => true",
		} {
			var ok, never bool
			var remaining float64
			var at time.Time
			w.Do(w.DB.QueryRow(w.Context(), "SELECT granted, remaining, at, num_nulls(retry_at, retry_after, reset_at) = 3 FROM ratelimit._by_hand('try', "+arguments+", now => '2026-07-01 12:00:00+00')").
				Scan(&ok, &remaining, &at, &never))
			if ok || remaining != 0 || !never || !at.Equal(harness.Noon) {
				w.Fatalf("%s: %v, %v, %v, %v", arguments, ok, remaining, at, never)
			}
		}
		var ok, now bool
		w.Do(w.DB.QueryRow(w.Context(), "SELECT granted, num_nulls(retry_at, retry_after) = 2 FROM ratelimit.try('exports', 'ann', 0, '1 hour', 0)").Scan(&ok, &now))
		if !ok || !now {
			w.Fatalf("0 tokens: %v, %v", ok, now)
		}
		w.Do(w.DB.QueryRow(w.Context(), "SELECT retry_at = at AND delay = '0' FROM ratelimit.reserve('exports', 'ann', 0, '1 hour', 0)").Scan(&now))
		if !now {
			w.Fatal("a reservation of 0 tokens does not run now")
		}
		savepoint := w.Begin()
		err := savepoint.QueryRow(w.Context(), "SELECT true FROM ratelimit.consume('exports', 'ann', 0, '1 hour')").Scan(&ok)
		var sqlErr interface{ SQLState() string }
		if !errors.As(err, &sqlErr) || sqlErr.SQLState() != "PT429" {
			w.Fatalf("%v, want PT429", err)
		}
		if own, ok := errors.AsType[*pgconn.PgError](err); ok && own.Hint != "Waiting alone does not help." {
			w.Fatalf("the hint is %q", own.Hint)
		}
		w.Do(savepoint.Rollback(w.Context()))
		if rows := w.Rows(); rows != "" {
			w.Fatalf("the table has\n%s", rows)
		}
	})
}

func TestNothingIsSentForPlansWithoutRows(t *testing.T) {
	t.Parallel()
	decided := 0
	limiter := &ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) {
		if d.Err != nil && !harness.Denied(d.Err) {
			return
		}
		if age := time.Since(d.Result.At); d.Verb != "reset" && (age < 0 || age > time.Minute) {
			t.Errorf("%s was decided at %v", d.Verb, d.Result.At)
		}
		decided++
	}}
	api := ratelimit.TokenBucket("api", 5, time.Minute).Key("ann")
	for _, db := range []ratelimit.DB{harness.Unasked{T: t}, &ratelimit.Coalescer{Pool: closedPool(t)}} {
		decided = 0
		granted, err := limiter.Consume(t.Context(), db, enterprise.Key("ann"), free.Key("bob").Count(0))
		if err != nil || !granted.OK {
			t.Errorf("%+v, %v", granted, err)
		}
		if _, err := limiter.Consume(t.Context(), db, api, free.Key("ann")); !errors.Is(err, ratelimit.ErrDenied) {
			t.Error(err)
		}
		if _, err := limiter.Check(t.Context(), db, free.Key("ann"), api); !errors.Is(err, ratelimit.ErrDenied) {
			t.Error(err)
		}
		if charged, err := limiter.Charge(t.Context(), db, enterprise.Key("ann"), free.Key("bob")); err != nil || !charged.OK || !charged.Requests[1].OK || charged.Requests[0].Taken != 1 || charged.Requests[1].Taken != 0 {
			t.Errorf("%+v, %v", charged, err)
		}
		if _, err := limiter.Refund(t.Context(), db, granted.Receipt(), enterprise.Key("ann")); err != nil {
			t.Error(err)
		}
		if err := limiter.Reset(t.Context(), db, free.Key("bob"), enterprise.Key("ann")); err != nil {
			t.Error(err)
		}
		if reserved, err := limiter.Reserve(t.Context(), db, enterprise.Key("ann")); err != nil || reserved.Delay != 0 || reserved.Receipt() == "" {
			t.Errorf("%+v, %v", reserved, err)
		}
		if n, _, err := limiter.Take(t.Context(), db, 7, enterprise.Key("ann")); err != nil || n != 7 {
			t.Errorf("took %d, %v", n, err)
		}
		if balances, err := limiter.Balance(t.Context(), db, enterprise.Key("ann"), free.Key("bob")); err != nil || !math.IsInf(balances[0].Remaining, 1) || balances[1].Remaining != 0 {
			t.Errorf("%+v, %v", balances, err)
		}
		if decided != 9 {
			t.Errorf("%d decisions were observed, want 9", decided)
		}
		if _, err := limiter.Refund(t.Context(), db, "", enterprise.Key("ann")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("without a receipt: %v", err)
		}
	}
	if _, err := limiter.Consume(t.Context(), nil, enterprise.Key("ann")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("without a DB: %v", err)
	}
}

// closedPool is a pool on which every call fails.
func closedPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := harness.Connect(t, harness.NewPool(t, 1).Config().ConnString(), 1)
	pool.Close()
	return pool
}

// TestPlansWithoutRowsInABatch: a call without rows is decided when it is queued. A denial causes no SQL error.
func TestPlansWithoutRowsInABatch(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, _ := harness.NewLimiter()
	api := ratelimit.TokenBucket("api", 5, time.Minute).Key("ann")
	var batch pgx.Batch
	denied, err := limiter.QueueConsume(t.Context(), &batch, api, free.Key("ann"))
	if !errors.Is(err, ratelimit.ErrDenied) || denied != nil || batch.Len() != 0 {
		t.Errorf("%+v, %v, and %d are queued", denied, err, batch.Len())
	}
	granted, err := limiter.QueueConsume(t.Context(), &batch, enterprise.Key("ann"))
	if err != nil || !granted.OK || granted.Receipt() == "" || batch.Len() != 0 {
		t.Errorf("%+v, %v, and %d are queued", granted, err, batch.Len())
	}
	if err := limiter.SendTx(t.Context(), pool, &batch); err != nil {
		t.Errorf("an empty transaction: %v", err)
	}
	both, err := limiter.QueueConsume(t.Context(), &batch, enterprise.Key("ann"), api.Count(2))
	if err = errors.Join(err, limiter.SendTx(t.Context(), pool, &batch)); err != nil || !both.OK || !both.Requests[0].OK || both.Remaining != 3 {
		t.Errorf("%+v, %v", both, err)
	}
	batch = pgx.Batch{}
	both, err = limiter.QueueConsume(t.Context(), &batch, enterprise.Key("ann"), api.Count(4))
	if err = errors.Join(err, limiter.SendTx(t.Context(), pool, &batch)); !errors.Is(err, ratelimit.ErrDenied) || both.OK || !both.Requests[0].OK || both.Requests[1].OK {
		t.Errorf("%+v, %v", both, err)
	}
}

// TestPlansWithoutRowsInACoalescer: only the other limits of a call are coalesced. An unlimited limit does not wait in a
// queue.
func TestPlansWithoutRowsInACoalescer(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limiter, _ := harness.NewLimiter()
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	api := ratelimit.TokenBucket("api", 10, time.Minute)
	var granted atomic.Int32
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			result, err := limiter.Consume(t.Context(), coalescer, enterprise.Key("ann"), api.Key("ann"), free.Key("bob").Count(0))
			if err != nil && !harness.Denied(err) || !result.Requests[0].OK || !result.Requests[2].OK {
				t.Errorf("%+v, %v", result, err)
			}
			if err == nil {
				granted.Add(1)
			}
		})
	}
	wg.Wait()
	if granted.Load() != 10 {
		t.Errorf("%d were granted, want 10", granted.Load())
	}
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := limiter.Consume(ctx, tx, free.Key("ann")); !errors.Is(err, ratelimit.ErrDenied) {
			t.Errorf("%v, want a denial", err)
		}
		_, err := limiter.Consume(ctx, tx, enterprise.Key("ann"))
		return err
	}, ratelimit.Hot(enterprise.Key("ann"), free.Key("bob")))
	if err != nil {
		t.Errorf("in turns for nothing: %v", err)
	}
}

// TestHTTPPlans: a plan without the call gets 403, permanently. An unlimited plan passes without a header field.
func TestHTTPPlans(t *testing.T) {
	t.Parallel()
	api := ratelimit.TokenBucket("api", 1000, time.Minute)
	s := harness.NewSite(t, func(r *http.Request) ([]ratelimit.Request, error) {
		plan := map[string]ratelimit.Limit{"ann": free, "bob": pro, "cid": enterprise}[r.URL.Query().Get("user")]
		return []ratelimit.Request{plan.Key(r.URL.Query().Get("user")), api.Global()}, nil
	})
	s.Limit.LegacyFields, s.Limit.Jitter = true, 0.5
	s.Limit.Failed = func(status int) bool { return status != http.StatusOK } // so that grants are refunded
	s.Serve()
	got := s.Get("/?user=ann")
	if got.Status != http.StatusForbidden || got.Header.Get("Retry-After") != "" || got.Header.Get("RateLimit-Policy") != `"exports.free";q=0, "api";q=1000;w=60` ||
		got.Header.Get("RateLimit") != `"exports.free";r=0` || got.Header.Get("X-RateLimit-Remaining") != "0" || got.Header.Get("X-RateLimit-Reset") != "" {
		t.Errorf("not in the plan: %+v", got)
	}
	if p := s.Problem(got); p["title"] != "Forbidden" || p["detail"] != "The quota is 0, or the client is blocked." || fmt.Sprint(p["violated-policies"]) != "[exports.free]" {
		t.Errorf("not in the plan: %v", p)
	}
	if n := s.Called.Load(); n != 0 {
		t.Errorf("the handler was called %d times", n)
	}
	if got := s.Get("/?user=bob"); got.Status != http.StatusOK || !strings.HasPrefix(got.Header.Get("RateLimit"), `"exports.pro";r=99;t=36, "api"`) {
		t.Errorf("in the plan: %+v", got)
	}
	if got := s.Get("/?user=cid"); got.Status != http.StatusOK || got.Header.Get("RateLimit-Policy") != `"api";q=1000;w=60` || strings.Contains(got.Header.Get("RateLimit"), "exports") {
		t.Errorf("unlimited: %+v", got)
	}
	for _, d := range s.Observed() {
		if d.Status == 0 && d.Err != nil {
			t.Errorf("a refund failed: %v", d.Err)
		}
	}
}

// TestTakeOfPlansWithoutRows: an unlimited limit gives the number asked for. A rate of 0 gives none.
func TestTakeOfPlansWithoutRows(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		api := ratelimit.TokenBucket("api", 7, time.Minute).Key("ann")
		w.Take(100, 100, enterprise.Key("ann"))
		w.Take(3, 3, enterprise.Key("ann"), enterprise.Key("bob"), enterprise.Key("cid"))
		w.Take(2, 2, enterprise.Key("ann"), api)
		w.Take(5, 100, api, enterprise.Key("ann"))
		if denied := w.DenyTake(100, api, enterprise.Key("ann")); denied.RetryAt.IsZero() || denied.Requests[0].OK || !denied.Requests[1].OK {
			w.Fatalf("%+v", denied)
		}
		other := ratelimit.TokenBucket("other", 5, time.Minute).Key("ann")
		for _, requests := range [][]ratelimit.Request{{free.Key("ann")}, {free.Key("ann"), other}, {enterprise.Key("bob"), free.Key("ann"), other}} {
			if denied := w.DenyTake(100, requests...); !denied.RetryAt.IsZero() || denied.RetryAfter != math.MaxInt64/2 {
				w.Fatalf("%+v, want a permanent denial", denied)
			}
		}
		w.Holds(api, 0)
		w.Holds(other, 5)
		_, err := w.Limiter.Refund(w.Context(), w.DB, w.Take(4, 4, enterprise.Key("ann")).Receipt(), enterprise.Key("ann").Count(5))
		if !errors.Is(err, ratelimit.ErrInvalid) {
			w.Fatalf("more than was taken: %v", err)
		}
	})
}

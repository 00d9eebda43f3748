package integration_test

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc/codes"

	"github.com/txlimit/txlimit/ratelimit"
)

// TestAReservationIsNoPermission: a limit of 1 an hour, whose reservations have no bound, passes 1 of 50 requests through
// everything that grants. Nothing but Reserve and Wait can owe tokens.
func TestAReservationIsNoPermission(t *testing.T) {
	t.Parallel()
	const asked = 50
	limit := ratelimit.TokenBucket("hourly", 1, time.Hour) // MaxReserved is unset
	hourly := limit.Key("ann")
	passes := func(t *testing.T, pass func() bool) {
		t.Helper()
		passed := 0
		for range asked {
			if pass() {
				passed++
			}
		}
		if passed != 1 {
			t.Errorf("%d of %d passed", passed, asked)
		}
	}
	owesNothing := func(t *testing.T, limiter *ratelimit.Limiter, db ratelimit.DB) {
		t.Helper()
		if left := readBalance(t, limiter, db, hourly); left < 0 || left > 0.5 { // by hand, time goes on
			t.Errorf("%v are left", left)
		}
	}
	t.Run("httplimit", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, always(hourly)).serve()
		passes(t, func() bool { return s.get("/").Status == http.StatusOK })
		if n := s.called.Load(); n != 1 {
			t.Errorf("the handler was called %d times", n)
		}
		owesNothing(t, s.limit.Limiter, s.pool)
	})
	t.Run("rpclimit", func(t *testing.T) {
		rpcs(t, func(o *office, serve func() rpcClient) {
			client := serve()
			passes(o.T, func() bool {
				_, status := client.say(o.Context(), "hello")
				return status.Code() == codes.OK
			})
			if n := o.called.Load(); n != 1 {
				o.Errorf("the handler was called %d times", n)
			}
			owesNothing(o.T, o.limit.Limiter, o.pool)
		}, hourly)
	})
	t.Run("batch", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t, 1)
		limiter, _ := newLimiter()
		passes(t, func() bool {
			var batch pgx.Batch
			result := queue(t, limiter, &batch, hourly)
			err := limiter.SendTx(t.Context(), pool, &batch)
			if err != nil && !denied(err) || result.OK != (err == nil) {
				t.Errorf("%+v, %v", result, err)
			}
			return err == nil
		})
		owesNothing(t, limiter, pool)
	})
	t.Run("several of a batch", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t, 1)
		limiter, _ := newLimiter()
		var batch pgx.Batch
		var results []*ratelimit.Result
		for range asked {
			results = append(results, queue(t, limiter, &batch, hourly))
		}
		if err := pool.SendBatch(t.Context(), &batch).Close(); !denied(err) {
			t.Errorf("%v, want a denial", err)
		}
		if n := len(slices.DeleteFunc(results, func(r *ratelimit.Result) bool { return !r.OK })); n != 1 {
			t.Errorf("%d of %d are OK", n, asked)
		}
		if left := readBalance(t, limiter, pool, hourly); left != 1 { // all of the batch is rolled back
			t.Errorf("%v are left", left)
		}
	})
	// At once. A half of the transactions queues before BEGIN.
	for way, pass := range map[string]func(ctx context.Context, limiter *ratelimit.Limiter, pool *pgxpool.Pool, coalescer ratelimit.DB, i int) error{
		"coalescer": func(ctx context.Context, limiter *ratelimit.Limiter, _ *pgxpool.Pool, coalescer ratelimit.DB, _ int) error {
			return second(limiter.Consume(ctx, coalescer, hourly))
		},
		"transactions": func(ctx context.Context, limiter *ratelimit.Limiter, pool *pgxpool.Pool, _ ratelimit.DB, i int) error {
			options := []ratelimit.TxOption{ratelimit.Isolation(levels[i%len(levels)]), ratelimit.Attempts(1000)}
			if i%2 == 0 {
				options = append(options, ratelimit.Hot(hourly))
			}
			return limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error { return second(limiter.Consume(ctx, tx, hourly)) }, options...)
		},
	} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 4)
			limiter, _ := newLimiter()
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer closeCoalescer(t, coalescer)
			var passed atomic.Int32
			var wg sync.WaitGroup
			for i := range asked {
				wg.Go(func() {
					if err := pass(t.Context(), limiter, pool, coalescer, i); err == nil {
						passed.Add(1)
					} else if !denied(err) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if passed.Load() != 1 {
				t.Errorf("%d of %d passed", passed.Load(), asked)
			}
			owesNothing(t, limiter, pool)
		})
	}
	t.Run("take", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t, 1)
		limiter, _ := newLimiter()
		passes(t, func() bool {
			n, _, err := limiter.Take(t.Context(), pool, 100, hourly)
			if n > 1 || (err == nil) != (n == 1) {
				t.Errorf("took %d, %v", n, err)
			}
			return n > 0
		})
		owesNothing(t, limiter, pool)
	})
	// By hand. A denial is an error of all but ratelimit.try.
	for name, sql := range map[string]string{
		"ratelimit.consume":     "SELECT FROM ratelimit.consume('hourly', 'ann')",
		"ratelimit.take":        "SELECT FROM ratelimit.take('hourly', 'ann', most => 100)",
		"ratelimit.consume_all": `SELECT FROM ratelimit.consume_all('[{"name": "hourly", "key": "ann"}]')`,
		"ratelimit.try":         "SELECT FROM ratelimit.try('hourly', 'ann') WHERE granted",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 1)
			succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", limit))
			passes(t, func() bool {
				tag, err := pool.Exec(t.Context(), sql)
				if err != nil && sqlState(err) != "PT429" {
					t.Error(err)
				}
				return err == nil && tag.RowsAffected() == 1 // of ratelimit.try, if it was granted
			})
			owesNothing(t, new(ratelimit.Limiter), pool)
		})
	}
}

// TestNothingOfARequestChangesTheVerb: what a call does with a request is what the method of Limiter says.
func TestNothingOfARequestChangesTheVerb(t *testing.T) {
	t.Parallel()
	for _, of := range []reflect.Type{reflect.TypeFor[ratelimit.Request](), reflect.TypeFor[*ratelimit.Request]()} {
		var methods []string
		for method := range of.Methods() {
			methods = append(methods, method.Name)
		}
		if want := []string{"Count", "LogValue"}; !slices.Equal(methods, want) {
			t.Errorf("%v has the methods %v, want %v", of, methods, want)
		}
	}
	if of := reflect.TypeFor[ratelimit.Request](); slices.ContainsFunc(reflect.VisibleFields(of), reflect.StructField.IsExported) {
		t.Errorf("%v has exported fields", of)
	}
}

// TestAGrantOwesNothing makes random calls of every verb. A Result that is OK never has a RetryAt, and a Consume or a Take
// never leaves a balance below 0, whatever was reserved before.
func TestAGrantOwesNothing(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	pool := newPool(t, 1)
	clock := &clock{now: noon}
	grants := map[string]int{}
	debts := 0
	for n := 0; n < sized(1500, 400) || debts < 10 && n < 4000; n++ {
		var limits []ratelimit.Limit
		for i := range 2 {
			limits = append(limits, randomLimit(r, fmt.Sprint("limit ", n/50, i), oneOf(r, 1, 1, 3)))
		}
		limiter := &ratelimit.Limiter{Clock: clock.Now}
		var requests []ratelimit.Request
		for _, limit := range limits[:1+r.IntN(2)] {
			requests = append(requests, limit.Key("ann").Count(oneOf(r, 0, 1, 1, limit.Capacity()*r.Float64(), limit.Capacity()/2)))
		}
		clock.Advance(time.Duration(r.Int64N(int64(oneOf(r, time.Second, time.Minute, time.Hour)))).Truncate(time.Microsecond))
		var result ratelimit.Result
		var err error
		v := oneOf(r, "consume", "consume", "consume", "take", "check", "reserve", "charge")
		switch v {
		case "consume":
			result, err = limiter.Consume(t.Context(), pool, requests...)
		case "take":
			for i := range requests {
				requests[i] = requests[i].Count(1)
			}
			_, result, err = limiter.Take(t.Context(), pool, 1+r.IntN(100), requests...)
		case "check":
			result, err = limiter.Check(t.Context(), pool, requests...)
		case "charge":
			result, err = limiter.Charge(t.Context(), pool, requests...)
		case "reserve":
			if reserved, err := limiter.Reserve(t.Context(), pool, requests...); err == nil && reserved.Delay > 0 {
				debts++
			}
			continue
		}
		if err != nil {
			if result.OK {
				t.Fatalf("call %d: OK beside %v: %+v", n, err, result)
			}
			continue
		}
		grants[v]++
		if !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
			t.Fatalf("call %d: %s: %+v", n, v, result)
		}
		for i, s := range result.Requests {
			if !s.OK || !s.RetryAt.IsZero() || v != "charge" && s.Remaining < 0 {
				t.Fatalf("call %d: %s, request %d: %+v", n, v, i, s)
			}
		}
	}
	if grants["consume"] < 50 || grants["take"] < 10 || grants["check"] < 10 || grants["charge"] < 10 || debts < 10 {
		t.Errorf("%v granted, %d debts: this tested too little", grants, debts)
	}
}

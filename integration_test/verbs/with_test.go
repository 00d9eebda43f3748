package verbs_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestKeysWithNumbersOfTheirOwn: each key has its own rate and capacity, and the others have the definition's.
func TestKeysWithNumbersOfTheirOwn(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.Varies(time.Hour)),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3), ratelimit.Varies(time.Hour)),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(harness.Noon), ratelimit.Varies(time.Hour)),
			ratelimit.CalendarWindow("day", 10, ratelimit.Day, ratelimit.Varies(10*24*time.Hour)),
		} {
			large, small := limit.With(ratelimit.Rate(50)), limit.With(ratelimit.Capacity(40))
			none := limit.With(ratelimit.Rate(0))
			w.Grant(large.Key("ann").Count(50), small.Key("bob").Count(40), limit.Key("cid").Count(10), none.Key("dan").Count(0))
			for _, request := range []ratelimit.Request{large.Key("ann"), small.Key("bob"), limit.Key("cid"), none.Key("dan")} {
				w.Deny(request)
			}
			w.Clock.Advance(24 * time.Hour)
			w.Holds(large.Key("ann"), 50)
			w.Holds(limit.Key("cid"), 10)
			w.Refuse(ratelimit.ErrInvalid, large.Key("ann"), small.Key("ann"))
			w.Refuse(ratelimit.ErrExceedsCapacity, limit.Key("ann").Count(11))
			w.Grant(large.Key("ann").Count(45))
			w.Holds(large.Key("ann"), 5)
			w.Clock.At = harness.Noon
		}
	})
}

func TestKeysWithNumbersOfTheirOwnInACoalescer(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limiter, _ := harness.NewLimiter()
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit := ratelimit.TokenBucket("calls", 5, time.Minute, ratelimit.Varies(time.Hour))
	customers := []struct {
		ratelimit.Request
		want    int32
		granted atomic.Int32
	}{
		{Request: limit.Key("ann"), want: 5}, {Request: limit.With(ratelimit.Rate(10)).Key("bob"), want: 10},
		{Request: limit.With(ratelimit.Rate(20)).Key("cid"), want: 20}, {Request: limit.With(ratelimit.Rate(0)).Key("dan"), want: 0},
	}
	var wg sync.WaitGroup
	for range 30 {
		for i := range customers {
			wg.Go(func() {
				if _, err := limiter.Consume(t.Context(), coalescer, customers[i].Request); err == nil {
					customers[i].granted.Add(1)
				} else if !harness.Denied(err) {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	for i := range customers {
		if got := customers[i].granted.Load(); got != customers[i].want {
			t.Errorf("customer %d: %d granted, want %d", i, got, customers[i].want)
		}
	}
}

// customers makes a table with one customer, and returns what consumes by the quota in its row.
func customers(t *testing.T, pool *pgxpool.Pool, limiter *ratelimit.Limiter, limit ratelimit.Limit) (quotaOf func(ctx context.Context, tx pgx.Tx, lock string) ratelimit.Limit, raise func(quota float64)) {
	t.Helper()
	harness.MustExec(t, pool, "DROP TABLE IF EXISTS customers; CREATE TABLE customers (id text PRIMARY KEY, quota float8); INSERT INTO customers VALUES ('ann', 1000)")
	t.Cleanup(func() { _, _ = pool.Exec(context.WithoutCancel(t.Context()), "DROP TABLE IF EXISTS customers") })
	quotaOf = func(ctx context.Context, tx pgx.Tx, lock string) ratelimit.Limit {
		var quota float64
		if err := tx.QueryRow(ctx, "SELECT quota FROM customers WHERE id = 'ann' "+lock).Scan(&quota); err != nil {
			t.Error(err)
		}
		return limit.With(ratelimit.Rate(quota))
	}
	raise = func(quota float64) {
		t.Helper()
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE customers SET quota = $1 WHERE id = 'ann'", quota); err != nil {
				return err
			}
			return limiter.Reset(ctx, tx, limit.Key("ann"))
		}, ratelimit.Isolation(pgx.ReadCommitted))
		if err != nil {
			t.Error(err)
		}
	}
	return quotaOf, raise
}

// TestAnUpgradedCustomerIsNotCut: 16 goroutines lock the customer's row in the transaction that consumes, while the quota is
// raised. No call cuts the balance to the old capacity: what is left is the new quota less what was granted of it.
func TestAnUpgradedCustomerIsNotCut(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 18)
	limiter, clock := harness.NewLimiter()
	limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(harness.Noon), ratelimit.Varies(time.Hour))
	quotaOf, raise := customers(t, pool, limiter, limit)
	var mu sync.Mutex
	granted := map[float64]int{}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				var quota float64
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					own := quotaOf(ctx, tx, "FOR NO KEY UPDATE")
					quota = own.Capacity()
					_, err := limiter.Consume(ctx, tx, own.Key("ann"))
					return err
				}, ratelimit.Isolation(pgx.ReadCommitted))
				if err != nil && !harness.Denied(err) {
					t.Error(err)
					return
				}
				mu.Lock()
				if err == nil {
					granted[quota]++
				}
				mu.Unlock()
			}
		})
	}
	upgrades := 10
	for i := range upgrades {
		quota := float64(50_000 + i)
		raise(quota)
		harness.Eventually(t, "calls by the new quota", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return granted[quota] > 20
		})
	}
	close(done)
	wg.Wait()
	last := float64(50_000 + upgrades - 1)
	w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
	w.Holds(limit.With(ratelimit.Rate(last)).Key("ann"), last-float64(granted[last]))
}

// TestAStragglerCutsAnUpgradedCustomer: a call that read the old quota without a lock consumes after the upgrade, and cuts the
// balance to the old capacity. With a lock, the upgrade waits for the call.
func TestAStragglerCutsAnUpgradedCustomer(t *testing.T) {
	t.Parallel()
	for lock, want := range map[string]float64{"": 999, "FOR SHARE": 50_000, "FOR NO KEY UPDATE": 50_000} {
		t.Run(fmt.Sprintf("%q", lock), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			limiter, clock := harness.NewLimiter()
			w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
			limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(harness.Noon), ratelimit.Varies(time.Hour))
			quotaOf, raise := customers(t, pool, limiter, limit)
			tx, err := pool.Begin(t.Context())
			w.Do(err)
			defer tx.Rollback(context.WithoutCancel(t.Context()))
			old := quotaOf(t.Context(), tx, lock)
			raised := make(chan struct{})
			go func() {
				defer close(raised)
				raise(50_000)
			}()
			if lock == "" {
				<-raised
			} else {
				harness.WaitingFor(t, pool, tx)
			}
			_, err = limiter.Consume(t.Context(), tx, old.Key("ann"))
			w.Do(err)
			w.Do(tx.Commit(t.Context()))
			<-raised
			w.Holds(limit.With(ratelimit.Rate(50_000)).Key("ann"), want)
		})
	}
}

// TestPlansChangeUnderLoad: 8 goroutines call by the customer's plan, as docs/plans.md does, while the plan changes. Nobody runs again, and
// each plan begins with all calls so far used.
func TestPlansChangeUnderLoad(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 10)
	limiter, _ := harness.NewLimiter()
	limiter.OnRetry = func(_ context.Context, n int, err error) { t.Errorf("attempt %d: %v", n, err) }
	harness.MustExec(t, pool, "CREATE TABLE customers (plan text); INSERT INTO customers VALUES ('free'); CREATE TABLE calls (plan text)")
	plans := map[string]ratelimit.Request{}
	for name, rate := range map[string]float64{"free": 1e6, "pro": 2e6} {
		plans[name] = ratelimit.CalendarWindow("calls."+name, rate, ratelimit.Month).Key("ann")
	}
	planOf := func(ctx context.Context, tx pgx.Tx, lock string) (plan string, err error) {
		return plan, tx.QueryRow(ctx, "SELECT plan FROM customers "+lock).Scan(&plan)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var calls atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
					plan, err := planOf(ctx, tx, "FOR NO KEY UPDATE")
					if err != nil {
						return err
					}
					if _, err = limiter.Consume(ctx, tx, plans[plan]); err != nil {
						return err
					}
					_, err = tx.Exec(ctx, "INSERT INTO calls VALUES ($1)", plan)
					return err
				}, ratelimit.Isolation(pgx.ReadCommitted))
				if err == nil {
					calls.Add(1)
				} else if ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 10 {
		begun := calls.Load()
		harness.Eventually(t, "calls", func() bool { return calls.Load() > begun+20 })
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			from, err := planOf(ctx, tx, "FOR UPDATE")
			if err != nil {
				return err
			}
			to := map[string]string{"free": "pro", "pro": "free"}[from]
			if _, err := tx.Exec(ctx, "UPDATE customers SET plan = $1", to); err != nil {
				return err
			}
			if err := limiter.Move(ctx, tx, plans[from], plans[to]); err != nil {
				return err
			}
			var used float64
			if err := tx.QueryRow(ctx, "SELECT count(*) FROM calls").Scan(&used); err != nil {
				return err
			}
			balances, err := limiter.Balance(ctx, tx, plans[to])
			if err == nil && balances[0].Used != used {
				t.Errorf("change %d, to %s: %v used, want %v", i, to, balances[0].Used, used)
			}
			return err
		}, ratelimit.Isolation(pgx.ReadCommitted))
		if err != nil {
			t.Fatal(err)
		}
	}
	stop()
	wg.Wait()
}

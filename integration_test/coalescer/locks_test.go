package coalescer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// A statement that waited for a row finds it changed: its value, or only its time, or, in a window, only its value. It has
// to decide again each time.
func TestCoalescerDecidesAnewOnWhatItWaitedFor(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	bucket := ratelimit.TokenBucket("bucket", 10, 10*time.Minute)
	window := ratelimit.FixedWindow("window", 10, 10*time.Minute, ratelimit.Start(harness.Noon))
	for _, c := range []struct {
		name    string
		limit   ratelimit.Limit
		minutes int     // after the first call
		taken   float64 // by the transaction that holds the row
		left    float64
	}{
		{"both", bucket, 0, 3, 4},
		{"the time", bucket, 1, 1, 7}, // 9 and a minute is 10; 9
		{"the value", window, 1, 3, 4},
		{"nothing", bucket, 0, 0, 7},
		{"all but one", bucket, 0, 8, 0}, // one is granted
		{"everything", bucket, 0, 9, 0},  // both are denied
	} {
		asked := c.limit.Key("k")
		decide := func(t *testing.T, requests ...ratelimit.Request) {
			t.Parallel()
			pool := harness.NewPool(t, 6)
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer harness.CloseCoalescer(t, coalescer)
			limiter, clock := harness.NewLimiter()
			for _, request := range slices.Compact(slices.Clone(requests)) {
				if _, err := limiter.Consume(t.Context(), pool, request); err != nil {
					t.Fatal(err)
				}
			}
			clock.Advance(time.Duration(c.minutes) * time.Minute)
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := limiter.Charge(t.Context(), tx, asked.Count(c.taken)); err != nil {
				t.Fatal(err)
			}
			release := harness.HoldFlights(t, coalescer, pool)
			var wg sync.WaitGroup
			for _, request := range requests {
				a := harness.NewArrival(t.Context())
				wg.Go(func() {
					if _, err := limiter.Consume(a, coalescer, request); err != nil && !harness.Denied(err) {
						t.Error(err)
					}
				})
				<-a.Arrived
			}
			release()
			harness.Waiting(t, pool, 1) // one statement for all calls
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			if left := harness.ReadBalance(t, limiter, pool, asked); left != c.left {
				t.Errorf("%v are left, want %v", left, c.left)
			}
		}
		t.Run(c.name+", batch", func(t *testing.T) {
			decide(t, asked, asked, ratelimit.TokenBucket("other", 10, time.Minute).Key("k"))
		})
		t.Run(c.name+", keys", func(t *testing.T) { decide(t, asked, asked, c.limit.Key("other")) })
		t.Run(c.name+", sum", func(t *testing.T) { decide(t, asked, asked) })
	}
}

// TestCoalescerDoesNotDeadlock runs coalesced calls against direct calls for several limits, against transactions, and on
// keys that come and go, in any order. Postgres would end a deadlock with 40P01. The pools' tracers see that error even if
// the call is retried.
func TestCoalescerDoesNotDeadlock(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	schema := harness.NewPool(t, 1)
	pool, s := harness.Traced(t, schema, 16, nil)
	coalescers := []*ratelimit.Coalescer{{Pool: pool}, {Pool: pool}}
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("a", 1e5, time.Second, ratelimit.MaxReserved(100)),
		ratelimit.FixedWindow("b", 500, 100*time.Millisecond),
		ratelimit.TokenBucket("c", 300, time.Second),
	}
	var limiter ratelimit.Limiter
	var granted [4]atomic.Int64
	var wg sync.WaitGroup
	const enough = 10 // of each kind; a busy machine takes longer
	reached := func() bool {
		for way := range granted {
			if granted[way].Load() < enough {
				return false
			}
		}
		return true
	}
	begin := time.Now()
	for i := range 48 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for since := time.Duration(0); since < harness.Sized(3*time.Second, time.Second) || since < harness.Patience && !reached(); since = time.Since(begin) {
				var requests []ratelimit.Request
				for range harness.OneOf(r, 1, 1, 2, 4) {
					requests = append(requests, harness.OneOf(r, limits...).Key(fmt.Sprint(r.IntN(6))).Count(harness.OneOf(r, 1, 1, 1, 0.5, 3)))
				}
				reserve := r.IntN(4) == 0
				var err error
				way := harness.OneOf(r, 0, 0, 0, 0, 0, 0, 1, 2, 3)
				if i < 32 {
					way = 0
				}
				switch way {
				case 0:
					ctx, cancel := t.Context(), func() {}
					if r.IntN(20) == 0 { // some callers leave
						ctx, cancel = context.WithTimeout(ctx, time.Duration(r.Int64N(int64(5*time.Millisecond))))
					}
					_, err = harness.Decide(ctx, &limiter, coalescers[i%2], reserve, requests...)
					cancel()
				case 1:
					_, err = harness.Decide(t.Context(), &limiter, pool, reserve, requests...)
				case 2:
					err = limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						_, err := harness.Decide(ctx, &limiter, tx, reserve, requests...)
						return err
					}, ratelimit.Isolation(pgx.ReadCommitted))
				case 3:
					err = limiter.Reset(t.Context(), pool, harness.KeysOf(requests...)...)
				}
				if err == nil {
					granted[way].Add(1)
				} else if !harness.Denied(err) && !errors.Is(err, ratelimit.ErrExceedsCapacity) && !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("way %d: %v", way, err)
				}
			}
		})
	}
	wg.Wait()
	for _, coalescer := range coalescers {
		harness.CloseCoalescer(t, coalescer)
	}
	again := 0
	for _, state := range s.Failed {
		if state == "40P01" {
			t.Error("a deadlock")
		}
		again++
	}
	t.Logf("granted: %d coalesced, %d direct, %d in transactions, %d resets; %d statements, %d of them for many; %d retried", granted[0].Load(), granted[1].Load(),
		granted[2].Load(), granted[3].Load(), s.Count(""), s.Count("ratelimit._coalesce"), again)
	for way := range granted {
		if granted[way].Load() < enough {
			t.Errorf("%d grants of kind %d: this tested too little", granted[way].Load(), way)
		}
	}
}

// A statement for many calls locks rows in the order of a direct call for several limits: while it waits for the first row,
// the second is free.
func TestCoalescerLocksInTheOrderOfADirectCall(t *testing.T) {
	t.Parallel()
	one := harness.Slow("limit", 100)
	for _, c := range []struct {
		name          string
		first, second ratelimit.Request
	}{
		{"limits", harness.Slow("a limit", 100).Key("k"), harness.Slow("limit", 100).Key("k")},
		{"keys", one.Key("a").Count(0.5), one.Key("b")}, // a fraction, so no sums
		{"sums", one.Key("a"), one.Key("b")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 6)
			tracedPool, statements := harness.Traced(t, pool, 4, nil)
			coalescer := &ratelimit.Coalescer{Pool: tracedPool}
			defer harness.CloseCoalescer(t, coalescer)
			var limiter ratelimit.Limiter
			if _, err := limiter.Consume(t.Context(), pool, c.first, c.second); err != nil {
				t.Fatal(err)
			}
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			if _, err := limiter.Consume(t.Context(), tx, c.first); err != nil {
				t.Fatal(err)
			}
			release := harness.HoldFlights(t, coalescer, pool)
			f := harness.Enqueue(t, coalescer, nil, c.second, c.first)
			release()
			harness.WaitingFor(t, pool, tx)
			if _, err := tx.Exec(t.Context(), `SET LOCAL lock_timeout = '100ms'`); err != nil { // shorter than deadlock_timeout
				t.Fatal(err)
			}
			if _, err := limiter.Consume(t.Context(), tx, c.second); err != nil {
				t.Errorf("%v: the statement that waits for the first holds the second", err)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Error(err)
			}
			f.Wg.Wait()
			if err := errors.Join(f.Errs...); err != nil {
				t.Error(err)
			}
			if slices.Contains(statements.Failed, "40P01") { // the statement finds it, since its wait began first
				t.Error("a deadlock")
			}
		})
	}
}

// A row is deleted while a statement waits for it, and made again. A transaction may lock the new row and then wait for
// rows that the statement has locked meanwhile. The statement must not wait for that row out of order: it starts again.
func TestCoalescerDoesNotWaitForARowMadeAnew(t *testing.T) {
	t.Parallel()
	limit := harness.Slow("limit", 100)
	t.Run("batch", func(t *testing.T) { madeAnewWhileWaiting(t, limit.Key("a"), harness.Slow("other", 100).Key("b")) })
	t.Run("keys", func(t *testing.T) { madeAnewWhileWaiting(t, limit.Key("a"), limit.Key("b")) })
}

func madeAnewWhileWaiting(t *testing.T, a, b ratelimit.Request) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	tracedPool, s := harness.Traced(t, pool, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: tracedPool}
	defer harness.CloseCoalescer(t, coalescer)
	var limiter ratelimit.Limiter
	consume := func(db ratelimit.DB, request ratelimit.Request) {
		t.Helper()
		if _, err := limiter.Consume(t.Context(), db, request); err != nil {
			t.Error(err)
		}
	}
	consume(pool, a)
	consume(pool, b)
	begin := func() pgx.Tx {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return tx
	}
	commit := func(tx pgx.Tx) {
		t.Helper()
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
	}

	anew := begin()
	if err := limiter.Reset(t.Context(), anew, a); err != nil {
		t.Fatal(err)
	}
	consume(anew, a)
	holder := begin()
	consume(holder, b)
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.Enqueue(t, coalescer, nil, a, b)
	release()
	harness.WaitingFor(t, pool, anew)
	commit(anew)
	harness.WaitingFor(t, pool, holder) // the statement has reached b
	tx := begin()
	consume(tx, a)
	done := make(chan struct{})
	go func() {
		defer close(done)
		consume(tx, b) // after the statement
	}()
	harness.Waiting(t, pool, 2)
	commit(holder)
	<-done
	commit(tx)
	f.Wg.Wait()
	for _, err := range f.Errs {
		if err != nil {
			t.Error(err)
		}
	}
	if slices.Contains(s.Failed, "40P01") {
		t.Error("a deadlock")
	}
	for request, want := range map[ratelimit.Request]float64{a: 97, b: 96} {
		if left := harness.Remaining(t, pool, request); left < want || left > want+0.01 {
			t.Errorf("%v are left, want %v", left, want)
		}
	}
}

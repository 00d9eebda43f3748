package coalescer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestCoalescerChaos cancels callers, runs statements into timeouts, closes coalescers and kills connections at random.
// Every acknowledged token must be gone from the rows. No other may be gone, except those with an unknown outcome. Nothing
// may be left behind. The test is not parallel: it looks at all goroutines. -chaos sets its duration.
func TestCoalescerChaos(t *testing.T) {
	r := harness.NewRand(t)
	admin := harness.NewPool(t, 4)
	config := admin.Config()
	config.MaxConns = 4
	config.ConnConfig.RuntimeParams["application_name"] = "chaos"
	harness.StartWith(t, config.ConnConfig, map[string]string{"statement_timeout": "100ms"})
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()

	// These limits have almost no refill.
	plenty := ratelimit.TokenBucket("plenty", 1e-9, time.Hour, ratelimit.Capacity(1e9))
	scarce := ratelimit.TokenBucket("scarce", 1e-9, time.Hour, ratelimit.Capacity(30)) // small, so that a slow machine sees denials, too
	sharded := ratelimit.TokenBucket("sharded", 1e-9, time.Hour, ratelimit.Capacity(1e9), ratelimit.Shards(3))
	type account struct{ acknowledged, unknown atomic.Int64 }
	accounts := map[harness.RowsOf]*account{}
	for _, limit := range []ratelimit.Limit{plenty, scarce, sharded} {
		for i := range 8 {
			accounts[harness.RowsOf{Name: limit.Name(), Key: fmt.Sprint(i)}] = &account{}
		}
	}
	var limiter ratelimit.Limiter
	var current atomic.Pointer[ratelimit.Coalescer]
	current.Store(&ratelimit.Coalescer{Pool: pool})
	var granted, denials, failed, cancelled, closed, kills, blocks atomic.Int64
	isChaos := func() bool {
		return granted.Load() >= 100 && denials.Load() >= 10 && cancelled.Load() >= 10 && failed.Load() >= 10
	}
	// On a slow machine, it goes on until everything has happened often enough.
	ctx, stop := context.WithTimeout(t.Context(), harness.Patience)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() {
		for time.Sleep(*harness.Chaos); !isChaos() && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		}
		stop()
	})
	for range 32 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for ctx.Err() == nil {
				var requests []ratelimit.Request
				taken := map[harness.RowsOf]int64{}
				for range harness.OneOf(r, 1, 1, 1, 1, 3) {
					limit, key, n := harness.OneOf(r, plenty, plenty, plenty, plenty, scarce, scarce), fmt.Sprint(r.IntN(8)), int64(harness.OneOf(r, 1, 1, 1, 2))
					if r.IntN(200) == 0 {
						limit = sharded
					}
					requests = append(requests, limit.Key(key).Count(float64(n)))
					taken[harness.RowsOf{Name: limit.Name(), Key: key}] += n
				}
				callCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
				if r.IntN(10) == 0 {
					callCtx, cancel = context.WithTimeout(callCtx, time.Duration(r.Int64N(int64(5*time.Millisecond))))
				}
				_, err := limiter.Consume(callCtx, current.Load(), requests...)
				cancel()
				for id, n := range taken {
					switch {
					case err == nil:
						accounts[id].acknowledged.Add(n)
					case !harness.Denied(err) && !errors.Is(err, ratelimit.ErrClosed):
						accounts[id].unknown.Add(n)
					}
				}
				switch {
				case err == nil:
					granted.Add(1)
				case harness.Denied(err):
					denials.Add(1)
				case errors.Is(err, ratelimit.ErrClosed):
					closed.Add(1)
				case errors.Is(err, context.DeadlineExceeded):
					cancelled.Add(1)
				default:
					if strings.Contains(err.Error(), "disagree") {
						t.Error(err)
					}
					failed.Add(1)
				}
			}
		})
	}
	every := func(d time.Duration, what func(r *rand.Rand)) {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for ctx.Err() == nil {
				what(r)
				time.Sleep(time.Duration(r.Int64N(int64(d))))
			}
		})
	}
	every(200*time.Millisecond, func(*rand.Rand) { // kill
		_, err := admin.Exec(context.WithoutCancel(ctx), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'chaos' ORDER BY random() LIMIT 1`)
		if err != nil {
			t.Error(err)
		}
		kills.Add(1)
	})
	every(200*time.Millisecond, func(r *rand.Rand) { // hold a row for longer than statement_timeout
		tx, err := admin.Begin(context.WithoutCancel(ctx))
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := tx.Exec(context.WithoutCancel(ctx), `SELECT FROM ratelimit.limits WHERE key = $1 FOR UPDATE`, fmt.Sprint(r.IntN(8))); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Duration(r.Int64N(int64(150 * time.Millisecond))))
		if err := tx.Rollback(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		blocks.Add(1)
	})
	every(300*time.Millisecond, func(r *rand.Rand) { // close
		old := current.Swap(harness.OneOf(r, &ratelimit.Coalescer{Pool: pool}, &ratelimit.Coalescer{Pool: pool, AsyncCommit: true},
			&ratelimit.Coalescer{Pool: pool, Pace: 5 * time.Millisecond}))
		harness.CloseCoalescer(t, old)
	})
	wg.Wait()
	harness.CloseCoalescer(t, current.Load())
	t.Logf("%d granted, %d denied, %d cancelled, %d failed, %d on a closed one; %d kills, %d blockades", granted.Load(), denials.Load(),
		cancelled.Load(), failed.Load(), closed.Load(), kills.Load(), blocks.Load())
	if !isChaos() {
		t.Error("this tested too little")
	}

	harness.Eventually(t, "every connection is given back", func() bool { return pool.Stat().AcquiredConns() == 0 }) // a broken connection takes a little longer
	buf := make([]byte, 1<<20)
	if stacks := string(buf[:runtime.Stack(buf, true)]); strings.Contains(stacks, "ratelimit.(*Coalescer)") {
		t.Errorf("goroutines leaked:\n%s", stacks)
	}
	pool.Close()
	deadline := time.Now().Add(harness.Patience)
	for n := 1; n > 0; time.Sleep(10 * time.Millisecond) { // a killed statement may take a moment to end
		if err := admin.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE application_name = 'chaos'`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d backends are left", n)
		}
	}

	for _, limit := range []ratelimit.Limit{plenty, scarce, sharded} {
		for i := range 8 {
			account := accounts[harness.RowsOf{Name: limit.Name(), Key: fmt.Sprint(i)}]
			gone := int64(limit.Capacity() - harness.ReadBalance(t, &limiter, admin, limit.Key(fmt.Sprint(i))) + 0.5)
			if least, most := account.acknowledged.Load(), account.acknowledged.Load()+account.unknown.Load(); gone < least || gone > most {
				t.Errorf("%s %d: %d tokens are gone, want %d to %d", limit.Name(), i, gone, least, most)
			}
		}
	}
}

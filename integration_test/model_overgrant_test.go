package integration_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

const (
	burst     = 10
	perSecond = 10
)

// grants are the results of a run of hammer.
type grants struct {
	mu        sync.Mutex
	results   []ratelimit.Result // of each grant
	denied    time.Time          // the last denial, by the database's clock
	remaining float64            // the most that a denial reported
}

func (g *grants) add(result ratelimit.Result, granted bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if granted {
		g.results = append(g.results, result)
		return
	}
	if result.At.After(g.denied) {
		g.denied = result.At
	}
	for _, status := range result.Requests {
		g.remaining = max(g.remaining, status.Remaining)
	}
}

// over reports whether there was a denial at least d after the first grant, or there are far too many grants.
func (g *grants) over(d time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.results) == 0 {
		return false
	}
	first, _ := g.span()
	return g.denied.Sub(first) >= d || len(g.results) > 2*g.bound()
}

// span returns the instants of the first and the last grant, by the database's clock.
func (g *grants) span() (first, last time.Time) {
	at := func(a, b ratelimit.Result) int { return a.At.Compare(b.At) }
	return slices.MinFunc(g.results, at).At, slices.MaxFunc(g.results, at).At
}

// bound is the burst plus what was refilled between the first and the last grant.
func (g *grants) bound() int {
	first, last := g.span()
	return burst + int(last.Sub(first)*perSecond/time.Second)
}

// replay returns the least that the bucket had, and what it has at an instant. It replays the grants in the order in which
// they changed the row, which is the order of ResetAt: a call that waits for the row may have read the clock before calls
// that had the row meanwhile.
func (g *grants) replay(until time.Time) (least, left float64) {
	byRow := slices.SortedFunc(slices.Values(g.results), func(a, b ratelimit.Result) int {
		return a.Requests[0].ResetAt.Compare(b.Requests[0].ResetAt)
	})
	least, left = burst, burst
	last := byRow[0].At
	refill := func(at time.Time) {
		if at.After(until) {
			at = until
		}
		if at.After(last) {
			left, last = min(left+at.Sub(last).Seconds()*perSecond, burst), at
		}
	}
	for _, result := range byRow {
		refill(result.At)
		left--
		least = min(least, left)
	}
	refill(until)
	return least, left
}

// exact wants not one token too many granted, and none too few, except those that shards may lose.
func (g *grants) exact(t *testing.T, lost float64) {
	t.Helper()
	_, last := g.span()
	least, _ := g.replay(last)
	_, left := g.replay(g.denied) // includes later grants, which the denial may have seen, but not their refill
	t.Logf("%.3f tokens were left at the lowest point, %.3f at the last denial, %.3f by what a denial said", least, left, g.remaining)
	if len(g.results) > g.bound() {
		t.Errorf("%d grants, %d are due", len(g.results), g.bound())
	}
	if lost == 0 && least < -1e-6 { // the grants of shards have no single order
		t.Errorf("it granted %.3f tokens that were not there", -least)
	}
	if left >= 1+lost+1e-6 {
		t.Errorf("it denied when %.3f tokens were left", left)
	}
	if g.remaining >= 1 {
		t.Errorf("it denied with %.3f tokens remaining", g.remaining)
	}
}

// hammer lets 64 goroutines ask for one token of one key, until a denial 1.5 s (3 s with -whole) after the first grant.
func hammer(t *testing.T, consume func(ctx context.Context) (ratelimit.Result, error)) *grants {
	t.Helper()
	var g grants
	var wg sync.WaitGroup
	begin, d := time.Now(), sized(2*time.Second, 300*time.Millisecond)
	for range 64 {
		wg.Go(func() {
			for !g.over(d) && time.Since(begin) < time.Minute {
				result, err := consume(t.Context())
				if err != nil && !denied(err) {
					t.Error(err)
					return
				}
				g.add(result, err == nil)
				if err != nil {
					time.Sleep(2 * time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
	if len(g.results) == 0 {
		t.Fatal("nothing was granted")
	}
	if !g.over(d) {
		t.Error("no denial for a minute")
	}
	first, last := g.span()
	t.Logf("%d grants in %v; the bound is %d", len(g.results), last.Sub(first).Round(time.Millisecond), g.bound())
	return &g
}

// However one key is consumed, not one token too many is granted, and none too few. The test is not parallel: it needs the whole machine.
func TestOverGrant(t *testing.T) {
	type consume = func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error)
	exact := func(t *testing.T, name string, shards int, consume consume) {
		t.Helper()
		t.Run(name, func(t *testing.T) {
			limit := ratelimit.TokenBucket(name, perSecond, time.Second, ratelimit.Capacity(burst), ratelimit.Shards(shards))
			lost := 0.0
			if shards > 1 {
				lost = 5 // shards that are full at the start lose a little
			}
			hammer(t, func(ctx context.Context) (ratelimit.Result, error) { return consume(ctx, limit.Key("k")) }).exact(t, lost)
		})
	}
	everyTx(t, 16, func(t *testing.T, w txWay) {
		for level, options := range w.levels() {
			in := func(hot bool) consume {
				return func(ctx context.Context, request ratelimit.Request) (result ratelimit.Result, err error) {
					options := append(slices.Clone(options), ratelimit.Attempts(1000))
					if hot {
						options = append(options, ratelimit.Hot(request))
					}
					err = w.in(ctx, func(ctx context.Context, tx handle) error {
						result, err = w.limiter.Consume(ctx, tx, request)
						return err
					}, options...)
					return result, err
				}
			}
			exact(t, string(level), 1, in(false))
			if w.begins {
				exact(t, string(level)+", Hot", 1, in(true))
				exact(t, string(level)+", Hot, 3 shards", 3, in(true))
			}
		}
	})
	t.Run("SendTx", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t, 16)
		var limiter ratelimit.Limiter
		for _, level := range levels {
			exact(t, string(level), 1, func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error) {
				var batch pgx.Batch
				result, err := limiter.QueueConsume(ctx, &batch, request)
				if err != nil {
					return ratelimit.Result{}, err
				}
				err = limiter.SendTx(ctx, pool, &batch, ratelimit.Isolation(level), ratelimit.Attempts(1000))
				return *result, err
			})
		}
		if n := pool.Stat().NewConnsCount(); n > 16 {
			t.Errorf("%d connections", n)
		}
	})
	t.Run("autocommit", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t, 64)
		var limiter ratelimit.Limiter
		ahead := &ratelimit.Coalescer{Pool: pool, Ahead: ahead} // so few tokens are never taken ahead, but denials are remembered
		defer closeCoalescer(t, ahead)
		dbs := map[string]ratelimit.DB{"a pool": pool, "a Coalescer": &ratelimit.Coalescer{Pool: pool}, "a Coalescer with Ahead": ahead}
		for _, driver := range drivers {
			dbs["database/sql of "+driver] = ratelimit.SQL(openSQL(t, driver, pool.Config().ConnString(), 16))
		}
		for name, db := range dbs {
			exact(t, name, 1, func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error) {
				return limiter.Consume(ctx, db, request)
			})
		}
	})

	// The same row, read, computed and written by the client. It shows that the test can fail.
	t.Run("naive", func(t *testing.T) {
		pool := newPool(t, 64)
		limit := ratelimit.TokenBucket("hot", perSecond, time.Second, ratelimit.Capacity(burst))
		if _, err := new(ratelimit.Limiter).Consume(t.Context(), pool, limit.Key("k").Count(0)); err != nil {
			t.Fatal(err)
		}
		g := hammer(t, func(ctx context.Context) (result ratelimit.Result, err error) {
			err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
				var value float64
				var ts time.Time
				err := tx.QueryRow(ctx, `SELECT value, ts, clock_timestamp() FROM ratelimit.limits WHERE name = 'hot' AND key = 'k'`).Scan(&value, &ts, &result.At)
				if err != nil {
					return err
				}
				value = min(burst, value+result.At.Sub(ts).Seconds()*perSecond)
				if value < 1 {
					return new(ratelimit.DeniedError)
				}
				_, err = tx.Exec(ctx, `UPDATE ratelimit.limits SET value = $1, ts = $2 WHERE name = 'hot' AND key = 'k'`, value-1, result.At)
				return err
			})
			return result, err
		})
		if len(g.results) <= g.bound() {
			t.Errorf("reading, computing and writing granted %d of %d: this test cannot see an over-grant", len(g.results), g.bound())
		}
	})
}

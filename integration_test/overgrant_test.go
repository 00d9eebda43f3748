package integration_test

import (
	"context"
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

// grants is when tokens were granted, by the database's clock.
type grants struct {
	mu          sync.Mutex
	n           int
	first, last time.Time
}

func (g *grants) add(at time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n == 0 || at.Before(g.first) {
		g.first = at
	}
	if g.n == 0 || at.After(g.last) {
		g.last = at
	}
	g.n++
}

// bound is the burst plus what was refilled between the first and the last grant.
func (g *grants) bound() int {
	return burst + int(g.last.Sub(g.first)*perSecond/time.Second)
}

// due is how many are granted by the end of a hammering, at least: all but one or two.
func due() int { return burst + perSecond*unlessShort(3, 1) - 2 }

// hammer lets 64 goroutines ask for one token of one key for 3 s.
func hammer(t *testing.T, consume func(ctx context.Context) (at time.Time, granted bool, err error)) *grants {
	t.Helper()
	var g grants
	var wg sync.WaitGroup
	until := time.Now().Add(unlessShort(3*time.Second, time.Second))
	for range 64 {
		wg.Go(func() {
			for time.Now().Before(until) {
				at, granted, err := consume(t.Context())
				switch {
				case err != nil:
					t.Error(err)
					return
				case granted:
					g.add(at)
				default:
					time.Sleep(2 * time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d grants in %v; the bound is %d", g.n, g.last.Sub(g.first).Round(time.Millisecond), g.bound())
	return &g
}

// TestOverGrant is not parallel: it wants the machine for itself.
func TestOverGrant(t *testing.T) {
	limit := ratelimit.TokenBucket("hot", perSecond, time.Second, ratelimit.Capacity(burst))
	var limiter ratelimit.Limiter
	exact := func(t *testing.T, g *grants) {
		t.Helper()
		if g.n > g.bound() {
			t.Errorf("%d grants, %d are due", g.n, g.bound())
		}
		if g.n < due() {
			t.Errorf("%d grants, at least %d are due", g.n, due())
		}
	}
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			pool := newPool(t, 64)
			exact(t, hammer(t, func(ctx context.Context) (at time.Time, granted bool, err error) {
				err = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
					result, err := limiter.Consume(ctx, tx, limit.Key("k"))
					at = result.At
					return err
				}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
				if denied(err) {
					return at, false, nil
				}
				return at, err == nil, err
			}))
		})
	}
	t.Run("autocommit", func(t *testing.T) {
		pool := newPool(t, 64)
		exact(t, hammer(t, func(ctx context.Context) (time.Time, bool, error) {
			result, err := limiter.Consume(ctx, pool, limit.Key("k"))
			if denied(err) {
				return time.Time{}, false, nil
			}
			return result.At, err == nil, err
		}))
	})

	// The same on the same row by reading, computing and writing, so that the test is seen able to fail.
	t.Run("naive", func(t *testing.T) {
		pool := newPool(t, 64)
		if _, err := limiter.Consume(t.Context(), pool, limit.Key("k").Count(0)); err != nil {
			t.Fatal(err)
		}
		g := hammer(t, func(ctx context.Context) (at time.Time, granted bool, err error) {
			err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
				var value float64
				var ts time.Time
				err := tx.QueryRow(ctx, `SELECT value, ts, clock_timestamp() FROM rate_limits WHERE name = 'hot' AND key = 'k'`).Scan(&value, &ts, &at)
				if err != nil {
					return err
				}
				value = min(burst, value+at.Sub(ts).Seconds()*perSecond)
				if granted = value >= 1; !granted {
					return nil
				}
				_, err = tx.Exec(ctx, `UPDATE rate_limits SET value = $1, ts = $2 WHERE name = 'hot' AND key = 'k'`, value-1, at)
				return err
			})
			return at, granted, err
		})
		if g.n <= g.bound() {
			t.Errorf("reading, computing and writing granted %d of %d: this test cannot see an over-grant", g.n, g.bound())
		}
	})
}

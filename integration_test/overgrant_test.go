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

// grants is what came of a hammering, by the database's clock.
type grants struct {
	mu     sync.Mutex
	at     []time.Time // of each grant
	denied time.Time   // for the last time
}

func (g *grants) add(at time.Time, granted bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case granted:
		g.at = append(g.at, at)
	case at.After(g.denied):
		g.denied = at
	}
}

func (g *grants) first() time.Time { return slices.MinFunc(g.at, time.Time.Compare) }

// deniedAfter says whether it was denied still, so long after the first grant.
func (g *grants) deniedAfter(d time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.at) > 0 && g.denied.Sub(g.first()) >= d
}

// bound is the burst plus what was refilled between the first and the last grant.
func (g *grants) bound() int {
	return burst + int(slices.MaxFunc(g.at, time.Time.Compare).Sub(g.first())*perSecond/time.Second)
}

// left is what a bucket that has granted all this had left when it denied for the last time.
func (g *grants) left() float64 {
	left, last := float64(burst), g.first()
	refill := func(at time.Time) {
		if at.After(g.denied) {
			at = g.denied
		}
		if at.After(last) {
			left, last = min(left+at.Sub(last).Seconds()*perSecond, burst), at
		}
	}
	for _, at := range slices.SortedFunc(slices.Values(g.at), time.Time.Compare) {
		refill(at)
		left--
	}
	refill(g.denied)
	return left
}

// exact says that not one token too many was granted, nor one too few, but for so many that may be lost.
func (g *grants) exact(t *testing.T, lost float64) {
	t.Helper()
	if len(g.at) > g.bound() {
		t.Errorf("%d grants, %d are due", len(g.at), g.bound())
	}
	if left := g.left(); left >= 1+lost+1e-6 {
		t.Errorf("%d grants, and a denial where %.3f were left", len(g.at), left)
	}
}

// hammer lets 64 goroutines ask for one token of one key, until that is denied 3 s after the first grant. consume returns when it
// was decided.
func hammer(t *testing.T, consume func(ctx context.Context) (at time.Time, granted bool, err error)) *grants {
	t.Helper()
	var g grants
	var wg sync.WaitGroup
	begin, d := time.Now(), unlessShort(3*time.Second, time.Second)
	for range 64 {
		wg.Go(func() {
			for !g.deniedAfter(d) && time.Since(begin) < time.Minute {
				at, granted, err := consume(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				g.add(at, granted)
				if !granted {
					time.Sleep(2 * time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
	if !g.deniedAfter(d) {
		t.Fatalf("%d grants, and no denial in time", len(g.at))
	}
	t.Logf("%d grants, denied for the last time %v after the first, when %.3f were left", len(g.at), g.denied.Sub(g.first()).Round(time.Millisecond), g.left())
	return &g
}

// TestOverGrant is not parallel: it wants the machine for itself.
func TestOverGrant(t *testing.T) {
	limit := ratelimit.TokenBucket("hot", perSecond, time.Second, ratelimit.Capacity(burst))
	var limiter ratelimit.Limiter
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			pool := newPool(t, 64)
			hammer(t, func(ctx context.Context) (at time.Time, granted bool, err error) {
				err = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
					result, err := limiter.Consume(ctx, tx, limit.Key("k"))
					at = result.At
					return err
				}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
				if denied(err) {
					return at, false, nil
				}
				return at, err == nil, err
			}).exact(t, 0)
		})
	}
	t.Run("autocommit", func(t *testing.T) {
		pool := newPool(t, 64)
		hammer(t, func(ctx context.Context) (time.Time, bool, error) {
			result, err := limiter.Consume(ctx, pool, limit.Key("k"))
			if denied(err) {
				return result.At, false, nil
			}
			return result.At, err == nil, err
		}).exact(t, 0)
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
		if len(g.at) <= g.bound() {
			t.Errorf("reading, computing and writing granted %d of %d: this test cannot see an over-grant", len(g.at), g.bound())
		}
	})
}

package harness

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// A limit of so many tokens at once, and per second.
const (
	Burst     = 10
	PerSecond = 10
)

// Grants are the results of a run of Hammer.
type Grants struct {
	mu        sync.Mutex
	Results   []ratelimit.Result // of each grant
	denied    time.Time          // the last denial, by the database's clock
	remaining float64            // the most that a denial reported
}

func (g *Grants) add(result ratelimit.Result, granted bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if granted {
		g.Results = append(g.Results, result)
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
func (g *Grants) over(d time.Duration) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.Results) == 0 {
		return false
	}
	first, _ := g.span()
	return g.denied.Sub(first) >= d || len(g.Results) > 2*g.Bound()
}

// span returns the instants of the first and the last grant, by the database's clock.
func (g *Grants) span() (first, last time.Time) {
	at := func(a, b ratelimit.Result) int { return a.At.Compare(b.At) }
	return slices.MinFunc(g.Results, at).At, slices.MaxFunc(g.Results, at).At
}

// Bound is the burst plus what was refilled between the first and the last grant.
func (g *Grants) Bound() int {
	first, last := g.span()
	return Burst + int(last.Sub(first)*PerSecond/time.Second)
}

// replay returns the least that the bucket had, and what it has at an instant. It replays the grants in the order in which
// they changed the row, which is the order of ResetAt: a call that waits for the row may have read the clock before calls
// that had the row meanwhile.
func (g *Grants) replay(until time.Time) (least, left float64) {
	byRow := slices.SortedFunc(slices.Values(g.Results), func(a, b ratelimit.Result) int {
		return a.Requests[0].ResetAt.Compare(b.Requests[0].ResetAt)
	})
	least, left = Burst, Burst
	last := byRow[0].At
	refill := func(at time.Time) {
		if at.After(until) {
			at = until
		}
		if at.After(last) {
			left, last = min(left+at.Sub(last).Seconds()*PerSecond, Burst), at
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

// Exact wants not one token too many granted, and none too few, except those that shards may lose.
func (g *Grants) Exact(t *testing.T, lost float64) {
	t.Helper()
	_, last := g.span()
	least, _ := g.replay(last)
	_, left := g.replay(g.denied) // includes later grants, which the denial may have seen, but not their refill
	t.Logf("%.3f tokens were left at the lowest point, %.3f at the last denial, %.3f by what a denial said", least, left, g.remaining)
	if len(g.Results) > g.Bound() {
		t.Errorf("%d grants, %d are due", len(g.Results), g.Bound())
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

// Hammer lets 64 goroutines ask for one token of one key, until a denial 1.5 s (3 s with -whole) after the first grant.
func Hammer(t *testing.T, consume func(ctx context.Context) (ratelimit.Result, error)) *Grants {
	t.Helper()
	var g Grants
	var wg sync.WaitGroup
	begin, d := time.Now(), Sized(2*time.Second, 300*time.Millisecond)
	for range 64 {
		wg.Go(func() {
			for !g.over(d) && time.Since(begin) < time.Minute {
				result, err := consume(t.Context())
				if err != nil && !Denied(err) {
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
	if len(g.Results) == 0 {
		t.Fatal("nothing was granted")
	}
	if !g.over(d) {
		t.Error("no denial for a minute")
	}
	first, last := g.span()
	t.Logf("%d grants in %v; the bound is %d", len(g.Results), last.Sub(first).Round(time.Millisecond), g.Bound())
	return &g
}

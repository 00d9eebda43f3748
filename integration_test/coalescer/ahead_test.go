package coalescer_test

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// takenTokens are grants of one limit and key.
type takenTokens struct {
	mu  sync.Mutex
	all []grantOf
}

type grantOf struct {
	at     time.Time
	tokens float64
}

func (g *takenTokens) add(at time.Time, tokens float64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = append(g.all, grantOf{at, tokens})
}

func (g *takenTokens) sum() (sum float64) {
	for _, one := range g.all {
		sum += one.tokens
	}
	return sum
}

// over is how many tokens were granted beyond capacity + rate * T, at most, in any span T.
func (g *takenTokens) over(capacity, perSecond float64) (most float64) {
	slices.SortFunc(g.all, func(a, b grantOf) int { return a.at.Compare(b.at) })
	left, most := capacity, 0.0
	for i, one := range g.all {
		if i > 0 {
			left = min(capacity, left+perSecond*one.at.Sub(g.all[i-1].at).Seconds())
		}
		left -= one.tokens
		most = max(most, -left)
	}
	return most
}

// TestAheadKeepsThePromise lets two processes and one that asks for each call take from the same keys, in bursts with pauses, so that much
// comes back.
func TestAheadKeepsThePromise(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 12)
	var limiter ratelimit.Limiter
	bucket := ratelimit.TokenBucket("bucket", 1000, time.Second, ratelimit.Capacity(500))
	window := ratelimit.FixedWindow("window", 900, time.Second, ratelimit.Start(time.Unix(0, 0)))
	month := ratelimit.CalendarWindow("month", 1e6, "month", ratelimit.Zone("UTC"))
	requests := []ratelimit.Request{bucket.Key("k"), window.Key("k"), month.Key("k")}
	var granted [3]takenTokens
	var calls atomic.Int64
	pool2, s := harness.Traced(t, pool, 8, nil)
	end := time.Now().Add(harness.Sized(10*time.Second, 3*time.Second))
	var coalescers []*ratelimit.Coalescer
	var wg sync.WaitGroup
	for process := range 3 {
		var db ratelimit.DB = pool
		if process < 2 {
			c := &ratelimit.Coalescer{Pool: pool2, Ahead: harness.Ahead}
			coalescers, db = append(coalescers, c), c
		}
		for worker := range 8 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(process), uint64(worker)))
				for time.Now().Before(end) {
					pause := time.Duration(r.IntN(150)) * time.Millisecond
					for range 1 + r.IntN(300) {
						at, n := r.IntN(4), float64(1+r.IntN(3))
						asked := requests[at%3 : at%3+1]
						if at == 3 {
							asked = requests
						}
						counted := make([]ratelimit.Request, len(asked))
						for i, request := range asked {
							counted[i] = request.Count(n)
						}
						result, err := limiter.Consume(t.Context(), db, counted...)
						if denied := (*ratelimit.DeniedError)(nil); errors.As(err, &denied) {
							break
						} else if err != nil {
							t.Error(err)
							return
						}
						calls.Add(1)
						for i := range asked {
							granted[(at%3+i)%3].add(result.At, n)
						}
					}
					time.Sleep(pause)
				}
			})
		}
	}
	wg.Wait()
	for _, c := range coalescers {
		harness.CloseCoalescer(t, c)
	}
	if over := granted[0].over(500+1000*harness.Ahead.Seconds(), 1000); over > 1e-6 {
		t.Errorf("the bucket granted %v more than it promises", over)
	}
	// A call that waited for its row is dated when it began to, perhaps in the window before: so all windows from one on are counted.
	last := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()").Unix()
	for _, from := range granted[1].all {
		n, most := 0.0, 900*float64(last-from.at.Unix()+1)
		for _, one := range granted[1].all {
			if one.at.Unix() >= from.at.Unix() {
				n += one.tokens
			}
		}
		if n > most {
			t.Fatalf("the windows from %d to %d granted %v of %v", from.at.Unix(), last, n, most)
		}
	}
	left := harness.Remaining(t, pool, requests[2])
	lost := 1e6 - granted[2].sum() - left
	if lost < 0 {
		t.Errorf("of the month, %v are left after %v were granted", left, granted[2].sum())
	}
	statements := s.Count("")
	t.Logf("%v, %v and %v tokens in %d calls; beyond capacity + rate * T: %v of at most %v; %d statements for two processes, %d of them gave back; %v lost of the month",
		granted[0].sum(), granted[1].sum(), granted[2].sum(), calls.Load(), granted[0].over(500, 1000), 1000*harness.Ahead.Seconds(), statements, s.Count("refund"), lost)
	if int64(statements)*2 > calls.Load() {
		t.Errorf("%d statements for %d calls: hardly any was decided in memory", statements, calls.Load())
	}
}

// TestAhead plays one process alone.
func TestAhead(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	own, s := harness.Traced(t, pool, 4, nil)
	var observed, foreseen atomic.Int64
	limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) {
		if observed.Add(1); d.Ahead {
			foreseen.Add(1)
		}
	}}
	var counted atomic.Int64
	empty := ratelimit.TokenBucket("empty", 1, time.Hour, ratelimit.Capacity(5))
	var resets atomic.Bool
	c := &ratelimit.Coalescer{Pool: own, Ahead: time.Second, OnBatch: func(n int) {
		if counted.Add(int64(n)); resets.Swap(false) {
			harness.Succeeds(t, limiter.Reset(t.Context(), pool, empty.Key("r")))
		}
	}}
	limit, other := harness.Slow("foreseen", 10_000), harness.Slow("foreseen, too", 10_000) // other tests of the process reset theirs
	consume := func(requests ...ratelimit.Request) ratelimit.Result {
		result, err := limiter.Consume(t.Context(), c, requests...)
		harness.Succeeds(t, err)
		return result
	}
	calls := 0.0
	var last ratelimit.Result
	harness.Eventually(t, "five calls in a row are foreseen, and more is ahead", func() bool {
		before, seen := s.Count(""), foreseen.Load()
		for range 5 {
			calls++
			last = consume(limit.Key("k"))
		}
		return s.Count("")-before <= 1 && foreseen.Load()-seen >= 4 && harness.Remaining(t, pool, limit.Key("k")) < 10_000-calls &&
			harness.Near(last.Remaining, 10_000-calls) // nothing is on its way back
	})
	var receipt struct{ Taken []struct{ Held float64 } }
	harness.Succeeds(t, json.Unmarshal([]byte(last.Receipt()), &receipt))
	if !last.OK || receipt.Taken[0].Held < 10_000-calls { // what was left, without what is ahead
		t.Errorf("%v remain after %v calls, OK %v, receipt %s", last.Remaining, calls, last.OK, last.Receipt())
	}
	// A refund gives back what the call took, and drops what was known.
	back, err := limiter.Refund(t.Context(), pool, last.Receipt())
	harness.Succeeds(t, err)
	if back.Requests[0].Refunded != 1 {
		t.Errorf("%v came back of 1", back.Requests[0].Refunded)
	}
	before, began := s.Count(""), time.Now()
	consume(limit.Key("k"))
	if s.Count("") == before {
		t.Error("after a refund, a call was granted by what was known before")
	}
	// Nothing that is ahead is lost by these: see the end.
	_, err = limiter.Charge(t.Context(), pool, limit.Key("k").Count(2))
	harness.Succeeds(t, err)
	held, err := limiter.Hold(t.Context(), pool, "job", time.Minute, limit.Key("k").Count(3))
	harness.Succeeds(t, err)
	_, err = limiter.Settle(t.Context(), pool, held.Token, limit.Key("k").Count(1))
	harness.Succeeds(t, err)
	for range 20 {
		consume(limit.Key("k"))
	}
	// A reset is seen at once.
	for range 20 {
		consume(limit.Key("r"))
	}
	harness.Succeeds(t, limiter.Reset(t.Context(), pool, limit.Key("r")))
	if left := consume(limit.Key("r")).Remaining; !harness.Near(left, 10_000-1) {
		t.Errorf("%v remain after a reset and a call", left)
	}
	// Several limits, all or nothing.
	for range 20 {
		consume(limit.Key("a"), other.Key("a"))
	}
	before = s.Count("")
	for range 3 {
		if r := consume(limit.Key("a"), other.Key("a")); !harness.Near(r.Requests[0].Remaining, r.Requests[1].Remaining) {
			t.Errorf("%v and %v remain", r.Requests[0].Remaining, r.Requests[1].Remaining)
		}
	}
	if n := s.Count("") - before; n > 1 {
		t.Errorf("%d statements for 3 calls of two limits that were foreseen", n)
	}
	small := harness.Slow("small", 30)
	for range 20 {
		consume(limit.Key("b"))
	}
	for range 30 {
		consume(limit.Key("b"), small.Key("b"))
	}
	for range 5 {
		if _, err := limiter.Consume(t.Context(), c, limit.Key("b"), small.Key("b")); err == nil {
			t.Error("31 calls of 30 were granted")
		}
	}
	if left := consume(limit.Key("b")).Remaining; !harness.Near(left, 10_000-51) {
		t.Errorf("%v remain after 51 calls were granted, and 5 denied", left)
	}
	// A denial is remembered.
	consume(empty.Key("k").Count(5))
	before = s.Count("")
	for range 10 {
		_, err := limiter.Consume(t.Context(), c, empty.Key("k"))
		denied := (*ratelimit.DeniedError)(nil)
		if !errors.As(err, &denied) || denied.RetryAt.IsZero() || denied.Remaining > 0.1 {
			t.Errorf("%v, want a denial", err)
		}
	}
	if n := s.Count("") - before; n > 2 { // the first, by two
		t.Errorf("%d statements for 10 denials", n)
	}
	// Of a big limit, nothing is taken for calls that a small one lets no memory decide.
	for range 20 {
		consume(limit.Key("c"), harness.Slow("poor", 50).Key("c"))
	}
	if left := harness.Remaining(t, pool, limit.Key("c")); !harness.Near(left, 10_000-20) {
		t.Errorf("%v are left after 20 calls that a small limit decides", left)
	}
	// What was denied before a reset is not remembered after it.
	consume(empty.Key("r").Count(5))
	resets.Store(true)
	if _, err := limiter.Consume(t.Context(), c, empty.Key("r")); err == nil {
		t.Error("6 of 5 were granted")
	}
	consume(empty.Key("r"))
	gone, leave := context.WithCancel(t.Context())
	leave()
	if _, err := limiter.Consume(gone, c, limit.Key("a")); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", err)
	}
	decided := observed.Load() - 6 - 1 // the refund, the charge, the hold, the resets, and the canceled call
	harness.CloseCoalescer(t, c)
	if counted.Load() != decided {
		t.Errorf("OnBatch was told of %d calls, want %d", counted.Load(), decided)
	}
	late := time.Since(began) > time.Second // then some of what was ahead was lost
	if left, want := harness.Remaining(t, pool, limit.Key("k")), float64(10_000-calls-2-1-20); !harness.Near(left, want) && (left > want || !late) {
		t.Errorf("%v are left of k after %v calls, 3 other tokens and Close", left, calls+20)
	}
	if left, want := harness.Remaining(t, pool, limit.Key("a")), float64(10_000-23); !harness.Near(left, want) && (left > want || !late) {
		t.Errorf("%v are left after 23 calls and Close", left)
	}
	if _, err := limiter.Consume(t.Context(), c, limit.Key("a")); !errors.Is(err, ratelimit.ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
	for _, wrong := range []time.Duration{-1, 50, 2 * time.Second, harness.Ahead} {
		if _, err := limiter.Consume(t.Context(), &ratelimit.Coalescer{Pool: own, Ahead: wrong, AsyncCommit: wrong == harness.Ahead}, limit.Key("a")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Ahead %v: %v, want ErrInvalid", wrong, err)
		}
	}
}

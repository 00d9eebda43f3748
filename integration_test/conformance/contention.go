package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// contentionCases are many callers at once, in each way in which they can contend.
func contentionCases() []testCase {
	ways := calledWays()
	few := only(ways, func(w way) bool { return w.level != pgx.RepeatableRead && !w.sql })
	return []testCase{
		{name: "Contention: one key gives exactly its capacity", ways: ways, script: func(t *trial) { exhaust(t, 1, 100) }},
		{name: "Contention: four keys give exactly their capacity", ways: ways, script: func(t *trial) { exhaust(t, 4, 40) }},
		{name: "Contention: a sharded limit gives exactly its capacity", ways: few, script: func(t *trial) { exhaust(t, 1, 100, ratelimit.Shards(4)) }},
		{name: "Contention: several limits in any order", ways: few, spread: true, script: anyOrder},
		{name: "Contention: first uses of keys are raced", ways: few, script: firstUses},
		{name: "Contention: one key keeps its rate", ways: ways, script: func(t *trial) { keepRate(t, 1) }},
		{name: "Contention: four keys keep their rates", ways: few, script: func(t *trial) { keepRate(t, 4) }},
	}
}

// place is a limit and key that callers contend for, and what they got.
type place struct {
	request        ratelimit.Request
	capacity       float64
	granted, asked atomic.Int64
}

func (t *trial) place(limit ratelimit.Limit, key string) *place {
	return &place{request: t.of(limit, key), capacity: limit.Capacity()}
}

// tally is what came of the calls of a trial.
type tally struct {
	places                              []*place
	calls, conflicts, refusals, refused atomic.Int64
	mu                                  sync.Mutex
	refusal, conflict, failure          error
}

func (y *tally) note(where *error, err error) {
	y.mu.Lock()
	defer y.mu.Unlock()
	if *where == nil {
		*where = err
	}
}

// againAfterRefusal is how often a refused call is made again: on some servers, it works then.
const againAfterRefusal = 3

// exactly is for places whose grants are known: as many as were asked for, up to the capacity.
func exactly(p *place) (least, most int64) {
	n := min(p.asked.Load(), int64(p.capacity))
	return n, n
}

// race makes calls from many goroutines. asks says which places call i takes one token from.
func (t *trial) race(step string, calls int, places []*place, asks func(i int) []int) {
	t.raceFor(step, calls, places, asks, func(int) int { return 1 })
}

func (t *trial) raceFor(step string, calls int, places []*place, asks func(i int) []int, count func(i int) int) {
	t.unmodelled, t.step = true, step
	y := &t.tally
	if y.places == nil {
		y.places = places
		t.limiter.OnRetry = func(_ context.Context, failed ratelimit.Attempt) { y.conflicts.Add(1); y.note(&y.conflict, failed.Err) }
	}
	goroutines := t.s.goroutines
	if t.way.coalesced {
		goroutines *= 2 // which need no connection each
	}
	var next counter
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := int(next.next()); i < calls && y.failed() == nil; i = int(next.next()) {
				tokens := int64(count(i))
				var requests []ratelimit.Request
				for _, p := range asks(i) {
					requests = append(requests, places[p].request.Count(float64(tokens)))
				}
				granted, err := t.contend(y, requests)
				if err != nil {
					y.note(&y.failure, err)
					return
				}
				for _, p := range asks(i) {
					places[p].asked.Add(tokens)
					if granted {
						places[p].granted.Add(tokens)
					}
				}
			}
		})
	}
	wg.Wait()
	if y.failure != nil {
		t.failed(y.failure)
	}
}

func (y *tally) failed() error {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.failure
}

// contend makes one call, again after a conflict or a refusal. A call that is refused to the end is not granted.
func (t *trial) contend(y *tally, requests []ratelimit.Request) (granted bool, err error) {
	y.calls.Add(1)
	refusals := 0
	for {
		err := t.way.call(t.ctx, t, requests...)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, ratelimit.ErrDenied):
			return false, nil
		case t.ctx.Err() != nil || errors.Is(err, ratelimit.ErrUnknownOutcome):
			return false, err
		case isConflict(err):
			y.conflicts.Add(1)
			y.note(&y.conflict, err)
		case isClear(err, t.c.clear...):
			y.refusals.Add(1)
			y.note(&y.refusal, err)
			if refusals++; refusals > againAfterRefusal {
				y.refused.Add(1)
				return false, nil
			}
		default:
			return false, err
		}
		time.Sleep(pause)
	}
}

// settle compares the grants with the balances, each limit's with the bounds, and says what callers had to put up with.
func (t *trial) settle(bounds func(p *place) (least, most int64)) {
	y := &t.tally
	for i, p := range y.places {
		t.step = fmt.Sprintf("the sums of limit and key %d of %d", i+1, len(y.places))
		granted := p.granted.Load()
		least, most := bounds(p)
		if y.refused.Load() > 0 {
			least = 0
		}
		t.want(granted >= least && granted <= most, "%d to %d of %d tokens granted, came %d", least, most, p.asked.Load(), granted)
		for _, u := range t.used {
			if u.request != p.request {
				continue
			}
			balance, err := t.balance(t.ctx, u)
			if err != nil {
				t.unread(err)
				continue
			}
			t.want(near(p.capacity-balance, float64(granted)), "%d tokens gone, as many as granted, came %v", granted, p.capacity-balance)
		}
	}
	t.conclude()
}

// conclude tells of conflicts and refusals.
func (t *trial) conclude() {
	y := &t.tally
	if n := y.refused.Load(); n > 0 {
		t.step = fmt.Sprintf("%d of %d calls, each of them made %d times", n, y.calls.Load(), 1+againAfterRefusal)
		t.failed(y.refusal)
	}
	if n := y.refusals.Load(); n > 0 {
		t.condition = join(t.condition, fmt.Sprintf("%d of %d calls were refused, and worked when made again: %s", n, y.calls.Load(), errorText(y.refusal)))
	}
	if n := y.conflicts.Load(); n > 0 {
		told := fmt.Sprintf("%d of %d calls had to run again", n, y.calls.Load())
		if t.way.level == pgx.RepeatableRead || t.way.level == pgx.Serializable { // where callers have to expect them
			t.note = join(t.note, told)
		} else {
			t.condition = join(t.condition, told+", as by InTx or Retry: "+errorText(y.conflict))
		}
	}
	if t.way.coalesced {
		t.note = join(t.note, fmt.Sprintf("%d calls in the largest batch", t.s.largest.Load()))
	}
}

// exhaust has callers ask for more than there is.
func exhaust(t *trial, keys int, capacity float64, options ...ratelimit.Option) {
	var places []*place
	limit := t.still("bucket", capacity, options...)
	for i := range keys {
		places = append(places, t.place(limit, t.key(i)))
	}
	t.race("calls for more than there is", keys*(int(capacity)+2*t.s.goroutines), places, func(i int) []int { return []int{i % keys} })
	t.settle(exactly)
}

// anyOrder asks for three of four limits, in another order each time.
func anyOrder(t *trial) {
	var places []*place
	for i := range 4 {
		places = append(places, t.place(t.still(fmt.Sprint("limit", i), 60), t.key(i)))
	}
	t.race("calls for three limits", 120, places, func(i int) []int {
		asked := []int{i % 4, (i + 1 + i/4%3) % 4, (i + 1 + (i/4+1)%3) % 4}
		if i%2 == 1 {
			asked[0], asked[2] = asked[2], asked[0]
		}
		return asked
	})
	t.settle(func(*place) (least, most int64) { return 30, 60 })
}

// firstUses lets four callers race for each of many keys, which three of them get.
func firstUses(t *trial) {
	calls := t.s.calls
	if t.way.inTx() || t.way.coalesced {
		calls /= 4
	}
	limit := t.still("bucket", 3)
	var places []*place
	for i := range max(calls/4, 1) {
		places = append(places, t.place(limit, fmt.Sprintf("%s-%d", t.key(0), i)))
	}
	t.race("first uses", 4*len(places), places, func(i int) []int { return []int{i / 4} })
	t.settle(exactly)
}

// keepRate lets callers contend for tokens that refill by the server's clock. They go on until they have had half of what
// there was, or until the trial's time is over.
func keepRate(t *trial, keys int) {
	const rate, capacity = 10, 10 // a second
	t.unmodelled, t.step = true, "calls for more than there is"
	y := &t.tally
	t.limiter = &ratelimit.Limiter{OnRetry: func(_ context.Context, failed ratelimit.Attempt) { y.conflicts.Add(1); y.note(&y.conflict, failed.Err) }}
	limit := ratelimit.TokenBucket(t.name("rate"), rate, time.Second, ratelimit.Capacity(capacity))
	var places []*place
	for i := range keys {
		places = append(places, t.place(limit, t.key(i)))
	}
	began := time.Now()
	due := func(elapsed time.Duration) float64 { return capacity + rate*elapsed.Seconds() }
	enough := func() bool {
		for _, p := range places {
			if float64(p.granted.Load()) < due(time.Since(began))/2 {
				return false
			}
		}
		return true
	}
	patience := t.s.timeout / 2
	var next counter
	var wg sync.WaitGroup
	for range t.s.goroutines {
		wg.Go(func() {
			for y.failed() == nil {
				if elapsed := time.Since(began); elapsed > patience || elapsed > t.s.time && (enough() || y.refused.Load() > 0) {
					return
				}
				p := places[int(next.next())%keys]
				granted, err := t.contend(y, []ratelimit.Request{p.request})
				switch {
				case err != nil:
					y.note(&y.failure, err)
					return
				case granted:
					p.granted.Add(1)
				default:
					time.Sleep(2 * pause)
				}
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(began)
	if y.failure != nil {
		t.failed(y.failure)
	}
	for i, p := range places {
		granted, bound := float64(p.granted.Load()), due(elapsed)
		t.want(granted <= bound+1, "%.1f tokens at most in %v from key %d, came %v", bound, elapsed.Round(time.Millisecond), i+1, granted)
		if y.refused.Load() == 0 {
			t.want(granted >= bound/2-1, "half of %.1f tokens at least in %v from key %d, came %v", bound, elapsed.Round(time.Millisecond), i+1, granted)
		}
		t.note = join(t.note, fmt.Sprintf("%v of %.1f granted", granted, bound))
	}
	t.conclude()
}

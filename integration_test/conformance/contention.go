package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	plain := only(ways, func(w way) bool {
		return !w.sql && !strings.Contains(w.name, "Hot") && !strings.Contains(w.name, "SendTx")
	})
	return []testCase{
		{name: "Contention: one key gives exactly its capacity", ways: ways, script: func(t *trial) { exhaust(t, 1, 100) }},
		{name: "Contention: four keys give exactly their capacity", ways: ways, script: func(t *trial) { exhaust(t, 4, 40) }},
		{name: "Contention: a sharded limit gives exactly its capacity", ways: few, script: func(t *trial) { exhaust(t, 1, 100, ratelimit.Shards(4)) }},
		{name: "Contention: several limits in any order", ways: few, spread: true, script: anyOrder},
		{name: "Contention: first uses of keys are raced", ways: few, script: firstUses},
		{name: "Contention: first uses of several limits are raced", ways: ways, spread: true, script: firstUsesOfSeveral},
		{name: "Contention: calls of every kind lose nothing of each other", ways: plain, script: everyKind},
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
	t.raceCalls(step, calls, places, func(i int) (asked []asking, err error) {
		var requests []ratelimit.Request
		for _, p := range asks(i) {
			asked = append(asked, asking{p, count(i)})
			requests = append(requests, places[p].request.Count(float64(count(i))))
		}
		return asked, t.way.call(t.ctx, t, requests...)
	})
}

// asking is how many tokens a call asks a place for. A refund asks for less than none.
type asking struct{ place, tokens int }

// raceCalls makes calls from many goroutines. call makes call i, again after a conflict, and says what it asks for.
func (t *trial) raceCalls(step string, calls int, places []*place, call func(i int) ([]asking, error)) {
	t.unmodelled, t.step = true, step
	y := &t.tally
	if y.places == nil {
		y.places = places
		t.limiter.OnRetry = func(_ context.Context, _ int, failed error) { y.conflicts.Add(1); y.note(&y.conflict, failed) }
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
				var asked []asking
				granted, err := t.contend(y, func() (err error) {
					asked, err = call(i)
					return err
				})
				if err != nil {
					y.note(&y.failure, err)
					return
				}
				for _, a := range asked {
					places[a.place].asked.Add(int64(a.tokens))
					if granted {
						places[a.place].granted.Add(int64(a.tokens))
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
func (t *trial) contend(y *tally, call func() error) (granted bool, err error) {
	y.calls.Add(1)
	refusals := 0
	for {
		err := call()
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

// crowds is how many crowds of callers race, one after another.
func (t *trial) crowds() int {
	if t.s.short {
		return 3
	}
	return 30
}

// firstUsesOfSeveral lets crowds of callers race for the first use of two limits in one call: one that all ask for, and one of three others. Who
// takes the row of the first for inserted and locked, though another has just inserted it, grants more than there is. (If all asked for
// the same limits, the lock of the second would hide it.)
func firstUsesOfSeveral(t *trial) {
	const limits, capacity, crowd = 4, 10, 16
	var places []*place
	for g := range t.crowds() {
		for i := range limits {
			var options []ratelimit.Option
			if i > 0 && g%2 == 1 { // a Coalescer sends these calls one by one
				options = append(options, ratelimit.Shards(2))
			}
			places = append(places, t.place(t.still(fmt.Sprintf("limit%d of %d", i, g%2), capacity, options...), fmt.Sprintf("%s-%d", t.key(i), g)))
		}
	}
	t.race("first uses of two limits", crowd*t.crowds(), places, func(i int) []int {
		first := i / crowd * limits
		asked := []int{first, first + 1 + i%(limits-1)}
		if i%2 == 1 {
			asked[0], asked[1] = asked[1], asked[0]
		}
		return asked
	})
	t.settle(func(p *place) (least, most int64) {
		if slices.Index(places, p)%limits == 0 {
			return exactly(p)
		}
		return 0, capacity
	})
}

// everyKind makes calls of every kind that writes, for two limits of one key: some add to what a row says, and some write what they have worked
// out. Each key is first used in the race. What was granted must be gone: a row that is written without a lock loses what others took.
func everyKind(t *trial) {
	const crowd = 15
	l := new(ratelimit.Limiter) // by the database's clock: then a pool begins with a statement of its own
	var places []*place
	for g := range t.crowds() {
		key := fmt.Sprintf("%s-%d", t.key(0), g)
		places = append(places, t.place(t.still("plain", 10_000), key), t.place(t.still("shards", 10_000, ratelimit.Shards(2)), key))
	}
	receipts := make([]ratelimit.Receipt, crowd*t.crowds())
	for round, step := range []string{"first uses", "later uses"} {
		t.raceCalls(step, crowd*t.crowds(), places, func(i int) (asked []asking, err error) {
			plain := 2 * (i / crowd)
			a, b := places[plain].request, places[plain+1].request
			took := func(ofPlain, ofShards int) { asked = []asking{{plain, ofPlain}, {plain + 1, ofShards}} }
			err = t.transact(func(ctx context.Context, db ratelimit.DB) error {
				switch {
				case i%5 == 0 && round == 1:
					took(-2, -2)
					_, err := l.Refund(ctx, db, receipts[i], a.Count(2), b.Count(2))
					return err
				case i%5 == 0:
					took(3, 3)
					r, err := l.Consume(ctx, db, b.Count(3), a.Count(3))
					receipts[i] = r.Receipt()
					return err
				case i%5 == 1:
					took(1, 0)
					_, err := l.Consume(ctx, db, a)
					return err
				case i%5 == 2:
					took(2, 2)
					_, err := l.Charge(ctx, db, a.Count(2), b.Count(2))
					return err
				case i%5 == 3:
					n, _, err := l.Take(ctx, db, 4, b)
					took(0, n)
					return err
				default:
					took(1, 0)
					_, err := l.Reserve(ctx, db, a)
					return err
				}
			})
			return asked, err
		})
	}
	t.settle(func(p *place) (least, most int64) { n := p.asked.Load(); return n, n })
}

// transact makes calls that commit, in the trial's way.
func (t *trial) transact(calls func(ctx context.Context, db ratelimit.DB) error) error {
	switch {
	case t.way.coalesced:
		return calls(t.ctx, t.coalescer)
	case t.way.inTx():
		return t.limiter.InTx(t.ctx, t.s.pool, func(ctx context.Context, tx pgx.Tx) error { return calls(ctx, tx) }, ratelimit.Isolation(t.way.level))
	}
	return calls(t.ctx, t.s.pool)
}

// keepRate lets callers contend for tokens that refill by the server's clock. They go on until they have had half of what
// there was, or until the trial's time is over.
func keepRate(t *trial, keys int) {
	const rate, capacity = 10, 10 // a second
	t.unmodelled, t.step = true, "calls for more than there is"
	y := &t.tally
	t.limiter = &ratelimit.Limiter{OnRetry: func(_ context.Context, _ int, failed error) { y.conflicts.Add(1); y.note(&y.conflict, failed) }}
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
				granted, err := t.contend(y, func() error { return t.way.call(t.ctx, t, p.request) })
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

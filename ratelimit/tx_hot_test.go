package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

var (
	plain = TokenBucket("plain", 10, time.Minute)
	wide  = TokenBucket("wide", 10, time.Minute, Shards(10))
)

// demanded is the demands that Hot makes from requests.
func demanded(t *testing.T, requests ...Request) []demand {
	t.Helper()
	ds, _, err := demands(verbs[verbReset], requests, pgtype.Timestamptz{})
	if err != nil {
		t.Fatal(err)
	}
	return ds
}

// enterInTurn lets n goroutines enter, one after another, and sends their numbers as they pass.
func enterInTurn(t *testing.T, q *queues, hot []demand, n int, ctx func(i int) context.Context) (passed chan int, leaves []func(), errs []error, wait func()) {
	t.Helper()
	passed = make(chan int, n)
	leaves, errs = make([]func(), n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			_, leaves[i], errs[i] = q.enter(ctx(i), hot)
			passed <- i
		})
		for q.locked(func() int { return q.length(lane{hot[0].limit.name, hot[0].key, 0, 1}) }) != i+1 {
			runtime.Gosched()
		}
	}
	return passed, leaves, errs, wg.Wait
}

// locked calls ask under the mutex.
func (q *queues) locked(f func() int) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return f()
}

func (q *queues) empty(t *testing.T) {
	t.Helper()
	if n := q.locked(func() int { return len(q.byStripe) }); n != 0 {
		t.Errorf("%d queues are left behind", n)
	}
}

func TestTheQueueIsFirstInFirstOut(t *testing.T) {
	t.Parallel()
	var q queues
	const n = 20
	passed, leaves, errs, wait := enterInTurn(t, &q, demanded(t, plain.Key("k")), n, func(int) context.Context { return t.Context() })
	first := []int{<-passed, <-passed}
	if slices.Sort(first); !slices.Equal(first, []int{0, 1}) {
		t.Fatalf("%v passed first", first)
	}
	for i := range n {
		select {
		case other := <-passed:
			t.Fatalf("%d passed before %d had left", other, i)
		case <-time.After(2 * time.Millisecond):
		}
		if errs[i] != nil {
			t.Fatal(errs[i])
		}
		leaves[i]()
		if i+2 < n {
			if next := <-passed; next != i+2 {
				t.Fatalf("%d passed after %d", next, i)
			}
		}
	}
	wait()
	q.empty(t)
}

func TestWhoIsCancelledLeavesTheQueueAndTheOthersMoveUp(t *testing.T) {
	t.Parallel()
	var q queues
	ctx, cancel := context.WithCancelCause(t.Context())
	passed, leaves, errs, wait := enterInTurn(t, &q, demanded(t, plain.Key("k")), 6, func(i int) context.Context {
		if i == 2 || i == 4 {
			return ctx
		}
		return t.Context()
	})
	<-passed
	<-passed
	cancel(errors.New("a reason"))
	gone := []int{<-passed, <-passed}
	if slices.Sort(gone); !slices.Equal(gone, []int{2, 4}) || !errors.Is(errs[2], context.Canceled) || !errors.Is(errs[4], context.Canceled) {
		t.Fatalf("%v: %v", gone, errs)
	}
	for i, next := range map[int]int{0: 3, 1: 5} {
		leaves[i]()
		if got := <-passed; got != next && got != 8-next {
			t.Fatalf("%d passed", got)
		}
	}
	wait()
	leaves[3]()
	leaves[5]()
	q.empty(t)

	if _, _, err := q.enter(ctx, demanded(t, plain.Key("k"))); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that is over: %v", err)
	}
	q.empty(t)
}

func TestWhoGivesUpWaitingForOneLimitKeepsNoTurnOnAnother(t *testing.T) {
	t.Parallel()
	var q queues
	one, other := lane{plain.name, "a", 0, 1}, lane{plain.name, "b", 0, 1}
	if one.stripe() > other.stripe() { // the first one to enter
		one, other = other, one
	}
	a, b := demanded(t, plain.Key(one.key)), demanded(t, plain.Key(other.key))
	var leaves []func()
	for range 2 {
		_, leave, err := q.enter(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		leaves = append(leaves, leave)
	}
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error)
	go func() {
		_, _, err := q.enter(ctx, append(a, b...))
		gone <- err
	}()
	for q.locked(func() int { return q.length(other) }) != 3 {
		runtime.Gosched()
	}
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if n := q.locked(func() int { return q.length(one) }); n != 0 {
		t.Errorf("%d are past the other queue", n)
	}
	for _, leave := range leaves {
		leave()
	}
	q.empty(t)
}

// Everything is random: several limits in any order, and contexts that end at any moment.
func TestQueuesNeverLetMoreThanTwoPassAndNeverGetStuck(t *testing.T) {
	t.Parallel()
	var q queues
	seed := rand.Uint64()
	before := runtime.NumGoroutine()
	var past [4]atomic.Int64
	var granted, refused atomic.Int64
	var wg sync.WaitGroup
	for g := range 32 {
		r := rand.New(rand.NewPCG(seed, uint64(g)))
		wg.Go(func() {
			for range 500 {
				var requests []Request
				keys := r.Perm(len(past))[:1+r.IntN(3)]
				for _, key := range keys {
					requests = append(requests, plain.Key(fmt.Sprint(key)))
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(2_000_000)))
				_, leave, err := q.enter(ctx, demanded(t, requests...))
				if err != nil {
					refused.Add(1)
					cancel()
					continue
				}
				granted.Add(1)
				for _, key := range keys {
					if n := past[key].Add(1); n > 2 {
						t.Errorf("%d are past the queue (seed %d)", n, seed)
					}
				}
				if r.IntN(4) == 0 {
					time.Sleep(time.Duration(r.IntN(200_000)))
				}
				for _, key := range keys {
					past[key].Add(-1)
				}
				leave()
				cancel()
			}
		})
	}
	wg.Wait()
	q.empty(t)
	t.Logf("%d granted, %d refused", granted.Load(), refused.Load())
	if granted.Load() == 0 || refused.Load() == 0 {
		t.Error("this test wants both")
	}
	for i := 0; runtime.NumGoroutine() > before+8; i++ { // other tests run at the same time
		if i == 1000 {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
		time.Sleep(time.Millisecond)
	}
}

// Keys that share a view share a queue: no more transactions pass than for one key. A transaction that wants both enters once.
func TestKeysThatMeetWaitInOneQueue(t *testing.T) {
	t.Parallel()
	var q queues
	stripe := lane{"plain", "k", 0, 1}.stripe()
	var meets []string
	for i := 0; len(meets) < 3; i++ {
		if key := fmt.Sprint(i); (lane{"plain", key, 0, 1}).stripe() == stripe {
			meets = append(meets, key)
		}
	}
	passed := make(chan func(), 3)
	for _, requests := range [][]Request{{plain.Key(meets[0]), plain.Key(meets[1])}, {plain.Key("k")}, {plain.Key(meets[2])}} {
		before := q.locked(func() int { return q.length(lane{"plain", "k", 0, 1}) })
		hot := demanded(t, requests...)
		go func() {
			turn, leave, err := q.enter(t.Context(), hot)
			if err != nil || len(turn) != len(hot) {
				t.Errorf("%v, %v", turn, err)
			}
			passed <- leave
		}()
		for q.locked(func() int { return q.length(lane{"plain", "k", 0, 1}) }) != before+1 {
			runtime.Gosched()
		}
	}
	leaves := []func(){<-passed, <-passed}
	select {
	case <-passed:
		t.Error("a third passed")
	case <-time.After(2 * time.Millisecond):
	}
	leaves[0]()
	(<-passed)()
	leaves[1]()
	q.empty(t)
}

// A transaction enters its queues in the order of the views. The order of limits and keys differs from that at random: in that
// order, two transactions could each enter a queue that the other one waits for.
func TestQueuesAreEnteredInTheOrderOfTheViews(t *testing.T) {
	t.Parallel()
	var q queues
	var requests []Request
	for i := range 20 {
		requests = append(requests, plain.Key(fmt.Sprint(i)))
	}
	turn := q.choose(t.Context(), demanded(t, requests...))
	if len(turn) != len(requests) || !slices.IsSortedFunc(turn, func(a, b lane) int { return a.stripe() - b.stripe() }) {
		t.Errorf("the order is %v", turn)
	}
}

func TestTheShorterOfTwoQueuesIsChosen(t *testing.T) {
	t.Parallel()
	var q queues
	hot := demanded(t, wide.Key("k"))
	full := lane{"wide", "k", 3, 10}
	if err := q.wait(t.Context(), full); err != nil {
		t.Fatal(err)
	}
	chosen := map[int]int{}
	for range 1000 {
		chosen[q.choose(t.Context(), hot)[0].shard]++
	}
	if len(chosen) != 9 || chosen[3] != 0 {
		t.Errorf("shards %v were chosen, want all but 3, whose queue is longer", chosen)
	}
	q.leave(full)
	q.empty(t)
}

func TestTheShardTravelsInTheContext(t *testing.T) {
	t.Parallel()
	turn := turn{{"plain", "k", 0, 1}, {"wide", "k", 7, 10}}
	ctx := context.WithValue(t.Context(), turnKey{}, turn)
	for _, row := range []struct {
		ctx   context.Context
		limit Limit
		key   string
		shard int
		ok    bool
	}{
		{ctx, wide, "k", 7, true},
		{ctx, plain, "k", 0, true},
		{ctx, wide, "other", 0, false},
		{ctx, TokenBucket("wide", 10, time.Minute, Shards(5)), "k", 0, false}, // there is no shard 7
		{t.Context(), wide, "k", 0, false},
	} {
		if shard, ok := hotShard(row.ctx, row.limit, row.key); shard != row.shard || ok != row.ok {
			t.Errorf("%v, %q: %d, %v", row.limit, row.key, shard, ok)
		}
	}
}

// Other processes may run another version, so the view of a limit and key must never change.
func TestTheStripesStayTheSame(t *testing.T) {
	t.Parallel()
	for want, n := range map[string]lane{
		"lock table ratelimit.turn_10 in share update exclusive mode": {"signUps", "", 0, 1},
		"lock table ratelimit.turn_15 in share update exclusive mode": {"wide", "k", 0, 10},
		"lock table ratelimit.turn_22 in share update exclusive mode": {"wide", "k", 7, 10},
	} {
		if got := lockQuery("", (turn{n}).views()...); got != want {
			t.Errorf("%+v: %q", n, got)
		}
	}
	seen := map[int]bool{}
	for shard := range stripes {
		seen[lane{"wide", "k", shard, maxShards}.stripe()] = true
	}
	if len(seen) != stripes {
		t.Errorf("%d shards share %d stripes", stripes, len(seen))
	}
	query := lockQuery("", turn{{"wide", "k", 3, 10}, {"wide", "k", 3 + stripes, 100}, {"wide", "k", 1, 10}}.views()...)
	if !strings.Contains(query, "ratelimit.turn_16, ratelimit.turn_18 in") {
		t.Errorf("not sorted, or locked twice: %q", query)
	}
}

// untouched is a database that must not be called.
type untouched struct{ t *testing.T }

func (u untouched) BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error) {
	u.t.Error("a transaction was begun")
	return nil, errors.New("untouched")
}

func TestWrongHotLimitsAreRefusedBeforeAnythingHappens(t *testing.T) {
	t.Parallel()
	var limiter Limiter
	fn := func(context.Context, pgx.Tx) error { t.Error("called"); return nil }
	for name, requests := range map[string][]Request{
		"the zero request":     {{}},
		"a zero limit":         {Limit{}.Key("k")},
		"an empty key":         {plain.Key("")},
		"a wrong limit":        {TokenBucket("wrong", -1, time.Minute).Key("k")},
		"one of several":       {plain.Key("k"), plain.Key("")},
		"differing definition": {plain.Key("k"), TokenBucket("plain", 11, time.Minute).Key("k")},
	} {
		if err := limiter.InTx(t.Context(), untouched{t}, fn, Hot(requests...)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	inside := context.WithValue(t.Context(), turnKey{}, turn{{"plain", "k", 0, 1}})
	err := limiter.InTx(inside, untouched{t}, fn, Hot(plain.Key("other")))
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "wait for itself") {
		t.Errorf("nested: %v", err)
	}
	limiter.queues.empty(t)
}

package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// each calls ConsumeEach, and wants no error.
func each(w harness.World, requests ...ratelimit.Request) []ratelimit.Result {
	w.Helper()
	decided, err := w.Limiter.ConsumeEach(w.Context(), w.DB, requests...)
	for range decided.Granted() {
		break // which is allowed
	}
	for place, r := range decided.Granted() {
		if !r.OK {
			w.Fatalf("%d is denied, and among the granted: %+v", place, r)
		}
	}
	results, err := harness.InOrder(decided, err)
	if err != nil || len(results) != len(requests) {
		w.Fatalf("%d results of %d requests: %v", len(results), len(requests), err)
	}
	return results
}

// oks says which are granted: "+" and "-".
func oks(results []ratelimit.Result) string {
	var text strings.Builder
	for i := range results {
		if results[i].OK {
			text.WriteByte('+')
		} else {
			text.WriteByte('-')
		}
	}
	return text.String()
}

func TestEachIsDecidedByItselfAndInOrder(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("each", 10, time.Minute)
		ann, bob, cid := limit.Key("ann"), limit.Key("bob"), limit.Key("cid")
		// The second ask for ann does not fit, the third does.
		results := each(w, cid.Count(10), ann.Count(8), bob, ann.Count(3), ann.Count(2))
		if got := oks(results); got != "+++-+" {
			w.Fatal(got)
		}
		for i, left := range []float64{0, 2, 9, 2, 0} {
			if r := results[i]; r.Remaining != left || len(r.Requests) != 1 || r.OK == (r.Receipt() == "") || r.OK != r.RetryAt.IsZero() {
				w.Fatalf("%d: %+v, want %v left", i, r, left)
			}
		}
		if denial := results[3]; !denial.RetryAt.Equal(w.Clock.At.Add(6*time.Second)) || denial.RetryAfter != 6*time.Second {
			w.Fatalf("%+v", denial)
		}
		w.Holds(ann, 0)
		w.Holds(bob, 9)
		_, err := w.Limiter.Refund(w.Context(), w.DB, results[1].Receipt(), ann.Count(8))
		w.Do(err)
		w.Holds(ann, 8)
		w.Do(w.Limiter.Reset(w.Context(), w.DB, ann, bob, cid))
	})
}

// TestEachAgreesWithConsume: random requests of every kind of limit, used and unused, twice, sharded and not, are decided as one Consume
// after another, on every handle and in memory, to the last bit.
func TestEachAgreesWithConsume(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		r := harness.NewRand(w.T)
		memory, together := ratelimittest.New(w.T), ratelimittest.New(w.T)
		limits := []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 7, time.Minute), ratelimit.TokenBucket("another", 0.3, time.Second, ratelimit.Capacity(4)),
			ratelimit.FixedWindow("window", 5, time.Minute), ratelimit.CalendarWindow("month", 6, ratelimit.Month, ratelimit.Zone("Europe/Berlin")),
			ratelimit.TokenBucket("sharded", 12, time.Minute, ratelimit.Shards(2)), ratelimit.FixedWindow("windows", 8, time.Minute, ratelimit.Shards(2)),
			ratelimit.Unlimited("free"), ratelimit.TokenBucket("never", 0, time.Minute),
		}
		seen := map[string]int{}
		for round := range harness.Sized(40, 8) {
			w.Clock.Advance(time.Duration(r.IntN(100)) * 100 * time.Millisecond)
			requests := make([]ratelimit.Request, 1+r.IntN(30))
			for i := range requests {
				limit := limits[r.IntN(len(limits))]
				if r.IntN(2) == 0 {
					limit = limits[0] // a run
				}
				requests[i] = limit.Key(fmt.Sprint("k", r.IntN(20))).Count(float64(r.IntN(4)))
				if r.IntN(20) == 0 {
					requests[i] = requests[i].Count(1000)
				}
			}
			want := make([]ratelimit.Result, len(requests))
			for i, request := range requests {
				var err error
				if want[i], err = w.Limiter.Consume(w.Context(), memory, request); err != nil && !harness.Denied(err) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
					w.Fatal(err)
				}
			}
			inMemory, err := harness.InOrder(w.Limiter.ConsumeEach(w.Context(), together, requests...))
			w.Do(err)
			for side, got := range map[string][]ratelimit.Result{"Postgres": each(w, requests...), "in memory": inMemory} {
				for i := range want {
					seen[fmt.Sprint(want[i].OK)]++
					switch limit := want[i].Requests[0].Limit.Name(); {
					case want[i].At.IsZero(): // more than the capacity
						if got[i].OK || !got[i].RetryAt.IsZero() || got[i].At.IsZero() {
							w.Fatalf("%s, round %d, request %d: %+v", side, round, i, got[i])
						}
					case limit == "sharded" || limit == "windows": // which shard gives, chance says
						if got[i].OK != want[i].OK {
							w.Fatalf("%s, round %d, request %d: %+v, want\n%+v", side, round, i, got[i], want[i])
						}
					case !reflect.DeepEqual(public(got[i]), public(want[i])):
						w.Fatalf("%s, round %d, request %d:\n%+v, want\n%+v", side, round, i, got[i], want[i])
					}
				}
			}
		}
		if seen["true"] == 0 || seen["false"] == 0 {
			w.Fatalf("%v", seen)
		}
	})
}

// public is what a caller sees of a result.
func public(r ratelimit.Result) []any {
	s := r.Requests[0]
	return []any{r.OK, r.At, r.RetryAt, r.RetryAfter, r.Remaining, r.ResetAt, s.Limit, s.Key, s.Count, s.Taken, s.OK, s.Remaining, s.RetryAt, string(r.Receipt())}
}

// TestEachUnderContention: transactions at every level use the same keys, in any order, some for the first time. None deadlocks, and what was granted is what is gone.
func TestEachUnderContention(t *testing.T) {
	t.Parallel()
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 8)
			const capacity, keys = 50, 12
			bucket := ratelimit.TokenBucket("each", capacity, 100_000*time.Hour)
			window := ratelimit.FixedWindow("of each", capacity, 100_000*time.Hour)
			var deadlocks []error
			var mu sync.Mutex
			granted := map[string]int{}
			limits := ratelimit.Limiter{OnRetry: func(_ context.Context, _ int, failed error) {
				if harness.SQLState(failed) == "40P01" {
					mu.Lock()
					defer mu.Unlock()
					deadlocks = append(deadlocks, failed)
				}
			}}
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for n := range harness.Sized(40, 8) {
						var requests []ratelimit.Request
						for key := range keys {
							limit := bucket
							if key%4 == 3 {
								limit = window
							}
							requests = append(requests, limit.Key(fmt.Sprint(min(key, n+rand.IntN(4))))) // new keys come one after another
						}
						rand.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
						var results []ratelimit.Result
						err := limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) (err error) {
							results, err = harness.InOrder(limits.ConsumeEach(ctx, tx, requests...))
							return err
						}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						for _, r := range results {
							if r.OK {
								granted[r.Requests[0].Limit.Name()+r.Requests[0].Key]++
							}
						}
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			if len(deadlocks) > 0 {
				t.Errorf("%d deadlocks: %v", len(deadlocks), deadlocks[0])
			}
			for key := range keys {
				for _, limit := range []ratelimit.Limit{bucket, window} {
					request := limit.Key(fmt.Sprint(key))
					left := harness.ReadBalance(t, &limits, pool, request)
					n := granted[limit.Name()+fmt.Sprint(key)]
					if gone := capacity - left; gone < float64(n)-0.01 || gone > float64(n)+0.01 {
						t.Errorf("%v %d: %v are gone, %d were granted", limit, key, gone, n)
					}
					if n > capacity {
						t.Errorf("%v %d: %d were granted of %d", limit, key, n, capacity)
					}
				}
			}
		})
	}
}

// TestEachWaitsHoldingNothingThatComesLater: while it waits for a row, rows of later keys are free, also if an earlier key has no row.
func TestEachWaitsHoldingNothingThatComesLater(t *testing.T) {
	t.Parallel()
	for _, first := range []bool{false, true} {
		pool := harness.NewPool(t, 4)
		limit := ratelimit.TokenBucket("each", 10, time.Hour)
		var limits ratelimit.Limiter
		var requests []ratelimit.Request
		for _, key := range []string{"a", "b", "c", "d", "e"} {
			requests = append(requests, limit.Key(key))
		}
		harness.Succeeds(t, harness.Second(limits.ConsumeEach(t.Context(), pool, requests...)))
		if first {
			harness.Succeeds(t, limits.Reset(t.Context(), pool, limit.Key("a")))
		}
		holder, err := pool.Begin(t.Context())
		harness.Succeeds(t, err)
		harness.Succeeds(t, harness.Second(holder.Exec(t.Context(), "SELECT FROM ratelimit.limits WHERE key = 'c' FOR UPDATE")))
		slices.Reverse(requests)
		done := make(chan error, 1)
		go func() { done <- harness.Second(limits.ConsumeEach(t.Context(), pool, requests...)) }()
		harness.Waiting(t, pool, 1)
		if n := harness.Scan[int](t, holder, "SELECT count(*) FROM (SELECT FROM ratelimit.limits WHERE key > 'c' FOR UPDATE NOWAIT) AS free"); n != 2 {
			t.Errorf("%d rows are free", n)
		}
		harness.Succeeds(t, holder.Rollback(t.Context()))
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// TestEachTellsWhenAForbiddenCountIsGranted: an override forbids it, and when it ends, the tokens may not be there.
func TestEachTellsWhenAForbiddenCountIsGranted(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	var ran, requests []ratelimit.Request
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 10, 10*time.Hour), ratelimit.TokenBucket("sharded", 10, 10*time.Hour, ratelimit.Shards(2)),
		ratelimit.FixedWindow("window", 10, 10*time.Hour),
	} {
		ran = append(ran, limit.Key("ran").Count(10))
		for _, key := range []string{"ran", "new"} {
			requests = append(requests, limit.Key(key).Count(5))
			harness.Succeeds(t, harness.Second(limits.Override(t.Context(), pool, limit.Key(key), ratelimit.Terms{For: time.Hour}, ratelimit.Rate(2))))
		}
	}
	began := time.Now()
	now := began
	limits.Clock = func() time.Time { return now }
	harness.Succeeds(t, harness.Second((&ratelimit.Limiter{Clock: limits.Clock}).ConsumeEach(t.Context(), pool, ran...))) // before it knows the overrides
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	results, err := harness.InOrder(limits.ConsumeEach(t.Context(), pool, requests...))
	if err != nil || oks(results) != "------" {
		t.Fatalf("%s, %v", oks(results), err)
	}
	for i, request := range requests {
		_, err := limits.Consume(t.Context(), pool, request)
		var denial *ratelimit.DeniedError
		if !errors.As(err, &denial) || !denial.RetryAt.Equal(results[i].RetryAt) || denial.Remaining != results[i].Remaining {
			t.Errorf("%v: %+v, want %v", request, results[i], err)
		}
		for _, at := range []struct {
			early time.Duration
			want  string
		}{{time.Millisecond, "-"}, {0, "+"}} {
			now = results[i].RetryAt.Add(-at.early)
			if got, err := harness.InOrder(limits.ConsumeEach(t.Context(), pool, request)); err != nil || oks(got) != at.want {
				t.Errorf("%v, %v before %v: %s, %v", request, at.early, results[i].RetryAt, oks(got), err)
			}
		}
		now = began
	}
}

// TestEachUnderOverrides: a block, an exception and other numbers decide about their key alone.
func TestEachUnderOverrides(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limit := ratelimit.TokenBucket("each", 10, time.Hour)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	until := time.Now().Add(time.Hour).Truncate(time.Second).UTC()
	for _, err := range []error{
		harness.Second(limits.Block(t.Context(), pool, limit.Key("blocked"), ratelimit.Terms{Until: until})),
		harness.Second(limits.Block(t.Context(), pool, limit.Key("banned"), ratelimit.Terms{Forever: true})),
		harness.Second(limits.Override(t.Context(), pool, limit.Key("small"), ratelimit.Terms{Until: until}, ratelimit.Rate(2))),
		harness.Second(limits.Override(t.Context(), pool, limit.Key("smaller"), ratelimit.Terms{Forever: true}, ratelimit.Rate(2))),
	} {
		harness.Succeeds(t, err)
	}
	harness.Scan[int64](t, pool, "SELECT ratelimit.unlimited('each', 'free', forever => true)")
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	results, err := harness.InOrder(limits.ConsumeEach(t.Context(), pool,
		limit.Key("blocked"), limit.Key("banned"), limit.Key("small").Count(5), limit.Key("smaller").Count(5), limit.Key("free").Count(1000), limit.Key("ann").Count(5),
		limit.Key("small").Count(2), limit.Key("bob").Count(11)))
	if err != nil || oks(results) != "----+++-" {
		t.Fatalf("%s, %v", oks(results), err)
	}
	for i, want := range []time.Time{until, {}, until, {}, {}, {}, {}, {}} {
		if !results[i].RetryAt.Equal(want) {
			t.Errorf("%d: RetryAt is %v, want %v", i, results[i].RetryAt, want)
		}
	}
	if left := harness.ReadBalance(t, limits, pool, limit.Key("ann")); left < 5 || left > 5.1 {
		t.Errorf("ann has %v", left)
	}
}

// TestAnObserverSeesEachAsConsumes, so that usage and metrics need to know no more. On a Coalescer, its pool is asked.
func TestAnObserverSeesEachAsConsumes(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit := ratelimit.TokenBucket("each", 1, time.Hour)
	var seen []string
	limits := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) {
		seen = append(seen, fmt.Sprint(d.Verb, " ", len(d.Result.Requests), " ", d.Result.OK, " ", harness.Denied(d.Err), d.Err == nil))
	}}
	harness.Succeeds(t, harness.Second(limits.ConsumeEach(t.Context(), coalescer, limit.Key("a"), limit.Key("b"), limit.Key("a"))))
	if _, err := harness.InOrder(limits.ConsumeEach(t.Context(), pool, limit.Key("a"), limit.Key(""))); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Fatal(err)
	}
	want := []string{"consume 1 true false true", "consume 1 true false true", "consume 1 false true false", "consume 2 false false false"}
	if !slices.Equal(seen, want) {
		t.Errorf("%q", seen)
	}
}

// eachByHand is a call of the function for keys of one token bucket of 10 a hour.
func eachByHand(name, ends, keys, counts string) string {
	fill := func(value string) string { return "array_fill(" + value + ", ARRAY[cardinality(e)])" }
	return "SELECT ord::text || granted::text FROM (VALUES ('" + ends + "'::integer[])) AS v (e), LATERAL ratelimit._each(" + strings.Join([]string{
		"e", fill("'" + name + "'::text"), fill("10::float8"), fill("interval '1 hour'"), fill("10::float8"), fill("NULL::timestamptz"), fill("1"),
		fill("-0.000000001::float8"), fill("0"), fill("0"), "'" + keys + "'", "'" + counts + "'",
	}, ", ") + ")"
}

// TestEachIsInOrder refuses requests by hand that are not in the order of locks.
func TestEachIsInOrder(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	for _, group := range [][2]string{
		{"{1,2}", "{b,a}"}, {"{2}", "{b,a}"}, {"{5,6}", "{a,b,c,d,e,a}"}, {"{6}", "{a,b,c,d,e,a}"}, {"{1,2}", "{a,NULL}"}, {"{2}", "{a,NULL}"},
		{"{2}", "{a,a}"}, {"{1,1}", "{a,b}"}, {"{2,1}", "{a,b}"},
	} {
		if _, err := pool.Exec(t.Context(), eachByHand("l", group[0], group[1], "{1,1,1,1,1,1}")); harness.SQLState(err) != "22023" {
			t.Errorf("%s: %v", group, err)
		}
	}
	if got := harness.Scan[string](t, pool, eachByHand("l", "{1,6}", "{a,a,b,c,d,e}", "{1,10,1,1,1,1}")); got != "{1,2,3,4,5,6}{1,0,1,1,1,1}" {
		t.Error(got)
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.limits WHERE value = 9"); n != 5 {
		t.Errorf("%d keys have given one token", n)
	}
}

// TestEachForgivesRounding: a key that lacks only the tolerance is granted, also where one UPDATE decides several.
func TestEachForgivesRounding(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("each", 0.3, time.Hour)
		var requests []ratelimit.Request
		for range 6 {
			requests = append(requests, limit.Key(fmt.Sprint(len(requests))).Count(0.1))
		}
		for n := range 3 { // the last finds 0.1 less the rounding of two subtractions
			if got := oks(each(w, requests...)); got != "++++++" {
				w.Fatalf("call %d: %s", n, got)
			}
		}
		if got := oks(each(w, requests...)); got != "------" {
			w.Fatal(got)
		}
		for _, request := range requests {
			w.Do(w.Limiter.Reset(w.Context(), w.DB, request.Count(1)))
		}
	})
}

// TestEachDecidesAnewWhatTheUpdateLeft: a row that is deleted while the UPDATE waits is inserted in its place, before later keys are locked.
func TestEachDecidesAnewWhatTheUpdateLeft(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limit := ratelimit.TokenBucket("each", 10, time.Hour)
	var limits ratelimit.Limiter
	var requests []ratelimit.Request
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		requests = append(requests, limit.Key(key))
	}
	harness.Succeeds(t, harness.Second(limits.ConsumeEach(t.Context(), pool, requests...)))
	holder, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	for _, sql := range []string{"DELETE FROM ratelimit.limits WHERE key = 'b'", "SELECT FROM ratelimit.limits WHERE key = 'd' FOR UPDATE"} {
		harness.Succeeds(t, harness.Second(holder.Exec(t.Context(), sql)))
	}
	results, done := []ratelimit.Result(nil), make(chan error, 1)
	go func() {
		var err error
		results, err = harness.InOrder(limits.ConsumeEach(t.Context(), pool, requests...))
		done <- err
	}()
	harness.Waiting(t, pool, 1)
	harness.Succeeds(t, holder.Commit(t.Context()))
	if err := <-done; err != nil || oks(results) != "+++++" {
		t.Fatalf("%s, %v", oks(results), err)
	}
	for i, want := range []float64{8, 9, 8, 8, 8} { // b was full again
		if left := results[i].Remaining; left < want || left > want+0.1 {
			t.Errorf("%d: %v left, want %v", i, left, want)
		}
	}
}

// TestEachWithOtherNumbers: keys with numbers of their own are decided by these.
func TestEachWithOtherNumbers(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		const m = 1e6 // the tolerance of so large a capacity is the same for all
		limit := ratelimit.TokenBucket("each", m, time.Hour, ratelimit.Capacity(3*m), ratelimit.Varies(24*time.Hour))
		small, large := limit.With(ratelimit.Capacity(2*m)), limit.With(ratelimit.Capacity(4*m))
		requests := []ratelimit.Request{limit.Key("a"), limit.Key("b"), limit.Key("c"), small.Key("d"), large.Key("e"), limit.Key("f")}
		for i := range requests {
			requests[i] = requests[i].Count(m / 2)
		}
		// After the first round, e has more than the others can hold.
		for _, left := range [][]float64{{2.5, 2.5, 2.5, 1.5, 3.5, 2.5}, {2, 2, 2, 1, 3, 2}, {1.5, 1.5, 1.5, 0.5, 2.5, 1.5}, {1, 1, 1, 0, 2, 1}, {0.5, 0.5, 0.5, 0, 1.5, 0.5}} {
			for i, r := range each(w, requests...) {
				if r.Remaining != left[i]*m || r.OK != (i != 3 || left[0] > 0.5) {
					w.Fatalf("%d: %+v, want %v left", i, r, left[i]*m)
				}
			}
		}
		if _, err := harness.InOrder(w.Limiter.ConsumeEach(w.Context(), w.DB, small.Key("x"), large.Key("x"))); !errors.Is(err, ratelimit.ErrInvalid) {
			w.Fatalf("one key with two numbers: %v", err)
		}
		w.Do(w.Limiter.Reset(w.Context(), w.DB, harness.KeysOf(requests...)...))
	})
}

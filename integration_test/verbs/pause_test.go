package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

func resume(w harness.World, requests ...ratelimit.Request) {
	w.Helper()
	w.Do(w.Limiter.Resume(w.Context(), w.DB, harness.KeysOf(requests...)...))
}

// paused wants a key to be shown as paused until then; zero: as not paused.
func paused(w harness.World, request ratelimit.Request, until time.Time) {
	w.Helper()
	if got := w.Balances(request)[0].PausedUntil; !got.Equal(until) {
		w.Fatalf("paused until %v, want %v", got, until)
	}
}

func TestPause(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			limit := harness.Steady(shards)
			for _, key := range []string{"used", "not used"} {
				r := limit.Key(key)
				if key == "used" {
					w.Grant(r.Count(2))
				}
				until := w.Clock.At.Add(30 * time.Second)
				w.Pause(30*time.Second, r)
				w.Holds(r, 0)
				paused(w, r, until)
				w.Retries(w.Deny(r), 36*time.Second)
				w.DenyTake(5, r)
				if !w.Balances(r)[0].ResetAt.Equal(until.Add(2 * time.Minute)) {
					w.Fatalf("%+v", w.Balances(r)[0])
				}
				if _, err := w.Limiter.Check(w.Context(), w.DB, r); !harness.Denied(err) {
					w.Fatalf("a check: %v", err)
				}
				w.Clock.Advance(29 * time.Second)
				w.Deny(r)
				paused(w, r, time.Time{}) // for a second
				w.Clock.Advance(time.Second)
				w.Holds(r, 0)
				w.Deny(r)
				w.Clock.Advance(6 * time.Second)
				w.Grant(r)
				w.Deny(r)
				w.Clock.Advance(time.Hour)
				w.Holds(r, 20)
				paused(w, r, time.Time{})
			}

			// Some tokens are left, never more than there were.
			r := limit.Key("some left")
			w.Pause(time.Minute, r.Count(3))
			w.Holds(r, 3)
			w.Take(3, 5, r)
			w.Retries(w.Deny(r), time.Minute+6*time.Second)
			w.Clock.Advance(2 * time.Minute)
			w.Holds(r, 10)
			w.Pause(time.Minute, r.Count(15))
			w.Holds(r, 10)
			w.Pause(30*time.Second, r.Count(4)) // the later end, the lower balance
			w.Holds(r, 4)
			paused(w, r, w.Clock.At.Add(time.Minute))
			w.Pause(2*time.Minute, r.Count(8))
			w.Holds(r, 4)
			paused(w, r, w.Clock.At.Add(2*time.Minute))
			w.Pause(2*time.Minute, r.Count(1)) // the default count is none, not one
			w.Holds(r, 1)
			w.Pause(2*time.Minute, r)
			w.Holds(r, 0)
			w.Charge(r.Count(7))
			w.Holds(r, -7)
			w.Pause(2*time.Minute, r) // a debt stays
			w.Holds(r, -7)

			for _, over := range []time.Duration{-time.Minute, 0} { // there is nothing to do
				w.Pause(over, limit.Key("late"))
				w.Holds(limit.Key("late"), 20)
				paused(w, limit.Key("late"), time.Time{})
			}

			// Another number of shards.
			moved := ratelimit.TokenBucket(limit.Name(), 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(4-shards)).Key("resharded")
			w.Grant(limit.Key("resharded").Count(2))
			after := w.Redeployed()
			after.Pause(time.Minute, moved.Count(6))
			after.Grant(moved.Count(5))
			after.Retries(after.Deny(moved.Count(2)), time.Minute+6*time.Second)
			paused(after, moved, w.Clock.At.Add(time.Minute))
		}

		// Several at once, with other limits beside them.
		a, b := harness.Steady(1).Key("a"), harness.Steady(3).Key("b")
		w.Pause(time.Minute, b.Count(2), a)
		w.Holds(a, 0)
		w.Holds(b, 2)
		w.Deny(a, b)
		w.Pause(time.Minute, ratelimit.TokenBucket("never", 0, time.Second).Key("ann"), harness.Steady(4).Global())
		w.Holds(harness.Steady(4).Global(), 0)
	})
}

func TestResume(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			limit := harness.Steady(shards)
			r, other := limit.Key("ann"), limit.Key("other")
			w.Pause(time.Hour, r.Count(2), other)
			w.Clock.Advance(time.Minute)
			resume(w, r)
			w.Holds(r, 2) // what was emptied stays gone
			paused(w, r, time.Time{})
			paused(w, other, w.Clock.At.Add(59*time.Minute))
			w.Clock.Advance(6 * time.Second)
			w.Holds(r, 3)
			resume(w, r, r.Count(5), limit.Key("not used")) // changes nothing
			w.Holds(r, 3)
			w.Clock.Advance(6 * time.Second)
			w.Holds(r, 4)
			w.Do(w.Limiter.Reset(w.Context(), w.DB, other))
			w.Holds(other, 20)
			paused(w, other, time.Time{})
		}
		if rows := w.Rows(); strings.Contains(rows, "not used") {
			w.Fatalf("a resume has inserted a row:\n%s", rows)
		}
	})
}

// TestWhatComesBackInAPause: refunds repay what waiting work owes. Reservations keep their instants, and later ones get later ones.
func TestWhatComesBackInAPause(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			limit := harness.Steady(shards)
			r := limit.Key("ann")
			receipt := w.Grant(r.Count(8)).Receipt()
			before := w.Reserve(limit.Key("owing").Count(25))
			w.Runs(before, 30*time.Second)
			w.Pause(time.Minute, r, limit.Key("owing"))
			if result := w.Refund(receipt, r.Count(3)); result.Requests[0].Refunded != 0 {
				w.Fatalf("%+v", result)
			}
			w.Holds(r, 0)
			w.Charge(r.Count(5))
			result := w.Refund(receipt, r.Count(8))
			if result.Requests[0].Refunded != 0 { // a charge owes it, and no work waits for it
				w.Fatalf("%+v", result)
			}
			w.Holds(r, -5)

			w.Holds(limit.Key("owing"), -5)
			later := w.Reserve(limit.Key("owing").Count(1))
			w.Runs(later, time.Minute+36*time.Second)
			w.Clock.Advance(10 * time.Second)
			if result := w.Refund(later.Receipt(), limit.Key("owing").Count(1)); result.Requests[0].Refunded != 1 { // who gives up costs nobody anything
				w.Fatalf("%+v", result)
			}
			w.Holds(limit.Key("owing"), -5)
			w.Clock.Advance(50 * time.Second)
			w.Owes(limit.Key("owing"), 30*time.Second)

			// A clock that stepped back behind the taking counts no time twice.
			receipt = w.Grant(limit.Key("behind").Count(8)).Receipt()
			w.Charge(limit.Key("behind").Count(18))
			w.Clock.Advance(-10 * time.Second)
			if result := w.Refund(receipt, limit.Key("behind").Count(8)); result.Requests[0].Refunded != 0 {
				w.Fatalf("%+v", result)
			}
			w.Clock.Advance(10 * time.Second)
			w.Holds(limit.Key("behind"), -6)

			// Once it is over, refunds are as always.
			receipt = w.Grant(limit.Key("bob").Count(8)).Receipt()
			w.Pause(6*time.Second, limit.Key("bob"))
			w.Clock.Advance(6 * time.Second)
			if result := w.Refund(receipt, limit.Key("bob").Count(8)); result.Requests[0].Refunded != 7 {
				w.Fatalf("%+v", result)
			}
			w.Holds(limit.Key("bob"), 7)
			w.Clock.Advance(time.Hour)
		}
	})
}

// TestAWaitDuringAPause: what is not there before the deadline, or within ten minutes, is denied at once, and nothing stays taken. A debt is
// denied without a write.
func TestAWaitDuringAPause(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	var limits ratelimit.Limiter
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	for _, shards := range []int{1, 3} {
		limit := harness.Steady(shards)
		for name, db := range map[string]ratelimit.DB{"pool": pool, "coalescer": coalescer} {
			r := limit.Key(name)
			harness.Succeeds(t, harness.Second(limits.Pause(t.Context(), pool, time.Hour, r)))
			for _, within := range []time.Duration{time.Minute, 0} {
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if within > 0 {
					ctx, cancel = context.WithTimeout(ctx, within)
				}
				began := time.Now()
				_, err := limits.Wait(ctx, db, r)
				denial, ok := errors.AsType[*ratelimit.DeniedError](err)
				if !ok || !denial.RetryAt.After(began.Add(40*time.Minute)) {
					t.Errorf("%s, %d shards, within %v: %v", name, shards, within, err)
				}
				cancel()
			}
			if balances, err := limits.Balance(t.Context(), pool, r); err != nil || balances[0].Remaining != 0 {
				t.Errorf("%s, %d shards: %+v, %v", name, shards, balances, err)
			}
		}
	}
	owing := harness.Steady(1).Key("owing")
	harness.Succeeds(t, harness.Second(limits.Charge(t.Context(), pool, owing.Count(10_000))))
	const version = "SELECT xmin FROM ratelimit.limits WHERE key = 'owing'"
	before := harness.Lines(t, pool, version)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := limits.Wait(ctx, pool, owing); !harness.Denied(err) {
		t.Error(err)
	}
	if after := harness.Lines(t, pool, version); after != before {
		t.Errorf("the denied Wait has written the row: %s, then %s", before, after)
	}
}

func TestPauseRefuses(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket := harness.Steady(1).Key("ann")
		for name, c := range map[string]struct {
			lasts    time.Duration
			requests []ratelimit.Request
			text     string
		}{
			"a window":        {time.Minute, []ratelimit.Request{bucket, ratelimit.FixedWindow("window", 3, time.Hour).Key("ann")}, "is no token bucket"},
			"a calendar":      {time.Minute, []ratelimit.Request{ratelimit.CalendarWindow("month", 3, ratelimit.Month).Key("ann")}, "is no token bucket"},
			"slots":           {time.Minute, []ratelimit.Request{ratelimit.Slots("slots", 3).Key("ann")}, "slots"},
			"unlimited":       {time.Minute, []ratelimit.Request{ratelimit.Unlimited("free").Key("ann")}, "is no token bucket"},
			"one key twice":   {time.Minute, []ratelimit.Request{bucket, bucket.Count(1)}, "two requests for one key"},
			"nothing":         {time.Minute, nil, "no requests"},
			"a debt":          {time.Minute, []ratelimit.Request{bucket.Count(-1)}, "count -1"},
			"a year":          {366 * 24 * time.Hour, []ratelimit.Request{bucket}, "longer than 31 days"},
			"32 days":         {31*24*time.Hour + 1, []ratelimit.Request{bucket}, "longer than 31 days"},
			"a bare number":   {3600, []ratelimit.Request{bucket}, "a pause of 3.6µs is less than 1ms (a bare number in Go is nanoseconds"},
			"seconds of 1970": {time.Until(time.Unix(60, 0)), []ratelimit.Request{bucket}, "longer than 31 days"},
		} {
			_, err := w.Limiter.Pause(w.Context(), w.DB, c.lasts, c.requests...)
			if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
				w.Fatalf("%s: %v, want %q", name, err, c.text)
			}
			if err = w.Limiter.Resume(w.Context(), w.DB, c.requests...); strings.Contains(c.text, "token bucket") != errors.Is(err, ratelimit.ErrInvalid) &&
				name != "slots" && name != "nothing" && name != "a debt" {
				w.Fatalf("%s: resume: %v", name, err)
			}
		}
		if rows := w.Rows(); rows != "" {
			w.Fatalf("something was written:\n%s", rows)
		}
		w.Pause(31*24*time.Hour, bucket) // the transaction is usable
		paused(w, bucket, w.Clock.At.Add(31*24*time.Hour))
	})
}

// TestPauseUnderOverrides: numbers count, and blocks and lifted limits do not.
func TestPauseUnderOverrides(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		limit := harness.Steady(1)
		follow.By(w.Limiter, follow.Settings{DB: pool})
		override := func(sql string) {
			w.Helper()
			harness.Scan[int64](w, pool, "SELECT "+sql)
			w.Do(follow.Load(w.Context(), w.Limiter))
		}
		bare := w
		bare.Limiter = &ratelimit.Limiter{Clock: w.Clock.Now}
		for key, sql := range map[string]string{
			"lowered": "ratelimit.override('steady in 1', 'lowered', capacity => 5, forever => true)", "blocked": "ratelimit.block('steady in 1', 'blocked', forever => true)",
			"lifted": "ratelimit.unlimited('steady in 1', 'lifted', forever => true)",
		} {
			override(sql)
			r := limit.Key(key)
			w.Pause(time.Minute, r.Count(8))
			want := map[string]float64{"lowered": 5, "blocked": 8, "lifted": 8}[key]
			bare.Holds(r, want)
			paused(bare, r, w.Clock.At.Add(time.Minute))
			switch key {
			case "lifted":
				w.Grant(r)
			case "blocked":
				w.Deny(r)
				paused(w, r, w.Clock.At.Add(time.Minute))
			}
		}
	})
}

// TestPauseOnOtherHandles: a Coalescer, the database in memory, the Observer, ConsumeEach, holds, and what came before the pause.
func TestPauseOnOtherHandles(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	for _, shards := range []int{1, 3} {
		for name, db := range map[string]ratelimit.DB{"coalescer": coalescer, "in memory": nil} {
			memory := ratelimittest.New(t)
			if db == nil {
				db = memory
			}
			var seen []ratelimit.Decision
			limiter := ratelimit.Limiter{Clock: memory.Now, Observer: func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }}
			w := harness.World{T: t, DB: nil, Limiter: &limiter, Clock: nil}
			r, unused := harness.Steady(shards).Key("ann"), harness.Steady(shards).Key("bob")
			if _, err := limiter.Consume(t.Context(), db, r); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			until := memory.Now().Add(time.Minute)
			w.Do(harness.Second(limiter.Pause(t.Context(), db, time.Minute, r, unused.Count(2))))
			for i, want := range []float64{0, 2} {
				if b := harness.ReadBalances(t, &limiter, db, r, unused)[i]; b.Remaining != want || !b.PausedUntil.Equal(until) {
					t.Fatalf("%s: %+v", name, b)
				}
			}
			results, err := harness.InOrder(limiter.ConsumeEach(t.Context(), db, r, unused, unused, unused))
			if w.Do(err); results[0].OK || !results[1].OK || !results[2].OK || results[3].OK || !results[3].RetryAt.Equal(until.Add(6*time.Second)) {
				t.Fatalf("%s: %+v", name, results)
			}
			harness.Succeeds(t, harness.Second(limiter.Sweep(t.Context(), map[bool]ratelimit.DB{true: db, false: pool}[name == "in memory"], harness.Steady(shards))))
			memory.Advance(10 * time.Second)
			w.Do(limiter.Resume(t.Context(), db, r))
			memory.Advance(6 * time.Second)
			if _, err := limiter.Consume(t.Context(), db, r); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := limiter.Consume(t.Context(), db, unused); !harness.Denied(err) {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := limiter.Pause(t.Context(), db, 32*24*time.Hour, r); !errors.Is(err, ratelimit.ErrInvalid) {
				t.Fatalf("%s: %v", name, err)
			}
			verbs := slices.DeleteFunc(slices.Clone(seen), func(d ratelimit.Decision) bool { return d.Verb != "pause" && d.Verb != "resume" })
			if len(verbs) != 3 || verbs[0].Verb != "pause" || verbs[0].Err != nil || len(verbs[0].Result.Requests) != 2 || verbs[1].Verb != "resume" ||
				!errors.Is(verbs[2].Err, ratelimit.ErrInvalid) {
				t.Fatalf("%s: observed %+v", name, verbs)
			}
			harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")
		}
	}
}

// TestPauseAndSweep: a paused row is not idle, however long ago it was paused.
func TestPauseAndSweep(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limiter, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
	r := harness.Steady(3).Key("ann")
	w.Pause(24*time.Hour, r.Count(50)) // full all the same
	w.Holds(r, 20)
	clock.Advance(10 * time.Hour)
	if deleted := w.Sweep(harness.Steady(3)); deleted != 0 {
		t.Fatalf("%d rows of a paused key were swept", deleted)
	}
	paused(w, r, clock.At.Add(14*time.Hour))
	clock.Advance(15*time.Hour + time.Minute)
	if deleted := w.Sweep(harness.Steady(3)); deleted != 3 {
		t.Fatalf("%d rows were swept, want 3", deleted)
	}
}

// TestPausesUnderTraffic: workers consume at every level, also for the first time, while others pause. Once a pause is committed, nothing is
// granted before its end, and nobody deadlocks.
func TestPausesUnderTraffic(t *testing.T) {
	t.Parallel()
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 8)
			limits := []ratelimit.Limit{
				ratelimit.TokenBucket("a", 1e6, time.Second), ratelimit.TokenBucket("b", 1e6, time.Second, ratelimit.Shards(3)),
			}
			for round := range harness.Sized(8, 1) {
				key := fmt.Sprint("key ", round)
				requests := []ratelimit.Request{limits[0].Key(key), limits[1].Key(key)}
				if round%2 == 0 { // otherwise the pause may be what is first
					harness.Succeeds(t, harness.Second(new(ratelimit.Limiter).Consume(t.Context(), pool, requests...)))
				}
				var working sync.WaitGroup
				var mu sync.Mutex
				var grants []time.Time
				ctx, stop := context.WithCancel(t.Context())
				for worker := range 6 {
					working.Go(func() {
						limiter := new(ratelimit.Limiter)
						for ctx.Err() == nil {
							var result ratelimit.Result
							err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) (err error) {
								result, err = limiter.Consume(ctx, tx, requests[worker%2])
								return err
							}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
							switch {
							case err == nil:
								mu.Lock()
								grants = append(grants, result.At)
								mu.Unlock()
							case !harness.Denied(err):
								t.Errorf("worker %d: %v", worker, err)
								return
							}
						}
					})
				}
				time.Sleep(20 * time.Millisecond)
				var pausing sync.WaitGroup
				var until time.Time
				for pauser := range 3 {
					pausing.Go(func() {
						order := slices.Clone(requests)
						if pauser == 1 {
							slices.Reverse(order)
						}
						limiter := new(ratelimit.Limiter)
						if err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
							ends, err := limiter.Pause(ctx, tx, time.Hour+time.Duration(pauser)*time.Minute, order...)
							if pauser == 2 {
								until = ends
							}
							return err
						}, ratelimit.Isolation(level), ratelimit.Attempts(1000)); err != nil {
							t.Errorf("pause: %v", err)
						}
					})
				}
				pausing.Wait()
				after := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")
				time.Sleep(50 * time.Millisecond)
				stop()
				working.Wait()
				for _, at := range grants {
					if at.After(after) {
						t.Errorf("%v: granted at %v, after the pause was committed at %v", level, at, after)
					}
				}
				for _, b := range harness.ReadBalances(t, new(ratelimit.Limiter), pool, requests...) {
					if b.Remaining > 0 || !b.PausedUntil.Equal(until) {
						t.Errorf("%+v, want 0 until %v", b, until)
					}
				}
			}
		})
	}
}

// TestAddInAPause: an override's tokens cannot be added while the key is paused, and are afterwards.
func TestAddInAPause(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limiter := new(ratelimit.Limiter)
	r := harness.Steady(3).Key("ann")
	harness.Succeeds(t, harness.Second(limiter.Pause(t.Context(), pool, time.Hour, r)))
	id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('steady in 3', 'ann', rate => 10, capacity => 50, forever => true)")
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.add($1, 20)", id); harness.SQLState(err) != "55000" || !strings.Contains(err.Error(), "nothing was added: the key is paused until 20") {
		t.Fatalf("%v", err)
	}
	harness.Succeeds(t, limiter.Resume(t.Context(), pool, r))
	if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1, 20)", id); added < 29.9999 || added > 30.0001 {
		t.Fatalf("%v were added", added)
	}
}

// TestKeysArePausedUntil: ratelimit.keys says until when a key is paused, as Balance does.
func TestKeysArePausedUntil(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	at := time.Date(2031, 3, 17, 9, 30, 12, 0, time.UTC)
	limits := []ratelimit.Limit{
		harness.Steady(1), harness.Steady(3), ratelimit.FixedWindow("window", 3, time.Hour), ratelimit.TokenBucket("never", 0, time.Hour), ratelimit.Slots("slots", 2),
		ratelimit.TokenBucket("varies", 3, time.Hour, ratelimit.Varies(time.Hour)),
	}
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "test", limits...))
	harness.MustExec(t, pool, `SELECT ratelimit.block('steady in 1', 'blocked', forever => true), ratelimit.unlimited('steady in 1', 'lifted', forever => true), ratelimit.override('steady in 1', 'lowered', rate => 1, capacity => 1, forever => true),
		ratelimit.override('steady in 1', 'both', capacity => 3, forever => true), ratelimit.block('steady in 1', 'both', forever => true), ratelimit.unlimited('steady in 1', 'lifted, blocked', forever => true), ratelimit.block('steady in 1', 'lifted, blocked', forever => true)`)
	limiter := follow.By(&ratelimit.Limiter{Clock: func() time.Time { return at }}, follow.Settings{DB: pool, OnError: func(err error) { t.Error(err) }})
	harness.Succeeds(t, follow.Load(t.Context(), limiter))
	insert := func(row ...any) {
		harness.Succeeds(t, harness.Second(pool.Exec(t.Context(), "INSERT INTO ratelimit.limits VALUES ($1, $2, $3, $4, 0, $5)", row...)))
	}
	minute := at.Add(time.Minute)
	for _, c := range []struct {
		limit  ratelimit.Limit
		key    string
		ts     []time.Time // of its rows
		paused bool        // until the last of them
	}{
		{harness.Steady(1), "ahead", []time.Time{minute}, true},
		{harness.Steady(1), "for a second", []time.Time{at.Add(time.Second)}, false},
		{harness.Steady(1), "for a moment more", []time.Time{at.Add(time.Second + time.Microsecond)}, true},
		{harness.Steady(1), "used", []time.Time{at.Add(-time.Minute)}, false},
		{harness.Steady(3), "in one shard", []time.Time{at, minute, at.Add(-time.Hour)}, true},
		{harness.Steady(1), "blocked", []time.Time{minute}, true},
		{harness.Steady(1), "both", []time.Time{minute}, true},
		{harness.Steady(1), "lifted", []time.Time{minute}, false},
		{harness.Steady(1), "lifted, blocked", []time.Time{minute}, false},
		{harness.Steady(1), "lowered", []time.Time{minute}, true},
		{limits[2], "of a window", []time.Time{minute}, false},
		{limits[3], "without a rate", []time.Time{minute}, false},
		{limits[4], "of slots", []time.Time{minute}, false},
		{limits[5], "of the program's", []time.Time{minute}, true},
	} {
		for shard, ts := range c.ts {
			insert(c.limit.Name(), c.key, shard, len(c.ts), ts)
		}
		want := time.Time{}
		if c.paused {
			want = slices.MaxFunc(c.ts, time.Time.Compare)
		}
		if b := harness.ReadBalances(t, limiter, pool, c.limit.Key(c.key))[0]; !b.PausedUntil.Equal(want) {
			t.Errorf("%s: Balance says %v, want %v", c.key, b.PausedUntil, want)
		}
		got := harness.Scan[*time.Time](t, pool, "SELECT paused_until FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, ARRAY[$2], $3)", c.limit.Name(), c.key, at)
		if (got != nil) != c.paused || got != nil && !got.Equal(want) {
			t.Errorf("%s: ratelimit.keys says %v, want %v", c.key, got, want)
		}
	}
	insert("steady in 3", "broken", 0, 3, minute)
	insert("steady in 3", "broken", 1, 3, pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true})
	if got := harness.Scan[*time.Time](t, pool, "SELECT paused_until FROM ratelimit._keys('steady in 3', NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, ARRAY['broken'], $1)", at); got != nil {
		t.Errorf("a row of no program: %v", got)
	}
	// With numbers, these alone count.
	if got := harness.Scan[*time.Time](t, pool, "SELECT paused_until FROM ratelimit.keys('steady in 1', 1, '1 minute', keys => ARRAY['lifted'])"); got == nil || !got.Equal(minute) {
		t.Errorf("with numbers: %v", got)
	}
}

// TestPauseBySQL: the functions for SQL by hand pause as the library does.
func TestPauseBySQL(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limiter := new(ratelimit.Limiter)
	free, slots := ratelimit.Unlimited("free"), ratelimit.Slots("slots", 2)
	window := ratelimit.FixedWindow("window", 3, time.Hour)
	varies := ratelimit.TokenBucket("varies", 3, time.Hour, ratelimit.Varies(time.Hour))
	never := ratelimit.TokenBucket("never", 0, time.Hour)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "test", harness.Steady(1), harness.Steady(3), free, slots, window, varies, never))
	for _, shards := range []int{1, 3} {
		limit := harness.Steady(shards)
		until := harness.Scan[time.Time](t, pool, "SELECT ratelimit.pause($1, 'ann', until => now() + interval '1 minute', remaining => 2)", limit.Name())
		for _, r := range []ratelimit.Request{limit.Key("ann")} {
			if b := harness.ReadBalances(t, limiter, pool, r)[0]; b.Remaining != 2 || !b.PausedUntil.Equal(until) {
				t.Errorf("%+v, want 2 until %v", b, until)
			}
			if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.limits WHERE name = $1 AND key = 'ann'", limit.Name()); n != shards {
				t.Errorf("%d rows", n)
			}
		}
		if later := harness.Scan[time.Time](t, pool, "SELECT ratelimit.pause($1, 'ann', until => now() + interval '1 second')", limit.Name()); !later.Equal(until) {
			t.Errorf("paused until %v, want %v", later, until)
		}
		if b := harness.ReadBalances(t, limiter, pool, limit.Key("ann"))[0]; b.Remaining != 0 {
			t.Errorf("%+v", b)
		}
		for i, want := range []bool{true, false} {
			if got := harness.Scan[bool](t, pool, "SELECT ratelimit.resume($1, 'ann')", limit.Name()); got != want {
				t.Errorf("resume %d: %v", i, got)
			}
		}
		if got := harness.Scan[bool](t, pool, "SELECT ratelimit.resume($1, 'nobody')", limit.Name()); got {
			t.Error("a key that was never used was paused")
		}
	}
	// Numbers that nobody has published, a limit without keys, and what decides beside the numbers.
	harness.Scan[time.Time](t, pool, "SELECT ratelimit.pause('own', 'ann', now() + interval '1 minute', 3, rate => 1, period => '1 hour', capacity => 2)")
	if b := harness.ReadBalances(t, limiter, pool, ratelimit.TokenBucket("own", 1, time.Hour, ratelimit.Capacity(2)).Key("ann"))[0]; b.Remaining != 2 || b.PausedUntil.IsZero() {
		t.Errorf("%+v", b)
	}
	harness.MustExec(t, pool, "SELECT ratelimit.block('steady in 1', 'blocked', forever => true), ratelimit.unlimited('steady in 1', 'lifted', forever => true), ratelimit.override('steady in 1', 'lowered', rate => 1, capacity => 1, forever => true), ratelimit.override('steady in 1', 'both', capacity => 3, forever => true), ratelimit.block('steady in 1', 'both', forever => true)")
	for key, want := range map[string]float64{"blocked": 5, "lifted": 5, "lowered": 1, "both": 3} {
		harness.Scan[time.Time](t, pool, "SELECT ratelimit.pause('steady in 1', $1, until => now() + interval '1 minute', remaining => 5)", key)
		if b := harness.ReadBalances(t, limiter, pool, harness.Steady(1).Key(key))[0]; b.Remaining != want || b.PausedUntil.IsZero() {
			t.Errorf("%s: %+v, want %v", key, b, want)
		}
	}
	harness.Scan[time.Time](t, pool, "SELECT ratelimit.pause('bare', until => now() + interval '1 minute', rate => 1, period => '1 hour', global => true)")
	if b := harness.ReadBalances(t, limiter, pool, ratelimit.TokenBucket("bare", 1, time.Hour).Global())[0]; b.Remaining != 0 {
		t.Errorf("%+v", b)
	}
	if came := harness.Scan[*time.Time](t, pool, "SELECT ratelimit.pause('steady in 1', 'late', until => now() - interval '1 minute')"); came != nil {
		t.Errorf("one that is over is paused until %v", came)
	}
	if came := harness.Scan[*time.Time](t, pool, "SELECT ratelimit.pause('never', 'ann', until => now() + interval '1 minute')"); came != nil {
		t.Errorf("a rate of 0 is paused until %v", came)
	}
	before := harness.TableOf(t, pool)
	for call, text := range map[string]string{
		"ratelimit.pause('window', 'ann', until => now() + interval '1 minute')":                                       "only a token bucket can be paused, and its kind is 'fixed window'",
		"ratelimit.pause('slots', 'ann', until => now() + interval '1 minute')":                                        "only a token bucket can be paused, and its kind is 'slots'",
		"ratelimit.pause('slots', 'ann', until => now(), remaining => 5, rate => 1000, period => '1 second')":          "only a token bucket can be paused, and its kind is 'slots'",
		"ratelimit.pause('free', 'ann', until => now() + interval '1 minute')":                                         "only a token bucket can be paused, and its kind is 'unlimited'",
		"ratelimit.pause('nobody''s', 'ann', until => now() + interval '1 minute')":                                    "no program has published it",
		"ratelimit.pause('varies', 'ann', until => now() + interval '1 minute')":                                       "the numbers of this key are the program's",
		"ratelimit.pause('steady in 1', 'ann')":                                                                        "until must be at most 31 days away, not NULL",
		"ratelimit.pause('steady in 1', 'ann', until => 'infinity')":                                                   "until must be at most 31 days away, not infinity",
		"ratelimit.pause('steady in 1', 'ann', until => now() + interval '31 days 1 minute')":                          "until must be at most 31 days away, not 20",
		"ratelimit.pause('steady in 1', 'ann', until => to_timestamp(60))":                                             "until must be at most 31 days away, not 1970",
		"ratelimit.pause('steady in 1', 'ann', until => now(), remaining => -1)":                                       "remaining must be 0 or between 1e-15 and 1e15, not -1",
		"ratelimit.pause('steady in 1', 'ann', until => now(), remaining => NULL)":                                     "remaining must be 0 or between 1e-15 and 1e15, not NULL",
		"ratelimit.pause('steady in 1', 'ann', until => now(), remaining => 'NaN')":                                    "remaining must be 0 or between 1e-15 and 1e15, not NaN",
		"ratelimit.pause('steady in 1', '', until => now())":                                                           "key must have 1 to 1024 bytes, not 0",
		"ratelimit.pause('steady in 1', 'ann', until => now(), global => true)":                                        "key must be NULL with global => true",
		"ratelimit.pause('own', 'ann', until => now(), rate => -1, period => '1 hour')":                                "rate must be 0 or between",
		"ratelimit.pause('own', 'ann', until => now(), shards => 3)":                                                   "rate must be 0 or between",
		"ratelimit.pause('own', 'ann', until => now(), capacity => 3)":                                                 "rate must be 0 or between",
		"ratelimit.pause('own', 'ann', until => now(), period => '1 hour')":                                            "rate must be 0 or between",
		"ratelimit.pause(NULL, 'ann', until => now())":                                                                 "no program has published it",
		"ratelimit.resume(NULL, 'ann')":                                                                                "name must have 1 to 255 bytes, not NULL",
		"ratelimit.resume('steady in 1')":                                                                              "key must have 1 to 1024 bytes, not NULL",
		"ratelimit._resume('{l}', '{k}', 'infinity')":                                                                  "the arguments are not valid",
		"ratelimit._pause('{}', '{}', '{}', '{}', '{}', '{}', '{}', now())":                                            "the arguments are not valid",
		"ratelimit._pause(NULL, NULL, NULL, NULL, NULL, NULL, NULL, now())":                                            "the arguments are not valid",
		"ratelimit._pause('{l,l}', '{k,k}', '{1,1}', '{1 h,1 h}', '{1,1}', '{1,1}', '{0,0}', now())":                   "the arguments are not valid",
		"ratelimit._pause('{m,l}', '{k,k}', '{1,1}', '{1 h,1 h}', '{1,1}', '{1,1}', '{0,0}', now())":                   "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{0}', '{1 h}', '{1}', '{1}', '{0}', now())":                                   "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{NaN}', '{1 h}', '{1}', '{1}', '{0}', now())":                                 "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{0}', '{0}', now())":                                   "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{101}', '{0}', now())":                                 "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{1}', '{NaN}', now())":                                 "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{1}', '{0,0}', now())":                                 "the arguments are not valid",
		"ratelimit._pause('{l}', '{k,k}', '{1}', '{1 h}', '{1}', '{1}', '{0}', now())":                                 "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{1}', '{0}', 'infinity')":                              "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{1}', '{0}', NULL)":                                    "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{1}', '{0}', now() + interval '32 days 1 minute')":     "the arguments are not valid",
		"ratelimit._pause('{l}', '{k}', '{1}', '{1 h}', '{1}', '{1}', '{0}', '2026-03-06', '2026-02-01'::timestamptz)": "the arguments are not valid",
	} {
		if _, err := pool.Exec(t.Context(), "SELECT "+call); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %q", call, err, text)
		}
	}
	if after := harness.TableOf(t, pool); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}

// TestOnlyBucketsAreShownAsPaused: the row of a window may lie ahead, since a clock stepped back. That is no pause.
func TestOnlyBucketsAreShownAsPaused(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: pool, Limiter: limiter, Clock: clock}
	window := ratelimit.FixedWindow("window", 3, time.Hour).Key("ann")
	w.Grant(window)
	clock.Advance(-time.Minute)
	paused(w, window, time.Time{})
}

// TestAPauseReadsTheClockAfterWaiting: what was refilled while it waited for the row counts, so a debt is no deeper than it is.
func TestAPauseReadsTheClockAfterWaiting(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limiter := new(ratelimit.Limiter)
	r := ratelimit.TokenBucket("fast", 1000, time.Second, ratelimit.Capacity(1e6)).Key("ann")
	if _, err := limiter.Charge(t.Context(), pool, r.Count(1_000_000+1000)); err != nil { // a debt of a second
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	harness.Succeeds(t, harness.Second(limiter.Charge(t.Context(), tx, r.Count(0))))
	paused := make(chan error, 1)
	go func() { paused <- harness.Second(limiter.Pause(t.Context(), pool, time.Millisecond, r.Count(1e6))) }()
	harness.Blocked(t, pool, tx, 1)
	time.Sleep(500 * time.Millisecond)
	before := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")
	harness.Succeeds(t, tx.Commit(t.Context()))
	harness.Succeeds(t, <-paused)
	if ts := harness.Scan[time.Time](t, pool, "SELECT ts FROM ratelimit.limits"); ts.Before(before) {
		t.Errorf("the row is of %v, and the lock was there at %v", ts, before)
	}
}

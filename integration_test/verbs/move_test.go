package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// move moves, and wants the limit and key that it moves from as they were.
func move(w harness.World, from, to ratelimit.Request) {
	w.Helper()
	before := w.Balance(from)
	w.Do(w.Limiter.Move(w.Context(), w.DB, from, to))
	w.Holds(from, before)
}

const month = 720 * time.Hour

// plans are two plans of one kind, each with a name of its own: 100 and 1,000 tokens.
func plans(kind string, small, large int) (a, b ratelimit.Limit) {
	one, two := []ratelimit.Option{ratelimit.Shards(small)}, []ratelimit.Option{ratelimit.Shards(large)}
	as, bs := fmt.Sprintf("%s.small %d to %d", kind, small, large), fmt.Sprintf("%s.large %d to %d", kind, small, large)
	switch kind {
	case "bucket":
		return ratelimit.TokenBucket(as, 100, month, one...), ratelimit.TokenBucket(bs, 1000, 2*month, two...)
	case "calendar":
		zone := []ratelimit.Option{ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor("2026-01-31")}
		return ratelimit.CalendarWindow(as, 100, ratelimit.Month, append(zone, one...)...), ratelimit.CalendarWindow(bs, 1000, ratelimit.Month, append(zone, two...)...)
	case "started":
		one, two = append(one, ratelimit.Start(harness.Noon.Add(time.Hour))), append(two, ratelimit.Start(harness.Noon.Add(time.Hour-month)))
	}
	return ratelimit.FixedWindow(as, 100, month, one...), ratelimit.FixedWindow(bs, 1000, month, two...)
}

func TestMove(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, kind := range []string{"bucket", "hashed", "started", "calendar"} {
			for n := range 4 {
				if kind == "started" && n != 0 || kind == "calendar" && n != 3 {
					continue // the shards have been tested
				}
				small, large := plans(kind, 1+2*(n&1), 1+n&2)
				for n := range 4 { // with and without rows
					key := fmt.Sprint("key ", n)
					a, b := small.Key(key), large.Key(key)
					usedA, usedB := 20*float64(n&1), 15*float64(n&2)
					if usedA > 0 {
						w.Grant(a.Count(usedA))
					}
					if usedB > 0 {
						w.Grant(b.Count(usedB))
					}
					move(w, a, b)
					w.Holds(b, 1000-max(usedA, usedB))
					move(w, a, b) // again
					w.Holds(b, 1000-max(usedA, usedB))
					w.Grant(b.Count(40))
					move(w, b, a)
					w.Holds(a, 100-max(usedA, usedB)-40)
					w.Grant(b.Count(500))
					move(w, b, a)
					w.Holds(a, 0)
					w.Deny(a)
				}
			}
		}

		// The next windows are full.
		w.Clock.Advance(32 * 24 * time.Hour)
		for _, kind := range []string{"hashed", "started", "calendar"} {
			small, large := plans(kind, 3, 3)
			if kind == "started" {
				small, large = plans(kind, 1, 1)
			}
			w.Holds(small.Key("key 3"), 100)
			w.Holds(large.Key("key 3"), 1000)
			move(w, large.Key("key 3"), small.Key("key 3"))
			w.Holds(small.Key("key 3"), 100)
		}

		// Buckets refill by their own rates, before and after.
		a, b := ratelimit.TokenBucket("slow", 10, time.Hour).Key("ann"), ratelimit.TokenBucket("fast", 100, time.Minute, ratelimit.Capacity(200)).Key("ann")
		w.Grant(a.Count(10))
		w.Grant(b.Count(200))
		w.Clock.Advance(time.Minute + 30*time.Second)
		move(w, a, b)
		w.Holds(b, 150)
		w.Clock.Advance(4*time.Minute + 30*time.Second) // from has one token again
		w.Holds(b, 200)
		move(w, a, b)
		w.Holds(b, 191)
	})
}

func TestMoveOfDebts(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		small, large := plans("hashed", 1, 3)
		owing := ratelimit.FixedWindow("owing", 50, month, ratelimit.MaxReserved(30), ratelimit.Shards(2))
		strict := ratelimit.FixedWindow("strict", 50, month, ratelimit.MaxReserved(0))
		w.Charge(small.Key("ann").Count(130))
		w.Holds(small.Key("ann"), -30)
		move(w, small.Key("ann"), large.Key("ann"))
		w.Holds(large.Key("ann"), 870)
		for _, row := range []struct {
			used, owing, others float64
		}{{40, 10, 10}, {60, -10, 0}, {80, -30, 0}, {81, -30, 0}, {2000, -30, 0}} {
			key := fmt.Sprint(row)
			w.Charge(large.Key(key).Count(row.used))
			move(w, large.Key(key), owing.Key(key))
			w.Holds(owing.Key(key), row.owing)
			move(w, large.Key(key), strict.Key(key))
			w.Holds(strict.Key(key), row.others)
			move(w, large.Key(key), small.Key(key))
			w.Holds(small.Key(key), max(100-row.used, 0))
		}
		tiny := ratelimit.FixedWindow("tiny", 0.5, month) // less than one token
		w.Grant(tiny.Key("ann").Count(0.25))
		move(w, tiny.Key("ann"), large.Key("ann"))
		w.Holds(large.Key("ann"), 870)
		move(w, large.Key("ann"), tiny.Key("ann"))
		w.Holds(tiny.Key("ann"), 0)
		// A debt of the limit to move to stays, also one that is above its bound.
		w.Charge(owing.Key("bob").Count(100))
		move(w, small.Key("bob"), owing.Key("bob"))
		w.Holds(owing.Key("bob"), -50)
		w.Charge(small.Key("bob").Count(300))
		move(w, small.Key("bob"), owing.Key("bob"))
		w.Holds(owing.Key("bob"), -50)

		// Tokens of waiting work are used, and so are those that it forfeits: the work of the second window is on the old plan.
		w.Reserve(small.Key("cid").Count(80))
		w.Reserve(small.Key("cid").Count(50))
		w.Holds(small.Key("cid"), -50)
		move(w, small.Key("cid"), large.Key("cid"))
		w.Holds(large.Key("cid"), 850)
		// A receipt stays with its limit.
		granted := w.Grant(small.Key("dan").Count(60))
		move(w, small.Key("dan"), large.Key("dan"))
		_, err := w.Limiter.Refund(w.Context(), w.DB, granted.Receipt(), small.Key("dan").Count(60))
		w.Do(err)
		w.Holds(small.Key("dan"), 100)
		w.Holds(large.Key("dan"), 940)
		if _, err := w.Limiter.Refund(w.Context(), w.DB, granted.Receipt(), large.Key("dan").Count(60)); !errors.Is(err, ratelimit.ErrInvalid) {
			w.Fatalf("a refund to the new plan: %v", err)
		}
	})
}

// TestMoveThereAndBackMintsNothing: a hundred moves, with consumption in between, grant what the larger plan has.
func TestMoveThereAndBackMintsNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, kind := range []string{"bucket", "calendar"} {
			small, large := plans(kind, 2, 1)
			a, b := small.Key("ann"), large.Key("ann")
			granted := 0.0
			for range 100 {
				for _, r := range []ratelimit.Request{a, b} {
					if _, err := w.Limiter.Consume(w.Context(), w.DB, r.Count(11)); err == nil {
						granted += 11
					} else if !harness.Denied(err) {
						w.Fatal(err)
					}
					other := a
					if r == a {
						other = b
					}
					w.Do(w.Limiter.Move(w.Context(), w.DB, r, other))
				}
			}
			if granted > 1000 || granted < 980 {
				w.Fatalf("%s: %v granted in 100 moves there and back, want 1,000 at most, and all that fit", kind, granted)
			}
		}
	})
}

// TestMoveOfPlansWithoutRows: unlimited limits and those with a rate of 0 use nothing and hold nothing.
func TestMoveOfPlansWithoutRows(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		none, all := ratelimit.FixedWindow("api.none", 0, month), ratelimit.Unlimited("api.all")
		small, _ := plans("hashed", 2, 1)
		bucket := ratelimit.TokenBucket("api.bucket", 10, time.Hour)
		w.Grant(small.Key("ann").Count(30))
		w.Grant(bucket.Key("ann").Count(3))
		before := w.Rows()
		for _, pair := range [][2]ratelimit.Limit{{none, small}, {small, none}, {all, small}, {small, all}, {all, none}, {none, all}, {all, bucket}, {bucket, all}} {
			w.Do(w.Limiter.Move(w.Context(), w.DB, pair[0].Key("ann"), pair[1].Key("ann")))
			w.Do(w.Limiter.Move(w.Context(), w.DB, pair[0].Key("bob"), pair[1].Key("bob")))
		}
		if after := w.Rows(); after != before {
			w.Fatalf("the table was\n%s\nand is\n%s", before, after)
		}
	})
}

func TestMoveRefusesWhatDoesNotRefillTogether(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		hour := ratelimit.FixedWindow("hour", 10, time.Hour)
		started := ratelimit.FixedWindow("started", 10, time.Hour, ratelimit.Start(harness.Noon))
		day := ratelimit.CalendarWindow("day", 10, ratelimit.Day)
		bucket := ratelimit.TokenBucket("bucket", 10, time.Hour)
		ann := hour.Key("ann")
		w.Grant(ann, started.Key("ann"), day.Key("ann"), bucket.Key("ann"))
		before := w.Rows()
		for name, pair := range map[string][2]ratelimit.Request{
			"itself":                        {ann, ann},
			"itself without a key":          {bucket.Global(), bucket.Global()},
			"a bucket itself":               {bucket.Key("ann"), bucket.Key("ann")},
			"a window and a bucket":         {ann, bucket.Key("ann")},
			"a bucket and a window":         {bucket.Key("ann"), ann},
			"a bucket and a calendar":       {bucket.Key("ann"), day.Key("ann")},
			"a window and a calendar":       {ann, day.Key("ann")},
			"another period":                {ann, ratelimit.FixedWindow("two hours", 10, 2*time.Hour).Key("ann")},
			"another period, on one grid":   {started.Key("ann"), ratelimit.FixedWindow("two started", 10, 2*time.Hour, ratelimit.Start(harness.Noon)).Key("ann")},
			"another start":                 {started.Key("ann"), ratelimit.FixedWindow("later", 10, time.Hour, ratelimit.Start(harness.Noon.Add(time.Minute))).Key("ann")},
			"a start and none":              {started.Key("ann"), ann},
			"another key's windows":         {ann, hour.Key("bob")},
			"no key's windows":              {hour.Global(), ratelimit.FixedWindow("other", 10, time.Hour).Global()},
			"another unit":                  {day.Key("ann"), ratelimit.CalendarWindow("week", 10, ratelimit.Week).Key("ann")},
			"another zone":                  {day.Key("ann"), ratelimit.CalendarWindow("berlin", 10, ratelimit.Day, ratelimit.Zone("Europe/Berlin")).Key("ann")},
			"another anchor":                {day.Key("ann"), ratelimit.CalendarWindow("anchored", 10, ratelimit.Day, ratelimit.Anchor("2026-01-02")).Key("ann")},
			"a rate of 0 of another kind":   {ratelimit.TokenBucket("none", 0, time.Hour).Key("ann"), ann},
			"a count":                       {ann.Count(2), ratelimit.FixedWindow("other", 10, time.Hour).Key("ann")},
			"a count of 0":                  {ann, ratelimit.FixedWindow("other", 10, time.Hour).Key("ann").Count(0)},
			"a count of an unlimited limit": {ratelimit.Unlimited("all").Key("ann"), ann.Count(3)},
			"a mistake":                     {ann, ratelimit.TokenBucket("wrong", -1, time.Hour).Key("ann")},
			"an empty key":                  {ann, ratelimit.FixedWindow("other", 10, time.Hour).Key("")},
			"nothing":                       {ann, ratelimit.Request{}},
			"from nothing":                  {ratelimit.Request{}, ann},
		} {
			if err := w.Limiter.Move(w.Context(), w.DB, pair[0], pair[1]); !errors.Is(err, ratelimit.ErrInvalid) {
				w.Errorf("%s: %v, want ErrInvalid", name, err)
			}
		}
		if after := w.Rows(); after != before {
			w.Fatalf("the table was\n%s\nand is\n%s", before, after)
		}
		move(w, ann, ratelimit.FixedWindow("other", 100, time.Hour).Key("ann")) // the transaction is usable
		move(w, bucket.Key("ann"), bucket.Key("bob"))                           // another key of one bucket
		w.Holds(bucket.Key("bob"), 9)
		move(w, started.Key("ann"), started.Global()) // one grid for all keys
		w.Holds(started.Global(), 9)
		move(w, day.Key("ann"), day.Key("bob"))
		w.Holds(day.Key("bob"), 9)
	})
}

// TestMoveUnderOverrides: numbers count, and blocks and lifted limits do not.
func TestMoveUnderOverrides(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		small, large := plans("hashed", 1, 1)
		follow.By(w.Limiter, follow.Settings{DB: pool})
		for _, c := range []struct {
			key, sql   string
			first      bool // it is overridden before the tokens are used
			used, want float64
		}{
			{"raised", "ratelimit.override('hashed.small 1 to 1', $1, rate => 300, forever => true)", true, 250, 750},
			{"lowered", "ratelimit.override('hashed.small 1 to 1', $1, rate => 40, forever => true)", true, 40, 960},
			{"lowered to", "ratelimit.override('hashed.large 1 to 1', $1, rate => 200, forever => true)", true, 90, 110},
			{"blocked", "ratelimit.block('hashed.small 1 to 1', $1, forever => true)", false, 90, 910},
			{"blocked to", "ratelimit.block('hashed.large 1 to 1', $1, forever => true)", true, 90, 910},
			{"lifted", "ratelimit.unlimited('hashed.small 1 to 1', $1, forever => true)", false, 90, 910},
			{"lifted to", "ratelimit.unlimited('hashed.large 1 to 1', $1, forever => true)", true, 90, 910},
		} {
			override := func(now bool) {
				if now {
					harness.Scan[int64](w, pool, "SELECT "+c.sql, c.key)
					w.Do(follow.Load(w.Context(), w.Limiter))
				}
			}
			override(c.first)
			w.Grant(small.Key(c.key).Count(c.used))
			override(!c.first)
			w.Do(w.Limiter.Move(w.Context(), w.DB, small.Key(c.key), large.Key(c.key)))
			if left := harness.ReadBalance(w, &ratelimit.Limiter{Clock: w.Clock.Now}, w.DB, large.Key(c.key)); left != c.want {
				w.Fatalf("%s: %v left after a move, want %v", c.key, left, c.want)
			}
		}
	})
}

// TestMoveOnOtherHandles: a Coalescer, the database in memory, the Observer, and a pool inside its transaction.
func TestMoveOnOtherHandles(t *testing.T) {
	t.Parallel()
	small, large := plans("calendar", 1, 2)
	a, b := small.Key("ann"), large.Key("ann")
	pool := harness.NewPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	memory := ratelimittest.New(t)
	var seen []ratelimit.Decision
	limiter := ratelimit.Limiter{Clock: memory.Now, Observer: func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }}
	for name, db := range map[string]ratelimit.DB{"coalescer": coalescer, "in memory": memory} {
		seen = nil
		w := harness.World{T: t, DB: nil, Limiter: &limiter, Clock: nil}
		if _, err := w.Limiter.Consume(t.Context(), db, a.Count(80)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		w.Do(w.Limiter.Move(t.Context(), db, a, b))
		if result, err := w.Limiter.Check(t.Context(), db, b.Count(0)); err != nil || result.Remaining != 920 {
			t.Fatalf("%s: %+v, %v", name, result, err)
		}
		if err := w.Limiter.Move(t.Context(), db, a, a); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Fatalf("%s: %v", name, err)
		}
		if len(seen) != 4 || seen[1].Verb != "move" || seen[1].Err != nil || !seen[1].Result.OK || len(seen[1].Result.Requests) != 2 ||
			seen[1].Result.Requests[1].Limit.Name() != large.Name() || seen[3].Verb != "move" || !errors.Is(seen[3].Err, ratelimit.ErrInvalid) {
			t.Fatalf("%s: observed %+v", name, seen)
		}
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := limiter.Move(canceled, pool, a, b); !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Fatalf("canceled: %v", err)
	}
	if err := limiter.Move(t.Context(), nil, a, b); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Fatalf("no database: %v", err)
	}
}

// TestAMoveMissesNoUse: what another transaction has used before the move, and the move's snapshot lacks, is a conflict above READ
// COMMITTED, also the first use. In READ COMMITTED, it counts.
func TestAMoveMissesNoUse(t *testing.T) {
	t.Parallel()
	for _, level := range harness.SomeOf(t, 1, harness.Levels...) {
		for _, kind := range []string{"a row", "a first use"} {
			for _, when := range []string{"before", "during"} {
				for _, side := range []string{"from", "to"} {
					for _, shards := range []int{1, 3} {
						t.Run(fmt.Sprintf("%s, %s of %s %s the move, %d shards", level, kind, side, when, shards), func(t *testing.T) {
							t.Parallel()
							small, large := plans("hashed", shards, shards)
							from, to := small.Key("ann"), large.Key("ann")
							used := from
							if side == "to" {
								used = to
							}
							var limiter ratelimit.Limiter
							pool := harness.NewPool(t, 3)
							attempts := 0
							// move moves. Nobody else can lock a row afterwards, also one that another transaction has inserted.
							move := func(ctx context.Context, tx pgx.Tx) error {
								if err := limiter.Move(ctx, tx, from, to); err != nil {
									return err
								}
								if n := harness.Scan[int](t, pool, "SELECT count(*) FROM (SELECT FROM ratelimit.limits FOR UPDATE SKIP LOCKED) AS free"); n != 0 {
									t.Errorf("%d rows are not locked after the move", n)
								}
								return nil
							}
							err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
								if attempts++; attempts > 1 {
									return move(ctx, tx)
								}
								if kind == "a row" {
									if _, err := limiter.Consume(t.Context(), pool, from.Count(5), to.Count(5)); err != nil {
										return err
									}
								}
								if _, err := tx.Exec(ctx, "SELECT FROM ratelimit.limits"); err != nil { // the snapshot
									return err
								}
								other, err := pool.Begin(t.Context())
								if err != nil {
									return err
								}
								defer func() { _ = other.Rollback(context.WithoutCancel(ctx)) }()
								if _, err := limiter.Consume(t.Context(), other, used.Count(60)); err != nil {
									return err
								}
								committed := make(chan error, 1)
								if when == "before" {
									committed <- other.Commit(t.Context())
								} else {
									go func() {
										defer func() { committed <- other.Commit(t.Context()) }() // also if nobody waits, which fails
										harness.WaitingFor(t, pool, other)
									}()
								}
								err = move(ctx, tx)
								if level != pgx.ReadCommitted && harness.SQLState(err) != "40001" {
									t.Errorf("the move: %v, want a conflict", err)
								}
								return errors.Join(err, <-committed)
							}, ratelimit.Isolation(level))
							harness.Succeeds(t, err)
							if want := map[bool]int{true: 1, false: 2}[level == pgx.ReadCommitted]; attempts != want {
								t.Errorf("%d attempts, want %d", attempts, want)
							}
							want := 940.0
							if kind == "a row" {
								want -= 5
							}
							if result, err := limiter.Check(t.Context(), pool, to.Count(0)); err != nil || !harness.Near(result.Remaining, want) {
								t.Errorf("%v left, want %v (%v)", result.Remaining, want, err)
							}
						})
					}
				}
			}
		}
	}
}

// TestAMoveReadsTheClockAfterWaiting: the balance is that of an instant after the wait. Otherwise the time of the wait would refill
// it again.
func TestAMoveReadsTheClockAfterWaiting(t *testing.T) {
	t.Parallel()
	small, large := ratelimit.TokenBucket("a", 10, time.Hour).Key("ann"), ratelimit.TokenBucket("b", 100, time.Hour).Key("ann")
	var limiter ratelimit.Limiter
	pool := harness.NewPool(t, 3)
	if _, err := limiter.Consume(t.Context(), pool, large); err != nil { // so that the move need not begin again
		t.Fatal(err)
	}
	other, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), other, large)))
	moved := make(chan error, 1)
	go func() { moved <- limiter.Move(t.Context(), pool, small, large) }() // inserts the row of a, and waits for that of b
	harness.WaitingFor(t, pool, other)
	waited := harness.Scan[time.Time](t, other, "SELECT clock_timestamp()")
	harness.Succeeds(t, errors.Join(other.Commit(t.Context()), <-moved))
	if ts := harness.Scan[time.Time](t, pool, "SELECT ts FROM ratelimit.limits WHERE name = 'b'"); ts.Before(waited) {
		t.Errorf("moved as of %v, but at %v the move still waited", ts, waited)
	}
}

// TestAMoveWaitsForAFirstUseThatRollsBack: then nothing is used.
func TestAMoveWaitsForAFirstUseThatRollsBack(t *testing.T) {
	t.Parallel()
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			small, large := plans("bucket", 2, 3)
			limiter, _ := harness.NewLimiter()
			pool := harness.NewPool(t, 3)
			other, err := pool.Begin(t.Context())
			harness.Succeeds(t, err)
			harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), other, small.Key("ann").Count(60))))
			rolledBack := make(chan error, 1)
			go func() {
				defer func() { rolledBack <- other.Rollback(t.Context()) }()
				harness.WaitingFor(t, pool, other)
			}()
			err = limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				return limiter.Move(ctx, tx, small.Key("ann"), large.Key("ann"))
			}, ratelimit.Isolation(level))
			harness.Succeeds(t, errors.Join(err, <-rolledBack))
			if result, err := limiter.Check(t.Context(), pool, large.Key("ann").Count(0)); err != nil || result.Remaining != 1000 {
				t.Errorf("%+v, %v", result, err)
			}
		})
	}
}

// TestMovesDoNotDeadlock: moves in both directions among calls for both keys, some with rows and some without, with and without
// shards.
func TestMovesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 16)
	var limits [3]ratelimit.Limit
	for i, shards := range []int{1, 4, 1} {
		limits[i] = ratelimit.TokenBucket(fmt.Sprint("plan ", i), 1e6, time.Hour, ratelimit.Shards(shards))
	}
	var limiter ratelimit.Limiter
	seed := harness.NewRand(t).Uint64()
	begin, d := time.Now(), harness.Sized(4*time.Second, time.Second)
	var moves atomic.Int64
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(g)))
			for time.Since(begin) < d || moves.Load() < 50 && time.Since(begin) < harness.Patience {
				i := r.IntN(3)
				a, b := limits[i].Key("ann"), limits[(i+1+r.IntN(2))%3].Key("ann")
				var err error
				switch r.IntN(8) {
				case 0, 1, 2:
					err = limiter.Move(t.Context(), pool, a, b)
					moves.Add(1)
				case 3:
					err = limiter.Reset(t.Context(), pool, b, a)
				case 4:
					_, err = limiter.Charge(t.Context(), pool, a.Count(2e5), b.Count(2e5)) // of all shards
				default:
					_, err = limiter.Consume(t.Context(), pool, a, b)
				}
				if err != nil && !harness.Denied(err) {
					t.Errorf("%v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	if moves.Load() < 50 {
		t.Errorf("%d moves: this tested too little", moves.Load())
	}
}

// TestMoveUnderTraffic upgrades and downgrades a customer again and again, while requests read the plan, and consume by what they have
// read. Each grant is noted, in its transaction, and so is whether it came from a plan that was not the customer's any more. All others
// together fit the larger plan, and each plan has, when it becomes the customer's, all that others have left of it.
func TestMoveUnderTraffic(t *testing.T) {
	for _, level := range harness.SomeOf(t, 1, harness.Levels...) {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s, %d shards", level, shards), func(t *testing.T) {
				t.Parallel()
				moveUnderTraffic(t, level, shards)
			})
		}
	}
}

func moveUnderTraffic(t *testing.T, level pgx.TxIsoLevel, shards int) {
	pool := harness.NewPool(t, 17)
	harness.MustExec(t, pool, `CREATE TABLE plans (name text); INSERT INTO plans VALUES ('small');
		CREATE TABLE grants (plan text, late boolean)`)
	start := ratelimit.Start(harness.Noon) // a period far longer than the test
	limits := map[string]ratelimit.Request{
		"small": ratelimit.FixedWindow("api.small", 150, 10_000*time.Hour, start, ratelimit.Shards(shards)).Key("ann"),
		"large": ratelimit.FixedWindow("api.large", 600, 10_000*time.Hour, start, ratelimit.Shards(4-shards)).Key("ann"),
	}
	var limiter ratelimit.Limiter
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				var read string // at any time before the call
				if err := pool.QueryRow(ctx, "SELECT name FROM plans").Scan(&read); err != nil {
					break
				}
				if (g+n)%3 == 0 {
					time.Sleep(time.Duration((g+n)%17) * time.Millisecond)
				}
				err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
					if _, err := limiter.Consume(ctx, tx, limits[read]); err != nil {
						return err
					}
					// The grant's row is locked, so a move from this plan either has committed, and is seen, or comes later.
					_, err := tx.Exec(ctx, "INSERT INTO grants SELECT $1, name <> $1 FROM plans", read)
					return err
				}, ratelimit.Isolation(pgx.ReadCommitted))
				if err != nil && !harness.Denied(err) && ctx.Err() == nil {
					t.Errorf("consume: %v", err)
				}
				if harness.Denied(err) {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	from, to, seen := "small", "large", 0
	for moves, began := 0, time.Now(); moves < 20 || seen < 150 && time.Since(began) < harness.Patience; moves++ {
		time.Sleep(15 * time.Millisecond)
		err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE plans SET name = $1", to); err != nil {
				return err
			}
			if err := limiter.Move(ctx, tx, limits[from], limits[to]); err != nil {
				return err
			}
			// Both keys are locked, so nobody consumes now. Above READ COMMITTED, nobody has since the snapshot.
			var all, late int
			if err := tx.QueryRow(ctx, "SELECT count(*), count(*) FILTER (WHERE late) FROM grants").Scan(&all, &late); err != nil {
				return err
			}
			result, err := limiter.Check(ctx, tx, limits[to].Count(0))
			if err != nil {
				return err
			}
			seen = all
			capacity := int(result.Requests[0].Limit.Capacity())
			if left, least, most := result.Remaining, max(capacity-all, 0), max(capacity-(all-late), 0); left < float64(least)-1e-6 || left > float64(most)+1e-6 {
				t.Errorf("%v of %d left after a move to %s, want %d to %d: %d were granted, %d of them late", left, capacity, to, least, most, all, late)
			}
			return nil
		}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
		if err != nil {
			t.Fatalf("move: %v", err)
		}
		from, to = to, from
	}
	time.Sleep(15 * time.Millisecond)
	stop()
	wg.Wait()
	var all, late int
	harness.Succeeds(t, pool.QueryRow(t.Context(), "SELECT count(*), count(*) FILTER (WHERE late) FROM grants").Scan(&all, &late))
	if all-late > 600 || all < 150 {
		t.Errorf("%d granted, %d of them late, want at most 600 that are not", all, late)
	}
	t.Logf("%d granted, %d of them late", all, late)
}

// The engine refuses what it cannot decide.
func TestMoveRefusesHostileArguments(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	good := []string{"'{a,b}'", "'{k,k}'", "'{1,1}'", "'{1 h,1 h}'", "'{1,1}'", "'{NULL,NULL}'", "'{1,1}'", "0", "NULL"}
	for name, change := range map[string]struct {
		at   int
		text string
	}{
		"no names": {0, "'{}'"}, "NULL names": {0, "NULL"}, "one name": {0, "'{a}'"}, "three names": {0, "'{a,b,c}'"}, "the same": {0, "'{a,a}'"},
		"NaN rate": {2, "'{1,NaN}'"}, "NULL rate": {2, "'{NULL,1}'"}, "negative rate": {2, "'{1,-1}'"},
		"NaN capacity": {4, "'{NaN,1}'"}, "infinite start": {5, "'{NULL,infinity}'"}, "no shards": {6, "'{0,1}'"}, "NULL shards": {6, "NULL"},
		"101 shards": {6, "'{1,101}'"}, "a floor above 0": {7, "1"}, "NaN floor": {7, "'NaN'"}, "NULL floor": {7, "NULL"}, "infinite now": {8, "'infinity'"},
	} {
		args := append([]string{}, good...)
		args[change.at] = change.text
		_, err := pool.Exec(t.Context(), "SELECT ratelimit._move("+strings.Join(args, ", ")+")")
		if harness.SQLState(err) != "22023" {
			t.Errorf("%s: %v, want 22023", name, err)
		}
	}
	if rows := harness.TableOf(t, pool); rows != "" {
		t.Errorf("the table has\n%s", rows)
	}
	if balance := harness.Scan[float64](t, pool, "SELECT ratelimit._move("+strings.Join(good, ", ")+")"); balance != 1 {
		t.Errorf("%v", balance)
	}
}

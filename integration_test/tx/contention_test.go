package tx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

// serializable lets 16 goroutines run transactions for a time, and counts commits and serialization failures.
func serializable(t *testing.T, pool *pgxpool.Pool, d time.Duration, work func(ctx context.Context, tx pgx.Tx, goroutine int) error) (commits, failures int64) {
	t.Helper()
	var wg sync.WaitGroup
	until := time.Now().Add(d)
	for g := range 16 {
		wg.Go(func() {
			// With pauses: while one commit waits for the disk, dead rows of the others cannot be pruned, and the page must
			// not fill up.
			for ; time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
				err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
					return work(t.Context(), tx, g)
				})
				switch {
				case err == nil:
					atomic.AddInt64(&commits, 1)
				case harness.SQLState(err) == "40001":
					atomic.AddInt64(&failures, 1)
				default:
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return commits, failures
}

// fill inserts rows of other keys, and tells the planner how small the table is.
func fill(t *testing.T, pool *pgxpool.Pool, rows int) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits SELECT 'own', i::text, 0, 1, 1e9, now() FROM generate_series(1, $1::int) AS i`, rows)
	if err == nil {
		_, err = pool.Exec(t.Context(), `ANALYZE ratelimit.limits`)
	}
	if err == nil { // a later ANALYZE would plan everything again, for a larger table
		_, err = pool.Exec(t.Context(), harness.WithoutAutovacuum("ratelimit.limits"))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestDistinctKeysNeverConflict is not parallel: it needs the whole machine.
//
// In the warm test, the rows have free space around them, as in a table that has been in use. On a page that was filled at
// once, the first new versions have to move to other pages, with new index entries. These conflict on an index leaf until
// all rows have space: some hundred serialization failures in the first second, none afterwards.
func TestDistinctKeysNeverConflict(t *testing.T) {
	harness.Long(t)
	limit := ratelimit.TokenBucket("own", 1e9, time.Second)
	var limiter ratelimit.Limiter

	t.Run("warm", func(t *testing.T) {
		harness.NeedsMode(t, pgx.QueryExecModeCacheStatement)
		enough := int64(harness.Sized(1000, 200))
		measure := func(what string, leastFailures int64, work func(ctx context.Context, tx pgx.Tx, key string) error) (commits, failures int64) {
			pool := harness.NewPool(t, 16)
			if _, err := pool.Exec(t.Context(), harness.Stored("ratelimit.limits", "fillfactor = 14")); err != nil {
				t.Fatal(err)
			}
			fill(t, pool, 100)
			prepare(t, pool, work)
			for begin := time.Now(); (commits < enough || failures < leastFailures) && time.Since(begin) < time.Minute; {
				c, f := serializable(t, pool, harness.Sized(4*time.Second, 2*time.Second), func(ctx context.Context, tx pgx.Tx, g int) error {
					return work(ctx, tx, fmt.Sprint(1+6*g))
				})
				commits, failures = commits+c, failures+f
			}
			t.Logf("%s: %d commits, %d serialization failures", what, commits, failures)
			return commits, failures
		}
		commits, failures := measure("the limiter", 0, func(ctx context.Context, tx pgx.Tx, key string) error {
			_, err := limiter.Consume(ctx, tx, limit.Key(key))
			return err
		})
		if failures != 0 || commits < enough {
			t.Errorf("different keys must not conflict")
		}
		_, failures = measure("a bare UPDATE", enough, func(ctx context.Context, tx pgx.Tx, key string) error {
			_, err := tx.Exec(ctx, bareUpdate, key)
			return err
		})
		if failures < enough {
			t.Errorf("a bare UPDATE has almost no conflicts: this test cannot see conflicts")
		}
	})
	for _, rows := range harness.SomeOf(t, 1, 0, 10_000) {
		t.Run(fmt.Sprintf("cold, %d rows", rows), func(t *testing.T) {
			pool := harness.NewPool(t, 16)
			fill(t, pool, rows)
			r := harness.NewRand(t)
			calls := harness.Sized(40_000, 20_000)
			// While the index has few leaves, transactions conflict on them. The i-th commit does about as often as 1 in i,
			// times a factor for the disk's slowness.
			const few = 10_000
			var early atomic.Int64
			var commits, attempts atomic.Int64
			var wg sync.WaitGroup
			for range 16 {
				r := rand.New(rand.NewPCG(r.Uint64(), 0))
				wg.Go(func() {
					for range calls / 16 {
						err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
							attempts.Add(1)
							_, err := limiter.Consume(ctx, tx, limit.Key(fmt.Sprintf("%016x", r.Uint64())))
							return err
						})
						if err != nil {
							t.Error(err)
							return
						}
						if n := commits.Add(1); n == few {
							early.Store(attempts.Load() - n)
						}
					}
				})
			}
			wg.Wait()
			retries := attempts.Load() - commits.Load()
			t.Logf("%d commits, %d retries, %d of them in the first %d", commits.Load(), retries, early.Load(), few)
			if float64(retries-early.Load()) > 0.02*float64(commits.Load()-few) {
				t.Errorf("first uses of different keys conflict")
			}
		})
	}
}

// bareUpdate is the name of a prepared statement. If pgx prepares one by itself, it drops it when it fails.
const bareUpdate = "bareUpdate"

// prepare runs the work on each connection of the pool until its plans are generic (after five executions), made for the
// table as it is now.
func prepare(t *testing.T, pool *pgxpool.Pool, work func(ctx context.Context, tx pgx.Tx, key string) error) {
	t.Helper()
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release() // at the end, so that each loop gets another connection
		_, err = conn.Conn().Prepare(t.Context(), bareUpdate, `UPDATE ratelimit.limits SET value = value - 1 WHERE name = 'own' AND key = $1 AND shard = 0`)
		for range 7 {
			if err == nil {
				err = pgx.BeginTxFunc(t.Context(), conn, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
					return work(t.Context(), tx, "1")
				})
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestLimitsInAnyOrderNeverDeadlock asks for the same limits in different orders, in transactions of every level and
// without one. Some limits are sharded. It is not parallel: it needs the whole machine.
func TestLimitsInAnyOrderNeverDeadlock(t *testing.T) {
	pool := harness.NewPool(t, 32)
	r := harness.NewRand(t)
	var limiter ratelimit.Limiter
	const capacity = 300 // of each; the callers reach it, so that shards are combined and calls denied
	limits := make([]ratelimit.Limit, 6)
	granted := make([]atomic.Int64, len(limits))
	for i := range limits {
		limits[i] = ratelimit.TokenBucket(fmt.Sprintf("limit %d", i), 1e-6, time.Hour, ratelimit.Capacity(capacity), ratelimit.Shards(1+i%3))
	}
	var calls, failures atomic.Int64
	var wg sync.WaitGroup
	until := time.Now().Add(harness.Sized(5*time.Second, 2*time.Second))
	for g := range 32 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for time.Now().Before(until) {
				chosen := r.Perm(len(limits))[:3]
				var requests []ratelimit.Request
				for _, i := range chosen {
					requests = append(requests, limits[i].Key("k"))
				}
				err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: harness.Levels[g%3]}, func(tx pgx.Tx) error {
					_, err := limiter.Consume(t.Context(), tx, requests...)
					return err
				})
				calls.Add(1)
				switch {
				case err == nil:
					for _, i := range chosen {
						granted[i].Add(1)
					}
				case harness.SQLState(err) == "40001" && g%3 != 0:
					failures.Add(1)
				case harness.Denied(err):
					time.Sleep(time.Millisecond)
				default:
					t.Errorf("%s: %v", harness.Levels[g%3], err) // a deadlock is 40P01
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d calls, %d serialization failures above READ COMMITTED", calls.Load(), failures.Load())
	for i, limit := range limits {
		got, remaining := granted[i].Load(), harness.ReadBalance(t, &limiter, pool, limit.Key("k"))
		if diff := float64(capacity-got) - remaining; diff > 1e-5 || diff < -1e-2 { // a little was refilled meanwhile
			t.Errorf("%s: %d granted and %v remaining of %d", limit.Name(), got, remaining, capacity)
		}
	}
}

// TestFirstUsesDoNotDeadlock: calls use limits that have no rows yet. These must be locked in the common order, too.
func TestFirstUsesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	a, b, c := ratelimit.TokenBucket("a", 10, time.Hour), ratelimit.TokenBucket("b", 10, time.Hour), ratelimit.TokenBucket("c", 10, time.Hour)
	var limiter ratelimit.Limiter
	// begin makes a pool, uses c, and begins a transaction that uses a for the first time.
	begin := func(t *testing.T) (*pgxpool.Pool, pgx.Tx) {
		pool := harness.NewPool(t, 8)
		_, err := limiter.Consume(t.Context(), pool, c.Global())
		var tx pgx.Tx
		if err == nil {
			tx, err = pool.Begin(t.Context())
		}
		if err == nil {
			_, err = limiter.Consume(t.Context(), tx, a.Global())
		}
		if err != nil {
			t.Fatal(err)
		}
		return pool, tx
	}
	consume := func(t *testing.T, pool *pgxpool.Pool, requests ...ratelimit.Request) <-chan error {
		done := make(chan error, 1)
		go func() {
			_, err := limiter.Consume(t.Context(), pool, requests...)
			done <- err
		}()
		return done
	}
	t.Run("of two calls", func(t *testing.T) {
		t.Parallel()
		pool, tx := begin(t)
		one := consume(t, pool, a.Global(), b.Global(), c.Global())
		harness.Waiting(t, pool, 1) // for a
		if _, err := limiter.Consume(t.Context(), pool, b.Global()); err != nil {
			t.Fatal(err)
		}
		other := consume(t, pool, b.Global(), c.Global())
		select { // it need not wait for anything
		case err := <-other:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(harness.Patience):
			t.Error("a call waits for locks that another call took out of order")
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-one; err != nil {
			t.Error(err)
		}
	})
	t.Run("of a call and a transaction that goes in order", func(t *testing.T) {
		t.Parallel()
		pool, tx := begin(t)
		one := consume(t, pool, a.Global(), c.Global())
		harness.Waiting(t, pool, 1) // for a
		if _, err := limiter.Consume(t.Context(), tx, c.Global()); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-one; err != nil {
			t.Error(err)
		}
	})
}

// A call that waits for a row has locked none of the later rows, whatever the call and the order of its requests.
func TestWhoWaitsHoldsNothingThatComesLater(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	a, b := ratelimit.TokenBucket("a", 100, time.Hour), ratelimit.TokenBucket("b", 100, time.Hour)
	aShards, bShards := ratelimit.TokenBucket("aShards", 100, time.Hour, ratelimit.Shards(2)), ratelimit.TokenBucket("bShards", 100, time.Hour, ratelimit.Shards(2))
	var limiter ratelimit.Limiter
	picking := func(ctx context.Context, shard int) context.Context {
		return shardpick.With(ctx, func(int) (int, int) { return shard, shard })
	}
	consume := func(requests ...ratelimit.Request) func(ctx context.Context, db ratelimit.DB) error {
		return func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Consume(picking(ctx, 0), db, requests...)
			return err
		}
	}
	last := func(ctx context.Context, db ratelimit.DB) error {
		_, err := limiter.Consume(picking(ctx, 1), db, aShards.Global())
		return err
	}
	type call = func(ctx context.Context, db ratelimit.DB) error
	for name, c := range map[string]struct {
		first, both, later call
	}{
		"several":             {consume(a.Global()), consume(b.Global(), a.Global()), consume(b.Global())},
		"a shard of each":     {consume(aShards.Global()), consume(bShards.Global(), aShards.Global()), consume(bShards.Global())},
		"all shards of each":  {consume(aShards.Global()), consume(bShards.Global().Count(60), aShards.Global().Count(60)), consume(bShards.Global())},
		"all shards of one":   {consume(aShards.Global()), consume(aShards.Global().Count(60)), last},
		"arrays in any order": {consume(a.Global()), backwards, consume(b.Global())},
		"reset": {consume(a.Global()), func(ctx context.Context, db ratelimit.DB) error {
			return limiter.Reset(ctx, db, b.Global(), a.Global())
		}, consume(b.Global())},
		"reset of shards": {consume(aShards.Global()), func(ctx context.Context, db ratelimit.DB) error { return limiter.Reset(ctx, db, aShards.Global()) }, last},
		"refund": {consume(a.Global()), func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Refund(ctx, db, harness.ReceiptOf(time.Now(), b.Global(), a.Global()), b.Global(), a.Global())
			return err
		}, consume(b.Global())},
		"refund of shards": {consume(aShards.Global()), func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Refund(ctx, db, harness.ReceiptOf(time.Now(), aShards.Global()), aShards.Global())
			return err
		}, last},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			for _, used := range []call{c.first, c.later} { // so that all rows exist
				if err := consume(a.Global(), b.Global())(t.Context(), pool); err != nil {
					t.Fatal(err)
				}
				if err := used(t.Context(), pool); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.first(t.Context(), pool); err != nil {
				t.Fatal(err)
			}
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(context.WithoutCancel(t.Context()))
			if err := c.first(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
			answer := make(chan error, 1)
			go func() { answer <- c.both(t.Context(), pool) }()
			harness.Waiting(t, pool, 1)
			ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
			defer cancel()
			if err := c.later(ctx, pool); err != nil {
				t.Errorf("a later row is locked: %v", err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
			if err := <-answer; err != nil {
				t.Error(err)
			}
		})
	}
}

// A refund writes the total of all rows. So it must have locked all of them, including those that were made while it waited
// for earlier ones.
func TestARefundWritesNoRowThatItHasNotLocked(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 5)
	limiter, _ := harness.NewLimiter()
	a, b := ratelimit.TokenBucket("a", 100, time.Hour).Global(), ratelimit.TokenBucket("b", 100, time.Hour).Global()
	begin := func(consume ratelimit.Request) pgx.Tx {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err == nil {
			_, err = limiter.Consume(t.Context(), tx, consume)
		}
		if err != nil {
			t.Fatal(err)
		}
		return tx
	}
	end := func(tx pgx.Tx) {
		t.Helper()
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := limiter.Consume(t.Context(), pool, a, b); err != nil {
		t.Fatal(err)
	}
	anew, holder := begin(a), begin(b)
	if err := limiter.Reset(t.Context(), anew, a); err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), anew, a.Count(5)); err != nil {
		t.Fatal(err)
	}
	refunded := make(chan error)
	go func() {
		_, err := limiter.Refund(t.Context(), pool, harness.ReceiptOf(harness.Noon, a, b), a, b)
		refunded <- err
	}()
	harness.WaitingFor(t, pool, anew)
	end(anew)
	harness.WaitingFor(t, pool, holder) // it is past a: the row that it was to lock is gone
	other := begin(a.Count(3))
	end(holder)
	harness.WaitingFor(t, pool, other)
	end(other)
	if err := <-refunded; err != nil {
		t.Fatal(err)
	}
	if left := harness.ReadBalances(t, limiter, pool, a, b); left[0].Remaining != 93 || left[1].Remaining != 99 {
		t.Errorf("%v and %v are left, want 93 and 99", left[0].Remaining, left[1].Remaining)
	}
}

// backwards asks in an order that the library never uses: the library sorts.
func backwards(ctx context.Context, db ratelimit.DB) error {
	var granted bool
	err := db.QueryRow(ctx, `SELECT granted FROM ratelimit._consume_several('{b,a}', '{"",""}', '{100,100}', '{1 hour,1 hour}', '{100,100}', '{NULL,NULL}', '{1,1}', '{0,0}')`).Scan(&granted)
	if err == nil && !granted {
		err = errors.New("denied")
	}
	return err
}

// A call waits for a row and finds it deleted. It makes a new row as of now. A row as of the start of the wait would at
// once be refilled for all of the wait.
func TestARowMadeAfterAWaitIsNotRefilledForTheWait(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket("bucket", 10, time.Hour)
	other := ratelimit.TokenBucket("other", 10, time.Hour)
	sharded := ratelimit.TokenBucket("sharded", 10, time.Hour, ratelimit.Shards(2))
	for name, requests := range map[string][]ratelimit.Request{ // in a transaction, the function waits, too
		"one":                     {bucket.Global()},
		"several":                 {bucket.Global(), other.Global()},
		"a shard":                 {sharded.Global()},
		"more than one shard has": {sharded.Global().Count(7)},
		"shards and another":      {other.Global(), sharded.Global().Count(7)},
	} {
		for _, inTx := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, in a transaction: %v", name, inTx), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 4)
				var limiter ratelimit.Limiter
				if _, err := limiter.Consume(t.Context(), pool, bucket.Global(), other.Global(), sharded.Global()); err != nil {
					t.Fatal(err)
				}
				tx, err := pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := limiter.Reset(t.Context(), tx, bucket.Global(), other.Global(), sharded.Global()); err != nil {
					t.Fatal(err)
				}
				answer := make(chan error)
				go func() {
					if !inTx {
						answer <- harness.Second(limiter.Consume(t.Context(), pool, requests...))
						return
					}
					answer <- limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						return harness.Second(limiter.Consume(ctx, tx, requests...))
					}, ratelimit.Isolation(pgx.ReadCommitted))
				}()
				harness.Waiting(t, pool, 1)
				var waited time.Time
				if err := tx.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&waited); err != nil {
					t.Fatal(err)
				}
				if err := tx.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := <-answer; err != nil {
					t.Fatal(err)
				}
				var first time.Time
				if err := pool.QueryRow(t.Context(), "SELECT min(ts) FROM ratelimit.limits").Scan(&first); err != nil || first.Before(waited) {
					t.Errorf("a row as of %v, %v, but at %v a call still waited for it", first, err, waited)
				}
			})
		}
	}
}

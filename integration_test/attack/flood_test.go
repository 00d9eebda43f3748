package attack_test

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"hash/fnv"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// fullFlood runs the floods of docs/evidence.md, which take minutes: a million keys, and a hot key denied 100,000 times each
// way.
var fullFlood = flag.Bool("flood", false, "floods of full size")

// floodSize returns the size of a flood in this run.
func floodSize(full int) int {
	if *fullFlood {
		return full
	}
	return full / 20
}

// heap returns the memory that the process uses, after garbage collections (two, to empty each sync.Pool).
func heap() uint64 {
	for range 3 {
		runtime.GC()
	}
	debug.FreeOSMemory()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// grown reports whether the process kept more memory than a flood of n calls may leave: almost nothing for each. A map of
// keys would keep about a hundred bytes for each.
func grown(before, after uint64, n int) bool {
	return after > before+128<<10+min(uint64(n)*16, 2<<20)
}

// floodWays are the ways in which a flood can reach the limiter.
func floodWays(t *testing.T, pool *pgxpool.Pool) map[string]func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
	coalescer := &ratelimit.Coalescer{Pool: pool}
	t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
	return map[string]func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error{
		"pool": func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			_, err := limiter.Consume(ctx, pool, request)
			return err
		},
		"Coalescer": func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			_, err := limiter.Consume(ctx, coalescer, request)
			return err
		},
		"Hot": func(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request) error {
			return limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := limiter.Consume(ctx, tx, request)
				return err
			}, ratelimit.Hot(request), ratelimit.Isolation(pgx.ReadCommitted))
		},
	}
}

// flood makes n calls from a number of callers at once and watches the process. It is for tests that are not parallel,
// since it counts goroutines.
func flood(t *testing.T, callers, n int, call func(ctx context.Context, i int) error) (granted, refused int64) {
	t.Helper()
	var next, grants, denials atomic.Int64
	most := runtime.NumGoroutine()
	before := most
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				switch err := call(t.Context(), int(i)); {
				case err == nil:
					grants.Add(1)
				case harness.Denied(err):
					denials.Add(1)
				default:
					t.Errorf("request %d: %v", i, err)
					return
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		select {
		case <-tick.C:
			most = max(most, runtime.NumGoroutine())
			continue
		case <-done:
			tick.Stop()
		}
		break
	}
	// Besides the callers, there are two goroutines of the Coalescer, and one for each connection that is opened or whose
	// context is watched.
	if most > before+callers+64 {
		t.Errorf("%d goroutines, %d before, for %d callers", most, before, callers)
	}
	return grants.Load(), denials.Load()
}

// One attacker uses a million new keys. Each is a row in the database, and leaves nothing in the process.
func TestAFloodOfKeysLeavesNothingInTheProcess(t *testing.T) {
	harness.Long(t)
	pool := harness.NewPool(t, 8)
	for name, consume := range floodWays(t, pool) {
		t.Run(name, func(t *testing.T) {
			n := floodSize(1_000_000)
			if name != "Coalescer" {
				n /= 10 // each call has its own commit
			}
			var limiter ratelimit.Limiter
			limit := ratelimit.TokenBucket("per address, "+name, 1, 10000*time.Hour)
			window := ratelimit.FixedWindow("window, "+name, 1, 100000*time.Hour)
			call := func(ctx context.Context, i int) error {
				request := limit.Key(strconv.Itoa(i))
				if i%2 == 0 {
					request = window.Key(strconv.Itoa(i))
				}
				return consume(ctx, &limiter, request)
			}
			flood(t, 64, 2000, func(ctx context.Context, i int) error { return call(ctx, -i) }) // opens connections, and fills the caches
			before, begin := heap(), time.Now()
			granted, refused := flood(t, 64, n, call)
			took, after := time.Since(begin), heap()
			t.Logf("%d new keys in %v (%.0f/s): %d granted, heap %d KiB before, %d KiB after", n, took.Round(time.Millisecond), float64(n)/took.Seconds(), granted, before/1024, after/1024)
			if granted != int64(n) || refused != 0 {
				t.Errorf("%d granted, %d denied, of %d keys", granted, refused, n)
			}
			if grown(before, after, n) {
				t.Errorf("the heap grew by %d bytes", after-before)
			}
			if queues := harness.Queued(&limiter); queues != 0 {
				t.Errorf("%d queues are left behind", queues)
			}
			// All calls are denied. The memory for denied keys is bounded, too.
			granted, refused = flood(t, 64, n/4, call)
			if again := heap(); granted != 0 || refused != int64(n/4) || grown(before, again, n) {
				t.Errorf("the second time %d granted, %d denied, and the heap is %d bytes, was %d", granted, refused, again, before)
			}
		})
	}
}

// A key is denied 100,000 times. The table, the write-ahead log and the process stay as they are.
func TestAFloodOfDenialsLeavesNothingAnywhere(t *testing.T) {
	pool := harness.NewPool(t, 8)
	for name, consume := range floodWays(t, pool) {
		t.Run(name, func(t *testing.T) {
			n := floodSize(100_000)
			var limiter ratelimit.Limiter
			request := ratelimit.TokenBucket("hot, "+name, 1, 1000*time.Hour).Key("attacker")
			call := func(ctx context.Context, _ int) error { return consume(ctx, &limiter, request) }
			if granted, _ := flood(t, 64, 2000, call); granted != 1 {
				t.Fatalf("%d granted", granted)
			}
			rows := harness.TableOf(t, pool)
			before, begin := heap(), time.Now()
			granted, refused := flood(t, 64, n, call)
			took, after := time.Since(begin), heap()
			t.Logf("%d denials in %v (%.0f/s), heap %d KiB before, %d KiB after", n, took.Round(time.Millisecond), float64(n)/took.Seconds(), before/1024, after/1024)
			if granted != 0 || refused != int64(n) {
				t.Errorf("%d granted, %d denied, of %d", granted, refused, n)
			}
			if grown(before, after, n) {
				t.Errorf("the heap grew by %d bytes", after-before)
			}
			if now := harness.TableOf(t, pool); now != rows {
				t.Errorf("the rows became\n%s\nthey were\n%s", now, rows)
			}
		})
	}
}

// stripeOf returns the view on which transactions that queue for a limit and key take turns. It is hot.go's; all versions
// use the same.
func stripeOf(name, key string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(name + "\x00" + key))
	return h.Sum32() % 32
}

// colliding returns n keys of a limit that satisfy a predicate. It tries keys until it has them.
func colliding(n int, collides func(key string) bool) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := strconv.Itoa(i); collides(key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// Keys collide on the lock of a hot limit's queue. Its hash is always the same and no secret, so an attacker who can choose
// queued keys can make them collide. These keys take turns with each other and with their target, but with no other key.
// They take no more connections than one key would.
func TestKeysThatCollideInTheHotQueueTakeTurnsAndNoConnections(t *testing.T) {
	const name, victim = "hot", "victim"
	keys := colliding(256, func(key string) bool { return stripeOf(name, key) == stripeOf(name, victim) })
	limit := ratelimit.TokenBucket(name, 1e9, time.Second)
	pool := harness.NewPool(t, 8)
	var limiter ratelimit.Limiter
	consume := floodWays(t, pool)["Hot"]
	var most atomic.Int32
	granted, _ := flood(t, 64, floodSize(20_000), func(ctx context.Context, i int) error {
		for n := pool.Stat().AcquiredConns(); n > most.Load(); {
			most.Store(n)
		}
		return consume(ctx, &limiter, limit.Key(keys[i%len(keys)]))
	})
	t.Logf("%d transactions on %d keys of one stripe held at most %d connections", granted, len(keys), most.Load())
	if granted != int64(floodSize(20_000)) {
		t.Errorf("%d granted", granted)
	}
	if n := most.Load(); n > 2 {
		t.Errorf("keys that collide took %d connections, want 2, as one key does", n)
	}
	if n := harness.Queued(&limiter); n != 0 {
		t.Errorf("%d queues are left behind", n)
	}
}

// Keys whose windows begin together. Without a start, the offset of a fixed window is a hash that is no secret, so such
// keys can be found. The attacker gains nothing: each key has its rate in each window, as if all had the same start.
func TestKeysWhoseWindowsCollideGainNothing(t *testing.T) {
	t.Parallel()
	const name, n, rate = "window", 50, 3
	limit := ratelimit.FixedWindow(name, rate, time.Hour)
	offset := func(key string) time.Duration {
		h := sha256.Sum256([]byte(key))
		return time.Duration(binary.BigEndian.Uint64(h[:])>>1%uint64(time.Hour.Microseconds())) * time.Microsecond
	}
	keys := colliding(n, func(key string) bool { return offset(key) < 2*time.Second })
	limiter, clock := harness.NewLimiter()
	pool := harness.NewPool(t, 4)
	// Counted from year 1, an hour begins at noon. All windows of these keys begin within two seconds after an hour's start.
	for hour := range 3 {
		clock.At = harness.Noon.Add(time.Duration(hour)*time.Hour + 2*time.Second)
		granted := 0
		for range 2 * rate {
			for _, key := range keys {
				result, err := limiter.Consume(t.Context(), pool, limit.Key(key))
				switch {
				case err == nil:
					granted++
				case !harness.Denied(err):
					t.Fatal(err)
				}
				if wait := result.Requests[0].ResetAt.Sub(clock.At); wait < time.Hour-2*time.Second || wait > time.Hour {
					t.Fatalf("key %s has a window that ends in %v: they do not collide", key, wait)
				}
			}
		}
		if granted != n*rate {
			t.Errorf("hour %d: %d granted to %d keys, want %d", hour, granted, n, n*rate)
		}
	}
}

// A process remembers denied keys in 256 places that all keys share. The hash has a secret of the process, so no attacker
// can choose a place. The places only decide which of two statements is tried first. Whatever they contain, a full key is
// granted, and an empty one denied.
func TestKeysThatCollideInWhatIsRememberedOfDenialsDecideNothing(t *testing.T) {
	pool := harness.NewPool(t, 8)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("limit", 1, 1000*time.Hour)
	const n = 2_000 // so many keys for 256 places
	for round, want := range []int64{n, 0, 0} {
		granted, refused := flood(t, 16, n, func(ctx context.Context, i int) error {
			_, err := limiter.Consume(ctx, pool, limit.Key(strconv.Itoa(i)))
			return err
		})
		if granted != want || refused != n-want {
			t.Errorf("round %d: %d granted, %d denied", round, granted, refused)
		}
	}
	// All keys are remembered as denied, but are full again.
	if _, err := pool.Exec(t.Context(), "DELETE FROM ratelimit.limits"); err != nil {
		t.Fatal(err)
	}
	if granted, _ := flood(t, 16, n, func(ctx context.Context, i int) error {
		_, err := limiter.Consume(ctx, pool, limit.Key(strconv.Itoa(i)))
		return err
	}); granted != n {
		t.Errorf("%d granted after they were made full", granted)
	}
}

// The shard that a call looks at first is random, not a hash of the key. Over many keys, all shards are used alike, so no
// attacker can choose keys or calls that use only one.
func TestNobodyCanChooseAShard(t *testing.T) {
	pool := harness.NewPool(t, 4)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("wide", 1e6, 1000*time.Hour, ratelimit.Shards(4))
	const n = 2_000
	flood(t, 8, n, func(ctx context.Context, _ int) error {
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, limit.Key("one key, the same each time"))
			return err
		})
	})
	var least, most float64
	if err := pool.QueryRow(t.Context(), "SELECT min(250000 - value), max(250000 - value) FROM ratelimit.limits").Scan(&least, &most); err != nil {
		t.Fatal(err)
	}
	if least < 0.8*n/4 || most > 1.2*n/4 {
		t.Errorf("of %d tokens the shards gave between %v and %v", n, least, most)
	}
}

package plproxy_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

// newOwn starts a cluster for one test.
func newOwn(t *testing.T, partitions int) *cluster {
	t.Helper()
	c, err := newCluster(t.Context(), partitions)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.close)
	return c
}

// Neither limit refills in the time of a test: so tokens that are missing were taken, and nothing else.
const never = 100_000 * time.Hour

var (
	tight = ratelimit.TokenBucket("tight", tightCapacity, never) // whose grants reach the bound
	wide  = ratelimit.TokenBucket("wide", 1, never, ratelimit.Capacity(wideCapacity))
)

const (
	tightCapacity = 25
	wideCapacity  = 1e6
)

// load is calls for many keys, on the pool and on a Coalescer.
type load struct {
	keys   []*ledger
	ok     atomic.Int64 // calls that were decided
	failed atomic.Int64
	stop   chan struct{}
	all    sync.WaitGroup
	db     *pgxpool.Pool
}

// ledger is what was said about a key.
type ledger struct {
	key                       string
	server                    atomic.Int64
	tight, wide               atomic.Int64 // acknowledged grants
	tightUnknown, wideUnknown atomic.Int64
}

func newLoad(t *testing.T, c *cluster, keys int) *load {
	t.Helper()
	l := &load{db: pool(t, c.proxy.URL(), 24), stop: make(chan struct{})}
	for i := range keys {
		k := &ledger{key: fmt.Sprint("key ", i)}
		_, server := slotOf(t, l.db, k.key)
		k.server.Store(int64(server))
		l.keys = append(l.keys, k)
	}
	return l
}

// run starts the callers. check gets each call's key, when it began, and its error, if it is neither nil nor a denial.
func (l *load) run(t *testing.T, check func(k *ledger, began time.Time, coalesced bool, err error)) {
	coalescer := &ratelimit.Coalescer{Pool: l.db}
	limiter := &ratelimit.Limiter{}
	for i := range 16 {
		l.all.Go(func() {
			for {
				select {
				case <-l.stop:
					return
				default:
				}
				k := l.keys[rand.IntN(len(l.keys))]
				limit, grants, unknown := wide, &k.wide, &k.wideUnknown
				if rand.IntN(3) == 0 {
					limit, grants, unknown = tight, &k.tight, &k.tightUnknown
				}
				var db ratelimit.DB = l.db
				if i%2 == 0 {
					db = coalescer
				}
				began := time.Now()
				_, err := limiter.Consume(context.WithoutCancel(t.Context()), db, limit.Key(k.key))
				switch {
				case err == nil:
					grants.Add(1)
					l.ok.Add(1)
					continue
				case errors.Is(err, ratelimit.ErrDenied):
					l.ok.Add(1)
					continue
				case errors.Is(err, ratelimit.ErrUnknownOutcome):
					unknown.Add(1)
				}
				l.failed.Add(1)
				check(k, began, i%2 == 0, err)
			}
		})
	}
	t.Cleanup(coalescer.Close)
	t.Cleanup(l.end)
}

func (l *load) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.all.Wait()
}

// settle compares what was said with the rows that are left.
func (l *load) settle(t *testing.T) {
	t.Helper()
	limiter := &ratelimit.Limiter{}
	var acknowledged, gone, unknown int64
	for _, k := range l.keys {
		for _, test := range []struct {
			limit           ratelimit.Limit
			capacity        float64
			grants, unknown int64
		}{{tight, tightCapacity, k.tight.Load(), k.tightUnknown.Load()}, {wide, wideCapacity, k.wide.Load(), k.wideUnknown.Load()}} {
			taken := int64(balance(t, limiter, l.db, test.limit.Key(k.key)).Used + 0.999) // the refill is far less than one token
			if float64(test.grants) > test.capacity {
				t.Errorf("%s, %s: %d granted of %v", test.limit.Name(), k.key, test.grants, test.capacity)
			}
			if taken < test.grants || taken > test.grants+test.unknown {
				t.Errorf("%s, %s: %d granted and %d with an unknown outcome, but %d tokens are gone", test.limit.Name(), k.key, test.grants, test.unknown, taken)
			}
			acknowledged += test.grants
			unknown += test.unknown
			gone += taken
		}
	}
	t.Logf("%d decided, %d errors; %d granted and %d with an unknown outcome, %d tokens gone", l.ok.Load(), l.failed.Load(), acknowledged, unknown, gone)
	if acknowledged == 0 {
		t.Error("nothing was granted")
	}
}

// wait waits until more calls are decided.
func (l *load) wait(t *testing.T, calls int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for until := l.ok.Load() + calls; l.ok.Load() < until; {
		select {
		case <-ctx.Done():
			t.Fatalf("only %d calls were decided in a minute, %d failed", l.ok.Load(), l.failed.Load())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestAPartitionIsKilled kills a partition under load, three times. Its keys fail closed, the others go on.
func TestAPartitionIsKilled(t *testing.T) {
	c := newOwn(t, 3)
	l := newLoad(t, c, 60)
	const victim = 1
	var mu sync.Mutex
	var killing, killed time.Time // zero while the server runs
	kills := 0
	errs := map[string]int{}
	l.run(t, func(k *ledger, began time.Time, coalesced bool, err error) {
		mu.Lock()
		defer mu.Unlock()
		if !errors.Is(err, ratelimit.ErrUnknownOutcome) {
			t.Errorf("%s: %v, want an unknown outcome", k.key, err)
		}
		switch {
		case k.server.Load() == victim:
			if kills == 0 { // later, a connection of the proxy may find out that its server was killed
				t.Errorf("a key of the victim, before it is killed: %v", err)
			}
		case !coalesced || killing.IsZero() || !killed.IsZero() && began.After(killed):
			// Only a call that shared a statement at the moment of the kill may fail.
			t.Errorf("a key of another server (coalesced %v): %v", coalesced, err)
		}
		errs[fmt.Sprint("victim ", k.server.Load() == victim, " coalesced ", coalesced)]++
	})
	for range 3 {
		l.wait(t, 300)
		mu.Lock()
		killing = time.Now()
		kills++
		mu.Unlock()
		c.partitions[victim].Kill()
		mu.Lock()
		killed = time.Now()
		before := errs["victim true coalesced false"]
		mu.Unlock()
		l.wait(t, 500) // of the others
		mu.Lock()
		if errs["victim true coalesced false"] == before {
			t.Error("no call failed for a key of the killed server")
		}
		mu.Unlock()
		if err := c.partitions[victim].Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		recovered(t, l, victim)
		mu.Lock()
		killing, killed = time.Time{}, time.Time{}
		mu.Unlock()
	}
	l.wait(t, 300)
	l.end()
	t.Log(errs)
	l.settle(t)
}

// recovered waits until calls for all keys of a server are decided again.
func recovered(t *testing.T, l *load, server int) {
	t.Helper()
	limiter := &ratelimit.Limiter{}
	for _, k := range l.keys {
		if k.server.Load() != int64(server) {
			continue
		}
		for {
			if _, err := limiter.Check(t.Context(), l.db, wide.Key(k.key)); err == nil {
				break
			} else if t.Context().Err() != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestAPartitionIsAdded moves slots to a fourth server under load.
func TestAPartitionIsAdded(t *testing.T) {
	c := newOwn(t, 3)
	l := newLoad(t, c, 200)
	var refusals, others atomic.Int64
	var moving atomic.Bool
	l.run(t, func(k *ledger, _ time.Time, coalesced bool, err error) {
		switch {
		case state(err) == "RL004" && moving.Load():
			refusals.Add(1)
		case coalesced && errors.Is(err, ratelimit.ErrUnknownOutcome) && moving.Load():
			others.Add(1) // it shared a statement with a key that moved
		default:
			t.Errorf("%s: %v", k.key, err)
		}
	})
	l.wait(t, 500)
	moving.Store(true)
	if err := c.add(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	l.wait(t, 200)
	move := func(first int) error {
		var slots []int
		for slot := first; slot < 256; slot += 16 {
			slots = append(slots, slot)
		}
		return execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots($1, 3)", slots)
	}
	if err := move(0); err != nil {
		t.Fatal(err)
	}
	l.wait(t, 200)

	// The target fails on the way. The keys are refused until the move is repeated.
	if err := execSQL(t.Context(), c.partitions[3].URL(), `
		CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
		CREATE TRIGGER fail BEFORE INSERT ON rate_limit_slots EXECUTE FUNCTION fail()`); err != nil {
		t.Fatal(err)
	}
	if err := move(5); err == nil {
		t.Error("a move to a server that fails succeeded")
	}
	if err := execSQL(t.Context(), c.partitions[3].URL(), "DROP FUNCTION fail CASCADE"); err != nil {
		t.Fatal(err)
	}
	for i := 0; ; i++ {
		key := fmt.Sprint("new ", i)
		if slot, server := slotOf(t, l.db, key); server == -1 {
			if slot%16 != 5 {
				t.Errorf("slot %d does not move", slot)
			}
			if _, err := (&ratelimit.Limiter{}).Consume(t.Context(), l.db, tight.Key(key)); state(err) != "RL004" {
				t.Errorf("a first use in a slot that moves: %v, want RL004", err)
			}
			break
		} else if i == 10_000 {
			t.Fatal("no slot is moving")
		}
	}
	l.wait(t, 200)
	for _, first := range []int{5, 10, 15} {
		if err := move(first); err != nil {
			t.Fatal(err)
		}
		l.wait(t, 200)
	}
	// And one back, whose rows the source has once had.
	if err := execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots(ARRAY[0, 16], 0)"); err != nil {
		t.Fatal(err)
	}
	l.wait(t, 500)
	l.end()
	t.Logf("%d calls refused, %d that shared a statement failed", refusals.Load(), others.Load())

	owners := map[int]int{}
	rows, err := l.db.Query(t.Context(), "SELECT server, count(*) FROM rate_limit_slots GROUP BY 1")
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var server, n int
		if err := rows.Scan(&server, &n); err != nil {
			t.Fatal(err)
		}
		owners[server] = n
	}
	if owners[3] != 62 || owners[-1] != 0 {
		t.Errorf("slots by server: %v, want 62 on server 3", owners)
	}
	for i, p := range c.partitions {
		if strays, left := strays(t, p); strays > 0 || left > 0 {
			t.Errorf("partition %d has %d rows of other slots, and %d that it has not forgotten", i, strays, left)
		}
	}
	l.settle(t)
}

func strays(t *testing.T, p *postgres.Breakable) (strays, left int) {
	t.Helper()
	if err := pool(t, p.URL(), 1).QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM rate_limits WHERE _plproxy_slot(key) NOT IN (SELECT slot FROM rate_limit_slots)),
		       (SELECT count(*) FROM rate_limits_left)`).Scan(&strays, &left); err != nil {
		t.Fatal(err)
	}
	return strays, left
}

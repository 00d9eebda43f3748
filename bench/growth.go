package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/txlimit/txlimit/internal/postgres/procstat"
	"github.com/txlimit/txlimit/ratelimit"
)

// growth is how long and how much `go run ./bench growth` measures. A test measures less.
type growth struct {
	slice, warmup time.Duration
	rounds        int
	keys          int      // with a row, of the ways that use many keys
	rows          int      // whose size is measured, and then their sweep
	calls         int      // right after a checkpoint
	only          []string // the names of the ways to measure; nil: all
}

var wholeGrowth = growth{slice: 2 * time.Second, warmup: time.Second, rounds: 3, keys: 100_000, rows: 300_000, calls: 2000}

// growthWay is one way to decide, of which the cost is measured.
type growthWay struct {
	name  string
	redis bool
	pace  int // calls per second, of all goroutines; 0: as many as possible
	side  *side
	spent spent
	total tally
}

// printGrowth prints the tables, and writes them into the page, if there is one.
func printGrowth(ctx context.Context, out io.Writer, g growth, page []string) (err error) {
	e := &env{out: out}
	defer func() { err = errors.Join(err, e.close()) }()
	var b strings.Builder
	if err := measureGrowth(ctx, e, g, &b); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%s%s%s", growthBegin, b.String(), growthEnd)
	for _, name := range page {
		if err := growthPage(name, b.String()); err != nil {
			return err
		}
	}
	return nil
}

// measureGrowth measures all ways in turn, then sizes and sweeps, and writes the tables.
func measureGrowth(ctx context.Context, e *env, g growth, out io.Writer) error {
	ways, admin, err := openGrowth(ctx, e, g)
	if err != nil {
		return err
	}
	servers, err := findServers(ctx, e, admin)
	if err != nil {
		return err
	}
	for _, w := range ways {
		if _, err := w.side.run(ctx, g.warmup); err != nil {
			return err
		}
	}
	for round := range g.rounds {
		for _, w := range ways {
			before, err := servers.read(ctx, admin, w.redis)
			if err != nil {
				return err
			}
			t, err := w.side.run(ctx, g.slice)
			if err != nil {
				return err
			}
			after, err := servers.read(ctx, admin, w.redis)
			if err != nil {
				return err
			}
			w.total.add(t)
			w.spent.add(before, after)
			fmt.Fprintf(e.out, "  round %d of %d: %-52s %9s per s\n", round+1, g.rounds, w.name, thousands(t.perSecond()))
		}
	}
	about, err := e.about(ctx)
	if err != nil {
		return err
	}
	// The sizes come last, since their servers work on after them: Postgres cleans up.
	if err := e.undo(ctx); err != nil {
		return err
	}
	var sizes []size
	for _, s := range keyShapes {
		measured, err := e.measureSize(ctx, g, s)
		if err != nil {
			return err
		}
		sizes = append(sizes, measured)
	}
	inRedis, err := e.redisBytesPerKey(ctx, g)
	if err != nil {
		return err
	}
	writeGrowth(out, g, about, ways, sizes, inRedis)
	return nil
}

// openGrowth opens the ways, each on a database or a prefix of its own, and a pool to ask the server.
func openGrowth(ctx context.Context, e *env, g growth) ([]*growthWay, *pgxpool.Pool, error) {
	admin, err := e.newPool(ctx, 1, nil)
	if err != nil {
		return nil, nil, err
	}
	var ways []*growthWay
	add := func(w growthWay, s *side) {
		w.side = s
		if w.pace > 0 {
			s.call = paced(w.pace, s.goroutines, s.call)
		}
		ways = append(ways, &w)
	}
	const many = "many keys"
	picks := map[string]func(worker int) string{many: anyKey(g.keys), "one key": hotKey}
	// decide opens a way to decide outside a transaction.
	decide := func(by, keys string, goroutines, pace int, open func(ctx context.Context, e *env, o setting) (*opened, error)) error {
		if !g.measures(by + ", " + keys) {
			return nil
		}
		it, err := open(ctx, e, plenty(goroutines))
		if err != nil {
			return err
		}
		pick := picks[keys]
		if pick == nil { // ever new ones
			var next atomic.Uint32
			pick = func(int) string { return addressKey(next.Add(1)) }
		} else if keys == many {
			if err := takeEach(ctx, it, g.keys); err != nil {
				return err
			}
		}
		s := it.side(by+", "+keys, goroutines, pick)
		add(growthWay{name: s.name, redis: strings.HasPrefix(by, "Redis"), pace: pace}, s)
		return nil
	}
	// transact adds a way that is a caller's transaction.
	transact := func(name string, goroutines int, call func(ctx context.Context, worker int) error) {
		add(growthWay{name: name}, &side{name: name, goroutines: goroutines, call: call})
	}

	pick := ownKeys(g.keys)
	for _, tx := range []struct {
		name string
		kind txKind
	}{{txWithout, noLimit}, {txWith, byConsume}} {
		if !g.measures(tx.name) {
			continue
		}
		orders, err := openOrders(ctx, e, tx.kind, pgx.ReadCommitted, g.keys, pick)
		if err != nil {
			return nil, nil, err
		}
		transact(tx.name, txGoroutines, orders.call)
	}
	for _, tx := range []struct {
		name   string
		shards int
	}{{"SERIALIZABLE transaction, `Hot`, one key", 1}, {"the same with 10 shards", 10}} {
		if !g.measures(tx.name) {
			continue
		}
		_, h, err := openHot(ctx, e, "", queueConns, true, tx.shards)
		if err != nil {
			return nil, nil, err
		}
		transact(tx.name, hotGoroutines, h.call)
	}
	const pool, coalesced, goRedis, rueidis = "pool", "`Coalescer`", "Redis, go-redis", "Redis, rueidis"
	for _, w := range []struct {
		by, keys         string
		goroutines, pace int
		open             func(ctx context.Context, e *env, o setting) (*opened, error)
	}{
		{pool, many, 64, 0, openDirect},
		{pool, "one key", 64, 0, openDirect},
		{coalesced, many, 64, 0, openCoalesced},
		{coalesced, many, 256, 0, openCoalesced},
		{coalesced, "one key", 64, 0, openCoalesced},
		{coalesced, "one key", 256, 0, openCoalesced},
		{goRedis, many, 64, 0, openGoRedis},
		{goRedis, many, 256, 0, openGoRedis},
		{rueidis, many, 64, 0, openRueidis},
		{rueidis, many, 256, 0, openRueidis},
		{rueidis, "one key", 256, 0, openRueidis},
		{pool, "new keys", 64, 0, openDirect},
		{coalesced, "new keys", 256, 0, openCoalesced},
		{rueidis, "new keys", 256, 0, openRueidis},
		{pool, many, 64, 2000, openDirect},
		{coalesced, many, 64, 2000, openCoalesced},
		{goRedis, many, 64, 2000, openGoRedis},
		{rueidis, many, 64, 2000, openRueidis},
		{coalesced, many, 256, 60_000, openCoalesced},
		{goRedis, many, 256, 60_000, openGoRedis},
		{rueidis, many, 256, 60_000, openRueidis},
	} {
		if err := decide(w.by, w.keys, w.goroutines, w.pace, w.open); err != nil {
			return nil, nil, err
		}
	}
	if g.measures(deniedName) {
		denials, err := openDenials(ctx, e)
		if err != nil {
			return nil, nil, err
		}
		add(growthWay{name: denials.name}, denials)
	}
	return ways, admin, nil
}

func (g growth) measures(name string) bool { return g.only == nil || slices.Contains(g.only, name) }

// noLimit is the caller's transaction without a limit.
var noLimit = txKind{"no limit", "ratelimit.limits", func(context.Context, pgx.Tx, string) error { return nil }}

const (
	txWithout = "READ COMMITTED transaction, an INSERT, no limit"
	txWith    = "the same with `Consume`, many keys"

	deniedName = "pool, one key, denied"
)

// openDenials opens calls of a key that is empty.
func openDenials(ctx context.Context, e *env) (*side, error) {
	const goroutines = 64
	pool, err := e.newPool(ctx, plenty(goroutines).conns, nil)
	if err != nil {
		return nil, err
	}
	limit := ratelimit.TokenBucket("empty", 1, 1000*time.Hour)
	if _, err := limits.Consume(ctx, pool, limit.Key("hot")); err != nil {
		return nil, err
	}
	return &side{name: deniedName, goroutines: goroutines, call: func(ctx context.Context, _ int) error {
		_, err := limits.Consume(ctx, pool, limit.Key("hot"))
		if err == nil {
			return errors.New("granted, although there are no tokens")
		}
		if errors.Is(err, ratelimit.ErrDenied) {
			return nil
		}
		return err
	}}, nil
}

// paced makes calls at a rate, which all goroutines share. A goroutine that is late does not wait. One that is later than a second
// begins anew: another way has run meanwhile.
func paced(perSecond, goroutines int, call func(ctx context.Context, worker int) error) func(ctx context.Context, worker int) error {
	every := time.Second * time.Duration(goroutines) / time.Duration(perSecond)
	next := make([]time.Time, goroutines)
	return func(ctx context.Context, worker int) error {
		now := time.Now()
		if now.Sub(next[worker]) > time.Second {
			next[worker] = now.Add(rand.N(every))
		}
		time.Sleep(next[worker].Sub(now))
		next[worker] = next[worker].Add(every)
		return call(ctx, worker)
	}
}

// addressKey is the i-th of 2^32 different addresses, which come in no order.
func addressKey(i uint32) string {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], i*2654435761) // an odd factor: each i has another product
	return netip.AddrFrom4(b).String()
}

// spent is what a way has cost.
type spent struct {
	server, client time.Duration // of processors
	wal            float64       // bytes
}

func (s *spent) add(before, after spent) {
	s.server += after.server - before.server
	s.client += after.client - before.client
	s.wal += after.wal - before.wal
}

// serverProcesses are the servers' processes on this machine.
type serverProcesses struct{ postmaster, redis int }

// findPostmaster finds the first process of the server.
func findPostmaster(ctx context.Context, admin *pgxpool.Pool) (pid int, err error) {
	var backend int
	if err := admin.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&backend); err != nil {
		return 0, err
	}
	p, err := procstat.Read(backend)
	if err != nil || p.Name != "postgres" {
		return 0, fmt.Errorf("the processes of Postgres are not to be seen: this needs Linux, and a Postgres on this machine, outside a container (%q, %w)", p.Name, err)
	}
	return p.Parent, nil
}

// findServers finds the servers' processes.
func findServers(ctx context.Context, e *env, admin *pgxpool.Pool) (s serverProcesses, err error) {
	if s.postmaster, err = findPostmaster(ctx, admin); err != nil {
		return s, err
	}
	client := redis.NewClient(&redis.Options{Addr: e.redis.addr})
	defer func() { _ = client.Close() }()
	info, err := client.InfoMap(ctx, "server").Result()
	if err != nil {
		return s, err
	}
	s.redis, err = strconv.Atoi(info["Server"]["process_id"])
	return s, err
}

// read reads what has been spent until now by this process and by one of the servers, all of whose processes count.
func (s serverProcesses) read(ctx context.Context, admin *pgxpool.Pool, redis bool) (now spent, err error) {
	server := s.redis
	if !redis {
		server = s.postmaster
		if now.wal, err = readWAL(ctx, admin); err != nil {
			return now, err
		}
	}
	if now.server, err = procstat.Family(server); err != nil {
		return now, err
	}
	self, err := procstat.Read(os.Getpid())
	now.client = self.CPU
	return now, err
}

// readWAL reads how many bytes have been written to the write-ahead log.
func readWAL(ctx context.Context, pool *pgxpool.Pool) (bytes float64, err error) {
	err = pool.QueryRow(ctx, "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8").Scan(&bytes)
	return bytes, err
}

package plproxy_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/procstat"
	"github.com/txlimit/txlimit/ratelimit"
)

var throughput = flag.Duration("throughput", 0, "measure for so long each: a plain server, and 1, 2 and 3 partitions; best on a quiet machine")

// TestThroughput prints what a call costs in processor time, all servers and the client added up. All of them share this machine, so it is
// the cost that counts, and not how many calls there are in a second.
func TestThroughput(t *testing.T) {
	if *throughput == 0 {
		t.Skip("it needs the flag -throughput 5s")
	}
	var table strings.Builder
	fmt.Fprintln(&table, "| calls | servers | calls/s | calls per processor second | µs of a call | proxy | partitions or server | client |\n|---|---|---|---|---|---|---|---|")
	for _, partitions := range []int{0, 1, 2, 3} {
		c := newOwn(t, max(partitions, 1))
		url, what, data := c.proxy.URL(), fmt.Sprint("proxy and ", partitions), c.partitions
		if partitions == 0 {
			url, what, data = plainURL(c.proxy), "one plain server", []*postgres.Breakable{c.proxy}
		}
		db := pool(t, url, 16)
		coalescer := &ratelimit.Coalescer{Pool: db}
		t.Cleanup(coalescer.Close)
		for _, mode := range []struct {
			name    string
			db      ratelimit.DB
			callers int
		}{{"pool, 16 callers", db, 16}, {"Coalescer, 256 callers", coalescer, 256}} {
			measure(t, db, mode.db, mode.callers, 2*time.Second) // makes connections, plans and rows
			client, proxy, servers := cpu(t), used(t, c.proxy), used(t, data...)
			calls, took := measure(t, db, mode.db, mode.callers, *throughput)
			client, proxy, servers = cpu(t)-client, used(t, c.proxy)-proxy, used(t, data...)-servers
			if partitions == 0 {
				proxy = 0
			}
			each := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(calls) }
			all := client + proxy + servers
			fmt.Fprintf(&table, "| %s | %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", mode.name, what,
				float64(calls)/took.Seconds(), float64(calls)/all.Seconds(), each(all), each(proxy), each(servers), each(client))
		}
		c.close()
	}
	fmt.Print("\n", &table, "\n")
}

const measuredKeys = 10_000

func measure(t *testing.T, pool *pgxpool.Pool, db ratelimit.DB, callers int, d time.Duration) (calls int64, took time.Duration) {
	if _, err := pool.Exec(t.Context(), "SELECT 1"); err != nil {
		t.Fatal(err)
	}
	limit := ratelimit.TokenBucket("throughput", 1e6, time.Second)
	limiter := &ratelimit.Limiter{}
	var n atomic.Int64
	var all sync.WaitGroup
	began := time.Now()
	for range callers {
		all.Go(func() {
			for time.Since(began) < d {
				if _, err := limiter.Consume(t.Context(), db, limit.Key(fmt.Sprint("key ", rand.IntN(measuredKeys)))); err != nil && !errors.Is(err, ratelimit.ErrDenied) {
					t.Error(err)
					return
				}
				n.Add(1)
			}
		})
	}
	all.Wait()
	return n.Load(), time.Since(began)
}

// cpu is the processor time of this process.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	p, err := procstat.Read(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return p.CPU
}

// used is the processor time of servers.
func used(t *testing.T, servers ...*postgres.Breakable) (sum time.Duration) {
	t.Helper()
	for _, s := range servers {
		server, err := procstat.Family(s.PIDs()[0])
		if err != nil {
			t.Fatal(err)
		}
		sum += server
	}
	return sum
}

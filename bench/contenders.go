package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// contender is one way to limit rates.
type contender struct {
	name  string
	what  string
	exact bool // it must not grant more than the bound; a test checks it
	redis bool // it needs a Redis; otherwise it needs a Postgres
	floor bool // it decides nothing: it shows what the others would cost if a decision cost nothing
	chart bool // it is in the charts
	open  func(ctx context.Context, e *env, o setting) (*opened, error)
}

// contenders are all contenders, in the order in which they are printed.
var contenders = []contender{
	{name: "txlimit, direct", what: "`Consume` on the pool", exact: true, chart: true, open: openDirect},
	{name: "txlimit, in a transaction", what: "`InTx`, READ COMMITTED: BEGIN, `Consume`, COMMIT", exact: true, open: openInTx},
	{name: "txlimit, queued", what: "`InTx` with `Hot`, SERIALIZABLE", exact: true, open: openQueued},
	{name: "txlimit, batched", what: "`QueueConsume` and `SendTx`, READ COMMITTED: one round trip", exact: true, open: openBatched},
	{name: "txlimit, coalesced", what: "`Consume` on a `Coalescer`", exact: true, chart: true, open: openCoalesced},
	{name: "txlimit, coalesced, async", what: "the same with `AsyncCommit`", exact: true, open: openCoalescedAsync},
	{name: "Redis, EVALSHA, go-redis", what: "the usual token-bucket script", exact: true, redis: true, chart: true, open: openGoRedis},
	{name: "Redis, EVALSHA, rueidis", what: "the same script, pipelined by itself", exact: true, redis: true, chart: true, open: openRueidis},
	{name: "Redis, redis_rate", what: "go-redis/redis_rate, GCRA", exact: true, redis: true, chart: true, open: openRedisRate},
	{name: "Postgres, SERIALIZABLE", what: "read, compute, write; again on 40001", exact: true, chart: true, open: openSerializable},
	{name: "Postgres, FOR UPDATE", what: "SELECT FOR UPDATE, compute, UPDATE, as Bucket4j does", exact: true, chart: true, open: openForUpdate},
	{name: "Postgres, advisory lock", what: "`pg_advisory_xact_lock`, read, compute, write", exact: true, chart: true, open: openAdvisory},
	{name: "Postgres, counter upsert", what: "one counter for each window, INSERT ON CONFLICT; twice the limit fits around a boundary", chart: true, open: openCounter},
	{name: "Postgres, throttled", what: "throttled/v2, GCRA, on a Postgres store (compare and swap) written here", exact: true, open: openThrottled},
	{name: "Postgres, bare UPDATE", what: "`value = value - 1`, decides nothing: the floor", floor: true, chart: true, open: openUpdate},
}

// ours reports whether the contender is this library.
func (c contender) ours() bool { return strings.HasPrefix(c.name, "txlimit") }

// setting is what a contender is opened with.
type setting struct {
	perSecond, burst int
	conns            int             // of Postgres
	goroutines       int             // the number of goroutines that will call it
	tracer           pgx.QueryTracer // nil unless statements are counted
}

// plenty is a limit that never denies. It takes a quarter of an hour to fill, so that no key expires in Redis during a run.
func plenty(goroutines int) setting {
	return setting{perSecond: 1e6, burst: 1e9, conns: 16, goroutines: goroutines}
}

// opened is a contender that is ready. env.undo closes it.
type opened struct {
	take    func(ctx context.Context, key string) (granted bool, err error)
	retries atomic.Int64 // transactions or attempts that ran again
}

// errDenied is the error of a side that was denied although the limit has tokens.
var errDenied = errors.New("denied, although there are tokens")

// side returns a side of a comparison that makes the contender's calls.
func (o *opened) side(name string, goroutines int, pick func(worker int) string) *side {
	return &side{name: name, goroutines: goroutines, call: func(ctx context.Context, worker int) error {
		granted, err := o.take(ctx, pick(worker))
		if err == nil && !granted {
			err = errDenied
		}
		return err
	}}
}

// The over-grant test: grantGoroutines goroutines ask for one token of one key, again and again.
const (
	grantRate       = 10 // per second
	grantBurst      = 10
	grantGoroutines = 64
)

// grants is the result of the over-grant test.
type grants struct{ granted, bound int }

// excess is the number of grants beyond the bound.
func (g grants) excess() int { return max(0, g.granted-g.bound) }

func (g grants) String() string { return fmt.Sprintf("%d of %d", g.granted, g.bound) }

// countGrants lets the goroutines take from one key as fast as they can. The bound is the burst plus the refill from before the
// first call until after the last grant.
func countGrants(ctx context.Context, d time.Duration, goroutines int, take func(ctx context.Context) (bool, error)) (grants, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex
	var g grants
	begin := time.Now()
	last := begin
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for time.Since(begin) < d {
				granted, err := take(ctx)
				if err != nil {
					cancel(err)
					return
				}
				if granted {
					mu.Lock()
					g.granted++
					last = time.Now()
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	g.bound = grantBurst + int(last.Sub(begin)*grantRate/time.Second)
	return g, context.Cause(ctx)
}

// statements counts SQL statements, BEGIN and COMMIT among them.
type statements struct{ n atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.n.Add(1)
	return ctx
}
func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	s.n.Add(int64(data.Batch.Len()))
	return ctx
}
func (s *statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (s *statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

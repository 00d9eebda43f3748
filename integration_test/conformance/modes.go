package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/ratelimit"
)

// modes are pgx's query modes, first the usual one. A server may take the same statement otherwise in each: with a plan of its own, prepared, or as text.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// statements are those of the library, as sqlc names them.
var statements = []string{
	dbsqlc.Apply, dbsqlc.ApplyOne, dbsqlc.Block, dbsqlc.Coalesce, dbsqlc.Consume, dbsqlc.ConsumeKeys, dbsqlc.ConsumeSeveral, dbsqlc.ConsumeSharded, dbsqlc.Database,
	dbsqlc.Each, dbsqlc.Extend, dbsqlc.Hold, dbsqlc.MaySweep, dbsqlc.Move, dbsqlc.Override, dbsqlc.Overrides, dbsqlc.Pause, dbsqlc.Publish, dbsqlc.RecordUsage, dbsqlc.Refund, dbsqlc.RefundOne,
	dbsqlc.Reset, dbsqlc.Restore, dbsqlc.Resume, dbsqlc.Settle, dbsqlc.Sweep, dbsqlc.SweepHolds, dbsqlc.SweepTurn, dbsqlc.Unblock, dbsqlc.UpdateBucket, dbsqlc.UpdateCalendar, dbsqlc.UpdateHold, dbsqlc.UpdateSettle, dbsqlc.UpdateWindow,
}

// plain are those that the library sends only where answers come in binary, not in the modes exec and simple_protocol, and to one server.
var plain = []string{dbsqlc.UpdateBucket, dbsqlc.UpdateCalendar, dbsqlc.UpdateHold, dbsqlc.UpdateSettle, dbsqlc.UpdateWindow}

var sqlcName = regexp.MustCompile(`-- name: (\w+) :`)

// statementName is the name of a statement of the library; empty: it is not one.
func statementName(sql string) string {
	if match := sqlcName.FindStringSubmatch(sql); match != nil {
		return match[1]
	}
	return ""
}

// sent notes which statements of the library were sent in which mode. The zero value is ready.
type sent struct {
	mu    sync.Mutex
	modes map[string][]pgx.QueryExecMode
}

func (s *sent) note(mode pgx.QueryExecMode, sql string) {
	name := statementName(sql)
	if name == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.modes == nil {
		s.modes = map[string][]pgx.QueryExecMode{}
	}
	if !slices.Contains(s.modes[name], mode) {
		s.modes[name] = append(s.modes[name], mode)
	}
}

func (s *sent) has(mode pgx.QueryExecMode, sql string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.modes[statementName(sql)], mode)
}

// conclude is the case that each statement was sent in each mode, by the other cases. The mode of the URL stands for the first.
func (s *sent) conclude(ofURL pgx.QueryExecMode, oneServer bool) result {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := result{Name: "Query modes: each statement of the library was sent in each"}
	for _, mode := range append([]pgx.QueryExecMode{ofURL}, modes[1:]...) {
		var missing []string
		for _, sql := range statements {
			wanted := !slices.Contains(plain, sql) || oneServer && mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol
			if name := statementName(sql); slices.Contains(s.modes[name], mode) != wanted {
				missing = append(missing, name)
			}
		}
		o := outcome{Verdict: works, Note: fmt.Sprintf("%d statements", len(statements))}
		if len(missing) > 0 {
			o = outcome{Verdict: wrong, Step: "what the cases have sent", Detail: "not tried, or not to be sent here: " + strings.Join(missing, ", ")}
		}
		r.Trials = append(r.Trials, tried{Way: mode.String(), outcome: o})
	}
	r.conclude()
	return r
}

// tracer notes what the connections of one pool send.
type tracer struct {
	sent *sent
	mode pgx.QueryExecMode
}

func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	t.sent.note(t.mode, d.SQL)
	return ctx
}

func (t tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TracePrepareStart sees what takes the place of another statement on its way.
func (t tracer) TracePrepareStart(ctx context.Context, _ *pgx.Conn, d pgx.TracePrepareStartData) context.Context {
	t.sent.note(t.mode, d.SQL)
	return ctx
}

func (t tracer) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {}

func (t tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	for _, q := range d.Batch.QueuedQueries {
		t.sent.note(t.mode, q.SQL)
	}
	return ctx
}

func (t tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (t tracer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// modeCases have the statements in each mode that the other cases have in one or some.
func modeCases() []testCase {
	ways := modeWays()
	return []testCase{
		{name: "Query modes: calls of the database's clock", ways: ways, script: clockInMode},
		{name: "Query modes: InTx with Hot", ways: ways, clear: absent, script: hotInMode},
		{name: "Query modes: SendTx, and a batch on a pool", ways: ways, script: batchInMode},
		{name: "Query modes: Coalescer", ways: ways, script: coalesceInMode},
		{name: "Query modes: Wait", ways: ways, script: waitInMode},
	}
}

// modeWays are pools, one in each mode. call keeps the model from a transaction: the scripts begin their own.
func modeWays() (ways []way) {
	for _, w := range poolWays() {
		if !w.sql {
			w.call = func(context.Context, *trial, ...ratelimit.Request) error { return nil }
			ways = append(ways, w)
		}
	}
	return ways
}

// modePool is the pool of a mode's way.
func (t *trial) modePool() *pgxpool.Pool { return t.db.(*pgxpool.Pool) }

// clockInMode makes calls as most programs do, each on a connection of its own kind.
func clockInMode(t *trial) {
	t.unmodelled = true
	for _, limit := range []ratelimit.Limit{
		t.still("bucket", 4), ratelimit.FixedWindow(t.name("window"), 4, 100*365*24*time.Hour, ratelimit.Start(noon)),
		ratelimit.CalendarWindow(t.name("calendar"), 4, ratelimit.Year),
	} {
		t.step = "another pool"
		pool, err := t.s.connect(t.ctx, 1, t.modePool().Config().ConnConfig.DefaultQueryExecMode)
		t.must("another pool", err)
		l := new(ratelimit.Limiter)
		ann := t.of(limit, t.key(0))
		for i := range 6 {
			r, err := l.Consume(t.ctx, pool, ann)
			if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
				pool.Close()
			}
			t.step = fmt.Sprintf("use %d of 4, %s", i+1, limit.Config().Kind)
			t.wantGrant(i < 4, err)
			t.want(i >= 4 || near(r.Remaining, float64(3-i)), "%d tokens, came %v", 3-i, r.Remaining)
		}
		pool.Close()
	}
}

func hotInMode(t *trial) {
	t.unmodelled = true
	for _, level := range levels {
		for _, shards := range []int{1, 4} {
			limit := t.still(fmt.Sprintf("hot%d %s", shards, level), 2, ratelimit.Shards(shards))
			ann := t.of(limit, t.key(0))
			for i := range 3 {
				err := t.limiter.InTx(t.ctx, t.modePool(), func(ctx context.Context, tx pgx.Tx) error {
					_, err := t.limiter.Consume(ctx, tx, ann)
					return err
				}, ratelimit.Isolation(level), ratelimit.Hot(ann))
				t.step = fmt.Sprintf("use %d of 2, with %d shards, %s", i+1, shards, level)
				t.wantGrant(i < 2, err)
			}
		}
	}
}

// wantGrant ends the trial unless an error says that the call was granted, or denied.
func (t *trial) wantGrant(granted bool, err error) {
	if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
		t.failed(err)
	}
	t.want(granted == (err == nil), "granted %v, came %v", granted, err == nil)
}

func batchInMode(t *trial) {
	ann, shards := t.of(t.still("bucket", 20), t.key(0)), t.of(t.still("shards", 20, ratelimit.Shards(3)), t.key(0))
	send := func(step string, level pgx.TxIsoLevel, requests ...ratelimit.Request) error {
		t.queue([]ratelimit.Request{ann}, requests)
		batch := t.batch
		t.batch, t.step = nil, step
		if level == "" {
			return t.modePool().SendBatch(t.ctx, batch).Close()
		}
		return t.limiter.SendTx(t.ctx, t.modePool(), batch, ratelimit.Isolation(level))
	}
	for _, level := range levels {
		step := "SendTx, " + string(level)
		t.must(step, send(step, level, ann.Count(2), shards.Count(2)))
	}
	t.holds(ann, 11)
	t.wantGrant(false, send("a denial in SendTx", pgx.ReadCommitted, ann.Count(11)))
	t.holds(ann, 11)
	t.must("a batch on the pool", send("a batch on the pool", "", ann.Count(2), shards.Count(2)))
	t.wantGrant(false, send("a denial in a batch on the pool", "", shards.Count(13)))
	t.holds(shards, 12)
}

// coalesceInMode has calls for one limit, for several, and for several in one call.
func coalesceInMode(t *trial) {
	c := t.s.coalescer(t.modePool(), false)
	defer func() { _ = c.Close(t.ctx) }()
	var places []*place
	for i := range 4 {
		places = append(places, t.place(t.still(fmt.Sprint("limit", i/2), 60), fmt.Sprintf("%s-%d", t.key(0), i%2)))
	}
	l := t.limiter
	consume := func(step string, calls int, asks func(i int) []int) {
		t.raceCalls(step, calls, places, func(i int) (asked []asking, err error) {
			var requests []ratelimit.Request
			for _, p := range asks(i) {
				asked, requests = append(asked, asking{p, 1}), append(requests, places[p].request)
			}
			_, err = l.Consume(t.ctx, c, requests...)
			return asked, err
		})
	}
	consume("several limits in one call", 40, func(i int) []int { return []int{i % 2, 2 + i%2} })
	consume("calls for several limits", 60, func(i int) []int { return []int{i % 4} })
	consume("calls for one limit, partly denied", 100, func(i int) []int { return []int{i % 2} })
	t.settle(exactly)
	// Keys of one limit share a statement of their own, unless it would have decided too little of the last batch. Of a clock that stands still, a
	// Coalescer thinks that each row is new.
	_ = c.Close(t.ctx)
	c = t.s.coalescer(t.modePool(), false)
	limit := t.still("many keys", 5000)
	places, t.tally, l = nil, tally{}, new(ratelimit.Limiter)
	for i := range 16 {
		places = append(places, t.place(limit, fmt.Sprintf("%s-%d", t.key(0), i)))
	}
	mode := t.modePool().Config().ConnConfig.DefaultQueryExecMode
	asks := func(i int) []int { return []int{i % len(places)} }
	consume("first uses of many keys of one limit", 160, asks)
	consume("calls for many keys of one limit", 160, asks)
	for wait := 20 * time.Millisecond; wait < t.s.timeout/8 && !t.s.sent.has(mode, dbsqlc.ConsumeKeys); wait *= 2 { // the machine may be busy
		release := t.hold(places[0].request, places[1].request)
		time.AfterFunc(3*wait, release)
		consume("calls that wait for others, and so share a statement", len(places), func(i int) []int {
			if i > 1 {
				time.Sleep(wait)
			}
			return asks(i)
		})
		release()
	}
	t.want(t.s.sent.has(mode, dbsqlc.ConsumeKeys), "calls for many keys that share a statement, came none")
	t.settle(exactly)
}

// hold locks rows in a transaction that is rolled back by release, which may be called twice.
func (t *trial) hold(requests ...ratelimit.Request) (release func()) {
	tx, err := t.s.pool.Begin(t.ctx)
	t.must("BEGIN", err)
	release = sync.OnceFunc(func() { _ = tx.Rollback(context.WithoutCancel(t.ctx)) })
	for _, r := range requests {
		if _, err := new(ratelimit.Limiter).Consume(t.ctx, tx, r.Count(0)); err != nil {
			release()
			t.failed(err)
		}
	}
	return release
}

func waitInMode(t *trial) {
	t.unmodelled = true
	ann := t.of(ratelimit.TokenBucket(t.name("wait"), 50, time.Second, ratelimit.Capacity(1)), t.key(0))
	for _, step := range []string{"the first use", "a wait"} {
		_, err := new(ratelimit.Limiter).Wait(t.ctx, t.db, ann)
		t.must(step, err)
	}
}

package faults_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/ratelimit"
)

// load runs many goroutines that consume on every kind of handle, and records the outcome of each call.
type load struct {
	*testing.T
	url       string
	app       string // application_name of its connections
	limiter   ratelimit.Limiter
	pool      *pgxpool.Pool
	db        *sql.DB
	coalescer *ratelimit.Coalescer
	handles   []*handle
	cancel    context.CancelFunc
	wg        sync.WaitGroup
}

// handle is one way to consume a token. Each has its own limit.
type handle struct {
	limit    ratelimit.Limit
	ordering bool // consumes in a transaction that stores an order
	call     func(ctx context.Context, id string) error

	mu       sync.Mutex
	last     int
	granted  map[string]bool // by id of the order
	unknown  map[string]bool // ratelimit.ErrUnknownOutcome
	denied   int
	nothing  int            // any other error: nothing may be gone
	outcomes map[string]int // errors by kind, to be printed
	grants   []int          // calls granted to each goroutine
	longest  time.Duration  // of all calls
}

// capacity is the capacity of a handle's limit. A refill would take a thousand years for a token, so nothing is refilled.
const capacity = 1e6

// loadConfig has the options of a load. The zero value is 4 goroutines for each handle.
type loadConfig struct {
	goroutines int // for each handle
	conns      int // of the pool
	configure  []func(*pgx.ConnConfig)
}

// newLoad makes a load on a migrated database and starts it.
func newLoad(t *testing.T, url string, config loadConfig) *load {
	t.Helper()
	if config.goroutines == 0 {
		config.goroutines = 4
	}
	if config.conns == 0 {
		config.conns = 12
	}
	l := &load{T: t, url: url, app: fmt.Sprintf("txlimit_faults_%x", rand.Uint32())}
	l.pool = connect(t, url, config.conns, append(config.configure, setting("application_name", l.app))...)
	l.db = stdlib.OpenDB(*l.pool.Config().ConnConfig)
	l.db.SetMaxOpenConns(config.conns)
	t.Cleanup(func() { l.db.Close() })
	l.coalescer = &ratelimit.Coalescer{Pool: l.pool}
	l.handles = []*handle{
		l.alone("pool", l.pool), l.alone("coalescer", l.coalescer), l.alone("database/sql", ratelimit.SQL(l.db)),
		l.inTx("InTx"), l.inTx("InTx Hot", ratelimit.Hot), l.inTx("InTx Hot, 3 shards", ratelimit.Hot),
		l.inSQLTx("InSQLTx"), l.sendTx("SendTx"),
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	l.cancel = cancel
	for _, h := range l.handles {
		h.grants = make([]int, config.goroutines)
		for g := range config.goroutines {
			l.wg.Go(func() {
				for ctx.Err() == nil {
					began := time.Now()
					// A call that has begun is not canceled: the test also asks whether calls get stuck.
					err := h.once(context.WithoutCancel(ctx))
					h.waited(g, time.Since(began), err)
					if err != nil {
						time.Sleep(20 * time.Millisecond)
					}
				}
			})
		}
	}
	return l
}

func newHandle(name string) *handle {
	h := &handle{
		limit:   ratelimit.TokenBucket(name, 1e-9, time.Hour, ratelimit.Capacity(capacity)),
		granted: map[string]bool{}, unknown: map[string]bool{}, outcomes: map[string]int{},
	}
	if strings.Contains(name, "shards") {
		h.limit = ratelimit.TokenBucket(name, 1e-9, time.Hour, ratelimit.Capacity(capacity), ratelimit.Shards(3))
	}
	return h
}

// alone only consumes.
func (l *load) alone(name string, db ratelimit.DB) *handle {
	h := newHandle(name)
	h.call = func(ctx context.Context, _ string) error {
		_, err := l.limiter.Consume(ctx, db, h.limit.Global())
		return err
	}
	return h
}

func (l *load) inTx(name string, queue ...func(...ratelimit.Request) ratelimit.TxOption) *handle {
	h := newHandle(name)
	h.ordering = true
	var options []ratelimit.TxOption
	for _, hot := range queue {
		options = append(options, hot(h.limit.Global()))
	}
	h.call = func(ctx context.Context, id string) error {
		return l.limiter.InTx(ctx, l.pool, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := l.limiter.Consume(ctx, tx, h.limit.Global()); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, insertOrder, id, name)
			return err
		}, options...)
	}
	return h
}

func (l *load) inSQLTx(name string) *handle {
	h := newHandle(name)
	h.ordering = true
	h.call = func(ctx context.Context, id string) error {
		return l.limiter.InSQLTx(ctx, l.db, func(ctx context.Context, tx *sql.Tx) error {
			if _, err := l.limiter.Consume(ctx, ratelimit.SQL(tx), h.limit.Global()); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, insertOrder, id, name)
			return err
		})
	}
	return h
}

func (l *load) sendTx(name string) *handle {
	h := newHandle(name)
	h.ordering = true
	h.call = func(ctx context.Context, id string) error {
		batch := &pgx.Batch{}
		if _, err := l.limiter.QueueConsume(ctx, batch, h.limit.Global()); err != nil {
			return err
		}
		batch.Queue(insertOrder, id, name)
		return l.limiter.SendTx(ctx, l.pool, batch)
	}
	return h
}

const insertOrder = "INSERT INTO orders (id, handle) VALUES ($1, $2)"

// once makes one call, and records what its caller then knows.
func (h *handle) once(ctx context.Context) error {
	h.mu.Lock()
	h.last++
	id := fmt.Sprintf("%s %d", h.limit.Name(), h.last)
	h.mu.Unlock()

	err := h.call(ctx, id)

	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err == nil:
		h.granted[id] = true
		return nil
	case errors.As(err, new(*ratelimit.DeniedError)):
		h.denied++
	case errors.Is(err, ratelimit.ErrUnknownOutcome):
		h.unknown[id] = true
	default:
		h.nothing++
	}
	h.outcomes[kindOf(err)]++
	return err
}

// waited records how long a goroutine's call took.
func (h *handle) waited(goroutine int, took time.Duration, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.longest = max(h.longest, took)
	if err == nil {
		h.grants[goroutine]++
	}
}

// kindOf returns the kind of an error, in a few words.
func kindOf(err error) string {
	var sqlErr interface{ SQLState() string }
	var kind string
	switch {
	case errors.As(err, new(*ratelimit.DeniedError)):
		return "denied"
	case errors.As(err, &sqlErr):
		kind = sqlErr.SQLState()
	case errors.Is(err, context.DeadlineExceeded):
		kind = "deadline"
	default:
		kind = "connection"
	}
	if errors.Is(err, ratelimit.ErrAttemptsExhausted) {
		kind = "gave up: " + kind
	}
	if errors.Is(err, ratelimit.ErrUnknownOutcome) {
		kind = "unknown: " + kind
	}
	return kind
}

// count returns the number of acknowledged calls so far.
func (h *handle) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.granted)
}

// failed returns the number of calls so far that failed and consumed nothing.
func (l *load) failed() (n int) {
	for _, h := range l.handles {
		h.mu.Lock()
		n += h.nothing
		h.mu.Unlock()
	}
	return n
}

// flows waits until every handle has had n more grants.
func (l *load) flows(n int) {
	l.Helper()
	for _, h := range l.handles {
		before := h.count()
		h.mu.Lock()
		what := fmt.Sprintf("%d more calls are granted on %s; it had %v", n, h.limit.Name(), h.outcomes)
		h.mu.Unlock()
		eventually(l.T, what, func() bool { return h.count() >= before+n })
	}
}

// stop ends the load. Every call must return.
func (l *load) stop() {
	l.Helper()
	l.cancel()
	done := make(chan struct{})
	go func() { l.wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		buf := make([]byte, 1<<20)
		l.Fatalf("after %v, some calls have not ended:\n%s", patience, buf[:runtime.Stack(buf, true)])
	}
	eventually(l.T, "no connection is in use", func() bool { return l.pool.Stat().AcquiredConns() == 0 && l.db.Stats().InUse == 0 })
}

// totals are the sums of a load over all handles.
type totals struct{ granted, unknown, committed, nothing, denied int }

// settle stops the load, and compares the callers' answers with the database.
func (l *load) settle() totals {
	l.Helper()
	l.stop()
	ctx := context.WithoutCancel(l.Context())
	admin := connect(l.T, l.url, 2)
	l.nothingStuck(ctx, admin)
	var sum totals
	outcomes := map[string]int{}
	for _, h := range l.handles {
		gone := h.gone(ctx, l, admin)
		least, most := len(h.granted), len(h.granted)+len(h.unknown)
		if gone < least || gone > most || gone > capacity {
			l.Errorf("%s: %d tokens are gone, want %d to %d: %d calls were acknowledged, %d have an unknown outcome",
				h.limit.Name(), gone, least, most, len(h.granted), len(h.unknown))
		}
		if h.ordering {
			h.compareOrders(ctx, l, admin, gone)
		}
		sum.granted += len(h.granted)
		sum.unknown += len(h.unknown)
		sum.committed += gone - len(h.granted)
		sum.nothing += h.nothing
		sum.denied += h.denied
		for kind, n := range h.outcomes {
			outcomes[kind] += n
		}
		h.drain(ctx, l, admin)
	}
	_ = l.coalescer.Close(ctx)
	l.Logf("%d calls acknowledged; %d with an unknown outcome, of which %d were committed; %d with an error and not committed: %v",
		sum.granted, sum.unknown, sum.committed, sum.nothing, outcomes)
	return sum
}

// gone returns how many tokens are missing from the row.
func (h *handle) gone(ctx context.Context, l *load, admin *pgxpool.Pool) int {
	l.Helper()
	balances, err := l.limiter.Balance(ctx, admin, h.limit.Global())
	if err != nil {
		l.Fatal(err)
	}
	return int(balances[0].Used + 0.5)
}

// compareOrders wants one order for each missing token. Its caller must know of it, or have an unknown outcome.
func (h *handle) compareOrders(ctx context.Context, l *load, admin *pgxpool.Pool, gone int) {
	l.Helper()
	ids := h.orders(ctx, l, admin)
	if len(ids) != gone {
		l.Errorf("%s: %d orders, %d tokens are gone", h.limit.Name(), len(ids), gone)
	}
	for _, id := range ids {
		if !h.granted[id] && !h.unknown[id] {
			l.Errorf("order %s was committed, but its caller got an error that says it was not", id)
		}
	}
	for id := range h.granted {
		if _, there := slices.BinarySearch(ids, id); !there {
			l.Errorf("order %s was acknowledged, but it is missing", id)
		}
	}
}

func (h *handle) orders(ctx context.Context, l *load, admin *pgxpool.Pool) []string {
	l.Helper()
	rows, err := admin.Query(ctx, `SELECT id FROM orders WHERE handle = $1 ORDER BY id COLLATE "C"`, h.limit.Name())
	if err != nil {
		l.Fatal(err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		l.Fatal(err)
	}
	return ids
}

// drain wants a new call to be granted, then all that is left, and then nothing more.
func (h *handle) drain(ctx context.Context, l *load, admin *pgxpool.Pool) {
	l.Helper()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var err error
	for range 100 { // the pool may still have broken connections
		if err = h.once(ctx); err == nil || !strings.Contains(kindOf(err), "connection") && !strings.Contains(kindOf(err), "57P01") {
			break
		}
	}
	if err != nil {
		l.Errorf("%s: a new call is not granted: %v", h.limit.Name(), err)
	}
	left := capacity - float64(h.gone(ctx, l, admin))
	if _, err := l.limiter.Consume(ctx, admin, h.limit.Global().Count(left)); err != nil {
		l.Errorf("%s: the remaining tokens are not granted: %v", h.limit.Name(), err)
	}
	if _, err := l.limiter.Consume(ctx, admin, h.limit.Global()); !errors.As(err, new(*ratelimit.DeniedError)) {
		l.Errorf("%s: more than the capacity was granted: %v", h.limit.Name(), err)
	}
}

// nothingStuck wants no session of the load in a transaction, and no lock that it holds. Predicate locks of SERIALIZABLE do
// not count: they stay after COMMIT, until all overlapping transactions have ended, even those of other tests.
func (l *load) nothingStuck(ctx context.Context, admin *pgxpool.Pool) {
	l.Helper()
	var stuck string
	defer func() {
		if stuck != "" {
			l.Logf("left:\n%s", stuck)
		}
	}()
	eventually(l.T, "no transaction and no lock is left", func() bool {
		err := admin.QueryRow(ctx, `
			SELECT concat_ws(E'\n',
			       (SELECT string_agg(format('%s %s: %s', pid, state, query), E'\n')
			          FROM pg_stat_activity WHERE application_name = $1 AND state <> 'idle'),
			       (SELECT string_agg(format('%s holds %s on %s', pid, mode, coalesce(relation::regclass::text, locktype)), E'\n')
			          FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE application_name = $1 AND locktype <> 'virtualxid' AND mode <> 'SIReadLock'),
			       (SELECT string_agg('prepared: ' || gid, E'\n') FROM pg_prepared_xacts))`, l.app).Scan(&stuck)
		if err != nil {
			l.Fatal(err)
		}
		return stuck == ""
	})
}

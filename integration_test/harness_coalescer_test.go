package integration_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// arrival is a context that tells when its call has joined the queue. A call first asks for Done at that moment.
type arrival struct {
	context.Context
	once    sync.Once
	arrived chan struct{}
}

func newArrival(ctx context.Context) *arrival {
	return &arrival{Context: ctx, arrived: make(chan struct{})}
}

func (a *arrival) Done() <-chan struct{} {
	a.once.Do(func() { close(a.arrived) })
	return a.Context.Done()
}

// holdFlights keeps both places of a coalescer busy. Each is taken by a call that waits for a row, until release is called.
func holdFlights(t *testing.T, coalescer *ratelimit.Coalescer, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	limit := ratelimit.TokenBucket("hold", 1e9, time.Hour)
	requests := []ratelimit.Request{limit.Key("a"), limit.Key("b")}
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, requests...); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), tx, requests...); err != nil {
		t.Fatal(err)
	}
	pid := serverPID(t, tx)
	var wg sync.WaitGroup
	for _, request := range requests {
		wg.Go(func() {
			if _, err := limiter.Consume(t.Context(), coalescer, request); err != nil {
				t.Error(err)
			}
		})
	}
	for waiting := 0; waiting < 2; time.Sleep(time.Millisecond) {
		err := pool.QueryRow(t.Context(), "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))", pid).Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		if err := tx.Commit(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
}

// statements counts the statements of a pool by a word in them, and remembers the SQLSTATEs of failed statements.
type statements struct {
	mu     sync.Mutex
	sql    []string
	failed []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sql = append(s.sql, data.SQL)
	return ctx
}

func (s *statements) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state := sqlState(data.Err); state != "" {
		s.failed = append(s.failed, state)
	}
}

func (s *statements) count(word string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sql := range s.sql {
		if strings.Contains(sql, word) {
			n++
		}
	}
	return n
}

// traced makes another pool on the same database, and counts its statements.
func traced(t *testing.T, pool *pgxpool.Pool, conns int, settings map[string]string) (*pgxpool.Pool, *statements) {
	t.Helper()
	var s statements
	config := pool.Config()
	config.MaxConns = int32(conns)
	config.ConnConfig.Tracer = &s
	startWith(t, config.ConnConfig, settings)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool, &s
}

// flight is a list of calls that have joined the queue, in order.
type flight struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

// err returns the error of call i, which must have failed.
func (f *flight) err(i int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.errs[i]
}

func enqueue(t *testing.T, db ratelimit.DB, ctxs []context.Context, requests ...ratelimit.Request) *flight {
	t.Helper()
	f := &flight{errs: make([]error, len(requests))}
	for i, request := range requests {
		ctx := t.Context()
		if i < len(ctxs) {
			ctx = ctxs[i]
		}
		f.join(ctx, db, i, request)
	}
	return f
}

// enqueueSeveral enqueues calls for several limits.
func enqueueSeveral(ctx context.Context, t *testing.T, db ratelimit.DB, calls ...[]ratelimit.Request) *flight {
	t.Helper()
	f := &flight{errs: make([]error, len(calls))}
	for i, requests := range calls {
		f.join(ctx, db, i, requests...)
	}
	return f
}

// join makes a call join the queue.
func (f *flight) join(ctx context.Context, db ratelimit.DB, i int, requests ...ratelimit.Request) {
	f.joinCall(ctx, i, func(ctx context.Context) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, db, requests...)
		return err
	})
}

// reserve makes a reservation join the queue, as the last call.
func (f *flight) reserve(ctx context.Context, db ratelimit.DB, requests ...ratelimit.Request) {
	f.mu.Lock()
	f.errs = append(f.errs, nil)
	last := len(f.errs) - 1
	f.mu.Unlock()
	f.joinCall(ctx, last, func(ctx context.Context) error {
		_, err := new(ratelimit.Limiter).Reserve(ctx, db, requests...)
		return err
	})
}

func (f *flight) joinCall(ctx context.Context, i int, call func(ctx context.Context) error) {
	a := newArrival(ctx)
	f.wg.Go(func() {
		err := call(a)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.errs[i] = err
	})
	<-a.arrived
}

func remaining(t *testing.T, db ratelimit.DB, request ratelimit.Request) float64 {
	t.Helper()
	return readBalance(t, &ratelimit.Limiter{}, db, request)
}

// slow makes a limit with almost no refill.
func slow(name string, capacity float64, options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket(name, 1e-9, time.Hour, append(options, ratelimit.Capacity(capacity))...)
}

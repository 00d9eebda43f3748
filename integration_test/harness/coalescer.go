package harness

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

// Ahead is for how long a Coalescer takes ahead in the tests.
const Ahead = 50 * time.Millisecond

// Arrival is a context that tells when its call has joined the queue. A call first asks for Done at that moment.
type Arrival struct {
	context.Context
	once    sync.Once
	Arrived chan struct{}
}

// NewArrival is such a context.
func NewArrival(ctx context.Context) *Arrival {
	return &Arrival{Context: ctx, Arrived: make(chan struct{})}
}

// Done tells it.
func (a *Arrival) Done() <-chan struct{} {
	a.once.Do(func() { close(a.Arrived) })
	return a.Context.Done()
}

// HoldFlights keeps both places of a coalescer busy. Each is taken by a call that waits for a row, until release is called.
func HoldFlights(t *testing.T, coalescer *ratelimit.Coalescer, pool *pgxpool.Pool) (release func()) {
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
	pid := ServerPID(t, tx)
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

// Statements counts the statements of a pool by a word in them, and remembers the SQLSTATEs of failed statements.
type Statements struct {
	mu     sync.Mutex
	sql    []string
	Failed []string
}

// TraceQueryStart makes it a tracer of pgx.
func (s *Statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sql = append(s.sql, data.SQL)
	return ctx
}

// TraceQueryEnd makes it a tracer of pgx.
func (s *Statements) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if state := SQLState(data.Err); state != "" {
		s.Failed = append(s.Failed, state)
	}
}

// Count is how many statements have the word.
func (s *Statements) Count(word string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sql := range s.sql {
		if strings.Contains(sql, word) {
			n++
		}
	}
	return n
}

// Traced makes another pool on the same database, and counts its statements.
func Traced(t *testing.T, pool *pgxpool.Pool, conns int, settings map[string]string) (*pgxpool.Pool, *Statements) {
	t.Helper()
	var s Statements
	config := pool.Config()
	config.MaxConns = int32(conns)
	config.ConnConfig.Tracer = &s
	StartWith(t, config.ConnConfig, settings)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool, &s
}

// Flight is a list of calls that have joined the queue, in order.
type Flight struct {
	Wg   sync.WaitGroup
	mu   sync.Mutex
	Errs []error
}

// Err returns the error of call i, which must have failed.
func (f *Flight) Err(i int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Errs[i]
}

// Enqueue makes calls join the queue, a request each.
func Enqueue(t *testing.T, db ratelimit.DB, ctxs []context.Context, requests ...ratelimit.Request) *Flight {
	t.Helper()
	f := &Flight{Errs: make([]error, len(requests))}
	for i, request := range requests {
		ctx := t.Context()
		if i < len(ctxs) {
			ctx = ctxs[i]
		}
		f.Join(ctx, db, i, request)
	}
	return f
}

// EnqueueSeveral enqueues calls for several limits.
func EnqueueSeveral(ctx context.Context, t *testing.T, db ratelimit.DB, calls ...[]ratelimit.Request) *Flight {
	t.Helper()
	f := &Flight{Errs: make([]error, len(calls))}
	for i, requests := range calls {
		f.Join(ctx, db, i, requests...)
	}
	return f
}

// Join makes a call join the queue.
func (f *Flight) Join(ctx context.Context, db ratelimit.DB, i int, requests ...ratelimit.Request) {
	f.JoinCall(ctx, i, func(ctx context.Context) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, db, requests...)
		return err
	})
}

// Reserve makes a reservation join the queue, as the last call.
func (f *Flight) Reserve(ctx context.Context, db ratelimit.DB, requests ...ratelimit.Request) {
	f.mu.Lock()
	f.Errs = append(f.Errs, nil)
	last := len(f.Errs) - 1
	f.mu.Unlock()
	f.JoinCall(ctx, last, func(ctx context.Context) error {
		_, err := new(ratelimit.Limiter).Reserve(ctx, db, requests...)
		return err
	})
}

// JoinCall makes any call join the queue, as number i.
func (f *Flight) JoinCall(ctx context.Context, i int, call func(ctx context.Context) error) {
	a := NewArrival(ctx)
	f.Wg.Go(func() {
		err := call(a)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.Errs[i] = err
	})
	<-a.Arrived
}

// Remaining is what a key has.
func Remaining(t *testing.T, db ratelimit.DB, request ratelimit.Request) float64 {
	t.Helper()
	return ReadBalance(t, &ratelimit.Limiter{}, db, request)
}

// Slow makes a limit with almost no refill.
func Slow(name string, capacity float64, options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket(name, 1e-9, time.Hour, append(options, ratelimit.Capacity(capacity))...)
}

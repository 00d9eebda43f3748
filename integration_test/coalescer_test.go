package integration_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// arrival is a context that tells when its call has joined the queue: that is when it first asks for Done.
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

// holdFlights keeps both places of a coalescer busy, with calls that wait for a row each, until the function it returns is called.
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

// TestCoalescerIsExact lets random calls arrive in a known order while others are at the database, so that they are decided
// by one statement, and makes the same calls one after another on a pool of another schema. Every answer must be the same, and
// so must the tables.
func TestCoalescerIsExact(t *testing.T) {
	t.Parallel()
	for i := range 3 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playBatches(t, 60)
		})
	}
}

func playBatches(t *testing.T, rounds int) {
	r := newRand(t)
	together, apart := newPool(t, 6), newPool(t, 1)
	coalescer := &ratelimit.Coalescer{Pool: together}
	defer coalescer.Close()
	limiter, clock := newLimiter()
	type asked struct {
		verb     string
		asks     []ask
		requests []ratelimit.Request
		result   ratelimit.Result
		err      error
	}
	granted, denials := 0, 0
	limits := make([]ratelimit.Limit, 3)
	for round := 0; round < rounds || granted < rounds || denials < rounds; round++ { // until there was enough of both
		if round == 5*rounds {
			t.Fatalf("%d grants and %d denials in %d rounds are no test", granted, denials, round)
		}
		for i := range limits {
			if round == 0 || r.IntN(8) == 0 {
				limits[i] = randomLimit(r, fmt.Sprintf("limit %d", i), 1)
			}
		}
		clock.Advance(time.Duration(oneOf(r, 0, 1, r.Int64N(2e3), r.Int64N(1e6), r.Int64N(1e8), r.Int64N(1e11), -r.Int64N(1e9))) * time.Microsecond)
		several, reserve, keys := oneOf(r, 0, 0, 3), oneOf(r, 0, 0, 2), oneOf(r, 1, 3, 50)
		changing := r.IntN(4) == 0
		same := randomTokens(r, limits[0].Capacity())
		whole, equal, of := r.IntN(2) == 0, r.IntN(2) == 0, limits[:oneOf(r, 1, 1, 3)]
		calls := make([]asked, oneOf(r, 1, 5, 40))
		for i := range calls {
			c := &calls[i]
			c.verb = "consume"
			if r.IntN(5) == 0 && reserve > 0 {
				c.verb = "charge"
			}
			for range 1 + r.IntN(several+1) {
				limit := oneOf(r, of...)
				if changing && r.IntN(3) == 0 {
					limit = randomLimit(r, limit.Name(), 1)
				}
				a := ask{limit: limit, key: fmt.Sprint(r.IntN(keys)), count: same, reserve: reserve > 0 && r.IntN(3) == 0}
				if several > 0 || limit.Config().Kind == ratelimit.KindFixedWindow {
					a.reserve = false // such a call goes alone, in no order with the others
				}
				switch {
				case whole:
					a.count = 1
				case !equal && r.IntN(3) == 0:
					a.count = randomTokens(r, limit.Capacity())
				}
				c.asks, c.requests = append(c.asks, a), append(c.requests, a.request())
			}
		}

		release := holdFlights(t, coalescer, together)
		var wg sync.WaitGroup
		for i := range calls {
			c := &calls[i]
			ctx := newArrival(t.Context())
			gone := make(chan struct{})
			wg.Go(func() {
				defer close(gone)
				// Each has a Limiter of its own: one refuses a name with two definitions.
				c.result, c.err = call(ctx, &ratelimit.Limiter{Clock: limiter.Clock}, coalescer, c.verb, "", c.requests)
			})
			select {
			case <-ctx.arrived:
			case <-gone: // it was refused
			}
		}
		release()
		wg.Wait()

		for i, c := range calls {
			want, wantErr := call(t.Context(), &ratelimit.Limiter{Clock: limiter.Clock}, apart, c.verb, "", c.requests)
			if fmt.Sprint(c.err) != fmt.Sprint(wantErr) || !reflect.DeepEqual(c.result, want) {
				t.Fatalf("round %d, call %d of %d at %v: %s %+v\ntogether %+v, %v\napart    %+v, %v", round, i, len(calls), clock.now, c.verb, c.asks, c.result, c.err, want, wantErr)
			}
			switch {
			case c.err == nil:
				granted++
			case denied(c.err):
				denials++
			}
		}
		got, want := readTable(t, together), readTable(t, apart)
		delete(got, rowsOf{"hold", "a"})
		delete(got, rowsOf{"hold", "b"})
		if !maps.EqualFunc(got, want, slices.Equal) {
			t.Fatalf("round %d\ntogether %v\napart    %v", round, got, want)
		}
	}
	t.Logf("%d granted, %d denied", granted, denials)
}

// statements counts the statements of a pool by a word in them, and remembers the SQLSTATEs of those that failed.
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

// traced is another pool on the same schema, and its statements.
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

// flight is calls that have joined the queue, in order.
type flight struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

// err is the error of a call that has returned with one.
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

// join has a call join the queue.
func (f *flight) join(ctx context.Context, db ratelimit.DB, i int, requests ...ratelimit.Request) {
	a := newArrival(ctx)
	f.wg.Go(func() {
		var limiter ratelimit.Limiter
		_, err := limiter.Consume(a, db, requests...)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.errs[i] = err
	})
	<-a.arrived
}

func remaining(t *testing.T, db ratelimit.DB, request ratelimit.Request) float64 {
	t.Helper()
	var limiter ratelimit.Limiter
	result, err := limiter.Check(t.Context(), db, request.Count(0))
	if err != nil {
		t.Fatal(err)
	}
	return result.Requests[0].Remaining
}

// slow is hardly refilled.
func slow(name string, capacity float64, options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket(name, 1e-9, time.Hour, append(options, ratelimit.Capacity(capacity))...)
}

func TestCoalescerDecidesWhatWaitsTogether(t *testing.T) {
	t.Parallel()
	pool, s := traced(t, newPool(t, 2), 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 100)
	var requests []ratelimit.Request
	for i := range 300 {
		requests = append(requests, limit.Key(fmt.Sprint(i%2)))
	}
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, requests...)
	release()
	f.wg.Wait()
	for i, err := range f.errs {
		if want := i < 200; (err == nil) != want || err != nil && !denied(err) {
			t.Errorf("call %d: %v, want granted %v", i, err, want)
		}
	}
	if n := s.count("_ratelimit_coalesce"); n != 1 {
		t.Errorf("%d statements for 300 calls, want 1", n)
	}
}

func TestCoalescerLetsALoneCallThrough(t *testing.T) {
	t.Parallel()
	pool, s := traced(t, newPool(t, 2), 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	var limiter ratelimit.Limiter
	for range 10 {
		if _, err := limiter.Consume(t.Context(), coalescer, slow("limit", 100).Global()); err != nil {
			t.Fatal(err)
		}
	}
	if n, all := s.count("_ratelimit_consume"), s.count(""); n != 10 || all != 10 {
		t.Errorf("%d statements, %d of them of the ordinary kind, want 10", all, n)
	}
}

func TestCoalescerDenialsWriteNothing(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit, other := slow("limit", 3), slow("other", 1)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Global().Count(3)); err != nil {
		t.Fatal(err)
	}
	row := func() (xmin, xmax string) {
		if err := pool.QueryRow(t.Context(), `SELECT xmin::text, xmax::text FROM rate_limits WHERE name = 'limit'`).Scan(&xmin, &xmax); err != nil {
			t.Fatal(err)
		}
		return xmin, xmax
	}
	xmin, xmax := row()
	for _, requests := range [][]ratelimit.Request{
		{limit.Global(), limit.Global(), limit.Global()},   // a sum
		{limit.Key("new"), limit.Global(), limit.Global()}, // sums of keys, one without a row
		{other.Key("new"), limit.Global(), limit.Global()}, // without a row
		{other.Key("new").Count(0), limit.Global(), limit.Global()},
	} {
		release := holdFlights(t, coalescer, pool)
		f := enqueue(t, coalescer, nil, requests...)
		release()
		f.wg.Wait()
		for i, err := range f.errs {
			if want := requests[i] == limit.Global(); denied(err) != want || !want && err != nil {
				t.Errorf("call %d: %v, want denied %v", i, err, want)
			}
		}
		if xmin2, xmax2 := row(); xmin2 != xmin || xmax2 != xmax {
			t.Errorf("the row was %s, %s and is %s, %s", xmin, xmax, xmin2, xmax2)
		}
	}
}

func TestCoalescerCancelledCallersHarmNobody(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 100)
	release := holdFlights(t, coalescer, pool)
	waits, cancelWaits := context.WithCancel(t.Context())
	sent, cancelSent := context.WithCancel(t.Context())
	f := enqueue(t, coalescer, []context.Context{waits, sent, t.Context()}, limit.Global(), limit.Global(), limit.Global())

	// One that has not been sent.
	cancelWaits()
	for ; f.err(0) == nil; time.Sleep(time.Millisecond) {
	}
	if err := f.err(0); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled while it waited: %v", err)
	}

	// One that has: the statement waits for the row.
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Global()); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), tx, limit.Global()); err != nil {
		t.Fatal(err)
	}
	release()
	waitingFor(t, pool, tx)
	cancelSent()
	for ; f.err(1) == nil; time.Sleep(time.Millisecond) {
	}
	if err := f.err(1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled at the database: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.wg.Wait()
	if err := f.err(2); err != nil {
		t.Errorf("the other: %v", err)
	}
	if left := remaining(t, pool, limit.Global()); left < 95.99 || left > 96.01 {
		t.Errorf("%v tokens are left, want 96: 2 were taken directly, 2 by what was sent", left)
	}
}

func TestCoalescerGivesUpAStatementThatNobodyWaitsFor(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limit := slow("limit", 100)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Global()); err != nil {
		t.Fatal(err)
	}
	release := holdFlights(t, coalescer, pool)
	ctx, cancel := context.WithCancel(t.Context())
	f := enqueue(t, coalescer, []context.Context{ctx, ctx}, limit.Global(), limit.Global())
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := limiter.Consume(t.Context(), tx, limit.Global()); err != nil {
		t.Fatal(err)
	}
	release()
	waitingFor(t, pool, tx)
	cancel()
	f.wg.Wait()
	coalescer.Close() // returns, though the row is locked
	for i := range f.errs {
		if !errors.Is(f.errs[i], context.Canceled) {
			t.Errorf("call %d: %v", i, f.errs[i])
		}
	}
}

func TestCoalescerRefusesBadRequestsAlone(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 100)
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, limit.Key("a"), limit.Key("b"))
	var limiter ratelimit.Limiter
	for request, want := range map[*ratelimit.Request]error{
		new(ratelimit.Request):                ratelimit.ErrInvalid,
		new(limit.Key("")):                    ratelimit.ErrInvalid,
		new(limit.Key("\x00")):                ratelimit.ErrInvalid,
		new(limit.Key("\xff")):                ratelimit.ErrInvalid,
		new(limit.Global().Count(math.NaN())): ratelimit.ErrInvalid,
		new(limit.Global().Count(101)):        ratelimit.ErrExceedsCapacity,
	} {
		if _, err := limiter.Consume(t.Context(), coalescer, *request); !errors.Is(err, want) {
			t.Errorf("%+v: %v", *request, err)
		}
	}
	release()
	f.wg.Wait()
	if f.errs[0] != nil || f.errs[1] != nil {
		t.Errorf("the good ones: %v", f.errs)
	}
}

// A server whose encoding lacks a character refuses the statement: that is one caller's doing, and his alone to pay for.
func TestCoalescerTextThatTheServerCannotStore(t *testing.T) {
	t.Parallel()
	admin := newPool(t, 1)
	name := "latin1_" + fmt.Sprint(rand.Uint32())
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name+" ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"); err != nil {
		t.Fatal(err)
	}
	config := admin.Config()
	config.MaxConns = 4
	config.ConnConfig.Database = name
	config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	startWith(t, config.ConnConfig, map[string]string{"search_path": "public"})
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pool.Close()
		if _, err := admin.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	if _, err := newGoose(t, db, migrationFiles(), migrations.VersionTable).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1)
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, limit.Key("é"), limit.Key("日本"), limit.Key("é"))
	release()
	f.wg.Wait()
	// Once they are taken apart, the first and the third go each for itself, and either may be the one that gets the token.
	if sqlState(f.errs[1]) != "22P05" || !(f.errs[0] == nil && denied(f.errs[2]) || denied(f.errs[0]) && f.errs[2] == nil) {
		t.Errorf("%v", f.errs)
	}
}

func TestCoalescerWhenTheDatabaseFails(t *testing.T) {
	t.Parallel()
	t.Run("batch", func(t *testing.T) { failWhileWaiting(t, 5) })
	t.Run("sum", func(t *testing.T) { failWhileWaiting(t, 1) })
}

func failWhileWaiting(t *testing.T, keys int) {
	t.Parallel()
	pool := newPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 100)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("0")); err != nil {
		t.Fatal(err)
	}
	var requests []ratelimit.Request
	for i := range 50 {
		requests = append(requests, limit.Key(fmt.Sprint(i%keys)))
	}
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, requests...)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := limiter.Consume(t.Context(), tx, limit.Key("0")); err != nil {
		t.Fatal(err)
	}
	release()
	waitingFor(t, pool, tx)
	if _, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))`,
		serverPID(t, tx)); err != nil {
		t.Fatal(err)
	}
	f.wg.Wait()
	for i, err := range f.errs {
		if sqlState(err) != "57P01" {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range keys {
		want := 100.0
		if i == 0 {
			want = 99
		}
		if left := remaining(t, pool, limit.Key(fmt.Sprint(i))); left < want-0.01 || left > want+0.01 {
			t.Errorf("key %d: %v tokens are left, want %v", i, left, want)
		}
	}
}

func TestCoalescerCloseDrains(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limit := slow("limit", 100)
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, limit.Global(), limit.Global())
	done := make(chan struct{})
	go func() { coalescer.Close(); close(done) }()
	var limiter ratelimit.Limiter
	for {
		// It joins the queue until Close has begun.
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		_, err := limiter.Consume(ctx, coalescer, limit.Global())
		cancel()
		if errors.Is(err, ratelimit.ErrClosed) {
			break
		}
	}
	select {
	case <-done:
		t.Error("closed while calls waited")
	default:
	}
	release()
	<-done
	f.wg.Wait()
	if f.errs[0] != nil || f.errs[1] != nil {
		t.Errorf("%v", f.errs)
	}
	if left := remaining(t, coalescer, limit.Global()); left < 97.99 || left > 98.01 {
		t.Errorf("%v tokens are left, want 98", left)
	}
	coalescer.Close()
}

func TestCoalescerOnASerializableDatabase(t *testing.T) {
	t.Parallel()
	for _, async := range []bool{false, true} {
		// Of 4 keys, two are asked for 260 of their 250 tokens, and two for 240.
		for keys, want := range map[int]float64{1: 0, 4: 20} {
			pool, s := traced(t, newPool(t, 2), 4, map[string]string{"default_transaction_isolation": "serializable"})
			limit := slow("limit", float64(1000/keys))
			var limiter ratelimit.Limiter
			var wg sync.WaitGroup
			for range 2 { // as in two processes
				coalescer := &ratelimit.Coalescer{Pool: pool, AsyncCommit: async}
				defer coalescer.Close()
				for range 10 {
					wg.Go(func() {
						for i := range 50 {
							if _, err := limiter.Consume(t.Context(), coalescer, limit.Key(fmt.Sprint(i%keys))); err != nil && !denied(err) {
								t.Error(err)
								return
							}
						}
					})
				}
			}
			wg.Wait()
			left := 0.0
			for i := range keys {
				left += remaining(t, pool, limit.Key(fmt.Sprint(i)))
			}
			if left < want || left > want+0.01 {
				t.Errorf("%d keys: %v tokens are left, want %v", keys, left, want)
			}
			t.Logf("%d keys: %d statements, failed: %v", keys, s.count(""), s.failed)
		}
	}
}

// Where a transaction has one snapshot, whatever was committed since would be a conflict.
func TestCoalescedCallsAreDecidedInReadCommittedAlone(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	for _, sql := range []string{
		`SELECT _ratelimit_consume_keys('limit', '{k}', 10, '1 hour', 10, '{2}')`,
		`SELECT _ratelimit_coalesce('{limit}', '{10}', '{1 hour}', '{10}', '{k}', '{1}', '{}', '{2}', '{1}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
	} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadUncommitted, pgx.RepeatableRead, pgx.Serializable} {
			err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), sql)
				return err
			})
			if want := map[bool]string{level != pgx.ReadCommitted: "RL003"}[true]; sqlState(err) != want {
				t.Errorf("%s: %s: %v, want SQLSTATE %q", level, sql, err, want)
			}
		}
	}
}

func TestCoalescerAsyncCommit(t *testing.T) {
	t.Parallel()
	for _, async := range []bool{false, true} {
		pool := newPool(t, 6)
		if _, err := pool.Exec(t.Context(), `CREATE TABLE settings (v text);
			CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO settings VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$;
			CREATE TRIGGER note BEFORE INSERT OR UPDATE ON rate_limits FOR EACH ROW WHEN (NEW.name <> 'hold') EXECUTE FUNCTION note()`); err != nil {
			t.Fatal(err)
		}
		want := "on"
		if async {
			want = "off"
		}
		coalescer := &ratelimit.Coalescer{Pool: pool, AsyncCommit: async}
		defer coalescer.Close()
		limit, sharded := slow("limit", 100), slow("sharded", 100, ratelimit.Shards(2))
		var limiter ratelimit.Limiter
		if _, err := limiter.Consume(t.Context(), coalescer, limit.Global()); err != nil { // alone
			t.Fatal(err)
		}
		release := holdFlights(t, coalescer, pool)
		f := enqueue(t, coalescer, nil, limit.Global(), limit.Global(), sharded.Global())
		release()
		f.wg.Wait()
		release = holdFlights(t, coalescer, pool)
		more := enqueue(t, coalescer, nil, limit.Key("a"), limit.Key("b"))
		release()
		more.wg.Wait()
		var n, right int
		if err := pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE v = $1) FROM settings`, want).Scan(&n, &right); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(append(f.errs, more.errs...)...); n < 5 || n != right || err != nil {
			t.Errorf("async %v: %d of %d rows were written with synchronous_commit %s; %v", async, right, n, want, err)
		}
		var now string
		for range 6 {
			if err := pool.QueryRow(t.Context(), `SHOW synchronous_commit`).Scan(&now); err != nil || now != "on" {
				t.Errorf("left behind: %s, %v", now, err)
			}
		}
	}
}

// The answer is there before the commit is, be that in the one round trip of an asynchronous commit or in a transaction that is
// told its level: an error of the commit must not be lost, nor what was answered be a result.
func TestACommitThatFailsGrantsNothing(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "serializable"} {
		pool, s := traced(t, newPool(t, 6), 6, map[string]string{"default_transaction_isolation": level})
		coalescers := []*ratelimit.Coalescer{{Pool: pool}, {Pool: pool, AsyncCommit: true}}
		limit := slow("limit", 10)
		for _, coalescer := range coalescers { // a batch finds out about the level
			defer coalescer.Close()
			release := holdFlights(t, coalescer, pool)
			f := enqueue(t, coalescer, nil, limit.Key("a"), limit.Key("b"))
			release()
			f.wg.Wait()
			if err := errors.Join(f.errs...); err != nil {
				t.Fatal(err)
			}
		}
		_, err := pool.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE integrity_constraint_violation; END $$;
			CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON rate_limits DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`)
		if err != nil {
			t.Fatal(err)
		}
		for i, coalescer := range coalescers {
			var observed ratelimit.Result
			limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { observed = d.Result }}
			begun := s.count("begin")
			want := ratelimit.Result{Requests: []ratelimit.Status{{Limit: limit, Key: "k", Count: 1}}}
			result, err := limiter.Consume(t.Context(), coalescer, limit.Key("k"))
			if sqlState(err) != "23000" || !reflect.DeepEqual(result, want) || !reflect.DeepEqual(observed, want) {
				t.Errorf("%s, coalescer %d: %+v, %v, want the error of the commit and no answer; observed %+v", level, i, result, err, observed)
			}
			if begun = s.count("begin") - begun; (begun > 0) != (level == "serializable") {
				t.Errorf("%s, coalescer %d: BEGIN was sent %d times", level, i, begun)
			}
		}
	}
}

func TestCoalescerShardedRows(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	three, one := slow("limit", 90, ratelimit.Shards(3)), slow("limit", 90)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, three.Key("a")); err != nil {
		t.Fatal(err)
	}
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, one.Key("a"), three.Key("b"), one.Key("a"), one.Key("c"), three.Key("b"))
	release()
	f.wg.Wait()
	// Each asks for more than a shard has, and no row is missing.
	if _, err := limiter.Consume(t.Context(), pool, three.Key("d")); err != nil {
		t.Fatal(err)
	}
	var decided int
	if err := pool.QueryRow(t.Context(), `SELECT cardinality(ord) FROM _ratelimit_consume_keys('limit', '{d}', 1e-9, '1 hour', 90, '{1}')`).Scan(&decided); err != nil || decided != 0 {
		t.Errorf("%d decided, %v, of what one of three shards has", decided, err)
	}
	other := &ratelimit.Coalescer{Pool: pool} // which knows no reason not to ask for sums
	defer other.Close()
	release = holdFlights(t, other, pool)
	more := enqueue(t, other, nil, one.Key("d").Count(40), one.Key("d").Count(40), one.Key("a"))
	release()
	more.wg.Wait()
	for i, err := range append(f.errs, more.errs...) {
		if err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	for _, c := range []struct {
		request ratelimit.Request
		want    float64
	}{{one.Key("a"), 86}, {three.Key("b"), 88}, {one.Key("c"), 89}, {one.Key("d"), 9}} {
		request, want := c.request, c.want
		if left := remaining(t, pool, request); left < want-0.01 || left > want+0.01 {
			t.Errorf("%v: %v tokens are left, want %v", request, left, want)
		}
	}
}

// A statement that has waited for a row finds it changed: by its value, or by its time alone, or, in a window, by its value
// alone. Each time it has to decide anew.
func TestCoalescerDecidesAnewOnWhatItWaitedFor(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket("bucket", 10, 10*time.Minute)
	window := ratelimit.FixedWindow("window", 10, 10*time.Minute, ratelimit.Start(noon))
	for _, c := range []struct {
		name    string
		limit   ratelimit.Limit
		minutes int     // after the first call
		taken   float64 // by the transaction that is waited for
		left    float64
	}{
		{"both", bucket, 0, 3, 4},
		{"the time", bucket, 1, 1, 7}, // 9 and a minute is 10; 9
		{"the value", window, 1, 3, 4},
		{"nothing", bucket, 0, 0, 7},
		{"all but one", bucket, 0, 8, 0}, // one is granted
		{"everything", bucket, 0, 9, 0},  // both are denied
	} {
		asked := c.limit.Key("k")
		decide := func(t *testing.T, requests ...ratelimit.Request) {
			t.Parallel()
			pool := newPool(t, 6)
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer coalescer.Close()
			limiter, clock := newLimiter()
			for _, request := range slices.Compact(slices.Clone(requests)) {
				if _, err := limiter.Consume(t.Context(), pool, request); err != nil {
					t.Fatal(err)
				}
			}
			clock.Advance(time.Duration(c.minutes) * time.Minute)
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := limiter.Charge(t.Context(), tx, asked.Count(c.taken)); err != nil {
				t.Fatal(err)
			}
			release := holdFlights(t, coalescer, pool)
			var wg sync.WaitGroup
			for _, request := range requests {
				a := newArrival(t.Context())
				wg.Go(func() {
					if _, err := limiter.Consume(a, coalescer, request); err != nil && !denied(err) {
						t.Error(err)
					}
				})
				<-a.arrived
			}
			release()
			waiting(t, pool, 1) // one statement for all
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			wg.Wait()
			result, err := limiter.Check(t.Context(), pool, asked.Count(0))
			if err != nil || result.Requests[0].Remaining != c.left {
				t.Errorf("%v are left, %v, want %v", result.Requests[0].Remaining, err, c.left)
			}
		}
		t.Run(c.name+", batch", func(t *testing.T) {
			decide(t, asked, asked, ratelimit.TokenBucket("other", 10, time.Minute).Key("k"))
		})
		t.Run(c.name+", keys", func(t *testing.T) { decide(t, asked, asked, c.limit.Key("other")) })
		t.Run(c.name+", sum", func(t *testing.T) { decide(t, asked, asked) })
	}
}

// Only calls whose clocks say the same are decided together.
func TestCoalescerDecidesEachCallByItsOwnClock(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	results, errs := make([]ratelimit.Result, 6), make([]error, 6)
	release := holdFlights(t, coalescer, pool)
	var wg sync.WaitGroup
	at := func(i int) time.Time { return noon.Add(time.Duration(i/2) * time.Minute) }
	for i := range results {
		limiter := &ratelimit.Limiter{Clock: func() time.Time { return at(i) }}
		a := newArrival(t.Context())
		wg.Go(func() { results[i], errs[i] = limiter.Consume(a, coalescer, limit.Key(fmt.Sprint(i))) })
		<-a.arrived
	}
	release()
	wg.Wait()
	for i, result := range results {
		if errs[i] != nil || !result.At.Equal(at(i)) {
			t.Errorf("call %d: %v, decided at %v, want %v", i, errs[i], result.At, at(i))
		}
	}
}

// What was refilled while a statement waited counts.
func TestCoalescerReadsTheClockAfterWaiting(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, 200*time.Millisecond)
	k, other := limit.Key("k"), ratelimit.TokenBucket("other", 2, time.Hour).Key("k")
	t.Run("batch", func(t *testing.T) { refilledWhileWaiting(t, false, k, k, other) })
	t.Run("batch, with a row", func(t *testing.T) { refilledWhileWaiting(t, true, k, k, other) })
	t.Run("keys", func(t *testing.T) { refilledWhileWaiting(t, true, k, k, limit.Key("other")) })
	t.Run("sum", func(t *testing.T) { refilledWhileWaiting(t, false, k, k) })
}

func refilledWhileWaiting(t *testing.T, rows bool, requests ...ratelimit.Request) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	var limiter ratelimit.Limiter
	if rows { // else the transaction is the first use
		for _, request := range slices.Compact(slices.Clone(requests)) {
			if _, err := limiter.Consume(t.Context(), pool, request.Count(0)); err != nil {
				t.Fatal(err)
			}
		}
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	release := holdFlights(t, coalescer, pool)
	if _, err := limiter.Consume(t.Context(), tx, requests[0].Count(2)); err != nil {
		t.Fatal(err)
	}
	f := enqueue(t, coalescer, nil, requests...)
	release()
	waiting(t, pool, 1)
	time.Sleep(250 * time.Millisecond) // by the database's clock, too
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.wg.Wait()
	for _, err := range f.errs {
		if err != nil {
			t.Error(err)
		}
	}
}

// TestCoalescerOverGrant is not parallel: it wants the machine for itself.
func TestCoalescerOverGrant(t *testing.T) {
	limit := ratelimit.TokenBucket("hot", perSecond, time.Second, ratelimit.Capacity(burst))
	pool := newPool(t, 8)
	// Two processes, so to speak.
	coalescers := []*ratelimit.Coalescer{{Pool: pool}, {Pool: pool}}
	var limiter ratelimit.Limiter
	var turn atomic.Int64
	take := func(ctx context.Context, key string) (ratelimit.Result, error) {
		return limiter.Consume(ctx, coalescers[turn.Add(1)%2], limit.Key(key))
	}
	// Others ask for other keys, so that statements are for several as well.
	others, enough := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for others.Err() == nil {
				if _, err := take(t.Context(), fmt.Sprint(i)); err != nil && !denied(err) {
					t.Error(err)
					return
				}
			}
		})
	}
	defer func() {
		enough()
		wg.Wait()
		for _, coalescer := range coalescers {
			coalescer.Close()
		}
	}()
	hammer(t, func(ctx context.Context) (ratelimit.Result, error) { return take(ctx, "k") }).exact(t, 0)
}

// TestCoalescerDoesNotDeadlock lets coalesced calls meet direct ones for several limits, transactions, and keys that come and
// go, in any order. Postgres would end a deadlock with 40P01, which the pools' tracers would see though it is retried.
func TestCoalescerDoesNotDeadlock(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	schema := newPool(t, 1)
	pool, s := traced(t, schema, 16, nil)
	coalescers := []*ratelimit.Coalescer{{Pool: pool}, {Pool: pool}}
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("a", 1e5, time.Second, ratelimit.MaxReserved(100)),
		ratelimit.FixedWindow("b", 500, 100*time.Millisecond),
		ratelimit.TokenBucket("c", 300, time.Second),
	}
	var limiter ratelimit.Limiter
	var granted [4]atomic.Int64
	var wg sync.WaitGroup
	const enough = 10 // in each way; on a busy machine that takes longer
	reached := func() bool {
		for way := range granted {
			if granted[way].Load() < enough {
				return false
			}
		}
		return true
	}
	begin := time.Now()
	for i := range 48 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for since := time.Duration(0); since < unlessShort(3*time.Second, time.Second) || since < time.Minute && !reached(); since = time.Since(begin) {
				var requests []ratelimit.Request
				for range oneOf(r, 1, 1, 2, 4) {
					request := oneOf(r, limits...).Key(fmt.Sprint(r.IntN(6))).Count(oneOf(r, 1, 1, 1, 0.5, 3))
					if r.IntN(5) == 0 {
						request = request.Reserve()
					}
					requests = append(requests, request)
				}
				var err error
				way := oneOf(r, 0, 0, 0, 0, 0, 0, 1, 2, 3)
				if i < 32 {
					way = 0
				}
				switch way {
				case 0:
					_, err = limiter.Consume(t.Context(), coalescers[i%2], requests...)
				case 1:
					_, err = limiter.Consume(t.Context(), pool, requests...)
				case 2:
					err = limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						_, err := limiter.Consume(ctx, tx, requests...)
						return err
					}, ratelimit.Isolation(pgx.ReadCommitted))
				case 3:
					err = limiter.Reset(t.Context(), pool, requests...)
				}
				if err == nil {
					granted[way].Add(1)
				} else if !denied(err) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
					t.Errorf("way %d: %v", way, err)
				}
			}
		})
	}
	wg.Wait()
	for _, coalescer := range coalescers {
		coalescer.Close()
	}
	again := 0
	for _, state := range s.failed {
		if state == "40P01" {
			t.Error("a deadlock")
		}
		again++
	}
	t.Logf("granted: %d coalesced, %d direct, %d in transactions, %d resets; %d statements, %d of them for many; %d run again", granted[0].Load(), granted[1].Load(),
		granted[2].Load(), granted[3].Load(), s.count(""), s.count("_ratelimit_coalesce"), again)
	for way := range granted {
		if granted[way].Load() < enough {
			t.Errorf("%d grants in way %d are no test", granted[way].Load(), way)
		}
	}
}

// A statement for many locks rows in the order in which a direct call for several does: who holds the first of them finds the
// second free.
func TestCoalescerLocksInTheOrderOfADirectCall(t *testing.T) {
	t.Parallel()
	one := slow("limit", 100)
	for _, c := range []struct {
		name          string
		first, second ratelimit.Request
	}{
		{"limits", slow("a limit", 100).Key("k"), slow("limit", 100).Key("k")},
		{"keys", one.Key("a").Count(0.5), one.Key("b")}, // a fraction: not by their sums
		{"sums", one.Key("a"), one.Key("b")},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 6)
			tracedPool, statements := traced(t, pool, 4, nil)
			coalescer := &ratelimit.Coalescer{Pool: tracedPool}
			defer coalescer.Close()
			var limiter ratelimit.Limiter
			if _, err := limiter.Consume(t.Context(), pool, c.first, c.second); err != nil {
				t.Fatal(err)
			}
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			if _, err := limiter.Consume(t.Context(), tx, c.first); err != nil {
				t.Fatal(err)
			}
			release := holdFlights(t, coalescer, pool)
			f := enqueue(t, coalescer, nil, c.second, c.first)
			release()
			waitingFor(t, pool, tx)
			if _, err := tx.Exec(t.Context(), `SET LOCAL lock_timeout = '100ms'`); err != nil { // before a deadlock is found
				t.Fatal(err)
			}
			if _, err := limiter.Consume(t.Context(), tx, c.second); err != nil {
				t.Errorf("%v: the statement that waits for the first holds the second", err)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Error(err)
			}
			f.wg.Wait()
			if err := errors.Join(f.errs...); err != nil {
				t.Error(err)
			}
			if slices.Contains(statements.failed, "40P01") { // found by the statement, whose wait began before
				t.Error("a deadlock")
			}
		})
	}
}

// A row that was deleted while a statement waited for it, and made anew, may be locked by somebody who waits for those that the
// statement has locked since. It does not wait for that, out of order, but begins again.
func TestCoalescerDoesNotWaitForARowMadeAnew(t *testing.T) {
	t.Parallel()
	limit := slow("limit", 100)
	t.Run("batch", func(t *testing.T) { madeAnewWhileWaiting(t, limit.Key("a"), slow("other", 100).Key("b")) })
	t.Run("keys", func(t *testing.T) { madeAnewWhileWaiting(t, limit.Key("a"), limit.Key("b")) })
}

func madeAnewWhileWaiting(t *testing.T, a, b ratelimit.Request) {
	t.Parallel()
	pool := newPool(t, 6)
	tracedPool, s := traced(t, pool, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: tracedPool}
	defer coalescer.Close()
	var limiter ratelimit.Limiter
	consume := func(db ratelimit.DB, request ratelimit.Request) {
		t.Helper()
		if _, err := limiter.Consume(t.Context(), db, request); err != nil {
			t.Error(err)
		}
	}
	consume(pool, a)
	consume(pool, b)
	begin := func() pgx.Tx {
		t.Helper()
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return tx
	}
	commit := func(tx pgx.Tx) {
		t.Helper()
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
	}

	anew := begin()
	if err := limiter.Reset(t.Context(), anew, a); err != nil {
		t.Fatal(err)
	}
	consume(anew, a)
	holder := begin()
	consume(holder, b)
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, a, b)
	release()
	waitingFor(t, pool, anew)
	commit(anew)
	waitingFor(t, pool, holder) // the statement has got as far as b
	tx := begin()
	consume(tx, a)
	done := make(chan struct{})
	go func() {
		defer close(done)
		consume(tx, b) // after the statement
	}()
	waiting(t, pool, 2)
	commit(holder)
	<-done
	commit(tx)
	f.wg.Wait()
	for _, err := range f.errs {
		if err != nil {
			t.Error(err)
		}
	}
	if slices.Contains(s.failed, "40P01") {
		t.Error("a deadlock")
	}
	for request, want := range map[ratelimit.Request]float64{a: 97, b: 96} {
		if left := remaining(t, pool, request); left < want || left > want+0.01 {
			t.Errorf("%v are left, want %v", left, want)
		}
	}
}

// Several flights find out at the same time that the database's default isolation level is another.
func TestCoalescersFirstCallsOnASerializableDatabaseAreAllDecided(t *testing.T) {
	t.Parallel()
	config := newPool(t, 1).Config()
	startWith(t, config.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
	config.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	for round := range 20 {
		coalescer := &ratelimit.Coalescer{Pool: pool}
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				if _, err := limiter.Consume(t.Context(), coalescer, limit.Key(fmt.Sprint(round), fmt.Sprint(i))); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		coalescer.Close()
	}
}

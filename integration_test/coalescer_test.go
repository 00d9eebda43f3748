package integration_test

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

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

// hold keeps both places of a coalescer busy, with calls that wait for a row, until the function it returns is called.
func hold(t *testing.T, coalescer *ratelimit.Coalescer, pool *pgxpool.Pool) (release func()) {
	t.Helper()
	limit := ratelimit.TokenBucket("hold", 1e9, time.Hour)
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
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if _, err := limiter.Consume(t.Context(), coalescer, limit.Global()); err != nil {
				t.Error(err)
			}
		})
	}
	for waiting := 0; waiting < 2; time.Sleep(time.Millisecond) {
		err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
			WHERE NOT granted AND query LIKE '%ratelimit_consume%' AND $1 = ANY (pg_blocking_pids(pid) || pid)
			  OR NOT granted AND query LIKE '%ratelimit_consume%' AND pg_blocking_pids(pid) && (
				SELECT array_agg(pid) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid)))`,
			tx.Conn().PgConn().PID()).Scan(&waiting)
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
	coalescer := ratelimit.NewCoalescer(together)
	defer coalescer.Close()
	limiter, clock := newLimiter()
	type call struct {
		verb     string
		asks     []ask
		requests []ratelimit.Request
		result   ratelimit.Result
		err      error
	}
	granted, denials := 0, 0
	limits := make([]ratelimit.Limit, 3)
	for round := range rounds {
		for i := range limits {
			if round == 0 || r.IntN(8) == 0 {
				limits[i] = randomLimit(r, fmt.Sprintf("limit %d", i), 1)
			}
		}
		clock.Advance(time.Duration(oneOf(r, 0, 1, r.Int64N(2e3), r.Int64N(1e6), r.Int64N(1e8), r.Int64N(1e11), -r.Int64N(1e9))) * time.Microsecond)
		several, reserve, keys := oneOf(r, 0, 0, 3), oneOf(r, 0, 0, 2), oneOf(r, 1, 3, 50)
		changing := r.IntN(4) == 0
		same := randomTokens(r, limits[0].Capacity())
		whole := r.IntN(2) == 0
		calls := make([]call, oneOf(r, 1, 5, 40))
		for i := range calls {
			c := &calls[i]
			c.verb = "consume"
			if r.IntN(5) == 0 && reserve > 0 {
				c.verb = "charge"
			}
			for range 1 + r.IntN(several+1) {
				limit := oneOf(r, limits...)
				if changing && r.IntN(3) == 0 {
					limit = randomLimit(r, limit.Name(), 1)
				}
				a := ask{limit: limit, key: fmt.Sprint(r.IntN(keys)), count: same, reserve: reserve > 0 && r.IntN(3) == 0}
				switch {
				case whole:
					a.count = 1
				case r.IntN(3) == 0:
					a.count = randomTokens(r, limit.Capacity())
				}
				c.asks, c.requests = append(c.asks, a), append(c.requests, a.request())
			}
		}

		release := hold(t, coalescer, together)
		var wg sync.WaitGroup
		for i := range calls {
			c := &calls[i]
			ctx := newArrival(t.Context())
			gone := make(chan struct{})
			wg.Go(func() {
				defer close(gone)
				c.result, c.err = call2(ctx, limiter, coalescer, c.verb, c.requests)
			})
			select {
			case <-ctx.arrived:
			case <-gone: // it was refused
			}
		}
		release()
		wg.Wait()

		for i, c := range calls {
			want, wantErr := call2(t.Context(), limiter, apart, c.verb, c.requests)
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
		delete(got, rowsOf{"hold", ""})
		if !maps.EqualFunc(got, want, slices.Equal) {
			t.Fatalf("round %d\ntogether %v\napart    %v", round, got, want)
		}
	}
	t.Logf("%d granted, %d denied", granted, denials)
	if granted < rounds || denials < rounds {
		t.Errorf("%d grants and %d denials are no test", granted, denials)
	}
}

func call2(ctx context.Context, limiter *ratelimit.Limiter, db ratelimit.DB, verb string, requests []ratelimit.Request) (ratelimit.Result, error) {
	return call(ctx, limiter, db, verb, time.Time{}, requests)
}

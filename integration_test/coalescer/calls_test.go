package coalescer_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestCoalescerIsExact lets random calls arrive in a known order while others are at the database, so that one statement
// decides them. It makes the same calls one after another on a pool of another database. All answers and the tables must be
// equal.
func TestCoalescerIsExact(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for i := range 3 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			playBatches(t, 60)
		})
	}
}

func playBatches(t *testing.T, rounds int) {
	r := harness.NewRand(t)
	together, apart := harness.NewPool(t, 6), harness.NewPool(t, 1)
	coalescer := &ratelimit.Coalescer{Pool: together}
	defer harness.CloseCoalescer(t, coalescer)
	limiter, clock := harness.NewLimiter()
	type asked struct {
		verb     string
		asks     []harness.Ask
		requests []ratelimit.Request
		result   harness.Answered
		err      error
	}
	granted, denials := 0, 0
	limits := make([]ratelimit.Limit, 3)
	for round := 0; round < rounds || granted < rounds || denials < rounds; round++ { // until there were enough grants and denials
		if round == 5*rounds {
			t.Fatalf("%d grants and %d denials in %d rounds: this tested too little", granted, denials, round)
		}
		for i := range limits {
			if round == 0 || r.IntN(8) == 0 {
				limits[i] = harness.RandomLimitOfAnyKind(r, fmt.Sprintf("limit %d", i), 1)
			}
		}
		clock.Advance(time.Duration(harness.OneOf(r, 0, 1, r.Int64N(2e3), r.Int64N(1e6), r.Int64N(1e8), r.Int64N(1e11), r.Int64N(1e13), -r.Int64N(1e9))) * time.Microsecond)
		several, reserve, keys := harness.OneOf(r, 0, 0, 3), harness.OneOf(r, 0, 0, 2), harness.OneOf(r, 1, 3, 50)
		changing := r.IntN(4) == 0
		same := harness.RandomTokens(r, limits[0].Capacity())
		whole, equal, of := r.IntN(2) == 0, r.IntN(2) == 0, limits[:harness.OneOf(r, 1, 1, 3)]
		calls := make([]asked, harness.OneOf(r, 1, 5, 40))
		for i := range calls {
			c := &calls[i]
			c.verb = "consume"
			if r.IntN(5) == 0 && reserve > 0 {
				c.verb = "charge"
			}
			reserving := c.verb == "consume" && several == 0 && reserve > 0 && r.IntN(3) == 0
			for range 1 + r.IntN(several+1) {
				limit := harness.OneOf(r, of...)
				if changing && r.IntN(3) == 0 {
					limit = harness.RandomLimitOfAnyKind(r, limit.Name(), 1)
				}
				a := harness.Ask{Limit: limit, Key: fmt.Sprint(r.IntN(keys)), Count: same}
				if reserving && limit.Config().Kind == "token bucket" { // others go straight to the pool, in no known order
					c.verb = "reserve"
				}
				switch {
				case whole:
					a.Count = 1
				case !equal && r.IntN(3) == 0:
					a.Count = harness.RandomTokens(r, limit.Capacity())
				}
				c.asks, c.requests = append(c.asks, a), append(c.requests, a.Request())
			}
		}

		// A call that is denied for a calendar's row of long ago is asked again, after the others (call.unsure). Tests of its own say so.
		for _, c := range calls {
			for _, a := range c.asks {
				if a.Limit.Config().Kind == "calendar window" {
					for _, pool := range []*pgxpool.Pool{together, apart} {
						_, err := pool.Exec(t.Context(), "DELETE FROM ratelimit.limits WHERE name = $1 AND ts < $2::timestamptz - 10 * replace($3, '1 quarter', '3 months')::interval",
							a.Limit.Name(), clock.At, a.Limit.Config().Period)
						if err != nil {
							t.Fatal(err)
						}
					}
				}
			}
		}

		call := func(ctx context.Context, db ratelimit.DB, c asked) (harness.Answered, error) {
			// Each call has its own Limiter: a Limiter refuses a name with two definitions.
			l := &ratelimit.Limiter{Clock: limiter.Clock}
			if c.verb == "charge" {
				result, err := l.Charge(ctx, db, c.requests...)
				return harness.Answered{Result: result}, err
			}
			return harness.Decide(ctx, l, db, c.verb == "reserve", c.requests...)
		}
		release := harness.HoldFlights(t, coalescer, together)
		var wg sync.WaitGroup
		for i := range calls {
			c := &calls[i]
			ctx := harness.NewArrival(t.Context())
			gone := make(chan struct{})
			wg.Go(func() {
				defer close(gone)
				c.result, c.err = call(ctx, coalescer, *c)
			})
			select {
			case <-ctx.Arrived:
			case <-gone: // the call was refused
			}
		}
		release()
		wg.Wait()

		for i, c := range calls {
			want, wantErr := call(t.Context(), apart, c)
			if fmt.Sprint(c.err) != fmt.Sprint(wantErr) || !reflect.DeepEqual(c.result, want) {
				t.Fatalf("round %d, call %d of %d at %v: %s %+v\ntogether %+v, %v\napart    %+v, %v", round, i, len(calls), clock.At, c.verb, c.asks, c.result, c.err, want, wantErr)
			}
			switch {
			case c.err == nil:
				granted++
			case harness.Denied(c.err):
				denials++
			}
		}
		got, want := harness.ReadTable(t, together), harness.ReadTable(t, apart)
		delete(got, harness.RowsOf{Name: "hold", Key: "a"})
		delete(got, harness.RowsOf{Name: "hold", Key: "b"})
		if !maps.EqualFunc(got, want, slices.Equal) {
			t.Fatalf("round %d\ntogether %v\napart    %v", round, got, want)
		}
	}
	t.Logf("%d granted, %d denied", granted, denials)
}

func TestCoalescerDecidesWhatWaitsTogether(t *testing.T) {
	t.Parallel()
	schema := harness.NewPool(t, 2)
	pool, s := harness.Traced(t, schema, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit, alone := harness.Slow("limit", 100), harness.Slow("alone", 100).Global()
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), schema, alone); err != nil { // makes its row, which the plain UPDATE needs
		t.Fatal(err)
	}
	for range 10 { // lone calls go straight through
		if _, err := limiter.Consume(t.Context(), coalescer, alone); err != nil {
			t.Fatal(err)
		}
	}
	if n, all := s.Count("ratelimit._wire_consume"), s.Count(""); n != 10 || all != 10 {
		t.Errorf("%d statements, %d of them of the ordinary kind, want 10", all, n)
	}
	var requests []ratelimit.Request
	for i := range 300 {
		requests = append(requests, limit.Key(fmt.Sprint(i%2)))
	}
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.Enqueue(t, coalescer, nil, requests...)
	release()
	f.Wg.Wait()
	for i, err := range f.Errs {
		if want := i < 200; (err == nil) != want || err != nil && !harness.Denied(err) {
			t.Errorf("call %d: %v, want granted %v", i, err, want)
		}
	}
	if n := s.Count("ratelimit._coalesce"); n != 1 {
		t.Errorf("%d statements for 300 calls, want 1", n)
	}
}

func TestCoalescerDenialsWriteNothing(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit, other := harness.Slow("limit", 3), harness.Slow("other", 1)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Global().Count(3)); err != nil {
		t.Fatal(err)
	}
	row := func() (xmin, xmax string) {
		if err := pool.QueryRow(t.Context(), `SELECT xmin::text, xmax::text FROM ratelimit.limits WHERE name = 'limit' AND key = ''`).Scan(&xmin, &xmax); err != nil {
			t.Fatal(err)
		}
		return xmin, xmax
	}
	xmin, xmax := row()
	for _, requests := range [][]ratelimit.Request{
		{limit.Global(), limit.Global(), limit.Global()},   // one sum
		{limit.Key("new"), limit.Global(), limit.Global()}, // sums of keys, one without a row
		{other.Key("new"), limit.Global(), limit.Global()}, // without a row
		{other.Key("new").Count(0), limit.Global(), limit.Global()},
	} {
		release := harness.HoldFlights(t, coalescer, pool)
		f := harness.Enqueue(t, coalescer, nil, requests...)
		release()
		f.Wg.Wait()
		for i, err := range f.Errs {
			if want := requests[i] == limit.Global(); harness.Denied(err) != want || !want && err != nil {
				t.Errorf("call %d: %v, want denied %v", i, err, want)
			}
		}
		if xmin2, xmax2 := row(); xmin2 != xmin || xmax2 != xmax {
			t.Errorf("the row was %s, %s and is %s, %s", xmin, xmax, xmin2, xmax2)
		}
	}
}

func TestCoalescerOnASerializableDatabase(t *testing.T) {
	t.Parallel()
	for _, async := range []bool{false, true} {
		// With 4 keys, two get calls for 260 of their 250 tokens, and two for 240.
		for keys, want := range map[int]float64{1: 0, 4: 20} {
			pool, s := harness.Traced(t, harness.NewPool(t, 2), 4, map[string]string{"default_transaction_isolation": "serializable"})
			limit := harness.Slow("limit", float64(1000/keys))
			var limiter ratelimit.Limiter
			var wg sync.WaitGroup
			for range 2 { // two coalescers, as in two processes
				coalescer := &ratelimit.Coalescer{Pool: pool, AsyncCommit: async}
				defer harness.CloseCoalescer(t, coalescer)
				for range 10 {
					wg.Go(func() {
						for i := range 50 {
							if _, err := limiter.Consume(t.Context(), coalescer, limit.Key(fmt.Sprint(i%keys))); err != nil && !harness.Denied(err) {
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
				left += harness.Remaining(t, pool, limit.Key(fmt.Sprint(i)))
			}
			if left < want || left > want+0.01 {
				t.Errorf("%d keys: %v tokens are left, want %v", keys, left, want)
			}
			t.Logf("%d keys: %d statements, failed: %v", keys, s.Count(""), s.Failed)
		}
	}
}

// Where a transaction has one snapshot, everything committed since then would be a conflict.
func TestCoalescedCallsAreDecidedInReadCommittedAlone(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	for _, sql := range []string{
		`SELECT ratelimit._consume_keys('limit', '{k}', 10, '1 hour', 10, '{2}')`,
		`SELECT ratelimit._coalesce('{limit}', '{10}', '{1 hour}', '{10}', '{k}', '{1}', '{}', '{2}', '{1}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
	} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadUncommitted, pgx.RepeatableRead, pgx.Serializable} {
			err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), sql)
				return err
			})
			if want := map[bool]string{level != pgx.ReadCommitted: "RL003"}[true]; harness.SQLState(err) != want {
				t.Errorf("%s: %s: %v, want SQLSTATE %q", level, sql, err, want)
			}
		}
	}
}

func TestCoalescerAsyncCommit(t *testing.T) {
	t.Parallel()
	for _, async := range []bool{false, true} {
		pool := harness.NewPool(t, 6)
		if _, err := pool.Exec(t.Context(), `CREATE TABLE settings (v text);
			CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO settings VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$;
			CREATE TRIGGER note BEFORE INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW WHEN (NEW.name <> 'hold') EXECUTE FUNCTION note()`); err != nil {
			t.Fatal(err)
		}
		want := "on"
		if async {
			want = "off"
		}
		coalescer := &ratelimit.Coalescer{Pool: pool, AsyncCommit: async}
		defer harness.CloseCoalescer(t, coalescer)
		limit, sharded := harness.Slow("limit", 100), harness.Slow("sharded", 100, ratelimit.Shards(2))
		var limiter ratelimit.Limiter
		if _, err := limiter.Consume(t.Context(), coalescer, limit.Global()); err != nil { // sent alone
			t.Fatal(err)
		}
		release := harness.HoldFlights(t, coalescer, pool)
		f := harness.Enqueue(t, coalescer, nil, limit.Global(), limit.Global(), sharded.Global())
		release()
		f.Wg.Wait()
		release = harness.HoldFlights(t, coalescer, pool)
		more := harness.Enqueue(t, coalescer, nil, limit.Key("a"), limit.Key("b"))
		release()
		more.Wg.Wait()
		var n, right int
		if err := pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE v = $1) FROM settings`, want).Scan(&n, &right); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(append(f.Errs, more.Errs...)...); n < 5 || n != right || err != nil {
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

func TestCoalescerShardedRows(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	three, one := harness.Slow("limit", 90, ratelimit.Shards(3)), harness.Slow("limit", 90)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, three.Key("a")); err != nil {
		t.Fatal(err)
	}
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.Enqueue(t, coalescer, nil, one.Key("a"), three.Key("b"), one.Key("a"), one.Key("c"), three.Key("b"))
	release()
	f.Wg.Wait()
	// Each call asks for more than a shard has, and no row is missing.
	if _, err := limiter.Consume(t.Context(), pool, three.Key("d")); err != nil {
		t.Fatal(err)
	}
	var decided int
	if err := pool.QueryRow(t.Context(), `SELECT cardinality(ord) FROM ratelimit._consume_keys('limit', '{d}', 1e-9, '1 hour', 90, '{1}')`).Scan(&decided); err != nil || decided != 0 {
		t.Errorf("%d decided, %v, of what one of three shards has", decided, err)
	}
	other := &ratelimit.Coalescer{Pool: pool} // it has no reason yet not to ask for sums
	defer harness.CloseCoalescer(t, other)
	release = harness.HoldFlights(t, other, pool)
	more := harness.Enqueue(t, other, nil, one.Key("d").Count(40), one.Key("d").Count(40), one.Key("a"))
	release()
	more.Wg.Wait()
	for i, err := range append(f.Errs, more.Errs...) {
		if err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	for _, c := range []struct {
		request ratelimit.Request
		want    float64
	}{{one.Key("a"), 86}, {three.Key("b"), 88}, {one.Key("c"), 89}, {one.Key("d"), 9}} {
		request, want := c.request, c.want
		if left := harness.Remaining(t, pool, request); left < want-0.01 || left > want+0.01 {
			t.Errorf("%v: %v tokens are left, want %v", request, left, want)
		}
	}
}

// TestCoalescerOverGrant is not parallel: it needs the whole machine.
func TestCoalescerOverGrant(t *testing.T) {
	limit := ratelimit.TokenBucket("hot", harness.PerSecond, time.Second, ratelimit.Capacity(harness.Burst))
	pool := harness.NewPool(t, 8)
	// These stand for two processes.
	coalescers := []*ratelimit.Coalescer{{Pool: pool}, {Pool: pool}}
	var limiter ratelimit.Limiter
	var turn atomic.Int64
	take := func(ctx context.Context, key string) (ratelimit.Result, error) {
		return limiter.Consume(ctx, coalescers[turn.Add(1)%2], limit.Key(key))
	}
	// Other callers ask for other keys, so that some statements are for several keys.
	others, enough := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for others.Err() == nil {
				if _, err := take(t.Context(), fmt.Sprint(i)); err != nil && !harness.Denied(err) {
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
			harness.CloseCoalescer(t, coalescer)
		}
	}()
	harness.Hammer(t, func(ctx context.Context) (ratelimit.Result, error) { return take(ctx, "k") }).Exact(t, 0)
}

// A key without a row is full for each plan of its limit. One call of the batch asks by the small plan and takes nothing, since its other
// limit is used up; the next one asks by the large plan.
func TestCoalescerInsertsARowThatIsFullForEveryPlan(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	small, large, used := harness.Slow("limit", 10), harness.Slow("limit", 20), harness.Slow("used", 1)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, used.Global()); err != nil {
		t.Fatal(err)
	}
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.EnqueueSeveral(t.Context(), t, coalescer,
		[]ratelimit.Request{small.Key("new").Count(5), used.Global()},
		[]ratelimit.Request{large.Key("new").Count(15)})
	release()
	f.Wg.Wait()
	if !harness.Denied(f.Errs[0]) || f.Errs[1] != nil {
		t.Errorf("the calls: %v; %v; want a denial and a grant", f.Errs[0], f.Errs[1])
	}
	if left := harness.Remaining(t, pool, large.Key("new")); math.Abs(left-5) > 1e-6 {
		t.Errorf("%v tokens are left, want 5", left)
	}
}

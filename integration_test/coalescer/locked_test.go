package coalescer_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// lock makes a transaction consume requests and hold their rows until it is rolled back.
func lock(t *testing.T, pool *pgxpool.Pool, requests ...ratelimit.Request) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unlock(t, tx) })
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), tx, requests...); err != nil {
		t.Fatal(err)
	}
	return tx
}

// unlock rolls a transaction back, unless that is done already.
func unlock(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		t.Error(err)
	}
}

// together makes calls on a Coalescer at the same time, and returns their errors.
func together(ctx context.Context, coalescer *ratelimit.Coalescer, calls [][]ratelimit.Request) []error {
	var limiter ratelimit.Limiter
	errs := make([]error, len(calls))
	var wg sync.WaitGroup
	for i, requests := range calls {
		wg.Go(func() { _, errs[i] = limiter.Consume(ctx, coalescer, requests...) })
	}
	wg.Wait()
	return errs
}

// expectGone compares the tokens missing from rows that had 1000 with the callers' answers. It first waits until no row is
// locked.
func expectGone(t *testing.T, pool *pgxpool.Pool, calls [][]ratelimit.Request, errs []error) {
	t.Helper()
	told := map[ratelimit.Request]float64{}
	for i, requests := range calls {
		for _, request := range requests {
			if told[request] += 0; errs[i] == nil {
				told[request]++
			}
		}
	}
	for request, want := range told {
		if gone := 1000 - harness.Remaining(t, pool, request); gone < want-0.01 || gone > want+0.01 {
			t.Errorf("%v: %v tokens are gone, and %v granted", request, gone, want)
		}
	}
}

// A transaction locks a key for longer than statements may wait. Only the calls for that key fail.
func TestALockedKeyFailsOnlyItsOwnCalls(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	limit, team := harness.Slow("limit", 1000), harness.Slow("a team", 1000) // the team's row is locked first
	key := func(i int) ratelimit.Request { return limit.Key(fmt.Sprint(i)) }
	calls := func(keys int, of func(i int) []ratelimit.Request) (calls [][]ratelimit.Request) {
		for i := range 200 {
			calls = append(calls, of(i%keys))
		}
		return calls
	}
	one := func(i int) []ratelimit.Request { return []ratelimit.Request{key(i)} }
	for _, c := range []struct {
		name    string
		setting string
		state   string
		calls   [][]ratelimit.Request
		locked  []ratelimit.Request
		new     bool // the keys have no rows yet
		db      *ratelimit.Coalescer
	}{
		{name: "lock_timeout", setting: "lock_timeout", state: "55P03", calls: calls(10, one), locked: one(4)},
		{name: "statement_timeout", setting: "statement_timeout", state: "57014", calls: calls(10, one), locked: one(4)},
		{name: "several", setting: "lock_timeout", state: "55P03", calls: calls(10, one), locked: []ratelimit.Request{key(0), key(1), key(7)}},
		{name: "of many", setting: "lock_timeout", state: "55P03", calls: calls(100, one), locked: []ratelimit.Request{key(0), key(50)}},
		{name: "all but one", setting: "lock_timeout", state: "55P03", calls: calls(4, one), locked: []ratelimit.Request{key(0), key(1), key(2)}},
		{name: "one key alone", setting: "lock_timeout", state: "55P03", calls: calls(1, one), locked: one(0)},
		{name: "new keys", setting: "lock_timeout", state: "55P03", calls: calls(10, one), locked: one(4), new: true},
		{name: "with Pace", setting: "lock_timeout", state: "55P03", calls: calls(10, one), locked: one(4), db: &ratelimit.Coalescer{Pace: 5 * time.Millisecond}},
		{name: "with AsyncCommit", setting: "lock_timeout", state: "55P03", calls: calls(10, one), locked: one(4), db: &ratelimit.Coalescer{AsyncCommit: true}},
		{
			name: "several limits", setting: "lock_timeout", state: "55P03", locked: []ratelimit.Request{key(0), key(4)},
			calls: calls(10, func(i int) []ratelimit.Request { return []ratelimit.Request{team.Global(), key(i)} }),
		},
		{
			name: "a limit of all", setting: "lock_timeout", state: "55P03", locked: []ratelimit.Request{team.Global()},
			calls: slices.Concat(calls(10, one), calls(10, func(i int) []ratelimit.Request { return []ratelimit.Request{team.Global(), key(i)} })),
		},
		{
			name: "a limit of some", setting: "statement_timeout", state: "57014", locked: []ratelimit.Request{team.Key("1")},
			calls: calls(50, func(i int) []ratelimit.Request { return []ratelimit.Request{team.Key(fmt.Sprint(i % 5)), key(i)} }),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			admin := harness.NewPool(t, 4)
			// With one setting, only a lock makes a statement wait too long. With the other, a busy machine can, too.
			pool, _ := harness.Traced(t, admin, 4, map[string]string{c.setting: map[string]string{"lock_timeout": "200ms", "statement_timeout": "2s"}[c.setting]})
			coalescer := cmp.Or(c.db, &ratelimit.Coalescer{})
			coalescer.Pool = pool
			defer harness.CloseCoalescer(t, coalescer)
			var limiter ratelimit.Limiter
			for _, requests := range c.calls {
				for _, request := range requests {
					if c.new {
						break
					}
					if _, err := limiter.Consume(t.Context(), admin, request.Count(0)); err != nil {
						t.Fatal(err)
					}
				}
			}
			tx := lock(t, admin, c.locked...)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // less than one statement_timeout for each call
			defer cancel()
			errs := together(ctx, coalescer, c.calls)
			for i, err := range errs {
				asked := slices.ContainsFunc(c.calls[i], func(r ratelimit.Request) bool { return slices.Contains(c.locked, r) })
				if asked && harness.SQLState(err) != c.state || !asked && err != nil {
					t.Errorf("call %d, for %v: %v", i, c.calls[i], err)
				}
			}
			unlock(t, tx)
			expectGone(t, admin, c.calls, errs)
			// What the Coalescer remembers of these calls delays no other call.
			if err := errors.Join(together(t.Context(), coalescer, c.calls)...); err != nil {
				t.Error(err)
			}
		})
	}
}

// newCoalescer makes a Coalescer on a pool of conns connections. The test may use all but two of them.
func newCoalescer(t *testing.T, conns int) (*pgxpool.Pool, *ratelimit.Coalescer) {
	t.Helper()
	pool := harness.NewPool(t, conns)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
	return pool, coalescer
}

// A call for two keys is not overtaken by calls for the second while the first is at the database. If it leaves, they go
// on.
func TestACallThatLeavesHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	pool, coalescer := newCoalescer(t, 6)
	limit := harness.Slow("limit", 1000)
	a, b := limit.Key("a"), limit.Key("b")
	tx := lock(t, pool, a)
	first := harness.Enqueue(t, coalescer, nil, a)
	harness.WaitingFor(t, pool, tx)
	ctx, cancel := context.WithCancel(t.Context())
	both := harness.EnqueueSeveral(ctx, t, coalescer, []ratelimit.Request{a, b})
	behind := harness.Enqueue(t, coalescer, nil, b, b)
	time.Sleep(200 * time.Millisecond) // nothing else is about to look at the queue when it leaves
	cancel()
	both.Wg.Wait()
	if err := both.Err(0); !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("who has left: %v", err)
	}
	harness.Eventually(t, "those behind are decided, while a is locked", func() bool {
		return harness.Remaining(t, pool, b) < 998.5
	})
	unlock(t, tx)
	first.Wg.Wait()
	behind.Wg.Wait()
	if err := errors.Join(append(first.Errs, behind.Errs...)...); err != nil {
		t.Error(err)
	}
}

// A key whose own call has timed out is sent apart: it delays no other key's call. A call that is refused there gives the place
// for such calls back.
func TestAKeyThatTimedOutByItselfIsSentApart(t *testing.T) {
	t.Parallel()
	admin := harness.NewPool(t, 4)
	pool, s := harness.Traced(t, admin, 4, map[string]string{"lock_timeout": "100ms"})
	coalescer := &ratelimit.Coalescer{Pool: pool, Pace: time.Second} // a busy machine that needs longer to queue two calls tests less
	defer harness.CloseCoalescer(t, coalescer)
	limit := harness.Slow("limit", 1000)
	a, b := limit.Key("a"), limit.Key("b")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var limiter ratelimit.Limiter
	consume := func() string { return harness.SQLState(harness.Second(limiter.Consume(ctx, coalescer, a))) }

	tx := lock(t, admin, a)
	if state := consume(); state != "55P03" {
		t.Fatalf("SQLSTATE %s, want lock_not_available", state)
	}
	queued := harness.Enqueue(t, coalescer, nil, b, a)
	queued.Wg.Wait()
	if queued.Errs[0] != nil || harness.SQLState(queued.Errs[1]) != "55P03" {
		t.Errorf("%v, want an error of the locked key alone", queued.Errs)
	}
	if len(s.Failed) != 2 {
		t.Errorf("%v: a statement with another key has waited for the lock", s.Failed)
	}
	unlock(t, tx)

	harness.MustExec(t, admin, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '23000'; END $$;
		CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW WHEN (NEW.key = 'a') EXECUTE FUNCTION refuse()`)
	if state := consume(); state != "23000" {
		t.Errorf("SQLSTATE %s, want the trigger's", state)
	}
	harness.MustExec(t, admin, `DROP TRIGGER refuse ON ratelimit.limits`)
	if _, err := limiter.Consume(ctx, coalescer, a); err != nil {
		t.Errorf("after a call that was refused: %v", err)
	}
}

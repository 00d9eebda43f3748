package integration_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// lock has a transaction consume requests, and hold their rows until it is rolled back.
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

// unlock rolls a transaction back, if that was not done yet.
func unlock(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		t.Error(err)
	}
}

// cancelWaiting has the server cancel the statement that waits for a transaction (57014), as a timeout would.
func cancelWaiting(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx) {
	t.Helper()
	waitingFor(t, pool, tx)
	if _, err := pool.Exec(t.Context(), "SELECT pg_cancel_backend(pid) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))", serverPID(t, tx)); err != nil {
		t.Fatal(err)
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

// expectGone compares what is gone from rows that held 1000 with what the callers were told, when nothing is locked any more.
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
		if gone := 1000 - remaining(t, pool, request); gone < want-0.01 || gone > want+0.01 {
			t.Errorf("%v: %v tokens are gone, and %v granted", request, gone, want)
		}
	}
}

// A key that a transaction has locked for longer than statements may wait fails those that asked for it, and nobody else.
func TestALockedKeyFailsOnlyItsOwnCalls(t *testing.T) {
	t.Parallel()
	limit, team := slow("limit", 1000), slow("a team", 1000) // whose rows are locked first
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
			admin := newPool(t, 4)
			// Only a lock makes statements wait for the one; for the other, a busy machine is enough.
			pool, _ := traced(t, admin, 4, map[string]string{c.setting: map[string]string{"lock_timeout": "200ms", "statement_timeout": "2s"}[c.setting]})
			coalescer := cmp.Or(c.db, &ratelimit.Coalescer{})
			coalescer.Pool = pool
			defer coalescer.Close()
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
			errs := together(t.Context(), coalescer, c.calls)
			for i, err := range errs {
				asked := slices.ContainsFunc(c.calls[i], func(r ratelimit.Request) bool { return slices.Contains(c.locked, r) })
				if asked && sqlState(err) != c.state || !asked && err != nil {
					t.Errorf("call %d, for %v: %v", i, c.calls[i], err)
				}
			}
			unlock(t, tx)
			expectGone(t, admin, c.calls, errs)
			// What is remembered of them holds nobody up.
			if err := errors.Join(together(t.Context(), coalescer, c.calls)...); err != nil {
				t.Error(err)
			}
		})
	}
}

// While rows are locked, calls for others go on. Those for the locked ones take one place of the two.
func TestLockedKeysLeaveOthersTheirThroughput(t *testing.T) {
	t.Parallel()
	admin := newPool(t, 4)
	pool, _ := traced(t, admin, 4, map[string]string{"lock_timeout": "1s"})
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1e6)
	locked := []ratelimit.Request{limit.Key("locked", "1"), limit.Key("locked", "2"), limit.Key("locked", "3")}
	tx := lock(t, admin, locked...)
	var limiter ratelimit.Limiter
	var failures, decided atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := limiter.Consume(t.Context(), coalescer, limit.Key(fmt.Sprint(i))); err != nil {
					t.Errorf("a key that nobody has locked: %v", err)
					return
				}
				decided.Add(1)
			}
		})
	}
	for _, request := range locked {
		wg.Go(func() {
			for range 3 {
				if _, err := limiter.Consume(t.Context(), coalescer, request); sqlState(err) != "55P03" {
					t.Errorf("a locked key: %v", err)
				}
				failures.Add(1)
			}
		})
	}
	eventually(t, "the locked keys have failed", func() bool { return failures.Load() == 9 })
	stop()
	wg.Wait()
	unlock(t, tx)
	// If one of them had kept both places for a second, there would be 16 calls or so in that time.
	if decided.Load() < 100*failures.Load() {
		t.Errorf("%d calls were decided while %d failed", decided.Load(), failures.Load())
	}
	t.Logf("%d calls were decided while %d failed", decided.Load(), failures.Load())
}

// Where nothing limits how long a statement waits, calls for a locked key wait for it in one place, and others have the second.
func TestALockedKeyTakesOnePlace(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1000)
	locked := limit.Key("locked")
	tx := lock(t, pool, locked)
	first := enqueue(t, coalescer, nil, locked) // which does not ask for Done, but goes straight to the pool
	waitingFor(t, pool, tx)
	others := enqueue(t, coalescer, nil, slices.Repeat([]ratelimit.Request{locked}, 50)...)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var calls [][]ratelimit.Request
	for i := range 200 {
		calls = append(calls, []ratelimit.Request{limit.Key(fmt.Sprint(i % 10))})
	}
	errs := together(ctx, coalescer, calls)
	if err := errors.Join(errs...); err != nil {
		t.Errorf("keys that nobody has locked: %v", err)
	}
	unlock(t, tx)
	first.wg.Wait()
	others.wg.Wait()
	if err := errors.Join(append(first.errs, others.errs...)...); err != nil {
		t.Error(err)
	}
	if left := remaining(t, pool, locked); left < 949 || left > 949.01 {
		t.Errorf("%v tokens are left, want 949", left)
	}
	expectGone(t, pool, calls, errs)
}

// A statement that all its callers have given up, since one of its keys is locked, is a lesson: those that follow do not wait so long.
func TestAStatementThatWasGivenUpMakesTheNextOnesWary(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limit := slow("limit", 1000)
	locked, a, b := limit.Key("locked"), limit.Key("a"), limit.Key("b")
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, locked, a, b); err != nil {
		t.Fatal(err)
	}
	tx := lock(t, pool, locked)
	release := holdFlights(t, coalescer, pool)
	ctx, cancel := context.WithCancel(t.Context())
	f := enqueue(t, coalescer, []context.Context{ctx, ctx, ctx}, locked, a, b)
	release()
	waitingFor(t, pool, tx)
	cancel()
	f.wg.Wait()
	for i, err := range f.errs {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	release = holdFlights(t, coalescer, pool)
	waits, cancel := context.WithCancel(t.Context())
	defer cancel()
	patient := enqueue(t, coalescer, []context.Context{waits}, locked)
	ctx, cancelOthers := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancelOthers()
	others := enqueue(t, coalescer, []context.Context{ctx, ctx}, a, b)
	release()
	others.wg.Wait()
	if err := errors.Join(others.errs...); err != nil {
		t.Errorf("keys that nobody has locked: %v", err)
	}
	unlock(t, tx)
	patient.wg.Wait()
	if err := patient.err(0); err != nil {
		t.Errorf("who waits until it is not locked any more: %v", err)
	}
	coalescer.Close()
}

// Calls that a trial finds blocked for a moment have the time that the server gives them.
func TestATrialDoesNotFailWhoIsBlockedForAMoment(t *testing.T) {
	t.Parallel()
	admin := newPool(t, 8)
	pool, s := traced(t, admin, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1000)
	a, b := limit.Key("a"), limit.Key("b")
	txA, txB := lock(t, admin, a), lock(t, admin, b)
	release := holdFlights(t, coalescer, admin)
	f := enqueue(t, coalescer, nil, a, b)
	release()
	cancelWaiting(t, admin, txA)
	eventually(t, "both have failed in the trial", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.failed) >= 3
	})
	unlock(t, txB)
	cancelWaiting(t, admin, txA)
	f.wg.Wait()
	if sqlState(f.errs[0]) != "57014" || f.errs[1] != nil {
		t.Errorf("%v, want the error of the first key, and a grant of the second", f.errs)
	}
	unlock(t, txA)
	expectGone(t, admin, [][]ratelimit.Request{{a}, {b}}, f.errs)
}

// An error of one key, whatever it is, fails the calls for that.
func TestAnErrorOfOneKeyFailsOnlyItsOwnCalls(t *testing.T) {
	t.Parallel()
	for _, state := range []string{"P0001", "23514", "22000", "40001"} { // the last is tried again for some seconds
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 6)
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer coalescer.Close()
			refuse(t, pool, state, "NEW.key = '7'")
			limit := slow("limit", 1000)
			var calls [][]ratelimit.Request
			for i := range 200 {
				calls = append(calls, []ratelimit.Request{limit.Key(fmt.Sprint(i % 20))})
			}
			errs := together(t.Context(), coalescer, calls)
			for i, err := range errs {
				if bad := i%20 == 7; bad && sqlState(err) != state || !bad && err != nil {
					t.Errorf("call %d: %v", i, err)
				}
			}
			expectGone(t, pool, calls, errs)
		})
	}
}

// refuse has the server refuse to write rows.
func refuse(t *testing.T, pool *pgxpool.Pool, state, when string) {
	t.Helper()
	mustExec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '`+state+`'; END $$;
		CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON rate_limits FOR EACH ROW WHEN (NEW.name = 'limit' AND `+when+`) EXECUTE FUNCTION refuse()`)
}

// What concerns all keys is not tried with each of them.
func TestAnErrorOfAllKeysIsFewStatements(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		before func(t *testing.T, pool *pgxpool.Pool) // the calls wait
		while  func(t *testing.T, pool *pgxpool.Pool) // they do
		state  string
		most   int // statements
	}{
		{"the functions are missing", nil, func(t *testing.T, pool *pgxpool.Pool) {
			mustExec(t, pool, `DO $$ DECLARE f regprocedure; BEGIN
				FOR f IN SELECT oid FROM pg_proc WHERE pronamespace = current_schema()::regnamespace AND proname LIKE '%ratelimit%' LOOP
					EXECUTE format('ALTER FUNCTION %s RENAME TO %I', f, 'no_' || f::oid);
				END LOOP; END $$`)
		}, "42883", 1},
		{"what may have been committed", func(t *testing.T, pool *pgxpool.Pool) { refuse(t, pool, "XX000", "true") }, nil, "XX000", 2},
		{"every row is refused", func(t *testing.T, pool *pgxpool.Pool) { refuse(t, pool, "P0001", "true") }, nil, "P0001", 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			admin := newPool(t, 6)
			pool, s := traced(t, admin, 4, nil)
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer coalescer.Close()
			limit := slow("limit", 1000)
			var requests []ratelimit.Request
			for i := range 500 {
				requests = append(requests, limit.Key(fmt.Sprint(i)))
			}
			if c.before != nil {
				c.before(t, admin)
			}
			release := holdFlights(t, coalescer, admin)
			f := enqueue(t, coalescer, nil, requests...)
			if c.while != nil {
				c.while(t, admin)
			}
			before := s.count("ratelimit")
			release()
			f.wg.Wait()
			for i, err := range f.errs {
				if sqlState(err) != c.state {
					t.Errorf("call %d: %v, want SQLSTATE %s", i, err, c.state)
				}
			}
			if n := s.count("ratelimit") - before; n > c.most {
				t.Errorf("%d statements, want %d at most", n, c.most)
			}
		})
	}
}

// A table that is locked concerns all keys, though the error does not say so.
func TestALockedTableIsFewStatements(t *testing.T) {
	t.Parallel()
	admin := newPool(t, 6)
	pool, s := traced(t, admin, 4, map[string]string{"lock_timeout": "100ms"})
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1000)
	tx := lock(t, admin, limit.Key("0"))
	if _, err := tx.Exec(t.Context(), "LOCK TABLE rate_limits"); err != nil {
		t.Fatal(err)
	}
	var calls [][]ratelimit.Request
	for i := range 500 {
		calls = append(calls, []ratelimit.Request{limit.Key(fmt.Sprint(i))})
	}
	errs := together(t.Context(), coalescer, calls)
	for i, err := range errs {
		if sqlState(err) != "55P03" {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if n := s.count("ratelimit"); n > 100 {
		t.Errorf("%d statements", n)
	} else {
		t.Logf("%d statements", n)
	}
	unlock(t, tx)
	expectGone(t, admin, calls, errs)
}

// A key that is locked no more shares statements with others again.
func TestAKeyThatWasLockedSharesStatementsAgain(t *testing.T) {
	t.Parallel()
	admin := newPool(t, 6)
	pool, s := traced(t, admin, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1000)
	requests := []ratelimit.Request{limit.Key("a"), limit.Key("b"), limit.Key("c").Count(0.5)} // a fraction: no sums
	var limiter ratelimit.Limiter
	tx := lock(t, admin, requests[0])
	f := enqueue(t, coalescer, nil, requests[0])
	cancelWaiting(t, admin, tx)
	f.wg.Wait()
	if err := f.err(0); sqlState(err) != "57014" {
		t.Errorf("%v", err)
	}
	unlock(t, tx)
	if _, err := limiter.Consume(t.Context(), coalescer, requests[0]); err != nil {
		t.Error(err)
	}
	expectStatements(t, 0, coalescer, admin, s, requests, func(int) bool { return true }, map[string]int{"ratelimit_coalesce(": 1, "ratelimit_consume(": 0})
}

// A call for two keys, each of which others ask for without end, is not overtaken again and again.
func TestACallForTwoKeysIsOvertakenOnce(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	two, many := slow("two", 2), slow("many", 1000)
	a, b := two.Key("a"), many.Key("b")
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, a.Count(0), b.Count(0)); err != nil {
		t.Fatal(err)
	}
	txA, txB := lock(t, pool, a), lock(t, pool, b)
	consume := func(errs chan<- error, requests ...ratelimit.Request) {
		arrived := newArrival(t.Context())
		go func() {
			_, err := limiter.Consume(arrived, coalescer, requests...)
			errs <- err
		}()
		select {
		case <-arrived.arrived:
		case <-t.Context().Done():
		}
	}
	firstA, both, firstB, secondA := make(chan error, 1), make(chan error, 1), make(chan error, 1), make(chan error, 1)
	consume(firstA, a)
	waitingFor(t, pool, txA)
	consume(both, a, b)
	consume(firstB, b) // overtakes it
	waitingFor(t, pool, txB)
	consume(secondA, a)
	unlock(t, txA)
	if err := <-firstA; err != nil {
		t.Error(err)
	}
	unlock(t, txB)
	if err := errors.Join(<-firstB, <-both); err != nil {
		t.Error(err)
	}
	if err := <-secondA; !denied(err) { // there were two tokens
		t.Errorf("%v, want a denial of the last to come", err)
	}
}

// Where the server gives statements all the time they need, those that wait for no lock for long fail nobody.
func TestWaryStatementsFailNobody(t *testing.T) {
	t.Parallel()
	admin := newPool(t, 4)
	pool, s := traced(t, admin, 4, nil)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1000)
	var requests []ratelimit.Request
	var calls [][]ratelimit.Request
	for i := range 100 {
		requests = append(requests, limit.Key(fmt.Sprint(i)))
		calls = append(calls, []ratelimit.Request{requests[i]})
	}
	tx := lock(t, admin, requests...)
	ctx, cancel := context.WithCancel(t.Context())
	first := enqueue(t, coalescer, []context.Context{ctx}, requests[0])
	waitingFor(t, admin, tx)
	cancel() // from now on they are wary
	first.wg.Wait()
	if err := first.err(0); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	release := holdFlights(t, coalescer, admin)
	f := enqueue(t, coalescer, nil, requests...)
	release()
	eventually(t, "all has been tried", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.failed) > 16
	})
	unlock(t, tx)
	f.wg.Wait()
	if err := errors.Join(f.errs...); err != nil {
		t.Error(err)
	}
	expectGone(t, admin, calls, f.errs)
}

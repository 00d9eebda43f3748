package coalescer_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestCoalescerCancelledCallersHarmNobody(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limit := harness.Slow("limit", 100)
	release := harness.HoldFlights(t, coalescer, pool)
	waits, cancelWaits := context.WithCancel(t.Context())
	sent, cancelSent := context.WithCancel(t.Context())
	f := harness.Enqueue(t, coalescer, []context.Context{waits, sent, t.Context()}, limit.Global(), limit.Global(), limit.Global())

	// A call that has not been sent.
	cancelWaits()
	for ; f.Err(0) == nil; time.Sleep(time.Millisecond) {
	}
	if err := f.Err(0); !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("cancelled while it waited: %v", err)
	}

	// A call that has been sent: its statement waits for the row.
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Global()); err != nil {
		t.Fatal(err)
	}
	tx := lock(t, pool, limit.Global())
	release()
	harness.WaitingFor(t, pool, tx)
	cancelSent()
	for ; f.Err(1) == nil; time.Sleep(time.Millisecond) {
	}
	if err := f.Err(1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled at the database: %v", err)
	}
	unlock(t, tx)
	f.Wg.Wait()
	if err := f.Err(2); err != nil {
		t.Errorf("the other: %v", err)
	}
	if left := harness.Remaining(t, pool, limit.Global()); left < 96.99 || left > 97.01 {
		t.Errorf("%v tokens are left, want 97: 1 was taken directly, 2 by the statement that was sent", left)
	}

	// A statement that nobody waits for is given up.
	release = harness.HoldFlights(t, coalescer, pool)
	ctx, cancel := context.WithCancel(t.Context())
	f = harness.Enqueue(t, coalescer, []context.Context{ctx, ctx}, limit.Global(), limit.Global())
	tx = lock(t, pool, limit.Global())
	release()
	harness.WaitingFor(t, pool, tx)
	cancel()
	f.Wg.Wait()
	harness.CloseCoalescer(t, coalescer) // returns, though the row is locked
	for i, err := range f.Errs {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

// One call's error is not that of the calls that share its statement, whatever SQLSTATE a trigger or a policy gives it.
func TestCoalescerOneCallsErrorIsItsOwn(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	const refuse = `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key = 'bad' THEN RAISE SQLSTATE '%s'; END IF; RETURN NEW; END $$;
		CREATE %s INSERT OR UPDATE ON ratelimit.limits %s FOR EACH ROW EXECUTE FUNCTION refuse()`
	for state, sql := range map[string]string{
		"P0001": fmt.Sprintf(refuse, "P0001", "TRIGGER refuse BEFORE", ""),
		"AB123": fmt.Sprintf(refuse, "AB123", "TRIGGER refuse AFTER", ""),
		"40P01": fmt.Sprintf(refuse, "40P01", "TRIGGER refuse AFTER", ""),
		"0A000": fmt.Sprintf(refuse, "0A000", "CONSTRAINT TRIGGER refuse AFTER", "DEFERRABLE INITIALLY DEFERRED"),
		"42501": fmt.Sprintf(refuse, "42501", "TRIGGER refuse BEFORE", ""),
		"23514": `ALTER TABLE ratelimit.limits ADD CHECK (key <> 'bad')`,
		// As a server refuses a character that it does not store.
		"22P05": `ALTER TABLE ratelimit.limits ADD CHECK (key <> 'bad' OR convert_to(key || '日本', 'LATIN1') IS NOT NULL)`,
	} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			harness.MustExec(t, pool, sql)
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer harness.CloseCoalescer(t, coalescer)
			limit := harness.Slow("limit", 5)
			keys := []string{"a", "bad", "b", "a", "c", "bad", "d"}
			var requests []ratelimit.Request
			for _, key := range keys {
				requests = append(requests, limit.Key(key))
			}
			release := harness.HoldFlights(t, coalescer, pool)
			f := harness.Enqueue(t, coalescer, nil, requests...)
			release()
			f.Wg.Wait()
			for i, err := range f.Errs {
				if want := map[bool]string{true: state}[keys[i] == "bad"]; harness.SQLState(err) != want || (err == nil) != (want == "") {
					t.Errorf("call %d, for %q: %v, want %q", i, keys[i], err, want)
				}
			}
		})
	}
}

func TestCoalescerWhenTheDatabaseFails(t *testing.T) {
	t.Parallel()
	t.Run("batch", func(t *testing.T) { failWhileWaiting(t, 5) })
	t.Run("sum", func(t *testing.T) { failWhileWaiting(t, 1) })
}

func failWhileWaiting(t *testing.T, keys int) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	limit := harness.Slow("limit", 100)
	var limiter ratelimit.Limiter
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("0")); err != nil {
		t.Fatal(err)
	}
	var requests []ratelimit.Request
	for i := range 50 {
		requests = append(requests, limit.Key(fmt.Sprint(i%keys)))
	}
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.Enqueue(t, coalescer, nil, requests...)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	if _, err := limiter.Consume(t.Context(), tx, limit.Key("0")); err != nil {
		t.Fatal(err)
	}
	release()
	harness.WaitingFor(t, pool, tx)
	if _, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))`,
		harness.ServerPID(t, tx)); err != nil {
		t.Fatal(err)
	}
	f.Wg.Wait()
	for i, err := range f.Errs {
		if harness.SQLState(err) != "57P01" {
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
		if left := harness.Remaining(t, pool, limit.Key(fmt.Sprint(i))); left < want-0.01 || left > want+0.01 {
			t.Errorf("key %d: %v tokens are left, want %v", i, left, want)
		}
	}
}

func TestCoalescerCloseDrains(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limit := harness.Slow("limit", 100)
	release := harness.HoldFlights(t, coalescer, pool)
	f := harness.Enqueue(t, coalescer, nil, limit.Global(), limit.Global())
	done := make(chan struct{})
	go func() { harness.CloseCoalescer(t, coalescer); close(done) }()
	var limiter ratelimit.Limiter
	for {
		// Calls join the queue until Close has begun.
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
	f.Wg.Wait()
	if f.Errs[0] != nil || f.Errs[1] != nil {
		t.Errorf("%v", f.Errs)
	}
	if left := harness.Remaining(t, coalescer, limit.Global()); left < 97.99 || left > 98.01 {
		t.Errorf("%v tokens are left, want 98", left)
	}
	harness.CloseCoalescer(t, coalescer)
}

// The answer arrives before the commit. If Postgres refuses the commit, with any error, even one after which a statement is retried, each
// caller gets that error, and no answer.
func TestACommitThatFailsGrantsNothing(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	limit := harness.Slow("limit", 10)
	a, b := limit.Key("a"), limit.Key("b")
	alone, sum, several := []ratelimit.Request{a}, []ratelimit.Request{a, a}, []ratelimit.Request{a, b, b}
	for _, c := range []struct {
		state, level string
		async        bool
		requests     []ratelimit.Request
	}{
		{"23000", "read committed", false, alone},
		{"23000", "read committed", true, alone}, // in a single round trip
		{"23000", "serializable", false, alone},
		{"23000", "serializable", true, alone},
		{"40001", "read committed", false, several},
		{"23000", "read committed", false, several},
		{"40001", "read committed", true, several},
		{"40001", "serializable", false, several},
		{"40001", "serializable", false, sum},
	} {
		t.Run(fmt.Sprintf("%s, %s, %d calls, async %v", c.state, c.level, len(c.requests), c.async), func(t *testing.T) {
			t.Parallel()
			pool, s := harness.Traced(t, harness.NewPool(t, 1), 6, map[string]string{"default_transaction_isolation": c.level})
			coalescer := &ratelimit.Coalescer{Pool: pool, AsyncCommit: c.async}
			defer harness.CloseCoalescer(t, coalescer)
			calls := func(requests ...ratelimit.Request) []error {
				release := harness.HoldFlights(t, coalescer, pool)
				f := harness.Enqueue(t, coalescer, nil, requests...)
				release()
				f.Wg.Wait()
				return f.Errs
			}
			if err := errors.Join(calls(a, b)...); err != nil { // makes the rows, and reads the level
				t.Fatal(err)
			}
			harness.MustExec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '`+c.state+`'; END $$;
				CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON ratelimit.limits DEFERRABLE INITIALLY DEFERRED
				FOR EACH ROW WHEN (NEW.name = 'limit') EXECUTE FUNCTION refuse()`)
			var errs []error
			if len(c.requests) > 1 {
				errs = calls(c.requests...)
			} else {
				var observed ratelimit.Result
				limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { observed = d.Result }}
				begun := s.Count("begin")
				result, err := limiter.Consume(t.Context(), coalescer, a)
				want := ratelimit.Result{Requests: []ratelimit.Status{{Limit: limit, Key: "a", Count: 1}}}
				if !reflect.DeepEqual(result, want) || !reflect.DeepEqual(observed, want) {
					t.Errorf("%+v, want no answer; observed %+v", result, observed)
				}
				if begun = s.Count("begin") - begun; (begun > 0) != (c.level == "serializable") {
					t.Errorf("BEGIN was sent %d times", begun)
				}
				errs = []error{err}
			}
			for i, err := range errs {
				if harness.SQLState(err) != c.state {
					t.Errorf("call %d: %v, want SQLSTATE %s", i, err, c.state)
				}
			}
			for _, request := range c.requests {
				if left := harness.Remaining(t, pool, request); left < 9 || left > 9.01 {
					t.Errorf("%v are left, want 9", left)
				}
			}
		})
	}
}

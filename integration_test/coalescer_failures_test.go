package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

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

	// A call that has not been sent.
	cancelWaits()
	for ; f.err(0) == nil; time.Sleep(time.Millisecond) {
	}
	if err := f.err(0); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled while it waited: %v", err)
	}

	// A call that has been sent: its statement waits for the row.
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
		t.Errorf("%v tokens are left, want 96: 2 were taken directly, 2 by the call that was sent", left)
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

// A server refuses a statement with a character that it does not store. Only the call with that character fails.
func TestCoalescerTextThatTheServerCannotStore(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	mustExec(t, pool, "ALTER TABLE rate_limits ADD CHECK (convert_to(key, 'LATIN1') IS NOT NULL)") // which is 22P05
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	limit := slow("limit", 1)
	release := holdFlights(t, coalescer, pool)
	f := enqueue(t, coalescer, nil, limit.Key("é"), limit.Key("日本"), limit.Key("é"))
	release()
	f.wg.Wait()
	// After the split, the first and the third are sent separately. Either may get the token.
	if sqlState(f.errs[1]) != "22P05" || !(f.errs[0] == nil && denied(f.errs[2]) || denied(f.errs[0]) && f.errs[2] == nil) {
		t.Errorf("%v", f.errs)
	}
}

// One call's error is not that of the calls that share its statement, whatever SQLSTATE a trigger or a policy gives it.
func TestCoalescerOneCallsErrorIsItsOwn(t *testing.T) {
	t.Parallel()
	for state, sql := range map[string]string{
		"P0001": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key = 'bad' THEN RAISE 'no'; END IF; RETURN NEW; END $$;
			CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON rate_limits FOR EACH ROW EXECUTE FUNCTION refuse()`,
		"AB123": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key = 'bad' THEN RAISE SQLSTATE 'AB123'; END IF; RETURN NEW; END $$;
			CREATE TRIGGER refuse AFTER INSERT OR UPDATE ON rate_limits FOR EACH ROW EXECUTE FUNCTION refuse()`,
		"40P01": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key = 'bad' THEN RAISE SQLSTATE '40P01'; END IF; RETURN NEW; END $$;
			CREATE TRIGGER refuse AFTER INSERT OR UPDATE ON rate_limits FOR EACH ROW EXECUTE FUNCTION refuse()`,
		"0A000": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key = 'bad' THEN RAISE SQLSTATE '0A000'; END IF; RETURN NEW; END $$;
			CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON rate_limits DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`,
		"42501": `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key = 'bad' THEN RAISE SQLSTATE '42501'; END IF; RETURN NEW; END $$;
			CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON rate_limits FOR EACH ROW EXECUTE FUNCTION refuse()`,
		"23514": `ALTER TABLE rate_limits ADD CHECK (key <> 'bad')`,
	} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 4)
			mustExec(t, pool, sql)
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer coalescer.Close()
			limit := slow("limit", 5)
			keys := []string{"a", "bad", "b", "a", "c", "bad", "d"}
			var requests []ratelimit.Request
			for _, key := range keys {
				requests = append(requests, limit.Key(key))
			}
			release := holdFlights(t, coalescer, pool)
			f := enqueue(t, coalescer, nil, requests...)
			release()
			f.wg.Wait()
			for i, err := range f.errs {
				if want := map[bool]string{true: state}[keys[i] == "bad"]; sqlState(err) != want || (err == nil) != (want == "") {
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
	f.wg.Wait()
	if f.errs[0] != nil || f.errs[1] != nil {
		t.Errorf("%v", f.errs)
	}
	if left := remaining(t, coalescer, limit.Global()); left < 97.99 || left > 98.01 {
		t.Errorf("%v tokens are left, want 98", left)
	}
	coalescer.Close()
}

// The answer arrives before the commit, in the single round trip of an asynchronous commit and in a transaction that sets
// its level. The caller must get an error of the commit, and no result.
func TestACommitThatFailsGrantsNothing(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "serializable"} {
		pool, s := traced(t, newPool(t, 6), 6, map[string]string{"default_transaction_isolation": level})
		coalescers := []*ratelimit.Coalescer{{Pool: pool}, {Pool: pool, AsyncCommit: true}}
		limit := slow("limit", 10)
		for _, coalescer := range coalescers { // a batch reads the level
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

package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestSeveralLimitsAreAllOrNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		perUser := ratelimit.TokenBucket("per user", 10, time.Minute)
		perTeam := ratelimit.FixedWindow("per team", 100, time.Hour, ratelimit.Start(harness.Noon))
		global := ratelimit.TokenBucket("everybody", 20, time.Second)

		result := w.Grant(perUser.Key("ann").Count(4), perTeam.Key("red").Count(50), global.Global().Count(5))
		if r := result.Requests; r[0].Remaining != 6 || r[1].Remaining != 50 || r[2].Remaining != 15 {
			w.Fatalf("granted: %+v", result)
		}
		before := w.Rows()
		result = w.Deny(perUser.Key("ann").Count(9), perTeam.Key("red").Count(1), global.Global().Count(16))
		if after := w.Rows(); before != after {
			w.Fatalf("a denial wrote:\n%s\nbecame\n%s", before, after)
		}
		r := result.Requests
		if r[0].OK || !r[1].OK || r[2].OK {
			w.Fatalf("the first and the third are violated, got %+v", result)
		}
		if r[0].Remaining != 6 || r[1].Remaining != 50 || r[2].Remaining != 15 {
			w.Fatalf("denied: %+v", result)
		}
		if !r[0].RetryAt.Equal(harness.Noon.Add(18*time.Second)) || !r[1].RetryAt.IsZero() || !r[2].RetryAt.Equal(harness.Noon.Add(50*time.Millisecond)) {
			w.Fatalf("denied: %+v", result)
		}
		w.Retries(result, 18*time.Second) // the largest
		if result.Remaining != 6 || !result.ResetAt.Equal(harness.Noon.Add(time.Hour)) {
			w.Fatalf("denied: %+v, want the least that remains and the last reset", result)
		}
		exceeded := ratelimit.DeniedError{RetryAt: result.RetryAt, RetryAfter: result.RetryAfter, Requests: result.Requests}
		if denied := harness.DeniedBy(result); len(denied) != 2 || denied[0].Limit.Name() != "per user" || denied[1].Limit.Name() != "everybody" {
			w.Fatalf("denied: %+v", denied)
		}
		for _, part := range []string{"per user", "everybody", "18s"} {
			if !strings.Contains(exceeded.Error(), part) {
				w.Errorf("%q does not say %q", exceeded.Error(), part)
			}
		}
		if strings.Contains(exceeded.Error(), "ann") || strings.Contains(exceeded.Error(), "per team") {
			w.Errorf("%q says too much", exceeded.Error())
		}

		w.Clock.Advance(18*time.Second - time.Microsecond)
		w.Deny(perUser.Key("ann").Count(9), perTeam.Key("red").Count(1), global.Global().Count(16))
		w.Clock.Advance(time.Microsecond)
		w.Grant(perUser.Key("ann").Count(9), perTeam.Key("red").Count(1), global.Global().Count(16))
	})
}

func TestRequestsKeepTheirOrderInTheResult(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var requests []ratelimit.Request
		var want []string
		for i, name := range []string{"z", "a", "M", "é", "b", "a"} { // not the lock order of the rows
			requests = append(requests, ratelimit.TokenBucket(name, 100, time.Minute).Key(fmt.Sprint("key ", -i)).Count(float64(i)))
			want = append(want, fmt.Sprint(name, " key ", -i, " ", i))
		}
		for _, verb := range []func(context.Context, ratelimit.DB, ...ratelimit.Request) (ratelimit.Result, error){
			w.Limiter.Consume, w.Limiter.Check, w.Limiter.Charge,
		} {
			result, err := verb(w.Context(), w.DB, requests...)
			w.Do(err)
			for i, s := range result.Requests {
				if got := fmt.Sprint(s.Limit.Name(), " ", s.Key, " ", s.Count); got != want[i] {
					w.Errorf("request %d: %q, want %q", i, got, want[i])
				}
			}
		}
	})
}

func TestALimitNamedTwiceInOneCallCountsTwice(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute)
		ann := limit.Key("ann")
		result := w.Grant(ann.Count(3), limit.Key("bob"), ann.Count(4))
		if r := result.Requests; r[0].Remaining != 3 || r[1].Remaining != 9 || r[2].Remaining != 3 || r[0].Count != 3 || r[2].Count != 4 {
			w.Fatalf("granted: %+v", result)
		}
		result = w.Deny(ann.Count(2), ann.Count(2))
		w.Retries(result, 6*time.Second)
		w.Refuse(ratelimit.ErrExceedsCapacity, ann.Count(6), ann.Count(5))
		w.Grant(ann.Count(2), ann.Count(1))
	})
}

func TestRequestsForOneKeyReserveTogether(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.MaxReserved(6))
		key := limit.Key("ann")
		for _, counts := range [][]float64{{8, 6}, {6, 8}} { // in any order
			result := w.Reserve(key.Count(counts[0]), key.Count(counts[1]))
			for i, s := range result.Requests {
				if s.Remaining != -4 || s.Count != counts[i] || s.Taken != counts[i] {
					w.Fatalf("request %d: %+v", i, s)
				}
			}
			w.Runs(result, 24*time.Second)
			w.Do(w.Limiter.Reset(w.Context(), w.DB, key))
		}
		w.Refuse(ratelimit.ErrExceedsCapacity, key.Count(6), key.Count(8)) // Consume owes nothing
		w.RefuseReserve(ratelimit.ErrExceedsCapacity, key.Count(8), key.Count(8.5))
		w.Runs(w.Reserve(key.Count(4), key.Count(6)), 0)
		w.Runs(w.Reserve(key.Count(4), key.Count(0)), 24*time.Second)
		w.Retries(w.DenyReserve(key.Count(5), key.Count(1)), 24*time.Second) // 4 + 6 are 4 above maxReserved
		w.Clock.Advance(24*time.Second - time.Microsecond)
		w.DenyReserve(key.Count(5), key.Count(1))
		w.Clock.Advance(time.Microsecond)
		w.Runs(w.Reserve(key.Count(5), key.Count(1)), 36*time.Second)
	})
}

func TestTwoDefinitionsOfOneLimitInOneCallAreAnError(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		one := ratelimit.TokenBucket("messages", 10, time.Minute)
		for _, other := range []ratelimit.Limit{
			ratelimit.TokenBucket("messages", 11, time.Minute),
			ratelimit.TokenBucket("messages", 10, time.Hour),
			ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(11)),
			ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.MaxReserved(0)),
			ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Shards(2)),
			ratelimit.FixedWindow("messages", 10, time.Minute),
			ratelimit.FixedWindow("messages", 10, time.Minute, ratelimit.Start(harness.Noon)),
		} {
			w.Refuse(ratelimit.ErrInvalid, one.Key("ann"), other.Key("ann"))
		}
		own := ratelimit.TokenBucket("own", 10, time.Minute, ratelimit.Varies(time.Hour)) // one definition, two numbers of one key
		w.Refuse(ratelimit.ErrInvalid, own.Key("ann"), own.With(ratelimit.Rate(2)).Key("ann"))
		same := ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(10), ratelimit.Shards(1))
		w.Grant(one.Key("ann"), same.Key("ann"))
	})
}

func TestReservationsWorkWithSeveralLimits(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		tokens := ratelimit.TokenBucket("tokens", 60, time.Minute, ratelimit.MaxReserved(120))
		calls := ratelimit.FixedWindow("calls", 2, time.Minute, ratelimit.Start(harness.Noon), ratelimit.MaxReserved(2))
		request := func(n float64) []ratelimit.Request {
			return []ratelimit.Request{tokens.Key("red").Count(n), calls.Key("red")}
		}
		w.Runs(w.Reserve(request(60)...), 0)
		w.Runs(w.Reserve(request(30)...), 30*time.Second)
		w.Runs(w.Reserve(request(10)...), time.Minute) // the calls are refilled later than the tokens
		w.Runs(w.Reserve(request(50)...), 90*time.Second)
		// Balances are now -90 and -2.
		result := w.DenyReserve(request(31)...)
		if r := result.Requests; r[0].OK || r[1].OK || !r[0].RetryAt.Equal(harness.Noon.Add(time.Second)) {
			w.Fatalf("denied: %+v", result)
		}
		w.Retries(result, time.Minute)
		before := w.Rows()
		result = w.DenyReserve(tokens.Key("red").Count(31), tokens.Key("blue").Count(61))
		if w.Rows() != before {
			w.Fatal("a denial wrote")
		}
		if r := result.Requests; r[0].OK || !r[1].OK || r[1].Remaining != 60 {
			w.Fatalf("denied: %+v", result)
		}
		w.Retries(result, time.Second)
		w.Clock.Advance(time.Minute)
		w.Reserve(request(31)...)
	})
}

// In READ COMMITTED, a call takes from its first limits, and may then find that another transaction has emptied the next
// one.
func TestACallThatLosesARaceGivesBackWhatItTook(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limiter, _ := harness.NewLimiter()
	first, middle, third := ratelimit.TokenBucket("a", 10, time.Minute), ratelimit.FixedWindow("b", 10, time.Minute), ratelimit.TokenBucket("c", 10, time.Minute)
	call := func(db ratelimit.DB) error {
		return harness.Second(limiter.Consume(t.Context(), db, first.Global().Count(3), middle.Global().Count(2), third.Global().Count(4)))
	}
	harness.Succeeds(t, call(pool))
	for _, left := range []float64{4, 3.5} { // one limit has enough
		tx, err := pool.Begin(t.Context())
		harness.Succeeds(t, err)
		if _, err := limiter.Consume(t.Context(), tx, third.Global().Count(6-left)); err != nil {
			t.Fatal(err)
		}
		err = losing(t, pool, tx, call)
		if left >= 4 != (err == nil) || err != nil && !harness.Denied(err) {
			t.Fatalf("%v left: %v", left, err)
		}
		balances := harness.ReadBalances(t, limiter, pool, first.Global(), middle.Global(), third.Global())
		want := []float64{4, 6, 0} // after two calls
		if left < 4 {
			want = []float64{7, 8, left}
		}
		for i, b := range balances {
			if b.Remaining != want[i] {
				t.Errorf("%v left: %s has %v, want %v", left, b.Limit.Name(), b.Remaining, want[i])
			}
		}
		harness.Succeeds(t, limiter.Reset(t.Context(), pool, first.Global(), middle.Global(), third.Global()))
		harness.Succeeds(t, call(pool))
	}
}

// losing makes a call that has to wait for a transaction, commits that transaction, and returns the error of the call.
func losing(t *testing.T, pool *pgxpool.Pool, tx pgx.Tx, call func(db ratelimit.DB) error) error {
	t.Helper()
	answer := make(chan error, 1)
	go func() { answer <- call(pool) }()
	harness.WaitingFor(t, pool, tx)
	harness.Succeeds(t, tx.Commit(t.Context()))
	return <-answer
}

// A call that gives back its tokens loses none and counts no time twice. That holds for whatever became of the row, and
// wherever the clock stands.
func TestWhatALostRaceGivesBackIsWhatWasThere(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limiter, clock := harness.NewLimiter()
	first := ratelimit.TokenBucket("a", 60, time.Minute, ratelimit.Capacity(100))
	middle := ratelimit.FixedWindow("b", 10, time.Minute, ratelimit.Start(harness.Noon), ratelimit.Capacity(100))
	third := ratelimit.TokenBucket("c", 0.001, time.Minute, ratelimit.Capacity(10))
	sharded := ratelimit.TokenBucket("c", 0.001, time.Minute, ratelimit.Capacity(10), ratelimit.Shards(2))
	consume := func(db ratelimit.DB, requests ...ratelimit.Request) error {
		return harness.Second(limiter.Consume(t.Context(), db, requests...))
	}
	reset := func(db ratelimit.DB) error { return limiter.Reset(t.Context(), db, third.Global()) }
	for _, row := range []struct {
		third string
		other func(tx pgx.Tx) error
		deny  bool
	}{
		{"drained", func(tx pgx.Tx) error { return consume(tx, third.Global().Count(8)) }, true},
		{"deleted", func(tx pgx.Tx) error { return reset(tx) }, false},
		{"deleted and drained", func(tx pgx.Tx) error { return errors.Join(reset(tx), consume(tx, third.Global().Count(8))) }, true},
		{"sharded and drained", func(tx pgx.Tx) error { // by another version of the program
			_, err := (&ratelimit.Limiter{Clock: clock.Now}).Consume(t.Context(), tx, sharded.Global().Count(8))
			return err
		}, true},
	} {
		for _, later := range []time.Duration{0, 7300 * time.Millisecond, 61 * time.Second, -30 * time.Second} {
			clock.At = harness.Noon
			harness.Succeeds(t, limiter.Reset(t.Context(), pool, first.Global(), middle.Global(), third.Global()))
			harness.Succeeds(t, consume(pool, first.Global().Count(60.1), middle.Global().Count(40.2), third.Global().Count(1)))
			tx, err := pool.Begin(t.Context())
			harness.Succeeds(t, err)
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // without it, a failing test would hang
			harness.Succeeds(t, row.other(tx))
			balances := func() (all []float64) { // at once, and later on
				for _, wait := range []time.Duration{0, 31 * time.Second, 45 * time.Second, 2 * time.Minute} {
					clock.At = harness.Noon.Add(later + wait)
					two := harness.ReadBalances(t, limiter, pool, first.Global(), middle.Global())
					all = append(all, two[0].Remaining, two[1].Remaining)
				}
				clock.At = harness.Noon.Add(later)
				return all
			}
			want := balances()
			err = losing(t, pool, tx, func(db ratelimit.DB) error {
				return consume(db, first.Global().Count(30.3), middle.Global().Count(20.7), third.Global().Count(5))
			})
			if harness.Denied(err) != row.deny || err != nil && !row.deny {
				t.Fatalf("%s, %v later: %v", row.third, later, err)
			}
			got := balances()
			if !row.deny { // the later balance depends on the capacity
				got, want = got[:2], []float64{want[0] - 30.3, want[1] - 20.7}
			}
			for i := range want {
				if math.Abs(got[i]-want[i]) > 1e-9 {
					t.Errorf("%s, %v later: %v, want %v", row.third, later, got, want)
					break
				}
			}
		}
	}
}

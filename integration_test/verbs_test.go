package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// world is what a behaviour is tried in: a handle, and a limiter whose clock stands at noon.
type world struct {
	*testing.T
	db      ratelimit.DB
	limiter *ratelimit.Limiter
	clock   *clock
}

// behaviour runs a test in a world of its own on every handle.
func behaviour(t *testing.T, test func(w world)) {
	t.Helper()
	t.Parallel()
	onEveryHandle(t, func(t *testing.T, db ratelimit.DB) {
		limiter, clock := newLimiter()
		test(world{t, db, limiter, clock})
	})
}

// grant consumes, which must be granted.
func (w world) grant(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Consume(w.Context(), w.db, requests...)
	if err != nil || !result.OK {
		w.Fatalf("denied, want a grant: %+v, %v", result, err)
	}
	for i, s := range result.Requests {
		if !s.OK {
			w.Fatalf("granted, but request %d is not OK: %+v", i, result)
		}
	}
	return result
}

// deny consumes, which must be denied, and holds the error against the result.
func (w world) deny(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Consume(w.Context(), w.db, requests...)
	var exceeded *ratelimit.ExceededError
	if !errors.As(err, &exceeded) || result.OK {
		w.Fatalf("%+v, %v, want a denial", result, err)
	}
	if !reflect.DeepEqual(exceeded.Result, result) {
		w.Fatalf("the error says %+v, the result %+v", exceeded.Result, result)
	}
	if len(exceeded.Denied()) == 0 {
		w.Fatalf("a denial that names no limit: %+v", result)
	}
	return result
}

// refuse consumes, which must fail before anything is sent.
func (w world) refuse(target error, requests ...ratelimit.Request) {
	w.Helper()
	result, err := w.limiter.Consume(w.Context(), w.db, requests...)
	if !errors.Is(err, target) || result.OK {
		w.Fatalf("%+v, %v, want %v", result, err, target)
	}
}

// check checks, which must work.
func (w world) check(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Check(w.Context(), w.db, requests...)
	if err != nil {
		w.Fatalf("check: %v", err)
	}
	return result
}

// balance is what a request's limit and key hold.
func (w world) balance(request ratelimit.Request) float64 {
	w.Helper()
	return w.check(request.Count(0)).Requests[0].Remaining
}

// holds wants a balance, to within the rounding of a few sums.
func (w world) holds(request ratelimit.Request, want float64) {
	w.Helper()
	if got := w.balance(request); !near(got, want) {
		w.Fatalf("balance %v, want %v", got, want)
	}
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(b)) }

// retries wants a RetryAt and a RetryAfter of d from the clock's time.
func (w world) retries(result ratelimit.Result, d time.Duration) {
	w.Helper()
	if !result.RetryAt.Equal(w.clock.now.Add(d)) || result.RetryAfter != d {
		w.Fatalf("retry at %v, after %v, want %v after %v", result.RetryAt, result.RetryAfter, d, w.clock.now)
	}
}

// rows is the table as text, with what tells that a row was written or locked.
func (w world) rows() string {
	w.Helper()
	rows, err := w.db.Query(w.Context(), `SELECT concat_ws(' ', r.ctid, r.xmin, r.xmax, r) FROM rate_limits r ORDER BY name, key, shard`)
	if err != nil {
		w.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// begin begins a transaction, or a savepoint in one.
func (w world) begin() pgx.Tx {
	w.Helper()
	tx, err := w.db.(interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	}).Begin(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	return tx
}

func (w world) do(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// ---- Check

func TestCheckAnswersAndWritesNothing(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(20), ratelimit.MaxReserved(5))
		ann := limit.Key("ann")

		result := w.check(ann)
		if !result.OK || result.Requests[0].Remaining != 20 || w.rows() != "" {
			w.Fatalf("of a fresh limit: %+v, rows %q", result, w.rows())
		}
		w.retries(result, 0)
		var xid *string
		w.do(w.db.QueryRow(w.Context(), "SELECT pg_current_xact_id_if_assigned()::text").Scan(&xid))
		if xid != nil {
			w.Fatalf("a check took transaction id %s", *xid)
		}

		w.grant(ann.Count(20))
		before := w.rows()
		result = w.check(ann)
		if result.OK || result.Requests[0].OK || result.Requests[0].Remaining != 0 || !result.Requests[0].ResetAt.Equal(noon.Add(2*time.Minute)) {
			w.Fatalf("of an empty limit: %+v", result)
		}
		w.retries(result, 6*time.Second)
		result = w.check(ann.Count(5).Reserve())
		if !result.OK || result.Requests[0].Remaining != 0 {
			w.Fatalf("of a reservation: %+v", result)
		}
		w.retries(result, 30*time.Second) // when the work may run
		result = w.check(ann.Count(7).Reserve())
		if result.OK {
			w.Fatalf("of a reservation beyond maxReserved: %+v", result)
		}
		w.retries(result, 12*time.Second) // when it would be granted
		if after := w.rows(); after != before {
			w.Fatalf("checks wrote:\n%s\nbecame\n%s", before, after)
		}

		w.grant(ann.Count(3).Reserve())
		result = w.check(ann.Count(0))
		if result.OK || result.Requests[0].Remaining != -3 {
			w.Fatalf("of a count of 0 in debt: %+v", result)
		}
		w.retries(result, 18*time.Second)
		result = w.check(ann.Count(0).Reserve())
		if !result.OK {
			w.Fatalf("of a reserved count of 0 in debt: %+v", result)
		}
		w.retries(result, 18*time.Second)
	})
}

func TestCheckAnswersLikeConsume(t *testing.T) {
	behaviour(t, func(w world) {
		random := newRand(w.T)
		limits := []ratelimit.Limit{
			ratelimit.TokenBucket("a", 10, time.Minute, ratelimit.Capacity(20)),
			ratelimit.TokenBucket("b", 0.7, time.Second, ratelimit.Capacity(12), ratelimit.MaxReserved(3)),
			ratelimit.FixedWindow("c", 7, time.Minute, ratelimit.MaxReserved(10)),
			ratelimit.FixedWindow("d", 3.3, time.Minute, ratelimit.Capacity(15), ratelimit.Start(noon)),
		}
		granted, denied := 0, 0
		for step := range 150 {
			w.clock.Advance(time.Duration(random.Int64N(int64(20 * time.Second))))
			var requests []ratelimit.Request
			sum := map[string]float64{}
			for range 1 + random.IntN(3) {
				limit := limits[random.IntN(len(limits))]
				request := limit.Global().Count(math.Round(random.Float64()*60) / 8)
				if random.IntN(2) == 0 {
					request = request.Reserve()
				}
				requests = append(requests, request)
			}
			check, checkErr := w.limiter.Check(w.Context(), w.db, requests...)
			consumed, err := w.limiter.Consume(w.Context(), w.db, requests...)
			if errors.Is(err, ratelimit.ErrExceedsCapacity) && errors.Is(checkErr, ratelimit.ErrExceedsCapacity) {
				continue
			}
			if checkErr != nil || consumed.OK != (err == nil) {
				w.Fatalf("step %d: check %+v, %v, consume %+v, %v", step, check, checkErr, consumed, err)
			}
			if consumed.OK {
				for _, s := range consumed.Requests {
					sum[s.Limit.Name()] += s.Count
				}
			}
			for i := range consumed.Requests {
				s := &consumed.Requests[i]
				if !near(s.Remaining, check.Requests[i].Remaining-sum[s.Limit.Name()]) {
					w.Fatalf("step %d, request %d: check says %+v, consume %+v", step, i, check, consumed)
				}
				if consumed.OK { // what they say after the call differs
					s.Remaining, s.ResetAt = check.Requests[i].Remaining, check.Requests[i].ResetAt
				}
			}
			if !reflect.DeepEqual(check, consumed) {
				w.Fatalf("step %d: check says\n%+v, consume\n%+v", step, check, consumed)
			}
			if consumed.OK {
				granted++
			} else {
				denied++
			}
		}
		if granted < 10 || denied < 10 {
			w.Fatalf("%d granted, %d denied: this tested too little", granted, denied)
		}
	})
}

// ---- Charge

func TestChargeIsUnconditional(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.MaxReserved(5))
		window := ratelimit.FixedWindow("calls", 10, time.Minute, ratelimit.Start(noon), ratelimit.MaxReserved(0))
		charge := func(requests ...ratelimit.Request) ratelimit.Result {
			w.Helper()
			result, err := w.limiter.Charge(w.Context(), w.db, requests...)
			if err != nil || !result.OK {
				w.Fatalf("charge: %+v, %v", result, err)
			}
			return result
		}

		result := charge(limit.Key("ann").Count(30)) // on a missing row, above the capacity and maxReserved
		if result.Requests[0].Remaining != -20 {
			w.Fatalf("charged: %+v", result)
		}
		w.retries(result, 2*time.Minute)
		charge(limit.Key("ann").Count(10.5).Reserve())
		w.holds(limit.Key("ann"), -30.5)
		w.deny(limit.Key("ann").Count(0))
		w.deny(limit.Key("ann").Reserve())

		w.holds(limit.Key("bob"), 10)
		result = charge(limit.Key("bob").Count(1), window.Key("bob").Count(25), limit.Key("ann").Count(1))
		if r := result.Requests; r[0].Remaining != 9 || r[1].Remaining != -15 || r[2].Remaining != -31.5 {
			w.Fatalf("charged: %+v", result)
		}
		if r := result.Requests; !r[0].RetryAt.Equal(noon) || !r[1].RetryAt.Equal(noon.Add(2*time.Minute)) {
			w.Fatalf("charged: %+v", result)
		}
		w.retries(result, 189*time.Second)

		w.clock.Advance(2*time.Minute - time.Microsecond)
		w.deny(window.Key("bob").Count(0))
		w.clock.Advance(time.Microsecond)
		w.grant(window.Key("bob").Count(5))
		w.deny(window.Key("bob"))
	})
}

func TestChargeCountsWhatIsThere(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute)
		w.grant(limit.Global().Count(10))
		w.clock.Advance(30 * time.Second)
		if _, err := w.limiter.Charge(w.Context(), w.db, limit.Global().Count(7)); err != nil {
			w.Fatal(err)
		}
		w.holds(limit.Global(), -2)
	})
}

// ---- Refund

func (w world) refund(consumedAt time.Time, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Refund(w.Context(), w.db, consumedAt, requests...)
	if err != nil || !result.OK {
		w.Fatalf("refund: %+v, %v", result, err)
	}
	return result
}

func TestRefundToATokenBucketClampsToTheCapacity(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.Capacity(20))
		consumed := w.grant(limit.Key("ann").Count(6))
		result := w.refund(consumed.At, limit.Key("ann").Count(2.5))
		if result.Requests[0].Remaining != 16.5 {
			w.Fatalf("refunded: %+v", result)
		}
		w.clock.Advance(12 * time.Second)
		w.refund(consumed.At, limit.Key("ann").Count(100)) // more than the capacity is no error
		w.holds(limit.Key("ann"), 20)

		consumed = w.grant(limit.Key("ann").Count(50).Reserve()) // a debt is given back too
		w.refund(consumed.At, limit.Key("ann").Count(20))
		w.holds(limit.Key("ann"), -10)
		w.retries(w.refund(consumed.At, limit.Key("ann").Count(5)), 30*time.Second)
	})
}

func TestRefundToAMissingRowDoesNothing(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		result := w.refund(noon, bucket.Key("ann"), window.Key("ann").Count(3))
		if r := result.Requests; r[0].Remaining != 10 || r[1].Remaining != 10 {
			w.Fatalf("refunded: %+v", result)
		}
		if rows := w.rows(); rows != "" {
			w.Fatalf("rows: %s", rows)
		}
	})
}

func TestRefundToAFixedWindowBelongsToTheWindowOfTheConsumption(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(noon))
		ann := limit.Key("ann")
		first := w.grant(ann.Count(4))
		w.clock.Advance(30 * time.Minute)
		w.refund(first.At, ann.Count(1))
		w.holds(ann, 7)
		w.clock.Advance(30*time.Minute - time.Microsecond) // the window's last microsecond
		w.refund(first.At, ann.Count(1))
		w.holds(ann, 8)

		w.clock.Advance(time.Microsecond)
		second := w.grant(ann.Count(6))
		w.refund(first.At, ann.Count(2)) // its window is over
		w.holds(ann, 4)
		w.refund(second.At, ann.Count(2))
		w.holds(ann, 6)

		// Several, of which one is dropped.
		other := ratelimit.TokenBucket("bucket", 10, time.Hour)
		w.grant(other.Key("ann").Count(10))
		w.refund(first.At, other.Key("ann").Count(3), ann.Count(3))
		w.holds(ann, 6)
		w.holds(other.Key("ann"), 3)
	})
}

func TestRefundOfAReservationIsGivenBackUntilTheWindowOfItsDecisionIsOver(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(noon))
		ann := limit.Key("ann")
		reservation := w.grant(ann.Count(15).Reserve())
		w.retries(reservation, time.Hour)
		w.clock.Advance(50 * time.Minute) // 12:50
		w.refund(reservation.At, ann.Count(15))
		w.holds(ann, 10)
		reservation = w.grant(ann.Count(15).Reserve())
		w.clock.Advance(20 * time.Minute) // 13:10
		w.holds(ann, 5)
		w.refund(reservation.At, ann.Count(15)) // 10 of it belong to a window that is over
		w.holds(ann, 5)
	})
}

func TestRefundOfAReservationBreaksNoWindowsCap(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(noon))
		ann := limit.Key("ann")
		reservation := w.grant(ann.Count(15).Reserve()) // 10 of noon's window, 5 of the next
		w.clock.Advance(70 * time.Minute)               // 13:10
		w.grant(ann.Count(5))                           // what 13:00's window has left
		w.refund(reservation.At, ann.Count(15))         // the reserved work did not run
		granted := 5.0
		for {
			if _, err := w.limiter.Consume(w.Context(), w.db, ann); err != nil {
				break
			}
			granted++
		}
		if granted > 10 {
			w.Fatalf("the window from 13:00 granted %v, with a rate of 10 and the default capacity", granted)
		}
	})
}

func TestRefundAfterTheClockSteppedBackNeverMints(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Hour),
			ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(noon)),
		} {
			w.clock.now = noon
			consumed := w.grant(limit.Global().Count(8))
			w.clock.Advance(-3 * time.Hour)
			w.refund(consumed.At, limit.Global().Count(3))
			w.holds(limit.Global(), 5)
			w.refund(consumed.At, limit.Global().Count(30))
			w.holds(limit.Global(), 10)
			w.clock.now = noon
			w.holds(limit.Global(), 10)
		}
	})
}

func TestRefundIntoAWindowThatTheRowHasSeenButTheClockNotYetGivesNothingBack(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(noon))
		w.clock.Advance(59 * time.Minute)
		first := w.grant(limit.Global().Count(5)) // 12:59
		w.clock.Advance(time.Minute)
		w.grant(limit.Global().Count(10)) // all of 13:00's
		w.clock.Advance(-time.Second)
		w.refund(first.At, limit.Global().Count(5))
		w.clock.Advance(time.Second)
		w.deny(limit.Global())
	})
}

// ---- Reset

func TestResetMakesLimitsFullAgain(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(4))
		reset := func(requests ...ratelimit.Request) {
			w.Helper()
			if err := w.limiter.Reset(w.Context(), w.db, requests...); err != nil {
				w.Fatalf("reset: %v", err)
			}
		}
		reset(bucket.Key("nobody"), window.Global(), sharded.Key("nobody")) // missing rows

		all := []ratelimit.Request{bucket.Key("ann"), bucket.Key("bob"), bucket.Global(), window.Key("ann"), sharded.Key("ann"), sharded.Global()}
		for _, request := range all {
			if _, err := w.limiter.Charge(w.Context(), w.db, request.Count(30)); err != nil {
				w.Fatal(err)
			}
		}
		reset(bucket.Key("ann"))
		w.holds(bucket.Key("ann"), 10)
		for _, request := range all[1:] {
			w.holds(request, -20)
		}
		reset(bucket.Global(), sharded.Key("ann"), bucket.Key("ann"))
		w.holds(bucket.Global(), 10)
		w.holds(sharded.Key("ann"), 10)
		w.holds(bucket.Key("bob"), -20)
		w.holds(sharded.Global(), -20)
		w.holds(window.Key("ann"), -20)
		reset(all...)
		reset(all[0], all[0]) // twice the same
		if rows := w.rows(); rows != "" {
			w.Fatalf("rows after all were reset:\n%s", rows)
		}
	})
}

func TestResetDoesNotLookAtTheCount(t *testing.T) {
	behaviour(t, func(w world) {
		for _, request := range []ratelimit.Request{
			ratelimit.TokenBucket("none saved", 10, time.Minute, ratelimit.Capacity(0)).Key("ann"),
			ratelimit.TokenBucket("half", 0.5, time.Minute).Key("ann"),
			ratelimit.TokenBucket("ten", 10, time.Minute).Key("ann").Count(11),
		} {
			if _, err := w.limiter.Charge(w.Context(), w.db, request.Count(20)); err != nil {
				w.Fatal(err)
			}
			if err := w.limiter.Reset(w.Context(), w.db, request); err != nil {
				w.Errorf("reset: %v", err)
			}
		}
	})
}

// ---- several limits at once

func TestSeveralLimitsAreAllOrNothing(t *testing.T) {
	behaviour(t, func(w world) {
		perUser := ratelimit.TokenBucket("per user", 10, time.Minute)
		perTeam := ratelimit.FixedWindow("per team", 100, time.Hour, ratelimit.Start(noon))
		global := ratelimit.TokenBucket("everybody", 20, time.Second)

		result := w.grant(perUser.Key("ann").Count(4), perTeam.Key("red").Count(50), global.Global().Count(5))
		if r := result.Requests; r[0].Remaining != 6 || r[1].Remaining != 50 || r[2].Remaining != 15 {
			w.Fatalf("granted: %+v", result)
		}
		before := w.rows()
		result = w.deny(perUser.Key("ann").Count(9), perTeam.Key("red").Count(1), global.Global().Count(16))
		if after := w.rows(); before != after {
			w.Fatalf("a denial wrote:\n%s\nbecame\n%s", before, after)
		}
		r := result.Requests
		if r[0].OK || !r[1].OK || r[2].OK {
			w.Fatalf("violated are the first and the third: %+v", result)
		}
		if r[0].Remaining != 6 || r[1].Remaining != 50 || r[2].Remaining != 15 {
			w.Fatalf("denied: %+v", result)
		}
		if !r[0].RetryAt.Equal(noon.Add(18*time.Second)) || !r[1].RetryAt.Equal(noon) || !r[2].RetryAt.Equal(noon.Add(50*time.Millisecond)) {
			w.Fatalf("denied: %+v", result)
		}
		w.retries(result, 18*time.Second) // the largest
		exceeded := ratelimit.ExceededError{Result: result}
		if denied := exceeded.Denied(); len(denied) != 2 || denied[0].Limit.Name() != "per user" || denied[1].Limit.Name() != "everybody" {
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

		w.clock.Advance(18*time.Second - time.Microsecond)
		w.deny(perUser.Key("ann").Count(9), perTeam.Key("red").Count(1), global.Global().Count(16))
		w.clock.Advance(time.Microsecond)
		w.grant(perUser.Key("ann").Count(9), perTeam.Key("red").Count(1), global.Global().Count(16))
	})
}

func TestRequestsKeepTheirOrderInTheResult(t *testing.T) {
	behaviour(t, func(w world) {
		var requests []ratelimit.Request
		var want []string
		for i, name := range []string{"z", "a", "M", "é", "b", "a"} { // not the order in which rows are locked
			requests = append(requests, ratelimit.TokenBucket(name, 100, time.Minute).Key(fmt.Sprint("key ", -i)).Count(float64(i)))
			want = append(want, fmt.Sprint(name, " key ", -i, " ", i))
		}
		for _, verb := range []func(context.Context, ratelimit.DB, ...ratelimit.Request) (ratelimit.Result, error){
			w.limiter.Consume, w.limiter.Check, w.limiter.Charge,
		} {
			result, err := verb(w.Context(), w.db, requests...)
			if err != nil {
				w.Fatal(err)
			}
			for i, s := range result.Requests {
				if got := fmt.Sprint(s.Limit.Name(), " ", s.Key, " ", s.Count); got != want[i] {
					w.Errorf("request %d: %q, want %q", i, got, want[i])
				}
			}
		}
	})
}

func TestALimitNamedTwiceInOneCallCountsTwice(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute)
		ann := limit.Key("ann")
		result := w.grant(ann.Count(3), limit.Key("bob"), ann.Count(4))
		if r := result.Requests; r[0].Remaining != 3 || r[1].Remaining != 9 || r[2].Remaining != 3 || r[0].Count != 3 || r[2].Count != 4 {
			w.Fatalf("granted: %+v", result)
		}
		result = w.deny(ann.Count(2), ann.Count(2))
		w.retries(result, 6*time.Second)
		w.refuse(ratelimit.ErrExceedsCapacity, ann.Count(6), ann.Count(5))
		w.grant(ann.Count(2), ann.Count(1))
	})
}

func TestPlainAndReservingRequestsForOneKeyMix(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.MaxReserved(6))
		key := limit.Key("ann")
		// One after another: the plain one needs tokens that are there, the reservation may go below zero after it.
		result := w.grant(key.Count(8), key.Count(6).Reserve())
		if result.Requests[0].Remaining != -4 {
			w.Fatalf("granted: %+v", result)
		}
		w.retries(result, 24*time.Second)
		w.do(w.limiter.Reset(w.Context(), w.db, key))
		// The other way round the plain one would find a debt.
		w.refuse(ratelimit.ErrExceedsCapacity, key.Count(6).Reserve(), key.Count(8))
		w.grant(key.Count(4).Reserve(), key.Count(6))
		result = w.deny(key.Count(6).Reserve(), key.Count(0))
		w.retries(result, 36*time.Second)
		w.clock.Advance(36*time.Second - time.Microsecond)
		w.deny(key.Count(6).Reserve(), key.Count(0))
		w.clock.Advance(time.Microsecond)
		w.grant(key.Count(6).Reserve(), key.Count(0))
	})
}

func TestTwoDefinitionsOfOneLimitInOneCallAreAnError(t *testing.T) {
	behaviour(t, func(w world) {
		one := ratelimit.TokenBucket("messages", 10, time.Minute)
		for _, other := range []ratelimit.Limit{
			ratelimit.TokenBucket("messages", 11, time.Minute),
			ratelimit.TokenBucket("messages", 10, time.Hour),
			ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(11)),
			ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.MaxReserved(0)),
			ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Shards(2)),
			ratelimit.FixedWindow("messages", 10, time.Minute),
			ratelimit.FixedWindow("messages", 10, time.Minute, ratelimit.Start(noon)),
		} {
			w.refuse(ratelimit.ErrInvalid, one.Key("ann"), other.Key("ann"))
		}
		same := ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(10), ratelimit.Shards(1))
		w.grant(one.Key("ann"), same.Key("ann"))
	})
}

func TestReservationsWorkWithSeveralLimits(t *testing.T) {
	behaviour(t, func(w world) {
		tokens := ratelimit.TokenBucket("tokens", 60, time.Minute, ratelimit.MaxReserved(120))
		calls := ratelimit.FixedWindow("calls", 2, time.Minute, ratelimit.Start(noon), ratelimit.MaxReserved(2))
		request := func(n float64) []ratelimit.Request {
			return []ratelimit.Request{tokens.Key("red").Count(n).Reserve(), calls.Key("red").Reserve()}
		}
		w.retries(w.grant(request(60)...), 0)
		w.retries(w.grant(request(30)...), 30*time.Second)
		w.retries(w.grant(request(10)...), time.Minute) // the calls come later than the tokens
		w.retries(w.grant(request(50)...), 90*time.Second)
		// Balances are now -90 and -2.
		result := w.deny(request(31)...)
		if r := result.Requests; r[0].OK || r[1].OK || !r[0].RetryAt.Equal(noon.Add(time.Second)) {
			w.Fatalf("denied: %+v", result)
		}
		w.retries(result, time.Minute)
		before := w.rows()
		result = w.deny(tokens.Key("red").Count(31).Reserve(), tokens.Key("blue").Count(61).Reserve())
		if w.rows() != before {
			w.Fatal("a denial wrote")
		}
		if r := result.Requests; r[0].OK || !r[1].OK || r[1].Remaining != 60 {
			w.Fatalf("denied: %+v", result)
		}
		w.retries(result, time.Second)
		w.clock.Advance(time.Minute)
		w.grant(request(31)...)
	})
}

// ---- keys

func TestTheGlobalLimitIsNoKeys(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("signUps", 1, time.Minute)
		w.grant(limit.Global())
		w.deny(limit.Global())
		for _, key := range []string{"ann", "global", "*", " ", "''", "NULL"} {
			w.grant(limit.Key(key))
		}
		w.deny(limit.Global())
		if s := w.check(limit.Global()).Requests[0]; s.Key != "" {
			w.Fatalf("the key of the global limit is %q", s.Key)
		}
	})
}

func TestKeysOfSeveralPartsNeverCollide(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 1, time.Minute)
		keys := [][]string{
			{"a", "b"}, {"a|b"}, {`a\`, "b"}, {`a\|b`}, {"a", "|b"}, {"a|", "b"}, {`a\\`, "b"}, {`a\\|b`}, {`a`, `\|b`}, {"a||b"},
			{"a", "b", "c"}, {"a|b", "c"}, {"a", "b|c"}, {"|"}, {"|", "|"}, {`\`}, {`\`, `\`}, {`\|`}, {"A", "b"}, {"a ", "b"}, {"b", "a"},
		}
		for _, parts := range keys {
			w.grant(limit.Key(parts...))
		}
		for _, parts := range keys {
			w.deny(limit.Key(parts...))
		}
	})
}

// ---- the grid of fixed windows

func TestAFixedWindowsGridGoesThroughItsStart(t *testing.T) {
	behaviour(t, func(w world) {
		for i, start := range []time.Time{
			noon.Add(-30 * time.Minute), noon.Add(30 * time.Minute), noon.Add(-30*time.Minute - 10_000*time.Hour),
			noon.Add(30*time.Minute + 1_000_000*time.Hour), time.Date(1, 1, 1, 0, 30, 0, 0, time.UTC), time.Date(9999, 12, 31, 23, 30, 0, 0, time.UTC),
			noon.Add(30 * time.Minute).In(time.FixedZone("Kathmandu", 5*3600+45*60)),
		} {
			w.clock.now = noon
			limit := ratelimit.FixedWindow(fmt.Sprint("calls", i), 2, time.Hour, ratelimit.Start(start))
			result := w.grant(limit.Key("ann").Count(2)) // a start in the future denies nobody
			if at := result.Requests[0].ResetAt; !at.Equal(noon.Add(30 * time.Minute)) {
				w.Fatalf("start %v: the next window begins at %v", start, at)
			}
			w.retries(w.deny(limit.Key("ann")), 30*time.Minute)
			w.clock.Advance(30*time.Minute - time.Microsecond)
			w.deny(limit.Key("ann"))
			w.clock.Advance(time.Microsecond)
			w.grant(limit.Key("ann").Count(2))
			w.retries(w.deny(limit.Key("ann")), time.Hour)
		}
	})
}

func TestAFixedWindowWithoutAStartHasAGridPerKey(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 2, time.Hour)
		offset := func(request ratelimit.Request) time.Duration {
			w.Helper()
			at := w.check(request).Requests[0].ResetAt
			if left := at.Sub(w.clock.now); left <= 0 || left > time.Hour {
				w.Fatalf("at %v the next window begins at %v", w.clock.now, at)
			}
			return time.Duration(at.UnixMicro()*1000) % time.Hour
		}
		seen := map[time.Duration]string{}
		random := newRand(w.T)
		for i := range 20 {
			key := fmt.Sprint("user ", i)
			first := offset(limit.Key(key))
			if other, there := seen[first]; there {
				w.Fatalf("%q and %q begin together", key, other)
			}
			seen[first] = key
			for range 5 {
				w.clock.Advance(time.Duration(random.Int64N(int64(5 * time.Hour))))
				_, err := w.limiter.Charge(w.Context(), w.db, limit.Key(key))
				w.do(err)
				if now := offset(limit.Key(key)); now != first {
					w.Fatalf("%q began at %v, and now at %v", key, first, now)
				}
			}
		}
		if offset(limit.Key("user 1")) == offset(ratelimit.FixedWindow("other", 2, time.Hour).Key("user 1")) {
			w.Error("two limits have one grid for a key")
		}
		if offset(limit.Global()) == offset(ratelimit.FixedWindow("other", 2, time.Hour).Global()) {
			w.Error("two limits have one grid without keys")
		}
	})
}

func TestDeletingAnIdleRowChangesNoDecision(t *testing.T) {
	behaviour(t, func(w world) {
		random := newRand(w.T)
		for _, limit := range []ratelimit.Limit{
			ratelimit.FixedWindow("hashed", 3, time.Minute, ratelimit.Capacity(5)),
			ratelimit.FixedWindow("started", 2, time.Minute, ratelimit.Start(noon.Add(time.Second))),
			ratelimit.TokenBucket("bucket", 3, time.Minute, ratelimit.Capacity(5)),
			ratelimit.TokenBucket("sharded", 3, time.Minute, ratelimit.Capacity(5), ratelimit.Shards(3)),
		} {
			w.clock.now = noon
			key, deleted := limit.Key("ann"), 0
			for step := range 60 {
				w.clock.Advance(time.Duration(random.Int64N(int64(time.Minute))))
				count := float64(random.IntN(3))
				if w.balance(key) == limit.Capacity() {
					before := []ratelimit.Result{w.check(key.Count(count)), w.check(key.Count(limit.Capacity())), w.check(key.Count(9).Reserve())}
					if _, err := w.db.Exec(w.Context(), "DELETE FROM rate_limits WHERE name = $1", limit.Name()); err != nil {
						w.Fatal(err)
					}
					after := []ratelimit.Result{w.check(key.Count(count)), w.check(key.Count(limit.Capacity())), w.check(key.Count(9).Reserve())}
					if !reflect.DeepEqual(before, after) {
						w.Fatalf("%s, step %d: was\n%+v, is\n%+v", limit.Name(), step, before, after)
					}
					deleted++
				}
				_, _ = w.limiter.Consume(w.Context(), w.db, key.Count(count))
			}
			if deleted < 3 {
				w.Fatalf("%s: %d rows deleted: this tested too little", limit.Name(), deleted)
			}
		}

		// And what comes after: two keys on one grid, the same requests, one is swept whenever it is idle.
		limit := ratelimit.FixedWindow("swept", 3, time.Minute, ratelimit.Start(noon), ratelimit.Capacity(5))
		for step := range 100 {
			w.clock.Advance(time.Duration(random.Int64N(int64(time.Minute))))
			if w.balance(limit.Key("swept")) == 5 {
				_, err := w.db.Exec(w.Context(), "DELETE FROM rate_limits WHERE name = 'swept' AND key = 'swept'")
				w.do(err)
			}
			count := float64(random.IntN(5))
			kept, _ := w.limiter.Consume(w.Context(), w.db, limit.Key("kept").Count(count))
			swept, _ := w.limiter.Consume(w.Context(), w.db, limit.Key("swept").Count(count))
			swept.Requests[0].Key = "kept"
			if !reflect.DeepEqual(kept, swept) {
				w.Fatalf("step %d: kept %+v, swept %+v", step, kept, swept)
			}
		}
	})
}

// ---- capacity

func TestTheCapacityIsTheRateUnlessSet(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute), ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(noon)),
		} {
			w.clock.now = noon
			w.grant(limit.Global().Count(10))
			w.deny(limit.Global().Count(0.001))
			w.clock.Advance(time.Hour)
			w.holds(limit.Global(), 10)
			w.refuse(ratelimit.ErrExceedsCapacity, limit.Global().Count(10.001))
		}
	})
}

func TestWithACapacityOfZeroEverythingIsReserved(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.Capacity(0), ratelimit.MaxReserved(15)),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Capacity(0), ratelimit.MaxReserved(15), ratelimit.Start(noon)),
		} {
			w.clock.now = noon
			key := limit.Key("ann")
			w.refuse(ratelimit.ErrExceedsCapacity, key)
			w.refuse(ratelimit.ErrExceedsCapacity, key.Count(1e-9))
			w.grant(key.Count(0))
			w.holds(key, 0)
			result := w.grant(key.Count(10).Reserve())
			w.retries(result, time.Minute)
			w.grant(key.Count(5).Reserve())
			w.deny(key.Reserve())
			w.refuse(ratelimit.ErrExceedsCapacity, key.Count(16).Reserve())
			w.clock.Advance(24 * time.Hour) // nothing is saved up
			w.holds(key, 0)
			w.refuse(ratelimit.ErrExceedsCapacity, key)
			w.retries(w.grant(key.Count(10).Reserve()), time.Minute)
		}
	})
}

func TestACapacityBelowTheRateCapsTheBurst(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.Capacity(4))
		window := ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Capacity(4), ratelimit.Start(noon))
		for range 3 {
			for _, limit := range []ratelimit.Limit{bucket, window} {
				w.grant(limit.Global().Count(4))
				w.deny(limit.Global())
				w.refuse(ratelimit.ErrExceedsCapacity, limit.Global().Count(5))
			}
			w.clock.Advance(time.Minute)
		}
		w.grant(bucket.Global().Count(4), window.Global().Count(4))
		w.clock.Advance(24 * time.Second)
		w.grant(bucket.Global().Count(4))
		w.deny(window.Global())
		// A debt is paid at the full rate, up to the capacity.
		_, err := w.limiter.Charge(w.Context(), w.db, window.Global().Count(17))
		w.do(err)
		w.holds(window.Global(), -17)
		w.clock.Advance(time.Minute)
		w.holds(window.Global(), -7)
		w.clock.Advance(time.Minute)
		w.holds(window.Global(), 3)
		w.clock.Advance(time.Minute)
		w.holds(window.Global(), 4)
	})
}

func TestACapacityAboveTheRateRollsOver(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.Capacity(25))
		window := ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Capacity(25), ratelimit.Start(noon))
		w.grant(bucket.Global().Count(25), window.Global().Count(25))
		for _, row := range []struct {
			windows int
			want    float64
		}{{1, 10}, {2, 20}, {3, 25}, {7, 25}, {0, 0}} {
			w.clock.Advance(time.Duration(row.windows) * time.Minute)
			for _, limit := range []ratelimit.Limit{bucket, window} {
				w.holds(limit.Global(), row.want)
				w.grant(limit.Global().Count(row.want))
				w.deny(limit.Global())
			}
		}
		w.clock.Advance(59 * time.Second)
		w.holds(window.Global(), 0)
		w.holds(bucket.Global(), 10*59.0/60)
		// What is not taken in a window is there in the next.
		w.clock.Advance(time.Second)
		w.grant(window.Global().Count(4))
		w.clock.Advance(time.Minute)
		w.holds(window.Global(), 16)
	})
}

// ---- fractions

func TestRatesAndCountsMayBeFractional(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("slow", 0.25, time.Second, ratelimit.Capacity(1.5))
		key := limit.Key("ann")
		w.grant(key.Count(1.25))
		w.holds(key, 0.25)
		w.retries(w.deny(key.Count(0.5)), time.Second)
		w.retries(w.deny(key.Count(1.5)), 5*time.Second)
		w.refuse(ratelimit.ErrExceedsCapacity, key.Count(1.75))
		w.grant(key.Count(0.125))
		w.grant(key.Count(0.125))
		w.retries(w.deny(key.Count(0.0625)), 250*time.Millisecond)
		w.clock.Advance(250 * time.Millisecond)
		w.grant(key.Count(0.0625))

		monthly := ratelimit.FixedWindow("monthly", 0.5, time.Hour, ratelimit.Capacity(2), ratelimit.Start(noon))
		w.grant(monthly.Key("ann").Count(2))
		w.retries(w.deny(monthly.Key("ann")), 2*time.Hour-250*time.Millisecond)
		w.clock.now = noon.Add(2*time.Hour - time.Microsecond)
		w.deny(monthly.Key("ann"))
		w.clock.now = noon.Add(2 * time.Hour)
		w.grant(monthly.Key("ann"))
	})
}

func TestACountOfZeroIsGrantedUnlessInDebt(t *testing.T) {
	behaviour(t, func(w world) {
		key := ratelimit.TokenBucket("messages", 10, time.Minute).Key("ann")
		w.grant(key.Count(0))
		w.grant(key.Count(10))
		w.grant(key.Count(0))
		w.grant(key.Count(1).Reserve())
		w.retries(w.deny(key.Count(0)), 6*time.Second)
		w.retries(w.grant(key.Count(0).Reserve()), 6*time.Second)
		w.holds(key, -1)
	})
}

// ---- reservations

func TestMaxReservedUnsetZeroAndPositiveAreThreeThings(t *testing.T) {
	behaviour(t, func(w world) {
		unset := ratelimit.TokenBucket("unset", 10, time.Minute).Key("ann")
		zero := ratelimit.TokenBucket("zero", 10, time.Minute, ratelimit.MaxReserved(0)).Key("ann")
		five := ratelimit.TokenBucket("five", 10, time.Minute, ratelimit.MaxReserved(5)).Key("ann")

		w.retries(w.grant(unset.Count(1e6).Reserve()), 99_999*time.Minute)
		w.grant(unset.Count(1e6).Reserve())

		w.grant(zero.Count(10).Reserve())
		w.retries(w.deny(zero.Reserve()), 6*time.Second)
		w.refuse(ratelimit.ErrExceedsCapacity, zero.Count(11).Reserve())

		w.retries(w.grant(five.Count(9).Reserve()), 0)
		w.deny(five.Count(2)) // plain requests see nothing of it
		w.retries(w.grant(five.Count(4).Reserve()), 18*time.Second)
		w.retries(w.deny(five.Count(3).Reserve()), 6*time.Second) // only what is beyond maxReserved counts
		w.retries(w.deny(five), 24*time.Second)
		w.grant(five.Count(2).Reserve())
		w.refuse(ratelimit.ErrExceedsCapacity, five.Count(15.5).Reserve())
		w.clock.Advance(time.Hour)
		// Above the capacity, within capacity + maxReserved.
		w.refuse(ratelimit.ErrExceedsCapacity, five.Count(15))
		w.retries(w.grant(five.Count(15).Reserve()), 30*time.Second)
		w.retries(w.deny(five.Count(15).Reserve()), 90*time.Second)
		w.clock.Advance(90 * time.Second)
		w.retries(w.grant(five.Count(15).Reserve()), 30*time.Second)
	})
}

func TestAReservationsRetryAtIsWhenTheWorkMayRun(t *testing.T) {
	behaviour(t, func(w world) {
		window := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(noon)).Key("ann")
		w.clock.Advance(20 * time.Minute)
		w.retries(w.grant(window.Count(10).Reserve()), 0)
		w.retries(w.grant(window.Count(1).Reserve()), 40*time.Minute)
		w.retries(w.grant(window.Count(9).Reserve()), 40*time.Minute)
		w.retries(w.grant(window.Count(11).Reserve()), 160*time.Minute)
		w.holds(window, -21)
	})
}

// ---- changing a limit

func TestChangingALimitTakesEffectAtTheNextCallAndNeverMints(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := func(rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.TokenBucket("limit", rate, period, options...).Key("ann")
		}
		window := func(rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.FixedWindow("limit", rate, period, append(options, ratelimit.Start(noon))...).Key("ann")
		}

		// The capacity: raised, it adds nothing; lowered, it clamps.
		w.grant(bucket(10, time.Minute).Count(4))
		w.holds(bucket(10, time.Minute, ratelimit.Capacity(1000)), 6)
		w.holds(bucket(10, time.Minute, ratelimit.Capacity(2)), 2)
		w.grant(bucket(10, time.Minute, ratelimit.Capacity(2)).Count(1))
		w.holds(bucket(10, time.Minute, ratelimit.Capacity(1000)), 1)
		w.refuse(ratelimit.ErrExceedsCapacity, bucket(10, time.Minute, ratelimit.Capacity(2)).Count(3)) // though the row exists
		w.holds(bucket(10, time.Minute, ratelimit.Capacity(0)), 0)

		// The rate and the period.
		w.clock.Advance(6 * time.Second)
		w.holds(bucket(10, time.Minute), 2)
		w.holds(bucket(20, time.Minute), 3)
		w.holds(bucket(10, 30*time.Second), 3)
		w.grant(bucket(10, time.Minute).Count(2))
		w.holds(bucket(1e6, time.Minute), 0)

		// The kind, at the same instant: nothing is added either way.
		w.holds(window(10, time.Minute), 0)
		w.grant(window(10, time.Minute).Count(0))
		w.holds(bucket(10, time.Minute), 0)
		w.clock.now = noon.Add(time.Minute)
		w.holds(window(10, time.Minute), 10)
		w.grant(window(10, time.Minute).Count(10))
		w.holds(bucket(10, time.Minute), 0)
		w.holds(window(10, time.Second), 0)
		w.holds(window(10, time.Hour), 0)
		w.holds(window(1000, time.Minute), 0)

		// A debt stays owed, whatever the numbers are.
		w.grant(bucket(10, time.Minute).Count(20).Reserve())
		for _, request := range []ratelimit.Request{
			bucket(100, time.Minute), bucket(10, time.Hour), bucket(10, time.Minute, ratelimit.Capacity(0)), bucket(10, time.Minute, ratelimit.MaxReserved(0)),
			window(10, time.Minute), window(10, time.Minute, ratelimit.Capacity(100)), window(10, time.Hour, ratelimit.MaxReserved(3)),
		} {
			w.holds(request, -20)
			w.deny(request.Count(0))
		}
		w.deny(bucket(10, time.Minute, ratelimit.MaxReserved(5)).Reserve())
	})
}

// ---- transactions

func TestTheTransactionStaysUsable(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 1, time.Minute)
		tx := w.begin()
		inner := world{w.T, tx, w.limiter, w.clock}
		inner.grant(limit.Key("ann"))
		inner.deny(limit.Key("ann"))
		inner.deny(limit.Key("ann"), limit.Key("bob"))
		inner.refuse(ratelimit.ErrInvalid, limit.Key(""))
		inner.refuse(ratelimit.ErrInvalid)
		inner.refuse(ratelimit.ErrExceedsCapacity, limit.Key("bob").Count(2))
		var one int
		w.do(tx.QueryRow(w.Context(), "SELECT 1").Scan(&one))
		inner.grant(limit.Key("bob"))
		w.do(tx.Commit(w.Context()))
		w.deny(limit.Key("ann"))
		w.deny(limit.Key("bob"))
	})
}

func TestARollbackReturnsTheTokens(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3))
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		all := []ratelimit.Request{bucket.Global().Count(2), sharded.Global().Count(2), window.Global().Count(2)}
		try := func(want float64) {
			w.Helper()
			tx := w.begin()
			inner := world{w.T, tx, w.limiter, w.clock}
			inner.grant(all...)
			inner.grant(all[0])
			inner.grant(all[1])
			_, err := w.limiter.Charge(w.Context(), tx, all...)
			w.do(err)
			w.do(w.limiter.Reset(w.Context(), tx, all[2]))
			inner.grant(all[2].Count(10))
			w.do(tx.Rollback(w.Context()))
			for _, request := range all {
				w.holds(request, want)
			}
		}
		try(10) // no rows yet
		if rows := w.rows(); rows != "" {
			w.Fatalf("rows:\n%s", rows)
		}
		w.grant(all...)
		try(8)
	})
}

func TestACommitKeepsTheLimitAndTheBusinessRowTogether(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := newPool(t, 2)
			limiter, _ := newLimiter()
			limit := ratelimit.TokenBucket("messages", 3, time.Minute)
			if _, err := pool.Exec(t.Context(), "CREATE TABLE messages (n int)"); err != nil {
				t.Fatal(err)
			}
			for n := range 5 {
				err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), "INSERT INTO messages VALUES ($1)", n); err != nil {
						return err
					}
					_, err := limiter.Consume(t.Context(), tx, limit.Key("ann"))
					return err
				})
				var exceeded *ratelimit.ExceededError
				if denied := errors.As(err, &exceeded); denied != (n >= 3) || err != nil && !denied {
					t.Fatalf("message %d: %v", n, err)
				}
			}
			var count int
			if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM messages").Scan(&count); err != nil || count != 3 {
				t.Fatalf("%d messages, %v", count, err)
			}
		})
	}
}

// ---- observer, clock, handles

func TestTheObserverSeesEveryDecision(t *testing.T) {
	behaviour(t, func(w world) {
		var seen []ratelimit.Decision
		w.limiter.Observer = func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }
		limit := ratelimit.TokenBucket("messages", 10, time.Minute)
		ann := limit.Key("ann").Count(10)
		ctx := w.Context()

		type outcome struct {
			verb   string
			result ratelimit.Result
			err    error
		}
		var want []outcome
		note := func(verb string, result ratelimit.Result, err error) { want = append(want, outcome{verb, result, err}) }
		result, err := w.limiter.Consume(ctx, w.db, ann)
		note("consume", result, err)
		result, err = w.limiter.Consume(ctx, w.db, ann, limit.Global())
		note("consume", result, err)
		result, err = w.limiter.Check(ctx, w.db, ann)
		note("check", result, err)
		result, err = w.limiter.Charge(ctx, w.db, ann)
		note("charge", result, err)
		result, err = w.limiter.Refund(ctx, w.db, noon, ann)
		note("refund", result, err)
		err = w.limiter.Reset(ctx, w.db, ann)
		want = append(want, outcome{"reset", ratelimit.Result{}, err})
		result, err = w.limiter.Consume(ctx, w.db, ann.Count(11))
		note("consume", result, err)
		result, err = w.limiter.Check(ctx, w.db)
		note("check", result, err)
		result, err = w.limiter.Consume(ctx, nil, ann)
		note("consume", result, err)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		if _, isTx := w.db.(pgx.Tx); !isTx {
			result, err = w.limiter.Consume(cancelled, pooledElsewhere(w), ann)
			note("consume", result, err)
			if !errors.Is(err, context.Canceled) {
				w.Errorf("cancelled: %v", err)
			}
		}

		if len(seen) != len(want) {
			w.Fatalf("seen %d decisions, want %d: %+v", len(seen), len(want), seen)
		}
		for i, d := range seen {
			if d.Verb != want[i].verb || !reflect.DeepEqual(d.Err, want[i].err) || d.Took < 0 || d.Verb != "reset" && !reflect.DeepEqual(d.Result, want[i].result) {
				w.Errorf("decision %d: seen %+v, want %+v", i, d, want[i])
			}
		}
		var exceeded *ratelimit.ExceededError
		if !errors.As(seen[1].Err, &exceeded) || seen[2].Err != nil || seen[2].Result.OK {
			w.Errorf("denials: %+v, %+v", seen[1], seen[2])
		}
		if s := seen[6].Result.Requests[0]; s.Limit.Name() != "messages" || s.Key != "ann" || s.Count != 11 || s.OK {
			w.Errorf("what was refused: %+v", s)
		}
	})
}

// pooledElsewhere is a pool of its own, for what would break the handle under test.
func pooledElsewhere(w world) *pgxpool.Pool { return newPool(w.T, 1) }

func TestWithoutAClockTheDatabaseTellsTheTime(t *testing.T) {
	behaviour(t, func(w world) {
		var limiter ratelimit.Limiter // the zero value is ready
		limit := ratelimit.TokenBucket("messages", 1, 100*time.Millisecond)
		var before, after time.Time
		w.do(w.db.QueryRow(w.Context(), "SELECT clock_timestamp()").Scan(&before))
		result, err := limiter.Consume(w.Context(), w.db, limit.Key("ann"))
		if err != nil {
			w.Fatal(err)
		}
		w.do(w.db.QueryRow(w.Context(), "SELECT clock_timestamp()").Scan(&after))
		if result.RetryAt.Before(before) || result.RetryAt.After(after) {
			w.Fatalf("decided at %v, not between %v and %v", result.RetryAt, before, after)
		}
		// Inside a transaction, time goes on.
		denied, err := limiter.Consume(w.Context(), w.db, limit.Key("ann"))
		for deadline := time.Now().Add(10 * time.Second); err != nil; denied, err = limiter.Consume(w.Context(), w.db, limit.Key("ann")) {
			if denied.RetryAfter <= 0 || denied.RetryAfter > 100*time.Millisecond || time.Now().After(deadline) {
				w.Fatalf("denied: %+v", denied)
			}
			time.Sleep(denied.RetryAfter)
		}
	})
}

func TestEveryQueryExecModeGivesTheSameAnswers(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			config := newPool(t, 1).Config()
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			limiter, clock := newLimiter()
			w := world{t, pool, limiter, clock}
			bucket := ratelimit.TokenBucket("o'bucket", 10, time.Minute, ratelimit.MaxReserved(1.5)).Key(`a\'n"n`)
			window := ratelimit.FixedWindow("window", 0.1, 90*time.Microsecond).Global()
			sharded := ratelimit.TokenBucket("sharded", 1e15, 290*365*24*time.Hour, ratelimit.Shards(2)).Key("ann")
			w.grant(bucket.Count(9.5))
			w.retries(w.deny(bucket), 3*time.Second)
			w.retries(w.grant(bucket.Count(2).Reserve()), 9*time.Second)
			w.grant(window.Count(0.1), sharded.Count(1e15))
			w.deny(window.Count(0.05), sharded)
			_, err = limiter.Charge(t.Context(), pool, bucket)
			w.do(err)
			_, err = limiter.Charge(t.Context(), pool, bucket, window, sharded)
			w.do(err)
			w.holds(bucket, -3.5)
			w.refund(noon, bucket.Count(0.5), sharded)
			w.holds(bucket, -3)
			w.holds(sharded, 0)
			w.do(limiter.Reset(t.Context(), pool, bucket, window))
			w.holds(bucket, 10)
		})
	}
}

func TestALimitFromAConfigFileWorksLikeOneInGo(t *testing.T) {
	behaviour(t, func(w world) {
		var config ratelimit.Config
		w.do(json.Unmarshal([]byte(`{"name": "messages", "kind": "fixed window", "rate": 2, "period": "1h30m",
			"capacity": 3, "maxReserved": 0, "start": "2026-07-01T12:00:00Z", "shards": 1}`), &config))
		limit, err := ratelimit.New(config)
		w.do(err)
		same := ratelimit.FixedWindow("messages", 2, 90*time.Minute, ratelimit.Capacity(3), ratelimit.MaxReserved(0), ratelimit.Start(noon))
		w.grant(limit.Key("ann"), same.Key("ann").Count(2)) // one definition, by two ways
		w.retries(w.deny(limit.Key("ann").Reserve()), 90*time.Minute)
	})
}

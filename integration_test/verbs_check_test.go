package integration_test

import (
	"errors"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestCheckAnswersAndWritesNothing(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(20), ratelimit.MaxReserved(5))
		ann := limit.Key("ann")

		result := w.check(ann)
		if !result.OK || result.Requests[0].Remaining != 20 || w.rows() != "" {
			w.Fatalf("of a fresh limit: %+v, rows %q", result, w.rows())
		}
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
		w.retries(w.check(ann.Count(5)), 30*time.Second) // maxReserved is for Reserve
		if after := w.rows(); after != before {
			w.Fatalf("checks wrote:\n%s\nbecame\n%s", before, after)
		}

		w.reserve(ann.Count(3))
		result = w.check(ann.Count(0))
		if result.OK || result.Requests[0].OK || result.Remaining != -3 {
			w.Fatalf("of a count of 0 in debt: %+v", result)
		}
		w.retries(result, 18*time.Second)
		w.owes(ann, 18*time.Second)

		// Where it has got shards since, its one row counts once.
		w = w.redeployed()
		before = w.rows()
		w.clock.Advance(time.Minute)
		result = w.check(ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(3)).Key("ann"))
		if !result.OK || result.Remaining != 7 || w.rows() != before {
			w.Fatalf("of a limit that has got shards: %+v", result)
		}
	})
}

// TestACheckOfZeroIsDeniedInDebt, as a Consume of 0 is. A Balance is never denied, not even far below -maxReserved.
func TestACheckOfZeroIsDeniedInDebt(t *testing.T) {
	behaviour(t, func(w world) {
		limits := []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.MaxReserved(0)),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(noon), ratelimit.Capacity(0), ratelimit.MaxReserved(5)),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3)),
		}
		var zeros []ratelimit.Request
		for _, limit := range limits {
			ann, full := limit.Key("ann"), *limit.Config().Capacity
			_, err := w.limiter.Charge(w.Context(), w.db, ann.Count(full+100))
			w.do(err)
			zeros = append(zeros, ann.Count(0))
			if result := w.check(ann.Count(0)); result.OK || !near(result.Remaining, -100) || !reflect.DeepEqual(result, w.deny(ann.Count(0))) {
				w.Fatalf("%s: %+v", limit.Name(), result)
			}
			if w.holds(ann, -100); limit.Name() != "window" {
				result := w.check(ann.Count(0), ann.Count(1), limit.Key("bob"))
				if result.OK || result.Requests[0].OK || result.Requests[1].OK || !result.Requests[2].OK {
					w.Fatalf("%s, a count of 0 and one of 1: %+v", limit.Name(), result)
				}
			}
		}
		if result := w.check(zeros...); result.OK || len(deniedBy(result)) != len(limits) {
			w.Fatalf("all together: %+v", result)
		}
		for i, b := range w.balances(zeros...) {
			if !near(b.Remaining, -100) {
				w.Fatalf("all together, %s: %+v", limits[i].Name(), b)
			}
		}
	})
}

// The reservation waits for longer than the list of the other limit's windows covers.
func TestAReservationBesideAWindowThatIsNotKnownIsDenied(t *testing.T) {
	behaviour(t, func(w world) {
		year := ratelimit.CalendarWindow("year", 1, ratelimit.Year)
		day := ratelimit.CalendarWindow("day", 1, ratelimit.Day, ratelimit.MaxReserved(0))
		w.grant(year.Global())
		w.denyReserve(year.Global(), day.Global()) // the windows of that day are not known
		w.denyReserve(year.Global(), day.Global().Count(0))
		for i, b := range w.balances(year.Global(), day.Global()) {
			if b.Remaining != float64(i) {
				w.Errorf("%s has %v left, want %d", b.Limit.Name(), b.Remaining, i)
			}
		}
		if at, next := w.reserve(year.Global()).RetryAt, time.Date(noon.Year()+1, 1, 1, 0, 0, 0, 0, time.UTC); !at.Equal(next) {
			w.Errorf("alone, it runs at %v, want %v", at, next)
		}
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
				requests = append(requests, limit.Global().Count(math.Round(random.Float64()*60)/8))
			}
			if random.IntN(8) == 0 { // a debt
				if _, err := w.limiter.Reserve(w.Context(), w.db, requests...); err != nil && !errors.Is(err, ratelimit.ErrDenied) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
					w.Fatal(err)
				}
			}
			check, checkErr := w.limiter.Check(w.Context(), w.db, requests...)
			consumed, err := w.limiter.Consume(w.Context(), w.db, requests...)
			if errors.Is(err, ratelimit.ErrExceedsCapacity) && errors.Is(checkErr, ratelimit.ErrExceedsCapacity) {
				continue
			}
			if errors.Is(checkErr, ratelimit.ErrDenied) != errors.Is(err, ratelimit.ErrDenied) || consumed.OK != (err == nil) || check.OK != (checkErr == nil) {
				w.Fatalf("step %d: check %+v, %v, consume %+v, %v", step, check, checkErr, consumed, err)
			}
			if consumed.OK {
				for _, s := range consumed.Requests {
					sum[s.Limit.Name()] += s.Count
				}
			}
			for i := range consumed.Requests {
				s := &consumed.Requests[i]
				left := check.Requests[i].Remaining - sum[s.Limit.Name()]
				if !near(s.Remaining, left) {
					w.Fatalf("step %d, request %d: check says %+v, consume %+v", step, i, check, consumed)
				}
				if consumed.OK { // after the call, the two differ
					s.Remaining, s.ResetAt = check.Requests[i].Remaining, check.Requests[i].ResetAt
				}
			}
			if consumed.OK {
				consumed.Remaining, consumed.ResetAt = check.Remaining, check.ResetAt
			}
			if check, consumed := told(check), told(consumed); !reflect.DeepEqual(check, consumed) {
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

// told returns a result without what only its receipt needs.
func told(r ratelimit.Result) ratelimit.Result {
	told := ratelimit.Result{OK: r.OK, At: r.At, RetryAt: r.RetryAt, RetryAfter: r.RetryAfter, Remaining: r.Remaining, ResetAt: r.ResetAt}
	for _, s := range r.Requests {
		told.Requests = append(told.Requests, ratelimit.Status{
			Limit: s.Limit, Key: s.Key, Count: s.Count, OK: s.OK, Remaining: s.Remaining, ResetAt: s.ResetAt, RetryAt: s.RetryAt,
		})
	}
	return told
}

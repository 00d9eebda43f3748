package verbs_test

import (
	"errors"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestCheckAnswersAndWritesNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(20), ratelimit.MaxReserved(5))
		ann := limit.Key("ann")

		result := w.Check(ann)
		if !result.OK || result.Requests[0].Remaining != 20 || w.Rows() != "" {
			w.Fatalf("of a fresh limit: %+v, rows %q", result, w.Rows())
		}
		var xid *string
		w.Do(w.DB.QueryRow(w.Context(), "SELECT pg_current_xact_id_if_assigned()::text").Scan(&xid))
		if xid != nil {
			w.Fatalf("a check took transaction id %s", *xid)
		}

		w.Grant(ann.Count(20))
		before := w.Rows()
		result = w.Check(ann)
		if result.OK || result.Requests[0].OK || result.Requests[0].Remaining != 0 || !result.Requests[0].ResetAt.Equal(harness.Noon.Add(2*time.Minute)) {
			w.Fatalf("of an empty limit: %+v", result)
		}
		w.Retries(result, 6*time.Second)
		w.Retries(w.Check(ann.Count(5)), 30*time.Second) // maxReserved is for Reserve
		if after := w.Rows(); after != before {
			w.Fatalf("checks wrote:\n%s\nbecame\n%s", before, after)
		}

		w.Reserve(ann.Count(3))
		result = w.Check(ann.Count(0))
		if result.OK || result.Requests[0].OK || result.Remaining != -3 {
			w.Fatalf("of a count of 0 in debt: %+v", result)
		}
		w.Retries(result, 18*time.Second)
		w.Owes(ann, 18*time.Second)

		// Where it has got shards since, its one row counts once.
		w = w.Redeployed()
		before = w.Rows()
		w.Clock.Advance(time.Minute)
		result = w.Check(ratelimit.TokenBucket("messages", 10, time.Minute, ratelimit.Capacity(20), ratelimit.Shards(3)).Key("ann"))
		if !result.OK || result.Remaining != 7 || w.Rows() != before {
			w.Fatalf("of a limit that has got shards: %+v", result)
		}
	})
}

// TestACheckOfZeroIsDeniedInDebt, as a Consume of 0 is. A Balance is never denied, not even far below -maxReserved.
func TestACheckOfZeroIsDeniedInDebt(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limits := []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Minute, ratelimit.MaxReserved(0)),
			ratelimit.FixedWindow("window", 10, time.Minute, ratelimit.Start(harness.Noon), ratelimit.Capacity(0), ratelimit.MaxReserved(5)),
			ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3)),
		}
		var zeros []ratelimit.Request
		for _, limit := range limits {
			ann, full := limit.Key("ann"), *limit.Config().Capacity
			_, err := w.Limiter.Charge(w.Context(), w.DB, ann.Count(full+100))
			w.Do(err)
			zeros = append(zeros, ann.Count(0))
			if result := w.Check(ann.Count(0)); result.OK || !harness.Near(result.Remaining, -100) || !reflect.DeepEqual(result, w.Deny(ann.Count(0))) {
				w.Fatalf("%s: %+v", limit.Name(), result)
			}
			if w.Holds(ann, -100); limit.Name() != "window" {
				result := w.Check(ann.Count(0), ann.Count(1), limit.Key("bob"))
				if result.OK || result.Requests[0].OK || result.Requests[1].OK || !result.Requests[2].OK {
					w.Fatalf("%s, a count of 0 and one of 1: %+v", limit.Name(), result)
				}
			}
		}
		if result := w.Check(zeros...); result.OK || len(harness.DeniedBy(result)) != len(limits) {
			w.Fatalf("all together: %+v", result)
		}
		for i, b := range w.Balances(zeros...) {
			if !harness.Near(b.Remaining, -100) {
				w.Fatalf("all together, %s: %+v", limits[i].Name(), b)
			}
		}
	})
}

// The reservation waits for longer than the list of the other limit's windows covers.
func TestAReservationBesideAWindowThatIsNotKnownIsDenied(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		year := ratelimit.CalendarWindow("year", 1, ratelimit.Year)
		day := ratelimit.CalendarWindow("day", 1, ratelimit.Day, ratelimit.MaxReserved(0))
		w.Grant(year.Global())
		w.DenyReserve(year.Global(), day.Global()) // the windows of that day are not known
		w.DenyReserve(year.Global(), day.Global().Count(0))
		for i, b := range w.Balances(year.Global(), day.Global()) {
			if b.Remaining != float64(i) {
				w.Errorf("%s has %v left, want %d", b.Limit.Name(), b.Remaining, i)
			}
		}
		if at, next := w.Reserve(year.Global()).RetryAt, time.Date(harness.Noon.Year()+1, 1, 1, 0, 0, 0, 0, time.UTC); !at.Equal(next) {
			w.Errorf("alone, it runs at %v, want %v", at, next)
		}
	})
}

func TestCheckAnswersLikeConsume(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		random := harness.NewRand(w.T)
		limits := []ratelimit.Limit{
			ratelimit.TokenBucket("a", 10, time.Minute, ratelimit.Capacity(20)),
			ratelimit.TokenBucket("b", 0.7, time.Second, ratelimit.Capacity(12), ratelimit.MaxReserved(3)),
			ratelimit.FixedWindow("c", 7, time.Minute, ratelimit.MaxReserved(10)),
			ratelimit.FixedWindow("d", 3.3, time.Minute, ratelimit.Capacity(15), ratelimit.Start(harness.Noon)),
		}
		granted, denied := 0, 0
		for step := range 150 {
			w.Clock.Advance(time.Duration(random.Int64N(int64(20 * time.Second))))
			var requests []ratelimit.Request
			sum := map[string]float64{}
			for range 1 + random.IntN(3) {
				limit := limits[random.IntN(len(limits))]
				requests = append(requests, limit.Global().Count(math.Round(random.Float64()*60)/8))
			}
			if random.IntN(8) == 0 { // a debt
				if _, err := w.Limiter.Reserve(w.Context(), w.DB, requests...); err != nil && !errors.Is(err, ratelimit.ErrDenied) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
					w.Fatal(err)
				}
			}
			check, checkErr := w.Limiter.Check(w.Context(), w.DB, requests...)
			consumed, err := w.Limiter.Consume(w.Context(), w.DB, requests...)
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
				if !harness.Near(s.Remaining, left) {
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

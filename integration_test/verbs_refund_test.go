package integration_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// refund also checks the number of refunded tokens in the result.
func (w world) refund(receipt ratelimit.Receipt, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	before := readBalances(w, &ratelimit.Limiter{Clock: w.limiter.Clock}, w.db, requests...) // no observer sees it
	result, err := w.limiter.Refund(w.Context(), w.db, receipt, requests...)
	if err != nil || !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
		w.Fatalf("refund: %+v, %v", result, err)
	}
	for i, status := range result.Requests {
		if back := status.Remaining - before[i].Remaining; !near(status.Refunded, back) {
			w.Fatalf("%v refunded to %s by its result, %v by its balances", status.Refunded, status.Limit.Name(), back)
		}
	}
	return result
}

// refuseRefund wants a refund to fail before anything is sent.
func (w world) refuseRefund(receipt ratelimit.Receipt, requests ...ratelimit.Request) {
	w.Helper()
	if result, err := w.limiter.Refund(w.Context(), w.db, receipt, requests...); !errors.Is(err, ratelimit.ErrInvalid) || result.OK {
		w.Fatalf("refund of %q: %+v, %v, want ErrInvalid", receipt, result, err)
	}
}

// Without requests, all that is left comes back.
func TestRefundWithoutRequestsGivesBackAllThatIsLeft(t *testing.T) {
	behaviour(t, func(w world) {
		bucket, window := ratelimit.TokenBucket("bucket", 10, time.Hour), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Shards(2))
		ann, bob := bucket.Key("ann"), window.Key("bob", "2|")
		receipt := w.grant(ann.Count(6), bob.Count(3), ann).Receipt()
		receipt = w.refund(receipt, ann.Count(2)).Receipt()
		result, err := w.limiter.Refund(w.Context(), w.db, receipt)
		if err != nil || !result.OK || len(result.Requests) != 2 || !near(result.Requests[0].Refunded, 5) || !near(result.Requests[1].Refunded, 3) || result.Receipt() != "" {
			w.Fatalf("%+v, %v", result, err)
		}
		w.holds(ann, 10)
		w.holds(bob, 10)
		redeployed := w.redeployed()
		redeployed.refuseRefund(receipt) // this Limiter does not know the limits yet
		redeployed.holds(ann, 10)
		redeployed.holds(bob, 10)
		if result, err := redeployed.limiter.Refund(w.Context(), w.db, receipt); err != nil || !result.OK {
			w.Fatalf("%+v, %v", result, err)
		}
	})
}

func TestRefundToATokenBucketGivesBackWhatIsStillMissing(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.Capacity(20))
		ann := limit.Key("ann")
		receipt := w.grant(ann.Count(6)).Receipt()
		result := w.refund(receipt, ann.Count(2.5))
		if result.Requests[0].Remaining != 16.5 {
			w.Fatalf("refunded: %+v", result)
		}
		w.clock.Advance(12 * time.Second) // 2 have been refilled, 1.5 are missing
		w.refund(result.Receipt(), ann.Count(3.5))
		w.holds(ann, 20)

		// Tokens that were refilled since are worth nothing: capacity 10, 5 taken, full again, 10 taken.
		bob := ratelimit.TokenBucket("credits", 10, 10*time.Second).Key("bob")
		receipt = w.grant(bob.Count(5)).Receipt()
		w.clock.Advance(5 * time.Second)
		w.grant(bob.Count(10))
		w.refund(receipt, bob.Count(5))
		w.deny(bob)
		w.clock.Advance(-3 * time.Second) // a clock that steps back gives back no more
		w.refund(receipt, bob.Count(5))
		w.holds(bob, 0)
	})
}

// CASES A of the promise: reserve eleven tokens, refund five of the first, reserve five more.
func TestARefundBehindWaitingReservationsKeepsTheirInstants(t *testing.T) {
	behaviour(t, func(w world) {
		one := ratelimit.TokenBucket("jobs", 1, time.Second).Global()
		var receipts []ratelimit.Receipt
		runs := map[time.Duration]int{}
		for i := range 11 {
			result := w.reserve(one)
			w.runs(result, time.Duration(i)*time.Second)
			receipts = append(receipts, result.Receipt())
			if i >= 5 {
				runs[result.Delay]++
			}
		}
		for _, receipt := range receipts[:5] {
			w.refund(receipt, one)
		}
		for range 5 {
			runs[w.reserve(one).Delay]++
		}
		for at, n := range runs {
			if n > 1 {
				w.Errorf("%d run after %v", n, at)
			}
		}
		// The last reservation delays no other.
		last := w.reserve(one)
		w.refund(last.Receipt(), one)
		w.runs(w.reserve(one), last.Delay)
	})
}

func TestRefundToAMissingRowDoesNothing(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		receipt := receiptOf(noon, bucket.Key("ann"), window.Key("ann").Count(3))
		result := w.refund(receipt, bucket.Key("ann"), window.Key("ann").Count(3))
		if r := result.Requests; r[0].Remaining != 10 || r[1].Remaining != 10 {
			w.Fatalf("refunded: %+v", result)
		}
		if rows := w.rows(); rows != "" {
			w.Fatalf("rows: %s", rows)
		}
	})
}

func TestRefundToAFixedWindowBelongsToTheWindowInWhichTheWorkRuns(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(noon))
		ann := limit.Key("ann")
		first := w.grant(ann.Count(4)).Receipt()
		w.clock.Advance(30 * time.Minute)
		first = w.refund(first, ann.Count(1)).Receipt()
		w.holds(ann, 7)
		w.clock.Advance(30*time.Minute - time.Microsecond) // the window's last microsecond
		first = w.refund(first, ann.Count(1)).Receipt()
		w.holds(ann, 8)

		w.clock.Advance(time.Microsecond)
		second := w.grant(ann.Count(6)).Receipt()
		w.refund(first, ann.Count(2)) // its window is over
		w.holds(ann, 4)
		w.refund(second, ann.Count(2))
		w.holds(ann, 6)

		// One of several limits is refunded.
		other := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("ann")
		both := w.grant(other.Count(10), ann.Count(6)).Receipt()
		w.clock.Advance(time.Hour)
		w.grant(ann.Count(10), other.Count(10))
		w.refund(both, other.Count(3), ann.Count(3))
		w.holds(ann, 0)
		w.holds(other, 0)

		// A window that is over gets nothing, not even if enough is saved up to take its tokens from.
		saving := ratelimit.FixedWindow("saving", 1, time.Hour, ratelimit.Capacity(3), ratelimit.Start(noon)).Key("ann")
		over := w.grant(saving.Count(3)).Receipt()
		w.clock.Advance(2 * time.Hour)
		w.refund(over, saving.Count(1))
		w.holds(saving, 2)
	})
}

func TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft(t *testing.T) {
	behaviour(t, func(w world) {
		calls := ratelimit.FixedWindow("calls", 100, time.Minute, ratelimit.Start(noon)).Global()
		w.runs(w.reserve(calls.Count(60)), 0)
		second := w.reserve(calls.Count(60))
		w.runs(second, time.Minute)
		last := w.reserve(calls.Count(60))
		w.runs(last, 2*time.Minute)
		w.holds(calls, -160)

		// The last reservation may be cancelled while it is the last.
		w.refund(second.Receipt(), calls.Count(60))
		w.holds(calls, -160)
		w.refund(last.Receipt(), calls.Count(60))
		w.holds(calls, -100)
		w.runs(w.reserve(calls.Count(60)), 2*time.Minute)

		// Forfeited tokens count as debt.
		bounded := ratelimit.FixedWindow("bounded", 100, time.Minute, ratelimit.Start(noon), ratelimit.MaxReserved(130)).Global()
		w.grant(bounded.Count(60))
		w.reserve(bounded.Count(60))                           // -60: 40 of the first window are forfeited
		denied := w.denyReserve(bounded.Count(50))             // -150
		w.retries(denied, time.Minute)                         // then 40 are left, and -110 is within the bound
		w.runs(w.wouldReserve(bounded.Count(40)), time.Minute) // it fits the second window
		w.runs(w.reserve(bounded.Count(30)), time.Minute)      // the same
		w.clock.Advance(time.Minute)
		w.grant(bounded.Count(10))
		w.deny(bounded)
	})
}

// A limit saves up tokens. If its debt ended in the window before the last, that window's promises could be made twice.
func TestARefundToAWindowThatSavesUpMovesNoDebtToAnEarlierWindow(t *testing.T) {
	behaviour(t, func(w world) {
		jobs := ratelimit.FixedWindow("jobs", 2, time.Minute, ratelimit.Capacity(3), ratelimit.Start(noon)).Global()
		w.grant(jobs.Count(3))
		w.runs(w.reserve(jobs.Count(2)), time.Minute)
		last := w.reserve(jobs.Count(1))
		w.runs(last, 2*time.Minute)
		w.holds(jobs, -3)
		w.refund(last.Receipt(), jobs.Count(1)) // a debt of 2 would be paid a minute earlier
		w.holds(jobs, -3)
		last = w.reserve(jobs.Count(2))
		w.runs(last, 3*time.Minute)
		w.holds(jobs, -5)
		rest := w.refund(last.Receipt(), jobs.Count(0.5)).Receipt()
		w.holds(jobs, -4.5)
		w.refund(rest, jobs.Count(0.5))
		w.holds(jobs, -4.5)
	})
}

func TestAReservationThatWaitedForItsRowForfeitsToo(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 3)
	limiter, _ := newLimiter()
	calls := ratelimit.FixedWindow("calls", 100, time.Minute, ratelimit.Start(noon)).Global()
	succeeds(t, second(limiter.Consume(t.Context(), pool, calls.Count(10))))
	tx, err := pool.Begin(t.Context())
	succeeds(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	succeeds(t, second(limiter.Consume(t.Context(), tx, calls.Count(50))))
	reserved := make(chan error, 1)
	go func() {
		_, err := limiter.Reserve(t.Context(), pool, calls.Count(60)) // at first there seem to be enough
		reserved <- err
	}()
	waitingFor(t, pool, tx)
	succeeds(t, tx.Commit(t.Context()))
	succeeds(t, <-reserved)
	if left := readBalance(t, limiter, pool, calls); left != -60 {
		t.Errorf("%v are left, want -60", left)
	}
}

func TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile(t *testing.T) {
	behaviour(t, func(w world) {
		perUser := ratelimit.TokenBucket("perUser", 6, time.Minute).Key("ann")
		provider := ratelimit.FixedWindow("provider", 10, time.Minute, ratelimit.Start(noon)).Global()
		w.grant(provider.Count(10))
		w.runs(w.reserve(perUser.Count(2), provider.Count(2)), time.Minute)
		// In a minute the user's bucket would be full, and 8 could run at once. So the bucket owes the refill.
		w.holds(perUser, -2)
		w.clock.Advance(time.Minute)
		w.grant(perUser.Count(4))
		w.deny(perUser)

		// So it is with two buckets.
		quick, slow := ratelimit.TokenBucket("quick", 6, time.Minute).Key("ann"), ratelimit.TokenBucket("slow", 1, time.Minute).Key("ann")
		w.grant(slow)
		w.runs(w.reserve(quick.Count(2), slow), time.Minute)
		w.holds(quick, -2)

		// A limit that may owe nothing denies if it would go into debt.
		other := ratelimit.TokenBucket("other", 6, time.Minute, ratelimit.MaxReserved(0)).Key("ann")
		w.grant(provider.Count(8))
		denied := w.denyReserve(other, provider)
		if denied.Requests[0].OK || !denied.Requests[0].RetryAt.Equal(denied.RetryAt) || !denied.Requests[1].OK {
			w.Fatalf("what would owe is the bucket: %+v", denied)
		}
		w.retries(denied, 10*time.Second) // when the wait is down to the refill of 5
		w.clock.Advance(10*time.Second - time.Microsecond)
		w.denyReserve(other, provider)
		w.clock.Advance(time.Microsecond)
		w.runs(w.reserve(other, provider), 50*time.Second)
		w.holds(other, 0)
	})
}

// TestWhatRoundingTakesIsNoDebt: the rows of a window with shards may add up to a little less than was left.
func TestWhatRoundingTakesIsNoDebt(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(noon), ratelimit.Shards(3)).Global()
		receipt := w.grant(limit.Count(10)).Receipt()
		w.do(second(w.db.Exec(w.Context(), "UPDATE ratelimit.limits SET value = -1e-13")))
		w.refund(receipt, limit.Count(10))
		w.holds(limit, 10)
	})
}

func TestRefundAfterTheClockSteppedBackNeverMints(t *testing.T) {
	behaviour(t, func(w world) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Hour),
			ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(noon)),
		} {
			w.clock.now = noon
			receipt := w.grant(limit.Global().Count(8)).Receipt()
			w.clock.Advance(-3 * time.Hour)
			if limit.Config().Kind == "token bucket" { // its row lies ahead, as that of a paused one: nothing is owed, and nothing comes back
				w.refund(receipt, limit.Global().Count(3))
				w.holds(limit.Global(), 2)
				w.clock.now = noon
				w.refund(receipt, limit.Global().Count(8))
			} else {
				receipt = w.refund(receipt, limit.Global().Count(3)).Receipt()
				w.holds(limit.Global(), 5)
				w.refund(receipt, limit.Global().Count(5))
				w.holds(limit.Global(), 10)
				w.clock.now = noon
			}
			w.holds(limit.Global(), 10)

			// Rows older than the receipt are not the rows that it was taken from.
			receipt = w.grant(limit.Global().Count(8)).Receipt()
			w.do(w.limiter.Reset(w.Context(), w.db, limit.Global()))
			w.clock.Advance(-3 * time.Hour)
			w.grant(limit.Global().Count(4))
			w.refund(receipt, limit.Global().Count(3))
			w.holds(limit.Global(), 6)
			w.do(w.limiter.Reset(w.Context(), w.db, limit.Global()))
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
		w.refund(first.Receipt(), limit.Global().Count(5))
		w.clock.Advance(time.Second)
		w.deny(limit.Global())
	})
}

func TestAReceiptIsUsedUp(t *testing.T) {
	behaviour(t, func(w world) {
		bucket, window := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("ann"), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(noon)).Global()
		receipt := w.grant(bucket.Count(5), window.Count(4), bucket.Count(1)).Receipt()

		// Through JSON, as in a jobs table.
		text, err := json.Marshal(map[string]ratelimit.Receipt{"receipt": receipt})
		w.do(err)
		var job struct{ Receipt ratelimit.Receipt }
		w.do(json.Unmarshal(text, &job))
		var stored ratelimit.Receipt
		w.do(w.db.QueryRow(w.Context(), "SELECT $1::text", string(job.Receipt)).Scan(&stored))
		if stored != receipt {
			w.Fatalf("%s came back as %s", receipt, stored)
		}

		w.refuseRefund(stored, bucket.Count(6.1))
		w.refuseRefund(stored, bucket.Count(4), bucket.Count(3))
		w.refuseRefund(stored, window.Count(4.5))
		w.refuseRefund(stored, ratelimit.TokenBucket("bucket", 10, time.Hour).Key("bob"))
		w.refuseRefund(stored, ratelimit.TokenBucket("other", 10, time.Hour).Key("ann"))
		w.refuseRefund(stored, bucket.Count(-1))
		w.refuseRefund("", bucket)

		left := w.refund(stored, bucket.Count(2)).Receipt()
		w.refuseRefund(left, bucket.Count(4.5))
		left = w.refund(left, bucket.Count(4), window.Count(1)).Receipt()
		w.refuseRefund(left, bucket)
		left = w.refund(left, window.Count(3)).Receipt()
		if left != "" {
			w.Fatalf("all was refunded, but there is left %s", left)
		}
		w.holds(bucket, 10)
		w.holds(window, 10)

		// The parts add up to the whole, except for rounding, which creates no tokens.
		small, large := ratelimit.TokenBucket("small", 1, time.Hour).Global(), ratelimit.TokenBucket("large", 1e-9, time.Hour, ratelimit.Capacity(1e15)).Global()
		left = w.grant(small.Count(0.3)).Receipt()
		for range 3 {
			left = w.refund(left, small.Count(0.1)).Receipt()
		}
		if left != "" {
			w.Fatalf("all was refunded, but there is left %s", left)
		}
		left = w.grant(large.Count(1e15 - 5000)).Receipt()
		w.grant(large.Count(5000))
		left = w.refund(left, large.Count(1e15-7000)).Receipt()
		w.refund(left, large.Count(2500))
		if balance := w.balance(large); balance != 1e15-5000 {
			w.Fatalf("%v are left, want %v", balance, 1e15-5000)
		}

		w.grant(bucket.Count(5))
		if receipt := w.deny(bucket.Count(6), window.Count(1)).Receipt(); receipt != "" {
			w.Errorf("a denial has the receipt %s", receipt)
		}
		charged, err := w.limiter.Charge(w.Context(), w.db, bucket)
		w.do(err)
		if receipt := charged.Receipt() + w.check(bucket).Receipt(); receipt != "" {
			w.Errorf("a charge or a check has the receipt %s", receipt)
		}
		w.refund(w.grant(bucket.Count(0)).Receipt(), bucket.Count(0))
	})
}

func TestAnAlteredReceiptMintsNothing(t *testing.T) {
	behaviour(t, func(w world) {
		bucket, window := ratelimit.TokenBucket("bucket", 10, time.Hour).Global(), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(noon)).Global()
		taken := w.grant(bucket.Count(8), window.Count(8))
		receipt := string(taken.Receipt())
		alter := func(old, with string) ratelimit.Receipt {
			if !strings.Contains(receipt, old) {
				w.Fatalf("%s has no %s", receipt, old)
			}
			return ratelimit.Receipt(strings.ReplaceAll(receipt, old, with))
		}
		for _, altered := range []ratelimit.Receipt{
			"{}", "null", "0", "[]", "\x00", ratelimit.Receipt(receipt + "{}"), ratelimit.Receipt(receipt[:len(receipt)-1]),
			alter(`"v":1`, `"v":2`), alter(`"v":1`, `"v":1,"more":1`), alter(`"at":"2026`, `"at":"0026`), alter(`"runAt":"2026`, `"runAt":"0999`),
			alter(`"count":8`, `"count":-8`), alter(`"count":8`, `"count":1e16`), alter(`"count":8`, `"count":8,"refunded":9`), alter(`"count":8`, `"count":8,"refunded":-1`),
			alter(`"held":2`, `"held":1e301`), alter(`"rows":1`, `"rows":0`), alter(`"rows":1`, `"rows":-1`), alter(`"shards":1`, `"shards":0`),
			alter(`"shards":1`, `"shards":101`), alter(`"limit":"window"`, `"limit":"bucket"`),
		} {
			w.refuseRefund(altered, bucket)
		}
		w.holds(bucket, 2)
		for _, altered := range []ratelimit.Receipt{
			alter(`"count":8`, `"count":1e15`), alter(`"held":2`, `"held":-1e300`), alter(`"held":2`, `"held":-1e-300`), alter(`"at":"2026`, `"at":"9999`), alter(`"at":"2026`, `"at":"1000`),
			alter(`"runAt":"2026`, `"runAt":"9999`), alter(`"shards":1`, `"shards":100`),
		} {
			before := w.balances(bucket, window)
			w.refund(altered, bucket.Count(0.125), window.Count(0.125))
			for i, b := range w.balances(bucket, window) {
				if back := b.Remaining - before[i].Remaining; back > 0.125 || back < 0 {
					w.Errorf("%s gave back %v to %s, 0.125 was asked for", altered, back, b.Limit)
				}
			}
		}
		w.refund(alter(`"count":8`, `"count":1e15`), bucket.Count(1e15))
		w.holds(bucket, 10)
		// Without requests, the receipt says what is given back, as docs/security.md warns.
		victim := ratelimit.TokenBucket("victim", 10, time.Hour).Global()
		w.grant(victim.Count(8))
		_, err := w.limiter.Refund(w.Context(), w.db, alter(`"limit":"bucket"`, `"limit":"victim"`))
		w.do(err)
		w.holds(victim, 10)
	})
}

// TestARefundCountsWholeWindows: 3.3 s are three windows of 1.1 s, though the quotient of the doubles is a little less.
func TestARefundCountsWholeWindows(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.FixedWindow("calls", 1, 1100*time.Millisecond, ratelimit.Start(noon)).Key("ann")
		w.grant(limit)
		var last ratelimit.Reservation
		for range 3 {
			last = w.reserve(limit)
		}
		w.runs(last, 3300*time.Millisecond)
		result, err := w.limiter.Refund(w.Context(), w.db, last.Receipt(), limit)
		w.do(err)
		if got := result.Requests[0].Refunded; got != 1 {
			w.Fatalf("refunded %v, want 1", got)
		}
		w.holds(limit, -2)
	})
}

// TestARefundIsDecidedInGoAsInSQL: algebra's TestRefund has the rule row by row.
func TestARefundIsDecidedInGoAsInSQL(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	conn := acquire(t, newPool(t, 1))
	refunded := map[bool]int{}
	ago := func(s int) algebra.Micros { return algebra.At(noon.Add(-time.Duration(r.IntN(s)) * time.Second)) }
	for range 5000 {
		l := algebra.Limit{Rate: float64(1 + r.IntN(3)), Period: time.Minute, Capacity: float64(r.IntN(5)), Window: r.IntN(3) > 0, Start: algebra.At(noon)}
		rows := make([]algebra.Row, 1+r.IntN(2))
		values, ts := make([]float64, len(rows)), make([]time.Time, len(rows))
		for i := range rows {
			rows[i] = algebra.Row{Value: float64(r.IntN(8) - 5), TS: ago(90)}
			values[i], ts[i] = rows[i].Value, rows[i].TS.Time()
		}
		taken := algebra.Taken{At: ago(90), Count: float64(1 + r.IntN(4)), Held: float64(r.IntN(6) - 2), Part: 1 / float64(1+r.IntN(len(rows)))}
		taken.RunAt = taken.At + algebra.Micros(r.IntN(240))*1e6
		taken.Promised = taken.At + algebra.Micros(r.IntN(240))*1e6
		count, now := float64(r.IntN(4)), ago(30)
		start := new(noon)
		if !l.Window {
			start = nil
		}
		var back float64
		succeeds(t, conn.QueryRow(t.Context(), "SELECT back FROM ratelimit._give_back($1, $2, $14, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, NULL)",
			values, ts, now.Time(), l.Rate, l.Period, l.Capacity, start, count, taken.Count, taken.Held, taken.Part, taken.At.Time(), taken.RunAt.Time(), taken.Promised.Time()).Scan(&back))
		if want := l.Refund(rows, taken, count, now); !near(back, want) {
			t.Fatalf("%+v, rows %v, %+v, count %v, at %v: %v come back, want %v", l, rows, taken, count, now.Time(), back, want)
		}
		refunded[back > 0]++
	}
	if refunded[true] < 200 || refunded[false] < 200 {
		t.Errorf("%v: this tested too little", refunded)
	}
}

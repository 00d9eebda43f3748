package verbs_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// refuseRefund wants a refund to fail before anything is sent.
func refuseRefund(w harness.World, receipt ratelimit.Receipt, requests ...ratelimit.Request) {
	w.Helper()
	if result, err := w.Limiter.Refund(w.Context(), w.DB, receipt, requests...); !errors.Is(err, ratelimit.ErrInvalid) || result.OK {
		w.Fatalf("refund of %q: %+v, %v, want ErrInvalid", receipt, result, err)
	}
}

// Without requests, all that is left comes back.
func TestRefundWithoutRequestsGivesBackAllThatIsLeft(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket, window := ratelimit.TokenBucket("bucket", 10, time.Hour), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Shards(2))
		ann, bob := bucket.Key("ann"), window.Key("bob", "2|")
		receipt := w.Grant(ann.Count(6), bob.Count(3), ann).Receipt()
		receipt = w.Refund(receipt, ann.Count(2)).Receipt()
		result, err := w.Limiter.Refund(w.Context(), w.DB, receipt)
		if err != nil || !result.OK || len(result.Requests) != 2 || !harness.Near(result.Requests[0].Refunded, 5) || !harness.Near(result.Requests[1].Refunded, 3) || result.Receipt() != "" {
			w.Fatalf("%+v, %v", result, err)
		}
		w.Holds(ann, 10)
		w.Holds(bob, 10)
		redeployed := w.Redeployed()
		refuseRefund(redeployed, receipt) // this Limiter does not know the limits yet
		redeployed.Holds(ann, 10)
		redeployed.Holds(bob, 10)
		if result, err := redeployed.Limiter.Refund(w.Context(), w.DB, receipt); err != nil || !result.OK {
			w.Fatalf("%+v, %v", result, err)
		}
	})
}

func TestRefundToATokenBucketGivesBackWhatIsStillMissing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("tokens", 10, time.Minute, ratelimit.Capacity(20))
		ann := limit.Key("ann")
		receipt := w.Grant(ann.Count(6)).Receipt()
		result := w.Refund(receipt, ann.Count(2.5))
		if result.Requests[0].Remaining != 16.5 {
			w.Fatalf("refunded: %+v", result)
		}
		w.Clock.Advance(12 * time.Second) // 2 have been refilled, 1.5 are missing
		w.Refund(result.Receipt(), ann.Count(3.5))
		w.Holds(ann, 20)

		// Tokens that were refilled since are worth nothing: capacity 10, 5 taken, full again, 10 taken.
		bob := ratelimit.TokenBucket("credits", 10, 10*time.Second).Key("bob")
		receipt = w.Grant(bob.Count(5)).Receipt()
		w.Clock.Advance(5 * time.Second)
		w.Grant(bob.Count(10))
		w.Refund(receipt, bob.Count(5))
		w.Deny(bob)
		w.Clock.Advance(-3 * time.Second) // a clock that steps back gives back no more
		w.Refund(receipt, bob.Count(5))
		w.Holds(bob, 0)
	})
}

// CASES A of the promise: reserve eleven tokens, refund five of the first, reserve five more.
func TestARefundBehindWaitingReservationsKeepsTheirInstants(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		one := ratelimit.TokenBucket("jobs", 1, time.Second).Global()
		var receipts []ratelimit.Receipt
		runs := map[time.Duration]int{}
		for i := range 11 {
			result := w.Reserve(one)
			w.Runs(result, time.Duration(i)*time.Second)
			receipts = append(receipts, result.Receipt())
			if i >= 5 {
				runs[result.Delay]++
			}
		}
		for _, receipt := range receipts[:5] {
			w.Refund(receipt, one)
		}
		for range 5 {
			runs[w.Reserve(one).Delay]++
		}
		for at, n := range runs {
			if n > 1 {
				w.Errorf("%d run after %v", n, at)
			}
		}
		// The last reservation delays no other.
		last := w.Reserve(one)
		w.Refund(last.Receipt(), one)
		w.Runs(w.Reserve(one), last.Delay)
	})
}

func TestRefundToAMissingRowDoesNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		receipt := harness.ReceiptOf(harness.Noon, bucket.Key("ann"), window.Key("ann").Count(3))
		result := w.Refund(receipt, bucket.Key("ann"), window.Key("ann").Count(3))
		if r := result.Requests; r[0].Remaining != 10 || r[1].Remaining != 10 {
			w.Fatalf("refunded: %+v", result)
		}
		if rows := w.Rows(); rows != "" {
			w.Fatalf("rows: %s", rows)
		}
	})
}

func TestRefundToAFixedWindowBelongsToTheWindowInWhichTheWorkRuns(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(harness.Noon))
		ann := limit.Key("ann")
		first := w.Grant(ann.Count(4)).Receipt()
		w.Clock.Advance(30 * time.Minute)
		first = w.Refund(first, ann.Count(1)).Receipt()
		w.Holds(ann, 7)
		w.Clock.Advance(30*time.Minute - time.Microsecond) // the window's last microsecond
		first = w.Refund(first, ann.Count(1)).Receipt()
		w.Holds(ann, 8)

		w.Clock.Advance(time.Microsecond)
		second := w.Grant(ann.Count(6)).Receipt()
		w.Refund(first, ann.Count(2)) // its window is over
		w.Holds(ann, 4)
		w.Refund(second, ann.Count(2))
		w.Holds(ann, 6)

		// One of several limits is refunded.
		other := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("ann")
		both := w.Grant(other.Count(10), ann.Count(6)).Receipt()
		w.Clock.Advance(time.Hour)
		w.Grant(ann.Count(10), other.Count(10))
		w.Refund(both, other.Count(3), ann.Count(3))
		w.Holds(ann, 0)
		w.Holds(other, 0)

		// A window that is over gets nothing, not even if enough is saved up to take its tokens from.
		saving := ratelimit.FixedWindow("saving", 1, time.Hour, ratelimit.Capacity(3), ratelimit.Start(harness.Noon)).Key("ann")
		over := w.Grant(saving.Count(3)).Receipt()
		w.Clock.Advance(2 * time.Hour)
		w.Refund(over, saving.Count(1))
		w.Holds(saving, 2)
	})
}

func TestAReservationThatStraddlesABoundaryForfeitsWhatTheWindowHasLeft(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		calls := ratelimit.FixedWindow("calls", 100, time.Minute, ratelimit.Start(harness.Noon)).Global()
		w.Runs(w.Reserve(calls.Count(60)), 0)
		second := w.Reserve(calls.Count(60))
		w.Runs(second, time.Minute)
		last := w.Reserve(calls.Count(60))
		w.Runs(last, 2*time.Minute)
		w.Holds(calls, -160)

		// The last reservation may be cancelled while it is the last.
		w.Refund(second.Receipt(), calls.Count(60))
		w.Holds(calls, -160)
		w.Refund(last.Receipt(), calls.Count(60))
		w.Holds(calls, -100)
		w.Runs(w.Reserve(calls.Count(60)), 2*time.Minute)

		// Forfeited tokens count as debt.
		bounded := ratelimit.FixedWindow("bounded", 100, time.Minute, ratelimit.Start(harness.Noon), ratelimit.MaxReserved(130)).Global()
		w.Grant(bounded.Count(60))
		w.Reserve(bounded.Count(60))                           // -60: 40 of the first window are forfeited
		denied := w.DenyReserve(bounded.Count(50))             // -150
		w.Retries(denied, time.Minute)                         // then 40 are left, and -110 is within the bound
		w.Runs(w.WouldReserve(bounded.Count(40)), time.Minute) // it fits the second window
		w.Runs(w.Reserve(bounded.Count(30)), time.Minute)      // the same
		w.Clock.Advance(time.Minute)
		w.Grant(bounded.Count(10))
		w.Deny(bounded)
	})
}

// A limit saves up tokens. If its debt ended in the window before the last, that window's promises could be made twice.
func TestARefundToAWindowThatSavesUpMovesNoDebtToAnEarlierWindow(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		jobs := ratelimit.FixedWindow("jobs", 2, time.Minute, ratelimit.Capacity(3), ratelimit.Start(harness.Noon)).Global()
		w.Grant(jobs.Count(3))
		w.Runs(w.Reserve(jobs.Count(2)), time.Minute)
		last := w.Reserve(jobs.Count(1))
		w.Runs(last, 2*time.Minute)
		w.Holds(jobs, -3)
		w.Refund(last.Receipt(), jobs.Count(1)) // a debt of 2 would be paid a minute earlier
		w.Holds(jobs, -3)
		last = w.Reserve(jobs.Count(2))
		w.Runs(last, 3*time.Minute)
		w.Holds(jobs, -5)
		rest := w.Refund(last.Receipt(), jobs.Count(0.5)).Receipt()
		w.Holds(jobs, -4.5)
		w.Refund(rest, jobs.Count(0.5))
		w.Holds(jobs, -4.5)
	})
}

func TestAReservationThatWaitedForItsRowForfeitsToo(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limiter, _ := harness.NewLimiter()
	calls := ratelimit.FixedWindow("calls", 100, time.Minute, ratelimit.Start(harness.Noon)).Global()
	harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, calls.Count(10))))
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), tx, calls.Count(50))))
	reserved := make(chan error, 1)
	go func() {
		_, err := limiter.Reserve(t.Context(), pool, calls.Count(60)) // at first there seem to be enough
		reserved <- err
	}()
	harness.WaitingFor(t, pool, tx)
	harness.Succeeds(t, tx.Commit(t.Context()))
	harness.Succeeds(t, <-reserved)
	if left := harness.ReadBalance(t, limiter, pool, calls); left != -60 {
		t.Errorf("%v are left, want -60", left)
	}
}

// TestWhatWaitedForItsRowComesBackToItsWindow: the window that it took from, in which others wrote the row meanwhile.
func TestWhatWaitedForItsRowComesBackToItsWindow(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 16)
	var limits ratelimit.Limiter
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	next := harness.Scan[time.Time](t, pool, "SELECT date_trunc('second', clock_timestamp()) + interval '3 s'").UTC()
	type way struct {
		name    string
		r       ratelimit.Request
		at      time.Time
		receipt ratelimit.Receipt
		token   string
		err     error
	}
	var ways []*way
	var all []ratelimit.Request
	for _, limit := range []ratelimit.Limit{
		ratelimit.FixedWindow("fixed", 10, time.Hour, ratelimit.Start(next)),
		ratelimit.FixedWindow("sharded", 10, time.Hour, ratelimit.Start(next), ratelimit.Shards(2)),
		ratelimit.CalendarWindow("daily", 10, ratelimit.Day, ratelimit.Anchor(next.Format(time.DateTime))),
	} {
		for _, name := range []string{"consume", "in a transaction", "coalesced", "hold"} {
			ways = append(ways, &way{name: limit.Name() + ", " + name, r: limit.Key(name).Count(3)})
			all = append(all, limit.Key(name).Count(2))
		}
	}
	consume := func(w *way, db ratelimit.DB) error {
		result, err := limits.Consume(t.Context(), db, w.r)
		w.at, w.receipt = result.At, result.Receipt()
		return err
	}
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, all...)))
	tx, err := pool.Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	harness.MustExecIn(t, tx, "SELECT FROM ratelimit.limits FOR UPDATE")
	var waiting sync.WaitGroup
	for i, w := range ways {
		waiting.Go(func() {
			switch i % 4 {
			case 0:
				w.err = consume(w, pool)
			case 1: // by the function
				w.err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return consume(w, tx) })
			case 2:
				w.err = consume(w, coalescer)
			case 3:
				var held ratelimit.Held
				held, w.err = limits.Hold(t.Context(), pool, "job", time.Minute, w.r)
				w.at, w.token = held.At, held.Token
			}
		})
	}
	harness.Blocked(t, pool, tx, len(ways)-2) // batches of a Coalescer may wait for one another
	harness.MustExecIn(t, tx, "SELECT pg_sleep_until('"+next.Format(time.RFC3339)+"')")
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), tx, all...)))
	harness.Succeeds(t, tx.Commit(t.Context()))
	waiting.Wait()
	for _, w := range ways {
		harness.Succeeds(t, w.err)
		if !w.at.Before(next) {
			t.Logf("%s: decided at %v, in the new window: so late, or by the clock after the wait", w.name, w.at)
		}
		before := harness.ReadBalance(t, &limits, pool, w.r)
		if w.token == "" {
			harness.Succeeds(t, harness.Second(limits.Refund(t.Context(), pool, w.receipt)))
		} else {
			harness.Succeeds(t, harness.Second(limits.Release(t.Context(), pool, w.token)))
		}
		if after := harness.ReadBalance(t, &limits, pool, w.r); before > 5 || after != before+3 {
			t.Errorf("%s: %v are left, and %v after all came back", w.name, before, after)
		}
	}
}

func TestLimitsThatWaitForOneAnotherForfeitWhatTheyWouldRefillMeanwhile(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		perUser := ratelimit.TokenBucket("perUser", 6, time.Minute).Key("ann")
		provider := ratelimit.FixedWindow("provider", 10, time.Minute, ratelimit.Start(harness.Noon)).Global()
		w.Grant(provider.Count(10))
		w.Runs(w.Reserve(perUser.Count(2), provider.Count(2)), time.Minute)
		// In a minute the user's bucket would be full, and 8 could run at once. So the bucket owes the refill.
		w.Holds(perUser, -2)
		w.Clock.Advance(time.Minute)
		w.Grant(perUser.Count(4))
		w.Deny(perUser)

		// So it is with two buckets.
		quick, slow := ratelimit.TokenBucket("quick", 6, time.Minute).Key("ann"), ratelimit.TokenBucket("slow", 1, time.Minute).Key("ann")
		w.Grant(slow)
		w.Runs(w.Reserve(quick.Count(2), slow), time.Minute)
		w.Holds(quick, -2)

		// A limit that may owe nothing denies if it would go into debt.
		other := ratelimit.TokenBucket("other", 6, time.Minute, ratelimit.MaxReserved(0)).Key("ann")
		w.Grant(provider.Count(8))
		denied := w.DenyReserve(other, provider)
		if denied.Requests[0].OK || !denied.Requests[0].RetryAt.Equal(denied.RetryAt) || !denied.Requests[1].OK {
			w.Fatalf("what would owe is the bucket: %+v", denied)
		}
		w.Retries(denied, 10*time.Second) // when the wait is down to the refill of 5
		w.Clock.Advance(10*time.Second - time.Microsecond)
		w.DenyReserve(other, provider)
		w.Clock.Advance(time.Microsecond)
		w.Runs(w.Reserve(other, provider), 50*time.Second)
		w.Holds(other, 0)
	})
}

// TestWhatRoundingTakesIsNoDebt: the rows of a window with shards may add up to a little less than was left.
func TestWhatRoundingTakesIsNoDebt(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(harness.Noon), ratelimit.Shards(3)).Global()
		receipt := w.Grant(limit.Count(10)).Receipt()
		w.Do(harness.Second(w.DB.Exec(w.Context(), "UPDATE ratelimit.limits SET value = -1e-13")))
		w.Refund(receipt, limit.Count(10))
		w.Holds(limit, 10)
	})
}

func TestRefundAfterTheClockSteppedBackNeverMints(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket("bucket", 10, time.Hour),
			ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(harness.Noon)),
		} {
			w.Clock.At = harness.Noon
			receipt := w.Grant(limit.Global().Count(8)).Receipt()
			w.Clock.Advance(-3 * time.Hour)
			if limit.Config().Kind == "token bucket" { // its row lies ahead, as that of a paused one: nothing is owed, and nothing comes back
				w.Refund(receipt, limit.Global().Count(3))
				w.Holds(limit.Global(), 2)
				w.Clock.At = harness.Noon
				w.Refund(receipt, limit.Global().Count(8))
			} else {
				receipt = w.Refund(receipt, limit.Global().Count(3)).Receipt()
				w.Holds(limit.Global(), 5)
				w.Refund(receipt, limit.Global().Count(5))
				w.Holds(limit.Global(), 10)
				w.Clock.At = harness.Noon
			}
			w.Holds(limit.Global(), 10)

			// Rows older than the receipt are not the rows that it was taken from.
			receipt = w.Grant(limit.Global().Count(8)).Receipt()
			w.Do(w.Limiter.Reset(w.Context(), w.DB, limit.Global()))
			w.Clock.Advance(-3 * time.Hour)
			w.Grant(limit.Global().Count(4))
			w.Refund(receipt, limit.Global().Count(3))
			w.Holds(limit.Global(), 6)
			w.Do(w.Limiter.Reset(w.Context(), w.DB, limit.Global()))
		}
	})
}

func TestRefundIntoAWindowThatTheRowHasSeenButTheClockNotYetGivesNothingBack(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("calls", 10, time.Hour, ratelimit.Start(harness.Noon))
		w.Clock.Advance(59 * time.Minute)
		first := w.Grant(limit.Global().Count(5)) // 12:59
		w.Clock.Advance(time.Minute)
		w.Grant(limit.Global().Count(10)) // all of 13:00's
		w.Clock.Advance(-time.Second)
		w.Refund(first.Receipt(), limit.Global().Count(5))
		w.Clock.Advance(time.Second)
		w.Deny(limit.Global())
	})
}

func TestAReceiptIsUsedUp(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket, window := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("ann"), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(harness.Noon)).Global()
		receipt := w.Grant(bucket.Count(5), window.Count(4), bucket.Count(1)).Receipt()

		// Through JSON, as in a jobs table.
		text, err := json.Marshal(map[string]ratelimit.Receipt{"receipt": receipt})
		w.Do(err)
		var job struct{ Receipt ratelimit.Receipt }
		w.Do(json.Unmarshal(text, &job))
		var stored ratelimit.Receipt
		w.Do(w.DB.QueryRow(w.Context(), "SELECT $1::text", string(job.Receipt)).Scan(&stored))
		if stored != receipt {
			w.Fatalf("%s came back as %s", receipt, stored)
		}

		refuseRefund(w, stored, bucket.Count(6.1))
		refuseRefund(w, stored, bucket.Count(4), bucket.Count(3))
		refuseRefund(w, stored, window.Count(4.5))
		refuseRefund(w, stored, ratelimit.TokenBucket("bucket", 10, time.Hour).Key("bob"))
		refuseRefund(w, stored, ratelimit.TokenBucket("other", 10, time.Hour).Key("ann"))
		refuseRefund(w, stored, bucket.Count(-1))
		refuseRefund(w, "", bucket)

		left := w.Refund(stored, bucket.Count(2)).Receipt()
		refuseRefund(w, left, bucket.Count(4.5))
		left = w.Refund(left, bucket.Count(4), window.Count(1)).Receipt()
		refuseRefund(w, left, bucket)
		left = w.Refund(left, window.Count(3)).Receipt()
		if left != "" {
			w.Fatalf("all was refunded, but there is left %s", left)
		}
		w.Holds(bucket, 10)
		w.Holds(window, 10)

		// The parts add up to the whole, except for rounding, which creates no tokens.
		small, large := ratelimit.TokenBucket("small", 1, time.Hour).Global(), ratelimit.TokenBucket("large", 1e-9, time.Hour, ratelimit.Capacity(1e15)).Global()
		left = w.Grant(small.Count(0.3)).Receipt()
		for range 3 {
			left = w.Refund(left, small.Count(0.1)).Receipt()
		}
		if left != "" {
			w.Fatalf("all was refunded, but there is left %s", left)
		}
		left = w.Grant(large.Count(1e15 - 5000)).Receipt()
		w.Grant(large.Count(5000))
		left = w.Refund(left, large.Count(1e15-7000)).Receipt()
		w.Refund(left, large.Count(2500))
		if balance := w.Balance(large); balance != 1e15-5000 {
			w.Fatalf("%v are left, want %v", balance, 1e15-5000)
		}

		w.Grant(bucket.Count(5))
		if receipt := w.Deny(bucket.Count(6), window.Count(1)).Receipt(); receipt != "" {
			w.Errorf("a denial has the receipt %s", receipt)
		}
		charged, err := w.Limiter.Charge(w.Context(), w.DB, bucket)
		w.Do(err)
		if receipt := charged.Receipt() + w.Check(bucket).Receipt(); receipt != "" {
			w.Errorf("a charge or a check has the receipt %s", receipt)
		}
		w.Refund(w.Grant(bucket.Count(0)).Receipt(), bucket.Count(0))
	})
}

func TestAnAlteredReceiptMintsNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket, window := ratelimit.TokenBucket("bucket", 10, time.Hour).Global(), ratelimit.FixedWindow("window", 10, time.Hour, ratelimit.Start(harness.Noon)).Global()
		taken := w.Grant(bucket.Count(8), window.Count(8))
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
			refuseRefund(w, altered, bucket)
		}
		w.Holds(bucket, 2)
		for _, altered := range []ratelimit.Receipt{
			alter(`"count":8`, `"count":1e15`), alter(`"held":2`, `"held":-1e300`), alter(`"held":2`, `"held":-1e-300`), alter(`"at":"2026`, `"at":"9999`), alter(`"at":"2026`, `"at":"1000`),
			alter(`"runAt":"2026`, `"runAt":"9999`), alter(`"shards":1`, `"shards":100`),
		} {
			before := w.Balances(bucket, window)
			w.Refund(altered, bucket.Count(0.125), window.Count(0.125))
			for i, b := range w.Balances(bucket, window) {
				if back := b.Remaining - before[i].Remaining; back > 0.125 || back < 0 {
					w.Errorf("%s gave back %v to %s, 0.125 was asked for", altered, back, b.Limit)
				}
			}
		}
		w.Refund(alter(`"count":8`, `"count":1e15`), bucket.Count(1e15))
		w.Holds(bucket, 10)
		// Without requests, the receipt says what is given back, as docs/security.md warns.
		victim := ratelimit.TokenBucket("victim", 10, time.Hour).Global()
		w.Grant(victim.Count(8))
		_, err := w.Limiter.Refund(w.Context(), w.DB, alter(`"limit":"bucket"`, `"limit":"victim"`))
		w.Do(err)
		w.Holds(victim, 10)
	})
}

// TestARefundCountsWholeWindows: 3.3 s are three windows of 1.1 s, though the quotient of the doubles is a little less.
func TestARefundCountsWholeWindows(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("calls", 1, 1100*time.Millisecond, ratelimit.Start(harness.Noon)).Key("ann")
		w.Grant(limit)
		var last ratelimit.Reservation
		for range 3 {
			last = w.Reserve(limit)
		}
		w.Runs(last, 3300*time.Millisecond)
		result, err := w.Limiter.Refund(w.Context(), w.DB, last.Receipt(), limit)
		w.Do(err)
		if got := result.Requests[0].Refunded; got != 1 {
			w.Fatalf("refunded %v, want 1", got)
		}
		w.Holds(limit, -2)
	})
}

// TestARefundIsDecidedInGoAsInSQL: algebra's TestRefund has the rule row by row.
func TestARefundIsDecidedInGoAsInSQL(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	conn := harness.Acquire(t, harness.NewPool(t, 1))
	refunded := map[bool]int{}
	ago := func(s int) algebra.Micros {
		return algebra.At(harness.Noon.Add(-time.Duration(r.IntN(s)) * time.Second))
	}
	for range 5000 {
		l := algebra.Limit{Rate: float64(1 + r.IntN(3)), Period: time.Minute, Capacity: float64(r.IntN(5)), Window: r.IntN(3) > 0, Start: algebra.At(harness.Noon)}
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
		start := new(harness.Noon)
		if !l.Window {
			start = nil
		}
		var back float64
		harness.Succeeds(t, conn.QueryRow(t.Context(), "SELECT back FROM ratelimit._give_back($1, $2, $14, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, NULL)",
			values, ts, now.Time(), l.Rate, l.Period, l.Capacity, start, count, taken.Count, taken.Held, taken.Part, taken.At.Time(), taken.RunAt.Time(), taken.Promised.Time()).Scan(&back))
		if want := l.Refund(rows, taken, count, now); !harness.Near(back, want) {
			t.Fatalf("%+v, rows %v, %+v, count %v, at %v: %v come back, want %v", l, rows, taken, count, now.Time(), back, want)
		}
		refunded[back > 0]++
	}
	if refunded[true] < 200 || refunded[false] < 200 {
		t.Errorf("%v: this tested too little", refunded)
	}
}

package integration_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

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
		result := w.refund(consumed.Receipt(), limit.Key("ann").Count(2.5))
		if result.Requests[0].Remaining != 16.5 {
			w.Fatalf("refunded: %+v", result)
		}
		w.clock.Advance(12 * time.Second)
		w.refund(consumed.Receipt(), limit.Key("ann").Count(100)) // more than the capacity is no error
		w.holds(limit.Key("ann"), 20)

		consumed = w.grant(limit.Key("ann").Count(50).Reserve()) // a debt is given back too
		w.refund(consumed.Receipt(), limit.Key("ann").Count(20))
		w.holds(limit.Key("ann"), -10)
		w.retries(w.refund(consumed.Receipt(), limit.Key("ann").Count(5)), 30*time.Second)
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
		w.refund(first.Receipt(), ann.Count(1))
		w.holds(ann, 7)
		w.clock.Advance(30*time.Minute - time.Microsecond) // the window's last microsecond
		w.refund(first.Receipt(), ann.Count(1))
		w.holds(ann, 8)

		w.clock.Advance(time.Microsecond)
		second := w.grant(ann.Count(6))
		w.refund(first.Receipt(), ann.Count(2)) // its window is over
		w.holds(ann, 4)
		w.refund(second.Receipt(), ann.Count(2))
		w.holds(ann, 6)

		// Several, of which one is dropped.
		other := ratelimit.TokenBucket("bucket", 10, time.Hour)
		w.grant(other.Key("ann").Count(10))
		w.refund(first.Receipt(), other.Key("ann").Count(3), ann.Count(3))
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
		w.refund(reservation.Receipt(), ann.Count(15))
		w.holds(ann, 10)
		reservation = w.grant(ann.Count(15).Reserve())
		w.clock.Advance(20 * time.Minute) // 13:10
		w.holds(ann, 5)
		w.refund(reservation.Receipt(), ann.Count(15)) // 10 of it belong to a window that is over
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
		w.refund(reservation.Receipt(), ann.Count(15))  // the reserved work did not run
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
			w.refund(consumed.Receipt(), limit.Global().Count(3))
			w.holds(limit.Global(), 5)
			w.refund(consumed.Receipt(), limit.Global().Count(30))
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
		w.refund(first.Receipt(), limit.Global().Count(5))
		w.clock.Advance(time.Second)
		w.deny(limit.Global())
	})
}

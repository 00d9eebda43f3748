package verbs_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestACalendarWindowBeginsByItsZoneAndAnchor: the windows of each unit, with and without an anchor.
func TestACalendarWindowBeginsByItsZoneAndAnchor(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for i, c := range []struct {
			unit         ratelimit.Unit
			zone, anchor string
			now          string
			resets       []string // this window's end and the next ones'
		}{
			{ratelimit.Day, "", "", "2026-07-01 12:00:00", []string{"2026-07-02 00:00:00", "2026-07-03 00:00:00"}},
			{ratelimit.Day, "Europe/Berlin", "", "2026-03-28 12:00:00", []string{"2026-03-28 23:00:00", "2026-03-29 22:00:00", "2026-03-30 22:00:00"}},
			{ratelimit.Day, "America/Sao_Paulo", "", "2018-11-03 12:00:00", []string{"2018-11-04 03:00:00", "2018-11-05 02:00:00"}}, // no midnight
			{ratelimit.Day, "America/Havana", "", "2026-10-31 12:00:00", []string{"2026-11-01 05:00:00", "2026-11-02 05:00:00"}},    // two midnights
			{ratelimit.Day, "Pacific/Apia", "", "2011-12-29 12:00:00", []string{"2011-12-30 10:00:00", "2011-12-31 10:00:00"}},      // no 30 December
			{ratelimit.Week, "Europe/Berlin", "", "2026-07-01 12:00:00", []string{"2026-07-05 22:00:00", "2026-07-12 22:00:00"}},
			{ratelimit.Week, "UTC", "2026-07-05", "2026-07-01 12:00:00", []string{"2026-07-05 00:00:00", "2026-07-12 00:00:00"}},
			{ratelimit.Month, "Asia/Tokyo", "", "2026-07-31 16:00:00", []string{"2026-08-31 15:00:00", "2026-09-30 15:00:00"}},
			{ratelimit.Month, "UTC", "2026-01-31", "2026-01-31 00:00:00", []string{"2026-02-28 00:00:00", "2026-03-31 00:00:00", "2026-04-30 00:00:00"}},
			{ratelimit.Month, "UTC", "2028-08-30", "2028-01-30 12:00:00", []string{"2028-02-29 00:00:00", "2028-03-30 00:00:00"}},
			{ratelimit.Month, "UTC", "2031-12-15", "2026-12-15 00:00:00", []string{"2027-01-15 00:00:00", "2027-02-15 00:00:00"}},
			{ratelimit.Quarter, "UTC", "", "2026-12-31 23:59:59.999999", []string{"2027-01-01 00:00:00", "2027-04-01 00:00:00"}},
			{ratelimit.Quarter, "UTC", "2020-02-29", "2026-01-01 00:00:00", []string{"2026-02-28 00:00:00", "2026-05-29 00:00:00"}},
			{ratelimit.Year, "Europe/London", "2026-04-06", "2026-04-05 22:59:59.999999", []string{"2026-04-05 23:00:00", "2027-04-05 23:00:00"}},
			{ratelimit.Year, "UTC", "2024-02-29", "2026-07-01 12:00:00", []string{"2027-02-28 00:00:00", "2028-02-29 00:00:00"}},
			{ratelimit.Month, "Europe/Berlin", "2026-01-31 15:00", "2026-01-31 14:00:00", []string{"2026-02-28 14:00:00", "2026-03-31 13:00:00", "2026-04-30 13:00:00"}},
			{ratelimit.Month, "UTC", "2026-07-01 23:59:59", "2026-07-01 12:00:00", []string{"2026-07-01 23:59:59", "2026-08-01 23:59:59"}},
			{ratelimit.Day, "UTC", "2026-07-01 15:00:05", "2026-07-01 00:00:00", []string{"2026-07-01 15:00:05", "2026-07-02 15:00:05"}},
			{ratelimit.Week, "America/New_York", "2026-07-03 18:30", "2026-07-03 22:29:59", []string{"2026-07-03 22:30:00", "2026-07-10 22:30:00"}},
			{ratelimit.Year, "Asia/Tokyo", "2026-01-01 09:00", "2025-12-31 23:59:59", []string{"2026-01-01 00:00:00", "2027-01-01 00:00:00"}},
			{ratelimit.Day, "Europe/Berlin", "2026-03-01 02:30", "2026-03-28 12:00:00", []string{"2026-03-29 01:30:00", "2026-03-30 00:30:00"}}, // no 02:30
			{ratelimit.Day, "Europe/Berlin", "2026-03-01 02:30", "2026-10-24 12:00:00", []string{"2026-10-25 01:30:00", "2026-10-26 01:30:00"}}, // two of them
			{ratelimit.Day, "Pacific/Apia", "2011-12-01 15:00", "2011-12-30 00:00:00", []string{"2011-12-30 01:00:00", "2011-12-31 01:00:00"}},  // no 30 December
		} {
			limit := ratelimit.CalendarWindow(fmt.Sprint("calls", i), 2, c.unit, ratelimit.Zone(c.zone), ratelimit.Anchor(c.anchor)).Key("ann")
			w.Clock.At = harness.UTC(c.now)
			for _, reset := range c.resets {
				w.Grant(limit)
				if at := w.Grant(limit).ResetAt; !at.Equal(harness.UTC(reset)) {
					w.Fatalf("%+v: at %v it resets at %v, want %v", limit, w.Clock.At, at, reset)
				}
				if at := w.Deny(limit).RetryAt; !at.Equal(harness.UTC(reset)) {
					w.Fatalf("%+v: at %v, retry at %v, want %v", limit, w.Clock.At, at, reset)
				}
				w.Clock.At = harness.UTC(reset).Add(-time.Microsecond)
				w.Deny(limit)
				w.Clock.At = harness.UTC(reset)
			}
			w.Holds(limit, 2)
		}
	})
}

// TestACalendarWindowDoesWhatAFixedWindowDoes covers rollover, debts, reservations, refunds, several limits and shards.
func TestACalendarWindowDoesWhatAFixedWindowDoes(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			option := ratelimit.Shards(shards)
			monthly := func(name string, options ...ratelimit.Option) ratelimit.Request {
				return ratelimit.CalendarWindow(fmt.Sprint(name, shards), 30, ratelimit.Month, append(options, option)...).Key("ann")
			}
			w.Clock.At = harness.UTC("2026-01-10 00:00:00")

			rollover := monthly("rollover", ratelimit.Capacity(90))
			w.Grant(rollover.Count(90))
			w.Clock.At = harness.UTC("2026-03-01 00:00:00")
			w.Holds(rollover, 60)
			w.Grant(rollover.Count(45))
			w.Clock.At = harness.UTC("2026-04-30 23:59:59")
			w.Holds(rollover, 45)

			debt := monthly("debt")
			w.Charge(debt.Count(30 * 14))
			if paid, want := w.Deny(debt.Count(0)).RetryAt, harness.UTC("2027-05-01 00:00:00"); !paid.Equal(want) { // 13 windows pay the debt
				w.Fatalf("a charge of 14 months is paid at %v, want %v", paid, want)
			}
			if at, want := w.Deny(debt).RetryAt, harness.UTC("2027-06-01 00:00:00"); !at.Equal(want) {
				w.Fatalf("retry at %v, want %v", at, want)
			}
			w.Clock.At = harness.UTC("2026-05-01 00:00:00")
			w.Holds(debt, -12*30)

			reserved := monthly("reserved", ratelimit.MaxReserved(60))
			var last ratelimit.Reservation
			for i, runAt := range []string{"2026-05-01 00:00:00", "2026-06-01 00:00:00", "2026-07-01 00:00:00"} {
				if last = w.Reserve(reserved.Count(min(20+float64(i)*10, 30))); !last.RetryAt.Equal(harness.UTC(runAt)) {
					w.Fatalf("reservation %d runs at %v, want %v", i, last.RetryAt, runAt)
				}
			}
			w.Holds(reserved, -60) // the second reservation has to wait, and forfeits the 10 tokens that the first leaves
			if at, want := w.DenyReserve(reserved).RetryAt, harness.UTC("2026-06-01 00:00:00"); !at.Equal(want) {
				w.Fatalf("retry at %v, want %v", at, want)
			}
			refunded, err := w.Limiter.Refund(w.Context(), w.DB, last.Receipt(), reserved.Count(30))
			w.Do(err)
			if got := refunded.Requests[0].Refunded; got != 30 {
				w.Fatalf("refunded %v, want 30", got)
			}
			w.Holds(reserved, -30)

			refund := monthly("refund")
			taken := w.Grant(refund.Count(25))
			w.Clock.Advance(24 * time.Hour)
			_, err = w.Limiter.Refund(w.Context(), w.DB, taken.Receipt(), refund.Count(20))
			w.Do(err)
			w.Holds(refund, 25)
			taken = w.Grant(refund.Count(25))
			w.Clock.At = harness.UTC("2026-06-01 00:00:00")
			w.Grant(refund.Count(10))
			_, err = w.Limiter.Refund(w.Context(), w.DB, taken.Receipt(), refund.Count(20)) // May is over
			w.Do(err)
			w.Holds(refund, 20)

			minute := ratelimit.TokenBucket(fmt.Sprint("minute", shards), 2, time.Minute, option).Key("ann")
			month := monthly("month")
			for range 15 {
				w.Grant(minute.Count(2), month.Count(2))
				w.Deny(minute, month)
				w.Clock.Advance(time.Minute)
			}
			if got := harness.DeniedBy(w.Deny(minute, month)); len(got) != 1 || !strings.HasPrefix(got[0].Limit.Name(), "month") {
				w.Fatalf("denied by %+v, want the month", got)
			}
			w.Holds(minute, 2)
			w.Do(w.Limiter.Reset(w.Context(), w.DB, month))
			w.Grant(minute.Count(1), month.Count(30))
			w.Clock.At = harness.UTC("2026-06-30 23:59:59")
			w.Deny(minute, month)
			w.Clock.At = harness.UTC("2026-07-01 00:00:00")
			w.Grant(minute.Count(2), month.Count(30))
			w.Clock.At = harness.UTC("2026-07-31 23:59:59")
			w.Deny(minute, month)
			w.Clock.At = harness.UTC("2026-08-01 00:00:00")
			w.Grant(minute, month)
		}
	})
}

// TestTwoLimitsWaitForACalendar: a reservation of a bucket and a month has to wait for the month. The bucket forfeits
// tokens meanwhile.
func TestTwoLimitsWaitForACalendar(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		month := ratelimit.CalendarWindow("month", 10, ratelimit.Month, ratelimit.Zone("Europe/Paris")).Key("ann")
		bucket := ratelimit.TokenBucket("bucket", 1, time.Hour, ratelimit.Capacity(5)).Key("ann")
		w.Grant(month.Count(10))
		result := w.Reserve(month, bucket)
		if want := harness.UTC("2026-07-31 22:00:00"); !result.RetryAt.Equal(want) {
			w.Fatalf("it runs at %v, want %v", result.RetryAt, want)
		}
		w.Clock.At = result.RetryAt
		w.Holds(bucket, 4)
		w.Holds(month, 9)

		// The refills of the month are known for 100 windows. A bucket that would let a job run after that does not promise
		// it.
		slow := ratelimit.TokenBucket("slow", 1, 1000*24*time.Hour).Key("ann")
		w.Grant(slow)
		w.Reserve(slow.Count(1), month)
		never := ratelimit.TokenBucket("never", 1, 100_000*24*time.Hour, ratelimit.Capacity(0)).Key("ann")
		saved := ratelimit.CalendarWindow("saved", 10, ratelimit.Month, ratelimit.Capacity(5000)).Key("ann")
		w.DenyReserve(never, saved)
		w.Holds(saved, 5000)
		w.Reserve(slow, saved)

		// A calendar window without reservations also forfeits. It has enough for a job that runs five windows later.
		year := ratelimit.CalendarWindow("year's", 10, ratelimit.Month, ratelimit.Capacity(120), ratelimit.MaxReserved(0)).Key("ann")
		later := ratelimit.TokenBucket("later", 1, 150*24*time.Hour, ratelimit.Capacity(0)).Key("ann")
		result = w.Reserve(later, year.Count(20))
		if want := w.Clock.At.Add(150 * 24 * time.Hour); !result.RetryAt.Equal(want) {
			w.Fatalf("it runs at %v, want %v", result.RetryAt, want)
		}
		w.Holds(year, 120-20-5*10)
	})
}

// TestAJobAfterTheListOfACalendar: a job is denied that another limit lets run only after the windows that a call lists. The denial names
// the calendar, also where many windows are missing until it is full, and is until the call's list reaches to the job.
func TestAJobAfterTheListOfACalendar(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for i, shards := range []int{1, 3} {
			saved := ratelimit.CalendarWindow(fmt.Sprint("saved", i), 10, ratelimit.Month, ratelimit.Capacity(5000), ratelimit.Shards(shards)).Key("ann")
			slow := ratelimit.TokenBucket(fmt.Sprint("slow", i), 1, 10*365*24*time.Hour).Key("ann")
			w.Grant(saved.Count(5000))
			w.Grant(slow)
			w.Reserve(slow.Count(3))
			runs := w.Clock.At.Add(40 * 365 * 24 * time.Hour)
			denied := w.DenyReserve(slow, saved)
			until := denied.RetryAt
			if by := harness.DeniedBy(denied); len(by) != 1 || by[0].Limit.Name() != fmt.Sprint("saved", i) || !until.After(w.Clock.At) || until.After(w.Clock.At.AddDate(25, 0, 0)) {
				w.Fatalf("at %v: denied until %v: %+v", w.Clock.At, until, denied.Requests)
			}
			for _, early := range []time.Time{until.AddDate(-1, 0, 0), until.Add(-time.Microsecond)} {
				if w.Clock.At = early; !w.DenyReserve(slow, saved).RetryAt.Equal(until) {
					w.Fatalf("at %v: denied until another instant than %v", early, until)
				}
			}
			w.Clock.At = until
			if at := w.Reserve(slow, saved).RetryAt; at.Sub(runs).Abs() > time.Millisecond {
				w.Fatalf("it runs at %v, want %v", at, runs)
			}
		}
	})
}

// TestARefundByAClockThatIsYearsOffGivesNothingBack: the client's list does not have the windows around the job. So the
// client cannot know whether the job's window is over.
func TestARefundByAClockThatIsYearsOffGivesNothingBack(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limit := ratelimit.CalendarWindow("calls", 5, ratelimit.Day).Key("ann")
	limiter, clock := harness.NewLimiter()
	taken, err := limiter.Consume(t.Context(), pool, limit.Count(5))
	harness.Succeeds(t, err)
	clock.Advance(24 * time.Hour)
	harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, limit.Count(5))))
	for _, years := range []int{-5, 5} {
		now := clock.At.AddDate(years, 0, 0)
		off := &ratelimit.Limiter{Clock: func() time.Time { return now }}
		result, err := off.Refund(t.Context(), harness.Skewed{DB: pool, Clock: now, Now: clock.At}, taken.Receipt(), limit.Count(5))
		if err != nil || result.Requests[0].Refunded != 0 {
			t.Errorf("with a clock %d years off, %v came back, %v", years, result.Requests[0].Refunded, err)
		}
		if left := harness.ReadBalance(t, limiter, pool, limit); left != 0 {
			t.Errorf("with a clock %d years off, a refund left %v", years, left)
		}
	}
}

// TestReservationsOfACalendarReachAHundredWindows: they are bounded although MaxReserved is unset.
func TestReservationsOfACalendarReachAHundredWindows(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		day := ratelimit.CalendarWindow("day", 1, ratelimit.Day, ratelimit.Zone("Europe/Berlin")).Key("ann")
		for i := range 101 {
			result := w.Reserve(day)
			if want := time.Date(2026, 7, 1+i, 0, 0, 0, 0, mustLoad("Europe/Berlin")); i > 0 && !result.RetryAt.Equal(want) {
				w.Fatalf("reservation %d runs at %v, want %v", i, result.RetryAt, want)
			}
		}
		w.DenyReserve(day)
		w.RefuseReserve(ratelimit.ErrExceedsCapacity, day.Count(102))
	})
}

// TestADebtOfACalendarIsRefilledByEachWindow: whatever its bound on debts, as long as it is not above 100 windows.
func TestADebtOfACalendarIsRefilledByEachWindow(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		began := w.Clock.At
		for name, options := range map[string][]ratelimit.Option{
			"unbounded": nil, "bounded": {ratelimit.MaxReserved(60)}, "Berlin": {ratelimit.Zone("Europe/Berlin")},
		} {
			w.Clock.At = began
			ann := ratelimit.CalendarWindow(name, 1, ratelimit.Day, options...).Key("ann")
			w.Reserve(ann.Count(50))
			w.Clock.At = began.AddDate(0, 0, 40)
			if b := w.Balances(ann)[0]; b.Remaining != -9 {
				w.Errorf("%s: %v after 40 days, want -9", name, b.Remaining)
			}
			w.Charge(ann)
			if b := w.Balances(ann)[0]; b.Remaining != -10 {
				w.Errorf("%s: %v after a charge, want -10", name, b.Remaining)
			}
			w.Clock.At = began.AddDate(0, 0, 51)
			w.Grant(ann)
		}
	})
}

// TestAnOldDebtOfACalendarDeniesNobody: every way in counts the windows of a debt, also those that it does not list at first.
func TestAnOldDebtOfACalendarDeniesNobody(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		months := ratelimit.CalendarWindow("months", 100, ratelimit.Month, ratelimit.Anchor("2026-01-31 15:00"), ratelimit.MaxReserved(0))
		pool := harness.NewPool(w, 1)
		w.Charge(months.Key("ann").Count(3000))
		_, err := w.Limiter.Charge(w.Context(), pool, months.Key("bob").Count(3000))
		w.Do(err)
		w.Clock.At = time.Date(2028, 12, 31, 14, 59, 59, 0, time.UTC)
		if denied := w.Deny(months.Key("ann")); denied.Remaining != 0 || !denied.RetryAt.Equal(w.Clock.At.Add(time.Second)) {
			w.Errorf("%+v, want 0 left until a second later", denied)
		}
		w.Clock.At = w.Clock.At.Add(time.Second)
		if result := w.Grant(months.Key("ann")); result.Remaining != 99 {
			w.Errorf("%+v, want 99 left", result)
		}
		var batch pgx.Batch
		result, err := w.Limiter.QueueConsume(w.Context(), &batch, months.Key("bob"))
		w.Do(err)
		w.Do(pool.SendBatch(w.Context(), &batch).Close())
		if !result.OK || result.Remaining != 99 {
			w.Errorf("in a batch: %+v, want 99 left", result)
		}
	})
}

// TestAnOldDebtOfACalendarIsMergedWhole: a denial that makes one row of two shards loses no refill.
func TestAnOldDebtOfACalendarIsMergedWhole(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		month := func(options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.CalendarWindow("months", 1, ratelimit.Month, options...).Key("ann")
		}
		old := ratelimit.Limiter{Clock: w.Limiter.Clock}
		_, err := old.Charge(w.Context(), w.DB, month(ratelimit.Shards(2)).Count(500))
		w.Do(err)
		w.Clock.At = w.Clock.At.AddDate(2, 0, 0)
		w.Deny(month())
		if b := w.Balances(month())[0]; b.Remaining != -475 {
			w.Errorf("%v, want -475", b.Remaining)
		}
	})
}

// TestAnOldDebtOfACalendarLosesNothing: what a grant leaves is what Balance says, less the count.
func TestAnOldDebtOfACalendarLosesNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		began := w.Clock.At
		for _, c := range []struct {
			limit            ratelimit.Limit
			charged, balance float64
			days             int
		}{
			{ratelimit.CalendarWindow("plain", 100, ratelimit.Day), 1750, 100, 19},
			{ratelimit.CalendarWindow("saving", 1, ratelimit.Day, ratelimit.Capacity(10)), 39, 9, 38},
			{ratelimit.CalendarWindow("saving for long", 1, ratelimit.Day, ratelimit.Capacity(10), ratelimit.Zone("Europe/Berlin")), 60, 3, 53},
			{ratelimit.CalendarWindow("saving for years", 1, ratelimit.Day, ratelimit.Capacity(2000)), 1500, 1601, 1200}, // at least
		} {
			for key, use := range map[string]func(request ratelimit.Request) float64{
				"consume": func(request ratelimit.Request) float64 { return w.Grant(request).Remaining },
				"take": func(request ratelimit.Request) float64 {
					_, result, err := w.Limiter.Take(w.Context(), w.DB, 1, request)
					w.Do(err)
					return result.Remaining
				},
				"several": func(request ratelimit.Request) float64 {
					return w.Grant(ratelimit.TokenBucket("other", 1000, time.Minute).Global(), request).Requests[1].Remaining
				},
			} {
				w.Clock.At = began
				request := c.limit.Key(key)
				w.Charge(request.Count(c.charged))
				w.Clock.At = began.AddDate(0, 0, c.days)
				if checked, err := w.Limiter.Check(w.Context(), w.DB, request); err != nil || checked.Remaining != c.balance {
					w.Errorf("%s, %s: Check says %v, %v, want %v", c.limit.Name(), key, checked.Remaining, err, c.balance)
				}
				if n := couldTake(w, request); float64(n) != c.balance {
					w.Errorf("%s, %s: %v could be taken, want %v", c.limit.Name(), key, n, c.balance)
				}
				if left := use(request); left != c.balance-1 {
					w.Errorf("%s, %s: %v left, want %v", c.limit.Name(), key, left, c.balance-1)
				}
				if b := w.Balances(request)[0]; b.Remaining != c.balance-1 {
					w.Errorf("%s, %s: then a balance of %v, want %v", c.limit.Name(), key, b.Remaining, c.balance-1)
				}
			}
		}
	})
}

// TestACalendarGrantsAtItsRetryAt: also after more windows than a call lists at first, some of them longer than others.
func TestACalendarGrantsAtItsRetryAt(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		reserved := ratelimit.CalendarWindow("reserved", 10, ratelimit.Day, ratelimit.Zone("Europe/Berlin")).Key("ann")
		year := ratelimit.CalendarWindow("year", 1, ratelimit.Day, ratelimit.Zone("Europe/Berlin"), ratelimit.Capacity(365)).Key("ann")
		w.Reserve(reserved.Count(400))
		w.Grant(year.Count(365))
		began := w.Clock.At
		for request, want := range map[ratelimit.Request]time.Time{
			reserved:        time.Date(2026, 8, 10, 0, 0, 0, 0, mustLoad("Europe/Berlin")),
			year.Count(300): time.Date(2027, 4, 27, 0, 0, 0, 0, mustLoad("Europe/Berlin")),
		} {
			w.Clock.At = began
			if denied := w.Deny(request); !denied.RetryAt.Equal(want) {
				w.Errorf("%v: RetryAt is %v, want %v", request, denied.RetryAt, want)
			}
			w.Clock.At = want.Add(-time.Microsecond)
			w.Deny(request)
			w.Clock.At = want
			w.Grant(request)
		}
	})
}

// TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave: a shard that is full refills nothing, so an empty one keeps all waiting.
func TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limits, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: pool, Limiter: limits, Clock: clock}
	all := ratelimit.CalendarWindow("limit", 1, ratelimit.Day, ratelimit.Capacity(9), ratelimit.Shards(3)).Key("ann").Count(9)
	for shard, value := range []float64{3, 0, 3} {
		harness.Insert(t, pool, "ann", shard, 3, value, clock.At)
	}
	want := harness.UTC("2026-07-10 00:00:00")
	w.Retries(w.Check(all), want.Sub(clock.At))
	byHand := harness.Scan[time.Time](t, pool, `SELECT retry_at FROM ratelimit._by_hand('try', 'limit', 'ann', 1, '1 day', 9, 'calendar window',
		capacity => 9, shards => 3, now => '2026-07-01 12:00Z')`)
	if !byHand.Equal(want) {
		t.Errorf("by hand, it is %v", byHand)
	}
	clock.At = want
	if then := w.Check(all); !then.OK {
		t.Errorf("then %+v", then)
	}
}

// TestByHandCountsTheDaysOfADebt: as Go does, whatever bound on reservations is published. A large balance is no reason to fail.
func TestByHandCountsTheDaysOfADebt(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var clock time.Time
	limiter := ratelimit.Limiter{Clock: func() time.Time { return clock }}
	day := ratelimit.CalendarWindow("day", 1, ratelimit.Day, ratelimit.Zone("Europe/Berlin"), ratelimit.MaxReserved(2))
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", day))
	began := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	clock = began
	harness.Succeeds(t, harness.Second(limiter.Charge(t.Context(), pool, day.Key("ann").Count(50))))
	for _, at := range []struct {
		days int
		want float64
	}{{40, -9}, {49, 0}, {50, 1}, {95, 1}} {
		days, want := at.days, at.want
		clock = began.AddDate(0, 0, days)
		balances, err := limiter.Balance(t.Context(), pool, day.Key("ann"))
		harness.Succeeds(t, err)
		remaining := harness.Scan[float64](t, pool, "SELECT remaining FROM ratelimit._by_hand('try', 'day', 'ann', count => 0, now => $1)", clock)
		keys := harness.Scan[float64](t, pool, "SELECT remaining FROM ratelimit._keys('day', NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, NULL, $1)", clock)
		if balances[0].Remaining != want || remaining != want || keys != want {
			t.Errorf("after %d days: Go %v, by hand %v, keys %v, want %v", days, balances[0].Remaining, remaining, keys, want)
		}
	}
	for _, numbers := range []string{
		"rate => 0.00001, period => '1 second', capacity => 100000", "rate => 1, period => '1 day', capacity => 3e9, kind => 'fixed window'",
	} {
		harness.Scan[time.Time](t, pool, "SELECT retry_at FROM ratelimit.reserve('large', 'ann', "+numbers+")")
	}
}

func mustLoad(zone string) *time.Location {
	loc, err := time.LoadLocation(zone)
	if err != nil {
		panic(err)
	}
	return loc
}

func TestMistakesOfACalendar(t *testing.T) {
	for want, limit := range map[string]ratelimit.Limit{
		`period "1 fortnight" of a cal`: ratelimit.CalendarWindow("l", 1, "fortnight"),
		`zone "CET" is neither`:         ratelimit.CalendarWindow("l", 1, ratelimit.Day, ratelimit.Zone("CET")),
		`time/tzdata`:                   ratelimit.CalendarWindow("l", 1, ratelimit.Day, ratelimit.Zone("Europe/Atlantis")),
		`"Europe//Berlin" is not writ`:  ratelimit.CalendarWindow("l", 1, ratelimit.Day, ratelimit.Zone("Europe//Berlin")),
		`"Europe/./Berlin" is not writ`: ratelimit.CalendarWindow("l", 1, ratelimit.Day, ratelimit.Zone("Europe/./Berlin")),
		`"right/Europe/Berlin" is not `: ratelimit.CalendarWindow("l", 1, ratelimit.Day, ratelimit.Zone("right/Europe/Berlin")),
		`zone "Local"`:                  ratelimit.CalendarWindow("l", 1, ratelimit.Day, ratelimit.Zone("Local")),
		`anchor "15" is not a date`:     ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Anchor("15")),
		`15:00:05.5" is not a date`:     ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Anchor("2026-01-31 15:00:05.5")),
		`15:00+02" is not a date`:       ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Anchor("2026-01-31 15:00+02")),
		`"infinity" is not a date`:      ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Anchor("infinity")),
		`"10000-01-01" is not a date`:   ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Anchor("10000-01-01")),
		`Start is no option here`:       ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Start(harness.Noon)),
		`Zone is no option here`:        ratelimit.FixedWindow("l", 1, time.Hour, ratelimit.Zone("Europe/Berlin")),
		`Anchor is no option here`:      ratelimit.TokenBucket("l", 1, time.Hour, ratelimit.Anchor("2026-01-01")),
	} {
		if err := limit.Validate(); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestZonesAndAnchorsOfACalendarMayVary: one name may have several zones and anchors, but one definition.
func TestZonesAndAnchorsOfACalendarMayVary(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		calls := ratelimit.CalendarWindow("calls", 10, ratelimit.Month, ratelimit.Varies(32*24*time.Hour))
		ann := w.Grant(calls.Key("ann").Count(10))
		bob := w.Grant(calls.With(ratelimit.Rate(20), ratelimit.Zone("Asia/Tokyo"), ratelimit.Anchor("2026-07-15")).Key("bob").Count(20))
		if want := time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC); !ann.ResetAt.Equal(want) {
			w.Errorf("ann's month ends at %v, want %v", ann.ResetAt, want)
		}
		if want := time.Date(2026, 7, 14, 15, 0, 0, 0, time.UTC); !bob.ResetAt.Equal(want) {
			w.Errorf("bob's month ends at %v, want %v", bob.ResetAt, want)
		}
		w.Refuse(ratelimit.ErrInvalid, ratelimit.CalendarWindow("calls", 10, ratelimit.Month, ratelimit.Zone("Asia/Tokyo")).Key("cid"))
		w.Refuse(ratelimit.ErrInvalid, ratelimit.CalendarWindow("calls", 10, ratelimit.Day).Key("cid"))
		w.Refuse(ratelimit.ErrInvalid, ratelimit.FixedWindow("calls", 10, 32*24*time.Hour).Key("cid"))
	})
}

// TestByHandCalendarWindowsAreThoseOfTheLibrary: ratelimit.try, ratelimit.reserve and ratelimit.keys have the same windows as the library.
func TestByHandCalendarWindowsAreThoseOfTheLibrary(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	limiter, clock := harness.NewLimiter()
	for i := range 6 {
		unit := harness.OneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Quarter, ratelimit.Year)
		period := calendar.Calendar{Unit: string(unit)}.Interval()
		zone, anchor := harness.OneOf(r, "UTC", "Europe/Berlin", "America/Sao_Paulo"), harness.OneOf(r, "2026-01-31", "2020-02-29 02:30", "2031-12-15 23:59:59", harness.RandomAnchor(r))
		capacity := harness.OneOf(r, 5.0, 20)
		byHand := ratelimit.CalendarWindow(fmt.Sprint("hand", i), 5, unit, ratelimit.Zone(zone), ratelimit.Anchor(anchor),
			ratelimit.Capacity(capacity), ratelimit.MaxReserved(10))
		byGo := ratelimit.CalendarWindow(fmt.Sprint("go", i), 5, unit, ratelimit.Zone(zone), ratelimit.Anchor(anchor),
			ratelimit.Capacity(capacity), ratelimit.MaxReserved(10))
		for range 80 {
			clock.Advance(time.Duration(harness.OneOf(r, 0, 1, r.Int64N(int64(200*24*time.Hour)), r.Int64N(int64(24*time.Hour)))))
			count, verb := float64(r.IntN(6)), harness.OneOf(r, "consume", "consume", "reserve")
			want, err := harness.AskGo(t.Context(), limiter, pool, harness.AskedByHand{Ask: harness.Ask{Limit: byGo, Key: "k", Count: count}, Verb: verb})
			harness.Succeeds(t, err)
			query, detail := `SELECT true, remaining, retry_at, reset_at FROM ratelimit._by_hand('reserve', $1, 'k', 5, $2::text::interval, $3, 'calendar window',
					$4, max_reserved => 10, now => $5, zone => $6, anchor => $7::text::timestamp)`, struct {
				Remaining float64
				RetryAt   *time.Time `json:"retry_at"`
				ResetAt   time.Time  `json:"reset_at"`
			}{}
			if verb == "consume" {
				query = `SELECT granted, remaining, retry_at, reset_at FROM ratelimit._by_hand('try', $1, 'k', 5, $2::text::interval, $3, 'calendar window', $4, now => $5, zone => $6, anchor => $7::text::timestamp)`
			}
			var ok bool
			err = pool.QueryRow(t.Context(), query, byHand.Name(), period, count, capacity, clock.At, zone, anchor).Scan(&ok, &detail.Remaining, &detail.RetryAt, &detail.ResetAt)
			if pgErr, denied := errors.AsType[*pgconn.PgError](err); denied && pgErr.Code == "PT429" {
				err = json.Unmarshal([]byte(pgErr.Detail), &detail)
			}
			harness.Succeeds(t, err)
			if detail.RetryAt == nil {
				detail.RetryAt = new(time.Time)
			}
			if ok != want.Ok || !harness.Near(detail.Remaining, want.Remaining) || !detail.RetryAt.Equal(want.RetryAt) || !detail.ResetAt.Equal(want.ResetAt) {
				t.Fatalf("%s at %v, count %v, %s: by hand %v, %+v; the library says %+v", byHand, clock.At, count, verb, ok, detail, want)
			}
			var left float64
			var retryKey *time.Time
			if err := pool.QueryRow(t.Context(), `SELECT remaining, retry_at FROM ratelimit._keys($1, 5, $2::text::interval, 'calendar window', $3, NULL, $5, $6::text::timestamp, NULL, $4)`,
				byGo.Name(), period, capacity, clock.At, zone, anchor).Scan(&left, &retryKey); err != nil {
				t.Fatal(err)
			}
			status, _ := limiter.Check(t.Context(), pool, byGo.Key("k").Count(1))
			if !harness.Near(left, status.Remaining) || (retryKey != nil) != (status.RetryAt.After(clock.At)) || retryKey != nil && !retryKey.Equal(status.RetryAt) {
				t.Fatalf("%s at %v: ratelimit.keys says %v left, retry at %v; the library %+v", byGo, clock.At, left, retryKey, status)
			}
		}
		clock.Advance(3 * 366 * 24 * time.Hour)
		if deleted, err := limiter.Sweep(t.Context(), pool, byHand, byGo); err != nil || unit != ratelimit.Year && deleted == 0 {
			t.Fatalf("%s: a sweep of full rows deleted %d, %v", byHand, deleted, err)
		}
	}
}

// TestASweepOfACalendarMindsEveryAnchor: each key of a limit may have its own anchor, but a sweep has one definition. The
// sweep deletes only rows that are full by every anchor.
func TestASweepOfACalendarMindsEveryAnchor(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, clock := harness.NewLimiter()
	calls := func(options ...ratelimit.Option) ratelimit.Limit {
		return ratelimit.CalendarWindow("calls", 10, ratelimit.Month, options...)
	}
	fromThe15th := calls(ratelimit.Zone("America/New_York"), ratelimit.Anchor("2026-01-15"))
	clock.At = time.Date(2026, 3, 20, 12, 0, 0, 0, time.UTC)
	harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, fromThe15th.Key("bob").Count(10))))
	sweep := func(now time.Time, want int64) {
		t.Helper()
		clock.At = now
		if deleted, err := limiter.Sweep(t.Context(), pool, calls()); err != nil || deleted != want {
			t.Errorf("%v: the sweep deleted %d rows, %v, want %d", now, deleted, err, want)
		}
	}
	sweep(time.Date(2026, 4, 10, 0, 0, 0, 0, time.UTC), 0) // a month of calls() has begun, but none of bob's
	if _, err := limiter.Consume(t.Context(), pool, fromThe15th.Key("bob")); !harness.Denied(err) {
		t.Errorf("an eleventh call in a month: %v", err)
	}
	sweep(time.Date(2026, 3, 20, 12, 0, 0, 0, time.UTC).Add(32*24*time.Hour), 0) // the row must have been full for an hour
	sweep(time.Date(2026, 3, 20, 13, 0, 0, 0, time.UTC).Add(32*24*time.Hour), 1)
}

// TestACalendarRowWhoseTimeLiesAhead: nothing is refilled before a row's instant, and RetryAt is still known, by the library and by hand.
func TestACalendarRowWhoseTimeLiesAhead(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limiter, clock := harness.NewLimiter()
	daily := ratelimit.CalendarWindow("daily", 1, ratelimit.Day, ratelimit.Capacity(5))
	harness.MustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.limits VALUES ('daily', 'ann', 0, 1, -1, '%s')", clock.At.AddDate(0, 0, 9).Format(time.RFC3339)))
	_, err := limiter.Consume(t.Context(), pool, daily.Key("ann"))
	var denied *ratelimit.DeniedError
	if want := time.Date(2026, 7, 12, 0, 0, 0, 0, time.UTC); !errors.As(err, &denied) || !denied.RetryAt.Equal(want) {
		t.Errorf("%v, want a denial until %v", err, want)
	}
	byHand := harness.Scan[time.Time](t, pool, "SELECT retry_at FROM ratelimit._by_hand('try', 'daily', 'ann', rate => 1, period => '1 day', kind => 'calendar window', capacity => 5, now => $1)", clock.At)
	if denied != nil && !byHand.Equal(denied.RetryAt) {
		t.Errorf("by hand until %v, by the library until %v", byHand, denied.RetryAt)
	}
}

// TestAnchorsWithTheSameWindows compares ratelimit._same_windows with the windows from 2018 to 2034.
func TestAnchorsWithTheSameWindows(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	got := harness.Lines(t, pool, `
		WITH list AS (
			SELECT p.period, a.anchor, ARRAY(SELECT w FROM unnest(ratelimit._windows(p.period, 'UTC', a.anchor, '2026-01-01 00:00Z', p.reach, p.reach)) AS w
			       WHERE w BETWEEN '2018-01-01 00:00Z' AND '2034-01-01 00:00Z') AS windows
			  FROM (VALUES (interval '1 day', 3000), ('7 days', 500), ('1 month', 100), ('3 months', 40), ('1 year', 10)) AS p (period, reach),
			       unnest('{2001-01-01, 2001-01-02, 2001-01-08, 2001-01-01 15:00, 2026-01-01, 2026-01-31, 2026-01-31 15:00, 2026-03-31, 2024-03-31, 2026-04-30, 2026-02-28, 2024-02-29,
			           2020-02-29, 2021-02-28, 2026-12-31, 2025-12-30, 0001-12-31, 9999-12-31, 9999-01-31 15:00}'::timestamp[]) AS a (anchor)
		)
		SELECT a.period, a.anchor, b.anchor, a.windows = b.windows FROM list AS a JOIN list AS b ON b.period = a.period
		 WHERE (a.windows = b.windows) IS DISTINCT FROM ratelimit._same_windows(a.period, a.anchor, b.anchor) OR cardinality(a.windows) < 15`)
	if got != "" {
		t.Errorf("period, anchors, and whether their windows are the same:\n%s", got)
	}
}

// TestOnlyWhatGoReadsIsACalendar: SQL takes the units of the calendar and the names of zones that Go takes, and no others.
func TestOnlyWhatGoReadsIsACalendar(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	publish := func(period, zone string) string {
		return fmt.Sprintf(`SELECT ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 10, "period": "%s", "zone": "%s"}]')`, period, zone)
	}
	refuses := func(sql, want string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", sql, err, want)
		}
	}
	for _, period := range []string{
		"1 month -93 days", "2 months 100 days", "1 month -99 days", "3 months -200 days", "-1 months 107 days", "-1 months 101 days", "13 months -100 days",
		"1 month 1 day", "1 year 1 day", "8 days", "2 months", "2 years", "0", "24 hours", "1 day 1 hour", "-1 days", "-1 months", "178000000 years",
	} {
		refuses(publish(period, "UTC"), "rate limit 'x': period of a calendar window must be 1 day, 7 days, 1 month, 3 months or 1 year, not ")
		refuses("SELECT ratelimit.consume('x', 'k', kind => 'calendar window', rate => 10, period => '"+period+"')", "period of a calendar window must be")
	}
	for period, longest := range map[string]string{"1 day": "48:00:00", "1 week": "192:00:00", "1 month": "768:00:00", "3 months": "2232:00:00", "12 months": "8808:00:00", "1 year": "8808:00:00"} {
		harness.MustExec(t, pool, publish(period, "UTC"))
		if got := harness.Scan[string](t, pool, "SELECT ratelimit._longest(period)::text FROM ratelimit.definitions WHERE current"); got != longest {
			t.Errorf("the longest of %s is %s, want %s", period, got, longest)
		}
	}

	refuses(publish("1 day", "europe/BERLIN"), "rate limit 'x': zone must be written as in pg_timezone_names, 'Europe/Berlin', not 'europe/BERLIN'")
	refuses(publish("1 day", "Europe/Nowhere"), "rate limit 'x': zone must be in pg_timezone_names, which 'Europe/Nowhere' is not")
	refuses(publish("1 day", "America/New_York1"), "rate limit 'x': zone must be in pg_timezone_names, which 'America/New_York1' is not") // to Postgres, a rule such as EST5
	harness.MustExec(t, pool, publish("1 day", "Europe/Berlin"))
	harness.MustExec(t, pool, publish("1 day", "America/Argentina/Buenos_Aires"))
	list := strings.TrimSuffix(strings.TrimPrefix(publish("1 day", "Europe/Nowhere"), "SELECT ratelimit.publish('p', '"), "')")
	harness.MustExec(t, pool, "SELECT ratelimit.withdraw('p')")
	harness.MustBeat(t, pool, "go", list) // whose zone files are newer
	if _, _, err := harness.Beats(t, pool, "go", strings.ReplaceAll(list, "Nowhere", "berlin")); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "'Europe/Berlin', not 'Europe/berlin'") {
		t.Error(err)
	}

	const names = " FROM pg_timezone_names WHERE name LIKE '%/%' AND name NOT LIKE 'posix/%' AND name NOT LIKE 'right/%'"
	if n := harness.Scan[int](t, pool, "SELECT count(*)"+names); n < 300 {
		t.Errorf("Postgres has %d zones", n)
	}
	if got := harness.Lines(t, pool, "SELECT name, ratelimit._zone(name), ratelimit._zone(upper(name))"+names+" AND (ratelimit._zone(name) IS DISTINCT FROM name OR ratelimit._zone(upper(name)) IS DISTINCT FROM name)"); got != "" {
		t.Errorf("zones, and what Postgres is said to call them:\n%s", got)
	}
	if got := harness.Lines(t, pool, "SELECT set_config('timezone', 'Asia/Tokyo', false), ratelimit._zone('Europe/Berlin'), ratelimit._zone('Europe/Nowhere'), current_setting('timezone')"); got != "(Asia/Tokyo,Europe/Berlin,,Asia/Tokyo)" {
		t.Errorf("the zone of the session: %s", got)
	}
}

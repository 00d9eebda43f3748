package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/ratelimit"
)

// utc parses an instant in UTC.
func utc(text string) time.Time {
	t, err := time.Parse("2006-01-02 15:04:05.999999", text)
	if err != nil {
		panic(err)
	}
	return t
}

// TestACalendarWindowBeginsByItsZoneAndAnchor: the windows of each unit, with and without an anchor.
func TestACalendarWindowBeginsByItsZoneAndAnchor(t *testing.T) {
	behaviour(t, func(w world) {
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
			w.clock.now = utc(c.now)
			for _, reset := range c.resets {
				w.grant(limit)
				if at := w.grant(limit).ResetAt; !at.Equal(utc(reset)) {
					w.Fatalf("%+v: at %v it resets at %v, want %v", limit, w.clock.now, at, reset)
				}
				if at := w.deny(limit).RetryAt; !at.Equal(utc(reset)) {
					w.Fatalf("%+v: at %v, retry at %v, want %v", limit, w.clock.now, at, reset)
				}
				w.clock.now = utc(reset).Add(-time.Microsecond)
				w.deny(limit)
				w.clock.now = utc(reset)
			}
			w.holds(limit, 2)
		}
	})
}

// TestACalendarWindowDoesWhatAFixedWindowDoes covers rollover, debts, reservations, refunds, several limits and shards.
func TestACalendarWindowDoesWhatAFixedWindowDoes(t *testing.T) {
	behaviour(t, func(w world) {
		for _, shards := range []int{1, 3} {
			option := ratelimit.Shards(shards)
			monthly := func(name string, options ...ratelimit.Option) ratelimit.Request {
				return ratelimit.CalendarWindow(fmt.Sprint(name, shards), 30, ratelimit.Month, append(options, option)...).Key("ann")
			}
			w.clock.now = utc("2026-01-10 00:00:00")

			rollover := monthly("rollover", ratelimit.Capacity(90))
			w.grant(rollover.Count(90))
			w.clock.now = utc("2026-03-01 00:00:00")
			w.holds(rollover, 60)
			w.grant(rollover.Count(45))
			w.clock.now = utc("2026-04-30 23:59:59")
			w.holds(rollover, 45)

			debt := monthly("debt")
			w.charge(debt.Count(30 * 14))
			if paid, want := w.deny(debt.Count(0)).RetryAt, utc("2027-05-01 00:00:00"); !paid.Equal(want) { // 13 windows pay the debt
				w.Fatalf("a charge of 14 months is paid at %v, want %v", paid, want)
			}
			if at, want := w.deny(debt).RetryAt, utc("2027-06-01 00:00:00"); !at.Equal(want) {
				w.Fatalf("retry at %v, want %v", at, want)
			}
			w.clock.now = utc("2026-05-01 00:00:00")
			w.holds(debt, -12*30)

			reserved := monthly("reserved", ratelimit.MaxReserved(60))
			var last ratelimit.Reservation
			for i, runAt := range []string{"2026-05-01 00:00:00", "2026-06-01 00:00:00", "2026-07-01 00:00:00"} {
				if last = w.reserve(reserved.Count(min(20+float64(i)*10, 30))); !last.RetryAt.Equal(utc(runAt)) {
					w.Fatalf("reservation %d runs at %v, want %v", i, last.RetryAt, runAt)
				}
			}
			w.holds(reserved, -60) // the second reservation has to wait, and forfeits the 10 tokens that the first leaves
			if at, want := w.denyReserve(reserved).RetryAt, utc("2026-06-01 00:00:00"); !at.Equal(want) {
				w.Fatalf("retry at %v, want %v", at, want)
			}
			refunded, err := w.limiter.Refund(w.Context(), w.db, last.Receipt(), reserved.Count(30))
			w.do(err)
			if got := refunded.Requests[0].Refunded; got != 30 {
				w.Fatalf("refunded %v, want 30", got)
			}
			w.holds(reserved, -30)

			refund := monthly("refund")
			taken := w.grant(refund.Count(25))
			w.clock.Advance(24 * time.Hour)
			_, err = w.limiter.Refund(w.Context(), w.db, taken.Receipt(), refund.Count(20))
			w.do(err)
			w.holds(refund, 25)
			taken = w.grant(refund.Count(25))
			w.clock.now = utc("2026-06-01 00:00:00")
			w.grant(refund.Count(10))
			_, err = w.limiter.Refund(w.Context(), w.db, taken.Receipt(), refund.Count(20)) // May is over
			w.do(err)
			w.holds(refund, 20)

			minute := ratelimit.TokenBucket(fmt.Sprint("minute", shards), 2, time.Minute, option).Key("ann")
			month := monthly("month")
			for range 15 {
				w.grant(minute.Count(2), month.Count(2))
				w.deny(minute, month)
				w.clock.Advance(time.Minute)
			}
			if got := deniedBy(w.deny(minute, month)); len(got) != 1 || !strings.HasPrefix(got[0].Limit.Name(), "month") {
				w.Fatalf("denied by %+v, want the month", got)
			}
			w.holds(minute, 2)
			w.do(w.limiter.Reset(w.Context(), w.db, month))
			w.grant(minute.Count(1), month.Count(30))
			w.clock.now = utc("2026-06-30 23:59:59")
			w.deny(minute, month)
			w.clock.now = utc("2026-07-01 00:00:00")
			w.grant(minute.Count(2), month.Count(30))
			w.clock.now = utc("2026-07-31 23:59:59")
			w.deny(minute, month)
			w.clock.now = utc("2026-08-01 00:00:00")
			w.grant(minute, month)
		}
	})
}

// TestTwoLimitsWaitForACalendar: a reservation of a bucket and a month has to wait for the month. The bucket forfeits
// tokens meanwhile.
func TestTwoLimitsWaitForACalendar(t *testing.T) {
	behaviour(t, func(w world) {
		month := ratelimit.CalendarWindow("month", 10, ratelimit.Month, ratelimit.Zone("Europe/Paris")).Key("ann")
		bucket := ratelimit.TokenBucket("bucket", 1, time.Hour, ratelimit.Capacity(5)).Key("ann")
		w.grant(month.Count(10))
		result := w.reserve(month, bucket)
		if want := utc("2026-07-31 22:00:00"); !result.RetryAt.Equal(want) {
			w.Fatalf("it runs at %v, want %v", result.RetryAt, want)
		}
		w.clock.now = result.RetryAt
		w.holds(bucket, 4)
		w.holds(month, 9)

		// The refills of the month are known for 100 windows. A bucket that would let a job run after that does not promise
		// it.
		slow := ratelimit.TokenBucket("slow", 1, 1000*24*time.Hour).Key("ann")
		w.grant(slow)
		w.reserve(slow.Count(1), month)
		never := ratelimit.TokenBucket("never", 1, 100_000*24*time.Hour, ratelimit.Capacity(0)).Key("ann")
		saved := ratelimit.CalendarWindow("saved", 10, ratelimit.Month, ratelimit.Capacity(5000)).Key("ann")
		w.denyReserve(never, saved)
		w.holds(saved, 5000)
		w.reserve(slow, saved)

		// A calendar window without reservations also forfeits. It has enough for a job that runs five windows later.
		year := ratelimit.CalendarWindow("year's", 10, ratelimit.Month, ratelimit.Capacity(120), ratelimit.MaxReserved(0)).Key("ann")
		later := ratelimit.TokenBucket("later", 1, 150*24*time.Hour, ratelimit.Capacity(0)).Key("ann")
		result = w.reserve(later, year.Count(20))
		if want := w.clock.now.Add(150 * 24 * time.Hour); !result.RetryAt.Equal(want) {
			w.Fatalf("it runs at %v, want %v", result.RetryAt, want)
		}
		w.holds(year, 120-20-5*10)
	})
}

// TestAJobAfterTheListOfACalendar: a job is denied that another limit lets run only after the windows that a call lists. The denial names
// the calendar, also where many windows are missing until it is full, and is until the call's list reaches to the job.
func TestAJobAfterTheListOfACalendar(t *testing.T) {
	behaviour(t, func(w world) {
		for i, shards := range []int{1, 3} {
			saved := ratelimit.CalendarWindow(fmt.Sprint("saved", i), 10, ratelimit.Month, ratelimit.Capacity(5000), ratelimit.Shards(shards)).Key("ann")
			slow := ratelimit.TokenBucket(fmt.Sprint("slow", i), 1, 10*365*24*time.Hour).Key("ann")
			w.grant(saved.Count(5000))
			w.grant(slow)
			w.reserve(slow.Count(3))
			runs := w.clock.now.Add(40 * 365 * 24 * time.Hour)
			denied := w.denyReserve(slow, saved)
			until := denied.RetryAt
			if by := deniedBy(denied); len(by) != 1 || by[0].Limit.Name() != fmt.Sprint("saved", i) || !until.After(w.clock.now) || until.After(w.clock.now.AddDate(25, 0, 0)) {
				w.Fatalf("at %v: denied until %v: %+v", w.clock.now, until, denied.Requests)
			}
			for _, early := range []time.Time{until.AddDate(-1, 0, 0), until.Add(-time.Microsecond)} {
				if w.clock.now = early; !w.denyReserve(slow, saved).RetryAt.Equal(until) {
					w.Fatalf("at %v: denied until another instant than %v", early, until)
				}
			}
			w.clock.now = until
			if at := w.reserve(slow, saved).RetryAt; at.Sub(runs).Abs() > time.Millisecond {
				w.Fatalf("it runs at %v, want %v", at, runs)
			}
		}
	})
}

// TestARefundByAClockThatIsYearsOffGivesNothingBack: the client's list does not have the windows around the job. So the
// client cannot know whether the job's window is over.
func TestARefundByAClockThatIsYearsOffGivesNothingBack(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	limit := ratelimit.CalendarWindow("calls", 5, ratelimit.Day).Key("ann")
	limiter, clock := newLimiter()
	taken, err := limiter.Consume(t.Context(), pool, limit.Count(5))
	succeeds(t, err)
	clock.Advance(24 * time.Hour)
	succeeds(t, second(limiter.Consume(t.Context(), pool, limit.Count(5))))
	for _, years := range []int{-5, 5} {
		now := clock.now.AddDate(years, 0, 0)
		off := &ratelimit.Limiter{Clock: func() time.Time { return now }}
		result, err := off.Refund(t.Context(), skewed{pool, now, clock.now}, taken.Receipt(), limit.Count(5))
		if err != nil || result.Requests[0].Refunded != 0 {
			t.Errorf("with a clock %d years off, %v came back, %v", years, result.Requests[0].Refunded, err)
		}
		if left := readBalance(t, limiter, pool, limit); left != 0 {
			t.Errorf("with a clock %d years off, a refund left %v", years, left)
		}
	}
}

// TestReservationsOfACalendarReachAHundredWindows: they are bounded although MaxReserved is unset.
func TestReservationsOfACalendarReachAHundredWindows(t *testing.T) {
	behaviour(t, func(w world) {
		day := ratelimit.CalendarWindow("day", 1, ratelimit.Day, ratelimit.Zone("Europe/Berlin")).Key("ann")
		for i := range 101 {
			result := w.reserve(day)
			if want := time.Date(2026, 7, 1+i, 0, 0, 0, 0, mustLoad("Europe/Berlin")); i > 0 && !result.RetryAt.Equal(want) {
				w.Fatalf("reservation %d runs at %v, want %v", i, result.RetryAt, want)
			}
		}
		w.denyReserve(day)
		w.refuseReserve(ratelimit.ErrExceedsCapacity, day.Count(102))
	})
}

// TestADebtOfACalendarIsRefilledByEachWindow: whatever its bound on debts, as long as it is not above 100 windows.
func TestADebtOfACalendarIsRefilledByEachWindow(t *testing.T) {
	behaviour(t, func(w world) {
		began := w.clock.now
		for name, options := range map[string][]ratelimit.Option{
			"unbounded": nil, "bounded": {ratelimit.MaxReserved(60)}, "Berlin": {ratelimit.Zone("Europe/Berlin")},
		} {
			w.clock.now = began
			ann := ratelimit.CalendarWindow(name, 1, ratelimit.Day, options...).Key("ann")
			w.reserve(ann.Count(50))
			w.clock.now = began.AddDate(0, 0, 40)
			if b := w.balances(ann)[0]; b.Remaining != -9 {
				w.Errorf("%s: %v after 40 days, want -9", name, b.Remaining)
			}
			w.charge(ann)
			if b := w.balances(ann)[0]; b.Remaining != -10 {
				w.Errorf("%s: %v after a charge, want -10", name, b.Remaining)
			}
			w.clock.now = began.AddDate(0, 0, 51)
			w.grant(ann)
		}
	})
}

// TestAnOldDebtOfACalendarDeniesNobody: every way in counts the windows of a debt, also those that it does not list at first.
func TestAnOldDebtOfACalendarDeniesNobody(t *testing.T) {
	behaviour(t, func(w world) {
		months := ratelimit.CalendarWindow("months", 100, ratelimit.Month, ratelimit.Anchor("2026-01-31 15:00"), ratelimit.MaxReserved(0))
		pool := newPool(w, 1)
		w.charge(months.Key("ann").Count(3000))
		_, err := w.limiter.Charge(w.Context(), pool, months.Key("bob").Count(3000))
		w.do(err)
		w.clock.now = time.Date(2028, 12, 31, 14, 59, 59, 0, time.UTC)
		if denied := w.deny(months.Key("ann")); denied.Remaining != 0 || !denied.RetryAt.Equal(w.clock.now.Add(time.Second)) {
			w.Errorf("%+v, want 0 left until a second later", denied)
		}
		w.clock.now = w.clock.now.Add(time.Second)
		if result := w.grant(months.Key("ann")); result.Remaining != 99 {
			w.Errorf("%+v, want 99 left", result)
		}
		var batch pgx.Batch
		result, err := w.limiter.QueueConsume(w.Context(), &batch, months.Key("bob"))
		w.do(err)
		w.do(pool.SendBatch(w.Context(), &batch).Close())
		if !result.OK || result.Remaining != 99 {
			w.Errorf("in a batch: %+v, want 99 left", result)
		}
	})
}

// TestAnOldDebtOfACalendarIsMergedWhole: a denial that makes one row of two shards loses no refill.
func TestAnOldDebtOfACalendarIsMergedWhole(t *testing.T) {
	behaviour(t, func(w world) {
		month := func(options ...ratelimit.Option) ratelimit.Request {
			return ratelimit.CalendarWindow("months", 1, ratelimit.Month, options...).Key("ann")
		}
		old := ratelimit.Limiter{Clock: w.limiter.Clock}
		_, err := old.Charge(w.Context(), w.db, month(ratelimit.Shards(2)).Count(500))
		w.do(err)
		w.clock.now = w.clock.now.AddDate(2, 0, 0)
		w.deny(month())
		if b := w.balances(month())[0]; b.Remaining != -475 {
			w.Errorf("%v, want -475", b.Remaining)
		}
	})
}

// TestAnOldDebtOfACalendarLosesNothing: what a grant leaves is what Balance says, less the count.
func TestAnOldDebtOfACalendarLosesNothing(t *testing.T) {
	behaviour(t, func(w world) {
		began := w.clock.now
		for _, c := range []struct {
			limit            ratelimit.Limit
			charged, balance float64
			days             int
		}{
			{ratelimit.CalendarWindow("plain", 100, ratelimit.Day), 1750, 100, 19},
			{ratelimit.CalendarWindow("saving", 1, ratelimit.Day, ratelimit.Capacity(10)), 39, 9, 38},
			{ratelimit.CalendarWindow("saving for long", 1, ratelimit.Day, ratelimit.Capacity(10), ratelimit.Zone("Europe/Berlin")), 60, 3, 53},
		} {
			for key, use := range map[string]func(request ratelimit.Request) float64{
				"consume": func(request ratelimit.Request) float64 { return w.grant(request).Remaining },
				"take": func(request ratelimit.Request) float64 {
					_, result, err := w.limiter.Take(w.Context(), w.db, 1, request)
					w.do(err)
					return result.Remaining
				},
				"several": func(request ratelimit.Request) float64 {
					return w.grant(ratelimit.TokenBucket("other", 1000, time.Minute).Global(), request).Requests[1].Remaining
				},
			} {
				w.clock.now = began
				request := c.limit.Key(key)
				w.charge(request.Count(c.charged))
				w.clock.now = began.AddDate(0, 0, c.days)
				if checked, err := w.limiter.Check(w.Context(), w.db, request); err != nil || checked.Remaining != c.balance {
					w.Errorf("%s, %s: Check says %v, %v, want %v", c.limit.Name(), key, checked.Remaining, err, c.balance)
				}
				if left := use(request); left != c.balance-1 {
					w.Errorf("%s, %s: %v left, want %v", c.limit.Name(), key, left, c.balance-1)
				}
				if b := w.balances(request)[0]; b.Remaining != c.balance-1 {
					w.Errorf("%s, %s: then a balance of %v, want %v", c.limit.Name(), key, b.Remaining, c.balance-1)
				}
			}
		}
	})
}

// TestACalendarGrantsAtItsRetryAt: also after more windows than a call lists at first, some of them longer than others.
func TestACalendarGrantsAtItsRetryAt(t *testing.T) {
	behaviour(t, func(w world) {
		reserved := ratelimit.CalendarWindow("reserved", 10, ratelimit.Day, ratelimit.Zone("Europe/Berlin")).Key("ann")
		year := ratelimit.CalendarWindow("year", 1, ratelimit.Day, ratelimit.Zone("Europe/Berlin"), ratelimit.Capacity(365)).Key("ann")
		w.reserve(reserved.Count(400))
		w.grant(year.Count(365))
		began := w.clock.now
		for request, want := range map[ratelimit.Request]time.Time{
			reserved:        time.Date(2026, 8, 10, 0, 0, 0, 0, mustLoad("Europe/Berlin")),
			year.Count(300): time.Date(2027, 4, 27, 0, 0, 0, 0, mustLoad("Europe/Berlin")),
		} {
			w.clock.now = began
			if denied := w.deny(request); !denied.RetryAt.Equal(want) {
				w.Errorf("%v: RetryAt is %v, want %v", request, denied.RetryAt, want)
			}
			w.clock.now = want.Add(-time.Microsecond)
			w.deny(request)
			w.clock.now = want
			w.grant(request)
		}
	})
}

// TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave: a shard that is full refills nothing, so an empty one keeps all waiting.
func TestACalendarGrantsAtItsRetryAtWhateverItsShardsHave(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	limits, clock := newLimiter()
	w := world{t, pool, limits, clock}
	all := ratelimit.CalendarWindow("limit", 1, ratelimit.Day, ratelimit.Capacity(9), ratelimit.Shards(3)).Key("ann").Count(9)
	for shard, value := range []float64{3, 0, 3} {
		insert(t, pool, "ann", shard, 3, value, clock.now)
	}
	want := utc("2026-07-10 00:00:00")
	w.retries(w.check(all), want.Sub(clock.now))
	byHand := scan[time.Time](t, pool, `SELECT retry_at FROM ratelimit._by_hand('try', 'limit', 'ann', 1, '1 day', 9, 'calendar window',
		capacity => 9, shards => 3, now => '2026-07-01 12:00Z')`)
	if !byHand.Equal(want) {
		t.Errorf("by hand, it is %v", byHand)
	}
	clock.now = want
	if then := w.check(all); !then.OK {
		t.Errorf("then %+v", then)
	}
}

// TestByHandCountsTheDaysOfADebt: as Go does, whatever bound on reservations is published. A large balance is no reason to fail.
func TestByHandCountsTheDaysOfADebt(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	var clock time.Time
	limiter := ratelimit.Limiter{Clock: func() time.Time { return clock }}
	day := ratelimit.CalendarWindow("day", 1, ratelimit.Day, ratelimit.Zone("Europe/Berlin"), ratelimit.MaxReserved(2))
	succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", day))
	began := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	clock = began
	succeeds(t, second(limiter.Charge(t.Context(), pool, day.Key("ann").Count(50))))
	for _, at := range []struct {
		days int
		want float64
	}{{40, -9}, {49, 0}, {50, 1}, {95, 1}} {
		days, want := at.days, at.want
		clock = began.AddDate(0, 0, days)
		balances, err := limiter.Balance(t.Context(), pool, day.Key("ann"))
		succeeds(t, err)
		remaining := scan[float64](t, pool, "SELECT remaining FROM ratelimit._by_hand('try', 'day', 'ann', count => 0, now => $1)", clock)
		keys := scan[float64](t, pool, "SELECT remaining FROM ratelimit._keys('day', NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, NULL, $1)", clock)
		if balances[0].Remaining != want || remaining != want || keys != want {
			t.Errorf("after %d days: Go %v, by hand %v, keys %v, want %v", days, balances[0].Remaining, remaining, keys, want)
		}
	}
	for _, numbers := range []string{
		"rate => 0.00001, period => '1 second', capacity => 100000", "rate => 1, period => '1 day', capacity => 3e9, kind => 'fixed window'",
	} {
		scan[time.Time](t, pool, "SELECT retry_at FROM ratelimit.reserve('large', 'ann', "+numbers+")")
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
		`Start is no option here`:       ratelimit.CalendarWindow("l", 1, ratelimit.Month, ratelimit.Start(noon)),
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
	behaviour(t, func(w world) {
		calls := ratelimit.CalendarWindow("calls", 10, ratelimit.Month, ratelimit.Varies(32*24*time.Hour))
		ann := w.grant(calls.Key("ann").Count(10))
		bob := w.grant(calls.With(ratelimit.Rate(20), ratelimit.Zone("Asia/Tokyo"), ratelimit.Anchor("2026-07-15")).Key("bob").Count(20))
		if want := time.Date(2026, 8, 1, 0, 0, 0, 0, time.UTC); !ann.ResetAt.Equal(want) {
			w.Errorf("ann's month ends at %v, want %v", ann.ResetAt, want)
		}
		if want := time.Date(2026, 7, 14, 15, 0, 0, 0, time.UTC); !bob.ResetAt.Equal(want) {
			w.Errorf("bob's month ends at %v, want %v", bob.ResetAt, want)
		}
		w.refuse(ratelimit.ErrInvalid, ratelimit.CalendarWindow("calls", 10, ratelimit.Month, ratelimit.Zone("Asia/Tokyo")).Key("cid"))
		w.refuse(ratelimit.ErrInvalid, ratelimit.CalendarWindow("calls", 10, ratelimit.Day).Key("cid"))
		w.refuse(ratelimit.ErrInvalid, ratelimit.FixedWindow("calls", 10, 32*24*time.Hour).Key("cid"))
	})
}

// randomAnchor is an anchor of this century, often with a time of day.
func randomAnchor(r *rand.Rand) string {
	anchor := time.Date(2000+r.IntN(60), 1, 1+r.IntN(365), 0, 0, 0, 0, time.UTC)
	return calendar.AnchorText(anchor.Add(oneOf(r, 0, time.Duration(r.IntN(24))*time.Hour, time.Duration(r.IntN(24*60*60))*time.Second)))
}

// TestByHandCalendarWindowsAreThoseOfTheLibrary: ratelimit.try, ratelimit.reserve and ratelimit.keys have the same windows as the library.
func TestByHandCalendarWindowsAreThoseOfTheLibrary(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	pool := newPool(t, 1)
	limiter, clock := newLimiter()
	for i := range 6 {
		unit := oneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Quarter, ratelimit.Year)
		period := calendar.Calendar{Unit: string(unit)}.Interval()
		zone, anchor := oneOf(r, "UTC", "Europe/Berlin", "America/Sao_Paulo"), oneOf(r, "2026-01-31", "2020-02-29 02:30", "2031-12-15 23:59:59", randomAnchor(r))
		capacity := oneOf(r, 5.0, 20)
		byHand := ratelimit.CalendarWindow(fmt.Sprint("hand", i), 5, unit, ratelimit.Zone(zone), ratelimit.Anchor(anchor),
			ratelimit.Capacity(capacity), ratelimit.MaxReserved(10))
		byGo := ratelimit.CalendarWindow(fmt.Sprint("go", i), 5, unit, ratelimit.Zone(zone), ratelimit.Anchor(anchor),
			ratelimit.Capacity(capacity), ratelimit.MaxReserved(10))
		for range 80 {
			clock.Advance(time.Duration(oneOf(r, 0, 1, r.Int64N(int64(200*24*time.Hour)), r.Int64N(int64(24*time.Hour)))))
			count, verb := float64(r.IntN(6)), oneOf(r, "consume", "consume", "reserve")
			want, err := askGo(t.Context(), limiter, pool, askedByHand{ask{limit: byGo, key: "k", count: count}, verb})
			succeeds(t, err)
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
			err = pool.QueryRow(t.Context(), query, byHand.Name(), period, count, capacity, clock.now, zone, anchor).Scan(&ok, &detail.Remaining, &detail.RetryAt, &detail.ResetAt)
			if pgErr, denied := errors.AsType[*pgconn.PgError](err); denied && pgErr.Code == "PT429" {
				err = json.Unmarshal([]byte(pgErr.Detail), &detail)
			}
			succeeds(t, err)
			if detail.RetryAt == nil {
				detail.RetryAt = new(time.Time)
			}
			if ok != want.ok || !near(detail.Remaining, want.remaining) || !detail.RetryAt.Equal(want.retryAt) || !detail.ResetAt.Equal(want.resetAt) {
				t.Fatalf("%s at %v, count %v, %s: by hand %v, %+v; the library says %+v", byHand, clock.now, count, verb, ok, detail, want)
			}
			var left float64
			var retryKey *time.Time
			if err := pool.QueryRow(t.Context(), `SELECT remaining, retry_at FROM ratelimit._keys($1, 5, $2::text::interval, 'calendar window', $3, NULL, $5, $6::text::timestamp, NULL, $4)`,
				byGo.Name(), period, capacity, clock.now, zone, anchor).Scan(&left, &retryKey); err != nil {
				t.Fatal(err)
			}
			status, _ := limiter.Check(t.Context(), pool, byGo.Key("k").Count(1))
			if !near(left, status.Remaining) || (retryKey != nil) != (status.RetryAt.After(clock.now)) || retryKey != nil && !retryKey.Equal(status.RetryAt) {
				t.Fatalf("%s at %v: ratelimit.keys says %v left, retry at %v; the library %+v", byGo, clock.now, left, retryKey, status)
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
	pool := newPool(t, 1)
	limiter, clock := newLimiter()
	calls := func(options ...ratelimit.Option) ratelimit.Limit {
		return ratelimit.CalendarWindow("calls", 10, ratelimit.Month, options...)
	}
	fromThe15th := calls(ratelimit.Zone("America/New_York"), ratelimit.Anchor("2026-01-15"))
	clock.now = time.Date(2026, 3, 20, 12, 0, 0, 0, time.UTC)
	succeeds(t, second(limiter.Consume(t.Context(), pool, fromThe15th.Key("bob").Count(10))))
	sweep := func(now time.Time, want int64) {
		t.Helper()
		clock.now = now
		if deleted, err := limiter.Sweep(t.Context(), pool, calls()); err != nil || deleted != want {
			t.Errorf("%v: the sweep deleted %d rows, %v, want %d", now, deleted, err, want)
		}
	}
	sweep(time.Date(2026, 4, 10, 0, 0, 0, 0, time.UTC), 0) // a month of calls() has begun, but none of bob's
	if _, err := limiter.Consume(t.Context(), pool, fromThe15th.Key("bob")); !denied(err) {
		t.Errorf("an eleventh call in a month: %v", err)
	}
	sweep(time.Date(2026, 3, 20, 12, 0, 0, 0, time.UTC).Add(32*24*time.Hour), 0) // the row must have been full for an hour
	sweep(time.Date(2026, 3, 20, 13, 0, 0, 0, time.UTC).Add(32*24*time.Hour), 1)
}

// TestACalendarRowWhoseTimeLiesAhead: nothing is refilled before a row's instant, and RetryAt is still known, by the library and by hand.
func TestACalendarRowWhoseTimeLiesAhead(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 2)
	limiter, clock := newLimiter()
	daily := ratelimit.CalendarWindow("daily", 1, ratelimit.Day, ratelimit.Capacity(5))
	mustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.limits VALUES ('daily', 'ann', 0, 1, -1, '%s')", clock.now.AddDate(0, 0, 9).Format(time.RFC3339)))
	_, err := limiter.Consume(t.Context(), pool, daily.Key("ann"))
	var denied *ratelimit.DeniedError
	if want := time.Date(2026, 7, 12, 0, 0, 0, 0, time.UTC); !errors.As(err, &denied) || !denied.RetryAt.Equal(want) {
		t.Errorf("%v, want a denial until %v", err, want)
	}
	byHand := scan[time.Time](t, pool, "SELECT retry_at FROM ratelimit._by_hand('try', 'daily', 'ann', rate => 1, period => '1 day', kind => 'calendar window', capacity => 5, now => $1)", clock.now)
	if denied != nil && !byHand.Equal(denied.RetryAt) {
		t.Errorf("by hand until %v, by the library until %v", byHand, denied.RetryAt)
	}
}

// TestAnchorsWithTheSameWindows compares ratelimit._same_windows with the windows from 2018 to 2034.
func TestAnchorsWithTheSameWindows(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 2)
	got := lines(t, pool, `
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
	pool := newPool(t, 2)
	publish := func(period, zone string) string {
		return fmt.Sprintf(`SELECT ratelimit.publish('p', '[{"name": "x", "kind": "calendar window", "rate": 10, "period": "%s", "zone": "%s"}]')`, period, zone)
	}
	refuses := func(sql, want string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); sqlState(err) != "22023" || !strings.Contains(err.Error(), want) {
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
		mustExec(t, pool, publish(period, "UTC"))
		if got := scan[string](t, pool, "SELECT ratelimit._longest(period)::text FROM ratelimit.definitions WHERE current"); got != longest {
			t.Errorf("the longest of %s is %s, want %s", period, got, longest)
		}
	}

	refuses(publish("1 day", "europe/BERLIN"), "rate limit 'x': zone must be written as in pg_timezone_names, 'Europe/Berlin', not 'europe/BERLIN'")
	refuses(publish("1 day", "Europe/Nowhere"), "rate limit 'x': zone must be in pg_timezone_names, which 'Europe/Nowhere' is not")
	refuses(publish("1 day", "America/New_York1"), "rate limit 'x': zone must be in pg_timezone_names, which 'America/New_York1' is not") // to Postgres, a rule such as EST5
	mustExec(t, pool, publish("1 day", "Europe/Berlin"))
	mustExec(t, pool, publish("1 day", "America/Argentina/Buenos_Aires"))
	list := strings.TrimSuffix(strings.TrimPrefix(publish("1 day", "Europe/Nowhere"), "SELECT ratelimit.publish('p', '"), "')")
	mustExec(t, pool, "SELECT ratelimit.withdraw('p')")
	mustBeat(t, pool, "go", list) // whose zone files are newer
	if _, _, err := beats(t, pool, "go", strings.ReplaceAll(list, "Nowhere", "berlin")); sqlState(err) != "22023" || !strings.Contains(err.Error(), "'Europe/Berlin', not 'Europe/berlin'") {
		t.Error(err)
	}

	const names = " FROM pg_timezone_names WHERE name LIKE '%/%' AND name NOT LIKE 'posix/%' AND name NOT LIKE 'right/%'"
	if n := scan[int](t, pool, "SELECT count(*)"+names); n < 300 {
		t.Errorf("Postgres has %d zones", n)
	}
	if got := lines(t, pool, "SELECT name, ratelimit._zone(name), ratelimit._zone(upper(name))"+names+" AND (ratelimit._zone(name) IS DISTINCT FROM name OR ratelimit._zone(upper(name)) IS DISTINCT FROM name)"); got != "" {
		t.Errorf("zones, and what Postgres is said to call them:\n%s", got)
	}
	if got := lines(t, pool, "SELECT set_config('timezone', 'Asia/Tokyo', false), ratelimit._zone('Europe/Berlin'), ratelimit._zone('Europe/Nowhere'), current_setting('timezone')"); got != "(Asia/Tokyo,Europe/Berlin,,Asia/Tokyo)" {
		t.Errorf("the zone of the session: %s", got)
	}
}

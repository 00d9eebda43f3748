package ops_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestAWaitThatEndsBeforeAnOverrideDoes: what comes after the deadline says nothing about the wait.
func TestAWaitThatEndsBeforeAnOverrideDoes(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	wait := func(limit ratelimit.Limit, within time.Duration) (ratelimit.Result, error) {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return limits.Wait(ctx, pool, limit.Key("k"))
	}
	for name, limit := range map[string]ratelimit.Limit{
		"slow after":   ratelimit.TokenBucket("slow", 1, time.Hour, ratelimit.Capacity(1)),
		"lifted after": ratelimit.TokenBucket("lifted", 1, time.Hour, ratelimit.Capacity(1)),
	} {
		if name == "lifted after" {
			harness.Scan[int64](t, pool, "SELECT ratelimit.unlimited($1, every_key => true, forever => true)", limit.Name())
			harness.Scan[int64](t, pool, "SELECT ratelimit.override($1, 'k', rate => 1, capacity => 1, until => clock_timestamp() + $2)", limit.Name(), pgtype.Interval{Microseconds: 3600e6, Valid: true})
		} else {
			harness.Scan[int64](t, pool, "SELECT ratelimit.override($1, 'k', rate => 3600, capacity => 1, until => clock_timestamp() + $2)", limit.Name(), pgtype.Interval{Microseconds: 3600e6, Valid: true})
		}
		harness.Succeeds(t, follow.Load(t.Context(), limits))
		for i := range 2 {
			result, err := wait(limit, 5*time.Second)
			if name == "lifted after" && i == 1 {
				if !harness.Denied(err) {
					t.Errorf("%s: %v, %+v", name, err, result)
				}
			} else if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// TestACalendarBesideAnOverrideThatEndsLate: its windows are known then, too.
func TestACalendarBesideAnOverrideThatEndsLate(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	c := &harness.Clock{At: harness.Scan[time.Time](t, pool, "SELECT date_trunc('day', now())").UTC()}
	limits := follow.By(&ratelimit.Limiter{Clock: c.Now}, follow.Settings{DB: pool})
	daily, slow := ratelimit.CalendarWindow("daily", 1, ratelimit.Day, ratelimit.MaxReserved(0)), ratelimit.TokenBucket("slow", 60, time.Minute, ratelimit.MaxReserved(0))
	end := c.At.Add(20 * 24 * time.Hour)
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('slow', 'k', rate => 0.0000001, capacity => 1, until => $1)", end)
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, slow.Key("k"))))
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, daily.Key("k"))))
	_, err := limits.Reserve(t.Context(), pool, daily.Key("k"), slow.Key("k"))
	if d, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || !d.RetryAt.Equal(end) {
		t.Errorf("Reserve: %v, want %v", err, end)
	}
	_, err = limits.Consume(t.Context(), pool, daily.Key("k"), slow.Key("k"))
	if d, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || !d.RetryAt.Equal(end) {
		t.Errorf("Consume: %v, want %v", err, end)
	}
}

// TestAJobAfterTheListBesideAnOverride: after an override ends, a call lists no more windows than others.
func TestAJobAfterTheListBesideAnOverride(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	c := &harness.Clock{At: harness.Scan[time.Time](t, pool, "SELECT date_trunc('day', now())").UTC().Add(time.Hour)}
	limits := follow.By(&ratelimit.Limiter{Clock: c.Now}, follow.Settings{DB: pool})
	saved := ratelimit.CalendarWindow("saved", 10, ratelimit.Month, ratelimit.Capacity(5000), ratelimit.Shards(3)).Key("k")
	slow := ratelimit.TokenBucket("slow", 1, 10*365*24*time.Hour).Key("k")
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('saved', 'k', rate => 20, capacity => 5000, until => $1)", c.At.AddDate(5, 0, 0))
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, saved.Count(5000), slow)))
	if _, err := limits.Reserve(t.Context(), pool, slow.Count(3)); err != nil { // its work runs after 30 years, and that of the next after 40
		t.Fatal(err)
	}
	retryAt := func() time.Time {
		_, err := limits.Reserve(t.Context(), pool, saved, slow)
		if err == nil {
			return time.Time{}
		}
		d, ok := errors.AsType[*ratelimit.DeniedError](err)
		if !ok {
			t.Fatal(err)
		}
		return d.RetryAt
	}
	until := retryAt()
	if until.Before(c.At.AddDate(5, 0, 0)) || until.After(c.At.AddDate(25, 0, 0)) {
		t.Fatalf("at %v: denied until %v", c.At, until)
	}
	for _, early := range []time.Time{c.At.AddDate(6, 0, 0), until.Add(-time.Microsecond)} {
		if c.At = early; !retryAt().Equal(until) {
			t.Errorf("at %v: not denied until %v, but %v", early, until, retryAt())
		}
	}
	c.At = until
	if again := retryAt(); !again.IsZero() {
		t.Errorf("at %v: denied until %v", until, again)
	}
}

// TestAWaitIsWokenByItsClock: with a Clock, too, a change of overrides wakes a Wait.
func TestAWaitIsWokenByItsClock(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	began := time.Now()
	start := harness.Scan[time.Time](t, pool, "SELECT now() + interval '2 days'").UTC() // not the database's time
	limits := following(t, &ratelimit.Limiter{Clock: func() time.Time { return start.Add(time.Since(began)) }}, follow.Settings{DB: pool, Every: soon})
	limit := ratelimit.TokenBucket("api", 1, time.Hour)
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, limit.Key("k"))))
	ended := make(chan error)
	go func() {
		_, err := limits.Wait(t.Context(), pool, limit.Key("k"))
		ended <- err
	}()
	harness.Eventually(t, "the wait has begun", func() bool { return harness.Scan[float64](t, pool, "SELECT sum(value) FROM ratelimit.limits") < -0.5 })
	harness.MustExec(t, pool, "SELECT ratelimit.unlimited('api', 'k', forever => true)")
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(harness.Patience):
		t.Error("it sleeps on")
	}
}

// TestAClockThatStandsStillIsAskedEvery10ms: a Wait that is longer than it should be, by real time, does not spin.
func TestAClockThatStandsStillIsAskedEvery10ms(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	var asked atomic.Int64
	start := time.Now().UTC()
	limits := ratelimit.Limiter{Clock: func() time.Time { asked.Add(1); return start }}
	limit := ratelimit.TokenBucket("api", 10, time.Second, ratelimit.Capacity(1))
	harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, limit.Key("k"))))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := limits.Wait(ctx, pool, limit.Key("k")); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if n := asked.Load(); n > 200 {
		t.Errorf("the clock was asked %d times in a second", n)
	}
}

// TestTheFirstWaitBesideAnOverrideThatEnds: RetryAt of a denied Wait is the first instant at which it is granted, although it is denied
// again later: once the slower refill after an override comes into reach.
func TestTheFirstWaitBesideAnOverrideThatEnds(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	c := &harness.Clock{At: time.Now().UTC().Truncate(time.Second)}
	limits := follow.By(&ratelimit.Limiter{Clock: c.Now}, follow.Settings{DB: pool})
	limit := ratelimit.TokenBucket("api", 1, time.Second, ratelimit.Capacity(1000))
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'k', rate => 10, until => $1)", c.At.Add(2000*time.Second))
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	harness.Succeeds(t, harness.Second(limits.Charge(t.Context(), pool, limit.Key("k").Count(1000+15000))))
	// By 10 a second for about 1000 s, a Wait may owe about 10,000. By 1 a second afterwards, it may owe 1000.
	wait := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 1000*time.Second)
		defer cancel()
		_, err := limits.Wait(ctx, pool, limit.Key("k").Count(0))
		return err
	}
	d, ok := errors.AsType[*ratelimit.DeniedError](wait())
	if !ok || d.RetryAfter < 499*time.Second || d.RetryAfter > 502*time.Second {
		t.Fatalf("%v, want 500 s", d)
	}
	for _, after := range []time.Duration{-time.Second, time.Second, 800 * time.Second} {
		grants := after == time.Second
		ctx, cancel := context.WithTimeout(t.Context(), 1000*time.Second)
		c.At = d.RetryAt.Add(after)
		go func() { time.Sleep(300 * time.Millisecond); cancel() }() // it is granted, and sleeps
		_, err := limits.Wait(ctx, pool, limit.Key("k").Count(0))
		if granted := errors.Is(err, context.Canceled); granted != grants || !granted && !harness.Denied(err) {
			t.Errorf("%v later: %v", after, err)
		}
		cancel()
	}
}

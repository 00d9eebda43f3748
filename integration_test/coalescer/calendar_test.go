package coalescer_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// TestACoalescerDecidesCalendars: customers with units, zones and anchors of their own call together, for a month alone and for a month
// and a minute in one call, while windows begin. One statement decides all calls of a round, with the answers of the pool and of the
// model.
func TestACoalescerDecidesCalendars(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	together, apart, memory := harness.NewPool(t, 4), harness.NewPool(t, 1), ratelimittest.New(t)
	limiter, clock := harness.NewLimiter()
	clock.At = harness.UTC("2026-01-30 12:00:00")
	shares := map[int]int{} // statements by their number of calls
	var mu sync.Mutex
	coalescer := &ratelimit.Coalescer{Pool: together, OnBatch: func(calls int) {
		mu.Lock()
		defer mu.Unlock()
		shares[calls]++
	}}
	defer harness.CloseCoalescer(t, coalescer)

	type customer struct{ quota, pace harness.Ask }
	var customers []customer
	month := ratelimit.CalendarWindow("quota", 7, ratelimit.Month, ratelimit.Capacity(10), ratelimit.Varies(64*24*time.Hour)) // two of the longest months
	for i := range 30 {
		key := fmt.Sprint(i)
		quota := month.With(ratelimit.Zone(harness.OneOf(r, "", "Europe/Berlin", "America/Sao_Paulo", "Asia/Tokyo", "Pacific/Apia")),
			ratelimit.Anchor(fmt.Sprintf("2020-%02d-%02d", 1+r.IntN(12), 1+r.IntN(28))))
		if i%3 == 0 { // many share one calendar
			quota = ratelimit.CalendarWindow("daily", 3, ratelimit.Day, ratelimit.Zone("Europe/Berlin"))
		}
		pace := ratelimit.TokenBucket("pace", 20, time.Minute, ratelimit.Capacity(4))
		if i%5 == 0 {
			pace = ratelimit.FixedWindow("window", 5, time.Minute)
		}
		customers = append(customers, customer{harness.Ask{Limit: quota, Key: key, Count: 1}, harness.Ask{Limit: pace, Key: key, Count: 1}})
	}
	type asked struct {
		verb   string
		asks   []harness.Ask
		result harness.Answered
		err    error
	}
	answers := map[bool]int{}
	for round := range harness.Sized(60, 20) {
		clock.Advance(time.Duration(harness.OneOf(r, 0, r.Int64N(int64(20*time.Second)), r.Int64N(int64(12*time.Hour)), r.Int64N(int64(40*24*time.Hour)))))
		calls := make([]asked, 20+r.IntN(70))
		for i := range calls {
			c, call := harness.OneOf(r, customers...), &calls[i]
			call.verb = harness.OneOf(r, "consume", "consume", "consume", "charge")
			quota := harness.Ask{Limit: c.quota.Limit, Key: c.quota.Key, Count: float64(harness.OneOf(r, 1, 1, 2, 0))}
			call.asks = harness.OneOf(r, []harness.Ask{quota}, []harness.Ask{quota, c.pace}, []harness.Ask{c.pace, c.quota, quota})
		}
		release := harness.HoldFlights(t, coalescer, together)
		clear(shares)
		var wg sync.WaitGroup
		for i := range calls {
			c := &calls[i]
			ctx := harness.NewArrival(t.Context())
			wg.Go(func() { c.result, c.err = harness.Call(ctx, limiter, coalescer, c.verb, "", c.asks) })
			<-ctx.Arrived
		}
		release()
		wg.Wait()
		// The two that held the places are counted too.
		if want := map[int]int{len(calls): 1, 1: 2}; !maps.Equal(shares, want) {
			t.Fatalf("round %d: statements by number of calls %v, want %v", round, shares, want)
		}
		for i, c := range calls {
			for name, db := range map[string]ratelimit.DB{"pool": apart, "model": memory} {
				want, wantErr := harness.Call(t.Context(), limiter, db, c.verb, "", c.asks)
				if fmt.Sprint(c.err) != fmt.Sprint(wantErr) || !reflect.DeepEqual(c.result, want) {
					t.Fatalf("round %d, call %d of %d at %v: %s %+v\ntogether %+v, %v\n%s %+v, %v",
						round, i, len(calls), clock.Now(), c.verb, c.asks, c.result, c.err, name, want, wantErr)
				}
			}
			if c.err != nil && !harness.Denied(c.err) {
				t.Fatalf("round %d, call %d: %v", round, i, c.err)
			}
			answers[c.err == nil]++
		}
		got, want := harness.ReadTable(t, together), harness.ReadTable(t, apart)
		delete(got, harness.RowsOf{Name: "hold", Key: "a"})
		delete(got, harness.RowsOf{Name: "hold", Key: "b"})
		if !maps.EqualFunc(got, want, slices.Equal) {
			t.Fatalf("round %d\ntogether %v\napart    %v", round, got, want)
		}
	}
	if answers[true] < 100 || answers[false] < 100 {
		t.Errorf("grants and denials: %v: this tested too little", answers)
	}
}

// TestACoalescerCountsOldWindowsForAChargeAlone: a Charge counts the windows before its list, since it reads a debt of any size, and a
// Consume that shares its statement does not. With these numbers, both have the same list.
func TestACoalescerCountsOldWindowsForAChargeAlone(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		option ratelimit.Option
		owed   float64
		days   int
		left   float64
	}{
		"many may be owed": {ratelimit.MaxReserved(100), -120, 150, 0},
		"many are saved":   {ratelimit.Capacity(1000), -100, 1500, 999},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, coalescer := newCoalescer(t, 6)
			limit := ratelimit.CalendarWindow("day", 1, ratelimit.Day, tt.option)
			harness.MustExec(t, pool, fmt.Sprintf("INSERT INTO ratelimit.limits VALUES ('day', 'b', 0, 1, %v, now() - interval '%d days')", tt.owed, tt.days))
			release := harness.HoldFlights(t, coalescer, pool)
			f := &harness.Flight{Errs: make([]error, 2)}
			f.Join(t.Context(), coalescer, 0, limit.Key("a"))
			f.JoinCall(t.Context(), 1, func(ctx context.Context) error {
				return harness.Second(new(ratelimit.Limiter).Charge(ctx, coalescer, limit.Key("b")))
			})
			release()
			f.Wg.Wait()
			if err := errors.Join(f.Errs...); err != nil {
				t.Fatal(err)
			}
			if left := harness.Remaining(t, pool, limit.Key("b")); left < tt.left || left > tt.left+1 { // a day may begin meanwhile
				t.Errorf("%v are left, want %v", left, tt.left)
			}
		})
	}
}

// TestTwoListsOfACalendarShareAStatement: around midnight, some calls of a statement have a list of windows that was made before it, and
// others one that was made after it. Both lists have the windows that count, so all calls are decided as by one list.
func TestTwoListsOfACalendarShareAStatement(t *testing.T) {
	t.Parallel()
	const before = "2026-06-29,2026-06-30,2026-07-01,2026-07-02,2026-07-03"
	const after = "2026-06-30,2026-07-01,2026-07-02,2026-07-03,2026-07-04"
	for _, lists := range []struct{ windows, lasts string }{
		{before + "," + before, "{5,10}"}, {before + "," + after, "{5,10}"}, {after + "," + before, "{5,10}"},
	} {
		pool := harness.NewPool(t, 1)
		if _, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits VALUES ('d', 'a', 0, 1, 1, '2026-07-01 12:00 UTC'), ('d', 'b', 0, 1, 0, '2026-06-30 12:00 UTC')`); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct{ at, want string }{
			{"2026-07-01 23:59:59.999999 UTC", "a 0, b 8"}, // a has one token for its three calls; b has got 10 since it was used, for two
			{"2026-07-02 00:00:00 UTC", "a 7, b 16"},       // each gets 10
		} {
			var got string
			err := pool.QueryRow(t.Context(), `
				SELECT (SELECT string_agg(u.key || ' ' || u.after, ', ' ORDER BY u.key) FROM (
					SELECT DISTINCT ON (o.ord) k.key, o.after
					  FROM unnest(r.ord, r.after) WITH ORDINALITY AS o (ord, after, i) JOIN unnest('{a,b}'::text[]) WITH ORDINALITY AS k (key, ord) ON k.ord = o.ord
					 ORDER BY o.ord, o.i DESC) AS u)
				  FROM ratelimit._coalesce('{d,d}', '{10,10}', '{48 hours,48 hours}', '{30,30}', '{a,b}', '{2,1}', $1::timestamptz[], '{3}', '{1}', '{0}',
				         '{1,2}', '{2,2}', '{1,2}', $1::timestamptz[], '{1,1}', '{0,0}', $2, $3::timestamptz[], '{1,6}', $4) AS r`,
				"{2026-06-29 UTC,2026-06-29 UTC}", c.at, "{"+utcDates(lists.windows)+"}", lists.lasts).Scan(&got)
			if err != nil {
				t.Fatal(err)
			}
			if got != c.want {
				t.Errorf("%v at %s: %s are left, want %s", lists, c.at, got, c.want)
			}
		}
	}
}

func utcDates(dates string) string { return strings.ReplaceAll(dates, ",", " UTC,") + " UTC" }

// TestCallsThatShareNoStatementGoToThePool, although both places of the Coalescer are taken. Close waits for them.
func TestCallsThatShareNoStatementGoToThePool(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	limiter, clock := harness.NewLimiter()
	sharded := harness.Slow("sharded", 10, ratelimit.Shards(3))
	window := ratelimit.FixedWindow("window", 10, time.Hour)
	bucket := harness.Slow("bucket", 10)
	release := harness.HoldFlights(t, coalescer, pool)
	for name, do := range map[string]func() error{
		"shards": func() error {
			_, err := limiter.Consume(t.Context(), coalescer, sharded.Key("a"), bucket.Key("a"))
			return err
		},
		"charge":  func() error { _, err := limiter.Charge(t.Context(), coalescer, sharded.Key("a")); return err },
		"take":    func() error { _, _, err := limiter.Take(t.Context(), coalescer, 3, bucket.Key("b")); return err },
		"reserve": func() error { _, err := limiter.Reserve(t.Context(), coalescer, window.Key("a")); return err },
		"several": func() error {
			_, err := limiter.Reserve(t.Context(), coalescer, bucket.Key("c"), bucket.Key("d"))
			return err
		},
		"wait": func() error { _, err := limiter.Wait(t.Context(), coalescer, window.Key("b")); return err },
	} {
		if err := do(); err != nil { // it would wait for the held places
			t.Errorf("%s: %v", name, err)
		}
	}
	release()

	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), tx, sharded.Key("a").Count(5)); err != nil {
		t.Fatal(err)
	}
	clock.Advance(time.Microsecond)
	var wg sync.WaitGroup
	var closed, decided atomic.Bool
	wg.Go(func() {
		if _, err := limiter.Consume(t.Context(), coalescer, sharded.Key("a").Count(2)); err != nil {
			t.Error(err)
		}
		decided.Store(true)
	})
	harness.Waiting(t, pool, 1)
	wg.Go(func() {
		harness.CloseCoalescer(t, coalescer)
		closed.Store(true)
	})
	harness.Eventually(t, "the Coalescer takes no more calls", func() bool {
		_, err := limiter.Consume(t.Context(), coalescer, sharded.Key("b"))
		return errors.Is(err, ratelimit.ErrClosed)
	})
	time.Sleep(20 * time.Millisecond)
	if closed.Load() {
		t.Error("Close did not wait for a call that has its own statement")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if !decided.Load() {
		t.Error("the call was not decided")
	}
}

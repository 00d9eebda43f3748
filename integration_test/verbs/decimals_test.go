package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

// decimalPlan is a limit of whole units, such as cents, and counts of whole units that use it up exactly, in decimal numbers. In double
// precision they need not.
type decimalPlan struct {
	name     string
	unit     float64 // units in a token
	capacity int     // in units
	counts   []int   // in units
	kind     string
}

// randomPlan makes a plan of at most `most` calls.
func randomPlan(r *rand.Rand, name string, most int) decimalPlan {
	p := decimalPlan{name: name, unit: harness.OneOf(r, 100.0, 100, 10, 10, 3, 7), kind: harness.OneOf(r, "token bucket", "fixed window", "calendar window")}
	for range 2 + r.IntN(most-1) {
		p.counts = append(p.counts, 1+r.IntN(int(p.unit)))
	}
	if r.IntN(2) == 0 { // the same again and again errs in one direction
		for i := range p.counts {
			p.counts[i] = p.counts[0]
		}
	}
	for _, count := range p.counts {
		p.capacity += count
	}
	return p
}

func (p decimalPlan) String() string {
	return fmt.Sprintf("%s %s: %d/%v, counts %v/%v", p.kind, p.name, p.capacity, p.unit, p.counts, p.unit)
}

// count is a number of units in tokens.
func (p decimalPlan) count(units int) float64 { return float64(units) / p.unit }

// limit is the plan's limit. Nothing is refilled for a minute.
func (p decimalPlan) limit(options ...ratelimit.Option) ratelimit.Limit {
	switch rate := p.count(p.capacity); p.kind {
	case "token bucket":
		return ratelimit.TokenBucket(p.name, rate, 30*24*time.Hour, options...)
	case "fixed window":
		return ratelimit.FixedWindow(p.name, rate, 24*time.Hour, append(options, ratelimit.Start(harness.Noon))...)
	default:
		return ratelimit.CalendarWindow(p.name, rate, ratelimit.Month, options...)
	}
}

// oneUnit is the smallest count that the plan has. It must be denied once all is used.
func (p decimalPlan) oneUnit() float64 { return p.count(1) }

// spent wants a limit that shows that nothing is left, and nothing owed, and that grants nothing more.
func spent(w harness.World, p decimalPlan, of ratelimit.Limit, result ratelimit.Result) {
	w.Helper()
	if shown := result.Requests[0].Remaining; math.Abs(shown) > 1e-9 || shown < 0 {
		w.Fatalf("%v: %v remain, want 0", p, shown)
	}
	w.Deny(of.Key("k").Count(p.oneUnit()))
	b := harness.ReadBalances(w, w.Limiter, w.DB, of.Key("k"))[0]
	if b.Remaining < 0 || b.Remaining > 1e-9 || math.Abs(b.Used-b.Capacity) > 1e-9 {
		w.Fatalf("%v: %+v, want nothing left", p, b)
	}
	w.Grant(of.Key("k").Count(0)) // nothing is owed
}

// TestRoundingNeverDenies uses up plans in cents, tenths, thirds and sevenths. The last call is granted by every verb, on every handle:
// 0.3, less 0.1 three times, is nothing. What is then left is shown as 0, and one unit more is denied.
func TestRoundingNeverDenies(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		r := harness.NewRand(w.T)
		for i := range harness.Sized(24, 12) {
			p := randomPlan(r, fmt.Sprint("plan ", i), 8)
			verb := harness.OneOf(r, "consume", "reserve", "check", "several", "merged", "shards", "charge", "refund", "owed")
			w.Run(fmt.Sprintf("%s %d", verb, i), func(t *testing.T) {
				w := w
				w.T = t
				usesUp(w, p, verb, r)
			})
		}
	})
}

// usesUp makes the calls of a plan by a verb, and wants grants.
func usesUp(w harness.World, p decimalPlan, verb string, r *rand.Rand) {
	w.Helper()
	limit := p.limit()
	switch verb {
	case "shards":
		limit = p.limit(ratelimit.Shards(2 + r.IntN(6)))
	case "owed":
		limit = p.limit(ratelimit.Capacity(0), ratelimit.MaxReserved(p.count(p.capacity)))
	}
	other := ratelimit.TokenBucket(p.name+" beside", 1000, time.Hour)
	last := len(p.counts) - 1
	var result ratelimit.Result
	if verb == "merged" { // one call for all, which the library adds up
		var requests []ratelimit.Request
		for _, count := range p.counts {
			requests = append(requests, limit.Key("k").Count(p.count(count)))
		}
		spent(w, p, limit, w.Grant(requests...))
		return
	}
	for i, count := range p.counts {
		request := limit.Key("k").Count(p.count(count))
		switch {
		case verb == "reserve" && i == last:
			reserved := w.Reserve(request)
			w.Runs(reserved, 0)
			result = ratelimit.Result{Requests: reserved.Requests}
		case verb == "owed":
			if reserved := w.Reserve(request); p.kind != "token bucket" { // one refill repays all of it
				w.Runs(reserved, harness.ReadBalances(w, w.Limiter, w.DB, limit.Key("k"))[0].ResetAt.Sub(w.Clock.At))
			}
		case verb == "check" && i == last:
			w.Check(request)
			if checked, err := w.Limiter.Check(w.Context(), w.DB, request); err != nil {
				w.Fatalf("%v: a Check of the last call: %+v, %v", p, checked, err)
			}
			result = w.Grant(request)
		case verb == "several":
			result = w.Grant(other.Key("k"), request)
			result.Requests = result.Requests[1:]
		case verb == "charge" && i == last:
			var err error
			result, err = w.Limiter.Charge(w.Context(), w.DB, request)
			w.Do(err)
		case verb == "refund" && i == last:
			result = w.Grant(request)
			back, err := w.Limiter.Refund(w.Context(), w.DB, result.Receipt())
			w.Do(err)
			if got := back.Requests[0].Refunded; math.Abs(got-p.count(count)) > 1e-9 {
				w.Fatalf("%v: %v of the last call came back, want %v", p, got, p.count(count))
			}
			result = w.Grant(request)
		default:
			result = w.Grant(request)
		}
	}
	if verb == "owed" { // one count more would owe too much
		w.DenyReserve(limit.Key("k").Count(p.oneUnit()))
		if p.kind == "token bucket" {
			return
		}
		until(w, p, limit)
		return
	}
	spent(w, p, limit, result)
}

// until goes to the next window, where the debt of a limit without a capacity is repaid by one refill.
func until(w harness.World, p decimalPlan, limit ratelimit.Limit) {
	w.Helper()
	before := w.Clock.At
	b := harness.ReadBalances(w, w.Limiter, w.DB, limit.Key("k"))[0]
	w.Clock.At = b.ResetAt
	b = harness.ReadBalances(w, w.Limiter, w.DB, limit.Key("k"))[0]
	if b.Remaining != 0 {
		w.Fatalf("%v: %+v, want the debt repaid", p, b)
	}
	w.Clock.At = before
}

// TestRoundingNeverDeniesByHand is TestRoundingNeverDenies for the functions of SQL by hand.
func TestRoundingNeverDeniesByHand(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	for i := range harness.Sized(120, 40) {
		p := randomPlan(r, fmt.Sprint("plan ", i), 8)
		verb := harness.OneOf(r, "consume", "reserve", "shards", "all", "owed")
		limit := p.limit()
		if verb == "shards" {
			limit = p.limit(ratelimit.Shards(2 + r.IntN(6)))
		}
		if verb == "owed" { // one refill repays all of it
			owing := p.limit(ratelimit.Capacity(0))
			for n, count := range p.counts {
				got, err := decimalByHand(t.Context(), pool, harness.AskedByHand{Ask: harness.Ask{Limit: owing, Key: "k", Count: p.count(count)}, Verb: "reserve"})
				if err != nil || !got.granted || p.kind != "token bucket" && !got.retryAt.Equal(got.resetAt) {
					t.Fatalf("%v: reservation %d: %+v, %v", p, n, got, err)
				}
			}
			continue
		}
		for n, count := range p.counts {
			if verb == "all" {
				key := fmt.Sprintf(`[{"name": "%s", "key": "k", "rate": %v, "period": "1 day", "kind": "fixed window", "count": %v},
					{"name": "beside", "key": "k", "rate": 10000, "period": "1 hour"}]`, p.name, p.count(p.capacity), p.count(count))
				if _, err := pool.Exec(t.Context(), "SELECT * FROM ratelimit._all($1::text::jsonb, $2)", key, harness.Noon); err != nil {
					t.Fatalf("%v: call %d of ratelimit.consume_all: %v", p, n, err)
				}
				continue
			}
			a := harness.AskedByHand{Ask: harness.Ask{Limit: limit, Key: "k", Count: p.count(count)}, Verb: verb}
			got, err := decimalByHand(t.Context(), pool, a)
			if err != nil || !got.granted {
				t.Fatalf("%v: call %d: %+v, %v", p, n, got, err)
			}
			if verb == "reserve" && !got.retryAt.Equal(harness.Noon) {
				t.Fatalf("%v: call %d runs at %v, want at once", p, n, got.retryAt)
			}
			if left := p.capacity; n == len(p.counts)-1 && (got.remaining < 0 || got.remaining > 1e-9) {
				t.Fatalf("%v: %v of %v remain, want 0", p, got.remaining, left)
			}
		}
		if verb == "all" {
			continue
		}
		if got, err := decimalByHand(t.Context(), pool, harness.AskedByHand{Ask: harness.Ask{Limit: limit, Key: "k", Count: p.oneUnit()}, Verb: "consume"}); err != nil || got.granted {
			t.Fatalf("%v: a unit more: %+v, %v", p, got, err)
		}
		c := limit.Config()
		if c.Kind == "calendar window" {
			continue
		}
		var remaining float64
		var retryAt *time.Time
		harness.Succeeds(t, pool.QueryRow(t.Context(), "SELECT remaining, retry_at FROM ratelimit._keys($1, $2, $3, $4, $5, $6, NULL, NULL, ARRAY['k'], $7)",
			c.Name, c.Rate, harness.Period(c), c.Kind, c.Capacity, c.Start, harness.Noon).Scan(&remaining, &retryAt))
		if remaining < 0 || remaining > 1e-9 || retryAt == nil {
			t.Fatalf("%v: ratelimit.keys shows %v until %v", p, remaining, retryAt)
		}
	}
}

type decimalAnswer struct {
	granted          bool
	remaining        float64
	retryAt, resetAt time.Time
}

func decimalByHand(ctx context.Context, db ratelimit.DB, a harness.AskedByHand) (got decimalAnswer, err error) {
	c := a.Limit.Config()
	verb := "try"
	if a.Verb == "reserve" {
		verb = "reserve"
	}
	args := []any{c.Name, a.Key, c.Rate, c.Kind, c.Capacity, c.Start, c.Shards, a.Count, harness.Noon, 30 * 24 * time.Hour}
	switch c.Kind {
	case "calendar window":
		args[9] = nil
	default:
		args[9] = harness.Period(c)
	}
	var retryAt *time.Time
	err = db.QueryRow(ctx, `SELECT granted, remaining, retry_at, reset_at FROM ratelimit._by_hand('`+verb+`', $1, $2, rate => $3, period => coalesce($10::interval, '1 month'),
		kind => $4, capacity => $5, start => $6, shards => $7, count => $8, now => $9)`, args...).Scan(&got.granted, &got.remaining, &retryAt, &got.resetAt)
	if retryAt != nil {
		got.retryAt = *retryAt
	}
	return got, err
}

// TestRoundingNeverDeniesInABatch is TestRoundingNeverDenies for calls that share a statement or a batch.
func TestRoundingNeverDeniesInABatch(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 4)
	limiter := &ratelimit.Limiter{} // by the clock of the database, as the calls of enqueue
	coalescer := &ratelimit.Coalescer{Pool: pool}
	for i := range harness.Sized(100, 30) {
		p := randomPlan(r, fmt.Sprint("plan ", i), 8)
		limit := p.limit()
		var requests []ratelimit.Request
		if i%2 == 0 { // all of them in one statement of a Coalescer, whole counts too
			if r.IntN(2) == 0 { // whole counts after a fraction: what is left lacks a little of a whole number
				limit = harness.Slow(p.name, float64(len(p.counts)+1))
				harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, limit.Key("k").Count(1+1e-9))))
				p.unit, p.capacity = 1, len(p.counts)
				for n := range p.counts {
					p.counts[n] = 1
				}
				requests = append(requests, limit.Key("l").Count(float64(len(p.counts)))) // of several keys, each is asked for its sum
			}
			for _, count := range p.counts {
				requests = append(requests, limit.Key("k").Count(p.count(count)))
			}
			release := harness.HoldFlights(t, coalescer, pool)
			f := harness.Enqueue(t, coalescer, nil, requests...)
			release()
			f.Wg.Wait()
			for n := range requests {
				if err := f.Err(n); err != nil {
					t.Fatalf("%v: coalesced call %d: %v", p, n, err)
				}
			}
		} else {
			batch := &pgx.Batch{}
			var results []*ratelimit.Result
			for _, count := range p.counts {
				results = append(results, harness.Queue(t, limiter, batch, limit.Key("k").Count(p.count(count))))
			}
			if err := pool.SendBatch(t.Context(), batch).Close(); err != nil {
				t.Fatalf("%v: in a batch: %v", p, err)
			}
			for n, result := range results {
				if !result.OK {
					t.Fatalf("%v: call %d of a batch: %+v", p, n, result)
				}
			}
		}
		if result, err := limiter.Consume(t.Context(), coalescer, limit.Key("k").Count(p.oneUnit())); !harness.Denied(err) {
			t.Fatalf("%v: a unit more: %+v, %v", p, result, err)
		}
	}
}

// TestRoundingNeverDeniesInMemory is TestRoundingNeverDenies for the database of package ratelimittest and for replays.
func TestRoundingNeverDeniesInMemory(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	for i := range 300 {
		p := randomPlan(r, fmt.Sprint("plan ", i), 12)
		db := ratelimittest.New(t)
		db.Set(harness.Noon)
		limiter := &ratelimit.Limiter{Clock: db.Now}
		limit := p.limit()
		var events []replay.Event
		for n, count := range p.counts {
			result, err := limiter.Consume(t.Context(), db, limit.Key("k").Count(p.count(count)))
			if err != nil {
				t.Fatalf("%v: call %d: %v", p, n, err)
			}
			if n == len(p.counts)-1 && (result.Remaining < 0 || result.Remaining > 1e-9) {
				t.Fatalf("%v: %v remain", p, result.Remaining)
			}
			events = append(events, replay.Event{Time: harness.Noon, Key: "k", Count: p.count(count)})
		}
		if _, err := limiter.Consume(t.Context(), db, limit.Key("k").Count(p.oneUnit())); !harness.Denied(err) {
			t.Fatalf("%v: a unit more: %v", p, err)
		}
		if c := harness.Replayed(t, events, limit).Candidates[0]; c.Granted != len(events) {
			t.Fatalf("%v: a replay granted %d", p, c.Granted)
		}
	}
}

// TestTakeFindsWholeTokensAfterFractions: ten times 0.1 is one token, to Take too.
func TestTakeFindsWholeTokensAfterFractions(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.FixedWindow("jobs", 3, 24*time.Hour, ratelimit.Start(harness.Noon))
		for range 10 {
			w.Grant(limit.Key("k").Count(0.1))
		}
		if got := harness.ReadBalance(w, w.Limiter, w.DB, limit.Key("k")); got != 2 {
			w.Fatalf("%v remain, want 2", got)
		}
		w.Take(2, 100, limit.Key("k"))
		w.DenyTake(1, limit.Key("k"))
		sharded := ratelimit.FixedWindow("sharded", 3, 24*time.Hour, ratelimit.Start(harness.Noon), ratelimit.Shards(3))
		for range 10 {
			w.Grant(sharded.Key("k").Count(0.1))
		}
		w.Take(2, 100, sharded.Key("k"))
	})
}

// TestWholeTokensAreExactAtEveryCapacity: the tolerance is below one token, so that no whole token is granted that is not there.
func TestWholeTokensAreExactAtEveryCapacity(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, _ := harness.NewLimiter()
	for i, capacity := range []float64{2, 1000, 1e6, 1e6 + 1, 1e9, 1e12 - 1, 1e12, 1e15 - 1, 1e15} {
		for _, shards := range []int{1, 2, 7} {
			limit := ratelimit.FixedWindow(fmt.Sprint("limit ", i, " ", shards), capacity, 24*time.Hour, ratelimit.Start(harness.Noon), ratelimit.Shards(shards))
			if _, err := limiter.Consume(t.Context(), pool, limit.Key("k").Count(capacity+1)); capacity < 1e15 && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
				t.Errorf("%v and 1 of %v: %v", capacity, limit, err)
			}
			if _, err := limiter.Consume(t.Context(), pool, limit.Key("k").Count(capacity-1)); err != nil {
				t.Errorf("all but 1 of %v: %v", limit, err)
			}
			if b := harness.ReadBalance(t, limiter, pool, limit.Key("k")); b != 1 {
				t.Errorf("%v remain of %v, want 1", b, limit)
			}
			if _, err := limiter.Consume(t.Context(), pool, limit.Key("k").Count(2)); !harness.Denied(err) {
				t.Errorf("2 of 1 of %v: %v", limit, err)
			}
			if n, _, err := limiter.Take(t.Context(), pool, 5, limit.Key("k")); n != 1 || err != nil {
				t.Errorf("%d of 1 of %v: %v", n, limit, err)
			}
			if _, err := limiter.Consume(t.Context(), pool, limit.Key("k")); !harness.Denied(err) {
				t.Errorf("1 of 0 of %v: %v", limit, err)
			}
		}
	}
}

// TestTheToleranceDoesNotAddUp asks for less than the tolerance until a call is denied, and again. All of it together is one tolerance.
func TestTheToleranceDoesNotAddUp(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, _ := harness.NewLimiter()
	for _, shards := range []int{1, 3} {
		limit := ratelimit.FixedWindow(fmt.Sprint("limit", shards), 100, 24*time.Hour, ratelimit.Start(harness.Noon), ratelimit.Shards(shards))
		tolerance := 100e-9
		harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, limit.Key("k").Count(100))))
		granted := 0.0
		for range 100 {
			count := tolerance / 10
			_, err := limiter.Consume(t.Context(), pool, limit.Key("k").Count(count))
			if err == nil {
				granted += count
			} else if !harness.Denied(err) {
				t.Fatal(err)
			}
		}
		if granted > tolerance*(1+1e-6) || granted < tolerance/2 {
			t.Errorf("%d shards: %v granted above the capacity, want at most the tolerance, %v", shards, granted, tolerance)
		}
		if lowest := harness.Scan[float64](t, pool, "SELECT sum(value) FROM ratelimit.limits WHERE name = '"+limit.Name()+"'"); lowest < -tolerance*(1+1e-6) {
			t.Errorf("%d shards: the balance is %v", shards, lowest)
		}
		if b := harness.ReadBalance(t, limiter, pool, limit.Key("k")); b != 0 {
			t.Errorf("%d shards: %v are shown, want 0", shards, b)
		}
	}
}

// TestTheToleranceIsOneNumber: Go and SQL have the same tolerance, to the bit.
func TestTheToleranceIsOneNumber(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	r := harness.NewRand(t)
	for range 300 {
		capacity := harness.OneOf(r, 0, 0.3, 1, 1e6, 1e6*r.Float64(), 1e15, 1e15*r.Float64())
		floor := harness.OneOf(r, 0, 0, -capacity, -1e15*r.Float64(), -r.Float64(), math.Inf(-1))
		rate := harness.OneOf(r, 1, 0.3, 1e-15, 1e15*r.Float64())
		total := harness.OneOf(r, capacity*r.Float64(), -capacity*r.Float64(), math.Round(capacity*r.Float64())-1e-9*r.Float64(), 1e-15*r.Float64(), -1e-15*r.Float64(), -1e15)
		limit := algebra.Limit{Rate: rate, Period: time.Hour, Capacity: capacity}
		var lowest, shown, whole float64
		if err := pool.QueryRow(t.Context(), "SELECT $1::float8 - ratelimit._tolerance($2, $1), ratelimit._shown($3, $4, $2), ratelimit._whole($3, -ratelimit._tolerance($2, 0))",
			floor, capacity, total, rate).Scan(&lowest, &shown, &whole); err != nil {
			t.Fatal(err)
		}
		rows := []algebra.Row{{Value: total}}
		if want := limit.Lowest(floor); lowest != want {
			t.Errorf("the lowest balance for %v of %v is %v in SQL, %v in Go", floor, capacity, lowest, want)
		}
		if want := limit.Shown(total); shown != want {
			t.Errorf("%v of %v is shown as %v by SQL, as %v by Go", total, capacity, shown, want)
		}
		if want := limit.Whole(rows, math.Inf(1), 0); total <= capacity && whole != want {
			t.Errorf("%v of %v has %v whole tokens in SQL, %v in Go", total, capacity, whole, want)
		}
	}
}

// TestKeysThatLackOnlyRoundingAreNotLimited: a key that lacks a little of one token can take one.
func TestKeysThatLackOnlyRoundingAreNotLimited(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limiter, _ := harness.NewLimiter()
	limit := ratelimit.TokenBucket("jobs", 3, 24*time.Hour)
	left := 3.0
	for range 20 {
		harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, limit.Key("k").Count(0.1))))
		left -= 0.1
	}
	if left >= 1 {
		t.Fatalf("%v is no test", left)
	}
	var remaining float64
	var retryAt *time.Time
	if err := pool.QueryRow(t.Context(), "SELECT remaining, retry_at FROM ratelimit._keys('jobs', 3, '24 hours', 'token bucket', 3, NULL, NULL, NULL, NULL, $1)",
		harness.Noon).Scan(&remaining, &retryAt); err != nil {
		t.Fatal(err)
	}
	if remaining != 1 || retryAt != nil {
		t.Errorf("%v remain until %v, want 1 now", remaining, retryAt)
	}
}

// ulps are the doubles around x.
func ulps(x float64, n int) iter.Seq[float64] {
	return func(yield func(float64) bool) {
		for range n {
			x = math.Nextafter(x, math.Inf(-1))
		}
		for i := 0; i <= 2*n && yield(x); i++ {
			x = math.Nextafter(x, math.Inf(1))
		}
	}
}

// TestSQLTakesNoWholeNumberThatRoundingMakes looks at balances that lack one bit more than the tolerance.
func TestSQLTakesNoWholeNumberThatRoundingMakes(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	roundedUp := 0
	for _, capacity := range []float64{3, 10, 1000, 1e5} {
		limit := algebra.Limit{Rate: 1, Period: time.Hour, Capacity: capacity}
		for n := 1.0; n <= min(capacity, 50); n++ {
			for balance := range ulps(n+limit.Lowest(0), 3) {
				if balance-n >= limit.Lowest(0) || math.Floor(balance-limit.Lowest(0)) != n {
					continue
				}
				roundedUp++
				var whole float64
				harness.Succeeds(t, pool.QueryRow(t.Context(), "SELECT ratelimit._whole($1, -ratelimit._tolerance($2, 0))", balance, capacity).Scan(&whole))
				if whole != n-1 {
					t.Errorf("%v of %v: %v whole tokens, want %v", balance, capacity, whole, n-1)
				}
			}
		}
	}
	if roundedUp < 5 {
		t.Errorf("a difference was rounded up %d times: this tested too little", roundedUp)
	}
}

// TestARestBelowTheSmallestCountIsNothingByHand is the same for SQL.
func TestARestBelowTheSmallestCountIsNothingByHand(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	remaining := harness.Scan[float64](t, pool, "SELECT remaining FROM ratelimit.consume('calls', 'k', rate => 10, period => '1 hour', count => 0.1::float8 + 0.2::float8 - 0.3::float8)")
	if remaining != 10 {
		t.Errorf("%v remain, want 10", remaining)
	}
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.consume('calls', 'k', rate => 10, period => '1 hour', count => -1e-15)"); harness.SQLState(err) != "22023" {
		t.Errorf("a count below 0: %v", err)
	}
}

// TestARestBelowTheSmallestCountIsNothing: what rounding leaves of a difference is no count, and no mistake.
func TestARestBelowTheSmallestCountIsNothing(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("calls", 10, time.Hour)
		first := w.Grant(limit.Key("k").Count(0.3))
		estimate, used := 0.3, 0.0
		for range 3 {
			used += 0.1
		}
		for _, rest := range []float64{estimate - used, used - estimate, 9e-16} {
			if rest == 0 {
				w.Fatal("this is no rest")
			}
			_, err := w.Limiter.Charge(w.Context(), w.DB, limit.Key("k").Count(rest))
			w.Do(err)
			back, err := w.Limiter.Refund(w.Context(), w.DB, first.Receipt(), limit.Key("k").Count(rest))
			w.Do(err)
			if back.Requests[0].Refunded != 0 {
				w.Fatalf("%+v came back", back)
			}
			w.Grant(limit.Key("k").Count(rest))
		}
		if got := harness.ReadBalance(w, w.Limiter, w.DB, limit.Key("k")); got != 9.7 {
			w.Fatalf("%v remain, want 9.7", got)
		}
		w.Refuse(ratelimit.ErrInvalid, limit.Key("k").Count(-1e-15))
	})
}

// TestMoneyInMicroUnitsIsExact is the recipe of docs/concepts.md: whole micro-units are never rounded.
func TestMoneyInMicroUnitsIsExact(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	limiter, _ := harness.NewLimiter()
	const dollar = 1_000_000
	limit := ratelimit.CalendarWindow("llmSpend", 1000*dollar, ratelimit.Month)
	left := 1000 * dollar
	for left > 0 {
		cost := min(1+r.IntN(40*dollar), left)
		result, err := limiter.Consume(t.Context(), pool, limit.Key("acme").Count(float64(cost)))
		harness.Succeeds(t, err)
		if left -= cost; result.Remaining != float64(left) {
			t.Fatalf("%v remain, want %v", result.Remaining, left)
		}
	}
	if result, err := limiter.Consume(t.Context(), pool, limit.Key("acme")); !harness.Denied(err) {
		t.Fatalf("a micro-dollar more: %+v, %v", result, err)
	}
}

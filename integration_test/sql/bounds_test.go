package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// edge is a number at a bound, just inside or just outside, or one that another number makes extreme.
func edge(r *rand.Rand) float64 {
	return harness.OneOf(r, 1, 1, 0.001, 5e6, 1e-15, 1e15, 0, math.Nextafter(1e15, 2e15), math.Nextafter(1e-15, 0), math.Nextafter(1e-15, 1), -1, 1e-14, 9e14,
		math.Inf(1), math.NaN(), math.Copysign(0, -1), 3e-15, 2147483647, 2147483648, 1e18*r.Float64(), 1e15*r.Float64(), 100*r.Float64(), 1e-300, 1e300)
}

// periods as Go and as SQL write them.
var periodsOfBoth = map[string][][2]string{
	"token bucket":    {{"1s", "1 second"}, {"100ms", "100 milliseconds"}, {"99999us", "99999 microseconds"}, {"106751d23h47m16.854775s", "106751 days 23:47:16.854775"}, {"0s", "0"}, {"1d", "1 day"}, {"1h", "1 hour"}},
	"fixed window":    {{"1s", "1 second"}, {"100ms", "100 milliseconds"}, {"99999us", "99999 microseconds"}, {"106751d23h47m16.854775s", "106751 days 23:47:16.854775"}, {"0s", "0"}, {"1d", "1 day"}, {"1h", "1 hour"}},
	"calendar window": {{"1 day", "1 day"}, {"1 week", "7 days"}, {"1 month", "1 month"}, {"1 quarter", "3 months"}, {"1 year", "1 year"}, {"2 days", "2 days"}},
}

// TestByHandBoundsAreThoseOfTheLibrary makes random limits and requests whose numbers lie at the bounds. What one side grants, denies or
// refuses, the other does, too.
func TestByHandBoundsAreThoseOfTheLibrary(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	seen := map[string]int{}
	enough := func() bool {
		return !slices.ContainsFunc(outcomesOfBounds, func(outcome string) bool { return seen[outcome] < 5 })
	}
	for n := 0; n < harness.Sized(4000, 1500) || !enough() && n < 100_000; n++ {
		kind := harness.OneOf(r, "token bucket", "token bucket", "fixed window", "calendar window")
		period := harness.OneOf(r, periodsOfBoth[kind]...)
		rate, count := edge(r), edge(r)
		if r.IntN(2) == 0 {
			count = harness.OneOf(r, 1, 0.5, 1e-15, 0, 2)
		}
		c := ratelimit.Config{Name: "limit", Kind: kind, Rate: &rate, Period: period[0], Shards: harness.OneOf(r, 1, 1, 1, 1, 2, 100, 101)}
		if r.IntN(3) > 0 {
			capacity := edge(r)
			if r.IntN(3) == 0 {
				capacity = max(rate, count) // something can be granted
			}
			c.Capacity = &capacity
		}
		verb := harness.OneOf(r, "try", "try", "reserve", "take")
		var most int
		if verb == "take" {
			most = harness.OneOf(r, 1, 2, 0, -1, int(1e15), int(1e15+1), math.MaxInt64, 100)
		}
		if verb == "reserve" && r.IntN(3) > 0 {
			reserved := edge(r)
			c.MaxReserved = &reserved
		}
		// In the last years before 10000, Go denies a reservation whose windows it cannot list, and SQL grants it.
		now := harness.OneOf(r, harness.Noon, harness.Noon, time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9900, 6, 15, 12, 0, 0, 0, time.UTC), time.Date(2024, 2, 29, 12, 0, 0, 1000, time.UTC))
		what := fmt.Sprintf("case %d: %s of %v (most %d) at %v by rate %v per %q, capacity %v, max reserved %v, %d shards, %s", n, verb, count, most, now,
			rate, period[1], pointed(c.Capacity), pointed(c.MaxReserved), c.Shards, kind)
		calls := 3
		if c.Shards > 1 { // later calls may pick different shards
			calls = 1
		}
		var outcomes [2][]decidedAt
		for side := range outcomes {
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for call := range calls {
				at := now.Add(time.Duration(call) * 7 * time.Second)
				var outcome decidedAt
				err := pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) (err error) {
					if side == 0 {
						outcome, err = boundsInGo(t.Context(), tx, c, verb, count, most, at)
					} else {
						outcome, err = boundsInSQL(t.Context(), tx, c, period[1], verb, count, most, at)
					}
					return err
				})
				if err != nil && (outcome.verdict == "" || outcome.verdict == "granted") {
					_ = tx.Rollback(t.Context()) // or the pool could not be closed
					t.Fatalf("%s, call %d, side %d: %v", what, call, side, err)
				}
				outcomes[side] = append(outcomes[side], outcome)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		for call, inGo := range outcomes[0] {
			if inSQL := outcomes[1][call]; !inGo.like(inSQL) {
				t.Errorf("%s, call %d\nGo  %+v\nSQL %+v", what, call, inGo, inSQL)
			}
			seen[verb+" "+inGo.verdict]++
		}
	}
	if t.Log(seen); !enough() {
		t.Error("this tested too little")
	}
}

var outcomesOfBounds = []string{"try granted", "try denied", "try refused", "reserve granted", "reserve denied", "reserve refused", "take granted", "take denied", "take refused"}

func pointed(n *float64) string {
	if n == nil {
		return "NULL"
	}
	return fmt.Sprint(*n)
}

// decidedAt is what one side says of a call.
type decidedAt struct {
	verdict string // granted, denied or refused
	has     float64
	taken   int
	runsAt  time.Time
}

// like compares answers. Balances and instants that come of periods of centuries are rounded otherwise.
func (d decidedAt) like(other decidedAt) bool {
	had, otherHad := d.has+float64(d.taken), other.has+float64(other.taken)
	return d.verdict == other.verdict && math.Abs(had-otherHad) <= 1e-9*(1+math.Abs(had)) && d.runsAt.Sub(other.runsAt).Abs() <= time.Millisecond
}

// boundsInGo returns what the library says. Its error is for the transaction, which a denial by SQL would abort, too.
func boundsInGo(ctx context.Context, tx pgx.Tx, c ratelimit.Config, verb string, count float64, most int, at time.Time) (d decidedAt, err error) {
	limit, err := c.Limit()
	if err != nil {
		return decidedAt{verdict: "refused"}, err
	}
	limiter := &ratelimit.Limiter{Clock: func() time.Time { return at }}
	request := limit.Key("k")
	switch verb {
	case "take":
		var result ratelimit.Result
		if d.taken, result, err = limiter.Take(ctx, tx, most, request); err == nil {
			d.has = result.Requests[0].Remaining
		}
	case "reserve":
		var reservation ratelimit.Reservation
		if reservation, err = limiter.Reserve(ctx, tx, request.Count(count)); err == nil {
			d.has, d.runsAt = reservation.Requests[0].Remaining, reservation.RetryAt
		}
	default:
		var result ratelimit.Result
		if result, err = limiter.Consume(ctx, tx, request.Count(count)); err == nil {
			d.has = result.Requests[0].Remaining
		}
	}
	switch {
	case errors.Is(err, ratelimit.ErrInvalid) || errors.Is(err, ratelimit.ErrExceedsCapacity):
		return decidedAt{verdict: "refused"}, err
	case harness.Denied(err):
		return decidedAt{verdict: "denied"}, err
	}
	d.verdict = "granted"
	return d, err
}

func boundsInSQL(ctx context.Context, tx pgx.Tx, c ratelimit.Config, period, verb string, count float64, most int, at time.Time) (d decidedAt, err error) {
	args := []any{c.Rate, period, c.Kind, c.Capacity, c.Shards, count, c.MaxReserved, most, at}
	var ok bool
	var runsAt *time.Time
	err = tx.QueryRow(ctx, `SELECT granted, coalesce(taken, 0)::bigint, remaining, retry_at FROM ratelimit._by_hand('`+verb+`', 'limit', 'k', rate => $1, period => $2::text::interval, kind => $3,
		capacity => $4, shards => $5, count => $6, max_reserved => $7, most => $8::bigint::float8, now => $9)`, args...).Scan(&ok, &d.taken, &d.has, &runsAt)
	switch state := harness.SQLState(err); {
	case state == "22023":
		return decidedAt{verdict: "refused"}, err
	case state == "PT429" || err == nil && !ok:
		return decidedAt{verdict: "denied"}, err
	}
	d.verdict = "granted"
	if runsAt != nil {
		d.runsAt = *runsAt
	}
	if verb != "take" {
		d.taken = 0
	}
	return d, err
}

// TestWhatLeavesTheFloorIsGranted: the library sends floors with a tolerance, and its calls leave them by chance only.
func TestWhatLeavesTheFloorIsGranted(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	for key, start := range map[string]string{"bucket": "NULL", "window": "'2026-07-01'"} {
		for _, want := range []bool{true, true, false} {
			sql := "SELECT granted FROM ratelimit._consume('l', '" + key + "', 2, '1 hour', 2, " + start + ", 1, 0, '2026-07-01 12:00Z')"
			if granted := harness.Scan[bool](t, pool, sql); granted != want {
				t.Errorf("%s: %v, want %v", key, granted, want)
			}
		}
	}
}

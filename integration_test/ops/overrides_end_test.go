package ops_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// endingWorld is a database of limits, each with a chain of overrides for the key "k": some end, and others, blocks or the definition follow.
type endingWorld struct {
	testing.TB
	r      *rand.Rand
	pool   *pgxpool.Pool
	base   time.Time // when the first calls are made
	clock  *harness.Clock
	limits *ratelimit.Limiter
	all    []ratelimit.Limit
	ends   [][]time.Time // by limit
	asked  []string      // the limits of the last call
}

func newEnding(t testing.TB, n int) *endingWorld {
	t.Helper()
	r := harness.NewRand(t)
	e := &endingWorld{TB: t, r: r, pool: harness.NewPool(t, 2), clock: &harness.Clock{}, ends: make([][]time.Time, n+1)}
	e.base = harness.Scan[time.Time](t, e.pool, "SELECT date_trunc('hour', now()) + interval '2 hours'").UTC()
	e.limits = follow.By(&ratelimit.Limiter{Clock: e.clock.Now}, follow.Settings{DB: e.pool})
	for i := range n {
		e.all = append(e.all, e.limit(fmt.Sprintf("limit %d", i)))
	}
	if len(e.all) > 0 {
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), e.pool, "web", e.all...))
	}
	for i := range n {
		e.override(i)
		e.use(i)
	}
	e.all = append(e.all, ratelimit.TokenBucket("plan", 0, time.Hour)) // it grants nothing until the newer override ends, which has no rate
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), e.pool, "plans", e.all[n]))
	e.ends[n] = []time.Time{e.base.Add(time.Hour)}
	e.exec(`INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, until, made_at)
		VALUES ('plan', 'k', 'numbers', 5, NULL, NULL, now()), ('plan', 'k', 'numbers', NULL, 9, $1, now() + interval '1 ms')`, e.ends[n][0])
	harness.Succeeds(t, follow.Load(t.Context(), e.limits))
	return e
}

func (e *endingWorld) exec(sql string, args ...any) {
	e.Helper()
	harness.Succeeds(e, harness.Second(e.pool.Exec(e.Context(), sql, args...)))
}

func (e *endingWorld) limit(name string) ratelimit.Limit {
	r := e.r
	options := []ratelimit.Option{ratelimit.MaxReserved(float64(r.IntN(20)))}
	if r.IntN(2) == 0 {
		options = append(options, ratelimit.Capacity(float64(1+r.IntN(30))))
	}
	rate, period := float64(1+r.IntN(20)), harness.OneOf(r, time.Second, time.Minute, time.Hour)
	if r.IntN(8) == 0 { // it grants nothing, but for an override
		return harness.OneOf(r, ratelimit.TokenBucket, ratelimit.FixedWindow)(name, 0, period)
	}
	switch r.IntN(6) {
	case 0:
		return ratelimit.FixedWindow(name, rate, period, options...)
	case 1:
		return ratelimit.FixedWindow(name, rate, period, append(options, ratelimit.Shards(3))...)
	case 2:
		return ratelimit.CalendarWindow(name, rate, ratelimit.Day, options...)
	case 3:
		return ratelimit.TokenBucket(name, rate, period, append(options, ratelimit.Shards(2))...)
	}
	return ratelimit.TokenBucket(name, rate, period, options...)
}

// override makes up to four overrides of the key or of every key.
func (e *endingWorld) override(i int) {
	r := e.r
	for n := range r.IntN(5) {
		var key *string
		if r.IntN(3) > 0 {
			key = new("k")
		}
		var rate, capacity, maxReserved *float64
		effect := harness.OneOf(r, "numbers", "numbers", "numbers", "block", "unlimited")
		if effect == "numbers" {
			if r.IntN(4) > 0 {
				rate = new(harness.OneOf(r, 0.01, 0.5, 1, 7, 60, 1000))
				if e.all[i].Config().Zone != "" { // a calendar's list of windows reaches back a hundred
					rate = new(harness.OneOf(r, 1.0, 7, 1000))
				}
			}
			if rate == nil || r.IntN(2) == 0 {
				capacity = new(harness.OneOf(r, 0, 0.5, 1, 5, 17, 100))
			}
			if r.IntN(3) == 0 {
				maxReserved = new(float64(r.IntN(50)))
			}
		}
		var until *time.Time
		if r.IntN(5) > 0 {
			span := harness.OneOf(r, 10*time.Second, 10*time.Minute, 3*time.Hour, 50*time.Hour)
			until = new(e.base.Add(time.Duration(1+r.Int64N(int64(span/time.Microsecond))) * time.Microsecond))
			e.ends[i] = append(e.ends[i], *until)
		}
		e.exec(`INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, max_reserved, until, made_at)
			VALUES ($1, $2, $3, $4, $5, $6, $7, now() + $8 * interval '1 millisecond')`, e.all[i].Name(), key, effect, rate, capacity, maxReserved, until, n)
	}
}

// use makes the rows of the key: from deep in debt to full.
func (e *endingWorld) use(i int) {
	c := e.all[i].Config()
	ts := e.base.Add(-time.Duration(e.r.Int64N(int64(harness.OneOf(e.r, time.Second, time.Minute, time.Hour)))).Truncate(time.Microsecond))
	value := math.Floor(*c.Capacity * harness.OneOf(e.r, 0, 0, 0, -1, -10, 1, e.r.Float64()))
	if c.Zone != "" {
		value = max(value, -*c.Capacity)
	}
	for shard := range c.Shards {
		e.exec("INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ($1, 'k', $2, $3, $4, $5)", c.Name, shard, c.Shards, value/float64(c.Shards), ts)
	}
}

// at makes a call at an instant, and rolls it back.
func (e *endingWorld) at(now time.Time, call func(db ratelimit.DB) error) (*ratelimit.DeniedError, error) {
	e.Helper()
	e.clock.At = now
	err := pgx.BeginFunc(e.Context(), e.pool, func(tx pgx.Tx) error {
		return errors.Join(call(tx), harness.ErrRollBack)
	})
	exceeded, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok && !errors.Is(err, ratelimit.ErrExceedsCapacity) && !errors.Is(err, harness.ErrRollBack) {
		e.Fatalf("at %v: %v", now, err)
	}
	if errors.Is(err, ratelimit.ErrExceedsCapacity) {
		return nil, err
	}
	return exceeded, nil
}

// chains are the overrides of the limits of the last call, for a failure.
func (e *endingWorld) chains() string {
	text := ""
	for _, name := range e.asked {
		text += harness.Scan[string](e, e.pool, "SELECT coalesce(string_agg(concat_ws(' ', name, key, effect, 'rate', rate, 'capacity', capacity, 'reserved', max_reserved, 'until', until), E'\n' ORDER BY made_at, id), '') || E'\n' FROM ratelimit.overrides WHERE name = $1", name) +
			harness.Scan[string](e, e.pool, "SELECT coalesce(string_agg(concat_ws(' ', value, ts, shards), E'\n'), 'no rows') || E'\n' FROM ratelimit.limits WHERE name = $1", name)
	}
	return text
}

// forgiven is how much earlier a token bucket may grant what lacks only the tolerance, at most: of 150 tokens in 3 shards, at 0.01 an hour.
const forgiven = 3 * 150 * time.Hour / 1e7

// before is an instant before at, at which a call for these limits that is granted at that instant must be denied.
func (e *endingWorld) before(at time.Time) time.Time {
	for _, limit := range e.all {
		if slices.Contains(e.asked, limit.Name()) && limit.Config().Kind == "token bucket" {
			return at.Add(-forgiven)
		}
	}
	return at.Add(-time.Microsecond)
}

// proves wants an answer to be true: the call is granted at RetryAt, and not before. It returns the denial, or nil.
func (e *endingWorld) proves(what string, ends []time.Time, call func(db ratelimit.DB) error) *ratelimit.DeniedError {
	e.Helper()
	first, never := e.at(e.base, call)
	if first == nil && never == nil {
		return nil
	}
	granted := func(now time.Time) bool {
		denied, never := e.at(now, call)
		return denied == nil && never == nil
	}
	asked := first != nil && first.Reason == ratelimit.ReasonQuota // else nobody looked whether the tokens are there
	before := []time.Time{e.base.Add(time.Microsecond), e.base.Add(time.Duration(e.r.Int64N(int64(60 * time.Hour))).Truncate(time.Microsecond)), e.base.Add(1e5 * time.Hour)}
	for _, end := range ends {
		before = append(before, end.Add(-time.Microsecond), end, end.Add(time.Second))
	}
	if first != nil && !first.RetryAt.IsZero() {
		if !first.RetryAt.After(e.base) || first.RetryAfter != first.RetryAt.Sub(e.base) {
			e.Fatalf("%s: denied at %v until %v, after %v", what, e.base, first.RetryAt, first.RetryAfter)
		}
		if first.RetryAt.Year() < 9999 {
			if then, never := e.at(first.RetryAt, call); asked && (then != nil || never != nil) || then != nil && then.Reason != ratelimit.ReasonQuota {
				e.Fatalf("%s: denied at %v until %v: then %v, %v\n%s", what, e.base, first.RetryAt, then, never, e.chains())
			}
		}
		before = append(before, e.before(first.RetryAt), e.base.Add(first.RetryAfter/2).Truncate(time.Microsecond))
	}
	for _, now := range before {
		if first != nil && !first.RetryAt.IsZero() && now.After(e.before(first.RetryAt)) || !now.After(e.base) {
			continue
		}
		if granted(now) {
			e.Fatalf("%s: at %v the answer was %v, %v; but it is granted at %v\n%s", what, e.base, first, never, now, e.chains())
		}
	}
	return first
}

// TestAnOverrideThatEnds: RetryAt is the first instant at which the same call is granted, by the override or by what comes after it, and
// ErrExceedsCapacity is never. The library, SQL by hand and ratelimit.keys agree.
func TestAnOverrideThatEnds(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for part := range 4 {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			e := newEnding(t, harness.Sized(300, 60))
			chained := 0
			for i, limit := range e.all {
				e.asked = []string{limit.Name()}
				c := limit.Config()
				count := harness.OneOf(e.r, 1, 1, float64(1+e.r.IntN(int(*c.Capacity)+5)), max(*c.Capacity, 1), *c.Capacity+1) // no limit is asked for nothing
				request := limit.Key("k").Count(count)
				var denied *ratelimit.DeniedError
				what := fmt.Sprintf("%v, %v tokens", limit, count)
				switch verb := e.r.IntN(4); verb {
				case 0, 1:
					denied = e.proves("consume "+what, e.ends[i], func(db ratelimit.DB) error {
						return harness.Second(e.limits.Consume(t.Context(), db, request))
					})
				case 2:
					denied = e.proves("reserve "+what, e.ends[i], func(db ratelimit.DB) error {
						return harness.Second(e.limits.Reserve(t.Context(), db, request))
					})
				case 3:
					denied = e.proves("take of "+what, e.ends[i], func(db ratelimit.DB) error {
						_, _, err := e.limits.Take(t.Context(), db, int(count), limit.Key("k"))
						return err
					})
				}
				if denied != nil && len(e.ends[i]) > 0 {
					chained++
				}
				e.agrees(i, count)
			}
			t.Logf("%d denials under overrides that end", chained)
		})
	}
}

// agrees wants the answers of SQL by hand to be those of the library.
func (e *endingWorld) agrees(i int, count float64) {
	e.Helper()
	limit := e.all[i]
	for verb, call := range map[string]func(db ratelimit.DB) error{
		"try": func(db ratelimit.DB) error {
			return harness.Second(e.limits.Consume(e.Context(), db, limit.Key("k").Count(count)))
		},
		"reserve": func(db ratelimit.DB) error {
			return harness.Second(e.limits.Reserve(e.Context(), db, limit.Key("k").Count(count)))
		},
		"take": func(db ratelimit.DB) error {
			_, _, err := e.limits.Take(e.Context(), db, int(count), limit.Key("k"))
			return err
		},
	} {
		denied, never := e.at(e.base, call)
		want := "granted"
		switch {
		case never != nil:
			want = "never"
		case denied != nil && denied.RetryAt.IsZero():
			want = "for good"
		case denied != nil:
			want = denied.RetryAt.Format(time.RFC3339Nano)
		}
		got := ""
		_, _ = e.at(e.base, func(db ratelimit.DB) error {
			got = whenByHand(e, db, verb, limit.Name(), count, e.base)
			return nil
		})
		if got != want {
			e.Fatalf("%s of %v tokens of %v: SQL says %s, the library %s, %v\n%s", verb, count, limit, got, want, denied, e.chains())
		}
	}
	// The list of keys is for one token, or for all of a capacity below one.
	if harness.Scan[bool](e, e.pool, "SELECT coalesce(min(least(rate, capacity)), 1) >= 1 FROM ratelimit.overrides WHERE name = $1", limit.Name()) {
		retryAt := harness.Scan[string](e, e.pool, "SELECT coalesce((SELECT retry_at::text FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, '{k}', $2)), '')", limit.Name(), e.base)
		call := func(db ratelimit.DB) error { return harness.Second(e.limits.Consume(e.Context(), db, limit.Key("k"))) }
		denied, never := e.at(e.base, call)
		at := harness.Scan[*time.Time](e, e.pool, "SELECT CASE WHEN isfinite(nullif($1, '')::timestamptz) THEN $1::timestamptz END", retryAt)
		switch {
		case never != nil:
		case (retryAt == "") != (denied == nil), denied != nil && (at == nil) != denied.RetryAt.IsZero(), denied != nil && at != nil && !at.Equal(denied.RetryAt):
			e.Fatalf("%v: ratelimit.keys says %q, and a call for one token %v\n%s", limit, retryAt, denied, e.chains())
		}
	}
}

// whenByHand asks SQL without numbers: when it would be granted, in the words of agrees.
func whenByHand(t testing.TB, db ratelimit.DB, verb, name string, count float64, now time.Time) string {
	t.Helper()
	var granted bool
	var retryAt *time.Time
	err := db.QueryRow(t.Context(), "SELECT granted, retry_at FROM ratelimit._by_hand($1, $2, 'k', count => $3, most => $3, now => $4)", verb, name, count, now).Scan(&granted, &retryAt)
	switch harness.SQLState(err) {
	case "22023":
		return "never"
	case "PT429":
		pgErr, _ := errors.AsType[*pgconn.PgError](err)
		var detail struct {
			RetryAt *time.Time `json:"retry_at"`
		}
		harness.Succeeds(t, json.Unmarshal([]byte(pgErr.Detail), &detail))
		retryAt = detail.RetryAt
	default:
		harness.Succeeds(t, err)
		if granted {
			return "granted"
		}
	}
	if retryAt == nil {
		return "for good"
	}
	return retryAt.UTC().Format(time.RFC3339Nano)
}

// TestOverridesThatEndForSeveralLimits: what one limit gets, another may lose meanwhile.
func TestOverridesThatEndForSeveralLimits(t *testing.T) {
	t.Parallel()
	e := newEnding(t, harness.Sized(300, 60))
	for i := 0; i+1 < len(e.all); i += 2 {
		e.asked = []string{e.all[i].Name(), e.all[i+1].Name()}
		a, b := e.all[i].Key("k").Count(float64(1+e.r.IntN(3))), e.all[i+1].Key("k")
		unasked := false
		call := func(db ratelimit.DB) error {
			result, err := e.limits.Consume(t.Context(), db, a, b)
			for _, s := range result.Requests {
				unasked = unasked || math.IsInf(s.Limit.Capacity(), 1)
			}
			return err
		}
		if _, err := e.at(e.base, call); unasked || err != nil {
			continue // what is unlimited now counts as full
		}
		first := e.proves(fmt.Sprintf("%v and %v", e.all[i], e.all[i+1]), append(e.ends[i], e.ends[i+1]...), call)
		if first == nil || first.Reason != ratelimit.ReasonQuota {
			continue // SQL reads the other rows after a block, too
		}
		_, _ = e.at(e.base, func(db ratelimit.DB) error {
			requests := fmt.Sprintf(`[{"name": %q, "key": "k", "count": %v}, {"name": %q, "key": "k"}]`, e.all[i].Name(), first.Requests[0].Count, e.all[i+1].Name())
			var name string
			err := db.QueryRow(t.Context(), "SELECT name FROM ratelimit._all($1::text::jsonb, $2)", requests, e.base).Scan(&name)
			want := "null"
			if !first.RetryAt.IsZero() {
				want = harness.Scan[string](t, e.pool, "SELECT to_jsonb($1::timestamptz)::text", first.RetryAt)
			}
			pgErr, ok := errors.AsType[*pgconn.PgError](err)
			if !ok || !strings.Contains(pgErr.Detail, `"retry_at" : `+want) {
				t.Errorf("%v and %v: %v, %+v, want %s\n%s", e.all[i], e.all[i+1], err, pgErr, want, e.chains())
			}
			return nil
		})
	}
}

// TestBalanceUnderOverridesThatEnd: NextAt and ResetAt are when the tokens are there, whatever ends meanwhile.
func TestBalanceUnderOverridesThatEnd(t *testing.T) {
	t.Parallel()
	e := newEnding(t, harness.Sized(400, 100))
	read := func(now time.Time, limit ratelimit.Limit) ratelimit.Balance {
		e.clock.At = now
		b, err := e.limits.Balance(t.Context(), e.pool, limit.Key("k"))
		harness.Succeeds(t, err)
		return b[0]
	}
	has := func(now time.Time, limit ratelimit.Limit, count float64) bool {
		b := read(now, limit)
		return b.Remaining > count-1e-6
	}
	nexts, fulls := 0, 0
	for i, limit := range e.all {
		first := read(e.base, limit)
		if math.IsInf(first.Capacity, 1) || *first.Limit.Config().Rate == 0 { // no rows are read
			continue
		}
		more := max(math.Floor(first.Remaining+1e-9), 0) + 1
		instants := []time.Time{e.base.Add(time.Duration(e.r.Int64N(int64(time.Hour))).Truncate(time.Microsecond)), e.base.Add(1e5 * time.Hour)}
		for _, end := range e.ends[i] {
			instants = append(instants, end.Add(-time.Microsecond), end, end.Add(time.Second))
		}
		if next := first.NextAt; !next.IsZero() && next.Before(e.base.Add(1000*24*time.Hour)) { // a calendar's list reaches back so far
			nexts++
			if !has(next, limit, more) {
				t.Fatalf("%v: %+v, but then there are %+v", limit, first, read(next, limit))
			}
			instants = append(instants, next.Add(-time.Microsecond))
		}
		for _, now := range instants {
			if (first.NextAt.IsZero() || now.Before(first.NextAt)) && now.After(e.base) && has(now, limit, more+1e-5) {
				t.Fatalf("%v: %+v, but %v tokens at %v: %+v", limit, first, more, now, read(now, limit))
			}
		}
		if kind := limit.Config().Kind; kind == "token bucket" && !first.ResetAt.IsZero() && first.ResetAt.Year() < 9999 {
			fulls++
			if b := read(first.ResetAt, limit); !math.IsInf(b.Capacity, 1) && b.Used > 1e-6 {
				t.Fatalf("%v: %+v is not full then: %+v", limit, first, b)
			}
			if early := first.ResetAt.Add(-time.Second); early.After(e.base) {
				if b := read(early, limit); math.IsInf(b.Capacity, 1) || b.Used <= 0 && b.Capacity > 0 { // a plan of nothing, between two overrides, has nothing that is used
					t.Fatalf("%v: %+v is full at %v: %+v", limit, first, early, b)
				}
			}
		}
	}
	t.Logf("%d NextAt, %d ResetAt", nexts, fulls)
}

// TestTheWorkedExamplesOfOverridesThatEnd are those of the reports.
func TestTheWorkedExamplesOfOverridesThatEnd(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		pool := harness.NewPool(w, 2)
		follow.By(w.Limiter, follow.Settings{DB: pool})
		w.Clock.At = harness.Scan[time.Time](w, pool, "SELECT date_trunc('second', now()) + interval '1 hour'").UTC()
		now := w.Clock.At
		override := func(key, numbers string, d time.Duration) {
			w.Helper()
			harness.Scan[int64](w, pool, "SELECT ratelimit.override($1, $1, "+numbers+", until => $2)", key, now.Add(d))
			w.Do(follow.Load(w.Context(), w.Limiter))
		}
		minute, hour := ratelimit.TokenBucket("slow", 60, time.Minute, ratelimit.MaxReserved(30)), ratelimit.TokenBucket("raised", 1, time.Hour)

		override("slow", "rate => 0.01, capacity => 5", 10*time.Minute)
		w.Grant(minute.Key("slow").Count(5))
		w.Retries(w.Deny(minute.Key("slow")), 10*time.Minute)
		w.Retries(w.Deny(minute.Key("slow").Count(20)), 10*time.Minute) // more than the override ever grants
		w.Refuse(ratelimit.ErrExceedsCapacity, minute.Key("slow").Count(61))
		never := ratelimit.TokenBucket("zero", 3, time.Minute).Global().Count(20)
		_, err := w.Limiter.Consume(w.Context(), w.DB, minute.Key("slow").Count(20), never)
		if err == nil || !strings.Contains(err.Error(), `limit "zero": 20 tokens can never be granted`) {
			w.Fatalf("beside one whose override ends: %v", err)
		}
		w.Retries(w.DenyTake(3, minute.Key("slow")), 10*time.Minute)
		if reserved := w.Reserve(minute.Key("slow").Count(20)); !reserved.RetryAt.Equal(now.Add(10*time.Minute + 19900*time.Millisecond)) {
			// Others may take at the end, so until then the slow rate counts: a tenth of a token.
			w.Fatalf("reserved for %v, %v after now", reserved.RetryAt, reserved.Delay)
		}

		override("raised", "rate => 60", 30*time.Second)
		w.Do(pgxCharge(w, hour.Key("raised").Count(60)))
		w.Retries(w.Deny(hour.Key("raised")), time.Hour)

		// It ends, and nothing follows that grants.
		harness.Scan[int64](w, pool, "SELECT ratelimit.block('blocked', every_key => true, forever => true)")
		override("blocked", "rate => 1, capacity => 1", time.Minute)
		blocked := ratelimit.TokenBucket("blocked", 60, time.Minute).Key("blocked")
		w.Grant(blocked)
		if result := w.Deny(blocked); !result.RetryAt.IsZero() || result.RetryAfter != math.MaxInt64/2 {
			w.Fatalf("a block without an end follows: %+v", result)
		}

		// Each limit would grant within the hour. But when the first does, the other one no longer has the faster rate.
		first, other := ratelimit.TokenBucket("first", 3600, time.Hour, ratelimit.Capacity(1)), ratelimit.TokenBucket("other", 1, 10*time.Hour)
		override("first", "rate => 0.0001, capacity => 1", time.Hour)
		override("other", "rate => 36000, capacity => 1", 30*time.Minute)
		w.Grant(first.Key("first"), other.Key("other"))
		w.Clock.Advance(10 * time.Minute)
		result := w.Deny(first.Key("first"), other.Key("other"))
		if !result.Requests[1].OK || !result.Requests[0].RetryAt.Equal(now.Add(time.Hour)) || !result.RetryAt.Equal(now.Add(10*time.Hour)) {
			w.Fatalf("%+v, want a retry at %v", result, now.Add(10*time.Hour))
		}
	})
}

// pgxCharge charges, whatever is left.
func pgxCharge(w harness.World, request ratelimit.Request) error {
	_, err := w.Limiter.Charge(w.Context(), w.DB, request)
	return err
}

// TestAWaitUnderAnOverrideThatEnds: a Wait knows whether its tokens are there before its deadline, by the numbers that will be in force.
func TestAWaitUnderAnOverrideThatEnds(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	override := func(name, numbers string, d time.Duration) {
		t.Helper()
		harness.Scan[int64](t, pool, "SELECT ratelimit.override($1, 'k', "+numbers+", until => clock_timestamp() + $2)", name, pgtype.Interval{Microseconds: d.Microseconds(), Valid: true})
		harness.Succeeds(t, follow.Load(t.Context(), limits))
	}
	waitFor := func(request ratelimit.Request, within time.Duration) (ratelimit.Result, error) {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return limits.Wait(ctx, pool, request)
	}
	wait := func(limit ratelimit.Limit, within time.Duration) (ratelimit.Result, error) {
		return waitFor(limit.Key("k"), within)
	}
	for _, limit := range []ratelimit.Limit{ratelimit.TokenBucket("api", 3600, time.Hour, ratelimit.Capacity(1)), ratelimit.FixedWindow("window", 1, time.Second)} {
		key := limit.Config().Kind
		override(limit.Name(), "rate => 0.001, capacity => 1", time.Second) // slow for a second
		for range 2 {
			if _, err := wait(limit, 30*time.Second); err != nil {
				t.Errorf("%s: a wait beyond the end of a slow override: %v", key, err)
			}
		}
		hourly := ratelimit.TokenBucket("hourly "+key, 1, time.Hour, ratelimit.Capacity(1))
		if limit.Config().Kind == "fixed window" {
			hourly = ratelimit.FixedWindow("hourly "+key, 1, time.Hour, ratelimit.Capacity(1), ratelimit.Start(time.Now().Add(-time.Minute).Truncate(time.Second)))
		}
		override(hourly.Name(), "rate => 3600, capacity => 1", 300*time.Millisecond)
		harness.Succeeds(t, harness.Second(limits.Charge(t.Context(), pool, hourly.Key("k").Count(3))))
		if result, err := wait(hourly, 30*time.Second); !harness.Denied(err) || result.RetryAfter < 2*time.Hour {
			t.Errorf("%s: a wait for a raised rate that ends at once: %v, %+v", key, err, result)
		}
	}
	five := ratelimit.TokenBucket("five", 3600, time.Hour, ratelimit.Capacity(5))
	override("five", "capacity => 3", time.Hour)
	if result, err := waitFor(five.Key("k").Count(5), 30*time.Second); !harness.Denied(err) || result.RetryAfter < 30*time.Minute {
		t.Errorf("a wait for more than a lowered capacity: %v, %+v", err, result)
	}
	if left := harness.ReadBalance(t, limits, pool, five.Key("k")); left != 3 {
		t.Errorf("%v are left of the lowered capacity, want 3", left)
	}
}

// TestAChangeWakesWaiters: a Wait that sleeps asks again when overrides change. What was raised or lifted lets it go on.
func TestAChangeWakesWaiters(t *testing.T) {
	t.Parallel()
	for name, kind := range map[string]ratelimit.Limit{
		"bucket": ratelimit.TokenBucket("api", 1, time.Hour), "window": ratelimit.FixedWindow("api", 1, time.Hour), "shards": ratelimit.TokenBucket("api", 2, time.Hour, ratelimit.Shards(2)),
	} {
		for change, sql := range map[string]string{
			"unlimited": "SELECT ratelimit.unlimited('api', 'k', forever => true)", "raised": "SELECT ratelimit.override('api', every_key => true, rate => 1000000000, forever => true)", "lifted": "SELECT ratelimit.restore('api', 'k')",
		} {
			if name == "window" && change != "unlimited" {
				continue // it refills at the next window, whatever the rate
			}
			t.Run(name+", "+change, func(t *testing.T) {
				t.Parallel()
				pool, limit, used := harness.NewPool(t, 4), kind, kind.Capacity()
				if change == "lifted" {
					harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'k', rate => 1, capacity => 1, forever => true)")
					limit, used = ratelimit.TokenBucket("api", 1e9, time.Hour), 1
				}
				limits := following(t, new(ratelimit.Limiter), follow.Settings{DB: pool, Every: soon})
				harness.Succeeds(t, harness.Second(limits.Charge(t.Context(), pool, limit.Key("k").Count(used))))
				ended := make(chan error, 1)
				go func() {
					_, err := limits.Wait(t.Context(), pool, limit.Key("k"))
					ended <- err
				}()
				harness.Eventually(t, "the wait has begun", func() bool { return harness.Scan[float64](t, pool, "SELECT sum(value) FROM ratelimit.limits") < -0.5 })
				harness.MustExec(t, pool, "SELECT ratelimit.block('api', 'other', forever => true)") // which changes nothing for it
				select {
				case err := <-ended:
					t.Fatalf("it ended at once: %v", err)
				case <-time.After(300 * time.Millisecond):
				}
				harness.MustExec(t, pool, sql)
				select {
				case err := <-ended:
					if err != nil {
						t.Error(err)
					}
				case <-time.After(harness.Patience):
					t.Error("it sleeps on")
				}
			})
		}
	}
}

package world_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// sourced is a key whose numbers every source is to say.
type sourced struct {
	limit, own ratelimit.Limit // as published, and with the numbers of the key
	key        string
	varies     bool
}

// TestEverySourceSaysTheSame makes keys of all kinds, with debts, blocks and overrides that begin and end later, and asks for each of them
// Balance, a Check of one token, ratelimit.keys, txlimit keys, and of some txlimit show and the page: they say one thing.
func TestEverySourceSaysTheSame(t *testing.T) {
	t.Parallel()
	defer func() {
		if p := recover(); p != nil {
			if f, ok := p.(worldFailure); ok {
				t.Fatal(f.text)
			}
			panic(p)
		}
	}()
	r := harness.NewRand(t)
	w := &everything{TB: t, clock: &harness.Clock{At: time.Date(2031, 3, 17, 9, 30, 12, 345678000, time.UTC)}}
	w.openWorld()
	var limits []ratelimit.Limit
	var keys []sourced
	perLimit := harness.Sized(50, 5)
	for i := range 40 { // 1000 keys, and 2000 with -whole
		limit := sourcedLimit(r, fmt.Sprintf("limit %d", i), i)
		limits = append(limits, limit)
		for k := range perLimit {
			own := limit
			if varies := limit.Config().Varies; varies != "" && varies != "0s" && r.IntN(2) == 0 {
				own = limit.With(ratelimit.Rate(harness.OneOf(r, 5.0, 20, 61)), ratelimit.Capacity(harness.OneOf(r, 1.0, 17, 50)))
			}
			keys = append(keys, sourced{limit, own, fmt.Sprintf("key %d", k), limit.Config().Varies != ""})
		}
	}
	w.must(new(ratelimit.Limiter).Publish(t.Context(), w.pool, "app", limits...))
	w.must(sourcedRows(t.Context(), w, r, keys))
	for _, limit := range limits {
		w.must(sourcedOverrides(t.Context(), w, r, limit, perLimit))
	}
	asks := follow.By(&ratelimit.Limiter{Clock: w.clock.Now}, follow.Settings{DB: w.pool, OnError: func(err error) { t.Error(err) }})

	said := map[string]int{}
	for i, limit := range limits {
		w.must(follow.Load(t.Context(), asks)) // what gives more lapses after five minutes
		of := keys[i*perLimit : (i+1)*perLimit]
		listed := map[string]listedKey{}
		rows, err := w.pool.Query(t.Context(), "SELECT key, remaining, most AS capacity, CASE WHEN isfinite(retry_at) THEN retry_at END AS retry_at, retry_at IS NOT NULL AS denied, paused_until FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, NULL, $2)", limit.Name(), w.clock.At)
		w.must(err)
		list, err := pgx.CollectRows(rows, pgx.RowToStructByName[listedKey])
		w.must(err)
		for _, k := range list {
			listed[k.Key] = k
		}
		tool := map[string]worldShown{}
		if w.hasClock {
			var all struct{ Keys []worldShown }
			w.tool(w.present(), &all, "keys", "--json", "--all", "--limit=0", "--", limit.Name())
			for n, k := range all.Keys {
				if tool[k.Key] = k; n > 0 && k.Remaining != nil && all.Keys[n-1].Remaining != nil && *k.Remaining < *all.Keys[n-1].Remaining {
					w.failf("txlimit keys of %v lists %v after %v", limit, asText(k), asText(all.Keys[n-1]))
				}
			}
			if len(tool) != len(listed) {
				w.failf("txlimit keys of %v lists %d keys, and ratelimit.keys %d", limit, len(tool), len(listed))
			}
		}
		for n, k := range of {
			w.sourced(asks, k, listed, tool, said, n%(perLimit/harness.Sized(10, 1)) == 0)
		}
	}
	for _, what := range []string{"listed", "blocked", "unlimited", "owing", "slots", "unknown", "denied", "no rate", "paused", "paused and blocked", "slots denied"} {
		if said[what] == 0 {
			t.Errorf("no key is %s: %v", what, said)
		}
	}
	t.Logf("%v", said)
}

// listedKey is what ratelimit.keys says. retry_at is nil if it is infinite, too.
type listedKey struct {
	Key       string
	Remaining *float64
	Capacity  *float64
	RetryAt   *time.Time
	Denied    bool

	PausedUntil *time.Time
}

// sourcedLimit is a limit of one kind or another.
func sourcedLimit(r *rand.Rand, name string, i int) ratelimit.Limit {
	rate, capacity := harness.OneOf(r, 1, 10, 60, 1.0/3, 7.0/3), harness.OneOf(r, 1, 5, 10, 100, 22.0/3)
	options := []ratelimit.Option{ratelimit.Capacity(capacity)}
	if r.IntN(3) == 0 {
		options = append(options, ratelimit.Shards(2+r.IntN(3)))
	}
	if r.IntN(2) == 0 {
		options = append(options, ratelimit.MaxReserved(harness.OneOf(r, 0, 5.0, 50)))
	}
	period := harness.OneOf(r, time.Second, time.Minute, 7*time.Hour, 40*24*time.Hour)
	switch i % 10 {
	case 0, 1:
		return ratelimit.TokenBucket(name, rate, period, options...)
	case 2:
		return ratelimit.FixedWindow(name, rate, period, options...)
	case 3:
		return ratelimit.FixedWindow(name, rate, period, append(options, ratelimit.Start(harness.Noon))...)
	case 4, 5:
		return ratelimit.CalendarWindow(name, rate, harness.OneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Year), append(options, ratelimit.Zone(harness.OneOf(r, "UTC", "Europe/Berlin", "America/New_York")))...)
	case 6:
		if i/10%2 == 0 {
			return ratelimit.Unlimited(name)
		}
		return ratelimit.TokenBucket(name, 0, period)
	case 7:
		return ratelimit.Slots(name, r.IntN(6))
	default:
		return ratelimit.TokenBucket(name, 10, time.Minute, ratelimit.Capacity(20), ratelimit.Varies(time.Hour))
	}
}

// sourcedRows writes what the keys have: any balance, at any instant before now or, sometimes, after it.
func sourcedRows(ctx context.Context, w *everything, r *rand.Rand, keys []sourced) error {
	var batch pgx.Batch
	for _, k := range keys {
		c := k.own.Config()
		ago := time.Duration(r.Int64N(int64(harness.OneOf(r, time.Minute, time.Hour, 100*24*time.Hour))))
		ts := w.clock.At.Add(harness.OneOf(r, -ago, -ago, ago/60, ago/6)).Truncate(time.Microsecond)
		switch {
		case r.IntN(6) == 0: // no row
		case c.Kind == "slots":
			used := r.IntN(8)
			batch.Queue("INSERT INTO ratelimit.limits VALUES ($1, $2, 0, 1, $3, $4, NULL, '-infinity')", c.Name, k.key, -float64(used), ts)
			for h := range used {
				if r.IntN(3) > 0 {
					batch.Queue("INSERT INTO ratelimit.holds VALUES ($1, $2, $3, 'held', 'slots', gen_random_uuid(), 1, $4, 0, 1, $5)", c.Name, k.key, fmt.Sprint(h), ts,
						w.clock.At.Add(time.Duration(r.IntN(7200)-1800)*time.Second))
				}
			}
		default:
			capacity := 10.0
			if c.Capacity != nil {
				capacity = *c.Capacity
			}
			left, shards := capacity*harness.OneOf(r, 0, 1.0/3, 1, r.Float64(), -r.Float64(), -3), max(c.Shards, 1)
			for shard := range shards {
				batch.Queue("INSERT INTO ratelimit.limits VALUES ($1, $2, $3, $4, $5, $6)", c.Name, k.key, shard, shards, left/float64(shards), ts)
			}
		}
	}
	return w.pool.SendBatch(ctx, &batch).Close()
}

// sourcedOverrides decides about some keys, and sometimes about every key: what begins to hold when a block, or another one, ends.
func sourcedOverrides(ctx context.Context, w *everything, r *rand.Rand, limit ratelimit.Limit, keys int) error {
	var batch pgx.Batch
	c := limit.Config()
	decide := func(key *string) {
		for range 1 + r.IntN(3) {
			effect, until := harness.OneOf(r, "numbers", "numbers", "block", "unlimited"), (*time.Time)(nil)
			if r.IntN(3) > 0 {
				at := w.clock.At.Add(time.Duration(r.Int64N(int64(harness.OneOf(r, time.Minute, 10*time.Hour, 90*24*time.Hour)))) - 30*time.Second).Truncate(time.Microsecond)
				until = &at
			}
			var rate, capacity *float64
			if effect == "numbers" {
				if capacity = new(harness.OneOf(r, 1, 3, 40, 31.0/3)); c.Kind == "slots" {
					capacity = new(harness.OneOf(r, 0, float64(r.IntN(9))))
				} else if r.IntN(3) > 0 {
					rate = new(harness.OneOf(r, 1, 2, 100, 5.0/3))
				}
			}
			batch.Queue("INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, until, made_at) VALUES ($1, $2, $3, $4, $5, $6, $7)",
				c.Name, key, effect, rate, capacity, until, w.clock.At.Add(-time.Duration(r.IntN(1e6))*time.Second))
		}
	}
	for k := range keys {
		if k == 0 { // of each limit, one key that is surely blocked
			batch.Queue("INSERT INTO ratelimit.overrides (name, key, effect, made_at) VALUES ($1, 'key 0', 'block', $2)", c.Name, w.clock.At)
		} else if r.IntN(3) == 0 {
			decide(new(fmt.Sprintf("key %d", k)))
		}
	}
	if noRate := c.Rate != nil && *c.Rate == 0; !noRate && r.IntN(4) == 0 { // else, no key of the run might be without a rate
		decide(nil)
	}
	return w.pool.SendBatch(ctx, &batch).Close()
}

// sourced compares what is said of a key. shown: also by txlimit show and the page.
func (w *everything) sourced(asks *ratelimit.Limiter, k sourced, listed map[string]listedKey, tool map[string]worldShown, said map[string]int, shown bool) {
	ctx := w.Context()
	balances, err := asks.Balance(ctx, w.pool, k.own.Key(k.key))
	w.must(err)
	b := balances[0]
	in := b.Limit.Config()
	blocked, unlimited, slots := b.Decides == "block", math.IsInf(b.Capacity, 1), in.Kind == "slots"
	what := fmt.Sprintf("%s: %s", k.key, balanceText(b))

	var one *ratelimit.DeniedError // of a call for one token or, where the capacity is less, for all
	asked := false
	if slots {
		tx, err := w.pool.Begin(ctx)
		w.must(err)
		defer tx.Rollback(context.WithoutCancel(ctx))
		_, err = asks.Hold(ctx, tx, "asked", time.Minute, k.own.Key(k.key))
		w.must(tx.Rollback(ctx))
		if asked = true; !errors.As(err, &one) {
			w.must(err)
		}
		if one != nil {
			said["slots denied"]++
			if !one.RetryAt.IsZero() && one.Reason == ratelimit.ReasonPlan {
				said["no slots for a while"]++
			}
		}
	} else {
		_, err := asks.Check(ctx, w.pool, k.own.Key(k.key).Count(1))
		if asked = err == nil || errors.As(err, &one); !asked && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
			w.must(err)
		}
	}
	left := b.Remaining
	if blocked {
		left = 0
		said["blocked"]++
	}
	for name, is := range map[string]bool{"unlimited": unlimited, "owing": left < 0, "slots": slots, "denied": one != nil, "no rate": grantsNothing(b)} {
		if is {
			said[name]++
		}
	}
	// A Hold that finds no free slot says when one is by the number in force alone, though that may end: docs/holds.md.
	alone := slots && one != nil && one.Reason == ratelimit.ReasonQuota && !b.Until.IsZero()
	agrees := func(source string, remaining *float64, retryAt *time.Time, denied bool) {
		text := fmt.Sprintf("%s: %s says %s, denied %t until %v", what, source, asText(remaining), denied, retryAt)
		switch {
		case remaining == nil && !(unlimited && !blocked):
			w.failf("%s", text)
		case remaining != nil && *remaining != left && !harness.Near(*remaining, left):
			w.failf("%s", text)
		case !asked:
		case k.varies && one != nil && !one.RetryAt.IsZero() && denied && retryAt == nil: // not known: what follows an override is the program's
			said["denied until nobody knows"]++
		case denied != (one != nil):
			w.failf("%s, and a call for one token: %v", text, one)
		case alone:
		case one != nil && (retryAt == nil) != one.RetryAt.IsZero(), one != nil && retryAt != nil && !retryAt.Equal(one.RetryAt):
			w.failf("%s, and a call for one token is denied until %v", text, one.RetryAt)
		}
	}
	row, found := listed[k.key]
	paused := func(source string, until *time.Time) {
		if (until == nil) != b.PausedUntil.IsZero() || until != nil && !until.Equal(b.PausedUntil) {
			w.failf("%s: %s says that it is paused until %v, and Balance until %v", what, source, until, b.PausedUntil)
		}
	}
	if found {
		paused("ratelimit.keys", row.PausedUntil)
	}
	for name, is := range map[string]bool{"paused": !b.PausedUntil.IsZero(), "paused and blocked": blocked && !b.PausedUntil.IsZero()} {
		if is {
			said[name]++
		}
	}
	if said["listed"]++; found && row.Remaining == nil {
		said["unknown"]++
		if !k.varies {
			w.failf("%s, and ratelimit.keys does not know", what)
		}
	} else if found && !(k.varies && b.Decides == "definition") {
		agrees("ratelimit.keys", row.Remaining, row.RetryAt, row.Denied)
		if !k.varies && ((row.Capacity == nil) != unlimited || row.Capacity != nil && *row.Capacity != b.Capacity) {
			w.failf("%s, and ratelimit.keys says a capacity of %s", what, asText(row.Capacity))
		}
	} else if !found && (blocked || unlimited || b.Remaining != b.Capacity) && b.Decides != "definition" && w.ofKeyAlone(k) {
		w.failf("%s, and ratelimit.keys does not list it", what)
	}
	if !w.hasClock {
		return
	}
	if s, ok := tool[k.key]; ok != found {
		w.failf("%s: ratelimit.keys lists it: %t, and txlimit keys: %t", what, found, ok)
	} else if found && row.Remaining == nil != (s.Unknown != nil) || s.DeniedNow != nil && *s.DeniedNow != row.Denied || s.Unknown == nil && found && !sameNumber(s.Remaining, row.Remaining) ||
		(s.RetryAt == nil) != (row.RetryAt == nil) || s.RetryAt != nil && !s.RetryAt.Equal(*row.RetryAt) {
		w.failf("%s: ratelimit.keys says %s, and txlimit keys %s", what, asText(row), asText(s))
	} else if found {
		paused("txlimit keys", s.PausedUntil)
		if s.NotBefore != nil && (!k.varies || s.RetryAt != nil || one == nil || !one.RetryAt.IsZero() && one.RetryAt.Before(*s.NotBefore)) {
			w.failf("%s: txlimit keys says %s, and a call for one token: %v", what, asText(s), one)
		}
	}
	if shown {
		w.sourcedShown(k, b, left, one, asked, alone, what)
	}
}

// ofKeyAlone reports whether an override of the key itself decides.
func (w *everything) ofKeyAlone(k sourced) (own bool) {
	w.must(w.pool.QueryRow(w.Context(), "SELECT EXISTS (SELECT 1 FROM ratelimit._in_force($1, ARRAY[$2], $3) AS o WHERE o.key IS NOT NULL AND o.effect <> 'numbers')", k.limit.Name(), k.key, w.clock.At).Scan(&own))
	return own
}

// grantsNothing reports whether the plan has no tokens.
func grantsNothing(b ratelimit.Balance) bool { return b.Limit.Config().Rate != nil && noRate(b) }

// sameNumber compares numbers as JSON: there, infinite is nil.
func sameNumber(a, b *float64) bool {
	if b != nil && math.IsInf(*b, 1) {
		b = nil
	}
	return (a == nil) == (b == nil) && (a == nil || harness.Near(*a, *b))
}

// sourcedShown compares what txlimit show and the page say. Beside a block, both say what is there.
func (w *everything) sourcedShown(k sourced, b ratelimit.Balance, left float64, one *ratelimit.DeniedError, asked, alone bool, what string) {
	c, name := k.own.Config(), k.limit.Name()
	args, fields := []string{"show", "--json"}, url.Values{"name": {name}, "key": {k.key}}
	if k.varies {
		for _, n := range []struct {
			name string
			f    float64
		}{{"rate", *c.Rate}, {"capacity", *c.Capacity}} {
			text := strconv.FormatFloat(n.f, 'g', -1, 64)
			args = append(args, "--"+n.name+"="+text)
			fields.Set(n.name, text)
		}
	}
	var s worldShown
	w.tool(w.present(), &s, append(args, "--", name, k.key)...)
	text := fmt.Sprintf("%s: txlimit %q says %s", what, args, asText(s))
	blocked, unlimited := b.Decides == "block", math.IsInf(b.Capacity, 1)
	switch {
	case s.Unknown != nil, s.DeniedNow == nil, (s.PausedUntil == nil) != b.PausedUntil.IsZero(), s.PausedUntil != nil && !s.PausedUntil.Equal(b.PausedUntil):
		w.failf("%s", text)
	case asked && *s.DeniedNow != (one != nil), asked && one != nil && s.DeniedReason != one.Reason:
		w.failf("%s, and a call for one token: %v", text, one)
	case asked && one != nil && !alone && ((s.RetryAt == nil) != one.RetryAt.IsZero() || s.RetryAt != nil && !s.RetryAt.Equal(one.RetryAt)):
		w.failf("%s, and a call for one token is denied until %v", text, one.RetryAt)
	case !unlimited && !grantsNothing(b) && (s.Remaining == nil || !blocked && !harness.Near(*s.Remaining, left) || blocked && !harness.Near(*s.Remaining, b.Capacity-b.Used)):
		w.failf("%s", text)
	case c.Kind == "token bucket" && !unlimited && !grantsNothing(b) && b.Limit.Config().Kind == "token bucket" && s.FullAt != nil && !s.FullAt.Equal(b.ResetAt):
		w.failf("%s", text)
	}
	match := shownBalance.FindStringSubmatch(w.page("/key", fields))
	if match == nil {
		w.failf("%s, and the page has no balance", what)
	}
	page := shownText(match[1])
	text = fmt.Sprintf("%s: its page says %q", what, page)
	begins := func(with string) bool { return strings.HasPrefix(page, "Balance "+with) }
	switch {
	case blocked:
		if !begins("Blocked") {
			w.failf("%s", text)
		}
	case c.Kind == "slots":
		if free, _, _ := strings.Cut(strings.TrimPrefix(page, "Balance "), " "); !begins("Unlimited") && !w.isShown(free, max(left, 0), 0) || begins("Unlimited") != unlimited {
			w.failf("%s", text)
		}
	case unlimited, grantsNothing(b):
		if begins("Unlimited") != unlimited || begins("Denied") != grantsNothing(b) {
			w.failf("%s", text)
		}
	default:
		found := shownLeft.FindStringSubmatch(page)
		if found == nil || !w.isShown(found[1], left, 1e-9) || !w.isShown(found[2], b.Capacity, 0) || asked && strings.Contains(page, "Denied") != (one != nil) ||
			strings.Contains(page, "Paused") == b.PausedUntil.IsZero() {
			w.failf("%s", text)
		}
	}
}

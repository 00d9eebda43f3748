package world_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/internal/keystate"
	"github.com/txlimit/txlimit/ratelimit"
)

// known is what the sources say of a key, without what they do not know.
type known struct {
	Remaining, Used             *float64
	OwedUntil, FullAt, RetryAt  *time.Time
	NotBefore, KnownUntil       *time.Time
	DeniedNow                   *bool
	Key                         string
	DeniedReason, Effect, Limit string
}

// newKnown makes a world in which a program has published limits, with the program's own Limiter.
func newKnown(t *testing.T, limits ...ratelimit.Limit) (*everything, *ratelimit.Limiter) {
	t.Helper()
	w := &everything{TB: t, clock: &harness.Clock{At: time.Date(2031, 3, 17, 9, 30, 12, 0, time.UTC)}}
	w.openWorld()
	w.must(new(ratelimit.Limiter).Publish(t.Context(), w.pool, "app", limits...))
	return w, follow.By(&ratelimit.Limiter{Clock: w.clock.Now}, follow.Settings{DB: w.pool, OnError: func(err error) { t.Error(err) }})
}

// prints is what a command prints without --json.
func (w *everything) prints(args ...string) string {
	binary, err := harness.BuiltTool()
	w.must(err)
	cmd := exec.CommandContext(w.Context(), binary, args...)
	cmd.Env = []string{"DATABASE_URL=" + w.present(), "HOME=" + w.home}
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState.ExitCode() != 3 {
		w.failf("txlimit %q: %v: %s", args, err, out)
	}
	return string(out)
}

// shownOf is the text of the balance on the page of a key.
func (w *everything) shownOf(name, key string, fields url.Values) string {
	match := shownBalance.FindStringSubmatch(w.page("/key", mergedValues(url.Values{"name": {name}, "key": {key}}, fields)))
	if match == nil {
		w.failf("the page of %s %s has no balance", name, key)
	}
	return shownText(match[1])
}

func mergedValues(all ...url.Values) url.Values {
	merged := url.Values{}
	for _, values := range all {
		maps.Copy(merged, values)
	}
	return merged
}

// wholeSays reads the answer of ratelimit.keys, of txlimit keys, and of show for a key.
func (w *everything) wholeSays(name, key string, flags ...string) (inSQL, listed, shown known) {
	rows, err := w.pool.Query(w.Context(), "SELECT key, remaining, CASE WHEN isfinite(retry_at) THEN retry_at END AS retry_at, retry_at IS NOT NULL AS denied_now FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, NULL, $2) WHERE key = $3", name, w.clock.At, key)
	w.must(err)
	inSQL, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByNameLax[known])
	w.must(err)
	if !w.hasClock {
		return inSQL, inSQL, inSQL
	}
	var list struct{ Keys []known }
	w.tool(w.present(), &list, append(append([]string{"keys", "--json", "--all"}, flags...), "--", name)...)
	for _, k := range list.Keys {
		if k.Key == key {
			listed = k
		}
	}
	w.tool(w.present(), &shown, append(append([]string{"show", "--json"}, flags...), "--", name, key)...)
	return inSQL, listed, shown
}

// TestOverridesThatEndBeforeTheProgramsNumbers: of a key whose numbers are the program's, an override tells the numbers until its end. What
// would be at its end, or later, is not known, and no source says an instant.
func TestOverridesThatEndBeforeTheProgramsNumbers(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	defer failsWorld(t)
	for _, shards := range harness.SomeOf(t, 1, 1, 2) {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			defer failsWorld(t)
			limit := ratelimit.TokenBucket("api", 10, time.Minute, ratelimit.Capacity(20), ratelimit.Varies(time.Hour), ratelimit.Shards(shards))
			w, asks := newKnown(t, limit)
			own := limit.With(ratelimit.Rate(5), ratelimit.Capacity(50))
			at := w.clock.At
			end := at.Add(time.Minute)
			_, err := w.pool.Exec(t.Context(), "INSERT INTO ratelimit.overrides (name, key, effect, rate, capacity, until, made_at) VALUES ('api', NULL, 'numbers', 60, 60, $1, $2)", end, at.Add(-time.Second))
			w.must(err)
			in := func(seconds float64) *time.Time { return new(at.Add(time.Duration(seconds * float64(time.Second)))) }
			for _, k := range []struct {
				value         float64
				owed, full    *time.Time
				retry, atBest *time.Time // atBest: retry is not known
			}{
				{-440, nil, nil, nil, &end}, // a token more each second
				{-60, nil, nil, nil, &end},
				{-59, in(59), nil, nil, &end}, // at its end, there is one
				{-58, in(58), nil, in(59), nil},
				{-30, in(30), nil, in(31), nil},
				{0, nil, nil, in(1), nil}, // at its end, it is full
				{1, nil, in(59), nil, nil},
				{59, nil, in(1), nil, nil},
				{60, nil, nil, nil, nil},
			} {
				key := fmt.Sprint(k.value)
				for shard := range shards {
					_, err := w.pool.Exec(t.Context(), "INSERT INTO ratelimit.limits VALUES ('api', $1, $2, $3, $4, $5)", key, shard, shards, k.value/float64(shards), at)
					w.must(err)
				}
				inSQL, listed, shown := w.wholeSays("api", key)
				for source, said := range map[string]known{"ratelimit.keys": inSQL, "txlimit keys": listed, "txlimit show": shown} {
					if denied := k.value < 1; *said.DeniedNow != denied || !harness.Near(*said.Remaining, k.value) || !sameInstant(said.RetryAt, k.retry) {
						t.Errorf("%s: %s says %s, want a retry at %v", key, source, asText(said), k.retry)
					}
					if w.hasClock && source != "ratelimit.keys" && !sameInstant(said.NotBefore, k.atBest) {
						t.Errorf("%s: %s says %s, want it not before %v", key, source, asText(said), k.atBest)
					}
				}
				// A program knows.
				w.must(follow.Load(t.Context(), asks))
				_, err := asks.Check(t.Context(), w.pool, own.Key(key))
				denied, _ := errors.AsType[*ratelimit.DeniedError](err)
				if (denied != nil) != (k.value < 1) || denied != nil && (k.retry != nil && !denied.RetryAt.Equal(*k.retry) || k.atBest != nil && denied.RetryAt.Before(*k.atBest)) {
					t.Errorf("%s: Check says %v, want a retry at %v or from %v on", key, err, k.retry, k.atBest)
				}
				w.byHandOfUnknown(t, key, k.value, shards, k.retry, end)
				if !w.hasClock {
					continue
				}
				if !sameInstant(shown.OwedUntil, k.owed) || !sameInstant(shown.FullAt, k.full) || !sameInstant(shown.KnownUntil, &end) {
					t.Errorf("%s: txlimit show says %s, want owed until %v, full at %v", key, asText(shown), k.owed, k.full)
				}
				text, page := w.prints("show", "--", "api", key), w.shownOf("api", key, nil)
				ends := fmt.Sprintf("at least until %s (in 1m00s)", end.Format("2006-01-02 15:04:05Z"))
				unknown := k.atBest != nil || k.value < 60 && k.full == nil
				for pattern, want := range map[string]bool{
					`(?m)^later +not known: an override ends then, and the numbers of this key are the program's. Give them: --rate and --capacity`: unknown,
					`(?m)^full +not before ` + end.Format("2006-01-02 15:04:05Z"):                                                                   k.value < 60 && k.full == nil,
					`(?m)^owes +\d+ tokens, ` + regexp.QuoteMeta(ends):                                                                              k.value <= -60,
					`(?m)^denied +yes, ` + regexp.QuoteMeta(ends):                                                                                   k.atBest != nil,
				} {
					if regexp.MustCompile(pattern).MatchString(text) != want {
						t.Errorf("%s: %q is there: %t\n%s", key, pattern, !want, text)
					}
				}
				if list := w.prints("keys", "--all", "--", "api"); strings.Contains(regexp.MustCompile(`(?m)^`+key+` .*`).FindString(list), ends) != (k.atBest != nil) {
					t.Errorf("%s: txlimit keys says\n%s", key, list)
				}
				if strings.Contains(page, "for at least 1 min") != (k.atBest != nil) || strings.Contains(page, "An override ends in 1 min, and the numbers that follow are the program's.") != unknown ||
					strings.Contains(page, "for good") || strings.Contains(page, "Full.") != (k.value == 60) || strings.Contains(strings.ToLower(page), "full in") != (k.full != nil) {
					t.Errorf("%s: its page says %q", key, page)
				}
				// With the numbers of the key, all is known.
				var given known
				w.tool(w.present(), &given, "show", "--json", "--rate=5", "--capacity=50", "--", "api", key)
				var until *time.Time
				if denied != nil {
					until = &denied.RetryAt
				}
				if balances, err := asks.Balance(t.Context(), w.pool, own.Key(key)); err != nil || !sameInstant(given.RetryAt, until) || given.NotBefore != nil || given.KnownUntil != nil ||
					given.FullAt != nil && !given.FullAt.Equal(balances[0].ResetAt) || (given.FullAt == nil) != balances[0].ResetAt.Equal(at) {
					t.Errorf("%s: with its numbers, txlimit show says %s, and Balance %+v, %v", key, asText(given), balances, err)
				}
			}
		})
	}
}

// byHandOfUnknown wants SQL by hand to say of such a key what it knows: an instant that is not too late, and no reset.
func (w *everything) byHandOfUnknown(t *testing.T, key string, value float64, shards int, retry *time.Time, end time.Time) {
	t.Helper()
	w.must(rolledBack(t.Context(), w.pool, func(tx pgx.Tx) {
		var granted bool
		var retryAt, resetAt *time.Time
		w.must(tx.QueryRow(t.Context(), "SELECT granted, retry_at, reset_at FROM ratelimit._by_hand('try', 'api', $1, now => $2)", key, w.clock.At).Scan(&granted, &retryAt, &resetAt))
		if retry == nil && !granted {
			retry = &end
		}
		if granted != (value >= 1) || !sameInstant(retryAt, retry) {
			t.Errorf("%s: ratelimit.try says %t, retry at %v, want %v", key, granted, retryAt, retry)
		}
		// A token was taken of those that have one; of shards, one row stands for all.
		if known := value >= 2; known != (resetAt != nil) || known && shards == 1 && !resetAt.Equal(w.clock.At.Add(time.Duration(61-value)*time.Second)) {
			t.Errorf("%s: ratelimit.try says that it resets at %v", key, resetAt)
		}
	}))
	w.must(rolledBack(t.Context(), w.pool, func(tx pgx.Tx) { // what owes a token more is repaid before the end, or nobody knows when
		var runAt *time.Time
		err := tx.QueryRow(t.Context(), "SELECT retry_at FROM ratelimit._by_hand('reserve', 'api', $1, now => $2)", key, w.clock.At).Scan(&runAt)
		if known := value > -59; known && (err != nil || !runAt.Equal(w.clock.At.Add(time.Duration(max(1-value, 0))*time.Second))) || !known && (harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "are the program's")) {
			t.Errorf("%s: ratelimit.reserve says %v, %v", key, runAt, err)
		}
	}))
}

// TestConsoleCurvesReachToWhereTheKeyIsFull: the curve of a calendar goes on after as many windows as a call lists.
func TestConsoleCurvesReachToWhereTheKeyIsFull(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	at := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	for _, shards := range []int{1, 2} {
		limit := ratelimit.CalendarWindow(fmt.Sprint("daily", shards), 1, ratelimit.Day, ratelimit.Capacity(1000), ratelimit.Shards(shards))
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, limit.Name(), limit))
		for shard := range shards {
			_, err := pool.Exec(t.Context(), "INSERT INTO ratelimit.limits VALUES ($1, 'ann', $2, $3, $4, $5)", limit.Name(), shard, shards, 400/float64(shards), at)
			harness.Succeeds(t, err)
		}
		states, err := keystate.Of(t.Context(), pool, limit.Name(), []string{"ann"}, at, nil)
		harness.Succeeds(t, err)
		full := time.Date(2028, 7, 18, 0, 0, 0, 0, time.UTC) // the 600th midnight
		if s := states[0]; s.FullAt == nil || !s.FullAt.Equal(full) {
			t.Fatalf("%s: full at %v, want %v", limit, s.FullAt, full)
		}
		curve, err := keystate.Curve(t.Context(), pool, limit.Name(), "ann", at, nil, at, full.AddDate(0, 0, 50))
		harness.Succeeds(t, err)
		for _, p := range curve {
			want := min(400+math.Floor(p.At.Sub(at.Truncate(24*time.Hour)).Hours()/24), 1000)
			if !harness.Near(p.Remaining, want) {
				t.Errorf("%s: %v tokens at %v, want %v", limit, p.Remaining, p.At, want)
			}
		}
		if len(curve) != 121 {
			t.Errorf("%s: %d points", limit, len(curve))
		}
	}
}

// rolledBack runs fn in a transaction that is rolled back.
func rolledBack(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx)) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		fn(tx)
		return harness.ErrRollBack
	})
	if errors.Is(err, harness.ErrRollBack) {
		return nil
	}
	return err
}

func sameInstant(a, b *time.Time) bool { return (a == nil) == (b == nil) && (a == nil || a.Equal(*b)) }

// failsWorld makes a failure of a world one of the test.
func failsWorld(t *testing.T) {
	if p := recover(); p != nil {
		if f, ok := p.(worldFailure); ok {
			t.Fatal(f.text)
		}
		panic(p)
	}
}

// TestOverridesToNoSlots: an override to 0 slots is a policy in all sources, as it is for Hold: denied until it ends, whatever is in use, and listed
// though the key may have no row.
func TestOverridesToNoSlots(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	defer failsWorld(t)
	fixed, varying := ratelimit.Slots("fixed", 3), ratelimit.Slots("varying", 3, ratelimit.Varies(0))
	w, asks := newKnown(t, fixed, varying)
	at := w.clock.At
	hour, twoHours := at.Add(time.Hour), at.Add(2*time.Hour)
	for key, c := range map[string]struct {
		limit     ratelimit.Limit
		used      int
		none      *time.Time // until when the override to 0 lasts
		block     *time.Time // beside it; forever: none
		retry     *time.Time
		notBefore *time.Time
		text      string // of show
		page      string
	}{
		"a while":        {fixed, 0, &hour, nil, &hour, nil, "by policy, until 2031-03-17 10:30:12Z (in 1h00m): there are no slots", "Denied: there are no slots, for 1 h."},
		"in use":         {fixed, 2, &hour, nil, &hour, nil, "by policy, until 2031-03-17 10:30:12Z (in 1h00m): there are no slots", "Denied: there are no slots, for 1 h."},
		"for good":       {fixed, 0, nil, nil, nil, nil, "by policy: there are no slots", "Denied: there are no slots."},
		"block":          {fixed, 1, nil, &hour, nil, nil, "by policy: there are no slots", "Blocked"},
		"short block":    {fixed, 0, &twoHours, &hour, &twoHours, nil, "by policy, until 2031-03-17 11:30:12Z (in 2h00m): there are no slots", "Blocked"},
		"the program's":  {varying, 0, &hour, nil, nil, &hour, "by policy, at least until 2031-03-17 10:30:12Z (in 1h00m): there are no slots", "Denied: there are no slots, for at least 1 h. An override ends in 1 h, and the numbers that follow are the program's."},
		"the program's2": {varying, 4, &hour, nil, nil, &hour, "by policy, at least until 2031-03-17 10:30:12Z (in 1h00m): there are no slots", "Denied: there are no slots, for at least 1 h. An override ends in 1 h, and the numbers that follow are the program's."},
	} {
		name := c.limit.Name()
		_, err := w.pool.Exec(t.Context(), "INSERT INTO ratelimit.overrides (name, key, effect, capacity, until, made_at) VALUES ($1, $2, 'numbers', 0, $3, $4)", name, key, c.none, at.Add(-time.Minute))
		w.must(err)
		if c.block != nil {
			_, err := w.pool.Exec(t.Context(), "INSERT INTO ratelimit.overrides (name, key, effect, until, made_at) VALUES ($1, $2, 'block', $3, $4)", name, key, c.block, at.Add(-time.Second))
			w.must(err)
		}
		if c.used > 0 {
			_, err := w.pool.Exec(t.Context(), "INSERT INTO ratelimit.limits VALUES ($1, $2, 0, 1, $3, $4)", name, key, -c.used, at)
			w.must(err)
		}
		w.must(follow.Load(t.Context(), asks))
		own, want := c.limit, c.retry
		if c.limit == varying {
			own, want = varying.With(ratelimit.Capacity(5)), &hour
		}
		w.must(rolledBack(t.Context(), w.pool, func(tx pgx.Tx) {
			_, err := asks.Hold(t.Context(), tx, "job", time.Minute, own.Key(key))
			if denied, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || denied.Reason != ratelimit.ReasonPlan || denied.RetryAt.IsZero() != (want == nil) || want != nil && !denied.RetryAt.Equal(*want) {
				t.Errorf("%s: Hold says %v, want a retry at %v", key, err, want)
			}
		}))
		inSQL, listed, shown := w.wholeSays(name, key)
		for source, said := range map[string]known{"ratelimit.keys": inSQL, "txlimit keys": listed, "txlimit show": shown} {
			left := float64(-c.used)
			if c.block != nil && source != "txlimit show" {
				left = 0 // of a blocked key
			}
			if said.Remaining == nil || *said.Remaining != left || !*said.DeniedNow || !sameInstant(said.RetryAt, c.retry) || w.hasClock && source != "ratelimit.keys" && !sameInstant(said.NotBefore, c.notBefore) {
				t.Errorf("%s: %s says %s, want %v left, a retry at %v, not before %v", key, source, asText(said), left, c.retry, c.notBefore)
			}
		}
		if !w.hasClock {
			continue
		}
		if shown.DeniedReason != string(ratelimit.ReasonPlan) {
			t.Errorf("%s: txlimit show says %s", key, asText(shown))
		}
		if text := w.prints("show", "--", name, key); !strings.Contains(text, "denied      yes, "+c.text+"\n") {
			t.Errorf("%s: txlimit show says\n%s\nwant %q", key, text, c.text)
		}
		if page := w.shownOf(name, key, nil); !strings.Contains(page, c.page) || strings.Contains(page, "released") {
			t.Errorf("%s: its page says %q, want %q", key, page, c.page)
		}
	}
	if !w.hasClock {
		return
	}
	list := w.prints("keys", "--", "fixed") // without --all
	for key, want := range map[string]string{
		"a while": `0 +0  2031-03-17 10:30:12Z \(in 1h00m\) +#\d`, "in use": `0 +2  2031-03-17 10:30:12Z \(in 1h00m\) +#\d`, "for good": `0 +0  for good +#\d`, "block": `0 +1  for good +#\d+ block`,
	} {
		if !regexp.MustCompile(`(?m)^"?` + key + `"? +` + want).MatchString(list) {
			t.Errorf("%s: want %q in\n%s", key, want, list)
		}
	}
}

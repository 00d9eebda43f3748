package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// askSQL decides as ratelimit.try, ratelimit.reserve or ratelimit.take does. A denial by an error has no instant.
func askSQL(ctx context.Context, db ratelimit.DB, a harness.AskedByHand, now time.Time) (r harness.ByHand, err error) {
	c := a.Limit.Config()
	var key *string
	if a.Key != "" {
		key = &a.Key
	}
	args := []any{c.Name, key, c.Rate, harness.Period(c), c.Kind, c.Capacity, c.Start, c.Shards, a.Count, key == nil, now}
	columns, verb, argument := "granted, remaining, extract(epoch FROM retry_after), retry_at, reset_at, at, CASE WHEN granted THEN $9 ELSE 0 END", "try", "count => $9"
	switch a.Verb {
	case "take":
		columns, verb, argument = "true, remaining, NULL, NULL, reset_at, at, taken", "take", "most => $9"
	case "reserve":
		columns, verb, argument = "true, remaining, extract(epoch FROM retry_after), retry_at, reset_at, at, $9", "reserve", "count => $9, max_reserved => $12"
		args = append(args, c.MaxReserved)
	}
	var retryAfter *float64
	var retryAt *time.Time
	err = db.QueryRow(ctx, `SELECT `+columns+` FROM ratelimit._by_hand('`+verb+`', $1, $2, rate => $3, period => $4, kind => $5, capacity => $6, start => $7, shards => $8,
			global => $10, now => $11, `+argument+`)`, args...).Scan(&r.Ok, &r.Remaining, &retryAfter, &retryAt, &r.ResetAt, &r.At, &r.Taken)
	if retryAfter != nil {
		r.RetryAfter, r.RetryAt = *retryAfter, *retryAt
	}
	return r, err
}

// askSavepoint asks in a savepoint. If a denial is an error, it returns what the error says, which has as many digits as the session sets.
func askSavepoint(ctx context.Context, tx pgx.Tx, a harness.AskedByHand, now time.Time) (r harness.ByHand, err error) {
	savepoint, err := tx.Begin(ctx)
	if err != nil {
		return r, err
	}
	if r, err = askSQL(ctx, savepoint, a, now); err == nil {
		return r, savepoint.Commit(ctx)
	}
	if rolledBack := savepoint.Rollback(ctx); rolledBack != nil {
		return r, rolledBack
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != "PT429" {
		return r, err
	}
	return r, tx.QueryRow(ctx, `SELECT (d->>'remaining')::float8, (d->>'retry_after')::float8, (d->>'retry_at')::timestamptz, (d->>'reset_at')::timestamptz FROM (SELECT $1::json) AS t (d)`,
		pgErr.Detail).Scan(&r.Remaining, &r.RetryAfter, &r.RetryAt, &r.ResetAt)
}

// TestByHandAnswersLikeTheLibrary makes random requests on random rows, first in SQL and then in Go on the same rows. The
// answers and the rows must be equal, to the bit and the microsecond. A denied request must be granted at retry_at, and
// still be denied a microsecond earlier, or the tolerance of a token bucket.
func TestByHandAnswersLikeTheLibrary(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for part, settings := range []string{
		"",
		"SET LOCAL TimeZone = 'America/New_York'; SET LOCAL DateStyle = 'SQL, DMY'; SET LOCAL IntervalStyle = 'iso_8601'",
		"SET LOCAL TimeZone = 'Asia/Kathmandu'; SET LOCAL extra_float_digits = -15; SET LOCAL standard_conforming_strings = off; SET LOCAL bytea_output = 'escape'; SET LOCAL quote_all_identifiers = on",
		"SET LOCAL TimeZone = 'Europe/Dublin'; SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL search_path = pg_catalog, pg_temp, ratelimit",
	} {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			if settings != "" {
				harness.NeedsMode(t, pgx.QueryExecModeCacheStatement) // as text, the function's answers would depend on them
			}
			r := harness.NewRand(t)
			tx, err := harness.NewPool(t, 1).Begin(t.Context())
			harness.Succeeds(t, err)
			defer tx.Rollback(t.Context())
			harness.Succeeds(t, harness.Second(tx.Exec(t.Context(), settings)))
			limiter, clock := harness.NewLimiter()
			w := harness.World{T: t, DB: tx, Limiter: limiter, Clock: clock}
			rounded := strings.Contains(settings, "extra_float_digits")
			denials, debts, windows := 0, 0, 0
			enough := func() bool {
				return denials >= harness.Sized(100, 25) && debts >= harness.Sized(30, 7) && windows >= harness.Sized(200, 50)
			}
			for n := 0; n < harness.Sized(800, 200) || n < 2000 && !enough(); n++ {
				shards := harness.OneOf(r, 1, 1, 1, 1, 1+r.IntN(5), 11)
				a := harness.AskedByHand{Ask: harness.Ask{Limit: harness.RandomLimit(r, "limit", shards), Key: fmt.Sprint(n)}, Verb: harness.OneOf(r, "consume", "consume", "reserve", "reserve", "take")}
				if n%50 == 0 {
					a.Key = "" // global
				}
				a.Count = harness.RandomTokens(r, a.Limit.Capacity())
				if a.Verb == "take" {
					a.Count = float64(1 + r.IntN(1+int(min(2*a.Limit.Capacity(), 1e9))))
				}
				now := harness.Noon.Add(time.Duration(r.Int64N(4e17)-2e17) / 1000 * 1000)
				value := a.Limit.Capacity() / float64(shards) * harness.OneOf(r, 0, 0, r.Float64(), 1, -1, -10*r.Float64())
				ts := now.Add(time.Duration(harness.OneOf(r, 0, -1, -r.Int64N(1e6), -r.Int64N(1e12), r.Int64N(1e9))) * time.Microsecond)
				rows := harness.OneOf(r, shards, shards, shards, 0, 1+r.IntN(3)) // some limits had another number of shards
				fresh := func() {
					t.Helper()
					w.Must("DELETE FROM ratelimit.limits WHERE name = 'limit' AND key = $1", a.Key)
					for shard := range rows {
						harness.Insert(t, tx, a.Key, shard, rows, value, ts) // equal rows, so the picked shard does not matter
					}
				}
				fresh()
				clock.At = now
				want, err := harness.AskGo(t.Context(), &ratelimit.Limiter{Clock: clock.Now}, tx, a)
				if errors.Is(err, ratelimit.ErrExceedsCapacity) {
					if _, err := askSavepoint(t.Context(), tx, a, now); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "can never be granted") && !strings.Contains(err.Error(), "capacity must be at least 1 to take whole tokens") {
						t.Fatalf("case %d: %+v can never be granted: %v", n, a, err)
					}
					continue
				} else if err != nil {
					t.Fatal(err)
				}
				wantRows := holding(w, a.Key)
				fresh()
				if a.Verb != "consume" && !want.Ok { // a denial is an error: rows of shards that are not any more are not merged
					wantRows = holding(w, a.Key)
				}
				got, err := askSavepoint(t.Context(), tx, a, now)
				if err != nil {
					t.Fatalf("case %d: %+v: %v", n, a, err)
				}
				raised := !got.Ok && a.Verb != "consume"
				if got.Taken != want.Taken || got.Ok != want.Ok || got.Remaining != want.Remaining && !(raised && rounded) ||
					!got.RetryAt.Equal(want.RetryAt) || !got.ResetAt.Equal(want.ResetAt) || !raised && !got.At.Equal(want.At) ||
					math.Abs(got.RetryAfter-want.RetryAfter) > 1e-6 && got.RetryAt.Year() < 2200 {
					t.Fatalf("case %d: %+v on %d rows of %v at %v, at %v:\nSQL %+v\nGo  %+v", n, a, rows, value, ts, now, got, want)
				}
				if gotRows := holding(w, a.Key); !raised && gotRows != wantRows { // an error undoes all, also what joins the rows of shards
					t.Fatalf("case %d: %+v: SQL left\n%s\nGo left\n%s", n, a, gotRows, wantRows)
				}
				if a.Limit.Config().Kind == "fixed window" {
					windows++
				}
				if got.Ok && got.RetryAt.After(now) {
					debts++
				}
				if got.Ok || got.RetryAt.Year() == 9999 || raised && rows != shards { // rows that are joined at another instant round otherwise
					continue
				}
				denials++
				if early := harness.Before(a.Limit, got.RetryAt); early.After(now) {
					if again, err := askSavepoint(t.Context(), tx, a, early); err != nil || again.Ok || !again.RetryAt.Equal(got.RetryAt) {
						t.Fatalf("case %d: %+v denied at %v until %v; and before that %+v, %v", n, a, now, got.RetryAt, again, err)
					}
				}
				if again, err := askSavepoint(t.Context(), tx, a, got.RetryAt); err != nil || !again.Ok {
					t.Fatalf("case %d: %+v denied at %v until %v; and then %+v, %v", n, a, now, got.RetryAt, again, err)
				}
			}
			if !enough() {
				t.Errorf("%d denials, %d debts and %d windows: this tested too little", denials, debts, windows)
			}
		})
	}
}

// holding returns a key's rows in the table.
func holding(w harness.World, key string) string {
	w.Helper()
	var text string
	w.Do(w.DB.QueryRow(w.Context(), `SELECT coalesce(string_agg(
			concat_ws(' ', name, key, shards, float8send(value), timestamptz_send(ts)), e'\n' ORDER BY float8send(value), ts), '')
		FROM ratelimit.limits WHERE name = 'limit' AND key = $1`, key).Scan(&text))
	return text
}

// Without a start, a fixed window's grid is a hash of the key, or of the name if the key is empty. SQL and Go must use the same windows.
func TestByHandWindowsAreThoseOfTheLibrary(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	var names, keys []string
	var periods []time.Duration
	var want []time.Time
	text := func(n int) string {
		var b strings.Builder
		for b.Len() == 0 || r.IntN(n) > 0 {
			b.WriteRune(harness.OneOf(r, 'a', 'z', '|', '\\', '\'', '"', '%', ' ', '\n', 'é', '語', '🙂', rune(1+r.IntN(0xd7ff))))
		}
		return b.String()
	}
	for range 5000 {
		name, key := text(8), text(20)
		if r.IntN(20) == 0 {
			key = ""
		}
		period := harness.OneOf(r, 100*time.Millisecond, time.Second, time.Minute, 24*time.Hour, 365*24*time.Hour, math.MaxInt64/1000*1000,
			time.Duration(1e5+r.Int64N(math.MaxInt64/1000-1e5))*time.Microsecond)
		names, keys, periods = append(names, name), append(keys, key), append(periods, period)
		want = append(want, harness.Numbers(ratelimit.FixedWindow(name, 1, period), key).Start.Time())
	}
	rows, err := pool.Query(t.Context(), `SELECT ratelimit._grid(u.name, u.key, u.period, 'fixed window', NULL)
		FROM unnest($1::text[], $2::text[], $3::interval[]) WITH ORDINALITY AS u (name, key, period, n) ORDER BY n`, names, keys, periods)
	harness.Succeeds(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
	if err != nil || len(got) != len(want) {
		t.Fatalf("%d grids, %v", len(got), err)
	}
	for i := range want {
		if !got[i].Equal(want[i]) {
			t.Errorf("%q, %q per %v: SQL's grid begins at %v, Go's at %v", names[i], keys[i], periods[i], got[i], want[i])
		}
	}
}

func TestByHandInstantsAreExact(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	conn := harness.Acquire(t, harness.NewPool(t, 1))
	harness.Succeeds(t, harness.Second(conn.Exec(t.Context(), "SET TimeZone = 'America/New_York'")))
	micros := []int64{int64(algebra.Min), int64(algebra.Min) + 1, -1, 0, 1, int64(algebra.Max) - 1, int64(algebra.Max)}
	for range 5000 {
		micros = append(micros, int64(algebra.Min)+r.Int64N(int64(algebra.Max-algebra.Min)))
	}
	rows, err := conn.Query(t.Context(), `SELECT ratelimit._instant(m), ratelimit._micros(ratelimit._instant(m)) FROM unnest($1::bigint[]) WITH ORDINALITY AS u (m, n) ORDER BY n`, micros)
	harness.Succeeds(t, err)
	n := 0
	var at time.Time
	var back int64
	if _, err := pgx.ForEachRow(rows, []any{&at, &back}, func() error {
		if want := micros[n]; at.UnixMicro() != want || back != want {
			t.Errorf("%d: %v, and back %d", want, at, back)
		}
		n++
		return nil
	}); err != nil || n != len(micros) {
		t.Fatalf("%d of %d, %v", n, len(micros), err)
	}
}

func TestByHandDefaults(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		want := func(ok bool, remaining float64, sql string) {
			w.Helper()
			var gotOK bool
			var got float64
			if err := w.DB.QueryRow(w.Context(), `SELECT granted, remaining FROM ratelimit._by_hand('try', `+sql).Scan(&gotOK, &got); err != nil || gotOK != ok || !harness.Near(got, remaining) {
				w.Fatalf("%s: %v, %v, %v, want %v, %v", sql, gotOK, got, err, ok, remaining)
			}
		}
		const at = `now => '2026-07-01 12:00:00Z')`
		want(true, 9, `'positional', 'ann', 10, '1 minute', `+at)
		want(true, 5.5, `'positional', 'ann', 10, '1 minute', 3.5, `+at)
		want(false, 5.5, `'positional', 'ann', 10, '1 minute', 6, `+at)
		want(true, 19, `'capacity', 'ann', rate => 10, period => '1 minute', capacity => 20, `+at)
		want(true, 99, `'global', rate => 100, period => '1 hour', global => true, `+at)
		w.Clock.At = harness.Noon
		w.Holds(ratelimit.TokenBucket("global", 100, time.Hour).Global(), 99)
		w.Holds(ratelimit.TokenBucket("positional", 10, time.Minute).Key("ann"), 5.5)
	})
}

// sqlRefused runs a statement in a savepoint and wants it to be refused for its arguments, with this text.
func sqlRefused(w harness.World, sql, text string) {
	w.Helper()
	tx := w.Begin()
	if _, err := tx.Exec(w.Context(), sql); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), text) {
		w.Errorf("%s: %v, want %q", sql, err, text)
	}
	w.Do(tx.Rollback(w.Context()))
}

// Invalid arguments raise an error that says what is wrong. Nothing is written or granted.
func TestByHandRefusesWhatIsWrong(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for arguments, text := range map[string]string{
			`'l', 'ann'`:                                                                             `rate limit 'l': no program has published it`,
			`'l', 'ann', shards => 2`:                                                                `rate limit 'l': rate must be 0 or between 1e-15 and 1e15, not NULL`,
			`'l', 'ann', 10`:                                                                         `without months and years, not NULL`,
			`NULL, 'ann', 10, '1 minute'`:                                                            `rate limit NULL: name must have 1 to 255 bytes, not`,
			`'', 'ann', 10, '1 minute'`:                                                              `name must have 1 to 255 bytes, not`,
			`repeat('x', 256), 'ann', 10, '1 minute'`:                                                `name must have 1 to 255 bytes, not 256`,
			`repeat('é', 128), 'ann', 10, '1 minute'`:                                                `name must have 1 to 255 bytes, not 256`,
			`'l', NULL, 10, '1 minute'`:                                                              `key must have 1 to 1024 bytes, not`,
			`'l', '', 10, '1 minute'`:                                                                `key must have 1 to 1024 bytes, not`,
			`'l', rate => 10, period => '1 minute'`:                                                  `key must have 1 to 1024 bytes, not`,
			`'l', NULL, 10, '1 minute', global => NULL`:                                              `key must have 1 to 1024 bytes, not`,
			`'l', 'ann', 10, '1 minute', global => true`:                                             `key must be NULL with global => true`,
			`'l', '', 10, '1 minute', global => true`:                                                `key must be NULL with global => true`,
			`'l', repeat('x', 1025), 10, '1 minute'`:                                                 `key must have 1 to 1024 bytes, not 1025`,
			`'l', 'ann', 0, '1 minute', capacity => 1`:                                               `capacity and max_reserved must be NULL or 0 with a rate of 0, not`,
			`'l', 'ann', 0, '0'`:                                                                     `without months and years, not 00:00:00`,
			`'l', 'ann', -1, '1 minute'`:                                                             `between 1e-15 and 1e15, not -1`,
			`'l', 'ann', 'NaN', '1 minute'`:                                                          `between 1e-15 and 1e15, not NaN`,
			`'l', 'ann', 'Infinity', '1 minute'`:                                                     `between 1e-15 and 1e15, not Infinity`,
			`'l', 'ann', '-Infinity', '1 minute'`:                                                    `between 1e-15 and 1e15, not -Infinity`,
			`'l', 'ann', 1e16, '1 minute'`:                                                           `between 1e-15 and 1e15, not 1e+16`,
			`'l', 'ann', 10, '0'`:                                                                    `without months and years, not 00:00:00`,
			`'l', 'ann', 10, '-1 minute'`:                                                            `period must be between 100 milliseconds and 106751 days`,
			`'l', 'ann', 10, '99.999 ms'`:                                                            `period must be between 100 milliseconds and 106751 days, written without months and years, not 00:00:00.099999 (for 100 a second one by one: rate 100, period 1 second, capacity 1)`,
			`'l', 'ann', 10, '1 month'`:                                                              `without months and years`,
			`'l', 'ann', 10, '1 month -29 days'`:                                                     `without months and years`,
			`'l', 'ann', 10, '-1 month 40 days'`:                                                     `without months and years`,
			`'l', 'ann', 10, '1 year'`:                                                               `without months and years`,
			`'l', 'ann', 10, '106752 days'`:                                                          `period must be between 100 milliseconds and 106751 days`,
			`'l', 'ann', 10, '178000000 years'`:                                                      `period must be between 100 milliseconds and 106751 days`,
			`'l', 'ann', 10, '1 minute', -1`:                                                         `count must be 0 or between 1e-15 and 1e15, not -1`,
			`'l', 'ann', 10, '1 minute', 'NaN'`:                                                      `count must be 0 or between 1e-15 and 1e15, not NaN`,
			`'l', 'ann', 10, '1 minute', 'Infinity'`:                                                 `count must be 0 or between 1e-15 and 1e15, not Infinity`,
			`'l', 'ann', 10, '1 minute', NULL`:                                                       `count must be 0 or between 1e-15 and 1e15, not NULL`,
			`'l', 'ann', 10, '1 minute', -1e-15`:                                                     `count must be 0 or between 1e-15 and 1e15, not -1e-15`,
			`'l', 'ann', 10, '1 minute', 11`:                                                         `count must be at most 10, not 11: more can never be granted`,
			`'l', 'ann', 10, '1 minute', capacity => 0`:                                              `count must be at most 0, not 1: more can never be granted`,
			`'l', 'ann', 10, '1 minute', 1e15, capacity => 0`:                                        `more can never be granted`,
			`'l', 'ann', 10, '1 minute', capacity => -1`:                                             `capacity must be 0 or between 1e-15 and 1e15, not -1`,
			`'l', 'ann', 10, '1 minute', capacity => 'NaN'`:                                          `capacity must be 0 or between 1e-15 and 1e15, not NaN`,
			`'l', 'ann', 10, '1 minute', capacity => 'Infinity'`:                                     `capacity must be 0 or between 1e-15 and 1e15, not Infinity`,
			`'l', 'ann', 10, '1 minute', kind => 'leaky bucket'`:                                     `kind must be 'token bucket', 'fixed window' or 'calendar window', not 'leaky bucket'`,
			`'l', 'ann', 10, '1 minute', kind => NULL`:                                               `kind must be 'token bucket', 'fixed window' or 'calendar window', not NULL`,
			`'l', 'ann', 10, '1 minute', kind => 'x''; DROP TABLE ratelimit.limits; --'`:             `kind must be 'token bucket'`,
			`'l', 'ann', 10, '1 month', kind => 'fixed window'`:                                      `without months and years`,
			`'l', 'ann', 10, '2 days', kind => 'calendar window'`:                                    `3 months or 1 year, not 2 days`,
			`'l', 'ann', 10, '30 days', kind => 'calendar window'`:                                   `3 months or 1 year, not 30 days`,
			`'l', 'ann', 10, '24 hours', kind => 'calendar window'`:                                  `must be 1 day, 7 days`,
			`'l', 'ann', 10, NULL, kind => 'calendar window'`:                                        `3 months or 1 year, not NULL`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', zone => 'CET'`:                      `such as 'Europe/Berlin', not 'CET'`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', zone => 'Mars/X'`:                   `time zone "Mars/X" not recognized`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', start => now()`:                     `start must be NULL for a calendar window, not 20`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', anchor => 'infinity'`:               `anchor must be between the years 1 and 9999, not infinity`,
			`'l', 'ann', 10, '1 day', zone => 'Europe/Berlin'`:                                       `zone must be NULL for a token bucket, not 'Europe/Berlin'`,
			`'l', 'ann', 10, '1 day', anchor => '2026-01-01'`:                                        `anchor must be NULL for a token bucket, not 2026-01-01 00:00:00`,
			`'l', 'ann', 10, '1 minute', start => now()`:                                             `start must be NULL for a token bucket, not 20`,
			`'l', 'ann', 10, '1 minute', shards => 0`:                                                `shards must be a whole number between 1 and 100, not 0`,
			`'l', 'ann', 10, '1 minute', shards => 101`:                                              `shards must be a whole number between 1 and 100, not 101`,
			`'l', 'ann', 10, '1 minute', shards => NULL`:                                             `shards must be a whole number between 1 and 100, not NULL`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', anchor => '-infinity'`:              `anchor must be between the years 1 and 9999, not -infinity`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', anchor => '0001-12-31 23:59:59 BC'`: `must be between the years 1 and 9999, not`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', anchor => '10000-01-01'`:            `must be between the years 1 and 9999, not`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', anchor => '2026-01-31 15:00:05.5'`:  `anchor must have no fraction of a second, not`,
			`'l', 'ann', 10, '1 day', kind => 'calendar window', anchor => '9999-12-31 23:59:59.9'`:  `anchor must have no fraction of a second, not`,

			`'l', 'ann', 10, '1 minute', kind => 'fixed window', start => 'infinity'`:               `start must be between the years 1 and 9999, not infinity`,
			`'l', 'ann', 10, '1 minute', kind => 'fixed window', start => '2026-07-01 00:00:00.5Z'`: `start must have no fraction of a second`,
			`'l', 'ann', 10, '1 minute', kind => 'fixed window', start => '0001-01-01 00:00Z'`:      `the first instant of the year 1`,
			`'l', 'ann', 10, '1 minute', kind => 'fixed window', start => '-infinity'`:              `must be between the years 1 and 9999, not`,
			`'l', 'ann', 10, '1 minute', kind => 'fixed window', start => '0001-01-01 BC'`:          `must be between the years 1 and 9999, not`,
		} {
			for _, function := range []string{"ratelimit.consume", "ratelimit.try", "ratelimit.reserve"} {
				if function == "ratelimit.reserve" && strings.Contains(text, "can never be granted") {
					arguments += ", max_reserved => 0" // without it, there is no bound
				}
				sqlRefused(w, "SELECT * FROM "+function+"("+arguments+")", text)
			}
		}
		for now, text := range map[string]string{
			"infinity": "now must be between the years 1000 and 9999, not infinity", "-infinity": "9999, not -infinity", "0999-12-31 23:59Z": "9999, not 0999-12-31", "10000-01-01Z": "9999, not 10000-01-01",
		} {
			for _, verb := range []string{"consume", "try", "reserve"} {
				sqlRefused(w, "SELECT * FROM ratelimit._by_hand('"+verb+"', 'l', 'ann', 10, '1 minute', now => '"+now+"')", text)
			}
		}
		for arguments, text := range map[string]string{
			`'', 10, '1 minute'`:                                  `name must have 1 to 255 bytes, not`,
			`'l', NULL, '1 minute'`:                               `rate must be between 1e-15 and 1e15, not NULL`,
			`'l', 10, '1 month'`:                                  `without months`,
			`'l', 10, '1 minute', 'window'`:                       `not 'window'`,
			`'l', 10, '1 minute', capacity => 'NaN'`:              `capacity must be 0 or between 1e-15 and 1e15, not NaN`,
			`'l', 10, '1 minute', start => '2026-07-01'`:          `start must be NULL for a token bucket, not 20`,
			`'l', 'Infinity', '1 minute', kind => 'fixed window'`: `rate must be between 1e-15 and 1e15, not Infinity`,
		} {
			sqlRefused(w, "SELECT * FROM ratelimit.keys("+arguments+")", text)
		}
		for _, now := range []string{"infinity", "-infinity"} {
			sqlRefused(w, "SELECT * FROM ratelimit._keys('l', 10, '1 minute', 'token bucket', NULL, NULL, NULL, NULL, NULL, '"+now+"')", "now must be finite, not "+now)
		}
		if rows := w.Rows(); rows != "" {
			w.Errorf("something was written:\n%s", rows)
		}
		w.Must(`SELECT ratelimit._by_hand('consume', 'm', 'end', 10, '1 minute', kind => 'fixed window', start => '0001-01-01 00:00:01Z', now => '9999-12-31 23:59:59.999999Z')`)
		w.Must(`SELECT ratelimit._by_hand('consume', 'l', 'end', 10, '1 minute', now => '9999-12-31 23:59:59.999999Z')`)

		// Unusual arguments work, with the names as they are.
		for _, arguments := range []string{
			`'o''limit', 'a''b"c%s$1', 10, '1 minute'`,
			`'l', 'ann', 10, '1 minute', 0`,
			`'l', 'bob', 1e-15, '106751 days 23:47:16.854775', 1e-15`,
			`'l', 'cat', 1e15, '100 milliseconds', 1e15`,
			`'l', 'dan', 10, '1 day -1 hour'`,
			`'m', 'ann', 10, '1 minute', kind => 'fixed window', start => '9999-12-31 23:59Z'`,
			`'m', 'bob', 10, '1 minute', kind => 'fixed window', start => '0001-01-01 00:00:01Z'`,
		} {
			var ok bool
			if err := w.DB.QueryRow(w.Context(), "SELECT granted FROM ratelimit.try("+arguments+")").Scan(&ok); err != nil || !ok {
				w.Errorf("ratelimit.try(%s): %v, %v", arguments, ok, err)
			}
		}
	})
}

// Rows written by hand, however unusual, grant no more than the capacity, and cause no error.
func TestByHandStandsOddRows(t *testing.T) {
	harness.Long(t)
	harness.Behaviour(t, func(w harness.World) {
		for i, row := range []string{
			`'NaN', now()`, `'Infinity', now()`, `'-Infinity', now()`, `1e308, now()`, `-1e308, now()`, `5e-324, now()`, `-5e-324, now()`,
			`3, now() + interval '1 hour'`, `1e308, '9999-01-01'`, `0, '0001-01-01'`,
		} {
			for j, kind := range []string{"token bucket", "fixed window", "token bucket", "fixed window", "token bucket", "fixed window"} {
				name := fmt.Sprint(kind, i, j)
				call := []string{"ratelimit.consume($1, 'ann', count => 1", "ratelimit.reserve($1, 'ann', max_reserved => 0", "ratelimit.take($1, 'ann', most => 1"}[j/2]
				w.Must(`INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) SELECT '` + name + `', 'ann', 0, 1, ` + row)
				granted := 0
				for range 12 {
					savepoint := w.Begin()
					var remaining float64
					err := savepoint.QueryRow(w.Context(), `SELECT remaining FROM `+call+`, rate => 10, period => '1000 hours', kind => $2)`, name, kind).Scan(&remaining)
					switch {
					case err == nil && remaining <= 10:
						granted++
						w.Do(savepoint.Commit(w.Context()))
					case harness.SQLState(err) == "PT429":
						w.Do(savepoint.Rollback(w.Context()))
					default:
						w.Fatalf("%s, %s: %v left, %v", row, call, remaining, err)
					}
				}
				if granted > 10 {
					w.Errorf("%s, %s of a %s: %d granted, the capacity is 10", row, call, kind, granted)
				}
				w.Must(`SELECT * FROM ratelimit.keys($1, 10, '1000 hours', $2)`, name, kind)
			}
		}
	})
}

func TestByHandADenialIsAnError(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		const call = `SELECT ratelimit._by_hand('consume', 'secret', 'ann@example.org', 1, '1 minute', now => '2026-07-01 12:00:00Z')`
		w.Must(call)
		tx := w.Begin()
		_, err := tx.Exec(w.Context(), call)
		pgErr := harness.PgError(w.T, err)
		if pgErr.Code != "PT429" || pgErr.Message != "rate limit exceeded: secret" || pgErr.Hint != "Retry in 60 s." ||
			strings.Contains(fmt.Sprintf("%+v", pgErr), "example.org") {
			w.Fatalf("%+v", pgErr)
		}
		w.Do(tx.Rollback(w.Context()))
		var retryAfter, remaining float64
		var retryAt, resetAt time.Time
		var name string
		w.Do(w.DB.QueryRow(w.Context(), `SELECT d->>'name', (d->>'remaining')::float8, (d->>'retry_after')::float8, (d->>'retry_at')::timestamptz, (d->>'reset_at')::timestamptz
			FROM (SELECT $1::json) AS t (d)`, pgErr.Detail).Scan(&name, &remaining, &retryAfter, &retryAt, &resetAt))
		if name != "secret" || remaining != 0 || retryAfter != 60 || !retryAt.Equal(harness.Noon.Add(time.Minute)) || !resetAt.Equal(retryAt) {
			w.Fatalf("%s", pgErr.Detail)
		}
	})
}

// The error is not one of QueueConsume's denials, although it has the same SQLSTATE.
func TestByHandADenialInABatchIsTheCallersOwn(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var limiter ratelimit.Limiter
	batch := &pgx.Batch{}
	result := harness.Queue(t, &limiter, batch, ratelimit.TokenBucket("mine", 10, time.Hour).Key("ann"))
	batch.Queue(`SELECT ratelimit.consume('theirs', 'ann', 1, '1 hour') FROM generate_series(1, 2) AS n WHERE n > 0`)
	batch.Queue(`SELECT ratelimit.consume('theirs', 'ann', 1, '1 hour')`)
	err := limiter.SendTx(t.Context(), pool, batch)
	if harness.SQLState(err) != "PT429" || harness.Denied(err) || !result.OK {
		t.Fatalf("%v, %+v", err, result)
	}
	var rows int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.limits").Scan(&rows); err != nil || rows != 0 {
		t.Errorf("it was not rolled back: %d rows, %v", rows, err)
	}
}

// A user's first steps: psql, and its output.
func TestByHandInPsql(t *testing.T) {
	t.Parallel()
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("there is no psql")
	}
	pool := harness.NewPool(t, 1)
	out, err := exec.CommandContext(t.Context(), psql, "-X", "-At", "-v", "ON_ERROR_STOP=1",
		"-c", `SELECT granted, remaining, retry_after FROM ratelimit.try('sendMessage', 'user-17', rate => 10, period => '1 day')`,
		"-c", `SELECT granted, floor(remaining), retry_after > '1 hour' FROM ratelimit.try('sendMessage', 'user-17', rate => 10, period => '1 day', count => 9.5)`,
		"-c", `SELECT obj_description('ratelimit.consume'::regproc)`, "-c", `\df+ ratelimit.keys`, harness.ForAll(t, pool.Config().ConnString())).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"t|9|\n", "f|9|t\n", "first instant at which the same call would be granted", "The keys of a rate limit that have been used"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("psql does not print %q:\n%s", want, out)
		}
	}
}

// An application may already have functions with these names, and other arguments.
func TestByHandBesideFunctionsOfTheSameNames(t *testing.T) {
	t.Parallel()
	url := harness.NewDatabase(t)
	pool := harness.Connect(t, url, 1)
	harness.MustExec(t, pool, "CREATE SCHEMA ratelimit; CREATE TABLE public.ratelimit (limits int); CREATE TABLE public.limits (usage int); CREATE FUNCTION public.holds() RETURNS int LANGUAGE sql RETURN 1")
	for _, name := range []string{"ratelimit.consume", "ratelimit.try", "ratelimit.reserve", "ratelimit.take", "ratelimit.consume_all", "ratelimit.keys", "ratelimit._by_hand", "ratelimit._denied", "ratelimit._when", "ratelimit._micros", "ratelimit.sweep"} {
		harness.Succeeds(t, harness.Second(pool.Exec(t.Context(), `CREATE FUNCTION `+name+`(path) RETURNS text LANGUAGE sql RETURN 'mine'`)))
	}
	provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), migrated.Files(), migrations.VersionTable)
	harness.Succeeds(t, harness.Second(provider.Up(t.Context())))
	var ok bool
	var mine string
	if err := pool.QueryRow(t.Context(), `SELECT granted, ratelimit.consume('[(0,0)]'::path) FROM ratelimit.try('l', 'ann', 1, '1 hour')`).Scan(&ok, &mine); err != nil || !ok || mine != "mine" {
		t.Errorf("%v, %q, %v", ok, mine, err)
	}
	harness.Succeeds(t, harness.Second(provider.DownTo(t.Context(), 0)))
	if err := pool.QueryRow(t.Context(), `SELECT ratelimit.keys('[(0,0)]'::path)`).Scan(&mine); err != nil {
		t.Error(err)
	}
}

// newTenants makes the table and trigger from docs/sql.md.
func newTenants(t *testing.T, conns int) *pgxpool.Pool {
	t.Helper()
	pool := harness.NewPool(t, conns)
	harness.Succeeds(t, harness.Second(pool.Exec(t.Context(), harness.DocSQL(t, "docs/sql.md", "CREATE TRIGGER"))))
	return pool
}

// The trigger of docs/sql.md, with many concurrent inserts by several tenants, at every isolation level. The table must
// have exactly the rows that the limit allows.
func TestByHandATriggerLimitsInserts(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	const allowed = 200 // the capacity; 100 more are refilled in a minute
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := newTenants(t, 8)
			begin := time.Now()
			limiter := ratelimit.Limiter{OnRetry: func(_ context.Context, _ int, failed error) {
				if harness.SQLState(failed) == "40P01" || level == pgx.ReadCommitted {
					t.Errorf("%s: run again for %v", level, failed)
				}
			}}
			done := make(chan error, 16)
			for g := range 16 {
				go func() {
					done <- func() error {
						for {
							err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
								_, err := tx.Exec(ctx, `INSERT INTO messages (tenant, body) SELECT tenant, 'hello' FROM unnest($1::text[]) AS tenant, generate_series(1, 4)`,
									oneOfTwo(g, []string{"acme", "umbrella"}, []string{"umbrella", "acme"}))
								return err
							}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
							if harness.SQLState(err) == "PT429" {
								return nil
							} else if err != nil {
								return err
							}
						}
					}()
				}()
			}
			for range 16 {
				harness.Succeeds(t, <-done)
			}
			refilled := int(time.Since(begin).Minutes()*100) + 1
			for _, tenant := range []string{"acme", "umbrella"} {
				var n int
				var remaining float64
				harness.Succeeds(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM messages WHERE tenant = $1), remaining
					FROM ratelimit.keys('messages', 100, '1 minute', capacity => 200) WHERE key = $1`, tenant).Scan(&n, &remaining))
				if n < allowed-3 || n > allowed+refilled || float64(n)+remaining > float64(allowed+refilled) || float64(n)+remaining < allowed {
					t.Errorf("%s has %d messages, and %v left of %d and %d that were refilled", tenant, n, remaining, allowed, refilled)
				}
			}
			// One statement is one decision: a statement for more than the capacity gets another error.
			_, err := pool.Exec(t.Context(), `INSERT INTO messages SELECT 'fresh', 'x' FROM generate_series(1, 201)`)
			if harness.SQLState(err) != "22023" {
				t.Errorf("201 at once: %v", err)
			}
			if _, err := pool.Exec(t.Context(), `INSERT INTO messages SELECT 'fresh', 'x' FROM generate_series(1, 200)`); err != nil {
				t.Errorf("200 at once: %v", err)
			}
		})
	}
}

func oneOfTwo[T any](g int, even, odd T) T {
	if g%2 == 0 {
		return even
	}
	return odd
}

// A role that may insert does not need rights on the limits: the trigger's function runs with its owner's rights.
func TestByHandATriggerOfItsOwnersRights(t *testing.T) {
	t.Parallel()
	pool := newTenants(t, 2)
	role := harness.NewRole(t, pool, true)
	harness.Succeeds(t, harness.Second(pool.Exec(t.Context(), "GRANT INSERT ON messages TO PUBLIC")))
	const insert = `INSERT INTO messages VALUES ('acme', 'hello')`
	if _, err := role.Exec(t.Context(), insert); harness.SQLState(err) != "42501" {
		t.Errorf("without rights on the limits: %v", err)
	}
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/sql.md", "ALTER FUNCTION limit_messages()"))
	if _, err := role.Exec(t.Context(), `INSERT INTO messages SELECT 'acme', 'hello' FROM generate_series(1, 200)`); err != nil {
		t.Error(err)
	}
	if _, err := role.Exec(t.Context(), `INSERT INTO messages SELECT 'acme', 'hello' FROM generate_series(1, 150)`); harness.SQLState(err) != "PT429" {
		t.Errorf("not limited: %v", err)
	}
	if _, err := role.Exec(t.Context(), insert+strings.Repeat(", ('acme', 'hello')", 149)); harness.SQLState(err) != "PT429" {
		t.Errorf("not limited: %v", err)
	}
	if _, err := role.Exec(t.Context(), `DELETE FROM ratelimit.limits`); harness.SQLState(err) != "42501" {
		t.Errorf("the role can touch the limits: %v", err)
	}
	// Nor can the role use that function as a trigger on its own table to take the tokens of others.
	_, err := role.Exec(t.Context(), `CREATE TEMP TABLE mine (tenant text); CREATE TRIGGER mine AFTER INSERT ON mine
		REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION limit_messages()`, pgx.QueryExecModeSimpleProtocol)
	if harness.SQLState(err) != "42501" {
		t.Errorf("the role can use the function: %v", err)
	}
}

// The function of docs/sql.md that PostgREST calls before each request, in the request's transaction and with its role.
func TestByHandAPreRequest(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/sql.md", "limit_requests()"))
	role := harness.NewRole(t, pool, true)
	failed := errors.New("the request failed")
	request := func(method, claims string, mode pgx.TxAccessMode, result error) error {
		return pgx.BeginTxFunc(t.Context(), role, pgx.TxOptions{AccessMode: mode}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SELECT set_config('request.method', $1, true), set_config('request.jwt.claims', $2, true)`, method, claims); err != nil {
				return err
			}
			if _, err := tx.Exec(t.Context(), `SELECT limit_requests()`); err != nil {
				return err
			}
			return result
		})
	}
	const ann = `{"role": "user", "sub": "ann"}`
	if err := request("POST", ann, pgx.ReadWrite, failed); !errors.Is(err, failed) {
		t.Error(err)
	}
	if err := request("GET", ann, pgx.ReadOnly, nil); err != nil {
		t.Error(err)
	}
	if rows := harness.TableOf(t, pool); rows != "" {
		t.Errorf("a failed request and a read-only request are counted:\n%s", rows)
	}
	if err := request("POST", ann, pgx.ReadWrite, nil); err != nil {
		t.Error(err)
	}
	if rows := harness.TableOf(t, pool); !strings.HasPrefix(rows, "(requests,ann,0,1,99,") || strings.Contains(rows, "\n") {
		t.Errorf("after one request the table is\n%s", rows)
	}
	for _, no := range []struct {
		what, method, claims string
		mode                 pgx.TxAccessMode
		state                string
	}{
		{"without a subject", "POST", `{"role": "anon"}`, pgx.ReadWrite, "22023"},
		{"a function that is STABLE", "POST", ann, pgx.ReadOnly, "25006"},
	} {
		if err := request(no.method, no.claims, no.mode, nil); harness.SQLState(err) != no.state {
			t.Errorf("%s: %v, want %s", no.what, err, no.state)
		}
	}
	harness.MustExec(t, pool, `UPDATE ratelimit.limits SET value = 0, ts = now() + interval '1 hour'`)
	if err := request("POST", ann, pgx.ReadWrite, nil); harness.SQLState(err) != "PT429" {
		t.Errorf("%v, want a denial", err)
	}
	for _, sql := range []string{"DELETE FROM ratelimit.limits", "SELECT ratelimit.reset('requests', 'ann')"} {
		if _, err := role.Exec(t.Context(), sql); harness.SQLState(err) != "42501" {
			t.Errorf("%s: %v, want 42501", sql, err)
		}
	}
}

package sql_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestADenialInSQLThatNobodyLooksAt: a trigger and a function of a web API call ratelimit and ratelimit.consume_all, and look at no answer. A denial
// stops them, and rolls back what they did before it.
func TestADenialInSQLThatNobodyLooksAt(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		w.Must(`CREATE TABLE messages (sender text); CREATE TABLE log (what text)`)
		for name, perform := range map[string]string{
			"one":     `PERFORM ratelimit.consume('one', sender, rate => 2, period => '1000 hours')`,
			"several": `PERFORM ratelimit.consume_all(jsonb_build_array(jsonb_build_object('name', 'more', 'key', sender, 'rate', 9, 'period', '1000 hours'), jsonb_build_object('name', 'two', 'key', sender, 'rate', 2, 'period', '1000 hours')))`,
			"call":    `CALL limited(sender)`,
		} {
			w.Must(`CREATE OR REPLACE PROCEDURE limited(sender text) LANGUAGE plpgsql AS $$ BEGIN PERFORM ratelimit.consume('deep', sender, rate => 2, period => '1000 hours'); END $$`)
			w.Must(fmt.Sprintf(`CREATE FUNCTION %[1]s_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
				DECLARE sender text := NEW.sender; BEGIN INSERT INTO log VALUES ('before'); %[2]s; RETURN NEW; END $$`, name, perform))
			w.Must(fmt.Sprintf(`CREATE TRIGGER %[1]s BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION %[1]s_trigger()`, name))
			w.Must(fmt.Sprintf(`CREATE FUNCTION %[1]s_api(sender text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN INSERT INTO log VALUES ('before'); %[2]s; RETURN 'sent'; END $$`, name, perform))
			for key, statement := range map[string]string{"ann": `INSERT INTO messages VALUES ('ann')`, "bob": `SELECT ` + name + `_api('bob')`} {
				w.Must(`DELETE FROM log; DELETE FROM messages`)
				w.Must(statement)
				w.Must(statement)
				before := w.Rows()
				savepoint := w.Begin()
				_, err := savepoint.Exec(w.Context(), statement)
				w.Do(savepoint.Rollback(w.Context()))
				if harness.SQLState(err) != "PT429" {
					w.Fatalf("%s of %s: %v, want PT429", name, key, err)
				}
				var logged int
				w.Do(w.DB.QueryRow(w.Context(), `SELECT count(*) FROM log`).Scan(&logged))
				if logged != 2 || w.Rows() != before {
					w.Errorf("%s of %s: after a denial, %d rows are logged, want 2, and the table is\n%s", name, key, logged, w.Rows())
				}
			}
			w.Must(fmt.Sprintf(`DROP TRIGGER %s ON messages`, name))
		}
		// A block that catches everything swallows the denial, as docs/sql.md says.
		w.Must(`INSERT INTO messages VALUES ('ann')`)
		w.Must(`DO $$ BEGIN PERFORM ratelimit.consume('one', 'ann', rate => 2, period => '1000 hours'); EXCEPTION WHEN OTHERS THEN INSERT INTO log VALUES ('swallowed'); END $$`)
		var swallowed int
		w.Do(w.DB.QueryRow(w.Context(), `SELECT count(*) FROM log WHERE what = 'swallowed'`).Scan(&swallowed))
		if swallowed != 1 {
			w.Errorf("WHEN OTHERS caught %d denials, want 1", swallowed)
		}
		w.Must(`DROP TABLE messages, log; DROP FUNCTION one_trigger, one_api, several_trigger, several_api, call_trigger, call_api; DROP PROCEDURE limited`)
	})
}

// TestThePublicFunctionsPassTheirArgumentsOn: the other tests call the private functions behind them, since these take the instant.
func TestThePublicFunctionsPassTheirArgumentsOn(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	for function, verb := range map[string]string{"ratelimit.consume": "consume", "ratelimit.try": "try", "ratelimit.reserve": "reserve", "ratelimit.take": "take"} {
		for i, arguments := range []string{
			`rate => 10, period => '100 days', capacity => 20, count => 3`,
			`rate => 10, period => '100 days', count => 2, shards => 3`,
			`rate => 10, period => '100 days', kind => 'fixed window', start => '2020-01-01 00:00Z', count => 4`,
			`rate => 10, period => '1 year', kind => 'calendar window', zone => 'Pacific/Auckland', anchor => '2020-05-05 05:05', count => 3`,
			`rate => 10, period => '100 days', global => true, count => 0.5`,
			`rate => 10, period => '100 days', count => 4, capacity => 11, max_reserved => 2`,
		} {
			key := "'public', 'ann'" // and 'private', 'ann': a window without a start begins by the key
			if strings.Contains(arguments, "global") {
				key = "'public'"
			}
			if verb == "take" {
				arguments = strings.NewReplacer("count => 0.5", "most => 1", "count", "most").Replace(arguments)
			}
			if verb != "reserve" {
				arguments = strings.Replace(arguments, ", max_reserved => 2", "", 1)
			}
			columns := map[string]string{
				"consume": "", "try": "granted, date_trunc('hour', retry_after), ", "take": "taken, ", "reserve": "date_trunc('hour', retry_at - at + interval '30 minutes'), ",
			}[verb] + "round(remaining::numeric, 3), date_trunc('hour', reset_at + interval '30 minutes')"
			for n := range 8 {
				ask := func(call string) string {
					answer := ""
					err := pool.QueryRow(t.Context(), fmt.Sprintf("SELECT concat_ws(' ', %s) FROM %s", columns, call)).Scan(&answer)
					if err != nil && harness.SQLState(err) != "PT429" {
						t.Fatalf("%s: %v", call, err)
					}
					return answer
				}
				got := ask(fmt.Sprintf("%s(%s, %s)", function, key, arguments))
				want := ask(fmt.Sprintf("ratelimit._by_hand('%s', %s, %s)", verb, strings.Replace(key, "public", "private", 1), arguments))
				if got != want {
					t.Errorf("%s, %d, call %d: %q, want %q", function, i, n, got, want)
				}
			}
			harness.MustExec(t, pool, "DELETE FROM ratelimit.limits")
		}
	}
}

// The public functions for SQL take no instant, and their denials are errors but for ratelimit.try's. Their names, and the names and order
// of what they take and return, stay.
func TestThePublicFunctionsOfSQL(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	const numbers = "rate double precision DEFAULT NULL::double precision, period interval DEFAULT NULL::interval, "
	const kind = "kind text DEFAULT 'token bucket'::text, capacity double precision DEFAULT NULL::double precision, start timestamp with time zone DEFAULT NULL::timestamp with time zone, "
	const calendar = "zone text DEFAULT NULL::text, anchor timestamp without time zone DEFAULT NULL::timestamp without time zone"
	const one = "name text, key text DEFAULT NULL::text, " + numbers + "count double precision DEFAULT 1, " + kind + "shards integer DEFAULT 1, global boolean DEFAULT false, " + calendar
	const instants = "reset_at timestamp with time zone, OUT at timestamp with time zone"
	want := map[string]string{
		"ratelimit.consume":      one + ", OUT remaining double precision, OUT " + instants,
		"ratelimit.try":          one + ", OUT granted boolean, OUT remaining double precision, OUT retry_after interval, OUT retry_at timestamp with time zone, OUT " + instants,
		"ratelimit.reserve":      one + ", max_reserved double precision DEFAULT NULL::double precision, OUT retry_at timestamp with time zone, OUT delay interval, OUT remaining double precision, OUT " + instants,
		"ratelimit.take":         strings.Replace(one, "count double precision DEFAULT 1", "most bigint DEFAULT NULL::bigint", 1) + ", OUT taken bigint, OUT remaining double precision, OUT " + instants,
		"ratelimit.consume_all":  "requests jsonb, TABLE(name text, key text, remaining double precision, reset_at timestamp with time zone, at timestamp with time zone)",
		"ratelimit.keys":         "name text, " + numbers + strings.Replace(kind, "capacity", "OUT key text, OUT remaining double precision, INOUT capacity", 1) + calendar + ", keys text[] DEFAULT NULL::text[], OUT used double precision, OUT retry_at timestamp with time zone, OUT paused_until timestamp with time zone, SETOF record",
		"ratelimit.sweep":        "name text, " + numbers + kind + "first text DEFAULT ''::text, varies interval DEFAULT NULL::interval, OUT deleted integer, OUT next text",
		"ratelimit.pause":        "name text, key text DEFAULT NULL::text, until timestamp with time zone DEFAULT NULL::timestamp with time zone, remaining double precision DEFAULT 0, " + numbers + "capacity double precision DEFAULT NULL::double precision, shards integer DEFAULT 1, global boolean DEFAULT false",
		"ratelimit.resume":       "name text, key text DEFAULT NULL::text, global boolean DEFAULT false",
		"ratelimit.hold":         "name text, key text DEFAULT NULL::text, id text DEFAULT NULL::text, count double precision DEFAULT 1, ttl interval DEFAULT NULL::interval, forever boolean DEFAULT false, global boolean DEFAULT false, OUT token text, OUT until timestamp with time zone, OUT repeated boolean, OUT remaining double precision, OUT at timestamp with time zone",
		"ratelimit.hold_many":    "name text, key text DEFAULT NULL::text, ids text[] DEFAULT NULL::text[], global boolean DEFAULT false",
		"ratelimit.release_many": "name text, key text DEFAULT NULL::text, ids text[] DEFAULT NULL::text[], global boolean DEFAULT false",
		"ratelimit.recount":      "name text, key text DEFAULT NULL::text, global boolean DEFAULT false",
		"ratelimit.release":      "name text, key text DEFAULT NULL::text, id text DEFAULT NULL::text, global boolean DEFAULT false, reason text DEFAULT NULL::text, who text DEFAULT NULL::text",
		"ratelimit.holds":        "name text, INOUT key text DEFAULT NULL::text, global boolean DEFAULT false, OUT id text, OUT count double precision, OUT unit text, OUT since timestamp with time zone, OUT until timestamp with time zone, OUT expired boolean, SETOF record",
		"ratelimit.reset":        "name text, key text DEFAULT NULL::text, global boolean DEFAULT false, reason text DEFAULT NULL::text, who text DEFAULT NULL::text",
	}
	rows, err := pool.Query(t.Context(), `SELECT 'ratelimit.' || p.proname, pg_get_function_arguments(p.oid) || CASE WHEN p.proretset THEN ', ' || pg_get_function_result(p.oid) ELSE '' END, obj_description(p.oid) IS NOT NULL
		  FROM pg_proc AS p WHERE p.pronamespace = 'ratelimit'::regnamespace AND p.proname NOT LIKE '\_%'`)
	if err != nil {
		t.Fatal(err)
	}
	var name, arguments string
	var documented bool
	if _, err := pgx.ForEachRow(rows, []any{&name, &arguments, &documented}, func() error {
		if !documented {
			t.Errorf("%s has no COMMENT", name)
		}
		if text, found := want[name]; found {
			delete(want, name)
			if arguments != text {
				t.Errorf("%s(%s)\nwant %s", name, arguments, text)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for name := range want {
		t.Errorf("there is no function %s", name)
	}
}

// request is a request of ratelimit.consume_all.
func allRequest(limit ratelimit.Limit, key string, count float64) map[string]any {
	c := limit.Config()
	request := map[string]any{"name": c.Name, "rate": *c.Rate, "kind": c.Kind, "capacity": *c.Capacity, "shards": c.Shards, "count": count}
	if key == "" {
		request["global"] = true
	} else {
		request["key"] = key
	}
	if c.Kind == "calendar window" {
		request["period"] = strings.Replace(c.Period, "1 week", "7 days", 1)
		if c.Zone != "" {
			request["zone"] = c.Zone
		}
		if c.Anchor != "" {
			request["anchor"] = c.Anchor
		}
	} else {
		seconds := harness.Period(c).Microseconds() / 1e6 // PostgreSQL 14 reads no large number of microseconds
		request["period"] = fmt.Sprintf("%d seconds %d microseconds", seconds, harness.Period(c).Microseconds()%1e6)
	}
	if c.Start != nil {
		request["start"] = c.Start.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
	}
	return request
}

// allAnswer is what ratelimit.consume_all, or Consume, says of several requests: after a denial, only the limits that deny, and the wait.
type allAnswer struct {
	granted   bool
	remaining []float64
	resetAt   []time.Time
	denied    []string
	retryAt   time.Time
}

func (a allAnswer) equals(b allAnswer) bool {
	if a.granted != b.granted || !slices.Equal(a.denied, b.denied) || !a.retryAt.Equal(b.retryAt) || len(a.remaining) != len(b.remaining) {
		return false
	}
	for i := range a.remaining {
		if a.remaining[i] != b.remaining[i] || !a.resetAt[i].Equal(b.resetAt[i]) {
			return false
		}
	}
	return true
}

// askAll asks ratelimit._all in a savepoint.
func askAll(w harness.World, tx pgx.Tx, requests []map[string]any, now time.Time) (a allAnswer) {
	w.Helper()
	text, err := json.Marshal(requests)
	w.Do(err)
	savepoint, err := tx.Begin(w.Context())
	w.Do(err)
	rows, err := savepoint.Query(w.Context(), `SELECT remaining, reset_at, at, name, key FROM ratelimit._all($1::text::jsonb, $2)`, string(text), now)
	var remaining float64
	var resetAt, at time.Time
	var name, key string
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&remaining, &resetAt, &at, &name, &key}, func() error {
			if n := len(a.remaining); name != requests[n]["name"] || key != "" && key != requests[n]["key"] || !at.Equal(now) {
				w.Fatalf("answer %d to %s is for %s, %s at %v", n, text, name, key, at)
			}
			a.remaining, a.resetAt = append(a.remaining, remaining), append(a.resetAt, resetAt)
			return nil
		})
	}
	if err == nil {
		a.granted = true
		w.Do(savepoint.Commit(w.Context()))
		return a
	}
	w.Do(savepoint.Rollback(w.Context()))
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != "PT429" {
		w.Fatalf("%s: %v", text, err)
	}
	a.denied = strings.Split(strings.TrimPrefix(pgErr.Message, "rate limit exceeded: "), ", ")
	var detail struct {
		Name    string
		RetryAt *time.Time `json:"retry_at"`
	}
	w.Do(json.Unmarshal([]byte(pgErr.Detail), &detail))
	if !slices.Contains(a.denied, detail.Name) {
		w.Fatalf("%s: %q is not among those that deny", pgErr.Detail, a.denied)
	}
	if detail.RetryAt != nil {
		a.retryAt = *detail.RetryAt
	}
	return a
}

// TestRatelimitAllAnswersLikeConsume makes random requests of several limits, in SQL and in Go on the same rows. The answers and the rows must
// be equal. A denied call must be granted at retry_at.
func TestRatelimitAllAnswersLikeConsume(t *testing.T) {
	t.Parallel()
	r := harness.NewRand(t)
	begun, err := harness.NewPool(t, 1).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer begun.Rollback(context.WithoutCancel(t.Context()))
	limiter, clock := harness.NewLimiter()
	w := harness.World{T: t, DB: begun, Limiter: limiter, Clock: clock}
	grants, denials := 0, 0
	for n := 0; n < harness.Sized(300, 100) || n < 3000 && (grants < 40 || denials < 40); n++ {
		clock.At = harness.Noon.Add(time.Duration(r.Int64N(4e17)-2e17) / 1000 * 1000)
		var requests []map[string]any
		var asked []ratelimit.Request
		var limits []ratelimit.Limit
		w.Must("DELETE FROM ratelimit.limits")
		tableText := func() (text string) {
			w.Do(w.DB.QueryRow(w.Context(), `SELECT coalesce(string_agg(concat_ws(' ', name, key, shards, float8send(value), timestamptz_send(ts)), e'\n'
				ORDER BY name, key, float8send(value), ts), '') FROM ratelimit.limits`).Scan(&text))
			return text
		}
		for i := range 1 + r.IntN(4) {
			name := fmt.Sprint(harness.OneOf(r, "a", "b", "Z", "é"), i)
			limit := harness.RandomLimit(r, name, harness.OneOf(r, 1, 1, 1, 3))
			if r.IntN(2) == 0 {
				limit = ratelimit.CalendarWindow(name, harness.OneOf(r, 5.0, 20, 100), harness.OneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Year),
					ratelimit.Zone(harness.OneOf(r, "UTC", "Europe/Berlin")), ratelimit.Anchor(harness.RandomAnchor(r)), ratelimit.Capacity(harness.OneOf(r, 5.0, 100)))
			}
			key := harness.OneOf(r, "ann", "bob", "")
			count := min(harness.RandomTokens(r, limit.Capacity()), limit.Capacity())
			if count > 0 && count < 1e-15 {
				count = 0
			}
			shards := limit.Config().Shards
			if r.IntN(4) > 0 {
				value := limit.Capacity() / float64(shards) * harness.OneOf(r, 0, r.Float64(), 0.9, 1, 1, -r.Float64())
				ts := clock.At.Add(-time.Duration(r.Int64N(harness.OneOf[int64](r, 1e3, 1e9, 1e13))) * time.Microsecond) // up to 115 days ago
				for shard := range shards {                                                                              // equal rows, so that the picked shard does not matter
					w.Must("INSERT INTO ratelimit.limits VALUES ($1, $2, $3, $4, $5, $6)", name, key, shard, shards, value, ts)
				}
			}
			requests, limits = append(requests, allRequest(limit, key, count)), append(limits, limit)
			if key == "" {
				asked = append(asked, limit.Global().Count(count))
			} else {
				asked = append(asked, limit.Key(key).Count(count))
			}
		}
		w.Must("CREATE TEMP TABLE IF NOT EXISTS kept AS SELECT * FROM ratelimit.limits WITH NO DATA; DELETE FROM kept; INSERT INTO kept SELECT * FROM ratelimit.limits")
		result, err := (&ratelimit.Limiter{Clock: clock.Now}).Consume(t.Context(), begun, asked...) // a name has another definition in each case
		exceeded, denied := errors.AsType[*ratelimit.DeniedError](err)
		if err != nil && !denied {
			t.Fatalf("case %d: %v", n, err)
		}
		want := allAnswer{granted: err == nil}
		if denied {
			result = harness.ResultIn(exceeded)
			want.retryAt = result.RetryAt
		}
		for _, s := range result.Requests {
			switch {
			case want.granted:
				want.remaining, want.resetAt = append(want.remaining, s.Remaining), append(want.resetAt, s.ResetAt)
			case !s.OK:
				want.denied = append(want.denied, s.Limit.Name())
			}
		}
		wantTable := tableText()
		w.Must("DELETE FROM ratelimit.limits; INSERT INTO ratelimit.limits SELECT * FROM kept")
		got := askAll(w, begun, requests, clock.At)
		if !got.equals(want) {
			t.Fatalf("case %d at %v: %v\nSQL %+v\nGo  %+v", n, clock.At, requests, got, want)
		}
		if table := tableText(); table != wantTable {
			t.Fatalf("case %d: %v: SQL left\n%s\nGo left\n%s", n, requests, table, wantTable)
		}
		if got.granted {
			grants++
			continue
		}
		denials++
		early := got.retryAt
		for _, limit := range limits {
			early = slices.MinFunc([]time.Time{early, harness.Before(limit, got.retryAt)}, time.Time.Compare)
		}
		if early.After(clock.At) && got.retryAt.Year() < 9999 {
			if again := askAll(w, begun, requests, early); again.granted {
				t.Fatalf("case %d: %v denied at %v until %v, and granted before that", n, requests, clock.At, got.retryAt)
			}
			if again := askAll(w, begun, requests, got.retryAt); !again.granted {
				t.Fatalf("case %d: %v denied at %v until %v, and then %+v", n, requests, clock.At, got.retryAt, again)
			}
		}
	}
	if grants < 40 || denials < 40 {
		t.Errorf("%d grants and %d denials: this tested too little", grants, denials)
	}
}

// TestRatelimitAllUnderContention: calls with the list in both orders, and single calls, get exactly what there is, at every level that
// matters, and no call deadlocks.
func TestRatelimitAllUnderContention(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s, %d shards", level, shards), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 8)
				limiter := ratelimit.Limiter{OnRetry: func(_ context.Context, _ int, failed error) {
					if harness.SQLState(failed) == "40P01" || level == pgx.ReadCommitted {
						t.Errorf("%s: run again for %v", level, failed)
					}
				}}
				one := func(name string, rate int) string {
					return fmt.Sprintf(`{"name": "%s", "key": "ann", "rate": %d, "period": "1000 hours", "shards": %d}`, name, rate, shards)
				}
				lists := []string{
					"[" + one("a", 60) + ", " + one("b", 90) + "]", "[" + one("b", 90) + ", " + one("a", 60) + "]",
					"[" + one("c", 70) + ", " + one("b", 90) + ", " + one("a", 60) + "]", "[" + one("b", 90) + "]",
				}
				var granted [8]int
				done := make(chan error, 8)
				for g := range 8 {
					go func() {
						done <- func() error {
							for {
								err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
									_, err := tx.Exec(ctx, "SELECT ratelimit.consume_all($1::text::jsonb)", lists[g%4])
									return err
								}, ratelimit.Isolation(level), ratelimit.Attempts(1000))
								switch {
								case harness.SQLState(err) == "PT429":
									return nil
								case err != nil:
									return err
								}
								granted[g]++
							}
						}()
					}()
				}
				for range 8 {
					if err := <-done; err != nil {
						t.Fatal(err)
					}
				}
				of := func(kinds ...int) (n int) {
					for _, k := range kinds {
						n += granted[k] + granted[k+4]
					}
					return n
				}
				if a, b := of(0, 1, 2), of(0, 1, 2, 3); a > 60 || b != 90 || of(2) > 70 {
					t.Errorf("%d of 60, %d of 90 and %d of 70 granted; 90 must all be used: %v", a, b, of(2), granted)
				}
				for name, left := range map[string]int{"a": 60 - of(0, 1, 2), "b": 90 - of(0, 1, 2, 3), "c": 70 - of(2)} {
					// A thousandth of an hour refills less than a tenth of a token.
					if got := harness.Scan[float64](t, pool, "SELECT coalesce(sum(remaining), $2::double precision) FROM ratelimit.keys($1, $2::double precision, '1000 hours')", name, map[string]float64{"a": 60, "b": 90, "c": 70}[name]); math.Abs(got-float64(left)) > 0.1 {
						t.Errorf("%s has %v left, want %d", name, got, left)
					}
				}
			})
		}
	}
}

// TestRatelimitAllMindsOverrides: without numbers, they are those that are published, under overrides and blocks.
func TestRatelimitAllMindsOverrides(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	harness.MustExec(t, pool, `
		SELECT ratelimit.override('bucket', 'raised', rate => 100, capacity => 100, forever => true), ratelimit.block('bucket', 'blocked', until => '9000-01-01 00:00+00'),
		       ratelimit.block('bucket', 'for good', forever => true), ratelimit.unlimited('bucket', 'free', forever => true), ratelimit.override('none', every_key => true, capacity => 7, until => '8000-01-01 00:00+00');
		SELECT ratelimit.consume('window', 'empty', count => 7), ratelimit.consume('sharded', 'half', count => 6)`)
	for list, want := range map[string]string{
		`[{"name": "bucket", "key": "ann", "count": 20}, {"name": "sharded", "key": "ann", "count": 4}]`:                     "bucket 0, sharded 8",
		`[{"name": "bucket", "key": "raised", "count": 60}, {"name": "open", "key": "ann", "count": 1e6}]`:                   "bucket 40, open Infinity",
		`[{"name": "open", "key": "ann"}, {"name": "bucket", "key": "free", "count": 1e9}]`:                                  "open Infinity, bucket Infinity",
		`[{"name": "none", "key": "ann", "count": 0}, {"name": "window", "key": "ann", "count": 2}]`:                         "none 0, window 5",
		`[{"name": "window", "key": "bob"}, {"name": "bucket", "key": "blocked"}, {"name": "bucket", "key": "bob"}]`:         "PT429 bucket 9000-01-01",
		`[{"name": "bucket", "key": "for good"}, {"name": "bucket", "key": "blocked"}]`:                                      "PT429 bucket never",
		`[{"name": "window", "key": "ann"}, {"name": "bucket", "key": "blocked", "count": 0}]`:                               "PT429 bucket 9000-01-01",
		`[{"name": "bucket", "key": "blocked"}, {"name": "none", "key": "ann"}]`:                                             "PT429 bucket, none never",
		`[{"name": "window", "key": "bob"}, {"name": "none", "key": "ann"}]`:                                                 "PT429 none never",
		`[{"name": "window", "key": "empty"}, {"name": "bucket", "key": "blocked"}]`:                                         "PT429 window, bucket 9000-01-01",
		`[{"name": "bucket", "key": "blocked"}, {"name": "window", "key": "empty"}, {"name": "sharded", "key": "half"}]`:     "PT429 bucket, window 9000-01-01",
		`[{"name": "sharded", "key": "half", "count": 9}, {"name": "none", "key": "ann"}]`:                                   "PT429 sharded, none never",
		`[{"name": "varying", "key": "ann", "rate": 3, "period": "1 day"}, {"name": "calendar", "key": "bob"}]`:              "varying 2, calendar 4",
		`[{"name": "bucket", "key": "blocked", "rate": 10, "period": "1 minute", "capacity": 20}]`:                           "PT429 bucket 9000-01-01",
		`[{"name": "window", "global": true}]`:                                                                               "window 6",
		`[{"name": "varying month", "key": "ann", "rate": 3, "period": "1 month", "kind": "calendar window"}]`:               "varying month 2",
		`[{"name": "fresh", "key": "ann", "rate": 9, "period": "1 minute", "max_reserved": 5, "capacity": 12, "count": 12}]`: "fresh 0",
	} {
		_, err := pool.Exec(t.Context(), "SELECT 1") // the pool works
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		err = pool.QueryRow(t.Context(), "SELECT string_agg(name || ' ' || floor(remaining), ', ') FROM ratelimit.consume_all($1::text::jsonb)", list).Scan(&got)
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
			var detail struct {
				RetryAt *time.Time `json:"retry_at"`
			}
			if err := json.Unmarshal([]byte(pgErr.Detail), &detail); err != nil {
				t.Fatalf("%s: %+v", list, pgErr)
			}
			until := "never"
			if detail.RetryAt != nil {
				until = detail.RetryAt.UTC().Format(time.DateOnly)
			}
			got = pgErr.Code + " " + strings.TrimPrefix(pgErr.Message, "rate limit exceeded: ") + " " + until
		} else if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", list, got, want)
		}
	}
	if rows := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.limits WHERE key = 'bob' AND name = 'window'"); rows != 0 {
		t.Error("a call with a blocked key has taken of the others")
	}
	// The plan that grants nothing does not end with an override of other numbers.
	if end := harness.Scan[*time.Time](t, pool, "SELECT retry_at FROM ratelimit.try('none', 'ann')"); end != nil {
		t.Errorf("a rate of 0 until %v", end)
	}
}

// TestADenialByPolicyLocksNothing: ratelimit.consume_all reads the other keys of a call with a blocked one, and does not wait for their rows.
func TestADenialByPolicyLocksNothing(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	harness.MustExec(t, pool, "SELECT ratelimit.block('bucket', 'blocked', forever => true), ratelimit.consume('window', 'ann')")
	other, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback(context.Background()) }()
	if _, err := other.Exec(t.Context(), "SELECT ratelimit.consume('window', 'ann')"); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	if _, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '1s'"); err != nil {
		t.Fatal(err)
	}
	_, err = tx.Exec(t.Context(), `SELECT ratelimit.consume_all('[{"name": "window", "key": "ann"}, {"name": "bucket", "key": "blocked"}]')`)
	if harness.SQLState(err) != "PT429" || !strings.Contains(err.Error(), "rate limit exceeded: bucket") {
		t.Errorf("%v, want a denial by bucket alone", err)
	}
}

// TestRatelimitAllRefusesWhatIsWrong: 22023, a text that says what is wrong, and nothing is written.
func TestRatelimitAllRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	pool := publishedPool(t)
	const good = `{"name": "bucket", "key": "secret"}, `
	for list, text := range map[string]string{
		`[]`:                 "requests must have at least one request",
		`{}`:                 "requests must be a JSON array, not",
		`null`:               "requests must be a JSON array, not",
		`"bucket"`:           "requests must be a JSON array, not",
		`[` + good + `7]`:    "request 2 must be a JSON object, not number",
		`[` + good + `null]`: "request 2 must be a JSON object, not null",
		`[[` + good + `7]]`:  "request 1 must be a JSON object, not array",
		`[` + good + `{}]`:   "rate limit NULL: no program has published it",
		`[{"key": "secret", "rate": 1, "period": "1 hour"}]`:                                                                                    "rate limit NULL: name must have 1 to 255 bytes, not",
		`[{"name": "bucket"}]`:                                                                                                                  "rate limit 'bucket': key must have 1 to 1024 bytes, not",
		`[{"name": "bucket", "key": ""}]`:                                                                                                       "key must have 1 to 1024 bytes, not",
		`[{"name": "bucket", "key": "secret", "global": true}]`:                                                                                 "key must be NULL with global => true",
		`[` + good + `{"name": "bucket", "key": null}]`:                                                                                         "request 2: key is null: leave it out",
		`[{"name": "bucket", "key": "secret", "rate": null}]`:                                                                                   "request 1: rate is null: leave it out",
		`[{"name": "bucket", "key": "secret", "count": null}]`:                                                                                  "count is null",
		`[{"name": "bucket", "key": 17}]`:                                                                                                       "key must be a JSON string, not number",
		`[{"name": ["bucket"], "key": "secret"}]`:                                                                                               "name must be a JSON string, not array",
		`[{"name": "bucket", "key": "secret", "count": "2"}]`:                                                                                   "count must be a JSON number, not string",
		`[{"name": "bucket", "key": "secret", "global": "false"}]`:                                                                              "global must be a JSON boolean, not string",
		`[{"name": "bucket", "key": "secret", "cost": 2}]`:                                                                                      "request 1: there is no field 'cost'",
		`[{"name": "bucket", "key": "secret", "cost": null}]`:                                                                                   "there is no field 'cost'",
		`[{"name": "bucket", "key": "secret", "now": "2026-07-01"}]`:                                                                            "there is no field 'now'",
		`[{"name": "bucket", "key": "secret", "most": 2}]`:                                                                                      "there is no field 'most'",
		`[{"name": "bucket", "key": "secret", "Key": "x"}]`:                                                                                     "there is no field 'Key'",
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 minutte"}]`:                                                                    `request 1: invalid input syntax for type interval: "1 minutte"`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "999999999999 years"}]`:                                                           `request 1: interval`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": 60}]`:                                                                             `period must be a JSON string, not number`,
		`[{"name": "x", "key": "secret", "rate": 1e400, "period": "1 hour"}]`:                                                                   `request 1: "1`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "count": 1e-400}]`:                                                      `request 1: "0.`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "count": -1}]`:                                                          `count must be 0 or between 1e-15 and 1e15, not -1`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "count": 2}]`:                                                           `count must be at most 1, not 2: more can never be granted`,
		`[{"name": "x", "key": "secret", "rate": 1}]`:                                                                                           `without months and years, not NULL`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "shards": 2.5}]`:                                                        `shards must be a whole number between 1 and 100, not 2.5`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "shards": 101}]`:                                                        `shards must be a whole number between 1 and 100, not 101`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "shards": 1e300}]`:                                                      `shards must be a whole number between 1 and 100, not`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "kind": "sliding"}]`:                                                    `kind must be 'token bucket', 'fixed window' or 'calendar window', not 'sliding'`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "kind": "fixed window", "start": "tomorrows"}]`:                         `request 1: rate limit 'x': start must be an instant with its offset, such as 2026-01-31T00:00:00Z, not 'tomorrows'`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "kind": "fixed window", "start": "2026-13-01 00:00Z"}]`:                 `date/time field value out of range`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 hour", "start": "2026-07-01 00:00Z"}]`:                                         `start must be NULL for a token bucket, not 20`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 month", "kind": "calendar window", "anchor": "01/02/2026"}]`:                   `2026-01-31 15:00, not '01/02/2026'`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 month", "kind": "calendar window", "anchor": "2026-02-31"}]`:                   `date/time field value out of range`,
		`[{"name": "x", "key": "secret", "rate": 1, "period": "1 month", "kind": "calendar window", "zone": "Moon/Base"}]`:                      `time zone`,
		`[{"name": "x", "key": "secret", "rate": 0, "period": "1 hour", "max_reserved": 1}]`:                                                    `capacity and max_reserved must be NULL or 0 with a rate of 0, not`,
		`[{"name": "varying", "key": "secret"}]`:                                                                                                `the numbers of this key are the program's`,
		`[` + good + `{"name": "typo", "key": "secret"}]`:                                                                                       `rate limit 'typo': no program has published it`,
		`[` + good + `{"name": "bucket", "key": "secret", "count": 2}]`:                                                                         `rate limit 'bucket': two requests have the same key`,
		`[` + good + `{"name": "window", "key": "secret"}, {"name": "bucket", "key": "secret", "rate": 10, "period": "1 min", "capacity": 20}]`: `rate limit 'bucket': two requests have the same key`,
		`[{"name": "open", "key": "secret"}, {"name": "open", "key": "secret"}]`:                                                                `rate limit 'open': two requests have the same key`,
		`[{"name": "open", "global": true}, {"name": "open", "global": true}]`:                                                                  `rate limit 'open': two requests have the same key`,
		`[{"name": "none", "key": "secret"}, {"name": "none", "key": "secret"}]`:                                                                `rate limit 'none': two requests have the same key`,
	} {
		_, err := pool.Exec(t.Context(), "SELECT ratelimit.consume_all($1::text::jsonb)", list)
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || pgErr.Code != "22023" || !strings.Contains(pgErr.Message, text) {
			t.Errorf("%s: %v, want 22023 and %q", list, err, text)
		} else if strings.Contains(fmt.Sprintf("%+v", *pgErr), "secret") {
			t.Errorf("%s: the error has the key: %+v", list, *pgErr)
		}
	}
	if _, err := pool.Exec(t.Context(), "SELECT ratelimit.consume_all(NULL)"); harness.SQLState(err) != "22023" {
		t.Errorf("NULL: %v", err)
	}
	if rows := harness.TableOf(t, pool); rows != "" {
		t.Errorf("something was written:\n%s", rows)
	}
}

// TestAStartInJSONIsOneInstant: in ratelimit.consume_all and ratelimit.publish, a start has its offset. A start that is another instant in each call
// would give each call a window of its own, and nothing would be denied.
func TestAStartInJSONIsOneInstant(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	call := func(function, start string) error {
		t.Helper()
		limit := `[{"name": "x", "kind": "fixed window", "rate": 5, "period": "1 hour", "start": "` + start + `"`
		if function == "ratelimit.consume_all" {
			return harness.Second(pool.Exec(t.Context(), "SELECT ratelimit.consume_all($1::text::jsonb)", limit+`, "key": "ann"}]`))
		}
		return harness.Second(pool.Exec(t.Context(), "SELECT ratelimit.publish('p', $1::text::jsonb)", limit+`}]`))
	}
	for function, before := range map[string]string{"ratelimit.consume_all": "request 1: ", "ratelimit.publish": ""} {
		for _, start := range []string{
			"now", "today", "tomorrow", "yesterday", "epoch", "infinity", "-infinity", "", " ", "2026-01-31", "01.02.2026", "1/2/2026 00:00Z", "12:00Z", "20260131T000000Z",
			"2026-01-31T00:00:00", "2026-01-31 00:00", "2026-01-31 00:00 Europe/Berlin", "2026-01-31 00:00 CET", "2026-01-31T00Z", "2026-01-31T00:00:00Z BC",
			"now 2026-01-31T00:00:00Z", "2026-01-31T24:00:00Z", "2026-01-31T00:00:60Z", "J2460000 00:00Z", "10000-01-01T00:00:00Z",
		} {
			err := call(function, start)
			want := before + "rate limit 'x': start must be an instant with its offset, such as 2026-01-31T00:00:00Z, not '" + start + "'"
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "22023" || pgErr.Message != want {
				t.Errorf("%s: %q: %v, want %q", function, start, err, want)
			}
		}
		for _, start := range []string{
			"2026-01-31T00:00:00Z", "2026-01-31T00:00Z", "2026-01-31 00:00Z", "2026-01-31T00:00:00.000Z", "2026-01-31T00:00:00+05:30", "2026-01-31 00:00:00-11",
			"2026-01-31T00:00:00+0530", harness.Scan[string](t, pool, "SELECT date_trunc('second', now())::text"), harness.Scan[string](t, pool, "SELECT to_jsonb(date_trunc('second', now())) #>> '{}'"),
			harness.Scan[string](t, pool, "SELECT to_jsonb(timestamptz '1880-06-01 12:00Z') #>> '{}' FROM set_config('timezone', 'Europe/Berlin', false)"), // +00:53:28
		} {
			if err := call(function, start); err != nil {
				t.Errorf("%s: %q: %v", function, start, err)
			}
			harness.MustExec(t, pool, "TRUNCATE ratelimit.limits; TRUNCATE ratelimit.definitions")
		}
		for _, start := range []string{"2026-01-31T00:00:00.5Z", harness.Scan[string](t, pool, "SELECT (date_trunc('second', now()) + interval '1 microsecond')::text")} {
			if err := call(function, start); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), "start must have no fraction of a second") {
				t.Errorf("%s: %q: %v", function, start, err)
			}
		}
	}
	// Go sends what is accepted.
	for _, start := range []time.Time{harness.Noon, time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC), time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), harness.Noon.In(time.FixedZone("", 5*3600+1800))} {
		limit := ratelimit.FixedWindow("x", 5, time.Hour, ratelimit.Start(start))
		harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "p", limit))
		if got := harness.Scan[time.Time](t, pool, "SELECT start FROM ratelimit.definitions WHERE current"); !got.Equal(start) {
			t.Errorf("%v is published as %v", start, got)
		}
	}
}

// TestRatelimitReset: SQL makes a key full again, and takes no key for another.
func TestRatelimitReset(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, `SELECT ratelimit.consume('l', 'ann', rate => 10, period => '1000 hours', shards => 3), ratelimit.consume('l', 'bob', rate => 10, period => '1000 hours'),
		ratelimit.consume('l', rate => 10, period => '1000 hours', global => true)`)
	for call, deleted := range map[string]int{"'l', 'nobody'": 0, "'other', 'ann'": 0} {
		if got := harness.Scan[int](t, pool, "SELECT ratelimit.reset("+call+")"); got != deleted {
			t.Errorf("ratelimit.reset(%s): %d rows, want %d", call, got, deleted)
		}
	}
	for call, text := range map[string]string{
		"'l'": "global => true", "'l', NULL": "global => true", "'l', ''": "global => true", "'', 'ann'": "name must have 1 to 255 bytes, not", "NULL, 'ann'": "name must have 1 to 255 bytes, not",
		"'l', 'ann', global => true": "key must be NULL with global => true", "repeat('x', 256), 'ann'": "name must have 1 to 255 bytes, not 256",
		"'l', 'ann', reason => repeat('x', 4097)": "the reason is longer than 4096 bytes", "'l', 'ann', who => repeat('x', 256)": "who is longer than 255 bytes",
	} {
		if _, err := pool.Exec(t.Context(), "SELECT ratelimit.reset("+call+")"); harness.SQLState(err) != "22023" || !strings.Contains(err.Error(), text) {
			t.Errorf("ratelimit.reset(%s): %v, want %q", call, err, text)
		}
	}
	if got := harness.Scan[int](t, pool, "SELECT ratelimit.reset('l', 'ann')"); got != 3 {
		t.Errorf("%d rows of ann, want 3", got)
	}
	if got := harness.Scan[int](t, pool, "SELECT ratelimit.reset('l', global => true)"); got != 1 {
		t.Errorf("%d rows of the global limit, want 1", got)
	}
	if rows := harness.TableOf(t, pool); !strings.HasPrefix(rows, "(l,bob,") || strings.Contains(rows, "\n") {
		t.Errorf("the table has\n%s", rows)
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides"); n != 0 {
		t.Errorf("%d rows of history without a reason or a name", n)
	}
}

// TestAResetLeavesATrace in the history, if it says who or why and deletes rows. No program takes the trace for an override.
func TestAResetLeavesATrace(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limit := ratelimit.TokenBucket("l", 10, 1000*time.Hour, ratelimit.Varies(2000*time.Hour))
	var problems []error
	settings := follow.Settings{DB: pool, OnError: func(err error) { problems = append(problems, err) }}
	limiter := follow.By(&ratelimit.Limiter{}, settings)
	load := func() {
		t.Helper()
		if err := follow.Load(t.Context(), limiter); err != nil {
			t.Fatal(err)
		}
	}
	load()
	for _, key := range []string{"ann", "bob", "cid"} {
		if _, err := limiter.Consume(t.Context(), pool, limit.Key(key).Count(10)); err != nil {
			t.Fatal(err)
		}
	}
	before := harness.Scan[string](t, pool, "SELECT pg_current_snapshot()::text")
	harness.MustExec(t, pool, "SELECT ratelimit.reset('l', 'ann', who => 'an operator')")
	harness.MustExec(t, pool, "SELECT ratelimit.reset('l', 'bob', reason => 'why not')")
	harness.MustExec(t, pool, "SELECT ratelimit.reset('l', 'nobody', who => 'an operator')")
	harness.MustExec(t, pool, "SELECT ratelimit.reset('l', 'cid')")
	harness.MustExec(t, pool, "SELECT ratelimit.consume('other', rate => 1, period => '1 hour', global => true), ratelimit.reset('other', global => true, who => 'an operator')")
	const trace = "SELECT string_agg(concat_ws(' ', name, coalesce(key, '-'), effect, until, reason, made_by = session_user, made_by = 'an operator', made_as = session_user, made_at > now() - interval '1 minute', removed_at IS NULL), ', ' ORDER BY id) FROM ratelimit.overrides"
	const want = "l ann reset -infinity  f t t t t, l bob reset -infinity why not t f t t t, other - reset -infinity  f t t t t"
	if got := harness.Scan[string](t, pool, trace); got != want {
		t.Errorf("the history has %s\nwant %s", got, want)
	}
	load() // what has changed
	if n := harness.Scan[int](t, pool, "SELECT coalesce(cardinality(ids), 0) FROM ratelimit._overrides('"+before+"', 0)"); n != 0 {
		t.Errorf("programs read %d traces", n)
	}
	follow.By(limiter, settings)
	load() // all
	if _, err := limiter.Consume(t.Context(), pool, limit.Key("ann").Count(10)); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", err, problems)
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM (VALUES ('l', 'ann'), ('l', 'new'), ('other', '')) AS k (name, key), ratelimit._in_force(k.name, ARRAY[k.key], clock_timestamp() - interval '10 years')"); n != 0 {
		t.Errorf("%d are in force", n)
	}
	if _, err := pool.Exec(t.Context(), "INSERT INTO ratelimit.overrides (name, key, effect) VALUES ('l', 'ann', 'reset')"); harness.SQLState(err) != "23514" {
		t.Errorf("a reset that is in force: %v", err)
	}
	if _, err := pool.Exec(t.Context(), "UPDATE ratelimit.overrides SET until = 'infinity'"); harness.SQLState(err) != "23514" {
		t.Errorf("a reset that is in force: %v", err)
	}
}

package attack_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// deciders are the functions of the engine that decide. They trust their callers, but must not grant on values that are not
// numbers. In Postgres, NaN is above all numbers, LEAST and GREATEST ignore NULL, and zero times infinity is NaN.
//
// Each decider is a statement with its arguments as {name}. Where it takes arrays, some also have the arguments of another
// limit. Its answer says whether anything was granted or changed.
var deciders = map[string]string{
	"consume":                     `SELECT granted FROM ratelimit._consume('limit', {key}, {rate}, {period}, {capacity}, {start}, {count}, {floor}, {now})`,
	"consume, expecting a denial": `SELECT granted FROM ratelimit._consume('limit', {key}, {rate}, {period}, {capacity}, {start}, {count}, {floor}, {now}, true)`,
	"consume sharded":             `SELECT granted FROM ratelimit._consume_sharded('sharded', {key}, {rate}, {period}, {capacity}, {start}, 2, {count}, {floor}, 0, 1, {now})`,
	"consume several, first": `SELECT granted FROM ratelimit._consume_several('{limit,other}', ARRAY[{key},{key}], ARRAY[{rate},10], ARRAY[{period},'1 min'],
		ARRAY[{capacity},10], ARRAY[{start},NULL], ARRAY[{count},1], ARRAY[{floor},0], {now})`,
	"consume several, second": `SELECT granted FROM ratelimit._consume_several('{before,limit}', ARRAY[{key},{key}], ARRAY[10,{rate}], ARRAY['1 min',{period}],
		ARRAY[10,{capacity}], ARRAY[NULL,{start}], ARRAY[1,{count}], ARRAY[0,{floor}], {now})`,
	"apply": `SELECT granted FROM ratelimit._apply('consume', '{limit,sharded}', ARRAY[{key},{key}], ARRAY[{rate},10], ARRAY[{period},'1 min'],
		ARRAY[{capacity},10], ARRAY[{start},NULL], '{1,2}', ARRAY[{count},1], ARRAY[{floor},0], '{0,0}', '{0,1}', false, {now})`,
	"apply, sharded": `SELECT granted FROM ratelimit._apply('consume', '{limit,sharded}', ARRAY[{key},{key}], ARRAY[10,{rate}], ARRAY['1 min',{period}],
		ARRAY[10,{capacity}], ARRAY[NULL,{start}], '{1,2}', ARRAY[1,{count}], ARRAY[0,{floor}], '{0,0}', '{0,1}', false, {now})`,
	"apply, reserving": `SELECT granted FROM ratelimit._apply('consume', '{limit,sharded}', ARRAY[{key},{key}], ARRAY[{rate},10], ARRAY[{period},'1 min'],
		ARRAY[{capacity},10], ARRAY[{start},NULL], '{1,2}', ARRAY[{count},1], ARRAY[{floor},0], '{0,0}', '{0,1}', true, {now})`,
	"apply, taking": `SELECT granted FROM ratelimit._apply('take', '{limit,sharded}', ARRAY[{key},{key}], ARRAY[{rate},10], ARRAY[{period},'1 min'],
		ARRAY[{capacity},10], ARRAY[{start},NULL], '{1,2}', ARRAY[{count},1], ARRAY[{floor},0], '{0,0}', '{0,1}', false, {now}, mosts => ARRAY[{most},5])`,
	"check": `SELECT granted FROM ratelimit._apply('check', '{limit}', ARRAY[{key}], ARRAY[{rate}], ARRAY[{period}],
		ARRAY[{capacity}], ARRAY[{start}], '{1}', ARRAY[{count}], ARRAY[{floor}], '{0}', '{0}', false, {now})`,
	"consume keys": `SELECT early > 0 FROM ratelimit._consume_keys('limit', ARRAY[{key}], {rate}, {period}, {capacity}, ARRAY[{count}], {now})`,
	"coalesce": `SELECT EXISTS (SELECT FROM unnest(value, after) AS u (value, after) WHERE value IS DISTINCT FROM after)
		FROM ratelimit._coalesce('{limit}', ARRAY[{rate}], ARRAY[{period}], ARRAY[{capacity}],
			ARRAY[{key}], '{1}', ARRAY[{start}], '{1}', ARRAY[{count}], ARRAY[{floor}], '{}', '{}', '{}', '{}', '{}', '{}', {now})`,
	"coalesce, asking": `SELECT EXISTS (SELECT FROM unnest(value, after) AS u (value, after) WHERE value IS DISTINCT FROM after)
		FROM ratelimit._coalesce('{limit}', ARRAY[{rate}], ARRAY[{period}], ARRAY[{capacity}],
			ARRAY[{key}], '{1}', ARRAY[{start}], '{}', '{}', '{}', '{0,0}', '{1,1}', '{1,1}', ARRAY[{start},{start}], ARRAY[{count},{count}], ARRAY[{floor},{floor}], {now})`,
	"refund": `SELECT false FROM ratelimit._refund('{limit}', ARRAY[{key}], ARRAY[{rate}], ARRAY[{period}], ARRAY[{capacity}], ARRAY[{start}],
		ARRAY[{count}], ARRAY[{taken}], ARRAY[{held}], ARRAY[{parts}], {taken_at}, {run_at}, {now})`,
	"pause": `SELECT ratelimit._pause('{limit}', ARRAY[{key}], ARRAY[{rate}], ARRAY[{period}], ARRAY[{capacity}], '{1}', ARRAY[{count}],
		timestamptz '2026-07-01 12:01Z', {now}) IS NOT NULL`,
	"move": `SELECT ratelimit._move('{other,limit}', ARRAY[{key},{key}], ARRAY[10,{rate}], ARRAY['1 min',{period}], ARRAY[12,{capacity}],
		ARRAY[{start},{start}], '{1,1}', {floor}, {now}) IS NOT NULL`,
	"move, from": `SELECT ratelimit._move('{limit,other}', ARRAY[{key},{key}], ARRAY[{rate},10], ARRAY[{period},'1 min'], ARRAY[{capacity},7],
		ARRAY[{start},{start}], '{1,1}', {floor}, {now}) IS NOT NULL`,
}

// decider fills in the arguments of a decider.
func decider(name string, arguments map[string]string) string {
	sql := deciders[name]
	for argument, value := range arguments {
		sql = strings.ReplaceAll(sql, "{"+argument+"}", value)
	}
	return sql
}

func TestNoGarbageIsGrantedOrStored(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	const noon = "timestamptz '2026-07-01 12:00Z'"
	valid := map[string]string{
		"rate": "10::float8", "period": "interval '1 min'", "capacity": "10::float8", "start": "NULL::timestamptz", "count": "1::float8", "floor": "0::float8", "now": noon,
		"taken": "5::float8", "held": "5::float8", "parts": "1::float8", "most": "3::float8", "taken_at": noon, "run_at": noon,
	}
	number := []string{"NULL::float8", "'NaN'::float8", "'Infinity'::float8", "'-Infinity'::float8", "-1::float8"}
	instant := []string{"timestamptz 'infinity'", "timestamptz '-infinity'"}
	garbage := map[string][]string{
		"rate": number, "capacity": number, "count": number, "taken": number, "parts": number, "most": number, "held": number[:4],
		"period": {"NULL::interval"}, "floor": number[:3], // a charge has the floor -Infinity
		"start": instant, "now": instant, "taken_at": append(instant, "NULL::timestamptz"), "run_at": append(instant, "NULL::timestamptz"),
	}
	var infiniteIntervals bool
	if err := harness.NewPool(t, 1).QueryRow(t.Context(), "SELECT current_setting('server_version_num')::int >= 170000").Scan(&infiniteIntervals); err != nil {
		t.Fatal(err)
	} else if infiniteIntervals {
		garbage["period"] = append(garbage["period"], "interval 'infinity'")
	}
	// A row with enough tokens, one with too few, one in debt, and no row.
	keys := map[string]string{"enough": "5", "empty": "0", "owes": "-5", "fresh": ""}
	kinds := map[string]string{"bucket": "NULL::timestamptz", "window": "timestamptz '2026-07-01 00:00Z'"}

	for name := range deciders {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 1)
			for key, value := range keys {
				if value != "" {
					_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits SELECT l, $1, s, shards, $2::float8 / shards, '2026-07-01 12:00Z'
						FROM (VALUES ('before', 1), ('limit', 1), ('other', 1), ('sharded', 2)) AS v (l, shards), generate_series(0, shards - 1) AS s`, key, value)
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			before := harness.TableOf(t, pool)
			unchanged := func(sql string) {
				t.Helper()
				if after := harness.TableOf(t, pool); after != before {
					t.Errorf("%s\nmade of\n%s\nthis\n%s", sql, before, after)
					before = after
				}
			}
			with := map[string]string{}
			for argument, values := range garbage {
				if !strings.Contains(deciders[name], "{"+argument+"}") {
					continue
				}
				for _, value := range values {
					for kind, start := range kinds {
						if argument == "start" && kind == "bucket" || kind == "window" && !strings.Contains(deciders[name], "{start}") {
							continue
						}
						for _, floor := range []string{"0::float8", "'-Infinity'::float8"} {
							for _, key := range slices.Sorted(maps.Keys(keys)) {
								maps.Copy(with, valid)
								with["start"], with["floor"], with["key"] = start, floor, "'"+key+"'"
								with[argument] = value
								sql := decider(name, with)
								var granted bool
								if err := pool.QueryRow(t.Context(), sql).Scan(&granted); err == nil && granted {
									t.Errorf("%s is granted", sql)
								} else if state := harness.SQLState(err); err != nil && (state == "" || nonsense(state)) {
									t.Errorf("%s: %v", sql, err)
								}
								unchanged(sql)
							}
						}
					}
				}
			}
			// The valid arguments must be granted. Otherwise the test shows nothing.
			for kind, start := range kinds {
				if kind == "window" && (!strings.Contains(deciders[name], "{start}") || strings.HasPrefix(name, "move")) { // a second move changes nothing
					continue
				}
				maps.Copy(with, valid)
				with["start"], with["key"] = start, "'enough'"
				var granted bool
				if err := pool.QueryRow(t.Context(), decider(name, with)).Scan(&granted); err != nil || granted != (name != "refund") {
					t.Errorf("%s of valid arguments: %v, %v", kind, granted, err)
				}
				after := harness.TableOf(t, pool)
				if (after == before) != (name == "check") {
					t.Errorf("%s: valid arguments changed\n%s\nto\n%s", kind, before, after)
				}
				before = after
			}
		})
	}
}

// nonsense reports whether a statement cannot run with any values. The test is then wrong.
func nonsense(state string) bool { return strings.HasPrefix(state, "42") || state == "22P02" }

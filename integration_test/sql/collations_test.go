package sql_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// TestKeysOfEveryCollation calls every function for SQL by hand, and the trigger of docs/sql.md, with names and keys from columns that have a
// collation of their own. They mean what literals mean.
func TestKeysOfEveryCollation(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	pool := harness.NewPool(t, 2)
	harness.MustExec(t, pool, `CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
	calls := map[string]string{ // {n}: a name, {k}: a key
		"ratelimit.consume":      `SELECT remaining = 8 FROM ratelimit.consume({n}, {k}, rate => 9, period => '1 hour')`,
		"ratelimit.try":          `SELECT granted FROM ratelimit.try({n}, {k}, rate => 10, period => '1 hour')`,
		"ratelimit.reserve":      `SELECT retry_at >= at FROM ratelimit.reserve({n}, {k}, rate => 10, period => '1 hour')`,
		"ratelimit.take":         `SELECT taken = 2 FROM ratelimit.take({n}, {k}, most => 2, rate => 10, period => '1 hour')`,
		"ratelimit.consume_all":  `SELECT remaining = 8 FROM ratelimit.consume_all(jsonb_build_array(jsonb_build_object('name', {n}, 'key', {k}, 'rate', 9, 'period', '1 hour')))`,
		"ratelimit.key":          `SELECT ratelimit.key({n}, {k}) = {n} || '|' || {k} COLLATE "C"`,
		"ratelimit.key_parts":    `SELECT (ratelimit.key_parts({k}))[1] = {k}`,
		"ratelimit.keys":         `SELECT count(*) = 0 FROM ratelimit.keys({n}, rate => 10, period => '1 hour', keys => ARRAY[{k}])`,
		"ratelimit.reset":        `SELECT ratelimit.reset({n}, {k}) = 0`,
		"ratelimit.hold":         `SELECT NOT repeated FROM ratelimit.hold({n}, {k}, {k}, ttl => '1 hour')`,
		"ratelimit.release":      `SELECT ratelimit.release({n}, {k}, token, reason => {k}, who => {n}) FROM ratelimit.hold({n}, {k}, {n}, ttl => '1 hour')`,
		"ratelimit.hold_many":    `SELECT ratelimit.hold_many('slots', {k}, ARRAY[{k}, 'a']) = 2 FROM ratelimit.publish('slots', '[{"name": "slots", "kind": "slots", "capacity": 5}]')`,
		"ratelimit.release_many": `SELECT ratelimit.release_many({n}, {k}, ARRAY[{k}]) = 0`,
		"ratelimit.recount":      `SELECT ratelimit.recount('slots', {k}) >= 0 FROM ratelimit.publish('slots', '[{"name": "slots", "kind": "slots", "capacity": 5}]')`,
		"ratelimit.holds":        `SELECT count(*) = 0 FROM ratelimit.holds({n}, {k}) WHERE id = {k}`,
		"ratelimit.pause":        `SELECT ratelimit.pause({n}, {k}, until => now() + interval '1 minute', rate => 10, period => '1 hour') IS NOT NULL`,
		"ratelimit.resume":       `SELECT NOT ratelimit.resume({n}, {k})`,
		"ratelimit.sweep":        `SELECT deleted = 0 FROM ratelimit.sweep({n}, rate => 10, period => '1 hour', first => {k})`,
		"ratelimit.override":     `SELECT ratelimit.override({n}, {k}, rate => 5, reason => {k}, who => {n}, forever => true) > 0`,
		"ratelimit.block":        `SELECT ratelimit.block({n}, {k}, reason => {k}, who => {n}, forever => true) > 0`,
		"ratelimit.unlimited":    `SELECT ratelimit.unlimited({n}, {k}, reason => {k}, who => {n}, forever => true) > 0`,
		"ratelimit.unblock":      `SELECT ratelimit.unblock({n}, {k}, who => {n}) = 1 FROM ratelimit.block({n}, {k}, forever => true)`,
		"ratelimit.restore":      `SELECT ratelimit.restore({n}, {k}, who => {n}) = 1 FROM ratelimit.override({n}, {k}, rate => 5, forever => true)`,
		"ratelimit.usage":        `SELECT count(*) = 0 FROM ratelimit.usage({n})`,
		"ratelimit.denials":      `SELECT count(*) = 0 FROM ratelimit.denials({n})`,
		"ratelimit.publish":      `SELECT count(*) > 0 FROM ratelimit.publish({k}, '[{"name": "l", "kind": "token bucket", "rate": 10, "period": "1 hour"}]')`,
		"ratelimit.withdraw":     `SELECT ratelimit.withdraw({k}) = 1 FROM ratelimit.publish({k}, '[{"name": "l", "kind": "token bucket", "rate": 10, "period": "1 hour"}]')`,
		"ratelimit.add":          `SELECT 1 > 0`, // takes no text
		"ratelimit.grant":        `SELECT 1 > 0`, // names a role
		"ratelimit.schema":       `SELECT 1 > 0`,
		"ratelimit.refuse":       `SELECT 1 > 0`, // a trigger, below
		// The same by what was published, by shards, windows and calendars, and several at once.
		"ratelimit, published":         `SELECT remaining = 9 FROM ratelimit.consume({n}, {k})`,
		"ratelimit.try, published":     `SELECT granted FROM ratelimit.try({n}, {k})`,
		"ratelimit.keys, published":    `SELECT count(*) = 0 FROM ratelimit.keys({n}) WHERE {k} <> ''`,
		"ratelimit.keys, those":        `SELECT count(*) = 0 FROM ratelimit.keys({n}, keys => ARRAY[{k}])`,
		"ratelimit.sweep, published":   `SELECT deleted = 0 FROM ratelimit.sweep({n}, first => {k})`,
		"ratelimit.pause, published":   `SELECT ratelimit.pause({n}, {k}, until => now() + interval '1 minute') IS NOT NULL`,
		"ratelimit, sharded":           `SELECT remaining = 8 FROM ratelimit.consume({n}, {k}, rate => 9, period => '1 hour', shards => 3)`,
		"ratelimit, window":            `SELECT remaining = 8 FROM ratelimit.consume({n}, {k}, rate => 9, period => '1 hour', kind => {w})`,
		"ratelimit, calendar":          `SELECT remaining = 8 FROM ratelimit.consume({n}, {k}, rate => 9, period => '1 month', kind => {c}, zone => {z})`,
		"ratelimit.reserve, calendar":  `SELECT retry_at >= at FROM ratelimit.reserve({n}, {k}, count => 20, rate => 9, period => '1 month', kind => {c}, zone => {z})`,
		"ratelimit.restore, an effect": `SELECT ratelimit.restore({n}, {k}, {e}) = 1 FROM ratelimit.block({n}, {k}, forever => true)`,
	}
	public := harness.Scan[[]string](t, pool, `SELECT array_agg(DISTINCT 'ratelimit.' || proname) FROM pg_proc WHERE pronamespace = 'ratelimit'::regnamespace AND proname NOT LIKE '\_%'`)
	for _, name := range public {
		if calls[name] == "" {
			t.Errorf("%s is not called", name)
		}
	}
	text := map[string]string{"{n}": "l", "{k}": "User-17", "{w}": "fixed window", "{c}": "calendar window", "{z}": "Europe/Berlin", "{e}": "block"}
	for _, collation := range []string{`"en-x-icu"`, "folding", `"POSIX"`} {
		// Each text is a literal or a column: all, or one of them alone.
		for _, columns := range [][]string{{"{n}", "{k}", "{w}", "{c}", "{z}", "{e}"}, {"{n}"}, {"{k}"}, {"{w}", "{c}", "{z}", "{e}"}} {
			for name, sql := range calls {
				from := ""
				for placeholder, value := range text {
					value = "'" + value + "'"
					if slices.Contains(columns, placeholder) {
						column := "column_" + strings.Trim(placeholder, "{}")
						from += fmt.Sprintf(", %s::text COLLATE %s AS %s", value, collation, column)
						value = column
					}
					sql = strings.ReplaceAll(sql, placeholder, value)
				}
				tx, err := pool.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				publish := `SELECT ratelimit.publish('p', '[{"name": "l", "kind": "token bucket", "rate": 10, "period": "1 hour"}]');`
				if strings.Contains(sql, "period =>") || strings.Contains(sql, "'period', ") { // its own numbers
					publish = ""
				}
				if _, err := tx.Exec(t.Context(), publish+"CREATE TEMP TABLE texts ON COMMIT DROP AS SELECT 1 AS one"+from); err != nil {
					t.Fatal(err)
				}
				// A column of a table has its collation implicitly.
				var ok bool
				err = tx.QueryRow(t.Context(), "SELECT ok FROM texts CROSS JOIN LATERAL ("+sql+") AS c (ok)", pgx.QueryExecModeExec).Scan(&ok)
				if err != nil || !ok {
					t.Errorf("%s, columns %v COLLATE %s: %v, %v", name, columns, collation, ok, err)
				}
				if err := tx.Rollback(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}

		// The trigger of the docs, and a guard.
		harness.MustExec(t, pool, strings.NewReplacer("tenant text NOT NULL", "tenant text COLLATE "+collation+" NOT NULL", "CREATE TABLE", "DROP TABLE IF EXISTS messages; CREATE TABLE",
			"CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").Replace(harness.DocSQL(t, "docs/sql.md", "CREATE TRIGGER limit_messages")))
		harness.MustExec(t, pool, "DELETE FROM ratelimit.limits; INSERT INTO messages SELECT 'acme', 'x' FROM generate_series(1, 150); INSERT INTO messages VALUES ('b', 'x')")
		if _, err := pool.Exec(t.Context(), "INSERT INTO messages SELECT 'acme', 'x' FROM generate_series(1, 60)"); harness.SQLState(err) != "PT429" {
			t.Errorf("the trigger, COLLATE %s: %v, want PT429", collation, err)
		}
		harness.MustExec(t, pool, strings.NewReplacer("ratelimit.consume('messages', tenant, count => n, rate => 100, period => '1 minute', capacity => 200)", "ratelimit.consume('published', tenant)").Replace(
			strings.NewReplacer("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").Replace(strings.Split(harness.DocSQL(t, "docs/sql.md", "CREATE TRIGGER limit_messages"), "\n\n")[1])))
		harness.MustExec(t, pool, `SELECT ratelimit.publish('p', '[{"name": "published", "kind": "token bucket", "rate": 10, "period": "1 hour"}]'); INSERT INTO messages VALUES ('acme', 'x')`)
		// Keys stay distinct, byte by byte.
		if n := harness.Scan[int](t, pool, "WITH t (k) AS (VALUES ('Ann' COLLATE "+collation+"), ('ann'), ('ANN')) SELECT count(*) FROM t, ratelimit.consume('own', k, rate => 1, period => '1 hour')"); n != 3 {
			t.Errorf("%d of 3 keys", n)
		}
	}
}

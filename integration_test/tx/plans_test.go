package tx_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// grownTables has 100,000 rows of each table, as after years. Of the limit l, 80,000 overrides have ended: 20,000 of them of one key and 10,000 of
// every key.
const grownTables = `
INSERT INTO ratelimit.definitions SELECT program, CASE WHEN i < 50 THEN name ELSE name || i END, definition, kind, rate, period, capacity, max_reserved, start, shards, zone, anchor, varies, i >= 50, published_at, list || i
  FROM ratelimit.definitions, generate_series(1, 500) AS i;
INSERT INTO ratelimit.limits SELECT n, i::text, s, CASE n WHEN 's' THEN 2 ELSE 1 END, 10, now() - interval '1 minute'
  FROM generate_series(1, 25000) AS i, (VALUES ('l', 0), ('m', 0), ('s', 0), ('s', 1)) AS v (n, s);
INSERT INTO ratelimit.limits VALUES ('slots', '', 0, 1, -5000, now()), ('forever', '', 0, 1, -5000, now());
INSERT INTO ratelimit.holds SELECT 'own', i::text, 'job', 'held', 'slots', md5(i::text)::uuid, 1, now(), 0, 1, now() + interval '1 hour' FROM generate_series(1, 50000) AS i;
INSERT INTO ratelimit.overrides (name, key, effect, until, made_at)
SELECT 'l', CASE WHEN i <= 50000 THEN i::text WHEN i <= 70000 THEN '5' END, 'block', now() - interval '1 day' - i * interval '1 second', now() - interval '2 days' - i * interval '1 second'
  FROM generate_series(1, 80000) AS i;
INSERT INTO ratelimit.overrides (name, key, effect, rate, until) SELECT 'm', i::text, 'numbers', 20, now() + interval '1 day' FROM generate_series(1, 20000) AS i;
INSERT INTO ratelimit.usage SELECT CASE n WHEN 1 THEN 'l' ELSE n::text END, date_trunc('minute', now()) - i * interval '1 minute', 1, 1, 0, 1, 0, 0 FROM generate_series(1, 100) AS n, generate_series(1, 1000) AS i;
INSERT INTO ratelimit.denials SELECT CASE n WHEN 1 THEN 'l' ELSE n::text END, date_trunc('hour', now(), 'UTC') - i * interval '1 hour', k::text, 1, 1, now() FROM generate_series(1, 4) AS n, generate_series(1, 500) AS i, generate_series(1, 50) AS k`

// grownKeys has one key with 5,000 live holds beside 40,000 that are settled, and one with 5,000 that have no end. Statistics from before do not know them.
const grownKeys = `
INSERT INTO ratelimit.holds SELECT 'slots', '', i::text, 'held', 'slots', md5(i::text)::uuid, 1, now(), 0, 1, now() + interval '1 hour' FROM generate_series(1, 5000) AS i ORDER BY md5(i::text);
INSERT INTO ratelimit.holds SELECT 'slots', '', 's' || i, 'settled', 'slots', md5(i::text)::uuid, 1, now(), 0, 1, now() + interval '1 hour' FROM generate_series(1, 40000) AS i ORDER BY md5(i::text);
INSERT INTO ratelimit.holds SELECT 'forever', '', i::text, 'held', 'slots', NULL, 1, now(), 0, 1, 'infinity' FROM generate_series(1, 5000) AS i ORDER BY md5(i::text)`

// few is the most pages of 8 KB that a statement for a few keys may read. To look up a row takes four or five.
const few = 150

// grownReads are the statements that the library sends, by name and with their arguments, and SQL by hand, the tool and the page, which have none. Each may
// read so many pages.
var grownReads = []struct {
	name, args string
	most       int
}{
	{"Apply", `'consume', '{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}', false, NULL, false, NULL, NULL, NULL, NULL, NULL`, few},
	{"Apply", `'check', '{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}', false, NULL, false, NULL, NULL, NULL, NULL, NULL`, few},
	{"ApplyOne", `'consume', 'l', '5', '{10}', '{1 min}', '{10}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}', false, NULL, false, NULL, NULL, NULL, NULL, NULL`, few},
	{"Block", `'l', '5', NULL, '1 hour', '', 'ann', false, false, false`, few},
	{"Coalesce", `'{l}', '{10}', '{1 min}', '{10}', '{4,5,6}', '{1,1,1}', '{}', '{1,1,1}', '{1,1,1}', '{0,0,0}', '{}', '{}', '{}', '{}', '{}', '{}', NULL, NULL, NULL, NULL`, few},
	{"Coalesce", `'{l}', '{10}', '{1 min}', '{10}', '{5}', '{1}', '{}', '{}', '{}', '{}', '{1,2}', '{1,1}', '{1,1}', '{NULL,NULL}', '{1,2}', '{0,0}', NULL, NULL, NULL, NULL`, few},
	{"Consume", `'l', '5', 10, '1 min', 10, NULL, 1, 0, NULL, false, false, NULL`, few},
	{"ConsumeKeys", `'l', '{4,5,6}', 10, '1 min', 10, '{1,1,20}', NULL`, few},
	{"ConsumeSeveral", `'{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{0,0}', NULL, false, NULL, NULL, NULL`, few},
	{"ConsumeSharded", `'s', '5', 10, '1 min', 10, NULL, 2, 1, 0, 0, 1, NULL, false, NULL`, few},
	{"Database", ``, few},
	{"Each", `'{1}', '{l}', '{10}', '{1 min}', '{10}', '{NULL}', '{1}', '{0}', '{0}', '{0}', '{5}', '{1}', NULL, NULL, NULL, NULL`, few},
	{"Extend", `NULL, '{slots,slots}', '{"",""}', '{4000,17}', ARRAY[md5('4000'),md5('17')]::uuid[], '{1 min,1 min}'`, few},
	{"Hold", `'new', md5('x')::uuid, '1 min', 1, '{slots}', '{slots}', '{""}', '{0}', '{1 s}', '{0}', '{NULL}', '{1}', '{1}', '{-6000}', '{0}', '{0}', NULL, NULL, NULL, NULL`, few},
	{"MaySweep", ``, few},
	{"Move", `'{l,l}', '{5,6}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', 0, NULL, NULL, NULL, NULL`, few},
	{"Override", `'l', '5', 10, NULL, NULL, NULL, '1 hour', '', 'ann', false, false, false`, few},
	{"Overrides", `pg_current_snapshot(), 0`, few},
	{"Pause", `'{l}', '{5}', '{10}', '{1 min}', '{10}', '{1}', '{0}', NULL, '1 hour'`, few},
	{"Publish", `'other', '[{"name": "l", "kind": "token bucket", "rate": 10, "period": "1 minute"}]', true`, 600},
	{"RecordUsage", `'{1}', ARRAY[date_trunc('minute', now())], '{1}', '{1}', '{1}', '{1}', '{1}', '{1}', '{1}', ARRAY[date_trunc('hour', now(), 'UTC')], '{x}', '{1}', '{1}', ARRAY[now()], '30 days'`, few},
	{"Refund", `'{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{9,9}', '{1,1}', now(), now(), NULL, NULL, NULL, NULL`, few},
	{"RefundOne", `'l', '5', '{10}', '{1 min}', '{10}', '{NULL}', '{1}', '{1}', '{9}', '{1}', now(), now(), NULL, NULL, NULL, NULL`, few},
	{"Reset", `'{l}', '{5}'`, few},
	{"Restore", `'m', '5', 'ann', false, false`, few},
	{"Resume", `'{l}', '{5}', NULL`, few},
	{"Settle", `false, '4000', md5('4000')::uuid, 1, '{false}', '{slots}', '{""}', '{0}', '{1 s}', '{0}', '{NULL}', '{1}', '{0}', NULL, NULL, NULL, NULL`, few},
	{"Settle", `true, '4000', NULL, 1, '{false}', '{forever}', '{""}', '{0}', '{1 s}', '{0}', '{NULL}', '{1}', '{0}', NULL, NULL, NULL, NULL`, few},
	{"Sweep", `'l', 'token bucket', 10, NULL, '1 min', 10, NULL, '', NULL, NULL`, 3000},
	{"SweepTurn", `'l', 'begin', '5 min', NULL`, few},
	{"SweepHolds", `'', '', '', NULL`, 5000},
	{"Unblock", `'l', '5', 'ann', false, false`, few},
	{"UpdateBucket", `10, '1 min', 10, 1, 'l', '5', 0`, few},
	{"UpdateCalendar", `10, '1 month', 10, '2026-01-01', ARRAY['2026-01-01'::timestamptz], 1, 'l', '5', 0`, few},
	{"UpdateHold", `'1 min', NULL, NULL, 10, 10, 1, md5('x')::uuid, '1 min', 'l', '5', 0, 'new', 'held', 'tokens'`, few},
	{"UpdateSettle", `'slots', '', '4000', md5('4000')::uuid, 1`, few},
	{"UpdateWindow", `'1 min', '2026-01-01', 10, 10, 1, 'l', '5', 0`, few},

	{"SELECT ratelimit.try('l', '5')", "", few},
	{"SELECT ratelimit.try('l', '5', rate => 10, period => '1 minute')", "", few},
	{"SELECT ratelimit.try('m', '5')", "", few},
	{"SELECT ratelimit.hold('own', '5', 'new', ttl => '1 minute')", "", few},
	{"SELECT ratelimit.release('forever', id => '4000', global => true)", "", few},
	{"SELECT ratelimit.release('slots', id => '4000', global => true, who => 'ann')", "", few},
	{"SELECT ratelimit.release_many('forever', ids => '{4000,17}', global => true)", "", few},
	{"SELECT ratelimit.hold_many('own', '5', ids => '{a,b}')", "", few},
	{"SELECT ratelimit.keys('l', keys => '{5,6}')", "", few},
	{"SELECT ratelimit.denials('l')", "", few},
	{"SELECT ratelimit.usage('l')", "", few},
	{"SELECT ratelimit.usage()", "", 7000},
	{"SELECT ratelimit.holds('own', '5')", "", few},
	{"SELECT ratelimit.holds('slots', global => true)", "", 15000}, // two pages or three for each that is held, with dead ones, and none that is settled
	{"SELECT ratelimit._free_slots('forever', '', 5000, now(), 1)", "", few},
	{"SELECT ratelimit._in_force('l', '{5,6,NULL}', now())", "", few},
	{"SELECT ratelimit._in_force('l', NULL, now(), 100)", "", 1500},
	{"SELECT ratelimit._in_force('m', NULL, now(), 100)", "", few},
	{"SELECT ratelimit._sweep_numbers('l', NULL, NULL, 'token bucket', NULL, NULL, NULL)", "", 500},
	{"SELECT ratelimit._stored_keys('l', '', NULL, 10)", "", few},
}

const allTables = "ratelimit.limits ratelimit.holds ratelimit.definitions ratelimit.overrides ratelimit.usage ratelimit.denials ratelimit.sweeps"

// prepareReads returns a connection that has prepared the statements of grownReads, in a database that knows their limits.
func prepareReads(t *testing.T) (conn *pgx.Conn, exec func(sql string)) {
	t.Helper()
	conn = harness.Acquire(t, harness.NewPool(t, 1))
	exec = func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	known := map[string]bool{}
	for _, row := range grownReads {
		known[row.name] = true
	}
	for _, statement := range libraryStatements(t) {
		if !known[statement.name] {
			t.Errorf("%s has no row", statement.name)
		}
		exec("PREPARE " + statement.name + " AS " + statement.sql)
	}
	exec(`SELECT ratelimit.publish('api', '[{"name": "l", "kind": "token bucket", "rate": 10, "period": "1 minute"}, {"name": "m", "kind": "token bucket", "rate": 10, "period": "1 minute"},
  {"name": "slots", "kind": "slots", "capacity": 5000}, {"name": "forever", "kind": "slots", "capacity": 5000}, {"name": "own", "kind": "slots", "capacity": 5000}]')`)
	return conn, exec
}

func callOf(name, args string) string {
	switch {
	case strings.HasPrefix(name, "SELECT "):
		return name
	case args == "":
		return "EXECUTE " + name
	}
	return "EXECUTE " + name + "(" + args + ")"
}

// Before 18, a plan that enable_seqscan = off cannot help seems so dear that the server compiles it, which takes half a second.
func TestNoStatementIsCompiled(t *testing.T) {
	t.Parallel()
	conn, exec := prepareReads(t)
	for _, row := range grownReads {
		exec("BEGIN")
		exec(callOf(row.name, row.args))
		exec("ROLLBACK")
		var compiles bool
		if err := conn.QueryRow(t.Context(), "SELECT pg_read_file('/proc/self/maps') LIKE '%llvmjit%'").Scan(&compiles); err != nil || compiles {
			t.Fatalf("%s %s: compiled: %t, %v", row.name, row.args, compiles, err)
		}
	}
}

// TestEveryStatementReadsLittle: whatever the statistics say, each statement reads what it needs, by a plan that it has made and keeps, and by one for
// its arguments. "planned when small": the plan is from before, when the tables were empty.
func TestEveryStatementReadsLittle(t *testing.T) {
	t.Parallel()
	conn, exec := prepareReads(t)
	tables := slices.Collect(strings.FieldsSeq(allTables))
	for _, table := range tables {
		exec(harness.WithoutAutovacuum(table))
	}
	pages := func(name, args string) (n int) {
		exec("BEGIN")
		defer exec("ROLLBACK")
		sql := callOf(name, args)
		var text string
		var explained []struct {
			Plan map[string]any
		}
		if err := conn.QueryRow(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT JSON) "+sql, pgx.QueryExecModeSimpleProtocol).Scan(&text); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		if err := json.Unmarshal([]byte(text), &explained); err != nil {
			t.Fatal(err)
		}
		hit, _ := explained[0].Plan["Shared Hit Blocks"].(float64)
		read, _ := explained[0].Plan["Shared Read Blocks"].(float64)
		return int(hit + read)
	}
	all := func(when string) {
		for _, row := range grownReads {
			n := pages(row.name, row.args) // which plans
			for try := 0; try < 10 && (try == 0 || n > row.most); try++ {
				n = pages(row.name, row.args) // the schemas of other tests may make it read the catalog again
			}
			if n > row.most && when != "" {
				t.Errorf("%s: %s %s: %d pages were read, want at most %d", when, row.name, row.args, n, row.most)
			}
		}
	}
	analyze := "ANALYZE " + strings.Join(tables, ", ")
	exec("SET plan_cache_mode = force_generic_plan")
	exec(analyze)
	all("")
	exec(grownTables)
	exec(grownKeys)
	all("planned when small")
	for _, mode := range []string{"generic", "custom"} {
		exec("SET plan_cache_mode = force_" + mode + "_plan")
		for _, age := range []struct{ name, sql string }{
			{"analyzed full", analyze},
			{"analyzed before a key grew", "BEGIN; DELETE FROM ratelimit.holds WHERE name IN ('slots', 'forever'); " + analyze + "; " + grownKeys + "; COMMIT"},
			{"never analyzed", `DELETE FROM pg_statistic WHERE starelid = ANY ('{` + strings.Join(tables, ",") + `}'::regclass[]);
				UPDATE pg_class SET relpages = 0, reltuples = -1 WHERE oid = ANY ('{` + strings.Join(tables, ",") + `}'::regclass[])`},
			{"analyzed empty", `UPDATE pg_class SET relpages = 0, reltuples = 0 WHERE oid = ANY ('{` + strings.Join(tables, ",") + `}'::regclass[])`},
		} {
			exec(age.sql)
			exec("DISCARD PLANS")
			all(age.name + ", " + mode)
		}
	}
}

// libraryStatements are those of internal/dbsqlc, with $1 and so on.
func libraryStatements(t *testing.T) (list []struct{ name, sql string }) {
	t.Helper()
	files, err := filepath.Glob("../../internal/dbsqlc/*.sql.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile("(?s)const (\\w+) = `(.*?)`").FindAllStringSubmatch(string(text), -1) {
			list = append(list, struct{ name, sql string }{match[1], match[2]})
		}
	}
	return list
}

// In SERIALIZABLE, a transaction that reads more rows than it takes from conflicts with others. In a table this small, the
// planner thinks that reading all rows is as good as an index lookup.
func TestDifferentKeysDoNotConflictInATinyTable(t *testing.T) {
	t.Parallel()
	shardedLimit := ratelimit.TokenBucket("sharded", 1e6, time.Hour, ratelimit.Shards(2))
	limit := ratelimit.TokenBucket("limit", 1e6, time.Hour)
	for _, rows := range []int{0, 1, 2} { // when the table was analyzed
		t.Run(fmt.Sprint(rows, " rows"), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 2)
			var limiter ratelimit.Limiter
			conns := []*pgx.Conn{harness.Acquire(t, pool), harness.Acquire(t, pool)}
			for _, sql := range []string{
				fmt.Sprintf(`INSERT INTO ratelimit.limits SELECT 'limit', 'x' || i, 0, 1, 5, now() FROM generate_series(1, %d) AS i`, rows),
				`VACUUM ANALYZE ratelimit.limits`,
			} {
				if _, err := conns[0].Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			ways := map[string]func(key string) []ratelimit.Request{
				"one": func(key string) []ratelimit.Request { return []ratelimit.Request{limit.Key(key)} },
				"several": func(key string) []ratelimit.Request {
					return []ratelimit.Request{limit.Key(key, "a"), limit.Key(key, "b")}
				},
				"sharded": func(key string) []ratelimit.Request { return []ratelimit.Request{shardedLimit.Key(key)} },
			}
			for _, requests := range ways { // so that the rows exist and the plans are made
				for i, conn := range conns {
					for range 7 {
						if _, err := limiter.Consume(t.Context(), conn, requests(fmt.Sprint(i))...); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			for name, requests := range ways {
				conflicts := 0
				for range 20 {
					var txs []pgx.Tx
					var failed error
					for i, conn := range conns {
						tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
						if err != nil {
							t.Fatal(err)
						}
						txs = append(txs, tx)
						_, err = limiter.Consume(t.Context(), tx, requests(fmt.Sprint(i))...)
						failed = errors.Join(failed, err)
					}
					for _, tx := range txs {
						failed = errors.Join(failed, tx.Commit(t.Context()))
					}
					if harness.SQLState(failed) == "40001" {
						conflicts++
					} else if failed != nil {
						t.Fatal(failed)
					}
				}
				if conflicts > 1 { // a row that moves to another page writes to the index, where keys share leaves
					t.Errorf("%s: %d of 20 pairs of transactions on different keys conflicted", name, conflicts)
				}
			}
		})
	}
}

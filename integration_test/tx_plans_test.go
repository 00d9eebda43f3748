package integration_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// A connection plans the functions' statements once. A plan made on an almost empty table must still be good when the table
// is full: it must look rows up by their keys, not read the whole index.
func TestPlansMadeOnAnEmptyTableAreGoodOnAFullOne(t *testing.T) {
	t.Parallel()
	conn := acquire(t, newPool(t, 1))
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	calls := map[string]string{
		"one":       `SELECT _ratelimit_consume('l', '5', 10, '1 min', 10, NULL, 1, 0)`,
		"sharded":   `SELECT _ratelimit_consume_sharded('s', '5', 10, '1 min', 10, NULL, 2, 1, 0, 0, 1)`,
		"several":   `SELECT _ratelimit_consume_several('{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{0,0}')`,
		"applied":   `SELECT _ratelimit_apply('consume', '{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}')`,
		"check":     `SELECT _ratelimit_apply('check', '{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}')`,
		"keys":      `SELECT _ratelimit_consume_keys('l', '{4,5,6}', 10, '1 min', 10, '{1,1,20}')`,
		"coalesced": `SELECT _ratelimit_coalesce('{l}', '{10}', '{1 min}', '{10}', '{4,5,6}', '{1,1,1}', '{}', '{1,1,1}', '{1,1,1}', '{0,0,0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		"mixed":     `SELECT _ratelimit_coalesce('{l}', '{10}', '{1 min}', '{10}', '{5}', '{1}', '{}', '{}', '{}', '{}', '{1,2}', '{1,1}', '{1,1}', '{NULL,NULL}', '{1,2}', '{0,0}')`,
	}
	for _, rows := range []string{"0", "1", "3", "40"} { // when the plans are made
		exec(`TRUNCATE rate_limits`)
		exec(`INSERT INTO rate_limits SELECT 'l', i::text, 0, 1, 10, now() FROM generate_series(1, ` + rows + `) AS i`)
		exec(`ANALYZE rate_limits`)
		for _, sql := range calls {
			exec(sql)
		}
		exec(`INSERT INTO rate_limits SELECT n, i::text, s, CASE n WHEN 's' THEN 2 ELSE 1 END, 10, now()
			FROM generate_series(1, 5000) AS i, (VALUES ('l', 0), ('m', 0), ('s', 0), ('s', 1)) AS v (n, s) ON CONFLICT DO NOTHING`)
		counted := func() (scans, read int64) {
			err := conn.QueryRow(t.Context(), `SELECT sum(seq_scan), sum(coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables
				WHERE relid = 'rate_limits'::regclass OR relid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'rate_limits'::regclass)`).Scan(&scans, &read)
			if err != nil {
				t.Fatal(err)
			}
			return scans, read
		}
		for name, sql := range calls {
			exec("BEGIN")
			scansBefore, readBefore := counted()
			exec(sql)
			scans, read := counted()
			exec("ROLLBACK")
			if scans -= scansBefore; scans > 0 {
				t.Errorf("planned at %s rows, %s: %d sequential scans", rows, name, scans)
			}
			if read -= readBefore; read < 1 || read > 50 {
				t.Errorf("planned at %s rows, %s: %d rows read by index", rows, name, read)
			}
		}
	}
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
			pool := newPool(t, 2)
			var limiter ratelimit.Limiter
			conns := []*pgx.Conn{acquire(t, pool), acquire(t, pool)}
			for _, sql := range []string{
				fmt.Sprintf(`INSERT INTO rate_limits SELECT 'limit', 'x' || i, 0, 1, 5, now() FROM generate_series(1, %d) AS i`, rows),
				`VACUUM ANALYZE rate_limits`,
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
					if sqlState(failed) == "40001" {
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

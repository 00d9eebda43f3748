package integration_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
)

// The functions' plans are made once for a connection. One that is made while the table is all but empty must be as good when it
// is full: it looks rows up by their keys, and does not read the index for those of the keys that it wants.
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
		"one":       `SELECT ratelimit_consume('l', '5', 10, '1 min', 10, NULL, 1, 0)`,
		"sharded":   `SELECT ratelimit_consume_sharded('s', '5', 10, '1 min', 10, NULL, 2, 1, 0, 0, 1)`,
		"several":   `SELECT ratelimit_apply('consume', '{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}')`,
		"check":     `SELECT ratelimit_apply('check', '{l,m}', '{5,5}', '{10,10}', '{1 min,1 min}', '{10,10}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}')`,
		"coalesced": `SELECT ratelimit_coalesce('{l}', '{10}', '{1 min}', '{10}', '{4,5,6}', '{1,1,1}', '{}', '{1,1,1}', '{1,1,1}', '{0,0,0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		"mixed":     `SELECT ratelimit_coalesce('{l}', '{10}', '{1 min}', '{10}', '{5}', '{1}', '{}', '{}', '{}', '{}', '{1,2}', '{1,1}', '{1,1}', '{NULL,NULL}', '{1,2}', '{0,0}')`,
	}
	for _, rows := range []string{"0", "3", "40"} { // at which the plans are made
		exec(`TRUNCATE rate_limits`)
		exec(`INSERT INTO rate_limits SELECT 'l', i::text, 0, 1, 10, now() FROM generate_series(1, ` + rows + `) AS i`)
		exec(`ANALYZE rate_limits`)
		for _, sql := range calls {
			exec(sql)
		}
		exec(`INSERT INTO rate_limits SELECT n, i::text, s, CASE n WHEN 's' THEN 2 ELSE 1 END, 10, now()
			FROM generate_series(1, 5000) AS i, (VALUES ('l', 0), ('m', 0), ('s', 0), ('s', 1)) AS v (n, s) ON CONFLICT DO NOTHING`)
		counted := func() (scans, read int64) {
			err := conn.QueryRow(t.Context(), `SELECT seq_scan, coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables
				WHERE relid = 'rate_limits'::regclass`).Scan(&scans, &read)
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

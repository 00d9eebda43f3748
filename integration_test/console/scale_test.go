package console_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// reading counts the rows and the sequential scans of the limiter's tables, transaction by transaction.
type reading struct {
	pool *pgxpool.Pool

	mu   sync.Mutex
	read map[string]scanned // by table
}

type scanned struct{ rows, scans int64 }

func (r *reading) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	tx, err := r.pool.BeginTx(ctx, options)
	if err == nil {
		err = r.count(ctx, tx, -1) // what earlier transactions of this session have counted, and not yet reported
	}
	return readingTx{tx, r}, err
}

func (r *reading) count(ctx context.Context, tx pgx.Tx, sign int64) error {
	rows, err := tx.Query(ctx, `SELECT 'ratelimit.' || relname, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0), coalesce(seq_scan, 0) FROM pg_stat_xact_user_tables
		WHERE schemaname = 'ratelimit'`)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var table string
	var s scanned
	_, err = pgx.ForEachRow(rows, []any{&table, &s.rows, &s.scans}, func() error {
		r.read[table] = scanned{r.read[table].rows + sign*s.rows, r.read[table].scans + sign*s.scans}
		return nil
	})
	return err
}

type readingTx struct {
	pgx.Tx
	r *reading
}

func (t readingTx) Commit(ctx context.Context) error {
	if err := t.r.count(ctx, t.Tx, 1); err != nil {
		return err
	}
	return t.Tx.Commit(ctx)
}

// No page reads the rows of a limit. TXLIMIT_CONSOLE_ROWS=10000000 measures the pages on so many rows of 1000 limits.
func TestNoPageOfTheConsoleScansALimit(t *testing.T) {
	t.Parallel()
	rows, limits, minutes := 60000, 60, 200
	if n, err := strconv.Atoi(os.Getenv("TXLIMIT_CONSOLE_ROWS")); err == nil {
		rows, limits, minutes = n, 1000, 24*60
	}
	numbers := strings.NewReplacer("{rows}", fmt.Sprint(rows), "{limits}", fmt.Sprint(limits), "{minutes}", fmt.Sprint(minutes))
	pool := harness.NewPool(t, 4)
	for _, sql := range []string{
		harness.WithoutAutovacuum("ratelimit.limits"), // so that index-only scans are counted
		`SELECT ratelimit.publish('api', (SELECT jsonb_agg(jsonb_build_object('name', 'limit ' || n, 'kind', 'token bucket', 'rate', 100, 'period', '1 hour')) FROM generate_series(1, {limits}) AS n))`,
		// Half of all rows are of one limit.
		`INSERT INTO ratelimit.limits SELECT 'limit ' || CASE WHEN n % 2 = 0 THEN 1 ELSE 1 + n / 2 % {limits} END, 'user-' || n, 0, 1, n % 100, now() - n % 1000 * interval '1 s' FROM generate_series(1, {rows}) AS n`,
		`INSERT INTO ratelimit.usage SELECT 'limit ' || l, date_trunc('minute', now()) - m * interval '1 minute', 10, l % 7, 0, 10, 0, 0 FROM generate_series(1, {limits}) AS l, generate_series(0, {minutes} - 1) AS m`,
		`INSERT INTO ratelimit.denials SELECT 'limit ' || l, date_trunc('hour', now(), 'UTC') - h * interval '1 hour', 'user-' || l * 1000 + k * 2, k, k, now() FROM generate_series(1, least(100, {limits})) AS l, generate_series(0, 23) AS h, generate_series(1, 100) AS k`,
		`INSERT INTO ratelimit.overrides (name, key, effect, rate, until) SELECT 'limit 1', 'user-' || n, 'numbers', 200, CASE WHEN n % 3 = 0 THEN now() END FROM generate_series(1, {rows} / 10) AS n`,
		"ANALYZE ratelimit.limits", "ANALYZE ratelimit.usage", "ANALYZE ratelimit.denials", "ANALYZE ratelimit.overrides",
	} {
		harness.MustExec(t, pool, numbers.Replace(sql))
	}
	r := &reading{pool: pool, read: make(map[string]scanned)}
	p := harness.NewConsole(t, r, "ann")
	for _, page := range []struct {
		what, path string
		most       int64 // rows of ratelimit.limits
	}{
		{"limits, 1 hour", "?span=1h", 2 * int64(limits)},
		{"limits, 3 hours", "?span=3h", 2 * int64(limits)},
		{"limits, 6 hours", "?span=6h", 2 * int64(limits)},
		{"limits, a search", "?q=limit+17", 2 * int64(limits)},
		{"a limit, an hour", "limit?name=limit+1", 200},
		{"a limit, 30 days", "limit?name=limit+1&span=month", 200},
		{"a limit, a prefix", "limit?name=limit+1&q=user-1", 200},
		{"a limit, any prefix", "limit?name=limit+1&q=u", 200},
		{"a limit, nothing found", "limit?name=limit+1&q=zzz", 200},
		{"a limit, the chart", "usage.json?name=limit+1", 0},
		{"a key", "key?name=limit+1&key=user-1000", 10},
		{"no key", "key?name=limit+1", 200},
		{"a key without a row", "key?name=limit+1&key=nobody", 10},
	} {
		for range 6 { // from the sixth on, the server may take a generic plan
			p.Get(http.StatusOK, page.path)
		}
		r.read = make(map[string]scanned)
		begin := time.Now()
		p.Get(http.StatusOK, page.path)
		took := time.Since(begin)
		t.Logf("%-24s %8.1f ms, read: %v", page.what, took.Seconds()*1000, r.read)
		if n := r.read["ratelimit.limits"].rows; n > page.most {
			t.Errorf("%s: %d rows of ratelimit.limits were read, want at most %d", page.what, n, page.most)
		}
		if n := r.read["ratelimit.overrides"].rows; n > 400 {
			t.Errorf("%s: %d overrides were read, and the page shows 100", page.what, n)
		}
		for table, s := range r.read {
			if s.scans > 0 && table != "ratelimit.definitions" { // which is small, and read as a whole
				t.Errorf("%s: %d sequential scans of %s", page.what, s.scans, table)
			}
		}
	}
}

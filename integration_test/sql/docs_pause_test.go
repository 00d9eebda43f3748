package sql_test

import (
	"errors"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestTheDispatchPage runs the query and the indexes of docs/dispatch.md on a backlog, and compares them with examples/dispatch.
func TestTheDispatchPage(t *testing.T) {
	t.Parallel()
	query, indexes := harness.DocSQL(t, "docs/dispatch.md", "FOR UPDATE SKIP LOCKED) AS j"), harness.DocSQL(t, "docs/dispatch.md", "CREATE INDEX jobs_waiting")
	var example string
	for _, file := range []string{"main.go", "worker.go"} {
		text, err := os.ReadFile("../../examples/dispatch/" + file)
		harness.Succeeds(t, err)
		example += string(text)
	}
	words := func(sql string) string {
		return strings.Join(strings.Fields(strings.TrimSuffix(strings.TrimSpace(sql), ";")), " ")
	}
	for _, sql := range []string{query, indexes} {
		if !strings.Contains(words(example), words(sql)) {
			t.Errorf("examples/dispatch does not run\n%s", sql)
		}
	}
	pool := harness.NewPool(t, 2)
	harness.MustExec(t, pool, "CREATE TABLE tenants (id text PRIMARY KEY, weight int); CREATE TABLE jobs (id bigint PRIMARY KEY, tenant text, state text DEFAULT 'waiting', due timestamptz DEFAULT now(), lease timestamptz)")
	harness.MustExec(t, pool, indexes)
	harness.MustExec(t, pool, `INSERT INTO tenants VALUES ('flood', 3), ('small', 2), ('none', 1);
		INSERT INTO jobs SELECT n, 'flood' FROM generate_series(1, 5000) AS n; INSERT INTO jobs VALUES (5001, 'small'), (5002, 'small'), (5003, 'small');
		UPDATE jobs SET due = now() + interval '1 hour' WHERE id = 1; UPDATE jobs SET state = 'running' WHERE id = 5001; ANALYZE`)
	rows, err := pool.Query(t.Context(), query)
	harness.Succeeds(t, err)
	type found struct {
		ID     int64
		Tenant string
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[found])
	if want := []found{{2, "flood"}, {3, "flood"}, {4, "flood"}, {5002, "small"}, {5003, "small"}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	// For slots of all tenants: at most so many, of every tenant sooner or later, and no others are locked.
	some := harness.DocSQL(t, "docs/dispatch.md", "ORDER BY random()")
	chosen := map[found]bool{}
	for range 200 {
		tx, err := pool.Begin(t.Context())
		harness.Succeeds(t, err)
		rows, err := tx.Query(t.Context(), some, 2)
		harness.Succeeds(t, err)
		two, err := pgx.CollectRows(rows, pgx.RowToStructByPos[found])
		if err != nil || len(two) != 2 {
			t.Fatalf("%v, %v, want two jobs", two, err)
		}
		chosen[two[0]], chosen[two[1]] = true, true
		if left := harness.Scan[int](t, pool, "SELECT count(*) FROM (SELECT FROM jobs WHERE state = 'waiting' FOR UPDATE SKIP LOCKED) AS j"); left != 5000 {
			t.Fatalf("%d of 5002 jobs are not locked", left)
		}
		harness.Succeeds(t, tx.Rollback(t.Context()))
	}
	if want := map[found]bool{{2, "flood"}: true, {3, "flood"}: true, {4, "flood"}: true, {5002, "small"}: true, {5003, "small"}: true}; !maps.Equal(chosen, want) {
		t.Errorf("%v were chosen, want %v", chosen, want)
	}
	// Tenants are shared out between workers: each tenant has one.
	page, err := os.ReadFile("../../docs/dispatch.md")
	harness.Succeeds(t, err)
	share := regexp.MustCompile("`(.*hashtext.*)`").FindStringSubmatch(string(page))
	if len(share) == 0 {
		t.Fatal("the page shares no tenants out")
	}
	if got := harness.Lines(t, pool, "SELECT worker, count(*) > 250 FROM (SELECT "+strings.ReplaceAll(share[1], "workers", "3")+" AS worker FROM (SELECT 'tenant ' || n FROM generate_series(1, 1000) AS n) AS t (id)) AS w GROUP BY 1 ORDER BY 1"); got != "(0,t)\n(1,t)\n(2,t)" {
		t.Errorf("of 3 workers, these have tenants: %s", got)
	}
	if rows, err = pool.Query(t.Context(), "EXPLAIN "+query); err != nil {
		t.Fatal(err)
	}
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || !strings.Contains(strings.Join(plan, "\n"), "jobs_waiting") {
		t.Errorf("%v: the plan is\n%s", err, strings.Join(plan, "\n"))
	}
}

// TestTheRoleThatMayPause: the functions have a grant of their own.
func TestTheRoleThatMayPause(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	owner := harness.NewPool(t, 2)
	app, client := harness.CreateRole(t, owner), harness.CreateRole(t, owner)
	for _, role := range []string{app, client} {
		harness.GrantWork(t, owner, role, "consume")
	}
	harness.MustExec(t, owner, harness.Named(harness.DocSQL(t, "docs/security.md", "REVOKE EXECUTE ON FUNCTION ratelimit._pause"), app))
	harness.MustExec(t, owner, "REVOKE SELECT ON ratelimit.definitions FROM "+client) // it gives its numbers
	limiter := new(ratelimit.Limiter)
	r := harness.Steady(1).Key("ann")
	for role, want := range map[string]string{app: "42501", client: ""} {
		pool := harness.AsRole(t, owner, role, 2)
		harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, harness.Steady(1).Key("bob"))))
		_, byHand := pool.Exec(t.Context(), "SELECT ratelimit.pause('steady in 1', 'ann', now() + interval '1 minute', 3, 10, '1 minute', 20), ratelimit.resume('steady in 1', 'ann')")
		err := errors.Join(harness.Second(limiter.Pause(t.Context(), pool, time.Minute, r.Count(3))), limiter.Resume(t.Context(), pool, r))
		if harness.SQLState(err) != want || harness.SQLState(byHand) != want {
			t.Errorf("%v, and by hand %v, want SQLSTATE %q", err, byHand, want)
		}
	}
}

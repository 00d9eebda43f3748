package sql_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
)

// TestTheDocumentedDataOnlyRestore runs the commands of docs/operations.md: pg_dump --data-only of one database, and pg_restore into another that
// is migrated. Every row of txlimit is there, with its overrides in force, and a trigger has counted nothing.
func TestTheDocumentedDataOnlyRestore(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.NeedsSession(t, "since pg_dump needs one")
	admin := harness.NewPool(t, 1)
	version, err := exec.CommandContext(t.Context(), "pg_dump", "--version").Output()
	if err != nil {
		t.Skip("there is no pg_dump")
	}
	var major int
	harness.Succeeds(t, harness.Second(fmt.Sscanf(regexp.MustCompile(`[0-9]+`).FindString(string(version)), "%d", &major)))
	if serves := harness.Scan[int](t, admin, "SELECT current_setting('server_version_num')::integer / 10000"); major < serves {
		t.Skipf("pg_dump %d does not dump PostgreSQL %d", major, serves)
	}
	page, err := os.ReadFile("../../docs/operations.md")
	harness.Succeeds(t, err)
	_, section, _ := strings.Cut(string(page), "\n## Dump and restore\n")
	blocks := regexp.MustCompile("(?s)\n```sh\n(.*?)\n```\n").FindAllStringSubmatch(section, 2)
	if len(blocks) != 2 || !strings.Contains(blocks[0][1], "pg_dump") || !strings.Contains(blocks[1][1], "--use-list") {
		t.Fatalf("the commands are %q", blocks)
	}

	newTarget := func() (pool *pgxpool.Pool) {
		name := "restore_" + strings.ToLower(rand.Text())
		harness.MustExec(t, admin, "CREATE DATABASE "+name)
		t.Cleanup(func() {
			if _, err := admin.Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
				t.Error(err)
			}
		})
		pool = harness.Reconfigured(t, admin, func(c *pgxpool.Config) {
			c.ConnConfig.Database = name
		})
		db := stdlib.OpenDBFromPool(pool)
		defer db.Close()
		harness.Succeeds(t, harness.Second(harness.NewGoose(t, db, migrated.Files(), migrations.VersionTable).Up(t.Context())))
		harness.MustExec(t, pool, harness.DocSQL(t, "docs/sql.md", "CREATE TRIGGER"))
		return pool
	}
	const tables = "SELECT (SELECT string_agg(r::text, '; ' ORDER BY r::text) FROM ratelimit.limits AS r) || (SELECT string_agg(o::text, '; ' ORDER BY id) FROM ratelimit.overrides AS o) || (SELECT string_agg(d::text, '; ' ORDER BY d::text) FROM ratelimit.definitions AS d) || (SELECT string_agg(h::text, '; ' ORDER BY id) FROM ratelimit.holds AS h) || (SELECT count(*) FROM messages)"
	source := newTarget()
	harness.Publish(t, source, `[{"name": "signUps", "kind": "token bucket", "rate": 10, "period": "1000 hours"}, {"name": "renders", "kind": "slots", "capacity": 1}]`)
	harness.MustExec(t, source, "SELECT ratelimit.hold('renders', 'acme', 'job 17', ttl => '1 day'), ratelimit.consume('signUps', 'ann', count => 7), ratelimit.block('signUps', 'bob', forever => true); INSERT INTO messages SELECT 'acme', 'x' FROM generate_series(1, 3)")
	want := harness.Scan[string](t, source, tables)
	dir := t.TempDir()
	run := func(target *pgxpool.Pool, commands string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", commands)
		cmd.Dir = dir
		url := func(pool *pgxpool.Pool) string {
			c := pool.Config().ConnConfig
			return fmt.Sprintf("postgres://%s@%s:%d/%s", c.User, c.Host, c.Port, c.Database)
		}
		cmd.Env = append(os.Environ(), "DATABASE_URL="+url(source), "NEW_DATABASE_URL="+url(target), "PGPASSWORD="+source.Config().ConnConfig.Password)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	dump, restore, _ := strings.Cut(blocks[0][1], "\n")
	withGoose := regexp.MustCompile(` --exclude-table-data='[^']*'`).ReplaceAllString(dump, "")
	for what, commands := range map[string]string{"as documented": blocks[0][1], "from a dump that has the table": withGoose + "\n" + blocks[1][1]} {
		target := newTarget()
		if out, err := run(target, commands); err != nil {
			t.Errorf("%s: %v\n%s", what, err, out)
			continue
		}
		if got := harness.Scan[string](t, target, tables); got != want {
			t.Errorf("%s: restored are\n%s\nof\n%s", what, got, want)
		}
		if effect := harness.Scan[string](t, target, "SELECT effect FROM ratelimit._in_force('signUps', '{bob}', now()) LIMIT 1"); effect != "block" {
			t.Errorf("%s: in force for bob is %s", what, effect)
		}
		if !harness.Takes(t, target, "signUps", "ann", 3) || harness.Takes(t, target, "signUps", "ann", 1) {
			t.Errorf("%s: ann does not have 3 left", what)
		}
		harness.MustExec(t, target, "SELECT ratelimit.block('signUps', 'cid', forever => true)") // an id that is free
		if _, err := target.Exec(t.Context(), "SELECT ratelimit.hold('renders', 'acme', 'job 18', ttl => '1 day')"); harness.SQLState(err) != "PT429" {
			t.Errorf("%s: a slot that is in use is granted: %v", what, err)
		}
	}
	// One schema alone: all of the limiter, or nothing of it.
	for schema, want := range map[string]string{"ratelimit": "(1)", "public": "(0)"} {
		name := "restore_" + strings.ToLower(rand.Text())
		harness.MustExec(t, admin, "CREATE DATABASE "+name)
		target := harness.Reconfigured(t, admin, func(c *pgxpool.Config) { c.ConnConfig.Database = name })
		t.Cleanup(func() {
			target.Close()
			harness.Succeeds(t, harness.Second(admin.Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)")))
		})
		if out, err := run(target, `pg_dump --clean --if-exists --schema=`+schema+` "$DATABASE_URL" | psql -q -v ON_ERROR_STOP=1 "$NEW_DATABASE_URL"`); err != nil {
			t.Errorf("%s alone: %v\n%s", schema, err, out)
			continue
		}
		if got := harness.Lines(t, target, "SELECT count(*) FROM pg_namespace WHERE nspname = 'ratelimit'"); got != want {
			t.Errorf("%s alone: %s schemas of the limiter", schema, got)
		}
		if schema == "ratelimit" {
			if s, err := migrations.Check(t.Context(), target, ""); err != nil || s.Differs() != "" {
				t.Errorf("%+v, %v", s, err)
			}
			harness.Succeeds(t, harness.Second(harness.NewGoose(t, stdlib.OpenDBFromPool(target), migrated.Files(), migrations.VersionTable).Up(t.Context()))) // nothing is left to do
			if !harness.Takes(t, target, "signUps", "ann", 3) || harness.Takes(t, target, "signUps", "ann", 1) {
				t.Error("ann does not have 3 left")
			}
		}
	}
	// What the page warns of.
	if out, err := run(newTarget(), withGoose+"\n"+restore); err == nil || !strings.Contains(out, "goose_version") || !strings.Contains(out, "duplicate key") {
		t.Errorf("with the version table: %v\n%s", err, out)
	}
}

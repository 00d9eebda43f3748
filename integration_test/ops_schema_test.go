package integration_test

import (
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// catalog returns our objects in a schema as text, without the schema's name.
func catalog(t *testing.T, db querier, schema string) string {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		WITH n AS (SELECT oid FROM pg_namespace WHERE nspname = $1)
		SELECT concat_ws(' ', 'relation', relname, relkind, relpersistence, reloptions, relrowsecurity, obj_description(c.oid, 'pg_class'))
		  FROM pg_class c, n WHERE relnamespace = n.oid AND relname NOT LIKE '%goose%'
		UNION ALL
		SELECT concat_ws(' ', 'column', relname, row_number() OVER (PARTITION BY attrelid ORDER BY attnum), attname, format_type(atttypid, atttypmod), attnotnull, collname, attstorage,
		                 pg_get_expr(adbin, adrelid), col_description(c.oid, attnum))
		  FROM n, pg_class c JOIN pg_attribute a ON attrelid = c.oid LEFT JOIN pg_collation l ON l.oid = attcollation LEFT JOIN pg_attrdef d ON adrelid = c.oid AND adnum = attnum
		 WHERE relnamespace = n.oid AND relname NOT LIKE '%goose%' AND attnum > 0 AND NOT attisdropped
		UNION ALL
		SELECT concat_ws(' ', 'constraint', conname, contype, pg_get_constraintdef(o.oid))
		  FROM n, pg_constraint o JOIN pg_class c ON c.oid = conrelid WHERE connamespace = n.oid AND relname NOT LIKE '%goose%'
		UNION ALL
		SELECT concat_ws(' ', 'index', pg_get_indexdef(c.oid)) FROM pg_class c, n WHERE relnamespace = n.oid AND relkind = 'i' AND relname NOT LIKE '%goose%'
		UNION ALL
		SELECT concat_ws(' ', 'function', proname, proconfig, prosecdef, provolatile, proparallel, proacl, obj_description(p.oid, 'pg_proc'), pg_get_functiondef(p.oid)) FROM pg_proc p, n WHERE pronamespace = n.oid
		UNION ALL
		SELECT concat_ws(' ', 'type', typname) FROM pg_type, n WHERE typnamespace = n.oid AND typname NOT LIKE '%goose%'
		ORDER BY 1`, schema)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(lines, "\n")
	return strings.NewReplacer(pgx.Identifier{schema}.Sanitize()+".", "", schema+".", "").Replace(text)
}

// schemaOf returns the schema of a URL from newSchema.
func schemaOf(t *testing.T, db ratelimit.DB) (name string) {
	t.Helper()
	if err := db.QueryRow(t.Context(), "SELECT current_schema()").Scan(&name); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestWhatPeopleSeeIsCommented: every table, view and column, and every function that is not the engine's own. (goose makes its
// table itself.)
func TestWhatPeopleSeeIsCommented(t *testing.T) {
	t.Parallel()
	const objects = `
		SELECT p.proname AS object, obj_description(p.oid, 'pg_proc') AS comment FROM pg_proc AS p WHERE p.pronamespace = current_schema()::regnamespace AND p.proname NOT LIKE '\_%'
		UNION ALL
		SELECT c.relname, obj_description(c.oid, 'pg_class') FROM pg_class AS c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'v') AND c.relname NOT LIKE '%goose%'
		UNION ALL
		SELECT c.relname || '.' || a.attname, col_description(c.oid, a.attnum) FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
		 WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND c.relname NOT LIKE '%goose%' AND a.attnum > 0 AND NOT a.attisdropped`
	pool := newPool(t, 1)
	if bare := lines(t, pool, "SELECT object FROM ("+objects+") AS o WHERE coalesce(comment, '') = '' ORDER BY 1"); bare != "" {
		t.Errorf("without a comment:\n%s", bare)
	}
	if n := scan[int](t, pool, "SELECT count(*) FROM ("+objects+") AS o"); n < 100 {
		t.Errorf("only %d objects were looked at", n)
	}
}

// works wants the limiter to work.
func works(t *testing.T, db ratelimit.DB) {
	t.Helper()
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("works", 2, time.Hour)
	wide := ratelimit.FixedWindow("wide", 2, time.Hour, ratelimit.Shards(2))
	if _, err := limiter.Consume(t.Context(), db, limit.Key("ann").Count(2)); err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), db, limit.Key("ann"), wide.Key("ann")); !errors.As(err, new(*ratelimit.DeniedError)) {
		t.Fatal(err)
	}
	if err := limiter.Reset(t.Context(), db, limit.Key("ann")); err != nil {
		t.Fatal(err)
	}
}

func TestMigrationsGoUpDownAndUpAgain(t *testing.T) {
	t.Parallel()
	for _, withRows := range []bool{false, true} {
		t.Run(fmt.Sprint("with rows ", withRows), func(t *testing.T) {
			t.Parallel()
			url := newSchema(t)
			pool := connect(t, url, 1)
			provider := newGoose(t, openSQL(t, "pgx", url, 4), migrated.Files(), migrations.VersionTable)
			empty := catalog(t, pool, schemaOf(t, pool))
			var first string
			for round := range 2 {
				if _, err := provider.Up(t.Context()); err != nil {
					t.Fatal(err)
				}
				if round == 0 {
					first = catalog(t, pool, schemaOf(t, pool))
				} else if again := catalog(t, pool, schemaOf(t, pool)); again != first {
					t.Fatalf("up again made\n%s\nnot\n%s", again, first)
				}
				works(t, pool)
				if withRows {
					if _, err := new(ratelimit.Limiter).Consume(t.Context(), pool, ratelimit.TokenBucket("l", 1, time.Hour, ratelimit.Shards(3)).Key("ann")); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := provider.Up(t.Context()); err != nil { // nothing to do
					t.Fatal(err)
				}
				if _, err := provider.DownTo(t.Context(), 0); err != nil {
					t.Fatal(err)
				}
				if left := catalog(t, pool, schemaOf(t, pool)); left != empty {
					t.Fatalf("down left\n%s", left)
				}
			}
			// One step at a time.
			for _, step := range []func() (int, error){
				func() (int, error) { r, err := provider.Up(t.Context()); return len(r), err },
				func() (int, error) { _, err := provider.Down(t.Context()); return 1, err },
				func() (int, error) { r, err := provider.Up(t.Context()); return len(r), err },
			} {
				if n, err := step(); err != nil || n == 0 {
					t.Fatalf("%d steps, %v", n, err)
				}
			}
			if again := catalog(t, pool, schemaOf(t, pool)); again != first {
				t.Fatalf("step by step made\n%s\nnot\n%s", again, first)
			}
		})
	}
}

func TestMigrationsLiveBesideTheApplications(t *testing.T) {
	t.Parallel()
	app := fstest.MapFS{
		"00001_app.sql": {Data: []byte("-- +goose Up\nCREATE TABLE app (n int);\n-- +goose Down\nDROP TABLE app;\n")},
		"00002_app.sql": {Data: []byte("-- +goose Up\nINSERT INTO app VALUES (1);\n-- +goose Down\nDELETE FROM app;\n")},
		"00003_app.sql": {Data: []byte("-- +goose Up\nINSERT INTO app VALUES (1);\n-- +goose Down\nDELETE FROM app;\n")},
	}
	for _, oursFirst := range []bool{true, false} {
		t.Run(fmt.Sprint("ours first ", oursFirst), func(t *testing.T) {
			t.Parallel()
			url := newSchema(t)
			pool := connect(t, url, 1)
			db := openSQL(t, "pgx", url, 4)
			theirs := newGoose(t, db, app, goose.DefaultTablename)
			ours := newGoose(t, db, migrated.Files(), migrations.VersionTable)
			providers := []*goose.Provider{ours, theirs}
			if !oursFirst {
				slices.Reverse(providers)
			}
			for _, provider := range providers {
				if results, err := provider.Up(t.Context()); err != nil || len(results) != len(provider.ListSources()) {
					t.Fatalf("%d migrations ran, %v", len(results), err)
				}
			}
			works(t, pool)
			if _, err := providers[0].DownTo(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			var app, limits bool
			if err := pool.QueryRow(t.Context(), "SELECT to_regclass('app') IS NOT NULL, to_regclass('ratelimit.limits') IS NOT NULL").Scan(&app, &limits); err != nil || app != oursFirst || limits == oursFirst {
				t.Fatalf("after the first one's Down: app %v, limits %v, %v", app, limits, err)
			}
			if _, err := providers[0].Up(t.Context()); err != nil {
				t.Fatal(err)
			}
			works(t, pool)
		})
	}
}

func TestSchemaSQLMakesWhatTheMigrationsMake(t *testing.T) {
	t.Parallel()
	migrated := newPool(t, 1)
	want := catalog(t, migrated, schemaOf(t, migrated))
	if strings.Count(want, "function ratelimit_") < 4 || !strings.Contains(want, "enable_seqscan=off") || !strings.Contains(want, "fillfactor=90") {
		t.Fatalf("the catalog says too little:\n%s", want)
	}
	text := schemaSQL(t)
	ways := map[string]func(t *testing.T, url string){
		"one Exec": func(t *testing.T, url string) {
			conn := acquire(t, connect(t, url, 1))
			if _, err := conn.PgConn().Exec(t.Context(), text).ReadAll(); err != nil { // one implicit transaction
				t.Fatal(err)
			}
		},
	}
	if psql, err := exec.LookPath("psql"); err == nil {
		ways["psql"] = func(t *testing.T, url string) {
			out, err := exec.CommandContext(t.Context(), psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", "../migrations/schema.sql", forAll(t, url)).CombinedOutput()
			if err != nil || len(out) > 0 {
				t.Fatalf("psql: %v\n%s", err, out)
			}
			// Again, it says what is wrong in a few lines.
			out, err = exec.CommandContext(t.Context(), psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", "../migrations/schema.sql", forAll(t, url)).CombinedOutput()
			if err == nil || strings.Count(string(out), "\n") > 5 || !strings.Contains(string(out), `relation "ratelimit.limits" already exists in schema`) || !strings.Contains(string(out), "#upgrade") {
				t.Errorf("psql, again: %v\n%.1000s", err, out)
			}
		}
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := newSchema(t)
			way(t, url)
			pool := connect(t, url, 1)
			if got := catalog(t, pool, schemaOf(t, pool)); got != want {
				t.Errorf("schema.sql made\n%s\nthe migrations make\n%s", got, want)
			}
			works(t, pool)

			// From here on, goose migrates.
			db, err := sql.Open("pgx", url)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			provider := newGoose(t, db, migrations.FS, migrations.VersionTable)
			if _, err := provider.Up(t.Context()); sqlState(err) != "42P07" { // and its version table is there
				t.Errorf("goose before it is told: %v", err)
			}
			tell := docSQL(t, "docs/operations.md", "INSERT INTO ratelimit.goose_version")
			mustExec(t, pool, tell)
			mustExec(t, pool, tell)
			if noted := lines(t, pool, "SELECT version_id FROM ratelimit.goose_version ORDER BY id"); noted != "(0)\n(1)" {
				t.Errorf("noted are %s", noted)
			}
			if ran, err := provider.Up(t.Context()); err != nil || len(ran) != 0 {
				t.Errorf("goose ran %v, %v, want nothing", ran, err)
			}
			if _, err := provider.DownTo(t.Context(), 0); err != nil {
				t.Errorf("goose down: %v", err)
			}
		})
	}
}

func TestTheSchemasNameMayNeedQuotes(t *testing.T) {
	long(t)
	t.Parallel()
	migrated := newPool(t, 1)
	want := catalog(t, migrated, schemaOf(t, migrated))
	for _, schema := range []string{"Weird Schema", `quo"te'd`, "select", "$$", "@extschema@", "/* TEMPLATE: schema */", "ünïcode", "100%"} {
		t.Run(schema, func(t *testing.T) {
			t.Parallel()
			needsSession(t, "since they SET search_path for the session")
			conn := acquire(t, connect(t, newSchema(t), 1))
			random := schema + " " + rand.Text()[:8]
			quoted := pgx.Identifier{random}.Sanitize()
			for _, sql := range []string{"CREATE SCHEMA " + quoted, "SET search_path = " + quoted} {
				if _, err := conn.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			defer func() {
				if _, err := conn.Exec(t.Context(), "DROP SCHEMA "+quoted+" CASCADE"); err != nil {
					t.Error(err)
				}
			}()
			if _, err := conn.PgConn().Exec(t.Context(), schemaSQL(t)).ReadAll(); err != nil {
				t.Fatal(err)
			}
			works(t, conn)
			if got := catalog(t, conn, random); got != want {
				t.Errorf("made\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestTheFunctionsWorkUnderAnySearchPath(t *testing.T) {
	t.Parallel()
	needsSession(t, "since it SETs search_path and makes a temporary table, for the session")
	pool := newPool(t, 1)
	conn := acquire(t, pool)
	schema := pgx.Identifier{schemaOf(t, conn)}.Sanitize()
	for _, path := range []string{"pg_catalog", "''", "public", "nowhere"} {
		if _, err := conn.Exec(t.Context(), "SET search_path = "+path); err != nil {
			t.Fatal(err)
		}
		for i, want := range []bool{true, false} {
			var consumed, applied bool
			if err := conn.QueryRow(t.Context(), "SELECT granted FROM "+schema+"._consume('l', $1, 1, '1 hour', 1, NULL, 1, 0)", path).Scan(&consumed); err != nil || consumed != want {
				t.Errorf("search_path %s, call %d: %v, %v", path, i, consumed, err)
			}
			if err := conn.QueryRow(t.Context(), "SELECT granted FROM "+schema+`._apply('consume', '{m}', ARRAY[$1], '{1}', '{1 hour}', '{1}', '{NULL}', '{3}', '{1}', '{0}', '{0}', '{1}')`, path).Scan(&applied); err != nil || applied != want {
				t.Errorf("search_path %s, call %d: %v, %v", path, i, applied, err)
			}
		}
		var deleted int
		if err := conn.QueryRow(t.Context(), "SELECT "+schema+"._reset('{l,m}', ARRAY[$1,$1])", path).Scan(&deleted); err != nil || deleted != 4 {
			t.Errorf("search_path %s: %d deleted, %v", path, deleted, err)
		}
	}
	// A table with that name in another schema of the search_path is not used, even if it comes first.
	if _, err := conn.Exec(t.Context(), "CREATE TEMP TABLE ratelimit.limits (LIKE "+schema+".limits); SET search_path = pg_temp, "+schema); err != nil {
		t.Fatal(err)
	}
	works(t, conn)
	var n int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_temp.limits").Scan(&n); err != nil || n != 0 {
		t.Errorf("%d rows in the wrong table, %v", n, err)
	}
}

func TestCheckWorksInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	seed(t, pool)
	for _, level := range levels {
		err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			limiter, clock := newLimiter()
			w := world{t, tx, limiter, clock}
			bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
			w.holds(bucket.Key("seeded"), 9)
			w.holds(bucket.Key("fresh"), 10)
			w.holds(ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(3)).Key("seeded"), 9)
			w.redeployed().holds(ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(5)).Key("seeded"), 9)
			savepoint := w.begin()
			if _, err := limiter.Consume(t.Context(), savepoint, bucket.Key("seeded")); sqlState(err) != "25006" {
				t.Errorf("%s: consume: %v, want 25006", level, err)
			}
			return savepoint.Rollback(t.Context())
		})
		if err != nil {
			t.Errorf("%s: %v", level, err)
		}
	}
}

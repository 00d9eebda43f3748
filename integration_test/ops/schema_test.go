package ops_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// catalog returns our objects in a schema as text, without the schema's name.
func catalog(t *testing.T, db harness.Querier, schema string) string {
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
	return strings.NewReplacer(pgx.Identifier{schema}.Sanitize()+".", "", `"`+schema+`".`, "", schema+".", "").Replace(text)
}

// TestWhatPeopleSeeIsCommented: every table, view and column, and every function that is not the engine's own. (goose makes its
// table itself.)
func TestWhatPeopleSeeIsCommented(t *testing.T) {
	t.Parallel()
	const objects = `
		SELECT p.proname AS object, obj_description(p.oid, 'pg_proc') AS comment FROM pg_proc AS p WHERE p.pronamespace = 'ratelimit'::regnamespace AND p.proname NOT LIKE '\_%'
		UNION ALL
		SELECT c.relname, obj_description(c.oid, 'pg_class') FROM pg_class AS c WHERE c.relnamespace = 'ratelimit'::regnamespace AND c.relkind IN ('r', 'v') AND NOT c.relispartition AND c.relname NOT LIKE '%goose%'
		UNION ALL
		SELECT c.relname || '.' || a.attname, col_description(c.oid, a.attnum) FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
		 WHERE c.relnamespace = 'ratelimit'::regnamespace AND c.relkind = 'r' AND NOT c.relispartition AND c.relname NOT LIKE '%goose%' AND a.attnum > 0 AND NOT a.attisdropped`
	pool := harness.NewPool(t, 1)
	if bare := harness.Lines(t, pool, "SELECT object FROM ("+objects+") AS o WHERE coalesce(comment, '') = '' ORDER BY 1"); bare != "" {
		t.Errorf("without a comment:\n%s", bare)
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ("+objects+") AS o"); n < 100 {
		t.Errorf("only %d objects were looked at", n)
	}
}

func TestMigrationsGoUpDownAndUpAgain(t *testing.T) {
	t.Parallel()
	for _, withRows := range []bool{false, true} {
		t.Run(fmt.Sprint("with rows ", withRows), func(t *testing.T) {
			t.Parallel()
			url := harness.NewDatabase(t)
			pool := harness.Connect(t, url, 1)
			provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), migrated.Files(), migrations.VersionTable)
			empty := catalog(t, pool, "ratelimit")
			var first string
			for round := range 2 {
				if _, err := provider.Up(t.Context()); err != nil {
					t.Fatal(err)
				}
				if round == 0 {
					first = catalog(t, pool, "ratelimit")
				} else if again := catalog(t, pool, "ratelimit"); again != first {
					t.Fatalf("up again made %s", differences(again, first))
				}
				harness.Works(t, pool)
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
				if left := catalog(t, pool, "ratelimit"); left != empty {
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
			if again := catalog(t, pool, "ratelimit"); again != first {
				t.Fatalf("step by step made %s", differences(again, first))
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
			url := harness.NewDatabase(t)
			pool := harness.Connect(t, url, 1)
			db := harness.OpenSQL(t, "pgx", url, 4)
			theirs := harness.NewGoose(t, db, app, goose.DefaultTablename)
			ours := harness.NewGoose(t, db, migrated.Files(), migrations.VersionTable)
			providers := []*goose.Provider{ours, theirs}
			if !oursFirst {
				slices.Reverse(providers)
			}
			for _, provider := range providers {
				if results, err := provider.Up(t.Context()); err != nil || len(results) != len(provider.ListSources()) {
					t.Fatalf("%d migrations ran, %v", len(results), err)
				}
			}
			harness.Works(t, pool)
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
			harness.Works(t, pool)
		})
	}
}

func TestSQLMakesWhatTheMigrationsMake(t *testing.T) {
	t.Parallel()
	migrated := harness.NewPool(t, 1)
	want := catalog(t, migrated, "ratelimit")
	if strings.Count(want, "function hold") < 3 || !strings.Contains(want, "enable_seqscan=off") || !strings.Contains(want, "fillfactor=90") {
		t.Fatalf("the catalog says too little:\n%s", want)
	}
	text := harness.SchemaSQL(t)
	ways := map[string]func(t *testing.T, url string){
		"one Exec": func(t *testing.T, url string) {
			conn := harness.Acquire(t, harness.Connect(t, url, 1))
			if _, err := conn.PgConn().Exec(t.Context(), text).ReadAll(); err != nil { // one implicit transaction
				t.Fatal(err)
			}
		},
	}
	if psql, err := exec.LookPath("psql"); err == nil {
		ways["psql"] = func(t *testing.T, url string) {
			run := func() (string, error) {
				cmd := exec.CommandContext(t.Context(), psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", harness.ForAll(t, url))
				cmd.Stdin = strings.NewReader(text)
				out, err := cmd.CombinedOutput()
				return string(out), err
			}
			if out, err := run(); err != nil || out != "" {
				t.Fatalf("psql: %v\n%s", err, out)
			}
			// Again, it says what is wrong in a line.
			if out, err := run(); err == nil || strings.Count(out, "\n") != 1 || !strings.Contains(out, `schema "ratelimit" already exists`) {
				t.Errorf("psql, again: %v\n%.1000s", err, out)
			}
		}
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := harness.NewDatabase(t)
			way(t, url)
			pool := harness.Connect(t, url, 1)
			if got := catalog(t, pool, "ratelimit"); got != want && os.Getenv(harness.TableKind) == "" {
				t.Errorf("the SQL made %s", differences(got, want))
			}
			harness.Works(t, pool)

			// From here on, goose migrates.
			db, err := sql.Open("pgx", url)
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			provider := harness.NewGoose(t, db, migrations.FS, migrations.VersionTable)
			if _, err := provider.Up(t.Context()); harness.SQLState(err) != "42P07" { // and its version table is there
				t.Errorf("goose before it is told: %v", err)
			}
			tell := harness.DocSQL(t, "docs/operations.md", "INSERT INTO ratelimit.goose_version")
			harness.MustExec(t, pool, tell)
			harness.MustExec(t, pool, tell)
			if noted := harness.Lines(t, pool, "SELECT version_id FROM ratelimit.goose_version ORDER BY id"); noted != "(0)\n(1)" {
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

// differences are the lines that only one of two texts has.
func differences(got, want string) string {
	var all []string
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for _, line := range g {
		if !slices.Contains(w, line) {
			all = append(all, "+ "+line)
		}
	}
	for _, line := range w {
		if !slices.Contains(g, line) {
			all = append(all, "- "+line)
		}
	}
	return strings.Join(all, "\n")
}

// TestASchemaOfAnotherName: everything that is made and sent is there, beside the limiter of another schema, and nothing elsewhere.
func TestASchemaOfAnotherName(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the search_path of its sessions")
	url := harness.NewMigrated(t)
	pool := harness.Connect(t, url, 4)
	want := catalog(t, pool, "ratelimit")
	for _, schema := range []string{"r", "o", "a b", "select", "ünïcode", "Mixed-Case", "limits"} { // r and o are aliases in the functions
		config, err := pgx.ParseConfig(url)
		harness.Succeeds(t, err)
		harness.StartWith(t, config, map[string]string{"search_path": pgx.Identifier{schema}.Sanitize()})
		db := stdlib.OpenDB(*config)
		defer db.Close()
		harness.Succeeds(t, migrations.Prepare(t.Context(), db, schema))
		provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.In(schema), goose.WithTableName("goose_version"))
		harness.Succeeds(t, err)
		for range 2 {
			harness.Succeeds(t, harness.Second(provider.Up(t.Context())))
		}
		if got := catalog(t, pool, schema); len(schema) > 1 && got != want && os.Getenv(harness.TableKind) == "" { // the hash knows r.limits from r.value
			t.Errorf("%s: made %s", schema, differences(got, want))
		}
		if s, err := migrations.Check(t.Context(), pool, schema); err != nil || s.Version != migrations.Version || s.Hash != migrations.Hash {
			t.Errorf("%s: %+v, %v", schema, s, err)
		}
		recorder := &usage.Recorder{DB: pool, Every: time.Millisecond}
		limit := ratelimit.TokenBucket("works", 2, time.Hour)
		slots := ratelimit.Slots("slots", 2)
		limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{Program: "web", Schema: schema, Limits: []ratelimit.Limit{limit, slots}, Usage: recorder, OnError: harness.NoError(t)})
		harness.Succeeds(t, err)
		everywhere := map[string]ratelimit.DB{"pool": pool, "sql": ratelimit.SQL(harness.OpenSQL(t, "pgx", url, 1)), "coalescer": &ratelimit.Coalescer{Pool: pool}}
		for name, db := range everywhere {
			if _, err := limits.Consume(t.Context(), db, limit.Key(name).Count(2)); err != nil {
				t.Errorf("%s: %s: %v", schema, name, err)
			}
			if _, err := limits.Consume(t.Context(), db, limit.Key(name)); !harness.Denied(err) {
				t.Errorf("%s: %s: %v", schema, name, err)
			}
		}
		err = limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			return harness.Second(limits.Consume(ctx, tx, limit.Key("tx")))
		}, ratelimit.Hot(limit.Key("tx")))
		harness.Succeeds(t, err)
		harness.Succeeds(t, limits.During(t.Context(), pool, "job", time.Minute, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) { return nil, nil }, slots.Key("k")))
		harness.Succeeds(t, harness.Second(limits.Block(t.Context(), pool, limit.Key("mallory"), ratelimit.Terms{Forever: true, Reason: "spam", Who: "ops"})))
		harness.Succeeds(t, harness.Second(limits.Sweep(t.Context(), pool, limit)))
		harness.CloseLimiter(t, limits)
		for table, atLeast := range map[string]int{"limits": 4, "definitions": 2, "overrides": 1, "usage": 1} {
			if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM "+pgx.Identifier{schema, table}.Sanitize()); n < atLeast {
				t.Errorf("%s: %s has %d rows", schema, table, n)
			}
			if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit."+table); n != 0 {
				t.Errorf("%s: ratelimit.%s has %d rows", schema, table, n)
			}
		}
	}
	if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM pg_depend WHERE refobjid = 'public'::regnamespace"); n != 0 {
		t.Errorf("%d objects in public", n)
	}
	shared := &usage.Recorder{DB: pool} // a tenant's denied keys are for no other
	open := func(schema string) error {
		limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{Program: "web", Schema: schema, Limits: []ratelimit.Limit{ratelimit.TokenBucket("works", 2, time.Hour)}, Usage: shared, OnError: harness.NoError(t)})
		if err == nil {
			harness.CloseLimiter(t, limits)
		}
		return err
	}
	harness.Succeeds(t, open("r"))
	if err := open("o"); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), `the counts of the schema "r"`) {
		t.Errorf("a Recorder of two schemas: %v", err)
	}
}

// TestNamesThatNoSchemaHas: they would have to be escaped in a text or a body, so nothing of them reaches the server.
func TestNamesThatNoSchemaHas(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limit := ratelimit.TokenBucket("l", 1, time.Hour)
	db := stdlib.OpenDBFromPool(pool)
	for _, schema := range []string{`$body$; DROP TABLE ratelimit.limits; --`, `quo"te'd`, "100%", `a\b`, "a.b", strings.Repeat("x", 52), "new\nline", "nul\x00"} {
		limits := ratelimit.Limiter{Schema: schema}
		coalescer := &ratelimit.Coalescer{Pool: pool}
		for what, err := range map[string]error{
			"Prepare":     migrations.Prepare(t.Context(), db, schema),
			"In":          harness.Second(harness.NewGoose(t, db, migrations.In(schema), goose.DefaultTablename).Up(t.Context())),
			"Check":       harness.Second(migrations.Check(t.Context(), pool, schema)),
			"Consume":     harness.Second(limits.Consume(t.Context(), pool, limit.Key("k"))),
			"a Coalescer": harness.Second(limits.Consume(t.Context(), coalescer, limit.Key("k"))),
			"Hot":         limits.InTx(t.Context(), pool, func(context.Context, pgx.Tx) error { return nil }, ratelimit.Hot(limit.Key("k"))),
			"a batch":     harness.Second(limits.QueueConsume(t.Context(), &pgx.Batch{}, limit.Key("k"))),
			"Publish":     limits.Publish(t.Context(), pool, "web", limit),
			"Open":        harness.Second(ratelimit.Open(t.Context(), pool, ratelimit.Options{Program: "web", Schema: schema, Limits: []ratelimit.Limit{limit}})),
		} {
			if err == nil || !strings.Contains(err.Error(), "the schema's name") || harness.SQLState(err) != "" {
				t.Errorf("%s, %q: %v", what, schema, err)
			}
		}
		// The connection works.
		if n := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.limits"); n != 0 {
			t.Errorf("%q: %d rows", schema, n)
		}
	}
	other := ratelimit.Limiter{Schema: "other"}
	coalescer := &ratelimit.Coalescer{Pool: pool}
	harness.Succeeds(t, harness.Second(new(ratelimit.Limiter).Consume(t.Context(), coalescer, limit.Key("k"))))
	if _, err := other.Consume(t.Context(), coalescer, limit.Key("k")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("another schema on one Coalescer: %v", err)
	}
}

// TestNoNameWorksWithoutItsSchema: PERFORM all('[...]') would be SELECT ALL, which consumes nothing.
func TestNoNameWorksWithoutItsSchema(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	names := harness.Scan[[]string](t, pool, `SELECT array_agg(DISTINCT proname::text) FROM pg_proc WHERE pronamespace = 'ratelimit'::regnamespace AND proname NOT LIKE '\_%'`)
	if len(names) < 25 {
		t.Errorf("only %v", names)
	}
	for _, name := range names {
		for _, call := range []string{"SELECT %s('x')", "SELECT * FROM %s('x')", "DO $$ BEGIN PERFORM %s('x'); END $$", "SELECT %s('x', 'y')", "SELECT %s()"} {
			if _, err := pool.Exec(t.Context(), fmt.Sprintf(call, name)); harness.SQLState(err) != "42883" && harness.SQLState(err) != "42601" {
				t.Errorf("%s: %v", fmt.Sprintf(call, name), err)
			}
		}
	}
}

func TestCheckWorksInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.Seed(t, pool)
	for _, level := range harness.Levels {
		err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			limiter, clock := harness.NewLimiter()
			w := harness.World{T: t, DB: tx, Limiter: limiter, Clock: clock}
			bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
			w.Holds(bucket.Key("seeded"), 9)
			w.Holds(bucket.Key("fresh"), 10)
			w.Holds(ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(3)).Key("seeded"), 9)
			w.Redeployed().Holds(ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(5)).Key("seeded"), 9)
			savepoint := w.Begin()
			if _, err := limiter.Consume(t.Context(), savepoint, bucket.Key("seeded")); harness.SQLState(err) != "25006" {
				t.Errorf("%s: consume: %v, want 25006", level, err)
			}
			return savepoint.Rollback(t.Context())
		})
		if err != nil {
			t.Errorf("%s: %v", level, err)
		}
	}
}

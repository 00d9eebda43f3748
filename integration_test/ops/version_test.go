package ops_test

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestTheSchemaHasAVersion: an older schema is refused at the start, a newer one serves, and another hash of the same version is reported.
func TestTheSchemaHasAVersion(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	// warned opens a limiter on a database, and returns what it was told.
	warned := func(t *testing.T, db ratelimit.DB) (told []string, err error) {
		t.Helper()
		o := harness.Opening(db)
		o.NoBackground, o.OnError = true, func(err error) { told = append(told, err.Error()) }
		limits, err := ratelimit.Open(t.Context(), db, o)
		if err == nil {
			harness.CloseLimiter(t, limits)
		}
		return told, err
	}
	check := func(t *testing.T, db ratelimit.DB) (s migrations.Schema, err error) {
		t.Helper()
		s, err = migrations.Check(t.Context(), db, "")
		return s, err
	}

	t.Run("as generated", func(t *testing.T) {
		t.Parallel()
		url := harness.NewMigrated(t)
		pool := harness.Connect(t, url, 2)
		for name, db := range map[string]ratelimit.DB{"pgx": pool, "sql": ratelimit.SQL(harness.OpenSQL(t, "pgx", url, 1)), "lib/pq": ratelimit.SQL(harness.OpenSQL(t, "postgres", url, 1))} {
			if s, err := check(t, db); err != nil || s != (migrations.Schema{Version: migrations.Version, Hash: migrations.Hash}) || s.Differs() != "" {
				t.Errorf("%s: %+v, %v, want %d and %s", name, s, err, migrations.Version, migrations.Hash)
			}
		}
		var s migrations.Schema
		if err := pool.QueryRow(t.Context(), harness.DocSQL(t, "docs/operations.md", "SELECT version, hash")).Scan(&s.Version, &s.Hash); err != nil || s.Hash != migrations.Hash {
			t.Errorf("as the page says: %+v, %v", s, err)
		}
		// Whatever the session has set.
		conn := harness.Acquire(t, harness.Connect(t, url, 1))
		for _, set := range []string{"SET timezone = 'Asia/Kolkata'", "SET datestyle = 'SQL, DMY'", "SET intervalstyle = 'iso_8601'", "SET extra_float_digits = -3",
			"SET quote_all_identifiers = on", "SET standard_conforming_strings = off", "SET search_path = public, pg_catalog", "SET default_transaction_read_only = on", "SET default_transaction_isolation = 'serializable'"} {
			if harness.Server.Pooled() {
				break
			}
			if _, err := conn.Exec(t.Context(), set); err != nil {
				t.Fatal(err)
			}
			if s, err := check(t, conn); err != nil || s.Hash != migrations.Hash {
				t.Errorf("%s: %+v, %v", set, s, err)
			}
		}
		path := func() string { return harness.Scan[string](t, conn, "SELECT current_setting('search_path')") }
		before := path()
		if _, err := check(t, conn); err != nil || path() != before {
			t.Errorf("the search_path was %s and is %s, %v", before, path(), err)
		}
		if told, err := warned(t, pool); err != nil || len(told) > 0 {
			t.Errorf("open: %v, %v", told, err)
		}
	})

	t.Run("none", func(t *testing.T) {
		t.Parallel()
		harness.NeedsToPrepareAgain(t)
		pool := harness.Connect(t, harness.NewDatabase(t), 2)
		for _, err := range []error{harness.Second(check(t, pool)), harness.Second(warned(t, pool))} {
			if !errors.Is(err, migrations.ErrBehind) || harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "txlimit migrate") {
				t.Errorf("%v", err)
			}
		}
	})

	t.Run("older", func(t *testing.T) {
		t.Parallel()
		pool := harness.Connect(t, harness.NewDatabase(t), 2)
		c := newClone(t)
		c.older()
		harness.MustExec(t, pool, "CREATE SCHEMA ratelimit; "+harness.UpOf(t, os.DirFS(c.dir)))
		s, err := check(t, pool)
		if s.Version != migrations.Version-1 || !errors.Is(err, migrations.ErrBehind) || !strings.Contains(err.Error(), "txlimit migrate") {
			t.Errorf("%+v, %v", s, err)
		}
		if _, err := warned(t, pool); !errors.Is(err, migrations.ErrBehind) || !strings.HasPrefix(err.Error(), "ratelimit: schema: ") {
			t.Errorf("open: %v", err)
		}
		if got := harness.Scan[int](t, pool, "SELECT count(*)::integer FROM ratelimit.definitions"); got != 0 {
			t.Error("it has published all the same")
		}
	})

	t.Run("newer", func(t *testing.T) {
		t.Parallel()
		pool := harness.Connect(t, harness.NewDatabase(t), 2)
		c := newClone(t)
		c.later()
		harness.MustExec(t, pool, "CREATE SCHEMA ratelimit; "+harness.UpOf(t, os.DirFS(c.dir)))
		if s, err := check(t, pool); err != nil || s.Version != migrations.Version+3 || s.Differs() != "" || s.Hash == migrations.Hash {
			t.Errorf("%+v, %v", s, err)
		}
		if told, err := warned(t, pool); err != nil || len(told) > 0 {
			t.Errorf("open: %v, %v", told, err)
		}
	})

	t.Run("edited", func(t *testing.T) {
		t.Parallel()
		for name, edit := range map[string]string{
			"a body in text":       `SELECT replace(pg_get_functiondef('ratelimit._consume'::regproc), 'Locks nothing', 'Locks little')`,
			"a body after RETURN":  `SELECT replace(pg_get_functiondef('ratelimit._available'::regproc), 'LEAST(capacity', 'LEAST(capacity + ''1''::double precision')`,
			"another form of body": `SELECT regexp_replace(pg_get_functiondef('ratelimit._valid'::regproc), 'RETURN (.*)$', 'AS $$ SELECT \1 $$')`,
			"a function is gone":   `SELECT 'DROP FUNCTION ratelimit.refuse()'`,
		} {
			pool := harness.Connect(t, harness.NewMigrated(t), 2)
			before, err := check(t, pool)
			if err != nil {
				t.Fatal(err)
			}
			statement := harness.Scan[string](t, pool, edit)
			if unchanged := harness.Scan[bool](t, pool, "SELECT $1 = pg_get_functiondef('ratelimit._consume'::regproc)", statement); unchanged {
				t.Errorf("%s: nothing is edited", name)
			}
			harness.MustExec(t, pool, statement)
			s, err := check(t, pool)
			if err != nil || s.Hash == before.Hash || s.Version != before.Version {
				t.Errorf("%s: %+v, %v", name, s, err)
			}
			told, err := warned(t, pool)
			if err != nil || len(told) != 1 || !strings.Contains(told[0], "ratelimit: schema: ") || !strings.Contains(told[0], "txlimit migrate status") {
				t.Errorf("%s: open: %v, %v", name, told, err)
			}
		}
	})

	t.Run("configured, with functions of others beside it", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 2)
		harness.MustExec(t, pool, `ALTER FUNCTION ratelimit._consume SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
			ALTER FUNCTION ratelimit._wire_consume SET enable_seqscan = off;
			CREATE FUNCTION ratelimit.of_mine() RETURNS integer LANGUAGE sql RETURN 1;
			CREATE OR REPLACE FUNCTION ratelimit._distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN true`)
		if s, err := check(t, pool); err != nil || s.Hash != migrations.Hash {
			t.Errorf("%+v, %v", s, err)
		}
	})

	t.Run("a rolling deploy, both ways", func(t *testing.T) {
		t.Parallel()
		c := newClone(t)
		c.later()
		url := harness.NewDatabase(t)
		pool := harness.Connect(t, url, 8)
		provider := harness.NewGoose(t, harness.OpenSQL(t, "pgx", url, 4), os.DirFS(c.dir), migrations.VersionTable)
		goTo(t, provider, migrations.Version)
		var stop atomic.Bool
		var calls atomic.Int64
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop.Store(true)
		// Each process opens, works for a while and closes, whatever the migrations do meanwhile.
		for range 4 {
			wg.Go(func() {
				for !stop.Load() {
					o := harness.Opening(pool)
					o.SweepEvery, o.OnError = 20*time.Millisecond, harness.NoError(t)
					limits, err := ratelimit.Open(t.Context(), pool, o)
					if err != nil {
						t.Errorf("open: %v", err)
						return
					}
					for range 20 {
						if _, err := limits.Consume(t.Context(), pool, harness.OpenedBucket.Key("ann"), harness.OpenedWindow.Key("ann")); err != nil && !harness.Denied(err) {
							t.Errorf("consume: %v", err)
						}
						calls.Add(1)
					}
					ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
					if err := limits.Close(ctx); err != nil {
						t.Errorf("close: %v", err)
					}
					cancel()
				}
			})
		}
		for _, version := range []int{4, 1, 2, 3, 2, 1, 4, 1} {
			before := calls.Load()
			goTo(t, provider, int64(version))
			if s, err := check(t, pool); err != nil || s.Version != version {
				t.Errorf("at %d: %+v, %v", version, s, err)
			}
			harness.Eventually(t, "traffic goes on", func() bool { return t.Failed() || calls.Load() > before+100 })
		}
	})
}

// older makes the schema of the version before, whose functions are today's.
func (c clone) older() {
	c.Helper()
	c.edit("engine/version.sql", "version := '/* TEMPLATE: version */'", "version := '/* TEMPLATE: version */'::integer - 1")
	c.generate()
}

// TestOnlyUTF8: in a database or a session of another encoding, Go's é and psql's é would be two keys.
func TestOnlyUTF8(t *testing.T) {
	t.Parallel()
	if harness.DefaultMode(t) == pgx.QueryExecModeSimpleProtocol {
		harness.NeedsSession(t, "since pgx sends nothing by the simple protocol with client_encoding=LATIN1")
	}
	admin := harness.NewPool(t, 1)
	name := "latin1_" + strings.ToLower(rand.Text())
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name+" ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := admin.Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	latin1 := harness.Reconfigured(t, admin, func(c *pgxpool.Config) {
		c.ConnConfig.Database = name
	})
	schema := harness.UpOf(t, os.DirFS(harness.MigrationsDir())) // harness.NewGoose makes it
	db := stdlib.OpenDBFromPool(latin1)
	defer db.Close()
	_, up := harness.NewGoose(t, db, migrated.Files(), migrations.VersionTable).Up(t.Context())
	run := func(sql string) error {
		return latin1.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
			_, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
			return err
		})
	}
	for what, err := range map[string]error{"goose": up, "psql": run("BEGIN; " + schema + "; ROLLBACK")} {
		if harness.SQLState(err) != "0A000" || !strings.Contains(err.Error(), "UTF8") || !strings.Contains(err.Error(), "LATIN1") {
			t.Errorf("%s in a LATIN1 database: %v", what, err)
		}
	}
	// A dump brings the schema there all the same.
	if err := run(strings.Replace(schema, "<> 'UTF8'", "<> 'LATIN1'", 1)); err != nil {
		t.Fatal(err)
	}
	utf8 := harness.Connect(t, harness.NewMigrated(t), 2)
	session := func(pool *pgxpool.Pool, encoding string) *pgxpool.Pool {
		return harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
			harness.StartWith(t, c.ConnConfig, map[string]string{"client_encoding": encoding})
		})
	}
	for what, row := range map[string]struct {
		pool *pgxpool.Pool
		fine bool
	}{
		"a LATIN1 database": {latin1, false}, "a LATIN1 database, with a session that converts": {session(latin1, "UTF8"), false},
		"a session of LATIN1": {session(utf8, "LATIN1"), false}, "a session of UTF8": {session(utf8, "UTF8"), true},
	} {
		o := harness.Opening(row.pool)
		o.NoBackground = true
		limits, opened := ratelimit.Open(t.Context(), row.pool, o)
		if opened == nil {
			harness.CloseLimiter(t, limits)
		}
		_, checked := migrations.Check(t.Context(), row.pool, "")
		for call, err := range map[string]error{"Open": opened, "Check": checked} {
			if (err == nil) != row.fine || err != nil && (!strings.Contains(err.Error(), "LATIN1") || !strings.Contains(err.Error(), "client_encoding") || errors.Is(err, migrations.ErrBehind)) {
				t.Errorf("%s on %s: %v", call, what, err)
			}
		}
	}
}

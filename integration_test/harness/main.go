// Package harness is what the tests of all areas share: a real Postgres, which internal/postgres finds or starts, and how tests are written.
package harness

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
)

// Server is the one server of the tests of a package.
var Server *postgres.Server

// Main runs the tests of a package. Some tests start this program again, as a process of another kind: its environment variable has the URL
// of the database.
func Main(m *testing.M, workers map[string]func(url string) error) {
	for variable, work := range workers {
		if url := os.Getenv(variable); url != "" {
			exit(0, work(url))
		}
	}
	code := postgres.RunTests(m, &Server)
	printNotPooled()
	exit(code, removeTool())
}

func exit(code int, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// Levels are the isolation levels that behaviour is tested at.
var Levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// NewDatabase makes an empty database for the test and returns a URL for it.
func NewDatabase(t testing.TB) string {
	t.Helper()
	url, drop, err := Server.NewDatabase(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := drop(); err != nil {
			t.Error(err)
		}
	})
	return url
}

// reusable is a migrated database.
type reusable struct {
	url   string
	drop  func() error
	state string // of its objects, see stateOf
}

// spare are the migrated databases that tests have left as they were made. They are dropped when the server is closed.
var spare struct {
	sync.Mutex
	databases []reusable
}

// leavesStatements matches tests that end clients without waiting for their statements, which may run after the test.
var leavesStatements = regexp.MustCompile("Chaos|Kill")

// NewMigrated returns a URL for a migrated database without limits. An earlier test may have used it: to make one takes longer than many tests.
func NewMigrated(t testing.TB) string {
	t.Helper()
	var m reusable
	spare.Lock()
	if n := len(spare.databases); n > 0 {
		m, spare.databases = spare.databases[n-1], spare.databases[:n-1]
	}
	spare.Unlock()
	if m.url == "" {
		var err error
		m.url, m.drop = makeMigrated(t)
		if m.state, err = OnConn(t.Context(), m.url, stateOf); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() || Server.Pooled() || leavesStatements.MatchString(t.Name()) || !m.asMade(t) {
			if err := m.drop(); err != nil {
				t.Error(err)
			}
			return
		}
		spare.Lock()
		defer spare.Unlock()
		spare.databases = append(spare.databases, m)
	})
	return m.url
}

// asMade deletes all rows, and reports whether the database is as it was when it was made.
func (m reusable) asMade(t testing.TB) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience)
	defer cancel()
	state, err := OnConn(ctx, m.url, func(ctx context.Context, conn *pgx.Conn) (string, error) {
		_, err := conn.Exec(ctx, `SET lock_timeout = '1s';
			TRUNCATE ratelimit.limits, ratelimit.holds, ratelimit.definitions, ratelimit.overrides, ratelimit.usage, ratelimit.denials, ratelimit.sweeps RESTART IDENTITY`, pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			return "", err
		}
		return stateOf(ctx, conn)
	})
	return err == nil && state == m.state
}

// OnConn does something on a connection of its own.
func OnConn[T any](ctx context.Context, url string, do func(context.Context, *pgx.Conn) (T, error)) (result T, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return result, err
	}
	defer conn.Close(ctx)
	return do(ctx, conn)
}

// makeMigrated makes a migrated database, by a copy of one unless the tables are of another kind.
func makeMigrated(t testing.TB) (url string, drop func() error) {
	t.Helper()
	template, err := migrated.Template(t.Context(), Server)
	if err == nil {
		url, drop, err = Server.NewDatabase(t.Context(), template)
	}
	if err != nil {
		t.Fatal(err)
	}
	changeTables(t, url)
	return url, drop
}

// stateOf returns a hash of what the database has besides rows: its objects with what tests change of them, the statistics of the
// planner, and the versions.
func stateOf(ctx context.Context, conn *pgx.Conn) (state string, err error) {
	err = conn.QueryRow(ctx, `
		WITH s AS (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'),
		     c AS (SELECT c.* FROM pg_class AS c, s WHERE c.relnamespace = s.oid)
		SELECT md5(string_agg(o, chr(10) ORDER BY o)) FROM (
			SELECT concat_ws(' ', 'schema', n.xmin) FROM pg_namespace AS n JOIN s ON n.oid = s.oid
			UNION ALL SELECT concat_ws(' ', 'class', c.oid, c.relname, c.relkind, c.relowner, c.relacl, c.reloptions, c.relpersistence, c.relrowsecurity, c.relforcerowsecurity) FROM c
			UNION ALL SELECT concat_ws(' ', 'column', a.attrelid, a.attnum, a.xmin) FROM pg_attribute AS a JOIN c ON a.attrelid = c.oid
			UNION ALL SELECT concat_ws(' ', 'statistics', a.starelid, a.staattnum) FROM pg_statistic AS a JOIN c ON a.starelid = c.oid
			UNION ALL SELECT concat_ws(' ', 'trigger', t.oid, t.xmin) FROM pg_trigger AS t JOIN c ON t.tgrelid = c.oid
			UNION ALL SELECT concat_ws(' ', 'rule', r.oid, r.xmin) FROM pg_rewrite AS r JOIN c ON r.ev_class = c.oid
			UNION ALL SELECT concat_ws(' ', 'policy', p.oid, p.xmin) FROM pg_policy AS p JOIN c ON p.polrelid = c.oid
			UNION ALL SELECT concat_ws(' ', 'constraint', k.oid, k.xmin) FROM pg_constraint AS k JOIN s ON k.connamespace = s.oid
			UNION ALL SELECT concat_ws(' ', 'function', p.oid, p.xmin) FROM pg_proc AS p JOIN s ON p.pronamespace = s.oid
			UNION ALL SELECT concat_ws(' ', 'type', t.oid, t.xmin) FROM pg_type AS t JOIN s ON t.typnamespace = s.oid
			UNION ALL SELECT concat_ws(' ', 'default', d.oid) FROM pg_default_acl AS d JOIN s ON d.defaclnamespace = s.oid
			UNION ALL SELECT concat_ws(' ', 'version', v.id, v.version_id) FROM `+migrations.VersionTable+` AS v
		) AS objects (o)`).Scan(&state)
	return state, err
}

// Migrate migrates a database.
func Migrate(t testing.TB, url string) {
	t.Helper()
	if err := migrated.Up(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	changeTables(t, url)
}

// changeTables makes the tables of the kind that TableKind names.
func changeTables(t testing.TB, url string) {
	t.Helper()
	if kind := os.Getenv(TableKind); kind != "" {
		change, err := os.ReadFile("../harness/testdata/" + kind + ".sql")
		if err != nil {
			t.Fatal(err)
		}
		_, err = OnConn(t.Context(), url, func(ctx context.Context, conn *pgx.Conn) (_ any, err error) {
			_, err = conn.Exec(ctx, string(change))
			return nil, err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TableKind is the environment variable that makes all tests run on a table of a kind, partitioned. By default, it is as the
// migrations make it.
const TableKind = "TXLIMIT_TEST_TABLE"

// SchemaSQL makes the schema, and what the migrations make in it.
func SchemaSQL(t testing.TB) string {
	t.Helper()
	return "CREATE SCHEMA ratelimit;\n" + UpOf(t, os.DirFS(MigrationsDir()))
}

// UpOf is what migrations run, without the schema itself.
func UpOf(t testing.TB, files fs.FS) string {
	t.Helper()
	sql, err := inschema.Up(files)
	if err != nil {
		t.Fatal(err)
	}
	return sql
}

// MigrationsDir is the directory of package migrations.
func MigrationsDir() string { return cmp.Or(os.Getenv(migrated.Dir), "../../migrations") }

var handles = struct {
	sync.Mutex
	byKind map[string][]any
}{byKind: map[string][]any{}}

// reused returns a handle of a kind, for a test that leaves nothing but limits in its migrated database. Earlier tests of
// that sort may have used the same handle: a new database and new connections take longer than most of those tests. The
// database is dropped with the server, or when the server is closed.
func reused[T any](t testing.TB, kind string, open func(url string) (T, error), truncate func(ctx context.Context, handle T, sql string) error, closeIt func(T)) T {
	t.Helper()
	handles.Lock()
	var handle T
	free := handles.byKind[kind]
	if n := len(free); n > 0 {
		handle, handles.byKind[kind] = free[n-1].(T), free[:n-1]
	}
	handles.Unlock()
	if len(free) == 0 {
		url, _ := makeMigrated(t)
		var err error
		if handle, err = open(url); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			closeIt(handle)
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience)
		defer cancel()
		if err := truncate(ctx, handle, "TRUNCATE ratelimit.limits, ratelimit.holds"); err != nil {
			t.Error(err)
			closeIt(handle)
			return
		}
		handles.Lock()
		defer handles.Unlock()
		handles.byKind[kind] = append(handles.byKind[kind], handle)
	})
	return handle
}

// ReusedPool returns a pool that other tests have used before.
func ReusedPool(t testing.TB, conns int, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	return reused(t, fmt.Sprint("pool ", conns, mode), func(url string) (*pgxpool.Pool, error) {
		return OpenPool(context.Background(), url, conns, mode)
	}, func(ctx context.Context, pool *pgxpool.Pool, sql string) error {
		_, err := pool.Exec(ctx, sql)
		for _, conn := range pool.AcquireAllIdle(ctx) {
			if _, resetErr := conn.Exec(ctx, "RESET ALL"); err == nil {
				err = resetErr
			}
			conn.Release()
		}
		return err
	}, (*pgxpool.Pool).Close)
}

// NewPool makes a migrated database for the test and a pool on it.
func NewPool(t testing.TB, conns int) *pgxpool.Pool {
	t.Helper()
	return Connect(t, NewMigrated(t), conns)
}

// NewUnmigrated makes an empty database for the test and a pool on it.
func NewUnmigrated(t testing.TB, conns int) *pgxpool.Pool {
	t.Helper()
	return Connect(t, NewDatabase(t), conns)
}

// Connect makes a pool for a URL.
func Connect(t testing.TB, url string, conns int) *pgxpool.Pool {
	t.Helper()
	pool, err := OpenPool(t.Context(), url, conns, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// OpenPool opens a pool in a query mode; 0 is the mode of the URL.
func OpenPool(ctx context.Context, url string, conns int, mode pgx.QueryExecMode) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	if mode != 0 {
		config.ConnConfig.DefaultQueryExecMode = mode
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" { // without a name, PgBouncer keeps that of another client
		config.ConnConfig.RuntimeParams["application_name"] = "txlimit_test"
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// NewGoose is goose with the migrations in files.
func NewGoose(t testing.TB, db *sql.DB, files fs.FS, table string) *goose.Provider {
	t.Helper()
	if table == migrations.VersionTable {
		Succeeds(t, migrations.Prepare(t.Context(), db, ""))
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithTableName(table))
	if err != nil {
		t.Fatal(err)
	}
	return provider
}

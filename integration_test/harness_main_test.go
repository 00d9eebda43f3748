// Package integration_test tests the limiter on a real Postgres, which internal/postgres finds or starts.
package integration_test

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/migrations"
)

var server *postgres.Server

func TestMain(m *testing.M) {
	if url := os.Getenv(workerURL); url != "" { // a process of TestOverridesInFourProcesses
		fmt.Fprintln(os.Stderr, overridesWorker(context.Background(), url))
		os.Exit(1)
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if url := os.Getenv(usageWorker); url != "" {
		return workOnUsage(url)
	}
	var err error
	if server, err = postgres.Start(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err) // without Postgres the tests fail; they are not skipped
		return 1
	}
	fmt.Println("tests run on", server)
	code := m.Run()
	printNotPooled()
	if err := server.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// levels are the isolation levels that behaviour is tested at.
var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// newSchema makes an empty schema for the test and returns a URL for it.
func newSchema(t testing.TB) string {
	t.Helper()
	url, drop, err := server.NewSchema(t.Context())
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

// newMigrated makes a migrated schema for the test and returns a URL for it.
func newMigrated(t testing.TB) string {
	t.Helper()
	url := newSchema(t)
	migrate(t, url)
	return url
}

func migrate(t testing.TB, url string) {
	t.Helper()
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := newGoose(t, db, migrationFiles(), migrations.VersionTable).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if kind := os.Getenv(tableKind); kind != "" {
		change, err := os.ReadFile("testdata/" + kind + ".sql")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.ExecContext(t.Context(), string(change)); err != nil {
			t.Fatal(err)
		}
	}
}

// tableKind is the environment variable that makes all tests run on a table of a kind, partitioned. By default, it is as the
// migrations make it.
const tableKind = "TXLIMIT_TEST_TABLE"

// migrationFiles is migrations.FS. For command mutate, the files are read at run time, so that an edit of SQL compiles
// nothing.
func migrationFiles() fs.FS {
	if os.Getenv(mutated) != "" {
		return os.DirFS(migrationsDir())
	}
	return migrations.FS
}

// migrationsDir is the directory of package migrations.
func migrationsDir() string { return cmp.Or(os.Getenv(mutated), "../migrations") }

// mutated is the environment variable with the directory of command mutate's migrations.
const mutated = "TXLIMIT_TEST_MIGRATIONS"

var reusable = struct {
	sync.Mutex
	handles map[string][]any // by kind
}{handles: map[string][]any{}}

// reused returns a handle of a kind, for a test that leaves nothing but limits in its migrated schema. Earlier tests of
// that sort may have used the same handle: a new schema and new connections take longer than most of those tests. The
// schema is dropped with the server, or when the server is closed.
func reused[T any](t testing.TB, kind string, open func(url string) (T, error), truncate func(ctx context.Context, handle T, sql string) error, closeIt func(T)) T {
	t.Helper()
	reusable.Lock()
	var handle T
	free := reusable.handles[kind]
	if n := len(free); n > 0 {
		handle, reusable.handles[kind] = free[n-1].(T), free[:n-1]
	}
	reusable.Unlock()
	if len(free) == 0 {
		url, _, err := server.NewSchema(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		migrate(t, url)
		if handle, err = open(url); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			closeIt(handle)
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if err := truncate(ctx, handle, "TRUNCATE rate_limits"); err != nil {
			t.Error(err)
			closeIt(handle)
			return
		}
		reusable.Lock()
		defer reusable.Unlock()
		reusable.handles[kind] = append(reusable.handles[kind], handle)
	})
	return handle
}

// reusedPool returns a pool that other tests have used before.
func reusedPool(t testing.TB, conns int, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	return reused(t, fmt.Sprint("pool ", conns, mode), func(url string) (*pgxpool.Pool, error) {
		return openPool(context.Background(), url, conns, mode)
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

// newPool makes a migrated schema for the test and a pool on it.
func newPool(t testing.TB, conns int) *pgxpool.Pool {
	t.Helper()
	return connect(t, newMigrated(t), conns)
}

// connect makes a pool for a URL.
func connect(t testing.TB, url string, conns int) *pgxpool.Pool {
	t.Helper()
	pool, err := openPool(t.Context(), url, conns, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// openPool opens a pool in a query mode; 0 is the mode of the URL.
func openPool(ctx context.Context, url string, conns int, mode pgx.QueryExecMode) (*pgxpool.Pool, error) {
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

func newGoose(t testing.TB, db *sql.DB, files fs.FS, table string) *goose.Provider {
	t.Helper()
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithTableName(table))
	if err != nil {
		t.Fatal(err)
	}
	return provider
}

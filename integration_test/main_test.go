// Package integration_test tests the limiter on a real Postgres, which internal/postgres finds or starts.
package integration_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/migrations"
)

var server *postgres.Server

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if server, err = postgres.Start(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err) // no Postgres is a failure, never a skip
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

// newSchema makes an empty schema of the test's own and returns the URL that leads to it.
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

// newPool makes a migrated schema of the test's own and a pool for it.
func newPool(t testing.TB, conns int) *pgxpool.Pool {
	t.Helper()
	url := newSchema(t)
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := newGoose(t, db, migrations.FS, migrations.VersionTable).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	return connect(t, url, conns)
}

// connect makes a pool for a URL.
func connect(t testing.TB, url string, conns int) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = int32(conns)
	if config.ConnConfig.RuntimeParams["application_name"] == "" { // without any, PgBouncer would leave that of another client
		config.ConnConfig.RuntimeParams["application_name"] = "txlimit_test"
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func newGoose(t testing.TB, db *sql.DB, files fs.FS, table string) *goose.Provider {
	t.Helper()
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithTableName(table))
	if err != nil {
		t.Fatal(err)
	}
	return provider
}

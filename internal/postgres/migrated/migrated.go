// Package migrated makes this library's schema for tests, benchmarks and examples.
package migrated

import (
	"context"
	"database/sql"
	"io/fs"
	"os"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/migrations"
)

// Dir is the environment variable with the directory of command mutate's migrations.
const Dir = "TXLIMIT_TEST_MIGRATIONS"

// Files is migrations.FS. For command mutate, the files are read at run time, so that an edit of SQL compiles nothing.
func Files() fs.FS {
	if dir := os.Getenv(Dir); dir != "" {
		return os.DirFS(dir)
	}
	return migrations.FS
}

// Up migrates the database or schema that a connection string leads to.
func Up(ctx context.Context, url string) error {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return err
	}
	defer db.Close()
	// The limiter has its own version table: its migration 1 is not the application's migration 1.
	provider, err := goose.NewProvider(goose.DialectPostgres, db, Files(), goose.WithTableName(migrations.VersionTable))
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}

// NewSchema makes a migrated schema for a test, and returns a connection string for it. It is dropped when the test ends.
func NewSchema(t testing.TB, server *postgres.Server) (url string) {
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
	if err := Up(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	return url
}

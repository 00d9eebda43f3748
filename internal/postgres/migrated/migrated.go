// Package migrated makes this library's schema for tests, benchmarks and examples.
package migrated

import (
	"context"
	"database/sql"
	"io/fs"
	"os"
	"sync"
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

// Up migrates the database that a connection string leads to.
func Up(ctx context.Context, url string) error { return UpIn(ctx, url, "") }

// UpIn is Up for a schema with another name.
func UpIn(ctx context.Context, url, schema string) error {
	db, err := sql.Open("pgx", url)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := migrations.Prepare(ctx, db, schema); err != nil {
		return err
	}
	files, table := Files(), migrations.VersionTable
	if schema != "" {
		files, table = migrations.In(schema), schema+".goose_version"
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, goose.WithTableName(table))
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}

var templates struct {
	sync.Mutex
	urls map[*postgres.Server]string
}

// Template returns a migrated database of a server, for copies of it. Nobody must connect to it.
func Template(ctx context.Context, server *postgres.Server) (url string, err error) {
	templates.Lock()
	defer templates.Unlock()
	if url := templates.urls[server]; url != "" {
		return url, nil
	}
	if url, _, err = server.NewDatabase(ctx, ""); err != nil {
		return "", err
	}
	if err := Up(ctx, url); err != nil {
		return "", err
	}
	if templates.urls == nil {
		templates.urls = map[*postgres.Server]string{}
	}
	templates.urls[server] = url
	return url, nil
}

// NewDatabase makes a migrated database for a test, and returns a connection string for it. It is dropped when the test ends.
func NewDatabase(t testing.TB, server *postgres.Server) (url string) {
	t.Helper()
	template, err := Template(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	url, drop, err := server.NewDatabase(t.Context(), template)
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

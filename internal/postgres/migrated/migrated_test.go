package migrated_test

import (
	"context"
	"database/sql"
	"os"
	"testing"

	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
)

var server *postgres.Server

func TestMain(m *testing.M) { os.Exit(postgres.RunTests(m, &server)) }

// migrate is what docs/operations.md says.
func migrate(ctx context.Context, db *sql.DB) error {
	if err := migrations.Prepare(ctx, db, ""); err != nil {
		return err
	}
	versions := goose.WithTableName(migrations.VersionTable)
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, versions)
	if err != nil {
		return err
	}
	_, err = provider.Up(ctx)
	return err
}

// TestTheDocsMigrateAsWeDo: on a database that Up has migrated, nothing is left to do.
func TestTheDocsMigrateAsWeDo(t *testing.T) {
	t.Parallel()
	db, err := sql.Open("pgx", migrated.NewDatabase(t, server))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	count := func() (n int) {
		if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM "+migrations.VersionTable).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := count()
	if err := migrate(t.Context(), db); err != nil || before == 0 || count() != before {
		t.Errorf("%d versions, then %d; %v", before, count(), err)
	}
}

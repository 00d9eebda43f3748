// Package migrations makes the limiter's schema: its tables, and the functions that work on them. Everything is in that schema.
//
// Run it with goose:
//
//	if err := migrations.Prepare(ctx, db, ""); err != nil {
//		return err
//	}
//	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, goose.WithTableName(migrations.VersionTable))
//	...
//	_, err = provider.Up(ctx)
//
// If several processes may migrate at once, give goose a session locker (goose.WithSessionLocker).
//
// To upgrade, migrate first and then deploy. To go back, deploy first. A newer schema serves older versions of the library: a released
// function never changes its arguments, columns or answers. If it has to, a new function with a new name is added. A newer library
// refuses an older schema when it starts: [Check]. Without that check, it fails where it needs something that is missing (SQLSTATE 42883,
// or 42P01 for a view), and grants nothing there.
// Migrations lock no rows of the limits, so traffic can go on.
//
// Everything belongs to the role that runs the migration. Nobody else may use it until ratelimit.grant says so. Who may use the functions may
// also use those that a later migration makes.
//
// The source is engine/*.sql; engine/README.md says how to change it. The rest is generated.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/txlimit/txlimit/internal/inschema"
)

// FS holds the goose migrations, in SQL, for the schema ratelimit.
//
//go:embed 0*.sql
var FS embed.FS

// VersionTable is where goose should note which migrations of [FS] it has run. It is in the schema, so that a dump has both or neither. For
// another schema, say "tenant_a.goose_version", and see [In] for a name that has to be in quotes.
const VersionTable = inschema.Default + ".goose_version"

// In returns the migrations for a schema with another name: at most 51 bytes of letters, digits, spaces, _ and -. "" is ratelimit. For an invalid name,
// opening a file fails. All Limiters of the schema name it: ratelimit.Options has Schema.
//
// Goose does not know a table whose schema has to be in quotes. For such a name, connect with the schema as the search_path, and have the
// versions noted in "goose_version"; or use `txlimit migrate`.
func In(schema string) fs.FS { return named{FS, schema} }

type named struct {
	fs.FS
	schema string
}

func (n named) Open(name string) (fs.File, error) {
	file, err := n.FS.Open(name)
	if err != nil || !strings.HasSuffix(name, ".sql") {
		return file, err
	}
	text, err := fs.ReadFile(n.FS, name)
	if err != nil {
		return nil, err
	}
	sql, err := inschema.Text(string(text), n.schema)
	return sqlFile{file, strings.NewReader(sql)}, err
}

// sqlFile is a file whose names were put into a schema.
type sqlFile struct {
	fs.File
	text *strings.Reader
}

func (f sqlFile) Read(p []byte) (int, error) { return f.text.Read(p) }

// Prepare makes the schema, which goose needs for its table, if it is not there. "" is ratelimit. db is a *sql.DB, *sql.Conn or *sql.Tx; a rollback
// of a transaction undoes it. To make the schema, the role needs CREATE on the database. Prepare refuses a schema that another role owns, one with
// tables that are not the limiter's, one in which others may create objects, and one with functions of others: they could replace what is called there. A role of a group that owns it sets that role first.
func Prepare(ctx context.Context, db interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}, schema string) error {
	if schema == "" {
		schema = inschema.Default
	}
	if err := inschema.Check(schema); err != nil {
		return err
	}
	var mine, open, foreign, alien bool
	var owner string
	err := db.QueryRowContext(ctx, `SELECT pg_catalog.pg_get_userbyid(n.nspowner), pg_catalog.pg_get_userbyid(n.nspowner) OPERATOR(pg_catalog.=) current_user,
		    EXISTS (SELECT FROM pg_catalog.aclexplode(n.nspacl) AS a WHERE a.privilege_type OPERATOR(pg_catalog.=) 'CREATE'::pg_catalog.text AND a.grantee OPERATOR(pg_catalog.<>) n.nspowner),
		    coalesce((SELECT NOT bool_or(c.relname IN ('goose_version', 'turn_00')) FROM pg_catalog.pg_class AS c WHERE c.relnamespace OPERATOR(pg_catalog.=) n.oid), false),
		    EXISTS (SELECT FROM pg_catalog.pg_proc AS p WHERE p.pronamespace OPERATOR(pg_catalog.=) n.oid AND p.proowner OPERATOR(pg_catalog.<>) n.nspowner)
		FROM pg_catalog.pg_namespace AS n WHERE n.nspname OPERATOR(pg_catalog.=) CAST($1 AS pg_catalog.text)::pg_catalog.name`, schema).Scan(&owner, &mine, &open, &foreign, &alien)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		if _, err = db.ExecContext(ctx, `CREATE SCHEMA "`+schema+`"`); err == nil {
			return Prepare(ctx, db, schema) // default privileges may have given it to others
		}
	case err == nil && !mine:
		return fmt.Errorf("migrations: the schema %q belongs to the role %q, which could replace what is in it: migrate as that role, or into a schema of another name", schema, owner)
	case err == nil && open:
		return fmt.Errorf("migrations: other roles may create objects in the schema %q, and so replace what is called there: REVOKE CREATE ON SCHEMA from them, or migrate into a schema of another name", schema)
	case err == nil && alien:
		return fmt.Errorf("migrations: another role owns a function in the schema %q, which may be called in place of the limiter's: drop it, or give it to %q", schema, owner)
	case err == nil && foreign:
		return fmt.Errorf("migrations: the schema %q has tables of somebody else, and none of the limiter's: migrate into a schema of another name", schema)
	}
	if state := (interface{ SQLState() string })(nil); errors.As(err, &state) && (state.SQLState() == "23505" || state.SQLState() == "42P06") { // it was made at the same time
		return Prepare(ctx, db, schema)
	}
	if err != nil {
		return fmt.Errorf("migrations: prepare the schema %q: %w", schema, err)
	}
	return nil
}

// Package migrations holds the limiter's schema: the table rate_limits and the functions that work on it.
//
// Run it with goose. Give it a version table of its own: otherwise goose takes the application's migration 1 for the limiter's.
//
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
// Everything is made in the schema that comes first in the search_path of the connection. It belongs to the role that runs the
// migration. Other tools can run schema.sql, which makes in a new database what all migrations make together.
//
// The source is engine/*.sql; engine/README.md says how to change it. The rest is generated.
package migrations

import "embed"

// FS holds the goose migrations, in SQL.
//
//go:embed 0*.sql
var FS embed.FS

// VersionTable is the name of the table in which goose should note which of these migrations it has run.
const VersionTable = "rate_limits_goose_version"

// Package migrations holds the limiter's schema: the table rate_limits and the functions that work on it.
//
// Run it with goose, under a version table of its own, so that the application's migrations and these do not take each
// other's version numbers for theirs:
//
//	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, goose.WithTableName(migrations.VersionTable))
//	...
//	_, err = provider.Up(ctx)
//
// If several processes may migrate at once, give goose a session locker (goose.WithSessionLocker).
//
// To upgrade, migrate first and then deploy; to go back, the other way round. A newer schema serves older versions of the library:
// once it is released, no function changes its arguments, its columns or what it answers. One that has to gets a new name, and the
// old one stays. A newer version of the library on an older schema fails where it needs what is not there (SQLSTATE 42883, or
// 42P01 for a view), grants nothing then, and works in the rest. Migrations lock no rows of the limits: nobody has to stop.
//
// Everything is made in the schema that comes first in the search_path of the connection, and belongs to the role that
// runs the migration. Other tools can run schema.sql, which makes on a new database what all migrations make together.
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

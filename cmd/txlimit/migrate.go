package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/spf13/cobra"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/migrations"
)

// migrated is what `migrate`, `migrate status` and `migrate down` print.
type migrated struct {
	Schema     string      `json:"schema"`
	Version    int64       `json:"schemaVersion"` // that the schema has now
	Migrations []migration `json:"migrations"`
}

// migration is a migration that was run or, for `migrate status`, one that there is.
type migration struct {
	Version   int64      `json:"version"`
	File      string     `json:"file"`
	Direction string     `json:"direction"` // up or down; "": it was not run now
	AppliedAt *time.Time `json:"appliedAt"` // nil: it was not applied, or is not noted
	Applied   bool       `json:"applied"`
}

func (a *app) migrateCommand() *cobra.Command {
	c := a.do(&cobra.Command{
		Use:   "migrate [up | status | down | sql]",
		Short: "Make or upgrade the tables and functions",
		Long: `Make the tables and functions of the limits, or upgrade them to this program's version. It says what it did. Migrate first, then deploy. To go back: deploy first, then txlimit migrate down.

They are made in a schema of their own, --schema, which is made first if it is not there. It belongs to the role that migrates. Another role
may use it once the owner has granted it: SELECT ratelimit.grant('app', 'consume').

The migrations are those of package migrations, run by goose; which have been run is noted in ` + migrations.VersionTable + `. Two that run at once wait for each other.
Rows of limits are not locked, so traffic can go on.`,
		Example: `  txlimit migrate
  txlimit migrate status
  txlimit migrate down          # one version back
  txlimit migrate sql | psql -1 -v ON_ERROR_STOP=1`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("migrate has no %q: there are %s", args[0], names(cmd))
			}
			return nil
		},
	}, "", a.migrateUp)
	up := a.do(&cobra.Command{
		Use:   "up",
		Short: "The same as migrate",
		Args:  noArgs,
	}, "", a.migrateUp)
	status := a.do(&cobra.Command{
		Use:   "status",
		Short: "List the migrations, and which have been run",
		Long: `List the migrations of this program, and which of them have been run in the schema, also by the SQL of txlimit migrate sql. Exit status 3 if one has not.
If the functions differ from those that the migrations make, it says so.`,
		Args: noArgs,
	}, "", a.migrateStatus)
	down := a.do(&cobra.Command{
		Use:   "down",
		Short: "Go one version back",
		Long: `Undo the newest migration, with the txlimit that made it. Deploy the older program before. Undoing the first migration drops the tables with all limits, overrides
and usage. The command asks first, unless --yes is given.`,
		Args: noArgs,
	}, "", a.migrateDown)
	a.yesFlag(down)
	text := a.do(&cobra.Command{
		Use:   "sql",
		Short: "Print SQL that makes the schema, for psql or another tool",
		Long: `Print the SQL that makes the schema and all in it, for psql or another tool that migrates. It needs no database. Run it in one transaction,
in a database that does not have the schema yet. Goose notes nothing of it.`,
		Example: `  txlimit migrate sql | psql -1 -v ON_ERROR_STOP=1
  txlimit migrate sql --schema tenant_a > limits.sql`,
		Args: noArgs,
	}, "", a.migrateSQL)
	c.AddCommand(up, status, down, text)
	return c
}

// migrateSQL prints what goose would run.
func (a *app) migrateSQL(context.Context, []string) error {
	if a.json {
		return usagef("migrate sql prints SQL, not JSON")
	}
	schema := a.schema
	if schema != inschema.Default {
		schema = pgx.Identifier{schema}.Sanitize()
	}
	sql, err := inschema.Up(migrations.In(a.schema))
	if err == nil {
		_, err = fmt.Fprintf(a.stdout, "CREATE SCHEMA %s;\n%s", schema, sql)
	}
	return err
}

// found is what there is of the schema.
type found struct {
	made    bool  // it has the limits
	table   bool  // it has goose's table, with rows: a restore of the schema without data leaves none
	version int64 // the newest that goose has noted. A migration that failed leaves the table without one
}

// bySQL reports whether the schema was made without goose.
func (f found) bySQL() bool { return f.made && f.version == 0 }

// goose calls fn with goose on the schema. It makes neither the schema nor goose's table.
func (a *app) goose(ctx context.Context, fn func(db *sql.DB, provider *goose.Provider, f found) error) error {
	var f found
	err := a.reading(ctx, func(tx pgx.Tx) error {
		// Of a migration that runs meanwhile, goose's table comes first: so it is looked up last.
		return tx.QueryRow(ctx, "SELECT to_regclass('ratelimit.turn_00') IS NOT NULL, coalesce(pg_relation_size(to_regclass('ratelimit.goose_version')) > 0, false)").Scan(&f.made, &f.table)
	})
	if err != nil {
		return err
	}
	config, err := a.config()
	if err != nil {
		return err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec // with times in binary form: a DateStyle may make texts unreadable
	// Goose puts no quotes around the schema of its table, and notes local times. A pooler refuses the parameter, as it must if it shares connections
	// out by transactions, or drops it: so it is set by SQL, too.
	config.RuntimeParams["search_path"] = pgx.Identifier{a.schema}.Sanitize()
	db := stdlib.OpenDB(*config, stdlib.OptionAfterConnect(func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SELECT pg_catalog.set_config('search_path', $1, false), pg_catalog.set_config('timezone', 'UTC', false)", pgx.Identifier{a.schema}.Sanitize())
		return err
	}))
	defer db.Close()
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300)) // tries each second, for five minutes
	if err != nil {
		return err
	}
	_, table, _ := strings.Cut(migrations.VersionTable, ".")
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.In(a.schema), goose.WithTableName(table), goose.WithSessionLocker(locker))
	if err == nil && f.table {
		f.version, err = provider.GetDBVersion(ctx)
	}
	if err != nil {
		return err
	}
	return fn(db, provider, f)
}

func (a *app) migrateUp(ctx context.Context, _ []string) error {
	return a.goose(ctx, func(db *sql.DB, provider *goose.Provider, f found) error {
		if f.bySQL() {
			return a.sayStatus(ctx, provider, f)
		}
		if err := migrations.Prepare(ctx, db, a.schema); err != nil {
			return err
		}
		done, told := make(chan struct{}), make(chan struct{})
		go func() { // any role may take the lock that migrations wait for
			defer close(told)
			select {
			case <-time.After(10 * time.Second):
				fmt.Fprintf(a.stderr, "Not done after 10 s. If it waits for another migration, this says who has their lock: SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = %d AND granted\n", lock.DefaultLockID)
			case <-done:
			}
		}()
		results, err := provider.Up(ctx)
		close(done)
		<-told
		if err != nil {
			return err
		}
		return a.sayMigrated(ctx, provider, results)
	})
}

func (a *app) migrateDown(ctx context.Context, _ []string) error {
	return a.goose(ctx, func(_ *sql.DB, provider *goose.Provider, f found) error {
		schema, nothing := printable(a.schema), migrated{a.schema, 0, []migration{}}
		switch {
		case f.bySQL():
			return a.nothing(nothing, "Nothing to undo: the schema %s was made by `txlimit migrate sql`, not noted by goose. "+
				"To drop it with all limits, overrides and usage: DROP SCHEMA %s CASCADE", schema, identifier(a.schema))
		case f.version == 0:
			return a.nothing(nothing, "Nothing to undo: no migration has been run in the schema %s.", schema)
		case f.version > migrations.Version:
			return fmt.Errorf("the schema %s has version %d, which this program does not know: undo it with the newer txlimit, after the older program is deployed", schema, f.version)
		}
		question := fmt.Sprintf("Undo migration %d in the schema %s?", f.version, schema)
		if f.version == 1 {
			question = fmt.Sprintf("Drop the tables of the schema %s, with all limits, overrides and usage?", schema)
		}
		if err := a.confirm(ctx, "%s", question); err != nil {
			return err
		}
		result, err := provider.Down(ctx)
		if err != nil {
			return err
		}
		return a.sayMigrated(ctx, provider, []*goose.MigrationResult{result})
	})
}

func (a *app) sayMigrated(ctx context.Context, provider *goose.Provider, results []*goose.MigrationResult) error {
	version, err := provider.GetDBVersion(ctx)
	if err != nil {
		return err
	}
	m := migrated{Schema: a.schema, Version: version, Migrations: []migration{}}
	for _, r := range results {
		m.Migrations = append(m.Migrations, migration{Version: r.Source.Version, File: r.Source.Path, Direction: r.Direction, Applied: r.Direction == "up"})
	}
	var s migrations.Schema
	var checked error
	last := version >= migrations.Version // not after `migrate down`
	if last {
		s, checked = a.checkSchema(ctx)
	}
	err = a.emit(m, func(w io.Writer) {
		for _, r := range m.Migrations {
			fmt.Fprintf(w, "%s %s\n", r.Direction, r.File)
		}
		switch {
		case len(m.Migrations) > 0:
			fmt.Fprintf(w, "the schema %s has version %d now\n", printable(a.schema), version)
		case checked == nil && s.Differs() == "":
			fmt.Fprintf(w, "nothing to do: the schema %s has version %d\n", printable(a.schema), version)
		default:
			fmt.Fprintf(w, "no migration is left to run: goose has noted version %d of the schema %s\n", version, printable(a.schema))
		}
	})
	if err != nil || !last {
		return err
	}
	return a.sayChecked(version, s, checked)
}

// sayChecked says so if the schema is not what its migrations make, although all of them were run.
func (a *app) sayChecked(version int64, s migrations.Schema, err error) error {
	if version > migrations.Version {
		fmt.Fprintf(a.stderr, "The schema has version %d, which is newer than this program: it works, and a newer txlimit can do more.\n", version)
	}
	anew := a.in("rename it, run `txlimit migrate`, grant, copy the rows, and drop the renamed one: docs/operations.md#rename-or-move-the-schema has the SQL.")
	switch {
	case errors.Is(err, migrations.ErrBehind):
		fmt.Fprintf(a.stderr, a.in("The schema %s is behind this program, and no migration is left to run: an unreleased build made it. To make it anew, %s\n"), printable(a.schema), anew)
		return errNothing
	case err == nil && s.Differs() != "":
		fmt.Fprintf(a.stderr, "The schema %s has version %d as this program, but other functions (hash %.12s, not %.12s): one was edited, or an unreleased build made the schema. "+
			"Undo the edit. If there was none, %s\n", printable(a.schema), s.Version, s.Hash, migrations.Hash, anew)
	}
	return err
}

func (a *app) migrateStatus(ctx context.Context, _ []string) error {
	return a.goose(ctx, func(_ *sql.DB, provider *goose.Provider, f found) error { return a.sayStatus(ctx, provider, f) })
}

func (a *app) sayStatus(ctx context.Context, provider *goose.Provider, f found) error {
	m := migrated{a.schema, f.version, []migration{}}
	var s migrations.Schema
	var checked error
	if f.made || f.version > 0 {
		if s, checked = a.checkSchema(ctx); checked != nil && !errors.Is(checked, migrations.ErrBehind) {
			return checked
		}
	}
	if f.version == 0 { // without goose, which would make its table
		m.Version = int64(s.Version)
		for _, source := range provider.ListSources() {
			m.Migrations = append(m.Migrations, migration{Version: source.Version, File: source.Path, Applied: source.Version <= m.Version})
		}
	} else {
		states, err := provider.Status(ctx)
		if err != nil {
			return err
		}
		for _, s := range states {
			one := migration{Version: s.Source.Version, File: s.Source.Path, Applied: s.State == goose.StateApplied}
			if one.Applied {
				one.AppliedAt = new(s.AppliedAt.UTC())
			}
			m.Migrations = append(m.Migrations, one)
		}
	}
	err := a.emit(m, func(w io.Writer) {
		t := newTable(">VERSION", "FILE", "RUN")
		for _, one := range m.Migrations {
			run := "no"
			if one.AppliedAt != nil {
				run = instant(*one.AppliedAt)
			} else if one.Applied {
				run = "by migrate sql"
			}
			t.row(fmt.Sprint(one.Version), one.File, run)
		}
		t.print(w)
	})
	if err != nil {
		return err
	}
	pending := slices.ContainsFunc(m.Migrations, func(one migration) bool { return !one.Applied })
	unreleased := f.bySQL() && m.Version == 0
	switch {
	case unreleased:
	case f.bySQL():
		state, then := "no migration is left to run", ""
		if pending {
			state, then = "it is behind this program", a.in(" Then run `txlimit migrate`.")
		}
		fmt.Fprintf(a.stderr, "The schema %s was made by `txlimit migrate sql`, not noted by goose: %s. To go on with goose: "+
			"docs/operations.md#migrations has the SQL that tells goose what is there.%s\n", printable(a.schema), state, then)
	case pending:
		fmt.Fprintf(a.stderr, a.in("Run `txlimit migrate`: the schema %s is behind this program.\n"), printable(a.schema))
	}
	if pending && !unreleased {
		return errNothing
	}
	return a.sayChecked(m.Version, s, checked)
}

// checkSchema is migrations.Check. A schema that was renamed is not behind.
func (a *app) checkSchema(ctx context.Context) (s migrations.Schema, err error) {
	err = a.reading(ctx, func(tx pgx.Tx) (err error) {
		s, err = migrations.Check(ctx, tx, a.schema)
		return err
	})
	if renamed, ok := errors.AsType[*pgconn.PgError](err); ok && renamed.Code == "3F000" {
		err = renamed
	}
	return s, err
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/spf13/cobra"

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
	var create bool
	c := a.do(&cobra.Command{
		Use:   "migrate [up | status | down] [--create-schema]",
		Short: "Make or upgrade the tables and functions",
		Long: `Make the tables and functions of the limits, or upgrade them to this program's version. It says what it did. Migrate first, then deploy. To go back: deploy first, then txlimit migrate down.

They are made in --schema. Without it, they are upgraded in the only schema of the role's search_path that has them or, if none has, made
in the first that exists. Let nobody else create objects in that schema. The migrations are those of package migrations, run by goose; which have been run is noted in ` + migrations.VersionTable + `. Two that run at once wait for each other.
Rows of limits are not locked, so traffic can go on.`,
		Example: `  txlimit migrate
  txlimit migrate --schema app --create-schema
  txlimit migrate status
  txlimit migrate down          # one version back`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("migrate has no %q: there are %s", args[0], names(cmd))
			}
			return nil
		},
	}, nil, func(ctx context.Context, _ []string) error { return a.migrateUp(ctx, create) })
	c.Flags().BoolVar(&create, "create-schema", false, "create the schema of --schema if it does not exist")
	up := a.do(&cobra.Command{
		Use:   "up",
		Short: "The same as migrate",
		Args:  noArgs,
	}, nil, func(ctx context.Context, _ []string) error { return a.migrateUp(ctx, create) })
	up.Flags().BoolVar(&create, "create-schema", false, "create the schema of --schema if it does not exist")
	status := a.do(&cobra.Command{
		Use:   "status",
		Short: "List the migrations, and which have been run",
		Long: `List the migrations of this program, and which of them have been run in the schema, also by schema.sql. Exit status 3 if one has not.
If the functions differ from those that the migrations make, it says so.`,
		Args: noArgs,
	}, []string{"SELECT " + migrations.VersionTable}, a.migrateStatus)
	down := a.do(&cobra.Command{
		Use:   "down",
		Short: "Go one version back",
		Long: `Undo the newest migration. Deploy the older program before. Undoing the first migration drops the tables with all limits, overrides
and usage. The command asks first, unless --yes is given.`,
		Args: noArgs,
	}, nil, a.migrateDown)
	a.yesFlag(down)
	c.AddCommand(up, status, down)
	return c
}

// goose calls fn with goose on the schema.
func (a *app) goose(ctx context.Context, fn func(provider *goose.Provider, schema string) error) error {
	if err := a.connect(ctx); err != nil { // for explanations, too
		return err
	}
	var schema *string // that has the limits
	err := a.reading(ctx, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, "SELECT nullif(current_schema(), 'pg_catalog')").Scan(&schema)
	})
	if err == nil && schema == nil {
		err = a.conn.QueryRow(ctx, "SELECT pg_catalog.current_schema()").Scan(&schema)
	}
	if err != nil {
		return err
	}
	if schema == nil && a.schema != "" {
		var there bool
		if err := a.conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace AS n WHERE n.nspname OPERATOR(pg_catalog.=) $1::pg_catalog.name)", a.schema).Scan(&there); err != nil {
			return err
		}
		if there {
			return fmt.Errorf("the role %s may not use the schema %s: GRANT USAGE, CREATE ON SCHEMA %s TO %s",
				printable(a.conn.Config().User), printable(a.schema), identifier(a.schema), identifier(a.conn.Config().User))
		}
		return fmt.Errorf("there is no schema %s: pass --create-schema, or run CREATE SCHEMA %s", printable(a.schema), identifier(a.schema))
	}
	if schema == nil {
		return errors.New("no schema of the role's search_path exists: pass --schema NAME --create-schema")
	}
	config, err := a.config()
	if err != nil {
		return err
	}
	config.RuntimeParams["search_path"] = pgx.Identifier{*schema}.Sanitize() // nothing of another schema is taken for Postgres' own
	db := stdlib.OpenDB(*config)
	defer db.Close()
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(1, 300)) // tries each second, for five minutes
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, goose.WithTableName(migrations.VersionTable), goose.WithSessionLocker(locker))
	if err != nil {
		return err
	}
	err = fn(provider, *schema)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42P07" {
		return fmt.Errorf("%s: the schema was made by schema.sql, not by goose: docs/operations.md#migrations has the SQL that tells goose so", oneLine(pgErr.Message))
	}
	return err
}

func (a *app) migrateUp(ctx context.Context, create bool) error {
	if create {
		if a.schema == "" {
			return usagef("--create-schema needs --schema")
		}
		if err := a.connect(ctx); err != nil {
			return err
		}
		if _, err := a.conn.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+pgx.Identifier{a.schema}.Sanitize()); err != nil {
			return err
		}
	}
	return a.goose(ctx, func(provider *goose.Provider, schema string) error {
		noted, made, err := a.bySchemaSQL(ctx, provider, schema)
		if err != nil {
			return err
		}
		if made {
			return a.madeBySchemaSQL(ctx, provider, schema, noted)
		}
		results, err := provider.Up(ctx)
		if err != nil {
			return err
		}
		return a.sayMigrated(ctx, provider, schema, results)
	})
}

func (a *app) migrateDown(ctx context.Context, _ []string) error {
	return a.goose(ctx, func(provider *goose.Provider, schema string) error {
		if _, made, err := a.bySchemaSQL(ctx, provider, schema); err != nil {
			return err
		} else if made {
			return a.nothing(migrated{schema, 0, []migration{}}, "Nothing to undo: the schema %s was made by schema.sql, not noted by goose. It is still there: docs/operations.md#uninstall says how to drop it.", printable(schema))
		}
		version, err := provider.GetDBVersion(ctx)
		if err != nil {
			return err
		}
		if version == 0 {
			return a.nothing(migrated{schema, 0, []migration{}}, "Nothing to undo: no migration has been run in the schema %s.", printable(schema))
		}
		question := fmt.Sprintf("Undo migration %d in the schema %s?", version, printable(schema))
		if version == 1 {
			question = fmt.Sprintf("Drop the tables of the schema %s, with all limits, overrides and usage?", printable(schema))
		}
		if err := a.confirm(ctx, "%s", question); err != nil {
			return err
		}
		result, err := provider.Down(ctx)
		if err != nil {
			return err
		}
		return a.sayMigrated(ctx, provider, schema, []*goose.MigrationResult{result})
	})
}

func (a *app) sayMigrated(ctx context.Context, provider *goose.Provider, schema string, results []*goose.MigrationResult) error {
	version, err := provider.GetDBVersion(ctx)
	if err != nil {
		return err
	}
	m := migrated{Schema: schema, Version: version, Migrations: []migration{}}
	for _, r := range results {
		m.Migrations = append(m.Migrations, migration{Version: r.Source.Version, File: r.Source.Path, Direction: r.Direction, Applied: r.Direction == "up"})
	}
	a.newer(provider, version)
	var s migrations.Schema
	sources := provider.ListSources()
	last := version >= sources[len(sources)-1].Version // not after `migrate down`
	var checked error
	if last {
		s, checked = a.checkSchema(ctx)
	}
	err = a.emit(m, func(w io.Writer) {
		for _, r := range m.Migrations {
			fmt.Fprintf(w, "%s %s\n", r.Direction, r.File)
		}
		switch {
		case len(m.Migrations) > 0:
			fmt.Fprintf(w, "the schema %s has version %d now\n", printable(schema), version)
		case checked == nil && s.Differs() == "":
			fmt.Fprintf(w, "nothing to do: the schema %s has version %d\n", printable(schema), version)
		default:
			fmt.Fprintf(w, "no migration is left to run: goose has noted version %d of the schema %s\n", version, printable(schema))
		}
	})
	if err != nil || !last {
		return err
	}
	return a.sayChecked(schema, s, checked)
}

// sayChecked says so if the schema is not what its migrations make, although goose has noted all of them.
func (a *app) sayChecked(schema string, s migrations.Schema, err error) error {
	if errors.Is(err, migrations.ErrBehind) {
		fmt.Fprintf(a.stderr, "The schema %s is behind this program, although goose has noted all migrations: it was made by an unreleased build. Run `txlimit migrate down`, which "+
			"drops the tables at version 1, and `txlimit migrate`; or see docs/operations.md#which-schema-is-this.\n", printable(schema))
		return errNothing
	}
	if err == nil {
		a.differs(schema, s)
	}
	return err
}

// newer says so if the schema is of a newer version than this program.
func (a *app) newer(provider *goose.Provider, version int64) {
	if sources := provider.ListSources(); version > sources[len(sources)-1].Version {
		fmt.Fprintf(a.stderr, "The schema has version %d, which is newer than this program: it works, and a newer txlimit can do more.\n", version)
	}
}

func (a *app) migrateStatus(ctx context.Context, _ []string) error {
	return a.goose(ctx, func(provider *goose.Provider, schema string) error {
		list := []migration{}
		pending := false
		version := int64(0)
		noted, made, err := a.bySchemaSQL(ctx, provider, schema)
		if err != nil {
			return err
		}
		if made {
			return a.madeBySchemaSQL(ctx, provider, schema, noted)
		}
		if !noted {
			for _, source := range provider.ListSources() {
				list, pending = append(list, migration{Version: source.Version, File: source.Path}), true
			}
		} else {
			states, err := provider.Status(ctx)
			if err != nil {
				return err
			}
			if version, err = provider.GetDBVersion(ctx); err != nil {
				return err
			}
			a.newer(provider, version)
			for _, s := range states {
				m := migration{Version: s.Source.Version, File: s.Source.Path, Applied: s.State == goose.StateApplied}
				if m.Applied {
					t := s.AppliedAt.UTC()
					m.AppliedAt = &t
				}
				pending = pending || !m.Applied
				list = append(list, m)
			}
		}
		err = a.emit(migrated{schema, version, list}, func(w io.Writer) {
			t := newTable(">VERSION", "FILE", "RUN")
			for _, m := range list {
				run := "no"
				if m.Applied {
					run = instant(*m.AppliedAt)
				}
				t.row(fmt.Sprint(m.Version), m.File, run)
			}
			t.print(w)
		})
		if err != nil {
			return err
		}
		if pending {
			fmt.Fprintf(a.stderr, "Run `txlimit migrate`: the schema %s is behind this program.\n", printable(schema))
			return errNothing
		}
		s, err := a.checkSchema(ctx)
		return a.sayChecked(schema, s, err)
	})
}

// bySchemaSQL reports whether there is goose's table, which reading the status would make, and whether the schema is there although
// goose has noted no version of it. A migration that failed leaves the table without a version.
func (a *app) bySchemaSQL(ctx context.Context, provider *goose.Provider, schema string) (noted, made bool, err error) {
	// Of a migration that runs meanwhile, goose's table comes first: so it is looked up last.
	err = a.conn.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1::pg_catalog.text) IS NOT NULL, pg_catalog.to_regclass($2::pg_catalog.text) IS NOT NULL",
		pgx.Identifier{schema, "ratelimit.limits"}.Sanitize(), pgx.Identifier{schema, migrations.VersionTable}.Sanitize()).Scan(&made, &noted)
	if err != nil || !made || !noted {
		return noted, made, err
	}
	version, err := provider.GetDBVersion(ctx)
	return true, version == 0, err
}

// madeBySchemaSQL is the status of a schema of which goose has noted no version, and what `migrate` says of it.
func (a *app) madeBySchemaSQL(ctx context.Context, provider *goose.Provider, schema string, table bool) error {
	s, err := a.checkSchema(ctx)
	behind := errors.Is(err, migrations.ErrBehind)
	if err != nil && !behind {
		return err
	}
	list := []migration{}
	for _, source := range provider.ListSources() {
		list = append(list, migration{Version: source.Version, File: source.Path, Applied: source.Version <= int64(s.Version)})
	}
	err = a.emit(migrated{schema, int64(s.Version), list}, func(w io.Writer) {
		t := newTable(">VERSION", "FILE", "RUN")
		for _, m := range list {
			run := "not noted"
			if m.Applied {
				run = "by schema.sql"
			}
			t.row(fmt.Sprint(m.Version), m.File, run)
		}
		t.print(w)
	})
	if err != nil {
		return err
	}
	how := "docs/operations.md#migrations has the SQL that tells goose what is there."
	if table {
		last := fmt.Sprint(s.Version)
		if s.Version == 0 {
			last = "the newest that is there"
		}
		how = fmt.Sprintf("INSERT INTO %s (version_id, is_applied) SELECT n, true FROM generate_series(1, %s) AS n.", migrations.VersionTable, last)
	}
	if behind {
		has := fmt.Sprintf("has version %d of %d", s.Version, migrations.Version)
		if s.Version == 0 {
			has = "has no version: it is from before v0.1.0"
		}
		fmt.Fprintf(a.stderr, "The schema %s was made by schema.sql, not noted by goose, and is behind this program: it %s. First tell goose: %s Then run `txlimit migrate`.\n",
			printable(schema), has, how)
		return errNothing
	}
	fmt.Fprintf(a.stderr, "The schema %s was made by schema.sql, not noted by goose: nothing to do. To go on with goose: %s\n", printable(schema), how)
	a.differs(schema, s)
	return nil
}

// differs says so if the schema has other functions than this program's migrations make.
func (a *app) differs(schema string, s migrations.Schema) {
	if s.Differs() != "" {
		fmt.Fprintf(a.stderr, "The schema %s has version %d as this program, but other functions (hash %.12s, not %.12s): one was edited, or it is of another build. "+
			"docs/operations.md#which-schema-is-this says how to put it right.\n", printable(schema), s.Version, s.Hash, migrations.Hash)
	}
}

// checkSchema is migrations.Check, without what other schemas of the search_path have.
func (a *app) checkSchema(ctx context.Context) (s migrations.Schema, err error) {
	err = a.reading(ctx, func(tx pgx.Tx) (err error) {
		s, err = migrations.Check(ctx, tx)
		return err
	})
	return s, err
}

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/txlimit/txlimit/migrations"
)

// open connects to the application's database and brings it up to date: first the limiter's table and functions, then the
// application's own tables.
func open(ctx context.Context, url string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 32 // so that 32 sign-ups really are at once
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if err := migrate(ctx, pool); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func migrate(ctx context.Context, pool *pgxpool.Pool) error {
	db := stdlib.OpenDBFromPool(pool) // goose speaks database/sql
	defer db.Close()
	// A version table of the limiter's own: its migration 1 is not the application's migration 1.
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, goose.WithTableName(migrations.VersionTable))
	if err != nil {
		return err
	}
	if _, err := provider.Up(ctx); err != nil {
		return err
	}

	_, err = pool.Exec(ctx, `
		CREATE TABLE users (
			id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			email text NOT NULL
		);
		CREATE TABLE messages (
			id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			sender  text NOT NULL,
			body    text NOT NULL,
			sent_at timestamptz NOT NULL DEFAULT clock_timestamp()
		);
		CREATE TABLE jobs (
			id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
			prompt     text NOT NULL,
			run_at     timestamptz NOT NULL,
			started_at timestamptz
		)`)
	return err
}

// printTable prints what a query answers, as psql would.
func printTable(ctx context.Context, pool *pgxpool.Pool, out io.Writer, query string) error {
	rows, err := pool.Query(ctx, query, pgx.QueryExecModeSimpleProtocol) // answers in text
	if err != nil {
		return err
	}
	defer rows.Close()
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(cells []string) { fmt.Fprintln(table, "   "+strings.Join(cells, "\t")) }

	var header []string
	for _, column := range rows.FieldDescriptions() {
		header = append(header, column.Name)
	}
	line(header)
	for rows.Next() {
		var cells []string
		for _, value := range rows.RawValues() {
			cells = append(cells, string(value))
		}
		line(cells)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	return table.Flush()
}

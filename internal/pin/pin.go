// Package pin has a transaction of the tool or the page read what the limiter says, whatever its session is set to: no object of another schema is
// taken for Postgres' own, and texts are as pgx reads them.
package pin

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/inschema"
)

// The name is qualified, since the path may name pg_catalog behind another schema.
const sql = `SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true), pg_catalog.set_config('DateStyle', 'ISO', true),
    pg_catalog.set_config('IntervalStyle', 'postgres', true), pg_catalog.set_config('extra_float_digits', '1', true), pg_catalog.set_config('bytea_output', 'hex', true)`

// To leaves pg_catalog alone in the search_path of a transaction. Then no operator or function of another schema can be taken for one of
// Postgres' (CVE-2018-1058), whatever the types of the parameters. Without binary results, a DateStyle would make times unreadable, and
// extra_float_digits would round numbers. The transaction that it returns puts the limiter's names into the schema.
func To(ctx context.Context, tx pgx.Tx, schema string) (pgx.Tx, error) {
	if _, err := inschema.Text("", schema); err != nil {
		return nil, err
	}
	_, err := tx.Exec(ctx, sql)
	return named{tx, schema}, err
}

type named struct {
	pgx.Tx
	schema string
}

func (n named) in(sql string) string {
	sql, _ = inschema.SQL(sql, n.schema) // To has checked the name
	return sql
}

func (n named) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return n.Tx.Exec(ctx, n.in(sql), args...)
}

func (n named) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return n.Tx.Query(ctx, n.in(sql), args...)
}

func (n named) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return n.Tx.QueryRow(ctx, n.in(sql), args...)
}

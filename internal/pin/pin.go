// Package pin has a transaction of the tool or the page read what the limiter says, whatever its session is set to: nothing but the
// limiter is in its search_path, and texts are as pgx reads them.
package pin

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
)

// The names are qualified, since the path may name pg_catalog behind another schema. The CTE is computed once, before the path changes.
const sql = `WITH found AS MATERIALIZED (
    SELECT ARRAY(
        SELECT s.name::pg_catalog.text
          FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY AS s (name, i)
          JOIN pg_catalog.pg_namespace AS n ON n.nspname OPERATOR(pg_catalog.=) s.name
          JOIN pg_catalog.pg_class AS c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) 'rate_limits'::pg_catalog.name
         ORDER BY s.i USING OPERATOR(pg_catalog.<)) AS schemas
)
SELECT f.schemas, pg_catalog.set_config('search_path',
    CASE WHEN pg_catalog.cardinality(f.schemas) OPERATOR(pg_catalog.=) 1 THEN pg_catalog.quote_ident(f.schemas[1]) ELSE 'pg_catalog' END OPERATOR(pg_catalog.||) ', pg_temp',
    true), pg_catalog.set_config('DateStyle', 'ISO', true), pg_catalog.set_config('IntervalStyle', 'postgres', true),
    pg_catalog.set_config('extra_float_digits', '1', true), pg_catalog.set_config('bytea_output', 'hex', true)
  FROM found AS f`

// SeveralError says that several schemas of a search_path have rate limits. Whoever may create objects in one of them could have put
// them there, for the caller to run.
type SeveralError struct {
	Schemas []string // in the order of the path
}

func (e *SeveralError) Error() string {
	return "several schemas of the search_path have rate limits: " + strings.Join(e.Schemas, ", ")
}

// To sets the search_path of a transaction to the schema of the limiter: the only one of the path with a table rate_limits. Then no
// object of another schema, in front of it or behind, can be taken for one of the limiter's or of Postgres' (CVE-2018-1058), whatever the
// types of the parameters. Without binary results, a DateStyle would make times unreadable, and extra_float_digits would round numbers. If several schemas have the table, it returns a *SeveralError. Then, and without a limiter, only
// pg_catalog is left. A schema that has only functions of the limiter's names is never used, so it does not count.
func To(ctx context.Context, tx pgx.Tx) error {
	var schemas []string
	var path, dates, intervals, digits, bytes string
	if err := tx.QueryRow(ctx, sql).Scan(&schemas, &path, &dates, &intervals, &digits, &bytes); err != nil {
		return err
	}
	if len(schemas) > 1 {
		return &SeveralError{schemas}
	}
	return nil
}

// Package pin has the statement that leaves nothing but the limiter in the search_path of a transaction.
package pin

// SQL sets the search_path of a transaction to the schema of the limiter, which is the first of the path that has its table. Then no
// object of another schema, in front of it or behind, can be taken for one of the limiter's or of Postgres' (CVE-2018-1058), whatever the
// types of the parameters. Its own names are qualified, since the path may name pg_catalog behind another schema. Without a limiter, only
// pg_catalog is left.
const SQL = `SELECT pg_catalog.set_config('search_path', coalesce((
    SELECT pg_catalog.quote_ident(s.name::pg_catalog.text)
      FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY AS s (name, i)
      JOIN pg_catalog.pg_namespace AS n ON n.nspname OPERATOR(pg_catalog.=) s.name
      JOIN pg_catalog.pg_class AS c ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) 'rate_limits'::pg_catalog.name
     ORDER BY s.i USING OPERATOR(pg_catalog.<) LIMIT 1
), 'pg_catalog') OPERATOR(pg_catalog.||) ', pg_temp', true)`

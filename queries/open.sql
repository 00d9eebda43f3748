-- name: MaySweep :one
SELECT current_setting('transaction_read_only') = 'on' AS read_only,
       CASE WHEN p.prosecdef THEN '' ELSE pg_catalog.concat_ws(', ',
           CASE WHEN NOT has_table_privilege('rate_limits', 'SELECT') THEN 'SELECT on rate_limits' END,
           CASE WHEN NOT has_table_privilege('rate_limits', 'INSERT') THEN 'INSERT on rate_limits' END,
           CASE WHEN NOT has_table_privilege('rate_limits', 'UPDATE') THEN 'UPDATE on rate_limits' END,
           CASE WHEN NOT has_table_privilege('rate_limits', 'DELETE') THEN 'DELETE on rate_limits' END,
           CASE WHEN NOT has_table_privilege('rate_limit_holds', 'SELECT') THEN 'SELECT on rate_limit_holds' END,
           CASE WHEN NOT has_table_privilege('rate_limit_holds', 'INSERT') THEN 'INSERT on rate_limit_holds' END,
           CASE WHEN NOT has_table_privilege('rate_limit_holds', 'UPDATE') THEN 'UPDATE on rate_limit_holds' END,
           CASE WHEN NOT has_table_privilege('rate_limit_holds', 'DELETE') THEN 'DELETE on rate_limit_holds' END,
           CASE WHEN NOT has_table_privilege('rate_limit_sweeps', 'SELECT') THEN 'SELECT on rate_limit_sweeps' END,
           CASE WHEN NOT has_table_privilege('rate_limit_sweeps', 'INSERT') THEN 'INSERT on rate_limit_sweeps' END,
           CASE WHEN NOT has_table_privilege('rate_limit_sweeps', 'UPDATE') THEN 'UPDATE on rate_limit_sweeps' END,
           CASE WHEN NOT has_table_privilege('rate_limit_definitions', 'SELECT') THEN 'SELECT on rate_limit_definitions' END,
           CASE WHEN NOT has_table_privilege('rate_limit_overrides', 'SELECT') THEN 'SELECT on rate_limit_overrides' END) END::text AS missing
  FROM pg_catalog.pg_proc AS p
 WHERE p.oid = '_ratelimit_sweep'::regproc;

-- name: SweepTurn :one
SELECT t.state, t.at FROM _ratelimit_sweep_turn(@name::text, @step::text, @since::interval, sqlc.narg('mine')::timestamptz) AS t;

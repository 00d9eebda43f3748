-- name: MaySweep :one
SELECT current_setting('transaction_read_only') = 'on' AS read_only,
       CASE WHEN p.prosecdef THEN '' ELSE pg_catalog.concat_ws(', ',
           CASE WHEN NOT has_table_privilege('ratelimit.limits', 'SELECT') THEN 'SELECT on ratelimit.limits' END,
           CASE WHEN NOT has_table_privilege('ratelimit.limits', 'INSERT') THEN 'INSERT on ratelimit.limits' END,
           CASE WHEN NOT has_table_privilege('ratelimit.limits', 'UPDATE') THEN 'UPDATE on ratelimit.limits' END,
           CASE WHEN NOT has_table_privilege('ratelimit.limits', 'DELETE') THEN 'DELETE on ratelimit.limits' END,
           CASE WHEN NOT has_table_privilege('ratelimit.holds', 'SELECT') THEN 'SELECT on ratelimit.holds' END,
           CASE WHEN NOT has_table_privilege('ratelimit.holds', 'INSERT') THEN 'INSERT on ratelimit.holds' END,
           CASE WHEN NOT has_table_privilege('ratelimit.holds', 'UPDATE') THEN 'UPDATE on ratelimit.holds' END,
           CASE WHEN NOT has_table_privilege('ratelimit.holds', 'DELETE') THEN 'DELETE on ratelimit.holds' END,
           CASE WHEN NOT has_table_privilege('ratelimit.sweeps', 'SELECT') THEN 'SELECT on ratelimit.sweeps' END,
           CASE WHEN NOT has_table_privilege('ratelimit.sweeps', 'INSERT') THEN 'INSERT on ratelimit.sweeps' END,
           CASE WHEN NOT has_table_privilege('ratelimit.sweeps', 'UPDATE') THEN 'UPDATE on ratelimit.sweeps' END,
           CASE WHEN NOT has_table_privilege('ratelimit.definitions', 'SELECT') THEN 'SELECT on ratelimit.definitions' END,
           CASE WHEN NOT has_table_privilege('ratelimit.overrides', 'SELECT') THEN 'SELECT on ratelimit.overrides' END) END::text AS missing
  FROM pg_catalog.pg_proc AS p
 WHERE p.oid = 'ratelimit._sweep'::regproc;

-- name: SweepTurn :one
SELECT t.state, t.at FROM ratelimit._sweep_turn(@name::text, @step::text, @since::interval, sqlc.narg('mine')::timestamptz) AS t;

-- For Citus: makes the functions suit a distributed rate_limits, and run on the node that has the rows. docs/citus.md says when to run it.
-- On the coordinator, as the owner of the functions, for each schema, after every migration:
--
--   PGOPTIONS='-c search_path=app' psql -v ON_ERROR_STOP=1 -f citus.sql
--
-- It may run again at any time.

DO $$
DECLARE
    leaks  boolean;
    by_key boolean; -- row-based sharding; otherwise the schema is on one node
    own    regnamespace; -- of rate_limits
    old    text;
    n      integer := 0;
    f      record;
BEGIN
    IF to_regclass('pg_dist_partition') IS NULL THEN
        RAISE feature_not_supported USING MESSAGE = 'this database does not have Citus', HINT = 'A plain Postgres needs nothing of this file.';
    END IF;
    IF to_regclass('rate_limits') IS NULL THEN
        RAISE undefined_table USING MESSAGE = 'there is no table rate_limits in the search_path',
            HINT = 'Set the search_path to the schema that the migrations ran in.';
    END IF;
    -- 'h': by the hash of a column. 'n': no column; then a reference table has the repmodel 't', and a table of the coordinator no colocation.
    SELECT d.partmethod = 'h' INTO by_key
      FROM pg_dist_partition AS d
     WHERE d.logicalrelid = 'rate_limits'::regclass
       AND (d.partmethod = 'h' OR d.partmethod = 'n' AND d.repmodel <> 't' AND d.colocationid <> 0);
    IF by_key IS NULL THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'rate_limits is not distributed',
            HINT = 'Run SELECT citus_schema_distribute(...) or SELECT create_distributed_table(''rate_limits'', ''key'') first.';
    END IF;
    own := (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'rate_limits'::regclass);
    -- A ctid would match rows of every shard. An engine that finds rows by their ctid must stay refused, as it is by its generic plans.
    SELECT string_agg(p.proname, ', ') INTO old
      FROM pg_proc AS p
     WHERE p.pronamespace = own
       AND p.proname ~ '^(_ratelimit_(apply|coalesce|consume|move|refund|reset|sweep)|ratelimit_(reset|sweep))' AND p.prosrc ~ '\.(ctid|xmin|xmax)\M';
    IF old IS NOT NULL THEN
        RAISE feature_not_supported USING MESSAGE = format('the schema is too old for a distributed table: %s', old), HINT = 'Migrate first.';
    END IF;

    -- Generic plans of a distributed table fail in some of these functions. The releases that leak keep a new plan with each execution of a
    -- generic one (Citus pull request 8824); there, no plan is kept.
    leaks := citus_version() ~ '^Citus (13\.2\.[12]|14\.0\.[01])\M';
    FOR f IN
        SELECT p.oid::regprocedure AS signature
          FROM pg_proc AS p
         WHERE p.pronamespace = own
           AND p.proname IN ('_ratelimit_consume', '_ratelimit_consume_sharded', '_ratelimit_consume_several', '_ratelimit_apply', '_ratelimit_refund',
                             '_ratelimit_move', '_ratelimit_consume_keys', '_ratelimit_coalesce', '_ratelimit_sweep_numbers', '_ratelimit_sweep_rows')
    LOOP
        n := n + 1;
        EXECUTE format('ALTER FUNCTION %s %s plan_cache_mode %s', f.signature,
            CASE WHEN leaks THEN 'SET' ELSE 'RESET' END, CASE WHEN leaks THEN '= force_custom_plan' END);
    END LOOP;
    -- Citus looks for a distributed function after Postgres has inlined functions of SQL. A function with a setting is not inlined, and
    -- these have no statement of their own that it would change.
    FOR f IN
        SELECT p.oid::regprocedure AS signature
          FROM pg_proc AS p
         WHERE p.pronamespace = own AND p.proname ~ '^_ratelimit_wire_'
    LOOP
        n := n + 1;
        EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off', f.signature);
    END LOOP;
    IF n <> 18 THEN
        RAISE undefined_function USING MESSAGE = format('the schema has %s of 18 functions', n), HINT = 'Migrate first, and use the citus.sql of the same release.';
    END IF;
    -- With true, the functions for several keys run statements for one key each. _ratelimit_coalesce and _ratelimit_consume_keys then refuse
    -- their batches, and the Coalescer sends one call after another: a transaction on several nodes would cost more than it saves.
    EXECUTE format('CREATE OR REPLACE FUNCTION %s._ratelimit_distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s', own, by_key::text);
END
$$;

-- These run on the node that has the rows: of a key, or of the whole schema.
SELECT create_distributed_function(p.oid::regprocedure, distribution_arg_name => CASE WHEN d.partmethod = 'h' THEN 'key' END, colocate_with => 'rate_limits')
  FROM pg_dist_partition AS d
  JOIN pg_class AS c ON c.oid = d.logicalrelid
  JOIN pg_proc AS p ON p.pronamespace = c.relnamespace
 WHERE d.logicalrelid = 'rate_limits'::regclass
   AND p.proname ~ CASE WHEN d.partmethod = 'h' THEN '^_ratelimit_wire_(consume(_sharded)?|(apply|refund)_one)$'
                        ELSE '^(_ratelimit_wire_\w+|_ratelimit_consume_keys|_ratelimit_coalesce|_ratelimit_sweep)$' END;

-- For Citus with row-based sharding: makes the functions of one key run on the node that has the key.
-- docs/citus.md says when to run it. As the owner of the functions, on the coordinator, after create_distributed_table and after every
-- migration:
--
--   PGOPTIONS='-c search_path=app' psql -v ON_ERROR_STOP=1 -f citus-rows.sql
--
-- It may run again at any time.

DO $$
DECLARE
    f text;
BEGIN
    IF to_regclass('pg_dist_partition') IS NULL THEN
        RAISE feature_not_supported USING MESSAGE = 'this database does not have Citus', HINT = 'A plain Postgres needs nothing of this file.';
    END IF;
    IF to_regclass('rate_limits') IS NULL THEN
        RAISE undefined_table USING MESSAGE = 'there is no table rate_limits in the search_path',
            HINT = 'Set the search_path to the schema that the migrations ran in.';
    END IF;
    -- 'h': by the hash of a column.
    IF NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrel = 'rate_limits'::regclass AND partmethod = 'h') THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'rate_limits is not distributed by key',
            HINT = 'Run SELECT create_distributed_table(''rate_limits'', ''key'') first, or citus-schema.sql if its schema is distributed.';
    END IF;
    -- A ctid would match rows of every shard. An engine that finds rows by their ctid must stay refused, as it is by its generic plans.
    SELECT string_agg(p.proname, ', ') INTO f
      FROM pg_proc AS p
     WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'rate_limits'::regclass)
       AND p.proname ~ '^(_ratelimit_(apply|coalesce|consume|refund)|ratelimit_(reset|sweep))' AND p.prosrc ~ '\.(ctid|xmin|xmax)\M';
    IF f IS NOT NULL THEN
        RAISE feature_not_supported USING MESSAGE = format('the schema is too old for a distributed table: %s', f), HINT = 'Migrate first.';
    END IF;
END
$$;

-- Generic plans of a distributed table fail in some of these functions. The releases 13.2.1, 13.2.2, 14.0.0 and 14.0.1 leak memory with
-- each execution of a generic plan (Citus pull request 8824); there, no plan is kept.
DO $$
DECLARE
    f regprocedure;
    plans text := CASE WHEN citus_version() ~ '^Citus (13\.2\.[12]|14\.0\.[01])\M' THEN 'SET plan_cache_mode = force_custom_plan' ELSE 'RESET plan_cache_mode' END;
BEGIN
    FOREACH f IN ARRAY ARRAY[
        '_ratelimit_consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, timestamptz[])',
        '_ratelimit_consume_sharded(text, text, double precision, interval, double precision, timestamptz, integer, double precision, double precision, integer, integer, timestamptz, boolean, timestamptz[])',
        '_ratelimit_consume_several(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], timestamptz, boolean)',
        '_ratelimit_apply(text, text[], text[], double precision[], interval[], double precision[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], boolean, timestamptz, boolean, timestamptz[], integer[], integer[], double precision[], interval)',
        '_ratelimit_refund(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], double precision[], double precision[], timestamptz, timestamptz, timestamptz, timestamptz[], integer[], integer[])',
        '_ratelimit_consume_keys(text, text[], double precision, interval, double precision, double precision[], timestamptz)',
        '_ratelimit_coalesce(text[], double precision[], interval[], double precision[], text[], integer[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], integer[], timestamptz[], double precision[], double precision[], timestamptz)',
        'ratelimit_sweep(text, double precision, interval, text, double precision, timestamptz, text, timestamptz)'
    ]::regprocedure[] LOOP
        EXECUTE format('ALTER FUNCTION %s %s', f, plans);
    END LOOP;
END
$$;

-- Has the functions of several keys run statements for one key each. _ratelimit_coalesce and _ratelimit_consume_keys then refuse their
-- batches, and the Coalescer sends one call after another: a transaction on several nodes would cost more than it saves.
CREATE OR REPLACE FUNCTION _ratelimit_distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN true;

-- These run on the node that has the key. Citus delegates them outside transactions.
--
-- Citus looks for a distributed function after Postgres has inlined functions of SQL. A function with a setting is not inlined, and this
-- one has no statement of its own that it would change.
ALTER FUNCTION _ratelimit_wire_consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, timestamptz[]) SET enable_seqscan = off;
ALTER FUNCTION _ratelimit_wire_consume_sharded(text, text, double precision, interval, double precision, timestamptz, integer, double precision, double precision, integer, integer, timestamptz, boolean, timestamptz[]) SET enable_seqscan = off;
SELECT create_distributed_function('_ratelimit_wire_consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, timestamptz[])',
    distribution_arg_name => 'key', colocate_with => 'rate_limits');
SELECT create_distributed_function('_ratelimit_wire_consume_sharded(text, text, double precision, interval, double precision, timestamptz, integer, double precision, double precision, integer, integer, timestamptz, boolean, timestamptz[])',
    distribution_arg_name => 'key', colocate_with => 'rate_limits');

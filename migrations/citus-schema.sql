-- For Citus with schema-based sharding: makes the functions of a distributed schema run on the node of the schema.
-- docs/citus.md says when to run it. As the owner of the functions, on the coordinator, for each schema, after every migration:
--
--   PGOPTIONS='-c search_path=tenant_a' psql -v ON_ERROR_STOP=1 -f citus-schema.sql
--
-- It may run again at any time.

DO $$
BEGIN
    IF to_regclass('pg_dist_partition') IS NULL THEN
        RAISE feature_not_supported USING MESSAGE = 'this database does not have Citus', HINT = 'A plain Postgres needs nothing of this file.';
    END IF;
    IF to_regclass('rate_limits') IS NULL THEN
        RAISE undefined_table USING MESSAGE = 'there is no table rate_limits in the search_path',
            HINT = 'Set the search_path to the schema that the migrations ran in.';
    END IF;
    -- 'n': the table has no distribution column. repmodel 's' rules out reference tables ('t').
    IF NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrel = 'rate_limits'::regclass AND partmethod = 'n' AND repmodel = 's') THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'the schema of rate_limits is not distributed',
            HINT = 'Run SELECT citus_schema_distribute(...) first, or citus-rows.sql if the table is distributed by key.';
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

-- These run on the schema's node, each with all of its statements. Otherwise a Coalescer with several keys fails with "rows were
-- deleted meanwhile".
SELECT create_distributed_function('_ratelimit_consume_keys(text, text[], double precision, interval, double precision, double precision[], timestamptz)',
    colocate_with => 'rate_limits');
SELECT create_distributed_function('_ratelimit_coalesce(text[], double precision[], interval[], double precision[], text[], integer[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], integer[], timestamptz[], double precision[], double precision[], timestamptz)',
    colocate_with => 'rate_limits');
SELECT create_distributed_function('ratelimit_sweep(text, double precision, interval, text, double precision, timestamptz, text, timestamptz)',
    colocate_with => 'rate_limits');

-- These save round trips between the nodes.
-- Citus looks for a distributed function after Postgres has inlined functions of SQL. A function with a setting is not inlined, and this
-- one has no statement of its own that it would change.
ALTER FUNCTION _ratelimit_wire_consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, timestamptz[]) SET enable_seqscan = off;
ALTER FUNCTION _ratelimit_wire_consume_sharded(text, text, double precision, interval, double precision, timestamptz, integer, double precision, double precision, integer, integer, timestamptz, boolean, timestamptz[]) SET enable_seqscan = off;
ALTER FUNCTION _ratelimit_wire_consume_several(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], timestamptz, boolean) SET enable_seqscan = off;
ALTER FUNCTION _ratelimit_wire_apply(text, text[], text[], double precision[], interval[], double precision[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], boolean, timestamptz, boolean, timestamptz[], integer[], integer[], double precision[], interval) SET enable_seqscan = off;
ALTER FUNCTION _ratelimit_wire_refund(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], double precision[], double precision[], timestamptz, timestamptz, timestamptz, timestamptz[], integer[], integer[]) SET enable_seqscan = off;
SELECT create_distributed_function('_ratelimit_wire_consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, timestamptz[])',
    colocate_with => 'rate_limits');
SELECT create_distributed_function('_ratelimit_wire_consume_sharded(text, text, double precision, interval, double precision, timestamptz, integer, double precision, double precision, integer, integer, timestamptz, boolean, timestamptz[])',
    colocate_with => 'rate_limits');
SELECT create_distributed_function('_ratelimit_wire_consume_several(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], timestamptz, boolean)',
    colocate_with => 'rate_limits');
SELECT create_distributed_function('_ratelimit_wire_apply(text, text[], text[], double precision[], interval[], double precision[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], boolean, timestamptz, boolean, timestamptz[], integer[], integer[], double precision[], interval)',
    colocate_with => 'rate_limits');
SELECT create_distributed_function('_ratelimit_wire_refund(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], double precision[], double precision[], timestamptz, timestamptz, timestamptz, timestamptz[], integer[], integer[])',
    colocate_with => 'rate_limits');

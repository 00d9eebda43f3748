-- The statements for a distributed table, as migrations/citus.sql chooses them for row-based sharding, on an ordinary one.
DO $$
DECLARE f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc AS p
              WHERE p.pronamespace = current_schema::regnamespace
                AND p.proname IN ('_ratelimit_apply', '_ratelimit_coalesce', '_ratelimit_consume_keys', 'ratelimit_sweep') LOOP
        EXECUTE format('ALTER FUNCTION %s SET txlimit.distributed = on', f);
        EXECUTE format('ALTER FUNCTION %s RESET plan_cache_mode', f);
    END LOOP;
END $$;

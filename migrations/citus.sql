-- For Citus: checks each step of docs/distributed.md, says what to do next where one is not as it should be, and makes
-- the functions suit the distributed tables. Run it on the coordinator, as the owner of the schema, after every migration
-- and after a node was added:
--
--   psql -v ON_ERROR_STOP=1 [-v schema=tenant_a] -f citus.sql
--
-- Not in one transaction (psql -1): it asks the workers by connections of their own. If it fails, do what the hint
-- says, and run it again: each step may be repeated. A migration is one transaction on all nodes, so one that failed
-- has changed nothing. After any other, run this file at once: the functions that it replaced may fail until then.

\if :{?schema}
\else
\set schema ratelimit
\endif
SELECT set_config('txlimit.schema', :'schema', false) AS schema \gset

DO $$
DECLARE
    own    regnamespace := to_regnamespace(quote_ident(current_setting('txlimit.schema')));
    limits regclass := to_regclass(format('%I.limits', current_setting('txlimit.schema')));
    leaks  boolean;
    by_key boolean; -- row-based sharding; otherwise all tables are on one node: schema-based sharding
    plain  text;    -- tables that are not on one node
    n      integer := 0;
    found  text;
    f      record;
BEGIN
    -- 1. Citus, its coordinator, its nodes.
    IF to_regclass('pg_dist_schema') IS NULL THEN
        RAISE feature_not_supported USING MESSAGE = 'this database does not have Citus 12 or later',
            HINT = 'A plain Postgres needs nothing of this file. Otherwise: CREATE EXTENSION citus, and add the nodes.';
    END IF;
    IF (SELECT l.groupid FROM pg_dist_local_group AS l) <> 0 THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'this node is a worker',
            HINT = 'Run this file on the coordinator.';
    END IF;
    SELECT string_agg(d.nodename || ':' || d.nodeport, ', ' ORDER BY d.nodename, d.nodeport) INTO found
      FROM pg_dist_node AS d
     WHERE d.noderole = 'primary' AND d.groupid <> 0 AND NOT (d.isactive AND d.hasmetadata AND d.metadatasynced);
    IF found IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('these workers are not active, or do not have the metadata: %s', found),
            HINT = 'As a superuser: SELECT start_metadata_sync_to_all_nodes(). Or take the node out: '
                || 'SELECT citus_remove_node(...).';
    END IF;
    IF NOT EXISTS (SELECT 1 FROM pg_dist_node AS d WHERE d.groupid = 0)
       AND EXISTS (SELECT 1 FROM pg_dist_node AS d WHERE d.groupid <> 0) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'the workers do not know the coordinator, so Hot fails there',
            HINT = 'As a superuser: SELECT citus_set_coordinator_host(...), with its name for the workers.';
    END IF;

    -- 2. The migration.
    IF limits IS NULL THEN
        RAISE undefined_table USING MESSAGE = format('there is no table %I.limits', current_setting('txlimit.schema')),
            HINT = 'Migrate first. If you have, into another schema: psql -v schema=... -f citus.sql.';
    END IF;
    IF NOT (SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class AS c WHERE c.oid = limits) THEN
        RAISE insufficient_privilege USING MESSAGE = format('%I does not own %s', current_user, limits),
            HINT = 'Run this file as the role that has migrated.';
    END IF;

    -- 3. The tables. 'h': by the hash of a column. 'n': no column; then a reference table has the repmodel 't', and a
    -- table of the coordinator no colocation.
    by_key := EXISTS (SELECT 1 FROM pg_dist_partition AS d WHERE d.logicalrelid = limits AND d.partmethod = 'h');
    SELECT string_agg(c.oid::regclass::text, ', ' ORDER BY c.relname) INTO plain
      FROM pg_class AS c
     WHERE c.relnamespace = own AND c.relkind = 'r'
       AND NOT EXISTS (SELECT 1 FROM pg_dist_partition AS d
             WHERE d.logicalrelid = c.oid AND d.partmethod = 'n' AND d.repmodel <> 't' AND d.colocationid <> 0);
    IF by_key AND (SELECT column_to_column_name(d.logicalrelid, d.partkey) <> 'key'
                     FROM pg_dist_partition AS d WHERE d.logicalrelid = limits) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('%s is distributed by another column than key', limits),
            HINT = format('SELECT undistribute_table(%L), and then '
                'SELECT create_distributed_table(%1$L, ''key'', colocate_with => ''none'')', limits);
    ELSIF NOT by_key AND NOT EXISTS (SELECT 1 FROM pg_dist_schema AS d WHERE d.schemaid = own) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('neither the schema %s nor the keys of %s are distributed', own, limits),
            HINT = format('For all on one node: SELECT citus_schema_distribute(%L). For keys on all nodes: '
                'SELECT create_distributed_table(%L, ''key'', colocate_with => ''none''). '
                'If that says that it is distributed already: SELECT undistribute_table(...) before.', own, limits);
    ELSIF NOT by_key AND plain IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('the schema %s is distributed, but these of its tables are not: %s', own, plain),
            HINT = 'Citus does not convert the tables that a migration makes in a distributed schema. Migrate into one '
                || 'that is not distributed, and distribute it then. A table that a later migration has made: make it '
                || 'again, by a CREATE TABLE statement of its own.';
    END IF;

    -- 4. The functions. A ctid would match rows of every shard, so an engine that finds rows by it stays refused.
    SELECT string_agg(p.oid::regproc::text, ', ') INTO found
      FROM pg_proc AS p WHERE p.pronamespace = own AND p.prosrc ~ '\.(ctid|xmin|xmax)\M';
    IF found IS NOT NULL THEN
        RAISE feature_not_supported USING
            MESSAGE = format('the schema is too old for a distributed table: %s', found), HINT = 'Migrate first.';
    END IF;

    -- Functions that take or return a row of a table are not on the workers while the table is of the coordinator
    -- alone. Once it is distributed, to create them again sends them there.
    IF NOT by_key THEN
        FOR f IN
            SELECT DISTINCT p.oid
              FROM pg_depend AS d
              JOIN pg_proc AS p ON p.oid = d.objid
              JOIN pg_type AS t ON t.oid = d.refobjid
              JOIN pg_class AS c ON c.oid = t.typrelid AND c.relkind = 'r'
             WHERE d.classid = 'pg_proc'::regclass AND d.refclassid = 'pg_type'::regclass
               AND p.pronamespace = own AND c.relnamespace = own
        LOOP
            EXECUTE pg_get_functiondef(f.oid);
        END LOOP;
    END IF;

    -- Generic plans of a distributed table fail in some of these functions. The releases that leak keep a new plan with
    -- each execution of a generic one (Citus pull request 8824); there, no plan is kept. Without a distribution column,
    -- only INSERT ... VALUES leaks.
    leaks := by_key AND citus_version() ~ ('^Citus (12\.1\.1[1-9]|13\.0\.[6-9]|13\.1\.[2-9]|13\.2\.[1-9]|'
        '13\.[34]\.\d+|14\.0\.[01]|14\.[12]\.\d+)\M');
    FOR f IN
        SELECT p.oid::regprocedure AS signature
          FROM pg_proc AS p
         WHERE p.pronamespace = own
           AND p.proname IN ('_consume', '_consume_sharded', '_consume_several', '_apply', '_refund', '_move', '_pause',
                             '_hold', '_settle', '_extend', '_consume_keys', '_each', '_coalesce', '_in_force',
                             '_sweep_numbers', '_sweep_rows')
    LOOP
        n := n + 1;
        EXECUTE format('ALTER FUNCTION %s %s plan_cache_mode %s', f.signature,
            CASE WHEN leaks THEN 'SET' ELSE 'RESET' END, CASE WHEN leaks THEN '= force_custom_plan' END);
    END LOOP;
    -- Citus looks for a distributed function after Postgres has inlined functions of SQL. A function with a setting is
    -- not inlined, and these have no statement of their own that it would change.
    FOR f IN
        SELECT p.oid::regprocedure AS signature
          FROM pg_proc AS p WHERE p.pronamespace = own AND starts_with(p.proname, '_wire_')
    LOOP
        n := n + 1;
        EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off', f.signature);
    END LOOP;
    IF n <> 27 THEN
        RAISE undefined_function USING MESSAGE = format('the schema has %s of 27 functions', n),
            HINT = 'Migrate first, and use the citus.sql of the same release.';
    END IF;
    -- With true, the functions for several keys run statements for one key each. _coalesce and _consume_keys refuse
    -- their batches, and the Coalescer sends one call after another: several nodes would cost more than it saves.
    EXECUTE format('CREATE OR REPLACE FUNCTION %s._distributed() RETURNS boolean '
        'LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s', own, by_key::text);
    -- With false, programs that follow overrides find what was changed lately by the time. The nodes that they ask, and
    -- those that operators write on, number their transactions each by itself. Row-based, all do so on the coordinator.
    EXECUTE format('CREATE OR REPLACE FUNCTION %s._one_server() RETURNS boolean '
        'LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s', own, by_key::text);
    IF NOT by_key THEN
        EXECUTE format('CREATE INDEX IF NOT EXISTS overrides_changed ON %s.overrides '
            '(greatest(made_at, removed_at))', own);
    END IF;
    -- Citus does not copy the grants of the views that Hot locks to a node that is added.
    FOR f IN
        SELECT c.oid::regclass AS view, a.privilege_type AS may, a.grantee::regrole AS role
          FROM pg_class AS c CROSS JOIN aclexplode(c.relacl) AS a
         WHERE c.relnamespace = own AND c.relkind = 'v' AND a.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE format('GRANT %s ON %s TO %s', f.may, f.view, f.role);
    END LOOP;
    PERFORM set_config('txlimit.by_key', by_key::text, false);
    RAISE NOTICE USING MESSAGE = format('%s: %s', citus_version(), CASE
        WHEN by_key THEN format('%s is distributed by key. The other tables are on the coordinator: '
            'what reads or writes them connects there', limits)
        ELSE format('the schema %s is distributed. Programs and operators may connect to any node', own) END);
    IF leaks THEN
        RAISE NOTICE USING MESSAGE = 'This release keeps a plan for every statement: plans are not kept, at a higher '
            || 'cost. Upgrade Citus, and run this file again.';
    END IF;
END
$$;

-- 5. These run on the node that has the rows: of a key, or all.
SELECT set_config('txlimit.delegated', count(create_distributed_function(p.oid::regprocedure,
           distribution_arg_name => CASE WHEN m.by_key THEN 'key' END,
           colocate_with => format('%I.limits', :'schema')))::text, false) AS delegated
  FROM pg_proc AS p CROSS JOIN (SELECT current_setting('txlimit.by_key')::boolean AS by_key) AS m
 WHERE p.pronamespace = to_regnamespace(quote_ident(:'schema'))
   AND CASE WHEN m.by_key
            THEN p.proname IN ('_wire_consume', '_wire_consume_sharded', '_wire_apply_one', '_wire_refund_one')
            ELSE starts_with(p.proname, '_wire_') OR p.proname IN ('_consume_keys', '_coalesce', '_sweep') END
\gset

-- 6. What the workers have.
DO $$
DECLARE
    own    regnamespace := to_regnamespace(quote_ident(current_setting('txlimit.schema')));
    names  text;
    wanted bigint;
    found  text;
BEGIN
    IF current_setting('txlimit.delegated')
       <> (CASE current_setting('txlimit.by_key') WHEN 'true' THEN '4' ELSE '14' END) THEN
        RAISE undefined_function USING
            MESSAGE = format('%s functions run where the rows are', current_setting('txlimit.delegated')),
            HINT = 'Use the citus.sql of the same release.';
    END IF;
    SELECT count(*), string_agg(DISTINCT quote_literal(p.proname), ', ') INTO wanted, names
      FROM pg_proc AS p
     WHERE p.pronamespace = own
       AND NOT EXISTS (SELECT 1 FROM pg_depend AS d JOIN pg_type AS t ON t.oid = d.refobjid
             WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.refclassid = 'pg_type'::regclass
               AND t.typrelid IN (SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = own AND c.relkind = 'r')
               AND t.typrelid NOT IN (SELECT o.logicalrelid FROM pg_dist_partition AS o));
    SELECT string_agg(format('%s:%s (%s)', w.nodename, w.nodeport, w.result), ', ' ORDER BY w.nodename, w.nodeport)
      INTO found
      FROM run_command_on_workers(format('SELECT count(*) FROM pg_catalog.pg_proc '
           'WHERE pronamespace = pg_catalog.to_regnamespace(%L) AND proname IN (%s)', own, names)) AS w
     WHERE NOT w.success OR w.result <> wanted::text;
    IF found IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('these workers do not have all %s functions: %s', wanted, found),
            HINT = format('If the migration is older than CREATE EXTENSION citus: '
                'SELECT create_distributed_function(oid::regprocedure) FROM pg_proc '
                'WHERE pronamespace = %L::regnamespace, and CREATE OR REPLACE each view turn_... as it is. '
                'Otherwise, as a superuser: '
                'SELECT start_metadata_sync_to_all_nodes(). Then run this file again.', own);
    END IF;
    RAISE NOTICE 'All workers have the % functions. Done. Next: make conformance URL=... (docs/distributed.md).', wanted;
END
$$;

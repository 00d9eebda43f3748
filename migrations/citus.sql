-- For Citus: checks each step of docs/citus.md, says what to do next where one is not as it should be, and makes the functions suit a
-- distributed ratelimit.limits. Run it on the coordinator, as the owner of the functions, for each schema, after every migration:
--
--   PGOPTIONS='-c search_path=app' psql -v ON_ERROR_STOP=1 -f citus.sql
--
-- Not in one transaction (psql -1): it asks the workers by connections of their own. It may run again at any time. The hint of an error is
-- what to do.

DO $$
DECLARE
    leaks   boolean;
    by_key  boolean; -- row-based sharding; otherwise all rows are on one node
    spread  boolean; -- the other tables are distributed, too: schema-based sharding
    plain   text;    -- tables that are not
    own     regnamespace; -- of ratelimit.limits
    n       integer := 0;
    found   text;
    f       record;
BEGIN
    -- 1. Citus, its coordinator, its nodes.
    IF to_regclass('pg_dist_partition') IS NULL THEN
        RAISE feature_not_supported USING MESSAGE = 'this database does not have Citus',
            HINT = 'A plain Postgres needs nothing of this file. Otherwise: CREATE EXTENSION citus, and add the nodes.';
    END IF;
    IF (SELECT l.groupid FROM pg_dist_local_group AS l) <> 0 THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'this node is a worker', HINT = 'Run this file on the coordinator.';
    END IF;
    SELECT string_agg(d.nodename || ':' || d.nodeport, ', ' ORDER BY d.nodename, d.nodeport) INTO found
      FROM pg_dist_node AS d WHERE d.noderole = 'primary' AND d.groupid <> 0 AND NOT (d.isactive AND d.hasmetadata AND d.metadatasynced);
    IF found IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = format('these workers are not active, or do not have the metadata: %s', found),
            HINT = 'As a superuser: SELECT start_metadata_sync_to_all_nodes(). Or take the node out: SELECT citus_remove_node(...).';
    END IF;

    IF NOT EXISTS (SELECT 1 FROM pg_dist_node AS d WHERE d.groupid = 0) AND EXISTS (SELECT 1 FROM pg_dist_node AS d WHERE d.groupid <> 0) THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'the workers do not know the coordinator, so Hot fails there',
            HINT = 'As a superuser: SELECT citus_set_coordinator_host(...), with the name under which the workers reach it.';
    END IF;

    -- 2. The migration.
    IF to_regclass('ratelimit.limits') IS NULL THEN
        RAISE undefined_table USING MESSAGE = 'there is no table ratelimit.limits in the search_path',
            HINT = 'Migrate first. If you have: set the search_path to the schema that the migrations ran in, as PGOPTIONS above.';
    END IF;
    own := (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'ratelimit.limits'::regclass);
    IF NOT (SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class AS c WHERE c.oid = 'ratelimit.limits'::regclass) THEN
        RAISE insufficient_privilege USING MESSAGE = format('%I does not own ratelimit.limits', current_user), HINT = 'Run this file as the role that has migrated.';
    END IF;

    -- 3. The table. 'h': by the hash of a column. 'n': no column; then a reference table has the repmodel 't', and a table of the coordinator no
    -- colocation.
    SELECT d.partmethod = 'h' INTO by_key
      FROM pg_dist_partition AS d
     WHERE d.logicalrelid = 'ratelimit.limits'::regclass
       AND (d.partmethod = 'h' OR d.partmethod = 'n' AND d.repmodel <> 't' AND d.colocationid <> 0);
    SELECT string_agg(c.relname, ', ' ORDER BY c.relname) INTO plain
      FROM pg_class AS c
     WHERE c.relnamespace = own AND c.relkind = 'r' AND c.relname ~ '^rate_limit_'
       AND NOT EXISTS (SELECT 1 FROM pg_dist_partition AS d WHERE d.logicalrelid = c.oid AND d.partmethod = 'n' AND d.repmodel <> 't' AND d.colocationid <> 0);
    spread := EXISTS (SELECT 1 FROM pg_dist_partition AS d JOIN pg_class AS c ON c.oid = d.logicalrelid
         WHERE c.relnamespace = own AND c.relname = 'overrides' AND d.partmethod = 'n' AND d.repmodel <> 't' AND d.colocationid <> 0);
    IF to_regclass('pg_dist_schema') IS NOT NULL THEN
        EXECUTE 'SELECT max(''the schema'') FROM pg_dist_schema WHERE schemaid = $1' INTO found USING own;
    END IF;
    IF by_key IS NULL AND found IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = format('the schema %s is distributed, but its table ratelimit.limits is not', own),
            HINT = 'The schema was distributed before the migration, and Citus does not convert tables that a migration makes. Migrate into a schema that is not distributed, and distribute it then.';
    ELSIF by_key IS NULL THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'ratelimit.limits is not distributed',
            HINT = format('For a schema of its own (not public): SELECT citus_schema_distribute(%L). For keys on all nodes: SELECT create_distributed_table(''ratelimit.limits'', ''key'', colocate_with => ''none''). For one node: the same with NULL instead of ''key''.', own);
    ELSIF (spread OR found IS NOT NULL) AND plain IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = format('of the schema %s, these tables are not distributed: %s', own, plain),
            HINT = 'Make each of them again in the distributed schema, by a CREATE TABLE statement of its own: Citus does not convert tables that a block makes.';
    ELSIF by_key AND (SELECT column_to_column_name(d.logicalrelid, d.partkey) <> 'key' FROM pg_dist_partition AS d WHERE d.logicalrelid = 'ratelimit.limits'::regclass) THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'ratelimit.limits is distributed by another column than key',
            HINT = 'SELECT undistribute_table(''ratelimit.limits''), and SELECT create_distributed_table(''ratelimit.limits'', ''key'', colocate_with => ''none'')';
    END IF;

    -- 4. The functions. A ctid would match rows of every shard. An engine that finds rows by their ctid must stay refused, as it is by its generic plans.
    SELECT string_agg(p.proname, ', ') INTO found
      FROM pg_proc AS p
     WHERE p.pronamespace = own
       AND p.proname ~ '^(_ratelimit_(apply|coalesce|consume|move|refund|reset|sweep)|ratelimit_(reset|sweep))' AND p.prosrc ~ '\.(ctid|xmin|xmax)\M';
    IF found IS NOT NULL THEN
        RAISE feature_not_supported USING MESSAGE = format('the schema is too old for a distributed table: %s', found), HINT = 'Migrate first.';
    END IF;

    -- Functions that take or return a row of a table are not on the workers while the table is of the coordinator alone. Once it is
    -- distributed, to create them again sends them there.
    IF spread THEN
        FOR f IN
            SELECT DISTINCT p.oid
              FROM pg_depend AS d
              JOIN pg_proc AS p ON p.oid = d.objid
              JOIN pg_type AS t ON t.oid = d.refobjid
              JOIN pg_class AS c ON c.oid = t.typrelid AND c.relkind = 'r'
             WHERE d.classid = 'pg_proc'::regclass AND d.refclassid = 'pg_type'::regclass AND p.pronamespace = own AND c.relnamespace = own
        LOOP
            EXECUTE pg_get_functiondef(f.oid);
        END LOOP;
    END IF;

    -- Generic plans of a distributed table fail in some of these functions. The releases that leak keep a new plan with each execution of a
    -- generic one (Citus pull request 8824); there, no plan is kept. Without a distribution column, only
    -- INSERT ... VALUES leaks.
    leaks := by_key AND citus_version() ~ '^Citus (12\.1\.1[1-9]|13\.0\.[6-9]|13\.1\.[2-9]|13\.2\.[1-9]|13\.[34]\.\d+|14\.0\.[01]|14\.[12]\.\d+)\M';
    FOR f IN
        SELECT p.oid::regprocedure AS signature
          FROM pg_proc AS p
         WHERE p.pronamespace = own
           AND p.proname IN ('_consume', '_consume_sharded', '_consume_several', '_apply', '_refund',
                             '_move', '_pause', '_hold', '_settle', '_extend', '_consume_keys', '_each', '_coalesce', '_in_force', '_sweep_numbers', '_sweep_rows')
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
         WHERE p.pronamespace = own AND p.proname ~ '^_wire_'
    LOOP
        n := n + 1;
        EXECUTE format('ALTER FUNCTION %s SET enable_seqscan = off', f.signature);
    END LOOP;
    IF n <> 27 THEN
        RAISE undefined_function USING MESSAGE = format('the schema has %s of 27 functions', n), HINT = 'Migrate first, and use the citus.sql of the same release.';
    END IF;
    -- With true, the functions for several keys run statements for one key each. ratelimit._coalesce and ratelimit._consume_keys then refuse
    -- their batches, and the Coalescer sends one call after another: a transaction on several nodes would cost more than it saves.
    EXECUTE format('CREATE OR REPLACE FUNCTION %s._distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s', own, by_key::text);
    -- With false, programs that follow overrides find what was changed lately by the time. The nodes that they ask, and those that
    -- operators write on, number their transactions each by itself.
    EXECUTE format('CREATE OR REPLACE FUNCTION %s._one_server() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN %s', own, (NOT spread)::text);
    IF spread THEN
        EXECUTE format('CREATE INDEX IF NOT EXISTS overrides_changed ON %s.overrides (greatest(made_at, removed_at))', own);
    END IF;
    RAISE NOTICE USING MESSAGE = format('%s: %s', citus_version(), CASE
        WHEN by_key THEN 'ratelimit.limits is distributed by key. Definitions, overrides and usage are on the coordinator: what reads or writes them connects there'
        WHEN spread THEN format('the schema %s is distributed. Programs and operators may connect to any node', own)
        ELSE 'ratelimit.limits is on one node. Definitions, overrides and usage are on the coordinator: what reads or writes them connects there' END);
    IF leaks THEN
        RAISE NOTICE 'This release keeps a plan for every statement: plans are not kept, at a higher cost. Upgrade Citus, and run this file again.';
    END IF;
END
$$;

-- 5. These run on the node that has the rows: of a key, or all. A sweep goes there only with the definitions, which it reads.
SELECT create_distributed_function(p.oid::regprocedure, distribution_arg_name => CASE WHEN d.partmethod = 'h' THEN 'key' END, colocate_with => 'ratelimit.limits')
  FROM pg_dist_partition AS d
  JOIN pg_class AS c ON c.oid = d.logicalrelid
  JOIN pg_proc AS p ON p.pronamespace = c.relnamespace
 WHERE d.logicalrelid = 'ratelimit.limits'::regclass
   AND p.proname ~ CASE WHEN d.partmethod = 'h' THEN '^ratelimit._wire_(consume(_sharded)?|(apply|refund)_one)$'
                        ELSE '^(ratelimit._wire_\w+|ratelimit._consume_keys|ratelimit._coalesce|ratelimit._sweep)$' END
   AND (p.proname <> '_sweep' OR EXISTS (SELECT 1 FROM pg_dist_partition AS o WHERE o.logicalrelid = 'ratelimit.definitions'::regclass AND o.colocationid = d.colocationid));

-- 6. What the workers have.
DO $$
DECLARE
    own    regnamespace := (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'ratelimit.limits'::regclass);
    names  text;
    wanted bigint;
    found  text;
BEGIN
    SELECT count(*), string_agg(DISTINCT quote_literal(p.proname), ', ') INTO wanted, names
      FROM pg_proc AS p
     WHERE p.pronamespace = own AND p.proname ~ '^_?ratelimit'
       AND NOT EXISTS (SELECT 1 FROM pg_depend AS d JOIN pg_type AS t ON t.oid = d.refobjid
             WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.refclassid = 'pg_type'::regclass
               AND t.typrelid IN (SELECT c.oid FROM pg_class AS c WHERE c.relnamespace = own AND c.relkind = 'r')
               AND t.typrelid NOT IN (SELECT o.logicalrelid FROM pg_dist_partition AS o));
    SELECT string_agg(format('%s:%s (%s)', w.nodename, w.nodeport, w.result), ', ' ORDER BY w.nodename, w.nodeport) INTO found
      FROM run_command_on_workers(format('SELECT count(*) FROM pg_catalog.pg_proc WHERE pronamespace = pg_catalog.to_regnamespace(%L) AND proname IN (%s)', own, names)) AS w
     WHERE NOT w.success OR w.result <> wanted::text;
    IF found IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = format('these workers do not have all %s functions: %s', wanted, found),
            HINT = 'If the migration is older than CREATE EXTENSION citus: SELECT create_distributed_function(oid::regprocedure) FROM pg_proc WHERE pronamespace = ''the schema''::regnamespace, and CREATE OR REPLACE each view rate_limits_turn_... as it is. Otherwise, as a superuser: SELECT start_metadata_sync_to_all_nodes(). Then run this file again.';
    END IF;
    RAISE NOTICE 'All workers have the % functions. Done. Next: make conformance URL=..., as docs/citus.md says.', wanted;
END
$$;

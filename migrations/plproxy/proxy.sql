-- Makes a migrated database the proxy of a PL/Proxy cluster (docs/plproxy.md). Run it in the schema of rate_limits, as a superuser, after the
-- migrations, and again after each later migration: a migration puts back functions that this file replaces.
--
-- Each deciding function runs on the partition of its key, in a transaction of that partition alone: it does not join the caller's. Definitions,
-- overrides and usage stay in the proxy's own tables.
CREATE EXTENSION IF NOT EXISTS plproxy;

DO $plproxy$
DECLARE
    f record;
    no_holds CONSTANT text := $$
BEGIN
    RAISE feature_not_supported USING MESSAGE = 'rate limits: Hold, Settle, Release, During and Once do not work through a proxy',
        HINT = 'Keep the limits of holds in a database of their own, and connect to it.';
END
$$;
    settings CONSTANT text := 'SET datestyle = ''ISO'' SET intervalstyle = ''postgres'' SET extra_float_digits = 1';
BEGIN
IF quote_ident(current_schema) <> current_schema OR current_schema LIKE '%$%' THEN
    RAISE EXCEPTION 'PL/Proxy cannot call functions in schema %', quote_ident(current_schema) USING HINT = 'Use a schema of lower-case letters, digits and underscores.';
END IF;
IF to_regclass('rate_limits') IS NULL THEN
    RAISE EXCEPTION 'there is no table rate_limits in schema %', current_schema USING HINT = 'Run the migrations first.';
END IF;
-- No row is ever here. A view that cannot be read stands in the table's place, and the table cannot be written: so functions that a
-- later migration puts back grant nothing.
IF to_regclass('rate_limits_unused') IS NULL THEN
    ALTER TABLE rate_limits RENAME TO rate_limits_unused;
END IF;

EXECUTE pg_catalog.replace($sql$

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_no_table() RETURNS SETOF /* TEMPLATE: schema */rate_limits_unused
LANGUAGE plpgsql
AS $body$
BEGIN
    RAISE feature_not_supported USING MESSAGE = 'rate_limits has no rows in a proxy database',
        HINT = 'The rows are on the partitions (table rate_limit_servers). If a migration has just run, run plproxy/proxy.sql again.';
END
$body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_no_writes() RETURNS trigger
LANGUAGE plpgsql
AS $body$
BEGIN
    PERFORM /* TEMPLATE: schema */_plproxy_no_table();
END
$body$;

CREATE OR REPLACE VIEW /* TEMPLATE: schema */rate_limits AS SELECT * FROM /* TEMPLATE: schema */_plproxy_no_table();
COMMENT ON VIEW /* TEMPLATE: schema */rate_limits IS 'txlimit: stands for the table, whose rows are on the partitions; reading it is an error';
CREATE OR REPLACE TRIGGER rate_limits_proxy INSTEAD OF INSERT OR UPDATE OR DELETE ON /* TEMPLATE: schema */rate_limits
    FOR EACH ROW EXECUTE FUNCTION /* TEMPLATE: schema */_plproxy_no_writes();
CREATE OR REPLACE TRIGGER rate_limits_proxy BEFORE INSERT OR UPDATE OR DELETE ON /* TEMPLATE: schema */rate_limits_unused
    FOR EACH STATEMENT EXECUTE FUNCTION /* TEMPLATE: schema */_plproxy_no_writes();

-- 1. Where keys are.

CREATE TABLE IF NOT EXISTS /* TEMPLATE: schema */rate_limit_servers (no integer PRIMARY KEY, connection text NOT NULL UNIQUE);
COMMENT ON TABLE /* TEMPLATE: schema */rate_limit_servers IS 'txlimit: the partitions, as libpq connects to them';

-- One row: the number of the server of each slot, from slot 0; -1 while the slot moves. PL/Proxy has the same in the options of the foreign
-- server txlimit, from which it connects. This one says which keys of a batch go together.
CREATE TABLE IF NOT EXISTS /* TEMPLATE: schema */rate_limit_slot_map (one boolean PRIMARY KEY DEFAULT true CHECK (one), servers integer[] NOT NULL);

-- The moves that have begun and are not finished. arrived: the target has the slot, and calls go there.
CREATE TABLE IF NOT EXISTS /* TEMPLATE: schema */rate_limit_moves (
    slot integer PRIMARY KEY, source integer NOT NULL, target integer NOT NULL, arrived boolean NOT NULL DEFAULT false
);
COMMENT ON TABLE /* TEMPLATE: schema */rate_limit_moves IS 'txlimit: the moves of slots that are not finished; call ratelimit_move_slots again with the same slots and target';

CREATE OR REPLACE VIEW /* TEMPLATE: schema */rate_limit_slots AS
SELECT u.slot::integer - 1 AS slot, u.server FROM /* TEMPLATE: schema */rate_limit_slot_map AS m, pg_catalog.unnest(m.servers) WITH ORDINALITY AS u (server, slot);
COMMENT ON VIEW /* TEMPLATE: schema */rate_limit_slots IS 'txlimit: the server of each slot; -1 while the slot moves';

-- The slot of a key. partition.sql has the same function.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slot(key text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (hashtextextended(CASE WHEN strpos(key, '{') > 0 THEN coalesce(substring(key from '{([^{}]+)}'), key) ELSE key END COLLATE "C", 0::bigint) & 255::bigint)::integer;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_refuse(several boolean) RETURNS integer
LANGUAGE plpgsql
AS $body$
BEGIN
    IF several THEN
        RAISE feature_not_supported USING MESSAGE = 'rate limits: the keys of one call are in different slots, so it cannot be all or nothing',
            HINT = 'Call each limit alone, or give the keys a common part in braces, such as {tenant-3}user-17: only that part is hashed then.';
    END IF;
    RAISE feature_not_supported USING MESSAGE = 'rate limits: through a proxy, a decision does not join the caller''s transaction',
        HINT = 'Pass the pool, not the transaction. The isolation level must be READ COMMITTED, also by default.';
END
$body$;

-- Routes a call, or refuses one in a transaction that has written or that has a snapshot for longer than a statement. SQL cannot see
-- other transactions: their calls are decided at once, and a rollback gives nothing back.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_route(key text) RETURNS integer
LANGUAGE sql STABLE
RETURN CASE WHEN pg_current_xact_id_if_assigned() IS NULL AND current_setting('transaction_isolation') = 'read committed'
    THEN /* TEMPLATE: schema */_plproxy_slot(coalesce(key, '')) ELSE /* TEMPLATE: schema */_plproxy_refuse(false) END;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_route(keys text[]) RETURNS integer
LANGUAGE sql STABLE
RETURN (SELECT CASE WHEN min(s.slot) = max(s.slot) THEN min(s.slot) WHEN count(*) = '0' THEN 0 ELSE /* TEMPLATE: schema */_plproxy_refuse(true) END
          FROM (SELECT /* TEMPLATE: schema */_plproxy_route(k) AS slot FROM pg_catalog.unnest(keys) AS k) AS s);

-- Refuses a slot that moves. What inserts no row is not stopped by the guard of a partition: it would find no row there, and change nothing.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_settled(slot integer) RETURNS integer
LANGUAGE plpgsql STABLE
AS $body$
#variable_conflict use_variable
BEGIN
    IF (SELECT m.servers[slot + 1] FROM /* TEMPLATE: schema */rate_limit_slot_map AS m) = -1 THEN
        RAISE SQLSTATE 'RL004' USING MESSAGE = pg_catalog.format('rate limits: slot %s is moving', slot), HINT = 'Retry in a moment. TABLE rate_limit_moves shows the moves.';
    END IF;
    RETURN slot;
END
$body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_route_settled(keys text[]) RETURNS integer
LANGUAGE sql STABLE
RETURN /* TEMPLATE: schema */_plproxy_settled(/* TEMPLATE: schema */_plproxy_route(keys));

-- 2. Batches of the Go library's Coalescer. A batch for one partition goes there as it is. Otherwise each partition gets its part, all at
-- once, and all decide as of one instant, the earliest of their clocks: the answer has room for one. A partition never decides as of
-- an instant that its own clock has not reached.
--
-- RL002 makes the Coalescer send each call by itself. It is raised before anything is taken: if a partition does not answer, if a slot is
-- moving, and for a call whose keys are in different slots, which is refused then.
--
-- An error after that may leave tokens taken on other partitions. It becomes 08007, so that the Coalescer reports an unknown outcome and
-- does not try again. That holds for RL002 of a partition too, whose rows belong to a limit that was sharded: other partitions may have
-- decided. So the rows are merged at once, or batches with such a key would fail again and again.

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_clocks(v_slots integer[]) RETURNS SETOF timestamptz
LANGUAGE plproxy SET datestyle = 'ISO'
AS $body$ CLUSTER 'txlimit'; RUN ON pg_catalog.unnest(v_slots); SELECT clock_timestamp(); $body$;

-- The instant for a batch for several partitions. servers has the server of each key.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_now(slots integer[], servers integer[], now timestamptz) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    earliest timestamptz;
BEGIN
    IF -1 = ANY (servers) THEN
        RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: a slot is moving';
    END IF;
    SELECT min(c) INTO earliest
      FROM /* TEMPLATE: schema */_plproxy_clocks(ARRAY(SELECT DISTINCT ON (u.server) u.slot FROM unnest(slots, servers) AS u (slot, server))) AS c;
    RETURN coalesce(now, earliest);
EXCEPTION WHEN OTHERS THEN
    RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: ' || SQLERRM;
END
$body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_check() RETURNS void
LANGUAGE plpgsql
AS $body$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: coalesced calls need a READ COMMITTED transaction';
    END IF;
    PERFORM /* TEMPLATE: schema */_plproxy_route('');
END
$body$;

-- Raises the error of a batch for several partitions again.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_raise(state text, message text) RETURNS void
LANGUAGE plpgsql
AS $body$
BEGIN
    IF state <> '08007' THEN
        message := pg_catalog.format('rate limits: one of several partitions failed: %s (SQLSTATE %s)', message, state);
        state := '08007';
    END IF;
    RAISE EXCEPTION USING ERRCODE = state, MESSAGE = message;
END
$body$;

-- Arrays of each partition's arrays, as text.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_consume_keys(
    v_slots integer[], v_parts integer[], v_name text, v_keys text[], v_rate double precision, v_period interval, v_capacity double precision,
    v_counts text[], v_now timestamptz, v_floor double precision, v_coalesced boolean
) RETURNS TABLE (part integer, early integer, ord integer[], value double precision[], ts timestamptz[])
LANGUAGE plproxy
AS $body$ CLUSTER 'txlimit'; SPLIT v_slots, v_parts, v_keys, v_counts; RUN ON v_slots;
    SELECT p.n AS part, r.early, r.ord, r.value, r.ts
      FROM unnest($2::integer[], $4::text[], $8::text[]) AS p (n, k, c)
     CROSS JOIN LATERAL /* TEMPLATE: schema */_ratelimit_consume_keys($3::text, p.k::text[], $5::double precision, $6::interval, $7::double precision,
          p.c::double precision[], $9::timestamptz, $10::double precision, $11::boolean) AS r; $body$;


-- Arrays of each partition's arrays, as text. The definitions go to all.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_coalesce(
    v_slots integer[], v_parts integer[],
    v_names text[], v_rates double precision[], v_periods interval[], v_capacities double precision[],
    v_keys text[], v_defs text[], v_starts text[], v_repeats text[], v_counts text[], v_floors text[],
    v_calls text[], v_asks text[], v_ask_defs text[], v_ask_starts text[], v_ask_counts text[], v_ask_floors text[], v_now timestamptz,
    v_windows timestamptz[], v_firsts integer[], v_lasts integer[]
) RETURNS TABLE (part integer, ord integer[], value double precision[], ts timestamptz[], after double precision[])
LANGUAGE plproxy
AS $body$ CLUSTER 'txlimit';
    SPLIT v_slots, v_parts, v_keys, v_defs, v_starts, v_repeats, v_counts, v_floors, v_calls, v_asks, v_ask_defs, v_ask_starts, v_ask_counts, v_ask_floors;
    RUN ON v_slots;
    SELECT p.n AS part, r.ord, r.value, r.ts, r.after
      FROM unnest($2::integer[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::text[],
               $13::text[], $14::text[], $15::text[], $16::text[], $17::text[], $18::text[]) AS p (n, k, d, s, r, c, f, a, b, e, g, h, i)
     CROSS JOIN LATERAL /* TEMPLATE: schema */_ratelimit_coalesce($3::text[], $4::double precision[], $5::interval[], $6::double precision[],
          p.k::text[], p.d::integer[], p.s::timestamptz[], p.r::integer[], p.c::double precision[], p.f::double precision[],
          p.a::integer[], p.b::integer[], p.e::integer[], p.g::timestamptz[], p.h::double precision[], p.i::double precision[], $19::timestamptz,
          $20::timestamptz[], $21::integer[], $22::integer[]) AS r; $body$;

-- Merges the rows of keys whose limits were sharded, and takes nothing. Each partition commits that, though the batch then fails.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_merge(
    names text[], rates double precision[], periods interval[], capacities double precision[],
    keys text[], defs integer[], starts timestamptz[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS void
LANGUAGE plpgsql
AS $body$
BEGIN
    PERFORM /* TEMPLATE: schema */_ratelimit_consume(names[u.def], u.key, rates[u.def], periods[u.def], capacities[u.def], u.start,
            '0'::double precision, '0'::double precision, now, windows => CASE WHEN firsts[u.def] > 0 THEN windows[firsts[u.def]:lasts[u.def]] END)
       FROM unnest(keys, defs, starts) AS u (key, def, start);
EXCEPTION WHEN OTHERS THEN
    NULL; -- the batch has an error to raise
END
$body$;


-- 3. All partitions at once.

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_reset(v_slots integer[], v_names text[], v_keys text[]) RETURNS SETOF integer
LANGUAGE plproxy
AS $body$ CLUSTER 'txlimit'; SPLIT v_slots, v_names, v_keys; RUN ON v_slots; SELECT /* TEMPLATE: schema */_ratelimit_reset($2::text[], $3::text[]); $body$;

-- 4. Partitions, and the slots that move between them. These run as who calls them, and connect so: give them to nobody. Each of _plproxy_slots_...
-- calls the function of the same name, or reads a table, on a partition.

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_add_once(v_slot integer, v_id bigint, v_made_at timestamptz, v_name text, v_key text, v_more double precision)
RETURNS double precision
LANGUAGE plproxy SET datestyle = 'ISO' SET extra_float_digits = 1
AS $body$ CLUSTER 'txlimit'; RUN ON v_slot;
    SELECT /* TEMPLATE: schema */_plproxy_add_once($2::bigint, $3::timestamptz, $4::text, $5::text, $6::double precision); $body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_enter(
    v_connection text, v_begins boolean, v_slots integer[], v_names text[], v_keys text[], v_shard smallint[], v_shards smallint[], v_values double precision[], v_ts timestamptz[]
) RETURNS integer
LANGUAGE plproxy SET datestyle = 'ISO' SET extra_float_digits = 1
AS $body$ CONNECT v_connection;
    SELECT /* TEMPLATE: schema */_plproxy_slots_enter($2::boolean, $3::integer[], $4::text[], $5::text[], $6::smallint[], $7::smallint[], $8::double precision[], $9::timestamptz[]); $body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_leave(v_connection text, v_slots integer[]) RETURNS integer
LANGUAGE plproxy
AS $body$ CONNECT v_connection; SELECT /* TEMPLATE: schema */_plproxy_slots_leave($2::integer[]); $body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_left(v_connection text, v_slots integer[])
RETURNS TABLE (name text, key text, shard smallint, shards smallint, value double precision, ts timestamptz)
LANGUAGE plproxy SET datestyle = 'ISO' SET extra_float_digits = 1
AS $body$ CONNECT v_connection;
    SELECT l.name, l.key, l.shard, l.shards, l.value, l.ts FROM /* TEMPLATE: schema */rate_limits_left AS l WHERE l.slot = ANY ($2::integer[]); $body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_forget(v_connection text, v_slots integer[]) RETURNS integer
LANGUAGE plproxy
AS $body$ CONNECT v_connection; SELECT /* TEMPLATE: schema */_plproxy_slots_forget($2::integer[]); $body$;

REVOKE EXECUTE ON FUNCTION /* TEMPLATE: schema */_plproxy_slots_enter, /* TEMPLATE: schema */_plproxy_slots_leave, /* TEMPLATE: schema */_plproxy_slots_left,
    /* TEMPLATE: schema */_plproxy_slots_forget, /* TEMPLATE: schema */_plproxy_add_once FROM PUBLIC;

-- Begins a cluster: the slots are spread evenly over these partitions. Later it adds partitions, without slots. To begin with a server that has
-- rows, begin with it alone.
--
--     SELECT ratelimit_add_servers(ARRAY['host=10.0.0.1 dbname=limits connect_timeout=2', 'host=10.0.0.2 dbname=limits connect_timeout=2'])
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_add_servers(connections text[]) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    servers integer[];
    begun boolean := EXISTS (SELECT FROM /* TEMPLATE: schema */rate_limit_slot_map);
    n integer := pg_catalog.cardinality(connections);
BEGIN
    IF (n > 0) IS NOT TRUE OR pg_catalog.array_position(connections, NULL) IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'there are no connections, or one is NULL';
    ELSIF NOT begun AND n > 256 THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('%s servers are more than the 256 slots', n);
    ELSIF EXISTS (SELECT FROM pg_catalog.unnest(connections) AS c WHERE c ~* '(password|_key)\s*=') THEN -- of which the message says nothing
        RAISE invalid_parameter_value USING MESSAGE = 'a connection has a password, and every role can read it in pg_foreign_server',
            HINT = 'Write it into the user mapping: ALTER USER MAPPING FOR PUBLIC SERVER txlimit OPTIONS (ADD password ...).';
    ELSIF EXISTS (SELECT FROM pg_catalog.unnest(connections) AS c WHERE c ~ '://') THEN
        RAISE invalid_parameter_value USING MESSAGE = 'a connection is a URL', HINT = 'Write it as host=10.0.0.1 dbname=limits connect_timeout=2.';
    END IF;
    INSERT INTO /* TEMPLATE: schema */rate_limit_servers (no, connection)
    SELECT coalesce((SELECT max(s.no) + 1 FROM /* TEMPLATE: schema */rate_limit_servers AS s), 0) + u.i - 1, u.connection
      FROM pg_catalog.unnest(connections) WITH ORDINALITY AS u (connection, i);
    IF begun THEN
        RETURN;
    END IF;
    servers := ARRAY(SELECT slot % n FROM generate_series(0, 255) AS slot);
    INSERT INTO /* TEMPLATE: schema */rate_limit_slot_map (servers) VALUES (servers);
    EXECUTE 'CREATE SERVER txlimit FOREIGN DATA WRAPPER plproxy OPTIONS (' || (
        SELECT pg_catalog.string_agg(pg_catalog.format('p%s %L', slot, connections[slot % n + 1]), ', ' ORDER BY slot) FROM generate_series(0, 255) AS slot) || ')';
    CREATE USER MAPPING FOR PUBLIC SERVER txlimit;
    PERFORM /* TEMPLATE: schema */_plproxy_slots_enter(connections[server + 1], true, ARRAY(SELECT slot FROM generate_series(0, 255) AS slot WHERE slot % n = server),
            '{}', '{}', '{}', '{}', '{}', '{}')
       FROM generate_series(0, n - 1) AS server;
END
$body$;

-- Moves slots to a partition, with their rows, while calls go on. Calls for keys of these slots are refused meanwhile (RL004). If it fails
-- on the way, call it again with the same slots and the same server: until it has succeeded, they stay refused, and no row is lost.
--
--     CALL ratelimit_move_slots(ARRAY[0, 4, 8], 3)
--
-- The target may have the slots already when a move fails, so another target is refused: it would get rows of two times. Each transaction locks
-- the table of moves first, and then reads how far the move is. So a move that is called twice at once is done once.
CREATE OR REPLACE PROCEDURE /* TEMPLATE: schema */ratelimit_move_slots(slots integer[], server integer)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    target text := (SELECT s.connection FROM /* TEMPLATE: schema */rate_limit_servers AS s WHERE s.no = server);
    other  record; -- an unfinished move to another server
    source record;
    these  integer[];
    s      integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: ratelimit_move_slots needs READ COMMITTED, also by default';
    ELSIF ('0' <= ALL (slots) AND '255' >= ALL (slots) AND pg_catalog.cardinality(slots) > 0) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('slots %s are not numbers between 0 and 255', quote_nullable(slots::text));
    ELSIF target IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('there is no server %s', server), HINT = 'ratelimit_add_servers adds it.';
    END IF;
    FOR source IN SELECT r.no, r.connection FROM /* TEMPLATE: schema */rate_limit_servers AS r ORDER BY r.no LOOP
        LOCK TABLE /* TEMPLATE: schema */rate_limit_moves IN EXCLUSIVE MODE;
        SELECT m.target, pg_catalog.array_agg(m.slot ORDER BY m.slot) AS slots INTO other
          FROM /* TEMPLATE: schema */rate_limit_moves AS m WHERE m.slot = ANY (slots) AND m.target <> server GROUP BY m.target LIMIT 1;
        IF FOUND THEN
            RAISE object_not_in_prerequisite_state USING
                MESSAGE = pg_catalog.format('the move of slots %s to server %s is not finished', other.slots, other.target),
                HINT = pg_catalog.format('Finish it first: CALL ratelimit_move_slots(''%s'', %s)', other.slots, other.target);
        END IF;
        -- 1. No batch has these slots any more. The options of the foreign server say where slots are now, also after a failure.
        INSERT INTO /* TEMPLATE: schema */rate_limit_moves (slot, source, target)
        SELECT o.slot, source.no, server
          FROM (
            SELECT substr(u.option_name, 2)::integer AS slot, u.option_value
              FROM pg_foreign_server AS f, pg_options_to_table(f.srvoptions) AS u
             WHERE f.srvname = 'txlimit' AND u.option_name ~ '^p[0-9]+$'
          ) AS o
         WHERE o.slot = ANY (slots) AND source.no <> server AND o.option_value = source.connection
            ON CONFLICT DO NOTHING;
        these := ARRAY(SELECT m.slot FROM /* TEMPLATE: schema */rate_limit_moves AS m WHERE m.slot = ANY (slots) AND m.source = source.no ORDER BY m.slot);
        CONTINUE WHEN pg_catalog.cardinality(these) = 0;
        FOR s IN SELECT m.slot FROM /* TEMPLATE: schema */rate_limit_moves AS m WHERE m.slot = ANY (these) AND NOT m.arrived LOOP
            UPDATE /* TEMPLATE: schema */rate_limit_slot_map SET servers[s + 1] = -1;
        END LOOP;
        COMMIT;

        LOCK TABLE /* TEMPLATE: schema */rate_limit_moves IN EXCLUSIVE MODE;
        these := ARRAY(SELECT m.slot FROM /* TEMPLATE: schema */rate_limit_moves AS m
            WHERE m.slot = ANY (slots) AND m.source = source.no AND m.target = server AND NOT m.arrived ORDER BY m.slot);
        IF pg_catalog.cardinality(these) > 0 THEN
            -- 2. The source refuses them and keeps their rows aside.
            PERFORM /* TEMPLATE: schema */_plproxy_slots_leave(source.connection, these);
            -- 3. The target gets them with their rows, at once.
            PERFORM /* TEMPLATE: schema */_plproxy_slots_enter(target, false, these, pg_catalog.array_agg(l.name), pg_catalog.array_agg(l.key),
                    pg_catalog.array_agg(l.shard), pg_catalog.array_agg(l.shards), pg_catalog.array_agg(l.value), pg_catalog.array_agg(l.ts))
               FROM /* TEMPLATE: schema */_plproxy_slots_left(source.connection, these) AS l;
            -- 4. Calls go to the target.
            FOREACH s IN ARRAY these LOOP
                EXECUTE pg_catalog.format('ALTER SERVER txlimit OPTIONS (SET p%s %L)', s, target);
                UPDATE /* TEMPLATE: schema */rate_limit_slot_map SET servers[s + 1] = server;
            END LOOP;
            UPDATE /* TEMPLATE: schema */rate_limit_moves AS m SET arrived = true WHERE m.slot = ANY (these);
        END IF;
        COMMIT;

        -- 5. The source forgets the rows.
        LOCK TABLE /* TEMPLATE: schema */rate_limit_moves IN EXCLUSIVE MODE;
        these := ARRAY(SELECT m.slot FROM /* TEMPLATE: schema */rate_limit_moves AS m
            WHERE m.slot = ANY (slots) AND m.source = source.no AND m.target = server AND m.arrived ORDER BY m.slot);
        IF pg_catalog.cardinality(these) > 0 THEN
            PERFORM /* TEMPLATE: schema */_plproxy_slots_forget(source.connection, these);
            DELETE FROM /* TEMPLATE: schema */rate_limit_moves AS m WHERE m.slot = ANY (these);
        END IF;
        COMMIT;
    END LOOP;
END
$body$;

REVOKE EXECUTE ON ROUTINE /* TEMPLATE: schema */ratelimit_add_servers, /* TEMPLATE: schema */ratelimit_move_slots FROM PUBLIC;

$sql$, '/* TEMPLATE: schema */', pg_catalog.format('%I.', current_schema));

-- 5. The functions of the engine that read or write rate_limits take these bodies. All else of them (names, arguments, defaults, results) is
-- the engine's. PL/Proxy sends values as text, so it must write them alike whatever the session's settings.
FOR f IN
    SELECT p.proname, pg_get_function_arguments(p.oid) AS arguments, pg_get_function_result(p.oid) AS result, d.language, d.body,
           (SELECT string_agg(format('$%s::%s', u.i + CASE WHEN d.name = '_ratelimit_sweep_rows' THEN 0 ELSE 1 END, format_type(u.type, NULL)), ', ' ORDER BY u.i)
              FROM unnest(p.proargtypes) WITH ORDINALITY AS u (type, i)) AS passed,
           (SELECT string_agg(format('r.%I', p.proargnames[u.i]), ', ' ORDER BY u.i) FROM unnest(p.proargmodes) WITH ORDINALITY AS u (mode, i) WHERE u.mode = 'o') AS results
      FROM (VALUES
        -- For one key, or for several of one slot.
        ('_ratelimit_consume', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(key);$$),
        ('_ratelimit_consume_sharded', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(key);$$),
        ('_ratelimit_consume_several', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(keys);$$),
        ('_ratelimit_apply', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(keys);$$),
        ('_ratelimit_each', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(keys);$$),
        ('_ratelimit_refund', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route_settled(keys);$$),
        ('_ratelimit_move', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(keys);$$),
        ('_ratelimit_pause', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route(keys);$$),
        ('_ratelimit_resume', 'plproxy', $$CLUSTER 'txlimit'; RUN ON /* TEMPLATE: schema */_plproxy_route_settled(keys);$$),

        -- On all partitions.
        ('_ratelimit_rows', 'plproxy', $$CLUSTER 'txlimit'; RUN ON ALL;$$),
        -- Each partition resets its keys in a transaction of its own. After an error, some may be reset: reset them again.
        ('_ratelimit_reset', 'plpgsql', $$
#variable_conflict use_variable
BEGIN
    SELECT coalesce(sum(r), 0)::integer INTO deleted
      FROM /* TEMPLATE: schema */_plproxy_reset(ARRAY(SELECT /* TEMPLATE: schema */_plproxy_settled(/* TEMPLATE: schema */_plproxy_route(u.key)) FROM unnest(names, keys) AS u (name, key)), names, keys) AS r;
END
$$),
        -- One batch of each partition, from the same key on. The next begins at the first key that some partition has not looked at. The
        -- partitions know of no overrides: the keys that have one are spared.
        ('_ratelimit_sweep_rows', 'plpgsql', $$
#variable_conflict use_variable
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    IF varies IS NOT NULL THEN
        spared := ARRAY(SELECT o.key FROM /* TEMPLATE: schema */rate_limit_overrides AS o
            WHERE o.name = name AND o.key >= first AND coalesce(least(o.until, o.removed_at), 'infinity') > clock_timestamp() - interval '1 day');
    END IF;
    SELECT coalesce(sum(r.deleted), 0)::integer, min(r.next COLLATE "C") INTO deleted, next
      FROM /* TEMPLATE: schema */_plproxy_sweep_rows(name, rate, period, kind, capacity, start, varies, spared, first, now) AS r;
END
$$),

        -- Tokens are added on the partition of the key.
        ('_ratelimit_add_tokens', 'plpgsql', $$
#variable_conflict use_variable
BEGIN
    RETURN /* TEMPLATE: schema */_plproxy_add_once(/* TEMPLATE: schema */_plproxy_settled(/* TEMPLATE: schema */_plproxy_slot(coalesce(o.key, ''))), o.id, o.made_at,
        o.name, coalesce(o.key, ''), more);
END
$$),

        -- A hold is a row beside those of its limits, and a slot that is moved would leave it behind. It is refused before it takes.
        ('_ratelimit_hold', 'plpgsql', no_holds),
        ('_ratelimit_settle', 'plpgsql', no_holds),
        ('_ratelimit_release_by_hand', 'plpgsql', no_holds),
        ('_ratelimit_hold_many', 'plpgsql', no_holds),
        ('_ratelimit_release_many', 'plpgsql', no_holds),
        ('_ratelimit_recount', 'plpgsql', no_holds),

        -- Batches: see 2.
        ('_ratelimit_consume_keys', 'plpgsql', $$
#variable_conflict use_variable
DECLARE
    slots   integer[]; -- of each key
    servers integer[];
    ords    integer[]; -- the keys of the first part, then of the second ...
    packs   record;
    parts   integer;
BEGIN
    PERFORM /* TEMPLATE: schema */_plproxy_check();
    SELECT pg_catalog.array_agg(s.slot ORDER BY s.i), pg_catalog.array_agg(m.servers[s.slot + 1] ORDER BY s.i) INTO slots, servers
      FROM (SELECT u.i, /* TEMPLATE: schema */_plproxy_slot(u.key) AS slot FROM pg_catalog.unnest(keys) WITH ORDINALITY AS u (key, i)) AS s
     CROSS JOIN /* TEMPLATE: schema */rate_limit_slot_map AS m;
    IF servers[1] <> -1 AND servers[1] = ALL (servers) THEN
        SELECT r.seen, r.at, r.early, r.ord, r.value, r.ts INTO seen, at, early, ord, value, ts
          FROM /* TEMPLATE: schema */_plproxy_consume_keys(slots[1], name, keys, rate, period, capacity, counts, now, floor, coalesced) AS r;
        RETURN;
    END IF;
    seen := /* TEMPLATE: schema */_plproxy_now(slots, servers, now);
    at := seen;
    BEGIN
        SELECT pg_catalog.array_agg(g.slot ORDER BY g.server) AS slots, pg_catalog.array_agg(g.begins ORDER BY g.server)::integer[] AS begins,
               pg_catalog.array_agg(g.keys::text ORDER BY g.server) AS keys, pg_catalog.array_agg(g.counts::text ORDER BY g.server) AS counts,
               count(*)::integer AS n
          INTO packs
          FROM (
            SELECT u.server, min(u.slot) AS slot, (sum(count(*)) OVER (ORDER BY u.server))::bigint - count(*) AS begins,
                   pg_catalog.array_agg(u.key ORDER BY u.i) AS keys, pg_catalog.array_agg(u.count ORDER BY u.i) AS counts
              FROM unnest(keys, counts, slots, servers) WITH ORDINALITY AS u (key, count, slot, server, i)
             GROUP BY u.server
          ) AS g;
        ords := ARRAY(SELECT u.i::integer FROM pg_catalog.unnest(servers) WITH ORDINALITY AS u (server, i) ORDER BY u.server, u.i);
        SELECT sum(CASE WHEN d.j = 1 THEN d.early ELSE 0 END), pg_catalog.count(DISTINCT d.part),
               coalesce(pg_catalog.array_agg(ords[packs.begins[d.part] + d.ord] ORDER BY d.j > d.early, d.part, d.j) FILTER (WHERE d.ord IS NOT NULL), '{}'),
               pg_catalog.array_agg(d.value ORDER BY d.j > d.early, d.part, d.j) FILTER (WHERE d.ord IS NOT NULL),
               pg_catalog.array_agg(d.ts ORDER BY d.j > d.early, d.part, d.j) FILTER (WHERE d.ord IS NOT NULL)
          INTO early, parts, ord, value, ts
          FROM (
            SELECT r.part, r.early, u.ord, u.value, u.ts, coalesce(u.j, 1) AS j
              FROM /* TEMPLATE: schema */_plproxy_consume_keys(packs.slots, ARRAY(SELECT generate_series(1, packs.n)), name, packs.keys,
                      rate, period, capacity, packs.counts, at, floor, coalesced) AS r
              LEFT JOIN LATERAL unnest(r.ord, r.value, r.ts) WITH ORDINALITY AS u (ord, value, ts, j) ON true
          ) AS d;
        IF parts IS DISTINCT FROM packs.n THEN
            RAISE SQLSTATE '08007' USING MESSAGE = 'rate limits: a partition gave no answer';
        END IF;
    EXCEPTION WHEN OTHERS THEN
        PERFORM /* TEMPLATE: schema */_plproxy_raise(SQLSTATE, SQLERRM);
    END;
END
$$),
        ('_ratelimit_coalesce', 'plpgsql', $$
#variable_conflict use_variable
DECLARE
    slots   integer[]; -- of each key
    servers integer[];
    ords    integer[]; -- the keys of the first part, then of the second ...
    places  integer[]; -- of each key in its part
    packs   record;
    parts   integer;
BEGIN
    PERFORM /* TEMPLATE: schema */_plproxy_check();
    SELECT pg_catalog.array_agg(s.slot ORDER BY s.i), pg_catalog.array_agg(m.servers[s.slot + 1] ORDER BY s.i) INTO slots, servers
      FROM (SELECT u.i, /* TEMPLATE: schema */_plproxy_slot(u.key) AS slot FROM pg_catalog.unnest(keys) WITH ORDINALITY AS u (key, i)) AS s
     CROSS JOIN /* TEMPLATE: schema */rate_limit_slot_map AS m;
    IF EXISTS (SELECT FROM unnest(calls, asks) AS a (call, ask) GROUP BY a.call HAVING min(slots[a.ask]) <> max(slots[a.ask])) THEN
        RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: the keys of one call are in different slots';
    END IF;
    IF servers[1] <> -1 AND servers[1] = ALL (servers) THEN
        SELECT r.seen, r.at, r.early, r.ord, r.value, r.ts, r.after INTO seen, at, early, ord, value, ts, after
          FROM /* TEMPLATE: schema */_plproxy_coalesce(slots[1], names, rates, periods, capacities, keys, defs, starts, repeats, counts, floors,
              calls, asks, ask_defs, ask_starts, ask_counts, ask_floors, now, windows, firsts, lasts) AS r;
        RETURN;
    END IF;
    seen := /* TEMPLATE: schema */_plproxy_now(slots, servers, now);
    at := seen;
    early := 0; -- which makes no difference, since seen is at
    BEGIN
        ords := ARRAY(SELECT u.i::integer FROM pg_catalog.unnest(servers) WITH ORDINALITY AS u (server, i) ORDER BY u.server, u.i);
        places := ARRAY(SELECT row_number() OVER (PARTITION BY u.server ORDER BY u.i)::integer
                          FROM pg_catalog.unnest(servers) WITH ORDINALITY AS u (server, i) ORDER BY u.i);
        -- The keys with repeats come first, in each part too.
        SELECT pg_catalog.array_agg(g.slot ORDER BY g.server) AS slots, pg_catalog.array_agg(g.begins ORDER BY g.server)::integer[] AS begins,
               pg_catalog.array_agg(g.keys::text ORDER BY g.server) AS keys, pg_catalog.array_agg(g.defs::text ORDER BY g.server) AS defs,
               pg_catalog.array_agg(CASE WHEN pg_catalog.cardinality(starts) > 0 THEN g.starts::text ELSE '{}' END ORDER BY g.server) AS starts,
               pg_catalog.array_agg(coalesce(g.repeats::text, '{}') ORDER BY g.server) AS repeats,
               pg_catalog.array_agg(coalesce(g.counts::text, '{}') ORDER BY g.server) AS counts,
               pg_catalog.array_agg(coalesce(g.floors::text, '{}') ORDER BY g.server) AS floors,
               pg_catalog.array_agg(coalesce(b.calls::text, '{}') ORDER BY g.server) AS calls,
               pg_catalog.array_agg(coalesce(b.asks::text, '{}') ORDER BY g.server) AS asks,
               pg_catalog.array_agg(coalesce(b.defs::text, '{}') ORDER BY g.server) AS ask_defs,
               pg_catalog.array_agg(coalesce(b.starts::text, '{}') ORDER BY g.server) AS ask_starts,
               pg_catalog.array_agg(coalesce(b.counts::text, '{}') ORDER BY g.server) AS ask_counts,
               pg_catalog.array_agg(coalesce(b.floors::text, '{}') ORDER BY g.server) AS ask_floors,
               count(*)::integer AS n
          INTO packs
          FROM (
            SELECT u.server, min(u.slot) AS slot, (sum(count(*)) OVER (ORDER BY u.server))::bigint - count(*) AS begins,
                   pg_catalog.array_agg(u.key ORDER BY u.i) AS keys, pg_catalog.array_agg(u.def ORDER BY u.i) AS defs,
                   pg_catalog.array_agg(u.start ORDER BY u.i) AS starts,
                   pg_catalog.array_agg(u.repeats ORDER BY u.i) FILTER (WHERE u.i <= pg_catalog.cardinality(repeats)) AS repeats,
                   pg_catalog.array_agg(u.count ORDER BY u.i) FILTER (WHERE u.i <= pg_catalog.cardinality(repeats)) AS counts,
                   pg_catalog.array_agg(u.floor ORDER BY u.i) FILTER (WHERE u.i <= pg_catalog.cardinality(repeats)) AS floors
              FROM unnest(keys, defs, starts, repeats, counts, floors, slots, servers) WITH ORDINALITY
                AS u (key, def, start, repeats, count, floor, slot, server, i)
             GROUP BY u.server
          ) AS g
          LEFT JOIN (
            SELECT servers[u.ask] AS server, pg_catalog.array_agg(u.call ORDER BY u.i) AS calls, pg_catalog.array_agg(places[u.ask] ORDER BY u.i) AS asks,
                   pg_catalog.array_agg(u.def ORDER BY u.i) AS defs, pg_catalog.array_agg(u.start ORDER BY u.i) AS starts,
                   pg_catalog.array_agg(u.count ORDER BY u.i) AS counts, pg_catalog.array_agg(u.floor ORDER BY u.i) AS floors
              FROM unnest(calls, asks, ask_defs, ask_starts, ask_counts, ask_floors) WITH ORDINALITY AS u (call, ask, def, start, count, floor, i)
             GROUP BY 1
          ) AS b USING (server);
        SELECT pg_catalog.count(DISTINCT d.part), pg_catalog.array_agg(ords[packs.begins[d.part] + d.ord] ORDER BY d.part, d.j) FILTER (WHERE d.ord IS NOT NULL),
               pg_catalog.array_agg(d.value ORDER BY d.part, d.j) FILTER (WHERE d.ord IS NOT NULL),
               pg_catalog.array_agg(d.ts ORDER BY d.part, d.j) FILTER (WHERE d.ord IS NOT NULL),
               pg_catalog.array_agg(d.after ORDER BY d.part, d.j) FILTER (WHERE d.ord IS NOT NULL)
          INTO parts, ord, value, ts, after
          FROM (
            SELECT r.part, u.*
              FROM /* TEMPLATE: schema */_plproxy_coalesce(packs.slots, ARRAY(SELECT generate_series(1, packs.n)), names, rates, periods, capacities,
                      packs.keys, packs.defs, packs.starts, packs.repeats, packs.counts, packs.floors, packs.calls, packs.asks, packs.ask_defs,
                      packs.ask_starts, packs.ask_counts, packs.ask_floors, at, windows, firsts, lasts) AS r
              LEFT JOIN LATERAL unnest(r.ord, r.value, r.ts, r.after) WITH ORDINALITY AS u (ord, value, ts, after, j) ON true
          ) AS d;
        IF parts IS DISTINCT FROM packs.n THEN -- a key without an answer would count as full
            RAISE SQLSTATE '08007' USING MESSAGE = 'rate limits: a partition gave no answer';
        END IF;
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE = 'RL002' THEN
            PERFORM /* TEMPLATE: schema */_plproxy_merge(names, rates, periods, capacities, keys, defs, starts, now, windows, firsts, lasts);
        END IF;
        PERFORM /* TEMPLATE: schema */_plproxy_raise(SQLSTATE, SQLERRM);
    END;
END
$$)
      ) AS d (name, language, body)
      LEFT JOIN pg_proc AS p ON p.proname = d.name AND p.pronamespace = current_schema::regnamespace
LOOP
    IF f.proname IS NULL THEN
        RAISE EXCEPTION 'schema % lacks a function of the engine', quote_ident(current_schema) USING HINT = 'Run the migrations of this release first.';
    END IF;
    EXECUTE replace(format('CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */%I(%s) RETURNS %s LANGUAGE %s %s AS %L', f.proname, f.arguments, f.result, f.language,
        settings, f.body), '/* TEMPLATE: schema */', format('%I.', current_schema));
    -- How these call the engine: on the partition of a slot, and on all.
    IF f.proname IN ('_ratelimit_consume_keys', '_ratelimit_coalesce') THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I.%I(v_slot integer, %s) RETURNS %s LANGUAGE plproxy AS %L', current_schema, replace(f.proname, '_ratelimit', '_plproxy'),
            f.arguments, f.result, format('CLUSTER ''txlimit''; RUN ON v_slot; SELECT %s FROM %I.%I(%s) AS r;', f.results, current_schema, f.proname, f.passed));
    ELSIF f.proname = '_ratelimit_sweep_rows' THEN
        EXECUTE format('CREATE OR REPLACE FUNCTION %I._plproxy_sweep_rows(%s) RETURNS SETOF %s LANGUAGE plproxy %s AS %L', current_schema, f.arguments, f.result, settings,
            format('CLUSTER ''txlimit''; RUN ON ALL; SELECT %s FROM %I.%I(%s) AS r;', f.results, current_schema, f.proname, f.passed));
    END IF;
END LOOP;
END
$plproxy$;

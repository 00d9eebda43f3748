-- Makes a migrated database a partition of a PL/Proxy cluster (docs/plproxy.md): the guard, and what moves slots from one partition to
-- another. Run it in the schema of rate_limits, after the migrations. It can be run again.
--
-- A key belongs to one of 256 slots, and a slot to one partition. rate_limit_slots has the partition's own. A key of another slot is refused:
-- it would be full here, and so would grant what another partition has granted before.
DO $plproxy$
BEGIN
EXECUTE pg_catalog.replace($sql$

-- The slot of a key. proxy.sql has the same function. Hash partitioning depends on hashtextextended, so its values stay the same from release
-- to release; hashtext's need not. Only the part of a key in braces is hashed, if there is one, so that keys can share a slot.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slot(key text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (hashtextextended(CASE WHEN strpos(key, '{') > 0 THEN coalesce(substring(key from '{([^{}]+)}'), key) ELSE key END COLLATE "C", 0::bigint) & 255::bigint)::integer;

CREATE TABLE IF NOT EXISTS /* TEMPLATE: schema */rate_limit_slots (slot integer PRIMARY KEY CHECK (slot BETWEEN 0 AND 255));
COMMENT ON TABLE /* TEMPLATE: schema */rate_limit_slots IS 'txlimit: the slots of this partition; keys of other slots are refused';

-- The rows of slots that have left. They are kept until the other partition has them.
CREATE TABLE IF NOT EXISTS /* TEMPLATE: schema */rate_limits_left (
    slot integer NOT NULL, name text NOT NULL, key text NOT NULL, shard smallint NOT NULL, shards smallint NOT NULL,
    value double precision NOT NULL, ts timestamptz NOT NULL,
    PRIMARY KEY (slot, name, key, shard)
);

-- What ratelimit_add has added here: an override adds once, even if the proxy fails before it has noted that.
CREATE TABLE IF NOT EXISTS /* TEMPLATE: schema */rate_limit_added (
    id bigint, made_at timestamptz, added double precision NOT NULL, PRIMARY KEY (id, made_at)
);

-- Every first use inserts a row, and a call of a key whose row has left inserts one, too. So an INSERT is all that has to be guarded.
--
-- _plproxy_slots_leave waits for every guard that has seen the slot, and every later guard sees that it has left. In READ COMMITTED this
-- takes an advisory lock; above it, where a guard may see an older state, a lock of the slot's row, which then fails (40001).
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_guard() RETURNS trigger
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    own integer := /* TEMPLATE: schema */_plproxy_slot(NEW.key);
BEGIN
    IF current_setting('transaction_isolation') = 'read committed' THEN
        PERFORM pg_advisory_xact_lock_shared(1920757612, own);
        PERFORM 1 FROM /* TEMPLATE: schema */rate_limit_slots AS s WHERE s.slot = own;
    ELSE
        PERFORM 1 FROM /* TEMPLATE: schema */rate_limit_slots AS s WHERE s.slot = own FOR KEY SHARE;
    END IF;
    IF NOT FOUND THEN
        RAISE SQLSTATE 'RL004' USING
            MESSAGE = pg_catalog.format('rate limit %L: slot %s of the key is not on this partition', NEW.name, own),
            HINT = 'Call through the proxy. If the slot is moving there too, retry in a moment.';
    END IF;
    RETURN NEW;
END
$body$;

CREATE OR REPLACE TRIGGER rate_limits_guard BEFORE INSERT ON /* TEMPLATE: schema */rate_limits
    FOR EACH ROW EXECUTE FUNCTION /* TEMPLATE: schema */_plproxy_guard();

-- Takes slots in, with their rows, unless they are here already. begins: the partition has no slots yet, and may have rows of these.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_enter(
    begins boolean, slots integer[], names text[], keys text[], shard smallint[], shards smallint[], val double precision[], ts timestamptz[]
) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    n integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN -- a snapshot could miss what calls have just committed
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: slots move in READ COMMITTED transactions only',
            HINT = 'Set default_transaction_isolation of the proxy''s role on the partition to read committed.';
    END IF;
    INSERT INTO /* TEMPLATE: schema */rate_limit_slots (slot) SELECT pg_catalog.unnest(slots) ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n = 0 THEN
        RETURN 0;
    ELSIF n < pg_catalog.cardinality(slots) THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'only some of the slots are here already',
            HINT = 'Repeat each unfinished move with the slots that it had.';
    END IF;
    IF begins AND EXISTS (SELECT FROM /* TEMPLATE: schema */rate_limits AS r
            WHERE NOT EXISTS (SELECT FROM /* TEMPLATE: schema */rate_limit_slots AS s WHERE s.slot = /* TEMPLATE: schema */_plproxy_slot(r.key))) THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'the partition has rows of slots that are not its own',
            HINT = 'Begin the cluster with this partition alone, then add the others and move slots to them.';
    END IF;
    INSERT INTO /* TEMPLATE: schema */rate_limits (name, key, shard, shards, value, ts)
    SELECT * FROM unnest(names, keys, shard, shards, val, ts);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$body$;

-- Gives slots up. Their calls are refused from then on, or wait for that until this commits.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_leave(slots integer[]) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    n integer;
    s integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN -- a snapshot could miss what calls have just committed
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: slots move in READ COMMITTED transactions only',
            HINT = 'Set default_transaction_isolation of the proxy''s role on the partition to read committed.';
    END IF;
    FOREACH s IN ARRAY slots LOOP
        PERFORM pg_advisory_xact_lock(1920757612, s);
    END LOOP;
    WITH d AS (
        DELETE FROM /* TEMPLATE: schema */rate_limit_slots AS s WHERE s.slot = ANY (slots) RETURNING s.slot
    )
    DELETE FROM /* TEMPLATE: schema */rate_limits_left AS l WHERE l.slot IN (SELECT d.slot FROM d); -- of an earlier move, which was not finished
    PERFORM 1 FROM /* TEMPLATE: schema */rate_limits AS r WHERE /* TEMPLATE: schema */_plproxy_slot(r.key) = ANY (slots)
      ORDER BY r.name, r.key, r.shard FOR UPDATE; -- in the order in which calls lock them
    WITH d AS (
        DELETE FROM /* TEMPLATE: schema */rate_limits AS r WHERE /* TEMPLATE: schema */_plproxy_slot(r.key) = ANY (slots) RETURNING r.*
    )
    INSERT INTO /* TEMPLATE: schema */rate_limits_left
    SELECT /* TEMPLATE: schema */_plproxy_slot(d.key), d.name, d.key, d.shard, d.shards, d.value, d.ts FROM d;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$body$;

-- Forgets the rows of slots that have arrived.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_slots_forget(slots integer[]) RETURNS integer
LANGUAGE sql
BEGIN ATOMIC
    WITH d AS (DELETE FROM /* TEMPLATE: schema */rate_limits_left AS l WHERE l.slot = ANY (slots) RETURNING 1)
    SELECT count(*)::integer FROM d;
END;

-- Adds tokens to a key for an override, once. Another call of the same waits for the row of rate_limit_added.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_plproxy_add_once(id bigint, made_at timestamptz, name text, key text, more double precision) RETURNS double precision
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    o /* TEMPLATE: schema */rate_limit_overrides;
BEGIN
    INSERT INTO /* TEMPLATE: schema */rate_limit_added AS a VALUES (id, made_at, 0) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN (SELECT a.added FROM /* TEMPLATE: schema */rate_limit_added AS a WHERE a.id = id AND a.made_at = made_at);
    END IF;
    o.name := name;
    o.key := key;
    more := /* TEMPLATE: schema */_ratelimit_add_tokens(o, more);
    UPDATE /* TEMPLATE: schema */rate_limit_added AS a SET added = more WHERE a.id = id AND a.made_at = made_at;
    RETURN more;
END
$body$;

$sql$, '/* TEMPLATE: schema */', pg_catalog.format('%I.', current_schema));
END
$plproxy$;

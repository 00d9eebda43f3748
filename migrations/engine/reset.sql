-- Makes limits full again by deleting the rows of all their shards, which it locks in the common order (CONCURRENCY.md, D1).
-- Returns the number of deleted rows. Holds of the limits lapse: what they hold is forgotten, too, and does not come back. Slots in use cannot be reset.
CREATE OR REPLACE FUNCTION ratelimit._reset(names text[], keys text[], OUT deleted integer)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    r record;
    h record;
    n integer;
    -- In variables, since Citus takes nothing in a write that is not immutable.
    kept timestamptz := clock_timestamp() + interval '7 days';
BEGIN
    deleted := 0;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        PERFORM 1 FROM ratelimit.limits AS t WHERE t.name = r.name AND t.key = r.key ORDER BY t.shard FOR UPDATE;
        DELETE FROM ratelimit.limits AS t WHERE t.name = r.name AND t.key = r.key;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n = 0 THEN
            PERFORM ratelimit._check_keyless(r.name, r.key);
        END IF;
        deleted := deleted + n;
    END LOOP;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        FOR h IN
            SELECT l.id, l.unit FROM ratelimit.holds AS l WHERE l.name = r.name AND l.key = r.key AND l.state = 'held' ORDER BY l.id FOR UPDATE
        LOOP
            IF h.unit = 'slots' THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: slots in use cannot be reset', r.name),
                    HINT = 'ratelimit.holds says which work has them, and ratelimit.release frees them.';
            END IF;
            UPDATE ratelimit.holds AS l SET state = 'lapsed', rest = l.count, until = kept WHERE l.name = r.name AND l.key = r.key AND l.id = h.id;
        END LOOP;
    END LOOP;
END
$body$;

-- Writes into the history of overrides that a key was reset, or a hold of it released. Such a row has never been in force.
CREATE OR REPLACE FUNCTION ratelimit._note_reset(name text, key text, reason text, who text, effect text DEFAULT 'reset') RETURNS void
LANGUAGE plpgsql
AS $body$
DECLARE
    id bigint;
BEGIN
    LOOP
        INSERT INTO ratelimit.overrides AS o (name, key, effect, until, reason, made_by)
        VALUES (name, nullif(key, ''), effect, '-infinity', coalesce(reason, ''), coalesce(nullif(who, ''), SESSION_USER))
        ON CONFLICT DO NOTHING RETURNING o.id INTO id;
        EXIT WHEN id IS NOT NULL; -- rows that were copied here may have the next ids already
    END LOOP;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.reset(
    name text, key text DEFAULT NULL, global boolean DEFAULT false, reason text DEFAULT NULL, who text DEFAULT NULL
) RETURNS integer
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN octet_length(reason) > 4096 THEN 'the reason is longer than 4096 bytes'
        WHEN octet_length(who) > 255 THEN 'who is longer than 255 bytes'
        ELSE ratelimit._wrong_key(key, global) END;
    deleted integer;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    deleted := ratelimit._reset(ARRAY[name], ARRAY[coalesce(key, '')]);
    IF deleted = 0 THEN
        PERFORM ratelimit._check_known(name COLLATE "C");
    ELSIF pg_catalog.concat(reason, who) <> '' THEN
        PERFORM ratelimit._note_reset(name, key, reason, who);
    END IF;
    RETURN deleted;
END
$body$;

COMMENT ON FUNCTION ratelimit.reset(text, text, boolean, text, text) IS $text$
Makes a key of a rate limit full again, and forgets its debts. It deletes the key's rows, and returns how many. What is held of it lapses: it
is forgotten, too, and does not come back.

    SELECT ratelimit.reset('sendMessage', 'user-17', reason => 'their retry loop is mended')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false
  reason  why, for those who look later: at most 4096 bytes; default NULL
  who     who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (made_as)

With a reason or with who, it adds a row to ratelimit.overrides if it deletes rows: the history says who has reset the key, and when. The
effect of such a row is reset. Without both, nothing is written down: a program that resets keys as it works fills no history.

Errors:
  22023   an argument is invalid, or the key has slots that are in use, or programs publish limits and nobody knows this one
$text$;

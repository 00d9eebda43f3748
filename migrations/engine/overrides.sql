-- What people decide about limits: other numbers, a block, or no limit, for one key or for all. Programs that have
-- Programs that call ratelimit.Open follow this table. SQL by hand looks here if it is called without numbers.
--
-- Rows are added and marked as removed; a sweep deletes them a year after their end. The effects reset and release are those of ratelimit.reset and
-- ratelimit.release: they are history from the beginning, and no predicate finds it in force. A row for the key goes before one for all keys. Among those of one
-- level, a block in force goes before all others, and else the newest wins: by made_at, since ids begin anew where the rows were copied to.
CREATE TABLE ratelimit.overrides (
    id           bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text COLLATE "C" NOT NULL,
    key          text COLLATE "C" CHECK (key <> ''),
    effect       text             NOT NULL CHECK (effect IN ('numbers', 'block', 'unlimited', 'reset', 'release')),
    rate         double precision,
    capacity     double precision,
    max_reserved double precision,
    until        timestamptz,
    reason       text             NOT NULL DEFAULT '' CHECK (octet_length(reason) <= 4096),
    made_by      text             NOT NULL DEFAULT SESSION_USER CHECK (octet_length(made_by) <= 255),
    made_at      timestamptz      NOT NULL DEFAULT clock_timestamp() CHECK (isfinite(made_at)),
    added        double precision,
    added_at     timestamptz CHECK (isfinite(added_at)),
    removed_by   text CHECK (octet_length(removed_by) <= 255),
    removed_at   timestamptz CHECK (isfinite(removed_at)),
    changed_in   xid8             NOT NULL DEFAULT pg_current_xact_id(),
    made_as      text             NOT NULL DEFAULT SESSION_USER,
    removed_as   text,
    CHECK (effect NOT IN ('reset', 'release') OR coalesce(until, 'infinity') = '-infinity'),
    UNIQUE (changed_in, id)
);

-- By when they are over: what is in force for a key, however long its history is, and, for sweeps, the numbers of a limit. And the newest of
-- a limit: only a query that says COLLATE "POSIX" takes that index. For a key, the planner would sometimes prefer it, and read the whole limit.
CREATE INDEX overrides_ends ON ratelimit.overrides (name, key, (greatest(made_at, coalesce(least(until, removed_at), 'infinity'))));
CREATE INDEX overrides_numbers ON ratelimit.overrides (name, (greatest(made_at, coalesce(least(until, removed_at), 'infinity'))))
    WHERE effect = 'numbers';
CREATE INDEX overrides_newest ON ratelimit.overrides (name COLLATE "POSIX", made_at, id);

COMMENT ON TABLE ratelimit.overrides IS 'txlimit: what people decide about limits: other numbers, a block, or no limit';
COMMENT ON COLUMN ratelimit.overrides.id IS 'the number of the override';
COMMENT ON COLUMN ratelimit.overrides.name IS 'the name of the limit';
COMMENT ON COLUMN ratelimit.overrides.key IS 'the key; NULL: every key that has no override of its own, and the limit without keys';
COMMENT ON COLUMN ratelimit.overrides.effect IS 'numbers, block or unlimited; reset: the key was made full again, or release: a hold of it was ended, and nothing is in force';
COMMENT ON COLUMN ratelimit.overrides.rate IS 'tokens per period; NULL: as defined';
COMMENT ON COLUMN ratelimit.overrides.capacity IS 'the most tokens that can be saved up; NULL: as defined or, if that is the defined rate, the new rate';
COMMENT ON COLUMN ratelimit.overrides.max_reserved IS 'the most tokens that may be owed; NULL: as defined';
COMMENT ON COLUMN ratelimit.overrides.until IS 'when it ends; NULL: never';
COMMENT ON COLUMN ratelimit.overrides.reason IS 'why, for those who look later';
COMMENT ON COLUMN ratelimit.overrides.made_by IS 'who decided, as the caller says';
COMMENT ON COLUMN ratelimit.overrides.made_at IS 'when: of those in force, a block wins, and else the newest';
COMMENT ON COLUMN ratelimit.overrides.added IS 'the tokens that ratelimit.add has added; NULL: it was not called';
COMMENT ON COLUMN ratelimit.overrides.added_at IS 'when';
COMMENT ON COLUMN ratelimit.overrides.removed_by IS 'who ended it early';
COMMENT ON COLUMN ratelimit.overrides.removed_at IS 'when it was ended early; NULL: it was not';
COMMENT ON COLUMN ratelimit.overrides.changed_in IS 'the transaction that changed the row last, by which programs find what is new';
COMMENT ON COLUMN ratelimit.overrides.made_as IS 'the role that was logged in; nobody is granted to write it';
COMMENT ON COLUMN ratelimit.overrides.removed_as IS 'the role that was logged in when it was ended early';

-- Reports whether an override is not over at an instant: it was not removed, and its end has not come.
CREATE OR REPLACE FUNCTION ratelimit._lasts(until timestamptz, removed_at timestamptz, at timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN removed_at IS NULL AND (until IS NULL OR until > at);

-- Reports whether programs follow an override: they pass over a row whose effect or a number is not valid.
CREATE OR REPLACE FUNCTION ratelimit._usable(effect text, rate double precision, capacity double precision, max_reserved double precision) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN effect IN ('numbers', 'block', 'unlimited') AND coalesce(rate, '1') BETWEEN '1e-15' AND '1e15'
    AND (capacity IS NULL OR capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15')
    AND (max_reserved IS NULL OR max_reserved = '0' OR max_reserved BETWEEN '1e-15' AND '1e15');

-- Returns the overrides in force for some keys and for every key or, without keys, all of a limit; without a name, those of all limits. They
-- come in the order in which they decide: by key, those for every key last; of each, blocks first, and then the newest. most: at most so
-- many of single keys, the first ones, and at most so many for every key.
CREATE OR REPLACE FUNCTION ratelimit._in_force(name text, keys text[], at timestamptz, most bigint DEFAULT NULL)
RETURNS SETOF ratelimit.overrides
LANGUAGE plpgsql STABLE ROWS 10 SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    one text;
BEGIN
    IF name IS NULL THEN
        RETURN QUERY SELECT o.* FROM ratelimit.overrides AS o
         WHERE ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
         ORDER BY o.name, o.key, o.effect = 'block' DESC, o.made_at DESC, o.id DESC;
        RETURN;
    ELSIF keys IS NULL THEN
        RETURN QUERY SELECT a.* FROM ( -- along an index, however many there are
            SELECT o.* FROM ratelimit.overrides AS o
             WHERE o.name = name AND o.key IS NOT NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at AND ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
             ORDER BY o.key, greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) LIMIT most
          ) AS a ORDER BY a.key, a.effect = 'block' DESC, a.made_at DESC, a.id DESC;
    ELSE
        FOR one IN SELECT DISTINCT u.key COLLATE "C" FROM pg_catalog.unnest(keys) AS u (key) WHERE u.key IS NOT NULL ORDER BY 1 LOOP
            RETURN QUERY SELECT o.* FROM ratelimit.overrides AS o
             WHERE o.name = name AND o.key = one AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at AND ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
             ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC;
        END LOOP;
    END IF;
    RETURN QUERY SELECT o.* FROM ratelimit.overrides AS o
     WHERE o.name = name AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at AND ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
     ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC LIMIT most;
END
$body$;

-- The capacity of a definition under an override: a capacity that is the rate follows the rate.
CREATE OR REPLACE FUNCTION ratelimit._capacity(
    rate double precision, capacity double precision, new_rate double precision, new_capacity double precision
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(new_capacity, CASE WHEN capacity = rate THEN new_rate END, capacity);

-- Numbers, and what they come from: what is in force for a key or, without an override, a definition.
CREATE TYPE ratelimit._terms AS (
    effect text,       -- 'numbers', 'block', 'unlimited', or 'varies': only the program knows the numbers
    override bigint,   -- the id of the override; NULL: there is none
    until timestamptz, -- its end; NULL: it has none
    kind text, rate double precision, period interval, capacity double precision, max_reserved double precision, start timestamptz,
    shards integer, zone text, anchor timestamp,
    varies interval    -- the longest of any program
);

-- Returns the newest definition of a limit. kind is NULL if there is none.
CREATE OR REPLACE FUNCTION ratelimit._defined(name text) RETURNS ratelimit._terms
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    d ratelimit._terms;
BEGIN
    SELECT 'numbers', NULL, NULL, f.kind, f.rate, f.period, coalesce(f.capacity, CASE f.kind WHEN 'slots' THEN '0' ELSE f.rate END), f.max_reserved, CASE WHEN isfinite(f.start) THEN f.start END, f.shards, f.zone, f.anchor,
           max(f.varies) OVER (PARTITION BY f.current)
      INTO d
      FROM ratelimit.definitions AS f
     WHERE f.name = name AND (f.current OR f.alive_until > clock_timestamp()) -- an older process still uses what is not current
     ORDER BY f.current DESC, f.published_at DESC, f.program
     LIMIT 1;
    RETURN d;
END
$body$;

-- Returns a definition under an override or, if that has no id, as it is. Of a blocked key, the numbers are those of the definition.
--
-- If the limit varies, only the program knows the numbers of a key, unless an override gives rate and capacity (and there is no zone or
-- anchor). Otherwise the effect is 'varies': rate and capacity are those of the override or NULL, and zone and anchor are NULL.
CREATE OR REPLACE FUNCTION ratelimit._under(d ratelimit._terms, o ratelimit.overrides)
RETURNS ratelimit._terms
LANGUAGE plpgsql IMMUTABLE
AS $body$
BEGIN
    d.effect := coalesce(o.effect, 'numbers');
    d.override := o.id;
    d.until := CASE WHEN o.until < '10000-01-01 00:00+00' THEN o.until END; -- a row by hand may say infinity
    IF d.effect <> 'numbers' OR d.kind IS NULL THEN
        RETURN d;
    END IF;
    IF d.kind = 'unlimited' THEN
        d.effect := 'unlimited';
    ELSIF d.varies IS NOT NULL AND (o.rate IS NULL AND d.kind <> 'slots' OR o.capacity IS NULL OR d.kind = 'calendar window') THEN
        d.effect := 'varies';
        d.rate := CASE WHEN d.kind <> 'slots' THEN o.rate END;
        d.capacity := CASE WHEN d.kind <> 'slots' THEN o.capacity ELSE floor(o.capacity) END;
        d.max_reserved := coalesce(o.max_reserved, d.max_reserved);
        d.zone := NULL;
        d.anchor := NULL;
    ELSIF d.kind = 'slots' THEN
        d.capacity := coalesce(floor(o.capacity), d.capacity);
    ELSIF coalesce(o.rate, d.rate) > '0' THEN -- without a rate, other numbers say nothing of a limit that has none
        d.capacity := ratelimit._capacity(d.rate, d.capacity, o.rate, o.capacity);
        d.rate := coalesce(o.rate, d.rate);
        d.max_reserved := coalesce(o.max_reserved, d.max_reserved);
    END IF;
    RETURN d;
END
$body$;

-- Returns the terms in force for a key: the newest definition, or the one given, under the override in force or, if its id is given, under
-- another one. before: only those overrides count that are older than this one, and none if there is none of this id. standing: as if nothing were
-- blocked. A limit that no program has published is an error, unless an override needs no numbers, and so are numbers that only the program
-- knows, unless they may vary.
CREATE OR REPLACE FUNCTION ratelimit._numbers(
    name text, key text, at timestamptz, before bigint DEFAULT NULL, varying boolean DEFAULT false, under bigint DEFAULT NULL,
    standing boolean DEFAULT false, given ratelimit._terms DEFAULT NULL
) RETURNS ratelimit._terms
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    o ratelimit.overrides;
    n ratelimit._terms;
    made timestamptz := (SELECT b.made_at FROM ratelimit.overrides AS b WHERE b.id = before);
BEGIN
    IF under IS NOT NULL THEN
        SELECT f.* INTO o FROM ratelimit.overrides AS f WHERE f.id = under;
    ELSE
        SELECT f.* INTO o FROM ratelimit._in_force(name, ARRAY[key], at) AS f
         WHERE NOT (standing AND f.effect = 'block') AND (before IS NULL OR f.made_at < made OR f.made_at = made AND f.id < before) LIMIT 1;
    END IF;
    n := ratelimit._under(CASE WHEN given.kind IS NULL THEN ratelimit._defined(name) ELSE given END, o);
    IF n.effect = 'numbers' AND n.kind IS NULL THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %s: no program has published it', quote_nullable(left(name, 255))),
            HINT = pg_catalog.concat('Published are ' || ratelimit._nearest(name) || '. ', 'Pass rate and period, or have a program publish its limits (ratelimit.publish).');
    ELSIF n.effect = 'varies' AND NOT varying THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %L: the numbers of this key are the program''s', name),
            HINT = 'Pass the kind, rate, period, capacity and so on that the program uses for this key.';
    END IF;
    RETURN n;
END
$body$;

-- Lists the names of which a program's list counts or is still used, at most ten, the nearest first: those that have most pairs of letters of the name.
CREATE OR REPLACE FUNCTION ratelimit._nearest(name text) RETURNS text
LANGUAGE plpgsql STABLE
AS $body$
DECLARE
    list text;
    all_ bigint;
BEGIN
    SELECT pg_catalog.string_agg(quote_literal(n.name), ', ' ORDER BY n.place) FILTER (WHERE n.place <= '10'), count(*) INTO list, all_
      FROM (
        SELECT d.name, row_number() OVER (ORDER BY (
                SELECT 2 * count(*) FILTER (WHERE strpos(lower(d.name), p.pair) > 0) FROM (
                    SELECT lower(substr(name, i, 2)) AS pair FROM pg_catalog.generate_series(1, greatest(length(left(name, 255)) - 1, 1)) AS i
                ) AS p
            ) - length(d.name)::bigint DESC, d.name) AS place
          FROM (SELECT DISTINCT f.name FROM ratelimit.definitions AS f
                 WHERE f.current OR f.alive_until > clock_timestamp()) AS d
      ) AS n;
    RETURN list || CASE WHEN all_ > '10' THEN pg_catalog.format(' and %s others', all_ - '10') ELSE '' END;
END
$body$;

-- Refuses the name of a limit to an operator, if programs publish limits and nobody knows it.
CREATE OR REPLACE FUNCTION ratelimit._check_known(name text) RETURNS void
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off
AS $body$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = name) AND NOT EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name)
       AND NOT EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = name) AND NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.state <> 'released')
       AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.current OR d.published_at > clock_timestamp() - interval '7 days') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %s: nobody knows it: no program has published it, and it has no row and no override', quote_nullable(left(name, 255))),
            HINT = pg_catalog.concat('Published are ' || ratelimit._nearest(name) || '.');
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL; -- a role that does not see all of them
END
$body$;

-- Returns the key of an override: NULL for every key, and for a limit without keys.
CREATE OR REPLACE FUNCTION ratelimit._scope(name text, key text, global boolean, every_key boolean) RETURNS text
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text := CASE
        WHEN global IS NULL OR every_key IS NULL THEN 'global and every_key must be true or false, not NULL'
        WHEN every_key AND (global OR key IS NOT NULL) THEN 'key must be NULL, and global false, with every_key => true'
        WHEN every_key THEN NULL
        WHEN key IS NULL AND NOT global THEN 'key must be given, not NULL: every_key => true is for every key, global => true for a limit without keys'
        ELSE ratelimit._wrong_key(key, global) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    IF global THEN
        PERFORM ratelimit._check_keyless(name, '');
    END IF;
    RETURN key;
END
$body$;

-- Adds a row. It refuses what a program could not use, and the name of no limit.
CREATE OR REPLACE FUNCTION ratelimit._insert_override(
    name text, key text, effect text, rate double precision, capacity double precision, max_reserved double precision,
    until timestamptz, reason text, who text, forever boolean
) RETURNS bigint
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text;
    unknown boolean; -- programs publish limits, but none of this name
    kinds text[] := ARRAY(SELECT DISTINCT d.kind FROM ratelimit.definitions AS d WHERE d.name = name AND (d.current OR d.alive_until > clock_timestamp()));
    id bigint;
    blocked bigint;
BEGIN
    until := CASE WHEN until < '10000-01-01 00:00+00' THEN until END;
    PERFORM ratelimit._validate(name, coalesce(rate, '1'), '1 second', 'token bucket', capacity, NULL, max_reserved, 1, NULL, NULL);
    unknown := NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d
                 WHERE d.name = name AND (d.current OR d.published_at > clock_timestamp() - interval '7 days'))
             AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d
                 WHERE d.current OR d.published_at > clock_timestamp() - interval '7 days');
    wrong := CASE
        WHEN octet_length(reason) > 4096 THEN 'the reason is longer than 4096 bytes'
        WHEN octet_length(who) > 255 THEN 'who is longer than 255 bytes'
        WHEN until <= clock_timestamp() THEN pg_catalog.format('until must be in the future, not %s', until)
        WHEN effect = 'numbers' AND coalesce(rate, capacity, max_reserved) IS NULL THEN 'rate, capacity or max_reserved must be given, not NULL'
        WHEN effect = 'numbers' AND pg_catalog.cardinality(kinds) = 1 AND 'unlimited' = ANY (kinds) THEN 'it is defined as unlimited: numbers change nothing of it, but ratelimit.block does'
        WHEN effect = 'numbers' AND 'slots' = ANY (kinds) THEN
            CASE WHEN coalesce(rate, max_reserved) IS NOT NULL THEN 'rate and max_reserved must be NULL for slots'
                 WHEN (capacity <= '1e9' AND capacity = trunc(capacity)) IS NOT TRUE THEN
                     pg_catalog.format('capacity of slots must be a whole number between 0 and 1e9, not %s', capacity) END
        WHEN forever IS NULL THEN 'forever must be true or false, not NULL'
        WHEN forever AND until IS NOT NULL THEN 'until and forever => true exclude each other'
        WHEN NOT forever AND until IS NULL THEN 'until must be an instant before the year 10000; without an end, say forever => true'
        WHEN unknown THEN pg_catalog.concat('no program has published a limit of this name', ', but ' || ratelimit._nearest(name))
    END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;
    LOOP
        INSERT INTO ratelimit.overrides AS o (name, key, effect, rate, capacity, max_reserved, until, reason, made_by)
        VALUES (name, key, effect, rate, capacity, max_reserved, until, coalesce(reason, ''), coalesce(nullif(who, ''), SESSION_USER))
        ON CONFLICT DO NOTHING RETURNING o.id INTO id;
        EXIT WHEN id IS NOT NULL; -- rows that were copied here may have the next ids already
    END LOOP;
    PERFORM pg_notify('ratelimit.overrides', '');
    blocked := (SELECT f.id FROM ratelimit._in_force(name, ARRAY[key], clock_timestamp()) AS f
         WHERE f.key IS NOT DISTINCT FROM key AND f.effect = 'block' AND effect <> 'block' LIMIT 1);
    IF blocked IS NOT NULL THEN
        RAISE NOTICE USING MESSAGE = pg_catalog.format('rate limit %L: block %s stays in force, and denies all the same: see ratelimit.unblock', name, blocked);
    END IF;
    IF effect = 'numbers' AND key IS NULL AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d
            WHERE d.name = name AND (d.current OR d.alive_until > clock_timestamp()) AND d.varies IS NOT NULL) THEN
        RAISE NOTICE USING MESSAGE = pg_catalog.format('rate limit %L: keys with numbers of their own get the numbers of this override, too', name);
    END IF;
    RETURN id;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.override(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, capacity double precision DEFAULT NULL, max_reserved double precision DEFAULT NULL,
    until timestamptz DEFAULT NULL, reason text DEFAULT NULL, who text DEFAULT NULL, forever boolean DEFAULT false,
    global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS bigint
LANGUAGE sql
RETURN ratelimit._insert_override(name COLLATE "C", ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key), 'numbers', rate, capacity, max_reserved, until, reason, who, forever);

COMMENT ON FUNCTION ratelimit.override(text, text, double precision, double precision, double precision, timestamptz, text, text, boolean, boolean, boolean) IS $text$
Gives a rate limit other numbers, for one key or for all, until an instant or for good. Programs that the Go library opens follow within two
seconds of the commit.

    SELECT ratelimit.override('signUps', 'acme', rate => 500, until => now() + interval '2 hours', reason => 'their conference')

Arguments:
  name          the name of the limit
  key           the key as it is stored; NULL or empty is an error, unless global or every_key is true
  rate          tokens per period; default NULL: as defined. ratelimit.block is for a rate of 0
  capacity      the most tokens that can be saved up; default NULL: as defined or, if that is the defined rate, the new rate. Of slots,
                how many there are: they have no other number
  max_reserved  the most tokens that may be owed with reserve; default NULL: as defined
  until         when it ends; required, unless forever is true
  reason        why, for those who look later: at most 4096 bytes; default NULL: it is not said
  who           who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (made_as)
  forever       true: it has no end, and until must be NULL. Default false
  global        true: the limit has no keys, and key must be NULL. Default false. It is an error if the limit has rows, and all have keys: a
                net for a forgotten key, and no promise
  every_key     true: it is for every key that has no override of its own, and key must be NULL. Default false

It returns the id of its row in ratelimit.overrides. New numbers add no tokens to what a key has: see ratelimit.add. The newest
override wins, but a block in force stays (a notice says so): see ratelimit.unblock. ratelimit.restore ends it. Keys to which the program gives numbers of their own have those of the override instead.

Errors:
  22023         an argument is invalid, or programs publish their limits and none has this name
$text$;

CREATE OR REPLACE FUNCTION ratelimit.block(
    name text, key text DEFAULT NULL, until timestamptz DEFAULT NULL, reason text DEFAULT NULL, who text DEFAULT NULL, forever boolean DEFAULT false,
    global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS bigint
LANGUAGE sql
RETURN ratelimit._insert_override(name COLLATE "C", ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key), 'block', NULL, NULL, NULL, until, reason, who, forever);

COMMENT ON FUNCTION ratelimit.block(text, text, timestamptz, text, text, boolean, boolean, boolean) IS $text$
Denies a key of a rate limit everything, or with every_key all of them, until an instant or for good. Refunds, resets and tokens that
were reserved before change nothing. Charges are still recorded. Arguments and result are the same as for ratelimit.override.

    SELECT ratelimit.block('logins', 'user-17', until => now() + interval '1 hour', reason => 'password guessing')

    SELECT ratelimit.block('signUps', every_key => true, until => now() + interval '1 hour', reason => 'spam wave')

A denial by a block has its end as retry_at, unless another block follows. Calls that were sent before the block was known are decided as they
were then. Other programs know of no block.
$text$;

CREATE OR REPLACE FUNCTION ratelimit.unlimited(
    name text, key text DEFAULT NULL, until timestamptz DEFAULT NULL, reason text DEFAULT NULL, who text DEFAULT NULL, forever boolean DEFAULT false,
    global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS bigint
LANGUAGE sql
RETURN ratelimit._insert_override(name COLLATE "C", ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key), 'unlimited', NULL, NULL, NULL, until, reason, who, forever);

COMMENT ON FUNCTION ratelimit.unlimited(text, text, timestamptz, text, text, boolean, boolean, boolean) IS $text$
Grants a key of a rate limit everything, or with every_key all of them, until an instant or for good. Nothing is taken meanwhile. Arguments
and result are the same as for ratelimit.override.

    SELECT ratelimit.unlimited('signUps', 'load-test', until => now() + interval '30 minutes')
$text$;

CREATE OR REPLACE FUNCTION ratelimit.restore(
    name text, key text DEFAULT NULL, effect text DEFAULT NULL, who text DEFAULT NULL, global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    removed integer;
    ids     bigint[];
    -- In variables, since Citus takes nothing in a write that is not immutable.
    at   timestamptz := clock_timestamp();
    xid  xid8        := pg_current_xact_id();
    role text        := SESSION_USER;
BEGIN
    IF effect NOT IN ('numbers', 'block', 'unlimited') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('effect must be ''numbers'', ''block'', ''unlimited'' or NULL, which is all of them, not %L', effect);
    END IF;
    IF octet_length(who) > 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'who is longer than 255 bytes';
    END IF;
    key := ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key);
    PERFORM ratelimit._check_known(name COLLATE "C");
    ids := CASE WHEN key IS NULL THEN ARRAY(SELECT o.id FROM ratelimit.overrides AS o
            WHERE o.name = name COLLATE "C" AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at)
        ELSE ARRAY(SELECT o.id FROM ratelimit.overrides AS o
            WHERE o.name = name COLLATE "C" AND o.key = key COLLATE "C" AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at) END;
    UPDATE ratelimit.overrides AS o
       SET removed_at = at, removed_by = coalesce(nullif(who, ''), role), removed_as = role, changed_in = xid
     WHERE o.id = ANY (ids) AND ratelimit._lasts(o.until, o.removed_at, at) AND (effect IS NULL OR o.effect = effect);
    GET DIAGNOSTICS removed = ROW_COUNT;
    PERFORM pg_notify('ratelimit.overrides', '');
    RETURN removed;
END
$body$;

COMMENT ON FUNCTION ratelimit.restore(text, text, text, text, boolean, boolean) IS $text$
Ends the overrides in force for a key of a rate limit, or with every_key those for all keys, and returns how many.

    SELECT ratelimit.restore('signUps', 'acme')

Arguments:
  effect  'numbers', 'block' or 'unlimited': only those; default NULL: all of them
  who     who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (removed_as)

Key, global and every_key are as for ratelimit.override.

Errors:
  22023   an argument is invalid, or programs publish limits, and none has this name, nor has it a row or an override
$text$;

CREATE OR REPLACE FUNCTION ratelimit.unblock(
    name text, key text DEFAULT NULL, who text DEFAULT NULL, global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS integer
LANGUAGE sql
RETURN ratelimit.restore(name COLLATE "C", key COLLATE "C", 'block', who, global, every_key);

COMMENT ON FUNCTION ratelimit.unblock(text, text, text, boolean, boolean) IS $text$
Ends the blocks of a key of a rate limit, or with every_key the block of all keys, and returns how many. Other overrides stay.

    SELECT ratelimit.unblock('logins', 'user-17')
$text$;

CREATE OR REPLACE FUNCTION ratelimit.add(id bigint, capacity double precision DEFAULT NULL) RETURNS double precision
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    o ratelimit.overrides;
    was record;
    older record;           -- numbers in force, from the newest on
    fills interval;         -- within this time, the limit fills up; NULL: not known
    most double precision;  -- the largest capacity that has counted within that time
    known boolean;          -- it is
    published boolean;
    more double precision;
    at timestamptz;         -- of the adding
    spent double precision; -- what ended overrides have added, as far as it may not have been refilled since
    paused timestamptz;     -- the key is refilled from then on
    wrong text;
    timeout double precision; -- of a statement, in seconds; 0: none
BEGIN
    SELECT f.* INTO o FROM ratelimit.overrides AS f WHERE f.id = id FOR UPDATE;
    IF o.added IS NOT NULL THEN
        RETURN o.added;
    END IF;
    wrong := CASE
        WHEN o.id IS NULL THEN 'there is no override of this id'
        WHEN o.effect <> 'numbers' THEN pg_catalog.format('it has no numbers, but the effect %L', o.effect)
        WHEN o.removed_at IS NOT NULL THEN pg_catalog.format('it was removed at %s', o.removed_at)
        WHEN o.until <= clock_timestamp() THEN pg_catalog.format('it ended at %s', o.until)
    END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('id must be of an override in force that changes numbers, not %s: %s', coalesce(id::text, 'NULL'), wrong);
    END IF;
    IF o.changed_in = pg_current_xact_id() THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('override %s is not committed yet: a program that does not know it would cut the tokens again', id);
    END IF;
    timeout := extract(epoch FROM current_setting('statement_timeout')::interval)::double precision;
    IF timeout > '0' AND timeout < '2.1' THEN -- a statement that is cancelled does not say why
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = pg_catalog.format('override %s: nothing was added: the call waits for 2 seconds, until programs know of the override, and statement_timeout is %s', id, current_setting('statement_timeout')),
            HINT = 'Call it after SET LOCAL statement_timeout = ''10s'', in one transaction.';
    END IF;
    PERFORM pg_sleep('2'); -- until programs know: made_at says nothing about the commit
    -- What was in force before: an override, or what is published. Where only the program knows the numbers, an override has to give its capacity.
    SELECT CASE WHEN f.effect IN ('block', 'unlimited') THEN f.effect ELSE 'varies' END AS effect, f.capacity, f.id AS override
      INTO was FROM (VALUES (1)) AS one LEFT JOIN LATERAL (
        SELECT f.* FROM ratelimit._in_force(o.name, ARRAY[o.key], clock_timestamp()) AS f
         WHERE f.made_at < o.made_at OR f.made_at = o.made_at AND f.id < o.id LIMIT 1) AS f ON true;
    published := EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = o.name AND (d.current OR d.alive_until > clock_timestamp()));
    IF capacity IS NULL OR published THEN
        SELECT f.effect, f.capacity, f.override INTO was FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), o.id, varying => true) AS f;
        SELECT f.capacity INTO o.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), varying => true, under => o.id) AS f;
        -- A limit that is empty fills up within this time, by the numbers as defined and by those of the override.
        SELECT make_interval(secs => max(least('3e9', CASE WHEN f.varies IS NOT NULL THEN date_part('epoch', f.varies) ELSE ceil(f.capacity / nullif(f.rate, '0'))
                   * date_part('epoch', CASE f.kind WHEN 'calendar window' THEN ratelimit._longest(f.period) ELSE f.period END) END)))
          INTO fills
          FROM (SELECT * FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), varying => true, under => o.id)
                UNION ALL SELECT * FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), '0', varying => true)) AS f;
    END IF;
    was.capacity := CASE WHEN was.effect IN ('numbers', 'varies') THEN was.capacity END;
    -- A lower override says nothing of what the key has used before it. The oldest numbers, without overrides, are those of id 0.
    most := capacity;
    known := capacity IS NOT NULL;
    FOR older IN
        SELECT b.made_at, b.id, b.capacity, b.added, b.capacity IS NULL AS as_defined FROM ratelimit.overrides AS b
         WHERE b.name = o.name AND (b.key = o.key OR b.key IS NULL) AND b.effect = 'numbers' AND b.removed_at IS NULL
           AND (b.until IS NULL OR b.until > clock_timestamp()) AND (b.made_at, b.id) < (o.made_at, o.id)
        UNION ALL SELECT '-infinity', 0, NULL, NULL, true WHERE capacity IS NULL
         ORDER BY 1 DESC, 2 DESC
    LOOP
        IF published THEN
            older.capacity := (SELECT n.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), CASE WHEN older.id = 0 THEN 0 END,
                varying => true, under => nullif(older.id, 0)) AS n);
        END IF;
        IF older.as_defined THEN -- lists that were replaced lately are there for 7 days
            older.capacity := greatest(older.capacity, (SELECT max(d.capacity) FROM ratelimit.definitions AS d
                 WHERE d.name = o.name AND d.kind <> 'slots' AND d.varies IS NULL AND (d.current OR d.alive_until > clock_timestamp() OR d.published_at > clock_timestamp() - fills)));
        END IF;
        most := greatest(most, older.capacity);
        IF older.id = 0 OR older.made_at <= clock_timestamp() - fills OR older.added > '0' THEN -- of which all before were less
            known := known OR older.capacity IS NOT NULL;
            EXIT;
        END IF;
    END LOOP;
    more := o.capacity - most;
    wrong := CASE
        WHEN EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = o.name AND (d.current OR d.alive_until > clock_timestamp()) AND d.kind = 'slots') THEN
            'it has slots, and nothing is added to them: another capacity counts at once'
        WHEN NOT (capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15') THEN pg_catalog.format('capacity must be 0 or between 1e-15 and 1e15, not %s', capacity)
        WHEN was.override IS NOT NULL AND capacity < was.capacity THEN
            pg_catalog.format('capacity must be NULL or at least %s, which holds under override %s, not %s', was.capacity, was.override, capacity)
        WHEN o.capacity IS NULL THEN pg_catalog.format('override %s gives no capacity, and only the program knows that of this key', id)
        WHEN capacity IS NULL AND was.effect NOT IN ('numbers', 'varies') THEN
            pg_catalog.format('capacity must be given, not NULL: the key had the effect %L before override %s', was.effect, id)
        WHEN NOT known THEN 'capacity must be given, not NULL: only the program knows that of this key'
        WHEN o.until <= clock_timestamp() THEN pg_catalog.format('id must be of an override in force, not %s: it ended at %s', id, o.until)
    END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', o.name, wrong);
    END IF;
    -- What an ended override has added is gone, and would be granted once more. Where nobody knows when the limit fills up, it always counts.
    SELECT coalesce(sum(f.added), '0') INTO spent FROM ratelimit.overrides AS f
     WHERE f.name = o.name AND (f.key = o.key OR f.key IS NULL AND o.key IS NULL) AND f.added > '0' AND f.id <> o.id
       AND (f.removed_at IS NOT NULL OR f.until <= clock_timestamp()) AND (fills IS NULL OR f.added_at > clock_timestamp() - fills);
    more := greatest(more - spent, '0');
    PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = o.name AND r.key = coalesce(o.key, '') ORDER BY r.shard FOR UPDATE;
    SELECT max(r.ts) INTO paused FROM ratelimit.limits AS r WHERE r.name = o.name AND r.key = coalesce(o.key, '');
    IF paused > clock_timestamp() + interval '1 second' THEN -- not a clock that has stepped back by less
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = pg_catalog.format('override %s: nothing was added: the key is paused until %s', id, paused),
            HINT = 'Call it again once the pause is over, or after ratelimit.resume.';
    END IF;
    WITH u AS (
        UPDATE ratelimit.limits AS r SET value = r.value + more / r.shards::double precision
         WHERE r.name = o.name AND r.key = coalesce(o.key, '') RETURNING more / r.shards::double precision AS added
    )
    SELECT coalesce(sum(u.added), 0) INTO more FROM u;
    at := clock_timestamp();
    UPDATE ratelimit.overrides AS f SET added = more, added_at = at WHERE f.id = id;
    RETURN more;
END
$body$;

COMMENT ON FUNCTION ratelimit.add(bigint, double precision) IS $text$
Adds to what the key of an override has the difference between its capacity and the largest that the key had within the time in which an empty
limit fills up, once for each override, and returns it.

    SELECT ratelimit.override('signUps', 'acme', rate => 500, forever => true); -- returns 17. Once that is committed:
    SELECT ratelimit.add(17);

A program that does not yet know of the override cuts what it finds to the old capacity. So the function waits for two seconds before it
adds: an override that is committed is known by then. What an override that has ended added is subtracted, until the limit would have filled
up since: so override, add and restore, again and again, grant at most the larger capacity and the refill. A key without a row
is full: nothing is added to it. Nor add to a key that is first used under the override, or whose window has turned or which was reset since:
it was full by the larger capacity, and the difference comes on top, once. For an override of all keys, only the row of a limit without keys gets something.

Arguments:
  id        the id of the override
  capacity  the largest capacity before; default NULL: that of the overrides in force before, and as published, also before a deploy within
            7 days. A smaller one than that of the override before is refused. Of a limit whose keys have numbers of their own, it has to be given, unless an override
            before has counted for so long, or has added tokens; and the override itself has to give a capacity

Errors:
  55000  statement_timeout ends the call before it has waited for two seconds, or the key is paused (ratelimit.pause)
  22023  there is no such override in force, it is of this transaction or of slots, or the capacity before it is not known, or is another
$text$;

-- Returns a page of the overrides that a program does not know yet, in the order of their ids, with at most 10000 of them. since: the snapshot of
-- the poll before; NULL: all that are in force, and the numbers that were until a day ago. mades: made_at, in microseconds since 1970. after: the last id of the page before. The Go library asks every
-- second. A transaction that commits late is in no snapshot before, so its rows are not missed, whatever their ids. With several servers, it is
-- missed after 5 minutes, until the next poll that reads all.
CREATE OR REPLACE FUNCTION ratelimit._overrides(
    since pg_snapshot, after bigint,
    OUT ids bigint[], OUT names text[], OUT keys text[], OUT effects text[], OUT rates double precision[], OUT capacities double precision[],
    OUT max_reserveds double precision[], OUT untils bigint[], OUT mades bigint[], OUT more boolean, OUT snapshot text, OUT at timestamptz, OUT server timestamptz
)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    present pg_snapshot := pg_current_snapshot(); -- of the server that is asked, wherever the table is
BEGIN
    at := clock_timestamp();
    server := pg_postmaster_start_time(); -- of another server, or of this one after a restart, snapshots say nothing about those before
    -- '' is every key, -1 is as defined, and an end is in microseconds since 1970, or the largest number.
    SELECT pg_catalog.array_agg(p.id ORDER BY p.id), pg_catalog.array_agg(p.name ORDER BY p.id), pg_catalog.array_agg(coalesce(p.key, '') ORDER BY p.id),
           pg_catalog.array_agg(p.effect ORDER BY p.id), pg_catalog.array_agg(coalesce(p.rate, '-1') ORDER BY p.id),
           pg_catalog.array_agg(coalesce(p.capacity, '-1') ORDER BY p.id), pg_catalog.array_agg(coalesce(p.max_reserved, '-1') ORDER BY p.id),
           pg_catalog.array_agg(CASE WHEN p.ends = '-infinity' THEN 0 WHEN p.ends < '10000-01-01 00:00+00' THEN (extract(epoch FROM p.ends) * '1000000')::bigint
               ELSE 9223372036854775807 END ORDER BY p.id),
           pg_catalog.array_agg((extract(epoch FROM least(greatest(p.made_at, '0001-01-01 00:00+00'), '9999-12-31 00:00+00')) * '1000000')::bigint ORDER BY p.id),
           count(*) = '10000', present::text
      INTO ids, names, keys, effects, rates, capacities, max_reserveds, untils, mades, more, snapshot
      FROM (
        (SELECT o.*, least(o.until, o.removed_at) AS ends FROM ratelimit.overrides AS o
          WHERE since IS NULL AND o.id > after
            AND coalesce(least(o.until, o.removed_at), 'infinity') > CASE WHEN o.effect = 'numbers' THEN at - interval '1 day' ELSE at END
          ORDER BY o.id LIMIT 10000)
        UNION ALL
        -- OFFSET 0 makes the planner use the index of changed_in, whatever the statistics say. Rows of another cluster's future come with
        -- all others only. A standby does not know which transactions are running.
        (SELECT c.* FROM (
            SELECT o.*, least(o.until, o.removed_at) AS ends FROM ratelimit.overrides AS o
             WHERE o.changed_in >= pg_snapshot_xmin(since) AND o.changed_in < pg_snapshot_xmax(present)
               AND ratelimit._one_server() AND (pg_is_in_recovery() OR NOT pg_visible_in_snapshot(o.changed_in, since))
            OFFSET 0
          ) AS c
          WHERE c.id > after AND c.effect NOT IN ('reset', 'release')
          ORDER BY c.id LIMIT 10000)
        UNION ALL
        -- Several servers number their transactions each by itself: then what was changed lately, by their clocks.
        (SELECT o.*, least(o.until, o.removed_at) AS ends FROM ratelimit.overrides AS o
          WHERE since IS NOT NULL AND NOT ratelimit._one_server() AND o.id > after AND o.effect NOT IN ('reset', 'release')
            AND greatest(o.made_at, o.removed_at) > at - interval '5 minutes'
          ORDER BY o.id LIMIT 10000)
      ) AS p;
END
$body$;

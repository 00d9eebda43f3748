-- The names that rows have, in order, at most so many of them; NULL: all. Each is one look-up in the primary key. A recursive query would do
-- the same, but Citus has none over a table that is distributed by key.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_stored_names(most integer) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    last text := '';
    n    integer := 0;
BEGIN
    LOOP
        last := (SELECT r.name FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name > last ORDER BY r.name LIMIT 1);
        EXIT WHEN last IS NULL;
        RETURN NEXT last;
        n := n + 1;
        EXIT WHEN n >= most;
    END LOOP;
END
$body$;

-- The keys of a limit that have rows, from `first` on and below `below` (NULL: to the last), in order, at most so many of them. Each is one
-- look-up, however many shards it has.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_stored_keys(name text, first text, below text, most integer) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    last text := (SELECT r.key FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = name AND r.key >= first ORDER BY r.key LIMIT 1);
    n    integer := 0;
BEGIN
    WHILE n < most AND (last COLLATE "C" < below OR below IS NULL AND last IS NOT NULL) LOOP
        RETURN NEXT last;
        n := n + 1;
        last := (SELECT r.key FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = name AND r.key > last ORDER BY r.key LIMIT 1);
    END LOOP;
END
$body$;

-- Those of some keys that have rows.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_used_keys(name text, keys text[]) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN QUERY SELECT DISTINCT r.key FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = name AND r.key = ANY (keys);
END
$body$;

-- The keys of a limit with the given numbers, at an instant. Of what lists keys, this and the functions before it read their rows.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_keys_of(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    zone text, anchor timestamp, keys text[], at timestamptz
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    windows timestamptz[]; -- of a calendar window
BEGIN
    PERFORM /* TEMPLATE: schema */_ratelimit_validate(name, rate, period, kind, capacity, start, NULL, 1, zone, anchor);
    IF NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: now must be finite, not %s', name, at);
    END IF;
    capacity := coalesce(capacity, rate);
    IF kind = 'calendar window' THEN
        windows := /* TEMPLATE: schema */_ratelimit_windows(period, coalesce(zone, 'UTC'), coalesce(anchor, '2001-01-01'), at,
            /* TEMPLATE: schema */_ratelimit_back(rate, capacity), 100);
        period := /* TEMPLATE: schema */_ratelimit_longest(period);
    END IF;
    RETURN QUERY
        SELECT t.key, /* TEMPLATE: schema */_ratelimit_shown(t.total, rate, capacity), CASE WHEN NOT t.sound THEN 'infinity' WHEN t.total < least(capacity, 1) THEN
               nullif(/* TEMPLATE: schema */_ratelimit_when(t.value, t.ts, at, rate, period, capacity, t.grid, 1, least(capacity, 1), 0, false, windows), at) END
          FROM (
            SELECT s.*, CASE WHEN NOT s.sound THEN NULL WHEN pg_catalog.cardinality(s.value) > 1 THEN
                   /* TEMPLATE: schema */_ratelimit_total(s.value, s.ts, at, rate, period, capacity, s.grid, windows)
                   ELSE -- the same sum, which the planner inlines: there may be millions of keys
                   /* TEMPLATE: schema */_ratelimit_available(s.value[1], s.ts[1], /* TEMPLATE: schema */_ratelimit_upto(at, period, s.grid, windows),
                       rate, period, capacity, s.grid, windows)
                   END AS total
              FROM (
                SELECT r.key, CASE kind WHEN 'fixed window' THEN /* TEMPLATE: schema */_ratelimit_grid(name, r.key, period, kind, start)
                       WHEN 'calendar window' THEN windows[1] END AS grid,
                       pg_catalog.array_agg(r.value ORDER BY r.shard) AS value, pg_catalog.array_agg(r.ts ORDER BY r.shard) AS ts,
                       bool_and(isfinite(r.ts)) AS sound -- another row is of no program, and every call for its key fails
                  FROM /* TEMPLATE: schema */rate_limits AS r
                 WHERE r.name = name AND keys IS NULL
                 GROUP BY r.key
                UNION ALL
                SELECT r.key, CASE kind WHEN 'fixed window' THEN /* TEMPLATE: schema */_ratelimit_grid(name, r.key, period, kind, start)
                       WHEN 'calendar window' THEN windows[1] END AS grid,
                       pg_catalog.array_agg(r.value ORDER BY r.shard) AS value, pg_catalog.array_agg(r.ts ORDER BY r.shard) AS ts,
                       bool_and(isfinite(r.ts)) AS sound -- another row is of no program, and every call for its key fails
                  FROM /* TEMPLATE: schema */rate_limits AS r
                 WHERE r.name = name AND r.key = ANY (keys)
                 GROUP BY r.key
                OFFSET 0
              ) AS s
            OFFSET 0
          ) AS t;
END
$body$;

-- The slots of a key, if there are so many: those in use, without those whose holds have expired; those that are free, below zero if fewer are
-- granted than are in use; and, if none is free, when one is at the latest, if nobody extends. infinity: no expiry frees one.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_free_slots(
    name text, key text, capacity double precision, at timestamptz, OUT used double precision, OUT free double precision, OUT retry_at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    s record;
BEGIN
    SELECT f.* INTO s FROM /* TEMPLATE: schema */_ratelimit_slots(name, key, at) AS f;
    used := s.used - s.expired;
    free := capacity - used;
    retry_at := CASE WHEN free < '1' THEN coalesce(CASE WHEN capacity >= '1' THEN
        /* TEMPLATE: schema */_ratelimit_free_at(name, key, -s.used, 1, -capacity, at) END, 'infinity') END;
END
$body$;

-- The keys of slots, with the numbers that are in force for each, at an instant.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_keys_of_slots(name text, keys text[], at timestamptz)
RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    used text[] := ARRAY(SELECT r.key FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = name AND (keys IS NULL OR r.key = ANY (keys)));
    own  text[] := ARRAY(SELECT o.key FROM /* TEMPLATE: schema */rate_limit_overrides AS o -- keys that may have no row
         WHERE o.name = name AND o.key IS NOT NULL AND (keys IS NULL OR o.key = ANY (keys)) AND o.effect IN ('block', 'unlimited')
           AND o.removed_at IS NULL AND (o.until IS NULL OR o.until > at));
    k    record;
    n    record; -- the numbers of the key
    s    record; -- its slots
    t    timestamptz;
BEGIN
    FOR k IN SELECT u.key FROM pg_catalog.unnest(used) AS u (key) UNION SELECT u.key FROM pg_catalog.unnest(own) AS u (key) LOOP
        key := k.key;
        t := at;
        LOOP
            SELECT f.* INTO n FROM /* TEMPLATE: schema */_ratelimit_numbers(name, nullif(key, ''), t, varying => true) AS f;
            SELECT f.* INTO s FROM /* TEMPLATE: schema */_ratelimit_free_slots(name, key, CASE n.effect WHEN 'numbers' THEN n.capacity WHEN 'unlimited' THEN 'Infinity' END, t) AS f;
            IF t = at THEN
                remaining := CASE WHEN n.effect = 'block' THEN 0 ELSE s.free END;
            END IF;
            retry_at := CASE WHEN n.effect = 'block' THEN 'infinity' ELSE coalesce(s.retry_at, nullif(t, at)) END;
            EXIT WHEN retry_at IS NULL OR n.until IS NULL OR retry_at < n.until;
            t := n.until; -- then something else decides
        END LOOP;
        RETURN NEXT;
    END LOOP;
END
$body$;

-- The keys of a limit with the numbers that are in force for each, at an instant. denied: of those that an override of every key or the
-- definition denies everything, also the keys without a row.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_keys_named(name text, keys text[], at timestamptz, denied boolean)
RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    d record;              -- a limit's definition
    o record;              -- an override, and the keys that have it
    others text[];         -- the keys that have an override of their own
    used text[];           -- those of o that have a row
BEGIN
    SELECT n.* INTO d FROM /* TEMPLATE: schema */_ratelimit_numbers(name, NULL, at, '0', varying => true) AS n; -- under no override
    IF d.kind = 'slots' THEN
        RETURN QUERY SELECT f.* FROM /* TEMPLATE: schema */_ratelimit_keys_of_slots(name, keys, at) AS f;
        RETURN;
    END IF;
    others := ARRAY(
        SELECT a.key FROM /* TEMPLATE: schema */rate_limit_overrides AS a
         WHERE a.name = name AND keys IS NULL AND a.key IS NOT NULL AND a.removed_at IS NULL AND (a.until IS NULL OR a.until > at)
        UNION ALL
        SELECT s.key FROM /* TEMPLATE: schema */rate_limit_overrides AS s
         WHERE s.name = name AND s.key = ANY (keys) AND s.removed_at IS NULL AND (s.until IS NULL OR s.until > at));
    FOR o IN
        SELECT CASE WHEN x.effect <> 'numbers' THEN x.effect WHEN d.kind = 'unlimited' THEN 'unlimited'
               WHEN d.effect = 'varies' AND (x.rate IS NULL OR x.capacity IS NULL OR d.kind = 'calendar window') THEN 'varies' ELSE 'numbers' END AS effect,
               nullif(x.until, 'infinity') AS until,
               coalesce(x.rate, d.rate) AS rate, /* TEMPLATE: schema */_ratelimit_capacity(d.rate, d.capacity, x.rate, x.capacity) AS capacity,
               pg_catalog.array_agg(x.key) AS own, x.key IS NULL AS rest
          FROM (
            SELECT DISTINCT ON (x.key) x.*
              FROM ( -- each part by its index: there may be a million
                SELECT a.* FROM /* TEMPLATE: schema */rate_limit_overrides AS a WHERE a.name = name AND keys IS NULL
                UNION ALL
                SELECT s.* FROM /* TEMPLATE: schema */rate_limit_overrides AS s WHERE s.name = name AND s.key = ANY (keys)
                UNION ALL
                SELECT e.* FROM /* TEMPLATE: schema */rate_limit_overrides AS e WHERE e.name = name AND e.key IS NULL AND keys IS NOT NULL
              ) AS x
             WHERE x.removed_at IS NULL AND (x.until IS NULL OR x.until > at)
             ORDER BY x.key, x.effect = 'block' DESC, x.made_at DESC, x.id DESC
          ) AS x
         GROUP BY 1, 2, 3, 4, x.key IS NULL
        UNION ALL
        SELECT d.effect, NULL, d.rate, d.capacity, '{NULL}', true
         WHERE NOT EXISTS (SELECT 1 FROM /* TEMPLATE: schema */rate_limit_overrides AS x
                 WHERE x.name = name AND x.key IS NULL AND x.removed_at IS NULL AND (x.until IS NULL OR x.until > at))
    LOOP
        IF denied AND o.rest AND (o.effect = 'block' OR o.effect = 'numbers' AND o.rate = '0') THEN
            o.own := ARRAY(SELECT k.key FROM pg_catalog.unnest(keys) AS k (key) EXCEPT SELECT x.key FROM pg_catalog.unnest(others) AS x (key));
            o.rest := false;
        END IF;
        used := NULL;
        IF NOT o.rest AND o.effect = 'varies' THEN
            used := ARRAY(SELECT f.key FROM /* TEMPLATE: schema */_ratelimit_used_keys(name, o.own) AS f (key));
        END IF;
        -- One of the parts runs. Once the override has ended, something else decides: the same question, at that instant. No table is
        -- read beside a function that reads one: Citus would run it where it runs the statement, and refuses.
        RETURN QUERY
            WITH k AS MATERIALIZED (
                -- the keys that have none of their own
                SELECT k.key, CASE WHEN o.effect = 'varies' THEN NULL WHEN o.effect = 'unlimited' THEN 'Infinity'
                           WHEN o.effect = 'block' OR o.rate = '0' THEN '0' ELSE k.remaining END AS remaining,
                       CASE WHEN o.effect = 'block' OR o.effect = 'numbers' AND o.rate = '0' THEN coalesce(o.until, 'infinity') WHEN o.effect = 'numbers' THEN k.retry_at END AS retry_at
                  FROM /* TEMPLATE: schema */_ratelimit_keys_of(name, CASE WHEN o.rate > '0' THEN o.rate ELSE '1' END, coalesce(d.period, '1 second'),
                       CASE WHEN d.kind = 'unlimited' THEN 'token bucket' ELSE d.kind END, o.capacity, d.start, d.zone, d.anchor, keys, at) AS k
                 WHERE o.rest AND NOT EXISTS (SELECT 1 FROM pg_catalog.unnest(others) AS x (key) WHERE x.key = k.key)
                UNION ALL
                SELECT k.* FROM /* TEMPLATE: schema */_ratelimit_keys_of(name, o.rate, d.period, d.kind, o.capacity, d.start, d.zone, d.anchor, o.own, at) AS k
                 WHERE NOT o.rest AND o.effect = 'numbers' AND o.rate > '0'
                UNION ALL
                SELECT u.key, NULL::double precision, NULL::timestamptz FROM pg_catalog.unnest(used) AS u (key)
                UNION ALL
                SELECT u.key, CASE o.effect WHEN 'unlimited' THEN 'Infinity' ELSE '0'::double precision END,
                       CASE WHEN o.effect <> 'unlimited' THEN coalesce(o.until, 'infinity') END
                  FROM pg_catalog.unnest(o.own) AS u (key)
                 WHERE NOT o.rest AND o.effect <> 'varies' AND (o.effect <> 'numbers' OR o.rate = '0')
            ), late AS (
                SELECT coalesce(pg_catalog.array_agg(k.key), '{}') AS keys FROM k WHERE k.retry_at >= o.until AND o.until < '10000-01-01 00:00+00'
            )
            SELECT k.key, k.remaining, CASE WHEN k.key = ANY (late.keys) THEN coalesce(l.retry_at, o.until) ELSE k.retry_at END
              FROM k CROSS JOIN late
              LEFT JOIN LATERAL (SELECT f.* FROM /* TEMPLATE: schema */_ratelimit_keys_named(name, late.keys, o.until, true) AS f
                  WHERE pg_catalog.cardinality(late.keys) > 0 OFFSET 0) AS l ON l.key = k.key;
    END LOOP;
END
$body$;

-- The same as ratelimit_keys, at an instant that tests and the tool choose. The planner inlines both, and one of the parts runs.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_keys(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    zone text, anchor timestamp, keys text[], now timestamptz
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE sql STABLE
AS $body$
    SELECT k.key, k.remaining, k.retry_at FROM /* TEMPLATE: schema */_ratelimit_keys_named(name, keys, coalesce(now, clock_timestamp()), false) AS k
     WHERE pg_catalog.num_nonnulls(rate, capacity, period, start, zone, anchor) = 0 AND kind = 'token bucket'
    UNION ALL
    SELECT k.key, k.remaining, k.retry_at
      FROM /* TEMPLATE: schema */_ratelimit_keys_of(name, rate, period, kind, capacity, start, zone, anchor, keys, coalesce(now, clock_timestamp())) AS k
     WHERE (pg_catalog.num_nonnulls(rate, capacity, period, start, zone, anchor) = 0 AND kind = 'token bucket') IS NOT TRUE
$body$;

-- The planner inlines it: there may be millions of keys.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_keys(
    name text, rate double precision DEFAULT NULL, period interval DEFAULT NULL, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL, keys text[] DEFAULT NULL
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE sql STABLE
AS $body$
    SELECT k.key, k.remaining, k.retry_at
      FROM /* TEMPLATE: schema */_ratelimit_keys(name COLLATE "C", rate, period, kind, capacity, start, zone, anchor, keys, NULL) AS k
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_keys(text, double precision, interval, text, double precision, timestamptz, text, timestamp, text[]) IS $text$
The keys of a rate limit that have been used, and their tokens now. It writes and locks nothing. The limited keys:

    SELECT * FROM ratelimit_keys('sendMessage', rate => 10, period => '1 minute') WHERE retry_at IS NOT NULL ORDER BY remaining

Result, one row for each key:
  key        the key as it is stored; '' for a limit without keys
  remaining  the balance in tokens; below zero if tokens are owed. Of slots, how many are free; below zero if fewer are granted than
             are in use. Holds that have expired are free
  retry_at   the instant at which there will be one token, or at which a limit with a capacity below 1 will be full. NULL: there
             are enough tokens now. Of slots, when one is free at the latest; infinity: no expiry frees one

The arguments and their defaults are the same as for ratelimit, and
  keys       only these keys; default NULL: all that have a row

Without any numbers, they are those that a program has published, each key's under the override in force for it:

    SELECT * FROM ratelimit_keys('sendMessage') WHERE retry_at IS NOT NULL ORDER BY remaining

If an override ends before, retry_at is by what follows. A blocked key has retry_at infinity if the block has no end, and an unlimited one has remaining Infinity. Numbers other than the program's
give another answer. If the program gives some keys numbers of their own, remaining and retry_at are NULL without numbers: they are not
known. remaining NULL with retry_at infinity is a key whose row no program has written: its ts is infinite. Every call for it fails until
ratelimit_reset. An invalid argument is an error, SQLSTATE 22023.
$text$;

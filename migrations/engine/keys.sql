-- The names that rows have, in order, at most so many of them; NULL: all. Each is one look-up in the primary key. A recursive query would do
-- the same, but Citus has none over a table that is distributed by key.
CREATE OR REPLACE FUNCTION ratelimit._stored_names(most integer) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    last text := '';
    n    integer := 0;
BEGIN
    LOOP
        last := (SELECT r.name FROM ratelimit.limits AS r WHERE r.name > last ORDER BY r.name LIMIT 1);
        EXIT WHEN last IS NULL;
        RETURN NEXT last;
        n := n + 1;
        EXIT WHEN n >= most;
    END LOOP;
END
$body$;

-- The keys of a limit that have rows, from `first` on and below `below` (NULL: to the last), in order, at most so many of them. Each is one
-- look-up, however many shards it has.
CREATE OR REPLACE FUNCTION ratelimit._stored_keys(name text, first text, below text, most integer) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    last text := (SELECT r.key FROM ratelimit.limits AS r WHERE r.name = name AND r.key >= first ORDER BY r.key LIMIT 1);
    n    integer := 0;
BEGIN
    WHILE n < most AND (last COLLATE "C" < below OR below IS NULL AND last IS NOT NULL) LOOP
        RETURN NEXT last;
        n := n + 1;
        last := (SELECT r.key FROM ratelimit.limits AS r WHERE r.name = name AND r.key > last ORDER BY r.key LIMIT 1);
    END LOOP;
END
$body$;

-- The rows of a limit, by key: of some keys or, without them, of all.
CREATE OR REPLACE FUNCTION ratelimit._rows(name text, keys text[]) RETURNS TABLE (key text, value double precision[], ts timestamptz[], lapses timestamptz)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    one text;
BEGIN
    IF keys IS NULL THEN
        RETURN QUERY SELECT r.key, pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), min(r.lapses)
          FROM ratelimit.limits AS r WHERE r.name = name GROUP BY r.key;
        RETURN;
    END IF;
    FOR one IN SELECT DISTINCT u.key FROM pg_catalog.unnest(keys) AS u (key) LOOP -- for all at once, the planner may read the limit
        RETURN QUERY SELECT r.key, pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), min(r.lapses)
          FROM ratelimit.limits AS r WHERE r.name = name AND r.key = one GROUP BY r.key;
    END LOOP;
END
$body$;

-- The slots of a key, if there are so many: those in use, without those whose holds have expired; those that are free, below zero if fewer are
-- granted than are in use; and, if fewer than count are free, when so many are at the latest, if nobody extends. infinity: no expiry frees them.
CREATE OR REPLACE FUNCTION ratelimit._free_slots(
    name text, key text, capacity double precision, at timestamptz, count double precision, OUT used double precision, OUT free double precision, OUT retry_at timestamptz
)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    value double precision[];
BEGIN
    SELECT l.value INTO value FROM ratelimit._lapsed(name, key, at, 0, '1 second', 0, NULL, NULL) AS l;
    used := '0' - least(coalesce(value[1], '0'), '0');
    free := capacity - used;
    retry_at := CASE WHEN free < count THEN coalesce(CASE WHEN capacity >= count THEN
        ratelimit._free_at(name, key, count, -capacity, at) END, 'infinity') END;
END
$body$;

-- What a key has at an instant, by the terms in force for it and its rows (none: it is full).
--   used       slots in use, without those whose holds have expired; NULL: it has tokens
--   remaining  tokens, or free slots; Infinity: unlimited. NULL: not known, or a row is of no program, since its ts is infinite
--   retry_at   what a denied call for one token says, or for all where the capacity is less: of a block, when no block denies any more.
--              infinity: never, or not known. NULL: it would be granted
--   not_before if that is not known: retry_at is not earlier, since an override ends then, and only the program knows the numbers that follow
--   paused_until  nothing is refilled before it, as ratelimit.pause says; NULL: that is not so, or for less than a second more, in which a row may
--              be used between two looks at the clock. Only for a token bucket that has a rate, also beside a block
--   numbers    the terms beside a block
-- whole: more about one key. Then a block changes no numbers:
--   owed_until nothing is owed from then on; NULL: nothing is, or that is never or not known
--   full_at    the same of a limit that is full
--   known_until the end of the override after which only the program knows the numbers; NULL: there is none. owed_until and full_at are
--              earlier, or not known
-- windows: of a calendar, by these terms. Both this and beside, the terms beside a block, are NULL if the caller has none.
CREATE OR REPLACE FUNCTION ratelimit._state(
    name text, key text, n ratelimit._terms, value double precision[], ts timestamptz[], lapses timestamptz, at timestamptz,
    given ratelimit._terms, windows timestamptz[], beside ratelimit._terms, whole boolean,
    OUT used double precision, OUT remaining double precision, OUT retry_at timestamptz, OUT paused_until timestamptz,
    OUT numbers ratelimit._terms, OUT owed_until timestamptz, OUT full_at timestamptz,
    OUT not_before timestamptz, OUT known_until timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    q      ratelimit._request := ratelimit._ask(name, key, n, at, given, windows);
    s      ratelimit._request := q; -- what stands beside a block
    broken boolean := 'infinity' = ANY (ts) OR '-infinity' = ANY (ts);
    total  double precision;
    latest timestamptz := (SELECT max(u.t) FROM pg_catalog.unnest(ts) AS u (t));
    ahead  boolean := latest > at + interval '1 second' AND NOT broken;
BEGIN
    value := coalesce(value, '{}');
    ts := coalesce(ts, '{}');
    numbers := n;
    IF n.effect = 'block' THEN
        numbers := coalesce(beside, ratelimit._numbers(name, nullif(key, ''), at, varying => true, standing => true, given => given));
        IF whole THEN
            s := ratelimit._ask(name, key, numbers, at, given);
        END IF;
    END IF;
    IF n.kind = 'slots' THEN
        SELECT f.used, f.free INTO used, remaining FROM ratelimit._free_slots(name, key, -s.floor, at, 1) AS f;
    ELSIF s.effect = 'numbers' AND NOT coalesce(broken, false) THEN
        IF lapses <= at THEN
            SELECT l.value, l.ts INTO value, ts FROM ratelimit._lapsed(name, key, at, s.rate, s.period, s.capacity, s.start, s.windows) AS l;
        END IF;
        total := ratelimit._total(value, ts, at, s.rate, s.period, s.capacity, s.start, s.windows);
        remaining := ratelimit._shown(total, s.rate, s.capacity);
    END IF;
    remaining := CASE WHEN s.effect = 'unlimited' THEN 'Infinity'
        WHEN n.effect = 'block' AND NOT whole OR s.effect = 'block' AND n.kind <> 'slots' THEN 0 -- of no slots, some may be in use
        ELSE remaining END;
    retry_at := CASE
        WHEN q.effect IN ('unlimited', 'varies') OR q.effect = 'numbers' AND total >= q.count OR q.effect = 'slots' AND remaining >= '1' THEN NULL
        WHEN q.effect = 'numbers' AND broken THEN 'infinity'
        ELSE nullif(coalesce(ratelimit._retry_at('balance', q, CASE WHEN q.effect <> 'block' THEN value END, ts, at), 'infinity'), at) END;
    IF n.varies IS NOT NULL AND n.effect <> 'block' AND retry_at < 'infinity' THEN
        not_before := ratelimit._known_until(q, standing => false);
        IF retry_at >= not_before THEN
            retry_at := 'infinity';
        ELSE
            not_before := NULL;
        END IF;
    END IF;
    IF ahead AND numbers.kind = 'token bucket' AND (numbers.effect = 'numbers' AND numbers.rate > '0' OR numbers.effect = 'varies') THEN
        paused_until := least(latest, '9999-12-31 00:00+00');
    END IF;
    IF whole AND total IS NOT NULL THEN
        owed_until := nullif(ratelimit._full_at('balance', s, value, ts, at, owed => true), at);
        full_at := nullif(ratelimit._full_at('balance', s, value, ts, at), at);
    END IF;
    known_until := CASE WHEN whole AND n.varies IS NOT NULL THEN ratelimit._known_until(s, standing => true) END;
END
$body$;

-- The states of the keys of a limit that have rows, or by an override of their own need none (a block, no limit, a rate of 0, no slots): some keys, or all. It is what ratelimit.keys, the tool and
-- the page show. given: in place of the published definition (ratelimit._state has the rest). alone: no override counts.
--
-- whole: all of what ratelimit._state says, also of those of the keys that have no row.
CREATE OR REPLACE FUNCTION ratelimit._states(
    name text, keys text[], at timestamptz, given ratelimit._terms DEFAULT NULL, alone boolean DEFAULT false, whole boolean DEFAULT false
) RETURNS TABLE (
    key text, effect text, override bigint, until timestamptz, -- of what is in force
    rows integer, stored double precision, last_use timestamptz, broken boolean, -- of its rows; broken: an instant is infinite
    used double precision, remaining double precision, retry_at timestamptz, paused_until timestamptz,
    numbers ratelimit._terms, owed_until timestamptz, full_at timestamptz, not_before timestamptz, known_until timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    d       ratelimit._terms;
    every   ratelimit._terms; -- of the keys without an override of their own
    beside  ratelimit._terms; -- the same beside a block
    windows timestamptz[];
BEGIN
    IF NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: now must be finite, not %s', name, at);
    END IF;
    IF alone THEN
        every := given;
    ELSE
        PERFORM ratelimit._numbers(name, NULL, at, '0', varying => true, given => given); -- which is an error, if nobody has published it
        d := CASE WHEN given.kind IS NULL THEN ratelimit._defined(name) ELSE given END;
        every := ratelimit._numbers(name, NULL, at, varying => true, given => d);
        beside := ratelimit._numbers(name, NULL, at, varying => true, standing => true, given => d);
    END IF;
    windows := (ratelimit._ask(name, '', every, at, given)).windows;
    RETURN QUERY
        SELECT k.key, (k.n).effect, (k.n).override, (k.n).until, coalesce(pg_catalog.cardinality(k.value), 0),
               (SELECT sum(u.v) FROM pg_catalog.unnest(k.value) AS u (v)),
               (SELECT CASE WHEN isfinite(max(u.t)) THEN least(greatest(max(u.t), '0001-01-01 00:00+00'), '9999-12-31 00:00+00') END FROM pg_catalog.unnest(k.ts) AS u (t)),
               coalesce('infinity' = ANY (k.ts) OR '-infinity' = ANY (k.ts), false),
               s.used, s.remaining, s.retry_at, s.paused_until, s.numbers, s.owed_until, s.full_at, s.not_before, s.known_until
          FROM (
            SELECT coalesce(r.key, o.key, w.key) COLLATE "C" AS key, r.value, r.ts, r.lapses, o.key IS NOT NULL AS own,
                   CASE WHEN o.key IS NOT NULL THEN ratelimit._under(d, o.of) ELSE every END AS n
              FROM ratelimit._rows(name, keys) AS r
              FULL JOIN (
                SELECT DISTINCT ON (f.key) f.key, f AS of FROM ratelimit._in_force(name, keys, at) AS f
                 WHERE f.key IS NOT NULL AND NOT alone
                 ORDER BY f.key, f.effect = 'block' DESC, f.made_at DESC, f.id DESC
              ) AS o ON o.key = r.key COLLATE "C"
              FULL JOIN (SELECT u.key FROM pg_catalog.unnest(keys) AS u (key) WHERE whole GROUP BY u.key) AS w ON w.key = coalesce(r.key, o.key) COLLATE "C"
            OFFSET 0
          ) AS k
         CROSS JOIN LATERAL ratelimit._state(name, k.key, k.n, k.value, k.ts, k.lapses, at, given, CASE WHEN NOT k.own THEN windows END, CASE WHEN NOT k.own THEN beside END, whole) AS s
         WHERE whole OR k.value IS NOT NULL OR k.own AND ((k.n).effect IN ('block', 'unlimited') OR (k.n).effect = 'numbers' AND CASE (k.n).kind WHEN 'slots' THEN (k.n).capacity ELSE (k.n).rate END = '0');
END
$body$;

-- The same as ratelimit.keys, at an instant that tests choose.
CREATE OR REPLACE FUNCTION ratelimit._keys(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    zone text, anchor timestamp, keys text[], now timestamptz
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz, paused_until timestamptz, most double precision, used double precision)
LANGUAGE plpgsql STABLE
AS $body$
DECLARE
    given ratelimit._terms; -- if there are numbers, they alone count
BEGIN
    IF (pg_catalog.num_nonnulls(rate, capacity, period, start, zone, anchor) = 0 AND kind = 'token bucket') IS NOT TRUE THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, NULL, 1, zone, anchor);
        given := ROW('numbers', NULL, NULL, kind, rate, period, coalesce(capacity, rate), NULL, start, 1,
            CASE kind WHEN 'calendar window' THEN coalesce(zone, 'UTC') END, CASE kind WHEN 'calendar window' THEN coalesce(anchor, '2001-01-01') END, NULL);
    END IF;
    RETURN QUERY SELECT s.key, s.remaining, s.retry_at, s.paused_until, n.most, coalesce(s.used, CASE WHEN s.effect = 'numbers' THEN n.most - s.remaining END)
      FROM ratelimit._states(name, keys, coalesce(now, clock_timestamp()), given, alone => given.kind IS NOT NULL) AS s
     CROSS JOIN LATERAL (SELECT CASE WHEN (s.numbers).effect = 'numbers' THEN (s.numbers).capacity END AS most) AS n;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.keys(
    name text, rate double precision DEFAULT NULL, period interval DEFAULT NULL, kind text DEFAULT 'token bucket',
    OUT key text, OUT remaining double precision, INOUT capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL, keys text[] DEFAULT NULL,
    OUT used double precision, OUT retry_at timestamptz, OUT paused_until timestamptz
) RETURNS SETOF record
LANGUAGE sql STABLE
AS $body$
    SELECT k.key, k.remaining, k.most, k.used, k.retry_at, k.paused_until
      FROM ratelimit._keys(name COLLATE "C", rate, period, kind, capacity, start, zone, anchor, keys, NULL) AS k
$body$;

COMMENT ON FUNCTION ratelimit.keys(text, double precision, interval, text, double precision, timestamptz, text, timestamp, text[]) IS $text$
The keys of a rate limit that have been used, and their tokens now. It writes and locks nothing. The limited keys:

    SELECT * FROM ratelimit.keys('sendMessage', rate => 10, period => '1 minute') WHERE retry_at IS NOT NULL ORDER BY remaining

Result, one row for each key:
  key        the key as it is stored; '' for a limit without keys
  remaining  the balance in tokens; below zero if tokens are owed. Of slots, how many are free; below zero if fewer are granted than
             are in use. Holds that have expired are free
  capacity   the most tokens that it can have by the numbers in force, or how many slots there are; NULL: it is unlimited, or only the program
             knows
  used       the slots in use, or the tokens that are missing to the capacity. NULL: not known, or it has tokens and is blocked or unlimited
  retry_at   the instant at which there will be one token, or at which a limit with a capacity below 1 will be full. NULL: there
             are enough tokens now. Of slots, when one is free at the latest; infinity: no expiry frees one. If an override says
             that there are none, when it ends. It is what a denied
             call for one token says. So of a blocked key it is when no block denies any more, whether the tokens are there then or
             not, and infinity if the block has no end. infinity also stands for an instant that is not known: an override ends
             before it, and the program gives this key numbers of its own
  paused_until  of a token bucket: nothing is refilled before it (ratelimit.pause, or a clock leapt ahead). NULL: it is not paused, or
             for less than a second more. A key may be paused and have tokens, or be blocked, too

The arguments and their defaults are the same as for ratelimit.consume, and
  keys       only these keys; default NULL: all that have a row

Without any numbers, they are those that a program has published, each key's under the override in force for it:

    SELECT * FROM ratelimit.keys('sendMessage') WHERE retry_at IS NOT NULL ORDER BY remaining

If an override ends before, retry_at is by what follows. A blocked key has remaining 0, and an unlimited one Infinity. Numbers other than the program's
give another answer. If the program gives some keys numbers of their own, remaining and retry_at are NULL without numbers: they are not
known. remaining NULL with retry_at infinity is a key whose row no program has written: its ts is infinite. Every call for it fails until
ratelimit.reset. An invalid argument is an error, SQLSTATE 22023.
$text$;

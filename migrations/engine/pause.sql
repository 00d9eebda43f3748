-- Pauses: a token bucket is emptied, and refilled from a later instant on. A pause is nothing but a lower value and a later ts, so every
-- function that decides finds it in the row. Limit.Pause in internal/algebra has the rule.

-- Lowers the balance of token buckets to at most `most`, and sets ts to `until`, if it is not later already: of two pauses the later until
-- and the lower balance hold. Missing rows are inserted. Returns the instant from which on all of them are refilled.
--
-- Locks all rows of each limit. The arguments must be in the common order (name, key) (CONCURRENCY.md, K).
CREATE OR REPLACE FUNCTION ratelimit._pause(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], shards integer[],
    mosts double precision[], until timestamptz, now timestamptz DEFAULT NULL
) RETURNS timestamptz
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    n      CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    ends   timestamptz;        -- the latest end of the pauses
    at     timestamptz := coalesce(now, clock_timestamp());
    v      double precision[]; -- the values of one limit's rows
    t      timestamptz[];      -- their ts
    m      integer;            -- their number
    latest timestamptz;        -- from then on, the limit is refilled
    value  double precision;   -- of each row
BEGIN
    -- A day more than callers are told, since their clocks differ.
    IF (n > 0 AND n = pg_catalog.cardinality(keys) AND n = pg_catalog.cardinality(mosts) AND isfinite(until) AND until <= at + interval '32 days') IS NOT TRUE
       OR EXISTS (SELECT 1 FROM pg_catalog.generate_subscripts(names, 1) AS p
           WHERE (ratelimit._valid(rates[p], periods[p], capacities[p], mosts[p], now) AND rates[p] > '0' AND shards[p] BETWEEN 1 AND 100
               AND (p = 1 OR (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (names[p] COLLATE "C", keys[p] COLLATE "C"))) IS NOT TRUE) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    PERFORM ratelimit._check_keyless(u.name, u.key) FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(keys)) AS u (name, key);
    PERFORM ratelimit._lock(names, keys, capacities, shards, now);
    at := coalesce(now, clock_timestamp()); -- locking may have waited
    FOR i IN 1..n LOOP
        PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], NULL, at, NULL);
        SELECT pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), count(*), greatest(max(r.ts), at, until)
          INTO v, t, m, latest
          FROM ratelimit.limits AS r
         WHERE r.name = names[i] AND r.key = keys[i];
        value := least(ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], NULL), mosts[i]) / m::double precision;
        UPDATE ratelimit.limits AS r SET value = value, ts = latest
         WHERE r.name = names[i] AND r.key = keys[i];
        ends := greatest(ends, latest);
    END LOOP;
    RETURN ends;
END
$body$;

-- Ends pauses: limits whose ts lies ahead are refilled from now on. What was emptied stays gone. Returns how many rows were paused.
--
-- Locks all rows of each limit, in the common order (name, key, shard).
CREATE OR REPLACE FUNCTION ratelimit._resume(names text[], keys text[], now timestamptz DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    resumed integer := 0;
    at      timestamptz;
    m       integer;
    r       record;
BEGIN
    IF NOT isfinite(now) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        PERFORM 1 FROM ratelimit.limits AS t WHERE t.name = r.name AND t.key = r.key ORDER BY t.shard FOR UPDATE;
        at := coalesce(now, clock_timestamp()); -- locking may have waited
        UPDATE ratelimit.limits AS t SET ts = at WHERE t.name = r.name AND t.key = r.key AND t.ts > at;
        GET DIAGNOSTICS m = ROW_COUNT;
        IF m = 0 THEN
            PERFORM ratelimit._check_keyless(r.name, r.key);
        END IF;
        resumed := resumed + m;
    END LOOP;
    RETURN resumed;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.pause(
    name text, key text DEFAULT NULL, until timestamptz DEFAULT NULL, remaining double precision DEFAULT 0,
    rate double precision DEFAULT NULL, period interval DEFAULT NULL, capacity double precision DEFAULT NULL,
    shards integer DEFAULT 1, global boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    kind  text := 'token bucket';
    n     record; -- the published numbers
    at    timestamptz := clock_timestamp();
    wrong text;
BEGIN
    IF coalesce(rate, capacity) IS NULL AND period IS NULL AND shards = 1 THEN
        -- Beside a block, or an override that lifts the limit: the pause is there when that ends.
        SELECT f.* INTO n FROM ratelimit._numbers(name COLLATE "C", key COLLATE "C", at, standing => true) AS f;
        kind := n.kind;
        rate := n.rate;
        period := n.period;
        capacity := n.capacity;
        shards := n.shards;
    ELSE
        BEGIN
            kind := CASE (ratelimit._defined(name COLLATE "C")).kind WHEN 'slots' THEN 'slots' ELSE kind END;
        EXCEPTION WHEN insufficient_privilege THEN
            NULL; -- a role that gives the numbers need not see what programs have published
        END;
    END IF;
    IF kind = 'token bucket' THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, NULL, NULL, shards, NULL, NULL, zero => true);
    END IF;
    wrong := CASE
        WHEN kind <> 'token bucket' THEN pg_catalog.format('only a token bucket can be paused, and its kind is %L', kind)
        WHEN until IS NULL OR NOT isfinite(until) OR until > at + interval '31 days' OR until < at - interval '31 days' THEN
            pg_catalog.format('until must be at most 31 days away, not %s', coalesce(until::text, 'NULL'))
        WHEN remaining IS NULL OR NOT (remaining = '0' OR remaining BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('remaining must be 0 or between 1e-15 and 1e15, not %s', coalesce(remaining::text, 'NULL'))
        ELSE ratelimit._wrong_key(key, global) END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;
    IF until <= at THEN -- it is over
        RETURN NULL;
    END IF;
    IF rate > '0' THEN -- otherwise it grants nothing anyway, and has no rows
        RETURN ratelimit._pause(ARRAY[name COLLATE "C"], ARRAY[coalesce(key, '') COLLATE "C"], ARRAY[rate], ARRAY[period],
            ARRAY[coalesce(capacity, rate)], ARRAY[shards], ARRAY[remaining], until);
    END IF;
    RETURN NULL;
END
$body$;

COMMENT ON FUNCTION ratelimit.pause(text, text, timestamptz, double precision, double precision, interval, double precision, integer, boolean) IS $text$
Empties a token bucket, and refills nothing before an instant. A provider has said so: Retry-After. It returns the instant from which on the
limit is refilled: until or, if it was paused until later, that. NULL: there was nothing to do, since until has passed, or the rate is 0.

    SELECT ratelimit.pause('provider', 'eu', until => now() + interval '30 seconds');
    SELECT ratelimit.pause('provider', until => now() + interval '30 seconds', remaining => 3, global => true);

Reservations that were made before keep their instant. Meanwhile refunds repay only what is owed. ratelimit.reset makes the key full, and
so ends the pause; ratelimit.resume ends it, too, but what was emptied stays gone. An unlimited override grants all the same.

Arguments:
  name       the name of the limit
  key        the key as it is stored; NULL or empty is an error, unless global is true
  until      the instant, at most 31 days away. Let the server compute it: now() + '30 seconds'. A client's clock may be wrong
  remaining  at most so many tokens are left; default 0. It adds none
  rate       tokens per period, and so on, as for ratelimit.consume. Without any numbers, they are those that a program has published
  period
  capacity
  shards
  global     true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023   an argument is invalid, or the limit is no token bucket; with numbers, if a program has published it as slots
$text$;

CREATE OR REPLACE FUNCTION ratelimit.resume(name text, key text DEFAULT NULL, global boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        ELSE ratelimit._wrong_key(key, global) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    PERFORM ratelimit._check_known(name COLLATE "C");
    RETURN ratelimit._resume(ARRAY[name], ARRAY[coalesce(key, '')]) > 0;
END
$body$;

COMMENT ON FUNCTION ratelimit.resume(text, text, boolean) IS $text$
Ends the pause of a token bucket: it is refilled from now on. What was emptied stays gone. It returns whether the key was paused.

    SELECT ratelimit.resume('provider', 'eu')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023   an argument is invalid
$text$;

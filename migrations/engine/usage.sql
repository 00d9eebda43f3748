-- What was granted and denied, as the recorders of package ratelimit/usage have counted it. No decision depends on these tables.
--
-- Both tables are read by limit and by time, and rows go by time: hence the two indexes. Counts are in no index, so that updates are
-- heap-only. ON CONFLICT takes both indexes, whatever the order of their columns.
CREATE TABLE ratelimit.usage (
    name     text COLLATE "C" NOT NULL,
    minute   timestamptz      NOT NULL CHECK (isfinite(minute)),
    granted  bigint           NOT NULL,
    denied   bigint           NOT NULL,
    failed   bigint           NOT NULL,
    tokens   double precision NOT NULL,
    refunded double precision NOT NULL,
    waited   double precision NOT NULL,
    CHECK (tokens BETWEEN '-1e100' AND '1e100' AND refunded BETWEEN '-1e100' AND '1e100' AND waited BETWEEN '-1e100' AND '1e100'),
    CHECK (granted BETWEEN 0 AND 1000000000000000 AND denied BETWEEN 0 AND 1000000000000000 AND failed BETWEEN 0 AND 1000000000000000), -- so that sums are bigint
    PRIMARY KEY (name, minute),
    UNIQUE (minute, name)
) WITH (fillfactor = 90);

COMMENT ON TABLE ratelimit.usage IS 'txlimit: what was granted and denied, by limit and minute; see ratelimit.usage';
COMMENT ON COLUMN ratelimit.usage.name IS 'the name of the limit';
COMMENT ON COLUMN ratelimit.usage.minute IS 'the begin of the minute';
COMMENT ON COLUMN ratelimit.usage.granted IS 'requests that were granted; a Wait that was given up is not in it';
COMMENT ON COLUMN ratelimit.usage.denied IS 'requests that were denied';
COMMENT ON COLUMN ratelimit.usage.failed IS 'requests that were neither: the database failed, or they were invalid or above the capacity. Canceled calls, 40001 and 40P01 are not counted';
COMMENT ON COLUMN ratelimit.usage.tokens IS 'tokens that were taken, by Charge, by Settle and by a Wait that was given up as well';
COMMENT ON COLUMN ratelimit.usage.refunded IS 'tokens that were given back';
COMMENT ON COLUMN ratelimit.usage.waited IS 'seconds from the grants to the instants at which their work may run, added up';

-- The most denied keys of each limit and hour, 100 at most.
CREATE TABLE ratelimit.denials (
    name        text COLLATE "C" NOT NULL,
    hour        timestamptz      NOT NULL CHECK (isfinite(hour)),
    key         text COLLATE "C" NOT NULL,
    denied      bigint           NOT NULL,
    asked       double precision NOT NULL,
    last_denied timestamptz      NOT NULL CHECK (isfinite(last_denied)),
    CHECK (denied BETWEEN 0 AND 1000000000000000 AND asked BETWEEN '-1e100' AND '1e100'),
    PRIMARY KEY (name, hour, key),
    UNIQUE (hour, name, key)
) WITH (fillfactor = 90);

COMMENT ON TABLE ratelimit.denials IS 'txlimit: the most denied keys, by limit and hour; see ratelimit.denials';
COMMENT ON COLUMN ratelimit.denials.name IS 'the name of the limit';
COMMENT ON COLUMN ratelimit.denials.hour IS 'the begin of the hour, in UTC';
COMMENT ON COLUMN ratelimit.denials.key IS 'the key, or its hash';
COMMENT ON COLUMN ratelimit.denials.denied IS 'at least so many requests';
COMMENT ON COLUMN ratelimit.denials.asked IS 'the tokens that they asked for';
COMMENT ON COLUMN ratelimit.denials.last_denied IS 'the instant of the last denial';

-- Adds to the tables what a recorder has counted, and returns the number of rows that were deleted.
--
--   names, minutes, granted ...     the rows to add to ratelimit.usage
--   denial_names, hours, keys ...   the rows to add to ratelimit.denials
--   keep                            older rows go: each call deletes up to 1000 of each table, and two for each row that it adds
--
-- Arrays may be NULL, which is no row. No two elements may be the same row. Two processes cannot deadlock: the rows that a call may wait for come in one order (usage before
-- denials), and it waits for no row that it deletes. A row that is locked is left to the next call. A call that waits for 2 seconds
-- fails (55P03), so that its caller knows that nothing was written.
CREATE OR REPLACE FUNCTION ratelimit._record_usage(
    names text[], minutes timestamptz[], granted bigint[], denied bigint[], failed bigint[],
    tokens double precision[], refunded double precision[], waited double precision[],
    denial_names text[], hours timestamptz[], keys text[], denials bigint[], asked double precision[], last_denied timestamptz[],
    keep interval
) RETURNS integer
LANGUAGE plpgsql
-- Read along the indexes, whatever the statistics say, and compile nothing for what the planner expects.
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '2s'
AS $body$
DECLARE
    -- In variables, since Citus takes nothing in a write that is not immutable.
    minutes_before timestamptz := clock_timestamp() - keep - interval '1 minute';
    hours_before   timestamptz := clock_timestamp() - keep - interval '1 hour';
    rec     record;
    deleted integer := 0;
BEGIN
    INSERT INTO ratelimit.usage AS r
    SELECT u.*
      FROM unnest(names, minutes, granted, denied, failed, tokens, refunded, waited) AS u (name, minute, granted, denied, failed, tokens, refunded, waited)
     ORDER BY u.name COLLATE pg_catalog."C", u.minute
        ON CONFLICT (name, minute) DO UPDATE
       SET granted = r.granted + EXCLUDED.granted, denied = r.denied + EXCLUDED.denied, failed = r.failed + EXCLUDED.failed,
           tokens = r.tokens + EXCLUDED.tokens, refunded = r.refunded + EXCLUDED.refunded, waited = r.waited + EXCLUDED.waited;

    INSERT INTO ratelimit.denials AS r
    SELECT u.*
      FROM unnest(denial_names, hours, keys, denials, asked, last_denied) AS u (name, hour, key, denied, asked, last_denied)
     ORDER BY u.name COLLATE pg_catalog."C", u.hour, u.key COLLATE pg_catalog."C"
        ON CONFLICT (name, hour, key) DO UPDATE
       SET denied = r.denied + EXCLUDED.denied, asked = r.asked + EXCLUDED.asked,
           last_denied = greatest(r.last_denied, EXCLUDED.last_denied);

    -- Of each limit and hour, the 100 most denied keys stay; of keys denied as often, the latest. OFFSET 0 and LATERAL make the planner
    -- find the keys once, and look their rows up one by one.
    FOR rec IN
        SELECT l.name, l.hour, l.key
          FROM (
            SELECT h.name, h.hour, rest.key
              FROM (SELECT DISTINCT u.name COLLATE pg_catalog."C" AS name, u.hour FROM unnest(denial_names, hours) AS u (name, hour)) AS h
             CROSS JOIN LATERAL (
                SELECT k.key
                  FROM ratelimit.denials AS k
                 WHERE k.name = h.name AND k.hour = h.hour
                 ORDER BY k.denied DESC, k.last_denied DESC, k.key
                OFFSET 100
              ) AS rest
            OFFSET 0
          ) AS v
         CROSS JOIN LATERAL (
            SELECT d.name, d.hour, d.key
              FROM ratelimit.denials AS d
             WHERE d.name = v.name AND d.hour = v.hour AND d.key = v.key
               FOR UPDATE SKIP LOCKED
          ) AS l
    LOOP
        DELETE FROM ratelimit.denials AS r WHERE r.name = rec.name AND r.hour = rec.hour AND r.key = rec.key;
        deleted := deleted + 1;
    END LOOP;
    FOR rec IN
        SELECT d.name, d.minute
          FROM ratelimit.usage AS d
         WHERE d.minute < minutes_before
         ORDER BY d.minute
         LIMIT 1000 + 2 * coalesce(pg_catalog.cardinality(names), 0)
           FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM ratelimit.usage AS r WHERE r.name = rec.name AND r.minute = rec.minute;
        deleted := deleted + 1;
    END LOOP;
    FOR rec IN
        SELECT d.name, d.hour, d.key
          FROM ratelimit.denials AS d
         WHERE d.hour < hours_before
         ORDER BY d.hour
         LIMIT 1000 + 2 * coalesce(pg_catalog.cardinality(denial_names), 0)
           FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM ratelimit.denials AS r WHERE r.name = rec.name AND r.hour = rec.hour AND r.key = rec.key;
        deleted := deleted + 1;
    END LOOP;
    RETURN deleted;
END
$body$;

-- A query of all limits takes the index by minute, and one of a limit the primary key. It is PL/pgSQL, since Citus refuses a function of
-- SQL that reads a distributed table by its arguments.
CREATE OR REPLACE FUNCTION ratelimit.usage(
    INOUT name text DEFAULT NULL, since timestamptz DEFAULT NULL,
    OUT minute timestamptz, OUT granted bigint, OUT denied bigint, OUT failed bigint, OUT tokens double precision, OUT refunded double precision, OUT waited double precision
) RETURNS SETOF record
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    first timestamptz := coalesce(since, now() - interval '1 hour') - interval '1 minute';
BEGIN
    IF name IS NULL THEN
        RETURN QUERY SELECT r.name::text, r.minute, r.granted, r.denied, r.failed, r.tokens, r.refunded, r.waited
          FROM ratelimit.usage AS r WHERE r.minute > first ORDER BY r.minute, r.name;
        RETURN;
    END IF;
    RETURN QUERY SELECT r.name::text, r.minute, r.granted, r.denied, r.failed, r.tokens, r.refunded, r.waited
      FROM ratelimit.usage AS r WHERE r.name = name COLLATE "C" AND r.minute > first ORDER BY r.minute;
    IF NOT FOUND AND NOT EXISTS (SELECT 1 FROM ratelimit.usage AS r WHERE r.name = name COLLATE "C") THEN
        PERFORM ratelimit._check_known(name COLLATE "C");
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.usage(text, timestamptz) IS $text$
What was granted and denied, minute by minute, as the programs' usage.Recorder has counted it. A minute without calls has no row.

    SELECT * FROM ratelimit.usage('sendMessage', since => now() - interval '3 hours')

    -- the limits that denied most in the last hour
    SELECT name, sum(denied) AS denied, sum(granted) AS granted FROM ratelimit.usage() GROUP BY name ORDER BY denied DESC

Arguments:
  name      the limit; default NULL: all limits
  since     the first instant; default NULL: an hour ago. The minute that it lies in is included

Result:
  name      the limit; '(others)' for those that a recorder had no room for
  minute    the minute's begin
  granted   requests that were granted: of Consume, Each, Take, Reserve, Wait, Hold and Once. Those in a transaction that was rolled
            back are included. A Wait that was given up is not, nor a Hold or Once whose id was known
  denied    requests that were denied. Requests that another limit of their call denied are not in it, and checks are not
  failed    requests that ended with another error: the database failed, or they were invalid or above the capacity. Canceled calls, and
            those whose transaction has to run again (40001, 40P01), are not in it
  tokens    the tokens that were taken, by Charge, by Settle and by a Wait that was given up as well. refunded has what the last
            gave back
  refunded  the tokens that were given back, by Settle and Release as well
  waited    the seconds from grants to the instants at which their work may run, added up: of reservations, and of Wait

Errors:
  22023     programs publish limits, and nobody knows this one

The newest counts are missing: a program writes them every ten seconds, unless it says otherwise.
$text$;

CREATE OR REPLACE FUNCTION ratelimit.denials(
    INOUT name text DEFAULT NULL, since timestamptz DEFAULT NULL,
    OUT key text, OUT denied bigint, OUT asked double precision, OUT last_denied timestamptz
) RETURNS SETOF record
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    only_name CONSTANT text COLLATE "C" := name;
    first     CONSTANT timestamptz := coalesce(since, now() - interval '1 hour') - interval '1 hour';
BEGIN
    RETURN QUERY
        SELECT k.*
          FROM (
            SELECT r.name::text, r.key::text, least(sum(r.denied), 9223372036854775807::numeric)::bigint AS denied, sum(greatest(least(r.asked, '1e100'), '-1e100')) AS asked, max(r.last_denied) AS last_denied
              FROM ratelimit.denials AS r
             WHERE (only_name IS NULL OR r.name = only_name) AND r.hour > first
             GROUP BY r.name, r.key
          ) AS k
         ORDER BY k.denied DESC, k.last_denied DESC, k.name, k.key;
    IF NOT FOUND AND only_name IS NOT NULL AND NOT EXISTS (SELECT 1 FROM ratelimit.denials AS r WHERE r.name = only_name) THEN
        PERFORM ratelimit._check_known(only_name);
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.denials(text, timestamptz) IS $text$
The most denied keys, worst first, as the programs' usage.Recorder has counted them.

    SELECT * FROM ratelimit.denials('sendMessage', since => now() - interval '3 hours') LIMIT 20

Arguments:
  name         the limit; default NULL: all limits
  since        the first instant; default NULL: an hour ago. The hour that it lies in is included as a whole; hours begin in UTC

Result, one row for each limit and key:
  name         the limit
  key          the key as it is stored, or its hash if the recorder hashes keys; '' for a limit without keys
  denied       how many requests were denied, at least: of each limit and hour, the 100 most denied keys are kept
  asked        how many tokens they asked for
  last_denied  the instant of the last denial that was counted

Errors:
  22023        programs publish limits, and nobody knows this one

The newest counts are missing: a program writes them every ten seconds, unless it says otherwise.
$text$;

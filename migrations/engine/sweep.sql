-- Deletes idle rows, so that the table does not grow with every key ever used. An idle row has exactly the tokens of a
-- missing one.
-- Sweep of the Go library calls it batch after batch; psql can, too.
--
-- An index on value or ts would find such rows, but would end heap-only updates. Instead, each batch looks at the next 1000 rows of
-- the primary key, from where the batch before ended.

-- Reports whether a row, one of `shards`, was full at `upto` (see _ratelimit_available) and at every later instant. Then no call can
-- tell it from a missing row. A row whose ts lies after `upto` differs from a missing one: its refills begin at that ts.
-- Rows written by hand must not stop a sweep: infinite instants, which cannot be subtracted, and 0 shards.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_says_nothing(
    value double precision, ts timestamptz, shards smallint, upto timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN ts <= upto AND isfinite(ts) AND shards > 0 THEN
    /* TEMPLATE: schema */_ratelimit_available(value, ts, upto, rate / shards::double precision, period, capacity / shards::double precision, start)
        = capacity / shards::double precision
    ELSE false END;

-- Returns the numbers of a sweep without any: what is full by the largest capacity and the slowest rate is full by each plan, under each
-- override. What ended less than a day ago counts, too: a process may not know yet. nothing: there are no rows to sweep, or old and new
-- processes refill them differently.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_sweep_numbers(
    name text, at timestamptz,
    OUT nothing boolean, OUT kind text, OUT period interval, OUT start timestamptz, OUT rate double precision, OUT capacity double precision
)
LANGUAGE plpgsql STABLE
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT count(*) = '0' OR min(d.kind) <> max(d.kind) OR min(d.period) <> max(d.period)
               OR min(coalesce(d.start, '-infinity')) <> max(coalesce(d.start, '-infinity')),
           min(d.kind), min(d.period), min(d.start), min(n.rate), max(n.capacity)
      INTO nothing, kind, period, start, rate, capacity
      FROM /* TEMPLATE: schema */rate_limit_definitions AS d
     CROSS JOIN LATERAL (
        SELECT d.rate, d.capacity
        UNION ALL
        SELECT coalesce(o.rate, d.rate), /* TEMPLATE: schema */_ratelimit_capacity(d.rate, d.capacity, o.rate, o.capacity)
          FROM /* TEMPLATE: schema */rate_limit_overrides AS o
         WHERE o.name = name AND o.effect = 'numbers' AND coalesce(least(o.until, o.removed_at), 'infinity') > clock_timestamp() - interval '1 day'
     ) AS n
     WHERE d.name = name AND d.kind <> 'unlimited' AND n.rate > '0' AND (d.current OR d.published_at > clock_timestamp() - interval '1 day');
    IF nothing AND NOT EXISTS (SELECT FROM /* TEMPLATE: schema */rate_limit_definitions AS d WHERE d.name = name) THEN
        PERFORM /* TEMPLATE: schema */_ratelimit_numbers(name, NULL, at, '0'); -- which is an error
    END IF;
END
$body$;

-- Sweeps one batch. It deletes all rows of a key or none: a missing shard is not full while other shards have rows.
--
-- It locks only the rows that it deletes and never waits for a lock: locked rows are in use and stay. There are three statements,
-- each with its own snapshot: a plain read, since locking writes; locking, which checks the row's latest version; and the DELETE,
-- which sees the locked rows (CONCURRENCY.md, F3).
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_sweep(
    name text, rate double precision DEFAULT NULL, period interval DEFAULT NULL, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    first text DEFAULT '', now timestamptz DEFAULT NULL,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
-- Read along the primary key, whatever the statistics say.
SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    -- Rows must have been full an hour ago: then a clock that steps back by up to an hour after a sweep changes nothing.
    at   timestamptz := coalesce(now, clock_timestamp()) - interval '1 hour';
    keys text[]; -- the keys whose rows are all idle: according to a plain read, then locked
    nothing boolean; -- to delete
    k    text;
    n    integer;
    grid timestamptz; -- the start of the windows of k
    idle boolean;     -- k
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    IF coalesce(rate, capacity) IS NULL AND period IS NULL AND start IS NULL AND kind = 'token bucket' THEN
        SELECT n.nothing, n.kind, n.period, n.start, n.rate, n.capacity INTO nothing, kind, period, start, rate, capacity
          FROM /* TEMPLATE: schema */_ratelimit_sweep_numbers(name, at) AS n;
        IF nothing THEN
            deleted := 0;
            RETURN;
        END IF;
    END IF;
    PERFORM /* TEMPLATE: schema */_ratelimit_validate(name, rate, period, kind, capacity, start, NULL, 1, NULL, NULL);
    IF first IS NULL OR NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: first is %s, now is %s; first must not be NULL, and now must be finite', name, quote_nullable(first), now);
    END IF;
    capacity := coalesce(capacity, rate);
    deleted := 0;
    -- Each key may have a zone and an anchor of its own. By any of them, as many windows have begun since ts as the longest
    -- windows fit in between, so the grid of a calendar window begins at ts.
    IF kind = 'calendar window' THEN
        period := /* TEMPLATE: schema */_ratelimit_longest(period);
    END IF;

    SELECT pg_catalog.array_agg(k.key) FILTER (WHERE k.idle), CASE WHEN sum(k.rows) = '1000' THEN max(k.key) END INTO keys, next
      FROM (
        SELECT r.key, count(*) AS rows, count(*) = min(r.shards) AND count(*) = max(r.shards) AND bool_and(
               /* TEMPLATE: schema */_ratelimit_says_nothing(r.value, r.ts, r.shards, /* TEMPLATE: schema */_ratelimit_upto(at, period, r.grid),
                   rate, period, capacity, r.grid)) AS idle
          FROM (
            SELECT r.*, CASE WHEN NOT isfinite(r.ts) OR r.ts > at THEN NULL WHEN kind = 'calendar window' THEN r.ts
                   WHEN kind = 'fixed window' THEN /* TEMPLATE: schema */_ratelimit_grid(name, r.key, period, kind, start) END AS grid
              FROM /* TEMPLATE: schema */rate_limits AS r
             WHERE r.name = name AND r.key >= first
             ORDER BY r.key, r.shard
             LIMIT 1000
          ) AS r
         GROUP BY r.key
      ) AS k;
    IF next = first THEN -- the next batch begins with the last key, which may have more rows, but only once
        next := first || E'\x01'; -- the next possible key
    END IF;
    IF keys IS NULL THEN
        RETURN;
    END IF;

    IF /* TEMPLATE: schema */_ratelimit_distributed() THEN -- key by key, each on its server
        FOREACH k IN ARRAY keys LOOP
            grid := CASE WHEN kind = 'fixed window' THEN /* TEMPLATE: schema */_ratelimit_grid(name, k, period, kind, start) END;
            SELECT count(*) = min(l.shards) AND count(*) = max(l.shards) INTO idle
              FROM (
                SELECT r.shards
                  FROM /* TEMPLATE: schema */rate_limits AS r
                 WHERE r.name = name AND r.key = k
                   AND /* TEMPLATE: schema */_ratelimit_says_nothing(r.value, r.ts, r.shards,
                           /* TEMPLATE: schema */_ratelimit_upto(at, period, CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE grid END),
                           rate, period, capacity, CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE grid END)
                   FOR UPDATE OF r SKIP LOCKED
              ) AS l;
            IF idle THEN
                DELETE FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = name AND r.key = k;
                GET DIAGNOSTICS n = ROW_COUNT;
                deleted := deleted + n;
            END IF;
        END LOOP;
        RETURN;
    END IF;

    -- LATERAL and = ANY make the planner look keys up one by one, whatever its estimates (CONCURRENCY.md, E6).
    SELECT pg_catalog.array_agg(k.key) INTO keys
      FROM (
        SELECT l.key
          FROM (
            SELECT u.key, CASE WHEN kind = 'fixed window' THEN /* TEMPLATE: schema */_ratelimit_grid(name, u.key, period, kind, start) END AS grid
              FROM pg_catalog.unnest(keys) AS u (key)
            OFFSET 0
          ) AS g
         CROSS JOIN LATERAL (
            SELECT r.key, r.shards
              FROM /* TEMPLATE: schema */rate_limits AS r
             CROSS JOIN LATERAL (SELECT CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE g.grid END AS grid) AS own
             WHERE r.name = name AND r.key = g.key
               AND /* TEMPLATE: schema */_ratelimit_says_nothing(r.value, r.ts, r.shards, /* TEMPLATE: schema */_ratelimit_upto(at, period, own.grid),
                       rate, period, capacity, own.grid)
               FOR UPDATE OF r SKIP LOCKED
          ) AS l
         GROUP BY l.key
        HAVING count(*) = min(l.shards) AND count(*) = max(l.shards)
      ) AS k;

    DELETE FROM /* TEMPLATE: schema */rate_limits AS r
     USING pg_catalog.unnest(keys) AS u (key)
     WHERE r.name = ANY (ARRAY[CASE WHEN u.key IS NOT NULL THEN name END]) AND r.key = u.key;
    GET DIAGNOSTICS deleted = ROW_COUNT;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_sweep(text, double precision, interval, text, double precision, timestamptz, text, timestamptz) IS $text$
Deletes rows of a rate limit that have been full for an hour. A missing row means the same. A call looks at 1000 rows, in the order
of their keys, and never waits for a lock. It holds the locks of the deleted rows until the transaction ends: commit after each call.

    SELECT * FROM ratelimit_sweep('sendMessage', rate => 10, period => '1 minute', capacity => 20)

Without any numbers, they are the largest capacity and the slowest rate that programs have published or that an override gives:

    SELECT * FROM ratelimit_sweep('sendMessage')

Arguments: as for ratelimit, with the numbers that the program uses, without zone and anchor, and
  first    the key to begin with; default '', the first of all

Result:
  deleted  the number of deleted rows
  next     the argument first for the next call; NULL: this was the last

Errors:
  RL003    the transaction is not READ COMMITTED
  22023    an argument is invalid
$text$;

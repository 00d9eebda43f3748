-- Deletes rows that say nothing: those that hold exactly what a missing row would, so that the table does not grow with every
-- key that was ever used. The Go library's Sweep calls it batch after batch; so can psql.
--
-- There is no index on value or ts that would find such rows: it would end heap-only updates. Instead each batch looks at the
-- next 1000 rows of the primary key, from where the one before has ended.

-- Whether a row, one of so many shards, is full at `upto` (see _ratelimit_available), and was at all instants from then on: at any of
-- them, whatever is done, it does not differ from one that is not there. One whose ts lies ahead of `upto` would keep that.
-- What was written by hand must not stop a sweep: infinite instants, which cannot be subtracted, and 0 shards.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_says_nothing(
    value double precision, ts timestamptz, shards smallint, upto timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN ts <= upto AND isfinite(ts) AND shards > 0 THEN
    /* TEMPLATE: schema */_ratelimit_available(value, ts, upto, rate / shards::double precision, period, capacity / shards::double precision, start)
        = capacity / shards::double precision
    ELSE false END;

-- One batch. All rows of a key are deleted, or none: a missing shard of a limit that has rows is not a full one.
--
-- Locks only what it deletes, and never waits for a lock: rows that others have locked are in use, and stay. Three statements,
-- each with a snapshot of its own: a plain read, since locking writes; locking, which looks at the row again in its latest
-- version; and the DELETE, which sees what was locked. Whoever has waited for a row that is deleted finds none and goes round (READ
-- COMMITTED), or gets 40001 and runs again.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_sweep(
    name text, rate double precision, period interval, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    first text DEFAULT '', now timestamptz DEFAULT NULL,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
-- Whatever the statistics say: along the primary key.
SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    -- Rows that were full an hour ago: a clock that steps back by no more, after a sweep, finds that nothing has changed.
    at   timestamptz := coalesce(now, clock_timestamp()) - interval '1 hour';
    keys text[]; -- those of which all rows say nothing, by a plain read
    tids tid[];  -- those rows, once they are locked
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    PERFORM /* TEMPLATE: schema */_ratelimit_validate(name, rate, period, kind, capacity, start, NULL, 1);
    IF first IS NULL OR NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: first is %s, now is %s', name, quote_nullable(first), now);
    END IF;
    capacity := coalesce(capacity, rate);
    deleted := 0;

    SELECT pg_catalog.array_agg(k.key) FILTER (WHERE k.idle), CASE WHEN sum(k.rows) = '1000' THEN max(k.key) END INTO keys, next
      FROM (
        SELECT r.key, count(*) AS rows, count(*) = min(r.shards) AND count(*) = max(r.shards) AND bool_and(
               /* TEMPLATE: schema */_ratelimit_says_nothing(r.value, r.ts, r.shards, CASE WHEN r.grid IS NULL THEN at ELSE date_bin(period, at, r.grid) END,
                   rate, period, capacity, r.grid)) AS idle
          FROM (
            SELECT r.*, CASE WHEN kind <> 'token bucket' AND r.ts <= at THEN /* TEMPLATE: schema */_ratelimit_grid(name, r.key, period, kind, start) END AS grid
              FROM /* TEMPLATE: schema */rate_limits AS r
             WHERE r.name = name AND r.key >= first
             ORDER BY r.key, r.shard
             LIMIT 1000
          ) AS r
         GROUP BY r.key
      ) AS k;
    IF next = first THEN -- the last key may have more rows, so the next batch begins with it, but not over and over
        next := first || E'\x01'; -- no key lies in between
    END IF;
    IF keys IS NULL THEN
        RETURN;
    END IF;

    -- (LATERAL and tids: rows are looked up one by one, whatever the planner thinks of the table.)
    SELECT pg_catalog.array_agg(k.tid) INTO tids
      FROM (
        SELECT pg_catalog.unnest(pg_catalog.array_agg(l.tid)) AS tid
          FROM (
            SELECT u.key, CASE WHEN kind <> 'token bucket' THEN /* TEMPLATE: schema */_ratelimit_grid(name, u.key, period, kind, start) END AS grid
              FROM pg_catalog.unnest(keys) AS u (key)
            OFFSET 0
          ) AS g
         CROSS JOIN LATERAL (
            SELECT r.ctid AS tid, r.key, r.shards
              FROM /* TEMPLATE: schema */rate_limits AS r
             WHERE r.name = name AND r.key = g.key
               AND /* TEMPLATE: schema */_ratelimit_says_nothing(r.value, r.ts, r.shards, CASE WHEN g.grid IS NULL THEN at ELSE date_bin(period, at, g.grid) END,
                       rate, period, capacity, g.grid)
               FOR UPDATE SKIP LOCKED
          ) AS l
         GROUP BY l.key
        HAVING count(*) = min(l.shards) AND count(*) = max(l.shards)
      ) AS k;

    DELETE FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.ctid = ANY (tids);
    GET DIAGNOSTICS deleted = ROW_COUNT;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_sweep(text, double precision, interval, text, double precision, timestamptz, text, timestamptz) IS $text$
Deletes rows of a rate limit that have been full for an hour, which mean the same as none. Looks at 1000 rows, in the order of
their keys, and never waits for a lock. It holds those of what it has deleted until the transaction ends: commit after each call.

    SELECT * FROM ratelimit_sweep('sendMessage', rate => 10, period => '1 minute', capacity => 20)

  first    the key to begin with; '' is the first of all
  deleted  how many rows
  next     where the next call should begin; NULL: that was the last

The other arguments are those of ratelimit, and must be the program's. It needs a READ COMMITTED transaction (otherwise: SQLSTATE RL003).
$text$;

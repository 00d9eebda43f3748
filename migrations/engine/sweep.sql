-- Deletes idle rows, so that the table does not grow with every key ever used. An idle row has exactly the tokens of a
-- missing one.
-- Sweep of the Go library calls it batch after batch; psql can, too.
--
-- An index on value or ts would find such rows, but would end heap-only updates. Instead, each batch looks at the next 1000 rows of
-- the primary key, from where the batch before ended.

-- Who sweeps: programs take turns, so that a limit is walked once in the time between two sweeps, however many there are. at is the last batch of a
-- pass, done_at the end of the last one. name '': the holds of all limits. A lock of a row needs the right to update it; an advisory lock needs none,
-- and whoever takes it would stop all sweeps.
CREATE TABLE ratelimit.sweeps (
    name    text COLLATE "C" PRIMARY KEY,
    at      timestamptz NOT NULL,
    done_at timestamptz NOT NULL
);

COMMENT ON TABLE ratelimit.sweeps IS 'txlimit: when each limit was swept last, so that programs take turns';
COMMENT ON COLUMN ratelimit.sweeps.name IS 'the name of the limit; '''': the holds of all limits';
COMMENT ON COLUMN ratelimit.sweeps.at IS 'the instant of the last batch';
COMMENT ON COLUMN ratelimit.sweeps.done_at IS 'when a pass over all rows was completed last';

-- Says whether the caller may begin or go on with a pass, in this transaction: mine, and then its mark is at, which is to be passed as mine next;
-- other: another program does, or has within `since`; locked: somebody has the row. step: begin; go on; or end, after the last batch. A pass whose
-- program has done nothing for a minute is begun anew by another one, and its own finds another mark. It waits for no lock but a first row's.
CREATE OR REPLACE FUNCTION ratelimit._sweep_turn(
    name text, step text, since interval, mine timestamptz, OUT state text, OUT at timestamptz
)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    now    timestamptz := clock_timestamp();
    minute timestamptz := now - interval '1 minute';
    rec    record;
BEGIN
    IF (SELECT row_security_active(y.typrelid) FROM pg_catalog.pg_type AS y WHERE y.oid = pg_catalog.pg_typeof(NULL::ratelimit.limits)::oid) THEN
        state := 'mine'; -- it sees some of the rows, so its pass is nobody else's
        at := now;
        RETURN;
    END IF;
    SELECT s.at, s.done_at INTO rec FROM ratelimit.sweeps AS s WHERE s.name = name;
    IF NOT FOUND THEN
        INSERT INTO ratelimit.sweeps AS s (name, at, done_at) VALUES (name, '-infinity', '-infinity') ON CONFLICT DO NOTHING;
    END IF;
    state := CASE WHEN step = 'begin' AND rec.at BETWEEN minute AND now THEN 'other' ELSE 'locked' END;
    SELECT s.at, s.done_at INTO rec FROM ratelimit.sweeps AS s WHERE s.name = name FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    now := clock_timestamp(); -- under the lock, what others have written lies behind it
    minute := now - interval '1 minute';
    -- An instant that lies ahead is of a clock that has stepped back, and says nothing.
    IF (CASE WHEN step = 'begin' THEN (rec.done_at BETWEEN now - since AND now) IS NOT TRUE AND (rec.at = mine OR (rec.at BETWEEN minute AND now) IS NOT TRUE)
             ELSE rec.at = mine END) THEN
        state := 'mine';
        at := now;
        UPDATE ratelimit.sweeps AS s SET at = now, done_at = CASE WHEN step = 'end' THEN now ELSE s.done_at END WHERE s.name = name;
    ELSE
        state := 'other';
    END IF;
END
$body$;

-- Reports whether a row, one of `shards`, was full at an instant and at every later one. Then no call can tell it from a missing row. A
-- row whose ts lies after the last refill before that instant (see ratelimit._upto) differs from a missing one: its refills begin at its ts.
-- Rows written by hand must not stop a sweep: infinite instants, which cannot be subtracted, and 0 shards.
--
-- rate: NULL if all definitions vary, and for slots, whose varies is 0: such a row says nothing if no slot is in use. varies: a key has numbers that are not known here, but within this time they fill a row from 0. A
-- row in debt may need longer, and stays. Less than the smallest count is no debt.
CREATE OR REPLACE FUNCTION ratelimit._idle(
    value double precision, ts timestamptz, shards smallint, at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, varies interval
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN isfinite(ts) AND ts <= ratelimit._upto(at, period, start) AND shards > 0 THEN
    (rate IS NULL OR ratelimit._available(value, ts, ratelimit._upto(at, period, start),
            rate / shards::double precision, period, capacity / shards::double precision, start) = capacity / shards::double precision)
    AND (varies IS NULL OR value > '-1e-15' AND date_part('epoch', at - ts) > date_part('epoch', varies))
    ELSE false END;

-- Returns the numbers of a sweep. A row is deleted if it is full by every definition that counts, of any program or version: the one
-- passed, those that are current, and those that were within 7 days, since older processes may still use them. So they are joined: what is
-- full by the largest capacity and the slowest rate is full by each of them, under each override. An override that ended less than a day
-- ago counts, too: a process may not know yet. Where definitions vary, their numbers say nothing, and varies is the longest of them.
-- nothing: there are no rows to sweep, or they do not all refill alike, or an override of all keys changes numbers that are not known.
CREATE OR REPLACE FUNCTION ratelimit._sweep_numbers(
    name text, INOUT rate double precision, INOUT period interval, INOUT kind text, INOUT capacity double precision, INOUT start timestamptz,
    INOUT varies interval, OUT nothing boolean
)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    since timestamptz := clock_timestamp() - interval '1 day';
    given boolean := pg_catalog.num_nonnulls(rate, period, capacity, start, varies) > 0 OR kind IS DISTINCT FROM 'token bucket';
BEGIN
    IF kind = 'slots' THEN
        PERFORM ratelimit._validate_slots(name, capacity);
        IF pg_catalog.num_nonnulls(rate, period, start) > 0 OR varies <> '0' THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: rate, period, start and varies must be NULL for slots', name);
        END IF;
    ELSIF given THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, NULL, 1, NULL, NULL,
            zero => varies IS NOT NULL);
        capacity := coalesce(capacity, rate);
        IF varies IS NOT NULL THEN
            PERFORM ratelimit._validate_varies(name, rate, period, kind, capacity, varies);
        END IF;
    ELSIF NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d
            WHERE d.name = name AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')) THEN
        PERFORM ratelimit._numbers(name, NULL, since, '0'); -- which is an error
    END IF;
    WITH o AS MATERIALIZED ( -- read once, however many definitions there are
        SELECT min(o.rate) AS slowest, max(o.rate) AS fastest, max(o.capacity) AS largest
          FROM ratelimit.overrides AS o
         WHERE o.name = name AND o.effect = 'numbers' AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > since
             AND coalesce(least(o.until, o.removed_at), 'infinity') > since AND coalesce(o.rate, '1') > '0'
         GROUP BY o.rate IS NULL, o.capacity IS NULL
    )
    SELECT coalesce(count(*) = '0' OR min(d.kind) <> max(d.kind) OR min(d.period) <> max(d.period)
               OR min(d.grid) <> max(d.grid) OR count(d.grid) NOT IN ('0', count(*)), false), -- slots have no period
           min(d.kind), min(d.period), min(d.start), min(n.rate), max(n.capacity), max(d.varies)
      INTO nothing, kind, period, start, rate, capacity, varies
      FROM (
        SELECT d.*, d.start - date_bin(d.period, d.start, '2000-01-01 00:00+00') AS grid
          FROM (
            SELECT d.kind, d.period, d.start, d.rate, d.capacity, d.varies
              FROM ratelimit.definitions AS d
             WHERE d.name = name AND d.kind <> 'unlimited' AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')
            UNION ALL
            SELECT kind, period, start, rate, capacity, varies WHERE given
          ) AS d
      ) AS d
      LEFT JOIN LATERAL (
        SELECT d.rate, d.capacity
        UNION ALL
        SELECT coalesce(o.slowest, d.rate), ratelimit._capacity(d.rate, d.capacity, o.fastest, o.largest) FROM o
     ) AS n ON d.varies IS NULL
     WHERE n.rate > '0' OR d.varies IS NOT NULL OR d.kind = 'slots';
    IF kind = 'slots' THEN -- a row says nothing once no slot is in use, whatever the numbers
        rate := NULL;
        varies := '0';
        RETURN;
    END IF;
    nothing := nothing OR varies IS NOT NULL AND EXISTS (SELECT 1 FROM ratelimit.overrides AS o
         WHERE o.name = name AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > since
             AND coalesce(least(o.until, o.removed_at), 'infinity') > since);
END
$body$;

-- Sweeps one batch. It deletes all rows of a key or none: a missing shard is not full while other shards have rows.
--
-- It locks only the rows that it deletes and never waits for a lock: locked rows are in use and stay. There are three statements,
-- each with its own snapshot: a plain read, since locking writes; locking, which checks the row's latest version; and the DELETE,
-- which sees the locked rows (CONCURRENCY.md, F3).
--
-- The numbers are those of ratelimit._sweep_numbers. If they vary, keys with an override stay.
CREATE OR REPLACE FUNCTION ratelimit._sweep_rows(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, varies interval,
    first text, now timestamptz,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
-- Read along the primary key, whatever the statistics say.
SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
DECLARE
    -- Rows must have been full an hour ago: then a clock that steps back by up to an hour after a sweep changes nothing.
    at   timestamptz := coalesce(now, clock_timestamp()) - interval '1 hour';
    keys text[]; -- the keys whose rows are all idle: according to a plain read, then locked
    held text[]; -- those of which something may be held
    kept timestamptz := at + interval '7 days';
    own  text;   -- the id of a hold
    k    text;
    n    integer;
    grid timestamptz; -- the start of the windows of k
    idle boolean;     -- k
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    IF first IS NULL OR NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name,
            CASE WHEN first IS NULL THEN 'first must be a key or '''', not NULL' ELSE pg_catalog.format('now must be finite, not %s', now) END);
    END IF;
    deleted := 0;
    -- Each key may have a zone and an anchor of its own. By any of them, as many windows have begun since ts as the longest
    -- windows fit in between, so the grid of a calendar window begins at ts.
    IF kind = 'calendar window' THEN
        period := ratelimit._longest(period);
    END IF;

    SELECT pg_catalog.array_agg(k.key) FILTER (WHERE k.idle), CASE WHEN sum(k.rows) = '1000' THEN max(k.key) END INTO keys, next
      FROM (
        SELECT r.key, count(*) AS rows, count(*) = min(r.shards) AND count(*) = max(r.shards) AND bool_and(
               ratelimit._idle(r.value, r.ts, r.shards, at,
                   rate, period, capacity, r.grid, varies)) AS idle
          FROM (
            SELECT r.*, CASE WHEN NOT isfinite(r.ts) OR r.ts > at THEN NULL WHEN kind = 'calendar window' THEN r.ts
                   WHEN kind = 'fixed window' THEN ratelimit._grid(name, r.key, period, kind, start) END AS grid
              FROM ratelimit.limits AS r
             WHERE r.name = name AND r.key >= first
             ORDER BY r.key, r.shard
             LIMIT 1000
          ) AS r
         GROUP BY r.key
      ) AS k;
    IF next = first THEN -- the next batch begins with the last key, which may have more rows, but only once
        next := first || E'\x01'; -- the next possible key
    END IF;
    IF varies IS NOT NULL AND kind <> 'slots' THEN
        keys := ARRAY(SELECT u.key
            FROM pg_catalog.unnest(keys) AS u (key)
           WHERE NOT EXISTS (SELECT 1 FROM ratelimit.overrides AS o
                 WHERE o.name = name AND o.key = u.key AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > clock_timestamp() - interval '1 day'
                   AND coalesce(least(o.until, o.removed_at), 'infinity') > clock_timestamp() - interval '1 day'));
    END IF;
    IF coalesce(pg_catalog.cardinality(keys), 0) = 0 THEN
        RETURN;
    END IF;

    IF ratelimit._distributed() THEN -- key by key, each on its server
        FOREACH k IN ARRAY keys LOOP
            grid := CASE WHEN kind = 'fixed window' THEN ratelimit._grid(name, k, period, kind, start) END;
            SELECT count(*) = min(l.shards) AND count(*) = max(l.shards) INTO idle
              FROM (
                SELECT r.shards
                  FROM ratelimit.limits AS r
                 WHERE r.name = name AND r.key = k
                   AND ratelimit._idle(r.value, r.ts, r.shards, at,
                           rate, period, capacity, CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE grid END, varies)
                   FOR UPDATE OF r SKIP LOCKED
              ) AS l;
            IF idle THEN
                DELETE FROM ratelimit.limits AS r WHERE r.name = name AND r.key = k;
                GET DIAGNOSTICS n = ROW_COUNT;
                deleted := deleted + n;
            END IF;
        END LOOP;
        RETURN;
    END IF;

    -- LATERAL and = ANY make the planner look keys up one by one, whatever its estimates (CONCURRENCY.md, E6).
    SELECT pg_catalog.array_agg(k.key), pg_catalog.array_agg(k.key) FILTER (WHERE k.held) INTO keys, held
      FROM (
        SELECT l.key, bool_or(l.lapses IS NOT NULL) AS held
          FROM (
            SELECT u.key, CASE WHEN kind = 'fixed window' THEN ratelimit._grid(name, u.key, period, kind, start) END AS grid
              FROM pg_catalog.unnest(keys) AS u (key)
            OFFSET 0
          ) AS g
         CROSS JOIN LATERAL (
            SELECT r.key, r.shards, r.lapses
              FROM ratelimit.limits AS r
             CROSS JOIN LATERAL (SELECT CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE g.grid END AS grid) AS own
             WHERE r.name = name AND r.key = g.key
               AND ratelimit._idle(r.value, r.ts, r.shards, at,
                       rate, period, capacity, own.grid, varies)
               FOR UPDATE OF r SKIP LOCKED
          ) AS l
         GROUP BY l.key
        HAVING count(*) = min(l.shards) AND count(*) = max(l.shards)
      ) AS k;

    -- What expired before then gives nothing back, since the row was full. What is still held keeps its row, which tells when it expires.
    FOREACH k IN ARRAY coalesce(held, '{}') LOOP
        FOR own IN
            SELECT h.id FROM ratelimit.holds AS h
             WHERE h.name = name AND h.key = k AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= at
             LIMIT 1000
               FOR UPDATE SKIP LOCKED
        LOOP
            UPDATE ratelimit.holds AS h SET state = 'lapsed', rest = h.count, until = kept
             WHERE h.name = name AND h.key = k AND h.id = own;
        END LOOP;
        IF EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.key = k AND h.state = 'held' AND h.token IS NOT NULL) THEN
            keys := pg_catalog.array_remove(keys, k);
        END IF;
    END LOOP;
    DELETE FROM ratelimit.limits AS r
     USING pg_catalog.unnest(keys) AS u (key)
     WHERE r.name = ANY (ARRAY[CASE WHEN u.key IS NOT NULL THEN name END]) AND r.key = u.key;
    GET DIAGNOSTICS deleted = ROW_COUNT;
END
$body$;

-- The same as ratelimit.sweep, at an instant that the library may choose.
CREATE OR REPLACE FUNCTION ratelimit._sweep(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    first text, varies interval, now timestamptz,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
AS $body$
DECLARE
    n record;
BEGIN
    SELECT s.* INTO n FROM ratelimit._sweep_numbers(name, rate, period, kind, capacity, start, varies) AS s;
    IF n.nothing THEN
        deleted := 0;
        RETURN;
    END IF;
    SELECT r.deleted, r.next INTO deleted, next
      FROM ratelimit._sweep_rows(name, n.rate, n.period, n.kind, n.capacity, n.start, n.varies, first, now) AS r;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.sweep(
    name text, rate double precision DEFAULT NULL, period interval DEFAULT NULL, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    first text DEFAULT '', varies interval DEFAULT NULL,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
AS $body$
DECLARE
    h record;
BEGIN
    SELECT s.deleted, s.next INTO deleted, next FROM ratelimit._sweep(name COLLATE "C", rate, period, kind, capacity, start, first, varies, NULL) AS s;
    SELECT name AS next_name, first AS next_key, ''::text AS next_id INTO h;
    LOOP -- the holds of these keys
        SELECT s.* INTO h FROM ratelimit._sweep_holds(h.next_name COLLATE "C", h.next_key COLLATE "C", h.next_id COLLATE "C", NULL, name COLLATE "C") AS s;
        EXIT WHEN (h.next_name = name COLLATE "C" AND (next IS NULL OR h.next_key < next COLLATE "C")) IS NOT TRUE;
        IF h.deleted + h.ended > 0 THEN -- what it has locked goes first
            next := h.next_key;
            EXIT;
        END IF;
    END LOOP;
END
$body$;

COMMENT ON FUNCTION ratelimit.sweep(text, double precision, interval, text, double precision, timestamptz, text, interval) IS $text$
Deletes rows of a rate limit that have been full for an hour. A missing row means the same. A call looks at 1000 rows, in the order
of their keys, and never waits for a lock. It holds the locks of the deleted rows until the transaction ends: commit after each call.
It also gives back what expired holds of these keys hold, and forgets holds that are over, of 1000 holds at a time.

    SELECT * FROM ratelimit.sweep('sendMessage')

A row is deleted if it is full (of slots: if none is in use) by every definition of this name that a program has published or replaced within 7 days, and by every
override of it within a day. Where their kinds, periods or starts differ, nothing is deleted. If programs do not publish their limits, pass
the numbers that they use. They count in addition to those that are published:

    SELECT * FROM ratelimit.sweep('sendMessage', rate => 10, period => '1 minute', capacity => 20)

Arguments: as for ratelimit.consume, without zone and anchor, and
  varies   if keys have numbers of their own, the longest time in which any of them fills a row; default NULL: no key has any. Then rows
           are deleted that were not used for so long, unless they are in debt, or their key has an override
  first    the key to begin with; default '', the first of all

Result:
  deleted  the number of deleted rows, without holds
  next     the argument first for the next call; NULL: this was the last

Errors:
  RL003    the transaction is not READ COMMITTED
  22023    an argument is invalid; without numbers, also if no program has published the limit
$text$;

-- Gives back the expired holds of one key, unless its rows are locked or its numbers are not known. A key without rows is full: nothing comes back,
-- whatever its numbers, and no row of it is locked.
CREATE OR REPLACE FUNCTION ratelimit._sweep_key(name text, key text, now timestamptz) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    q    ratelimit._request;
    m    integer;
    n    integer;
    at   timestamptz := coalesce(now, clock_timestamp());
    kept timestamptz := at + interval '7 days';
    rec  record;
BEGIN
    SELECT count(*) INTO n FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key;
    IF n = 0 THEN
        m := 0;
        FOR rec IN
            SELECT h.id FROM ratelimit.holds AS h
             WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= at
             LIMIT 1000
               FOR UPDATE SKIP LOCKED
        LOOP
            -- A recount has counted this hold meanwhile: the next sweep gives it back. Asked under the hold's lock, for which a later recount waits.
            EXIT WHEN EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key);
            UPDATE ratelimit.holds AS h SET state = 'lapsed', rest = h.count, until = kept
             WHERE h.name = name AND h.key = key AND h.id = rec.id;
            m := m + 1;
        END LOOP;
        RETURN m;
    END IF;
    q.rate := 0;
    IF EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.unit = 'tokens') THEN
        q := ratelimit._prepare('settle', name, nullif(key, ''), NULL, NULL, 0, 'token bucket', NULL, NULL, 1, key = '', NULL, NULL,
            NULL, NULL, now, later => true, standing => true);
        IF q.effect <> 'numbers' THEN
            RETURN 0;
        END IF;
    END IF;
    SELECT count(*) INTO m FROM (
        SELECT r.shard FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key ORDER BY r.shard FOR UPDATE SKIP LOCKED
    ) AS l;
    SELECT count(*) INTO n FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key;
    IF m = 0 OR m <> n THEN
        RETURN 0;
    END IF;
    RETURN ratelimit._reclaim(name, key, q.rate, q.period, q.capacity, q.start, now, q.windows, 1000);
END
$body$;

-- Sweeps one batch of holds: the next 1000 rows of the primary key, after the given one. It deletes rows that count as absent since an hour,
-- and gives back expired holds, where the numbers of the limit are known: published, and the same for all keys. It never waits for a lock.
-- only_name: of this limit alone. next_name is NULL after the last batch. Commit after each: it holds the locks until then. Each also deletes overrides that are over since a year.
CREATE OR REPLACE FUNCTION ratelimit._sweep_holds(
    after_name text, after_key text, after_id text, now timestamptz, only_name text DEFAULT NULL,
    OUT deleted integer, OUT ended integer, OUT next_name text, OUT next_key text, OUT next_id text
)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
DECLARE
    at    timestamptz := coalesce(now, clock_timestamp());
    hour  timestamptz := at - interval '1 hour'; -- then a clock that steps back by up to an hour changes nothing
    year  timestamptz := clock_timestamp() - interval '1 year'; -- overrides end by the server's clock
    seen  integer := 0;
    gone  integer := 0;
    due   text[] := '{}'; -- names and keys with expired holds, in pairs
    rec   record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    deleted := 0;
    ended := 0;
    -- The history of overrides, of a role that may. What ratelimit.add has added is subtracted later, and stays.
    next_name := after_name; next_key := after_key; next_id := after_id;
    IF (SELECT has_table_privilege(y.typrelid, 'DELETE') AND has_table_privilege(y.typrelid, 'UPDATE') FROM pg_catalog.pg_type AS y
            WHERE y.oid = pg_catalog.pg_typeof(NULL::ratelimit.overrides)::oid) THEN
        DELETE FROM ratelimit.overrides AS o WHERE o.id = ANY (ARRAY(
            SELECT f.id FROM ratelimit.overrides AS f
             WHERE greatest(f.made_at, coalesce(least(f.until, f.removed_at), 'infinity')) < year AND f.added IS NULL
             LIMIT 1000 FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS gone = ROW_COUNT;
    END IF;
    FOR rec IN
        SELECT h.name, h.key, h.id, h.unit, h.state <> 'held' AND h.until < hour AS over, h.state = 'held' AND h.token IS NOT NULL AND h.until <= at AS expired
          FROM ratelimit.holds AS h
         WHERE (h.name, h.key, h.id) > (after_name, after_key, after_id)
         ORDER BY h.name, h.key, h.id
         LIMIT 1000
    LOOP
        EXIT WHEN rec.name <> only_name;
        seen := seen + 1;
        IF rec.expired AND (rec.name IS DISTINCT FROM due[pg_catalog.cardinality(due) - 1] OR rec.key IS DISTINCT FROM due[pg_catalog.cardinality(due)]) THEN
            due := pg_catalog.array_cat(due, ARRAY[rec.name::text, rec.key::text]);
        END IF;
        next_name := rec.name; next_key := rec.key; next_id := rec.id;
        CONTINUE WHEN NOT rec.over;
        PERFORM 1 FROM ratelimit.holds AS h -- asks again, on the newest version
          WHERE h.name = rec.name AND h.key = rec.key AND h.id = rec.id AND h.state <> 'held' AND h.until < hour FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM ratelimit.holds AS h WHERE h.name = rec.name AND h.key = rec.key AND h.id = rec.id;
        deleted := deleted + 1;
    END LOOP;
    FOR i IN 1..pg_catalog.cardinality(due) / 2 LOOP
        ended := ended + ratelimit._sweep_key(due[2 * i - 1], due[2 * i], now);
    END LOOP;
    IF seen < 1000 AND gone < 1000 THEN
        next_name := NULL; next_key := NULL; next_id := NULL;
    END IF;
END
$body$;

-- The arguments that the functions share:
--   rate, period   `rate` tokens per `period` (an interval without months)
--   capacity       the most tokens that can be saved up
--   start          NULL: a token bucket, refilled continuously.
--                  Otherwise: a fixed window, which gets `rate` tokens at each instant start + k * period. start must lie
--                  before every instant that occurs; the library moves it to the first period after 0001-01-01 UTC.
--   windows        a calendar window: the starts of its windows around the present, in order. It gets `rate` tokens at each.
--                  Then start is the first of them, and period the longest of those before, or 0 (see ratelimit._available). Refills after the last one
--                  are not counted. NULL: not a calendar window
--   count, floor   take `count` if at least `floor` is left: 0 usually, -maxReserved to reserve (-1e300 at the least), -Infinity to charge; always less the
--                  tolerance (ratelimit._tolerance), which the caller subtracts
--   now            NULL: clock_timestamp()
--   or_raise       true: a denial is raised as an error (ratelimit._raise) instead of being returned
-- Package ratelimit and the SQL function ratelimit.consume validate them before the call. See ratelimit._valid.

-- Takes tokens from one limit without shards. The benchmarks compare every other path with this one. Its length costs more
-- than its arithmetic, since Postgres looks up each operator again for every call.
-- expect_denial: read the row before the UPDATE. The decision is the same; a denial is faster and a grant slower.
CREATE OR REPLACE FUNCTION ratelimit._consume(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, floor double precision, now timestamptz DEFAULT NULL, expect_denial boolean DEFAULT false,
    or_raise boolean DEFAULT false, windows timestamptz[] DEFAULT NULL
) RETURNS ratelimit._decision
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    attempt integer;
    at      timestamptz;
    upto    timestamptz;
    value   double precision;
    ts      timestamptz;
    one     boolean;
    lapses  timestamptz;
    denied  boolean;
    d       ratelimit._decisions;
BEGIN
    IF ratelimit._valid(rate, period, capacity, count, now) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
    END IF;
    LOOP
        -- The UPDATE locks and writes the row only if it has enough at first sight. After a wait for another transaction,
        -- READ COMMITTED checks the row's new version; higher levels raise 40001 (CONCURRENCY.md, A1 and A2). There are
        -- three UPDATEs because the planner simplifies the sum for a constant start and constant windows.
        IF NOT expect_denial THEN
            at := coalesce(now, clock_timestamp());
            IF start IS NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            ELSIF windows IS NOT NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, start, windows) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, start, windows) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            ELSE
                upto := date_bin(period, at, start);
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            END IF;
            IF value IS NOT NULL THEN
                IF value < '0' AND floor > '-Infinity' THEN -- a reservation
                    UPDATE ratelimit.limits AS r
                       SET promised = greatest(r.promised, ratelimit._promise(value, floor, ts, rate, period, capacity))
                     WHERE r.name = name AND r.key = key AND r.shard = 0;
                END IF;
                RETURN ROW(true, at, value, ts)::ratelimit._decision;
            END IF;
        END IF;

        -- Locks nothing. The UPDATE may have waited, so the clock is read again: a row inserted with the old instant would
        -- be refilled for the wait (A5).
        SELECT r.value, r.ts, r.shards = 1, r.lapses INTO value, ts, one, lapses
          FROM ratelimit.limits AS r
         WHERE r.name = name AND r.key = key AND r.shard = 0;
        at := coalesce(now, clock_timestamp());
        IF one THEN
            EXIT WHEN lapses <= at;
            IF start IS NULL THEN
                denied := (ratelimit._available(value, ts, at, rate, period, capacity, NULL) - count >= floor) IS NOT TRUE;
            ELSIF windows IS NOT NULL THEN
                denied := (ratelimit._available(value, ts, at, rate, period, capacity, start, windows) - count >= floor) IS NOT TRUE;
            ELSE
                denied := (ratelimit._available(value, ts, date_bin(period, at, start), rate, period, capacity, start) - count >= floor) IS NOT TRUE;
            END IF;
            IF denied THEN
                IF or_raise THEN
                    PERFORM ratelimit._raise(ARRAY[name], at, ARRAY[1], ARRAY[value], ARRAY[ts]);
                END IF;
                RETURN ROW(false, at, value, ts)::ratelimit._decision;
            END IF;
            -- The row has enough by now: try again.
        ELSIF EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key) THEN
            -- The limit was sharded before. Merge its rows into one, take nothing, and try again. If the library's list is too short for
            -- the refills of a row, it must ask again with a longer one, as for any row that is as old.
            IF period = '0' AND EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.ts < windows[1]) THEN
                RETURN ROW(false, at, '-Infinity', '-infinity')::ratelimit._decision;
            END IF;
            PERFORM ratelimit._apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
                ARRAY[start], ARRAY[1], ARRAY[0], ARRAY['-Infinity'::double precision], ARRAY[0], ARRAY[0], false, now, false,
                windows, ARRAY[1], ARRAY[pg_catalog.cardinality(windows)]);
        ELSIF (capacity - count >= floor AND isfinite(coalesce(start, 'epoch'))) IS NOT TRUE THEN
            RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_literal(name) || ': the request can never be granted';
        ELSE
            -- Waits for another transaction's INSERT of the same key. If that commits, nothing is inserted here.
            INSERT INTO ratelimit.limits AS r (name, key, shard, shards, value, ts, promised)
            VALUES (name, key, 0, 1, capacity - count, at, ratelimit._promise(capacity - count, floor, at, rate, period, capacity))
            ON CONFLICT DO NOTHING
            RETURNING r.value, r.ts INTO value, ts;
            IF FOUND THEN
                RETURN ROW(true, at, value, ts)::ratelimit._decision;
            END IF;
        END IF;
        value := NULL;
        expect_denial := false;
        attempt := coalesce(attempt, 0) + 1;
        IF attempt = 100 THEN
            RAISE serialization_failure USING MESSAGE = 'rate limit ' || quote_literal(name) || ': lost 100 races in a row against other transactions';
        END IF;
    END LOOP;
    -- Holds of this key may have expired, and are ended first.
    d := ratelimit._apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
        ARRAY[start], ARRAY[1], ARRAY[count], ARRAY[floor], ARRAY[0], ARRAY[0], false, now, or_raise,
        windows, ARRAY[1], ARRAY[pg_catalog.cardinality(windows)]);
    RETURN ROW(d.granted, d.at, d.value[1], d.ts[1])::ratelimit._decision;
END
$body$;

-- False, asked only of a row that is not its key's only one. Its cost keeps the planner from reading a whole table because that has a few rows: a plan that was made then
-- is kept while the table grows.
CREATE OR REPLACE FUNCTION ratelimit._costly(shards smallint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE COST 1000000
AS $body$
BEGIN
    RETURN false;
END
$body$;

-- The arguments that the functions share:
--   rate, period   `rate` tokens per `period` (an interval without months)
--   capacity       the most that can be saved up
--   start          NULL: a token bucket, refilled continuously.
--                  Otherwise a fixed window: `rate` tokens at each instant start + k * period. start must lie before
--                  every instant that occurs; the library reduces it to the first period after 0001-01-01 UTC.
--   count, floor   take `count`, if that leaves at least `floor` (0; -maxReserved to reserve; -Infinity to charge)
--   now            NULL: clock_timestamp()
--   or_raise       true: a denial is an error instead of an answer, by _ratelimit_raise
-- They are validated by the callers: package ratelimit, and ratelimit(). See _ratelimit_valid.

-- Takes from one limit that is not sharded: the path that everything else is measured against. Every operator in it is
-- looked up again for every call; that, and not the arithmetic, is what its length costs. A caller who expects to be denied
-- can say so: then the row is read before it is written, which decides the same, a denial faster and a grant slower.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_consume(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, floor double precision, now timestamptz DEFAULT NULL, expect_denial boolean DEFAULT false,
    or_raise boolean DEFAULT false
) RETURNS /* TEMPLATE: schema */_ratelimit_decision
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    attempt integer;
    at      timestamptz;
    upto    timestamptz;
    value   double precision;
    ts      timestamptz;
    one     boolean;
    denied  boolean;
BEGIN
    IF /* TEMPLATE: schema */_ratelimit_valid(rate, period, capacity, count, now) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
    END IF;
    LOOP
        -- Locks the row if it has enough. Where it has to wait for another transaction, READ COMMITTED evaluates the
        -- WHERE again on the row's new version; REPEATABLE READ and SERIALIZABLE raise 40001. A row that lacks tokens
        -- at first sight is neither locked nor written. (Two statements, since the planner reduces the sum for a
        -- constant start.)
        IF NOT expect_denial THEN
            at := coalesce(now, clock_timestamp());
            IF start IS NULL THEN
                UPDATE /* TEMPLATE: schema */rate_limits AS r
                   SET value = /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
                   AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            ELSE
                upto := date_bin(period, at, start);
                UPDATE /* TEMPLATE: schema */rate_limits AS r
                   SET value = /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
                   AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            END IF;
            IF value IS NOT NULL THEN
                RETURN ROW(true, at, value, ts)::/* TEMPLATE: schema */_ratelimit_decision;
            END IF;
        END IF;

        -- Locks nothing. The UPDATE may have waited, so the clock is read again: an INSERT with an old instant would be
        -- refilled for time that has passed.
        SELECT r.value, r.ts, r.shards = 1 INTO value, ts, one
          FROM /* TEMPLATE: schema */rate_limits AS r
         WHERE r.name = name AND r.key = key AND r.shard = 0;
        at := coalesce(now, clock_timestamp());
        IF one THEN
            IF start IS NULL THEN
                denied := (/* TEMPLATE: schema */_ratelimit_available(value, ts, at, rate, period, capacity, NULL) - count >= floor) IS NOT TRUE;
            ELSE
                denied := (/* TEMPLATE: schema */_ratelimit_available(value, ts, date_bin(period, at, start), rate, period, capacity, start) - count >= floor) IS NOT TRUE;
            END IF;
            IF denied THEN
                IF or_raise THEN
                    PERFORM /* TEMPLATE: schema */_ratelimit_raise(ARRAY[name], at, ARRAY[1], ARRAY[value], ARRAY[ts]);
                END IF;
                RETURN ROW(false, at, value, ts)::/* TEMPLATE: schema */_ratelimit_decision;
            END IF;
            -- It has enough by now: go round.
        ELSIF EXISTS (SELECT FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = name AND r.key = key) THEN
            -- The rows are those of a limit that was sharded. Make them one, taking nothing, and go round.
            PERFORM /* TEMPLATE: schema */_ratelimit_apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
                ARRAY[start], ARRAY[1], ARRAY[0], ARRAY['-Infinity'::double precision], ARRAY[0], ARRAY[0], false, now);
        ELSIF (capacity - count >= floor AND isfinite(coalesce(start, 'epoch'))) IS NOT TRUE THEN
            RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_literal(name) || ': this can never be granted';
        ELSE
            -- Waits for another transaction's INSERT of the same key; if that commits, nothing is inserted here.
            INSERT INTO /* TEMPLATE: schema */rate_limits AS r (name, key, shard, shards, value, ts)
            VALUES (name, key, 0, 1, capacity - count, at)
            ON CONFLICT DO NOTHING
            RETURNING r.value, r.ts INTO value, ts;
            IF FOUND THEN
                RETURN ROW(true, at, value, ts)::/* TEMPLATE: schema */_ratelimit_decision;
            END IF;
        END IF;
        value := NULL;
        expect_denial := false;
        attempt := coalesce(attempt, 0) + 1;
        IF attempt = 100 THEN
            RAISE serialization_failure USING MESSAGE = 'rate limit ' || quote_literal(name) || ': lost 100 races in a row';
        END IF;
    END LOOP;
END
$body$;

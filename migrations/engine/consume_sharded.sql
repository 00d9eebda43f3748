-- Takes from one limit that is sharded: from one shard, if that has enough, with an ord of NULL, or else what _ratelimit_apply does.
--
-- Of shard_a and shard_b it takes the better, by a plain read. If they are the same, or above READ COMMITTED, it reads none
-- but shard_a: one that is read and not taken conflicts with whoever takes it.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_consume_sharded(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer,
    count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false
) RETURNS /* TEMPLATE: schema */_ratelimit_decisions
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    each      double precision; -- rate of one shard
    room      double precision; -- capacity of one shard
    upto      timestamptz;
    at        timestamptz;
    pick      integer;
    new_value double precision;
    new_ts    timestamptz;
BEGIN
    IF (/* TEMPLATE: schema */_ratelimit_valid(rate, period, capacity, count, now) AND floor <= '0') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
    END IF;
    at := coalesce(now, clock_timestamp());
    upto := CASE WHEN start IS NULL THEN at ELSE date_bin(period, at, start) END;
    each := rate / shards::double precision;
    room := capacity / shards::double precision;
    pick := shard_a;
    IF shard_a <> shard_b AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        SELECT r.shard INTO pick
          FROM /* TEMPLATE: schema */rate_limits AS r
         WHERE r.name = name AND r.key = key AND r.shard IN (shard_a, shard_b)
         ORDER BY /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, each, period, room, start) DESC, r.shard LIMIT 1;
    END IF;

    -- A shard takes only what it has: debts are shared by all shards. The UPDATE locks its row if that has enough,
    -- and evaluates its WHERE again on what it has waited for (or raises 40001). If that fails, the
    -- subtransaction gives the lock back: _ratelimit_apply locks all shards, in order.
    BEGIN
        IF start IS NULL THEN
            UPDATE /* TEMPLATE: schema */rate_limits AS r
               SET value = /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, each, period, room, NULL) - count,
                   ts = greatest(r.ts, at)
             WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards
               AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, each, period, room, NULL) - count >= '0'
            RETURNING r.value, r.ts INTO new_value, new_ts;
        ELSE
            UPDATE /* TEMPLATE: schema */rate_limits AS r
               SET value = /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, each, period, room, start) - count,
                   ts = greatest(r.ts, at)
             WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards
               AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, upto, each, period, room, start) - count >= '0'
            RETURNING r.value, r.ts INTO new_value, new_ts;
        END IF;
        IF new_value IS NULL THEN
            RAISE SQLSTATE 'RL001';
        END IF;
        RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts])::/* TEMPLATE: schema */_ratelimit_decisions;
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;

    RETURN /* TEMPLATE: schema */_ratelimit_apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
        ARRAY[start], ARRAY[shards], ARRAY[count], ARRAY[floor], ARRAY[shard_a], ARRAY[shard_b], false, now, or_raise);
END
$body$;

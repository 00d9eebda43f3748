-- Takes tokens from one sharded limit. If one shard has enough, it takes from that shard and returns an ord of NULL.
-- Otherwise ratelimit._apply decides.
--
-- A plain read picks the fuller of shard_a and shard_b. Above READ COMMITTED, or if both are the same, only shard_a is used:
-- a shard that is read but not taken from conflicts with the transactions that take from it (CONCURRENCY.md, C6).
CREATE OR REPLACE FUNCTION ratelimit._consume_sharded(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer,
    count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    windows timestamptz[] DEFAULT NULL
) RETURNS ratelimit._decisions
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    each      double precision; -- the rate of one shard
    room      double precision; -- the capacity of one shard
    upto      timestamptz;
    at        timestamptz;
    pick      integer;
    new_value double precision;
    new_ts    timestamptz;
BEGIN
    IF (ratelimit._valid(rate, period, capacity, count, now) AND floor <= '0') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
    END IF;
    at := coalesce(now, clock_timestamp());
    upto := ratelimit._upto(at, period, start, windows);
    each := rate / shards::double precision;
    room := capacity / shards::double precision;
    pick := shard_a;
    IF shard_a <> shard_b AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        SELECT r.shard INTO pick
          FROM ratelimit.limits AS r
         WHERE r.name = name AND r.key = key AND r.shard IN (shard_a, shard_b)
         ORDER BY ratelimit._available(r.value, r.ts, upto, each, period, room, start, windows) DESC, r.shard LIMIT 1;
    END IF;

    -- A shard takes only tokens that it has, since all shards share the debts (C1). The UPDATE locks the row if it has enough, and
    -- checks it again after a wait (or raises 40001). If it then has too little, the subtransaction releases the lock, and
    -- ratelimit._apply locks all shards in order (C4).
    BEGIN
        IF start IS NULL THEN
            UPDATE ratelimit.limits AS r
               SET value = ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count,
                   ts = greatest(r.ts, at)
             WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards AND (r.lapses <= at) IS NOT TRUE
               AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count >= '0'
            RETURNING r.value, r.ts INTO new_value, new_ts;
        ELSE
            UPDATE ratelimit.limits AS r
               SET value = ratelimit._available(r.value, r.ts, upto, each, period, room, start, windows) - count,
                   ts = greatest(r.ts, at)
             WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards AND (r.lapses <= at) IS NOT TRUE
               AND ratelimit._available(r.value, r.ts, upto, each, period, room, start, windows) - count >= '0'
            RETURNING r.value, r.ts INTO new_value, new_ts;
        END IF;
        IF new_value IS NULL THEN
            RAISE SQLSTATE 'RL001';
        END IF;
        RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts], NULL)::ratelimit._decisions;
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;

    RETURN ratelimit._apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
        ARRAY[start], ARRAY[shards], ARRAY[count], ARRAY[floor], ARRAY[shard_a], ARRAY[shard_b], false, now, or_raise,
        windows, ARRAY[1], ARRAY[pg_catalog.cardinality(windows)]);
END
$body$;

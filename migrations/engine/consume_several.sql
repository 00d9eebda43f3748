-- Takes tokens from several limits without shards, all or nothing. The arguments are the same as for ratelimit._apply.
-- If the limits are in the common lock order, it takes from them one by one and returns an ord of NULL. Otherwise
-- ratelimit._apply decides.
--
-- The first pass reads all rows but the first, since a denial must not write; the first UPDATE checks its own row. The second
-- pass updates. If an UPDATE loses a race, the tokens taken before it are given back (CONCURRENCY.md, B1).
--
-- The variables save time: PL/pgSQL keeps a loop's simple expressions for the transaction, but starts each statement afresh.
CREATE OR REPLACE FUNCTION ratelimit._consume_several(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], floors double precision[], now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._decisions
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    n         CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    name      text;
    key       text;
    rate      double precision;
    period    interval;
    capacity  double precision;
    start     timestamptz;
    listed    timestamptz[]; -- the windows of a calendar window
    upto      timestamptz;
    count     double precision;
    floor     double precision;
    new_value double precision;
    new_ts    timestamptz;
    at        timestamptz := coalesce(now, clock_timestamp());
    value     double precision[];
    ts        timestamptz[];
BEGIN
    <<passes>>
    FOR pass IN 1..2 LOOP
        FOR p IN 3 - pass..n LOOP
            name := names[p]; key := keys[p]; capacity := capacities[p]; count := counts[p]; floor := floors[p];
            IF pass = 1 THEN
                SELECT r.value, r.ts INTO new_value, new_ts
                  FROM ratelimit.limits AS r
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE;
                EXIT passes WHEN (FOUND AND (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (name, key)) IS NOT TRUE;
                -- A refill only adds tokens, up to the capacity, so most rows need no calculation.
                CONTINUE WHEN least(new_value, capacity) - count >= floor;
            END IF;
            rate := rates[p]; period := periods[p]; start := starts[p];
            IF start IS NOT NULL THEN
                listed := windows[firsts[p]:lasts[p]];
                upto := CASE WHEN listed IS NULL THEN date_bin(period, at, start) ELSE at END;
            END IF;
            IF pass = 1 THEN
                IF start IS NULL THEN
                    new_value := ratelimit._available(new_value, new_ts, at, rate, period, capacity, NULL);
                ELSIF listed IS NULL THEN
                    new_value := ratelimit._available(new_value, new_ts, upto, rate, period, capacity, start);
                ELSE
                    new_value := ratelimit._available(new_value, new_ts, upto, rate, period, capacity, start, listed);
                END IF;
                EXIT passes WHEN new_value - count < floor;
                CONTINUE;
            END IF;

            IF ratelimit._valid(rate, period, capacity, count, now) IS NOT TRUE THEN
                RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
            END IF;
            IF start IS NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            ELSIF listed IS NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            ELSE
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start, listed) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start, listed) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            END IF;
            IF NOT FOUND THEN
                FOR taken IN 1..p - 1 LOOP
                    UPDATE ratelimit.limits AS r
                       SET value = r.value + counts[taken]
                     WHERE r.name = names[taken] AND r.key = keys[taken] AND r.shard = 0;
                END LOOP;
                EXIT passes;
            END IF;
            value[p] := new_value; ts[p] := new_ts;
            IF p = n THEN
                RETURN ROW(true, at, NULL, value, ts, NULL)::ratelimit._decisions;
            END IF;
        END LOOP;
    END LOOP;

    RETURN ratelimit._apply('consume', names, keys, rates, periods, capacities, starts,
        pg_catalog.array_fill(1, ARRAY[n]), counts, floors, pg_catalog.array_fill(0, ARRAY[n]), pg_catalog.array_fill(0, ARRAY[n]), false, now, or_raise,
        windows, firsts, lasts);
END
$body$;

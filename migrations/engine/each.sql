-- Decides several requests, each by itself, in the caller's transaction: see Limiter.ConsumeEach. Requests of one limit with the same numbers may be
-- a group. The arguments have one position for each group, and are those of ratelimit._apply, but for
--
--   ends          the position of each group's last request
--   keys, counts  of each request. The requests are sorted by name and key (COLLATE "C"): rows are locked in that order. A group of
--                 several is of a token bucket without shards, with each key once. Requests for the same name and key are decided one after another.
--
-- Returns the rows of each request, with ord, its position, and whether it was granted (1, or 0) at `at`: the new rows, or those that led to
-- the denial. A sharded limit that took from one shard returns that shard alone. A request of more than the capacity is denied: for a key
-- without a row, it has one row, with the ts -infinity.
--
-- A group is one UPDATE. If that leaves a key undecided (one without a row, say), the group is decided request by request, since an INSERT of
-- a missing row must come before later keys are locked. The subtransaction undoes the UPDATE and releases its locks before that
-- (CONCURRENCY.md, I1).
CREATE OR REPLACE FUNCTION ratelimit._each(
    ends integer[], names text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floors double precision[],
    shard_a integer[], shard_b integer[], keys text[], counts double precision[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL,
    OUT ord integer[], OUT granted integer[], OUT at timestamptz[], OUT value double precision[], OUT ts timestamptz[]
)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    alone CONSTANT boolean := ratelimit._distributed(); -- each key is on a server of its own
    first integer := 1;
    last  integer;
    m     integer;
    forbidden boolean;
    run   record;
    one   ratelimit._decision;
    many  ratelimit._decisions;
BEGIN
    ord := '{}'; granted := '{}'; at := '{}'; value := '{}'; ts := '{}';
    FOR g IN 1..coalesce(pg_catalog.cardinality(ends), 0) LOOP
        last := ends[g];
        m := last - first + 1;
        IF (m > 0 AND (g = 1 OR (names[g - 1] COLLATE "C", keys[first - 1] COLLATE "C") <= (names[g], keys[first]))
            AND (m = 1 OR starts[g] IS NULL AND shards[g] = 1
                AND keys[first:last] = ARRAY(SELECT DISTINCT u.k COLLATE "C" AS k FROM pg_catalog.unnest(keys[first:last]) AS u (k) WHERE u.k IS NOT NULL ORDER BY k))) IS NOT TRUE THEN
            RAISE invalid_parameter_value USING MESSAGE = 'rate limits: the arguments are not in the order of locks';
        END IF;
        IF m > 3 AND NOT alone THEN -- for fewer, it saves nothing
            BEGIN
                SELECT k.* INTO run
                  FROM ratelimit._consume_keys(names[g], keys[first:last], rates[g], periods[g], capacities[g],
                      counts[first:last], now, floors[g], false) AS k;
                IF pg_catalog.cardinality(run.ord) <> m THEN
                    RAISE SQLSTATE 'RL001';
                END IF;
                ord := pg_catalog.array_cat(ord, CASE WHEN first = 1 THEN run.ord ELSE ARRAY(SELECT first - 1 + o.ord FROM pg_catalog.unnest(run.ord) WITH ORDINALITY AS o (ord, i) ORDER BY o.i) END);
                granted := pg_catalog.array_cat(granted, pg_catalog.array_cat(pg_catalog.array_fill(1, ARRAY[run.early]), pg_catalog.array_fill(0, ARRAY[m - run.early])));
                at := pg_catalog.array_cat(at, pg_catalog.array_cat(pg_catalog.array_fill(run.seen, ARRAY[run.early]), pg_catalog.array_fill(run.at, ARRAY[m - run.early])));
                value := pg_catalog.array_cat(value, run.value);
                ts := pg_catalog.array_cat(ts, run.ts);
                first := last + 1;
            EXCEPTION WHEN SQLSTATE 'RL001' THEN
                NULL;
            END;
        END IF;
        WHILE first <= last LOOP
            forbidden := (capacities[g] - counts[first] >= floors[g]) IS NOT TRUE; -- whatever is there
            IF shards[g] = 1 AND NOT forbidden THEN
                one := ratelimit._consume(names[g], keys[first], rates[g], periods[g], capacities[g], starts[g],
                    counts[first], floors[g], now, false, false, windows[firsts[g]:lasts[g]]);
                ord := pg_catalog.array_append(ord, first);
                granted := pg_catalog.array_append(granted, CASE WHEN one.granted THEN 1 ELSE 0 END);
                at := pg_catalog.array_append(at, one.at);
                value := pg_catalog.array_append(value, one.value);
                ts := pg_catalog.array_append(ts, one.ts);
            ELSE
                IF forbidden THEN -- the rows say when numbers of another time will grant it
                    many := ratelimit._apply('check', names[g:g], keys[first:first], rates[g:g], periods[g:g], capacities[g:g], starts[g:g],
                        shards[g:g], counts[first:first], floors[g:g], shard_a[g:g], shard_b[g:g], false, now, false, windows, firsts[g:g], lasts[g:g]);
                    IF pg_catalog.cardinality(many.value) = 0 THEN
                        many.value := ARRAY['0'::double precision];
                        many.ts := ARRAY['-infinity'::timestamptz];
                    END IF;
                ELSE
                    many := ratelimit._consume_sharded(names[g], keys[first], rates[g], periods[g], capacities[g], starts[g],
                        shards[g], counts[first], floors[g], shard_a[g], shard_b[g], now, false, windows[firsts[g]:lasts[g]]);
                END IF;
                m := pg_catalog.cardinality(many.value);
                ord := pg_catalog.array_cat(ord, pg_catalog.array_fill(first, ARRAY[m]));
                granted := pg_catalog.array_cat(granted, pg_catalog.array_fill(CASE WHEN many.granted THEN 1 ELSE 0 END, ARRAY[m]));
                at := pg_catalog.array_cat(at, pg_catalog.array_fill(many.at, ARRAY[m]));
                value := pg_catalog.array_cat(value, many.value);
                ts := pg_catalog.array_cat(ts, many.ts);
            END IF;
            first := first + 1;
        END LOOP;
    END LOOP;
END
$body$;

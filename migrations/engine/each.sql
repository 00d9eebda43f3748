-- Decides several requests, each by itself, in the caller's transaction: see Limiter.Each. The arguments are those of _ratelimit_apply,
-- with one position for each request. They are sorted by name and key (COLLATE "C"): rows are locked in that order. Requests for the same name and
-- key are decided one after another.
--
-- Returns the rows of each request, with ord, its position, and whether it was granted (1, or 0) at `at`: the new rows, or those that led to
-- the denial. A sharded limit that took from one shard returns that shard alone.
--
-- A run of requests for different keys of one token bucket is one UPDATE. If that leaves a key undecided (one without a row, say), the run is
-- decided request by request, since an INSERT of a missing row must come before later keys are locked. The subtransaction undoes the UPDATE
-- and releases its locks before that (CONCURRENCY.md, I1).
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_each(
    names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL,
    OUT ord integer[], OUT granted integer[], OUT at timestamptz[], OUT value double precision[], OUT ts timestamptz[]
)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    n     CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    alone CONSTANT boolean := /* TEMPLATE: schema */_ratelimit_distributed(); -- each key is on a server of its own
    first integer := 1; -- the run
    last  integer;
    m     integer;
    run   record;
    one   /* TEMPLATE: schema */_ratelimit_decision;
    many  /* TEMPLATE: schema */_ratelimit_decisions;
BEGIN
    ord := '{}'; granted := '{}'; at := '{}'; value := '{}'; ts := '{}';
    WHILE first <= n LOOP
        IF first > 1 AND ((names[first - 1] COLLATE "C", keys[first - 1] COLLATE "C") <= (names[first], keys[first])) IS NOT TRUE THEN
            RAISE invalid_parameter_value USING MESSAGE = 'rate limits: the arguments are not in the order of locks';
        END IF;
        last := first;
        WHILE last < n AND starts[first] IS NULL AND shards[first] = 1 AND starts[last + 1] IS NULL AND shards[last + 1] = 1
                AND names[last + 1] = names[first] AND keys[last] COLLATE "C" < keys[last + 1] AND rates[last + 1] = rates[first]
                AND periods[last + 1] = periods[first] AND capacities[last + 1] = capacities[first] AND floors[last + 1] = floors[first] LOOP
            last := last + 1;
        END LOOP;
        IF last >= first + 3 AND NOT alone THEN -- for fewer, it saves nothing
            m := last - first + 1;
            BEGIN
                SELECT k.* INTO run
                  FROM /* TEMPLATE: schema */_ratelimit_consume_keys(names[first], keys[first:last], rates[first], periods[first], capacities[first],
                      counts[first:last], now, floors[first], false) AS k;
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
            IF shards[first] = 1 THEN
                one := /* TEMPLATE: schema */_ratelimit_consume(names[first], keys[first], rates[first], periods[first], capacities[first], starts[first],
                    counts[first], floors[first], now, false, false, windows[firsts[first]:lasts[first]]);
                ord := pg_catalog.array_append(ord, first);
                granted := pg_catalog.array_append(granted, CASE WHEN one.granted THEN 1 ELSE 0 END);
                at := pg_catalog.array_append(at, one.at);
                value := pg_catalog.array_append(value, one.value);
                ts := pg_catalog.array_append(ts, one.ts);
            ELSE
                many := /* TEMPLATE: schema */_ratelimit_consume_sharded(names[first], keys[first], rates[first], periods[first], capacities[first], starts[first],
                    shards[first], counts[first], floors[first], shard_a[first], shard_b[first], now, false, windows[firsts[first]:lasts[first]]);
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

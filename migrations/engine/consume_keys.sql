-- The Go library's Coalescer calls the functions of this file and of coalesce.sql. One statement decides many calls that are in
-- no transaction of their own. ratelimit._each calls this one, too.

-- Takes counts[i] from each of several keys of one token bucket. Each key is granted if it has enough, whatever the others
-- have. Where it can decide, it is faster than ratelimit._coalesce.
--
--   keys, counts   each key once, in the order of COLLATE "C"; in any other order, calls could deadlock
--   now            NULL: clock_timestamp()
--   floor          the balance that each may leave: 0, or less by the tolerance
--   coalesced      the calls are of several callers
--
-- Returns the keys that it decided (ord, their positions in keys), each with its row after the decision. The first `early` keys
-- were granted at `seen`, the others denied at `at`. It leaves some keys to ratelimit._coalesce: keys without a row, since an
-- INSERT would lock out of order; rows of a limit that was sharded; keys that may have
-- expired holds; and keys that had too little at `seen` but enough at `at`.
--
-- For coalesced calls, the transaction must be READ COMMITTED, as for ratelimit._coalesce. Otherwise it raises SQLSTATE RL003. At any other
-- level, a row that was changed since the snapshot is 40001, as for one call.
CREATE OR REPLACE FUNCTION ratelimit._consume_keys(
    name text, keys text[],
    rate double precision, period interval, capacity double precision,
    counts double precision[], now timestamptz DEFAULT NULL, floor double precision DEFAULT 0, coalesced boolean DEFAULT true,
    OUT seen timestamptz, OUT at timestamptz, OUT early integer,
    OUT ord integer[], OUT value double precision[], OUT ts timestamptz[]
)
LANGUAGE plpgsql
-- The same settings as in ratelimit._coalesce.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off SET plan_cache_mode = force_generic_plan
AS $body$
BEGIN
    IF coalesced AND current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: coalesced calls need a READ COMMITTED transaction';
    END IF;
    IF ratelimit._distributed() THEN -- a transaction on several servers would cost more than it saves
        RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: the table is distributed, so each call is decided alone';
    END IF;
    IF (ratelimit._valid(rate, period, capacity, 0, now) AND '0' <= ALL (counts) AND '1e15' >= ALL (counts) AND floor <= '0') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limits: the arguments are not valid';
    END IF;

    -- This UPDATE decides as the one in ratelimit._consume does. It locks rows in the order of keys only if the plan looks up one key
    -- after another. The expressions of i and = ANY rule out plans that walk the index instead (CONCURRENCY.md, E6).
    seen := coalesce(now, clock_timestamp());
    WITH u AS (
        UPDATE ratelimit.limits AS r
           SET value = ratelimit._available(r.value, r.ts, seen, rate, period, capacity, NULL) - counts[i],
               ts = greatest(r.ts, seen)
          FROM generate_series(1, pg_catalog.cardinality(keys)) AS i
         WHERE r.name = ANY (ARRAY[CASE WHEN i > 0 THEN name END]) AND r.key = keys[i] AND r.shard = 0 * i AND r.shards = 1 + 0 * i
           AND (r.lapses <= seen) IS NOT TRUE
           AND (least(r.value, capacity) >= counts[i] -- most rows have: this saves calculating their refill twice
                OR ratelimit._available(r.value, r.ts, seen, rate, period, capacity, NULL) - counts[i] >= floor)
        RETURNING i, r.value, r.ts
    )
    SELECT coalesce(pg_catalog.array_agg(u.i), '{}'), pg_catalog.array_agg(u.value), pg_catalog.array_agg(u.ts)
      INTO ord, value, ts
      FROM u;
    early := pg_catalog.cardinality(ord);

    -- A plain read finds the denials.
    at := coalesce(now, clock_timestamp()); -- the UPDATE may have waited
    IF early < pg_catalog.cardinality(keys) THEN
        SELECT pg_catalog.array_cat(ord, pg_catalog.array_agg(i)), pg_catalog.array_cat(value, pg_catalog.array_agg(r.value)),
               pg_catalog.array_cat(ts, pg_catalog.array_agg(r.ts))
          INTO ord, value, ts
          FROM (SELECT generate_series(1, pg_catalog.cardinality(keys)) EXCEPT SELECT pg_catalog.unnest(ord)) AS rest (i)
         CROSS JOIN LATERAL (
            SELECT * FROM ratelimit.limits AS r WHERE r.name = name AND r.key = keys[i] AND r.shard = 0 AND r.shards = 1 OFFSET 0
          ) AS r
         WHERE ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - counts[i] < floor AND (r.lapses <= at) IS NOT TRUE;
    END IF;
END
$body$;

-- Counts what is used of one limit and key against another, such as those of a customer's old and new plan. The arrays have two
-- positions: 1 is the limit to move from, 2 the limit to move to. Move in internal/algebra has the rule.
--
--   floor  the lowest balance that a move may leave: 0, or less if the limit to move to may owe tokens
--
-- The limit to move to gets no more tokens than it has, and no token comes back to the other. So no move adds a token, also one
-- that is repeated or that goes there and back. It returns the balance of the limit to move to.
--
-- Locks all rows of both limits, in the common order (name, key, shard): see ratelimit._lock (CONCURRENCY.md, H).
CREATE OR REPLACE FUNCTION ratelimit._move(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    floor double precision, now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    at      timestamptz;
    places  integer[];          -- the positions in lock order
    totals  double precision[] := '{}'; -- the tokens in all rows of each limit
    latest  timestamptz;        -- the latest ts of all rows of both limits, or now if that is later
    v       double precision[]; -- the values of one limit's rows
    t       timestamptz[];      -- their ts
    m       integer;            -- their number
    alike   boolean;            -- true if they have the limit's number of shards
    last    timestamptz;        -- the latest promised of all rows of both limits
    lapses  timestamptz;        -- of the limit to move to
    balance double precision;   -- of the limit to move to
    i       integer;
BEGIN
    SELECT pg_catalog.array_agg(p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"),
           pg_catalog.count(DISTINCT (names[p], keys[p])) FILTER (WHERE ratelimit._valid(rates[p], periods[p], capacities[p], '0', now)
               AND isfinite(coalesce(starts[p], 'epoch')) AND shards[p] BETWEEN 1 AND 100)
      INTO places, m
      FROM pg_catalog.generate_subscripts(names, 1) AS p;
    IF (m = 2 AND pg_catalog.cardinality(names) = 2 AND floor <= '0') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    PERFORM ratelimit._lock(ARRAY[names[places[1]], names[places[2]]], ARRAY[keys[places[1]], keys[places[2]]],
        ARRAY[capacities[places[1]], capacities[places[2]]], ARRAY[shards[places[1]], shards[places[2]]], now);
    FOREACH i IN ARRAY places LOOP
        PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], now, windows[firsts[i]:lasts[i]]);
    END LOOP;
    at := coalesce(now, clock_timestamp()); -- locking may have waited
    latest := at;
    FOREACH i IN ARRAY ARRAY[1, 2] LOOP
        SELECT pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard),
               count(*), greatest(max(r.ts), latest), bool_and(r.shards = shards[i]), greatest(max(r.promised), last), min(r.lapses)
          INTO v, t, m, latest, alike, last, lapses
          FROM ratelimit.limits AS r
         WHERE r.name = names[i] AND r.key = keys[i];
        totals[i] := ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], starts[i], windows[firsts[i]:lasts[i]]);
    END LOOP;
    balance := least(totals[2], greatest(floor, capacities[2] - (capacities[1] - totals[1])));
    IF m = shards[2] AND alike THEN
        UPDATE ratelimit.limits AS r
           SET value = balance / shards[2]::double precision, ts = latest, promised = last
         WHERE r.name = names[2] AND r.key = keys[2];
    ELSE -- a new number of shards
        DELETE FROM ratelimit.limits AS r WHERE r.name = names[2] AND r.key = keys[2];
        INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts, promised, lapses)
        SELECT names[2], keys[2], s, shards[2], balance / shards[2]::double precision, latest, last, lapses
          FROM generate_series(0, shards[2] - 1) AS s;
    END IF;
    RETURN balance;
END
$body$;

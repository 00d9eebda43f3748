-- Decides many calls for one or several limits without shards. Each call is decided as if it had been made alone, in order.
--
--   names, rates, periods, capacities   the definitions of the limits
--   keys, defs, starts                  each limit and key of the calls, once. defs has the position of its definition.
--                                       starts may be empty if all limits are token buckets
--   repeats, counts, floors             the requests for the first cardinality(repeats) keys: take `counts` tokens and
--                                       leave at least `floors`, `repeats` times over. A repeat above 1 needs a whole count
--                                       and a floor of 0, less the tolerance: then no subtraction rounds, and one subtraction of the
--                                       sum equals all of them.
--                                       The caller sorts these keys by name and key (COLLATE "C"), which saves a sort
--                                       here; in any other order, calls could deadlock
--   calls, asks, ask_*                  the requests for the other keys, in order. `asks` has the position of the key.
--                                       Requests with the same number in `calls` are granted all or nothing. A floor above 0 is
--                                       for tokens that are only taken if there is plenty
--   now                                 NULL: clock_timestamp()
--   windows, firsts, lasts              the windows of all calendar windows, one list after another. The list of definition d is
--                                       windows[firsts[d]:lasts[d]], and firsts[d] is 0 for the other kinds. NULL: no
--                                       definition is a calendar window
--
-- Returns for a key the row that its decisions began with (ord, value, ts), from which the caller can work out each decision,
-- and the tokens that are left (after), for the caller to compare. The first `early` of them were decided at `seen`, the
-- others, and all keys in `asks`, at `at`. A later answer for a key replaces an earlier one. A key without a row is full and
-- has no answer. If tokens were taken from it all the same, value is NaN.
--
-- Locks the rows that it takes tokens from, including those that it inserts, in the common order (name, key, shard). A denial
-- by a plain read writes and locks nothing.
--
-- Errors: RL003 if the transaction is not READ COMMITTED, where each statement sees what was committed before it.
-- RL002 if a call alone is to merge the rows of a limit that was sharded, or to end expired holds.
CREATE OR REPLACE FUNCTION ratelimit._coalesce(
    names text[], rates double precision[], periods interval[], capacities double precision[],
    keys text[], defs integer[], starts timestamptz[],
    repeats integer[], counts double precision[], floors double precision[],
    calls integer[], asks integer[], ask_defs integer[], ask_starts timestamptz[],
    ask_counts double precision[], ask_floors double precision[],
    now timestamptz DEFAULT NULL, windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL,
    OUT seen timestamptz, OUT at timestamptz, OUT early integer,
    OUT ord integer[], OUT value double precision[], OUT ts timestamptz[], OUT after double precision[]
)
LANGUAGE plpgsql
-- Look each key up in the primary key, whatever the statistics say. Plan once.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    todo    integer[];            -- the keys that are still to be decided
    done    integer[];            -- the keys that were written
    missing boolean := false;     -- true if a key that will be granted has no row
    misfit  boolean := false;     -- true if a row belongs to a sharded limit
    early_ord   integer[];        -- the answers at `seen`
    early_value double precision[];
    early_ts    timestamptz[];
    early_after double precision[];
    -- By key, for keys with asks: the tokens, their ts, whether the row is locked, and whether tokens were taken.
    held    double precision[];
    since   timestamptz[];
    mine    boolean[];
    taken   boolean[];
    lapses  timestamptz[];
    lapsing integer[];            -- the keys that are denied, and may have expired holds
    wanted  integer[];            -- the keys that will be taken from, according to a plain read
    new_names text[];             -- the rows that were inserted here
    new_keys  text[];
    before_value double precision[]; -- their tokens before the call, and their ts
    before_ts    timestamptz[] := '{}';
    -- By position in asks: the tokens available, and the instant up to which refills count.
    available double precision[];
    upto    timestamptz[];
    listed  timestamptz[];        -- the windows of an ask's definition, if it is a calendar window
    promised timestamptz[];       -- by key, for keys with asks: when work may run that has to wait
    first   integer;
    last    integer;
    granted boolean;
    rec     record;
    k       integer;
    d       integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: coalesced calls need a READ COMMITTED transaction';
    END IF;
    IF ratelimit._distributed() THEN -- a transaction on several servers would cost more than it saves
        RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: the table is distributed, so each call is decided alone';
    END IF;
    IF (isfinite(coalesce(now, 'epoch')) AND '0' <= ALL (periods) AND '106752 days' > ALL (periods)
        AND '0' <= ALL (rates) AND '1e15' >= ALL (rates) AND '0' <= ALL (capacities) AND '1e15' >= ALL (capacities)
        AND '0' <= ALL (counts) AND '1e15' >= ALL (counts) AND '0' >= ALL (floors)
        AND '0' <= ALL (ask_counts) AND '1e15' >= ALL (ask_counts) AND '1e15' >= ALL (ask_floors)) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limits: the arguments are not valid';
    END IF;
    seen := coalesce(now, clock_timestamp());
    at := seen;
    -- 1 to cardinality(repeats), without a query.
    todo := pg_catalog.array_positions(pg_catalog.array_fill(1, ARRAY[pg_catalog.cardinality(repeats)]), 1);

    -- A plain read of the keys with asks.
    IF pg_catalog.cardinality(asks) > 0 THEN
        FOR rec IN
            SELECT i, r.value, r.ts, r.shards, r.lapses
              FROM generate_series(pg_catalog.cardinality(repeats) + 1, pg_catalog.cardinality(keys)) AS i
              LEFT JOIN LATERAL (
                SELECT * FROM ratelimit.limits AS r WHERE r.name = names[defs[i]] AND r.key = keys[i] AND r.shard = 0 OFFSET 0
              ) AS r ON true
        LOOP
            held[rec.i] := rec.value; since[rec.i] := rec.ts; mine[rec.i] := false; taken[rec.i] := false; lapses[rec.i] := rec.lapses;
            misfit := misfit OR coalesce(rec.shards <> 1, false);
        END LOOP;
    END IF;

    FOR pass IN 1..2 LOOP
        promised := NULL; lapsing := '{}';
        -- 1. Decide the asks, in order: in the first pass on the rows of the plain read, in the second on the locked rows.
        first := 1;
        WHILE first <= pg_catalog.cardinality(asks) LOOP
            granted := true;
            last := first;
            LOOP
                k := asks[last]; d := ask_defs[last];
                IF windows IS NOT NULL THEN
                    listed := CASE WHEN firsts[d] > 0 THEN windows[firsts[d]:lasts[d]] END;
                END IF;
                upto[last] := ratelimit._upto(at, periods[d], ask_starts[last], listed);
                available[last] := CASE WHEN since[k] IS NULL THEN capacities[d] ELSE
                    ratelimit._available(held[k], since[k], upto[last], rates[d], periods[d], capacities[d], ask_starts[last], listed) END;
                granted := granted AND available[last] - ask_counts[last] >= ask_floors[last];
                EXIT WHEN calls[last + 1] IS DISTINCT FROM calls[first];
                last := last + 1;
            END LOOP;
            FOR j IN first..last LOOP
                k := asks[j];
                IF granted THEN
                    IF pass = 2 AND NOT mine[k] THEN -- the first pass took nothing from it, so it is not locked
                        RAISE serialization_failure USING MESSAGE = 'rate limits: another transaction has changed rows meanwhile';
                    ELSIF pass = 1 AND NOT taken[k] THEN
                        wanted := pg_catalog.array_append(wanted, k);
                    END IF;
                    taken[k] := true;
                    held[k] := available[j] - ask_counts[j];
                    since[k] := greatest(since[k], at);
                    d := ask_defs[j];
                    IF held[k] < '0' AND ask_floors[j] > '-Infinity' THEN
                        promised[k] := greatest(promised[k], ratelimit._promise(held[k], ask_floors[j], since[k], rates[d], periods[d], capacities[d]));
                    END IF;
                END IF;
                IF lapses[k] <= at THEN
                    misfit := misfit OR granted; starts[k] := ask_starts[j];
                    lapsing := pg_catalog.array_append(pg_catalog.array_remove(lapsing, k), k);
                END IF;
            END LOOP;
            first := last + 1;
        END LOOP;

        -- 2. Decide the other keys by compare and swap: read each row, and write it if it is still the same (E1). If a row
        -- has changed since the snapshot, the UPDATE waits and locks the new version without writing it. So it locks all its
        -- rows, in order (E2). It does not begin if other rows have to be locked as well (CONCURRENCY.md, E3).
        WITH s AS MATERIALIZED (
            SELECT c.i, c.name, c.key, c.value, c.ts, c.shards, c.n, c.floor, c.rate, c.period, c.capacity,
                   CASE WHEN c.n > '0' THEN c.available - c.n * c.count ELSE c.value END AS after,
                   c.lapses <= at AS lapses
              FROM (
                SELECT b.*,
                       CASE WHEN b.available - b.count < b.floor THEN 0
                            WHEN b.repeats = 1 OR b.count = '0' THEN 1
                            -- The quotient may have been rounded up to a whole number.
                            WHEN b.available - floor((b.available - b.floor) / b.count) * b.count < b.floor THEN
                                least(b.repeats, floor((b.available - b.floor) / b.count) - '1')
                            ELSE least(b.repeats, floor((b.available - b.floor) / b.count)) END AS n
                  FROM (
                    SELECT a.i, a.name, a.key, r.value, r.ts, r.shards, r.lapses, a.repeats, a.count, a.floor, a.rate, a.period, a.capacity,
                           ratelimit._available(r.value, r.ts, a.upto, a.rate, a.period, a.capacity, a.start, a.windows) AS available
                      FROM (
                        SELECT i, names[defs[i]] AS name, keys[i] AS key, rates[defs[i]] AS rate, periods[defs[i]] AS period,
                               capacities[defs[i]] AS capacity, repeats[i] AS repeats, counts[i] AS count, floors[i] AS floor,
                               starts[i] AS start, CASE WHEN firsts[defs[i]] > 0 THEN windows[firsts[defs[i]]:lasts[defs[i]]] END AS windows,
                               CASE WHEN starts[i] IS NULL OR firsts[defs[i]] > 0 THEN at ELSE date_bin(periods[defs[i]], at, starts[i]) END AS upto
                          FROM pg_catalog.unnest(todo) AS i -- which keeps the order of keys
                        OFFSET 0
                      ) AS a
                      LEFT JOIN ratelimit.limits AS r ON r.name = a.name AND r.key = a.key AND r.shard = 0
                    OFFSET 0
                  ) AS b
                OFFSET 0
              ) AS c
        ), u AS (
            UPDATE ratelimit.limits AS r
               SET value = s.after, ts = greatest(s.ts, at),
                   promised = CASE WHEN s.after < '0' THEN
                       greatest(r.promised, ratelimit._promise(s.after, s.floor, greatest(s.ts, at), s.rate, s.period, s.capacity)) ELSE r.promised END
              FROM s
             WHERE r.name = ANY (ARRAY[CASE WHEN s.i > 0 THEN s.name END]) AND r.key = s.key AND r.shard = 0 * s.i -- (E6)
               AND r.value = s.value AND r.ts = s.ts AND s.n > '0'
               AND (SELECT bool_and(s.shards IS NOT DISTINCT FROM 1) FROM s) AND (pass = 2 OR wanted IS NULL)
            RETURNING s.i
        )
        SELECT pg_catalog.array_agg(s.i) FILTER (WHERE s.shards IS NOT NULL),
               pg_catalog.array_agg(s.value) FILTER (WHERE s.shards IS NOT NULL),
               pg_catalog.array_agg(s.ts) FILTER (WHERE s.shards IS NOT NULL),
               pg_catalog.array_agg(s.after) FILTER (WHERE s.shards IS NOT NULL),
               missing OR coalesce(bool_or(s.shards IS NULL), false), misfit OR coalesce(bool_or(s.shards <> 1 OR s.lapses AND s.n > '0'), false),
               pg_catalog.array_cat(lapsing, pg_catalog.array_agg(s.i) FILTER (WHERE s.lapses)),
               pg_catalog.array_agg(s.i) FILTER (WHERE s.n > '0' OR s.shards IS NULL), (SELECT pg_catalog.array_agg(u.i) FROM u)
          INTO ord, value, ts, after, missing, misfit, lapsing, todo, done
          FROM s;
        IF pg_catalog.cardinality(todo) > 0 THEN
            IF pg_catalog.cardinality(todo) = pg_catalog.cardinality(done) THEN
                todo := NULL;
            ELSIF done IS NOT NULL THEN
                todo := ARRAY(SELECT pg_catalog.unnest(todo) EXCEPT SELECT pg_catalog.unnest(done) ORDER BY 1);
            END IF;
        END IF;
        FOREACH k IN ARRAY lapsing LOOP
            EXIT WHEN misfit;
            d := defs[k];
            misfit := (SELECT CASE WHEN '0' < ANY (l.back) THEN ratelimit._ends() ELSE false END FROM ratelimit._lapsed(names[d], keys[k], at,
                rates[d], periods[d], capacities[d], starts[k], CASE WHEN firsts[d] > 0 THEN windows[firsts[d]:lasts[d]] END) AS l);
        END LOOP;
        IF misfit THEN
            RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: the rows belong to a sharded limit, or holds of them have expired';
        END IF;
        EXIT WHEN pass = 1 AND todo IS NULL AND wanted IS NULL;
        IF pass = 2 THEN
            IF todo IS NOT NULL THEN
                -- Deleted rows are not locked.
                RAISE serialization_failure USING MESSAGE = 'rate limits: another transaction has deleted rows meanwhile';
            END IF;
            EXIT;
        END IF;
        early_ord := ord; early_value := value; early_ts := ts; early_after := after;

        -- 3. Lock the other rows that are needed, in order, and insert the missing ones, full, in the same statement. Then decide
        -- the rest in the second pass. If nothing is missing or wanted, the UPDATE has locked the rows, except those that were
        -- deleted meanwhile. Waiting for these would break the lock order.
        IF missing OR wanted IS NOT NULL THEN
            WITH n AS (
                INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts)
                SELECT names[defs[i]], keys[i], 0, 1, capacities[defs[i]], at
                  FROM pg_catalog.unnest(pg_catalog.array_cat(todo, wanted)) AS i
                 ORDER BY names[defs[i]] COLLATE "C", keys[i] COLLATE "C"
                ON CONFLICT (name, key, shard) DO UPDATE SET value = 0 WHERE false
                RETURNING name, key
            )
            SELECT pg_catalog.array_agg(n.name), pg_catalog.array_agg(n.key) INTO new_names, new_keys FROM n;
            IF EXISTS (SELECT 1 FROM pg_catalog.unnest(pg_catalog.array_cat(todo, wanted)) AS i
                    WHERE EXISTS (SELECT 1 FROM ratelimit.limits AS r
                        WHERE r.name = names[defs[i]] AND r.key = keys[i] AND r.shards > 1 OFFSET 0)) THEN
                RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: the rows belong to a sharded limit';
            END IF;
        ELSE
            FOREACH k IN ARRAY todo LOOP
                PERFORM FROM ratelimit.limits AS r
                  WHERE r.name = names[defs[k]] AND r.key = keys[k] AND r.shard = 0 FOR NO KEY UPDATE SKIP LOCKED;
                IF NOT FOUND THEN
                    RAISE serialization_failure USING MESSAGE = 'rate limits: another transaction has deleted rows meanwhile';
                END IF;
            END LOOP;
        END IF;
        at := coalesce(now, clock_timestamp()); -- locking may have waited
        missing := false;
        FOR rec IN
            SELECT i, r.value, r.ts, r.lapses, (r.name, r.key) IN (SELECT n.name, n.key FROM unnest(new_names, new_keys) AS n (name, key)) AS inserted
              FROM pg_catalog.unnest(wanted) AS i
             CROSS JOIN LATERAL (
                SELECT * FROM ratelimit.limits AS r WHERE r.name = names[defs[i]] AND r.key = keys[i] AND r.shard = 0 OFFSET 0
              ) AS r
        LOOP
            -- A row that was inserted here is still full, whatever the definition.
            held[rec.i] := CASE WHEN NOT rec.inserted THEN rec.value END;
            since[rec.i] := CASE WHEN NOT rec.inserted THEN rec.ts END;
            before_value[rec.i] := CASE WHEN rec.inserted THEN 'NaN' ELSE rec.value END;
            before_ts[rec.i] := rec.ts;
            mine[rec.i] := true; taken[rec.i] := false; lapses[rec.i] := rec.lapses;
        END LOOP;
    END LOOP;

    early := 0;
    IF early_ord IS NOT NULL THEN
        early := pg_catalog.cardinality(early_ord);
        ord := pg_catalog.array_cat(early_ord, ord);
        value := pg_catalog.array_cat(early_value, value);
        ts := pg_catalog.array_cat(early_ts, ts);
        after := pg_catalog.array_cat(early_after, after);
    END IF;
    IF since IS NOT NULL THEN
        FOR k IN pg_catalog.cardinality(repeats) + 1..pg_catalog.cardinality(keys) LOOP
            IF taken[k] THEN
                -- Citus cannot send an element of an array that stands alone in SET.
                UPDATE ratelimit.limits AS r
                   SET value = coalesce(held[k]), ts = coalesce(since[k]), promised = greatest(r.promised, promised[k])
                 WHERE r.name = names[defs[k]] AND r.key = keys[k] AND r.shard = 0;
                ord := pg_catalog.array_append(ord, k);
                value := pg_catalog.array_append(value, before_value[k]);
                ts := pg_catalog.array_append(ts, before_ts[k]);
                after := pg_catalog.array_append(after, held[k]);
            ELSIF since[k] IS NOT NULL THEN
                ord := pg_catalog.array_append(ord, k);
                value := pg_catalog.array_append(value, held[k]);
                ts := pg_catalog.array_append(ts, since[k]);
                after := pg_catalog.array_append(after, held[k]);
            END IF;
        END LOOP;
    END IF;
END
$body$;

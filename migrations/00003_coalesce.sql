-- +goose Up

-- What the library's Coalescer sends: many calls, each a transaction of nobody's own, decided by one statement.
--
-- +goose StatementBegin
DO $install$
BEGIN

-- Decides calls of one or several limits, none of them sharded, as if each had been made alone, in order.
--
--   names, rates, periods, capacities   definitions of limits
--   keys, defs, starts                  each limit and key that is asked for, once; defs says which definition it has
--   repeats, counts, floors             what is asked of it: `counts` tokens leaving at least `floors`, `repeats` times over.
--                                       More often than once only whole counts, with a floor of 0: then no subtraction
--                                       rounds, and all of them are one. repeats = 0: see asks
--   calls, asks, ask_*                  whatever is not of that kind, in order: one ask after another, those with the same
--                                       number in `calls` all or nothing. `asks` says of which of the keys
--   now                                 NULL: clock_timestamp()
--
-- Answers for each key whose row exists (ord) the state that its decisions began with, from which the caller can work out
-- each of them, and the value that is left, for him to compare. The first `locked` of them were decided at `at`; all others
-- were denied at `seen`, by a plain read: they are neither written nor locked.
--
-- Locks the rows of which something is taken, those that have to be inserted among them, in the order (name, key, shard),
-- which is everybody's. Reads the clock once it has them.
--
-- READ COMMITTED only, where each statement sees what was committed before it: else SQLSTATE RL003.
-- RL002: the rows are those of a limit that was sharded; let ratelimit_consume or ratelimit_apply make them one.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_coalesce(
    names text[], rates double precision[], periods interval[], capacities double precision[],
    keys text[], defs integer[], starts timestamptz[],
    repeats integer[], counts double precision[], floors double precision[],
    calls integer[], asks integer[], ask_defs integer[], ask_starts timestamptz[],
    ask_counts double precision[], ask_floors double precision[],
    now timestamptz DEFAULT NULL,
    OUT at timestamptz, OUT seen timestamptz, OUT locked integer,
    OUT ord integer[], OUT value double precision[], OUT ts timestamptz[], OUT after double precision[]
)
LANGUAGE plpgsql
-- Whatever the statistics say: for each key, look into the primary key. And plan once.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off
AS $body$
#variable_conflict use_variable
DECLARE
    wanted  integer[];            -- the keys of which something will be taken, by what a plain read saw
    missing integer;              -- how many of the keys have no row
    misfit  boolean;
    tids    tid[];
    lefts   double precision[];
    uptos   timestamptz[];
    denied_ord   integer[];       -- the keys that are denied at first sight
    denied_value double precision[];
    denied_ts    timestamptz[];
    -- Of the keys with repeats = 0: what they hold, since when, and whether any of it was taken.
    held    double precision[] := array_fill(NULL::double precision, ARRAY[cardinality(keys)]);
    since   timestamptz[] := array_fill(NULL::timestamptz, ARRAY[cardinality(keys)]);
    taken   boolean[] := array_fill(false, ARRAY[cardinality(keys)]);
    mine    boolean[] := array_fill(false, ARRAY[cardinality(keys)]); -- its row is locked
    full_value double precision[] := '{}'; -- of those without a row, by the definition that takes from them first
    full_ts    timestamptz[] := '{}';
    -- Of the asks of one call: what there is, up to when.
    first   integer;
    last    integer;
    available double precision[] := '{}';
    upto    timestamptz[] := '{}';
    granted boolean;
    rec     record;
    n       integer;
    k       integer;
    d       integer;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: coalesced calls need a READ COMMITTED transaction';
    END IF;
    IF (cardinality(keys) > 0 AND isfinite(coalesce(now, 'epoch'))
        AND cardinality(names) = ALL (ARRAY[cardinality(rates), cardinality(periods), cardinality(capacities)])
        AND cardinality(keys) = ALL (ARRAY[cardinality(defs), cardinality(repeats), cardinality(counts), cardinality(floors)])
        AND cardinality(asks) = ALL (ARRAY[cardinality(calls), cardinality(ask_defs), cardinality(ask_counts), cardinality(ask_floors)])
        AND '' < ALL (names) AND '' <= ALL (keys)
        AND 1e-15 <= ALL (rates) AND 1e15 >= ALL (rates) AND '0' < ALL (periods) AND 0 <= ALL (capacities) AND 1e15 >= ALL (capacities)
        AND 0 <= ALL (repeats) AND 0 <= ALL (counts) AND 1e15 >= ALL (counts) AND 0 >= ALL (floors)
        AND 0 <= ALL (ask_counts) AND 1e15 >= ALL (ask_counts) AND 0 >= ALL (ask_floors)
        AND 1 <= ALL (defs) AND cardinality(names) >= ALL (defs)
        AND 1 <= ALL (ask_defs) AND cardinality(names) >= ALL (ask_defs)
        AND 1 <= ALL (asks) AND cardinality(keys) >= ALL (asks)) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limits: not a valid batch of requests';
    END IF;

    -- 1. A plain read: which keys have enough, or have no row and are full.
    seen := coalesce(now, clock_timestamp());
    at := seen;
    SELECT coalesce(array_agg(s.i) FILTER (WHERE s.enough), '{}'),
           array_agg(s.i) FILTER (WHERE NOT s.enough),
           array_agg(s.value) FILTER (WHERE NOT s.enough),
           array_agg(s.ts) FILTER (WHERE NOT s.enough),
           count(*) FILTER (WHERE s.shards IS NULL), coalesce(bool_or(s.shards <> 1), false)
      INTO wanted, denied_ord, denied_value, denied_ts, missing, misfit
      FROM (
        SELECT k.i::integer AS i, r.value, r.ts, r.shards,
               r.shards IS NULL OR @extschema@.ratelimit_available(r.value, r.ts,
                   CASE WHEN k.start IS NULL THEN at ELSE date_bin(periods[k.def], at, k.start) END,
                   rates[k.def], periods[k.def], capacities[k.def], k.start) - k.count >= k.floor AS enough
          FROM unnest(keys, defs, starts, repeats, counts, floors) WITH ORDINALITY AS k (key, def, start, repeats, count, floor, i)
          LEFT JOIN @extschema@.rate_limits AS r ON r.name = names[k.def] AND r.key = k.key AND r.shard = 0
         WHERE k.repeats > 0
      ) AS s;
    IF cardinality(asks) > 0 THEN
        FOR rec IN
            SELECT k.i, r.value, r.ts, r.shards
              FROM unnest(keys, defs, repeats) WITH ORDINALITY AS k (key, def, repeats, i)
              LEFT JOIN @extschema@.rate_limits AS r ON r.name = names[k.def] AND r.key = k.key AND r.shard = 0
             WHERE k.repeats = 0
        LOOP
            held[rec.i] := rec.value; since[rec.i] := rec.ts;
            misfit := misfit OR coalesce(rec.shards <> 1, false);
        END LOOP;
    END IF;
    IF misfit THEN
        RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: sharded rows';
    END IF;

    FOR pass IN 1..2 LOOP
        -- 2. The asks, in order: in the first pass on what the plain read saw, in the second on what is locked.
        first := 1;
        WHILE first <= cardinality(asks) LOOP
            granted := true;
            last := first;
            LOOP
                k := asks[last]; d := ask_defs[last];
                upto[last] := CASE WHEN ask_starts[last] IS NULL THEN at ELSE date_bin(periods[d], at, ask_starts[last]) END;
                available[last] := CASE WHEN since[k] IS NULL THEN capacities[d] ELSE
                    @extschema@.ratelimit_available(held[k], since[k], upto[last], rates[d], periods[d], capacities[d], ask_starts[last]) END;
                granted := granted AND available[last] - ask_counts[last] >= ask_floors[last];
                EXIT WHEN calls[last + 1] IS DISTINCT FROM calls[first];
                last := last + 1;
            END LOOP;
            IF granted THEN
                FOR j IN first..last LOOP
                    k := asks[j];
                    IF pass = 2 AND NOT mine[k] THEN -- it had no share in any grant of the first pass
                        RAISE serialization_failure USING MESSAGE = 'rate limits: rows were changed meanwhile';
                    ELSIF pass = 1 AND NOT taken[k] THEN
                        wanted := wanted || k;
                        IF since[k] IS NULL THEN
                            missing := missing + 1;
                            full_value[k] := available[j]; full_ts[k] := upto[j];
                        END IF;
                    END IF;
                    taken[k] := true;
                    held[k] := available[j] - ask_counts[j];
                    since[k] := greatest(since[k], upto[j]);
                END LOOP;
            END IF;
            first := last + 1;
        END LOOP;
        EXIT WHEN pass = 2 OR cardinality(wanted) = 0;

        -- 3. Lock, in order. What is missing is inserted in the same pass, full.
        IF missing > 0 THEN
            INSERT INTO @extschema@.rate_limits (name, key, shard, shards, value, ts)
            SELECT names[defs[i]], keys[i], 0, 1, coalesce(full_value[i], capacities[defs[i]]),
                   coalesce(full_ts[i], CASE WHEN starts[i] IS NULL THEN at ELSE date_bin(periods[defs[i]], at, starts[i]) END)
              FROM unnest(wanted) AS i
             ORDER BY names[defs[i]] COLLATE "C", keys[i] COLLATE "C"
            ON CONFLICT (name, key, shard) DO UPDATE SET value = 0 WHERE false;
            IF EXISTS (SELECT FROM unnest(wanted) AS i JOIN @extschema@.rate_limits AS r
                    ON r.name = names[defs[i]] AND r.key = keys[i] AND r.shard > 0) THEN
                RAISE SQLSTATE 'RL002' USING MESSAGE = 'rate limits: sharded rows';
            END IF;
        END IF;
        SELECT array_agg(s.i), array_agg(s.value), array_agg(s.ts), array_agg(s.ctid)
          INTO ord, value, ts, tids
          FROM (
            SELECT i, r.value, r.ts, r.ctid
              FROM unnest(wanted) AS i
              JOIN @extschema@.rate_limits AS r ON r.name = names[defs[i]] AND r.key = keys[i] AND r.shard = 0 AND r.shards = 1
             ORDER BY r.name, r.key
               FOR NO KEY UPDATE OF r
          ) AS s;
        IF cardinality(ord) IS DISTINCT FROM cardinality(wanted) THEN
            RAISE serialization_failure USING MESSAGE = 'rate limits: rows were deleted or sharded meanwhile';
        END IF;
        at := coalesce(now, clock_timestamp());
        EXIT WHEN cardinality(asks) = 0;
        FOR j IN 1..cardinality(ord) LOOP
            k := ord[j];
            held[k] := value[j]; since[k] := ts[j]; taken[k] := false; mine[k] := true;
        END LOOP;
    END LOOP;

    -- 4. Take. The rows are locked, so they are where they were.
    IF cardinality(wanted) > 0 THEN
        SELECT array_agg(c.i), array_agg(c.value), array_agg(c.ts), array_agg(c.after), array_agg(c.upto),
               array_agg(CASE WHEN c.n > 0 THEN c.tid END)
          INTO ord, value, ts, after, uptos, tids
          FROM (
            SELECT b.i, b.value, b.ts, b.upto, b.tid, b.n,
                   CASE WHEN b.n = 0 THEN b.value ELSE b.available - b.n * b.count END AS after
              FROM (
                SELECT a.*,
                       CASE WHEN a.available - a.count < a.floor THEN 0
                            WHEN a.repeats = 1 OR a.count = 0 THEN 1
                            -- The quotient may have been rounded up to the next whole number.
                            WHEN floor(a.available / a.count) * a.count > a.available THEN least(a.repeats, floor(a.available / a.count) - 1)
                            ELSE least(a.repeats, floor(a.available / a.count)) END AS n
                  FROM (
                    SELECT l.i, l.value, l.ts, l.tid, u.upto, repeats[l.i] AS repeats, counts[l.i] AS count, floors[l.i] AS floor,
                           @extschema@.ratelimit_available(l.value, l.ts, u.upto, rates[defs[l.i]], periods[defs[l.i]],
                               capacities[defs[l.i]], starts[l.i]) AS available
                      FROM unnest(ord, value, ts, tids) AS l (i, value, ts, tid)
                     CROSS JOIN LATERAL (SELECT CASE WHEN starts[l.i] IS NULL THEN at
                           ELSE date_bin(periods[defs[l.i]], at, starts[l.i]) END AS upto) AS u
                     WHERE repeats[l.i] > 0
                    OFFSET 0
                  ) AS a
                OFFSET 0
              ) AS b
             UNION ALL
            SELECT l.i, l.value, l.ts, since[l.i], l.tid, taken[l.i]::integer, held[l.i]
              FROM unnest(ord, value, ts, tids) AS l (i, value, ts, tid)
             WHERE repeats[l.i] = 0
          ) AS c;
        UPDATE @extschema@.rate_limits AS r
           SET value = u.after, ts = greatest(r.ts, u.upto)
          FROM unnest(tids, after, uptos) AS u (tid, after, upto)
         WHERE r.ctid = u.tid;
    ELSE
        ord := '{}'; value := '{}'; ts := '{}'; after := '{}';
    END IF;
    FOR k IN 1..CASE WHEN cardinality(asks) > 0 THEN cardinality(keys) ELSE 0 END LOOP
        IF repeats[k] = 0 AND NOT mine[k] AND since[k] IS NOT NULL THEN
            ord := ord || k; value := value || held[k]; ts := ts || since[k]; after := after || held[k];
        END IF;
    END LOOP;
    locked := cardinality(ord);
    ord := ord || denied_ord; value := value || denied_value; ts := ts || denied_ts; after := after || denied_value;
END
$body$
$ddl$, '@extschema@', quote_ident(current_schema()));

END
$install$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION ratelimit_coalesce(text[], double precision[], interval[], double precision[], text[], integer[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], integer[], timestamptz[], double precision[], double precision[], timestamptz);

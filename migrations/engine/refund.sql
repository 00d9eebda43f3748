-- When work may run that leaves a token bucket's rows this balance, or NULL if it does not wait. A floor of -Infinity is a charge's, which
-- promises nothing. ts: the latest of the rows. Promise in internal/algebra/promise.go has the same rule.
CREATE OR REPLACE FUNCTION ratelimit._promise(
    "left" double precision, floor double precision, ts timestamptz, rate double precision, period interval, capacity double precision
) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN floor > '-Infinity' AND rate > '0' AND "left" < -ratelimit._tolerance(capacity, 0) THEN
    CASE WHEN -"left" / rate * (date_part('epoch', period) * '1e6') < '3e15' THEN
        ts + ceil(-"left" / rate * (date_part('epoch', period) * '1e6')) * interval '1 microsecond' ELSE 'infinity' END END;

-- What comes back of a call's tokens at an instant, to a limit with these rows: `back`. `total` is what is there, `waiting` whether work waits
-- that was promised what is owed. This is the rule of every give-back: Refund, Settle, Release, and expired holds. Limit.Refund in
-- internal/algebra/promise.go is the same, docs/refunds.md has the reasons. promised is the latest of the rows; the other arguments are those of
-- ratelimit._refund, of one limit.
CREATE OR REPLACE FUNCTION ratelimit._give_back(
    value double precision[], ts timestamptz[], promised timestamptz, at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, taken double precision, held double precision, part double precision,
    taken_at timestamptz, run_at timestamptz, windows timestamptz[], OUT total double precision, OUT back double precision, OUT waiting boolean
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
DECLARE
    latest timestamptz := (SELECT greatest(max(u.t), at) FROM pg_catalog.unnest(ts) AS u (t)); -- the latest ts, or now if that is later
    wait   double precision; -- the number of windows from now until the work was to run
    owing  double precision; -- a balance below this is a debt
    owed   double precision; -- to waiting work
    missing CONSTANT double precision := capacity * part - held; -- once it was taken
    m      CONSTANT double precision := pg_catalog.cardinality(value);
BEGIN
    back := 0;
    waiting := coalesce(promised > at, false);
    -- Give nothing back for an argument that is not a number (NaN is above all numbers), or if the rows and the clock
    -- are older than taken_at.
    IF (least(count, rate, capacity, taken, part) >= '0'
        AND count + rate + capacity + taken + abs(held) + part < 'Infinity'
        AND (period > '0' OR period = '0' AND windows IS NOT NULL AND NOT EXISTS ( -- by such a list, a row that is older is known only if it is full
            SELECT 1 FROM unnest(value, ts) AS u (v, t) WHERE u.t < windows[1]
               AND ratelimit._available(u.v, u.t, at, rate / m, period, capacity / m, start, windows) < capacity / m))
        AND isfinite(period) AND isfinite(taken_at) AND isfinite(run_at) AND isfinite(at) AND latest >= taken_at) IS NOT TRUE THEN
        RETURN;
    END IF;
    total := ratelimit._total(value, ts, at, rate, period, capacity, start, windows);
    count := greatest(least(count, capacity - total), '0');
    IF start IS NULL THEN
        owed := CASE WHEN waiting THEN greatest(-total, '0') ELSE 0 END;
        IF latest > at THEN -- paused: only what waiting work owes comes back, and nothing is refilled until latest
            count := least(count, owed);
            latest := CASE WHEN at >= taken_at THEN at ELSE latest END;
        END IF;
        back := missing - date_part('epoch', latest - taken_at) * rate / date_part('epoch', period);
        back := least(greatest(back - owed, '0'), count);
    ELSE
        count := CASE WHEN missing < count - ratelimit._tolerance(capacity, 0) THEN greatest(missing, '0') ELSE count END;
        -- The windows that have begun before the first of the list or begin after its last are not known.
        wait := CASE WHEN latest < windows[1] OR run_at > windows[pg_catalog.cardinality(windows)] THEN '-1'
            WHEN windows IS NOT NULL THEN pg_catalog.width_bucket(run_at, windows) - pg_catalog.width_bucket(latest, windows)
            ELSE round(date_part('epoch', date_bin(period, run_at, start) - date_bin(period, latest, start))
            / date_part('epoch', period)) END;
        owing := ratelimit._even(total, rate, capacity);
        back := CASE
            WHEN capacity - taken < -ratelimit._tolerance(capacity, 0) OR wait < '0' THEN 0
            WHEN (wait > '0' OR waiting) AND total + wait * rate < owing THEN 0
            WHEN wait > '0' AND total + (wait - '1') * rate >= owing THEN 0
            WHEN wait > '0' AND capacity > rate AND total + count + (wait - '1') * rate >= owing THEN 0
            ELSE count END;
    END IF;
END
$body$;

-- Gives tokens back to several limits: ratelimit._give_back.
--
--   counts       the tokens to give back
--   taken        the tokens that the refunded call took at taken_at; its work was to run at run_at
--   held, parts  the tokens that were left in the rows that it took from, and their part of the limit: 1 for all rows, or
--                1/shards for one shard
--
-- Returns the rows as they are then, what came back, and in `lost` the positions of the limits of which work waits that is promised what
-- they owe. A limit without rows is full and gets nothing.
--
-- Locks all rows of each limit. The arguments must be in the common order (name, key, shard). If another transaction has
-- changed the set of rows meanwhile, the subtransaction releases the locks and the loop tries again (CONCURRENCY.md, C7).
CREATE OR REPLACE FUNCTION ratelimit._refund(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._settled
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    at     timestamptz;
    ord    integer[];
    value  double precision[];
    ts     timestamptz[];

    locked integer[] := '{}';  -- the number of locked rows of each limit
    v      double precision[]; -- the values of one limit's rows
    t      timestamptz[];      -- their ts
    m      integer;            -- their number
    last   timestamptz;        -- the latest of their promised
    g      record;             -- the answer of ratelimit._give_back
    moved  double precision[];
    owed   integer[];          -- the positions of the limits of which work waits
BEGIN
    FOR attempt IN 1..100 LOOP
        BEGIN
            FOR i IN 1..pg_catalog.cardinality(names) LOOP
                PERFORM 1 FROM ratelimit.limits AS r
                  WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                GET DIAGNOSTICS m = ROW_COUNT;
                locked[i] := m;
            END LOOP;
            at := coalesce(now, clock_timestamp()); -- locking may have waited
            ord := '{}'; value := '{}'; ts := '{}'; owed := '{}';
            moved := pg_catalog.array_fill('0'::double precision, ARRAY[pg_catalog.cardinality(names)]);
            FOR i IN 1..pg_catalog.cardinality(names) LOOP
                IF rates[i] > '0' AND rates[i] + capacities[i] < 'Infinity' AND periods[i] IS NOT NULL THEN -- what ended before comes back before
                    PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, windows[firsts[i]:lasts[i]]);
                END IF;
                SELECT coalesce(pg_catalog.array_agg(r.value ORDER BY r.shard), '{}'), coalesce(pg_catalog.array_agg(r.ts ORDER BY r.shard), '{}'),
                       count(*), max(r.promised)
                  INTO v, t, m, last
                  FROM ratelimit.limits AS r
                 WHERE r.name = names[i] AND r.key = keys[i];
                IF m <> locked[i] THEN
                    RAISE SQLSTATE 'RL001';
                END IF;
                CONTINUE WHEN m = 0;
                SELECT b.total, b.back, b.waiting INTO g
                  FROM ratelimit._give_back(v, t, last, at, rates[i], periods[i], capacities[i], starts[i], counts[i], taken[i], held[i], parts[i],
                       taken_at, run_at, windows[firsts[i]:lasts[i]]) AS b;
                IF g.waiting THEN
                    owed := pg_catalog.array_append(owed, i);
                END IF;
                IF g.back > '0' THEN -- a later ts in a full row would cost refills if the clock steps back
                    moved[i] := g.back;
                    v := pg_catalog.array_fill(least(g.total + g.back, capacities[i]) / m::double precision, ARRAY[m]);
                    t := ARRAY(SELECT greatest(u.t, at) FROM pg_catalog.unnest(t) WITH ORDINALITY AS u (t, n) ORDER BY u.n);
                    UPDATE ratelimit.limits AS r SET value = coalesce(v[1]), ts = greatest(r.ts, at)
                     WHERE r.name = names[i] AND r.key = keys[i];
                END IF;
                ord := pg_catalog.array_cat(ord, pg_catalog.array_fill(i, ARRAY[m]));
                value := pg_catalog.array_cat(value, v);
                ts := pg_catalog.array_cat(ts, t);
            END LOOP;
            RETURN ROW('done', at, ord, value, ts, moved, owed)::ratelimit._settled;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row against other transactions', names);
END
$body$;

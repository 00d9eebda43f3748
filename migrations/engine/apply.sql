-- Decides several limits together, all or nothing, sharded ones included. op is
--   consume  take every count, or nothing
--   check    what consume would answer; writes and locks nothing
-- With `reserve`, the work may have to wait, and what would be refilled past a capacity until it runs is forfeited: Reserve in
-- internal/algebra/promise.go has the rule, and docs/refunds.md the reasons.
--
-- The arguments are arrays of one length, a limit in each place, no (name, key) twice; shard_a and shard_b are two
-- shards to choose between. Each row of a sharded limit has rate/shards and holds capacity/shards; it takes no more than it
-- holds, since what the limit owes is spread evenly over all of them.
--
-- Answers the rows of each limit, with ord, as they are now if it was granted, or as they were when the denial was decided. A limit
-- without rows is full and has none. A sharded limit that took from one shard answers that shard alone.
--
-- Locks: rows in the order (name, key, shard), which is everybody's. A single shard that is locked and then found
-- wanting is released (its subtransaction is rolled back) before all shards are locked.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_apply(
    op text, names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean DEFAULT false, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false
) RETURNS /* TEMPLATE: schema */_ratelimit_decisions
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    granted boolean;
    at      timestamptz;
    ord     integer[];
    value   double precision[];
    ts      timestamptz[];

    -- Tokens that a sum over shards may lack through rounding: a third of 10 is not exact.
    slack  CONSTANT double precision := 1e-9;
    -- By place; `places` is the places in lock order.
    places integer[];
    upto   timestamptz[] := '{}';      -- the instant up to which refills count
    picks  smallint[];                 -- the shard to take from
    rows   integer[] := '{}';          -- how many there are
    locked integer[] := '{}';          -- how many of them are
    alike  boolean[] := '{}';          -- whether they are those of so many shards
    totals double precision[] := '{}'; -- what they hold together
    latest timestamptz[] := '{}';      -- the latest ts among them, or now
    first_ts timestamptz[] := '{}';    -- the earliest, or now
    lefts  double precision[] := '{}'; -- what they will hold
    owns   timestamptz[] := '{}';      -- when each limit alone would let the work run
    run_at timestamptz;                -- when it may run

    rec       record;
    i         integer;
    m         integer;
    new_value double precision;
    new_ts    timestamptz;
    available double precision;
    lowest    double precision;
    highest   double precision;
BEGIN
    FOR attempt IN 1..100 LOOP
        IF op = 'consume' THEN
            -- 1. Of a sharded limit, the better of the two shards, by a plain read. Above READ COMMITTED the first: one that
            -- is read and not taken conflicts with whoever takes it.
            at := coalesce(now, clock_timestamp());
            IF shard_a OPERATOR(pg_catalog.=) shard_b OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
                picks := shard_a;
            ELSE
                SELECT pg_catalog.array_agg(
                           CASE WHEN u.a BETWEEN 0 AND u.shards - 1 AND u.b BETWEEN 0 AND u.shards - 1 THEN coalesce(s.shard, u.a) END
                           ORDER BY u.ord) INTO picks
                  FROM unnest(names, keys, rates, periods, capacities, starts, shards, shard_a, shard_b) WITH ORDINALITY
                    AS u (name, key, rate, period, capacity, start, shards, a, b, ord)
                  LEFT JOIN LATERAL (
                    SELECT r.shard
                      FROM /* TEMPLATE: schema */rate_limits AS r
                     WHERE r.name = u.name AND r.key = u.key AND r.shard IN (u.a, u.b) AND u.a <> u.b
                     ORDER BY /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, CASE WHEN u.start IS NULL THEN at ELSE date_bin(u.period, at, u.start) END,
                                  u.rate / u.shards::double precision, u.period, u.capacity / u.shards::double precision, u.start) DESC,
                              r.shard
                     LIMIT 1
                  ) AS s ON true;
            END IF;

            -- 2. If one row of each limit has enough by itself, by a plain read, take from those. A shard takes only what it
            -- has: debts are shared by all shards (step 3), and a reservation may forfeit some. Each UPDATE locks its row, in order, and evaluates its WHERE
            -- again on what it has waited for (or raises 40001). If one fails, the subtransaction gives everything back,
            -- locks included.
            --
            -- (LATERAL and OFFSET 0: rows are looked up by their keys whatever the planner thinks of the table; above READ COMMITTED
            -- it would conflict with all that it reads.)
            SELECT count(*) INTO m
              FROM pg_catalog.generate_subscripts(names, 1) AS p,
                   LATERAL (
                    SELECT FROM /* TEMPLATE: schema */rate_limits AS r
                     WHERE r.name = names[p] AND r.key = keys[p] AND r.shard = picks[p] AND r.shards = shards[p]
                       AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, CASE WHEN starts[p] IS NULL THEN at ELSE date_bin(periods[p], at, starts[p]) END,
                               rates[p] / shards[p]::double precision, periods[p], capacities[p] / shards[p]::double precision,
                               starts[p]) - counts[p]
                           >= CASE WHEN shards[p] = 1 AND NOT reserve THEN floors[p] ELSE 0 END
                    OFFSET 0
                   ) AS r
             WHERE /* TEMPLATE: schema */_ratelimit_valid(rates[p], periods[p], capacities[p], counts[p], now) AND floors[p] <= '0';
            IF m > 0 AND m = pg_catalog.cardinality(names) AND m = pg_catalog.cardinality(keys) THEN
                ord := '{}'; value := '{}'; ts := '{}';
                BEGIN
                    FOR rec IN
                        SELECT p, names[p] AS name, keys[p] AS key, picks[p] AS pick, shards[p] AS shards,
                               rates[p] / shards[p]::double precision AS rate, periods[p] AS period,
                               capacities[p] / shards[p]::double precision AS capacity, starts[p] AS start, counts[p] AS count,
                               CASE WHEN shards[p] = 1 AND NOT reserve THEN floors[p] ELSE 0 END AS floor,
                               CASE WHEN starts[p] IS NULL THEN at ELSE date_bin(periods[p], at, starts[p]) END AS upto
                          FROM pg_catalog.generate_subscripts(names, 1) AS p
                         ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"
                    LOOP
                        IF rec.start IS NULL THEN
                            UPDATE /* TEMPLATE: schema */rate_limits AS r
                               SET value = /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, NULL) - rec.count,
                                   ts = greatest(r.ts, at)
                             WHERE r.name = rec.name AND r.key = rec.key AND r.shard = rec.pick AND r.shards = rec.shards
                               AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, NULL) - rec.count >= rec.floor
                            RETURNING r.value, r.ts INTO new_value, new_ts;
                        ELSE
                            UPDATE /* TEMPLATE: schema */rate_limits AS r
                               SET value = /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, rec.start) - rec.count,
                                   ts = greatest(r.ts, at)
                             WHERE r.name = rec.name AND r.key = rec.key AND r.shard = rec.pick AND r.shards = rec.shards
                               AND /* TEMPLATE: schema */_ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, rec.start) - rec.count >= rec.floor
                            RETURNING r.value, r.ts INTO new_value, new_ts;
                        END IF;
                        IF new_value IS NULL THEN
                            RAISE SQLSTATE 'RL001';
                        END IF;
                        ord := pg_catalog.array_append(ord, rec.p);
                        value := pg_catalog.array_append(value, new_value);
                        ts := pg_catalog.array_append(ts, new_ts);
                    END LOOP;
                    RETURN ROW(true, at, ord, value, ts)::/* TEMPLATE: schema */_ratelimit_decisions;
                EXCEPTION WHEN SQLSTATE 'RL001' THEN
                    NULL;
                END;
            END IF;
        END IF;

        IF places IS NULL THEN
            SELECT pg_catalog.array_agg(p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"),
                   pg_catalog.count(DISTINCT (names[p], keys[p])) FILTER (WHERE /* TEMPLATE: schema */_ratelimit_valid(rates[p], periods[p], capacities[p], counts[p], now)
                       AND floors[p] <= '0' AND isfinite(coalesce(starts[p], 'epoch')) AND shards[p] BETWEEN 1 AND 100)
              INTO places, m
              FROM pg_catalog.generate_subscripts(names, 1) AS p;
            IF (m > 0 AND m = pg_catalog.cardinality(names) AND op IN ('consume', 'check') AND reserve IS NOT NULL) IS NOT TRUE THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
            END IF;
        END IF;
        at := coalesce(now, clock_timestamp()); -- step 2 may have waited

        -- 3. Otherwise decide on all rows of all limits: first by a plain read, since a denial must not write; then, if that
        -- would grant, again with all rows locked, in order. If locking has changed the answer or the set of rows, or
        -- another transaction has inserted them, the subtransaction gives the locks back, and round it goes.
        --
        -- A limit that has m rows has been sharded m ways so far, whatever it is to be now: each row gets rate/m and
        -- holds capacity/m, so that changing the number of shards mints nothing and forgives nothing.
        BEGIN
            FOR pass IN 1..2 LOOP
                IF pass = 2 THEN
                    FOREACH i IN ARRAY places LOOP
                        PERFORM 1 FROM /* TEMPLATE: schema */rate_limits AS r
                          WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                        GET DIAGNOSTICS m = ROW_COUNT;
                        IF m = 0 AND pg_catalog.cardinality(names) > 1 THEN
                            -- A limit without rows is full. They have to be there, and locked, before those of the next limit.
                            INSERT INTO /* TEMPLATE: schema */rate_limits (name, key, shard, shards, value, ts)
                            SELECT names[i], keys[i], s, shards[i], capacities[i] / shards[i]::double precision, at
                              FROM generate_series(0, shards[i] - 1) AS s
                            ON CONFLICT DO NOTHING;
                            GET DIAGNOSTICS m = ROW_COUNT;
                            IF m <> shards[i] THEN
                                RAISE SQLSTATE 'RL001';
                            END IF;
                        END IF;
                        locked[i] := m;
                    END LOOP;
                    at := coalesce(now, clock_timestamp()); -- locking may have waited
                END IF;
                granted := true;
                ord := '{}'; value := '{}'; ts := '{}';
                FOREACH i IN ARRAY places LOOP
                    upto[i] := CASE WHEN starts[i] IS NULL THEN at ELSE date_bin(periods[i], at, starts[i]) END;
                    rows[i] := 0; totals[i] := 0; lowest := NULL; highest := NULL; alike[i] := false; latest[i] := at; first_ts[i] := NULL;
                    FOR rec IN
                        SELECT r.value, r.ts, count(*) OVER () AS m, bool_and(r.shards = shards[i]) OVER () AS alike
                          FROM /* TEMPLATE: schema */rate_limits AS r
                         WHERE r.name = names[i] AND r.key = keys[i]
                         ORDER BY r.shard
                    LOOP
                        available := /* TEMPLATE: schema */_ratelimit_available(rec.value, rec.ts, upto[i], rates[i] / rec.m::double precision, periods[i],
                            capacities[i] / rec.m::double precision, starts[i]);
                        totals[i] := totals[i] + available;
                        lowest := least(lowest, available); highest := greatest(highest, available);
                        rows[i] := rec.m; alike[i] := rec.alike; latest[i] := greatest(latest[i], rec.ts);
                        first_ts[i] := least(first_ts[i], greatest(rec.ts, at));
                        ord := pg_catalog.array_append(ord, i);
                        value := pg_catalog.array_append(value, rec.value);
                        ts := pg_catalog.array_append(ts, rec.ts);
                    END LOOP;
                    IF rows[i] = 0 OR lowest = capacities[i] / rows[i]::double precision THEN -- all are full: the sum may be a little different
                        totals[i] := capacities[i];
                    ELSIF lowest = highest THEN -- to add the same again and again would be rounded in one direction
                        totals[i] := rows[i]::double precision * lowest;
                    END IF;
                    lefts[i] := least(totals[i] - counts[i], capacities[i]);
                    IF NOT reserve THEN
                        granted := granted AND lefts[i] >= floors[i] - CASE WHEN greatest(rows[i], shards[i]) > 1 THEN slack ELSE 0 END;
                    END IF;
                END LOOP;
                IF reserve THEN
                    run_at := at;
                    FOREACH i IN ARRAY places LOOP
                        owns[i] := /* TEMPLATE: schema */_ratelimit_run_at(lefts[i], ARRAY(SELECT ts[j] FROM pg_catalog.generate_subscripts(ord, 1) AS j WHERE ord[j] = i ORDER BY j),
                            at, rates[i], periods[i], capacities[i], starts[i], shards[i]);
                        run_at := greatest(run_at, owns[i]);
                    END LOOP;
                    FOREACH i IN ARRAY places LOOP
                        IF run_at > at AND counts[i] <= capacities[i] AND (starts[i] IS NOT NULL OR run_at > owns[i]) THEN
                            lefts[i] := least(lefts[i], capacities[i] - counts[i] - /* TEMPLATE: schema */_ratelimit_available(0, coalesce(first_ts[i], at),
                                CASE WHEN starts[i] IS NULL THEN run_at ELSE date_bin(periods[i], run_at, starts[i]) END,
                                rates[i], periods[i], 'Infinity', starts[i]));
                        END IF;
                        granted := granted AND lefts[i] >= floors[i] - CASE WHEN greatest(rows[i], shards[i]) > 1 THEN slack ELSE 0 END;
                    END LOOP;
                END IF;
                IF pass = 1 AND (op = 'check' OR NOT granted) THEN
                    IF or_raise AND NOT granted THEN
                        PERFORM /* TEMPLATE: schema */_ratelimit_raise(names, at, ord, value, ts);
                    END IF;
                    RETURN ROW(granted, at, ord, value, ts)::/* TEMPLATE: schema */_ratelimit_decisions;
                END IF;
            END LOOP;
            IF NOT granted OR locked OPERATOR(pg_catalog.<>) rows THEN
                RAISE SQLSTATE 'RL001';
            END IF;

            -- 4. Take, and spread what is left evenly.
            ord := '{}'; value := '{}'; ts := '{}';
            FOREACH i IN ARRAY places LOOP
                IF rows[i] = shards[i] AND alike[i] THEN
                    FOR rec IN
                        UPDATE /* TEMPLATE: schema */rate_limits AS r
                           SET value = lefts[i] / shards[i]::double precision, ts = greatest(r.ts, at)
                         WHERE r.name = names[i] AND r.key = keys[i]
                        RETURNING r.value, r.ts
                    LOOP
                        ord := pg_catalog.array_append(ord, i);
                        value := pg_catalog.array_append(value, rec.value);
                        ts := pg_catalog.array_append(ts, rec.ts);
                    END LOOP;
                ELSE -- first use, or another number of shards
                    DELETE FROM /* TEMPLATE: schema */rate_limits AS r WHERE r.name = names[i] AND r.key = keys[i] AND rows[i] > 0;
                    m := 0;
                    FOR rec IN
                        INSERT INTO /* TEMPLATE: schema */rate_limits AS r (name, key, shard, shards, value, ts)
                        SELECT names[i], keys[i], s, shards[i], lefts[i] / shards[i]::double precision, latest[i]
                          FROM generate_series(0, shards[i] - 1) AS s
                        ON CONFLICT DO NOTHING
                        RETURNING r.value, r.ts
                    LOOP
                        m := m + 1;
                        ord := pg_catalog.array_append(ord, i);
                        value := pg_catalog.array_append(value, rec.value);
                        ts := pg_catalog.array_append(ts, rec.ts);
                    END LOOP;
                    IF m <> shards[i] THEN
                        RAISE SQLSTATE 'RL001';
                    END IF;
                END IF;
            END LOOP;
            RETURN ROW(true, at, ord, value, ts)::/* TEMPLATE: schema */_ratelimit_decisions;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row', names);
END
$body$;

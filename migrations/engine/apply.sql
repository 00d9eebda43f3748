-- Decides several limits together, all or nothing, with or without shards. op is
--   consume  take every count, or nothing
--   check    return what consume would return; write and lock nothing
--   take     take as many tokens as there are (see `mosts`), or nothing
-- With `reserve`, the work may have to wait. Tokens that would be refilled above a capacity until it runs are forfeited:
-- Reserve in internal/algebra/promise.go has the rule, docs/refunds.md the reasons. Work that would wait longer than `within`
-- is denied; NULL is no bound. until: the tokens are for a hold that lasts so long at least.
--
-- The arguments are arrays of one length, with one position for each limit. No (name, key) occurs twice. shard_a and shard_b
-- are two shards to choose between. `windows` has the windows of all calendar windows, one list after another: those of limit
-- i are windows[firsts[i]:lasts[i]], and firsts[i] is NULL for the other kinds. Each shard has rate/shards and holds
-- capacity/shards. It takes no more than it holds, since a limit's debt is spread evenly over all its shards.
--
-- `mosts` is for take. All limits give the same number of tokens: the largest whole number that each of them has, and at most the
-- smallest `most`. Their counts are 1 and their floors 0, less the tolerance: with less than 1, the call is denied.
--
-- Returns the rows of each limit, with ord: the new ones if it was granted, or the ones that led to the denial. A limit without
-- rows is full and returns none. A sharded limit that took from one shard returns that shard alone.
--
-- Expired holds are ended first, with all rows locked in the common order; the plain read of step 3, and what it denies, count them as ended.
--
-- Locks rows in the common order (name, key, shard). A single shard that has too little once it is locked is released,
-- by rolling back its subtransaction, before all shards are locked (CONCURRENCY.md, C4 and D1).
CREATE OR REPLACE FUNCTION ratelimit._apply(
    op text, names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean DEFAULT false, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL, mosts double precision[] DEFAULT NULL, within interval DEFAULT NULL,
    until timestamptz DEFAULT NULL
) RETURNS ratelimit._decisions
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    granted boolean;
    at      timestamptz;
    ord     integer[];
    value   double precision[];
    ts      timestamptz[];

    -- Arrays by position. `places` has the positions in lock order.
    places integer[];
    picks  smallint[];                 -- the shard to take from
    rows   integer[] := '{}';          -- the number of rows
    locked integer[] := '{}';          -- the number of locked rows
    alike  boolean[] := '{}';          -- true if all rows have the limit's number of shards
    totals double precision[] := '{}'; -- the tokens in all rows together
    latest timestamptz[] := '{}';      -- the latest ts of the rows, or now if that is later
    lefts  double precision[] := '{}'; -- the tokens in all rows after the call
    owns   timestamptz[] := '{}';      -- the instant at which the limit alone would let the work run
    run_at timestamptz;                -- the instant at which the work may run
    taken  double precision;           -- what every limit gives
    promised timestamptz;              -- when the work may run, if it has to wait: see ratelimit._promise
    due       boolean;                 -- some may have expired
    missed    integer := 0;            -- how often that was not enough

    v         double precision[];      -- the values of one limit's rows
    t         timestamptz[];           -- their ts
    same      boolean;                 -- they have its number of shards
    lapses    timestamptz;
    rec       record;
    i         integer;
    m         integer;
    new_value double precision;
    new_ts    timestamptz;
BEGIN
    FOR attempt IN 1..100 LOOP
        IF op = 'consume' AND NOT ratelimit._distributed() THEN
            -- 1. Pick the fuller of a sharded limit's two shards by a plain read. Above READ COMMITTED, pick shard_a: a shard
            -- that is read but not taken from conflicts with the transactions that take from it (C6).
            at := coalesce(now, clock_timestamp());
            IF shard_a OPERATOR(pg_catalog.=) shard_b OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
                picks := shard_a;
            ELSE
                SELECT pg_catalog.array_agg(
                           CASE WHEN u.a BETWEEN 0 AND u.shards - 1 AND u.b BETWEEN 0 AND u.shards - 1 THEN coalesce(s.shard, u.a) END
                           ORDER BY u.ord) INTO picks
                  FROM unnest(names, keys, rates, periods, capacities, starts, firsts, lasts, shards, shard_a, shard_b) WITH ORDINALITY
                    AS u (name, key, rate, period, capacity, start, first, last, shards, a, b, ord)
                  LEFT JOIN LATERAL (
                    SELECT r.shard
                      FROM ratelimit.limits AS r
                     WHERE r.name = u.name AND r.key = u.key AND r.shard IN (u.a, u.b) AND u.a <> u.b
                     ORDER BY ratelimit._available(r.value, r.ts, ratelimit._upto(at, u.period, u.start, windows[u.first:u.last]),
                                  u.rate / u.shards::double precision, u.period, u.capacity / u.shards::double precision,
                                  u.start, windows[u.first:u.last]) DESC,
                              r.shard
                     LIMIT 1
                  ) AS s ON true;
            END IF;

            -- 2. If a plain read finds one row of each limit that has enough alone, take from these rows, in order. If an UPDATE
            -- fails, the subtransaction undoes the others and releases all locks (C4). A shard or a reservation takes only
            -- tokens that the row has: all shards share the debts, and a reservation may forfeit tokens (C1 and C8; step 3).
            --
            -- LATERAL and OFFSET 0 make the planner look rows up by their keys, whatever its estimates. Above READ COMMITTED,
            -- the call would otherwise conflict with every row that the plan reads.
            SELECT count(*) INTO m
              FROM pg_catalog.generate_subscripts(names, 1) AS p,
                   LATERAL (
                    SELECT 1 FROM ratelimit.limits AS r
                     WHERE r.name = names[p] AND r.key = keys[p] AND r.shard = picks[p] AND r.shards = shards[p] AND (r.lapses <= at) IS NOT TRUE
                       AND ratelimit._available(r.value, r.ts, ratelimit._upto(at, periods[p], starts[p], windows[firsts[p]:lasts[p]]),
                               rates[p] / shards[p]::double precision, periods[p], capacities[p] / shards[p]::double precision,
                               starts[p], windows[firsts[p]:lasts[p]]) - counts[p]
                           >= CASE WHEN shards[p] = 1 AND NOT reserve THEN floors[p] ELSE 0 END
                    OFFSET 0
                   ) AS r
             WHERE ratelimit._valid(rates[p], periods[p], capacities[p], counts[p], now) AND floors[p] <= '0';
            IF m > 0 AND m = pg_catalog.cardinality(names) AND m = pg_catalog.cardinality(keys) THEN
                ord := '{}'; value := '{}'; ts := '{}';
                BEGIN
                    FOR rec IN
                        SELECT p, names[p] AS name, keys[p] AS key, picks[p] AS pick, shards[p] AS shards,
                               rates[p] / shards[p]::double precision AS rate, periods[p] AS period,
                               capacities[p] / shards[p]::double precision AS capacity, starts[p] AS start,
                               windows[firsts[p]:lasts[p]] AS windows, counts[p] AS count,
                               CASE WHEN shards[p] = 1 AND NOT reserve THEN floors[p] ELSE 0 END AS floor,
                               ratelimit._upto(at, periods[p], starts[p], windows[firsts[p]:lasts[p]]) AS upto
                          FROM pg_catalog.generate_subscripts(names, 1) AS p
                         ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"
                    LOOP
                        IF rec.start IS NULL THEN
                            UPDATE ratelimit.limits AS r
                               SET value = ratelimit._available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, NULL) - rec.count,
                                   ts = greatest(r.ts, at), lapses = least(r.lapses, until)
                             WHERE r.name = rec.name AND r.key = rec.key AND r.shard = rec.pick AND r.shards = rec.shards AND (r.lapses <= at) IS NOT TRUE
                               AND ratelimit._available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, NULL) - rec.count >= rec.floor
                            RETURNING r.value, r.ts INTO new_value, new_ts;
                        ELSE
                            UPDATE ratelimit.limits AS r
                               SET value = ratelimit._available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, rec.start, rec.windows) - rec.count,
                                   ts = greatest(r.ts, at), lapses = least(r.lapses, until)
                             WHERE r.name = rec.name AND r.key = rec.key AND r.shard = rec.pick AND r.shards = rec.shards AND (r.lapses <= at) IS NOT TRUE
                               AND ratelimit._available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, rec.start, rec.windows) - rec.count >= rec.floor
                            RETURNING r.value, r.ts INTO new_value, new_ts;
                        END IF;
                        IF new_value IS NULL THEN
                            RAISE SQLSTATE 'RL001';
                        END IF;
                        ord := pg_catalog.array_append(ord, rec.p);
                        value := pg_catalog.array_append(value, new_value);
                        ts := pg_catalog.array_append(ts, new_ts);
                    END LOOP;
                    RETURN ROW(true, at, ord, value, ts, NULL)::ratelimit._decisions;
                EXCEPTION WHEN SQLSTATE 'RL001' THEN
                    NULL;
                END;
            END IF;
        END IF;

        IF places IS NULL THEN
            SELECT pg_catalog.array_agg(p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"),
                   pg_catalog.count(DISTINCT (names[p], keys[p])) FILTER (WHERE ratelimit._valid(rates[p], periods[p], capacities[p], counts[p], now)
                       AND floors[p] <= '0' AND isfinite(coalesce(starts[p], 'epoch')) AND shards[p] BETWEEN 1 AND 100)
              INTO places, m
              FROM pg_catalog.generate_subscripts(names, 1) AS p;
            IF (m > 0 AND m = pg_catalog.cardinality(names) AND op IN ('consume', 'check', 'take') AND reserve IS NOT NULL
                AND (op <> 'take' OR m = pg_catalog.cardinality(mosts) AND '1' <= ALL (mosts) AND '1e15' >= ALL (mosts) AND NOT reserve)) IS NOT TRUE THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
            END IF;
        END IF;
        at := coalesce(now, clock_timestamp()); -- step 2 may have waited
        due := false;

        -- 3. Otherwise decide on all rows of all limits: first by a plain read, since a denial must not write. If that would
        -- grant, lock all rows in order and decide again. If the decision or the set of rows has changed, or another
        -- transaction has inserted the rows, the subtransaction releases the locks and the loop tries again (C2 and C3).
        --
        -- A limit with m rows has had m shards so far, whatever its number is to be now. Each row gets rate/m and holds
        -- capacity/m. So a new number of shards neither creates tokens nor forgives debts (C5).
        BEGIN
            FOR pass IN 1..2 LOOP
                IF pass = 2 THEN
                    FOREACH i IN ARRAY places LOOP
                        PERFORM 1 FROM ratelimit.limits AS r
                          WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                        GET DIAGNOSTICS m = ROW_COUNT;
                        IF m = 0 AND (due OR pg_catalog.cardinality(names) > 1) THEN
                            -- A limit without rows is full. Insert its rows, and so lock them, before the next limit's. Only what
                            -- is returned was inserted: Citus counts rows that existed, too.
                            FOR rec IN
                                INSERT INTO ratelimit.limits AS r (name, key, shard, shards, value, ts)
                                SELECT names[i], keys[i], s, shards[i], capacities[i] / shards[i]::double precision, at
                                  FROM generate_series(0, shards[i] - 1) AS s
                                ON CONFLICT DO NOTHING
                                RETURNING r.shard
                            LOOP
                                m := m + 1;
                            END LOOP;
                            IF m <> shards[i] THEN
                                RAISE SQLSTATE 'RL001';
                            END IF;
                        END IF;
                        locked[i] := m;
                    END LOOP;
                    at := coalesce(now, clock_timestamp()); -- locking may have waited
                    FOREACH i IN ARRAY places LOOP
                        IF due THEN
                            PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, windows[firsts[i]:lasts[i]]);
                        END IF;
                    END LOOP;
                END IF;
                granted := true;
                ord := '{}'; value := '{}'; ts := '{}';
                FOREACH i IN ARRAY places LOOP
                    SELECT coalesce(pg_catalog.array_agg(r.value ORDER BY r.shard), '{}'), coalesce(pg_catalog.array_agg(r.ts ORDER BY r.shard), '{}'),
                           coalesce(bool_and(r.shards = shards[i]), false), min(r.lapses)
                      INTO v, t, same, lapses
                      FROM ratelimit.limits AS r
                     WHERE r.name = names[i] AND r.key = keys[i];
                    IF pass = 1 AND lapses <= at AND missed < 2 THEN -- if nothing came of it twice, somebody has locked a hold: then only the rows count
                        due := ratelimit._ends();
                        IF due OR op = 'check' THEN
                            SELECT l.value, l.ts INTO v, t
                              FROM ratelimit._lapsed(names[i], keys[i], at, rates[i], periods[i], capacities[i], starts[i], windows[firsts[i]:lasts[i]]) AS l;
                        END IF;
                    END IF;
                    rows[i] := pg_catalog.cardinality(v); alike[i] := same; latest[i] := (SELECT greatest(max(u.t), at) FROM pg_catalog.unnest(t) AS u (t));
                    ord := pg_catalog.array_cat(ord, pg_catalog.array_fill(i, ARRAY[rows[i]]));
                    value := pg_catalog.array_cat(value, v);
                    ts := pg_catalog.array_cat(ts, t);
                    totals[i] := ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], starts[i], windows[firsts[i]:lasts[i]]);
                    lefts[i] := least(totals[i] - counts[i], capacities[i]);
                    IF NOT reserve THEN
                        granted := granted AND lefts[i] >= floors[i];
                    END IF;
                END LOOP;
                IF reserve THEN
                    run_at := at;
                    FOREACH i IN ARRAY places LOOP
                        owns[i] := ratelimit._run_at(lefts[i], ARRAY(SELECT ts[j] FROM pg_catalog.generate_subscripts(ord, 1) AS j WHERE ord[j] = i ORDER BY j),
                            at, rates[i], periods[i], capacities[i], starts[i], shards[i], windows[firsts[i]:lasts[i]]);
                        run_at := greatest(run_at, owns[i]);
                    END LOOP;
                    FOREACH i IN ARRAY places LOOP
                        IF starts[i] IS NOT NULL OR run_at > owns[i] THEN
                            lefts[i] := ratelimit._kept(lefts[i], ARRAY(SELECT ts[j] FROM pg_catalog.generate_subscripts(ord, 1) AS j WHERE ord[j] = i),
                                at, run_at, rates[i], periods[i], capacities[i], starts[i], counts[i], windows[firsts[i]:lasts[i]]);
                        END IF;
                        -- Refills after the last window are not known, so no promise can be made for that time.
                        granted := granted AND (run_at > windows[lasts[i]]) IS NOT TRUE AND (owns[i] > at + within) IS NOT TRUE AND lefts[i] >= floors[i];
                    END LOOP;
                ELSIF op = 'take' AND granted THEN
                    taken := 'Infinity';
                    FOREACH i IN ARRAY places LOOP
                        taken := least(taken, mosts[i], ratelimit._whole(totals[i], floors[i]));
                    END LOOP;
                    FOREACH i IN ARRAY places LOOP
                        lefts[i] := totals[i] - taken;
                    END LOOP;
                END IF;
                IF pass = 1 AND (op = 'check' OR NOT granted) THEN
                    IF or_raise AND NOT granted THEN
                        PERFORM ratelimit._raise(names, at, ord, value, ts);
                    END IF;
                    RETURN ROW(granted, at, ord, value, ts, NULL)::ratelimit._decisions;
                END IF;
            END LOOP;
            missed := missed + CASE WHEN due AND NOT granted THEN 1 ELSE 0 END;
            IF NOT granted OR locked OPERATOR(pg_catalog.<>) rows THEN
                RAISE SQLSTATE 'RL001';
            END IF;

            -- 4. Take the tokens, and spread the rest evenly over the shards.
            ord := '{}'; value := '{}'; ts := '{}';
            FOREACH i IN ARRAY places LOOP
                promised := CASE WHEN NOT reserve THEN ratelimit._promise(lefts[i], floors[i], latest[i], rates[i], periods[i], capacities[i])
                    WHEN run_at > at THEN run_at END;
                IF rows[i] = shards[i] AND alike[i] THEN
                    FOR rec IN
                        UPDATE ratelimit.limits AS r
                           SET value = lefts[i] / shards[i]::double precision, ts = greatest(r.ts, at), promised = greatest(r.promised, promised), lapses = least(r.lapses, until)
                         WHERE r.name = names[i] AND r.key = keys[i]
                        RETURNING r.value, r.ts
                    LOOP
                        ord := pg_catalog.array_append(ord, i);
                        value := pg_catalog.array_append(value, rec.value);
                        ts := pg_catalog.array_append(ts, rec.ts);
                    END LOOP;
                ELSE -- the first use, or a new number of shards
                    SELECT greatest(max(r.promised), promised), least(min(r.lapses), until) INTO promised, lapses
                      FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] AND rows[i] > 0;
                    DELETE FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] AND rows[i] > 0;
                    m := 0;
                    FOR rec IN
                        INSERT INTO ratelimit.limits AS r (name, key, shard, shards, value, ts, promised, lapses)
                        SELECT names[i], keys[i], s, shards[i], lefts[i] / shards[i]::double precision, latest[i], promised, lapses
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
            RETURN ROW(true, at, ord, value, ts, taken)::ratelimit._decisions;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row against other transactions', names);
END
$body$;

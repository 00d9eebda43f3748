-- +goose Up

-- The engine. Every function runs as its caller (SECURITY INVOKER). They are created through EXECUTE so that the names in
-- their bodies carry the schema that the migration runs in: whoever calls them with whatever search_path works on this
-- table (and a SET search_path clause would cost 5 % of every call).
--
-- For the same reason operators and functions of Postgres are called with exactly the types that pg_catalog has them for: a
-- better match would be taken from any schema of the path (CVE-2018-1058). So a constant beside a double precision or a numeric
-- is quoted ('0' is read as the other side's type; 0 is an integer, 1e16 a numeric), and an integer beside one is cast, as it
-- would be anyway. What takes an array or any type is called as pg_catalog.f(...), with array_append for ||, or
-- OPERATOR(pg_catalog.=). What looks up no operator (:=, CASE, COALESCE, GREATEST) may have a plain 0. TestAHostileSearchPath
-- fails where this is forgotten.
--
-- SET enable_seqscan = off is what keeps different keys apart in SERIALIZABLE: on a small table the planner prefers a
-- sequential scan, and that takes a predicate lock on the whole relation, so that any two callers conflict.
--
-- The arguments that the functions share:
--   rate, period   `rate` tokens per `period` (an interval without months)
--   capacity       the most that can be saved up
--   start          NULL: a token bucket, refilled continuously.
--                  Otherwise a fixed window: `rate` tokens at each instant start + k * period. start must lie before
--                  every instant that occurs; the library reduces it to the first period after 0001-01-01 UTC.
--   count, floor   take `count`, if that leaves at least `floor` (0; -maxReserved to reserve; -Infinity to charge)
--   now            NULL: clock_timestamp()
--   or_raise       true: a denial is an error instead of an answer, by ratelimit_raise (00004, which nothing else calls)
--   validated      true: the caller has validated the arguments, as package ratelimit and ratelimit() (00006) do. To do it again
--                  is 6 to 13 % of a call's instructions. What is not valid then may be granted, or leave a row behind (of NaN,
--                  of Infinity) with which later calls fail.

-- +goose StatementBegin
DO $install$
BEGIN

-- The tokens of a row at `upto`: now for a token bucket, the start of the current window for a fixed window.
-- Time that runs backwards refills nothing. The planner inlines it: each function in it is IMMUTABLE.
--
-- ts is the instant of the row's last use, of a fixed window, too: were it the start of the window, a limit whose kind, period or
-- start is changed would be refilled, by its new numbers, for time in which it had been used by the old ones.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_available(
    value double precision, ts timestamptz, upto timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(capacity, value + CASE
    WHEN start IS NULL THEN
        greatest(date_part('epoch', upto - ts), 0) * rate / date_part('epoch', period)
    ELSE
        greatest(round(date_part('epoch', upto - date_bin(period, ts, start)) / date_part('epoch', period)), 0) * rate
    END)
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- What became of one limit's row: its new state when granted, the state that decided when denied. (A type of its own,
-- since the row type of OUT parameters is put together again for every call. A ROW that is cast to it is not converted on return.)
EXECUTE replace($ddl$
CREATE TYPE @extschema@.ratelimit_decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz)
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- The same of the rows of several limits, or of a sharded one. ord is the place of each row's limit in the arguments; NULL: one row
-- for each limit, in order.
EXECUTE replace($ddl$
CREATE TYPE @extschema@.ratelimit_decisions AS (granted boolean, at timestamptz, ord integer[], value double precision[], ts timestamptz[])
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Takes from one limit that is not sharded: the path that everything else is measured against. Every operator in it is
-- looked up again for every call; that, and not the arithmetic, is what its length costs. A caller who expects to be denied
-- can say so: then the row is read before it is written, which decides the same, a denial faster and a grant slower.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_consume(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, floor double precision, now timestamptz DEFAULT NULL, expect_denial boolean DEFAULT false,
    or_raise boolean DEFAULT false, validated boolean DEFAULT false
) RETURNS @extschema@.ratelimit_decision
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    attempt integer;
    at      timestamptz;
    upto    timestamptz;
    value   double precision;
    ts      timestamptz;
    one     boolean;
    denied  boolean;
BEGIN
    IF validated THEN
        NULL;
    ELSIF (name <> '' AND key IS NOT NULL AND rate BETWEEN '1e-15' AND '1e15' AND period > '0'
        AND (capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15') AND (count = '0' OR count BETWEEN '1e-15' AND '1e15')
        AND floor <= '0' AND capacity - count >= floor
        AND isfinite(coalesce(start, 'epoch')) AND isfinite(coalesce(now, 'epoch'))) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s of %s per %s, capacity %s, floor %s is not a valid request, or can never be granted',
            quote_nullable(name), count, rate, period, capacity, floor);
    END IF;
    LOOP
        -- Locks the row if it has enough. Where it has to wait for another transaction, READ COMMITTED evaluates the
        -- WHERE again on the row's new version; REPEATABLE READ and SERIALIZABLE raise 40001. A row that lacks tokens
        -- at first sight is neither locked nor written. (Two statements, since the planner reduces the sum for a
        -- constant start.)
        IF NOT expect_denial THEN
            at := coalesce(now, clock_timestamp());
            IF start IS NULL THEN
                UPDATE @extschema@.rate_limits AS r
                   SET value = @extschema@.ratelimit_available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
                   AND @extschema@.ratelimit_available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            ELSE
                upto := date_bin(period, at, start);
                UPDATE @extschema@.rate_limits AS r
                   SET value = @extschema@.ratelimit_available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
                   AND @extschema@.ratelimit_available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            END IF;
            IF value IS NOT NULL THEN
                RETURN ROW(true, at, value, ts)::@extschema@.ratelimit_decision;
            END IF;
        END IF;

        -- Locks nothing. The UPDATE may have waited, so the clock is read again: an INSERT with an old instant would be
        -- refilled for time that has passed.
        SELECT r.value, r.ts, r.shards = 1 INTO value, ts, one
          FROM @extschema@.rate_limits AS r
         WHERE r.name = name AND r.key = key AND r.shard = 0;
        at := coalesce(now, clock_timestamp());
        IF one THEN
            IF start IS NULL THEN
                denied := @extschema@.ratelimit_available(value, ts, at, rate, period, capacity, NULL) - count < floor;
            ELSE
                denied := @extschema@.ratelimit_available(value, ts, date_bin(period, at, start), rate, period, capacity, start) - count < floor;
            END IF;
            IF denied THEN
                IF or_raise THEN
                    PERFORM @extschema@.ratelimit_raise(ARRAY[name], at, ARRAY[1], ARRAY[value], ARRAY[ts]);
                END IF;
                RETURN ROW(false, at, value, ts)::@extschema@.ratelimit_decision;
            END IF;
            -- It has enough by now: go round.
        ELSIF EXISTS (SELECT FROM @extschema@.rate_limits AS r WHERE r.name = name AND r.key = key) THEN
            -- The rows are those of a limit that was sharded. Make them one, taking nothing, and go round.
            PERFORM @extschema@.ratelimit_apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
                ARRAY[start], ARRAY[1], ARRAY[0], ARRAY['-Infinity'::double precision], ARRAY[0], ARRAY[0], NULL, now);
        ELSE
            -- Waits for another transaction's INSERT of the same key; if that commits, nothing is inserted here.
            INSERT INTO @extschema@.rate_limits AS r (name, key, shard, shards, value, ts)
            VALUES (name, key, 0, 1, capacity - count, at)
            ON CONFLICT DO NOTHING
            RETURNING r.value, r.ts INTO value, ts;
            IF FOUND THEN
                RETURN ROW(true, at, value, ts)::@extschema@.ratelimit_decision;
            END IF;
        END IF;
        value := NULL;
        expect_denial := false;
        attempt := coalesce(attempt, 0) + 1;
        IF attempt = 100 THEN
            RAISE serialization_failure USING MESSAGE = 'rate limit ' || quote_literal(name) || ': lost 100 races in a row';
        END IF;
    END LOOP;
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Decides several limits together, all or nothing, sharded ones included. op is
--   consume  take every count, or nothing
--   check    what consume would answer; writes and locks nothing
--   refund   give the counts back. consumed_at says when they were taken: a fixed window takes nothing back once the
--            window of that instant is over, since that would break the present window's cap.
-- The arguments are arrays of one length, a limit in each place, no (name, key) twice; shard_a and shard_b are two
-- shards to choose between. Each row of a sharded limit has rate/shards and holds capacity/shards; it takes no more than it
-- holds, since what the limit owes is spread evenly over all of them.
--
-- Answers the rows of each limit, with ord, as they are now if it was granted, or as they were when the denial was decided. A limit
-- without rows is full and has none. A sharded limit that took from one shard answers that shard alone.
--
-- Locks: rows in the order (name, key, shard), which is everybody's. A single shard that is locked and then found
-- wanting is released (its subtransaction is rolled back) before all shards are locked.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_apply(
    op text, names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    consumed_at timestamptz DEFAULT NULL, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false
) RETURNS @extschema@.ratelimit_decisions
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
    latest timestamptz[] := '{}';      -- the latest ts among them

    rec       record;
    i         integer;
    m         integer;
    new_value double precision;
    new_ts    timestamptz;
    available double precision;
    lowest    double precision;
    highest   double precision;
    take      double precision;
BEGIN
    FOR attempt IN 1..100 LOOP
        IF op = 'consume' AND (now IS NULL OR isfinite(now)) THEN
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
                      FROM @extschema@.rate_limits AS r
                     WHERE r.name = u.name AND r.key = u.key AND r.shard IN (u.a, u.b) AND u.a <> u.b
                     ORDER BY @extschema@.ratelimit_available(r.value, r.ts, CASE WHEN u.start IS NULL THEN at ELSE date_bin(u.period, at, u.start) END,
                                  u.rate / u.shards::double precision, u.period, u.capacity / u.shards::double precision, u.start) DESC,
                              r.shard
                     LIMIT 1
                  ) AS s ON true;
            END IF;

            -- 2. If one row of each limit has enough by itself, by a plain read, take from those. A shard takes only what it
            -- has: debts are shared by all shards (step 3). Each UPDATE locks its row, in order, and evaluates its WHERE
            -- again on what it has waited for (or raises 40001). If one fails, the subtransaction gives everything back,
            -- locks included.
            --
            -- What could grant more than it should is kept out (NaN is above everything); the rest of the validation
            -- can wait until this has failed. (LATERAL and OFFSET 0: rows are looked up by their keys whatever the planner
            -- thinks of the table; above READ COMMITTED it would conflict with all that it reads.)
            SELECT count(*) INTO m
              FROM pg_catalog.generate_subscripts(names, 1) AS p,
                   LATERAL (
                    SELECT FROM @extschema@.rate_limits AS r
                     WHERE r.name = names[p] AND r.key = keys[p] AND r.shard = picks[p] AND r.shards = shards[p]
                       AND @extschema@.ratelimit_available(r.value, r.ts, CASE WHEN starts[p] IS NULL THEN at ELSE date_bin(periods[p], at, starts[p]) END,
                               rates[p] / shards[p]::double precision, periods[p], capacities[p] / shards[p]::double precision,
                               starts[p]) - counts[p]
                           >= CASE shards[p] WHEN 1 THEN floors[p] ELSE 0 END
                    OFFSET 0
                   ) AS r
             WHERE least(counts[p], rates[p], capacities[p]) >= '0' AND counts[p] + rates[p] + capacities[p] < '1e16'
               AND floors[p] <= '0' AND periods[p] > '0' AND shards[p] BETWEEN 1 AND 100 AND (starts[p] IS NULL OR isfinite(starts[p]));
            IF m > 0 AND m = pg_catalog.cardinality(names) AND m = pg_catalog.cardinality(keys) THEN
                ord := '{}'; value := '{}'; ts := '{}';
                BEGIN
                    FOR rec IN
                        SELECT p, names[p] AS name, keys[p] AS key, picks[p] AS pick, shards[p] AS shards,
                               rates[p] / shards[p]::double precision AS rate, periods[p] AS period,
                               capacities[p] / shards[p]::double precision AS capacity, starts[p] AS start, counts[p] AS count,
                               CASE shards[p] WHEN 1 THEN floors[p] ELSE 0 END AS floor,
                               CASE WHEN starts[p] IS NULL THEN at ELSE date_bin(periods[p], at, starts[p]) END AS upto
                          FROM pg_catalog.generate_subscripts(names, 1) AS p
                         ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"
                    LOOP
                        IF rec.start IS NULL THEN
                            UPDATE @extschema@.rate_limits AS r
                               SET value = @extschema@.ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, NULL) - rec.count,
                                   ts = greatest(r.ts, at)
                             WHERE r.name = rec.name AND r.key = rec.key AND r.shard = rec.pick AND r.shards = rec.shards
                               AND @extschema@.ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, NULL) - rec.count >= rec.floor
                            RETURNING r.value, r.ts INTO new_value, new_ts;
                        ELSE
                            UPDATE @extschema@.rate_limits AS r
                               SET value = @extschema@.ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, rec.start) - rec.count,
                                   ts = greatest(r.ts, at)
                             WHERE r.name = rec.name AND r.key = rec.key AND r.shard = rec.pick AND r.shards = rec.shards
                               AND @extschema@.ratelimit_available(r.value, r.ts, rec.upto, rec.rate, rec.period, rec.capacity, rec.start) - rec.count >= rec.floor
                            RETURNING r.value, r.ts INTO new_value, new_ts;
                        END IF;
                        IF new_value IS NULL THEN
                            RAISE SQLSTATE 'RL001';
                        END IF;
                        ord := pg_catalog.array_append(ord, rec.p);
                        value := pg_catalog.array_append(value, new_value);
                        ts := pg_catalog.array_append(ts, new_ts);
                    END LOOP;
                    RETURN ROW(true, at, ord, value, ts)::@extschema@.ratelimit_decisions;
                EXCEPTION WHEN SQLSTATE 'RL001' THEN
                    NULL;
                END;
            END IF;
        END IF;

        -- What could grant more than it should has been kept out so far.
        IF places IS NULL THEN
            IF (op IN ('consume', 'check', 'refund') AND (op <> 'refund' OR consumed_at IS NOT NULL)
                AND pg_catalog.cardinality(names) > 0
                AND isfinite(coalesce(now, 'epoch')) AND isfinite(coalesce(consumed_at, 'epoch'))
                AND pg_catalog.cardinality(names) = ALL (ARRAY[pg_catalog.cardinality(keys), pg_catalog.cardinality(rates),
                    pg_catalog.cardinality(periods), pg_catalog.cardinality(capacities), pg_catalog.cardinality(starts),
                    pg_catalog.cardinality(shards), pg_catalog.cardinality(counts), pg_catalog.cardinality(floors),
                    pg_catalog.cardinality(shard_a), pg_catalog.cardinality(shard_b)])) IS NOT TRUE THEN
                RAISE invalid_parameter_value USING MESSAGE = 'rate limits: the arguments must be arrays of one length, the operation one of consume, check, refund (which says when it was consumed)';
            END IF;
            FOR i IN 1..pg_catalog.cardinality(names) LOOP
                IF (names[i] <> '' AND keys[i] IS NOT NULL AND rates[i] BETWEEN '1e-15' AND '1e15' AND periods[i] > '0'
                    AND (capacities[i] = '0' OR capacities[i] BETWEEN '1e-15' AND '1e15') AND shards[i] BETWEEN 1 AND 100
                    AND shard_a[i] >= 0 AND shard_a[i] < shards[i] AND shard_b[i] >= 0 AND shard_b[i] < shards[i]
                    AND isfinite(coalesce(starts[i], 'epoch'))
                    AND (counts[i] = '0' OR counts[i] BETWEEN '1e-15' AND '1e15') AND floors[i] <= '0'
                    AND (op = 'refund' OR capacities[i] - counts[i] >= floors[i])) IS NOT TRUE THEN
                    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s of %s per %s, capacity %s, floor %s, shards %s is not a valid request, or can never be granted',
                        quote_nullable(names[i]), counts[i], rates[i], periods[i], capacities[i], floors[i], shards[i]);
                END IF;
            END LOOP;
            SELECT pg_catalog.array_agg(p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C"),
                   pg_catalog.count(DISTINCT (names[p], keys[p]))
              INTO places, m
              FROM pg_catalog.generate_subscripts(names, 1) AS p;
            IF m <> pg_catalog.cardinality(names) THEN
                RAISE invalid_parameter_value USING MESSAGE = 'rate limits: a limit and key named twice in one call';
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
                        PERFORM 1 FROM @extschema@.rate_limits AS r
                          WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                        GET DIAGNOSTICS m = ROW_COUNT;
                        IF m = 0 AND op = 'consume' AND pg_catalog.cardinality(names) > 1 THEN
                            -- A limit without rows is full. They have to be there, and locked, before those of the next limit.
                            INSERT INTO @extschema@.rate_limits (name, key, shard, shards, value, ts)
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
                    rows[i] := 0; totals[i] := 0; lowest := NULL; highest := NULL; alike[i] := false; latest[i] := at;
                    FOR rec IN
                        SELECT r.value, r.ts, count(*) OVER () AS m, bool_and(r.shards = shards[i]) OVER () AS alike
                          FROM @extschema@.rate_limits AS r
                         WHERE r.name = names[i] AND r.key = keys[i]
                         ORDER BY r.shard
                    LOOP
                        available := @extschema@.ratelimit_available(rec.value, rec.ts, upto[i], rates[i] / rec.m::double precision, periods[i],
                            capacities[i] / rec.m::double precision, starts[i]);
                        totals[i] := totals[i] + available;
                        lowest := least(lowest, available); highest := greatest(highest, available);
                        rows[i] := rec.m; alike[i] := rec.alike; latest[i] := greatest(latest[i], rec.ts);
                        ord := pg_catalog.array_append(ord, i);
                        value := pg_catalog.array_append(value, rec.value);
                        ts := pg_catalog.array_append(ts, rec.ts);
                    END LOOP;
                    IF rows[i] = 0 OR lowest = capacities[i] / rows[i]::double precision THEN -- all are full: the sum may be a little different
                        totals[i] := capacities[i];
                    ELSIF lowest = highest THEN -- to add the same again and again would be rounded in one direction
                        totals[i] := rows[i]::double precision * lowest;
                    END IF;
                    granted := granted AND totals[i] - counts[i] >= floors[i]
                        - CASE WHEN greatest(rows[i], shards[i]) > 1 THEN slack ELSE 0 END;
                END LOOP;
                IF pass = 1 AND (op = 'check' OR op = 'consume' AND NOT granted) THEN
                    IF or_raise AND NOT granted THEN
                        PERFORM @extschema@.ratelimit_raise(names, at, ord, value, ts);
                    END IF;
                    RETURN ROW(granted, at, ord, value, ts)::@extschema@.ratelimit_decisions;
                END IF;
            END LOOP;
            IF op = 'consume' AND NOT granted OR locked OPERATOR(pg_catalog.<>) rows THEN
                RAISE SQLSTATE 'RL001';
            END IF;

            -- 4. Take or give, and spread what is left evenly.
            ord := '{}'; value := '{}'; ts := '{}';
            FOREACH i IN ARRAY places LOOP
                take := counts[i];
                IF op = 'refund' THEN
                    CONTINUE WHEN rows[i] = 0; -- full
                    take := CASE WHEN starts[i] IS NOT NULL AND date_bin(periods[i], consumed_at, starts[i])
                            < date_bin(periods[i], latest[i], starts[i]) THEN 0 ELSE -counts[i] END;
                END IF;
                IF rows[i] = shards[i] AND alike[i] THEN
                    FOR rec IN
                        UPDATE @extschema@.rate_limits AS r
                           SET value = least(totals[i] - take, capacities[i]) / shards[i]::double precision, ts = greatest(r.ts, at)
                         WHERE r.name = names[i] AND r.key = keys[i]
                        RETURNING r.value, r.ts
                    LOOP
                        ord := pg_catalog.array_append(ord, i);
                        value := pg_catalog.array_append(value, rec.value);
                        ts := pg_catalog.array_append(ts, rec.ts);
                    END LOOP;
                ELSE -- first use, or another number of shards
                    DELETE FROM @extschema@.rate_limits AS r WHERE r.name = names[i] AND r.key = keys[i] AND rows[i] > 0;
                    m := 0;
                    FOR rec IN
                        INSERT INTO @extschema@.rate_limits AS r (name, key, shard, shards, value, ts)
                        SELECT names[i], keys[i], s, shards[i], least(totals[i] - take, capacities[i]) / shards[i]::double precision, latest[i]
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
            RETURN ROW(true, at, ord, value, ts)::@extschema@.ratelimit_decisions;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row', names);
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Takes from one limit that is sharded: from one shard, if the arguments are validated, with an ord of NULL, or else what
-- ratelimit_apply does.
--
-- Of shard_a and shard_b it takes the better, by a plain read. If they are the same, or above READ COMMITTED, it reads none
-- but shard_a: one that is read and not taken conflicts with whoever takes it.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_consume_sharded(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer,
    count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    validated boolean DEFAULT false
) RETURNS @extschema@.ratelimit_decisions
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    each      double precision; -- rate of one shard
    room      double precision; -- capacity of one shard
    upto      timestamptz;
    at        timestamptz;
    pick      integer;
    new_value double precision;
    new_ts    timestamptz;
BEGIN
    IF validated THEN
        at := coalesce(now, clock_timestamp());
        upto := CASE WHEN start IS NULL THEN at ELSE date_bin(period, at, start) END;
        each := rate / shards::double precision;
        room := capacity / shards::double precision;
        pick := shard_a;
        IF shard_a <> shard_b AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
            SELECT r.shard INTO pick
              FROM @extschema@.rate_limits AS r
             WHERE r.name = name AND r.key = key AND r.shard IN (shard_a, shard_b)
             ORDER BY @extschema@.ratelimit_available(r.value, r.ts, upto, each, period, room, start) DESC, r.shard LIMIT 1;
        END IF;

        -- A shard takes only what it has: debts are shared by all shards. The UPDATE locks its row if that has enough,
        -- and evaluates its WHERE again on what it has waited for (or raises 40001). If that fails, the
        -- subtransaction gives the lock back: ratelimit_apply locks all shards, in order.
        BEGIN
            IF start IS NULL THEN
                UPDATE @extschema@.rate_limits AS r
                   SET value = @extschema@.ratelimit_available(r.value, r.ts, upto, each, period, room, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards
                   AND @extschema@.ratelimit_available(r.value, r.ts, upto, each, period, room, NULL) - count >= '0'
                RETURNING r.value, r.ts INTO new_value, new_ts;
            ELSE
                UPDATE @extschema@.rate_limits AS r
                   SET value = @extschema@.ratelimit_available(r.value, r.ts, upto, each, period, room, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards
                   AND @extschema@.ratelimit_available(r.value, r.ts, upto, each, period, room, start) - count >= '0'
                RETURNING r.value, r.ts INTO new_value, new_ts;
            END IF;
            IF new_value IS NULL THEN
                RAISE SQLSTATE 'RL001';
            END IF;
            RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts])::@extschema@.ratelimit_decisions;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END IF;
    RETURN @extschema@.ratelimit_apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
        ARRAY[start], ARRAY[shards], ARRAY[count], ARRAY[floor], ARRAY[shard_a], ARRAY[shard_b], NULL, now, or_raise);
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Takes from several limits that are not sharded, all or nothing: ratelimit_apply says what the arguments are. In one pass
-- over places that are validated and in everybody's order already, with an ord of NULL, or else what ratelimit_apply does.
--
-- A plain read of all rows but the first comes first, since a denial must not write; the first UPDATE finds out by itself
-- whether its row has enough. Each UPDATE locks its row and evaluates its WHERE again on what it has waited for (or raises
-- 40001). If one of them has lost a race, what was taken before it is given back, which is exact (but for rounding) while the rows are
-- locked.
--
-- PL/pgSQL keeps the simple expressions of a loop for the transaction, but starts each statement afresh: hence the variables.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_consume_several(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], floors double precision[], now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    validated boolean DEFAULT false
) RETURNS @extschema@.ratelimit_decisions
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    n         CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    name      text;
    key       text;
    rate      double precision;
    period    interval;
    capacity  double precision;
    start     timestamptz;
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
        EXIT WHEN validated IS NOT TRUE;
        FOR p IN 3 - pass..n LOOP
            name := names[p]; key := keys[p]; capacity := capacities[p]; count := counts[p]; floor := floors[p];
            IF pass = 1 THEN
                SELECT r.value, r.ts INTO new_value, new_ts
                  FROM @extschema@.rate_limits AS r
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1;
                EXIT passes WHEN (FOUND AND (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (name, key)) IS NOT TRUE;
                -- Time only adds to a value, up to the capacity: mostly it need not be asked how much.
                CONTINUE WHEN least(new_value, capacity) - count >= floor;
            END IF;
            rate := rates[p]; period := periods[p]; start := starts[p];
            IF start IS NOT NULL THEN
                upto := date_bin(period, at, start);
            END IF;
            IF pass = 1 THEN
                IF start IS NULL THEN
                    new_value := @extschema@.ratelimit_available(new_value, new_ts, at, rate, period, capacity, NULL);
                ELSE
                    new_value := @extschema@.ratelimit_available(new_value, new_ts, upto, rate, period, capacity, start);
                END IF;
                EXIT passes WHEN new_value - count < floor;
                CONTINUE;
            END IF;

            IF start IS NULL THEN
                UPDATE @extschema@.rate_limits AS r
                   SET value = @extschema@.ratelimit_available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
                   AND @extschema@.ratelimit_available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            ELSE
                UPDATE @extschema@.rate_limits AS r
                   SET value = @extschema@.ratelimit_available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
                   AND @extschema@.ratelimit_available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            END IF;
            IF NOT FOUND THEN
                FOR taken IN 1..p - 1 LOOP
                    UPDATE @extschema@.rate_limits AS r
                       SET value = r.value + counts[taken]
                     WHERE r.name = names[taken] AND r.key = keys[taken] AND r.shard = 0;
                END LOOP;
                EXIT passes;
            END IF;
            value[p] := new_value; ts[p] := new_ts;
            IF p = n THEN
                RETURN ROW(true, at, NULL, value, ts)::@extschema@.ratelimit_decisions;
            END IF;
        END LOOP;
    END LOOP;

    RETURN @extschema@.ratelimit_apply('consume', names, keys, rates, periods, capacities, starts,
        pg_catalog.array_fill(1, ARRAY[n]), counts, floors, pg_catalog.array_fill(0, ARRAY[n]), pg_catalog.array_fill(0, ARRAY[n]), NULL, now, or_raise);
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Makes limits full again by deleting their rows, all shards, locked in everybody's order. Answers how many rows there were.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_reset(names text[], keys text[], OUT deleted integer)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    r record;
    n integer;
BEGIN
    deleted := 0;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        PERFORM 1 FROM @extschema@.rate_limits AS t WHERE t.name = r.name AND t.key = r.key ORDER BY t.shard FOR UPDATE;
        DELETE FROM @extschema@.rate_limits AS t WHERE t.name = r.name AND t.key = r.key;
        GET DIAGNOSTICS n = ROW_COUNT;
        deleted := deleted + n;
    END LOOP;
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

END
$install$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION ratelimit_consume(text, text, double precision, interval, double precision, timestamptz, double precision, double precision, timestamptz, boolean, boolean, boolean);
DROP FUNCTION ratelimit_consume_sharded(text, text, double precision, interval, double precision, timestamptz, integer, double precision, double precision, integer, integer, timestamptz, boolean, boolean);
DROP FUNCTION ratelimit_consume_several(text[], text[], double precision[], interval[], double precision[], timestamptz[], double precision[], double precision[], timestamptz, boolean, boolean);
DROP FUNCTION ratelimit_apply(text, text[], text[], double precision[], interval[], double precision[], timestamptz[], integer[], double precision[], double precision[], integer[], integer[], timestamptz, timestamptz, boolean);
DROP FUNCTION ratelimit_reset(text[], text[]);
DROP TYPE ratelimit_decisions;
DROP TYPE ratelimit_decision;
DROP FUNCTION ratelimit_available(double precision, timestamptz, timestamptz, double precision, interval, double precision, timestamptz);

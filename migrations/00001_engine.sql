-- Code generated from engine/*.sql by `make generate`; DO NOT EDIT.

-- +goose Up
-- +goose StatementBegin
DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE feature_not_supported USING MESSAGE = pg_catalog.format('txlimit needs a database with the encoding UTF8, and this one has %s', current_setting('server_encoding')),
            HINT = 'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0, and move the data there.';
    END IF;
END
$$;
-- +goose StatementEnd
-- +goose StatementBegin
-- One row per (limit, key), or per shard of it. A missing row is a full one.
--
-- value is the balance in tokens at the instant ts. Below zero, reservations and charges owe tokens. The row does not hold the
-- tokens that were refilled since ts: every reader adds them (ratelimit._available).
--
-- promised is written by reservations that have to wait, in all rows of the key, and read by give-backs: until then, a debt is of waiting work
-- (docs/refunds.md).
-- lapses is written by holds that have an end, in the rows that they take from: none of the key's that the row knows of expires before it. Whoever finds it passed looks
-- for expired holds, and who takes ends them first (CONCURRENCY.md, J5).
--
-- COLLATE "C" compares names and keys byte by byte, so that all callers lock rows in the same order (CONCURRENCY.md, D1).
-- The fillfactor leaves room for the row's next version on its page, and no index has value or ts: updates are heap-only.
-- The table has no CHECK constraints (G1).
CREATE TABLE ratelimit.limits (
    name   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    shard  smallint         NOT NULL,
    shards smallint         NOT NULL,
    value  double precision NOT NULL,
    ts     timestamptz      NOT NULL,
    promised timestamptz,
    lapses timestamptz,
    PRIMARY KEY (name, key, shard)
) WITH (fillfactor = 90);

COMMENT ON TABLE ratelimit.limits IS 'txlimit: one row per limit and key, or per shard of it; a missing row is a full limit';

COMMENT ON COLUMN ratelimit.limits.name IS 'the name of the limit';

COMMENT ON COLUMN ratelimit.limits.key IS 'whose tokens they are, such as a user; '''' if the limit has no keys';

COMMENT ON COLUMN ratelimit.limits.shard IS 'the number of the row among those of the key, 0 to shards - 1';

COMMENT ON COLUMN ratelimit.limits.shards IS 'the number of rows that the limit has for this key';

COMMENT ON COLUMN ratelimit.limits.value IS 'the balance in tokens at the instant ts, without what was refilled since; below zero, tokens are owed';

COMMENT ON COLUMN ratelimit.limits.ts IS 'the instant of the balance';

COMMENT ON COLUMN ratelimit.limits.promised IS 'the latest instant at which work that had to wait was told to run; NULL: none had to';

COMMENT ON COLUMN ratelimit.limits.lapses IS 'no hold that has taken from the row expires before this instant; NULL: none can';

-- The tokens in a row at `upto` (see ratelimit._upto). Time that runs backwards refills nothing. All functions in it are
-- IMMUTABLE, so that the planner inlines it.
--
-- The windows of a calendar are as long as months are, so their starts are listed. For a row older than the list, the refills
-- before it are counted as if all windows were as long as the longest, which is never too many. With a period of 0, they are not: such a
-- row is refilled only if the list fills it. Then nothing is written by an estimate, and the library asks again with a longer list.
--
-- ts is the instant of the row's last use, for a fixed window too. If it were the start of the window, a new kind, period or
-- start would refill tokens for time in which the limit was used under the old numbers.
CREATE FUNCTION ratelimit._available(
    value double precision, ts timestamptz, upto timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(capacity, value + CASE
    WHEN start IS NULL THEN
        greatest(date_part('epoch', upto - ts), 0) * rate / date_part('epoch', period)
    WHEN windows IS NULL THEN
        greatest(round(date_part('epoch', upto - date_bin(period, ts, start)) / date_part('epoch', period)), 0) * rate
    ELSE
        CASE WHEN ts >= windows[1] THEN
            greatest(pg_catalog.width_bucket(upto, windows) - pg_catalog.width_bucket(ts, windows), 0)::double precision * rate
        WHEN period > '0' THEN
            (pg_catalog.width_bucket(upto, windows)::double precision
                + greatest(ceil(date_part('epoch', least(windows[1], upto) - ts) / date_part('epoch', period)) - '1', 0)) * rate
        WHEN value + pg_catalog.width_bucket(upto, windows)::double precision * rate >= capacity THEN
            pg_catalog.width_bucket(upto, windows)::double precision * rate
        ELSE 0 END
    END);

-- The instant up to which refills count at `at`: `at` itself, or the start of the current window for a fixed window.
CREATE FUNCTION ratelimit._upto(at timestamptz, period interval, start timestamptz, windows timestamptz[] DEFAULT NULL) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN start IS NULL OR windows IS NOT NULL THEN at ELSE date_bin(period, at, start) END;

-- How many tokens a call may lack because of rounding, if it may leave a balance of `lowest`: rounding alone denies nothing. It is at
-- most a thousandth of a token, so whole tokens stay exact at every capacity. No call leaves less than its floor less this, so that of
-- several calls does not add up. internal/algebra has the same. The callers of the functions that decide take it from the floor.
CREATE FUNCTION ratelimit._tolerance(capacity double precision, lowest double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least((capacity - lowest) * '1e-9', '1e-3');

-- The largest whole number of tokens that can be taken from total and leaves at least `lowest`. The difference may have been rounded up
-- to a whole number.
CREATE FUNCTION ratelimit._whole(total double precision, lowest double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN floor(total - lowest) - CASE WHEN total - floor(total - lowest) < lowest THEN '1'::double precision ELSE 0 END;

-- The balance from which on nothing is owed, for a limit whose balance is total now. A refill that repays a debt is rounded, too, also
-- where the capacity is 0.
CREATE FUNCTION ratelimit._even(total double precision, rate double precision, capacity double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN -ratelimit._tolerance(capacity, least(total, '0') - rate);

-- A balance as callers see it. If it lacks only the tolerance of a whole number, it is that number: so many tokens can be taken. What is
-- less than the smallest count is 0, as is a debt that rounding alone makes.
CREATE FUNCTION ratelimit._shown(total double precision, rate double precision, capacity double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN total >= '1e-15' THEN greatest(total, ratelimit._whole(total, -ratelimit._tolerance(capacity, 0)))
    WHEN total >= ratelimit._even(total, rate, capacity) THEN 0
    ELSE total END;

-- Reports whether a decision can be made with these numbers. Callers validate their arguments; this check stops NaN and NULL,
-- which would be granted or fill a bucket (CONCURRENCY.md, G2).
--
-- The planner inlines it. Each operator costs 1 % of a call of ratelimit._consume, so it has no more than it needs.
CREATE FUNCTION ratelimit._valid(
    rate double precision, period interval, capacity double precision, count double precision, now timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN rate + capacity + count < '1e16' AND least(rate, capacity, count) >= '0' AND isfinite(period) AND isfinite(coalesce(now, 'epoch'));

-- Reports whether ratelimit.limits is distributed by key over several servers. migrations/citus.sql replaces the function. Then the
-- functions run statements for one key each, which such a server can send on. On one server these cost up to three times as much.
-- The planner inlines it.
CREATE FUNCTION ratelimit._distributed() RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN false;

-- Reports whether one server numbers the transactions of all that write overrides. migrations/citus.sql replaces it, too: of a
-- distributed schema, each node that is called gives its own numbers.
CREATE FUNCTION ratelimit._one_server() RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN true;

-- Which database this is, for a program that has several. Standbys, restarts and other names of a server are the same one. NULL: it is not
-- known, as of a distributed schema, which each node is asked for.
CREATE FUNCTION ratelimit._database() RETURNS text
LANGUAGE plpgsql STABLE
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN CASE WHEN ratelimit._one_server() THEN (
        SELECT s.system_identifier::text || ' ' || d.oid::text
          FROM pg_catalog.pg_control_system() AS s CROSS JOIN pg_catalog.pg_database AS d
         WHERE d.datname = current_database()) END;
EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported THEN
    RETURN NULL;
END
$body$;

-- The decision on one limit. value and ts are the row's new state if it was granted, or the state that led to the denial.
-- A named type saves time: Postgres assembles the row type of OUT parameters again for every call, and a ROW that is cast to
-- this type needs no conversion on return.
CREATE TYPE ratelimit._decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz);

-- The decision on the rows of several limits, or of a sharded one. ord has, for each row, the position of its limit in the
-- arguments. NULL: one row for each limit, in order. taken is what ratelimit._apply took with the op 'take', otherwise NULL.
CREATE TYPE ratelimit._decisions AS (granted boolean, at timestamptz, ord integer[], value double precision[], ts timestamptz[],
    taken double precision);

-- The answer of a refund, and of the end of a hold. state: done; repeated; lost. The rows are those of after. moved: by limit, the tokens that came back; below zero: that were charged. lost: the positions of the lost.
CREATE TYPE ratelimit._settled AS (state text, at timestamptz, ord integer[], value double precision[], ts timestamptz[],
    moved double precision[], lost integer[]);

-- The arguments that the functions share:
--   rate, period   `rate` tokens per `period` (an interval without months)
--   capacity       the most tokens that can be saved up
--   start          NULL: a token bucket, refilled continuously.
--                  Otherwise: a fixed window, which gets `rate` tokens at each instant start + k * period. start must lie
--                  before every instant that occurs; the library moves it to the first period after 0001-01-01 UTC.
--   windows        a calendar window: the starts of its windows around the present, in order. It gets `rate` tokens at each.
--                  Then start is the first of them, and period the longest of those before, or 0 (see ratelimit._available). Refills after the last one
--                  are not counted. NULL: not a calendar window
--   count, floor   take `count` if at least `floor` is left: 0 usually, -maxReserved to reserve (-1e300 at the least), -Infinity to charge; always less the
--                  tolerance (ratelimit._tolerance), which the caller subtracts
--   now            NULL: clock_timestamp()
--   or_raise       true: a denial is raised as an error (ratelimit._raise) instead of being returned
-- Package ratelimit and the SQL function ratelimit.consume validate them before the call. See ratelimit._valid.

-- Takes tokens from one limit without shards. The benchmarks compare every other path with this one. Its length costs more
-- than its arithmetic, since Postgres looks up each operator again for every call.
-- expect_denial: read the row before the UPDATE. The decision is the same; a denial is faster and a grant slower.
CREATE FUNCTION ratelimit._consume(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, floor double precision, now timestamptz DEFAULT NULL, expect_denial boolean DEFAULT false,
    or_raise boolean DEFAULT false, windows timestamptz[] DEFAULT NULL
) RETURNS ratelimit._decision
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
    lapses  timestamptz;
    denied  boolean;
    d       ratelimit._decisions;
BEGIN
    IF ratelimit._valid(rate, period, capacity, count, now) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
    END IF;
    LOOP
        -- The UPDATE locks and writes the row only if it has enough at first sight. After a wait for another transaction,
        -- READ COMMITTED checks the row's new version; higher levels raise 40001 (CONCURRENCY.md, A1 and A2). There are
        -- three UPDATEs because the planner simplifies the sum for a constant start and constant windows.
        IF NOT expect_denial THEN
            at := coalesce(now, clock_timestamp());
            IF start IS NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            ELSIF windows IS NOT NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, start, windows) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, start, windows) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            ELSE
                upto := date_bin(period, at, start);
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO value, ts;
            END IF;
            IF value IS NOT NULL THEN
                IF value < '0' AND floor > '-Infinity' THEN -- a reservation
                    UPDATE ratelimit.limits AS r
                       SET promised = greatest(r.promised, ratelimit._promise(value, floor, ts, rate, period, capacity))
                     WHERE r.name = name AND r.key = key AND r.shard = 0;
                END IF;
                RETURN ROW(true, at, value, ts)::ratelimit._decision;
            END IF;
        END IF;

        -- Locks nothing. The UPDATE may have waited, so the clock is read again: a row inserted with the old instant would
        -- be refilled for the wait (A5).
        SELECT r.value, r.ts, r.shards = 1, r.lapses INTO value, ts, one, lapses
          FROM ratelimit.limits AS r
         WHERE r.name = name AND r.key = key AND r.shard = 0;
        at := coalesce(now, clock_timestamp());
        IF one THEN
            EXIT WHEN lapses <= at;
            IF start IS NULL THEN
                denied := (ratelimit._available(value, ts, at, rate, period, capacity, NULL) - count >= floor) IS NOT TRUE;
            ELSIF windows IS NOT NULL THEN
                denied := (ratelimit._available(value, ts, at, rate, period, capacity, start, windows) - count >= floor) IS NOT TRUE;
            ELSE
                denied := (ratelimit._available(value, ts, date_bin(period, at, start), rate, period, capacity, start) - count >= floor) IS NOT TRUE;
            END IF;
            IF denied THEN
                IF or_raise THEN
                    PERFORM ratelimit._raise(ARRAY[name], at, ARRAY[1], ARRAY[value], ARRAY[ts]);
                END IF;
                RETURN ROW(false, at, value, ts)::ratelimit._decision;
            END IF;
            -- The row has enough by now: try again.
        ELSIF EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key) THEN
            -- The limit was sharded before. Merge its rows into one, take nothing, and try again. If the library's list is too short for
            -- the refills of a row, it must ask again with a longer one, as for any row that is as old.
            IF period = '0' AND EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.ts < windows[1]) THEN
                RETURN ROW(false, at, '-Infinity', '-infinity')::ratelimit._decision;
            END IF;
            PERFORM ratelimit._apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
                ARRAY[start], ARRAY[1], ARRAY[0], ARRAY['-Infinity'::double precision], ARRAY[0], ARRAY[0], false, now, false,
                windows, ARRAY[1], ARRAY[pg_catalog.cardinality(windows)]);
        ELSIF (capacity - count >= floor AND isfinite(coalesce(start, 'epoch'))) IS NOT TRUE THEN
            RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_literal(name) || ': the request can never be granted';
        ELSE
            -- Waits for another transaction's INSERT of the same key. If that commits, nothing is inserted here.
            INSERT INTO ratelimit.limits AS r (name, key, shard, shards, value, ts, promised)
            VALUES (name, key, 0, 1, capacity - count, at, ratelimit._promise(capacity - count, floor, at, rate, period, capacity))
            ON CONFLICT DO NOTHING
            RETURNING r.value, r.ts INTO value, ts;
            IF FOUND THEN
                RETURN ROW(true, at, value, ts)::ratelimit._decision;
            END IF;
        END IF;
        value := NULL;
        expect_denial := false;
        attempt := coalesce(attempt, 0) + 1;
        IF attempt = 100 THEN
            RAISE serialization_failure USING MESSAGE = 'rate limit ' || quote_literal(name) || ': lost 100 races in a row against other transactions';
        END IF;
    END LOOP;
    -- Holds of this key may have expired, and are ended first.
    d := ratelimit._apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
        ARRAY[start], ARRAY[1], ARRAY[count], ARRAY[floor], ARRAY[0], ARRAY[0], false, now, or_raise,
        windows, ARRAY[1], ARRAY[pg_catalog.cardinality(windows)]);
    RETURN ROW(d.granted, d.at, d.value[1], d.ts[1])::ratelimit._decision;
END
$body$;

-- False, asked only of a row that is not its key's only one. Its cost keeps the planner from reading a whole table because that has a few rows: a plan that was made then
-- is kept while the table grows.
CREATE FUNCTION ratelimit._costly(shards smallint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE COST 1000000
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN false;
END
$body$;

-- Takes tokens from one sharded limit. If one shard has enough, it takes from that shard and returns an ord of NULL.
-- Otherwise ratelimit._apply decides.
--
-- A plain read picks the fuller of shard_a and shard_b. Above READ COMMITTED, or if both are the same, only shard_a is used:
-- a shard that is read but not taken from conflicts with the transactions that take from it (CONCURRENCY.md, C6).
CREATE FUNCTION ratelimit._consume_sharded(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer,
    count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    windows timestamptz[] DEFAULT NULL
) RETURNS ratelimit._decisions
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    each      double precision; -- the rate of one shard
    room      double precision; -- the capacity of one shard
    upto      timestamptz;
    at        timestamptz;
    pick      integer;
    new_value double precision;
    new_ts    timestamptz;
BEGIN
    IF (ratelimit._valid(rate, period, capacity, count, now) AND floor <= '0') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
    END IF;
    at := coalesce(now, clock_timestamp());
    upto := ratelimit._upto(at, period, start, windows);
    each := rate / shards::double precision;
    room := capacity / shards::double precision;
    pick := shard_a;
    IF shard_a <> shard_b AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') THEN
        SELECT r.shard INTO pick
          FROM ratelimit.limits AS r
         WHERE r.name = name AND r.key = key AND r.shard IN (shard_a, shard_b)
         ORDER BY ratelimit._available(r.value, r.ts, upto, each, period, room, start, windows) DESC, r.shard LIMIT 1;
    END IF;

    -- A shard takes only tokens that it has, since all shards share the debts (C1). The UPDATE locks the row if it has enough, and
    -- checks it again after a wait (or raises 40001). If it then has too little, the subtransaction releases the lock, and
    -- ratelimit._apply locks all shards in order (C4).
    BEGIN
        IF start IS NULL THEN
            UPDATE ratelimit.limits AS r
               SET value = ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count,
                   ts = greatest(r.ts, at)
             WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards AND (r.lapses <= at) IS NOT TRUE
               AND ratelimit._available(r.value, r.ts, upto, each, period, room, NULL) - count >= '0'
            RETURNING r.value, r.ts INTO new_value, new_ts;
        ELSE
            UPDATE ratelimit.limits AS r
               SET value = ratelimit._available(r.value, r.ts, upto, each, period, room, start, windows) - count,
                   ts = greatest(r.ts, at)
             WHERE r.name = name AND r.key = key AND r.shard = pick AND r.shards = shards AND (r.lapses <= at) IS NOT TRUE
               AND ratelimit._available(r.value, r.ts, upto, each, period, room, start, windows) - count >= '0'
            RETURNING r.value, r.ts INTO new_value, new_ts;
        END IF;
        IF new_value IS NULL THEN
            RAISE SQLSTATE 'RL001';
        END IF;
        RETURN ROW(true, at, NULL, ARRAY[new_value], ARRAY[new_ts], NULL)::ratelimit._decisions;
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;

    RETURN ratelimit._apply('consume', ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity],
        ARRAY[start], ARRAY[shards], ARRAY[count], ARRAY[floor], ARRAY[shard_a], ARRAY[shard_b], false, now, or_raise,
        windows, ARRAY[1], ARRAY[pg_catalog.cardinality(windows)]);
END
$body$;

-- Takes tokens from several limits without shards, all or nothing. The arguments are the same as for ratelimit._apply.
-- If the limits are in the common lock order, it takes from them one by one and returns an ord of NULL. Otherwise
-- ratelimit._apply decides.
--
-- The first pass reads all rows but the first, since a denial must not write; the first UPDATE checks its own row. The second
-- pass updates. If an UPDATE loses a race, the tokens taken before it are given back (CONCURRENCY.md, B1).
--
-- The variables save time: PL/pgSQL keeps a loop's simple expressions for the transaction, but starts each statement afresh.
CREATE FUNCTION ratelimit._consume_several(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], floors double precision[], now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._decisions
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
    listed    timestamptz[]; -- the windows of a calendar window
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
        FOR p IN 3 - pass..n LOOP
            name := names[p]; key := keys[p]; capacity := capacities[p]; count := counts[p]; floor := floors[p];
            IF pass = 1 THEN
                SELECT r.value, r.ts INTO new_value, new_ts
                  FROM ratelimit.limits AS r
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE;
                EXIT passes WHEN (FOUND AND (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (name, key)) IS NOT TRUE;
                -- A refill only adds tokens, up to the capacity, so most rows need no calculation.
                CONTINUE WHEN least(new_value, capacity) - count >= floor;
            END IF;
            rate := rates[p]; period := periods[p]; start := starts[p];
            IF start IS NOT NULL THEN
                listed := windows[firsts[p]:lasts[p]];
                upto := CASE WHEN listed IS NULL THEN date_bin(period, at, start) ELSE at END;
            END IF;
            IF pass = 1 THEN
                IF start IS NULL THEN
                    new_value := ratelimit._available(new_value, new_ts, at, rate, period, capacity, NULL);
                ELSIF listed IS NULL THEN
                    new_value := ratelimit._available(new_value, new_ts, upto, rate, period, capacity, start);
                ELSE
                    new_value := ratelimit._available(new_value, new_ts, upto, rate, period, capacity, start, listed);
                END IF;
                EXIT passes WHEN new_value - count < floor;
                CONTINUE;
            END IF;

            IF ratelimit._valid(rate, period, capacity, count, now) IS NOT TRUE THEN
                RAISE invalid_parameter_value USING MESSAGE = 'rate limit ' || quote_nullable(name) || ': the arguments are not valid';
            END IF;
            IF start IS NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            ELSIF listed IS NULL THEN
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            ELSE
                UPDATE ratelimit.limits AS r
                   SET value = ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start, listed) - count,
                       ts = greatest(r.ts, at)
                 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1 AND (r.lapses <= at) IS NOT TRUE
                   AND ratelimit._available(r.value, r.ts, upto, rate, period, capacity, start, listed) - count >= floor
                RETURNING r.value, r.ts INTO new_value, new_ts;
            END IF;
            IF NOT FOUND THEN
                FOR taken IN 1..p - 1 LOOP
                    UPDATE ratelimit.limits AS r
                       SET value = r.value + counts[taken]
                     WHERE r.name = names[taken] AND r.key = keys[taken] AND r.shard = 0;
                END LOOP;
                EXIT passes;
            END IF;
            value[p] := new_value; ts[p] := new_ts;
            IF p = n THEN
                RETURN ROW(true, at, NULL, value, ts, NULL)::ratelimit._decisions;
            END IF;
        END LOOP;
    END LOOP;

    RETURN ratelimit._apply('consume', names, keys, rates, periods, capacities, starts,
        pg_catalog.array_fill(1, ARRAY[n]), counts, floors, pg_catalog.array_fill(0, ARRAY[n]), pg_catalog.array_fill(0, ARRAY[n]), false, now, or_raise,
        windows, firsts, lasts);
END
$body$;

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
CREATE FUNCTION ratelimit._apply(
    op text, names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean DEFAULT false, now timestamptz DEFAULT NULL, or_raise boolean DEFAULT false,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL, mosts double precision[] DEFAULT NULL, within interval DEFAULT NULL,
    until timestamptz DEFAULT NULL
) RETURNS ratelimit._decisions
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
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

-- When work may run that leaves a token bucket's rows this balance, or NULL if it does not wait. A floor of -Infinity is a charge's, which
-- promises nothing. ts: the latest of the rows. Promise in internal/algebra/promise.go has the same rule.
CREATE FUNCTION ratelimit._promise(
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
CREATE FUNCTION ratelimit._give_back(
    value double precision[], ts timestamptz[], promised timestamptz, at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, taken double precision, held double precision, part double precision,
    taken_at timestamptz, run_at timestamptz, windows timestamptz[], OUT total double precision, OUT back double precision, OUT waiting boolean
)
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
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
CREATE FUNCTION ratelimit._refund(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._settled
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
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

-- Locks all rows of the limits, which are in the order of locks. A limit without rows is full; its rows are inserted, and so locked, too. If
-- another transaction has inserted them meanwhile, the subtransaction releases the locks and the loop tries again (CONCURRENCY.md, H2).
CREATE FUNCTION ratelimit._lock(names text[], keys text[], capacities double precision[], shards integer[], now timestamptz) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    at    timestamptz;
    first integer := 1; -- of those that are not locked yet
    m     integer;
    rec   record;
BEGIN
    WHILE first <= coalesce(pg_catalog.cardinality(names), 0) LOOP -- rows that exist need no subtransaction
        PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = names[first] AND r.key = keys[first] ORDER BY r.shard FOR UPDATE;
        EXIT WHEN NOT FOUND;
        first := first + 1;
    END LOOP;
    IF first > coalesce(pg_catalog.cardinality(names), 0) THEN
        RETURN;
    END IF;
    FOR attempt IN 1..100 LOOP
        BEGIN
            FOR i IN first..pg_catalog.cardinality(names) LOOP
                PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                GET DIAGNOSTICS m = ROW_COUNT;
                CONTINUE WHEN m > 0;
                -- Above READ COMMITTED, a row that another transaction has committed since the snapshot is a conflict here.
                at := coalesce(now, clock_timestamp());
                FOR rec IN
                    INSERT INTO ratelimit.limits AS r (name, key, shard, shards, value, ts)
                    SELECT names[i], keys[i], s, shards[i], capacities[i] / shards[i]::double precision, at
                      FROM generate_series(0, shards[i] - 1) AS s
                    ON CONFLICT DO NOTHING
                    RETURNING r.shard
                LOOP
                    m := m + 1;
                END LOOP;
                IF m <> shards[i] THEN -- another transaction has inserted them
                    RAISE SQLSTATE 'RL001';
                END IF;
            END LOOP;
            RETURN;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row against other transactions', names);
END
$body$;

-- Counts what is used of one limit and key against another, such as those of a customer's old and new plan. The arrays have two
-- positions: 1 is the limit to move from, 2 the limit to move to. Move in internal/algebra has the rule.
--
--   floor  the lowest balance that a move may leave: 0, or less if the limit to move to may owe tokens
--
-- The limit to move to gets no more tokens than it has, and no token comes back to the other. So no move adds a token, also one
-- that is repeated or that goes there and back. It returns the balance of the limit to move to.
--
-- Locks all rows of both limits, in the common order (name, key, shard): see ratelimit._lock (CONCURRENCY.md, H).
CREATE FUNCTION ratelimit._move(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    floor double precision, now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
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
CREATE FUNCTION ratelimit._consume_keys(
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
#variable_conflict use_variable
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
CREATE FUNCTION ratelimit._each(
    ends integer[], names text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floors double precision[],
    shard_a integer[], shard_b integer[], keys text[], counts double precision[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL,
    OUT ord integer[], OUT granted integer[], OUT at timestamptz[], OUT value double precision[], OUT ts timestamptz[]
)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
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

-- What the Go library calls for one decision. The answer is a bytea with the decision in the binary format of its type, since a composite
-- result would be text in some query modes.
--
-- Each is a call of its own in the select list, SELECT ratelimit._wire_consume(...), so that a distributed Postgres can send it to
-- the server that has the key, which it looks for among the arguments. The planner inlines them.
CREATE FUNCTION ratelimit._wire_consume(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, floor double precision, now timestamptz, expect_denial boolean, or_raise boolean, windows timestamptz[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._consume(name, key, rate, period, capacity, start, count, floor, now, expect_denial, or_raise, windows));

CREATE FUNCTION ratelimit._wire_consume_sharded(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer,
    count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz, or_raise boolean, windows timestamptz[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._consume_sharded(name, key, rate, period, capacity, start, shards, count, floor, shard_a, shard_b, now,
    or_raise, windows));

CREATE FUNCTION ratelimit._wire_consume_several(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], floors double precision[], now timestamptz, or_raise boolean,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._consume_several(names, keys, rates, periods, capacities, starts, counts, floors, now, or_raise,
    windows, firsts, lasts));

CREATE FUNCTION ratelimit._wire_apply(
    op text, names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean, now timestamptz, or_raise boolean,
    windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._apply(op, names, keys, rates, periods, capacities, starts, shards, counts, floors, shard_a, shard_b,
    reserve, now, or_raise, windows, firsts, lasts, mosts, within));

-- One limit: the key is an argument of its own.
CREATE FUNCTION ratelimit._wire_apply_one(
    op text, name text, key text,
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean, now timestamptz, or_raise boolean,
    windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._apply(op, ARRAY[name], ARRAY[key], rates, periods, capacities, starts, shards, counts, floors,
    shard_a, shard_b, reserve, now, or_raise, windows, firsts, lasts, mosts, within));

CREATE FUNCTION ratelimit._wire_refund(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._refund(names, keys, rates, periods, capacities, starts, counts, taken, held, parts,
    taken_at, run_at, now, windows, firsts, lasts));

CREATE FUNCTION ratelimit._wire_refund_one(
    name text, key text, rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._refund(ARRAY[name], ARRAY[key], rates, periods, capacities, starts, counts, taken, held, parts,
    taken_at, run_at, now, windows, firsts, lasts));

-- It returns no composite, so it needs no record_send.
CREATE FUNCTION ratelimit._wire_move(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    floor double precision, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS double precision
LANGUAGE sql
RETURN ratelimit._move(names, keys, rates, periods, capacities, starts, shards, floor, now, windows, firsts, lasts);

CREATE FUNCTION ratelimit._wire_each(
    ends integer[], names text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floors double precision[],
    shard_a integer[], shard_b integer[], keys text[], counts double precision[], now timestamptz,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._each(ends, names, rates, periods, capacities, starts, shards, floors, shard_a, shard_b, keys, counts, now,
    windows, firsts, lasts));

-- Makes limits full again by deleting the rows of all their shards, which it locks in the common order (CONCURRENCY.md, D1).
-- Returns the number of deleted rows. Holds of the limits lapse: what they hold is forgotten, too, and does not come back. Slots in use cannot be reset.
CREATE FUNCTION ratelimit._reset(names text[], keys text[], OUT deleted integer)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    r record;
    h record;
    n integer;
    -- In variables, since Citus takes nothing in a write that is not immutable.
    kept timestamptz := clock_timestamp() + interval '7 days';
BEGIN
    deleted := 0;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        PERFORM 1 FROM ratelimit.limits AS t WHERE t.name = r.name AND t.key = r.key ORDER BY t.shard FOR UPDATE;
        DELETE FROM ratelimit.limits AS t WHERE t.name = r.name AND t.key = r.key;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n = 0 THEN
            PERFORM ratelimit._check_keyless(r.name, r.key);
        END IF;
        deleted := deleted + n;
    END LOOP;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        FOR h IN
            SELECT l.id, l.unit FROM ratelimit.holds AS l WHERE l.name = r.name AND l.key = r.key AND l.state = 'held' ORDER BY l.id FOR UPDATE
        LOOP
            IF h.unit = 'slots' THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: slots in use cannot be reset', r.name),
                    HINT = 'ratelimit.holds says which work has them, and ratelimit.release frees them.';
            END IF;
            UPDATE ratelimit.holds AS l SET state = 'lapsed', rest = l.count, until = kept WHERE l.name = r.name AND l.key = r.key AND l.id = h.id;
        END LOOP;
    END LOOP;
END
$body$;

-- Writes into the history of overrides that a key was reset, or a hold of it released. Such a row has never been in force.
CREATE FUNCTION ratelimit._note_reset(name text, key text, reason text, who text, effect text DEFAULT 'reset') RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    id bigint;
BEGIN
    LOOP
        INSERT INTO ratelimit.overrides AS o (name, key, effect, until, reason, made_by)
        VALUES (name, nullif(key, ''), effect, '-infinity', coalesce(reason, ''), coalesce(nullif(who, ''), SESSION_USER))
        ON CONFLICT DO NOTHING RETURNING o.id INTO id;
        EXIT WHEN id IS NOT NULL; -- rows that were copied here may have the next ids already
    END LOOP;
END
$body$;

CREATE FUNCTION ratelimit.reset(
    name text, key text DEFAULT NULL, global boolean DEFAULT false, reason text DEFAULT NULL, who text DEFAULT NULL
) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN octet_length(reason) > 4096 THEN 'the reason is longer than 4096 bytes'
        WHEN octet_length(who) > 255 THEN 'who is longer than 255 bytes'
        ELSE ratelimit._wrong_key(key, global) END;
    deleted integer;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    deleted := ratelimit._reset(ARRAY[name], ARRAY[coalesce(key, '')]);
    IF deleted = 0 THEN
        PERFORM ratelimit._check_known(name COLLATE "C");
    ELSIF pg_catalog.concat(reason, who) <> '' THEN
        PERFORM ratelimit._note_reset(name, key, reason, who);
    END IF;
    RETURN deleted;
END
$body$;

COMMENT ON FUNCTION ratelimit.reset(text, text, boolean, text, text) IS $text$
Makes a key of a rate limit full again, and forgets its debts. It deletes the key's rows, and returns how many. What is held of it lapses: it
is forgotten, too, and does not come back.

    SELECT ratelimit.reset('sendMessage', 'user-17', reason => 'their retry loop is mended')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false
  reason  why, for those who look later: at most 4096 bytes; default NULL
  who     who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (made_as)

With a reason or with who, it adds a row to ratelimit.overrides if it deletes rows: the history says who has reset the key, and when. The
effect of such a row is reset. Without both, nothing is written down: a program that resets keys as it works fills no history.

Errors:
  22023   an argument is invalid, or the key has slots that are in use, or programs publish limits and nobody knows this one
$text$;

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
CREATE FUNCTION ratelimit._coalesce(
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
#variable_conflict use_variable
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

-- Raises a denial as a SQL error, so that it stops a pipeline: the statements sent after it do not run, and the statements before
-- it in the transaction are undone. With or_raise, the functions that decide call it instead of returning a denial.
--
-- The error:
--   SQLSTATE  PT429, which PostgREST turns into the HTTP status 429
--   MESSAGE   the names of the limits in the request, each once. It has no keys: they may be personal data, and errors are
--             logged
--   DETAIL    {"at": ..., "ord": [...], "value": [...], "ts": [...]}, as ratelimit._apply returns them for a denial. Doubles are
--             exact to the last bit; instants are microseconds since 1970-01-01 UTC
CREATE FUNCTION ratelimit._raise(
    names text[], at timestamptz, ord integer[], value double precision[], ts timestamptz[]
) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    -- Doubles are written in full, whatever the session's setting. The setting comes back when the transaction that the error
    -- aborts ends, or the block that catches the error.
    setting text := set_config('extra_float_digits', '1', true);
    limits  text[] := '{}';
    micros  bigint[] := '{}';
    n text;
    t timestamptz;
BEGIN
    FOREACH n IN ARRAY names LOOP
        IF n <> ALL (limits) THEN
            limits := pg_catalog.array_append(limits, n);
        END IF;
    END LOOP;
    FOREACH t IN ARRAY ts LOOP
        micros := pg_catalog.array_append(micros, (extract(epoch FROM t) * '1000000')::bigint);
    END LOOP;
    RAISE SQLSTATE 'PT429' USING
        MESSAGE = 'rate limit exceeded: ' || pg_catalog.array_to_string(limits, ', '),
        DETAIL = pg_catalog.format('{"at": %s, "ord": %s, "value": %s, "ts": %s}',
            (extract(epoch FROM at) * '1000000')::bigint, pg_catalog.to_json(ord), pg_catalog.to_json(value), pg_catalog.to_json(micros));
END
$body$;

-- Transactions of several processes queue for a hot limit with these locks (Limiter.InTx with Hot). The first statement of a
-- transaction is LOCK TABLE on the view that belongs to the limit and key. The lock lasts until the transaction ends.
--
-- LOCK TABLE takes no snapshot, unlike an advisory lock (CONCURRENCY.md, F2). Views have no storage, and nothing else uses
-- them. There are 32, so that different limits seldom share one. LOCK TABLE needs UPDATE on them, which allows nothing else.
CREATE VIEW ratelimit.turn_00 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_00 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_01 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_01 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_02 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_02 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_03 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_03 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_04 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_04 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_05 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_05 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_06 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_06 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_07 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_07 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_08 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_08 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_09 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_09 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_10 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_10 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_11 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_11 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_12 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_12 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_13 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_13 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_14 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_14 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_15 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_15 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_16 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_16 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_17 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_17 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_18 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_18 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_19 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_19 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_20 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_20 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_21 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_21 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_22 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_22 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_23 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_23 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_24 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_24 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_25 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_25 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_26 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_26 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_27 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_27 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_28 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_28 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_29 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_29 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_30 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_30 IS 'txlimit: locked by transactions that queue for a hot limit';

CREATE VIEW ratelimit.turn_31 AS SELECT NULL AS nothing;

COMMENT ON VIEW ratelimit.turn_31 IS 'txlimit: locked by transactions that queue for a hot limit';

-- A key of several parts is stored as one text. These are the two directions. The Go library has the first one: StoredKey.
--
-- E'' is the same under any standard_conforming_strings. The collation is given, since a caller's may be one that Postgres neither
-- replaces nor matches by.
CREATE FUNCTION ratelimit.key(VARIADIC parts text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    n      integer := 0;
    part   text;
    joined text;
BEGIN
    IF coalesce(pg_catalog.cardinality(parts), 0) = 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limits: a key needs a part at least', HINT = 'A limit without keys has global => true, and stores the key ''''.';
    END IF;
    FOREACH part IN ARRAY parts LOOP
        n := n + 1;
        IF coalesce(octet_length(part), 0) = 0 THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits: part %s of the key is empty or NULL', n);
        END IF;
        joined := CASE n WHEN 1 THEN '' ELSE joined || '|' END || replace(replace(part COLLATE "C", E'\\', E'\\\\'), '|', E'\\|');
    END LOOP;
    RETURN CASE n WHEN 1 THEN part ELSE joined END;
END
$body$;

COMMENT ON FUNCTION ratelimit.key(text[]) IS $text$
The stored text of a key, from its parts. The Go library's limit.Key("eu", "user-17") stores the same.

    SELECT * FROM ratelimit.consume('sendMessage', ratelimit.key('eu', 'user-17'), rate => 10, period => '1 minute')

One part is the text itself, whatever characters it has. Several are joined by |, with a backslash before each | and each backslash of a
part. So different parts make different keys. Only the one part 'eu|ann' is the same text as the two parts 'eu' and 'ann': give all keys
of a limit one part, or all of them several.

A part that is empty or NULL is an error, SQLSTATE 22023, and so are no parts at all.
$text$;

-- A text that several parts cannot make is a key of one part. No text is an error: a policy or a guard meets every row.
CREATE FUNCTION ratelimit.key_parts(key text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
AS $body$
#variable_conflict use_variable
BEGIN
    IF strpos(key COLLATE "C", '|') = 0 OR key COLLATE "C" !~ E'^(?:[^\\\\|]|\\\\[\\\\|])+(?:\\|(?:[^\\\\|]|\\\\[\\\\|])+)+$' THEN
        RETURN ARRAY[key];
    ELSIF strpos(key COLLATE "C", E'\\') = 0 THEN
        RETURN pg_catalog.string_to_array(key COLLATE "C", '|');
    END IF;
    RETURN (SELECT pg_catalog.array_agg(regexp_replace(p.part[1] COLLATE "C", E'\\\\([\\\\|])', E'\\1', 'g') ORDER BY p.n)
              FROM regexp_matches(key COLLATE "C", E'(?:[^\\\\|]|\\\\[\\\\|])+', 'g') WITH ORDINALITY AS p (part, n));
END
$body$;

COMMENT ON FUNCTION ratelimit.key_parts(text) IS $text$
The parts of a stored key, for policies, guards and searches. It undoes ratelimit.key: of all keys of two parts or more, it returns the
parts that made them. The keys of a tenant, if the tenant is the first of several parts:

    SELECT * FROM ratelimit.limits WHERE cardinality(ratelimit.key_parts(key)) > 1 AND (ratelimit.key_parts(key))[1] = 'acme'

A text that several parts cannot make, such as 'ann', 'a||b' or '|', is one part: the text itself. The text 'eu|ann' is two parts, though a
key of one part may have it, too. The empty key of a limit without keys is one empty part. NULL is NULL. No text is an error.
$text$;

-- The calendar windows of SQL by hand. The Go library makes the same lists of windows itself, since it can keep them
-- (ratelimit/limit_calendar.go).

-- Returns the longest that a calendar window can be, changes of the zone's offset included. It is NULL if period is not a
-- unit of the calendar.
CREATE FUNCTION ratelimit._longest(period interval) RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN date_part('hour', period) = '0' AND date_part('minute', period) = '0' AND date_part('second', period) = '0' THEN
    CASE (date_part('year', period) * '12' + date_part('month', period)) * '1e10' + date_part('day', period) -- no number of days is as large
        WHEN '1' THEN interval '48 hours'
        WHEN '7' THEN interval '192 hours'
        WHEN '1e10' THEN interval '768 hours'
        WHEN '3e10' THEN interval '2232 hours'
        WHEN '12e10' THEN interval '8808 hours'
    END END;

-- Returns the starts of the windows around an instant, in order: `back` windows before the one of `at`, or a few more, and
-- `ahead` after it. A window begins at the anchor's time of day in the zone, on a date that is whole periods from the anchor. In a
-- month with too few days, that is the month's last day. If that time occurs twice or not at all, AT TIME ZONE takes the later
-- reading. A day that a zone skipped has no window.
CREATE FUNCTION ratelimit._windows(
    period interval, zone text, anchor timestamp, at timestamptz, back integer, ahead integer
) RETURNS timestamptz[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    first  date := anchor::date;
    today  date := ((at AT TIME ZONE zone) - (anchor - date_trunc('day', anchor)))::date; -- until the anchor's time of day, it is yesterday
    months integer := date_part('year', period) * '12' + date_part('month', period);
    number integer := CASE -- the number of the window of `at`, counted from the anchor's, or one more
        WHEN months > 0 THEN
            floor(((date_part('year', today) - date_part('year', first)) * '12' + date_part('month', today) - date_part('month', first)) / months::double precision)
        ELSE floor((today - first)::double precision / date_part('day', period)) END;
BEGIN
    RETURN ARRAY(SELECT DISTINCT (anchor + period * n::double precision) AT TIME ZONE zone
        FROM generate_series(number - back - 1, number + ahead + 1) AS n ORDER BY 1);
END
$body$;

-- Reports whether two anchors have the same windows in one zone: those of ratelimit._windows. In months, the 31st and the 30th differ, since only
-- short months have both on their last day.
CREATE FUNCTION ratelimit._same_windows(period interval, a timestamp, b timestamp) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN a::time = b::time AND CASE WHEN date_part('day', period) > '0' THEN (a::date - b::date) % date_part('day', period)::integer = 0
    ELSE date_part('day', a) = date_part('day', b)
        AND ((date_part('year', a) - date_part('year', b)) * '12' + date_part('month', a) - date_part('month', b))::integer
            % (date_part('year', period) * '12' + date_part('month', period))::integer = 0 END;

-- Returns the name of a zone as pg_timezone_names has it, or NULL if Postgres knows no such zone. Postgres takes it in any case, Go as it is
-- written. The view itself would open the files of all zones, so it is asked only about what Postgres may have taken for a rule such as EST5.
CREATE FUNCTION ratelimit._zone(zone text) RETURNS text
LANGUAGE plpgsql
SET timezone = 'UTC' -- so that the zone of the session is as before
AS $body$
#variable_conflict use_variable
BEGIN
    PERFORM pg_catalog.set_config('TimeZone', zone, true);
    RETURN CASE WHEN current_setting('TimeZone') ~ '[0-9]$'
            AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_timezone_names AS z WHERE z.name = current_setting('TimeZone'))
        THEN NULL ELSE current_setting('TimeZone') END;
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN NULL;
END
$body$;

-- Returns how many windows the list must reach back so that it has every refill of a row that owes the tokens of 100 windows.
CREATE FUNCTION ratelimit._back(rate double precision, capacity double precision) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(ceil(capacity / rate) + '101', 1000)::integer;

-- Raises an error if a limit's definition is invalid. It has the bounds of the Go library (Config.Limit). zero: a rate of 0 is valid,
-- which denies every token by policy. For a sweep and for ratelimit.keys, such a limit has no rows.
--
-- An error says which argument is wrong, what it must be, and what it is. Every 22023 of the SQL functions is written so.
CREATE FUNCTION ratelimit._validate(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    max_reserved double precision, shards integer, zone text, anchor timestamp, zero boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN (octet_length(name) BETWEEN 1 AND 255) IS NOT TRUE THEN
            pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN (rate BETWEEN '1e-15' AND '1e15' OR zero AND rate = '0') IS NOT TRUE THEN
            pg_catalog.format('rate must be %sbetween 1e-15 and 1e15, not %s', CASE WHEN zero THEN '0 or ' END, coalesce(rate::text, 'NULL'))
        WHEN kind IS NULL OR kind NOT IN ('token bucket', 'fixed window', 'calendar window') THEN
            pg_catalog.format('kind must be ''token bucket'', ''fixed window'' or ''calendar window'', not %s', quote_nullable(kind))
        WHEN kind = 'calendar window' AND ratelimit._longest(period) IS NULL THEN
            pg_catalog.format('period of a calendar window must be 1 day, 7 days, 1 month, 3 months or 1 year, not %s', coalesce(period::text, 'NULL'))
        WHEN kind <> 'calendar window' AND zone IS NOT NULL THEN pg_catalog.format('zone must be NULL for a %s, not %L', kind, zone)
        WHEN kind <> 'calendar window' AND anchor IS NOT NULL THEN pg_catalog.format('anchor must be NULL for a %s, not %s', kind, anchor)
        WHEN zone <> 'UTC' AND zone !~ '^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)+$' THEN -- no rule, such as 'CET-1CEST,M3.5.0/2,M10.5.0/3'
            pg_catalog.format('zone must be ''UTC'' or a name with a slash, such as ''Europe/Berlin'', not %L', zone)
        WHEN NOT anchor BETWEEN '0001-01-01' AND '9999-12-31 23:59:59.999999' THEN pg_catalog.format('anchor must be between the years 1 and 9999, not %s', anchor)
        WHEN anchor <> date_trunc('second', anchor) THEN pg_catalog.format('anchor must have no fraction of a second, not %s', anchor)
        WHEN kind <> 'calendar window' AND (period IS NULL OR NOT (period >= '100 milliseconds' AND period <= '106751 days 23:47:16.854775'
            AND date_part('year', period) = '0' AND date_part('month', period) = '0')) THEN
            pg_catalog.format('period must be between 100 milliseconds and 106751 days, written without months and years, not %s%s', coalesce(period::text, 'NULL'),
                CASE WHEN period BETWEEN '0' AND '100 milliseconds' THEN ' (for 100 a second one by one: rate 100, period 1 second, capacity 1)' END)
        WHEN NOT (capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('capacity must be 0 or between 1e-15 and 1e15, not %s', capacity)
        WHEN NOT (max_reserved = '0' OR max_reserved BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('max_reserved must be 0 or between 1e-15 and 1e15, not %s', max_reserved)
        WHEN rate = '0' AND (capacity > '0' OR max_reserved > '0') THEN
            pg_catalog.format('capacity and max_reserved must be NULL or 0 with a rate of 0, not %s and %s', coalesce(capacity::text, 'NULL'), coalesce(max_reserved::text, 'NULL'))
        WHEN start IS NOT NULL AND kind <> 'fixed window' THEN pg_catalog.format('start must be NULL for a %s, not %s', kind, start)
        WHEN NOT (isfinite(start) AND extract(epoch FROM start) * '1000000' BETWEEN '-62135596800000000' AND '253402300799999999') THEN
            pg_catalog.format('start must be between the years 1 and 9999, not %s', start)
        WHEN start <> date_trunc('second', start) THEN
            pg_catalog.format('start must have no fraction of a second, as the time of now has: all programs need the same instant, so write a constant one, not %s', start)
        WHEN start = '0001-01-01 00:00:00+00' THEN 'start must not be the first instant of the year 1, which is no time in Go'
        WHEN shards IS NULL OR NOT shards BETWEEN 1 AND 100 THEN
            pg_catalog.format('shards must be a whole number between 1 and 100, not %s', coalesce(shards::text, 'NULL'))
    END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
END
$body$;

-- Says what is wrong with a key, or returns NULL. It does not say the key: keys may be personal data, and errors are logged.
CREATE FUNCTION ratelimit._wrong_key(key text, global boolean) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN global AND key IS NOT NULL THEN 'key must be NULL with global => true: such a limit has no keys'
    WHEN global THEN NULL
    WHEN key IS NULL OR key = '' THEN pg_catalog.format('key must have 1 to 1024 bytes, not %s; global => true is for a limit without keys',
        coalesce(octet_length(key)::text, 'NULL'))
    WHEN octet_length(key) > 1024 THEN pg_catalog.format('key must have 1 to 1024 bytes, not %s', octet_length(key)) END;

-- Refuses the empty key to an operator, where it has no row and another key of the limit has one: a key was forgotten.
CREATE FUNCTION ratelimit._check_keyless(name text, key text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
BEGIN
    IF key = '' AND NOT EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = '')
       AND EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key > '') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: it has keys: name one', name);
    END IF;
END
$body$;

-- These convert an instant to microseconds since 1970, and back. The interval has hours and no days, since Postgres adds days in
-- the session's time zone.
CREATE FUNCTION ratelimit._micros(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (extract(epoch FROM at) * '1000000')::bigint;

CREATE FUNCTION ratelimit._instant(micros bigint) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN timestamptz 'epoch' + make_interval(hours => (micros / 3600000000)::integer, secs => (micros % 3600000000)::double precision / '1000000');

-- Returns the argument `start` of ratelimit._consume: NULL for a token bucket, or the first instant of a fixed window's grid from
-- the year 1 on. Without a start, the grid's offset is a hash of the key alone, or of the name if the key is empty. The Go
-- library has the same hash.
CREATE FUNCTION ratelimit._grid(name text, key text, period interval, kind text, start timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    year1 CONSTANT bigint := -62135596800000000;
    along bigint := ratelimit._micros(start) - year1;
BEGIN
    IF kind = 'token bucket' THEN
        RETURN NULL;
    END IF;
    IF along IS NULL THEN
        along := (('x' || left(encode(sha256(pg_catalog.convert_to(CASE WHEN key = '' THEN name ELSE key END, 'UTF8')), 'hex'), 16))::bit(64) >> 1)::bigint;
    END IF;
    RETURN ratelimit._instant(year1 + along % (extract(epoch FROM period) * '1000000')::bigint);
END
$body$;

-- Returns the tokens that the rows (shards) of a limit and key hold together at an instant. Without rows, the limit is full. Equal shares
-- are multiplied: a sum could round.
CREATE FUNCTION ratelimit._total(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    m         integer := pg_catalog.cardinality(value);
    upto      timestamptz := ratelimit._upto(at, period, start, windows);
    total     double precision := 0;
    available double precision;
    lowest    double precision;
    highest   double precision;
BEGIN
    FOR i IN 1..m LOOP
        available := ratelimit._available(value[i], ts[i], upto, rate / m::double precision, period, capacity / m::double precision, start, windows);
        total := total + available;
        lowest := least(lowest, available); highest := greatest(highest, available);
    END LOOP;
    RETURN CASE WHEN m = 0 OR lowest = capacity / m::double precision THEN capacity
                WHEN lowest = highest THEN m::double precision * lowest
                ELSE total END;
END
$body$;

-- Returns `at` if count can be taken and at least floor is left, but for the tolerance. Otherwise it returns the first instant at which the
-- tokens for it have been refilled, if no other call takes or gives back tokens: Due in internal/algebra has the rule. Beyond the
-- year 9999 it returns the end of that year.
--
-- A quotient gives a first guess, which is a little wrong because of rounding. Growing steps from there, and then a bisection,
-- find the answer. It is right to the microsecond, since each step asks the predicate that decides. With `reserve`, the predicate
-- is that of a reservation, which may forfeit tokens.
CREATE FUNCTION ratelimit._when(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    shards integer, count double precision, floor double precision, reserve boolean DEFAULT false, windows timestamptz[] DEFAULT NULL
) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    -- `due` is left when the tokens have been refilled. A token bucket refills a rest in a moment, so there it is without the tolerance,
    -- but for the rounding of a sum over shards.
    lowest  double precision := floor - ratelimit._tolerance(capacity, floor);
    due     double precision := CASE WHEN start IS NULL THEN greatest(lowest, least(floor - CASE WHEN pg_catalog.cardinality(value) > 1 THEN '1e-9'::double precision ELSE 0 END, capacity - count)) ELSE lowest END;
    missing double precision := floor + count - ratelimit._total(value, ts, at, rate, period, capacity, start, windows);
    too_early bigint := ratelimit._micros(at);
    -- Reservations after the last window of a list are denied, since its refills are not known: nothing is to be found there.
    never     CONSTANT bigint := CASE WHEN reserve AND windows IS NOT NULL THEN ratelimit._micros(windows[pg_catalog.cardinality(windows)]) + 1
                  ELSE 253402300799999999 END;
    late      bigint := never;
    guess     bigint := too_early + 1;
    step      bigint := 1;
    wait      double precision;
BEGIN
    IF too_early >= 253402300799999999 OR ratelimit._left(value, ts, at, rate, period, capacity, start, shards, count, reserve, windows) >= lowest THEN
        RETURN at;
    END IF;
    wait := least(greatest(missing, 1e-30), 1e30) / rate; -- in periods; the bounds prevent an overflow from rows written by hand
    wait := CASE WHEN start IS NULL THEN wait ELSE ceil(wait) END;
    IF windows IS NOT NULL AND wait < '1e6' THEN
        guess := greatest(guess, ratelimit._micros(windows[pg_catalog.width_bucket(at, windows) + wait::integer]));
    END IF;
    wait := wait * date_part('epoch', period) * '1e6';
    IF windows IS NULL AND wait < (late - too_early)::double precision THEN
        guess := greatest(guess, wait::bigint
            + ratelimit._micros(ratelimit._upto(at, period, start)));
    END IF;
    WHILE too_early + 1 < late LOOP
        IF guess <= too_early OR guess >= late THEN -- the growing steps have ended: bisect
            guess := too_early + (late - too_early) / 2;
            step := 0;
        END IF;
        IF ratelimit._left(value, ts, ratelimit._instant(guess), rate, period, capacity, start, shards, count, reserve, windows) >= due THEN
            late := guess;
            guess := guess - least(step, late - too_early);
        ELSE
            too_early := guess;
            guess := guess + least(step, late - too_early);
        END IF;
        step := least(step, 100000000000000000) * 8;
    END LOOP;
    RETURN ratelimit._instant(CASE WHEN late < never THEN late ELSE 253402300799999999 END);
END
$body$;

-- Returns the first instant, not before `at`, at which nothing is owed, if no other call takes or gives back tokens.
CREATE FUNCTION ratelimit._repaid(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer, windows timestamptz[] DEFAULT NULL
) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN ratelimit._when(value, ts, at, rate, period, capacity, start, shards, '0', CASE WHEN start IS NULL THEN '0' ELSE
    ratelimit._even(ratelimit._total(value, ts, at, rate, period, capacity, start, windows), rate, capacity) END, false, windows);

-- Returns the instant at which work may run if its call leaves `left` tokens: the first at which nothing is owed. `ts` has
-- the ts of the rows before the call.
CREATE FUNCTION ratelimit._run_at(
    "left" double precision, ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer, windows timestamptz[] DEFAULT NULL
) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    after timestamptz[]; -- the ts of the rows after the call
BEGIN
    IF pg_catalog.cardinality(ts) = shards THEN
        after := ARRAY(SELECT greatest(u.t, at) FROM pg_catalog.unnest(ts) WITH ORDINALITY AS u (t, n) ORDER BY u.n);
    ELSE
        after := pg_catalog.array_fill((SELECT greatest(max(u.t), at) FROM pg_catalog.unnest(ts) AS u (t)), ARRAY[shards]);
    END IF;
    RETURN ratelimit._repaid(pg_catalog.array_fill("left" / shards::double precision, ARRAY[shards]), after, at,
        rate, period, capacity, start, shards, windows);
END
$body$;

-- Returns what is kept of the tokens that a reservation leaves. If its work has to wait, those that would be refilled above the capacity
-- until then are forfeited: Reserve in internal/algebra/promise.go has the rule. `ts` has the ts of the rows before the call.
CREATE FUNCTION ratelimit._kept(
    "left" double precision, ts timestamptz[], at timestamptz, run_at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, count double precision, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    -- A variable: with a SELECT as its argument, ratelimit._available is not inlined, and before Postgres 18 it is then planned for each call.
    refills timestamptz; -- from then on
BEGIN
    IF run_at > at AND capacity - count >= -ratelimit._tolerance(capacity, 0) THEN
        refills := (SELECT coalesce(min(greatest(u.t, at)), at) FROM pg_catalog.unnest(ts) AS u (t));
        RETURN least("left", capacity - count - ratelimit._available(0, refills,
            ratelimit._upto(run_at, period, start, windows), rate, period, 'Infinity', start, windows));
    END IF;
    RETURN "left";
END
$body$;

-- Returns the tokens that a call alone would leave. A reservation of a fixed window that has to wait also forfeits tokens. If the work would
-- have to run after the last of a calendar's windows, it is -Infinity.
CREATE FUNCTION ratelimit._left(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    shards integer, count double precision, reserve boolean, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    remaining double precision := ratelimit._total(value, ts, at, rate, period, capacity, start, windows) - count;
    run_at    timestamptz;
BEGIN
    IF reserve AND start IS NOT NULL THEN
        run_at := ratelimit._run_at(remaining, ts, at, rate, period, capacity, start, shards, windows);
        IF run_at > windows[pg_catalog.cardinality(windows)] THEN
            remaining := '-Infinity';
        ELSE
            remaining := ratelimit._kept(remaining, ts, at, run_at, rate, period, capacity, start, count, windows);
        END IF;
    END IF;
    RETURN remaining;
END
$body$;

-- The limits that programs define, as each program publishes them. Without numbers, SQL by hand takes them from here, and so do the
-- tool and the page. A sweep minds all of them. No other decision of a program depends on this table.
--
-- A program has one definition of a name: its list that counts. Lists are ordered by when each was first published. The newest one that
-- a process has lately said it uses (alive_until) counts; if there is none, the newest. So a process of an older version that starts
-- again changes nothing, and if only older ones are left, theirs counts: a rollback. What does not count stays for 7 days after it was
-- last used, since sweeps mind it. Then one row of its list stays, for a year: if a process of it comes back, the list is as old as before.
-- Readers pass over such rows. Of the definitions that several programs have of a name, the one published last is taken.
CREATE TABLE ratelimit.definitions (
    program      text COLLATE "C" NOT NULL,
    name         text COLLATE "C" NOT NULL,
    definition   text COLLATE "C" NOT NULL,
    kind         text             NOT NULL,
    rate         double precision,
    period       interval,
    capacity     double precision,
    max_reserved double precision,
    start        timestamptz CHECK (isfinite(start)),
    shards       integer,
    zone         text,
    anchor       timestamp CHECK (isfinite(anchor)),
    varies       interval,
    current      boolean          NOT NULL,
    published_at timestamptz      NOT NULL CHECK (isfinite(published_at)),
    list         text COLLATE "C" NOT NULL DEFAULT '',
    first_at     timestamptz      NOT NULL DEFAULT clock_timestamp() CHECK (isfinite(first_at)),
    alive_until  timestamptz CHECK (isfinite(alive_until)),
    CHECK (kind = 'unlimited' OR capacity IS NOT NULL AND (kind = 'slots' OR rate IS NOT NULL AND period IS NOT NULL)),
    PRIMARY KEY (name, program, list)
);

COMMENT ON TABLE ratelimit.definitions IS 'txlimit: the limits that programs define, as they publish them';

COMMENT ON COLUMN ratelimit.definitions.program IS 'the program that has published it';

COMMENT ON COLUMN ratelimit.definitions.name IS 'the name of the limit';

COMMENT ON COLUMN ratelimit.definitions.definition IS 'all the numbers as text';

COMMENT ON COLUMN ratelimit.definitions.kind IS 'token bucket, fixed window, calendar window, slots or unlimited';

COMMENT ON COLUMN ratelimit.definitions.rate IS 'tokens per period; 0: every token is denied by policy; NULL: slots, and an unlimited limit, which has no numbers at all';

COMMENT ON COLUMN ratelimit.definitions.period IS 'the interval in which the rate is refilled';

COMMENT ON COLUMN ratelimit.definitions.capacity IS 'the most tokens that can be saved up; of slots, how many there are';

COMMENT ON COLUMN ratelimit.definitions.max_reserved IS 'the most tokens that may be owed; NULL: no bound';

COMMENT ON COLUMN ratelimit.definitions.start IS 'an instant at which a fixed window begins; NULL: by a hash of the key';

COMMENT ON COLUMN ratelimit.definitions.shards IS 'over how many rows a key is spread';

COMMENT ON COLUMN ratelimit.definitions.zone IS 'the time zone of a calendar window';

COMMENT ON COLUMN ratelimit.definitions.anchor IS 'a local time in the zone, at which a calendar window begins';

COMMENT ON COLUMN ratelimit.definitions.varies IS 'a key may have numbers of its own, which fill a row within this time, 0 for slots; NULL: none has';

COMMENT ON COLUMN ratelimit.definitions.current IS 'true: it is in the program''s list that counts';

COMMENT ON COLUMN ratelimit.definitions.published_at IS 'when it was published; of one that is not current, when it was replaced or, if later, last used';

COMMENT ON COLUMN ratelimit.definitions.list IS 'a hash of all the definitions that the program published together';

COMMENT ON COLUMN ratelimit.definitions.first_at IS 'when the list was first published';

COMMENT ON COLUMN ratelimit.definitions.alive_until IS 'five minutes after a process has last said that it uses the list; NULL: none has';

-- Raises an error unless numbers of a limit fill a row from 0 within the time that its definition names.
CREATE FUNCTION ratelimit._validate_varies(
    name text, rate double precision, period interval, kind text, capacity double precision, varies interval
) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    needed double precision; -- seconds
BEGIN
    IF NOT (isfinite(varies) AND varies > '0' AND varies <= '106751 days 23:47:16.854775'
            AND date_part('year', varies) = '0' AND date_part('month', varies) = '0') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'rate limit %L: varies must be between 1 microsecond and 106751 days, written without months and years, not %s', name, varies);
    END IF;
    needed := CASE WHEN rate = '0' THEN 0
        WHEN kind = 'token bucket' THEN capacity / rate * date_part('epoch', period)
        WHEN kind = 'fixed window' THEN ceil(capacity / rate) * date_part('epoch', period)
        ELSE ceil(capacity / rate) * date_part('epoch', ratelimit._longest(period)) END;
    IF needed > date_part('epoch', varies) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'rate limit %L: varies must be at least %s s, which its numbers need to fill a row, not %s s', name, needed, date_part('epoch', varies));
    END IF;
END
$body$;

-- Raises an error unless so many slots are valid.
CREATE FUNCTION ratelimit._validate_slots(name text, capacity double precision) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    PERFORM ratelimit._validate(name, '1', '1 second', 'token bucket', NULL, NULL, NULL, 1, NULL, NULL);
    IF (capacity BETWEEN '0' AND '1e9' AND capacity = trunc(capacity)) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'rate limit %L: capacity of slots must be a whole number between 0 and 1e9, not %s', name, coalesce(capacity::text, 'NULL'));
    END IF;
END
$body$;

-- Raises an error unless each field of a definition has the type that ratelimit.consume_all wants, and a text or number that Postgres can read.
CREATE FUNCTION ratelimit._check_definition(definition jsonb, number bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text;
    field text;
    shards double precision;
BEGIN
    SELECT CASE WHEN f.type = 'null' THEN pg_catalog.format('%s is null: leave it out', f.field)
                ELSE pg_catalog.format('%s must be a JSON %s, not %s', f.field, f.expected, f.type) END INTO wrong
      FROM (
        SELECT e.key AS field, jsonb_typeof(e.value) AS type,
               CASE WHEN e.key IN ('rate', 'capacity', 'max_reserved', 'shards') THEN 'number' ELSE 'string' END AS expected
          FROM jsonb_each(definition) AS e
      ) AS f
     WHERE f.expected <> f.type
     ORDER BY f.field COLLATE "C"
     LIMIT 1;
    -- Postgres reads more than the Go library as a timestamp, and ignores a zone in it.
    IF wrong IS NULL AND definition->>'anchor'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}( ([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?)?$' THEN
        wrong := pg_catalog.format('anchor must be a date, such as 2026-01-31, or a date and a time of day, such as 2026-01-31 15:00, not %L', definition->>'anchor'::text);
    END IF;
    -- What Postgres reads beside it means another instant in each call ('now'), or in each session.
    IF wrong IS NULL AND definition->>'start'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$' THEN
        wrong := pg_catalog.format('start must be an instant with its offset, such as 2026-01-31T00:00:00Z, not %L', left(definition->>'start'::text, 50));
    END IF;
    IF wrong IS NULL THEN
        BEGIN
            FOR field IN SELECT e.key FROM jsonb_each(definition) AS e ORDER BY e.key COLLATE "C" LOOP
                IF field IN ('rate', 'capacity', 'max_reserved') THEN
                    PERFORM (definition->>field)::double precision;
                ELSIF field IN ('period', 'varies') THEN
                    PERFORM (definition->>field)::interval;
                ELSIF field = 'start' THEN
                    PERFORM (definition->>field)::timestamptz;
                ELSIF field = 'anchor' THEN
                    PERFORM (definition->>field)::timestamp;
                ELSIF field = 'shards' THEN
                    shards := (definition->>field)::double precision;
                    IF NOT (shards BETWEEN '1' AND '100' AND shards = trunc(shards)) THEN
                        wrong := pg_catalog.format('shards must be a whole number between 1 and 100, not %s', shards);
                    END IF;
                END IF;
            END LOOP;
        EXCEPTION WHEN data_exception THEN -- a text that is no interval or no instant, or a number that is too large
            wrong := pg_catalog.format('%s: %s', field, SQLERRM);
        END;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = CASE jsonb_typeof(definition->'name'::text)
            WHEN 'string' THEN pg_catalog.format('rate limit %L: %s', left(definition->>'name'::text, 255), wrong)
            ELSE pg_catalog.format('definition %s: %s', number, wrong) END;
    END IF;
END
$body$;

-- The list of a program that counts: the newest that is in use or, if none is, the newest. own: a list that is in use from now on.
CREATE FUNCTION ratelimit._list(program text, own text, OUT list text)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT o.list INTO list FROM ratelimit.definitions AS o
     WHERE o.program = program COLLATE "C"
     GROUP BY o.list
     ORDER BY coalesce(o.list = own COLLATE "C" OR max(o.alive_until) > clock_timestamp(), false) DESC, max(o.first_at) DESC, o.list
     LIMIT 1;
END
$body$;

-- A definition in the spelling of SQL: the Go library writes maxReserved, and 1 quarter.
CREATE FUNCTION ratelimit._spelled(definition jsonb, number bigint) RETURNS jsonb
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    IF jsonb_typeof(definition) = 'object' AND definition ? 'maxReserved'::text THEN
        IF definition ? 'max_reserved'::text THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('definition %s: max_reserved is there twice, once as maxReserved', number);
        END IF;
        definition := pg_catalog.jsonb_set(definition - 'maxReserved'::text, '{max_reserved}', definition->'maxReserved'::text);
    END IF;
    RETURN CASE definition->>'period'::text WHEN '1 quarter' THEN pg_catalog.jsonb_set(definition, '{period}', '"3 months"') ELSE definition END;
END
$body$;

-- ratelimit.publish, and what a process of the Go library says of its list:
--
--   heartbeat   NULL: the list is the program's newest from now on. true: a process uses it, and repeats the call every minute while it
--               runs. false: a process uses it, and does not repeat the call. For both, a list that was published before is no newer
--               now, unless that was over a year ago
--
-- With heartbeat, a list that was used within 7 days is written without a lock of the table, unless another one counts from now on.
-- Without, it waits for others that publish.
CREATE FUNCTION ratelimit._publish(
    program text, definitions jsonb, heartbeat boolean, OUT counts boolean, OUT others text[]
)
LANGUAGE plpgsql
SET extra_float_digits = 1 SET intervalstyle = 'postgres' SET datestyle = 'ISO' SET timezone = 'UTC' -- definitions are texts
AS $body$
#variable_conflict use_variable
DECLARE
    d record;
    other record;
    definition text;
    names text[] COLLATE "C" := '{}';
    texts text[] COLLATE "C" := '{}'; -- the definitions of these names
    whole jsonb[] := '{}';
    hash text COLLATE "C";
    at timestamptz; -- of the whole list
    -- In variables, since Citus takes nothing in a write that is not immutable.
    alive timestamptz; -- a process of the list is alive until then; NULL: no process uses it
    fresh timestamptz; -- an earlier alive_until is due
    hour timestamptz;  -- an hour ago, and so on
    week timestamptz;
    year timestamptz;
    first timestamptz; -- when the list was first published
    known boolean; -- a process uses a list that is published already
    winner text COLLATE "C"; -- the list that counts
    zone text COLLATE "C"; -- as pg_timezone_names has it
BEGIN
    IF (octet_length(program) BETWEEN 1 AND 255) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('program must have 1 to 255 bytes, not %s', coalesce(octet_length(program)::text, 'NULL'));
    END IF;
    IF definitions IS NULL OR jsonb_typeof(definitions) <> 'array' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('definitions must be a JSON array, not %s', coalesce(jsonb_typeof(definitions), 'NULL'));
    END IF;
    SELECT pg_catalog.format('definition %s must be a JSON object, not %s', min(e.number), min(jsonb_typeof(e.value))) INTO definition
      FROM jsonb_array_elements(definitions) WITH ORDINALITY AS e (value, number)
     WHERE jsonb_typeof(e.value) <> 'object'
     GROUP BY e.number ORDER BY e.number LIMIT 1;
    IF definition IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = definition;
    END IF;
    SELECT pg_catalog.string_agg(DISTINCT k, ', ') INTO definition
      FROM jsonb_array_elements(definitions) AS e, jsonb_object_keys(e) AS k
     WHERE k NOT IN ('name', 'kind', 'rate', 'period', 'capacity', 'max_reserved', 'start', 'shards', 'zone', 'anchor', 'varies');
    IF definition IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'a definition has no field ' || definition,
            HINT = 'Its fields are name, kind, rate, period, capacity, max_reserved, start, shards, zone, anchor and varies.';
    END IF;
    PERFORM ratelimit._check_definition(e.value, e.number) FROM jsonb_array_elements(definitions) WITH ORDINALITY AS e (value, number);
    FOR d IN
        SELECT r.name, r.kind, r.rate, r.period, r.capacity, r.max_reserved, r.start, r.shards::integer AS shards, r.zone, r.anchor, r.varies
          FROM jsonb_to_recordset(definitions) AS r (name text, kind text, rate double precision, period interval,
            capacity double precision, max_reserved double precision, start timestamptz, shards double precision, zone text, anchor timestamp, varies interval)
    LOOP
        IF d.name = ANY (names) THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: name is in the list twice, but a name has one definition', d.name);
        END IF;
        IF d.kind = 'unlimited' THEN
            PERFORM ratelimit._validate(d.name, '1', '1 second', 'token bucket', NULL, NULL, NULL, 1, NULL, NULL);
            IF pg_catalog.num_nonnulls(d.rate, d.period, d.capacity, d.max_reserved, d.start, d.shards, d.zone, d.anchor, d.varies) > 0 THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: an unlimited limit must have no field but name and kind', d.name);
            END IF;
        ELSIF d.kind = 'slots' THEN
            PERFORM ratelimit._validate_slots(d.name, d.capacity);
            IF pg_catalog.num_nonnulls(d.rate, d.period, d.max_reserved, d.start, d.shards, d.zone, d.anchor) > 0 THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: slots must have no field but name, kind, capacity and varies', d.name);
            END IF;
            IF d.varies <> '0' THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: varies of slots must be 0, since nothing is refilled, not %s', d.name, d.varies);
            END IF;
        ELSE
            IF d.kind IS NULL OR d.kind NOT IN ('token bucket', 'fixed window', 'calendar window') THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
                    'rate limit %s: kind must be ''token bucket'', ''fixed window'', ''calendar window'', ''slots'' or ''unlimited'', not %s',
                    quote_nullable(left(d.name, 255)), quote_nullable(d.kind));
            END IF;
            d.shards := coalesce(d.shards, 1);
            PERFORM ratelimit._validate(d.name, d.rate, d.period, d.kind, d.capacity, d.start, d.max_reserved, d.shards, d.zone,
                d.anchor, zero => true);
            d.capacity := coalesce(d.capacity, d.rate);
            IF d.kind = 'calendar window' THEN
                d.zone := coalesce(d.zone, 'UTC');
                d.anchor := coalesce(d.anchor, '2001-01-01');
            END IF;
            IF d.varies IS NOT NULL THEN
                PERFORM ratelimit._validate_varies(d.name, d.rate, d.period, d.kind, d.capacity, d.varies);
            END IF;
        END IF;
        definition := pg_catalog.concat_ws(', ', d.kind, d.rate::text || ' per ' || d.period::text, 'capacity ' || d.capacity::text,
            'at most ' || d.max_reserved::text || ' reserved', 'start ' || d.start::text,
            CASE WHEN d.shards > 1 THEN d.shards::text || ' shards' END, 'in ' || d.zone || ' from '
                || CASE WHEN d.anchor = d.anchor::date::timestamp THEN d.anchor::date::text ELSE d.anchor::text END,
            CASE d.varies WHEN '0' THEN 'varies' ELSE 'varies within ' || d.varies::text END);
        names := pg_catalog.array_append(names, d.name);
        texts := pg_catalog.array_append(texts, definition);
        whole := pg_catalog.array_append(whole, pg_catalog.to_jsonb(d));
    END LOOP;
    SELECT encode(sha256(pg_catalog.convert_to(pg_catalog.string_agg(pg_catalog.format('%L: %s', n.name, n.text), E'\n' ORDER BY n.name COLLATE "C"), 'UTF8')), 'hex') INTO hash
      FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(texts)) AS n (name, text);

    at := clock_timestamp();
    alive := CASE WHEN heartbeat THEN at + interval '5 minutes' END;
    fresh := at + interval '4 minutes';
    hour := at - interval '1 hour';
    known := heartbeat IS NOT NULL AND hash IS NOT NULL AND pg_catalog.cardinality(names)
        = (SELECT count(*) FROM ratelimit.definitions AS o
            WHERE o.program = program COLLATE "C" AND o.list = hash AND (o.current OR o.published_at > at - interval '7 days'));
    winner := CASE WHEN known THEN ratelimit._list(program, CASE WHEN heartbeat THEN hash END) END;
    IF winner IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS o WHERE o.program = program COLLATE "C" AND o.current <> (o.list = winner)) THEN
        -- A process that starts or runs says that it uses the list. If this was said within the last minute, nothing is written. Rows
        -- that are locked are passed over: another process says the same. No lock conflicts with that of a process that publishes.
        UPDATE ratelimit.definitions AS o
           SET alive_until = coalesce(alive, o.alive_until),
               published_at = CASE WHEN o.current THEN o.published_at ELSE at END
          FROM (
            SELECT o.name FROM ratelimit.definitions AS o
             WHERE o.program = program COLLATE "C" AND o.list = hash
               AND (heartbeat AND coalesce(o.alive_until < fresh, true)
                    OR NOT o.current AND o.published_at < hour)
             ORDER BY o.name
               FOR UPDATE SKIP LOCKED
          ) AS due
         WHERE o.program = program COLLATE "C" AND o.list = hash AND o.name = due.name;
    ELSE
        IF current_setting('transaction_isolation') <> 'read committed' THEN -- it would not see what others publish meanwhile
            RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: to publish needs a READ COMMITTED transaction';
        END IF;
        -- One at a time: processes of one program start together. Reads and heartbeats go on. Rows are locked after the table, never
        -- before: who publishes has the table, and may want the rows.
        LOCK TABLE ratelimit.definitions IN SHARE UPDATE EXCLUSIVE MODE;
        at := clock_timestamp();
        alive := CASE WHEN heartbeat THEN at + interval '5 minutes' END;
        week := at - interval '7 days';
        year := at - interval '1 year';
        first := CASE WHEN heartbeat IS NOT NULL THEN
            (SELECT max(o.first_at) FROM ratelimit.definitions AS o WHERE o.program = program COLLATE "C" AND o.list = hash) END;
        first := coalesce(first, at);
        FOR d IN
            SELECT r.*, n.text FROM ROWS FROM (pg_catalog.unnest(whole), pg_catalog.unnest(texts)) AS n (one, text),
                pg_catalog.jsonb_to_record(n.one) AS r (name text, kind text, rate double precision, period interval,
                    capacity double precision, max_reserved double precision, start timestamptz, shards integer, zone text, anchor timestamp, varies interval)
        LOOP
            IF NOT known AND d.zone IS NOT NULL THEN
                zone := ratelimit._zone(d.zone);
                IF zone <> d.zone THEN
                    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: zone must be written as in pg_timezone_names, %L, not %L', d.name, zone, d.zone);
                ELSIF zone IS NULL AND heartbeat IS NULL THEN -- a process of the Go library has loaded it already, and its calls do without Postgres' zones
                    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: zone must be in pg_timezone_names, which %L is not', d.name, d.zone),
                        HINT = 'If the name is right, update the time zones of the server.';
                END IF;
            END IF;
            -- It has rows. What runs already is not refused: it would be taken for dead, and sweeps would no longer mind it.
            IF NOT known AND (d.rate > '0' OR d.varies IS NOT NULL OR d.kind = 'slots') THEN
                SELECT o.* INTO other FROM ratelimit.definitions AS o
                 WHERE o.name = d.name AND o.program <> program COLLATE "C" AND (o.current OR o.alive_until > at) AND (o.rate > '0' OR o.varies IS NOT NULL OR o.kind = 'slots')
                   AND (o.kind <> d.kind OR o.period <> d.period OR (o.start IS NULL) <> (d.start IS NULL) OR date_bin(d.period, d.start, o.start) <> d.start
                        OR d.varies IS NULL AND o.varies IS NULL AND (o.zone <> d.zone OR NOT ratelimit._same_windows(d.period, d.anchor, o.anchor)))
                 ORDER BY o.current DESC, o.program
                 LIMIT 1;
                IF FOUND THEN
                    RAISE invalid_parameter_value USING
                        MESSAGE = pg_catalog.format('rate limit %L: program %L defines %s%s%s, and program %L %s%s%s: both would grant', d.name,
                            program, CASE d.kind WHEN 'slots' THEN d.kind ELSE pg_catalog.format('a %s of %s', d.kind, d.period) END, ' from ' || d.start::text,
                            pg_catalog.format(' in %s from ', d.zone) || d.anchor::text,
                            other.program, CASE other.kind WHEN 'slots' THEN other.kind ELSE pg_catalog.format('a %s of %s', other.kind, other.period) END, ' from ' || other.start::text,
                            pg_catalog.format(' in %s from ', other.zone) || other.anchor::text),
                        HINT = pg_catalog.format(CASE WHEN other.current THEN
                            'Give one of them another name. If %1$L no longer runs: SELECT ratelimit.withdraw(%1$L)' ELSE
                            'Give one of them another name, or wait until no older version of %1$L has run for five minutes' END, other.program);
                END IF;
            END IF;
            INSERT INTO ratelimit.definitions AS old
            VALUES (program, d.name, d.text, d.kind, d.rate, d.period, d.capacity, d.max_reserved, d.start, d.shards, d.zone, d.anchor, d.varies,
                false, at, hash, first, alive)
            ON CONFLICT ON CONSTRAINT definitions_pkey DO UPDATE
               SET published_at = CASE WHEN heartbeat IS NULL OR NOT old.current THEN at ELSE old.published_at END,
                   first_at = first,
                   alive_until = coalesce(alive, old.alive_until);
        END LOOP;
        winner := CASE WHEN hash IS NOT NULL THEN ratelimit._list(program, CASE WHEN heartbeat THEN hash END) END;
        UPDATE ratelimit.definitions AS old
           SET current = coalesce(old.list = winner, false), published_at = at,
               alive_until = CASE WHEN hash IS NOT NULL THEN old.alive_until END -- what is withdrawn is not in use
         WHERE old.program = program COLLATE "C" AND (old.current <> coalesce(old.list = winner, false) OR hash IS NULL AND old.alive_until > at);
        DELETE FROM ratelimit.definitions AS old
         WHERE old.program = program COLLATE "C" AND NOT old.current AND old.published_at < week
           AND (old.published_at < year OR EXISTS (SELECT 1 FROM ratelimit.definitions AS o
                    WHERE o.program = program COLLATE "C" AND o.list = old.list AND o.name < old.name));
    END IF;
    counts := hash IS NULL OR hash = winner;
    others := ARRAY(
        SELECT pg_catalog.format('%L: %s, and program %L has published %s', o.name, n.text, o.program, o.definition)
          FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(texts), pg_catalog.unnest(whole)) AS n (name, text, one)
          JOIN ratelimit.definitions AS o ON o.name = n.name AND o.definition <> n.text -- of this program, in a list that is still in use
           AND (o.current AND o.program <> program COLLATE "C"
                OR o.alive_until > at AND (o.kind <> n.one->>'kind'::text OR o.period <> (n.one->>'period'::text)::interval
                    OR (o.start IS NULL) <> (n.one->>'start'::text IS NULL) OR date_bin(o.period, o.start, (n.one->>'start'::text)::timestamptz) <> o.start))
         GROUP BY o.name, n.text, o.program, o.definition
         ORDER BY o.name, o.program, o.definition
         LIMIT 10);
END
$body$;

CREATE FUNCTION ratelimit.publish(program text, definitions jsonb, OUT counts boolean, OUT others text[])
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    IF definitions = '[]' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('definitions must not be empty. To withdraw what program %1$L has published: SELECT ratelimit.withdraw(%1$L)', program);
    END IF;
    IF jsonb_typeof(definitions) = 'array' THEN
        SELECT pg_catalog.jsonb_agg(ratelimit._spelled(e.value, e.number) ORDER BY e.number) INTO definitions FROM jsonb_array_elements(definitions) WITH ORDINALITY AS e (value, number);
    END IF;
    SELECT p.counts, p.others INTO counts, others FROM ratelimit._publish(program COLLATE "C", definitions, NULL::boolean) AS p;
END
$body$;

COMMENT ON FUNCTION ratelimit.publish(text, jsonb) IS $text$
Writes down all limits that a program defines, in place of those that it published before, as Publish of the Go library does.

    SELECT ratelimit.publish('api', '[{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1 minute", "capacity": 20}]')

Arguments:
  program      the name of the program, 1 to 255 bytes. All processes of a program publish the same limits
  definitions  a JSON array of objects with the fields name, kind, rate, period, capacity, max_reserved, start, shards, zone and anchor, as
               for ratelimit.consume, or as the Go library writes them (maxReserved, '1 quarter'), of the JSON types that ratelimit.consume_all wants; or with name and the kind 'unlimited'; or with name, the kind 'slots' and capacity, which is how many
               slots there are. Each name is there once. The field varies, an interval, 0 for slots, says that
               the program gives some keys another rate, capacity, zone or anchor. It is the longest time in which any of these numbers
               fills a row from 0. A start is written as '2026-01-31T00:00:00Z' or '2026-01-31 00:00:00+00', and a
               zone as in pg_timezone_names

The list is the program's newest from now on. Of the lists that a program has published, the newest one counts that a process of the Go
library has said it uses within five minutes. If there is none, the newest one does. The tool, the page and SQL without numbers use it.
The others count for sweeps for another 7 days. An empty list is an error: ratelimit.withdraw withdraws.

Returns:
  counts       whether this list counts
  others       names of the list for which another program has published other numbers, each with these numbers, 10 at most. So is
               another kind or period, if the list was published already and a process uses it

Errors:
  22023        an argument is invalid or an empty list, a field is null or of the wrong type, a name is there twice, or another program defines a limit of that
               name with another kind, period or start or, of a calendar window without varies, another zone or another anchor that has
               other windows. So does a list of it that is in use, whether it counts or not
  RL003        the transaction is not READ COMMITTED, and the lists have to be changed
$text$;

-- The list stays, as what was replaced: sweeps mind it.
CREATE FUNCTION ratelimit.withdraw(program text) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    withdrawn integer;
BEGIN
    SELECT count(DISTINCT d.name) FILTER (WHERE d.current OR d.alive_until > clock_timestamp()) INTO withdrawn
      FROM ratelimit.definitions AS d
     WHERE d.program = program COLLATE "C"
    HAVING count(*) > '0';
    IF NOT FOUND THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('program must be one that has published limits, not %s', quote_nullable(left(program, 255))),
            HINT = 'Those there are: SELECT DISTINCT d.program FROM ratelimit.definitions AS d';
    END IF;
    PERFORM ratelimit._publish(program COLLATE "C", '[]', NULL::boolean);
    RETURN withdrawn;
END
$body$;

COMMENT ON FUNCTION ratelimit.withdraw(text) IS $text$
Withdraws all lists that a program has published: for a program that is gone, or has another name now.

    SELECT ratelimit.withdraw('api')

The tool, the page and SQL no longer know its limits by it. Sweeps mind them for another 7 days. A process of the program that still runs
publishes its list again within two minutes.

Arguments:
  program  the name of the program

Returns how many limits were withdrawn. It is 0 if that was done before.

Errors:
  22023    no such program has published limits
  RL003    the transaction is not READ COMMITTED
$text$;

-- What people decide about limits: other numbers, a block, or no limit, for one key or for all. Programs that have
-- Programs that call ratelimit.Open follow this table. SQL by hand looks here if it is called without numbers.
--
-- Rows are added and marked as removed; a sweep deletes them a year after their end. The effects reset and release are those of ratelimit.reset and
-- ratelimit.release: they are history from the beginning, and no predicate finds it in force. A row for the key goes before one for all keys. Among those of one
-- level, a block in force goes before all others, and else the newest wins: by made_at, since ids begin anew where the rows were copied to.
CREATE TABLE ratelimit.overrides (
    id           bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text COLLATE "C" NOT NULL,
    key          text COLLATE "C" CHECK (key <> ''),
    effect       text             NOT NULL CHECK (effect IN ('numbers', 'block', 'unlimited', 'reset', 'release')),
    rate         double precision,
    capacity     double precision,
    max_reserved double precision,
    until        timestamptz,
    reason       text             NOT NULL DEFAULT '' CHECK (octet_length(reason) <= 4096),
    made_by      text             NOT NULL DEFAULT SESSION_USER CHECK (octet_length(made_by) <= 255),
    made_at      timestamptz      NOT NULL DEFAULT clock_timestamp() CHECK (isfinite(made_at)),
    added        double precision,
    added_at     timestamptz CHECK (isfinite(added_at)),
    removed_by   text CHECK (octet_length(removed_by) <= 255),
    removed_at   timestamptz CHECK (isfinite(removed_at)),
    changed_in   xid8             NOT NULL DEFAULT pg_current_xact_id(),
    made_as      text             NOT NULL DEFAULT SESSION_USER,
    removed_as   text,
    CHECK (effect NOT IN ('reset', 'release') OR coalesce(until, 'infinity') = '-infinity'),
    UNIQUE (changed_in, id)
);

-- By when they are over: what is in force for a key, however long its history is, and, for sweeps, the numbers of a limit. And the newest of
-- a limit: only a query that says COLLATE "POSIX" takes that index. For a key, the planner would sometimes prefer it, and read the whole limit.
CREATE INDEX overrides_ends ON ratelimit.overrides (name, key, (greatest(made_at, coalesce(least(until, removed_at), 'infinity'))));

CREATE INDEX overrides_numbers ON ratelimit.overrides (name, (greatest(made_at, coalesce(least(until, removed_at), 'infinity'))))
    WHERE effect = 'numbers';

CREATE INDEX overrides_newest ON ratelimit.overrides (name COLLATE "POSIX", made_at, id);

COMMENT ON TABLE ratelimit.overrides IS 'txlimit: what people decide about limits: other numbers, a block, or no limit';

COMMENT ON COLUMN ratelimit.overrides.id IS 'the number of the override';

COMMENT ON COLUMN ratelimit.overrides.name IS 'the name of the limit';

COMMENT ON COLUMN ratelimit.overrides.key IS 'the key; NULL: every key that has no override of its own, and the limit without keys';

COMMENT ON COLUMN ratelimit.overrides.effect IS 'numbers, block or unlimited; reset: the key was made full again, or release: a hold of it was ended, and nothing is in force';

COMMENT ON COLUMN ratelimit.overrides.rate IS 'tokens per period; NULL: as defined';

COMMENT ON COLUMN ratelimit.overrides.capacity IS 'the most tokens that can be saved up; NULL: as defined or, if that is the defined rate, the new rate';

COMMENT ON COLUMN ratelimit.overrides.max_reserved IS 'the most tokens that may be owed; NULL: as defined';

COMMENT ON COLUMN ratelimit.overrides.until IS 'when it ends; NULL: never';

COMMENT ON COLUMN ratelimit.overrides.reason IS 'why, for those who look later';

COMMENT ON COLUMN ratelimit.overrides.made_by IS 'who decided, as the caller says';

COMMENT ON COLUMN ratelimit.overrides.made_at IS 'when: of those in force, a block wins, and else the newest';

COMMENT ON COLUMN ratelimit.overrides.added IS 'the tokens that ratelimit.add has added; NULL: it was not called';

COMMENT ON COLUMN ratelimit.overrides.added_at IS 'when';

COMMENT ON COLUMN ratelimit.overrides.removed_by IS 'who ended it early';

COMMENT ON COLUMN ratelimit.overrides.removed_at IS 'when it was ended early; NULL: it was not';

COMMENT ON COLUMN ratelimit.overrides.changed_in IS 'the transaction that changed the row last, by which programs find what is new';

COMMENT ON COLUMN ratelimit.overrides.made_as IS 'the role that was logged in; nobody is granted to write it';

COMMENT ON COLUMN ratelimit.overrides.removed_as IS 'the role that was logged in when it was ended early';

-- Reports whether an override is not over at an instant: it was not removed, and its end has not come.
CREATE FUNCTION ratelimit._lasts(until timestamptz, removed_at timestamptz, at timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN removed_at IS NULL AND (until IS NULL OR until > at);

-- Reports whether programs follow an override: they pass over a row whose effect or a number is not valid.
CREATE FUNCTION ratelimit._usable(effect text, rate double precision, capacity double precision, max_reserved double precision) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN effect IN ('numbers', 'block', 'unlimited') AND coalesce(rate, '1') BETWEEN '1e-15' AND '1e15'
    AND (capacity IS NULL OR capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15')
    AND (max_reserved IS NULL OR max_reserved = '0' OR max_reserved BETWEEN '1e-15' AND '1e15');

-- Returns the overrides in force for some keys and for every key or, without keys, all of a limit; without a name, those of all limits. They
-- come in the order in which they decide: by key, those for every key last; of each, blocks first, and then the newest. most: at most so
-- many of single keys, the first ones, and at most so many for every key.
CREATE FUNCTION ratelimit._in_force(name text, keys text[], at timestamptz, most bigint DEFAULT NULL)
RETURNS SETOF ratelimit.overrides
LANGUAGE plpgsql STABLE ROWS 10 SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    one text;
BEGIN
    IF name IS NULL THEN
        RETURN QUERY SELECT o.* FROM ratelimit.overrides AS o
         WHERE ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
         ORDER BY o.name, o.key, o.effect = 'block' DESC, o.made_at DESC, o.id DESC;
        RETURN;
    ELSIF keys IS NULL THEN
        RETURN QUERY SELECT a.* FROM ( -- along an index, however many there are
            SELECT o.* FROM ratelimit.overrides AS o
             WHERE o.name = name AND o.key IS NOT NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at AND ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
             ORDER BY o.key, greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) LIMIT most
          ) AS a ORDER BY a.key, a.effect = 'block' DESC, a.made_at DESC, a.id DESC;
    ELSE
        FOR one IN SELECT DISTINCT u.key COLLATE "C" FROM pg_catalog.unnest(keys) AS u (key) WHERE u.key IS NOT NULL ORDER BY 1 LOOP
            RETURN QUERY SELECT o.* FROM ratelimit.overrides AS o
             WHERE o.name = name AND o.key = one AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at AND ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
             ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC;
        END LOOP;
    END IF;
    RETURN QUERY SELECT o.* FROM ratelimit.overrides AS o
     WHERE o.name = name AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at AND ratelimit._lasts(o.until, o.removed_at, at) AND ratelimit._usable(o.effect, o.rate, o.capacity, o.max_reserved)
     ORDER BY o.effect = 'block' DESC, o.made_at DESC, o.id DESC LIMIT most;
END
$body$;

-- The capacity of a definition under an override: a capacity that is the rate follows the rate.
CREATE FUNCTION ratelimit._capacity(
    rate double precision, capacity double precision, new_rate double precision, new_capacity double precision
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(new_capacity, CASE WHEN capacity = rate THEN new_rate END, capacity);

-- Numbers, and what they come from: what is in force for a key or, without an override, a definition.
CREATE TYPE ratelimit._terms AS (
    effect text,       -- 'numbers', 'block', 'unlimited', or 'varies': only the program knows the numbers
    override bigint,   -- the id of the override; NULL: there is none
    until timestamptz, -- its end; NULL: it has none
    kind text, rate double precision, period interval, capacity double precision, max_reserved double precision, start timestamptz,
    shards integer, zone text, anchor timestamp,
    varies interval    -- the longest of any program
);

-- Returns the newest definition of a limit. kind is NULL if there is none.
CREATE FUNCTION ratelimit._defined(name text) RETURNS ratelimit._terms
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    d ratelimit._terms;
BEGIN
    SELECT 'numbers', NULL, NULL, f.kind, f.rate, f.period, coalesce(f.capacity, CASE f.kind WHEN 'slots' THEN '0' ELSE f.rate END), f.max_reserved, CASE WHEN isfinite(f.start) THEN f.start END, f.shards, f.zone, f.anchor,
           max(f.varies) OVER (PARTITION BY f.current)
      INTO d
      FROM ratelimit.definitions AS f
     WHERE f.name = name AND (f.current OR f.alive_until > clock_timestamp()) -- an older process still uses what is not current
     ORDER BY f.current DESC, f.published_at DESC, f.program
     LIMIT 1;
    RETURN d;
END
$body$;

-- Returns a definition under an override or, if that has no id, as it is. Of a blocked key, the numbers are those of the definition.
--
-- If the limit varies, only the program knows the numbers of a key, unless an override gives rate and capacity (and there is no zone or
-- anchor). Otherwise the effect is 'varies': rate and capacity are those of the override or NULL, and zone and anchor are NULL.
CREATE FUNCTION ratelimit._under(d ratelimit._terms, o ratelimit.overrides)
RETURNS ratelimit._terms
LANGUAGE plpgsql IMMUTABLE
AS $body$
#variable_conflict use_variable
BEGIN
    d.effect := coalesce(o.effect, 'numbers');
    d.override := o.id;
    d.until := CASE WHEN o.until < '10000-01-01 00:00+00' THEN o.until END; -- a row by hand may say infinity
    IF d.effect <> 'numbers' OR d.kind IS NULL THEN
        RETURN d;
    END IF;
    IF d.kind = 'unlimited' THEN
        d.effect := 'unlimited';
    ELSIF d.varies IS NOT NULL AND (o.rate IS NULL AND d.kind <> 'slots' OR o.capacity IS NULL OR d.kind = 'calendar window') THEN
        d.effect := 'varies';
        d.rate := CASE WHEN d.kind <> 'slots' THEN o.rate END;
        d.capacity := CASE WHEN d.kind <> 'slots' THEN o.capacity ELSE floor(o.capacity) END;
        d.max_reserved := coalesce(o.max_reserved, d.max_reserved);
        d.zone := NULL;
        d.anchor := NULL;
    ELSIF d.kind = 'slots' THEN
        d.capacity := coalesce(floor(o.capacity), d.capacity);
    ELSIF coalesce(o.rate, d.rate) > '0' THEN -- without a rate, other numbers say nothing of a limit that has none
        d.capacity := ratelimit._capacity(d.rate, d.capacity, o.rate, o.capacity);
        d.rate := coalesce(o.rate, d.rate);
        d.max_reserved := coalesce(o.max_reserved, d.max_reserved);
    END IF;
    RETURN d;
END
$body$;

-- Returns the terms in force for a key: the newest definition, or the one given, under the override in force or, if its id is given, under
-- another one. before: only those overrides count that are older than this one, and none if there is none of this id. standing: as if nothing were
-- blocked. A limit that no program has published is an error, unless an override needs no numbers, and so are numbers that only the program
-- knows, unless they may vary.
CREATE FUNCTION ratelimit._numbers(
    name text, key text, at timestamptz, before bigint DEFAULT NULL, varying boolean DEFAULT false, under bigint DEFAULT NULL,
    standing boolean DEFAULT false, given ratelimit._terms DEFAULT NULL
) RETURNS ratelimit._terms
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    o ratelimit.overrides;
    n ratelimit._terms;
    made timestamptz := (SELECT b.made_at FROM ratelimit.overrides AS b WHERE b.id = before);
BEGIN
    IF under IS NOT NULL THEN
        SELECT f.* INTO o FROM ratelimit.overrides AS f WHERE f.id = under;
    ELSE
        SELECT f.* INTO o FROM ratelimit._in_force(name, ARRAY[key], at) AS f
         WHERE NOT (standing AND f.effect = 'block') AND (before IS NULL OR f.made_at < made OR f.made_at = made AND f.id < before) LIMIT 1;
    END IF;
    n := ratelimit._under(CASE WHEN given.kind IS NULL THEN ratelimit._defined(name) ELSE given END, o);
    IF n.effect = 'numbers' AND n.kind IS NULL THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %s: no program has published it', quote_nullable(left(name, 255))),
            HINT = pg_catalog.concat('Published are ' || ratelimit._nearest(name) || '. ', 'Pass rate and period, or have a program publish its limits (ratelimit.publish).');
    ELSIF n.effect = 'varies' AND NOT varying THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %L: the numbers of this key are the program''s', name),
            HINT = 'Pass the kind, rate, period, capacity and so on that the program uses for this key.';
    END IF;
    RETURN n;
END
$body$;

-- Lists the names of which a program's list counts or is still used, at most ten, the nearest first: those that have most pairs of letters of the name.
CREATE FUNCTION ratelimit._nearest(name text) RETURNS text
LANGUAGE plpgsql STABLE
AS $body$
#variable_conflict use_variable
DECLARE
    list text;
    all_ bigint;
BEGIN
    SELECT pg_catalog.string_agg(quote_literal(n.name), ', ' ORDER BY n.place) FILTER (WHERE n.place <= '10'), count(*) INTO list, all_
      FROM (
        SELECT d.name, row_number() OVER (ORDER BY (
                SELECT 2 * count(*) FILTER (WHERE strpos(lower(d.name), p.pair) > 0) FROM (
                    SELECT lower(substr(name, i, 2)) AS pair FROM pg_catalog.generate_series(1, greatest(length(left(name, 255)) - 1, 1)) AS i
                ) AS p
            ) - length(d.name)::bigint DESC, d.name) AS place
          FROM (SELECT DISTINCT f.name FROM ratelimit.definitions AS f
                 WHERE f.current OR f.alive_until > clock_timestamp()) AS d
      ) AS n;
    RETURN list || CASE WHEN all_ > '10' THEN pg_catalog.format(' and %s others', all_ - '10') ELSE '' END;
END
$body$;

-- Refuses the name of a limit to an operator, if programs publish limits and nobody knows it.
CREATE FUNCTION ratelimit._check_known(name text) RETURNS void
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off
AS $body$
#variable_conflict use_variable
BEGIN
    IF NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = name) AND NOT EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name)
       AND NOT EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = name) AND NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.state <> 'released')
       AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.current OR d.published_at > clock_timestamp() - interval '7 days') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %s: nobody knows it: no program has published it, and it has no row and no override', quote_nullable(left(name, 255))),
            HINT = pg_catalog.concat('Published are ' || ratelimit._nearest(name) || '.');
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL; -- a role that does not see all of them
END
$body$;

-- Returns the key of an override: NULL for every key, and for a limit without keys.
CREATE FUNCTION ratelimit._scope(name text, key text, global boolean, every_key boolean) RETURNS text
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN global IS NULL OR every_key IS NULL THEN 'global and every_key must be true or false, not NULL'
        WHEN every_key AND (global OR key IS NOT NULL) THEN 'key must be NULL, and global false, with every_key => true'
        WHEN every_key THEN NULL
        WHEN key IS NULL AND NOT global THEN 'key must be given, not NULL: every_key => true is for every key, global => true for a limit without keys'
        ELSE ratelimit._wrong_key(key, global) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    IF global THEN
        PERFORM ratelimit._check_keyless(name, '');
    END IF;
    RETURN key;
END
$body$;

-- Adds a row. It refuses what a program could not use, and the name of no limit.
CREATE FUNCTION ratelimit._insert_override(
    name text, key text, effect text, rate double precision, capacity double precision, max_reserved double precision,
    until timestamptz, reason text, who text, forever boolean
) RETURNS bigint
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text;
    unknown boolean; -- programs publish limits, but none of this name
    kinds text[] := ARRAY(SELECT DISTINCT d.kind FROM ratelimit.definitions AS d WHERE d.name = name AND (d.current OR d.alive_until > clock_timestamp()));
    id bigint;
    blocked bigint;
BEGIN
    until := CASE WHEN until < '10000-01-01 00:00+00' THEN until END;
    PERFORM ratelimit._validate(name, coalesce(rate, '1'), '1 second', 'token bucket', capacity, NULL, max_reserved, 1, NULL, NULL);
    unknown := NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d
                 WHERE d.name = name AND (d.current OR d.published_at > clock_timestamp() - interval '7 days'))
             AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d
                 WHERE d.current OR d.published_at > clock_timestamp() - interval '7 days');
    wrong := CASE
        WHEN octet_length(reason) > 4096 THEN 'the reason is longer than 4096 bytes'
        WHEN octet_length(who) > 255 THEN 'who is longer than 255 bytes'
        WHEN until <= clock_timestamp() THEN pg_catalog.format('until must be in the future, not %s', until)
        WHEN effect = 'numbers' AND coalesce(rate, capacity, max_reserved) IS NULL THEN 'rate, capacity or max_reserved must be given, not NULL'
        WHEN effect = 'numbers' AND pg_catalog.cardinality(kinds) = 1 AND 'unlimited' = ANY (kinds) THEN 'it is defined as unlimited: numbers change nothing of it, but ratelimit.block does'
        WHEN effect = 'numbers' AND 'slots' = ANY (kinds) THEN
            CASE WHEN coalesce(rate, max_reserved) IS NOT NULL THEN 'rate and max_reserved must be NULL for slots'
                 WHEN (capacity <= '1e9' AND capacity = trunc(capacity)) IS NOT TRUE THEN
                     pg_catalog.format('capacity of slots must be a whole number between 0 and 1e9, not %s', capacity) END
        WHEN forever IS NULL THEN 'forever must be true or false, not NULL'
        WHEN forever AND until IS NOT NULL THEN 'until and forever => true exclude each other'
        WHEN NOT forever AND until IS NULL THEN 'until must be an instant before the year 10000; without an end, say forever => true'
        WHEN unknown THEN pg_catalog.concat('no program has published a limit of this name', ', but ' || ratelimit._nearest(name))
    END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;
    LOOP
        INSERT INTO ratelimit.overrides AS o (name, key, effect, rate, capacity, max_reserved, until, reason, made_by)
        VALUES (name, key, effect, rate, capacity, max_reserved, until, coalesce(reason, ''), coalesce(nullif(who, ''), SESSION_USER))
        ON CONFLICT DO NOTHING RETURNING o.id INTO id;
        EXIT WHEN id IS NOT NULL; -- rows that were copied here may have the next ids already
    END LOOP;
    PERFORM pg_notify('ratelimit.overrides', '');
    blocked := (SELECT f.id FROM ratelimit._in_force(name, ARRAY[key], clock_timestamp()) AS f
         WHERE f.key IS NOT DISTINCT FROM key AND f.effect = 'block' AND effect <> 'block' LIMIT 1);
    IF blocked IS NOT NULL THEN
        RAISE NOTICE USING MESSAGE = pg_catalog.format('rate limit %L: block %s stays in force, and denies all the same: see ratelimit.unblock', name, blocked);
    END IF;
    IF effect = 'numbers' AND key IS NULL AND EXISTS (SELECT 1 FROM ratelimit.definitions AS d
            WHERE d.name = name AND (d.current OR d.alive_until > clock_timestamp()) AND d.varies IS NOT NULL) THEN
        RAISE NOTICE USING MESSAGE = pg_catalog.format('rate limit %L: keys with numbers of their own get the numbers of this override, too', name);
    END IF;
    RETURN id;
END
$body$;

CREATE FUNCTION ratelimit.override(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, capacity double precision DEFAULT NULL, max_reserved double precision DEFAULT NULL,
    until timestamptz DEFAULT NULL, reason text DEFAULT NULL, who text DEFAULT NULL, forever boolean DEFAULT false,
    global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS bigint
LANGUAGE sql
RETURN ratelimit._insert_override(name COLLATE "C", ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key), 'numbers', rate, capacity, max_reserved, until, reason, who, forever);

COMMENT ON FUNCTION ratelimit.override(text, text, double precision, double precision, double precision, timestamptz, text, text, boolean, boolean, boolean) IS $text$
Gives a rate limit other numbers, for one key or for all, until an instant or for good. Programs that the Go library opens follow within two
seconds of the commit.

    SELECT ratelimit.override('signUps', 'acme', rate => 500, until => now() + interval '2 hours', reason => 'their conference')

Arguments:
  name          the name of the limit
  key           the key as it is stored; NULL or empty is an error, unless global or every_key is true
  rate          tokens per period; default NULL: as defined. ratelimit.block is for a rate of 0
  capacity      the most tokens that can be saved up; default NULL: as defined or, if that is the defined rate, the new rate. Of slots,
                how many there are: they have no other number
  max_reserved  the most tokens that may be owed with reserve; default NULL: as defined
  until         when it ends; required, unless forever is true
  reason        why, for those who look later: at most 4096 bytes; default NULL: it is not said
  who           who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (made_as)
  forever       true: it has no end, and until must be NULL. Default false
  global        true: the limit has no keys, and key must be NULL. Default false. It is an error if the limit has rows, and all have keys: a
                net for a forgotten key, and no promise
  every_key     true: it is for every key that has no override of its own, and key must be NULL. Default false

It returns the id of its row in ratelimit.overrides. New numbers add no tokens to what a key has: see ratelimit.add. The newest
override wins, but a block in force stays (a notice says so): see ratelimit.unblock. ratelimit.restore ends it. Keys to which the program gives numbers of their own have those of the override instead.

Errors:
  22023         an argument is invalid, or programs publish their limits and none has this name
$text$;

CREATE FUNCTION ratelimit.block(
    name text, key text DEFAULT NULL, until timestamptz DEFAULT NULL, reason text DEFAULT NULL, who text DEFAULT NULL, forever boolean DEFAULT false,
    global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS bigint
LANGUAGE sql
RETURN ratelimit._insert_override(name COLLATE "C", ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key), 'block', NULL, NULL, NULL, until, reason, who, forever);

COMMENT ON FUNCTION ratelimit.block(text, text, timestamptz, text, text, boolean, boolean, boolean) IS $text$
Denies a key of a rate limit everything, or with every_key all of them, until an instant or for good. Refunds, resets and tokens that
were reserved before change nothing. Charges are still recorded. Arguments and result are the same as for ratelimit.override.

    SELECT ratelimit.block('logins', 'user-17', until => now() + interval '1 hour', reason => 'password guessing')

    SELECT ratelimit.block('signUps', every_key => true, until => now() + interval '1 hour', reason => 'spam wave')

A denial by a block has its end as retry_at, unless another block follows. Calls that were sent before the block was known are decided as they
were then. Other programs know of no block.
$text$;

CREATE FUNCTION ratelimit.unlimited(
    name text, key text DEFAULT NULL, until timestamptz DEFAULT NULL, reason text DEFAULT NULL, who text DEFAULT NULL, forever boolean DEFAULT false,
    global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS bigint
LANGUAGE sql
RETURN ratelimit._insert_override(name COLLATE "C", ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key), 'unlimited', NULL, NULL, NULL, until, reason, who, forever);

COMMENT ON FUNCTION ratelimit.unlimited(text, text, timestamptz, text, text, boolean, boolean, boolean) IS $text$
Grants a key of a rate limit everything, or with every_key all of them, until an instant or for good. Nothing is taken meanwhile. Arguments
and result are the same as for ratelimit.override.

    SELECT ratelimit.unlimited('signUps', 'load-test', until => now() + interval '30 minutes')
$text$;

CREATE FUNCTION ratelimit.restore(
    name text, key text DEFAULT NULL, effect text DEFAULT NULL, who text DEFAULT NULL, global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET search_path = pg_catalog, pg_temp
AS $body$
#variable_conflict use_variable
DECLARE
    removed integer;
    ids     bigint[];
    -- In variables, since Citus takes nothing in a write that is not immutable.
    at   timestamptz := clock_timestamp();
    xid  xid8        := pg_current_xact_id();
    role text        := SESSION_USER;
BEGIN
    IF effect NOT IN ('numbers', 'block', 'unlimited') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('effect must be ''numbers'', ''block'', ''unlimited'' or NULL, which is all of them, not %L', effect);
    END IF;
    IF octet_length(who) > 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'who is longer than 255 bytes';
    END IF;
    key := ratelimit._scope(name COLLATE "C", key COLLATE "C", global, every_key);
    PERFORM ratelimit._check_known(name COLLATE "C");
    ids := CASE WHEN key IS NULL THEN ARRAY(SELECT o.id FROM ratelimit.overrides AS o
            WHERE o.name = name COLLATE "C" AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at)
        ELSE ARRAY(SELECT o.id FROM ratelimit.overrides AS o
            WHERE o.name = name COLLATE "C" AND o.key = key COLLATE "C" AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > at) END;
    UPDATE ratelimit.overrides AS o
       SET removed_at = at, removed_by = coalesce(nullif(who, ''), role), removed_as = role, changed_in = xid
     WHERE o.id = ANY (ids) AND ratelimit._lasts(o.until, o.removed_at, at) AND (effect IS NULL OR o.effect = effect);
    GET DIAGNOSTICS removed = ROW_COUNT;
    PERFORM pg_notify('ratelimit.overrides', '');
    RETURN removed;
END
$body$;

COMMENT ON FUNCTION ratelimit.restore(text, text, text, text, boolean, boolean) IS $text$
Ends the overrides in force for a key of a rate limit, or with every_key those for all keys, and returns how many.

    SELECT ratelimit.restore('signUps', 'acme')

Arguments:
  effect  'numbers', 'block' or 'unlimited': only those; default NULL: all of them
  who     who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (removed_as)

Key, global and every_key are as for ratelimit.override.

Errors:
  22023   an argument is invalid, or programs publish limits, and none has this name, nor has it a row or an override
$text$;

CREATE FUNCTION ratelimit.unblock(
    name text, key text DEFAULT NULL, who text DEFAULT NULL, global boolean DEFAULT false, every_key boolean DEFAULT false
) RETURNS integer
LANGUAGE sql
RETURN ratelimit.restore(name COLLATE "C", key COLLATE "C", 'block', who, global, every_key);

COMMENT ON FUNCTION ratelimit.unblock(text, text, text, boolean, boolean) IS $text$
Ends the blocks of a key of a rate limit, or with every_key the block of all keys, and returns how many. Other overrides stay.

    SELECT ratelimit.unblock('logins', 'user-17')
$text$;

CREATE FUNCTION ratelimit.add(id bigint, capacity double precision DEFAULT NULL) RETURNS double precision
LANGUAGE plpgsql SECURITY DEFINER SET enable_seqscan = off SET search_path = pg_catalog, pg_temp
AS $body$
#variable_conflict use_variable
DECLARE
    o ratelimit.overrides;
    was record;
    older record;           -- numbers in force, from the newest on
    fills interval;         -- within this time, the limit fills up; NULL: not known
    most double precision;  -- the largest capacity that has counted within that time
    known boolean;          -- it is
    published boolean;
    more double precision;
    at timestamptz;         -- of the adding
    spent double precision; -- what ended overrides have added, as far as it may not have been refilled since
    paused timestamptz;     -- the key is refilled from then on
    wrong text;
    timeout double precision; -- of a statement, in seconds; 0: none
BEGIN
    SELECT f.* INTO o FROM ratelimit.overrides AS f WHERE f.id = id FOR UPDATE;
    IF o.added IS NOT NULL THEN
        RETURN o.added;
    END IF;
    wrong := CASE
        WHEN o.id IS NULL THEN 'there is no override of this id'
        WHEN o.effect <> 'numbers' THEN pg_catalog.format('it has no numbers, but the effect %L', o.effect)
        WHEN o.removed_at IS NOT NULL THEN pg_catalog.format('it was removed at %s', o.removed_at)
        WHEN o.until <= clock_timestamp() THEN pg_catalog.format('it ended at %s', o.until)
    END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('id must be of an override in force that changes numbers, not %s: %s', coalesce(id::text, 'NULL'), wrong);
    END IF;
    IF o.changed_in = pg_current_xact_id() THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('override %s is not committed yet: a program that does not know it would cut the tokens again', id);
    END IF;
    timeout := extract(epoch FROM current_setting('statement_timeout')::interval)::double precision;
    IF timeout > '0' AND timeout < '2.1' THEN -- a statement that is cancelled does not say why
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = pg_catalog.format('override %s: nothing was added: the call waits for 2 seconds, until programs know of the override, and statement_timeout is %s', id, current_setting('statement_timeout')),
            HINT = 'Call it after SET LOCAL statement_timeout = ''10s'', in one transaction.';
    END IF;
    PERFORM pg_sleep('2'); -- until programs know: made_at says nothing about the commit
    -- What was in force before: an override, or what is published. Where only the program knows the numbers, an override has to give its capacity.
    SELECT CASE WHEN f.effect IN ('block', 'unlimited') THEN f.effect ELSE 'varies' END AS effect, f.capacity, f.id AS override
      INTO was FROM (VALUES (1)) AS one LEFT JOIN LATERAL (
        SELECT f.* FROM ratelimit._in_force(o.name, ARRAY[o.key], clock_timestamp()) AS f
         WHERE f.made_at < o.made_at OR f.made_at = o.made_at AND f.id < o.id LIMIT 1) AS f ON true;
    published := EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = o.name AND (d.current OR d.alive_until > clock_timestamp()));
    IF capacity IS NULL OR published THEN
        SELECT f.effect, f.capacity, f.override INTO was FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), o.id, varying => true) AS f;
        SELECT f.capacity INTO o.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), varying => true, under => o.id) AS f;
        -- A limit that is empty fills up within this time, by the numbers as defined and by those of the override.
        SELECT make_interval(secs => max(least('3e9', CASE WHEN f.varies IS NOT NULL THEN date_part('epoch', f.varies) ELSE ceil(f.capacity / nullif(f.rate, '0'))
                   * date_part('epoch', CASE f.kind WHEN 'calendar window' THEN ratelimit._longest(f.period) ELSE f.period END) END)))
          INTO fills
          FROM (SELECT * FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), varying => true, under => o.id)
                UNION ALL SELECT * FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), '0', varying => true)) AS f;
    END IF;
    was.capacity := CASE WHEN was.effect IN ('numbers', 'varies') THEN was.capacity END;
    -- A lower override says nothing of what the key has used before it. The oldest numbers, without overrides, are those of id 0.
    most := capacity;
    known := capacity IS NOT NULL;
    FOR older IN
        SELECT b.made_at, b.id, b.capacity, b.added, b.capacity IS NULL AS as_defined FROM ratelimit.overrides AS b
         WHERE b.name = o.name AND (b.key = o.key OR b.key IS NULL) AND b.effect = 'numbers' AND b.removed_at IS NULL
           AND (b.until IS NULL OR b.until > clock_timestamp()) AND (b.made_at, b.id) < (o.made_at, o.id)
        UNION ALL SELECT '-infinity', 0, NULL, NULL, true WHERE capacity IS NULL
         ORDER BY 1 DESC, 2 DESC
    LOOP
        IF published THEN
            older.capacity := (SELECT n.capacity FROM ratelimit._numbers(o.name, o.key, clock_timestamp(), CASE WHEN older.id = 0 THEN 0 END,
                varying => true, under => nullif(older.id, 0)) AS n);
        END IF;
        IF older.as_defined THEN -- lists that were replaced lately are there for 7 days
            older.capacity := greatest(older.capacity, (SELECT max(d.capacity) FROM ratelimit.definitions AS d
                 WHERE d.name = o.name AND d.kind <> 'slots' AND d.varies IS NULL AND (d.current OR d.alive_until > clock_timestamp() OR d.published_at > clock_timestamp() - fills)));
        END IF;
        most := greatest(most, older.capacity);
        IF older.id = 0 OR older.made_at <= clock_timestamp() - fills OR older.added > '0' THEN -- of which all before were less
            known := known OR older.capacity IS NOT NULL;
            EXIT;
        END IF;
    END LOOP;
    more := o.capacity - most;
    wrong := CASE
        WHEN EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = o.name AND (d.current OR d.alive_until > clock_timestamp()) AND d.kind = 'slots') THEN
            'it has slots, and nothing is added to them: another capacity counts at once'
        WHEN NOT (capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15') THEN pg_catalog.format('capacity must be 0 or between 1e-15 and 1e15, not %s', capacity)
        WHEN was.override IS NOT NULL AND capacity < was.capacity THEN
            pg_catalog.format('capacity must be NULL or at least %s, which holds under override %s, not %s', was.capacity, was.override, capacity)
        WHEN o.capacity IS NULL THEN pg_catalog.format('override %s gives no capacity, and only the program knows that of this key', id)
        WHEN capacity IS NULL AND was.effect NOT IN ('numbers', 'varies') THEN
            pg_catalog.format('capacity must be given, not NULL: the key had the effect %L before override %s', was.effect, id)
        WHEN NOT known THEN 'capacity must be given, not NULL: only the program knows that of this key'
        WHEN o.until <= clock_timestamp() THEN pg_catalog.format('id must be of an override in force, not %s: it ended at %s', id, o.until)
    END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', o.name, wrong);
    END IF;
    -- What an ended override has added is gone, and would be granted once more. Where nobody knows when the limit fills up, it always counts.
    SELECT coalesce(sum(f.added), '0') INTO spent FROM ratelimit.overrides AS f
     WHERE f.name = o.name AND (f.key = o.key OR f.key IS NULL AND o.key IS NULL) AND f.added > '0' AND f.id <> o.id
       AND (f.removed_at IS NOT NULL OR f.until <= clock_timestamp()) AND (fills IS NULL OR f.added_at > clock_timestamp() - fills);
    more := greatest(more - spent, '0');
    PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = o.name AND r.key = coalesce(o.key, '') ORDER BY r.shard FOR UPDATE;
    SELECT max(r.ts) INTO paused FROM ratelimit.limits AS r WHERE r.name = o.name AND r.key = coalesce(o.key, '');
    IF paused > clock_timestamp() + interval '1 second' THEN -- not a clock that has stepped back by less
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = pg_catalog.format('override %s: nothing was added: the key is paused until %s', id, paused),
            HINT = 'Call it again once the pause is over, or after ratelimit.resume.';
    END IF;
    WITH u AS (
        UPDATE ratelimit.limits AS r SET value = r.value + more / r.shards::double precision
         WHERE r.name = o.name AND r.key = coalesce(o.key, '') RETURNING more / r.shards::double precision AS added
    )
    SELECT coalesce(sum(u.added), 0) INTO more FROM u;
    at := clock_timestamp();
    UPDATE ratelimit.overrides AS f SET added = more, added_at = at WHERE f.id = id;
    RETURN more;
END
$body$;

COMMENT ON FUNCTION ratelimit.add(bigint, double precision) IS $text$
Adds to what the key of an override has the difference between its capacity and the largest that the key had within the time in which an empty
limit fills up, once for each override, and returns it.

    SELECT ratelimit.override('signUps', 'acme', rate => 500, forever => true); -- returns 17. Once that is committed:
    SELECT ratelimit.add(17);

A program that does not yet know of the override cuts what it finds to the old capacity. So the function waits for two seconds before it
adds: an override that is committed is known by then. What an override that has ended added is subtracted, until the limit would have filled
up since: so override, add and restore, again and again, grant at most the larger capacity and the refill. A key without a row
is full: nothing is added to it. Nor add to a key that is first used under the override, or whose window has turned or which was reset since:
it was full by the larger capacity, and the difference comes on top, once. For an override of all keys, only the row of a limit without keys gets something.

Arguments:
  id        the id of the override
  capacity  the largest capacity before; default NULL: that of the overrides in force before, and as published, also before a deploy within
            7 days. A smaller one than that of the override before is refused. Of a limit whose keys have numbers of their own, it has to be given, unless an override
            before has counted for so long, or has added tokens; and the override itself has to give a capacity

Errors:
  55000  statement_timeout ends the call before it has waited for two seconds, or the key is paused (ratelimit.pause)
  22023  there is no such override in force, it is of this transaction or of slots, or the capacity before it is not known, or is another
$text$;

-- Returns a page of the overrides that a program does not know yet, in the order of their ids, with at most 10000 of them. since: the snapshot of
-- the poll before; NULL: all that are in force, and the numbers that were until a day ago. mades: made_at, in microseconds since 1970. after: the last id of the page before. The Go library asks every
-- second. A transaction that commits late is in no snapshot before, so its rows are not missed, whatever their ids. With several servers, it is
-- missed after 5 minutes, until the next poll that reads all.
CREATE FUNCTION ratelimit._overrides(
    since pg_snapshot, after bigint,
    OUT ids bigint[], OUT names text[], OUT keys text[], OUT effects text[], OUT rates double precision[], OUT capacities double precision[],
    OUT max_reserveds double precision[], OUT untils bigint[], OUT mades bigint[], OUT more boolean, OUT snapshot text, OUT at timestamptz, OUT server timestamptz
)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    present pg_snapshot := pg_current_snapshot(); -- of the server that is asked, wherever the table is
BEGIN
    at := clock_timestamp();
    server := pg_postmaster_start_time(); -- of another server, or of this one after a restart, snapshots say nothing about those before
    -- '' is every key, -1 is as defined, and an end is in microseconds since 1970, or the largest number.
    SELECT pg_catalog.array_agg(p.id ORDER BY p.id), pg_catalog.array_agg(p.name ORDER BY p.id), pg_catalog.array_agg(coalesce(p.key, '') ORDER BY p.id),
           pg_catalog.array_agg(p.effect ORDER BY p.id), pg_catalog.array_agg(coalesce(p.rate, '-1') ORDER BY p.id),
           pg_catalog.array_agg(coalesce(p.capacity, '-1') ORDER BY p.id), pg_catalog.array_agg(coalesce(p.max_reserved, '-1') ORDER BY p.id),
           pg_catalog.array_agg(CASE WHEN p.ends = '-infinity' THEN 0 WHEN p.ends < '10000-01-01 00:00+00' THEN (extract(epoch FROM p.ends) * '1000000')::bigint
               ELSE 9223372036854775807 END ORDER BY p.id),
           pg_catalog.array_agg((extract(epoch FROM least(greatest(p.made_at, '0001-01-01 00:00+00'), '9999-12-31 00:00+00')) * '1000000')::bigint ORDER BY p.id),
           count(*) = '10000', present::text
      INTO ids, names, keys, effects, rates, capacities, max_reserveds, untils, mades, more, snapshot
      FROM (
        (SELECT o.*, least(o.until, o.removed_at) AS ends FROM ratelimit.overrides AS o
          WHERE since IS NULL AND o.id > after
            AND coalesce(least(o.until, o.removed_at), 'infinity') > CASE WHEN o.effect = 'numbers' THEN at - interval '1 day' ELSE at END
          ORDER BY o.id LIMIT 10000)
        UNION ALL
        -- OFFSET 0 makes the planner use the index of changed_in, whatever the statistics say. Rows of another cluster's future come with
        -- all others only. A standby does not know which transactions are running.
        (SELECT c.* FROM (
            SELECT o.*, least(o.until, o.removed_at) AS ends FROM ratelimit.overrides AS o
             WHERE o.changed_in >= pg_snapshot_xmin(since) AND o.changed_in < pg_snapshot_xmax(present)
               AND ratelimit._one_server() AND (pg_is_in_recovery() OR NOT pg_visible_in_snapshot(o.changed_in, since))
            OFFSET 0
          ) AS c
          WHERE c.id > after AND c.effect NOT IN ('reset', 'release')
          ORDER BY c.id LIMIT 10000)
        UNION ALL
        -- Several servers number their transactions each by itself: then what was changed lately, by their clocks.
        (SELECT o.*, least(o.until, o.removed_at) AS ends FROM ratelimit.overrides AS o
          WHERE since IS NOT NULL AND NOT ratelimit._one_server() AND o.id > after AND o.effect NOT IN ('reset', 'release')
            AND greatest(o.made_at, o.removed_at) > at - interval '5 minutes'
          ORDER BY o.id LIMIT 10000)
      ) AS p;
END
$body$;

-- The limiter for SQL by hand, for triggers and for other languages: ratelimit.consume, ratelimit.try, ratelimit.reserve, ratelimit.take,
-- ratelimit.consume_all and, in keys.sql, ratelimit.keys. They call the functions above and decide as the Go library does: a limit with the
-- same numbers is the same limit on both sides. Their COMMENTs are the manual: SELECT obj_description('ratelimit.consume'::regproc)
--
-- All of them but ratelimit.try raise a denial: an answer that nobody looks at must not let everybody pass.

-- A request of SQL by hand, as ratelimit._prepare makes it: valid, with the numbers in force.
CREATE TYPE ratelimit._request AS (
    name text, key text, rate double precision, period interval, capacity double precision,
    start timestamptz,      -- of the windows' grid, as for ratelimit._consume
    shards integer, count double precision, floor double precision,
    most double precision,  -- of take; the count is then 1
    windows timestamptz[],  -- of a calendar window, as are the next four
    unit interval,          -- the calendar's period; period is then the longest that it can be
    zone text, anchor timestamp,
    ahead integer,          -- how many windows the list reaches ahead
    max_reserved double precision,
    effect text,            -- 'numbers': the rows decide. 'block' and 'unlimited': nothing is read or written. A 'block' with a rate of 0 is a plan: a rate of 0, or no slots. 'never': the
                            -- count is more than the numbers can grant, but not what comes after them. 'varies': only the program knows
    until timestamptz,      -- the end of the override in force; NULL: there is none, or it has no end
    given ratelimit._terms -- the definition that the caller gives; kind NULL: the published one
);

-- Whether the effect denies a request: a plan denies every token, and a block also a count of 0.
CREATE FUNCTION ratelimit._refuses(q ratelimit._request) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN q.effect = 'block' AND (q.rate > '0' OR q.count > '0');

-- Raises the error of a count that the numbers can never grant: it is the caller's, as any other argument that is invalid.
CREATE FUNCTION ratelimit._never(name text, wrong text) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong),
        DETAIL = pg_catalog.json_build_object('name', name, 'reason', 'never');
END
$body$;

-- The request of ratelimit._prepare for slots: a row of one shard with a rate and a capacity of 0, whose floor is minus how many there are.
CREATE FUNCTION ratelimit._prepare_slots(
    verb text, name text, key text, count double precision, capacity double precision, global boolean, effect text, until timestamptz, now timestamptz, later boolean
) RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE WHEN verb NOT IN ('hold', 'settle') THEN 'it has slots, which only ratelimit.hold takes' ELSE coalesce(
        ratelimit._wrong_key(key, global), CASE
        WHEN verb = 'hold' AND (count BETWEEN '1' AND '1e9' AND count = trunc(count)) IS NOT TRUE THEN
            pg_catalog.format('count of slots must be a whole number between 1 and 1e9, not %s', coalesce(count::text, 'NULL'))
        WHEN NOT (isfinite(now) AND extract(epoch FROM now) * '1000000' BETWEEN '-30610224000000000' AND '253402300799999999') THEN
            pg_catalog.format('now must be between the years 1000 and 9999, not %s', now)
    END) END;
    q ratelimit._request;
BEGIN
    IF wrong IS NULL AND effect = 'numbers' THEN
        PERFORM ratelimit._validate_slots(name, capacity);
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;
    q := ROW(name, coalesce(key, ''), CASE effect WHEN 'block' THEN 1 ELSE 0 END, '1 second', 0, NULL, 1, count, CASE effect WHEN 'unlimited' THEN '-Infinity' ELSE -capacity END, NULL, NULL,
        NULL, NULL, NULL, 0, NULL, CASE WHEN effect = 'numbers' AND capacity = '0' THEN 'block' WHEN effect IN ('numbers', 'unlimited') THEN 'slots' ELSE effect END,
        until, NULL)::ratelimit._request;
    IF verb = 'hold' AND NOT later THEN
        PERFORM ratelimit._check_slots(q, 'count', coalesce(now, clock_timestamp()));
    END IF;
    RETURN q;
END
$body$;

-- Refuses more slots than there are, now and once overrides have ended.
CREATE FUNCTION ratelimit._check_slots(q ratelimit._request, what text, at timestamptz) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    IF q.effect = 'slots' AND q.count > -q.floor AND ratelimit._retry_at('hold', q, NULL, NULL, at) IS NULL THEN
        PERFORM ratelimit._never(q.name, pg_catalog.format('%s must be at most %s, not %s: more can never be granted', what, -q.floor, q.count));
    END IF;
END
$body$;

-- Refuses numbers of the caller's that are not those of the limit: what programs may not define beside each other (ratelimit._publish), slots, and
-- another rate or capacity, unless the name varies, or a list has them that was used within 7 days: the caller may be older than the programs. Reports
-- whether an override may be in force.
CREATE FUNCTION ratelimit._check_given(name text, key text, g ratelimit._terms, now timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    at    CONSTANT timestamptz := clock_timestamp();
    d     record;
    known boolean := false; -- a list that counts or is in use has numbers
    same  boolean := false;
BEGIN
    FOR d IN
        SELECT f.kind, f.rate, f.period, f.capacity, f.start, f.zone, f.anchor, f.varies, f.current OR f.alive_until > at AS alive
          FROM ratelimit.definitions AS f
         WHERE f.name = name AND f.kind <> 'unlimited' AND (f.current OR f.alive_until > at OR f.published_at > at - interval '7 days')
    LOOP
        IF d.alive AND (d.kind = 'slots' OR g.rate > '0' AND (d.rate > '0' OR d.varies IS NOT NULL) AND (
               d.kind <> g.kind OR d.period <> g.period OR (d.start IS NULL) <> (g.start IS NULL) OR date_bin(g.period, g.start, d.start) <> g.start
               OR d.varies IS NULL AND (d.zone <> coalesce(g.zone, 'UTC') OR NOT ratelimit._same_windows(g.period, coalesce(g.anchor, '2001-01-01'), d.anchor)))) THEN
            RAISE invalid_parameter_value USING
                MESSAGE = pg_catalog.format('rate limit %L: kind, period, start, zone and anchor must be those that a program has published, %s, not a %s of %s%s%s', name,
                    CASE d.kind WHEN 'slots' THEN d.kind ELSE pg_catalog.format('a %s of %s', d.kind, d.period) END || coalesce(' from ' || d.start::text, '')
                        || coalesce(' in ' || d.zone || ' from ' || d.anchor::text, ''),
                    g.kind, g.period, ' from ' || g.start::text, ' in ' || g.zone || coalesce(' from ' || g.anchor::text, '')),
                HINT = 'Leave the numbers out.';
        END IF;
        known := known OR d.alive;
        same := same OR d.varies IS NOT NULL OR coalesce(d.rate = g.rate AND d.capacity = g.capacity, false);
    END LOOP;
    IF known AND NOT same THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %L: rate and capacity must be those that a program has published, not %s and %s', name, g.rate, g.capacity),
            HINT = 'Leave the numbers out.';
    END IF;
    RETURN EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = name AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > now)
        OR EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = name AND o.key = key AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > now);
END
$body$;

-- Validates a request and finds its numbers: those of the arguments or, without any, those that a program has published, under
-- the override in force. verb is
--   consume  take count
--   reserve  take count, even before it is refilled: down to -max_reserved
--   take     take as many whole tokens as there are, at least 1 and at most `most`
--   hold     take count, and give it back at the end of a hold
--   settle   end a hold
-- Only the last two know slots, whose effect is 'slots', or what decides beside it. later: the request is valid now, and the question is what will be in force at `now`. Then no numbers are an error. standing: as if
-- nothing were blocked.
CREATE FUNCTION ratelimit._prepare(
    verb text, name text, key text, rate double precision, period interval, count double precision, kind text,
    capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp,
    max_reserved double precision, most double precision, now timestamptz, later boolean DEFAULT false,
    standing boolean DEFAULT false
) RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text;
    floor double precision := 0;
    grid  timestamptz;
    windows timestamptz[];
    unit  interval;
    ahead integer := 2;
    effect text := 'numbers';
    until timestamptz;
    after ratelimit._request;
    given ratelimit._terms;
    n     ratelimit._terms;
    beneath ratelimit._terms; -- a block
BEGIN
    IF coalesce(rate, capacity, max_reserved) IS NULL AND period IS NULL AND start IS NULL AND zone IS NULL AND anchor IS NULL
       AND kind = 'token bucket' AND shards = 1 THEN
        IF later AND NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = name AND (d.current OR d.alive_until > clock_timestamp())) THEN
            RETURN ROW(name, coalesce(key, ''), rate, period, capacity, NULL, shards, count, floor, most, NULL, NULL, zone, anchor, ahead, max_reserved, 'varies', NULL, NULL)::ratelimit._request;
        END IF;
        n := ratelimit._numbers(name, key, coalesce(now, clock_timestamp()), varying => later, standing => standing);
    ELSE
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, max_reserved, shards, zone, anchor, zero => true);
        IF verb <> 'settle' THEN -- by numbers in force
            given := ROW('numbers', NULL, NULL, kind, rate, period, coalesce(capacity, rate), max_reserved, start, shards, zone, anchor, NULL);
            IF later OR ratelimit._check_given(name, key, given, coalesce(now, clock_timestamp())) THEN
                n := ratelimit._numbers(name, key, coalesce(now, clock_timestamp()), standing => standing, given => given);
            END IF;
        END IF;
    END IF;
    IF n.effect = 'block' AND NOT count <= '0' AND coalesce(n.rate, n.capacity) = '0' THEN -- slots have no rate
        beneath := ratelimit._numbers(name, key, coalesce(now, clock_timestamp()), varying => true, standing => true, given => given);
        IF beneath.effect = 'numbers' AND coalesce(beneath.rate, beneath.capacity) = '0' THEN
            n := beneath; -- a plan denies, whatever is blocked
        END IF;
    END IF;
    IF n.effect IS NOT NULL THEN
        effect := n.effect; until := n.until; kind := n.kind; rate := n.rate; period := n.period; capacity := n.capacity;
        max_reserved := n.max_reserved; start := n.start; shards := n.shards; zone := n.zone; anchor := n.anchor;
        IF effect <> 'numbers' AND kind IS DISTINCT FROM 'slots' THEN -- which needs no numbers, and may have none
            kind := 'token bucket';
            rate := 1;
            period := '1 second';
            capacity := '1e15';
            max_reserved := NULL;
            start := NULL;
            shards := 1;
            zone := NULL;
            anchor := NULL;
        END IF;
    END IF;
    IF kind = 'slots' THEN
        RETURN ratelimit._prepare_slots(verb, name, key, count, capacity, global, effect, until, now, later);
    END IF;
    IF given.kind IS NULL THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, max_reserved, shards, zone, anchor, zero => true);
    END IF;
    capacity := coalesce(capacity, rate);
    IF abs(count) < '1e-15' THEN -- what rounding leaves of a difference
        count := 0;
    END IF;
    wrong := coalesce(ratelimit._wrong_key(key, global), CASE
        WHEN verb = 'take' AND (most BETWEEN '1' AND '1e15') IS NOT TRUE THEN
            pg_catalog.format('most must be a whole number between 1 and 1e15, not %s', coalesce(most::text, 'NULL'))
        WHEN count IS NULL OR NOT (count = '0' OR count BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('count must be 0 or between 1e-15 and 1e15, not %s', coalesce(count::text, 'NULL'))
        WHEN NOT (isfinite(now) AND extract(epoch FROM now) * '1000000' BETWEEN '-30610224000000000' AND '253402300799999999') THEN
            pg_catalog.format('now must be between the years 1000 and 9999, not %s', now)
    END);
    IF wrong IS NULL AND effect = 'numbers' AND rate = '0' THEN
        effect := 'block';
    END IF;
    IF wrong IS NULL AND effect <> 'numbers' THEN
        RETURN ROW(name, coalesce(key, ''), rate, period, capacity, NULL, shards, count, floor, most, NULL, NULL, zone, anchor, ahead, max_reserved, effect, until, given)::ratelimit._request;
    END IF;
    IF wrong IS NULL AND verb = 'reserve' THEN
        floor := coalesce(-max_reserved, '-1e300'); -- -Infinity is a charge's
        IF kind = 'calendar window' THEN
            floor := greatest(floor, rate * '-100');
            ahead := ceil(-floor / rate)::integer + 2;
        END IF;
    END IF;
    IF capacity - count < floor - ratelimit._tolerance(capacity, floor) THEN
        IF later OR wrong IS NULL AND until IS NOT NULL THEN
            effect := 'never';
        ELSIF wrong IS NULL THEN
            PERFORM ratelimit._never(name, CASE WHEN verb = 'take' THEN
                    pg_catalog.format('capacity must be at least 1 to take whole tokens, not %s', capacity)
                ELSE pg_catalog.format('count must be at most %s, not %s: more can never be granted', capacity - floor, count) END);
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;

    key := coalesce(key, '');
    IF kind = 'calendar window' THEN
        zone := coalesce(zone, 'UTC');
        anchor := coalesce(anchor, '2001-01-01');
        unit := period;
        windows := ratelimit._windows(unit, zone, anchor, coalesce(now, clock_timestamp()), ratelimit._back(rate, capacity), ahead);
        grid := windows[1];
        period := ratelimit._longest(unit);
    ELSE
        grid := ratelimit._grid(name, key, period, kind, start);
    END IF;
    after := ROW(name, key, rate, period, capacity, grid, shards, count, floor, most, windows, unit, zone, anchor, ahead, max_reserved, effect, until, given)::ratelimit._request;
    IF effect = 'never' AND NOT later AND ratelimit._retry_at(verb, after, NULL, NULL, coalesce(now, clock_timestamp())) IS NULL THEN
        PERFORM ratelimit._never(name, pg_catalog.format('count must be at most %s, not %s: more can never be granted', capacity - floor, count));
    END IF;
    RETURN after;
END
$body$;

-- The request of a balance, by the terms in force: for one token or, where the capacity is less, for all of them. It is valid, since whoever
-- reads is told what is there. windows: of a calendar, if the caller has them.
CREATE FUNCTION ratelimit._ask(name text, key text, n ratelimit._terms, at timestamptz, given ratelimit._terms, windows timestamptz[] DEFAULT NULL)
RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    q ratelimit._request;
BEGIN
    q.name := name; q.key := key; q.effect := n.effect; q.until := n.until; q.given := given; q.count := 1; q.floor := 0; q.shards := n.shards;
    q.rate := n.rate; q.period := n.period; q.capacity := n.capacity; q.max_reserved := n.max_reserved; q.ahead := 100;
    IF n.kind = 'slots' THEN
        q.floor := CASE n.effect WHEN 'unlimited' THEN '-Infinity' WHEN 'numbers' THEN -n.capacity END;
        q.effect := CASE WHEN n.effect = 'numbers' AND n.capacity = '0' THEN 'block' WHEN n.effect IN ('numbers', 'unlimited') THEN 'slots' ELSE n.effect END;
    ELSIF n.effect = 'numbers' AND n.rate = '0' THEN
        q.effect := 'block';
    ELSIF n.effect = 'numbers' THEN
        q.count := least(n.capacity, '1');
        IF n.kind = 'calendar window' THEN
            q.unit := n.period; q.zone := n.zone; q.anchor := n.anchor; q.period := ratelimit._longest(n.period);
            q.windows := coalesce(windows, ratelimit._windows(n.period, n.zone, n.anchor, at, ratelimit._back(n.rate, n.capacity), q.ahead));
            q.start := q.windows[1];
        ELSE
            q.start := ratelimit._grid(name, key, n.period, n.kind, n.start);
        END IF;
    END IF;
    RETURN q;
END
$body$;

-- The same request once the override that is in force for it has ended. standing: as if nothing were blocked.
--
-- The body is a text: Postgres notes which fields and functions a body after RETURN uses. Citus then takes the functions for parts of the type, which
-- depends on itself, and refuses to replace and to grant all functions that take or return it.
CREATE FUNCTION ratelimit._after(verb text, q ratelimit._request, standing boolean DEFAULT false)
RETURNS ratelimit._request
LANGUAGE sql
AS $body$
SELECT CASE WHEN verb = 'balance' THEN
    ratelimit._ask(q.name, q.key, ratelimit._numbers(q.name, nullif(q.key, ''), q.until, varying => true, standing => standing, given => q.given), q.until, q.given)
ELSE ratelimit._prepare(verb, q.name, nullif(q.key, ''), (q.given).rate, (q.given).period, q.count, coalesce((q.given).kind, 'token bucket'), (q.given).capacity, (q.given).start,
    coalesce((q.given).shards, 1), q.key = '', (q.given).zone, (q.given).anchor, (q.given).max_reserved, q.most, q.until, later => true, standing => standing) END
$body$;

-- Returns the end of the override after which only the program knows the numbers, or NULL if there is none: nothing is known of what is at or
-- after it. standing: as if nothing were blocked.
CREATE FUNCTION ratelimit._known_until(q ratelimit._request, standing boolean) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    known timestamptz;
BEGIN
    WHILE q.effect <> 'varies' LOOP
        known := q.until;
        EXIT WHEN known IS NULL;
        q := ratelimit._after('balance', q, standing => standing);
    END LOOP;
    RETURN known;
END
$body$;

-- The windows of a request, in a list that reaches to where the tokens will be there.
CREATE FUNCTION ratelimit._reaching(
    q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, count double precision, floor double precision
) RETURNS timestamptz[]
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    reach integer; -- how many windows ahead the list needs
BEGIN
    IF q.windows IS NOT NULL THEN
        -- All shards but one may be full.
        reach := least(greatest(ceil((count + floor
            - ratelimit._total(value, ts, at, q.rate, q.period, q.capacity, q.start, q.windows))
            / q.rate * greatest(pg_catalog.cardinality(value), 1)::double precision), '0') + '2'
            -- Nothing is refilled before a row's instant, which may lie ahead.
            + greatest(ceil((SELECT date_part('epoch', max(u.t) - at) FROM pg_catalog.unnest(ts) AS u (t)) / date_part('epoch', q.unit) * '1.1'), '0'), 40000)::integer;
        IF reach > q.ahead OR at > q.windows[pg_catalog.cardinality(q.windows)] THEN
            RETURN ratelimit._windows(q.unit, q.zone, q.anchor, at, ratelimit._back(q.rate, q.capacity), reach);
        END IF;
    END IF;
    RETURN q.windows;
END
$body$;

-- Returns when a request will be granted alone: the first instant from `at` on at which the numbers in force then grant it, or NULL if
-- there is none. Overrides that end make room for what comes after them; the rows stay as they are. value is NULL if nobody has read the
-- rows: then it is when no policy denies it. anyhow: also for a count that is never granted. From an instant on at which only the program knows
-- the numbers, it is that instant: it is not earlier (see ratelimit._known_until).
CREATE FUNCTION ratelimit._retry_at(
    verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, anyhow boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    asked    CONSTANT double precision := q.count;
    retry_at timestamptz;
BEGIN
    LOOP
        IF q.until <= at THEN
            q := ratelimit._after(verb, q);
            IF verb = 'balance' AND q.effect = 'numbers' AND value IS NOT NULL THEN -- still as much as before
                q.count := asked;
                q.effect := CASE WHEN q.capacity - asked < -ratelimit._tolerance(q.capacity, 0) THEN 'never' ELSE 'numbers' END;
            END IF;
            CONTINUE;
        END IF;
        retry_at := CASE
            WHEN q.effect = 'numbers' AND value IS NOT NULL THEN
                ratelimit._when(value, ts, at, q.rate, q.period, q.capacity, q.start, q.shards, q.count, q.floor, verb = 'reserve',
                    ratelimit._reaching(q, value, ts, at, greatest(q.count, CASE WHEN verb = 'reserve' THEN q.capacity END), abs(q.floor)))
            WHEN q.effect = 'slots' AND q.count > -q.floor THEN NULL
            WHEN q.effect = 'slots' AND value IS NOT NULL THEN
                coalesce((SELECT f.retry_at FROM ratelimit._free_slots(q.name, q.key, -q.floor, at, q.count) AS f), at)
            WHEN q.effect = 'never' AND NOT anyhow OR ratelimit._refuses(q) THEN NULL
            ELSE at END;
        IF q.until IS NULL OR retry_at < q.until THEN
            RETURN retry_at;
        END IF;
        at := q.until;
    END LOOP;
END
$body$;

-- Returns when a limit will be full or, if asked so, when nothing is owed, if nothing is taken, or NULL if that is never, or not known, since
-- only the program knows the numbers by then. A block changes nothing.
CREATE FUNCTION ratelimit._full_at(
    verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, owed boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    full_at timestamptz;
BEGIN
    WHILE q.effect <> 'varies' LOOP
        full_at := CASE
            WHEN q.effect IN ('numbers', 'never') AND owed THEN
                ratelimit._repaid(value, ts, at, q.rate, q.period, q.capacity, q.start, q.shards, ratelimit._reaching(q, value, ts, at, 0, 0))
            WHEN q.effect IN ('numbers', 'never') THEN
                ratelimit._when(value, ts, at, q.rate, q.period, q.capacity, q.start, q.shards, q.capacity, 0, false,
                    ratelimit._reaching(q, value, ts, at, q.capacity, 0))
            WHEN q.effect <> 'block' THEN at END;
        IF q.until IS NULL OR full_at < q.until THEN
            RETURN full_at;
        END IF;
        at := greatest(at, q.until);
        q := ratelimit._after(verb, q, standing => true);
    END LOOP;
    RETURN NULL;
END
$body$;

-- Returns when nothing is owed any more, whatever other calls take meanwhile: call.repaidAt of the Go library has the rule. A block changes
-- nothing. If only the program knows the numbers by then, it is an error: an instant that is too early would have work run too early.
CREATE FUNCTION ratelimit._repaid_at(
    verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    after   ratelimit._request;
    windows timestamptz[];
    run_at  timestamptz;
    least_  double precision;
    m       integer := pg_catalog.cardinality(value);
    -- The rows, by whether others have taken something at the end of an override: each m elements are the rows in one case.
    tokens  double precision[] := value;
    since   timestamptz[] := ts;
BEGIN
    IF m = 0 THEN -- without rows, a limit is full
        RETURN at;
    END IF;
    LOOP
        IF q.effect IN ('numbers', 'never') THEN
            run_at := at;
            least_ := NULL;
            FOR i IN 0..pg_catalog.cardinality(tokens) / m - 1 LOOP
                value := tokens[i * m + 1:i * m + m];
                ts := since[i * m + 1:i * m + m];
                windows := ratelimit._reaching(q, value, ts, at, 0, 0);
                run_at := greatest(run_at, ratelimit._repaid(value, ts, at, q.rate, q.period, q.capacity, q.start, m, windows));
                IF q.until IS NOT NULL THEN
                    least_ := least(least_, ratelimit._total(value, ts, q.until, q.rate, q.period, q.capacity, q.start, windows));
                END IF;
            END LOOP;
            IF q.until IS NULL OR run_at < q.until THEN
                RETURN run_at;
            END IF;
        ELSIF q.effect = 'varies' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = pg_catalog.format('rate limit %L: an override ends before the work may run, and then the numbers of this key are the program''s', q.name),
                HINT = 'Pass the kind, rate, period, capacity and so on that the program uses for this key.';
        ELSIF q.effect <> 'block' THEN -- unlimited
            RETURN at;
        ELSIF q.until IS NULL THEN -- a rate of 0
            RETURN ratelimit._instant(253402300799999999);
        END IF;
        after := ratelimit._after(verb, q, standing => true);
        IF after.effect IN ('numbers', 'never') AND (after.rate, after.capacity) = (q.rate, q.capacity) THEN
            q.until := after.until; -- the same numbers go on
            CONTINUE;
        END IF;
        IF q.effect IN ('numbers', 'never') THEN
            tokens := pg_catalog.array_cat(tokens, pg_catalog.array_fill(least_ / m::double precision, ARRAY[m]));
            since := pg_catalog.array_cat(since, pg_catalog.array_fill(q.until, ARRAY[m]));
        END IF;
        at := q.until;
        q := after;
    END LOOP;
END
$body$;

-- Says what a decision means to the caller. value and ts are the request's rows, after a grant or as they led to a denial. retry_at of a
-- denial is when the request alone would be granted: `at`, if it has enough, or NULL, if waiting does not help. retry_at of a
-- reservation is when the work may run. Otherwise it is NULL.
CREATE FUNCTION ratelimit._answer(
    verb text, q ratelimit._request, granted boolean, at timestamptz, value double precision[], ts timestamptz[],
    OUT remaining double precision, OUT retry_at timestamptz, OUT reset_at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    IF q.effect = 'unlimited' THEN
        remaining := 'Infinity';
        reset_at := at;
    ELSIF q.effect = 'block' THEN
        remaining := 0;
    END IF;
    IF q.effect NOT IN ('numbers', 'never') THEN
        retry_at := CASE WHEN NOT granted THEN ratelimit._retry_at(verb, q, NULL, NULL, at) WHEN verb = 'reserve' THEN at END;
        IF NOT granted AND retry_at IS NULL THEN -- a block ends, also for a count that is never granted
            retry_at := ratelimit._retry_at(verb, q, NULL, NULL, at, anyhow => true);
        END IF;
        RETURN;
    END IF;
    IF granted AND pg_catalog.cardinality(value) = 1 THEN -- it took from one shard, which stands for all
        value := pg_catalog.array_fill(value[1], ARRAY[q.shards]);
        ts := pg_catalog.array_fill(ts[1], ARRAY[q.shards]);
    END IF;
    remaining := ratelimit._shown(ratelimit._total(value, ts, at, q.rate, q.period, q.capacity, q.start, q.windows), q.rate, q.capacity);
    IF NOT granted THEN
        retry_at := ratelimit._retry_at(verb, q, value, ts, at);
    ELSIF verb = 'reserve' THEN
        retry_at := ratelimit._repaid_at(verb, q, value, ts, at);
    END IF;
    IF q.windows IS NOT NULL THEN
        reset_at := q.windows[pg_catalog.width_bucket(at, q.windows) + 1];
    ELSIF q.start IS NULL THEN
        reset_at := ratelimit._full_at(verb, q, value, ts, at);
    ELSE
        reset_at := ratelimit._instant(least(253402300799999999,
            ratelimit._micros(date_bin(q.period, at, q.start)) + (extract(epoch FROM q.period) * '1000000')::bigint));
    END IF;
END
$body$;

-- Why a request is denied that the caller could make: more than that can ever be granted is an error (ratelimit._never).
CREATE FUNCTION ratelimit._reason(q ratelimit._request) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE WHEN q.effect <> 'block' THEN 'quota' WHEN q.rate = '0' THEN 'plan' ELSE 'block' END;

-- The error of a denial: MESSAGE, DETAIL and HINT. names are the limits that deny, and name the one to wait for. Whoever is called from
-- outside raises it: each function between would add its signature to the CONTEXT, which is logged. QueueConsume of the Go library does not take
-- the error for a denial of its own, since the DETAIL differs.
CREATE FUNCTION ratelimit._denied(
    names text[], name text, remaining double precision, retry_at timestamptz, reset_at timestamptz, at timestamptz, reason text
) RETURNS text[]
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN ARRAY['rate limit exceeded: ' || pg_catalog.array_to_string(names, ', '),
        pg_catalog.json_build_object('name', name, 'remaining', remaining,
            'retry_after', extract(epoch FROM retry_at - at), 'retry_at', retry_at, 'reset_at', reset_at, 'reason', reason)::text,
        CASE WHEN retry_at IS NULL THEN 'Waiting alone does not help.'
            ELSE pg_catalog.format('Retry in %s s.', ceil(extract(epoch FROM retry_at - at))) END];
END
$body$;

-- Decides for the functions below that ask one limit. They pass name and key with COLLATE "C", as every function for SQL by hand does: a
-- column of another collation could not be compared with the tables' (42P22). verb is that of ratelimit._prepare, or try: consume, but a denial is no error. Those functions
-- have no `now`: a program must not choose the time. Tests call this one, and it raises a denial for them.
CREATE FUNCTION ratelimit._by_hand(
    verb text, name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    max_reserved double precision DEFAULT NULL, most double precision DEFAULT NULL, now timestamptz DEFAULT NULL, raises boolean DEFAULT true,
    OUT granted boolean, OUT taken double precision, OUT remaining double precision, OUT retry_after interval,
    OUT retry_at timestamptz, OUT reset_at timestamptz, OUT at timestamptz, OUT denial text[]
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    q ratelimit._request := ratelimit._prepare(verb, name, key, rate, period,
        CASE WHEN verb = 'take' THEN 1 ELSE count END, kind, capacity, start, shards, global, zone, anchor, max_reserved, most, now);
    lowest double precision := q.floor - ratelimit._tolerance(q.capacity, q.floor);
    value double precision[];
    ts    timestamptz[];
    a     integer := 0;
    b     integer := 0;
BEGIN
    IF q.shards > 1 THEN
        a := trunc(random() * q.shards::double precision);
        b := (a + 1 + trunc(random() * (q.shards - 1)::double precision)::integer) % q.shards; -- a shard other than a
    END IF;
    IF q.effect = 'never' THEN -- the rows say when
        SELECT false, r.at, r.value, r.ts INTO granted, at, value, ts
          FROM ratelimit._apply('check', ARRAY[q.name], ARRAY[q.key], ARRAY[q.rate], ARRAY[q.period], ARRAY[q.capacity], ARRAY[q.start], ARRAY[q.shards],
              ARRAY[q.count], ARRAY[q.floor], ARRAY[a], ARRAY[b], now => now, windows => q.windows, firsts => ARRAY[1], lasts => ARRAY[pg_catalog.cardinality(q.windows)]) AS r;
    ELSIF q.effect <> 'numbers' THEN
        granted := NOT ratelimit._refuses(q);
        at := coalesce(now, clock_timestamp());
        taken := CASE WHEN granted THEN q.most END;
    ELSIF verb = 'take' OR verb = 'reserve' AND q.start IS NOT NULL THEN
        SELECT r.granted, r.at, r.value, r.ts, r.taken INTO granted, at, value, ts, taken
          FROM ratelimit._apply(CASE WHEN verb = 'take' THEN 'take' ELSE 'consume' END, ARRAY[q.name], ARRAY[q.key], ARRAY[q.rate], ARRAY[q.period], ARRAY[q.capacity], ARRAY[q.start], ARRAY[q.shards],
              ARRAY[q.count], ARRAY[lowest], ARRAY[a], ARRAY[b], reserve => verb = 'reserve', now => now,
              windows => q.windows, firsts => ARRAY[1], lasts => ARRAY[pg_catalog.cardinality(q.windows)], mosts => ARRAY[q.most]) AS r;
    ELSIF q.shards = 1 THEN
        SELECT r.granted, r.at, ARRAY[r.value], ARRAY[r.ts] INTO granted, at, value, ts
          FROM ratelimit._consume(q.name, q.key, q.rate, q.period, q.capacity, q.start, q.count, lowest, now, windows => q.windows) AS r;
    ELSE
        SELECT r.granted, r.at, r.value, r.ts INTO granted, at, value, ts
          FROM ratelimit._consume_sharded(q.name, q.key, q.rate, q.period, q.capacity, q.start, q.shards, q.count, lowest, a, b, now, windows => q.windows) AS r;
    END IF;
    SELECT r.remaining, r.retry_at, r.retry_at - at, r.reset_at INTO remaining, retry_at, retry_after, reset_at
      FROM ratelimit._answer(verb, q, granted, at, value, ts) AS r;
    IF NOT granted AND verb <> 'try' THEN -- whatever is returned could be overlooked
        denial := ratelimit._denied(ARRAY[name], name, remaining, retry_at, reset_at, at, ratelimit._reason(q));
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
    END IF;
END
$body$;

CREATE FUNCTION ratelimit.consume(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    denial text[];
BEGIN
    SELECT r.remaining, r.reset_at, r.at, r.denial INTO remaining, reset_at, at, denial
      FROM ratelimit._by_hand('consume', name COLLATE "C", key COLLATE "C", rate, period, count, kind, capacity, start, shards, global, zone, anchor, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.consume(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, text, timestamp) IS $text$
Takes tokens from a rate limit in the caller's transaction, or raises an error if it has not enough. A rollback gives them back.

    SELECT * FROM ratelimit.consume('sendMessage', 'user-17', rate => 10, period => '1 minute')

    PERFORM ratelimit.consume('sendMessage', NEW.sender, rate => 10, period => '1 minute')

A denial is an error, so nobody can overlook it. It aborts the transaction, or the savepoint. A block that catches it, such as
EXCEPTION WHEN OTHERS, goes on without tokens. ratelimit.try returns a denial instead.

Without any numbers, they are those that a program has published (ratelimit.publish), under the override in force:

    SELECT * FROM ratelimit.consume('sendMessage', 'user-17')

With numbers, blocks and overrides in force count, too. If programs publish the limit, kind, period, start, zone and anchor must be theirs, and
rate and capacity those of a list that was used within 7 days, unless the limit varies.

Pass name and key by position, and the other arguments by name: their positions may change. Call it in FROM or alone:
(ratelimit.consume(...)).* calls it once for each column.

Arguments:
  name          the name of the limit, 1 to 255 bytes
  key           the user, tenant or other owner of the tokens, 1 to 1024 bytes; NULL or empty is an error, unless global is
                true. It is stored as it is. A key of several parts is ratelimit.key('eu', 'user-17')
  rate          tokens per period, 1e-15 to 1e15; or 0: every token is denied by policy, and nothing is read or written
  period        an interval of 100 milliseconds to 106751 days, without months and years; for a calendar window '1 day', '7 days',
                '1 month', '3 months' or '1 year'
  count         the tokens to take, at most 1e15; less than 1e-15 is 0, such as what rounding leaves of a difference; default 1.
                Rounding alone never denies: a call may lack a billionth of the capacity, and at most 0.001 tokens
  kind          'token bucket' (the default), refilled continuously; 'fixed window', refilled at the start of each period; or
                'calendar window', refilled at the start of each day, week, month, quarter or year
  capacity      the most tokens that can be saved up: 0, or 1e-15 to 1e15; default NULL, the rate. With 0, tokens can only be
                reserved (ratelimit.reserve)
  start         an instant at which a fixed window begins, in the years 1 to 9999; the other windows are whole periods from it.
                Default NULL: an offset that is a hash of the key, or of the name if global. A token bucket has none
  shards        the number of rows that the key is spread over, 1 to 100; default 1
  global        true: the limit has no keys, and key must be NULL. Default false
  zone          of a calendar window: 'UTC' (the default) or a name of Postgres' time zones with a slash, such as
                'Europe/Berlin'. Postgres' own zone files decide when its days begin
  anchor        of a calendar window: a date on which a window begins, such as the first day of a customer's contract, or a date and a
                time of day, such as '2026-01-31 15:00'. It is local time in the zone, in the years 1 to 9999, without fractions of a
                second. In a month with fewer days, it is the last. Default NULL: weeks begin on Mondays, the others on their first
                day, at midnight

Result:
  remaining     the balance in tokens
  reset_at      the instant at which the bucket will be full or the next window begins; NULL if the rate is 0, or if an override ends
                before and only the program knows the numbers that follow
  at            the instant of the decision

Errors:
  PT429         denied: the tokens are not there. Nothing was taken. PostgREST turns it into the HTTP status 429
  22023         an argument is invalid, or the count can never be granted, and then the reason in the DETAIL is never; without numbers, also if no program has published
                the limit, if it has slots, or if only the program knows the numbers of the key
  40001, 40P01  another transaction was in the way: run the transaction again

The error of a denial has
  MESSAGE       'rate limit exceeded: ' and the name of the limit. It has no key: keys may be personal data, and errors are logged
  DETAIL        JSON: {"name": ..., "remaining": tokens, "retry_after": seconds, "retry_at": ..., "reset_at": ..., "reason": "quota" or,
                if the rate is 0 or there are no slots, "plan" or, if the key is blocked, "block"}. retry_at is the
                first instant at which the same call would be granted, if no other call takes tokens: by the numbers in force
                or, if an override ends before, by what follows; after a block, when no block denies any more. If only the program
                knows the numbers that follow, it is the end of the override: the call is not granted earlier. It is null, as
                retry_after, if waiting does not help: the rate is 0, or the key is blocked without an end
  HINT          'Retry in ... s.', in whole seconds, rounded up; or 'Waiting alone does not help.'
$text$;

CREATE FUNCTION ratelimit.try(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT granted boolean, OUT remaining double precision, OUT retry_after interval, OUT retry_at timestamptz, OUT reset_at timestamptz,
    OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT r.granted, r.remaining, r.retry_after, r.retry_at, r.reset_at, r.at INTO granted, remaining, retry_after, retry_at, reset_at, at
      FROM ratelimit._by_hand('try', name COLLATE "C", key COLLATE "C", rate, period, count, kind, capacity, start, shards, global, zone, anchor) AS r;
END
$body$;

COMMENT ON FUNCTION ratelimit.try(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, text, timestamp) IS $text$
The same as ratelimit.consume, but it returns a denial. The caller must look at granted: if it is false, the call took nothing.

    SELECT granted, retry_after FROM ratelimit.try('sendMessage', 'user-17', rate => 10, period => '1 minute')

The arguments and the other errors are the same as for ratelimit.consume.

Result:
  granted       true: the tokens were taken. false: the call was denied and took nothing
  remaining     the balance in tokens; below zero if tokens are owed
  retry_after   denied: the wait until retry_at, an interval. NULL as retry_at
  retry_at      denied: the first instant at which the same call would be granted, if no other call takes tokens, or the end of an
                override, if only the program knows the numbers that follow: it is not granted earlier. NULL: the call was
                granted, or waiting does not help, since it was denied by policy or by a block without an end
  reset_at      as for ratelimit.consume
  at            the instant of the decision
$text$;

CREATE FUNCTION ratelimit.reserve(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    max_reserved double precision DEFAULT NULL,
    OUT retry_at timestamptz, OUT delay interval, OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    denial text[];
BEGIN
    SELECT r.retry_at, r.retry_after, r.remaining, r.reset_at, r.at, r.denial INTO retry_at, delay, remaining, reset_at, at, denial
      FROM ratelimit._by_hand('reserve', name COLLATE "C", key COLLATE "C", rate, period, count, kind, capacity, start, shards, global, zone, anchor, max_reserved, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.reserve(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, text, timestamp, double precision) IS $text$
Takes tokens that may not be there yet, in the caller's transaction. A rollback gives them back.

    INSERT INTO jobs (payload, run_at)
    SELECT 'hello', retry_at FROM ratelimit.reserve('emails', 'team-a', rate => 10, period => '1 minute', max_reserved => 100)

A reservation is no permission to work now: the work may run at retry_at, when its tokens will have been refilled. A caller that
ignores retry_at exceeds the limit. A denial is an error, the same as of ratelimit.consume: more would be owed than max_reserved.
Its retry_at is when the same reservation would be made. If an override ends before the work may run, the slower of the two rates counts,
and it is an error (22023) if only the program knows the numbers that follow.

The arguments are the same as for ratelimit.consume, also without any numbers, and
  max_reserved  the most tokens that may be owed: 0, or 1e-15 to 1e15; default NULL, no bound but, of a calendar window, the
                tokens of 100 windows. With 0, only tokens that are there can be taken

Result:
  retry_at   the instant at which the work may run; at, if the tokens are there
  delay      the wait from at to retry_at, an interval
  remaining  the balance in tokens; below zero if tokens are owed
  reset_at   as for ratelimit.consume
  at         the instant of the decision

Errors: as for ratelimit.consume
$text$;

CREATE FUNCTION ratelimit.take(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    most bigint DEFAULT NULL, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT taken bigint, OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    denial text[];
BEGIN
    SELECT r.taken::bigint, r.remaining, r.reset_at, r.at, r.denial INTO taken, remaining, reset_at, at, denial
      FROM ratelimit._by_hand('take', name COLLATE "C", key COLLATE "C", rate, period, NULL, kind, capacity, start, shards, global, zone, anchor, most => most::double precision, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.take(text, text, double precision, interval, bigint, text, double precision, timestamptz, integer, boolean, text, timestamp) IS $text$
Takes the whole tokens that a rate limit has, at least 1 and at most `most`, in the caller's transaction. A rollback gives them
back. It is for workers that fetch work in batches: take up to 100, and fetch as many jobs as were taken.

    SELECT taken FROM ratelimit.take('emails', 'team-a', most => 100, rate => 10, period => '1 minute')

The arguments are the same as for ratelimit.consume, also without any numbers. There is no count, but
  most  the most tokens to take, a whole number of 1 to 1e15. It is required, and may be above the capacity

Result:
  taken      how many tokens were taken, a whole number of at least 1
  remaining  the balance in tokens
  reset_at   as for ratelimit.consume
  at         the instant of the decision

Errors: as for ratelimit.consume. With less than one token, it is a denial
$text$;

-- Reads one request of ratelimit.consume_all, the one with this number in the list.
CREATE FUNCTION ratelimit._read(request jsonb, number bigint, now timestamptz) RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text;
    rate double precision; period interval; count double precision; capacity double precision; start timestamptz; shards double precision;
    anchor timestamp; max_reserved double precision;
BEGIN
    IF jsonb_typeof(request) <> 'object' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('request %s must be a JSON object, not %s', number, jsonb_typeof(request));
    END IF;
    SELECT CASE WHEN f.expected IS NULL THEN pg_catalog.format('there is no field %L', f.field)
                WHEN f.type = 'null' THEN pg_catalog.format('%s is null: leave it out', f.field)
                ELSE pg_catalog.format('%s must be a JSON %s, not %s', f.field, f.expected, f.type) END INTO wrong
      FROM (
        SELECT e.key AS field, jsonb_typeof(e.value) AS type,
               CASE WHEN e.key IN ('name', 'key', 'period', 'kind', 'start', 'zone', 'anchor') THEN 'string'
                    WHEN e.key IN ('rate', 'count', 'capacity', 'max_reserved', 'shards') THEN 'number'
                    WHEN e.key = 'global' THEN 'boolean' END AS expected
          FROM jsonb_each(request) AS e
      ) AS f
     WHERE f.expected IS DISTINCT FROM f.type
     ORDER BY f.field COLLATE "C"
     LIMIT 1;
    -- Postgres reads more than this as a timestamp, and ignores a zone in it.
    IF wrong IS NULL AND request->>'anchor'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}( ([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?)?$' THEN
        wrong := pg_catalog.format('anchor must be a date, such as 2026-01-31, or a date and a time of day, such as 2026-01-31 15:00, not %L', request->>'anchor'::text);
    END IF;
    -- What Postgres reads beside it means another instant in each call ('now'), or in each session.
    IF wrong IS NULL AND request->>'start'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$' THEN
        wrong := pg_catalog.format('rate limit %s: start must be an instant with its offset, such as 2026-01-31T00:00:00Z, not %L',
            quote_nullable(left(request->>'name'::text, 255)), left(request->>'start'::text, 50));
    END IF;
    IF wrong IS NULL THEN
        BEGIN
            rate := (request->>'rate'::text)::double precision;
            period := (request->>'period'::text)::interval;
            count := coalesce((request->>'count'::text)::double precision, 1);
            capacity := (request->>'capacity'::text)::double precision;
            start := (request->>'start'::text)::timestamptz;
            shards := coalesce((request->>'shards'::text)::double precision, 1);
            anchor := (request->>'anchor'::text)::timestamp;
            max_reserved := (request->>'max_reserved'::text)::double precision;
        EXCEPTION WHEN data_exception THEN -- a text that is no interval or no instant, or a number that is too large
            wrong := SQLERRM;
        END;
        IF NOT (shards BETWEEN '1' AND '100' AND shards = trunc(shards)) THEN
            wrong := pg_catalog.format('shards must be a whole number between 1 and 100, not %s', shards);
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('request %s: %s', number, wrong);
    END IF;
    RETURN ratelimit._prepare('consume', request->>'name'::text, request->>'key'::text, rate, period, count,
        coalesce(request->>'kind'::text, 'token bucket'), capacity, start, shards::integer, coalesce((request->>'global'::text)::boolean, false),
        request->>'zone'::text, anchor, max_reserved, NULL, now);
END
$body$;

-- Decides for ratelimit.consume_all, at an instant that tests choose. If it does not raise a denial, it returns it in a row of its own.
CREATE FUNCTION ratelimit._all(requests jsonb, now timestamptz, raises boolean DEFAULT true)
RETURNS TABLE (name text, key text, remaining double precision, reset_at timestamptz, at timestamptz, denial text[])
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    e record;
    q ratelimit._request;
    list ratelimit._request[] := '{}';
    -- The arguments of ratelimit._apply: of the requests that rows decide.
    names text[] := '{}'; keys text[] := '{}'; rates double precision[] := '{}'; periods interval[] := '{}'; capacities double precision[] := '{}';
    starts timestamptz[] := '{}'; shards integer[] := '{}'; counts double precision[] := '{}'; floors double precision[] := '{}';
    a integer[] := '{}'; b integer[] := '{}'; windows timestamptz[]; firsts integer[] := '{}'; lasts integer[] := '{}';
    d     ratelimit._decisions;
    i     integer := 0; -- a position in them
    own   record;       -- the rows of a request
    said  record;       -- the answer to a request
    policy boolean := true; -- no block and no rate of 0 denies
    reason text := 'quota'; -- of a denial: the one that lasts longest, a plan, then a block
    denied text[] := '{}';  -- the limits that deny
    waits timestamptz;      -- until the request of slowest would be granted
    together boolean := false; -- overrides end that change what is granted
    "then" timestamptz;
    slowest record;
BEGIN
    IF (jsonb_typeof(requests) = 'array') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('requests must be a JSON array, not %s', coalesce(jsonb_typeof(requests), 'NULL'));
    END IF;
    FOR e IN SELECT r.value, r.number FROM jsonb_array_elements(requests) WITH ORDINALITY AS r (value, number) LOOP
        q := ratelimit._read(e.value, e.number, now);
        list := pg_catalog.array_append(list, q);
        together := together OR q.until IS NOT NULL AND q.effect <> 'block';
        policy := policy AND q.effect <> 'never' AND NOT ratelimit._refuses(q);
        reason := CASE WHEN reason <> 'plan' AND ratelimit._refuses(q) THEN ratelimit._reason(q) ELSE reason END;
        CONTINUE WHEN q.effect NOT IN ('numbers', 'never');
        names := pg_catalog.array_append(names, q.name); keys := pg_catalog.array_append(keys, q.key);
        rates := pg_catalog.array_append(rates, q.rate); periods := pg_catalog.array_append(periods, q.period);
        capacities := pg_catalog.array_append(capacities, q.capacity); starts := pg_catalog.array_append(starts, q.start);
        shards := pg_catalog.array_append(shards, q.shards); counts := pg_catalog.array_append(counts, q.count); floors := pg_catalog.array_append(floors, q.floor - ratelimit._tolerance(q.capacity, q.floor));
        i := trunc(random() * q.shards::double precision);
        a := pg_catalog.array_append(a, i);
        b := pg_catalog.array_append(b, CASE WHEN q.shards = 1 THEN i ELSE (i + 1 + trunc(random() * (q.shards - 1)::double precision)::integer) % q.shards END); -- a shard other than a
        firsts := pg_catalog.array_append(firsts, CASE WHEN q.windows IS NOT NULL THEN coalesce(pg_catalog.cardinality(windows), 0) + 1 END);
        windows := pg_catalog.array_cat(windows, q.windows);
        lasts := pg_catalog.array_append(lasts, CASE WHEN q.windows IS NOT NULL THEN pg_catalog.cardinality(windows) END);
    END LOOP;
    IF pg_catalog.cardinality(list) = 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'requests must have at least one request, not 0';
    END IF;
    SELECT l.name COLLATE "C" AS name INTO own FROM pg_catalog.unnest(list) AS l GROUP BY 1, l.key COLLATE "C" HAVING count(*) > 1 ORDER BY 1 LIMIT 1;
    IF FOUND THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: two requests have the same key', own.name),
            HINT = 'Make it one request with the sum of both counts.';
    END IF;

    d.at := coalesce(now, clock_timestamp());
    IF pg_catalog.cardinality(names) > 0 THEN -- if it is denied already, the rows are read alone: they may deny, too
        d := ratelimit._apply(CASE WHEN policy THEN 'consume' ELSE 'check' END, names, keys, rates, periods, capacities, starts,
            shards, counts, floors, a, b, now => now, windows => windows, firsts => firsts, lasts => lasts);
    END IF;
    d.granted := policy AND coalesce(d.granted, true);
    at := d.at;
    i := 0;
    FOREACH q IN ARRAY list LOOP
        IF q.effect IN ('numbers', 'never') THEN
            i := i + 1;
        END IF;
        SELECT coalesce(pg_catalog.array_agg(u.value ORDER BY u.n), '{}') AS value, coalesce(pg_catalog.array_agg(u.ts ORDER BY u.n), '{}') AS ts INTO own
          FROM unnest(d.ord, d.value, d.ts) WITH ORDINALITY AS u (ord, value, ts, n)
         WHERE u.ord = i AND q.effect IN ('numbers', 'never');
        SELECT r.remaining, r.retry_at, r.reset_at INTO said FROM ratelimit._answer('consume', q, d.granted, at, own.value, own.ts) AS r;
        IF d.granted THEN
            name := q.name; key := q.key; remaining := said.remaining; reset_at := said.reset_at;
            RETURN NEXT;
            CONTINUE;
        END IF;
        IF coalesce(said.retry_at, 'infinity') > at AND q.name <> ALL (denied) THEN
            denied := pg_catalog.array_append(denied, q.name);
        END IF;
        IF waits IS NULL OR coalesce(said.retry_at, 'infinity') > waits THEN
            waits := coalesce(said.retry_at, 'infinity');
            SELECT q.name AS name, said.remaining AS remaining, said.retry_at AS retry_at, said.reset_at AS reset_at INTO slowest;
        END IF;
    END LOOP;
    IF NOT d.granted THEN
        -- What one request gets when an override ends, another may lose: all must be granted at one instant.
        WHILE together AND waits < 'infinity' LOOP
            together := false;
            i := 0;
            FOREACH q IN ARRAY list LOOP
                i := i + CASE WHEN q.effect IN ('numbers', 'never') THEN 1 ELSE 0 END;
                SELECT coalesce(pg_catalog.array_agg(u.value ORDER BY u.n), '{}') AS value, coalesce(pg_catalog.array_agg(u.ts ORDER BY u.n), '{}') AS ts INTO own
                  FROM unnest(d.ord, d.value, d.ts) WITH ORDINALITY AS u (ord, value, ts, n)
                 WHERE u.ord = i;
                "then" := coalesce(ratelimit._retry_at('consume', q, CASE WHEN q.effect IN ('numbers', 'never') THEN own.value END, own.ts, waits), 'infinity');
                together := together OR "then" > waits;
                waits := greatest(waits, "then");
                EXIT WHEN waits = 'infinity';
            END LOOP;
        END LOOP;
        denial := ratelimit._denied(denied, slowest.name, slowest.remaining, nullif(waits, 'infinity'), slowest.reset_at, at, reason);
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN NEXT;
    END IF;
END
$body$;

CREATE FUNCTION ratelimit.consume_all(requests jsonb)
RETURNS TABLE (name text, key text, remaining double precision, reset_at timestamptz, at timestamptz)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    denial text[];
BEGIN
    FOR name, key, remaining, reset_at, at, denial IN SELECT r.* FROM ratelimit._all(requests, NULL, raises => false) AS r LOOP
        IF denial IS NOT NULL THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN NEXT;
    END LOOP;
END
$body$;

COMMENT ON FUNCTION ratelimit.consume_all(jsonb) IS $text$
Takes tokens from several rate limits, all or none, in the caller's transaction. If one of them has not enough, it raises the error of a
denial, as ratelimit.consume does. The rows are locked in one order, whatever the order of the list, so that such calls do not deadlock.

    SELECT * FROM ratelimit.consume_all('[
        {"name": "sendMessage", "key": "user-17", "rate": 10, "period": "1 minute"},
        {"name": "bytesSent", "key": "user-17", "rate": 1000000, "period": "1 hour", "count": 2048}
    ]')

requests is a JSON array of objects with the same names as the arguments of ratelimit.consume: name, key, rate, period, count, kind, capacity,
start, shards, global, zone, anchor; and max_reserved, which changes nothing here. Names, keys, intervals, instants and dates are strings. A field that
is left out has the same default. Each object without any numbers has those that a program has published, under the override in force.
An anchor is written as '2026-01-31' or '2026-01-31 15:00', a start as '2026-01-31T00:00:00Z' or '2026-01-31 00:00:00+00'. jsonb_build_array and jsonb_build_object make the list from variables.

Result, one row for each object, in the order of the list:
  name, key  of the request; the key is '' if the limit is global
  remaining  the balance in tokens
  reset_at   as for ratelimit.consume
  at         the instant of the decision

Errors, besides those of ratelimit.consume:
  PT429  denied: nothing was taken from any of them. MESSAGE names the limits that deny. name in the DETAIL is the limit to wait for,
         and retry_at is the first instant at which the same call would be granted; null if one of them waits for nothing
  22023  also for an empty list, an unknown field, a null, a value of the wrong type, and a limit and key that are there twice
$text$;

-- Holds: tokens and slots that are taken under an id, and come back when the work is settled or released, or its time is over. CONCURRENCY.md,
-- J, has the order of the locks, and why it holds. Tokens that are taken once for an id do not come back: the row alone says that they were.
--
-- The arguments are arrays of one length, with one position for each limit: those of ratelimit._apply, and
--   units   tokens; slots; none: the limit has no rows now (it is unlimited, or grants nothing), so no token moves
--   taking  the first so many positions are tokens and slots, in the common order (name, key); the others are none, in that order too
-- Slots are a row of one shard with a rate and a capacity of 0: its value is minus the sum of the counts that are held, and the floor is
-- minus how many there may be. Who calls the same name with a rate may have left more: above 0, it counts as 0.
--
-- ratelimit._hold, ratelimit._settle and the sweep set how the planner looks rows up, for the functions that they call, too.

-- Tokens and slots that come back: one row per limit, key and id. Limits without holds have no rows here, and no call of theirs reads it.
--
-- A row is written after the row of ratelimit.limits, in one transaction (CONCURRENCY.md, J). For slots, value in ratelimit.limits is minus the sum of the
-- counts of the held rows here. Like ratelimit.limits, the table has no CHECK constraints (G1).
-- The fillfactor leaves room for the next version: an extension changes only until, which no index has, so it is heap-only.
CREATE TABLE ratelimit.holds (
    name     text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    id       text COLLATE "C" NOT NULL,
    state    text             NOT NULL,
    unit     text             NOT NULL,
    token    uuid,
    count    double precision NOT NULL,
    taken_at timestamptz      NOT NULL,
    rest     double precision NOT NULL,
    part     double precision NOT NULL,
    until    timestamptz      NOT NULL,
    PRIMARY KEY (name, key, id)
) WITH (fillfactor = 90);

-- What is held of a key, without the settled rows of a day, and of that what can expire (token IS NOT NULL). The planner takes it for one hold,
-- too: token and id make it as good as the primary key then.
CREATE INDEX holds_held ON ratelimit.holds (name, key, token, id)
    WHERE state = 'held';

COMMENT ON TABLE ratelimit.holds IS 'txlimit: tokens and slots that are held under an id, and come back';

COMMENT ON COLUMN ratelimit.holds.name IS 'the name of the limit';

COMMENT ON COLUMN ratelimit.holds.key IS 'whose tokens they are; '''' if the limit has no keys';

COMMENT ON COLUMN ratelimit.holds.id IS 'the id that the caller chose: a job, an event, a project';

COMMENT ON COLUMN ratelimit.holds.state IS 'held; lapsed: it expired or was reset, and is lost; settled: the work is over; once: the tokens were taken, once for the id; released: before its hold came, which is refused';

COMMENT ON COLUMN ratelimit.holds.unit IS 'tokens; slots; none: the key was unlimited, so no tokens ever move';

COMMENT ON COLUMN ratelimit.holds.token IS 'whose hold it is; NULL: of everybody who knows the id, since it does not expire, or was taken once';

COMMENT ON COLUMN ratelimit.holds.count IS 'the tokens or slots that were taken';

COMMENT ON COLUMN ratelimit.holds.taken_at IS 'the instant of the decision';

COMMENT ON COLUMN ratelimit.holds.rest IS 'the tokens that were left in the rows of ratelimit.limits that they were taken from; of a lapsed one, those that did not come back';

COMMENT ON COLUMN ratelimit.holds.part IS 'the part of the limit in those rows: 1, or 1/shards for one shard';

COMMENT ON COLUMN ratelimit.holds.until IS 'held: from then on it may be given back; else: from then on it counts as absent; infinity: never';

-- state: taken; repeated: all is held under the id already, without an end, or was taken once; denied; held: by somebody, in time; settled: within a day;
-- released: the token was, before. until: the end of the hold, or of the one that is held. free_at: of a denial, by
-- limit, when expiries alone make room for slots; NULL: never, or not known. Of tokens, when the first of their holds that have an end ends; in a pause, at its end.
CREATE TYPE ratelimit._held AS (state text, until timestamptz, at timestamptz, ord integer[], value double precision[],
    ts timestamptz[], free_at timestamptz[]);

-- The rows of a limit as they are once its expired holds have given back, or only some of them: the one rule for what is given back in fact, and for who counts
-- it before. back is by ids. Rows and holds are of one snapshot: a hold that ends between two would be in neither.
--
-- A hold gives back at its end or, if the row was written since, at that instant: whoever gives back later gives the same, and the refill goes on from there.
CREATE FUNCTION ratelimit._lapsed(
    name text, key text, at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[],
    only_ids text[] DEFAULT NULL, OUT value double precision[], OUT ts timestamptz[], OUT ids text[], OUT back double precision[]
)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    ended  CONSTANT timestamptz := at;
    latest timestamptz; -- of ts
    last   timestamptz; -- the latest of their promised
    m      integer;
    total  double precision;
    x      double precision;
    rec    record;
BEGIN
    SELECT coalesce(pg_catalog.array_agg(r.value ORDER BY r.shard), '{}'), coalesce(pg_catalog.array_agg(r.ts ORDER BY r.shard), '{}'), max(r.ts), max(r.promised), count(*)
      INTO value, ts, latest, last, m
      FROM ratelimit.limits AS r
     WHERE r.name = name AND r.key = key;
    IF only_ids IS NULL AND latest > at AND at >= statement_timestamp() AND latest <= clock_timestamp() THEN -- used since the server's clock was read: no pause
        at := latest;
    END IF;
    IF NOT ratelimit._may('SELECT') THEN
        RETURN;
    END IF;
    FOR rec IN
        SELECT h.id, h.unit, h.count, h.rest, h.part, h.taken_at, h.until FROM ratelimit.holds AS h
         WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= ended AND (only_ids IS NULL OR h.id = ANY (only_ids))
         ORDER BY h.until, h.taken_at, h.id
    LOOP
        CONTINUE WHEN rec.unit = 'tokens' AND start IS NULL AND latest > at; -- paused: it comes back afterwards
        x := 0; -- also if the name was of another kind before
        IF rec.unit = 'slots' AND m = 1 THEN
            total := value[1];
            x := least(rec.count, -total);
        ELSIF rec.unit = 'tokens' AND rate > '0' AND m > 0 THEN
            SELECT g.total, g.back INTO total, x
              FROM ratelimit._give_back(value, ts, last, greatest(rec.until, latest), rate, period, capacity, start, rec.count, rec.count, rec.rest, rec.part,
                   rec.taken_at, rec.taken_at, windows) AS g;
        END IF;
        IF x > '0' THEN
            value := pg_catalog.array_fill((total + x) / m::double precision, ARRAY[m]);
            latest := greatest(rec.until, latest);
            ts := pg_catalog.array_fill(latest, ARRAY[m]);
        END IF;
        ids := pg_catalog.array_append(ids, rec.id);
        back := pg_catalog.array_append(back, greatest(x, '0'));
    END LOOP;
END
$body$;

-- Whether the caller has a right to the table of holds. The body is a text, so that the function does not depend on the table: Citus would not make it,
-- nor ratelimit._ends, on the workers before the table is distributed.
CREATE FUNCTION ratelimit._may(privilege text) RETURNS boolean
LANGUAGE sql STABLE
AS $body$
SELECT pg_catalog.has_table_privilege('ratelimit.holds'::text, privilege)
$body$;

-- Whether this caller may end expired holds: not on a standby, nor without the right.
CREATE FUNCTION ratelimit._ends() RETURNS boolean
LANGUAGE sql STABLE
RETURN current_setting('transaction_read_only') = 'off' AND ratelimit._may('UPDATE');

-- Ends expired holds of a key whose rows are all locked, if there are any and the caller may. A sweep looks for them whatever the rows say, and ends at
-- most so many, the oldest first. upto: only those that ended by then. Returns how many.
--
-- It never waits: a hold that somebody has locked is being extended or settled. The SELECT that locks asks state and until again, on the
-- newest version: so a hold is extended or given back, never both.
CREATE FUNCTION ratelimit._reclaim(
    name text, key text, rate double precision, period interval, capacity double precision, start timestamptz,
    now timestamptz, windows timestamptz[], most integer DEFAULT NULL, upto timestamptz DEFAULT NULL
) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    at    timestamptz := coalesce(now, clock_timestamp());
    kept  timestamptz := at + interval '7 days';
    gives boolean;
    next  timestamptz; -- when the next one may expire
    ids   text[];
    l     record;
    rec   record;
BEGIN
    IF most IS NULL AND NOT (EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.lapses <= at)
            AND ratelimit._may('SELECT') AND ratelimit._ends()) THEN
        RETURN 0;
    END IF;
    ids := ARRAY(SELECT h.id
          FROM ratelimit.holds AS h
         WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= coalesce(upto, at)
         ORDER BY h.until
         LIMIT most
           FOR UPDATE SKIP LOCKED);
    SELECT f.value, f.ts, f.ids, f.back INTO l FROM ratelimit._lapsed(name, key, at, rate, period, capacity, start, windows, ids) AS f;
    FOR rec IN SELECT b.id, b.back FROM unnest(l.ids, l.back) AS b (id, back) LOOP -- one after the other, each by the primary key, whatever the statistics
        UPDATE ratelimit.holds AS h SET state = 'lapsed', rest = h.count - rec.back, until = kept
         WHERE h.name = name AND h.key = key AND h.id = rec.id;
    END LOOP;
    gives := coalesce('0' < ANY (l.back), false);
    SELECT min(h.until) INTO next FROM ratelimit.holds AS h
     WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL;
    UPDATE ratelimit.limits AS r
       SET value = CASE WHEN gives THEN l.value[1] ELSE r.value END, ts = CASE WHEN gives THEN l.ts[1] ELSE r.ts END, lapses = next
     WHERE r.name = name AND r.key = key;
    RETURN coalesce(pg_catalog.cardinality(l.ids), 0);
END
$body$;

-- Whether a release's mark is for a hold of this token or, of an id without one, for its statement: one that is older. A mark of the future is of before
-- the server's clock stepped back.
CREATE FUNCTION ratelimit._barred(token uuid, own_token uuid, marked_at timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE
RETURN coalesce(token = own_token, token IS NULL AND own_token IS NULL AND marked_at > statement_timestamp() AND marked_at <= clock_timestamp());

-- What is known of an id over these limits: held, by somebody in time; settled, within a day; released: the token was; or taken: it may be. It is repeated if the call
-- may be ('once', or 'endless': of holds without an end), and all of it is known. until: the latest end of the holds in time; infinity: one of them has none.
CREATE FUNCTION ratelimit._known(
    own text, own_token uuid, repeats text, names text[], keys text[], at timestamptz,
    OUT state text, OUT until timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    rank    integer := 4;
    endless boolean := repeats = 'endless';
    rec     record;
BEGIN
    FOR i IN 1..pg_catalog.cardinality(names) LOOP
        SELECT h.state, h.until, h.token, h.taken_at INTO rec FROM ratelimit.holds AS h
         WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        endless := endless AND coalesce(rec.state = 'held' AND rec.until = 'infinity', false);
        CONTINUE WHEN rec.state IS NULL;
        IF rec.state = 'released' AND ratelimit._barred(rec.token, own_token, rec.taken_at) THEN
            rank := 1;
        ELSIF rec.state = 'held' AND rec.until > at THEN
            until := greatest(until, rec.until);
            rank := least(rank, 2);
        ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN
            rank := least(rank, 3);
        END IF;
    END LOOP;
    state := CASE WHEN endless OR repeats = 'once' AND rank IN (2, 3) THEN 'repeated' ELSE (ARRAY['released', 'held', 'settled', 'taken'])[rank] END;
END
$body$;

-- For a token, or an id without one, of which there is no row: a hold of it that is on its way has come when this returns, which is false then, or
-- comes no more. It meets the mark, which is a row of its own primary key: it sees no other that is newer than its snapshot. Without a token, the mark is for
-- every hold of the id whose statement is older. Any other hold overwrites the mark, and a sweep deletes it an hour later. One mark is enough, since a hold
-- is all or nothing. CONCURRENCY.md, J6, has the argument.
CREATE FUNCTION ratelimit._bar(own text, own_token uuid, names text[], keys text[], now timestamptz) RETURNS boolean
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    at timestamptz := coalesce(now, clock_timestamp());
    i  integer;
BEGIN
    BEGIN
        FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP -- a row that is there is locked
            INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
            VALUES (names[i], keys[i], own, 'released', 'none', own_token, 0, statement_timestamp(), 0, 1, at)
            ON CONFLICT (name, key, id) DO UPDATE SET state = 'released', unit = 'none', token = own_token, count = 0, taken_at = excluded.taken_at, until = at
             WHERE (h.token = own_token) IS NOT TRUE AND h.state <> 'held' AND h.until <= at OR own_token IS NULL AND h.token IS NULL AND h.state = 'released';
            IF FOUND THEN
                RETURN true;
            END IF;
            EXIT WHEN EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own
                AND h.token = own_token);
        END LOOP;
        RAISE SQLSTATE 'RL001'; -- which releases the rows, since those of the limits are locked before them
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;
    FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP -- the id is another's: wait behind
        PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
    END LOOP;
    FOR i IN 1..pg_catalog.cardinality(names) LOOP
        IF EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own
                AND h.token IS NOT DISTINCT FROM own_token AND h.state <> 'once') THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END
$body$;

-- Writes the rows of a hold whose tokens are taken (d). If the id is known, it says so: then the caller undoes the taking and these rows.
--
-- ON CONFLICT inserts a row, or locks the row that is there and writes nothing. It looks nothing up before, which at SERIALIZABLE would
-- conflict with the holds of other ids.
CREATE FUNCTION ratelimit._claim(
    own text, own_token uuid, units text[], names text[], keys text[], starts timestamptz[], shards integer[], counts double precision[],
    d ratelimit._decisions, at timestamptz, INOUT until timestamptz, OUT state text
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    i     integer;
    m     integer;
    met   integer[] := '{}'; -- the positions whose rows were there
    own_rest double precision;
    rest  double precision[] := '{}';
    own_ts timestamptz;
    taken timestamptz[] := '{}'; -- by position: of a window, in that of its rows, which may have begun during a wait
    part  double precision[] := '{}';
    ends  timestamptz := until; -- of the new hold
    kind  text := CASE WHEN own_token IS NULL AND until < 'infinity' THEN 'once' ELSE 'held' END;
BEGIN
    FOR i IN 1..pg_catalog.cardinality(names) LOOP
        SELECT count(*), coalesce(sum(u.value), '0'), max(u.ts) INTO m, own_rest, own_ts
          FROM ROWS FROM (pg_catalog.unnest(d.ord), pg_catalog.unnest(d.value), pg_catalog.unnest(d.ts)) AS u (ord, value, ts) WHERE u.ord = i;
        rest[i] := own_rest;
        taken[i] := CASE WHEN starts[i] IS NULL THEN d.at ELSE greatest(own_ts, d.at) END;
        part[i] := CASE WHEN m = 1 THEN '1'::double precision / shards[i]::double precision ELSE 1 END;
        counts[i] := CASE WHEN units[i] = 'none' THEN 0 ELSE counts[i] END;
    END LOOP;
    FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP
        INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
        VALUES (names[i], keys[i], own, kind, units[i], own_token, counts[i], taken[i], rest[i], part[i], ends)
        ON CONFLICT (name, key, id) DO UPDATE SET count = h.count WHERE false;
        IF NOT FOUND THEN
            met := pg_catalog.array_append(met, i);
        END IF;
    END LOOP;
    state := 'taken';
    IF pg_catalog.cardinality(met) > 0 THEN -- all rows of the id are locked by now
        SELECT k.state, k.until INTO state, until
          FROM ratelimit._known(own, own_token, CASE WHEN kind = 'once' THEN kind WHEN ends = 'infinity' AND pg_catalog.cardinality(met) = pg_catalog.cardinality(names) THEN 'endless' END,
               ARRAY(SELECT names[u.i] FROM pg_catalog.unnest(met) AS u (i) ORDER BY u.i),
               ARRAY(SELECT keys[u.i] FROM pg_catalog.unnest(met) AS u (i) ORDER BY u.i), at) AS k;
    END IF;
    IF state = 'taken' THEN
        until := ends;
        FOREACH i IN ARRAY met LOOP
            -- An expired hold that is still to come back, or may still be charged, goes on under an id that no caller can have.
            UPDATE ratelimit.holds AS h SET id = '~' || h.token::text
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own
               AND h.token IS NOT NULL AND CASE h.state WHEN 'held' THEN h.unit <> 'none' WHEN 'lapsed' THEN h.unit = 'tokens' AND h.until > at ELSE false END;
            IF FOUND THEN
                INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
                VALUES (names[i], keys[i], own, kind, coalesce(units[i]), own_token, coalesce(counts[i]), coalesce(taken[i]), coalesce(rest[i]), coalesce(part[i]), ends);
                CONTINUE;
            END IF;
            UPDATE ratelimit.holds AS h
               SET state = kind, unit = coalesce(units[i]), token = own_token, count = coalesce(counts[i]), taken_at = coalesce(taken[i]),
                   rest = coalesce(rest[i]), part = coalesce(part[i]), until = ends
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        END LOOP;
    END IF;
END
$body$;

-- When expiries alone make room for slots: an upper bound, if nobody extends and nothing else is taken; at: there is room now. NULL: never. The row and its
-- holds are of one snapshot: a hold that has ended between two would be in neither.
CREATE FUNCTION ratelimit._free_at(
    name text, key text, count double precision, floor double precision, at timestamptz
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    free double precision;
    rec  record;
BEGIN
    FOR rec IN
        SELECT h.count, h.until, u.value
          FROM (SELECT coalesce((SELECT least(r.value, '0') FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.shard = 0), '0') AS value) AS u
          LEFT JOIN ratelimit.holds AS h
            ON h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.unit = 'slots'
         ORDER BY h.until
    LOOP
        free := coalesce(free, rec.value - count - floor);
        EXIT WHEN free >= '0';
        free := free + coalesce(rec.count, '0');
        IF free >= '0' THEN -- one that has expired is locked by somebody
            RETURN CASE WHEN rec.until > at THEN rec.until ELSE at + interval '1 second' END;
        END IF;
    END LOOP;
    RETURN CASE WHEN free >= '0' THEN at END;
END
$body$;

-- The answer where the id is known. Of a repeated call, its values are what the first one counted.
CREATE FUNCTION ratelimit._as_known(state text, until timestamptz, at timestamptz, own text, names text[], keys text[]) RETURNS ratelimit._held
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    ord    integer[] := '{}';
    counts double precision[] := '{}';
    rec    record;
BEGIN
    FOR i IN 1..CASE WHEN state = 'repeated' THEN pg_catalog.cardinality(names) ELSE 0 END LOOP
        SELECT h.count INTO rec FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        IF FOUND THEN
            ord := pg_catalog.array_append(ord, i);
            counts := pg_catalog.array_append(counts, rec.count);
        END IF;
    END LOOP;
    RETURN ROW(state, until, at, ord, counts, pg_catalog.array_fill(at, ARRAY[pg_catalog.cardinality(ord)]), NULL)::ratelimit._held;
END
$body$;

-- Takes tokens and slots under an id, as ratelimit._apply takes, all or nothing. The token is a random one, of the caller, who so can end the
-- hold whose answer was lost. ttl is how long the hold lasts; NULL, without a token: it does not expire. A ttl without a token: the tokens are
-- taken once, and the row is kept for so long. If the id is known then, held or settled or once, the call is repeated, and takes nothing.
--
-- A taking is undone by its subtransaction if the id is known by then: it may be from any shard, and its rows may be new.
CREATE FUNCTION ratelimit._hold(
    own text, own_token uuid, ttl interval, taking integer, units text[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._held
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    n       CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    once    CONSTANT boolean := own_token IS NULL AND ttl IS NOT NULL;
    repeats CONSTANT text := CASE WHEN once THEN 'once' WHEN ttl IS NULL THEN 'endless' END;
    d       ratelimit._decisions;
    at      timestamptz;
    state   text;
    until   timestamptz;
    free_at timestamptz[];
BEGIN
    IF (octet_length(own) BETWEEN 1 AND 255 AND own COLLATE "C" !~ '^~|[[:cntrl:]]' AND n BETWEEN 1 AND 1000 AND taking BETWEEN 0 AND n AND n = pg_catalog.cardinality(keys)
        AND n = pg_catalog.cardinality(units) AND n = pg_catalog.cardinality(shards) AND n = pg_catalog.cardinality(counts)
        AND (ttl IS NOT NULL OR own_token IS NULL) AND (ttl IS NULL OR isfinite(ttl) AND ttl >= '100 milliseconds' AND ttl <= '366 days')) IS NOT TRUE
       OR EXISTS (SELECT 1 FROM pg_catalog.generate_subscripts(names, 1) AS p
           WHERE (CASE WHEN p > taking THEN units[p] = 'none' WHEN units[p] = 'slots' THEN NOT once AND rates[p] = '0' AND shards[p] = 1 AND counts[p] >= '1' AND counts[p] = trunc(counts[p])
                  ELSE units[p] = 'tokens' AND rates[p] > '0' END
               AND (p IN (1, taking + 1) OR (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (names[p] COLLATE "C", keys[p] COLLATE "C"))) IS NOT TRUE) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    IF ratelimit._distributed() THEN
        RAISE feature_not_supported USING MESSAGE = 'rate limits: there are no holds where the table is distributed by key',
            HINT = 'Distribute the schema, or put limits with holds into a schema that is not distributed.';
    END IF;
    -- Look the id up first: a duplicate takes nothing, and locks nothing. It would not do to take, and to roll back to here: whoever waits
    -- for a row that a subtransaction inside this one has written waits for the end of the whole transaction. SERIALIZABLE cannot look:
    -- an id that is not there would conflict with the holds of other ids.
    IF current_setting('transaction_isolation') <> 'serializable' THEN
        at := coalesce(now, clock_timestamp());
        SELECT k.state, k.until INTO state, until FROM ratelimit._known(own, own_token, repeats, names, keys, at) AS k;
        IF state IN ('repeated', 'held', 'settled', 'released') THEN
            RETURN ratelimit._as_known(state, until, at, own, names[1:taking], keys[1:taking]);
        END IF;
    END IF;
    BEGIN
        state := NULL;
        d := ROW(true, coalesce(now, clock_timestamp()), '{}', '{}', '{}', NULL);
        IF taking > 0 THEN
            d := ratelimit._apply('consume', names[1:taking], keys[1:taking], rates[1:taking], periods[1:taking],
                capacities[1:taking], starts[1:taking], shards[1:taking], counts[1:taking], floors[1:taking], shard_a[1:taking], shard_b[1:taking], false, now, false,
                windows, firsts[1:taking], lasts[1:taking], until => CASE WHEN own_token IS NOT NULL THEN coalesce(now, clock_timestamp()) + ttl END);
        END IF;
        at := coalesce(now, clock_timestamp()); -- taking may have waited: that is not of the work's time
        IF d.granted THEN
            SELECT c.state, c.until INTO state, until
              FROM ratelimit._claim(own, own_token, units, names, keys, starts, shards, counts, d, at, coalesce(at + ttl, 'infinity')) AS c;
            IF state <> 'taken' THEN
                RAISE SQLSTATE 'RL001';
            END IF;
        END IF;
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;
    IF state = 'taken' THEN
        RETURN ROW(state, until, d.at, d.ord, d.value, d.ts, NULL)::ratelimit._held;
    ELSIF state IS NULL THEN -- denied: the id may be the one that has the last slot
        SELECT k.state, k.until INTO state, until FROM ratelimit._known(own, own_token, repeats, names, keys, at) AS k;
    END IF;
    IF state IN ('repeated', 'held', 'settled', 'released') THEN
        RETURN ratelimit._as_known(state, until, at, own, names[1:taking], keys[1:taking]);
    END IF;
    FOR i IN 1..taking LOOP
        IF units[i] = 'slots' THEN
            free_at[i] := ratelimit._free_at(names[i], keys[i], counts[i], floors[i], at);
        ELSE
            SELECT min(greatest(h.until, r.ts)) INTO until FROM ratelimit.holds AS h, (SELECT max(l.ts) AS ts FROM ratelimit.limits AS l WHERE l.name = names[i] AND l.key = keys[i]) AS r
             WHERE h.name = names[i] AND h.key = keys[i] AND h.state = 'held' AND h.token IS NOT NULL AND h.unit = 'tokens' AND greatest(h.until, r.ts) > at;
            free_at[i] := until;
        END IF;
    END LOOP;
    RETURN ROW('denied', NULL, d.at, d.ord, d.value, d.ts, free_at)::ratelimit._held;
END
$body$;

-- Ends a hold. used: by limit, the tokens that were used; less comes back, by the rule of refunds, and more is charged. Slots come back in any case. release:
-- the id is free again; a hold that has ended is no error (late), but one that has an end is lost to who knows its id alone. shards: 0 is for a limit whose
-- numbers the caller does not know: they are those that programs have published, as if nothing were blocked. Without any, nothing comes back but slots. Its
-- rows are not inserted. lifted: by limit, it is unlimited by an override, so nothing is charged.
--
-- A hold that is not there yet meets a mark (ratelimit._bar). The rows of the limits are locked before those of the id, missing ones inserted. Above READ
-- COMMITTED, a hold that is newer than the snapshot is 40001, and never lost.
CREATE FUNCTION ratelimit._settle(
    release boolean, own text, own_token uuid, taking integer, lifted boolean[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    used double precision[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._settled
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    n      CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    ids    CONSTANT text[] := ARRAY[own, '~' || own_token::text]; -- the second once the first is another's: ratelimit._claim. Each is looked up by itself
    i      integer;
    at     timestamptz;
    kept   timestamptz;
    mine   boolean[] := '{}'; -- by position: the row is of this token, and may be ended
    over   boolean := false;  -- there is a row of this token
    bare   boolean[] := pg_catalog.array_fill(false, ARRAY[n]); -- by position: there were no rows of the limit
    d      ratelimit._terms;
    q      ratelimit._request;
    rec    ratelimit.holds;
    list   ratelimit.holds[] := pg_catalog.array_fill(NULL::ratelimit.holds, ARRAY[n]); -- by position
    states text[] := pg_catalog.array_fill(NULL::text, ARRAY[n]);
    moved  double precision[] := pg_catalog.array_fill('0'::double precision, ARRAY[n]);
    lost   integer[] := '{}';
    ord    integer[] := '{}';
    value  double precision[] := '{}';
    ts     timestamptz[] := '{}';
    m      integer;            -- the number of rows of a limit
    v      double precision[]; -- their values
    t      timestamptz[];      -- their ts
    last   timestamptz;        -- the latest of their promised
    w      timestamptz[];      -- the windows of a calendar window
    lapses timestamptz;        -- when the first of the holds may expire
    latest timestamptz;        -- the latest ts, or now if that is later
    since  timestamptz;        -- when the hold ended, or now; or later, if the rows were written since
    moves  boolean;            -- tokens
    total  double precision;
    x      double precision;   -- what comes back; below zero: what is charged
BEGIN
    IF (n BETWEEN 1 AND 1000 AND taking BETWEEN 0 AND n AND n = pg_catalog.cardinality(keys) AND n = pg_catalog.cardinality(lifted) AND n = pg_catalog.cardinality(rates)
        AND n = pg_catalog.cardinality(used) AND '0' <= ALL (used) AND '1e15' >= ALL (used) AND release IS NOT NULL AND own IS NOT NULL) IS NOT TRUE
       OR EXISTS (SELECT 1 FROM pg_catalog.generate_subscripts(names, 1) AS p
           WHERE (p > taking OR ratelimit._valid(rates[p], periods[p], capacities[p], used[p], now)) IS NOT TRUE
              OR (p IN (1, taking + 1) OR (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (names[p] COLLATE "C", keys[p] COLLATE "C")) IS NOT TRUE) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    LOOP -- look first: of what is not there, no row of a limit is locked or written
        FOR i IN 1..n LOOP
            SELECT o.state, o.unit INTO rec.state, rec.unit FROM pg_catalog.unnest(ids) AS u (id) CROSS JOIN LATERAL (
                SELECT h.state, h.unit FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = u.id
                   AND (h.token = own_token OR own_token IS NULL AND (h.state = 'held' OR h.state <> 'released' AND h.until > coalesce(now, clock_timestamp())))
                OFFSET 0) AS o;
            over := over OR FOUND;
            mine[i] := coalesce(rec.state IN ('held', 'lapsed') OR rec.state = 'settled' AND NOT release, false);
        END LOOP;
        EXIT WHEN over OR ratelimit._bar(own, own_token, names, keys, now);
    END LOOP;
    IF release AND true <> ALL (mine) THEN
        RETURN ROW('late', coalesce(now, clock_timestamp()), '{}', '{}', '{}', moved, lost)::ratelimit._settled;
    END IF;
    FOR i IN 1..taking LOOP
        CONTINUE WHEN NOT mine[i];
        IF shards[i] = 0 THEN
            shards[i] := 1;
            IF (ratelimit._defined(names[i])).kind <> 'slots' THEN
                d := ratelimit._numbers(names[i], nullif(keys[i], ''), coalesce(now, clock_timestamp()), varying => true, standing => true);
                IF d.effect <> 'varies' AND d.rate > '0' THEN
                    q := ratelimit._prepare('settle', names[i], nullif(keys[i], ''), d.rate, d.period, 0, d.kind, d.capacity, d.start, d.shards,
                        keys[i] = '', d.zone, d.anchor, NULL, NULL, now);
                    rates[i] := q.rate; periods[i] := q.period; capacities[i] := q.capacity; starts[i] := q.start; shards[i] := q.shards;
                    firsts[i] := CASE WHEN q.windows IS NOT NULL THEN coalesce(pg_catalog.cardinality(windows), 0) + 1 END;
                    windows := pg_catalog.array_cat(windows, q.windows);
                    lasts[i] := pg_catalog.cardinality(windows);
                END IF;
                d := ratelimit._numbers(names[i], nullif(keys[i], ''), coalesce(now, clock_timestamp()), varying => true);
                lifted[i] := coalesce(d.effect = 'unlimited', false);
            END IF;
            bare[i] := NOT EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i]);
            CONTINUE WHEN bare[i]; -- it is full
        END IF;
        PERFORM ratelimit._lock(names[i:i], keys[i:i], capacities[i:i], shards[i:i], now);
    END LOOP;
    at := coalesce(now, clock_timestamp()); -- locking may have waited
    kept := at + interval '1 day';
    FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP
        rec := NULL;
        IF mine[i] THEN
            FOR m IN 1..2 LOOP -- again, if the id became another's while this waited
                SELECT o.* INTO rec FROM pg_catalog.unnest(ids) AS u (id) CROSS JOIN LATERAL (
                    SELECT h.* FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = u.id AND (h.token = own_token OR own_token IS NULL)
                    OFFSET 0 FOR UPDATE) AS o;
                EXIT WHEN FOUND;
            END LOOP;
        END IF;
        list[i] := rec;
        states[i] := CASE WHEN rec.state IS NULL OR rec.token IS DISTINCT FROM own_token OR rec.state = 'once' OR rec.state <> 'held' AND rec.until <= at
            OR NOT release AND (rec.id <> own OR rec.state = 'lapsed' AND rec.unit = 'slots') THEN 'lost' ELSE rec.state END;
        IF states[i] = 'lost' AND (NOT release OR own_token IS NULL AND rec.token IS NOT NULL AND rec.state = 'held' AND rec.until > at) THEN
            lost := pg_catalog.array_append(lost, i);
        END IF;
    END LOOP;
    IF pg_catalog.cardinality(lost) > 0 THEN
        RETURN ROW('lost', at, '{}', '{}', '{}', moved, lost)::ratelimit._settled;
    END IF;
    FOR i IN 1..n LOOP
        rec := list[i];
        x := 0;
        m := 0;
        w := windows[firsts[i]:lasts[i]];
        moves := i <= taking AND rates[i] > '0' AND NOT bare[i] AND (states[i] = 'lapsed' OR states[i] = 'held' AND rec.count <> used[i]) AND rec.unit = 'tokens';
        since := CASE WHEN states[i] = 'held' THEN least(rec.until, at) ELSE at END;
        IF states[i] NOT IN ('held', 'lapsed') THEN
            NULL; -- nobody else's row is touched
        ELSIF release THEN
            DELETE FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = rec.id;
        ELSE
            UPDATE ratelimit.holds AS h SET state = 'settled', until = kept
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        END IF;
        IF moves THEN -- after what ended before it
            PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, w, upto => since);
        END IF;
        IF i <= taking THEN
            SELECT pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), count(*), greatest(max(r.ts), at), max(r.promised),
                   CASE WHEN max(r.ts) > at THEN at ELSE greatest(max(r.ts), since) END, min(r.lapses)
              INTO v, t, m, latest, last, since, lapses
              FROM ratelimit.limits AS r
             WHERE r.name = names[i] AND r.key = keys[i];
        END IF;
        IF i > taking OR states[i] NOT IN ('held', 'lapsed') THEN
            NULL;
        ELSIF bare[i] THEN
            -- A recount has counted the hold meanwhile, and its row can be locked only before the hold. Asked under the hold's lock, for which a
            -- later recount waits (CONCURRENCY.md, J14).
            IF states[i] = 'held' AND rec.unit = 'slots' AND m > 0 THEN
                RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limit %L: its slots were counted again meanwhile', names[i]);
            END IF;
        ELSIF rec.unit = 'slots' AND m = 1 THEN
            total := v[1];
            x := CASE WHEN states[i] = 'held' THEN greatest(least(rec.count, -total), '0') ELSE 0 END;
        ELSIF moves THEN
            total := ratelimit._total(v, t, since, rates[i], periods[i], capacities[i], starts[i], w);
            IF states[i] = 'held' THEN
                x := rec.count - used[i];
            ELSE -- what it kept is paid; what came back in a window that is over counts as used there
                x := least('0', CASE WHEN starts[i] IS NULL OR w IS NULL AND date_bin(periods[i], rec.taken_at, starts[i]) = date_bin(periods[i], latest, starts[i])
                    OR rec.taken_at >= w[1] AND pg_catalog.width_bucket(rec.taken_at, w) = pg_catalog.width_bucket(latest, w) THEN rec.rest ELSE rec.count END - used[i]);
            END IF;
            IF x > '0' THEN
                SELECT g.back INTO x
                  FROM ratelimit._give_back(v, t, last, since, rates[i], periods[i], capacities[i], starts[i], x, rec.count, rec.rest, rec.part,
                       rec.taken_at, rec.taken_at, w) AS g;
            ELSIF lifted[i] THEN
                x := 0;
            END IF;
        END IF;
        IF x <> '0' THEN
            v := pg_catalog.array_fill((total + x) / m::double precision, ARRAY[m]);
            t := ARRAY(SELECT greatest(u.t, since) FROM pg_catalog.unnest(t) WITH ORDINALITY AS u (t, n) ORDER BY u.n);
            UPDATE ratelimit.limits AS r SET value = coalesce(v[1]), ts = greatest(r.ts, since)
             WHERE r.name = names[i] AND r.key = keys[i];
        END IF;
        IF m > 0 THEN
            IF lapses <= at THEN -- the answer is as a balance, with what others give back
                SELECT l.value, l.ts INTO v, t
                  FROM ratelimit._lapsed(names[i], keys[i], at, rates[i], periods[i], capacities[i], starts[i], w) AS l;
            END IF;
            ord := pg_catalog.array_cat(ord, pg_catalog.array_fill(i, ARRAY[m]));
            value := pg_catalog.array_cat(value, v);
            ts := pg_catalog.array_cat(ts, t);
        END IF;
        moved[i] := x;
    END LOOP;
    RETURN ROW(CASE WHEN NOT release AND 'settled' = ALL (states) THEN 'repeated' WHEN release AND 'held' <> ALL (states) THEN 'late' ELSE 'done' END, at, ord, value, ts, moved, lost)::ratelimit._settled;
END
$body$;

-- Extends holds, by position: each lasts until ttl from now, at least. It does not lock the rows of their limits, and never waits: so a
-- transaction that has one of them keeps no other from being extended. In a call of its own, since it locks the holds until COMMIT.
--
-- ended: the positions that are settled. lost: those that are not held under this token any more. busy: those that somebody has locked: ask again. until: when
-- the first of the others ends.
CREATE FUNCTION ratelimit._extend(
    names text[], keys text[], ids text[], tokens uuid[], ttls interval[], now timestamptz DEFAULT NULL,
    OUT ended integer[], OUT lost integer[], OUT busy integer[], OUT until timestamptz
)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    n   CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    at  timestamptz := coalesce(now, clock_timestamp());
    was text;
    own_until timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: an extension of holds needs a READ COMMITTED transaction';
    END IF;
    IF (n = pg_catalog.cardinality(keys) AND n = pg_catalog.cardinality(ids) AND n = pg_catalog.cardinality(tokens) AND n = pg_catalog.cardinality(ttls)
        AND '100 milliseconds' <= ALL (ttls) AND '366 days' >= ALL (ttls)) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    ended := '{}'; lost := '{}'; busy := '{}';
    FOR i IN 1..n LOOP
        PERFORM 1 FROM ratelimit.holds AS h
          WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i] AND h.token = tokens[i] AND h.state = 'held' FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE ratelimit.holds AS h SET until = greatest(h.until, at + ttls[i])
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i]
            RETURNING h.until INTO own_until;
            until := least(until, own_until);
            CONTINUE;
        END IF;
        SELECT h.state INTO was FROM ratelimit.holds AS h
         WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i] AND h.token = tokens[i];
        IF was = 'held' THEN
            busy := pg_catalog.array_append(busy, i);
        ELSIF was = 'settled' THEN
            ended := pg_catalog.array_append(ended, i);
        ELSE
            lost := pg_catalog.array_append(lost, i);
        END IF;
    END LOOP;
END
$body$;

-- Fails a plain statement that took under an id which another call has taken meanwhile. The error rolls the taking back, and the library asks
-- ratelimit._hold.
CREATE FUNCTION ratelimit._taken_twice() RETURNS boolean
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RAISE SQLSTATE 'RL001' USING MESSAGE = 'rate limits: another call has taken under this id meanwhile, so nothing was taken, and the library asks again';
END
$body$;

-- What the Go library calls: see wire.sql.
CREATE FUNCTION ratelimit._wire_hold(
    own text, own_token uuid, ttl interval, taking integer, units text[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._hold(own, own_token, ttl, taking, units, names, keys, rates, periods, capacities, starts, shards, counts, floors,
    shard_a, shard_b, now, windows, firsts, lasts));

CREATE FUNCTION ratelimit._wire_settle(
    release boolean, own text, own_token uuid, taking integer, lifted boolean[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    used double precision[], now timestamptz,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._settle(release, own, own_token, taking, lifted, names, keys, rates, periods, capacities, starts, shards,
    used, now, windows, firsts, lasts));

-- Holds by SQL by hand: ratelimit.hold, ratelimit.release and ratelimit.holds. The numbers are those that programs have published, under the
-- override in force. A token is one that the Go library reads, and the other way round.

-- Says what is wrong with the id of a hold, or returns NULL. It does not say the id, as ratelimit._wrong_key.
CREATE FUNCTION ratelimit._wrong_id(id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN id IS NULL OR octet_length(id) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('id must have 1 to 255 bytes, not %s', coalesce(octet_length(id)::text, 'NULL'))
    WHEN id COLLATE "C" ~ E'^~|[[:cntrl:]\\u0080-\\u009f]' THEN 'id must not begin with ~, and must have no control characters' END;

-- Reads a token, or the id of a hold without an end. id is NULL if it is none. Above 1 MiB it is none: to read 50 MB takes 18 s. list is what is held,
-- as [["name", "key", count]], if nobody has altered it; NULL of an id.
CREATE FUNCTION ratelimit._read_token(INOUT id text, OUT token uuid, OUT list text)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    parts text[] := pg_catalog.regexp_match(CASE WHEN octet_length(id) <= '1048576' THEN id END COLLATE "C", '^~([0-9a-f]{32})([1-9][0-9]{0,2}):(.*)$');
BEGIN
    IF id ~ '^~' THEN
        token := parts[1]::uuid;
        id := (SELECT left(parts[3], n) FROM pg_catalog.generate_series(1, 255) AS n WHERE octet_length(left(parts[3], n)) = parts[2]::integer LIMIT 1); -- its length is in bytes
        list := substr(parts[3], length(id) + 1);
    END IF;
END
$body$;

-- Says that an id is held by somebody else, or settled. That is a conflict, and not a denial of the limit: to wait for room does not help. Or that it was
-- released after the statement had begun.
CREATE FUNCTION ratelimit._id_taken(name text, state text, until timestamptz, at timestamptz) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    said text[] := ratelimit._denied(ARRAY[name], name, NULL, CASE WHEN state = 'held' THEN nullif(until, 'infinity') END, NULL, at, state);
BEGIN
    IF state = 'released' THEN
        RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limit %L: the id was released while this hold of it was on its way', name);
    END IF;
    RAISE SQLSTATE 'PT409' USING DETAIL = said[2], HINT = said[3],
        MESSAGE = pg_catalog.format('rate limit %L: %s', name, CASE state WHEN 'held' THEN 'an id is held already' ELSE 'an id is settled: its work was done within a day' END);
END
$body$;

-- Decides for ratelimit.hold, at an instant that tests choose.
CREATE FUNCTION ratelimit._hold_by_hand(
    name text, key text, id text, count double precision, ttl interval, forever boolean, global boolean, now timestamptz DEFAULT NULL, raises boolean DEFAULT true,
    OUT token text, OUT until timestamptz, OUT repeated boolean, OUT remaining double precision, OUT at timestamptz, OUT denial text[]
)
LANGUAGE plpgsql SET extra_float_digits = 1 -- the token has the count
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := coalesce(ratelimit._wrong_id(id), CASE
        WHEN forever IS NULL THEN 'forever must be true or false, not NULL'
        WHEN forever AND ttl IS NOT NULL THEN pg_catalog.format('ttl must be NULL with forever => true, not %s', ttl)
        WHEN NOT forever AND (isfinite(ttl) AND ttl BETWEEN '100 milliseconds' AND '366 days') IS NOT TRUE THEN
            pg_catalog.format('ttl must be between 100 milliseconds and 366 days, not %s; forever => true is for a hold without an end', coalesce(ttl::text, 'NULL'))
    END);
    own   uuid := CASE WHEN NOT forever THEN gen_random_uuid() END;
    q     ratelimit._request;
    unit  text;
    a     integer := 0;
    b     integer := 0;
    h     ratelimit._held;
    said  record;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    PERFORM ratelimit._published(name, key);
    q := ratelimit._prepare('hold', name, key, NULL, NULL, count, 'token bucket', NULL, NULL, 1, global, NULL, NULL, NULL, NULL, now);
    at := coalesce(now, clock_timestamp());
    IF ratelimit._refuses(q) THEN
        SELECT r.retry_at, r.reset_at INTO said FROM ratelimit._answer('hold', q, false, at, NULL, NULL) AS r;
        denial := ratelimit._denied(ARRAY[name], name, 0, said.retry_at, said.reset_at, at, ratelimit._reason(q));
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN;
    END IF;
    unit := CASE WHEN q.effect = 'slots' THEN 'slots' WHEN q.effect IN ('numbers', 'never') THEN 'tokens' ELSE 'none' END;
    IF unit = 'none' THEN
        q.rate := 0; q.period := '1 second'; q.capacity := 0; q.shards := 1; q.floor := 0;
    ELSIF q.shards > 1 THEN
        a := trunc(random() * q.shards::double precision);
        b := (a + 1 + trunc(random() * (q.shards - 1)::double precision)::integer) % q.shards; -- a shard other than a
    END IF;
    h := ratelimit._hold(id, own, ttl, CASE unit WHEN 'none' THEN 0 ELSE 1 END, ARRAY[unit], ARRAY[q.name], ARRAY[q.key], ARRAY[q.rate], ARRAY[q.period],
        ARRAY[q.capacity], ARRAY[q.start], ARRAY[q.shards], ARRAY[q.count], ARRAY[q.floor - ratelimit._tolerance(q.capacity, q.floor)], ARRAY[a], ARRAY[b], now,
        q.windows, ARRAY[1], ARRAY[pg_catalog.cardinality(q.windows)]);
    at := h.at;
    IF h.state IN ('held', 'settled', 'released') THEN
        PERFORM ratelimit._id_taken(name, h.state, h.until, at);
    ELSIF h.state = 'denied' THEN
        IF unit = 'slots' THEN
            SELECT least(h.value[1], '0') - q.floor AS remaining, nullif(ratelimit._retry_at('hold', q, h.value, h.ts, at), 'infinity') AS retry_at, NULL::timestamptz AS reset_at INTO said;
        ELSE
            SELECT r.remaining, r.retry_at, r.reset_at INTO said FROM ratelimit._answer('hold', q, false, at, h.value, h.ts) AS r;
        END IF;
        denial := ratelimit._denied(ARRAY[name], name, said.remaining, said.retry_at, said.reset_at, at, ratelimit._reason(q));
    END IF;
    IF denial IS NOT NULL THEN
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN;
    END IF;
    token := CASE WHEN forever THEN id ELSE pg_catalog.format('~%s%s:%s%s', pg_catalog.replace(own::text, '-'::text, ''::text), octet_length(id), id,
        pg_catalog.json_build_array(pg_catalog.json_build_array(q.name, q.key, q.count))) END;
    until := nullif(h.until, 'infinity');
    repeated := h.state = 'repeated';
    IF repeated THEN
        remaining := NULL;
    ELSIF unit = 'slots' THEN
        remaining := h.value[1] - q.floor;
    ELSE
        SELECT r.remaining INTO remaining FROM ratelimit._answer('hold', q, true, at, h.value, h.ts) AS r;
    END IF;
END
$body$;

-- Wants the numbers of a key to be known: what is held comes back by them.
CREATE FUNCTION ratelimit._published(name text, key text) RETURNS ratelimit._terms
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    n ratelimit._terms := ratelimit._defined(name);
BEGIN
    IF n.kind IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: no program has published it', quote_nullable(left(name, 255))),
            HINT = 'Have a program publish its limits: Open or Publish of the Go library, txlimit publish, or ratelimit.publish.';
    END IF;
    n := ratelimit._numbers(name, nullif(key, ''), clock_timestamp(), varying => true, standing => true);
    IF n.effect = 'varies' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: the numbers of this key are the program''s', name),
            HINT = 'Only the Go library can hold and release here, or give the key an override with all its numbers.';
    END IF;
    RETURN n;
END
$body$;

CREATE FUNCTION ratelimit.hold(
    name text, key text DEFAULT NULL, id text DEFAULT NULL, count double precision DEFAULT 1, ttl interval DEFAULT NULL,
    forever boolean DEFAULT false, global boolean DEFAULT false,
    OUT token text, OUT until timestamptz, OUT repeated boolean, OUT remaining double precision, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    denial text[];
BEGIN
    SELECT r.token, r.until, r.repeated, r.remaining, r.at, r.denial INTO token, until, repeated, remaining, at, denial
      FROM ratelimit._hold_by_hand(name COLLATE "C", key COLLATE "C", id COLLATE "C", count, ttl, forever, global, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.hold(text, text, text, double precision, interval, boolean, boolean) IS $text$
Takes slots or tokens under an id, in the caller's transaction, or raises an error if there are not enough. They come back when they are released,
or when ttl is over. A rollback gives them back.

    SELECT ratelimit.hold('projects', 'team 7', 'project 17', forever => true)

    SELECT token FROM ratelimit.hold('renders', 'acme', 'acme/job 17', ttl => '5 minutes')

The numbers are those that a program has published (ratelimit.publish), under the override in force. A block denies. The key stays locked until the
transaction ends: claim the job, hold, commit, and work then. Hold of the Go library is the same.

Arguments:
  name     the name of the limit
  key      the key as it is stored; NULL or empty is an error, unless global is true
  id       of the work or the thing, 1 to 255 bytes, without control characters and without ~ in front
  count    the slots or tokens to hold; default 1
  ttl      how long the work may last, 100 milliseconds to 366 days; required, unless forever is true
  forever  true: the hold has no end, and ttl must be NULL. Default false
  global   true: the limit has no keys, and key must be NULL. Default false

Result:
  token      for ratelimit.release, and for Settle and Release of the Go library. It has the limit and key in the clear. Without an end, it is the id
  until      when it ends; NULL: it has no end
  repeated   true: the id is held without an end already, and is asked for without an end again. Nothing was taken
  remaining  the balance, in slots or tokens; NULL if repeated
  at         the instant of the decision

Errors:
  PT429    denied: nothing was taken. As of ratelimit.consume; retry_at of slots is when holds that end have made room at the latest, if none is
           extended
  PT409    another delivery of the work has the id. Nothing was taken. DETAIL is as of PT429. Its reason is held, until retry_at, or settled, within a
           day: drop this delivery
  22023    an argument is invalid, no program has published the limit, or only the program knows the numbers of the key
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Decides for ratelimit.release, at an instant that tests choose.
CREATE FUNCTION ratelimit._release_by_hand(
    name text, key text, id text, global boolean, reason text, who text, now timestamptz DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    r      record;
    wrong  text;
    own    uuid;
    forced CONSTANT boolean := pg_catalog.concat(reason, who) <> '';
    rec    record;
    s      ratelimit._settled;
    n      integer;
    names  text[] := ARRAY[name]; -- of a token, all that it has
    keys   text[] := ARRAY[coalesce(key, '')];
BEGIN
    SELECT f.id, f.token, f.list INTO r FROM ratelimit._read_token(id) AS f;
    wrong := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN octet_length(reason) > 3800 THEN 'the reason is longer than 3800 bytes'
        WHEN octet_length(who) > 255 THEN 'who is longer than 255 bytes'
        WHEN id IS NOT NULL AND r.id IS NULL THEN 'the token cannot be read: it was altered'
        ELSE coalesce(ratelimit._wrong_key(key, global), ratelimit._wrong_id(r.id)) END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    key := coalesce(key, '');
    IF r.list <> '' THEN
        BEGIN
            SELECT pg_catalog.array_agg(h.name ORDER BY h.name COLLATE "C", h.key COLLATE "C"), pg_catalog.array_agg(h.key ORDER BY h.name COLLATE "C", h.key COLLATE "C")
              INTO names, keys
              FROM (SELECT u.held ->> 0 AS name, u.held ->> 1 AS key FROM pg_catalog.json_array_elements(r.list::pg_catalog.json) AS u (held)) AS h;
        EXCEPTION WHEN data_exception THEN
            names := '{}'; -- it was altered
        END;
        IF NOT EXISTS (SELECT 1 FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(keys)) AS h (name, key) WHERE h.name = name AND h.key = key) THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: the token is of a hold of other limits or keys, or was altered', name);
        END IF;
    END IF;
    n := pg_catalog.cardinality(names);
    LOOP
        SELECT o.unit, o.token, o.state, o.until INTO rec
          FROM pg_catalog.unnest(ARRAY['~' || r.token::text, r.id]) WITH ORDINALITY AS u (id, i) -- the first once the id is another's: ratelimit._claim
         CROSS JOIN LATERAL (SELECT h.unit, h.token, h.state, h.until FROM ratelimit.holds AS h WHERE h.name = name AND h.key = key AND h.id = u.id OFFSET 0) AS o
         ORDER BY u.i LIMIT 1;
        own := coalesce(r.token, CASE WHEN forced AND rec.state = 'held' THEN rec.token END);
        EXIT WHEN rec.state = 'held' AND own IS NULL OR rec.state <> 'once' AND coalesce(rec.token = own, rec.token IS NULL AND own IS NULL AND rec.state <> 'released' AND rec.until > coalesce(now, clock_timestamp()))
            OR forced AND r.token IS NULL AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') -- an operator has seen it
            OR NOT ratelimit._may('INSERT'); -- nor may an operator leave a mark
        EXIT WHEN ratelimit._bar(r.id, own, ARRAY[name], ARRAY[key], now);
    END LOOP;

    -- By its id alone, a hold with an end is released by somebody who says so: it may be another delivery's by now. One that has ended stays as
    -- it is: its worker may settle it late.
    IF own IS NULL AND rec.token IS NOT NULL AND rec.state = 'held' AND rec.until > coalesce(now, clock_timestamp()) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: this hold has an end: pass its token instead of its id', name),
            HINT = 'To end the work of somebody else, say who does it, or a reason. The holder then loses it.';
    END IF;
    IF NOT coalesce(rec.state IN ('held', 'lapsed') AND rec.token IS NOT DISTINCT FROM own, false) THEN
        IF forced THEN
            PERFORM ratelimit._check_known(name);
        END IF;
        RETURN false;
    END IF;
    IF rec.unit <> 'slots' THEN -- whose numbers do not matter
        PERFORM ratelimit._published(name, key);
    END IF;
    s := ratelimit._settle(true, r.id, own, n, pg_catalog.array_fill(false, ARRAY[n]), names, keys, pg_catalog.array_fill('0'::double precision, ARRAY[n]),
        pg_catalog.array_fill('1 second'::interval, ARRAY[n]), pg_catalog.array_fill('0'::double precision, ARRAY[n]), pg_catalog.array_fill(NULL::timestamptz, ARRAY[n]),
        pg_catalog.array_fill(0, ARRAY[n]), pg_catalog.array_fill('0'::double precision, ARRAY[n]), now);
    IF s.state = 'done' AND forced THEN
        PERFORM ratelimit._note_reset(name, key, pg_catalog.concat_ws(': ', r.id, nullif(reason, '')), who, 'release');
    END IF;
    RETURN s.state = 'done';
END
$body$;

CREATE FUNCTION ratelimit.release(
    name text, key text DEFAULT NULL, id text DEFAULT NULL, global boolean DEFAULT false, reason text DEFAULT NULL, who text DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN ratelimit._release_by_hand(name COLLATE "C", key COLLATE "C", id COLLATE "C", global, reason COLLATE "C", who COLLATE "C");
END
$body$;

COMMENT ON FUNCTION ratelimit.release(text, text, text, boolean, text, text) IS $text$
Ends a hold, in the caller's transaction: what it holds comes back, tokens by the rule of refunds, and its id is free. By its token, it ends for all
limits and keys that the hold has. It returns whether there was such a hold. One that has ended is no error.

    SELECT ratelimit.release('projects', 'team 7', 'project 17')

    SELECT ratelimit.release('renders', 'acme', 'acme/job 17', reason => 'its worker hangs', who => 'ann')

Arguments:
  name    the name of the limit; of several that the hold has, any
  key     the key as it is stored; NULL or empty is an error, unless global is true
  id      the token of the hold, of ratelimit.hold or of the Go library; of a hold without an end, its id. With a reason or with who, it is the
          id of any hold: its holder then loses what it holds of this limit and key
  global  true: the limit has no keys, and key must be NULL. Default false
  reason  why, for those who look later: at most 3800 bytes; default NULL
  who     who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (made_as)

With a reason or with who, it adds a row to ratelimit.overrides if it ends a hold: the history says who has released it, and when. The
effect of such a row is release, and its reason begins with the id. Without both, nothing is written down.

Errors:
  22023    an argument is invalid, the token is of other limits or keys, or a hold with an end is named by its id alone; of tokens, also if no
           program has published the limit, or only the program knows the numbers of the key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

CREATE FUNCTION ratelimit.holds(
    name text, INOUT key text DEFAULT NULL, global boolean DEFAULT false,
    OUT id text, OUT count double precision, OUT unit text, OUT since timestamptz, OUT until timestamptz, OUT expired boolean
) RETURNS SETOF record
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        ELSE ratelimit._wrong_key(key, global) END;
    at    timestamptz := clock_timestamp();
    own   text COLLATE "C" := coalesce(key, '');
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    RETURN QUERY
    SELECT own::text, h.id::text, h.count, h.unit, h.taken_at, nullif(h.until, 'infinity'), h.until <= at
      FROM ratelimit.holds AS h
     WHERE h.name = name COLLATE "C" AND h.key = own AND h.state = 'held' AND NOT starts_with(h.id, '~'::text)
     ORDER BY h.taken_at, h.id;
    IF NOT FOUND THEN
        PERFORM ratelimit._check_known(name COLLATE "C");
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.holds(text, text, boolean) IS $text$
Lists who holds slots or tokens of a key, the oldest first. The tokens that end holds are not shown.

    SELECT * FROM ratelimit.holds('renders', 'acme')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Result, one row for each hold:
  key      '' for a limit without keys
  id       of the work or the thing
  count    the slots or tokens that it holds; 0: the key was unlimited then
  unit     'slots' or 'tokens'; 'none': the key was unlimited then
  since    when they were taken
  until    when the hold ends; NULL: it has no end
  expired  true: until has passed, and the next call that takes from the key, or a sweep, gives them back. Until then its worker may still settle it

Errors:
  22023    an argument is invalid, or programs publish limits, and nobody knows this one
$text$;

-- Checks the arguments of the functions for many ids or for slots alone, and returns the ids in the order of locks, each once.
CREATE FUNCTION ratelimit._many(name text, key text, ids text[], global boolean) RETURNS text[]
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN ids IS NULL THEN 'ids must not be NULL'
        ELSE coalesce(ratelimit._wrong_key(key, global),
            (SELECT min(ratelimit._wrong_id(u.id)) FROM pg_catalog.unnest(ids) AS u (id))) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    IF ratelimit._distributed() THEN
        RAISE feature_not_supported USING MESSAGE = 'rate limits: there are no holds where the table is distributed by key',
            HINT = 'Distribute the schema, or put limits with holds into a schema that is not distributed.';
    END IF;
    RETURN ARRAY(SELECT DISTINCT u.id COLLATE "C" FROM pg_catalog.unnest(ids) AS u (id) ORDER BY 1);
END
$body$;

-- Holds one slot for each id, without an end, or returns a denial: the caller must raise it, or the holds stay. The limit's row is locked first, and so nobody else takes or gives back slots of the key;
-- then the holds, in the order of their ids. Only an extender may have one of those, and it waits for nothing.
CREATE FUNCTION ratelimit._hold_many(name text, key text, ids text[], global boolean, OUT n integer, OUT denial text[])
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    q     ratelimit._request;
    own   text COLLATE "C" := coalesce(key, '');
    at    timestamptz;
    met   text[]; -- the ids that had a row
    rec   record;
    v     double precision;
    said  record;
BEGIN
    ids := ratelimit._many(name, key, ids, global);
    PERFORM ratelimit._published(name, key);
    IF (ratelimit._defined(name)).kind <> 'slots' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: many ids hold slots, and it has none', name),
            HINT = 'Call ratelimit.hold for each id.';
    END IF;
    IF pg_catalog.cardinality(ids) = 0 THEN
        n := 0;
        RETURN;
    END IF;
    q := ratelimit._prepare('hold', name, key, NULL, NULL, 1, 'token bucket', NULL, NULL, 1, global, NULL, NULL, NULL, NULL, NULL);
    IF q.effect = 'block' THEN
        at := clock_timestamp();
        SELECT r.retry_at, r.reset_at INTO said FROM ratelimit._answer('hold', q, false, at, NULL, NULL) AS r;
        denial := ratelimit._denied(ARRAY[name], name, 0, said.retry_at, said.reset_at, at, ratelimit._reason(q));
        RETURN;
    END IF;
    PERFORM ratelimit._lock(ARRAY[name], ARRAY[own::text], ARRAY['0'::double precision], ARRAY[1], NULL);
    at := clock_timestamp();
    WITH inserted AS (
        INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
        SELECT name, own, u.id, 'held', 'slots', NULL, 1, at, 0, 1, 'infinity' FROM pg_catalog.unnest(ids) WITH ORDINALITY AS u (id, i) ORDER BY u.i
        ON CONFLICT ON CONSTRAINT holds_pkey DO UPDATE SET count = h.count WHERE false -- which locks the row that is there
        RETURNING h.id
    )
    SELECT ARRAY(SELECT u.id FROM pg_catalog.unnest(ids) AS u (id) EXCEPT SELECT i.id FROM inserted AS i) INTO met;
    n := pg_catalog.cardinality(ids) - pg_catalog.cardinality(met);
    SELECT least(r.value, '0') INTO v FROM ratelimit.limits AS r WHERE r.name = name AND r.key = own AND r.shard = 0;
    IF pg_catalog.cardinality(met) > 0 OR v - n::double precision < q.floor THEN
        PERFORM ratelimit._reclaim(name, own, 0, '1 second', 0, NULL, NULL, NULL);
        SELECT least(r.value, '0') INTO v FROM ratelimit.limits AS r WHERE r.name = name AND r.key = own AND r.shard = 0;
        FOR rec IN
            SELECT h.id, h.state, h.until, h.token, h.taken_at FROM ratelimit.holds AS h
             WHERE h.name = name AND h.key = own AND h.id = ANY (met)
        LOOP
            CONTINUE WHEN rec.state = 'held' AND rec.until = 'infinity';
            IF rec.state = 'held' OR rec.state = 'settled' AND rec.until > at OR rec.state = 'released' AND ratelimit._barred(rec.token, NULL, rec.taken_at) THEN
                PERFORM ratelimit._id_taken(name, rec.state, greatest(rec.until, at + interval '1 second'), at);
            END IF;
            UPDATE ratelimit.holds AS h SET state = 'held', unit = 'slots', token = NULL, count = 1, taken_at = at, rest = 0, part = 1, until = 'infinity'
             WHERE h.name = name AND h.key = own AND h.id = rec.id;
            n := n + 1;
        END LOOP;
    END IF;
    IF n > 0 AND v - n::double precision < q.floor THEN
        q.count := n;
        PERFORM ratelimit._check_slots(q, 'ids', at);
        denial := ratelimit._denied(ARRAY[name], name, v - q.floor, nullif(ratelimit._retry_at('hold', q, '{}', '{}', at), 'infinity'), NULL, at, 'quota');
        RETURN;
    END IF;
    UPDATE ratelimit.limits AS r SET value = least(r.value, '0') - n::double precision, ts = greatest(r.ts, at) WHERE r.name = name AND r.key = own AND r.shard = 0 AND n > 0;
END
$body$;

CREATE FUNCTION ratelimit.hold_many(name text, key text DEFAULT NULL, ids text[] DEFAULT NULL, global boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    n      integer;
    denial text[];
BEGIN
    SELECT r.n, r.denial INTO n, denial FROM ratelimit._hold_many(name COLLATE "C", key COLLATE "C", ids, global) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
    RETURN n;
END
$body$;

COMMENT ON FUNCTION ratelimit.hold_many(text, text, text[], boolean) IS $text$
Takes one slot for each of many ids, without an end, in the caller's transaction, all or nothing: it raises an error if there are not enough. It
is ratelimit.hold with forever => true for each id, and takes each once. It returns how many were taken: those that are held already are not.

    SELECT ratelimit.hold_many('projects', team, array_agg(id)) FROM (SELECT team, id FROM come ORDER BY team COLLATE "C") AS c GROUP BY team

Arguments:
  name    the name of the limit, of slots
  key     the key as it is stored; NULL or empty is an error, unless global is true
  ids     as the id of ratelimit.hold
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  PT429, PT409  nothing was taken. As of ratelimit.hold
  22023    an argument is invalid, the limit has no slots, no program has published it, or only the program knows their number
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Ends holds of slots without an end. The limit's row is locked first, if there is one, and then the holds, in the order of their ids.
CREATE FUNCTION ratelimit._release_many(name text, key text, ids text[], global boolean) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    own  text COLLATE "C" := coalesce(key, '');
    at   timestamptz;
    n    integer := 0;
    x    double precision := 0;
    one  text;
    rec  record;
BEGIN
    ids := ratelimit._many(name, key, ids, global);
    IF EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = own)
       OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN -- there, holds that are newer than the snapshot are 40001
        PERFORM ratelimit._lock(ARRAY[name], ARRAY[own::text], ARRAY['0'::double precision], ARRAY[1], NULL);
    END IF;
    at := clock_timestamp();
    FOREACH one IN ARRAY ids LOOP
        SELECT h.state, h.unit, h.token, h.count, h.until INTO rec FROM ratelimit.holds AS h
         WHERE h.name = name AND h.key = own AND h.id = one FOR UPDATE;
        CONTINUE WHEN rec.state IS DISTINCT FROM 'held' OR rec.until <= at;
        IF rec.token IS NOT NULL OR rec.unit <> 'slots' THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: one of these is not a hold of slots without an end', name),
                HINT = 'Call ratelimit.release for it.';
        END IF;
        DELETE FROM ratelimit.holds AS h WHERE h.name = name AND h.key = own AND h.id = one;
        n := n + 1;
        x := x + rec.count;
    END LOOP;
    UPDATE ratelimit.limits AS r SET value = least(r.value + x, '0'), ts = greatest(r.ts, at) WHERE r.name = name AND r.key = own AND r.shard = 0 AND n > 0;
    RETURN n;
END
$body$;

CREATE FUNCTION ratelimit.release_many(name text, key text DEFAULT NULL, ids text[] DEFAULT NULL, global boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN ratelimit._release_many(name COLLATE "C", key COLLATE "C", ids, global);
END
$body$;

COMMENT ON FUNCTION ratelimit.release_many(text, text, text[], boolean) IS $text$
Ends holds of slots without an end, as ratelimit.release for each id, in the caller's transaction. It returns how many there were. It needs no numbers.

    SELECT ratelimit.release_many('projects', 'team 7', ARRAY['project 17', 'project 18'])

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  ids     of holds without an end
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023    an argument is invalid, or one of the holds has an end, or is of tokens. Nothing was released
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Counts the slots in use again. The limit's row is locked first, then the holds, so that a sweep that ends some is waited for. Each hold is
-- written: above READ COMMITTED, a release that has seen no row of the limit is 40001 then.
CREATE FUNCTION ratelimit._recount(name text, key text, global boolean) RETURNS double precision
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    own  text COLLATE "C" := coalesce(key, '');
    kind text := (ratelimit._defined(name)).kind;
    at   timestamptz;
    used double precision;
BEGIN
    PERFORM ratelimit._many(name, key, '{}', global);
    IF kind IS DISTINCT FROM 'slots'
       AND NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: it has no slots', name);
    END IF;
    PERFORM ratelimit._lock(ARRAY[name], ARRAY[own::text], ARRAY['0'::double precision], ARRAY[1], NULL);
    at := clock_timestamp();
    PERFORM 1 FROM ratelimit.holds AS h
      WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots' ORDER BY h.id FOR UPDATE;
    WITH counted AS (
        UPDATE ratelimit.holds AS h SET count = h.count
         WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots'
        RETURNING h.count
    )
    SELECT coalesce(sum(c.count), '0') INTO used FROM counted AS c;
    UPDATE ratelimit.limits AS r SET value = '0'::double precision - used, ts = greatest(r.ts, at), lapses = '-infinity' WHERE r.name = name AND r.key = own AND r.shard = 0;
    RETURN used;
END
$body$;

CREATE FUNCTION ratelimit.recount(name text, key text DEFAULT NULL, global boolean DEFAULT false) RETURNS double precision
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RETURN ratelimit._recount(name COLLATE "C", key COLLATE "C", global);
END
$body$;

COMMENT ON FUNCTION ratelimit.recount(text, text, boolean) IS $text$
Counts the slots of a key again: those that its holds have are in use, and no others. It returns how many. Call it after rows of ratelimit.limits or of
ratelimit.holds were lost: a TRUNCATE, a restore of one of the tables.

    SELECT ratelimit.recount('projects', 'team 7')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023    an argument is invalid, or the limit has no slots
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Pauses: a token bucket is emptied, and refilled from a later instant on. A pause is nothing but a lower value and a later ts, so every
-- function that decides finds it in the row. Limit.Pause in internal/algebra has the rule.

-- Lowers the balance of token buckets to at most `most`, and sets ts to `until`, if it is not later already: of two pauses the later until
-- and the lower balance hold. Missing rows are inserted. Returns the instant from which on all of them are refilled.
--
-- Locks all rows of each limit. The arguments must be in the common order (name, key) (CONCURRENCY.md, K).
CREATE FUNCTION ratelimit._pause(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], shards integer[],
    mosts double precision[], until timestamptz, now timestamptz DEFAULT NULL
) RETURNS timestamptz
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
#variable_conflict use_variable
DECLARE
    n      CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    ends   timestamptz;        -- the latest end of the pauses
    at     timestamptz := coalesce(now, clock_timestamp());
    v      double precision[]; -- the values of one limit's rows
    t      timestamptz[];      -- their ts
    m      integer;            -- their number
    latest timestamptz;        -- from then on, the limit is refilled
    value  double precision;   -- of each row
BEGIN
    -- A day more than callers are told, since their clocks differ.
    IF (n > 0 AND n = pg_catalog.cardinality(keys) AND n = pg_catalog.cardinality(mosts) AND isfinite(until) AND until <= at + interval '32 days') IS NOT TRUE
       OR EXISTS (SELECT 1 FROM pg_catalog.generate_subscripts(names, 1) AS p
           WHERE (ratelimit._valid(rates[p], periods[p], capacities[p], mosts[p], now) AND rates[p] > '0' AND shards[p] BETWEEN 1 AND 100
               AND (p = 1 OR (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (names[p] COLLATE "C", keys[p] COLLATE "C"))) IS NOT TRUE) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    PERFORM ratelimit._check_keyless(u.name, u.key) FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(keys)) AS u (name, key);
    PERFORM ratelimit._lock(names, keys, capacities, shards, now);
    at := coalesce(now, clock_timestamp()); -- locking may have waited
    FOR i IN 1..n LOOP
        PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], NULL, at, NULL);
        SELECT pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), count(*), greatest(max(r.ts), at, until)
          INTO v, t, m, latest
          FROM ratelimit.limits AS r
         WHERE r.name = names[i] AND r.key = keys[i];
        value := least(ratelimit._total(v, t, at, rates[i], periods[i], capacities[i], NULL), mosts[i]) / m::double precision;
        UPDATE ratelimit.limits AS r SET value = value, ts = latest
         WHERE r.name = names[i] AND r.key = keys[i];
        ends := greatest(ends, latest);
    END LOOP;
    RETURN ends;
END
$body$;

-- Ends pauses: limits whose ts lies ahead are refilled from now on. What was emptied stays gone. Returns how many rows were paused.
--
-- Locks all rows of each limit, in the common order (name, key, shard).
CREATE FUNCTION ratelimit._resume(names text[], keys text[], now timestamptz DEFAULT NULL) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    resumed integer := 0;
    at      timestamptz;
    m       integer;
    r       record;
BEGIN
    IF NOT isfinite(now) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        PERFORM 1 FROM ratelimit.limits AS t WHERE t.name = r.name AND t.key = r.key ORDER BY t.shard FOR UPDATE;
        at := coalesce(now, clock_timestamp()); -- locking may have waited
        UPDATE ratelimit.limits AS t SET ts = at WHERE t.name = r.name AND t.key = r.key AND t.ts > at;
        GET DIAGNOSTICS m = ROW_COUNT;
        IF m = 0 THEN
            PERFORM ratelimit._check_keyless(r.name, r.key);
        END IF;
        resumed := resumed + m;
    END LOOP;
    RETURN resumed;
END
$body$;

CREATE FUNCTION ratelimit.pause(
    name text, key text DEFAULT NULL, until timestamptz DEFAULT NULL, remaining double precision DEFAULT 0,
    rate double precision DEFAULT NULL, period interval DEFAULT NULL, capacity double precision DEFAULT NULL,
    shards integer DEFAULT 1, global boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    kind  text := 'token bucket';
    n     record; -- the published numbers
    at    timestamptz := clock_timestamp();
    wrong text;
BEGIN
    IF coalesce(rate, capacity) IS NULL AND period IS NULL AND shards = 1 THEN
        -- Beside a block, or an override that lifts the limit: the pause is there when that ends.
        SELECT f.* INTO n FROM ratelimit._numbers(name COLLATE "C", key COLLATE "C", at, standing => true) AS f;
        kind := n.kind;
        rate := n.rate;
        period := n.period;
        capacity := n.capacity;
        shards := n.shards;
    ELSE
        BEGIN
            kind := CASE (ratelimit._defined(name COLLATE "C")).kind WHEN 'slots' THEN 'slots' ELSE kind END;
        EXCEPTION WHEN insufficient_privilege THEN
            NULL; -- a role that gives the numbers need not see what programs have published
        END;
    END IF;
    IF kind = 'token bucket' THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, NULL, NULL, shards, NULL, NULL, zero => true);
    END IF;
    wrong := CASE
        WHEN kind <> 'token bucket' THEN pg_catalog.format('only a token bucket can be paused, and its kind is %L', kind)
        WHEN until IS NULL OR NOT isfinite(until) OR until > at + interval '31 days' OR until < at - interval '31 days' THEN
            pg_catalog.format('until must be at most 31 days away, not %s', coalesce(until::text, 'NULL'))
        WHEN remaining IS NULL OR NOT (remaining = '0' OR remaining BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('remaining must be 0 or between 1e-15 and 1e15, not %s', coalesce(remaining::text, 'NULL'))
        ELSE ratelimit._wrong_key(key, global) END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;
    IF until <= at THEN -- it is over
        RETURN NULL;
    END IF;
    IF rate > '0' THEN -- otherwise it grants nothing anyway, and has no rows
        RETURN ratelimit._pause(ARRAY[name COLLATE "C"], ARRAY[coalesce(key, '') COLLATE "C"], ARRAY[rate], ARRAY[period],
            ARRAY[coalesce(capacity, rate)], ARRAY[shards], ARRAY[remaining], until);
    END IF;
    RETURN NULL;
END
$body$;

COMMENT ON FUNCTION ratelimit.pause(text, text, timestamptz, double precision, double precision, interval, double precision, integer, boolean) IS $text$
Empties a token bucket, and refills nothing before an instant. A provider has said so: Retry-After. It returns the instant from which on the
limit is refilled: until or, if it was paused until later, that. NULL: there was nothing to do, since until has passed, or the rate is 0.

    SELECT ratelimit.pause('provider', 'eu', until => now() + interval '30 seconds');
    SELECT ratelimit.pause('provider', until => now() + interval '30 seconds', remaining => 3, global => true);

Reservations that were made before keep their instant. Meanwhile refunds repay only what is owed. ratelimit.reset makes the key full, and
so ends the pause; ratelimit.resume ends it, too, but what was emptied stays gone. An unlimited override grants all the same.

Arguments:
  name       the name of the limit
  key        the key as it is stored; NULL or empty is an error, unless global is true
  until      the instant, at most 31 days away. Let the server compute it: now() + '30 seconds'. A client's clock may be wrong
  remaining  at most so many tokens are left; default 0. It adds none
  rate       tokens per period, and so on, as for ratelimit.consume. Without any numbers, they are those that a program has published
  period
  capacity
  shards
  global     true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023   an argument is invalid, or the limit is no token bucket; with numbers, if a program has published it as slots
$text$;

CREATE FUNCTION ratelimit.resume(name text, key text DEFAULT NULL, global boolean DEFAULT false) RETURNS boolean
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        ELSE ratelimit._wrong_key(key, global) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    PERFORM ratelimit._check_known(name COLLATE "C");
    RETURN ratelimit._resume(ARRAY[name], ARRAY[coalesce(key, '')]) > 0;
END
$body$;

COMMENT ON FUNCTION ratelimit.resume(text, text, boolean) IS $text$
Ends the pause of a token bucket: it is refilled from now on. What was emptied stays gone. It returns whether the key was paused.

    SELECT ratelimit.resume('provider', 'eu')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023   an argument is invalid
$text$;

-- The names that rows have, in order, at most so many of them; NULL: all. Each is one look-up in the primary key. A recursive query would do
-- the same, but Citus has none over a table that is distributed by key.
CREATE FUNCTION ratelimit._stored_names(most integer) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    last text := '';
    n    integer := 0;
BEGIN
    LOOP
        last := (SELECT r.name FROM ratelimit.limits AS r WHERE r.name > last ORDER BY r.name LIMIT 1);
        EXIT WHEN last IS NULL;
        RETURN NEXT last;
        n := n + 1;
        EXIT WHEN n >= most;
    END LOOP;
END
$body$;

-- The keys of a limit that have rows, from `first` on and below `below` (NULL: to the last), in order, at most so many of them. Each is one
-- look-up, however many shards it has.
CREATE FUNCTION ratelimit._stored_keys(name text, first text, below text, most integer) RETURNS SETOF text
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    last text := (SELECT r.key FROM ratelimit.limits AS r WHERE r.name = name AND r.key >= first ORDER BY r.key LIMIT 1);
    n    integer := 0;
BEGIN
    WHILE n < most AND (last COLLATE "C" < below OR below IS NULL AND last IS NOT NULL) LOOP
        RETURN NEXT last;
        n := n + 1;
        last := (SELECT r.key FROM ratelimit.limits AS r WHERE r.name = name AND r.key > last ORDER BY r.key LIMIT 1);
    END LOOP;
END
$body$;

-- The rows of a limit, by key: of some keys or, without them, of all.
CREATE FUNCTION ratelimit._rows(name text, keys text[]) RETURNS TABLE (key text, value double precision[], ts timestamptz[], lapses timestamptz)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    one text;
BEGIN
    IF keys IS NULL THEN
        RETURN QUERY SELECT r.key, pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), min(r.lapses)
          FROM ratelimit.limits AS r WHERE r.name = name GROUP BY r.key;
        RETURN;
    END IF;
    FOR one IN SELECT DISTINCT u.key FROM pg_catalog.unnest(keys) AS u (key) LOOP -- for all at once, the planner may read the limit
        RETURN QUERY SELECT r.key, pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), min(r.lapses)
          FROM ratelimit.limits AS r WHERE r.name = name AND r.key = one GROUP BY r.key;
    END LOOP;
END
$body$;

-- The slots of a key, if there are so many: those in use, without those whose holds have expired; those that are free, below zero if fewer are
-- granted than are in use; and, if fewer than count are free, when so many are at the latest, if nobody extends. infinity: no expiry frees them.
CREATE FUNCTION ratelimit._free_slots(
    name text, key text, capacity double precision, at timestamptz, count double precision, OUT used double precision, OUT free double precision, OUT retry_at timestamptz
)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    value double precision[];
BEGIN
    SELECT l.value INTO value FROM ratelimit._lapsed(name, key, at, 0, '1 second', 0, NULL, NULL) AS l;
    used := '0' - least(coalesce(value[1], '0'), '0');
    free := capacity - used;
    retry_at := CASE WHEN free < count THEN coalesce(CASE WHEN capacity >= count THEN
        ratelimit._free_at(name, key, count, -capacity, at) END, 'infinity') END;
END
$body$;

-- What a key has at an instant, by the terms in force for it and its rows (none: it is full).
--   used       slots in use, without those whose holds have expired; NULL: it has tokens
--   remaining  tokens, or free slots; Infinity: unlimited. NULL: not known, or a row is of no program, since its ts is infinite
--   retry_at   what a denied call for one token says, or for all where the capacity is less: of a block, when no block denies any more.
--              infinity: never, or not known. NULL: it would be granted
--   not_before if that is not known: retry_at is not earlier, since an override ends then, and only the program knows the numbers that follow
--   paused_until  nothing is refilled before it, as ratelimit.pause says; NULL: that is not so, or for less than a second more, in which a row may
--              be used between two looks at the clock. Only for a token bucket that has a rate, also beside a block
--   numbers    the terms beside a block
-- whole: more about one key. Then a block changes no numbers:
--   owed_until nothing is owed from then on; NULL: nothing is, or that is never or not known
--   full_at    the same of a limit that is full
--   known_until the end of the override after which only the program knows the numbers; NULL: there is none. owed_until and full_at are
--              earlier, or not known
-- windows: of a calendar, by these terms. Both this and beside, the terms beside a block, are NULL if the caller has none.
CREATE FUNCTION ratelimit._state(
    name text, key text, n ratelimit._terms, value double precision[], ts timestamptz[], lapses timestamptz, at timestamptz,
    given ratelimit._terms, windows timestamptz[], beside ratelimit._terms, whole boolean,
    OUT used double precision, OUT remaining double precision, OUT retry_at timestamptz, OUT paused_until timestamptz,
    OUT numbers ratelimit._terms, OUT owed_until timestamptz, OUT full_at timestamptz,
    OUT not_before timestamptz, OUT known_until timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    q      ratelimit._request := ratelimit._ask(name, key, n, at, given, windows);
    s      ratelimit._request := q; -- what stands beside a block
    broken boolean := 'infinity' = ANY (ts) OR '-infinity' = ANY (ts);
    total  double precision;
    latest timestamptz := (SELECT max(u.t) FROM pg_catalog.unnest(ts) AS u (t));
    ahead  boolean := latest > at + interval '1 second' AND NOT broken;
BEGIN
    value := coalesce(value, '{}');
    ts := coalesce(ts, '{}');
    numbers := n;
    IF n.effect = 'block' THEN
        numbers := coalesce(beside, ratelimit._numbers(name, nullif(key, ''), at, varying => true, standing => true, given => given));
        IF whole THEN
            s := ratelimit._ask(name, key, numbers, at, given);
        END IF;
    END IF;
    IF n.kind = 'slots' THEN
        SELECT f.used, f.free INTO used, remaining FROM ratelimit._free_slots(name, key, -s.floor, at, 1) AS f;
    ELSIF s.effect = 'numbers' AND NOT coalesce(broken, false) THEN
        IF lapses <= at THEN
            SELECT l.value, l.ts INTO value, ts FROM ratelimit._lapsed(name, key, at, s.rate, s.period, s.capacity, s.start, s.windows) AS l;
        END IF;
        total := ratelimit._total(value, ts, at, s.rate, s.period, s.capacity, s.start, s.windows);
        remaining := ratelimit._shown(total, s.rate, s.capacity);
    END IF;
    remaining := CASE WHEN s.effect = 'unlimited' THEN 'Infinity'
        WHEN n.effect = 'block' AND NOT whole OR s.effect = 'block' AND n.kind <> 'slots' THEN 0 -- of no slots, some may be in use
        ELSE remaining END;
    retry_at := CASE
        WHEN q.effect IN ('unlimited', 'varies') OR q.effect = 'numbers' AND total >= q.count OR q.effect = 'slots' AND remaining >= '1' THEN NULL
        WHEN q.effect = 'numbers' AND broken THEN 'infinity'
        ELSE nullif(coalesce(ratelimit._retry_at('balance', q, CASE WHEN q.effect <> 'block' THEN value END, ts, at), 'infinity'), at) END;
    IF n.varies IS NOT NULL AND n.effect <> 'block' AND retry_at < 'infinity' THEN
        not_before := ratelimit._known_until(q, standing => false);
        IF retry_at >= not_before THEN
            retry_at := 'infinity';
        ELSE
            not_before := NULL;
        END IF;
    END IF;
    IF ahead AND numbers.kind = 'token bucket' AND (numbers.effect = 'numbers' AND numbers.rate > '0' OR numbers.effect = 'varies') THEN
        paused_until := least(latest, '9999-12-31 00:00+00');
    END IF;
    IF whole AND total IS NOT NULL THEN
        owed_until := nullif(ratelimit._full_at('balance', s, value, ts, at, owed => true), at);
        full_at := nullif(ratelimit._full_at('balance', s, value, ts, at), at);
    END IF;
    known_until := CASE WHEN whole AND n.varies IS NOT NULL THEN ratelimit._known_until(s, standing => true) END;
END
$body$;

-- The states of the keys of a limit that have rows, or by an override of their own need none (a block, no limit, a rate of 0, no slots): some keys, or all. It is what ratelimit.keys, the tool and
-- the page show. given: in place of the published definition (ratelimit._state has the rest). alone: no override counts.
--
-- whole: all of what ratelimit._state says, also of those of the keys that have no row.
CREATE FUNCTION ratelimit._states(
    name text, keys text[], at timestamptz, given ratelimit._terms DEFAULT NULL, alone boolean DEFAULT false, whole boolean DEFAULT false
) RETURNS TABLE (
    key text, effect text, override bigint, until timestamptz, -- of what is in force
    rows integer, stored double precision, last_use timestamptz, broken boolean, -- of its rows; broken: an instant is infinite
    used double precision, remaining double precision, retry_at timestamptz, paused_until timestamptz,
    numbers ratelimit._terms, owed_until timestamptz, full_at timestamptz, not_before timestamptz, known_until timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    d       ratelimit._terms;
    every   ratelimit._terms; -- of the keys without an override of their own
    beside  ratelimit._terms; -- the same beside a block
    windows timestamptz[];
BEGIN
    IF NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: now must be finite, not %s', name, at);
    END IF;
    IF alone THEN
        every := given;
    ELSE
        PERFORM ratelimit._numbers(name, NULL, at, '0', varying => true, given => given); -- which is an error, if nobody has published it
        d := CASE WHEN given.kind IS NULL THEN ratelimit._defined(name) ELSE given END;
        every := ratelimit._numbers(name, NULL, at, varying => true, given => d);
        beside := ratelimit._numbers(name, NULL, at, varying => true, standing => true, given => d);
    END IF;
    windows := (ratelimit._ask(name, '', every, at, given)).windows;
    RETURN QUERY
        SELECT k.key, (k.n).effect, (k.n).override, (k.n).until, coalesce(pg_catalog.cardinality(k.value), 0),
               (SELECT sum(u.v) FROM pg_catalog.unnest(k.value) AS u (v)),
               (SELECT CASE WHEN isfinite(max(u.t)) THEN least(greatest(max(u.t), '0001-01-01 00:00+00'), '9999-12-31 00:00+00') END FROM pg_catalog.unnest(k.ts) AS u (t)),
               coalesce('infinity' = ANY (k.ts) OR '-infinity' = ANY (k.ts), false),
               s.used, s.remaining, s.retry_at, s.paused_until, s.numbers, s.owed_until, s.full_at, s.not_before, s.known_until
          FROM (
            SELECT coalesce(r.key, o.key, w.key) COLLATE "C" AS key, r.value, r.ts, r.lapses, o.key IS NOT NULL AS own,
                   CASE WHEN o.key IS NOT NULL THEN ratelimit._under(d, o.of) ELSE every END AS n
              FROM ratelimit._rows(name, keys) AS r
              FULL JOIN (
                SELECT DISTINCT ON (f.key) f.key, f AS of FROM ratelimit._in_force(name, keys, at) AS f
                 WHERE f.key IS NOT NULL AND NOT alone
                 ORDER BY f.key, f.effect = 'block' DESC, f.made_at DESC, f.id DESC
              ) AS o ON o.key = r.key COLLATE "C"
              FULL JOIN (SELECT u.key FROM pg_catalog.unnest(keys) AS u (key) WHERE whole GROUP BY u.key) AS w ON w.key = coalesce(r.key, o.key) COLLATE "C"
            OFFSET 0
          ) AS k
         CROSS JOIN LATERAL ratelimit._state(name, k.key, k.n, k.value, k.ts, k.lapses, at, given, CASE WHEN NOT k.own THEN windows END, CASE WHEN NOT k.own THEN beside END, whole) AS s
         WHERE whole OR k.value IS NOT NULL OR k.own AND ((k.n).effect IN ('block', 'unlimited') OR (k.n).effect = 'numbers' AND CASE (k.n).kind WHEN 'slots' THEN (k.n).capacity ELSE (k.n).rate END = '0');
END
$body$;

-- The same as ratelimit.keys, at an instant that tests choose.
CREATE FUNCTION ratelimit._keys(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    zone text, anchor timestamp, keys text[], now timestamptz
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz, paused_until timestamptz, most double precision, used double precision)
LANGUAGE plpgsql STABLE
AS $body$
#variable_conflict use_variable
DECLARE
    given ratelimit._terms; -- if there are numbers, they alone count
BEGIN
    IF (pg_catalog.num_nonnulls(rate, capacity, period, start, zone, anchor) = 0 AND kind = 'token bucket') IS NOT TRUE THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, NULL, 1, zone, anchor);
        given := ROW('numbers', NULL, NULL, kind, rate, period, coalesce(capacity, rate), NULL, start, 1,
            CASE kind WHEN 'calendar window' THEN coalesce(zone, 'UTC') END, CASE kind WHEN 'calendar window' THEN coalesce(anchor, '2001-01-01') END, NULL);
    END IF;
    RETURN QUERY SELECT s.key, s.remaining, s.retry_at, s.paused_until, n.most, coalesce(s.used, CASE WHEN s.effect = 'numbers' THEN n.most - s.remaining END)
      FROM ratelimit._states(name, keys, coalesce(now, clock_timestamp()), given, alone => given.kind IS NOT NULL) AS s
     CROSS JOIN LATERAL (SELECT CASE WHEN (s.numbers).effect = 'numbers' THEN (s.numbers).capacity END AS most) AS n;
END
$body$;

CREATE FUNCTION ratelimit.keys(
    name text, rate double precision DEFAULT NULL, period interval DEFAULT NULL, kind text DEFAULT 'token bucket',
    OUT key text, OUT remaining double precision, INOUT capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL, keys text[] DEFAULT NULL,
    OUT used double precision, OUT retry_at timestamptz, OUT paused_until timestamptz
) RETURNS SETOF record
LANGUAGE sql STABLE
AS $body$
    SELECT k.key, k.remaining, k.most, k.used, k.retry_at, k.paused_until
      FROM ratelimit._keys(name COLLATE "C", rate, period, kind, capacity, start, zone, anchor, keys, NULL) AS k
$body$;

COMMENT ON FUNCTION ratelimit.keys(text, double precision, interval, text, double precision, timestamptz, text, timestamp, text[]) IS $text$
The keys of a rate limit that have been used, and their tokens now. It writes and locks nothing. The limited keys:

    SELECT * FROM ratelimit.keys('sendMessage', rate => 10, period => '1 minute') WHERE retry_at IS NOT NULL ORDER BY remaining

Result, one row for each key:
  key        the key as it is stored; '' for a limit without keys
  remaining  the balance in tokens; below zero if tokens are owed. Of slots, how many are free; below zero if fewer are granted than
             are in use. Holds that have expired are free
  capacity   the most tokens that it can have by the numbers in force, or how many slots there are; NULL: it is unlimited, or only the program
             knows
  used       the slots in use, or the tokens that are missing to the capacity. NULL: not known, or it has tokens and is blocked or unlimited
  retry_at   the instant at which there will be one token, or at which a limit with a capacity below 1 will be full. NULL: there
             are enough tokens now. Of slots, when one is free at the latest; infinity: no expiry frees one. If an override says
             that there are none, when it ends. It is what a denied
             call for one token says. So of a blocked key it is when no block denies any more, whether the tokens are there then or
             not, and infinity if the block has no end. infinity also stands for an instant that is not known: an override ends
             before it, and the program gives this key numbers of its own
  paused_until  of a token bucket: nothing is refilled before it (ratelimit.pause, or a clock leapt ahead). NULL: it is not paused, or
             for less than a second more. A key may be paused and have tokens, or be blocked, too

The arguments and their defaults are the same as for ratelimit.consume, and
  keys       only these keys; default NULL: all that have a row

Without any numbers, they are those that a program has published, each key's under the override in force for it:

    SELECT * FROM ratelimit.keys('sendMessage') WHERE retry_at IS NOT NULL ORDER BY remaining

If an override ends before, retry_at is by what follows. A blocked key has remaining 0, and an unlimited one Infinity. Numbers other than the program's
give another answer. If the program gives some keys numbers of their own, remaining and retry_at are NULL without numbers: they are not
known. remaining NULL with retry_at infinity is a key whose row no program has written: its ts is infinite. Every call for it fails until
ratelimit.reset. An invalid argument is an error, SQLSTATE 22023.
$text$;

-- Deletes idle rows, so that the table does not grow with every key ever used. An idle row has exactly the tokens of a
-- missing one.
-- Sweep of the Go library calls it batch after batch; psql can, too.
--
-- An index on value or ts would find such rows, but would end heap-only updates. Instead, each batch looks at the next 1000 rows of
-- the primary key, from where the batch before ended.

-- Who sweeps: programs take turns, so that a limit is walked once in the time between two sweeps, however many there are. at is the last batch of a
-- pass, done_at the end of the last one. name '': the holds of all limits. A lock of a row needs the right to update it; an advisory lock needs none,
-- and whoever takes it would stop all sweeps.
CREATE TABLE ratelimit.sweeps (
    name    text COLLATE "C" PRIMARY KEY,
    at      timestamptz NOT NULL,
    done_at timestamptz NOT NULL
);

COMMENT ON TABLE ratelimit.sweeps IS 'txlimit: when each limit was swept last, so that programs take turns';

COMMENT ON COLUMN ratelimit.sweeps.name IS 'the name of the limit; '''': the holds of all limits';

COMMENT ON COLUMN ratelimit.sweeps.at IS 'the instant of the last batch';

COMMENT ON COLUMN ratelimit.sweeps.done_at IS 'when a pass over all rows was completed last';

-- Says whether the caller may begin or go on with a pass, in this transaction: mine, and then its mark is at, which is to be passed as mine next;
-- other: another program does, or has within `since`; locked: somebody has the row. step: begin; go on; or end, after the last batch. A pass whose
-- program has done nothing for a minute is begun anew by another one, and its own finds another mark. It waits for no lock but a first row's.
CREATE FUNCTION ratelimit._sweep_turn(
    name text, step text, since interval, mine timestamptz, OUT state text, OUT at timestamptz
)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    now    timestamptz := clock_timestamp();
    minute timestamptz := now - interval '1 minute';
    rec    record;
BEGIN
    IF (SELECT row_security_active(y.typrelid) FROM pg_catalog.pg_type AS y WHERE y.oid = pg_catalog.pg_typeof(NULL::ratelimit.limits)::oid) THEN
        state := 'mine'; -- it sees some of the rows, so its pass is nobody else's
        at := now;
        RETURN;
    END IF;
    SELECT s.at, s.done_at INTO rec FROM ratelimit.sweeps AS s WHERE s.name = name;
    IF NOT FOUND THEN
        INSERT INTO ratelimit.sweeps AS s (name, at, done_at) VALUES (name, '-infinity', '-infinity') ON CONFLICT DO NOTHING;
    END IF;
    state := CASE WHEN step = 'begin' AND rec.at BETWEEN minute AND now THEN 'other' ELSE 'locked' END;
    SELECT s.at, s.done_at INTO rec FROM ratelimit.sweeps AS s WHERE s.name = name FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    now := clock_timestamp(); -- under the lock, what others have written lies behind it
    minute := now - interval '1 minute';
    -- An instant that lies ahead is of a clock that has stepped back, and says nothing.
    IF (CASE WHEN step = 'begin' THEN (rec.done_at BETWEEN now - since AND now) IS NOT TRUE AND (rec.at = mine OR (rec.at BETWEEN minute AND now) IS NOT TRUE)
             ELSE rec.at = mine END) THEN
        state := 'mine';
        at := now;
        UPDATE ratelimit.sweeps AS s SET at = now, done_at = CASE WHEN step = 'end' THEN now ELSE s.done_at END WHERE s.name = name;
    ELSE
        state := 'other';
    END IF;
END
$body$;

-- Reports whether a row, one of `shards`, was full at an instant and at every later one. Then no call can tell it from a missing row. A
-- row whose ts lies after the last refill before that instant (see ratelimit._upto) differs from a missing one: its refills begin at its ts.
-- Rows written by hand must not stop a sweep: infinite instants, which cannot be subtracted, and 0 shards.
--
-- rate: NULL if all definitions vary, and for slots, whose varies is 0: such a row says nothing if no slot is in use. varies: a key has numbers that are not known here, but within this time they fill a row from 0. A
-- row in debt may need longer, and stays. Less than the smallest count is no debt.
CREATE FUNCTION ratelimit._idle(
    value double precision, ts timestamptz, shards smallint, at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, varies interval
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN isfinite(ts) AND ts <= ratelimit._upto(at, period, start) AND shards > 0 THEN
    (rate IS NULL OR ratelimit._available(value, ts, ratelimit._upto(at, period, start),
            rate / shards::double precision, period, capacity / shards::double precision, start) = capacity / shards::double precision)
    AND (varies IS NULL OR value > '-1e-15' AND date_part('epoch', at - ts) > date_part('epoch', varies))
    ELSE false END;

-- Returns the numbers of a sweep. A row is deleted if it is full by every definition that counts, of any program or version: the one
-- passed, those that are current, and those that were within 7 days, since older processes may still use them. So they are joined: what is
-- full by the largest capacity and the slowest rate is full by each of them, under each override. An override that ended less than a day
-- ago counts, too: a process may not know yet. Where definitions vary, their numbers say nothing, and varies is the longest of them.
-- nothing: there are no rows to sweep, or they do not all refill alike, or an override of all keys changes numbers that are not known.
CREATE FUNCTION ratelimit._sweep_numbers(
    name text, INOUT rate double precision, INOUT period interval, INOUT kind text, INOUT capacity double precision, INOUT start timestamptz,
    INOUT varies interval, OUT nothing boolean
)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    since timestamptz := clock_timestamp() - interval '1 day';
    given boolean := pg_catalog.num_nonnulls(rate, period, capacity, start, varies) > 0 OR kind IS DISTINCT FROM 'token bucket';
BEGIN
    IF kind = 'slots' THEN
        PERFORM ratelimit._validate_slots(name, capacity);
        IF pg_catalog.num_nonnulls(rate, period, start) > 0 OR varies <> '0' THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: rate, period, start and varies must be NULL for slots', name);
        END IF;
    ELSIF given THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, NULL, 1, NULL, NULL,
            zero => varies IS NOT NULL);
        capacity := coalesce(capacity, rate);
        IF varies IS NOT NULL THEN
            PERFORM ratelimit._validate_varies(name, rate, period, kind, capacity, varies);
        END IF;
    ELSIF NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d
            WHERE d.name = name AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')) THEN
        PERFORM ratelimit._numbers(name, NULL, since, '0'); -- which is an error
    END IF;
    WITH o AS MATERIALIZED ( -- read once, however many definitions there are
        SELECT min(o.rate) AS slowest, max(o.rate) AS fastest, max(o.capacity) AS largest
          FROM ratelimit.overrides AS o
         WHERE o.name = name AND o.effect = 'numbers' AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > since
             AND coalesce(least(o.until, o.removed_at), 'infinity') > since AND coalesce(o.rate, '1') > '0'
         GROUP BY o.rate IS NULL, o.capacity IS NULL
    )
    SELECT coalesce(count(*) = '0' OR min(d.kind) <> max(d.kind) OR min(d.period) <> max(d.period)
               OR min(d.grid) <> max(d.grid) OR count(d.grid) NOT IN ('0', count(*)), false), -- slots have no period
           min(d.kind), min(d.period), min(d.start), min(n.rate), max(n.capacity), max(d.varies)
      INTO nothing, kind, period, start, rate, capacity, varies
      FROM (
        SELECT d.*, d.start - date_bin(d.period, d.start, '2000-01-01 00:00+00') AS grid
          FROM (
            SELECT d.kind, d.period, d.start, d.rate, d.capacity, d.varies
              FROM ratelimit.definitions AS d
             WHERE d.name = name AND d.kind <> 'unlimited' AND (d.current OR d.published_at > clock_timestamp() - interval '7 days')
            UNION ALL
            SELECT kind, period, start, rate, capacity, varies WHERE given
          ) AS d
      ) AS d
      LEFT JOIN LATERAL (
        SELECT d.rate, d.capacity
        UNION ALL
        SELECT coalesce(o.slowest, d.rate), ratelimit._capacity(d.rate, d.capacity, o.fastest, o.largest) FROM o
     ) AS n ON d.varies IS NULL
     WHERE n.rate > '0' OR d.varies IS NOT NULL OR d.kind = 'slots';
    IF kind = 'slots' THEN -- a row says nothing once no slot is in use, whatever the numbers
        rate := NULL;
        varies := '0';
        RETURN;
    END IF;
    nothing := nothing OR varies IS NOT NULL AND EXISTS (SELECT 1 FROM ratelimit.overrides AS o
         WHERE o.name = name AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > since
             AND coalesce(least(o.until, o.removed_at), 'infinity') > since);
END
$body$;

-- Sweeps one batch. It deletes all rows of a key or none: a missing shard is not full while other shards have rows.
--
-- It locks only the rows that it deletes and never waits for a lock: locked rows are in use and stay. There are three statements,
-- each with its own snapshot: a plain read, since locking writes; locking, which checks the row's latest version; and the DELETE,
-- which sees the locked rows (CONCURRENCY.md, F3).
--
-- The numbers are those of ratelimit._sweep_numbers. If they vary, keys with an override stay.
CREATE FUNCTION ratelimit._sweep_rows(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, varies interval,
    first text, now timestamptz,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
-- Read along the primary key, whatever the statistics say.
SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    -- Rows must have been full an hour ago: then a clock that steps back by up to an hour after a sweep changes nothing.
    at   timestamptz := coalesce(now, clock_timestamp()) - interval '1 hour';
    keys text[]; -- the keys whose rows are all idle: according to a plain read, then locked
    held text[]; -- those of which something may be held
    kept timestamptz := at + interval '7 days';
    own  text;   -- the id of a hold
    k    text;
    n    integer;
    grid timestamptz; -- the start of the windows of k
    idle boolean;     -- k
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    IF first IS NULL OR NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name,
            CASE WHEN first IS NULL THEN 'first must be a key or '''', not NULL' ELSE pg_catalog.format('now must be finite, not %s', now) END);
    END IF;
    deleted := 0;
    -- Each key may have a zone and an anchor of its own. By any of them, as many windows have begun since ts as the longest
    -- windows fit in between, so the grid of a calendar window begins at ts.
    IF kind = 'calendar window' THEN
        period := ratelimit._longest(period);
    END IF;

    SELECT pg_catalog.array_agg(k.key) FILTER (WHERE k.idle), CASE WHEN sum(k.rows) = '1000' THEN max(k.key) END INTO keys, next
      FROM (
        SELECT r.key, count(*) AS rows, count(*) = min(r.shards) AND count(*) = max(r.shards) AND bool_and(
               ratelimit._idle(r.value, r.ts, r.shards, at,
                   rate, period, capacity, r.grid, varies)) AS idle
          FROM (
            SELECT r.*, CASE WHEN NOT isfinite(r.ts) OR r.ts > at THEN NULL WHEN kind = 'calendar window' THEN r.ts
                   WHEN kind = 'fixed window' THEN ratelimit._grid(name, r.key, period, kind, start) END AS grid
              FROM ratelimit.limits AS r
             WHERE r.name = name AND r.key >= first
             ORDER BY r.key, r.shard
             LIMIT 1000
          ) AS r
         GROUP BY r.key
      ) AS k;
    IF next = first THEN -- the next batch begins with the last key, which may have more rows, but only once
        next := first || E'\x01'; -- the next possible key
    END IF;
    IF varies IS NOT NULL AND kind <> 'slots' THEN
        keys := ARRAY(SELECT u.key
            FROM pg_catalog.unnest(keys) AS u (key)
           WHERE NOT EXISTS (SELECT 1 FROM ratelimit.overrides AS o
                 WHERE o.name = name AND o.key = u.key AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > clock_timestamp() - interval '1 day'
                   AND coalesce(least(o.until, o.removed_at), 'infinity') > clock_timestamp() - interval '1 day'));
    END IF;
    IF coalesce(pg_catalog.cardinality(keys), 0) = 0 THEN
        RETURN;
    END IF;

    IF ratelimit._distributed() THEN -- key by key, each on its server
        FOREACH k IN ARRAY keys LOOP
            grid := CASE WHEN kind = 'fixed window' THEN ratelimit._grid(name, k, period, kind, start) END;
            SELECT count(*) = min(l.shards) AND count(*) = max(l.shards) INTO idle
              FROM (
                SELECT r.shards
                  FROM ratelimit.limits AS r
                 WHERE r.name = name AND r.key = k
                   AND ratelimit._idle(r.value, r.ts, r.shards, at,
                           rate, period, capacity, CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE grid END, varies)
                   FOR UPDATE OF r SKIP LOCKED
              ) AS l;
            IF idle THEN
                DELETE FROM ratelimit.limits AS r WHERE r.name = name AND r.key = k;
                GET DIAGNOSTICS n = ROW_COUNT;
                deleted := deleted + n;
            END IF;
        END LOOP;
        RETURN;
    END IF;

    -- LATERAL and = ANY make the planner look keys up one by one, whatever its estimates (CONCURRENCY.md, E6).
    SELECT pg_catalog.array_agg(k.key), pg_catalog.array_agg(k.key) FILTER (WHERE k.held) INTO keys, held
      FROM (
        SELECT l.key, bool_or(l.lapses IS NOT NULL) AS held
          FROM (
            SELECT u.key, CASE WHEN kind = 'fixed window' THEN ratelimit._grid(name, u.key, period, kind, start) END AS grid
              FROM pg_catalog.unnest(keys) AS u (key)
            OFFSET 0
          ) AS g
         CROSS JOIN LATERAL (
            SELECT r.key, r.shards, r.lapses
              FROM ratelimit.limits AS r
             CROSS JOIN LATERAL (SELECT CASE WHEN kind = 'calendar window' AND isfinite(r.ts) THEN r.ts ELSE g.grid END AS grid) AS own
             WHERE r.name = name AND r.key = g.key
               AND ratelimit._idle(r.value, r.ts, r.shards, at,
                       rate, period, capacity, own.grid, varies)
               FOR UPDATE OF r SKIP LOCKED
          ) AS l
         GROUP BY l.key
        HAVING count(*) = min(l.shards) AND count(*) = max(l.shards)
      ) AS k;

    -- What expired before then gives nothing back, since the row was full. What is still held keeps its row, which tells when it expires.
    FOREACH k IN ARRAY coalesce(held, '{}') LOOP
        FOR own IN
            SELECT h.id FROM ratelimit.holds AS h
             WHERE h.name = name AND h.key = k AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= at
             LIMIT 1000
               FOR UPDATE SKIP LOCKED
        LOOP
            UPDATE ratelimit.holds AS h SET state = 'lapsed', rest = h.count, until = kept
             WHERE h.name = name AND h.key = k AND h.id = own;
        END LOOP;
        IF EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.key = k AND h.state = 'held' AND h.token IS NOT NULL) THEN
            keys := pg_catalog.array_remove(keys, k);
        END IF;
    END LOOP;
    DELETE FROM ratelimit.limits AS r
     USING pg_catalog.unnest(keys) AS u (key)
     WHERE r.name = ANY (ARRAY[CASE WHEN u.key IS NOT NULL THEN name END]) AND r.key = u.key;
    GET DIAGNOSTICS deleted = ROW_COUNT;
END
$body$;

-- The same as ratelimit.sweep, at an instant that the library may choose.
CREATE FUNCTION ratelimit._sweep(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    first text, varies interval, now timestamptz,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    n record;
BEGIN
    SELECT s.* INTO n FROM ratelimit._sweep_numbers(name, rate, period, kind, capacity, start, varies) AS s;
    IF n.nothing THEN
        deleted := 0;
        RETURN;
    END IF;
    SELECT r.deleted, r.next INTO deleted, next
      FROM ratelimit._sweep_rows(name, n.rate, n.period, n.kind, n.capacity, n.start, n.varies, first, now) AS r;
END
$body$;

CREATE FUNCTION ratelimit.sweep(
    name text, rate double precision DEFAULT NULL, period interval DEFAULT NULL, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    first text DEFAULT '', varies interval DEFAULT NULL,
    OUT deleted integer, OUT next text
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    h record;
BEGIN
    SELECT s.deleted, s.next INTO deleted, next FROM ratelimit._sweep(name COLLATE "C", rate, period, kind, capacity, start, first, varies, NULL) AS s;
    SELECT name AS next_name, first AS next_key, ''::text AS next_id INTO h;
    LOOP -- the holds of these keys
        SELECT s.* INTO h FROM ratelimit._sweep_holds(h.next_name COLLATE "C", h.next_key COLLATE "C", h.next_id COLLATE "C", NULL, name COLLATE "C") AS s;
        EXIT WHEN (h.next_name = name COLLATE "C" AND (next IS NULL OR h.next_key < next COLLATE "C")) IS NOT TRUE;
        IF h.deleted + h.ended > 0 THEN -- what it has locked goes first
            next := h.next_key;
            EXIT;
        END IF;
    END LOOP;
END
$body$;

COMMENT ON FUNCTION ratelimit.sweep(text, double precision, interval, text, double precision, timestamptz, text, interval) IS $text$
Deletes rows of a rate limit that have been full for an hour. A missing row means the same. A call looks at 1000 rows, in the order
of their keys, and never waits for a lock. It holds the locks of the deleted rows until the transaction ends: commit after each call.
It also gives back what expired holds of these keys hold, and forgets holds that are over, of 1000 holds at a time.

    SELECT * FROM ratelimit.sweep('sendMessage')

A row is deleted if it is full (of slots: if none is in use) by every definition of this name that a program has published or replaced within 7 days, and by every
override of it within a day. Where their kinds, periods or starts differ, nothing is deleted. If programs do not publish their limits, pass
the numbers that they use. They count in addition to those that are published:

    SELECT * FROM ratelimit.sweep('sendMessage', rate => 10, period => '1 minute', capacity => 20)

Arguments: as for ratelimit.consume, without zone and anchor, and
  varies   if keys have numbers of their own, the longest time in which any of them fills a row; default NULL: no key has any. Then rows
           are deleted that were not used for so long, unless they are in debt, or their key has an override
  first    the key to begin with; default '', the first of all

Result:
  deleted  the number of deleted rows, without holds
  next     the argument first for the next call; NULL: this was the last

Errors:
  RL003    the transaction is not READ COMMITTED
  22023    an argument is invalid; without numbers, also if no program has published the limit
$text$;

-- Gives back the expired holds of one key, unless its rows are locked or its numbers are not known. A key without rows is full: nothing comes back,
-- whatever its numbers, and no row of it is locked.
CREATE FUNCTION ratelimit._sweep_key(name text, key text, now timestamptz) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    q    ratelimit._request;
    m    integer;
    n    integer;
    at   timestamptz := coalesce(now, clock_timestamp());
    kept timestamptz := at + interval '7 days';
    rec  record;
BEGIN
    SELECT count(*) INTO n FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key;
    IF n = 0 THEN
        m := 0;
        FOR rec IN
            SELECT h.id FROM ratelimit.holds AS h
             WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= at
             LIMIT 1000
               FOR UPDATE SKIP LOCKED
        LOOP
            -- A recount has counted this hold meanwhile: the next sweep gives it back. Asked under the hold's lock, for which a later recount waits.
            EXIT WHEN EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key);
            UPDATE ratelimit.holds AS h SET state = 'lapsed', rest = h.count, until = kept
             WHERE h.name = name AND h.key = key AND h.id = rec.id;
            m := m + 1;
        END LOOP;
        RETURN m;
    END IF;
    q.rate := 0;
    IF EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.unit = 'tokens') THEN
        q := ratelimit._prepare('settle', name, nullif(key, ''), NULL, NULL, 0, 'token bucket', NULL, NULL, 1, key = '', NULL, NULL,
            NULL, NULL, now, later => true, standing => true);
        IF q.effect <> 'numbers' THEN
            RETURN 0;
        END IF;
    END IF;
    SELECT count(*) INTO m FROM (
        SELECT r.shard FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key ORDER BY r.shard FOR UPDATE SKIP LOCKED
    ) AS l;
    SELECT count(*) INTO n FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key;
    IF m = 0 OR m <> n THEN
        RETURN 0;
    END IF;
    RETURN ratelimit._reclaim(name, key, q.rate, q.period, q.capacity, q.start, now, q.windows, 1000);
END
$body$;

-- Sweeps one batch of holds: the next 1000 rows of the primary key, after the given one. It deletes rows that count as absent since an hour,
-- and gives back expired holds, where the numbers of the limit are known: published, and the same for all keys. It never waits for a lock.
-- only_name: of this limit alone. next_name is NULL after the last batch. Commit after each: it holds the locks until then. Each also deletes overrides that are over since a year.
CREATE FUNCTION ratelimit._sweep_holds(
    after_name text, after_key text, after_id text, now timestamptz, only_name text DEFAULT NULL,
    OUT deleted integer, OUT ended integer, OUT next_name text, OUT next_key text, OUT next_id text
)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    at    timestamptz := coalesce(now, clock_timestamp());
    hour  timestamptz := at - interval '1 hour'; -- then a clock that steps back by up to an hour changes nothing
    year  timestamptz := clock_timestamp() - interval '1 year'; -- overrides end by the server's clock
    seen  integer := 0;
    gone  integer := 0;
    due   text[] := '{}'; -- names and keys with expired holds, in pairs
    rec   record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: a sweep needs a READ COMMITTED transaction';
    END IF;
    deleted := 0;
    ended := 0;
    -- The history of overrides, of a role that may. What ratelimit.add has added is subtracted later, and stays.
    next_name := after_name; next_key := after_key; next_id := after_id;
    IF (SELECT has_table_privilege(y.typrelid, 'DELETE') AND has_table_privilege(y.typrelid, 'UPDATE') FROM pg_catalog.pg_type AS y
            WHERE y.oid = pg_catalog.pg_typeof(NULL::ratelimit.overrides)::oid) THEN
        DELETE FROM ratelimit.overrides AS o WHERE o.id = ANY (ARRAY(
            SELECT f.id FROM ratelimit.overrides AS f
             WHERE greatest(f.made_at, coalesce(least(f.until, f.removed_at), 'infinity')) < year AND f.added IS NULL
             LIMIT 1000 FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS gone = ROW_COUNT;
    END IF;
    FOR rec IN
        SELECT h.name, h.key, h.id, h.unit, h.state <> 'held' AND h.until < hour AS over, h.state = 'held' AND h.token IS NOT NULL AND h.until <= at AS expired
          FROM ratelimit.holds AS h
         WHERE (h.name, h.key, h.id) > (after_name, after_key, after_id)
         ORDER BY h.name, h.key, h.id
         LIMIT 1000
    LOOP
        EXIT WHEN rec.name <> only_name;
        seen := seen + 1;
        IF rec.expired AND (rec.name IS DISTINCT FROM due[pg_catalog.cardinality(due) - 1] OR rec.key IS DISTINCT FROM due[pg_catalog.cardinality(due)]) THEN
            due := pg_catalog.array_cat(due, ARRAY[rec.name::text, rec.key::text]);
        END IF;
        next_name := rec.name; next_key := rec.key; next_id := rec.id;
        CONTINUE WHEN NOT rec.over;
        PERFORM 1 FROM ratelimit.holds AS h -- asks again, on the newest version
          WHERE h.name = rec.name AND h.key = rec.key AND h.id = rec.id AND h.state <> 'held' AND h.until < hour FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM ratelimit.holds AS h WHERE h.name = rec.name AND h.key = rec.key AND h.id = rec.id;
        deleted := deleted + 1;
    END LOOP;
    FOR i IN 1..pg_catalog.cardinality(due) / 2 LOOP
        ended := ended + ratelimit._sweep_key(due[2 * i - 1], due[2 * i], now);
    END LOOP;
    IF seen < 1000 AND gone < 1000 THEN
        next_name := NULL; next_key := NULL; next_id := NULL;
    END IF;
END
$body$;

-- What was granted and denied, as the recorders of package ratelimit/usage have counted it. No decision depends on these tables.
--
-- Both tables are read by limit and by time, and rows go by time: hence the two indexes. Counts are in no index, so that updates are
-- heap-only. ON CONFLICT takes both indexes, whatever the order of their columns.
CREATE TABLE ratelimit.usage (
    name     text COLLATE "C" NOT NULL,
    minute   timestamptz      NOT NULL CHECK (isfinite(minute)),
    granted  bigint           NOT NULL,
    denied   bigint           NOT NULL,
    failed   bigint           NOT NULL,
    tokens   double precision NOT NULL,
    refunded double precision NOT NULL,
    waited   double precision NOT NULL,
    CHECK (tokens BETWEEN '-1e100' AND '1e100' AND refunded BETWEEN '-1e100' AND '1e100' AND waited BETWEEN '-1e100' AND '1e100'),
    CHECK (granted BETWEEN 0 AND 1000000000000000 AND denied BETWEEN 0 AND 1000000000000000 AND failed BETWEEN 0 AND 1000000000000000), -- so that sums are bigint
    PRIMARY KEY (name, minute),
    UNIQUE (minute, name)
) WITH (fillfactor = 90);

COMMENT ON TABLE ratelimit.usage IS 'txlimit: what was granted and denied, by limit and minute; see ratelimit.usage';

COMMENT ON COLUMN ratelimit.usage.name IS 'the name of the limit';

COMMENT ON COLUMN ratelimit.usage.minute IS 'the begin of the minute';

COMMENT ON COLUMN ratelimit.usage.granted IS 'requests that were granted; a Wait that was given up is not in it';

COMMENT ON COLUMN ratelimit.usage.denied IS 'requests that were denied';

COMMENT ON COLUMN ratelimit.usage.failed IS 'requests that were neither: the database failed, or they were invalid or above the capacity. Canceled calls, 40001 and 40P01 are not counted';

COMMENT ON COLUMN ratelimit.usage.tokens IS 'tokens that were taken, by Charge, by Settle and by a Wait that was given up as well';

COMMENT ON COLUMN ratelimit.usage.refunded IS 'tokens that were given back';

COMMENT ON COLUMN ratelimit.usage.waited IS 'seconds from the grants to the instants at which their work may run, added up';

-- The most denied keys of each limit and hour, 100 at most.
CREATE TABLE ratelimit.denials (
    name        text COLLATE "C" NOT NULL,
    hour        timestamptz      NOT NULL CHECK (isfinite(hour)),
    key         text COLLATE "C" NOT NULL,
    denied      bigint           NOT NULL,
    asked       double precision NOT NULL,
    last_denied timestamptz      NOT NULL CHECK (isfinite(last_denied)),
    CHECK (denied BETWEEN 0 AND 1000000000000000 AND asked BETWEEN '-1e100' AND '1e100'),
    PRIMARY KEY (name, hour, key),
    UNIQUE (hour, name, key)
) WITH (fillfactor = 90);

COMMENT ON TABLE ratelimit.denials IS 'txlimit: the most denied keys, by limit and hour; see ratelimit.denials';

COMMENT ON COLUMN ratelimit.denials.name IS 'the name of the limit';

COMMENT ON COLUMN ratelimit.denials.hour IS 'the begin of the hour, in UTC';

COMMENT ON COLUMN ratelimit.denials.key IS 'the key, or its hash';

COMMENT ON COLUMN ratelimit.denials.denied IS 'at least so many requests';

COMMENT ON COLUMN ratelimit.denials.asked IS 'the tokens that they asked for';

COMMENT ON COLUMN ratelimit.denials.last_denied IS 'the instant of the last denial';

-- Adds to the tables what a recorder has counted, and returns the number of rows that were deleted.
--
--   names, minutes, granted ...     the rows to add to ratelimit.usage
--   denial_names, hours, keys ...   the rows to add to ratelimit.denials
--   keep                            older rows go: each call deletes up to 1000 of each table, and two for each row that it adds
--
-- Arrays may be NULL, which is no row. No two elements may be the same row. Two processes cannot deadlock: the rows that a call may wait for come in one order (usage before
-- denials), and it waits for no row that it deletes. A row that is locked is left to the next call. A call that waits for 2 seconds
-- fails (55P03), so that its caller knows that nothing was written.
CREATE FUNCTION ratelimit._record_usage(
    names text[], minutes timestamptz[], granted bigint[], denied bigint[], failed bigint[],
    tokens double precision[], refunded double precision[], waited double precision[],
    denial_names text[], hours timestamptz[], keys text[], denials bigint[], asked double precision[], last_denied timestamptz[],
    keep interval
) RETURNS integer
LANGUAGE plpgsql
-- Read along the indexes, whatever the statistics say, and compile nothing for what the planner expects.
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '2s'
AS $body$
#variable_conflict use_variable
DECLARE
    -- In variables, since Citus takes nothing in a write that is not immutable.
    minutes_before timestamptz := clock_timestamp() - keep - interval '1 minute';
    hours_before   timestamptz := clock_timestamp() - keep - interval '1 hour';
    rec     record;
    deleted integer := 0;
BEGIN
    INSERT INTO ratelimit.usage AS r
    SELECT u.*
      FROM unnest(names, minutes, granted, denied, failed, tokens, refunded, waited) AS u (name, minute, granted, denied, failed, tokens, refunded, waited)
     ORDER BY u.name COLLATE pg_catalog."C", u.minute
        ON CONFLICT (name, minute) DO UPDATE
       SET granted = r.granted + EXCLUDED.granted, denied = r.denied + EXCLUDED.denied, failed = r.failed + EXCLUDED.failed,
           tokens = r.tokens + EXCLUDED.tokens, refunded = r.refunded + EXCLUDED.refunded, waited = r.waited + EXCLUDED.waited;

    INSERT INTO ratelimit.denials AS r
    SELECT u.*
      FROM unnest(denial_names, hours, keys, denials, asked, last_denied) AS u (name, hour, key, denied, asked, last_denied)
     ORDER BY u.name COLLATE pg_catalog."C", u.hour, u.key COLLATE pg_catalog."C"
        ON CONFLICT (name, hour, key) DO UPDATE
       SET denied = r.denied + EXCLUDED.denied, asked = r.asked + EXCLUDED.asked,
           last_denied = greatest(r.last_denied, EXCLUDED.last_denied);

    -- Of each limit and hour, the 100 most denied keys stay; of keys denied as often, the latest. OFFSET 0 and LATERAL make the planner
    -- find the keys once, and look their rows up one by one.
    FOR rec IN
        SELECT l.name, l.hour, l.key
          FROM (
            SELECT h.name, h.hour, rest.key
              FROM (SELECT DISTINCT u.name COLLATE pg_catalog."C" AS name, u.hour FROM unnest(denial_names, hours) AS u (name, hour)) AS h
             CROSS JOIN LATERAL (
                SELECT k.key
                  FROM ratelimit.denials AS k
                 WHERE k.name = h.name AND k.hour = h.hour
                 ORDER BY k.denied DESC, k.last_denied DESC, k.key
                OFFSET 100
              ) AS rest
            OFFSET 0
          ) AS v
         CROSS JOIN LATERAL (
            SELECT d.name, d.hour, d.key
              FROM ratelimit.denials AS d
             WHERE d.name = v.name AND d.hour = v.hour AND d.key = v.key
               FOR UPDATE SKIP LOCKED
          ) AS l
    LOOP
        DELETE FROM ratelimit.denials AS r WHERE r.name = rec.name AND r.hour = rec.hour AND r.key = rec.key;
        deleted := deleted + 1;
    END LOOP;
    FOR rec IN
        SELECT d.name, d.minute
          FROM ratelimit.usage AS d
         WHERE d.minute < minutes_before
         ORDER BY d.minute
         LIMIT 1000 + 2 * coalesce(pg_catalog.cardinality(names), 0)
           FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM ratelimit.usage AS r WHERE r.name = rec.name AND r.minute = rec.minute;
        deleted := deleted + 1;
    END LOOP;
    FOR rec IN
        SELECT d.name, d.hour, d.key
          FROM ratelimit.denials AS d
         WHERE d.hour < hours_before
         ORDER BY d.hour
         LIMIT 1000 + 2 * coalesce(pg_catalog.cardinality(denial_names), 0)
           FOR UPDATE SKIP LOCKED
    LOOP
        DELETE FROM ratelimit.denials AS r WHERE r.name = rec.name AND r.hour = rec.hour AND r.key = rec.key;
        deleted := deleted + 1;
    END LOOP;
    RETURN deleted;
END
$body$;

-- A query of all limits takes the index by minute, and one of a limit the primary key. It is PL/pgSQL, since Citus refuses a function of
-- SQL that reads a distributed table by its arguments.
CREATE FUNCTION ratelimit.usage(
    INOUT name text DEFAULT NULL, since timestamptz DEFAULT NULL,
    OUT minute timestamptz, OUT granted bigint, OUT denied bigint, OUT failed bigint, OUT tokens double precision, OUT refunded double precision, OUT waited double precision
) RETURNS SETOF record
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    first timestamptz := coalesce(since, now() - interval '1 hour') - interval '1 minute';
BEGIN
    IF name IS NULL THEN
        RETURN QUERY SELECT r.name::text, r.minute, r.granted, r.denied, r.failed, r.tokens, r.refunded, r.waited
          FROM ratelimit.usage AS r WHERE r.minute > first ORDER BY r.minute, r.name;
        RETURN;
    END IF;
    RETURN QUERY SELECT r.name::text, r.minute, r.granted, r.denied, r.failed, r.tokens, r.refunded, r.waited
      FROM ratelimit.usage AS r WHERE r.name = name COLLATE "C" AND r.minute > first ORDER BY r.minute;
    IF NOT FOUND AND NOT EXISTS (SELECT 1 FROM ratelimit.usage AS r WHERE r.name = name COLLATE "C") THEN
        PERFORM ratelimit._check_known(name COLLATE "C");
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.usage(text, timestamptz) IS $text$
What was granted and denied, minute by minute, as the programs' usage.Recorder has counted it. A minute without calls has no row.

    SELECT * FROM ratelimit.usage('sendMessage', since => now() - interval '3 hours')

    -- the limits that denied most in the last hour
    SELECT name, sum(denied) AS denied, sum(granted) AS granted FROM ratelimit.usage() GROUP BY name ORDER BY denied DESC

Arguments:
  name      the limit; default NULL: all limits
  since     the first instant; default NULL: an hour ago. The minute that it lies in is included

Result:
  name      the limit; '(others)' for those that a recorder had no room for
  minute    the minute's begin
  granted   requests that were granted: of Consume, Each, Take, Reserve, Wait, Hold and Once. Those in a transaction that was rolled
            back are included. A Wait that was given up is not, nor a Hold or Once whose id was known
  denied    requests that were denied. Requests that another limit of their call denied are not in it, and checks are not
  failed    requests that ended with another error: the database failed, or they were invalid or above the capacity. Canceled calls, and
            those whose transaction has to run again (40001, 40P01), are not in it
  tokens    the tokens that were taken, by Charge, by Settle and by a Wait that was given up as well. refunded has what the last
            gave back
  refunded  the tokens that were given back, by Settle and Release as well
  waited    the seconds from grants to the instants at which their work may run, added up: of reservations, and of Wait

Errors:
  22023     programs publish limits, and nobody knows this one

The newest counts are missing: a program writes them every ten seconds, unless it says otherwise.
$text$;

CREATE FUNCTION ratelimit.denials(
    INOUT name text DEFAULT NULL, since timestamptz DEFAULT NULL,
    OUT key text, OUT denied bigint, OUT asked double precision, OUT last_denied timestamptz
) RETURNS SETOF record
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    only_name CONSTANT text COLLATE "C" := name;
    first     CONSTANT timestamptz := coalesce(since, now() - interval '1 hour') - interval '1 hour';
BEGIN
    RETURN QUERY
        SELECT k.*
          FROM (
            SELECT r.name::text, r.key::text, least(sum(r.denied), 9223372036854775807::numeric)::bigint AS denied, sum(greatest(least(r.asked, '1e100'), '-1e100')) AS asked, max(r.last_denied) AS last_denied
              FROM ratelimit.denials AS r
             WHERE (only_name IS NULL OR r.name = only_name) AND r.hour > first
             GROUP BY r.name, r.key
          ) AS k
         ORDER BY k.denied DESC, k.last_denied DESC, k.name, k.key;
    IF NOT FOUND AND only_name IS NOT NULL AND NOT EXISTS (SELECT 1 FROM ratelimit.denials AS r WHERE r.name = only_name) THEN
        PERFORM ratelimit._check_known(only_name);
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.denials(text, timestamptz) IS $text$
The most denied keys, worst first, as the programs' usage.Recorder has counted them.

    SELECT * FROM ratelimit.denials('sendMessage', since => now() - interval '3 hours') LIMIT 20

Arguments:
  name         the limit; default NULL: all limits
  since        the first instant; default NULL: an hour ago. The hour that it lies in is included as a whole; hours begin in UTC

Result, one row for each limit and key:
  name         the limit
  key          the key as it is stored, or its hash if the recorder hashes keys; '' for a limit without keys
  denied       how many requests were denied, at least: of each limit and hour, the 100 most denied keys are kept
  asked        how many tokens they asked for
  last_denied  the instant of the last denial that was counted

Errors:
  22023        programs publish limits, and nobody knows this one

The newest counts are missing: a program writes them every ten seconds, unless it says otherwise.
$text$;

-- The trigger function by which a server refuses keys that are not its own. The engine makes no trigger: which keys are whose, only
-- the application knows. It writes the trigger, with a condition on NEW.key.
--
-- Tokens are granted by writing rows, so no grant passes the trigger, whatever the call. It is an AFTER trigger: a BEFORE trigger
-- would lock the row before the UPDATE does, and would also see the rows that ON CONFLICT DO NOTHING does not insert. It is not a
-- CHECK: the DETAIL of a CHECK's error has the row, and so the key, and its error cannot say what to do.
CREATE FUNCTION ratelimit.refuse() RETURNS trigger
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    -- The message has no key: it may be personal data, and errors are logged.
    RAISE SQLSTATE 'RL004' USING
        MESSAGE = pg_catalog.format('rate limit %L: the key does not belong to this server', NEW.name),
        HINT = pg_catalog.format('Send the call to the server that has the key: see which server or which sharding key the caller gave to the router. If the key belongs here, correct the condition of the trigger %I.', TG_NAME);
END
$body$;

COMMENT ON FUNCTION ratelimit.refuse() IS $text$
Refuses keys that do not belong to this server, one of several between which the keys are shared out. Without it, a call that reaches
the wrong server finds a full limit there, and is granted. Each server gets a trigger of its own, with a condition that is true for
keys that are not its own:

    CREATE TRIGGER limits_guard AFTER INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW
        WHEN (NOT starts_with(NEW.key, 'eu|')) EXECUTE FUNCTION ratelimit.refuse()

    -- the third of four servers, which share keys by their hash
        WHEN (hashtextextended(NEW.key, 0) & 3 <> 2)

The trigger sees what is written from then on. Rows that were there before stay: delete those of other servers' keys.

Errors:
  RL004    the key is not this server's. Nothing was taken, and the transaction is aborted
$text$;

-- Gives a role what its work needs. Three words are enough: who looks, who consumes, who operates. The owner of the schema calls it.
--
-- The functions with the rights of their owner change rows of the history. So they are for operators alone.
CREATE FUNCTION ratelimit.grant(role name, work text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $body$
#variable_conflict use_variable
DECLARE
    own regnamespace := (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'ratelimit.limits'::regclass);
    f   regprocedure;
BEGIN
    IF (work IN ('look', 'consume', 'operate')) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'work must be look, consume or operate, not ' || coalesce(quote_literal(work), 'NULL');
    END IF;
    IF role = 'public' THEN
        RAISE invalid_parameter_value USING MESSAGE = 'role must be a role: everybody may not use a limit';
    END IF;
    FOR f IN SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = own LOOP -- which a restore without privileges gives to everybody
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO %I', own, role);
    FOR f IN SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = own AND p.proname <> 'grant' AND (NOT p.prosecdef OR work = 'operate') LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', f, role);
    END LOOP;
    EXECUTE format('GRANT SELECT ON ratelimit.limits, ratelimit.holds, ratelimit.definitions, ratelimit.overrides, ratelimit.usage, ratelimit.denials TO %I', role);
    IF work = 'consume' THEN
        EXECUTE format('GRANT INSERT, UPDATE, DELETE ON ratelimit.limits, ratelimit.holds, ratelimit.definitions, ratelimit.usage, ratelimit.denials TO %I', role);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE ON ratelimit.sweeps TO %I', role);
        FOR n IN 0..31 LOOP -- Hot locks them
            EXECUTE format('GRANT UPDATE ON ratelimit.turn_%s TO %I', to_char(n, 'FM00'), role);
        END LOOP;
    ELSIF work = 'operate' THEN
        EXECUTE format('GRANT INSERT (name, key, effect, rate, capacity, max_reserved, until, reason, made_by) ON ratelimit.overrides TO %I', role);
        EXECUTE format('GRANT UPDATE, DELETE ON ratelimit.limits, ratelimit.holds TO %I', role);
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.grant(name, text) IS $text$
Give a role what its work needs: USAGE on the schema, and the functions and tables.

    SELECT ratelimit.grant('app', 'consume')

Arguments:
  role  the role
  work  'look'     reads limits, keys, holds, overrides and usage: Check, ratelimit.keys, a page that only reads
        'consume'  what a program needs, with all that Open does. It may not override
        'operate'  looks, and overrides, blocks, restores, resets, releases and sweeps

Roles that were granted may also use the functions that later migrations make. docs/security.md says what each of them can do, and how to take it back
$text$;

-- Says which schema this is. The library asks it when a program starts, and `txlimit migrate status` does.
--
-- version is the number of the newest migration. hash is made of the functions as they are now, without the schema's name, so it also
-- shows one that was edited here. Both are written down in migrations/version.go. The generator puts the number and the list in.
--
-- Postgres has no source of a body after RETURN: it prints one. So that it always prints the same, no schema is in sight but this one.
-- Bodies in text have "schema". before each name of the engine, and nowhere else: the engine quotes nothing.
CREATE FUNCTION ratelimit.schema(OUT version integer, OUT hash text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' SET datestyle = 'ISO' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET quote_all_identifiers = off
SET standard_conforming_strings = on
AS $body$
#variable_conflict use_variable
DECLARE
    own  oid; -- of the schema
    name text;
BEGIN
    SELECT n.oid, n.nspname INTO own, name
      FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace
     WHERE t.oid = pg_catalog.pg_typeof(NULL::ratelimit.limits)::oid;
    PERFORM set_config('search_path', quote_ident(name) || ', pg_temp', true); -- until this function ends
    SELECT encode(sha256(convert_to(pg_catalog.string_agg(f.text, E'\n' ORDER BY f.text COLLATE "C"), 'UTF8')), 'hex') INTO hash
      FROM (
        SELECT p.proname::text || ' ' || CASE WHEN p.prosqlbody IS NULL
               THEN pg_catalog.replace(p.prosrc, 'ratelimit.', '')
               ELSE pg_catalog.regexp_replace(pg_get_function_sqlbody(p.oid), E'\\s', '', 'g') END AS text
          FROM pg_proc AS p
         WHERE p.pronamespace = own
           AND p.proname::text = ANY ('{_after,_all,_answer,_apply,_as_known,_ask,_available,_back,_bar,_barred,_by_hand,_capacity,_check_definition,_check_given,_check_keyless,_check_known,_check_slots,_claim,_coalesce,_consume,_consume_keys,_consume_several,_consume_sharded,_costly,_database,_defined,_denied,_distributed,_each,_ends,_even,_extend,_free_at,_free_slots,_full_at,_give_back,_grid,_hold,_hold_by_hand,_hold_many,_id_taken,_idle,_in_force,_insert_override,_instant,_kept,_keys,_known,_known_until,_lapsed,_lasts,_left,_list,_lock,_longest,_many,_may,_micros,_move,_nearest,_never,_note_reset,_numbers,_one_server,_overrides,_pause,_prepare,_prepare_slots,_promise,_publish,_published,_raise,_reaching,_read,_read_token,_reason,_reclaim,_record_usage,_recount,_refund,_refuses,_release_by_hand,_release_many,_repaid,_repaid_at,_reset,_resume,_retry_at,_rows,_run_at,_same_windows,_scope,_settle,_shown,_spelled,_state,_states,_stored_keys,_stored_names,_sweep,_sweep_holds,_sweep_key,_sweep_numbers,_sweep_rows,_sweep_turn,_taken_twice,_tolerance,_total,_under,_upto,_usable,_valid,_validate,_validate_slots,_validate_varies,_when,_whole,_windows,_wire_apply,_wire_apply_one,_wire_consume,_wire_consume_several,_wire_consume_sharded,_wire_each,_wire_hold,_wire_move,_wire_refund,_wire_refund_one,_wire_settle,_wrong_id,_wrong_key,_zone,add,block,consume,consume_all,denials,grant,hold,hold_many,holds,key,key_parts,keys,override,pause,publish,recount,refuse,release,release_many,reserve,reset,restore,resume,schema,sweep,take,try,unblock,unlimited,usage,withdraw}'::text[])
           AND p.proname::text <> ALL ('{_distributed,_one_server}'::text[]) -- which citus.sql changes
      ) AS f;
    version := '1';
END
$body$;

COMMENT ON FUNCTION ratelimit.schema() IS $text$
Says which schema of txlimit this is.

    SELECT * FROM ratelimit.schema()

Result:
  version  the number of the newest migration. A library works on its own version and on newer ones
  hash     of the functions as they are now. Another one for the same version: a function was edited here, or the schema is of another build.
           `txlimit migrate status` says whether it is as it was generated
$text$;
-- +goose StatementEnd

-- +goose StatementBegin
DO $$
DECLARE
    added CONSTANT text[] := '{_available,_upto,_tolerance,_whole,_even,_shown,_valid,_distributed,_one_server,_database,_consume,_costly,_consume_sharded,_consume_several,_apply,_promise,_give_back,_refund,_lock,_move,_consume_keys,_each,_wire_consume,_wire_consume_sharded,_wire_consume_several,_wire_apply,_wire_apply_one,_wire_refund,_wire_refund_one,_wire_move,_wire_each,_reset,_note_reset,reset,_coalesce,_raise,key,key_parts,_longest,_windows,_same_windows,_zone,_back,_validate,_wrong_key,_check_keyless,_micros,_instant,_grid,_total,_when,_repaid,_run_at,_kept,_left,_validate_varies,_validate_slots,_check_definition,_list,_spelled,_publish,publish,withdraw,_lasts,_usable,_in_force,_capacity,_defined,_under,_numbers,_nearest,_check_known,_scope,_insert_override,override,block,unlimited,restore,unblock,add,_overrides,_refuses,_never,_prepare_slots,_check_slots,_check_given,_prepare,_ask,_after,_known_until,_reaching,_retry_at,_full_at,_repaid_at,_answer,_reason,_denied,_by_hand,consume,try,reserve,take,_read,_all,consume_all,_lapsed,_may,_ends,_reclaim,_barred,_known,_bar,_claim,_free_at,_as_known,_hold,_settle,_extend,_taken_twice,_wire_hold,_wire_settle,_wrong_id,_read_token,_id_taken,_hold_by_hand,_published,hold,_release_by_hand,release,holds,_many,_hold_many,hold_many,_release_many,release_many,_recount,recount,_pause,_resume,pause,resume,_stored_names,_stored_keys,_rows,_free_slots,_state,_states,_keys,keys,_sweep_turn,_idle,_sweep_numbers,_sweep_rows,_sweep,sweep,_sweep_key,_sweep_holds,_record_usage,usage,denials,refuse,grant,schema}';
    said  text;
BEGIN
    FOR said IN
        SELECT pg_catalog.format('REVOKE EXECUTE ON FUNCTION %s FROM %s', p.oid::pg_catalog.regprocedure, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END)
          FROM pg_catalog.pg_proc AS p CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS a
         WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_catalog.pg_class AS c WHERE c.oid = 'ratelimit.limits'::pg_catalog.regclass)
           AND (a.grantee = 0 OR p.proname::text = ANY (added) AND a.grantee <> p.proowner)
    LOOP
        EXECUTE said;
    END LOOP;
    FOR said IN
        SELECT pg_catalog.format('REVOKE ALL ON TABLE %s FROM %s', c.oid::pg_catalog.regclass, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END)
          FROM pg_catalog.pg_class AS c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) AS a
         WHERE c.relnamespace = (SELECT l.relnamespace FROM pg_catalog.pg_class AS l WHERE l.oid = 'ratelimit.limits'::pg_catalog.regclass)
           AND c.relname::text = ANY ('{limits,turn_00,turn_01,turn_02,turn_03,turn_04,turn_05,turn_06,turn_07,turn_08,turn_09,turn_10,turn_11,turn_12,turn_13,turn_14,turn_15,turn_16,turn_17,turn_18,turn_19,turn_20,turn_21,turn_22,turn_23,turn_24,turn_25,turn_26,turn_27,turn_28,turn_29,turn_30,turn_31,definitions,overrides,holds,sweeps,usage,denials,goose_version}') AND a.grantee <> c.relowner
    LOOP
        EXECUTE said;
    END LOOP;
    FOR said IN
        SELECT pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %s', p.oid::pg_catalog.regprocedure, a.grantee::pg_catalog.regrole)
          FROM pg_catalog.pg_proc AS p
          JOIN pg_catalog.pg_proc AS beside ON beside.oid = CASE WHEN p.prosecdef THEN 'ratelimit.restore(text, text, text, text, boolean, boolean)' ELSE 'ratelimit.schema()' END::pg_catalog.regprocedure
          CROSS JOIN LATERAL pg_catalog.aclexplode(beside.proacl) AS a
         WHERE p.pronamespace = beside.pronamespace AND p.proname::text = ANY (added) AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE said;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DROP FUNCTION ratelimit.schema();
DROP FUNCTION ratelimit.grant(role name, work text);
DROP FUNCTION ratelimit.refuse();
DROP FUNCTION ratelimit.denials(INOUT name text, since timestamptz);
DROP FUNCTION ratelimit.usage(INOUT name text, since timestamptz);
DROP FUNCTION ratelimit._record_usage(names text[], minutes timestamptz[], granted bigint[], denied bigint[], failed bigint[], tokens double precision[], refunded double precision[], waited double precision[], denial_names text[], hours timestamptz[], keys text[], denials bigint[], asked double precision[], last_denied timestamptz[], keep interval);
DROP TABLE ratelimit.denials;
DROP TABLE ratelimit.usage;
DROP FUNCTION ratelimit._sweep_holds(after_name text, after_key text, after_id text, now timestamptz, only_name text);
DROP FUNCTION ratelimit._sweep_key(name text, key text, now timestamptz);
DROP FUNCTION ratelimit.sweep(name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, first text, varies interval);
DROP FUNCTION ratelimit._sweep(name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, first text, varies interval, now timestamptz);
DROP FUNCTION ratelimit._sweep_rows(name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, varies interval, first text, now timestamptz);
DROP FUNCTION ratelimit._sweep_numbers(name text, INOUT rate double precision, INOUT period interval, INOUT kind text, INOUT capacity double precision, INOUT start timestamptz, INOUT varies interval);
DROP FUNCTION ratelimit._idle(value double precision, ts timestamptz, shards smallint, at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, varies interval);
DROP FUNCTION ratelimit._sweep_turn(name text, step text, since interval, mine timestamptz);
DROP TABLE ratelimit.sweeps;
DROP FUNCTION ratelimit.keys(name text, rate double precision, period interval, kind text, INOUT capacity double precision, start timestamptz, zone text, anchor timestamp, keys text[]);
DROP FUNCTION ratelimit._keys(name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, zone text, anchor timestamp, keys text[], now timestamptz);
DROP FUNCTION ratelimit._states(name text, keys text[], at timestamptz, given ratelimit._terms, alone boolean, whole boolean);
DROP FUNCTION ratelimit._state(name text, key text, n ratelimit._terms, value double precision[], ts timestamptz[], lapses timestamptz, at timestamptz, given ratelimit._terms, windows timestamptz[], beside ratelimit._terms, whole boolean);
DROP FUNCTION ratelimit._free_slots(name text, key text, capacity double precision, at timestamptz, count double precision);
DROP FUNCTION ratelimit._rows(name text, keys text[]);
DROP FUNCTION ratelimit._stored_keys(name text, first text, below text, most integer);
DROP FUNCTION ratelimit._stored_names(most integer);
DROP FUNCTION ratelimit.resume(name text, key text, global boolean);
DROP FUNCTION ratelimit.pause(name text, key text, until timestamptz, remaining double precision, rate double precision, period interval, capacity double precision, shards integer, global boolean);
DROP FUNCTION ratelimit._resume(names text[], keys text[], now timestamptz);
DROP FUNCTION ratelimit._pause(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], shards integer[], mosts double precision[], until timestamptz, now timestamptz);
DROP FUNCTION ratelimit.recount(name text, key text, global boolean);
DROP FUNCTION ratelimit._recount(name text, key text, global boolean);
DROP FUNCTION ratelimit.release_many(name text, key text, ids text[], global boolean);
DROP FUNCTION ratelimit._release_many(name text, key text, ids text[], global boolean);
DROP FUNCTION ratelimit.hold_many(name text, key text, ids text[], global boolean);
DROP FUNCTION ratelimit._hold_many(name text, key text, ids text[], global boolean);
DROP FUNCTION ratelimit._many(name text, key text, ids text[], global boolean);
DROP FUNCTION ratelimit.holds(name text, INOUT key text, global boolean);
DROP FUNCTION ratelimit.release(name text, key text, id text, global boolean, reason text, who text);
DROP FUNCTION ratelimit._release_by_hand(name text, key text, id text, global boolean, reason text, who text, now timestamptz);
DROP FUNCTION ratelimit.hold(name text, key text, id text, count double precision, ttl interval, forever boolean, global boolean);
DROP FUNCTION ratelimit._published(name text, key text);
DROP FUNCTION ratelimit._hold_by_hand(name text, key text, id text, count double precision, ttl interval, forever boolean, global boolean, now timestamptz, raises boolean);
DROP FUNCTION ratelimit._id_taken(name text, state text, until timestamptz, at timestamptz);
DROP FUNCTION ratelimit._read_token(INOUT id text);
DROP FUNCTION ratelimit._wrong_id(id text);
DROP FUNCTION ratelimit._wire_settle(release boolean, own text, own_token uuid, taking integer, lifted boolean[], names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], used double precision[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._wire_hold(own text, own_token uuid, ttl interval, taking integer, units text[], names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._taken_twice();
DROP FUNCTION ratelimit._extend(names text[], keys text[], ids text[], tokens uuid[], ttls interval[], now timestamptz);
DROP FUNCTION ratelimit._settle(release boolean, own text, own_token uuid, taking integer, lifted boolean[], names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], used double precision[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._hold(own text, own_token uuid, ttl interval, taking integer, units text[], names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._as_known(state text, until timestamptz, at timestamptz, own text, names text[], keys text[]);
DROP FUNCTION ratelimit._free_at(name text, key text, count double precision, floor double precision, at timestamptz);
DROP FUNCTION ratelimit._claim(own text, own_token uuid, units text[], names text[], keys text[], starts timestamptz[], shards integer[], counts double precision[], d ratelimit._decisions, at timestamptz, INOUT until timestamptz);
DROP FUNCTION ratelimit._bar(own text, own_token uuid, names text[], keys text[], now timestamptz);
DROP FUNCTION ratelimit._known(own text, own_token uuid, repeats text, names text[], keys text[], at timestamptz);
DROP FUNCTION ratelimit._barred(token uuid, own_token uuid, marked_at timestamptz);
DROP FUNCTION ratelimit._reclaim(name text, key text, rate double precision, period interval, capacity double precision, start timestamptz, now timestamptz, windows timestamptz[], most integer, upto timestamptz);
DROP FUNCTION ratelimit._ends();
DROP FUNCTION ratelimit._may(privilege text);
DROP FUNCTION ratelimit._lapsed(name text, key text, at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[], only_ids text[]);
DROP TYPE ratelimit._held;
DROP INDEX ratelimit.holds_held;
DROP TABLE ratelimit.holds;
DROP FUNCTION ratelimit.consume_all(requests jsonb);
DROP FUNCTION ratelimit._all(requests jsonb, now timestamptz, raises boolean);
DROP FUNCTION ratelimit._read(request jsonb, number bigint, now timestamptz);
DROP FUNCTION ratelimit.take(name text, key text, rate double precision, period interval, most bigint, kind text, capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp);
DROP FUNCTION ratelimit.reserve(name text, key text, rate double precision, period interval, count double precision, kind text, capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp, max_reserved double precision);
DROP FUNCTION ratelimit.try(name text, key text, rate double precision, period interval, count double precision, kind text, capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp);
DROP FUNCTION ratelimit.consume(name text, key text, rate double precision, period interval, count double precision, kind text, capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp);
DROP FUNCTION ratelimit._by_hand(verb text, name text, key text, rate double precision, period interval, count double precision, kind text, capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp, max_reserved double precision, most double precision, now timestamptz, raises boolean);
DROP FUNCTION ratelimit._denied(names text[], name text, remaining double precision, retry_at timestamptz, reset_at timestamptz, at timestamptz, reason text);
DROP FUNCTION ratelimit._reason(q ratelimit._request);
DROP FUNCTION ratelimit._answer(verb text, q ratelimit._request, granted boolean, at timestamptz, value double precision[], ts timestamptz[]);
DROP FUNCTION ratelimit._repaid_at(verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz);
DROP FUNCTION ratelimit._full_at(verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, owed boolean);
DROP FUNCTION ratelimit._retry_at(verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, anyhow boolean);
DROP FUNCTION ratelimit._reaching(q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, count double precision, floor double precision);
DROP FUNCTION ratelimit._known_until(q ratelimit._request, standing boolean);
DROP FUNCTION ratelimit._after(verb text, q ratelimit._request, standing boolean);
DROP FUNCTION ratelimit._ask(name text, key text, n ratelimit._terms, at timestamptz, given ratelimit._terms, windows timestamptz[]);
DROP FUNCTION ratelimit._prepare(verb text, name text, key text, rate double precision, period interval, count double precision, kind text, capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp, max_reserved double precision, most double precision, now timestamptz, later boolean, standing boolean);
DROP FUNCTION ratelimit._check_given(name text, key text, g ratelimit._terms, now timestamptz);
DROP FUNCTION ratelimit._check_slots(q ratelimit._request, what text, at timestamptz);
DROP FUNCTION ratelimit._prepare_slots(verb text, name text, key text, count double precision, capacity double precision, global boolean, effect text, until timestamptz, now timestamptz, later boolean);
DROP FUNCTION ratelimit._never(name text, wrong text);
DROP FUNCTION ratelimit._refuses(q ratelimit._request);
DROP TYPE ratelimit._request;
DROP FUNCTION ratelimit._overrides(since pg_snapshot, after bigint);
DROP FUNCTION ratelimit.add(id bigint, capacity double precision);
DROP FUNCTION ratelimit.unblock(name text, key text, who text, global boolean, every_key boolean);
DROP FUNCTION ratelimit.restore(name text, key text, effect text, who text, global boolean, every_key boolean);
DROP FUNCTION ratelimit.unlimited(name text, key text, until timestamptz, reason text, who text, forever boolean, global boolean, every_key boolean);
DROP FUNCTION ratelimit.block(name text, key text, until timestamptz, reason text, who text, forever boolean, global boolean, every_key boolean);
DROP FUNCTION ratelimit.override(name text, key text, rate double precision, capacity double precision, max_reserved double precision, until timestamptz, reason text, who text, forever boolean, global boolean, every_key boolean);
DROP FUNCTION ratelimit._insert_override(name text, key text, effect text, rate double precision, capacity double precision, max_reserved double precision, until timestamptz, reason text, who text, forever boolean);
DROP FUNCTION ratelimit._scope(name text, key text, global boolean, every_key boolean);
DROP FUNCTION ratelimit._check_known(name text);
DROP FUNCTION ratelimit._nearest(name text);
DROP FUNCTION ratelimit._numbers(name text, key text, at timestamptz, before bigint, varying boolean, under bigint, standing boolean, given ratelimit._terms);
DROP FUNCTION ratelimit._under(d ratelimit._terms, o ratelimit.overrides);
DROP FUNCTION ratelimit._defined(name text);
DROP TYPE ratelimit._terms;
DROP FUNCTION ratelimit._capacity(rate double precision, capacity double precision, new_rate double precision, new_capacity double precision);
DROP FUNCTION ratelimit._in_force(name text, keys text[], at timestamptz, most bigint);
DROP FUNCTION ratelimit._usable(effect text, rate double precision, capacity double precision, max_reserved double precision);
DROP FUNCTION ratelimit._lasts(until timestamptz, removed_at timestamptz, at timestamptz);
DROP INDEX ratelimit.overrides_newest;
DROP INDEX ratelimit.overrides_numbers;
DROP INDEX ratelimit.overrides_ends;
DROP TABLE ratelimit.overrides;
DROP FUNCTION ratelimit.withdraw(program text);
DROP FUNCTION ratelimit.publish(program text, definitions jsonb);
DROP FUNCTION ratelimit._publish(program text, definitions jsonb, heartbeat boolean);
DROP FUNCTION ratelimit._spelled(definition jsonb, number bigint);
DROP FUNCTION ratelimit._list(program text, own text);
DROP FUNCTION ratelimit._check_definition(definition jsonb, number bigint);
DROP FUNCTION ratelimit._validate_slots(name text, capacity double precision);
DROP FUNCTION ratelimit._validate_varies(name text, rate double precision, period interval, kind text, capacity double precision, varies interval);
DROP TABLE ratelimit.definitions;
DROP FUNCTION ratelimit._left(value double precision[], ts timestamptz[], at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, shards integer, count double precision, reserve boolean, windows timestamptz[]);
DROP FUNCTION ratelimit._kept("left" double precision, ts timestamptz[], at timestamptz, run_at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, count double precision, windows timestamptz[]);
DROP FUNCTION ratelimit._run_at("left" double precision, ts timestamptz[], at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, shards integer, windows timestamptz[]);
DROP FUNCTION ratelimit._repaid(value double precision[], ts timestamptz[], at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, shards integer, windows timestamptz[]);
DROP FUNCTION ratelimit._when(value double precision[], ts timestamptz[], at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, shards integer, count double precision, floor double precision, reserve boolean, windows timestamptz[]);
DROP FUNCTION ratelimit._total(value double precision[], ts timestamptz[], at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[]);
DROP FUNCTION ratelimit._grid(name text, key text, period interval, kind text, start timestamptz);
DROP FUNCTION ratelimit._instant(micros bigint);
DROP FUNCTION ratelimit._micros(at timestamptz);
DROP FUNCTION ratelimit._check_keyless(name text, key text);
DROP FUNCTION ratelimit._wrong_key(key text, global boolean);
DROP FUNCTION ratelimit._validate(name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz, max_reserved double precision, shards integer, zone text, anchor timestamp, zero boolean);
DROP FUNCTION ratelimit._back(rate double precision, capacity double precision);
DROP FUNCTION ratelimit._zone(zone text);
DROP FUNCTION ratelimit._same_windows(period interval, a timestamp, b timestamp);
DROP FUNCTION ratelimit._windows(period interval, zone text, anchor timestamp, at timestamptz, back integer, ahead integer);
DROP FUNCTION ratelimit._longest(period interval);
DROP FUNCTION ratelimit.key_parts(key text);
DROP FUNCTION ratelimit.key(VARIADIC parts text[]);
DROP VIEW ratelimit.turn_31;
DROP VIEW ratelimit.turn_30;
DROP VIEW ratelimit.turn_29;
DROP VIEW ratelimit.turn_28;
DROP VIEW ratelimit.turn_27;
DROP VIEW ratelimit.turn_26;
DROP VIEW ratelimit.turn_25;
DROP VIEW ratelimit.turn_24;
DROP VIEW ratelimit.turn_23;
DROP VIEW ratelimit.turn_22;
DROP VIEW ratelimit.turn_21;
DROP VIEW ratelimit.turn_20;
DROP VIEW ratelimit.turn_19;
DROP VIEW ratelimit.turn_18;
DROP VIEW ratelimit.turn_17;
DROP VIEW ratelimit.turn_16;
DROP VIEW ratelimit.turn_15;
DROP VIEW ratelimit.turn_14;
DROP VIEW ratelimit.turn_13;
DROP VIEW ratelimit.turn_12;
DROP VIEW ratelimit.turn_11;
DROP VIEW ratelimit.turn_10;
DROP VIEW ratelimit.turn_09;
DROP VIEW ratelimit.turn_08;
DROP VIEW ratelimit.turn_07;
DROP VIEW ratelimit.turn_06;
DROP VIEW ratelimit.turn_05;
DROP VIEW ratelimit.turn_04;
DROP VIEW ratelimit.turn_03;
DROP VIEW ratelimit.turn_02;
DROP VIEW ratelimit.turn_01;
DROP VIEW ratelimit.turn_00;
DROP FUNCTION ratelimit._raise(names text[], at timestamptz, ord integer[], value double precision[], ts timestamptz[]);
DROP FUNCTION ratelimit._coalesce(names text[], rates double precision[], periods interval[], capacities double precision[], keys text[], defs integer[], starts timestamptz[], repeats integer[], counts double precision[], floors double precision[], calls integer[], asks integer[], ask_defs integer[], ask_starts timestamptz[], ask_counts double precision[], ask_floors double precision[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit.reset(name text, key text, global boolean, reason text, who text);
DROP FUNCTION ratelimit._note_reset(name text, key text, reason text, who text, effect text);
DROP FUNCTION ratelimit._reset(names text[], keys text[]);
DROP FUNCTION ratelimit._wire_each(ends integer[], names text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floors double precision[], shard_a integer[], shard_b integer[], keys text[], counts double precision[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._wire_move(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floor double precision, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._wire_refund_one(name text, key text, rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], counts double precision[], taken double precision[], held double precision[], parts double precision[], taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._wire_refund(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], counts double precision[], taken double precision[], held double precision[], parts double precision[], taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._wire_apply_one(op text, name text, key text, rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], reserve boolean, now timestamptz, or_raise boolean, windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval);
DROP FUNCTION ratelimit._wire_apply(op text, names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], reserve boolean, now timestamptz, or_raise boolean, windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval);
DROP FUNCTION ratelimit._wire_consume_several(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], counts double precision[], floors double precision[], now timestamptz, or_raise boolean, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._wire_consume_sharded(name text, key text, rate double precision, period interval, capacity double precision, start timestamptz, shards integer, count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz, or_raise boolean, windows timestamptz[]);
DROP FUNCTION ratelimit._wire_consume(name text, key text, rate double precision, period interval, capacity double precision, start timestamptz, count double precision, floor double precision, now timestamptz, expect_denial boolean, or_raise boolean, windows timestamptz[]);
DROP FUNCTION ratelimit._each(ends integer[], names text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floors double precision[], shard_a integer[], shard_b integer[], keys text[], counts double precision[], now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._consume_keys(name text, keys text[], rate double precision, period interval, capacity double precision, counts double precision[], now timestamptz, floor double precision, coalesced boolean);
DROP FUNCTION ratelimit._move(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floor double precision, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._lock(names text[], keys text[], capacities double precision[], shards integer[], now timestamptz);
DROP FUNCTION ratelimit._refund(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], counts double precision[], taken double precision[], held double precision[], parts double precision[], taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._give_back(value double precision[], ts timestamptz[], promised timestamptz, at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, count double precision, taken double precision, held double precision, part double precision, taken_at timestamptz, run_at timestamptz, windows timestamptz[]);
DROP FUNCTION ratelimit._promise("left" double precision, floor double precision, ts timestamptz, rate double precision, period interval, capacity double precision);
DROP FUNCTION ratelimit._apply(op text, names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], reserve boolean, now timestamptz, or_raise boolean, windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval, until timestamptz);
DROP FUNCTION ratelimit._consume_several(names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], counts double precision[], floors double precision[], now timestamptz, or_raise boolean, windows timestamptz[], firsts integer[], lasts integer[]);
DROP FUNCTION ratelimit._consume_sharded(name text, key text, rate double precision, period interval, capacity double precision, start timestamptz, shards integer, count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz, or_raise boolean, windows timestamptz[]);
DROP FUNCTION ratelimit._costly(shards smallint);
DROP FUNCTION ratelimit._consume(name text, key text, rate double precision, period interval, capacity double precision, start timestamptz, count double precision, floor double precision, now timestamptz, expect_denial boolean, or_raise boolean, windows timestamptz[]);
DROP TYPE ratelimit._settled;
DROP TYPE ratelimit._decisions;
DROP TYPE ratelimit._decision;
DROP FUNCTION ratelimit._database();
DROP FUNCTION ratelimit._one_server();
DROP FUNCTION ratelimit._distributed();
DROP FUNCTION ratelimit._valid(rate double precision, period interval, capacity double precision, count double precision, now timestamptz);
DROP FUNCTION ratelimit._shown(total double precision, rate double precision, capacity double precision);
DROP FUNCTION ratelimit._even(total double precision, rate double precision, capacity double precision);
DROP FUNCTION ratelimit._whole(total double precision, lowest double precision);
DROP FUNCTION ratelimit._tolerance(capacity double precision, lowest double precision);
DROP FUNCTION ratelimit._upto(at timestamptz, period interval, start timestamptz, windows timestamptz[]);
DROP FUNCTION ratelimit._available(value double precision, ts timestamptz, upto timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[]);
DROP TABLE ratelimit.limits;
-- +goose StatementEnd

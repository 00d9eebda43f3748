-- Returns the tokens that the rows (shards) of a limit and key hold together at an instant. Without rows, the limit is full. Equal shares
-- are multiplied: a sum could round.
CREATE OR REPLACE FUNCTION ratelimit._total(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._when(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    shards integer, count double precision, floor double precision, reserve boolean DEFAULT false, windows timestamptz[] DEFAULT NULL
) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._repaid(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer, windows timestamptz[] DEFAULT NULL
) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN ratelimit._when(value, ts, at, rate, period, capacity, start, shards, '0', CASE WHEN start IS NULL THEN '0' ELSE
    ratelimit._even(ratelimit._total(value, ts, at, rate, period, capacity, start, windows), rate, capacity) END, false, windows);

-- Returns the instant at which work may run if its call leaves `left` tokens: the first at which nothing is owed. `ts` has
-- the ts of the rows before the call.
CREATE OR REPLACE FUNCTION ratelimit._run_at(
    "left" double precision, ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer, windows timestamptz[] DEFAULT NULL
) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._kept(
    "left" double precision, ts timestamptz[], at timestamptz, run_at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz, count double precision, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._left(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    shards integer, count double precision, reserve boolean, windows timestamptz[] DEFAULT NULL
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
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

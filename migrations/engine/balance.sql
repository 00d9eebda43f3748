-- What the rows of a limit and key (its shards) hold together at an instant: the sum of ratelimit_apply, to the bit. No rows are
-- a full limit.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_total(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz
) RETURNS double precision
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    m         integer := pg_catalog.cardinality(value);
    upto      timestamptz := CASE WHEN start IS NULL THEN at ELSE date_bin(period, at, start) END;
    total     double precision := 0;
    available double precision;
    lowest    double precision;
    highest   double precision;
BEGIN
    FOR i IN 1..m LOOP
        available := /* TEMPLATE: schema */ratelimit_available(value[i], ts[i], upto, rate / m::double precision, period, capacity / m::double precision, start);
        total := total + available;
        lowest := least(lowest, available); highest := greatest(highest, available);
    END LOOP;
    RETURN CASE WHEN m = 0 OR lowest = capacity / m::double precision THEN capacity
                WHEN lowest = highest THEN m::double precision * lowest
                ELSE total END;
END
$body$;

-- The first instant, not before `at`, at which the rows hold enough for count to be taken leaving at least floor, if nobody else
-- takes or gives anything. Beyond the year 9999 it is the end of that year.
--
-- A quotient says where about; rounding makes it wrong by little. From there it walks, in steps that grow, until the answer is
-- between two instants, and halves what is between them: the predicate is the very one that decides, so that it is right to
-- the microsecond.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_when(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    shards integer, count double precision, floor double precision
) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    enough  double precision := floor - CASE WHEN greatest(pg_catalog.cardinality(value), shards) > 1 THEN 1e-9::double precision ELSE 0 END;
    missing double precision := floor + count - /* TEMPLATE: schema */ratelimit_total(value, ts, at, rate, period, capacity, start);
    too_early bigint := /* TEMPLATE: schema */ratelimit_micros(at);
    late      bigint := 253402300799999999;
    guess     bigint := too_early + 1;
    step      bigint := 1;
    wait      double precision;
BEGIN
    IF too_early >= late OR /* TEMPLATE: schema */ratelimit_total(value, ts, at, rate, period, capacity, start) - count >= enough THEN
        RETURN at;
    END IF;
    wait := least(greatest(missing, 1e-30), 1e30) / rate; -- in periods; the bounds keep rows written by hand from an overflow
    wait := CASE WHEN start IS NULL THEN wait ELSE ceil(wait) END * date_part('epoch', period) * '1e6';
    IF wait < (late - too_early)::double precision THEN
        guess := greatest(guess, wait::bigint
            + /* TEMPLATE: schema */ratelimit_micros(CASE WHEN start IS NULL THEN at ELSE date_bin(period, at, start) END));
    END IF;
    WHILE too_early + 1 < late LOOP
        IF guess <= too_early OR guess >= late THEN -- the walk has ended
            guess := too_early + (late - too_early) / 2;
            step := 0;
        END IF;
        IF /* TEMPLATE: schema */ratelimit_total(value, ts, /* TEMPLATE: schema */ratelimit_instant(guess), rate, period, capacity, start) - count >= enough THEN
            late := guess;
            guess := guess - least(step, late - too_early);
        ELSE
            too_early := guess;
            guess := guess + least(step, late - too_early);
        END IF;
        step := least(step, 100000000000000000) * 8;
    END LOOP;
    RETURN /* TEMPLATE: schema */ratelimit_instant(late);
END
$body$;

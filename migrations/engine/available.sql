-- The tokens in a row at `upto` (see ratelimit._upto). Time that runs backwards refills nothing. All functions in it are
-- IMMUTABLE, so that the planner inlines it.
--
-- The windows of a calendar are as long as months are, so their starts are listed. For a row older than the list, the refills
-- before it are counted as if all windows were as long as the longest, which is never too many. With a period of 0, they are not: such a
-- row is refilled only if the list fills it. Then nothing is written by an estimate, and the library asks again with a longer list.
--
-- ts is the instant of the row's last use, for a fixed window too. If it were the start of the window, a new kind, period or
-- start would refill tokens for time in which the limit was used under the old numbers.
CREATE OR REPLACE FUNCTION ratelimit._available(
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
CREATE OR REPLACE FUNCTION ratelimit._upto(at timestamptz, period interval, start timestamptz, windows timestamptz[] DEFAULT NULL) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN start IS NULL OR windows IS NOT NULL THEN at ELSE date_bin(period, at, start) END;

-- How many tokens a call may lack because of rounding, if it may leave a balance of `lowest`: rounding alone denies nothing. It is at
-- most a thousandth of a token, so whole tokens stay exact at every capacity. No call leaves less than its floor less this, so that of
-- several calls does not add up. internal/algebra has the same. The callers of the functions that decide take it from the floor.
CREATE OR REPLACE FUNCTION ratelimit._tolerance(capacity double precision, lowest double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least((capacity - lowest) * '1e-9', '1e-3');

-- The largest whole number of tokens that can be taken from total and leaves at least `lowest`. The difference may have been rounded up
-- to a whole number.
CREATE OR REPLACE FUNCTION ratelimit._whole(total double precision, lowest double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN floor(total - lowest) - CASE WHEN total - floor(total - lowest) < lowest THEN '1'::double precision ELSE 0 END;

-- The balance from which on nothing is owed, for a limit whose balance is total now. A refill that repays a debt is rounded, too, also
-- where the capacity is 0.
CREATE OR REPLACE FUNCTION ratelimit._even(total double precision, rate double precision, capacity double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN -ratelimit._tolerance(capacity, least(total, '0') - rate);

-- A balance as callers see it. If it lacks only the tolerance of a whole number, it is that number: so many tokens can be taken. What is
-- less than the smallest count is 0, as is a debt that rounding alone makes.
CREATE OR REPLACE FUNCTION ratelimit._shown(total double precision, rate double precision, capacity double precision) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN total >= '1e-15' THEN greatest(total, ratelimit._whole(total, -ratelimit._tolerance(capacity, 0)))
    WHEN total >= ratelimit._even(total, rate, capacity) THEN 0
    ELSE total END;

-- Reports whether a decision can be made with these numbers. Callers validate their arguments; this check stops NaN and NULL,
-- which would be granted or fill a bucket (CONCURRENCY.md, G2).
--
-- The planner inlines it. Each operator costs 1 % of a call of ratelimit._consume, so it has no more than it needs.
CREATE OR REPLACE FUNCTION ratelimit._valid(
    rate double precision, period interval, capacity double precision, count double precision, now timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN rate + capacity + count < '1e16' AND least(rate, capacity, count) >= '0' AND isfinite(period) AND isfinite(coalesce(now, 'epoch'));

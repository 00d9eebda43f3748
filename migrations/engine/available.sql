-- The tokens of a row at `upto`: now for a token bucket, the start of the current window for a fixed window.
-- Time that runs backwards refills nothing. The planner inlines it: each function in it is IMMUTABLE.
--
-- ts is the instant of the row's last use, of a fixed window, too: were it the start of the window, a limit whose kind, period or
-- start is changed would be refilled, by its new numbers, for time in which it had been used by the old ones.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_available(
    value double precision, ts timestamptz, upto timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz
) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(capacity, value + CASE
    WHEN start IS NULL THEN
        greatest(date_part('epoch', upto - ts), 0) * rate / date_part('epoch', period)
    ELSE
        greatest(round(date_part('epoch', upto - date_bin(period, ts, start)) / date_part('epoch', period)), 0) * rate
    END);

-- Whether a decision can be made by these numbers. The functions that decide trust their callers to have validated their arguments. But in
-- Postgres NaN is above all numbers, and LEAST and GREATEST ignore NULL: such an argument would be granted, or fill a bucket.
--
-- The planner inlines it. Each operator costs 1 % of a call of _ratelimit_consume, so that it has no more than it takes.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_valid(
    rate double precision, period interval, capacity double precision, count double precision, now timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN rate + capacity + count < '1e16' AND least(rate, capacity, count) >= '0' AND isfinite(period) AND isfinite(coalesce(now, 'epoch'));

-- The tokens in a row at `upto`: the current instant for a token bucket, the start of the current window for a fixed window.
-- Time that runs backwards refills nothing. All functions in it are IMMUTABLE, so that the planner inlines it.
--
-- ts is the instant of the row's last use, for a fixed window too. If it were the start of the window, a new kind, period or
-- start would refill tokens for time in which the limit was used under the old numbers.
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

-- Reports whether a decision can be made with these numbers. Callers validate their arguments; this check stops NaN and NULL,
-- which would be granted or fill a bucket (CONCURRENCY.md, G2).
--
-- The planner inlines it. Each operator costs 1 % of a call of _ratelimit_consume, so it has no more than it needs.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_valid(
    rate double precision, period interval, capacity double precision, count double precision, now timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN rate + capacity + count < '1e16' AND least(rate, capacity, count) >= '0' AND isfinite(period) AND isfinite(coalesce(now, 'epoch'));

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

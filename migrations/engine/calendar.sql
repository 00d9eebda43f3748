-- The calendar windows of SQL by hand. The Go library makes the same lists of windows itself, since it can keep them
-- (ratelimit/limit_calendar.go).

-- Returns the longest that a calendar window can be, changes of the zone's offset included. It is NULL if period is not a
-- unit of the calendar.
CREATE OR REPLACE FUNCTION ratelimit._longest(period interval) RETURNS interval
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
CREATE OR REPLACE FUNCTION ratelimit._windows(
    period interval, zone text, anchor timestamp, at timestamptz, back integer, ahead integer
) RETURNS timestamptz[]
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._same_windows(period interval, a timestamp, b timestamp) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN a::time = b::time AND CASE WHEN date_part('day', period) > '0' THEN (a::date - b::date) % date_part('day', period)::integer = 0
    ELSE date_part('day', a) = date_part('day', b)
        AND ((date_part('year', a) - date_part('year', b)) * '12' + date_part('month', a) - date_part('month', b))::integer
            % (date_part('year', period) * '12' + date_part('month', period))::integer = 0 END;

-- Returns the name of a zone as pg_timezone_names has it, or NULL if Postgres knows no such zone. Postgres takes it in any case, Go as it is
-- written. The view itself would open the files of all zones, so it is asked only about what Postgres may have taken for a rule such as EST5.
CREATE OR REPLACE FUNCTION ratelimit._zone(zone text) RETURNS text
LANGUAGE plpgsql
SET timezone = 'UTC' -- so that the zone of the session is as before
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._back(rate double precision, capacity double precision) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN least(ceil(capacity / rate) + '101', 1000)::integer;

-- Raises an error if a limit's definition is invalid. It has the bounds of the Go library (Config.Limit). zero: a rate of 0 is valid,
-- which denies every token by policy. For a sweep and for ratelimit.keys, such a limit has no rows.
--
-- An error says which argument is wrong, what it must be, and what it is. Every 22023 of the SQL functions is written so.
CREATE OR REPLACE FUNCTION ratelimit._validate(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    max_reserved double precision, shards integer, zone text, anchor timestamp, zero boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql
AS $body$
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
CREATE OR REPLACE FUNCTION ratelimit._wrong_key(key text, global boolean) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN global AND key IS NOT NULL THEN 'key must be NULL with global => true: such a limit has no keys'
    WHEN global THEN NULL
    WHEN key IS NULL OR key = '' THEN pg_catalog.format('key must have 1 to 1024 bytes, not %s; global => true is for a limit without keys',
        coalesce(octet_length(key)::text, 'NULL'))
    WHEN octet_length(key) > 1024 THEN pg_catalog.format('key must have 1 to 1024 bytes, not %s', octet_length(key)) END;

-- Refuses the empty key to an operator, where it has no row and another key of the limit has one: a key was forgotten.
CREATE OR REPLACE FUNCTION ratelimit._check_keyless(name text, key text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
BEGIN
    IF key = '' AND NOT EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = '')
       AND EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key > '') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: it has keys: name one', name);
    END IF;
END
$body$;

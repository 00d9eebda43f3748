-- Raises an error if a limit's definition is invalid. It uses the terms and bounds of the Go library (Config.Limit).
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_validate(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    max_reserved double precision, shards integer, zone text, anchor timestamp
) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR name = '' THEN 'the name is empty'
        WHEN octet_length(name) > 255 THEN 'the name is longer than 255 bytes'
        WHEN rate IS NULL OR NOT rate BETWEEN '1e-15' AND '1e15' THEN
            pg_catalog.format('rate %s is not between 1e-15 and 1e15', coalesce(rate::text, 'NULL'))
        WHEN kind IS NULL OR kind NOT IN ('token bucket', 'fixed window', 'calendar window') THEN
            pg_catalog.format('kind %s is not ''token bucket'', ''fixed window'' or ''calendar window''', quote_nullable(kind))
        WHEN kind = 'calendar window' AND /* TEMPLATE: schema */_ratelimit_longest(period) IS NULL THEN
            pg_catalog.format('period %s is not 1 day, 7 days, 1 month, 3 months or 1 year, as for a calendar window', coalesce(period::text, 'NULL'))
        WHEN kind <> 'calendar window' AND coalesce(zone, anchor::text) IS NOT NULL THEN 'only a calendar window has a zone and an anchor'
        WHEN zone <> 'UTC' AND zone !~ '^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)+$' THEN -- no rule, such as 'CET-1CEST,M3.5.0/2,M10.5.0/3'
            pg_catalog.format('zone %L is neither ''UTC'' nor a name with a slash, such as ''Europe/Berlin''', zone)
        WHEN NOT anchor BETWEEN '0001-01-01' AND '9999-12-31 23:59:59.999999' THEN pg_catalog.format('anchor %s is not between the years 1 and 9999', anchor)
        WHEN anchor <> date_trunc('second', anchor) THEN pg_catalog.format('anchor %s has a fraction of a second', anchor)
        WHEN kind <> 'calendar window' AND (period IS NULL OR NOT (period > '0' AND period <= '106751 days 23:47:16.854775'
            AND date_part('year', period) = '0' AND date_part('month', period) = '0')) THEN
            pg_catalog.format('period %s is not between a microsecond and 106751 days, written without months and years', coalesce(period::text, 'NULL'))
        WHEN NOT (capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('capacity %s is neither 0 nor between 1e-15 and 1e15', capacity)
        WHEN NOT (max_reserved = '0' OR max_reserved BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('max_reserved %s is neither 0 nor between 1e-15 and 1e15', max_reserved)
        WHEN start IS NOT NULL AND kind <> 'fixed window' THEN pg_catalog.format('a %s has no start', kind)
        WHEN NOT (isfinite(start) AND extract(epoch FROM start) * '1000000' BETWEEN '-62135596800000000' AND '253402300799999999') THEN
            pg_catalog.format('start %s is not between the years 1 and 9999', start)
        WHEN shards IS NULL OR NOT shards BETWEEN 1 AND 100 THEN
            pg_catalog.format('%s shards are not between 1 and 100', coalesce(shards::text, 'NULL'))
    END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
END
$body$;

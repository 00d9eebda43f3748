CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_keys(
    name text, rate double precision, period interval, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL, now timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor date DEFAULT NULL
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    at timestamptz := coalesce(now, clock_timestamp());
    windows timestamptz[]; -- of a calendar window
BEGIN
    PERFORM /* TEMPLATE: schema */_ratelimit_validate(name, rate, period, kind, capacity, start, NULL, 1, zone, anchor);
    IF NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: now is %s, which is not finite', name, at);
    END IF;
    capacity := coalesce(capacity, rate);
    IF kind = 'calendar window' THEN
        windows := /* TEMPLATE: schema */_ratelimit_windows(period, coalesce(zone, 'UTC'), coalesce(anchor, '2001-01-01'), at,
            /* TEMPLATE: schema */_ratelimit_back(rate, capacity, NULL), 100);
        period := /* TEMPLATE: schema */_ratelimit_longest(period);
    END IF;
    RETURN QUERY
        SELECT t.key, t.total, CASE WHEN t.total < least(capacity, 1) THEN
               nullif(/* TEMPLATE: schema */_ratelimit_when(t.value, t.ts, at, rate, period, capacity, t.grid, 1, least(capacity, 1), 0, false, windows), at) END
          FROM (
            SELECT s.*, CASE WHEN pg_catalog.cardinality(s.value) > 1 THEN
                   /* TEMPLATE: schema */_ratelimit_total(s.value, s.ts, at, rate, period, capacity, s.grid, windows)
                   ELSE -- the same sum, which the planner inlines: there may be millions of keys
                   /* TEMPLATE: schema */_ratelimit_available(s.value[1], s.ts[1], /* TEMPLATE: schema */_ratelimit_upto(at, period, s.grid, windows),
                       rate, period, capacity, s.grid, windows)
                   END AS total
              FROM (
                SELECT r.key, CASE kind WHEN 'fixed window' THEN /* TEMPLATE: schema */_ratelimit_grid(name, r.key, period, kind, start)
                       WHEN 'calendar window' THEN windows[1] END AS grid,
                       pg_catalog.array_agg(r.value ORDER BY r.shard) AS value, pg_catalog.array_agg(r.ts ORDER BY r.shard) AS ts
                  FROM /* TEMPLATE: schema */rate_limits AS r
                 WHERE r.name = name
                 GROUP BY r.key
                OFFSET 0
              ) AS s
            OFFSET 0
          ) AS t;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_keys(text, double precision, interval, text, double precision, timestamptz, timestamptz, text, date) IS $text$
The keys of a rate limit that have been used, and their tokens now. It writes and locks nothing. The limited keys:

    SELECT * FROM ratelimit_keys('sendMessage', rate => 10, period => '1 minute') WHERE retry_at IS NOT NULL ORDER BY remaining

Result, one row for each key:
  key        the key as it is stored; '' for a limit without keys
  remaining  the balance in tokens; below zero if tokens are owed
  retry_at   the instant at which there will be one token, or at which a limit with a capacity below 1 will be full. NULL: there
             are enough tokens now

The arguments and their defaults are the same as for ratelimit. Pass the numbers that the program uses: they are not in the database, and
other numbers give another answer. An invalid argument is an error, SQLSTATE 22023.
$text$;

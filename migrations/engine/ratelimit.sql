-- The limiter for SQL by hand, for triggers and for other languages: ratelimit, ratelimit_or_raise, ratelimit_reserve,
-- ratelimit_take and, in keys.sql, ratelimit_keys. They call the functions above and decide as the Go library does: a limit with
-- the same numbers is the same limit on both sides. Their COMMENTs are the manual: SELECT obj_description('ratelimit'::regproc)

-- Decides for the functions below. verb is
--   consume  take count
--   reserve  take count, even before it is refilled: down to -max_reserved
--   take     take as many whole tokens as there are, at least 1 and at most count
-- retry_at of a denial is when the same call would be granted; of a reservation, when the work may run. Otherwise it is NULL.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_by_hand(
    verb text, name text, key text, rate double precision, period interval, count double precision, kind text,
    capacity double precision, start timestamptz, max_reserved double precision, shards integer, global boolean,
    now timestamptz, zone text, anchor timestamp,
    OUT ok boolean, OUT remaining double precision, OUT retry_at timestamptz, OUT reset_at timestamptz, OUT at timestamptz,
    OUT taken double precision
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text;
    floor double precision := 0;
    most  double precision := count; -- of take; the count is then 1
    grid  timestamptz;
    windows timestamptz[]; -- of a calendar window
    every interval;           -- the calendar's unit
    ahead integer := 2;       -- how many windows the list reaches ahead
    reach integer;            -- how many it needs
    value double precision[];
    ts    timestamptz[];
    a     integer := 0;
    b     integer := 0;
    effect text := 'numbers'; -- of the override in force
    until timestamptz;        -- its end
BEGIN
    IF coalesce(rate, capacity, max_reserved) IS NULL AND period IS NULL AND start IS NULL AND zone IS NULL AND anchor IS NULL
       AND kind = 'token bucket' AND shards = 1 THEN
        SELECT n.effect, n.until, n.kind, n.rate, n.period, n.capacity, n.max_reserved, n.start, n.shards, n.zone, n.anchor
          INTO effect, until, kind, rate, period, capacity, max_reserved, start, shards, zone, anchor
          FROM /* TEMPLATE: schema */_ratelimit_numbers(name, key, coalesce(now, clock_timestamp())) AS n;
        IF effect <> 'numbers' THEN -- which needs no numbers, and may have none
            kind := 'token bucket';
            rate := 1;
            period := '1 second';
            capacity := '1e15';
            max_reserved := NULL;
            start := NULL;
            shards := 1;
            zone := NULL;
            anchor := NULL;
        END IF;
    END IF;
    -- A rate of 0 is a denial by policy. It is valid here only: for a sweep and for ratelimit_keys, such a limit has no rows.
    PERFORM /* TEMPLATE: schema */_ratelimit_validate(name, CASE WHEN rate = '0' THEN '1' ELSE rate END, period, kind, capacity, start, max_reserved, shards, zone, anchor);
    capacity := coalesce(capacity, rate);
    wrong := CASE
        WHEN rate = '0' AND (capacity > '0' OR max_reserved > '0') THEN 'capacity and max_reserved are NULL or 0 if the rate is 0'
        WHEN global AND key IS NOT NULL THEN 'a global limit has no key'
        WHEN global THEN NULL
        WHEN key IS NULL OR key = '' THEN 'the key is NULL or empty; global => true is for a limit without keys'
        WHEN octet_length(key) > 1024 THEN 'the key is longer than 1024 bytes'
    END;
    wrong := coalesce(wrong, CASE
        WHEN verb = 'take' AND (count BETWEEN '1' AND '1e15') IS NOT TRUE THEN
            pg_catalog.format('most %s is not between 1 and 1e15', coalesce(count::text, 'NULL'))
        WHEN count IS NULL OR NOT (count = '0' OR count BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('count %s is neither 0 nor between 1e-15 and 1e15', coalesce(count::text, 'NULL'))
        WHEN NOT (isfinite(now) AND extract(epoch FROM now) * '1000000' BETWEEN '-30610224000000000' AND '253402300799999999') THEN
            pg_catalog.format('now, %s, is not between the years 1000 and 9999', now)
    END);
    IF verb = 'take' THEN
        count := 1;
    END IF;
    IF wrong IS NULL AND effect = 'unlimited' THEN
        ok := true;
        remaining := 'Infinity';
        at := coalesce(now, clock_timestamp());
        retry_at := CASE WHEN verb = 'reserve' THEN at END;
        reset_at := at;
        taken := most;
        RETURN;
    END IF;
    IF wrong IS NULL AND (rate = '0' OR effect = 'block') THEN
        ok := count = '0';
        remaining := 0;
        at := coalesce(now, clock_timestamp());
        retry_at := CASE WHEN NOT ok THEN until WHEN verb = 'reserve' THEN at END;
        RETURN;
    END IF;
    IF wrong IS NULL AND verb = 'reserve' THEN
        floor := coalesce(-max_reserved, '-Infinity');
        IF kind = 'calendar window' THEN
            floor := greatest(floor, rate * '-100');
            ahead := ceil(-floor / rate)::integer + 2;
        END IF;
    END IF;
    IF capacity - count < floor THEN
        IF count <= capacity - floor THEN -- only rounding makes it too little
            floor := capacity - count;
        ELSE
            wrong := coalesce(wrong, pg_catalog.format('%s tokens can never be granted, since at most %s can be had at once', count, capacity - floor));
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;

    key := coalesce(key, '');
    IF kind = 'calendar window' THEN
        zone := coalesce(zone, 'UTC');
        anchor := coalesce(anchor, '2001-01-01');
        at := coalesce(now, clock_timestamp());
        every := period;
        windows := /* TEMPLATE: schema */_ratelimit_windows(every, zone, anchor, at, /* TEMPLATE: schema */_ratelimit_back(rate, capacity, max_reserved), ahead);
        grid := windows[1];
        period := /* TEMPLATE: schema */_ratelimit_longest(every);
    ELSE
        grid := /* TEMPLATE: schema */_ratelimit_grid(name, key, period, kind, start);
    END IF;
    IF shards > 1 THEN
        a := trunc(random() * shards::double precision);
        b := (a + 1 + trunc(random() * (shards - 1)::double precision)::integer) % shards; -- a shard other than a
    END IF;
    IF verb = 'take' OR verb = 'reserve' AND grid IS NOT NULL THEN
        SELECT r.granted, r.at, r.value, r.ts, r.taken INTO ok, at, value, ts, taken
          FROM /* TEMPLATE: schema */_ratelimit_apply(CASE WHEN verb = 'take' THEN 'take' ELSE 'consume' END, ARRAY[name], ARRAY[key], ARRAY[rate], ARRAY[period], ARRAY[capacity], ARRAY[grid], ARRAY[shards],
              ARRAY[count], ARRAY[floor], ARRAY[a], ARRAY[b], reserve => verb = 'reserve', now => now,
              windows => windows, firsts => ARRAY[1], lasts => ARRAY[pg_catalog.cardinality(windows)], mosts => ARRAY[most]) AS r;
    ELSIF shards = 1 THEN
        SELECT r.granted, r.at, ARRAY[r.value], ARRAY[r.ts] INTO ok, at, value, ts
          FROM /* TEMPLATE: schema */_ratelimit_consume(name, key, rate, period, capacity, grid, count, floor, now, windows => windows) AS r;
    ELSE
        SELECT r.granted, r.at, r.value, r.ts INTO ok, at, value, ts
          FROM /* TEMPLATE: schema */_ratelimit_consume_sharded(name, key, rate, period, capacity, grid, shards, count, floor, a, b, now, windows => windows) AS r;
    END IF;
    IF ok AND pg_catalog.cardinality(value) = 1 THEN -- it took from one shard, which stands for all
        value := pg_catalog.array_fill(value[1], ARRAY[shards]);
        ts := pg_catalog.array_fill(ts[1], ARRAY[shards]);
    END IF;

    remaining := /* TEMPLATE: schema */_ratelimit_total(value, ts, at, rate, period, capacity, grid, windows);
    IF NOT ok OR verb = 'reserve' THEN
        reach := least(ceil((CASE WHEN ok THEN '0' ELSE count + floor END - remaining) / rate) + '2', 40000)::integer;
        IF windows IS NOT NULL AND reach > ahead THEN -- the list has to reach to where the tokens will be there
            windows := /* TEMPLATE: schema */_ratelimit_windows(every, zone, anchor, at, /* TEMPLATE: schema */_ratelimit_back(rate, capacity, max_reserved), reach);
        END IF;
        retry_at := /* TEMPLATE: schema */_ratelimit_when(value, ts, at, rate, period, capacity, grid, shards,
            CASE WHEN ok THEN 0 ELSE count END, CASE WHEN ok THEN 0 ELSE floor END, verb = 'reserve' AND NOT ok, windows);
    END IF;
    IF windows IS NOT NULL THEN
        reset_at := windows[pg_catalog.width_bucket(at, windows) + 1];
    ELSIF grid IS NULL THEN
        reset_at := /* TEMPLATE: schema */_ratelimit_when(value, ts, at, rate, period, capacity, NULL, shards, capacity, 0);
    ELSE
        reset_at := /* TEMPLATE: schema */_ratelimit_instant(least(253402300799999999,
            /* TEMPLATE: schema */_ratelimit_micros(date_bin(period, at, grid)) + (extract(epoch FROM period) * '1000000')::bigint));
    END IF;
END
$body$;

-- Raises a denial as an error. QueueConsume of the Go library does not take it for a denial of its own, since the DETAIL differs.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_denied(
    name text, remaining double precision, retry_at timestamptz, reset_at timestamptz, at timestamptz
) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    RAISE SQLSTATE 'PT429' USING
        MESSAGE = 'rate limit exceeded: ' || name,
        DETAIL = pg_catalog.json_build_object('limit', name, 'remaining', remaining,
            'retry_after', extract(epoch FROM retry_at - at), 'retry_at', retry_at, 'reset_at', reset_at),
        HINT = CASE WHEN retry_at IS NULL THEN 'The limit grants nothing: waiting does not help.'
            ELSE pg_catalog.format('Retry in %s s.', ceil(extract(epoch FROM retry_at - at))) END;
END
$body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false, now timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT ok boolean, OUT remaining double precision, OUT retry_after interval, OUT retry_at timestamptz, OUT reset_at timestamptz,
    OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT r.ok, r.remaining, r.retry_at - r.at, r.retry_at, r.reset_at, r.at INTO ok, remaining, retry_after, retry_at, reset_at, at
      FROM /* TEMPLATE: schema */_ratelimit_by_hand('consume', name, key, rate, period, count, kind, capacity, start, NULL, shards, global, now, zone, anchor) AS r;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, timestamptz, text, timestamp) IS $text$
Takes tokens from a rate limit, if it has enough, in the caller's transaction. A rollback gives them back.

    SELECT * FROM ratelimit('sendMessage', 'user-17', rate => 10, period => '1 minute')

Call it in FROM: (ratelimit(...)).* calls it once for each column.

Without any numbers, they are those that a program has published (ratelimit_publish), under the override in force:

    SELECT * FROM ratelimit('sendMessage', 'user-17')

With numbers, nobody looks for overrides and blocks.

Arguments:
  name          the name of the limit, 1 to 255 bytes
  key           the user, tenant or other owner of the tokens, 1 to 1024 bytes; NULL or empty is an error, unless global is
                true. The Go library stores a key of several parts as 'eu|user-17', with a backslash before each | and \ in
                a part
  rate          tokens per period, 1e-15 to 1e15; or 0: every token is denied by policy, and nothing is read or written
  period        an interval of 1 microsecond to 106751 days, without months and years; for a calendar window '1 day', '7 days',
                '1 month', '3 months' or '1 year'
  count         the tokens to take: 0, or 1e-15 to 1e15; default 1
  kind          'token bucket' (the default), refilled continuously; 'fixed window', refilled at the start of each period; or
                'calendar window', refilled at the start of each day, week, month, quarter or year
  capacity      the most tokens that can be saved up: 0, or 1e-15 to 1e15; default NULL, the rate. With 0, tokens can only be
                reserved (ratelimit_reserve)
  start         an instant at which a fixed window begins, in the years 1 to 9999; the other windows are whole periods from it.
                Default NULL: an offset that is a hash of the key, or of the name if global. A token bucket has none
  shards        the number of rows that the key is spread over, 1 to 100; default 1
  global        true: the limit has no keys, and key must be NULL. Default false
  now           the instant of the decision, in the years 1000 to 9999; default NULL, the database's clock
  zone          of a calendar window: 'UTC' (the default) or a name of Postgres' time zones with a slash, such as
                'Europe/Berlin'. Postgres' own zone files decide when its days begin
  anchor        of a calendar window: a date on which a window begins, such as the first day of a customer's contract, or a date and a
                time of day, such as '2026-01-31 15:00'. It is local time in the zone, in the years 1 to 9999, without fractions of a
                second. In a month with fewer days, it is the last. Default NULL: weeks begin on Mondays, the others on their first
                day, at midnight

Result:
  ok            true: the tokens were taken. false: the call was denied and took nothing
  remaining     the balance in tokens; below zero if tokens are owed
  retry_after   denied: the wait until retry_at, an interval. NULL as retry_at
  retry_at      denied: the first instant at which the same call would be granted, if no other call takes tokens. NULL: the
                call was granted, or waiting does not help, since it was denied by policy or by a block without an end
  reset_at      the instant at which the bucket will be full or the next window begins; NULL if the rate is 0
  at            the instant of the decision

Errors:
  22023         an argument is invalid, or the count can never be granted; without numbers, also if no program has published
                the limit, or if only the program knows the numbers of the key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_or_raise(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false, now timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT ok boolean, OUT remaining double precision, OUT retry_after interval, OUT retry_at timestamptz, OUT reset_at timestamptz,
    OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT r.ok, r.remaining, r.retry_at, r.reset_at, r.at INTO ok, remaining, retry_at, reset_at, at
      FROM /* TEMPLATE: schema */_ratelimit_by_hand('consume', name, key, rate, period, count, kind, capacity, start, NULL, shards, global, now, zone, anchor) AS r;
    IF NOT ok THEN
        PERFORM /* TEMPLATE: schema */_ratelimit_denied(name, remaining, retry_at, reset_at, at);
    END IF;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_or_raise(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, timestamptz, text, timestamp) IS $text$
The same as ratelimit, but it raises a denial as an error. It is for triggers and wherever a result could be overlooked:

    PERFORM ratelimit_or_raise('sendMessage', NEW.sender, rate => 10, period => '1 minute')

Arguments, result and other errors are the same as for ratelimit. The error of a denial has
  SQLSTATE  PT429, which PostgREST turns into the HTTP status 429
  MESSAGE   'rate limit exceeded: ' and the name of the limit. It has no key: keys may be personal data, and errors are logged
  DETAIL    JSON: {"limit": ..., "remaining": tokens, "retry_after": seconds, "retry_at": ..., "reset_at": ...}
  HINT      'Retry in ... s.', in whole seconds, rounded up; or 'The limit grants nothing: waiting does not help.'
$text$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_reserve(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, max_reserved double precision DEFAULT NULL, shards integer DEFAULT 1,
    global boolean DEFAULT false, now timestamptz DEFAULT NULL, zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT retry_at timestamptz, OUT delay interval, OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    ok boolean;
BEGIN
    SELECT r.ok, r.retry_at, r.retry_at - r.at, r.remaining, r.reset_at, r.at INTO ok, retry_at, delay, remaining, reset_at, at
      FROM /* TEMPLATE: schema */_ratelimit_by_hand('reserve', name, key, rate, period, count, kind, capacity, start, max_reserved, shards, global, now, zone, anchor) AS r;
    IF NOT ok THEN -- returned, it would look like a reservation
        PERFORM /* TEMPLATE: schema */_ratelimit_denied(name, remaining, retry_at, reset_at, at);
    END IF;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_reserve(text, text, double precision, interval, double precision, text, double precision, timestamptz, double precision, integer, boolean, timestamptz, text, timestamp) IS $text$
Takes tokens that may not be there yet, in the caller's transaction. A rollback gives them back.

    INSERT INTO jobs (payload, run_at)
    SELECT 'hello', retry_at FROM ratelimit_reserve('emails', 'team-a', rate => 10, period => '1 minute', max_reserved => 100)

A reservation is no permission to work now: the work may run at retry_at, when its tokens will have been refilled. A caller that
ignores retry_at exceeds the limit. A denial is an error, the same as of ratelimit_or_raise: more would be owed than max_reserved.
Its retry_at is when the same reservation would be made.

The arguments are the same as for ratelimit, also without any numbers, and
  max_reserved  the most tokens that may be owed: 0, or 1e-15 to 1e15; default NULL, no bound but, of a calendar window, the
                tokens of 100 windows. With 0, only tokens that are there can be taken

Result:
  retry_at   the instant at which the work may run; at, if the tokens are there
  delay      the wait from at to retry_at, an interval
  remaining  the balance in tokens; below zero if tokens are owed
  reset_at   as for ratelimit
  at         the instant of the decision

Errors, besides those of ratelimit:
  PT429      denied: see ratelimit_or_raise
$text$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_take(
    name text, key text DEFAULT NULL, most bigint DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL,
    shards integer DEFAULT 1, global boolean DEFAULT false, now timestamptz DEFAULT NULL,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT taken bigint, OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    ok boolean;
    retry_at timestamptz;
BEGIN
    SELECT r.ok, r.taken::bigint, r.remaining, r.retry_at, r.reset_at, r.at INTO ok, taken, remaining, retry_at, reset_at, at
      FROM /* TEMPLATE: schema */_ratelimit_by_hand('take', name, key, rate, period, most::double precision, kind, capacity, start, NULL, shards, global, now, zone, anchor) AS r;
    IF NOT ok THEN -- a number of 0 could be overlooked
        PERFORM /* TEMPLATE: schema */_ratelimit_denied(name, remaining, retry_at, reset_at, at);
    END IF;
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_take(text, text, bigint, double precision, interval, text, double precision, timestamptz, integer, boolean, timestamptz, text, timestamp) IS $text$
Takes the whole tokens that a rate limit has, at least 1 and at most `most`, in the caller's transaction. A rollback gives them
back. It is for workers that fetch work in batches: take up to 100, and fetch as many jobs as were taken.

    SELECT taken FROM ratelimit_take('emails', 'team-a', 100, rate => 10, period => '1 minute')

The arguments are the same as for ratelimit, also without any numbers. There is no count, but
  most  the most tokens to take, a whole number of 1 to 1e15. It may be above the capacity

Result:
  taken      how many tokens were taken, a whole number of at least 1
  remaining  the balance in tokens
  reset_at   as for ratelimit
  at         the instant of the decision

Errors, besides those of ratelimit:
  PT429      denied: there is less than one token. See ratelimit_or_raise
$text$;

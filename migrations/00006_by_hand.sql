-- +goose Up

-- The limiter for people who type SQL, for triggers, and for other languages: ratelimit, ratelimit_or_raise and ratelimit_keys.
-- They are a front of the functions before, and decide as the Go library does: a limit of the same numbers is the same limit
-- from either side. What a caller should know is in the comments on the functions: SELECT obj_description('ratelimit'::regproc)
-- (Quoted constants, casts and pg_catalog: see 00002.)

-- +goose StatementBegin
DO $install$
BEGIN

-- Says what is wrong with a limit's definition, in the terms and within the bounds of the Go library (ratelimit.New).
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_validate(
    name text, rate double precision, period interval, kind text, capacity double precision, start timestamptz,
    max_reserved double precision, shards integer
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
        WHEN period IS NULL OR NOT (period > '0' AND period <= '106751 days 23:47:16.854775'
            AND date_part('year', period) = '0' AND date_part('month', period) = '0') THEN
            pg_catalog.format('period %s is not between a microsecond and 106751 days, without months and years', coalesce(period::text, 'NULL'))
        WHEN kind IS NULL OR kind NOT IN ('token bucket', 'fixed window') THEN
            pg_catalog.format('kind %s is neither ''token bucket'' nor ''fixed window''', quote_nullable(kind))
        WHEN NOT (capacity = '0' OR capacity BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('capacity %s is neither 0 nor between 1e-15 and 1e15', capacity)
        WHEN NOT (max_reserved = '0' OR max_reserved BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('max_reserved %s is neither 0 nor between 1e-15 and 1e15', max_reserved)
        WHEN start IS NOT NULL AND kind <> 'fixed window' THEN 'a token bucket has no start'
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
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Microseconds since 1970 and back. (An interval with days would be added in the session's time zone; one with hours is not.)
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_micros(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (extract(epoch FROM at) * '1000000')::bigint
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_instant(micros bigint) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN timestamptz 'epoch' + make_interval(hours => (micros / 3600000000)::integer, secs => (micros % 3600000000)::double precision / '1000000')
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- The argument `start` of the functions before: NULL for a token bucket; for a fixed window the first instant of its grid from the
-- year 1 on. Without a start, the grid's offset is a hash of name and key, the same as the Go library's.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_grid(name text, key text, period interval, kind text, start timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    year1 CONSTANT bigint := -62135596800000000;
    along bigint := @extschema@.ratelimit_micros(start) - year1;
BEGIN
    IF kind = 'token bucket' THEN
        RETURN NULL;
    END IF;
    IF along IS NULL THEN
        along := (('x' || left(encode(sha256(
            pg_catalog.convert_to(name, 'UTF8') || decode('00', 'hex') || pg_catalog.convert_to(key, 'UTF8')), 'hex'), 16))::bit(64) >> 1)::bigint;
    END IF;
    RETURN @extschema@.ratelimit_instant(year1 + along % (extract(epoch FROM period) * '1000000')::bigint);
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- What the rows of a limit and key (its shards) hold together at an instant: the sum of ratelimit_apply, to the bit. No rows are
-- a full limit.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_total(
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
        available := @extschema@.ratelimit_available(value[i], ts[i], upto, rate / m::double precision, period, capacity / m::double precision, start);
        total := total + available;
        lowest := least(lowest, available); highest := greatest(highest, available);
    END LOOP;
    RETURN CASE WHEN m = 0 OR lowest = capacity / m::double precision THEN capacity
                WHEN lowest = highest THEN m::double precision * lowest
                ELSE total END;
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- The first instant, not before `at`, at which the rows hold enough for count to be taken leaving at least floor, if nobody else
-- takes or gives anything. Beyond the year 9999 it is the end of that year.
--
-- A quotient says where about; rounding makes it wrong by little. From there it walks, in steps that grow, until the answer is
-- between two instants, and halves what is between them: the predicate is the very one that decides, so that it is right to
-- the microsecond.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_when(
    value double precision[], ts timestamptz[], at timestamptz,
    rate double precision, period interval, capacity double precision, start timestamptz,
    shards integer, count double precision, floor double precision
) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
#variable_conflict use_variable
DECLARE
    enough  double precision := floor - CASE WHEN greatest(pg_catalog.cardinality(value), shards) > 1 THEN 1e-9::double precision ELSE 0 END;
    missing double precision := floor + count - @extschema@.ratelimit_total(value, ts, at, rate, period, capacity, start);
    too_early bigint := @extschema@.ratelimit_micros(at);
    late      bigint := 253402300799999999;
    guess     bigint := too_early + 1;
    step      bigint := 1;
    wait      double precision;
BEGIN
    IF too_early >= late OR @extschema@.ratelimit_total(value, ts, at, rate, period, capacity, start) - count >= enough THEN
        RETURN at;
    END IF;
    wait := least(greatest(missing, 1e-30), 1e30) / rate; -- in periods; the bounds keep rows written by hand from an overflow
    wait := CASE WHEN start IS NULL THEN wait ELSE ceil(wait) END * date_part('epoch', period) * '1e6';
    IF wait < (late - too_early)::double precision THEN
        guess := greatest(guess, wait::bigint
            + @extschema@.ratelimit_micros(CASE WHEN start IS NULL THEN at ELSE date_bin(period, at, start) END));
    END IF;
    WHILE too_early + 1 < late LOOP
        IF guess <= too_early OR guess >= late THEN -- the walk has ended
            guess := too_early + (late - too_early) / 2;
            step := 0;
        END IF;
        IF @extschema@.ratelimit_total(value, ts, @extschema@.ratelimit_instant(guess), rate, period, capacity, start) - count >= enough THEN
            late := guess;
            guess := guess - least(step, late - too_early);
        ELSE
            too_early := guess;
            guess := guess + least(step, late - too_early);
        END IF;
        step := least(step, 100000000000000000) * 8;
    END LOOP;
    RETURN @extschema@.ratelimit_instant(late);
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, reserve boolean DEFAULT false, max_reserved double precision DEFAULT NULL,
    shards integer DEFAULT 1, global boolean DEFAULT false, now timestamptz DEFAULT NULL,
    OUT ok boolean, OUT remaining double precision, OUT retry_after interval,
    OUT retry_at timestamptz, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text;
    floor double precision := 0;
    grid  timestamptz;
    value double precision[];
    ts    timestamptz[];
    a     integer;
    b     integer;
BEGIN
    PERFORM @extschema@.ratelimit_validate(name, rate, period, kind, capacity, start, max_reserved, shards);
    capacity := coalesce(capacity, rate);
    wrong := CASE
        WHEN global AND key IS NOT NULL THEN 'a global limit has no key'
        WHEN global THEN NULL
        WHEN key IS NULL OR key = '' THEN 'the key is NULL or empty; global => true asks for a limit without keys'
        WHEN octet_length(key) > 1024 THEN 'the key is longer than 1024 bytes'
    END;
    wrong := coalesce(wrong, CASE
        WHEN count IS NULL OR NOT (count = '0' OR count BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('count %s is neither 0 nor between 1e-15 and 1e15', coalesce(count::text, 'NULL'))
        WHEN reserve IS NULL THEN 'reserve is neither true nor false'
        WHEN NOT (isfinite(now) AND extract(epoch FROM now) * '1000000' BETWEEN '-30610224000000000' AND '253402300799999999') THEN
            pg_catalog.format('now, %s, is not between the years 1000 and 9999', now)
    END);
    IF wrong IS NULL AND reserve THEN
        floor := coalesce(-max_reserved, '-Infinity');
    END IF;
    IF capacity - count < floor THEN
        IF count + floor <= capacity THEN -- it is enough but for rounding
            floor := capacity - count;
        ELSE
            wrong := coalesce(wrong, pg_catalog.format('%s tokens can never be granted, since at most %s can be had at once', count, capacity - floor));
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;

    key := coalesce(key, '');
    grid := @extschema@.ratelimit_grid(name, key, period, kind, start);
    IF shards = 1 THEN
        SELECT r.granted, r.at, ARRAY[r.value], ARRAY[r.ts] INTO ok, at, value, ts
          FROM @extschema@.ratelimit_consume(name, key, rate, period, capacity, grid, count, floor, now, validated => true) AS r;
    ELSE
        a := trunc(random() * shards::double precision);
        b := (a + 1 + trunc(random() * (shards - 1)::double precision)::integer) % shards; -- another
        SELECT r.granted, r.at, r.value, r.ts INTO ok, at, value, ts
          FROM @extschema@.ratelimit_consume_sharded(name, key, rate, period, capacity, grid, shards, count, floor, a, b, now, validated => true) AS r;
        IF ok AND pg_catalog.cardinality(value) = 1 THEN -- it took from one shard, which speaks for all
            value := pg_catalog.array_fill(value[1], ARRAY[shards]);
            ts := pg_catalog.array_fill(ts[1], ARRAY[shards]);
        END IF;
    END IF;

    remaining := @extschema@.ratelimit_total(value, ts, at, rate, period, capacity, grid);
    retry_at := @extschema@.ratelimit_when(value, ts, at, rate, period, capacity, grid, shards,
        CASE WHEN ok THEN 0 ELSE count END, CASE WHEN ok THEN 0 ELSE floor END);
    retry_after := retry_at - at;
    IF grid IS NULL THEN
        reset_at := @extschema@.ratelimit_when(value, ts, at, rate, period, capacity, NULL, shards, capacity, 0);
    ELSE
        reset_at := @extschema@.ratelimit_instant(least(253402300799999999,
            @extschema@.ratelimit_micros(date_bin(period, at, grid)) + (extract(epoch FROM period) * '1000000')::bigint));
    END IF;
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

EXECUTE replace($ddl$
COMMENT ON FUNCTION @extschema@.ratelimit(text, text, double precision, interval, double precision, text, double precision, timestamptz, boolean, double precision, integer, boolean, timestamptz) IS $text$
Takes tokens of a rate limit, if it has enough, in the caller's transaction: a rollback gives them back.

    SELECT * FROM ratelimit('sendMessage', 'user-17', rate => 10, period => '1 minute')

  name, key     whose tokens, as text. A key of several parts, as the Go library stores it: 'eu|user-17' (with a backslash before each
                | and \ of the parts)
  rate, period  that many tokens per interval, which has no months
  count         how many to take; 1
  kind          'token bucket', refilled continuously, or 'fixed window', refilled at the start of each period
  capacity      the most that can be saved up. NULL: the rate. 0: nothing is, so that all have to reserve
  start         a fixed window's grid goes through it. NULL: an offset that is a hash of name and key
  reserve       whether tokens may be taken that are not there yet: retry_at then says when they will be
  max_reserved  how many may be owed. NULL: no bound. 0: none, so that nothing can be reserved
  shards        over how many rows the key is spread
  global        true for a limit without keys, whose key stays NULL. A key that is NULL or empty is an error otherwise
  now           NULL: the database's clock

  ok            whether they were taken. Nothing was if not
  remaining     the balance; what is owed is below zero
  retry_after   how long to wait until
  retry_at      denied: the first instant at which the same call would be granted, if nobody else takes any. Granted: when
                the work may run
  reset_at      when the bucket will be full, or the next window begins
  at            the instant of the decision

What is wrong with the arguments, or can never be granted, is an error (SQLSTATE 22023). Call it in FROM: (ratelimit(...)).*
calls it once for each column.
$text$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

-- Denies by an error, which is no denial of the Go library's to QueueConsume: its DETAIL is another.
EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_or_raise(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, reserve boolean DEFAULT false, max_reserved double precision DEFAULT NULL,
    shards integer DEFAULT 1, global boolean DEFAULT false, now timestamptz DEFAULT NULL,
    OUT ok boolean, OUT remaining double precision, OUT retry_after interval,
    OUT retry_at timestamptz, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
BEGIN
    SELECT r.ok, r.remaining, r.retry_after, r.retry_at, r.reset_at, r.at INTO ok, remaining, retry_after, retry_at, reset_at, at
      FROM @extschema@.ratelimit(name, key, rate, period, count, kind, capacity, start, reserve, max_reserved, shards, global, now) AS r;
    IF NOT ok THEN
        RAISE SQLSTATE 'PT429' USING
            MESSAGE = 'rate limit exceeded: ' || name,
            DETAIL = pg_catalog.json_build_object('limit', name, 'remaining', remaining,
                'retry_after', extract(epoch FROM retry_after), 'retry_at', retry_at, 'reset_at', reset_at),
            HINT = pg_catalog.format('Retry in %s s.', ceil(extract(epoch FROM retry_after)));
    END IF;
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

EXECUTE replace($ddl$
COMMENT ON FUNCTION @extschema@.ratelimit_or_raise(text, text, double precision, interval, double precision, text, double precision, timestamptz, boolean, double precision, integer, boolean, timestamptz) IS $text$
The same as ratelimit, but a denial is an error, for triggers and wherever a result could be overlooked:

    PERFORM ratelimit_or_raise('sendMessage', NEW.sender, rate => 10, period => '1 minute')

  SQLSTATE  PT429, which PostgREST turns into the HTTP status 429
  MESSAGE   the name of the limit. No keys: they may be personal data, and errors are logged
  DETAIL    {"limit": ..., "remaining": ..., "retry_after": in seconds, "retry_at": ..., "reset_at": ...}
$text$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_keys(
    name text, rate double precision, period interval, kind text DEFAULT 'token bucket',
    capacity double precision DEFAULT NULL, start timestamptz DEFAULT NULL, now timestamptz DEFAULT NULL
) RETURNS TABLE (key text, remaining double precision, retry_at timestamptz)
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    at timestamptz := coalesce(now, clock_timestamp());
BEGIN
    PERFORM @extschema@.ratelimit_validate(name, rate, period, kind, capacity, start, NULL, 1);
    IF NOT isfinite(at) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: now is %s', name, at);
    END IF;
    capacity := coalesce(capacity, rate);
    RETURN QUERY
        SELECT t.key, t.total, CASE WHEN t.total < least(capacity, 1) THEN
               nullif(@extschema@.ratelimit_when(t.value, t.ts, at, rate, period, capacity, t.grid, 1, least(capacity, 1), 0), at) END
          FROM (
            SELECT s.*, CASE WHEN pg_catalog.cardinality(s.value) > 1 THEN
                   @extschema@.ratelimit_total(s.value, s.ts, at, rate, period, capacity, s.grid)
                   ELSE -- the same, inline: there may be millions
                   @extschema@.ratelimit_available(s.value[1], s.ts[1], CASE WHEN s.grid IS NULL THEN at ELSE date_bin(period, at, s.grid) END,
                       rate, period, capacity, s.grid)
                   END AS total
              FROM (
                SELECT r.key, CASE WHEN kind <> 'token bucket' THEN @extschema@.ratelimit_grid(name, r.key, period, kind, start) END AS grid,
                       pg_catalog.array_agg(r.value ORDER BY r.shard) AS value, pg_catalog.array_agg(r.ts ORDER BY r.shard) AS ts
                  FROM @extschema@.rate_limits AS r
                 WHERE r.name = name
                 GROUP BY r.key
                OFFSET 0
              ) AS s
            OFFSET 0
          ) AS t;
END
$body$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

EXECUTE replace($ddl$
COMMENT ON FUNCTION @extschema@.ratelimit_keys(text, double precision, interval, text, double precision, timestamptz, timestamptz) IS $text$
The keys of a rate limit that have been used, and what they have now. Writes and locks nothing. Who is limited:

    SELECT * FROM ratelimit_keys('sendMessage', rate => 10, period => '1 minute') WHERE retry_at IS NOT NULL ORDER BY remaining

  key        as stored; '' for a limit without keys
  remaining  the balance; what is owed is below zero
  retry_at   when there will be a token (or, of a limit that holds less than one, when it will be full); NULL: there is

The arguments are those of ratelimit. The limit's numbers are not in the database: with others than the program's, the
answer is what those would make of it.
$text$
$ddl$, '@extschema@', pg_catalog.quote_ident(current_schema()));

END
$install$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION ratelimit_keys(text, double precision, interval, text, double precision, timestamptz, timestamptz);
DROP FUNCTION ratelimit_or_raise(text, text, double precision, interval, double precision, text, double precision, timestamptz, boolean, double precision, integer, boolean, timestamptz);
DROP FUNCTION ratelimit(text, text, double precision, interval, double precision, text, double precision, timestamptz, boolean, double precision, integer, boolean, timestamptz);
DROP FUNCTION ratelimit_when(double precision[], timestamptz[], timestamptz, double precision, interval, double precision, timestamptz, integer, double precision, double precision);
DROP FUNCTION ratelimit_total(double precision[], timestamptz[], timestamptz, double precision, interval, double precision, timestamptz);
DROP FUNCTION ratelimit_grid(text, text, interval, text, timestamptz);
DROP FUNCTION ratelimit_instant(bigint);
DROP FUNCTION ratelimit_micros(timestamptz);
DROP FUNCTION ratelimit_validate(text, double precision, interval, text, double precision, timestamptz, double precision, integer);

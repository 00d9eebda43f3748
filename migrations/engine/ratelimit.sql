-- The limiter for SQL by hand, for triggers and for other languages: ratelimit.consume, ratelimit.try, ratelimit.reserve, ratelimit.take,
-- ratelimit.consume_all and, in keys.sql, ratelimit.keys. They call the functions above and decide as the Go library does: a limit with the
-- same numbers is the same limit on both sides. Their COMMENTs are the manual: SELECT obj_description('ratelimit.consume'::regproc)
--
-- All of them but ratelimit.try raise a denial: an answer that nobody looks at must not let everybody pass.

-- A request of SQL by hand, as ratelimit._prepare makes it: valid, with the numbers in force.
CREATE TYPE ratelimit._request AS (
    name text, key text, rate double precision, period interval, capacity double precision,
    start timestamptz,      -- of the windows' grid, as for ratelimit._consume
    shards integer, count double precision, floor double precision,
    most double precision,  -- of take; the count is then 1
    windows timestamptz[],  -- of a calendar window, as are the next four
    unit interval,          -- the calendar's period; period is then the longest that it can be
    zone text, anchor timestamp,
    ahead integer,          -- how many windows the list reaches ahead
    max_reserved double precision,
    effect text,            -- 'numbers': the rows decide. 'block' and 'unlimited': nothing is read or written. A 'block' with a rate of 0 is a plan: a rate of 0, or no slots. 'never': the
                            -- count is more than the numbers can grant, but not what comes after them. 'varies': only the program knows
    until timestamptz,      -- the end of the override in force; NULL: there is none, or it has no end
    given ratelimit._terms -- the definition that the caller gives; kind NULL: the published one
);

-- Whether the effect denies a request: a plan denies every token, and a block also a count of 0.
CREATE OR REPLACE FUNCTION ratelimit._refuses(q ratelimit._request) RETURNS boolean
LANGUAGE sql IMMUTABLE
RETURN q.effect = 'block' AND (q.rate > '0' OR q.count > '0');

-- Raises the error of a count that the numbers can never grant: it is the caller's, as any other argument that is invalid.
CREATE OR REPLACE FUNCTION ratelimit._never(name text, wrong text) RETURNS void
LANGUAGE plpgsql
AS $body$
BEGIN
    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong),
        DETAIL = pg_catalog.json_build_object('name', name, 'reason', 'never');
END
$body$;

-- The request of ratelimit._prepare for slots: a row of one shard with a rate and a capacity of 0, whose floor is minus how many there are.
CREATE OR REPLACE FUNCTION ratelimit._prepare_slots(
    verb text, name text, key text, count double precision, capacity double precision, global boolean, effect text, until timestamptz, now timestamptz, later boolean
) RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text := CASE WHEN verb NOT IN ('hold', 'settle') THEN 'it has slots, which only ratelimit.hold takes' ELSE coalesce(
        ratelimit._wrong_key(key, global), CASE
        WHEN verb = 'hold' AND (count BETWEEN '1' AND '1e9' AND count = trunc(count)) IS NOT TRUE THEN
            pg_catalog.format('count of slots must be a whole number between 1 and 1e9, not %s', coalesce(count::text, 'NULL'))
        WHEN NOT (isfinite(now) AND extract(epoch FROM now) * '1000000' BETWEEN '-30610224000000000' AND '253402300799999999') THEN
            pg_catalog.format('now must be between the years 1000 and 9999, not %s', now)
    END) END;
    q ratelimit._request;
BEGIN
    IF wrong IS NULL AND effect = 'numbers' THEN
        PERFORM ratelimit._validate_slots(name, capacity);
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;
    q := ROW(name, coalesce(key, ''), CASE effect WHEN 'block' THEN 1 ELSE 0 END, '1 second', 0, NULL, 1, count, CASE effect WHEN 'unlimited' THEN '-Infinity' ELSE -capacity END, NULL, NULL,
        NULL, NULL, NULL, 0, NULL, CASE WHEN effect = 'numbers' AND capacity = '0' THEN 'block' WHEN effect IN ('numbers', 'unlimited') THEN 'slots' ELSE effect END,
        until, NULL)::ratelimit._request;
    IF verb = 'hold' AND NOT later THEN
        PERFORM ratelimit._check_slots(q, 'count', coalesce(now, clock_timestamp()));
    END IF;
    RETURN q;
END
$body$;

-- Refuses more slots than there are, now and once overrides have ended.
CREATE OR REPLACE FUNCTION ratelimit._check_slots(q ratelimit._request, what text, at timestamptz) RETURNS void
LANGUAGE plpgsql
AS $body$
BEGIN
    IF q.effect = 'slots' AND q.count > -q.floor AND ratelimit._retry_at('hold', q, NULL, NULL, at) IS NULL THEN
        PERFORM ratelimit._never(q.name, pg_catalog.format('%s must be at most %s, not %s: more can never be granted', what, -q.floor, q.count));
    END IF;
END
$body$;

-- Refuses numbers of the caller's that are not those of the limit: what programs may not define beside each other (ratelimit._publish), slots, and
-- another rate or capacity, unless the name varies, or a list has them that was used within 7 days: the caller may be older than the programs. Reports
-- whether an override may be in force.
CREATE OR REPLACE FUNCTION ratelimit._check_given(name text, key text, g ratelimit._terms, now timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    at    CONSTANT timestamptz := clock_timestamp();
    d     record;
    known boolean := false; -- a list that counts or is in use has numbers
    same  boolean := false;
BEGIN
    FOR d IN
        SELECT f.kind, f.rate, f.period, f.capacity, f.start, f.zone, f.anchor, f.varies, f.current OR f.alive_until > at AS alive
          FROM ratelimit.definitions AS f
         WHERE f.name = name AND f.kind <> 'unlimited' AND (f.current OR f.alive_until > at OR f.published_at > at - interval '7 days')
    LOOP
        IF d.alive AND (d.kind = 'slots' OR g.rate > '0' AND (d.rate > '0' OR d.varies IS NOT NULL) AND (
               d.kind <> g.kind OR d.period <> g.period OR (d.start IS NULL) <> (g.start IS NULL) OR date_bin(g.period, g.start, d.start) <> g.start
               OR d.varies IS NULL AND (d.zone <> coalesce(g.zone, 'UTC') OR NOT ratelimit._same_windows(g.period, coalesce(g.anchor, '2001-01-01'), d.anchor)))) THEN
            RAISE invalid_parameter_value USING
                MESSAGE = pg_catalog.format('rate limit %L: kind, period, start, zone and anchor must be those that a program has published, %s, not a %s of %s%s%s', name,
                    CASE d.kind WHEN 'slots' THEN d.kind ELSE pg_catalog.format('a %s of %s', d.kind, d.period) END || coalesce(' from ' || d.start::text, '')
                        || coalesce(' in ' || d.zone || ' from ' || d.anchor::text, ''),
                    g.kind, g.period, ' from ' || g.start::text, ' in ' || g.zone || coalesce(' from ' || g.anchor::text, '')),
                HINT = 'Leave the numbers out.';
        END IF;
        known := known OR d.alive;
        same := same OR d.varies IS NOT NULL OR coalesce(d.rate = g.rate AND d.capacity = g.capacity, false);
    END LOOP;
    IF known AND NOT same THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('rate limit %L: rate and capacity must be those that a program has published, not %s and %s', name, g.rate, g.capacity),
            HINT = 'Leave the numbers out.';
    END IF;
    RETURN EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = name AND o.key IS NULL AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > now)
        OR EXISTS (SELECT 1 FROM ratelimit.overrides AS o WHERE o.name = name AND o.key = key AND greatest(o.made_at, coalesce(least(o.until, o.removed_at), 'infinity')) > now);
END
$body$;

-- Validates a request and finds its numbers: those of the arguments or, without any, those that a program has published, under
-- the override in force. verb is
--   consume  take count
--   reserve  take count, even before it is refilled: down to -max_reserved
--   take     take as many whole tokens as there are, at least 1 and at most `most`
--   hold     take count, and give it back at the end of a hold
--   settle   end a hold
-- Only the last two know slots, whose effect is 'slots', or what decides beside it. later: the request is valid now, and the question is what will be in force at `now`. Then no numbers are an error. standing: as if
-- nothing were blocked.
CREATE OR REPLACE FUNCTION ratelimit._prepare(
    verb text, name text, key text, rate double precision, period interval, count double precision, kind text,
    capacity double precision, start timestamptz, shards integer, global boolean, zone text, anchor timestamp,
    max_reserved double precision, most double precision, now timestamptz, later boolean DEFAULT false,
    standing boolean DEFAULT false
) RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text;
    floor double precision := 0;
    grid  timestamptz;
    windows timestamptz[];
    unit  interval;
    ahead integer := 2;
    effect text := 'numbers';
    until timestamptz;
    after ratelimit._request;
    given ratelimit._terms;
    n     ratelimit._terms;
    beneath ratelimit._terms; -- a block
BEGIN
    IF coalesce(rate, capacity, max_reserved) IS NULL AND period IS NULL AND start IS NULL AND zone IS NULL AND anchor IS NULL
       AND kind = 'token bucket' AND shards = 1 THEN
        IF later AND NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS d WHERE d.name = name AND (d.current OR d.alive_until > clock_timestamp())) THEN
            RETURN ROW(name, coalesce(key, ''), rate, period, capacity, NULL, shards, count, floor, most, NULL, NULL, zone, anchor, ahead, max_reserved, 'varies', NULL, NULL)::ratelimit._request;
        END IF;
        n := ratelimit._numbers(name, key, coalesce(now, clock_timestamp()), varying => later, standing => standing);
    ELSE
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, max_reserved, shards, zone, anchor, zero => true);
        IF verb <> 'settle' THEN -- by numbers in force
            given := ROW('numbers', NULL, NULL, kind, rate, period, coalesce(capacity, rate), max_reserved, start, shards, zone, anchor, NULL);
            IF later OR ratelimit._check_given(name, key, given, coalesce(now, clock_timestamp())) THEN
                n := ratelimit._numbers(name, key, coalesce(now, clock_timestamp()), standing => standing, given => given);
            END IF;
        END IF;
    END IF;
    IF n.effect = 'block' AND NOT count <= '0' AND coalesce(n.rate, n.capacity) = '0' THEN -- slots have no rate
        beneath := ratelimit._numbers(name, key, coalesce(now, clock_timestamp()), varying => true, standing => true, given => given);
        IF beneath.effect = 'numbers' AND coalesce(beneath.rate, beneath.capacity) = '0' THEN
            n := beneath; -- a plan denies, whatever is blocked
        END IF;
    END IF;
    IF n.effect IS NOT NULL THEN
        effect := n.effect; until := n.until; kind := n.kind; rate := n.rate; period := n.period; capacity := n.capacity;
        max_reserved := n.max_reserved; start := n.start; shards := n.shards; zone := n.zone; anchor := n.anchor;
        IF effect <> 'numbers' AND kind IS DISTINCT FROM 'slots' THEN -- which needs no numbers, and may have none
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
    IF kind = 'slots' THEN
        RETURN ratelimit._prepare_slots(verb, name, key, count, capacity, global, effect, until, now, later);
    END IF;
    IF given.kind IS NULL THEN
        PERFORM ratelimit._validate(name, rate, period, kind, capacity, start, max_reserved, shards, zone, anchor, zero => true);
    END IF;
    capacity := coalesce(capacity, rate);
    IF abs(count) < '1e-15' THEN -- what rounding leaves of a difference
        count := 0;
    END IF;
    wrong := coalesce(ratelimit._wrong_key(key, global), CASE
        WHEN verb = 'take' AND (most BETWEEN '1' AND '1e15') IS NOT TRUE THEN
            pg_catalog.format('most must be a whole number between 1 and 1e15, not %s', coalesce(most::text, 'NULL'))
        WHEN count IS NULL OR NOT (count = '0' OR count BETWEEN '1e-15' AND '1e15') THEN
            pg_catalog.format('count must be 0 or between 1e-15 and 1e15, not %s', coalesce(count::text, 'NULL'))
        WHEN NOT (isfinite(now) AND extract(epoch FROM now) * '1000000' BETWEEN '-30610224000000000' AND '253402300799999999') THEN
            pg_catalog.format('now must be between the years 1000 and 9999, not %s', now)
    END);
    IF wrong IS NULL AND effect = 'numbers' AND rate = '0' THEN
        effect := 'block';
    END IF;
    IF wrong IS NULL AND effect <> 'numbers' THEN
        RETURN ROW(name, coalesce(key, ''), rate, period, capacity, NULL, shards, count, floor, most, NULL, NULL, zone, anchor, ahead, max_reserved, effect, until, given)::ratelimit._request;
    END IF;
    IF wrong IS NULL AND verb = 'reserve' THEN
        floor := coalesce(-max_reserved, '-1e300'); -- -Infinity is a charge's
        IF kind = 'calendar window' THEN
            floor := greatest(floor, rate * '-100');
            ahead := ceil(-floor / rate)::integer + 2;
        END IF;
    END IF;
    IF capacity - count < floor - ratelimit._tolerance(capacity, floor) THEN
        IF later OR wrong IS NULL AND until IS NOT NULL THEN
            effect := 'never';
        ELSIF wrong IS NULL THEN
            PERFORM ratelimit._never(name, CASE WHEN verb = 'take' THEN
                    pg_catalog.format('capacity must be at least 1 to take whole tokens, not %s', capacity)
                ELSE pg_catalog.format('count must be at most %s, not %s: more can never be granted', capacity - floor, count) END);
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: %s', name, wrong);
    END IF;

    key := coalesce(key, '');
    IF kind = 'calendar window' THEN
        zone := coalesce(zone, 'UTC');
        anchor := coalesce(anchor, '2001-01-01');
        unit := period;
        windows := ratelimit._windows(unit, zone, anchor, coalesce(now, clock_timestamp()), ratelimit._back(rate, capacity), ahead);
        grid := windows[1];
        period := ratelimit._longest(unit);
    ELSE
        grid := ratelimit._grid(name, key, period, kind, start);
    END IF;
    after := ROW(name, key, rate, period, capacity, grid, shards, count, floor, most, windows, unit, zone, anchor, ahead, max_reserved, effect, until, given)::ratelimit._request;
    IF effect = 'never' AND NOT later AND ratelimit._retry_at(verb, after, NULL, NULL, coalesce(now, clock_timestamp())) IS NULL THEN
        PERFORM ratelimit._never(name, pg_catalog.format('count must be at most %s, not %s: more can never be granted', capacity - floor, count));
    END IF;
    RETURN after;
END
$body$;

-- The request of a balance, by the terms in force: for one token or, where the capacity is less, for all of them. It is valid, since whoever
-- reads is told what is there. windows: of a calendar, if the caller has them.
CREATE OR REPLACE FUNCTION ratelimit._ask(name text, key text, n ratelimit._terms, at timestamptz, given ratelimit._terms, windows timestamptz[] DEFAULT NULL)
RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
DECLARE
    q ratelimit._request;
BEGIN
    q.name := name; q.key := key; q.effect := n.effect; q.until := n.until; q.given := given; q.count := 1; q.floor := 0; q.shards := n.shards;
    q.rate := n.rate; q.period := n.period; q.capacity := n.capacity; q.max_reserved := n.max_reserved; q.ahead := 100;
    IF n.kind = 'slots' THEN
        q.floor := CASE n.effect WHEN 'unlimited' THEN '-Infinity' WHEN 'numbers' THEN -n.capacity END;
        q.effect := CASE WHEN n.effect = 'numbers' AND n.capacity = '0' THEN 'block' WHEN n.effect IN ('numbers', 'unlimited') THEN 'slots' ELSE n.effect END;
    ELSIF n.effect = 'numbers' AND n.rate = '0' THEN
        q.effect := 'block';
    ELSIF n.effect = 'numbers' THEN
        q.count := least(n.capacity, '1');
        IF n.kind = 'calendar window' THEN
            q.unit := n.period; q.zone := n.zone; q.anchor := n.anchor; q.period := ratelimit._longest(n.period);
            q.windows := coalesce(windows, ratelimit._windows(n.period, n.zone, n.anchor, at, ratelimit._back(n.rate, n.capacity), q.ahead));
            q.start := q.windows[1];
        ELSE
            q.start := ratelimit._grid(name, key, n.period, n.kind, n.start);
        END IF;
    END IF;
    RETURN q;
END
$body$;

-- The same request once the override that is in force for it has ended. standing: as if nothing were blocked.
--
-- The body is a text: Postgres notes which fields and functions a body after RETURN uses. Citus then takes the functions for parts of the type, which
-- depends on itself, and refuses to replace and to grant all functions that take or return it.
CREATE OR REPLACE FUNCTION ratelimit._after(verb text, q ratelimit._request, standing boolean DEFAULT false)
RETURNS ratelimit._request
LANGUAGE sql
AS $body$
SELECT CASE WHEN verb = 'balance' THEN
    ratelimit._ask(q.name, q.key, ratelimit._numbers(q.name, nullif(q.key, ''), q.until, varying => true, standing => standing, given => q.given), q.until, q.given)
ELSE ratelimit._prepare(verb, q.name, nullif(q.key, ''), (q.given).rate, (q.given).period, q.count, coalesce((q.given).kind, 'token bucket'), (q.given).capacity, (q.given).start,
    coalesce((q.given).shards, 1), q.key = '', (q.given).zone, (q.given).anchor, (q.given).max_reserved, q.most, q.until, later => true, standing => standing) END
$body$;

-- Returns the end of the override after which only the program knows the numbers, or NULL if there is none: nothing is known of what is at or
-- after it. standing: as if nothing were blocked.
CREATE OR REPLACE FUNCTION ratelimit._known_until(q ratelimit._request, standing boolean) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
DECLARE
    known timestamptz;
BEGIN
    WHILE q.effect <> 'varies' LOOP
        known := q.until;
        EXIT WHEN known IS NULL;
        q := ratelimit._after('balance', q, standing => standing);
    END LOOP;
    RETURN known;
END
$body$;

-- The windows of a request, in a list that reaches to where the tokens will be there.
CREATE OR REPLACE FUNCTION ratelimit._reaching(
    q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, count double precision, floor double precision
) RETURNS timestamptz[]
LANGUAGE plpgsql
AS $body$
DECLARE
    reach integer; -- how many windows ahead the list needs
BEGIN
    IF q.windows IS NOT NULL THEN
        -- All shards but one may be full.
        reach := least(greatest(ceil((count + floor
            - ratelimit._total(value, ts, at, q.rate, q.period, q.capacity, q.start, q.windows))
            / q.rate * greatest(pg_catalog.cardinality(value), 1)::double precision), '0') + '2'
            -- Nothing is refilled before a row's instant, which may lie ahead.
            + greatest(ceil((SELECT date_part('epoch', max(u.t) - at) FROM pg_catalog.unnest(ts) AS u (t)) / date_part('epoch', q.unit) * '1.1'), '0'), 40000)::integer;
        IF reach > q.ahead OR at > q.windows[pg_catalog.cardinality(q.windows)] THEN
            RETURN ratelimit._windows(q.unit, q.zone, q.anchor, at, ratelimit._back(q.rate, q.capacity), reach);
        END IF;
    END IF;
    RETURN q.windows;
END
$body$;

-- Returns when a request will be granted alone: the first instant from `at` on at which the numbers in force then grant it, or NULL if
-- there is none. Overrides that end make room for what comes after them; the rows stay as they are. value is NULL if nobody has read the
-- rows: then it is when no policy denies it. anyhow: also for a count that is never granted. From an instant on at which only the program knows
-- the numbers, it is that instant: it is not earlier (see ratelimit._known_until).
CREATE OR REPLACE FUNCTION ratelimit._retry_at(
    verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, anyhow boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
DECLARE
    asked    CONSTANT double precision := q.count;
    retry_at timestamptz;
BEGIN
    LOOP
        IF q.until <= at THEN
            q := ratelimit._after(verb, q);
            IF verb = 'balance' AND q.effect = 'numbers' AND value IS NOT NULL THEN -- still as much as before
                q.count := asked;
                q.effect := CASE WHEN q.capacity - asked < -ratelimit._tolerance(q.capacity, 0) THEN 'never' ELSE 'numbers' END;
            END IF;
            CONTINUE;
        END IF;
        retry_at := CASE
            WHEN q.effect = 'numbers' AND value IS NOT NULL THEN
                ratelimit._when(value, ts, at, q.rate, q.period, q.capacity, q.start, q.shards, q.count, q.floor, verb = 'reserve',
                    ratelimit._reaching(q, value, ts, at, greatest(q.count, CASE WHEN verb = 'reserve' THEN q.capacity END), abs(q.floor)))
            WHEN q.effect = 'slots' AND q.count > -q.floor THEN NULL
            WHEN q.effect = 'slots' AND value IS NOT NULL THEN
                coalesce((SELECT f.retry_at FROM ratelimit._free_slots(q.name, q.key, -q.floor, at, q.count) AS f), at)
            WHEN q.effect = 'never' AND NOT anyhow OR ratelimit._refuses(q) THEN NULL
            ELSE at END;
        IF q.until IS NULL OR retry_at < q.until THEN
            RETURN retry_at;
        END IF;
        at := q.until;
    END LOOP;
END
$body$;

-- Returns when a limit will be full or, if asked so, when nothing is owed, if nothing is taken, or NULL if that is never, or not known, since
-- only the program knows the numbers by then. A block changes nothing.
CREATE OR REPLACE FUNCTION ratelimit._full_at(
    verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz, owed boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
DECLARE
    full_at timestamptz;
BEGIN
    WHILE q.effect <> 'varies' LOOP
        full_at := CASE
            WHEN q.effect IN ('numbers', 'never') AND owed THEN
                ratelimit._repaid(value, ts, at, q.rate, q.period, q.capacity, q.start, q.shards, ratelimit._reaching(q, value, ts, at, 0, 0))
            WHEN q.effect IN ('numbers', 'never') THEN
                ratelimit._when(value, ts, at, q.rate, q.period, q.capacity, q.start, q.shards, q.capacity, 0, false,
                    ratelimit._reaching(q, value, ts, at, q.capacity, 0))
            WHEN q.effect <> 'block' THEN at END;
        IF q.until IS NULL OR full_at < q.until THEN
            RETURN full_at;
        END IF;
        at := greatest(at, q.until);
        q := ratelimit._after(verb, q, standing => true);
    END LOOP;
    RETURN NULL;
END
$body$;

-- Returns when nothing is owed any more, whatever other calls take meanwhile: call.repaidAt of the Go library has the rule. A block changes
-- nothing. If only the program knows the numbers by then, it is an error: an instant that is too early would have work run too early.
CREATE OR REPLACE FUNCTION ratelimit._repaid_at(
    verb text, q ratelimit._request, value double precision[], ts timestamptz[], at timestamptz
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
DECLARE
    after   ratelimit._request;
    windows timestamptz[];
    run_at  timestamptz;
    least_  double precision;
    m       integer := pg_catalog.cardinality(value);
    -- The rows, by whether others have taken something at the end of an override: each m elements are the rows in one case.
    tokens  double precision[] := value;
    since   timestamptz[] := ts;
BEGIN
    IF m = 0 THEN -- without rows, a limit is full
        RETURN at;
    END IF;
    LOOP
        IF q.effect IN ('numbers', 'never') THEN
            run_at := at;
            least_ := NULL;
            FOR i IN 0..pg_catalog.cardinality(tokens) / m - 1 LOOP
                value := tokens[i * m + 1:i * m + m];
                ts := since[i * m + 1:i * m + m];
                windows := ratelimit._reaching(q, value, ts, at, 0, 0);
                run_at := greatest(run_at, ratelimit._repaid(value, ts, at, q.rate, q.period, q.capacity, q.start, m, windows));
                IF q.until IS NOT NULL THEN
                    least_ := least(least_, ratelimit._total(value, ts, q.until, q.rate, q.period, q.capacity, q.start, windows));
                END IF;
            END LOOP;
            IF q.until IS NULL OR run_at < q.until THEN
                RETURN run_at;
            END IF;
        ELSIF q.effect = 'varies' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = pg_catalog.format('rate limit %L: an override ends before the work may run, and then the numbers of this key are the program''s', q.name),
                HINT = 'Pass the kind, rate, period, capacity and so on that the program uses for this key.';
        ELSIF q.effect <> 'block' THEN -- unlimited
            RETURN at;
        ELSIF q.until IS NULL THEN -- a rate of 0
            RETURN ratelimit._instant(253402300799999999);
        END IF;
        after := ratelimit._after(verb, q, standing => true);
        IF after.effect IN ('numbers', 'never') AND (after.rate, after.capacity) = (q.rate, q.capacity) THEN
            q.until := after.until; -- the same numbers go on
            CONTINUE;
        END IF;
        IF q.effect IN ('numbers', 'never') THEN
            tokens := pg_catalog.array_cat(tokens, pg_catalog.array_fill(least_ / m::double precision, ARRAY[m]));
            since := pg_catalog.array_cat(since, pg_catalog.array_fill(q.until, ARRAY[m]));
        END IF;
        at := q.until;
        q := after;
    END LOOP;
END
$body$;

-- Says what a decision means to the caller. value and ts are the request's rows, after a grant or as they led to a denial. retry_at of a
-- denial is when the request alone would be granted: `at`, if it has enough, or NULL, if waiting does not help. retry_at of a
-- reservation is when the work may run. Otherwise it is NULL.
CREATE OR REPLACE FUNCTION ratelimit._answer(
    verb text, q ratelimit._request, granted boolean, at timestamptz, value double precision[], ts timestamptz[],
    OUT remaining double precision, OUT retry_at timestamptz, OUT reset_at timestamptz
)
LANGUAGE plpgsql
AS $body$
BEGIN
    IF q.effect = 'unlimited' THEN
        remaining := 'Infinity';
        reset_at := at;
    ELSIF q.effect = 'block' THEN
        remaining := 0;
    END IF;
    IF q.effect NOT IN ('numbers', 'never') THEN
        retry_at := CASE WHEN NOT granted THEN ratelimit._retry_at(verb, q, NULL, NULL, at) WHEN verb = 'reserve' THEN at END;
        IF NOT granted AND retry_at IS NULL THEN -- a block ends, also for a count that is never granted
            retry_at := ratelimit._retry_at(verb, q, NULL, NULL, at, anyhow => true);
        END IF;
        RETURN;
    END IF;
    IF granted AND pg_catalog.cardinality(value) = 1 THEN -- it took from one shard, which stands for all
        value := pg_catalog.array_fill(value[1], ARRAY[q.shards]);
        ts := pg_catalog.array_fill(ts[1], ARRAY[q.shards]);
    END IF;
    remaining := ratelimit._shown(ratelimit._total(value, ts, at, q.rate, q.period, q.capacity, q.start, q.windows), q.rate, q.capacity);
    IF NOT granted THEN
        retry_at := ratelimit._retry_at(verb, q, value, ts, at);
    ELSIF verb = 'reserve' THEN
        retry_at := ratelimit._repaid_at(verb, q, value, ts, at);
    END IF;
    IF q.windows IS NOT NULL THEN
        reset_at := q.windows[pg_catalog.width_bucket(at, q.windows) + 1];
    ELSIF q.start IS NULL THEN
        reset_at := ratelimit._full_at(verb, q, value, ts, at);
    ELSE
        reset_at := ratelimit._instant(least(253402300799999999,
            ratelimit._micros(date_bin(q.period, at, q.start)) + (extract(epoch FROM q.period) * '1000000')::bigint));
    END IF;
END
$body$;

-- Why a request is denied that the caller could make: more than that can ever be granted is an error (ratelimit._never).
CREATE OR REPLACE FUNCTION ratelimit._reason(q ratelimit._request) RETURNS text
LANGUAGE sql IMMUTABLE
RETURN CASE WHEN q.effect <> 'block' THEN 'quota' WHEN q.rate = '0' THEN 'plan' ELSE 'block' END;

-- The error of a denial: MESSAGE, DETAIL and HINT. names are the limits that deny, and name the one to wait for. Whoever is called from
-- outside raises it: each function between would add its signature to the CONTEXT, which is logged. QueueConsume of the Go library does not take
-- the error for a denial of its own, since the DETAIL differs.
CREATE OR REPLACE FUNCTION ratelimit._denied(
    names text[], name text, remaining double precision, retry_at timestamptz, reset_at timestamptz, at timestamptz, reason text
) RETURNS text[]
LANGUAGE plpgsql
AS $body$
BEGIN
    RETURN ARRAY['rate limit exceeded: ' || pg_catalog.array_to_string(names, ', '),
        pg_catalog.json_build_object('name', name, 'remaining', remaining,
            'retry_after', extract(epoch FROM retry_at - at), 'retry_at', retry_at, 'reset_at', reset_at, 'reason', reason)::text,
        CASE WHEN retry_at IS NULL THEN 'Waiting alone does not help.'
            ELSE pg_catalog.format('Retry in %s s.', ceil(extract(epoch FROM retry_at - at))) END];
END
$body$;

-- Decides for the functions below that ask one limit. They pass name and key with COLLATE "C", as every function for SQL by hand does: a
-- column of another collation could not be compared with the tables' (42P22). verb is that of ratelimit._prepare, or try: consume, but a denial is no error. Those functions
-- have no `now`: a program must not choose the time. Tests call this one, and it raises a denial for them.
CREATE OR REPLACE FUNCTION ratelimit._by_hand(
    verb text, name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    max_reserved double precision DEFAULT NULL, most double precision DEFAULT NULL, now timestamptz DEFAULT NULL, raises boolean DEFAULT true,
    OUT granted boolean, OUT taken double precision, OUT remaining double precision, OUT retry_after interval,
    OUT retry_at timestamptz, OUT reset_at timestamptz, OUT at timestamptz, OUT denial text[]
)
LANGUAGE plpgsql
AS $body$
DECLARE
    q ratelimit._request := ratelimit._prepare(verb, name, key, rate, period,
        CASE WHEN verb = 'take' THEN 1 ELSE count END, kind, capacity, start, shards, global, zone, anchor, max_reserved, most, now);
    lowest double precision := q.floor - ratelimit._tolerance(q.capacity, q.floor);
    value double precision[];
    ts    timestamptz[];
    a     integer := 0;
    b     integer := 0;
BEGIN
    IF q.shards > 1 THEN
        a := trunc(random() * q.shards::double precision);
        b := (a + 1 + trunc(random() * (q.shards - 1)::double precision)::integer) % q.shards; -- a shard other than a
    END IF;
    IF q.effect = 'never' THEN -- the rows say when
        SELECT false, r.at, r.value, r.ts INTO granted, at, value, ts
          FROM ratelimit._apply('check', ARRAY[q.name], ARRAY[q.key], ARRAY[q.rate], ARRAY[q.period], ARRAY[q.capacity], ARRAY[q.start], ARRAY[q.shards],
              ARRAY[q.count], ARRAY[q.floor], ARRAY[a], ARRAY[b], now => now, windows => q.windows, firsts => ARRAY[1], lasts => ARRAY[pg_catalog.cardinality(q.windows)]) AS r;
    ELSIF q.effect <> 'numbers' THEN
        granted := NOT ratelimit._refuses(q);
        at := coalesce(now, clock_timestamp());
        taken := CASE WHEN granted THEN q.most END;
    ELSIF verb = 'take' OR verb = 'reserve' AND q.start IS NOT NULL THEN
        SELECT r.granted, r.at, r.value, r.ts, r.taken INTO granted, at, value, ts, taken
          FROM ratelimit._apply(CASE WHEN verb = 'take' THEN 'take' ELSE 'consume' END, ARRAY[q.name], ARRAY[q.key], ARRAY[q.rate], ARRAY[q.period], ARRAY[q.capacity], ARRAY[q.start], ARRAY[q.shards],
              ARRAY[q.count], ARRAY[lowest], ARRAY[a], ARRAY[b], reserve => verb = 'reserve', now => now,
              windows => q.windows, firsts => ARRAY[1], lasts => ARRAY[pg_catalog.cardinality(q.windows)], mosts => ARRAY[q.most]) AS r;
    ELSIF q.shards = 1 THEN
        SELECT r.granted, r.at, ARRAY[r.value], ARRAY[r.ts] INTO granted, at, value, ts
          FROM ratelimit._consume(q.name, q.key, q.rate, q.period, q.capacity, q.start, q.count, lowest, now, windows => q.windows) AS r;
    ELSE
        SELECT r.granted, r.at, r.value, r.ts INTO granted, at, value, ts
          FROM ratelimit._consume_sharded(q.name, q.key, q.rate, q.period, q.capacity, q.start, q.shards, q.count, lowest, a, b, now, windows => q.windows) AS r;
    END IF;
    SELECT r.remaining, r.retry_at, r.retry_at - at, r.reset_at INTO remaining, retry_at, retry_after, reset_at
      FROM ratelimit._answer(verb, q, granted, at, value, ts) AS r;
    IF NOT granted AND verb <> 'try' THEN -- whatever is returned could be overlooked
        denial := ratelimit._denied(ARRAY[name], name, remaining, retry_at, reset_at, at, ratelimit._reason(q));
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
    END IF;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.consume(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    denial text[];
BEGIN
    SELECT r.remaining, r.reset_at, r.at, r.denial INTO remaining, reset_at, at, denial
      FROM ratelimit._by_hand('consume', name COLLATE "C", key COLLATE "C", rate, period, count, kind, capacity, start, shards, global, zone, anchor, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.consume(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, text, timestamp) IS $text$
Takes tokens from a rate limit in the caller's transaction, or raises an error if it has not enough. A rollback gives them back.

    SELECT * FROM ratelimit.consume('sendMessage', 'user-17', rate => 10, period => '1 minute')

    PERFORM ratelimit.consume('sendMessage', NEW.sender, rate => 10, period => '1 minute')

A denial is an error, so nobody can overlook it. It aborts the transaction, or the savepoint. A block that catches it, such as
EXCEPTION WHEN OTHERS, goes on without tokens. ratelimit.try returns a denial instead.

Without any numbers, they are those that a program has published (ratelimit.publish), under the override in force:

    SELECT * FROM ratelimit.consume('sendMessage', 'user-17')

With numbers, blocks and overrides in force count, too. If programs publish the limit, kind, period, start, zone and anchor must be theirs, and
rate and capacity those of a list that was used within 7 days, unless the limit varies.

Pass name and key by position, and the other arguments by name: their positions may change. Call it in FROM or alone:
(ratelimit.consume(...)).* calls it once for each column.

Arguments:
  name          the name of the limit, 1 to 255 bytes
  key           the user, tenant or other owner of the tokens, 1 to 1024 bytes; NULL or empty is an error, unless global is
                true. It is stored as it is. A key of several parts is ratelimit.key('eu', 'user-17')
  rate          tokens per period, 1e-15 to 1e15; or 0: every token is denied by policy, and nothing is read or written
  period        an interval of 100 milliseconds to 106751 days, without months and years; for a calendar window '1 day', '7 days',
                '1 month', '3 months' or '1 year'
  count         the tokens to take, at most 1e15; less than 1e-15 is 0, such as what rounding leaves of a difference; default 1.
                Rounding alone never denies: a call may lack a billionth of the capacity, and at most 0.001 tokens
  kind          'token bucket' (the default), refilled continuously; 'fixed window', refilled at the start of each period; or
                'calendar window', refilled at the start of each day, week, month, quarter or year
  capacity      the most tokens that can be saved up: 0, or 1e-15 to 1e15; default NULL, the rate. With 0, tokens can only be
                reserved (ratelimit.reserve)
  start         an instant at which a fixed window begins, in the years 1 to 9999; the other windows are whole periods from it.
                Default NULL: an offset that is a hash of the key, or of the name if global. A token bucket has none
  shards        the number of rows that the key is spread over, 1 to 100; default 1
  global        true: the limit has no keys, and key must be NULL. Default false
  zone          of a calendar window: 'UTC' (the default) or a name of Postgres' time zones with a slash, such as
                'Europe/Berlin'. Postgres' own zone files decide when its days begin
  anchor        of a calendar window: a date on which a window begins, such as the first day of a customer's contract, or a date and a
                time of day, such as '2026-01-31 15:00'. It is local time in the zone, in the years 1 to 9999, without fractions of a
                second. In a month with fewer days, it is the last. Default NULL: weeks begin on Mondays, the others on their first
                day, at midnight

Result:
  remaining     the balance in tokens
  reset_at      the instant at which the bucket will be full or the next window begins; NULL if the rate is 0, or if an override ends
                before and only the program knows the numbers that follow
  at            the instant of the decision

Errors:
  PT429         denied: the tokens are not there. Nothing was taken. PostgREST turns it into the HTTP status 429
  22023         an argument is invalid, or the count can never be granted, and then the reason in the DETAIL is never; without numbers, also if no program has published
                the limit, if it has slots, or if only the program knows the numbers of the key
  40001, 40P01  another transaction was in the way: run the transaction again

The error of a denial has
  MESSAGE       'rate limit exceeded: ' and the name of the limit. It has no key: keys may be personal data, and errors are logged
  DETAIL        JSON: {"name": ..., "remaining": tokens, "retry_after": seconds, "retry_at": ..., "reset_at": ..., "reason": "quota" or,
                if the rate is 0 or there are no slots, "plan" or, if the key is blocked, "block"}. retry_at is the
                first instant at which the same call would be granted, if no other call takes tokens: by the numbers in force
                or, if an override ends before, by what follows; after a block, when no block denies any more. If only the program
                knows the numbers that follow, it is the end of the override: the call is not granted earlier. It is null, as
                retry_after, if waiting does not help: the rate is 0, or the key is blocked without an end
  HINT          'Retry in ... s.', in whole seconds, rounded up; or 'Waiting alone does not help.'
$text$;

CREATE OR REPLACE FUNCTION ratelimit.try(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT granted boolean, OUT remaining double precision, OUT retry_after interval, OUT retry_at timestamptz, OUT reset_at timestamptz,
    OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
BEGIN
    SELECT r.granted, r.remaining, r.retry_after, r.retry_at, r.reset_at, r.at INTO granted, remaining, retry_after, retry_at, reset_at, at
      FROM ratelimit._by_hand('try', name COLLATE "C", key COLLATE "C", rate, period, count, kind, capacity, start, shards, global, zone, anchor) AS r;
END
$body$;

COMMENT ON FUNCTION ratelimit.try(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, text, timestamp) IS $text$
The same as ratelimit.consume, but it returns a denial. The caller must look at granted: if it is false, the call took nothing.

    SELECT granted, retry_after FROM ratelimit.try('sendMessage', 'user-17', rate => 10, period => '1 minute')

The arguments and the other errors are the same as for ratelimit.consume.

Result:
  granted       true: the tokens were taken. false: the call was denied and took nothing
  remaining     the balance in tokens; below zero if tokens are owed
  retry_after   denied: the wait until retry_at, an interval. NULL as retry_at
  retry_at      denied: the first instant at which the same call would be granted, if no other call takes tokens, or the end of an
                override, if only the program knows the numbers that follow: it is not granted earlier. NULL: the call was
                granted, or waiting does not help, since it was denied by policy or by a block without an end
  reset_at      as for ratelimit.consume
  at            the instant of the decision
$text$;

CREATE OR REPLACE FUNCTION ratelimit.reserve(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    count double precision DEFAULT 1, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    max_reserved double precision DEFAULT NULL,
    OUT retry_at timestamptz, OUT delay interval, OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    denial text[];
BEGIN
    SELECT r.retry_at, r.retry_after, r.remaining, r.reset_at, r.at, r.denial INTO retry_at, delay, remaining, reset_at, at, denial
      FROM ratelimit._by_hand('reserve', name COLLATE "C", key COLLATE "C", rate, period, count, kind, capacity, start, shards, global, zone, anchor, max_reserved, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.reserve(text, text, double precision, interval, double precision, text, double precision, timestamptz, integer, boolean, text, timestamp, double precision) IS $text$
Takes tokens that may not be there yet, in the caller's transaction. A rollback gives them back.

    INSERT INTO jobs (payload, run_at)
    SELECT 'hello', retry_at FROM ratelimit.reserve('emails', 'team-a', rate => 10, period => '1 minute', max_reserved => 100)

A reservation is no permission to work now: the work may run at retry_at, when its tokens will have been refilled. A caller that
ignores retry_at exceeds the limit. A denial is an error, the same as of ratelimit.consume: more would be owed than max_reserved.
Its retry_at is when the same reservation would be made. If an override ends before the work may run, the slower of the two rates counts,
and it is an error (22023) if only the program knows the numbers that follow.

The arguments are the same as for ratelimit.consume, also without any numbers, and
  max_reserved  the most tokens that may be owed: 0, or 1e-15 to 1e15; default NULL, no bound but, of a calendar window, the
                tokens of 100 windows. With 0, only tokens that are there can be taken

Result:
  retry_at   the instant at which the work may run; at, if the tokens are there
  delay      the wait from at to retry_at, an interval
  remaining  the balance in tokens; below zero if tokens are owed
  reset_at   as for ratelimit.consume
  at         the instant of the decision

Errors: as for ratelimit.consume
$text$;

CREATE OR REPLACE FUNCTION ratelimit.take(
    name text, key text DEFAULT NULL, rate double precision DEFAULT NULL, period interval DEFAULT NULL,
    most bigint DEFAULT NULL, kind text DEFAULT 'token bucket', capacity double precision DEFAULT NULL,
    start timestamptz DEFAULT NULL, shards integer DEFAULT 1, global boolean DEFAULT false,
    zone text DEFAULT NULL, anchor timestamp DEFAULT NULL,
    OUT taken bigint, OUT remaining double precision, OUT reset_at timestamptz, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    denial text[];
BEGIN
    SELECT r.taken::bigint, r.remaining, r.reset_at, r.at, r.denial INTO taken, remaining, reset_at, at, denial
      FROM ratelimit._by_hand('take', name COLLATE "C", key COLLATE "C", rate, period, NULL, kind, capacity, start, shards, global, zone, anchor, most => most::double precision, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.take(text, text, double precision, interval, bigint, text, double precision, timestamptz, integer, boolean, text, timestamp) IS $text$
Takes the whole tokens that a rate limit has, at least 1 and at most `most`, in the caller's transaction. A rollback gives them
back. It is for workers that fetch work in batches: take up to 100, and fetch as many jobs as were taken.

    SELECT taken FROM ratelimit.take('emails', 'team-a', most => 100, rate => 10, period => '1 minute')

The arguments are the same as for ratelimit.consume, also without any numbers. There is no count, but
  most  the most tokens to take, a whole number of 1 to 1e15. It is required, and may be above the capacity

Result:
  taken      how many tokens were taken, a whole number of at least 1
  remaining  the balance in tokens
  reset_at   as for ratelimit.consume
  at         the instant of the decision

Errors: as for ratelimit.consume. With less than one token, it is a denial
$text$;

-- Reads one request of ratelimit.consume_all, the one with this number in the list.
CREATE OR REPLACE FUNCTION ratelimit._read(request jsonb, number bigint, now timestamptz) RETURNS ratelimit._request
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text;
    rate double precision; period interval; count double precision; capacity double precision; start timestamptz; shards double precision;
    anchor timestamp; max_reserved double precision;
BEGIN
    IF jsonb_typeof(request) <> 'object' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('request %s must be a JSON object, not %s', number, jsonb_typeof(request));
    END IF;
    SELECT CASE WHEN f.expected IS NULL THEN pg_catalog.format('there is no field %L', f.field)
                WHEN f.type = 'null' THEN pg_catalog.format('%s is null: leave it out', f.field)
                ELSE pg_catalog.format('%s must be a JSON %s, not %s', f.field, f.expected, f.type) END INTO wrong
      FROM (
        SELECT e.key AS field, jsonb_typeof(e.value) AS type,
               CASE WHEN e.key IN ('name', 'key', 'period', 'kind', 'start', 'zone', 'anchor') THEN 'string'
                    WHEN e.key IN ('rate', 'count', 'capacity', 'max_reserved', 'shards') THEN 'number'
                    WHEN e.key = 'global' THEN 'boolean' END AS expected
          FROM jsonb_each(request) AS e
      ) AS f
     WHERE f.expected IS DISTINCT FROM f.type
     ORDER BY f.field COLLATE "C"
     LIMIT 1;
    -- Postgres reads more than this as a timestamp, and ignores a zone in it.
    IF wrong IS NULL AND request->>'anchor'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}( ([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?)?$' THEN
        wrong := pg_catalog.format('anchor must be a date, such as 2026-01-31, or a date and a time of day, such as 2026-01-31 15:00, not %L', request->>'anchor'::text);
    END IF;
    -- What Postgres reads beside it means another instant in each call ('now'), or in each session.
    IF wrong IS NULL AND request->>'start'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$' THEN
        wrong := pg_catalog.format('rate limit %s: start must be an instant with its offset, such as 2026-01-31T00:00:00Z, not %L',
            quote_nullable(left(request->>'name'::text, 255)), left(request->>'start'::text, 50));
    END IF;
    IF wrong IS NULL THEN
        BEGIN
            rate := (request->>'rate'::text)::double precision;
            period := (request->>'period'::text)::interval;
            count := coalesce((request->>'count'::text)::double precision, 1);
            capacity := (request->>'capacity'::text)::double precision;
            start := (request->>'start'::text)::timestamptz;
            shards := coalesce((request->>'shards'::text)::double precision, 1);
            anchor := (request->>'anchor'::text)::timestamp;
            max_reserved := (request->>'max_reserved'::text)::double precision;
        EXCEPTION WHEN data_exception THEN -- a text that is no interval or no instant, or a number that is too large
            wrong := SQLERRM;
        END;
        IF NOT (shards BETWEEN '1' AND '100' AND shards = trunc(shards)) THEN
            wrong := pg_catalog.format('shards must be a whole number between 1 and 100, not %s', shards);
        END IF;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('request %s: %s', number, wrong);
    END IF;
    RETURN ratelimit._prepare('consume', request->>'name'::text, request->>'key'::text, rate, period, count,
        coalesce(request->>'kind'::text, 'token bucket'), capacity, start, shards::integer, coalesce((request->>'global'::text)::boolean, false),
        request->>'zone'::text, anchor, max_reserved, NULL, now);
END
$body$;

-- Decides for ratelimit.consume_all, at an instant that tests choose. If it does not raise a denial, it returns it in a row of its own.
CREATE OR REPLACE FUNCTION ratelimit._all(requests jsonb, now timestamptz, raises boolean DEFAULT true)
RETURNS TABLE (name text, key text, remaining double precision, reset_at timestamptz, at timestamptz, denial text[])
LANGUAGE plpgsql
AS $body$
DECLARE
    e record;
    q ratelimit._request;
    list ratelimit._request[] := '{}';
    -- The arguments of ratelimit._apply: of the requests that rows decide.
    names text[] := '{}'; keys text[] := '{}'; rates double precision[] := '{}'; periods interval[] := '{}'; capacities double precision[] := '{}';
    starts timestamptz[] := '{}'; shards integer[] := '{}'; counts double precision[] := '{}'; floors double precision[] := '{}';
    a integer[] := '{}'; b integer[] := '{}'; windows timestamptz[]; firsts integer[] := '{}'; lasts integer[] := '{}';
    d     ratelimit._decisions;
    i     integer := 0; -- a position in them
    own   record;       -- the rows of a request
    said  record;       -- the answer to a request
    policy boolean := true; -- no block and no rate of 0 denies
    reason text := 'quota'; -- of a denial: the one that lasts longest, a plan, then a block
    denied text[] := '{}';  -- the limits that deny
    waits timestamptz;      -- until the request of slowest would be granted
    together boolean := false; -- overrides end that change what is granted
    "then" timestamptz;
    slowest record;
BEGIN
    IF (jsonb_typeof(requests) = 'array') IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('requests must be a JSON array, not %s', coalesce(jsonb_typeof(requests), 'NULL'));
    END IF;
    FOR e IN SELECT r.value, r.number FROM jsonb_array_elements(requests) WITH ORDINALITY AS r (value, number) LOOP
        q := ratelimit._read(e.value, e.number, now);
        list := pg_catalog.array_append(list, q);
        together := together OR q.until IS NOT NULL AND q.effect <> 'block';
        policy := policy AND q.effect <> 'never' AND NOT ratelimit._refuses(q);
        reason := CASE WHEN reason <> 'plan' AND ratelimit._refuses(q) THEN ratelimit._reason(q) ELSE reason END;
        CONTINUE WHEN q.effect NOT IN ('numbers', 'never');
        names := pg_catalog.array_append(names, q.name); keys := pg_catalog.array_append(keys, q.key);
        rates := pg_catalog.array_append(rates, q.rate); periods := pg_catalog.array_append(periods, q.period);
        capacities := pg_catalog.array_append(capacities, q.capacity); starts := pg_catalog.array_append(starts, q.start);
        shards := pg_catalog.array_append(shards, q.shards); counts := pg_catalog.array_append(counts, q.count); floors := pg_catalog.array_append(floors, q.floor - ratelimit._tolerance(q.capacity, q.floor));
        i := trunc(random() * q.shards::double precision);
        a := pg_catalog.array_append(a, i);
        b := pg_catalog.array_append(b, CASE WHEN q.shards = 1 THEN i ELSE (i + 1 + trunc(random() * (q.shards - 1)::double precision)::integer) % q.shards END); -- a shard other than a
        firsts := pg_catalog.array_append(firsts, CASE WHEN q.windows IS NOT NULL THEN coalesce(pg_catalog.cardinality(windows), 0) + 1 END);
        windows := pg_catalog.array_cat(windows, q.windows);
        lasts := pg_catalog.array_append(lasts, CASE WHEN q.windows IS NOT NULL THEN pg_catalog.cardinality(windows) END);
    END LOOP;
    IF pg_catalog.cardinality(list) = 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'requests must have at least one request, not 0';
    END IF;
    SELECT l.name COLLATE "C" AS name INTO own FROM pg_catalog.unnest(list) AS l GROUP BY 1, l.key COLLATE "C" HAVING count(*) > 1 ORDER BY 1 LIMIT 1;
    IF FOUND THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: two requests have the same key', own.name),
            HINT = 'Make it one request with the sum of both counts.';
    END IF;

    d.at := coalesce(now, clock_timestamp());
    IF pg_catalog.cardinality(names) > 0 THEN -- if it is denied already, the rows are read alone: they may deny, too
        d := ratelimit._apply(CASE WHEN policy THEN 'consume' ELSE 'check' END, names, keys, rates, periods, capacities, starts,
            shards, counts, floors, a, b, now => now, windows => windows, firsts => firsts, lasts => lasts);
    END IF;
    d.granted := policy AND coalesce(d.granted, true);
    at := d.at;
    i := 0;
    FOREACH q IN ARRAY list LOOP
        IF q.effect IN ('numbers', 'never') THEN
            i := i + 1;
        END IF;
        SELECT coalesce(pg_catalog.array_agg(u.value ORDER BY u.n), '{}') AS value, coalesce(pg_catalog.array_agg(u.ts ORDER BY u.n), '{}') AS ts INTO own
          FROM unnest(d.ord, d.value, d.ts) WITH ORDINALITY AS u (ord, value, ts, n)
         WHERE u.ord = i AND q.effect IN ('numbers', 'never');
        SELECT r.remaining, r.retry_at, r.reset_at INTO said FROM ratelimit._answer('consume', q, d.granted, at, own.value, own.ts) AS r;
        IF d.granted THEN
            name := q.name; key := q.key; remaining := said.remaining; reset_at := said.reset_at;
            RETURN NEXT;
            CONTINUE;
        END IF;
        IF coalesce(said.retry_at, 'infinity') > at AND q.name <> ALL (denied) THEN
            denied := pg_catalog.array_append(denied, q.name);
        END IF;
        IF waits IS NULL OR coalesce(said.retry_at, 'infinity') > waits THEN
            waits := coalesce(said.retry_at, 'infinity');
            SELECT q.name AS name, said.remaining AS remaining, said.retry_at AS retry_at, said.reset_at AS reset_at INTO slowest;
        END IF;
    END LOOP;
    IF NOT d.granted THEN
        -- What one request gets when an override ends, another may lose: all must be granted at one instant.
        WHILE together AND waits < 'infinity' LOOP
            together := false;
            i := 0;
            FOREACH q IN ARRAY list LOOP
                i := i + CASE WHEN q.effect IN ('numbers', 'never') THEN 1 ELSE 0 END;
                SELECT coalesce(pg_catalog.array_agg(u.value ORDER BY u.n), '{}') AS value, coalesce(pg_catalog.array_agg(u.ts ORDER BY u.n), '{}') AS ts INTO own
                  FROM unnest(d.ord, d.value, d.ts) WITH ORDINALITY AS u (ord, value, ts, n)
                 WHERE u.ord = i;
                "then" := coalesce(ratelimit._retry_at('consume', q, CASE WHEN q.effect IN ('numbers', 'never') THEN own.value END, own.ts, waits), 'infinity');
                together := together OR "then" > waits;
                waits := greatest(waits, "then");
                EXIT WHEN waits = 'infinity';
            END LOOP;
        END LOOP;
        denial := ratelimit._denied(denied, slowest.name, slowest.remaining, nullif(waits, 'infinity'), slowest.reset_at, at, reason);
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN NEXT;
    END IF;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.consume_all(requests jsonb)
RETURNS TABLE (name text, key text, remaining double precision, reset_at timestamptz, at timestamptz)
LANGUAGE plpgsql
AS $body$
DECLARE
    denial text[];
BEGIN
    FOR name, key, remaining, reset_at, at, denial IN SELECT r.* FROM ratelimit._all(requests, NULL, raises => false) AS r LOOP
        IF denial IS NOT NULL THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN NEXT;
    END LOOP;
END
$body$;

COMMENT ON FUNCTION ratelimit.consume_all(jsonb) IS $text$
Takes tokens from several rate limits, all or none, in the caller's transaction. If one of them has not enough, it raises the error of a
denial, as ratelimit.consume does. The rows are locked in one order, whatever the order of the list, so that such calls do not deadlock.

    SELECT * FROM ratelimit.consume_all('[
        {"name": "sendMessage", "key": "user-17", "rate": 10, "period": "1 minute"},
        {"name": "bytesSent", "key": "user-17", "rate": 1000000, "period": "1 hour", "count": 2048}
    ]')

requests is a JSON array of objects with the same names as the arguments of ratelimit.consume: name, key, rate, period, count, kind, capacity,
start, shards, global, zone, anchor; and max_reserved, which changes nothing here. Names, keys, intervals, instants and dates are strings. A field that
is left out has the same default. Each object without any numbers has those that a program has published, under the override in force.
An anchor is written as '2026-01-31' or '2026-01-31 15:00', a start as '2026-01-31T00:00:00Z' or '2026-01-31 00:00:00+00'. jsonb_build_array and jsonb_build_object make the list from variables.

Result, one row for each object, in the order of the list:
  name, key  of the request; the key is '' if the limit is global
  remaining  the balance in tokens
  reset_at   as for ratelimit.consume
  at         the instant of the decision

Errors, besides those of ratelimit.consume:
  PT429  denied: nothing was taken from any of them. MESSAGE names the limits that deny. name in the DETAIL is the limit to wait for,
         and retry_at is the first instant at which the same call would be granted; null if one of them waits for nothing
  22023  also for an empty list, an unknown field, a null, a value of the wrong type, and a limit and key that are there twice
$text$;

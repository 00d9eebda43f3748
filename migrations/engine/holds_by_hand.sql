-- Holds by SQL by hand: ratelimit.hold, ratelimit.release and ratelimit.holds. The numbers are those that programs have published, under the
-- override in force. A token is one that the Go library reads, and the other way round.

-- Says what is wrong with the id of a hold, or returns NULL. It does not say the id, as ratelimit._wrong_key.
CREATE OR REPLACE FUNCTION ratelimit._wrong_id(id text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN id IS NULL OR octet_length(id) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('id must have 1 to 255 bytes, not %s', coalesce(octet_length(id)::text, 'NULL'))
    WHEN id COLLATE "C" ~ E'^~|[[:cntrl:]\\u0080-\\u009f]' THEN 'id must not begin with ~, and must have no control characters' END;

-- Reads a token, or the id of a hold without an end. id is NULL if it is none. Above 1 MiB it is none: to read 50 MB takes 18 s. list is what is held,
-- as [["name", "key", count]], if nobody has altered it; NULL of an id.
CREATE OR REPLACE FUNCTION ratelimit._read_token(INOUT id text, OUT token uuid, OUT list text)
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $body$
DECLARE
    parts text[] := pg_catalog.regexp_match(CASE WHEN octet_length(id) <= '1048576' THEN id END COLLATE "C", '^~([0-9a-f]{32})([1-9][0-9]{0,2}):(.*)$');
BEGIN
    IF id ~ '^~' THEN
        token := parts[1]::uuid;
        id := (SELECT left(parts[3], n) FROM pg_catalog.generate_series(1, 255) AS n WHERE octet_length(left(parts[3], n)) = parts[2]::integer LIMIT 1); -- its length is in bytes
        list := substr(parts[3], length(id) + 1);
    END IF;
END
$body$;

-- Says that an id is held by somebody else, or settled. That is a conflict, and not a denial of the limit: to wait for room does not help. Or that it was
-- released after the statement had begun.
CREATE OR REPLACE FUNCTION ratelimit._id_taken(name text, state text, until timestamptz, at timestamptz) RETURNS void
LANGUAGE plpgsql
AS $body$
DECLARE
    said text[] := ratelimit._denied(ARRAY[name], name, NULL, CASE WHEN state = 'held' THEN nullif(until, 'infinity') END, NULL, at, state);
BEGIN
    IF state = 'released' THEN
        RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limit %L: the id was released while this hold of it was on its way', name);
    END IF;
    RAISE SQLSTATE 'PT409' USING DETAIL = said[2], HINT = said[3],
        MESSAGE = pg_catalog.format('rate limit %L: %s', name, CASE state WHEN 'held' THEN 'an id is held already' ELSE 'an id is settled: its work was done within a day' END);
END
$body$;

-- Decides for ratelimit.hold, at an instant that tests choose.
CREATE OR REPLACE FUNCTION ratelimit._hold_by_hand(
    name text, key text, id text, count double precision, ttl interval, forever boolean, global boolean, now timestamptz DEFAULT NULL, raises boolean DEFAULT true,
    OUT token text, OUT until timestamptz, OUT repeated boolean, OUT remaining double precision, OUT at timestamptz, OUT denial text[]
)
LANGUAGE plpgsql SET extra_float_digits = 1 -- the token has the count
AS $body$
DECLARE
    wrong text := coalesce(ratelimit._wrong_id(id), CASE
        WHEN forever IS NULL THEN 'forever must be true or false, not NULL'
        WHEN forever AND ttl IS NOT NULL THEN pg_catalog.format('ttl must be NULL with forever => true, not %s', ttl)
        WHEN NOT forever AND (isfinite(ttl) AND ttl BETWEEN '100 milliseconds' AND '366 days') IS NOT TRUE THEN
            pg_catalog.format('ttl must be between 100 milliseconds and 366 days, not %s; forever => true is for a hold without an end', coalesce(ttl::text, 'NULL'))
    END);
    own   uuid := CASE WHEN NOT forever THEN gen_random_uuid() END;
    q     ratelimit._request;
    unit  text;
    a     integer := 0;
    b     integer := 0;
    h     ratelimit._held;
    said  record;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    PERFORM ratelimit._published(name, key);
    q := ratelimit._prepare('hold', name, key, NULL, NULL, count, 'token bucket', NULL, NULL, 1, global, NULL, NULL, NULL, NULL, now);
    at := coalesce(now, clock_timestamp());
    IF ratelimit._refuses(q) THEN
        SELECT r.retry_at, r.reset_at INTO said FROM ratelimit._answer('hold', q, false, at, NULL, NULL) AS r;
        denial := ratelimit._denied(ARRAY[name], name, 0, said.retry_at, said.reset_at, at, ratelimit._reason(q));
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN;
    END IF;
    unit := CASE WHEN q.effect = 'slots' THEN 'slots' WHEN q.effect IN ('numbers', 'never') THEN 'tokens' ELSE 'none' END;
    IF unit = 'none' THEN
        q.rate := 0; q.period := '1 second'; q.capacity := 0; q.shards := 1; q.floor := 0;
    ELSIF q.shards > 1 THEN
        a := trunc(random() * q.shards::double precision);
        b := (a + 1 + trunc(random() * (q.shards - 1)::double precision)::integer) % q.shards; -- a shard other than a
    END IF;
    h := ratelimit._hold(id, own, ttl, CASE unit WHEN 'none' THEN 0 ELSE 1 END, ARRAY[unit], ARRAY[q.name], ARRAY[q.key], ARRAY[q.rate], ARRAY[q.period],
        ARRAY[q.capacity], ARRAY[q.start], ARRAY[q.shards], ARRAY[q.count], ARRAY[q.floor - ratelimit._tolerance(q.capacity, q.floor)], ARRAY[a], ARRAY[b], now,
        q.windows, ARRAY[1], ARRAY[pg_catalog.cardinality(q.windows)]);
    at := h.at;
    IF h.state IN ('held', 'settled', 'released') THEN
        PERFORM ratelimit._id_taken(name, h.state, h.until, at);
    ELSIF h.state = 'denied' THEN
        IF unit = 'slots' THEN
            SELECT least(h.value[1], '0') - q.floor AS remaining, nullif(ratelimit._retry_at('hold', q, h.value, h.ts, at), 'infinity') AS retry_at, NULL::timestamptz AS reset_at INTO said;
        ELSE
            SELECT r.remaining, r.retry_at, r.reset_at INTO said FROM ratelimit._answer('hold', q, false, at, h.value, h.ts) AS r;
        END IF;
        denial := ratelimit._denied(ARRAY[name], name, said.remaining, said.retry_at, said.reset_at, at, ratelimit._reason(q));
    END IF;
    IF denial IS NOT NULL THEN
        IF raises THEN
            RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
        END IF;
        RETURN;
    END IF;
    token := CASE WHEN forever THEN id ELSE pg_catalog.format('~%s%s:%s%s', pg_catalog.replace(own::text, '-'::text, ''::text), octet_length(id), id,
        pg_catalog.json_build_array(pg_catalog.json_build_array(q.name, q.key, q.count))) END;
    until := nullif(h.until, 'infinity');
    repeated := h.state = 'repeated';
    IF repeated THEN
        remaining := NULL;
    ELSIF unit = 'slots' THEN
        remaining := h.value[1] - q.floor;
    ELSE
        SELECT r.remaining INTO remaining FROM ratelimit._answer('hold', q, true, at, h.value, h.ts) AS r;
    END IF;
END
$body$;

-- Wants the numbers of a key to be known: what is held comes back by them.
CREATE OR REPLACE FUNCTION ratelimit._published(name text, key text) RETURNS ratelimit._terms
LANGUAGE plpgsql
AS $body$
DECLARE
    n ratelimit._terms := ratelimit._defined(name);
BEGIN
    IF n.kind IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: no program has published it', quote_nullable(left(name, 255))),
            HINT = 'Have a program publish its limits: Open or Publish of the Go library, txlimit publish, or ratelimit.publish.';
    END IF;
    n := ratelimit._numbers(name, nullif(key, ''), clock_timestamp(), varying => true, standing => true);
    IF n.effect = 'varies' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: the numbers of this key are the program''s', name),
            HINT = 'Only the Go library can hold and release here, or give the key an override with all its numbers.';
    END IF;
    RETURN n;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.hold(
    name text, key text DEFAULT NULL, id text DEFAULT NULL, count double precision DEFAULT 1, ttl interval DEFAULT NULL,
    forever boolean DEFAULT false, global boolean DEFAULT false,
    OUT token text, OUT until timestamptz, OUT repeated boolean, OUT remaining double precision, OUT at timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    denial text[];
BEGIN
    SELECT r.token, r.until, r.repeated, r.remaining, r.at, r.denial INTO token, until, repeated, remaining, at, denial
      FROM ratelimit._hold_by_hand(name COLLATE "C", key COLLATE "C", id COLLATE "C", count, ttl, forever, global, raises => false) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.hold(text, text, text, double precision, interval, boolean, boolean) IS $text$
Takes slots or tokens under an id, in the caller's transaction, or raises an error if there are not enough. They come back when they are released,
or when ttl is over. A rollback gives them back.

    SELECT ratelimit.hold('projects', 'team 7', 'project 17', forever => true)

    SELECT token FROM ratelimit.hold('renders', 'acme', 'acme/job 17', ttl => '5 minutes')

The numbers are those that a program has published (ratelimit.publish), under the override in force. A block denies. The key stays locked until the
transaction ends: claim the job, hold, commit, and work then. Hold of the Go library is the same.

Arguments:
  name     the name of the limit
  key      the key as it is stored; NULL or empty is an error, unless global is true
  id       of the work or the thing, 1 to 255 bytes, without control characters and without ~ in front
  count    the slots or tokens to hold; default 1
  ttl      how long the work may last, 100 milliseconds to 366 days; required, unless forever is true
  forever  true: the hold has no end, and ttl must be NULL. Default false
  global   true: the limit has no keys, and key must be NULL. Default false

Result:
  token      for ratelimit.release, and for Settle and Release of the Go library. It has the limit and key in the clear. Without an end, it is the id
  until      when it ends; NULL: it has no end
  repeated   true: the id is held without an end already, and is asked for without an end again. Nothing was taken
  remaining  the balance, in slots or tokens; NULL if repeated
  at         the instant of the decision

Errors:
  PT429    denied: nothing was taken. As of ratelimit.consume; retry_at of slots is when holds that end have made room at the latest, if none is
           extended
  PT409    another delivery of the work has the id. Nothing was taken. DETAIL is as of PT429. Its reason is held, until retry_at, or settled, within a
           day: drop this delivery
  22023    an argument is invalid, no program has published the limit, or only the program knows the numbers of the key
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Decides for ratelimit.release, at an instant that tests choose.
CREATE OR REPLACE FUNCTION ratelimit._release_by_hand(
    name text, key text, id text, global boolean, reason text, who text, now timestamptz DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    r      record;
    wrong  text;
    own    uuid;
    forced CONSTANT boolean := pg_catalog.concat(reason, who) <> '';
    rec    record;
    s      ratelimit._settled;
    n      integer;
    names  text[] := ARRAY[name]; -- of a token, all that it has
    keys   text[] := ARRAY[coalesce(key, '')];
BEGIN
    SELECT f.id, f.token, f.list INTO r FROM ratelimit._read_token(id) AS f;
    wrong := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN octet_length(reason) > 3800 THEN 'the reason is longer than 3800 bytes'
        WHEN octet_length(who) > 255 THEN 'who is longer than 255 bytes'
        WHEN id IS NOT NULL AND r.id IS NULL THEN 'the token cannot be read: it was altered'
        ELSE coalesce(ratelimit._wrong_key(key, global), ratelimit._wrong_id(r.id)) END;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    key := coalesce(key, '');
    IF r.list <> '' THEN
        BEGIN
            SELECT pg_catalog.array_agg(h.name ORDER BY h.name COLLATE "C", h.key COLLATE "C"), pg_catalog.array_agg(h.key ORDER BY h.name COLLATE "C", h.key COLLATE "C")
              INTO names, keys
              FROM (SELECT u.held ->> 0 AS name, u.held ->> 1 AS key FROM pg_catalog.json_array_elements(r.list::pg_catalog.json) AS u (held)) AS h;
        EXCEPTION WHEN data_exception THEN
            names := '{}'; -- it was altered
        END;
        IF NOT EXISTS (SELECT 1 FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(keys)) AS h (name, key) WHERE h.name = name AND h.key = key) THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: the token is of a hold of other limits or keys, or was altered', name);
        END IF;
    END IF;
    n := pg_catalog.cardinality(names);
    LOOP
        SELECT o.unit, o.token, o.state, o.until INTO rec
          FROM pg_catalog.unnest(ARRAY['~' || r.token::text, r.id]) WITH ORDINALITY AS u (id, i) -- the first once the id is another's: ratelimit._claim
         CROSS JOIN LATERAL (SELECT h.unit, h.token, h.state, h.until FROM ratelimit.holds AS h WHERE h.name = name AND h.key = key AND h.id = u.id OFFSET 0) AS o
         ORDER BY u.i LIMIT 1;
        own := coalesce(r.token, CASE WHEN forced AND rec.state = 'held' THEN rec.token END);
        EXIT WHEN rec.state = 'held' AND own IS NULL OR rec.state <> 'once' AND coalesce(rec.token = own, rec.token IS NULL AND own IS NULL AND rec.state <> 'released' AND rec.until > coalesce(now, clock_timestamp()))
            OR forced AND r.token IS NULL AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable') -- an operator has seen it
            OR NOT ratelimit._may('INSERT'); -- nor may an operator leave a mark
        EXIT WHEN ratelimit._bar(r.id, own, ARRAY[name], ARRAY[key], now);
    END LOOP;

    -- By its id alone, a hold with an end is released by somebody who says so: it may be another delivery's by now. One that has ended stays as
    -- it is: its worker may settle it late.
    IF own IS NULL AND rec.token IS NOT NULL AND rec.state = 'held' AND rec.until > coalesce(now, clock_timestamp()) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: this hold has an end: pass its token instead of its id', name),
            HINT = 'To end the work of somebody else, say who does it, or a reason. The holder then loses it.';
    END IF;
    IF NOT coalesce(rec.state IN ('held', 'lapsed') AND rec.token IS NOT DISTINCT FROM own, false) THEN
        IF forced THEN
            PERFORM ratelimit._check_known(name);
        END IF;
        RETURN false;
    END IF;
    IF rec.unit <> 'slots' THEN -- whose numbers do not matter
        PERFORM ratelimit._published(name, key);
    END IF;
    s := ratelimit._settle(true, r.id, own, n, pg_catalog.array_fill(false, ARRAY[n]), names, keys, pg_catalog.array_fill('0'::double precision, ARRAY[n]),
        pg_catalog.array_fill('1 second'::interval, ARRAY[n]), pg_catalog.array_fill('0'::double precision, ARRAY[n]), pg_catalog.array_fill(NULL::timestamptz, ARRAY[n]),
        pg_catalog.array_fill(0, ARRAY[n]), pg_catalog.array_fill('0'::double precision, ARRAY[n]), now);
    IF s.state = 'done' AND forced THEN
        PERFORM ratelimit._note_reset(name, key, pg_catalog.concat_ws(': ', r.id, nullif(reason, '')), who, 'release');
    END IF;
    RETURN s.state = 'done';
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.release(
    name text, key text DEFAULT NULL, id text DEFAULT NULL, global boolean DEFAULT false, reason text DEFAULT NULL, who text DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql
AS $body$
BEGIN
    RETURN ratelimit._release_by_hand(name COLLATE "C", key COLLATE "C", id COLLATE "C", global, reason COLLATE "C", who COLLATE "C");
END
$body$;

COMMENT ON FUNCTION ratelimit.release(text, text, text, boolean, text, text) IS $text$
Ends a hold, in the caller's transaction: what it holds comes back, tokens by the rule of refunds, and its id is free. By its token, it ends for all
limits and keys that the hold has. It returns whether there was such a hold. One that has ended is no error.

    SELECT ratelimit.release('projects', 'team 7', 'project 17')

    SELECT ratelimit.release('renders', 'acme', 'acme/job 17', reason => 'its worker hangs', who => 'ann')

Arguments:
  name    the name of the limit; of several that the hold has, any
  key     the key as it is stored; NULL or empty is an error, unless global is true
  id      the token of the hold, of ratelimit.hold or of the Go library; of a hold without an end, its id. With a reason or with who, it is the
          id of any hold: its holder then loses what it holds of this limit and key
  global  true: the limit has no keys, and key must be NULL. Default false
  reason  why, for those who look later: at most 3800 bytes; default NULL
  who     who decides: at most 255 bytes; default NULL: SESSION_USER, which is recorded beside it in any case (made_as)

With a reason or with who, it adds a row to ratelimit.overrides if it ends a hold: the history says who has released it, and when. The
effect of such a row is release, and its reason begins with the id. Without both, nothing is written down.

Errors:
  22023    an argument is invalid, the token is of other limits or keys, or a hold with an end is named by its id alone; of tokens, also if no
           program has published the limit, or only the program knows the numbers of the key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

CREATE OR REPLACE FUNCTION ratelimit.holds(
    name text, INOUT key text DEFAULT NULL, global boolean DEFAULT false,
    OUT id text, OUT count double precision, OUT unit text, OUT since timestamptz, OUT until timestamptz, OUT expired boolean
) RETURNS SETOF record
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        ELSE ratelimit._wrong_key(key, global) END;
    at    timestamptz := clock_timestamp();
    own   text COLLATE "C" := coalesce(key, '');
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    RETURN QUERY
    SELECT own::text, h.id::text, h.count, h.unit, h.taken_at, nullif(h.until, 'infinity'), h.until <= at
      FROM ratelimit.holds AS h
     WHERE h.name = name COLLATE "C" AND h.key = own AND h.state = 'held' AND NOT starts_with(h.id, '~'::text)
     ORDER BY h.taken_at, h.id;
    IF NOT FOUND THEN
        PERFORM ratelimit._check_known(name COLLATE "C");
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.holds(text, text, boolean) IS $text$
Lists who holds slots or tokens of a key, the oldest first. The tokens that end holds are not shown.

    SELECT * FROM ratelimit.holds('renders', 'acme')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Result, one row for each hold:
  key      '' for a limit without keys
  id       of the work or the thing
  count    the slots or tokens that it holds; 0: the key was unlimited then
  unit     'slots' or 'tokens'; 'none': the key was unlimited then
  since    when they were taken
  until    when the hold ends; NULL: it has no end
  expired  true: until has passed, and the next call that takes from the key, or a sweep, gives them back. Until then its worker may still settle it

Errors:
  22023    an argument is invalid, or programs publish limits, and nobody knows this one
$text$;

-- Checks the arguments of the functions for many ids or for slots alone, and returns the ids in the order of locks, each once.
CREATE OR REPLACE FUNCTION ratelimit._many(name text, key text, ids text[], global boolean) RETURNS text[]
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR octet_length(name) NOT BETWEEN 1 AND 255 THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        WHEN ids IS NULL THEN 'ids must not be NULL'
        ELSE coalesce(ratelimit._wrong_key(key, global),
            (SELECT min(ratelimit._wrong_id(u.id)) FROM pg_catalog.unnest(ids) AS u (id))) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    IF ratelimit._distributed() THEN
        RAISE feature_not_supported USING MESSAGE = 'rate limits: there are no holds where the table is distributed by key',
            HINT = 'Distribute the schema, or put limits with holds into a schema that is not distributed.';
    END IF;
    RETURN ARRAY(SELECT DISTINCT u.id COLLATE "C" FROM pg_catalog.unnest(ids) AS u (id) ORDER BY 1);
END
$body$;

-- Holds one slot for each id, without an end, or returns a denial: the caller must raise it, or the holds stay. The limit's row is locked first, and so nobody else takes or gives back slots of the key;
-- then the holds, in the order of their ids. Only an extender may have one of those, and it waits for nothing.
CREATE OR REPLACE FUNCTION ratelimit._hold_many(name text, key text, ids text[], global boolean, OUT n integer, OUT denial text[])
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    q     ratelimit._request;
    own   text COLLATE "C" := coalesce(key, '');
    at    timestamptz;
    met   text[]; -- the ids that had a row
    rec   record;
    v     double precision;
    said  record;
BEGIN
    ids := ratelimit._many(name, key, ids, global);
    PERFORM ratelimit._published(name, key);
    IF (ratelimit._defined(name)).kind <> 'slots' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: many ids hold slots, and it has none', name),
            HINT = 'Call ratelimit.hold for each id.';
    END IF;
    IF pg_catalog.cardinality(ids) = 0 THEN
        n := 0;
        RETURN;
    END IF;
    q := ratelimit._prepare('hold', name, key, NULL, NULL, 1, 'token bucket', NULL, NULL, 1, global, NULL, NULL, NULL, NULL, NULL);
    IF q.effect = 'block' THEN
        at := clock_timestamp();
        SELECT r.retry_at, r.reset_at INTO said FROM ratelimit._answer('hold', q, false, at, NULL, NULL) AS r;
        denial := ratelimit._denied(ARRAY[name], name, 0, said.retry_at, said.reset_at, at, ratelimit._reason(q));
        RETURN;
    END IF;
    PERFORM ratelimit._lock(ARRAY[name], ARRAY[own::text], ARRAY['0'::double precision], ARRAY[1], NULL);
    at := clock_timestamp();
    WITH inserted AS (
        INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
        SELECT name, own, u.id, 'held', 'slots', NULL, 1, at, 0, 1, 'infinity' FROM pg_catalog.unnest(ids) WITH ORDINALITY AS u (id, i) ORDER BY u.i
        ON CONFLICT ON CONSTRAINT holds_pkey DO UPDATE SET count = h.count WHERE false -- which locks the row that is there
        RETURNING h.id
    )
    SELECT ARRAY(SELECT u.id FROM pg_catalog.unnest(ids) AS u (id) EXCEPT SELECT i.id FROM inserted AS i) INTO met;
    n := pg_catalog.cardinality(ids) - pg_catalog.cardinality(met);
    SELECT least(r.value, '0') INTO v FROM ratelimit.limits AS r WHERE r.name = name AND r.key = own AND r.shard = 0;
    IF pg_catalog.cardinality(met) > 0 OR v - n::double precision < q.floor THEN
        PERFORM ratelimit._reclaim(name, own, 0, '1 second', 0, NULL, NULL, NULL);
        SELECT least(r.value, '0') INTO v FROM ratelimit.limits AS r WHERE r.name = name AND r.key = own AND r.shard = 0;
        FOR rec IN
            SELECT h.id, h.state, h.until, h.token, h.taken_at FROM ratelimit.holds AS h
             WHERE h.name = name AND h.key = own AND h.id = ANY (met)
        LOOP
            CONTINUE WHEN rec.state = 'held' AND rec.until = 'infinity';
            IF rec.state = 'held' OR rec.state = 'settled' AND rec.until > at OR rec.state = 'released' AND ratelimit._barred(rec.token, NULL, rec.taken_at) THEN
                PERFORM ratelimit._id_taken(name, rec.state, greatest(rec.until, at + interval '1 second'), at);
            END IF;
            UPDATE ratelimit.holds AS h SET state = 'held', unit = 'slots', token = NULL, count = 1, taken_at = at, rest = 0, part = 1, until = 'infinity'
             WHERE h.name = name AND h.key = own AND h.id = rec.id;
            n := n + 1;
        END LOOP;
    END IF;
    IF n > 0 AND v - n::double precision < q.floor THEN
        q.count := n;
        PERFORM ratelimit._check_slots(q, 'ids', at);
        denial := ratelimit._denied(ARRAY[name], name, v - q.floor, nullif(ratelimit._retry_at('hold', q, '{}', '{}', at), 'infinity'), NULL, at, 'quota');
        RETURN;
    END IF;
    UPDATE ratelimit.limits AS r SET value = least(r.value, '0') - n::double precision, ts = greatest(r.ts, at) WHERE r.name = name AND r.key = own AND r.shard = 0 AND n > 0;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.hold_many(name text, key text DEFAULT NULL, ids text[] DEFAULT NULL, global boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
DECLARE
    n      integer;
    denial text[];
BEGIN
    SELECT r.n, r.denial INTO n, denial FROM ratelimit._hold_many(name COLLATE "C", key COLLATE "C", ids, global) AS r;
    IF denial IS NOT NULL THEN
        RAISE SQLSTATE 'PT429' USING MESSAGE = denial[1], DETAIL = denial[2], HINT = denial[3];
    END IF;
    RETURN n;
END
$body$;

COMMENT ON FUNCTION ratelimit.hold_many(text, text, text[], boolean) IS $text$
Takes one slot for each of many ids, without an end, in the caller's transaction, all or nothing: it raises an error if there are not enough. It
is ratelimit.hold with forever => true for each id, and takes each once. It returns how many were taken: those that are held already are not.

    SELECT ratelimit.hold_many('projects', team, array_agg(id)) FROM (SELECT team, id FROM come ORDER BY team COLLATE "C") AS c GROUP BY team

Arguments:
  name    the name of the limit, of slots
  key     the key as it is stored; NULL or empty is an error, unless global is true
  ids     as the id of ratelimit.hold
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  PT429, PT409  nothing was taken. As of ratelimit.hold
  22023    an argument is invalid, the limit has no slots, no program has published it, or only the program knows their number
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Ends holds of slots without an end. The limit's row is locked first, if there is one, and then the holds, in the order of their ids.
CREATE OR REPLACE FUNCTION ratelimit._release_many(name text, key text, ids text[], global boolean) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    own  text COLLATE "C" := coalesce(key, '');
    at   timestamptz;
    n    integer := 0;
    x    double precision := 0;
    one  text;
    rec  record;
BEGIN
    ids := ratelimit._many(name, key, ids, global);
    IF EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = own)
       OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN -- there, holds that are newer than the snapshot are 40001
        PERFORM ratelimit._lock(ARRAY[name], ARRAY[own::text], ARRAY['0'::double precision], ARRAY[1], NULL);
    END IF;
    at := clock_timestamp();
    FOREACH one IN ARRAY ids LOOP
        SELECT h.state, h.unit, h.token, h.count, h.until INTO rec FROM ratelimit.holds AS h
         WHERE h.name = name AND h.key = own AND h.id = one FOR UPDATE;
        CONTINUE WHEN rec.state IS DISTINCT FROM 'held' OR rec.until <= at;
        IF rec.token IS NOT NULL OR rec.unit <> 'slots' THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: one of these is not a hold of slots without an end', name),
                HINT = 'Call ratelimit.release for it.';
        END IF;
        DELETE FROM ratelimit.holds AS h WHERE h.name = name AND h.key = own AND h.id = one;
        n := n + 1;
        x := x + rec.count;
    END LOOP;
    UPDATE ratelimit.limits AS r SET value = least(r.value + x, '0'), ts = greatest(r.ts, at) WHERE r.name = name AND r.key = own AND r.shard = 0 AND n > 0;
    RETURN n;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.release_many(name text, key text DEFAULT NULL, ids text[] DEFAULT NULL, global boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
BEGIN
    RETURN ratelimit._release_many(name COLLATE "C", key COLLATE "C", ids, global);
END
$body$;

COMMENT ON FUNCTION ratelimit.release_many(text, text, text[], boolean) IS $text$
Ends holds of slots without an end, as ratelimit.release for each id, in the caller's transaction. It returns how many there were. It needs no numbers.

    SELECT ratelimit.release_many('projects', 'team 7', ARRAY['project 17', 'project 18'])

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  ids     of holds without an end
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023    an argument is invalid, or one of the holds has an end, or is of tokens. Nothing was released
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

-- Counts the slots in use again. The limit's row is locked first, then the holds, so that a sweep that ends some is waited for. Each hold is
-- written: above READ COMMITTED, a release that has seen no row of the limit is 40001 then.
CREATE OR REPLACE FUNCTION ratelimit._recount(name text, key text, global boolean) RETURNS double precision
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
DECLARE
    own  text COLLATE "C" := coalesce(key, '');
    kind text := (ratelimit._defined(name)).kind;
    at   timestamptz;
    used double precision;
BEGIN
    PERFORM ratelimit._many(name, key, '{}', global);
    IF kind IS DISTINCT FROM 'slots'
       AND NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: it has no slots', name);
    END IF;
    PERFORM ratelimit._lock(ARRAY[name], ARRAY[own::text], ARRAY['0'::double precision], ARRAY[1], NULL);
    at := clock_timestamp();
    PERFORM 1 FROM ratelimit.holds AS h
      WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots' ORDER BY h.id FOR UPDATE;
    WITH counted AS (
        UPDATE ratelimit.holds AS h SET count = h.count
         WHERE h.name = name AND h.key = own AND h.state = 'held' AND h.unit = 'slots'
        RETURNING h.count
    )
    SELECT coalesce(sum(c.count), '0') INTO used FROM counted AS c;
    UPDATE ratelimit.limits AS r SET value = '0'::double precision - used, ts = greatest(r.ts, at), lapses = '-infinity' WHERE r.name = name AND r.key = own AND r.shard = 0;
    RETURN used;
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.recount(name text, key text DEFAULT NULL, global boolean DEFAULT false) RETURNS double precision
LANGUAGE plpgsql
AS $body$
BEGIN
    RETURN ratelimit._recount(name COLLATE "C", key COLLATE "C", global);
END
$body$;

COMMENT ON FUNCTION ratelimit.recount(text, text, boolean) IS $text$
Counts the slots of a key again: those that its holds have are in use, and no others. It returns how many. Call it after rows of ratelimit.limits or of
ratelimit.holds were lost: a TRUNCATE, a restore of one of the tables.

    SELECT ratelimit.recount('projects', 'team 7')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023    an argument is invalid, or the limit has no slots
  0A000    the table is distributed by key
  40001, 40P01  another transaction was in the way: run the transaction again
$text$;

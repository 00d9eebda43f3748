-- Holds: tokens and slots that are taken under an id, and come back when the work is settled or released, or its time is over. CONCURRENCY.md,
-- J, has the order of the locks, and why it holds. Tokens that are taken once for an id do not come back: the row alone says that they were.
--
-- The arguments are arrays of one length, with one position for each limit: those of ratelimit._apply, and
--   units   tokens; slots; none: the limit has no rows now (it is unlimited, or grants nothing), so no token moves
--   taking  the first so many positions are tokens and slots, in the common order (name, key); the others are none, in that order too
-- Slots are a row of one shard with a rate and a capacity of 0: its value is minus the sum of the counts that are held, and the floor is
-- minus how many there may be. Who calls the same name with a rate may have left more: above 0, it counts as 0.
--
-- ratelimit._hold, ratelimit._settle and the sweep set how the planner looks rows up, for the functions that they call, too.

-- Tokens and slots that come back: one row per limit, key and id. Limits without holds have no rows here, and no call of theirs reads it.
--
-- A row is written after the row of ratelimit.limits, in one transaction (CONCURRENCY.md, J). For slots, value in ratelimit.limits is minus the sum of the
-- counts of the held rows here. Like ratelimit.limits, the table has no CHECK constraints (G1).
-- The fillfactor leaves room for the next version: an extension changes only until, which no index has, so it is heap-only.
CREATE TABLE ratelimit.holds (
    name     text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    id       text COLLATE "C" NOT NULL,
    state    text             NOT NULL,
    unit     text             NOT NULL,
    token    uuid,
    count    double precision NOT NULL,
    taken_at timestamptz      NOT NULL,
    rest     double precision NOT NULL,
    part     double precision NOT NULL,
    until    timestamptz      NOT NULL,
    PRIMARY KEY (name, key, id)
) WITH (fillfactor = 90);

-- What is held of a key, without the settled rows of a day, and of that what can expire (token IS NOT NULL). The planner takes it for one hold,
-- too: token and id make it as good as the primary key then.
CREATE INDEX holds_held ON ratelimit.holds (name, key, token, id)
    WHERE state = 'held';

COMMENT ON TABLE ratelimit.holds IS 'txlimit: tokens and slots that are held under an id, and come back';
COMMENT ON COLUMN ratelimit.holds.name IS 'the name of the limit';
COMMENT ON COLUMN ratelimit.holds.key IS 'whose tokens they are; '''' if the limit has no keys';
COMMENT ON COLUMN ratelimit.holds.id IS 'the id that the caller chose: a job, an event, a project';
COMMENT ON COLUMN ratelimit.holds.state IS 'held; lapsed: it expired or was reset, and is lost; settled: the work is over; once: the tokens were taken, once for the id; released: before its hold came, which is refused';
COMMENT ON COLUMN ratelimit.holds.unit IS 'tokens; slots; none: the key was unlimited, so no tokens ever move';
COMMENT ON COLUMN ratelimit.holds.token IS 'whose hold it is; NULL: of everybody who knows the id, since it does not expire, or was taken once';
COMMENT ON COLUMN ratelimit.holds.count IS 'the tokens or slots that were taken';
COMMENT ON COLUMN ratelimit.holds.taken_at IS 'the instant of the decision';
COMMENT ON COLUMN ratelimit.holds.rest IS 'the tokens that were left in the rows of ratelimit.limits that they were taken from; of a lapsed one, those that did not come back';
COMMENT ON COLUMN ratelimit.holds.part IS 'the part of the limit in those rows: 1, or 1/shards for one shard';
COMMENT ON COLUMN ratelimit.holds.until IS 'held: from then on it may be given back; else: from then on it counts as absent; infinity: never';

-- state: taken; repeated: all is held under the id already, without an end, or was taken once; denied; held: by somebody, in time; settled: within a day;
-- released: the token was, before. until: the end of the hold, or of the one that is held. free_at: of a denial, by
-- limit, when expiries alone make room for slots; NULL: never, or not known. Of tokens, when the first of their holds that have an end ends; in a pause, at its end.
CREATE TYPE ratelimit._held AS (state text, until timestamptz, at timestamptz, ord integer[], value double precision[],
    ts timestamptz[], free_at timestamptz[]);

-- The rows of a limit as they are once its expired holds have given back, or only some of them: the one rule for what is given back in fact, and for who counts
-- it before. back is by ids. Rows and holds are of one snapshot: a hold that ends between two would be in neither.
--
-- A hold gives back at its end or, if the row was written since, at that instant: whoever gives back later gives the same, and the refill goes on from there.
CREATE OR REPLACE FUNCTION ratelimit._lapsed(
    name text, key text, at timestamptz, rate double precision, period interval, capacity double precision, start timestamptz, windows timestamptz[],
    only_ids text[] DEFAULT NULL, OUT value double precision[], OUT ts timestamptz[], OUT ids text[], OUT back double precision[]
)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $body$
DECLARE
    ended  CONSTANT timestamptz := at;
    latest timestamptz; -- of ts
    last   timestamptz; -- the latest of their promised
    m      integer;
    total  double precision;
    x      double precision;
    rec    record;
BEGIN
    SELECT coalesce(pg_catalog.array_agg(r.value ORDER BY r.shard), '{}'), coalesce(pg_catalog.array_agg(r.ts ORDER BY r.shard), '{}'), max(r.ts), max(r.promised), count(*)
      INTO value, ts, latest, last, m
      FROM ratelimit.limits AS r
     WHERE r.name = name AND r.key = key;
    IF only_ids IS NULL AND latest > at AND at >= statement_timestamp() AND latest <= clock_timestamp() THEN -- used since the server's clock was read: no pause
        at := latest;
    END IF;
    IF NOT ratelimit._may('SELECT') THEN
        RETURN;
    END IF;
    FOR rec IN
        SELECT h.id, h.unit, h.count, h.rest, h.part, h.taken_at, h.until FROM ratelimit.holds AS h
         WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= ended AND (only_ids IS NULL OR h.id = ANY (only_ids))
         ORDER BY h.until, h.taken_at, h.id
    LOOP
        CONTINUE WHEN rec.unit = 'tokens' AND start IS NULL AND latest > at; -- paused: it comes back afterwards
        x := 0; -- also if the name was of another kind before
        IF rec.unit = 'slots' AND m = 1 THEN
            total := value[1];
            x := least(rec.count, -total);
        ELSIF rec.unit = 'tokens' AND rate > '0' AND m > 0 THEN
            SELECT g.total, g.back INTO total, x
              FROM ratelimit._give_back(value, ts, last, greatest(rec.until, latest), rate, period, capacity, start, rec.count, rec.count, rec.rest, rec.part,
                   rec.taken_at, rec.taken_at, windows) AS g;
        END IF;
        IF x > '0' THEN
            value := pg_catalog.array_fill((total + x) / m::double precision, ARRAY[m]);
            latest := greatest(rec.until, latest);
            ts := pg_catalog.array_fill(latest, ARRAY[m]);
        END IF;
        ids := pg_catalog.array_append(ids, rec.id);
        back := pg_catalog.array_append(back, greatest(x, '0'));
    END LOOP;
END
$body$;

-- Whether the caller has a right to the table of holds. The body is a text, so that the function does not depend on the table: Citus would not make it,
-- nor ratelimit._ends, on the workers before the table is distributed.
CREATE OR REPLACE FUNCTION ratelimit._may(privilege text) RETURNS boolean
LANGUAGE sql STABLE
AS $body$
SELECT pg_catalog.has_table_privilege('ratelimit.holds'::text, privilege)
$body$;

-- Whether this caller may end expired holds: not on a standby, nor without the right.
CREATE OR REPLACE FUNCTION ratelimit._ends() RETURNS boolean
LANGUAGE sql STABLE
RETURN current_setting('transaction_read_only') = 'off' AND ratelimit._may('UPDATE');

-- Ends expired holds of a key whose rows are all locked, if there are any and the caller may. A sweep looks for them whatever the rows say, and ends at
-- most so many, the oldest first. upto: only those that ended by then. Returns how many.
--
-- It never waits: a hold that somebody has locked is being extended or settled. The SELECT that locks asks state and until again, on the
-- newest version: so a hold is extended or given back, never both.
CREATE OR REPLACE FUNCTION ratelimit._reclaim(
    name text, key text, rate double precision, period interval, capacity double precision, start timestamptz,
    now timestamptz, windows timestamptz[], most integer DEFAULT NULL, upto timestamptz DEFAULT NULL
) RETURNS integer
LANGUAGE plpgsql
AS $body$
DECLARE
    at    timestamptz := coalesce(now, clock_timestamp());
    kept  timestamptz := at + interval '7 days';
    gives boolean;
    next  timestamptz; -- when the next one may expire
    ids   text[];
    l     record;
    rec   record;
BEGIN
    IF most IS NULL AND NOT (EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.lapses <= at)
            AND ratelimit._may('SELECT') AND ratelimit._ends()) THEN
        RETURN 0;
    END IF;
    ids := ARRAY(SELECT h.id
          FROM ratelimit.holds AS h
         WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.until <= coalesce(upto, at)
         ORDER BY h.until
         LIMIT most
           FOR UPDATE SKIP LOCKED);
    SELECT f.value, f.ts, f.ids, f.back INTO l FROM ratelimit._lapsed(name, key, at, rate, period, capacity, start, windows, ids) AS f;
    FOR rec IN SELECT b.id, b.back FROM unnest(l.ids, l.back) AS b (id, back) LOOP -- one after the other, each by the primary key, whatever the statistics
        UPDATE ratelimit.holds AS h SET state = 'lapsed', rest = h.count - rec.back, until = kept
         WHERE h.name = name AND h.key = key AND h.id = rec.id;
    END LOOP;
    gives := coalesce('0' < ANY (l.back), false);
    SELECT min(h.until) INTO next FROM ratelimit.holds AS h
     WHERE h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL;
    UPDATE ratelimit.limits AS r
       SET value = CASE WHEN gives THEN l.value[1] ELSE r.value END, ts = CASE WHEN gives THEN l.ts[1] ELSE r.ts END, lapses = next
     WHERE r.name = name AND r.key = key;
    RETURN coalesce(pg_catalog.cardinality(l.ids), 0);
END
$body$;

-- Whether a release's mark is for a hold of this token or, of an id without one, for its statement: one that is older. A mark of the future is of before
-- the server's clock stepped back.
CREATE OR REPLACE FUNCTION ratelimit._barred(token uuid, own_token uuid, marked_at timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE
RETURN coalesce(token = own_token, token IS NULL AND own_token IS NULL AND marked_at > statement_timestamp() AND marked_at <= clock_timestamp());

-- What is known of an id over these limits: held, by somebody in time; settled, within a day; released: the token was; or taken: it may be. It is repeated if the call
-- may be ('once', or 'endless': of holds without an end), and all of it is known. until: the latest end of the holds in time; infinity: one of them has none.
CREATE OR REPLACE FUNCTION ratelimit._known(
    own text, own_token uuid, repeats text, names text[], keys text[], at timestamptz,
    OUT state text, OUT until timestamptz
)
LANGUAGE plpgsql
AS $body$
DECLARE
    rank    integer := 4;
    endless boolean := repeats = 'endless';
    rec     record;
BEGIN
    FOR i IN 1..pg_catalog.cardinality(names) LOOP
        SELECT h.state, h.until, h.token, h.taken_at INTO rec FROM ratelimit.holds AS h
         WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        endless := endless AND coalesce(rec.state = 'held' AND rec.until = 'infinity', false);
        CONTINUE WHEN rec.state IS NULL;
        IF rec.state = 'released' AND ratelimit._barred(rec.token, own_token, rec.taken_at) THEN
            rank := 1;
        ELSIF rec.state = 'held' AND rec.until > at THEN
            until := greatest(until, rec.until);
            rank := least(rank, 2);
        ELSIF rec.state IN ('settled', 'once') AND rec.until > at THEN
            rank := least(rank, 3);
        END IF;
    END LOOP;
    state := CASE WHEN endless OR repeats = 'once' AND rank IN (2, 3) THEN 'repeated' ELSE (ARRAY['released', 'held', 'settled', 'taken'])[rank] END;
END
$body$;

-- For a token, or an id without one, of which there is no row: a hold of it that is on its way has come when this returns, which is false then, or
-- comes no more. It meets the mark, which is a row of its own primary key: it sees no other that is newer than its snapshot. Without a token, the mark is for
-- every hold of the id whose statement is older. Any other hold overwrites the mark, and a sweep deletes it an hour later. One mark is enough, since a hold
-- is all or nothing. CONCURRENCY.md, J6, has the argument.
CREATE OR REPLACE FUNCTION ratelimit._bar(own text, own_token uuid, names text[], keys text[], now timestamptz) RETURNS boolean
LANGUAGE plpgsql
AS $body$
DECLARE
    at timestamptz := coalesce(now, clock_timestamp());
    i  integer;
BEGIN
    BEGIN
        FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP -- a row that is there is locked
            INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
            VALUES (names[i], keys[i], own, 'released', 'none', own_token, 0, statement_timestamp(), 0, 1, at)
            ON CONFLICT (name, key, id) DO UPDATE SET state = 'released', unit = 'none', token = own_token, count = 0, taken_at = excluded.taken_at, until = at
             WHERE (h.token = own_token) IS NOT TRUE AND h.state <> 'held' AND h.until <= at OR own_token IS NULL AND h.token IS NULL AND h.state = 'released';
            IF FOUND THEN
                RETURN true;
            END IF;
            EXIT WHEN EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own
                AND h.token = own_token);
        END LOOP;
        RAISE SQLSTATE 'RL001'; -- which releases the rows, since those of the limits are locked before them
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;
    FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP -- the id is another's: wait behind
        PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
    END LOOP;
    FOR i IN 1..pg_catalog.cardinality(names) LOOP
        IF EXISTS (SELECT 1 FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own
                AND h.token IS NOT DISTINCT FROM own_token AND h.state <> 'once') THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END
$body$;

-- Writes the rows of a hold whose tokens are taken (d). If the id is known, it says so: then the caller undoes the taking and these rows.
--
-- ON CONFLICT inserts a row, or locks the row that is there and writes nothing. It looks nothing up before, which at SERIALIZABLE would
-- conflict with the holds of other ids.
CREATE OR REPLACE FUNCTION ratelimit._claim(
    own text, own_token uuid, units text[], names text[], keys text[], starts timestamptz[], shards integer[], counts double precision[],
    d ratelimit._decisions, at timestamptz, INOUT until timestamptz, OUT state text
)
LANGUAGE plpgsql
AS $body$
DECLARE
    i     integer;
    m     integer;
    met   integer[] := '{}'; -- the positions whose rows were there
    own_rest double precision;
    rest  double precision[] := '{}';
    own_ts timestamptz;
    taken timestamptz[] := '{}'; -- by position: of a window, in that of its rows, which may have begun during a wait
    part  double precision[] := '{}';
    ends  timestamptz := until; -- of the new hold
    kind  text := CASE WHEN own_token IS NULL AND until < 'infinity' THEN 'once' ELSE 'held' END;
BEGIN
    FOR i IN 1..pg_catalog.cardinality(names) LOOP
        SELECT count(*), coalesce(sum(u.value), '0'), max(u.ts) INTO m, own_rest, own_ts
          FROM ROWS FROM (pg_catalog.unnest(d.ord), pg_catalog.unnest(d.value), pg_catalog.unnest(d.ts)) AS u (ord, value, ts) WHERE u.ord = i;
        rest[i] := own_rest;
        taken[i] := CASE WHEN starts[i] IS NULL THEN d.at ELSE greatest(own_ts, d.at) END;
        part[i] := CASE WHEN m = 1 THEN '1'::double precision / shards[i]::double precision ELSE 1 END;
        counts[i] := CASE WHEN units[i] = 'none' THEN 0 ELSE counts[i] END;
    END LOOP;
    FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP
        INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
        VALUES (names[i], keys[i], own, kind, units[i], own_token, counts[i], taken[i], rest[i], part[i], ends)
        ON CONFLICT (name, key, id) DO UPDATE SET count = h.count WHERE false;
        IF NOT FOUND THEN
            met := pg_catalog.array_append(met, i);
        END IF;
    END LOOP;
    state := 'taken';
    IF pg_catalog.cardinality(met) > 0 THEN -- all rows of the id are locked by now
        SELECT k.state, k.until INTO state, until
          FROM ratelimit._known(own, own_token, CASE WHEN kind = 'once' THEN kind WHEN ends = 'infinity' AND pg_catalog.cardinality(met) = pg_catalog.cardinality(names) THEN 'endless' END,
               ARRAY(SELECT names[u.i] FROM pg_catalog.unnest(met) AS u (i) ORDER BY u.i),
               ARRAY(SELECT keys[u.i] FROM pg_catalog.unnest(met) AS u (i) ORDER BY u.i), at) AS k;
    END IF;
    IF state = 'taken' THEN
        until := ends;
        FOREACH i IN ARRAY met LOOP
            -- An expired hold that is still to come back, or may still be charged, goes on under an id that no caller can have.
            UPDATE ratelimit.holds AS h SET id = '~' || h.token::text
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own
               AND h.token IS NOT NULL AND CASE h.state WHEN 'held' THEN h.unit <> 'none' WHEN 'lapsed' THEN h.unit = 'tokens' AND h.until > at ELSE false END;
            IF FOUND THEN
                INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
                VALUES (names[i], keys[i], own, kind, coalesce(units[i]), own_token, coalesce(counts[i]), coalesce(taken[i]), coalesce(rest[i]), coalesce(part[i]), ends);
                CONTINUE;
            END IF;
            UPDATE ratelimit.holds AS h
               SET state = kind, unit = coalesce(units[i]), token = own_token, count = coalesce(counts[i]), taken_at = coalesce(taken[i]),
                   rest = coalesce(rest[i]), part = coalesce(part[i]), until = ends
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        END LOOP;
    END IF;
END
$body$;

-- When expiries alone make room for slots: an upper bound, if nobody extends and nothing else is taken; at: there is room now. NULL: never. The row and its
-- holds are of one snapshot: a hold that has ended between two would be in neither.
CREATE OR REPLACE FUNCTION ratelimit._free_at(
    name text, key text, count double precision, floor double precision, at timestamptz
) RETURNS timestamptz
LANGUAGE plpgsql
AS $body$
DECLARE
    free double precision;
    rec  record;
BEGIN
    FOR rec IN
        SELECT h.count, h.until, u.value
          FROM (SELECT coalesce((SELECT least(r.value, '0') FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.shard = 0), '0') AS value) AS u
          LEFT JOIN ratelimit.holds AS h
            ON h.name = name AND h.key = key AND h.state = 'held' AND h.token IS NOT NULL AND h.unit = 'slots'
         ORDER BY h.until
    LOOP
        free := coalesce(free, rec.value - count - floor);
        EXIT WHEN free >= '0';
        free := free + coalesce(rec.count, '0');
        IF free >= '0' THEN -- one that has expired is locked by somebody
            RETURN CASE WHEN rec.until > at THEN rec.until ELSE at + interval '1 second' END;
        END IF;
    END LOOP;
    RETURN CASE WHEN free >= '0' THEN at END;
END
$body$;

-- The answer where the id is known. Of a repeated call, its values are what the first one counted.
CREATE OR REPLACE FUNCTION ratelimit._as_known(state text, until timestamptz, at timestamptz, own text, names text[], keys text[]) RETURNS ratelimit._held
LANGUAGE plpgsql
AS $body$
DECLARE
    ord    integer[] := '{}';
    counts double precision[] := '{}';
    rec    record;
BEGIN
    FOR i IN 1..CASE WHEN state = 'repeated' THEN pg_catalog.cardinality(names) ELSE 0 END LOOP
        SELECT h.count INTO rec FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        IF FOUND THEN
            ord := pg_catalog.array_append(ord, i);
            counts := pg_catalog.array_append(counts, rec.count);
        END IF;
    END LOOP;
    RETURN ROW(state, until, at, ord, counts, pg_catalog.array_fill(at, ARRAY[pg_catalog.cardinality(ord)]), NULL)::ratelimit._held;
END
$body$;

-- Takes tokens and slots under an id, as ratelimit._apply takes, all or nothing. The token is a random one, of the caller, who so can end the
-- hold whose answer was lost. ttl is how long the hold lasts; NULL, without a token: it does not expire. A ttl without a token: the tokens are
-- taken once, and the row is kept for so long. If the id is known then, held or settled or once, the call is repeated, and takes nothing.
--
-- A taking is undone by its subtransaction if the id is known by then: it may be from any shard, and its rows may be new.
CREATE OR REPLACE FUNCTION ratelimit._hold(
    own text, own_token uuid, ttl interval, taking integer, units text[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._held
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    n       CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    once    CONSTANT boolean := own_token IS NULL AND ttl IS NOT NULL;
    repeats CONSTANT text := CASE WHEN once THEN 'once' WHEN ttl IS NULL THEN 'endless' END;
    d       ratelimit._decisions;
    at      timestamptz;
    state   text;
    until   timestamptz;
    free_at timestamptz[];
BEGIN
    IF (octet_length(own) BETWEEN 1 AND 255 AND own COLLATE "C" !~ '^~|[[:cntrl:]]' AND n BETWEEN 1 AND 1000 AND taking BETWEEN 0 AND n AND n = pg_catalog.cardinality(keys)
        AND n = pg_catalog.cardinality(units) AND n = pg_catalog.cardinality(shards) AND n = pg_catalog.cardinality(counts)
        AND (ttl IS NOT NULL OR own_token IS NULL) AND (ttl IS NULL OR isfinite(ttl) AND ttl >= '100 milliseconds' AND ttl <= '366 days')) IS NOT TRUE
       OR EXISTS (SELECT 1 FROM pg_catalog.generate_subscripts(names, 1) AS p
           WHERE (CASE WHEN p > taking THEN units[p] = 'none' WHEN units[p] = 'slots' THEN NOT once AND rates[p] = '0' AND shards[p] = 1 AND counts[p] >= '1' AND counts[p] = trunc(counts[p])
                  ELSE units[p] = 'tokens' AND rates[p] > '0' END
               AND (p IN (1, taking + 1) OR (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (names[p] COLLATE "C", keys[p] COLLATE "C"))) IS NOT TRUE) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    IF ratelimit._distributed() THEN
        RAISE feature_not_supported USING MESSAGE = 'rate limits: there are no holds where the table is distributed by key',
            HINT = 'Distribute the schema, or put limits with holds into a schema that is not distributed.';
    END IF;
    -- Look the id up first: a duplicate takes nothing, and locks nothing. It would not do to take, and to roll back to here: whoever waits
    -- for a row that a subtransaction inside this one has written waits for the end of the whole transaction. SERIALIZABLE cannot look:
    -- an id that is not there would conflict with the holds of other ids.
    IF current_setting('transaction_isolation') <> 'serializable' THEN
        at := coalesce(now, clock_timestamp());
        SELECT k.state, k.until INTO state, until FROM ratelimit._known(own, own_token, repeats, names, keys, at) AS k;
        IF state IN ('repeated', 'held', 'settled', 'released') THEN
            RETURN ratelimit._as_known(state, until, at, own, names[1:taking], keys[1:taking]);
        END IF;
    END IF;
    BEGIN
        state := NULL;
        d := ROW(true, coalesce(now, clock_timestamp()), '{}', '{}', '{}', NULL);
        IF taking > 0 THEN
            d := ratelimit._apply('consume', names[1:taking], keys[1:taking], rates[1:taking], periods[1:taking],
                capacities[1:taking], starts[1:taking], shards[1:taking], counts[1:taking], floors[1:taking], shard_a[1:taking], shard_b[1:taking], false, now, false,
                windows, firsts[1:taking], lasts[1:taking], until => CASE WHEN own_token IS NOT NULL THEN coalesce(now, clock_timestamp()) + ttl END);
        END IF;
        at := coalesce(now, clock_timestamp()); -- taking may have waited: that is not of the work's time
        IF d.granted THEN
            SELECT c.state, c.until INTO state, until
              FROM ratelimit._claim(own, own_token, units, names, keys, starts, shards, counts, d, at, coalesce(at + ttl, 'infinity')) AS c;
            IF state <> 'taken' THEN
                RAISE SQLSTATE 'RL001';
            END IF;
        END IF;
    EXCEPTION WHEN SQLSTATE 'RL001' THEN
        NULL;
    END;
    IF state = 'taken' THEN
        RETURN ROW(state, until, d.at, d.ord, d.value, d.ts, NULL)::ratelimit._held;
    ELSIF state IS NULL THEN -- denied: the id may be the one that has the last slot
        SELECT k.state, k.until INTO state, until FROM ratelimit._known(own, own_token, repeats, names, keys, at) AS k;
    END IF;
    IF state IN ('repeated', 'held', 'settled', 'released') THEN
        RETURN ratelimit._as_known(state, until, at, own, names[1:taking], keys[1:taking]);
    END IF;
    FOR i IN 1..taking LOOP
        IF units[i] = 'slots' THEN
            free_at[i] := ratelimit._free_at(names[i], keys[i], counts[i], floors[i], at);
        ELSE
            SELECT min(greatest(h.until, r.ts)) INTO until FROM ratelimit.holds AS h, (SELECT max(l.ts) AS ts FROM ratelimit.limits AS l WHERE l.name = names[i] AND l.key = keys[i]) AS r
             WHERE h.name = names[i] AND h.key = keys[i] AND h.state = 'held' AND h.token IS NOT NULL AND h.unit = 'tokens' AND greatest(h.until, r.ts) > at;
            free_at[i] := until;
        END IF;
    END LOOP;
    RETURN ROW('denied', NULL, d.at, d.ord, d.value, d.ts, free_at)::ratelimit._held;
END
$body$;

-- Ends a hold. used: by limit, the tokens that were used; less comes back, by the rule of refunds, and more is charged. Slots come back in any case. release:
-- the id is free again; a hold that has ended is no error (late), but one that has an end is lost to who knows its id alone. shards: 0 is for a limit whose
-- numbers the caller does not know: they are those that programs have published, as if nothing were blocked. Without any, nothing comes back but slots. Its
-- rows are not inserted. lifted: by limit, it is unlimited by an override, so nothing is charged.
--
-- A hold that is not there yet meets a mark (ratelimit._bar). The rows of the limits are locked before those of the id, missing ones inserted. Above READ
-- COMMITTED, a hold that is newer than the snapshot is 40001, and never lost.
CREATE OR REPLACE FUNCTION ratelimit._settle(
    release boolean, own text, own_token uuid, taking integer, lifted boolean[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    used double precision[], now timestamptz DEFAULT NULL,
    windows timestamptz[] DEFAULT NULL, firsts integer[] DEFAULT NULL, lasts integer[] DEFAULT NULL
) RETURNS ratelimit._settled
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    n      CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    ids    CONSTANT text[] := ARRAY[own, '~' || own_token::text]; -- the second once the first is another's: ratelimit._claim. Each is looked up by itself
    i      integer;
    at     timestamptz;
    kept   timestamptz;
    mine   boolean[] := '{}'; -- by position: the row is of this token, and may be ended
    over   boolean := false;  -- there is a row of this token
    bare   boolean[] := pg_catalog.array_fill(false, ARRAY[n]); -- by position: there were no rows of the limit
    d      ratelimit._terms;
    q      ratelimit._request;
    rec    ratelimit.holds;
    list   ratelimit.holds[] := pg_catalog.array_fill(NULL::ratelimit.holds, ARRAY[n]); -- by position
    states text[] := pg_catalog.array_fill(NULL::text, ARRAY[n]);
    moved  double precision[] := pg_catalog.array_fill('0'::double precision, ARRAY[n]);
    lost   integer[] := '{}';
    ord    integer[] := '{}';
    value  double precision[] := '{}';
    ts     timestamptz[] := '{}';
    m      integer;            -- the number of rows of a limit
    v      double precision[]; -- their values
    t      timestamptz[];      -- their ts
    last   timestamptz;        -- the latest of their promised
    w      timestamptz[];      -- the windows of a calendar window
    lapses timestamptz;        -- when the first of the holds may expire
    latest timestamptz;        -- the latest ts, or now if that is later
    since  timestamptz;        -- when the hold ended, or now; or later, if the rows were written since
    moves  boolean;            -- tokens
    total  double precision;
    x      double precision;   -- what comes back; below zero: what is charged
BEGIN
    IF (n BETWEEN 1 AND 1000 AND taking BETWEEN 0 AND n AND n = pg_catalog.cardinality(keys) AND n = pg_catalog.cardinality(lifted) AND n = pg_catalog.cardinality(rates)
        AND n = pg_catalog.cardinality(used) AND '0' <= ALL (used) AND '1e15' >= ALL (used) AND release IS NOT NULL AND own IS NOT NULL) IS NOT TRUE
       OR EXISTS (SELECT 1 FROM pg_catalog.generate_subscripts(names, 1) AS p
           WHERE (p > taking OR ratelimit._valid(rates[p], periods[p], capacities[p], used[p], now)) IS NOT TRUE
              OR (p IN (1, taking + 1) OR (names[p - 1] COLLATE "C", keys[p - 1] COLLATE "C") < (names[p] COLLATE "C", keys[p] COLLATE "C")) IS NOT TRUE) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    LOOP -- look first: of what is not there, no row of a limit is locked or written
        FOR i IN 1..n LOOP
            SELECT o.state, o.unit INTO rec.state, rec.unit FROM pg_catalog.unnest(ids) AS u (id) CROSS JOIN LATERAL (
                SELECT h.state, h.unit FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = u.id
                   AND (h.token = own_token OR own_token IS NULL AND (h.state = 'held' OR h.state <> 'released' AND h.until > coalesce(now, clock_timestamp())))
                OFFSET 0) AS o;
            over := over OR FOUND;
            mine[i] := coalesce(rec.state IN ('held', 'lapsed') OR rec.state = 'settled' AND NOT release, false);
        END LOOP;
        EXIT WHEN over OR ratelimit._bar(own, own_token, names, keys, now);
    END LOOP;
    IF release AND true <> ALL (mine) THEN
        RETURN ROW('late', coalesce(now, clock_timestamp()), '{}', '{}', '{}', moved, lost)::ratelimit._settled;
    END IF;
    FOR i IN 1..taking LOOP
        CONTINUE WHEN NOT mine[i];
        IF shards[i] = 0 THEN
            shards[i] := 1;
            IF (ratelimit._defined(names[i])).kind <> 'slots' THEN
                d := ratelimit._numbers(names[i], nullif(keys[i], ''), coalesce(now, clock_timestamp()), varying => true, standing => true);
                IF d.effect <> 'varies' AND d.rate > '0' THEN
                    q := ratelimit._prepare('settle', names[i], nullif(keys[i], ''), d.rate, d.period, 0, d.kind, d.capacity, d.start, d.shards,
                        keys[i] = '', d.zone, d.anchor, NULL, NULL, now);
                    rates[i] := q.rate; periods[i] := q.period; capacities[i] := q.capacity; starts[i] := q.start; shards[i] := q.shards;
                    firsts[i] := CASE WHEN q.windows IS NOT NULL THEN coalesce(pg_catalog.cardinality(windows), 0) + 1 END;
                    windows := pg_catalog.array_cat(windows, q.windows);
                    lasts[i] := pg_catalog.cardinality(windows);
                END IF;
                d := ratelimit._numbers(names[i], nullif(keys[i], ''), coalesce(now, clock_timestamp()), varying => true);
                lifted[i] := coalesce(d.effect = 'unlimited', false);
            END IF;
            bare[i] := NOT EXISTS (SELECT 1 FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i]);
            CONTINUE WHEN bare[i]; -- it is full
        END IF;
        PERFORM ratelimit._lock(names[i:i], keys[i:i], capacities[i:i], shards[i:i], now);
    END LOOP;
    at := coalesce(now, clock_timestamp()); -- locking may have waited
    kept := at + interval '1 day';
    FOR i IN SELECT p FROM pg_catalog.generate_subscripts(names, 1) AS p ORDER BY names[p] COLLATE "C", keys[p] COLLATE "C" LOOP
        rec := NULL;
        IF mine[i] THEN
            FOR m IN 1..2 LOOP -- again, if the id became another's while this waited
                SELECT o.* INTO rec FROM pg_catalog.unnest(ids) AS u (id) CROSS JOIN LATERAL (
                    SELECT h.* FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = u.id AND (h.token = own_token OR own_token IS NULL)
                    OFFSET 0 FOR UPDATE) AS o;
                EXIT WHEN FOUND;
            END LOOP;
        END IF;
        list[i] := rec;
        states[i] := CASE WHEN rec.state IS NULL OR rec.token IS DISTINCT FROM own_token OR rec.state = 'once' OR rec.state <> 'held' AND rec.until <= at
            OR NOT release AND (rec.id <> own OR rec.state = 'lapsed' AND rec.unit = 'slots') THEN 'lost' ELSE rec.state END;
        IF states[i] = 'lost' AND (NOT release OR own_token IS NULL AND rec.token IS NOT NULL AND rec.state = 'held' AND rec.until > at) THEN
            lost := pg_catalog.array_append(lost, i);
        END IF;
    END LOOP;
    IF pg_catalog.cardinality(lost) > 0 THEN
        RETURN ROW('lost', at, '{}', '{}', '{}', moved, lost)::ratelimit._settled;
    END IF;
    FOR i IN 1..n LOOP
        rec := list[i];
        x := 0;
        m := 0;
        w := windows[firsts[i]:lasts[i]];
        moves := i <= taking AND rates[i] > '0' AND NOT bare[i] AND (states[i] = 'lapsed' OR states[i] = 'held' AND rec.count <> used[i]) AND rec.unit = 'tokens';
        since := CASE WHEN states[i] = 'held' THEN least(rec.until, at) ELSE at END;
        IF states[i] NOT IN ('held', 'lapsed') THEN
            NULL; -- nobody else's row is touched
        ELSIF release THEN
            DELETE FROM ratelimit.holds AS h WHERE h.name = names[i] AND h.key = keys[i] AND h.id = rec.id;
        ELSE
            UPDATE ratelimit.holds AS h SET state = 'settled', until = kept
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = own;
        END IF;
        IF moves THEN -- after what ended before it
            PERFORM ratelimit._reclaim(names[i], keys[i], rates[i], periods[i], capacities[i], starts[i], at, w, upto => since);
        END IF;
        IF i <= taking THEN
            SELECT pg_catalog.array_agg(r.value ORDER BY r.shard), pg_catalog.array_agg(r.ts ORDER BY r.shard), count(*), greatest(max(r.ts), at), max(r.promised),
                   CASE WHEN max(r.ts) > at THEN at ELSE greatest(max(r.ts), since) END, min(r.lapses)
              INTO v, t, m, latest, last, since, lapses
              FROM ratelimit.limits AS r
             WHERE r.name = names[i] AND r.key = keys[i];
        END IF;
        IF i > taking OR states[i] NOT IN ('held', 'lapsed') THEN
            NULL;
        ELSIF bare[i] THEN
            -- A recount has counted the hold meanwhile, and its row can be locked only before the hold. Asked under the hold's lock, for which a
            -- later recount waits (CONCURRENCY.md, J14).
            IF states[i] = 'held' AND rec.unit = 'slots' AND m > 0 THEN
                RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limit %L: its slots were counted again meanwhile', names[i]);
            END IF;
        ELSIF rec.unit = 'slots' AND m = 1 THEN
            total := v[1];
            x := CASE WHEN states[i] = 'held' THEN greatest(least(rec.count, -total), '0') ELSE 0 END;
        ELSIF moves THEN
            total := ratelimit._total(v, t, since, rates[i], periods[i], capacities[i], starts[i], w);
            IF states[i] = 'held' THEN
                x := rec.count - used[i];
            ELSE -- what it kept is paid; what came back in a window that is over counts as used there
                x := least('0', CASE WHEN starts[i] IS NULL OR w IS NULL AND date_bin(periods[i], rec.taken_at, starts[i]) = date_bin(periods[i], latest, starts[i])
                    OR rec.taken_at >= w[1] AND pg_catalog.width_bucket(rec.taken_at, w) = pg_catalog.width_bucket(latest, w) THEN rec.rest ELSE rec.count END - used[i]);
            END IF;
            IF x > '0' THEN
                SELECT g.back INTO x
                  FROM ratelimit._give_back(v, t, last, since, rates[i], periods[i], capacities[i], starts[i], x, rec.count, rec.rest, rec.part,
                       rec.taken_at, rec.taken_at, w) AS g;
            ELSIF lifted[i] THEN
                x := 0;
            END IF;
        END IF;
        IF x <> '0' THEN
            v := pg_catalog.array_fill((total + x) / m::double precision, ARRAY[m]);
            t := ARRAY(SELECT greatest(u.t, since) FROM pg_catalog.unnest(t) WITH ORDINALITY AS u (t, n) ORDER BY u.n);
            UPDATE ratelimit.limits AS r SET value = coalesce(v[1]), ts = greatest(r.ts, since)
             WHERE r.name = names[i] AND r.key = keys[i];
        END IF;
        IF m > 0 THEN
            IF lapses <= at THEN -- the answer is as a balance, with what others give back
                SELECT l.value, l.ts INTO v, t
                  FROM ratelimit._lapsed(names[i], keys[i], at, rates[i], periods[i], capacities[i], starts[i], w) AS l;
            END IF;
            ord := pg_catalog.array_cat(ord, pg_catalog.array_fill(i, ARRAY[m]));
            value := pg_catalog.array_cat(value, v);
            ts := pg_catalog.array_cat(ts, t);
        END IF;
        moved[i] := x;
    END LOOP;
    RETURN ROW(CASE WHEN NOT release AND 'settled' = ALL (states) THEN 'repeated' WHEN release AND 'held' <> ALL (states) THEN 'late' ELSE 'done' END, at, ord, value, ts, moved, lost)::ratelimit._settled;
END
$body$;

-- Extends holds, by position: each lasts until ttl from now, at least. It does not lock the rows of their limits, and never waits: so a
-- transaction that has one of them keeps no other from being extended. In a call of its own, since it locks the holds until COMMIT.
--
-- ended: the positions that are settled. lost: those that are not held under this token any more. busy: those that somebody has locked: ask again. until: when
-- the first of the others ends.
CREATE OR REPLACE FUNCTION ratelimit._extend(
    names text[], keys text[], ids text[], tokens uuid[], ttls interval[], now timestamptz DEFAULT NULL,
    OUT ended integer[], OUT lost integer[], OUT busy integer[], OUT until timestamptz
)
LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $body$
DECLARE
    n   CONSTANT integer := coalesce(pg_catalog.cardinality(names), 0);
    at  timestamptz := coalesce(now, clock_timestamp());
    was text;
    own_until timestamptz;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: an extension of holds needs a READ COMMITTED transaction';
    END IF;
    IF (n = pg_catalog.cardinality(keys) AND n = pg_catalog.cardinality(ids) AND n = pg_catalog.cardinality(tokens) AND n = pg_catalog.cardinality(ttls)
        AND '100 milliseconds' <= ALL (ttls) AND '366 days' >= ALL (ttls)) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits %s: the arguments are not valid', names);
    END IF;
    ended := '{}'; lost := '{}'; busy := '{}';
    FOR i IN 1..n LOOP
        PERFORM 1 FROM ratelimit.holds AS h
          WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i] AND h.token = tokens[i] AND h.state = 'held' FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE ratelimit.holds AS h SET until = greatest(h.until, at + ttls[i])
             WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i]
            RETURNING h.until INTO own_until;
            until := least(until, own_until);
            CONTINUE;
        END IF;
        SELECT h.state INTO was FROM ratelimit.holds AS h
         WHERE h.name = names[i] AND h.key = keys[i] AND h.id = ids[i] AND h.token = tokens[i];
        IF was = 'held' THEN
            busy := pg_catalog.array_append(busy, i);
        ELSIF was = 'settled' THEN
            ended := pg_catalog.array_append(ended, i);
        ELSE
            lost := pg_catalog.array_append(lost, i);
        END IF;
    END LOOP;
END
$body$;

-- Fails a plain statement that took under an id which another call has taken meanwhile. The error rolls the taking back, and the library asks
-- ratelimit._hold.
CREATE OR REPLACE FUNCTION ratelimit._taken_twice() RETURNS boolean
LANGUAGE plpgsql
AS $body$
BEGIN
    RAISE SQLSTATE 'RL001' USING MESSAGE = 'rate limits: another call has taken under this id meanwhile, so nothing was taken, and the library asks again';
END
$body$;

-- What the Go library calls: see wire.sql.
CREATE OR REPLACE FUNCTION ratelimit._wire_hold(
    own text, own_token uuid, ttl interval, taking integer, units text[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[], now timestamptz,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._hold(own, own_token, ttl, taking, units, names, keys, rates, periods, capacities, starts, shards, counts, floors,
    shard_a, shard_b, now, windows, firsts, lasts));

CREATE OR REPLACE FUNCTION ratelimit._wire_settle(
    release boolean, own text, own_token uuid, taking integer, lifted boolean[], names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    used double precision[], now timestamptz,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._settle(release, own, own_token, taking, lifted, names, keys, rates, periods, capacities, starts, shards,
    used, now, windows, firsts, lasts));

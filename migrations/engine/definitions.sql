-- The limits that programs define, as each program publishes them. Without numbers, SQL by hand takes them from here, and so do the
-- tool and the page. A sweep minds all of them. No other decision of a program depends on this table.
--
-- A program has one definition of a name: its list that counts. Lists are ordered by when each was first published. The newest one that
-- a process has lately said it uses (alive_until) counts; if there is none, the newest. So a process of an older version that starts
-- again changes nothing, and if only older ones are left, theirs counts: a rollback. What does not count stays for 7 days after it was
-- last used, since sweeps mind it. Then one row of its list stays, for a year: if a process of it comes back, the list is as old as before.
-- Readers pass over such rows. Of the definitions that several programs have of a name, the one published last is taken.
CREATE TABLE ratelimit.definitions (
    program      text COLLATE "C" NOT NULL,
    name         text COLLATE "C" NOT NULL,
    definition   text COLLATE "C" NOT NULL,
    kind         text             NOT NULL,
    rate         double precision,
    period       interval,
    capacity     double precision,
    max_reserved double precision,
    start        timestamptz CHECK (isfinite(start)),
    shards       integer,
    zone         text,
    anchor       timestamp CHECK (isfinite(anchor)),
    varies       interval,
    current      boolean          NOT NULL,
    published_at timestamptz      NOT NULL CHECK (isfinite(published_at)),
    list         text COLLATE "C" NOT NULL DEFAULT '',
    first_at     timestamptz      NOT NULL DEFAULT clock_timestamp() CHECK (isfinite(first_at)),
    alive_until  timestamptz CHECK (isfinite(alive_until)),
    CHECK (kind = 'unlimited' OR capacity IS NOT NULL AND (kind = 'slots' OR rate IS NOT NULL AND period IS NOT NULL)),
    PRIMARY KEY (name, program, list)
);

COMMENT ON TABLE ratelimit.definitions IS 'txlimit: the limits that programs define, as they publish them';
COMMENT ON COLUMN ratelimit.definitions.program IS 'the program that has published it';
COMMENT ON COLUMN ratelimit.definitions.name IS 'the name of the limit';
COMMENT ON COLUMN ratelimit.definitions.definition IS 'all the numbers as text';
COMMENT ON COLUMN ratelimit.definitions.kind IS 'token bucket, fixed window, calendar window, slots or unlimited';
COMMENT ON COLUMN ratelimit.definitions.rate IS 'tokens per period; 0: every token is denied by policy; NULL: slots, and an unlimited limit, which has no numbers at all';
COMMENT ON COLUMN ratelimit.definitions.period IS 'the interval in which the rate is refilled';
COMMENT ON COLUMN ratelimit.definitions.capacity IS 'the most tokens that can be saved up; of slots, how many there are';
COMMENT ON COLUMN ratelimit.definitions.max_reserved IS 'the most tokens that may be owed; NULL: no bound';
COMMENT ON COLUMN ratelimit.definitions.start IS 'an instant at which a fixed window begins; NULL: by a hash of the key';
COMMENT ON COLUMN ratelimit.definitions.shards IS 'over how many rows a key is spread';
COMMENT ON COLUMN ratelimit.definitions.zone IS 'the time zone of a calendar window';
COMMENT ON COLUMN ratelimit.definitions.anchor IS 'a local time in the zone, at which a calendar window begins';
COMMENT ON COLUMN ratelimit.definitions.varies IS 'a key may have numbers of its own, which fill a row within this time, 0 for slots; NULL: none has';
COMMENT ON COLUMN ratelimit.definitions.current IS 'true: it is in the program''s list that counts';
COMMENT ON COLUMN ratelimit.definitions.published_at IS 'when it was published; of one that is not current, when it was replaced or, if later, last used';
COMMENT ON COLUMN ratelimit.definitions.list IS 'a hash of all the definitions that the program published together';
COMMENT ON COLUMN ratelimit.definitions.first_at IS 'when the list was first published';
COMMENT ON COLUMN ratelimit.definitions.alive_until IS 'five minutes after a process has last said that it uses the list; NULL: none has';

-- Raises an error unless numbers of a limit fill a row from 0 within the time that its definition names.
CREATE OR REPLACE FUNCTION ratelimit._validate_varies(
    name text, rate double precision, period interval, kind text, capacity double precision, varies interval
) RETURNS void
LANGUAGE plpgsql
AS $body$
DECLARE
    needed double precision; -- seconds
BEGIN
    IF NOT (isfinite(varies) AND varies > '0' AND varies <= '106751 days 23:47:16.854775'
            AND date_part('year', varies) = '0' AND date_part('month', varies) = '0') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'rate limit %L: varies must be between 1 microsecond and 106751 days, written without months and years, not %s', name, varies);
    END IF;
    needed := CASE WHEN rate = '0' THEN 0
        WHEN kind = 'token bucket' THEN capacity / rate * date_part('epoch', period)
        WHEN kind = 'fixed window' THEN ceil(capacity / rate) * date_part('epoch', period)
        ELSE ceil(capacity / rate) * date_part('epoch', ratelimit._longest(period)) END;
    IF needed > date_part('epoch', varies) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'rate limit %L: varies must be at least %s s, which its numbers need to fill a row, not %s s', name, needed, date_part('epoch', varies));
    END IF;
END
$body$;

-- Raises an error unless so many slots are valid.
CREATE OR REPLACE FUNCTION ratelimit._validate_slots(name text, capacity double precision) RETURNS void
LANGUAGE plpgsql
AS $body$
BEGIN
    PERFORM ratelimit._validate(name, '1', '1 second', 'token bucket', NULL, NULL, NULL, 1, NULL, NULL);
    IF (capacity BETWEEN '0' AND '1e9' AND capacity = trunc(capacity)) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'rate limit %L: capacity of slots must be a whole number between 0 and 1e9, not %s', name, coalesce(capacity::text, 'NULL'));
    END IF;
END
$body$;

-- Raises an error unless each field of a definition has the type that ratelimit.consume_all wants, and a text or number that Postgres can read.
CREATE OR REPLACE FUNCTION ratelimit._check_definition(definition jsonb, number bigint) RETURNS void
LANGUAGE plpgsql
AS $body$
DECLARE
    wrong text;
    field text;
    shards double precision;
BEGIN
    SELECT CASE WHEN f.type = 'null' THEN pg_catalog.format('%s is null: leave it out', f.field)
                ELSE pg_catalog.format('%s must be a JSON %s, not %s', f.field, f.expected, f.type) END INTO wrong
      FROM (
        SELECT e.key AS field, jsonb_typeof(e.value) AS type,
               CASE WHEN e.key IN ('rate', 'capacity', 'max_reserved', 'shards') THEN 'number' ELSE 'string' END AS expected
          FROM jsonb_each(definition) AS e
      ) AS f
     WHERE f.expected <> f.type
     ORDER BY f.field COLLATE "C"
     LIMIT 1;
    -- Postgres reads more than the Go library as a timestamp, and ignores a zone in it.
    IF wrong IS NULL AND definition->>'anchor'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}( ([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?)?$' THEN
        wrong := pg_catalog.format('anchor must be a date, such as 2026-01-31, or a date and a time of day, such as 2026-01-31 15:00, not %L', definition->>'anchor'::text);
    END IF;
    -- What Postgres reads beside it means another instant in each call ('now'), or in each session.
    IF wrong IS NULL AND definition->>'start'::text !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?(Z|[+-][0-9]{2}(:?[0-9]{2}(:[0-9]{2})?)?)$' THEN
        wrong := pg_catalog.format('start must be an instant with its offset, such as 2026-01-31T00:00:00Z, not %L', left(definition->>'start'::text, 50));
    END IF;
    IF wrong IS NULL THEN
        BEGIN
            FOR field IN SELECT e.key FROM jsonb_each(definition) AS e ORDER BY e.key COLLATE "C" LOOP
                IF field IN ('rate', 'capacity', 'max_reserved') THEN
                    PERFORM (definition->>field)::double precision;
                ELSIF field IN ('period', 'varies') THEN
                    PERFORM (definition->>field)::interval;
                ELSIF field = 'start' THEN
                    PERFORM (definition->>field)::timestamptz;
                ELSIF field = 'anchor' THEN
                    PERFORM (definition->>field)::timestamp;
                ELSIF field = 'shards' THEN
                    shards := (definition->>field)::double precision;
                    IF NOT (shards BETWEEN '1' AND '100' AND shards = trunc(shards)) THEN
                        wrong := pg_catalog.format('shards must be a whole number between 1 and 100, not %s', shards);
                    END IF;
                END IF;
            END LOOP;
        EXCEPTION WHEN data_exception THEN -- a text that is no interval or no instant, or a number that is too large
            wrong := pg_catalog.format('%s: %s', field, SQLERRM);
        END;
    END IF;
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = CASE jsonb_typeof(definition->'name'::text)
            WHEN 'string' THEN pg_catalog.format('rate limit %L: %s', left(definition->>'name'::text, 255), wrong)
            ELSE pg_catalog.format('definition %s: %s', number, wrong) END;
    END IF;
END
$body$;

-- The list of a program that counts: the newest that is in use or, if none is, the newest. own: a list that is in use from now on.
CREATE OR REPLACE FUNCTION ratelimit._list(program text, own text, OUT list text)
LANGUAGE plpgsql
AS $body$
BEGIN
    SELECT o.list INTO list FROM ratelimit.definitions AS o
     WHERE o.program = program COLLATE "C"
     GROUP BY o.list
     ORDER BY coalesce(o.list = own COLLATE "C" OR max(o.alive_until) > clock_timestamp(), false) DESC, max(o.first_at) DESC, o.list
     LIMIT 1;
END
$body$;

-- A definition in the spelling of SQL: the Go library writes maxReserved, and 1 quarter.
CREATE OR REPLACE FUNCTION ratelimit._spelled(definition jsonb, number bigint) RETURNS jsonb
LANGUAGE plpgsql
AS $body$
BEGIN
    IF jsonb_typeof(definition) = 'object' AND definition ? 'maxReserved'::text THEN
        IF definition ? 'max_reserved'::text THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('definition %s: max_reserved is there twice, once as maxReserved', number);
        END IF;
        definition := pg_catalog.jsonb_set(definition - 'maxReserved'::text, '{max_reserved}', definition->'maxReserved'::text);
    END IF;
    RETURN CASE definition->>'period'::text WHEN '1 quarter' THEN pg_catalog.jsonb_set(definition, '{period}', '"3 months"') ELSE definition END;
END
$body$;

-- ratelimit.publish, and what a process of the Go library says of its list:
--
--   heartbeat   NULL: the list is the program's newest from now on. true: a process uses it, and repeats the call every minute while it
--               runs. false: a process uses it, and does not repeat the call. For both, a list that was published before is no newer
--               now, unless that was over a year ago
--
-- With heartbeat, a list that was used within 7 days is written without a lock of the table, unless another one counts from now on.
-- Without, it waits for others that publish.
CREATE OR REPLACE FUNCTION ratelimit._publish(
    program text, definitions jsonb, heartbeat boolean, OUT counts boolean, OUT others text[]
)
LANGUAGE plpgsql
SET extra_float_digits = 1 SET intervalstyle = 'postgres' SET datestyle = 'ISO' SET timezone = 'UTC' -- definitions are texts
AS $body$
DECLARE
    d record;
    other record;
    definition text;
    names text[] COLLATE "C" := '{}';
    texts text[] COLLATE "C" := '{}'; -- the definitions of these names
    whole jsonb[] := '{}';
    hash text COLLATE "C";
    at timestamptz; -- of the whole list
    -- In variables, since Citus takes nothing in a write that is not immutable.
    alive timestamptz; -- a process of the list is alive until then; NULL: no process uses it
    fresh timestamptz; -- an earlier alive_until is due
    hour timestamptz;  -- an hour ago, and so on
    week timestamptz;
    year timestamptz;
    first timestamptz; -- when the list was first published
    known boolean; -- a process uses a list that is published already
    winner text COLLATE "C"; -- the list that counts
    zone text COLLATE "C"; -- as pg_timezone_names has it
BEGIN
    IF (octet_length(program) BETWEEN 1 AND 255) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('program must have 1 to 255 bytes, not %s', coalesce(octet_length(program)::text, 'NULL'));
    END IF;
    IF definitions IS NULL OR jsonb_typeof(definitions) <> 'array' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('definitions must be a JSON array, not %s', coalesce(jsonb_typeof(definitions), 'NULL'));
    END IF;
    SELECT pg_catalog.format('definition %s must be a JSON object, not %s', min(e.number), min(jsonb_typeof(e.value))) INTO definition
      FROM jsonb_array_elements(definitions) WITH ORDINALITY AS e (value, number)
     WHERE jsonb_typeof(e.value) <> 'object'
     GROUP BY e.number ORDER BY e.number LIMIT 1;
    IF definition IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = definition;
    END IF;
    SELECT pg_catalog.string_agg(DISTINCT k, ', ') INTO definition
      FROM jsonb_array_elements(definitions) AS e, jsonb_object_keys(e) AS k
     WHERE k NOT IN ('name', 'kind', 'rate', 'period', 'capacity', 'max_reserved', 'start', 'shards', 'zone', 'anchor', 'varies');
    IF definition IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'a definition has no field ' || definition,
            HINT = 'Its fields are name, kind, rate, period, capacity, max_reserved, start, shards, zone, anchor and varies.';
    END IF;
    PERFORM ratelimit._check_definition(e.value, e.number) FROM jsonb_array_elements(definitions) WITH ORDINALITY AS e (value, number);
    FOR d IN
        SELECT r.name, r.kind, r.rate, r.period, r.capacity, r.max_reserved, r.start, r.shards::integer AS shards, r.zone, r.anchor, r.varies
          FROM jsonb_to_recordset(definitions) AS r (name text, kind text, rate double precision, period interval,
            capacity double precision, max_reserved double precision, start timestamptz, shards double precision, zone text, anchor timestamp, varies interval)
    LOOP
        IF d.name = ANY (names) THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: name is in the list twice, but a name has one definition', d.name);
        END IF;
        IF d.kind = 'unlimited' THEN
            PERFORM ratelimit._validate(d.name, '1', '1 second', 'token bucket', NULL, NULL, NULL, 1, NULL, NULL);
            IF pg_catalog.num_nonnulls(d.rate, d.period, d.capacity, d.max_reserved, d.start, d.shards, d.zone, d.anchor, d.varies) > 0 THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: an unlimited limit must have no field but name and kind', d.name);
            END IF;
        ELSIF d.kind = 'slots' THEN
            PERFORM ratelimit._validate_slots(d.name, d.capacity);
            IF pg_catalog.num_nonnulls(d.rate, d.period, d.max_reserved, d.start, d.shards, d.zone, d.anchor) > 0 THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: slots must have no field but name, kind, capacity and varies', d.name);
            END IF;
            IF d.varies <> '0' THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: varies of slots must be 0, since nothing is refilled, not %s', d.name, d.varies);
            END IF;
        ELSE
            IF d.kind IS NULL OR d.kind NOT IN ('token bucket', 'fixed window', 'calendar window') THEN
                RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
                    'rate limit %s: kind must be ''token bucket'', ''fixed window'', ''calendar window'', ''slots'' or ''unlimited'', not %s',
                    quote_nullable(left(d.name, 255)), quote_nullable(d.kind));
            END IF;
            d.shards := coalesce(d.shards, 1);
            PERFORM ratelimit._validate(d.name, d.rate, d.period, d.kind, d.capacity, d.start, d.max_reserved, d.shards, d.zone,
                d.anchor, zero => true);
            d.capacity := coalesce(d.capacity, d.rate);
            IF d.kind = 'calendar window' THEN
                d.zone := coalesce(d.zone, 'UTC');
                d.anchor := coalesce(d.anchor, '2001-01-01');
            END IF;
            IF d.varies IS NOT NULL THEN
                PERFORM ratelimit._validate_varies(d.name, d.rate, d.period, d.kind, d.capacity, d.varies);
            END IF;
        END IF;
        definition := pg_catalog.concat_ws(', ', d.kind, d.rate::text || ' per ' || d.period::text, 'capacity ' || d.capacity::text,
            'at most ' || d.max_reserved::text || ' reserved', 'start ' || d.start::text,
            CASE WHEN d.shards > 1 THEN d.shards::text || ' shards' END, 'in ' || d.zone || ' from '
                || CASE WHEN d.anchor = d.anchor::date::timestamp THEN d.anchor::date::text ELSE d.anchor::text END,
            CASE d.varies WHEN '0' THEN 'varies' ELSE 'varies within ' || d.varies::text END);
        names := pg_catalog.array_append(names, d.name);
        texts := pg_catalog.array_append(texts, definition);
        whole := pg_catalog.array_append(whole, pg_catalog.to_jsonb(d));
    END LOOP;
    SELECT encode(sha256(pg_catalog.convert_to(pg_catalog.string_agg(pg_catalog.format('%L: %s', n.name, n.text), E'\n' ORDER BY n.name COLLATE "C"), 'UTF8')), 'hex') INTO hash
      FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(texts)) AS n (name, text);

    at := clock_timestamp();
    alive := CASE WHEN heartbeat THEN at + interval '5 minutes' END;
    fresh := at + interval '4 minutes';
    hour := at - interval '1 hour';
    known := heartbeat IS NOT NULL AND hash IS NOT NULL AND pg_catalog.cardinality(names)
        = (SELECT count(*) FROM ratelimit.definitions AS o
            WHERE o.program = program COLLATE "C" AND o.list = hash AND (o.current OR o.published_at > at - interval '7 days'));
    winner := CASE WHEN known THEN ratelimit._list(program, CASE WHEN heartbeat THEN hash END) END;
    IF winner IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM ratelimit.definitions AS o WHERE o.program = program COLLATE "C" AND o.current <> (o.list = winner)) THEN
        -- A process that starts or runs says that it uses the list. If this was said within the last minute, nothing is written. Rows
        -- that are locked are passed over: another process says the same. No lock conflicts with that of a process that publishes.
        UPDATE ratelimit.definitions AS o
           SET alive_until = coalesce(alive, o.alive_until),
               published_at = CASE WHEN o.current THEN o.published_at ELSE at END
          FROM (
            SELECT o.name FROM ratelimit.definitions AS o
             WHERE o.program = program COLLATE "C" AND o.list = hash
               AND (heartbeat AND coalesce(o.alive_until < fresh, true)
                    OR NOT o.current AND o.published_at < hour)
             ORDER BY o.name
               FOR UPDATE SKIP LOCKED
          ) AS due
         WHERE o.program = program COLLATE "C" AND o.list = hash AND o.name = due.name;
    ELSE
        IF current_setting('transaction_isolation') <> 'read committed' THEN -- it would not see what others publish meanwhile
            RAISE SQLSTATE 'RL003' USING MESSAGE = 'rate limits: to publish needs a READ COMMITTED transaction';
        END IF;
        -- One at a time: processes of one program start together. Reads and heartbeats go on. Rows are locked after the table, never
        -- before: who publishes has the table, and may want the rows.
        LOCK TABLE ratelimit.definitions IN SHARE UPDATE EXCLUSIVE MODE;
        at := clock_timestamp();
        alive := CASE WHEN heartbeat THEN at + interval '5 minutes' END;
        week := at - interval '7 days';
        year := at - interval '1 year';
        first := CASE WHEN heartbeat IS NOT NULL THEN
            (SELECT max(o.first_at) FROM ratelimit.definitions AS o WHERE o.program = program COLLATE "C" AND o.list = hash) END;
        first := coalesce(first, at);
        FOR d IN
            SELECT r.*, n.text FROM ROWS FROM (pg_catalog.unnest(whole), pg_catalog.unnest(texts)) AS n (one, text),
                pg_catalog.jsonb_to_record(n.one) AS r (name text, kind text, rate double precision, period interval,
                    capacity double precision, max_reserved double precision, start timestamptz, shards integer, zone text, anchor timestamp, varies interval)
        LOOP
            IF NOT known AND d.zone IS NOT NULL THEN
                zone := ratelimit._zone(d.zone);
                IF zone <> d.zone THEN
                    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: zone must be written as in pg_timezone_names, %L, not %L', d.name, zone, d.zone);
                ELSIF zone IS NULL AND heartbeat IS NULL THEN -- a process of the Go library has loaded it already, and its calls do without Postgres' zones
                    RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %L: zone must be in pg_timezone_names, which %L is not', d.name, d.zone),
                        HINT = 'If the name is right, update the time zones of the server.';
                END IF;
            END IF;
            -- It has rows. What runs already is not refused: it would be taken for dead, and sweeps would no longer mind it.
            IF NOT known AND (d.rate > '0' OR d.varies IS NOT NULL OR d.kind = 'slots') THEN
                SELECT o.* INTO other FROM ratelimit.definitions AS o
                 WHERE o.name = d.name AND o.program <> program COLLATE "C" AND (o.current OR o.alive_until > at) AND (o.rate > '0' OR o.varies IS NOT NULL OR o.kind = 'slots')
                   AND (o.kind <> d.kind OR o.period <> d.period OR (o.start IS NULL) <> (d.start IS NULL) OR date_bin(d.period, d.start, o.start) <> d.start
                        OR d.varies IS NULL AND o.varies IS NULL AND (o.zone <> d.zone OR NOT ratelimit._same_windows(d.period, d.anchor, o.anchor)))
                 ORDER BY o.current DESC, o.program
                 LIMIT 1;
                IF FOUND THEN
                    RAISE invalid_parameter_value USING
                        MESSAGE = pg_catalog.format('rate limit %L: program %L defines %s%s%s, and program %L %s%s%s: both would grant', d.name,
                            program, CASE d.kind WHEN 'slots' THEN d.kind ELSE pg_catalog.format('a %s of %s', d.kind, d.period) END, ' from ' || d.start::text,
                            pg_catalog.format(' in %s from ', d.zone) || d.anchor::text,
                            other.program, CASE other.kind WHEN 'slots' THEN other.kind ELSE pg_catalog.format('a %s of %s', other.kind, other.period) END, ' from ' || other.start::text,
                            pg_catalog.format(' in %s from ', other.zone) || other.anchor::text),
                        HINT = pg_catalog.format(CASE WHEN other.current THEN
                            'Give one of them another name. If %1$L no longer runs: SELECT ratelimit.withdraw(%1$L)' ELSE
                            'Give one of them another name, or wait until no older version of %1$L has run for five minutes' END, other.program);
                END IF;
            END IF;
            INSERT INTO ratelimit.definitions AS old
            VALUES (program, d.name, d.text, d.kind, d.rate, d.period, d.capacity, d.max_reserved, d.start, d.shards, d.zone, d.anchor, d.varies,
                false, at, hash, first, alive)
            ON CONFLICT ON CONSTRAINT definitions_pkey DO UPDATE
               SET published_at = CASE WHEN heartbeat IS NULL OR NOT old.current THEN at ELSE old.published_at END,
                   first_at = first,
                   alive_until = coalesce(alive, old.alive_until);
        END LOOP;
        winner := CASE WHEN hash IS NOT NULL THEN ratelimit._list(program, CASE WHEN heartbeat THEN hash END) END;
        UPDATE ratelimit.definitions AS old
           SET current = coalesce(old.list = winner, false), published_at = at,
               alive_until = CASE WHEN hash IS NOT NULL THEN old.alive_until END -- what is withdrawn is not in use
         WHERE old.program = program COLLATE "C" AND (old.current <> coalesce(old.list = winner, false) OR hash IS NULL AND old.alive_until > at);
        DELETE FROM ratelimit.definitions AS old
         WHERE old.program = program COLLATE "C" AND NOT old.current AND old.published_at < week
           AND (old.published_at < year OR EXISTS (SELECT 1 FROM ratelimit.definitions AS o
                    WHERE o.program = program COLLATE "C" AND o.list = old.list AND o.name < old.name));
    END IF;
    counts := hash IS NULL OR hash = winner;
    others := ARRAY(
        SELECT pg_catalog.format('%L: %s, and program %L has published %s', o.name, n.text, o.program, o.definition)
          FROM ROWS FROM (pg_catalog.unnest(names), pg_catalog.unnest(texts), pg_catalog.unnest(whole)) AS n (name, text, one)
          JOIN ratelimit.definitions AS o ON o.name = n.name AND o.definition <> n.text -- of this program, in a list that is still in use
           AND (o.current AND o.program <> program COLLATE "C"
                OR o.alive_until > at AND (o.kind <> n.one->>'kind'::text OR o.period <> (n.one->>'period'::text)::interval
                    OR (o.start IS NULL) <> (n.one->>'start'::text IS NULL) OR date_bin(o.period, o.start, (n.one->>'start'::text)::timestamptz) <> o.start))
         GROUP BY o.name, n.text, o.program, o.definition
         ORDER BY o.name, o.program, o.definition
         LIMIT 10);
END
$body$;

CREATE OR REPLACE FUNCTION ratelimit.publish(program text, definitions jsonb, OUT counts boolean, OUT others text[])
LANGUAGE plpgsql
AS $body$
BEGIN
    IF definitions = '[]' THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('definitions must not be empty. To withdraw what program %1$L has published: SELECT ratelimit.withdraw(%1$L)', program);
    END IF;
    IF jsonb_typeof(definitions) = 'array' THEN
        SELECT pg_catalog.jsonb_agg(ratelimit._spelled(e.value, e.number) ORDER BY e.number) INTO definitions FROM jsonb_array_elements(definitions) WITH ORDINALITY AS e (value, number);
    END IF;
    SELECT p.counts, p.others INTO counts, others FROM ratelimit._publish(program COLLATE "C", definitions, NULL::boolean) AS p;
END
$body$;

COMMENT ON FUNCTION ratelimit.publish(text, jsonb) IS $text$
Writes down all limits that a program defines, in place of those that it published before, as Publish of the Go library does.

    SELECT ratelimit.publish('api', '[{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1 minute", "capacity": 20}]')

Arguments:
  program      the name of the program, 1 to 255 bytes. All processes of a program publish the same limits
  definitions  a JSON array of objects with the fields name, kind, rate, period, capacity, max_reserved, start, shards, zone and anchor, as
               for ratelimit.consume, or as the Go library writes them (maxReserved, '1 quarter'), of the JSON types that ratelimit.consume_all wants; or with name and the kind 'unlimited'; or with name, the kind 'slots' and capacity, which is how many
               slots there are. Each name is there once. The field varies, an interval, 0 for slots, says that
               the program gives some keys another rate, capacity, zone or anchor. It is the longest time in which any of these numbers
               fills a row from 0. A start is written as '2026-01-31T00:00:00Z' or '2026-01-31 00:00:00+00', and a
               zone as in pg_timezone_names

The list is the program's newest from now on. Of the lists that a program has published, the newest one counts that a process of the Go
library has said it uses within five minutes. If there is none, the newest one does. The tool, the page and SQL without numbers use it.
The others count for sweeps for another 7 days. An empty list is an error: ratelimit.withdraw withdraws.

Returns:
  counts       whether this list counts
  others       names of the list for which another program has published other numbers, each with these numbers, 10 at most. So is
               another kind or period, if the list was published already and a process uses it

Errors:
  22023        an argument is invalid or an empty list, a field is null or of the wrong type, a name is there twice, or another program defines a limit of that
               name with another kind, period or start or, of a calendar window without varies, another zone or another anchor that has
               other windows. So does a list of it that is in use, whether it counts or not
  RL003        the transaction is not READ COMMITTED, and the lists have to be changed
$text$;

-- The list stays, as what was replaced: sweeps mind it.
CREATE OR REPLACE FUNCTION ratelimit.withdraw(program text) RETURNS integer
LANGUAGE plpgsql
AS $body$
DECLARE
    withdrawn integer;
BEGIN
    SELECT count(DISTINCT d.name) FILTER (WHERE d.current OR d.alive_until > clock_timestamp()) INTO withdrawn
      FROM ratelimit.definitions AS d
     WHERE d.program = program COLLATE "C"
    HAVING count(*) > '0';
    IF NOT FOUND THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('program must be one that has published limits, not %s', quote_nullable(left(program, 255))),
            HINT = 'Those there are: SELECT DISTINCT d.program FROM ratelimit.definitions AS d';
    END IF;
    PERFORM ratelimit._publish(program COLLATE "C", '[]', NULL::boolean);
    RETURN withdrawn;
END
$body$;

COMMENT ON FUNCTION ratelimit.withdraw(text) IS $text$
Withdraws all lists that a program has published: for a program that is gone, or has another name now.

    SELECT ratelimit.withdraw('api')

The tool, the page and SQL no longer know its limits by it. Sweeps mind them for another 7 days. A process of the program that still runs
publishes its list again within two minutes.

Arguments:
  program  the name of the program

Returns how many limits were withdrawn. It is 0 if that was done before.

Errors:
  22023    no such program has published limits
  RL003    the transaction is not READ COMMITTED
$text$;

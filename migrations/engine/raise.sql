-- Raises a denial as a SQL error, so that it stops a pipeline: the statements sent after it do not run, and the statements before
-- it in the transaction are undone. With or_raise, the functions that decide call it instead of returning a denial.
--
-- The error:
--   SQLSTATE  PT429, which PostgREST turns into the HTTP status 429
--   MESSAGE   the names of the limits in the request, each once. It has no keys: they may be personal data, and errors are
--             logged
--   DETAIL    {"at": ..., "ord": [...], "value": [...], "ts": [...]}, as ratelimit._apply returns them for a denial. Doubles are
--             exact to the last bit; instants are microseconds since 1970-01-01 UTC
CREATE OR REPLACE FUNCTION ratelimit._raise(
    names text[], at timestamptz, ord integer[], value double precision[], ts timestamptz[]
) RETURNS void
LANGUAGE plpgsql
AS $body$
DECLARE
    -- Doubles are written in full, whatever the session's setting. The setting comes back when the transaction that the error
    -- aborts ends, or the block that catches the error.
    setting text := set_config('extra_float_digits', '1', true);
    limits  text[] := '{}';
    micros  bigint[] := '{}';
    n text;
    t timestamptz;
BEGIN
    FOREACH n IN ARRAY names LOOP
        IF n <> ALL (limits) THEN
            limits := pg_catalog.array_append(limits, n);
        END IF;
    END LOOP;
    FOREACH t IN ARRAY ts LOOP
        micros := pg_catalog.array_append(micros, (extract(epoch FROM t) * '1000000')::bigint);
    END LOOP;
    RAISE SQLSTATE 'PT429' USING
        MESSAGE = 'rate limit exceeded: ' || pg_catalog.array_to_string(limits, ', '),
        DETAIL = pg_catalog.format('{"at": %s, "ord": %s, "value": %s, "ts": %s}',
            (extract(epoch FROM at) * '1000000')::bigint, pg_catalog.to_json(ord), pg_catalog.to_json(value), pg_catalog.to_json(micros));
END
$body$;

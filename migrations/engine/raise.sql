-- Denies by a SQL error, so that a denial stops a pipeline: the statements sent after it do not run, and those before it in
-- the transaction are undone. The functions that decide call it where they would answer that a request is denied, if or_raise says so.
--
-- The error:
--   SQLSTATE  PT429, which PostgREST turns into the HTTP status 429
--   MESSAGE   the names of the limits asked for, each once, but no keys: they may be personal data, and errors are logged
--   DETAIL    {"at": ..., "ord": [...], "value": [...], "ts": [...]}, what _ratelimit_apply answers for a denial: doubles
--             to the last bit, instants as microseconds since 1970-01-01 UTC
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_raise(
    names text[], at timestamptz, ord integer[], value double precision[], ts timestamptz[]
) RETURNS void
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    -- Doubles are written in full whatever the session's setting, which comes back with the end of the transaction that the
    -- error aborts, or of the block that catches it.
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

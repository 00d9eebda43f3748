-- +goose Up

-- Denies by a SQL error, so that a denial stops a pipeline: the statements sent after it do not run, and those before it in
-- the transaction are undone. It stands behind ratelimit_consume or ratelimit_apply in one statement, and is called for
-- denials alone, so that a grant pays nothing for it:
--
--   SELECT r.granted, r.at, r.value, r.ts
--     FROM ratelimit_consume(name, ...) AS r
--    WHERE CASE WHEN r.granted THEN true ELSE ratelimit_raise(ARRAY[name], r.at, ARRAY[1], ARRAY[r.value], ARRAY[r.ts]) END;
--
-- The error:
--   SQLSTATE  PT429, which PostgREST turns into the HTTP status 429
--   MESSAGE   the names of the limits asked for, each once, but no keys: they may be personal data, and errors are logged
--   DETAIL    {"at": ..., "ord": [...], "value": [...], "ts": [...]}, what ratelimit_apply answers for a denial: doubles
--             to the last bit, instants as microseconds since 1970-01-01 UTC

-- +goose StatementBegin
DO $install$
BEGIN

EXECUTE replace($ddl$
CREATE FUNCTION @extschema@.ratelimit_raise(
    names text[], at timestamptz, ord integer[], value double precision[], ts timestamptz[]
) RETURNS boolean
LANGUAGE plpgsql
AS $body$
BEGIN
    -- Doubles are written in full whatever the session's setting. It ends with the transaction that the error aborts, or
    -- with the block that catches the error.
    PERFORM set_config('extra_float_digits', '1', true);
    RAISE SQLSTATE 'PT429' USING
        MESSAGE = 'rate limit exceeded: ' || (SELECT string_agg(DISTINCT n COLLATE "C", ', ') FROM unnest(names) AS n),
        DETAIL = json_build_object(
            'at', (extract(epoch FROM at) * 1000000)::bigint,
            'ord', ord,
            'value', value,
            'ts', (SELECT coalesce(array_agg((extract(epoch FROM t) * 1000000)::bigint ORDER BY place), '{}')
                     FROM unnest(ts) WITH ORDINALITY AS u (t, place)));
END
$body$
$ddl$, '@extschema@', quote_ident(current_schema()));

END
$install$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION ratelimit_raise(text[], timestamptz, integer[], double precision[], timestamptz[]);

-- Makes limits full again by deleting the rows of all their shards, which it locks in the common order (CONCURRENCY.md, D1).
-- Returns the number of deleted rows.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */_ratelimit_reset(names text[], keys text[], OUT deleted integer)
LANGUAGE plpgsql SET enable_seqscan = off
AS $body$
#variable_conflict use_variable
DECLARE
    r record;
    n integer;
BEGIN
    deleted := 0;
    FOR r IN
        SELECT DISTINCT u.name COLLATE "C" AS name, u.key COLLATE "C" AS key
          FROM unnest(names, keys) AS u (name, key) ORDER BY 1, 2
    LOOP
        PERFORM 1 FROM /* TEMPLATE: schema */rate_limits AS t WHERE t.name = r.name AND t.key = r.key ORDER BY t.shard FOR UPDATE;
        DELETE FROM /* TEMPLATE: schema */rate_limits AS t WHERE t.name = r.name AND t.key = r.key;
        GET DIAGNOSTICS n = ROW_COUNT;
        deleted := deleted + n;
    END LOOP;
END
$body$;

CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_reset(name text, key text DEFAULT NULL, global boolean DEFAULT false) RETURNS integer
LANGUAGE plpgsql
AS $body$
#variable_conflict use_variable
DECLARE
    wrong text := CASE
        WHEN name IS NULL OR name = '' THEN pg_catalog.format('name must have 1 to 255 bytes, not %s', coalesce(octet_length(name)::text, 'NULL'))
        ELSE /* TEMPLATE: schema */_ratelimit_wrong_key(key, global) END;
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limit %s: %s', quote_nullable(left(name, 255)), wrong);
    END IF;
    RETURN /* TEMPLATE: schema */_ratelimit_reset(ARRAY[name], ARRAY[coalesce(key, '')]);
END
$body$;

COMMENT ON FUNCTION /* TEMPLATE: schema */ratelimit_reset(text, text, boolean) IS $text$
Makes a key of a rate limit full again, and forgets its debts. It deletes the key's rows, and returns how many.

    SELECT ratelimit_reset('sendMessage', 'user-17')

Arguments:
  name    the name of the limit
  key     the key as it is stored; NULL or empty is an error, unless global is true
  global  true: the limit has no keys, and key must be NULL. Default false

Errors:
  22023   an argument is invalid
$text$;

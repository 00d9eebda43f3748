-- A key of several parts is stored as one text. These are the two directions. The Go library has the first one: StoredKey.
--
-- E'' is the same under any standard_conforming_strings. The collation is given, since a caller's may be one that Postgres neither
-- replaces nor matches by.
CREATE OR REPLACE FUNCTION ratelimit.key(VARIADIC parts text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $body$
DECLARE
    n      integer := 0;
    part   text;
    joined text;
BEGIN
    IF coalesce(pg_catalog.cardinality(parts), 0) = 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rate limits: a key needs a part at least', HINT = 'A limit without keys has global => true, and stores the key ''''.';
    END IF;
    FOREACH part IN ARRAY parts LOOP
        n := n + 1;
        IF coalesce(octet_length(part), 0) = 0 THEN
            RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format('rate limits: part %s of the key is empty or NULL', n);
        END IF;
        joined := CASE n WHEN 1 THEN '' ELSE joined || '|' END || replace(replace(part COLLATE "C", E'\\', E'\\\\'), '|', E'\\|');
    END LOOP;
    RETURN CASE n WHEN 1 THEN part ELSE joined END;
END
$body$;

COMMENT ON FUNCTION ratelimit.key(text[]) IS $text$
The stored text of a key, from its parts. The Go library's limit.Key("eu", "user-17") stores the same.

    SELECT * FROM ratelimit.consume('sendMessage', ratelimit.key('eu', 'user-17'), rate => 10, period => '1 minute')

One part is the text itself, whatever characters it has. Several are joined by |, with a backslash before each | and each backslash of a
part. So different parts make different keys. Only the one part 'eu|ann' is the same text as the two parts 'eu' and 'ann': give all keys
of a limit one part, or all of them several.

A part that is empty or NULL is an error, SQLSTATE 22023, and so are no parts at all.
$text$;

-- A text that several parts cannot make is a key of one part. No text is an error: a policy or a guard meets every row.
CREATE OR REPLACE FUNCTION ratelimit.key_parts(key text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
AS $body$
BEGIN
    IF strpos(key COLLATE "C", '|') = 0 OR key COLLATE "C" !~ E'^(?:[^\\\\|]|\\\\[\\\\|])+(?:\\|(?:[^\\\\|]|\\\\[\\\\|])+)+$' THEN
        RETURN ARRAY[key];
    ELSIF strpos(key COLLATE "C", E'\\') = 0 THEN
        RETURN pg_catalog.string_to_array(key COLLATE "C", '|');
    END IF;
    RETURN (SELECT pg_catalog.array_agg(regexp_replace(p.part[1] COLLATE "C", E'\\\\([\\\\|])', E'\\1', 'g') ORDER BY p.n)
              FROM regexp_matches(key COLLATE "C", E'(?:[^\\\\|]|\\\\[\\\\|])+', 'g') WITH ORDINALITY AS p (part, n));
END
$body$;

COMMENT ON FUNCTION ratelimit.key_parts(text) IS $text$
The parts of a stored key, for policies, guards and searches. It undoes ratelimit.key: of all keys of two parts or more, it returns the
parts that made them. The keys of a tenant, if the tenant is the first of several parts:

    SELECT * FROM ratelimit.limits WHERE cardinality(ratelimit.key_parts(key)) > 1 AND (ratelimit.key_parts(key))[1] = 'acme'

A text that several parts cannot make, such as 'ann', 'a||b' or '|', is one part: the text itself. The text 'eu|ann' is two parts, though a
key of one part may have it, too. The empty key of a limit without keys is one empty part. NULL is NULL. No text is an error.
$text$;

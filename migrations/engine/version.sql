-- Says which schema this is. The library asks it when a program starts, and `txlimit migrate status` does.
--
-- version is the number of the newest migration. hash is made of the functions as they are now, without the schema's name, so it also
-- shows one that was edited here. Both are written down in migrations/version.go. The generator puts the number and the list in.
--
-- Postgres has no source of a body after RETURN: it prints one. So that it always prints the same, no schema is in sight but this one.
-- Bodies in text have "schema". before each name of the engine, and nowhere else: the engine quotes nothing.
CREATE OR REPLACE FUNCTION ratelimit.schema(OUT version integer, OUT hash text)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET timezone = 'UTC' SET datestyle = 'ISO' SET intervalstyle = 'postgres' SET extra_float_digits = 1 SET quote_all_identifiers = off
SET standard_conforming_strings = on
AS $body$
DECLARE
    own  oid; -- of the schema
    name text;
BEGIN
    SELECT n.oid, n.nspname INTO own, name
      FROM pg_type AS t JOIN pg_namespace AS n ON n.oid = t.typnamespace
     WHERE t.oid = pg_catalog.pg_typeof(NULL::ratelimit.limits)::oid;
    PERFORM set_config('search_path', quote_ident(name) || ', pg_temp', true); -- until this function ends
    SELECT encode(sha256(convert_to(pg_catalog.string_agg(f.text, E'\n' ORDER BY f.text COLLATE "C"), 'UTF8')), 'hex') INTO hash
      FROM (
        SELECT p.proname::text || ' ' || CASE WHEN p.prosqlbody IS NULL
               THEN pg_catalog.replace(p.prosrc, 'ratelimit.', '')
               ELSE pg_catalog.regexp_replace(pg_get_function_sqlbody(p.oid), E'\\s', '', 'g') END AS text
          FROM pg_proc AS p
         WHERE p.pronamespace = own
           AND p.proname::text = ANY ('{/* TEMPLATE: functions */}'::text[])
           AND p.proname::text <> ALL ('{_distributed,_one_server}'::text[]) -- which citus.sql changes
      ) AS f;
    version := '/* TEMPLATE: version */';
END
$body$;

COMMENT ON FUNCTION ratelimit.schema() IS $text$
Says which schema of txlimit this is.

    SELECT * FROM ratelimit.schema()

Result:
  version  the number of the newest migration. A library works on its own version and on newer ones
  hash     of the functions as they are now. Another one for the same version: a function was edited here, or the schema is of another build.
           `txlimit migrate status` says whether it is as it was generated
$text$;

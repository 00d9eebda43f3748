-- Reports whether ratelimit.limits is distributed by key over several servers. migrations/citus.sql replaces the function. Then the
-- functions run statements for one key each, which such a server can send on. On one server these cost up to three times as much.
-- The planner inlines it.
CREATE OR REPLACE FUNCTION ratelimit._distributed() RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN false;

-- Reports whether one server numbers the transactions of all that write overrides. migrations/citus.sql replaces it, too: of a
-- distributed schema, each node that is called gives its own numbers.
CREATE OR REPLACE FUNCTION ratelimit._one_server() RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN true;

-- Which database this is, for a program that has several. Standbys, restarts and other names of a server are the same one. NULL: it is not
-- known, as of a distributed schema, which each node is asked for.
CREATE OR REPLACE FUNCTION ratelimit._database() RETURNS text
LANGUAGE plpgsql STABLE
AS $body$
BEGIN
    RETURN CASE WHEN ratelimit._one_server() THEN (
        SELECT s.system_identifier::text || ' ' || d.oid::text
          FROM pg_catalog.pg_control_system() AS s CROSS JOIN pg_catalog.pg_database AS d
         WHERE d.datname = current_database()) END;
EXCEPTION WHEN insufficient_privilege OR undefined_function OR feature_not_supported THEN
    RETURN NULL;
END
$body$;

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

-- The statements for a distributed table, as migrations/citus.sql chooses them for row-based sharding, on an ordinary one.
CREATE OR REPLACE FUNCTION ratelimit._distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN true;
ALTER FUNCTION ratelimit._apply RESET plan_cache_mode;
ALTER FUNCTION ratelimit._refund RESET plan_cache_mode;

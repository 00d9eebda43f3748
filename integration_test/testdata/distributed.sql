-- The statements for a distributed table, as migrations/citus.sql chooses them for row-based sharding, on an ordinary one.
CREATE OR REPLACE FUNCTION _ratelimit_distributed() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN true;
ALTER FUNCTION _ratelimit_apply RESET plan_cache_mode;
ALTER FUNCTION _ratelimit_refund RESET plan_cache_mode;

-- Makes limits full again by deleting the rows of all their shards, which it locks in the common order (CONCURRENCY.md, D1).
-- Returns the number of deleted rows.
CREATE OR REPLACE FUNCTION /* TEMPLATE: schema */ratelimit_reset(names text[], keys text[], OUT deleted integer)
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

-- Locks all rows of the limits, which are in the order of locks. A limit without rows is full; its rows are inserted, and so locked, too. If
-- another transaction has inserted them meanwhile, the subtransaction releases the locks and the loop tries again (CONCURRENCY.md, H2).
CREATE OR REPLACE FUNCTION ratelimit._lock(names text[], keys text[], capacities double precision[], shards integer[], now timestamptz) RETURNS void
LANGUAGE plpgsql
AS $body$
DECLARE
    at    timestamptz;
    first integer := 1; -- of those that are not locked yet
    m     integer;
    rec   record;
BEGIN
    WHILE first <= coalesce(pg_catalog.cardinality(names), 0) LOOP -- rows that exist need no subtransaction
        PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = names[first] AND r.key = keys[first] ORDER BY r.shard FOR UPDATE;
        EXIT WHEN NOT FOUND;
        first := first + 1;
    END LOOP;
    IF first > coalesce(pg_catalog.cardinality(names), 0) THEN
        RETURN;
    END IF;
    FOR attempt IN 1..100 LOOP
        BEGIN
            FOR i IN first..pg_catalog.cardinality(names) LOOP
                PERFORM 1 FROM ratelimit.limits AS r WHERE r.name = names[i] AND r.key = keys[i] ORDER BY r.shard FOR UPDATE;
                GET DIAGNOSTICS m = ROW_COUNT;
                CONTINUE WHEN m > 0;
                -- Above READ COMMITTED, a row that another transaction has committed since the snapshot is a conflict here.
                at := coalesce(now, clock_timestamp());
                FOR rec IN
                    INSERT INTO ratelimit.limits AS r (name, key, shard, shards, value, ts)
                    SELECT names[i], keys[i], s, shards[i], capacities[i] / shards[i]::double precision, at
                      FROM generate_series(0, shards[i] - 1) AS s
                    ON CONFLICT DO NOTHING
                    RETURNING r.shard
                LOOP
                    m := m + 1;
                END LOOP;
                IF m <> shards[i] THEN -- another transaction has inserted them
                    RAISE SQLSTATE 'RL001';
                END IF;
            END LOOP;
            RETURN;
        EXCEPTION WHEN SQLSTATE 'RL001' THEN
            NULL;
        END;
    END LOOP;
    RAISE serialization_failure USING MESSAGE = pg_catalog.format('rate limits %s: lost 100 races in a row against other transactions', names);
END
$body$;

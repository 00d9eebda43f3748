-- ratelimit.limits as a table that is partitioned by key, as docs/databases.md shows.
BEGIN;
ALTER TABLE ratelimit.limits RENAME TO limits_before;
CREATE TABLE ratelimit.limits (LIKE ratelimit.limits_before INCLUDING ALL) PARTITION BY HASH (key);
CREATE TABLE ratelimit.limits_0 PARTITION OF ratelimit.limits FOR VALUES WITH (MODULUS 3, REMAINDER 0)
    WITH (fillfactor = 90);
CREATE TABLE ratelimit.limits_1 PARTITION OF ratelimit.limits FOR VALUES WITH (MODULUS 3, REMAINDER 1)
    WITH (fillfactor = 90);
CREATE TABLE ratelimit.limits_2 PARTITION OF ratelimit.limits FOR VALUES WITH (MODULUS 3, REMAINDER 2)
    WITH (fillfactor = 90);
INSERT INTO ratelimit.limits SELECT * FROM ratelimit.limits_before;
DROP TABLE ratelimit.limits_before;
COMMIT;

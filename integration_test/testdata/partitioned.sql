-- ratelimit.limits as a table that is partitioned by key, as docs/databases.md shows.
BEGIN;
ALTER TABLE ratelimit.limits RENAME TO rate_limits_before;
CREATE TABLE ratelimit.limits (LIKE rate_limits_before INCLUDING ALL) PARTITION BY HASH (key);
CREATE TABLE rate_limits_0 PARTITION OF ratelimit.limits FOR VALUES WITH (MODULUS 3, REMAINDER 0) WITH (fillfactor = 90);
CREATE TABLE rate_limits_1 PARTITION OF ratelimit.limits FOR VALUES WITH (MODULUS 3, REMAINDER 1) WITH (fillfactor = 90);
CREATE TABLE rate_limits_2 PARTITION OF ratelimit.limits FOR VALUES WITH (MODULUS 3, REMAINDER 2) WITH (fillfactor = 90);
INSERT INTO ratelimit.limits SELECT * FROM rate_limits_before;
DROP TABLE rate_limits_before;
COMMIT;

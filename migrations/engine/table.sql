-- One row per (limit, key), or per shard of it. A missing row is a full one.
--
-- value is the balance in tokens at the instant ts. Below zero, reservations and charges owe tokens. The row does not hold the
-- tokens that were refilled since ts: every reader adds them (ratelimit._available).
--
-- promised is written by reservations that have to wait, in all rows of the key, and read by give-backs: until then, a debt is of waiting work
-- (docs/refunds.md).
-- lapses is written by holds that have an end, in the rows that they take from: none of the key's that the row knows of expires before it. Whoever finds it passed looks
-- for expired holds, and who takes ends them first (CONCURRENCY.md, J5).
--
-- COLLATE "C" compares names and keys byte by byte, so that all callers lock rows in the same order (CONCURRENCY.md, D1).
-- The fillfactor leaves room for the row's next version on its page, and no index has value or ts: updates are heap-only.
-- The table has no CHECK constraints (G1).
CREATE TABLE ratelimit.limits (
    name   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    shard  smallint         NOT NULL,
    shards smallint         NOT NULL,
    value  double precision NOT NULL,
    ts     timestamptz      NOT NULL,
    promised timestamptz,
    lapses timestamptz,
    PRIMARY KEY (name, key, shard)
) WITH (fillfactor = 90);

COMMENT ON TABLE ratelimit.limits IS 'txlimit: one row per limit and key, or per shard of it; a missing row is a full limit';
COMMENT ON COLUMN ratelimit.limits.name IS 'the name of the limit';
COMMENT ON COLUMN ratelimit.limits.key IS 'whose tokens they are, such as a user; '''' if the limit has no keys';
COMMENT ON COLUMN ratelimit.limits.shard IS 'the number of the row among those of the key, 0 to shards - 1';
COMMENT ON COLUMN ratelimit.limits.shards IS 'the number of rows that the limit has for this key';
COMMENT ON COLUMN ratelimit.limits.value IS 'the balance in tokens at the instant ts, without what was refilled since; below zero, tokens are owed';
COMMENT ON COLUMN ratelimit.limits.ts IS 'the instant of the balance';
COMMENT ON COLUMN ratelimit.limits.promised IS 'the latest instant at which work that had to wait was told to run; NULL: none had to';
COMMENT ON COLUMN ratelimit.limits.lapses IS 'no hold that has taken from the row expires before this instant; NULL: none can';

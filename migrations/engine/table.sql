-- One row per (limit, key), or per shard of it. A missing row is a full one.
--
-- value is the balance in tokens that was left at ts; below zero it is owed by reservations and charges. What has been
-- refilled since ts is not in the row: every reader adds it (_ratelimit_available).
--
-- No CHECKs: Postgres reads and compiles a table's CHECKs again for every UPDATE, and the five that would be due cost a
-- quarter of one. The functions refuse what must not be in here, or their callers have; and they read what somebody wrote by hand so
-- that it grants no more than the capacity (NaN and Infinity are a full row).
--
-- Names and keys compare byte by byte (COLLATE "C"), so that every caller locks rows in the same order. The fillfactor
-- leaves room for the row's next version on its page: with no index on value or ts, updates are heap-only.
CREATE TABLE /* TEMPLATE: schema */rate_limits (
    name   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL, -- '': the limit has no keys
    shard  smallint         NOT NULL, -- 0 to shards - 1
    shards smallint         NOT NULL, -- how many rows the limit has for this key
    value  double precision NOT NULL,
    ts     timestamptz      NOT NULL,
    PRIMARY KEY (name, key, shard)
) WITH (fillfactor = 90);

COMMENT ON TABLE /* TEMPLATE: schema */rate_limits IS 'txlimit: one row per limit and key, or per shard of it; a missing row is a full limit';

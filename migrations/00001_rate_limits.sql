-- +goose Up

-- One row per (limit, key), or per shard of it. A missing row is a full one.
--
-- value is the balance in tokens that was left at ts; below zero it is owed by reservations and charges. What has been
-- refilled since ts is not in the row: every reader adds it (ratelimit_available).
--
-- Names and keys compare byte by byte (COLLATE "C"), so that every caller locks rows in the same order. The fillfactor
-- leaves room for the row's next version on its page: with no index on value or ts, updates are heap-only.
CREATE TABLE rate_limits (
    name   text COLLATE "C" NOT NULL CHECK (name <> ''),
    key    text COLLATE "C" NOT NULL, -- '': the limit has no keys
    shard  smallint         NOT NULL CHECK (shard >= 0 AND shard < shards),
    shards smallint         NOT NULL, -- this row is shard number `shard` of so many
    value  double precision NOT NULL CHECK (value > '-Infinity' AND value < 'Infinity'), -- NaN is above Infinity
    ts     timestamptz      NOT NULL CHECK (isfinite(ts)),
    PRIMARY KEY (name, key, shard)
) WITH (fillfactor = 90);

COMMENT ON TABLE rate_limits IS 'txlimit: one row per limit and key, or per shard of it; a missing row is a full limit';

-- +goose Down
DROP TABLE rate_limits;

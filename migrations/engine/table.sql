-- One row per (limit, key), or per shard of it. A missing row is a full one.
--
-- value is the balance in tokens at the instant ts. Below zero, reservations and charges owe tokens. The row does not hold the
-- tokens that were refilled since ts: every reader adds them (_ratelimit_available).
--
-- COLLATE "C" compares names and keys byte by byte, so that all callers lock rows in the same order (CONCURRENCY.md, D1).
-- The fillfactor leaves room for the row's next version on its page, and no index has value or ts: updates are heap-only.
-- The table has no CHECK constraints (G1).
CREATE TABLE /* TEMPLATE: schema */rate_limits (
    name   text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL,
    shard  smallint         NOT NULL,
    shards smallint         NOT NULL,
    value  double precision NOT NULL,
    ts     timestamptz      NOT NULL,
    PRIMARY KEY (name, key, shard)
) WITH (fillfactor = 90);

COMMENT ON TABLE /* TEMPLATE: schema */rate_limits IS 'txlimit: one row per limit and key, or per shard of it; a missing row is a full limit';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limits.name IS 'the name of the limit';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limits.key IS 'whose tokens they are, such as a user; '''' if the limit has no keys';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limits.shard IS 'the number of the row among those of the key, 0 to shards - 1';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limits.shards IS 'the number of rows that the limit has for this key';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limits.value IS 'the balance in tokens at the instant ts, without what was refilled since; below zero, tokens are owed';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limits.ts IS 'the instant of the balance';

-- Tokens and slots that come back: one row per limit, key and id. Limits without holds have no rows here, and no call of theirs reads it.
--
-- A row is written after the row of rate_limits, in one transaction (CONCURRENCY.md, I). For slots, value in rate_limits is minus the sum of the
-- counts of the held rows here. Like rate_limits, the table has no CHECK constraints (G1).
-- The fillfactor leaves room for the next version: an extension changes only until, which no index has, so it is heap-only.
CREATE TABLE /* TEMPLATE: schema */rate_limit_holds (
    name     text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    id       text COLLATE "C" NOT NULL,
    state    text             NOT NULL,
    unit     text             NOT NULL,
    token    uuid,
    count    double precision NOT NULL,
    taken_at timestamptz      NOT NULL,
    rest     double precision NOT NULL,
    part     double precision NOT NULL,
    until    timestamptz      NOT NULL,
    PRIMARY KEY (name, key, id)
) WITH (fillfactor = 90);

-- For a denial: which holds of this key can expire? Without it, a denial walks over the settled rows of a day.
CREATE INDEX rate_limit_holds_expiring ON /* TEMPLATE: schema */rate_limit_holds (name, key)
    WHERE state = 'held' AND token IS NOT NULL;

COMMENT ON TABLE /* TEMPLATE: schema */rate_limit_holds IS 'txlimit: tokens and slots that are held under an id, and come back';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.name IS 'the name of the limit';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.key IS 'whose tokens they are; '''' if the limit has no keys';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.id IS 'the id that the caller chose: a job, an event, a project';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.state IS 'held; lapsed: it expired or was reset, and is lost; settled: the work is over';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.unit IS 'tokens; slots; none: the key was unlimited, so no tokens ever move';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.token IS 'whose hold it is; NULL: of everybody who knows the id, since it does not expire';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.count IS 'the tokens or slots that were taken; of a lapsed one, those that did not come back';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.taken_at IS 'the instant of the decision';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.rest IS 'the tokens that were left in the rows of rate_limits that they were taken from';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.part IS 'the part of the limit in those rows: 1, or 1/shards for one shard';
COMMENT ON COLUMN /* TEMPLATE: schema */rate_limit_holds.until IS 'held: from then on it may be given back; else: from then on it counts as absent; infinity: never';

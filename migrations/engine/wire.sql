-- What the Go library calls for one decision. The answer is a bytea with the decision in the binary format of its type, since a composite
-- result would be text in some query modes.
--
-- Each is a call of its own in the select list, SELECT ratelimit._wire_consume(...), so that a distributed Postgres can send it to
-- the server that has the key, which it looks for among the arguments. The planner inlines them.
CREATE OR REPLACE FUNCTION ratelimit._wire_consume(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz,
    count double precision, floor double precision, now timestamptz, expect_denial boolean, or_raise boolean, windows timestamptz[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._consume(name, key, rate, period, capacity, start, count, floor, now, expect_denial, or_raise, windows));

CREATE OR REPLACE FUNCTION ratelimit._wire_consume_sharded(
    name text, key text,
    rate double precision, period interval, capacity double precision, start timestamptz, shards integer,
    count double precision, floor double precision, shard_a integer, shard_b integer, now timestamptz, or_raise boolean, windows timestamptz[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._consume_sharded(name, key, rate, period, capacity, start, shards, count, floor, shard_a, shard_b, now,
    or_raise, windows));

CREATE OR REPLACE FUNCTION ratelimit._wire_consume_several(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], floors double precision[], now timestamptz, or_raise boolean,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._consume_several(names, keys, rates, periods, capacities, starts, counts, floors, now, or_raise,
    windows, firsts, lasts));

CREATE OR REPLACE FUNCTION ratelimit._wire_apply(
    op text, names text[], keys text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean, now timestamptz, or_raise boolean,
    windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._apply(op, names, keys, rates, periods, capacities, starts, shards, counts, floors, shard_a, shard_b,
    reserve, now, or_raise, windows, firsts, lasts, mosts, within));

-- One limit: the key is an argument of its own.
CREATE OR REPLACE FUNCTION ratelimit._wire_apply_one(
    op text, name text, key text,
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    counts double precision[], floors double precision[], shard_a integer[], shard_b integer[],
    reserve boolean, now timestamptz, or_raise boolean,
    windows timestamptz[], firsts integer[], lasts integer[], mosts double precision[], within interval
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._apply(op, ARRAY[name], ARRAY[key], rates, periods, capacities, starts, shards, counts, floors,
    shard_a, shard_b, reserve, now, or_raise, windows, firsts, lasts, mosts, within));

CREATE OR REPLACE FUNCTION ratelimit._wire_refund(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._refund(names, keys, rates, periods, capacities, starts, counts, taken, held, parts,
    taken_at, run_at, now, windows, firsts, lasts));

CREATE OR REPLACE FUNCTION ratelimit._wire_refund_one(
    name text, key text, rates double precision[], periods interval[], capacities double precision[], starts timestamptz[],
    counts double precision[], taken double precision[], held double precision[], parts double precision[],
    taken_at timestamptz, run_at timestamptz, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._refund(ARRAY[name], ARRAY[key], rates, periods, capacities, starts, counts, taken, held, parts,
    taken_at, run_at, now, windows, firsts, lasts));

-- It returns no composite, so it needs no record_send.
CREATE OR REPLACE FUNCTION ratelimit._wire_move(
    names text[], keys text[], rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[],
    floor double precision, now timestamptz, windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS double precision
LANGUAGE sql
RETURN ratelimit._move(names, keys, rates, periods, capacities, starts, shards, floor, now, windows, firsts, lasts);

CREATE OR REPLACE FUNCTION ratelimit._wire_each(
    ends integer[], names text[],
    rates double precision[], periods interval[], capacities double precision[], starts timestamptz[], shards integer[], floors double precision[],
    shard_a integer[], shard_b integer[], keys text[], counts double precision[], now timestamptz,
    windows timestamptz[], firsts integer[], lasts integer[]
) RETURNS bytea
LANGUAGE sql
RETURN pg_catalog.record_send(ratelimit._each(ends, names, rates, periods, capacities, starts, shards, floors, shard_a, shard_b, keys, counts, now,
    windows, firsts, lasts));

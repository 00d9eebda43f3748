-- The queries Consume, ConsumeSharded, ConsumeSeveral and Apply in the raising form: the same arguments and answers, but a denial is a SQL error.

-- name: ConsumeOrRaise :one
SELECT pg_catalog.record_send(r)::bytea AS answer
  FROM ratelimit_consume(
      @name::text, @key::text,
      @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz,
      @count::double precision, @floor::double precision, sqlc.narg('now')::timestamptz, @expect_denial::boolean) AS r
 WHERE CASE WHEN r.granted THEN true
       ELSE ratelimit_raise(ARRAY[@name::text], r.at, ARRAY[1], ARRAY[r.value], ARRAY[r.ts]) END;

-- name: ConsumeShardedOrRaise :one
SELECT pg_catalog.record_send(r)::bytea AS answer
  FROM ratelimit_consume_sharded(
      @name::text, @key::text,
      @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz,
      @shards::integer, @count::double precision, @floor::double precision,
      @shard_a::integer, @shard_b::integer, sqlc.narg('now')::timestamptz) AS r
 WHERE CASE WHEN r.granted THEN true
       ELSE ratelimit_raise(ARRAY[@name::text], r.at, r.ord, r.value, r.ts) END;

-- name: ConsumeSeveralOrRaise :one
SELECT pg_catalog.record_send(r)::bytea AS answer
  FROM ratelimit_consume_several(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @counts::double precision[], @floors::double precision[], sqlc.narg('now')::timestamptz) AS r
 WHERE CASE WHEN r.granted THEN true
       ELSE ratelimit_raise(@names::text[], r.at, r.ord, r.value, r.ts) END;

-- name: ApplyOrRaise :one
SELECT pg_catalog.record_send(r)::bytea AS answer
  FROM ratelimit_apply(
      @op::text, @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @shards::integer[], @counts::double precision[], @floors::double precision[],
      @shard_a::integer[], @shard_b::integer[],
      sqlc.narg('consumed_at')::timestamptz, sqlc.narg('now')::timestamptz) AS r
 WHERE CASE WHEN r.granted THEN true
       ELSE ratelimit_raise(@names::text[], r.at, r.ord, r.value, r.ts) END;

-- name: Consume :one
SELECT pg_catalog.record_send(_ratelimit_consume(
      @name::text, @key::text,
      @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz,
      @count::double precision, @floor::double precision, sqlc.narg('now')::timestamptz, @expect_denial::boolean, @or_raise::boolean,
      @windows::timestamptz[]))::bytea AS answer;

-- name: ConsumeSharded :one
SELECT pg_catalog.record_send(_ratelimit_consume_sharded(
      @name::text, @key::text,
      @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz,
      @shards::integer, @count::double precision, @floor::double precision,
      @shard_a::integer, @shard_b::integer, sqlc.narg('now')::timestamptz, @or_raise::boolean,
      @windows::timestamptz[]))::bytea AS answer;

-- name: ConsumeSeveral :one
SELECT pg_catalog.record_send(_ratelimit_consume_several(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @counts::double precision[], @floors::double precision[], sqlc.narg('now')::timestamptz, @or_raise::boolean))::bytea AS answer;

-- name: Apply :one
SELECT pg_catalog.record_send(_ratelimit_apply(
      @op::text, @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @shards::integer[], @counts::double precision[], @floors::double precision[],
      @shard_a::integer[], @shard_b::integer[],
      @reserve::boolean, sqlc.narg('now')::timestamptz, @or_raise::boolean,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[], @mosts::double precision[]))::bytea AS answer;

-- name: Refund :one
SELECT pg_catalog.record_send(_ratelimit_refund(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @counts::double precision[], @taken::double precision[], @held::double precision[], @parts::double precision[],
      @taken_at::timestamptz, @run_at::timestamptz, sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]))::bytea AS answer;

-- name: Reset :one
SELECT ratelimit_reset(@names::text[], @keys::text[])::integer AS deleted;

-- name: Sweep :one
SELECT s.deleted, s.next
  FROM ratelimit_sweep(
      @name::text, @rate::double precision, coalesce((sqlc.narg('unit')::text)::interval, @period::interval), @kind::text, @capacity::double precision,
      sqlc.narg('start')::timestamptz, @first::text, sqlc.narg('now')::timestamptz) AS s;

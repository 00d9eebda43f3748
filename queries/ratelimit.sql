-- name: Consume :one
SELECT ratelimit._wire_consume(
      @name::text, @key::text,
      @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz,
      @count::double precision, @floor::double precision, sqlc.narg('now')::timestamptz, @expect_denial::boolean, @or_raise::boolean,
      @windows::timestamptz[]) AS answer;

-- name: UpdateBucket :one
UPDATE ratelimit.limits AS r
   SET value = ratelimit._available(r.value, r.ts, statement_timestamp(), @rate::double precision, @period::interval, @capacity::double precision, NULL) - @count::double precision,
       ts = greatest(r.ts, statement_timestamp())
 WHERE r.name = @name::text AND r.key = @key::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE
   AND ratelimit._available(r.value, r.ts, statement_timestamp(), @rate::double precision, @period::interval, @capacity::double precision, NULL) - @count::double precision >= @floor::double precision
   AND current_setting('transaction_isolation') = 'read committed'
RETURNING record_send(ROW(true, statement_timestamp(), r.value, r.ts)) AS answer;

-- name: UpdateWindow :one
UPDATE ratelimit.limits AS r
   SET value = ratelimit._available(r.value, r.ts, date_bin(@period::interval, statement_timestamp(), @start::timestamptz), @rate::double precision, @period::interval, @capacity::double precision, @start::timestamptz) - @count::double precision,
       ts = greatest(r.ts, statement_timestamp())
 WHERE r.name = @name::text AND r.key = @key::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE
   AND ratelimit._available(r.value, r.ts, date_bin(@period::interval, statement_timestamp(), @start::timestamptz), @rate::double precision, @period::interval, @capacity::double precision, @start::timestamptz) - @count::double precision >= @floor::double precision
   AND current_setting('transaction_isolation') = 'read committed'
RETURNING record_send(ROW(true, statement_timestamp(), r.value, r.ts)) AS answer;

-- name: UpdateCalendar :one
UPDATE ratelimit.limits AS r
   SET value = ratelimit._available(r.value, r.ts, statement_timestamp(), @rate::double precision, @period::interval, @capacity::double precision, @start::timestamptz, @windows::timestamptz[]) - @count::double precision,
       ts = greatest(r.ts, statement_timestamp())
 WHERE r.name = @name::text AND r.key = @key::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE
   AND ratelimit._available(r.value, r.ts, statement_timestamp(), @rate::double precision, @period::interval, @capacity::double precision, @start::timestamptz, @windows::timestamptz[]) - @count::double precision >= @floor::double precision
   AND current_setting('transaction_isolation') = 'read committed'
RETURNING record_send(ROW(true, statement_timestamp(), r.value, r.ts)) AS answer;

-- name: ConsumeSharded :one
SELECT ratelimit._wire_consume_sharded(
      @name::text, @key::text,
      @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz,
      @shards::integer, @count::double precision, @floor::double precision,
      @shard_a::integer, @shard_b::integer, sqlc.narg('now')::timestamptz, @or_raise::boolean,
      @windows::timestamptz[]) AS answer;

-- name: ConsumeSeveral :one
SELECT ratelimit._wire_consume_several(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @counts::double precision[], @floors::double precision[], sqlc.narg('now')::timestamptz, @or_raise::boolean,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS answer;

-- name: Each :one
SELECT ratelimit._wire_each(
      @ends::integer[], @names::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[], @shards::integer[],
      @floors::double precision[], @shard_a::integer[], @shard_b::integer[], @keys::text[], @counts::double precision[], sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS answer;

-- name: Apply :one
SELECT ratelimit._wire_apply(
      @op::text, @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @shards::integer[], @counts::double precision[], @floors::double precision[],
      @shard_a::integer[], @shard_b::integer[],
      @reserve::boolean, sqlc.narg('now')::timestamptz, @or_raise::boolean,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[], @mosts::double precision[], sqlc.narg('within')::interval) AS answer;

-- name: ApplyOne :one
SELECT ratelimit._wire_apply_one(
      @op::text, @name::text, @key::text,
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @shards::integer[], @counts::double precision[], @floors::double precision[],
      @shard_a::integer[], @shard_b::integer[],
      @reserve::boolean, sqlc.narg('now')::timestamptz, @or_raise::boolean,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[], @mosts::double precision[], sqlc.narg('within')::interval) AS answer;

-- name: Refund :one
SELECT ratelimit._wire_refund(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @counts::double precision[], @taken::double precision[], @held::double precision[], @parts::double precision[],
      @taken_at::timestamptz, @run_at::timestamptz, sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS answer;

-- name: RefundOne :one
SELECT ratelimit._wire_refund_one(
      @name::text, @key::text,
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @counts::double precision[], @taken::double precision[], @held::double precision[], @parts::double precision[],
      @taken_at::timestamptz, @run_at::timestamptz, sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS answer;

-- name: Move :one
SELECT ratelimit._wire_move(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[], @shards::integer[],
      @floor::double precision, sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[])::double precision AS balance;

-- name: Pause :one
SELECT ratelimit._pause(
      @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @shards::integer[],
      @mosts::double precision[], coalesce(sqlc.narg('now')::timestamptz, clock_timestamp()) + @lasts::interval,
      sqlc.narg('now')::timestamptz)::timestamptz AS until;

-- name: Resume :one
SELECT ratelimit._resume(@names::text[], @keys::text[], sqlc.narg('now')::timestamptz)::integer AS resumed;

-- name: Hold :one
SELECT ratelimit._wire_hold(
      @id::text, sqlc.narg('token')::uuid, sqlc.narg('ttl')::interval, @taking::integer, @units::text[], @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @shards::integer[], @counts::double precision[], @floors::double precision[],
      @shard_a::integer[], @shard_b::integer[], sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS answer;

-- name: UpdateHold :one
-- Locks the limit's row, and then the id's own, which it inserts (CONCURRENCY.md, J13).
WITH taken AS (
    UPDATE ratelimit.limits AS r
       SET value = ratelimit._available(r.value, r.ts, ratelimit._upto(statement_timestamp(), @period::interval, sqlc.narg('start')::timestamptz, @windows::timestamptz[]),
               @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz, @windows::timestamptz[]) - @count::double precision,
           ts = greatest(r.ts, statement_timestamp()), lapses = least(r.lapses, CASE WHEN sqlc.narg('token')::uuid IS NOT NULL THEN clock_timestamp() + sqlc.narg('ttl')::interval END)
     WHERE r.name = @name::text AND r.key = @key::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE
       AND ratelimit._available(r.value, r.ts, ratelimit._upto(statement_timestamp(), @period::interval, sqlc.narg('start')::timestamptz, @windows::timestamptz[]),
               @rate::double precision, @period::interval, @capacity::double precision, sqlc.narg('start')::timestamptz, @windows::timestamptz[]) - @count::double precision >= @floor::double precision
       AND CASE WHEN current_setting('transaction_isolation') = 'read committed' AND NOT ratelimit._distributed()
           THEN NOT EXISTS (SELECT 1 FROM ratelimit.holds AS h
                 WHERE h.name = @name::text AND h.key = @key::text AND h.id = @id::text AND (h.part > '0' OR ratelimit._costly(h.part::smallint)))
           ELSE false END
    RETURNING r.value, r.ts
), held AS (
    INSERT INTO ratelimit.holds AS h (name, key, id, state, unit, token, count, taken_at, rest, part, until)
    SELECT @name::text, @key::text, @id::text, @state::text, @unit::text, sqlc.narg('token')::uuid, @count::double precision,
           CASE WHEN sqlc.narg('start')::timestamptz IS NULL THEN statement_timestamp() ELSE t.ts END, t.value, 1,
           coalesce(clock_timestamp() + sqlc.narg('ttl')::interval, 'infinity')
      FROM taken AS t
    ON CONFLICT DO NOTHING
    RETURNING h.until
)
SELECT record_send(ROW('taken'::text, h.until, statement_timestamp(), ARRAY[1], ARRAY[t.value], ARRAY[t.ts], NULL::timestamptz[])) AS answer
  FROM taken AS t LEFT JOIN held AS h ON true
 WHERE h.until IS NOT NULL OR ratelimit._taken_twice();

-- name: Settle :one
SELECT ratelimit._wire_settle(
      @release::boolean, @id::text, sqlc.narg('token')::uuid, @taking::integer, @lifted::boolean[], @names::text[], @keys::text[],
      @rates::double precision[], @periods::interval[], @capacities::double precision[], @starts::timestamptz[],
      @shards::integer[], @used::double precision[], sqlc.narg('now')::timestamptz,
      @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS answer;

-- name: UpdateSettle :one
-- Locks the id's own row alone: no token moves (CONCURRENCY.md, J13).
UPDATE ratelimit.holds AS h
   SET state = 'settled', until = clock_timestamp() + interval '1 day'
  FROM ratelimit.limits AS r
 WHERE h.name = @name::text AND h.key = @key::text AND h.id = @id::text AND (h.part > '0' OR ratelimit._costly(h.part::smallint))
   AND CASE WHEN h.state = 'held' AND h.unit = 'tokens' AND h.token = @token::uuid THEN h.count = @used::double precision ELSE false END
   AND r.name = @name::text AND r.key = @key::text AND r.shard = 0 AND (r.shards = 1 OR ratelimit._costly(r.shards)) AND (r.lapses <= statement_timestamp()) IS NOT TRUE
   AND current_setting('transaction_isolation') = 'read committed'
RETURNING record_send(ROW('done'::text, statement_timestamp(), ARRAY[1], ARRAY[r.value], ARRAY[r.ts], ARRAY[0::double precision], '{}'::integer[])) AS answer;

-- name: Extend :one
SELECT e.ended, e.lost, e.busy, e.until, coalesce(sqlc.narg('now')::timestamptz, statement_timestamp())::timestamptz AS at
  FROM ratelimit._extend(@names::text[], @keys::text[], @ids::text[], @tokens::uuid[], @ttls::interval[], sqlc.narg('now')::timestamptz) AS e;

-- name: Reset :one
SELECT ratelimit._reset(@names::text[], @keys::text[])::integer AS deleted;

-- name: SweepHolds :one
SELECT s.next_name, s.next_key, s.next_id
  FROM ratelimit._sweep_holds(@after_name::text, @after_key::text, @after_id::text, sqlc.narg('now')::timestamptz) AS s;

-- name: Sweep :one
SELECT s.deleted, s.next
  FROM ratelimit._sweep(
      @name::text, CASE WHEN @kind::text <> 'slots' THEN @rate::double precision END,
      CASE WHEN @kind::text <> 'slots' THEN coalesce(sqlc.narg('unit')::interval, @period::interval) END, @kind::text, @capacity::double precision,
      sqlc.narg('start')::timestamptz, @first::text, sqlc.narg('varies')::interval, sqlc.narg('now')::timestamptz) AS s;

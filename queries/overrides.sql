-- name: Overrides :one
SELECT o.ids, o.names, o.keys, o.effects, o.rates, o.capacities, o.max_reserveds, o.untils, o.mades, o.more, o.snapshot, o.at, o.server
  FROM ratelimit._overrides(sqlc.narg('since')::pg_snapshot, @after::bigint) AS o;

-- name: Publish :one
SELECT p.counts, p.others FROM ratelimit._publish(@program::text, @definitions::jsonb, sqlc.narg('heartbeat')::boolean) AS p;

-- name: Override :one
SELECT ratelimit.override(@name::text, sqlc.narg('key')::text, sqlc.narg('rate')::double precision, sqlc.narg('capacity')::double precision,
      sqlc.narg('max_reserved')::double precision, coalesce(sqlc.narg('until')::timestamptz, clock_timestamp() + sqlc.narg('lasts')::interval), @reason::text, sqlc.narg('who')::text, @forever::boolean, @global::boolean, @every_key::boolean)::bigint AS id;

-- name: Block :one
SELECT ratelimit.block(@name::text, sqlc.narg('key')::text, coalesce(sqlc.narg('until')::timestamptz, clock_timestamp() + sqlc.narg('lasts')::interval), @reason::text, sqlc.narg('who')::text, @forever::boolean, @global::boolean, @every_key::boolean)::bigint AS id;

-- name: Restore :one
SELECT ratelimit.restore(@name::text, sqlc.narg('key')::text, NULL, sqlc.narg('who')::text, @global::boolean, @every_key::boolean)::integer AS ended;

-- name: Unblock :one
SELECT ratelimit.unblock(@name::text, sqlc.narg('key')::text, sqlc.narg('who')::text, @global::boolean, @every_key::boolean)::integer AS ended;

-- name: Database :one
SELECT coalesce(ratelimit._database(), '')::text AS known;

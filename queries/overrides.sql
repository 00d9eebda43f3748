-- name: Overrides :one
SELECT o.ids, o.names, o.keys, o.effects, o.rates, o.capacities, o.max_reserveds, o.untils, o.mades, o.more, o.snapshot, o.at, o.server
  FROM _ratelimit_overrides((sqlc.narg('since')::text)::pg_snapshot, @after::bigint) AS o;

-- name: Publish :one
SELECT p.counts, p.others FROM ratelimit_publish(@program::text, (@definitions::text)::jsonb, sqlc.narg('heartbeat')::boolean) AS p;

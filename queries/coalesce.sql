-- name: ConsumeKeys :one
SELECT r.seen, r.at, r.early, r.ord, r.value, r.ts
  FROM ratelimit._consume_keys(
      @name::text, @keys::text[],
      @rate::double precision, @period::interval, @capacity::double precision,
      @counts::double precision[], sqlc.narg('now')::timestamptz) AS r;

-- name: Coalesce :one
SELECT r.seen, r.at, r.early, r.ord, r.value, r.ts, r.after
  FROM ratelimit._coalesce(
      @names::text[], @rates::double precision[], @periods::interval[], @capacities::double precision[],
      @keys::text[], @defs::integer[], @starts::timestamptz[],
      @repeats::integer[], @counts::double precision[], @floors::double precision[],
      @calls::integer[], @asks::integer[], @ask_defs::integer[], @ask_starts::timestamptz[],
      @ask_counts::double precision[], @ask_floors::double precision[],
      sqlc.narg('now')::timestamptz, @windows::timestamptz[], @firsts::integer[], @lasts::integer[]) AS r;

-- name: RecordUsage :one
SELECT ratelimit._record_usage(
    @names::text[], @minutes::timestamptz[], @granted::bigint[], @denied::bigint[], @failed::bigint[],
    @tokens::double precision[], @refunded::double precision[], @waited::double precision[],
    @denial_names::text[], @hours::timestamptz[], @keys::text[], @denials::bigint[], @asked::double precision[], @last_denied::timestamptz[],
    @keep::interval)::integer AS deleted;

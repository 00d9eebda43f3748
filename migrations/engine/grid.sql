-- These convert an instant to microseconds since 1970, and back. The interval has hours and no days, since Postgres adds days in
-- the session's time zone.
CREATE OR REPLACE FUNCTION ratelimit._micros(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (extract(epoch FROM at) * '1000000')::bigint;

CREATE OR REPLACE FUNCTION ratelimit._instant(micros bigint) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
RETURN timestamptz 'epoch' + make_interval(hours => (micros / 3600000000)::integer, secs => (micros % 3600000000)::double precision / '1000000');

-- Returns the argument `start` of ratelimit._consume: NULL for a token bucket, or the first instant of a fixed window's grid from
-- the year 1 on. Without a start, the grid's offset is a hash of the key alone, or of the name if the key is empty. The Go
-- library has the same hash.
CREATE OR REPLACE FUNCTION ratelimit._grid(name text, key text, period interval, kind text, start timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
AS $body$
DECLARE
    year1 CONSTANT bigint := -62135596800000000;
    along bigint := ratelimit._micros(start) - year1;
BEGIN
    IF kind = 'token bucket' THEN
        RETURN NULL;
    END IF;
    IF along IS NULL THEN
        along := (('x' || left(encode(sha256(pg_catalog.convert_to(CASE WHEN key = '' THEN name ELSE key END, 'UTF8')), 'hex'), 16))::bit(64) >> 1)::bigint;
    END IF;
    RETURN ratelimit._instant(year1 + along % (extract(epoch FROM period) * '1000000')::bigint);
END
$body$;

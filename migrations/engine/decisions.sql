-- The decision on one limit. value and ts are the row's new state if it was granted, or the state that led to the denial.
-- A named type saves time: Postgres assembles the row type of OUT parameters again for every call, and a ROW that is cast to
-- this type needs no conversion on return.
CREATE TYPE ratelimit._decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz);

-- The decision on the rows of several limits, or of a sharded one. ord has, for each row, the position of its limit in the
-- arguments. NULL: one row for each limit, in order. taken is what ratelimit._apply took with the op 'take', otherwise NULL.
CREATE TYPE ratelimit._decisions AS (granted boolean, at timestamptz, ord integer[], value double precision[], ts timestamptz[],
    taken double precision);

-- The answer of a refund, and of the end of a hold. state: done; repeated; lost. The rows are those of after. moved: by limit, the tokens that came back; below zero: that were charged. lost: the positions of the lost.
CREATE TYPE ratelimit._settled AS (state text, at timestamptz, ord integer[], value double precision[], ts timestamptz[],
    moved double precision[], lost integer[]);

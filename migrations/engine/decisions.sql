-- What became of one limit's row: its new state when granted, the state that decided when denied. (A type of its own,
-- since the row type of OUT parameters is put together again for every call. A ROW that is cast to it is not converted on return.)
CREATE TYPE /* TEMPLATE: schema */_ratelimit_decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz);

-- The same of the rows of several limits, or of a sharded one. ord is the place of each row's limit in the arguments; NULL: one row
-- for each limit, in order.
CREATE TYPE /* TEMPLATE: schema */_ratelimit_decisions AS (granted boolean, at timestamptz, ord integer[], value double precision[], ts timestamptz[]);

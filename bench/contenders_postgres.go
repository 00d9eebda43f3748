package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/throttled/throttled/v2"
)

// othersTables are the tables and functions of the other contenders and of the figures.
const othersTables = `
	-- The table of the bare UPDATE, with the layout of ratelimit.limits.
	CREATE TABLE counters (
		name text COLLATE "C" NOT NULL, key text COLLATE "C" NOT NULL, shard smallint NOT NULL, shards smallint NOT NULL,
		value double precision NOT NULL, ts timestamptz NOT NULL, PRIMARY KEY (name, key, shard)
	) WITH (fillfactor = 90);

	-- The minimal cost of a function that decides. It handles a token bucket that exists and has enough, reads no other row whatever
	-- the planner estimates, and returns the answer that a client needs.
	CREATE FUNCTION decide_in_function(name text, key text, rate double precision, period interval, capacity double precision,
		start timestamptz, count double precision, floor double precision, now timestamptz) RETURNS ratelimit._decision
	LANGUAGE plpgsql SET enable_seqscan = off AS $$
	#variable_conflict use_variable
	DECLARE
		at    timestamptz := clock_timestamp();
		value double precision;
		ts    timestamptz;
	BEGIN
		UPDATE counters AS c
		   SET value = ratelimit._available(c.value, c.ts, at, rate, period, capacity, NULL) - count, ts = greatest(c.ts, at)
		 WHERE c.name = name AND c.key = key AND c.shard = 0 AND c.shards = 1
		   AND ratelimit._available(c.value, c.ts, at, rate, period, capacity, NULL) - count >= floor
		RETURNING c.value, c.ts INTO value, ts;
		RETURN ROW(value IS NOT NULL, at, value, ts)::ratelimit._decision;
	END $$;
	-- The same for several limits, all or nothing: if one fails, the tokens taken before it are given back. With looks, it reads the
	-- rows first, so that a denial writes nothing.
	CREATE FUNCTION decide_several_in_function(names text[], keys text[], rates double precision[], periods interval[],
		capacities double precision[], starts timestamptz[], counts double precision[], floors double precision[], now timestamptz, looks boolean)
	RETURNS ratelimit._decisions LANGUAGE plpgsql SET enable_seqscan = off AS $$
	#variable_conflict use_variable
	DECLARE
		name text; key text; rate double precision; period interval; capacity double precision; count double precision;
		floor double precision; new_value double precision; new_ts timestamptz;
		at timestamptz := clock_timestamp(); value double precision[]; ts timestamptz[];
	BEGIN
		IF looks THEN
			FOR p IN 2..pg_catalog.cardinality(names) LOOP
				name := names[p]; key := keys[p]; capacity := capacities[p]; count := counts[p]; floor := floors[p];
				SELECT r.value INTO new_value FROM ratelimit.limits AS r WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1;
				IF (least(new_value, capacity) - count >= floor) IS NOT TRUE THEN
					RETURN ROW(false, at, NULL, value, ts, NULL)::ratelimit._decisions; -- a full implementation would look at the refill
				END IF;
			END LOOP;
		END IF;
		FOR p IN 1..pg_catalog.cardinality(names) LOOP
			name := names[p]; key := keys[p]; rate := rates[p]; period := periods[p]; capacity := capacities[p];
			count := counts[p]; floor := floors[p];
			UPDATE ratelimit.limits AS r
			   SET value = ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count, ts = greatest(r.ts, at)
			 WHERE r.name = name AND r.key = key AND r.shard = 0 AND r.shards = 1
			   AND ratelimit._available(r.value, r.ts, at, rate, period, capacity, NULL) - count >= floor
			RETURNING r.value, r.ts INTO new_value, new_ts;
			IF new_value IS NULL THEN
				FOR taken IN 1..p - 1 LOOP
					UPDATE ratelimit.limits AS r SET value = r.value + counts[taken]
					 WHERE r.name = names[taken] AND r.key = keys[taken] AND r.shard = 0;
				END LOOP;
				RETURN ROW(false, at, NULL, value, ts, NULL)::ratelimit._decisions;
			END IF;
			value[p] := new_value; ts[p] := new_ts;
		END LOOP;
		RETURN ROW(true, at, NULL, value, ts, NULL)::ratelimit._decisions;
	END $$;
	-- Token buckets that the client computes. value is NULL while the row is new.
	CREATE TABLE buckets (key text COLLATE "C" PRIMARY KEY, value double precision, ts timestamptz) WITH (fillfactor = 90);
	-- One counter for each window.
	CREATE TABLE windows (
		key text COLLATE "C" NOT NULL, starts timestamptz NOT NULL, count bigint NOT NULL, PRIMARY KEY (key, starts)
	) WITH (fillfactor = 90);
	-- Theoretical arrival times, for throttled.
	CREATE TABLE arrivals (key text COLLATE "C" PRIMARY KEY, tat bigint NOT NULL) WITH (fillfactor = 90);
	-- The rows that the caller's own transactions insert.
	CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, at timestamptz NOT NULL DEFAULT now());`

// bucket is a token bucket that the client computes.
type bucket struct {
	value *float64 // nil: full
	ts    *time.Time
	now   time.Time
}

func (b *bucket) scan(row pgx.Row) error { return row.Scan(&b.value, &b.ts, &b.now) }

// take refills the bucket, and takes one token if there is one.
func (b *bucket) take(o setting) (left float64, granted bool) {
	left = float64(o.burst)
	if b.value != nil {
		left = min(left, *b.value+max(0, b.now.Sub(*b.ts).Seconds())*float64(o.perSecond))
	}
	if left < 1 {
		return left, false
	}
	return left - 1, true
}

const (
	selectBucket = `SELECT value, ts, clock_timestamp() FROM buckets WHERE key = $1`
	upsertBucket = `INSERT INTO buckets (key, value, ts) VALUES ($1, $2, $3)
		ON CONFLICT (key) DO UPDATE SET value = excluded.value, ts = excluded.ts`
)

// openSerializable reads, computes and writes in SERIALIZABLE, and retries at once on 40001.
func openSerializable(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	var it opened
	it.take = func(ctx context.Context, key string) (granted bool, err error) {
		retries, err := retry(func() error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				granted, err = readComputeWrite(ctx, tx, key, o)
				return err
			})
		})
		if retries > 0 {
			it.retries.Add(int64(retries))
		}
		return granted, err
	}
	return &it, nil
}

// retry runs fn until it does not fail with 40001 or 40P01, without pauses.
func retry(fn func() error) (retries int, err error) {
	for {
		err := fn()
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "40001" && pgErr.Code != "40P01" {
			return retries, err
		}
		retries++
	}
}

func readComputeWrite(ctx context.Context, tx pgx.Tx, key string, o setting) (granted bool, err error) {
	var b bucket
	if err := b.scan(tx.QueryRow(ctx, selectBucket, key)); errors.Is(err, pgx.ErrNoRows) {
		b.now = time.Now()
	} else if err != nil {
		return false, err
	}
	left, granted := b.take(o)
	if granted {
		_, err = tx.Exec(ctx, upsertBucket, key, left, b.now)
	}
	return granted, err
}

// openForUpdate does what Bucket4j's PostgreSQLSelectForUpdateBasedProxyManager does: SELECT FOR UPDATE; if there is no row,
// INSERT ON CONFLICT DO NOTHING and select again; compute; UPDATE if it was granted; COMMIT.
func openForUpdate(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	return &opened{take: func(ctx context.Context, key string) (granted bool, err error) {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			var b bucket
			err := b.scan(tx.QueryRow(ctx, selectBucket+` FOR UPDATE`, key))
			if errors.Is(err, pgx.ErrNoRows) {
				if _, err := tx.Exec(ctx, `INSERT INTO buckets (key) VALUES ($1) ON CONFLICT DO NOTHING`, key); err != nil {
					return err
				}
				err = b.scan(tx.QueryRow(ctx, selectBucket+` FOR UPDATE`, key))
			}
			if err != nil {
				return err
			}
			var left float64
			if left, granted = b.take(o); granted {
				_, err = tx.Exec(ctx, `UPDATE buckets SET value = $2, ts = $3 WHERE key = $1`, key, left, b.now)
			}
			return err
		})
		return granted, err
	}}, nil
}

// openAdvisory takes an advisory lock on the key for the transaction, and then reads, computes and writes.
func openAdvisory(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	return &opened{take: func(ctx context.Context, key string) (granted bool, err error) {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended($1, 0))`, key); err != nil {
				return err
			}
			granted, err = readComputeWrite(ctx, tx, key, o)
			return err
		})
		return granted, err
	}}, nil
}

// openCounter counts calls in windows that last as long as the burst takes to refill. A denial counts, too.
func openCounter(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	period := time.Duration(o.burst) * time.Second / time.Duration(o.perSecond)
	const upsert = `INSERT INTO windows (key, starts, count) VALUES ($1, date_bin($2, clock_timestamp(), 'epoch'), 1)
		ON CONFLICT (key, starts) DO UPDATE SET count = windows.count + 1 RETURNING count`
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		var count int64
		err := pool.QueryRow(ctx, upsert, key, period).Scan(&count)
		return err == nil && count <= int64(o.burst), err
	}}, nil
}

// openUpdate takes a token without asking whether there is one.
func openUpdate(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		err := bareUpdate(ctx, pool, key)
		if errors.Is(err, pgx.ErrNoRows) {
			_, err = pool.Exec(ctx, `INSERT INTO counters VALUES ('limit', $1, 0, 1, $2, now()) ON CONFLICT DO NOTHING`, key, o.burst)
		}
		return err == nil, err
	}}, nil
}

// oneRow is a pool, a connection or a transaction.
type oneRow interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// bareUpdate is the floor: one UPDATE by primary key.
func bareUpdate(ctx context.Context, db oneRow, key string) error {
	var value float64
	return db.QueryRow(ctx, bareUpdateSQL, "limit", key).Scan(&value)
}

const bareUpdateSQL = `UPDATE counters SET value = value - 1 WHERE name = $1 AND key = $2 AND shard = 0 RETURNING value`

// decideByUpdate sends the statement of decide_in_function without the function. The difference is the cost of the function and its
// SET. It is not a limiter: a denial returns no row, so no reason and no balance. The planner uses the index only if the table is
// large enough.
func decideByUpdate(ctx context.Context, db oneRow, key string) error {
	return errUnlessGranted(db.QueryRow(ctx, `UPDATE counters AS c
		   SET value = ratelimit._available(c.value, c.ts, statement_timestamp(), $3, $4, $5, NULL) - $6, ts = greatest(c.ts, statement_timestamp())
		 WHERE c.name = $1 AND c.key = $2 AND c.shard = 0 AND c.shards = 1
		   AND ratelimit._available(c.value, c.ts, statement_timestamp(), $3, $4, $5, NULL) - $6 >= $7
		RETURNING record_send(ROW(true, statement_timestamp(), c.value, c.ts))`, decideArgs(key)...))
}

// decideInFunction is the floor of everything that decides in a PL/pgSQL function.
func decideInFunction(ctx context.Context, db oneRow, key string) error {
	return errUnlessGranted(db.QueryRow(ctx, decideInFunctionSQL, decideArgs(key)...))
}

const decideInFunctionSQL = `SELECT record_send(decide_in_function($1, $2, $3, $4, $5, NULL, $6, $7, NULL))`

// consumeByHand calls the function that the library calls, and reads only whether it was granted. It is the floor for any client that
// decides as the library does: first uses, windows, denials with their numbers, rows of several shards.
func consumeByHand(ctx context.Context, db oneRow, key string) error {
	return errUnlessGranted(db.QueryRow(ctx, `SELECT record_send(ratelimit._consume($1, $2, $3, $4, $5, NULL, $6, $7, NULL, false, false))`,
		decideArgs(key)...))
}

// decideArgs are the arguments that ask for one token of a limit. The numbers are variables, as in a limiter: a constant would need no
// allocation to become an argument.
func decideArgs(key string) []any {
	return []any{ask.name, key, ask.rate, ask.period, ask.rate, ask.count, ask.least}
}

var ask = struct {
	name         string
	rate         float64
	period       time.Duration
	count, least float64
}{"limit", 1e9, time.Second, 1, 0}

// errUnlessGranted reads the record of a decision. The first column says whether it was granted. It is the byte after the number of
// columns, the column's type and its length, which have four bytes each.
func errUnlessGranted(row pgx.Row) error {
	var record []byte
	if err := row.Scan(&record); err != nil {
		return err
	}
	if record[12] == 0 {
		return errDenied
	}
	return nil
}

// decideSeveralInFunction is the floor of everything that decides several limits together in a PL/pgSQL function.
func decideSeveralInFunction(ctx context.Context, db oneRow, names []string, key string, looks bool) error {
	n := len(names)
	same := func(v float64) []float64 { return slices.Repeat([]float64{v}, n) }
	return errUnlessGranted(db.QueryRow(ctx, `SELECT record_send(decide_several_in_function($1, $2, $3, $4, $5, $6, $7, $8, NULL, $9))`,
		names, slices.Repeat([]string{key}, n), same(1e9), slices.Repeat([]time.Duration{time.Second}, n), same(1e9),
		make([]*time.Time, n), same(1), same(0), looks))
}

// openThrottled runs the GCRA of throttled on Postgres, through its store interface.
func openThrottled(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	var it opened
	limiter, err := throttled.NewGCRARateLimiterCtx(&arrivals{pool: pool, it: &it}, throttled.RateQuota{
		MaxRate: throttled.PerSec(o.perSecond), MaxBurst: o.burst - 1,
	})
	if err != nil {
		return nil, err
	}
	limiter.SetMaxCASAttemptsLimit(often)
	it.take = func(ctx context.Context, key string) (bool, error) {
		limited, _, err := limiter.RateLimitCtx(ctx, key, 1)
		return err == nil && !limited, err
	}
	return &it, nil
}

// arrivals is a store for throttled. It never deletes keys, like the other contenders here.
type arrivals struct {
	pool *pgxpool.Pool
	it   *opened
}

func (s *arrivals) GetWithTime(ctx context.Context, key string) (tat int64, now time.Time, err error) {
	err = s.pool.QueryRow(ctx, `SELECT coalesce((SELECT tat FROM arrivals WHERE key = $1), -1), clock_timestamp()`, key).Scan(&tat, &now)
	return tat, now, err
}

func (s *arrivals) SetIfNotExistsWithTTL(ctx context.Context, key string, value int64, _ time.Duration) (bool, error) {
	return s.set(s.pool.Exec(ctx, `INSERT INTO arrivals (key, tat) VALUES ($1, $2) ON CONFLICT DO NOTHING`, key, value))
}

func (s *arrivals) CompareAndSwapWithTTL(ctx context.Context, key string, old, value int64, _ time.Duration) (bool, error) {
	return s.set(s.pool.Exec(ctx, `UPDATE arrivals SET tat = $3 WHERE key = $1 AND tat = $2`, key, old, value))
}

func (s *arrivals) set(tag pgconn.CommandTag, err error) (bool, error) {
	if err != nil {
		return false, fmt.Errorf("arrivals: %w", err)
	}
	if tag.RowsAffected() == 0 {
		s.it.retries.Add(1)
	}
	return tag.RowsAffected() == 1, nil
}

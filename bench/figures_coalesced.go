package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// coalescedVsRedis compares the coalescer with go-redis.
func coalescedVsRedis(goroutines int, pick func(worker int) string, fillKeys int) func(ctx context.Context, e *env) (outcome, error) {
	return coalescedAndRedis(goroutines, pick, fillKeys, 1)
}

// coalescedVsFloor compares the coalescer with one that calls a minimal function.
func coalescedVsFloor(goroutines int, pick func(worker int) string) func(ctx context.Context, e *env) (outcome, error) {
	return coalescedAndRedis(goroutines, pick, 0, 3)
}

// coalescedAndRedis runs the coalescer, go-redis, rueidis and, for more than one key, the floor. The outcome is a share of one of them.
func coalescedAndRedis(goroutines int, pick func(worker int) string, fillKeys, of int) func(ctx context.Context, e *env) (outcome, error) {
	return func(ctx context.Context, e *env) (outcome, error) {
		ways := []contender{
			{name: "txlimit, coalesced", open: openCoalesced},
			{name: "Redis, EVALSHA, go-redis", open: openGoRedis},
			{name: "Redis, EVALSHA, rueidis", open: openRueidis},
		}
		var sides []*side
		for _, way := range ways {
			it, err := way.open(ctx, e, plenty(goroutines))
			if err != nil {
				return outcome{}, err
			}
			if err := takeEach(ctx, it, e.few(fillKeys)); err != nil {
				return outcome{}, err
			}
			sides = append(sides, it.side(way.name, goroutines, pick))
		}
		if pick(0) != pick(1) {
			floor, err := openCoalescedFloor(ctx, e, plenty(goroutines), max(fillKeys, goroutines))
			if err != nil {
				return outcome{}, err
			}
			sides = append(sides, floor.side("coalesced, minimal function", goroutines, pick))
		}
		c, err := e.compare(ctx, 2*pairs, slice, sides[0], sides[1], sides[2:]...)
		if err != nil {
			return outcome{}, err
		}
		result := c.share(of)
		result.note += fmt.Sprintf("; coalesced / go-redis %.3g, p99 %s : %s; coalesced / rueidis %.3g", c.ratio(0, 1),
			short(c.totals[0].latencies.quantile(0.99)), short(c.totals[1].latencies.quantile(0.99)), c.ratio(0, 2))
		if len(sides) > 3 {
			result.note += fmt.Sprintf("; a minimal function that decides several keys / go-redis %.3g (library / minimal: %.3g)", c.ratio(3, 1), c.ratio(0, 3))
		}
		return result, nil
	}
}

// openCoalescedFloor opens a coalescer on the database of severalKeysFloor.
func openCoalescedFloor(ctx context.Context, e *env, o setting, keys int) (*opened, error) {
	pool, err := severalKeysFloor(ctx, e, o.conns, o.tracer, keys)
	if err != nil {
		return nil, err
	}
	return coalescedOn(e, &ratelimit.Coalescer{Pool: pool}, o), nil
}

// severalKeysFloor opens a pool on a database with a minimal function that decides several keys, by the same plan. It checks
// nothing and has only a period of one second. It leaves out cases that do not occur here: denials, keys without a row, rows of several
// shards, and a clock that goes back.
func severalKeysFloor(ctx context.Context, e *env, conns int, tracer pgx.QueryTracer, keys int) (*pgxpool.Pool, error) {
	pool, err := e.newPool(ctx, conns, tracer)
	if err != nil {
		return nil, err
	}
	if err := fill(ctx, pool, "ratelimit.limits", "limit", keys); err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, `
		CREATE OR REPLACE FUNCTION ratelimit._consume_keys(
			name text, keys text[], rate double precision, period interval, capacity double precision, counts double precision[], now timestamptz DEFAULT NULL,
			floor double precision DEFAULT 0, coalesced boolean DEFAULT true,
			OUT seen timestamptz, OUT at timestamptz, OUT early integer, OUT ord integer[], OUT value double precision[], OUT ts timestamptz[]
		)
		LANGUAGE plpgsql
		SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_material = off SET plan_cache_mode = force_generic_plan
		AS $body$
		#variable_conflict use_variable
		BEGIN
			seen := clock_timestamp();
			at := seen;
			WITH u AS (
				UPDATE ratelimit.limits AS r
				   SET value = least(capacity, r.value + date_part('epoch', seen - r.ts) * rate) - counts[i], ts = seen
				  FROM generate_series(1, cardinality(keys)) AS i
				 WHERE r.name = ANY (ARRAY[CASE WHEN i > 0 THEN name END]) AND r.key = keys[i] AND r.shard = 0 * i
				   AND (least(r.value, capacity) >= counts[i] OR least(capacity, r.value + date_part('epoch', seen - r.ts) * rate) >= counts[i])
				RETURNING i, r.value
			)
			SELECT array_agg(i), array_agg(u.value) INTO ord, value FROM u;
			early := cardinality(ord);
			ts := array_fill(seen, ARRAY[early]);
		END
		$body$`)
	return pool, err
}

// takeEach makes the rows of n keys by taking from each.
func takeEach(ctx context.Context, it *opened, n int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	all := keys(n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range 256 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(n) && ctx.Err() == nil; i = next.Add(1) {
				if _, err := it.take(ctx, all[i-1]); err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// coalescedCalendar compares calls for two limits, of which one differs in what a window is. It also prints both on the pool.
func coalescedCalendar(ctx context.Context, e *env) (outcome, error) {
	const goroutines = 64
	minute := ratelimit.TokenBucket("a minute", 1e9, time.Minute)
	month := ratelimit.CalendarWindow("a month", 1e9, ratelimit.Month, ratelimit.Zone("Europe/Berlin"))
	window := ratelimit.FixedWindow("30 days", 1e9, 30*24*time.Hour)
	open := func(name string, limit ratelimit.Limit, coalesces bool) (*side, error) {
		pool, err := e.newPool(ctx, plenty(goroutines).conns, nil)
		if err != nil {
			return nil, err
		}
		var db ratelimit.DB = pool
		if coalesces {
			coalescer := &ratelimit.Coalescer{Pool: pool}
			e.undos = append(e.undos, func() error { return coalescer.Close(context.Background()) })
			db = coalescer
		}
		return &side{name: name, goroutines: goroutines, call: func(ctx context.Context, worker int) error {
			_, err := limits.Consume(ctx, db, limit.Key(ownKey(worker)), minute.Key(ownKey(worker)))
			return err
		}}, nil
	}
	var sides []*side
	for _, s := range []struct {
		name      string
		limit     ratelimit.Limit
		coalesces bool
	}{
		{"a month and a minute", month, true}, {"30 days and a minute", window, true},
		{"a month and a minute, on the pool", month, false}, {"30 days and a minute, on the pool", window, false},
	} {
		it, err := open(s.name, s.limit, s.coalesces)
		if err != nil {
			return outcome{}, err
		}
		sides = append(sides, it)
	}
	c, err := e.compare(ctx, 2*pairs, slice, sides[0], sides[1], sides[2:]...)
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	result.note += fmt.Sprintf("; on the pool %s/s : %s/s (a month / 30 days: %.3g); a month, coalesced / on the pool: %.3g",
		thousands(c.totals[2].perSecond()), thousands(c.totals[3].perSecond()), c.ratio(2, 3), c.ratio(0, 2))
	return result, nil
}

func coalescedIdle(ctx context.Context, e *env) (outcome, error) {
	coalesced, err := openCoalesced(ctx, e, plenty(1))
	if err != nil {
		return outcome{}, err
	}
	direct, err := openDirect(ctx, e, plenty(1))
	if err != nil {
		return outcome{}, err
	}
	c, err := e.compare(ctx, 2*pairs, slice, coalesced.side("coalesced", 1, hotKey), direct.side("direct", 1, hotKey))
	if err != nil {
		return outcome{}, err
	}
	return c.outcome(), nil
}

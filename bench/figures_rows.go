package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// shardUtilization lets goroutines take from a limit that is not refilled until the first of them is denied.
func shardUtilization(ctx context.Context, e *env) (outcome, error) {
	const capacity, goroutines, rounds = 10_000, 16, 3
	limit := ratelimit.TokenBucket("limit", 1, 1000*time.Hour, ratelimit.Capacity(capacity), ratelimit.Shards(10))
	pool, err := e.newPool(ctx, goroutines, nil)
	if err != nil {
		return outcome{}, err
	}
	var sum float64
	var befores []string
	for round := range rounds {
		before, err := untilDenied(ctx, goroutines, func(ctx context.Context) (bool, error) {
			_, err := limits.Consume(ctx, pool, limit.Key(fmt.Sprint(round)))
			return decision(err)
		})
		if err != nil {
			return outcome{}, err
		}
		sum += float64(before) / capacity
		fmt.Fprintf(e.out, "  %s granted of %s before the first denial\n", thousands(float64(before)), thousands(capacity))
		befores = append(befores, thousands(float64(before)))
	}
	return outcome{value: sum / rounds, note: strings.Join(befores, ", ") + " of " + thousands(capacity)}, nil
}

// untilDenied counts what was granted when the first of the goroutines is denied.
func untilDenied(ctx context.Context, goroutines int, take func(ctx context.Context) (bool, error)) (before int64, err error) {
	var granted atomic.Int64
	var over atomic.Bool
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for !over.Load() {
				ok, err := take(ctx)
				if err == nil && ok {
					granted.Add(1)
					continue
				}
				mu.Lock()
				defer mu.Unlock()
				if !over.Swap(true) {
					before, failed = granted.Load(), err
				}
				return
			}
		})
	}
	wg.Wait()
	return before, failed
}

// denialsVsForUpdate compares denials of a key that is empty.
func denialsVsForUpdate(ctx context.Context, e *env) (outcome, error) {
	const goroutines = 16
	limit := ratelimit.TokenBucket("limit", 1, 1000*time.Hour)
	pool, err := e.newPool(ctx, goroutines, nil)
	if err != nil {
		return outcome{}, err
	}
	direct := func(ctx context.Context) (bool, error) {
		_, err := limits.Consume(ctx, pool, limit.Key("hot"))
		return decision(err)
	}
	it, err := openForUpdate(ctx, e, setting{burst: 1, conns: goroutines}) // never refilled
	if err != nil {
		return outcome{}, err
	}
	forUpdate := func(ctx context.Context) (bool, error) { return it.take(ctx, "hot") }
	denials := func(name string, take func(ctx context.Context) (bool, error)) *side {
		return &side{name: name, goroutines: goroutines, call: func(ctx context.Context, _ int) error {
			granted, err := take(ctx)
			if err == nil && granted {
				err = errors.New("granted, though there are no tokens")
			}
			return err
		}}
	}
	for _, take := range []func(ctx context.Context) (bool, error){direct, forUpdate} {
		if granted, err := take(ctx); err != nil || !granted { // the only token
			return outcome{}, fmt.Errorf("granted: %v, %w", granted, err)
		}
	}
	c, err := compare(ctx, e.out, 2*pairs, slice, denials("txlimit, direct", direct), denials("FOR UPDATE", forUpdate))
	if err != nil {
		return outcome{}, err
	}
	return c.outcome(), nil
}

// tenMillionRows compares on tables that are larger than Postgres' own cache. Beside them are the floors of tx_own_keys. Each
// side has a table of its own: the first change of a page after a checkpoint costs the most, and of a table that two sides share
// each has fewer of them.
func tenMillionRows(ctx context.Context, e *env) (outcome, error) {
	const n, goroutines, step = 10_000_000, 16, 1_000_000
	o := plenty(goroutines)
	pick := anyKey(n)
	tables := []string{"rate_limits", "counters", "counters", "rate_limits"}
	pools := make([]*pgxpool.Pool, len(tables))
	for i := range pools {
		var err error
		if pools[i], err = e.newPool(ctx, goroutines, nil); err != nil {
			return outcome{}, err
		}
	}
	// In turn: a kernel that is short of memory, or told to save it, drops what was read first.
	begin := time.Now()
	for from := 0; from < n; from += step {
		for i, table := range tables {
			if _, err := pools[i].Exec(ctx, `INSERT INTO `+table+` (name, key, shard, shards, value, ts)
				SELECT 'limit', i::text, 0, 1, 1e9, now() FROM generate_series($1::integer, $2::integer) AS i`, from, from+step-1); err != nil {
				return outcome{}, err
			}
		}
		fmt.Fprintf(e.out, "  %s rows in each table after %s\n", thousands(float64(from+step)), short(time.Since(begin)))
	}
	for i, table := range tables {
		if _, err := pools[i].Exec(ctx, `VACUUM ANALYZE `+table); err != nil {
			return outcome{}, err
		}
	}
	if err := e.checkpoint(ctx); err != nil {
		return outcome{}, err
	}
	rateLimits, counters, forLeast, forHand := pools[0], pools[1], pools[2], pools[3]
	limit := o.limit()
	on := func(name string, call func(ctx context.Context, key string) error) *side {
		return &side{name: name, goroutines: goroutines, call: func(ctx context.Context, worker int) error { return call(ctx, pick(worker)) }}
	}
	update := on("bare UPDATE", func(ctx context.Context, key string) error { return bareUpdate(ctx, counters, key) })
	// A checkpoint comes every few seconds and takes as long: both of a pair are mostly in one, or neither.
	c, err := compare(ctx, e.out, 2*manyPairs, shortSlice,
		on("txlimit", func(ctx context.Context, key string) error {
			_, err := limits.Consume(ctx, rateLimits, limit.Key(key))
			return err
		}),
		update,
		on(byLeast.name, func(ctx context.Context, key string) error { return decideInFunction(ctx, forLeast, key) }),
		on(byHand.name, func(ctx context.Context, key string) error { return consumeByHand(ctx, forHand, key) }))
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	result.note += fmt.Sprintf("; the least function that decides comes to %.3g, of which the library comes to %.3g; the library's function, asked by hand, to %.3g, of which the library comes to %.3g",
		c.ratio(2, 1), c.ratio(0, 2), c.ratio(3, 1), c.ratio(0, 3))
	// Coalesced only afterwards: that changes more pages in a turn than the others do in theirs.
	coalesced := coalescedOn(e, &ratelimit.Coalescer{Pool: rateLimits}, o).side("txlimit, coalesced", goroutines, pick)
	c, err = compare(ctx, e.out, manyPairs, shortSlice, coalesced, update)
	if err != nil {
		return outcome{}, err
	}
	result.note += fmt.Sprintf("; through a Coalescer, %.3g of the bare UPDATE beside it", c.ratio(0, 1))
	return result, nil
}

// overGrant sums what this library's ways granted too much.
func overGrant(ctx context.Context, e *env) (outcome, error) {
	const d = 2 * time.Second
	o := setting{perSecond: grantRate, burst: grantBurst, conns: grantGoroutines, goroutines: grantGoroutines}
	sharded := o.limit(ratelimit.Shards(3))
	ways := []contender{
		{name: "direct", open: openDirect},
		{name: "direct, 3 shards", open: func(ctx context.Context, e *env, o setting) (*opened, error) { return openDirectOn(ctx, e, o, sharded) }},
		{name: "coalesced", open: openCoalesced},
		{name: "coalesced, async commit", open: openCoalescedAsync},
	}
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		at := ratelimit.Isolation(level)
		add := func(name string, open func(ctx context.Context, e *env, o setting) (*opened, error)) {
			ways = append(ways, contender{name: name + ", " + string(level), open: open})
		}
		add("InTx", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openInTxAt(ctx, e, o, o.limit(), at)
		})
		add("InTx, 3 shards", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openInTxAt(ctx, e, o, sharded, at)
		})
		add("Hot", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openQueuedOn(ctx, e, o, o.limit(), at)
		})
		add("Hot, 3 shards", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openQueuedOn(ctx, e, o, sharded, at)
		})
		add("SendTx", func(ctx context.Context, e *env, o setting) (*opened, error) { return openBatchedAt(ctx, e, o, at) })
	}
	excess := 0
	var found []string
	for _, way := range ways {
		it, err := way.open(ctx, e, o)
		if err != nil {
			return outcome{}, err
		}
		g, err := countGrants(ctx, d, grantGoroutines, func(ctx context.Context) (bool, error) { return it.take(ctx, "hot") })
		if err = errors.Join(err, e.undo(ctx)); err != nil {
			return outcome{}, fmt.Errorf("%s: %w", way.name, err)
		}
		fmt.Fprintf(e.out, "  %-32s granted %v\n", way.name, g)
		excess += g.excess()
		found = append(found, fmt.Sprintf("%s: %v", way.name, g))
	}
	return outcome{value: float64(excess), note: strings.Join(found, "; ")}, nil
}

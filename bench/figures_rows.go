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

// shardUtilization lets goroutines take from a limit that does not refill, until the first of them is denied.
func shardUtilization(ctx context.Context, e *env) (outcome, error) {
	const goroutines, rounds = 16, 3
	capacity := float64(e.few(10_000))
	limit := ratelimit.TokenBucket("sharded", 1, 1000*time.Hour, ratelimit.Capacity(capacity), ratelimit.Shards(10))
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

// untilDenied counts the grants until the first goroutine is denied.
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

// denialsVsForUpdate compares denials of an empty key.
func denialsVsForUpdate(ctx context.Context, e *env) (outcome, error) {
	const goroutines = 16
	limit := ratelimit.TokenBucket("empty", 1, 1000*time.Hour)
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
				err = errors.New("granted, although there are no tokens")
			}
			return err
		}}
	}
	for _, take := range []func(ctx context.Context) (bool, error){direct, forUpdate} {
		if granted, err := take(ctx); err != nil || !granted { // the only token
			return outcome{}, fmt.Errorf("granted: %v, %w", granted, err)
		}
	}
	c, err := e.compare(ctx, 2*pairs, slice, denials("txlimit, direct", direct), denials("FOR UPDATE", forUpdate))
	if err != nil {
		return outcome{}, err
	}
	return c.outcome(), nil
}

// calendarVsWindow compares two limits that differ only in what a window is.
func calendarVsWindow(ctx context.Context, e *env) (outcome, error) {
	n := e.few(10_000)
	pick := ownKeys(n)
	open := func(name string, limit ratelimit.Limit) (*side, error) {
		pool, err := e.newPool(ctx, txGoroutines, nil)
		if err != nil {
			return nil, err
		}
		return &side{name: name, goroutines: txGoroutines, call: func(ctx context.Context, worker int) error {
			_, err := limits.Consume(ctx, pool, limit.Key(pick(worker)))
			return err
		}}, fill(ctx, pool, "ratelimit.limits", limit.Name(), n)
	}
	month, err := open("month", ratelimit.CalendarWindow("month", 1e9, ratelimit.Month, ratelimit.Zone("Europe/Berlin")))
	if err != nil {
		return outcome{}, err
	}
	window, err := open("window of 30 days", ratelimit.FixedWindow("window", 1e9, 30*24*time.Hour))
	if err != nil {
		return outcome{}, err
	}
	c, err := e.compare(ctx, manyPairs, shortSlice, month, window)
	if err != nil {
		return outcome{}, err
	}
	return c.outcome(), nil
}

// tenMillionRows compares on tables that are larger than Postgres' own cache. The floors of tx_own_keys run beside them. Each side has
// its own table. The first change of a page after a checkpoint costs most, and two sides that share a table would have fewer of these
// each.
func tenMillionRows(ctx context.Context, e *env) (outcome, error) {
	const goroutines = 16
	n, step := e.few(10_000_000), e.few(1_000_000)
	o := plenty(goroutines)
	pick := anyKey(n)
	tables := []string{"ratelimit.limits", "counters", "counters", "ratelimit.limits"}
	pools := make([]*pgxpool.Pool, len(tables))
	for i := range pools {
		var err error
		if pools[i], err = e.newPool(ctx, goroutines, nil); err != nil {
			return outcome{}, err
		}
	}
	// Fill the tables in turn: a kernel that is short of memory, or told to save it, drops the pages that were read first.
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
	limit := o.limit(1)
	on := func(name string, call func(ctx context.Context, key string) error) *side {
		return &side{name: name, goroutines: goroutines, call: func(ctx context.Context, worker int) error { return call(ctx, pick(worker)) }}
	}
	update := on("bare UPDATE", func(ctx context.Context, key string) error { return bareUpdate(ctx, counters, key) })
	// A checkpoint comes every few seconds and takes as long. Mostly, both slices of a short pair are in a checkpoint, or neither.
	c, err := e.compare(ctx, 2*manyPairs, shortSlice,
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
	result := c.share(2)
	result.note += fmt.Sprintf("; of a bare UPDATE: the library %.3g, the minimal function %.3g, the library's function called by hand %.3g",
		c.ratio(0, 1), c.ratio(2, 1), c.ratio(3, 1))
	// The coalescer runs only afterwards, since it changes more pages in a turn than the others do.
	coalesced := coalescedOn(e, &ratelimit.Coalescer{Pool: rateLimits}, o).side("txlimit, coalesced", goroutines, pick)
	c, err = e.compare(ctx, manyPairs, shortSlice, coalesced, update)
	if err != nil {
		return outcome{}, err
	}
	result.note += fmt.Sprintf("; through a Coalescer / bare UPDATE: %.3g", c.ratio(0, 1))
	return result, nil
}

// overGrant sums the grants beyond the bound over all ways to call this library.
func overGrant(ctx context.Context, e *env) (outcome, error) {
	d := e.moment(2 * time.Second)
	o := setting{perSecond: grantRate, burst: grantBurst, conns: grantGoroutines, goroutines: grantGoroutines}
	sharded := o.limit(3)
	ways := []contender{
		{name: "direct", open: openDirect},
		{name: "direct, 3 shards", open: func(ctx context.Context, e *env, o setting) (*opened, error) { return openDirectOn(ctx, e, o, sharded) }},
		{name: "coalesced", open: openCoalesced},
		{name: "coalesced, async commit", open: openCoalescedAsync},
		{name: "coalesced, Ahead", open: openAhead}, // below 100, every call is asked
	}
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		at := ratelimit.Isolation(level)
		add := func(name string, open func(ctx context.Context, e *env, o setting) (*opened, error)) {
			ways = append(ways, contender{name: name + ", " + string(level), open: open})
		}
		add("InTx", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openInTxAt(ctx, e, o, o.limit(1), at)
		})
		add("InTx, 3 shards", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openInTxAt(ctx, e, o, sharded, at)
		})
		add("Hot", func(ctx context.Context, e *env, o setting) (*opened, error) {
			return openQueuedOn(ctx, e, o, o.limit(1), at)
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

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// byFunction has a clock, which only the function takes.
var byFunction = ratelimit.Limiter{Clock: time.Now}

// poolOwnKeys compares calls that are transactions of their own. Beside them run the same calls by the function alone, which is what
// calls in a transaction send, and the UPDATE of the library by hand.
func poolOwnKeys(ctx context.Context, e *env) (outcome, error) {
	n := e.few(100_000)
	all := keys(n)
	limit := plenty(0).limit(1)
	on := func(name, table string, goroutines int, call func(ctx context.Context, pool *pgxpool.Pool, key string) error) (*side, error) {
		pool, err := e.newPool(ctx, min(goroutines, txGoroutines), nil)
		if err != nil {
			return nil, err
		}
		if err := fill(ctx, pool, table, "limit", n); err != nil {
			return nil, err
		}
		turns := make([]int, goroutines)
		share := n / goroutines
		return &side{name: name, goroutines: goroutines, call: func(ctx context.Context, worker int) error {
			turns[worker] = (turns[worker] + 7919) % share
			return call(ctx, pool, all[worker*share+turns[worker]])
		}}, nil
	}
	with := func(goroutines int) (*comparison, error) {
		var sides []*side
		for _, kind := range []struct {
			name, table string
			call        func(ctx context.Context, pool *pgxpool.Pool, key string) error
		}{
			{"Consume", "ratelimit.limits", func(ctx context.Context, pool *pgxpool.Pool, key string) error {
				_, err := limits.Consume(ctx, pool, limit.Key(key))
				return err
			}},
			{"a bare UPDATE", "counters", func(ctx context.Context, pool *pgxpool.Pool, key string) error { return bareUpdate(ctx, pool, key) }},
			{"Consume by the function", "ratelimit.limits", func(ctx context.Context, pool *pgxpool.Pool, key string) error {
				_, err := byFunction.Consume(ctx, pool, limit.Key(key))
				return err
			}},
			{"an UPDATE that decides, by hand", "counters", func(ctx context.Context, pool *pgxpool.Pool, key string) error { return decideByUpdate(ctx, pool, key) }},
		} {
			s, err := on(kind.name, kind.table, goroutines, kind.call)
			if err != nil {
				return nil, err
			}
			sides = append(sides, s)
		}
		return e.compare(ctx, manyPairs, shortSlice, sides[0], sides[1], sides[2:]...)
	}
	c, err := with(64)
	if err != nil {
		return outcome{}, err
	}
	result := c.outcome()
	result.note += fmt.Sprintf("; by the function alone %.3g, an UPDATE that decides, by hand, %.3g", c.ratio(2, 1), c.ratio(3, 1))
	for _, goroutines := range []int{16, 1} {
		if c, err = with(goroutines); err != nil {
			return outcome{}, err
		}
		result.note += fmt.Sprintf("; %d goroutines: %.3g, %.3g, %.3g", goroutines, c.ratio(0, 1), c.ratio(2, 1), c.ratio(3, 1))
	}
	for _, rare := range []struct {
		name string
		pick func() string
		call ratelimit.Limit
	}{
		{"denials that nobody expects", func() string { return all[rand.IntN(n)] }, ratelimit.TokenBucket("limit", 1e-9, time.Second, ratelimit.Capacity(1))},
		{"first uses", func() string { return strconv.FormatUint(rand.Uint64(), 36) }, ratelimit.TokenBucket("another limit", 1e9, time.Second)},
	} {
		var sides []*side
		for _, l := range []*ratelimit.Limiter{new(ratelimit.Limiter), {Clock: time.Now}} {
			pool, err := e.newPool(ctx, txGoroutines, nil)
			if err != nil {
				return outcome{}, err
			}
			if err := fill(ctx, pool, "ratelimit.limits", "limit", n); err != nil {
				return outcome{}, err
			}
			if _, err := pool.Exec(ctx, `UPDATE ratelimit.limits SET value = 0`); err != nil {
				return outcome{}, err
			}
			sides = append(sides, &side{name: rare.name, goroutines: txGoroutines, call: func(ctx context.Context, _ int) error {
				_, err := l.Consume(ctx, pool, rare.call.Key(rare.pick()))
				_, err = decision(err)
				return err
			}})
		}
		if c, err = e.compare(ctx, manyPairs, shortSlice, sides[0], sides[1]); err != nil {
			return outcome{}, err
		}
		result.note += fmt.Sprintf("; %s: %.3g of the function alone", rare.name, c.ratio(0, 1))
	}
	return result, nil
}

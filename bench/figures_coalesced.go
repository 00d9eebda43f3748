package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// coalescedVsRedis compares the coalescer with go-redis, and has rueidis run beside them.
func coalescedVsRedis(goroutines int, pick func(worker int) string, fillKeys int) func(ctx context.Context, e *env) (outcome, error) {
	return func(ctx context.Context, e *env) (outcome, error) {
		ways := []contender{
			{name: "txlimit, coalesced", open: openCoalesced},
			{name: "Redis, EVALSHA, go-redis", open: openGoRedis},
			{name: "Redis, EVALSHA, rueidis", open: openRueidis},
		}
		sides := make([]*side, len(ways))
		for i, way := range ways {
			it, err := way.open(ctx, e, plenty(goroutines))
			if err != nil {
				return outcome{}, err
			}
			if err := takeEach(ctx, it, fillKeys); err != nil {
				return outcome{}, err
			}
			sides[i] = it.side(way.name, goroutines, pick)
		}
		c, err := compare(ctx, e.out, 2*pairs, slice, sides[0], sides[1], sides[2])
		if err != nil {
			return outcome{}, err
		}
		result := c.outcome()
		rueidis := c.beside[0].perSecond()
		result.note += fmt.Sprintf("; p99 %s : %s; rueidis %s/s, to which the ratio is %.3g", short(c.a.latencies.quantile(0.99)),
			short(c.b.latencies.quantile(0.99)), thousands(rueidis), c.a.perSecond()/rueidis)
		return result, nil
	}
}

// takeEach makes the rows of so many keys, by taking from each.
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

func coalescedIdle(ctx context.Context, e *env) (outcome, error) {
	coalesced, err := openCoalesced(ctx, e, plenty(1))
	if err != nil {
		return outcome{}, err
	}
	direct, err := openDirect(ctx, e, plenty(1))
	if err != nil {
		return outcome{}, err
	}
	c, err := compare(ctx, e.out, 2*pairs, slice, coalesced.side("coalesced", 1, hotKey), direct.side("direct", 1, hotKey))
	if err != nil {
		return outcome{}, err
	}
	return c.outcome(), nil
}

package main

import (
	"context"

	"github.com/txlimit/txlimit/ratelimit"
)

// openCoalesced opens a coalescer over a pool.
func openCoalesced(ctx context.Context, e *env, o setting) (*opened, error) {
	return openCoalescedWith(ctx, e, o)
}

// openCoalescedAsync opens one whose commits are not waited for.
func openCoalescedAsync(ctx context.Context, e *env, o setting) (*opened, error) {
	return openCoalescedWith(ctx, e, o, ratelimit.AsyncCommit())
}

func openCoalescedWith(ctx context.Context, e *env, o setting, options ...ratelimit.CoalescerOption) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	coalescer := ratelimit.NewCoalescer(pool, options...)
	e.undos = append(e.undos, func() error { coalescer.Close(); return nil })
	limit := o.limit()
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		_, err := limits.Consume(ctx, coalescer, limit.Key(key))
		return decision(err)
	}}, nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// limits is the library's limiter. Its zero value is ready to use.
var limits ratelimit.Limiter

// often is a number of attempts that no transaction here reaches.
const often = 1_000_000

// limit is the limit of a setting. The one of plenty is "limit", which the SQL of figures names. Each other definition has a name of its
// own, since a Limiter refuses two definitions of one name.
func (o setting) limit(shards int) ratelimit.Limit {
	name := "limit"
	if usual := plenty(0); o.perSecond != usual.perSecond || o.burst != usual.burst || shards > 1 {
		name = fmt.Sprintf("limit %d per s, %d, %d shards", o.perSecond, o.burst, shards)
	}
	return ratelimit.TokenBucket(name, float64(o.perSecond), time.Second, ratelimit.Capacity(float64(o.burst)), ratelimit.Shards(shards))
}

// decision turns an error of Consume into the decision.
func decision(err error) (granted bool, _ error) {
	if err == nil {
		return true, nil
	}
	if errors.Is(err, ratelimit.ErrDenied) {
		return false, nil
	}
	return false, err
}

func openDirect(ctx context.Context, e *env, o setting) (*opened, error) {
	return openDirectOn(ctx, e, o, o.limit(1))
}

// openDirectOn opens Consume on the pool, for any limit.
func openDirectOn(ctx context.Context, e *env, o setting, limit ratelimit.Limit) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		_, err := limits.Consume(ctx, pool, limit.Key(key))
		return decision(err)
	}}, nil
}

func openInTx(ctx context.Context, e *env, o setting) (*opened, error) {
	return openInTxAt(ctx, e, o, o.limit(1), ratelimit.Isolation(pgx.ReadCommitted))
}

func openQueued(ctx context.Context, e *env, o setting) (*opened, error) {
	return openQueuedOn(ctx, e, o, o.limit(1))
}

// openQueuedOn opens InTx with Hot for the key that it will take from, for any limit.
func openQueuedOn(ctx context.Context, e *env, o setting, limit ratelimit.Limit, options ...ratelimit.TxOption) (*opened, error) {
	options = slices.Clip(append(options, ratelimit.Attempts(often)))
	return openInTxBy(ctx, e, o, limit, func(key string) []ratelimit.TxOption {
		return append(options, ratelimit.Hot(limit.Key(key)))
	})
}

// openInTxAt opens InTx with options, for any limit.
func openInTxAt(ctx context.Context, e *env, o setting, limit ratelimit.Limit, options ...ratelimit.TxOption) (*opened, error) {
	options = append(options, ratelimit.Attempts(often))
	return openInTxBy(ctx, e, o, limit, func(string) []ratelimit.TxOption { return options })
}

// openInTxBy opens InTx with options that depend on the key.
func openInTxBy(ctx context.Context, e *env, o setting, limit ratelimit.Limit, options func(key string) []ratelimit.TxOption) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	var it opened
	it.take = func(ctx context.Context, key string) (bool, error) {
		attempts := 0
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			if attempts++; attempts > 1 {
				it.retries.Add(1)
			}
			_, err := limits.Consume(ctx, tx, limit.Key(key))
			return err
		}, options(key)...)
		return decision(err)
	}
	return &it, nil
}

func openBatched(ctx context.Context, e *env, o setting) (*opened, error) {
	return openBatchedAt(ctx, e, o, ratelimit.Isolation(pgx.ReadCommitted))
}

// openBatchedAt opens a transaction that consumes once and is sent in one round trip.
func openBatchedAt(ctx context.Context, e *env, o setting, options ...ratelimit.TxOption) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	limit := o.limit(1)
	options = append(options, ratelimit.Attempts(often))
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		var batch pgx.Batch
		if _, err := limits.QueueConsume(ctx, &batch, limit.Key(key)); err != nil {
			return false, err
		}
		return decision(limits.SendTx(ctx, pool, &batch, options...))
	}}, nil
}

// openCoalesced opens a coalescer over a pool.
func openCoalesced(ctx context.Context, e *env, o setting) (*opened, error) {
	return openCoalescedWith(ctx, e, o, false)
}

// openCoalescedAsync opens a coalescer with AsyncCommit.
func openCoalescedAsync(ctx context.Context, e *env, o setting) (*opened, error) {
	return openCoalescedWith(ctx, e, o, true)
}

// aheadOf is what the figures take ahead.
const aheadOf = 50 * time.Millisecond

// openAhead opens a coalescer with Ahead.
func openAhead(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	return coalescedOn(e, &ratelimit.Coalescer{Pool: pool, Ahead: aheadOf}, o), nil
}

// openUnlimited opens a coalescer for a limit that needs no database.
func openUnlimited(ctx context.Context, e *env, o setting) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	coalescer, limit := &ratelimit.Coalescer{Pool: pool}, ratelimit.Unlimited("unlimited")
	e.undos = append(e.undos, func() error { return coalescer.Close(context.Background()) })
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		_, err := limits.Consume(ctx, coalescer, limit.Key(key))
		return decision(err)
	}}, nil
}

func openCoalescedWith(ctx context.Context, e *env, o setting, async bool) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	return coalescedOn(e, &ratelimit.Coalescer{Pool: pool, AsyncCommit: async}, o), nil
}

func coalescedOn(e *env, coalescer *ratelimit.Coalescer, o setting) *opened {
	e.undos = append(e.undos, func() error { return coalescer.Close(context.Background()) })
	limit := o.limit(1)
	return &opened{take: func(ctx context.Context, key string) (bool, error) {
		_, err := limits.Consume(ctx, coalescer, limit.Key(key))
		return decision(err)
	}}
}

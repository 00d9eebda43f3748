package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// limits is the library's limiter, ready as it is.
var limits ratelimit.Limiter

// often is more attempts than any transaction here needs.
const often = 1_000_000

func (o setting) limit(options ...ratelimit.Option) ratelimit.Limit {
	return ratelimit.TokenBucket("limit", float64(o.perSecond), time.Second, append(options, ratelimit.Capacity(float64(o.burst)))...)
}

// decision makes of Consume's error the answer that it is.
func decision(err error) (granted bool, _ error) {
	if err == nil {
		return true, nil
	}
	if _, denied := errors.AsType[*ratelimit.ExceededError](err); denied {
		return false, nil
	}
	return false, err
}

func openDirect(ctx context.Context, e *env, o setting) (*opened, error) {
	return openDirectOn(ctx, e, o, o.limit())
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
	return openInTxAt(ctx, e, o, o.limit(), ratelimit.Isolation(pgx.ReadCommitted))
}

// openInTxAt opens InTx with options, on any limit.
func openInTxAt(ctx context.Context, e *env, o setting, limit ratelimit.Limit, options ...ratelimit.TxOption) (*opened, error) {
	pool, err := e.newPool(ctx, o.conns, o.tracer)
	if err != nil {
		return nil, err
	}
	options = append(options, ratelimit.Attempts(often))
	var it opened
	it.take = func(ctx context.Context, key string) (bool, error) {
		attempts := 0
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			if attempts++; attempts > 1 {
				it.retries.Add(1)
			}
			_, err := limits.Consume(ctx, tx, limit.Key(key))
			return err
		}, options...)
		return decision(err)
	}
	return &it, nil
}

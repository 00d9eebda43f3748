package integration_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// BenchmarkConsume is consume in its own transaction, 16 goroutines on 10,000 keys, against a bare UPDATE of the same rows
// in its place, in turn. `ratio` is its throughput by that of the UPDATE.
func BenchmarkConsume(b *testing.B) {
	limit := ratelimit.TokenBucket("limit", 1e9, time.Second)
	var limiter ratelimit.Limiter
	pool := newPool(b, 16)
	_, err := pool.Exec(b.Context(), `INSERT INTO rate_limits SELECT 'limit', i::text, 0, 1, 1e9, now() FROM generate_series(1, 10000) AS i`)
	if err != nil {
		b.Fatal(err)
	}
	const slice = 1000 // calls of one side before it is the other's turn
	var consumed, updated time.Duration
	for b.Loop() {
		consumed += inParallel(b, pool, slice, func(ctx context.Context, key string) error {
			_, err := limiter.Consume(ctx, pool, limit.Key(key))
			return err
		})
		updated += inParallel(b, pool, slice, func(ctx context.Context, key string) error {
			var value float64
			return pool.QueryRow(ctx, `UPDATE rate_limits SET value = value - 1 WHERE name = 'limit' AND key = $1 AND shard = 0 RETURNING value`, key).Scan(&value)
		})
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(b.N*slice)/consumed.Seconds(), "consume/s")
	b.ReportMetric(float64(b.N*slice)/updated.Seconds(), "update/s")
	b.ReportMetric(updated.Seconds()/consumed.Seconds(), "ratio")
}

func inParallel(b *testing.B, pool *pgxpool.Pool, calls int, call func(ctx context.Context, key string) error) time.Duration {
	b.Helper()
	begin := time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range pool.Config().MaxConns {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(calls); i = next.Add(1) {
				if err := call(b.Context(), fmt.Sprint(1+(i*7919)%10_000)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(begin)
}

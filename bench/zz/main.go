package main

import (
	"context"
	"fmt"
	"os"
	"math/rand/v2"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/txlimit/txlimit/ratelimit"
)

func main() {
	ctx := context.Background()
	cfg, _ := pgxpool.ParseConfig(os.Getenv("URL"))
	cfg.MaxConns = 16
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		panic(err)
	}
	var limits ratelimit.Limiter
	limit := ratelimit.TokenBucket("l", 1000, time.Second, ratelimit.Capacity(1e9))
	empty := ratelimit.TokenBucket("e", 1, 1000*time.Hour)
	limits.Consume(ctx, pool, empty.Key("x"))
	sides := map[string]func(ctx context.Context, tx pgx.Tx, key string) error{
		"none": func(ctx context.Context, tx pgx.Tx, key string) error { return nil },
		"bare": func(ctx context.Context, tx pgx.Tx, key string) error {
			var v float64
			return tx.QueryRow(ctx, `UPDATE counters SET value = value - 1 WHERE name = 'l' AND key = $1 AND shard = 0 RETURNING value`, key).Scan(&v)
		},
		"limit": func(ctx context.Context, tx pgx.Tx, key string) error {
			_, err := limits.Consume(ctx, tx, limit.Key(key))
			return err
		},
	}
	prof := os.Getenv("PROF")
	run := func(side string, d time.Duration) (float64, float64) {
		var ru0, ru1 syscall.Rusage
		syscall.Getrusage(syscall.RUSAGE_SELF, &ru0)
		f := sides[side]
		var n atomic.Int64
		var wg sync.WaitGroup
		end := time.Now().Add(d)
		for w := range 16 {
			wg.Go(func() {
				for time.Now().Before(end) {
					key := fmt.Sprint(1 + w + 16*rand.IntN(6000))
					if side == "deny" {
						limits.Consume(ctx, pool, empty.Key("x"))
						n.Add(1)
						continue
					}
					err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
						if err := f(ctx, tx, key); err != nil {
							return err
						}
						_, err := tx.Exec(ctx, "insert into biz(k, t) values ($1, $2)", key, "hello")
						return err
					})
					if err != nil {
						panic(err)
					}
					n.Add(1)
				}
			})
		}
		wg.Wait()
		syscall.Getrusage(syscall.RUSAGE_SELF, &ru1)
		cpu := time.Duration(ru1.Utime.Nano() + ru1.Stime.Nano() - ru0.Utime.Nano() - ru0.Stime.Nano())
		return float64(n.Load()) / d.Seconds(), float64(cpu.Microseconds()) / float64(n.Load())
	}
	names := os.Args[1:]
	if prof != "" {
		f, _ := os.Create(prof)
		pprof.StartCPUProfile(f)
		defer pprof.StopCPUProfile()
	}
	for r := range 6 {
		for i := range names {
			if r%2 == 1 {
				i = len(names) - 1 - i
			}
			s := names[i]
			a, b := run(s, 700*time.Millisecond)
			fmt.Printf("%-6s %7.0f/s  Go CPU %.1f us\n", s, a, b)
		}
	}
}

// Burst-credit does what DynamoDB does for provisioned tables. A table saves its unused capacity, for up to 300 seconds,
// and can spend it in a burst. This is a token bucket whose capacity is 300 times its rate.
//
//	go run ./examples/burst-credit
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const (
	provisioned = 100 // read units per second
	credit      = 300 // seconds for which unused units are kept
)

var (
	// Saving up takes 300 s, so the example has its own clock.
	now    = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	limits *ratelimit.Limiter // of Open

	readUnits = ratelimit.TokenBucket("readUnits", provisioned, time.Second, ratelimit.Capacity(credit*provisioned))
)

// read reads an item of a number of bytes. It costs one unit for each 4 KB or part of it, and half of that if the answer
// may be slightly out of date.
func read(ctx context.Context, pool *pgxpool.Pool, table string, size int, eventually bool) error {
	units := math.Ceil(float64(size) / 4096)
	if eventually {
		units /= 2
	}
	_, err := limits.Consume(ctx, pool, readUnits.Key(table).Count(units))
	return err
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "burst-credit", Limits: []ratelimit.Limit{readUnits},
		Clock:        func() time.Time { return now },
		NoBackground: true, // an application follows its overrides, and sweeps
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	clients := func(n int) (units float64, throttled int, err error) {
		const size, perRead = 300_000, 37 // bytes, and units (half of 74)
		reads := make([]error, n)
		reading, readCtx := errgroup.WithContext(ctx)
		for i := range n {
			reading.Go(func() error {
				err := read(readCtx, pool, "orders", size, true)
				if exceeded := (*ratelimit.DeniedError)(nil); errors.As(err, &exceeded) {
					reads[i], err = exceeded, nil
				}
				return err
			})
		}
		err = reading.Wait()
		for _, denied := range reads {
			if denied != nil {
				throttled++
			}
		}
		return float64(n-throttled) * perRead, throttled, err
	}

	fmt.Println("second  reads  units  throttled  saved up")
	for _, phase := range []struct {
		seconds int
		reads   int     // per second, all at once
		want    float64 // units in total
	}{
		{3, 2, 3 * 74}, // 74 units per second: fewer than provisioned
		{12, 80, 37 * math.Floor((30_000+1100)/37)}, // 2,960 per second, until the saved units and the refill are spent
		{60, 0, 0}, // idle
		{4, 80, 37 * math.Floor((20+6100+300)/37)}, // the rest, 61 saved seconds, and the refill
		{400, 0, 0},                           // a long idle time: only 300 seconds are kept
		{1, 1000, 37 * math.Floor(30_000/37)}, // everything at once
	} {
		total := 0.0
		for second := range phase.seconds {
			if phase.reads > 0 {
				units, throttled, err := clients(phase.reads)
				if err != nil {
					return err
				}
				total += units
				saved, err := limits.Balance(ctx, pool, readUnits.Key("orders"))
				if err != nil {
					return err
				}
				fmt.Printf("%6d %6d %6.0f %10d %9.0f\n", elapsed(), phase.reads, units, throttled, saved[0].Remaining)
			} else if second == 0 {
				fmt.Printf("   ... idle for %d seconds\n", phase.seconds)
			}
			now = now.Add(time.Second)
		}
		if total != phase.want {
			return fmt.Errorf("%v units until second %d, want %v", total, elapsed(), phase.want)
		}
	}
	return nil
}

// elapsed returns the seconds since the start of the example.
func elapsed() int { return int(now.Sub(time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)).Seconds()) }

// Burst-credit is what DynamoDB does for its provisioned tables: what a table does not use of its capacity is saved up, for up
// to 300 seconds, and can be spent in a burst. It is a token bucket whose capacity is 300 times its rate.
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
	credit      = 300 // seconds for which unused ones are kept
)

var (
	// It takes 300 s to save up and to spend what is told here: the story has a clock of its own.
	now    = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	limits = ratelimit.Limiter{Clock: func() time.Time { return now }}

	readUnits = ratelimit.TokenBucket("readUnits", provisioned, time.Second, ratelimit.Capacity(credit*provisioned))
)

// read reads an item of so many bytes: one unit for each 4 KB or part of it, half of that if it may be a little out of date.
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
	clients := func(n int) (units float64, throttled int, err error) {
		const size, perRead = 300_000, 37 // bytes, and units: half of 74
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
		reads   int     // per second, all of them at once
		want    float64 // units, all in all
	}{
		{3, 2, 3 * 74}, // 74 units per second: less than is provisioned
		{12, 80, 37 * math.Floor((30_000+1100)/37)}, // 2,960 per second, until what is saved up and what comes in are spent
		{60, 0, 0}, // idle
		{4, 80, 37 * math.Floor((20+6100+300)/37)}, // what was left, 61 seconds' worth that was saved up, and what comes in
		{400, 0, 0},                           // idle for long: no more than 300 seconds' worth is kept
		{1, 1000, 37 * math.Floor(30_000/37)}, // all of it in one go
	} {
		total := 0.0
		for second := range phase.seconds {
			if phase.reads > 0 {
				units, throttled, err := clients(phase.reads)
				if err != nil {
					return err
				}
				total += units
				saved, err := limits.Check(ctx, pool, readUnits.Key("orders").Count(0))
				if err != nil {
					return err
				}
				fmt.Printf("%6d %6d %6.0f %10d %9.0f\n", elapsed(), phase.reads, units, throttled, saved.Remaining)
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

// elapsed is for how many seconds the story has been going on.
func elapsed() int { return int(now.Sub(time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)).Seconds()) }

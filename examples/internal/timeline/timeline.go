// Package timeline compares what an example has done with the rate of its limit.
package timeline

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Event says that some tokens were taken or used at an instant.
type Event struct {
	At     time.Time
	Tokens float64
}

// Read collects the events that a query returns as (at, tokens), in order.
func Read(ctx context.Context, pool *pgxpool.Pool, query string) ([]Event, error) {
	rows, err := pool.Query(ctx, "SELECT * FROM ("+query+") AS events (at, tokens) ORDER BY at")
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Event])
}

// Burst returns the least b for which, over any span of time, the events took at most b + span * rate / period. That is the
// capacity of the smallest token bucket that would have let all of them pass. The events are in order.
func Burst(events []Event, rate float64, period time.Duration) float64 {
	level, most := 0.0, 0.0 // a bucket that taken tokens fill, and that drains at the rate
	for i, e := range events {
		if i > 0 {
			drained := e.At.Sub(events[i-1].At).Seconds() * rate / period.Seconds()
			level = max(0, level-drained)
		}
		level += e.Tokens
		most = max(most, level)
	}
	return most
}

// Left returns the tokens of a bucket, full at first, after the last of the events, which are in order.
func Left(events []Event, capacity, rate float64, period time.Duration) float64 {
	left := capacity
	for i, e := range events {
		if i > 0 {
			left = min(capacity, left+e.At.Sub(events[i-1].At).Seconds()*rate/period.Seconds())
		}
		left -= e.Tokens
	}
	return left
}

// Chart draws the tokens taken in each step from an instant on, one line a step, of at most 50 characters. The first line
// includes earlier events.
func Chart(events []Event, from time.Time, step time.Duration, label func(step int) string) string {
	var steps []float64
	for _, e := range events {
		n := max(0, int(e.At.Sub(from).Round(time.Millisecond)/step))
		for len(steps) <= n {
			steps = append(steps, 0)
		}
		steps[n] += e.Tokens
	}
	most := 0.0
	for _, tokens := range steps {
		most = max(most, tokens)
	}
	var chart strings.Builder
	for n, tokens := range steps {
		bar := strings.Repeat("#", int(math.Round(50*tokens/most)))
		fmt.Fprintf(&chart, "   %s %7.0f %s\n", label(n), tokens, bar)
	}
	return chart.String()
}

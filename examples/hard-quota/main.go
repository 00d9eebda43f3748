// Hard-quota keeps the quota of a third party: 100 calls per hour by its clock. It compares some limits: a token bucket
// with the same numbers spends up to rate + capacity in one of those hours, which is twice the quota.
//
//	go run ./examples/hard-quota
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

const quota = 100 // calls per hour

var (
	// The example takes hours, so it has its own clock. The third party uses the same clock.
	now    time.Time
	limits *ratelimit.Limiter // of Open

	onTheHour  = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) // the third party's hours begin on the hour, UTC
	strategies = []strategy{
		// This bucket saves up 100 tokens, and is refilled while they are spent.
		{"token bucket, 100 and 100 at once", ratelimit.TokenBucket("bucket", quota, time.Hour)},
		// Without a Start, windows begin at their own offset: one part of a window lies in one of the third party's hours,
		// the rest in the next.
		{"fixed window, on its own grid", ratelimit.FixedWindow("ownWindow", quota, time.Hour)},
		// This limit keeps the quota.
		{"fixed window, on the hour", ratelimit.FixedWindow("hisWindow", quota, time.Hour, ratelimit.Start(onTheHour))},
		// For a third party that counts over any 60 minutes: rate + capacity is the quota, and in the long run the speed is
		// half of it.
		{"token bucket, 50 and 50 at once", ratelimit.TokenBucket("halfBucket", quota/2, time.Hour, ratelimit.Capacity(quota/2))},
	}
)

type strategy struct {
	name  string
	limit ratelimit.Limit
}

// thirdParty counts the calls of each hour, and refuses calls above the quota.
type thirdParty struct {
	inHour  map[time.Time]int
	refused int
}

func (p *thirdParty) call() {
	hour := now.Truncate(time.Hour)
	p.inHour[hour]++
	if p.inHour[hour] > quota {
		p.refused++
	}
}

// callAll makes as many calls as the limit grants until the end, and returns their instants.
func callAll(ctx context.Context, pool *pgxpool.Pool, limit ratelimit.Limit, p *thirdParty, end time.Time) (calls []time.Time, err error) {
	for now.Before(end) {
		_, err := limits.Consume(ctx, pool, limit.Global())
		var exceeded *ratelimit.DeniedError
		switch {
		case errors.As(err, &exceeded) && !exceeded.RetryAt.IsZero():
			now = exceeded.RetryAt
		case err != nil:
			return nil, err
		default:
			p.call()
			calls = append(calls, now)
		}
	}
	return calls, nil
}

// busiest returns the most calls within any 60 minutes.
func busiest(calls []time.Time) (most int) {
	first := 0
	for i, at := range calls {
		for at.Sub(calls[first]) >= time.Hour {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	options := ratelimit.Options{
		Program:      "hard-quota",
		Clock:        func() time.Time { return now },
		NoBackground: true, // an application follows its overrides, and sweeps
	}
	for _, s := range strategies {
		options.Limits = append(options.Limits, s.limit)
	}
	opened, err := ratelimit.Open(ctx, pool, options)
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	for day, begin := range []time.Time{
		time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC),
		time.Date(2026, 7, 2, 12, 50, 0, 0, time.UTC), // after a day without calls
	} {
		noon := begin.Truncate(time.Hour)
		fmt.Printf("as many calls as the limit grants, from %s to 15:00     12h  13h  14h  refused  in any 60 minutes\n", begin.Format("15:04"))
		for i, s := range strategies {
			now = begin
			p := &thirdParty{inHour: map[time.Time]int{}}
			calls, err := callAll(ctx, pool, s.limit, p, noon.Add(3*time.Hour))
			if err != nil {
				return err
			}
			hour := func(n int) int { return p.inHour[noon.Add(time.Duration(n)*time.Hour)] }
			fmt.Printf("   %-52s %4d %4d %4d %8d %18d\n", s.name, hour(0), hour(1), hour(2), p.refused, busiest(calls))

			switch {
			case i == 0 && day == 0 && hour(0) != 2*quota-1: // the 200th call comes at the start of the next hour
				return fmt.Errorf("%s: %d calls in the first hour, want %d", s.name, hour(0), 2*quota-1)
			case i == 2 && (p.refused > 0 || hour(0) != quota || hour(1) != quota || hour(2) != quota):
				return fmt.Errorf("%s: %v, %d of them refused, want %d each and none", s.name, p.inHour, p.refused, quota)
			case i == 3 && busiest(calls) > quota:
				return fmt.Errorf("%s: %d calls within 60 minutes, more than %d", s.name, busiest(calls), quota)
			}
		}
	}
	return nil
}

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres/procstat"
	"github.com/txlimit/txlimit/ratelimit"
)

// holdVsTwoConsumes compares processor time, since both are two round trips and two commits. The sides take turns.
func holdVsTwoConsumes(ctx context.Context, e *env) (outcome, error) {
	limit, pick, n := plenty(0).limit(1), anyKey(e.few(10_000)), 0
	open := func(call func(ctx context.Context, pool *pgxpool.Pool, request ratelimit.Request) error) (*pgxpool.Pool, func(context.Context, int) error, error) {
		pool, err := e.newPool(ctx, 2, nil)
		if err != nil {
			return nil, nil, err
		}
		return pool, func(ctx context.Context, _ int) error { return call(ctx, pool, limit.Key(pick(0))) }, fill(ctx, pool, "ratelimit.limits", limit.Name(), e.few(10_000))
	}
	pool, hold, err := open(func(ctx context.Context, pool *pgxpool.Pool, request ratelimit.Request) error {
		n++
		held, err := limits.Hold(ctx, pool, strconv.Itoa(n), time.Minute, request)
		if err != nil {
			return err
		}
		_, err = limits.Settle(ctx, pool, held.Token, request.Count(1))
		return err
	})
	if err != nil {
		return outcome{}, err
	}
	_, consume, err := open(func(ctx context.Context, pool *pgxpool.Pool, request ratelimit.Request) error {
		for range 2 {
			if _, err := limits.Consume(ctx, pool, request); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return outcome{}, err
	}
	postmaster, err := findPostmaster(ctx, pool)
	if err != nil {
		return outcome{}, err
	}
	spent := func() (time.Duration, error) {
		server, err := procstat.Family(postmaster)
		if err != nil {
			return 0, err
		}
		self, err := procstat.Read(os.Getpid())
		return server + self.CPU, err
	}
	sides := []*side{{name: "hold and settle", goroutines: 1, call: hold}, {name: "two consumes", goroutines: 1, call: consume}}
	cost := make([][]float64, len(sides)) // microseconds of processors
	order := []int{0, 1}
	turns := pairs
	if e.quick {
		turns = 1
	}
	for turn := range turns + 1 {
		for _, i := range order {
			before, err := spent()
			if err != nil {
				return outcome{}, err
			}
			t, err := sides[i].run(ctx, e.moment(2*slice))
			if err != nil {
				return outcome{}, err
			}
			after, err := spent()
			if err != nil {
				return outcome{}, err
			}
			if turn > 0 { // the first warms up
				cost[i] = append(cost[i], float64((after-before).Microseconds())/float64(max(t.calls, 1)))
			}
		}
		slices.Reverse(order)
	}
	ratios := make([]float64, len(cost[0]))
	for i := range ratios {
		ratios[i] = cost[0][i] / cost[1][i]
	}
	note := fmt.Sprintf("%.0f µs : %.0f µs, %d pairs: %.3g to %.3g", median(cost[0]), median(cost[1]), len(ratios), slices.Min(ratios), slices.Max(ratios))
	fmt.Fprintf(e.out, "  %s\n", note)
	return outcome{median(ratios), note}, nil
}

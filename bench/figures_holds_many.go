package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/dbsqlc"
	"github.com/txlimit/txlimit/ratelimit"
)

// manyHolds opens a key all of whose slots are held, n of them, by holds that end in an hour.
func manyHolds(ctx context.Context, e *env) (pool *pgxpool.Pool, slots ratelimit.Request, n int, err error) {
	if pool, err = e.newPool(ctx, 2, nil); err != nil {
		return nil, slots, 0, err
	}
	n = e.few(10_000)
	limit := ratelimit.Slots("slots", n)
	for _, sql := range []string{
		fmt.Sprintf(`INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('slots', 'key', 0, 1, -%d, now())`, n),
		fmt.Sprintf(`INSERT INTO ratelimit.holds (name, key, id, state, unit, token, count, taken_at, rest, part, until)
			SELECT 'slots', 'key', i::text, 'held', 'slots', %s, 1, now(), -i, 1, now() + interval '1 hour' FROM generate_series(1, %d) AS i`, tokenOfMany, n),
		"VACUUM ANALYZE ratelimit.limits, ratelimit.holds",
	} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			return nil, slots, 0, err
		}
	}
	return pool, limit.Key("key"), n, nil
}

const tokenOfMany = `'00000000-0000-4000-8000-000000000000'`

// milliseconds is the median of the times that a call takes.
func milliseconds(e *env, times int, call func() error) (outcome, error) {
	if e.quick {
		times = 1
	}
	took := make([]float64, times)
	for i := range took {
		begin := time.Now()
		if err := call(); err != nil {
			return outcome{}, err
		}
		took[i] = float64(time.Since(begin)) / float64(time.Millisecond)
	}
	note := fmt.Sprintf("%d calls: %.3g to %.3g ms", times, slices.Min(took), slices.Max(took))
	fmt.Fprintf(e.out, "  %s\n", note)
	return outcome{median(took), note}, nil
}

// holdDenied denies a hold. It looks which of those that are live end first.
func holdDenied(ctx context.Context, e *env) (outcome, error) {
	pool, slots, _, err := manyHolds(ctx, e)
	if err != nil {
		return outcome{}, err
	}
	return milliseconds(e, 200, func() error {
		_, err := limits.Hold(ctx, pool, "one more", time.Minute, slots)
		if denial, ok := errors.AsType[*ratelimit.DeniedError](err); !ok || denial.RetryAfter < 50*time.Minute {
			return fmt.Errorf("%w", err)
		}
		return nil
	})
}

// holdsRenewed extends all holds by one statement, as a process does that runs them.
func holdsRenewed(ctx context.Context, e *env) (outcome, error) {
	pool, slots, n, err := manyHolds(ctx, e)
	if err != nil {
		return outcome{}, err
	}
	var p dbsqlc.ExtendParams
	for i := range n {
		p.Names, p.Keys, p.Ids = append(p.Names, "slots"), append(p.Keys, "key"), append(p.Ids, strconv.Itoa(i+1))
		p.Tokens, p.Ttls = append(p.Tokens, tokenOfMany[1:len(tokenOfMany)-1]), append(p.Ttls, 0)
	}
	hours := 1
	result, err := milliseconds(e, 20, func() error {
		hours++ // else nothing would be extended
		for i := range p.Ttls {
			p.Ttls[i] = time.Duration(hours) * time.Hour
		}
		answer, err := dbsqlc.New(dbtx{pool}).Extend(ctx, p)
		if err == nil && len(answer.Ended)+len(answer.Lost)+len(answer.Busy) > 0 {
			err = fmt.Errorf("not all were extended: %+v", answer)
		}
		return err
	})
	if err == nil {
		_, denied := limits.Hold(ctx, pool, "one more", time.Minute, slots)
		if denial, ok := errors.AsType[*ratelimit.DeniedError](denied); !ok || denial.RetryAfter < time.Duration(hours)*time.Hour-10*time.Minute {
			err = fmt.Errorf("not extended: %w", denied)
		}
	}
	return result, err
}

// dbtx is a pool for sqlc's code.
type dbtx struct{ *pgxpool.Pool }

// holdsBesideAnOldSnapshot holds and releases one slot again and again. What that leaves behind cannot be removed as long as a
// snapshot is older. A pair is as many calls before the snapshot as after 5,000 calls beside it.
func holdsBesideAnOldSnapshot(ctx context.Context, e *env) (outcome, error) {
	pool, err := e.newPool(ctx, 3, nil)
	if err != nil {
		return outcome{}, err
	}
	slots, n := ratelimit.Slots("churned", 10).Key("key"), 0
	churn := func(calls int) (time.Duration, error) {
		begin := time.Now()
		for range calls {
			n++
			held, err := limits.Hold(ctx, pool, strconv.Itoa(n), time.Minute, slots)
			if err == nil {
				_, err = limits.Release(ctx, pool, held.Token)
			}
			if err != nil {
				return 0, err
			}
		}
		return time.Since(begin), nil
	}
	before, after, turns := e.few(5000), e.few(500), 5
	if e.quick {
		before, after, turns = 20, 10, 1
	}
	if _, err := churn(after); err != nil { // warms up
		return outcome{}, err
	}
	var ratios []float64
	for range turns {
		without, err := churn(after)
		if err != nil {
			return outcome{}, err
		}
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SELECT 1 FROM ratelimit.limits"); err != nil {
				return err
			}
			if _, err := churn(before); err != nil {
				return err
			}
			with, err := churn(after)
			ratios = append(ratios, with.Seconds()/without.Seconds())
			return err
		})
		if err != nil {
			return outcome{}, err
		}
		if _, err := pool.Exec(ctx, "VACUUM ratelimit.limits, ratelimit.holds"); err != nil {
			return outcome{}, err
		}
	}
	note := fmt.Sprintf("%d pairs: %.3g to %.3g", len(ratios), slices.Min(ratios), slices.Max(ratios))
	fmt.Fprintf(e.out, "  %s\n", note)
	return outcome{median(ratios), note}, nil
}

// holdsInBulk takes slots by SQL, as a trigger does for a statement that inserts many rows, and releases them, each in one transaction.
func holdsInBulk(ctx context.Context, e *env) (outcome, error) {
	pool, err := e.newPool(ctx, 1, nil)
	if err != nil {
		return outcome{}, err
	}
	n := e.few(10_000)
	if e.quick {
		n = 100
	}
	if err := new(ratelimit.Limiter).Publish(ctx, pool, "bench", ratelimit.Slots("bulk", n)); err != nil {
		return outcome{}, err
	}
	var took []float64
	for _, sql := range []string{
		`SELECT count(h.at) FROM generate_series(1, $1::integer) AS i, LATERAL ratelimit.hold('bulk', 'key', i::text, forever => true) AS h`,
		`SELECT count(*) FILTER (WHERE ratelimit.release('bulk', 'key', i::text)) FROM generate_series(1, $1::integer) AS i`,
	} {
		var done int
		begin := time.Now()
		if err := pool.QueryRow(ctx, sql, n).Scan(&done); err != nil || done != n {
			return outcome{}, errors.Join(fmt.Errorf("%d of %d", done, n), err)
		}
		took = append(took, time.Since(begin).Seconds())
	}
	note := fmt.Sprintf("%.3g s to take, %.3g s to release", took[0], took[1])
	fmt.Fprintf(e.out, "  %s\n", note)
	return outcome{took[0] + took[1], note}, nil
}

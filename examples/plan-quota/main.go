// Plan-quota limits customers to 10,000 calls in each month, and to 100 calls a minute. A customer's month begins on the
// billing day, at midnight in the customer's time zone. Both limits are decided in one call: all or nothing.
//
//	go run ./examples/plan-quota
package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
)

var (
	// The example takes months, so it has its own clock.
	now    time.Time
	limits *ratelimit.Limiter // of Open

	perMinute = ratelimit.TokenBucket("callsPerMinute", 100, time.Minute)

	// Each customer has a zone and a billing day of its own. Within 32 days, a month begins in any zone, from any day.
	perMonth = ratelimit.CalendarWindow("callsPerMonth", 10_000, ratelimit.Month, ratelimit.Varies(32*24*time.Hour))
)

// customer is a row of the application's table.
type customer struct {
	id, zone, contract string // contract is a date: its day is the billing day
}

// quota is the monthly limit of one customer. In a month without a 31st, billing day 31 is the month's last day.
func (c customer) quota() ratelimit.Limit {
	return perMonth.With(ratelimit.Zone(c.zone), ratelimit.Anchor(c.contract))
}

// call is the customer's work, and the transaction that books it. Both limits grant, or nothing is booked.
func call(ctx context.Context, pool *pgxpool.Pool, id string, calls float64) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		c := customer{id: id}
		err := tx.QueryRow(ctx, "SELECT zone, contract::text FROM customers WHERE id = $1 FOR NO KEY UPDATE", id).Scan(&c.zone, &c.contract)
		if err != nil {
			return err
		}
		if _, err := limits.Consume(ctx, tx, perMinute.Key(id).Count(calls), c.quota().Key(id).Count(calls)); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO calls (customer, made, at) VALUES ($1, $2, $3)", id, calls, now)
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted)) // above, calls of one customer at once would run again
}

// callAll makes calls, 100 at a time, until the end. It returns when each month's quota ran out, in the customer's time.
func callAll(ctx context.Context, pool *pgxpool.Pool, c customer, end time.Time) (spent []time.Time, err error) {
	for now.Before(end) {
		err := call(ctx, pool, c.id, 100)
		denial, denied := errors.AsType[*ratelimit.DeniedError](err)
		switch {
		case denied && denial.RetryAt.IsZero():
			return nil, err // waiting does not help
		case denied && denial.RetryAt.Sub(now) <= time.Minute:
			now = denial.RetryAt // the minute's limit denied
		case denied:
			spent = append(spent, now)
			now = denial.RetryAt
			zone, err := time.LoadLocation(c.zone)
			if err != nil {
				return nil, err
			}
			fmt.Printf("   the month is used up; the next one begins at %s\n", now.In(zone).Format(time.RFC3339))
		case err != nil:
			return nil, err
		}
	}
	return spent, nil
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	opened, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "plan-quota", Limits: []ratelimit.Limit{perMinute, perMonth},
		Clock:        func() time.Time { return now },
		NoBackground: true, // an application follows its overrides, and sweeps
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, opened)
	limits = opened
	_, err = pool.Exec(ctx, `CREATE TABLE customers (id text, zone text, contract date);
		CREATE TABLE calls (customer text, made integer, at timestamptz)`)
	if err != nil {
		return err
	}
	customers := []customer{
		{"ann", "Europe/Berlin", "2026-01-31"},    // from the 31st, or the last day of the month
		{"bob", "America/New_York", "2026-01-15"}, // summer time begins in March
	}
	for _, c := range customers {
		if _, err := pool.Exec(ctx, "INSERT INTO customers VALUES ($1, $2, $3)", c.id, c.zone, c.contract); err != nil {
			return err
		}
		fmt.Printf("%s, whose months begin on day %s in %s, makes as many calls as the plan allows\n", c.id, c.contract[len("2026-01-"):], c.zone)
		now = time.Date(2026, 2, 1, 12, 0, 0, 0, time.UTC)
		spent, err := callAll(ctx, pool, c, time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC))
		if err != nil {
			return err
		}
		var most, all int
		err = pool.QueryRow(ctx, `SELECT max(n), sum(n) FROM (
			SELECT sum(made) AS n FROM calls WHERE customer = $1 GROUP BY date_trunc('minute', at)) AS minutes`, c.id).Scan(&most, &all)
		if err != nil {
			return err
		}
		fmt.Printf("   %d calls in %d months, at most %d in a minute\n", all, len(spent), most)
		if all != 10_000*len(spent) || len(spent) != 4 {
			return fmt.Errorf("%d calls in %d months, want 10,000 in each of 4", all, len(spent))
		}
	}
	return nil
}

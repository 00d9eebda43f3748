package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// Within 32 days, a month of any customer begins, whatever the zone and the billing day.
var varies = ratelimit.Varies(32 * 24 * time.Hour)

var plans = map[string]ratelimit.Limit{
	"free":       ratelimit.CalendarWindow("apiCalls.free", 1_000, ratelimit.Month, varies),
	"pro":        ratelimit.CalendarWindow("apiCalls.pro", 50_000, ratelimit.Month, varies),
	"enterprise": ratelimit.Unlimited("apiCalls.enterprise"),
	"ended":      ratelimit.CalendarWindow("apiCalls.ended", 0, ratelimit.Month, varies), // nothing
}

// customer is a row of the application's table.
type customer struct {
	id, plan     string
	quota        int64  // a month, of its own; 0: the plan's
	zone, anchor string // when its months begin
}

// request is one call of the customer: the plan's limit, with the customer's own numbers.
func (c customer) request() ratelimit.Request {
	plan := plans[c.plan] // of a plan that is not there: the zero Limit, which is an error
	if plan.Config().Kind == "unlimited" {
		return plan.Key(c.id)
	}
	plan = plan.With(ratelimit.Zone(c.zone), ratelimit.Anchor(c.anchor))
	if c.quota == 0 {
		return plan.Key(c.id, c.anchor)
	}
	return plan.With(ratelimit.Rate(float64(c.quota))).Key(c.id, c.anchor, strconv.FormatInt(c.quota, 10))
}

// lookUp reads a customer. With a lock, the row stays as it is until the transaction ends.
func lookUp(ctx context.Context, tx pgx.Tx, id, lock string) (c customer, err error) {
	err = tx.QueryRow(ctx, `
		SELECT id, plan, coalesce(quota, 0), zone, to_char(anchor, 'YYYY-MM-DD HH24:MI:SS')
		  FROM customers WHERE id = $1 `+lock, id).
		Scan(&c.id, &c.plan, &c.quota, &c.zone, &c.anchor)
	return c, err
}

// call is the customer's work.
func call(ctx context.Context, id string, calls float64) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		c, err := lookUp(ctx, tx, id, "FOR NO KEY UPDATE")
		if err != nil {
			return err
		}
		_, err = limits.Consume(ctx, tx, c.request().Count(calls))
		return err
	}, ratelimit.Isolation(pgx.ReadCommitted))
}

// book gives the customer another plan, or another quota of its own.
func book(ctx context.Context, id, plan string, quota int64) error {
	return limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		from, err := lookUp(ctx, tx, id, "FOR UPDATE")
		if err != nil {
			return err
		}
		to := from
		to.plan, to.quota = plan, quota
		_, err = tx.Exec(ctx, "UPDATE customers SET plan = $2, quota = nullif($3::bigint, 0) WHERE id = $1", id, plan, quota)
		if err != nil || from.request() == to.request() {
			return err
		}
		return limits.Move(ctx, tx, from.request(), to.request())
	}, ratelimit.Isolation(pgx.ReadCommitted))
}

// restart begins the customer's month anew, now. Call it in the transaction that books the payment.
func restart(ctx context.Context, tx pgx.Tx, id string) error {
	_, err := tx.Exec(ctx, `
		UPDATE customers SET anchor = date_trunc('second', clock_timestamp() AT TIME ZONE zone) WHERE id = $1`, id)
	return err
}

// used is a balance as the customer sees it.
func used(b ratelimit.Balance) string {
	switch {
	case b.Decides == "block":
		return "blocked"
	case math.IsInf(b.Capacity, 1):
		return "unlimited"
	case b.Capacity == 0:
		return "not in your plan"
	}
	return fmt.Sprintf("%.0f of %.0f used", b.Used, b.Capacity)
}

// This is docs/plans.md.
func Example_plans() {
	show := func(what string, err error) {
		var balances []ratelimit.Balance
		if err == nil {
			err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				c, err := lookUp(ctx, tx, "acme", "")
				if err != nil {
					return err
				}
				balances, err = limits.Balance(ctx, tx, c.request())
				return err
			})
		}
		if err != nil {
			fmt.Println(what+":", err)
			return
		}
		fmt.Println(what+":", used(balances[0]))
	}

	_, err := pool.Exec(ctx, "INSERT INTO customers VALUES ('acme', 'free', NULL, 'Europe/Berlin', '2026-01-15'), ('globex', 'free', NULL, 'UTC', '2026-01-01')")
	if err == nil {
		err = call(ctx, "acme", 900)
	}
	show("free", err)
	show("upgrade", book(ctx, "acme", "pro", 0))
	show("a quota of its own", book(ctx, "acme", "pro", 80_000))
	show("more calls", call(ctx, "acme", 4_100))
	show("downgrade", book(ctx, "acme", "free", 0))
	show("upgrade again", book(ctx, "acme", "pro", 0))
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return restart(ctx, tx, "acme") })
	show("paid, so the month begins anew", err)
	show("enterprise", book(ctx, "acme", "enterprise", 0))
	show("cancelled", book(ctx, "acme", "ended", 0))
	if err := book(ctx, "globex", "pro", 0); err != nil { // which changes nothing of acme's
		fmt.Println(err)
	}
	// Output:
	// free: 900 of 1000 used
	// upgrade: 900 of 50000 used
	// a quota of its own: 900 of 80000 used
	// more calls: 5000 of 80000 used
	// downgrade: 1000 of 1000 used
	// upgrade again: 1000 of 50000 used
	// paid, so the month begins anew: 0 of 50000 used
	// enterprise: unlimited
	// cancelled: not in your plan
}

var trial = ratelimit.CalendarWindow("apiCalls.trial", 500, ratelimit.Month, ratelimit.Varies(62*24*time.Hour))

// A trial of 500 calls in a month is a window that begins with the trial, and another plan afterwards.
func ExampleAnchor_trial() {
	begin, end := time.Date(2026, 11, 26, 15, 0, 0, 0, time.UTC), time.Date(2026, 12, 26, 15, 0, 0, 0, time.UTC)
	now := end.Add(-time.Second)
	limits := ratelimit.Limiter{Clock: func() time.Time { return now }}
	for range 3 {
		limit := trial.With(ratelimit.Anchor(begin.Format(time.DateTime)))
		if !now.Before(end) {
			limit = plans["ended"]
		}
		result, err := limits.Consume(ctx, pool, limit.Key("globex").Count(500))
		if denied, is := errors.AsType[*ratelimit.DeniedError](err); is {
			fmt.Println("denied by", denied.Reason, "until", denied.RetryAt)
			now = denied.RetryAt
			continue
		}
		fmt.Println(result.Remaining, "left until", result.ResetAt, err)
	}
	// Output:
	// 0 left until 2026-12-26 15:00:00 +0000 UTC <nil>
	// denied by quota until 2026-12-26 15:00:00 +0000 UTC
	// denied by plan until 0001-01-01 00:00:00 +0000 UTC
}

// Money is counted in whole micro-units, here of a dollar. They are exact.
func ExampleLimiter_Consume_money() {
	const dollar = 1_000_000
	spending := ratelimit.CalendarWindow("spending", 0.3*dollar, ratelimit.Month) // 30 cents a month
	for range 4 {
		_, err := limits.Consume(ctx, pool, spending.Key("acme").Count(0.1*dollar))
		fmt.Println("10 cents spent:", err == nil)
	}
	// Output:
	// 10 cents spent: true
	// 10 cents spent: true
	// 10 cents spent: true
	// 10 cents spent: false
}

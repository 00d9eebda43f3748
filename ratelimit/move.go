package ratelimit

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// Move counts what is used of one limit against another. Call it in the transaction that books the plan: both keys are
// locked until it ends. A move adds no token, and may be repeated.
//
// The balance of to becomes capacity of to - used of from, at least 0 (or -maxReserved, with [MaxReserved]), and never
// more than it is. Receipts stay with from.
//
// Both limits are buckets, or they refill at the same instants for these keys: fixed windows of one period that begin
// together, or calendar windows of one unit, zone and anchor. Anything else is [ErrInvalid], and so are the same name
// and key twice and a [Request.Count]. If one limit is [Unlimited] or has a rate of 0, nothing is sent. Numbers of a
// [Limiter.Override] count.
//
// Above READ COMMITTED, a use of either that the transaction's snapshot lacks is 40001. Outside a transaction, after an
// error, the move may have been made: call it again. docs/plans.md has more.
func (l *Limiter) Move(ctx context.Context, db DB, from, to Request) error {
	_, err := l.do(ctx, db, verbMove, about{}, []Request{from, to})
	return err
}

// validateMove validates a move. If one of the limits has no rows, nothing is left to ask.
func (c *call) validateMove() error {
	from, to := &c.requests[0], &c.requests[1]
	switch {
	case len(c.demands)+len(c.rowless) < 2:
		return fmt.Errorf("%w: limit %q: a move from a key to itself", ErrInvalid, from.limit.name)
	case !from.refillsWith(to):
		return fmt.Errorf("%w: no move from %q to %q: they are not both token buckets, and refill at other instants", ErrInvalid, from.limit, to.limit)
	case c.rowless != nil:
		c.rowless, c.demands = append(c.rowless, c.demands...), nil
	case c.demands[0].requests[0] != 0: // in the order of locks, to is first
		slices.Reverse(c.demands)
	}
	return nil
}

// refillsWith reports whether a move between two limits and keys can count at all: used tokens come back at the same
// instants, or continuously.
func (r *Request) refillsWith(other *Request) bool {
	a, b := r.limit.forKey(r.key), other.limit.forKey(other.key)
	switch {
	case r.limit.unlimited() || other.limit.unlimited():
		return true
	case !a.Window && !b.Window:
		return true
	}
	return a.Window == b.Window && r.limit.calendar == other.limit.calendar && a.Period == b.Period && a.Start == b.Start
}

// lowestOfMove is the lowest balance that a move may leave.
func (c *call) lowestOfMove() float64 {
	if to := &c.demands[1].limit; !math.IsInf(to.maxReserved, 1) {
		return -to.maxOwed()
	}
	return 0
}

// move is the statement of a move. The arrays have from first.
func (c *call) move(now *time.Time) statement {
	m := columnsOf(c.demands)
	return statement{sql: dbsqlc.Move, demands: 2, read: readUnused[float64], args: arguments(
		m.names, m.keys,
		m.rates, m.periods, m.capacities, m.starts, shardsOf(c.demands),
		c.lowestOfMove(), now,
		m.windows, m.firsts, m.lasts,
	)}
}

package ratelimit

import (
	"context"
	"math"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Balance is how a limit stands for one key, by [Limiter.Balance]. All instants are by the clock that decides, in UTC.
// A zero instant is none. As JSON, see [Result].
type Balance struct {
	Limit Limit  // with the numbers in force
	Key   string // as stored: see [Limit.Key]; empty for a limit without keys
	At    time.Time

	// Remaining is how many tokens can be taken now: below zero if tokens are owed, at most 0 while the key is blocked,
	// and +Inf if the limit is unlimited.
	Remaining float64

	// Used is Capacity less the tokens that are there: above Capacity if tokens are owed, and NaN if the limit is
	// unlimited.
	Used float64

	// Capacity is how many tokens the limit can hold: +Inf if it is unlimited, 0 if the plan grants nothing.
	Capacity float64

	// NextAt is when one more whole token can be taken than now, if nothing else is taken or comes back. It is zero if
	// there is none, and while the rate is 0.
	NextAt time.Time

	// ResetAt is when a token bucket will be full if nothing is taken, or when the next window begins. It is zero if
	// the limit is unlimited or its rate is 0.
	ResetAt time.Time

	// Decides is what the numbers come from: "definition", "override" (other numbers, or no limit) or "block" (nothing
	// is granted). Until is the end of that override or block; zero if it has none.
	Decides string
	Until   time.Time

	// PausedUntil is the end of a [Limiter.Pause]. It is zero if there is none, or in less than a second, and while the
	// key is unlimited.
	PausedUntil time.Time
}

// Balance reads how limits stand: one [Balance] for each request, in order. It is never a denial, and writes nothing. A
// Count other than 1 is [ErrInvalid]. Other errors are those of [Limiter.Check].
//
// Other calls may take tokens right after, so do not decide by a balance. In a transaction, it is that of the
// transaction's snapshot, with its own calls. In SERIALIZABLE, a read can conflict with transactions that write the
// same key.
func (l *Limiter) Balance(ctx context.Context, db DB, requests ...Request) ([]Balance, error) {
	result, err := l.do(ctx, db, verbBalance, about{}, requests)
	if err != nil {
		return nil, err
	}
	return result.balances, nil
}

// balances are the answer to a Balance, by request. at is the instant of the answer.
func (c *call) balances(a *answer) []Balance {
	all := make([]Balance, len(c.requests))
	for i := range c.demands {
		for _, request := range c.demands[i].requests {
			all[request] = c.balance(&c.demands[i], a.rows[i], a.at)
		}
	}
	for i := range c.rowless {
		for _, request := range c.rowless[i].requests {
			all[request] = c.balance(&c.rowless[i], nil, a.at)
		}
	}
	for i := range all {
		if b := &all[i]; c.inForce != nil && c.inForce[i].by != "" {
			b.Decides = c.inForce[i].by
			if until := c.inForce[i].until; until < algebra.Forever {
				b.Until = until.Time()
			}
		}
	}
	return all
}

// balance is the balance of a demand with these rows.
func (c *call) balance(d *demand, rows []algebra.Row, at algebra.Micros) Balance {
	b := Balance{Limit: d.limit.unblocked(), Key: d.key, At: at.Time(), Capacity: d.limit.numbers.Capacity, Decides: byDefinition}
	switch {
	case d.limit.unlimited():
		if b.Remaining, b.Used = math.Inf(1), math.NaN(); d.limit.blocked {
			b.Remaining, b.NextAt = 0, instant(c.nextAt(d, nil, 1, at))
		}
	case d.limit.slots:
		b.Used = 0 - d.numbers.Total(rows, at) // no -0
		if b.Remaining = b.Capacity - b.Used; d.limit.blocked {
			b.Remaining = min(b.Remaining, 0)
		}
	case d.limit.empty():
		b.Capacity = 0
	default:
		b.Remaining = d.numbers.Shown(d.numbers.Total(rows, at))
		b.Used = d.numbers.Capacity - b.Remaining
		more := 1.0
		if d.limit.blocked {
			b.Remaining = min(b.Remaining, 0)
		} else {
			more += max(d.numbers.Whole(rows, math.Inf(1), at), 0)
		}
		if until, paused := algebra.Paused(rows, at); paused && !d.numbers.Window {
			b.PausedUntil = until.Time()
		}
		if d.numbers.Window {
			b.ResetAt = d.reaching(rows, at).NextWindow(at).Time()
		} else {
			b.ResetAt = instant(c.fullAt(d, rows, at))
		}
		b.NextAt = instant(c.nextAt(d, rows, more, at))
	}
	return b
}

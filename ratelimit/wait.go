package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/handles"
)

// Wait reserves the tokens of a request as [Limiter.Reserve] does, and sleeps until they are there, without a lock or a
// connection. Callers are served in the order in which the database decides, across processes. On a transaction, it is
// [ErrInvalid] (not recognized if begun by hand on a *sql.Conn).
//
// At once, it is a [*DeniedError] if the tokens will not be there before ctx's deadline, or more would be reserved than
// [MaxReserved]. RetryAt is for a Wait with as much time left. Without a deadline, the bound is 10 minutes or one
// period, whichever is longer. A count above the capacity, unless the capacity is 0, is [ErrExceedsCapacity].
//
// If ctx ends while Wait sleeps, Wait gives the tokens back by [Limiter.Refund] within 5 seconds, and returns ctx's
// error. If the refund fails, the error matches [ErrUnknownOutcome], too. A change of the limit's overrides wakes Wait,
// but no block, Reset, Refund or ratelimit.add.
//
// The result is that of the reservation; if ctx ended, only Taken and Delay.
func (l *Limiter) Wait(ctx context.Context, db DB, request Request) (Result, error) {
	requests := []Request{request}
	began := time.Now()
	most := longestWait(ctx, &request.limit)
	result, err := l.reserveForWait(ctx, db, requests, false)
	if err == nil && late(&result, most) { // the row lies ahead, as that of a paused limit: a floor does not see that
		if kept := l.giveBack(ctx, db, result, requests, false); kept != nil {
			result, err = unanswered(verbWait, requests), explainCall(verbWait, requests, unknown(inner{beside{kept}}))
		} else {
			result, err = l.reserveForWait(ctx, db, requests, true)
		}
	}
	took := time.Since(began)
	if err == nil {
		if err = l.sleep(ctx, db, result); err != nil {
			if kept := l.giveBack(ctx, db, result, requests, true); kept != nil {
				err = unknown(fmt.Errorf("%w, and the tokens were not given back: %w", err, inner{beside{kept}}))
			}
			granted := result
			result, err = unanswered(verbWait, requests), explainCall(verbWait, requests, err)
			result.At, result.Requests[0].Taken, result.Requests[0].Delay = granted.At, granted.Requests[0].Taken, granted.Requests[0].Delay
		}
	}
	result.sooner = nil
	l.observe(ctx, verbWait, took, result, err)
	return result, err
}

// reserveForWait is the call of the database. A [Limiter.Close] waits for it, and not for the sleep.
func (l *Limiter) reserveForWait(ctx context.Context, db DB, requests []Request, exact bool) (Result, error) {
	if !l.life.enter() {
		return unanswered(verbWait, requests), limiterClosed(verbWait, requests)
	}
	defer l.life.leave()
	return l.run(ctx, db, verbWait, about{exact: exact}, requests)
}

// errWaitInTx is the error of a Wait on a transaction, or inside one on the same pool; or nil.
func errWaitInTx(ctx context.Context, db DB, requests []Request, what, instead string) error {
	if handles.IsTx(db) || inTransaction(db) || errOutside(ctx, verbWait, db, requests) != nil {
		return invalidCall(requests, what+" in a transaction would sleep while the transaction holds its locks: "+instead)
	}
	return nil
}

// longWait is how long a Wait without a deadline may wait at most, if the limit's period is not longer.
const longWait = 10 * time.Minute

// bound makes the database deny the call if its work would have to wait beyond ctx's deadline. For one token bucket,
// a floor says so, by the shorter statement. That one fails for a floor which a full bucket would break, and exact
// asks for the longer one.
func (c *call) bound(ctx context.Context, exact bool) {
	if len(c.demands) == 0 {
		return
	}
	left := longestWait(ctx, &c.demands[0].limit)
	d := &c.demands[0]
	if changes := c.overrideEnds(d); !exact && (changes || !c.forfeits()) {
		floor := -(d.numbers.Rate * left.Seconds() / d.numbers.Period.Seconds())
		if changes {
			c.patience = algebra.Micros(left.Microseconds())
			now := c.overrides.now(c.local)
			floor = -leastRefill(c.spans(standing, d), now, now+c.patience)
		}
		if floor <= d.numbers.Capacity-d.count {
			d.floor = max(d.floor, floor)
			return
		}
	}
	c.within = algebra.Micros(left.Microseconds())
}

// longestWait is how long a Wait may wait.
func longestWait(ctx context.Context, l *Limit) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(time.Until(deadline), 0)
	}
	return max(longWait, l.numbers.Period)
}

// late reports whether a granted Wait waits longer than it may, by more than rounding forgives.
func late(r *Result, most time.Duration) bool {
	l := &r.Requests[0].Limit
	if l.unlimited() || l.numbers.Rate == 0 {
		return false
	}
	forgiven := 2e-9 * l.numbers.Capacity / l.numbers.Rate * float64(l.numbers.Period)
	return float64(r.delay()) > float64(most)+forgiven+float64(10*time.Millisecond)
}

// clockStep is how often a sleep asks [Limiter.Clock], since a test may move it. After a while, it asks every eighth
// of the time that it has slept: some hundred times in a day, also where testing/synctest skips the day.
const clockStep = 10 * time.Millisecond

// sleep sleeps until the work of a granted call may run. It returns an error if ctx ends before.
func (l *Limiter) sleep(ctx context.Context, db DB, granted Result) error {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < granted.delay() {
		return context.DeadlineExceeded
	}
	if m, ok := db.(interface {
		inMemory
		SleepUntil(ctx context.Context, t time.Time) error
	}); ok && l.Clock == nil {
		return m.SleepUntil(ctx, granted.runAt.Time())
	}
	began, runAt := time.Now(), granted.runAt
	left := func() time.Duration {
		if l.Clock != nil {
			return runAt.Time().Sub(l.Clock())
		}
		return runAt.Time().Sub(granted.At) - time.Since(began)
	}
	var changed <-chan struct{}
	for wait := granted.delay(); wait > 0; wait = left() {
		if granted.sooner != nil {
			if next := l.overrides.changed(); next != changed { // also at first: something may have changed since the grant
				now, _ := l.now() // without a valid time, NULL
				if changed, runAt = next, min(runAt, granted.sooner(now)); left() <= 0 {
					return nil
				}
			}
		}
		step := left()
		if l.Clock != nil {
			step = min(max(clockStep, time.Since(began)/8), max(step, clockStep/10))
		}
		select {
		case <-time.After(step):
		case <-changed:
		case <-ctx.Done():
			return over(ctx)
		}
	}
	return nil
}

// giveBack refunds a granted call whose ctx has ended, or that would wait too long. observed: as a Refund that the
// Observer is told of.
func (l *Limiter) giveBack(ctx context.Context, db DB, granted Result, requests []Request, observed bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	return l.Retry(ctx, func(ctx context.Context) (err error) {
		if observed {
			_, err = l.Refund(ctx, db, granted.Receipt(), requests...)
		} else {
			_, err = l.run(ctx, db, verbRefund, about{receipt: granted.Receipt()}, requests)
		}
		return err
	})
}

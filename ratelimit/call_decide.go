package ratelimit

import (
	"cmp"
	"context"
	"fmt"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inschema"
)

// newCall validates a call. db is nil if it is not known.
func (l *Limiter) newCall(v verb, of about, requests []Request, db DB) (c call, err error) {
	c = call{verb: v, schema: l.Schema, hold: of.hold, does: verbs[v], requests: requests, within: algebra.Forever, patience: algebra.Forever, overrides: l.overrides}
	if err = l.changed(requests); err != nil {
		return c, err
	}
	if c.does.refunds {
		if c.receipt, err = of.receipt.read(); err != nil {
			return c, fmt.Errorf("%w: %s%w", ErrInvalid, limitsOf(requests), err)
		}
		if requests, err = l.refundRequests(c.receipt, requests); err != nil {
			return c, err
		}
		c.requests = requests
	}
	if c.does.holds {
		if requests, err = l.holdRequests(&c); err != nil {
			return c, err
		}
		c.requests = requests
	}
	if c.now, err = l.now(); err != nil {
		return c, invalidCall(requests, err.Error())
	}
	if c.local = c.now; !c.now.Valid {
		c.local = clockOf(db)
	}
	c.asked = requests
	c.requests, c.inForce = l.overrides.applied(c.does, requests, c.local)
	if c.demands, c.rowless, err = demands(c.does, c.requests, c.local); err != nil {
		if err = c.never(err); err != nil {
			return c, err
		}
	}
	if c.does.ignoresCount {
		if err = noCounts(string(v), requests); err != nil {
			return c, err
		}
	}
	if isInMemory(db) && (c.does.holds || c.does.slots && anyOf(c.demands, func(d *demand) bool { return d.limit.slots })) {
		return c, invalidCall(requests, "the database in memory of package ratelimittest has no holds: test them with Postgres")
	}
	if v == verbSettle {
		c.lift()
	}
	if c.does.moves {
		if err = c.validateMove(); err != nil {
			return c, err
		}
	}
	if v == verbPause {
		if err = c.validatePause(of.lasts); err != nil {
			return c, err
		}
	}
	if err = l.definitions.check(requests); err != nil {
		return c, err
	}
	if c.does.refunds {
		err = c.checkReceipt()
	}
	return c, err
}

// checkReceipt checks that a refund's receipt covers its demands. A demand that was granted without a row gets nothing back.
func (c *call) checkReceipt() error {
	if !inschema.Same(c.receipt.Schema, c.schema) {
		return invalidCall(c.asked, fmt.Sprintf("the receipt is of the schema %.100q", cmp.Or(c.receipt.Schema, inschema.Default)))
	}
	if err := c.receipt.covers(c.demands); err != nil {
		return err
	}
	if err := c.receipt.covers(c.rowless); err != nil {
		return err
	}
	others, free := withoutRows(c.demands, func(d *demand) bool { return c.receipt.find(d.limit.name, d.key).Rows == 0 })
	c.demands, c.rowless = others, append(c.rowless, free...)
	return nil
}

// decide has the database decide the call: by a statement of its own or, on a Coalescer, together with other calls. A call
// that the limits' definitions decide is not sent.
func (c *call) decide(ctx context.Context, db DB) (Result, error) {
	result := unanswered(c.verb, c.requests)
	if a := c.byPolicy(); a != nil {
		c.fill(&result, a)
		return c.conclude(result, nil)
	}
	var err error
	if coalescer, ok := coalescerOf(db); ok && c.does.takes && !c.does.holds {
		err = coalescer.join(ctx, c, &result)
	} else {
		err = c.ask(ctx, wire{db, c.schema, c.does.writes == onceOnly && !handles.IsTx(db)}, &result)
	}
	return c.conclude(result, err)
}

// ask decides the call by a statement of its own, or two.
func (c *call) ask(ctx context.Context, w wire, result *Result) error {
	s := c.statement(ctx, false)
	if w.commits {
		s.update = c.updater()
	}
	a, err := w.ask(ctx, s)
	if err == nil && c.unsure(a) {
		c.lookBack()
		a, err = w.ask(ctx, c.statement(ctx, false))
	}
	if err == nil {
		c.answered = a
		c.fill(result, a)
	}
	return err
}

// fill fills in the result from the statement's answer.
func (c *call) fill(result *Result, a *answer) {
	if c.does.answers == nothing {
		if result.OK = true; a.until != 0 {
			result.pausedUntil = a.until.Time()
		}
		return
	}
	if c.does.holds && a.held.state != heldDenied {
		c.fillHeld(result, a)
		return
	}
	a.granted = a.granted && !c.tooMuch() // it was only checked
	c.fillRows(result, a)
	if (c.does.takes || c.does.holds) && !a.granted && len(c.demands) == 1 && !sharded(c.demands) {
		wait := result.RetryAfter
		if c.does.holds { // others may give back what they hold long before
			wait = min(wait, heldLately)
		}
		deniedLately.remember(c.demands[0], wait)
	}
}

// conclude makes the result and the error for the caller.
func (c *call) conclude(result Result, err error) (Result, error) {
	switch {
	case err != nil: // perhaps at COMMIT, after an answer
		return unanswered(c.verb, c.requests), explainCall(c.verb, c.requests, err)
	case c.does.holds && !result.OK && (!c.does.deniable || result.held.state == heldReleased):
		return result, c.hold.lost(result)
	case c.does.deniable && !result.OK:
		reason := c.refusal()
		return result, &DeniedError{
			At: result.At, RetryAt: result.RetryAt, RetryAfter: result.RetryAfter, Remaining: result.Remaining, ResetAt: result.ResetAt,
			Requests: result.Requests, Reason: cmp.Or(reason, result.known, ReasonQuota),
		}
	}
	if c.schema != inschema.Default {
		result.schema = c.schema
	}
	return result, nil
}

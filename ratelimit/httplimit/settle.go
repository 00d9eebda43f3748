package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/outcome"
	"github.com/txlimit/txlimit/ratelimit"
)

// SetCost is called by the handler behind a [Middleware] with Settle. It sets how many tokens of a limit the request has
// really cost: 0 to 1e15, in place of the count that [Middleware.Requests] asked for. The last call counts, so a handler
// that streams can set the cost so far. Limits without a SetCost keep their counts.
//
// Limits are told apart by name. If the request asked for several keys of the limit, each of them pays the cost. ctx is
// the request's context. SetCost sends nothing to the database, and is safe for concurrent use.
//
// If nothing was taken ([ErrNotLimited], FailOpen, ObserveOnly), SetCost does nothing and returns nil. It returns
// [ratelimit.ErrInvalid], and changes nothing, if the cost is not a number of tokens, if the limit is of slots, if the
// request did not ask for it, if the handler has returned, or if no Middleware with Settle is around it.
func SetCost(ctx context.Context, limit ratelimit.Limit, cost float64) error {
	err := errors.New("no Middleware with Settle is around the handler")
	c, _ := ctx.Value(costsKey{}).(*costs)
	if !(cost >= 0 && cost <= algebra.MaxTokens) {
		c, err = nil, fmt.Errorf("%v is not between 0 and %v", cost, algebra.MaxTokens)
	} else if outcome.OfSlots(limit) {
		c, err = nil, errors.New("slots come back, whatever the request costs")
	}
	nothingTaken := false
	for ; c != nil; c = c.outer {
		if err = c.set(limit.Name(), cost); err == nil {
			return nil
		}
		nothingTaken = nothingTaken || c.requests == nil
	}
	if nothingTaken {
		return nil
	}
	return fmt.Errorf("%w: limit %q: SetCost: %w", ratelimit.ErrInvalid, limit.Name(), err)
}

// costsKey is where a request's context has its costs.
type costsKey struct{}

// costs are what a handler sets as the cost of its request.
type costs struct {
	outer    *costs              // of a Middleware around this one
	requests []ratelimit.Request // that were granted; nil: nothing was taken
	result   ratelimit.Result    // of the grant
	held     bool                // until the handler has returned
	used     []ratelimit.Request // of what was held

	mu       sync.Mutex
	byLimit  map[string]float64 // by the limit's name
	returned bool               // the handler has
}

func newCosts(requests []ratelimit.Request) *costs {
	return &costs{requests: requests, byLimit: map[string]float64{}}
}

func (c *costs) set(limit string, cost float64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.returned {
		return errors.New("the handler has returned")
	}
	if !slices.ContainsFunc(c.result.Requests, func(s ratelimit.Status) bool { return s.Limit.Name() == limit }) {
		return errors.New("the request did not ask for this limit")
	}
	c.byLimit[limit] = cost
	return nil
}

// end returns what is to be charged and to be refunded. From now on, the handler can set nothing. free says that the
// request costs nothing.
func (c *costs) end(free bool) (charge, refund []ratelimit.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.returned = true
	type share struct{ limit, key string }
	taken := map[share]float64{} // several requests for one limit and key are one
	for _, s := range c.result.Requests {
		taken[share{s.Limit.Name(), s.Key}] += s.Taken
	}
	for i, s := range c.result.Requests {
		of := share{s.Limit.Name(), s.Key}
		count, first := taken[of]
		delete(taken, of)
		cost, set := c.byLimit[of.limit]
		if free {
			cost, set = 0, true
		}
		switch more := cost - count; {
		case !first || !set:
		case c.held:
			c.used = append(c.used, c.requests[i].Count(cost))
		case more >= algebra.MinTokens:
			charge = append(charge, c.requests[i].Count(more))
		case -more >= algebra.MinTokens:
			refund = append(refund, c.requests[i].Count(-more))
		}
	}
	return charge, refund
}

// serve calls the handler of a request that passes. Afterwards it settles the cost, even if the handler panics.
func (m Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler, c *costs) {
	if m.Settle {
		c.outer, _ = r.Context().Value(costsKey{}).(*costs)
		r = r.WithContext(context.WithValue(r.Context(), costsKey{}, c))
	}
	free := false
	defer func() {
		charge, refund := c.end(free)
		if charge != nil {
			m.correct(r, func(ctx context.Context) (ratelimit.Result, error) { return m.Limiter.Charge(ctx, m.DB, charge...) })
		}
		if refund != nil {
			receipt := c.result.Receipt()
			m.correct(r, func(ctx context.Context) (ratelimit.Result, error) {
				return m.Limiter.Refund(ctx, m.DB, receipt, refund...)
			})
		}
	}()
	if m.Failed == nil {
		next.ServeHTTP(w, r)
		return
	}
	recorder, panicked := &statusRecorder{ResponseWriter: w}, true
	defer func() { free = !m.failed(recorder.status, panicked, r) }()
	next.ServeHTTP(recorder, r)
	panicked = false
}

// failed reports whether the answer is a failure. An answer that is unknown, since the client gave up, is one.
func (m Middleware) failed(status int, panicked bool, r *http.Request) bool {
	switch {
	case status != 0:
		return m.Failed(status)
	case r.Context().Err() != nil:
		return true
	case panicked:
		return m.Failed(http.StatusInternalServerError) // what a handler that recovers would write
	default:
		return m.Failed(http.StatusOK) // net/http's status for a handler that writes nothing
	}
}

// correct charges or refunds, even if the client has gone. A failure is observed.
func (m Middleware) correct(r *http.Request, do func(ctx context.Context) (ratelimit.Result, error)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), m.timeout())
	defer cancel()
	d := Decision{Passed: true}
	d.Err = m.Limiter.Retry(ctx, func(ctx context.Context) (err error) {
		d.Result, err = do(ctx)
		return err
	})
	if d.Err != nil {
		m.observe(r, d)
	}
}

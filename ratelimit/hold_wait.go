package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// WaitUpTo returns a context with which [Limiter.Hold] and [Limiter.During], and the middlewares by them, wait for
// slots and for tokens, up to d, or not at all with a d of 0 or less. Other verbs ignore it. A d above 0 and under a
// millisecond is [ErrInvalid] in the call, and so is a transaction.
//
// After d, and at once if waiting does not help, the error is the [*DeniedError]; slots may be released, so it waits
// for them whatever RetryAt says. If ctx ends, it is ctx's. A waiting caller holds no connection and no lock. Callers
// of a Limiter that want the same limits and keys are served in order of arrival; between processes there is no order.
func WaitUpTo(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, waitUpToKey{}, d)
}

type waitUpToKey struct{}

// waitUpTo is how long a Hold may wait; 0: it does not.
func waitUpTo(ctx context.Context) time.Duration {
	d, _ := ctx.Value(waitUpToKey{}).(time.Duration)
	return min(max(d, 0), maxTTL) // so that a time may be added
}

const (
	askEvery  = 100 * time.Millisecond // for slots, give or take a half
	askTokens = time.Second            // at least so often for tokens: a hold may give some back
)

// waits are the callers that wait for a hold. The zero value is ready.
type waits struct {
	mu sync.Mutex
	by map[string]*waitQueue // by limits and keys
}

// waitQueue is the order of those that want the same.
type waitQueue struct {
	requests []Request
	turns    []chan struct{} // each is closed when its caller is the first
	ended    chan struct{}   // of one place: a hold of this process has ended
}

// enter joins the queue. leave leaves it, and makes the next caller the first.
func (w *waits) enter(requests []Request) (q *waitQueue, turn chan struct{}, leave func()) {
	var of []string
	for _, r := range requests {
		of = append(of, strconv.Quote(r.limit.name)+strconv.Quote(r.key))
	}
	slices.Sort(of)
	key := strings.Join(slices.Compact(of), "")
	w.mu.Lock()
	defer w.mu.Unlock()
	if q = w.by[key]; q == nil {
		if w.by == nil {
			w.by = map[string]*waitQueue{}
		}
		q = &waitQueue{requests: requests, ended: make(chan struct{}, 1)}
		w.by[key] = q
	}
	turn = make(chan struct{})
	if q.turns = append(q.turns, turn); len(q.turns) == 1 {
		close(turn)
	}
	return q, turn, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		i := slices.Index(q.turns, turn)
		if q.turns = slices.Delete(q.turns, i, i+1); len(q.turns) == 0 {
			delete(w.by, key)
		} else if i == 0 {
			close(q.turns[0])
		}
	}
}

// wake has those ask that want what a hold of this process has had.
func (w *waits) wake(ended []Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, q := range w.by {
		if slices.ContainsFunc(q.requests, func(r Request) bool { return slices.ContainsFunc(ended, r.isOf) }) {
			select {
			case q.ended <- struct{}{}:
			default:
			}
		}
	}
}

// holdInTurn is a Hold that waits.
func (l *Limiter) holdInTurn(ctx context.Context, db DB, h *holding, requests []Request) (result Result, err error) {
	var took time.Duration
	ask := func() {
		began := time.Now()
		if result = unanswered(verbHold, requests); l.life.enter() {
			result, err = l.run(ctx, db, verbHold, about{hold: h}, requests)
			l.life.leave()
		} else {
			err = limiterClosed(verbHold, requests)
		}
		took += time.Since(began)
	}
	defer func() { l.observe(ctx, verbHold, took, result, err) }()
	if err = errWaitInTx(ctx, db, requests, "WaitUpTo", "hold before it begins"); err == nil && waitUpTo(ctx) < time.Millisecond {
		err = invalidCall(requests, fmt.Sprintf("WaitUpTo of %v is less than 1ms (a bare number in Go is nanoseconds: write 5*time.Second)", waitUpTo(ctx)))
	}
	if err != nil {
		return unanswered(verbHold, requests), err
	}
	late := time.NewTimer(waitUpTo(ctx))
	defer late.Stop()
	end := time.Now().Add(waitUpTo(ctx))
	q, turn, leave := l.waits.enter(requests)
	defer leave()
	select {
	case <-turn:
	case <-late.C:
		ask()
		return result, err
	case <-ctx.Done():
		return unanswered(verbHold, requests), explainCall(verbHold, requests, over(ctx))
	}
	for {
		ask()
		wait, helps := worthWaiting(err, time.Until(end))
		if !helps {
			return result, err
		}
		select {
		case <-time.After(wait):
		case <-q.ended:
		case <-late.C:
			ask()
			return result, err
		case <-ctx.Done():
			return unanswered(verbHold, requests), explainCall(verbHold, requests, over(ctx))
		}
	}
}

// worthWaiting reports after which time to ask again, and whether that can help.
func worthWaiting(err error, left time.Duration) (wait time.Duration, helps bool) {
	var denied *DeniedError
	if !errors.As(err, &denied) || denied.Reason != ReasonQuota {
		return 0, false
	}
	full := false
	for _, s := range denied.Requests {
		switch {
		case s.OK:
		case s.Limit.slots:
			full = true
		case !s.RetryAt.IsZero() && s.RetryAt.Sub(denied.At) <= left:
			wait = max(wait, min(s.RetryAt.Sub(denied.At), askTokens))
		case s.returns:
			wait = max(wait, askTokens)
		default:
			return 0, false
		}
	}
	if full {
		wait = max(wait, askEvery/2+rand.N(askEvery))
	}
	return wait, true
}

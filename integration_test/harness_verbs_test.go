package integration_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// answered is the answer to any verb.
type answered struct {
	ratelimit.Result           // of a reservation, without what its receipt needs
	runAt            time.Time // when the work of a grant may run
	receipt          ratelimit.Receipt
	took             int // by a Take
	balances         []ratelimit.Balance
}

// delay is how long the work of a grant has to wait.
func (d answered) delay() time.Duration { return d.runAt.Sub(d.At) }

// decide consumes or, if told to, reserves.
func decide(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB, reserve bool, requests ...ratelimit.Request) (answered, error) {
	if !reserve {
		result, err := l.Consume(ctx, db, requests...)
		if err != nil {
			return answered{Result: result}, err
		}
		return answered{Result: result, runAt: result.At, receipt: result.Receipt()}, nil
	}
	r, err := l.Reserve(ctx, db, requests...)
	if err != nil {
		if denial, ok := errors.AsType[*ratelimit.DeniedError](err); ok {
			return answered{Result: resultIn(denial)}, err
		}
		return answered{}, err
	}
	return answered{
		Result: ratelimit.Result{OK: true, At: r.At, Remaining: r.Remaining, ResetAt: r.ResetAt, Requests: r.Requests},
		runAt:  r.RetryAt, receipt: r.Receipt(),
	}, nil
}

// keysOf are the requests without their counts, for the verbs that are about keys.
func keysOf(requests ...ratelimit.Request) (keys []ratelimit.Request) {
	for _, r := range requests {
		keys = append(keys, r.Count(1))
	}
	return keys
}

// readBalances reads balances with a limiter.
func readBalances(t testing.TB, limiter *ratelimit.Limiter, db ratelimit.DB, requests ...ratelimit.Request) []ratelimit.Balance {
	t.Helper()
	balances, err := limiter.Balance(t.Context(), db, keysOf(requests...)...)
	if err != nil {
		t.Fatal(err)
	}
	return balances
}

// readBalance returns the tokens that a request's limit and key have.
func readBalance(t testing.TB, limiter *ratelimit.Limiter, db ratelimit.DB, request ratelimit.Request) float64 {
	t.Helper()
	return readBalances(t, limiter, db, request)[0].Remaining
}

// owes wants a debt that will have been refilled d from now.
func (w world) owes(request ratelimit.Request, d time.Duration) {
	w.Helper()
	w.retries(w.deny(request.Count(0)), d)
}

// refuseReserve reserves and wants an error before anything is sent.
func (w world) refuseReserve(target error, requests ...ratelimit.Request) {
	w.Helper()
	if reserved, err := w.limiter.Reserve(w.Context(), w.db, requests...); !errors.Is(err, target) || !reserved.RetryAt.IsZero() || reserved.Receipt() != "" {
		w.Fatalf("%+v, %v, want %v", reserved, err, target)
	}
}

// wouldReserve makes a reservation and rolls it back.
func (w world) wouldReserve(requests ...ratelimit.Request) ratelimit.Reservation {
	w.Helper()
	tx := w.begin()
	reserved, err := w.limiter.Reserve(w.Context(), tx, requests...)
	w.do(err)
	w.do(tx.Rollback(w.Context()))
	return reserved
}

// take takes at most a number of tokens of each request, and wants a grant of n.
func (w world) take(n, most int, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	took, result, err := w.limiter.Take(w.Context(), w.db, most, requests...)
	if err != nil || !result.OK || took != n || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
		w.Fatalf("took %d: %+v, %v, want %d of at most %d", took, result, err, n, most)
	}
	for i, s := range result.Requests {
		if !s.OK || s.Taken != float64(n) || s.Count != float64(most) {
			w.Fatalf("request %d: %+v, want %d taken of at most %d", i, s, n, most)
		}
	}
	w.summed(result)
	return result
}

// denyTake takes and wants a denial.
func (w world) denyTake(most int, requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	took, result, err := w.limiter.Take(w.Context(), w.db, most, requests...)
	exceeded, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok || took != 0 || result.OK || len(deniedBy(result)) == 0 || !saysTheSame(exceeded, result) {
		w.Fatalf("took %d: %+v, %v, want a denial", took, result, err)
	}
	for i, s := range result.Requests {
		if s.Taken != 0 {
			w.Fatalf("request %d of a denial took %v", i, s.Taken)
		}
	}
	w.summed(result)
	return result
}

package integration_test

import (
	"cmp"
	"context"
	"errors"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/ratelimit"
)

// world is where a behaviour test runs: a handle, and a limiter whose clock stands at noon.
type world struct {
	*testing.T
	db      handle
	limiter *ratelimit.Limiter
	clock   *clock
}

// behaviour runs a test in a world of its own on every handle.
func behaviour(t *testing.T, test func(w world)) {
	t.Helper()
	t.Parallel()
	onEveryHandle(t, func(t *testing.T, db handle) {
		limiter, clock := newLimiter()
		test(world{t, db, limiter, clock})
	})
}

// redeployed is the world of another version of the program, whose limits may have other definitions.
func (w world) redeployed() world {
	w.limiter = &ratelimit.Limiter{Clock: w.limiter.Clock}
	return w
}

// grant consumes and wants a grant.
func (w world) grant(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Consume(w.Context(), w.db, requests...)
	if err != nil || !result.OK || !result.RetryAt.IsZero() || result.RetryAfter != 0 {
		w.Fatalf("denied, or with a RetryAt; want a grant: %+v, %v", result, err)
	}
	for i, s := range result.Requests {
		if !s.OK {
			w.Fatalf("granted, but request %d is not OK: %+v", i, result)
		}
	}
	w.summed(result)
	return result
}

// summed wants the result's totals: the least of what remains, and the latest reset.
func (w world) summed(result ratelimit.Result) {
	w.Helper()
	least := slices.MinFunc(result.Requests, func(a, b ratelimit.Status) int { return cmp.Compare(a.Remaining, b.Remaining) })
	latest := slices.MaxFunc(result.Requests, func(a, b ratelimit.Status) int { return a.ResetAt.Compare(b.ResetAt) })
	if result.Remaining != least.Remaining || !result.ResetAt.Equal(latest.ResetAt) {
		w.Fatalf("%v remain and reset at %v, want %v and %v: %+v", result.Remaining, result.ResetAt, least.Remaining, latest.ResetAt, result)
	}
}

// deny consumes and wants a denial whose error agrees with the result.
func (w world) deny(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Consume(w.Context(), w.db, requests...)
	var exceeded *ratelimit.DeniedError
	if !errors.As(err, &exceeded) || !errors.Is(err, ratelimit.ErrDenied) || result.OK {
		w.Fatalf("%+v, %v, want a denial", result, err)
	}
	if !saysTheSame(exceeded, result) {
		w.Fatalf("the error says %+v, the result %+v", *exceeded, result)
	}
	if len(deniedBy(result)) == 0 {
		w.Fatalf("a denial that names no limit: %+v", result)
	}
	w.summed(result)
	return result
}

// reserve reserves and wants a reservation.
func (w world) reserve(requests ...ratelimit.Request) ratelimit.Reservation {
	w.Helper()
	reserved, err := w.limiter.Reserve(w.Context(), w.db, requests...)
	if err != nil {
		w.Fatalf("denied, want a reservation: %+v, %v", reserved, err)
	}
	if delay := reserved.RetryAt.Sub(reserved.At); delay < 0 || delay != reserved.Delay {
		w.Fatalf("a delay of %v from %v to %v", reserved.Delay, reserved.At, reserved.RetryAt)
	}
	return reserved
}

// runs wants a reservation whose work may run d from now.
func (w world) runs(reserved ratelimit.Reservation, d time.Duration) {
	w.Helper()
	if !reserved.RetryAt.Equal(w.clock.now.Add(d)) || reserved.Delay != d {
		w.Fatalf("the work may run at %v, after %v, want %v after %v", reserved.RetryAt, reserved.Delay, d, w.clock.now)
	}
}

// denyReserve reserves and wants a denial.
func (w world) denyReserve(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	reserved, err := w.limiter.Reserve(w.Context(), w.db, requests...)
	exceeded, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok || !reserved.RetryAt.IsZero() || reserved.Receipt() != "" {
		w.Fatalf("%+v, %v, want a denial", reserved, err)
	}
	result := resultIn(exceeded)
	if len(deniedBy(result)) == 0 {
		w.Fatalf("a denial that names no limit: %+v", result)
	}
	return result
}

// resultIn is what a denial says as a Result.
func resultIn(d *ratelimit.DeniedError) ratelimit.Result {
	return ratelimit.Result{At: d.At, RetryAt: d.RetryAt, RetryAfter: d.RetryAfter, Remaining: d.Remaining, ResetAt: d.ResetAt, Requests: d.Requests}
}

// saysTheSame reports whether a denial and the result beside it say the same.
func saysTheSame(d *ratelimit.DeniedError, r ratelimit.Result) bool {
	return !r.OK && !r.Repeated && reflect.DeepEqual(resultIn(d), ratelimit.Result{
		At: r.At, RetryAt: r.RetryAt, RetryAfter: r.RetryAfter, Remaining: r.Remaining, ResetAt: r.ResetAt, Requests: r.Requests,
	})
}

// deniedBy lists the requests that were denied.
func deniedBy(result ratelimit.Result) []ratelimit.Status {
	return slices.DeleteFunc(slices.Clone(result.Requests), func(s ratelimit.Status) bool { return s.OK })
}

// refuse consumes and wants an error before anything is sent.
func (w world) refuse(target error, requests ...ratelimit.Request) {
	w.Helper()
	result, err := w.limiter.Consume(w.Context(), w.db, requests...)
	if !errors.Is(err, target) || result.OK {
		w.Fatalf("%+v, %v, want %v", result, err, target)
	}
}

// check checks. Its error must be the denial in the result, or none.
func (w world) check(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.limiter.Check(w.Context(), w.db, requests...)
	var exceeded *ratelimit.DeniedError
	switch {
	case result.OK && (err != nil || !result.RetryAt.IsZero() || result.RetryAfter != 0), !result.OK && !errors.As(err, &exceeded):
		w.Fatalf("check: %+v, %v", result, err)
	case !result.OK && !saysTheSame(exceeded, result):
		w.Fatalf("check: the error says %+v, the result %+v", *exceeded, result)
	}
	w.summed(result)
	return result
}

// balance returns the tokens that a request's limit and key have.
func (w world) balance(request ratelimit.Request) float64 {
	w.Helper()
	return w.balances(request)[0].Remaining
}

// balances reads balances.
func (w world) balances(requests ...ratelimit.Request) []ratelimit.Balance {
	w.Helper()
	balances, err := w.limiter.Balance(w.Context(), w.db, keysOf(requests...)...)
	w.do(err)
	return balances
}

// holds wants a balance, give or take the rounding of a few sums.
func (w world) holds(request ratelimit.Request, want float64) {
	w.Helper()
	if got := w.balance(request); !near(got, want) {
		w.Fatalf("balance %v, want %v", got, want)
	}
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(b)) }

// retries wants a RetryAt and a RetryAfter that are d from now.
func (w world) retries(result ratelimit.Result, d time.Duration) {
	w.Helper()
	if !result.RetryAt.Equal(w.clock.now.Add(d)) || result.RetryAfter != d {
		w.Fatalf("retry at %v, after %v, want %v after %v", result.RetryAt, result.RetryAfter, d, w.clock.now)
	}
}

// rows returns the table as text, with the system columns that show whether a row was written or locked.
func (w world) rows() string {
	w.Helper()
	var lines string
	w.do(w.db.QueryRow(w.Context(), `SELECT coalesce(string_agg(concat_ws(' ', r.ctid, r.xmin, r.xmax, r), E'\n' ORDER BY name, key, shard), '')
		FROM ratelimit.limits r`).Scan(&lines))
	return lines
}

// tx is a transaction or a savepoint in one, of pgx or of database/sql.
type tx interface {
	handle
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// begin begins a transaction, or a savepoint in one.
func (w world) begin() tx {
	w.Helper()
	var begun tx
	var err error
	switch db := w.db.(type) {
	case sqlHandle:
		begun, err = db.begin(w.Context())
	case interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	}:
		begun, err = db.Begin(w.Context())
	}
	w.do(err)
	w.Cleanup(func() { _ = begun.Rollback(context.WithoutCancel(w.Context())) }) // without it, a failing test would hang
	return begun
}

func (w world) do(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

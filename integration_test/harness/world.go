package harness

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

// World is where a behaviour test runs: a handle, and a limiter whose clock stands at noon.
type World struct {
	*testing.T
	DB      Handle
	Limiter *ratelimit.Limiter
	Clock   *Clock
}

// Behaviour runs a test in a world of its own on every handle.
func Behaviour(t *testing.T, test func(w World)) {
	t.Helper()
	t.Parallel()
	OnEveryHandle(t, func(t *testing.T, db Handle) {
		limiter, clock := NewLimiter()
		test(World{t, db, limiter, clock})
	})
}

// Redeployed is the world of another version of the program, whose limits may have other definitions.
func (w World) Redeployed() World {
	w.Limiter = &ratelimit.Limiter{Clock: w.Limiter.Clock}
	return w
}

// Grant consumes and wants a grant.
func (w World) Grant(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.Limiter.Consume(w.Context(), w.DB, requests...)
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
func (w World) summed(result ratelimit.Result) {
	w.Helper()
	least := slices.MinFunc(result.Requests, func(a, b ratelimit.Status) int { return cmp.Compare(a.Remaining, b.Remaining) })
	latest := slices.MaxFunc(result.Requests, func(a, b ratelimit.Status) int { return a.ResetAt.Compare(b.ResetAt) })
	if result.Remaining != least.Remaining || !result.ResetAt.Equal(latest.ResetAt) {
		w.Fatalf("%v remain and reset at %v, want %v and %v: %+v", result.Remaining, result.ResetAt, least.Remaining, latest.ResetAt, result)
	}
}

// Deny consumes and wants a denial whose error agrees with the result.
func (w World) Deny(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.Limiter.Consume(w.Context(), w.DB, requests...)
	var exceeded *ratelimit.DeniedError
	if !errors.As(err, &exceeded) || !errors.Is(err, ratelimit.ErrDenied) || result.OK {
		w.Fatalf("%+v, %v, want a denial", result, err)
	}
	if !SaysTheSame(exceeded, result) {
		w.Fatalf("the error says %+v, the result %+v", *exceeded, result)
	}
	if len(DeniedBy(result)) == 0 {
		w.Fatalf("a denial that names no limit: %+v", result)
	}
	w.summed(result)
	return result
}

// Reserve reserves and wants a reservation.
func (w World) Reserve(requests ...ratelimit.Request) ratelimit.Reservation {
	w.Helper()
	reserved, err := w.Limiter.Reserve(w.Context(), w.DB, requests...)
	if err != nil {
		w.Fatalf("denied, want a reservation: %+v, %v", reserved, err)
	}
	if delay := reserved.RetryAt.Sub(reserved.At); delay < 0 || delay != reserved.Delay {
		w.Fatalf("a delay of %v from %v to %v", reserved.Delay, reserved.At, reserved.RetryAt)
	}
	return reserved
}

// Runs wants a reservation whose work may run d from now.
func (w World) Runs(reserved ratelimit.Reservation, d time.Duration) {
	w.Helper()
	if !reserved.RetryAt.Equal(w.Clock.At.Add(d)) || reserved.Delay != d {
		w.Fatalf("the work may run at %v, after %v, want %v after %v", reserved.RetryAt, reserved.Delay, d, w.Clock.At)
	}
}

// DenyReserve reserves and wants a denial.
func (w World) DenyReserve(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	reserved, err := w.Limiter.Reserve(w.Context(), w.DB, requests...)
	exceeded, ok := errors.AsType[*ratelimit.DeniedError](err)
	if !ok || !reserved.RetryAt.IsZero() || reserved.Receipt() != "" {
		w.Fatalf("%+v, %v, want a denial", reserved, err)
	}
	result := ResultIn(exceeded)
	if len(DeniedBy(result)) == 0 {
		w.Fatalf("a denial that names no limit: %+v", result)
	}
	return result
}

// ResultIn is what a denial says as a Result.
func ResultIn(d *ratelimit.DeniedError) ratelimit.Result {
	return ratelimit.Result{At: d.At, RetryAt: d.RetryAt, RetryAfter: d.RetryAfter, Remaining: d.Remaining, ResetAt: d.ResetAt, Requests: d.Requests}
}

// SaysTheSame reports whether a denial and the result beside it say the same.
func SaysTheSame(d *ratelimit.DeniedError, r ratelimit.Result) bool {
	return !r.OK && !r.Repeated && reflect.DeepEqual(ResultIn(d), ratelimit.Result{
		At: r.At, RetryAt: r.RetryAt, RetryAfter: r.RetryAfter, Remaining: r.Remaining, ResetAt: r.ResetAt, Requests: r.Requests,
	})
}

// DeniedBy lists the requests that were denied.
func DeniedBy(result ratelimit.Result) []ratelimit.Status {
	return slices.DeleteFunc(slices.Clone(result.Requests), func(s ratelimit.Status) bool { return s.OK })
}

// Refuse consumes and wants an error before anything is sent.
func (w World) Refuse(target error, requests ...ratelimit.Request) {
	w.Helper()
	result, err := w.Limiter.Consume(w.Context(), w.DB, requests...)
	if !errors.Is(err, target) || result.OK {
		w.Fatalf("%+v, %v, want %v", result, err, target)
	}
}

// Check checks. Its error must be the denial in the result, or none.
func (w World) Check(requests ...ratelimit.Request) ratelimit.Result {
	w.Helper()
	result, err := w.Limiter.Check(w.Context(), w.DB, requests...)
	var exceeded *ratelimit.DeniedError
	switch {
	case result.OK && (err != nil || !result.RetryAt.IsZero() || result.RetryAfter != 0), !result.OK && !errors.As(err, &exceeded):
		w.Fatalf("check: %+v, %v", result, err)
	case !result.OK && !SaysTheSame(exceeded, result):
		w.Fatalf("check: the error says %+v, the result %+v", *exceeded, result)
	}
	w.summed(result)
	return result
}

// Balance returns the tokens that a request's limit and key have.
func (w World) Balance(request ratelimit.Request) float64 {
	w.Helper()
	return w.Balances(request)[0].Remaining
}

// Balances reads balances.
func (w World) Balances(requests ...ratelimit.Request) []ratelimit.Balance {
	w.Helper()
	balances, err := w.Limiter.Balance(w.Context(), w.DB, KeysOf(requests...)...)
	w.Do(err)
	return balances
}

// Holds wants a balance, give or take the rounding of a few sums.
func (w World) Holds(request ratelimit.Request, want float64) {
	w.Helper()
	if got := w.Balance(request); !Near(got, want) {
		w.Fatalf("balance %v, want %v", got, want)
	}
}

// Near allows for the rounding of a few sums.
func Near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(b)) }

// Retries wants a RetryAt and a RetryAfter that are d from now.
func (w World) Retries(result ratelimit.Result, d time.Duration) {
	w.Helper()
	if !result.RetryAt.Equal(w.Clock.At.Add(d)) || result.RetryAfter != d {
		w.Fatalf("retry at %v, after %v, want %v after %v", result.RetryAt, result.RetryAfter, d, w.Clock.At)
	}
}

// Rows returns the table as text, with the system columns that show whether a row was written or locked.
func (w World) Rows() string {
	w.Helper()
	var lines string
	w.Do(w.DB.QueryRow(w.Context(), `SELECT coalesce(string_agg(concat_ws(' ', r.ctid, r.xmin, r.xmax, r), E'\n' ORDER BY name, key, shard), '')
		FROM ratelimit.limits r`).Scan(&lines))
	return lines
}

// Tx is a transaction or a savepoint in one, of pgx or of database/sql.
type Tx interface {
	Handle
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// Begin begins a transaction, or a savepoint in one.
func (w World) Begin() Tx {
	w.Helper()
	var begun Tx
	var err error
	switch db := w.DB.(type) {
	case SQLHandle:
		begun, err = db.begin(w.Context())
	case interface {
		Begin(ctx context.Context) (pgx.Tx, error)
	}:
		begun, err = db.Begin(w.Context())
	}
	w.Do(err)
	w.Cleanup(func() { _ = begun.Rollback(context.WithoutCancel(w.Context())) }) // without it, a failing test would hang
	return begun
}

// Do ends the test if something has failed.
func (w World) Do(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

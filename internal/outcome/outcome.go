// Package outcome consumes for a request of a client, and turns result and error into a status, so that httplimit and
// rpclimit refuse in the same way.
package outcome

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inflight"
	"github.com/txlimit/txlimit/ratelimit"
)

// Unusable says why a limiter and a DB can decide nothing, or is empty.
func Unusable(limiter *ratelimit.Limiter, db ratelimit.DB) string {
	coalescer, coalesces := db.(*ratelimit.Coalescer)
	switch {
	case limiter == nil:
		return "Limiter is nil"
	case handles.IsNil(db):
		return "DB is nil"
	case coalesces && coalescer.Pool == nil:
		return "the Pool of DB, a Coalescer, is nil"
	case handles.IsOne(db):
		return fmt.Sprintf("DB is a connection or a transaction (%s), and many goroutines use it: it must be a pool", handles.Type(db))
	}
	return ""
}

// Consume consumes within a time. A conflict is not a failure of the database: it tries again.
func Consume(ctx context.Context, timeout time.Duration, limiter *ratelimit.Limiter, db ratelimit.DB, requests []ratelimit.Request) (result ratelimit.Result, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = limiter.Retry(ctx, func(ctx context.Context) (err error) {
		result, err = limiter.Consume(ctx, db, requests...)
		return err
	})
	return result, err
}

// Work is what runs while it holds: see package inflight.
type Work = inflight.Work[ratelimit.Request, ratelimit.Held]

var (
	slots  = inflight.Slots.(func([]ratelimit.Request) bool)
	during = inflight.During.(func(context.Context, *ratelimit.Limiter, ratelimit.DB, Work, ...ratelimit.Request) (ratelimit.Result, error))
)

// process is in the ids of this process, so that what a dead one holds can be found.
var process = func() string {
	host, _ := os.Hostname()
	return fmt.Sprintf("%.64s/%d", host, os.Getpid())
}()

// Slots reports whether one of the requests asks for slots: then they are held by Hold, and not consumed.
func Slots(requests []ratelimit.Request) bool { return slots(requests) }

// Hold holds while w.Serve runs. Its error is that of the hold: then nothing was served.
func Hold(ctx context.Context, kind string, limiter *ratelimit.Limiter, db ratelimit.DB, w Work, requests []ratelimit.Request) (ratelimit.Result, error) {
	w.ID = kind + "/" + process + "/" + rand.Text()
	return during(ctx, limiter, db, w, requests...)
}

// Held is the Result of a Hold.
func Held(h ratelimit.Held) ratelimit.Result {
	return ratelimit.Result{OK: true, At: h.At, Remaining: h.Remaining, ResetAt: h.ResetAt, Requests: h.Requests}
}

// Unanswered is a Result without the answer.
func Unanswered(r ratelimit.Result) ratelimit.Result {
	var asked ratelimit.Result
	for _, s := range r.Requests {
		asked.Requests = append(asked.Requests, ratelimit.Status{Limit: s.Limit, Key: s.Key, Count: s.Count})
	}
	return asked
}

// OfSlots reports whether a limit is of slots.
func OfSlots(l ratelimit.Limit) bool { return l.Config().Kind == "slots" }

// RetryAt is when a denied call may be tried again, as far as that is known: nobody knows when the work of others ends.
// It is zero if slots alone denied it. never reports whether waiting does not help.
func RetryAt(denied *ratelimit.DeniedError) (at time.Time, never bool) {
	full := false
	for _, s := range denied.Requests {
		switch {
		case s.OK:
		case OfSlots(s.Limit):
			full = true
		case s.RetryAt.IsZero():
			never = true
		case s.RetryAt.After(at):
			at = s.RetryAt
		}
	}
	if !full || denied.Reason != ratelimit.ReasonQuota {
		return denied.RetryAt, denied.RetryAt.IsZero()
	}
	return at, never
}

// Status is the HTTP status for Consume's error, or 0 for a grant. An error that it does not know is 503.
func Status(err error) int {
	var denied *ratelimit.DeniedError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &denied):
		if _, never := RetryAt(denied); never {
			return http.StatusForbidden
		}
		return http.StatusTooManyRequests
	case Uncountable(err):
		return http.StatusBadRequest
	case errors.Is(err, ratelimit.ErrInvalid):
		return http.StatusInternalServerError
	default:
		return http.StatusServiceUnavailable
	}
}

// Uncountable reports whether a key or a count is refused, by the library or by the database: by the client's mistake, or the program's.
func Uncountable(err error) bool {
	return errors.Is(err, ratelimit.ErrBadRequest) || errors.Is(err, ratelimit.ErrExceedsCapacity) || unstorable(err)
}

// unstorable reports whether the database is up but refused a key: the application may have added a constraint to the table.
func unstorable(err error) bool {
	var sqlErr interface{ SQLState() string }
	if !errors.As(err, &sqlErr) {
		return false
	}
	state := sqlErr.SQLState()
	return strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23") // data exception, integrity constraint violation
}

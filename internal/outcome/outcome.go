// Package outcome consumes for a request of a client, and turns result and error into a status, so that httplimit and
// rpclimit refuse in the same way.
package outcome

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/handles"
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

// Status is the HTTP status for Consume's error, or 0 for a grant. An error that it does not know is 503.
func Status(err error) int {
	var denied *ratelimit.DeniedError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &denied) && denied.RetryAt.IsZero():
		return http.StatusForbidden
	case denied != nil:
		return http.StatusTooManyRequests
	case errors.Is(err, ratelimit.ErrExceedsCapacity), Uncountable(err):
		return http.StatusBadRequest
	case errors.Is(err, ratelimit.ErrInvalid):
		return http.StatusInternalServerError
	default:
		return http.StatusServiceUnavailable
	}
}

// Uncountable reports whether a key or a count is refused, by the library or by the database.
func Uncountable(err error) bool { return errors.Is(err, ratelimit.ErrBadRequest) || unstorable(err) }

// unstorable reports whether the database is up but refused a key: the application may have added a constraint to the table.
func unstorable(err error) bool {
	var sqlErr interface{ SQLState() string }
	if !errors.As(err, &sqlErr) {
		return false
	}
	state := sqlErr.SQLState()
	return strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23") // data exception, integrity constraint violation
}

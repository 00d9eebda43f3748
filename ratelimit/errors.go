package ratelimit

import (
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrInvalid is matched by the error for a limit, a request or an argument that is wrong in itself. [New],
// [Limit.Validate], every verb, [Limiter.QueueConsume], [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx],
// [Limiter.Sweep], [Publish] and [Retry] return it. Nothing was sent to the server.
var ErrInvalid = errors.New("ratelimit: invalid")

// programError is an [ErrInvalid] caused by the program, not by a key or a count that a client may have chosen.
type programError struct{ error }

func (e programError) Unwrap() error { return e.error }

// ProgramError marks the error for package internal/outcome: it is the server's fault, not the client's.
func (programError) ProgramError() {}

// ErrExceedsCapacity is matched by the error for a count that can never be granted: a count above the capacity or, when
// reserving, above capacity + maxReserved. [Limiter.Consume], [Limiter.Wait], [Limiter.Reserve], [Limiter.Check] and
// [Limiter.QueueConsume] return it, and [Limiter.Take] for a capacity below one token. Waiting does not help. Nothing was sent to the server.
var ErrExceedsCapacity = errors.New("ratelimit: count exceeds capacity")

// ErrUnknownOutcome is matched by an error that leaves open whether something was committed. A COMMIT, or a call that is a
// transaction of its own, was sent. Then the connection broke or ctx ended, and no answer came.
//
// Tokens may be gone without a grant. A retry may consume twice and store business rows twice, so this package never
// retries after it. To find out, look for a business row that the transaction would have stored under a key chosen by the
// caller. Any other error of this package's functions means that nothing was consumed or committed: a retry is safe.
//
// [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] and [Limiter.Sweep] return it. [Limiter.Consume], [Limiter.Wait],
// [Limiter.Reserve], [Limiter.Take], [Limiter.Charge] and [Limiter.Refund] return it on a connection, a pool or a [Coalescer]. On a transaction of the
// caller's they do not, since the caller's COMMIT decides.
//
// Four functions are exceptions. After an error of [Limiter.Reset], the limits may be full all the same, and after an error of
// [Limiter.Move], the move may have been made: call them again.
// [Retry] returns the error of the caller's own COMMIT as it is, and the outcome of that COMMIT may be unknown too. A
// [Limiter.Wait] whose context ends while it sleeps may not give all tokens back.
//
// In doubt, the package returns it: for example, on a connection on which the caller has begun a transaction by hand, or
// for an answer that cannot be read.
var ErrUnknownOutcome = errors.New("outcome unknown")

// ErrAttemptsExhausted is matched by the error of a transaction that could not be serialized in any of its attempts, or
// before its context ended. [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] and [Retry] return it. So do
// [Limiter.Consume], [Limiter.Wait], [Limiter.Reserve] and [Limiter.Charge] on a [Coalescer]. Nothing was committed. The error states the
// number of attempts, and wraps the errors of the last attempt and of the context.
var ErrAttemptsExhausted = errors.New("attempts ran out")

// unknownUnless marks the error of a commit as unknown, unless the error itself means that nothing was committed.
func unknownUnless(err error) error {
	if err == nil || notCommitted(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
}

// notCommitted reports whether the error of a commit means that nothing was committed.
func notCommitted(err error) bool {
	switch state := sqlState(err); {
	case errors.Is(err, pgconn.ErrConnClosed):
		// pgx calls it safe to retry, since a closed connection is found before anything is sent. But the same error
		// remains when the connection breaks during a COMMIT, or during anything in the simple protocol.
		return false
	case errors.As(err, new(*pgconn.ConnectError)), errors.As(err, new(pgx.ErrPreprocessingBatch)), pgconn.SafeToRetry(err):
		return true // not sent
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.Is(err, sql.ErrTxDone):
		return true // rolled back
	case len(state) != 5:
		return false // no answer came
	case state == "40003" || state[:2] == "08":
		return false // stated by the server, or by a pooler that lost its server
	case state[:3] == "57P":
		return false // the server ended the connection (pg_terminate_backend, a shutdown), maybe after the commit
	case state[:2] == "53" || state[:2] == "58" || state[:2] == "XX":
		return false // the server may have panicked (a full disk) after the commit record was on disk
	default:
		return true // the server answered with an error
	}
}

// ErrNotLoaded is matched by the error of every call of a [Limiter] whose [Overrides] were never read: a block may be in
// force. The text has the error of the last attempt. Nothing was sent. FailOpen of packages httplimit and rpclimit does not
// pass it.
var ErrNotLoaded = errors.New("ratelimit: the overrides are not loaded")

// ErrClosed is matched by the error of a call after [Limiter.Close], and of [Limiter.Consume], [Limiter.Wait],
// [Limiter.Reserve], [Limiter.Take] and [Limiter.Charge] on a [Coalescer] that was closed. Nothing was sent. FailOpen of
// packages httplimit and rpclimit does not pass it.
var ErrClosed = errors.New("closed")

var errLimiterClosed = fmt.Errorf("ratelimit: the Limiter is %w", ErrClosed)

// ErrDenied is matched by every denial: errors.Is(err, ErrDenied). The error is a [*DeniedError], which says when to retry.
var ErrDenied = errors.New("ratelimit: denied")

// DeniedError is the error of a denial, by [Limiter.Consume], [Limiter.Wait], [Limiter.Reserve], [Limiter.Take] and
// [Limiter.Check]. It matches [ErrDenied]. Nothing was consumed. It is not a SQL error: the transaction stays usable. In a batch ([Limiter.QueueConsume]) it stands
// for a SQL error, and the transaction is aborted.
//
// A limit with a rate of 0 denies every token ([ReasonPlan]): for example, a plan that does not include the feature. A block
// by [Overrides] denies every token until its end ([ReasonBlock]). For both, nothing is sent to the server, not even for the
// other limits of the call, and At is the time of [Limiter.Clock] or of this process. If waiting does not help (see Permanent),
// an HTTP server should answer 403, not 429.
type DeniedError struct {
	// Result says when to retry, and has the status of every request of the call. The requests that caused the denial have
	// OK false.
	Result

	// Reason is why the call was denied. If several limits denied it, it is the one that lasts longest: a plan, then a block.
	Reason Reason
}

// Reason is why a call was denied.
type Reason string

// The reasons of a denial.
const (
	ReasonQuota Reason = "quota" // the tokens are not there; RetryAt says when
	ReasonPlan  Reason = "plan"  // the limit's rate is 0
	ReasonBlock Reason = "block" // a block by Overrides; RetryAt is its end, if it has one
)

// Permanent reports whether waiting does not help: a plan that grants nothing, or a block without an end. Then RetryAt is
// zero.
func (e *DeniedError) Permanent() bool { return e.RetryAt.IsZero() }

// Unwrap returns [ErrDenied].
func (e *DeniedError) Unwrap() error { return ErrDenied }

// Error names every limit that denied, but no keys, since they may be personal data. The Result has the keys. The remaining
// tokens are rounded down, the wait is rounded up.
func (e *DeniedError) Error() string {
	type bucket struct{ name, key string }
	asked := map[bucket]float64{}
	for _, s := range e.Requests {
		asked[bucket{s.Limit.name, s.Key}] += s.Count
	}
	var denied []string
	for _, s := range e.Requests {
		id := bucket{s.Limit.name, s.Key}
		if count, first := asked[id]; first && !s.OK {
			delete(asked, id)
			upTo := ""
			if s.upTo {
				upTo = "up to "
			}
			if s.Limit.numbers.Rate == 0 {
				denied = append(denied, fmt.Sprintf("%s (%s%v asked, the rate is 0)", s.Limit.name, upTo, count))
				continue
			}
			if s.Limit.blocked {
				denied = append(denied, fmt.Sprintf("%s (%s%v asked, %s)", s.Limit.name, upTo, count, s.Limit.blockedText()))
				continue
			}
			denied = append(denied, fmt.Sprintf("%s (%s%v asked, %v of %v remaining%s)", s.Limit.name, upTo, count,
				math.Floor(s.Remaining*1000)/1000, s.Limit.Capacity(), s.Limit.reservable()))
		}
	}
	if e.Permanent() {
		return fmt.Sprintf("%v by policy: %s", ErrDenied, strings.Join(denied, ", "))
	}
	wait := e.RetryAfter
	if rest := wait % time.Millisecond; rest > 0 && wait < math.MaxInt64-time.Millisecond {
		wait += time.Millisecond - rest
	}
	return fmt.Sprintf("%v: %s; retry in %v", ErrDenied, strings.Join(denied, ", "), wait)
}

// retryable reports whether the whole transaction should be run again. An error whose attempts ran out should not.
func retryable(err error) bool {
	state := sqlState(err)
	return (state == "40001" || state == "40P01") && !errors.Is(err, ErrAttemptsExhausted)
}

// sqlState is the SQLSTATE in an error's chain, or empty. Every driver's error has the method.
func sqlState(err error) string {
	if sqlErr := (interface{ SQLState() string })(nil); errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

// explain adds the failed operation to a database error and, for a missing function, a hint.
func explain(what string, err error) error {
	if sqlState(err) == "42883" { // undefined_function, which has several causes
		return fmt.Errorf("ratelimit: %s: %w (has the schema of package migrations been migrated, is it in the search_path, and may this role use it?)", what, err)
	}
	return fmt.Errorf("ratelimit: %s: %w", what, err)
}

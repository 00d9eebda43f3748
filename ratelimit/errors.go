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

// ErrInvalid is matched by the errors for a limit or a request that is wrong in itself: from [New], [Limit.Validate], every
// verb, [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx], [Limiter.Sweep] and [Retry]. Nothing was sent to the server.
var ErrInvalid = errors.New("ratelimit: invalid")

// programError is an [ErrInvalid] of the program's own making, not of a key or a count that a client may have chosen.
type programError struct{ error }

func (e programError) Unwrap() error { return e.error }

// ProgramError is what package httplimit looks for, to answer 500 and not 400.
func (programError) ProgramError() {}

// ErrExceedsCapacity is matched by the error for a count that can never be granted: above the capacity or, when reserving,
// above capacity + maxReserved. [Limiter.Consume] and [Limiter.Check] return it. Waiting does not help. Nothing was sent to
// the server.
var ErrExceedsCapacity = errors.New("ratelimit: count exceeds capacity")

// ErrUnknownOutcome is matched by an error that leaves open whether something was committed: COMMIT, or a call that is a
// transaction of its own, was on its way when the connection broke or ctx was over, and no answer came. Tokens may be gone
// which nobody was told of; to run it again may consume twice, and may store business rows twice. An error that does not match
// it, of this package's functions, means that nothing was consumed and nothing committed: it is safe to try again.
//
// [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] and [Limiter.Sweep] return it, and [Limiter.Consume], [Limiter.Charge] and
// [Limiter.Refund] on a connection, a pool or a [Coalescer], but not in a transaction of the caller's, whose COMMIT decides.
// [Limiter.Reset] does not: if it returns an error there, the limits may be full all the same, and it can be called again.
// Nor does [Retry], which returns the error of a COMMIT that is not the package's own as it is: that may be unknown, too.
// The package itself never runs again what ended like this. To find out, look for a business row that the transaction
// would have stored under a key which the caller has chosen.
//
// It is said too often rather than too seldom: of a connection on which the caller has begun a transaction by hand, for example, or
// of an answer that cannot be read, whatever it was asked on.
var ErrUnknownOutcome = errors.New("outcome unknown")

// ErrAttemptsExhausted is matched by the error of a transaction that could not be serialized as often as it was tried, or until its
// context was over. [Limiter.InTx], [Limiter.InSQLTx], [Limiter.SendTx] and [Retry] return it, and [Limiter.Consume] and
// [Limiter.Charge] on a [Coalescer]. Nothing was committed. The error says after how many attempts, and wraps that of the last one
// and the context's.
var ErrAttemptsExhausted = errors.New("attempts ran out")

// unknownUnless marks the error of a commit, unless it says itself that nothing was committed.
func unknownUnless(err error) error {
	if err == nil || notCommitted(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
}

// notCommitted says whether the error of a commit means that nothing was committed.
func notCommitted(err error) bool {
	switch state := sqlState(err); {
	case errors.Is(err, pgconn.ErrConnClosed):
		// pgx calls it safe to retry, since the connection is found closed before anything is sent. But it is also what
		// remains of the error when the connection breaks under a COMMIT, or anything else in the simple protocol.
		return false
	case errors.As(err, new(*pgconn.ConnectError)), errors.As(err, new(pgx.ErrPreprocessingBatch)), pgconn.SafeToRetry(err):
		return true // it was not sent
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.Is(err, sql.ErrTxDone):
		return true // it was rolled back
	case len(state) != 5:
		return false // there is no answer
	case state == "40003" || state[:2] == "08":
		return false // in the server's own words; or a pooler's, which has lost its server
	case state[:3] == "57P":
		return false // the server has ended the connection (pg_terminate_backend, a shutdown), maybe when it had committed
	case state[:2] == "53" || state[:2] == "58" || state[:2] == "XX":
		return false // it may have panicked (a full disk), when the record of the commit was on disk
	default:
		return true // it has answered, and not with success
	}
}

// ErrDenied is matched by every denial: errors.Is(err, ErrDenied). The error is a [*DeniedError], which says when to try again.
var ErrDenied = errors.New("ratelimit: denied")

// DeniedError is what [Limiter.Consume] and [Limiter.Check] return for a denial. It matches [ErrDenied]. It is no SQL error: the transaction stays
// usable, and nothing was consumed. On a batch ([Limiter.QueueConsume]) it stands for a SQL error, and the transaction is aborted.
type DeniedError struct {
	// Result says when to try again, and answers every request of the call. The requests that denied it have OK false.
	Result
}

// Unwrap returns [ErrDenied].
func (e *DeniedError) Unwrap() error { return ErrDenied }

// Error names every limit that denied, but not the keys, which may be personal data; they are in the Result. What remains
// is rounded down, the wait up.
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
			denied = append(denied, fmt.Sprintf("%s (%v asked, %v of %v remaining%s)", s.Limit.name, count,
				math.Floor(s.Remaining*1000)/1000, s.Limit.Capacity(), s.Limit.reservable()))
		}
	}
	wait := e.RetryAfter
	if rest := wait % time.Millisecond; rest > 0 && wait < math.MaxInt64-time.Millisecond {
		wait += time.Millisecond - rest
	}
	return fmt.Sprintf("%v: %s; retry in %v", ErrDenied, strings.Join(denied, ", "), wait)
}

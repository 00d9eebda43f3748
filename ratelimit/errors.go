package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/migrations"
)

// Every error matches one of these, or is the context's, the database's or the connection's, wrapped such that
// errors.Is and errors.As find it. It names limits, and no keys.
//
//	ErrDenied             nothing was consumed: Consume, Wait, Reserve, Take, Check, Hold, During, Once,
//	                      QueueConsume, SendTx
//	ErrHoldLost           the hold is, or may be, another's: During, Hold (of its token), Settle,
//	                      Release (by the id of a hold that has an end)
//	ErrInvalid            nothing was sent: Consume, Wait, Reserve, Take, Check, Balance, Charge, Refund, Reset, Move,
//	                      Pause, Resume, ConsumeEach, Hold, Settle, Release, Once,
//	                      During (or its function has used what was not held),
//	                      Override, Block, Restore, Unblock, QueueConsume, InTx, InSQLTx, SendTx, Retry, Sweep, Publish,
//	                      Open, Limit, Validate, UnmarshalJSON
//	ErrBadRequest         nothing was sent; it matches ErrInvalid, too: Consume, Wait, Reserve, Take, Check, Balance,
//	                      Charge, Refund, Reset, Move, Pause, Resume, ConsumeEach, Hold, Settle, Release, During, Once,
//	                      Override, Block, Restore, Unblock, QueueConsume, InTx, InSQLTx
//	ErrExceedsCapacity    nothing was sent: Consume, Wait, Reserve, Take, Check, Hold, During, Once, QueueConsume
//	ErrClosed             nothing was sent: Consume, Wait, Reserve, Take, Check, Balance, Reset, Move, Pause, Resume,
//	                      ConsumeEach, Hold, During, Once, Override, Block, Restore, Unblock, QueueConsume
//	                      (on a closed Coalescer: Consume, Wait, Reserve, Take)
//	ErrAttemptsExhausted  nothing was committed: InTx, InSQLTx, SendTx, Retry, Sweep, Publish, Open, During;
//	                      Consume, Wait, Reserve, Take, Charge (on a Coalescer)
//	ErrUnknownOutcome     perhaps committed: InTx, InSQLTx, SendTx, Sweep; outside a transaction Consume, Wait, Reserve,
//	                      Take, Charge, Refund, ConsumeEach, Hold, Settle, Release, During, Once, QueueConsume
//	migrations.ErrBehind  nothing was written: Open
//	any other             nothing was committed, except by Reset, Move, Pause, Resume, Override, Block, Restore, Unblock,
//	                      Publish, Open, Close, Retry and During
//
// After any other error of these outside a transaction, the work may have been done: call them again. [Limiter.Retry]
// and [Limiter.During] return the error of their function as it is. [Limiter.Sweep] has committed the transactions
// before the error's.
var (
	// ErrDenied is matched by every denial. The error is a [*DeniedError], which says when to retry.
	ErrDenied = errors.New("ratelimit: denied")

	// ErrInvalid is matched by the error for a limit, a request or an argument that is wrong in itself. Nothing was
	// sent.
	ErrInvalid = errors.New("ratelimit: invalid")

	// ErrBadRequest is matched by the error for a key, a count or an id that is wrong, such as an empty key: a client
	// may have chosen it. It matches [ErrInvalid], too. A server answers 400 to it, and 500 to any other ErrInvalid.
	ErrBadRequest = fmt.Errorf("%w request", ErrInvalid)

	// ErrExceedsCapacity is matched by the error for a count that can never be granted: above the capacity or, when
	// reserving, above capacity + maxReserved. For [Limiter.Take], it is a capacity below one token. Nothing was sent.
	// A count that only an override with an end cannot grant is a denial.
	ErrExceedsCapacity = errors.New("ratelimit: count exceeds capacity")

	// ErrClosed is matched by the error of a call after [Limiter.Close] or [Coalescer.Close], but never of Charge,
	// Refund, Settle and Release. FailOpen of packages httplimit and rpclimit does not pass it.
	ErrClosed = errors.New("closed")

	// ErrUnknownOutcome is matched by an error that leaves open whether something was committed: a COMMIT, or a call
	// that is a transaction of its own, was sent, and no answer came. A retry may consume twice, so this package makes
	// none. Look for a business row that the transaction would have stored.
	//
	// On a transaction of the caller's, no verb returns it, but on one begun by hand on a *sql.Conn. [Limiter.SendTx]
	// also returns it if a function that reads the batch's results fails after COMMIT, and [Limiter.Wait] if ctx ends
	// while it sleeps and the tokens cannot be given back.
	ErrUnknownOutcome = errors.New("outcome unknown")

	// ErrHoldLost is matched by the error of a [Limiter.Settle] whose hold is gone: its slots were given back, its id
	// was taken again, or it was released. Nothing was changed; the result says which limits have lost it. Return it,
	// to roll back.
	//
	// It is also matched by the error of a Settle or a [Limiter.Release] that has only the id of a hold with an end; of
	// a [Limiter.Hold] whose Token has ended; and of a [Limiter.During] whose hold was lost or could not be extended.
	ErrHoldLost = errors.New("ratelimit: the hold was lost")

	// ErrAttemptsExhausted is matched by the error of a transaction that could not be serialized in any of its
	// attempts, or before its context ended. Nothing was committed. It wraps the last error and the context's.
	ErrAttemptsExhausted = errors.New("attempts ran out")
)

// unsentError is an error from before anything was sent.
type unsentError struct{ error }

// SafeToRetry is called by pgconn.SafeToRetry.
func (unsentError) SafeToRetry() bool { return true }

func (e unsentError) Unwrap() error { return e.error }

// unknownUnless marks the error of a commit as unknown, unless the error itself means that nothing was committed.
func unknownUnless(err error) error {
	if err == nil || notCommitted(err) {
		return err
	}
	return unknown(err)
}

// unknown marks an error as unknown.
func unknown(err error) error {
	if errors.Is(err, ErrUnknownOutcome) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
}

// committedError is the error of a function that reads the results of a batch, after COMMIT. A retry would consume
// twice, so it matches [ErrUnknownOutcome]. The function may have got its error from another call of this package.
// Then it does not match what says that nothing was consumed, since this batch has consumed.
type committedError struct{ beside }

func (e committedError) Error() string {
	return "ratelimit: the batch was committed, and then a function that reads its results failed: " + e.error.Error()
}

func (e committedError) Is(target error) bool {
	return target == ErrUnknownOutcome || e.beside.Is(target)
}

// nothingDone are the sentinels of errors after which nothing was consumed or committed.
var nothingDone = []error{ErrDenied, ErrInvalid, ErrBadRequest, ErrExceedsCapacity, ErrClosed, ErrHoldLost, ErrAttemptsExhausted, migrations.ErrBehind}

// beside is an error beside one that leaves the outcome open: it matches nothing that would say that nothing was
// consumed. There is no Unwrap: it would show every error inside.
type beside struct{ error }

func (e beside) Is(target error) bool {
	return !slices.Contains(nothingDone, target) && errors.Is(e.error, target)
}

func (e beside) As(target any) bool {
	_, denial := target.(**DeniedError)
	return !denial && errors.As(e.error, target)
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
	case errors.Is(err, pgx.ErrTxCommitRollback):
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

// DeniedError is the error of a denial: it matches [ErrDenied], and nothing was consumed. It is not a SQL error: the
// transaction stays usable, but for a batch ([Limiter.QueueConsume]).
//
// A limit with a rate of 0 denies every token ([ReasonPlan]), a [Limiter.Block] until its end ([ReasonBlock]). For
// both, nothing is sent, not even for the other limits of the call, and At is the time of [Limiter.Clock] or of this
// process.
type DeniedError struct {
	// At is as in [Result].
	At time.Time

	// RetryAt and RetryAfter are as in [Result]. If RetryAt is zero, waiting does not help: answer 403, not 429.
	RetryAt    time.Time
	RetryAfter time.Duration

	// Remaining and ResetAt are as in [Result]. With ReasonHeld and ReasonSettled, they are zero: not read.
	Remaining float64
	ResetAt   time.Time

	// Requests has the status of each request, in order. Those that caused the denial have OK false.
	Requests []Status

	// Reason is why the call was denied: of several, the one that lasts longest, a plan, then a block.
	Reason Reason
}

// Reason is why a call was denied.
type Reason string

// The reasons of a denial. For a plan or a block, RetryAt is the first instant at which the key has a rate and no
// block, since overrides have ended. It is zero if there is none. The tokens may not be there then.
const (
	ReasonQuota   Reason = "quota"   // the tokens are not there; RetryAt says when, or is zero: see [Result.RetryAt]
	ReasonPlan    Reason = "plan"    // the limit's rate is 0, or it has no slots
	ReasonBlock   Reason = "block"   // a [Limiter.Block]
	ReasonHeld    Reason = "held"    // of a Hold or During: its id is held, by another delivery; RetryAt is that hold's end
	ReasonSettled Reason = "settled" // of a Hold: the work of its id was settled within a day; RetryAt is zero
)

// Unwrap returns [ErrDenied].
func (e *DeniedError) Unwrap() error { return ErrDenied }

// Error names every limit that denied, but no keys, since they may be personal data. Requests has the keys. The
// remaining tokens are rounded down, the wait is rounded up.
func (e *DeniedError) Error() string {
	switch {
	case e.Reason == ReasonSettled:
		return fmt.Sprintf("%v: %sthe work of this id was settled", ErrDenied, limitsIn(e.Requests))
	case e.Reason == ReasonHeld && e.RetryAt.IsZero():
		return fmt.Sprintf("%v: %sthis id is held, without an end", ErrDenied, limitsIn(e.Requests))
	case e.Reason == ReasonHeld:
		return fmt.Sprintf("%v: %sthis id is held; retry in %v", ErrDenied, limitsIn(e.Requests), roundedUp(e.RetryAfter))
	}
	asked := map[limitKey]float64{}
	for _, s := range e.Requests {
		asked[limitKey{s.Limit.name, s.Key}] += s.Count
	}
	var denied []string
	for _, s := range e.Requests {
		id := limitKey{s.Limit.name, s.Key}
		if count, first := asked[id]; first && !s.OK {
			delete(asked, id)
			upTo, why := "", fmt.Sprintf("%s of %s remaining%s", visible.Number(math.Floor(s.Remaining*1000+1e-6)/1000), visible.Number(s.Limit.Capacity()), s.Limit.reservable())
			if s.upTo {
				upTo = "up to "
			}
			switch {
			case s.Limit.slots && s.Limit.empty():
				why = "there are no slots"
			case s.Limit.empty() && count > 0:
				why = "the rate is 0"
			case s.Limit.blocked:
				why = s.Limit.blockedText()
			}
			denied = append(denied, fmt.Sprintf("%s (%s%s asked, %s)", s.Limit.name, upTo, visible.Number(count), why))
		}
	}
	switch {
	case e.RetryAt.IsZero() && e.Reason == ReasonQuota:
		return fmt.Sprintf("%v: %s; waiting alone does not help", ErrDenied, strings.Join(denied, ", "))
	case e.RetryAt.IsZero():
		return fmt.Sprintf("%v by policy: %s", ErrDenied, strings.Join(denied, ", "))
	}
	return fmt.Sprintf("%v: %s; retry in %v", ErrDenied, strings.Join(denied, ", "), roundedUp(e.RetryAfter))
}

// roundedUp is a wait in milliseconds: a caller that waits for so long is not too early.
func roundedUp(wait time.Duration) time.Duration {
	if rest := wait % time.Millisecond; rest > 0 {
		wait += time.Millisecond - rest
	}
	return wait
}

// retryable reports whether the whole transaction should be run again. An error whose attempts ran out should not,
// nor one that leaves open whether something was committed, whatever else is joined to it.
func retryable(err error) bool {
	state := sqlState(err)
	return (state == "40001" || state == "40P01") && !errors.Is(err, ErrAttemptsExhausted) && !errors.Is(err, ErrUnknownOutcome)
}

// sqlState is the SQLSTATE in an error's chain, or empty. Every driver's error has the method.
func sqlState(err error) string {
	if sqlErr := (interface{ SQLState() string })(nil); errors.As(err, &sqlErr) {
		return sqlErr.SQLState()
	}
	return ""
}

// inner is an error inside another one of this package: its text does not repeat the prefix.
type inner struct{ error }

func (w inner) Error() string { return strings.TrimPrefix(w.error.Error(), "ratelimit: ") }
func (w inner) Unwrap() error { return w.error }

// explain adds the failed operation to a database error and, if something is not there, a hint.
func explain(what string, err error) error {
	if state := sqlState(err); state == "42883" || state == "3F000" { // undefined_function, invalid_schema_name
		return fmt.Errorf("ratelimit: %s: %w (has the schema of package migrations been migrated, in this database, and not been renamed?)", what, inner{err})
	}
	return fmt.Errorf("ratelimit: %s: %w", what, inner{err})
}

// explainCall is explain for a call: it also names the limits.
func explainCall(v verb, requests []Request, err error) error {
	if names := limitsOf(requests); names != "" {
		return explain(string(v)+": "+strings.TrimSuffix(names, ": "), err)
	}
	return explain(string(v), err)
}

// invalidCall is the error for a call that the program has made wrongly.
func invalidCall(requests []Request, why string) error {
	return fmt.Errorf("%w: %s%s", ErrInvalid, limitsOf(requests), why)
}

// limiterClosed is the error for a call after Close.
func limiterClosed(v verb, requests []Request) error {
	return explainCall(v, requests, fmt.Errorf("the Limiter is %w", ErrClosed))
}

// maxNamed bounds how many limits an error names.
const maxNamed = 10

// limitsOf names the limits of requests, as the beginning of an error's text. It leaves out invalid limits, whose
// names may be of any length, and all keys, which may be personal data.
func limitsOf(requests []Request) string {
	var names []string
	for i := range requests {
		l := &requests[i].limit
		if name := strconv.Quote(l.name); l.Validate() == nil && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	switch n := len(names); {
	case n == 0:
		return ""
	case n == 1:
		return "limit " + names[0] + ": "
	case n > maxNamed:
		return fmt.Sprintf("limits %s and %d more: ", strings.Join(names[:maxNamed], ", "), n-maxNamed)
	default:
		return "limits " + strings.Join(names[:n-1], ", ") + " and " + names[n-1] + ": "
	}
}

// limitsIn names the limits of statuses, as the beginning of an error's text.
func limitsIn(all []Status) string {
	requests := make([]Request, len(all))
	for i := range all {
		requests[i].limit = all[i].Limit
	}
	return limitsOf(requests)
}

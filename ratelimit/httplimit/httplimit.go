// Package httplimit is HTTP middleware for the limits of package ratelimit. It asks before the handler runs, answers those
// who are denied, and tells every client where it stands, in the header fields of draft-ietf-httpapi-ratelimit-headers-10.
//
//	limit := httplimit.Middleware{
//		Limiter: &limits,
//		DB:      coalescer,
//		Requests: func(r *http.Request) ([]ratelimit.Request, error) {
//			user := userOf(r)
//			return []ratelimit.Request{perUser[user.Plan].Key(user.ID), perSite.Global()}, nil
//		},
//	}
//	http.ListenAndServe(":8080", limit.Handler(mux)) // or router.Use(limit.Handler)
//
// # What the header fields say
//
// RateLimit-Policy has an item for each limit that was asked. q is its capacity, the most tokens that can be had at once, rounded
// down. w is how many seconds the capacity takes to refill, rounded up: 60 for 100 a minute, and 6 for 3600 an hour with a
// [ratelimit.Capacity] of 6. So q per w is the limit's rate, and never more. A [ratelimit.FixedWindow] whose capacity is less than
// its rate grants no more than its capacity in each window: w is its period. Under a second, w is left out.
//
// RateLimit says what is left: r tokens now, rounded down, and 0 in debt. Of a request that was granted, t is the number of
// seconds until the token bucket is full or the fixed window's next window begins; of one that was denied, until the very same
// would be granted. Retry-After is never before any t: in a denial, limits that would have granted have none, and those of
// middleware around this one are left out of RateLimit.
//
// A limit's name is told as it is, so it should be no secret. Bytes that are not printable ASCII, and "%", are percent-encoded.
package httplimit

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// DefaultTimeout is [Middleware.Timeout] unless set.
const DefaultTimeout = 5 * time.Second

// ErrNotLimited is what [Middleware.Requests] returns, wrapped or not, for a request that is not limited. The handler is called; no limit
// is asked, no header field is set, and the Observer is not told.
var ErrNotLimited = errors.New("httplimit: the request is not limited")

// Middleware limits requests. Fill in the first three fields; the others have defaults. It fails closed: who cannot be
// counted is refused. A request is refused, without its handler being called, with the status
//
//   - 429 if it is denied, with Retry-After;
//   - 400 if it can never be granted ([ratelimit.ErrExceedsCapacity]), without Retry-After, since waiting does not help; and
//     not 413, which is about the size of the content; and if its key or count is none that can be: it came from the client;
//   - 503 if the database could not be asked, unless FailOpen;
//   - that of a [StatusError] if Requests returns one; 500 if it returns another error, or nothing, or if the Middleware or a
//     limit is wrong in itself.
//
// A client that has gone before the decision gets nothing; the Observer sees that as status 499 (nginx's number for it).
type Middleware struct {
	// Limiter decides. Required.
	Limiter *ratelimit.Limiter

	// DB is where it works. A [ratelimit.Coalescer] is best: what arrives together shares a statement and a commit, and a
	// crowd of requests takes two connections, not all of the pool's. Required.
	DB ratelimit.DB

	// Requests says what an HTTP request costs: the limit by its plan, the key, how much, several limits at once if need be,
	// which are then granted all together or not at all. It is called by many goroutines. A request that is not to be limited is
	// [ErrNotLimited]: to return no requests and no error is a mistake, and answered with 500. Helpers: [ClientIP], [APIKey],
	// [Cost]. Required.
	Requests func(r *http.Request) ([]ratelimit.Request, error)

	// Failed makes this a limit on failures: it says by the status of an answer whether the request was one, and the tokens of
	// all others are given back. They are taken before the handler runs, so that of many guesses at once no more than the
	// limit are tried. A handler that panics has failed, and so has one that wrote nothing for a client that had gone. nil:
	// every request counts.
	//
	// The refund comes when the handler returns. What it has flushed may be with the client a moment before.
	Failed func(status int) bool

	// ObserveOnly lets every request pass, whatever is decided, also if the database is down: to try a limit before it is
	// enforced. It consumes, tells the Observer, and sets the header fields, except Retry-After.
	ObserveOnly bool

	// FailOpen lets requests pass that the database could not be asked about, for want of a migration or a GRANT, too (SQLSTATE
	// 42883, 42501): the log, or the Observer, is told of each.
	FailOpen bool

	// Timeout bounds how long a decision, and a refund, may take; if it is over, the database could not be asked.
	// 0 is [DefaultTimeout].
	Timeout time.Duration

	// Jitter adds up to this part of the wait to Retry-After, so that a crowd that was denied together does not come back
	// together: 0.5, the most, is half of it. The same keys get the same part of it ([ratelimit.Jitter]), and requests for limits
	// without keys the same by their client's address. 0, the default, adds nothing.
	Jitter float64

	// PartitionSecret turns on the parameter pk, which tells a client with several keys which one is meant: the first 96 bits of
	// the HMAC-SHA256, by this secret, of the limit's name and the key, so that nobody learns the key. The same for all
	// processes, or, where clients talk to one only, []byte(rand.Text()) of crypto/rand. Empty, the default: no pk.
	PartitionSecret []byte

	// LegacyFields sets the fields of before the draft, too: X-RateLimit-Limit, -Remaining and -Reset, and those without
	// "X-". They can tell of one limit: the one that is waited for longest or, if none is, that has least left. Limit is q, the
	// most tokens at once; Reset is t, a number of seconds, not a time of day.
	LegacyFields bool

	// Observer is told of every decision before the handler is called, or the refusal written, and of refunds that failed. It
	// is called by many goroutines. nil: what has status 5xx, and refunds that failed, are logged by [slog.Default] as errors,
	// and keys and counts that are not valid (400: often a user id that Requests has not found) as warnings, one for each request.
	// ([ratelimit.Limiter.Observer] is told of what the limiter did in any case.)
	Observer func(r *http.Request, d Decision)

	// Refused answers a refused request in place of the problem details (RFC 9457) that are written by default, as
	// application/problem+json. The header fields are set. d.Status is the status that would have been sent.
	Refused func(w http.ResponseWriter, r *http.Request, d Decision)
}

// Decision is what an observer is told.
type Decision struct {
	// Result is that of [ratelimit.Limiter.Consume]. If Err is set and no [*ratelimit.DeniedError], its requests hold only
	// Limit, Key and Count, and there are none if it is the error of [Middleware.Requests].
	Result ratelimit.Result

	// Err is nil for a request that was granted.
	Err error

	// Status is what a request that was not granted is refused with. It is 0 for a grant. It is also 0, with Err set,
	// when tokens could not be given back to a limit that counts only failures.
	Status int

	// Passed says that the handler is called: by a grant, by ObserveOnly or by FailOpen.
	Passed bool
}

// statusClientClosedRequest is nginx's, for its log: the client is not there to read it.
const statusClientClosedRequest = 499

// Handler is the middleware: a handler that calls next for requests that pass. The ResponseWriter is the server's own; with
// Failed it is wrapped, and has Unwrap for http.ResponseController, and Flush, Hijack and ReadFrom of its own.
func (m Middleware) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests, d, limited := m.decide(r)
		if !limited {
			next.ServeHTTP(w, r)
			return
		}
		if !d.Passed && !d.Result.At.IsZero() {
			for _, field := range []string{fieldLimit, legacyLimit, legacyRemaining, legacyReset} {
				w.Header().Del(field) // of middleware around this, whose t may be later than Retry-After
				w.Header().Del(legacyPrefix + field)
			}
		}
		m.setFields(w.Header(), d.Result)
		m.observe(r, d)
		switch {
		case !d.Passed:
			m.refuse(w, r, d)
		case d.Status != 0 || m.Failed == nil:
			next.ServeHTTP(w, r)
		default:
			m.countFailure(w, r, next, d.Result.Receipt(), requests)
		}
	})
}

// decide asks the limiter, unless the request is not limited.
func (m Middleware) decide(r *http.Request) (requests []ratelimit.Request, d Decision, limited bool) {
	requests, d.Err = m.requests(r)
	if errors.Is(d.Err, ErrNotLimited) {
		return nil, Decision{}, false
	}
	open := false
	if d.Err != nil {
		d.Status = statusOf(d.Err)
	} else {
		ctx, cancel := context.WithTimeout(r.Context(), m.timeout())
		defer cancel()
		d.Err = ratelimit.Retry(ctx, func(ctx context.Context) (err error) { // a conflict is no failure of the database
			d.Result, err = m.Limiter.Consume(ctx, m.DB, requests...)
			return err
		})
		d.Status = statusOfConsume(d.Result, d.Err)
		open = m.FailOpen && d.Status == http.StatusServiceUnavailable
	}
	if d.Status >= 500 && errors.Is(r.Context().Err(), context.Canceled) {
		d.Status, open = statusClientClosedRequest, false // no fault of the database
	}
	d.Passed = d.Status == 0 || open || m.ObserveOnly
	return requests, d, true
}

func (m Middleware) requests(r *http.Request) ([]ratelimit.Request, error) {
	if m.Limiter == nil || m.DB == nil || m.Requests == nil {
		return nil, errors.New("httplimit: a Middleware needs a Limiter, a DB and Requests")
	}
	requests, err := m.Requests(r)
	if err == nil && len(requests) == 0 {
		err = errors.New("httplimit: Requests returned no requests and no error; for a request that is not limited, return ErrNotLimited")
	}
	return requests, err
}

// statusOfConsume is the status for what Consume returned, 0 for a grant.
func statusOfConsume(result ratelimit.Result, err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, ratelimit.ErrDenied):
		return http.StatusTooManyRequests
	case errors.Is(err, ratelimit.ErrInvalid) && misprogrammed(result, err):
		return http.StatusInternalServerError
	case errors.Is(err, ratelimit.ErrInvalid), errors.Is(err, ratelimit.ErrExceedsCapacity), unstorable(err):
		return http.StatusBadRequest
	default:
		return http.StatusServiceUnavailable
	}
}

// unstorable says whether the database is up and refused a key: its encoding may lack a character of it, or the table have a
// constraint of the application's.
func unstorable(err error) bool {
	var sqlErr interface{ SQLState() string }
	if !errors.As(err, &sqlErr) {
		return false
	}
	state := sqlErr.SQLState()
	return strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23") // data exception, integrity constraint violation
}

// misprogrammed says whether requests that are invalid are so by the server's own doing: a limit that is none, one name with two
// definitions, or a DB that must not be used there. If not, it is their keys or counts, which clients choose.
func misprogrammed(result ratelimit.Result, err error) bool {
	var own interface{ ProgramError() }
	return errors.As(err, &own) || slices.ContainsFunc(result.Requests, func(s ratelimit.Status) bool { return s.Limit.Validate() != nil })
}

// countFailure calls the handler, and gives back what was consumed unless the answer is a failure. A panic goes by, and has
// the tokens stay consumed.
func (m Middleware) countFailure(w http.ResponseWriter, r *http.Request, next http.Handler, receipt ratelimit.Receipt, requests []ratelimit.Request) {
	recorder := &statusRecorder{ResponseWriter: w}
	next.ServeHTTP(recorder, r)
	if recorder.status == 0 {
		if r.Context().Err() != nil {
			return // it gave up, and what the answer would have been nobody knows
		}
		recorder.status = http.StatusOK // net/http's, for a handler that writes nothing
	}
	if m.Failed(recorder.status) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), m.timeout())
	defer cancel()
	var d Decision
	d.Err = ratelimit.Retry(ctx, func(ctx context.Context) (err error) {
		d.Result, err = m.Limiter.Refund(ctx, m.DB, receipt, requests...)
		return err
	})
	if d.Err != nil {
		d.Passed = true
		m.observe(r, d)
	}
}

func (m Middleware) observe(r *http.Request, d Decision) {
	switch {
	case m.Observer != nil:
		m.Observer(r, d)
	case d.Status >= 500 || d.Status == 0 && d.Err != nil:
		slog.ErrorContext(r.Context(), "httplimit", "status", d.Status, "passed", d.Passed, "error", d.Err)
	case d.Status == http.StatusBadRequest && (errors.Is(d.Err, ratelimit.ErrInvalid) || unstorable(d.Err)):
		slog.WarnContext(r.Context(), "httplimit", "status", d.Status, "passed", d.Passed, "error", d.Err)
	}
}

func (m Middleware) timeout() time.Duration {
	if m.Timeout > 0 {
		return m.Timeout
	}
	return DefaultTimeout
}

// Package httplimit is HTTP middleware for the limits of package ratelimit. It asks the limits before the handler runs and
// refuses denied requests. It tells every client its limits, in the header fields of
// draft-ietf-httpapi-ratelimit-headers-10.
//
//	limit := httplimit.Middleware{
//		Limiter: &limits,
//		DB:      coalescer,
//		Requests: httplimit.By(perAddress, httplimit.ClientIP{}.Key),
//	}
//	http.ListenAndServe(":8080", limit.Handler(mux)) // or router.Use(limit.Handler)
//
// For several limits, or limits by plan, write the function:
//
//	Requests: func(r *http.Request) ([]ratelimit.Request, error) {
//		user := userOf(r)
//		return []ratelimit.Request{perUser[user.Plan].Key(user.ID), perSite.Global()}, nil
//	},
//
// # Header fields
//
// RateLimit-Policy has an item for each limit that was asked. q is the limit's capacity, rounded down: the most tokens that
// can be had at once. w is the number of seconds in which the capacity refills, rounded up. It is 60 for 100 a minute, and
// 6 for 3600 an hour with a [ratelimit.Capacity] of 6. So q per w is the limit's rate, and never more. For a
// [ratelimit.FixedWindow] whose capacity is below its rate, w is the period, since each window grants only the capacity. If
// w is under a second, it is left out.
//
// RateLimit has an item with the remaining tokens of each limit. r is the number of tokens now, rounded down, and 0 in
// debt. For a granted request, t is the number of seconds until the token bucket is full or the fixed window's next window
// begins. For a denied request, t is the number of seconds until the same request would be granted.
//
// Retry-After is never earlier than any t. So in a denial, limits that would have granted have no t. Limits of middleware
// around this one are left out of RateLimit.
//
// A [ratelimit.Unlimited] limit is in neither field. A denial by a rate of 0 or a block has no t, unless an
// override or a block with an end is the reason, and its RateLimit names only the limits that denied: the others were not asked.
//
// Clients see a limit's name, so it should be no secret. Bytes that are not printable ASCII, and "%", are percent-encoded.
//
// The tokens of a limit that clients share tell each client how much the others use. [Middleware.Hidden] leaves such a limit
// out.
package httplimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/outcome"
	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/ratelimit"
)

// DefaultTimeout is the default of [Middleware.Timeout].
const DefaultTimeout = 5 * time.Second

// ErrNotLimited is returned by [Middleware.Requests], wrapped or not, for a request that is not limited. The handler is
// called. No limit is asked, no header field is set, and the Observer is not called.
var ErrNotLimited = errors.New("httplimit: the request is not limited")

// Middleware limits requests. Limiter, DB and Requests are required; the other fields have defaults. It fails closed: a
// request that cannot be counted is refused. The handler of a refused request is not called. The status of the answer is
//
//   - 429 if the request is denied, with Retry-After unless slots alone denied it;
//   - 403 if it is denied and waiting does not help: the rate of a limit is 0, as of a plan that does not include it, or a block
//     has no end. There is no Retry-After (see [ratelimit.DeniedError]);
//   - 400 if the request can never be granted ([ratelimit.ErrExceedsCapacity]), or if its key or count, which came from the
//     client, is invalid. There is no Retry-After, since waiting does not help. It is not 413, which is about the size of
//     the content;
//   - 503 if the database could not be asked, unless FailOpen lets it pass;
//   - the status of a [StatusError], if Requests returns one;
//   - 500 if Requests returns another error, or no requests, or if a limit is wrong in itself. An error of Requests that matches
//     [ratelimit.ErrBadRequest] is 400.
//
// A client that has gone before the decision gets no answer. The Observer sees status 499, nginx's number for it.
type Middleware struct {
	// Limiter decides. Required.
	Limiter *ratelimit.Limiter

	// DB is where the Limiter works, a pool. Required. A [ratelimit.Coalescer] is best: requests that arrive together share a
	// statement and a commit, and a crowd of requests takes two connections, not all of the pool's.
	DB ratelimit.DB

	// Requests returns the rate limit requests of an HTTP request: the limit (by plan, for example), the key and the count.
	// Several limits are granted all together or not at all. Required. It is called by many goroutines. For a request that
	// is not limited, it returns [ErrNotLimited]. No requests and no error is a mistake, answered with 500. [By] makes it for
	// one limit; [ClientIP], [APIKey] and [Cost] help to write it.
	//
	// If one of the limits is of [ratelimit.Slots], all are held while the handler runs, as by
	// [ratelimit.Limiter.During], with an id of the middleware's own and a ttl of a minute: at most n requests are in
	// flight. The request's context also ends when the hold is lost.
	Requests func(r *http.Request) ([]ratelimit.Request, error)

	// Failed makes this a limit on failures. It reports whether an answer with this status is a failure; after all other
	// answers, the tokens are given back. Tokens are taken before the handler runs, so that concurrent guesses cannot
	// exceed the limit. So the limit's [ratelimit.Capacity] is also the number of good requests that can run at once: one more
	// is denied. nil: every request counts.
	//
	// A handler that panics, also with [http.ErrAbortHandler], has answered 500, unless it has begun another answer: then that
	// one's status counts. A handler that wrote nothing has failed if the client had gone, and has answered 200 if not.
	//
	// The refund comes when the handler returns. A client may have its flushed answer a moment before.
	Failed func(status int) bool

	// Settle lets the handler set what the request has really cost, by [SetCost]. The counts of Requests are then estimates.
	// When the handler has returned or panicked, the difference is settled, also if the client has gone. A higher cost is
	// charged, even into debt ([ratelimit.Limiter.Charge]). Of a lower cost, the rest is refunded
	// ([ratelimit.Limiter.Refund]). This happens on DB, outside the handler's transactions. If it fails, the Observer is
	// told, and the estimate stays taken, unless the error matches [ratelimit.ErrUnknownOutcome]; it does if the process
	// dies, too. A handler that sets nothing leaves the estimate.
	//
	// With Failed as well, a request that has not failed costs nothing, whatever was set.
	Settle bool

	// ObserveOnly lets every request pass, even if it is denied or the database is down. Use it to try a limit before
	// enforcing it. It consumes, calls the Observer, and sets the header fields except Retry-After.
	ObserveOnly bool

	// FailOpen lets requests pass if the database cannot be reached: every address refuses, or the server starts or stops
	// (SQLSTATE 57P03), and a probe has failed, too. If a call had no answer in time, the probe must have had none for five
	// seconds; it has a connection of its own, one for each pool. So an overload, which clients can cause, does not pass:
	// not a timeout, a full pool, a row that is locked, nor any other SQLSTATE. Nor do a missing migration or GRANT, a call
	// whose connection breaks, and [ratelimit.ErrClosed]. A DB that is no pool of pgx and no
	// Coalescer passes only if every address refuses. Each request that passed so is reported to the Observer (FailedOpen),
	// or logged without one.
	FailOpen bool

	// Timeout bounds the decision. A charge or a refund afterwards has as long again. If the time is over before the
	// decision, the database could not be asked: 503. It is at least 1 ms; 0 is [DefaultTimeout].
	Timeout time.Duration

	// Jitter adds up to this part of the wait to Retry-After, so that clients denied together do not come back together.
	// The most is 0.5, half of the wait. The same keys get the same part ([ratelimit.Jitter]). For limits without keys, the
	// part depends on the client's address. 0, the default, adds nothing.
	Jitter float64

	// PartitionSecret turns on the parameter pk, which tells a client with several keys which key is meant. Its value is
	// the first 96 bits of an HMAC-SHA256, by this secret, of the limit's name and the key. It does not reveal the key. All
	// processes need the same secret. If each client talks to one process only, []byte(rand.Text()) of crypto/rand is
	// enough. Empty, the default: no pk.
	PartitionSecret []byte

	// LegacyFields also sets the fields from before the draft: X-RateLimit-Limit, -Remaining and -Reset, and the same
	// without "X-". They describe one limit: the one with the longest wait or, without a wait, with the fewest tokens left.
	// Limit is q, the most tokens at once. Reset is t, a number of seconds, not a time of day. If a middleware around this one has set them
	// with fewer tokens left, a granted request keeps them.
	LegacyFields bool

	// ExposeFields adds the fields, and Retry-After, to Access-Control-Expose-Headers, so that scripts of other origins can
	// read them. What is listed there already stays. The CORS handler must be around this middleware, or set the field before
	// it: one that replaces the field afterwards removes them.
	ExposeFields bool

	// Hidden are limits that clients are not told about: those that clients share, for example. They are in no header field
	// that describes limits, and their names are not in the problem details. They are told apart by name. Retry-After still
	// says when a denied request would be granted, so a client can tell that a hidden limit has denied it, and when that
	// limit will have enough. A denial of which all limits are hidden has no RateLimit. Empty: none.
	Hidden []ratelimit.Limit

	// Observer is called with every decision, before the handler is called or the refusal is written, and with failed
	// refunds and charges. It is called by many goroutines. nil: [slog.Default] logs a status of 5xx, and failed
	// refunds and charges, as errors. It logs invalid keys and counts, also those above the capacity, as warnings, one
	// for each request: status 400, often from a user id that Requests has not found, or a rate below 1 without a
	// Capacity. [ratelimit.Limiter.Observer] is called in any case.
	Observer func(r *http.Request, d Decision)

	// Refused answers a refused request in place of the default problem details (RFC 9457, application/problem+json). The
	// header fields are already set. d.Status is the default status.
	Refused func(w http.ResponseWriter, r *http.Request, d Decision)
}

// Decision describes the decision about a request, for [Middleware.Observer].
type Decision struct {
	// Result is the result of [ratelimit.Limiter.Consume] or Hold or, after the handler, of Charge or Refund. If Err is set and is
	// not a [*ratelimit.DeniedError], its requests hold only Limit, Key and Count. After an error of [Middleware.Requests],
	// it has no requests.
	Result ratelimit.Result

	// Err is nil for a granted request. After the handler, it matches [ratelimit.ErrHoldLost] if its slots may have
	// been another's.
	Err error

	// Status is the status with which a request that was not granted is refused. It is 0 for a grant. It is also 0, with
	// Err set, if tokens could not be refunded or charged after the handler (Failed, Settle), or slots not be freed.
	Status int

	// Passed says that the handler is called: after a grant, or by ObserveOnly or FailOpen.
	Passed bool

	// FailedOpen says that the request passed by FailOpen: nothing was counted.
	FailedOpen bool
}

// statusClientClosedRequest is nginx's number for its log: the client has gone and cannot read it.
const statusClientClosedRequest = 499

// Handler returns the middleware: a handler that calls next for requests that pass. It panics if the Middleware cannot
// work, so that the mistake is found when the program starts: without Limiter, DB, Requests or next, if DB is a
// connection or a transaction, if Timeout or Jitter is out of bounds, and if a limit of Hidden is invalid. Of a type
// that wraps a connection, it cannot know. next gets the server's own ResponseWriter. With Settle, it gets a copy of
// the request, with the context that [SetCost] needs. With Failed, the ResponseWriter is wrapped: it has Unwrap for
// http.ResponseController, and Flush, Hijack and ReadFrom of its own.
func (m Middleware) Handler(next http.Handler) http.Handler {
	if wrong := m.wrong(next); wrong != "" {
		panic("httplimit: a Middleware cannot be mounted: " + wrong)
	}
	if m.FailOpen {
		outcome.Watch(m.DB)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests, err := m.requests(r)
		switch {
		case errors.Is(err, ErrNotLimited):
			m.pass(w, r, next, nil)
		case err == nil && outcome.Slots(requests):
			m.inFlight(w, r, next, requests)
		default:
			m.answer(w, r, next, newCosts(requests), m.decide(r, requests, err))
		}
	})
}

// answer announces a decision, and follows it.
func (m Middleware) answer(w http.ResponseWriter, r *http.Request, next http.Handler, c *costs, d Decision) {
	m.announce(w.Header(), d)
	m.observe(r, d)
	switch {
	case !d.Passed:
		m.refuse(w, r, d)
	case d.Status == 0:
		c.result = d.Result
		m.pass(w, r, next, c)
	default:
		m.pass(w, r, next, nil)
	}
}

// pass calls the handler. Without costs, nothing was taken.
func (m Middleware) pass(w http.ResponseWriter, r *http.Request, next http.Handler, c *costs) {
	r = r.WithContext(ratelimit.WaitUpTo(r.Context(), 0)) // as behind a slot
	switch {
	case c == nil && m.Settle:
		m.serve(w, r, next, &costs{})
	case c == nil || m.Failed == nil && !m.Settle:
		next.ServeHTTP(w, r)
	default:
		m.serve(w, r, next, c)
	}
}

// inFlight holds what a request asks for while its handler runs.
func (m Middleware) inFlight(w http.ResponseWriter, r *http.Request, next http.Handler, requests []ratelimit.Request) {
	c := newCosts(requests)
	c.held = true
	result, err := outcome.Hold(r.Context(), "http", m.Limiter, m.DB, outcome.Work{
		Within: m.timeout(),
		Serve: func(ctx context.Context, held ratelimit.Held) {
			m.answer(w, r.WithContext(ctx), next, c, m.decided(r, outcome.Held(held), nil))
		},
		Used: func() []ratelimit.Request { return c.used },
		Ended: func(err error) {
			if err != nil {
				m.observe(r, Decision{Result: outcome.Unanswered(c.result), Err: err, Passed: true})
			}
		},
	}, requests)
	if err != nil {
		m.answer(w, r, next, newCosts(requests), m.decided(r, result, err))
	}
}

// wrong says why the middleware cannot work, or is empty.
func (m Middleware) wrong(next http.Handler) string {
	switch unusable := outcome.Unusable(m.Limiter, m.DB); {
	case unusable != "":
		return unusable
	case m.Requests == nil:
		return "Requests is nil"
	case m.Timeout != 0 && m.Timeout < time.Millisecond:
		return fmt.Sprintf("Timeout is %v: it must be at least 1 ms, or 0 for %v", m.Timeout, DefaultTimeout)
	case !(m.Jitter >= 0 && m.Jitter <= 0.5):
		return fmt.Sprintf("Jitter is %v, which is not between 0 and 0.5", m.Jitter)
	case next == nil:
		return "the handler is nil"
	}
	for _, limit := range m.Hidden {
		if err := limit.Validate(); err != nil {
			return "Hidden: " + err.Error()
		}
	}
	return ""
}

// hides reports whether clients are not told about a limit.
func (m Middleware) hides(limit ratelimit.Limit) bool {
	return slices.ContainsFunc(m.Hidden, func(hidden ratelimit.Limit) bool { return hidden.Name() == limit.Name() })
}

// decide asks the limiter, unless Requests has returned an error.
func (m Middleware) decide(r *http.Request, requests []ratelimit.Request, err error) Decision {
	if err != nil {
		return m.final(r, Decision{Err: err, Status: statusOf(err)})
	}
	result, err := outcome.Consume(r.Context(), m.timeout(), m.Limiter, m.DB, requests)
	return m.decided(r, result, err)
}

// decided is the decision by the answer of the limiter.
func (m Middleware) decided(r *http.Request, result ratelimit.Result, err error) Decision {
	d := Decision{Result: result, Err: err, Status: outcome.Status(err)}
	d.FailedOpen = m.FailOpen && d.Status == http.StatusServiceUnavailable && outcome.Unreachable(m.DB, err)
	return m.final(r, d)
}

func (m Middleware) final(r *http.Request, d Decision) Decision {
	if d.Status >= 500 && errors.Is(r.Context().Err(), context.Canceled) {
		d.Status, d.FailedOpen = statusClientClosedRequest, false // not a failure of the database
	}
	d.Passed = d.Status == 0 || d.FailedOpen || m.ObserveOnly
	return d
}

func (m Middleware) requests(r *http.Request) ([]ratelimit.Request, error) {
	requests, err := m.Requests(r)
	if err == nil && len(requests) == 0 {
		err = fmt.Errorf("%w: httplimit: Requests returned no requests and no error; for a request that is not limited, return ErrNotLimited", ratelimit.ErrInvalid)
	}
	return requests, err
}

func (m Middleware) observe(r *http.Request, d Decision) {
	switch {
	case m.Observer != nil:
		m.Observer(r, d)
	case d.Status >= 500 || d.Status == 0 && d.Err != nil:
		slog.ErrorContext(r.Context(), "httplimit: the rate limit failed", "status", d.Status, "passed", d.Passed, "failed_open", d.FailedOpen, "error", visible.Error(d.Err))
	case d.Status == http.StatusBadRequest && outcome.Uncountable(d.Err):
		slog.WarnContext(r.Context(), "httplimit: invalid key or count", "status", d.Status, "passed", d.Passed, "error", visible.Error(d.Err))
	}
}

func (m Middleware) timeout() time.Duration {
	return cmp.Or(m.Timeout, DefaultTimeout)
}

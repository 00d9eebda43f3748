// Package rpclimit limits the calls of gRPC and Connect servers, with the limits of package ratelimit. It asks the limits
// before the handler runs, and refuses denied calls. It is a module of its own.
//
//	limit := rpclimit.Interceptor{
//		Limiter: &limits,
//		DB:      coalescer,
//		Requests: func(ctx context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
//			user := userOf(ctx) // as the interceptor before this one has found
//			return []ratelimit.Request{perUser[user.Plan].Key(user.ID), perSite.Global()}, nil
//		},
//	}
//	grpc.NewServer(grpc.ChainUnaryInterceptor(limit.UnaryServer()), grpc.ChainStreamInterceptor(limit.StreamServer()))
//	connect.WithInterceptors(limit) // an option of each Connect handler
//
// # What clients see
//
// A denied call fails with ResourceExhausted. Its details are a google.rpc.RetryInfo, whose delay is the time until the
// same call would be granted (none if slots alone denied it), and a google.rpc.QuotaFailure with a violation for each
// limit that denied. quota_id is the limit's name, and quota_value its capacity, rounded down. No detail has the key,
// so subject is empty. The message states what was asked for and what remains.
//
// A call that can never be granted fails with ResourceExhausted, too, but has no details: waiting does not help. A call that
// is denied by a rate of 0, or by a block without an end, fails with PermissionDenied, with a QuotaFailure (see [ratelimit.DeniedError]).
//
// Clients see a limit's name, so it should be no secret. The remaining tokens of a limit that clients share tell each client
// how much the others use. [Interceptor.Hidden] leaves such a limit out.
package rpclimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/txlimit/txlimit/internal/outcome"
	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/ratelimit"
)

// DefaultTimeout is the default of [Interceptor.Timeout].
const DefaultTimeout = 5 * time.Second

// ErrNotLimited is returned by [Interceptor.Requests] or [Interceptor.Messages], wrapped or not, for a call or message
// that is not limited. It passes. No limit is asked, and the Observer is not called.
var ErrNotLimited = errors.New("rpclimit: the call is not limited")

// Interceptor limits calls. It is a [connect.Interceptor], and has gRPC's interceptors as methods. Limiter, DB and Requests
// are required; the other fields have defaults. It fails closed: a call that cannot be counted is refused. The handler of a
// refused call is not called. The code is
//
//   - ResourceExhausted if the call is denied or can never be granted ([ratelimit.ErrExceedsCapacity]);
//   - PermissionDenied if it is denied and waiting does not help: the rate of a limit is 0, or a block has no end;
//   - InvalidArgument if its key or count, which came from the client, is invalid;
//   - Unavailable if the database could not be asked, unless FailOpen lets it pass;
//   - Canceled or DeadlineExceeded if the client was gone, or its deadline over, before the decision;
//   - the code of the error, if Requests returns an error of gRPC or Connect. An [httplimit.StatusError] is
//     Unauthenticated (401), PermissionDenied (403) or InvalidArgument (any other 4xx);
//   - Internal if Requests returns another error, or no requests, or if a limit is wrong in itself. An error of Requests that
//     matches [ratelimit.ErrBadRequest] is InvalidArgument.
//
// An Interceptor without Limiter, DB or Requests, with a Timeout out of bounds or with an invalid limit in Hidden panics when it is
// given to the server.
//
// A stream is limited when it opens, and if Messages is set, at each message that the server receives. Calls that a
// Connect client makes are not limited.
type Interceptor struct {
	// Limiter decides. Required.
	Limiter *ratelimit.Limiter

	// DB is where the Limiter works. Required. A [ratelimit.Coalescer] is best: calls that arrive together share a
	// statement and a commit, and a crowd of calls takes two connections, not all of the pool's.
	DB ratelimit.DB

	// Requests returns the rate limit requests of a call: the limit (by plan, for example), the key and the count. Several
	// limits are granted all together or not at all. Required. It is called by many goroutines. For a call that is not
	// limited, it returns [ErrNotLimited]. No requests and no error is a mistake, answered with Internal.
	//
	// If one of the limits is of [ratelimit.Slots], all are held while the handler runs, of a stream until it ends. See
	// [httplimit.Middleware.Requests].
	Requests func(ctx context.Context, call Call) ([]ratelimit.Request, error)

	// Messages is Requests for each message that a stream receives, in addition to Requests for its opening. A refused
	// message is not handed over: this receive and all later ones of the stream return the refusal, and the handler should
	// return it. nil: messages are not limited.
	Messages func(ctx context.Context, call Call) ([]ratelimit.Request, error)

	// ObserveOnly lets every call pass, even if it is denied or the database is down. Use it to try a limit before
	// enforcing it. It consumes, and calls the Observer.
	ObserveOnly bool

	// FailOpen lets calls pass if the database cannot be reached, as [httplimit.Middleware.FailOpen] does. Each such call is
	// reported to the Observer (FailedOpen), or logged without one.
	FailOpen bool

	// Timeout bounds a decision. If it is over, the database could not be asked: Unavailable. The client's
	// own deadline holds, too. It is at least 1 ms; 0 is [DefaultTimeout].
	Timeout time.Duration

	// Hidden are limits that clients are not told about: those that clients share, for example. They are not in QuotaFailure,
	// and if one of them has denied the call, the message states no numbers. They are told apart by name. RetryInfo still says
	// when the call would be granted, so a client can tell that a hidden limit has denied it, and when that limit will have
	// enough. Empty: none.
	Hidden []ratelimit.Limit

	// Observer is called with every decision, before the handler is called or the refusal is sent. It is called by many
	// goroutines. nil: [slog.Default] logs Unavailable and Internal as errors. It logs DeadlineExceeded, and invalid keys
	// and counts, also those above the capacity, as warnings. [ratelimit.Limiter.Observer] is called in any case.
	Observer func(ctx context.Context, call Call, d Decision)
}

// Call is a call, or a message of a stream.
type Call struct {
	// Method is the full name of the method: "/package.Service/Method".
	Method string

	// Peer is the address that the call came from, with its port.
	Peer string

	// Header is the metadata that the client sent. Its names are canonical ("X-User"), so that Get finds them.
	Header http.Header

	// Message is the request message of a unary call, or the message that a stream received. It is nil when a stream opens.
	Message any
}

// HTTP is the call's header and peer as an HTTP request, for [httplimit.ClientIP] and [httplimit.APIKey].
func (c Call) HTTP() *http.Request { return &http.Request{Header: c.Header, RemoteAddr: c.Peer} }

// Decision describes the decision about a call, for [Interceptor.Observer].
type Decision struct {
	// Result is the result of [ratelimit.Limiter.Consume]. If Err is set and is not a [*ratelimit.DeniedError], its
	// requests hold only Limit, Key and Count. After an error of [Interceptor.Requests], it has no requests.
	Result ratelimit.Result

	// Err is nil for a granted call.
	Err error

	// Code is the code with which a call that was not granted is refused. It is OK for a grant, and, with Err set, if
	// slots could not be freed after the handler, or were lost ([ratelimit.ErrHoldLost]).
	Code codes.Code

	// Passed says that the handler is called, or gets the message: after a grant, or by ObserveOnly or FailOpen.
	Passed bool

	// FailedOpen says that the call passed by FailOpen: nothing was counted.
	FailedOpen bool
}

type requestsFunc = func(ctx context.Context, call Call) ([]ratelimit.Request, error)

// around calls next for a call that passes, while what it asks for is held if there are slots in it. It returns the
// refusal of one that does not pass, and was not called.
func (i Interceptor) around(ctx context.Context, call Call, next func(ctx context.Context)) *status.Status {
	requests, err := i.requests(ctx, i.Requests, call)
	if err != nil || !outcome.Slots(requests) {
		refusal := i.decide(ctx, requests, err, call)
		if refusal == nil {
			next(ratelimit.WaitUpTo(ctx, 0)) // as behind a slot
		}
		return refusal
	}
	var asked ratelimit.Result
	result, err := outcome.Hold(ctx, "rpc", i.Limiter, i.DB, outcome.Work{
		Within: i.timeout(),
		Serve: func(ctx context.Context, held ratelimit.Held) {
			asked = outcome.Unanswered(outcome.Held(held))
			i.answer(ctx, call, outcome.Held(held), nil)
			next(ctx)
		},
		Used: func() []ratelimit.Request { return nil },
		Ended: func(err error) {
			if err != nil {
				i.observe(ctx, call, Decision{Result: asked, Err: err, Passed: true})
			}
		},
	}, requests)
	if err == nil {
		return nil
	}
	refusal := i.answer(ctx, call, result, err)
	if refusal == nil {
		next(ratelimit.WaitUpTo(ctx, 0))
	}
	return refusal
}

// decide asks the limiter, unless the call is not limited. It returns nil if the call passes.
func (i Interceptor) decide(ctx context.Context, requests []ratelimit.Request, err error, call Call) *status.Status {
	switch {
	case errors.Is(err, ErrNotLimited):
		return nil
	case err != nil:
		return i.final(ctx, call, Decision{Err: err}, chosen(err))
	}
	result, err := outcome.Consume(ctx, i.timeout(), i.Limiter, i.DB, requests)
	return i.answer(ctx, call, result, err)
}

// message limits one message of a stream.
func (i Interceptor) message(ctx context.Context, call Call, message any) *status.Status {
	if i.Messages == nil {
		return nil
	}
	call.Message = message
	requests, err := i.requests(ctx, i.Messages, call)
	return i.decide(ctx, requests, err, call)
}

// answer is the decision by the answer of the limiter.
func (i Interceptor) answer(ctx context.Context, call Call, result ratelimit.Result, err error) *status.Status {
	refusal := i.refusalOf(result, err)
	d := Decision{Result: result, Err: err}
	d.FailedOpen = i.FailOpen && refusal.Code() == codes.Unavailable && outcome.Unreachable(i.DB, err)
	return i.final(ctx, call, d, refusal)
}

func (i Interceptor) final(ctx context.Context, call Call, d Decision, refusal *status.Status) *status.Status {
	if c := refusal.Code(); ctx.Err() != nil && (c == codes.Unavailable || c == codes.Internal) {
		refusal, d.FailedOpen = status.FromContextError(ctx.Err()), false // not a failure of the database
	}
	d.Code = refusal.Code()
	d.Passed = d.Code == codes.OK || d.FailedOpen || i.ObserveOnly
	i.observe(ctx, call, d)
	if d.Passed {
		return nil
	}
	return refusal
}

// check panics if the interceptor cannot work, so that the mistake is found when the program starts.
func (i Interceptor) check() {
	wrong := outcome.Unusable(i.Limiter, i.DB)
	switch {
	case wrong != "":
	case i.Requests == nil:
		wrong = "Requests is nil"
	case i.Timeout != 0 && i.Timeout < time.Millisecond:
		wrong = fmt.Sprintf("Timeout is %v: it must be at least 1 ms, or 0 for %v", i.Timeout, DefaultTimeout)
	}
	for _, limit := range i.Hidden {
		if err := limit.Validate(); err != nil && wrong == "" {
			wrong = "Hidden: " + err.Error()
		}
	}
	if wrong != "" {
		panic("rpclimit: an Interceptor cannot be mounted: " + wrong)
	}
	if i.FailOpen {
		outcome.Watch(i.DB)
	}
}

func (i Interceptor) requests(ctx context.Context, ask requestsFunc, call Call) ([]ratelimit.Request, error) {
	requests, err := ask(ctx, call)
	if err == nil && len(requests) == 0 {
		err = fmt.Errorf("%w: rpclimit: no requests and no error were returned; for a call that is not limited, return ErrNotLimited", ratelimit.ErrInvalid)
	}
	return requests, err
}

func (i Interceptor) observe(ctx context.Context, call Call, d Decision) {
	log := func(level slog.Level, text string) {
		slog.Log(ctx, level, text, "method", call.Method, "code", d.Code, "passed", d.Passed, "failed_open", d.FailedOpen, "error", visible.Error(d.Err))
	}
	switch {
	case i.Observer != nil:
		i.Observer(ctx, call, d)
	case d.Code == codes.Unavailable, d.Code == codes.Internal, d.Code == codes.OK && d.Err != nil:
		log(slog.LevelError, "rpclimit: the rate limit failed")
	case d.Code == codes.DeadlineExceeded:
		log(slog.LevelWarn, "rpclimit: the client's deadline was over before the rate limit was decided")
	case (d.Code == codes.InvalidArgument || d.Code == codes.ResourceExhausted) && outcome.Uncountable(d.Err):
		log(slog.LevelWarn, "rpclimit: invalid key or count")
	}
}

func (i Interceptor) timeout() time.Duration {
	return cmp.Or(i.Timeout, DefaultTimeout)
}

package rpclimit

import (
	"errors"
	"math"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/txlimit/txlimit/internal/outcome"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// refusalOf is the refusal for Consume's result and error, without details of the database, the keys or the hidden limits. It
// is OK for a grant.
func (i Interceptor) refusalOf(result ratelimit.Result, err error) *status.Status {
	var denied *ratelimit.DeniedError
	switch s := outcome.Status(err); {
	case s == 0:
		return status.New(codes.OK, "")
	case errors.Is(err, ratelimit.ErrExceedsCapacity) && slices.ContainsFunc(result.Requests, i.hides):
		return status.New(codes.ResourceExhausted, "the call asks for more than a rate limit can ever hold")
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		return status.New(codes.ResourceExhausted, err.Error())
	case errors.As(err, &denied):
		return i.denial(denied)
	case s == http.StatusBadRequest:
		return uncountable
	case s == http.StatusInternalServerError:
		return internal
	default:
		return status.New(codes.Unavailable, "the rate limit cannot be checked at the moment")
	}
}

var (
	internal    = status.New(codes.Internal, "the rate limit is not set up as it should be")
	uncountable = status.New(codes.InvalidArgument, "the key or the count of the call is invalid")
)

// hides reports whether clients are not told about a request's limit.
func (i Interceptor) hides(s ratelimit.Status) bool {
	return slices.ContainsFunc(i.Hidden, func(hidden ratelimit.Limit) bool { return hidden.Name() == s.Limit.Name() })
}

// denial is the refusal of a denied call.
func (i Interceptor) denial(denied *ratelimit.DeniedError) *status.Status {
	var quota errdetails.QuotaFailure
	message := denied.Error() // of all limits that denied
	if at, never := outcome.RetryAt(denied); !never && at != denied.RetryAt {
		message = message[:strings.LastIndex(message, "; ")] // when slots are free is not known
	}
	for _, s := range denied.Requests {
		name := s.Limit.Name()
		if !s.OK && i.hides(s) {
			message = ratelimit.ErrDenied.Error()
			continue
		}
		if s.OK || slices.ContainsFunc(quota.Violations, func(v *errdetails.QuotaFailure_Violation) bool { return v.QuotaId == name }) {
			continue
		}
		violation := &errdetails.QuotaFailure_Violation{QuotaId: name, Description: "The rate limit " + name + " has too few tokens left."}
		if outcome.OfSlots(s.Limit) {
			violation.Description = "Too many calls of the limit " + name + " are in flight."
		}
		if capacity := s.Limit.Capacity(); !math.IsInf(capacity, 1) { // else it is unlimited, and blocked
			violation.QuotaValue = int64(capacity)
		}
		quota.Violations = append(quota.Violations, violation)
	}
	code, details := codes.ResourceExhausted, []protoadapt.MessageV1(nil)
	if at, never := outcome.RetryAt(denied); never {
		code = codes.PermissionDenied
	} else if !at.IsZero() {
		after := denied.RetryAfter
		if at != denied.RetryAt {
			after = at.Sub(denied.At)
		}
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
	}
	if len(quota.Violations) > 0 {
		details = append(details, &quota)
	}
	refusal, err := status.New(code, message).WithDetails(details...)
	if err != nil {
		panic(err) // never: names are UTF-8
	}
	return refusal
}

// chosen is the refusal for an error of Requests.
func chosen(err error) *status.Status {
	var byConnect *connect.Error
	var byGRPC interface{ GRPCStatus() *status.Status }
	var byHTTP *httplimit.StatusError
	switch {
	case errors.As(err, &byConnect) && byConnect.Code() != 0: // 0 is OK
		s := &spb.Status{Code: int32(byConnect.Code()), Message: byConnect.Message()}
		for _, d := range byConnect.Details() {
			s.Details = append(s.Details, &anypb.Any{TypeUrl: "type.googleapis.com/" + d.Type(), Value: d.Bytes()})
		}
		return status.FromProto(s)
	case errors.As(err, &byGRPC) && byGRPC.GRPCStatus().Code() != codes.OK:
		return byGRPC.GRPCStatus()
	case errors.As(err, &byHTTP) && byHTTP.Status == http.StatusUnauthorized:
		return status.New(codes.Unauthenticated, byHTTP.Detail)
	case errors.As(err, &byHTTP) && byHTTP.Status == http.StatusForbidden:
		return status.New(codes.PermissionDenied, byHTTP.Detail)
	case errors.As(err, &byHTTP) && byHTTP.Status >= 400 && byHTTP.Status <= 499:
		return status.New(codes.InvalidArgument, byHTTP.Detail)
	case byHTTP == nil && errors.Is(err, ratelimit.ErrBadRequest):
		return uncountable
	default:
		return internal
	}
}

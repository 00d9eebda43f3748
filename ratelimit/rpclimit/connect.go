package rpclimit

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/grpc/status"
)

// WrapUnary implements [connect.Interceptor]. It panics if the Interceptor cannot work.
func (i Interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	i.check()
	return func(ctx context.Context, request connect.AnyRequest) (answer connect.AnyResponse, err error) {
		if request.Spec().IsClient {
			return next(ctx, request)
		}
		call := Call{Method: request.Spec().Procedure, Peer: request.Peer().Addr, Header: request.Header(), Message: request.Any()}
		if refusal := i.around(ctx, call, func(ctx context.Context) { answer, err = next(ctx, request) }); refusal != nil {
			return nil, connectError(refusal)
		}
		return answer, err
	}
}

// WrapStreamingClient implements [connect.Interceptor]. It changes nothing.
func (i Interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements [connect.Interceptor]. It panics if the Interceptor cannot work.
func (i Interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	i.check()
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		call := Call{Method: conn.Spec().Procedure, Peer: conn.Peer().Addr, Header: conn.RequestHeader()}
		refusal := i.around(ctx, call, func(ctx context.Context) {
			if i.Messages != nil {
				conn = &connectStream{StreamingHandlerConn: conn, ctx: ctx, limit: i, call: call}
			}
			err = next(ctx, conn)
		})
		if refusal != nil {
			return connectError(refusal)
		}
		return err
	}
}

// connectStream limits the messages that a stream receives.
type connectStream struct {
	connect.StreamingHandlerConn
	ctx     context.Context
	limit   Interceptor
	call    Call
	refused error
}

// Receive receives a message, and refuses it if it is denied.
func (s *connectStream) Receive(message any) error {
	if s.refused != nil {
		return s.refused
	}
	if err := s.StreamingHandlerConn.Receive(message); err != nil {
		return err
	}
	if refusal := s.limit.message(s.ctx, s.call, message); refusal != nil {
		s.refused = connectError(refusal)
	}
	return s.refused
}

// connectError is a refusal as an error of Connect's, whose codes are gRPC's.
func connectError(refusal *status.Status) error {
	err := connect.NewError(connect.Code(refusal.Code()), errors.New(refusal.Message()))
	for _, detail := range refusal.Proto().GetDetails() {
		if d, detailErr := connect.NewErrorDetail(detail); detailErr == nil { // always, for an Any
			err.AddDetail(d)
		}
	}
	return err
}

package rpclimit

import (
	"context"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// UnaryServer is for gRPC: grpc.ChainUnaryInterceptor(limit.UnaryServer()). It panics if the Interceptor cannot work.
func (i Interceptor) UnaryServer() grpc.UnaryServerInterceptor {
	i.check()
	return func(ctx context.Context, message any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (answer any, err error) {
		refusal := i.around(ctx, grpcCall(ctx, info.FullMethod, message), func(ctx context.Context) { answer, err = handler(ctx, message) })
		if refusal != nil {
			return nil, refusal.Err()
		}
		return answer, err
	}
}

// StreamServer is for gRPC: grpc.ChainStreamInterceptor(limit.StreamServer()). It panics if the Interceptor cannot work.
func (i Interceptor) StreamServer() grpc.StreamServerInterceptor {
	i.check()
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
		call := grpcCall(stream.Context(), info.FullMethod, nil)
		refusal := i.around(stream.Context(), call, func(ctx context.Context) {
			err = handler(server, &grpcStream{ServerStream: stream, ctx: ctx, limit: i, call: call})
		})
		if refusal != nil {
			return refusal.Err()
		}
		return err
	}
}

func grpcCall(ctx context.Context, method string, message any) Call {
	call := Call{Method: method, Header: http.Header{}, Message: message}
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		call.Peer = p.Addr.String()
	}
	md, _ := metadata.FromIncomingContext(ctx) // a copy
	for name, values := range md {
		call.Header[http.CanonicalHeaderKey(name)] = values
	}
	return call
}

// grpcStream limits the messages that a stream receives, and ends with its hold.
type grpcStream struct {
	grpc.ServerStream
	ctx     context.Context
	limit   Interceptor
	call    Call
	refused error
}

// Context is the stream's own.
func (s *grpcStream) Context() context.Context { return s.ctx }

// RecvMsg receives a message, and refuses it if it is denied.
func (s *grpcStream) RecvMsg(message any) error {
	if s.refused != nil {
		return s.refused
	}
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	if refusal := s.limit.message(s.ctx, s.call, message); refusal != nil {
		s.refused = refusal.Err()
	}
	return s.refused
}

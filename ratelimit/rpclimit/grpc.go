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
	return func(ctx context.Context, message any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if refusal := i.decide(ctx, i.Requests, grpcCall(ctx, info.FullMethod, message)); refusal != nil {
			return nil, refusal.Err()
		}
		return handler(ctx, message)
	}
}

// StreamServer is for gRPC: grpc.ChainStreamInterceptor(limit.StreamServer()). It panics if the Interceptor cannot work.
func (i Interceptor) StreamServer() grpc.StreamServerInterceptor {
	i.check()
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		call := grpcCall(stream.Context(), info.FullMethod, nil)
		if refusal := i.decide(stream.Context(), i.Requests, call); refusal != nil {
			return refusal.Err()
		}
		if i.Messages != nil {
			stream = &grpcStream{ServerStream: stream, limit: i, call: call}
		}
		return handler(server, stream)
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

// grpcStream limits the messages that a stream receives.
type grpcStream struct {
	grpc.ServerStream
	limit   Interceptor
	call    Call
	refused error
}

// RecvMsg receives a message, and refuses it if it is denied.
func (s *grpcStream) RecvMsg(message any) error {
	if s.refused != nil {
		return s.refused
	}
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	s.call.Message = message
	if refusal := s.limit.decide(s.Context(), s.limit.Messages, s.call); refusal != nil {
		s.refused = refusal.Err()
	}
	return s.refused
}

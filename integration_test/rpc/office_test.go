package rpc_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"

	connectrpc "connectrpc.com/connect"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

// maxMessage is the largest message that a server reads.
const maxMessage = 64 << 10

// office is a service behind the interceptor, on a real Postgres and a real port. Its clock stands at noon.
type office struct {
	*harness.Site                      // the database, and helpers to read it
	Limit         rpclimit.Interceptor // used instead of the site's middleware
	Called        atomic.Int64         // calls of a handler, and messages to one
	Handle        func(ctx context.Context, words string) error

	mu        sync.Mutex
	calls     []rpclimit.Call
	decisions []rpclimit.Decision
}

// rpcClient makes calls. An error is a *status.Status, whatever the client.
type rpcClient interface {
	say(ctx context.Context, words string, header ...string) (string, *status.Status)
	chat(ctx context.Context, header ...string) conversation
}

// conversation is the client's end of Chat.
type conversation interface {
	// tell sends words and receives the answer. Without words, it ends the conversation.
	tell(words string) (string, *status.Status)
}

// rpcServers are the pairs of a server and a client that the behaviours run on.
var rpcServers = map[string]func(o *office) rpcClient{
	"gRPC":                               serveGRPC,
	"Connect":                            func(o *office) rpcClient { return serveConnect(o) },
	"Connect server and gRPC client":     func(o *office) rpcClient { return serveConnect(o, connectrpc.WithGRPC()) },
	"Connect server and gRPC-Web client": func(o *office) rpcClient { return serveConnect(o, connectrpc.WithGRPCWeb()) },
}

// rpcs runs a behaviour with every server and client. The interceptor asks for the same requests in every call, unless the
// behaviour says otherwise.
func rpcs(t *testing.T, behaviour func(o *office, serve func() rpcClient), requests ...ratelimit.Request) {
	t.Parallel()
	for name, serve := range rpcServers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &office{Site: harness.NewSite(t, nil)}
			o.Limit = rpclimit.Interceptor{
				Limiter: o.Site.Limit.Limiter, DB: o.Pool,
				Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) { return requests, nil },
				Observer: func(_ context.Context, call rpclimit.Call, d rpclimit.Decision) {
					o.mu.Lock()
					defer o.mu.Unlock()
					o.calls, o.decisions = append(o.calls, call), append(o.decisions, d)
				},
			}
			behaviour(o, func() rpcClient { return serve(o) })
		})
	}
}

// Observed returns the decisions since it was last called.
func (o *office) Observed() []rpclimit.Decision {
	o.mu.Lock()
	defer o.mu.Unlock()
	decisions := o.decisions
	o.decisions = nil
	return decisions
}

// said handles the words of a message.
func (o *office) said(ctx context.Context, words string) error {
	o.Called.Add(1)
	if o.Handle != nil {
		return o.Handle(ctx, words)
	}
	return nil
}

// grpcClient is gRPC's own client.
type grpcClient struct{ conn *grpc.ClientConn }

func serveGRPC(o *office) rpcClient {
	server := grpc.NewServer(grpc.WaitForHandlers(true), grpc.MaxRecvMsgSize(maxMessage), grpc.ChainUnaryInterceptor(o.Limit.UnaryServer()), grpc.ChainStreamInterceptor(o.Limit.StreamServer()))
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "txlimit.test.Echo", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Say", Handler: func(_ any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			words := new(wrapperspb.StringValue)
			if err := decode(words); err != nil {
				return nil, err
			}
			return interceptor(ctx, words, &grpc.UnaryServerInfo{FullMethod: harness.MethodSay}, func(ctx context.Context, message any) (any, error) {
				return message, o.said(ctx, message.(*wrapperspb.StringValue).Value)
			})
		}}},
		Streams: []grpc.StreamDesc{{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			return o.chat(stream.Context(), stream.RecvMsg, stream.SendMsg)
		}}},
	}, o)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		o.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	o.Cleanup(server.Stop)
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		o.Fatal(err)
	}
	o.Cleanup(func() { _ = conn.Close() })
	return grpcClient{conn}
}

// chat is the handler of Chat. Like most handlers, it returns a refusal as its error.
func (o *office) chat(ctx context.Context, receive, send func(message any) error) error {
	for {
		words := new(wrapperspb.StringValue)
		if err := receive(words); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			if again := receive(words); again.Error() != err.Error() {
				o.Errorf("received %v, and then %v", err, again)
			}
			return err
		}
		if err := o.said(ctx, words.Value); err != nil {
			return err
		}
		if err := send(words); err != nil {
			return err
		}
	}
}

func (c grpcClient) say(ctx context.Context, words string, header ...string) (string, *status.Status) {
	answer := new(wrapperspb.StringValue)
	err := c.conn.Invoke(metadata.AppendToOutgoingContext(ctx, header...), harness.MethodSay, wrapperspb.String(words), answer)
	return answer.Value, status.Convert(err)
}

func (c grpcClient) chat(ctx context.Context, header ...string) conversation {
	stream, err := c.conn.NewStream(metadata.AppendToOutgoingContext(ctx, header...), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, harness.MethodChat)
	return grpcConversation{stream, err}
}

type grpcConversation struct {
	stream grpc.ClientStream
	err    error
}

func (c grpcConversation) tell(words string) (string, *status.Status) {
	if c.err != nil {
		return "", status.Convert(c.err)
	}
	if words == "" {
		_ = c.stream.CloseSend()
	} else {
		_ = c.stream.SendMsg(wrapperspb.String(words)) // after a refusal, RecvMsg has the reason
	}
	answer := new(wrapperspb.StringValue)
	err := c.stream.RecvMsg(answer)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return answer.Value, status.Convert(err)
}

// connectClient is Connect's client, with one of its three protocols.
type connectClient struct {
	sayer, chatter *connectrpc.Client[wrapperspb.StringValue, wrapperspb.StringValue]
}

func serveConnect(o *office, protocol ...connectrpc.ClientOption) rpcClient {
	limited := connectrpc.WithHandlerOptions(connectrpc.WithInterceptors(o.Limit), connectrpc.WithReadMaxBytes(maxMessage))
	mux := http.NewServeMux()
	mux.Handle(harness.MethodSay, connectrpc.NewUnaryHandler(harness.MethodSay, func(ctx context.Context, request *connectrpc.Request[wrapperspb.StringValue]) (*connectrpc.Response[wrapperspb.StringValue], error) {
		return connectrpc.NewResponse(request.Msg), o.said(ctx, request.Msg.Value)
	}, limited))
	mux.Handle(harness.MethodChat, connectrpc.NewBidiStreamHandler(harness.MethodChat, func(ctx context.Context, stream *connectrpc.BidiStream[wrapperspb.StringValue, wrapperspb.StringValue]) error {
		return o.chat(ctx, stream.Conn().Receive, stream.Conn().Send)
	}, limited))
	server := httptest.NewUnstartedServer(mux)
	server.EnableHTTP2 = true // for streams in both directions
	server.StartTLS()
	o.Cleanup(func() { server.CloseClientConnections(); server.Close() }) // conversations may not have ended
	// The interceptor must not limit calls that a client makes.
	options := append(protocol, connectrpc.WithInterceptors(o.Limit))
	return connectClient{
		connectrpc.NewClient[wrapperspb.StringValue, wrapperspb.StringValue](server.Client(), server.URL+harness.MethodSay, options...),
		connectrpc.NewClient[wrapperspb.StringValue, wrapperspb.StringValue](server.Client(), server.URL+harness.MethodChat, options...),
	}
}

func (c connectClient) say(ctx context.Context, words string, header ...string) (string, *status.Status) {
	request := connectrpc.NewRequest(wrapperspb.String(words))
	for i := 0; i < len(header); i += 2 {
		request.Header().Add(header[i], header[i+1])
	}
	answer, err := c.sayer.CallUnary(ctx, request)
	if err != nil {
		return "", connectStatus(err)
	}
	return answer.Msg.Value, nil
}

func (c connectClient) chat(ctx context.Context, header ...string) conversation {
	stream := c.chatter.CallBidiStream(ctx)
	for i := 0; i < len(header); i += 2 {
		stream.RequestHeader().Add(header[i], header[i+1])
	}
	return connectConversation{stream}
}

type connectConversation struct {
	stream *connectrpc.BidiStreamForClient[wrapperspb.StringValue, wrapperspb.StringValue]
}

func (c connectConversation) tell(words string) (string, *status.Status) {
	if words == "" {
		_ = c.stream.CloseRequest()
	} else {
		_ = c.stream.Send(wrapperspb.String(words)) // after a refusal, Receive has the reason
	}
	answer, err := c.stream.Receive()
	if errors.Is(err, io.EOF) {
		return "", nil
	}
	if err != nil {
		return "", connectStatus(err)
	}
	return answer.Value, nil
}

// connectStatus converts an error of Connect's client to gRPC's, with its details.
func connectStatus(err error) *status.Status {
	s := &spb.Status{Code: int32(connectrpc.CodeOf(err)), Message: err.Error()}
	if remote, ok := errors.AsType[*connectrpc.Error](err); ok {
		s.Message = remote.Message()
		for _, d := range remote.Details() {
			s.Details = append(s.Details, &anypb.Any{TypeUrl: "type.googleapis.com/" + d.Type(), Value: d.Bytes()})
		}
	}
	return status.FromProto(s)
}

// Grpc is a service that allows each user three calls a minute, over gRPC or Connect. Its clients read from a denial when
// to retry. The service is gRPC's health service, so the example needs no generated code.
//
//	go run ./examples/grpc
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/txlimit/txlimit/examples/internal/demo"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

var (
	perUser = ratelimit.TokenBucket("perUser", 3, time.Minute)
	perSite = ratelimit.TokenBucket("perSite", 1000, time.Second)
)

// maxMessage is the largest message that the servers read: they read a unary call's before the limit is asked.
const maxMessage = 64 << 10

// users are the users by API key.
var users = map[string]string{"key-of-ann": "ann", "key-of-bob": "bob"}

// requests returns what a call costs: a token of the user, and one of the site.
func requests(_ context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
	user, ok := users[call.Header.Get("X-Api-Key")]
	if !ok {
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("send your API key in x-api-key"))
	}
	return []ratelimit.Request{perUser.Key(user), perSite.Global()}, nil
}

// serveGRPC starts the gRPC server on a port of this machine, and returns a connection to it.
func serveGRPC(limit rpclimit.Interceptor) (conn *grpc.ClientConn, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessage), grpc.ChainUnaryInterceptor(limit.UnaryServer()), grpc.ChainStreamInterceptor(limit.StreamServer()))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(listener) }()
	conn, err = grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	return conn, server.Stop, err
}

// serveConnect starts the same service with Connect.
func serveConnect(limit rpclimit.Interceptor) *httptest.Server {
	service := health.NewServer()
	mux := http.NewServeMux()
	mux.Handle(grpc_health_v1.Health_Check_FullMethodName, connect.NewUnaryHandler(grpc_health_v1.Health_Check_FullMethodName,
		func(ctx context.Context, r *connect.Request[grpc_health_v1.HealthCheckRequest]) (*connect.Response[grpc_health_v1.HealthCheckResponse], error) {
			answer, err := service.Check(ctx, r.Msg)
			return connect.NewResponse(answer), err
		}, connect.WithInterceptors(limit), connect.WithReadMaxBytes(maxMessage)))
	return httptest.NewServer(mux)
}

func main() { demo.Main(story) }

func story(ctx context.Context, pool *pgxpool.Pool) error {
	// The clock moves by hand, so that the numbers are always the same. An application has no Clock, and a background.
	now := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	limits, err := ratelimit.Open(ctx, pool, ratelimit.Options{
		Program: "grpc", Limits: []ratelimit.Limit{perUser, perSite},
		Clock:        func() time.Time { return now },
		NoBackground: true,
	})
	if err != nil {
		return err
	}
	defer demo.Close(ctx, limits) // after the server
	limit := rpclimit.Interceptor{
		Limiter:  limits,
		DB:       pool,
		Requests: requests,
	}
	conn, stop, err := serveGRPC(limit)
	if err != nil {
		return err
	}
	defer stop()
	client := grpc_health_v1.NewHealthClient(conn)
	ann := metadata.AppendToOutgoingContext(ctx, "x-api-key", "key-of-ann")

	fmt.Println("A client without a key")
	_, err = client.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	tell(err)

	fmt.Println("\nAnn, by gRPC: two calls and a stream")
	for range 2 {
		_, err := client.Check(ann, &grpc_health_v1.HealthCheckRequest{})
		tell(err)
	}
	watch(ann, client)

	fmt.Println("\nThe fourth call is too many, of any kind")
	watch(ann, client)
	_, err = client.Check(ann, &grpc_health_v1.HealthCheckRequest{})
	delay := tell(err)

	fmt.Println("\nAnn retries after the delay")
	now = now.Add(delay)
	_, err = client.Check(ann, &grpc_health_v1.HealthCheckRequest{})
	tell(err)

	fmt.Println("\nBy Connect, Ann is denied, too: the limit is the same")
	server := serveConnect(limit)
	defer server.Close()
	check := connect.NewClient[grpc_health_v1.HealthCheckRequest, grpc_health_v1.HealthCheckResponse](
		server.Client(), server.URL+grpc_health_v1.Health_Check_FullMethodName)
	for _, key := range []string{"key-of-ann", "key-of-bob"} {
		request := connect.NewRequest(&grpc_health_v1.HealthCheckRequest{})
		request.Header().Set("X-Api-Key", key)
		_, err := check.CallUnary(ctx, request)
		tellConnect(key, err)
	}
	return nil
}

// watch opens a stream, receives its first message, and closes it.
func watch(ctx context.Context, client grpc_health_v1.HealthClient) {
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	stream, err := client.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	fmt.Print("   a stream")
	tell(err)
}

// tell prints the outcome of a gRPC call, and returns how long to wait before the next one.
func tell(err error) (delay time.Duration) {
	s := status.Convert(err)
	fmt.Println("  ", s.Code(), s.Message())
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.RetryInfo:
			delay = d.RetryDelay.AsDuration()
			fmt.Println("     retry in", delay)
		case *errdetails.QuotaFailure:
			for _, v := range d.Violations {
				fmt.Printf("     quota %s, which is %d\n", v.QuotaId, v.QuotaValue)
			}
		}
	}
	return delay
}

// tellConnect prints the outcome of a Connect call.
func tellConnect(key string, err error) {
	var refused *connect.Error
	if !errors.As(err, &refused) {
		fmt.Println("  ", key, "ok")
		return
	}
	fmt.Println("  ", key, refused.Code())
	for _, detail := range refused.Details() {
		if d, err := detail.Value(); err == nil {
			if info, ok := d.(*errdetails.RetryInfo); ok {
				fmt.Println("     retry in", info.RetryDelay.AsDuration())
			}
		}
	}
}

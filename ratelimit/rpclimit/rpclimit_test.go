package rpclimit_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

var (
	limits    ratelimit.Limiter
	coalescer *ratelimit.Coalescer
	mux       http.ServeMux

	perUser    = ratelimit.TokenBucket("perUser", 60, time.Minute)
	perSite    = ratelimit.TokenBucket("perSite", 10_000, time.Second, ratelimit.Shards(4))
	perAddress = ratelimit.TokenBucket("perAddress", 60, time.Minute)
	words      = ratelimit.TokenBucket("words", 1000, time.Minute)
)

// userOf is the user whom the application's own interceptor has found.
func userOf(context.Context) string { return "ann" }

// One Interceptor serves gRPC and Connect. A call takes from both limits or from none.
func ExampleInterceptor() {
	limit := rpclimit.Interceptor{
		Limiter: &limits,
		DB:      coalescer,
		Requests: func(ctx context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
			if strings.HasPrefix(call.Method, "/grpc.health.v1.Health/") {
				return nil, rpclimit.ErrNotLimited
			}
			user := userOf(ctx)
			if user == "" {
				return nil, status.Error(codes.Unauthenticated, "log in first")
			}
			return []ratelimit.Request{perUser.Key(user), perSite.Global()}, nil
		},
	}
	// gRPC:
	_ = grpc.NewServer(grpc.ChainUnaryInterceptor(limit.UnaryServer()), grpc.ChainStreamInterceptor(limit.StreamServer()))
	// Connect:
	mux.Handle("/acme.v1.Greeter/Greet",
		connect.NewUnaryHandler("/acme.v1.Greeter/Greet", greet, connect.WithInterceptors(limit)))
}

// Clients without an account are counted by their address, behind one proxy. Each message of a stream takes as many tokens as it
// has words.
func ExampleInterceptor_messages() {
	clients := httplimit.ClientIP{TrustedProxies: 1}
	limit := rpclimit.Interceptor{
		Limiter: &limits,
		DB:      coalescer,
		Requests: func(_ context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
			return []ratelimit.Request{perAddress.Key(clients.Key(call.HTTP()))}, nil
		},
		Messages: func(_ context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
			n := len(strings.Fields(call.Message.(*wrapperspb.StringValue).Value))
			return []ratelimit.Request{words.Key(clients.Key(call.HTTP())).Count(float64(n))}, nil
		},
	}
	_ = grpc.NewServer(grpc.ChainUnaryInterceptor(limit.UnaryServer()), grpc.ChainStreamInterceptor(limit.StreamServer()))
}

func greet(_ context.Context, r *connect.Request[wrapperspb.StringValue]) (*connect.Response[wrapperspb.StringValue], error) {
	return connect.NewResponse(r.Msg), nil
}

// Without an Observer, what nobody would hear of otherwise is logged. (Not parallel: the default logger is shared.)
func TestWithoutAnObserverWhatNobodyWouldHearOfIsLogged(t *testing.T) {
	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/none") // nothing listens there
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var log bytes.Buffer
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))

	gone, leave := context.WithCancel(t.Context())
	leave()
	late, end := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer end()
	limit, zero := ratelimit.TokenBucket("limit", 1, time.Hour), new(ratelimit.Limiter)
	for _, row := range []struct {
		name     string
		ctx      context.Context
		requests []ratelimit.Request
		limiter  *ratelimit.Limiter
		open     bool
		code     codes.Code
		logged   []string // nil: nothing
	}{
		{"the database is down", t.Context(), []ratelimit.Request{limit.Key("ann")}, zero, false, codes.Unavailable, []string{"level=ERROR", "connection refused", "/a.B/C", "passed=false"}},
		{"it is down, and calls pass", t.Context(), []ratelimit.Request{limit.Key("ann")}, zero, true, codes.OK, []string{"level=ERROR", "connection refused", "passed=true"}},
		{"nothing is asked", t.Context(), nil, zero, true, codes.Internal, []string{"level=ERROR", "ErrNotLimited"}},
		{"no key", t.Context(), []ratelimit.Request{limit.Key("")}, zero, true, codes.InvalidArgument, []string{"level=WARN", "the key is empty"}},
		{"more than it can hold", t.Context(), []ratelimit.Request{limit.Key("ann").Count(2)}, zero, true, codes.ResourceExhausted, []string{"level=WARN", "2 tokens can never be granted, since at most 1 can be had at once"}},
		{"the client is gone", gone, []ratelimit.Request{limit.Key("ann")}, zero, true, codes.Canceled, nil},
		{"its deadline is over", late, []ratelimit.Request{limit.Key("ann")}, zero, true, codes.DeadlineExceeded, []string{"level=WARN", "the client's deadline was over"}},
	} {
		log.Reset()
		interceptor := rpclimit.Interceptor{Limiter: row.limiter, DB: pool, FailOpen: row.open,
			Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) { return row.requests, nil },
		}
		called := false
		ctx := metadata.NewIncomingContext(row.ctx, metadata.Pairs("x-user", "ann"))
		unary := interceptor.UnaryServer()
		call := func() error {
			log.Reset()
			_, err := unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: "/a.B/C"}, func(context.Context, any) (any, error) {
				called = true
				return nil, nil
			})
			return err
		}
		err := call()
		for until := time.Now().Add(5 * time.Minute); row.code == codes.OK && err != nil && time.Now().Before(until); err = call() {
			time.Sleep(10 * time.Millisecond) // until a probe has failed
		}
		if status.Code(err) != row.code || called != (row.code == codes.OK) || (log.Len() > 0) != (row.logged != nil) || strings.Contains(log.String(), "ann") {
			t.Errorf("%s: %v, called %v, logged %q", row.name, err, called, log.String())
		}
		for _, part := range row.logged {
			if !strings.Contains(log.String(), part) {
				t.Errorf("%s: logged %q, without %q", row.name, log.String(), part)
			}
		}
	}
}

// down is a database that cannot answer. It notes how long it may try.
type down struct{ deadline time.Time }

func (d *down) QueryRow(ctx context.Context, _ string, _ ...any) pgx.Row {
	d.deadline, _ = ctx.Deadline()
	return d
}

func (*down) Scan(...any) error { return errors.New("the database is down") }

func TestADecisionHasADeadline(t *testing.T) {
	for timeout, want := range map[time.Duration]time.Duration{0: rpclimit.DefaultTimeout, time.Hour: time.Hour} {
		db := &down{}
		interceptor := rpclimit.Interceptor{Limiter: new(ratelimit.Limiter), DB: db, Timeout: timeout,
			Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) {
				return []ratelimit.Request{perUser.Key("ann")}, nil
			},
			Observer: func(context.Context, rpclimit.Call, rpclimit.Decision) {},
		}
		begin := time.Now()
		_, err := interceptor.UnaryServer()(t.Context(), nil, &grpc.UnaryServerInfo{}, nil)
		end := time.Now()
		if status.Code(err) != codes.Unavailable || db.deadline.Before(begin.Add(want)) || db.deadline.After(end.Add(want)) {
			t.Errorf("%v: %v, from %v to %v, until %v", timeout, err, begin, end, db.deadline)
		}
	}
}

// A plan that does not include the call: no database is asked, and there is no time to retry.
func TestADenialByPolicyIsPermissionDenied(t *testing.T) {
	interceptor := rpclimit.Interceptor{Limiter: new(ratelimit.Limiter), DB: &down{},
		Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) {
			return []ratelimit.Request{ratelimit.TokenBucket("exports", 0, time.Hour).Key("ann"), perUser.Key("ann")}, nil
		},
	}
	_, err := interceptor.UnaryServer()(t.Context(), nil, &grpc.UnaryServerInfo{}, nil)
	s := status.Convert(err)
	if s.Code() != codes.PermissionDenied || len(s.Details()) != 1 {
		t.Fatalf("%v, details %v", err, s.Details())
	}
	if quota, ok := s.Details()[0].(*errdetails.QuotaFailure); !ok || len(quota.Violations) != 1 || quota.Violations[0].QuotaId != "exports" {
		t.Errorf("details %v", s.Details())
	}
}

// A blocked key of an unlimited limit has no quota to tell.
func TestABlockOfAnUnlimitedLimitHasNoQuota(t *testing.T) {
	db := ratelimittest.New(t)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: db})
	request := ratelimit.Unlimited("search").Key("ann")
	if _, err := limits.Block(t.Context(), db, request, ratelimit.Terms{Forever: true}); err != nil {
		t.Fatal(err)
	}
	if err := follow.Load(t.Context(), limits); err != nil {
		t.Fatal(err)
	}
	interceptor := rpclimit.Interceptor{Limiter: limits, DB: db,
		Requests: func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) {
			return []ratelimit.Request{request}, nil
		},
	}
	_, err := interceptor.UnaryServer()(t.Context(), nil, &grpc.UnaryServerInfo{}, nil)
	s := status.Convert(err)
	if s.Code() != codes.PermissionDenied || len(s.Details()) != 1 {
		t.Fatalf("%v, details %v", err, s.Details())
	}
	if quota, ok := s.Details()[0].(*errdetails.QuotaFailure); !ok || quota.Violations[0].QuotaId != "search" || quota.Violations[0].QuotaValue != 0 {
		t.Errorf("details %v", s.Details())
	}
}

package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	connectrpc "connectrpc.com/connect"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

func TestRPCAtMostNCallsAreInFlight(t *testing.T) {
	renders, calls := ratelimit.Slots("renders", 1), ratelimit.TokenBucket("calls", 60, time.Minute)
	rpcs(t, func(o *office, serve func() rpcClient) {
		f := harness.NewInFlight()
		o.Handle = func(ctx context.Context, words string) error {
			if words == "wait" {
				f.Run(ctx)
			}
			return ctx.Err()
		}
		client := serve()
		full := func() {
			o.Helper()
			_, s := client.say(o.Context(), "hello")
			if delay, violations := o.denial(s); s.Code() != codes.ResourceExhausted || delay != -1 || violations != "renders 1" || strings.Contains(s.Message(), "retry") {
				o.Errorf("%v, %v, %s", s, delay, violations)
			}
		}
		ended := make(chan codes.Code)
		go func() {
			_, s := client.say(o.Context(), "wait")
			ended <- s.Code()
		}()
		<-f.Begun
		full()
		f.End <- struct{}{}
		if code := <-ended; code != codes.OK {
			o.Error(code)
		}
		talk := client.chat(o.Context()) // is held until it ends, not until a message does
		for range 2 {
			if got, s := talk.tell("hello"); got != "hello" {
				o.Fatalf("%q, %v", got, s)
			}
			full()
		}
		if _, s := talk.tell(""); s.Code() != codes.OK {
			o.Error(s)
		}
		harness.Eventually(o.T, "the stream's slot is free", func() bool { return o.World().Balance(renders.Key("ann")) == 1 })
		ctx, leave := context.WithCancel(o.Context())
		talk = client.chat(ctx)
		if got, s := talk.tell("hello"); got != "hello" {
			o.Fatalf("%q, %v", got, s)
		}
		full()
		leave()
		_, _ = talk.tell("bye") // Connect's client notices then
		harness.Eventually(o.T, "the slot of a client that left is free", func() bool { return o.World().Balance(renders.Key("ann")) == 1 })
		o.World().Holds(calls.Key("ann"), 57)
		for _, d := range o.Observed() {
			if d.Err != nil && d.Code != codes.ResourceExhausted {
				o.Errorf("observed %+v", d)
			}
		}
	}, renders.Key("ann"), calls.Key("ann"))
}

// denial reads the details of a denial, as any client does: the delay (-1 if there is none) and the violations.
func (o *office) denial(s *status.Status) (delay time.Duration, violations string) {
	o.Helper()
	if s.Code() != codes.ResourceExhausted {
		o.Fatalf("%v", s)
	}
	delay = -1
	var list []string
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.RetryInfo:
			delay = d.RetryDelay.AsDuration()
		case *errdetails.QuotaFailure:
			for _, v := range d.Violations {
				if v.Subject != "" {
					o.Errorf("the subject is %q", v.Subject)
				}
				list = append(list, fmt.Sprint(v.QuotaId, " ", v.QuotaValue))
			}
		default:
			o.Errorf("a detail is %v", d)
		}
	}
	return delay, strings.Join(list, ", ")
}

func TestRPCDeniedCallsSayWhenToRetryAndWhichLimitDenied(t *testing.T) {
	perUser := ratelimit.TokenBucket("perUser", 3, time.Minute)
	perTeam := ratelimit.TokenBucket("per „Team“", 10.5, time.Hour)
	perSite := ratelimit.FixedWindow("perSite", 1000, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		client := serve()
		for range 3 {
			if got, s := client.say(o.Context(), "hello"); s.Code() != codes.OK || got != "hello" {
				o.Fatalf("%q, %v", got, s)
			}
		}
		_, s := client.say(o.Context(), "hello")
		if delay, violations := o.denial(s); delay != 20*time.Second || violations != "perUser 3" {
			o.Errorf("%v, %s", delay, violations)
		}
		if _, err := o.Limit.Limiter.Consume(o.Context(), o.Pool, perTeam.Key("secret team").Count(5)); err != nil {
			o.Fatal(err)
		}
		_, s = client.say(o.Context(), "hello")
		if delay, violations := o.denial(s); delay != 171428572*time.Microsecond || violations != "perUser 3, per „Team“ 10" {
			o.Errorf("%v, %s", delay, violations)
		}
		if strings.Contains(s.String(), "secret") || !strings.Contains(s.Message(), "perUser") {
			o.Errorf("%v", s)
		}
		o.Clock.Advance(171428572 * time.Microsecond)
		if _, s := client.say(o.Context(), "hello"); s.Code() != codes.OK || o.Called.Load() != 4 {
			o.Errorf("retried at the given time: %v, called %d times", s, o.Called.Load())
		}
		if d := o.Observed(); len(d) != 6 || d[0].Code != codes.OK || !d[0].Passed || d[4].Code != codes.ResourceExhausted || d[4].Passed || !harness.Denied(d[4].Err) {
			o.Errorf("observed %+v", d)
		}
	}, perUser.Key("secret user"), perTeam.Key("secret team"), perTeam.Key("secret team").Count(0.5), perSite.Global())
}

// Of a hidden limit, a client learns that it has denied the call, and until when, but no name and no number.
func TestRPCNothingTellsOfAHiddenLimit(t *testing.T) {
	perUser := ratelimit.TokenBucket("perUser", 3, time.Minute)
	perSite := ratelimit.TokenBucket("perSite", 2, time.Minute)
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.Hidden = []ratelimit.Limit{perSite}
		client := serve()
		for range 2 {
			o.wants(client, codes.OK)
		}
		silent := func(s *status.Status) {
			o.Helper()
			if text := s.String() + fmt.Sprint(s.Proto()); strings.Contains(text, "perSite") || strings.Contains(s.Message(), "remaining") {
				o.Errorf("%s", text)
			}
		}
		s := o.wants(client, codes.ResourceExhausted)
		if delay, violations := o.denial(s); delay != 30*time.Second || violations != "" {
			o.Errorf("by the hidden limit: %v, %q", delay, violations)
		}
		silent(s)
		if _, err := o.Limit.Limiter.Consume(o.Context(), o.Pool, perUser.Key("ann")); err != nil {
			o.Fatal(err)
		}
		s = o.wants(client, codes.ResourceExhausted)
		if delay, violations := o.denial(s); delay != 30*time.Second || violations != "perUser 3" {
			o.Errorf("by both: %v, %q", delay, violations)
		}
		silent(s)
		if err := o.Limit.Limiter.Reset(o.Context(), o.Pool, perSite.Global()); err != nil {
			o.Fatal(err)
		}
		s = o.wants(client, codes.ResourceExhausted)
		if _, violations := o.denial(s); violations != "perUser 3" || !strings.Contains(s.Message(), "perUser (1 asked, 0 of 3 remaining") {
			o.Errorf("by the other one: %v", s)
		}
		harness.MustExec(o.T, o.Pool, "SELECT ratelimit.block('perSite', every_key => true, forever => true)")
		if err := o.Limit.Limiter.Reset(o.Context(), o.Pool, perUser.Key("ann")); err != nil {
			o.Fatal(err)
		}
		follow.By(o.Limit.Limiter, follow.Settings{DB: o.Pool})
		if err := follow.Load(o.Context(), o.Limit.Limiter); err != nil {
			o.Fatal(err)
		}
		silent(o.wants(client, codes.PermissionDenied))
	}, perUser.Key("ann"), perSite.Global())
}

func TestRPCACallThatAHiddenLimitCanNeverGrant(t *testing.T) {
	perSite := ratelimit.TokenBucket("perSite", 2, time.Minute)
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.Hidden = []ratelimit.Limit{perSite}
		if s := o.wants(serve(), codes.ResourceExhausted); len(s.Details()) > 0 || strings.Contains(s.Message(), "perSite") || strings.Contains(s.Message(), "2") {
			o.Errorf("more than it can hold: %v", s)
		}
	}, perSite.Global().Count(3))
}

// wants makes a call, and compares its code and the number of the handler's calls with those wanted.
func (o *office) wants(client rpcClient, code codes.Code, header ...string) *status.Status {
	o.Helper()
	called := o.Called.Load()
	_, s := client.say(o.Context(), "hello", header...)
	if n := o.Called.Load() - called; s.Code() != code || n != map[bool]int64{true: 1}[code == codes.OK] {
		o.Fatalf("%v, want %v; the handler was called %d times", s, code, n)
	}
	return s
}

func TestRPCCallsThatCannotBeCountedAreRefused(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	detail, err := connectrpc.NewErrorDetail(&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	byConnect := connectrpc.NewError(connectrpc.CodeUnauthenticated, errors.New("who are you?"))
	byConnect.AddDetail(detail)
	rows := map[string]struct {
		requests []ratelimit.Request
		err      error
		code     codes.Code
		message  string // part of the message
		details  int
	}{
		"more than the capacity": {[]ratelimit.Request{limit.Key("secret").Count(3)}, nil, codes.ResourceExhausted, "can never be granted", 0},
		"no key":                 {[]ratelimit.Request{limit.Key("")}, nil, codes.InvalidArgument, "the key or the count", 0},
		"a key that has a NUL":   {[]ratelimit.Request{limit.Key("secret\x00")}, nil, codes.InvalidArgument, "the key or the count", 0},
		"no limit":               {[]ratelimit.Request{ratelimit.Limit{}.Key("secret")}, nil, codes.Internal, "", 0},
		"nothing":                {nil, nil, codes.Internal, "", 0},
		"an unknown error":       {nil, errors.New("secret"), codes.Internal, "", 0},
		"a bad request":          {nil, fmt.Errorf("secret: %w", ratelimit.ErrBadRequest), codes.InvalidArgument, "the key or the count", 0},
		"a mistake":              {nil, fmt.Errorf("secret: %w", ratelimit.ErrInvalid), codes.Internal, "", 0},
		"gRPC's error":           {nil, fmt.Errorf("secret: %w", status.Error(codes.Unauthenticated, "who are you?")), codes.Unauthenticated, "who are you?", 0},
		"Connect's error":        {nil, fmt.Errorf("secret: %w", byConnect), codes.Unauthenticated, "who are you?", 1},
		"Connect's OK":           {nil, connectrpc.NewError(0, errors.New("secret")), codes.Internal, "", 0},
		"no credential":          {nil, fmt.Errorf("secret: %w", &httplimit.StatusError{Status: 401, Detail: "who are you?"}), codes.Unauthenticated, "who are you?", 0},
		"forbidden":              {nil, &httplimit.StatusError{Status: 403, Detail: "not you"}, codes.PermissionDenied, "not you", 0},
		"two credentials":        {nil, &httplimit.StatusError{Status: 400, Detail: "which one?"}, codes.InvalidArgument, "which one?", 0},
		"another status":         {nil, &httplimit.StatusError{Status: 503, Detail: "secret"}, codes.Internal, "", 0},
	}
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.FailOpen = true // FailOpen is only for database errors
		o.Limit.Requests = func(_ context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
			row := rows[call.Header.Get("Row")]
			return row.requests, row.err
		}
		client := serve()
		for name, row := range rows {
			s := o.wants(client, row.code, "row", name)
			if !strings.Contains(s.Message(), row.message) || strings.Contains(s.String(), "secret") || len(s.Details()) != row.details {
				o.Errorf("%s: %v, %v", name, s, s.Details())
			}
			if d := o.Observed(); len(d) != 1 || d[0].Code != row.code || d[0].Passed || d[0].Err == nil {
				o.Errorf("%s: observed %+v", name, d)
			}
		}
	})
}

// The message of a unary call is read before an interceptor is asked. So the bound on its size is the server's.
func TestRPCAMessageThatIsTooLargeIsRefusedByTheServer(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		client := serve()
		if _, s := client.say(o.Context(), strings.Repeat("x", 2*maxMessage)); s.Code() != codes.ResourceExhausted || len(s.Details()) > 0 {
			o.Errorf("%v", s)
		}
		if d := o.Observed(); d != nil || o.Called.Load() != 0 {
			o.Errorf("observed %+v, called %d times", d, o.Called.Load())
		}
		o.wants(client, codes.OK)
		// A stream is refused when it opens, before a message is read.
		if _, s := client.chat(o.Context()).tell(strings.Repeat("x", 2*maxMessage)); s.Code() != codes.ResourceExhausted || len(s.Details()) != 2 {
			o.Errorf("%v", s)
		}
	}, limit.Key("ann"))
}

func TestRPCCallsThatAreNotLimitedPass(t *testing.T) {
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.Requests = func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) {
			return nil, fmt.Errorf("a health check: %w", rpclimit.ErrNotLimited)
		}
		o.Limit.Messages = o.Limit.Requests
		client := serve()
		o.wants(client, codes.OK)
		if got, s := client.chat(o.Context()).tell("hello"); s.Code() != codes.OK || got != "hello" {
			o.Errorf("%q, %v", got, s)
		}
		if d := o.Observed(); d != nil {
			o.Errorf("observed %+v", d)
		}
	})
}

func TestRPCRequestsKnowTheMethodThePeerAndTheMetadata(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		clients := httplimit.ClientIP{TrustedProxies: 1}
		o.Limit.Requests = func(_ context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
			key, err := httplimit.APIKey(call.HTTP(), "Authorization")
			return []ratelimit.Request{limit.Key("address", clients.Key(call.HTTP())), limit.Key("credential", key)}, err
		}
		o.Limit.Messages = func(context.Context, rpclimit.Call) ([]ratelimit.Request, error) {
			return []ratelimit.Request{limit.Key("messages")}, nil
		}
		client := serve()
		header := []string{"authorization", "Bearer abc", "x-forwarded-for", "192.0.2.1, 203.0.113.7", "x-two", "1", "x-two", "2"}
		o.wants(client, codes.OK, header...)
		if _, s := client.chat(o.Context(), header...).tell("hi"); s.Code() != codes.OK {
			o.Errorf("%v", s)
		}
		key, err := httplimit.APIKey(&http.Request{Header: http.Header{"Authorization": {"bearer abc"}}}, "Authorization")
		if err != nil {
			o.Fatal(err)
		}
		for _, used := range []ratelimit.Request{limit.Key("address", "203.0.113.7"), limit.Key("credential", key)} {
			o.World().Holds(used, 8)
		}
		want := []struct {
			method  string
			message proto.Message
		}{{harness.MethodSay, wrapperspb.String("hello")}, {harness.MethodChat, nil}, {harness.MethodChat, wrapperspb.String("hi")}}
		o.mu.Lock()
		defer o.mu.Unlock()
		if len(o.calls) != len(want) {
			o.Fatalf("%+v", o.calls)
		}
		for i, call := range o.calls {
			message, _ := call.Message.(proto.Message)
			if call.Method != want[i].method || !proto.Equal(message, want[i].message) || !strings.HasPrefix(call.Peer, "127.0.0.1:") ||
				!reflect.DeepEqual(call.Header["X-Two"], []string{"1", "2"}) {
				o.Errorf("%+v", call)
			}
		}
	})
}

func TestRPCAStreamIsLimitedWhenItOpens(t *testing.T) {
	limit := ratelimit.TokenBucket("streams", 2, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		client := serve()
		for range 2 {
			conversation := client.chat(o.Context())
			for range 3 { // the messages are not limited
				if got, s := conversation.tell("hello"); s.Code() != codes.OK || got != "hello" {
					o.Fatalf("%q, %v", got, s)
				}
			}
			if _, s := conversation.tell(""); s.Code() != codes.OK {
				o.Errorf("%v", s)
			}
		}
		_, s := client.chat(o.Context()).tell("hello")
		if delay, violations := o.denial(s); delay != 30*time.Minute || violations != "streams 2" || o.Called.Load() != 6 {
			o.Errorf("%v, %s, the handler got %d messages", delay, violations, o.Called.Load())
		}
		if d := o.Observed(); len(d) != 3 {
			o.Errorf("observed %+v", d)
		}
	}, limit.Key("ann"))
}

func TestRPCEachMessageOfAStreamIsLimited(t *testing.T) {
	streams, words := ratelimit.TokenBucket("streams", 2, time.Hour), ratelimit.TokenBucket("words", 5, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.Messages = func(_ context.Context, call rpclimit.Call) ([]ratelimit.Request, error) {
			n := len(strings.Fields(call.Message.(*wrapperspb.StringValue).Value))
			return []ratelimit.Request{words.Key("ann").Count(float64(n))}, nil
		}
		client := serve()
		conversation := client.chat(o.Context())
		for _, told := range []string{"one", "two three"} {
			if got, s := conversation.tell(told); s.Code() != codes.OK || got != told {
				o.Fatalf("%q, %v", got, s)
			}
		}
		_, s := conversation.tell("three are too many")
		if delay, violations := o.denial(s); delay != 24*time.Minute || violations != "words 5" || o.Called.Load() != 2 {
			o.Errorf("%v, %s, the handler got %d messages", delay, violations, o.Called.Load())
		}
		o.World().Holds(words.Key("ann"), 2)
		o.World().Holds(streams.Key("ann"), 1)
		// A unary call is not a message of a stream.
		o.wants(client, codes.OK)
		o.World().Holds(words.Key("ann"), 2)
	}, streams.Key("ann"))
}

// TestAReservationIsNoPermission: a limit of 1 an hour, whose reservations have no bound, passes 1 of 50 requests through
// everything that grants. Nothing but Reserve and Wait can owe tokens.
func TestAReservationIsNoPermission(t *testing.T) {
	t.Parallel()
	const asked = 50
	limit := ratelimit.TokenBucket("hourly", 1, time.Hour) // MaxReserved is unset
	hourly := limit.Key("ann")
	passes := func(t *testing.T, pass func() bool) {
		t.Helper()
		passed := 0
		for range asked {
			if pass() {
				passed++
			}
		}
		if passed != 1 {
			t.Errorf("%d of %d passed", passed, asked)
		}
	}
	owesNothing := func(t *testing.T, limiter *ratelimit.Limiter, db ratelimit.DB) {
		t.Helper()
		if left := harness.ReadBalance(t, limiter, db, hourly); left < 0 || left > 0.5 { // by hand, time goes on
			t.Errorf("%v are left", left)
		}
	}
	t.Run("httplimit", func(t *testing.T) {
		t.Parallel()
		s := harness.NewSite(t, harness.Always(hourly)).Serve()
		passes(t, func() bool { return s.Get("/").Status == http.StatusOK })
		if n := s.Called.Load(); n != 1 {
			t.Errorf("the handler was called %d times", n)
		}
		owesNothing(t, s.Limit.Limiter, s.Pool)
	})
	t.Run("rpclimit", func(t *testing.T) {
		rpcs(t, func(o *office, serve func() rpcClient) {
			client := serve()
			passes(o.T, func() bool {
				_, status := client.say(o.Context(), "hello")
				return status.Code() == codes.OK
			})
			if n := o.Called.Load(); n != 1 {
				o.Errorf("the handler was called %d times", n)
			}
			owesNothing(o.T, o.Limit.Limiter, o.Pool)
		}, hourly)
	})
	t.Run("batch", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 1)
		limiter, _ := harness.NewLimiter()
		passes(t, func() bool {
			var batch pgx.Batch
			result := harness.Queue(t, limiter, &batch, hourly)
			err := limiter.SendTx(t.Context(), pool, &batch)
			if err != nil && !harness.Denied(err) || result.OK != (err == nil) {
				t.Errorf("%+v, %v", result, err)
			}
			return err == nil
		})
		owesNothing(t, limiter, pool)
	})
	t.Run("several of a batch", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 1)
		limiter, _ := harness.NewLimiter()
		var batch pgx.Batch
		var results []*ratelimit.Result
		for range asked {
			results = append(results, harness.Queue(t, limiter, &batch, hourly))
		}
		if err := pool.SendBatch(t.Context(), &batch).Close(); !harness.Denied(err) {
			t.Errorf("%v, want a denial", err)
		}
		if n := len(slices.DeleteFunc(results, func(r *ratelimit.Result) bool { return !r.OK })); n != 1 {
			t.Errorf("%d of %d are OK", n, asked)
		}
		if left := harness.ReadBalance(t, limiter, pool, hourly); left != 1 { // all of the batch is rolled back
			t.Errorf("%v are left", left)
		}
	})
	// At once. A half of the transactions queues before BEGIN.
	for way, pass := range map[string]func(ctx context.Context, limiter *ratelimit.Limiter, pool *pgxpool.Pool, coalescer ratelimit.DB, i int) error{
		"coalescer": func(ctx context.Context, limiter *ratelimit.Limiter, _ *pgxpool.Pool, coalescer ratelimit.DB, _ int) error {
			return harness.Second(limiter.Consume(ctx, coalescer, hourly))
		},
		"transactions": func(ctx context.Context, limiter *ratelimit.Limiter, pool *pgxpool.Pool, _ ratelimit.DB, i int) error {
			options := []ratelimit.TxOption{ratelimit.Isolation(harness.Levels[i%len(harness.Levels)]), ratelimit.Attempts(1000)}
			if i%2 == 0 {
				options = append(options, ratelimit.Hot(hourly))
			}
			return limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error { return harness.Second(limiter.Consume(ctx, tx, hourly)) }, options...)
		},
	} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			limiter, _ := harness.NewLimiter()
			coalescer := &ratelimit.Coalescer{Pool: pool}
			defer harness.CloseCoalescer(t, coalescer)
			var passed atomic.Int32
			var wg sync.WaitGroup
			for i := range asked {
				wg.Go(func() {
					if err := pass(t.Context(), limiter, pool, coalescer, i); err == nil {
						passed.Add(1)
					} else if !harness.Denied(err) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if passed.Load() != 1 {
				t.Errorf("%d of %d passed", passed.Load(), asked)
			}
			owesNothing(t, limiter, pool)
		})
	}
	t.Run("take", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewPool(t, 1)
		limiter, _ := harness.NewLimiter()
		passes(t, func() bool {
			n, _, err := limiter.Take(t.Context(), pool, 100, hourly)
			if n > 1 || (err == nil) != (n == 1) {
				t.Errorf("took %d, %v", n, err)
			}
			return n > 0
		})
		owesNothing(t, limiter, pool)
	})
	// By hand. A denial is an error of all but ratelimit.try.
	for name, sql := range map[string]string{
		"ratelimit.consume":     "SELECT FROM ratelimit.consume('hourly', 'ann')",
		"ratelimit.take":        "SELECT FROM ratelimit.take('hourly', 'ann', most => 100)",
		"ratelimit.consume_all": `SELECT FROM ratelimit.consume_all('[{"name": "hourly", "key": "ann"}]')`,
		"ratelimit.try":         "SELECT FROM ratelimit.try('hourly', 'ann') WHERE granted",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 1)
			harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", limit))
			passes(t, func() bool {
				tag, err := pool.Exec(t.Context(), sql)
				if err != nil && harness.SQLState(err) != "PT429" {
					t.Error(err)
				}
				return err == nil && tag.RowsAffected() == 1 // of ratelimit.try, if it was granted
			})
			owesNothing(t, new(ratelimit.Limiter), pool)
		})
	}
}

package rpc_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc/codes"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/rpclimit"
)

func TestRPCWithoutTheDatabaseCallsAreRefusedOrPassByChoice(t *testing.T) {
	harness.Long(t)
	limit := ratelimit.TokenBucket("limit", 20, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		pool := o.Pool
		for _, row := range []struct {
			name           string
			open, observe  bool
			hang, coalesce bool
			code           codes.Code
		}{
			{"closed", false, false, false, false, codes.Unavailable},
			{"closed, coalesced", false, false, false, true, codes.Unavailable},
			{"closed, nobody answers", false, false, true, false, codes.Unavailable},
			{"open", true, false, false, false, codes.OK},
			{"open, nobody answers", true, false, true, true, codes.OK},
			{"observing", false, true, false, false, codes.OK},
		} {
			cut := harness.NewCut(o.T, pool)
			o.Limit.DB = cut.Pool
			if row.coalesce {
				coalescer := &ratelimit.Coalescer{Pool: cut.Pool}
				o.Cleanup(func() { harness.CloseCoalescer(o, coalescer) })
				o.Limit.DB = coalescer
			}
			o.Limit.FailOpen, o.Limit.ObserveOnly, o.Limit.Timeout = row.open, row.observe, 0
			client := serve()
			o.wants(client, codes.OK)
			o.Observed()

			on := cut.Off(row.hang)
			o.Limit.Timeout = 200 * time.Millisecond
			o.Limit.FailOpen = true
			open := serve()
			harness.Eventually(o.T, "a call passes: it is known that the database is down", func() bool { _, s := open.say(o.Context(), "hello"); return s.Code() == codes.OK })
			o.Observed()
			if row.hang { // a client that goes away first passes nothing
				ctx, leave := context.WithTimeout(o.Context(), 50*time.Millisecond)
				_, _ = open.say(ctx, "hello")
				leave()
				var d []rpclimit.Decision
				harness.Eventually(o.T, "the decision is observed", func() bool { d = append(d, o.Observed()...); return len(d) > 0 })
				if d[0].Passed {
					o.Errorf("%s: without its client, %+v", row.name, d)
				}
			}
			o.Limit.FailOpen = row.open
			broken := serve()
			s := o.wants(broken, row.code)
			if row.code != codes.OK && (len(s.Details()) != 0 || s.Message() != "the rate limit cannot be checked at the moment") {
				o.Errorf("%s: %v", row.name, s)
			}
			if d := o.Observed(); len(d) != 1 || d[0].Code != codes.Unavailable || d[0].Err == nil || d[0].Passed != (row.code == codes.OK) || d[0].FailedOpen != row.open {
				o.Errorf("%s: observed %+v", row.name, d)
			}
			on()
			o.wants(client, codes.OK)
		}
		o.World().Holds(limit.Key("ann"), 20-2*6)
	}, limit.Key("ann"))
}

func TestRPCObserveOnlyLetsDeniedCallsPass(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.ObserveOnly = true
		client := serve()
		o.wants(client, codes.OK)
		o.wants(client, codes.OK)
		if d := o.Observed(); len(d) != 2 || d[1].Code != codes.ResourceExhausted || !d[1].Passed || !harness.Denied(d[1].Err) {
			o.Errorf("observed %+v", d)
		}
	}, limit.Key("ann"))
}

// A statement waits for a row that a transaction holds, while the client leaves or its deadline passes. The database is not
// at fault, so FailOpen does not let the call through.
func TestRPCAClientThatGoesIsNoFaultOfTheDatabase(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 3, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.FailOpen = true
		client := serve()
		o.wants(client, codes.OK)
		o.Observed()
		tx := o.Hold(limit.Key("ann"))
		for _, late := range []bool{false, true} {
			ctx, leave := context.WithCancel(o.Context())
			want := codes.Canceled
			if late {
				ctx, leave = context.WithTimeout(o.Context(), 300*time.Millisecond)
				want = codes.DeadlineExceeded
			}
			answered := make(chan codes.Code, 1)
			go func() {
				_, s := client.say(ctx, "hello")
				answered <- s.Code()
			}()
			if !late {
				o.WaitsFor(tx)
				leave()
			}
			if code := <-answered; code != want {
				o.Errorf("late %v: %v", late, code)
			}
			leave()
			var d []rpclimit.Decision
			harness.Eventually(o.T, "the decision is observed", func() bool { d = append(d, o.Observed()...); return len(d) > 0 })
			if len(d) != 1 || d[0].Passed || d[0].Err == nil || d[0].Code != codes.Canceled && (!late || d[0].Code != codes.DeadlineExceeded) {
				o.Errorf("late %v: observed %+v", late, d)
			}
		}
		if o.Called.Load() != 1 {
			o.Errorf("the handler was called %d times", o.Called.Load())
		}
		o.NothingWaitsFor(tx) // otherwise it may still be granted
		o.World().Do(tx.Rollback(o.Context()))
		o.World().Holds(limit.Key("ann"), 2)
	}, limit.Key("ann"))
}

// In a database whose default is SERIALIZABLE, a conflict is no failure of the database.
func TestRPCWhatCouldNotBeSerializedIsRunAgain(t *testing.T) {
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	rpcs(t, func(o *office, serve func() rpcClient) {
		o.Limit.DB = harness.Reconfigured(o.T, o.Pool, func(c *pgxpool.Config) {
			harness.StartWith(o.T, c.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
		})
		var conflicts atomic.Int64
		o.Limit.Limiter.Observer = func(_ context.Context, d ratelimit.Decision) {
			if harness.SQLState(d.Err) == "40001" {
				conflicts.Add(1)
			}
		}
		client := serve()
		o.wants(client, codes.OK) // this makes the row
		tx := o.Hold(limit.Key("ann"))
		answered := make(chan codes.Code, 1)
		go func() {
			_, s := client.say(o.Context(), "hello")
			answered <- s.Code()
		}()
		o.WaitsFor(tx)
		o.World().Do(tx.Commit(o.Context()))
		if code := <-answered; code != codes.OK {
			o.Errorf("%v", code)
		}
		if d := o.Observed(); len(d) != 2 || d[1].Err != nil || conflicts.Load() == 0 {
			o.Errorf("observed %+v, %d conflicts", d, conflicts.Load())
		}
		o.World().Holds(limit.Key("ann"), 7)
	}, limit.Key("ann"))
}

package ops_test

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestTheObserverSeesEveryDecision(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var seen []ratelimit.Decision
		w.Limiter.Observer = func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d) }
		limit := ratelimit.TokenBucket("messages", 10, time.Minute)
		ann := limit.Key("ann").Count(10)
		ctx := w.Context()

		type outcome struct {
			verb   string
			result ratelimit.Result
			err    error
		}
		var want []outcome
		note := func(verb string, result ratelimit.Result, err error) {
			want = append(want, outcome{verb, result, err})
		}
		result, err := w.Limiter.Consume(ctx, w.DB, ann)
		note("consume", result, err)
		result, err = w.Limiter.Consume(ctx, w.DB, ann, limit.Global())
		note("consume", result, err)
		result, err = w.Limiter.Check(ctx, w.DB, ann)
		note("check", result, err)
		result, err = w.Limiter.Charge(ctx, w.DB, ann)
		note("charge", result, err)
		result, err = w.Limiter.Refund(ctx, w.DB, harness.ReceiptOf(harness.Noon, ann), ann)
		note("refund", result, err)
		err = w.Limiter.Reset(ctx, w.DB, ann.Count(1))
		want = append(want, outcome{"reset", ratelimit.Result{}, err})
		result, err = w.Limiter.Consume(ctx, w.DB, ann.Count(11))
		note("consume", result, err)
		result, err = w.Limiter.Check(ctx, w.DB)
		note("check", result, err)
		result, err = w.Limiter.Consume(ctx, nil, ann)
		note("consume", result, err)
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		if _, isTx := w.DB.(pgx.Tx); !isTx {
			result, err = w.Limiter.Consume(cancelled, pooledElsewhere(w), ann)
			note("consume", result, err)
			if !errors.Is(err, context.Canceled) {
				w.Errorf("cancelled: %v", err)
			}
		}

		if len(seen) != len(want) {
			w.Fatalf("seen %d decisions, want %d: %+v", len(seen), len(want), seen)
		}
		for i, d := range seen {
			if d.Verb != want[i].verb || !reflect.DeepEqual(d.Err, want[i].err) || d.Took < 0 || d.Verb != "reset" && !reflect.DeepEqual(d.Result, want[i].result) {
				w.Errorf("decision %d: seen %+v, want %+v", i, d, want[i])
			}
		}
		var exceeded *ratelimit.DeniedError
		if !errors.As(seen[1].Err, &exceeded) || !errors.As(seen[2].Err, &exceeded) || seen[2].Result.OK {
			w.Errorf("denials: %+v, %+v", seen[1], seen[2])
		}
		if s := seen[6].Result.Requests[0]; s.Limit.Name() != "messages" || s.Key != "ann" || s.Count != 11 || s.OK {
			w.Errorf("what was refused: %+v", s)
		}
	})
}

// pooledElsewhere makes another pool, for errors that would break the handle under test.
func pooledElsewhere(w harness.World) *pgxpool.Pool { return harness.NewPool(w.T, 1) }

func TestWithoutAClockTheDatabaseTellsTheTime(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var limiter ratelimit.Limiter // the zero value is ready
		limit := ratelimit.TokenBucket("messages", 1, 100*time.Millisecond)
		var before, after time.Time
		w.Do(w.DB.QueryRow(w.Context(), "SELECT clock_timestamp()").Scan(&before))
		result, err := limiter.Consume(w.Context(), w.DB, limit.Key("ann"))
		if err != nil {
			w.Fatal(err)
		}
		w.Do(w.DB.QueryRow(w.Context(), "SELECT clock_timestamp()").Scan(&after))
		if result.At.Before(before) || result.At.After(after) {
			w.Fatalf("decided at %v, not between %v and %v", result.At, before, after)
		}
		// Inside a transaction, At still advances.
		w.Do(w.DB.QueryRow(w.Context(), "SELECT clock_timestamp()").Scan(&before))
		refund, err := limiter.Refund(w.Context(), w.DB, result.Receipt(), limit.Key("ann").Count(0))
		w.Do(err)
		if refund.At.Before(before) {
			w.Fatalf("refunded at %v, before it was called at %v", refund.At, before)
		}
		denied, err := limiter.Consume(w.Context(), w.DB, limit.Key("ann"))
		for deadline := time.Now().Add(harness.Patience); err != nil; denied, err = limiter.Consume(w.Context(), w.DB, limit.Key("ann")) {
			if denied.RetryAfter <= 0 || denied.RetryAfter > 100*time.Millisecond || time.Now().After(deadline) {
				w.Fatalf("denied: %+v", denied)
			}
			time.Sleep(denied.RetryAfter)
		}
	})
}

func TestALimitFromAConfigFileWorksLikeOneInGo(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		var config ratelimit.Config
		w.Do(json.Unmarshal([]byte(`{"name": "messages", "kind": "fixed window", "rate": 2, "period": "1h30m",
			"capacity": 3, "maxReserved": 0, "start": "2026-07-01T12:00:00Z", "shards": 1}`), &config))
		limit, err := config.Limit()
		w.Do(err)
		same := ratelimit.FixedWindow("messages", 2, 90*time.Minute, ratelimit.Capacity(3), ratelimit.MaxReserved(0), ratelimit.Start(harness.Noon))
		w.Grant(limit.Key("ann"), same.Key("ann").Count(2)) // one definition, written in two ways
		w.Retries(w.DenyReserve(limit.Key("ann")), 90*time.Minute)
	})
}

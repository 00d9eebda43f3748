package tx_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

func TestTheTransactionStaysUsable(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("messages", 1, time.Minute)
		tx := w.Begin()
		inner := harness.World{T: w.T, DB: tx, Limiter: w.Limiter, Clock: w.Clock}
		inner.Grant(limit.Key("ann"))
		inner.Deny(limit.Key("ann"))
		inner.Deny(limit.Key("ann"), limit.Key("bob"))
		inner.Refuse(ratelimit.ErrInvalid, limit.Key(""))
		inner.Refuse(ratelimit.ErrInvalid)
		inner.Refuse(ratelimit.ErrExceedsCapacity, limit.Key("bob").Count(2))
		var one int
		w.Do(tx.QueryRow(w.Context(), "SELECT 1").Scan(&one))
		inner.Grant(limit.Key("bob"))
		w.Do(tx.Commit(w.Context()))
		w.Deny(limit.Key("ann"))
		w.Deny(limit.Key("bob"))
	})
}

func TestARollbackReturnsTheTokens(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3))
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		all := []ratelimit.Request{bucket.Global().Count(2), sharded.Global().Count(2), window.Global().Count(2)}
		try := func(want float64) {
			w.Helper()
			tx := w.Begin()
			inner := harness.World{T: w.T, DB: tx, Limiter: w.Limiter, Clock: w.Clock}
			inner.Grant(all...)
			inner.Grant(all[0])
			inner.Grant(all[1])
			_, err := w.Limiter.Charge(w.Context(), tx, all...)
			w.Do(err)
			w.Do(w.Limiter.Reset(w.Context(), tx, all[2].Count(1)))
			inner.Grant(all[2].Count(10))
			w.Do(tx.Rollback(w.Context()))
			for _, request := range all {
				w.Holds(request, want)
			}
		}
		try(10) // no rows yet
		if rows := w.Rows(); rows != "" {
			w.Fatalf("rows:\n%s", rows)
		}
		w.Grant(all...)
		try(8)
	})
}

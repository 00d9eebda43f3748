package integration_test

import (
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

func TestTheTransactionStaysUsable(t *testing.T) {
	behaviour(t, func(w world) {
		limit := ratelimit.TokenBucket("messages", 1, time.Minute)
		tx := w.begin()
		inner := world{w.T, tx, w.limiter, w.clock}
		inner.grant(limit.Key("ann"))
		inner.deny(limit.Key("ann"))
		inner.deny(limit.Key("ann"), limit.Key("bob"))
		inner.refuse(ratelimit.ErrInvalid, limit.Key(""))
		inner.refuse(ratelimit.ErrInvalid)
		inner.refuse(ratelimit.ErrExceedsCapacity, limit.Key("bob").Count(2))
		var one int
		w.do(tx.QueryRow(w.Context(), "SELECT 1").Scan(&one))
		inner.grant(limit.Key("bob"))
		w.do(tx.Commit(w.Context()))
		w.deny(limit.Key("ann"))
		w.deny(limit.Key("bob"))
	})
}

func TestARollbackReturnsTheTokens(t *testing.T) {
	behaviour(t, func(w world) {
		bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
		sharded := ratelimit.TokenBucket("sharded", 10, time.Minute, ratelimit.Shards(3))
		window := ratelimit.FixedWindow("window", 10, time.Minute)
		all := []ratelimit.Request{bucket.Global().Count(2), sharded.Global().Count(2), window.Global().Count(2)}
		try := func(want float64) {
			w.Helper()
			tx := w.begin()
			inner := world{w.T, tx, w.limiter, w.clock}
			inner.grant(all...)
			inner.grant(all[0])
			inner.grant(all[1])
			_, err := w.limiter.Charge(w.Context(), tx, all...)
			w.do(err)
			w.do(w.limiter.Reset(w.Context(), tx, all[2].Count(1)))
			inner.grant(all[2].Count(10))
			w.do(tx.Rollback(w.Context()))
			for _, request := range all {
				w.holds(request, want)
			}
		}
		try(10) // no rows yet
		if rows := w.rows(); rows != "" {
			w.Fatalf("rows:\n%s", rows)
		}
		w.grant(all...)
		try(8)
	})
}

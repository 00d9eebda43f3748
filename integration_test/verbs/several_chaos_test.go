package verbs_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// Calls for several limits at every isolation level and in savepoints are denied, lose races, time out and are rolled back,
// while full rows are deleted. The clock stands still: the balance must be the capacity less the committed tokens, exactly, and less what
// the buckets forfeit at most while reserved work waits.
func TestSeveralLimitsInChaos(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 10)
	limiter, _ := harness.NewLimiter()
	limits := [4]ratelimit.Limit{
		ratelimit.TokenBucket("a", 20, time.Second, ratelimit.MaxReserved(0)),
		ratelimit.FixedWindow("b", 15, time.Second, ratelimit.Start(harness.Noon), ratelimit.MaxReserved(0)),
		ratelimit.TokenBucket("c", 18, time.Second, ratelimit.MaxReserved(5)),
		ratelimit.TokenBucket("d", 12, time.Second, ratelimit.MaxReserved(0)),
	}
	const deleteFull = `DELETE FROM ratelimit.limits WHERE name IN (
		SELECT name FROM ratelimit.limits WHERE (name, value) IN (VALUES ('a', 20), ('b', 15), ('c', 18), ('d', 12)) FOR UPDATE SKIP LOCKED)`

	var granted, refused, timedOut, lost atomic.Int64
	// late reports a timeout that fired at the very end of a statement. PostgreSQL then cancels the connection's next
	// statement, whatever it is. That statement has done nothing.
	late := func(err error) bool { return harness.SQLState(err) == "57014" }
	// take runs a transaction. If it was committed, take returns the granted calls.
	take := func(r *rand.Rand) (taken []harness.Answered) {
		tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: harness.OneOf(r, pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable)})
		if late(err) {
			timedOut.Add(1)
			return nil
		}
		if err != nil {
			t.Error(err)
			return nil
		}
		defer tx.Rollback(context.WithoutCancel(t.Context()))
		for range 1 + r.IntN(2) {
			if r.IntN(8) == 0 {
				timeout := fmt.Sprintf("SET LOCAL %s = %d", harness.OneOf(r, "statement_timeout", "lock_timeout"), 1+r.IntN(15))
				if _, err := tx.Exec(t.Context(), timeout); err != nil {
					return nil
				}
			}
			inner, err := tx.Begin(t.Context())
			if err != nil {
				return nil
			}
			var requests []ratelimit.Request
			reserve := false
			for _, i := range r.Perm(len(limits))[:2+r.IntN(3)] {
				requests = append(requests, limits[i].Global().Count(float64(r.IntN(6))))
				reserve = reserve || i == 2 && r.IntN(2) == 0
			}
			end := inner.Commit
			result, err := harness.Decide(t.Context(), limiter, inner, reserve, requests...)
			switch state := harness.SQLState(err); {
			case err == nil && r.IntN(5) == 0:
				end = inner.Rollback
			case err == nil:
				granted.Add(1)
				taken = append(taken, result)
			case harness.Denied(err):
				refused.Add(1)
			case state == "57014" || state == "55P03":
				timedOut.Add(1)
				end = inner.Rollback
			case state == "40001" || state == "40P01":
				lost.Add(1)
				return nil
			default:
				t.Error(err)
			}
			if end(t.Context()) != nil {
				return nil
			}
		}
		if r.IntN(4) == 0 || tx.Commit(t.Context()) != nil {
			return nil
		}
		return taken
	}

	var kept [4]atomic.Int64
	var waited [4]atomic.Int64 // nanoseconds that granted work waits for c: meanwhile, a and d forfeit what they refill above their capacity
	refills := [4]float64{0: 20, 3: 12}
	of := func(limit ratelimit.Limit) int {
		return slices.IndexFunc(limits[:], func(l ratelimit.Limit) bool { return l.Name() == limit.Name() })
	}
	keep := func(limit ratelimit.Limit, tokens float64) { kept[of(limit)].Add(int64(tokens)) }
	var wg sync.WaitGroup
	r := harness.NewRand(t)
	begin := time.Now()
	unseen := func() bool {
		return granted.Load() == 0 || refused.Load() == 0 || timedOut.Load() == 0 || lost.Load() == 0
	}
	for range 9 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for since := time.Duration(0); since < *harness.Chaos || since < time.Minute && unseen(); since = time.Since(begin) {
				for _, result := range take(r) {
					var requests []ratelimit.Request
					for _, status := range result.Requests {
						keep(status.Limit, status.Count)
						waited[of(status.Limit)].Add(int64(result.Delay()))
						requests = append(requests, status.Limit.Global().Count(status.Count))
					}
					if r.IntN(9) == 0 { // rarely, so that there are tokens to take
						continue
					}
					var refund ratelimit.Result
					err := new(ratelimit.Limiter).Retry(t.Context(), func(ctx context.Context) (err error) { // it can deadlock with a transaction that calls twice
						refund, err = limiter.Refund(ctx, pool, result.Slip, requests...)
						return err
					})
					if late(err) {
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					for _, status := range refund.Requests { // less than was taken, if other reservations wait
						keep(status.Limit, -status.Refunded)
					}
				}
				if r.IntN(10) == 0 {
					if _, err := pool.Exec(t.Context(), deleteFull); err != nil && !late(err) {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d calls granted, %d denied, %d timed out, %d lost a race", granted.Load(), refused.Load(), timedOut.Load(), lost.Load())
	for i, limit := range limits {
		got, want := harness.ReadBalance(t, limiter, pool, limit.Global()), limit.Capacity()-float64(kept[i].Load())
		if forfeited := refills[i] * time.Duration(waited[i].Load()).Seconds(); got > want || got < want-forfeited || forfeited == 0 && got != want {
			t.Errorf("%s: %v left, want %v, less %v that may be forfeited", limit.Name(), got, want, forfeited)
		}
	}
}

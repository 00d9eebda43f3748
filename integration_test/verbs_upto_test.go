package integration_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// upToLimits are limits of 50 tokens that get one every 6 seconds, 600 an hour, or 600 a day.
func upToLimits(shards int) map[string]ratelimit.Limit {
	capacity, sharded := ratelimit.Capacity(50), ratelimit.Shards(shards)
	return map[string]ratelimit.Limit{
		"bucket":   ratelimit.TokenBucket(fmt.Sprint("bucket", shards), 10, time.Minute, capacity, sharded),
		"window":   ratelimit.FixedWindow(fmt.Sprint("window", shards), 600, time.Hour, capacity, sharded, ratelimit.Start(noon)),
		"calendar": ratelimit.CalendarWindow(fmt.Sprint("calendar", shards), 600, ratelimit.Day, capacity, sharded),
	}
}

// took wants the number of tokens that each request took.
func (w world) took(result ratelimit.Result, want ...float64) {
	w.Helper()
	for i, s := range result.Requests {
		if s.Taken != want[i] {
			w.Fatalf("request %d took %v, want %v: %+v", i, s.Taken, want[i], result)
		}
	}
}

func TestUpToTakesTheWholeTokensThatAreThere(t *testing.T) {
	behaviour(t, func(w world) {
		for _, shards := range []int{1, 3} {
			for kind, limit := range upToLimits(shards) {
				w.Run(fmt.Sprint(kind, shards), func(t *testing.T) {
					w := world{t, w.db, w.limiter, w.clock}
					ann := limit.Key("ann")

					w.took(w.check(ann.UpTo(100)), 50) // more than the capacity; there is no row yet
					w.took(w.grant(ann.UpTo(20)), 20)  // fewer than there are
					w.took(w.grant(ann.Count(0.25)), 0.25)
					w.took(w.check(ann.UpTo(100)), 29)
					result := w.grant(ann.UpTo(100))
					w.took(result, 29) // but no fraction of a token
					w.holds(ann, 0.75)
					if s := result.Requests[0]; s.Count != 100 || !result.RetryAt.Equal(w.clock.now) {
						w.Fatalf("%+v", result)
					}

					before := w.rows()
					w.took(w.check(ann.UpTo(100)), 0)
					denied := w.deny(ann.UpTo(100))
					w.took(denied, 0)
					if after := w.rows(); after != before {
						w.Fatalf("a denial wrote:\n%s\nbecame\n%s", before, after)
					}
					one := w.deny(ann.Count(1))
					if !denied.RetryAt.Equal(one.RetryAt) || denied.RetryAfter != one.RetryAfter {
						w.Fatalf("retry at %v, want %v, when the first token is there", denied.RetryAt, one.RetryAt)
					}
					if kind == "bucket" {
						w.retries(denied, 1500*time.Millisecond)
					}

					// The receipt has the taken count, and the rest of it can be refunded.
					if _, err := w.limiter.Refund(w.Context(), w.db, result.Receipt(), ann.Count(30)); !errors.Is(err, ratelimit.ErrInvalid) {
						w.Fatalf("a refund of 30 of 29: %v", err)
					}
					refund, err := w.limiter.Refund(w.Context(), w.db, result.Receipt(), ann.Count(9))
					if err != nil || !near(refund.Requests[0].Refunded, 9) {
						w.Fatalf("refund: %+v, %v", refund, err)
					}
					w.took(refund, 0)
					w.holds(ann, 9.75)
					w.took(w.grant(ann.UpTo(100)), 9)

					charge, err := w.limiter.Charge(w.Context(), w.db, ann.Count(3))
					w.do(err)
					w.took(charge, 3)
					w.took(w.deny(ann.UpTo(1)), 0) // in debt
					w.do(w.limiter.Reset(w.Context(), w.db, ann.UpTo(1)))
					w.took(w.grant(ann.UpTo(50)), 50)
				})
			}
		}
	})
}

// TestUpToTakesTheSameFromSeveralLimits: the jobs of a worker count for a team and for the whole site.
func TestUpToTakesTheSameFromSeveralLimits(t *testing.T) {
	behaviour(t, func(w world) {
		for _, shards := range []int{1, 3} {
			limits := upToLimits(shards)
			team, site := limits["bucket"].Key("red"), limits["calendar"].Key("site")
			calls := limits["window"].Key("calls")

			w.took(w.grant(team.UpTo(20), site.UpTo(10), calls.Count(2.5)), 10, 10, 2.5) // the least that they allow
			w.took(w.check(team.UpTo(7), site.UpTo(9)), 7, 7)
			w.took(w.grant(team.UpTo(7), site.UpTo(9)), 7, 7) // whatever the lock order
			w.grant(site.Count(6.5))
			w.took(w.check(team.UpTo(100), calls.Count(1), site.UpTo(100)), 26, 1, 26)
			w.took(w.grant(team.UpTo(100), calls.Count(1), site.UpTo(100)), 26, 1, 26) // the least that they have
			w.holds(team, 7)
			w.holds(site, 0.5)
			w.holds(calls, 46.5)

			before := w.rows()
			denied := w.deny(team.UpTo(100), site.UpTo(100)) // by one of them
			w.took(denied, 0, 0)
			if text := (&ratelimit.DeniedError{Result: denied}).Error(); !strings.Contains(text, "(up to 100 asked, 0.5 of 50 remaining)") {
				w.Errorf("the error says %q", text)
			}
			if r := denied.Requests; !r[0].OK || r[1].OK {
				w.Fatalf("denied by the second: %+v", denied)
			}
			denied = w.deny(team.UpTo(100), calls.Count(47)) // by the one that takes its count
			w.took(denied, 0, 0)
			if r := denied.Requests; !r[0].OK || r[1].OK {
				w.Fatalf("denied by the second: %+v", denied)
			}
			if after := w.rows(); after != before {
				w.Fatalf("a denial wrote:\n%s\nbecame\n%s", before, after)
			}
		}
	})
}

func TestUpToIsRefusedWhereItHasNoMeaning(t *testing.T) {
	limiter, _ := newLimiter()
	pool := reusedPool(t, 1, 0)
	limit, other := ratelimit.TokenBucket("jobs", 10, time.Minute, ratelimit.MaxReserved(5)), ratelimit.TokenBucket("other", 10, time.Minute)
	jobs := limit.Key("red")
	for name, requests := range map[string][]ratelimit.Request{
		"nothing":             {jobs.UpTo(0)},
		"less than nothing":   {jobs.UpTo(-1)},
		"too much":            {jobs.UpTo(1e15 + 1)},
		"reserving":           {jobs.UpTo(5).Reserve()},
		"another reserves":    {other.Key("red").UpTo(5), jobs.Reserve()},
		"twice":               {jobs.UpTo(5), jobs.UpTo(5)},
		"and one of the same": {jobs.UpTo(5), jobs},
		"one of the same and": {jobs, jobs.UpTo(5)},
	} {
		for verb, ask := range map[string]func(context.Context, ratelimit.DB, ...ratelimit.Request) (ratelimit.Result, error){
			"consume": limiter.Consume, "check": limiter.Check,
		} {
			if result, err := ask(t.Context(), pool, requests...); !errors.Is(err, ratelimit.ErrInvalid) || result.OK {
				t.Errorf("%s, %s: %+v, %v", name, verb, result, err)
			}
		}
	}
	if _, err := limiter.Charge(t.Context(), pool, jobs.UpTo(5)); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("charge: %v", err)
	}
	if _, err := limiter.Refund(t.Context(), pool, receiptOf(noon, jobs), jobs.UpTo(1)); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("refund: %v", err)
	}
	half := ratelimit.TokenBucket("half", 10, time.Minute, ratelimit.Capacity(0.5))
	if _, err := limiter.Consume(t.Context(), pool, half.Key("red").UpTo(5)); !errors.Is(err, ratelimit.ErrExceedsCapacity) {
		t.Errorf("of a limit that never has a whole token: %v", err)
	}
	if result, err := limiter.Consume(t.Context(), pool, jobs.UpTo(5).Count(2)); err != nil || result.Requests[0].Taken != 2 {
		t.Errorf("a Count after UpTo: %+v, %v", result, err)
	}
	if result, err := limiter.Consume(t.Context(), pool, jobs.UpTo(5).Count(9)); !denied(err) { // 8 are left
		t.Errorf("a Count after UpTo, of more than there is: %+v, %v", result, err)
	}
}

// TestUpToTakesATokenThatIsThereButForRounding: three unevenly filled shards have 3 tokens, less a rounding error.
func TestUpToTakesATokenThatIsThereButForRounding(t *testing.T) {
	behaviour(t, func(w world) {
		jobs := sharded("jobs", 3).Key("red")
		for shard, value := range []float64{1.1, 1.2, 0.7 - 1e-12} {
			_, err := w.db.Exec(w.Context(), `INSERT INTO rate_limits (name, key, shard, shards, value, ts) VALUES ('jobs', 'red', $1, 3, $2, $3)`, shard, value, w.clock.now)
			w.do(err)
		}
		w.took(w.check(jobs.UpTo(5)), 3)
		w.took(w.grant(jobs.UpTo(5)), 3)
		w.deny(jobs.UpTo(5))
	})
}

// TestUpToOnACoalescerThatIsBusy: an UpTo call in the queue is sent by itself.
func TestUpToOnACoalescerThatIsBusy(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer coalescer.Close()
	release := holdFlights(t, coalescer, pool)
	jobs := ratelimit.TokenBucket("jobs", 1, 10*365*24*time.Hour, ratelimit.Capacity(50)).Key("red")
	ctx := newArrival(t.Context())
	done := make(chan ratelimit.Result, 1)
	go func() {
		result, err := new(ratelimit.Limiter).Consume(ctx, coalescer, jobs.UpTo(100))
		if err != nil {
			t.Error(err)
		}
		done <- result
	}()
	<-ctx.arrived
	release()
	if result := <-done; result.Requests[0].Taken != 50 {
		t.Errorf("%+v", result)
	}
}

func TestUpToInATransactionThatRollsBack(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 2)
	limiter, clock := newLimiter()
	w := world{t, pool, limiter, clock}
	for _, shards := range []int{1, 3} {
		for kind, limit := range upToLimits(shards) {
			request := limit.Key("red").UpTo(100)
			for i, commit := range []bool{false, true, false} {
				undo := errors.New("changed my mind")
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					result, err := limiter.Consume(ctx, tx, request)
					if err != nil {
						return err
					}
					w.took(result, 50)
					if commit {
						return nil
					}
					return undo
				}, ratelimit.Hot(request))
				if want := map[int]error{0: undo, 1: nil, 2: ratelimit.ErrDenied}[i]; !errors.Is(err, want) {
					t.Errorf("%s, %d shards, transaction %d: %v, want %v", kind, shards, i, err, want)
				}
			}
		}
	}
}

func TestUpToInABatch(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	limiter, clock := newLimiter()
	w := world{t, pool, limiter, clock}
	for _, shards := range []int{1, 3} {
		for kind, limit := range upToLimits(shards) {
			red := limit.Key("red").UpTo(30)
			var batch pgx.Batch
			var results []*ratelimit.Result
			for range 2 {
				result, err := limiter.QueueConsume(t.Context(), &batch, red)
				w.do(err)
				results = append(results, result)
			}
			w.do(limiter.SendTx(t.Context(), pool, &batch))
			w.took(*results[0], 30)
			w.took(*results[1], 20)

			batch = pgx.Batch{}
			result, err := limiter.QueueConsume(t.Context(), &batch, red)
			w.do(err)
			if err := limiter.SendTx(t.Context(), pool, &batch); !denied(err) || result.OK {
				t.Errorf("%s, %d shards: %+v, %v, want a denial", kind, shards, result, err)
			}
			w.took(*result, 0)
		}
	}
}

func TestAnObserverSeesWhatUpToTook(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	var seen []float64
	limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { seen = append(seen, d.Result.Requests[0].Taken) }}
	jobs := ratelimit.TokenBucket("jobs", 1, time.Hour, ratelimit.Capacity(7)).Key("red").UpTo(5)
	for range 3 {
		_, _ = limiter.Consume(t.Context(), pool, jobs)
	}
	if fmt.Sprint(seen) != "[5 2 0]" {
		t.Errorf("the observer saw %v", seen)
	}
}

// TestUpToTakesNoTokenTwice has many workers take everything, each up to some number, until they are denied. Some take two
// tokens or none. Together they take exactly the capacity: on a pool, on a Coalescer and at every isolation level.
func TestUpToTakesNoTokenTwice(t *testing.T) {
	t.Parallel()
	const capacity = 500
	for _, shards := range []int{1, 3} {
		for way, consume := range upToWays {
			t.Run(fmt.Sprintf("%s, %d shards", way, shards), func(t *testing.T) {
				t.Parallel()
				pool := newPool(t, 8)
				coalescer := &ratelimit.Coalescer{Pool: pool}
				defer coalescer.Close()
				// A refill takes years, so the sum is known.
				jobs := ratelimit.TokenBucket("jobs", 1, 10*365*24*time.Hour, ratelimit.Capacity(capacity), ratelimit.Shards(shards)).Key("red")
				site := ratelimit.FixedWindow("site", 1, 10*365*24*time.Hour, ratelimit.Capacity(capacity+10), ratelimit.Shards(shards)).Key("all")
				r := newRand(t)
				var mu sync.Mutex
				taken, grants := 0.0, 0
				var wg sync.WaitGroup
				for worker := range 8 {
					most := 1 + r.IntN(30)
					requests := []ratelimit.Request{jobs.UpTo(most), site.UpTo(1000)}
					if worker%4 == 3 { // takes 2 or nothing
						most = 2
						requests = []ratelimit.Request{jobs.Count(2), site.Count(2)}
					}
					wg.Go(func() {
						for {
							result, err := consume(t.Context(), pool, coalescer, requests...)
							if denied(err) {
								return
							}
							if err != nil {
								t.Error(err)
								return
							}
							if n := result.Requests[0].Taken; n < 1 || n > float64(most) || n != result.Requests[1].Taken {
								t.Errorf("took %v and %v of up to %d", n, result.Requests[1].Taken, most)
							}
							mu.Lock()
							taken += result.Requests[0].Taken
							grants++
							mu.Unlock()
						}
					})
				}
				wg.Wait()
				if taken != capacity {
					t.Errorf("%v tokens were taken in %d calls, and there were %d", taken, grants, capacity)
				}
				if left := remaining(t, pool, site); !near(left, 10) && left < 10 || left > 10.01 {
					t.Errorf("%v tokens are left beside them, want 10", left)
				}
			})
		}
	}
}

var upToWays = map[string]func(ctx context.Context, pool *pgxpool.Pool, coalescer *ratelimit.Coalescer, requests ...ratelimit.Request) (ratelimit.Result, error){
	"pool": func(ctx context.Context, pool *pgxpool.Pool, _ *ratelimit.Coalescer, requests ...ratelimit.Request) (ratelimit.Result, error) {
		return new(ratelimit.Limiter).Consume(ctx, pool, requests...)
	},
	"coalescer": func(ctx context.Context, _ *pgxpool.Pool, coalescer *ratelimit.Coalescer, requests ...ratelimit.Request) (ratelimit.Result, error) {
		return new(ratelimit.Limiter).Consume(ctx, coalescer, requests...)
	},
	"read committed":  upToInTx(ratelimit.Isolation(pgx.ReadCommitted)),
	"repeatable read": upToInTx(ratelimit.Isolation(pgx.RepeatableRead)),
	"serializable":    upToInTx(ratelimit.Isolation(pgx.Serializable)),
}

// upToInTx takes tokens in transactions. One in three rolls back.
func upToInTx(level ratelimit.TxOption) func(context.Context, *pgxpool.Pool, *ratelimit.Coalescer, ...ratelimit.Request) (ratelimit.Result, error) {
	return func(ctx context.Context, pool *pgxpool.Pool, _ *ratelimit.Coalescer, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
		var limiter ratelimit.Limiter
		undo := errors.New("changed my mind")
		for try := 0; ; try++ {
			err = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
				if result, err = limiter.Consume(ctx, tx, requests...); err == nil && int(result.Requests[0].Taken+result.Remaining)%3 == try {
					err = undo
				}
				return err
			}, level, ratelimit.Attempts(1000))
			if !errors.Is(err, undo) {
				return result, err
			}
		}
	}
}

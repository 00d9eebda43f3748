package verbs_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// takeLimits are limits of 50 tokens that get one every 6 seconds, 600 an hour, or 600 a day.
func takeLimits(shards int) map[string]ratelimit.Limit {
	capacity, sharded := ratelimit.Capacity(50), ratelimit.Shards(shards)
	return map[string]ratelimit.Limit{
		"bucket":   ratelimit.TokenBucket(fmt.Sprint("bucket", shards), 10, time.Minute, capacity, sharded),
		"window":   ratelimit.FixedWindow(fmt.Sprint("window", shards), 600, time.Hour, capacity, sharded, ratelimit.Start(harness.Noon)),
		"calendar": ratelimit.CalendarWindow(fmt.Sprint("calendar", shards), 600, ratelimit.Day, capacity, sharded),
	}
}

func TestTakeTakesTheWholeTokensThatAreThere(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			for kind, limit := range takeLimits(shards) {
				w.Run(fmt.Sprint(kind, shards), func(t *testing.T) {
					w := harness.World{T: t, DB: w.DB, Limiter: w.Limiter, Clock: w.Clock}
					ann := limit.Key("ann")

					w.Take(20, 20, ann) // fewer than there are; there is no row yet
					w.Grant(ann.Count(0.25))
					result := w.Take(29, 100, ann) // more than the capacity
					w.Holds(ann, 0.75)             // but no fraction of a token

					before := w.Rows()
					denied := w.DenyTake(100, ann)
					if s := denied.Requests[0]; s.Count != 100 || !harness.Near(s.Remaining, 0.75) {
						w.Fatalf("%+v", denied)
					}
					if after := w.Rows(); after != before {
						w.Fatalf("a denial wrote:\n%s\nbecame\n%s", before, after)
					}
					one := w.Deny(ann)
					if !denied.RetryAt.Equal(one.RetryAt) || denied.RetryAfter != one.RetryAfter || !denied.RetryAt.Equal(w.Balances(ann)[0].NextAt) {
						w.Fatalf("retry at %v, want %v, when the first token is there", denied.RetryAt, one.RetryAt)
					}
					if kind == "bucket" {
						w.Retries(denied, 1500*time.Millisecond)
					}

					// The receipt has the taken count, and the rest of it can be refunded.
					if _, err := w.Limiter.Refund(w.Context(), w.DB, result.Receipt(), ann.Count(30)); !errors.Is(err, ratelimit.ErrInvalid) {
						w.Fatalf("a refund of 30 of 29: %v", err)
					}
					refund, err := w.Limiter.Refund(w.Context(), w.DB, result.Receipt(), ann.Count(9))
					if err != nil || !harness.Near(refund.Requests[0].Refunded, 9) || refund.Requests[0].Taken != 0 {
						w.Fatalf("refund: %+v, %v", refund, err)
					}
					w.Holds(ann, 9.75)
					w.Take(9, 100, ann)

					charge, err := w.Limiter.Charge(w.Context(), w.DB, ann.Count(3))
					w.Do(err)
					if charge.Requests[0].Taken != 3 {
						w.Fatalf("charged: %+v", charge)
					}
					w.DenyTake(1, ann) // in debt
					w.Do(w.Limiter.Reset(w.Context(), w.DB, ann))
					w.Take(50, 50, ann)
					w.DenyTake(50, ann)

					// The first token is there at RetryAt, and not before.
					w.Clock.At = w.DenyTake(1, ann).RetryAt.Add(-time.Microsecond)
					w.DenyTake(50, ann)
					w.Clock.Advance(time.Microsecond)
					want := map[string]int{"bucket": 1}[kind]
					if want == 0 {
						want = 50 // a whole window
					}
					w.Take(want, 50, ann)
					w.Clock.At = harness.Noon
				})
			}
		}
	})
}

// TestTakeTakesTheSameFromSeveralLimits: the jobs of a worker count for a team and for the whole site.
func TestTakeTakesTheSameFromSeveralLimits(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		for _, shards := range []int{1, 3} {
			limits := takeLimits(shards)
			team, site := limits["bucket"].Key("red"), limits["calendar"].Key("site")
			calls := limits["window"].Key("calls")

			w.Take(10, 10, team, site, calls)
			w.Take(7, 7, calls, team, site) // whatever the lock order
			w.Grant(site.Count(6.5))
			w.Take(26, 100, team, site, calls) // the least that they have
			for request, want := range map[ratelimit.Request]float64{team: 7, site: 0.5, calls: 7} {
				w.Holds(request, want)
			}

			before := w.Rows()
			denied := w.DenyTake(100, team, calls, site) // by one of them
			if text := (&ratelimit.DeniedError{RetryAt: denied.RetryAt, Requests: denied.Requests}).Error(); !strings.Contains(text, "(up to 100 asked, 0.5 of 50 remaining)") {
				w.Errorf("the error says %q", text)
			}
			if r := denied.Requests; !r[0].OK || !r[1].OK || r[2].OK || !r[0].RetryAt.IsZero() || !r[2].RetryAt.Equal(denied.RetryAt) {
				w.Fatalf("denied by the third: %+v", denied)
			}
			if after := w.Rows(); after != before {
				w.Fatalf("a denial wrote:\n%s\nbecame\n%s", before, after)
			}
		}
	})
}

func TestTakeIsRefusedWhereItHasNoMeaning(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		jobs, other := ratelimit.TokenBucket("jobs", 10, time.Minute).Key("red"), ratelimit.TokenBucket("other", 10, time.Minute).Key("red")
		half := ratelimit.TokenBucket("half", 10, time.Minute, ratelimit.Capacity(0.5)).Key("red")
		for name, c := range map[string]struct {
			most     int
			requests []ratelimit.Request
			want     error
		}{
			"no request":            {5, nil, ratelimit.ErrInvalid},
			"nothing":               {0, []ratelimit.Request{jobs}, ratelimit.ErrInvalid},
			"less than nothing":     {-1, []ratelimit.Request{jobs}, ratelimit.ErrInvalid},
			"too much":              {1e15 + 1, []ratelimit.Request{jobs}, ratelimit.ErrInvalid},
			"too much, unlimited":   {1e15 + 1, []ratelimit.Request{ratelimit.Unlimited("open").Key("red")}, ratelimit.ErrInvalid},
			"a count":               {5, []ratelimit.Request{jobs.Count(2)}, ratelimit.ErrInvalid},
			"a count of most":       {5, []ratelimit.Request{jobs.Count(5)}, ratelimit.ErrInvalid},
			"a count of 0":          {5, []ratelimit.Request{jobs.Count(0)}, ratelimit.ErrInvalid},
			"a count of NaN":        {5, []ratelimit.Request{jobs.Count(math.NaN())}, ratelimit.ErrInvalid},
			"a count of the second": {5, []ratelimit.Request{other, jobs.Count(1.5)}, ratelimit.ErrInvalid},
			"twice":                 {5, []ratelimit.Request{jobs, jobs}, ratelimit.ErrInvalid},
			"twice, with another":   {1, []ratelimit.Request{jobs, other, jobs}, ratelimit.ErrInvalid},
			"no key":                {5, []ratelimit.Request{other, ratelimit.TokenBucket("jobs", 10, time.Minute).Key("")}, ratelimit.ErrInvalid},
			"never a whole token":   {5, []ratelimit.Request{jobs, half}, ratelimit.ErrExceedsCapacity},
		} {
			n, result, err := w.Limiter.Take(w.Context(), w.DB, c.most, c.requests...)
			if !errors.Is(err, c.want) || n != 0 || result.OK || len(result.Requests) != len(c.requests) {
				w.Errorf("%s: %d, %+v, %v", name, n, result, err)
			}
		}
		if rows := w.Rows(); rows != "" {
			w.Errorf("it wrote %s", rows)
		}
		requests := []ratelimit.Request{jobs.Count(1), other}
		w.Take(5, 5, requests...)
		w.Grant(requests...) // they are as they were: 1 of each
		w.Holds(jobs, 4)
	})
}

// TestTakeTakesATokenThatIsThereButForRounding: three unevenly filled shards have 3 tokens, less a rounding error.
func TestTakeTakesATokenThatIsThereButForRounding(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		jobs := harness.Sharded("jobs", 3).Key("red")
		for shard, value := range []float64{1.1, 1.2, 0.7 - 1e-12} {
			_, err := w.DB.Exec(w.Context(), `INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('jobs', 'red', $1, 3, $2, $3)`, shard, value, w.Clock.At)
			w.Do(err)
		}
		w.Take(3, 5, jobs)
		w.DenyTake(5, jobs)
	})
}

// TestTakeOnACoalescerThatIsBusy: a Take in the queue is sent by itself.
func TestTakeOnACoalescerThatIsBusy(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	release := harness.HoldFlights(t, coalescer, pool)
	jobs := ratelimit.TokenBucket("jobs", 1, 10*365*24*time.Hour, ratelimit.Capacity(50)).Key("red")
	ctx := harness.NewArrival(t.Context())
	done := make(chan int, 1)
	go func() {
		n, result, err := new(ratelimit.Limiter).Take(ctx, coalescer, 100, jobs)
		if err != nil || result.Requests[0].Taken != 50 {
			t.Errorf("%+v, %v", result, err)
		}
		done <- n
	}()
	<-ctx.Arrived
	release()
	if n := <-done; n != 50 {
		t.Errorf("took %d", n)
	}
}

func TestAnObserverSeesWhatTakeTook(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var seen []string
	limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) {
		s := d.Result.Requests[0]
		seen = append(seen, fmt.Sprint(d.Verb, " ", s.Taken, " of ", s.Count, " ", harness.Denied(d.Err)))
	}}
	jobs := ratelimit.TokenBucket("jobs", 1, time.Hour, ratelimit.Capacity(7)).Key("red")
	for range 3 {
		_, _, _ = limiter.Take(t.Context(), pool, 5, jobs)
	}
	if want := []string{"take 5 of 5 false", "take 2 of 5 false", "take 0 of 5 true"}; !slices.Equal(seen, want) {
		t.Errorf("the observer saw %q", seen)
	}
}

// TestTakeTakesNoTokenTwice has many workers take everything, each up to some number, until they are denied. Some consume two
// tokens or none. Together they take exactly the capacity: on a pool, on a Coalescer and at every isolation level.
func TestTakeTakesNoTokenTwice(t *testing.T) {
	t.Parallel()
	const capacity = 500
	for _, shards := range []int{1, 3} {
		for way, take := range takeWays {
			t.Run(fmt.Sprintf("%s, %d shards", way, shards), func(t *testing.T) {
				t.Parallel()
				pool := harness.NewPool(t, 8)
				coalescer := &ratelimit.Coalescer{Pool: pool}
				defer harness.CloseCoalescer(t, coalescer)
				// A refill takes years, so the sum is known.
				jobs := ratelimit.TokenBucket("jobs", 1, 10*365*24*time.Hour, ratelimit.Capacity(capacity), ratelimit.Shards(shards)).Key("red")
				site := ratelimit.FixedWindow("site", 1, 10*365*24*time.Hour, ratelimit.Capacity(capacity+10), ratelimit.Shards(shards)).Key("all")
				r := harness.NewRand(t)
				var mu sync.Mutex
				taken, grants := 0.0, 0
				var wg sync.WaitGroup
				for worker := range 8 {
					most := 1 + r.IntN(30)
					verb := taking(most, jobs, site)
					if worker%4 == 3 {
						most = 2
						verb = func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
							return l.Consume(ctx, db, jobs.Count(2), site.Count(2))
						}
					}
					wg.Go(func() {
						for {
							result, err := take(t.Context(), pool, coalescer, verb)
							if harness.Denied(err) {
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
				if left := harness.Remaining(t, pool, site); !harness.Near(left, 10) && left < 10 || left > 10.01 {
					t.Errorf("%v tokens are left beside them, want 10", left)
				}
			})
		}
	}
}

// verb is a call that takes tokens.
type verb func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error)

// taking is a Take, whose n must be what its status says.
func taking(most int, requests ...ratelimit.Request) verb {
	return func(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DB) (ratelimit.Result, error) {
		n, result, err := l.Take(ctx, db, most, requests...)
		if err == nil && float64(n) != result.Requests[0].Taken {
			err = fmt.Errorf("took %d, and the result says %+v", n, result)
		}
		return result, err
	}
}

var takeWays = map[string]func(ctx context.Context, pool *pgxpool.Pool, coalescer *ratelimit.Coalescer, take verb) (ratelimit.Result, error){
	"pool": func(ctx context.Context, pool *pgxpool.Pool, _ *ratelimit.Coalescer, take verb) (ratelimit.Result, error) {
		return take(ctx, new(ratelimit.Limiter), pool)
	},
	"coalescer": func(ctx context.Context, _ *pgxpool.Pool, coalescer *ratelimit.Coalescer, take verb) (ratelimit.Result, error) {
		return take(ctx, new(ratelimit.Limiter), coalescer)
	},
	"read committed":  takeInTx(ratelimit.Isolation(pgx.ReadCommitted)),
	"repeatable read": takeInTx(ratelimit.Isolation(pgx.RepeatableRead)),
	"serializable":    takeInTx(ratelimit.Isolation(pgx.Serializable)),
}

// takeInTx takes tokens in transactions. One in three rolls back.
func takeInTx(level ratelimit.TxOption) func(context.Context, *pgxpool.Pool, *ratelimit.Coalescer, verb) (ratelimit.Result, error) {
	return func(ctx context.Context, pool *pgxpool.Pool, _ *ratelimit.Coalescer, take verb) (result ratelimit.Result, err error) {
		var limiter ratelimit.Limiter
		undo := errors.New("changed my mind")
		for try := 0; ; try++ {
			err = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
				if result, err = take(ctx, &limiter, tx); err == nil && int(result.Requests[0].Taken+result.Remaining)%3 == try {
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

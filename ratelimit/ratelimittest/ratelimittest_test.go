package ratelimittest_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

var (
	bucket   = ratelimit.TokenBucket("bucket", 1, time.Minute, ratelimit.Capacity(2))
	sharded  = ratelimit.TokenBucket("sharded", 6, time.Minute, ratelimit.Shards(3))
	window   = ratelimit.FixedWindow("window", 2, time.Hour, ratelimit.Start(time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)))
	calendar = ratelimit.CalendarWindow("calendar", 2, ratelimit.Month, ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor("2030-01-31"))
)

// holds checks the balance of a key.
func holds(t *testing.T, limits *ratelimit.Limiter, db ratelimit.DB, request ratelimit.Request, want float64) {
	t.Helper()
	balances, err := limits.Balance(t.Context(), db, request.Count(1))
	if err != nil || balances[0].Remaining != want {
		t.Errorf("%+v, %v; want %v", balances, err, want)
	}
}

func TestEveryVerb(t *testing.T) {
	for _, limit := range []ratelimit.Limit{bucket, sharded, window, calendar} {
		t.Run(limit.Name(), func(t *testing.T) {
			var limits ratelimit.Limiter
			db, ctx, all := ratelimittest.New(t), t.Context(), limit.Key("ann").Count(limit.Capacity())
			granted, err := limits.Consume(ctx, db, all)
			if err != nil || !granted.At.Equal(db.Now()) {
				t.Fatalf("%+v, %v", granted, err)
			}
			denied, err := limits.Consume(ctx, db, all)
			if !errors.Is(err, ratelimit.ErrDenied) {
				t.Fatal(err)
			}
			if _, err := limits.Check(ctx, db, all); !errors.Is(err, ratelimit.ErrDenied) {
				t.Error(err)
			}
			db.Set(denied.RetryAt.Add(-time.Microsecond))
			if _, err := limits.Consume(ctx, db, all); !errors.Is(err, ratelimit.ErrDenied) {
				t.Errorf("before RetryAt: %v", err)
			}
			db.Advance(time.Microsecond)
			granted, err = limits.Consume(ctx, db, all)
			if err != nil {
				t.Fatalf("at RetryAt: %v", err)
			}
			holds(t, &limits, db, all, 0)
			if refund, err := limits.Refund(ctx, db, granted.Receipt(), all.Count(1)); err != nil || refund.Requests[0].Refunded != 1 {
				t.Errorf("refund: %+v, %v", refund, err)
			}
			holds(t, &limits, db, all, 1)
			if _, err := limits.Charge(ctx, db, all); err != nil {
				t.Error(err)
			}
			holds(t, &limits, db, all, 1-limit.Capacity())
			if err := limits.Reset(ctx, db, all.Count(1)); err != nil {
				t.Error(err)
			}
			holds(t, &limits, db, all, limit.Capacity())
			if n, _, err := limits.Take(ctx, db, 100, limit.Key("ann")); err != nil || n != int(limit.Capacity()) {
				t.Errorf("took %d, %v", n, err)
			}
			if n, _, err := limits.Take(ctx, db, 100, limit.Key("ann")); !errors.Is(err, ratelimit.ErrDenied) || n != 0 {
				t.Errorf("took %d when nothing was there, %v", n, err)
			}
			balances, err := limits.Balance(ctx, db, limit.Key("ann"))
			if err != nil || balances[0].Used != limit.Capacity() || !balances[0].NextAt.After(db.Now()) {
				t.Errorf("%+v, %v", balances, err)
			}
			reserved, err := limits.Reserve(ctx, db, limit.Key("ann"))
			if err != nil || !reserved.RetryAt.Equal(balances[0].NextAt) {
				t.Errorf("%+v, %v; want a place at %v", reserved, err, balances[0].NextAt)
			}
		})
	}
}

// As on a pool, a function may roll back, and what it has committed is not run again.
func TestATransactionThatItsFunctionEnds(t *testing.T) {
	db, limits, mine := ratelimittest.New(t), &ratelimit.Limiter{}, errors.New("mine")
	for unknown, end := range map[bool]func(tx pgx.Tx, ctx context.Context) error{false: pgx.Tx.Rollback, true: pgx.Tx.Commit} {
		err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limits.Consume(ctx, tx, window.Global())
			return errors.Join(err, end(tx, ctx), mine)
		})
		if errors.Is(err, ratelimit.ErrUnknownOutcome) != unknown || !errors.Is(err, mine) {
			t.Errorf("%v, want an unknown outcome: %v", err, unknown)
		}
	}
	holds(t, limits, db, window.Global(), 1)
}

func TestCalendarsFollowTheClock(t *testing.T) {
	db, limiter := ratelimittest.New(t), &ratelimit.Limiter{}
	for range 30 { // months, far from the time of the process
		for range 2 {
			if _, err := limiter.Consume(t.Context(), db, calendar.Key("ann")); err != nil {
				t.Fatalf("at %v: %v", db.Now(), err)
			}
		}
		denied, err := limiter.Consume(t.Context(), db, calendar.Key("ann"))
		if !errors.Is(err, ratelimit.ErrDenied) {
			t.Fatalf("at %v: %v", db.Now(), err)
		}
		db.Set(denied.RetryAt)
	}
	if want := time.Date(2032, 6, 29, 22, 0, 0, 0, time.UTC); !db.Now().Equal(want) {
		t.Errorf("after 30 months it is %v, not %v", db.Now(), want)
	}
}

func TestALimitersClockDecides(t *testing.T) {
	db, now := ratelimittest.New(t), time.Date(2001, 2, 3, 4, 5, 6, 7000, time.UTC)
	limits := &ratelimit.Limiter{Clock: func() time.Time { return now }}
	for _, limit := range []ratelimit.Limit{bucket, window, calendar} {
		result, err := limits.Consume(t.Context(), db, limit.Key("ann"))
		if err != nil || !result.At.Equal(now) {
			t.Errorf("%+v, %v", result, err)
		}
	}
}

func TestSeveralLimitsAreAllOrNothing(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	requests := []ratelimit.Request{bucket.Key("ann").Count(2), window.Global(), sharded.Key("ann"), calendar.Key("ann")}
	if _, err := limits.Consume(t.Context(), db, requests...); err != nil {
		t.Fatal(err)
	}
	result, err := limits.Consume(t.Context(), db, requests...)
	if !errors.Is(err, ratelimit.ErrDenied) || result.Requests[0].OK || !result.Requests[1].OK {
		t.Errorf("%+v, %v", result, err)
	}
	holds(t, limits, db, window.Global(), 1)
}

func TestReservationsWait(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	var runAt []time.Duration
	for range 4 {
		reserved, err := limits.Reserve(t.Context(), db, bucket.Key("ann"))
		if err != nil {
			t.Fatal(err)
		}
		runAt = append(runAt, reserved.RetryAt.Sub(db.Now()))
	}
	if want := []time.Duration{0, 0, time.Minute, 2 * time.Minute}; [4]time.Duration(runAt) != [4]time.Duration(want) {
		t.Errorf("the jobs run in %v, not in %v", runAt, want)
	}
}

func TestARollbackGivesTheTokensBack(t *testing.T) {
	db, limits, ann := ratelimittest.New(t), &ratelimit.Limiter{}, bucket.Key("ann")
	changedMyMind := errors.New("changed my mind")
	consume := func(ctx context.Context, tx pgx.Tx) error {
		_, err := limits.Consume(ctx, tx, ann)
		return err
	}
	err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
		if err := consume(ctx, tx); err != nil {
			return err
		}
		holds(t, limits, tx, ann, 1)
		holds(t, limits, db, ann, 2) // not committed
		return changedMyMind
	})
	if !errors.Is(err, changedMyMind) {
		t.Fatal(err)
	}
	holds(t, limits, db, ann, 2)
	for left := range 2 {
		if err := limits.InTx(t.Context(), db, consume); err != nil {
			t.Fatal(err)
		}
		holds(t, limits, db, ann, float64(1-left))
	}
	if err := limits.InTx(t.Context(), db, consume); !errors.Is(err, ratelimit.ErrDenied) {
		t.Error(err)
	}
}

func TestNestedTransactions(t *testing.T) {
	db, limits, ann, bob := ratelimittest.New(t), &ratelimit.Limiter{}, bucket.Key("ann"), bucket.Key("bob")
	if _, err := limits.Consume(t.Context(), db, bob); err != nil {
		t.Fatal(err)
	}
	err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := limits.Consume(ctx, tx, ann); err != nil {
			return err
		}
		for _, end := range []func(pgx.Tx) error{
			func(nested pgx.Tx) error { return nested.Rollback(ctx) },
			func(nested pgx.Tx) error {
				_, err := nested.Exec(ctx, "SELECT 1")
				_ = err
				return nested.Rollback(ctx)
			},
			func(nested pgx.Tx) error { return nested.Commit(ctx) },
		} {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if _, err := limits.Consume(ctx, nested, ann, bob); err != nil {
				return err
			}
			if err := end(nested); err != nil {
				return err
			}
			if err := nested.Rollback(ctx); !errors.Is(err, pgx.ErrTxClosed) {
				t.Error(err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	holds(t, limits, db, ann, 0)
	holds(t, limits, db, bob, 0)
}

func TestConflictsAreRetried(t *testing.T) {
	db, limits, ann := ratelimittest.New(t), &ratelimit.Limiter{}, bucket.Key("ann")
	attempts := 0
	err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
		attempts++
		if _, err := limits.Consume(ctx, tx, ann); err != nil {
			return err
		}
		if attempts == 1 { // as another process would
			_, err := limits.Consume(ratelimit.OutsideTx(ctx), db, ann)
			return err
		}
		return nil
	})
	if err != nil || attempts != 2 {
		t.Errorf("%d attempts, %v", attempts, err)
	}
	holds(t, limits, db, ann, 0)
}

func TestThePoolInsideATransactionIsRefused(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	err := limits.InTx(t.Context(), db, func(ctx context.Context, _ pgx.Tx) error {
		_, err := limits.Consume(ctx, db, bucket.Key("ann"))
		return err
	})
	if !errors.Is(err, ratelimit.ErrInvalid) {
		t.Error(err)
	}
}

func TestBatches(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	send := func(requests ...ratelimit.Request) (results []*ratelimit.Result, err error) {
		batch := &pgx.Batch{}
		for _, request := range requests {
			result, err := limits.QueueConsume(t.Context(), batch, request)
			if err != nil {
				t.Fatal(err)
			}
			results = append(results, result)
		}
		return results, limits.SendTx(t.Context(), db, batch)
	}
	results, err := send(bucket.Key("ann"), window.Global())
	if err != nil || !results[0].OK || results[1].Remaining != 1 {
		t.Fatalf("%+v, %v", results, err)
	}
	results, err = send(window.Global(), bucket.Key("ann").Count(2))
	if denied := (*ratelimit.DeniedError)(nil); !errors.As(err, &denied) || denied.RetryAfter != time.Minute {
		t.Errorf("%+v, %v", results, err)
	}
	holds(t, limits, db, window.Global(), 1) // rolled back

	alone := &pgx.Batch{}
	if _, err := limits.QueueConsume(t.Context(), alone, window.Global()); err != nil {
		t.Fatal(err)
	}
	if err := db.SendBatch(t.Context(), alone).Close(); err != nil {
		t.Error(err)
	}
	holds(t, limits, db, window.Global(), 0) // the batch was a transaction by itself

	batch := &pgx.Batch{}
	batch.Queue("INSERT INTO messages VALUES (1)")
	if err := limits.SendTx(t.Context(), db, batch); err == nil || !strings.Contains(err.Error(), "in memory for rate limits only") {
		t.Error(err)
	}
	month := &pgx.Batch{}
	if _, err := limits.QueueConsume(t.Context(), month, calendar.Key("ann")); err != nil {
		t.Fatal(err)
	}
	if err := limits.SendTx(t.Context(), db, month); err == nil || !strings.Contains(err.Error(), "set Limiter.Clock") {
		t.Error(err)
	}
}

func TestTheMiddlewareWorks(t *testing.T) {
	db := ratelimittest.New(t)
	handler := httplimit.Middleware{
		Limiter: &ratelimit.Limiter{}, DB: db,
		Requests: func(*http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{bucket.Key("ann")}, nil
		},
	}.Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for _, want := range []int{http.StatusOK, http.StatusOK, http.StatusTooManyRequests} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		if answer.Code != want {
			t.Errorf("status %d, want %d", answer.Code, want)
		}
	}
}

func TestHotWaitsForNothing(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() {
			err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
				_, err := limits.Consume(ctx, tx, sharded.Global())
				return err
			}, ratelimit.Hot(sharded.Global()), ratelimit.Attempts(1000))
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	holds(t, limits, db, sharded.Global(), 0)
}

func TestOtherSQLIsAnError(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	const want = "in memory for rate limits only"
	var n int
	if err := db.QueryRow(t.Context(), "SELECT 1").Scan(&n); err == nil || !strings.Contains(err.Error(), want) {
		t.Error(err)
	}
	for name, statement := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"Exec": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Exec(ctx, "DELETE FROM messages"); return err },
		"Query": func(ctx context.Context, tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "SELECT 1")
			if err == nil {
				rows.Close()
			}
			return err
		},
		"QueryRow": func(ctx context.Context, tx pgx.Tx) error { return tx.QueryRow(ctx, "SELECT 1").Scan(&n) },
		"Prepare":  func(ctx context.Context, tx pgx.Tx) error { _, err := tx.Prepare(ctx, "one", "SELECT 1"); return err },
		"CopyFrom": func(ctx context.Context, tx pgx.Tx) error { _, err := tx.CopyFrom(ctx, nil, nil, nil); return err },
		"SendBatch": func(ctx context.Context, tx pgx.Tx) error {
			b := &pgx.Batch{}
			b.Queue("SELECT 1")
			return tx.SendBatch(ctx, b).Close()
		},
		"LargeObjects": func(ctx context.Context, tx pgx.Tx) error {
			lo := tx.LargeObjects()
			_, err := lo.Create(ctx, 0)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := limits.Consume(ctx, tx, bucket.Key("ann")); err != nil {
					t.Fatal(err)
				}
				if err := statement(ctx, tx); err == nil || name != "LargeObjects" && !strings.Contains(err.Error(), want) {
					t.Errorf("%v, not %q", err, want)
				}
				if _, err := limits.Consume(ctx, tx, bucket.Key("ann")); err == nil || !strings.Contains(err.Error(), "25P02") {
					t.Errorf("after the error: %v", err)
				}
				return nil
			})
			if !errors.Is(err, pgx.ErrTxCommitRollback) {
				t.Errorf("the aborted transaction: %v", err)
			}
		})
	}
	holds(t, limits, db, bucket.Key("ann"), 2)
}

// A row is deleted once it has been full for an hour, by every kind of limit. Nothing else of it can be seen.
func TestSweep(t *testing.T) {
	db, limits := ratelimittest.New(t), new(ratelimit.Limiter)
	varies := ratelimit.TokenBucket("varies", 1, time.Minute, ratelimit.Varies(36*time.Hour))
	own := ratelimit.FixedWindow("own", 2, time.Hour)
	sweep := func(want int64, all ...ratelimit.Limit) {
		t.Helper()
		if deleted, err := limits.Sweep(t.Context(), db, all...); err != nil || deleted != want {
			t.Errorf("at %v: %d rows deleted, %v; want %d", db.Now(), deleted, err, want)
		}
	}
	for _, limit := range []ratelimit.Limit{bucket, sharded, window, calendar, varies, own} {
		if _, err := limits.Charge(t.Context(), db, limit.Key("ann").Count(limit.Capacity())); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := limits.Charge(t.Context(), db, varies.Key("bob").Count(2), bucket.Key("bob").Count(1e9)); err != nil {
		t.Fatal(err)
	}
	db.Advance(2*time.Minute + time.Hour - time.Microsecond)
	sweep(0, bucket)
	sweep(3, sharded) // its row was full after a minute
	sweep(0, window, calendar, varies)
	db.Advance(time.Microsecond)
	sweep(1, bucket)
	sweep(0, bucket)
	db.Advance(59 * time.Minute) // the window began an hour and a minute ago
	sweep(1, window)
	sweep(1, own)
	db.Advance(36 * time.Hour)
	sweep(1, varies) // not bob's, which is in debt
	db.Set(time.Date(2030, 1, 31, 0, 59, 0, 0, time.UTC))
	sweep(0, calendar)
	db.Advance(3 * 24 * time.Hour) // the longest that a month can be since the row was written
	sweep(1, calendar)
}

// opened is a Limiter that follows overrides, as a script's does.
func opened(t *testing.T, db ratelimit.DB) *ratelimit.Limiter {
	t.Helper()
	limits, err := ratelimit.Open(t.Context(), db, ratelimit.Options{NoPublish: true, NoSweep: true, NoBackground: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = limits.Close(context.WithoutCancel(t.Context())) })
	return limits
}

// What is decided about a key holds at once on the pool, at COMMIT in a transaction, and until its end by the database's clock.
func TestOverridesAndBlocks(t *testing.T) {
	db := ratelimittest.New(t)
	limits, ann, all := opened(t, db), bucket.Key("ann"), bucket.Global()
	decides := func(want string, capacity float64) {
		t.Helper()
		balances, err := limits.Balance(t.Context(), db, ann)
		if err != nil || balances[0].Decides != want || balances[0].Capacity != capacity {
			t.Errorf("at %v: %+v, %v; want %s, %v", db.Now(), balances, err, want, capacity)
		}
	}
	must := func(_ int64, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(limits.Override(t.Context(), db, all, ratelimit.Terms{Forever: true, Reason: "a holiday", Who: "bea"}, ratelimit.Capacity(7)))
	decides("override", 7)
	changedMyMind := errors.New("changed my mind")
	block := func(end func(tx, nested pgx.Tx) error) error {
		return limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if _, err := limits.Block(ctx, nested, ann, ratelimit.Terms{Until: db.Now().Add(time.Hour)}); err != nil {
				return err
			}
			decides("override", 7)
			return end(tx, nested)
		})
	}
	if err := block(func(_, _ pgx.Tx) error { return changedMyMind }); !errors.Is(err, changedMyMind) {
		t.Error(err)
	}
	decides("override", 7)
	if err := block(func(_, nested pgx.Tx) error { return nested.Rollback(t.Context()) }); err != nil {
		t.Error(err)
	}
	decides("override", 7)
	if err := block(func(_, nested pgx.Tx) error { return nested.Commit(t.Context()) }); err != nil {
		t.Error(err)
	}
	decides("block", 7)
	_, err := limits.Consume(t.Context(), db, ann)
	if denial, _ := errors.AsType[*ratelimit.DeniedError](err); denial == nil || denial.Reason != ratelimit.ReasonBlock || denial.RetryAfter != time.Hour {
		t.Errorf("of a blocked key: %v", err)
	}
	db.Advance(time.Hour)
	decides("override", 7)
	must(limits.Block(t.Context(), db, ann, ratelimit.Terms{Forever: true}))
	must(limits.Override(t.Context(), db, ann, ratelimit.Terms{Forever: true}, ratelimit.Rate(3)))
	if n, err := limits.Unblock(t.Context(), db, ann, ratelimit.End{}); err != nil || n != 1 {
		t.Errorf("unblocked %d, %v", n, err)
	}
	decides("override", 2)
	for _, request := range []ratelimit.Request{ann, all} {
		if n, err := limits.Restore(t.Context(), db, request, ratelimit.End{}); err != nil || n != 1 {
			t.Errorf("restored %d, %v", n, err)
		}
	}
	decides("definition", 2)
	if n, err := limits.Restore(t.Context(), db, all, ratelimit.End{}); err != nil || n != 0 {
		t.Errorf("restored %d, %v", n, err)
	}
	if _, err := limits.Block(t.Context(), db, ann, ratelimit.Terms{Until: db.Now()}); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("an end that is not in the future: %v", err)
	}
}

// A sweep leaves what is not full under an override that was in force within a day.
func TestASweepMindsOverrides(t *testing.T) {
	db := ratelimittest.New(t)
	limits := opened(t, db)
	varies := ratelimit.TokenBucket("varies", 1, time.Minute, ratelimit.Varies(time.Hour))
	sweep := func(want int64, limit ratelimit.Limit) {
		t.Helper()
		if deleted, err := limits.Sweep(t.Context(), db, limit); err != nil || deleted != want {
			t.Errorf("at %v: %d rows deleted, %v; want %d", db.Now(), deleted, err, want)
		}
	}
	if _, err := limits.Consume(t.Context(), db, bucket.Key("ann"), varies.Key("ann"), varies.Key("bob")); err != nil {
		t.Fatal(err)
	}
	for _, limit := range []ratelimit.Limit{bucket, varies} {
		if _, err := limits.Override(t.Context(), db, limit.Key("ann"), ratelimit.Terms{Forever: true}, ratelimit.Capacity(1e6)); err != nil {
			t.Fatal(err)
		}
	}
	db.Advance(3 * time.Hour)
	sweep(0, bucket)
	sweep(1, varies) // bob's
	for _, limit := range []ratelimit.Limit{bucket, varies} {
		if _, err := limits.Restore(t.Context(), db, limit.Key("ann"), ratelimit.End{}); err != nil {
			t.Fatal(err)
		}
	}
	db.Advance(24*time.Hour - time.Microsecond)
	sweep(0, bucket)
	sweep(0, varies)
	db.Advance(time.Microsecond)
	sweep(1, bucket)
	sweep(1, varies)
}

// A sweep conflicts as any other writer does.
func TestASweepTakesNoRowThatIsInUse(t *testing.T) {
	db, limits := ratelimittest.New(t), new(ratelimit.Limiter)
	if _, err := limits.Consume(t.Context(), db, bucket.Key("ann")); err != nil {
		t.Fatal(err)
	}
	db.Advance(2 * time.Hour)
	attempts := 0
	err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
		attempts++
		if _, err := limits.Consume(ctx, tx, bucket.Key("ann")); err != nil {
			return err
		}
		_, err := limits.Sweep(ratelimit.OutsideTx(ctx), db, bucket)
		return err
	})
	if err != nil || attempts != 2 {
		t.Errorf("%d attempts, %v", attempts, err)
	}
	holds(t, limits, db, bucket.Key("ann"), 1)
}

func TestAContextThatHasEndedStopsACall(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := limits.Consume(ctx, db, bucket.Key("ann")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := limits.SendTx(ctx, db, &pgx.Batch{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := db.BeginTx(ctx, pgx.TxOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// recorder is a test whose end can be watched.
type recorder struct {
	testing.TB
	cleanup func()
	errors  int
}

func (r *recorder) Helper()               {}
func (r *recorder) Cleanup(f func())      { r.cleanup = f }
func (r *recorder) Errorf(string, ...any) { r.errors++ }

func TestTheEndOfATest(t *testing.T) {
	test, limits := &recorder{TB: t}, &ratelimit.Limiter{}
	db := ratelimittest.New(test)
	for range 3 {
		tx, err := db.BeginTx(t.Context(), pgx.TxOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if test.cleanup(); test.errors != 0 {
		t.Error("an error, though every transaction has ended")
	}
	if _, err := limits.Consume(t.Context(), db, bucket.Key("ann")); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Error(err)
	}

	db = ratelimittest.New(test)
	if _, err := db.BeginTx(t.Context(), pgx.TxOptions{}); err != nil {
		t.Fatal(err)
	}
	if test.cleanup(); test.errors != 1 {
		t.Error("no error, though a transaction is open")
	}
}

func TestSleepEndsByTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := ratelimittest.New(t)
		ctx, cancel := context.WithCancel(t.Context())
		var woken, canceled time.Time
		go func() {
			if err := db.SleepUntil(ctx, db.Now().Add(time.Minute)); err == nil {
				woken = db.Now()
			}
		}()
		go func() {
			if err := db.SleepUntil(ctx, db.Now().Add(time.Hour)); errors.Is(err, context.Canceled) {
				canceled = db.Now()
			}
		}()
		begin := db.Now()
		synctest.Wait()
		db.Advance(time.Minute - time.Microsecond)
		synctest.Wait()
		if !woken.IsZero() {
			t.Error("woken early")
		}
		db.Advance(time.Microsecond)
		synctest.Wait()
		if woken.Sub(begin) != time.Minute || !canceled.IsZero() {
			t.Errorf("woken at %v, canceled at %v", woken, canceled)
		}
		cancel()
		synctest.Wait()
		if canceled.IsZero() {
			t.Error("still asleep, though its context has ended")
		}
		if err := db.SleepUntil(t.Context(), db.Now()); err != nil {
			t.Error(err)
		}
	})
}

// A Wait sleeps by the clock of the database, in order of arrival. One that is canceled gives its tokens back.
func TestWaitIsDrivenByTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
		perMinute := ratelimit.TokenBucket("perMinute", 1, time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		begin := db.Now()
		var ended []string
		wait := func(name string, ctx context.Context) {
			go func() {
				_, err := limits.Wait(ctx, db, perMinute.Global())
				ended = append(ended, fmt.Sprintf("%s after %v: %v", name, db.Now().Sub(begin), err))
			}()
			synctest.Wait()
		}
		wait("first", t.Context())
		wait("second", t.Context())
		wait("third", ctx)
		cancel()
		synctest.Wait()
		wait("fourth", t.Context())
		for range 121 {
			db.Advance(time.Second)
			synctest.Wait()
		}
		want := []string{"first after 0s: <nil>", "third after 0s: ratelimit: wait: limit \"perMinute\": context canceled", "second after 1m0s: <nil>", "fourth after 2m0s: <nil>"}
		if !slices.Equal(ended, want) {
			t.Errorf("%q, want %q", ended, want)
		}
	})
}

// In a bubble, time.Sleep moves the clock.
func TestInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, asked := ratelimittest.New(t), 0
		limits := &ratelimit.Limiter{Clock: func() time.Time { asked++; return time.Now() }}
		began, daily := time.Now(), ratelimit.TokenBucket("daily", 1, 24*time.Hour)
		for range 2 {
			if _, err := limits.Wait(t.Context(), db, daily.Global()); err != nil {
				t.Fatal(err)
			}
		}
		if waited := time.Since(began); waited != 24*time.Hour || asked > 300 {
			t.Errorf("a wait of a day took %v, and asked the clock %d times", waited, asked)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		db, limits := ratelimittest.New(t), &ratelimit.Limiter{Clock: time.Now}
		for range 5 {
			reserved, err := limits.Reserve(t.Context(), db, bucket.Key("ann"), calendar.Key("ann").Count(0))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(reserved.Delay)
		}
		if slept := time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)); slept != 3*time.Minute {
			t.Errorf("5 tokens took %v", slept)
		}

		// Overrides are made by the database's clock.
		follow.By(limits, follow.Settings{DB: db})
		db.Set(time.Now())
		if _, err := limits.Block(t.Context(), db, bucket.Key("bob"), ratelimit.Terms{For: time.Hour}); err != nil {
			t.Fatal(err)
		}
		for _, granted := range []bool{false, true} {
			if err := follow.Load(t.Context(), limits); err != nil {
				t.Fatal(err)
			}
			if _, err := limits.Consume(t.Context(), db, bucket.Key("bob")); (err == nil) != granted {
				t.Errorf("at %v: %v", time.Now(), err)
			}
			time.Sleep(time.Hour)
		}
		db.Set(time.Now())
		if _, err := limits.Block(t.Context(), db, bucket.Key("bob"), ratelimit.Terms{Forever: true}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		db.Set(time.Now())
		if _, err := limits.Unblock(t.Context(), db, bucket.Key("bob"), ratelimit.End{}); err != nil {
			t.Fatal(err)
		}
		if err := follow.Load(t.Context(), limits); err != nil {
			t.Fatal(err)
		}
		if _, err := limits.Consume(t.Context(), db, bucket.Key("bob")); err != nil {
			t.Error(err)
		}
	})
}

func TestNoDatabase(t *testing.T) {
	if _, err := new(ratelimit.Limiter).Consume(t.Context(), (*ratelimittest.DB)(nil), bucket.Key("ann")); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("%v, want invalid", err)
	}
}

// What a transaction has only read may change until it commits.
func TestReadingConflictsWithNobody(t *testing.T) {
	db, limits := ratelimittest.New(t), new(ratelimit.Limiter)
	attempts := 0
	err := limits.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
		attempts++
		if _, err := limits.Check(ctx, tx, bucket.Key("ann")); err != nil {
			return err
		}
		_, err := limits.Consume(ratelimit.OutsideTx(ctx), db, bucket.Key("ann"))
		return err
	})
	if err != nil || attempts != 1 {
		t.Errorf("%d attempts, %v", attempts, err)
	}
}

// A call that nothing is sent for has the time of the database, too.
func TestPlansWithoutRowsFollowTheClock(t *testing.T) {
	db, limits := ratelimittest.New(t), &ratelimit.Limiter{}
	db.Advance(time.Hour)
	granted, err := limits.Consume(t.Context(), db, ratelimit.Unlimited("calls").Key("ann"))
	if err != nil || !granted.At.Equal(db.Now()) {
		t.Errorf("at %v, %v, want %v", granted.At, err, db.Now())
	}
	denied, err := limits.Consume(t.Context(), db, ratelimit.TokenBucket("nothing", 0, time.Hour).Key("ann"))
	if !errors.Is(err, ratelimit.ErrDenied) || !denied.At.Equal(db.Now()) {
		t.Errorf("at %v, %v, want %v", denied.At, err, db.Now())
	}
}

func TestTheClockStaysInItsRange(t *testing.T) {
	db := ratelimittest.New(t)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	db.Set(time.Time{})
}

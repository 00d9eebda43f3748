package holds_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// onEveryPool runs a test on every kind of pool, and beside it on another pool of the same database.
func onEveryPool(t *testing.T, test func(t *testing.T, db ratelimit.DB, beside *pgxpool.Pool)) {
	t.Helper()
	on := func(name string, db func(t *testing.T, url string) ratelimit.DB) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := harness.NewMigrated(t)
			test(t, db(t, url), harness.Connect(t, url, 3))
		})
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		on("pool in mode "+mode.String(), func(t *testing.T, url string) ratelimit.DB {
			pool, err := harness.OpenPool(t.Context(), url, 2, mode)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			return pool
		})
	}
	on("a pool of one", func(t *testing.T, url string) ratelimit.DB { return harness.Connect(t, url, 1) })
	on("serializable by default", func(t *testing.T, url string) ratelimit.DB {
		return harness.Reconfigured(t, harness.Connect(t, url, 2), func(config *pgxpool.Config) {
			harness.StartWith(t, config.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
		})
	})
	on("Coalescer", func(t *testing.T, url string) ratelimit.DB {
		c := &ratelimit.Coalescer{Pool: harness.Connect(t, url, 2)}
		t.Cleanup(func() { harness.CloseCoalescer(t, c) })
		return c
	})
	for _, driver := range harness.Drivers {
		on(driver, func(t *testing.T, url string) ratelimit.DB { return ratelimit.SQL(harness.OpenSQL(t, driver, url, 3)) })
	}
}

// longerThan waits until a hold ends later than it did.
func longerThan(t *testing.T, pool *pgxpool.Pool, id string, end time.Time) {
	t.Helper()
	harness.Eventually(t, "the hold is extended", func() bool {
		return harness.Scan[bool](t, pool, "SELECT bool_and(until > '"+end.Format(time.RFC3339Nano)+"') FROM ratelimit.holds WHERE state = 'held' AND id = '"+id+"'")
	})
}

func TestDuringExtendsWhatItHolds(t *testing.T) {
	onEveryPool(t, func(t *testing.T, db ratelimit.DB, beside *pgxpool.Pool) {
		var limits, other ratelimit.Limiter
		slots, budget := ratelimit.Slots("slots", 1).Key("acme"), harness.Slow("budget", 100).Key("acme")
		const ttl = 6 * time.Second // so that a busy machine extends it in time
		ran := false
		err := limits.During(t.Context(), db, "job", ttl, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
			ran = true
			if held.Token == "" || held.Until.Before(held.At.Add(ttl)) {
				t.Errorf("%+v", held)
			}
			longerThan(t, beside, "job", held.Until)
			if _, err := other.Hold(t.Context(), beside, "another job", time.Minute, slots); !harness.Denied(err) {
				t.Errorf("beside it: %v", err)
			}
			return []ratelimit.Request{budget.Count(30)}, ctx.Err()
		}, slots, budget.Count(50))
		if err != nil || !ran {
			t.Fatal(err)
		}
		if got := harness.Lines(t, beside, "SELECT name, state FROM ratelimit.holds ORDER BY name"); got != "(budget,settled)\n(slots,settled)" {
			t.Error(got)
		}
		if got := harness.ReadBalance(t, &other, beside, slots); got != 1 {
			t.Errorf("%v slots are free", got)
		}
		if got := harness.ReadBalance(t, &other, beside, budget); got < 70 || got > 71 {
			t.Errorf("%v tokens are left", got)
		}
		err = limits.During(t.Context(), db, "job", ttl, nil, slots)
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("no function: %v", err)
		}
	})
}

// TestDuringEnds: what was used is charged in any case. The id is free again if the work was not done.
func TestDuringEnds(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var limits ratelimit.Limiter
	slots := ratelimit.Slots("slots", 1).Key("acme")
	mine := errors.New("mine")
	for name, row := range map[string]struct {
		used  []ratelimit.Request
		err   error
		ends  func() // instead of a return
		is    error
		left  float64
		again bool // the id is free
	}{
		"done":                  {left: 60},
		"done, with less":       {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme").Count(10)}, left: 90},
		"done, with more":       {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme").Count(90)}, left: 10},
		"done, with nothing":    {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme").Count(0)}, left: 100},
		"done, in two parts":    {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme").Count(10), harness.Slow("budget", 100).Key("acme").Count(5), slots}, left: 85},
		"failed":                {err: mine, is: mine, left: 60, again: true},
		"failed, with less":     {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme").Count(10)}, err: mine, is: mine, left: 90, again: true},
		"a panic":               {ends: func() { panic("mine") }, left: 60, again: true},
		"Goexit":                {ends: runtime.Goexit, left: 60, again: true},
		"used by another key":   {used: []ratelimit.Request{harness.Slow("budget", 100).Key("bob").Count(1)}, is: ratelimit.ErrInvalid, left: 60},
		"used of another limit": {used: []ratelimit.Request{harness.Slow("other", 100).Key("acme").Count(1)}, is: ratelimit.ErrInvalid, left: 60},
		"used without a count":  {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme")}, is: ratelimit.ErrInvalid, left: 60},
		"used, not a number":    {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme").Count(-1)}, is: ratelimit.ErrInvalid, left: 60},
		"used, no request":      {used: []ratelimit.Request{{}}, is: ratelimit.ErrInvalid, left: 60},
		"failed, and wrong":     {used: []ratelimit.Request{harness.Slow("budget", 100).Key("acme", "")}, err: mine, is: mine, left: 60, again: true},
	} {
		budget := harness.Slow("budget", 100).Key("acme").Count(15)
		var err error
		var recovered any
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { recovered = recover() }()
			err = limits.During(t.Context(), pool, name, time.Minute, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) {
				if row.ends != nil {
					row.ends()
				}
				return row.used, row.err
			}, slots, budget, budget.Count(25))
		}()
		<-done
		if (err != nil) != (row.is != nil) || row.is != nil && !errors.Is(err, row.is) || (recovered != nil) != (name == "a panic") {
			t.Errorf("%s: %v, want %v; a panic of %v", name, err, row.is, recovered)
		}
		if name == "failed, and wrong" && !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: %v does not say what is wrong", name, err)
		}
		if got := harness.ReadBalance(t, &limits, pool, budget); got < row.left || got > row.left+1 {
			t.Errorf("%s: %v tokens are left, want %v", name, got, row.left)
		}
		held, err := limits.Hold(t.Context(), pool, name, time.Minute, slots)
		var denial *ratelimit.DeniedError
		if row.again && err != nil || !row.again && (!errors.As(err, &denial) || denial.Reason != ratelimit.ReasonSettled) {
			t.Errorf("%s: the id again: %v", name, err)
		} else if row.again {
			err = harness.Second(limits.Release(t.Context(), pool, held.Token))
		}
		if row.again && err != nil {
			t.Error(err)
		}
		harness.MustExec(t, pool, "DELETE FROM ratelimit.limits WHERE name = 'budget'")
	}
}

// TestDuringRefuses: nothing is held, and nothing called.
func TestDuringRefuses(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var limits ratelimit.Limiter
	slots := ratelimit.Slots("slots", 1).Key("acme")
	during := func(ctx context.Context, db ratelimit.DB, ttl time.Duration, requests ...ratelimit.Request) error {
		return limits.During(ctx, db, "job", ttl, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) {
			t.Error("it was called")
			return nil, nil
		}, requests...)
	}
	db := harness.OpenSQL(t, "pgx", pool.Config().ConnString(), 2)
	onConn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = onConn.Close() })
	for name, row := range map[string]struct {
		db  ratelimit.DB
		ttl time.Duration
	}{
		"a transaction":              {beginAt(t, pool, pgx.ReadCommitted), time.Minute},
		"a connection":               {harness.Acquire(t, pool), time.Minute},
		"a connection of a sql.DB":   {ratelimit.SQL(onConn), time.Minute},
		"a sql.DB of one":            {ratelimit.SQL(harness.OpenSQL(t, "pgx", pool.Config().ConnString(), 1)), time.Minute},
		"no end":                     {pool, ratelimit.Forever},
		"a short ttl":                {pool, time.Millisecond},
		"no database":                {nil, time.Minute},
		"a Coalescer without a pool": {&ratelimit.Coalescer{}, time.Minute},
	} {
		if err := during(t.Context(), row.db, row.ttl, slots); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := during(t.Context(), pool, ratelimit.Forever, slots); err == nil || !strings.Contains(err.Error(), "would stay if the process dies") {
		t.Errorf("no end: %v", err)
	}
	if err := during(t.Context(), pool, time.Minute); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("no request: %v", err)
	}
	err = limits.InSQLTx(t.Context(), db, func(ctx context.Context, _ *sql.Tx) error { return during(ctx, ratelimit.SQL(db), time.Minute, slots) })
	if !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("in a transaction of the pool: %v", err)
	}
	// A context that ends before the call of the function releases.
	ctx, cancel := context.WithCancel(t.Context())
	limits.Observer = func(context.Context, ratelimit.Decision) { cancel() }
	if err := during(ctx, pool, time.Minute, slots, harness.Slow("budget", 100).Key("acme").Count(50)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if got := harness.Lines(t, pool, "SELECT * FROM ratelimit.holds"); got != "" {
		t.Error(got)
	}
	if got := harness.ReadBalance(t, new(ratelimit.Limiter), pool, harness.Slow("budget", 100).Key("acme")); got != 100 {
		t.Errorf("%v tokens are left", got)
	}
}

// stepped is a clock that can be stepped while others read it.
type stepped struct{ ahead atomic.Int64 }

func (s *stepped) Now() time.Time { return time.Now().Add(time.Duration(s.ahead.Load())) }

// TestDuringNoticesAClockThatSteps: all holds are over, and whoever asks takes the slot. The holder finds out at its next extension. What a lost hold used of
// tokens is charged, and its result is not taken for one.
func TestDuringNoticesAClockThatSteps(t *testing.T) {
	t.Parallel()
	for i, returns := range []error{nil, context.Canceled, nil, context.Canceled} {
		pool, id := harness.NewPool(t, 4), []string{"other", "job"}[i/2] // the same job may be delivered again
		var clock stepped
		limits, other := ratelimit.Limiter{Clock: clock.Now}, ratelimit.Limiter{Clock: clock.Now}
		slots, budget := ratelimit.Slots("slots", 1).Key("acme"), harness.Slow("budget", 100).Key("acme")
		const ttl = 6 * time.Second
		err := limits.During(t.Context(), pool, "job", ttl, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
			clock.ahead.Store(int64(time.Hour))
			if _, err := other.Hold(t.Context(), pool, id, time.Hour, slots, budget.Count(80)); err != nil {
				t.Errorf("once the clock has stepped: %v", err)
			}
			began := time.Now()
			<-ctx.Done()
			t.Logf("two had the slot for %v, with a ttl of %v", time.Since(began), ttl)
			if cause := context.Cause(ctx); !errors.Is(cause, ratelimit.ErrHoldLost) || !strings.Contains(cause.Error(), "slots") && !strings.Contains(cause.Error(), "budget") {
				t.Error(cause)
			}
			return []ratelimit.Request{budget.Count(10)}, returns
		}, slots, budget.Count(50))
		if !errors.Is(err, ratelimit.ErrHoldLost) || errors.Is(err, context.Canceled) != (returns != nil) {
			t.Error(err)
		}
		if got := harness.ReadBalance(t, &other, pool, budget); got < 10 || got > 20 {
			t.Errorf("%v tokens are left of 20 and what was refilled since, once 10 were charged", got)
		}
		if got := harness.Lines(t, pool, "SELECT id FROM ratelimit.holds WHERE name = 'slots'"); got != "("+id+")" {
			t.Error(got)
		}
	}
}

// TestDuringInsideADuringThatIsLost: the inner one has its own hold, and settles it.
func TestDuringInsideADuringThatIsLost(t *testing.T) {
	t.Parallel()
	pool, slots := harness.NewPool(t, 4), ratelimit.Slots("slots", 1).Key("acme")
	outer, lose := context.WithCancelCause(t.Context())
	harness.Succeeds(t, new(ratelimit.Limiter).During(outer, pool, "job", time.Minute, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) {
		lose(fmt.Errorf("%w: another limit", ratelimit.ErrHoldLost))
		return nil, nil
	}, slots))
	if got := harness.Lines(t, pool, "SELECT state FROM ratelimit.holds"); got != "(settled)" {
		t.Error(got)
	}
}

// TestDuringMaySettleInItsOwnTransaction: that is no loss, and it goes on for longer than the ttl.
func TestDuringMaySettleInItsOwnTransaction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var limits ratelimit.Limiter
	slots, budget := ratelimit.Slots("slots", 1).Key("acme"), harness.Slow("budget", 100).Key("acme")
	const ttl = 6 * time.Second
	err := limits.During(t.Context(), pool, "job", ttl, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
		err := limits.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limits.Settle(ctx, tx, held.Token, slots, budget.Count(20))
			return err
		})
		if err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			t.Error(context.Cause(ctx))
		case <-time.After(ttl + time.Second):
		}
		return []ratelimit.Request{budget.Count(90)}, nil
	}, slots, budget.Count(50))
	if err != nil {
		t.Error(err)
	}
	if got := harness.ReadBalance(t, &limits, pool, budget); got < 80 || got > 81 {
		t.Errorf("%v tokens are left", got)
	}
}

// TestDuringIsExtendedBesideALongTransaction: a transaction has locked a limit's row, and one of 1,000 holds. The others are extended, and that one is
// when the transaction ends.
func TestDuringIsExtendedBesideALongTransaction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	limits, slots := new(ratelimit.Limiter), ratelimit.Slots("slots", 2000)
	const ttl = 30 * time.Second
	holds := harness.Sized(1000, 200)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var running atomic.Int64
	var wait sync.WaitGroup
	errs := make(chan error, holds)
	for i := range holds {
		wait.Go(func() {
			errs <- limits.During(ctx, pool, fmt.Sprint("job ", i), ttl, func(own context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
				running.Add(1)
				select {
				case <-ctx.Done():
					return nil, nil
				case <-own.Done():
					return nil, context.Cause(own)
				}
			}, slots.Key(fmt.Sprint(i%50)))
		})
	}
	harness.Eventually(t, "all run", func() bool { return running.Load() == int64(holds) })
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.holds WHERE id = 'job 7' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	locked := harness.Scan[time.Time](t, pool, "SELECT clock_timestamp()")
	at := "'" + locked.Add(ttl).Format(time.RFC3339Nano) + "'"
	harness.Eventually(t, "all but one are extended", func() bool {
		return harness.Scan[int](t, pool, "SELECT count(*)::int FROM ratelimit.holds WHERE until > "+at) == holds-1
	})
	t.Logf("%d of %d holds were extended within %v", holds-1, holds, time.Since(locked))
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "that one is extended", func() bool {
		return harness.Scan[int](t, pool, "SELECT count(*)::int FROM ratelimit.holds WHERE until > "+at) == holds
	})
	stop()
	wait.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	slotsAreTheirHolds(t, pool)
}

// noRenewer waits until no goroutine extends holds.
func noRenewer(t *testing.T) {
	t.Helper()
	harness.Eventually(t, "no goroutine is left", func() bool {
		stacks := make([]byte, 1<<24)
		return !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "renewer).run")
	})
}

// TestDuringAndClose: Close waits for the work. One in haste ends it, and its hold is ended all the same.
func TestDuringAndClose(t *testing.T) {
	for _, haste := range []bool{false, true} {
		pool := harness.NewPool(t, 4)
		slots := ratelimit.Slots("slots", 1)
		limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{Program: "shop", Limits: []ratelimit.Limit{slots}})
		if err != nil {
			t.Fatal(err)
		}
		begun, finish, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		go func() {
			ended <- limits.During(t.Context(), pool, "job", time.Minute, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
				close(begun)
				select {
				case <-finish:
					return nil, ctx.Err()
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			}, slots.Key("acme"))
		}()
		<-begun
		ctx, cancel := context.WithCancel(t.Context())
		closed := make(chan error, 1)
		go func() { closed <- limits.Close(ctx) }()
		harness.Eventually(t, "it is closed", func() bool {
			_, err := limits.Hold(t.Context(), pool, "another", time.Minute, slots.Key("bob"))
			return errors.Is(err, ratelimit.ErrClosed)
		})
		select {
		case err := <-closed:
			t.Fatalf("it was closed before the work has ended: %v", err)
		default:
		}
		if haste {
			cancel()
			if err := <-closed; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			if err := <-ended; !errors.Is(err, ratelimit.ErrClosed) {
				t.Error(err)
			}
			if err := limits.Close(t.Context()); err != nil {
				t.Error(err)
			}
		} else {
			close(finish)
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if err := <-closed; err != nil {
				t.Error(err)
			}
		}
		cancel()
		if err := limits.During(t.Context(), pool, "late", time.Minute, nil, slots.Key("acme")); !errors.Is(err, ratelimit.ErrClosed) {
			t.Error(err)
		}
		if got := harness.Scan[int](t, pool, "SELECT count(*)::int FROM ratelimit.holds WHERE state = 'held'"); got > 1 { // that of bob
			t.Errorf("%d are held", got)
		}
		noRenewer(t)
	}
}

// TestDuringNeedsNoConnectionOfThePool: the work has all of them.
func TestDuringNeedsNoConnectionOfThePool(t *testing.T) {
	t.Parallel()
	url := harness.NewMigrated(t)
	pool, beside := harness.Connect(t, url, 1), harness.Connect(t, url, 2)
	err := new(ratelimit.Limiter).During(t.Context(), pool, "job", 6*time.Second, func(ctx context.Context, held ratelimit.Held) ([]ratelimit.Request, error) {
		return nil, pool.AcquireFunc(ctx, func(*pgxpool.Conn) error {
			longerThan(t, beside, "job", held.Until)
			return nil
		})
	}, ratelimit.Slots("slots", 1).Key("acme"))
	if err != nil {
		t.Error(err)
	}
}

// TestDuringExtensions: what the statement does with each state of a row.
func TestDuringExtensions(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 5)
	limits := &ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
	h := holder{t, limits, pool, nil}
	r := ratelimit.FixedWindow("window", 100, 1000*time.Hour).Key("k")
	h.hold("held", time.Minute, r)
	h.hold("longer", time.Hour, r)
	h.hold("locked", time.Minute, r)
	h.hold("another token", time.Minute, r)
	h.hold("lapsed", time.Minute, r)
	h.settle(h.hold("settled", time.Minute, r).Token, []float64{0}, r.Count(1))
	h.release(h.hold("released", time.Minute, r).Token)
	h.hold("endless", ratelimit.Forever, r)
	h.once(false, "once", r)
	harness.MustExec(t, pool, "UPDATE ratelimit.holds SET state = 'lapsed' WHERE id = 'lapsed'")
	tx := beginAt(t, pool, pgx.ReadCommitted)
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.holds WHERE id = 'locked' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.limits FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	ids := []string{"held", "longer", "locked", "another token", "lapsed", "settled", "released", "endless", "once"}
	const extend = `SELECT format('ended %s lost %s busy %s', e.ended, e.lost, e.busy) FROM (
		SELECT array_agg('window'::text) AS names, array_agg('k'::text) AS keys, array_agg(u.id ORDER BY u.n) AS ids, array_agg('5 minutes'::interval) AS ttls,
		       array_agg(CASE WHEN u.id = 'another token' THEN gen_random_uuid() ELSE coalesce(h.token, gen_random_uuid()) END ORDER BY u.n) AS tokens
		  FROM unnest($1::text[]) WITH ORDINALITY AS u (id, n) LEFT JOIN ratelimit.holds AS h ON h.id = u.id) AS a,
		LATERAL ratelimit._extend(a.names, a.keys, a.ids, a.tokens, a.ttls, '2026-07-01 12:02+00') AS e`
	if got := harness.Scan[string](t, pool, extend, ids); got != "ended {6} lost {4,5,7,8,9} busy {3}" {
		t.Error(got)
	}
	// An expired hold lives again, and a longer one is not shortened.
	if got := harness.Lines(t, pool, "SELECT id, to_char(until AT TIME ZONE 'UTC', 'HH24:MI') FROM ratelimit.holds WHERE id IN ('held', 'longer', 'locked', 'another token') ORDER BY id"); got !=
		"(\"another token\",12:01)\n(held,12:07)\n(locked,12:01)\n(longer,13:00)" {
		t.Error(got)
	}
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		var text string
		if err := beginAt(t, pool, level).QueryRow(t.Context(), extend, ids).Scan(&text); harness.SQLState(err) != "RL003" {
			t.Errorf("%s: %v", level, err)
		}
	}
	for _, args := range []string{
		"'{a,b}', '{k}', '{i}', '{00000000-0000-4000-8000-000000000001}', '{1 minute}'", "'{a}', '{k}', '{i}', '{00000000-0000-4000-8000-000000000001}', '{NULL}'",
		"'{a}', '{k}', '{i}', '{00000000-0000-4000-8000-000000000001}', '{99 milliseconds}'", "'{a}', '{k}', '{i}', '{00000000-0000-4000-8000-000000000001}', '{367 days}'",
		"'{a}', '{k}', '{i,j}', '{00000000-0000-4000-8000-000000000001}', '{1 minute}'", "'{a}', NULL, '{i}', '{00000000-0000-4000-8000-000000000001}', '{1 minute}'",
	} {
		var lost []int32
		if err := pool.QueryRow(t.Context(), "SELECT lost FROM ratelimit._extend("+args+")").Scan(&lost); harness.SQLState(err) != "22023" {
			t.Errorf("%s: %v, %v", args, lost, err)
		}
	}
}

// TestDuringRedelivered: of deliveries at once, one does the work. Once it is done, no other does.
func TestDuringRedelivered(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	var limits ratelimit.Limiter
	slots := ratelimit.Slots("slots", 5).Key("acme")
	var ran atomic.Int64
	deliver := func(fails bool) error {
		return limits.During(t.Context(), pool, "job", time.Minute, func(context.Context, ratelimit.Held) ([]ratelimit.Request, error) {
			ran.Add(1)
			if fails {
				return nil, errors.New("fails")
			}
			for range 100 { // the others come meanwhile
				if running := harness.Scan[int](t, pool, "SELECT count(*)::int FROM ratelimit.holds WHERE state = 'held'"); running != 1 {
					t.Errorf("%d run", running)
				}
			}
			return nil, nil
		}, slots)
	}
	for range 3 {
		if err := deliver(true); err == nil || err.Error() != "fails" {
			t.Fatal(err)
		}
	}
	var held, settled atomic.Int64
	var wait sync.WaitGroup
	for range 6 {
		wait.Go(func() {
			err := deliver(false)
			switch denial, is := errors.AsType[*ratelimit.DeniedError](err); {
			case err == nil:
			case is && denial.Reason == ratelimit.ReasonHeld:
				held.Add(1)
			case is && denial.Reason == ratelimit.ReasonSettled:
				settled.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if ran.Load() != 4 || held.Load()+settled.Load() != 5 {
		t.Errorf("it ran %d times; %d were held, %d settled", ran.Load(), held.Load(), settled.Load())
	}
	slotsAreTheirHolds(t, pool)
}

// TestWhatBreaksAtMostN makes the events of the table in docs/holds.md: a second worker has the only slot at once, and the first one's context
// ends with its next extension, or not at all.
func TestWhatBreaksAtMostN(t *testing.T) {
	t.Parallel()
	const ttl = 6 * time.Second
	for name, event := range map[string]struct {
		sql   string
		ahead time.Duration
		never bool              // the first worker is not told
		of    ratelimit.Request // the slot, or a budget of one token
	}{
		"a failover that lost the hold": {sql: "DELETE FROM ratelimit.holds; DELETE FROM ratelimit.limits"},
		"a clock that leaps ahead":      {ahead: time.Hour},
		"released by hand":              {sql: "SELECT ratelimit.release('slots', 'acme', 'job', reason => 'it hangs')"},
		"tokens are reset":              {sql: "SELECT ratelimit.reset('budget', 'acme')", of: harness.Slow("budget", 1).Key("acme")},
		"rows of ratelimit.limits lost": {sql: "DELETE FROM ratelimit.limits", never: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 4)
			slots := ratelimit.Slots("slots", 1).Key("acme")
			if event.of != (ratelimit.Request{}) {
				slots = event.of
			}
			var limits ratelimit.Limiter
			later := ratelimit.Limiter{Clock: func() time.Time { return time.Now().Add(event.ahead) }}
			err := limits.During(t.Context(), pool, "job", ttl, func(ctx context.Context, _ ratelimit.Held) ([]ratelimit.Request, error) {
				if _, err := later.Hold(t.Context(), pool, "another", time.Hour, slots); (event.ahead == 0) != harness.Denied(err) {
					t.Errorf("before: %v", err)
				}
				harness.MustExec(t, pool, event.sql)
				if _, err := later.Hold(t.Context(), pool, "another", time.Hour, slots); event.ahead == 0 && err != nil {
					t.Errorf("after: %v", err)
				}
				began := time.Now()
				select {
				case <-ctx.Done():
					t.Logf("two workers had one slot for %v of a ttl of %v", time.Since(began).Round(time.Millisecond), ttl)
				case <-time.After(ttl * 3 / 4):
				}
				if (ctx.Err() == nil) != event.never {
					t.Errorf("after %v: %v", time.Since(began), ctx.Err())
				}
				return nil, nil
			}, slots)
			if errors.Is(err, ratelimit.ErrHoldLost) != !event.never {
				t.Error(err)
			}
			_, err = limits.Hold(t.Context(), pool, "job", time.Hour, slots)
			if denial, is := errors.AsType[*ratelimit.DeniedError](err); is && (denial.Reason == ratelimit.ReasonSettled) != event.never {
				t.Errorf("tried again: %v", err)
			}
		})
	}
	for name, event := range map[string]struct {
		sql   string
		ahead time.Duration
	}{
		"a failover that lost the id": {sql: "DELETE FROM ratelimit.holds"},
		"a clock that leaps ahead":    {ahead: 2 * time.Hour},
	} {
		t.Run("once, "+name, func(t *testing.T) {
			t.Parallel()
			pool := harness.NewPool(t, 2)
			now := time.Now()
			limits, calls := ratelimit.Limiter{Clock: func() time.Time { return now }}, harness.Slow("calls", 10).Key("acme")
			for _, repeated := range []bool{false, true, false} {
				_, result, err := limits.Once(t.Context(), pool, "event", time.Hour, calls)
				if err != nil || result.Repeated != repeated {
					t.Errorf("%+v, %v, want repeated %v", result, err, repeated)
				}
				if repeated {
					harness.MustExec(t, pool, event.sql)
					now = now.Add(event.ahead)
				}
			}
		})
	}
}

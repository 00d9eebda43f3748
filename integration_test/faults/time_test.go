package faults_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

// stepped is a clock that can be stepped while it runs: it shows real time plus an offset.
type stepped struct {
	set    func(offset time.Duration) // makes the decisions use it
	offset time.Duration
	began  time.Time // start of the present offset, in real time
	high   time.Time // the latest time that it has shown before that
	steps  []step
}

// step records how far a step, and the time until the next one, have moved the latest time that the clock has shown.
type step struct {
	from, to time.Time // on the clock: the latest time shown before, and at the end
	begins   time.Time // what it showed first after the step
}

// to steps the clock.
func (c *stepped) to(offset time.Duration) {
	began := time.Now()
	c.set(offset)
	c.close(time.Now())
	c.offset, c.began = offset, began
}

// close records the latest time under the present offset. It may be called again.
func (c *stepped) close(now time.Time) {
	begins, to := c.began.Add(c.offset), now.Add(c.offset)
	c.steps = append(c.steps, step{from: c.high, to: to, begins: begins})
	if to.After(c.high) {
		c.high = to
	}
}

// bound returns how much a limit may have granted since the start: its capacity and the refill. Time that the clock has
// shown before refills nothing, and one leap refills at most the capacity.
func (c *stepped) bound(limit ratelimit.Limit) float64 {
	config := limit.Config()
	rate := *config.Rate
	period, _, err := calendar.ParsePeriod(config.Period)
	if err != nil {
		panic(err)
	}
	refill := func(from, to time.Time) float64 {
		switch {
		case !to.After(from):
			return 0
		case config.Kind == "fixed window":
			return rate * float64(windowOf(to, period)-windowOf(from, period))
		default:
			return rate * to.Sub(from).Seconds() / period.Seconds()
		}
	}
	total := limit.Capacity()
	for _, s := range c.steps {
		if s.begins.After(s.from) { // a leap
			total += min(refill(s.from, s.begins), limit.Capacity())
			s.from = s.begins
		}
		total += refill(s.from, s.to)
	}
	return total
}

// least returns the least that must have been granted if every step was followed by requests for everything.
func (c *stepped) least(limit ratelimit.Limit) (total float64) {
	for _, s := range c.steps {
		if s.begins.Sub(s.from) > time.Minute { // then the limit was full
			total += limit.Capacity() - 1 // a fraction of a token may be left
		}
	}
	return total
}

// windowOf returns the number of the window, on the grid through epoch.
func windowOf(t time.Time, period time.Duration) int64 {
	return int64(math.Floor(t.Sub(epoch).Seconds() / period.Seconds()))
}

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// TestTheClockSteps steps the clock by minutes, back and forth, and to the year 2100 and back, under load.
func TestTheClockSteps(t *testing.T) {
	t.Run("the limiter's", func(t *testing.T) {
		t.Parallel()
		var offset atomic.Int64
		limiter := &ratelimit.Limiter{Clock: func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }}
		stepClock(t, newDatabase(t), limiter, func(d time.Duration) { offset.Store(int64(d)) })
	})
	t.Run("the server's, by libfaketime", func(t *testing.T) {
		t.Parallel()
		url, set := fakedServer(t)
		stepClock(t, url, &ratelimit.Limiter{}, set)
	})
}

// fakedServer is a server whose clock can be stepped.
func fakedServer(t *testing.T) (url string, set func(offset time.Duration)) {
	t.Helper()
	libraries, _ := filepath.Glob("/usr/lib/*/faketime/libfaketime.so.1") // it fails only on a malformed pattern
	if len(libraries) == 0 {
		t.Skip("libfaketime is not installed (apt-get install libfaketime); the same was tested with the limiter's clock")
	}
	dir, err := os.MkdirTemp("", "txlimit-clock-") //nolint:usetesting // the server's user must be able to read it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // see above
		t.Fatal(err)
	}
	file := filepath.Join(dir, "offset")
	set = func(offset time.Duration) {
		// Renamed, so that the server never reads half of the file.
		if err := os.WriteFile(file+".new", fmt.Appendf(nil, "%+.6f\n", offset.Seconds()), 0o644); err != nil { //nolint:gosec // see above
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	set(0)
	s := newServer(t, postgres.BreakableConfig{
		Env: []string{
			"LD_PRELOAD=" + libraries[0], "FAKETIME_TIMESTAMP_FILE=" + file, "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1",
		},
		// libfaketime reads a file for the time. It must not do so in a handler of SIGALRM that interrupts such a read.
		// Postgres reads the time there. Without timeouts, there are no alarms.
		Settings: []string{"deadlock_timeout=1h", "autovacuum=off"},
	})
	return s.URL(), set
}

// consumer consumes one limit on one handle, as fast as possible.
type consumer struct {
	name    string
	limit   ratelimit.Limit
	consume func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error)

	granted, denied atomic.Int64
}

func consumers(t *testing.T, limiter *ratelimit.Limiter, pool *pgxpool.Pool) []*consumer {
	t.Helper()
	coalescer := &ratelimit.Coalescer{Pool: pool}
	t.Cleanup(func() { _ = coalescer.Close(context.WithoutCancel(t.Context())) })
	var all []*consumer
	for _, kind := range []string{"token bucket", "fixed window"} {
		add := func(name string, consume func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error)) {
			name = fmt.Sprintf("%s, %s", kind, name)
			limit := ratelimit.TokenBucket(name, 60, time.Minute, ratelimit.Capacity(5))
			if kind == "fixed window" {
				limit = ratelimit.FixedWindow(name, 5, 5*time.Second, ratelimit.Start(epoch))
			}
			all = append(all, &consumer{name: name, limit: limit, consume: consume})
		}
		add("pool", func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error) {
			return limiter.Consume(ctx, pool, request)
		})
		add("coalescer", func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error) {
			return limiter.Consume(ctx, coalescer, request)
		})
		inTx := func(options ...ratelimit.TxOption) func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error) {
			return func(ctx context.Context, request ratelimit.Request) (result ratelimit.Result, err error) {
				err = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
					result, err = limiter.Consume(ctx, tx, request)
					return err
				}, options...)
				return result, err
			}
		}
		add("InTx", inTx())
		add("InTx, READ COMMITTED", inTx(ratelimit.Isolation(pgx.ReadCommitted)))
		add("SendTx", func(ctx context.Context, request ratelimit.Request) (ratelimit.Result, error) {
			batch := &pgx.Batch{}
			result, err := limiter.QueueConsume(ctx, batch, request)
			if err == nil {
				err = limiter.SendTx(ctx, pool, batch)
			}
			if err != nil {
				return ratelimit.Result{}, err
			}
			return *result, nil
		})
	}
	return all
}

// once consumes a token and counts it. If it is denied, once returns the denial.
func (c *consumer) once(ctx context.Context, t *testing.T) *ratelimit.DeniedError {
	_, err := c.consume(ctx, c.limit.Global())
	var denial *ratelimit.DeniedError
	switch {
	case err == nil:
		c.granted.Add(1)
	case errors.As(err, &denial):
		c.denied.Add(1)
	default:
		t.Errorf("%s: %v", c.name, err)
	}
	return denial
}

func stepClock(t *testing.T, url string, limiter *ratelimit.Limiter, set func(offset time.Duration)) {
	r := newRand(t)
	pool := connect(t, url, 12)
	all := consumers(t, limiter, pool)
	now := time.Now()
	clock := &stepped{set: set, began: now, high: now}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for _, c := range all {
		for range 2 {
			wg.Go(func() {
				for ctx.Err() == nil {
					_ = c.once(context.WithoutCancel(ctx), t)
				}
			})
		}
	}
	year2100 := time.Until(time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC))
	offsets := []time.Duration{0, 5 * time.Minute, -3 * time.Minute, 10 * time.Minute, 9 * time.Minute}
	for range int(lasting(2, 100)) {
		offsets = append(offsets, time.Duration(r.Int64N(int64(40*time.Minute))-int64(20*time.Minute)))
	}
	for _, offset := range offsets {
		clock.to(offset)
		for _, c := range all { // the third denial began after the step
			before := c.denied.Load()
			eventually(t, c.name+" has nothing left", func() bool { return c.denied.Load() >= before+3 })
		}
	}
	cancel()
	wg.Wait()
	check := func() {
		t.Helper()
		clock.close(time.Now())
		var granted, denied, most float64
		for _, c := range all {
			n, bound := float64(c.granted.Load()), clock.bound(c.limit)
			granted, denied, most = granted+n, denied+float64(c.denied.Load()), most+bound
			if n > bound {
				t.Errorf("%s: %v tokens granted, at most %.1f were available", c.name, n, bound)
			}
			if least := clock.least(c.limit); n < least {
				t.Errorf("%s: %v tokens granted, want at least %v: it was locked out", c.name, n, least)
			}
		}
		t.Logf("%d steps; %v tokens granted on %d limits, at most %.0f were available; %v denials", len(clock.steps), granted, len(all), most, denied)
	}
	check()

	// While the clock is behind the latest time that it has shown, nothing is refilled. No caller waits longer than until
	// that time.
	behind := func(offset time.Duration) (latest time.Time) {
		t.Helper()
		clock.to(offset)
		for _, c := range all {
			var denial *ratelimit.DeniedError
			for range 20 {
				if denial = c.once(t.Context(), t); denial != nil {
					break
				}
			}
			if denial == nil {
				t.Fatalf("%s: 20 calls granted while the clock is behind", c.name)
			}
			if until := clock.high.Add(6 * time.Second); denial.RetryAt.After(until) {
				t.Errorf("%s: retry at %v, want at most %v", c.name, denial.RetryAt, until)
			}
			if denial.RetryAt.After(latest) {
				latest = denial.RetryAt
			}
		}
		return latest
	}
	latest := behind(-30 * time.Minute)
	clock.to(time.Until(latest))
	for _, c := range all {
		if denial := c.once(t.Context(), t); denial != nil {
			t.Errorf("%s: not granted at its RetryAt: %v", c.name, denial)
		}
	}
	check()

	// A key that was granted tokens in the year 2100 gets no refill until then, or until it is reset, as docs/incidents.md
	// says.
	clock.to(year2100)
	for _, c := range all {
		if denial := c.once(t.Context(), t); denial != nil {
			t.Errorf("%s: not granted in the year 2100: %v", c.name, denial)
		}
	}
	if latest := behind(0); latest.Year() != 2100 {
		t.Errorf("back from 2100, everything is refilled by %v", latest)
	}
	check()
	for _, c := range all {
		if err := limiter.Reset(t.Context(), pool, c.limit.Global()); err != nil {
			t.Fatal(err)
		}
		if denial := c.once(t.Context(), t); denial != nil {
			t.Errorf("%s: not granted after Reset: %v", c.name, denial)
		}
	}
}

// TestDaylightSaving consumes windows of 24 hours in sessions of many time zones, through days of 23, 24, 24 1/2 and 25
// hours. All sessions agree: a window is 24 hours from Start.
func TestDaylightSaving(t *testing.T) {
	t.Parallel()
	url := newDatabase(t)
	zones := []string{"UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia"}
	for _, start := range []time.Time{
		time.Date(2026, 3, 8, 5, 0, 0, 0, time.UTC),    // midnight in New York; the day has 23 hours
		time.Date(2026, 11, 1, 4, 0, 0, 0, time.UTC),   // midnight in New York; the day has 25 hours
		time.Date(2026, 4, 4, 13, 0, 0, 0, time.UTC),   // on Lord Howe Island; the day has 24 1/2 hours
		time.Date(2011, 12, 29, 10, 0, 0, 0, time.UTC), // in Apia; the next day does not exist
		time.Date(2100, 2, 28, 0, 0, 0, 0, time.UTC),   // that year has no 29 February
	} {
		t.Run(start.Format(time.DateOnly), func(t *testing.T) {
			t.Parallel()
			now := start.Add(-25 * time.Hour)
			limiter := &ratelimit.Limiter{Clock: func() time.Time { return now }}
			var pools []*pgxpool.Pool
			for _, zone := range zones {
				pools = append(pools, connect(t, url, 1, setting("TimeZone", zone)))
			}
			const rate = 7
			granted := map[int]int{}
			for ; now.Before(start.Add(73 * time.Hour)); now = now.Add(30 * time.Minute) {
				window := int(math.Floor(now.Sub(start).Hours() / 24))
				for i, pool := range pools {
					limit := ratelimit.FixedWindow("daily "+start.String(), rate, 24*time.Hour, ratelimit.Start(start))
					result, err := limiter.Consume(t.Context(), pool, limit.Global())
					if err == nil {
						granted[window]++
					} else if !errors.As(err, new(*ratelimit.DeniedError)) {
						t.Fatal(err)
					}
					ends := start.Add(time.Duration(window+1) * 24 * time.Hour)
					if status := result.Requests[0]; !status.ResetAt.Equal(ends) || err != nil && !result.RetryAt.Equal(ends) {
						t.Errorf("%v in %s: the window ends at %v, retry at %v, want %v", now, zones[i], status.ResetAt, result.RetryAt, ends)
					}
				}
			}
			for window := -2; window <= 3; window++ {
				if granted[window] != rate {
					t.Errorf("window %d: %d granted, want %d: %v", window, granted[window], rate, granted)
				}
			}
		})
	}
}

// TestATransactionIsOpenForLong before it consumes. The clock at that moment decides, not the start of the transaction.
func TestATransactionIsOpenForLong(t *testing.T) {
	t.Parallel()
	pool := connect(t, newServer(t, postgres.BreakableConfig{}).URL(), 8) // its own server: an open transaction disturbs other tests, as the last test here shows
	var limiter ratelimit.Limiter
	open := lasting(1500*time.Millisecond, 130*time.Second)
	try := func(level pgx.TxIsoLevel) error {
		limit := ratelimit.TokenBucket("open "+string(level), 10, open, ratelimit.Capacity(10))
		first, err := limiter.Consume(t.Context(), pool, limit.Global().Count(10)) // the limit is empty
		if err != nil {
			return err
		}
		err = pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
			var began time.Time
			if err := tx.QueryRow(t.Context(), "SELECT now()").Scan(&began); err != nil {
				return err
			}
			time.Sleep(open)
			result, err := limiter.Consume(t.Context(), tx, limit.Global().Count(10))
			if waited := result.At.Sub(began); err == nil && waited < open {
				err = fmt.Errorf("decided as of %v after the transaction began, want at least %v", waited, open)
			}
			return err // as of now(), nothing would be left
		})
		if err != nil {
			return err
		}
		after, err := limiter.Balance(t.Context(), pool, limit.Global())
		if err != nil {
			return err
		}
		refilled := 10 * after[0].At.Sub(first.At).Seconds() / open.Seconds()
		if left := after[0].Remaining; left > refilled-10+1e-6 {
			return fmt.Errorf("%v remain, %v were refilled and 10 taken", left, refilled)
		}
		t.Logf("%s: 20 tokens granted in %v, of 10 and 10 per %v", level, after[0].At.Sub(first.At).Round(time.Millisecond), open)
		return nil
	}
	var wg sync.WaitGroup
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		wg.Go(func() {
			if err := try(level); err != nil {
				t.Errorf("%s: %v", level, err)
			}
		})
	}
	wg.Wait()
}

// TestAStatementWaitsLongForALock of a transaction that consumes and stays open. When the statement gets the lock, it is
// granted no more than there is, and its wait does not delay later callers.
func TestAStatementWaitsLongForALock(t *testing.T) {
	t.Parallel()
	pool := connect(t, newServer(t, postgres.BreakableConfig{}).URL(), 100) // its own server, so that it disturbs no other test
	var limiter ratelimit.Limiter
	held := lasting(1500*time.Millisecond, 130*time.Second)
	try := func(c *consumer, commit bool) error {
		// A tenth of the capacity is refilled while the row is held.
		limit := ratelimit.TokenBucket(fmt.Sprint(c.name, commit), 2, held, ratelimit.Capacity(20))
		if c.limit.Config().Kind == "fixed window" {
			limit = ratelimit.FixedWindow(fmt.Sprint(c.name, commit), 2, held, ratelimit.Capacity(20), ratelimit.Start(epoch))
		}
		c.limit = limit
		first, err := limiter.Consume(t.Context(), pool, limit.Global())
		if err != nil {
			return err
		}
		holder, err := pool.Begin(t.Context())
		if err != nil {
			return err
		}
		defer holder.Rollback(t.Context())
		if _, err := limiter.Consume(t.Context(), holder, limit.Global().Count(15)); err != nil {
			return err
		}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for range 8 {
					_ = c.once(t.Context(), t)
				}
			})
		}
		time.Sleep(held)
		granted := 1
		if commit {
			granted += 15
			err = holder.Commit(t.Context())
		} else {
			err = holder.Rollback(t.Context())
		}
		wg.Wait()
		if err != nil {
			return err
		}
		granted += int(c.granted.Load())
		last, err := limiter.Check(t.Context(), pool, limit.Global().Count(1))
		if err != nil && !errors.Is(err, ratelimit.ErrDenied) {
			return err
		}
		clock := stepped{steps: []step{{from: first.At, begins: first.At, to: last.At}}}
		switch bound := clock.bound(limit); {
		case float64(granted) > bound:
			return fmt.Errorf("%d granted, at most %v were there", granted, bound)
		case granted < 20:
			return fmt.Errorf("%d granted, the capacity is 20", granted)
		case last.RetryAfter > held:
			return fmt.Errorf("the next token is there in %v, want at most %v", last.RetryAfter, held)
		default:
			t.Logf("%s, of one that is committed %v: %d granted, at most %.2f were there", c.name, commit, granted, bound)
			return nil
		}
	}
	var wg sync.WaitGroup
	for _, commit := range []bool{true, false} {
		for _, c := range consumers(t, &limiter, pool) {
			wg.Go(func() {
				if err := try(c, commit); err != nil {
					t.Errorf("%s, of one that is committed %v: %v", c.name, commit, err)
				}
			})
		}
	}
	wg.Wait()
}

// TestASerializableTransactionStaysOpen after it has written, perhaps to another table. Until it ends, Postgres can neither
// forget overlapping serializable transactions nor remove the old versions of their rows. When its memory for the former is
// full, it reports conflicts with them (CONCURRENCY.md). Then rows in use cannot be updated in SERIALIZABLE, however often
// a caller retries. The callers' errors give the reason. READ COMMITTED goes on, and so does SERIALIZABLE once that
// transaction has ended.
func TestASerializableTransactionStaysOpen(t *testing.T) {
	t.Parallel()
	const keys = 4
	pool := connect(t, newServer(t, postgres.BreakableConfig{Settings: []string{"max_connections=20"}}).URL(), keys+2)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("limit", 1e-9, time.Hour, ratelimit.Capacity(1e6))
	var granted atomic.Int64
	consume := func(key int, options ...ratelimit.TxOption) error {
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, limit.Key(fmt.Sprint(key)))
			return err
		}, options...)
		if err == nil {
			granted.Add(1)
		}
		return err
	}

	holder, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Rollback(context.WithoutCancel(t.Context()))
	if _, err := holder.Exec(t.Context(), "INSERT INTO orders VALUES ('an order', 'the one that stays open')"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var wg sync.WaitGroup
	for key := range keys {
		wg.Go(func() {
			for time.Since(began) < 30*time.Second {
				err := consume(key, ratelimit.Attempts(10))
				gaveUp := errors.Is(err, ratelimit.ErrAttemptsExhausted)
				switch {
				case gaveUp && strings.Contains(err.Error(), "old pivot"):
					return
				case err != nil && !gaveUp:
					t.Errorf("key %d: %v", key, err)
					return
				}
			}
			t.Errorf("key %d: no call was refused because of old conflicts within 30 s; has Postgres changed?", key)
		})
	}
	wg.Wait()
	t.Logf("after %d transactions, %v, no call can consume in SERIALIZABLE", granted.Load(), time.Since(began).Round(time.Millisecond))

	for key := range keys {
		if err := consume(key, ratelimit.Isolation(pgx.ReadCommitted)); err != nil {
			t.Errorf("key %d, READ COMMITTED: %v", key, err)
		}
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	for key := range keys {
		for range 10 {
			if err := consume(key); err != nil {
				t.Errorf("key %d, when it has ended: %v", key, err)
			}
		}
	}
	var taken float64
	for key := range keys {
		balances, err := limiter.Balance(t.Context(), pool, limit.Key(fmt.Sprint(key)))
		if err != nil {
			t.Fatal(err)
		}
		taken += balances[0].Used
	}
	if math.Round(taken) != float64(granted.Load()) {
		t.Errorf("%v tokens are gone, %d were granted", taken, granted.Load())
	}
}

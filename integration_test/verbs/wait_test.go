package verbs_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// waitingRoom is a limiter whose clock the test sets while callers wait. It stands at noon at first.
type waitingRoom struct {
	*testing.T
	limiter *ratelimit.Limiter

	mu    sync.Mutex
	now   time.Time
	asked map[*guest]int // how often each has looked at the clock
}

func newWaitingRoom(t *testing.T) *waitingRoom {
	r := &waitingRoom{T: t, now: harness.Noon, asked: map[*guest]int{}}
	r.limiter = &ratelimit.Limiter{Clock: func() time.Time { return r.tell(nil) }}
	return r
}

// tell returns the time to a guest.
func (r *waitingRoom) tell(g *guest) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked[g]++
	return r.now
}

func (r *waitingRoom) advance(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = r.now.Add(d)
	clear(r.asked)
}

// guest is a caller of Wait, whose call has been decided.
type guest struct {
	*waitingRoom
	wait     time.Duration      // that the test wants; negative: any
	decision ratelimit.Decision // known once it is done
	cancel   context.CancelFunc
	done     chan struct{} // closed when Wait has returned
	result   ratelimit.Result
	err      error
}

// enter calls Wait, and returns when its call has been decided.
func (r *waitingRoom) enter(db ratelimit.DB, request ratelimit.Request) *guest {
	return r.enterWith(r.Context(), db, request)
}

func (r *waitingRoom) enterWith(ctx context.Context, db ratelimit.DB, request ratelimit.Request) *guest {
	r.Helper()
	g := &guest{waitingRoom: r, wait: -1, done: make(chan struct{})}
	limiter := &ratelimit.Limiter{Clock: func() time.Time { return r.tell(g) }, Observer: func(_ context.Context, d ratelimit.Decision) {
		if d.Verb == "wait" {
			g.decision = d
		}
	}}
	ctx, g.cancel = context.WithCancel(ctx)
	r.Cleanup(g.cancel)
	go func() {
		defer close(g.done)
		g.result, g.err = limiter.Wait(ctx, db, request)
	}()
	for decided := false; !decided; time.Sleep(time.Millisecond) { // a call looks at the clock once, a sleep again
		r.mu.Lock()
		decided = r.asked[g] >= 2
		r.mu.Unlock()
		select {
		case <-g.done:
			decided = true
		default:
		}
	}
	return g
}

// waits wants a grant for d from now on, which is known when the guest is gone.
func (g *guest) waits(d time.Duration) *guest {
	g.wait = d
	select {
	case <-g.done:
		g.waited()
	default:
	}
	return g
}

// waited wants that the guest, who is gone, was to wait as long as the test wanted.
func (g *guest) waited() {
	g.Helper()
	if d := g.decision; g.wait >= 0 && (!d.Result.RetryAt.IsZero() || (d.Result.Requests[0].Delay-g.wait).Abs() > time.Microsecond) { // rounding
		g.Fatalf("%+v, want a wait of %v", d, g.wait)
	}
}

// runAt is when a call, whose guest is gone, has its tokens.
func (g *guest) runAt() time.Time {
	return g.decision.Result.At.Add(g.decision.Result.Requests[0].Delay)
}

// sleeps wants Wait to look at the clock, as it is now, and to sleep on.
func (g *guest) sleeps() {
	g.Helper()
	harness.Eventually(g, "the sleeper looks at the clock twice", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		select {
		case <-g.done:
			g.Fatalf("returned at %v: %+v, %v; want to wait", g.now, g.result, g.err)
		default:
		}
		return g.asked[g] >= 2
	})
}

// returns wants Wait to return with its tokens.
func (g *guest) returns() ratelimit.Result {
	g.Helper()
	select {
	case <-g.done:
	case <-time.After(harness.Patience):
		g.Fatal("the tokens are there, but Wait sleeps on")
	}
	if g.err != nil || !g.result.OK || g.result.Receipt() == "" {
		g.Fatalf("%+v, %v, want a grant", g.result, g.err)
	}
	g.waited()
	return g.result
}

// leaves cancels Wait and wants its context's error.
func (g *guest) leaves() {
	g.Helper()
	g.cancel()
	g.advance(0)
	for gone := false; !gone; time.Sleep(time.Millisecond) {
		select {
		case <-g.done:
			gone = true
		default:
			g.mu.Lock()
			asked := g.asked[g]
			g.mu.Unlock()
			if asked > 50 { // the refund asks once, however long it takes
				g.Fatal("Wait sleeps on")
			}
		}
	}
	if !errors.Is(g.err, context.Canceled) || g.result.OK {
		g.Fatalf("%+v, %v, want canceled", g.result, g.err)
	}
	g.waited()
}

// holds wants a balance now.
func (r *waitingRoom) holds(db ratelimit.DB, request ratelimit.Request, want float64) {
	r.Helper()
	if got := harness.ReadBalance(r, r.limiter, db, request); !harness.Near(got, want) {
		r.Fatalf("balance %v, want %v", got, want)
	}
}

// bare returns a handle as an application passes it, and whether it is a transaction.
func bare(db harness.Handle) (_ ratelimit.DB, isTx bool) {
	switch db := db.(type) {
	case pgx.Tx:
		return db, true
	case harness.SQLHandle:
		_, isTx := db.On.(*sql.Tx)
		return db.DB, isTx
	}
	return db, false
}

func TestWaitSleepsUntilTheTokensAreThere(t *testing.T) {
	harness.Behaviour(t, func(w harness.World) {
		limit := ratelimit.TokenBucket("third party", 10, time.Minute, ratelimit.Capacity(1))
		db, isTx := bare(w.DB)
		if isTx {
			before := w.Rows()
			result, err := w.Limiter.Wait(w.Context(), db, limit.Key("a"))
			if !errors.Is(err, ratelimit.ErrInvalid) || result.OK || w.Rows() != before {
				w.Fatalf("in a transaction: %+v, %v", result, err)
			}
			return
		}
		r := newWaitingRoom(w.T)
		r.enter(db, limit.Key("a")).waits(0).returns()
		g := r.enter(db, limit.Key("a")).waits(6 * time.Second)
		r.advance(6*time.Second - time.Microsecond)
		g.sleeps()
		r.advance(time.Microsecond)
		if result := g.returns(); !result.RetryAt.IsZero() || !g.runAt().Equal(r.now) {
			t.Fatalf("%+v", result)
		}
		r.holds(db, limit.Key("a"), 0)

		g = r.enter(db, limit.Key("a")).waits(6 * time.Second)
		g.leaves()
		r.holds(db, limit.Key("a"), 0)
	})
}

// TestTwentyWaitAtTwentyPerSecond makes callers wait by the database's clock.
func TestTwentyWaitAtTwentyPerSecond(t *testing.T) {
	t.Parallel()
	for _, on := range []string{"pool", "coalescer"} {
		t.Run(on, func(t *testing.T) {
			t.Parallel()
			pool, statements := harness.Traced(t, harness.NewPool(t, 1), 4, nil)
			db := ratelimit.DB(pool)
			if on == "coalescer" {
				c := &ratelimit.Coalescer{Pool: pool}
				t.Cleanup(func() { harness.CloseCoalescer(t, c) })
				db = c
			}
			limit := ratelimit.TokenBucket("third party", 20, time.Second, ratelimit.Capacity(1))
			runAt := make([]time.Time, 20)
			var wg sync.WaitGroup
			for i := range runAt {
				wg.Go(func() {
					var delay time.Duration
					limiter := ratelimit.Limiter{Observer: func(_ context.Context, d ratelimit.Decision) { delay = d.Result.Requests[0].Delay }}
					began := time.Now()
					result, err := limiter.Wait(t.Context(), db, limit.Global())
					if slept := time.Since(began); err != nil || slept < delay {
						t.Errorf("%+v, %v, after %v of %v", result, err, slept, delay)
					}
					runAt[i] = result.At.Add(delay)
				})
			}
			wg.Wait()
			if calls := statements.Count("ratelimit."); calls > 40 || on == "pool" && calls != 20 {
				t.Errorf("%d calls of the database", calls)
			}
			slices.SortFunc(runAt, time.Time.Compare)
			for i, first := range runAt {
				for j, later := range runAt[i+1:] {
					span := later.Sub(first) + time.Microsecond // they are rounded up
					if granted, promised := float64(j+2), 1+20*span.Seconds(); granted > promised {
						t.Fatalf("%v granted from %v to %v, %v promised", granted, first, later, promised)
					}
				}
			}
		})
	}
}

// waitHandles are the handles of one pool on which Wait is allowed.
func waitHandles(t *testing.T, pool *pgxpool.Pool) map[string]ratelimit.DB {
	c := &ratelimit.Coalescer{Pool: pool}
	t.Cleanup(func() { harness.CloseCoalescer(t, c) })
	return map[string]ratelimit.DB{"pool": pool, "coalescer": c}
}

// Callers wait in order of arrival.
func TestWaitServesInOrderOfArrival(t *testing.T) {
	t.Parallel()
	for on, db := range waitHandles(t, harness.NewPool(t, 2)) {
		r := newWaitingRoom(t)
		limit := ratelimit.TokenBucket("third party", 20, time.Second, ratelimit.Capacity(1))
		r.enter(db, limit.Key(on)).waits(0).returns()
		var guests []*guest
		for i := range 5 {
			guests = append(guests, r.enter(db, limit.Key(on)).waits(time.Duration(i+1)*50*time.Millisecond))
		}
		for i, g := range guests {
			r.advance(50 * time.Millisecond)
			g.returns()
			for _, later := range guests[i+1:] {
				later.sleeps()
			}
		}
	}
}

func TestFourWhoGiveUpCostTheNextOneNothing(t *testing.T) {
	t.Parallel()
	for on, db := range waitHandles(t, harness.NewPool(t, 2)) {
		for name, c := range map[string]struct {
			limit ratelimit.Limit
			first float64 // what another caller takes first
			leave []int   // in this order
		}{
			"in any order":   {ratelimit.TokenBucket("any", 20, time.Second), 20, harness.NewRand(t).Perm(4)},
			"the last first": {ratelimit.TokenBucket("last", 20, time.Second, ratelimit.Capacity(1)), 1, []int{3, 2, 1, 0}},
			"sharded":        {ratelimit.TokenBucket("sharded", 20, time.Second, ratelimit.Shards(4)), 20, harness.NewRand(t).Perm(4)},
			"a window":       {ratelimit.FixedWindow("window", 20, time.Second, ratelimit.Start(harness.Noon)), 20, harness.NewRand(t).Perm(4)},
			"a calendar":     {ratelimit.CalendarWindow("calendar", 20, ratelimit.Day), 20, harness.NewRand(t).Perm(4)},
		} {
			r := newWaitingRoom(t)
			request := c.limit.Key(on)
			r.enter(db, request.Count(c.first)).returns()
			alone := r.enter(db, request) // if no caller came before
			alone.leaves()
			var guests []*guest
			for range 4 {
				guests = append(guests, r.enter(db, request))
			}
			for _, i := range c.leave {
				guests[i].leaves()
			}
			g := r.enter(db, request)
			if g.leaves(); !g.runAt().Equal(alone.runAt()) {
				t.Errorf("%s, %s, %v: the next one waits until %v, want %v", on, name, c.leave, g.runAt(), alone.runAt())
			}
		}
	}
}

// A queue that fills by callers who come and leave is bounded, unless a deadline says how long a caller would wait.
func TestAQueueOfThoseWhoLeftIsBounded(t *testing.T) {
	t.Parallel()
	for on, db := range waitHandles(t, harness.NewPool(t, 2)) {
		for name, c := range map[string]struct {
			limit ratelimit.Limit
			each  time.Duration // that one who left costs
			bound time.Duration // without a deadline
		}{
			"a bucket":      {ratelimit.TokenBucket("bucket", 1, time.Minute, ratelimit.Capacity(1)), time.Minute, 10 * time.Minute},
			"a slow bucket": {ratelimit.TokenBucket("slow", 1, time.Hour, ratelimit.Capacity(1)), time.Hour, time.Hour},
			"a window":      {ratelimit.FixedWindow("window", 1, time.Minute, ratelimit.Start(harness.Noon)), time.Minute, 10 * time.Minute},
			"no capacity":   {ratelimit.TokenBucket("spaced", 1, time.Minute, ratelimit.Capacity(0)), time.Minute, 10 * time.Minute},
		} {
			r := newWaitingRoom(t)
			request := c.limit.Key(on)
			if name != "no capacity" {
				r.enter(db, request).waits(0).returns()
			}
			patient := lasting{t.Context(), 1000 * time.Hour}
			for left := c.each; left <= c.bound; left += c.each {
				r.enterWith(patient, db, request).waits(left)
			}
			if g := r.enter(db, request); !harness.Denied(g.decision.Err) || g.decision.Result.RetryAfter > c.each {
				t.Errorf("%s, %s: %+v, want a denial", on, name, g.decision)
			}
			r.enterWith(patient, db, request).waits(c.bound + c.each).leaves()
			back := c.each
			if name == "no capacity" { // which gets nothing back
				back *= 2
			}
			r.advance(back)
			r.enter(db, request).waits(c.bound).leaves()
		}
	}
}

// lasting is a context whose deadline is always the same time away.
type lasting struct {
	context.Context
	left time.Duration
}

func (l lasting) Deadline() (time.Time, bool) { return time.Now().Add(l.left), true }

func TestWaitRefusesAtOnceIfTheDeadlineIsTooEarly(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	hourly := ratelimit.TokenBucket("hourly", 1, time.Hour)
	for on, db := range waitHandles(t, pool) {
		for name, c := range map[string]struct {
			request ratelimit.Request
			waits   time.Duration // once the limits are empty
		}{
			"bucket":   {hourly.Key(on), time.Hour},
			"sharded":  {ratelimit.TokenBucket("sharded", 2, time.Hour, ratelimit.Shards(2)).Key(on).Count(2), time.Hour},
			"window":   {ratelimit.FixedWindow("window", 3, time.Hour, ratelimit.Start(harness.Noon)).Key(on).Count(3), time.Hour},
			"calendar": {ratelimit.CalendarWindow("calendar", 1, ratelimit.Day).Key(on), 12 * time.Hour},
			"spaced":   {ratelimit.TokenBucket("spaced", 1, time.Hour, ratelimit.Capacity(0)).Key(on), time.Hour},
		} {
			t.Run(on+", "+name, func(t *testing.T) {
				r := newWaitingRoom(t)
				if name != "spaced" { // it is always empty
					r.enter(db, c.request).waits(0).returns()
				}
				before := harness.TableOf(t, pool)
				short := lasting{t.Context(), c.waits / 2}
				g := r.enterWith(short, db, c.request)
				if !harness.Denied(g.decision.Err) {
					t.Fatalf("%+v", g.decision)
				}
				<-g.done
				var denial *ratelimit.DeniedError
				if !errors.As(g.err, &denial) || g.result.OK || len(harness.DeniedBy(g.result)) == 0 || harness.TableOf(t, pool) != before {
					t.Fatalf("%+v, %v", g.result, g.err)
				}
				if name == "spaced" {
					if !denial.RetryAt.IsZero() {
						t.Fatalf("%+v, want never", denial)
					}
					return
				}
				// The deadline is not exact to the microsecond.
				if late := denial.RetryAfter - c.waits/2; late < -time.Microsecond || late > 10*time.Minute {
					t.Fatalf("retry after %v, want %v", denial.RetryAfter, c.waits/2)
				}
				r.advance(c.waits/2 - 10*time.Minute)
				if g := r.enterWith(short, db, c.request); !harness.Denied(g.decision.Err) {
					t.Fatalf("early: %+v", g.decision)
				}
				r.advance(20 * time.Minute)
				g = r.enterWith(short, db, c.request).waits(c.waits/2 - 10*time.Minute)
				r.advance(c.waits/2 - 10*time.Minute + time.Microsecond)
				g.returns()
			})
		}
	}
}

// A call that would wait longer than maxReserved allows, or for more than the capacity, is refused at once.
func TestWaitKeepsTheLimitsBounds(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	for on, db := range waitHandles(t, pool) {
		r := newWaitingRoom(t)
		limit := ratelimit.TokenBucket("bounded", 1, time.Hour, ratelimit.Capacity(2), ratelimit.MaxReserved(1))
		r.enter(db, limit.Key(on).Count(2)).waits(0).returns()
		first := r.enter(db, limit.Key(on)).waits(time.Hour)
		for _, ctx := range []context.Context{t.Context(), lasting{t.Context(), 10 * time.Hour}} {
			if g := r.enterWith(ctx, db, limit.Key(on)); !harness.Denied(g.decision.Err) || g.decision.Result.RetryAfter != time.Hour {
				t.Errorf("more than may be reserved: %+v", g.decision)
			}
		}
		first.leaves()
		before := harness.TableOf(t, pool)
		for _, request := range []ratelimit.Request{
			limit.Key(on).Count(2.5),
			ratelimit.TokenBucket("owes", 1, time.Hour, ratelimit.Capacity(0), ratelimit.MaxReserved(1)).Key(on).Count(2),
		} {
			if g := r.enter(db, request); !errors.Is(g.decision.Err, ratelimit.ErrExceedsCapacity) {
				t.Errorf("%+v, want more than there can be", g.decision)
			}
		}
		if after := harness.TableOf(t, pool); after != before {
			t.Errorf("it wrote %s, before %s", after, before)
		}
		// This limit never has a token at once.
		spaced := ratelimit.TokenBucket("spaced", 1, time.Hour, ratelimit.Capacity(0)).Key(on).Count(2)
		g := r.enterWith(lasting{t.Context(), 3 * time.Hour}, db, spaced).waits(2 * time.Hour)
		r.advance(2 * time.Hour)
		g.returns()
	}
}

func TestWaitIsRefusedInATransaction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	limit := ratelimit.TokenBucket("third party", 1, time.Hour)
	refused := func(ctx context.Context, db ratelimit.DB) {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, 10*time.Minute) // a call that is not refused would sleep
		defer cancel()
		if result, err := new(ratelimit.Limiter).Wait(ctx, db, limit.Global()); !errors.Is(err, ratelimit.ErrInvalid) || errors.Is(err, ratelimit.ErrBadRequest) || result.OK ||
			!strings.Contains(err.Error(), "wait before it begins") {
			t.Errorf("%T: %+v, %v, want refused", db, result, err)
		}
	}
	sqlPool := harness.OpenSQL(t, "pgx", pool.Config().ConnString(), 2)
	conn := harness.Acquire(t, pool)
	harness.Succeeds(t, harness.Second(conn.Exec(t.Context(), "BEGIN")))
	refused(t.Context(), conn)
	harness.Succeeds(t, harness.Second(conn.Exec(t.Context(), "ROLLBACK")))
	var limiter ratelimit.Limiter
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		refused(ctx, tx)
		refused(ctx, pool)
		refused(ctx, &ratelimit.Coalescer{Pool: pool})
		return nil
	})
	err = errors.Join(err, limiter.InSQLTx(t.Context(), sqlPool, func(ctx context.Context, tx *sql.Tx) error {
		refused(ctx, ratelimit.SQL(tx))
		refused(ctx, ratelimit.SQL(sqlPool))
		return nil
	}))
	if rows := harness.TableOf(t, pool); err != nil || rows != "" {
		t.Fatalf("%v, %s", err, rows)
	}
	err = limiter.InTx(t.Context(), pool, func(ctx context.Context, _ pgx.Tx) error {
		return harness.Second(limiter.Wait(ratelimit.OutsideTx(ctx), pool, limit.Global()))
	})
	if err != nil || harness.Remaining(t, pool, limit.Global()) > 0.5 {
		t.Errorf("by OutsideTx: %v", err)
	}
}

// If the call itself took so long that the deadline is before the tokens, Wait does not sleep.
func TestWaitDoesNotSleepBeyondTheDeadline(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limit := ratelimit.TokenBucket("third party", 1, time.Hour)
	inVain, cancel := context.WithCancel(t.Context())
	ctx := &lasting{inVain, 2 * time.Hour}
	var verbs []string
	asked := 0
	limiter := ratelimit.Limiter{Clock: func() time.Time {
		if asked++; asked == 4 { // by each call, by the refund, and by a sleep
			cancel()
		}
		return harness.Noon
	}, Observer: func(_ context.Context, d ratelimit.Decision) { verbs = append(verbs, d.Verb) }}
	harness.Succeeds(t, harness.Second(limiter.Wait(ctx, pool, limit.Global())))
	ctx.left = 2 * time.Hour
	result, err := limiter.Wait(ctx, sentTo{pool, func() { ctx.left = time.Hour / 2 }}, limit.Global())
	cancel()
	if !errors.Is(err, context.DeadlineExceeded) || result.OK || result.Requests[0].Limit.Name() != limit.Name() {
		t.Fatalf("%+v, %v", result, err)
	}
	if want := []string{"wait", "refund", "wait"}; !slices.Equal(verbs, want) {
		t.Errorf("observed %v, want %v", verbs, want)
	}
	if left := harness.ReadBalance(t, &ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}, pool, limit.Global()); left != 0 {
		t.Errorf("%v are left, want 0", left)
	}
}

// sentTo is a handle that calls a function when a statement was sent.
type sentTo struct {
	ratelimit.DB
	sent func()
}

func (s sentTo) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	defer s.sent()
	return s.DB.QueryRow(ctx, sql, args...)
}

// The bound of a reservation does not limit the wait of such a call, so it shares no statement, and overtakes those that wait.
func TestAWaitThatNoFloorBoundsSkipsACoalescersQueue(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 6)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	defer harness.CloseCoalescer(t, coalescer)
	release := harness.HoldFlights(t, coalescer, pool)
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience) // in the queue, it would stay until then
	defer cancel()
	spaced := ratelimit.TokenBucket("spaced", 1, time.Hour, ratelimit.Capacity(0))
	if _, err := new(ratelimit.Limiter).Wait(lasting{ctx, time.Minute}, coalescer, spaced.Global()); !harness.Denied(err) {
		t.Errorf("%v, want a denial", err)
	}
}

func TestWaitTellsWhyItWasCanceled(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	limit := ratelimit.TokenBucket("third party", 1, time.Hour)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("the cause")
	asked := 0
	limiter := ratelimit.Limiter{Clock: func() time.Time {
		if asked++; asked == 3 { // by each call, and by the second one's sleep
			cancel(cause)
		}
		return harness.Noon
	}}
	for range 2 {
		_, err := limiter.Wait(ctx, pool, limit.Global())
		if canceled := ctx.Err() != nil; canceled != (errors.Is(err, context.Canceled) && errors.Is(err, cause)) {
			t.Errorf("canceled %v, %v", canceled, err)
		}
	}
}

func TestAWaitThatEndsAtTheDeadlineIsGranted(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	for i, c := range []struct {
		within  string
		granted bool
	}{{"0", true}, {"59 min 59.999999 s", false}, {"1 hour", true}, {"1 hour", false}, {"2 hours", true}} {
		var granted bool
		err := pool.QueryRow(t.Context(), `SELECT granted FROM ratelimit._apply('consume', '{hourly}', '{k}', '{1}', '{1 hour}', '{1}', ARRAY[$1::timestamptz],
			'{1}', '{1}', '{-Infinity}', '{0}', '{0}', reserve => true, now => $1, within => $2)`, harness.Noon, c.within).Scan(&granted)
		if err != nil || granted != c.granted {
			t.Errorf("call %d, within %s: granted %v, %v", i, c.within, granted, err)
		}
	}
}

func TestWaitGivesBackOnAContextOfItsOwn(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limit := ratelimit.TokenBucket("third party", 1, time.Hour)
	r := newWaitingRoom(t)
	spy := &refundSpy{DB: pool}
	r.enter(spy, limit.Global()).returns()
	r.enter(spy, limit.Global()).waits(time.Hour).leaves()
	r.holds(pool, limit.Global(), 0)
	if spy.refunds != 1 || spy.left <= 0 || spy.left > 5*time.Second {
		t.Errorf("%d refunds, with %v left", spy.refunds, spy.left)
	}
	// A serialization failure is retried. Any other error is returned to the caller.
	g := r.enter(spy, limit.Global()).waits(time.Hour)
	spy.fails = []error{&pgconn.PgError{Code: "40001"}}
	g.leaves()
	r.holds(pool, limit.Global(), 0)
	g = r.enter(spy, limit.Global()).waits(time.Hour)
	spy.fails = []error{errSpy}
	g.leaves()
	if !errors.Is(g.err, errSpy) {
		t.Errorf("%v, want the refund's error, too", g.err)
	}
	r.holds(pool, limit.Global(), -1)
}

// refundSpy notes how long the context of a refund lasts.
type refundSpy struct {
	ratelimit.DB
	refunds int
	left    time.Duration
	fails   []error
}

var errSpy = errors.New("the refund fails")

func (s *refundSpy) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if strings.Contains(sql, "ratelimit._wire_refund") {
		s.refunds++
		if deadline, ok := ctx.Deadline(); ok {
			s.left = time.Until(deadline)
		}
		if len(s.fails) > 0 {
			err := s.fails[0]
			s.fails = s.fails[1:]
			return failedRow{err}
		}
	}
	return s.DB.QueryRow(ctx, sql, args...)
}

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

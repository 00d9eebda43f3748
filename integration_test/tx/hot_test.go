package tx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
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

// nobodyQueues checks what must hold after every InTx has returned.
func nobodyQueues(t *testing.T, limiter *ratelimit.Limiter, pool *pgxpool.Pool) {
	t.Helper()
	if n := harness.Queued(limiter); n != 0 {
		t.Errorf("%d queues are left behind", n)
	}
	// A connection whose wait was cancelled is closed in the background.
	harness.Eventually(t, "all connections are back", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

// waitingForTurns returns how many transactions wait for a turn in the database.
func waitingForTurns(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND relation IN
		(SELECT oid FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relname LIKE 'turn\_%')`).Scan(&n)
	if err != nil {
		t.Error(err)
	}
	return n
}

// holdTurn takes the turn on hot limits, and returns when it has it. The returned function releases it.
func holdTurn(t *testing.T, limiter *ratelimit.Limiter, db harness.TxBeginner, requests ...ratelimit.Request) (release func()) {
	t.Helper()
	running, end := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- limiter.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
			if err := beginNow(ctx, tx); err != nil {
				return err
			}
			close(running)
			<-end
			return nil
		}, ratelimit.Hot(requests...))
	}()
	select {
	case <-running:
	case err := <-done:
		t.Errorf("could not get the turn: %v", err)
		return func() {}
	case <-time.After(harness.Patience):
		t.Error("could not get the turn")
	}
	return func() {
		t.Helper()
		close(end)
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// beginNow is a first statement. With it, InTx's transaction begins, and gets its turn in the database.
func beginNow(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "SELECT")
	return err
}

// nothing is a function for InTx that does nothing.
func nothing(context.Context, pgx.Tx) error { return nil }

// inLine is a context that tells when its caller begins to wait for its end. The caller is then in the queue.
type inLine struct {
	context.Context
	once  *sync.Once
	there chan struct{}
}

func (c inLine) Done() <-chan struct{} {
	c.once.Do(func() { close(c.there) })
	return c.Context.Done()
}

func TestHotTransactionsRunInOrderOfArrival(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("hot", 10, time.Hour)
	const n = 12
	var mu sync.Mutex
	var order []int
	release := holdTurn(t, &limiter, pool, limit.Global())
	var wg sync.WaitGroup
	for i := range n {
		ctx := inLine{t.Context(), new(sync.Once), make(chan struct{})}
		wg.Go(func() {
			err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				if err := beginNow(ctx, tx); err != nil {
					return err
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				if i < n-1 { // run until the next one is past the queue
					harness.Eventually(t, "the next one waits in the database", func() bool { return waitingForTurns(t, pool) == 1 })
				}
				return nil
			}, ratelimit.Hot(limit.Global()))
			if err != nil {
				t.Error(err)
			}
		})
		<-ctx.there
		if i == 0 {
			harness.Eventually(t, "the first waits in the database", func() bool { return waitingForTurns(t, pool) == 1 })
		}
	}
	if n := waitingForTurns(t, pool); n != 1 {
		t.Errorf("%d wait in the database, want one", n)
	}
	release()
	wg.Wait()
	if !slices.IsSorted(order) || len(order) != n {
		t.Errorf("they ran in the order %v", order)
	}
	nobodyQueues(t, &limiter, pool)
}

// With the queue, no transaction is run again but for the gap of a COMMIT (see conflicts). Without it, some are.
func TestHotTransactionsDoNotConflict(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	const goroutines, each = 16, 25
	harness.EveryBegunTx(t, goroutines, func(t *testing.T, w harness.TxWay) {
		limit := ratelimit.TokenBucket("hot", 1e6, time.Hour)
		run := func(processes []harness.TxWay, enough func(found *conflicts) bool, options ...ratelimit.TxOption) *conflicts {
			var found conflicts
			var wg sync.WaitGroup
			for _, process := range processes {
				process.Limiter.Clock, process.Limiter.OnRetry = func() time.Time { return harness.Noon }, found.onRetry(t)
				defer process.NobodyQueues(t)
				for range goroutines / len(processes) {
					wg.Go(func() {
						for i := 0; i < each && !enough(&found); i++ {
							err := process.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
								if _, err := process.Limiter.Consume(ctx, tx, limit.Key("k")); err != nil {
									return err
								}
								_, err := tx.Exec(ctx, "INSERT INTO jobs SELECT 1 + count(*) FROM jobs") // a transaction with an old snapshot fails
								return err
							}, append(options, ratelimit.Attempts(1000))...)
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			wg.Wait()
			return &found
		}
		one, two := []harness.TxWay{w}, []harness.TxWay{w, w.Another(t)}
		for _, row := range []struct {
			level     pgx.TxIsoLevel
			processes []harness.TxWay
		}{{pgx.ReadCommitted, two}, {pgx.RepeatableRead, two}, {pgx.Serializable, two}, {pgx.Serializable, one}} {
			t.Run(fmt.Sprintf("%s, %d processes", row.level, len(row.processes)), func(t *testing.T) {
				harness.MustExec(t, w.Pool, "TRUNCATE jobs")
				never := func(*conflicts) bool { return false }
				run(row.processes, never, ratelimit.Isolation(row.level), ratelimit.Hot(limit.Key("k"))).
					wantNone(t, row.level == pgx.Serializable && len(row.processes) > 1)
				if n := harness.Jobs(t, w.Pool, "count(*)"); n != goroutines*each {
					t.Errorf("%d rows", n)
				}
				if t.Failed() || row.level == pgx.ReadCommitted {
					return
				}
				some := func(found *conflicts) bool { return found.real.Load() > 0 }
				if !some(run(row.processes, some, ratelimit.Isolation(row.level))) {
					t.Error("without the queue there is no conflict either: this test cannot see one")
				}
			})
		}
	})
}

// conflicts counts why transactions on one hot limit were retried.
type conflicts struct {
	// In SERIALIZABLE, a COMMIT releases its locks just before it is marked as finished (ProcReleaseLocks, then
	// ReleasePredicateLocks, in PostgreSQL's resowner.c). A transaction that begins in that gap counts as concurrent. If
	// two transactions of one process stop there, those of other processes fail again and again, until one of the two goes
	// on. (A debugger that stops two there shows this.) So the test counts transactions, not attempts.
	gap  atomic.Int64
	real atomic.Int64
}

func (c *conflicts) onRetry(t *testing.T) func(ctx context.Context, attempt int, err error) {
	return func(_ context.Context, attempt int, failed error) {
		if pgErr := harness.PgError(t, failed); strings.Contains(pgErr.Detail, "Canceled on commit attempt with conflict in from prepared pivot") {
			if attempt == 1 {
				c.gap.Add(1)
			}
		} else if c.real.Add(1) <= 3 {
			t.Logf("attempt %d: %v: %s", attempt, failed, pgErr.Detail)
		}
	}
}

// wantNone wants no conflict. If transactions can meet the gap of a COMMIT, some may: how many depends on how long a busy
// machine lets a server process wait there (1 to 45 of 400 were seen at a load of 13).
func (c *conflicts) wantNone(t *testing.T, canMeet bool) {
	t.Helper()
	t.Logf("%d conflicts, and %d transactions met the gap of a COMMIT", c.real.Load(), c.gap.Load())
	if c.real.Load() > 0 || c.gap.Load() > 0 && !canMeet {
		t.Errorf("%d conflicts, and %d transactions met the gap of a COMMIT", c.real.Load(), c.gap.Load())
	}
}

func TestEveryTurnHasItsView(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	for n := range 32 {
		if _, err := tx.Exec(t.Context(), fmt.Sprintf("LOCK TABLE ratelimit.turn_%02d IN SHARE UPDATE EXCLUSIVE MODE", n)); err != nil {
			t.Fatal(err)
		}
	}
}

// At REPEATABLE READ, two transactions conflict if they take from one shard at the same time. In SERIALIZABLE they also
// conflict if one only reads the shard.
func TestAHotLimitsShardIsChosenWhenQueueing(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			harness.EveryBegunTx(t, 16, func(t *testing.T, w harness.TxWay) { hotShards(t, w, level) })
		})
	}
}

func hotShards(t *testing.T, w harness.TxWay, level pgx.TxIsoLevel) {
	const commits = 16 * 20
	w.Limiter.Clock = func() time.Time { return harness.Noon }
	limit := ratelimit.TokenBucket("hot", 1e6, time.Hour, ratelimit.Shards(5))
	if _, err := w.Limiter.Consume(t.Context(), w.Pool, limit.Key("k").Count(0)); err != nil {
		t.Fatal(err)
	}
	var attempts, together, most atomic.Int64
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 20 {
				err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
					attempts.Add(1)
					for now := together.Add(1); ; {
						if before := most.Load(); now <= before || most.CompareAndSwap(before, now) {
							break
						}
					}
					defer together.Add(-1)
					for range 2 { // of the same shard
						if _, err := w.Limiter.Consume(ctx, tx, limit.Key("k")); err != nil {
							return err
						}
					}
					return nil
				}, ratelimit.Isolation(level), ratelimit.Hot(limit.Key("k")))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	spare := int64(0)
	if level == pgx.Serializable {
		spare = commits / 20 // a row that moves to another page writes to the index, where keys share leaves
	}
	if n := attempts.Load(); n < commits || n > commits+spare {
		t.Errorf("%d attempts for %d commits", n, commits)
	}
	if n := most.Load(); n < 2 || n > 5 {
		t.Errorf("%d at the same time, want as many as there are shards", n)
	}
	var taken float64
	var used int
	err := w.Pool.QueryRow(t.Context(), `SELECT sum(1e6 / 5 - value), count(*) FILTER (WHERE value < 1e6 / 5) FROM ratelimit.limits`).Scan(&taken, &used)
	if err != nil || taken < 2*commits-1e-3 || taken > 2*commits+1e-3 || used != 5 {
		t.Errorf("%v tokens taken from %d shards, %v", taken, used, err)
	}
}

func TestWhatAHotShardLacksComesFromTheOthers(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	limiter := ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
	limit := ratelimit.TokenBucket("hot", 10, time.Hour, ratelimit.Shards(5))
	for i := range 11 {
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, limit.Key("k"))
			return err
		}, ratelimit.Hot(limit.Key("k")))
		if want := i == 10; harness.Denied(err) != want || err != nil != want {
			t.Errorf("token %d of 10: %v", i+1, err)
		}
	}
}

func TestHotEndsWithItsContext(t *testing.T) {
	t.Parallel()
	harness.EveryBegunTx(t, 4, func(t *testing.T, w harness.TxWay) {
		request := ratelimit.TokenBucket("hot", 10, time.Hour).Global()
		wait := func(n int) {
			t.Helper()
			harness.Eventually(t, fmt.Sprintf("%d wait in the database", n), func() bool { return waitingForTurns(t, w.Pool) == n })
		}
		job := func(ctx context.Context, tx harness.Handle) error {
			_, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (4)")
			return err
		}
		attempts := 0
		for name, run := range map[string]func(ctx context.Context, cancel func()) error{
			"before": func(ctx context.Context, cancel func()) error {
				cancel()
				return w.In(ctx, func(context.Context, harness.Handle) error { t.Error("called"); return nil }, ratelimit.Hot(request))
			},
			"in the queue": func(ctx context.Context, cancel func()) error {
				defer holdTurn(t, new(ratelimit.Limiter), w.Pool, request)() // of another process
				errs := make(chan error, 3)
				for range 3 { // the third waits in the process
					go func() { errs <- w.In(ctx, job, ratelimit.Hot(request)) }()
				}
				wait(2)
				cancel()
				return errors.Join(<-errs, <-errs, <-errs)
			},
			"in the queue again": func(ctx context.Context, cancel func()) error {
				held := make(chan func(), 1)
				err := w.In(ctx, func(ctx context.Context, tx harness.Handle) error {
					if err := job(ctx, tx); err != nil {
						return err
					}
					attempts++
					go func() { // between this attempt and the next
						held <- holdTurn(t, w.Limiter, w.Pool, request)
						wait(1)
						cancel()
					}()
					wait(1)
					_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
					return err
				}, ratelimit.Hot(request))
				(<-held)()
				if attempts != 1 || errors.Is(err, context.Canceled) && (!harness.GaveUpAfter(err, 2) || harness.SQLState(err) != "40001") {
					t.Errorf("%d attempts: %v", attempts, err)
				}
				return err
			},
			"while it runs": func(ctx context.Context, cancel func()) error {
				return w.In(ctx, func(ctx context.Context, tx harness.Handle) error {
					if _, err := w.Limiter.Consume(ctx, tx, request); err != nil {
						return err
					}
					cancel()
					return job(ctx, tx)
				}, ratelimit.Hot(request))
			},
			"before COMMIT": func(ctx context.Context, cancel func()) error {
				return w.In(ctx, func(ctx context.Context, tx harness.Handle) error {
					err := job(ctx, tx)
					cancel()
					for begin := time.Now(); w.InUse() > 0 && time.Since(begin) < time.Second/4; { // database/sql rolls it back by itself
						time.Sleep(time.Millisecond)
					}
					return err
				}, ratelimit.Hot(request))
			},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			err := run(ctx, cancel)
			if !errors.Is(err, context.Canceled) && harness.SQLState(err) != "57014" || errors.Is(err, ratelimit.ErrUnknownOutcome) {
				t.Errorf("%s: %v, want the context's error", name, err)
			}
			wait(0)
			w.NobodyQueues(t)
			holdTurn(t, w.Limiter, w.Pool, request)() // it is free again
		}
		if n := harness.Jobs(t, w.Pool, "count(*)"); n != 2 {
			t.Errorf("%d rows: something was committed", n)
		}
	})
}

func TestHotWorksOnAPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("hot", 1000, time.Hour)
	pool := harness.NewPool(t, 1)
	limiter := ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for range 10 {
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					_, err := limiter.Consume(ctx, tx, limit.Key("k"))
					return err
				}, ratelimit.Hot(limit.Key("k"), limit.Key(fmt.Sprint(g%2))))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	nobodyQueues(t, &limiter, pool)
	if left := harness.ReadBalance(t, &limiter, pool, limit.Key("k")); left != 840 {
		t.Errorf("%v remaining", left)
	}
}

// With a pool of 4, 64 goroutines that want one key leave connections for others. Without the queue they do not.
func TestAHotKeyDoesNotDrainThePool(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var conns []*pgxpool.Conn
	for range 4 { // so that no connection is opened later
		conn, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		conn.Release()
	}
	limit := ratelimit.TokenBucket("hot", 1e6, time.Hour)
	var limiter ratelimit.Limiter
	waited := func(options ...ratelimit.TxOption) (queries int64, worst time.Duration) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for ctx.Err() == nil {
					err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						_, err := limiter.Consume(ctx, tx, limit.Key("k"))
						time.Sleep(2 * time.Millisecond)
						return err
					}, append(options, ratelimit.Isolation(pgx.ReadCommitted))...)
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		time.Sleep(200 * time.Millisecond)
		before := pool.Stat().EmptyAcquireCount()
		for range 20 {
			begin := time.Now()
			if _, err := pool.Exec(t.Context(), "SELECT 1"); err != nil {
				t.Error(err)
			}
			worst = max(worst, time.Since(begin))
			time.Sleep(10 * time.Millisecond)
		}
		queries = pool.Stat().EmptyAcquireCount() - before
		cancel()
		wg.Wait()
		nobodyQueues(t, &limiter, pool)
		return queries, worst
	}
	n, worst := waited(ratelimit.Hot(limit.Key("k")))
	t.Logf("with the queue, %d acquisitions waited for a connection, a query took %v at the worst", n, worst)
	if n != 0 {
		t.Errorf("%d acquisitions had to wait for a connection", n)
	}
	n, worst = waited()
	t.Logf("without, %d and %v", n, worst)
	if n == 0 {
		t.Error("nothing waited without the queue: this test cannot see it")
	}
}

func TestSeveralHotLimitsInAnyOrderNeverDeadlock(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 8)
	other := harness.Connect(t, pool.Config().ConnString(), 8)
	r := harness.NewRand(t)
	limits := make([]ratelimit.Limit, 5)
	for i := range limits {
		limits[i] = ratelimit.TokenBucket(fmt.Sprintf("limit %d", i), 1e6, time.Hour, ratelimit.Shards(1+2*(i%2)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	var limiters [2]ratelimit.Limiter
	var attempts atomic.Int64
	var wg sync.WaitGroup
	for g := range 24 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		limiter, pool := &limiters[g%2], []*pgxpool.Pool{pool, other}[g%2]
		wg.Go(func() {
			for range 25 {
				var requests []ratelimit.Request
				for _, i := range r.Perm(len(limits))[:1+r.IntN(3)] {
					requests = append(requests, limits[i].Key(fmt.Sprint(r.IntN(2))))
				}
				err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
					attempts.Add(1)
					for _, request := range requests { // one after another, in any order: the turns prevent deadlocks
						if _, err := limiter.Consume(ctx, tx, request); err != nil {
							return err
						}
					}
					return nil
				}, ratelimit.Isolation(pgx.RepeatableRead), ratelimit.Hot(requests...))
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d attempts for %d commits", attempts.Load(), 24*25)
	nobodyQueues(t, &limiters[0], pool)
	nobodyQueues(t, &limiters[1], other)
}

func TestHotInHotIsRefused(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	var limiter ratelimit.Limiter
	a, b := ratelimit.TokenBucket("a", 10, time.Hour), ratelimit.TokenBucket("b", 10, time.Hour)
	for _, inner := range []ratelimit.Limit{a, b} {
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, _ pgx.Tx) error {
			return limiter.InTx(ratelimit.OutsideTx(ctx), pool, func(context.Context, pgx.Tx) error { t.Error("called"); return nil }, ratelimit.Hot(inner.Global()))
		}, ratelimit.Hot(a.Global()))
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%v", err)
		}
	}
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, _ pgx.Tx) error {
		return limiter.InTx(ratelimit.OutsideTx(ctx), pool, nothing) // it is not hot
	}, ratelimit.Hot(a.Global()))
	if err != nil {
		t.Error(err)
	}
	nobodyQueues(t, &limiter, pool)
}

func TestHotSaysWhatTheRoleLacks(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("hot", 10, time.Hour)
	var limiter ratelimit.Limiter
	pool := harness.NewPool(t, 2)
	try := func(conn *pgx.Conn, want string) {
		t.Helper()
		err := limiter.InTx(t.Context(), conn, nothing, ratelimit.Hot(limit.Global()))
		if harness.SQLState(err) != want || want != "" && !strings.Contains(err.Error(), "ratelimit.turn_00 to _31") {
			t.Errorf("%v, want %q", err, want)
		}
		if status := conn.PgConn().TxStatus(); status != 'I' {
			t.Errorf("the connection is left in transaction status %q", status)
		}
		if n := harness.Queued(&limiter); n != 0 {
			t.Errorf("%d queues are left behind", n)
		}
	}
	conn := harness.NewRole(t, pool, true, "SELECT", "INSERT", "UPDATE", "DELETE")
	try(conn, "42501")
	var role string
	if err := conn.QueryRow(t.Context(), "SELECT current_user").Scan(&role); err != nil {
		t.Fatal(err)
	}
	for n := range 32 {
		if _, err := pool.Exec(t.Context(), fmt.Sprintf("GRANT UPDATE ON ratelimit.turn_%02d TO %s", n, role)); err != nil {
			t.Fatal(err)
		}
	}
	try(conn, "") // UPDATE is enough
	try(harness.Acquire(t, harness.Connect(t, harness.NewDatabase(t), 1)), "3F000")
}

// A lock_timeout or a statement_timeout of the caller ends a wait in the database.
func TestHotPassesOnATimeoutOfTheDatabase(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("hot", 10, time.Hour)
	pool := harness.NewPool(t, 2)
	var holder, limiter ratelimit.Limiter // two processes
	conns := harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
		c.MaxConns = 1
		harness.StartWith(t, c.ConnConfig, map[string]string{"lock_timeout": "50ms"})
	})
	release := holdTurn(t, &holder, pool, limit.Global())
	for _, db := range []string{"pool", "pool's connection", "connection"} {
		t.Run(db, func(t *testing.T) {
			begin := func(attempt func(db harness.TxBeginner)) {
				if db == "pool" {
					attempt(conns)
					return
				}
				conn, err := conns.Acquire(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Release()
				if db == "connection" {
					attempt(conn.Conn())
				} else {
					attempt(conn)
				}
				if status := conn.Conn().PgConn().TxStatus(); status != 'I' {
					t.Errorf("the connection is left in transaction status %q", status)
				}
			}
			begin(func(db harness.TxBeginner) {
				err := limiter.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
					if db != conns {
						t.Error("called")
					}
					if _, err := limiter.Consume(ctx, tx, limit.Global()); harness.SQLState(err) != "55P03" {
						t.Errorf("Consume: %v, want 55P03", err)
					}
					return nil
				}, ratelimit.Hot(limit.Global()))
				if harness.SQLState(err) != "55P03" {
					t.Errorf("%v, want 55P03", err)
				}
			})
			if _, err := conns.Exec(t.Context(), "CREATE TEMP TABLE usable (); DROP TABLE usable"); err != nil {
				t.Errorf("the connection is not usable: %v", err)
			}
			nobodyQueues(t, &limiter, conns)
		})
	}
	release()
	if err := limiter.InTx(t.Context(), conns, nothing, ratelimit.Hot(limit.Global())); err != nil {
		t.Error(err)
	}
}

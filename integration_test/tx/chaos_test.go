package tx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// Calls are cancelled, run into timeouts, panic and lose their connections at random, while the goroutines of two processes queue. A
// transaction is an order: its row and its tokens, all or nothing, never twice. One that was acknowledged is there. One that failed is not,
// unless it was COMMIT, with ErrUnknownOutcome. The test is not parallel: it counts goroutines.
func TestTransactionsInChaos(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	t.Run("at once", func(t *testing.T) { harness.EveryBegunTx(t, 6, chaosOfOrders) })
	harness.Eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= goroutines })
}

func chaosOfOrders(t *testing.T, w harness.TxWay) {
	r := harness.NewRand(t)
	const capacity = 1e6
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("one", capacity, time.Hour),
		ratelimit.FixedWindow("two", capacity, time.Hour),
		ratelimit.TokenBucket("wide", capacity, time.Hour, ratelimit.Shards(4)),
	}
	harness.MustExec(t, w.Pool, "CREATE TABLE orders (id text, one int, two int, wide int)")
	processes := [2]harness.TxWay{w, w.Another(t)}
	for _, process := range processes {
		process.Limiter.Clock = func() time.Time { return harness.Noon }
	}

	const acknowledged, unknown = "acknowledged", "unknown"
	type end struct {
		what string
		err  error
	}
	var mu sync.Mutex
	ends, times := map[string]end{}, map[string]int{} // of each order, and how often each end was
	errAbandoned := errors.New("abandoned")
	work := func(r *rand.Rand, id string, process harness.TxWay, session *atomic.Int64) {
		var requests []ratelimit.Request
		taken := map[string]int{}
		for _, i := range r.Perm(len(limits))[:1+r.IntN(2)] {
			taken[limits[i].Name()] = 1 + r.IntN(3)
			requests = append(requests, limits[i].Global().Count(float64(taken[limits[i].Name()])))
		}
		options := []ratelimit.TxOption{ratelimit.Isolation(harness.OneOf(r, harness.Levels...))}
		if r.IntN(4) > 0 {
			options = append(options, ratelimit.Hot(requests...))
		}
		how, when, pause := r.IntN(8), r.IntN(3), time.Duration(r.IntN(2_000_000))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if r.IntN(2) == 0 { // in the queue, next in line, or running
			ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(60_000_000)))
			defer cancel()
		}
		at := func(step int) error {
			if step != when {
				return nil
			}
			switch how {
			case 0:
				cancel()
			case 1:
				panic(errAbandoned)
			case 2:
				runtime.Goexit()
			case 3:
				return errAbandoned
			case 4:
				time.Sleep(pause)
			}
			return nil
		}
		var err error
		what := "Goexit"
		finished := make(chan struct{})
		go func() {
			defer close(finished)
			defer func() {
				if p := recover(); p != nil {
					what = "panic"
				}
			}()
			err = process.In(ctx, func(ctx context.Context, tx harness.Handle) error {
				if err := at(0); err != nil {
					return err
				}
				if _, err := process.Limiter.Consume(ctx, tx, requests...); err != nil {
					return err
				}
				if err := at(1); err != nil {
					return err
				}
				var pid int64
				err := tx.QueryRow(ctx, "INSERT INTO orders VALUES ($1, $2, $3, $4) RETURNING pg_backend_pid()", id, taken["one"], taken["two"], taken["wide"]).Scan(&pid)
				if err != nil {
					return err
				}
				session.Store(pid)
				return at(2)
			}, options...)
			switch {
			case err == nil:
				what = acknowledged
			case errors.Is(err, ratelimit.ErrUnknownOutcome) && strings.HasPrefix(err.Error(), "ratelimit: commit: "): // not of a statement before
				what = unknown
			case errors.Is(err, errAbandoned):
				what = "abandoned"
			case errors.Is(err, ratelimit.ErrAttemptsExhausted):
				what = "gave up"
			case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), harness.SQLState(err) == "57014": // lib/pq returns the server's error for a canceled statement
				what = "context"
			default: // 57P01, or what the driver makes of it
				what = "connection"
			}
		}()
		<-finished
		mu.Lock()
		defer mu.Unlock()
		ends[id] = end{what, err}
		times[what]++
	}

	missing := func() []string {
		mu.Lock()
		defer mu.Unlock()
		wanted := []string{acknowledged, "context", "panic", "Goexit", "abandoned", "connection"}
		return slices.DeleteFunc(wanted, func(what string) bool { return times[what] > 0 })
	}
	begin := time.Now()
	goesOn := func() bool {
		since := time.Since(begin)
		return since < *harness.Chaos || since < *harness.Chaos+time.Minute && len(missing()) > 0
	}
	var wg sync.WaitGroup
	var sessions [24]atomic.Int64 // that the goroutines have had last
	for g := range sessions {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for i := 0; goesOn(); i++ {
				work(r, fmt.Sprintf("%d.%d", g, i), processes[g%2], &sessions[g])
			}
		})
	}
	killed := 0
	wg.Go(func() {
		for goesOn() {
			time.Sleep(time.Duration(r.IntN(50_000_000)))
			var was bool
			err := w.Pool.QueryRow(t.Context(), "SELECT pg_terminate_backend($1)", sessions[r.IntN(len(sessions))].Load()).Scan(&was)
			// PgBouncer may give this query the connection that it terminates (57P01), or that the last one has terminated (08P01).
			if state := harness.SQLState(err); err != nil && !(harness.Server.Pooled() && (state == "57P01" || state == "08P01")) {
				t.Error(err)
			}
			if was {
				killed++
			}
		}
	})
	wg.Wait()
	t.Logf("%v; %d connections killed", times, killed)
	for _, what := range missing() {
		t.Errorf("it never happened: %s", what)
	}

	for _, process := range processes {
		for _, limit := range limits { // the turns are free again
			holdTurn(t, process.Limiter, w.Pool, limit.Global())()
		}
		process.NobodyQueues(t)
	}
	harness.Eventually(t, "no transaction is open", func() bool {
		return !harness.Scan[bool](t, w.Pool, "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'orders'::regclass AND pid <> pg_backend_pid())")
	})
	rows := harness.Scan[map[string]int](t, w.Pool, "SELECT coalesce(json_object_agg(id, n), '{}') FROM (SELECT id, count(*) AS n FROM orders GROUP BY id) AS o")
	for id, end := range ends {
		if n := rows[id]; n > 1 || n == 0 && end.what == acknowledged || n == 1 && end.what != acknowledged && end.what != unknown {
			t.Errorf("order %s has %d rows: %s, %v", id, n, end.what, end.err)
		}
	}
	for _, limit := range limits {
		took := harness.Scan[float64](t, w.Pool, "SELECT coalesce(sum("+limit.Name()+"), 0)::float8 FROM orders")
		if left := harness.ReadBalance(t, w.Limiter, w.Pool, limit.Global()); !harness.Near(left, capacity-took) {
			t.Errorf("%s: %v tokens are left, the orders took %v of %v", limit.Name(), left, took, capacity)
		}
	}
}

package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// TestHotLimitsInChaos cancels calls, runs into timeouts and kills connections at random, while the goroutines of two
// processes queue. Then it counts. A transaction is an order: its tokens and its row, all or nothing. The row of every
// acknowledged order must be there. The test is not parallel: it counts goroutines.
func TestHotLimitsInChaos(t *testing.T) {
	r := newRand(t)
	const capacity = 1e6
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("one", capacity, time.Hour),
		ratelimit.TokenBucket("two", capacity, time.Hour),
		ratelimit.TokenBucket("wide", capacity, time.Hour, ratelimit.Shards(4)),
	}
	watch := newPool(t, 2)
	if _, err := watch.Exec(t.Context(), "CREATE TABLE orders (id text PRIMARY KEY, one int, two int, wide int)"); err != nil {
		t.Fatal(err)
	}
	goroutines := runtime.NumGoroutine()

	url := watch.Config().ConnString() + "&application_name=txlimit_chaos"
	var pools [2]*pgxpool.Pool
	for i := range pools {
		config, err := pgxpool.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		config.MaxConns = 6
		if pools[i], err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
			t.Fatal(err)
		}
	}
	limiters := [2]ratelimit.Limiter{{Clock: func() time.Time { return noon }}, {Clock: func() time.Time { return noon }}}

	var mu sync.Mutex
	acknowledged, unknown, outcomes := map[string]bool{}, map[string]bool{}, map[string]int{}
	errAbandoned := errors.New("abandoned")
	work := func(r *rand.Rand, id string, limiter *ratelimit.Limiter, pool *pgxpool.Pool) {
		var requests []ratelimit.Request
		taken := map[string]int{"one": 0, "two": 0, "wide": 0}
		for _, i := range r.Perm(len(limits))[:1+r.IntN(2)] {
			taken[limits[i].Name()] = 1 + r.IntN(3)
			requests = append(requests, limits[i].Global().Count(float64(taken[limits[i].Name()])))
		}
		level, end, endAt, pause := oneOf(r, levels...), r.IntN(8), r.IntN(3), time.Duration(r.IntN(2_000_000))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if r.IntN(2) == 0 { // in the queue, next in line, or running
			ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(60_000_000)))
			defer cancel()
		}
		at := func(step int) error {
			if step != endAt {
				return nil
			}
			switch end {
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
		outcome, sure := "goexit", true
		finished := make(chan struct{})
		go func() {
			defer close(finished)
			defer func() {
				if p := recover(); p != nil {
					outcome = "panic"
				}
			}()
			err := limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				if err := at(0); err != nil {
					return err
				}
				if _, err := limiter.Consume(ctx, tx, requests...); err != nil {
					return err
				}
				if err := at(1); err != nil {
					return err
				}
				if _, err := tx.Exec(ctx, "INSERT INTO orders VALUES ($1, $2, $3, $4)", id, taken["one"], taken["two"], taken["wide"]); err != nil {
					return err
				}
				return at(2)
			}, ratelimit.Hot(requests...), ratelimit.Isolation(level))
			switch {
			case err == nil:
				outcome = "committed"
			case errors.Is(err, errAbandoned):
				outcome = "abandoned"
			case errors.Is(err, ratelimit.ErrAttemptsExhausted):
				outcome = "gave up"
			case strings.HasPrefix(err.Error(), "ratelimit: commit: "):
				outcome, sure = "unknown: COMMIT", false
			case sqlState(err) != "":
				outcome = "SQLSTATE " + sqlState(err)
			case ctx.Err() != nil:
				outcome = "context"
			default:
				outcome = "connection"
			}
		}()
		<-finished
		mu.Lock()
		defer mu.Unlock()
		outcomes[outcome]++
		acknowledged[id], unknown[id] = outcome == "committed", !sure
	}

	wanted := []string{"committed", "context", "panic", "goexit", "abandoned", "SQLSTATE 57P01"}
	missing := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.DeleteFunc(slices.Clone(wanted), func(outcome string) bool { return outcomes[outcome] > 0 })
	}
	begin := time.Now()
	goesOn := func() bool {
		since := time.Since(begin)
		return since < *chaos || since < *chaos+time.Minute && len(missing()) > 0
	}
	var wg sync.WaitGroup
	for g := range 24 {
		r := rand.New(rand.NewPCG(r.Uint64(), 0))
		wg.Go(func() {
			for i := 0; goesOn(); i++ {
				work(r, fmt.Sprintf("%d.%d", g, i), &limiters[g%2], pools[g%2])
			}
		})
	}
	killed := 0
	wg.Go(func() {
		for goesOn() {
			time.Sleep(time.Duration(r.IntN(100_000_000)))
			var n int
			err := watch.QueryRow(t.Context(), `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
				WHERE application_name = 'txlimit_chaos' ORDER BY random() LIMIT 1) AS victim`).Scan(&n)
			// 08P01: PgBouncer gave this query a connection that the last query has terminated.
			if err != nil && sqlState(err) != "08P01" {
				t.Error(err)
			}
			killed += n
		}
	})
	wg.Wait()
	t.Logf("%v; %d connections killed", outcomes, killed)
	for _, outcome := range missing() {
		t.Errorf("it never happened: %s", outcome)
	}

	for i := range limiters { // the turns are free again
		pools[i].Reset() // some of its idle connections have been killed
		for _, limit := range limits {
			holdTurn(t, &limiters[i], pools[i], limit.Global())()
		}
		nobodyQueues(t, &limiters[i], pools[i])
		pools[i].Close()
	}
	eventually(t, "the server has closed all connections", func() bool {
		var n int
		if err := watch.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'txlimit_chaos'").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 0
	})
	eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= goroutines })

	rows, err := watch.Query(t.Context(), "SELECT id FROM orders")
	if err != nil {
		t.Fatal(err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if !acknowledged[id] && !unknown[id] {
			t.Errorf("order %s was committed, but its caller got an error that says it was not", id)
		}
		delete(acknowledged, id)
	}
	for id, told := range acknowledged {
		if told {
			t.Errorf("order %s was acknowledged, but its row is missing", id)
		}
	}
	for _, limit := range limits {
		var want, got float64
		err := watch.QueryRow(t.Context(), `SELECT (SELECT coalesce(sum(`+limit.Name()+`), 0) FROM orders),
			(SELECT coalesce(sum($1::float8 / shards - value), 0) FROM rate_limits WHERE name = $2)`, float64(capacity), limit.Name()).Scan(&want, &got)
		if err != nil || got < want-1e-3 || got > want+1e-3 {
			t.Errorf("%s: %v tokens are gone, the orders took %v; %v", limit.Name(), got, want, err)
		}
	}
}

package faults_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/txlimit/txlimit/ratelimit"
)

// hostOf returns the address of the server in a URL.
func hostOf(t *testing.T, url string) string {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
}

// TestBackendsAreTerminated ends random connections with pg_terminate_backend, at any moment.
func TestBackendsAreTerminated(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	l := newLoad(t, newDatabase(t), loadConfig{})
	admin := connect(t, l.url, 1)
	killed := 0
	for began := time.Now(); time.Since(began) < lasting(1500*time.Millisecond, 20*time.Second) || (killed < 10 || l.failed() == 0) && time.Since(began) < patience; {
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
		var n int
		err := admin.QueryRow(t.Context(), `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
			WHERE application_name = $1 ORDER BY random() LIMIT 1 + (random() * 3)::int) AS victim`, l.app).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		killed += n
	}
	l.flows(5)
	sum := l.settle()
	t.Logf("%d backends terminated", killed)
	if killed < 10 || sum.nothing == 0 {
		t.Error("nobody was hit")
	}
}

// TestConnectionsAreCut loses random messages of clients, or the answers to them.
func TestConnectionsAreCut(t *testing.T) {
	t.Parallel()
	r := newRand(t)
	url := newDatabase(t)
	p := newProxy(t, hostOf(t, url))
	var mu sync.Mutex
	cuts := map[fate]int{}
	p.decide = func() fate {
		mu.Lock()
		defer mu.Unlock()
		f := passes
		if r.IntN(25) == 0 {
			f = []fate{isLost, isCut, losesAnswer}[r.IntN(3)]
		}
		cuts[f]++
		return f
	}
	l := newLoad(t, url, loadConfig{configure: []func(*pgx.ConnConfig){p.dial}})
	time.Sleep(lasting(1500*time.Millisecond, 20*time.Second))
	l.flows(5)
	l.stop()
	mu.Lock()
	t.Logf("%d messages passed, %d were lost, %d were cut off, %d lost their answers", cuts[passes], cuts[isLost], cuts[isCut], cuts[losesAnswer])
	r = rand.New(never{})
	mu.Unlock()
	sum := l.settle()
	if sum.unknown == 0 || sum.committed == 0 || sum.committed == sum.unknown {
		t.Error("of the calls with an unknown outcome, some must have been committed and others not")
	}
}

// never is a random source that never lets anything happen.
type never struct{}

func (never) Uint64() uint64 { return 1<<64 - 1 }

// TestTheAnswerIsLost loses the answer to a COMMIT, or to a call that is its own transaction. The caller cannot tell this
// from a lost COMMIT. The library says so, and retries neither.
func TestTheAnswerIsLost(t *testing.T) {
	t.Parallel()
	url := newDatabase(t)
	admin := connect(t, url, 2)
	var limiter ratelimit.Limiter

	// call works on a database through a proxy. It calls lose before it sends the message whose answer is lost.
	type call func(ctx context.Context, c *caller, lose func()) error
	commits := map[string]call{
		"Consume on a pool": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Consume(ctx, c.pool, c.request)
			return err
		},
		"Consume on a connection": func(ctx context.Context, c *caller, lose func()) error {
			conn, err := c.pool.Acquire(ctx)
			if err != nil {
				return err
			}
			defer conn.Release()
			lose()
			_, err = limiter.Consume(ctx, conn, c.request)
			return err
		},
		"Charge on a pool": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Charge(ctx, c.pool, c.request)
			return err
		},
		"Consume on a Coalescer": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Consume(ctx, &ratelimit.Coalescer{Pool: c.pool}, c.request)
			return err
		},
		"Consume on database/sql": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Consume(ctx, ratelimit.SQL(c.db), c.request)
			return err
		},
		"Consume on database/sql in the simple protocol": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Consume(ctx, ratelimit.SQL(c.simple), c.request)
			return err
		},
		"Consume on database/sql with lib-pq": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Consume(ctx, ratelimit.SQL(c.pq), c.request)
			return err
		},
		"InSQLTx with lib-pq": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InSQLTx(ctx, c.pq, func(ctx context.Context, tx *sql.Tx) error {
				defer lose()
				c.runs++
				_, err := limiter.Consume(ctx, ratelimit.SQL(tx), c.request)
				return err
			})
		},
		"InTx": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				defer lose()
				return c.order(ctx, tx)
			})
		},
		"InTx with Hot": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				defer lose()
				return c.order(ctx, tx)
			}, ratelimit.Hot(c.request))
		},
		"InSQLTx": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InSQLTx(ctx, c.db, func(ctx context.Context, tx *sql.Tx) error {
				defer lose()
				c.runs++
				_, err := limiter.Consume(ctx, ratelimit.SQL(tx), c.request)
				return err
			})
		},
		"QueueConsume on a pool": func(ctx context.Context, c *caller, lose func()) error {
			batch := &pgx.Batch{}
			if _, err := limiter.QueueConsume(ctx, batch, c.request); err != nil {
				return err
			}
			lose()
			return c.pool.SendBatch(ctx, batch).Close()
		},
		"SendTx": func(ctx context.Context, c *caller, lose func()) error {
			batch := &pgx.Batch{}
			if _, err := limiter.QueueConsume(ctx, batch, c.request); err != nil {
				return err
			}
			lose()
			return limiter.SendTx(ctx, c.pool, batch)
		},
	}
	// These lose an answer before any COMMIT.
	before := map[string]call{
		"BEGIN of InTx": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			return limiter.InTx(ctx, c.pool, c.order)
		},
		"Consume in InTx": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				lose()
				err := c.order(ctx, tx)
				if errors.Is(err, ratelimit.ErrUnknownOutcome) {
					t.Errorf("in a transaction of the caller's the outcome is not unknown: %v", err)
				}
				return err
			})
		},
		"QueueConsume in InTx": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "SELECT 1"); err != nil { // begins
					return err
				}
				batch := &pgx.Batch{}
				if _, err := limiter.QueueConsume(ctx, batch, c.request); err != nil {
					return err
				}
				lose()
				return tx.SendBatch(ctx, batch).Close()
			})
		},
		"Consume in InSQLTx": func(ctx context.Context, c *caller, lose func()) error {
			return limiter.InSQLTx(ctx, c.db, func(ctx context.Context, tx *sql.Tx) error {
				lose()
				_, err := limiter.Consume(ctx, ratelimit.SQL(tx), c.request)
				return err
			})
		},
		"Check on a pool": func(ctx context.Context, c *caller, lose func()) error {
			lose()
			_, err := limiter.Check(ctx, c.pool, c.request)
			return err
		},
	}
	try := func(t *testing.T, name string, call call, f fate, unknown bool, granted int) {
		t.Helper()
		want := granted
		p := newProxy(t, hostOf(t, url))
		c := &caller{limiter: &limiter, pool: connect(t, url, 1, p.dial)}
		config := *c.pool.Config().ConnConfig
		c.db = stdlib.OpenDB(config)
		config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		c.simple = stdlib.OpenDB(config)
		connector, err := pq.NewConnector(url + "&binary_parameters=yes") // without it, it takes two round trips
		if err != nil {
			t.Fatal(err)
		}
		connector.Dialer(p)
		c.pq = sql.OpenDB(connector)
		for _, db := range []*sql.DB{c.db, c.simple, c.pq} {
			db.SetMaxOpenConns(1)
			defer db.Close()
		}
		limit := ratelimit.TokenBucket(fmt.Sprintf("%s %d", name, f), 1e-9, time.Hour, ratelimit.Capacity(100))
		c.request = limit.Global()
		for range 2 { // prepares, so that database/sql does not ping before it uses a connection
			if err := call(t.Context(), c, func() {}); err != nil {
				t.Fatal(err)
			}
		}
		if name != "Check on a pool" {
			want += 2
		}
		c.runs = 0
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if f == neverAnswers {
			ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
			defer cancel()
		}
		err = call(ctx, c, func() { p.next(f) })
		switch {
		case err == nil:
			t.Fatalf("%s: no error", name)
		case errors.Is(err, ratelimit.ErrUnknownOutcome) != unknown:
			t.Errorf("%s: the error is %v; is the outcome unknown? want %v", name, err, unknown)
		case errors.Is(err, ratelimit.ErrAttemptsExhausted):
			t.Errorf("%s: it was retried: %v", name, err)
		case f == neverAnswers && !errors.Is(err, context.DeadlineExceeded):
			t.Errorf("%s: %v, want the context's error", name, err)
		case c.runs > 1:
			t.Errorf("%s: the function ran %d times", name, c.runs)
		}
		var gone int
		balances, readErr := limiter.Balance(t.Context(), admin, limit.Global())
		if readErr != nil {
			t.Fatal(readErr)
		}
		if gone = int(100.5 - balances[0].Remaining); gone != want {
			t.Errorf("%s: %d tokens are gone, want %d", name, gone, want)
		}
		t.Logf("%d of 1 token gone; unknown %v, pgconn.SafeToRetry %v: %v", gone-want+granted, errors.Is(err, ratelimit.ErrUnknownOutcome), pgconn.SafeToRetry(err), err)
	}
	for name, call := range commits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			try(t, name, call, losesAnswer, true, 1)
			if !strings.Contains(name, "lib-pq") { // it does not release a connection before the server has answered
				try(t, name, call, neverAnswers, true, 1)
			}
			try(t, name, call, isLost, true, 0)
		})
	}
	for name, call := range before {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, f := range []fate{losesAnswer, neverAnswers, isLost} {
				try(t, name, call, f, false, 0)
			}
		})
	}
}

// caller is the database of a call of TestTheAnswerIsLost.
type caller struct {
	limiter *ratelimit.Limiter
	pool    *pgxpool.Pool
	db      *sql.DB
	simple  *sql.DB // in the simple protocol
	pq      *sql.DB
	request ratelimit.Request
	runs    int
}

// order consumes in a transaction.
func (c *caller) order(ctx context.Context, tx pgx.Tx) error {
	c.runs++
	_, err := c.limiter.Consume(ctx, tx, c.request)
	return err
}

// TestNothingIsSent has no usable connection, so the outcome is known.
func TestNothingIsSent(t *testing.T) {
	t.Parallel()
	url := newDatabase(t)
	var limiter ratelimit.Limiter
	request := ratelimit.TokenBucket("unsent", 1e-9, time.Hour, ratelimit.Capacity(100)).Global()
	consume := func(ctx context.Context, db ratelimit.DB) error {
		_, err := limiter.Consume(ctx, db, request)
		return err
	}
	pool := connect(t, url, 1)
	held, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Release()
	refused := newProxy(t, "127.0.0.1:1") // no server listens there
	nowhere := connect(t, url, 1, refused.dial)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for what, try := range map[string]func(ctx context.Context) error{
		"a pool without a free connection": func(ctx context.Context) error { return consume(ctx, pool) },
		"a Coalescer on it":                func(ctx context.Context) error { return consume(ctx, coalescer) },
		"a server that cannot be reached":  func(ctx context.Context) error { return consume(ctx, nowhere) },
		"InTx there": func(ctx context.Context) error {
			return limiter.InTx(ctx, nowhere, func(context.Context, pgx.Tx) error { return nil })
		},
		"a context that is over": func(context.Context) error { return consume(over, held) },
		"a connection that is closed": func(ctx context.Context) error {
			conn, err := pgx.Connect(t.Context(), url)
			if err != nil {
				t.Fatal(err)
			}
			conn.Close(ctx)
			return consume(ctx, conn)
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if err := try(ctx); err == nil || errors.Is(err, ratelimit.ErrUnknownOutcome) {
			t.Errorf("%s: %v, and nothing was sent", what, err)
		}
		cancel()
	}
}

// TestTimeoutsOfTheServer holds rows and turns for longer than statements may take. No connection breaks, so every outcome
// is known.
func TestTimeoutsOfTheServer(t *testing.T) {
	for name, state := range map[string]string{"statement_timeout": "57014", "lock_timeout": "55P03"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRand(t)
			l := newLoad(t, newDatabase(t), loadConfig{configure: []func(*pgx.ConnConfig){setting(name, "60")}})
			admin := connect(t, l.url, 1)
			for until := time.Now().Add(lasting(1500*time.Millisecond, 20*time.Second)); time.Now().Before(until); {
				h := l.handles[r.IntN(len(l.handles))]
				err := pgx.BeginFunc(t.Context(), admin, func(tx pgx.Tx) error {
					_, err := tx.Exec(t.Context(), "SELECT FROM ratelimit.limits WHERE name = $1 FOR UPDATE", h.limit.Name())
					time.Sleep(time.Duration(r.IntN(150)) * time.Millisecond)
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			l.flows(5)
			sum := l.settle()
			timeouts := 0
			for _, h := range l.handles {
				timeouts += h.outcomes[state]
			}
			if timeouts == 0 || sum.unknown > 0 {
				t.Errorf("%d timeouts, %d unknown outcomes, want some and none", timeouts, sum.unknown)
			}
		})
	}
}

// TestAPoolOfOneConnection makes a hundred goroutines share one connection, on all handles.
func TestAPoolOfOneConnection(t *testing.T) {
	t.Parallel()
	l := newLoad(t, newDatabase(t), loadConfig{goroutines: 13, conns: 1})
	time.Sleep(lasting(1500*time.Millisecond, 20*time.Second))
	l.flows(3 * 13)
	l.stop()
	for _, h := range l.handles {
		fewest, most := h.grants[0], h.grants[0]
		for _, n := range h.grants {
			fewest, most = min(fewest, n), max(most, n)
		}
		t.Logf("%-20s %4d to %4d grants for each of 13 goroutines, the longest call took %v", h.limit.Name(), fewest, most, h.longest.Round(time.Millisecond))
		if fewest == 0 {
			t.Errorf("%s: a goroutine was never granted anything", h.limit.Name())
		}
	}
	if sum := l.settle(); sum.unknown > 0 || sum.nothing > 0 {
		t.Errorf("%d unknown outcomes, %d errors, want none", sum.unknown, sum.nothing)
	}
}

package integration_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// The database's default is SERIALIZABLE, so of several transactions on one row, all but one fail. That is no failure of
// the database: such a request is neither refused nor, with FailOpen, let through, and no refund is lost.
func TestHTTPWhatCouldNotBeSerializedIsRunAgain(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	for _, open := range []bool{false, true} {
		pool := reconfigured(t, newPool(t, 8), func(c *pgxpool.Config) {
			startWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
		})
		s := newSiteOn(t, pool, always(limit.Key("ann")))
		var conflicts atomic.Int64
		s.limit.Limiter.Observer = func(_ context.Context, d ratelimit.Decision) {
			if sqlState(d.Err) == "40001" {
				conflicts.Add(1)
			}
		}
		s.limit.FailOpen = open
		s.limit.Failed = func(status int) bool { return status == http.StatusNotFound }
		found, goOn := make(chan struct{}), make(chan struct{})
		s.handle = func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/found" {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			close(found)
			select {
			case <-goOn:
			case <-r.Context().Done():
			}
		}
		s.serve()
		s.get("/") // this makes the row
		conflicts.Store(0)

		tx := s.hold(limit.Key("ann").Count(5)) // 4 of 10 are left
		var replies []func() (answer, error)
		for range 5 { // the pool has 8
			replies = append(replies, s.send(t.Context(), "/"))
		}
		s.waitsFor(tx)
		s.world().do(tx.Commit(t.Context()))
		statuses := map[int]int{}
		for _, reply := range replies {
			got, err := reply()
			if err != nil {
				t.Error(err)
			}
			statuses[got.Status]++
		}
		if statuses[404] != 4 || statuses[429] != 1 || s.called.Load() != 5 || conflicts.Load() == 0 {
			t.Errorf("%v, the handler was called %d times, %d conflicts", statuses, s.called.Load(), conflicts.Load())
		}

		s.world().do(s.limit.Limiter.Reset(t.Context(), pool, limit.Key("ann")))
		s.get("/")
		conflicts.Store(0)
		s.observed()
		reply := s.send(t.Context(), "/found")
		select {
		case <-found:
		case <-time.After(patience):
			t.Fatal("the handler was not called")
		}
		tx = s.hold(limit.Key("ann"))
		close(goOn)
		s.waitsFor(tx)
		s.world().do(tx.Commit(t.Context()))
		if got, err := reply(); err != nil || got.Status != 200 || conflicts.Load() == 0 {
			t.Errorf("%+v, %v, %d conflicts", got, err, conflicts.Load())
		}
		if d := s.observed(); len(d) != 1 {
			t.Errorf("the refund: %+v", d)
		}
		s.world().holds(limit.Key("ann"), 8)
	}
}

// cut is a pool whose network can fail: its connections break, and new ones are refused or never answered.
type cut struct {
	pool *pgxpool.Pool
	mu   sync.Mutex
	dead func(ctx context.Context) error // nil: it works
	open []net.Conn
}

func newCut(t *testing.T, like *pgxpool.Pool) *cut {
	t.Helper()
	c := &cut{}
	config := like.Config()
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c.mu.Lock()
		dead := c.dead
		c.mu.Unlock()
		if dead != nil {
			return nil, dead(ctx)
		}
		conn, err := dial(ctx, network, addr)
		if err == nil {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.open = append(c.open, conn)
		}
		return conn, err
	}
	var err error
	if c.pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.pool.Close)
	return c
}

// off breaks the network. The returned function repairs it.
func (c *cut) off(nobodyAnswers bool) (on func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	mended := make(chan struct{})
	c.dead = func(ctx context.Context) error {
		if nobodyAnswers {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-mended:
			}
		}
		return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	for _, conn := range c.open {
		_ = conn.Close()
	}
	c.open = nil
	return func() {
		close(mended)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dead = nil
	}
}

func TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice(t *testing.T) {
	long(t)
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	for _, row := range []struct {
		name           string
		open, observe  bool
		hang, coalesce bool
		status         int
	}{
		{"closed", false, false, false, false, 503},
		{"closed, coalesced", false, false, false, true, 503},
		{"closed, nobody answers", false, false, true, false, 503},
		{"open", true, false, false, false, 200},
		{"open, coalesced", true, false, false, true, 200},
		{"open, nobody answers", true, false, true, true, 200},
		{"observing", false, true, false, false, 200},
		{"observing, nobody answers", false, true, true, false, 200},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, always(limit.Key("ann")))
			cut := newCut(t, s.pool)
			s.limit.DB = cut.pool
			if row.coalesce {
				coalescer := &ratelimit.Coalescer{Pool: cut.pool}
				t.Cleanup(func() { closeCoalescer(t, coalescer) })
				s.limit.DB = coalescer
			}
			s.limit.FailOpen, s.limit.ObserveOnly = row.open, row.observe
			s.serve()
			s.wants("/", 200, `"limit";r=1;t=1800`, "")
			s.observed()

			on := cut.off(row.hang)
			s.limit.Timeout = 200 * time.Millisecond
			down := &site{T: t, limit: s.limit}
			down.serve()
			passed := int64(0)
			if row.open { // a call whose connection breaks may have had an effect: it does not pass
				begin := time.Now()
				eventually(t, "a request passes", func() bool { return down.get("/").Status == 200 })
				if took := time.Since(begin); row.hang && took < 5*time.Second {
					t.Errorf("passed after %v, and it could have been an overload", took)
				}
				s.observed()
				passed = down.called.Load()
			}
			for range 3 {
				begin := time.Now()
				got := down.get("/")
				d := s.observed()
				if got.Status != row.status || got.Header.Get("RateLimit-Policy") != `"limit";q=2;w=3600` || got.Header.Get("RateLimit") != "" || got.Header.Get("Retry-After") != "" {
					t.Errorf("%+v", got)
				}
				if len(d) != 1 || d[0].Err == nil || d[0].Status != 503 || d[0].Passed != (row.status == 200) || d[0].FailedOpen != row.open {
					t.Errorf("observed %+v", d)
				}
				if row.status == 503 && (s.problem(got)["title"] != "Service Unavailable" || strings.Contains(got.Body, "connection")) {
					t.Errorf("%s", got.Body)
				}
				if took := time.Since(begin); took > 10*time.Second {
					t.Errorf("took %v", took)
				}
			}
			if want := passed + map[bool]int64{true: 3}[row.status == 200]; down.called.Load() != want {
				t.Errorf("the handler was called %d times", down.called.Load())
			}

			on()
			s.wants("/", 200, `"limit";r=0;t=3600`, "")
			if got := s.get("/"); (got.Status == 429) == row.observe {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A statement waits for a row that a transaction holds. Then it is killed, takes too long, or its client leaves.
// The database is there, so FailOpen passes none of them.
func TestHTTPAStatementThatIsKilledUnderItGrantsNothing(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 2, time.Hour)
	for _, open := range []bool{false, true} {
		s := newSite(t, always(limit.Key("ann")))
		s.limit.FailOpen = open
		s.serve()
		s.get("/")
		tx := s.hold(limit.Key("ann"))
		s.observed()
		called := s.called.Load()

		reply := s.send(t.Context(), "/")
		if _, err := s.pool.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, s.waitsFor(tx)); err != nil {
			t.Fatal(err)
		}
		got, err := reply()
		if d := s.observed(); err != nil || got.Status != 503 || len(d) != 1 || d[0].Status != 503 || d[0].Passed {
			t.Errorf("killed: %+v, %v, %+v", got, err, d)
		}

		s.limit.Timeout = 100 * time.Millisecond
		impatient := &site{T: t, limit: s.limit}
		got = impatient.serve().get("/")
		if d := s.observed(); got.Status != 503 || len(d) != 1 || d[0].Status != 503 || !errors.Is(d[0].Err, context.DeadlineExceeded) || d[0].Passed {
			t.Errorf("too slow: %+v, %+v", got, d)
		}

		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		reply = s.send(ctx, "/")
		s.waitsFor(tx)
		leave()
		if _, err := reply(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		var d []httplimit.Decision
		for deadline := time.Now().Add(patience); len(d) == 0 && time.Now().Before(deadline); d = s.observed() {
			time.Sleep(time.Millisecond)
		}
		if len(d) != 1 || d[0].Status != 499 || d[0].Passed || !errors.Is(d[0].Err, context.Canceled) {
			t.Errorf("the client left, so the database is not at fault: %+v", d)
		}
		if n := s.called.Load() - called; n != 0 {
			t.Errorf("the handler was called %d times", n)
		}
		s.nothingWaitsFor(tx) // otherwise it may still be granted
		s.world().do(tx.Rollback(t.Context()))
		s.world().holds(limit.Key("ann"), 1)
	}
}

// What a client can cause passes no request: a used-up key asked by a crowd, a row that is locked for longer than the probe's
// patience, a server that takes no more connections.
func TestFailOpenIsNotForOverload(t *testing.T) {
	long(t)
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 3, time.Hour)
	t.Run("a crowd at a used-up key", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, always(limit.Key("ann")))
		s.limit.FailOpen, s.limit.Timeout = true, 100*time.Millisecond
		s.serve()
		for range 3 {
			s.get("/")
		}
		before := s.called.Load()
		statuses := map[int]int{}
		for range 5 {
			for status, n := range s.inParallel(100, func(int) string { return "/" }) {
				statuses[status] += n
			}
		}
		if n := s.called.Load(); n > 3 || statuses[200] != int(n-before) || statuses[429]+statuses[503] != 500-statuses[200] {
			t.Errorf("%v, %d passed a limit of 3", statuses, n)
		}
	})
	t.Run("a locked row", func(t *testing.T) {
		t.Parallel()
		s := newSite(t, always(limit.Key("ann")))
		s.limit.FailOpen, s.limit.Timeout = true, 100*time.Millisecond
		s.serve()
		tx := s.hold(limit.Key("ann"))
		for deadline := time.Now().Add(8 * time.Second); time.Now().Before(deadline); {
			if got := s.get("/"); got.Status != 503 {
				t.Fatalf("%+v", got)
			}
		}
		s.world().do(tx.Rollback(t.Context()))
		eventually(t, "the row is free", func() bool { return s.get("/").Status == 200 })
	})
	t.Run("a server that takes no more connections", func(t *testing.T) {
		t.Parallel()
		needsSession(t, "since the pooler has one to lend")
		pool := newPool(t, 4)
		const role = "txlimit_few"
		for _, sql := range []string{
			"DROP ROLE IF EXISTS " + role, "CREATE ROLE " + role + " LOGIN CONNECTION LIMIT 1",
			"GRANT ALL ON ALL TABLES IN SCHEMA public TO " + role,
		} {
			if _, err := pool.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		few := reconfigured(t, pool, func(c *pgxpool.Config) { c.ConnConfig.User = role })
		taken, err := few.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer taken.Release()
		s := newSiteOn(t, few, always(limit.Key("ann")))
		s.limit.FailOpen, s.limit.Timeout = true, 100*time.Millisecond
		s.serve()
		for deadline := time.Now().Add(7 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
			if got := s.get("/"); got.Status != 503 {
				t.Fatalf("%+v", got)
			}
		}
		if d := s.observed(); sqlState(d[len(d)-1].Err) != "53300" {
			t.Errorf("%v", d[len(d)-1].Err)
		}
	})
}

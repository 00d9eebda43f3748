package http_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// The database's default is SERIALIZABLE, so of several transactions on one row, all but one fail. That is no failure of
// the database: such a request is neither refused nor, with FailOpen, let through, and no refund is lost.
func TestHTTPWhatCouldNotBeSerializedIsRunAgain(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 10, time.Hour)
	for _, open := range []bool{false, true} {
		pool := harness.Reconfigured(t, harness.NewPool(t, 8), func(c *pgxpool.Config) {
			harness.StartWith(t, c.ConnConfig, map[string]string{"default_transaction_isolation": "serializable"})
		})
		s := harness.NewSiteOn(t, pool, harness.Always(limit.Key("ann")))
		var conflicts atomic.Int64
		s.Limit.Limiter.Observer = func(_ context.Context, d ratelimit.Decision) {
			if harness.SQLState(d.Err) == "40001" {
				conflicts.Add(1)
			}
		}
		s.Limit.FailOpen = open
		s.Limit.Failed = func(status int) bool { return status == http.StatusNotFound }
		found, goOn := make(chan struct{}), make(chan struct{})
		s.Handle = func(w http.ResponseWriter, r *http.Request) {
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
		s.Serve()
		s.Get("/") // this makes the row
		conflicts.Store(0)

		tx := s.Hold(limit.Key("ann").Count(5)) // 4 of 10 are left
		var replies []func() (harness.Answer, error)
		for range 5 { // the pool has 8
			replies = append(replies, s.Send(t.Context(), "/"))
		}
		s.WaitsFor(tx)
		s.World().Do(tx.Commit(t.Context()))
		statuses := map[int]int{}
		for _, reply := range replies {
			got, err := reply()
			if err != nil {
				t.Error(err)
			}
			statuses[got.Status]++
		}
		if statuses[404] != 4 || statuses[429] != 1 || s.Called.Load() != 5 || conflicts.Load() == 0 {
			t.Errorf("%v, the handler was called %d times, %d conflicts", statuses, s.Called.Load(), conflicts.Load())
		}

		s.World().Do(s.Limit.Limiter.Reset(t.Context(), pool, limit.Key("ann")))
		s.Get("/")
		conflicts.Store(0)
		s.Observed()
		reply := s.Send(t.Context(), "/found")
		select {
		case <-found:
		case <-time.After(harness.Patience):
			t.Fatal("the handler was not called")
		}
		tx = s.Hold(limit.Key("ann"))
		close(goOn)
		s.WaitsFor(tx)
		s.World().Do(tx.Commit(t.Context()))
		if got, err := reply(); err != nil || got.Status != 200 || conflicts.Load() == 0 {
			t.Errorf("%+v, %v, %d conflicts", got, err, conflicts.Load())
		}
		if d := s.Observed(); len(d) != 1 {
			t.Errorf("the refund: %+v", d)
		}
		s.World().Holds(limit.Key("ann"), 8)
	}
}

func TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice(t *testing.T) {
	harness.Long(t)
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
			s := harness.NewSite(t, harness.Always(limit.Key("ann")))
			cut := harness.NewCut(t, s.Pool)
			s.Limit.DB = cut.Pool
			if row.coalesce {
				coalescer := &ratelimit.Coalescer{Pool: cut.Pool}
				t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
				s.Limit.DB = coalescer
			}
			s.Limit.FailOpen, s.Limit.ObserveOnly = row.open, row.observe
			s.Serve()
			s.Wants("/", 200, `"limit";r=1;t=1800`, "")
			s.Observed()

			on := cut.Off(row.hang)
			s.Limit.Timeout = 200 * time.Millisecond
			down := &harness.Site{T: t, Limit: s.Limit}
			down.Serve()
			passed := int64(0)
			if row.open { // a call whose connection breaks may have had an effect: it does not pass
				begin := time.Now()
				harness.Eventually(t, "a request passes", func() bool { return down.Get("/").Status == 200 })
				if took := time.Since(begin); row.hang && took < 5*time.Second {
					t.Errorf("passed after %v, and it could have been an overload", took)
				}
				s.Observed()
				passed = down.Called.Load()
			}
			for range 3 {
				begin := time.Now()
				got := down.Get("/")
				d := s.Observed()
				if got.Status != row.status || got.Header.Get("RateLimit-Policy") != `"limit";q=2;w=3600` || got.Header.Get("RateLimit") != "" || got.Header.Get("Retry-After") != "" {
					t.Errorf("%+v", got)
				}
				if len(d) != 1 || d[0].Err == nil || d[0].Status != 503 || d[0].Passed != (row.status == 200) || d[0].FailedOpen != row.open {
					t.Errorf("observed %+v", d)
				}
				if row.status == 503 && (s.Problem(got)["title"] != "Service Unavailable" || strings.Contains(got.Body, "connection")) {
					t.Errorf("%s", got.Body)
				}
				if took := time.Since(begin); took > 10*time.Second {
					t.Errorf("took %v", took)
				}
			}
			if want := passed + map[bool]int64{true: 3}[row.status == 200]; down.Called.Load() != want {
				t.Errorf("the handler was called %d times", down.Called.Load())
			}

			on()
			s.Wants("/", 200, `"limit";r=0;t=3600`, "")
			if got := s.Get("/"); (got.Status == 429) == row.observe {
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
		s := harness.NewSite(t, harness.Always(limit.Key("ann")))
		s.Limit.FailOpen = open
		s.Serve()
		s.Get("/")
		tx := s.Hold(limit.Key("ann"))
		s.Observed()
		called := s.Called.Load()

		reply := s.Send(t.Context(), "/")
		if _, err := s.Pool.Exec(t.Context(), `SELECT pg_terminate_backend($1)`, s.WaitsFor(tx)); err != nil {
			t.Fatal(err)
		}
		got, err := reply()
		if d := s.Observed(); err != nil || got.Status != 503 || len(d) != 1 || d[0].Status != 503 || d[0].Passed {
			t.Errorf("killed: %+v, %v, %+v", got, err, d)
		}

		s.Limit.Timeout = 100 * time.Millisecond
		impatient := &harness.Site{T: t, Limit: s.Limit}
		got = impatient.Serve().Get("/")
		if d := s.Observed(); got.Status != 503 || len(d) != 1 || d[0].Status != 503 || !errors.Is(d[0].Err, context.DeadlineExceeded) || d[0].Passed {
			t.Errorf("too slow: %+v, %+v", got, d)
		}

		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		reply = s.Send(ctx, "/")
		s.WaitsFor(tx)
		leave()
		if _, err := reply(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		var d []httplimit.Decision
		for deadline := time.Now().Add(harness.Patience); len(d) == 0 && time.Now().Before(deadline); d = s.Observed() {
			time.Sleep(time.Millisecond)
		}
		if len(d) != 1 || d[0].Status != 499 || d[0].Passed || !errors.Is(d[0].Err, context.Canceled) {
			t.Errorf("the client left, so the database is not at fault: %+v", d)
		}
		if n := s.Called.Load() - called; n != 0 {
			t.Errorf("the handler was called %d times", n)
		}
		s.NothingWaitsFor(tx) // otherwise it may still be granted
		s.World().Do(tx.Rollback(t.Context()))
		s.World().Holds(limit.Key("ann"), 1)
	}
}

// What a client can cause passes no request: a used-up key asked by a crowd, a row that is locked for longer than the probe's
// patience, a server that takes no more connections.
func TestFailOpenIsNotForOverload(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	limit := ratelimit.TokenBucket("limit", 3, time.Hour)
	t.Run("a crowd at a used-up key", func(t *testing.T) {
		t.Parallel()
		s := harness.NewSite(t, harness.Always(limit.Key("ann")))
		s.Limit.FailOpen, s.Limit.Timeout = true, 100*time.Millisecond
		s.Serve()
		for range 3 {
			s.Get("/")
		}
		before := s.Called.Load()
		statuses := map[int]int{}
		for range 5 {
			for status, n := range s.InParallel(100, func(int) string { return "/" }) {
				statuses[status] += n
			}
		}
		if n := s.Called.Load(); n > 3 || statuses[200] != int(n-before) || statuses[429]+statuses[503] != 500-statuses[200] {
			t.Errorf("%v, %d passed a limit of 3", statuses, n)
		}
	})
	t.Run("a locked row", func(t *testing.T) {
		t.Parallel()
		s := harness.NewSite(t, harness.Always(limit.Key("ann")))
		s.Limit.FailOpen, s.Limit.Timeout = true, 100*time.Millisecond
		s.Serve()
		tx := s.Hold(limit.Key("ann"))
		for deadline := time.Now().Add(8 * time.Second); time.Now().Before(deadline); {
			if got := s.Get("/"); got.Status != 503 {
				t.Fatalf("%+v", got)
			}
		}
		s.World().Do(tx.Rollback(t.Context()))
		harness.Eventually(t, "the row is free", func() bool { return s.Get("/").Status == 200 })
	})
	t.Run("a server that takes no more connections", func(t *testing.T) {
		t.Parallel()
		harness.NeedsSession(t, "since the pooler has one to lend")
		pool := harness.NewPool(t, 4)
		const role = "txlimit_few"
		for _, sql := range []string{
			"DROP ROLE IF EXISTS " + role, "CREATE ROLE " + role + " LOGIN CONNECTION LIMIT 1",
			"GRANT ALL ON ALL TABLES IN SCHEMA public TO " + role,
		} {
			if _, err := pool.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		few := harness.Reconfigured(t, pool, func(c *pgxpool.Config) { c.ConnConfig.User = role })
		taken, err := few.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer taken.Release()
		s := harness.NewSiteOn(t, few, harness.Always(limit.Key("ann")))
		s.Limit.FailOpen, s.Limit.Timeout = true, 100*time.Millisecond
		s.Serve()
		for deadline := time.Now().Add(7 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
			if got := s.Get("/"); got.Status != 503 {
				t.Fatalf("%+v", got)
			}
		}
		if d := s.Observed(); harness.SQLState(d[len(d)-1].Err) != "53300" {
			t.Errorf("%v", d[len(d)-1].Err)
		}
	})
}

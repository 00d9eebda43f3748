package tx_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// A denial must not break a connection: the pool would have to replace it.
func TestAFloodOfDenialsCausesNoReconnect(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	for way, send := range batchWays {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			const goroutines = 16
			denials := int64(1000)
			if way == "SendTx" {
				denials = int64(harness.Sized(10_000, 2_000))
			}
			pool := harness.Reconfigured(t, harness.NewPool(t, goroutines), func(c *pgxpool.Config) { c.MinConns = goroutines })
			pids := func() []uint32 {
				var conns []*pgxpool.Conn
				var pids []uint32
				for range goroutines {
					conn, err := pool.Acquire(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					conns = append(conns, conn)
					pids = append(pids, conn.Conn().PgConn().PID())
				}
				for _, conn := range conns {
					conn.Release()
				}
				slices.Sort(pids)
				return pids
			}
			var limiter ratelimit.Limiter
			limit := ratelimit.TokenBucket("bucket", 1, 24*time.Hour)
			if _, err := limiter.Consume(t.Context(), pool, limit.Key("k")); err != nil {
				t.Fatal(err)
			}
			before, conns := pids(), pool.Stat().NewConnsCount()
			var n atomic.Int64
			var wg sync.WaitGroup
			for range goroutines {
				wg.Go(func() {
					for n.Add(1) <= denials {
						var batch pgx.Batch
						batch.Queue("SELECT 1")
						_, err := limiter.QueueConsume(t.Context(), &batch, limit.Key("k"))
						batch.Queue("SELECT 2")
						if err == nil {
							err = send(t.Context(), pool, &batch)
						}
						if !harness.Denied(err) {
							t.Errorf("%v, want a denial", err)
							return
						}
					}
				})
			}
			wg.Wait()
			if after := pids(); !slices.Equal(before, after) || pool.Stat().NewConnsCount() != conns {
				t.Errorf("%d new connections; backends %v became %v", pool.Stat().NewConnsCount()-conns, before, after)
			}
		})
	}
}

// trips counts round trips: a write followed by a read.
type trips struct {
	net.Conn
	n       *atomic.Int64
	written *atomic.Bool
}

func (c trips) Write(p []byte) (int, error) {
	c.written.Store(true)
	return c.Conn.Write(p)
}

func (c trips) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.written.Swap(false) {
		c.n.Add(1)
	}
	return n, err
}

func TestSendTxIsOneRoundTrip(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.InQueryModes(t, harness.NewJobs, func(t *testing.T, pool *pgxpool.Pool) {
		var n atomic.Int64
		var written atomic.Bool
		pool = harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
			harness.WrapConns(c, func(conn net.Conn) net.Conn { return trips{conn, &n, &written} })
		})
		var limiter ratelimit.Limiter
		limit := ratelimit.TokenBucket("bucket", 3, 24*time.Hour)
		other := ratelimit.TokenBucket("other", 100, 24*time.Hour)
		var got []int64
		for i := range 6 {
			var batch pgx.Batch
			harness.Queue(t, &limiter, &batch, limit.Key("k"))
			batch.Queue("INSERT INTO jobs VALUES ($1)", 10+i)
			harness.Queue(t, &limiter, &batch, other.Key("k"), other.Global())
			before := n.Load()
			if err := limiter.SendTx(t.Context(), pool, &batch); harness.Denied(err) != (i >= 3) || err != nil && i < 3 {
				t.Fatalf("%d: %v", i, err)
			}
			got = append(got, n.Load()-before)
		}
		// The first call connects and prepares. A denial is followed by ROLLBACK.
		want := []int64{1, 1, 2, 2, 2}
		switch pool.Config().ConnConfig.DefaultQueryExecMode {
		case pgx.QueryExecModeDescribeExec: // it asks for a description each time
			want = []int64{2, 2, 3, 3, 3}
		case pgx.QueryExecModeCacheDescribe: // it asks for a description again after an error
			want = []int64{1, 1, 2, 3, 3}
		}
		if !slices.Equal(got[1:], want) {
			t.Errorf("%v round trips, want %v after the first", got, want)
		}
	})
}

func TestSendTxUnderContentionKeepsEverythingTogether(t *testing.T) {
	t.Parallel()
	for _, level := range harness.Levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := harness.NewJobs(t, 12)
			limiter := ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
			limit := ratelimit.TokenBucket("jobs", 20, time.Hour)
			var granted, refused, tries atomic.Int64
			// A transaction that begins before this one ends conflicts with it, unless its level has no conflicts.
			first, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := limiter.Consume(t.Context(), first, limit.Global().Count(0)); err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for g := range 8 {
				wg.Go(func() {
					for i := range 5 {
						var batch pgx.Batch
						batch.Queue("INSERT INTO jobs VALUES ($1)", 100+g*10+i).Exec(func(pgconn.CommandTag) error { tries.Add(1); return nil })
						result, err := limiter.QueueConsume(t.Context(), &batch, limit.Global())
						if err == nil {
							err = limiter.SendTx(t.Context(), pool, &batch, ratelimit.Isolation(level), ratelimit.Attempts(1000))
						}
						switch {
						case err == nil && result.OK:
							granted.Add(1)
						case harness.Denied(err) && !result.OK:
							refused.Add(1)
						default:
							t.Errorf("%+v, %v", result, err)
						}
					}
				})
			}
			harness.Waiting(t, pool, 1)
			if err := first.Commit(t.Context()); err != nil {
				t.Error(err)
			}
			wg.Wait()
			t.Logf("%d tries for 40", tries.Load())
			if granted.Load() != 20 || refused.Load() != 20 || harness.Jobs(t, pool, "count(*)") != 22 {
				t.Errorf("%d granted, %d denied, %d rows, want 20, 20 and 22", granted.Load(), refused.Load(), harness.Jobs(t, pool, "count(*)"))
			}
			if level != pgx.ReadCommitted && tries.Load() == 40 {
				t.Error("nothing was retried: this test has not seen a conflict")
			}
		})
	}
}

func TestSendTxRunsAgainAndGivesUpAsInTxDoes(t *testing.T) {
	t.Parallel()
	inBatch := func(sql string) (*pgx.Batch, *int) {
		calls := 0
		var batch pgx.Batch
		batch.Queue("INSERT INTO jobs VALUES (3)").Exec(func(pgconn.CommandTag) error { calls++; return nil })
		batch.Queue(sql)
		return &batch, &calls
	}
	var limiter ratelimit.Limiter
	t.Run("gives up", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewJobs(t, 1)
		for _, condition := range []string{"serialization_failure", "deadlock_detected"} {
			batch, calls := inBatch("DO $$ BEGIN RAISE " + condition + "; END $$")
			err := limiter.SendTx(t.Context(), pool, batch, ratelimit.Attempts(3))
			if !harness.GaveUpAfter(err, 3) || *calls != 3 || !strings.HasPrefix(harness.SQLState(err), "40") {
				t.Errorf("%d calls, %v", *calls, err)
			}
		}
		if n := harness.Jobs(t, pool, "count(*)"); n != 2 || pool.Stat().NewConnsCount() != 1 {
			t.Errorf("%d rows, %d connections", n, pool.Stat().NewConnsCount())
		}
	})
	t.Run("a conflict at COMMIT", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewJobs(t, 1)
		_, err := pool.Exec(t.Context(), `CREATE SEQUENCE tries;
			CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN IF nextval(''tries'') < 3 THEN RAISE serialization_failure; END IF; RETURN NULL; END';
			CREATE CONSTRAINT TRIGGER conflict AFTER INSERT ON jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION conflict()`)
		if err != nil {
			t.Fatal(err)
		}
		batch, calls := inBatch("SELECT 1")
		if err := limiter.SendTx(t.Context(), pool, batch); err != nil || *calls != 3 || harness.Jobs(t, pool, "count(*)") != 3 {
			t.Errorf("%d calls, %v", *calls, err)
		}
		if n := pool.Stat().NewConnsCount(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
	t.Run("the context ends", func(t *testing.T) {
		t.Parallel()
		pool := harness.NewJobs(t, 1)
		reason := errors.New("the caller went home")
		ctx, cancel := context.WithCancelCause(t.Context())
		var batch pgx.Batch
		batch.Queue("INSERT INTO jobs VALUES (3)").Exec(func(pgconn.CommandTag) error { cancel(reason); return nil })
		batch.Queue("DO $$ BEGIN PERFORM pg_sleep(0.2); RAISE serialization_failure; END $$")
		err := limiter.SendTx(ctx, pool, &batch)
		if !errors.Is(err, context.Canceled) && !errors.Is(err, reason) {
			t.Errorf("%v", err)
		}
		if n := harness.Jobs(t, pool, "count(*)"); n != 2 {
			t.Errorf("%d rows", n)
		}
	})
	t.Run("a batch may be sent twice", func(t *testing.T) {
		t.Parallel()
		pool, other := harness.NewJobs(t, 1), harness.NewJobs(t, 1)
		limiter, _ := harness.NewLimiter()
		var batch pgx.Batch
		batch.Queue("UPDATE jobs SET done = done + @by WHERE n = 1", pgx.NamedArgs{"by": 2})
		result := harness.Queue(t, limiter, &batch, ratelimit.TokenBucket("bucket", 2, time.Minute).Global())
		for i := range 3 {
			err := limiter.SendTx(t.Context(), pool, &batch)
			if harness.Denied(err) != (i == 2) || result.OK == (i == 2) || err != nil && i < 2 {
				t.Errorf("%d: %+v, %v", i, result, err)
			}
		}
		if err := limiter.SendTx(t.Context(), other, &batch); err != nil || !result.OK {
			t.Errorf("elsewhere: %+v, %v", result, err)
		}
		if n := harness.Jobs(t, pool, "sum(done)"); n != 4 {
			t.Errorf("%d done, want 4", n)
		}
	})
}

func TestSendTxReturnsOtherErrorsAsTheyAre(t *testing.T) {
	t.Parallel()
	mine := errors.New("mine")
	harness.InQueryModes(t, harness.NewJobs, func(t *testing.T, pool *pgxpool.Pool) {
		if _, err := pool.Exec(t.Context(), `CREATE TABLE unique_later (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO unique_later VALUES (1)`); err != nil {
			t.Fatal(err)
		}
		var limiter ratelimit.Limiter
		limit := ratelimit.TokenBucket("bucket", 100, 24*time.Hour)
		left := 100.0
		for name, row := range map[string]struct {
			queue     func(batch *pgx.Batch)
			check     func(err error) bool
			committed bool
		}{
			"a unique violation": {
				func(batch *pgx.Batch) { batch.Queue("INSERT INTO jobs VALUES ($1)", 1) },
				func(err error) bool {
					return harness.SQLState(err) == "23505" && !strings.Contains(err.Error(), "ratelimit")
				}, false,
			},
			"an error that a function wraps": {
				func(batch *pgx.Batch) {
					batch.Queue("INSERT INTO jobs VALUES ($1) RETURNING n", 1).QueryRow(func(row pgx.Row) error {
						if err := row.Scan(new(int)); err != nil {
							return fmt.Errorf("what I did: %w", err)
						}
						return nil
					})
				},
				func(err error) bool {
					return harness.SQLState(err) == "23505" && strings.HasPrefix(err.Error(), "what I did: ")
				}, false,
			},
			"an error that a function hides": {
				func(batch *pgx.Batch) {
					batch.Queue("INSERT INTO jobs VALUES ($1) RETURNING n", 1).QueryRow(func(row pgx.Row) error {
						_ = row.Scan(new(int))
						return nil
					})
				},
				func(err error) bool { return harness.SQLState(err) == "23505" }, false,
			},
			"a unique violation at COMMIT": {
				func(batch *pgx.Batch) { batch.Queue("INSERT INTO unique_later VALUES (1)") },
				func(err error) bool {
					return harness.SQLState(err) == "23505" && strings.HasPrefix(err.Error(), "ratelimit: commit: ")
				}, false,
			},
			"a batch that rolls back to a savepoint": {
				func(batch *pgx.Batch) {
					for _, sql := range []string{"SAVEPOINT s", "ROLLBACK WORK TO s", "ROLLBACK TO s", "PREPARE later AS SELECT 1", "DEALLOCATE later"} {
						batch.Queue(sql)
					}
					batch.Queue("INSERT INTO jobs VALUES ($1)", 1)
				},
				func(err error) bool { return harness.SQLState(err) == "23505" }, false,
			},
			"a syntax error": {
				func(batch *pgx.Batch) { batch.Queue("INSRT") },
				func(err error) bool { return harness.SQLState(err) == "42601" }, false,
			},
			"a function that does not exist": {
				func(batch *pgx.Batch) { batch.Queue("SELECT nonsense()") },
				func(err error) bool {
					return harness.SQLState(err) == "42883" && !strings.Contains(err.Error(), "migrated")
				}, false,
			},
			"a function's own error": {
				func(batch *pgx.Batch) {
					batch.Queue("SELECT 1").QueryRow(func(row pgx.Row) error { return errors.Join(row.Scan(new(int)), mine) })
					batch.Queue("SELECT 1").QueryRow(func(pgx.Row) error { t.Error("called after an error"); return nil })
				},
				func(err error) bool { return errors.Is(err, mine) }, true,
			},
			"a function's own error that looks like a conflict and a denial": {
				func(batch *pgx.Batch) {
					batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error {
						return errors.Join(&pgconn.PgError{Code: "40001"}, &ratelimit.DeniedError{}, mine)
					})
				},
				func(err error) bool {
					return errors.Is(err, mine) && errors.Is(err, ratelimit.ErrUnknownOutcome) && !errors.As(err, new(*ratelimit.DeniedError))
				}, true,
			},
			"a function's own error of a call that was refused": {
				func(batch *pgx.Batch) {
					batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error {
						return fmt.Errorf("%w %w %w %w", ratelimit.ErrInvalid, ratelimit.ErrExceedsCapacity, ratelimit.ErrClosed, mine)
					})
				},
				func(err error) bool {
					return errors.Is(err, mine) && errors.Is(err, ratelimit.ErrUnknownOutcome) && !errors.Is(err, ratelimit.ErrInvalid) &&
						!errors.Is(err, ratelimit.ErrExceedsCapacity) && !errors.Is(err, ratelimit.ErrClosed)
				}, true,
			},
			"another call's refusal, then a refusal of the batch": {
				func(batch *pgx.Batch) {
					batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error { return errors.Join(&ratelimit.DeniedError{}, mine) })
					harness.Queue(t, &limiter, batch, limit.Key("k").Count(100))
				},
				func(err error) bool { return !errors.Is(err, mine) && harness.SQLState(err) == "PT429" }, false,
			},
			"a function's own error, then an error of the server": {
				func(batch *pgx.Batch) {
					batch.Queue("SELECT 1").Exec(func(pgconn.CommandTag) error { return mine })
					batch.Queue("INSERT INTO jobs VALUES ($1)", 1)
				},
				func(err error) bool { return !errors.Is(err, mine) && harness.SQLState(err) == "23505" }, false,
			},
		} {
			var batch pgx.Batch
			harness.Queue(t, &limiter, &batch, limit.Key("k"))
			row.queue(&batch)
			err := limiter.SendTx(t.Context(), pool, &batch)
			if !row.check(err) || harness.Denied(err) {
				t.Errorf("%s: %v", name, err)
			}
			if row.committed {
				left--
			}
			if got := harness.ReadBalance(t, &limiter, pool, limit.Key("k")); !harness.Near(got, left) && got-left > 0.1 {
				t.Errorf("%s: %v left, want %v", name, got, left)
			}
		}
		if n := harness.Jobs(t, pool, "count(*)"); n != 2 || pool.Stat().NewConnsCount() != 1 {
			t.Errorf("%d rows, %d connections", n, pool.Stat().NewConnsCount())
		}
	})
}

package integration_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// withEveryDriver runs a test on a pool of database/sql, and gives it a pgx pool to inspect the same schema. There is a
// table of business rows, as in newJobs. All connections must be returned at the end.
func withEveryDriver(t *testing.T, conns int, test func(t *testing.T, db *sql.DB, pool *pgxpool.Pool)) {
	t.Helper()
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			pool := newJobs(t, 4)
			test(t, openSQL(t, driver, pool.Config().ConnString(), conns), pool)
		})
	}
}

func TestInSQLTxRefusesWhatItCannotRun(t *testing.T) {
	t.Parallel()
	withEveryDriver(t, 1, func(t *testing.T, db *sql.DB, _ *pgxpool.Pool) {
		var limiter ratelimit.Limiter
		called := func(context.Context, *sql.Tx) error { t.Error("called"); return nil }
		for name, err := range map[string]error{
			"an unknown level":  limiter.InSQLTx(t.Context(), db, called, ratelimit.Isolation("chaos")),
			"no database":       limiter.InSQLTx(t.Context(), nil, called),
			"a nil database":    limiter.InSQLTx(t.Context(), (*sql.DB)(nil), called),
			"no function":       limiter.InSQLTx(t.Context(), db, nil),
			"a wrong hot limit": limiter.InSQLTx(t.Context(), db, called, ratelimit.Hot(ratelimit.Request{})),
		} {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

func TestHotOnDatabaseSQLEndsWithItsContext(t *testing.T) {
	t.Parallel()
	withEveryDriver(t, 2, func(t *testing.T, db *sql.DB, pool *pgxpool.Pool) {
		var limiter ratelimit.Limiter
		limit := ratelimit.TokenBucket("hot", 10, time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		err := limiter.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "INSERT INTO jobs VALUES (4)")
			cancel()
			eventually(t, "database/sql has rolled it back", func() bool { return db.Stats().InUse == 0 })
			return err
		}, ratelimit.Hot(limit.Global()))
		if !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrUnknownOutcome) || queued(&limiter) != 0 {
			t.Errorf("rolled back before COMMIT: %v, %d queues are left behind", err, queued(&limiter))
		}
		release := holdTurn(t, &ratelimit.Limiter{}, pool, limit.Global()) // of another process
		ctx, cancel = context.WithCancel(t.Context())
		errs := make(chan error, 3)
		for range 3 { // one waits in the process; two are past the queue, and one of these waits in the database
			go func() {
				errs <- limiter.InSQLTx(ctx, db, func(context.Context, *sql.Tx) error { t.Error("called"); return nil }, ratelimit.Hot(limit.Global()))
			}()
		}
		eventually(t, "two wait in the database", func() bool { return waitingForTurns(t, pool) == 2 })
		cancel()
		for range 3 {
			if err := <-errs; !errors.Is(err, context.Canceled) && sqlState(err) != "57014" {
				t.Errorf("in the queue: %v", err)
			}
		}
		eventually(t, "no connection is taken", func() bool { return db.Stats().InUse == 0 && waitingForTurns(t, pool) == 0 })
		release()
		nobodyQueues(t, &limiter, pool)
		if n := jobs(t, pool, "count(*)"); n != 2 {
			t.Errorf("%d rows: something was committed", n)
		}
	})
}

func TestHotOnDatabaseSQLSaysWhatTheSchemaLacks(t *testing.T) {
	t.Parallel()
	for _, driver := range drivers {
		db := openSQL(t, driver, newSchema(t), 1)
		limit := ratelimit.TokenBucket("hot", 10, time.Hour)
		var limiter ratelimit.Limiter
		err := limiter.InSQLTx(t.Context(), db, func(context.Context, *sql.Tx) error { t.Error("called"); return nil }, ratelimit.Hot(limit.Global()))
		if sqlState(err) != "42P01" || !strings.Contains(err.Error(), "rate_limits_turn_00 to _31") {
			t.Errorf("%s: %v", driver, err)
		}
		_, err = limiter.Consume(t.Context(), ratelimit.SQL(db), limit.Global())
		if sqlState(err) != "42883" || !strings.Contains(err.Error(), "has the schema of package migrations been migrated") {
			t.Errorf("%s: %v", driver, err)
		}
	}
}

// 64 goroutines, one key, 3 s: not one token too many. The test is not parallel: it needs the whole machine.
func TestDatabaseSQLIsExact(t *testing.T) {
	limit := ratelimit.TokenBucket("hot", perSecond, time.Second, ratelimit.Capacity(burst))
	for _, driver := range drivers {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable, "autocommit"} {
			t.Run(fmt.Sprint(driver, " ", level), func(t *testing.T) {
				t.Parallel()
				db := openSQL(t, driver, newMigrated(t), 16)
				var limiter ratelimit.Limiter
				hammer(t, func(ctx context.Context) (result ratelimit.Result, err error) {
					consume := func(ctx context.Context, db sqlQuerier) error {
						result, err = limiter.Consume(ctx, ratelimit.SQL(db), limit.Key("k"))
						return err
					}
					if level == "autocommit" {
						err = consume(ctx, db)
					} else {
						err = limiter.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error { return consume(ctx, tx) },
							ratelimit.Isolation(level), ratelimit.Attempts(1000))
					}
					return result, err
				}).exact(t, 0)
			})
		}
	}
}

// Outside a transaction, the answer arrives before the commit. The caller must get an error of the commit.
func TestDatabaseSQLNoticesACommitThatFails(t *testing.T) {
	t.Parallel()
	withEveryDriver(t, 1, func(t *testing.T, db *sql.DB, pool *pgxpool.Pool) {
		_, err := pool.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE integrity_constraint_violation; END $$;
			CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON rate_limits DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`)
		if err != nil {
			t.Fatal(err)
		}
		var limiter ratelimit.Limiter
		one, wide := ratelimit.TokenBucket("one", 10, time.Hour), ratelimit.TokenBucket("wide", 10, time.Hour, ratelimit.Shards(2))
		for _, requests := range [][]ratelimit.Request{{one.Key("k")}, {wide.Key("k")}, {one.Key("k"), wide.Key("k")}} {
			result, err := limiter.Consume(t.Context(), ratelimit.SQL(db), requests...)
			if sqlState(err) != "23000" || result.OK {
				t.Errorf("%+v, %v, want the error of the commit", result, err)
			}
		}
	})
}

func TestSQLRefusesWhatIsNoHandle(t *testing.T) {
	t.Parallel()
	var limiter ratelimit.Limiter
	limit := ratelimit.TokenBucket("messages", 10, time.Hour)
	for name, db := range map[string]ratelimit.DB{
		"nil": ratelimit.SQL(nil), "a nil *sql.DB": ratelimit.SQL((*sql.DB)(nil)), "a nil *sql.Tx": ratelimit.SQL((*sql.Tx)(nil)),
	} {
		if _, err := limiter.Consume(t.Context(), db, limit.Global()); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRetryRefusesWhatItCannotDo(t *testing.T) {
	t.Parallel()
	if err := new(ratelimit.Limiter).Retry(t.Context(), nil); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("%v", err)
	}
	// Retry does not begin the transaction, so their results do not compile with it.
	for _, option := range []any{ratelimit.Isolation, ratelimit.Hot} {
		if made := reflect.TypeOf(option).Out(0); made.AssignableTo(reflect.TypeFor[ratelimit.RetryOption]()) {
			t.Errorf("%v is an option of Retry", made)
		}
	}
}

// Connections are killed, contexts end and functions panic at random moments. A transaction is a row and its tokens: all or
// nothing, never twice, whatever its error. One that failed before COMMIT is not there. One that was acknowledged is.
func TestDatabaseSQLInChaos(t *testing.T) {
	t.Parallel()
	withEveryDriver(t, 5, func(t *testing.T, db *sql.DB, pool *pgxpool.Pool) {
		if _, err := pool.Exec(t.Context(), "CREATE TABLE orders (id int)"); err != nil {
			t.Fatal(err)
		}
		limiter := ratelimit.Limiter{Clock: func() time.Time { return noon }}
		const capacity = 1e6
		one, two := ratelimit.TokenBucket("one", capacity, time.Hour), ratelimit.FixedWindow("two", capacity, time.Hour)
		type outcome struct {
			acknowledged, committing bool
			err                      any
		}
		outcomes := map[int]outcome{}
		var mu sync.Mutex
		var wg, kills sync.WaitGroup
		r := newRand(t)
		begin := time.Now()
		for g := range 6 {
			r := rand.New(rand.NewPCG(r.Uint64(), 0))
			wg.Go(func() {
				for id := g; time.Since(begin) < *chaos; id += 6 {
					ctx, cancel := context.WithCancel(t.Context())
					if r.IntN(4) == 0 {
						ctx, cancel = context.WithTimeout(ctx, time.Duration(r.IntN(40_000_000)))
					}
					kill, after, abandon := r.IntN(6) == 0, time.Duration(r.IntN(20_000_000)), r.IntN(20) == 0
					kill = kill && !server.Pooled() // PgBouncer 1.18 crashes when a connection is killed while it is given to another client
					var options []ratelimit.TxOption
					if r.IntN(3) == 0 {
						options = append(options, ratelimit.Hot(one.Global()))
					}
					if r.IntN(3) == 0 {
						options = append(options, ratelimit.Isolation(pgx.ReadCommitted))
					}
					var o outcome
					func() {
						defer func() {
							if p := recover(); p != nil {
								o.err = p
							}
						}()
						err := limiter.InSQLTx(ctx, db, func(ctx context.Context, tx *sql.Tx) error {
							var pid int
							if err := tx.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
								return err
							}
							if kill {
								kill = false
								kills.Add(1)
								time.AfterFunc(after, func() {
									defer kills.Done()
									if _, err := pool.Exec(context.WithoutCancel(t.Context()), "SELECT pg_terminate_backend($1)", pid); err != nil {
										t.Error(err)
									}
								})
							}
							if _, err := tx.ExecContext(ctx, "INSERT INTO orders VALUES ($1)", id); err != nil {
								return err
							}
							if abandon {
								panic("abandoned")
							}
							_, err := limiter.Consume(ctx, ratelimit.SQL(tx), one.Global(), two.Global())
							return err
						}, options...)
						gaveUp := errors.Is(err, ratelimit.ErrAttemptsExhausted)
						o = outcome{err == nil, err != nil && !gaveUp && strings.HasPrefix(err.Error(), "ratelimit: commit: "), err}
					}()
					cancel()
					mu.Lock()
					outcomes[id] = o
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		kills.Wait()
		eventually(t, "no connection is taken", func() bool { return db.Stats().InUse == 0 })
		eventually(t, "no transaction is open", func() bool {
			var open bool
			err := pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'orders'::regclass AND pid <> pg_backend_pid())").Scan(&open)
			return err == nil && !open
		})
		nobodyQueues(t, &limiter, pool)

		rows, err := pool.Query(t.Context(), "SELECT id FROM orders")
		if err != nil {
			t.Fatal(err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil {
			t.Fatal(err)
		}
		times := map[int]int{}
		for _, id := range ids {
			times[id]++
		}
		acknowledged, failed := 0, 0
		for id, o := range outcomes {
			switch {
			case o.acknowledged:
				acknowledged++
			case !o.committing:
				failed++
			}
			if times[id] > 1 || o.acknowledged && times[id] == 0 || !o.acknowledged && !o.committing && times[id] > 0 {
				t.Errorf("order %d has %d rows: %v", id, times[id], o.err)
			}
		}
		t.Logf("%d orders: %d acknowledged, %d failed, %d unsure; %d have rows", len(outcomes), acknowledged, failed, len(outcomes)-acknowledged-failed, len(ids))
		if acknowledged == 0 || failed == 0 {
			t.Error("this test has not seen everything")
		}
		for _, b := range readBalances(t, &limiter, pool, one.Global(), two.Global()) {
			if want := capacity - float64(len(ids)); b.Remaining != want {
				t.Errorf("%s: %v left, want %v", b.Limit.Name(), b.Remaining, want)
			}
		}
	})
}

package tx_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// A conflict is met, or made by another transaction, in the first attempt. All is done once.
func TestATransactionRunsAgain(t *testing.T) {
	t.Parallel()
	harness.EveryTx(t, 4, func(t *testing.T, w harness.TxWay) {
		limit := ratelimit.TokenBucket("messages", 100, time.Hour)
		ofStatement := func(ctx context.Context, tx harness.Handle, key ratelimit.Request) error {
			if _, err := w.Limiter.Consume(ctx, w.Pool, key); err != nil {
				return err
			}
			_, err := w.Limiter.Consume(ctx, tx, key)
			return err
		}
		ran := 0
		for name, lose := range map[string]func(ctx context.Context, tx harness.Handle, key ratelimit.Request) error{
			"40001 of a statement":                     ofStatement,
			"40001 of a statement, in REPEATABLE READ": ofStatement,
			// Write skew: each transaction reads what the other writes. The other commits after this one's last statement.
			"40001 of COMMIT": func(ctx context.Context, tx harness.Handle, key ratelimit.Request) error {
				return pgx.BeginTxFunc(ctx, w.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(other pgx.Tx) error {
					if _, err := other.Exec(ctx, "SELECT done FROM jobs WHERE n = 2; UPDATE jobs SET done = done + 1 WHERE n = 1"); err != nil {
						return err
					}
					if _, err := tx.Exec(ctx, "UPDATE jobs SET done = done + 1 WHERE n = 2"); err != nil {
						return err
					}
					_, err := w.Limiter.Consume(ctx, tx, key)
					return err
				})
			},
			"a deadlock": func(ctx context.Context, tx harness.Handle, _ ratelimit.Request) error {
				_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE deadlock_detected; END $$")
				return err
			},
		} {
			var options []ratelimit.TxOption
			if strings.HasSuffix(name, "REPEATABLE READ") {
				if !w.Begins {
					continue
				}
				options = append(options, ratelimit.Isolation(pgx.RepeatableRead))
			}
			ran++
			var states []string
			w.Limiter.OnRetry = func(_ context.Context, attempt int, failed error) {
				states = append(states, fmt.Sprint(attempt, " ", harness.SQLState(failed)))
			}
			ofCommit, attempts := name == "40001 of COMMIT", 0
			err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
				attempts++
				if _, err := tx.Exec(ctx, "SELECT done FROM jobs WHERE n = 1"); err != nil { // takes the snapshot
					return err
				}
				if attempts == 1 {
					err := lose(ratelimit.OutsideTx(ctx), tx, limit.Key(name))
					if ofCommit {
						return err
					}
					return fmt.Errorf("wrapped: %w", err)
				}
				if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (3) ON CONFLICT (n) DO UPDATE SET done = jobs.done + 1"); err != nil {
					return err
				}
				_, err := w.Limiter.Consume(ctx, tx, limit.Key(name))
				return err
			}, options...)
			want := "1 40001"
			if name == "a deadlock" {
				want = "1 40P01"
			}
			if err != nil || attempts != 2 || !slices.Equal(states, []string{want}) {
				t.Errorf("%s: %d attempts, run again after %q: %v", name, attempts, states, err)
			}
			taken := 1.0
			if strings.HasPrefix(name, "40001 of a statement") {
				taken = 2 // one by the other
			}
			if left := harness.Remaining(t, w.Pool, limit.Key(name)); left < 100-taken || left > 100-taken+0.1 {
				t.Errorf("%s: %v tokens are left", name, left)
			}
		}
		if n := harness.Jobs(t, w.Pool, "sum(done)"); n != 1+ran-1 { // by the other of COMMIT, and by each but the one that inserted
			t.Errorf("done %d times, want what was lost rolled back", n)
		}
	})
}

// Two transactions lock two rows in turn. The server ends one of them, which runs again.
func TestADeadlockIsRetried(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.EveryTx(t, 4, func(t *testing.T, w harness.TxWay) {
		limit := ratelimit.TokenBucket("messages", 100, time.Hour)
		for level, options := range w.Levels() {
			for _, key := range []string{"a", "b"} {
				if _, err := w.Limiter.Consume(t.Context(), w.Pool, limit.Key(string(level), key)); err != nil {
					t.Fatal(err)
				}
			}
			var attempts, deadlocks atomic.Int64
			var ready, wg sync.WaitGroup
			ready.Add(2)
			for _, order := range [][2]string{{"a", "b"}, {"b", "a"}} { // in two calls, so the library cannot sort them
				wg.Go(func() {
					first := true
					err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
						attempts.Add(1)
						if _, err := w.Limiter.Consume(ctx, tx, limit.Key(string(level), order[0])); err != nil {
							return err
						}
						if first {
							first = false
							ready.Done()
							ready.Wait()
						}
						_, err := w.Limiter.Consume(ctx, tx, limit.Key(string(level), order[1]))
						if err != nil && harness.SQLState(err) == "40P01" {
							deadlocks.Add(1)
						}
						return err
					}, options...)
					if err != nil {
						t.Errorf("%s: %v", level, err)
					}
				})
			}
			wg.Wait()
			// Mostly there is one deadlock. But the loser may retry, and reach the row that it released before the transaction
			// that waits for it does. Above READ COMMITTED, an attempt may also end with 40001.
			if n := attempts.Load() - deadlocks.Load(); deadlocks.Load() < 1 || n < 2 || n > 2 && level == pgx.ReadCommitted {
				t.Errorf("%s: %d deadlocks, %d attempts", level, deadlocks.Load(), attempts.Load())
			}
			for _, key := range []string{"a", "b"} {
				if left := harness.Remaining(t, w.Pool, limit.Key(string(level), key)); left < 97 || left > 97.1 {
					t.Errorf("%s, %s: %v tokens left, want 97", level, key, left)
				}
			}
		}
	})
}

func TestATransactionGivesUpAndSaysHowManyAttemptsItTook(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.EveryTx(t, 1, func(t *testing.T, w harness.TxWay) {
		for bound, want := range map[int]int{-1: 1, 0: 1, 1: 1, 4: 4} {
			attempts := 0
			err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
				attempts++
				if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (3)"); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
				return err
			}, ratelimit.Attempts(bound))
			if !harness.GaveUpAfter(err, want) || attempts != want || harness.SQLState(err) != "40001" {
				t.Errorf("Attempts(%d): %d attempts, %v", bound, attempts, err)
			}
		}
		if n := harness.Jobs(t, w.Pool, "count(*)"); n != 2 {
			t.Errorf("%d rows: something was committed", n)
		}
	})
}

func TestATransactionRollsBackOnPanicAndGoexit(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.EveryTx(t, 1, func(t *testing.T, w harness.TxWay) {
		limit := ratelimit.TokenBucket("messages", 1, 1000*time.Hour)
		var options []ratelimit.TxOption
		if w.Begins {
			options = append(options, ratelimit.Hot(limit.Key("ann")))
		}
		for name, end := range map[string]func(){"panic": func() { panic("a bug") }, "Goexit": runtime.Goexit} {
			for range 3 { // more than the queue lets through
				done := make(chan any)
				go func() {
					defer func() { done <- recover() }()
					_ = w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
						if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (3)"); err != nil {
							t.Error(err)
						}
						if _, err := w.Limiter.Consume(ctx, tx, limit.Key("ann")); err != nil {
							t.Error(err)
						}
						end()
						return nil
					}, options...)
				}()
				if got := <-done; (got == "a bug") != (name == "panic") {
					t.Errorf("%s: recovered %v", name, got)
				}
			}
			if n := w.InUse(); n != 0 {
				t.Errorf("%s: %d connections are still taken", name, n)
			}
			if n := harness.Queued(w.Limiter); n != 0 {
				t.Errorf("%s: %d queues are left behind", name, n)
			}
			holdTurn(t, w.Limiter, w.Pool, limit.Key("ann"))()
		}
		if n := harness.Jobs(t, w.Pool, "count(*)"); n != 2 {
			t.Errorf("%d rows, want it rolled back", n)
		}
		if left := harness.Remaining(t, w.Pool, limit.Key("ann")); left != 1 {
			t.Errorf("%v tokens are left, want 1", left)
		}
	})
}

func TestATransactionRunsAtItsLevel(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.EveryBegunTx(t, 1, func(t *testing.T, w harness.TxWay) {
		limit := ratelimit.TokenBucket("messages", 100, 1000*time.Hour)
		calls := 0.0
		for _, options := range [][]ratelimit.TxOption{nil, {ratelimit.Hot(limit.Global())}, {ratelimit.Attempts(2)}} {
			run := func(want string, options ...ratelimit.TxOption) {
				t.Helper()
				calls++
				var level string
				err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
					if err := tx.QueryRow(ctx, "SHOW transaction_isolation").Scan(&level); err != nil {
						return err
					}
					_, err := w.Limiter.Consume(ctx, tx, limit.Global())
					return err
				}, options...)
				if err != nil || level != want {
					t.Errorf("level %q, %v, want %q", level, err, want)
				}
			}
			run("serializable", options...)
			for _, level := range harness.Levels {
				run(string(level), append(slices.Clone(options), ratelimit.Isolation(level))...)
			}
		}
		if left := harness.Remaining(t, w.Pool, limit.Global()); left < 100-calls || left > 100-calls+0.1 {
			t.Errorf("%v tokens left after %v calls", left, calls)
		}
	})
}

func TestATransactionEndsWithItsContext(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.EveryTx(t, 4, func(t *testing.T, w harness.TxWay) {
		reason := errors.New("the caller went home")
		attempts := 0
		for name, run := range map[string]func(ctx context.Context, cancel func(), tx harness.Handle) error{
			"before it begins": nil,
			"in a statement": func(ctx context.Context, cancel func(), tx harness.Handle) error {
				time.AfterFunc(50*time.Millisecond, cancel)
				_, err := tx.Exec(ctx, "SELECT pg_sleep(20)")
				return err
			},
			"between statements": func(ctx context.Context, cancel func(), tx harness.Handle) error {
				cancel()
				_, err := tx.Exec(ctx, "SELECT 1")
				return err
			},
			"before COMMIT": func(_ context.Context, cancel func(), _ harness.Handle) error {
				cancel()
				return nil
			},
			"during a pause": func(ctx context.Context, cancel func(), tx harness.Handle) error {
				if attempts == 2 {
					defer cancel()
				}
				_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
				return err
			},
			"in the third attempt": func(ctx context.Context, cancel func(), tx harness.Handle) error {
				if attempts == 3 {
					cancel()
				}
				_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE serialization_failure; END $$")
				return err
			},
		} {
			ctx, cancel := context.WithCancelCause(t.Context())
			if run == nil {
				cancel(reason)
			}
			attempts = 0
			err := w.In(ctx, func(ctx context.Context, tx harness.Handle) error {
				attempts++
				if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (4)"); err != nil {
					return err
				}
				return run(ctx, func() { cancel(reason) }, tx)
			})
			switch {
			case !w.Begins && name == "before COMMIT" && errors.Is(err, sql.ErrTxDone): // database/sql was faster: it rolls back when ctx ends
			case errors.Is(err, ratelimit.ErrUnknownOutcome), !errors.Is(err, context.Canceled) && harness.SQLState(err) != "57014": // lib/pq returns the server's error for a canceled statement
				t.Errorf("%s: %v", name, err)
			case name == "during a pause" && (!harness.GaveUpAfter(err, 2) || !errors.Is(err, reason) || harness.SQLState(err) != "40001"),
				name == "in the third attempt" && w.Begins && (!harness.GaveUpAfter(err, 3) || harness.SQLState(err) != "40001"):
				t.Errorf("%s: %v, want the attempts, with the cancellation and the conflict", name, err)
			}
			harness.Eventually(t, "no connection is taken "+name, func() bool { return w.InUse() == 0 })
			cancel(nil)
		}
		if n := harness.Jobs(t, w.Pool, "count(*)"); n != 2 {
			t.Errorf("%d rows: something was committed", n)
		}
	})
}

func TestATransactionReturnsOtherErrorsAsTheyAre(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.EveryTx(t, 1, func(t *testing.T, w harness.TxWay) {
		limit := ratelimit.TokenBucket("messages", 1, time.Hour)
		if _, err := w.Limiter.Consume(t.Context(), w.Pool, limit.Key("denied")); err != nil {
			t.Fatal(err)
		}
		mine := errors.New("mine")
		for name, row := range map[string]struct {
			then  func(ctx context.Context, tx harness.Handle) error
			check func(err error) bool
		}{
			"its own error": {
				func(context.Context, harness.Handle) error { return mine },
				func(err error) bool { return err == mine }, //nolint:errorlint // it must not be wrapped
			},
			"a wrapped error": {
				func(context.Context, harness.Handle) error { return fmt.Errorf("what I did: %w", mine) },
				func(err error) bool { return errors.Is(err, mine) && err.Error() == "what I did: mine" },
			},
			"a denial": { // it leaves the transaction usable
				func(ctx context.Context, tx harness.Handle) error {
					_, err := w.Limiter.Consume(ctx, tx, limit.Key("denied"))
					var one int
					return errors.Join(err, tx.QueryRow(ctx, "SELECT 1").Scan(&one))
				},
				func(err error) bool { return harness.Denied(err) && harness.SQLState(err) == "" },
			},
			"a unique violation": {
				func(ctx context.Context, tx harness.Handle) error {
					_, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (1)")
					return err
				},
				func(err error) bool { return harness.SQLState(err) == "23505" },
			},
			"a conflict that it hid": {
				func(context.Context, harness.Handle) error {
					return errors.New((&pgconn.PgError{Code: "40001"}).Error())
				},
				func(err error) bool { return err != nil && !errors.Is(err, ratelimit.ErrAttemptsExhausted) },
			},
		} {
			attempts := 0
			err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
				attempts++
				if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES (3)"); err != nil {
					return err
				}
				if _, err := w.Limiter.Consume(ctx, tx, limit.Key("rolled back")); err != nil {
					return err
				}
				return row.then(ctx, tx)
			})
			if !row.check(err) || attempts != 1 {
				t.Errorf("%s: %d attempts, %v", name, attempts, err)
			}
			if n := harness.Jobs(t, w.Pool, "count(*)"); n != 2 {
				t.Errorf("%s: %d rows, want it rolled back", name, n)
			}
			if left := harness.Remaining(t, w.Pool, limit.Key("rolled back")); left != 1 {
				t.Errorf("%s: the tokens did not come back: %v are there", name, left)
			}
		}
	})
}

// What the function has committed itself is not run again, whatever it returns.
func TestATransactionThatItsFunctionEndsIsNotRunAgain(t *testing.T) {
	t.Parallel()
	harness.EveryBegunTx(t, 1, func(t *testing.T, w harness.TxWay) {
		mine := errors.New("mine")
		conflict := &pgconn.PgError{Code: "40001"}
		limit := ratelimit.TokenBucket("messages", 100, 24*time.Hour)
		commit := func(ctx context.Context, tx harness.Handle) error {
			if db, ok := tx.(harness.SQLDB); ok {
				return db.On.(*sql.Tx).Commit()
			}
			return tx.(pgx.Tx).Commit(ctx)
		}
		byText := func(ctx context.Context, tx harness.Handle) error { _, err := tx.Exec(ctx, "COMMIT"); return err }
		left := 100.0
		for _, row := range []struct {
			name    string
			end     func(ctx context.Context, tx harness.Handle) error
			returns error
		}{
			{"a conflict", commit, conflict}, {"its own error", commit, mine}, {"a denial", commit, &ratelimit.DeniedError{}},
			{"a conflict after COMMIT as text", byText, conflict}, // the last one: lib/pq gives the connection up
		} {
			name, attempts := row.name, 0
			err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
				attempts++
				_, err := w.Limiter.Consume(ctx, tx, limit.Key("a"))
				return errors.Join(err, row.end(ctx, tx), row.returns)
			})
			if !errors.Is(err, ratelimit.ErrUnknownOutcome) || errors.Is(err, ratelimit.ErrAttemptsExhausted) || harness.Denied(err) || attempts != 1 {
				t.Errorf("%s: %d attempts, %v", name, attempts, err)
			}
			if errors.Is(row.returns, mine) && !errors.Is(err, mine) {
				t.Errorf("%s: %v", name, err)
			}
			left--
			if got := harness.Remaining(t, w.Pool, limit.Key("a")); got < left || got > left+0.5 {
				t.Errorf("%s: %v left, want %v", name, got, left)
			}
		}
	})
}

// A limit and a business row, many transactions at once on few connections: each is all there or not at all, and none is lost.
func TestTransactionsUnderContentionKeepEverythingTogether(t *testing.T) {
	t.Parallel()
	harness.EveryTx(t, 4, func(t *testing.T, w harness.TxWay) {
		w.Limiter.Clock = func() time.Time { return harness.Noon }
		for level, options := range w.Levels() {
			limit := ratelimit.TokenBucket("jobs at "+string(level), 20, time.Hour)
			harness.MustExec(t, w.Pool, "TRUNCATE jobs")
			var granted, refused atomic.Int64
			var wg sync.WaitGroup
			for g := range 8 {
				wg.Go(func() {
					for i := range 5 {
						err := w.In(t.Context(), func(ctx context.Context, tx harness.Handle) error {
							if _, err := tx.Exec(ctx, "INSERT INTO jobs VALUES ($1)", 10*g+i); err != nil {
								return err
							}
							_, err := w.Limiter.Consume(ctx, tx, limit.Global())
							return err
						}, append(options, ratelimit.Attempts(1000))...)
						switch {
						case err == nil:
							granted.Add(1)
						case harness.Denied(err):
							refused.Add(1)
						default:
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if n := harness.Jobs(t, w.Pool, "count(*)"); granted.Load() != 20 || refused.Load() != 20 || n != 20 {
				t.Errorf("%s: %d granted, %d denied, %d rows, want 20 each", level, granted.Load(), refused.Load(), n)
			}
		}
	})
}

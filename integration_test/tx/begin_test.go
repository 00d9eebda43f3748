package tx_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// firstStatements are the possible first statements of a function for InTx: everything that a pgx.Tx can do, and the verbs.
var firstStatements = map[string]func(ctx context.Context, tx pgx.Tx) error{
	"Consume": func(ctx context.Context, tx pgx.Tx) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, tx, firstLimit.Key("a"))
		return err
	},
	"Consume of several": func(ctx context.Context, tx pgx.Tx) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, tx, firstLimit.Key("a"), firstLimit.Key("b"))
		return err
	},
	"Consume on a wrapper": func(ctx context.Context, tx pgx.Tx) error {
		_, err := new(ratelimit.Limiter).Consume(ctx, struct{ pgx.Tx }{tx}, firstLimit.Key("a"))
		return err
	},
	"a denial": func(ctx context.Context, tx pgx.Tx) error {
		limiter := ratelimit.Limiter{Clock: func() time.Time { return harness.Noon }}
		if _, err := limiter.Consume(ctx, tx, firstLimit.Key("denied").Count(10)); err != nil {
			return err
		}
		if _, err := limiter.Consume(ctx, tx, firstLimit.Key("denied")); !harness.Denied(err) {
			return errors.New("not denied")
		}
		return nil
	},
	"Check": func(ctx context.Context, tx pgx.Tx) error {
		_, err := new(ratelimit.Limiter).Check(ctx, tx, firstLimit.Key("a"))
		return err
	},
	"Reset": func(ctx context.Context, tx pgx.Tx) error {
		return new(ratelimit.Limiter).Reset(ctx, tx, firstLimit.Key("a"))
	},
	"QueueConsume": func(ctx context.Context, tx pgx.Tx) error {
		var batch pgx.Batch
		if _, err := new(ratelimit.Limiter).QueueConsume(ctx, &batch, firstLimit.Key("a")); err != nil {
			return err
		}
		return tx.SendBatch(ctx, &batch).Close()
	},
	"Exec": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT 1")
		return err
	},
	"Query": func(ctx context.Context, tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, "SELECT $1::int", 1)
		_, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int])
		return err
	},
	"QueryRow": func(ctx context.Context, tx pgx.Tx) error {
		return tx.QueryRow(ctx, "SELECT $1::int", pgx.QueryExecModeExec, 1).Scan(new(int))
	},
	"CopyFrom": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"stored"}, []string{"by"}, pgx.CopyFromRows([][]any{{"copy"}}))
		return err
	},
	"Prepare": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Prepare(ctx, "", "SELECT 1")
		return err
	},
	"Begin": func(ctx context.Context, tx pgx.Tx) error {
		nested, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		return nested.Commit(ctx)
	},
	"LargeObjects": func(ctx context.Context, tx pgx.Tx) error {
		lo := tx.LargeObjects()
		oid, err := lo.Create(ctx, 0)
		if err != nil {
			return err
		}
		return lo.Unlink(ctx, oid)
	},
	"Conn": func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Conn().Exec(ctx, "SELECT 1")
		return err
	},
	"none": func(context.Context, pgx.Tx) error { return nil },
}

var firstLimit = ratelimit.TokenBucket("first", 10, time.Hour)

// The first statement, whatever it is, runs in the transaction, at its level. It is committed or rolled back with the rest.
func TestInTxBeginsWithTheFirstStatement(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.InQueryModes(t, harness.NewPool, func(t *testing.T, pool *pgxpool.Pool) {
		harness.MustExec(t, pool, "CREATE TABLE stored (by text)")
		stop := errors.New("stop")
		for name, first := range firstStatements {
			for _, options := range [][]ratelimit.TxOption{
				{ratelimit.Isolation(pgx.RepeatableRead)},
				{ratelimit.Isolation(pgx.RepeatableRead), ratelimit.Hot(firstLimit.Global())},
			} {
				for _, end := range []error{nil, stop} {
					var limiter ratelimit.Limiter
					err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
						if err := first(ctx, tx); err != nil {
							t.Errorf("%s: %v", name, err)
						}
						var level string
						if err := tx.QueryRow(ctx, "SHOW transaction_isolation").Scan(&level); err != nil || level != string(pgx.RepeatableRead) {
							t.Errorf("%s: in a transaction at level %q: %v", name, level, err)
						}
						if _, err := tx.Exec(ctx, "INSERT INTO stored VALUES ($1)", name); err != nil {
							t.Errorf("%s: %v", name, err)
						}
						return end
					}, options...)
					if !errors.Is(err, end) {
						t.Errorf("%s: %v, want %v", name, err, end)
					}
					var stored, consumed int
					if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM stored WHERE by IN ($1, 'copy')),
							(SELECT count(*) FROM ratelimit.limits)`, name).Scan(&stored, &consumed); err != nil {
						t.Fatal(err)
					}
					committed := end == nil
					if (stored > 0) != committed || consumed > 0 && !committed {
						t.Errorf("%s, ended with %v: %d rows and %d limits are stored", name, end, stored, consumed)
					}
					harness.MustExec(t, pool, "TRUNCATE stored, ratelimit.limits")
				}
			}
		}
		if n := pool.Stat().NewConnsCount(); n != 1 {
			t.Errorf("%d connections were made, want one", n)
		}
	})
}

// A limit as the first statement costs no extra round trip, with the queue and without it.
func TestTheFirstLimitIsSentWithBegin(t *testing.T) {
	t.Parallel()
	harness.NeedsMode(t, pgx.QueryExecModeCacheStatement)
	var n atomic.Int64
	var written atomic.Bool
	pool := harness.Reconfigured(t, harness.NewPool(t, 1), func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		harness.WrapConns(c, func(conn net.Conn) net.Conn { return trips{conn, &n, &written} })
	})
	for _, options := range [][]ratelimit.TxOption{nil, {ratelimit.Hot(firstLimit.Key("a"))}} {
		for _, row := range []struct {
			first string
			want  int64
		}{{"Consume", 2}, {"Consume of several", 2}, {"Check", 2}, {"Reset", 2}, {"Consume on a wrapper", 3}, {"Exec", 3}, {"none", 2}} {
			var limiter ratelimit.Limiter
			run := func() {
				t.Helper()
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { return firstStatements[row.first](ctx, tx) }, options...)
				if err != nil {
					t.Error(err)
				}
			}
			run() // this prepares the statements
			before := n.Load()
			run()
			if n := n.Load() - before; n != row.want {
				t.Errorf("%s, %d options: %d round trips with COMMIT, want %d", row.first, len(options), n, row.want)
			}
		}
	}
}

// refusingBegin makes another pool for the same database, whose server finds a syntax error in each BEGIN of InTx.
func refusingBegin(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	return harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
		harness.WrapConns(c, func(conn net.Conn) net.Conn { return misspelling{conn} })
	})
}

type misspelling struct{ net.Conn }

func (c misspelling) Write(b []byte) (int, error) {
	return c.Conn.Write(bytes.ReplaceAll(b, []byte("level serializable"), []byte("level no serialize")))
}

// A transaction does not begin. No statement runs outside it, and InTx returns the cause, even if fn does not.
func TestInTxWhoseTransactionDoesNotBegin(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.InQueryModes(t, harness.NewPool, func(t *testing.T, pool *pgxpool.Pool) {
		pool = refusingBegin(t, pool)
		harness.MustExec(t, pool, "CREATE TABLE stored (by text)")
		for name, first := range firstStatements {
			for _, returned := range []func(err error) error{
				func(err error) error { return err },
				func(error) error { return nil },
				func(error) error { return errors.New("another") },
			} {
				var limiter ratelimit.Limiter
				err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					err := first(ctx, tx)
					if err == nil && name != "none" {
						t.Errorf("%s: no error", name)
					}
					if _, err := tx.Exec(ctx, "INSERT INTO stored VALUES ('outside')"); err == nil {
						t.Errorf("%s: a later statement has no error", name)
					}
					if _, err := tx.Conn().Exec(ctx, "INSERT INTO stored VALUES ('outside')"); err == nil {
						t.Errorf("%s: a statement on its connection has no error", name)
					}
					return returned(err)
				})
				if harness.SQLState(err) != "42601" || !strings.HasPrefix(err.Error(), "ratelimit: ") || !strings.Contains(err.Error(), "begin: ") {
					t.Errorf("%s: %v, want the server's syntax error", name, err)
				}
			}
		}
		var n int
		if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM stored").Scan(&n); err != nil || n != 0 {
			t.Errorf("%d rows were stored, %v", n, err)
		}
	})
}

// If the context of a first statement is over, the next statement begins the transaction.
func TestAFirstStatementThatIsNotSent(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, first := range firstStatements {
		var limiter ratelimit.Limiter
		err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			if err := first(over, tx); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", name, err)
			}
			return tx.QueryRow(ctx, "SELECT 1").Scan(new(int))
		})
		if err != nil {
			t.Errorf("%s: %v, want what follows to be committed", name, err)
		}
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were made, want one", n)
	}
}

// A caller that keeps a transaction that did not begin cannot use its connection, which goes back to the pool.
func TestATransactionThatIsKeptClosesNoConnection(t *testing.T) {
	t.Parallel()
	pool := refusingBegin(t, harness.NewPool(t, 1))
	var limiter ratelimit.Limiter
	var kept pgx.Tx
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		kept = tx
		_, err := tx.Exec(ctx, "SELECT 1")
		return err
	})
	if harness.SQLState(err) != "42601" {
		t.Fatalf("%v, want the server's syntax error", err)
	}
	if kept.Conn().IsClosed() {
		t.Error("it closed the connection")
	}
}

// Even if fn hides that its connection broke, InTx knows that nothing was committed.
func TestInTxWhoseConnectionBrokeBeforeCommit(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	for name, db := range map[string]harness.TxBeginner{"pool": pool, "connection": harness.Acquire(t, pool)} {
		var limiter ratelimit.Limiter
		err := limiter.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
			if _, err := limiter.Consume(ctx, tx, firstLimit.Key("a")); err != nil {
				return err
			}
			_, _ = tx.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
			return nil
		})
		if err == nil || errors.Is(err, ratelimit.ErrUnknownOutcome) {
			t.Errorf("%s: %v, want an error whose outcome is known", name, err)
		}
	}
	result, err := new(ratelimit.Limiter).Check(t.Context(), pool, firstLimit.Key("a"))
	if err != nil || result.Requests[0].Remaining != 10 {
		t.Errorf("%+v, %v, want 10 remaining", result, err)
	}
	// This does not hold if fn has committed, which it should not.
	var limiter ratelimit.Limiter
	err = limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(tx.Commit(ctx), tx.Conn().Close(ctx))
	})
	if !errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("%v, want ErrUnknownOutcome", err)
	}
}

// If a function is missing in the schema, InTx returns Consume's error as fn does. Later statements do not run.
func TestInTxWithoutTheSchema(t *testing.T) {
	t.Parallel()
	harness.InQueryModes(t, harness.NewUnmigrated, func(t *testing.T, pool *pgxpool.Pool) {
		var limiter ratelimit.Limiter
		mine := errors.New("mine")
		for _, hide := range []bool{false, true} {
			err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := limiter.Consume(ctx, tx, firstLimit.Key("a"))
				if _, err := tx.Exec(ctx, "CREATE TABLE outside ()"); err == nil {
					t.Error("a later statement has no error")
				}
				if hide {
					return nil
				}
				return errors.Join(mine, err)
			})
			if hide {
				if err == nil || errors.Is(err, ratelimit.ErrUnknownOutcome) {
					t.Errorf("hidden: %v", err)
				}
			} else if !errors.Is(err, mine) || harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "been migrated") {
				t.Errorf("%v", err)
			}
		}
		if _, err := pool.Exec(t.Context(), "SELECT FROM outside"); harness.SQLState(err) != "42P01" {
			t.Errorf("%v, want an undefined table", err)
		}
	})
}

// A function that has sent nothing can roll back, as deferred rollbacks do, and return its own error.
func TestInTxOfAFunctionThatRollsBackItself(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	var limiter ratelimit.Limiter
	mine := errors.New("mine")
	var kept pgx.Tx
	err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		kept = tx
		defer tx.Rollback(ctx)
		return mine
	})
	if err != mine { //nolint:errorlint // it must not be wrapped
		t.Errorf("%v, want it as it is", err)
	}
	for range 2 {
		if _, err := kept.Exec(t.Context(), "SELECT 1"); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("the transaction is over: %v", err)
		}
		if _, err := limiter.Consume(t.Context(), kept, firstLimit.Key("a")); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("the transaction is over: %v", err)
		}
		err = limiter.InTx(t.Context(), pool, func(_ context.Context, tx pgx.Tx) error { kept = tx; return nil })
		if err != nil {
			t.Error(err)
		}
	}
	err = limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) })
	if !errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
		t.Errorf("a transaction that was rolled back by hand: %v, want that nothing is committed", err)
	}
	// So it is after a statement, and on a connection; the row of a commit by hand is there.
	attempts := 0
	ended := func(db interface {
		BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	}, end func(ctx context.Context, tx pgx.Tx) error,
	) error {
		return limiter.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
			attempts++
			if _, err := limiter.Consume(ctx, tx, firstLimit.Key("by hand")); err != nil {
				return err
			}
			return end(ctx, tx)
		})
	}
	rollBack := func(ctx context.Context, tx pgx.Tx) error { defer tx.Rollback(ctx); return tx.Rollback(ctx) }
	commit := func(ctx context.Context, tx pgx.Tx) error { defer tx.Rollback(ctx); return tx.Commit(ctx) }
	onConn := func(end func(ctx context.Context, tx pgx.Tx) error) (err error) {
		conn, acquireErr := pool.Acquire(t.Context())
		if acquireErr != nil {
			t.Fatal(acquireErr)
		}
		defer conn.Release()
		return ended(conn, end)
	}
	for what, err := range map[string]error{"pool": ended(pool, rollBack), "connection": onConn(rollBack)} {
		if !errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, ratelimit.ErrUnknownOutcome) {
			t.Errorf("%s, rolled back by hand: %v, want that nothing is committed", what, err)
		}
	}
	if rows := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.limits WHERE key = 'by hand'"); rows != 0 {
		t.Errorf("%d rows after rollbacks", rows)
	}
	for what, err := range map[string]error{"pool": ended(pool, commit), "connection": onConn(commit)} {
		if !errors.Is(err, ratelimit.ErrUnknownOutcome) || errors.Is(err, pgx.ErrTxCommitRollback) {
			t.Errorf("%s, committed by hand: %v, want an unknown outcome", what, err)
		}
	}
	if rows := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.limits WHERE key = 'by hand'"); rows != 1 || attempts != 4 {
		t.Errorf("%d rows after commits, %d attempts", rows, attempts)
	}
	// Nobody can tell which statement it was.
	for _, text := range []string{"ROLLBACK", "COMMIT"} {
		byText := func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, text)
			return err
		}
		for what, err := range map[string]error{"pool": ended(pool, byText), "connection": onConn(byText)} {
			if !errors.Is(err, ratelimit.ErrUnknownOutcome) {
				t.Errorf("%s, %s as text: %v, want an unknown outcome", what, text, err)
			}
		}
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were made, want one", n)
	}
}

// A conflict at the first statement does not make its queries be prepared again.
func TestConflictsAtTheFirstStatementPrepareNothing(t *testing.T) {
	t.Parallel()
	harness.NeedsMode(t, pgx.QueryExecModeCacheStatement)
	var sent bytes.Buffer
	pool := harness.NewPool(t, 1)
	conn := harness.Reconfigured(t, pool, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		harness.WrapConns(c, func(conn net.Conn) net.Conn { return tapped{conn, &sent} })
	})
	harness.MustExec(t, pool, `CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE serialization_failure; END $$;
		CREATE TRIGGER conflict BEFORE INSERT ON ratelimit.limits FOR EACH ROW WHEN (NEW.key = 'conflict') EXECUTE FUNCTION conflict()`)
	var limiter ratelimit.Limiter
	consume := func(key string) error {
		return limiter.InTx(t.Context(), conn, func(ctx context.Context, tx pgx.Tx) error {
			_, err := limiter.Consume(ctx, tx, firstLimit.Key(key))
			return err
		}, ratelimit.Attempts(4))
	}
	if err := consume("a"); err != nil { // this prepares the statement
		t.Fatal(err)
	}
	if !bytes.Contains(sent.Bytes(), []byte("ratelimit._wire_consume(")) {
		t.Fatal("the tap does not see a query that is prepared")
	}
	sent.Reset()
	if err := consume("conflict"); !errors.Is(err, ratelimit.ErrAttemptsExhausted) || harness.SQLState(err) != "40001" {
		t.Errorf("%v, want four attempts that conflict", err)
	}
	if err := consume("b"); err != nil {
		t.Error(err)
	}
	if sent := sent.Bytes(); bytes.Contains(sent, []byte("ratelimit._wire_consume(")) {
		t.Errorf("prepared again: %q", sent)
	}
}

// tapped keeps the sent bytes. One goroutine at a time may use it.
type tapped struct {
	net.Conn
	sent *bytes.Buffer
}

func (c tapped) Write(b []byte) (int, error) {
	return io.MultiWriter(c.sent, c.Conn).Write(b)
}

// ownHandle is a type that InTx does not know.
type ownHandle struct{ *pgxpool.Pool }

func TestInTxOnAHandleOfTheCallersOwn(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 3)
	var limiter ratelimit.Limiter
	db := ownHandle{pool}
	release := holdTurn(t, &limiter, db, firstLimit.Global())
	var other ratelimit.Limiter // another process
	done := make(chan error, 1)
	go func() {
		done <- other.InTx(t.Context(), db, func(ctx context.Context, tx pgx.Tx) error {
			_, err := other.Consume(ctx, tx, firstLimit.Global())
			return err
		}, ratelimit.Hot(firstLimit.Global()))
	}()
	harness.Eventually(t, "the other waits in the database", func() bool { return waitingForTurns(t, pool) == 1 })
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	err := limiter.InTx(t.Context(), ownHandle{harness.Connect(t, harness.NewDatabase(t), 1)}, nothing, ratelimit.Hot(firstLimit.Global()))
	if harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "with a turn on first") {
		t.Errorf("%v, want that there are no views", err)
	}
}

// A caller that has the connection may use it beside tx. What fn does there is in the transaction, and BEGIN on it is
// refused.
func TestInTxOnAConnectionBeginsBeforeTheFunction(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	harness.MustExec(t, pool, "CREATE TABLE stored (by text)")
	conn := harness.Acquire(t, pool)
	var limiter ratelimit.Limiter
	stop := errors.New("stop")
	err := limiter.InTx(t.Context(), conn, func(ctx context.Context, _ pgx.Tx) error {
		if err := limiter.InTx(ctx, conn, nothing); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("another transaction on the connection: %v", err)
		}
		if _, err := conn.Exec(ctx, "INSERT INTO stored VALUES ('beside')"); err != nil {
			t.Error(err)
		}
		return stop
	})
	if !errors.Is(err, stop) {
		t.Error(err)
	}
	var n int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM stored").Scan(&n); err != nil || n != 0 {
		t.Errorf("%d rows of the rolled back transaction are left, %v", n, err)
	}
	conn = harness.Acquire(t, refusingBegin(t, pool))
	err = limiter.InTx(t.Context(), conn, func(context.Context, pgx.Tx) error { t.Error("called"); return nil })
	if harness.SQLState(err) != "42601" {
		t.Errorf("%v, want the server's syntax error", err)
	}
}

package integration_test

import (
	"context"
	"database/sql"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

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

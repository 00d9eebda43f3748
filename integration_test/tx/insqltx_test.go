package tx_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// withEveryDriver runs a test with each driver, on a pool of one connection to a migrated schema.
func withEveryDriver(t *testing.T, test func(t *testing.T, db *sql.DB)) {
	t.Helper()
	for _, driver := range harness.Drivers {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			test(t, harness.OpenSQL(t, driver, harness.NewMigrated(t), 1))
		})
	}
}

func TestHotOnDatabaseSQLSaysWhatTheSchemaLacks(t *testing.T) {
	t.Parallel()
	for _, driver := range harness.Drivers {
		db := harness.OpenSQL(t, driver, harness.NewDatabase(t), 1)
		limit := ratelimit.TokenBucket("hot", 10, time.Hour)
		var limiter ratelimit.Limiter
		err := limiter.InSQLTx(t.Context(), db, func(context.Context, *sql.Tx) error { t.Error("called"); return nil }, ratelimit.Hot(limit.Global()))
		if harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "ratelimit.turn_00 to _31") {
			t.Errorf("%s: %v", driver, err)
		}
		_, err = limiter.Consume(t.Context(), ratelimit.SQL(db), limit.Global())
		if harness.SQLState(err) != "3F000" || !strings.Contains(err.Error(), "has the schema of package migrations been migrated") {
			t.Errorf("%s: %v", driver, err)
		}
	}
}

// Outside a transaction, the answer arrives before the commit. The caller must get an error of the commit.
func TestDatabaseSQLNoticesACommitThatFails(t *testing.T) {
	t.Parallel()
	withEveryDriver(t, func(t *testing.T, db *sql.DB) {
		_, err := db.ExecContext(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE integrity_constraint_violation; END $$;
			CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON ratelimit.limits DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`)
		if err != nil {
			t.Fatal(err)
		}
		var limiter ratelimit.Limiter
		one, wide := ratelimit.TokenBucket("one", 10, time.Hour), ratelimit.TokenBucket("wide", 10, time.Hour, ratelimit.Shards(2))
		for _, requests := range [][]ratelimit.Request{{one.Key("k")}, {wide.Key("k")}, {one.Key("k"), wide.Key("k")}} {
			result, err := limiter.Consume(t.Context(), ratelimit.SQL(db), requests...)
			if harness.SQLState(err) != "23000" || result.OK {
				t.Errorf("%+v, %v, want the error of the commit", result, err)
			}
		}
	})
}

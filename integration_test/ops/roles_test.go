package ops_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// everyVerb uses every path of the limiter once, and returns the outcomes. It needs the rows of seed.
func everyVerb(t *testing.T, db ratelimit.DB) map[string]error {
	t.Helper()
	limiter, clock := harness.NewLimiter()
	other := &ratelimit.Limiter{Clock: clock.Now} // of another version, whose limits have other shards
	bucket := ratelimit.TokenBucket("bucket", 10, time.Minute)
	window := ratelimit.FixedWindow("window", 10, time.Minute)
	wide := ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(3))
	ctx := t.Context()
	only := func(_ ratelimit.Result, err error) error { return err }
	sweep := func() error { // deletes a row that nothing else uses
		later := ratelimit.Limiter{Clock: func() time.Time { return clock.At.Add(1000 * time.Hour) }}
		_, err := later.Sweep(ctx, db, ratelimit.TokenBucket("idle", 10, time.Minute))
		return err
	}
	return map[string]error{
		"check":                only(limiter.Check(ctx, db, bucket.Key("seeded"), window.Key("fresh"), wide.Key("seeded"))),
		"consume, fresh":       only(limiter.Consume(ctx, db, bucket.Key(rand.Text()))),
		"consume, seeded":      only(limiter.Consume(ctx, db, bucket.Key("seeded"))),
		"consume sharded":      only(limiter.Consume(ctx, db, wide.Key("seeded"))),
		"consume many":         only(limiter.Consume(ctx, db, bucket.Key("seeded"), window.Key("seeded"))),
		"consume many, fresh":  only(limiter.Consume(ctx, db, bucket.Key(rand.Text()), wide.Key(rand.Text()))),
		"charge":               only(limiter.Charge(ctx, db, window.Key("seeded"))),
		"refund":               only(limiter.Refund(ctx, db, harness.ReceiptOf(clock.At, bucket.Key("seeded")), bucket.Key("seeded"))),
		"reset":                limiter.Reset(ctx, db, window.Key("reset")),
		"move, seeded":         limiter.Move(ctx, db, bucket.Key("seeded"), wide.Key("seeded")),
		"move, fresh":          limiter.Move(ctx, db, bucket.Key("seeded"), bucket.Key(rand.Text())),
		"pause, seeded":        harness.Second(limiter.Pause(ctx, db, time.Millisecond, bucket.Key("seeded").Count(5))),
		"pause, fresh":         harness.Second(limiter.Pause(ctx, db, time.Millisecond, bucket.Key(rand.Text()).Count(5))),
		"resume":               limiter.Resume(ctx, db, bucket.Key("seeded")),
		"another shard number": only(other.Consume(ctx, db, ratelimit.TokenBucket("wide", 10, time.Minute, ratelimit.Shards(2)).Key("seeded"))),
		"sweep":                sweep(),
	}
}

// everyWay uses the limiter in every way, each at least once, and returns the outcomes: the verbs, and everything else with
// its own SQL.
func everyWay(t *testing.T, pool *pgxpool.Pool) map[string]error {
	t.Helper()
	ctx := t.Context()
	limiter := new(ratelimit.Limiter)
	bucket := ratelimit.TokenBucket("bucket", 1e6, time.Minute)
	window := ratelimit.FixedWindow("window", 1e6, time.Minute)
	wide := ratelimit.TokenBucket("wide", 1e6, time.Minute, ratelimit.Shards(3))
	ways := everyVerb(t, pool)
	for way, requests := range map[string][]ratelimit.Request{
		"one": {bucket.Key("ways")}, "sharded": {wide.Key("ways")}, "several": {bucket.Key("ways"), window.Key("ways")}, "all": {bucket.Key("ways"), wide.Key("ways")},
	} {
		consume := func(ctx context.Context, db ratelimit.DB) error {
			_, err := limiter.Consume(ctx, db, requests...)
			return err
		}
		ways[way+", InTx with Hot"] = limiter.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error { return consume(ctx, tx) }, ratelimit.Hot(requests...))
		batch := new(pgx.Batch)
		if _, err := limiter.QueueConsume(ctx, batch, requests...); err != nil {
			t.Fatal(err)
		}
		ways[way+", in a batch"] = limiter.SendTx(ctx, pool, batch)
		db := stdlib.OpenDBFromPool(pool)
		ways[way+", database/sql"] = consume(ctx, ratelimit.SQL(db))
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		ways[way+", coalesced"] = harness.Coalesce(ctx, &ratelimit.Coalescer{Pool: pool}, consume)
		ways[way+", coalesced, AsyncCommit"] = harness.Coalesce(ctx, &ratelimit.Coalescer{Pool: pool, AsyncCommit: true}, consume)
	}
	_, ways["sweep"] = limiter.Sweep(ctx, pool, bucket)
	for way, sql := range map[string]string{
		"by hand":          `SELECT granted FROM ratelimit.try('bucket', 'by hand', rate => 10, period => '1 minute')`,
		"by hand, sharded": `SELECT granted FROM ratelimit.try('wide', 'by hand', rate => 10, period => '1 minute', shards => 3)`,
		"by hand, raising": `SELECT remaining >= 0 FROM ratelimit.consume('window', 'by hand', rate => 10, period => '1 minute', kind => 'fixed window')`,
		"by hand, reserve": `SELECT retry_at >= at FROM ratelimit.reserve('bucket', 'by hand', rate => 10, period => '1 minute')`,
		"by hand, take":    `SELECT taken > 0 FROM ratelimit.take('bucket', 'by hand', most => 2, rate => 10, period => '1 minute')`,
		"keys":             `SELECT count(*) > 0 FROM ratelimit.keys('bucket', rate => 10, period => '1 minute')`,
	} {
		var ok bool
		err := pool.QueryRow(ctx, sql).Scan(&ok)
		if err == nil && !ok {
			err = fmt.Errorf("%s: not OK", sql)
		}
		ways[way] = err
	}
	return ways
}

// wantWays wants all ways to work except the refused ones, which must fail because of missing rights.
func wantWays(t *testing.T, ways map[string]error, refused ...string) {
	t.Helper()
	for way, err := range ways {
		if slices.Contains(refused, way) {
			if harness.SQLState(err) != "42501" {
				t.Errorf("%s: %v, want 42501", way, err)
			}
		} else if err != nil {
			t.Errorf("%s: %v", way, err)
		}
	}
	for _, way := range refused {
		if _, known := ways[way]; !known {
			t.Errorf("there is no way %q", way)
		}
	}
}

// Statements that only the owner may run.
var ownersOnly = []string{
	"TRUNCATE ratelimit.limits", "DROP TABLE ratelimit.limits", "ALTER TABLE ratelimit.limits ADD COLUMN x text", "CREATE TRIGGER t BEFORE INSERT ON ratelimit.limits EXECUTE FUNCTION f()",
	"CREATE INDEX ON ratelimit.limits (ts)", "DROP FUNCTION ratelimit.reset", "ALTER FUNCTION ratelimit.reset COST 1", "DROP VIEW ratelimit.turn_00",
}

// Statements that touch rows without the functions.
var rowsByHand = []string{
	"SELECT * FROM ratelimit.limits", "SELECT count(*) FROM ratelimit.limits", // a reader may do this
	"INSERT INTO ratelimit.limits VALUES ('bucket', 'seeded', 1, 1, 1e9, now())", "UPDATE ratelimit.limits SET value = 1e9", "DELETE FROM ratelimit.limits",
	"LOCK TABLE ratelimit.limits IN EXCLUSIVE MODE; SELECT 1", "SELECT FROM ratelimit.limits FOR UPDATE",
}

func TestTheDocumentedGrantsAreEnoughForEveryWayToConsume(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 2)
	harness.Seed(t, owner)
	role := harness.CreateRole(t, owner)
	harness.GrantWork(t, owner, role, "consume")
	app := harness.AsRole(t, owner, role, 4)
	wantWays(t, everyWay(t, app))
	harness.WantRefused(t, app, append(ownersOnly, "CREATE TABLE ratelimit.more (x text)")...)
}

func TestOnePrivilegeLessIsAnErrorAndNeverAGrant(t *testing.T) {
	t.Parallel()
	all := []string{"SELECT", "INSERT", "UPDATE", "DELETE"}
	for missing, mustFail := range map[string][]string{
		"USAGE":  {"check", "consume, fresh", "consume, seeded", "consume sharded", "consume many", "consume many, fresh", "charge", "refund", "reset", "move, seeded", "move, fresh", "pause, seeded", "pause, fresh", "resume", "another shard number", "sweep"},
		"SELECT": {"check", "consume, fresh", "consume, seeded", "consume sharded", "consume many", "consume many, fresh", "charge", "refund", "reset", "move, seeded", "move, fresh", "pause, seeded", "pause, fresh", "resume", "another shard number", "sweep"},
		"INSERT": {"consume, fresh", "consume many, fresh", "move, fresh", "pause, fresh", "another shard number"},
		"UPDATE": {"consume, fresh", "consume, seeded", "consume sharded", "consume many", "consume many, fresh", "charge", "refund", "reset", "move, seeded", "move, fresh", "pause, seeded", "pause, fresh", "resume", "another shard number", "sweep"},
		"DELETE": {"reset", "another shard number", "sweep"},
	} {
		t.Run(missing, func(t *testing.T) {
			t.Parallel()
			if missing == "USAGE" {
				harness.NeedsToPrepareAgain(t)
			}
			pool := harness.NewPool(t, 2)
			harness.Seed(t, pool)
			privileges := slices.DeleteFunc(slices.Clone(all), func(p string) bool { return p == missing })
			outcome := everyVerb(t, harness.NewRole(t, pool, missing != "USAGE", privileges...))
			for _, verb := range mustFail {
				var pgErr *pgconn.PgError
				if err := outcome[verb]; !errors.As(err, &pgErr) {
					t.Errorf("without %s, %s: %v, want an error of the database", missing, verb, err)
				} else if missing != "USAGE" && pgErr.Code != "42501" {
					t.Errorf("without %s, %s: %v, want 42501", missing, verb, err)
				}
			}
			for verb, err := range outcome {
				if err != nil && !slices.Contains(mustFail, verb) {
					t.Errorf("without %s, %s: %v, want it to work", missing, verb, err)
				}
			}
		})
	}
}

// A reader can look, with the library and by hand. All else fails closed, with an error that says so.
func TestAReaderLooksAndCanConsumeNothing(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 2)
	harness.Seed(t, owner)
	role := harness.CreateRole(t, owner)
	harness.GrantWork(t, owner, role, "look")
	reader := harness.AsRole(t, owner, role, 2)
	before := harness.TableOf(t, owner)

	ways := everyWay(t, reader)
	var refused []string
	for way := range ways {
		if way != "check" && way != "keys" {
			refused = append(refused, way)
		}
	}
	wantWays(t, ways, refused...)
	harness.WantRefused(t, reader, ownersOnly...)
	harness.WantRefused(t, reader, rowsByHand[2:]...)

	// In a transaction, missing rights cause an error like that of any other statement: it names the table but no key, and
	// aborts the transaction. Neither COMMIT nor a retry turns it into a grant.
	tx, err := reader.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	limiter := new(ratelimit.Limiter)
	request := ratelimit.TokenBucket("bucket", 10, time.Minute).Key("ann@example.org")
	for _, state := range []string{"42501", "25P02"} {
		result, err := limiter.Consume(t.Context(), tx, request)
		if harness.SQLState(err) != state || result.OK || harness.Denied(err) || strings.Contains(err.Error(), "example") || state == "42501" && !strings.Contains(err.Error(), "table limits") {
			t.Errorf("%+v, %v, want %s", result, err, state)
		}
	}
	if err := tx.Commit(t.Context()); err == nil {
		t.Error("committed")
	}
	if after := harness.TableOf(t, owner); after != before {
		t.Errorf("the reader made of\n%s\nthis\n%s", before, after)
	}
}

// TestTheDocumentedGrantsGrant: the words of docs/security.md.
func TestTheDocumentedGrantsGrant(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 1)
	block, roles := harness.DocSQL(t, "docs/security.md", "SELECT ratelimit.grant"), map[string]string{}
	for _, name := range []string{"app_user", "operator", "reporter"} {
		roles[name] = harness.CreateRole(t, owner)
		block = strings.ReplaceAll(block, "'"+name+"'", "'"+roles[name]+"'")
	}
	harness.MustExec(t, owner, block)
	for name, privilege := range map[string]string{"app_user": "has_table_privilege($1, 'ratelimit.definitions', 'INSERT')", "operator": "has_function_privilege($1, 'ratelimit.restore(text, text, text, text, boolean, boolean)', 'EXECUTE')", "reporter": "has_table_privilege($1, 'ratelimit.limits', 'SELECT')"} {
		if !harness.Scan[bool](t, owner, "SELECT "+privilege, roles[name]) {
			t.Errorf("%s does not have %s", name, privilege)
		}
	}
	for _, sql := range []string{"SELECT ratelimit.grant('postgres', 'all')", "SELECT ratelimit.grant('postgres', NULL)", "SELECT ratelimit.grant('public', 'look')"} {
		if _, err := owner.Exec(t.Context(), sql); harness.SQLState(err) != "22023" {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// What docs/security.md says of a role that cannot see the schema is what it meets, and what people search for.
func TestWithoutTheSchemaTheErrorIsTheDocumentedOne(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	const documented = "permission denied for schema ratelimit"
	if !strings.Contains(string(page), "`"+documented+"`") {
		t.Fatal("the page does not say which error it is")
	}
	owner := harness.NewPool(t, 1)
	pool := harness.AsRole(t, owner, harness.CreateRole(t, owner), 1)
	_, err = new(ratelimit.Limiter).Consume(t.Context(), pool, harness.Slow("limit", 5).Key("ann"))
	if harness.SQLState(err) != "42501" || !strings.Contains(err.Error(), documented) {
		t.Errorf("%v, want %s", err, documented)
	}
}

package integration_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// The rows of pg_dist_partition for both ways of sharding.
const (
	citusBySchema = `'n', 7, 's'`
	citusByKey    = `'h', 7, 's'`
)

// Citus cannot be installed in CI. So this stands for the parts of Citus that the file uses. It distributes nothing: it checks and notes
// the arguments, with the rules of Citus 14: the argument must have the given name, and there must be one exactly if the table is
// distributed by a column.
const citusStub = `
	CREATE TABLE pg_dist_partition (logicalrelid regclass, partmethod "char", colocationid int, repmodel "char", partkey text DEFAULT 'key');
	CREATE FUNCTION column_to_column_name(table_name regclass, column_var_text text) RETURNS text LANGUAGE sql RETURN column_var_text;
	CREATE TABLE pg_dist_schema (schemaid oid, colocationid int);
	CREATE TABLE pg_dist_local_group (groupid int);
	INSERT INTO pg_dist_local_group VALUES (0);
	CREATE TABLE pg_dist_node (groupid int, nodename text, nodeport int, noderole text, isactive bool, hasmetadata bool, metadatasynced bool);
	INSERT INTO pg_dist_node VALUES (0, 'c', 5432, 'primary', true, true, true), (1, 'w1', 5432, 'primary', true, true, true), (2, 'w2', 5432, 'secondary', false, false, false);
	CREATE TABLE missing (n int);
	INSERT INTO missing VALUES (0);
	CREATE FUNCTION run_command_on_workers(command text, parallel bool DEFAULT true, OUT nodename text, OUT nodeport int, OUT success bool, OUT result text)
	RETURNS SETOF record LANGUAGE plpgsql AS $$ BEGIN
		nodename := 'w1'; nodeport := 5432; success := true;
		EXECUTE command INTO result;
		result := result::int - (SELECT n FROM missing);
		RETURN NEXT;
	END $$;
	CREATE FUNCTION citus_version() RETURNS text LANGUAGE sql RETURN 'Citus 13.2.0 on x86_64-pc-linux-gnu';
	CREATE TABLE distributed (f regprocedure, argument text);
	CREATE FUNCTION create_distributed_function(function_name regprocedure, distribution_arg_name text DEFAULT NULL,
		colocate_with text DEFAULT 'default', force_delegation bool DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		by_column boolean := (SELECT partmethod = 'h' FROM pg_dist_partition WHERE logicalrelid = colocate_with::regclass);
		names text[] := (SELECT proargnames[:pronargs] FROM pg_proc WHERE oid = function_name);
		types oid[] := (SELECT proargtypes FROM pg_proc WHERE oid = function_name);
	BEGIN
		IF by_column IS NULL THEN RAISE '% is not distributed', colocate_with; END IF;
		IF by_column <> (distribution_arg_name IS NOT NULL) THEN RAISE '%: the distribution argument is %', function_name, distribution_arg_name; END IF;
		IF by_column AND types[array_position(names, distribution_arg_name) - 1] IS DISTINCT FROM 'text'::regtype THEN
			RAISE '% has no argument % of type text', function_name, distribution_arg_name;
		END IF;
		INSERT INTO distributed VALUES (function_name, distribution_arg_name);
	END $$;`

// runCitusFile runs the whole file, as psql does.
func runCitusFile(t *testing.T, pool *pgxpool.Pool) error {
	t.Helper()
	text, err := os.ReadFile("../migrations/citus.sql")
	if err != nil {
		t.Fatal(err)
	}
	_, err = pool.Exec(t.Context(), string(text), pgx.QueryExecModeSimpleProtocol)
	return err
}

// distribute notes that ratelimit.limits is distributed and, for a whole schema, the other tables.
func distribute(t *testing.T, pool *pgxpool.Pool, how string) {
	t.Helper()
	mustExec(t, pool, `TRUNCATE pg_dist_partition, pg_dist_schema; INSERT INTO pg_dist_partition VALUES ('ratelimit.limits', `+how+`)`)
}

// distributeSchema notes what citus_schema_distribute does.
func distributeSchema(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	distribute(t, pool, citusBySchema)
	mustExec(t, pool, `INSERT INTO pg_dist_schema VALUES (current_schema()::regnamespace, 7);
		INSERT INTO pg_dist_partition SELECT c.oid, `+citusBySchema+` FROM pg_class AS c WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND c.relname ~ '^rate_limit_'`)
}

// Without Citus, or before the table is distributed, the file changes nothing and says what is missing.
func TestTheFileForCitusSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	wants := func(code, words string) {
		t.Helper()
		pgErr, ok := errors.AsType[*pgconn.PgError](runCitusFile(t, pool))
		if !ok || pgErr.Code != code || !strings.Contains(pgErr.Message, words) || pgErr.Hint == "" {
			t.Errorf("%+v, want %s: %s", pgErr, code, words)
		}
	}
	wants("0A000", "does not have Citus")
	mustExec(t, pool, citusStub)
	wants("55000", "not distributed")
	for _, how := range []string{`'n', 7, 't'`, `'n', 0, 's'`} { // a reference table; a table that stays on the coordinator
		distribute(t, pool, how)
		wants("55000", "not distributed")
	}
	// An engine that finds rows by ctid must not be made to work on a table that has several shards.
	distribute(t, pool, citusByKey)
	mustExec(t, pool, `CREATE FUNCTION ratelimit._consume_old() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RETURN (SELECT count(*) FROM ratelimit.limits AS r WHERE r.ctid = '(0,1)'); END$$`)
	wants("0A000", "ratelimit._consume_old")
	mustExec(t, pool, `DROP FUNCTION ratelimit._consume_old`)

	for _, wrong := range []struct{ sql, undo, code, words string }{
		{"UPDATE pg_dist_local_group SET groupid = 1", "UPDATE pg_dist_local_group SET groupid = 0", "55000", "this node is a worker"},
		{"UPDATE pg_dist_node SET groupid = 3 WHERE groupid = 0", "UPDATE pg_dist_node SET groupid = 0 WHERE groupid = 3", "55000", "do not know the coordinator"},
		{"UPDATE pg_dist_node SET metadatasynced = false", "UPDATE pg_dist_node SET metadatasynced = true", "55000", "do not have the metadata: w1:5432"},
		{"UPDATE pg_dist_partition SET partkey = 'name'", "UPDATE pg_dist_partition SET partkey = 'key'", "55000", "by another column"},
		{"UPDATE missing SET n = 3", "UPDATE missing SET n = 0", "55000", "do not have all"},
		{"INSERT INTO pg_dist_schema VALUES (current_schema()::regnamespace, 7); TRUNCATE pg_dist_partition", "", "55000", "is distributed, but its table"},
	} {
		mustExec(t, pool, wrong.sql)
		wants(wrong.code, wrong.words)
		mustExec(t, pool, wrong.undo)
	}
	distributeSchema(t, pool)
	mustExec(t, pool, `DELETE FROM pg_dist_partition WHERE logicalrelid = 'ratelimit.usage'::regclass`)
	wants("55000", "are not distributed: ratelimit.usage")
	distribute(t, pool, citusByKey)
	mustExec(t, pool, `ALTER FUNCTION ratelimit._refund RENAME TO ratelimit._refund_old`)
	wants("42883", "26 of 27 functions")
	mustExec(t, pool, `DROP TABLE ratelimit.limits CASCADE`)
	wants("42P01", "no table ratelimit.limits")
}

// What the file does besides calling Citus is the same on any Postgres.
func TestTheFileForCitusRunsTwice(t *testing.T) {
	t.Parallel()
	for _, way := range []struct {
		how    string
		schema bool
		want   int // distributed functions
	}{{citusBySchema, true, 14}, {citusBySchema, false, 13}, {citusByKey, false, 4}} {
		how, want := way.how, way.want
		pool := newPool(t, 4)
		mustExec(t, pool, citusStub)
		if distribute(t, pool, how); way.schema {
			distributeSchema(t, pool)
		}
		settings := func(pattern string) (values []string) {
			t.Helper()
			rows, err := pool.Query(t.Context(), `SELECT s FROM pg_proc, unnest(proconfig) AS s WHERE pronamespace = current_schema()::regnamespace AND s LIKE $1`, pattern)
			if err == nil {
				values, err = pgx.CollectRows(rows, pgx.RowTo[string])
			}
			if err != nil {
				t.Fatal(err)
			}
			return values
		}
		for _, version := range []string{"12.1.10", "12.1.12", "13.2.0", "13.2.2", "13.4.0", "13.5.0", "14.0.1", "14.0.10"} {
			mustExec(t, pool, `CREATE OR REPLACE FUNCTION citus_version() RETURNS text LANGUAGE sql RETURN 'Citus `+version+` on x86_64-pc-linux-gnu'`)
			custom := 0
			if how == citusByKey && slices.Contains([]string{"12.1.12", "13.2.2", "13.4.0", "14.0.1"}, version) {
				custom = 16
			}
			for range 2 {
				if err := runCitusFile(t, pool); err != nil {
					t.Fatalf("%s: %v", how, err)
				}
			}
			if got := settings("plan_cache_mode=force_custom_plan"); len(got) != custom {
				t.Errorf("%s on Citus %s: %d functions keep no plan, want %d", how, version, len(got), custom)
			}
			if got := settings("plan_cache_mode=force_generic_plan"); len(got) != 0 {
				t.Errorf("%s on Citus %s: %d functions have a generic plan", how, version, len(got))
			}
		}
		var functions int
		var byKey, oneServer bool
		if err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT f), ratelimit._distributed(), ratelimit._one_server() FROM distributed`).Scan(&functions, &byKey, &oneServer); err != nil {
			t.Fatal(err)
		}
		if functions != want || byKey != (how == citusByKey) || oneServer == way.schema {
			t.Errorf("%s: %d functions are distributed, want %d; statements for one key each: %v; one server: %v", how, functions, want, byKey, oneServer)
		}
		if n := scan[int](t, pool, "SELECT count(*) FROM ratelimit.schema() WHERE hash = '"+migrations.Hash+"'"); n != 1 {
			t.Errorf("%s: the file has changed the engine", how)
		}
		works(t, pool)

		// An inlined function is not delegated.
		rows, err := pool.Query(t.Context(), `EXPLAIN (VERBOSE, COSTS OFF) SELECT ratelimit._wire_consume('limit', 'ann', 1, '1 s', 1, NULL, 1, 0, NULL, false, false, NULL)`)
		if err != nil {
			t.Fatal(err)
		}
		if plan, err := pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || !strings.Contains(strings.Join(plan, " "), "_wire_consume(") {
			t.Errorf("%s: the planner inlines what is to be delegated: %q, %v", how, plan, err)
		}
	}
}

// The nodes of a distributed schema number their transactions each by itself, so what is new is found by the time. Here, the other nodes'
// numbers are put in by hand: far behind those of the node that is asked, and far ahead of them.
func TestOverridesOfADistributedSchemaAreFollowedByTime(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	mustExec(t, pool, citusStub)
	distributeSchema(t, pool)
	if err := runCitusFile(t, pool); err != nil {
		t.Fatal(err)
	}
	api := ratelimit.TokenBucket("api", 1000, time.Hour)
	limits := ratelimit.Limiter{Overrides: &ratelimit.Overrides{DB: pool}}
	if err := limits.Overrides.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() { _ = limits.Overrides.Run(ctx) })
	defer following.Wait()
	defer stop()
	for i, xid := range []string{"3", "4000000000"} {
		key := "key " + xid
		for _, step := range []struct {
			sql    string
			denied bool
		}{
			{"SELECT ratelimit.block('api', '" + key + "')", true},
			{"SELECT ratelimit.unblock('api', '" + key + "')", false},
		} {
			mustExec(t, pool, "BEGIN; "+step.sql+"; UPDATE ratelimit.overrides SET changed_in = '"+xid+"' WHERE key = '"+key+"'; COMMIT")
			for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
				_, err := limits.Consume(t.Context(), pool, api.Key(key))
				if denied := errors.Is(err, ratelimit.ErrDenied); denied == step.denied {
					break
				}
				if time.Since(began) > 20*time.Second { // two seconds, on a machine that is not busy; without, the next minute
					t.Fatalf("%d: %s is not followed: %v", i, step.sql, err)
				}
			}
		}
	}
	// For five minutes, a change is reported again.
	if n := scan[int](t, pool, "SELECT cardinality(ids) FROM ratelimit._overrides(pg_current_snapshot(), 0)"); n != 2 {
		t.Errorf("%d rows are reported again, want 2", n)
	}
	mustExec(t, pool, "UPDATE ratelimit.overrides SET made_at = now() - interval '6 minutes', removed_at = now() - interval '6 minutes'")
	if n := scan[int](t, pool, "SELECT coalesce(cardinality(ids), 0) FROM ratelimit._overrides(pg_current_snapshot(), 0)"); n != 0 {
		t.Errorf("%d rows of long ago are reported", n)
	}
}

// On Citus, a conflict at another node's COMMIT is XX000, "could not commit transaction for shard ...", and what the other nodes did is open.
// Here, a deferred trigger fails with it at COMMIT.
func TestAnInternalErrorAtCommitIsAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 4)
	mustExec(t, pool, `
		CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE internal_error USING MESSAGE = 'could not commit transaction for shard 102008 on at least one active node'; END$$;
		CREATE CONSTRAINT TRIGGER fails AFTER INSERT OR UPDATE ON ratelimit.limits DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fails()`)
	request := ratelimit.TokenBucket("api", 1000, time.Hour).Key("ann")
	limits := ratelimit.Limiter{}
	runs := 0
	count := func() { runs++ }
	for name, call := range map[string]func() error{
		"Consume on the pool": func() error { count(); _, err := limits.Consume(t.Context(), pool, request); return err },
		"InTx": func() error {
			return limits.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				count()
				_, err := limits.Consume(ctx, tx, request)
				return err
			})
		},
		"SendTx": func() error {
			count()
			var batch pgx.Batch
			if _, err := limits.QueueConsume(t.Context(), &batch, request); err != nil {
				return err
			}
			return limits.SendTx(t.Context(), pool, &batch)
		},
		"Retry": func() error {
			return limits.Retry(t.Context(), func(ctx context.Context) error {
				count()
				return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := limits.Consume(ctx, tx, request)
					return err
				})
			})
		},
	} {
		runs = 0
		err := call()
		if sqlState(err) != "XX000" || runs != 1 || errors.Is(err, ratelimit.ErrUnknownOutcome) != (name != "Retry") {
			t.Errorf("%s: %d runs, %v", name, runs, err)
		}
	}
}

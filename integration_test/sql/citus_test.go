package sql_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
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
	END $$;
	CREATE TABLE granted (tag text);
	CREATE FUNCTION granting() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.granted VALUES (tg_tag); END $$;
	CREATE EVENT TRIGGER granting ON ddl_command_end WHEN TAG IN ('GRANT') EXECUTE FUNCTION granting();`

// psqlError is what psql prints of an error, verbosely.
var psqlError = regexp.MustCompile(`(?s)ERROR:  (\w{5}): (.*?)\n(?:HINT:  (.*?)\n)?`)

// runPsql runs psql on the database of a pool.
func runPsql(t *testing.T, pool *pgxpool.Pool, input string, flags ...string) ([]byte, error) {
	t.Helper()
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("there is no psql")
	}
	args := append([]string{"-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose"}, flags...)
	cmd := exec.CommandContext(t.Context(), psql, append(args, harness.ForAll(t, pool.Config().ConnString()))...)
	cmd.Stdin = strings.NewReader(input)
	return cmd.CombinedOutput()
}

// runCitusFile runs the file.
func runCitusFile(t *testing.T, pool *pgxpool.Pool, flags ...string) error {
	t.Helper()
	out, err := runPsql(t, pool, "", append(flags, "-f", "../../migrations/citus.sql")...)
	if match := psqlError.FindSubmatch(out); match != nil {
		return &pgconn.PgError{Code: string(match[1]), Message: string(match[2]), Hint: string(match[3])}
	}
	if err == nil && !strings.Contains(string(out), " functions. Done.") {
		err = errors.New("it has not come to its end")
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// distribute notes that a table is distributed: ratelimit.limits by key, or each of the schema.
func distribute(t *testing.T, pool *pgxpool.Pool, how string) {
	t.Helper()
	harness.MustExec(t, pool, `TRUNCATE pg_dist_partition, pg_dist_schema; INSERT INTO pg_dist_partition VALUES ('ratelimit.limits', `+how+`)`)
	if how == citusBySchema {
		harness.MustExec(t, pool, `INSERT INTO pg_dist_schema VALUES ('ratelimit'::regnamespace, 7); INSERT INTO pg_dist_partition SELECT c.oid, `+how+`
			FROM pg_class AS c WHERE c.relnamespace = 'ratelimit'::regnamespace AND c.relkind = 'r' AND c.relname <> 'limits'`)
	}
}

// Without Citus, or before the table is distributed, the file changes nothing and says what is missing.
func TestTheFileForCitusSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	wants := func(code, words string, flags ...string) {
		t.Helper()
		err := runCitusFile(t, pool, flags...)
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || pgErr.Code != code || !strings.Contains(pgErr.Message, words) || pgErr.Hint == "" {
			t.Errorf("%v, want %s: %s", err, code, words)
		}
	}
	wants("0A000", "does not have Citus")
	harness.MustExec(t, pool, citusStub)
	wants("55000", "neither the schema ratelimit nor the keys of ratelimit.limits are distributed")
	wants("42P01", `no table "a b".limits`, "-v", "schema=a b")
	// A reference table, a table that stays on the coordinator, and one that is on a node without the others.
	for _, how := range []string{`'n', 7, 't'`, `'n', 0, 's'`, `'n', 7, 's', 'nothing'`} {
		distribute(t, pool, how)
		wants("55000", "neither the schema")
	}
	// An engine that finds rows by ctid must not be made to work on a table that has several shards.
	distribute(t, pool, citusByKey)
	harness.MustExec(t, pool, `CREATE FUNCTION ratelimit.old() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RETURN (SELECT count(*) FROM ratelimit.limits AS r WHERE r.ctid = '(0,1)'); END$$`)
	wants("0A000", "ratelimit.old")
	harness.MustExec(t, pool, `DROP FUNCTION ratelimit.old`)

	for _, wrong := range []struct{ sql, undo, code, words string }{
		{"UPDATE pg_dist_local_group SET groupid = 1", "UPDATE pg_dist_local_group SET groupid = 0", "55000", "this node is a worker"},
		{"UPDATE pg_dist_node SET groupid = 3 WHERE groupid = 0", "UPDATE pg_dist_node SET groupid = 0 WHERE groupid = 3", "55000", "do not know the coordinator"},
		{"UPDATE pg_dist_node SET metadatasynced = false", "UPDATE pg_dist_node SET metadatasynced = true", "55000", "do not have the metadata: w1:5432"},
		{"UPDATE pg_dist_partition SET partkey = 'name'", "UPDATE pg_dist_partition SET partkey = 'key'", "55000", "by another column"},
		{"UPDATE missing SET n = 3", "UPDATE missing SET n = 0", "55000", "do not have all"},
		{"INSERT INTO pg_dist_schema VALUES ('ratelimit'::regnamespace, 7); TRUNCATE pg_dist_partition", "", "55000", "these of its tables are not: ratelimit.definitions, ratelimit.denials"},
	} {
		harness.MustExec(t, pool, wrong.sql)
		wants(wrong.code, wrong.words)
		harness.MustExec(t, pool, wrong.undo)
	}
	distribute(t, pool, citusBySchema)
	harness.MustExec(t, pool, `DELETE FROM pg_dist_partition WHERE logicalrelid = 'ratelimit.usage'::regclass`)
	wants("55000", "these of its tables are not: ratelimit.usage")
	distribute(t, pool, citusByKey)
	harness.MustExec(t, pool, `ALTER FUNCTION ratelimit._refund RENAME TO _refund_old`)
	wants("42883", "26 of 27 functions")
	harness.MustExec(t, pool, `ALTER FUNCTION ratelimit._refund_old RENAME TO _refund; ALTER FUNCTION ratelimit._wire_refund_one RENAME TO _wire_other`)
	wants("42883", "3 functions run where the rows are")
	harness.MustExec(t, pool, `DROP TABLE ratelimit.limits CASCADE`)
	wants("42P01", "no table ratelimit.limits")
}

// What the file does besides calling Citus is the same on any Postgres.
func TestTheFileForCitusRunsTwice(t *testing.T) {
	t.Parallel()
	for how, want := range map[string]int{citusBySchema: 14, citusByKey: 4} { // distributed functions
		pool := harness.NewPool(t, 4)
		harness.MustExec(t, pool, citusStub)
		distribute(t, pool, how)
		settings := func(pattern string) (values []string) {
			t.Helper()
			rows, err := pool.Query(t.Context(), `SELECT s FROM pg_proc, unnest(proconfig) AS s WHERE pronamespace = 'ratelimit'::regnamespace AND s LIKE $1`, pattern)
			if err == nil {
				values, err = pgx.CollectRows(rows, pgx.RowTo[string])
			}
			if err != nil {
				t.Fatal(err)
			}
			return values
		}
		for _, version := range []string{"12.1.10", "12.1.12", "13.2.0", "13.2.2", "13.4.0", "13.5.0", "14.0.1", "14.0.10"} {
			harness.MustExec(t, pool, `CREATE OR REPLACE FUNCTION citus_version() RETURNS text LANGUAGE sql RETURN 'Citus `+version+` on x86_64-pc-linux-gnu'`)
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
		if functions != want || byKey != (how == citusByKey) || oneServer != (how == citusByKey) {
			t.Errorf("%s: %d functions are distributed, want %d; statements for one key each: %v; one server: %v", how, functions, want, byKey, oneServer)
		}
		if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.schema() WHERE hash = '"+migrations.Hash+"'"); n != 1 {
			t.Errorf("%s: the file has changed the engine", how)
		}
		harness.Works(t, pool)

		// An inlined function is not delegated.
		rows, err := pool.Query(t.Context(), `EXPLAIN (VERBOSE, COSTS OFF) SELECT ratelimit._wire_consume('limit', 'ann', 1, '1 s', 1, NULL, 1, 0, NULL, false, false, NULL)`)
		if err != nil {
			t.Fatal(err)
		}
		if plan, err := pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || !strings.Contains(strings.Join(plan, " "), "_wire_consume(") {
			t.Errorf("%s: the planner inlines what is to be delegated: %q, %v", how, plan, err)
		}

		// In a schema of another name, and with grants: a node that was added gets those of the views.
		harness.MustExec(t, pool, `SELECT ratelimit.grant('pg_monitor', 'consume'); TRUNCATE granted; ALTER SCHEMA ratelimit RENAME TO "a b"`)
		if err := runCitusFile(t, pool, "-v", "schema=a b"); err != nil {
			t.Errorf("%s: %v", how, err)
		}
		if n := harness.Scan[int](t, pool, "SELECT count(*) FROM granted"); n != 32 {
			t.Errorf("%s: %d grants of views are sent again", how, n)
		}
	}
}

// TestNoPlainStatementIsSentWhereTheTablesAreDistributed: once Citus has refused one, the session delegates no call.
func TestNoPlainStatementIsSentWhereTheTablesAreDistributed(t *testing.T) {
	t.Parallel()
	if harness.Server.Pooled() {
		t.Skip("the statements are prepared on connections that the pooler shares out")
	}
	for how, holds := range map[string]bool{"": true, "_one_server": true, "_distributed": false} {
		all := harness.NewPool(t, 2)
		if how != "" {
			harness.MustExec(t, all, "CREATE OR REPLACE FUNCTION ratelimit."+how+"() RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN "+strconv.FormatBool(!holds))
		}
		pool := harness.OneConnection(t, all, nil)
		var limits ratelimit.Limiter
		r := ratelimit.TokenBucket("bucket", 10, time.Hour).Key("k")
		for i := range 3 {
			if _, err := limits.Consume(t.Context(), pool, r); err != nil {
				t.Fatal(err)
			}
			held, err := limits.Hold(t.Context(), pool, strconv.Itoa(i), time.Minute, r)
			if (harness.SQLState(err) == "0A000") == holds {
				t.Errorf("%q: %v", how, err)
			}
			if err == nil {
				_, err = limits.Settle(t.Context(), pool, held.Token)
				harness.Succeeds(t, err)
			}
		}
		sent := harness.SentOn(t, pool)
		if plain := sent["UpdateBucket"] + sent["UpdateHold"] + sent["UpdateSettle"]; (plain > 0) == (how != "") {
			t.Errorf("%q: sent %v", how, sent)
		}
	}
}

// citusDependencies are the functions of the schema, with all that each depends on by the rules of Citus (dependency.c): pg_depend; the fields of a
// composite type, and the elements of an array; and all functions that are used by what uses a column of a table or of a type.
const citusDependencies = `
	WITH RECURSIVE uses AS (
		SELECT p.oid AS function, d.refclassid AS class, d.refobjid AS object
		  FROM pg_proc AS p JOIN pg_depend AS d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'n'
		 WHERE p.pronamespace = 'ratelimit'::regnamespace
		UNION
		SELECT u.function, v.class, v.object
		  FROM uses AS u CROSS JOIN LATERAL (
			SELECT d.refclassid, d.refobjid FROM pg_depend AS d WHERE d.classid = u.class AND d.objid = u.object AND d.deptype = 'n'
			UNION ALL
			SELECT CASE WHEN t.typrelid <> 0 THEN 'pg_class' ELSE 'pg_type' END::regclass, CASE WHEN t.typrelid <> 0 THEN t.typrelid ELSE t.typelem END
			  FROM pg_type AS t WHERE u.class = 'pg_type'::regclass AND t.oid = u.object AND (t.typrelid <> 0 OR t.typcategory = 'A')
			UNION ALL
			SELECT f.refclassid, f.refobjid FROM pg_depend AS d JOIN pg_depend AS f USING (classid, objid, objsubid)
			 WHERE u.class = 'pg_class'::regclass AND d.refclassid = u.class AND d.refobjid = u.object AND f.refclassid = 'pg_proc'::regclass
			   AND (d.deptype = 'n' OR d.deptype = 'a' AND d.refobjsubid <> 0)
		  ) AS v (class, object)
	) SELECT DISTINCT u.function::regproc::text FROM uses AS u `

// TestCitusCanReplaceAndGrantTheFunctions: it refuses to do so with a function that depends on itself, and does not make one that depends on a table on
// the workers, before the table is distributed.
func TestCitusCanReplaceAndGrantTheFunctions(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	const circles = citusDependencies + `WHERE u.class = 'pg_proc'::regclass AND u.object = u.function ORDER BY 1`
	if got := harness.Lines(t, pool, circles); got != "" {
		t.Errorf("these depend on themselves: %s", got)
	}
	if got := harness.Lines(t, pool, citusDependencies+`JOIN pg_class AS c ON c.oid = u.object WHERE u.class = 'pg_class'::regclass AND c.relkind = 'r' ORDER BY 1`); got != "(ratelimit._in_force)\n(ratelimit._under)" {
		t.Errorf("migrations/citus.sql makes those again that depend on a table by their signatures; there are %s", got)
	}
	// A function whose body Postgres reads makes the functions that it calls parts of the type whose fields it reads.
	harness.MustExec(t, pool, `CREATE FUNCTION ratelimit.reads(q ratelimit._request) RETURNS text LANGUAGE sql RETURN (ratelimit._read(q.name::jsonb, 1, NULL)).key`)
	if got := harness.Lines(t, pool, circles); got != "(ratelimit._read)" {
		t.Errorf("a circle is not found: %s", got)
	}
}

// TestTheRecountOnCitusReadsFirst runs that of docs/distributed.md.
func TestTheRecountOnCitusReadsFirst(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	harness.MustExec(t, pool, `SELECT ratelimit.publish('test', '[{"name": "renders", "kind": "slots", "capacity": 3}]');
		SELECT ratelimit.hold('renders', 'a', id => 'x', ttl => '1 hour'), ratelimit.hold('renders', 'o''b', id => 'y', ttl => '1 hour');
		SELECT ratelimit.hold('renders', id => 'z', global => true, forever => true);
		DELETE FROM ratelimit.limits`)
	if out, err := runPsql(t, pool, harness.DocSQL(t, "docs/distributed.md", "gexec")); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got := harness.Lines(t, pool, "SELECT key, value FROM ratelimit.limits ORDER BY 1"); got != `("",-1)`+"\n(a,-1)\n(o'b,-1)" {
		t.Errorf("counted %s", got)
	}
}

// The nodes of a distributed schema number their transactions each by itself, so what is new is found by the time. Here, the other nodes'
// numbers are put in by hand: far behind those of the node that is asked, and far ahead of them.
func TestOverridesOfADistributedSchemaAreFollowedByTime(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.MustExec(t, pool, citusStub)
	distribute(t, pool, citusBySchema)
	if err := runCitusFile(t, pool); err != nil {
		t.Fatal(err)
	}
	api := ratelimit.TokenBucket("api", 1000, time.Hour)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	if err := follow.Load(t.Context(), limits); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() { follow.Run(ctx, limits) })
	defer following.Wait()
	defer stop()
	for i, xid := range []string{"3", "4000000000"} {
		key := "key " + xid
		for _, step := range []struct {
			sql    string
			denied bool
		}{
			{"SELECT ratelimit.block('api', '" + key + "', forever => true)", true},
			{"SELECT ratelimit.unblock('api', '" + key + "')", false},
		} {
			harness.MustExec(t, pool, "BEGIN; "+step.sql+"; UPDATE ratelimit.overrides SET changed_in = '"+xid+"' WHERE key = '"+key+"'; COMMIT")
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
	if n := harness.Scan[int](t, pool, "SELECT cardinality(ids) FROM ratelimit._overrides(pg_current_snapshot(), 0)"); n != 2 {
		t.Errorf("%d rows are reported again, want 2", n)
	}
	harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET made_at = now() - interval '6 minutes', removed_at = now() - interval '6 minutes'")
	if n := harness.Scan[int](t, pool, "SELECT coalesce(cardinality(ids), 0) FROM ratelimit._overrides(pg_current_snapshot(), 0)"); n != 0 {
		t.Errorf("%d rows of long ago are reported", n)
	}
}

// On Citus, a conflict at another node's COMMIT is XX000, "could not commit transaction for shard ...", and what the other nodes did is open.
// Here, a deferred trigger fails with it at COMMIT.
func TestAnInternalErrorAtCommitIsAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.MustExec(t, pool, `
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
		if harness.SQLState(err) != "XX000" || runs != 1 || errors.Is(err, ratelimit.ErrUnknownOutcome) != (name != "Retry") {
			t.Errorf("%s: %d runs, %v", name, runs, err)
		}
	}
}

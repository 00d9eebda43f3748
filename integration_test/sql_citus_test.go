package integration_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
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
	CREATE TABLE pg_dist_partition (logicalrelid regclass, partmethod "char", colocationid int, repmodel "char");
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

// distribute notes that rate_limits is distributed.
func distribute(t *testing.T, pool *pgxpool.Pool, how string) {
	t.Helper()
	mustExec(t, pool, `TRUNCATE pg_dist_partition; INSERT INTO pg_dist_partition VALUES ('rate_limits', `+how+`)`)
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
	mustExec(t, pool, `CREATE FUNCTION _ratelimit_consume_old() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RETURN (SELECT count(*) FROM rate_limits AS r WHERE r.ctid = '(0,1)'); END$$`)
	wants("0A000", "_ratelimit_consume_old")
	mustExec(t, pool, `DROP FUNCTION _ratelimit_consume_old`)
	mustExec(t, pool, `ALTER FUNCTION _ratelimit_refund RENAME TO _ratelimit_refund_old`)
	wants("42883", "17 of 18 functions")
	mustExec(t, pool, `DROP TABLE rate_limits CASCADE`)
	wants("42P01", "no table rate_limits")
}

// What the file does besides calling Citus is the same on any Postgres.
func TestTheFileForCitusRunsTwice(t *testing.T) {
	t.Parallel()
	for how, want := range map[string]int{citusBySchema: 11, citusByKey: 4} {
		pool := newPool(t, 4)
		mustExec(t, pool, citusStub)
		distribute(t, pool, how)
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
		for _, version := range []string{"13.2.0", "13.2.2", "14.0.1", "14.0.10"} {
			mustExec(t, pool, `CREATE OR REPLACE FUNCTION citus_version() RETURNS text LANGUAGE sql RETURN 'Citus `+version+` on x86_64-pc-linux-gnu'`)
			custom := 0
			if version == "13.2.2" || version == "14.0.1" {
				custom = 10
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
		var byKey bool
		if err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT f), _ratelimit_distributed() FROM distributed`).Scan(&functions, &byKey); err != nil {
			t.Fatal(err)
		}
		if functions != want || byKey != (how == citusByKey) {
			t.Errorf("%s: %d functions are distributed, want %d; statements for one key each: %v", how, functions, want, byKey)
		}
		works(t, pool)

		// An inlined function is not delegated.
		rows, err := pool.Query(t.Context(), `EXPLAIN (VERBOSE, COSTS OFF) SELECT _ratelimit_wire_consume('limit', 'ann', 1, '1 s', 1, NULL, 1, 0, NULL, false, false, NULL)`)
		if err != nil {
			t.Fatal(err)
		}
		if plan, err := pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || !strings.Contains(strings.Join(plan, " "), "_wire_consume(") {
			t.Errorf("%s: the planner inlines what is to be delegated: %q, %v", how, plan, err)
		}
	}
}

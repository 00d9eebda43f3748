package integration_test

import (
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// citusFiles are the files that users of Citus run, with the way in which Citus notes that rate_limits is distributed.
var citusFiles = map[string]string{
	"../migrations/citus-schema.sql": `'n', 's'`,
	"../migrations/citus-rows.sql":   `'h', 's'`,
}

// Citus cannot be installed in CI. So this stands for the parts of Citus that the files use. It distributes nothing: it checks and notes
// the arguments, with the rules of Citus 14: the argument must have the given name, and there must be one exactly if the table is
// distributed by a column.
const citusStub = `
	CREATE TABLE pg_dist_partition (logicalrel regclass, partmethod "char", repmodel "char");
	CREATE FUNCTION citus_version() RETURNS text LANGUAGE sql RETURN 'Citus 13.2.0 on x86_64-pc-linux-gnu';
	CREATE TABLE distributed (f regprocedure, argument text);
	CREATE FUNCTION create_distributed_function(function_name regprocedure, distribution_arg_name text DEFAULT NULL,
		colocate_with text DEFAULT 'default', force_delegation bool DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		by_column boolean := (SELECT partmethod = 'h' FROM pg_dist_partition WHERE logicalrel = colocate_with::regclass);
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

func citusFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// runFile runs a whole file, as psql does.
func runFile(t *testing.T, pool *pgxpool.Pool, text string) error {
	t.Helper()
	_, err := pool.Exec(t.Context(), text, pgx.QueryExecModeSimpleProtocol)
	return err
}

// Without Citus, or before the table is distributed, the files change nothing and say what is missing.
func TestTheFilesForCitusSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	for name, how := range citusFiles {
		text := citusFile(t, name)
		pool := newPool(t, 1)
		wants := func(code, words string) {
			t.Helper()
			pgErr, ok := errors.AsType[*pgconn.PgError](runFile(t, pool, text))
			if !ok || pgErr.Code != code || !strings.Contains(pgErr.Message, words) || pgErr.Hint == "" {
				t.Errorf("%s: %+v, want %s: %s", name, pgErr, code, words)
			}
		}
		wants("0A000", "does not have Citus")
		mustExec(t, pool, citusStub)
		wants("55000", "not distributed")
		other := map[string]string{`'n', 's'`: `'h', 's'`, `'h', 's'`: `'n', 's'`}[how]
		for _, wrong := range []string{other, `'n', 't'`} { // the other way of sharding; a reference table
			mustExec(t, pool, `TRUNCATE pg_dist_partition; INSERT INTO pg_dist_partition VALUES ('rate_limits', `+wrong+`)`)
			wants("55000", "not distributed")
		}
		mustExec(t, pool, `DROP TABLE rate_limits CASCADE`)
		wants("42P01", "no table rate_limits")
	}
}

// An engine that finds rows by ctid must not be made to work on a table that has several shards.
func TestTheFileForRowsRefusesAnEngineWithCtid(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	mustExec(t, pool, citusStub)
	mustExec(t, pool, `INSERT INTO pg_dist_partition VALUES ('rate_limits', 'h', 's')`)
	mustExec(t, pool, `CREATE FUNCTION _ratelimit_consume_old() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN RETURN (SELECT count(*) FROM rate_limits AS r WHERE r.ctid = '(0,1)'); END$$`)
	pgErr, ok := errors.AsType[*pgconn.PgError](runFile(t, pool, citusFile(t, "../migrations/citus-rows.sql")))
	if !ok || pgErr.Code != "0A000" || !strings.Contains(pgErr.Message, "_ratelimit_consume_old") {
		t.Errorf("%+v, want 0A000", pgErr)
	}
}

// The files name functions by their whole signatures. A function that changes must change there, too.
func TestTheFilesForCitusNameFunctionsThatExist(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	for name := range citusFiles {
		signatures := regexp.MustCompile(`'(_?ratelimit\w*\([^')]*\))'`).FindAllStringSubmatch(citusFile(t, name), -1)
		if len(signatures) < 10 {
			t.Errorf("%s names only %d functions", name, len(signatures))
		}
		for _, s := range signatures {
			var found bool
			if err := pool.QueryRow(t.Context(), `SELECT to_regprocedure($1) IS NOT NULL`, s[1]).Scan(&found); err != nil || !found {
				t.Errorf("%s: there is no function %s, %v", name, s[1], err)
			}
		}
	}
}

// What the files do besides calling Citus is the same on any Postgres.
func TestTheFilesForCitusRunTwice(t *testing.T) {
	t.Parallel()
	for name, how := range citusFiles {
		pool := newPool(t, 4)
		mustExec(t, pool, citusStub)
		mustExec(t, pool, `INSERT INTO pg_dist_partition VALUES ('rate_limits', `+how+`)`)
		plans := func() (modes []string) {
			t.Helper()
			rows, err := pool.Query(t.Context(), `SELECT coalesce(s, 'none') FROM pg_proc LEFT JOIN unnest(proconfig) AS s ON s LIKE 'plan_cache_mode%'
				WHERE pronamespace = current_schema()::regnamespace AND proname ~ '^_ratelimit_(consume|apply|refund|coalesce)' OR oid = 'ratelimit_sweep'::regproc`)
			if err == nil {
				modes, err = pgx.CollectRows(rows, pgx.RowTo[string])
			}
			if err != nil || len(modes) < 8 {
				t.Fatal(modes, err)
			}
			slices.Sort(modes)
			return slices.Compact(modes)
		}
		for _, version := range []string{"13.2.0", "13.2.2", "14.0.1", "14.0.10"} {
			mustExec(t, pool, `CREATE OR REPLACE FUNCTION citus_version() RETURNS text LANGUAGE sql RETURN 'Citus `+version+` on x86_64-pc-linux-gnu'`)
			want := "none"
			if version == "13.2.2" || version == "14.0.1" {
				want = "plan_cache_mode=force_custom_plan"
			}
			for range 2 {
				if err := runFile(t, pool, citusFile(t, name)); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			if got := plans(); !slices.Equal(got, []string{want}) {
				t.Errorf("%s on Citus %s: plans are %q, want %q", name, version, got, want)
			}
		}
		var functions int
		if err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT f) FROM distributed`).Scan(&functions); err != nil || functions < 2 {
			t.Errorf("%s: %d functions are distributed, %v", name, functions, err)
		}
		works(t, pool)

		// An inlined function is not delegated.
		rows, err := pool.Query(t.Context(), `EXPLAIN (VERBOSE, COSTS OFF) SELECT _ratelimit_wire_consume('limit', 'ann', 1, '1 s', 1, NULL, 1, 0, NULL, false, false, NULL)`)
		if err != nil {
			t.Fatal(err)
		}
		if plan, err := pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || !strings.Contains(strings.Join(plan, " "), "_wire_consume(") {
			t.Errorf("%s: the planner inlines what is to be delegated: %q, %v", name, plan, err)
		}
	}
}

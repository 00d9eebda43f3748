package integration_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// lookalikeSQL fills a schema with what an attacker would put there to be taken for the limiter's own, or for Postgres' own.
const lookalikeSQL = `
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE FUNCTION evil.hijacked() RETURNS void LANGUAGE plpgsql AS $f$ BEGIN RAISE SQLSTATE 'EVIL1' USING MESSAGE = 'hijacked'; END $f$;
CREATE TABLE evil.rate_limits (LIKE app.rate_limits);
GRANT ALL ON evil.rate_limits TO PUBLIC;
CREATE TYPE evil.ratelimit_decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz);
CREATE DOMAIN evil.text AS pg_catalog.text CHECK (false);
CREATE DOMAIN evil.timestamptz AS pg_catalog.timestamptz CHECK (false);
CREATE DOMAIN evil.xid AS pg_catalog.text CHECK (false);
CREATE COLLATION evil."C" FROM "C";
-- Functions of the names and arguments of those that the bodies call.
DO $$
DECLARE f record;
BEGIN
    FOR f IN
        SELECT DISTINCT p.proname AS name, pg_get_function_identity_arguments(p.oid) AS args, pg_get_function_result(p.oid) AS result
          FROM pg_proc AS p
         WHERE p.pronamespace IN ('pg_catalog'::regnamespace, 'app'::regnamespace) AND p.prokind = 'f' AND p.proargmodes IS NULL
           AND EXISTS (SELECT FROM pg_proc AS b WHERE b.pronamespace = 'app'::regnamespace AND b.prosrc ~ ('\m' || p.proname || '\('))
           AND p.prorettype NOT IN ('internal'::regtype, 'cstring'::regtype)
           AND NOT ('"any"'::regtype = ANY (p.proargtypes) OR 'internal'::regtype = ANY (p.proargtypes))
    LOOP
        EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); END''', f.name, f.args, f.result);
    END LOOP;
END $$;
`

// operatorsSQL adds operators. Where a pair of types has none of its own in pg_catalog (float8 >= numeric), one for that very pair is
// preferred wherever it lies in the search_path (CVE-2018-1058).
const operatorsSQL = `
DO $$
DECLARE
    types constant regtype[] := '{text,float8,numeric,int2,int4,timestamptz,interval}';
    f     record;
    op    text;
BEGIN
    FOR f IN SELECT l, r FROM unnest(types) AS l, unnest(types) AS r LOOP
        EXECUTE format('CREATE FUNCTION evil.compare(%1$s, %2$s) RETURNS boolean LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); RETURN true; END''', f.l, f.r);
        EXECUTE format('CREATE FUNCTION evil.compute(%1$s, %2$s) RETURNS %1$s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); RETURN $1; END''', f.l, f.r);
        FOREACH op IN ARRAY '{=,<>,<,<=,>,>=}'::text[] LOOP
            EXECUTE format('CREATE OPERATOR evil.%s (FUNCTION = evil.compare, LEFTARG = %s, RIGHTARG = %s)', op, f.l, f.r);
        END LOOP;
        FOREACH op IN ARRAY '{+,-,*,/,%,||}'::text[] LOOP
            EXECUTE format('CREATE OPERATOR evil.%s (FUNCTION = evil.compute, LEFTARG = %s, RIGHTARG = %s)', op, f.l, f.r);
        END LOOP;
    END LOOP;
END $$;
`

// byEvil calls each function on a connection, with a hostile search_path, and says how it went. The functions' names are qualified:
// what a statement of the caller's own means there is his affair. What is tested is their bodies.
func byEvil(t *testing.T, conn *pgx.Conn, schema, path string) map[string]error {
	t.Helper()
	outcome := map[string]error{}
	for name, sql := range map[string]string{
		"consume":          `SELECT granted FROM app.ratelimit_consume('bucket', $1, 20, '1 hour', 20, NULL, 1, 0)`,
		"consume, window":  `SELECT granted FROM app.ratelimit_consume('window', $1, 20, '1 hour', 20, '0001-01-01', 1, 0)`,
		"consume sharded":  `SELECT granted FROM app.ratelimit_consume_sharded('wide', $1, 30, '1 hour', 30, NULL, 3, 1, 0, 0, 1)`,
		"consume several":  `SELECT granted FROM app.ratelimit_consume_several('{bucket,more}', ARRAY[$1,$1], '{20,20}', '{1 hour,1 hour}', '{20,20}', '{NULL,NULL}', '{1,1}', '{0,0}')`,
		"apply":            `SELECT granted FROM app.ratelimit_apply('consume', '{bucket,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{NULL,NULL}', '{1,3}', '{1,1}', '{0,0}', '{0,0}', '{0,1}')`,
		"coalesce":         `SELECT early IS NOT NULL FROM app.ratelimit_coalesce('{bucket}', '{20}', '{1 hour}', '{20}', ARRAY[$1], '{1}', '{}', '{1}', '{1}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		"by hand":          `SELECT ok FROM app.ratelimit('bucket', $1, 20, '1 hour')`,
		"by hand, raising": `SELECT ok FROM app.ratelimit_or_raise('window', $1, 20, '1 hour', kind => 'fixed window')`,
		"by hand, sharded": `SELECT ok FROM app.ratelimit('wide', $1, 30, '1 hour', shards => 3)`,
		"keys":             `SELECT true FROM app.ratelimit_keys('bucket', 20, '1 hour') WHERE $1::pg_catalog.text IS NOT NULL LIMIT 1`,
		"sweep":            `SELECT deleted IS NOT NULL FROM app.ratelimit_sweep('bucket', 20, '1 hour', first => $1)`,
		"reset":            `SELECT app.ratelimit_reset('{bucket}', ARRAY[$1]) IS NOT NULL`,
	} {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), "SET LOCAL search_path = "+path); err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"seeded", "fresh"} {
			var ok bool
			err = tx.QueryRow(t.Context(), strings.ReplaceAll(sql, "app.", schema+"."), pgx.QueryExecModeExec, key).Scan(&ok)
			if err == nil && !ok {
				err = fmt.Errorf("%s: not granted", sql)
			}
			if err != nil {
				break
			}
		}
		outcome[name] = err
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return outcome
}

// An attacker's schema in the search_path of whoever calls the functions: behind the limiter's, ahead of it, ahead of pg_catalog.
func TestAHostileSearchPath(t *testing.T) {
	t.Parallel()
	needsSession(t, "since it makes temporary tables, for the session")
	admin, owner, definer := newDefiner(t, 1)
	invoker := newPool(t, 2)
	seed(t, owner)
	seed(t, invoker)
	evil := "evil_" + schemaOf(t, admin)
	attack := func(sql string) {
		t.Helper()
		sql = named(sql, schemaOf(t, admin), "")
		mustExec(t, admin, strings.NewReplacer("evil.", evil+".", "SCHEMA evil", "SCHEMA "+evil).Replace(sql))
	}
	attack(lookalikeSQL)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		conn, err := pgx.Connect(ctx, admin.Config().ConnString())
		if err == nil {
			_, err = conn.Exec(ctx, "DROP SCHEMA "+evil+" CASCADE")
			_ = conn.Close(ctx)
		}
		if err != nil {
			t.Error(err)
		}
	})
	outcomes := func(pool *pgxpool.Pool, paths ...string) (all map[string]map[string]error) {
		t.Helper()
		conn, schema := acquire(t, reconfigured(t, pool, func(*pgxpool.Config) {})), schemaOf(t, pool)
		if _, err := conn.Exec(t.Context(), "CREATE TEMP TABLE rate_limits (LIKE "+evil+".rate_limits)"); err != nil {
			t.Fatal(err)
		}
		all = map[string]map[string]error{}
		for _, path := range paths {
			all[path] = byEvil(t, conn, schema, strings.ReplaceAll(named(path, schema, ""), "evil", evil))
		}
		var n int
		if err := conn.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM pg_temp.rate_limits) + (SELECT count(*) FROM "+evil+".rate_limits)").Scan(&n); err != nil || n != 0 {
			t.Errorf("%d rows in the wrong tables, %v", n, err)
		}
		return all
	}
	beside := []string{"app, evil", "evil, app", "pg_temp, evil, app"}
	anywhere := append(slices.Clone(beside), "evil, pg_catalog", "pg_temp, evil, pg_catalog", "evil")

	// The limiter's names in the bodies are qualified, and pg_catalog comes first unless the path says otherwise.
	for path, outcome := range outcomes(invoker, beside...) {
		for name, err := range outcome {
			if err != nil {
				t.Errorf("as they are, lookalikes, search_path %s, %s: %v", path, name, err)
			}
		}
	}

	// With operators, functions that run with the caller's rights do there what any SQL of the caller's would do: what the attacker
	// wants. If this fails, the attack has lost its teeth, and what comes next shows nothing.
	attack(operatorsSQL)
	for path, outcome := range outcomes(invoker, anywhere...) {
		for name, err := range outcome {
			if sqlState(err) != "EVIL1" && name != "keys" && name != "reset" {
				t.Errorf("as they are, operators, search_path %s, %s: %v, want EVIL1", path, name, err)
			}
		}
	}

	// Those that run with the owner's rights do not, whatever the path.
	for path, outcome := range outcomes(definer, anywhere...) {
		for _, name := range []string{"consume", "consume, window", "consume sharded", "consume several", "apply", "coalesce"} {
			if err := outcome[name]; err != nil {
				t.Errorf("with the owner's rights, search_path %s, %s: %v", path, name, err)
			}
		}
	}

	mustExec(t, invoker, named(readmeSQL(t, "Production", "AND prosrc <>"), schemaOf(t, invoker), ""))
	for path, outcome := range outcomes(invoker, anywhere...) {
		for name, err := range outcome {
			if err != nil {
				t.Errorf("pinned, search_path %s, %s: %v", path, name, err)
			}
		}
	}
}

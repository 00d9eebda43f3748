package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

)

// evilSQL fills a schema with what an attacker would put there: everything that the functions' bodies could be made to take for
// what they mean, and all of it raises EVIL1. Where a pair of types has no operator of its own in pg_catalog (float8 >= numeric),
// an operator for that very pair is preferred wherever it lies in the search_path.
const evilSQL = `
CREATE SCHEMA evil;
CREATE FUNCTION evil.hijacked() RETURNS void LANGUAGE plpgsql AS $f$ BEGIN RAISE SQLSTATE 'EVIL1' USING MESSAGE = 'hijacked'; END $f$;
CREATE TABLE evil.rate_limits (LIKE app.rate_limits);
INSERT INTO evil.rate_limits SELECT name, key, 0, 1, 1e9, now() FROM app.rate_limits;
CREATE DOMAIN evil.text AS pg_catalog.text CHECK (false);
CREATE DOMAIN evil.timestamptz AS pg_catalog.timestamptz CHECK (false);
CREATE DOMAIN evil.xid AS pg_catalog.text CHECK (false);
CREATE TYPE evil.ratelimit_decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz);
CREATE COLLATION evil."C" FROM "C";
DO $$
DECLARE
    types constant regtype[] := '{text,float8,numeric,int2,int4,int8,timestamptz,interval,bool,xid}';
    f     record;
    op    text;
BEGIN
    FOR f IN SELECT l, r FROM unnest(types) AS l, unnest(types) AS r LOOP
        EXECUTE format('CREATE FUNCTION evil.compare(%1$s, %2$s) RETURNS boolean LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); RETURN true; END''', f.l, f.r);
        EXECUTE format('CREATE FUNCTION evil.compute(%1$s, %2$s) RETURNS %1$s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); RETURN $1; END''', f.l, f.r);
        FOREACH op IN ARRAY '{=,<>,<,<=,>,>=}'::text[] LOOP
            EXECUTE format('CREATE OPERATOR evil.%s (FUNCTION = evil.compare, LEFTARG = %s, RIGHTARG = %s)', op, f.l, f.r);
        END LOOP;
        FOREACH op IN ARRAY '{+,-,*,/,%%,||}'::text[] LOOP
            EXECUTE format('CREATE OPERATOR evil.%s (FUNCTION = evil.compute, LEFTARG = %s, RIGHTARG = %s)', op, f.l, f.r);
        END LOOP;
    END LOOP;
    -- Functions of the names and arguments of those that the bodies call: Postgres' and the limiter's own.
    FOR f IN
        SELECT DISTINCT p.proname AS name, pg_get_function_identity_arguments(p.oid) AS args, pg_get_function_result(p.oid) AS result
          FROM pg_proc AS p
         WHERE p.pronamespace IN ('pg_catalog'::regnamespace, 'app'::regnamespace) AND p.prokind = 'f' AND p.proargmodes IS NULL
           AND EXISTS (SELECT FROM pg_proc AS b WHERE b.pronamespace = 'app'::regnamespace AND b.prosrc ~ ('\m' || p.proname || '\('))
           AND p.prorettype NOT IN ('internal'::regtype, 'cstring'::regtype) AND NOT ('"any"'::regtype = ANY (p.proargtypes) OR 'internal'::regtype = ANY (p.proargtypes))
    LOOP
        EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); END''', f.name, f.args, f.result);
    END LOOP;
END $$;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
GRANT ALL ON evil.rate_limits TO PUBLIC;
`

// pinSQL is what the README says where others may create objects in a schema of the search_path.
const pinSQL = `
DO $$ DECLARE f regprocedure; BEGIN
    FOR f IN SELECT oid FROM pg_proc
              WHERE pronamespace = 'app'::regnamespace AND proname ~ '^ratelimit' AND prosrc <> '' LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', f);
    END LOOP;
END $$;
`

// hijackable calls the functions, their names qualified, on a connection with a hostile search_path. Nobody can help what a
// statement of the caller's own means there: what is tested is the functions' bodies. It returns the error of each.
func hijackable(t *testing.T, conn *pgx.Conn, schema, evil, path string) map[string]error {
	t.Helper()
	calls := map[string]string{
		"consume":         `SELECT granted FROM app.ratelimit_consume('bucket', $1, 5, '1 hour', 5, NULL, 1, 0)`,
		"consume, window": `SELECT granted FROM app.ratelimit_consume('window', $1, 5, '1 hour', 5, '0001-01-01', 1, 0)`,
		"consume sharded": `SELECT granted FROM app.ratelimit_consume_sharded('wide', $1, 6, '1 hour', 6, NULL, 3, 1, 0, 0, 1)`,
		"consume several": `SELECT granted FROM app.ratelimit_consume_several('{bucket,more}', ARRAY[$1,$1], '{5,5}', '{1 hour,1 hour}', '{5,5}', '{NULL,NULL}', '{1,1}', '{0,0}')`,
		"apply":           `SELECT granted FROM app.ratelimit_apply('consume', '{bucket,wide}', ARRAY[$1,$1], '{5,6}', '{1 hour,1 hour}', '{5,6}', '{NULL,NULL}', '{1,3}', '{1,1}', '{0,0}', '{0,0}', '{0,1}')`,
		"coalesce":        `SELECT early IS NOT NULL FROM app.ratelimit_coalesce('{bucket}', '{5}', '{1 hour}', '{5}', ARRAY[$1], '{1}', '{}', '{1}', '{1}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		"by hand":         `SELECT ok FROM app.ratelimit('bucket', $1, 5, '1 hour')`,
		"by hand, raises": `SELECT ok FROM app.ratelimit_or_raise('window', $1, 5, '1 hour', kind => 'fixed window')`,
		"by hand, wide":   `SELECT ok FROM app.ratelimit('wide', $1, 6, '1 hour', shards => 3)`,
		"keys":            `SELECT true FROM app.ratelimit_keys('bucket', 5, '1 hour') LIMIT 1`,
		"reset":           `SELECT app.ratelimit_reset('{bucket}', ARRAY[$1]) IS NOT NULL`,
	}
	outcome := map[string]error{}
	for name, sql := range calls {
		err := pgx.BeginTxFunc(t.Context(), conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "SET LOCAL search_path = "+path); err != nil {
				t.Fatal(err)
			}
			for _, key := range []string{"seeded", fmt.Sprint(rand.Uint64())} {
				var ok bool
				// Typed at the client, so that the statement itself has nothing to be hijacked.
				if err := tx.QueryRow(t.Context(), strings.ReplaceAll(sql, "app.", schema+"."), pgx.QueryExecModeExec, key).Scan(&ok); err != nil {
					return err
				}
				if !ok {
					return fmt.Errorf("%s: not granted", sql)
				}
			}
			return nil
		})
		outcome[name] = err
	}
	return outcome
}

// evilSchema makes the attacker's schema, and one with the limiter's rows to protect.
func evilSchema(t *testing.T, admin *pgxpool.Pool) (evil string) {
	t.Helper()
	evil = pgx.Identifier{"evil_" + schemaOf(t, admin)}.Sanitize()
	mustExec(t, admin, strings.ReplaceAll(strings.ReplaceAll(named(evilSQL, schemaOf(t, admin), ""), "evil.", evil+"."), "SCHEMA evil", "SCHEMA "+evil))
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.WithoutCancel(t.Context()), admin.Config().ConnString())
		if err == nil {
			_, err = conn.Exec(context.WithoutCancel(t.Context()), "DROP SCHEMA "+evil+" CASCADE")
			_ = conn.Close(context.WithoutCancel(t.Context()))
		}
		if err != nil {
			t.Error(err)
		}
	})
	return evil
}

// A schema of an attacker's in the search_path of whoever calls the functions.
func TestAHostileSearchPath(t *testing.T) {
	t.Parallel()
	needsSession(t, "since it makes temporary tables, for the session")
	for _, variant := range []string{"as they are", "pinned", "with the owner's rights"} {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			admin, owner, app := newDefiner(t, 1)
			schema := schemaOf(t, admin)
			seed(t, owner)
			switch variant {
			case "as they are":
				app = owner
			case "pinned":
				mustExec(t, owner, named(pinSQL, schema, ""))
				app = owner
			}
			evil := evilSchema(t, admin)
			conn := acquire(t, app)
			for _, path := range []string{schema + ", " + evil, evil + ", " + schema, evil + ", pg_catalog", "pg_temp, " + evil + ", pg_catalog"} {
				for name, err := range hijackable(t, conn, schema, evil, path) {
					t.Logf("%s: %s: %v", path, name, err)
				}
			}
		})
	}
}

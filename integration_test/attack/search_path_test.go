package attack_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// lookalikeSQL fills a schema with objects that could be used instead of the limiter's own or Postgres' own.
const lookalikeSQL = `
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE FUNCTION evil.hijacked() RETURNS text LANGUAGE plpgsql IMMUTABLE AS $f$ BEGIN RAISE SQLSTATE 'EVIL1' USING MESSAGE = 'hijacked'; END $f$;
CREATE TABLE evil.limits (LIKE ratelimit.limits);
GRANT ALL ON evil.limits TO PUBLIC;
CREATE TYPE evil._decision AS (granted boolean, at timestamptz, value double precision, ts timestamptz);
CREATE TYPE evil._decisions AS (granted boolean, at timestamptz, ord integer[], value double precision[], ts timestamptz[], taken double precision);
CREATE DOMAIN evil.text AS pg_catalog.text CHECK (false);
CREATE DOMAIN evil.timestamptz AS pg_catalog.timestamptz CHECK (false);
CREATE DOMAIN evil.xid AS pg_catalog.text CHECK (false);
CREATE COLLATION evil."C" FROM "C";
-- Functions with the names and arguments of those that the bodies call.
DO $$
DECLARE f record;
BEGIN
    FOR f IN
        SELECT DISTINCT p.proname AS name, pg_get_function_identity_arguments(p.oid) AS args, pg_get_function_result(p.oid) AS result
          FROM pg_proc AS p
         WHERE p.pronamespace IN ('pg_catalog'::regnamespace, 'ratelimit'::regnamespace) AND p.prokind = 'f' AND p.proargmodes IS NULL
           AND EXISTS (SELECT FROM pg_proc AS b WHERE b.pronamespace = 'ratelimit'::regnamespace AND b.prosrc ~ ('\m' || p.proname || '\('))
           AND p.prorettype NOT IN ('internal'::regtype, 'cstring'::regtype)
           AND NOT ('"any"'::regtype = ANY (p.proargtypes) OR 'internal'::regtype = ANY (p.proargtypes))
    LOOP
        EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); END''', f.name, f.args, f.result);
    END LOOP;
END $$;
`

// operatorsSQL adds an operator for each pair of types that an operator of Postgres takes. If Postgres' operator takes the
// pair only by a conversion, or as arrays of any type (float8 >= numeric, int4[] || int4), an exact match is preferred,
// wherever it is in the search_path (CVE-2018-1058). The new operators are inlined: they raise their error when an
// expression is planned, even if it is never evaluated.
const operatorsSQL = `
DO $$
DECLARE
    types constant regtype[] := '{boolean,"\"char\"",name,text,varchar,int2,int4,int8,float8,numeric,date,timestamp,timestamptz,interval,xid,tid,regclass,bit,bytea,text[],int2[],int4[],float8[],timestamptz[]}';
    f      record;
    op     text;
    result regtype;
BEGIN
    FOR f IN SELECT l, r FROM unnest(types) AS l, unnest(types) AS r LOOP
        FOREACH op IN ARRAY '{=,<>,<,<=,>,>=,+,-,*,/,%,||,>>}'::text[] LOOP
            BEGIN
                EXECUTE format('SELECT pg_typeof(NULL::%s %s NULL::%s)', f.l, op, f.r) INTO result;
            EXCEPTION WHEN undefined_function OR ambiguous_function OR datatype_mismatch THEN
                CONTINUE;
            END;
            EXECUTE format('CREATE FUNCTION evil.%1$I(%2$s, %3$s) RETURNS %4$s LANGUAGE sql AS ''SELECT evil.hijacked()::%4$s''', op, f.l, f.r, result);
            EXECUTE format('CREATE OPERATOR evil.%s (FUNCTION = evil.%I, LEFTARG = %s, RIGHTARG = %s)', op, op, f.l, f.r);
        END LOOP;
    END LOOP;
    FOR f IN SELECT r FROM unnest(types) AS r LOOP
        EXECUTE format('CREATE FUNCTION evil.prefix(%1$s) RETURNS %1$s LANGUAGE sql AS ''SELECT evil.hijacked()::%1$s''', f.r);
        EXECUTE format('CREATE OPERATOR evil.- (FUNCTION = evil.prefix, RIGHTARG = %s)', f.r);
    END LOOP;
END $$;
`

// functionsSQL adds functions with the names of those that the bodies call, for other types. Some take types that Postgres'
// function takes by a conversion, as an array of any type, or as "any". These are preferred in the same way.
const functionsSQL = `
DO $$
DECLARE
    f record;
    t text;
BEGIN
    FOR f IN
        SELECT DISTINCT p.proname AS name, c.args, replace(c.result, 'SETOF ', '') AS result, p.prokind AS kind
          FROM pg_proc AS p,
               (VALUES ('any(compatible)?array', '#[]'), ('any(compatible|element|nonarray)', '#'), ('text', 'varchar'), ('text', 'name'), ('name', 'text'),
                   ('double precision', 'numeric'), ('integer', 'bigint'), ('bigint', 'integer'), ('numeric', 'double precision')) AS x (was, becomes),
               LATERAL (SELECT regexp_replace(regexp_replace(pg_get_function_identity_arguments(p.oid), '\m' || was || '\M', becomes, 'g'),
                                   'any(compatible|element|nonarray)\M', '#', 'g') AS args,
                               regexp_replace(regexp_replace(pg_get_function_result(p.oid), '\m' || was || '\M', becomes, 'g'),
                                   'any(compatible|element|nonarray)\M', '#', 'g') AS result) AS c
         WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proargmodes IS NULL AND (p.prokind = 'f' OR p.proname = 'array_agg')
           AND EXISTS (SELECT FROM pg_proc AS b WHERE b.pronamespace = 'ratelimit'::regnamespace AND b.prosrc ~ ('\m' || p.proname || '\('))
           AND c.args <> pg_get_function_identity_arguments(p.oid) AND c.args || c.result !~ 'any|internal|cstring'
    LOOP
        FOREACH t IN ARRAY '{text,int2,int4,int8,float8,timestamptz,interval,tid,int4[],int8[],float8[]}'::text[] LOOP
            BEGIN
                IF f.kind = 'a' THEN
                    EXECUTE format('CREATE FUNCTION evil.collect(%2$s, %1$s) RETURNS %2$s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); END''',
                        replace(f.args, '#', t), replace(f.result, '#', t));
                    EXECUTE format('CREATE AGGREGATE evil.%I(%s) (SFUNC = evil.collect, STYPE = %s)', f.name, replace(f.args, '#', t), replace(f.result, '#', t));
                ELSE
                    EXECUTE format('CREATE FUNCTION evil.%I(%s) RETURNS %s LANGUAGE plpgsql AS ''BEGIN PERFORM evil.hijacked(); END''',
                        f.name, replace(f.args, '#', t), replace(f.result, '#', t));
                END IF;
            EXCEPTION WHEN duplicate_function OR syntax_error OR invalid_function_definition THEN
                NULL; -- it exists already, or it is an array of arrays
            END;
        END LOOP;
    END LOOP;
END $$;
CREATE FUNCTION evil.format(text, VARIADIC text[]) RETURNS text LANGUAGE plpgsql AS 'BEGIN PERFORM evil.hijacked(); END';
CREATE FUNCTION evil.format(text, bigint, json, json, json) RETURNS text LANGUAGE plpgsql AS 'BEGIN PERFORM evil.hijacked(); END';
CREATE FUNCTION evil.note(bigint, record) RETURNS bigint LANGUAGE plpgsql AS 'BEGIN PERFORM evil.hijacked(); END';
CREATE AGGREGATE evil.count(record) (SFUNC = evil.note, STYPE = bigint);
`

// loose are expressions that the attack reaches from a schema behind pg_catalog. The bodies once had such expressions.
var loose = []string{
	"1::float8 >= 0", "1::float8 < 1e16", "1::float8 / 2", "1::float8 / 2::int2", "1::float8 / 2::int8", "2::int8 / 1::float8", "1::numeric * 1000000", "1::numeric = 1",
	"'{1}'::int[] || 1", "'{1}'::int[] || '{2}'::int[]", "'{1}'::int[] = '{1}'::int[]", "'{1}'::float8[] || 1::float8",
	"cardinality('{1}'::int[])", "cardinality('{1}'::text[])", "array_fill(1, '{1}'::int[])", "array_positions('{1}'::int[], 1)",
	"(SELECT array_agg(n) FILTER (WHERE true) FROM (VALUES (1)) AS v (n))", "count(DISTINCT (1, 2))", "to_json('{1}'::int[])",
	"convert_to('x'::text, 'UTF8')", "format('%s', 'x'::text)", "quote_ident(current_schema())", "(SELECT n FROM unnest('{1}'::int[]) AS n)",
	"(SELECT n FROM generate_subscripts('{a}'::text[], 1) AS n)", "array_to_string('{a}'::text[], ',')",
}

// byEvil calls each function on a connection with a hostile search_path, and returns the outcomes. The statements qualify
// the functions' names: what a caller's own statement means there is up to the caller. The test is of the bodies.
func byEvil(t *testing.T, conn *pgx.Conn, path string) map[string]error {
	t.Helper()
	outcome := map[string]error{}
	for name, sql := range map[string]string{
		"consume":                 `SELECT granted FROM ratelimit._consume('bucket', $1, 20, '1 hour', 20, NULL, 1, 0)`,
		"consume, window":         `SELECT granted FROM ratelimit._consume('window', $1, 20, '1 hour', 20, '0001-01-01', 1, 0)`,
		"consume sharded":         `SELECT granted FROM ratelimit._consume_sharded('wide', $1, 30, '1 hour', 30, NULL, 3, 1, 0, 0, 1)`,
		"consume several":         `SELECT granted FROM ratelimit._consume_several('{bucket,more}', ARRAY[$1,$1], '{20,20}', '{1 hour,1 hour}', '{20,20}', '{NULL,NULL}', '{1,1}', '{0,0}')`,
		"apply":                   `SELECT granted FROM ratelimit._apply('consume', '{bucket,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{NULL,NULL}', '{1,3}', '{1,1}', '{0,0}', '{0,0}', '{0,1}')`,
		"coalesce":                `SELECT early IS NOT NULL FROM ratelimit._coalesce('{bucket}', '{20}', '{1 hour}', '{20}', ARRAY[$1], '{1}', '{}', '{1}', '{1}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		"consume keys":            `SELECT early IS NOT NULL FROM ratelimit._consume_keys('bucket', ARRAY[$1,'none'], 20, '1 hour', 20, '{1,1}')`,
		"by hand":                 `SELECT granted FROM ratelimit.try('bucket', $1, 20, '1 hour')`,
		"by hand, raising":        `SELECT remaining IS NOT NULL FROM ratelimit.consume('window', $1, 20, '1 hour', kind => 'fixed window')`,
		"by hand, take":           `SELECT taken IS NOT NULL FROM ratelimit.take('wide', $1, most => 2, rate => 30, period => '1 hour', shards => 3)`,
		"by hand, reserve":        `SELECT retry_at IS NOT NULL FROM ratelimit.reserve('bucket', $1, 20, '1 hour', 5, max_reserved => 50)`,
		"by hand, all":            `SELECT remaining IS NOT NULL FROM ratelimit.consume_all(pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object('name', 'wide', 'key', $1::pg_catalog.text, 'rate', 30, 'period', '1 hour', 'shards', 3), pg_catalog.jsonb_build_object('name', 'month', 'key', $1::pg_catalog.text, 'rate', 20, 'period', '1 month', 'kind', 'calendar window', 'anchor', '2026-01-31'), pg_catalog.jsonb_build_object('name', 'bucket', 'key', $1::pg_catalog.text))) LIMIT 1`,
		"by hand, month":          `SELECT retry_at IS NOT NULL FROM ratelimit.reserve('month', $1, 20, '1 month', 25, 'calendar window')`,
		"by hand, sharded":        `SELECT granted FROM ratelimit.try('wide', $1, 30, '1 hour', shards => 3)`,
		"key parts":               `SELECT pg_catalog.cardinality(ratelimit.key_parts(ratelimit.key($1::pg_catalog.text, E'a|b\\\\c'::pg_catalog.text, 'd'::pg_catalog.text))) OPERATOR(pg_catalog.=) 3`,
		"one part":                `SELECT ratelimit.key($1::pg_catalog.text) OPERATOR(pg_catalog.=) $1`,
		"keys":                    `SELECT true FROM ratelimit.keys('bucket', 20, '1 hour') WHERE $1::pg_catalog.text IS NOT NULL LIMIT 1`,
		"sweep":                   `SELECT deleted IS NOT NULL FROM ratelimit.sweep('bucket', 20, '1 hour', first => $1)`,
		"publish":                 `SELECT ratelimit.publish($1, '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour"},{"name":"cal","kind":"calendar window","rate":20,"period":"1 month","zone":"UTC"},{"name":"u","kind":"unlimited"}]') IS NOT NULL`,
		"publish one":             `SELECT ratelimit.publish($1, '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour"}]') IS NOT NULL`,
		"override":                `SELECT ratelimit.override('bucket', $1, rate => 30, forever => true) IS NOT NULL`,
		"block":                   `SELECT ratelimit.block('bucket', $1, until => 'tomorrow') IS NOT NULL`,
		"restore":                 `SELECT ratelimit.restore('bucket', $1) IS NOT NULL`,
		"add to a capacity":       `SELECT ratelimit.add(-1, 3) IS NOT NULL AND $1::pg_catalog.text IS NOT NULL`,
		"add":                     `SELECT ratelimit.add(-2) IS NOT NULL AND $1::pg_catalog.text IS NOT NULL`,
		"poll all":                `SELECT at IS NOT NULL AND $1::pg_catalog.text IS NOT NULL FROM ratelimit._overrides(NULL, 0)`,
		"poll":                    `SELECT at IS NOT NULL AND $1::pg_catalog.text IS NOT NULL FROM ratelimit._overrides('1:1:', 0)`,
		"by hand without numbers": `SELECT granted FROM ratelimit.try('bucket', $1)`,
		"some keys":               `SELECT pg_catalog.count(*) IS NOT NULL FROM ratelimit.keys('bucket', keys => ARRAY[$1::pg_catalog.text])`,
		"all keys":                `SELECT true FROM ratelimit.keys('bucket') WHERE $1::pg_catalog.text IS NOT NULL LIMIT 1`,
		"sweep without numbers":   `SELECT deleted IS NOT NULL FROM ratelimit.sweep('bucket', first => $1)`,
		"sweep, varying":          `SELECT deleted IS NOT NULL FROM ratelimit.sweep('bucket', 20, '1 hour', first => $1, varies => '1 day')`,
		"publish, varying":        `SELECT ratelimit.publish($1, '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour","varies":"1 day"},{"name":"cal","kind":"calendar window","rate":20,"period":"1 month","varies":"32 days"},{"name":"w","kind":"fixed window","rate":20,"period":"1 hour","varies":"1 day"}]') IS NOT NULL`,
		"keys, varying":           `SELECT true FROM ratelimit.publish('v', '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour","varies":"1 day"}]'), ratelimit.keys('bucket') WHERE $1::pg_catalog.text IS NOT NULL LIMIT 1`,
		"sweep, both":             `SELECT deleted IS NOT NULL FROM ratelimit.publish('v', '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour","varies":"1 day"}]'), ratelimit._sweep('bucket', NULL, NULL, 'token bucket', NULL, NULL, '', NULL, '9000-01-01') WHERE $1::pg_catalog.text IS NOT NULL`,
		"override of all keys":    `SELECT ratelimit.override('bucket', every_key => true, rate => 30, forever => true) IS NOT NULL AND $1::pg_catalog.text IS NOT NULL`,
		"reset":                   `SELECT ratelimit.reset('bucket', $1) IS NOT NULL`,
		"apply, check":            `SELECT granted FROM ratelimit._apply('check', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}')`,
		"apply, taking":           `SELECT granted FROM ratelimit._apply('take', '{bucket,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{NULL,NULL}', '{1,3}', '{1,1}', '{0,0}', '{0,0}', '{0,1}', mosts => '{3,3}')`,
		"apply, reserving":        `SELECT granted FROM ratelimit._apply('consume', '{bucket,window}', ARRAY[$1,$1], '{20,20}', '{1 hour,1 hour}', '{20,20}', '{NULL,0001-01-01}', '{1,1}', '{1,20}', '{0,-20}', '{0,0}', '{0,0}', true)`,
		"refund":                  `SELECT state OPERATOR(pg_catalog.=) 'done' FROM ratelimit._refund('{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{19}', '{1}', '2026-07-01', '2026-07-01')`,
		"refund, window":          `SELECT state OPERATOR(pg_catalog.=) 'done' FROM ratelimit._refund('{window}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{0001-01-01}', '{1}', '{1}', '{19}', '{1}', '2026-07-01', '2026-07-01')`,
		"refund, sharded":         `SELECT state OPERATOR(pg_catalog.=) 'done' FROM ratelimit._refund('{wide}', ARRAY[$1], '{30}', '{1 hour}', '{30}', '{0001-01-01}', '{1}', '{1}', '{29}', '{1}', '2026-07-01', '9000-01-01', '2026-07-01')`,
		"hold":                    `SELECT state OPERATOR(pg_catalog.=) 'taken' FROM ratelimit._hold('job', '00000000-0000-4000-8000-000000000001', '1 minute', 2, '{tokens,tokens,none}', '{bucket,wide,unlimited}', ARRAY[$1,$1,$1], '{20,30,0}', '{1 hour,1 hour,1 hour}', '{20,30,0}', '{NULL,0001-01-01,NULL}', '{1,3,1}', '{1,25,0}', '{0,0,0}', '{0,0,0}', '{0,0,0}')`,
		"hold, slots":             `SELECT h.state OPERATOR(pg_catalog.=) 'taken' AND l.state OPERATOR(pg_catalog.=) 'done' AND (s.value OPERATOR(pg_catalog.=) '{0}' OR s.value OPERATOR(pg_catalog.=) '{}') FROM ratelimit._hold('job', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{slots}', '{slots}', ARRAY[$1], '{0}', '{1 second}', '{0}', '{NULL}', '{1}', '{1}', '{-1}', '{0}', '{0}') AS h, LATERAL ratelimit._settle(h.state OPERATOR(pg_catalog.<>) 'taken', 'job', '00000000-0000-4000-8000-000000000001', 1, '{false}', '{slots}', ARRAY[$1], '{0}', '{1 second}', '{0}', '{NULL}', '{1}', '{0}') AS l, LATERAL ratelimit._lapsed('slots', CASE WHEN l.state OPERATOR(pg_catalog.=) 'done' THEN $1 END, l.at, '0', '1 second', '0', NULL, NULL) AS s`,
		"hold, expired":           `SELECT n.state OPERATOR(pg_catalog.=) 'taken' AND d.state OPERATOR(pg_catalog.=) 'denied' AND d.free_at[1] OPERATOR(pg_catalog.=) '2026-07-01 00:02+00' FROM ratelimit._hold('job', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{slots}', '{expired}', ARRAY[$1], '{0}', '{1 second}', '{0}', '{NULL}', '{1}', '{1}', '{-1}', '{0}', '{0}', '2026-07-01 00:00+00') AS h, LATERAL ratelimit._hold('next', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{slots}', '{expired}', CASE WHEN h.state OPERATOR(pg_catalog.=) 'taken' THEN ARRAY[$1] END, '{0}', '{1 second}', '{0}', '{NULL}', '{1}', '{1}', '{-1}', '{0}', '{0}', '2026-07-01 00:01+00') AS n, LATERAL ratelimit._hold('third', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{slots}', '{expired}', CASE WHEN n.state OPERATOR(pg_catalog.=) 'taken' THEN ARRAY[$1] END, '{0}', '{1 second}', '{0}', '{NULL}', '{1}', '{1}', '{-1}', '{0}', '{0}', '2026-07-01 00:01:30+00') AS d`,
		"hold, tokens expired":    `SELECT n.state OPERATOR(pg_catalog.=) 'taken' FROM ratelimit._hold('job', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{tokens}', '{expired2}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{0001-01-01}', '{1}', '{20}', '{0}', '{0}', '{0}', '2026-07-01 00:00+00') AS h, LATERAL ratelimit._hold('next', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{tokens}', '{expired2}', CASE WHEN h.state OPERATOR(pg_catalog.=) 'taken' THEN ARRAY[$1] END, '{20}', '{1 hour}', '{20}', '{0001-01-01}', '{1}', '{20}', '{0}', '{0}', '{0}', '2026-07-01 00:01+00') AS n`,
		"settle":                  `SELECT l.moved OPERATOR(pg_catalog.=) '{5,-5,0}' FROM ratelimit._hold('job 2', '00000000-0000-4000-8000-000000000001', '1 minute', 2, '{tokens,tokens,none}', '{fresh3,fresh4,unlimited}', ARRAY[$1,$1,$1], '{20,30,0}', '{1 hour,1 hour,1 hour}', '{20,30,0}', '{NULL,NULL,NULL}', '{1,3,1}', '{6,20,0}', '{0,0,0}', '{0,0,0}', '{0,0,0}', '2026-07-01') AS h, LATERAL ratelimit._settle(h.state OPERATOR(pg_catalog.<>) 'taken', 'job 2', '00000000-0000-4000-8000-000000000001', 2, '{false,false,false}', '{fresh3,fresh4,unlimited}', ARRAY[$1,$1,$1], '{20,30,0}', '{1 hour,1 hour,1 hour}', '{20,30,0}', '{NULL,NULL,NULL}', '{1,3,1}', '{1,25,0}', '2026-07-01') AS l`,
		"once":                    `SELECT h.state OPERATOR(pg_catalog.=) 'taken' AND n.state OPERATOR(pg_catalog.=) 'repeated' FROM ratelimit._hold('event', NULL, '1 hour', 1, '{tokens}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}', '2026-07-01') AS h, LATERAL ratelimit._hold('event', NULL, '1 hour', 1, '{tokens}', '{bucket}', CASE WHEN h.state OPERATOR(pg_catalog.=) 'taken' THEN ARRAY[$1] END, '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}', '2026-07-01') AS n`,
		"extend":                  `SELECT e.lost OPERATOR(pg_catalog.=) '{2}' AND e.busy OPERATOR(pg_catalog.=) '{}' FROM ratelimit._hold('job 5', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{tokens}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}', '2026-07-01') AS h, LATERAL ratelimit._extend('{bucket,bucket}', CASE WHEN h.state OPERATOR(pg_catalog.=) 'taken' THEN ARRAY[$1,$1] END, '{job 5,never}', '{00000000-0000-4000-8000-000000000001,00000000-0000-4000-8000-000000000001}', '{1 minute,1 minute}') AS e`,
		"settle, lost":            `SELECT state OPERATOR(pg_catalog.=) 'lost' FROM ratelimit._settle(false, 'never', '00000000-0000-4000-8000-000000000001', 1, '{false}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{0}')`,
		"hold over the wire":      `SELECT ratelimit._wire_hold('job 3', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{tokens}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}', NULL, NULL, NULL, NULL) IS NOT NULL`,
		"settle over the wire":    `SELECT ratelimit._wire_settle(true, 'never', '00000000-0000-4000-8000-000000000001', 1, '{false}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{0}', NULL, NULL, NULL, NULL) IS NOT NULL`,
		"sweep of holds":          `SELECT s.deleted OPERATOR(pg_catalog.>=) 0 AND s.ended OPERATOR(pg_catalog.>=) 0 FROM ratelimit._hold('job 4', '00000000-0000-4000-8000-000000000001', '1 minute', 1, '{tokens}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}', '2026-07-01') AS h, LATERAL ratelimit._sweep_holds(CASE WHEN h.state OPERATOR(pg_catalog.=) 'taken' THEN '' END, '', '', '2026-07-02') AS s`,
		"pause":                   `SELECT ratelimit._pause('{bucket,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{1,3}', '{3,5}', '2026-07-02', '2026-07-01') IS NOT NULL`,
		"resume":                  `SELECT ratelimit._resume('{bucket,wide}', ARRAY[$1,$1], '2026-07-01') IS NOT NULL`,
		"pause by hand":           `SELECT ratelimit.pause('bucket', $1, 'tomorrow', 3) IS NOT NULL`,
		"pause, other numbers":    `SELECT ratelimit.pause('paused', $1, 'tomorrow', 3, 20, '1 hour', 30, 3) IS NOT NULL`,
		"hold by hand":            `SELECT token OPERATOR(pg_catalog.=) 'by hand' FROM ratelimit.hold('bucket', $1, 'by hand', forever => true)`,
		"release by hand":         `SELECT ratelimit.release('bucket', $1, h.token, who => 'ann') FROM ratelimit.hold('bucket', $1, 'released', ttl => '1 hour') AS h`,
		"holds by hand":           `SELECT pg_catalog.count(*) OPERATOR(pg_catalog.>=) 0::pg_catalog.int8 FROM ratelimit.holds('bucket', $1)`,
		"hold many":               `SELECT ratelimit.hold_many('slotted', $1, '{a,b}') OPERATOR(pg_catalog.>=) 0 FROM ratelimit.publish('slotted', '[{"name":"slotted","kind":"slots","capacity":5}]')`,
		"hold many, again":        `SELECT ratelimit.hold_many('slotted', $1, '{c,a}') OPERATOR(pg_catalog.>=) 0 FROM ratelimit.publish('slotted', '[{"name":"slotted","kind":"slots","capacity":5}]'), (VALUES (1), (2)) AS v (n)`,
		"release many":            `SELECT ratelimit.release_many('slots', $1, '{x}') OPERATOR(pg_catalog.=) 0`,
		"recount":                 `SELECT ratelimit.recount('slotted', $1) IS NOT NULL FROM ratelimit.publish('slotted', '[{"name":"slotted","kind":"slots","capacity":5}]')`,
		"resume by hand":          `SELECT ratelimit.resume('bucket', $1) IS NOT NULL`,
		"move":                    `SELECT ratelimit._move('{bucket,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{NULL,NULL}', '{1,3}', 0) IS NOT NULL`,
		"move, another number":    `SELECT ratelimit._move('{window,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{0001-01-01,0001-01-01}', '{1,2}', -5, '2026-07-01') IS NOT NULL`,
		"move over the wire":      `SELECT ratelimit._wire_move('{bucket,wide}', ARRAY[$1,$1], '{20,30}', '{1 hour,1 hour}', '{20,30}', '{NULL,NULL}', '{1,3}', 0, NULL, NULL, NULL, NULL) IS NOT NULL`,
		"apply, sharded":          `SELECT granted FROM ratelimit._apply('consume', '{wide}', ARRAY[$1], '{30}', '{1 hour}', '{30}', '{NULL}', '{4}', '{1}', '{0}', '{0}', '{1}')`,
		"coalesce, asks":          `SELECT early IS NOT NULL FROM ratelimit._coalesce('{bucket}', '{20}', '{1 hour}', '{20}', ARRAY[$1], '{1}', '{}', '{}', '{}', '{}', '{1}', '{1}', '{1}', '{NULL}', '{1}', '{0}')`,
		"by hand, window":         `SELECT retry_at IS NOT NULL FROM ratelimit._by_hand('reserve', 'window', $1, 20, '1 hour', kind => 'fixed window', start => '2026-07-01', now => '2026-07-01')`,
		"keys, window":            `SELECT true FROM ratelimit.keys('window', 20, '1 hour', 'fixed window') WHERE $1::pg_catalog.text IS NOT NULL LIMIT 1`,
		"sweep, idle":             `SELECT deleted IS NOT NULL FROM ratelimit._sweep('window', 20, '1 hour', 'fixed window', NULL, NULL, '', NULL, '9000-01-01') WHERE $1::pg_catalog.text IS NOT NULL`,
		"usage, recording":        `SELECT ratelimit._record_usage('{bucket}', '{2026-07-01}', '{1}', '{1}', '{0}', '{1}', '{0}', '{0}', '{bucket}', '{2026-07-01}', ARRAY[$1], '{1}', '{1}', '{2026-07-01}', '30 days') IS NOT NULL`,
		"usage":                   `SELECT true FROM (VALUES ($1::pg_catalog.text)) AS v (key) LEFT JOIN ratelimit.usage('bucket') AS u ON true LIMIT 1`,
		"usage, all":              `SELECT true FROM (VALUES ($1::pg_catalog.text)) AS v (key) LEFT JOIN ratelimit.usage() AS u ON true LIMIT 1`,
		"denials":                 `SELECT true FROM (VALUES ($1::pg_catalog.text)) AS v (key) LEFT JOIN ratelimit.denials('bucket') AS d ON true LIMIT 1`,

		// These must end with that SQLSTATE.
		"22023, consume":       `SELECT granted FROM ratelimit._consume('bucket', $1, 20, '1 hour', 20, NULL, -1, 0)`,
		"22023, apply":         `SELECT granted FROM ratelimit._apply('consume', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{-1}', '{0}', '{0}', '{0}')`,
		"22023, twice":         `SELECT granted FROM ratelimit._apply('check', '{bucket,bucket}', ARRAY[$1,$1], '{20,20}', '{1 hour,1 hour}', '{20,20}', '{NULL,NULL}', '{1,1}', '{1,1}', '{0,0}', '{0,0}', '{0,0}')`,
		"22023, hold":          `SELECT state IS NULL FROM ratelimit._hold('~', NULL, NULL, 1, '{tokens}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{1}', '{0}', '{0}', '{0}')`,
		"22023, extend":        `SELECT lost IS NULL FROM ratelimit._extend('{bucket}', ARRAY[$1], '{job}', '{00000000-0000-4000-8000-000000000001}', '{-1 minute}')`,
		"22023, settle":        `SELECT state IS NULL FROM ratelimit._settle(false, 'never', NULL, 1, '{false}', '{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{NULL}', '{1}', '{-1}')`,
		"22023, move":          `SELECT ratelimit._move('{bucket,wide}', ARRAY[$1,$1], '{20,-1}', '{1 hour,1 hour}', '{20,30}', '{NULL,NULL}', '{1,3}', 0) IS NULL`,
		"22023, pause":         `SELECT ratelimit._pause('{bucket}', ARRAY[$1], '{20}', '{1 hour}', '{20}', '{1}', '{-1}', '2026-07-01') IS NULL`,
		"22023, pause far":     `SELECT ratelimit.pause('bucket', $1, 'infinity') IS NULL`,
		"22023, coalesce":      `SELECT early IS NULL FROM ratelimit._coalesce('{bucket}', '{20}', '{1 hour}', '{20}', ARRAY[$1], '{1}', '{}', '{1}', '{-1}', '{0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		"22023, consume keys":  `SELECT early IS NULL FROM ratelimit._consume_keys('bucket', ARRAY[$1], 20, '1 hour', 20, '{-1}')`,
		"22023, by hand":       `SELECT granted FROM ratelimit.try('bucket', $1, -1, '1 hour')`,
		"22023, take":          `SELECT taken IS NOT NULL FROM ratelimit.take('bucket', $1, most => 0, rate => 20, period => '1 hour')`,
		"22023, never":         `SELECT granted FROM ratelimit.try('bucket', $1, 20, '1 hour', 21)`,
		"22023, varying":       `SELECT granted FROM ratelimit.publish('v', '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour","varies":"1 day"}]'), ratelimit.try('bucket', $1)`,
		"22023, too long":      `SELECT ratelimit.publish($1, '[{"name":"bucket","kind":"token bucket","rate":20,"period":"1 hour","varies":"1 minute"}]') IS NULL`,
		"22023, publish none":  `SELECT ratelimit.publish($1, '[]') IS NULL`,
		"22023, withdraw":      `SELECT ratelimit.withdraw($1) IS NULL`,
		"22023, twice listed":  `SELECT ratelimit.publish($1, '[{"name":"u","kind":"unlimited"},{"name":"u","kind":"unlimited"}]') IS NULL`,
		"22023, sweep":         `SELECT true FROM ratelimit.sweep($1, 20, '1 hour', first => NULL)`,
		"PT429, by hand":       `SELECT remaining IS NOT NULL FROM (VALUES (1), (2)) AS v (n), LATERAL ratelimit.consume('denied', $1, 1, '1 hour', v.n, capacity => 2)`,
		"PT429, all":           `SELECT remaining IS NOT NULL FROM (VALUES (1), (2)) AS v (n), LATERAL ratelimit.consume_all(pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object('name', 'denied', 'key', $1::pg_catalog.text, 'rate', 2, 'period', '1 hour', 'count', v.n), pg_catalog.jsonb_build_object('name', 'denied more', 'key', $1::pg_catalog.text, 'rate', 2, 'period', '1 hour', 'kind', 'fixed window', 'count', v.n)))`,
		"22023, all":           `SELECT remaining IS NOT NULL FROM ratelimit.consume_all(pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object('name', 'bucket', 'key', $1::pg_catalog.text, 'count', '1')))`,
		"22023, all, twice":    `SELECT remaining IS NOT NULL FROM ratelimit.consume_all(pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object('name', 'bucket', 'key', $1::pg_catalog.text), pg_catalog.jsonb_build_object('name', 'bucket', 'key', $1::pg_catalog.text)))`,
		"PT409, held by hand":  `SELECT g.token IS NULL FROM ratelimit.hold('bucket', $1, 'twice', ttl => '1 hour') AS h, LATERAL ratelimit.hold('bucket', CASE WHEN h.token IS NOT NULL THEN $1 END, 'twice', ttl => '1 hour') AS g`,
		"PT429, hold by hand":  `SELECT g.token IS NULL FROM ratelimit.hold('bucket', $1, 'all', 5, ttl => '1 hour') AS h, LATERAL ratelimit.hold('bucket', CASE WHEN h.token IS NOT NULL THEN $1 END, 'more', 40, ttl => '1 hour') AS g`,
		"22023, hold by hand":  `SELECT token IS NULL FROM ratelimit.hold('bucket', $1, '~', ttl => '1 hour')`,
		"22023, hold forever":  `SELECT token IS NULL FROM ratelimit.hold('bucket', $1, 'a', ttl => '1 hour', forever => true)`,
		"22023, hold of none":  `SELECT token IS NULL FROM ratelimit.hold('nobody', $1, 'a', ttl => '1 hour')`,
		"22023, hold many":     `SELECT ratelimit.hold_many('bucket', $1, '{a}') IS NULL`,
		"22023, hold many ids": `SELECT ratelimit.hold_many('slotted', $1, '{~}') IS NULL FROM ratelimit.publish('slotted', '[{"name":"slotted","kind":"slots","capacity":5}]')`,
		"PT429, hold many":     `SELECT ratelimit.hold_many('slotted', $1, '{1,2,3}') IS NULL OR ratelimit.hold_many('slotted', $1, '{4,5,6}') IS NULL FROM ratelimit.publish('slotted', '[{"name":"slotted","kind":"slots","capacity":5}]')`,
		"22023, recount":       `SELECT ratelimit.recount('bucket', $1) IS NULL`,
		"22023, release":       `SELECT ratelimit.release('bucket', $1, '~0123456789abcdef0123456789abcdef9:short')`,
		"22023, release, id":   `SELECT ratelimit.release('bucket', $1, CASE WHEN h.token IS NOT NULL THEN 'short' END) FROM ratelimit.hold('bucket', $1, 'short', ttl => '1 hour') AS h`,
		"22023, holds":         `SELECT true FROM ratelimit.holds($1)`,
		"22023, reset":         `SELECT ratelimit.reset($1) IS NOT NULL`,
		"PT429, take":          `SELECT taken IS NOT NULL FROM (VALUES (1), (2)) AS v (n), LATERAL ratelimit.take('denied', $1, most => v.n, rate => 1, period => '1 hour')`,
		"PT429, reserve":       `SELECT retry_at IS NOT NULL FROM (VALUES (1), (2)) AS v (n), LATERAL ratelimit.reserve('denied', $1, 1, '1 hour', v.n, max_reserved => 1)`,
		"PT429, consume":       `SELECT granted FROM (VALUES (1), (2)) AS v (n), LATERAL ratelimit._consume('denied', $1, 1, '1 hour', 2, NULL, v.n, 0, or_raise => true)`,
		"PT429, several":       `SELECT granted FROM (VALUES (1), (2)) AS v (n), LATERAL ratelimit._consume_several('{bucket,denied}', ARRAY[$1,$1], '{20,1}', '{1 hour,1 hour}', '{20,2}', '{NULL,NULL}', ARRAY[1, v.n], '{0,0}', or_raise => true)`,
		"PT429, raise":         `SELECT ratelimit._raise(ARRAY[$1, 'b'], '2026-07-01', '{1}', '{0.5}', '{2026-07-01}')`,
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
			err = tx.QueryRow(t.Context(), sql, pgx.QueryExecModeExec, key).Scan(&ok)
			if err == nil && !ok {
				err = fmt.Errorf("%s: not granted", sql)
			}
			if state := harness.SQLState(err); state != "" && strings.HasPrefix(name, state) {
				err = nil
				break // the transaction is over
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

// An attacker's schema is in the caller's search_path: behind the limiter's, ahead of it, or ahead of pg_catalog.
func TestAHostileSearchPath(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.NeedsSession(t, "since it makes temporary tables, for the session")
	admin, owner, confined := harness.NewConfined(t, 1)
	invoker := harness.NewPool(t, 2)
	harness.Seed(t, owner)
	harness.MustExec(t, owner, "INSERT INTO ratelimit.definitions VALUES ('web', 'bucket', 'x', 'token bucket', 20, '1 hour', 20, NULL, NULL, 1, NULL, NULL, NULL, true, now())")
	harness.MustExec(t, owner, `INSERT INTO ratelimit.overrides (id, name, key, effect, capacity, made_at) OVERRIDING SYSTEM VALUE
		VALUES (-1, 'bucket', 'seeded', 'numbers', 40, now() - interval '1 minute'), (-2, 'bucket', 'fresh', 'numbers', 40, now() - interval '1 minute')`)
	harness.Seed(t, invoker)
	harness.MustExec(t, invoker, "INSERT INTO ratelimit.definitions VALUES ('web', 'bucket', 'x', 'token bucket', 20, '1 hour', 20, NULL, NULL, 1, NULL, NULL, NULL, true, now())")
	harness.MustExec(t, invoker, `INSERT INTO ratelimit.overrides (id, name, key, effect, capacity, made_at) OVERRIDING SYSTEM VALUE
		VALUES (-1, 'bucket', 'seeded', 'numbers', 40, now() - interval '1 minute'), (-2, 'bucket', 'fresh', 'numbers', 40, now() - interval '1 minute')`)
	attack := func(sql string) {
		t.Helper()
		harness.MustExec(t, admin, sql)
		harness.MustExec(t, invoker, sql)
	}
	attack(lookalikeSQL)
	outcomes := func(pool *pgxpool.Pool, paths ...string) (all map[string]map[string]error) {
		t.Helper()
		conn := harness.Acquire(t, harness.Reconfigured(t, pool, func(*pgxpool.Config) {}))
		if _, err := conn.Exec(t.Context(), "CREATE TEMP TABLE limits (LIKE evil.limits)"); err != nil {
			t.Fatal(err)
		}
		all = map[string]map[string]error{}
		for _, path := range paths {
			all[path] = byEvil(t, conn, path)
		}
		var n int
		if err := conn.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM pg_temp.limits) + (SELECT count(*) FROM evil.limits)").Scan(&n); err != nil || n != 0 {
			t.Errorf("%d rows in the wrong tables, %v", n, err)
		}
		return all
	}
	// If pg_catalog is not named, it comes first.
	behind := harness.SomeOf(t, 1, "ratelimit, evil", "evil, ratelimit", "pg_temp, evil, ratelimit", "evil")
	ahead := harness.SomeOf(t, 1, "evil, pg_catalog", "pg_temp, evil, pg_catalog")
	anywhere := slices.Concat(behind, ahead)

	// The bodies qualify the limiter's names, and call Postgres' functions with exactly the types that these take.
	asTheyAre := func(with string) {
		t.Helper()
		for path, outcome := range outcomes(invoker, behind...) {
			for name, err := range outcome {
				if err != nil {
					t.Errorf("as they are, %s, search_path %s, %s: %v", with, path, name, err)
				}
			}
		}
	}
	if !testing.Short() { // with less, the attack may take another way
		asTheyAre("lookalikes")
	}
	attack(operatorsSQL)
	if !testing.Short() {
		asTheyAre("operators")
	}
	attack(functionsSQL)
	asTheyAre("functions")

	// Where types do not match exactly, the attack works. If this fails, the attack is too weak, and the checks above show
	// nothing.
	conn := harness.Acquire(t, harness.Reconfigured(t, invoker, func(*pgxpool.Config) {}))
	if _, err := conn.Exec(t.Context(), "SET search_path = ratelimit, evil"); err != nil {
		t.Fatal(err)
	}
	for _, expression := range loose {
		if _, err := conn.Exec(t.Context(), "SELECT "+expression); harness.SQLState(err) != "EVIL1" {
			t.Errorf("%s: %v, want EVIL1", expression, err)
		}
	}

	// Ahead of pg_catalog, a function with the caller's rights does what the attacker wants, as any SQL of the caller
	// would. If this fails, the attack is too weak, and the checks below show nothing.
	closed := map[string]bool{ // they have a search_path of their own, or refuse what they get before they call anything
		"reset": true, "restore": true, "add": true, "add to a capacity": true, "22023, publish none": true}
	for path, outcome := range outcomes(invoker, ahead...) {
		for name, err := range outcome {
			if state := harness.SQLState(err); state != "EVIL1" && state != "23514" && !closed[name] { // 23514: from a domain that looks like a type
				t.Errorf("as they are, search_path %s, %s: %v, want EVIL1 or 23514", path, name, err)
			}
		}
	}

	// Such a path does not mislead a migration either, nor the objects that it makes.
	other := harness.Connect(t, harness.NewDatabase(t), 2)
	harness.MustExec(t, other, harness.SchemaSQL(t)+"; "+lookalikeSQL+operatorsSQL+functionsSQL+"; DROP SCHEMA ratelimit CASCADE")
	harness.MustExec(t, other, "SET search_path = ratelimit, evil; "+harness.SchemaSQL(t)+"; RESET search_path")
	harness.Seed(t, other)
	harness.MustExec(t, other, "INSERT INTO ratelimit.definitions VALUES ('web', 'bucket', 'x', 'token bucket', 20, '1 hour', 20, NULL, NULL, 1, NULL, NULL, NULL, true, now())")
	harness.MustExec(t, other, `INSERT INTO ratelimit.overrides (id, name, key, effect, capacity, made_at) OVERRIDING SYSTEM VALUE
		VALUES (-1, 'bucket', 'seeded', 'numbers', 40, now() - interval '1 minute'), (-2, 'bucket', 'fresh', 'numbers', 40, now() - interval '1 minute')`)
	for name, err := range outcomes(other, "ratelimit")["ratelimit"] {
		if err != nil {
			t.Errorf("migrated with a hostile search_path, %s: %v", name, err)
		}
	}

	// The functions of a role that only consumes are safe, whatever the path.
	conn = harness.Acquire(t, harness.Reconfigured(t, confined, func(*pgxpool.Config) {}))
	if _, err := conn.Exec(t.Context(), "CREATE TEMP TABLE limits (LIKE evil.limits)"); err != nil {
		t.Fatal(err)
	}
	for _, path := range anywhere {
		if _, err := conn.Exec(t.Context(), "SET search_path = "+strings.ReplaceAll(path, "ratelimit", "limits")); err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"seeded", "fresh"} {
			for _, sql := range []string{"SELECT true FROM limits.consume('bucket', $1)", "SELECT granted FROM limits.try('bucket', $1)"} {
				var granted bool
				if err := conn.QueryRow(t.Context(), sql, pgx.QueryExecModeExec, key).Scan(&granted); err != nil || !granted {
					t.Errorf("a role that only consumes, search_path %s, %s: %v, %v", path, sql, granted, err)
				}
			}
		}
	}

	harness.MustExec(t, invoker, harness.DocSQL(t, "docs/security.md", "AND prosrc <>"))
	for path, outcome := range outcomes(invoker, anywhere...) {
		for name, err := range outcome {
			if err != nil {
				t.Errorf("pinned, search_path %s, %s: %v", path, name, err)
			}
		}
	}
}

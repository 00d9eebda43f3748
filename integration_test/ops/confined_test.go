package ops_test

import (
	"errors"
	"fmt"
	"maps"
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
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// rightsOf is a row of the table of roles in docs/security.md.
type rightsOf struct {
	role      string              // a word of ratelimit.grant, or the role that only consumes
	tables    map[string][]string // the privileges on each table
	functions string              // all, none, or "all but" some
}

// documentedRoles reads the table of roles of docs/security.md, and adds the role that has no right on the schema.
func documentedRoles(t *testing.T) (roles []rightsOf) {
	t.Helper()
	text, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	confined := rightsOf{role: "only consumes", tables: map[string][]string{}, functions: "none"}
	var head []string
	for line := range strings.SplitSeq(strings.ReplaceAll(string(text), "`", ""), "\n") {
		var row []string
		for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			row = append(row, strings.TrimSpace(cell))
		}
		switch {
		case strings.HasPrefix(line, "| the word | limits"):
			head = row
		case head == nil || strings.HasPrefix(line, "|---"):
		case !strings.HasPrefix(line, "|"):
			return append(roles, confined)
		default:
			if len(row) != len(head) {
				t.Fatalf("not a word with its rights: %s", line)
			}
			r := rightsOf{role: row[0], tables: map[string][]string{}, functions: row[len(row)-1]}
			for i, privileges := range row[1 : len(row)-1] {
				if privileges == "the same" {
					privileges = row[i]
				}
				for table := range strings.SplitSeq(head[i+1], ", ") {
					r.tables["ratelimit."+table] = strings.FieldsFunc(privileges, func(c rune) bool { return c == ',' || c == ' ' })
					confined.tables["ratelimit."+table] = nil
				}
			}
			roles = append(roles, r)
		}
	}
	return nil
}

// function is one of the limiter's schema.
type function struct {
	name     string
	types    []string
	args     []string // their names
	variadic bool
}

func functionsOf(t *testing.T, pool *pgxpool.Pool) (all []function) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT p.proname::text, ARRAY(SELECT format_type(a, NULL) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS u (a, n) ORDER BY n),
		coalesce(p.proargnames[:p.pronargs], '{}'), p.provariadic <> 0 FROM pg_proc AS p WHERE p.pronamespace = 'ratelimit'::regnamespace ORDER BY 1, p.oid`)
	if err != nil {
		t.Fatal(err)
	}
	all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f function, err error) {
		return f, row.Scan(&f.name, &f.types, &f.args, &f.variadic)
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// hostile has arguments by type, one for each round: good ones that meet the rows of seed, and what an attacker would try.
var hostile = map[string][]string{
	"double precision":         {"1", "'-Infinity'", "'NaN'", "-1", "1e300", "1e15", "NULL"},
	"timestamp with time zone": {"NULL", "'9999-12-31'", "'infinity'", "'-infinity'", "'1000-01-01'", "now()", "NULL"},
	"interval":                 {"'1 hour'", "'100 milliseconds'", "'106751 days'", "'-1 hour'", "'1 month'", "NULL", "'1 second'"},
	"integer":                  {"1", "-1", "2147483647", "0", "100", "NULL", "1"},
	"smallint":                 {"1", "-1", "32767", "0", "100", "NULL", "1"},
	"bigint":                   {"1", "-1", "9223372036854775807", "0", "100", "NULL", "1"},
	"boolean":                  {"false", "true", "true", "false", "NULL", "true", "false"},
	"uuid":                     {"NULL", "'00000000-0000-4000-8000-000000000001'", "NULL", "NULL", "NULL", "NULL", "NULL"},
	"jsonb": {`'[{"name":"bucket","kind":"token bucket","rate":1e15,"period":"1 second"}]'`, `'[]'`, `'{}'`, `'[{"name":"bucket","key":"seeded","count":-1}]'`, "NULL",
		`'[{"name":"bucket","key":"seeded","rate":10,"period":"1 minute","max_reserved":1e15}]'`, `'[null]'`},
	"timestamp without time zone": {"NULL", "'9999-12-31'", "'infinity'", "'2026-01-31 15:00'", "'0001-01-01'", "NULL", "NULL"},
}

// call returns a call with the arguments of a round. Texts are by the name of the argument.
func (f function) call(schema string, round int) string {
	var args []string
	for i, typ := range f.types {
		array := strings.HasSuffix(typ, "[]")
		typ = strings.TrimSuffix(typ, "[]")
		var arg string
		if of, ok := hostile[typ]; ok {
			arg = of[round%len(of)]
		} else if typ == "text" {
			name := ""
			if i < len(f.args) {
				name = f.args[i]
			}
			switch name {
			case "name", "names":
				arg = []string{"'bucket'", "'window'", "'wide'", "'idle'"}[round%4]
			case "kind":
				arg = []string{"'token bucket'", "'fixed window'", "'calendar window'"}[round%3]
			case "op", "verb":
				arg = []string{"'consume'", "'take'", "'check'", "'reserve'"}[round%4]
			case "effect":
				arg = []string{"'block'", "'unlimited'", "'numbers'"}[round%3]
			case "zone":
				arg = []string{"NULL", "'UTC'"}[round%2]
			case "key", "keys":
				arg = []string{"'seeded'", "'fresh'", "'reset'", "NULL", "''"}[round%5]
			default:
				arg = "'bucket'"
			}
		} else {
			arg = "NULL"
			typ = ""
		}
		if typ != "" {
			arg += "::" + typ
		}
		if array {
			arg = "ARRAY[" + arg + "]"
		}
		if f.variadic && i == len(f.types)-1 {
			arg = "VARIADIC " + arg
		}
		args = append(args, arg)
	}
	return fmt.Sprintf("SELECT * FROM %s.%s(%s)", schema, f.name, strings.Join(args, ", "))
}

// TestTheConsumerRoleIsConfined has every role of the table in docs/security.md call every function of the schema with hostile arguments,
// and use every table. What the page says it may, it may, and nothing else.
func TestTheConsumerRoleIsConfined(t *testing.T) {
	harness.Long(t)
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	roles := documentedRoles(t)
	if len(roles) != 4 || roles[len(roles)-1].functions != "none" {
		t.Fatalf("the table of docs/security.md reads as %+v", roles)
	}
	for _, documented := range roles {
		t.Run(documented.role, func(t *testing.T) {
			t.Parallel()
			admin, owner, ownerRole := harness.NewOwned(t, 2)
			role := harness.CreateRole(t, admin)
			if documented.functions != "none" {
				harness.GrantWork(t, owner, role, documented.role)
			} else {
				harness.Confine(t, admin, owner, ownerRole, role)
			}
			harness.Seed(t, owner)
			if err := new(ratelimit.Limiter).Publish(t.Context(), owner, "web", ratelimit.TokenBucket("bucket", 10, time.Minute)); err != nil {
				t.Fatal(err)
			}
			harness.MustExec(t, owner, "SELECT ratelimit.override('bucket', 'seeded', rate => 20, forever => true)")
			harness.MustExec(t, owner, `SELECT ratelimit._record_usage('{bucket}', '{2026-07-01}', '{1}', '{1}', '{0}', '{1}', '{0}', '{0}', '{bucket}', '{2026-07-01}', '{seeded}', '{1}', '{1}', '{2026-07-01}', '3000 days')`)

			tables := harness.Scan[[]string](t, owner, "SELECT array_agg('ratelimit.' || relname ORDER BY relname) FROM pg_class WHERE relnamespace = 'ratelimit'::regnamespace AND relkind IN ('r', 'p')")
			if got := slices.Sorted(maps.Keys(documented.tables)); !slices.Equal(got, tables) {
				t.Fatalf("the page has the tables %q, and the schema has %q", got, tables)
			}
			contents := func(table string) string {
				return harness.Scan[string](t, owner, "SELECT coalesce(string_agg(x::text, E'\\n' ORDER BY x::text), '') FROM "+table+" AS x")
			}
			before := map[string]string{}
			for _, table := range tables {
				before[table] = contents(table)
			}
			app := harness.AsRole(t, admin, role, 2)
			exec := func(sql string) error {
				return app.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
					_, err := conn.Conn().PgConn().Exec(t.Context(), sql).ReadAll()
					return err
				})
			}

			// Tables.
			for _, table := range tables {
				column := harness.Scan[string](t, owner, "SELECT attname::text FROM pg_attribute WHERE attrelid = '"+table+"'::regclass AND attnum > 0 AND attidentity = '' ORDER BY attnum LIMIT 1")
				for privilege, sql := range map[string]string{
					"SELECT": "SELECT count(" + column + ") FROM %s", "INSERT": "INSERT INTO %s DEFAULT VALUES", "UPDATE": "UPDATE %s SET " + column + " = " + column,
					"DELETE": "DELETE FROM %s", "TRUNCATE": "TRUNCATE %s", "TRIGGER": "CREATE TRIGGER t AFTER INSERT ON %s EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()",
				} {
					want := slices.Contains(documented.tables[table], privilege)
					// With a star, some columns: the first one, which says whose row it is, is not among those that may be changed.
					columns := slices.Contains(documented.tables[table], privilege+"*")
					if privilege != "SELECT" && !slices.Contains(documented.tables[table], "SELECT") {
						sql = strings.ReplaceAll(sql, column+" = "+column, column+" = DEFAULT")
					}
					err := exec("BEGIN; " + fmt.Sprintf(sql, table) + "; ROLLBACK")
					if granted := harness.SQLState(err) != "42501"; granted != want && !(columns && privilege == "INSERT") {
						t.Errorf("%s on %s: %v, and the page says %v", privilege, table, err, want)
					}
					if privilege == "SELECT" || privilege == "INSERT" || privilege == "UPDATE" {
						some := harness.Scan[bool](t, owner, fmt.Sprintf("SELECT has_any_column_privilege('%s', '%s', '%s')", role, table, privilege))
						if some != (want || columns) {
							t.Errorf("%s on columns of %s: granted is %v, and the page says %v", privilege, table, some, want || columns)
						}
					}
					has := harness.Scan[bool](t, owner, fmt.Sprintf("SELECT has_table_privilege('%s', '%s', '%s')", role, table, privilege))
					if has != want {
						t.Errorf("%s on %s: granted is %v, and the page says %v", privilege, table, has, want)
					}
				}
			}

			// Functions.
			functions := functionsOf(t, owner)
			if len(functions) < 50 {
				t.Fatalf("%d functions", len(functions))
			}
			reached := 0
			all, others, _ := strings.Cut(documented.functions, " but ")
			notFor := strings.Split(others, ", ")
			for _, f := range functions {
				for round := range 7 {
					sql := f.call("ratelimit", round)
					err := exec("SET statement_timeout = '10s'; " + sql)
					pgErr, _ := errors.AsType[*pgconn.PgError](err)
					denied := pgErr != nil && pgErr.Code == "42501"
					switch {
					case all == "none":
						if !denied {
							t.Errorf("%s: %v, want 42501", sql, err)
						}
					case f.name == "grant" || slices.Contains(notFor, f.name):
						if !denied || pgErr.Message != "permission denied for function "+f.name {
							t.Errorf("%s: %v, and the page says that it may not call it", sql, err)
						}
					case denied && f.name == "unblock" && pgErr.Message == "permission denied for function restore" && slices.Contains(notFor, "restore"):
						// which it calls, as the page says
					case all == "all":
						if denied && !strings.Contains(pgErr.Message, "permission denied for table ") && !strings.Contains(pgErr.Message, "permission denied for sequence") {
							t.Errorf("%s: %v", sql, err)
						}
						if denied { // by a table that the page does not give
							table := "ratelimit." + pgErr.Message[strings.LastIndex(pgErr.Message, " ")+1:]
							if len(documented.tables[table]) >= 4 {
								t.Errorf("%s: %v, and the page says that it may", sql, err)
							}
						}
						if pgErr != nil && (pgErr.Code == "42883" || pgErr.Code == "42601" || pgErr.Code == "42846") {
							t.Errorf("the test's call is wrong: %s: %v", sql, err)
						}
					default:
						t.Fatalf("functions: %q", documented.functions)
					}
					if err == nil {
						reached++
					}
				}
			}
			if all == "all" && reached < len(functions) {
				t.Errorf("%d calls got through: the arguments are too bad to attack", reached)
			}
			for _, table := range tables {
				writes := slices.DeleteFunc(slices.Clone(documented.tables[table]), func(p string) bool { return p == "SELECT" })
				if after := contents(table); len(writes) == 0 && after != before[table] {
					t.Errorf("it made of %s\n%s\nthis\n%s", table, before[table], after)
				}
			}
		})
	}
}

// TestARoleThatOnlyConsumes consumes, and what else it tries changes and shows nothing.
func TestARoleThatOnlyConsumes(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	admin, owner, app := harness.NewConfined(t, 2)
	if err := new(ratelimit.Limiter).Publish(t.Context(), owner, "web", ratelimit.TokenBucket("sendMessage", 1, time.Hour, ratelimit.Capacity(5)),
		ratelimit.FixedWindow("wide", 50, time.Hour, ratelimit.Shards(3)), ratelimit.FixedWindow("signUps", 5, time.Hour)); err != nil {
		t.Fatal(err)
	}
	conn := harness.Acquire(t, app)
	exec := func(sql string) error {
		_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		return err
	}
	wants := func(state, sql string) {
		t.Helper()
		if err := exec(sql); harness.SQLState(err) != state || (err == nil) != (state == "") {
			t.Errorf("%s: %v, want %q", sql, err, state)
		}
	}
	// Five tokens are five, whatever was done before.
	hostileSettings := []string{"array_nulls = off", "transform_null_equals = on", "extra_float_digits = -15", "datestyle = 'SQL, DMY'", "intervalstyle = 'iso_8601'",
		"timezone = 'Pacific/Kiritimati'", "standard_conforming_strings = off", "row_security = off", "enable_indexscan = off",
		"search_path = pg_temp", "default_transaction_isolation = 'serializable'"}
	for i, setting := range hostileSettings {
		wants("", "SET "+setting)
		key := fmt.Sprintf("user-%d", i)
		for range 5 {
			wants("", "SELECT limits.consume('sendMessage', '"+key+"')")
		}
		wants("PT429", "SELECT limits.consume('sendMessage', '"+key+"')")
		var granted bool
		if err := conn.QueryRow(t.Context(), "SELECT granted FROM limits.try('sendMessage', '"+key+"')").Scan(&granted); err != nil || granted {
			t.Errorf("with %s, a sixth: %v, %v", setting, granted, err)
		}
		wants("", "RESET ALL; SET ROLE "+harness.Scan[string](t, app, "SELECT current_user::text"))
	}
	key := "'user-0'"
	for state, statements := range map[string][]string{
		"22023": {"SELECT limits.consume('sendMessage', 'k', -1)", "SELECT limits.consume('sendMessage', 'k', 0)", "SELECT limits.consume('sendMessage', 'k', NULL)",
			"SELECT limits.consume('sendMessage', 'k', 2147483647)", "SELECT limits.try('sendMessage', 'k', -2147483648)", "SELECT limits.consume('sendMessage', NULL)",
			"SELECT limits.consume('sendMessage', '')", "SELECT limits.consume('not published', 'k')", "SELECT limits.consume(NULL, 'k')", "SELECT limits.consume_global('signUps', 0)", "SELECT limits.try_global('signUps', -1)"},
		"22003": {"SELECT limits.consume('sendMessage', 'k', 'NaN'::float8::integer)", "SELECT limits.consume('sendMessage', 'k', '-Infinity'::float8::integer)"},
		"42883": { // numbers, clock, floor and receipt are not there
			"SELECT limits.consume('sendMessage', " + key + ", 0.5)", "SELECT limits.consume('sendMessage', " + key + ", rate => 1e15, period => '1 second')",
			"SELECT limits.consume('sendMessage', " + key + ", now => '9999-12-31')", "SELECT limits.consume('sendMessage', " + key + ", floor => '-Infinity')",
			"SELECT limits.reserve('sendMessage', " + key + ")", "SELECT limits._refund()"},
		"42501": {"CREATE TABLE limits.x (y text)", "CREATE FUNCTION limits.x() RETURNS void LANGUAGE sql AS ''", "CREATE OR REPLACE FUNCTION limits.consume(name text, key text, count integer DEFAULT 1) RETURNS double precision LANGUAGE sql AS 'SELECT 1.0::float8'",
			"ALTER FUNCTION limits.consume(text, text, integer) SET search_path = pg_temp", "ALTER FUNCTION limits.try(text, text, integer) SECURITY INVOKER", "DROP FUNCTION limits.consume",
			"GRANT EXECUTE ON FUNCTION limits.consume TO PUBLIC; SELECT * FROM ratelimit.limits",
			"SELECT ratelimit._refund('{sendMessage}', '{user-0}', '{1}', '{1 hour}', '{5}', '{NULL}', '{1}', '{5}', '{0}', '{5}', now(), now())",
			"SELECT ratelimit._consume('sendMessage', 'user-0', 1, '1 hour', 5, NULL, 1e15, '-Infinity', '9999-12-31')", "SELECT ratelimit.reset('sendMessage', 'user-0')",
			"SELECT * FROM ratelimit.keys('sendMessage')", "TABLE ratelimit.limits", "DELETE FROM ratelimit.limits", "BEGIN; LOCK TABLE ratelimit.limits", "COPY ratelimit.limits TO STDOUT",
			"CREATE VIEW pg_temp.v AS TABLE ratelimit.limits", "SELECT currval('ratelimit.overrides_id_seq')", "CREATE TEMP TABLE t (LIKE ratelimit.limits)"},
	} {
		for _, sql := range statements {
			wants(state, sql)
			wants("", "ROLLBACK")
		}
	}
	// Temporary objects that look like the limiter's, and like what its bodies call.
	wants("", `CREATE TEMP TABLE limits (name text, key text, shard smallint, shards smallint, value float8, ts timestamptz);
		CREATE TEMP TABLE definitions (name text); CREATE TEMP TABLE overrides (name text);
		CREATE FUNCTION pg_temp.consume(name text, key text, count integer) RETURNS TABLE (remaining float8) LANGUAGE sql AS 'SELECT 1e9::float8';
		CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT '9999-12-31'::timestamptz$$;
		CREATE FUNCTION pg_temp.coalesce_ge(float8, float8) RETURNS boolean LANGUAGE sql AS 'SELECT true';
		CREATE OPERATOR pg_temp.>= (LEFTARG = float8, RIGHTARG = float8, FUNCTION = pg_temp.coalesce_ge);
		CREATE DOMAIN pg_temp.float8 AS text; CREATE DOMAIN pg_temp.timestamptz AS text;
		SET search_path = pg_temp, pg_catalog`)
	wants("PT429", "SELECT limits.consume('sendMessage', "+key+")")
	wants("", "SELECT limits.consume('sendMessage', 'after')")
	wants("", "RESET search_path")

	// The recipe's own example, overrides, blocks and shards.
	wants("", harness.DocSQL(t, "docs/security.md", "limits.consume('sendMessage'"))
	wants("", "SELECT limits.consume('wide', 'w', 16), limits.try('wide', 'w'), limits.consume_global('signUps', 4), limits.try_global('signUps')")
	wants("PT429", "SELECT limits.consume_global('signUps')")
	harness.MustExec(t, owner, "SELECT ratelimit.block('sendMessage', 'blocked', forever => true)")
	wants("PT429", "SELECT limits.consume('sendMessage', 'blocked')")

	if n := harness.Scan[int](t, owner, "SELECT count(*) FROM ratelimit.limits WHERE value < 0 OR ts > clock_timestamp() OR value > 50"); n != 0 {
		t.Errorf("%d rows owe tokens, are ahead of the clock or are too full", n)
	}
	// The test's sessions could set any role, since their user is a superuser. A session of the role itself could not.
	if harness.Scan[bool](t, admin, "SELECT pg_has_role('"+harness.Scan[string](t, app, "SELECT current_user::text")+"', '"+harness.Scan[string](t, owner, "SELECT current_user::text")+"', 'MEMBER')") {
		t.Error("it is a member of the owner's role")
	}
	// Another role may use nothing, also if it may use the schemas.
	role := harness.CreateRole(t, admin)
	harness.MustExec(t, admin, "GRANT USAGE ON SCHEMA limits TO "+role)
	harness.WantRefused(t, harness.AsRole(t, admin, role, 1), "SELECT limits.consume('sendMessage', 'k')", "SELECT limits.try('sendMessage', 'k')")
}

// TestWhoseSchemaItIs: Prepare makes it once, and takes none in which somebody else could replace what is called. Default privileges give nobody the
// functions with the rights of their owner.
func TestWhoseSchemaItIs(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	admin := harness.Connect(t, harness.NewDatabase(t), 4)
	owner, other, eager := harness.CreateRole(t, admin), harness.CreateRole(t, admin), harness.CreateRole(t, admin)
	harness.MustExec(t, admin, "CREATE SCHEMA ratelimit AUTHORIZATION "+owner+"; ALTER DEFAULT PRIVILEGES FOR ROLE "+owner+" GRANT ALL ON FUNCTIONS TO "+eager+"; ALTER DEFAULT PRIVILEGES FOR ROLE "+owner+" GRANT ALL ON TABLES TO "+eager)
	prepare := func(pool *pgxpool.Pool) error {
		return migrations.Prepare(t.Context(), stdlib.OpenDBFromPool(pool), "")
	}
	owners := harness.AsRole(t, admin, owner, 2)
	for what, err := range map[string]error{"a superuser": prepare(admin), "another role": prepare(harness.AsRole(t, admin, other, 1))} {
		if err == nil || !strings.Contains(err.Error(), "belongs to the role \""+owner) {
			t.Errorf("%s: %v", what, err)
		}
	}
	harness.MustExec(t, admin, "GRANT CREATE ON SCHEMA ratelimit TO "+other)
	if err := prepare(owners); err == nil || !strings.Contains(err.Error(), "other roles may create objects") {
		t.Errorf("with CREATE for others: %v", err)
	}
	harness.MustExec(t, admin, "REVOKE CREATE ON SCHEMA ratelimit FROM "+other)
	harness.MustExec(t, owners, "CREATE TABLE ratelimit.limits ()")
	if err := prepare(owners); err == nil || !strings.Contains(err.Error(), "tables of somebody else") {
		t.Errorf("with a table of the owner's: %v", err)
	}
	harness.MustExec(t, owners, "DROP TABLE ratelimit.limits")
	harness.MustExec(t, admin, "CREATE FUNCTION ratelimit._consume() RETURNS integer RETURN 1")
	if err := prepare(owners); err == nil || !strings.Contains(err.Error(), "another role owns a function") {
		t.Errorf("with a function of a superuser's: %v", err)
	}
	harness.MustExec(t, admin, "DROP FUNCTION ratelimit._consume()")
	harness.Succeeds(t, prepare(owners))
	harness.MustExec(t, owners, harness.UpOf(t, os.DirFS(harness.MigrationsDir())))
	harness.Seed(t, owners)
	harness.GrantWork(t, owners, eager, "look")
	harness.WantRefused(t, harness.AsRole(t, admin, eager, 1), "SELECT ratelimit.restore('bucket', 'seeded')", "SELECT ratelimit.add(1)",
		"UPDATE ratelimit.overrides SET made_by = 'ceo'", "DELETE FROM ratelimit.limits", "SELECT FROM ratelimit.turn_31")
	// A restore without privileges gives everybody the functions: who grants takes them back.
	harness.MustExec(t, owners, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA ratelimit TO PUBLIC")
	harness.GrantWork(t, owners, eager, "look")
	harness.WantRefused(t, harness.AsRole(t, admin, eager, 1), "SELECT ratelimit.restore('bucket', 'seeded')", "SELECT ratelimit.grant('x', 'look')")
	quoted := pgx.Identifier{"Ann B. " + owner}.Sanitize()
	harness.MustExec(t, admin, "CREATE ROLE "+quoted+" SUPERUSER")
	defer harness.MustExec(t, admin, "DROP OWNED BY "+quoted+"; DROP ROLE "+quoted)
	super := stdlib.OpenDBFromPool(harness.AsRole(t, admin, "Ann B. "+owner, 2))
	harness.MustExec(t, admin, "ALTER DEFAULT PRIVILEGES FOR ROLE "+quoted+" GRANT ALL ON SCHEMAS TO "+eager)
	for range 2 {
		if err := migrations.Prepare(t.Context(), super, "given"); err == nil || !strings.Contains(err.Error(), "other roles may create objects") {
			t.Errorf("with CREATE by default privileges: %v", err)
		}
	}
	harness.MustExec(t, admin, "ALTER DEFAULT PRIVILEGES FOR ROLE "+quoted+" REVOKE ALL ON SCHEMAS FROM "+eager)
	for range 2 {
		harness.Succeeds(t, migrations.Prepare(t.Context(), super, "another"))
	}
}

// TestTheDocumentedGrantsWithoutPublicExecute: where functions are for nobody by default, every way works with the documented grants, and
// none works without EXECUTE.
func TestTheDocumentedGrantsWithoutPublicExecute(t *testing.T) {
	t.Parallel()
	harness.NeedsSession(t, "since it sets the role of its sessions")
	admin, owner, _ := harness.NewOwned(t, 2)
	role := harness.CreateRole(t, admin)
	harness.Seed(t, owner)
	app := harness.AsRole(t, admin, role, 4)
	harness.MustExec(t, owner, "GRANT SELECT, INSERT, UPDATE, DELETE ON ratelimit.limits TO "+role)
	harness.MustExec(t, admin, "GRANT USAGE ON SCHEMA ratelimit TO "+role)
	if _, err := new(ratelimit.Limiter).Consume(t.Context(), app, ratelimit.TokenBucket("bucket", 10, time.Minute).Key("seeded")); harness.SQLState(err) != "42501" {
		t.Errorf("without EXECUTE: %v, want 42501", err)
	}
	harness.GrantWork(t, admin, role, "consume")
	wantWays(t, everyWay(t, app))
}

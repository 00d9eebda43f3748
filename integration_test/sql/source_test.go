package sql_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestNamesInTheSource: the names of before are nowhere. In SQL that is sent or stored, each table has an alias: usage is a table, a function and, in a
// body, a label, and a column of one name with an argument must say which it is.
func TestNamesInTheSource(t *testing.T) {
	t.Parallel()
	old := regexp.MustCompile(`\brate_limit|\b_ratelimit_|\bratelimit_(?:[a-su-z]|t[a-df-z])`) // but the package ratelimit_test
	table := regexp.MustCompile(`\b(?:FROM|JOIN|UPDATE|USING|DELETE FROM)\s+(?:ONLY )?ratelimit\.(?:limits|holds|overrides|definitions|usage|denials|sweeps)\b(.{0,4})`)
	files := 0
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (name == ".git" || name == "pictures"):
			return fs.SkipDir
		case entry.IsDir(), name == "CHANGELOG.md", strings.HasSuffix(path, "sql/source_test.go"), !regexp.MustCompile(`\.(?:go|sql|md|sh|txt|html|js|json|yaml|mod)$`).MatchString(name):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		files++
		if found := old.FindString(string(text)); found != "" {
			t.Errorf("%s has a name of before: %s", path, found)
		}
		if strings.HasPrefix(path, "../../migrations/engine/") && name != "parts.sql" && name != "README.md" || strings.HasPrefix(path, "../../queries/") {
			for _, match := range table.FindAllStringSubmatch(commentOn.ReplaceAllString(string(text), ""), -1) {
				if match[1] != " AS " && !strings.HasPrefix(match[1], "(") && !strings.HasPrefix(match[1], ".") {
					t.Errorf("%s: no alias: %s", path, match[0])
				}
			}
		}
		return nil
	})
	if err != nil || files < 500 {
		t.Errorf("%d files, %v", files, err)
	}
}

// The engine is SQL that plain Postgres runs as it reads, and Citus otherwise, or not at all. No server of this project shows it, so the
// source is checked. docs/distributed.md has what was seen there; the rules of Citus' planner are in its multi_router_planner.c.

// engineFunction is a function of migrations/engine, without comments.
type engineFunction struct {
	file, name, language string
	immutable            bool
	statements           []string
}

var (
	sqlComment  = regexp.MustCompile(`(?m)--.*$`)
	commentOn   = regexp.MustCompile(`(?s)COMMENT ON [^;]*?(?:\$text\$.*?\$text\$|'[^;]*')?;`)
	functionSQL = regexp.MustCompile(`(?s)CREATE OR REPLACE FUNCTION ratelimit\.(\w+)\(.*?\bLANGUAGE (\w+)(.*?)(?:AS \$body\$(.*?)\$body\$|\bRETURN (.*?);\n)`)
	condition   = regexp.MustCompile(`(?s)\b(?:IF|ELSIF|WHILE)\b(.*?)\b(?:THEN|LOOP)\b`)
	loopBegins  = regexp.MustCompile(`\bLOOP\b`)
	ofTheEngine = `ratelimit\.(?:limits|holds|overrides|definitions|usage|denials|sweeps)(?:[^\w(]|$)` // usage() is a function
	readsTable  = regexp.MustCompile(`\b(?:FROM|JOIN|INTO|UPDATE|USING)\s+` + ofTheEngine)
	writesTable = regexp.MustCompile(`\b(?:UPDATE|DELETE FROM|INSERT INTO)\s+` + ofTheEngine)
	insertsRow  = regexp.MustCompile(`(?s)INSERT INTO .*?\bVALUES\b.*?(?:\bON CONFLICT\b|$)`)
	called      = regexp.MustCompile(`\bratelimit\.(\w+)\(`)
	queryBegins = regexp.MustCompile(`(?m)^-- name: (\w+) :.*\n`)
)

// parseEngine finds the functions in a file of the engine.
func parseEngine(file, text string) (functions []engineFunction) {
	for _, f := range functionSQL.FindAllStringSubmatch(sqlComment.ReplaceAllString(commentOn.ReplaceAllString(text, ""), ""), -1) {
		body := f[4] + f[5]
		if f[2] == "plpgsql" { // a condition is a statement
			body = strings.NewReplacer("END IF", "END", "END LOOP", "END").Replace(body)
			body = loopBegins.ReplaceAllString(condition.ReplaceAllString(body, "$1;"), ";")
		}
		functions = append(functions, engineFunction{file, f[1], f[2], strings.Contains(f[3], "IMMUTABLE"), strings.Split(body, ";")})
	}
	return functions
}

// parseQueries finds the statements of the library in a file of queries. The plain ones are not sent to Citus.
func parseQueries(file, text string) (queries []engineFunction) {
	texts := queryBegins.Split(text, -1)[1:]
	for i, name := range queryBegins.FindAllStringSubmatch(text, -1) {
		if !strings.HasPrefix(name[1], "Update") {
			queries = append(queries, engineFunction{file: file, name: name[1], statements: strings.Split(texts[i], ";")})
		}
	}
	return queries
}

// suspicious finds what Citus takes otherwise than Postgres, or refuses, in the functions of an engine.
func suspicious(functions []engineFunction) (found []string) {
	say := func(f engineFunction, what, statement string) {
		found = append(found, f.file+": "+f.name+": "+what+": "+strings.Join(strings.Fields(statement), " "))
	}
	// The functions that read a table, by themselves or by what they call, and those that are immutable.
	reading, immutable := map[string]bool{}, map[string]bool{}
	for before := -1; before < len(reading); {
		before = len(reading)
		for _, f := range functions {
			immutable[f.name] = f.immutable
			for _, s := range f.statements {
				for _, c := range called.FindAllStringSubmatch(s, -1) {
					if reading[c[1]] {
						reading[f.name] = true
					}
				}
				if readsTable.MatchString(s) {
					reading[f.name] = true
				}
			}
		}
	}
	for _, f := range functions {
		counted := "" // the INSERT ... SELECT that FOUND and ROW_COUNT are of
		for _, s := range f.statements {
			for what, pattern := range wrongText {
				if pattern.MatchString(s) {
					say(f, what, s)
				}
			}
			if counted != "" && countOfRows.MatchString(s) {
				say(f, countOfInsert, counted+"; "+s)
			}
			if setsFound.MatchString(s) {
				if counted = ""; insertSelects.MatchString(s) {
					counted = s
				}
			}
			if readsTable.MatchString(s) && f.language == "sql" {
				say(f, tableInSQL, s)
			}
			for _, c := range called.FindAllStringSubmatch(s, -1) {
				if reading[c[1]] && readsTable.MatchString(s) {
					say(f, nested, s)
				}
			}
			if !writesTable.MatchString(s) {
				continue
			}
			// What is inserted by VALUES is worked out before the statement is sent.
			write := insertsRow.ReplaceAllString(s, "")
			if mutable.MatchString(write) {
				say(f, mutableInWrite, s)
			}
			for _, c := range called.FindAllStringSubmatch(write, -1) {
				if known := immutable[c[1]]; !known {
					say(f, mutableInWrite, s)
				}
			}
		}
	}
	return found
}

const (
	// On Citus, the count includes rows that existed: more was granted than there was.
	countOfInsert = "a decision by the count of INSERT ... SELECT"
	// Rows that move to another shard change theirs, and remote rows have none.
	systemColumn = "a system column"
	// The deparser of Citus crashes on it, unless it is inside an expression.
	elementAlone = "an element of an array alone in SET"
	// 42846: where the call is sent on, Citus writes down what it has made of the text: "cannot cast type cstring to interval".
	castAgain = "an argument that is a text first"
	// With standard_conforming_strings = off, it is another text: in a body of SQL from when it is made, so that the hash differs.
	backslash = "a backslash in a text without E"
	// 42601: Citus writes it in a way that Postgres does not read.
	noColumns = "a subquery without columns"
	// 0A000. A variable that is set before the statement does it.
	mutableInWrite = "what is not immutable in a write"
	// 0A000: "parameterized queries for SQL functions referencing distributed tables are not supported".
	tableInSQL = "a function of SQL that reads a table"
	// XX000: "cannot execute a distributed query from a query on a shard".
	nested = "a function that reads a table, beside a table"
)

var (
	wrongText = map[string]*regexp.Regexp{
		systemColumn: regexp.MustCompile(`(?i)(?:\b\w+\.|\bSELECT |\bWHERE |\bAND |, )(?:ctid|xmin|xmax|cmin|cmax|tableoid)\b`),
		elementAlone: regexp.MustCompile(`(?is)\bSET\s+(?:[^;]*,\s*)?\w+ = \w+\[[^\]]*\]\s*(?:,|\bWHERE\b|\bFROM\b|$)`),
		castAgain:    regexp.MustCompile(anArgument + `::|\W\(` + anArgument + `\)::`),
		backslash:    regexp.MustCompile(`[^E'\w]'[^'\n]*\\`),
		noColumns:    regexp.MustCompile(`\(\s*SELECT FROM\b`),
	}
	anArgument    = `(?:[@$]\w+|sqlc\.narg\('\w+'\))::text(?:\[\])?`
	countOfRows   = regexp.MustCompile(`(?i)\b(?:FOUND|ROW_COUNT)\b`)
	setsFound     = regexp.MustCompile(`(?im)^\s*(?:FOR \w+ IN\s*)?(?:INSERT INTO|UPDATE|DELETE FROM|PERFORM|RETURN QUERY|SELECT|WITH)\b`)
	insertSelects = regexp.MustCompile(`(?is)\bINSERT INTO\b.*\bSELECT\b`)
	mutable       = regexp.MustCompile(`(?i)\b(?:clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|now|random|gen_random_uuid|nextval|pg_current_xact_id|txid_current|pg_current_snapshot|current_setting|pg_backend_pid)\(|\b(?:SESSION_USER|CURRENT_USER|CURRENT_TIMESTAMP)\b|[-+] interval '`)
)

func TestTheEngineReadsAlikeOnEveryServer(t *testing.T) {
	files, err := filepath.Glob("../../migrations/engine/*.sql")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	var engine []engineFunction
	declared := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		declared += strings.Count(string(text), "CREATE OR REPLACE FUNCTION ratelimit.")
		engine = append(engine, parseEngine(file, string(text))...)
	}
	if len(engine) != declared || declared < 80 {
		t.Fatalf("%d of %d functions are read", len(engine), declared)
	}
	files, err = filepath.Glob("../../queries/*.sql")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		queries := parseQueries(file, string(text))
		if len(queries) == 0 {
			t.Fatalf("%s has no queries", file)
		}
		engine = append(engine, queries...)
	}
	for _, found := range suspicious(engine) {
		t.Error(found)
	}
}

// Each rule finds what the engine once said, and leaves what it says now.
func TestTheEngineIsReadForWhatCitusTakesOtherwise(t *testing.T) {
	const tables = "CREATE OR REPLACE FUNCTION ratelimit._reads()\nLANGUAGE plpgsql STABLE\nAS $body$ BEGIN RETURN (SELECT 1 FROM ratelimit.limits); END $body$;\n" +
		"CREATE OR REPLACE FUNCTION ratelimit._pure()\nLANGUAGE sql IMMUTABLE\nRETURN 1;\n"
	for body, want := range map[string]string{
		"INSERT INTO ratelimit.limits (a) SELECT b FROM c ON CONFLICT DO NOTHING; GET DIAGNOSTICS m = ROW_COUNT;":                           countOfInsert,
		"INSERT INTO ratelimit.limits (a) SELECT b FROM c; IF NOT FOUND THEN m := 1; END IF;":                                               countOfInsert,
		"INSERT INTO ratelimit.limits (a) SELECT b FROM c; m := 1; IF m > 0 THEN EXIT WHEN FOUND; END IF;":                                  countOfInsert,
		"INSERT INTO ratelimit.limits (a) VALUES (b) ON CONFLICT DO NOTHING; IF FOUND THEN m := 1; END IF;":                                 "",
		"INSERT INTO ratelimit.limits (a) SELECT b FROM c; PERFORM 1 FROM ratelimit.limits AS r FOR UPDATE; GET DIAGNOSTICS m = ROW_COUNT;": "",
		"SELECT r.xmax INTO m FROM ratelimit.limits AS r;":                                                                                  systemColumn,
		"SELECT xmin INTO m FROM ratelimit.limits;":                                                                                         systemColumn,
		"m := pg_snapshot_xmin(since);":                                                                                       "",
		`IF a ~ '^~|\u0080' THEN m := 1; END IF;`:                                                                             backslash,
		`m := regexp_replace(a, '', E'\\s');`:                                                                                 "",
		"UPDATE ratelimit.limits AS r SET value = held[k], ts = at WHERE r.key = key;":                                        elementAlone,
		"UPDATE ratelimit.limits AS r SET value = coalesce(held[k]), ts = at WHERE r.key = key;":                              "",
		"IF EXISTS (SELECT FROM ratelimit.limits AS r) THEN m := 1; END IF;":                                                  noColumns,
		"UPDATE ratelimit.overrides AS o SET removed_at = clock_timestamp() WHERE o.name = name;":                             mutableInWrite,
		"UPDATE ratelimit.overrides AS o SET removed_at = at WHERE o.until > clock_timestamp();":                              mutableInWrite,
		"UPDATE ratelimit.overrides AS o SET removed_by = coalesce(who, SESSION_USER);":                                       mutableInWrite,
		"UPDATE ratelimit.limits AS r SET shard = random();":                                                                  mutableInWrite,
		"DELETE FROM ratelimit.usage AS r WHERE r.minute < at - interval '1 hour';":                                           mutableInWrite,
		"DELETE FROM ratelimit.limits AS r WHERE r.value = ratelimit._reads();":                                               mutableInWrite,
		"INSERT INTO ratelimit.limits (ts) SELECT clock_timestamp();":                                                         mutableInWrite,
		"INSERT INTO ratelimit.limits (ts) VALUES (1) ON CONFLICT (ts) DO UPDATE SET ts = at + interval '5 minutes';":         mutableInWrite,
		"INSERT INTO ratelimit.limits (ts) VALUES (coalesce(who, SESSION_USER)) ON CONFLICT DO NOTHING RETURNING id INTO id;": "",
		"IF a THEN b := 1; END IF; DELETE FROM ratelimit.limits AS r WHERE r.ts = CASE WHEN a THEN clock_timestamp() END;":    mutableInWrite,
		"UPDATE ratelimit.limits AS r SET value = ratelimit._pure() WHERE r.ts = at;":                                         "",
		"PERFORM 1 FROM ratelimit.limits AS r WHERE r.ts < clock_timestamp() FOR UPDATE OF r SKIP LOCKED;":                    "",
		"RETURN QUERY SELECT 1 FROM ratelimit._reads() AS f WHERE NOT EXISTS (SELECT 1 FROM ratelimit.overrides AS o);":       nested,
		"IF EXISTS (SELECT 1 FROM ratelimit.limits AS r) THEN PERFORM ratelimit._reads(); END IF;":                            "",
	} {
		found := suspicious(parseEngine("x.sql", tables+"CREATE OR REPLACE FUNCTION ratelimit.it()\nLANGUAGE plpgsql\nAS $body$\nBEGIN\n    "+body+"\nEND\n$body$;\n"))
		if want == "" && len(found) > 0 {
			t.Errorf("%s\n%s", body, strings.Join(found, "\n"))
		}
		if want != "" && !slices.ContainsFunc(found, func(f string) bool { return strings.HasPrefix(f, "x.sql: it: "+want) }) {
			t.Errorf("%s is not found in %q, but %q", want, body, found)
		}
	}
	for query, bad := range map[string]bool{
		"SELECT ratelimit._wire_hold((sqlc.narg('ttl')::text)::interval)": true,
		"SELECT ratelimit._extend((@tokens::text[])::uuid[])":             true,
		"SELECT ratelimit._overrides(@since::text::pg_snapshot)":          true,
		"SELECT ratelimit._wire_hold(sqlc.narg('ttl')::interval)":         false,
		"SELECT ratelimit._reset(@keys::text[])::integer":                 false,
	} {
		found := suspicious(parseQueries("x.sql", "-- name: It :one\n"+query+" AS answer;\n"))
		if bad != slices.Contains(found, "x.sql: It: "+castAgain+": "+query+" AS answer") {
			t.Errorf("%s: %q", query, found)
		}
	}
	if found := suspicious(parseEngine("x.sql", "CREATE OR REPLACE FUNCTION ratelimit.it()\nLANGUAGE sql STABLE\nAS $body$ SELECT 1 FROM ratelimit.limits $body$;\n")); len(found) != 1 || !strings.Contains(found[0], tableInSQL) {
		t.Errorf("%q", found)
	}
}

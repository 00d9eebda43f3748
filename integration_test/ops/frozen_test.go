package ops_test

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

var updateFrozen = flag.Bool("frozen", false, "write testdata/frozen.txt anew: see CONTRIBUTING.md before")

// frozenPackages are what programs import.
var frozenPackages = []string{
	"migrations", "ratelimit", "ratelimit/console", "ratelimit/httplimit", "ratelimit/observe", "ratelimit/ratelimittest", "ratelimit/replay", "ratelimit/rpclimit", "ratelimit/usage",
}

// TestWhatIsFrozen compares what others may rely on with testdata/frozen.txt: names of Go, functions of SQL, columns that may be read.
// TestTheJSONIsAsDocumented does so for the tool, and the tests of docs/sql.md and docs/http.md for SQLSTATEs, DETAIL and header fields.
func TestWhatIsFrozen(t *testing.T) {
	t.Parallel()
	var now []string
	for _, dir := range frozenPackages {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		harness.Succeeds(t, err)
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") {
				now = append(now, exportedIn(t, dir, file)...)
			}
		}
	}
	now = append(now, strings.Split(harness.Scan[string](t, harness.NewPool(t, 1), `SELECT string_agg(f.line, E'\n') FROM (
		SELECT format('sql %s(%s) returns %s', p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid))
		  FROM pg_proc AS p WHERE p.pronamespace = 'ratelimit'::regnamespace AND NOT starts_with(p.proname, '_')
		UNION ALL SELECT format('column %s.%s %s', c.table_name, c.column_name, c.data_type)
		  FROM information_schema.columns AS c WHERE c.table_schema = 'ratelimit' AND c.table_name NOT LIKE 'turn%' AND c.table_name !~ '^limits_' AND c.table_name NOT IN ('goose_version', 'sweeps')) AS f (line)`), "\n")...)
	slices.Sort(now)
	text := strings.Join(now, "\n") + "\n"
	const golden = "testdata/frozen.txt"
	if *updateFrozen {
		harness.Succeeds(t, os.WriteFile(golden, []byte(text), 0o644))
	}
	want, err := os.ReadFile(golden)
	harness.Succeeds(t, err)
	if text != string(want) {
		t.Errorf("%s differs. CONTRIBUTING.md says what may change; -frozen writes it anew:\n%s", golden, differences(text, string(want)))
	}
}

// exportedIn is a line for each exported name of a file, with its type.
func exportedIn(t *testing.T, dir, file string) (all []string) {
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, nil, 0)
	harness.Succeeds(t, err)
	add := func(prefix string, node any) {
		var b strings.Builder
		harness.Succeeds(t, printer.Fprint(&b, set, node))
		all = append(all, "go "+dir+": "+prefix+strings.Join(strings.Fields(b.String()), " "))
	}
	for _, d := range parsed.Decls {
		if f, is := d.(*ast.FuncDecl); is {
			if f.Name.IsExported() && (f.Recv == nil || ast.IsExported(receiverOf(f.Recv.List[0].Type))) {
				f.Body = nil
				add("", f)
			}
			continue
		}
		for _, spec := range d.(*ast.GenDecl).Specs {
			switch spec := spec.(type) {
			case *ast.ValueSpec:
				if spec.Names[0].IsExported() {
					if parsed.Name.Name == "migrations" { // each migration has others
						spec.Values = nil
					}
					add("", spec)
				}
			case *ast.TypeSpec:
				of, is := spec.Type.(*ast.StructType)
				switch {
				case !spec.Name.IsExported():
				case !is:
					add("type ", spec)
				default:
					all = append(all, "go "+dir+": type "+spec.Name.Name+" struct")
					for _, field := range of.Fields.List {
						for _, name := range field.Names {
							if name.IsExported() {
								add("type "+spec.Name.Name+", "+name.Name+" ", field.Type)
							}
						}
					}
				}
			}
		}
	}
	return all
}

func receiverOf(e ast.Expr) string {
	if star, is := e.(*ast.StarExpr); is {
		e = star.X
	}
	if name, is := e.(*ast.Ident); is {
		return name.Name
	}
	return ""
}

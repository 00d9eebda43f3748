package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
)

// The table of mutations must follow the code: the texts to replace and the named tests must exist.
func TestEveryMutationCanBeMade(t *testing.T) {
	l := lab{dir: root(t)}
	if err := l.index(); err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, m := range allMutations {
		if err := l.applies(m); err != nil {
			t.Error(err)
		}
		if names[m.name] {
			t.Errorf("two mutations are called %s", m.name)
		}
		names[m.name] = true
	}
}

// TestEveryMutationOfGoCompiles: one that does not would be noticed by no test.
func TestEveryMutationOfGoCompiles(t *testing.T) {
	root := root(t)
	byFolder := map[string][]mutation{}
	for _, m := range allMutations {
		if folder := filepath.Dir(m.file); strings.HasSuffix(m.file, ".go") {
			byFolder[folder] = append(byFolder[folder], m)
		}
	}
	if len(byFolder) < 8 {
		t.Fatalf("only these folders have mutations of Go: %v", slices.Sorted(maps.Keys(byFolder)))
	}
	for folder, mutations := range byFolder {
		t.Run(folder, func(t *testing.T) {
			t.Parallel()
			p := loaded(t, filepath.Join(root, folder))
			if err := p.check("", nil); err != nil {
				t.Fatal(err)
			}
			for _, m := range mutations {
				name := filepath.Base(m.file)
				if err := p.check(name, []byte(strings.Replace(p.texts[name], m.old, m.new, 1))); err != nil {
					t.Errorf("%s: %v", m.name, err)
				}
			}
		})
	}
}

// Operators make what Go and Postgres accept, but for a few: the mutants of two packages, and of some functions of SQL.
func TestOperatorsMakeWhatCanRun(t *testing.T) {
	all, err := allMutants(root(t))
	if err != nil {
		t.Fatal(err)
	}
	server, err := postgres.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	url, err := migrated.Template(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	packages := map[string]*checkable{}
	for _, folder := range []string{"internal/algebra", "ratelimit/usage"} {
		packages[folder] = loaded(t, filepath.Join(root(t), folder))
	}
	names, operators, made, run := map[string]bool{}, map[string]int{}, map[string]int{}, map[string]int{}
	for _, m := range all {
		if names[m.name] {
			t.Errorf("two mutants are called %s", m.name)
		}
		names[m.name] = true
		_, operator, _ := strings.Cut(filepath.Base(m.name), ":")
		operators[strings.Split(operator, ":")[2]]++
		before, after, err := (&lab{dir: root(t)}).mutated(m)
		if err != nil || before == after {
			t.Errorf("%s: %v", m.name, err)
		}
		switch p := packages[filepath.Dir(m.file)]; {
		case p != nil:
			err = p.check(filepath.Base(m.file), []byte(after))
		case filepath.Base(m.file) == "refund.sql":
			_, err = conn.Exec(t.Context(), after)
		default:
			continue
		}
		kind := filepath.Ext(m.file)
		if made[kind]++; err == nil {
			run[kind]++
		}
	}
	t.Log(len(all), operators, made, run)
	if len(all) < 10_000 || 20*run[".go"] < 19*made[".go"] || 20*run[".sql"] < 19*made[".sql"] || made[".sql"] < 100 {
		t.Errorf("of %d mutants, %v were tried and %v can run", len(all), made, run)
	}
}

func root(t *testing.T) string {
	t.Helper()
	root, err := topLevel(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// checkable is a package whose types can be checked.
type checkable struct {
	path    string
	texts   map[string]string // by file
	fset    *token.FileSet
	files   map[string]*ast.File
	imports types.Importer
}

func loaded(t *testing.T, folder string) *checkable {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json=ImportPath,Export,Dir,GoFiles,DepOnly", ".")
	list.Dir = folder
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	p := &checkable{texts: map[string]string{}, fset: token.NewFileSet(), files: map[string]*ast.File{}}
	exports := map[string]string{}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var of struct {
			ImportPath, Export, Dir string
			GoFiles                 []string
			DepOnly                 bool
		}
		if err := decoder.Decode(&of); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[of.ImportPath] = of.Export
		if of.DepOnly {
			continue
		}
		p.path = of.ImportPath
		for _, name := range of.GoFiles {
			text, err := os.ReadFile(filepath.Join(of.Dir, name))
			if err != nil {
				t.Fatal(err)
			}
			p.texts[name] = string(text)
			if p.files[name], err = parser.ParseFile(p.fset, name, text, parser.SkipObjectResolution); err != nil {
				t.Fatal(err)
			}
		}
	}
	p.imports = importer.ForCompiler(p.fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	return p
}

// check checks the package, with another text of one file.
func (p *checkable) check(name string, text []byte) error {
	files := maps.Clone(p.files)
	if name != "" {
		file, err := parser.ParseFile(p.fset, name, text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files[name] = file
	}
	_, err := (&types.Config{Importer: p.imports}).Check(p.path, p.fset, slices.Collect(maps.Values(files)), nil)
	return err
}

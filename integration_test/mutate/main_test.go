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

// TestEveryMutationOfGoCompiles: one that does not would be noticed by no test. One of each file is tried at once.
func TestEveryMutationOfGoCompiles(t *testing.T) {
	byFolder := map[string]map[string][]mutation{}
	for _, m := range allMutations {
		if folder, name := filepath.Split(m.file); strings.HasSuffix(name, ".go") {
			if byFolder[folder] == nil {
				byFolder[folder] = map[string][]mutation{}
			}
			byFolder[folder][name] = append(byFolder[folder][name], m)
		}
	}
	if len(byFolder) < 8 {
		t.Fatalf("only these folders have mutations of Go: %v", slices.Sorted(maps.Keys(byFolder)))
	}
	for folder, files := range byFolder {
		t.Run(folder, func(t *testing.T) {
			t.Parallel()
			p := loaded(t, filepath.Join(root(t), folder))
			if err := p.check(nil); err != nil {
				t.Fatal(err)
			}
			for made := true; made; {
				texts, names := map[string]string{}, []string{}
				for name, mutations := range files {
					if len(mutations) > 0 {
						m := mutations[0]
						files[name], names = mutations[1:], append(names, m.name)
						texts[name] = strings.Replace(p.texts[name], m.old, m.new, 1)
					}
				}
				if err := p.check(texts); err != nil {
					t.Errorf("%v, by one of %v", err, names)
				}
				made = len(names) > 0
			}
		})
	}
}

// Operators make what Go and Postgres accept, but for a few: the mutants of a package, and of a file of SQL.
func TestOperatorsMakeWhatCanRun(t *testing.T) {
	all, err := allMutants(root(t))
	if err != nil {
		t.Fatal(err)
	}
	server, err := postgres.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	url, err := migrated.Template(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	calendar := loaded(t, filepath.Join(root(t), "internal/calendar"))
	names, made, run := map[string]bool{}, map[string]int{}, map[string]int{}
	for _, m := range all {
		if names[m.name] {
			t.Errorf("two mutants are called %s", m.name)
		}
		names[m.name] = true
		folder := filepath.Dir(m.file)
		if folder != "internal/calendar" && m.file != refund {
			continue
		}
		_, after, err := (&lab{dir: root(t)}).mutated(m)
		if err != nil {
			t.Fatal(err)
		}
		if m.file == refund {
			_, err = conn.Exec(t.Context(), after)
		} else {
			err = calendar.check(map[string]string{filepath.Base(m.file): after})
		}
		if made[folder]++; err == nil {
			run[folder]++
		}
	}
	t.Log(len(all), made, run)
	if len(all) < 10_000 || len(made) != 2 {
		t.Errorf("there are %d mutants, of which %v were tried", len(all), made)
	}
	for folder := range made {
		if made[folder] < 100 || run[folder]*10 < made[folder]*9 {
			t.Errorf("%s: of %d mutants, %d can run", folder, made[folder], run[folder])
		}
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

// check checks the package, with other texts of some files.
func (p *checkable) check(texts map[string]string) (err error) {
	files := maps.Clone(p.files)
	for name, text := range texts {
		if files[name], err = parser.ParseFile(p.fset, name, text, parser.SkipObjectResolution); err != nil {
			return err
		}
	}
	_, err = (&types.Config{Importer: p.imports}).Check(p.path, p.fset, slices.Collect(maps.Values(files)), nil)
	return err
}

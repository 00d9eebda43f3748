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
)

// The table of mutations must follow the code: the texts to replace and the named tests must exist.
func TestEveryMutationCanBeMade(t *testing.T) {
	l, err := newLab(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.remove()
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
	top, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		t.Fatal(err)
	}
	root := strings.TrimSpace(string(top))
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

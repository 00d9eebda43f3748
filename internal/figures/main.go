// Figures prints how many lines the repository has, by kind, and how many arrows between the files of package ratelimit run
// up. An arrow is from a file to one that declares what it uses. The order of the files is one in which few run up.
package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// kinds has a group for each kind of file, of which the first that matches counts.
var kinds = regexp.MustCompile(`^(?:(?P<generated>.*\.min\.)|(?P<data>.*testdata/|.*\.(?:txt|json|sum)$)|(?P<docs>.*\.md$)|(?P<examples>examples/)|` +
	`(?P<proof>.*_test\.go$|(?:integration_test|bench|internal/postgres)/)|(?P<product>.*\.(?:go|sql|html|js|css)$)|(?P<other>))`)

func main() {
	listed, err := exec.Command("git", "ls-files").Output()
	if err != nil {
		fmt.Fprintln(os.Stderr, "figures: git ls-files:", err)
		os.Exit(1)
	}
	lines := map[string]int{}
	for name := range strings.FieldsSeq(string(listed)) {
		text, _ := os.ReadFile(name)
		kind := "generated"
		if !bytes.Contains(text[:min(len(text), 200)], []byte("DO NOT EDIT")) {
			found := slices.IndexFunc(kinds.FindStringSubmatchIndex(name)[2:], func(i int) bool { return i >= 0 })
			kind = kinds.SubexpNames()[1+found/2]
		}
		lines[kind] += bytes.Count(text, []byte("\n"))
	}
	fmt.Println("lines:", lines)

	uses, arrows := uses("ratelimit"), 0
	files := slices.Sorted(maps.Keys(uses))
	for _, file := range files {
		arrows += len(uses[file])
	}
	fewest := arrows
	for range 100 {
		rand.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
		fewest = min(fewest, up(files, uses))
	}
	fmt.Printf("arrows between files of ratelimit: %d, at most %d of them up\n", arrows, fewest)
}

// up moves each file to where the fewest arrows run up, until no move helps, and counts these arrows.
func up(files []string, uses map[string]map[string]bool) (up int) {
	for before := -1; up != before; {
		before, up = up, 0
		for _, file := range slices.Clone(files) {
			files = slices.DeleteFunc(files, func(other string) bool { return other == file })
			best, here, fewest := 0, 0, 0 // of the arrows of this file, compared with the first place
			for i, other := range files {
				if uses[file][other] {
					here++
				}
				if uses[other][file] {
					here--
				}
				if here < fewest {
					best, fewest = i+1, here
				}
			}
			files = slices.Insert(files, best, file)
		}
		for i, file := range files {
			for _, above := range files[:i] {
				if uses[file][above] {
					up++
				}
			}
		}
	}
	return up
}

// uses has, for each file of a package, the files that declare what it uses.
func uses(dir string) map[string]map[string]bool {
	set, uses := token.NewFileSet(), map[string]map[string]bool{}
	var parsed []*ast.File
	names, _ := filepath.Glob(dir + "/*.go")
	for _, name := range names {
		if file, err := parser.ParseFile(set, name, nil, 0); err == nil && !strings.HasSuffix(name, "_test.go") {
			parsed, uses[name] = append(parsed, file), map[string]bool{}
		}
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Error: func(error) {}} // other packages are not there
	_, _ = config.Check(dir, set, parsed, &info)
	for id, object := range info.Uses {
		user, used := set.Position(id.Pos()).Filename, set.Position(object.Pos()).Filename
		if uses[used] != nil && user != used {
			uses[user][used] = true
		}
	}
	return uses
}

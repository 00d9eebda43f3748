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

	uses, arrows, up := uses("ratelimit"), 0, 0
	for files := slices.Sorted(maps.Keys(uses)); len(files) > 0; {
		from, more := map[string]int{}, map[string]int{} // arrows to a file from those that are left, and how many more than from it
		for _, user := range files {
			for _, used := range files {
				if uses[user][used] {
					from[used], more[used], more[user] = from[used]+1, more[used]+1, more[user]-1
				}
			}
		}
		highest := slices.MinFunc(files, func(a, b string) int { return more[a] - more[b] })
		arrows, up = arrows+len(uses[highest]), up+from[highest]
		files = slices.DeleteFunc(files, func(file string) bool { return file == highest })
	}
	fmt.Printf("arrows between files of ratelimit: %d, %d of them up\n", arrows, up)
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

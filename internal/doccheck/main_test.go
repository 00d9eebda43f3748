package main

import (
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

func TestDeadLinksGoThatIsNotCompiledAndTestsThatAreGoneAreFound(t *testing.T) {
	root := fstest.MapFS{
		"a.go": {Data: []byte("package a\n\nfunc TestOfAll() {}\n\nfunc f() {\n\tone()\n\ttwo()\n\tthree()\n}\n")},
		"README.md": {Data: []byte("# Top\n## It's 3 a.m.\n## Twice\n## Twice\n" +
			"[page](docs/page.md) [heading](#its-3-am) [second](#twice-1) [site](https://example.org/nothing) `[code](nowhere)`\n" +
			strings.Repeat("long ", maxReadme/5) + "\n" +
			"[gone](docs/gone.md) [no heading](docs/page.md#gone) [neither](#here) <img src=\"gone.svg\">\n" +
			"```go\none()\n// ...\nthree()\n```\n```go\nthree()\n// ...\none()\n```\n```go\nfour()\n```\n```sh\n[not](a link)\n```\n")},
		"docs/page.md": {Data: []byte("# Page\n[up](../README.md#top)\nTestOfAll, `-run TestOf`, TestOfNone\n- SQL: `SELECT ... FROM a`,\n  `SELECT ... FROM b`\n")},
		"a.sql":        {Data: []byte("SELECT 1\n  FROM a\n")},
	}
	wrong, err := check(root)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"docs/gone.md", "docs/page.md has no heading #gone", "README.md has no heading #here", "gone.svg", "three()", "four()", "README.md has 10", "TestOfNone", "FROM b of the quote"}
	for _, w := range want {
		if !slices.ContainsFunc(wrong, func(line string) bool { return strings.Contains(line, w) }) {
			t.Errorf("nothing is said of %s", w)
		}
	}
	if len(wrong) != len(want) {
		t.Errorf("%d complaints, want %d:\n%s", len(wrong), len(want), strings.Join(wrong, "\n"))
	}
}

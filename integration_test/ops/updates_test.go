package ops_test

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryModuleIsUpdated wants every module of go.work among those whose dependencies .github/dependabot.yml has updated.
func TestEveryModuleIsUpdated(t *testing.T) {
	t.Parallel()
	read := func(file string) string {
		text, err := os.ReadFile(filepath.Join("../..", file))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var modules, updated []string
	for _, match := range regexp.MustCompile(`(?m)^\s(\.\S*)`).FindAllStringSubmatch(read("go.work"), -1) {
		modules = append(modules, path.Join("/", match[1]))
	}
	gomod, _, _ := strings.Cut(read(".github/dependabot.yml"), "package-ecosystem: github-actions")
	for _, match := range regexp.MustCompile(`(?m)^\s+- (/\S*)$`).FindAllStringSubmatch(gomod, -1) {
		updated = append(updated, match[1])
	}
	slices.Sort(modules)
	slices.Sort(updated)
	if len(modules) == 0 || !slices.Equal(modules, updated) {
		t.Errorf("go.work has the modules\n%q, and .github/dependabot.yml updates\n%q", modules, updated)
	}
}

// TestEveryActionIsACommit wants the actions of workflows by commit, since a tag can be moved. The comment with the version is what Dependabot
// updates, together with the commit.
func TestEveryActionIsACommit(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../.github/workflows/*")
	if err != nil {
		t.Fatal(err)
	}
	actions := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, wrong := range tagged(string(text)) {
			t.Errorf("%s: %s", file, wrong)
		}
		actions += strings.Count(string(text), "uses:")
	}
	if actions == 0 {
		t.Errorf("no action in %q", files)
	}
	for _, use := range []string{"uses: a/b@v5", "uses: a/b@main", "uses: a/b", "- uses: a/b@v5.0.1 # v5.0.1", "uses: docker://a/b:3", "uses: 'a/b@v5'",
		"uses: a/b@0123456789", "uses: a/b@0123456789012345678901234567890123456789", "uses: a/b@0123456789012345678901234567890123456789 # newest"} {
		if len(tagged("    steps:\n      "+use+"\n")) != 1 {
			t.Errorf("%q is taken for a commit", use)
		}
	}
}

// tagged returns the lines with an action that is not by its full commit, with the version in a comment. Those of this repository begin with "./".
func tagged(workflow string) (lines []string) {
	byCommit := regexp.MustCompile(`^(- )?uses: +(\./\S+|[^\s@:]+@[0-9a-f]{40} # v[0-9]+(\.[0-9]+)*)$`)
	for line := range strings.Lines(workflow) {
		if line = strings.TrimSpace(line); strings.Contains(line, "uses:") && !strings.HasPrefix(line, "#") && !byCommit.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return lines
}

package integration_test

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
		text, err := os.ReadFile(filepath.Join("..", file))
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

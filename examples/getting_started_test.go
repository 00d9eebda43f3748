package examples_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/internal/postgres"
)

var (
	docBlock = regexp.MustCompile("(?ms)^```(sh|go|text)\n(.*?)^```$")
	docFile  = regexp.MustCompile("(?m)^Write `([a-z.]+)`")
)

// TestGettingStarted follows docs/getting-started.md, block by block, in an empty folder: it writes the files, runs the
// commands, and compares their output. The module comes from this clone.
func TestGettingStarted(t *testing.T) {
	if _, err := exec.LookPath("psql"); err != nil {
		t.Skip("the page uses psql, which is not installed")
	}
	page, err := os.ReadFile("../docs/getting-started.md")
	if err != nil {
		t.Fatal(err)
	}
	const module = "github.com/txlimit/txlimit"
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	server, err := postgres.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil { // this drops the database, too
			t.Error(err)
		}
	})
	url, _, err := server.NewDatabase(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	tool := filepath.Join(dir, "txlimit")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-C", root, "-o", tool, "./cmd/txlimit").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	run := func(script string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DATABASE_URL="+url, "GOWORK=off", "GOFLAGS=-mod=mod", "PGOPTIONS=", "PSQLRC=/dev/null")
		cmd.Stderr = os.Stderr
		output, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v\n%s\n%s", err, script, output)
		}
		return string(output)
	}
	files := docFile.FindAllSubmatch(page, -1)
	printed, ran, compared := "", 0, 0
	for _, block := range docBlock.FindAllSubmatch(page, -1) {
		text := string(block[2])
		switch kind := string(block[1]); kind {
		case "go":
			if len(files) == 0 {
				t.Fatalf("the page does not say which file this is:\n%s", text)
			}
			if err := os.WriteFile(filepath.Join(dir, string(files[0][1])), block[2], 0o644); err != nil {
				t.Fatal(err)
			}
			files = files[1:]
		case "sh":
			if ran == 0 {
				text = strings.Replace(text, "go get "+module, "go mod edit -require "+module+"@v0.0.0 -replace "+module+"="+root, 1)
			}
			printed = run(strings.Replace(text, "go run "+module+"/cmd/txlimit@latest", tool, 1))
			if ran == 0 {
				dir = filepath.Join(dir, "app")
			}
			ran++
		case "text":
			compared++
			if printed != text {
				t.Errorf("printed:\n%swant:\n%s", printed, text)
			}
		}
	}
	if ran < 6 || compared < 4 || len(files) > 0 {
		t.Errorf("%d blocks of commands ran, the output of %d was compared, %d files were not written", ran, compared, len(files))
	}
}

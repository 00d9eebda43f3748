// Package examples_test runs every example as a user would, and compares its output with output.txt:
//
//	go test -count=1 ./examples            # compares
//	go test -count=1 ./examples -update    # writes output.txt
package examples_test

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/postgres"
)

var update = flag.Bool("update", false, "write the examples' output to output.txt")

// These have their own tests: quickstart prints the time of day (quickstart/main_test.go); getting-started has TestGettingStarted,
// service TestTheService.
var elsewhere = []string{"quickstart", "getting-started", "service"}

// How many examples run at once. Each may use 32 connections, and a user's server rarely allows more than 100.
const atOnce = 2

func TestEveryExampleTellsItsStory(t *testing.T) {
	mains, err := filepath.Glob("*/main.go")
	if err != nil || len(mains) < 2 {
		t.Fatalf("the examples are %q, %v", mains, err)
	}

	// One go build for all examples, without debugging data: linking takes most of the time.
	bin := t.TempDir()
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-w", "-o", bin+string(filepath.Separator), "./...")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, output)
	}

	// One server for all. Each example makes its own database there.
	server, err := postgres.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	env := append(os.Environ(), "TXLIMIT_TEST_DATABASE_URL="+server.URL(), "TXLIMIT_TEST_LADDER=")

	running := make(chan struct{}, atOnce)
	for _, main := range mains {
		name := filepath.Dir(main)
		if slices.Contains(elsewhere, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			running <- struct{}{}
			defer func() { <-running }()
			play(t, filepath.Join(bin, name), env, filepath.Join(name, "output.txt"))
		})
	}
}

// play runs an example, wants the exit status 0, and compares its stdout with the file. Text that varies goes to stderr.
func play(t *testing.T, program string, env []string, golden string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // the example then drops its database
	cmd.WaitDelay = 30 * time.Second
	err := cmd.Run()
	t.Logf("\n%s%s", &stderr, &stdout)
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, stdout.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatalf("%v (go test ./examples -update writes it; read it before you commit it)", err)
	}
	if bytes.Equal(want, stdout.Bytes()) {
		return
	}
	wantLines, gotLines := strings.Split(string(want), "\n"), strings.Split(stdout.String(), "\n")
	for i := range max(len(wantLines), len(gotLines)) {
		if w, g := at(wantLines, i), at(gotLines, i); w != g {
			t.Fatalf("%s and the output differ in line %d:\n- %s\n+ %s", golden, i+1, w, g)
		}
	}
}

// at returns a line, or a text that says that there is none.
func at(lines []string, i int) string {
	if i >= len(lines) {
		return "(the end)"
	}
	return lines[i]
}

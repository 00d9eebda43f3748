package plproxy_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var wrongTrial = regexp.MustCompile(`(?m)^- (.+): wrong, at .*$`)

// The command conformance finds one thing wrong on a proxy, which docs/plproxy.md says, too: a READ COMMITTED transaction that has not
// written cannot be told from a call outside, so its decisions do not join it.
func TestConformance(t *testing.T) {
	dir := t.TempDir()
	program, tool := filepath.Join(dir, "conformance"), filepath.Join(dir, "txlimit")
	for file, source := range map[string]string{program: "../conformance", tool: "../../cmd/txlimit"} {
		if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", file, source).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	command := exec.CommandContext(t.Context(), program, "-short", "-tool", tool, "-url", shared.proxy.URL())
	var progress strings.Builder
	command.Stderr = &progress
	out, err := command.Output()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		t.Fatalf("%v\n%s\n%s", err, &progress, out)
	}
	t.Logf("%s", out)
	if !strings.Contains(string(out), " cases: works ") {
		t.Error("there is no summary")
	}
	for _, trial := range wrongTrial.FindAllStringSubmatch(string(out), -1) {
		if !strings.Contains(trial[1], "read committed") {
			t.Error(trial[0])
		}
	}
}

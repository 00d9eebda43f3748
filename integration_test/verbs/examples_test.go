package verbs_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// The examples on pkg.go.dev are in the library's module, which has no database. Here they run with one. Every example must
// run, including later ones without an // Output.
func TestEveryExampleOfThePackageRunsAndPrintsWhatItSays(t *testing.T) {
	t.Parallel()
	url := harness.NewPool(t, 1).Config().ConnString()

	// The package is named by its import path: it is in another module than this test.
	skip := "^$"
	if harness.Server.Pooled() {
		skip = "^ExampleCoalescer_lockTimeout$" // its lock_timeout is for the session
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-count=1", "-v", "-run", "^Example", "-skip", skip, "github.com/txlimit/txlimit/ratelimit")
	cmd.Env = append(os.Environ(), "TXLIMIT_DATABASE_URL="+url)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, output)
	}

	files, err := filepath.Glob("../../ratelimit/*_test.go")
	harness.Succeeds(t, err)
	written := 0
	for _, file := range files {
		source, err := os.ReadFile(file)
		harness.Succeeds(t, err)
		for _, match := range regexp.MustCompile(`(?m)^func (Example\w*)\(`).FindAllSubmatch(source, -1) {
			written++
			if regexp.MustCompile(skip).Match(match[1]) {
				continue
			}
			if passed := regexp.MustCompile(`(?m)^--- PASS: ` + string(match[1]) + ` `); !passed.Match(output) {
				t.Errorf("%s did not run", match[1])
			}
		}
	}
	if written == 0 {
		t.Errorf("there are no examples in %q", files)
	}
	t.Logf("%d examples are written", written)
}

package examples_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestPLProxy plays the example plproxy, which needs the Debian package postgresql-15-plproxy. make plproxy has it run in any case.
func TestPLProxy(t *testing.T) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/lib/plproxy.so")
	if err != nil {
		t.Fatal(err)
	}
	if len(found) == 0 && os.Getenv("TXLIMIT_PLPROXY") == "" {
		t.Skip("THE EXAMPLE plproxy DID NOT RUN, since no PostgreSQL here has PL/Proxy: apt-get install postgresql-15-plproxy, or make plproxy")
	}
	env := os.Environ()
	if os.Getenv("TXLIMIT_TEST_POSTGRES_BIN") == "" && len(found) > 0 {
		env = append(env, "TXLIMIT_TEST_POSTGRES_BIN="+filepath.Join(filepath.Dir(filepath.Dir(found[0])), "bin"))
	}
	program := filepath.Join(t.TempDir(), "plproxy")
	if output, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./plproxy").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	play(t, program, env, "plproxy/output.txt")
}

package integration_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestTheDocumentedUninstall runs the commands of docs/operations.md in a schema in use: nothing is left of txlimit, and all of the application.
func TestTheDocumentedUninstall(t *testing.T) {
	t.Parallel()
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip("there is no psql")
	}
	page, err := os.ReadFile("../docs/operations.md")
	succeeds(t, err)
	_, section, _ := strings.Cut(string(page), "\n## Uninstall\n")
	block := regexp.MustCompile("(?s)\n```sh\n(.*?)\n```\n").FindStringSubmatch(section)
	if block == nil {
		t.Fatal("docs/operations.md has no commands to uninstall")
	}
	root, err := filepath.Abs("..")
	succeeds(t, err)
	pool := newPool(t, 1)
	mustExec(t, pool, "CREATE TABLE of_the_application (id int); SELECT ratelimit.consume('l', 'k', rate => 1, period => '1 hour'), ratelimit.block('l', NULL, who => 'bea')")
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", strings.Replace(block[1], `$(go list -m -f '{{.Dir}}' github.com/txlimit/txlimit)`, root, 1))
	cmd.Env = append(os.Environ(), "DATABASE_URL="+forAll(t, pool.Config().ConnString()), "PSQLRC=/dev/null", "PATH="+filepath.Dir(psql)+":"+os.Getenv("PATH"))
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	mustExec(t, pool, "DROP TABLE IF EXISTS ratelimit.goose_version")
	left := lines(t, pool, `
		SELECT relname::text FROM pg_class WHERE relnamespace = current_schema()::regnamespace
		UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
		UNION ALL SELECT typname::text FROM pg_type WHERE typnamespace = current_schema()::regnamespace AND typrelid = 0 AND typelem = 0`)
	if left != "(of_the_application)" {
		t.Errorf("left are %s", left)
	}
}

// TestTheDocumentedWebhook runs the SQL of docs/faq.md twice: the second delivery takes nothing.
func TestTheDocumentedWebhook(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 1)
	table, call, ok := strings.Cut(docSQL(t, "docs/faq.md", "evt_17"), "\n")
	if !ok {
		t.Fatal("it has one line")
	}
	mustExec(t, pool, table)
	for delivery := range 2 {
		mustExec(t, pool, call)
		if value := scan[float64](t, pool, "SELECT value FROM ratelimit.limits WHERE name = 'webhooks'"); value != 99 {
			t.Errorf("after delivery %d, the row has %v", delivery+1, value)
		}
	}
}

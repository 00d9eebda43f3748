package sql_test

import (
	"strings"
	"testing"

	"github.com/txlimit/txlimit/integration_test/harness"
)

// TestTheDocumentedUninstall runs the SQL of docs/operations.md in a database in use: nothing is left of txlimit, and all of the application.
func TestTheDocumentedUninstall(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	const objects = "SELECT count(*) FROM pg_class UNION ALL SELECT count(*) FROM pg_proc UNION ALL SELECT count(*) FROM pg_type UNION ALL SELECT count(*) FROM pg_namespace"
	empty := harness.Lines(t, harness.Connect(t, harness.NewDatabase(t), 1), objects)
	harness.MustExec(t, pool, "SELECT ratelimit.consume('l', 'k', rate => 1, period => '1 hour'), ratelimit.block('l', every_key => true, who => 'bea', forever => true)")
	harness.MustExec(t, pool, harness.DocSQL(t, "docs/operations.md", "DROP SCHEMA ratelimit CASCADE"))
	if left := harness.Lines(t, pool, objects); left != empty {
		t.Errorf("left are %s, and in a new database there are %s", left, empty)
	}
}

// TestTheDocumentedWebhook runs the SQL of docs/faq.md twice: the second delivery takes nothing.
func TestTheDocumentedWebhook(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 1)
	table, call, ok := strings.Cut(harness.DocSQL(t, "docs/faq.md", "evt_17"), "\n")
	if !ok {
		t.Fatal("it has one line")
	}
	harness.MustExec(t, pool, table)
	for delivery := range 2 {
		harness.MustExec(t, pool, call)
		if value := harness.Scan[float64](t, pool, "SELECT value FROM ratelimit.limits WHERE name = 'webhooks'"); value != 99 {
			t.Errorf("after delivery %d, the row has %v", delivery+1, value)
		}
	}
}

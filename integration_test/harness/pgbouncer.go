package harness

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Behind PgBouncer in transaction mode (make pgbouncer), a client keeps a session only for one transaction. Tests that need
// more than that use the helpers in this file.

// notPooled are the skipped tests, by reason.
var notPooled struct {
	sync.Mutex
	names map[string][]string
}

// NeedsSession skips a test that itself uses what a transaction pooler does not have. The limiter does not.
func NeedsSession(t testing.TB, why string) {
	t.Helper()
	if !Server.Pooled() {
		return
	}
	notPooled.Lock()
	if notPooled.names == nil {
		notPooled.names = map[string][]string{}
	}
	notPooled.names[why] = append(notPooled.names[why], t.Name())
	notPooled.Unlock()
	t.Skip("not through PgBouncer, " + why)
}

func printNotPooled() {
	for _, why := range slices.Sorted(maps.Keys(notPooled.names)) {
		fmt.Printf("not through PgBouncer, %s:\n", why)
		for _, name := range slices.Sorted(slices.Values(notPooled.names[why])) {
			fmt.Println("   ", name)
		}
	}
}

// NeedsMode skips a test in a query mode that does not work through this PgBouncer.
func NeedsMode(t testing.TB, mode pgx.QueryExecMode) {
	t.Helper()
	if !Server.Pooled() {
		return
	}
	switch {
	case mode == pgx.QueryExecModeDescribeExec:
		NeedsSession(t, "since describe_exec parses a statement in one round trip and executes it in the next, which may reach another server")
	case mode == pgx.QueryExecModeCacheStatement && DefaultMode(t) != mode:
		NeedsSession(t, "since they prepare statements, and max_prepared_statements is 0 in this run")
	}
}

// NeedsToPrepareAgain skips a test that sends a statement again that could not be prepared, such as in an aborted transaction.
func NeedsToPrepareAgain(t testing.TB) {
	t.Helper()
	if DefaultMode(t) == pgx.QueryExecModeCacheStatement {
		NeedsSession(t, "since it closes the connection when what could not be prepared is prepared again (pgbouncer/pgbouncer#1118)")
	}
}

// DefaultMode is the query mode of this run.
func DefaultMode(t testing.TB) pgx.QueryExecMode {
	t.Helper()
	config, err := pgx.ParseConfig(Server.URL())
	if err != nil {
		t.Fatal(err)
	}
	return config.DefaultQueryExecMode
}

// ForAll returns a URL without the parameters that only pgx knows.
func ForAll(t testing.TB, conn string) string {
	t.Helper()
	u, err := url.Parse(conn)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Del("default_query_exec_mode")
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // libpq does not read + as a space
	return u.String()
}

// StartWith starts sessions with settings. They are sent in the startup packet; PgBouncer does not pass them on, so there
// they become settings of a user.
func StartWith(t testing.TB, config *pgx.ConnConfig, settings map[string]string) {
	t.Helper()
	if !Server.Pooled() {
		maps.Copy(config.RuntimeParams, settings)
		return
	}
	var err error
	if config.User, err = Server.NewUser(t.Context(), settings); err != nil {
		t.Fatal(err)
	}
}

package integration_test

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

// Through PgBouncer in transaction mode (make pgbouncer), a client has a session of its own only as long as a transaction. What
// a test does besides goes by what is said here.

// notPooled are the tests that were skipped, by the reason.
var notPooled struct {
	sync.Mutex
	names map[string][]string
}

// needsSession skips a test that relies, itself and not by way of the limiter, on what a transaction pooler has not got.
func needsSession(t testing.TB, why string) {
	t.Helper()
	if !server.Pooled() {
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

// needsMode skips a test in a query mode that does not work through the PgBouncer there is.
func needsMode(t testing.TB, mode pgx.QueryExecMode) {
	t.Helper()
	if !server.Pooled() {
		return
	}
	switch {
	case mode == pgx.QueryExecModeDescribeExec:
		needsSession(t, "since describe_exec parses a statement in one round trip and executes it in the next, which may reach another server")
	case mode == pgx.QueryExecModeCacheStatement && defaultMode(t) != mode:
		needsSession(t, "since they prepare statements, and max_prepared_statements is 0 in this run")
	}
}

// defaultMode is the query mode of this run.
func defaultMode(t testing.TB) pgx.QueryExecMode {
	t.Helper()
	config, err := pgx.ParseConfig(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	return config.DefaultQueryExecMode
}

// forAll is a URL without what is for pgx alone.
func forAll(t testing.TB, conn string) string {
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

// startWith has sessions start with settings: in the startup packet, which PgBouncer does not take them from, so that there it
// is the settings of a user. The search_path stays what it is, unless it is among them.
func startWith(t testing.TB, config *pgx.ConnConfig, settings map[string]string) {
	t.Helper()
	if !server.Pooled() {
		maps.Copy(config.RuntimeParams, settings)
		return
	}
	all := map[string]string{"search_path": config.User} // as NewSchema names both
	maps.Copy(all, settings)
	var err error
	if config.User, err = server.NewUser(t.Context(), all); err != nil {
		t.Fatal(err)
	}
}

package integration_test

import (
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// TestThePlansOfTheDocs runs the SQL of docs/plans.md. Its Go is ratelimit/example_plans_test.go.
func TestThePlansOfTheDocs(t *testing.T) {
	t.Parallel()
	pool := newPool(t, 2)
	if n := len(docBlocks(t, "docs/plans.md")); n != 2 {
		t.Errorf("%d blocks of SQL, and 2 are tested", n)
	}

	// The example has the table of the page.
	table := docSQL(t, "docs/plans.md", "CREATE TABLE customers")
	mustExec(t, pool, table)
	mustExec(t, pool, "INSERT INTO customers VALUES ('acme', 'pro', NULL, 'Europe/Berlin', '2026-01-15 15:00')")

	// The query says what Balance says of a customer with a billing day of its own.
	limiter, clock := newLimiter()
	clock.now = time.Now().UTC().Truncate(time.Microsecond) // the query's now
	pro := ratelimit.CalendarWindow("apiCalls.pro", 50_000, ratelimit.Month, ratelimit.Varies(32*24*time.Hour))
	succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", pro))
	acme := pro.With(ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor(scan[string](t, pool, "SELECT to_char(anchor, 'YYYY-MM-DD HH24:MI:SS') FROM customers"))).Key("acme", "2026-01-15 15:00:00")
	succeeds(t, second(limiter.Consume(t.Context(), pool, acme.Count(50_000))))
	balances, err := limiter.Balance(t.Context(), pool, acme)
	succeeds(t, err)
	query := docSQL(t, "docs/plans.md", "ratelimit.keys")
	var key string
	var remaining float64
	var retryAt time.Time
	succeeds(t, pool.QueryRow(t.Context(), strings.TrimSuffix(query, ";")).Scan(&key, &remaining, &retryAt))
	if key != "acme|2026-01-15 15:00:00" || remaining != 0 || !retryAt.Equal(balances[0].ResetAt) || balances[0].Used != 50_000 {
		t.Errorf("%s has %v, and may try again at %v; Balance says %+v", key, remaining, retryAt, balances[0])
	}
	// By the plan's own numbers, it would be another instant.
	if !retryAt.After(clock.now) || retryAt.UTC().Day() == 1 {
		t.Errorf("try again at %v", retryAt)
	}
}

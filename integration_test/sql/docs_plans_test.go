package sql_test

import (
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestThePlansOfTheDocs runs the SQL of docs/plans.md. Its Go is ratelimit/example_plans_test.go.
func TestThePlansOfTheDocs(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	if n := len(harness.DocBlocks(t, "docs/plans.md")); n != 2 {
		t.Errorf("%d blocks of SQL, and 2 are tested", n)
	}

	// The example has the table of the page.
	table := harness.DocSQL(t, "docs/plans.md", "CREATE TABLE customers")
	harness.MustExec(t, pool, table)
	harness.MustExec(t, pool, "INSERT INTO customers VALUES ('acme', 'pro', NULL, 'Europe/Berlin', '2026-01-15 15:00')")

	// The query says what Balance says of a customer with a billing day of its own.
	limiter, clock := harness.NewLimiter()
	clock.At = time.Now().UTC().Truncate(time.Microsecond) // the query's now
	pro := ratelimit.CalendarWindow("apiCalls.pro", 50_000, ratelimit.Month, ratelimit.Varies(32*24*time.Hour))
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "api", pro))
	acme := pro.With(ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor(harness.Scan[string](t, pool, "SELECT to_char(anchor, 'YYYY-MM-DD HH24:MI:SS') FROM customers"))).Key("acme", "2026-01-15 15:00:00")
	harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, acme.Count(50_000))))
	balances, err := limiter.Balance(t.Context(), pool, acme)
	harness.Succeeds(t, err)
	query := harness.DocSQL(t, "docs/plans.md", "ratelimit.keys")
	var key string
	var remaining float64
	var retryAt time.Time
	harness.Succeeds(t, pool.QueryRow(t.Context(), strings.TrimSuffix(query, ";")).Scan(&key, &remaining, &retryAt))
	if key != "acme|2026-01-15 15:00:00" || remaining != 0 || !retryAt.Equal(balances[0].ResetAt) || balances[0].Used != 50_000 {
		t.Errorf("%s has %v, and may try again at %v; Balance says %+v", key, remaining, retryAt, balances[0])
	}
	// By the plan's own numbers, it would be another instant.
	if !retryAt.After(clock.At) || retryAt.UTC().Day() == 1 {
		t.Errorf("try again at %v", retryAt)
	}
}

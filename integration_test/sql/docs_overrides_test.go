package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestTheDocumentedOverrides runs the SQL of docs/overrides.md as printed, as an operator with the documented grants.
func TestTheDocumentedOverrides(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", nightMessages, nightSignUps))
	role := func(name string, words ...string) func(sql string) string {
		own := harness.CreateRole(t, pool)
		for _, work := range words {
			harness.GrantWork(t, pool, own, work)
		}
		return func(sql string) (first string) {
			t.Helper()
			err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), "SET LOCAL ROLE "+own); err != nil {
					return err
				}
				rows, err := tx.Query(t.Context(), sql)
				if err != nil {
					return err
				}
				defer rows.Close()
				for rows.Next() {
					values, err := rows.Values()
					if err != nil {
						return err
					}
					first += fmt.Sprintln(values...)
				}
				return rows.Err()
			})
			if err != nil {
				t.Fatalf("as %s: %s: %v", name, sql, err)
			}
			return strings.TrimSpace(first)
		}
	}
	operator := role("operator", "operate")
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	is := func(request ratelimit.Request, want string) {
		t.Helper()
		harness.Succeeds(t, follow.Load(t.Context(), limits))
		if got := harness.LimitInForce(t, limits, pool, request); !strings.HasPrefix(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
	}
	harness.Succeeds(t, follow.Load(t.Context(), limits))
	harness.Succeeds(t, harness.Second(limits.Charge(t.Context(), pool, nightSignUps.Key("acme").Count(100))))
	id := operator(harness.DocSQL(t, "docs/overrides.md", "their conference"))
	is(nightSignUps.Key("acme"), "signUps: fixed window, 500 per 1h, capacity 500")
	if added := operator(strings.Replace(harness.DocSQL(t, "docs/overrides.md", "ratelimit.add(17)"), "17", id, 1)); added != "400" {
		t.Errorf("added %s, want 400", added)
	}
	operator(harness.DocSQL(t, "docs/overrides.md", "reason => 'spam'"))
	is(nightMessages.Key("user-17"), "sendMessage: blocked until ")
	operator(harness.DocSQL(t, "docs/overrides.md", "ratelimit.unlimited('signUps', 'load-test'"))
	is(nightSignUps.Key("load-test"), "signUps: unlimited")
	if list := operator(harness.DocSQL(t, "docs/overrides.md", "SELECT id, name, key, effect")); strings.Count(list, "\n") != 2 || !strings.Contains(list, "their conference") {
		t.Errorf("in force:\n%s", list)
	}
	if history := operator(harness.DocSQL(t, "docs/overrides.md", "removed_by, removed_as, removed_at")); strings.Count(history, "\n") != 1 || !strings.Contains(history, "their conference") {
		t.Errorf("history:\n%s", history)
	}
	operator(harness.DocSQL(t, "docs/overrides.md", "SELECT ratelimit.restore"))
	is(nightSignUps.Key("acme"), "signUps: fixed window, 100 per 1h, capacity 100")
	is(nightMessages.Key("user-17"), "sendMessage: token bucket, 10 per 1m, capacity 20")

	harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET added_at = added_at - interval '2 hours'") // what was added is refilled since
	id = operator("SELECT ratelimit.override('signUps', 'acme', rate => 40, capacity => 40, forever => true)")
	if added := operator(strings.Replace(harness.DocSQL(t, "docs/overrides.md", "ratelimit.add(21, 20)"), "21,", id+",", 1)); added != "20" {
		t.Errorf("added %s, want 20", added)
	}

	operator(harness.DocSQL(t, "docs/overrides.md", "the provider is down"))
	is(nightSignUps.Key("nobody"), "signUps: blocked")
	if who := harness.Scan[string](t, pool, "SELECT made_by FROM ratelimit.overrides WHERE effect = 'block' AND key IS NULL"); who != "bea" {
		t.Errorf("it was blocked by %s", who)
	}

	harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET made_at = now() - interval '3 years', removed_at = now() - interval '2 years' WHERE effect = 'block'; SELECT ratelimit._note_reset('signUps', 'acme', NULL, 'bea')")
	harness.MustExec(t, pool, "SELECT ratelimit._sweep_holds('', '', '', NULL)") // which forgets what is over for a year
	if n := harness.Scan[int](t, pool, "SELECT count(*) FROM ratelimit.overrides"); n != 4 {
		t.Errorf("%d overrides are left, want 3 and a reset", n)
	}

	app := harness.CreateRole(t, pool)
	harness.GrantWork(t, pool, app, "consume")
	harness.MustExec(t, harness.AsRole(t, pool, app, 1), "SELECT * FROM ratelimit._overrides(NULL, 0)")
	harness.MustExec(t, harness.AsRole(t, pool, app, 1), `SELECT ratelimit.publish('app', '[{"name": "sendMessage", "kind": "token bucket", "rate": 1, "period": "1 minute"}]')`)
	for _, refused := range []string{"SELECT ratelimit.block('sendMessage', 'x', forever => true)", "SELECT ratelimit.restore('signUps', 'load-test')"} {
		harness.WantRefused(t, harness.AsRole(t, pool, app, 1), refused)
	}
}

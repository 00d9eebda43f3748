package ratelimittest

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/inschema"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
)

// NewSchema makes a schema with a random name on a Postgres, for one test, and returns a Limiter for it: its limits are full, and no other test
// shares them. The schema is dropped when the test ends. It takes some 0.2 s. The role needs CREATE on the database. Pass Schema of the Limiter on to
// what has a schema of its own, such as [ratelimit.Options]. The Limiter is of [ratelimit.Open] with NoBackground, so its own blocks hold at
// once. The test ends at once if the schema cannot be made.
func NewSchema(t testing.TB, pool *pgxpool.Pool) *ratelimit.Limiter {
	t.Helper()
	if pool == nil {
		t.Fatal("ratelimittest: the pool is nil")
	}
	schema := "ratelimit_test_" + strings.ToLower(rand.Text())[:12]
	sql, err := inschema.Up(migrations.In(schema))
	if err == nil {
		_, err = pool.Exec(t.Context(), "CREATE SCHEMA "+schema+";\n"+sql)
	}
	if err != nil {
		t.Fatal("ratelimittest: ", err)
	}
	t.Cleanup(func() {
		if _, err := pool.Exec(context.Background(), "DROP SCHEMA "+schema+" CASCADE"); err != nil {
			t.Error("ratelimittest: ", err)
		}
	})
	limits, err := ratelimit.Open(t.Context(), pool, ratelimit.Options{Schema: schema, NoPublish: true, NoSweep: true, NoBackground: true})
	if err != nil {
		t.Fatal("ratelimittest: ", err)
	}
	return limits
}

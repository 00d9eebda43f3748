package ops_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// What is made under a block does not lift it, whatever the order, for the library and for SQL; and SQL says so.
func TestABlockGoesBeforeWhatIsMadeUnderIt(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	api := ratelimit.TokenBucket("api", 10, time.Hour)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", api))
	var notices []string
	config := pool.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { notices = append(notices, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	harness.Succeeds(t, err)
	defer conn.Close(t.Context())
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	load := func() {
		t.Helper()
		harness.Succeeds(t, follow.Load(t.Context(), limits))
	}
	calls := map[string]string{
		"unlimited": "ratelimit.unlimited('api', %[1]s, forever => true)", "numbers": "ratelimit.override('api', %[1]s, rate => 20, forever => true)", "block": "ratelimit.block('api', %[1]s, forever => true)",
	}
	for _, order := range [][]string{{"block", "unlimited"}, {"unlimited", "block"}, {"block", "numbers"}, {"numbers", "block"}, {"block", "unlimited", "numbers"}} {
		for _, key := range []string{"'ann'", "every_key => true"} {
			harness.MustExec(t, pool, "DELETE FROM ratelimit.overrides; DELETE FROM ratelimit.limits; SELECT ratelimit.consume('api', 'ann')")
			notices = nil
			id := int64(0)
			for i, effect := range order {
				is := harness.Scan[int64](t, conn, "SELECT "+fmt.Sprintf(calls[effect], key))
				if effect == "block" {
					id = is
				}
				said := len(notices) > 0 && strings.Contains(notices[len(notices)-1], fmt.Sprintf("block %d stays in force", id))
				if under := i > 0 && effect != "block"; said != under {
					t.Errorf("%v for %s: after %s the server says %q", order, key, effect, notices)
				}
				notices = nil
			}
			load()
			if got := harness.LimitInForce(t, limits, pool, api.Key("ann")); got != "api: blocked" {
				t.Errorf("%v for %s: %s", order, key, got)
			}
			if harness.Scan[bool](t, pool, "SELECT granted FROM ratelimit.try('api', 'ann')") {
				t.Errorf("%v for %s: SQL grants", order, key)
			}
			if !harness.Scan[bool](t, pool, "SELECT remaining = 0 AND retry_at = 'infinity' FROM ratelimit.keys('api') WHERE key = 'ann'") {
				t.Errorf("%v for %s: ratelimit.keys does not know of the block", order, key)
			}
			harness.Scan[int](t, pool, "SELECT ratelimit.unblock('api', "+key+")")
			load()
			want := map[string]string{"unlimited": "api: unlimited", "numbers": "api: token bucket, 20 per 1h, capacity 20"}[last(order)]
			if got := harness.LimitInForce(t, limits, pool, api.Key("ann")); got != want {
				t.Errorf("%v for %s: %s after the block, want %s", order, key, got, want)
			}
		}
	}
	// A key's own goes before a block of every key.
	harness.MustExec(t, pool, "DELETE FROM ratelimit.overrides; SELECT ratelimit.unlimited('api', 'ann', forever => true); SELECT ratelimit.block('api', every_key => true, forever => true)")
	load()
	if got := harness.LimitInForce(t, limits, pool, api.Key("ann")); got != "api: unlimited" || !harness.Scan[bool](t, pool, "SELECT granted FROM ratelimit.try('api', 'ann')") {
		t.Errorf("%s under a block of every key", got)
	}
}

// last is the last of some effects that is no block.
func last(effects []string) (effect string) {
	for _, e := range effects {
		if e != "block" {
			effect = e
		}
	}
	return effect
}

// Rows that came from another server, by logical replication, have ids that the sequence here gives again. What is made here has its
// own id, and is newer.
func TestOverridesThatWereCopied(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	api := ratelimit.TokenBucket("api", 10, time.Hour)
	harness.Succeeds(t, new(ratelimit.Limiter).Publish(t.Context(), pool, "web", api))
	harness.MustExec(t, pool, `INSERT INTO ratelimit.overrides (id, name, key, effect, made_at) OVERRIDING SYSTEM VALUE
		SELECT n, 'api', CASE WHEN n % 2 = 0 THEN 'ann' END, 'unlimited', now() - interval '1 hour' FROM generate_series(1, 6) AS n
		UNION ALL VALUES (1000, 'api', 'ann', 'unlimited', now() - interval '1 hour'), (9223372036854775807, 'api', NULL, 'unlimited', now() - interval '1 hour')`)
	limits := follow.By(&ratelimit.Limiter{}, follow.Settings{DB: pool})
	is := func(key, want string) {
		t.Helper()
		for range 2 { // also what has changed alone
			harness.Succeeds(t, follow.Load(t.Context(), limits))
		}
		if got := harness.LimitInForce(t, limits, pool, api.Key(key)); got != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
	is("ann", "api: unlimited")
	id := harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', rate => 20, forever => true)")
	is("ann", "api: token bucket, 20 per 1h, capacity 20")
	if rate := harness.Scan[float64](t, pool, "SELECT rate FROM ratelimit._numbers('api', 'ann', now())"); id != 7 || rate != 20 {
		t.Errorf("override %d, SQL says rate %v", id, rate)
	}
	harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', every_key => true, rate => 30, forever => true)")
	is("bob", "api: token bucket, 30 per 1h, capacity 30")
	harness.Scan[int64](t, pool, "SELECT ratelimit.block('api', 'ann', forever => true)")
	is("ann", "api: blocked")
	// The capacity before is that of the newest that is older, whatever its id.
	harness.MustExec(t, pool, "DELETE FROM ratelimit.overrides; INSERT INTO ratelimit.limits (name, key, shard, shards, value, ts) VALUES ('api', 'ann', 0, 1, 0, now())")
	harness.MustExec(t, pool, "INSERT INTO ratelimit.overrides (id, name, key, effect, capacity, made_at) OVERRIDING SYSTEM VALUE VALUES (1000, 'api', 'ann', 'numbers', 25, now() - interval '1 hour')")
	id = harness.Scan[int64](t, pool, "SELECT ratelimit.override('api', 'ann', capacity => 40, forever => true)")
	harness.MustExec(t, pool, "UPDATE ratelimit.overrides SET made_at = made_at - interval '1 minute'")
	if added := harness.Scan[float64](t, pool, "SELECT ratelimit.add($1)", id); added != 15 {
		t.Errorf("%v added, want 15", added)
	}
}

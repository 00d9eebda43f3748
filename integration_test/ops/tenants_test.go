package ops_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/postgres/migrated"
	"github.com/txlimit/txlimit/migrations"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/ratelimittest"
)

// Under a policy, every function works on the rows of its tenant, and no others.
func TestUnderRowLevelSecurityATenantHasHisOwnLimits(t *testing.T) {
	t.Parallel()
	owner := harness.NewPool(t, 2)
	role := harness.CreateRole(t, owner)
	harness.GrantWork(t, owner, role, "consume")
	harness.MustExec(t, owner, harness.TenantPolicy(t, role))
	app := harness.AsRole(t, owner, role, 4)
	var limiter ratelimit.Limiter
	bucket := ratelimit.TokenBucket("bucket", 4, 1000*time.Hour)
	window := ratelimit.FixedWindow("window", 4, 100_000*time.Hour)
	wide := ratelimit.TokenBucket("wide", 4, 1000*time.Hour, ratelimit.Shards(2))
	for _, tenant := range []string{"acme", "globex"} {
		harness.AsTenant(t, app, tenant, func(tx pgx.Tx) {
			all := []ratelimit.Request{bucket.Key(tenant, "ann"), window.Key(tenant, "ann"), wide.Key(tenant, "ann")}
			for _, requests := range [][]ratelimit.Request{{all[0]}, {all[1]}, {all[2]}, all[:2], all} {
				if _, err := limiter.Consume(t.Context(), tx, requests...); err != nil {
					t.Errorf("tenant %q: %v", tenant, err)
				}
			}
			balances := harness.ReadBalances(t, &limiter, tx, all...)
			for i, want := range []float64{1, 1, 2} {
				if held := balances[i].Remaining; math.Floor(held) != want { // the clock runs
					t.Errorf("tenant %q holds %v of limit %d, want %v", tenant, held, i, want)
				}
			}
			if _, err := limiter.Consume(t.Context(), tx, all[0].Count(2)); !harness.Denied(err) {
				t.Errorf("tenant %q: %v, want a denial", tenant, err)
			}
			if _, err := limiter.Charge(t.Context(), tx, all[0].Count(4)); err != nil {
				t.Errorf("tenant %q: %v", tenant, err)
			}
			if _, err := limiter.Refund(t.Context(), tx, harness.ReceiptOf(time.Now(), all[0].Count(4)), all[0].Count(4)); err != nil {
				t.Errorf("tenant %q: %v", tenant, err)
			}
			var keys []string
			if err := tx.QueryRow(t.Context(), "SELECT array_agg(key) FROM ratelimit.keys('bucket', 4, '1000 hours')").Scan(&keys); err != nil || fmt.Sprint(keys) != "["+tenant+"|ann]" {
				t.Errorf("tenant %q sees %q, %v", tenant, keys, err)
			}
		})
	}
	// Holds are as the rows of limits. One without an end can be released by whoever knows its id.
	renders := ratelimit.Slots("renders", 2)
	if err := new(ratelimit.Limiter).Publish(t.Context(), owner, "web", renders); err != nil {
		t.Fatal(err)
	}
	var job string // the token of acme's
	for _, tenant := range []string{"acme", "globex"} {
		harness.AsTenant(t, app, tenant, func(tx pgx.Tx) {
			slot, token := renders.Key(tenant, "ann"), bucket.Key(tenant, "bob")
			if _, err := limiter.Hold(t.Context(), tx, "project", ratelimit.Forever, slot); err != nil {
				t.Errorf("tenant %q: %v", tenant, err)
			}
			held, err := limiter.Hold(t.Context(), tx, "job", time.Hour, slot, token)
			if err != nil {
				t.Errorf("tenant %q: %v", tenant, err)
			}
			if _, err := limiter.Hold(t.Context(), tx, "one too many", time.Hour, slot); !harness.Denied(err) {
				t.Errorf("tenant %q: %v, want a denial", tenant, err)
			}
			if n := harness.Scan[int](t, tx, "SELECT count(*) FROM ratelimit.holds('renders', $1)", tenant+"|ann"); n != 2 {
				t.Errorf("tenant %q sees %d of its 2 holds", tenant, n)
			}
			if tenant == "acme" {
				job = held.Token
				return
			}
			if err := harness.Second(limiter.Release(t.Context(), tx, held.Token, slot, token)); err != nil {
				t.Errorf("tenant %q: %v", tenant, err)
			}
			if left := harness.ReadBalance(t, &limiter, tx, slot); left != 1 {
				t.Errorf("tenant %q has %v slots left, want 1", tenant, left)
			}
		})
	}
	stored := func() string {
		return harness.TableOf(t, owner) + harness.Lines(t, owner, "SELECT * FROM ratelimit.holds ORDER BY name, key, id")
	}
	before := stored()

	// A tenant can neither see nor consume another's rows: writing one is refused, so nothing is granted. A refund or a
	// reset finds no row and does nothing.
	foreign := []ratelimit.Request{bucket.Key("acme", "ann"), window.Key("acme", "ann"), wide.Key("acme", "ann")}
	for _, tenant := range []string{"globex", "acm", "acme|ann", "%", "acme\\", ""} {
		attack := func(name, want string, do func(ctx context.Context, db harness.Handle) error) {
			t.Helper()
			harness.AsTenant(t, app, tenant, func(tx pgx.Tx) {
				inside, err := tx.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := do(t.Context(), inside); harness.SQLState(err) != want || want == "" && err != nil {
					t.Errorf("tenant %q, %s of another tenant's: %v, want %q", tenant, name, err, want)
				}
				if err := inside.Rollback(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		for _, requests := range [][]ratelimit.Request{foreign[:1], foreign[1:2], foreign[2:], foreign[:2], foreign} {
			attack(fmt.Sprint("consume ", len(requests)), "42501", func(ctx context.Context, db harness.Handle) error {
				_, err := limiter.Consume(ctx, db, requests...)
				return err
			})
			attack(fmt.Sprint("charge ", len(requests)), "42501", func(ctx context.Context, db harness.Handle) error {
				_, err := limiter.Charge(ctx, db, requests...)
				return err
			})
			attack(fmt.Sprint("refund ", len(requests)), "", func(ctx context.Context, db harness.Handle) error {
				_, err := limiter.Refund(ctx, db, harness.ReceiptOf(time.Now(), requests...), requests...)
				return err
			})
			attack(fmt.Sprint("reset ", len(requests)), "", func(ctx context.Context, db harness.Handle) error {
				return limiter.Reset(ctx, db, harness.KeysOf(requests...)...)
			})
		}
		slot, token := renders.Key("acme", "ann"), bucket.Key("acme", "bob")
		attack("hold", "42501", func(ctx context.Context, db harness.Handle) error {
			_, err := limiter.Hold(ctx, db, "job 2", time.Hour, slot, token)
			return err
		})
		attack("the same hold", "42501", func(ctx context.Context, db harness.Handle) error {
			_, err := limiter.Hold(ctx, db, "project", ratelimit.Forever, slot)
			return err
		})
		attack("release", "42501", func(ctx context.Context, db harness.Handle) error {
			return harness.Second(limiter.Release(ctx, db, "project", slot))
		})
		attack("release by token", "42501", func(ctx context.Context, db harness.Handle) error {
			return harness.Second(limiter.Release(ctx, db, job, slot, token))
		})
		attack("settle", "42501", func(ctx context.Context, db harness.Handle) error {
			_, err := limiter.Settle(ctx, db, job, slot, token.Count(1))
			return err
		})
		attack("settle slots", "42501", func(ctx context.Context, db harness.Handle) error {
			_, err := limiter.Settle(ctx, db, job, slot)
			return err
		})
		attack("by hand", "42501", func(ctx context.Context, db harness.Handle) error {
			_, err := db.Exec(ctx, "SELECT FROM ratelimit.consume('bucket', 'acme|ann', 4, '1000 hours')")
			return err
		})
		attack("once", "42501", func(ctx context.Context, db harness.Handle) error {
			_, _, err := limiter.Once(ctx, db, "theirs", time.Hour, bucket.Key("acme", "ann"))
			return err
		})
		attack("release by hand", "", func(ctx context.Context, db harness.Handle) error {
			_, err := db.Exec(ctx, `
				SELECT ratelimit.release('renders', 'acme|ann', 'job', reason => 'x'),
				       ratelimit.release_many('renders', 'acme|ann', '{project}')`)
			return err
		})
		for _, sql := range []string{
			"UPDATE ratelimit.limits SET value = 1 WHERE key = 'acme|ann'",
			"DELETE FROM ratelimit.limits WHERE key = 'acme|ann'",
			"UPDATE ratelimit.holds SET count = 0 WHERE key = 'acme|ann'",
			"DELETE FROM ratelimit.holds WHERE key = 'acme|ann'",
		} {
			attack(sql, "", func(ctx context.Context, db harness.Handle) error {
				tag, err := db.Exec(ctx, sql)
				if err == nil && tag.RowsAffected() != 0 {
					err = fmt.Errorf("%d rows", tag.RowsAffected())
				}
				return err
			})
		}
		harness.AsTenant(t, app, tenant, func(tx pgx.Tx) {
			for _, rows := range []string{
				"ratelimit.limits WHERE key LIKE 'acme%'",
				"ratelimit.holds WHERE key LIKE 'acme%'",
				"ratelimit.holds('renders', 'acme|ann')",
			} {
				if n := harness.Scan[int](t, tx, "SELECT count(*) FROM "+rows); n != 0 {
					t.Errorf("tenant %q sees %d rows of another tenant: %s", tenant, n, rows)
				}
			}
		})
	}
	if after := stored(); after != before {
		t.Errorf("the tenants made of\n%s\nthis\n%s", before, after)
	}
}

// TestASchemaForEachTest: it is empty, nobody else sees it, and nothing of it is left.
func TestASchemaForEachTest(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 4)
	limit := ratelimit.TokenBucket("limit", 1, time.Hour)
	for range 2 {
		t.Run("", func(t *testing.T) {
			limits := ratelimittest.NewSchema(t, pool)
			harness.Succeeds(t, harness.Second(limits.Consume(t.Context(), pool, limit.Key("ann"))))
			harness.Succeeds(t, harness.Second(limits.Block(t.Context(), pool, limit.Key("eve"), ratelimit.Terms{Forever: true})))
			if _, err := limits.Consume(t.Context(), pool, limit.Key("eve")); !harness.Denied(err) {
				t.Errorf("a blocked key: %v", err)
			}
			if s, err := migrations.Check(t.Context(), pool, limits.Schema); err != nil || s.Differs() != "" {
				t.Errorf("%+v, %v", s, err)
			}
		})
	}
	if left := harness.Lines(t, pool, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'ratelimit\\_%'"); left != "" {
		t.Errorf("left are %s", left)
	}
}

// A schema for each tenant, with its own limits, and a Limiter for each. A tenant's role may not use the other schema.
func TestASchemaForEachTenant(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	url := pool.Config().ConnString()
	limiters := map[string]*ratelimit.Limiter{"tenant_a": {Schema: "tenant_a"}, "tenant_b": {Schema: "tenant_b"}}
	limit := ratelimit.TokenBucket("limit", 3, 1000*time.Hour)
	for schema := range limiters {
		harness.Succeeds(t, migrated.UpIn(t.Context(), url, schema))
	}
	for use := range 5 {
		for schema, limiter := range limiters {
			err := limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				result, err := limiter.Consume(ctx, tx, limit.Key("ann"))
				if granted := err == nil; granted != (use < 3) || err != nil && !harness.Denied(err) {
					t.Errorf("use %d in %s: %+v, %v", use, schema, result, err)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
	}
	if rows := harness.TableOf(t, pool); rows != "" {
		t.Errorf("in the schema ratelimit:\n%s", rows)
	}

	harness.NeedsToPrepareAgain(t)
	role := harness.CreateRole(t, pool)
	harness.MustExec(t, pool, "SELECT tenant_a.grant('"+role+"', 'consume')")
	tenant := harness.AsRole(t, pool, role, 1)
	before := harness.Lines(t, pool, "TABLE tenant_b.limits")
	for _, request := range []ratelimit.Request{limit.Key("ann"), limit.Key("fresh")} {
		if _, err := limiters["tenant_b"].Consume(t.Context(), tenant, request); harness.SQLState(err) != "42501" {
			t.Errorf("in another tenant's schema: %v, want 42501", err)
		}
	}
	harness.Succeeds(t, harness.Second(limiters["tenant_a"].Consume(t.Context(), tenant, limit.Key("bob"))))
	if after := harness.Lines(t, pool, "TABLE tenant_b.limits"); after != before {
		t.Errorf("the other's rows became\n%s", after)
	}
}

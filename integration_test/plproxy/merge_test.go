package plproxy_test

import (
	"testing"

	"github.com/txlimit/txlimit/migrations/plproxy"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestABatchOfAFormerlyShardedLimit: another partition may have decided its part, so the batch is not sent again. The next one is decided.
func TestABatchOfAFormerlyShardedLimit(t *testing.T) {
	db := pool(t, shared.proxy.URL(), 2)
	a, b := keyOn(t, db, 0), keyOn(t, db, 1)
	l := &ratelimit.Limiter{}
	if _, err := l.Consume(t.Context(), db, ratelimit.TokenBucket("formerly", 10, never, ratelimit.Shards(3)).Key(a)); err != nil {
		t.Fatal(err)
	}
	batch := func() error {
		_, err := db.Exec(t.Context(), `SELECT * FROM _ratelimit_coalesce('{formerly}', '{10}', '{100000 hours}', '{10}',
			$1, '{1,1}', '{}', '{1,1}', '{1,1}', '{0,0}', '{}', '{}', '{}', '{}', '{}', '{}')`, []string{a, b})
		return err
	}
	if err := batch(); state(err) != "08007" {
		t.Fatalf("%v, want 08007", err)
	}
	if err := batch(); err != nil {
		t.Fatal(err)
	}
	limit := ratelimit.TokenBucket("formerly", 10, never)
	// One by itself and one of the second batch; the first batch may have decided for b.
	for key, most := range map[string]float64{a: 2, b: 2} {
		if taken := balance(t, new(ratelimit.Limiter), db, limit.Key(key)).Used; taken < 0.99 || taken > most {
			t.Errorf("%s: %v taken", key, taken)
		}
	}
}

// TestHostileOperators has an attacker's schema in the caller's search_path. What does not match a type of pg_catalog exactly would call it.
func TestHostileOperators(t *testing.T) {
	c := newOwn(t, 2)
	for _, url := range []string{c.proxy.URL(), c.partitions[0].URL(), c.partitions[1].URL()} {
		mustSQL(t, url, `CREATE SCHEMA evil; CREATE FUNCTION evil.hashtextextended(text, integer) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$`)
		mustSQL(t, url, `CREATE FUNCTION evil.count(integer) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$`)
		mustSQL(t, url, `DO $do$
			DECLARE l text; r text; o text;
			BEGIN
			FOREACH l IN ARRAY '{numeric,bigint,integer,integer[],text}'::text[] LOOP FOREACH r IN ARRAY '{numeric,bigint,integer,integer[],text}'::text[] LOOP
				FOREACH o IN ARRAY '{-,+,&,%,=,<>,<,>,<=,>=,||}'::text[] LOOP
					EXECUTE format('CREATE OR REPLACE FUNCTION evil.f(%1$s, %2$s) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE ''evil''; END $$', l, r);
					EXECUTE format('CREATE OPERATOR evil.%3$s (LEFTARG = %1$s, RIGHTARG = %2$s, FUNCTION = evil.f)', l, r, o);
				END LOOP;
			END LOOP; END LOOP;
			END $do$;
			ALTER DATABASE postgres SET search_path = public, evil`)
	}
	db := pool(t, c.proxy.URL(), 2)
	if _, err := db.Exec(t.Context(), "SELECT 1::numeric - 1::bigint"); err == nil {
		t.Fatal("the attack is too weak: a loose expression is not hit")
	}
	a, b := keyOn(t, db, 0), keyOn(t, db, 1)
	for _, sql := range []string{
		`SELECT * FROM _ratelimit_consume_keys('evil', $1, 10, '1 hour', 10, '{1,1}')`,
		`SELECT * FROM _ratelimit_coalesce('{evil}', '{10}', '{1 hour}', '{10}', $1, '{1,1}', '{}', '{1,1}', '{1,1}', '{0,0}', '{}', '{}', '{}', '{}', '{}', '{}')`,
		`SELECT _ratelimit_consume('evil', k, 10, '1 hour', 10, NULL, 1, 0) FROM unnest($1::text[]) AS k`,
		`SELECT _ratelimit_reset('{evil,evil}', $1)`,
		`SELECT * FROM ratelimit_sweep('evil', 10, '1 hour') WHERE $1::text[] IS NOT NULL`,
	} {
		if _, err := db.Exec(t.Context(), sql, []string{a, b}); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	slot, _ := slotOf(t, db, a)
	for _, server := range []int{1, 0} {
		if err := execSQL(t.Context(), c.proxy.URL(), "CALL ratelimit_move_slots($1, $2)", []int{slot}, server); err != nil {
			t.Error(err)
		}
	}
	// The files can be run again, and the slot of a key stays.
	mustSQL(t, c.proxy.URL(), plproxy.Proxy)
	mustSQL(t, c.partitions[0].URL(), plproxy.Partition)
	if again, _ := slotOf(t, db, a); again != slot {
		t.Errorf("slot %d, then %d", slot, again)
	}
}

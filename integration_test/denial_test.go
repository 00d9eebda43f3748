package integration_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// TestNothingIsWrittenOnDenial is not parallel: it counts what the whole server writes.
func TestNothingIsWrittenOnDenial(t *testing.T) {
	bucket := ratelimit.TokenBucket("bucket", 1, 24*time.Hour)
	window := ratelimit.FixedWindow("window", 2, 24*time.Hour)
	sharded := ratelimit.TokenBucket("sharded", 1, 24*time.Hour, ratelimit.Shards(3), ratelimit.MaxReserved(0))
	for name, requests := range map[string][]ratelimit.Request{
		"one limit":         {bucket.Key("k")},
		"one sharded limit": {sharded.Key("k").Reserve()},
		"three limits":      {bucket.Key("k"), window.Key("k"), sharded.Key("k")},
	} {
		t.Run(name, func(t *testing.T) {
			pool := newPool(t, 1)
			var limiter ratelimit.Limiter
			if _, err := limiter.Consume(t.Context(), pool, bucket.Key("k"), window.Key("k"), sharded.Key("k")); err != nil {
				t.Fatal(err)
			}
			writesNothing(t, pool, func() {
				if _, err := limiter.Consume(t.Context(), pool, requests...); !denied(err) {
					t.Fatalf("%v, want a denial", err)
				}
			})
		})
	}
	t.Run("arrays in another order than that of the locks", func(t *testing.T) {
		pool := newPool(t, 1)
		_, err := pool.Exec(t.Context(), `INSERT INTO rate_limits SELECT name, '', 0, 1, value, now() FROM (VALUES ('a', 1e6), ('b', 1e6), ('c', 0)) AS l (name, value)`)
		if err != nil {
			t.Fatal(err)
		}
		writesNothing(t, pool, func() {
			var granted bool
			err := pool.QueryRow(t.Context(), `SELECT granted FROM ratelimit_apply('consume', '{b,c,a}', '{"","",""}', '{1,1,1}', '{1 day,1 day,1 day}',
				'{1e6,1e6,1e6}', '{NULL,NULL,NULL}', '{1,1,1}', '{1,1,1}', '{0,0,0}', '{0,0,0}', '{0,0,0}')`).Scan(&granted)
			if err != nil || granted {
				t.Fatalf("%v, %v, want a denial", granted, err)
			}
		})
	})
}

// writesNothing denies a thousand times. The server writes a little by itself (autovacuum, the background writer), so the
// quietest of a few rounds counts.
func writesNothing(t *testing.T, pool *pgxpool.Pool, deny func()) {
	t.Helper()
	const rounds, denials, noise = 5, 1000, 4096
	xids, wal := int64(denials), int64(1<<40)
	for range rounds {
		xidBefore, walBefore := written(t, pool)
		for range denials {
			deny()
		}
		xidAfter, walAfter := written(t, pool)
		xids, wal = min(xids, xidAfter-xidBefore), min(wal, walAfter-walBefore)
		if xids == 0 && wal <= noise {
			break
		}
	}
	t.Logf("%d denials: %d transaction ids, %d bytes of WAL", denials, xids, wal)
	if xids != 0 || wal > noise {
		t.Errorf("denials were written")
	}
}

// written is how many transaction ids and bytes of WAL there have been.
func written(t *testing.T, pool *pgxpool.Pool) (xids, wal int64) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
		(pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&xids, &wal)
	if err != nil {
		t.Fatal(err)
	}
	return xids, wal
}

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
			// The server writes a little by itself (autovacuum, the background writer): the quietest of a few rounds counts.
			const rounds, denials, noise = 5, 1000, 4096
			xids, wal := int64(denials), int64(1<<40)
			for range rounds {
				xidBefore, walBefore := written(t, pool)
				for range denials {
					if _, err := limiter.Consume(t.Context(), pool, requests...); !denied(err) {
						t.Fatalf("%v, want a denial", err)
					}
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
		})
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

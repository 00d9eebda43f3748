package faults_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/internal/postgres"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestWhatACallWrites prints the transaction ids and the bytes of write-ahead log that a call on a pool takes, its commit included, for
// docs/evidence.md. The server is the test's own, and writes no full pages: those are of checkpoints, and not of calls.
func TestWhatACallWrites(t *testing.T) {
	t.Parallel()
	b := newServer(t, postgres.BreakableConfig{Settings: []string{"autovacuum=off", "full_page_writes=off", "checkpoint_timeout=1h"}})
	pool, err := pgxpool.New(t.Context(), b.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	ctx := t.Context()
	var limits ratelimit.Limiter
	bucket := ratelimit.TokenBucket("bucket", 1e6, time.Hour)
	other := ratelimit.FixedWindow("other", 1e6, time.Hour)
	sharded := ratelimit.TokenBucket("sharded", 1e6, time.Hour, ratelimit.Shards(4))
	empty := ratelimit.FixedWindow("empty", 1, 1000*time.Hour)
	key := func(i int) string { return fmt.Sprintf("user-%07d", i) }
	consume := func(ctx context.Context, requests ...ratelimit.Request) error {
		_, err := limits.Consume(ctx, pool, requests...)
		return err
	}
	for _, test := range []struct {
		what  string
		xids  int64
		bytes int64 // about
		call  func(i int) error
	}{
		{"first call of a key", 1, 264, func(i int) error { return consume(ctx, bucket.Key(key(i))) }},
		{"grant", 1, 120, func(i int) error { return consume(ctx, bucket.Key(key(i))) }},
		{"grant of two limits, first call of one", 2, 488, func(i int) error { return consume(ctx, bucket.Key(key(i)), other.Key(key(i))) }},
		{"grant of two limits", 1, 200, func(i int) error { return consume(ctx, bucket.Key(key(i)), other.Key(key(i))) }},
		{"charge", 1, 120, func(i int) error { _, err := limits.Charge(ctx, pool, bucket.Key(key(i))); return err }},
		{"reservation", 1, 120, func(i int) error { _, err := limits.Reserve(ctx, pool, bucket.Key(key(i))); return err }},
		{"first call of a key with 4 shards", 2, 976, func(i int) error { return consume(ctx, sharded.Key(key(i))) }},
		{"grant with 4 shards", 2, 192, func(i int) error { return consume(ctx, sharded.Key(key(i))) }},
		{"denial", 0, 0, func(i int) error {
			if err := consume(ctx, empty.Key("used")); i > 0 && !errors.Is(err, ratelimit.ErrDenied) {
				return fmt.Errorf("want a denial: %w", err)
			}
			return nil
		}},
	} {
		var xids, bytes []int64
		for i := range 31 {
			const position = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, (pg_current_wal_insert_lsn() - '0/0')::bigint"
			var xid, at, nextXID, nextAt int64
			if err := pool.QueryRow(ctx, position).Scan(&xid, &at); err != nil {
				t.Fatal(err)
			}
			if err := test.call(i); err != nil {
				t.Fatalf("%s: %v", test.what, err)
			}
			if err := pool.QueryRow(ctx, position).Scan(&nextXID, &nextAt); err != nil {
				t.Fatal(err)
			}
			xids, bytes = append(xids, nextXID-xid), append(bytes, nextAt-at)
		}
		slices.Sort(xids)
		slices.Sort(bytes)
		x, b := xids[len(xids)/2], bytes[len(bytes)/2]
		t.Logf("%-40s %d transaction ids, %3d bytes", test.what, x, b)
		if x != test.xids || b < test.bytes/2 || b > test.bytes*2 {
			t.Errorf("%s: want %d transaction ids and about %d bytes", test.what, test.xids, test.bytes)
		}
	}
}

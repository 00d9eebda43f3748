package verbs_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// TestNothingIsWrittenOnDenial is not parallel: it counts what the whole server writes.
func TestNothingIsWrittenOnDenial(t *testing.T) {
	abundant := ratelimit.TokenBucket("abundant", 1e6, 24*time.Hour)
	bucket := ratelimit.TokenBucket("bucket", 1, 24*time.Hour)
	window := ratelimit.FixedWindow("window", 2, 24*time.Hour)
	sharded := ratelimit.TokenBucket("sharded", 1, 24*time.Hour, ratelimit.Shards(3), ratelimit.MaxReserved(0))
	for name, c := range map[string]struct {
		reserve  bool
		requests []ratelimit.Request
	}{
		"one limit":                   {false, []ratelimit.Request{bucket.Key("k")}},
		"one sharded limit, reserved": {true, []ratelimit.Request{sharded.Key("k")}},
		"two limits":                  {false, []ratelimit.Request{abundant.Key("k"), bucket.Key("k")}}, // the first would grant
		"two limits, reserved":        {true, []ratelimit.Request{abundant.Key("k"), sharded.Key("k")}},
		"three limits":                {false, []ratelimit.Request{bucket.Key("k"), window.Key("k"), sharded.Key("k")}},
	} {
		t.Run(name, func(t *testing.T) {
			pool := harness.NewPool(t, 1)
			var limiter ratelimit.Limiter
			harness.Succeeds(t, harness.Second(limiter.Consume(t.Context(), pool, abundant.Key("k"), bucket.Key("k"), window.Key("k"), sharded.Key("k"))))
			writesNothing(t, pool, func() {
				answer, err := harness.Decide(t.Context(), &limiter, pool, c.reserve, c.requests...)
				if !harness.Denied(err) {
					t.Fatalf("%v, want a denial", err)
				}
				for _, s := range answer.Requests {
					if s.Taken != 0 {
						t.Errorf("%v tokens are said to be taken", s.Taken)
					}
				}
			})
		})
	}
	t.Run("arrays in another order than the lock order", func(t *testing.T) {
		pool := harness.NewPool(t, 1)
		_, err := pool.Exec(t.Context(), `INSERT INTO ratelimit.limits SELECT name, '', 0, 1, value, now() FROM (VALUES ('a', 1e6), ('b', 1e6), ('c', 0)) AS l (name, value)`)
		harness.Succeeds(t, err)
		writesNothing(t, pool, func() {
			var granted bool
			err := pool.QueryRow(t.Context(), `SELECT granted FROM ratelimit._apply('consume', '{b,c,a}', '{"","",""}', '{1,1,1}', '{1 day,1 day,1 day}',
				'{1e6,1e6,1e6}', '{NULL,NULL,NULL}', '{1,1,1}', '{1,1,1}', '{0,0,0}', '{0,0,0}', '{0,0,0}')`).Scan(&granted)
			if err != nil || granted {
				t.Fatalf("%v, %v, want a denial", granted, err)
			}
		})
	})
}

// A caller that expects a denial reads the row before it writes. The decision must be the same, to the last token, whether
// the expectation is right or wrong.
func TestExpectingADenialDecidesTheSame(t *testing.T) {
	t.Parallel()
	tx, err := harness.NewPool(t, 1).Begin(t.Context())
	harness.Succeeds(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	granted := 0
	for _, start := range []string{"NULL", "'0001-01-01 UTC'"} {
		for shards := range 3 { // 0: there is no row
			for _, count := range []float64{0, 1, 2.5, 3, 3.5, 4, 5, 10} { // at noon it holds 3, a minute later 4
				for _, minute := range []int{0, 1} {
					var answers [2]string
					for i := range answers {
						savepoint, err := tx.Begin(t.Context())
						if err == nil {
							_, err = savepoint.Exec(t.Context(), `INSERT INTO ratelimit.limits SELECT 'limit', 'k', s, $1::int, 3.0 / greatest($1::int, 1), '2026-07-01 12:00 UTC'
								FROM generate_series(0, $1::int - 1) AS s`, shards)
						}
						var ok bool
						if err == nil {
							err = savepoint.QueryRow(t.Context(), `SELECT granted, concat_ws(' ', r, (SELECT array_agg(l ORDER BY shard) FROM ratelimit.limits AS l))
								FROM ratelimit._consume('limit', 'k', 1, '1 minute', 10, `+start+`, $1, 0, '2026-07-01 12:00 UTC'::timestamptz + $2 * interval '1 minute', $3) AS r`,
								count, minute, i == 1).Scan(&ok, &answers[i])
						}
						if err == nil {
							err = savepoint.Rollback(t.Context())
						}
						harness.Succeeds(t, err)
						if ok {
							granted++
						}
					}
					if answers[0] != answers[1] {
						t.Errorf("start %s, %d shards, count %v, minute %d\nexpecting a grant  %s\nexpecting a denial %s", start, shards, count, minute, answers[0], answers[1])
					}
				}
			}
		}
	}
	if granted < 20 || granted > 170 {
		t.Errorf("%d of 192 granted: this tested too little", granted)
	}
}

// writesNothing denies a thousand times. The server itself writes a little (autovacuum, the background writer), so the
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

// written returns the number of transaction ids and bytes of WAL so far.
func written(t *testing.T, pool *pgxpool.Pool) (xids, wal int64) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
		(pg_current_wal_insert_lsn() - '0/0')::bigint`).Scan(&xids, &wal)
	harness.Succeeds(t, err)
	return xids, wal
}

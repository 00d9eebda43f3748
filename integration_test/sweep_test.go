package integration_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

// sweep sweeps, which must work.
func (w world) sweep(limits ...ratelimit.Limit) int64 {
	w.Helper()
	deleted, err := w.limiter.Sweep(w.Context(), w.db, limits...)
	if err != nil {
		w.Fatalf("sweep: %v", err)
	}
	return deleted
}

// TestASweepDeletesWhatSaysNothing writes rows by hand. An hour before noon, which is what counts, is 11:00.
func TestASweepDeletesWhatSaysNothing(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket("l", 10, time.Minute, ratelimit.Capacity(20))
	window := ratelimit.FixedWindow("l", 10, time.Hour, ratelimit.Capacity(20), ratelimit.Start(noon.Add(30*time.Minute)))
	long := ratelimit.FixedWindow("l", 10, 30*24*time.Hour, ratelimit.Start(noon.Add(-2*time.Hour)))
	none := ratelimit.TokenBucket("l", 10, time.Minute, ratelimit.Capacity(0))
	pool := connect(t, sweptSchema(t), 1)
	for _, test := range []struct {
		what  string
		limit ratelimit.Limit
		rows  string // shard, shards, value, ts; several with semicolons
		gone  bool
	}{
		{"full for an hour", bucket, "0, 1, 20, '2026-07-01 11:00Z'", true},
		{"and a microsecond less", bucket, "0, 1, 20, '2026-07-01 11:00:00.000001Z'", false},
		{"full since 11:00", bucket, "0, 1, 0, '2026-07-01 10:58Z'", true},
		{"full since just after", bucket, "0, 1, 0, '2026-07-01 10:58:00.000001Z'", false},
		{"full now, not an hour ago", bucket, "0, 1, 0, '2026-07-01 11:30Z'", false},
		{"more than the capacity", bucket, "0, 1, 1e9, '2026-07-01 11:00Z'", true},
		{"in debt, long ago", bucket, "0, 1, -1000, '2026-06-01Z'", true},
		{"in deep debt", bucket, "0, 1, -1e9, '2026-06-01Z'", false},
		{"in infinite debt", bucket, "0, 1, '-Infinity', '2026-06-01Z'", false},
		{"in the future", bucket, "0, 1, 1e9, '2026-07-01 12:00:01Z'", false},
		{"in the far future", bucket, "0, 1, 1e9, 'infinity'", false},
		{"before all time", bucket, "0, 1, 1e9, '-infinity'", false},
		{"NaN, which is full", bucket, "0, 1, 'NaN', '2026-07-01 11:00Z'", true},
		{"Infinity, which is full", bucket, "0, 1, 'Infinity', '2026-07-01 11:00Z'", true},
		{"shards that nobody could have", bucket, "0, 0, 20, '2026-06-01Z'", false},

		{"nothing saved up, nothing owed", none, "0, 1, 0, '2026-07-01 11:00Z'", true},
		{"nothing saved up, debt paid", none, "0, 1, -10, '2026-07-01 10:59Z'", true},
		{"nothing saved up, debt not paid", none, "0, 1, -10.001, '2026-07-01 10:59Z'", false},

		{"the window of 11:00 began full", window, "0, 1, 20, '2026-07-01 10:30Z'", true},
		{"not from its beginning", window, "0, 1, 20, '2026-07-01 10:31Z'", false},
		{"two windows ago", window, "0, 1, 0, '2026-07-01 08:30Z'", true},
		{"late in the window before that", window, "0, 1, 0, '2026-07-01 09:29:59Z'", true},
		{"one window ago", window, "0, 1, 0, '2026-07-01 09:30Z'", false},
		{"one window ago, with the rest", window, "0, 1, 10, '2026-07-01 09:30Z'", true},
		{"used up in this window", long, "0, 1, 0, '2026-07-01 10:00Z'", false},
		{"used up in the last window", long, "0, 1, 0, '2026-06-30 10:00Z'", true},

		{"all three shards", bucket, "0, 3, 0, '2026-07-01 10:58Z'; 1, 3, 0, '2026-07-01 10:58Z'; 2, 3, 0, '2026-07-01 10:58Z'", true},
		{"two of three shards are full", bucket, "0, 3, 0, '2026-07-01 10:58Z'; 1, 3, 0, '2026-07-01 10:58Z'; 2, 3, 0, '2026-07-01 10:59Z'", false},
		{"a shard is missing", bucket, "0, 3, 7, '2026-06-01Z'; 2, 3, 7, '2026-06-01Z'", false},
		{"a shard too many", bucket, "0, 1, 20, '2026-06-01Z'; 1, 2, 20, '2026-06-01Z'", false},
		{"two shards of a window", window, "0, 2, 5, '2026-07-01 09:30Z'; 1, 2, 5, '2026-07-01 09:30Z'", true},
		{"two shards of a window, one full", window, "0, 2, 5, '2026-07-01 09:30Z'; 1, 2, 4, '2026-07-01 09:30Z'", false},
	} {
		t.Run(test.what, func(t *testing.T) {
			limiter, clock := newLimiter()
			w := world{t, pool, limiter, clock}
			_, err := w.db.Exec(t.Context(), "TRUNCATE rate_limits")
			w.do(err)
			var want int64
			for row := range strings.SplitSeq(test.rows, ";") {
				for _, name := range []string{"l", "other"} { // which is not swept
					_, err := w.db.Exec(t.Context(), fmt.Sprintf("INSERT INTO rate_limits VALUES ('%s', '', %s)", name, row))
					w.do(err)
				}
				if test.gone {
					want++
				}
			}
			rows := w.rows()
			if deleted := w.sweep(test.limit); deleted != want {
				t.Errorf("%d rows deleted, want %d of\n%s", deleted, want, rows)
			}
			if want == 0 && w.rows() != rows {
				t.Errorf("nothing to delete, but the sweep has written to or locked\n%s\nnow\n%s", rows, w.rows())
			}
			if got := strings.Count(w.rows(), "(other,"); got != 1+strings.Count(test.rows, ";") {
				t.Errorf("%d rows are left of the other limit", got)
			}
		})
	}
}

// Every key has a grid of its own if the window has no start, and is swept by that, whatever characters it has.
func TestASweepKnowsTheGridOfEveryKey(t *testing.T) {
	t.Parallel()
	limiter, clock := newLimiter()
	w := world{t, connect(t, sweptSchema(t), 1), limiter, clock}
	limit := ratelimit.FixedWindow("sign-ups ü", 10, 24*time.Hour)
	requests := []ratelimit.Request{limit.Global()}
	for i := range 40 {
		requests = append(requests, limit.Key(fmt.Sprintf("%d ünïcode '|\\", i)))
	}
	for _, request := range requests {
		w.grant(request.Count(10))
	}
	var resets []time.Time // when the windows of all keys are over
	for _, request := range requests {
		resets = append(resets, w.check(request.Count(0)).Requests[0].ResetAt)
	}
	slices.SortFunc(resets, time.Time.Compare)
	var deleted int64
	for i, reset := range resets {
		clock.now = reset.Add(time.Hour - time.Microsecond)
		deleted += w.sweep(limit)
		if deleted != int64(i) {
			t.Fatalf("%d rows deleted a microsecond before the %d. is full for an hour", deleted, i+1)
		}
		clock.Advance(time.Microsecond)
		deleted += w.sweep(limit)
	}
	if deleted != int64(len(requests)) || w.rows() != "" {
		t.Errorf("%d rows deleted, left are\n%s", deleted, w.rows())
	}
}

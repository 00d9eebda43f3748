package model_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

// TestReplayPredictsARun plays random calls on a Postgres, by the test's clock. A replay of the observed events by the same
// definition must predict every decision, and the longest wait of each key.
func TestReplayPredictsARun(t *testing.T) {
	t.Parallel()
	pool, r := harness.NewPool(t, 1), harness.NewRand(t)
	start := harness.Noon.Add(-90 * time.Minute)
	for i, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 7, time.Minute, ratelimit.Capacity(3)),
		ratelimit.TokenBucket("fractions", 0.3, time.Second, ratelimit.Capacity(1.5)),
		ratelimit.FixedWindow("window", 5, time.Minute, ratelimit.Capacity(8)),
		ratelimit.FixedWindow("from", 5, time.Minute, ratelimit.Start(start)),
		ratelimit.CalendarWindow("calendar", 2, ratelimit.Month, ratelimit.Zone("Europe/Berlin"), ratelimit.Anchor("2026-01-31 15:00"), ratelimit.Capacity(5)),
		ratelimit.TokenBucket("nothing", 0, time.Minute),
		ratelimit.Unlimited("everything"),
	} {
		step := 4 * time.Second
		if limit.Config().Kind == "calendar window" {
			step = 100 * time.Hour
		}
		var events []replay.Event
		var grants []bool
		waits := map[string]time.Duration{}
		now := start
		limiter := &ratelimit.Limiter{
			Clock: func() time.Time { return now },
			Observer: func(_ context.Context, d ratelimit.Decision) {
				of, ok := d.Result.Requests[0], d.Err == nil
				events = append(events, replay.Event{Time: now, Key: of.Key, Count: of.Count})
				grants = append(grants, ok)
				if errors.Is(d.Err, ratelimit.ErrExceedsCapacity) {
					waits[of.Key] = math.MaxInt64 / 2 // never
				} else if !ok {
					waits[of.Key] = max(waits[of.Key], d.Result.RetryAfter)
				}
			},
		}
		for range 200 {
			if r.IntN(4) > 0 {
				now = now.Add(time.Duration(r.Int64N(int64(step)))).Truncate(time.Microsecond)
			}
			request := limit.Key([]string{"ann", "bob", "a|b\\c"}[r.IntN(3)]).Count([]float64{0, 0.25, 1, 1, 1, 2}[r.IntN(6)])
			_, err := limiter.Consume(t.Context(), pool, request)
			if err != nil && !errors.Is(err, ratelimit.ErrDenied) && !errors.Is(err, ratelimit.ErrExceedsCapacity) {
				t.Fatal(err)
			}
		}
		granted := 0
		for n, ok := range grants {
			if ok {
				granted++
			}
			report := harness.Replayed(t, events[:n+1], limit)
			if got := report.Candidates[0].Granted; got != granted {
				t.Fatalf("%v: event %d, %+v: Postgres granted %v; the replay granted %d so far, want %d", limit, n, events[n], ok, got, granted)
			}
		}
		c := harness.Replayed(t, events, limit).Candidates[0]
		got := map[string]time.Duration{}
		for _, key := range c.LongestWaits {
			got[key.Key] = key.Wait
		}
		if !maps.Equal(got, waits) {
			t.Errorf("%v: the longest waits are %v, want %v", limit, got, waits)
		}
		if i < 5 && (granted < 20 || c.Denied < 20) {
			t.Errorf("%v: %d of %d granted: this tested too little", limit, granted, len(events))
		}
	}
}

func TestReplayReadsAQuery(t *testing.T) {
	t.Parallel()
	pool := harness.NewPool(t, 2)
	if _, err := pool.Exec(t.Context(), `
		CREATE TABLE messages (created_at timestamptz, user_id bigint, sender text, id uuid, tokens numeric);
		INSERT INTO messages VALUES
			('2026-07-01 12:00:00.123456Z', 17, 'ann', '6f0e1a2c-8e0b-4f53-9d0c-9d2f6d1d6a01', 1.5),
			('2026-07-01 12:00:01Z', 4711, '<b>', '6f0e1a2c-8e0b-4f53-9d0c-9d2f6d1d6a02', 20)`); err != nil {
		t.Fatal(err)
	}
	first := harness.Noon.Add(123456 * time.Microsecond)
	for _, row := range []struct {
		sql  string
		want string // the events, or part of the error
	}{
		{"SELECT created_at, user_id FROM messages ORDER BY 1", "17 1, 4711 1"},
		{"SELECT created_at, sender, tokens FROM messages ORDER BY 1", "ann 1.5, <b> 20"},
		{"SELECT created_at, id, 2::int FROM messages ORDER BY 1 LIMIT 1", "6f0e1a2c-8e0b-4f53-9d0c-9d2f6d1d6a01 2"},
		{"SELECT created_at, '192.0.2.1'::inet, true::int::float4 FROM messages", "192.0.2.1 1, 192.0.2.1 1"},
		{"SELECT created_at FROM messages ORDER BY 1", " 1,  1"},
		{"SELECT created_at, user_id FROM messages WHERE user_id = $1", "17 1"},
		{"SELECT created_at, NULL FROM messages", "row 1: ratelimit: invalid: the key is NULL"},
		{"SELECT created_at, '' FROM messages", "row 1: ratelimit: invalid: the key is NULL"},
		{"SELECT created_at, sender, NULL FROM messages", "row 1: ratelimit: invalid: the count"},
		{"SELECT created_at, sender, 'many' FROM messages", "row 1: ratelimit: invalid: the count"},
		{"SELECT 'infinity'::timestamptz, sender FROM messages", "row 1: ratelimit: invalid: the time"},
		{"SELECT NULL::timestamptz, sender FROM messages", "row 1: ratelimit: invalid: the time"},
		{"SELECT created_at::timestamp, sender FROM messages", "timestamptz"},
		{"SELECT created_at, 1, 2, 3 FROM messages", "one to three columns"},
		{"SELECT created_at, 1 / (user_id - 4711) FROM messages ORDER BY 1", "division by zero"},
		{"SELECT nothing", "42703"},
	} {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, events := range []iter.Seq2[replay.Event, error]{
			replay.Query(t.Context(), pool, row.sql, parameters(row.sql)...),
			replay.Query(t.Context(), tx, row.sql, parameters(row.sql)...),
		} {
			var got []string
			for event, err := range events {
				if err != nil {
					got = append(got[:0], err.Error())
					break
				}
				if len(got) == 0 && !event.Time.Equal(first) {
					t.Errorf("%s: the time is %v", row.sql, event.Time)
				}
				got = append(got, fmt.Sprint(event.Key, " ", event.Count))
			}
			if text := strings.Join(got, ", "); text != row.want && (len(got) != 1 || !strings.Contains(text, row.want)) {
				t.Errorf("%s: %q, want %q", row.sql, got, row.want)
			}
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	backwards := replay.Query(t.Context(), pool, "SELECT created_at, user_id FROM messages ORDER BY 1 DESC")
	if _, err := replay.Run(backwards, ratelimit.TokenBucket("a", 1, time.Hour)); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "row 2: ") {
		t.Error(err)
	}
	for _, err := range replay.Query(t.Context(), pool, "SELECT now(), 1") {
		if err != nil {
			t.Error(err)
		}
		break // gives the connection back
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are in use", n)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if events := slices.Collect(errorsOf(replay.Query(canceled, pool, "SELECT now()"))); len(events) != 1 || !errors.Is(events[0], context.Canceled) {
		t.Error(events)
	}
}

// parameters are the arguments of a statement of the test.
func parameters(sql string) []any {
	if strings.Contains(sql, "$1") {
		return []any{17}
	}
	return nil
}

func errorsOf(events iter.Seq2[replay.Event, error]) iter.Seq[error] {
	return func(yield func(error) bool) {
		for _, err := range events {
			if err != nil && !yield(err) {
				return
			}
		}
	}
}

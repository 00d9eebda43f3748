package ratelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"
)

// answersWithKeys are one of each type that has a limit and a key. The key is "private".
func answersWithKeys() map[string]any {
	at := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	bucket, unlimited := TokenBucket("bucket", 10, time.Hour), Unlimited("unlimited")
	statuses := []Status{
		{Limit: bucket, Key: "private", Count: 2, Remaining: 1, RetryAt: at.Add(time.Minute), ResetAt: at},
		{Limit: unlimited, Key: "private", Count: 1, Remaining: math.Inf(1), OK: true},
		{Limit: Limit{}, Key: "private", Count: math.NaN()},
		{Limit: TokenBucket("negative", -1, time.Hour), Key: "private"},
	}
	denied := Result{At: at, RetryAt: at.Add(time.Minute), RetryAfter: time.Minute, Remaining: 1, Requests: statuses}
	denial := &DeniedError{At: at, RetryAt: denied.RetryAt, RetryAfter: time.Minute, Remaining: 1, Requests: statuses, Reason: ReasonQuota}
	return map[string]any{
		"request": bucket.Key("private").Count(2), "status": statuses[0], "unlimited": statuses[1], "unset": statuses[2], "invalid": statuses[3],
		"result": denied, "granted": Result{OK: true, At: at, Remaining: math.Inf(1), Requests: statuses[1:2]},
		"reservation": Reservation{At: at, RetryAt: at.Add(time.Minute), Delay: time.Minute, Remaining: math.Inf(1), Requests: statuses[:2]},
		"held":        Held{At: at, Remaining: math.Inf(1), Requests: statuses[:2], Token: "private", Until: at},
		"balance":     Balance{Limit: unlimited, Key: "private", At: at, Remaining: math.Inf(1), Used: math.NaN(), Capacity: math.Inf(1), Decides: byOverride, Until: at},
		"denied":      denial, "wrapped": fmt.Errorf("wrapped: %w", denial),
	}
}

func TestLogsHaveNoKeys(t *testing.T) {
	for name, want := range map[string]string{
		"request":     `v.limit=bucket v.count=2`,
		"status":      `v.limit=bucket v.count=2 v.ok=false v.remaining=1 v.retry_at=2026-07-01T12:01:00.000Z`,
		"unlimited":   `v.limit=unlimited v.count=1 v.ok=true v.remaining=+Inf`,
		"unset":       `v.limit=(invalid) v.count=NaN v.ok=false v.remaining=0`,
		"invalid":     `v.limit=(invalid) v.count=0 v.ok=false v.remaining=0`,
		"result":      `v.limits="[bucket unlimited (invalid)]" v.ok=false v.remaining=1 v.retry_after=1m0s`,
		"granted":     `v.limits=[unlimited] v.ok=true v.remaining=+Inf`,
		"reservation": `v.limits="[bucket unlimited]" v.retry_at=2026-07-01T12:01:00.000Z v.delay=1m0s v.remaining=+Inf`,
		"held":        `v.limits="[bucket unlimited]" v.remaining=+Inf v.until=2026-07-01T12:00:00.000Z`,
		"balance":     `v.limit=unlimited v.remaining=+Inf v.used=NaN v.capacity=+Inf v.decides=override v.until=2026-07-01T12:00:00.000Z`,
		"denied":      `v="ratelimit: denied: bucket (2 asked, 1 of 10 remaining)`,
		"wrapped":     `v="wrapped: ratelimit: denied: bucket (2 asked, 1 of 10 remaining)`,
	} {
		var text, asJSON bytes.Buffer
		slog.New(slog.NewTextHandler(&text, nil)).Info("m", "v", answersWithKeys()[name])
		slog.New(slog.NewJSONHandler(&asJSON, nil)).Info("m", "v", answersWithKeys()[name])
		_, got, _ := strings.Cut(strings.TrimSpace(text.String()), "msg=m ")
		if !strings.HasPrefix(got, want) || got != want && !strings.HasPrefix(want, `v="`) {
			t.Errorf("%s: got  %s\nwant %s", name, got, want)
		}
		if all := text.String() + asJSON.String(); strings.Contains(all, "private") || strings.Contains(all, "ERROR") {
			t.Errorf("%s: %s", name, all)
		}
	}
}

func TestALimitIsItsConfigAsJSON(t *testing.T) {
	for want, limit := range map[string]Limit{
		`{"name":"bucket","kind":"token bucket","rate":10,"period":"1h","capacity":10,"shards":1}`: TokenBucket("bucket", 10, time.Hour),
		`{"name":"unlimited","kind":"unlimited"}`:                                                  Unlimited("unlimited"),
		`{"name":""}`:         {},
		`{"name":"negative"}`: TokenBucket("negative", -1, time.Hour),
	} {
		if text, err := json.Marshal(limit); err != nil || string(text) != want {
			t.Errorf("got %s, %v, want %s", text, err, want)
		}
	}
	var c Config
	text, _ := json.Marshal(CalendarWindow("l", 10, Month, Zone("Europe/Berlin"), Varies(99*24*time.Hour)))
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	if again, err := c.Limit(); err != nil || again != CalendarWindow("l", 10, Month, Zone("Europe/Berlin"), Varies(99*24*time.Hour)) {
		t.Errorf("%s became %v, %v", text, again, err)
	}
}

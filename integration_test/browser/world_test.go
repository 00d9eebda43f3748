package browser_test

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/ratelimit"
)

// A service on the evening of a flood of sign-ups. What its limits hold is made by real calls. The counts of the last day are made
// up, and written by the function that a recorder calls.
var (
	signUps     = ratelimit.TokenBucket("signUps", 100, time.Hour)
	logins      = ratelimit.TokenBucket("failedLogins", 5, 15*time.Minute)
	messages    = ratelimit.TokenBucket("sendMessage", 10, time.Minute, ratelimit.Capacity(20))
	crawls      = ratelimit.FixedWindow("crawl", 1000, 24*time.Hour, ratelimit.Varies(24*time.Hour))
	exports     = ratelimit.FixedWindow("exportReport", 20, 24*time.Hour)
	llm         = ratelimit.TokenBucket("llmTokens", 40000, time.Minute, ratelimit.MaxReserved(120000))
	definitions = `[
		{"name": "signUps", "kind": "token bucket", "rate": 100, "period": "1 hour"},
		{"name": "failedLogins", "kind": "token bucket", "rate": 5, "period": "15 minutes"},
		{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1 minute", "capacity": 20},
		{"name": "sendMessage.pro", "kind": "token bucket", "rate": 120, "period": "1 minute"},
		{"name": "crawl", "kind": "fixed window", "rate": 1000, "period": "24 hours", "varies": "24 hours"},
		{"name": "exportReport", "kind": "fixed window", "rate": 20, "period": "24 hours"},
		{"name": "llmTokens", "kind": "token bucket", "rate": 40000, "period": "1 minute", "max_reserved": 120000},
		{"name": "search", "kind": "token bucket", "rate": 30, "period": "1 second", "capacity": 120},
		{"name": "passwordReset", "kind": "token bucket", "rate": 3, "period": "1 hour"},
		{"name": "invoices", "kind": "calendar window", "rate": 500, "period": "1 month", "zone": "Europe/Berlin", "anchor": "2026-01-01"},
		{"name": "webhooks", "kind": "token bucket", "rate": 50, "period": "1 second", "shards": 8},
		{"name": "upload", "kind": "fixed window", "rate": 200, "period": "1 hour"},
		{"name": "wholeSite", "kind": "token bucket", "rate": 2000, "period": "1 second"}]`
)

func execute(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// drain takes all that a key has.
func drain(t *testing.T, pool *pgxpool.Pool, limit ratelimit.Limit, key string, leave float64) {
	t.Helper()
	limiter := new(ratelimit.Limiter)
	balances, err := limiter.Balance(t.Context(), pool, limit.Key(key))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Consume(t.Context(), pool, limit.Key(key).Count(math.Floor(balances[0].Remaining-leave))); err != nil && !errors.Is(err, ratelimit.ErrDenied) {
		t.Fatal(err)
	}
}

// newWorld makes the service.
func newWorld(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := newPool(t)
	execute(t, pool, "SELECT ratelimit.publish('api', $1)", definitions)
	execute(t, pool, `SELECT ratelimit.publish('worker', '[{"name": "llmTokens", "kind": "token bucket", "rate": 40000, "period": "1 minute", "max_reserved": 120000}]')`)

	r := rand.New(rand.NewPCG(1, 2))
	now := time.Now().UTC().Truncate(time.Minute)
	var names []string
	var minutes []time.Time
	var granted, denied []int64
	var tokens []float64
	const day = 24 * 60
	levels := map[string]float64{"signUps": 1.3, "failedLogins": 0.4, "sendMessage": 60, "exportReport": 0.5, "llmTokens": 9, "search": 140, "passwordReset": 0.2, "invoices": 2, "webhooks": 45, "upload": 6, "wholeSite": 260}
	for _, name := range slices.Sorted(maps.Keys(levels)) { // in one order, so that pictures differ in their times alone
		level := levels[name]
		for minute := range day {
			ago := day - 1 - minute
			at := now.Add(time.Duration(-ago) * time.Minute)
			wave := 1 + 0.6*math.Sin(float64(at.Hour()*60+at.Minute())/1440*2*math.Pi-2)
			mean := level * wave
			n := max(0, int64(mean+math.Sqrt(mean)*r.NormFloat64()+0.5))
			var no int64
			switch {
			case name == "signUps" && ago < 48: // the flood, which rises
				no = int64(float64(48-ago)*1.1 + 6*r.Float64())
				n = int64(2 + r.IntN(2))
			case name == "sendMessage":
				no = int64(max(0, 2*r.NormFloat64()))
			case name == "failedLogins" && ago%211 < 9:
				no = int64(r.IntN(12))
			case name == "llmTokens" && ago%97 < 14:
				no = int64(r.IntN(5))
			}
			if n+no == 0 {
				continue
			}
			cost := 1.0
			if name == "llmTokens" {
				cost = 2300
			}
			names, minutes, granted, denied, tokens = append(names, name), append(minutes, at), append(granted, n), append(denied, no), append(tokens, cost*float64(n))
		}
	}
	execute(t, pool, `INSERT INTO ratelimit.usage SELECT u.name, u.minute, u.granted, u.denied, 0, u.tokens, 0, 0
		FROM unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::bigint[], $5::float8[]) AS u (name, minute, granted, denied, tokens)`, names, minutes, granted, denied, tokens)

	deny := func(name, key string, hoursAgo int, times int64, last time.Time) {
		execute(t, pool, "INSERT INTO ratelimit.denials VALUES ($1, date_trunc('hour', now(), 'UTC') - make_interval(hours => $2), $3, $4::bigint, $4::bigint, $5)", name, hoursAgo, key, times, last)
	}
	for i, key := range []string{"acme", "203.0.113.24", "198.51.100.7", "203.0.113.91", "initech", "192.0.2.144", "globex", "203.0.113.3", "hooli", "192.0.2.18"} {
		deny("signUps", key, 0, int64(612/(i*i+1)+5), now.Add(time.Duration(-i*7)*time.Second))
		drain(t, pool, signUps, key, float64(i)*0.05)
	}
	deny("signUps", "acme", 1, 311, now.Add(-time.Hour))
	deny("signUps", "acme", 26, 12, now.Add(-26*time.Hour))
	for i := range 12 {
		deny("sendMessage", fmt.Sprint("user-", 17+i*31), 0, int64(24-i), now.Add(time.Duration(-i)*time.Minute))
		drain(t, pool, messages, fmt.Sprint("user-", 17+i*31), 1)
	}
	drain(t, pool, logins, "ann@example.org", 0.2)
	drain(t, pool, exports, "acme", 6)
	drain(t, pool, crawls.With(ratelimit.Rate(50)), "acme", 0)
	drain(t, pool, llm, "acme", 12000)
	execute(t, pool, "SELECT ratelimit.block('failedLogins', 'mallory@example.org', now() + interval '9 hours', 'password guessing', 'bea')")
	execute(t, pool, "SELECT ratelimit.override('llmTokens', 'acme', rate => 90000, until => now() + interval '6 days', reason => 'their launch week, ticket 4711', who => 'ann')")
	execute(t, pool, "SELECT ratelimit.override('signUps', 'initech', rate => 500, until => now() + interval '1 second', reason => 'their conference', who => 'bea')")
	execute(t, pool, "UPDATE ratelimit.overrides SET made_at = now() - interval '5 hours', until = now() - interval '3 hours' WHERE name = 'signUps'")
	execute(t, pool, "ANALYZE")
	return pool
}

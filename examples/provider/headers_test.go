package main

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestHeaders reads answers as providers document or send them.
func TestHeaders(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	epoch := func(d time.Duration) string { return strconv.FormatInt(noon.Add(d).Unix(), 10) }
	const none = -1 // it does not say
	for _, test := range []struct {
		of, answer string // Name: value; one a line
		wait       time.Duration
		left       float64
	}{
		{"OpenAI", "x-ratelimit-remaining-requests: 0\nx-ratelimit-reset-requests: 1m30s\nx-ratelimit-remaining-tokens: 149984\nx-ratelimit-reset-tokens: 6m0s", 90 * time.Second, 0},
		{"OpenAI, out of tokens", "x-ratelimit-remaining-requests: 59\nx-ratelimit-reset-requests: 1s\nx-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 6m0s", 6 * time.Minute, 0},
		{"OpenAI, out of both", "x-ratelimit-remaining-requests: 0\nx-ratelimit-reset-requests: 8.64s\nx-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 120ms", 8640 * time.Millisecond, 0},
		{"OpenAI, too few tokens for this request", "x-ratelimit-remaining-requests: 59\nx-ratelimit-reset-requests: 1s\nx-ratelimit-remaining-tokens: 300\nx-ratelimit-reset-tokens: 6m0s", 6 * time.Minute, 59},
		{"OpenAI, tokens of a project", "x-ratelimit-remaining-project-tokens: 0\nx-ratelimit-reset-project-tokens: 1m\nx-ratelimit-remaining-requests: 5", time.Minute, 0},
		{"less than a second", "x-ratelimit-reset-requests: 120ms", 120 * time.Millisecond, none},
		{"Azure OpenAI", "retry-after: 21\nretry-after-ms: 20714\nx-ratelimit-remaining-requests: 0", 20714 * time.Millisecond, 0},
		{"Azure Cosmos DB", "x-ms-retry-after-ms: 250", 250 * time.Millisecond, none},
		{"Groq", "x-ratelimit-remaining-requests: 14370\nx-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-requests: 2m59.56s\nx-ratelimit-reset-tokens: 7.66s", 7660 * time.Millisecond, 0},
		{"days in a duration", "x-ratelimit-reset-requests: 1d2h3m", 26*time.Hour + 3*time.Minute, none},
		{"bare seconds of a budget", "x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 12.5", 12500 * time.Millisecond, 0},
		{"Anthropic", "anthropic-ratelimit-requests-remaining: 3\nanthropic-ratelimit-requests-reset: 2026-11-27T12:01:00Z", time.Minute, 3},
		{"Anthropic, out of input tokens", "anthropic-ratelimit-requests-remaining: 3\nanthropic-ratelimit-requests-reset: 2026-11-27T12:00:01Z\n" +
			"anthropic-ratelimit-input-tokens-remaining: 0\nanthropic-ratelimit-input-tokens-reset: 2026-11-27T12:00:42Z\n" +
			"anthropic-ratelimit-output-tokens-remaining: 8000\nanthropic-ratelimit-output-tokens-reset: 2026-11-27T12:05:00Z", 42 * time.Second, 0},
		{"Anthropic, 429", "retry-after: 12\nanthropic-ratelimit-requests-reset: 2026-11-27T12:01:00Z", 12 * time.Second, none},
		{"GitHub", "x-ratelimit-limit: 5000\nx-ratelimit-remaining: 0\nx-ratelimit-used: 5000\nx-ratelimit-reset: " + epoch(time.Hour), time.Hour, 0},
		{"GitHub, another clock", "Date: " + noon.Add(-time.Minute).Format(http.TimeFormat) + "\nx-ratelimit-reset: " + epoch(time.Minute), 2 * time.Minute, none},
		{"another clock, a duration", "Date: " + noon.Add(-time.Minute).Format(http.TimeFormat) + "\nRetry-After: 30", 30 * time.Second, none},
		{"X", "x-rate-limit-remaining: 0\nx-rate-limit-reset: " + epoch(15*time.Minute), 15 * time.Minute, 0},
		{"milliseconds", "x-ratelimit-reset: " + epoch(time.Hour) + "000", time.Hour, none},
		{"Discord", "X-RateLimit-Remaining: 0\nX-RateLimit-Reset: " + epoch(time.Second) + ".250\nX-RateLimit-Reset-After: 1.25", 1250 * time.Millisecond, 0},
		{"Reddit", "x-ratelimit-remaining: 0.0\nx-ratelimit-reset: 214", 214 * time.Second, 0},
		{"Stripe, Slack", "Retry-After: 30", 30 * time.Second, none},
		{"Shopify", "Retry-After: 2.0\nX-Shopify-Shop-Api-Call-Limit: 40/40", 2 * time.Second, 0},
		{"Shopify, some left", "X-Shopify-Shop-Api-Call-Limit: 32/40", none, 8},
		{"HubSpot", "X-HubSpot-RateLimit-Remaining: 19\nX-HubSpot-RateLimit-Daily-Remaining: 0", none, 0},
		{"Kong", "X-RateLimit-Remaining-Minute: 0\nRateLimit-Remaining: 0\nRateLimit-Reset: 37", 37 * time.Second, 0},
		{"lemlist", "X-RateLimit-Remaining: 0\nX-RateLimit-Reset: Fri Nov 27 2026 13:00:02 GMT+0100 (Central European Standard Time)", 2 * time.Second, 0},
		{"a date without a zone", "X-RateLimit-Reset: 2026-11-27 12:00:30", 30 * time.Second, none},
		{"RFC 9110, a date", "Retry-After: " + noon.Add(3*time.Minute).Format(http.TimeFormat), 3 * time.Minute, none},
		{"the IETF's draft", `RateLimit: "default";r=0;t=30`, 30 * time.Second, 0},
		{"the draft, several policies", `RateLimit: "burst, 1 s";r=5;t=900, "day";r=0;t=30, "unknown";t=7000`, 30 * time.Second, 0},
		{"the draft, no name", "RateLimit: limit=10, remaining=0, reset=4", 4 * time.Second, 0},
		{"an older draft", "RateLimit-Limit: 10, 10;w=1\nRateLimit-Remaining: 0\nRateLimit-Reset: 7", 7 * time.Second, 0},
		{"a year of seconds", "Retry-After: 31536000", longest, none},
		{"a date in a year", "Retry-After: " + noon.AddDate(1, 0, 0).Format(http.TimeFormat), longest, none},
		{"an epoch in a year", "x-ratelimit-remaining: 0\nx-ratelimit-reset: " + epoch(365*24*time.Hour), longest, 0},
		{"at once", "Retry-After: 0", 0, none},
		{"it is over", "x-ratelimit-remaining: 0\nx-ratelimit-reset: " + epoch(-time.Hour), 0, 0},
		{"nobody", "Retry-After: soon\nX-Ratelimit-Reset: -1\nX-Ratelimit-Remaining: many\nRateLimit-Policy: \"day\";q=1;w=9", none, none},
		{"nothing", "Content-Type: text/html", none, none},
	} {
		h := http.Header{}
		for line := range strings.Lines(test.answer) {
			name, value, _ := strings.Cut(line, ":")
			h.Add(name, strings.TrimSpace(value))
		}
		for range 20 { // in any order of the headers
			wait, told := retryAfter(h, noon)
			n, some := left(h)
			if told != (test.wait >= 0) || told && wait != test.wait || some != (test.left >= 0) || some && n != test.left {
				t.Errorf("%s: for %v, %v; %v left, %v; want %v and %v", test.of, wait, told, n, some, test.wait, test.left)
				break
			}
		}
	}
}

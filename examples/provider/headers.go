package main

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// until reads from when on a provider answers again. It knows, in this order:
//
//	Retry-After: 30                              seconds (RFC 9110): OpenAI, Anthropic, GitHub, Slack, Stripe
//	Retry-After: Fri, 27 Nov 2026 23:00:00 GMT   a date (RFC 9110)
//	retry-after-ms: 30000                        OpenAI, Azure
//	x-ratelimit-reset-requests: 1m30s            a duration: OpenAI
//	anthropic-ratelimit-requests-reset: 2026-..  an instant: Anthropic
//	x-ratelimit-reset: 1795820400                an epoch in seconds: GitHub, or in milliseconds
//	x-ratelimit-reset: 30                        seconds: GitLab's older versions, Reddit
//	ratelimit: "default";r=0;t=30                seconds: the IETF's draft, with or without the name
//
// An instant of the provider is by the provider's clock. Its Date header says how far that is from ours.
func until(h http.Header, now time.Time) (at time.Time, told bool) {
	skew := time.Duration(0)
	if date, err := http.ParseTime(h.Get("Date")); err == nil {
		if d := now.Sub(date); d > 2*time.Second || d < -2*time.Second { // the header has whole seconds, and was on its way
			skew = d
		}
	}
	for _, read := range []struct {
		header string
		as     func(text string, now time.Time) (time.Time, bool)
	}{
		{"Retry-After-Ms", milliseconds},
		{"Retry-After", secondsOrDate},
		{"X-Ratelimit-Reset-Requests", duration},
		{"Anthropic-Ratelimit-Requests-Reset", instant},
		{"X-Ratelimit-Reset", secondsOrEpoch},
		{"Ratelimit-Reset", secondsOrEpoch},
		{"Ratelimit", draft},
	} {
		if text := strings.TrimSpace(h.Get(read.header)); text != "" {
			if at, told = read.as(text, now.Add(-skew)); told {
				return at.Add(skew), true
			}
		}
	}
	return time.Time{}, false
}

// left reads how many calls a provider says are left.
func left(h http.Header) (n float64, told bool) {
	for _, header := range []string{"X-Ratelimit-Remaining-Requests", "Anthropic-Ratelimit-Requests-Remaining", "X-Ratelimit-Remaining", "Ratelimit-Remaining"} {
		if n, err := strconv.ParseFloat(h.Get(header), 64); err == nil && n >= 0 && n < 1e15 {
			return n, true
		}
	}
	return 0, false
}

// later is now and so many seconds.
func later(now time.Time, seconds float64) (time.Time, bool) {
	if !(seconds >= 0 && seconds <= 31*24*3600) {
		return time.Time{}, false
	}
	return now.Add(time.Duration(seconds * float64(time.Second))), true
}

func milliseconds(text string, now time.Time) (time.Time, bool) {
	n, err := strconv.ParseFloat(text, 64)
	at, ok := later(now, n/1000)
	return at, ok && err == nil
}

func secondsOrDate(text string, now time.Time) (time.Time, bool) {
	if date, err := http.ParseTime(text); err == nil {
		return date, true
	}
	n, err := strconv.ParseFloat(text, 64)
	at, ok := later(now, n)
	return at, ok && err == nil
}

func duration(text string, now time.Time) (time.Time, bool) {
	d, err := time.ParseDuration(text)
	at, ok := later(now, d.Seconds())
	return at, ok && err == nil
}

func instant(text string, _ time.Time) (time.Time, bool) {
	at, err := time.Parse(time.RFC3339, text)
	return at, err == nil
}

// secondsOrEpoch tells seconds from an epoch by their size: no pause lasts thirty years.
func secondsOrEpoch(text string, now time.Time) (time.Time, bool) {
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case err != nil || !(n >= 0 && n < 1e14):
		return time.Time{}, false
	case n > 1e12: // milliseconds
		return time.UnixMilli(int64(n)), true
	case n > 1e9:
		return time.Unix(int64(n), 0), true
	}
	return later(now, n)
}

// draft reads t of the IETF's RateLimit field.
func draft(text string, now time.Time) (time.Time, bool) {
	for _, part := range strings.FieldsFunc(text, func(r rune) bool { return r == ';' || r == ',' || r == ' ' }) {
		if t, found := strings.CutPrefix(part, "t="); found {
			n, err := strconv.ParseFloat(t, 64)
			at, ok := later(now, n)
			return at, ok && err == nil
		}
	}
	return time.Time{}, false
}

// header is an answer of a provider, and what it says.
type header struct {
	of     string
	answer http.Header
	waits  time.Duration // below zero: it does not say
	left   float64       // below zero: it does not say
}

// noon is when the headers were read.
var noon = time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)

// headers are answers as the providers' documentation has them.
var headers = []header{
	{of: "OpenAI", answer: http.Header{
		"X-Ratelimit-Remaining-Requests": {"0"}, "X-Ratelimit-Reset-Requests": {"1m30s"}, "X-Ratelimit-Reset-Tokens": {"6m0s"},
	}, waits: 90 * time.Second},
	{of: "OpenAI, less than a second", answer: http.Header{"X-Ratelimit-Reset-Requests": {"120ms"}}, waits: 120 * time.Millisecond, left: -1},
	{of: "Azure OpenAI", answer: http.Header{"Retry-After": {"21"}, "Retry-After-Ms": {"20714"}}, waits: 20714 * time.Millisecond, left: -1},
	{of: "Anthropic", answer: http.Header{
		"Anthropic-Ratelimit-Requests-Remaining": {"3"}, "Anthropic-Ratelimit-Requests-Reset": {"2026-11-27T12:01:00Z"},
	}, waits: time.Minute, left: 3},
	{of: "Anthropic, 429", answer: http.Header{"Retry-After": {"12"}, "Anthropic-Ratelimit-Requests-Reset": {"2026-11-27T12:01:00Z"}}, waits: 12 * time.Second, left: -1},
	{of: "GitHub", answer: http.Header{"X-Ratelimit-Remaining": {"0"}, "X-Ratelimit-Reset": {strconv.FormatInt(noon.Add(time.Hour).Unix(), 10)}}, waits: time.Hour},
	{of: "GitHub, another clock", answer: http.Header{
		"Date": {noon.Add(-time.Minute).Format(http.TimeFormat)}, "X-Ratelimit-Reset": {strconv.FormatInt(noon.Add(time.Minute).Unix(), 10)},
	}, waits: 2 * time.Minute, left: -1},
	{of: "milliseconds", answer: http.Header{"X-Ratelimit-Reset": {strconv.FormatInt(noon.Add(time.Hour).UnixMilli(), 10)}}, waits: time.Hour, left: -1},
	{of: "Reddit", answer: http.Header{"X-Ratelimit-Remaining": {"0.0"}, "X-Ratelimit-Reset": {"214"}}, waits: 214 * time.Second},
	{of: "RFC 9110, a date", answer: http.Header{"Retry-After": {noon.Add(3 * time.Minute).Format(http.TimeFormat)}}, waits: 3 * time.Minute, left: -1},
	{of: "the IETF's draft", answer: http.Header{"Ratelimit": {`"default";r=0;t=30`}}, waits: 30 * time.Second, left: -1},
	{of: "an older draft", answer: http.Header{"Ratelimit-Remaining": {"0"}, "Ratelimit-Reset": {"7"}}, waits: 7 * time.Second},
	{of: "nobody", answer: http.Header{"Retry-After": {"soon"}, "X-Ratelimit-Reset": {"-1"}, "X-Ratelimit-Remaining": {"many"}}, waits: -1, left: -1},
}

// test reads a header, and wants what it says.
func (h header) test() error {
	at, told := until(h.answer, noon)
	n, some := left(h.answer)
	if told != (h.waits >= 0) || told && !at.Equal(noon.Add(h.waits)) || some != (h.left >= 0) || some && n != h.left {
		return fmt.Errorf("%s: %w: until %v, %v; %v left, %v", h.of, errHeaders, at, told, n, some)
	}
	return nil
}

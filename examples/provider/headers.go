package main

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// longest is how long a pause may be. Ask the provider again after it.
const longest = 31 * 24 * time.Hour

// budget is what a provider says of one of its limits: requests, tokens, a day. An answer may have several.
type budget struct {
	left      float64
	until     time.Time // when it has more, or is full again
	saysLeft  bool
	saysUntil bool
}

// retryAfter reads how long it takes until a provider answers again: from Retry-After, else from the budgets, of which
// it takes the one that is back last. Those that have something left do not count, unless all have. It is 0 to the
// longest pause.
//
//	retry-after-ms: 30000                            milliseconds: OpenAI, Azure
//	Retry-After: 30                                  seconds, also 2.0, or a date (RFC 9110): most
//	x-ratelimit-reset-tokens: 6m0s                   a budget by name, a duration: OpenAI, Groq
//	anthropic-ratelimit-input-tokens-reset: 2026-..  a budget by name, an instant: Anthropic
//	x-ratelimit-reset: 1795820400                    an epoch in seconds, also with a fraction, or in milliseconds: GitHub, Discord
//	x-ratelimit-reset: 30                            seconds: Reddit, older drafts of the IETF
//	ratelimit: "burst";r=0;t=30, "day";r=99;t=9000   seconds by budget: the IETF's draft
//
// An instant of the provider is by the provider's clock. Its Date header says how far that is from ours.
func retryAfter(h http.Header, now time.Time) (wait time.Duration, told bool) {
	var at time.Time
	theirs := now
	if date, err := http.ParseTime(h.Get("Date")); err == nil {
		if d := now.Sub(date); d > 2*time.Second || d < -2*time.Second { // the header has whole seconds, and was on its way
			theirs = date
		}
	}
	for _, name := range []string{"Retry-After-Ms", "X-Ms-Retry-After-Ms"} {
		if ms, ok := number(h.Get(name)); ok && !told {
			at, told = after(theirs, ms/1000), true
		}
	}
	if !told {
		at, told = instant(h.Get("Retry-After"), theirs)
	}
	if !told {
		all := budgets(h, theirs)
		for _, b := range all {
			if b.saysUntil && (!told || b.until.After(at)) && (!isEmpty(all) || b.saysLeft && b.left == 0) {
				at, told = b.until, true
			}
		}
	}
	if !told {
		return 0, false
	}
	return min(max(at.Sub(theirs), 0), longest).Truncate(time.Millisecond), true // a Pause of less is refused
}

// left reads how many calls a provider says are left. None is, if any budget is empty.
func left(h http.Header) (n float64, told bool) {
	all := budgets(h, time.Time{})
	if isEmpty(all) {
		return 0, true
	}
	for name, b := range all {
		if b.saysLeft && !strings.Contains(name, "token") && (!told || b.left < n) {
			n, told = b.left, true
		}
	}
	return n, told
}

func isEmpty(all map[string]budget) bool {
	for _, b := range all {
		if b.saysLeft && b.left == 0 {
			return true
		}
	}
	return false
}

// budgets reads what an answer says of each budget.
func budgets(h http.Header, now time.Time) map[string]budget {
	all := map[string]budget{}
	read := func(name, field, text string) {
		b := all[name]
		switch field {
		case "remaining", "r":
			if n, ok := number(text); ok && (!b.saysLeft || n < b.left) {
				b.left, b.saysLeft = n, true
			}
		case "reset", "t":
			if at, ok := instant(text, now); ok && at.After(b.until) {
				b.until, b.saysUntil = at, true
			}
		}
		if b != (budget{}) {
			all[name] = b
		}
	}
	for header, values := range h {
		text := strings.Join(values, ",")
		header = strings.ReplaceAll(strings.ToLower(header), "rate-limit", "ratelimit")
		_, name, found := strings.Cut(header, "ratelimit")
		switch {
		case header == "x-shopify-shop-api-call-limit": // 32/40
			used, most, _ := strings.Cut(text, "/")
			if u, ok := number(used); ok {
				if m, ok := number(most); ok {
					read("", "remaining", strconv.FormatFloat(max(m-u, 0), 'f', -1, 64))
				}
			}
		case found && name == "":
			policies(text, read)
		case found: // x-ratelimit-remaining-tokens, anthropic-ratelimit-tokens-remaining, x-ratelimit-reset-after
			name = strings.TrimSuffix("-"+strings.Trim(name, "-")+"-", "after-")
			for _, field := range []string{"remaining", "reset"} {
				if strings.Contains(name, "-"+field+"-") {
					read(strings.Trim(strings.Replace(name, "-"+field+"-", "-", 1), "-"), field, text)
				}
			}
		}
	}
	return all
}

// policies reads the IETF's RateLimit field: policies with parameters, or, in older drafts, limit=10, remaining=0, reset=7.
func policies(text string, read func(name, field, text string)) {
	name, quoted := "", false
	for _, part := range strings.FieldsFunc(text, func(r rune) bool {
		quoted = quoted != (r == '"')
		return !quoted && (r == ',' || r == ';' || r == ' ')
	}) {
		if field, value, is := strings.Cut(part, "="); is {
			read(name, field, value)
		} else {
			name = part
		}
	}
}

// number is a number from 0 on.
func number(text string) (n float64, ok bool) {
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	return n, err == nil && n >= 0 && n < 1e15
}

// after is so many seconds later, or the longest pause.
func after(now time.Time, seconds float64) time.Time {
	return now.Add(time.Duration(min(seconds, longest.Seconds()) * float64(time.Second)))
}

// instant reads a number, a duration or a date. A number is seconds or an epoch, by its size: no pause lasts thirty years.
func instant(text string, now time.Time) (at time.Time, ok bool) {
	text = strings.TrimSpace(text)
	if n, ok := number(text); ok {
		switch {
		case n > 1e11: // milliseconds
			return time.UnixMicro(int64(n * 1e3)), true
		case n > 1e9:
			return time.UnixMicro(int64(n * 1e6)), true
		}
		return after(now, n), true
	}
	days, rest, hasDays := strings.Cut(text, "d")
	if n, ok := number(days); ok && hasDays { // 1d2h
		at, ok = after(now, n*24*3600), true
		if text = rest; text == "" {
			return at, ok
		}
		now = at
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return after(now, d.Seconds()), true
	}
	if at, err := http.ParseTime(text); err == nil {
		return at, true
	}
	text, _, _ = strings.Cut(text, " (") // of a date as JavaScript writes it: ... GMT+0100 (Central European Standard Time)
	for _, layout := range []string{time.RFC3339, time.DateTime, "Mon Jan 02 2006 15:04:05 GMT-0700"} {
		if at, err := time.Parse(layout, text); err == nil {
			return at, true
		}
	}
	return time.Time{}, false
}

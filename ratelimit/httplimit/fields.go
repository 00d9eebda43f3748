package httplimit

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/internal/outcome"
	"github.com/txlimit/txlimit/ratelimit"
)

// All names of draft-ietf-httpapi-ratelimit-headers-10 are here, since the draft still changes.
const (
	fieldPolicy = "RateLimit-Policy"
	fieldLimit  = "RateLimit"
	fieldRetry  = "Retry-After"                   // RFC 9110
	fieldExpose = "Access-Control-Expose-Headers" // the Fetch standard

	paramQuota     = "q"
	paramWindow    = "w"
	paramRemaining = "r"
	paramReset     = "t"
	paramPartition = "pk"

	quotaExceededType  = "https://iana.org/assignments/http-problem-types#quota-exceeded"
	quotaExceededTitle = "Request cannot be satisfied as assigned quota has been exceeded"
)

// Older fields: of the draft up to version 06, and of the "X-" convention before it.
const (
	legacyLimit     = "RateLimit-Limit"
	legacyRemaining = "RateLimit-Remaining"
	legacyReset     = "RateLimit-Reset"
	legacyPrefix    = "X-"
)

// announce sets the header fields of a decision.
func (m Middleware) announce(header http.Header, d Decision) {
	if !d.Passed && !d.Result.At.IsZero() {
		for _, field := range []string{fieldLimit, legacyLimit, legacyRemaining, legacyReset} {
			header.Del(field) // of middleware around this one, whose t may be later than Retry-After
			header.Del(legacyPrefix + field)
		}
	}
	m.setFields(header, d.Result)
}

// setFields adds the policy of each limit that was asked and, if known, its remaining tokens. It adds to existing fields:
// several lines are one list, and middleware may be nested. An unlimited limit has no policy, and a hidden one is left out.
func (m Middleware) setFields(header http.Header, result ratelimit.Result) {
	var policies, limits []string
	var asked []ratelimit.Status
	limited := false
	for _, s := range result.Requests {
		if s.Limit.Validate() != nil || math.IsInf(s.Limit.Capacity(), 1) {
			continue
		}
		if limited = true; m.hides(s.Limit) {
			continue // but Retry-After may be because of it
		}
		pk := m.partition(s)
		policies = append(policies, policyItem(s.Limit)+pk)
		if !result.At.IsZero() && (result.OK || !s.OK || !s.ResetAt.IsZero()) { // else it was not asked, after a denial by a plan or a block
			limits = append(limits, limitItem(result, s)+pk)
			asked = append(asked, s)
		}
	}
	add(header, fieldPolicy, policies)
	add(header, fieldLimit, limits)
	if m.LegacyFields && len(limits) > 0 {
		setLegacyFields(header, result, asked)
	}
	if m.ExposeFields && limited {
		m.expose(header)
	}
}

// expose adds the fields to the list of those that scripts of other origins may read.
func (m Middleware) expose(header http.Header) {
	names := []string{fieldPolicy, fieldLimit, fieldRetry}
	if m.LegacyFields {
		for _, name := range []string{legacyLimit, legacyRemaining, legacyReset} {
			names = append(names, name, legacyPrefix+name)
		}
	}
	list := header.Values(fieldExpose) // by the CORS handler, and by middleware around this one
	var exposed []string
	for name := range strings.SplitSeq(strings.Join(list, ","), ",") {
		exposed = append(exposed, http.CanonicalHeaderKey(strings.Trim(name, " \t")))
	}
	for _, name := range names {
		if !slices.Contains(exposed, http.CanonicalHeaderKey(name)) {
			list = append(list, name)
		}
	}
	header.Set(fieldExpose, strings.Join(list, ", "))
}

// add adds a list to a header field. Requests for the same limit and key are one item.
func add(header http.Header, name string, items []string) {
	var list []string
	for _, item := range items {
		if !slices.Contains(list, item) {
			list = append(list, item)
		}
	}
	if len(list) > 0 {
		header.Add(name, strings.Join(list, ", "))
	}
}

// policyItem is a limit's item of RateLimit-Policy.
func policyItem(limit ratelimit.Limit) string {
	item := fmt.Sprintf("%s;%s=%d", quoted(wireName(limit)), paramQuota, tokens(limit.Capacity()))
	if w, ok := window(limit); ok {
		item += fmt.Sprintf(";%s=%d", paramWindow, w)
	}
	return item
}

// window is the number of seconds in which the capacity refills. It is rounded up, so that q per w is at most the limit's
// rate. A calendar's months count as 31 days, its quarters as 92, its years as 366. The result is not ok if it is under a
// second, or too long for an Integer, or if the rate is 0. Slots are not refilled.
func window(limit ratelimit.Limit) (w int64, ok bool) {
	c := limit.Config()
	if c.Rate == nil || *c.Rate == 0 {
		return 0, false
	}
	periods := limit.Capacity() / *c.Rate
	if c.Kind != "token bucket" {
		periods = max(periods, 1) // it refills at the next window, not before
	}
	period, unit, _ := calendar.ParsePeriod(c.Period)
	if unit != "" {
		const day = 24 * time.Hour
		period = map[string]time.Duration{"day": day, "week": 7 * day, "month": 31 * day, "quarter": 92 * day, "year": 366 * day}[unit]
	}
	micros := math.Round(periods * float64(period.Microseconds())) // a quotient of doubles is not exact: 50/3
	seconds := math.Ceil(micros / 1e6)
	return int64(min(seconds, maxInteger)), micros >= 1e6 && seconds <= maxInteger
}

// limitItem is a request's item of RateLimit.
func limitItem(result ratelimit.Result, s ratelimit.Status) string {
	item := fmt.Sprintf("%s;%s=%d", quoted(wireName(s.Limit)), paramRemaining, tokens(s.Remaining))
	if t, ok := reset(result, s); ok {
		item += fmt.Sprintf(";%s=%d", paramReset, seconds(t))
	}
	return item
}

// reset is the time until a request has more tokens. In a denial, requests that were not denied have no reset. Neither has a
// limit with a rate of 0, nor slots, which are free when the work of others ends.
func reset(result ratelimit.Result, s ratelimit.Status) (t time.Duration, ok bool) {
	at, known := s.ResetAt, result.OK
	if !s.OK {
		at, known = s.RetryAt, !outcome.OfSlots(s.Limit)
	}
	if !known || at.IsZero() {
		return 0, false
	}
	return at.Sub(result.At), true
}

// partition is the parameter pk, or empty.
func (m Middleware) partition(s ratelimit.Status) string {
	if len(m.PartitionSecret) == 0 || s.Key == "" {
		return ""
	}
	mac := hmac.New(sha256.New, m.PartitionSecret)
	mac.Write([]byte(s.Limit.Name() + "\x00" + s.Key)) // names contain no NUL
	return fmt.Sprintf(";%s=:%s:", paramPartition, base64.StdEncoding.EncodeToString(mac.Sum(nil)[:12]))
}

// setLegacyFields describes the most restrictive limit that was asked.
func setLegacyFields(header http.Header, result ratelimit.Result, asked []ratelimit.Status) {
	wait := func(s ratelimit.Status) time.Duration {
		t, _ := reset(result, s)
		return t
	}
	tightest := slices.MinFunc(asked, func(a, b ratelimit.Status) int {
		if c := cmp.Compare(wait(b), wait(a)); c != 0 && !result.OK {
			return c
		}
		return cmp.Compare(a.Remaining, b.Remaining)
	})
	values := map[string]int64{legacyLimit: tokens(tightest.Limit.Capacity()), legacyRemaining: tokens(tightest.Remaining)}
	if t, ok := reset(result, tightest); ok || result.OK && !outcome.OfSlots(tightest.Limit) { // else it never has more, nobody knows when, or a hidden limit has denied the request: 0 would say now
		values[legacyReset] = seconds(t)
	}
	if around, err := strconv.ParseInt(header.Get(legacyRemaining), 10, 64); err == nil && result.OK && around < values[legacyRemaining] {
		return // middleware around this one has fewer
	}
	for name, value := range values {
		header.Set(name, strconv.FormatInt(value, 10))
		header.Set(legacyPrefix+name, strconv.FormatInt(value, 10))
	}
}

// retryAfter is the value of Retry-After for a denial: whole seconds, rounded up, at least 1.
func (m Middleware) retryAfter(r *http.Request, result ratelimit.Result) string {
	until := result.RetryAt
	if m.Jitter > 0 {
		var keys []string
		for _, s := range result.Requests {
			if s.Key != "" {
				keys = append(keys, s.Key)
			}
		}
		if len(keys) == 0 { // all clients are denied alike: spread them by address
			keys = append(keys, ClientIP{}.Key(r))
		}
		span := float64(result.RetryAfter) * min(m.Jitter, 0.5)
		until = ratelimit.Jitter(until, time.Duration(span), keys[0], keys[1:]...)
	}
	return strconv.FormatInt(max(seconds(until.Sub(result.At)), 1), 10)
}

// maxInteger is the largest Integer of RFC 9651.
const maxInteger = 999_999_999_999_999

// tokens is a number of tokens as an Integer: rounded down, and 0 for a debt.
func tokens(value float64) int64 {
	return int64(math.Floor(min(max(value, 0), maxInteger)))
}

// seconds is a duration in whole seconds, rounded up, at least 0.
func seconds(d time.Duration) int64 {
	whole := int64(d / time.Second)
	if d%time.Second > 0 {
		whole++
	}
	return max(whole, 0)
}

// wireName is a limit's name in printable ASCII. All other bytes, and "%", are percent-encoded.
func wireName(limit ratelimit.Limit) string {
	var b strings.Builder
	for _, c := range []byte(limit.Name()) {
		if c < ' ' || c > '~' || c == '%' {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

// escape escapes a String as RFC 9651 requires. (A new one for each field was most of a request's allocations.)
var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// quoted is printable ASCII as a String of RFC 9651.
func quoted(s string) string { return `"` + escape.Replace(s) + `"` }

package httplimit

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
)

var noon = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// answered is a result as of noon.
func answered(ok bool, statuses ...ratelimit.Status) ratelimit.Result {
	result := ratelimit.Result{OK: ok, At: noon, Requests: statuses}
	for _, s := range statuses {
		if !ok && s.RetryAt.After(result.RetryAt) {
			result.RetryAt = s.RetryAt
			result.RetryAfter = result.RetryAt.Sub(result.At)
		}
	}
	return result
}

func left(limit ratelimit.Limit, key string, remaining float64, full time.Duration) ratelimit.Status {
	return ratelimit.Status{Limit: limit, Key: key, Count: 1, OK: true, Remaining: remaining, ResetAt: noon.Add(full)}
}

func denial(limit ratelimit.Limit, key string, remaining float64, full, retry time.Duration) ratelimit.Status {
	s := left(limit, key, remaining, full)
	s.OK, s.RetryAt = false, noon.Add(retry)
	return s
}

func TestFields(t *testing.T) {
	burst := ratelimit.TokenBucket("burst", 100, time.Minute)
	daily := ratelimit.FixedWindow("daily", 1000, 24*time.Hour)
	fast := ratelimit.TokenBucket("fast", 5, time.Second-time.Microsecond)
	none := ratelimit.TokenBucket("none", 0, time.Minute)
	byPolicy := ratelimit.Result{At: noon, RetryAfter: math.MaxInt64 / 2, Requests: []ratelimit.Status{
		{Limit: none, Key: "ann", Count: 1}, {Limit: burst, Key: "ann", Count: 1, OK: true},
		{Limit: ratelimit.Unlimited("open"), Key: "ann", Count: 1, OK: true, Remaining: math.Inf(1), ResetAt: noon},
	}}
	for _, row := range []struct {
		name, policy, limit string
		result              ratelimit.Result
	}{
		{"the example of the draft", `"burst";q=100;w=60`, `"burst";r=50;t=30`, answered(true, left(burst, "ann", 50, 30*time.Second))},
		{"several", `"burst";q=100;w=60, "daily";q=1000;w=86400`, `"burst";r=99;t=1, "daily";r=7;t=3601`,
			answered(true, left(burst, "ann", 99.9, 60*time.Millisecond), left(daily, "", 7, time.Hour+time.Microsecond))},
		{"a full one", `"burst";q=100;w=60`, `"burst";r=100;t=0`, answered(true, left(burst, "ann", 100, 0))},
		{"under a second has no window", `"fast";q=5`, `"fast";r=4;t=1`, answered(true, left(fast, "ann", 4, time.Microsecond))},
		{"a window is rounded up", `"w";q=5;w=2`, `"w";r=5;t=0`,
			answered(true, left(ratelimit.TokenBucket("w", 5, time.Second+time.Microsecond), "ann", 5, 0))},
		{"what is owed is nothing", `"burst";q=100;w=60`, `"burst";r=0;t=120`, answered(true, left(burst, "ann", -99.5, 2*time.Minute))},
		{"just below 1", `"burst";q=100;w=60`, `"burst";r=0;t=60`, answered(true, left(burst, "ann", 1-1e-15, time.Minute))},
		{"a refill that is not the capacity", `"b";q=6;w=6`, `"b";r=5;t=1`,
			answered(true, left(ratelimit.TokenBucket("b", 3600, time.Hour, ratelimit.Capacity(6)), "ann", 5, time.Second))},
		{"a quotient that doubles do not hold", `"b";q=50;w=1000`, `"b";r=49;t=20`,
			answered(true, left(ratelimit.TokenBucket("b", 3, time.Minute, ratelimit.Capacity(50)), "ann", 49, 20*time.Second))},
		{"a capacity above the rate", `"b";q=10;w=18000`, `"b";r=9;t=1800`,
			answered(true, left(ratelimit.TokenBucket("b", 2, time.Hour, ratelimit.Capacity(10)), "ann", 9, 30*time.Minute))},
		{"a window of less than a second, and a capacity of many", `"b";q=1000;w=20`, `"b";r=999;t=1`,
			answered(true, left(ratelimit.TokenBucket("b", 5, 100*time.Millisecond, ratelimit.Capacity(1000)), "ann", 999, 20*time.Millisecond))},
		{"a capacity that refills in under a second", `"b";q=10`, `"b";r=9;t=1`,
			answered(true, left(ratelimit.TokenBucket("b", 6000, time.Minute, ratelimit.Capacity(10)), "ann", 9, 10*time.Millisecond))},
		{"nothing is saved up", `"b";q=0`, `"b";r=0;t=0`,
			answered(true, left(ratelimit.TokenBucket("b", 10, time.Minute, ratelimit.Capacity(0)), "ann", 0, 0))},
		{"a fixed window that saves up", `"w";q=25;w=150`, `"w";r=24;t=60`,
			answered(true, left(ratelimit.FixedWindow("w", 10, time.Minute, ratelimit.Capacity(25)), "ann", 24, time.Minute))},
		{"a fixed window that holds less than its rate refills no sooner", `"w";q=6;w=3600`, `"w";r=5;t=3600`,
			answered(true, left(ratelimit.FixedWindow("w", 3600, time.Hour, ratelimit.Capacity(6)), "ann", 5, time.Hour))},
		{"longer than can be said", `"b";q=999999999999999`, `"b";r=0;t=1`,
			answered(true, left(ratelimit.TokenBucket("b", 1e-15, time.Hour, ratelimit.Capacity(1e15)), "ann", 0, time.Second))},
		{"fractions of a token", `"f";q=0;w=1`, `"f";r=0;t=1`, answered(true, left(ratelimit.TokenBucket("f", 0.5, time.Second), "ann", 0.5, time.Second))},
		{"the largest numbers", `"l";q=999999999999999;w=9223372037`, `"l";r=999999999999999;t=9223372037`,
			answered(true, left(ratelimit.TokenBucket("l", 1e15, math.MaxInt64-math.MaxInt64%1000), "ann", 1e15, math.MaxInt64))},
		{"a denial waits for what is asked, not until it is full", `"burst";q=100;w=60`, `"burst";r=0;t=1`,
			answered(false, denial(burst, "ann", 0, time.Minute, 600*time.Millisecond))},
		{"in a denial, only those who deny have a t", `"burst";q=100;w=60, "daily";q=1000;w=86400`, `"burst";r=0;t=1, "daily";r=7`,
			answered(false, denial(burst, "ann", 0, time.Minute, 600*time.Millisecond), left(daily, "", 7, time.Hour))},
		{"asked twice, told once", `"burst";q=100;w=60`, `"burst";r=50;t=30`,
			answered(true, left(burst, "ann", 50, 30*time.Second), left(burst, "ann", 50, 30*time.Second))},
		{"two keys of a limit", `"burst";q=100;w=60`, `"burst";r=50;t=30, "burst";r=40;t=36`,
			answered(true, left(burst, "ann", 50, 30*time.Second), left(burst, "bob", 40, 36*time.Second))},
		{"not known", `"burst";q=100;w=60`, ``, ratelimit.Result{Requests: []ratelimit.Status{{Limit: burst, Key: "ann", Count: 1}}}},
		{"a limit that is none", `"burst";q=100;w=60`, ``, ratelimit.Result{Requests: []ratelimit.Status{
			{Limit: burst}, {Limit: ratelimit.Limit{}}, {Limit: ratelimit.TokenBucket("none", math.NaN(), time.Hour)}}}},
		{"nothing asked", ``, ``, ratelimit.Result{}},
		{"an unlimited one", ``, ``, answered(true, left(ratelimit.Unlimited("open"), "ann", math.Inf(1), 0))},
		{"an unlimited one beside another", `"burst";q=100;w=60`, `"burst";r=50;t=30`,
			answered(true, left(ratelimit.Unlimited("open"), "ann", math.Inf(1), 0), left(burst, "ann", 50, 30*time.Second))},
		{"nothing wanted of a rate of 0", `"none";q=0`, `"none";r=0`,
			answered(true, ratelimit.Status{Limit: none, Key: "ann", OK: true})},
		{"a denial by policy, which asks no other limit", `"none";q=0, "burst";q=100;w=60`, `"none";r=0`, byPolicy},
		{"a name with quotes", `"say \"a\\b\"";q=1;w=1`, `"say \"a\\b\"";r=1;t=0`,
			answered(true, left(ratelimit.TokenBucket(`say "a\b"`, 1, time.Second), "ann", 1, 0))},
		{"a name beyond ASCII", `"caf%C3%A9 100%25";q=1;w=1`, `"caf%C3%A9 100%25";r=1;t=0`,
			answered(true, left(ratelimit.TokenBucket("café 100%", 1, time.Second), "ann", 1, 0))},
		{"a name that would be a header field", `"a%0D%0ASet-Cookie: b=c%7F";q=1;w=1`, `"a%0D%0ASet-Cookie: b=c%7F";r=1;t=0`,
			answered(true, left(ratelimit.TokenBucket("a\r\nSet-Cookie: b=c\x7f", 1, time.Second), "ann", 1, 0))},
	} {
		header := http.Header{}
		Middleware{}.setFields(header, row.result)
		if policy, limit := header.Get("RateLimit-Policy"), header.Get("RateLimit"); policy != row.policy || limit != row.limit {
			t.Errorf("%s:\n%s\n%s, want\n%s\n%s", row.name, policy, limit, row.policy, row.limit)
		}
		for name, values := range header {
			if len(values) != 1 || values[0] == "" {
				t.Errorf("%s: %s: %q", row.name, name, values)
			}
		}
	}
}

// The older fields describe a limit that was asked, and none that is unlimited.
func TestLegacyFieldsOfPlansWithoutRows(t *testing.T) {
	none, burst, open := ratelimit.TokenBucket("none", 0, time.Minute), ratelimit.TokenBucket("burst", 100, time.Minute), ratelimit.Unlimited("open")
	unlimited := left(open, "ann", math.Inf(1), 0)
	for name, row := range map[string]struct {
		result ratelimit.Result
		want   [3]string // limit, remaining, reset
	}{
		"unlimited":        {answered(true, unlimited), [3]string{}},
		"beside another":   {answered(true, unlimited, left(burst, "ann", 50, 30*time.Second)), [3]string{"100", "50", "30"}},
		"beside a denial":  {answered(false, unlimited, denial(burst, "ann", 0, time.Minute, time.Second)), [3]string{"100", "0", "1"}},
		"denied by policy": {ratelimit.Result{At: noon, RetryAfter: math.MaxInt64 / 2, Requests: []ratelimit.Status{{Limit: burst, OK: true}, {Limit: none}, unlimited}}, [3]string{"0", "0", ""}},
	} {
		header := http.Header{}
		Middleware{LegacyFields: true}.setFields(header, row.result)
		for i, field := range []string{"Limit", "Remaining", "Reset"} {
			if got := header.Get("X-RateLimit-" + field); got != row.want[i] || header.Get("RateLimit-"+field) != got {
				t.Errorf("%s: %s is %q, want %q", name, field, got, row.want[i])
			}
		}
	}
}

// q per w is the rate that the limit grants in the long run, minus the rounding of q (down) and w (up).
func TestThePolicyStatesTheLimitsRate(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	tokens := func(least, most float64) float64 { // of any magnitude, half of them whole
		n := math.Pow(10, least+r.Float64()*(most-least))
		if whole := math.Round(n); whole > 0 && r.IntN(2) == 0 {
			return whole
		}
		return n
	}
	policy := regexp.MustCompile(`^"limit";q=(\d+)(?:;w=([1-9]\d*))?$`)
	silent := 0
	for range 20_000 {
		rate, period := tokens(-6, 9), time.Duration(tokens(5, 14))*time.Microsecond
		define := ratelimit.TokenBucket
		if r.IntN(2) == 0 {
			define = ratelimit.FixedWindow
		}
		var options []ratelimit.Option
		if r.IntN(4) > 0 {
			options = append(options, ratelimit.Capacity(rate*tokens(-4, 4)))
		}
		limit := define("limit", rate, period, options...)
		if err := limit.Validate(); err != nil {
			continue
		}
		granted := rate / period.Seconds()
		if limit.Config().Kind == "fixed window" {
			granted = min(rate, limit.Capacity()) / period.Seconds()
		}
		m := policy.FindStringSubmatch(policyItem(limit))
		if m == nil {
			t.Fatalf("%v: %s", limit, policyItem(limit))
		}
		const slack = 1e-6 // half a microsecond in a second
		if m[2] == "" {
			silent++
			if exact := limit.Capacity() / granted; exact >= 1+slack && exact <= maxInteger {
				t.Errorf("%v has no w, but %v", limit, exact)
			}
			continue
		}
		q, w := float64(atoi(t, m[1])), float64(atoi(t, m[2]))
		if stated := q / w; stated > granted*(1+slack) || (q+1)/(w-1) < granted*(1-slack) {
			t.Errorf("%v: %s is %v a second, and %v are granted", limit, m[0], stated, granted)
		}
	}
	if silent < 1_000 || silent > 10_000 {
		t.Errorf("%d of 20,000 without w: this tested too little", silent)
	}
}

func TestThePolicyOfACalendar(t *testing.T) {
	for want, limit := range map[string]ratelimit.Limit{
		`"day";q=10;w=86400`:      ratelimit.CalendarWindow("day", 10, ratelimit.Day),
		`"week";q=20;w=1209600`:   ratelimit.CalendarWindow("week", 10, ratelimit.Week, ratelimit.Capacity(20)),
		`"month";q=10;w=2678400`:  ratelimit.CalendarWindow("month", 10, ratelimit.Month),
		`"quarter";q=5;w=7948800`: ratelimit.CalendarWindow("quarter", 10, ratelimit.Quarter, ratelimit.Capacity(5)),
		`"year";q=10;w=31622400`:  ratelimit.CalendarWindow("year", 10, ratelimit.Year),
	} {
		if got := policyItem(limit); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestNestedMiddlewareMakesOneList(t *testing.T) {
	header := http.Header{}
	for _, name := range []string{"site", "user"} {
		Middleware{}.setFields(header, answered(true, left(ratelimit.TokenBucket(name, 10, time.Minute), "ann", 9, 6*time.Second)))
	}
	if got := strings.Join(header.Values("RateLimit"), ", "); got != `"site";r=9;t=6, "user";r=9;t=6` {
		t.Error(got)
	}
	// A denial leaves out RateLimit of those around it, also if its own limit is hidden.
	provider := ratelimit.TokenBucket("provider", 10, time.Minute)
	denied := Middleware{Hidden: []ratelimit.Limit{provider}}
	denied.announce(header, Decision{Status: 429, Result: answered(false, denial(provider, "", 0, time.Minute, time.Second))})
	if header.Get("RateLimit") != "" || len(header.Values("RateLimit-Policy")) != 2 {
		t.Error(header)
	}
}

func TestPartitionKeysTellKeysApartAndNothingElse(t *testing.T) {
	limit, other := ratelimit.TokenBucket("user", 10, time.Minute), ratelimit.TokenBucket("team", 10, time.Minute)
	item := regexp.MustCompile(`^"(user|team)";(q=10;w=60|r=9;t=6);pk=(:[A-Za-z0-9+/]{16}:)$`)
	pks := map[string]string{}
	for _, secret := range []string{"one", "two"} {
		for _, s := range []ratelimit.Status{left(limit, "ann", 9, 6*time.Second), left(limit, "bob", 9, 6*time.Second), left(other, "ann", 9, 6*time.Second)} {
			header := http.Header{}
			Middleware{PartitionSecret: []byte(secret)}.setFields(header, answered(true, s))
			policy, limit := item.FindStringSubmatch(header.Get("RateLimit-Policy")), item.FindStringSubmatch(header.Get("RateLimit"))
			if policy == nil || limit == nil || policy[3] != limit[3] {
				t.Fatalf("%v", header)
			}
			id := secret + s.Limit.Name() + s.Key
			if twin, found := pks[limit[3]]; found {
				t.Errorf("%s and %s have the same pk", id, twin)
			}
			pks[limit[3]] = id
		}
	}
	header := http.Header{}
	Middleware{PartitionSecret: []byte("one")}.setFields(header, answered(true, left(limit, "", 9, 6*time.Second)))
	if got := header.Get("RateLimit"); got != `"user";r=9;t=6` {
		t.Errorf("a limit without keys: %s", got)
	}
	header = http.Header{}
	Middleware{PartitionSecret: []byte("one")}.setFields(header, answered(true, left(limit, "ann", 9, 6*time.Second), left(limit, "bob", 8, 12*time.Second)))
	if got := header.Get("RateLimit-Policy"); strings.Count(got, `"user";q=10;w=60;pk=`) != 2 {
		t.Errorf("two keys of a limit: %s", got)
	}
}

func TestLegacyFieldsTellOfTheTightestLimit(t *testing.T) {
	user, site := ratelimit.TokenBucket("user", 10, time.Minute, ratelimit.Capacity(20)), ratelimit.FixedWindow("site", 1000, time.Hour)
	for _, row := range []struct {
		result ratelimit.Result
		want   string // limit, remaining, reset
	}{
		{answered(true, left(user, "ann", 9.5, 63*time.Second), left(site, "", 500, time.Hour)), "20 9 63"},
		{answered(true, left(user, "ann", 9.5, 63*time.Second), left(site, "", 5, time.Hour)), "1000 5 3600"},
		{answered(false, denial(user, "ann", 0, 2*time.Minute, 6*time.Second), denial(site, "", 0, time.Hour, time.Hour)), "1000 0 3600"},
		{answered(false, denial(user, "ann", 3, 2*time.Minute, 6*time.Second), left(site, "", 1, time.Hour)), "20 3 6"},
		{ratelimit.Result{Requests: []ratelimit.Status{{Limit: user}}}, "  "},
	} {
		for _, prefix := range []string{"", "X-"} {
			header := http.Header{}
			Middleware{LegacyFields: true}.setFields(header, row.result)
			got := header.Get(prefix+"RateLimit-Limit") + " " + header.Get(prefix+"RateLimit-Remaining") + " " + header.Get(prefix+"RateLimit-Reset")
			if got != row.want || header.Get("RateLimit-Policy") == "" {
				t.Errorf("%q, want %q: %v", got, row.want, header)
			}
		}
	}
	// Of nested middleware, they tell of the limit that has fewer tokens.
	for _, nested := range [][2]ratelimit.Status{
		{left(user, "ann", 9, 63*time.Second), left(site, "", 500, time.Hour)}, {left(site, "", 500, time.Hour), left(user, "ann", 9, 63*time.Second)},
	} {
		header := http.Header{}
		for _, status := range nested {
			Middleware{LegacyFields: true}.announce(header, Decision{Passed: true, Result: answered(true, status)})
		}
		if got := header.Get("X-RateLimit-Limit") + " " + header.Get("RateLimit-Remaining") + " " + header.Get("RateLimit-Reset"); got != "20 9 63" {
			t.Errorf("nested: %q", got)
		}
	}
	header := http.Header{}
	Middleware{}.setFields(header, answered(true, left(user, "ann", 9, 63*time.Second)))
	if len(header) != 2 {
		t.Errorf("they are set without being asked for: %v", header)
	}
}

func TestRetryAfterIsWholeSecondsRoundedUpAndAtLeastOne(t *testing.T) {
	limit := ratelimit.TokenBucket("burst", 100, time.Minute)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	for wait, want := range map[time.Duration]string{
		0: "1", time.Microsecond: "1", time.Second: "1", time.Second + time.Microsecond: "2", 90 * time.Minute: "5400", math.MaxInt64: "9223372037",
	} {
		for _, jitter := range []float64{0, -1, math.NaN()} {
			if got := (Middleware{Jitter: jitter}).retryAfter(r, answered(false, denial(limit, "ann", 0, time.Minute, wait))); got != want {
				t.Errorf("%v, jitter %v: %s, want %s", wait, jitter, got, want)
			}
		}
	}
}

func TestJitteredRetryAfterSpreadsKeysAndIsTheSameForTheSame(t *testing.T) {
	user, site := ratelimit.TokenBucket("user", 10, time.Minute), ratelimit.TokenBucket("site", 10, time.Minute)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	for _, row := range []struct {
		jitter, most float64 // seconds
	}{{0.5, 150}, {0.1, 110}, {7, 150}, {math.Inf(1), 150}} {
		m := Middleware{Jitter: row.jitter}
		seen := map[string]map[int]int{"by key": {}, "by address": {}}
		for i := range 4_000 {
			result := answered(false, denial(user, fmt.Sprint("user-", i), 0, time.Minute, 100*time.Second), left(site, "", 5, time.Minute))
			seconds := atoi(t, m.retryAfter(r, result))
			seen["by key"][seconds]++
			if again := atoi(t, m.retryAfter(httptest.NewRequest(http.MethodPut, "/other", nil), result)); again != seconds {
				t.Fatalf("%d, then %d", seconds, again)
			}
			// A limit without keys denies all clients alike: the part depends on the client.
			crowd := httptest.NewRequest(http.MethodGet, "/", nil)
			crowd.RemoteAddr = fmt.Sprintf("10.0.%d.%d:4711", i/256, i%256)
			seen["by address"][atoi(t, m.retryAfter(crowd, answered(false, denial(site, "", 0, time.Minute, 100*time.Second))))]++
		}
		for by, counts := range seen {
			least, most := math.Inf(1), 0.0
			for seconds, n := range counts {
				least, most = min(least, float64(seconds)), max(most, float64(seconds))
				if share := 4_000 / (row.most - 100); float64(n) > 2*share {
					t.Errorf("jitter %v %s: %d of 4,000 come after %d s", row.jitter, by, n, seconds)
				}
			}
			if least < 100 || least > 102 || most > row.most || most < row.most-2 {
				t.Errorf("jitter %v %s: from %v to %v s", row.jitter, by, least, most)
			}
		}
	}
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The part of RFC 9651's grammar that the fields use. Package harness of the integration tests parses them with a library.
var (
	policyList = regexp.MustCompile(`^"((?:[ !#-\[\]-~]|\\["\\])*)";q=(\d{1,15})(;w=[1-9]\d{0,14})?;pk=:[A-Za-z0-9+/]+=*:$`)
	limitList  = regexp.MustCompile(`^"((?:[ !#-\[\]-~]|\\["\\])*)";r=(\d{1,15})(;t=\d{1,15})?;pk=:[A-Za-z0-9+/]+=*:$`)
)

// For every name and balance of a limit, the fields are a list of one item whose name can be read back.
func FuzzFields(f *testing.F) {
	f.Add("burst", "ann", 100.0, 60.0, 50.0, int64(3e10), int64(0))
	f.Add("a\r\nX: y", "\x00", 1e15, 0.1, -1e15, int64(math.MaxInt64), int64(math.MinInt64))
	f.Add(`"\%é`, "", 1e-15, 9e9, 1e15, int64(-1), int64(1))
	f.Fuzz(func(t *testing.T, name, key string, rate, seconds, remaining float64, resetAfter, retryAfter int64) {
		limit := ratelimit.TokenBucket(name, rate, time.Duration(min(max(seconds, 0), 9e9)*1e6)*time.Microsecond)
		if limit.Validate() != nil || math.IsNaN(remaining) {
			return
		}
		for _, ok := range []bool{true, false} {
			s := ratelimit.Status{Limit: limit, Key: cmp.Or(key, "k"), OK: ok, Remaining: remaining,
				ResetAt: noon.Add(time.Duration(resetAfter)), RetryAt: noon.Add(time.Duration(retryAfter))}
			header := http.Header{}
			m := Middleware{PartitionSecret: []byte("secret")}
			m.setFields(header, answered(ok, s))
			policy, item := policyList.FindStringSubmatch(header.Get("RateLimit-Policy")), limitList.FindStringSubmatch(header.Get("RateLimit"))
			if policy == nil || item == nil || policy[1] != item[1] {
				t.Fatalf("%q", header)
			}
			read, err := url.PathUnescape(regexp.MustCompile(`\\(.)`).ReplaceAllString(item[1], "$1"))
			if err != nil || read != name {
				t.Fatalf("%q was sent as %q, which is %q, %v", name, item[1], read, err)
			}
			if r := float64(atoi(t, item[2])); r != math.Floor(min(max(remaining, 0), maxInteger)) {
				t.Fatalf("%v remain, r=%v", remaining, r)
			}
			var wire bytes.Buffer
			if err := header.Write(&wire); err != nil || strings.Count(wire.String(), "\r\n") != 2 {
				t.Fatalf("%q, %v", &wire, err)
			}
			if ok {
				continue
			}
			after, t1 := atoi(t, m.retryAfter(httptest.NewRequest(http.MethodGet, "/", nil), answered(false, s))), atoi(t, strings.TrimPrefix(item[3], ";t="))
			if after < 1 || after < t1 {
				t.Fatalf("Retry-After: %d, t=%d", after, t1)
			}
		}
	})
}

func TestTheNamesInAProblemAreThoseInTheFields(t *testing.T) {
	odd, user := ratelimit.TokenBucket("café \"1\"", 10, time.Minute), ratelimit.TokenBucket("user", 10, time.Minute)
	result := answered(false, denial(odd, "ann", 0, time.Minute, time.Second), denial(odd, "bob", 0, time.Minute, time.Second), left(user, "ann", 1, time.Minute))
	p := Middleware{}.problemOf(Decision{Status: 429, Err: &ratelimit.DeniedError{Requests: result.Requests}})
	if !slices.Equal(p.ViolatedPolicies, []string{`caf%C3%A9 "1"`}) {
		t.Errorf("%q", p.ViolatedPolicies)
	}
}

// A hidden limit is told apart by its name, whatever numbers an override gave it.
func TestNothingTellsOfAHiddenLimit(t *testing.T) {
	site, user := ratelimit.TokenBucket("perSite", 1000, time.Second), ratelimit.TokenBucket("perUser", 10, time.Minute)
	overridden := ratelimit.TokenBucket("perSite", 5, time.Second)
	m := Middleware{Hidden: []ratelimit.Limit{site}, LegacyFields: true, ExposeFields: true, PartitionSecret: []byte("secret")}
	for _, row := range []struct {
		name                  string
		result                ratelimit.Result
		limit, policy         string
		legacy, reset, expose string // X-RateLimit-Remaining and -Reset, and whether fields are exposed
	}{
		{"granted", answered(true, left(overridden, "", 3, time.Second), left(user, "", 7, time.Minute)), `"perUser";r=7;t=60`, `"perUser";q=10;w=60`, "7", "60", "RateLimit"},
		{"denied by the hidden one", answered(false, denial(site, "", 0, time.Minute, time.Second), left(user, "", 7, time.Minute)), `"perUser";r=7`, `"perUser";q=10;w=60`, "7", "", "RateLimit"}, // 0 would say: now
		{"denied by both", answered(false, denial(site, "", 0, time.Minute, time.Second), denial(user, "", 0, time.Minute, 6*time.Second)), `"perUser";r=0;t=6`, `"perUser";q=10;w=60`, "0", "6", "RateLimit"},
		{"alone", answered(false, denial(site, "acme", 0, time.Minute, time.Second)), "", "", "", "", "RateLimit"}, // scripts must read Retry-After
	} {
		d := Decision{Status: 429, Result: row.result, Err: &ratelimit.DeniedError{Requests: row.result.Requests}}
		header := http.Header{}
		m.announce(header, d)
		if header.Get("RateLimit") != row.limit || header.Get("RateLimit-Policy") != row.policy || header.Get("X-RateLimit-Remaining") != row.legacy || header.Get("X-RateLimit-Reset") != row.reset ||
			!strings.Contains(header.Get("Access-Control-Expose-Headers"), row.expose) {
			t.Errorf("%s: %v", row.name, header)
		}
		body, err := json.Marshal(m.problemOf(d))
		if text := fmt.Sprint(header, string(body)); err != nil || strings.Contains(text, "perSite") || strings.Contains(text, "1000") {
			t.Errorf("%s: %s, %v", row.name, text, err)
		}
	}
}

func TestFieldsThatScriptsMayRead(t *testing.T) {
	burst := ratelimit.TokenBucket("burst", 100, time.Minute)
	result := answered(true, left(burst, "ann", 50, 30*time.Second))
	const all = "RateLimit-Policy, RateLimit, Retry-After"
	for _, row := range []struct {
		name   string
		m      Middleware
		before []string // what a CORS handler wrote
		want   []string
	}{
		{"not asked for", Middleware{}, []string{"X-Own"}, []string{"X-Own"}},
		{"nothing was there", Middleware{ExposeFields: true}, nil, []string{all}},
		{"what was there stays", Middleware{ExposeFields: true}, []string{"X-Own,ETag"}, []string{"X-Own,ETag, " + all}},
		{"in two lines", Middleware{ExposeFields: true}, []string{"X-Own", "ETag"}, []string{"X-Own, ETag, " + all}},
		{"all but those with credentials", Middleware{ExposeFields: true}, []string{"*"}, []string{"*, " + all}},
		{"some of them, in other letters", Middleware{ExposeFields: true}, []string{"retry-after ,RATELIMIT"}, []string{"retry-after ,RATELIMIT, RateLimit-Policy"}},
		{"all of them, by middleware around this one", Middleware{ExposeFields: true}, []string{all}, []string{all}},
		{"a name that contains another", Middleware{ExposeFields: true}, []string{"X-RateLimit"}, []string{"X-RateLimit, " + all}},
		{"older ones", Middleware{ExposeFields: true, LegacyFields: true}, nil, []string{all + ", RateLimit-Limit, X-RateLimit-Limit, " +
			"RateLimit-Remaining, X-RateLimit-Remaining, RateLimit-Reset, X-RateLimit-Reset"}},
	} {
		header := http.Header{}
		for _, line := range row.before {
			header.Add("Access-Control-Expose-Headers", line)
		}
		row.m.setFields(header, result)
		if got := header.Values("Access-Control-Expose-Headers"); !slices.Equal(got, row.want) {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
	header := http.Header{}
	Middleware{ExposeFields: true}.setFields(header, ratelimit.Result{})
	if len(header) > 0 {
		t.Errorf("nothing was asked: %v", header)
	}
}

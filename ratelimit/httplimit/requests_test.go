package httplimit_test

import (
	"errors"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/httplimit"
)

// from is a request from an address, with lines of X-Forwarded-For.
func from(remoteAddr string, forwarded ...string) *http.Request {
	return &http.Request{RemoteAddr: remoteAddr, Header: http.Header{"X-Forwarded-For": forwarded}}
}

func TestClientIP(t *testing.T) {
	const proxy = "10.0.0.1:4711"
	for _, row := range []struct {
		name    string
		clients httplimit.ClientIP
		r       *http.Request
		want    string
	}{
		{"no proxy", httplimit.ClientIP{}, from("203.0.113.7:4711"), "203.0.113.7"},
		{"no proxy, but the client writes the field", httplimit.ClientIP{}, from("203.0.113.7:4711", "198.51.100.1"), "203.0.113.7"},
		{"a negative number of proxies", httplimit.ClientIP{TrustedProxies: -1}, from("203.0.113.7:4711", "198.51.100.1"), "203.0.113.7"},
		{"an address without a port, as some middleware sets it", httplimit.ClientIP{}, from("203.0.113.7"), "203.0.113.7"},
		{"a Unix socket", httplimit.ClientIP{}, from("@"), "unknown"},
		{"nothing", httplimit.ClientIP{}, from(""), "unknown"},
		{"a Unix socket behind a proxy", httplimit.ClientIP{TrustedProxies: 1}, from("@", "203.0.113.7"), "203.0.113.7"},

		{"one proxy", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "203.0.113.7"), "203.0.113.7"},
		{"one proxy, and a liar", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "198.51.100.1, 203.0.113.7"), "203.0.113.7"},
		{"one proxy, and a liar's own lines", httplimit.ClientIP{TrustedProxies: 1},
			from(proxy, "198.51.100.1", "198.51.100.2, 198.51.100.3", "203.0.113.7"), "203.0.113.7"},
		{"two proxies", httplimit.ClientIP{TrustedProxies: 2}, from(proxy, "203.0.113.7, 192.0.2.1"), "203.0.113.7"},
		{"two proxies that add a line each", httplimit.ClientIP{TrustedProxies: 2}, from(proxy, "198.51.100.1", "203.0.113.7", "192.0.2.1"), "203.0.113.7"},
		{"two proxies, one of which was passed by", httplimit.ClientIP{TrustedProxies: 2}, from(proxy, "198.51.100.1"), "10.0.0.1"},
		{"a proxy that adds nothing", httplimit.ClientIP{TrustedProxies: 1}, from(proxy), "10.0.0.1"},
		{"a proxy that adds no address", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "198.51.100.1, unknown"), "10.0.0.1"},
		{"an empty entry", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "198.51.100.1,"), "10.0.0.1"},
		{"an empty line", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, ""), "10.0.0.1"},
		{"more proxies than there are", httplimit.ClientIP{TrustedProxies: math.MaxInt}, from(proxy, "198.51.100.1"), "10.0.0.1"},

		{"no spaces", httplimit.ClientIP{TrustedProxies: 2}, from(proxy, "198.51.100.1,203.0.113.7,192.0.2.1"), "203.0.113.7"},
		{"tabs and spaces", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "198.51.100.1,\t 203.0.113.7 \t"), "203.0.113.7"},
		{"an entry with a port", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "203.0.113.7:50000"), "203.0.113.7"},
		{"brackets", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "[2001:db8::1]"), "2001:db8::/64"},
		{"brackets and a port", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "[2001:db8::1]:50000"), "2001:db8::/64"},
		{"half a bracket", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "[2001:db8::1"), "10.0.0.1"},
		{"a port that is none", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "203.0.113.7:99999"), "10.0.0.1"},
		{"an octet that is none", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "203.0.113.256"), "10.0.0.1"},

		{"IPv6", httplimit.ClientIP{}, from("[2001:db8:1:2:3:4:5:6]:4711"), "2001:db8:1:2::/64"},
		{"IPv6, /48", httplimit.ClientIP{IPv6Prefix: 48}, from("[2001:db8:1:2:3:4:5:6]:4711"), "2001:db8:1::/48"},
		{"IPv6, /128", httplimit.ClientIP{IPv6Prefix: 128}, from("[2001:db8:1:2:3:4:5:6]:4711"), "2001:db8:1:2:3:4:5:6/128"},
		{"IPv6, a prefix that is none", httplimit.ClientIP{IPv6Prefix: 999}, from("[2001:db8::6]:4711"), "2001:db8::6/128"},
		{"IPv6, a negative prefix", httplimit.ClientIP{IPv6Prefix: -1}, from("[2001:db8::6]:4711"), "2001:db8::/64"},
		{"a zone", httplimit.ClientIP{}, from("[fe80::1%eth0]:4711"), "fe80::/64"},
		{"a zone in the field", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "fe80::1%25|x"), "fe80::/64"},
		{"IPv4 in IPv6", httplimit.ClientIP{}, from("[::ffff:203.0.113.7]:4711"), "203.0.113.7"},
		{"IPv4 in IPv6 in the field", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "::ffff:203.0.113.7"), "203.0.113.7"},
	} {
		if got := row.clients.Key(row.r); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

// Whatever a client writes into X-Forwarded-For, the proxies append to it, in the same line or in another.
func FuzzClientIPCannotBeSpoofed(f *testing.F) {
	f.Add("198.51.100.1", "203.0.113.7", uint8(1), true)
	f.Add("198.51.100.1, ", "2001:db8::1", uint8(2), false)
	f.Add(",,\x00\r\n", "unknown", uint8(3), true)
	f.Fuzz(func(t *testing.T, lie, client string, proxies uint8, sameLine bool) {
		if proxies == 0 || strings.Contains(client, ",") {
			return // a proxy appends one entry
		}
		trusted := client + strings.Repeat(", 192.0.2.1", int(proxies)-1)
		clients := httplimit.ClientIP{TrustedProxies: int(proxies)}
		want := clients.Key(from("10.0.0.1:4711", trusted))
		lies := from("10.0.0.1:4711", lie, trusted)
		if sameLine {
			lies = from("10.0.0.1:4711", lie+","+trusted)
		}
		got := clients.Key(lies)
		if got != want {
			t.Fatalf("%q, and with %q before it %q", want, lie, got)
		}
		if _, err := netip.ParseAddr(got); err != nil {
			if prefix, err := netip.ParsePrefix(got); err != nil || prefix.Addr().Is4() || prefix.Addr().Is4In6() || prefix.Addr().Zone() != "" {
				t.Fatalf("%q is no address of IPv4, nor a prefix of IPv6", got)
			}
		}
	})
}

func TestAPIKey(t *testing.T) {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	_, err := httplimit.APIKey(r, "x-api-key")
	var status *httplimit.StatusError
	if !errors.As(err, &status) || status.Status != http.StatusUnauthorized || !strings.Contains(status.Detail, "X-Api-Key") {
		t.Errorf("a missing key: %v", err)
	}
	seen := map[string]bool{}
	for _, secret := range []string{"s3cret", "s3cret ", "other", strings.Repeat("long", 10_000), "\x00", "\xff"} {
		r.Header.Set("X-API-Key", secret)
		key, err := httplimit.APIKey(r, "x-api-key")
		if err != nil || seen[key] || len(key) != 43 || strings.Contains(key, secret) {
			t.Errorf("%.10q: %q, %v", secret, key, err)
		}
		seen[key] = true
	}
	r.Header.Set("X-API-Key", "s3cret")
	if key, _ := httplimit.APIKey(r, "X-API-Key"); key != "HsHCa1DV08WNlYMYGvgHZlX-AHVr9yhZQLo2cPmfy6A" {
		t.Errorf("the key has changed: %q", key)
	}
}

func TestCost(t *testing.T) {
	for text, want := range map[string]float64{
		"5": 5, "1.5": 1.5, "0.001": 0.001, "0": 0, "1e3": 1000, "1e-15": 1e-15, "1e15": 1e15, "1e300": 1e300, "+2": 2, ".5": 0.5,
		"": 7, "-1": 7, "-0.0001": 7, "NaN": 7, "nan": 7, "Inf": 7, "+Inf": 7, "-Inf": 7, "infinity": 7, "1e400": 7, "-1e400": 7, "1e-16": 7, "5e-324": 7,
		"five": 7, "5 tokens": 7, " 5": 7, "5,5": 7, "0x1p4": 7, "1_000": 7, "５": 7, "\x00": 7,
	} {
		if got := httplimit.Cost(text, 7); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	if got := httplimit.Cost("-0", 7); got != 0 {
		t.Errorf("-0: %v", got)
	}
}

func FuzzCost(f *testing.F) {
	for _, text := range []string{"1", "0x1p-2", "NaN", "-0", "1e309", "1e-400"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		cost := httplimit.Cost(text, 7)
		if !(cost == 0 || cost >= ratelimit.MinTokens) || math.IsInf(cost, 0) {
			t.Fatalf("%q: %v", text, cost)
		}
	})
}

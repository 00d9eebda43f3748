package httplimit_test

import (
	"errors"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/txlimit/txlimit/internal/algebra"
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
		{"a zone", httplimit.ClientIP{}, from("[fe80::1%eth0]:4711"), "fe80::/64"},
		{"a zone in the field", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "fe80::1%25|x"), "fe80::/64"},
		{"IPv4 in IPv6", httplimit.ClientIP{}, from("[::ffff:203.0.113.7]:4711"), "203.0.113.7"},
		{"IPv4 in IPv6 in the field", httplimit.ClientIP{TrustedProxies: 1}, from(proxy, "::ffff:203.0.113.7"), "203.0.113.7"},

		{"IPv4, /24", httplimit.ClientIP{IPv4Prefix: 24}, from("203.0.113.7:4711"), "203.0.113.0/24"},
		{"IPv4, /1", httplimit.ClientIP{IPv4Prefix: 1}, from("203.0.113.7:4711"), "128.0.0.0/1"},
		{"IPv4, /32", httplimit.ClientIP{IPv4Prefix: 32}, from("203.0.113.7:4711"), "203.0.113.7"},
		{"IPv4, the prefix of IPv6", httplimit.ClientIP{IPv6Prefix: 16}, from("203.0.113.7:4711"), "203.0.113.7"},
		{"IPv6, the prefix of IPv4", httplimit.ClientIP{IPv4Prefix: 16}, from("[2001:db8:1:2:3:4:5:6]:4711"), "2001:db8:1:2::/64"},
		{"IPv4 in IPv6, /24", httplimit.ClientIP{IPv4Prefix: 24, IPv6Prefix: 128}, from("[::ffff:203.0.113.7]:4711"), "203.0.113.0/24"},
		{"NAT64, /24", httplimit.ClientIP{IPv4Prefix: 24, IPv6Prefix: 128}, from("[64:ff9b::203.0.113.7]:4711"), "203.0.113.0/24"},
	} {
		if got := row.clients.Key(row.r); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

// An IPv4 address embedded by the network is one client. Bits that a client can choose do not make another client.
func TestClientIPInTransitionAddresses(t *testing.T) {
	for _, row := range []struct {
		name, want string
		addresses  []string
	}{
		{"IPv4-mapped", "203.0.113.7", []string{"::ffff:203.0.113.7", "::ffff:cb00:7107", "0:0:0:0:0:ffff:203.0.113.7"}},
		{"IPv4-translated", "203.0.113.7", []string{"::ffff:0:203.0.113.7", "::ffff:0:cb00:7107"}},
		{"IPv4-compatible", "203.0.113.7", []string{"::203.0.113.7", "::cb00:7107"}},
		{"NAT64", "203.0.113.7", []string{"64:ff9b::203.0.113.7", "64:ff9b::cb00:7107"}},
		{"NAT64, another client", "203.0.113.8", []string{"64:ff9b::203.0.113.8"}},
		{"6to4: all of a site", "203.0.113.7", []string{"2002:cb00:7107::1", "2002:cb00:7107:1::1", "2002:cb00:7107:ffff:ffff:ffff:ffff:ffff"}},
		{"6to4, another site", "203.0.113.8", []string{"2002:cb00:7108::1"}},
		{"Teredo: servers, flags and ports of one client", "192.0.2.45",
			[]string{"2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:0:cb00:7107:0:0:3fff:fdd2", "2001::ffff:3fff:fdd2"}},
		{"Teredo, another client of the server", "192.0.2.46", []string{"2001:0:4136:e378:8000:63bf:3fff:fdd1"}},

		{"local NAT64, /96", "64:ff9b:1::cb00:7107/128", []string{"64:ff9b:1::203.0.113.7"}},
		{"local NAT64, /48", "64:ff9b:1:cb00:71:700::/128", []string{"64:ff9b:1:cb00:71:700::"}},
		{"local NAT64, another client", "64:ff9b:1::cb00:7108/128", []string{"64:ff9b:1::203.0.113.8"}},

		{"ISATAP: what the client writes", "2001:db8:1:2::/64",
			[]string{"2001:db8:1:2:0:5efe:203.0.113.7", "2001:db8:1:2:200:5efe:203.0.113.7", "2001:db8:1:2:0:5efe:203.0.113.8"}},
		{"a network's own NAT64", "2001:db8:122:344::/64", []string{"2001:db8:122:344::192.0.2.33"}},
		{"loopback, and no address", "::/64", []string{"::1", "::"}},
		{"next to IPv4-compatible", "0:0:0:1::/64", []string{"0:0:0:1::203.0.113.7"}},
		{"in ::/64, but in no prefix", "::/64", []string{"::1:203.0.113.7", "::fffe:203.0.113.7", "::ffff:1:203.0.113.7"}},
		{"next to NAT64", "64:ff9b:0:1::/64", []string{"64:ff9b:0:1::203.0.113.7"}},
		{"in NAT64's /64", "64:ff9b::/64", []string{"64:ff9b::1:203.0.113.7"}},
		{"next to local NAT64", "64:ff9b:2::/64", []string{"64:ff9b:2::203.0.113.7"}},
		{"next to 6to4", "2003:cb00:7107::/64", []string{"2003:cb00:7107::1"}},
		{"next to Teredo", "2001:1:4136:e378::/64", []string{"2001:1:4136:e378:8000:63bf:3fff:fdd2"}},
		{"an IPv4 address that no host has", "64:ff9b::/64", []string{"64:ff9b::0.0.0.1"}},
	} {
		for _, address := range row.addresses {
			if got := (httplimit.ClientIP{}).Key(from("[" + address + "]:4711")); got != row.want {
				t.Errorf("%s: %s is %q, want %q", row.name, address, got, row.want)
			}
			if got := (httplimit.ClientIP{TrustedProxies: 1}).Key(from("10.0.0.1:4711", address)); got != row.want {
				t.Errorf("%s: %s behind a proxy is %q, want %q", row.name, address, got, row.want)
			}
		}
	}
}

// networks are the CIDR blocks in a text.
func networks(text string) (prefixes []netip.Prefix) {
	for block := range strings.FieldsSeq(text) {
		prefixes = append(prefixes, netip.MustParsePrefix(block))
	}
	return prefixes
}

func TestClientIPOfTrustedNetworks(t *testing.T) {
	const proxy = "10.0.0.1:4711"
	own := httplimit.ClientIP{TrustedNetworks: networks("10.0.0.0/8 192.0.2.0/24 2001:db8:cd::/48 fe80::/10")}
	after := httplimit.ClientIP{TrustedProxies: 1, TrustedNetworks: networks("192.0.2.0/24")} // one proxy of one's own, and before it a CDN
	for _, row := range []struct {
		name    string
		clients httplimit.ClientIP
		r       *http.Request
		want    string
	}{
		{"one proxy", own, from(proxy, "203.0.113.7"), "203.0.113.7"},
		{"three", own, from(proxy, "203.0.113.7, 192.0.2.1, 10.0.0.2"), "203.0.113.7"},
		{"three that add a line each", own, from(proxy, "203.0.113.7", "192.0.2.1", "10.0.0.2"), "203.0.113.7"},
		{"of both families", own, from("[2001:db8:cd::1]:4711", "203.0.113.7, 10.0.0.2"), "203.0.113.7"},
		{"IPv6", own, from(proxy, "2001:db8:1:2::3, 2001:db8:cd::1"), "2001:db8:1:2::/64"},
		{"IPv4 in IPv6", own, from("[::ffff:10.0.0.1]:4711", "203.0.113.7, ::ffff:10.0.0.2"), "203.0.113.7"},
		{"a zone", own, from("[fe80::1%eth0]:4711", "203.0.113.7"), "203.0.113.7"},
		{"entries with ports and brackets", own, from(proxy, "203.0.113.7:50000, 192.0.2.1:1, [2001:db8:cd::1]:2, [2001:db8:cd::1]"), "203.0.113.7"},

		{"a liar", own, from(proxy, "198.51.100.1, 203.0.113.7, 10.0.0.2"), "203.0.113.7"},
		{"a liar who names the proxies", own, from(proxy, "198.51.100.1, 10.0.0.2, 203.0.113.7"), "203.0.113.7"},
		{"a liar who comes round the proxies", own, from("203.0.113.7:4711", "198.51.100.1, 10.0.0.2"), "203.0.113.7"},
		{"a liar at an address that looks like a proxy's", own, from("[64:ff9b::10.0.0.1]:4711", "198.51.100.1"), "10.0.0.1"},
		{"and behind one", own, from(proxy, "198.51.100.1, 64:ff9b::192.0.2.1"), "192.0.2.1"},
		{"a liar with a zone", own, from(proxy, "198.51.100.1, 2001:db8:1:2::3%10.0.0.1"), "2001:db8:1:2::/64"},

		{"nothing is said", own, from(proxy), "10.0.0.1"},
		{"an empty line", own, from(proxy, ""), "10.0.0.1"},
		{"an empty entry", own, from(proxy, "198.51.100.1,,10.0.0.2"), "10.0.0.2"},
		{"garbage", own, from(proxy, "198.51.100.1, unknown, 192.0.2.1, 10.0.0.2"), "192.0.2.1"},
		{"garbage next to it", own, from(proxy, "198.51.100.1, \x00"), "10.0.0.1"},
		{"a number that is no address", own, from(proxy, "198.51.100.1, 3232235777"), "10.0.0.1"},
		{"all are trusted", own, from(proxy, "10.0.0.3, 10.0.0.2"), "10.0.0.3"},
		{"a Unix socket", own, from("@", "203.0.113.7"), "unknown"},
		{"no networks", httplimit.ClientIP{TrustedNetworks: networks("")}, from(proxy, "203.0.113.7"), "10.0.0.1"},
		{"the prefix of a key is not that of a network", httplimit.ClientIP{TrustedNetworks: own.TrustedNetworks, IPv4Prefix: 24}, from(proxy, "203.0.113.7, 10.0.0.2"), "203.0.113.0/24"},

		{"by number, then by network", after, from(proxy, "203.0.113.7, 192.0.2.1"), "203.0.113.7"},
		{"by number, then by two networks", after, from(proxy, "203.0.113.7, 192.0.2.2, 192.0.2.1"), "203.0.113.7"},
		{"two by number, then by network", httplimit.ClientIP{TrustedProxies: 2, TrustedNetworks: after.TrustedNetworks},
			from(proxy, "203.0.113.7, 192.0.2.1, 10.0.0.2"), "203.0.113.7"},
		{"by number, from a Unix socket", after, from("@", "203.0.113.7, 192.0.2.1"), "203.0.113.7"},
		{"by number, and round the CDN", after, from(proxy, "198.51.100.1, 192.0.2.1, 203.0.113.7"), "203.0.113.7"},
		{"by number, which is too large", after, from("192.0.2.1:4711"), "192.0.2.1"},
		{"by number, of no address", after, from("192.0.2.1:4711", "198.51.100.1, unknown"), "192.0.2.1"},
		{"by number, and no more is said", after, from(proxy, "192.0.2.1"), "192.0.2.1"},
	} {
		if got := row.clients.Key(row.r); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

func TestClientIPOfACDNsHeader(t *testing.T) {
	const edge = "192.0.2.1:4711"
	cdn := httplimit.ClientIP{TrustedNetworks: networks("192.0.2.0/24"), ClientHeader: "cf-connecting-ip"}
	after := cdn // one proxy of one's own
	after.TrustedProxies = 1
	for _, row := range []struct {
		name      string
		clients   httplimit.ClientIP
		peer      string
		forwarded []string
		header    []string
		want      string
	}{
		{"from the CDN", cdn, edge, nil, []string{"203.0.113.7"}, "203.0.113.7"},
		{"from the CDN, whatever is forwarded", cdn, edge, []string{"198.51.100.1, 192.0.2.9"}, []string{"203.0.113.7"}, "203.0.113.7"},
		{"IPv6", cdn, edge, nil, []string{"2001:db8:1:2::3"}, "2001:db8:1:2::/64"},
		{"IPv4 in IPv6, with a port and spaces", cdn, edge, nil, []string{" [::ffff:203.0.113.7]:50000\t"}, "203.0.113.7"},
		{"a client within the CDN", cdn, edge, nil, []string{"192.0.2.77"}, "192.0.2.77"},
		{"round the CDN", cdn, "203.0.113.7:4711", nil, []string{"198.51.100.1"}, "203.0.113.7"},
		{"twice", cdn, edge, nil, []string{"198.51.100.1", "203.0.113.7"}, "192.0.2.1"},
		{"a list", cdn, edge, nil, []string{"198.51.100.1, 203.0.113.7"}, "192.0.2.1"},
		{"garbage", cdn, edge, nil, []string{"unknown"}, "192.0.2.1"},
		{"empty", cdn, edge, nil, []string{""}, "192.0.2.1"},
		{"missing, and what is forwarded is not read instead", cdn, edge, []string{"198.51.100.1"}, nil, "192.0.2.1"},
		{"a Unix socket", cdn, "@", nil, []string{"198.51.100.1"}, "unknown"},

		{"one proxy after the CDN", after, "10.0.0.1:4711", []string{"203.0.113.7, 192.0.2.1"}, []string{"203.0.113.7"}, "203.0.113.7"},
		{"one proxy, and round the CDN", after, "10.0.0.1:4711", []string{"192.0.2.1, 203.0.113.7"}, []string{"198.51.100.1"}, "203.0.113.7"},
		{"one proxy, that says nothing", after, edge, nil, []string{"198.51.100.1"}, "192.0.2.1"},
	} {
		r := from(row.peer, row.forwarded...)
		r.Header["Cf-Connecting-Ip"] = row.header
		if got := row.clients.Key(r); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

// What a client outside of the trusted networks writes, whatever it is, stands left of the address that the nearest proxy
// appends.
func FuzzClientIPCannotBeSpoofedThroughTrustedNetworks(f *testing.F) {
	f.Add("198.51.100.1, 10.0.0.2", "203.0.113.7", "10.0.0.2", true)
	f.Add("::ffff:10.0.0.2,", "2001:db8::1", "10.1.2.3, 192.0.2.4", false)
	f.Add(",,\x00\r\n", "64:ff9b::10.0.0.1", "", true)
	f.Fuzz(func(t *testing.T, lie, client, proxies string, sameLine bool) {
		trusted := networks("10.0.0.0/8 192.0.2.0/24")
		clients := httplimit.ClientIP{TrustedNetworks: trusted}
		addr, err := netip.ParseAddr(client)
		if err != nil || trusted[0].Contains(addr.Unmap()) || trusted[1].Contains(addr.Unmap()) {
			return
		}
		appended := client
		for proxy := range strings.SplitSeq(proxies, ",") {
			if p, err := netip.ParseAddr(strings.TrimSpace(proxy)); err == nil && (trusted[0].Contains(p) || trusted[1].Contains(p)) {
				appended += ", " + p.String()
			}
		}
		want := httplimit.ClientIP{}.Key(from("[" + client + "]:4711"))
		if addr.Is4() {
			want = httplimit.ClientIP{}.Key(from(client + ":4711"))
		}
		lies := from("10.0.0.1:4711", lie, appended)
		if sameLine {
			lies = from("10.0.0.1:4711", lie+","+appended)
		}
		if got := clients.Key(lies); got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	})
}

func TestAClientIPThatIsWrongPanics(t *testing.T) {
	for want, clients := range map[string]httplimit.ClientIP{
		"TrustedProxies is -1": {TrustedProxies: -1},
		"is no network":        {TrustedNetworks: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), {}}},
		"ClientHeader is set":  {TrustedProxies: 1, ClientHeader: "cf-connecting-ip"},
		"IPv4Prefix is -1":     {IPv4Prefix: -1},
		"IPv4Prefix is 33":     {IPv4Prefix: 33},
		"IPv6Prefix is -1":     {IPv6Prefix: -1},
		"IPv6Prefix is 129":    {IPv6Prefix: 129},
	} {
		for _, remote := range []string{"203.0.113.7:4711", "[2001:db8::6]:4711", "@"} {
			if text := panics(func() { clients.Key(from(remote, "198.51.100.1")) }); !strings.Contains(text, want) {
				t.Errorf("%s: %q, want %q", remote, text, want)
			}
		}
	}
}

// The proxies append to every X-Forwarded-For of a client, in the same line or in another.
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

// A client that writes a long list makes no more work than one that writes none.
func TestClientIPReadsNoMoreThanItNeeds(t *testing.T) {
	long := strings.Repeat("198.51.100.1,", 70_000)
	for name, r := range map[string]*http.Request{
		"one line":   from("10.0.0.1:4711", long+" 203.0.113.7, 10.0.0.2"),
		"many lines": from("10.0.0.1:4711", append(strings.Split(long, ","), "203.0.113.7", "10.0.0.2")...),
	} {
		clients := httplimit.ClientIP{TrustedProxies: 1, TrustedNetworks: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
		if key := clients.Key(r); key != "203.0.113.7" {
			t.Errorf("%s: %q", name, key)
		}
		result := testing.Benchmark(func(b *testing.B) {
			for range b.N {
				clients.Key(r)
			}
		})
		if bytes := result.AllocedBytesPerOp(); bytes > 1000 {
			t.Errorf("%s: %d bytes for a field of %d", name, bytes, len(long))
		}
	}
}

func TestAPIKey(t *testing.T) {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	_, err := httplimit.APIKey(r, "x-api-key")
	var status *httplimit.StatusError
	if !errors.As(err, &status) || status.Status != http.StatusUnauthorized || !strings.Contains(status.Detail, "X-Api-Key") {
		t.Errorf("a missing key: %v", err)
	}
	seen := map[string]bool{}
	for _, secret := range []string{"s3cret", "S3cret", "s3 cret", "other", strings.Repeat("long", 10_000)} {
		r.Header.Set("X-API-Key", secret)
		key, err := httplimit.APIKey(r, "x-api-key")
		if err != nil || seen[key] || len(key) != 43 || strings.Contains(key, secret) {
			t.Errorf("%.10q: %q, %v", secret, key, err)
		}
		seen[key] = true
	}
	for _, space := range []string{"\u00a0", "\u0085", "\u2003", "\u3000", "\u200b", "\ufeff", "\xa0", "\x85", "\v", "\f", "\x00", "\x1c", "\x7f"} {
		for _, spelling := range []string{space + "s3cret", "s3cret" + space, "s3" + space + "cret"} {
			for _, field := range []string{"X-API-Key", "Authorization"} {
				r.Header.Set(field, spelling)
				if key, err := httplimit.APIKey(r, field); key != "" || !errors.As(err, &status) || status.Status != http.StatusBadRequest {
					t.Errorf("%s: %q: %q, %v", field, spelling, key, err)
				}
				r.Header.Set(field, "Bearer "+spelling)
				if key, err := httplimit.APIKey(r, field); key != "" || err == nil {
					t.Errorf("%s: Bearer %q: %q, %v", field, spelling, key, err)
				}
			}
		}
	}
	r.Header.Set("X-API-Key", " s3cret\t")
	if key, _ := httplimit.APIKey(r, "X-API-Key"); key != "HsHCa1DV08WNlYMYGvgHZlX-AHVr9yhZQLo2cPmfy6A" {
		t.Errorf("the key has changed: %q", key)
	}
}

// Each row has the spellings of one credential, and no two rows have a key in common.
func TestAPIKeyIsOneForOneCredential(t *testing.T) {
	credentials := []struct {
		header    string
		spellings []string
	}{
		{"Authorization", []string{"Bearer s3cret", "bearer s3cret", "BEARER s3cret", "Bearer   s3cret", "Bearer \ts3cret", "  Bearer s3cret\t "}},
		{"Authorization", []string{"Bearer S3cret"}},
		{"Authorization", []string{"Bearer s3 cret"}},
		{"Authorization", []string{"Bearer s3cret="}}, // to the application, it may be another key
		{"Authorization", []string{"Token s3cret"}},
		{"Authorization", []string{"s3cret", " s3cret "}},
		{"Authorization", []string{"S3CRET"}}, // without a scheme, all of it is the secret
		{"Authorization", []string{"Bearer"}},

		// ann:s3cret!
		{"Authorization", []string{"Basic YW5uOnMzY3JldCE=", "basic  YW5uOnMzY3JldCE=", "Basic YW5uOnMzY3JldCE", "Basic YW5uOnMzY3JldCE==", "Basic YW5uOnMzY3JldCF="}},
		{"Authorization", []string{"Basic YW5uOnMzY3JldCI="}},                             // ann:s3cret"
		{"Authorization", []string{"Basic Yjo/Pj8+", "Basic Yjo_Pj8-", "BASIC Yjo_Pj8+"}}, // b:?>?>
		{"Authorization", []string{"Basic yjo/pJ8+"}},
		{"Authorization", []string{"Basic no base64"}},
		{"Authorization", []string{"Basic No base64"}},
		{"Authorization", []string{"Bearer YW5uOnMzY3JldCE="}}, // not decoded: the scheme does not say so
		{"Authorization", []string{"Bearer YW5uOnMzY3JldCF="}},

		{"Authorization", []string{`Token token="s3cret", app="a b"`, `token app="a b",token=s3cret`, `Token  TOKEN = "s3\cret" ,, App="a\ b" ,`}},
		{"Authorization", []string{`Token token="S3cret", app="a b"`}},
		{"Authorization", []string{`Token token="s3cret, app=", b`}},
		{"Authorization", []string{`Token token="s3cret\", app=\"a b"`}},
		{"Authorization", []string{`Token token="s3cret", zone=1`}},
		{"Authorization", []string{`Token token="s3cret, zone=1"`}},
		{"Authorization", []string{`Token token="s3cret`}},
		{"Authorization", []string{`Token token="s3cret" x`}},
		{"Authorization", []string{`Digest username="ann", realm="site", nonce="1", nc=00000001, uri="/", response="6629fae4"`,
			`digest response="0af4a", nc=00000002, uri=/x, nonce="1", realm=site, username="ann"`}},
		{"Authorization", []string{`Digest username="bob", realm="site", nonce="1", nc=00000001, uri="/", response="6629fae4"`}},
		{"Authorization", []string{`Digest username="ann", realm="other", nonce="1", nc=00000001, uri="/", response="6629fae4"`}},
		{"Authorization", []string{`Digest username*=UTF-8''J%C3%A4s, realm="site"`, `Digest username*=UTF-8''J%C3%A4s, realm="site", nc=2`}},

		{"X-API-Key", []string{"Bearer  s3cret", " Bearer  s3cret", "Bearer  s3cret\t"}}, // this field has no scheme
		{"X-API-Key", []string{"bearer  s3cret"}},
		{"X-API-Key", []string{"Basic YW5uOnMzY3JldCE"}},
	}
	keyOf := func(header string, lines ...string) (string, error) {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header[http.CanonicalHeaderKey(header)] = lines
		return httplimit.APIKey(r, strings.ToLower(header))
	}
	rows := map[string]int{}
	for i, row := range credentials {
		for _, spelling := range row.spellings {
			key, err := keyOf(row.header, spelling)
			if before, found := rows[key]; err != nil || found && before != i {
				t.Errorf("%q has the key of %q, %v", spelling, credentials[before].spellings[0], err)
			}
			if rows[key] = i; key != first(t, keyOf, row.header, row.spellings[0]) {
				t.Errorf("%q and %q have two keys", row.spellings[0], spelling)
			}
		}
	}
	if key, err := keyOf("Proxy-Authorization", "bearer  s3cret"); err != nil || rows[key] != 0 || key != first(t, keyOf, "Authorization", "Bearer s3cret") {
		t.Errorf("Proxy-Authorization: %q, %v", key, err)
	}

	for _, row := range []struct {
		lines  []string
		status int // 0: the same as for the first line alone
	}{
		{[]string{"Bearer s3cret", "bearer  s3cret "}, 0},
		{[]string{"Bearer s3cret", "Bearer other"}, http.StatusBadRequest},
		{[]string{"Bearer s3cret", "Bearer s3cret", "Bearer other"}, http.StatusBadRequest},
		{[]string{"Bearer s3cret", ""}, http.StatusBadRequest},
		{[]string{"", "Bearer s3cret"}, http.StatusBadRequest},
		{[]string{" \t ", ""}, http.StatusUnauthorized},
		{[]string{""}, http.StatusUnauthorized},
		{nil, http.StatusUnauthorized},
	} {
		key, err := keyOf("Authorization", row.lines...)
		var refused *httplimit.StatusError
		switch {
		case row.status == 0 && (err != nil || key != first(t, keyOf, "Authorization", row.lines[0])):
			t.Errorf("%q: %q, %v", row.lines, key, err)
		case row.status != 0 && (!errors.As(err, &refused) || refused.Status != row.status || key != ""):
			t.Errorf("%q: %q, %v, want %d", row.lines, key, err, row.status)
		}
	}
}

func first(t *testing.T, keyOf func(string, ...string) (string, error), header, line string) string {
	t.Helper()
	key, err := keyOf(header, line)
	if err != nil {
		t.Fatalf("%s: %s: %v", header, line, err)
	}
	return key
}

// More spaces, or another case of the scheme, never make another key.
func FuzzAPIKey(f *testing.F) {
	for _, value := range []string{"Bearer s3cret", "basic YW5uOg==", `Digest username="a\"b", realm=x`, "Token a=,b=\"", "x \\\"=", "k", ""} {
		f.Add(value)
	}
	f.Fuzz(func(t *testing.T, value string) {
		keyOf := func(value string) string {
			key, _ := httplimit.APIKey(&http.Request{Header: http.Header{"Authorization": {value}}}, "Authorization")
			return key
		}
		other := " " + value + "\t"
		if scheme, rest, found := strings.Cut(strings.Trim(value, " \t"), " "); found {
			other = strings.ToUpper(scheme) + "  " + rest
			if strings.ContainsFunc(scheme, func(r rune) bool { return r <= ' ' || r > '~' }) {
				return // no scheme
			}
		}
		if a, b := keyOf(value), keyOf(other); a != b {
			t.Fatalf("%q: %q, and %q: %q", value, a, other, b)
		}
	})
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
		if !(cost == 0 || cost >= algebra.MinTokens) || math.IsInf(cost, 0) {
			t.Fatalf("%q: %v", text, cost)
		}
	})
}

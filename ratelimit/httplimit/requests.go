package httplimit

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"github.com/txlimit/txlimit/internal/algebra"
)

// ClientIP tells clients apart by their address. The zero value is for a server that clients connect to themselves.
type ClientIP struct {
	// TrustedProxies is how many proxies every request comes through, each of which appends to X-Forwarded-For the address of
	// whoever connected to it. The client is then the one that the first of them saw, that many entries from the right; what
	// is further left the client may have written itself, and is not looked at. With 0 the field is not looked at. A number that
	// is too large lets clients choose their address: so does a way to the server around the proxies.
	TrustedProxies int

	// IPv4Prefix is how many bits tell IPv4 clients apart: 32, the default, is one address. 24 counts those together who can
	// choose among the addresses of such a network.
	IPv4Prefix int

	// IPv6Prefix is how many bits tell IPv6 clients apart, since each has as many addresses as it likes: 64, the default, is
	// one customer's network; some providers hand out shorter ones.
	IPv6Prefix int
}

// Key is the client's address, for [ratelimit.Limit.Key]: "203.0.113.7", or "2001:db8:0:1::/64". There are no zones and no ports.
//
// Where the network writes an IPv4 address into an IPv6 one, the key is the IPv4 address. The client cannot choose it, and the
// bits around it are the same for everybody, or of the client's choice. These are IPv4-mapped (::ffff:0:0/96), IPv4-translated
// (::ffff:0:0:0/96) and IPv4-compatible (::/96) addresses, NAT64 (64:ff9b::/96), 6to4 (2002::/16: the site's address) and
// Teredo (2001::/32: the address of the client's NAT; its port is left out, since a client can open many).
//
// In 64:ff9b:1::/48 only the local network knows where the IPv4 address is: there, each IPv6 address is a client. A network's
// own NAT64 prefix is like any IPv6 network. So is ISATAP: a client may write any IPv4 address into its own.
//
// If the entry of X-Forwarded-For is missing, or no address, the key is the address that the request came from: the last proxy's,
// on which all such requests are counted together. If that is none either (a Unix socket), it is "unknown".
func (c ClientIP) Key(r *http.Request) string {
	if c.TrustedProxies > 0 {
		entries := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
		if i := len(entries) - c.TrustedProxies; i >= 0 {
			if addr, ok := address(strings.Trim(entries[i], " \t")); ok {
				return c.mask(addr)
			}
		}
	}
	if addr, ok := address(r.RemoteAddr); ok {
		return c.mask(addr)
	}
	return "unknown"
}

// address reads an address that may have a port and brackets.
func address(s string) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(s)
	if inner, ok := strings.CutPrefix(s, "["); err != nil && ok && strings.HasSuffix(inner, "]") {
		addr, err = netip.ParseAddr(strings.TrimSuffix(inner, "]"))
	}
	if err != nil {
		var addrPort netip.AddrPort
		addrPort, err = netip.ParseAddrPort(s)
		addr = addrPort.Addr()
	}
	return addr.Unmap().WithZone(""), err == nil
}

// embeddings are the prefixes of IPv6 addresses in which the network, not the client, writes an IPv4 address.
var embeddings = []struct {
	prefix netip.Prefix
	at     int  // the first byte of the IPv4 address
	xor    byte // of its bytes
}{
	{netip.MustParsePrefix("::/96"), 12, 0},           // IPv4-compatible (RFC 4291, 2.5.5.1)
	{netip.MustParsePrefix("::ffff:0:0:0/96"), 12, 0}, // IPv4-translated (RFC 2765)
	{netip.MustParsePrefix("64:ff9b::/96"), 12, 0},    // NAT64 (RFC 6052)
	{netip.MustParsePrefix("2002::/16"), 2, 0},        // 6to4 (RFC 3056)
	{netip.MustParsePrefix("2001::/32"), 12, 0xff},    // Teredo (RFC 4380)
}

// localNAT64 is where IPv4 addresses are at bits that only the local network knows (RFC 8215).
var localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48")

// canonical is the IPv4 address in an IPv6 one, if there is one, else the address itself.
func canonical(addr netip.Addr) netip.Addr {
	for _, e := range embeddings {
		if e.prefix.Contains(addr) {
			b := addr.As16()
			ip := [4]byte(b[e.at:])
			for i := range ip {
				ip[i] ^= e.xor
			}
			if ip[0] == 0 {
				return addr // no host's (0.0.0.0/8), as in "::1"
			}
			return netip.AddrFrom4(ip)
		}
	}
	return addr
}

// mask is the network that a client is counted by.
func (c ClientIP) mask(addr netip.Addr) string {
	addr = canonical(addr)
	bits := cmp.Or(max(c.IPv6Prefix, 0), 64)
	switch {
	case addr.Is4():
		if bits = cmp.Or(max(c.IPv4Prefix, 0), 32); bits >= 32 {
			return addr.String()
		}
	case localNAT64.Contains(addr):
		bits = 128
	}
	return netip.PrefixFrom(addr, min(bits, 128)).Masked().String()
}

// APIKey is the SHA-256 of the credential in a header field, for [ratelimit.Limit.Key]: keys are stored in the clear, and a
// secret should not be. If it is missing, that is a [StatusError] of 401; if there are several that differ, one of 400.
//
// A credential that is spelled in several ways is one key, as far as RFC 9110 says so. Spaces around it do not count. In
// Authorization and Proxy-Authorization, nor does the case of the scheme, the number of spaces after it, the spelling of the
// base64 of Basic, or the order and quoting of parameters and the case of their names. Of Digest, the user name and the realm
// count, since the rest changes with each request: verify it first, for anybody can state a name. Other fields are compared as
// they are.
//
// Some schemes send another credential each time (Negotiate, OAuth 1.0, Hawk). A JWT is replaced often, and many libraries
// accept several spellings of its signature. There, count by the user whom the application has found, not by APIKey.
//
// Anybody can make up a key that was not seen before, and then another. So count by keys that have been found valid, or
// limit the address ([ClientIP]) as well.
func APIKey(r *http.Request, header string) (string, error) {
	name := http.CanonicalHeaderKey(header)
	var value string
	for i, line := range r.Header.Values(name) {
		switch c := credential(name, line); {
		case i == 0:
			value = c
		case c != value: // the next to read it may take the other
			return "", &StatusError{http.StatusBadRequest, "The header field " + name + " is there more than once."}
		}
	}
	if value == "" {
		return "", &StatusError{http.StatusUnauthorized, "The header field " + name + " is missing."}
	}
	hash := sha256.Sum256([]byte(value))
	return base64.RawURLEncoding.EncodeToString(hash[:]), nil
}

// Cost reads a number of tokens, a fraction if need be, that a client stated, for [ratelimit.Request.Count]:
//
//	Cost(r.Header.Get("X-Cost"), 1)
//	Cost(r.URL.Query().Get("n"), 1)
//
// What is missing or no number of tokens (negative, infinite, not a number, too small to count) is the default. 0 is one: where
// a client must not name its own price, use max(1, Cost(…)). A number above 1e15 is returned as it is,
// and its request refused with 400, not granted for the default.
func Cost(text string, defaultCost float64) float64 {
	cost, err := strconv.ParseFloat(text, 64)
	if err != nil || strings.ContainsAny(text, "_xX") || cost != 0 && !(cost >= algebra.MinTokens) || math.IsInf(cost, 1) {
		return defaultCost
	}
	return cost
}

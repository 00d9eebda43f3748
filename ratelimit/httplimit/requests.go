package httplimit

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/ratelimit"
)

// By makes [Middleware.Requests] for the usual case: a request takes one token of one limit, for a key that the function finds in
// it. The function may return an error too: [ErrNotLimited], a [StatusError] or any other.
//
//	httplimit.By(perAddress, httplimit.ClientIP{}.Key)
//	httplimit.By(perUser, func(r *http.Request) (string, error) { return userID(r) })
//	httplimit.By(perCredential, func(r *http.Request) (string, error) { return httplimit.APIKey(r, "Authorization") })
//
// A request without a key is refused with 400. By panics if the limit is invalid or the function is nil.
func By[F func(r *http.Request) string | func(r *http.Request) (string, error)](limit ratelimit.Limit, key F) func(r *http.Request) ([]ratelimit.Request, error) {
	if err := limit.Validate(); err != nil {
		panic("httplimit: By: " + err.Error())
	}
	if key == nil {
		panic("httplimit: By: the function for limit " + strconv.Quote(limit.Name()) + " is nil")
	}
	return func(r *http.Request) ([]ratelimit.Request, error) {
		var of string
		var err error
		switch key := any(key).(type) {
		case func(r *http.Request) string:
			of = key(r)
		case func(r *http.Request) (string, error):
			if of, err = key(r); err != nil {
				return nil, err
			}
		}
		return []ratelimit.Request{limit.Key(of)}, nil
	}
}

// ClientIP identifies clients by their address. The zero value is for a server to which clients connect directly.
type ClientIP struct {
	// TrustedProxies is the number of proxies that every request passes. Each proxy appends the address that connected to
	// it to X-Forwarded-For. The client's address is the entry at this place from the right. Entries further left may be
	// from the client, and are ignored. With 0, the field is ignored. If the number is too large, or requests can reach the
	// server around the proxies, clients can choose their address.
	TrustedProxies int

	// TrustedNetworks are the networks of proxies whose number varies, such as a CDN's. While the address, after those that
	// TrustedProxies counts, is in one of them, the entry to its left is believed. So the client's address is the first one
	// outside of these networks. Whoever sends from these networks can choose an address. Write IPv4 networks as IPv4. Empty:
	// none.
	TrustedNetworks []netip.Prefix

	// ClientHeader is a header field in which a CDN states the client's address, such as CF-Connecting-IP. It is believed
	// only from TrustedNetworks, in place of the entries further left. So these must be networks of the CDN, and the CDN must
	// replace what the client wrote there. Without TrustedNetworks, Key panics. Empty: none.
	ClientHeader string

	// IPv4Prefix is how many bits identify an IPv4 client. The default, 32, is one address. 24 counts all addresses of such
	// a network together, for clients that can choose among them.
	IPv4Prefix int

	// IPv6Prefix is how many bits identify an IPv6 client, which can use many addresses. The default, 64, is one customer's
	// network. Some providers hand out shorter prefixes.
	IPv6Prefix int
}

// Key is the client's address, for [ratelimit.Limit.Key]: "203.0.113.7" or "2001:db8:0:1::/64". It has no zone and no port.
//
// If the network embeds an IPv4 address in an IPv6 address, the key is the IPv4 address. The client cannot choose it, and
// the other bits are the same for all clients or chosen by the client. These addresses are:
//
//   - IPv4-mapped (::ffff:0:0/96), IPv4-translated (::ffff:0:0:0/96) and IPv4-compatible (::/96);
//   - NAT64 (64:ff9b::/96);
//   - 6to4 (2002::/16), where the key is the site's address;
//   - Teredo (2001::/32), where the key is the address of the client's NAT. The port is left out, since a client can open
//     many.
//
// In 64:ff9b:1::/48, only the local network knows the place of the IPv4 address, so each IPv6 address is a client. A
// network's own NAT64 prefix counts like any IPv6 network. ISATAP does too, since a client may write any IPv4 address into
// its own.
//
// An entry that is missing or is not an address is not believed, nor is a ClientHeader that occurs twice:
//
//   - For TrustedProxies, the key is the address that the request came from: the last proxy's, on which all such requests
//     are counted together. If that is not an address either (a Unix socket), the key is "unknown".
//   - For TrustedNetworks and ClientHeader, the key is the address of the proxy that should have stated it.
//
// Key panics if TrustedProxies is negative, a network is not valid, a prefix is out of its bounds, or ClientHeader has no TrustedNetworks.
func (c ClientIP) Key(r *http.Request) string {
	c.check()
	addr, ok := address(r.RemoteAddr)
	var entries fromRight // left of addr
	if c.TrustedProxies > 0 || len(c.TrustedNetworks) > 0 {
		entries.lines = r.Header.Values("X-Forwarded-For")
	}
	trusted := c.TrustedNetworks
	if c.TrustedProxies > 0 {
		for n := 1; n < c.TrustedProxies && !entries.ended(); n++ {
			entries.next()
		}
		if stated, isAddress := entries.next(); isAddress {
			addr, ok = stated, true
		} else {
			trusted = nil
		}
	}
	if !ok {
		return "unknown"
	}
	if c.ClientHeader != "" {
		entries = fromRight{}
		if stated := r.Header.Values(c.ClientHeader); len(stated) == 1 && !strings.Contains(stated[0], ",") {
			entries.lines = stated
		}
	}
	for isIn(trusted, addr) {
		stated, isAddress := entries.next()
		if !isAddress {
			break
		}
		addr = stated
	}
	return c.mask(addr)
}

// fromRight reads the entries of a header field that is a list, the last one first: a client may have written many at its left.
type fromRight struct {
	lines []string // not yet read
	line  *string  // what is left of the line that is read; nil: nothing
}

// ended reports whether there are no more entries.
func (f *fromRight) ended() bool { return f.line == nil && len(f.lines) == 0 }

// next is the address at the next place, if there is one and it is an address.
func (f *fromRight) next() (netip.Addr, bool) {
	if f.ended() {
		return netip.Addr{}, false
	}
	if f.line == nil {
		last := len(f.lines) - 1
		f.line, f.lines = &f.lines[last], f.lines[:last]
	}
	entry := *f.line
	if comma := strings.LastIndexByte(entry, ','); comma >= 0 {
		rest := entry[:comma]
		entry, f.line = entry[comma+1:], &rest
	} else {
		f.line = nil
	}
	return address(strings.Trim(entry, " \t"))
}

func isIn(networks []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(networks, func(network netip.Prefix) bool { return network.Contains(addr) })
}

// address parses an address, with or without a port and brackets.
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

// embeddings are the IPv6 prefixes in which the network, not the client, embeds an IPv4 address.
var embeddings = []struct {
	prefix netip.Prefix
	at     int  // the first byte of the IPv4 address
	xor    byte // with each of its bytes
}{
	{netip.MustParsePrefix("::/96"), 12, 0},           // IPv4-compatible (RFC 4291, 2.5.5.1)
	{netip.MustParsePrefix("::ffff:0:0:0/96"), 12, 0}, // IPv4-translated (RFC 2765)
	{netip.MustParsePrefix("64:ff9b::/96"), 12, 0},    // NAT64 (RFC 6052)
	{netip.MustParsePrefix("2002::/16"), 2, 0},        // 6to4 (RFC 3056)
	{netip.MustParsePrefix("2001::/32"), 12, 0xff},    // Teredo (RFC 4380)
}

// localNAT64 embeds IPv4 addresses at a place that only the local network knows (RFC 8215).
var localNAT64 = netip.MustParsePrefix("64:ff9b:1::/48")

// canonical is the IPv4 address embedded in an IPv6 address, if there is one, or else the address itself.
func canonical(addr netip.Addr) netip.Addr {
	for _, e := range embeddings {
		if e.prefix.Contains(addr) {
			b := addr.As16()
			ip := [4]byte(b[e.at:])
			for i := range ip {
				ip[i] ^= e.xor
			}
			if ip[0] == 0 {
				return addr // not a host's (0.0.0.0/8), as in "::1"
			}
			return netip.AddrFrom4(ip)
		}
	}
	return addr
}

// mask is the network that counts as one client.
func (c ClientIP) mask(addr netip.Addr) string {
	addr = canonical(addr)
	bits := cmp.Or(c.IPv6Prefix, 64)
	switch {
	case addr.Is4():
		if bits = cmp.Or(c.IPv4Prefix, 32); bits == 32 {
			return addr.String()
		}
	case localNAT64.Contains(addr):
		bits = 128
	}
	return netip.PrefixFrom(addr, bits).Masked().String()
}

// check panics if a number is out of bounds. Taken for its default, it would count clients together, or let them choose.
func (c ClientIP) check() {
	switch {
	case c.TrustedProxies < 0:
		panic(fmt.Sprintf("httplimit: ClientIP.TrustedProxies is %d: it must not be negative", c.TrustedProxies))
	case slices.ContainsFunc(c.TrustedNetworks, func(n netip.Prefix) bool { return !n.IsValid() }):
		panic(fmt.Sprintf("httplimit: ClientIP.TrustedNetworks is %v, of which one is no network", c.TrustedNetworks))
	case c.ClientHeader != "" && len(c.TrustedNetworks) == 0:
		panic("httplimit: ClientIP.ClientHeader is set without TrustedNetworks, so all clients of the CDN would be one: name its networks")
	case c.IPv4Prefix < 0 || c.IPv4Prefix > 32:
		panic(fmt.Sprintf("httplimit: ClientIP.IPv4Prefix is %d, which is not between 0 and 32", c.IPv4Prefix))
	case c.IPv6Prefix < 0 || c.IPv6Prefix > 128:
		panic(fmt.Sprintf("httplimit: ClientIP.IPv6Prefix is %d, which is not between 0 and 128", c.IPv6Prefix))
	}
}

// APIKey is the SHA-256 of the credential in a header field, for [ratelimit.Limit.Key]: keys are stored in the clear, and a
// secret should not be. A missing credential is a [StatusError] of 401. Credentials that differ, and one with anything but
// printable ASCII, spaces and tabs, are a [StatusError] of 400: an application may trim what looks like a space, and take many
// spellings for one.
//
// Different spellings of one credential are one key, as far as RFC 9110 defines them. Spaces around the credential do not
// count. In Authorization and Proxy-Authorization, these do not count either:
//
//   - the case of the scheme, and the number of spaces after it;
//   - the spelling of the base64 of Basic;
//   - the order and quoting of parameters, and the case of their names.
//
// Other fields are compared as they are.
//
// For Digest, only the user name and the realm count, since the rest changes with each request. Verify the credential
// first, because any client can state a name.
//
// Some schemes send another credential each time (Negotiate, OAuth 1.0, Hawk). A JWT is replaced often, and many libraries
// accept several spellings of its signature. For these, count by the authenticated user's id, not by APIKey.
//
// A client can invent new keys without end. So count by keys that were found valid, or limit the address ([ClientIP]) as
// well.
func APIKey(r *http.Request, header string) (string, error) {
	name := http.CanonicalHeaderKey(header)
	var value string
	for i, line := range r.Header.Values(name) {
		switch c := credential(name, line); {
		case strings.ContainsFunc(line, func(r rune) bool { return r != '\t' && (r < ' ' || r > '~') }):
			return "", &StatusError{http.StatusBadRequest, "The header field " + name + " has characters other than printable ASCII."}
		case i == 0:
			value = c
		case c != value: // the application may read the other one
			return "", &StatusError{http.StatusBadRequest, "The header field " + name + " occurs more than once, with different values."}
		}
	}
	if value == "" {
		return "", &StatusError{http.StatusUnauthorized, "The header field " + name + " is missing."}
	}
	hash := sha256.Sum256([]byte(value))
	return base64.RawURLEncoding.EncodeToString(hash[:]), nil
}

// Cost reads a number of tokens that a client stated, fractions included, for [ratelimit.Request.Count]:
//
//	Cost(r.Header.Get("X-Cost"), 1)
//	Cost(r.URL.Query().Get("n"), 1)
//
// If the text is missing or is not a number of tokens (negative, infinite, not a number, too small to count), the result is
// defaultCost. A cost of 0 is a number of tokens: if a client must not name its own price, use max(1, Cost(…)). A number
// above 1e15 is returned as it is, so that its request is refused with 400.
func Cost(text string, defaultCost float64) float64 {
	cost, err := strconv.ParseFloat(text, 64)
	if err != nil || strings.ContainsAny(text, "_xX") || cost != 0 && !(cost >= algebra.MinTokens) || math.IsInf(cost, 1) {
		return defaultCost
	}
	return cost
}

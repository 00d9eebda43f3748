package httplimit

import (
	"crypto/sha256"
	"encoding/base64"
	"math"
	"net/http"
	"net/netip"
	"strconv"
	"strings"

	"github.com/txlimit/txlimit/ratelimit"
)

// ClientIP tells clients apart by their address. The zero value is for a server that clients connect to themselves.
type ClientIP struct {
	// TrustedProxies is how many proxies every request comes through, each of which appends to X-Forwarded-For the address of
	// whoever connected to it. The client is then the one that the first of them saw, that many entries from the right; what
	// is further left the client may have written itself, and is not looked at. With 0 the field is not looked at. A number that
	// is too large lets clients choose their address: so does a way to the server around the proxies.
	TrustedProxies int

	// IPv6Prefix is how many bits tell IPv6 clients apart, since each has as many addresses as it likes: 64, the default, is
	// one customer's network; some providers hand out shorter ones.
	IPv6Prefix int
}

// Key is the client's address, for [ratelimit.Limit.Key]: "203.0.113.7", or "2001:db8:0:1::/64". IPv4 in IPv6 is IPv4, and
// there are no zones and no ports.
//
// If the entry of X-Forwarded-For is missing, or no address, it is the address that the request came from: the last proxy's,
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

// mask is the network that a client is counted by.
func (c ClientIP) mask(addr netip.Addr) string {
	if addr.Is4() {
		return addr.String()
	}
	bits := c.IPv6Prefix
	if bits <= 0 {
		bits = 64
	}
	return netip.PrefixFrom(addr, min(bits, 128)).Masked().String()
}

// APIKey is the SHA-256 of a header field, for [ratelimit.Limit.Key]: keys are stored in the clear, and a secret should not be.
// A missing one is a [StatusError] of 401.
//
// Anybody can make up a key that was not seen before, and then another. So count by keys that have been found valid, or
// limit the address ([ClientIP]) as well.
func APIKey(r *http.Request, header string) (string, error) {
	value := r.Header.Get(header)
	if value == "" {
		return "", &StatusError{http.StatusUnauthorized, "The header field " + http.CanonicalHeaderKey(header) + " is missing."}
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
// a client must not name its own price, use max(1, Cost(…)). A number above [ratelimit.MaxTokens] is returned as it is,
// and its request refused with 400, not granted for the default.
func Cost(text string, defaultCost float64) float64 {
	cost, err := strconv.ParseFloat(text, 64)
	if err != nil || strings.ContainsAny(text, "_xX") || cost != 0 && !(cost >= ratelimit.MinTokens) || math.IsInf(cost, 1) {
		return defaultCost
	}
	return cost
}

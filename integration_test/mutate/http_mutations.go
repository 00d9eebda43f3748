package main

// httpMutations are edits of the middleware for HTTP, and what observes it.
var httpMutations = []mutation{
	{
		name: "definitions-http", file: "internal/outcome/outcome.go", what: "two definitions of one name are reported as the client's error",
		old: "errors.Is(err, ratelimit.ErrBadRequest) ||", new: "errors.Is(err, ratelimit.ErrInvalid) ||",
		tests: "TestHTTPTheServersMistakesAre500AndNeverAGrant",
	}, {
		name: "bad-key", file: "ratelimit/request.go", what: "a key that a client has chosen is reported as the program's mistake",
		old: "(for a limit without keys, use Global)\", ErrBadRequest,", new: "(for a limit without keys, use Global)\", ErrInvalid,",
		tests: "TestEveryErrorMatchesASentinel",
	}, {
		name: "http-slots-panic", file: during, what: "a handler that panics pays the estimate of what it held",
		old: "all, wrong := d.used(d.w.Used())", new: "all, wrong := d.held, error(nil)",
		tests: "TestHTTPSlotsBesideARate",
	}, {
		name: "http-unknown-passes", file: "internal/outcome/outcome.go", what: "a request passes on an unknown error",
		old: "	default:\n		return http.StatusServiceUnavailable\n", new: "	default:\n		return 0\n",
		tests: "TestHTTPWithoutTheDatabaseRequestsAreRefusedOrPassByChoice",
	}, {
		name: "http-failure-refunded", file: "ratelimit/httplimit/settle.go", what: "failures are refunded, too",
		old: "free = !m.failed(", new: "free = m.failed(recorder.status, panicked, r) || !m.failed(",
		tests: "TestHTTPWhatIsKnownOfAnAnswerDecidesWhetherItFailed",
	}, {
		name: "http-hidden-exposed", file: "ratelimit/httplimit/fields.go", what: "scripts cannot read the Retry-After of a hidden limit",
		old: "if m.ExposeFields && limited", new: "if limited = limited && len(policies) > 0; m.ExposeFields && limited",
		tests: "TestNothingTellsOfAHiddenLimit",
	}, {
		name: "http-settle-for-ever", file: "ratelimit/httplimit/settle.go", what: "a charge waits for a locked row without end",
		old: "context.WithTimeout(context.WithoutCancel(r.Context()), m.timeout())", new: "context.WithTimeout(context.WithoutCancel(r.Context()), 1000*m.timeout())",
		tests: "TestHTTPACostIsNotWaitedForForEver",
	}, {
		name: "http-settle-panic", file: "ratelimit/httplimit/settle.go", what: "a handler that panics pays the estimate",
		old:   "		charge, refund := c.end(free)\n",
		new:   "		if p := recover(); p != nil {\n			panic(p)\n		}\n		charge, refund := c.end(free)\n",
		tests: "TestHTTPTheCostIsWhatTheHandlerSays",
	}, {
		name: "http-cost-nan", file: "ratelimit/httplimit/settle.go", what: "NaN is a cost",
		old: "!(cost >= 0 && cost <= algebra.MaxTokens)", new: "cost < 0 || cost > algebra.MaxTokens",
		tests: "TestSetCost",
	}, {
		name: "http-cost-outer", file: "ratelimit/httplimit/settle.go", what: "a cost reaches only the innermost middleware",
		old: "c = c.outer {", new: "c = nil {",
		tests: "TestSetCost",
	}, {
		name: "http-cost-unsaid", file: "ratelimit/httplimit/settle.go", what: "a limit without a stated cost costs nothing",
		old: "case !first || !set:", new: "case !first || !set && free:",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-of-success", file: "ratelimit/httplimit/settle.go", what: "a success pays its cost, although only failures count",
		old: "		if free {\n", new: "		if free && !set {\n",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-tiny-charge", file: "ratelimit/httplimit/settle.go", what: "a difference smaller than any count is charged",
		old: "case more >= algebra.MinTokens:", new: "case more > 0:",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-cost-tiny-refund", file: "ratelimit/httplimit/settle.go", what: "a difference smaller than any count is refunded",
		old: "case -more >= algebra.MinTokens:", new: "case -more > 0:",
		tests: "TestOnlyTheDifferenceIsSettled",
	}, {
		name: "http-exposed-lost", file: "ratelimit/httplimit/fields.go", what: "the fields that a CORS handler has listed are replaced",
		old: "			list = append(list, name)\n", new: "			list = append(list[min(len(list), len(exposed)):], name)\n",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-exposed-twice", file: "ratelimit/httplimit/fields.go", what: "fields that are already exposed are listed again",
		old: "exposed = append(exposed, http.CanonicalHeaderKey(", new: "exposed = append(exposed, strings.ToUpper(",
		tests: "TestFieldsThatScriptsMayRead",
	}, {
		name: "http-networks-any", file: "ratelimit/httplimit/requests.go", what: "every client is a trusted proxy",
		old: "for isIn(trusted, addr) {", new: "for trusted != nil {",
		tests: "TestClientIPOfTrustedNetworks|TestClientIPOfACDNsHeader",
	}, {
		name: "http-networks-garbage", file: "ratelimit/httplimit/requests.go", what: "an invalid address is skipped",
		old: "		if !isAddress {\n			break\n", new: "		for range 9 {\n			if !isAddress {\n				stated, isAddress = entries.next()\n			}\n		}\n		if !isAddress {\n			break\n",
		tests: "TestClientIPOfTrustedNetworks",
	}, {
		name: "http-networks-counted", file: "ratelimit/httplimit/requests.go", what: "the entries of the counted proxies are used again",
		old: "addr, ok = stated, true", new: "addr, ok, entries = stated, true, fromRight{lines: r.Header.Values(\"X-Forwarded-For\")}",
		tests: "TestClientIPOfTrustedNetworks",
	}, {
		name: "http-networks-embedded", file: "ratelimit/httplimit/requests.go", what: "a client that embeds a trusted proxy's address in its own is trusted",
		old: "return network.Contains(addr)", new: "return network.Contains(canonical(addr))",
		tests: "TestClientIPOfTrustedNetworks",
	}, {
		name: "http-client-header-twice", file: "ratelimit/httplimit/requests.go", what: "of two header fields, one is trusted",
		old: "len(stated) == 1 && ", new: "len(stated) > 0 && ",
		tests: "TestClientIPOfACDNsHeader",
	}, {
		name: "http-client-header-missing", file: "ratelimit/httplimit/requests.go", what: "if a CDN's header field is missing, what a client forwards is trusted",
		old: "if c.ClientHeader != \"\" {", new: "if r.Header.Get(c.ClientHeader) != \"\" {",
		tests: "TestClientIPOfACDNsHeader",
	}, {
		name: "http-free-cost", file: "ratelimit/httplimit/requests.go", what: "a negative cost is what the client says",
		old: "cost != 0 && !(cost >= algebra.MinTokens)", new: "cost != 0 && !(math.Abs(cost) >= algebra.MinTokens)",
		tests: "TestCost",
	}, {
		name: "http-nothing-asked", file: "ratelimit/httplimit/httplimit.go", what: "a request that asks for nothing is not limited",
		old:   "err = fmt.Errorf(\"%w: httplimit: Requests returned no requests and no error; for a request that is not limited, return ErrNotLimited\", ratelimit.ErrInvalid)",
		new:   "err = ErrNotLimited",
		tests: "TestHTTPTheServersMistakesAre500AndNeverAGrant|TestWithoutAnObserverNoRequestsAreLogged",
	}, {
		name: "http-not-limited-wrapped", file: "ratelimit/httplimit/httplimit.go", what: "ErrNotLimited is an error if it is wrapped",
		old: "case errors.Is(err, ErrNotLimited):", new: "case err == ErrNotLimited:",
		tests: "TestHTTPRequestsThatAreSaidNotToBeLimitedPassUnasked",
	}, {
		name: "http-policy-period", file: "ratelimit/httplimit/fields.go", what: "w is the period, whatever the capacity",
		old: "periods := limit.Capacity() / *c.Rate", new: "periods := 1.0",
		tests: "TestFields|TestThePolicyStatesTheLimitsRate",
	}, {
		name: "http-policy-inexact", file: "ratelimit/httplimit/fields.go", what: "a rounding error above a whole number of seconds adds 1 to w",
		old: "math.Round(periods *", new: "(periods *",
		tests: "TestFields",
	}, {
		name: "http-address-6to4", file: "ratelimit/httplimit/requests.go", what: "the bits that a 6to4 site chooses itself make other clients",
		old: "\"2002::/16\"), 2, 0}", new: "\"2002::/16\"), 12, 0}",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-loopback", file: "ratelimit/httplimit/requests.go", what: "::1 is an IPv4 address",
		old: "if ip[0] == 0 {", new: "if ip[0] == 0xff {",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-local-nat64", file: "ratelimit/httplimit/requests.go", what: "clients behind a local NAT64 are one client",
		old: "		bits = 128\n", new: "		bits = 64\n",
		tests: "TestClientIPInTransitionAddresses",
	}, {
		name: "http-address-prefixes", file: "ratelimit/httplimit/requests.go", what: "IPv4 addresses get the prefix of IPv6",
		old: "cmp.Or(c.IPv4Prefix, 32)", new: "cmp.Or(c.IPv6Prefix, 32)",
		tests: "TestClientIP",
	}, {
		name: "http-key-no-scheme", file: "ratelimit/httplimit/credential.go", what: "keys without a scheme that differ only in case are one key",
		old: "return value // a key without", new: "return strings.ToLower(value) // a key without",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-any-field", file: "ratelimit/httplimit/credential.go", what: "a field that has no schemes is parsed as if it had them",
		old: "if field != \"Authorization\" && field != \"Proxy-Authorization\" {", new: "if field == \"\" {",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-base64", file: "ratelimit/httplimit/credential.go", what: "each base64 spelling of Basic makes another key",
		old: "	return base64.StdEncoding.EncodeToString(decoded)\n", new: "	_ = decoded\n	return s\n",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-alphabet", file: "ratelimit/httplimit/credential.go", what: "the URL-safe alphabet makes another key",
		old: "standardBase64.Replace(strings.TrimRight(s, \"=\"))", new: "strings.TrimRight(s, \"=\")",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-digest", file: "ratelimit/httplimit/credential.go", what: "each request with Digest makes another key",
		old: "if scheme != \"digest\" ||", new: "if scheme != \"Digest\" ||",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-order", file: "ratelimit/httplimit/credential.go", what: "the order of parameters makes another key",
		old: "slices.Sort(list)", new: "slices.Sort(list[:0])",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-quotes", file: "ratelimit/httplimit/credential.go", what: "a parameter's value can look like another parameter",
		old: "name+\"=\"+quoted(value)", new: "name+\"=\"+value",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-key-lines", file: "ratelimit/httplimit/requests.go", what: "of two credentials, the first counts, although the application may use the other",
		old: "case c != value:", new: "case i < 0:",
		tests: "TestAPIKeyIsOneForOneCredential",
	}, {
		name: "http-policy-retry-after", file: "ratelimit/httplimit/refuse.go", what: "a denial by policy has a Retry-After",
		old: "outcome.RetryAt(denied); !result.RetryAt.IsZero() {", new: "outcome.RetryAt(denied); !result.At.IsZero() {",
		tests: "TestHTTPPlans",
	},
}

package httplimit

import (
	"encoding/base64"
	"slices"
	"strings"
)

// credential is a header field's value in one canonical spelling. It is empty if there is no credential.
func credential(field, value string) string {
	value = strings.Trim(value, " \t")
	if field != "Authorization" && field != "Proxy-Authorization" {
		return value
	}
	end := strings.IndexAny(value, " \t")
	if end < 0 {
		return value // a key without a scheme
	}
	scheme, rest := strings.ToLower(value[:end]), strings.TrimLeft(value[end:], " \t")
	if scheme == "basic" {
		return scheme + " " + sameBase64(rest)
	}
	if params, ok := authParams(scheme, rest); ok {
		return scheme + " " + params
	}
	return scheme + " " + rest
}

// standardBase64 maps the URL-safe alphabet to the standard one, as some decoders do.
var standardBase64 = strings.NewReplacer("-", "+", "_", "/")

// sameBase64 is base64 in one spelling: decoders ignore missing padding and the last bits of the last character.
func sameBase64(s string) string {
	decoded, err := base64.RawStdEncoding.DecodeString(standardBase64.Replace(strings.TrimRight(s, "=")))
	if err != nil {
		return s
	}
	return base64.StdEncoding.EncodeToString(decoded)
}

// authParams is the parameters of credentials in one spelling. ok is false if s is a single text (token68), not a list.
func authParams(scheme, s string) (params string, ok bool) {
	if !strings.Contains(strings.TrimRight(s, "="), "=") {
		return "", false
	}
	var list []string
	for s = strings.TrimLeft(s, ", \t"); s != ""; s = strings.TrimLeft(s, ", \t") {
		name, rest, found := strings.Cut(s, "=")
		name = strings.ToLower(strings.TrimRight(name, " \t"))
		if !found || name == "" || strings.ContainsAny(name, ", \t\"") {
			return "", false
		}
		var value string
		if value, s, ok = authValue(strings.TrimLeft(rest, " \t")); !ok {
			return "", false
		}
		if s = strings.TrimLeft(s, " \t"); s != "" && s[0] != ',' {
			return "", false
		}
		if scheme != "digest" || name == "username" || name == "username*" || name == "realm" { // the other parameters change with each request
			list = append(list, name+"="+quoted(value))
		}
	}
	slices.Sort(list)
	return strings.Join(list, ", "), true
}

// authValue cuts a parameter's value, quoted or not, off the text after it.
func authValue(s string) (value, rest string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexAny(s, ", \t\"")
		if end < 0 {
			end = len(s)
		}
		return s[:end], s[end:], true
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"':
			return b.String(), s[i+1:], true
		case s[i] == '\\' && i+1 < len(s):
			i++
		}
		b.WriteByte(s[i])
	}
	return "", "", false
}

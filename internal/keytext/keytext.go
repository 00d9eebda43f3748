// Package keytext joins the parts of a key to the text under which its rows are stored.
package keytext

import "strings"

// Join is the text for the parts. One part is the text itself. Several are joined by "|", with a backslash before each "|" and each backslash of
// a part: "eu" and "a|b" are stored as eu|a\|b. The SQL function ratelimit.key does the same, and ratelimit.key_parts finds the parts again.
func Join(parts ...string) string {
	if len(parts) == 1 {
		return parts[0]
	}
	escaped := make([]string, len(parts))
	for i, part := range parts {
		escaped[i] = escape.Replace(part)
	}
	return strings.Join(escaped, "|")
}

// escape keeps the parts of a key apart.
var escape = strings.NewReplacer(`\`, `\\`, `|`, `\|`)

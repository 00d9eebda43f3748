// Package visible writes texts of others, such as keys, names and errors with keys in them, so that a terminal, a log or a shell does
// nothing with them.
package visible

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Text returns a text for one line. It is the text itself, which can be copied and means the same again, or a Go string in quotes: if it is
// empty, begins or ends with a blank, begins with a quote, or has characters that are not shown.
func Text(s string) string {
	if s == "" || s[0] == '"' || strings.TrimSpace(s) != s || strings.ContainsAny(s, "\n\t") || Escape(s) != s {
		return strconv.Quote(s)
	}
	return s
}

// Escape returns a text with \u001b and so on in place of each character that is not shown: control characters, those that turn the
// writing direction, blanks other than the space, and so on. Tabs and ends of lines stay. JSON stays valid and means the same.
func Escape(s string) string {
	if strings.IndexFunc(s, hidden) < 0 && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		switch high, low := utf16.EncodeRune(r); {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0]) // JSON has none
		case !hidden(r):
			b.WriteRune(r)
		case r > 0xffff:
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
		s = s[size:]
	}
	return b.String()
}

// Error returns an error for a log: its text is escaped. slog's JSON handler writes C1 and bidirectional characters as they are.
func Error(err error) error {
	if err == nil || Escape(err.Error()) == err.Error() {
		return err
	}
	return shown{err}
}

type shown struct{ error }

func (e shown) Error() string { return Escape(e.error.Error()) }
func (e shown) Unwrap() error { return e.error }

func hidden(r rune) bool { return r != '\n' && r != '\t' && !strconv.IsPrint(r) }

// Number writes all of a number: a whole one of up to 1e15 without an exponent.
func Number(n float64) string {
	if n == math.Trunc(n) && math.Abs(n) <= 1e15 {
		return strconv.FormatFloat(n, 'f', -1, 64)
	}
	return strconv.FormatFloat(n, 'g', -1, 64)
}

// Line returns a text as Escape does, with one space in place of blanks and ends of lines.
func Line(s string) string { return Escape(strings.Join(strings.Fields(s), " ")) }

// Word reports whether a text is a word that means itself to every shell, without quotes, and that no program takes for a flag. A comma
// does not: to PowerShell, a,--yes is two arguments.
func Word(s string) bool {
	for i, r := range s {
		plain := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_./", r) || i > 0 && strings.ContainsRune("-:@%+=", r)
		if !plain {
			return false
		}
	}
	return s != ""
}

package main

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// What the tool prints for psql is one line, whatever is in the names: psql obeys a line that begins with a backslash.
func TestSQLToPasteIsOneLine(t *testing.T) {
	t.Parallel()
	for text, want := range map[string][2]string{
		"plain_1":           {`'plain_1'`, `plain_1`},
		`it's "x"`:          {`'it''s "x"'`, `"it's ""x"""`},
		"x'\n\\! touch y":   {`U&'x''\+00000a\\! touch y'`, `U&"x'\+00000a\\! touch y"`},
		"a\"\t\u202e\u009b": {`U&'a"\+000009\+00202e\+00009b'`, `U&"a""\+000009\+00202e\+00009b"`},
		`CORP\ann`:          {`U&'CORP\\ann'`, `U&"CORP\\ann"`},
		"é漢😀":               {`'é漢😀'`, `"é漢😀"`},
	} {
		if got := [2]string{literal(text), identifier(text)}; got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	o := oldTransaction{Holder: "prepared transaction", HolderName: "x'\n\\! touch y"}
	if got := o.end(); strings.Contains(got, "\n") || !strings.HasSuffix(got, `ROLLBACK PREPARED U&'x''\+00000a\\! touch y'`) {
		t.Errorf("the end of a prepared transaction is %q", got)
	}
}

// A word comes out of a shell as it was, and nothing in it reaches the terminal.
func TestShellQuote(t *testing.T) {
	t.Parallel()
	for _, word := range []string{
		"user-17", "", "a b", "it's", "$(id)", "`id`", "a\\", "a\"", "\"", "\x1b[2J", "\x1b\"", "\x1b'\"\\", "\u202egnp",
		"\u009b31m", "a\u00a0b", "\xff'", "line\nline", "ä", "\U0001f980\x7f",
	} {
		quoted := shellQuote(word)
		if strings.ContainsFunc(quoted, func(r rune) bool { return !strconv.IsPrint(r) }) || !utf8.ValidString(quoted) {
			t.Errorf("%q: %q", word, quoted)
		}
		bash := exec.Command("bash", "-c", "printf %s "+quoted)
		bash.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
		if out, err := bash.Output(); err != nil || string(out) != word {
			t.Errorf("%q: %s is %q for bash, %v", word, quoted, out, err)
		}
	}
	// A shell without $'…' takes what is in it for a word, too, and runs nothing of it.
	if got, want := shellQuote("a\u009b'; touch y; '"), `$'a\u009b\x27; touch y; \x27'`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

package main

import (
	"strings"
	"testing"
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

// A shell without $'…' takes what is in it for a word, too, and runs nothing of it.
func TestShellWordsEndNowhere(t *testing.T) {
	t.Parallel()
	if got, want := shellQuote("a\u009b'; touch y; '"), `$'a\u009b\x27; touch y; \x27'`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

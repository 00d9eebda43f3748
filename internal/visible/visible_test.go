package visible

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// bad is what must not reach a terminal or a log.
var bad = regexp.MustCompile(`[\x00-\x08\x0b-\x1f\x7f\x{80}-\x{9f}\p{Cf}\p{Co}\p{Zl}\p{Zp}]`)

// hostile is every character that must not reach a terminal, with others around it.
func hostile() string {
	var b strings.Builder
	for r := range rune(unicode.MaxRune + 1) {
		if text := string(r); bad.MatchString(text) && !unicode.Is(unicode.Co, r) {
			b.WriteString("a" + text)
		}
	}
	return b.String() + "é漢😀\u00a0\U000f0000"
}

func TestNothingHiddenIsLeft(t *testing.T) {
	t.Parallel()
	text := hostile()
	for name, got := range map[string]string{
		"Text": Text(text), "Escape": Escape(text), "Line": Line(text), "bytes": Escape("\x9b31m\xff"), "Text of bytes": Text("\x9b31m"),
	} {
		if at := bad.FindStringIndex(got); at != nil {
			t.Errorf("%s leaves %q", name, got[at[0]:at[1]])
		}
	}
	encoded, err := json.Marshal(map[string]string{text: text})
	if err != nil {
		t.Fatal(err)
	}
	var back map[string]string
	if err := json.Unmarshal([]byte(Escape(string(encoded))), &back); err != nil || back[text] != text {
		t.Errorf("escaped JSON means something else: %v", err)
	}
	for _, text := range []string{"", "plain|é 漢😀", "two\n\tlines"} {
		if got := Escape(text); got != text {
			t.Errorf("%q becomes %q", text, got)
		}
	}
	if got := Line(" two\r\n\x1b lines\x9b "); got != `two \u001b lines\x9b` {
		t.Errorf("%q", got)
	}
	for text, want := range map[string]string{"plain|é": "plain|é", "": `""`, " a": `" a"`, `a"b`: `a"b`, `CORP\ann`: `CORP\ann`, `\u001b`: `\u001b`,
		`"a`: `"\"a"`, "a\nb": `"a\nb"`, "a\tb": `"a\tb"`, "\u202e": `"\u202e"`} {
		if got := Text(text); got != want {
			t.Errorf("%q becomes %s, want %s", text, got, want)
		}
	}
}

// Whatever handler writes it, an error with hostile text in it puts nothing into a log that a terminal obeys.
func TestErrorsInLogs(t *testing.T) {
	t.Parallel()
	cause := errors.New(hostile() + "\n\x9b31m\xff")
	err := Error(fmt.Errorf("ratelimit: %w", cause))
	if !errors.Is(err, cause) {
		t.Error("it does not wrap the error")
	}
	if plain := errors.New("plain|é"); any(Error(plain)) != any(plain) || Error(nil) != nil {
		t.Error("an error without such characters is another")
	}
	var out bytes.Buffer
	for name, logger := range map[string]*slog.Logger{"JSON": slog.New(slog.NewJSONHandler(&out, nil)), "text": slog.New(slog.NewTextHandler(&out, nil))} {
		out.Reset()
		logger.Error("failed", "error", err)
		if text := strings.TrimSuffix(out.String(), "\n"); bad.MatchString(text) || strings.Contains(text, "\n") || !strings.Contains(text, "ratelimit: ") {
			t.Errorf("%s: %q", name, text)
		}
	}
	out.Reset()
	slog.New(slog.NewJSONHandler(&out, nil)).Error("failed", "error", cause)
	if !bad.MatchString(out.String()) {
		t.Error("slog's JSON handler escapes by itself: Error has no use")
	}
}

func TestWordsMeanThemselves(t *testing.T) {
	t.Parallel()
	for _, word := range []string{"user-17", "a", "10.1.2.3", "ann@example.com", "org/7:a", "k=v", "_x", "/a", "50%", "a+b"} {
		if !Word(word) {
			t.Errorf("%q is a word", word)
		}
	}
	for _, text := range []string{"", "-x", "--yes", "=ls", "%1", "+x", "@x", ":x", ",x", "a,--yes", "~", "~root", "a~", "é", "a\u00a0b"} {
		if Word(text) {
			t.Errorf("%q is no word", text)
		}
	}
	const plain = "_./-:@%+="
	for r := range rune(0x180) {
		if !strings.ContainsRune(plain, r) && !(r < 0x80 && (unicode.IsLetter(r) || unicode.IsDigit(r))) && Word("a"+string(r)) {
			t.Errorf("%q is no word", "a"+string(r))
		}
	}
}

package main

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the transcripts anew")

// TestTranscripts plays every testdata/*.txt in a database of its own and compares what the commands print. In a schema of another name, they
// print the same but for the name:
//
//	$ txlimit show sendMessage user-17     a command, with what it prints; standard error has 2> before it
//	$ echo y | txlimit reset ...           a command on a terminal, with an answer
//	=> 3                                   its exit status, if it is not 0
//	> SELECT ...                           SQL, whose answer is not shown
//	# ...                                  a comment
//
// Times and other accidents are made alike. With -update, the files are written anew: read the diff.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		for _, schema := range []string{"", "a b"} {
			if schema != "" && testing.Short() && rand.IntN(3) > 0 {
				continue
			}
			t.Run(strings.TrimSuffix(filepath.Base(file), "txt")+schema, func(t *testing.T) {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				w := newWorld(t)
				w.schema = schema
				got := w.play(string(text))
				if *update && schema == "" {
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
					return
				}
				if want := string(text); got != want {
					t.Errorf("%s differs (go test -run Transcripts -update writes it anew):\n%s", file, diff(want, got))
				}
			})
		}
	}
}

// play runs the commands of a transcript and returns it as it is now.
func (w *world) play(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		command, isCommand := strings.CutPrefix(line, "$ ")
		sql, isSQL := strings.CutPrefix(line, "> ")
		switch {
		case isCommand:
			var answer string
			if rest, ok := strings.CutPrefix(command, "echo "); ok {
				answer, command, _ = strings.Cut(rest, " | ")
				answer += "\n"
			}
			words := w.words(w.in(command))
			if words[0] != "txlimit" {
				w.t.Fatalf("%q is not a txlimit command", command)
			}
			r := w.runWith(w.t.Context(), answer, words[1:]...)
			fmt.Fprintf(&b, "%s\n%s", line, w.alike(r.out))
			for e := range strings.Lines(w.alike(r.errOut)) {
				fmt.Fprintf(&b, "2> %s\n", strings.TrimRight(e, "\n"))
			}
			if r.code != 0 {
				fmt.Fprintf(&b, "=> %d\n", r.code)
			}
		case isSQL:
			w.sql(sql)
			fmt.Fprintln(&b, line)
		case strings.HasPrefix(line, "# "):
			if b.Len() > 0 {
				fmt.Fprintln(&b)
			}
			fmt.Fprintln(&b, line)
		}
	}
	return b.String()
}

// words splits a command as a shell does, with words in '...' as the only quotes.
func (w *world) words(command string) (words []string) {
	word, inWord, quoted := "", false, false
	for _, r := range command {
		switch {
		case r == '\'':
			quoted, inWord = !quoted, true
		case r == ' ' && !quoted:
			if inWord {
				words = append(words, word)
			}
			word, inWord = "", false
		default:
			word, inWord = word+string(r), true
		}
	}
	if quoted {
		w.t.Fatalf("a quote is open in %q", command)
	}
	if inWord {
		words = append(words, word)
	}
	return words
}

var accidents = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?Z`), "<time>"},
	{regexp.MustCompile(`\(database \S+, on host \S+, role \S+\)`), "(database <database>, on host <host>, role <role>)"},
	{regexp.MustCompile(`Not done after 10 s\. .*\n`), ""},
	{regexp.MustCompile(`\(in [0-9hmsd.µ]+\)`), "(in <span>)"},
	{regexp.MustCompile(`\(as [^()]+\)`), "(as <role>)"},
	{regexp.MustCompile(`"(made|removed)As": "[^"]*"`), `"${1}As": "<role>"`},
	{regexp.MustCompile(`hash [0-9a-f]{12}, not [0-9a-f]{12}`), "hash <hash>, not <hash>"}, // of the engine, which changes
}

// alike makes alike what differs from run to run. Columns get the width of what stands in them.
func (w *world) alike(text string) string {
	if w.schema != "" {
		text = strings.NewReplacer("txlimit --schema '"+w.schema+"'", "txlimit", `"`+w.schema+`".`, "ratelimit.", `SCHEMA "`+w.schema+`"`, "SCHEMA ratelimit", w.schema, "ratelimit").Replace(text)
	}
	for _, a := range accidents {
		text = a.pattern.ReplaceAllString(text, a.with)
	}
	text = balance.ReplaceAllStringFunc(text, func(s string) string {
		name, number, _ := strings.Cut(s, ": ")
		n, err := strconv.ParseFloat(number, 64)
		if err != nil {
			w.t.Fatal(err)
		}
		return fmt.Sprintf("%s: %v", name, math.Round(n*1000)/1000+0)
	})
	if !strings.Contains(text, "<span>") {
		return text
	}
	// Spans differ in their width.
	var b strings.Builder
	table := false
	for line := range strings.Lines(text) {
		if table = strings.TrimSpace(line) != "" && (table || heading.MatchString(line)); table {
			line = blanks.ReplaceAllString(line, "  ")
		}
		b.WriteString(line)
	}
	return b.String()
}

var (
	balance = regexp.MustCompile(`"(remaining|stored)": -?[0-9.e-]+`) // a little is refilled meanwhile
	heading = regexp.MustCompile(`^ *[A-Z]+ .*  [A-Z]`)
	blanks  = regexp.MustCompile(` {2,}`)
)

// diff is the lines of two texts that differ.
func diff(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	var b strings.Builder
	for i := range max(len(w), len(g)) {
		var x, y string
		if i < len(w) {
			x = w[i]
		}
		if i < len(g) {
			y = g[i]
		}
		if x != y {
			fmt.Fprintf(&b, "line %d\n  want %s\n  got  %s\n", i+1, x, y)
		}
	}
	return b.String()
}

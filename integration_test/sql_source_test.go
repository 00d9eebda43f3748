package integration_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// suspicious are statements that plain Postgres runs as they read, and Citus otherwise. No server of this project shows it, so the
// source is checked. docs/citus.md has what was seen there.
var suspicious = map[string]*regexp.Regexp{
	// On Citus, the count includes rows that existed: more was granted than there was.
	"a decision by the count of INSERT ... SELECT": regexp.MustCompile(
		`(?is)\bINSERT INTO\b(?:[^;](?:[^;]*))?\bSELECT\b[^;]*;\s*(?:GET (?:CURRENT )?DIAGNOSTICS\b[^;]*\bROW_COUNT\b|(?:IF|ELSIF|WHILE|EXIT|CONTINUE|RETURN|\w+ :=)\b[^;]*\bFOUND\b)`),
	// Rows that move to another shard change theirs, and remote rows have none.
	"a system column": regexp.MustCompile(`(?i)\b\w+\.(?:ctid|xmin|xmax|cmin|cmax|tableoid)\b`),
	// The deparser of Citus crashes on it, unless it is inside an expression.
	"an element of an array alone in SET": regexp.MustCompile(`(?is)\bSET\s+(?:[^;]*,\s*)?\w+ = \w+\[[^\]]*\]\s*(?:,|\bWHERE\b|\bFROM\b|;)`),
}

// housekeeping deletes old statistics by ctid, in one statement. No decision rests on it.
const housekeeping = "usage.sql"

func TestTheEngineReadsAlikeOnEveryServer(t *testing.T) {
	files, err := filepath.Glob("../migrations/engine/*.sql")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	comment := regexp.MustCompile(`(?m)--.*$`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		code := comment.ReplaceAllString(strings.ReplaceAll(string(text), "/* TEMPLATE: schema */", ""), "")
		for what, pattern := range suspicious {
			if filepath.Base(file) == housekeeping && what == "a system column" {
				continue
			}
			for _, found := range pattern.FindAllString(code, -1) {
				t.Errorf("%s: %s:\n%s", file, what, found)
			}
		}
	}
	// What the engine once said is found.
	for what, wrong := range map[string]string{
		"a decision by the count of INSERT ... SELECT": "INSERT INTO r (a) SELECT b FROM c ON CONFLICT DO NOTHING;\n GET DIAGNOSTICS m = ROW_COUNT;",
		"a system column":                     "SELECT r.xmax FROM rate_limits AS r",
		"an element of an array alone in SET": "UPDATE r SET value = held[k], ts = at WHERE x",
	} {
		if !suspicious[what].MatchString(wrong) {
			t.Errorf("%s is not found in %q", what, wrong)
		}
	}
}

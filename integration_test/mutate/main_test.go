package main

import (
	"strings"
	"testing"
)

// The table of mutations must follow the code: the texts to replace and the named tests must exist.
func TestEveryMutationCanBeMade(t *testing.T) {
	l, err := newLab(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.remove()
	names := map[string]bool{}
	for _, m := range allMutations {
		if err := l.applies(m); err != nil {
			t.Error(err)
		}
		if names[m.name] {
			t.Errorf("two mutations are called %s", m.name)
		}
		names[m.name] = true
	}
}

// The table keeps the results of other runs, unless the edit is another one by now.
func TestTheTableKeepsWhatOtherRunsFound(t *testing.T) {
	a, b, c := allMutations[0], allMutations[1], allMutations[2]
	row := func(m mutation, noticed string) string {
		return "| " + m.name + " | `" + m.file + "`: " + m.what + " | " + noticed + " | 1s |"
	}
	first, missing := tableOf("", map[string]string{a.name: row(a, "TestA"), b.name: row(b, "**nothing**")})
	if missing != len(allMutations)-2 || !strings.Contains(first, "mutations, 1 survivors, ") {
		t.Errorf("%d missing", missing)
	}
	first = strings.Replace(first, a.what, "another edit", 1)
	second, missing := tableOf(first, map[string]string{c.name: row(c, "TestC")})
	for text, want := range map[string]bool{"TestA": false, row(b, "**nothing**"): true, row(c, "TestC"): true} {
		if strings.Contains(second, text) != want {
			t.Errorf("%q is in the table: %v, want %v", text, !want, want)
		}
	}
	if missing != len(allMutations)-2 {
		t.Errorf("%d missing, want all but two", missing)
	}
}

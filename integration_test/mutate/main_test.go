package main

import "testing"

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

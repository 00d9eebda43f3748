package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// edit is what an operator makes of a text.
type edit struct {
	operator string
	from, to int
	instead  string
}

var (
	sqlFunction = regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?FUNCTION ratelimit\.(\w+)\(`)
	sqlBody     = regexp.MustCompile(`(?ms)^AS \$body\$\n(.*?)^\$body\$;|^(RETURN .*?;)$`)
	rawSQL      = regexp.MustCompile("(?ms)^const (\\w+) = `-- name: .*?\\n(.*?)`")
)

// span is the part of a file that has a function.
type span struct {
	name     string
	from, to int
}

// mutantsOf returns what the operators make of a file below the root, in the order of the text. The name of a mutant has the
// line in its function, so that changes of other functions do not change it.
func mutantsOf(root, file string) ([]mutation, error) {
	raw, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return nil, err
	}
	text := string(raw)
	var spans []span
	var edits []edit
	if strings.HasSuffix(file, ".go") {
		spans, edits, err = goEdits(file, text)
	} else {
		for _, at := range sqlFunction.FindAllStringSubmatchIndex(text, -1) {
			s := span{text[at[2]:at[3]], at[0], at[1]}
			if body := sqlBody.FindStringSubmatchIndex(text[s.from:]); body != nil {
				begin, end := s.from+max(body[2], body[4]), s.from+max(body[3], body[5])
				edits = append(edits, shifted(sqlEdits(text[begin:end]), begin)...)
				spans = append(spans, span{s.name, s.from, end})
			}
		}
	}
	slices.SortStableFunc(edits, func(a, b edit) int { return cmp.Compare(a.from, b.from) })
	var mutants []mutation
	seen, made := map[string]int{}, map[edit]bool{}
	for _, e := range edits {
		i := slices.IndexFunc(spans, func(s span) bool { return s.from <= e.from && e.from < s.to })
		key := edit{from: e.from, to: e.to, instead: e.instead}
		if i < 0 || made[key] || text[e.from:e.to] == e.instead {
			continue
		}
		made[key] = true
		name := fmt.Sprintf("%s:%s:%d:%s", file, spans[i].name, strings.Count(text[spans[i].from:e.from], "\n"), e.operator)
		if seen[name]++; seen[name] > 1 {
			name = fmt.Sprintf("%s#%d", name, seen[name])
		}
		old := text[e.from:e.to]
		mutants = append(mutants, mutation{name: name, file: file, what: short(old) + " => " + short(e.instead), old: old, new: e.instead, at: e.from})
	}
	return mutants, err
}

func shifted(edits []edit, by int) []edit {
	for i := range edits {
		edits[i].from += by
		edits[i].to += by
	}
	return edits
}

func short(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > 80 {
		return text[:60] + " ... " + text[len(text)-15:]
	}
	return text
}

// allMutants returns what the operators make of the product.
func allMutants(root string) (all []mutation, err error) {
	files, err := productFiles(root)
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		mutants, err := mutantsOf(root, file)
		if err != nil {
			return nil, err
		}
		all = append(all, mutants...)
	}
	return all, nil
}

package main

import (
	"fmt"
	"os"
	"strings"
)

// updateTable writes the latest result of each mutation into docs/mutations.md: of this run, or else what the file has.
func updateTable(file string, rows map[string]string) error {
	before, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	text, missing := tableOf(string(before), rows)
	if missing > 0 {
		fmt.Fprintf(os.Stderr, "%s: %d mutations were not tried yet\n", file, missing)
	}
	return os.WriteFile(file, []byte(text), 0o644) //nolint:gosec // it is part of the docs
}

// tableOf returns the text of the file, and how many mutations it has no result of. A row counts only for the edit that it
// describes.
func tableOf(before string, rows map[string]string) (text string, missing int) {
	known := map[string]string{}
	for line := range strings.Lines(before) {
		if cells := strings.Split(line, " | "); len(cells) > 1 {
			known[strings.TrimPrefix(cells[0], "| ")] = strings.TrimSuffix(line, "\n")
		}
	}
	var b strings.Builder
	b.WriteString("# Mutations\n\nThe library and its engine, broken by one edit at a time, and the test that notices first. `make mutate` tries all of them, and\n" +
		"`make mutate ONLY=name` some. Both write what came of it into this page.\n" +
		"The edits are in [integration_test/mutate](../integration_test/mutate).\n\n" +
		"| mutation | what is broken | noticed by | after |\n|---|---|---|---|\n")
	survivors := 0
	for _, m := range allMutations {
		row := rows[m.name]
		if about := fmt.Sprintf("| %s | `%s`: %s | ", m.name, m.file, m.what); row == "" && strings.HasPrefix(known[m.name], about) {
			row = known[m.name]
		} else if row == "" {
			row = about + notTried
		}
		switch {
		case strings.Contains(row, notTried):
			missing++
		case strings.Contains(row, "**nothing**"):
			survivors++
		}
		b.WriteString(row + "\n")
	}
	fmt.Fprintf(&b, "\n%d mutations, %d survivors, %d not tried yet.\n", len(allMutations), survivors, missing)
	b.WriteString("\nLeft out, since they change no decision:\n\n| file | edit | why nothing can notice it |\n|---|---|---|\n")
	for _, e := range equivalents {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", e.file, e.what, e.why)
	}
	return b.String(), missing
}

const notTried = "not tried yet | |"

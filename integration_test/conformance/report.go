package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// report is all that is printed.
type report struct {
	Server    []fact          `json:"server"`
	Commit    string          `json:"commit"`
	Arguments string          `json:"arguments"`
	Cases     []result        `json:"cases"`
	Summary   map[verdict]int `json:"summary"`
	Trials    int             `json:"trials"`
	Leftover  string          `json:"leftover,omitempty"`
}

// fact is a line about the server.
type fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func (r *report) add(c result) {
	r.Cases = append(r.Cases, c)
	r.Trials += len(c.Trials)
	if r.Summary == nil {
		r.Summary = map[verdict]int{}
	}
	r.Summary[c.Verdict]++
}

func (r *report) printJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// summary is the last line.
func (r *report) summary() string {
	return fmt.Sprintf("%d cases: works %d, with a condition %d, refused %d, wrong %d (%d trials)",
		len(r.Cases), r.Summary[works], r.Summary[conditional], r.Summary[refused], r.Summary[wrong], r.Trials)
}

// lineRunes bounds the text of a case in the table. The whole text follows it.
const lineRunes = 300

func (r *report) printMarkdown(out io.Writer) error {
	var b strings.Builder
	for _, f := range r.Server {
		fmt.Fprintf(&b, "- %s: %s\n", f.Name, strings.Join(strings.Fields(f.Value), " "))
	}
	fmt.Fprintf(&b, "- txlimit: %s, conformance %s\n\n| case | trials | verdict | condition, or what came |\n|---|---|---|---|\n", r.Commit, r.Arguments)
	for _, c := range r.Cases {
		fmt.Fprintf(&b, "| %s | %d | %s | %s |\n", cell(c.Name), len(c.Trials), c.Verdict, cell(short(c.Condition, lineRunes)))
	}
	for _, section := range []struct {
		title string
		of    func(t tried) string
	}{
		{"Errors and differences, in full", func(t tried) string {
			if t.Verdict == refused || t.Verdict == wrong {
				return fmt.Sprintf("%s, at %s", t.Verdict, t.text())
			}
			return ""
		}},
		{"Conditions", func(t tried) string { return t.Condition }},
		{"Numbers", func(t tried) string { return t.Note }},
	} {
		printSection(&b, section.title, r.Cases, section.of)
	}
	if r.Leftover != "" {
		fmt.Fprintf(&b, "\nLeft behind: %s\n", r.Leftover)
	}
	fmt.Fprintf(&b, "\n%s\n", r.summary())
	_, err := io.WriteString(out, b.String())
	return err
}

// printSection lists the texts of trials, each with the trials that have it.
func printSection(b *strings.Builder, title string, cases []result, of func(t tried) string) {
	titled := false
	for _, c := range cases {
		texts := distinct(c.Trials, of)
		if len(texts) == 0 {
			continue
		}
		if !titled {
			fmt.Fprintf(b, "\n## %s\n", title)
			titled = true
		}
		fmt.Fprintf(b, "\n%s\n\n", c.Name)
		for _, text := range texts {
			with := slices.DeleteFunc(slices.Clone(c.Trials), func(t tried) bool { return of(t) != text })
			fmt.Fprintf(b, "- %s: %s\n", names(with), strings.Join(strings.Fields(text), " "))
		}
	}
}

func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }

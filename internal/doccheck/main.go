// Command doccheck checks the repository's Markdown pages, without a network: every link to a file or a heading must have a
// target, every block of Go must be code that is compiled elsewhere, every test that is named must exist, and what "- SQL: `...`" quotes
// must be in the source. `make check` runs it.
//
// A block of Go must occur in a Go file of the repository, line by line, whatever the indentation. A line "// ..." stands
// for lines that the page leaves out. The README has a bound, since the rest belongs in docs.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

func main() {
	wrong, err := check(os.DirFS("."))
	if err != nil {
		fmt.Fprintln(os.Stderr, "doccheck:", err)
		os.Exit(2)
	}
	for _, w := range wrong {
		fmt.Println(w)
	}
	if len(wrong) > 0 {
		os.Exit(1)
	}
}

const maxReadme = 10_000

var testName = regexp.MustCompile(`\b(Test|Fuzz)[A-Z]\w+`)

// check returns the errors, one line each.
func check(root fs.FS) (wrong []string, err error) {
	pages := map[string]string{}
	var sources []string // of Go, each line without its indentation
	var sql string
	err = fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			if entry != nil && entry.IsDir() && name != "." && (strings.HasPrefix(entry.Name(), ".") && entry.Name() != ".github" || entry.Name() == "testdata") {
				return fs.SkipDir
			}
			return err
		}
		extension := path.Ext(name)
		if extension != ".md" && extension != ".go" && extension != ".sql" {
			return nil
		}
		text, err := fs.ReadFile(root, name)
		switch extension {
		case ".md":
			pages[name] = string(text)
		case ".sql":
			sql += " " + strings.Join(strings.Fields(string(text)), " ")
		default:
			sources = append(sources, unindent(string(text)))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for name, text := range pages {
		for _, link := range links(text) {
			if problem := follow(root, pages, name, link); problem != "" {
				wrong = append(wrong, fmt.Sprintf("%s: the link %s: %s", name, link, problem))
			}
		}
		for _, test := range testName.FindAllString(text, -1) { // or the beginning of several names
			if !slices.ContainsFunc(sources, func(source string) bool { return strings.Contains(source, "\nfunc "+test) }) {
				wrong = append(wrong, fmt.Sprintf("%s: there is no test %s", name, test))
			}
		}
		for _, bullet := range sqlQuotes.FindAllString(text, -1) {
			for _, quote := range code.FindAllString(strings.Join(strings.Fields(bullet), " "), -1) { // "..." stands for anything
				for part := range strings.SplitSeq(strings.Trim(quote, "`"), "...") {
					if !strings.Contains(sql, strings.TrimSpace(part)) && strings.Contains(quote, " ") {
						wrong = append(wrong, fmt.Sprintf("%s: no SQL file has %s of the quote %s", name, part, quote))
					}
				}
			}
		}
		for _, block := range goBlocks(text) {
			if !anyHas(sources, block) {
				wrong = append(wrong, fmt.Sprintf("%s: this Go is in no Go file:\n%s", name, block))
			}
		}
	}
	if n := len(pages["README.md"]); n > maxReadme {
		wrong = append(wrong, fmt.Sprintf("README.md has %d bytes: at most %d, the rest belongs in docs", n, maxReadme))
	}
	if len(pages) == 0 {
		return nil, errors.New("there are no pages here: run it in the root of the repository")
	}
	slices.Sort(wrong)
	return wrong, nil
}

var (
	fence     = regexp.MustCompile("(?ms)^[ \t]*```(\\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$")
	code      = regexp.MustCompile("`[^`\n]*`")
	sqlQuotes = regexp.MustCompile(`(?m)^- SQL:.*(\n  .*)*`)
	link      = regexp.MustCompile(`\]\(([^()\s]+)\)|(?:href|src|srcset)="([^"]+)"`)
	title     = regexp.MustCompile(`(?m)^#+ +(.*?) *$`)
	id        = regexp.MustCompile(`(?:id|name)="([^"]+)"`)
)

func links(page string) (targets []string) {
	page = code.ReplaceAllString(fence.ReplaceAllString(page, ""), "")
	for _, match := range link.FindAllStringSubmatch(page, -1) {
		targets = append(targets, match[1]+match[2])
	}
	return targets
}

// follow returns why a link has no target. It does not follow links to other sites.
func follow(root fs.FS, pages map[string]string, page, link string) string {
	if strings.Contains(link, "://") || strings.HasPrefix(link, "mailto:") {
		return ""
	}
	file, anchor, _ := strings.Cut(link, "#")
	target := page
	if file != "" {
		target = path.Join(path.Dir(page), file)
		if _, err := fs.Stat(root, target); err != nil {
			return "there is no " + target
		}
	}
	if anchor == "" {
		return ""
	}
	text, known := pages[target]
	if !known {
		return target + " is no page with headings"
	}
	if !headings(text)[anchor] {
		return fmt.Sprintf("%s has no heading #%s", target, anchor)
	}
	return ""
}

// headings returns a page's anchors, as GitHub makes them.
func headings(page string) map[string]bool {
	anchors := map[string]bool{}
	for _, match := range title.FindAllStringSubmatch(fence.ReplaceAllString(page, ""), -1) {
		anchor := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r > 127:
				return r
			}
			return -1
		}, strings.ToLower(match[1]))
		for n, first := 1, anchor; anchors[anchor]; n++ {
			anchor = fmt.Sprintf("%s-%d", first, n)
		}
		anchors[anchor] = true
	}
	for _, match := range id.FindAllStringSubmatch(page, -1) {
		anchors[match[1]] = true
	}
	return anchors
}

func goBlocks(page string) (blocks []string) {
	for _, match := range fence.FindAllStringSubmatch(page, -1) {
		if match[1] == "go" {
			blocks = append(blocks, unindent(match[2]))
		}
	}
	return blocks
}

// anyHas reports whether one of the sources has all parts of a block, in order.
func anyHas(sources []string, block string) bool {
	parts := strings.Split("\n"+block, "\n// ...\n")
	for _, source := range sources {
		found := true
		for _, part := range parts {
			part = "\n" + strings.Trim(part, "\n") + "\n"
			var rest string
			if _, rest, found = strings.Cut(source, part); !found {
				break
			}
			source = "\n" + rest
		}
		if found {
			return true
		}
	}
	return false
}

// unindent removes the indentation of each line, and the spaces that align comments.
func unindent(text string) string {
	var out bytes.Buffer
	out.WriteByte('\n')
	for line := range strings.Lines(text) {
		out.WriteString(strings.Join(strings.Fields(line), " "))
		out.WriteByte('\n')
	}
	return out.String()
}

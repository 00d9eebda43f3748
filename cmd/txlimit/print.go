package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/txlimit/txlimit/internal/visible"
)

// emit prints v as JSON, or what human prints. a.stdout escapes what a terminal does not show, in JSON as well.
func (a *app) emit(v any, human func(w io.Writer)) error {
	if !a.json {
		human(a.stdout)
		return nil
	}
	encoder := json.NewEncoder(a.stdout)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	copied := reflect.New(reflect.TypeOf(v)).Elem()
	copied.Set(reflect.ValueOf(v))
	writable(copied)
	return encoder.Encode(copied.Interface())
}

// writable changes what JSON cannot write, of rows that no program writes: numbers that are not finite become null, or 0 where null is not
// allowed, and instants one of the years 1 to 9999.
func writable(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return
		}
		if n, ok := reflect.TypeAssert[*float64](v); ok && (math.IsNaN(*n) || math.IsInf(*n, 0)) && v.CanSet() {
			v.SetZero()
			return
		}
		writable(v.Elem())
	case reflect.Slice:
		for i := range v.Len() {
			writable(v.Index(i))
		}
	case reflect.Float64:
		if n := v.Float(); (math.IsNaN(n) || math.IsInf(n, 0)) && v.CanSet() {
			v.SetFloat(0)
		}
	case reflect.Struct:
		if t, ok := reflect.TypeAssert[time.Time](v); ok {
			if v.CanSet() && t.Year() > 9999 {
				v.Set(reflect.ValueOf(time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)))
			} else if v.CanSet() && t.Year() < 1 {
				v.Set(reflect.ValueOf(time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)))
			}
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				writable(v.Field(i))
			}
		}
	}
}

// say prints a line about what was done, unless JSON is asked for.
func (a *app) say(format string, args ...any) {
	if !a.json {
		fmt.Fprintf(a.stdout, format+"\n", args...)
	}
}

// nothing says that there is nothing. With JSON, v is what to print.
func (a *app) nothing(v any, format string, args ...any) error {
	if err := a.emit(v, func(io.Writer) { fmt.Fprintf(a.stderr, format+"\n", args...) }); err != nil {
		return err
	}
	return errNothing
}

// says is emit for later: see answering.
func (a *app) says(v any, human func(w io.Writer)) func() error {
	return func() error { return a.emit(v, human) }
}

// saysNothing is nothing for later.
func (a *app) saysNothing(v any, format string, args ...any) func() error {
	return func() error { return a.nothing(v, format, args...) }
}

// table aligns columns. A column whose title begins with > is aligned to the right.
type table struct {
	right []bool
	rows  [][]string
}

func newTable(titles ...string) *table {
	t := &table{}
	row := make([]string, len(titles))
	for i, title := range titles {
		text, right := strings.CutPrefix(title, ">")
		row[i], t.right = text, append(t.right, right)
	}
	t.rows = append(t.rows, row)
	return t
}

func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer) {
	widths := make([]int, len(t.right))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if t.right[i] {
				line.WriteString(pad + cell + "  ")
			} else {
				line.WriteString(cell + pad + "  ")
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// printable is a text for a terminal: in quotes, with escapes, if it is empty or has characters that a terminal does not show.
func printable(s string) string { return visible.Text(s) }

// short is printable, of at most so many characters.
func short(s string, most int) string {
	if s = printable(s); utf8.RuneCountInString(s) > most {
		s = string([]rune(s)[:most-1]) + "…"
	}
	return s
}

// about names a limit, and a key if there is one.
func about(limit string, key *string) string {
	if key == nil {
		return printable(limit)
	}
	return printable(limit) + " " + printable(*key)
}

// tokens is a balance to three decimals, never more than there is.
func tokens(n float64) string {
	if math.IsInf(n, 1) {
		return "unlimited"
	}
	if math.Abs(n) < 1e15 {
		n = math.Floor(n*1000+1e-6) / 1000 // 0.57*1000 is less than 570
	}
	return strconv.FormatFloat(n, 'f', -1, 64)
}

// number is all of a number.
func number(n float64) string { return visible.Number(n) }

// count is a number of things, with commas.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func plural(n int64, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + one + "s"
}

// instant is a time in UTC.
func instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// until is an instant that lies ahead, and how far ahead, both rounded up: a caller that waits for it is not too early.
func until(t *time.Time, at time.Time) string {
	switch {
	case t == nil:
		return "for good"
	case t.Year() >= 9999:
		return "never"
	}
	return fmt.Sprintf("%s (in %s)", instant(t.Add(time.Second-1)), span(t.Sub(at), up))
}

// up rounds up.
func up(d, unit time.Duration) time.Duration { return (d + unit - 1).Truncate(unit) }

// span is a duration in its two largest units.
func span(d time.Duration, round func(d, unit time.Duration) time.Duration) string {
	const day = 24 * time.Hour
	d = max(d, 0)
	switch {
	case d == math.MaxInt64: // what the difference of two times is at most
		return "more than 292 years"
	case d < time.Second:
		return round(d, time.Millisecond).String()
	case d < time.Minute:
		return round(d, 100*time.Millisecond).String()
	}
	if d = round(d, time.Second); d < time.Hour {
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	if d = round(d, time.Minute); d < day {
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	d = round(d, time.Hour)
	return fmt.Sprintf("%dd%02dh", d/day, d%day/time.Hour)
}

package console

import (
	"fmt"
	"html/template"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/visible"
)

var functions = template.FuncMap{
	"asset":   assetURL,
	"num":     number,
	"count":   count,
	"instant": instant,
	"machine": func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"ago":     ago,
	"in":      in,
	"up":      func(t time.Time) time.Time { return t.Add(time.Second - 1).Truncate(time.Second) },
	"percent": percent,
	"numbers": describe,
	"shown":   shown,
	"visible": visibly,
	"deref":   func(p any) any { return reflect.Indirect(reflect.ValueOf(p)).Interface() },
	"dict":    dict,
}

// number writes tokens: with as many digits as help.
func number(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "∞"
	case math.IsNaN(f) || math.IsInf(f, -1):
		return "not a number"
	case math.Abs(f) < 1e-15: // the smallest count
		return "0"
	case f == math.Trunc(f) && math.Abs(f) < 1e15:
		return count(int64(f))
	case math.Abs(f) >= 1e15, math.Abs(f) < 1e-3:
		shown := strconv.FormatFloat(f, 'g', 3, 64) // the nearest, which must not be above f
		if rounded, _ := strconv.ParseFloat(shown, 64); rounded > f {
			shown = strconv.FormatFloat(rounded-math.Pow10(int(math.Floor(math.Log10(math.Abs(f))))-2), 'g', 3, 64)
		}
		return shown
	case math.Abs(f) >= 100:
		return count(int64(math.Floor(f + 1e-6))) // what is not there yet is not rounded up, but rounding takes nothing
	}
	digits := 2
	if math.Abs(f) < 1 {
		digits = 3
	}
	p := math.Pow10(digits)
	return strings.Replace(strconv.FormatFloat(math.Floor(f*p+1e-6)/p, 'f', -1, 64), "-", "−", 1)
}

// count writes a whole number in groups of three.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := ""
	if s[0] == '-' {
		sign, s = "−", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

func percent(part, other int64) string {
	if part+other == 0 {
		return "–"
	}
	p := 100 * float64(part) / float64(part+other)
	switch {
	case part == 0:
		return "0 %"
	case p < 0.1:
		return "< 0.1 %"
	case p > 99.9 && other > 0:
		return "> 99.9 %"
	case p < 10:
		return strconv.FormatFloat(p, 'f', 1, 64) + " %"
	}
	return strconv.FormatFloat(p, 'f', 0, 64) + " %"
}

// instant writes an instant in UTC, which the pages say once.
func instant(t time.Time) string {
	t = t.UTC()
	if t.Second() == 0 {
		return t.Format("2 Jan 2006, 15:04")
	}
	return t.Format("2 Jan 2006, 15:04:05")
}

func ago(now, t time.Time) string {
	d := now.Sub(t)
	switch {
	case d < -time.Second:
		return "in " + in(now, t)
	case d < time.Second:
		return "now"
	}
	return inTwoUnits(d) + " ago"
}

// in writes how long it is until t, rounded up: a caller that waits for so long is not too early.
func in(now, t time.Time) string {
	d := t.Sub(now)
	for _, two := range []struct{ from, unit time.Duration }{{24 * time.Hour, time.Hour}, {time.Hour, time.Minute}, {time.Second, time.Second}} {
		if d >= two.from && d < math.MaxInt64 {
			return inTwoUnits((d + two.unit - 1).Truncate(two.unit))
		}
	}
	return inTwoUnits(d)
}

// inTwoUnits writes a duration in its two largest units.
func inTwoUnits(d time.Duration) string {
	switch {
	case d < time.Second:
		return "under 1 s"
	case d == math.MaxInt64: // what the difference of two times is at most
		return "more than 292 years"
	}
	var parts []string
	for _, unit := range []struct {
		name string
		d    time.Duration
	}{{"d", 24 * time.Hour}, {"h", time.Hour}, {"min", time.Minute}, {"s", time.Second}} {
		n := int64(d / unit.d)
		d %= unit.d
		if n > 0 {
			parts = append(parts, count(n)+" "+unit.name)
		} else if len(parts) > 0 {
			break
		}
		if len(parts) == 2 {
			break
		}
	}
	return strings.Join(parts, " ")
}

// every writes a period after "per".
func every(n numbers) string {
	if n.Period != nil {
		switch *n.Period {
		case "1 mon":
			return "month"
		case "3 mons":
			return "quarter"
		case "1 year":
			return "year"
		}
	}
	if n.Seconds == nil {
		return "?"
	}
	for _, unit := range []struct {
		name    string
		seconds float64
	}{{"week", 604800}, {"day", 86400}, {"hour", 3600}, {"minute", 60}, {"second", 1}} {
		if k := *n.Seconds / unit.seconds; k == 1 {
			return unit.name
		} else if k == math.Trunc(k) && k >= 1 {
			return number(k) + " " + unit.name + "s"
		}
	}
	return number(*n.Seconds*1000) + " ms"
}

// kindSlots is the kind of a limit of how many may be held at once.
const kindSlots = "slots"

// describe writes the numbers of a limit in a few words.
func describe(kind string, n numbers) string {
	switch {
	case kind == "unlimited":
		return "unlimited"
	case kind == kindSlots && n.Capacity != nil:
		return "at most " + number(*n.Capacity) + " at once"
	case n.Rate == nil:
		return visibly(kind)
	case *n.Rate == 0:
		return "denies everything"
	}
	s := number(*n.Rate) + " per " + every(n)
	if n.Capacity != nil && *n.Capacity != *n.Rate {
		s += ", at most " + number(*n.Capacity) + " at once"
	}
	return s
}

// shown makes a key visible that would not be.
func shown(key string) string {
	if key == "" {
		return "(no key)"
	}
	return visibly(key)
}

// visibly is a text in quotes, with escapes, if it has characters that would not be seen, or would turn the rest around.
func visibly(text string) string {
	if text == "" {
		return ""
	}
	return visible.Text(text)
}

func dict(pairs ...any) (map[string]any, error) {
	m := make(map[string]any)
	for i := 0; i+1 < len(pairs); i += 2 {
		name, ok := pairs[i].(string)
		if !ok {
			return nil, fmt.Errorf("%v is not a name", pairs[i])
		}
		m[name] = pairs[i+1]
	}
	return m, nil
}

// span is a stretch of time that a chart shows, up to now.
type span struct {
	Name, Label string
	Length, Bin time.Duration
}

var (
	listSpans = []span{
		{"1h", "1 hour", time.Hour, 2 * time.Minute},
		{"3h", "3 hours", 3 * time.Hour, 5 * time.Minute},
		{"6h", "6 hours", 6 * time.Hour, 10 * time.Minute},
	}
	limitSpans = []span{
		{"hour", "Hour", time.Hour, time.Minute},
		{"day", "Day", 24 * time.Hour, 10 * time.Minute},
		{"week", "Week", 7 * 24 * time.Hour, time.Hour},
		{"month", "30 days", 30 * 24 * time.Hour, 6 * time.Hour},
	}
)

func pick(spans []span, name string, otherwise int) span {
	for _, s := range spans {
		if s.Name == name {
			return s
		}
	}
	return spans[otherwise]
}

// since is the begin of the first bin.
func (s span) since(now time.Time) time.Time {
	return now.Truncate(s.Bin).Add(s.Bin - s.Length)
}

// The size of a small chart.
const sparkWidth, sparkHeight = 180, 32

// spark is a small chart: the paths of an SVG.
type spark struct {
	Granted, Denied string
	Label           string
}

// draw draws bars: denials on top of grants, the highest as high as the chart. A bar that is not empty is seen.
func draw(bins []binRow, s span, now time.Time) spark {
	n := int(s.Length / s.Bin)
	granted, denied := make([]int64, n), make([]int64, n)
	var grants, denials, most int64
	for _, b := range bins {
		i := int(b.At.Sub(s.since(now)) / s.Bin)
		if i < 0 || i >= n {
			continue
		}
		granted[i] += b.Granted
		denied[i] += b.Denied
		grants, denials, most = grants+b.Granted, denials+b.Denied, max(most, granted[i]+denied[i])
	}
	var g, d strings.Builder
	width := float64(sparkWidth) / float64(n)
	for i := range n {
		x := float64(i) * width
		below := 0.0
		if granted[i] > 0 {
			below = max(1, float64(granted[i])/float64(most)*sparkHeight)
		}
		above := 0.0
		if denied[i] > 0 {
			above = max(1.5, float64(denied[i])/float64(most)*sparkHeight)
		}
		below = min(below, sparkHeight-above)
		bar := func(b *strings.Builder, from, to float64) {
			if to > from {
				fmt.Fprintf(b, "M%.2f %.2fh%.2fv%.2fh-%.2fz", x+0.5, sparkHeight-to, width-1, to-from, width-1)
			}
		}
		bar(&g, 0, below)
		bar(&d, below, below+above)
	}
	return spark{g.String(), d.String(), fmt.Sprintf("%s denied and %s granted in the last %s", count(denials), count(grants), s.Label)}
}

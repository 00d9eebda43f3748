package replay

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"

	"github.com/txlimit/txlimit/internal/calendar"
	"github.com/txlimit/txlimit/internal/visible"
	"github.com/txlimit/txlimit/ratelimit"
)

// Report is what a replay found.
type Report struct {
	Events     int
	Keys       int       // that were seen
	From, To   time.Time // the first and the last event
	Candidates []Candidate
	Busiest    []Span // at most 5, the one with the most events first. How long they are depends on the time covered

	spans []Span
	width time.Duration
}

// Candidate is what one limit would have done.
type Candidate struct {
	Limit           ratelimit.Limit
	Granted, Denied int   // events
	KeysDenied      int   // at least once
	MostDenied      []Key // at most 10 keys that were denied, most denials first
	LongestWaits    []Key // at most 10 keys that were denied, longest wait first

	needs []float64 // the capacity that each key needed, in ascending order; nil: no capacity helps
}

// Key is a key that a limit would have denied.
type Key struct {
	Key            string
	Events, Denied int

	// Wait is the longest time from a denial, at WaitedAt, to the instant at which the same call would have been granted if
	// nothing else was consumed meanwhile. It is half of the longest duration, 146 years, if that instant comes later or never: for a
	// limit with a rate of 0, or for more tokens than the capacity.
	Wait     time.Duration
	WaitedAt time.Time
}

// never is what [ratelimit.Result] has as RetryAfter if waiting does not help.
const never = time.Duration(math.MaxInt64 / 2)

const (
	maxListed  = 10
	maxBusiest = 5
)

func (r *run) report() *Report {
	report := &Report{Events: r.count, Keys: len(r.names), From: r.from, To: r.to, spans: r.spans.list, width: r.spans.width}
	for _, span := range r.spans.list {
		report.Busiest = top(report.Busiest, span, maxBusiest, func(a, b Span) int { return cmp.Compare(b.Events, a.Events) })
	}
	for _, t := range r.tracks {
		c := Candidate{Limit: t.limit, Granted: t.granted, Denied: t.denied}
		for i, key := range t.keys {
			if t.suggest {
				c.needs = append(c.needs, key.need)
			}
			if key.denied == 0 {
				continue
			}
			c.KeysDenied++
			k := Key{r.names[i], r.events[i], key.denied, key.wait, key.waitedAt}
			c.MostDenied = top(c.MostDenied, k, maxListed, func(a, b Key) int { return cmp.Compare(b.Denied, a.Denied) })
			c.LongestWaits = top(c.LongestWaits, k, maxListed, func(a, b Key) int { return cmp.Compare(b.Wait, a.Wait) })
		}
		slices.Sort(c.needs)
		report.Candidates = append(report.Candidates, c)
	}
	return report
}

// top inserts an item into a sorted list of at most n. Of equals, the earlier ones stay.
func top[T any](list []T, item T, n int, compare func(a, b T) int) []T {
	at := len(list)
	for at > 0 && compare(item, list[at-1]) < 0 {
		at--
	}
	if at == n {
		return list
	}
	list = slices.Insert(list, at, item)
	return list[:min(len(list), n)]
}

// Suggest is the smallest whole capacity, at the candidate's rate, with which at most that share of the keys would have been
// denied at least once: 0 is nobody, 0.001 is one key in a thousand. It may be below the rate, or above it. ok is false if no
// capacity can be named: the rate is 0, the limit is unlimited, or there were no events.
//
// A limit that denies nothing is a queue that is served at the rate: what it lacks of its capacity C follows Lindley's
// recursion, lack = max(0, lack - refill) + count, which does not depend on C. So a key is never denied if C is at least its
// largest lack, the burst of (sigma, rho) regulation (R. L. Cruz, A Calculus for Network Delay, 1991).
//
// The sums are doubles, as in the engine. If an event comes in the very microsecond in which its token does, rounding decides:
// the result may be one token more than necessary, or still deny the event. To be sure, run it as a candidate.
func (c Candidate) Suggest(share float64) (capacity float64, ok bool) {
	if len(c.needs) == 0 || !(share >= 0) {
		return 0, false
	}
	n := float64(len(c.needs))
	denied := min(math.Floor(share*n), n-1)
	return math.Ceil(c.needs[len(c.needs)-1-int(denied)]), true
}

// String is the report as tables of text. Characters of keys that a terminal does not show are escaped.
func (r *Report) String() string {
	var b strings.Builder
	if r.Events == 0 {
		return "no events\n"
	}
	fmt.Fprintf(&b, "%d events of %d keys, from %s to %s\n\n", r.Events, r.Keys, instant(r.From), instant(r.To))
	table(&b, func(row func(cells ...any)) {
		row("", "limit", "granted", "denied", "share", "keys denied", "longest wait", "capacity to deny nobody", "1 key in 1000")
		for i, c := range r.Candidates {
			wait := "-"
			if len(c.LongestWaits) > 0 {
				wait = duration(c.LongestWaits[0].Wait)
			}
			row(i+1, printable(c.Limit.String(), 80), c.Granted, c.Denied, percent(c.Denied, r.Events), c.KeysDenied, wait, c.suggestion(0), c.suggestion(0.001))
		}
	})
	fmt.Fprintf(&b, "\nbusiest (%s each)\n", calendar.PeriodText(r.width))
	table(&b, func(row func(cells ...any)) {
		head := []any{"from", "events"}
		for i := range r.Candidates {
			head = append(head, fmt.Sprintf("denied by %d", i+1))
		}
		row(head...)
		for _, span := range r.Busiest {
			cells := []any{instant(span.From), span.Events}
			for _, denied := range span.Denied {
				cells = append(cells, denied)
			}
			row(cells...)
		}
	})
	for i, c := range r.Candidates {
		for _, list := range []struct {
			title string
			keys  []Key
		}{{"most denied", c.MostDenied}, {"longest waits", c.LongestWaits}} {
			if len(list.keys) == 0 {
				continue
			}
			fmt.Fprintf(&b, "\n%s by %d\n", list.title, i+1)
			table(&b, func(row func(cells ...any)) {
				row("key", "events", "denied", "longest wait", "at")
				for _, k := range list.keys {
					row(printable(k.Key, 40), k.Events, k.Denied, duration(k.Wait), instant(k.WaitedAt))
				}
			})
		}
	}
	return b.String()
}

// suggestion is Suggest as text.
func (c Candidate) suggestion(share float64) string {
	capacity, ok := c.Suggest(share)
	if !ok {
		return "-"
	}
	return strconv.FormatFloat(capacity, 'f', -1, 64)
}

// table aligns rows of cells.
func table(b *strings.Builder, fill func(row func(cells ...any))) {
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	fill(func(cells ...any) {
		texts := make([]string, len(cells))
		for i, cell := range cells {
			texts[i] = fmt.Sprint(cell)
		}
		fmt.Fprintln(w, strings.Join(texts, "\t"))
	})
	_ = w.Flush() // a Builder has no errors
}

func instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

func percent(part, of int) string {
	return fmt.Sprintf("%.4g%%", 100*float64(part)/float64(max(of, 1)))
}

// duration is a duration as text, to the second if it is long.
func duration(d time.Duration) string {
	switch {
	case d == never:
		return "never granted"
	case d >= time.Minute:
		return d.Round(time.Second).String()
	}
	return d.String()
}

// printable is a text for one line of a terminal, of at most so many characters.
func printable(s string, most int) string {
	s = visible.Text(s)
	if utf8.RuneCountInString(s) > most {
		s = string([]rune(s)[:most-1]) + "…"
	}
	return s
}

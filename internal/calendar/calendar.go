// Package calendar works out when the windows of a calendar begin: days, weeks, months, quarters and years in a time zone. It
// reads times as Postgres does (ratelimit._windows), so that Go and SQL agree if their zone files do.
package calendar

import (
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Calendar is a sequence of windows. It is valid if Unit is one of Units, Location loads Zone, and ParseAnchor reads Anchor. The
// zero value is no calendar.
type Calendar struct {
	Unit   string
	Zone   string // as for time.LoadLocation
	Anchor string // a local time at which a window begins, as AnchorText writes it
}

// Units are the units of the calendar.
var Units = []string{"day", "week", "month", "quarter", "year"}

// Step is the unit's length in months or in days.
func (c Calendar) Step() (months, days int) {
	switch c.Unit {
	case "day":
		return 0, 1
	case "week":
		return 0, 7
	case "month":
		return 1, 0
	case "quarter":
		return 3, 0
	default:
		return 12, 0
	}
}

// Longest is the longest that a window can be, changes of the zone's offset included. It is 0 if Unit is none of Units.
func (c Calendar) Longest() time.Duration {
	const day = 24 * time.Hour
	return map[string]time.Duration{"day": 2 * day, "week": 8 * day, "month": 32 * day, "quarter": 93 * day, "year": 367 * day}[c.Unit]
}

// Interval is the unit as an interval of Postgres.
func (c Calendar) Interval() string {
	return map[string]string{"day": "1 day", "week": "7 days", "month": "1 month", "quarter": "3 months", "year": "1 year"}[c.Unit]
}

// anchorLayouts are the forms of an anchor, from the shortest on.
var anchorLayouts = []string{time.DateOnly, "2006-01-02 15:04", time.DateTime}

// ParseAnchor reads a local time as a date, or a date with a time of day. The time has no zone; it is returned as if in UTC.
func ParseAnchor(text string) (time.Time, error) {
	for _, layout := range anchorLayouts {
		// Parse also takes fractions of a second, and hours of one digit.
		if t, err := time.Parse(layout, text); err == nil && t.Format(layout) == text && t.Year() >= 1 {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("anchor %q is not a date of the years 1 to 9999, such as %q, nor a date and a time of day in the limit's zone, such as %q",
		text, "2026-01-31", "2026-01-31 15:00")
}

// AnchorText is the shortest text from which ParseAnchor reads a time.
func AnchorText(anchor time.Time) string {
	layout := anchorLayouts[0]
	if hour, minute, second := anchor.Clock(); second != 0 {
		layout = anchorLayouts[2]
	} else if hour != 0 || minute != 0 {
		layout = anchorLayouts[1]
	}
	return anchor.Format(layout)
}

// Start is the start of a window: the anchor's time of day in the zone, on a date that is whole units from the anchor. In a
// month with fewer days, it is the month's last day. The window that begins at the anchor has number 0.
func (c Calendar) Start(number int) algebra.Micros { return c.starts()(number) }

// starts is Start, with the texts read only once.
func (c Calendar) starts() func(number int) algebra.Micros {
	anchor, _ := ParseAnchor(c.Anchor)
	loc, err := Location(c.Zone)
	if err != nil {
		panic(err) // never: the zone was loaded when the limit was made
	}
	months, days := c.Step()
	if months == 0 {
		return func(number int) algebra.Micros { return instant(anchor.AddDate(0, 0, number*days), loc) }
	}
	return func(number int) algebra.Micros {
		year, month, day := anchor.Date()
		month += time.Month(number * months)
		last := time.Date(year, month+1, 0, 0, 0, 0, 0, time.UTC).Day()
		hour, minute, second := anchor.Clock()
		return instant(time.Date(year, month, min(day, last), hour, minute, second, 0, time.UTC), loc)
	}
}

// Number is the number of the window that contains an instant. If several windows begin together, it is the last of them.
func (c Calendar) Number(at algebra.Micros) (n int) {
	anchor, _ := ParseAnchor(c.Anchor)
	now := at.Time()
	// An estimate in UTC, which is at most two windows wrong.
	if months, days := c.Step(); months > 0 {
		n = (12*(now.Year()-anchor.Year()) + int(now.Month()-anchor.Month())) / months
	} else {
		n = int((at - algebra.At(anchor)) / algebra.Micros((24*time.Hour).Microseconds()*int64(days)))
	}
	start := c.starts()
	for start(n) > at {
		n--
	}
	for start(n+1) <= at {
		n++
	}
	return n
}

// Between is the starts of the windows with these numbers, in order. A day that its zone skipped has no window.
func (c Calendar) Between(first, last int) []algebra.Micros {
	windows := make([]algebra.Micros, 0, max(last-first+1, 0))
	start := c.starts()
	for n := first; n <= last; n++ {
		at := start(n)
		if at > algebra.Max {
			break
		}
		if len(windows) == 0 || at > windows[len(windows)-1] {
			windows = append(windows, at)
		}
	}
	return windows
}

// instant is when it is a local time in a zone. The local time is as if in UTC. If a change of the zone's offset makes it occur
// twice or not at all, it is the later of the two readings, as in Postgres.
func instant(wall time.Time, loc *time.Location) algebra.Micros {
	local := wall.Unix()
	year, month, day := wall.Date()
	hour, minute, second := wall.Clock()
	t := time.Date(year, month, day, hour, minute, second, 0, loc)
	from, until := t.ZoneBounds()
	for _, edge := range []time.Time{from, until} {
		if edge.IsZero() {
			continue
		}
		_, before := edge.Add(-time.Second).Zone()
		_, after := edge.Zone()
		x, y := local-int64(before), local-int64(after)
		if (x < edge.Unix()) != (y < edge.Unix()) {
			return algebra.Micros(max(x, y) * 1e6)
		}
	}
	return algebra.At(t)
}

var locations sync.Map // *time.Location by name

// Location is time.LoadLocation with a cache: LoadLocation reads the zone's file each time. It takes one spelling of a zone, or the cache would
// grow with those that callers invent, and none with leap seconds, which Postgres has not.
func Location(zone string) (*time.Location, error) {
	if loc, found := locations.Load(zone); found {
		return loc.(*time.Location), nil
	}
	if path.Clean(zone) != zone || strings.HasPrefix(zone, "right/") {
		return nil, fmt.Errorf("%q is not written as in pg_timezone_names", zone)
	}
	loc, err := time.LoadLocation(zone)
	if err == nil {
		locations.Store(zone, loc)
	}
	return loc, err
}

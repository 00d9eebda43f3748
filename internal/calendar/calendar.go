// Package calendar works out when the windows of a calendar begin: days, weeks, months, quarters and years in a time zone. It
// reads times as Postgres does (_ratelimit_windows), so that Go and SQL agree if their zone files do.
package calendar

import (
	"sync"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Calendar is a sequence of windows. It is valid if Unit is one of Units, Location loads Zone, and Anchor is a date. The zero
// value is no calendar.
type Calendar struct {
	Unit   string
	Zone   string // as for time.LoadLocation
	Anchor string // a date on which a window begins, as 2006-01-02
}

// Units are the units of the calendar.
var Units = []string{"day", "week", "month", "quarter", "year"}

// step is the unit's length in months or in days.
func (c Calendar) step() (months, days int) {
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

// Start is the start of a window: midnight in the zone, on a date that is whole units from the anchor. In a month with
// fewer days, it is the month's last day. The window that begins on the anchor has number 0.
func (c Calendar) Start(number int) algebra.Micros {
	anchor, _ := time.Parse(time.DateOnly, c.Anchor)
	loc, err := Location(c.Zone)
	if err != nil {
		panic(err) // never: the zone was loaded when the limit was made
	}
	year, month, day := anchor.Date()
	months, days := c.step()
	if months == 0 {
		return midnight(year, month, day+number*days, loc)
	}
	month += time.Month(number * months)
	last := time.Date(year, month+1, 0, 0, 0, 0, 0, time.UTC).Day()
	return midnight(year, month, min(day, last), loc)
}

// Number is the number of the window that contains an instant. If several windows begin together, it is the last of them.
func (c Calendar) Number(at algebra.Micros) (n int) {
	anchor, _ := time.Parse(time.DateOnly, c.Anchor)
	now := at.Time()
	// An estimate in UTC, which is at most two windows wrong.
	if months, days := c.step(); months > 0 {
		n = (12*(now.Year()-anchor.Year()) + int(now.Month()-anchor.Month())) / months
	} else {
		n = int((at - algebra.At(anchor)) / algebra.Micros((24*time.Hour).Microseconds()*int64(days)))
	}
	for c.Start(n) > at {
		n--
	}
	for c.Start(n+1) <= at {
		n++
	}
	return n
}

// Between is the starts of the windows with these numbers, in order. A day that its zone skipped has no window.
func (c Calendar) Between(first, last int) []algebra.Micros {
	windows := make([]algebra.Micros, 0, max(last-first+1, 0))
	for n := first; n <= last; n++ {
		at := c.Start(n)
		if at > algebra.Max {
			break
		}
		if len(windows) == 0 || at > windows[len(windows)-1] {
			windows = append(windows, at)
		}
	}
	return windows
}

// midnight is the first instant of a day. If a change of the zone's offset makes midnight occur twice or not at all, it is
// the later of the two readings, as in Postgres.
func midnight(year int, month time.Month, day int, loc *time.Location) algebra.Micros {
	local := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix()
	t := time.Date(year, month, day, 0, 0, 0, 0, loc)
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

// Location is time.LoadLocation with a cache: LoadLocation reads the zone's file each time.
func Location(zone string) (*time.Location, error) {
	if loc, found := locations.Load(zone); found {
		return loc.(*time.Location), nil
	}
	loc, err := time.LoadLocation(zone)
	if err == nil {
		locations.Store(zone, loc)
	}
	return loc, err
}

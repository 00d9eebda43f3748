package ratelimit

import (
	"fmt"
	"strings"
	"sync"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
)

// Unit is a unit of the calendar, for [CalendarWindow].
type Unit string

// The units of the calendar.
const (
	Day     Unit = "day"
	Week    Unit = "week"
	Month   Unit = "month"
	Quarter Unit = "quarter"
	Year    Unit = "year"
)

// CalendarWindow defines a limit that refills by rate tokens at the start of each day, week, month, quarter or year, up
// to its capacity. With the default capacity, it grants at most rate tokens in each window; with a rate of 0, nothing:
// see [DeniedError]. Reservations may owe at most the tokens of 100 windows, or [MaxReserved] if that is less.
//
// A window begins at midnight in the [Zone], on Mondays or on the first day of the other units, or by [Anchor]. Where a
// zone skips that time, or has it twice, it is the later instant, as in Postgres.
func CalendarWindow(name string, rate float64, unit Unit, options ...Option) Limit {
	return define(Config{Kind: kindCalendarWindow, Name: name, Rate: &rate, Period: "1 " + string(unit)}, options)
}

// Zone sets the time zone of a calendar window: "UTC", the default, or a name with a slash, such as "Europe/Berlin".
// (Names without a slash mean other zones in Postgres.) If Go cannot load it, the definition is [ErrInvalid]: without
// zone files, import time/tzdata.
func Zone(zone string) Option { return option{"Zone", func(c *Config) { c.Zone = zone }} }

// Anchor sets when one of a calendar's windows begins: "2006-01-02", "2006-01-02 15:04" or "2006-01-02 15:04:05", in
// the local time of the [Zone]. The others begin on the same day of the week, month, quarter or year, at that time; in
// a month with fewer days, on the last. The default, and "", is "2001-01-01", a Monday. The year is 1 to 9999.
func Anchor(local string) Option { return option{"Anchor", func(c *Config) { c.Anchor = local }} }

const (
	defaultZone   = "UTC"
	defaultAnchor = "2001-01-01" // a Monday

	// maxAhead bounds, in windows, how far reservations may reach ahead.
	maxAhead = 100
)

// units are the periods of a calendar window, as text.
func units() (periods []string) {
	for _, unit := range calendar.Units {
		periods = append(periods, "1 "+unit)
	}
	return periods
}

// zoneMistakes returns what is wrong in a calendar's zone.
func zoneMistakes(c calendar.Calendar) (mistakes []string) {
	mistake := func(format string, args ...any) { mistakes = append(mistakes, fmt.Sprintf(format, args...)) }
	if c.Zone != "UTC" && !strings.Contains(c.Zone, "/") {
		mistake("zone %q is neither \"UTC\" nor a name with a slash, such as \"Europe/Berlin\"", c.Zone)
	} else if _, err := calendar.Location(c.Zone); err != nil {
		mistake("zone: %v (on a machine without zone files, import time/tzdata)", err)
	}
	return mistakes
}

// list is the windows around a time of the process's clock. It is kept for as long as that time is in the same window.
type list struct {
	windows     *[]algebra.Micros
	from, until algebra.Micros
}

type listKey struct {
	calendar.Calendar
	back, ahead int
}

// maxLists bounds how many lists are kept. When there are more, all are forgotten, and made again where they are
// needed. One takes some microseconds.
const maxLists = 20_000

var lists struct {
	sync.RWMutex
	byKey map[listKey]list
}

// listAround is the begins of the windows around now: at least `back` before the one of now, and `ahead` after it.
func listAround(c calendar.Calendar, now algebra.Micros, back, ahead int) *[]algebra.Micros {
	key := listKey{c, back, ahead}
	lists.RLock()
	l, found := lists.byKey[key]
	lists.RUnlock()
	if found && l.from <= now && now < l.until {
		return l.windows
	}
	n := c.Number(now)
	windows := c.Between(n-back-1, n+ahead+1)
	l = list{windows: &windows, from: c.Start(n), until: c.Start(n + 1)}
	lists.Lock()
	defer lists.Unlock()
	if lists.byKey == nil || len(lists.byKey) >= maxLists {
		lists.byKey = map[listKey]list{}
	}
	lists.byKey[key] = l
	return l.windows
}

// onCalendar reports whether the limit is a calendar window.
func (l Limit) onCalendar() bool { return l.calendar.Unit != "" }

// maxOwed is how many tokens reservations may owe.
func (l Limit) maxOwed() float64 {
	if l.onCalendar() {
		return min(l.maxReserved, maxAhead*l.numbers.Rate)
	}
	return l.maxReserved
}

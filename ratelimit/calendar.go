package ratelimit

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
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

// CalendarWindow defines a limit that refills by rate tokens at the start of each day, week, month, quarter or year, up to
// its capacity. With the default capacity, the limit grants at most rate tokens in each window.
//
// A window begins at midnight in the zone of [In], which is UTC by default. Weeks begin on Mondays, and the other units on
// their first day, unless [Anchor] says otherwise. Where a zone skips midnight, or has it twice, the window begins at the later
// of the two instants that midnight could mean, as in Postgres.
//
// The zone and the anchor may differ from key to key: for example, each customer's month begins on the day of its contract.
// Keep them the same for one key. With another zone or anchor, the windows that begin by the new one refill as well.
//
// Reservations may owe at most the tokens of 100 windows, or [MaxReserved] if that is less.
//
// The zone files of Go decide for calls of this package, and those of Postgres for calls of the SQL functions. The clock of
// the database decides, as for all limits, as long as the clock of the process is less than a window away. If it is further
// away, too much is denied, and never too much granted.
//
// A definition with a mistake (see [New]) is reported by [Limit.Validate] and by every call that uses it.
func CalendarWindow(name string, rate float64, unit Unit, options ...Option) Limit {
	return define(Config{Kind: KindCalendarWindow, Name: name, Rate: rate, Unit: unit}, options)
}

// In sets the time zone of a calendar window: "UTC", or a name with a slash, such as "Europe/Berlin". The default is UTC. Names
// without a slash mean other zones in Postgres. If Go cannot load the zone, the definition is [ErrInvalid]: on a machine without
// zone files, import time/tzdata.
func In(zone string) Option { return func(c *Config) { c.Zone = zone } }

// Anchor sets a date on which one of a calendar's windows begins, as "2006-01-02". It sets the day of the week, of the month, of
// the quarter or of the year on which the others begin. In a month with fewer days, that is the last day: with "2026-01-31",
// months begin on 31 January, 28 February, 31 March. The default is "2001-01-01", a Monday.
func Anchor(date string) Option { return func(c *Config) { c.Anchor = date } }

// calendar is what the midnights of a calendar window depend on. It is the zero value for other kinds.
type calendar struct {
	unit         Unit
	zone, anchor string
}

const (
	defaultZone   = "UTC"
	defaultAnchor = "2001-01-01" // a Monday

	// maxAhead bounds, in windows, how far reservations may reach ahead. It also bounds how far back the windows are listed.
	maxAhead = 100
	// maxWait bounds, in windows, how far ahead an instant is worked out.
	maxWait = 40_000
)

// validate returns the mistakes.
func (c calendar) validate() (mistakes []string) {
	mistake := func(format string, args ...any) { mistakes = append(mistakes, fmt.Sprintf(format, args...)) }
	if c.longest() == 0 {
		mistake("unit %q is not one of %q, %q, %q, %q and %q", c.unit, Day, Week, Month, Quarter, Year)
	}
	if c.zone != "UTC" && !strings.Contains(c.zone, "/") {
		mistake("zone %q is neither \"UTC\" nor a name with a slash, such as \"Europe/Berlin\"", c.zone)
	} else if _, err := location(c.zone); err != nil {
		mistake("zone: %v (on a machine without zone files, import time/tzdata)", err)
	}
	if anchor, err := time.Parse(time.DateOnly, c.anchor); err != nil || anchor.Year() < 1 {
		mistake("anchor %q is not a date of the years 1 to 9999, such as %q", c.anchor, "2006-01-31")
	}
	return mistakes
}

// step is the unit's length in months or in days.
func (c calendar) step() (months, days int) {
	switch c.unit {
	case Day:
		return 0, 1
	case Week:
		return 0, 7
	case Month:
		return 1, 0
	case Quarter:
		return 3, 0
	case Year:
		return 12, 0
	}
	return 0, 0
}

// longest is the longest that a window can be, changes of the zone's offset included. It is 0 for no unit.
func (c calendar) longest() time.Duration {
	const day = 24 * time.Hour
	return map[Unit]time.Duration{Day: 2 * day, Week: 8 * day, Month: 32 * day, Quarter: 93 * day, Year: 367 * day}[c.unit]
}

// interval is the unit as Postgres reads it.
func (c calendar) interval() string {
	months, days := c.step()
	return fmt.Sprintf("%d months %d days", months, days)
}

// start is the begin of a window. The one that begins on the anchor has number 0.
func (c calendar) start(number int) algebra.Micros {
	anchor, _ := time.Parse(time.DateOnly, c.anchor)
	loc, err := location(c.zone)
	if err != nil {
		panic(err) // never: validate has loaded it
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

// number is the number of the window in which an instant lies. Of windows that begin together, it is the last.
func (c calendar) number(at algebra.Micros) (n int) {
	anchor, _ := time.Parse(time.DateOnly, c.anchor)
	now := at.Time()
	// An estimate in UTC, which is at most two windows wrong.
	if months, days := c.step(); months > 0 {
		n = (12*(now.Year()-anchor.Year()) + int(now.Month()-anchor.Month())) / months
	} else {
		n = int((at - algebra.At(anchor)) / algebra.Micros(24*time.Hour/time.Microsecond) / algebra.Micros(days))
	}
	for c.start(n) > at {
		n--
	}
	for c.start(n+1) <= at {
		n++
	}
	return n
}

// between is the begins of the windows with these numbers, in order. A day that its zone skipped has no window.
func (c calendar) between(first, last int) []algebra.Micros {
	windows := make([]algebra.Micros, 0, last-first+1)
	for n := first; n <= last; n++ {
		at := c.start(n)
		if at > algebra.Max {
			break
		}
		if len(windows) == 0 || at > windows[len(windows)-1] {
			windows = append(windows, at)
		}
	}
	return windows
}

// list is the windows around a time of the process's clock. It is kept for as long as that time is in the same window.
type list struct {
	windows     *[]algebra.Micros
	from, until algebra.Micros
}

type listKey struct {
	calendar
	back, ahead int
}

// maxLists bounds how many lists are kept. A customer's billing day and zone make one of a few thousand.
const maxLists = 20_000

var lists struct {
	sync.RWMutex
	byKey map[listKey]list
}

// around is the begins of the windows around now: at least `back` before the one of now, and `ahead` after it.
func (c calendar) around(now algebra.Micros, back, ahead int) *[]algebra.Micros {
	key := listKey{c, back, ahead}
	lists.RLock()
	l, found := lists.byKey[key]
	lists.RUnlock()
	if found && l.from <= now && now < l.until {
		return l.windows
	}
	n := c.number(now)
	windows := c.between(n-back-1, n+ahead+1)
	l = list{windows: &windows, from: c.start(n), until: c.start(n + 1)}
	lists.Lock()
	defer lists.Unlock()
	if lists.byKey == nil || len(lists.byKey) >= maxLists {
		lists.byKey = map[listKey]list{}
	}
	lists.byKey[key] = l
	return l.windows
}

// midnight is the first instant of a day. Where the zone's offset changes such that midnight comes twice or not at all, it is
// the later of the two instants that it could mean: the reading of Postgres.
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

// location is time.LoadLocation, which reads the zone's file each time.
func location(zone string) (*time.Location, error) {
	if loc, found := locations.Load(zone); found {
		return loc.(*time.Location), nil
	}
	loc, err := time.LoadLocation(zone)
	if err == nil {
		locations.Store(zone, loc)
	}
	return loc, err
}

// maxOwed is how many tokens reservations may owe.
func (l Limit) maxOwed() float64 {
	if l.calendar != (calendar{}) {
		return min(l.maxReserved, maxAhead*l.numbers.Rate)
	}
	return l.maxReserved
}

// windows is the list of a calendar's windows for a call. A call that reserves or refunds needs those of the reservations, too.
func (l Limit) windows(now algebra.Micros, reserve bool) *[]algebra.Micros {
	saved, ahead := l.numbers.Capacity, 2
	if !math.IsInf(l.maxReserved, 1) {
		saved += l.maxReserved
	}
	if reserve {
		ahead += int(math.Ceil(l.maxOwed() / l.numbers.Rate))
	}
	return l.calendar.around(now, int(min(math.Ceil(saved/l.numbers.Rate)+1, maxAhead)), ahead)
}

// reaching is the demand's numbers, with a list of windows that reaches to where its tokens will be there.
func (d *demand) reaching(rows []algebra.Row, now algebra.Micros) algebra.Limit {
	numbers := d.numbers
	if numbers.Windows == nil || numbers.Unknown(now) {
		return numbers
	}
	windows := *numbers.Windows
	missing := int(min(max(math.Ceil((d.count-numbers.Total(rows, now))/numbers.Rate), 0)+1, maxWait))
	if ahead := numbers.Listed(now); missing > ahead {
		last := d.limit.calendar.number(windows[len(windows)-1])
		longer := append(windows[:len(windows):len(windows)], d.limit.calendar.between(last+1, last+missing-ahead)...)
		numbers.Windows = &longer
	}
	return numbers
}

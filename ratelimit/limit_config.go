package ratelimit

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
)

// Config is the definition of a limit as data, for configuration files; [Config.Limit] makes the limit. In Rate,
// Capacity and MaxReserved, nil means unset, which is not the same as 0. docs/concepts.md has its JSON.
type Config struct {
	Name        string     `json:"name"`                  // required
	Kind        string     `json:"kind"`                  // required: "token bucket", "fixed window", "calendar window", "slots" or "unlimited"
	Rate        *float64   `json:"rate,omitempty"`        // tokens per period; required; 0: nothing is granted
	Period      string     `json:"period,omitempty"`      // required: see Config.Limit
	Capacity    *float64   `json:"capacity,omitempty"`    // tokens; nil: the rate
	MaxReserved *float64   `json:"maxReserved,omitempty"` // tokens; nil: no bound
	Start       *time.Time `json:"start,omitempty"`       // only for a fixed window; nil: by a hash of the key
	Shards      int        `json:"shards,omitempty"`      // 0 means 1: not sharded
	Zone        string     `json:"zone,omitempty"`        // only for a calendar window: see Zone; "": UTC
	Anchor      string     `json:"anchor,omitempty"`      // only for a calendar window: see Anchor; "": "2001-01-01"
	Varies      string     `json:"varies,omitempty"`      // a duration: see Varies; "": no key has numbers of its own
}

// Limit makes the limit. It returns an error that matches [ErrInvalid], and names every mistake, unless all of this
// holds:
//
//   - The name is valid UTF-8 without NUL, 1 to 255 bytes long.
//   - The kind is one of [Config]. "slots" go with a name, a capacity and varies "0s" alone, and "unlimited" with a
//     name.
//   - The rate is 0 or 1e-15 <= rate <= 1e15. With a rate of 0, capacity and maxReserved are unset or 0.
//   - The period of a token bucket or fixed window is a duration: "500ms", "1m", "1h30m", "1d" (24 hours), "1w": whole
//     microseconds, at least 100 ms.
//   - The period of a calendar window is "1 day", "1 week", "1 month", "1 quarter" or "1 year", with a [Zone] and an
//     [Anchor].
//   - Capacity and maxReserved are 0, or within the bounds of the rate.
//   - Start, only of a fixed window, is between the years 1 and 9999, not the zero time, and a whole second.
//   - 0 <= shards <= 100; 0 means 1.
//   - Varies is a duration. The limit's numbers fill a row from 0 within it.
func (c Config) Limit() (Limit, error) { return c.limit(nil) }

// limit is Limit, with what else is wrong in the definition.
func (c Config) limit(mistakes []string) (Limit, error) {
	l := Limit{name: c.Name, maxReserved: math.Inf(1), shards: max(c.Shards, 1)}
	badName := checkText("name", c.Name, maxNameLen)
	if badName != nil {
		mistakes = append(mistakes, badName.Error())
	}
	switch c.Kind {
	case kindUnlimited:
		l.numbers.Rate, l.numbers.Capacity = math.Inf(1), math.Inf(1)
		mistakes = append(mistakes, c.notUnlimited()...)
	case kindSlots:
		mistakes = append(mistakes, l.setSlots(c)...)
	case kindTokenBucket, kindFixedWindow, kindCalendarWindow:
		mistakes = append(mistakes, l.setClock(c)...)
		mistakes = append(mistakes, l.setNumbers(c)...)
		mistakes = append(mistakes, l.setVaries(c, mistakes == nil)...)
	default:
		kinds := []string{kindTokenBucket, kindFixedWindow, kindCalendarWindow, kindSlots, kindUnlimited}
		mistakes = append(mistakes, fmt.Sprintf("kind %q is not one of %q", c.Kind, kinds))
		mistakes = append(mistakes, l.setNumbers(c)...)
	}
	if mistakes != nil {
		text := strings.Join(mistakes, "; ")
		if badName == nil { // otherwise the name may be of any length, or not even UTF-8
			text = fmt.Sprintf("limit %q: %s", c.Name, text)
		}
		l.err = fmt.Errorf("%w: %s", ErrInvalid, text)
	}
	return l, l.err
}

// setClock sets when the limit refills, and returns what is wrong in it.
func (l *Limit) setClock(c Config) (mistakes []string) {
	mistake := func(format string, args ...any) { mistakes = append(mistakes, fmt.Sprintf(format, args...)) }
	l.numbers.Window = c.Kind != kindTokenBucket
	fixed, unit, err := calendar.ParsePeriod(c.Period)
	switch onCalendar := c.Kind == kindCalendarWindow; {
	case c.Period == "":
		mistake("period is missing")
	case err != nil && onCalendar, unit == "" && onCalendar:
		mistake("period %q of a %s is not one of %q (for a fixed length of time, the kind is %q)", c.Period, c.Kind, units(), kindFixedWindow)
	case err != nil:
		mistake("period %q is not a duration, such as \"1h30m\", \"1d\" or \"1w\"", c.Period)
	case unit != "" && !onCalendar:
		mistake("period %q of a %s is not a duration, such as \"1d\" for 24 hours (for a %s, the kind is %q)", c.Period, c.Kind, unit, kindCalendarWindow)
	case !onCalendar && fixed > 0 && fixed < minPeriod: // most often a bare number, which is nanoseconds
		mistake("period %v is less than %v (a bare number in Go is nanoseconds: write 60*time.Second; for 100 a second one by one: rate 100, period 1s, capacity 1)", fixed, minPeriod)
	case !onCalendar && (fixed <= 0 || fixed%time.Microsecond != 0):
		mistake("period %v is not a positive whole number of microseconds", fixed)
	}
	l.numbers.Period = fixed
	if c.Kind == kindCalendarWindow {
		l.calendar = calendar.Calendar{Unit: unit, Zone: cmp.Or(c.Zone, defaultZone), Anchor: cmp.Or(c.Anchor, defaultAnchor)}
		l.numbers.Period = l.calendar.Longest()
		mistakes = append(mistakes, zoneMistakes(l.calendar)...)
		if anchor, err := calendar.ParseAnchor(l.calendar.Anchor); err != nil {
			mistake("%v", err)
		} else {
			l.calendar.Anchor = calendar.AnchorText(anchor) // equal anchors have equal texts
		}
	} else if c.Zone != "" || c.Anchor != "" {
		mistake("only a %s has a zone and an anchor", kindCalendarWindow)
	}
	if c.Start == nil {
		return mistakes
	}
	l.hasStart, l.start = true, c.Start.UTC().Round(0) // without a monotonic clock reading, which would be compared
	if c.Kind != kindFixedWindow {
		mistake("only a %s has a start", kindFixedWindow)
	}
	if year := l.start.Year(); year < 1 || year > 9999 {
		mistake("start %v is not between the years 1 and 9999", c.Start)
	}
	if l.start.IsZero() || l.start.Nanosecond() != 0 {
		mistake("start %v is the zero time, or has a fraction of a second: all programs need the same instant, so write a constant one, not time.Now()", c.Start)
	}
	if mistakes == nil {
		l.numbers.Start = algebra.Min + (algebra.At(l.start)-algebra.Min)%algebra.Micros(l.numbers.Period.Microseconds())
	}
	return mistakes
}

// setVaries sets within which time the numbers of any key fill a row, and returns what is wrong in it. valid: the
// numbers are.
func (l *Limit) setVaries(c Config, valid bool) (mistakes []string) {
	if c.Varies == "" {
		return nil
	}
	idle, unit, err := calendar.ParsePeriod(c.Varies)
	if err != nil || unit != "" || idle < time.Microsecond || idle%time.Microsecond != 0 {
		return []string{fmt.Sprintf("varies %q is not a duration of whole microseconds, such as \"1h30m\", \"1d\" or \"1w\"", c.Varies)}
	}
	l.varies = idle
	if n := l.numbers; valid && n.Rate > 0 {
		periods := n.Capacity / n.Rate
		if n.Window {
			periods = math.Ceil(periods)
		}
		seconds := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e6 }
		if periods*seconds(n.Period) > seconds(idle) { // rounded as by ratelimit._validate_varies
			return []string{fmt.Sprintf("rate %v and capacity %v may need %.6g hours to fill a row, but the limit varies within %s",
				n.Rate, n.Capacity, periods*n.Period.Hours(), c.Varies)}
		}
	}
	return nil
}

// setNumbers sets the limit's numbers, and returns what is wrong in them.
func (l *Limit) setNumbers(c Config) (mistakes []string) {
	mistake := func(format string, args ...any) { mistakes = append(mistakes, fmt.Sprintf(format, args...)) }
	if c.Rate == nil {
		mistake("rate is missing")
	} else if l.numbers.Rate, l.numbers.Capacity = *c.Rate, *c.Rate; !countable(*c.Rate) {
		mistake("rate %v is neither 0 nor between %v and %v", *c.Rate, algebra.MinTokens, algebra.MaxTokens)
	}
	for _, optional := range []struct {
		field string
		from  *float64
		to    *float64
	}{{"capacity", c.Capacity, &l.numbers.Capacity}, {"maxReserved", c.MaxReserved, &l.maxReserved}} {
		if optional.from == nil {
			continue
		}
		*optional.to = *optional.from
		if !countable(*optional.to) {
			mistake("%s %v is neither 0 nor between %v and %v", optional.field, *optional.to, algebra.MinTokens, algebra.MaxTokens)
		} else if *optional.to != 0 && c.Rate != nil && *c.Rate == 0 {
			mistake("%s %v with a rate of 0, which grants nothing", optional.field, *optional.to)
		}
	}
	if c.Shards < 0 || c.Shards > maxShards {
		mistake("%d shards are not between 1 and %d", c.Shards, maxShards)
	}
	return mistakes
}

// notUnlimited returns what an unlimited limit does not have.
func (c Config) notUnlimited() (mistakes []string) {
	for field, set := range map[string]bool{
		"rate": c.Rate != nil, "period": c.Period != "", "capacity": c.Capacity != nil, "maxReserved": c.MaxReserved != nil,
		"start": c.Start != nil, "shards": c.Shards != 0, "zone": c.Zone != "", "anchor": c.Anchor != "", "varies": c.Varies != "",
	} {
		if set {
			mistakes = append(mistakes, fmt.Sprintf("%s is set, but kind %q has only a name", field, c.Kind))
		}
	}
	slices.Sort(mistakes)
	return mistakes
}

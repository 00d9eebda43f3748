package ratelimit

import (
	"cmp"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/calendar"
)

// Config is the definition of a limit as data, for [New] and for configuration files. In Capacity and MaxReserved, nil
// means unset, which is not the same as 0.
//
//	{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1m", "capacity": 20}
type Config struct {
	Name        string     `json:"name"`                  // required
	Kind        Kind       `json:"kind"`                  // required
	Rate        float64    `json:"rate"`                  // tokens per period; required
	Period      Duration   `json:"period,omitzero"`       // required; not for a calendar window
	Capacity    *float64   `json:"capacity,omitempty"`    // tokens; nil: the rate
	MaxReserved *float64   `json:"maxReserved,omitempty"` // tokens; nil: no bound
	Start       *time.Time `json:"start,omitempty"`       // only for a fixed window; nil: by a hash of name and key
	Shards      int        `json:"shards,omitempty"`      // 0 means 1: not sharded

	// Only for a calendar window: see CalendarWindow, In and Anchor.
	Unit   Unit   `json:"unit,omitempty"`   // required
	Zone   string `json:"zone,omitempty"`   // "": UTC
	Anchor string `json:"anchor,omitempty"` // "": "2001-01-01"
}

// New makes a limit from a Config. It returns an error that matches [ErrInvalid], and names every mistake, unless all of
// this holds:
//
//   - The name is valid UTF-8 without NUL, 1 to 255 bytes long.
//   - The kind is one of the three kinds.
//   - 1e-15 <= rate <= 1e15.
//   - The period is a whole number of microseconds, at least one. A calendar window has none, but a unit, a zone and an
//     anchor: see [CalendarWindow], [In] and [Anchor].
//   - Capacity and maxReserved are 0, or within the bounds of the rate.
//   - Start is between the years 1 and 9999, and is only set for a fixed window.
//   - 0 <= shards <= 100; 0 means 1.
func New(c Config) (Limit, error) {
	l := Limit{
		name:        c.Name,
		maxReserved: math.Inf(1),
		shards:      max(c.Shards, 1),
		numbers: algebra.Limit{
			Rate: c.Rate, Period: time.Duration(c.Period), Capacity: c.Rate, Window: c.Kind == KindFixedWindow || c.Kind == KindCalendarWindow,
		},
	}
	if c.Capacity != nil {
		l.numbers.Capacity = *c.Capacity
	}
	if c.MaxReserved != nil {
		l.maxReserved = *c.MaxReserved
	}
	if c.Start != nil {
		l.hasStart, l.start = true, c.Start.UTC()
	}

	if c.Kind == KindCalendarWindow {
		l.calendar = calendar.Calendar{Unit: string(c.Unit), Zone: cmp.Or(c.Zone, defaultZone), Anchor: cmp.Or(c.Anchor, defaultAnchor)}
		l.numbers.Period = l.calendar.Longest()
	}

	var mistakes []string
	mistake := func(format string, args ...any) { mistakes = append(mistakes, fmt.Sprintf(format, args...)) }
	badName := checkText("name", c.Name, maxNameLen)
	if badName != nil {
		mistake("%v", badName)
	}
	switch c.Kind {
	case KindTokenBucket, KindFixedWindow:
		if c.Unit != "" || c.Zone != "" || c.Anchor != "" {
			mistake("only a %s has a unit, a zone and an anchor", KindCalendarWindow)
		}
		if c.Period < Duration(time.Microsecond) || time.Duration(c.Period)%time.Microsecond != 0 {
			mistake("period %v is not a positive whole number of microseconds", time.Duration(c.Period))
		}
	case KindCalendarWindow:
		mistakes = append(mistakes, calendarMistakes(l.calendar)...)
		if c.Period != 0 {
			mistake("a %s has a unit and no period", c.Kind)
		}
	default:
		mistake("kind %q is not %q, %q or %q", c.Kind, KindTokenBucket, KindFixedWindow, KindCalendarWindow)
	}
	if c.Rate == 0 || !countable(c.Rate) {
		mistake("rate %v is not between %v and %v", c.Rate, algebra.MinTokens, algebra.MaxTokens)
	}
	if c.Capacity != nil && !countable(l.numbers.Capacity) {
		mistake("capacity %v is neither 0 nor between %v and %v", l.numbers.Capacity, algebra.MinTokens, algebra.MaxTokens)
	}
	if c.MaxReserved != nil && !countable(l.maxReserved) {
		mistake("maxReserved %v is neither 0 nor between %v and %v", l.maxReserved, algebra.MinTokens, algebra.MaxTokens)
	}
	if c.Start != nil && c.Kind != KindFixedWindow {
		mistake("only a %s has a start", KindFixedWindow)
	}
	if c.Start != nil && !(c.Start.UTC().Year() >= 1 && c.Start.UTC().Year() <= 9999) {
		mistake("start %v is not between the years 1 and 9999", c.Start)
	}
	if c.Shards < 0 || c.Shards > maxShards {
		mistake("%d shards are not between 1 and %d", c.Shards, maxShards)
	}
	if mistakes != nil {
		text := strings.Join(mistakes, "; ")
		if badName == nil { // otherwise the name may be of any length, or not even UTF-8
			text = fmt.Sprintf("limit %q: %s", c.Name, text)
		}
		l.err = fmt.Errorf("%w: %s", ErrInvalid, text)
		return l, l.err
	}
	if l.hasStart {
		l.numbers.Start = l.gridStart(algebra.At(l.start) - algebra.Min)
	}
	return l, nil
}

// Duration is a time.Duration whose text form is that of time.ParseDuration: "1m30s".
type Duration time.Duration

// MarshalText implements [encoding.TextMarshaler].
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = Duration(parsed)
	return err
}

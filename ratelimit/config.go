package ratelimit

import (
	"fmt"
	"math"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Config is the definition of a limit as data, for [New]: what a configuration file holds. Capacity and MaxReserved tell
// unset (nil) from zero.
//
//	{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1m", "capacity": 20}
type Config struct {
	Name        string     `json:"name"`                  // required
	Kind        Kind       `json:"kind"`                  // required
	Rate        float64    `json:"rate"`                  // tokens per period; required
	Period      Duration   `json:"period"`                // required
	Capacity    *float64   `json:"capacity,omitempty"`    // tokens; nil: the rate
	MaxReserved *float64   `json:"maxReserved,omitempty"` // tokens; nil: no bound
	Start       *time.Time `json:"start,omitempty"`       // of a fixed window; nil: by hash of name and key
	Shards      int        `json:"shards,omitempty"`      // 0: 1, not sharded
}

// New makes a limit from its definition as data. It returns an error that matches [ErrInvalid] unless
//
//   - the name is valid UTF-8 without NUL, 1 to 255 bytes long,
//   - 1e-15 <= rate <= 1e15,
//   - the period is a whole number of microseconds, at least one,
//   - capacity and maxReserved are 0 or within the same bounds,
//   - start is between the years 1 and 9999, and only there for a fixed window,
//   - 0 <= shards <= 100 (0 is 1).
func New(c Config) (Limit, error) {
	l := Limit{
		name:        c.Name,
		maxReserved: math.Inf(1),
		shards:      max(c.Shards, 1),
		numbers: algebra.Limit{
			Rate: c.Rate, Period: time.Duration(c.Period), Capacity: c.Rate, Window: c.Kind == KindFixedWindow,
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

	if err := checkText("name", c.Name, maxNameLen); err != nil {
		l.err = fmt.Errorf("%w: %w", ErrInvalid, err)
		return l, l.err
	}
	wrong := func(format string, args ...any) (Limit, error) {
		l.err = fmt.Errorf("%w: limit %q: %s", ErrInvalid, c.Name, fmt.Sprintf(format, args...))
		return l, l.err
	}
	switch {
	case c.Kind != KindTokenBucket && c.Kind != KindFixedWindow:
		return wrong("kind %q is neither %q nor %q", c.Kind, KindTokenBucket, KindFixedWindow)
	case c.Rate == 0 || !countable(c.Rate):
		return wrong("rate %v is not between %v and %v", c.Rate, algebra.MinTokens, algebra.MaxTokens)
	case c.Period < Duration(time.Microsecond) || time.Duration(c.Period)%time.Microsecond != 0:
		return wrong("period %v is not a positive whole number of microseconds", time.Duration(c.Period))
	case !countable(l.numbers.Capacity):
		return wrong("capacity %v is neither 0 nor between %v and %v", l.numbers.Capacity, algebra.MinTokens, algebra.MaxTokens)
	case c.MaxReserved != nil && !countable(l.maxReserved):
		return wrong("maxReserved %v is neither 0 nor between %v and %v", l.maxReserved, algebra.MinTokens, algebra.MaxTokens)
	case c.Start != nil && c.Kind != KindFixedWindow:
		return wrong("a token bucket has no start")
	case c.Start != nil && !(c.Start.UTC().Year() >= 1 && c.Start.UTC().Year() <= 9999):
		return wrong("start %v is not between the years 1 and 9999", c.Start)
	case c.Shards < 0 || c.Shards > maxShards:
		return wrong("%d shards are not between 1 and %d", c.Shards, maxShards)
	}
	if l.hasStart {
		l.numbers.Start = l.gridStart(algebra.At(l.start) - algebra.Min)
	}
	return l, nil
}

// Duration is a time.Duration that is written as time.ParseDuration reads it: "1m30s".
type Duration time.Duration

// MarshalText implements [encoding.TextMarshaler].
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = Duration(parsed)
	return err
}

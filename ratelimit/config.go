package ratelimit

import "time"

// Config is the definition of a limit as data, for [New]: what a configuration file holds. Capacity and MaxReserved tell
// unset (nil) from zero.
//
//	{"name": "sendMessage", "kind": "token bucket", "rate": 10, "period": "1m", "capacity": 20}
type Config struct {
	Name        string     `json:"name"`
	Kind        Kind       `json:"kind"`                  // required
	Rate        float64    `json:"rate"`                  // tokens per period; required
	Period      Duration   `json:"period"`                // required
	Capacity    *float64   `json:"capacity,omitempty"`    // tokens; nil: the rate
	MaxReserved *float64   `json:"maxReserved,omitempty"` // tokens; nil: no bound
	Start       *time.Time `json:"start,omitempty"`       // of a fixed window; nil: by hash of name and key
	Shards      int        `json:"shards,omitempty"`      // 0: 1
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

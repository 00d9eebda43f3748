package ratelimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// UnmarshalJSON implements [json.Unmarshaler]. It also reads what ratelimit.publish does: max_reserved, and intervals
// such as "7 days". An unknown field, one that is there twice and a value of the wrong type match [ErrInvalid], and
// name the limit and the field. [Config.Limit] checks the values.
func (c *Config) UnmarshalJSON(text []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return fmt.Errorf("%w: a limit is a JSON object, such as {\"name\": ...}", ErrInvalid)
	}
	fields := map[string]struct {
		value any
		want  string
	}{
		"name": {&c.Name, "a string"}, "kind": {&c.Kind, "a string"},
		"rate": {&c.Rate, "a number"}, "period": {&c.Period, "a string, such as \"1m\", \"1d\" or \"1 month\""},
		"capacity": {&c.Capacity, "a number"}, "maxReserved": {&c.MaxReserved, "a number"},
		"start": {&c.Start, "an instant, such as \"2026-01-31T00:00:00Z\""}, "shards": {&c.Shards, "a whole number"},
		"zone": {&c.Zone, "a string"}, "anchor": {&c.Anchor, "a string, such as \"2026-01-31\" or \"2026-01-31 15:00\""},
		"varies": {&c.Varies, "a string, such as \"1d\" or \"32d\""},
	}
	seen := map[string]bool{}
	var mistakes []string
	for decoder.More() {
		token, err := decoder.Token()
		var value json.RawMessage
		if err = errors.Join(err, decoder.Decode(&value)); err != nil {
			return err // never: text is valid JSON
		}
		name, _ := token.(string)
		if name == "max_reserved" {
			name = "maxReserved"
		}
		field, known := fields[name]
		switch {
		case !known:
			mistakes = append(mistakes, fmt.Sprintf("unknown field %q", name))
		case seen[name]:
			mistakes = append(mistakes, fmt.Sprintf("%s is there twice", name))
		case json.Unmarshal(value, field.value) != nil:
			mistakes = append(mistakes, fmt.Sprintf("%s is not %s", name, field.want))
		}
		seen[name] = true
	}
	if mistakes == nil {
		c.Period, c.Varies = c.period(c.Period), sqlInterval.ReplaceAllString(c.Varies, "$1$2$3$4$5$6")
		return nil
	}
	return fmt.Errorf("%w: limit %q: %s", ErrInvalid, c.Name, strings.Join(mistakes, "; "))
}

// sqlInterval is a length of time as Postgres writes it, and in it what Go has.
var sqlInterval = regexp.MustCompile(`^([0-9]+) (?:(s)econd|(m)inute|(h)our|(d)ay|(w)eek)s?$`)

// period is a period in the spelling of [Config].
func (c *Config) period(text string) string {
	switch {
	case c.Kind != kindCalendarWindow:
		return sqlInterval.ReplaceAllString(text, "$1$2$3$4$5$6")
	case text == "7 days":
		return string("1 " + Week)
	case text == "3 months":
		return string("1 " + Quarter)
	}
	return text
}

// MarshalJSON implements [json.Marshaler]: a limit is its [Limit.Config], and an invalid one has only a name.
func (l Limit) MarshalJSON() ([]byte, error) {
	if l.Validate() != nil {
		return json.Marshal(map[string]string{"name": l.name})
	}
	return json.Marshal(l.Config())
}

// UnmarshalJSON implements [json.Unmarshaler]: it reads a [Config] and makes its limit, as [Config.Limit] does, or
// returns the error of either. What [Limit.MarshalJSON] has written of a valid definition is that definition again. A
// limit by [Limit.With] becomes a definition with its numbers. After an error, the limit is as it was.
func (l *Limit) UnmarshalJSON(text []byte) error {
	var c Config
	if err := c.UnmarshalJSON(text); err != nil {
		return err
	}
	limit, err := c.Limit()
	if err != nil {
		return err
	}
	*l = limit
	return nil
}

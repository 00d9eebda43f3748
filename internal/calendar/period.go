package calendar

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// ParsePeriod reads the period of a limit: a duration, such as "1h30m", "1d" or "1w", or a unit of the calendar, such as
// "1 month". In a duration, a day is 24 hours and a week is 7 days. It returns one of the two.
func ParsePeriod(text string) (fixed time.Duration, unit string, err error) {
	if unit, ok := strings.CutPrefix(text, "1 "); ok && slices.Contains(Units, unit) {
		return 0, unit, nil
	}
	rest := text
	for _, long := range []struct {
		letter string
		hours  int64
	}{{"w", 7 * 24}, {"d", 24}} {
		number, after, found := strings.Cut(rest, long.letter)
		if !found {
			continue
		}
		hours, err := time.ParseDuration(number + "h")
		if err != nil || strings.Trim(number, "0123456789.") != "" || hours > (math.MaxInt64-fixed)/time.Duration(long.hours) {
			return 0, "", fmt.Errorf("invalid period %q", text)
		}
		fixed, rest = fixed+hours*time.Duration(long.hours), after
	}
	if rest == "" && rest != text {
		return fixed, "", nil
	}
	short, err := time.ParseDuration(rest)
	if err != nil || rest != text && strings.ContainsAny(rest, "+-") || short > math.MaxInt64-fixed {
		return 0, "", fmt.Errorf("invalid period %q", text)
	}
	return fixed + short, "", nil
}

// PeriodText writes a duration for ParsePeriod, in days if it is whole days.
func PeriodText(d time.Duration) string {
	const day = 24 * time.Hour
	if d > 0 && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

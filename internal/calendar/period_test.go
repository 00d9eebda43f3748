package calendar

import (
	"math"
	"testing"
	"time"
)

func TestParsePeriod(t *testing.T) {
	const day = 24 * time.Hour
	for text, want := range map[string]time.Duration{
		"1m": time.Minute, "1h30m": 90 * time.Minute, "1.5h": 90 * time.Minute, "250ms": 250 * time.Millisecond,
		"1d": day, "7d": 7 * day, "1w": 7 * day, "2w": 14 * day, "1w2d": 9 * day, "1d12h": 36 * time.Hour, "0.5d": 12 * time.Hour,
		"1w1d1h1m1s": 8*day + time.Hour + time.Minute + time.Second,
		"106751d":    106751 * day, "106751d23h47m16.854775807s": math.MaxInt64, "15250w1d": 106751 * day,
		"-1m": -time.Minute, "0": 0,
	} {
		if fixed, unit, err := ParsePeriod(text); err != nil || unit != "" || fixed != want {
			t.Errorf("%q is %v, %q, %v, want %v", text, fixed, unit, err, want)
		}
	}
	for _, unit := range Units {
		if fixed, got, err := ParsePeriod("1 " + unit); err != nil || fixed != 0 || got != unit {
			t.Errorf("1 %s is %v, %q, %v", unit, fixed, got, err)
		}
	}
	for _, text := range []string{
		"", " ", "d", "w", "1", "1 d", "d1", "1D", "1d ", "month", "1 months", "3 months", "2 day", "1  day", "1 Month", "soon", "1d-5m", "-1d", "+1w",
		"1d1w", "1d1d", "1h1d", "1e1d", "106752d", "106751d23h47m16.854775808s", "15251w", "15250w2d", "9999999999w", "NaNd",
	} {
		if fixed, unit, err := ParsePeriod(text); err == nil {
			t.Errorf("%q is %v, %q", text, fixed, unit)
		}
	}
}

func TestAPeriodsTextIsShortAndReadBack(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Second: "1s", 10 * time.Second: "10s", time.Minute: "1m", 90 * time.Second: "1m30s", time.Hour: "1h", 90 * time.Minute: "1h30m",
		time.Hour + time.Second: "1h0m1s", 24 * time.Hour: "1d", 36 * time.Hour: "36h", 7 * 24 * time.Hour: "7d", time.Microsecond: "1µs",
		20 * time.Minute: "20m", 20 * time.Hour: "20h", 0: "0s", -time.Minute: "-1m", math.MaxInt64: "2562047h47m16.854775807s", math.MinInt64: "-2562047h47m16.854775808s",
	} {
		text := PeriodText(d)
		if again, _, err := ParsePeriod(text); text != want || again != d || err != nil {
			t.Errorf("%v is %q, want %q, and %v, %v again", d, text, want, again, err)
		}
	}
}

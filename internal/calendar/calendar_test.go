package calendar

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

func TestParseAnchor(t *testing.T) {
	for text, want := range map[string]string{ // the shortest text
		"2026-01-31": "", "0001-01-01": "", "9999-12-31": "", "2024-02-29": "",
		"2026-01-31 15:00": "", "2026-01-31 00:01": "", "9999-12-31 23:59": "",
		"2026-01-31 15:00:05": "", "2026-01-31 00:00:59": "", "9999-12-31 23:59:59": "",
		"2026-01-31 00:00": "2026-01-31", "2026-01-31 00:00:00": "2026-01-31", "2026-01-31 15:00:00": "2026-01-31 15:00",
	} {
		if want == "" {
			want = text
		}
		anchor, err := ParseAnchor(text)
		if err != nil || AnchorText(anchor) != want {
			t.Errorf("%q is %v, %q, %v, want %q", text, anchor, AnchorText(anchor), err, want)
		}
		if again, err := ParseAnchor(AnchorText(anchor)); err != nil || !again.Equal(anchor) {
			t.Errorf("%q is %v after a round trip, %v", text, again, err)
		}
	}
	for _, text := range []string{
		"", "15", "2026", "2026-1-31", "2026-02-29", "2026-13-01", "2026-00-10", "26-01-31", "0000-01-01", "-001-01-01", "10000-01-01", "infinity", "-infinity", "now",
		"2026-01-31 ", " 2026-01-31", "2026-01-31 15", "2026-01-31 5:00", "2026-01-31  5:00", "2026-01-31 24:00", "2026-01-31 15:60", "2026-01-31 15:00:60", "2026-01-31 +5:00",
		"2026-01-31 15:0", "2026-01-31 15:00:5", "2026-01-31 15:00:05.5", "2026-01-31 15:00:05.000", "2026-01-31 15:00.5", "2026-01-31 3:00 PM", "2026-01-31 15:00 ",
		"2026-01-31T15:00", "2026-01-31 15:00Z", "2026-01-31T15:00:05Z", "2026-01-31 15:00+02", "2026-01-31 15:00 UTC", "2026-01-31 15:00:05 +0200", "2026-01-31 15:00 BC",
	} {
		if anchor, err := ParseAnchor(text); err == nil {
			t.Errorf("%q is %v", text, anchor)
		}
	}
}

func TestStart(t *testing.T) {
	for _, c := range []struct {
		unit, zone, anchor string
		number             int
		starts             []string // in UTC, from that number on
	}{
		{"month", "UTC", "2026-01-31", 0, []string{"2026-01-31 00:00:00", "2026-02-28 00:00:00", "2026-03-31 00:00:00"}},
		{"month", "UTC", "2026-01-31 15:00", 0, []string{"2026-01-31 15:00:00", "2026-02-28 15:00:00", "2026-03-31 15:00:00"}},
		{"month", "UTC", "2024-02-29 23:59:59", -1, []string{"2024-01-29 23:59:59", "2024-02-29 23:59:59", "2024-03-29 23:59:59"}},
		{"month", "Europe/Berlin", "2026-02-28 15:00:05", 0, []string{"2026-02-28 14:00:05", "2026-03-28 14:00:05", "2026-04-28 13:00:05"}},
		{"quarter", "UTC", "2026-11-30 12:00", 0, []string{"2026-11-30 12:00:00", "2027-02-28 12:00:00", "2027-05-30 12:00:00"}},
		{"year", "UTC", "2024-02-29 12:00", 0, []string{"2024-02-29 12:00:00", "2025-02-28 12:00:00"}},
		{"week", "Asia/Tokyo", "2026-07-01 08:30", -1, []string{"2026-06-23 23:30:00", "2026-06-30 23:30:00"}},
		{"day", "Europe/Berlin", "2026-03-28 02:30", 0, []string{"2026-03-28 01:30:00", "2026-03-29 01:30:00", "2026-03-30 00:30:00"}},       // 02:30 on the 29th is skipped: 03:30
		{"day", "Europe/Berlin", "2026-03-28 02:00", 0, []string{"2026-03-28 01:00:00", "2026-03-29 01:00:00", "2026-03-30 00:00:00"}},       // the first skipped instant: 03:00
		{"day", "Europe/Berlin", "2026-03-28 03:00", 0, []string{"2026-03-28 02:00:00", "2026-03-29 01:00:00", "2026-03-30 01:00:00"}},       // the first that is there again
		{"day", "Europe/Berlin", "2026-10-24 02:30", 0, []string{"2026-10-24 00:30:00", "2026-10-25 01:30:00", "2026-10-26 01:30:00"}},       // twice on the 25th: the later
		{"day", "Europe/Berlin", "2026-10-24 02:00", 0, []string{"2026-10-24 00:00:00", "2026-10-25 01:00:00", "2026-10-26 01:00:00"}},       // the first that is there twice
		{"day", "Europe/Berlin", "2026-10-24 03:00", 0, []string{"2026-10-24 01:00:00", "2026-10-25 02:00:00", "2026-10-26 02:00:00"}},       // the first that is not
		{"day", "Pacific/Apia", "2011-12-29 15:00", 0, []string{"2011-12-30 01:00:00", "2011-12-31 01:00:00", "2011-12-31 01:00:00"}},        // no 30 December
		{"day", "America/St_Johns", "2006-10-27 23:30", 1, []string{"2006-10-29 03:00:00", "2006-10-30 03:00:00"}},                           // 28 October has 23:30 twice, and midnight between them
		{"day", "Australia/Lord_Howe", "2026-10-03 02:15", 0, []string{"2026-10-02 15:45:00", "2026-10-03 15:45:00", "2026-10-04 15:15:00"}}, // half an hour
	} {
		calendar := Calendar{Unit: c.unit, Zone: c.zone, Anchor: c.anchor}
		for i, want := range c.starts {
			if got := calendar.Start(c.number + i).Time().UTC().Format(time.DateTime); got != want {
				t.Errorf("%+v: window %d begins at %s, want %s", calendar, c.number+i, got, want)
			}
		}
	}
}

// TestNumber: at any instant, the window has begun and the next one has not.
func TestNumber(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		at := algebra.At(time.Date(1850+r.IntN(300), 1, 1, 0, 0, r.IntN(365*24*60*60), r.IntN(1e9), time.UTC))
		c := Calendar{
			Unit:   Units[r.IntN(len(Units))],
			Zone:   []string{"UTC", "Europe/Berlin", "Pacific/Apia", "America/St_Johns", "America/Juneau", "Asia/Manila", "Australia/Lord_Howe"}[r.IntN(7)],
			Anchor: AnchorText(time.Date(1900+r.IntN(200), 1, 1+r.IntN(365), 0, 0, r.IntN(24*60*60), 0, time.UTC)),
		}
		if r.IntN(2) == 0 {
			at = c.Start(c.Number(at)) - algebra.Micros(r.IntN(2))
		}
		n := c.Number(at)
		if c.Start(n) > at || at >= c.Start(n+1) {
			t.Fatalf("%+v: at %v, window %d from %v to %v; seed %d", c, at.Time(), n, c.Start(n).Time(), c.Start(n+1).Time(), seed)
		}
		windows := c.Between(n-3, n+3)
		if !slices.IsSorted(windows) || !slices.Contains(windows, c.Start(n)) || len(slices.Compact(slices.Clone(windows))) != len(windows) {
			t.Fatalf("%+v: windows %v around %v; seed %d", c, windows, at.Time(), seed)
		}
		if longest := c.Longest(); c.Start(n+1).Time().Sub(c.Start(n).Time()) > longest {
			t.Fatalf("%+v: the window from %v to %v is longer than %v; seed %d", c, c.Start(n).Time(), c.Start(n+1).Time(), longest, seed)
		}
	}
}

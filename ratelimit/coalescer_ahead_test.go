package ratelimit

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

const aheadOfRows = 50 * ms

// instantOf is an instant of a machine that was never suspended.
func instantOf(at time.Duration) localTime { return localTime{at, at} }

// What a statement takes ahead: what was asked for in the last Ahead, less that of a round trip and what is there.
func TestAForecastWantsWhatWillBeAskedFor(t *testing.T) {
	t.Parallel()
	limit := TokenBucket("limit", 1000, time.Second)
	other := TokenBucket("limit", 2000, time.Second)
	for name, row := range map[string]struct {
		play func(f *forecast)
		at   time.Duration
		want float64

		early time.Duration
	}{
		"nothing is known":           {func(f *forecast) { f.ask(&limit, 40, instantOf(0), aheadOfRows) }, 10 * ms, 0, 0},
		"what was asked for, less 9": {asks(limit, 40, 1000, 0), 10 * ms, 30, 0},
		"less a round trip":          {asks(limit, 40, 1000, 10*ms), 20 * ms, 24, 0},
		"whole tokens":               {asks(limit, 6, 1000, 10*ms), 20 * ms, 1, 0},
		"a call or two":              {asks(limit, 2, 1000, 0), 10 * ms, 0, 0},
		"a long round trip":          {asks(limit, 40, 1000, 26*ms), 30 * ms, 0, 0},
		"at most a quarter":          {asks(limit, 400, 1000, 0), 10 * ms, 250, 0},
		"at least 100 are left":      {asks(limit, 40, 99, 0), 10 * ms, 0, 0},
		"of the last call": {func(f *forecast) {
			asks(limit, 400, 1000, 0)(f)
			f.learn(algebra.Row{Value: 800}, true, instantOf(0), instantOf(0), aheadOfRows)
			f.learn(algebra.Row{Value: 900}, true, instantOf(0), instantOf(0), aheadOfRows)
		}, 10 * ms, 200, 0},
		"of a later row, by a clock that stood still": {func(f *forecast) {
			asks(limit, 400, 1000, 0)(f)
			f.learn(algebra.Row{Value: 1200, TS: 1}, true, instantOf(0), instantOf(0), aheadOfRows)
		}, 10 * ms, 300, 0},
		"half of it is half an Ahead": {asksLater(limit, 40), 75 * ms, 13, 0},
		"it is forgotten":             {asksLater(limit, 40), 150 * ms, 0, 0},
		"a denial": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.learn(algebra.Row{Value: 1000}, false, instantOf(0), instantOf(0), aheadOfRows)
		}, 49 * ms, 0, 0},
		"other numbers": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.ask(&other, 1, instantOf(0), aheadOfRows)
			f.learn(algebra.Row{Value: 1000}, true, instantOf(0), instantOf(0), aheadOfRows)
		}, 49 * ms, 0, 0},
		"what is there": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.land(lot{left: 15, ends: algebra.Forever}, f.epoch)
		}, 10 * ms, 15, 0},
		"less than a call": {func(f *forecast) {
			asks(limit, 0, 1000, 0)(f)
			for range 3 {
				f.ask(&limit, 10, instantOf(0), aheadOfRows)
			}
		}, 10 * ms, 0, 0},
		"calls of 10": {func(f *forecast) {
			asks(limit, 0, 1000, 0)(f)
			for range 4 {
				f.ask(&limit, 10, instantOf(0), aheadOfRows)
			}
		}, 10 * ms, 10, 0},
		"a statement is on its way": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.asking = true
		}, 10 * ms, 0, 0},
		"early, and it lasts": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.land(lot{left: 10, ends: algebra.Forever}, f.epoch)
		}, 10 * ms, 0, 12 * ms},
		"early, and it does not last": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.land(lot{left: 9, ends: algebra.Forever}, f.epoch)
		}, 10 * ms, 21, 12 * ms},
		"early, and it ends": {func(f *forecast) {
			asks(limit, 40, 1000, 0)(f)
			f.land(lot{left: 30, ends: algebra.Forever}, f.epoch)
			f.ask(&limit, 0, instantOf(30*ms), aheadOfRows)
		}, 40 * ms, 30, 12 * ms},
		"early, and nobody asks": {asks(limit, 40, 1000, 0), 13 * ms, 0, 12 * ms},
	} {
		f := &forecast{limit: limit}
		row.play(f)
		if got := f.wants(instantOf(row.at), aheadOfRows, row.early); got != row.want {
			t.Errorf("%s: %v, want %v", name, got, row.want)
		}
	}
	for count, left := range map[float64]float64{1: 99, 25: 75, 40: 120} { // of at least 100, at most a quarter
		if floor := floorAhead(count); floor != left {
			t.Errorf("%v taken ahead leave at least %v, want %v", count, floor, left)
		}
	}
}

func asks(limit Limit, count, balance float64, trip time.Duration) func(f *forecast) {
	return func(f *forecast) {
		for range int(count) {
			f.ask(&limit, 1, instantOf(0), aheadOfRows)
		}
		f.learn(algebra.Row{Value: balance}, true, instantOf(0), instantOf(trip), aheadOfRows)
	}
}

// asksLater has asked in one span, and once more in the next.
func asksLater(limit Limit, count float64) func(f *forecast) {
	return func(f *forecast) {
		asks(limit, count, 1000, 0)(f)
		f.ask(&limit, 0, instantOf(50*ms), aheadOfRows)
	}
}

// When a lot can be used, and what comes back of it.
func TestALotIsUsedInTime(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		mono, wall time.Duration
		ends       algebra.Micros // after the statement
		used       bool
		back       float64
	}{
		{0, 0, algebra.Forever, true, 0},
		{50 * ms, 50 * ms, algebra.Forever, true, 0},
		{50*ms + 1, 50 * ms, algebra.Forever, false, 5},
		{50 * ms, 50*ms + 1, algebra.Forever, false, 5}, // it was suspended
		{10 * ms, -1, algebra.Forever, false, 0},        // its clock was set back
		{1000 * ms, 1000 * ms, algebra.Forever, false, 5},
		{1001 * ms, 1001 * ms, algebra.Forever, false, 0}, // too late for others
		{10 * ms, 10 * ms, 10_001, true, 0},
		{10 * ms, 10 * ms, 10_000, false, 0}, // the next window may have begun
		{60 * ms, 60 * ms, 60_001, false, 5},
		{60 * ms, 60 * ms, 60_000, false, 0},
	} {
		f := &forecast{row: algebra.Row{TS: 1}}
		f.land(lot{at: 1e9, ends: min(1e9+row.ends, algebra.Forever), row: algebra.Row{Value: 95}, left: 5}, 0)
		now := localTime{row.mono, row.wall}
		l, at := f.take(2, now, aheadOfRows)
		if (l != nil) != row.used || l != nil && (l.left != 3 || l.row.Value != 93 || at != 1e9+algebra.Micros(row.mono.Microseconds())) {
			t.Errorf("%+v: %+v at %v", row, l, at)
		}
		back := 0.0
		for _, l := range f.unused(now, aheadOfRows, false) {
			back += l.left
		}
		if back != row.back {
			t.Errorf("%+v: %v come back", row, back)
		}
		if again := f.unused(now, aheadOfRows, true); row.used != (len(again) == 1) || len(f.lots) > 0 {
			t.Errorf("%+v: at the end, %v come back, %v stay", row, again, f.lots)
		}
	}
}

// Of the lots, the oldest that has enough is used, and what was taken before everything became void is lost.
func TestTheOldestLotIsUsed(t *testing.T) {
	t.Parallel()
	f := &forecast{row: algebra.Row{TS: 1}}
	for i := range 3 {
		f.land(lot{at: algebra.Micros(i), ends: algebra.Forever, left: float64(i + 1)}, f.epoch)
	}
	used := ""
	for _, count := range []float64{1, 2, 1, 2, 1} {
		if l, _ := f.take(count, instantOf(0), aheadOfRows); l != nil {
			used += fmt.Sprint(l.at)
		} else {
			used += "-"
		}
	}
	if used != "0122-" {
		t.Errorf("%s", used)
	}
	f.void(instantOf(0), aheadOfRows)
	f.land(lot{ends: algebra.Forever, left: 1}, f.epoch-1)
	if len(f.lots) != 0 {
		t.Errorf("%v are there", f.lots)
	}
}

// A denial in memory is for the same demands, or more, until the tokens may be there, and for at most Ahead.
func TestADenialIsRemembered(t *testing.T) {
	t.Parallel()
	limit, slowly, other := TokenBucket("limit", 100, time.Second), TokenBucket("limit", 1, time.Hour, Capacity(100)), TokenBucket("other", 9, time.Second)
	of := func(limit Limit, key string, count float64) demand {
		return demand{limit: limit, key: key, numbers: limit.numbers, count: count}
	}
	for name, row := range map[string]struct {
		first, then []demand
		at          time.Duration
		denied      bool
	}{
		"the same":             {[]demand{of(slowly, "k", 5)}, []demand{of(slowly, "k", 5)}, 50 * ms, true},
		"after Ahead":          {[]demand{of(slowly, "k", 5)}, []demand{of(slowly, "k", 5)}, 51 * ms, false},
		"more":                 {[]demand{of(slowly, "k", 5)}, []demand{of(slowly, "k", 6)}, 0, true},
		"less":                 {[]demand{of(slowly, "k", 5)}, []demand{of(slowly, "k", 4)}, 0, false},
		"other numbers":        {[]demand{of(slowly, "k", 5)}, []demand{of(limit, "k", 5)}, 0, false},
		"it is not there yet":  {[]demand{of(limit, "k", 5)}, []demand{of(limit, "k", 5)}, 29 * ms, true},
		"it may be there":      {[]demand{of(limit, "k", 5)}, []demand{of(limit, "k", 5)}, 30 * ms, false},
		"more of what is soon": {[]demand{of(limit, "k", 5)}, []demand{of(limit, "k", 50)}, 30 * ms, false},
		"with another":         {[]demand{of(slowly, "k", 5)}, []demand{of(slowly, "k", 5), of(other, "k", 1)}, 0, false},
	} {
		f := &forecast{row: algebra.Row{TS: 1}}
		f.deny(row.first, &answer{at: 1e9, rows: [][]algebra.Row{{{Value: 2, TS: 1e9}}}}, 0, instantOf(0))
		if a := f.denies(row.then, instantOf(row.at), aheadOfRows); (a != nil) != row.denied || a != nil && a.at != 1e9+algebra.Micros(row.at.Microseconds()) {
			t.Errorf("%s: %+v, want denied: %v", name, a, row.denied)
		}
	}
}

// Lots of several statements come back together, as of the latest: each of them what it would by itself.
func TestLotsComeBackTogether(t *testing.T) {
	t.Parallel()
	const now = 5e6
	for _, row := range []struct {
		numbers algebra.Limit
		want    float64
	}{
		{algebra.Limit{Rate: 2, Period: time.Second, Capacity: 100}, 1}, // of 9, less four seconds' refill
		{algebra.Limit{Rate: 100, Period: 10 * time.Second, Capacity: 100, Window: true}, 9},
	} {
		l := lot{at: 1e6, left: 9}
		for _, at := range []algebra.Micros{1e6, 2e6, now} {
			of := algebra.Taken{At: at, RunAt: at, Count: l.left, Held: l.held(&row.numbers, at), Part: 1}
			if back := row.numbers.Refund([]algebra.Row{{Value: 50, TS: now}}, of, l.left, now); back != row.want {
				t.Errorf("%+v: as of %v, %v come back, want %v", row.numbers, at, back, row.want)
			}
		}
	}
}

// Of what is taken ahead of calls that come independently, little is not used, however few come in an Ahead; and of many, few are asked.
func TestLittleOfItIsNotUsed(t *testing.T) {
	t.Parallel()
	limit, seed := TokenBucket("limit", 1e6, time.Second), rand.Uint64()
	for calls, most := range map[float64]struct{ unused, asked float64 }{
		1: {0.12, 1}, 3: {0.15, 0.5}, 10: {0.08, 0.06}, 40: {0.04, 0.01}, 400: {0.02, 0.002},
	} {
		r := rand.New(rand.NewPCG(seed, 0))
		f := &forecast{limit: limit}
		learn := func(now localTime) { f.learn(algebra.Row{Value: 1e5}, true, now, now, aheadOfRows) }
		refill := func(now localTime, early time.Duration) {
			if n := f.wants(now, aheadOfRows, early); n > 0 {
				f.land(lot{sent: now, ends: algebra.Forever, left: n}, f.epoch)
			}
			learn(now)
		}
		total, asked, unused, tick := 0.0, 0.0, 0.0, aheadOfRows/4
		for at := time.Duration(0); at < 1000*aheadOfRows; total++ {
			at += time.Duration(r.ExpFloat64() / calls * float64(aheadOfRows))
			for ; tick < at; tick += aheadOfRows / 4 {
				for _, l := range f.unused(instantOf(tick), aheadOfRows, false) {
					unused += l.left
				}
				refill(instantOf(tick), aheadOfRows/4)
			}
			f.ask(&limit, 1, instantOf(at), aheadOfRows)
			if l, _ := f.take(1, instantOf(at), aheadOfRows); l == nil {
				asked++
				refill(instantOf(at), 0)
			}
		}
		if unused > most.unused*total || asked > most.asked*total {
			t.Errorf("seed %d, %v calls in an Ahead: of %v, %v were asked, and %v taken ahead were not used", seed, calls, total, asked, unused)
		}
		t.Logf("%v calls in an Ahead: %.3f asked, %.3f unused", calls, asked/total, unused/total)
	}
}

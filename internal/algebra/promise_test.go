package algebra

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestReserve(t *testing.T) {
	bucket := Limit{Rate: 6, Period: time.Minute, Capacity: 6}
	window := Limit{Rate: 100, Period: time.Minute, Capacity: 100, Window: true, Start: noon}
	small := Limit{Rate: 10, Period: time.Minute, Capacity: 10, Window: true, Start: noon}
	inf := math.Inf(1)
	demand := func(l Limit, value float64, ts Micros, count, owed float64) Demand {
		return Demand{Limit: l, Rows: []Row{{value, ts}}, Shards: 1, Count: count, Lowest: l.Lowest(-owed), Floor: -owed}
	}
	for _, row := range []struct {
		name    string
		demands []Demand
		runAt   Micros
		left    []float64
		granted bool
	}{
		{"a window that has enough", []Demand{demand(window, 100, noon, 60, inf)}, noon, []float64{40}, true},
		{"a window that has not", []Demand{demand(window, 40, noon, 60, inf)}, noon + minute, []float64{-60}, true},
		{"a window in debt", []Demand{demand(window, -60, noon, 60, inf)}, noon + 2*minute, []float64{-160}, true},
		{"a window in debt that has room", []Demand{demand(window, -60, noon, 30, inf)}, noon + minute, []float64{-90}, true},
		{"what is forfeited counts as owed", []Demand{demand(window, 40, noon, 60, 59)}, noon + minute, []float64{-60}, false},
		{"just as much as may be owed", []Demand{demand(window, 40, noon, 60, 60)}, noon + minute, []float64{-60}, true},
		{"more than the capacity", []Demand{demand(window, 40, noon, 150, inf)}, noon + 2*minute, []float64{-110}, true},
		{"a window whose row lies ahead", []Demand{demand(window, 40, noon+minute, 60, inf)}, noon + 2*minute, []float64{-60}, true},
		{"a bucket alone", []Demand{demand(bucket, 1, noon, 3, inf)}, noon + 20*second, []float64{-2}, true},
		{"a bucket that waits for a window", []Demand{demand(bucket, 6, noon, 2, inf), demand(small, 0, noon, 2, inf)}, noon + minute, []float64{-2, -2}, true},
		{"and must not owe", []Demand{demand(bucket, 6, noon, 2, 0), demand(small, 0, noon, 2, inf)}, noon + minute, []float64{-2, -2}, false},
		{"a bucket that does not", []Demand{demand(bucket, 6, noon, 2, 0), demand(small, 10, noon, 2, inf)}, noon, []float64{4, 8}, true},
		{"a window that waits for a bucket", []Demand{demand(window, 100, noon, 70, inf), demand(bucket, -4, noon, 3, inf)}, noon + 70*second, []float64{-70, -7}, true},
		{"two buckets", []Demand{demand(bucket, 6, noon, 1, inf), demand(bucket, 2, noon, 5, inf)}, noon + 30*second, []float64{2, -3}, true},
	} {
		runAt, left, granted := Reserve(row.demands, noon, Forever)
		if runAt != row.runAt || !slices.Equal(left, row.left) || granted != row.granted {
			t.Errorf("%s: runs at %v, %v are left, granted %v; want %v, %v, %v", row.name, runAt.Time(), left, granted, row.runAt.Time(), row.left, row.granted)
		}
		for i := range row.demands { // alone and together, to the microsecond
			for _, ds := range [][]Demand{row.demands, row.demands[i : i+1]} {
				at := WhenReserved(ds, noon, Forever)
				_, _, granted := Reserve(ds, at, Forever)
				_, _, early := Reserve(ds, at-1, Forever)
				if !granted || at > noon && early {
					t.Errorf("%s: when %v, granted %v, a microsecond earlier %v", row.name, at.Time(), granted, early)
				}
			}
		}
	}
}

// A job that would wait longer than within is denied.
func TestReserveWithin(t *testing.T) {
	bucket := Limit{Rate: 6, Period: time.Minute, Capacity: 6}
	window := Limit{Rate: 10, Period: time.Minute, Capacity: 10, Window: true, Start: noon}
	spaced := Limit{Rate: 6, Period: time.Minute}
	none := Limit{Rate: 10, Period: time.Minute, Window: true, Start: noon}
	demand := func(l Limit, value, count float64) Demand {
		return Demand{Limit: l, Rows: []Row{{value, noon}}, Shards: 1, Count: count, Lowest: math.Inf(-1), Floor: math.Inf(-1)}
	}
	// A job of two tokens waits for the next minute, whenever it comes. Meanwhile others forfeit what they get in each second.
	one := Limit{Rate: 1, Period: time.Minute, Capacity: 1, Window: true, Start: noon}
	ticks := demand(Limit{Rate: 1, Period: time.Second, Capacity: 10, Window: true, Start: noon}, 10, 2)
	ticks.Lowest, ticks.Floor = 0, 0
	late := ticks
	late.Rows = []Row{{-60, noon}}
	for _, row := range []struct {
		name    string
		demands []Demand
		within  Micros
		denied  int    // by this demand, or -1
		when    Micros // the instant at which it is granted
	}{
		{"a bucket", []Demand{demand(bucket, 0, 3)}, 30 * second, -1, noon},
		{"a bucket, too late", []Demand{demand(bucket, 0, 3)}, 20 * second, 0, noon + 10*second},
		{"a window", []Demand{demand(window, 0, 3)}, minute, -1, noon},
		{"a window, too late", []Demand{demand(window, 0, 3)}, minute - 1, 0, noon + 1},
		{"a window in debt", []Demand{demand(window, -10, 3)}, 30 * second, 0, noon + 90*second},
		{"at once", []Demand{demand(window, 3, 3)}, 0, -1, noon},
		{"the second of two", []Demand{demand(bucket, 6, 3), demand(window, 0, 3)}, 30 * second, 1, noon + 30*second},
		{"nothing is ever there at once", []Demand{demand(spaced, -3, 1)}, 30 * second, 0, noon + 10*second},
		{"nor that early", []Demand{demand(spaced, 0, 1)}, 9 * second, 0, Forever},
		{"what a slow one forfeits is always more than may be owed", []Demand{ticks, demand(spaced, 0, 1)}, Forever, 0, Forever},
		{"nor in a window", []Demand{demand(none, 0, 1)}, 20 * second, 0, noon + 40*second},
		{"nor above a window's capacity", []Demand{demand(Limit{Rate: 7, Period: 10 * time.Second, Capacity: 1, Window: true, Start: noon}, -22, 6)},
			5 * second, 0, noon + 35*second}, // it waits for the fourth window
		{"what the next window forfeits", []Demand{demand(one, 1, 2), ticks}, Forever, 1, noon + 52*second},
		{"what a later one forfeits", []Demand{demand(one, 1, 2), late}, Forever, 1, noon + minute + 52*second},
	} {
		_, left, granted := Reserve(row.demands, noon, row.within)
		for i, d := range row.demands {
			if d.Enough(left[i]) == (i == row.denied) {
				t.Errorf("%s: %v are left of %d", row.name, left[i], i)
			}
		}
		if when := WhenReserved(row.demands, noon, row.within); granted != (row.denied < 0) || when != row.when {
			t.Errorf("%s: granted %v, when %v, want %v", row.name, granted, when.Time(), row.when.Time())
		}
	}
}

// A job is denied that would run after the windows that a call lists, however long the list is with which that is worked out. The
// lists of later calls reach further.
func TestReserveListed(t *testing.T) {
	var windows []Micros
	for i := range Micros(20) {
		windows = append(windows, noon+i*minute)
	}
	calendar := Limit{Rate: 1, Period: time.Minute, Capacity: 100, Window: true, Windows: &windows}
	bucket := Limit{Rate: 1, Period: time.Minute, Capacity: 1}
	for _, row := range []struct {
		listed int
		late   Micros // than in five minutes, of the job
		when   Micros
	}{
		{0, 0, noon}, // all
		{6, 0, noon}, // the job runs as the last one begins
		{6, second, noon + minute},
		{5, -second, noon + minute},
		{3, -second, noon + 3*minute},
		{3, second, noon + 4*minute},
		{30, 0, noon},
	} {
		ds := []Demand{
			{Limit: calendar, Rows: []Row{{50, noon}}, Shards: 1, Count: 1, Lowest: -1, Floor: -1, Listed: row.listed},
			{Limit: bucket, Rows: []Row{{-4, noon + row.late}}, Shards: 1, Count: 1, Lowest: math.Inf(-1), Floor: math.Inf(-1)},
		}
		_, left, granted := Reserve(ds, noon, Forever)
		if when := WhenReserved(ds, noon, Forever); granted != (row.when == noon) || ds[0].Enough(left[0]) != granted || when != row.when {
			t.Errorf("%d windows, %d µs late: granted %v, %v are left, when %v, want %v", row.listed, row.late, granted, left, when.Time(), row.when.Time())
		}
	}
}

func TestRefund(t *testing.T) {
	bucket := Limit{Rate: 1, Period: time.Second, Capacity: 10}
	window := Limit{Rate: 2, Period: time.Minute, Capacity: 2, Window: true, Start: noon}
	saves := Limit{Rate: 2, Period: time.Minute, Capacity: 3, Window: true, Start: noon}
	one := func(value float64, ts Micros) []Row { return []Row{{value, ts}} }
	took := func(at, runAt Micros, count, held, part float64) Taken {
		return Taken{At: at, RunAt: runAt, Count: count, Held: held, Part: part, Promised: runAt}
	}
	later := func(t Taken) Taken { t.Promised = Max; return t } // other work waits
	for _, row := range []struct {
		name  string
		limit Limit
		rows  []Row
		taken Taken
		count float64
		now   Micros
		want  float64
	}{
		{"all is missing", bucket, one(4, noon), took(noon, noon, 6, 4, 1), 6, noon, 6},
		{"a part of it", bucket, one(4, noon), took(noon, noon, 6, 4, 1), 2, noon, 2},
		{"some was refilled", bucket, one(4, noon), took(noon, noon, 6, 4, 1), 6, noon + 2*second, 4},
		{"all was refilled", bucket, one(0, noon+6*second), took(noon, noon, 6, 4, 1), 6, noon + 8*second, 0},
		{"the clock stepped back", bucket, one(4, noon-3*second), took(noon, noon, 6, 6, 1), 6, noon - 3*second, 0},
		{"behind the rows", bucket, one(4, noon+2*second), took(noon, noon, 6, 4, 1), 6, noon, 0},
		{"paused, and something is owed", bucket, one(-2, noon+second), later(took(noon, noon, 6, 0, 1)), 6, noon, 2},
		{"paused, and more is owed", bucket, one(-5, noon+second), later(took(noon, noon, 6, 0, 1)), 3, noon, 3},
		{"paused for long", bucket, one(-6, noon+100*second), later(took(noon, noon, 6, -6, 1)), 6, noon + second, 6},
		{"paused, and some was refilled before", bucket, one(-6, noon+100*second), later(took(noon, noon, 6, 0, 1)), 6, noon + 2*second, 2},
		{"paused, of two that wait", bucket, one(-10, noon+100*second), later(took(noon, noon, 6, -6, 1)), 6, noon + second, 5},
		{"ahead, and taken after now", bucket, one(-6, noon+9*second), later(took(noon+second, noon, 6, -1, 1)), 6, noon, 0},
		{"the pause is over", bucket, one(0, noon+second), took(noon, noon, 6, 4, 1), 6, noon + second, 5},
		{"a shard is paused", bucket, []Row{{2, noon}, {0, noon + second}}, took(noon, noon, 3, 2, 0.5), 3, noon, 0},
		{"some of it is owed", bucket, one(-3, noon), later(took(noon, noon, 6, 4, 1)), 6, noon, 3},
		{"all of it is owed", bucket, one(-9, noon), later(took(noon, noon, 6, 4, 1)), 6, noon, 0},
		{"a charge owes", bucket, one(-3, noon), took(noon, noon, 6, 4, 1), 6, noon, 6},
		{"no more than fits", bucket, one(7, noon), took(noon, noon, 6, 4, 1), 6, noon, 3},
		{"paused, and a charge owes", bucket, one(-2, noon+second), took(noon, noon, 6, 0, 1), 6, noon, 0},
		{"a shard's part", bucket, []Row{{2, noon}, {5, noon}}, took(noon, noon, 3, 2, 0.5), 3, noon + 2*second, 1},

		{"the same window", window, one(1, noon), took(noon, noon, 1, 1, 1), 1, noon + minute - 1, 1},
		{"the next", window, one(1, noon), took(noon, noon, 1, 1, 1), 1, noon + minute, 0},
		{"the next, which is not full", saves, one(0, noon), took(noon, noon, 1, 0, 1), 1, noon + minute, 0},
		{"the next, by the rows", window, one(0, noon+minute), took(noon, noon, 1, 1, 1), 1, noon, 0},
		{"somebody waits", window, one(-1, noon), later(took(noon, noon, 1, 1, 1)), 1, noon, 0},
		{"nobody waits, and a charge owes", window, one(-1, noon), took(noon, noon, 1, 1, 1), 1, noon, 1},
		{"it waited", window, one(-1, noon+minute), took(noon, noon+minute, 2, -2, 1), 2, noon + minute, 2},
		{"the last that waits", window, one(-4, noon), took(noon, noon+2*minute, 2, -4, 1), 2, noon, 2},
		{"the last but one", window, one(-4, noon), took(noon, noon+minute, 2, -2, 1), 2, noon, 0},
		{"the debt ends earlier", window, one(-2, noon), took(noon, noon+2*minute, 2, -4, 1), 2, noon, 0},
		{"it would end earlier", saves, one(-3, noon), took(noon, noon+2*minute, 1, -3, 1), 1, noon, 0},
		{"it would not", saves, one(-3, noon), took(noon, noon+2*minute, 1, -3, 1), 0.5, noon, 0.5},
		{"of what does not wait, it may", saves, one(0, noon), took(noon, noon, 3, 0, 1), 3, noon, 3},
		{"more than the capacity", window, one(-1, noon), took(noon, noon+minute, 3, -1, 1), 1, noon, 0},
		{"shards that owe by rounding", window, []Row{{-1e-10, noon}, {-1e-10, noon}}, took(noon, noon, 2, 0, 1), 2, noon, 2},
	} {
		if got := row.limit.Refund(row.rows, row.taken, row.count, row.now); got != row.want {
			t.Errorf("%s: %v come back, want %v", row.name, got, row.want)
		}
	}
}

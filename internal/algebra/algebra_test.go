package algebra

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var noon = At(time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC))

const second, minute, hour = Micros(1e6), Micros(60e6), Micros(3600e6)

func TestAvailable(t *testing.T) {
	bucket := Limit{Rate: 10, Period: time.Minute, Capacity: 20}
	window := Limit{Rate: 10, Period: time.Hour, Capacity: 25, Window: true, Start: Min}
	offset := Limit{Rate: 10, Period: time.Hour, Capacity: 25, Window: true, Start: Min + 30*minute}
	short := Limit{Rate: 10, Period: 1100 * time.Millisecond, Capacity: 100, Window: true, Start: noon}
	none := Limit{Rate: 10, Period: time.Minute, Capacity: 0}
	for _, row := range []struct {
		name  string
		limit Limit
		value float64
		ts    Micros
		n     int
		now   Micros
		want  float64
	}{
		{"nothing elapsed", bucket, 5, noon, 1, noon, 5},
		{"a token's time", bucket, 5, noon, 1, noon + 6*second, 6},
		{"a fraction", bucket, 5, noon, 1, noon + 3*second, 5.5},
		{"up to the capacity", bucket, 5, noon, 1, noon + hour, 20},
		{"above a lowered capacity", bucket, 30, noon, 1, noon, 20},
		{"written by hand", bucket, math.NaN(), noon, 1, noon, 20},
		{"out of debt", bucket, -5, noon, 1, noon + minute, 5},
		{"time runs backwards", bucket, 5, noon, 1, noon - hour, 5},
		{"from the first to the last instant", bucket, -1e9, Min, 1, Max, 20},
		{"of two shards", bucket, 5, noon, 2, noon + 12*second, 6},
		{"of two shards, full", bucket, 5, noon, 2, noon + hour, 10},
		{"no capacity", none, -5, noon, 1, noon + 6*second, -4},
		{"no capacity, no debt", none, -5, noon, 1, noon + hour, 0},

		{"the same window", window, 5, noon, 1, noon + hour - 1, 5},
		{"the next window", window, 5, noon, 1, noon + hour, 15},
		{"the next but one", window, 5, noon, 1, noon + 2*hour, 25},
		{"many windows", window, -1000, noon, 1, noon + 90*hour, -100},
		{"up to the capacity, windows", window, 5, noon, 1, noon + 100*hour, 25},
		{"ts within a window", window, 5, noon + 59*minute, 1, noon + hour, 15},
		{"the window before", window, 5, noon, 1, noon - 1, 5},
		{"time runs backwards, windows", window, 5, noon, 1, noon - 100*hour, 5},
		{"another grid", offset, 5, noon, 1, noon + 30*minute - 1, 5},
		{"another grid's boundary", offset, 5, noon, 1, noon + 30*minute, 15},
		{"windows whose quotient comes out below 3", short, 0, noon, 1, noon + 3*1100*second/1000, 30},
		{"of five shards", window, 1, noon, 5, noon + hour, 3},
	} {
		if got := row.limit.Available(Row{row.value, row.ts}, row.n, row.now); got != row.want {
			t.Errorf("%s: %v, want %v", row.name, got, row.want)
		}
	}
}

func TestUpTo(t *testing.T) {
	window := Limit{Period: time.Hour, Window: true, Start: noon}
	for _, row := range []struct{ now, want Micros }{
		{noon, noon}, {noon + hour - 1, noon}, {noon + hour, noon + hour}, {noon - 1, noon - hour}, {noon - hour, noon - hour}, {noon - hour - 1, noon - 2*hour},
	} {
		if got := window.UpTo(row.now); got != row.want {
			t.Errorf("%v: %v, want %v", row.now.Time(), got.Time(), row.want.Time())
		}
	}
	if got := (Limit{Period: time.Hour}).UpTo(noon + 7); got != noon+7 {
		t.Errorf("a token bucket's: %v", got)
	}
}

func TestAtTruncatesToMicroseconds(t *testing.T) {
	for _, at := range []Micros{Min, 0, -1, noon, Max} {
		if got := At(at.Time()); got != at {
			t.Errorf("%v became %v", at, got)
		}
		if got := At(at.Time().Add(999)); got != at {
			t.Errorf("%v and 999 ns became %v", at, got)
		}
	}
}

func TestALimitWithoutRowsIsFull(t *testing.T) {
	limit := Limit{Rate: 10, Period: time.Minute, Capacity: 20}
	if !limit.Enough(nil, 20, 0, noon) || limit.Enough(nil, 20.001, 0, noon) || !limit.Enough(nil, 25, -5, noon) || !limit.Enough(nil, 1e9, math.Inf(-1), noon) {
		t.Error("a full limit grants its capacity, and what may be owed")
	}
}

// This holds for all divisions of the capacity.
func TestFullShardsHoldTheCapacity(t *testing.T) {
	uneven := 0
	for _, capacity := range []float64{10, 1e7, 5e7, 1e9, 1e15, 0.1} {
		for n := 2; n <= 100; n++ {
			limit := Limit{Rate: 1, Period: time.Minute, Capacity: capacity}
			rows, share := make([]Row, n), capacity/float64(n)
			for i := range rows {
				rows[i] = Row{share, noon}
			}
			if float64(n)*share != capacity {
				uneven++
			}
			if total := limit.Total(rows, noon); total != capacity {
				t.Errorf("%d shards of %v hold %v", n, capacity, total)
			}
		}
	}
	if uneven < 40 {
		t.Errorf("only %d products come out uneven", uneven)
	}
}

// 49 times 8/49 is less than 8.
func TestASumThatRoundingMakesTooLittleIsEnough(t *testing.T) {
	limit := Limit{Rate: 10, Period: time.Minute, Capacity: 10}
	rows := limit.Take(nil, 49, 2, noon)
	if total := limit.Total(rows, noon); total >= 8 {
		t.Fatalf("%v is no test", total)
	}
	if !limit.Enough(rows, 8, 0, noon) || limit.Enough(rows, 8.001, 0, noon) {
		t.Error("8 are there, to within rounding")
	}
}

// Added up one by one, the debt of all rows would never change by a small count.
func TestWholeIsWhatIsThereUpToTheMost(t *testing.T) {
	bucket := Limit{Rate: 1, Period: time.Second, Capacity: 10.5}
	third := []Row{{1.1, 0}, {1.2, 0}, {0.7 - 1e-15, 0}} // 3, except for rounding
	for _, row := range []struct {
		rows       []Row
		most, want float64
		now        Micros
	}{
		{nil, 100, 10, 0},
		{nil, 3, 3, 0},
		{[]Row{{2.5, 0}}, 100, 2, 0},
		{[]Row{{2.5, 0}}, 100, 2, 499_999},
		{[]Row{{2.5, 0}}, 100, 3, 500_000},
		{[]Row{{3 - 1e-8, 0}}, 100, 3, 0}, // the tolerance is 1.05e-8
		{[]Row{{3 - 2e-8, 0}}, 100, 2, 0},
		{third, 100, 3, 0},
		{third, 2, 2, 0},
		{[]Row{{1.5, 0}, {1.4, 0}, {1.5, 0}}, 100, 4, 0}, // no shard has two of the four
	} {
		if got := bucket.Whole(row.rows, row.most, row.now); got != row.want {
			t.Errorf("%+v: %v", row, got)
		}
	}
	for _, empty := range [][]Row{{{0.5, 0}}, {{-3, 0}}, {{0.2, 0}, {0.3, 0}}} {
		if got := bucket.Whole(empty, 5, 0); got >= 1 {
			t.Errorf("%v of %v", got, empty)
		}
	}
}

// TestWholeLeavesNoLessThanTheLowest looks at balances that lack as much as the tolerance, or one bit more or less.
func TestWholeLeavesNoLessThanTheLowest(t *testing.T) {
	roundedUp := 0
	for _, capacity := range []float64{1, 3, 10, 1000, 1e5, 1e6, 1e9} {
		limit := Limit{Rate: 1, Period: time.Hour, Capacity: capacity}
		for n := 1.0; n <= min(capacity, 100); n++ {
			balance := n + limit.Lowest(0)
			for range 5 {
				balance = math.Nextafter(balance, 0)
			}
			for range 10 {
				whole := limit.Whole([]Row{{balance, noon}}, math.Inf(1), noon)
				if granted := limit.Enough([]Row{{balance, noon}}, n, 0, noon); granted != (whole == n) || !granted && whole != n-1 {
					t.Fatalf("%v of %v: %v whole tokens, but %v are granted: %v", balance, capacity, whole, n, granted)
				} else if !granted && math.Floor(balance-limit.Lowest(0)) == n {
					roundedUp++
				}
				balance = math.Nextafter(balance, capacity)
			}
		}
	}
	if roundedUp < 10 {
		t.Errorf("a difference was rounded up %d times: this tested too little", roundedUp)
	}
}

func TestEqualSharesAreNotRoundedAway(t *testing.T) {
	limit := Limit{Rate: 1e15, Period: time.Hour, Capacity: 1e15}
	rows := limit.Take(limit.Take(nil, 100, 1e15, noon), 100, 1e15-1000, noon)
	for range 500 {
		before := limit.Total(rows, noon)
		rows = limit.Take(rows, 100, 1, noon)
		if fell := before - limit.Total(rows, noon); fell < 0.8 || fell > 1.2 {
			t.Fatalf("1 was taken, and %v fell by %v", before, fell)
		}
	}
}

func TestTakeSpreadsWhatIsLeft(t *testing.T) {
	limit := Limit{Rate: 10, Period: time.Minute, Capacity: 20}
	rows := limit.Take([]Row{{4, noon}, {9, noon + second}}, 2, 5, noon)
	if len(rows) != 2 || rows[0] != (Row{4, noon}) || rows[1] != (Row{4, noon + second}) {
		t.Errorf("took: %v", rows)
	}
	rows = limit.Take(rows, 4, -100, noon) // given back, to more shards
	if len(rows) != 4 || rows[3] != (Row{5, noon + second}) {
		t.Errorf("gave back: %v", rows)
	}
}

// world is a random limit, its rows and a request.
type world struct {
	limit        Limit
	rows         []Row
	shards       int
	count, floor float64
	now          Micros
}

// sane turns any numbers into a case that the library could meet, or reports that it cannot.
func sane(rate, capacity, value, count, owed float64, period, ts, now, start int64, window bool, rows, shards uint8) (w world, ok bool) {
	for _, f := range []*float64{&rate, &capacity, &count, &owed} {
		if !(*f >= 0 && *f <= 1e15) {
			return w, false
		}
	}
	if rate < 1e-12 || !(math.Abs(value) <= 1e16) || period < 1 || period > math.MaxInt64/1000 {
		return w, false
	}
	first, span := At(time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)), int64(Max-At(time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)))
	in := func(i int64) Micros { return first + Micros((i%span+span)%span) }
	w = world{
		limit:  Limit{Rate: rate, Period: time.Duration(period) * time.Microsecond, Capacity: capacity, Window: window, Start: Min + Micros((start%period+period)%period)},
		shards: int(shards%5) + 1, count: count, floor: -owed, now: in(now),
	}
	for i := range int(rows % 6) {
		w.rows = append(w.rows, Row{value - float64(i), in(ts + int64(i))})
	}
	return w, true
}

// holds checks the properties that every case must have.
func (w world) holds(t *testing.T) {
	t.Helper()
	if total := w.limit.Total(w.rows, w.now); total > w.limit.Capacity*(1+1e-12) {
		t.Fatalf("%+v: %v available, above the capacity", w, total)
	}
	before := math.Inf(-1)
	for _, d := range []Micros{-hour, -1, 0, 1, second, hour, 1000 * hour} {
		now := w.now + d
		total := w.limit.Total(w.rows, now)
		if total < before {
			t.Fatalf("%+v: %v available, and less later: %v", w, before, total)
		}
		before = total
		for _, row := range w.rows {
			got := w.limit.Available(row, 1, now)
			if now <= row.TS && got != min(row.Value, w.limit.Capacity) {
				t.Fatalf("%+v: %v was refilled before %v", w, got, row)
			}
			if got > w.limit.Capacity {
				t.Fatalf("%+v: %v above the capacity", w, got)
			}
		}
	}
	at := w.limit.When(w.rows, w.count, w.floor, w.now)
	switch {
	case at < w.now || at > Max:
		t.Fatalf("%+v: when %v", w, at)
	case at < Max && !w.limit.Enough(w.rows, w.count, w.floor, at):
		t.Fatalf("%+v: not enough at %v", w, at.Time())
	case at > w.now && w.limit.Total(w.rows, at-1)-w.count >= w.limit.Due(len(w.rows), w.count, w.floor):
		t.Fatalf("%+v: enough a microsecond before %v", w, at.Time())
	}
	// Taking and giving back creates no tokens and, except for the cap, loses none.
	total := w.limit.Total(w.rows, w.now)
	left := w.limit.Total(w.limit.Take(w.rows, w.shards, w.count, w.now), w.now)
	if tolerance := 1e-9 + 1e-12*(math.Abs(total)+w.count); left > total-w.count+tolerance || left < total-w.count-tolerance {
		t.Fatalf("%+v: %v less %v is not %v", w, total, w.count, left)
	}
}

func TestWhenIsExact(t *testing.T) {
	seed := rand.Uint64()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	r := rand.New(rand.NewPCG(seed, 0))
	number := func() float64 {
		return []float64{0, 1, 10, 1.0 / 3, float64(r.IntN(1000)), r.Float64() * 100, r.ExpFloat64() * math.Pow(10, float64(r.IntN(15)-6))}[r.IntN(7)]
	}
	tested := 0
	for range 20_000 {
		ts := int64(noon) + r.Int64N(1e15)
		period := []int64{1, 1e6, 60e6, 3600e6, 7e6, 86400e6, 1 + r.Int64N(1e12)}[r.IntN(7)]
		w, ok := sane(number(), number(), number()-number(), number(), number(), period, ts, ts+r.Int64N(1e12)-1e11, r.Int64(), r.IntN(2) == 0, uint8(r.Uint32()), uint8(r.Uint32()))
		if ok {
			tested++
			w.holds(t)
		}
	}
	if tested < 5_000 {
		t.Errorf("%d cases: this tested too little", tested)
	}
}

func FuzzWhen(f *testing.F) {
	f.Add(10.0, 20.0, 5.0, 3.0, 0.0, int64(60e6), int64(noon), int64(noon+second), int64(0), false, uint8(1), uint8(0))
	f.Add(1.0/3, 1.0, -7.0, 0.1, 2.5, int64(1e6), int64(noon), int64(noon-second), int64(17), true, uint8(3), uint8(4))
	f.Add(1e15, 0.0, -1e16, 1e15, 1e15, int64(1), int64(0), int64(math.MaxInt64), int64(-1), true, uint8(0), uint8(1))
	f.Fuzz(func(t *testing.T, rate, capacity, value, count, owed float64, period, ts, now, start int64, window bool, rows, shards uint8) {
		if w, ok := sane(rate, capacity, value, count, owed, period, ts, now, start, window, rows, shards); ok {
			w.holds(t)
		}
	})
}

func TestMove(t *testing.T) {
	month := func(tokens float64) Limit {
		return Limit{Rate: tokens, Period: 720 * time.Hour, Capacity: tokens, Window: true, Start: noon}
	}
	bucket := func(rate, capacity float64) Limit { return Limit{Rate: rate, Period: time.Minute, Capacity: capacity} }
	row := func(value float64, ts Micros) []Row { return []Row{{value, ts}} }
	for _, tt := range []struct {
		name     string
		from, to Limit
		used     []Row
		rows     []Row
		shards   int
		floor    float64
		now      Micros
		want     []Row
	}{
		{"an upgrade", month(100), month(1000), row(20, noon), nil, 1, 0, noon + hour, row(920, noon+hour)},
		{"a downgrade", month(1000), month(100), row(920, noon), nil, 1, 0, noon + hour, row(20, noon+hour)},
		{"a downgrade below what is used", month(1000), month(50), row(920, noon), nil, 1, 0, noon + hour, row(0, noon+hour)},
		{"that may owe", month(1000), month(50), row(920, noon), nil, 1, -20, noon + hour, row(-20, noon+hour)},
		{"that may owe more", month(1000), month(50), row(920, noon), nil, 1, -40, noon + hour, row(-30, noon+hour)},
		{"nothing used", month(100), month(1000), nil, nil, 1, 0, noon + hour, row(1000, noon+hour)},
		{"nothing used in this window", month(100), month(1000), row(20, noon-hour), nil, 1, 0, noon + hour, row(1000, noon+hour)},
		{"back: to has less", month(1000), month(100), row(920, noon), row(10, noon), 1, 0, noon + hour, row(10, noon+hour)},
		{"to is full again in this window", month(1000), month(100), row(920, noon), row(10, noon-hour), 1, 0, noon + hour, row(20, noon+hour)},
		{"to owes", month(1000), month(100), row(920, noon), row(-10, noon), 1, 0, noon + hour, row(-10, noon+hour)},
		{"to owes more than it may", month(1000), month(100), row(920, noon), row(-10, noon), 1, -5, noon + hour, row(-10, noon+hour)},
		{"from owes", month(100), month(1000), row(-50, noon), nil, 1, 0, noon + hour, row(850, noon+hour)},
		{"from owes more than to has", month(100), month(1000), row(-950, noon), nil, 1, 0, noon + hour, row(0, noon+hour)},
		{"from owes for windows to come", month(100), month(1000), row(-250, noon-hour), nil, 1, 0, noon + hour, row(750, noon+hour)},
		{"buckets refill first", bucket(60, 60), bucket(6, 600), row(0, noon), row(590, noon), 1, 0, noon + 20*second, row(560, noon+20*second)},
		{"and are then counted", bucket(6, 60), bucket(60, 600), row(0, noon), row(0, noon), 1, 0, noon + minute, row(60, noon+minute)},
		{"no capacity", month(100), Limit{Rate: 5, Period: 720 * time.Hour, Window: true, Start: noon}, row(20, noon), nil, 1, 0, noon + hour, row(0, noon+hour)},
		{"from was used later, by a clock that stepped back", month(100), month(1000), row(20, noon+hour), row(900, noon-hour), 1, 0, noon + minute, row(920, noon+hour)},
		{"to was used later", month(100), month(1000), row(20, noon), row(900, noon+hour), 1, 0, noon + minute, row(900, noon+hour)},
		{"shards of from", bucket(90, 90), bucket(900, 900), []Row{{10, noon}, {20, noon}, {30, noon}}, nil, 1, 0, noon, row(870, noon)},
		{"shards of to", bucket(90, 90), bucket(900, 900), row(60, noon), nil, 2, 0, noon, []Row{{435, noon}, {435, noon}}},
		{"another number of shards", bucket(90, 90), bucket(900, 900), row(60, noon), []Row{{1, noon}, {2, noon + second}, {3, noon}}, 2, 0, noon, []Row{{3, noon + second}, {3, noon + second}}},
		{"one instant for all shards", bucket(90, 90), bucket(900, 900), row(60, noon), []Row{{1, noon}, {2, noon + second}}, 2, 0, noon, []Row{{1.5, noon + second}, {1.5, noon + second}}},
	} {
		got := tt.to.Move(tt.rows, tt.shards, tt.from, tt.used, tt.floor, tt.now)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
		if again := tt.to.Move(got, tt.shards, tt.from, tt.used, tt.floor, tt.now); !slices.Equal(again, got) {
			t.Errorf("%s: again: %v, want %v", tt.name, again, got)
		}
	}
}

func TestPause(t *testing.T) {
	bucket := Limit{Rate: 60, Period: time.Minute, Capacity: 10}
	for _, tt := range []struct {
		name       string
		rows       []Row
		most       float64
		until, now Micros
		want       []Row
	}{
		{"a part is left", []Row{{8, noon}}, 3, noon + minute, noon + second, []Row{{3, noon + minute}}},
		{"less is there", []Row{{1, noon}}, 3, noon + minute, noon + second, []Row{{2, noon + minute}}},
		{"a debt stays", []Row{{-5, noon}}, 0, noon + minute, noon + second, []Row{{-4, noon + minute}}},
		{"of two, the later end", []Row{{2, noon + hour}}, 1, noon + minute, noon, []Row{{1, noon + hour}}},
		{"and the lower balance", []Row{{2, noon + minute}}, 5, noon + hour, noon, []Row{{2, noon + hour}}},
		{"an end that has passed", []Row{{8, noon}}, 0, noon, noon + second, []Row{{0, noon + second}}},
		{"shards, of which one was used later", []Row{{4, noon}, {2, noon + 2*minute}}, 3, noon + minute, noon, []Row{{1.5, noon + 2*minute}, {1.5, noon + 2*minute}}},
	} {
		got := bucket.Pause(tt.rows, tt.most, tt.until, tt.now)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
		if again := bucket.Pause(got, tt.most, tt.until, tt.now); !slices.Equal(again, got) {
			t.Errorf("%s: again: %v, want %v", tt.name, again, got)
		}
		resumed := Resume(got, tt.now+second)
		if until, paused := Paused(resumed, tt.now+second); paused || until != tt.now+second || bucket.Total(resumed, tt.now+second) != bucket.Total(got, tt.now+second) {
			t.Errorf("%s: resumed as %v", tt.name, resumed)
		}
	}
	for ahead, want := range map[Micros]bool{-second: false, 0: false, second: false, second + 1: true} {
		if _, paused := Paused([]Row{{0, noon}, {0, noon + ahead}}, noon); paused != want {
			t.Errorf("%d µs ahead: paused: %v", ahead, paused)
		}
	}
}

// What rounding leaves of a debt is repaid with the debt, also where a refill is all that there is.
func TestRoundingOwesNothing(t *testing.T) {
	for _, capacity := range []float64{0, 3} {
		l := Limit{Rate: 3, Period: time.Minute, Capacity: capacity, Window: true, Start: noon}
		for debt, want := range map[float64]Micros{0: noon, 1e-12: noon, 3: noon + minute, 3 + 1e-12: noon + minute, 3.1: noon + 2*minute} {
			if got := l.Repaid([]Row{{-debt, noon}}, noon); got != want {
				t.Errorf("capacity %v: %v are repaid at %v, want %v", capacity, debt, got.Time(), want.Time())
			}
		}
	}
}

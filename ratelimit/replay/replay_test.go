package replay_test

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/replay"
)

var noon = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

// at is events of one key, at these times after noon.
func at(key string, after ...time.Duration) (events []replay.Event) {
	for _, d := range after {
		events = append(events, replay.Event{Time: noon.Add(d), Key: key, Count: 1})
	}
	return events
}

func all(events []replay.Event) iter.Seq2[replay.Event, error] {
	return func(yield func(replay.Event, error) bool) {
		for _, e := range events {
			if !yield(e, nil) {
				return
			}
		}
	}
}

func run(t testing.TB, events []replay.Event, limits ...ratelimit.Limit) *replay.Report {
	t.Helper()
	report, err := replay.Run(all(events), limits...)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestRunDecidesByEveryKindOfLimit(t *testing.T) {
	events := at("ann", 0, time.Second, 2*time.Second, 61*time.Minute)
	big := events[3]
	big.Count = 3
	events = append(events, big)
	report := run(t, events,
		ratelimit.TokenBucket("a", 2, time.Hour),
		ratelimit.TokenBucket("a", 2, time.Hour, ratelimit.Capacity(10), ratelimit.Shards(5)),
		ratelimit.FixedWindow("a", 1, time.Hour, ratelimit.Start(noon)),
		ratelimit.CalendarWindow("a", 3, ratelimit.Day),
		ratelimit.TokenBucket("a", 0, time.Hour),
		ratelimit.Unlimited("a"),
	)
	for i, want := range []struct {
		granted, denied int
		wait            time.Duration
	}{
		{3, 2, math.MaxInt64 / 2}, // 3 tokens are above the capacity
		{5, 0, 0},
		{2, 3, math.MaxInt64 / 2},
		{3, 2, 12*time.Hour - 61*time.Minute}, // until midnight
		{0, 5, math.MaxInt64 / 2},
		{5, 0, 0},
	} {
		c := report.Candidates[i]
		if c.Granted != want.granted || c.Denied != want.denied {
			t.Errorf("%v: granted %d, denied %d, want %+v", c.Limit, c.Granted, c.Denied, want)
		}
		if want.denied > 0 && (c.KeysDenied != 1 || c.LongestWaits[0].Wait != want.wait || c.MostDenied[0].Denied != want.denied) {
			t.Errorf("%v: %+v, want %+v", c.Limit, c, want)
		}
	}
	if first := report.Candidates[0].MostDenied[0]; first.Key != "ann" || first.Events != 5 {
		t.Errorf("%+v", first)
	}
	if report.Events != 5 || report.Keys != 1 || !report.From.Equal(noon) || !report.To.Equal(big.Time) {
		t.Errorf("%+v", report)
	}
}

// A wait is RetryAfter at the denial: 1 token of 2 an hour, 1 second after the last one.
func TestTheLongestWait(t *testing.T) {
	report := run(t, append(at("ann", 0, 0, time.Second, 2*time.Second), at("bob", time.Hour, time.Hour)...), ratelimit.TokenBucket("a", 2, time.Hour))
	waits := report.Candidates[0].LongestWaits
	if len(waits) != 1 || waits[0].Wait != 30*time.Minute-time.Second || !waits[0].WaitedAt.Equal(noon.Add(time.Second)) {
		t.Errorf("%+v", waits)
	}
}

func TestRunNamesTheEventThatIsWrong(t *testing.T) {
	limit := ratelimit.TokenBucket("a", 2, time.Hour)
	late := at("ann", time.Second, 0)
	unsorted := replay.CSV(strings.NewReader("t,k\n2026-07-01T12:00:01Z,ann\n2026-07-01T12:00:00Z,bob\n"), replay.Fields{Time: "t", Key: "k"})
	for _, row := range []struct {
		what   string
		events iter.Seq2[replay.Event, error]
		limits []ratelimit.Limit
		want   string
	}{
		{"no candidate", all(late), nil, "at least one limit"},
		{"a candidate with a mistake", all(late), []ratelimit.Limit{limit, ratelimit.TokenBucket("", 1, 0)}, "name"},
		{"out of order", all(late), []ratelimit.Limit{limit}, "event 2: "},
		{"out of order in a log", unsorted, []ratelimit.Limit{limit}, "line 3: "},
		{"a key with NUL", all(at("a\x00b", 0)), []ratelimit.Limit{limit}, "event 1: "},
		{"a long key", all(at(strings.Repeat("k", 1025), 0)), []ratelimit.Limit{limit}, "1025 bytes"},
		{"bad UTF-8", all(at("\xff", 0)), []ratelimit.Limit{limit}, "UTF-8"},
		{"a negative count", all([]replay.Event{{Time: noon, Key: "k", Count: -1}}), []ratelimit.Limit{limit}, "count -1"},
		{"not a number", all([]replay.Event{{Time: noon, Key: "k", Count: math.NaN()}}), []ratelimit.Limit{limit}, "count NaN"},
		{"the year 0", all([]replay.Event{{Key: "k", Count: 1}}), []ratelimit.Limit{limit}, "year"},
	} {
		report, err := replay.Run(row.events, row.limits...)
		if report != nil || !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: %v", row.what, err)
		}
	}
}

func TestAnEmptyKeyIsALimitWithoutKeys(t *testing.T) {
	if c := run(t, at("", 0, 0), ratelimit.TokenBucket("a", 1, time.Hour)).Candidates[0]; c.Denied != 1 || c.MostDenied[0].Key != "" {
		t.Errorf("%+v", c)
	}
}

func TestListsAreBoundedAndSorted(t *testing.T) {
	var events []replay.Event
	for second := range 20 {
		for key := range 20 {
			if second <= key {
				events = append(events, at(fmt.Sprint("key ", key), time.Duration(second)*time.Second)...)
			}
		}
	}
	report := run(t, events, ratelimit.TokenBucket("a", 1, time.Hour))
	c := report.Candidates[0]
	if len(c.MostDenied) != 10 || len(c.LongestWaits) != 10 || c.KeysDenied != 19 || len(report.Busiest) != 5 {
		t.Fatalf("%d, %d, %d, %d", len(c.MostDenied), len(c.LongestWaits), c.KeysDenied, len(report.Busiest))
	}
	for i, k := range c.MostDenied {
		if want := fmt.Sprint("key ", 19-i); k.Key != want || k.Denied != 19-i || k.Events != 20-i {
			t.Errorf("%d: %+v, want %s", i, k, want)
		}
	}
	for i, span := range report.Busiest {
		if !span.From.Equal(noon.Add(time.Duration(i)*time.Second)) || span.Events != 20-i || i > 0 && span.Denied[0] != 20-i {
			t.Errorf("%d: %+v", i, span)
		}
	}
}

// However long the time, the events are counted in few spans, and none is lost.
func TestSpansGrowWithTheTime(t *testing.T) {
	for _, step := range []time.Duration{0, time.Second, time.Minute, 37 * time.Minute, 24 * time.Hour, 100 * 24 * time.Hour} {
		var events []replay.Event
		for i := range 1000 {
			events = append(events, at("k", time.Duration(i)*step)...)
		}
		report := run(t, events, ratelimit.TokenBucket("a", 0, time.Hour))
		bars := strings.Count(report.SVG(), `<rect class="denied"`) - 1 // of the legend
		if bars < 1 || bars > 240 || step > 0 && bars < 30 {
			t.Errorf("%v: %d bars", step, bars)
		}
		counted := 0
		for line := range strings.Lines(report.SVG()) {
			for _, title := range strings.Split(line, "<g><title>")[1:] {
				var n, denied int
				if _, err := fmt.Sscanf(title[len("2026-07-01 12:00:00Z: "):], "%d events, %d denied", &n, &denied); err != nil || n != denied {
					t.Fatal(title, err)
				}
				counted += n
			}
		}
		if counted != 1000 {
			t.Errorf("%v: %d events are counted", step, counted)
		}
	}
}

// The suggestion denies nobody, and one token less denies somebody: by the decisions of the engine. (Times of nanoseconds make
// it improbable that an event comes in the microsecond of its token, where rounding decides.)
func TestTheSuggestionIsTheSmallestCapacity(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for round := range 200 {
		var events []replay.Event
		now := time.Duration(0)
		for range 100 {
			now += time.Duration(r.ExpFloat64() * float64(time.Minute))
			events = append(events, at(fmt.Sprint(r.IntN(5)), now)...)
			events[len(events)-1].Count = float64(1 + r.IntN(3))
		}
		rate := float64(1 + r.IntN(10))
		for _, with := range []func(options ...ratelimit.Option) ratelimit.Limit{
			func(o ...ratelimit.Option) ratelimit.Limit {
				return ratelimit.TokenBucket("a", rate, 10*time.Minute, o...)
			},
			func(o ...ratelimit.Option) ratelimit.Limit {
				return ratelimit.FixedWindow("a", rate, 10*time.Minute, o...)
			},
			func(o ...ratelimit.Option) ratelimit.Limit {
				return ratelimit.CalendarWindow("a", rate, ratelimit.Day, o...)
			},
		} {
			for _, share := range []float64{0, 0.2, 0.5} {
				capacity, ok := run(t, events, with()).Candidates[0].Suggest(share)
				if !ok {
					t.Fatal("no suggestion")
				}
				report := run(t, events, with(ratelimit.Capacity(capacity)), with(ratelimit.Capacity(capacity-1)))
				keys := float64(report.Keys)
				if got := float64(report.Candidates[0].KeysDenied); got > share*keys {
					t.Errorf("seed %d, round %d, share %v: %v denies %v of %v keys", seed, round, share, report.Candidates[0].Limit, got, keys)
				}
				if got := float64(report.Candidates[1].KeysDenied); got <= share*keys {
					t.Errorf("seed %d, round %d, share %v: %v denies only %v of %v keys", seed, round, share, report.Candidates[1].Limit, got, keys)
				}
			}
		}
	}
}

// Five years are 60 windows, though months are shorter than the longest of them. What was denied counts in full.
func TestTheSuggestionCountsAllMonths(t *testing.T) {
	january := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	report := run(t, []replay.Event{
		{Time: january, Key: "k", Count: 70},
		{Time: january.AddDate(5, 0, 0), Key: "k", Count: 61},
	}, ratelimit.CalendarWindow("a", 1, ratelimit.Month))
	if got, _ := report.Candidates[0].Suggest(0); got != 70-60+61 {
		t.Error(got)
	}
	var single []replay.Event
	for i := range 70 + 61 {
		at := january
		if i >= 70 {
			at = january.AddDate(5, 0, 0)
		}
		single = append(single, replay.Event{Time: at, Key: "k", Count: 1})
	}
	if got, _ := run(t, single, ratelimit.CalendarWindow("a", 1, ratelimit.Month)).Candidates[0].Suggest(0); got != 70-60+61 {
		t.Errorf("one by one: %v", got)
	}
}

func TestNoCapacityIsSuggestedWhereNoneHelps(t *testing.T) {
	for _, limit := range []ratelimit.Limit{ratelimit.TokenBucket("a", 0, time.Hour), ratelimit.Unlimited("a")} {
		if capacity, ok := run(t, at("k", 0), limit).Candidates[0].Suggest(0); ok {
			t.Errorf("%v: %v", limit, capacity)
		}
	}
	limit := ratelimit.TokenBucket("a", 1, time.Hour)
	if _, ok := run(t, nil, limit).Candidates[0].Suggest(0); ok {
		t.Error("without events")
	}
	for share, want := range map[float64]float64{0: 3, 0.49: 3, 0.5: 1, 1: 1, 7: 1} {
		if got, ok := run(t, append(at("a", 0, 0, 0), at("b", 0)...), limit).Candidates[0].Suggest(share); !ok || got != want {
			t.Errorf("share %v: %v, want %v", share, got, want)
		}
	}
}

func TestReorder(t *testing.T) {
	events := at("k", 0, 3*time.Second, time.Second, 3*time.Second, 2*time.Second, 9*time.Second, 5*time.Second, 20*time.Second, 0)
	for i := range events {
		events[i].Count = float64(i)
	}
	var order []float64
	for e, err := range replay.Reorder(all(events), 5*time.Second) {
		if err != nil {
			t.Fatal(err)
		}
		order = append(order, e.Count)
	}
	if got := fmt.Sprint(order); got != "[0 2 4 1 3 6 5 8 7]" { // the last one is too late
		t.Error(got)
	}
	limit := ratelimit.TokenBucket("a", 1, time.Hour)
	if _, err := replay.Run(replay.Reorder(all(events[:8]), 5*time.Second), limit); err != nil {
		t.Error(err)
	}
	if _, err := replay.Run(replay.Reorder(all(events), 5*time.Second), limit); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Error(err)
	}
	for _, err := range replay.Reorder(all(events), -1) { // leaving early is no harm
		if err != nil {
			t.Error(err)
		}
		break
	}
}

// A hundred times as many events need hardly more memory.
func TestTheMemoryIsBoundedByKeys(t *testing.T) {
	used := func(n int) uint64 {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		i := 0
		_, err := replay.Run(func(yield func(replay.Event, error) bool) {
			for ; i < n && yield(replay.Event{Time: noon.Add(time.Duration(i) * time.Second), Key: fmt.Sprint("key ", i%100), Count: 1}, nil); i++ {
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
		}, ratelimit.TokenBucket("a", 1, time.Hour), ratelimit.CalendarWindow("a", 1, ratelimit.Day))
		if err != nil {
			t.Fatal(err)
		}
		return max(after.HeapAlloc, before.HeapAlloc) - before.HeapAlloc
	}
	few, many := used(1000), used(100_000)
	if many > few+1<<20 {
		t.Errorf("1,000 events need %d bytes, 100,000 need %d", few, many)
	}
}

// BenchmarkRun is a million events of 100,000 keys in CSV, by one candidate.
func BenchmarkRun(b *testing.B) {
	var log strings.Builder
	log.WriteString("time,key\n")
	for i := range 1_000_000 {
		fmt.Fprintf(&log, "%s,user-%d\n", noon.Add(time.Duration(i)*50*time.Millisecond).Format(time.RFC3339Nano), i*7919%100_000)
	}
	for b.Loop() {
		report, err := replay.Run(replay.CSV(strings.NewReader(log.String()), replay.Fields{Time: "time", Key: "key"}), ratelimit.TokenBucket("a", 10, time.Hour, ratelimit.Capacity(3)))
		if err != nil || report.Events != 1_000_000 {
			b.Fatal(err)
		}
		_ = report.SVG()
	}
}

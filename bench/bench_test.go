package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestEveryFigureIsListed checks the list of figures and their bounds.
func TestEveryFigureIsListed(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), &out, []string{"list"}); err != nil {
		t.Fatal(err)
	}
	listed := map[string]string{}
	for line := range strings.Lines(out.String()) {
		fields := strings.Fields(line)
		listed[fields[0]] = strings.Join(fields[1:4], " ")
	}
	want := map[string]string{
		"tx_own_keys":                  "at least 0.9",
		"pool_own_keys":                "at least 0.86",
		"tx_serializable_small_table":  "at least 4",
		"hot_queue_vs_mutex":           "at least 0.9",
		"hot_queue_vs_update":          "at least 1",
		"hot_queue_p99":                "at most 0.25",
		"hot_queue_wasted":             "at most 0.05",
		"hot_queue_wasted_4_processes": "at most 0.3",
		"shards_vs_one_row":            "at least 2.2",
		"shard_utilization":            "at least 0.97",
		"coalesced_hot_64":             "at least 1.5",
		"coalesced_hot_256":            "at least 4",
		"coalesced_own_64":             "at least 0.9",
		"coalesced_own_256":            "at least 0.9",
		"coalesced_100k_256":           "at least 1.3",
		"coalesced_calendar":           "at least 0.9",
		"ahead_hot_64":                 "at least 15",
		"ahead_own_64":                 "at least 12",
		"ahead_two_limits":             "at least 3",
		"ahead_open_statements":        "at most 0.1",
		"ahead_open_wal":               "at most 0.1",
		"ahead_flood_p99":              "at most 2",
		"coalesced_idle":               "at least 0.95",
		"denials_vs_for_update":        "at least 8",
		"pipelined_tx":                 "at least 1.5",
		"multi_3":                      "at least 0.9",
		"each_100":                     "at least 0.9",
		"hold_vs_two_consumes":         "at most 1.6",
		"hold_denied_10000":            "at most 10",
		"holds_renewed_10000":          "at most 1000",
		"holds_in_bulk_10000":          "at most 60",
		"holds_old_snapshot":           "at most 2",
		"calendar_vs_window":           "at least 0.9",
		"ten_million_rows":             "at least 0.9",
		"sweep_p99":                    "at most 1.5",
		"flood_p99":                    "at most 2",
		"over_grant":                   "at most 0",
	}
	for name, bound := range want {
		if listed[name] != bound {
			t.Errorf("%s is listed with %q, want %q", name, listed[name], bound)
		}
	}
	if len(listed) != len(want) {
		t.Errorf("%d figures are listed, want %d:\n%s", len(listed), len(want), &out)
	}
}

// TestEveryFigureRuns runs each figure for a moment, as -quick does.
func TestEveryFigureRuns(t *testing.T) {
	for _, f := range figures {
		t.Run(f.name, func(t *testing.T) {
			_, err := testEnv(t).measure(t.Context(), f)
			if errors.Is(err, errNoRedis) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestQuickRunsTheFiguresThatAreNamed, or all of them, and goes on after one that fails.
func TestQuickRunsTheFiguresThatAreNamed(t *testing.T) {
	was := figures
	t.Cleanup(func() { figures = was })
	var ran []string
	figures = nil
	for _, name := range []string{"a", "b", "c"} {
		figures = append(figures, figure{name: name, run: func(_ context.Context, e *env) (outcome, error) {
			if !e.quick {
				t.Error("not for a moment")
			}
			ran = append(ran, name)
			return outcome{}, map[string]error{"a": errors.New("broken")}[name]
		}})
	}
	for _, tt := range []struct {
		args []string
		want string
		err  bool
	}{
		{[]string{"-quick"}, "a b c", true},
		{[]string{"-quick", "c", "b"}, "c b", false},
		{[]string{"-quick", "all"}, "a b c", true},
	} {
		ran = nil
		err := run(t.Context(), io.Discard, tt.args)
		if got := strings.Join(ran, " "); got != tt.want || (err != nil) != tt.err {
			t.Errorf("%q ran %q, %v; want %q, an error: %v", tt.args, got, err, tt.want, tt.err)
		}
	}
}

func TestAnUnknownFigureIsAnError(t *testing.T) {
	if err := run(t.Context(), io.Discard, []string{"nonsense"}); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("the error is %v", err)
	}
}

// TestExactContendersGrantWithinTheBound runs many goroutines on one key, for each contender on a real server.
func TestExactContendersGrantWithinTheBound(t *testing.T) {
	for _, c := range contenders {
		if c.floor {
			continue // it decides nothing
		}
		t.Run(c.name, func(t *testing.T) {
			e := testEnv(t)
			it, err := c.open(t.Context(), e, setting{perSecond: grantRate, burst: grantBurst, conns: 8, goroutines: 16})
			if errors.Is(err, errNoRedis) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			g, err := countGrants(t.Context(), 250*time.Millisecond, 16, func(ctx context.Context) (bool, error) { return it.take(ctx, "hot") })
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("granted %v", g)
			if c.exact && g.excess() > 0 {
				t.Errorf("granted %v", g)
			}
			if g.granted < grantBurst {
				t.Errorf("granted %d, less than the burst", g.granted)
			}
		})
	}
}

// TestCountGrantsSeesAnOverGrant counts a limiter that grants everything.
func TestCountGrantsSeesAnOverGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := countGrants(t.Context(), 50*time.Millisecond, 4, func(context.Context) (bool, error) {
			time.Sleep(time.Millisecond)
			return true, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if g.excess() == 0 {
			t.Errorf("granted %v, and there was no excess", g)
		}
	})
}

// TestCompare compares calls that take 5 ms and 10 ms, beside calls that take 20 ms.
func TestCompare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sleep := func(name string, d time.Duration) *side {
			return &side{name: name, goroutines: 4, call: func(context.Context, int) error { time.Sleep(d); return nil }}
		}
		var out bytes.Buffer
		c, err := compare(t.Context(), &out, 2, 150*time.Millisecond, sleep("one", 5*time.Millisecond), sleep("two", 10*time.Millisecond), sleep("three", 20*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		if r := c.ratio(0, 1); r < 1.4 || r > 2.6 {
			t.Errorf("the ratio is %v, want about 2:\n%s", r, &out)
		}
		if p := c.totals[1].latencies.quantile(0.5); p < 10*time.Millisecond || p > 20*time.Millisecond {
			t.Errorf("the median latency is %v, want about 10 ms", p)
		}
		if r := c.ratio(2, 1); r < 0.35 || r > 0.7 {
			t.Errorf("20 ms a call to 10 ms is %v, want about 0.5:\n%s", r, &out)
		}
	})
}

// TestCompareEndsWithAnError checks that an error of one side ends both.
func TestCompareEndsWithAnError(t *testing.T) {
	broken := errors.New("broken")
	fine := &side{name: "fine", goroutines: 2, call: func(context.Context, int) error { time.Sleep(time.Millisecond); return nil }}
	_, err := compare(t.Context(), io.Discard, 2, time.Millisecond, fine, &side{name: "bad", goroutines: 2, call: func(context.Context, int) error { return broken }})
	if !errors.Is(err, broken) {
		t.Errorf("the error is %v", err)
	}
}

func TestQuantile(t *testing.T) {
	var h histogram
	for i := range 1000 {
		h.add(time.Duration(i) * time.Microsecond)
	}
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Microsecond, 0.99: 990 * time.Microsecond} {
		if got := h.quantile(q); got < want || got > want+want/25 {
			t.Errorf("the quantile %v is %v, want %v", q, got, want)
		}
	}
}

// servers outlive the env of a test, so that Postgres and Redis are started once.
var servers = &env{out: io.Discard, quick: true}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == childCommand { // a figure of several processes calls its own program
		if err := child(context.Background(), os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	code := m.Run()
	if err := servers.close(); err != nil {
		panic(err)
	}
	os.Exit(code)
}

// testEnv returns the servers. The end of the test closes everything that it opens on them.
func testEnv(t *testing.T) *env {
	t.Helper()
	t.Cleanup(func() {
		if err := servers.undo(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return servers
}

// TestWhatTheHostTookIsTold reads /proc/stat of a machine whose host took two sevenths of the time.
func TestWhatTheHostTookIsTold(t *testing.T) {
	before := parseCPUTime("cpu  100 0 100 700 50 0 40 10 5 0\ncpu0 1 2 3\n")
	if want := (cpuTime{all: 1000, stolen: 10}); before != want {
		t.Errorf("read %+v, want %+v", before, want)
	}
	if got := before.until(parseCPUTime("cpu  200 0 200 750 50 0 40 110 5 0\n")).share(); got != 100.0/350 {
		t.Errorf("%v was taken, want %v", got, 100.0/350)
	}
	for _, later := range []cpuTime{{all: 999, stolen: 10}, {all: 1001, stolen: 9}, before} { // a count goes backwards, or no time passes
		if got := before.until(later); got != (cpuTime{}) || got.share() != 0 {
			t.Errorf("from %+v until %+v it is %+v", before, later, got)
		}
	}
	for _, stat := range []string{"", "cpu 1 2 3\n", "cpu  1 2 3 4 5 6 7 x\n", "intr 1 2 3 4 5 6 7 8\n"} {
		if got := parseCPUTime(stat); got != (cpuTime{}) {
			t.Errorf("%q was read as %+v", stat, got)
		}
	}
}

// TestGrowth measures very little, and looks at the tables. What a decision costs is above zero on any machine.
func TestGrowth(t *testing.T) {
	e := testEnv(t)
	g := growth{slice: 250 * time.Millisecond, warmup: 30 * time.Millisecond, rounds: 2, keys: 512, rows: 3000, calls: 20,
		only: []string{"pool, many keys", "`Coalescer`, one key", "Redis, rueidis, many keys", txWithout, txWith, deniedName}}
	var out bytes.Buffer
	err := measureGrowth(t.Context(), e, g, &out)
	if errors.Is(err, errNoRedis) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	lines := strings.Split(out.String(), "\n")
	costs := map[string][]string{}
	for _, line := range lines {
		if cells := strings.Split(strings.Trim(line, "| "), " | "); len(cells) > 2 {
			way, _, _ := strings.Cut(cells[0], " (the host took")
			costs[way] = cells[1:]
		}
	}
	example := costs["50,000 tenants, 2,000/s: pool"]
	if len(example) != 4 || example[0] == "0.000" || strings.HasPrefix(example[2], "0 ") {
		t.Errorf("the example is %q", example)
	}
	for _, way := range g.only {
		if len(costs[way]) != 7 {
			t.Fatalf("%q has the cells %q", way, costs[way])
		}
		// Per second, server, client, sum. A batch for many calls of one key may take the server less than a tick of /proc.
		for i, cell := range costs[way][1:5] {
			if v, err := strconv.ParseFloat(strings.ReplaceAll(cell, ",", ""), 64); err != nil || v < 0 || v == 0 && i != 1 {
				t.Errorf("%q: %q", way, costs[way])
			}
		}
	}
}

// TestThePageOfGrowthHasAPlaceForTheTables writes into a copy of the page.
func TestThePageOfGrowthHasAPlaceForTheTables(t *testing.T) {
	page, err := os.ReadFile("GROWTH.md")
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "GROWTH.md")
	if err := os.WriteFile(name, page, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := growthPage(name, "| new |\n"); err != nil {
		t.Fatal(err)
	}
	changed, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(changed), growthBegin+"| new |\n"+growthEnd); got != 1 {
		t.Errorf("the tables are %d times in the page", got)
	}
	if _, err := writeBetween("a page without the comments", ""); err == nil {
		t.Error("a page without the comments is no error")
	}
}

func TestAddressKeysDiffer(t *testing.T) {
	seen := map[string]bool{}
	for i := range uint32(100_000) {
		seen[addressKey(i)] = true
	}
	if len(seen) != 100_000 {
		t.Errorf("100,000 addresses are %d", len(seen))
	}
}

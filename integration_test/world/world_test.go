package world_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
)

var (
	worldTime    = flag.Duration("worldtime", 0, "how long TestWorld plays (0: some worlds)")
	worldDemands = flag.Bool("worldpairs", true, "if TestWorld plays for 10 minutes or more, every pair of features must meet")
)

// TestWorld plays random worlds in which everything happens to a few keys, and tries what the library says when it says it. A world that
// fails is shrunk, and printed as a test.
func TestWorld(t *testing.T) {
	t.Parallel()
	seed := *harness.SeedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("the first world has -seed %d", seed)
	pairs := &worldPairs{met2: map[[2]string]int{}}
	const players = 2
	worlds := uint64(harness.Sized(60, 1)) // of each
	t.Run("worlds", func(t *testing.T) {
		for i := range players {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				w := newEverything(t, pairs)
				began := time.Now() // it may have waited for its turn
				for n := uint64(0); (n < worlds && *worldTime == 0 || time.Since(began) < *worldTime) && !pairs.failed.Load(); n++ {
					w.plays(newWorldScript(seed + n*players + uint64(i)))
				}
			})
		}
	})
	if pairs.worlds == 0 && !pairs.failed.Load() {
		t.Error("no world was played")
	}
	pairs.report(t, *worldDemands && *worldTime >= 10*time.Minute && !pairs.failed.Load())
}

func newEverything(t *testing.T, pairs *worldPairs) *everything {
	t.Helper()
	w := &everything{TB: t, pairs: pairs}
	w.openWorld()
	return w
}

// plays plays a script. If it fails, the test fails with the shortest script that still does.
func (w *everything) plays(script worldScript) {
	w.Helper()
	failed := w.play(script)
	if failed == "" {
		return
	}
	w.pairs.failed.Store(true)
	w.Logf("a world of seed %d failed, and is shrunk: %s", script.Seed, failed)
	shortest := script.shrunk(func(s worldScript) bool { return w.play(s) != "" }, time.Now().Add(30*time.Second))
	again := w.play(shortest)
	w.Fatalf("a world of seed %d failed: %s\n\nIts shortest script fails (\"\": not again) with %q:\n\n%v", script.Seed, failed, again, shortest)
}

// replayWorld plays a script that a failure has printed.
func replayWorld(t *testing.T, script worldScript) *everything {
	t.Helper()
	w := newEverything(t, &worldPairs{met2: map[[2]string]int{}})
	w.plays(script)
	return w
}

// TestAWorldOfEveryStep plays every step, and every verb in every way, once.
func TestAWorldOfEveryStep(t *testing.T) {
	t.Parallel()
	script := worldScript{Seed: 41}
	n := newWorldNumbers(script.Seed)
	for v, do := range slices.Compact(slices.Sorted(slices.Values(worldVerbs))) {
		for i, way := range slices.Compact(slices.Sorted(slices.Values(worldWays))) {
			if testing.Short() && do != "consume" && (v+i)%4 > 0 { // each verb, and each way
				continue
			}
			other := -1
			if do == "move" {
				other = 1
			}
			script.Steps = append(script.Steps, worldStep{Do: do, Way: way, Key: i % len(n.keys), Other: other, Count: 1, Level: i % len(harness.Levels), Program: i % n.programs},
				worldStep{Do: "clock", For: time.Second})
		}
	}
	for _, way := range slices.Compact(slices.Sorted(slices.Values(worldSteers))) {
		script.Steps = append(script.Steps, worldStep{Do: "reset", Way: way})
		for _, do := range slices.Compact(slices.Sorted(slices.Values(worldDoes))) {
			if steers := slices.Contains([]string{"override", "block", "unlimited", "restore", "unblock"}, do); way != "" && !steers {
				continue
			}
			script.Steps = append(script.Steps, worldStep{Do: do, Way: way, For: time.Hour}, worldStep{Do: "consume", Way: "pool", Other: -1, Count: 1}, worldStep{Do: "clock", For: 2 * time.Hour})
		}
	}
	for n := range uint64(12) { // jobs with a slot and without, with an end and without
		script.Steps = append(script.Steps, worldStep{Do: "restore", N: 1}, worldStep{Do: "hold", Other: -1, Count: 0.1, For: time.Second, N: n})
		if n%3 > 0 {
			script.Steps = append(script.Steps, worldStep{Do: "clock", For: 2 * time.Second})
		}
		script.Steps = append(script.Steps, worldStep{Do: []string{"settle", "release"}[n%2], Other: -1})
	}
	script.Steps = append(script.Steps, []worldStep{
		{Do: "reset"}, {Do: "late", For: time.Hour}, {Do: "override", Key: 1, N: 3}, {Do: "commit"}, // after a newer one
		{Do: "override", Limit: 2, N: 6}, {Do: "consume", Way: "pool", Limit: 2, Other: -1, Count: 1}, {Do: "override", Limit: 2, N: 1}, {Do: "add", Limit: 2},
		{Do: "restore", Limit: 1}, {Do: "restore", Limit: 2}, {Do: "consume", Way: "tx", Limit: 1, Other: 2, Count: 1, Rollback: true}, {Do: "move", Limit: 1, Other: 2},
		{Do: "crowd", Other: -1, Count: 1, For: time.Second}, {Do: "clock", For: -time.Second},
	}...)
	paused := worldScript{Seed: 1, Steps: []worldStep{{Do: "queue", Other: -1, For: time.Second}, {Do: "give-up", Other: -1, Count: 1, For: time.Second}}} // the first whose first limit is a token bucket: only that can be paused
	for c := newWorldNumbers(paused.Seed).limits[0].Config(); c.Kind != "token bucket" || c.Shards > 1; c = newWorldNumbers(paused.Seed).limits[0].Config() {
		paused.Seed++
	}
	for _, most := range []float64{2, 1, 0} {
		paused.Steps = append(paused.Steps, worldStep{Do: "consume", Way: "tx", Other: -1, Count: 1}, worldStep{Do: "pause", Count: most, For: time.Hour},
			worldStep{Do: "consume", Way: "pool", Other: -1, Count: 1}, worldStep{Do: "refund"}, worldStep{Do: "reserve", Way: "pool", Other: -1, Count: 1},
			worldStep{Do: "clock", For: 10 * time.Minute}, worldStep{Do: "refund"}, worldStep{Do: "resume"}, worldStep{Do: "clock", For: time.Second})
	}
	ahead := worldScript{Seed: 1} // the first whose first limit has plenty
	for c := newWorldNumbers(ahead.Seed).limits[0].Config(); c.Kind != "token bucket" || c.Shards > 1 || c.MaxReserved != nil || c.Varies != "" || *c.Rate == 0 || *c.Capacity < 1000; c = newWorldNumbers(ahead.Seed).limits[0].Config() {
		ahead.Seed++
	}
	for n := range uint64(12) {
		ahead.Steps = append(ahead.Steps, worldStep{Do: "foresee", Other: -1, Count: 1, N: n}, worldStep{Do: "clock", For: time.Duration(n%3) * 100 * time.Millisecond})
	}
	ahead.Steps = append(ahead.Steps, worldStep{Do: "give back"})
	for n := range uint64(4) { // at one instant, so that the bucket has refilled nothing of what comes back
		ahead.Steps = append(ahead.Steps, worldStep{Do: "foresee", Other: -1, Count: 1, N: n})
	}
	ahead.Steps = append(ahead.Steps, worldStep{Do: "restart"})
	w := replayWorld(t, script)
	met := map[string]bool{}
	for _, script := range []worldScript{{}, paused, ahead} {
		if script.Steps != nil {
			w.plays(script)
		}
		for _, features := range w.features {
			for feature := range features {
				met[feature] = true
			}
		}
	}
	happens := worldFeatures[slices.Index(worldFeatures, "do-consume"):] // those before are what limits and keys have
	for _, feature := range happens {
		if !met[feature] && (w.hasClock || feature != "ask-tool" && feature != "ask-page") {
			t.Errorf("no key has met %s", feature)
		}
	}
}

// TestAWorldOfABlockBesideTooMuch: a call for two keys, one blocked for good, and one with too little until an override ends, is denied by
// the block. It is no mistake of the caller.
func TestAWorldOfABlockBesideTooMuch(t *testing.T) {
	t.Parallel()
	replayWorld(t, worldScript{Seed: 16653782637672134966, Steps: []worldStep{
		{Do: "block", Other: -1, N: 0x779a31f9fef1f6eb},
		{Do: "override", Limit: 1, Other: -1, For: 39676915055000, N: 0x2e2321d9958c5545},
		{Do: "consume", Way: "pool", Other: 1, Count: 2, N: 0xe49c23af05423ac7},
	}})
}

// TestAWorldOfAnOldDebt: a debt of five years, of a calendar whose numbers are an override's for two months. The windows since then count by
// the definition, too, once the override ends.
func TestAWorldOfAnOldDebt(t *testing.T) {
	t.Parallel()
	replayWorld(t, worldScript{Seed: 3055230922459496001, Steps: []worldStep{
		{Do: "charge", Way: "rpc", Other: -1, Count: 70.1, Level: 1, N: 0xb5e024de226e89c0},
		{Do: "reserve", Way: "tx", Program: 1, Other: 1, Count: 35, Level: 2, N: 0xb5791b77f2efebe1},
		{Do: "clock", Other: -1, For: 31536000000000000, N: 0xf966527fe89472f7},
		{Do: "clock", Other: -1, For: 31536000000000000, N: 0x49b1db59f1ce70d2},
		{Do: "override", Program: 1, Limit: 1, Other: -1, For: 4838400000000000, N: 0x46b5958b8534e29},
		{Do: "consume", Way: "canceled", Program: 1, Limit: 1, Other: -1, Count: 0.1, N: 0xf02dbd31ecf215e9},
	}})
}

// TestAWorldOfAJobAboveItsCapacity: a job takes two of a quarter's one, by an override that ends before the next quarter, and so has to wait
// for that. What a limit of a few a day forfeits meanwhile is too much until the quarter is nearly over.
func TestAWorldOfAJobAboveItsCapacity(t *testing.T) {
	t.Parallel()
	replayWorld(t, worldScript{Seed: 15791861007636602543, Steps: []worldStep{
		{Do: "clock", Limit: 1, Other: -1, For: 2419200000000000, N: 0xa1afd53eda27ce2},
		{Do: "clock", Limit: 1, Key: 1, Other: -1, For: 2419200000000000, N: 0x52a8fe9abd75ffa},
		{Do: "override", Way: "page", Other: -1, For: 15552000000000000, N: 0xf84e1adacdfd090d},
		{Do: "clock", Other: -1, For: 2592000000000000, N: 0x6400d614a7a28a95},
		{Do: "reserve", Way: "by hand", Other: 2, Count: 2, Level: 1, N: 0xf6eda6c7909abb3},
	}})
}

// TestAWorldOfAPlanBelowOneToken: an override gives a plan of 0.3 a capacity of one, which is used up, and ends before the next window.
// There is never one token again, and the page must not promise one.
func TestAWorldOfAPlanBelowOneToken(t *testing.T) {
	t.Parallel()
	replayWorld(t, worldScript{Seed: 6309192540519961152, Steps: []worldStep{
		{Do: "override", Way: "go", Program: 1, Other: -1, For: 15768000000000000, N: 0xbfa290cc97fb66bf},
		{Do: "reserve", Way: "batch", Program: 1, Other: -1, Count: -1, N: 0x1d860598b9e8e66c},
		{Do: "page", Way: "tool", Other: -1, N: 0x6e7a706a676cc1eb},
	}})
}

// TestAWorldIsShrunk: what remains of a script is what it needs to fail.
func TestAWorldIsShrunk(t *testing.T) {
	t.Parallel()
	script := newWorldScript(7)
	script.Steps[13].Do, script.Steps[29].Do = "first", "second"
	fails := func(s worldScript) bool {
		is := func(do string) func(worldStep) bool { return func(s worldStep) bool { return s.Do == do } }
		first := slices.IndexFunc(s.Steps, is("first"))
		return first >= 0 && slices.IndexFunc(s.Steps, is("second")) > first
	}
	shortest := script.shrunk(fails, time.Now().Add(time.Minute))
	if len(shortest.Steps) != 2 || !fails(shortest) || !strings.Contains(shortest.String(), `{Do: "first"`) {
		t.Errorf("%v", shortest)
	}
}

// worldPairs counts how often two features have met on one key.
type worldPairs struct {
	failed atomic.Bool // a world: the others end
	mu     sync.Mutex
	worlds int
	met2   map[[2]string]int
}

func (p *worldPairs) met(features map[worldKey]map[string]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.worlds++
	for _, met := range features {
		for a := range met {
			for b := range met {
				if a < b {
					p.met2[[2]string{a, b}]++
				}
			}
		}
	}
}

// worldFeatures are all features. A new one is added here, and where a step says that it has met a key.
var worldFeatures = []string{
	"token-bucket", "fixed-window", "calendar-window", "sharded", "varies", "own-numbers", "bounded-debt", "global", "many-parts", "decimals", "billion", "no-rate", "other-version",
	"do-consume", "do-reserve", "do-take", "do-wait", "do-charge", "do-refund", "do-move", "do-pause", "do-resume", "do-reset", "do-crowd", "do-hold", "do-settle", "do-release", "slots", "hold-expired", "give-up", "queue", "scramble",
	"way-pool", "way-tx", "way-coalescer", "way-batch", "way-intx", "way-sql", "way-insqltx", "way-each", "way-by-hand", "way-middleware", "way-rpc", "way-canceled", "way-ahead", "ahead", "ahead-taken", "ahead-early", "ahead-back",
	"ask-tool", "ask-page", "ask-usage", "steer-go", "steer-tool", "steer-page",
	"several", "rollback",
	"override-numbers", "override-block", "override-unlimited", "override-with-end", "override-of-all-keys", "override-late", "override-removed", "override-ended",
	"sweep", "publish", "restart", "reshard", "add", "clock-back", "clocks-differ",
}

// worldApart are the pairs that cannot meet, with the reason.
var worldApart = map[[2]string]string{
	{"fixed-window", "token-bucket"}:    "a limit has one kind",
	{"calendar-window", "token-bucket"}: "a limit has one kind",
	{"calendar-window", "fixed-window"}: "a limit has one kind",
	{"do-pause", "fixed-window"}:        "a window is not paused",
	{"do-resume", "fixed-window"}:       "a window is not paused",
	{"calendar-window", "do-pause"}:     "a window is not paused",
	{"calendar-window", "do-resume"}:    "a window is not paused",
	{"do-pause", "global"}:              "it is refused where the limit has keys, as all of these have",
	{"do-resume", "global"}:             "it is refused where the limit has keys",
	{"do-reset", "global"}:              "it is refused where the limit has keys",
	{"queue", "sharded"}:                "its rows do not wait for each other",
	{"no-rate", "queue"}:                "it grants nothing by its definition",
	{"global", "many-parts"}:            "a limit without keys has no parts",
	{"global", "override-of-all-keys"}:  "of a limit without keys, an override of all keys is its own",
	{"varies", "way-by-hand"}:           "SQL without numbers does not know a key's own ones",
	{"own-numbers", "way-by-hand"}:      "SQL without numbers does not know a key's own ones",
}

// report logs the table, and wants all pairs that can meet to have met.
func (p *worldPairs) report(t *testing.T, all bool) {
	t.Helper()
	var missing, rare []string
	pairs := 0
	for i, a := range worldFeatures {
		for _, b := range worldFeatures[i+1:] {
			pair := [2]string{min(a, b), max(a, b)}
			n := p.met2[pair]
			reason, apart := worldApart[pair]
			switch {
			case apart && n > 0:
				t.Errorf("%s and %s have met %d times, though %s", a, b, n, reason)
			case apart:
			case n == 0:
				missing = append(missing, a+" × "+b)
			case n < 3:
				rare = append(rare, fmt.Sprintf("%s × %s: %d", a, b, n))
			}
			pairs++
		}
	}
	for pair := range p.met2 {
		for _, feature := range pair {
			if !slices.Contains(worldFeatures, feature) {
				t.Errorf("feature %q is not listed", feature)
			}
		}
	}
	t.Logf("%d worlds; of %d pairs of features, %d cannot meet, and %d have not met", p.worlds, pairs, len(worldApart), len(missing))
	if testing.Verbose() && !t.Failed() {
		t.Logf("%s\nnot met: %s", p.table(), strings.Join(missing, ", "))
	}
	if all && len(missing) > 0 {
		t.Errorf("%d pairs have not met: %s; rarely met: %s", len(missing), strings.Join(missing, ", "), strings.Join(rare, ", "))
	}
}

// table is how often each feature has met each of those after it.
func (p *worldPairs) table() string {
	var b strings.Builder
	b.WriteString("how often a feature has met the others, in their order:\n")
	for i, f := range worldFeatures {
		fmt.Fprintf(&b, "%2d %-20s", i, f)
		for _, other := range worldFeatures[:i] {
			fmt.Fprintf(&b, " %d", p.met2[[2]string{min(f, other), max(f, other)}])
		}
		b.WriteByte('\n')
	}
	return b.String()
}

package world_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/ratelimit"
)

// worldScript is a world and what happens in it: plain values, so that it can be played again, shrunk and printed. The seed makes the limits
// and the keys.
type worldScript struct {
	Seed  uint64
	Steps []worldStep
}

// worldStep is one thing that happens. A step uses the fields that its kind needs.
type worldStep struct {
	Do         string // a verb, or what an operator does
	Way        string // how the call is made
	Program    int
	Limit, Key int
	Other      int     // of a call for several limits, or a move: the other limit; -1: none
	Count      float64 // worldAll: all that is there
	Level      int     // of a transaction
	Rollback   bool
	For        time.Duration // how far the clock goes, or how long an override lasts; 0: without end
	N          uint64        // the seed of what else the step chooses
}

// worldAll is the count of a step that asks for all that is there.
const worldAll = -1

// String is the step as Go, without what is zero.
func (s worldStep) String() string {
	var fields []string
	add := func(name string, zero bool, value any) {
		if !zero {
			fields = append(fields, fmt.Sprintf("%s: %#v", name, value))
		}
	}
	add("Do", s.Do == "", s.Do)
	add("Way", s.Way == "", s.Way)
	add("Program", s.Program == 0, s.Program)
	add("Limit", s.Limit == 0, s.Limit)
	add("Key", s.Key == 0, s.Key)
	add("Other", s.Other == 0, s.Other)
	add("Count", s.Count == 0, s.Count)
	add("Level", s.Level == 0, s.Level)
	add("Rollback", !s.Rollback, s.Rollback)
	add("For", s.For == 0, int64(s.For))
	add("N", s.N == 0, s.N)
	return "{" + strings.Join(fields, ", ") + "}"
}

// String is the script as a test.
func (s worldScript) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "func TestWorldFound(t *testing.T) {\n\treplayWorld(t, worldScript{Seed: %d, Steps: []worldStep{\n", s.Seed)
	for _, step := range s.Steps {
		fmt.Fprintf(&b, "\t\t%v,\n", step)
	}
	return b.String() + "\t}})\n}"
}

// worldNumbers are the limits and keys of a world, by its seed.
type worldNumbers struct {
	limits   []ratelimit.Limit
	keys     [][]string // the parts; none: a limit without keys
	own      []map[int]ratelimit.Limit
	start    time.Time
	programs int
	older    string // the program that has published other numbers before; "": none
}

// worldKeys are keys as login providers, paths and addresses make them.
var worldKeys = [][]string{
	{"auth0|ann"},
	{"eu", `a|b\c`},
	{"Ann+tag@example.com"},
	{"/api/v1/users/7?q=%20x&y"},
	{"user:7", "/x/y", "z"},
	{`CORP\ann`},
	{"é 日本 '; --"},
	{"google-oauth2|1234", "ann@example.com"},
	{"%s$1?"},
	nil,
}

func newWorldNumbers(seed uint64) worldNumbers {
	r, more := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 4)) // the worlds of before stay as they are
	n := worldNumbers{start: time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC).Add(time.Duration(r.Int64N(4*366*24*3600)) * time.Second), programs: 1 + r.IntN(3)}
	for _, k := range r.Perm(len(worldKeys))[:2] {
		n.keys = append(n.keys, worldKeys[k])
	}
	kind := r.IntN(3)
	for i := range 2 + r.IntN(2) {
		if i > 0 && r.IntN(2) == 0 {
			kind = r.IntN(3) // else of the first kind, so that a move is possible
		}
		limit := worldLimit(r, fmt.Sprintf("limit.%x.%d", seed%0x10000, i), kind) // a process forgets what it has ahead of a name, in whatever database
		switch more.IntN(10) {
		case 0:
			limit = withRate(limit, 0) // a plan that grants nothing
		case 1:
			limit = withRate(limit, 1e9)
		case 2, 3, 4:
			if i > 0 && limit.Config().Kind == "calendar window" && n.limits[0].Config().Kind == "calendar window" {
				limit = withClock(limit, n.limits[0]) // so that a move is possible
			}
		}
		own := map[int]ratelimit.Limit{}
		if limit.Config().Varies != "" {
			options := []ratelimit.Option{ratelimit.Rate(harness.OneOf(r, 1, 2.5, 40, 0.3))}
			if limit.Config().Kind == "calendar window" {
				options = append(options, ratelimit.Zone(harness.OneOf(r, worldZones...)), ratelimit.Anchor(harness.OneOf(r, worldAnchors...)))
			}
			if more.IntN(4) == 0 {
				options[0] = ratelimit.Rate(0)
			}
			if with := limit.With(options...); with.Validate() == nil {
				own[r.IntN(2)] = with
			}
		}
		n.limits, n.own = append(n.limits, limit), append(n.own, own)
	}
	n.older = harness.OneOf(more, "", "jobs", "web")
	return n
}

// withClock is a calendar's limit with the windows of another one.
func withClock(limit, other ratelimit.Limit) ratelimit.Limit {
	c, of := limit.Config(), other.Config()
	c.Period, c.Zone, c.Anchor = of.Period, of.Zone, of.Anchor
	limit, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return limit
}

// withRate is a limit with another rate, and a capacity of as much.
func withRate(limit ratelimit.Limit, rate float64) ratelimit.Limit {
	c := limit.Config()
	c.Rate, c.Capacity, c.MaxReserved = &rate, nil, nil
	other, err := c.Limit()
	if err != nil {
		panic(err)
	}
	return other
}

var (
	worldZones   = []string{"UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe"}
	worldAnchors = []string{"2001-01-01", "2026-01-31", "2024-02-29", "2026-01-31 15:00", "2026-03-28 02:30"}
)

func worldLimit(r *rand.Rand, name string, kind int) ratelimit.Limit {
	rate := harness.OneOf(r, 1, 1, 3, 10, 5, 100, 2.5, 0.3, 0.3, 0.7, 1.0/3, 7, 1e9)
	period := harness.OneOf(r, time.Second, time.Minute, time.Hour, 24*time.Hour, 365*24*time.Hour, 90*time.Second)
	var options []ratelimit.Option
	if r.IntN(2) == 0 {
		options = append(options, ratelimit.Capacity(harness.OneOf(r, 1, 0.3, 10, rate*2, rate/2, rate*10)))
	}
	if r.IntN(2) == 0 {
		options = append(options, ratelimit.MaxReserved(harness.OneOf(r, 0, 5, rate, 0.6)))
	}
	if r.IntN(3) == 0 {
		options = append(options, ratelimit.Shards(2+r.IntN(2)))
	}
	if r.IntN(4) == 0 {
		options = append(options, ratelimit.Varies(100*365*24*time.Hour))
	}
	switch kind {
	case 0:
		return ratelimit.TokenBucket(name, rate, period, options...)
	case 1:
		if r.IntN(2) == 0 {
			options = append(options, ratelimit.Start(harness.Noon.Add(time.Duration(r.Int64N(4e9))*time.Second-2e9*time.Second)))
		}
		return ratelimit.FixedWindow(name, rate, period, options...)
	}
	options = append(options, ratelimit.Zone(harness.OneOf(r, worldZones...)), ratelimit.Anchor(harness.OneOf(r, worldAnchors...)))
	return ratelimit.CalendarWindow(name, rate, harness.OneOf(r, ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Quarter, ratelimit.Year), options...)
}

// The steps, and the ways of a call, in their proportions. A way that a verb does not have is the pool.
var (
	worldVerbs = []string{"consume", "consume", "consume", "consume", "consume", "reserve", "reserve", "take", "take", "wait", "charge", "refund", "refund", "move", "pause", "resume", "reset", "crowd", "crowd", "hold", "hold", "hold", "settle", "settle", "release", "give-up", "queue", "queue", "queue", "foresee", "foresee", "foresee", "give back"}
	worldDoes  = []string{"override", "override", "override", "block", "unlimited", "restore", "unblock", "late", "commit", "sweep", "publish", "restart", "reshard", "add", "add", "slots", "scramble", "tool", "page", "page", "usage"}
	worldWays  = []string{"pool", "tx", "tx", "coalescer", "batch", "intx", "sql", "insqltx", "each", "by hand", "by hand", "middleware", "rpc", "canceled"}
)

// worldSteers are the ways of an operator's step, in their proportions. "" is SQL, "go" the Limiter.
var worldSteers = []string{"", "", "", "", "", "go", "go", "page", "page", "tool"}

// newWorldScript makes a random script. Few limits and keys make many things meet.
func newWorldScript(seed uint64) worldScript {
	n, r := newWorldNumbers(seed), rand.New(rand.NewPCG(seed, 2))
	script := worldScript{Seed: seed}
	for range 40 {
		s := worldStep{Do: harness.OneOf(r, worldVerbs...), Program: r.IntN(n.programs), Limit: r.IntN(len(n.limits)), Key: r.IntN(len(n.keys)), Other: -1, N: r.Uint64()}
		if r.IntN(2) == 0 {
			s.Limit, s.Key = 0, 0 // where most things meet
		}
		c := n.limits[s.Limit].Config()
		capacity := *c.Capacity
		switch k := r.IntN(10); {
		case k < 3:
			s.Do, s.For = "clock", worldSpan(r, c)
		case k < 5:
			if s.Do = harness.OneOf(r, worldDoes...); r.IntN(3) > 0 {
				s.For = worldSpan(r, c)
			}
			if s.Way = harness.OneOf(r, worldSteers...); s.Do == "add" { // to something
				before := s
				before.Do, before.For = "override", max(s.For, 0)
				script.Steps = append(script.Steps, before)
			}
		default:
			s.Way, s.Level, s.Rollback = harness.OneOf(r, worldWays...), r.IntN(len(harness.Levels)), r.IntN(4) == 0
			s.Count = harness.OneOf(r, 1, 1, 1, 2, 0.1, 0.1, 1.0/3, 0, capacity, capacity/2, capacity/3, capacity*1.5, worldAll, worldAll)
			if s.Do == "move" || r.IntN(5) == 0 {
				s.Other = (s.Limit + 1 + r.IntN(len(n.limits)-1)) % len(n.limits)
			}
			if s.Do == "crowd" && r.IntN(3) == 0 {
				s.For = worldSpan(r, c) // of the clock that is ahead
			}
			if s.Do == "pause" || s.Do == "queue" {
				s.For = worldSpan(r, c)
			}
			if s.Do == "hold" && r.IntN(4) > 0 {
				s.For = worldSpan(r, c)
			}
			if s.Do == "reset" {
				s.Way = harness.OneOf(r, worldSteers...)
			}
			if s.Do == "charge" {
				s.Count = min(math.Abs(s.Count), capacity) + capacity*float64(r.IntN(3)/2)
			}
		}
		if s.Do == "override" || s.Do == "block" || s.Do == "unlimited" || s.Do == "late" {
			s.For = max(s.For, 0)
		}
		if s.Do == "foresee" {
			s.Count = harness.OneOf(r, 0, 0, s.Count)
			if r.IntN(2) == 0 { // more than a few tokens
				script.Steps = append(script.Steps, worldStep{Do: "override", Limit: s.Limit, Key: s.Key, Count: harness.OneOf(r, 150, 400.5, 1e6), N: s.N}, worldStep{Do: "add", Limit: s.Limit})
			}
			if r.IntN(2) == 0 { // and then some time that matters
				script.Steps = append(script.Steps, s, worldStep{Do: "clock", For: time.Duration(r.Int64N(int64(2 * worldAhead))).Truncate(time.Microsecond)}, worldStep{Do: "give back", Program: s.Program})
			}
		}
		again := s
		switch k := r.IntN(4); {
		case k == 0 && s.Do == "hold" && s.For > 0: // its worker dies, and the work is delivered again, before all is refilled
			s.For = max((s.For / 8).Truncate(time.Microsecond), 100*time.Millisecond)
			script.Steps = append(script.Steps, s, worldStep{Do: "clock", For: s.For})
			if r.IntN(2) == 0 {
				script.Steps = append(script.Steps, worldStep{Do: "unlimited", Limit: s.Limit, Key: s.Key})
			}
		case k == 1 && (s.Do == "hold" || s.Do == "consume"): // more is charged than is there, and then it comes back
			script.Steps = append(script.Steps, s, worldStep{Do: "charge", Limit: s.Limit, Key: s.Key, Count: capacity})
			again = worldStep{Do: harness.OneOf(r, "settle", "release"), Way: s.Way, Level: s.Level, N: s.N}
			if s.Do == "consume" {
				again.Do = "refund"
			}
		}
		script.Steps = append(script.Steps, again)
	}
	return script
}

// worldSpan is a time that matters to a limit: less than a token's, about a period, much more; rarely back.
func worldSpan(r *rand.Rand, c ratelimit.Config) time.Duration {
	p := worldPeriod(c)
	token := time.Duration(float64(p) / max(*c.Rate, 1))
	span := harness.OneOf(r, time.Microsecond, token, token/3, p, p/2, p/3, 2*p, 3*time.Hour, time.Duration(r.Int64N(int64(p))))
	if r.IntN(12) == 0 {
		span = -time.Duration(r.Int64N(int64(time.Second)))
	}
	return span.Truncate(time.Microsecond)
}

// worldPeriod is the period of a limit; of a calendar window, its shortest.
func worldPeriod(c ratelimit.Config) time.Duration {
	days := map[string]int{"1 day": 1, "1 week": 7, "1 month": 28, "1 quarter": 90, "1 year": 365}
	if c.Kind == "calendar window" {
		return time.Duration(days[c.Period]) * 24 * time.Hour
	}
	return harness.Period(c)
}

// shrunk removes steps as long as the world still fails, until the deadline.
func (s worldScript) shrunk(fails func(worldScript) bool, until time.Time) worldScript {
	for size := len(s.Steps) / 2; size >= 1; {
		removed := false
		for at := len(s.Steps) - size; at >= 0 && time.Now().Before(until); at -= size {
			shorter := worldScript{s.Seed, slices.Delete(slices.Clone(s.Steps), at, min(at+size, len(s.Steps)))}
			if fails(shorter) {
				s, removed = shorter, true
				at = min(at, len(s.Steps))
			}
		}
		if !removed || size > 1 {
			if size == 1 {
				break
			}
			size /= 2
		}
		if time.Now().After(until) {
			break
		}
	}
	return s
}

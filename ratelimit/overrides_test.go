package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// row is a row of the table for tests: what is not given is as defined.
func row(id int64, e effect, change func(o *override)) override {
	o := override{id: id, effect: e, rate: math.NaN(), capacity: math.NaN(), maxReserved: math.NaN(), until: algebra.Forever}
	if change != nil {
		change(&o)
	}
	return o
}

// TestWhichOverrideIsInForce puts overrides of a limit of 10 per minute into a table, and asks for the limit in force.
func TestWhichOverrideIsInForce(t *testing.T) {
	now := algebra.At(time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC))
	rate := func(n float64) func(o *override) { return func(o *override) { o.rate = n } }
	ended := func(o *override) { o.rate, o.until = 77, now }
	defined := TokenBucket("api", 10, time.Minute, MaxReserved(5))
	burst := TokenBucket("api", 10, time.Minute, Capacity(30))
	for name, tt := range map[string]struct {
		limit    Limit
		own, all []override
		verb     verb
		lapsed   bool
		want     string // of the limit; "": as defined
	}{
		"nothing":                             {limit: defined},
		"a rate, which the capacity follows":  {limit: defined, own: []override{row(1, newNumbers, rate(20))}, want: "api: token bucket, 20 per 1m, capacity 20, at most 5 reserved"},
		"a rate beside a capacity of its own": {limit: burst, own: []override{row(1, newNumbers, rate(20))}, want: "api: token bucket, 20 per 1m, capacity 30"},
		"a capacity":                          {limit: defined, own: []override{row(1, newNumbers, func(o *override) { o.capacity = 0 })}, want: "api: token bucket, 10 per 1m, capacity 0, at most 5 reserved"},
		"maxReserved":                         {limit: defined, own: []override{row(1, newNumbers, func(o *override) { o.maxReserved = 1 })}, want: "api: token bucket, 10 per 1m, capacity 10, at most 1 reserved"},
		"the newest":                          {limit: burst, own: []override{row(2, newNumbers, rate(20)), row(1, newNumbers, rate(30))}, want: "api: token bucket, 20 per 1m, capacity 30"},
		"the newest, whatever its id":         {limit: burst, own: []override{row(2, newNumbers, rate(30)), row(1, newNumbers, func(o *override) { o.rate, o.made = 20, 1 })}, want: "api: token bucket, 20 per 1m, capacity 30"},
		"a block before what is newer":        {limit: burst, own: []override{row(3, noLimit, nil), row(2, newNumbers, rate(20)), row(1, block, nil)}, want: "api: blocked"},
		"one of all keys, too":                {limit: burst, all: []override{row(3, noLimit, nil), row(1, block, nil)}, want: "api: blocked"},
		"the key's before that of all keys":   {limit: burst, own: []override{row(1, newNumbers, rate(20))}, all: []override{row(2, block, nil)}, want: "api: token bucket, 20 per 1m, capacity 30"},
		"that of all keys":                    {limit: burst, all: []override{row(2, newNumbers, rate(5))}, want: "api: token bucket, 5 per 1m, capacity 30"},
		"one that has ended":                  {limit: burst, own: []override{row(2, newNumbers, ended)}},
		"one that has ended before another":   {limit: burst, own: []override{row(2, newNumbers, ended)}, all: []override{row(1, block, nil)}, want: "api: blocked"},
		"a block with an end":                 {limit: burst, own: []override{row(1, block, func(o *override) { o.until = now + 1 })}, want: "api: blocked until 2026-01-01T12:00:01Z"},
		"a block of a wait":                   {limit: burst, own: []override{row(1, block, nil)}, verb: verbWait, want: "api: blocked"},
		"a block of a check":                  {limit: burst, own: []override{row(1, block, nil)}, verb: verbCheck, want: "api: blocked"},
		"a block does not keep charges out":   {limit: burst, own: []override{row(1, block, nil)}, verb: verbCharge},
		"nor refunds, by older numbers":       {limit: burst, own: []override{row(2, block, nil), row(1, newNumbers, rate(20))}, verb: verbRefund, want: "api: token bucket, 20 per 1m, capacity 30"},
		"nor resets":                          {limit: burst, own: []override{row(1, block, nil)}, verb: verbReset},
		"unlimited":                           {limit: burst, own: []override{row(1, noLimit, nil)}, want: "api: unlimited"},
		"unlimited charges":                   {limit: burst, own: []override{row(1, noLimit, nil)}, verb: verbCharge, want: "api: unlimited"},
		"tokens from before come back":        {limit: burst, own: []override{row(1, noLimit, nil)}, verb: verbRefund},
		"a move, by older numbers":            {limit: burst, own: []override{row(3, block, nil), row(2, noLimit, nil), row(1, newNumbers, rate(20))}, verb: verbMove, want: "api: token bucket, 20 per 1m, capacity 30"},
		"unlimited resets":                    {limit: burst, own: []override{row(1, noLimit, nil)}, verb: verbReset},
		"a plan without a bound stays so":     {limit: Unlimited("api"), own: []override{row(1, newNumbers, rate(3))}},
		"a plan that has nothing gets some":   {limit: TokenBucket("api", 0, time.Minute), own: []override{row(1, newNumbers, rate(3))}, want: "api: token bucket, 3 per 1m, capacity 3"},
		"a key that has nothing gets the definition's bound": {
			limit: TokenBucket("api", 10, time.Minute, MaxReserved(5), Varies(time.Hour)).With(Rate(0)), own: []override{row(1, newNumbers, rate(3))},
			want: "api: token bucket, 3 per 1m, capacity 3, at most 5 reserved, varies within 1h",
		},
		"but no capacity without a rate": {limit: TokenBucket("api", 0, time.Minute), own: []override{row(1, newNumbers, func(o *override) { o.capacity = 3 })}},
		"lapsed: a block stays":          {limit: burst, own: []override{row(1, block, nil)}, lapsed: true, want: "api: blocked"},
		"lapsed: lower numbers stay":     {limit: burst, own: []override{row(1, newNumbers, func(o *override) { o.rate, o.capacity = 5, 60 })}, lapsed: true, want: "api: token bucket, 5 per 1m, capacity 30"},
		"lapsed: raised ones do not":     {limit: defined, own: []override{row(1, newNumbers, func(o *override) { o.rate, o.maxReserved = 50, 50 })}, lapsed: true},
		"lapsed: unlimited is not":       {limit: burst, own: []override{row(1, noLimit, nil)}, lapsed: true},
	} {
		t.Run(name, func(t *testing.T) {
			o := new(overrides)
			o.seen.Store(int64(time.Since(started)))
			if tt.lapsed {
				o.seen.Store(int64(time.Since(started) - staleAfter - time.Second))
			}
			if tt.verb == "" {
				tt.verb = verbConsume
			}
			table := new(overrideTable)
			for key, list := range map[string][]override{"ann": tt.own, "": tt.all} {
				for _, in := range list {
					table.apply([]change{{limitKey{"api", key}, in}}, false)
				}
			}
			o.table.Store(table)
			requests := []Request{tt.limit.Key("ann").Count(2), TokenBucket("other", 1, time.Minute).Key("ann")}
			applied, _ := o.applied(verbs[tt.verb], requests, pgtype.Timestamptz{Time: now.Time(), Valid: true})
			want := tt.want
			if want == "" {
				want = tt.limit.String()
			}
			if got := applied[0].limit.String(); got != want {
				t.Errorf("%s, want %s", got, want)
			}
			if applied[0].key != "ann" || applied[0].tokens != 2 || applied[1] != requests[1] || requests[0].limit != tt.limit {
				t.Errorf("%+v of %+v: more than a limit has changed, or the caller's own", applied, requests)
			}
		})
	}
}

func TestOverridesComeAndGo(t *testing.T) {
	table := new(overrideTable)
	ann, bob := limitKey{"api", "ann"}, limitKey{"api", "bob"}
	ended := func(o *override) { o.until = 7 }
	for i, step := range []struct {
		changes []change
		want    string
	}{
		{[]change{{ann, row(5, block, nil)}, {ann, row(9, noLimit, nil)}}, "5 9"}, // a block before what was made under it
		{[]change{{ann, row(7, block, nil)}, {bob, row(8, block, nil)}}, "7 5 9"},
		{[]change{{ann, row(9, noLimit, ended)}, {ann, row(7, block, nil)}}, "7 5 (9)"}, // one ends, one comes again
		{[]change{{ann, row(6, block, ended)}}, "7 (6) 5 (9)"},
		{[]change{{ann, row(7, block, ended)}, {ann, row(5, block, ended)}}, "(7) (6) (5) (9)"},
	} {
		before := slices.Clone(table.of(ann))
		held := table.of(ann)
		if !table.apply(step.changes, i == 0) {
			t.Errorf("step %d changes nothing", i)
		}
		if table.apply(step.changes, false) {
			t.Errorf("step %d changes something again", i)
		}
		if !slices.EqualFunc(before, held, func(a, b override) bool { return a.id == b.id && a.until == b.until }) {
			t.Fatalf("step %d changes what a reader holds: %v, which was %v", i, held, before)
		}
		var ids []string
		for _, o := range table.of(ann) {
			id := fmt.Sprint(o.id)
			if o.until != algebra.Forever {
				id = "(" + id + ")"
			}
			ids = append(ids, id)
		}
		if got := strings.Join(ids, " "); got != step.want {
			t.Fatalf("step %d: %q, want %q", i, got, step.want)
		}
	}
	if n := table.count.Load(); n != 5 {
		t.Errorf("%d overrides, want 5", n)
	}
}

// TestOneLimitForACall: requests of a call for one key have one limit, whatever ends meanwhile.
func TestOneLimitForACall(t *testing.T) {
	o, table := new(overrides), new(overrideTable)
	o.seen.Store(int64(time.Since(started)))
	o.table.Store(table)
	stop := make(chan struct{})
	var polling sync.WaitGroup
	polling.Go(func() { // a block comes and goes
		for on := false; ; on = !on {
			select {
			case <-stop:
				return
			default:
			}
			table.apply([]change{{limitKey{"api", "ann"}, row(1, block, func(o *override) {
				if !on {
					o.until = 0
				}
			})}}, false)
		}
	})
	defer polling.Wait()
	defer close(stop)
	requests := slices.Repeat([]Request{TokenBucket("api", 10, time.Minute).Key("ann")}, 100)
	blocked := 0
	for calls, begin := 0, time.Now(); time.Since(begin) < 100*time.Millisecond || blocked == 0 && time.Since(begin) < 10*time.Second; calls++ {
		applied, _ := o.applied(verbs[verbConsume], requests, pgtype.Timestamptz{})
		if applied[0].limit.blocked {
			blocked++
		}
		for _, r := range applied {
			if r.limit != applied[0].limit {
				t.Fatalf("call %d: %v and %v", calls, r.limit, applied[0].limit)
			}
		}
	}
}

// A limit under an override keeps its definition: the program may use the limit of a Status again.
func TestAnOverrideIsNoOtherDefinition(t *testing.T) {
	pro := TokenBucket("api", 10, time.Hour, Varies(24*time.Hour))
	for name, tt := range map[string]struct {
		override override
		want     string
	}{
		"numbers":   {row(1, newNumbers, func(o *override) { o.rate, o.capacity = 500, 700 }), "api: token bucket, 500 per 1h, capacity 700, varies within 1d"},
		"block":     {row(1, block, nil), "api: blocked"},
		"unlimited": {row(1, noLimit, nil), "api: unlimited"},
	} {
		o, table := new(overrides), new(overrideTable)
		table.apply([]change{{limitKey{"api", "ann"}, tt.override}}, true)
		o.table.Store(table)
		o.seen.Store(int64(time.Since(started)))
		for _, limit := range []Limit{pro, pro.With(Rate(20))} {
			l := Limiter{overrides: o}
			c, err := l.newCall(verbConsume, about{}, []Request{limit.Key("ann"), pro.Key("bob")}, nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			in := c.requests[0].limit
			if in.String() != tt.want || in.definition() != pro {
				t.Errorf("%s: %v, defined as %v", name, in, in.definition())
			}
			if _, err := l.newCall(verbConsume, about{}, []Request{in.Key("dan")}, nil); err != nil {
				t.Errorf("%s: again: %v", name, err)
			}
			if err := definitionsOnly([]Limit{in}); !errors.Is(err, ErrInvalid) {
				t.Errorf("%s: in a list: %v", name, err)
			}
		}
	}
}

func TestAnOverrideCostsNoMemoryUntilItIsFound(t *testing.T) {
	o := new(overrides)
	table := new(overrideTable)
	table.apply([]change{{limitKey{"api", "bob"}, row(1, block, nil)}}, true)
	o.table.Store(table)
	requests := []Request{TokenBucket("api", 10, time.Minute).Key("ann")}
	if n := testing.AllocsPerRun(100, func() {
		o.applied(verbs[verbConsume], requests, pgtype.Timestamptz{})
	}); n != 0 {
		t.Errorf("%v allocations for a key without an override", n)
	}
}

func TestAPeriodForPostgres(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Microsecond: "00:00:00.000001", time.Minute: "00:01:00.000000", 24 * time.Hour: "1 days", 90*time.Hour + 5*time.Second: "3 days 18:00:05.000000",
	} {
		if got := intervalText(d); got != want {
			t.Errorf("%v: %q, want %q", d, got, want)
		}
	}
}

func BenchmarkOverridesOfOtherKeys(b *testing.B) {
	o := new(overrides)
	table := new(overrideTable)
	table.apply([]change{{limitKey{"api", "bob"}, row(1, block, nil)}}, true)
	o.table.Store(table)
	requests := []Request{TokenBucket("api", 10, time.Minute).Key("ann")}
	b.ReportAllocs()
	for b.Loop() {
		o.applied(verbs[verbConsume], requests, pgtype.Timestamptz{})
	}
}

func TestTheNewestTransactionOfASnapshot(t *testing.T) {
	for snapshot, want := range map[string]uint64{"": 0, "7:9:": 9, "7:4294967296123:7,8": 4294967296123} {
		if got := xmaxOf(snapshot); got != want {
			t.Errorf("%q: %d, want %d", snapshot, got, want)
		}
	}
}

// TestWhatPollsSayOfTheClock: the database's clock lies between what was before a poll was sent and after it was answered. A slow poll says
// little, and does not make forgotten what quick ones said.
func TestWhatPollsSayOfTheClock(t *testing.T) {
	o := new(overrides)
	for i, step := range []struct {
		sent, answered, at time.Duration // at: of the database's clock, since the process has started
		low, high          time.Duration // of the difference
	}{
		{0, 10 * time.Millisecond, 5 * time.Millisecond, -5 * time.Millisecond, 5 * time.Millisecond},
		{time.Second, 1002 * time.Millisecond, 1001 * time.Millisecond, -time.Millisecond, time.Millisecond},
		{2 * time.Second, 10 * time.Second, 2 * time.Second, -10 * time.Millisecond, 0},          // it waited after the clock was read
		{11 * time.Second, 19 * time.Second, 19 * time.Second, 0, 9 * time.Millisecond},          // and before; clocks may drift a little
		{20 * time.Second, 20 * time.Second, 25 * time.Second, 5 * time.Second, 5 * time.Second}, // the clock was set
		{21 * time.Second, 21 * time.Second, 20 * time.Second, -time.Second, -time.Second},       // and back
		{22 * time.Second, 23 * time.Second, 22*time.Second - 1, -time.Second - 2*time.Millisecond, -998 * time.Millisecond},
	} {
		o.polled(step.sent, step.answered, started.Add(step.at))
		got := o.clocks.Load()
		if (got.low-step.low).Abs() > 5*time.Millisecond || (got.high-step.high).Abs() > 5*time.Millisecond {
			t.Errorf("step %d: from %v to %v, want %v to %v", i, got.low, got.high, step.low, step.high)
		}
	}
}

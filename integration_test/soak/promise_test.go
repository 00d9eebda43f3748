package soak

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// The promise of each limit and key: over any span, the grants that may run in it are at most the capacity and
// the span's refill. So the work of a fixed window fits each window, and each sequence of windows. Refunded work does not
// run, whether tokens came back or not. Charges do not count. The checker looks at the promise after each grant, for all
// spans.
//
// A fixed window never breaks it. A token bucket breaks it only if refunds of different grants overlap, each from its grant
// to the time when it gave something back, and then by less than the capacity. A Reset starts a new promise, and so does
// each refund of an earlier grant.
//
// A call that waited for the row and was then granted at once got the instant at which the wait began (Result.At). Its work
// runs no sooner than the row's ts, so ts is used as its time to run.
type promises struct {
	events map[place][]event
	grant  map[part]*granted
	doubts map[part]float64 // tokens that refunds with an unknown outcome may have given back
	worst  map[string]float64
}

func newPromises() promises {
	return promises{map[place][]event{}, map[part]*granted{}, map[part]float64{}, map[string]float64{}}
}

// part is one limit and key of a grant.
type part struct {
	grantID
	place
}

type granted struct {
	event int // its number
	at    algebra.Micros
	runAt algebra.Micros
	count float64 // tokens that were not refunded
}

// event is an event of a limit and key: a grant, a refund or a Reset.
type event struct {
	*granted
	refunded bool
	count    float64 // tokens granted or refunded
	back     float64 // tokens given back
}

// doubt records a refund with an unknown outcome. For the promise, it counts as made, at once.
func (p *promises) doubt(id grantID, a ask) { p.doubts[part{id, a.place()}] += a.Count }

// grants records a grant. ts is the row's.
func (p *promises) grants(id grantID, a ask, ts, runAt algebra.Micros) {
	of := a.place()
	is := part{id, of}
	g := &granted{event: len(p.events[of]), at: ts, runAt: max(runAt, ts), count: a.Count - p.doubts[is]}
	p.grant[is] = g
	p.events[of] = append(p.events[of], event{granted: g, count: g.count})
}

func (p *promises) wasReset(of place) { p.events[of] = append(p.events[of], event{}) }

// refunded records a refund. Those in doubt have been subtracted before.
func (c *checker) refunded(id grantID, a ask, back float64, inDoubt bool) {
	of := a.place()
	g := c.grant[part{id, of}]
	if g == nil {
		c.fail("a refund of tokens that %x was not granted: %+v", id, a)
		return
	}
	e := event{granted: g, refunded: true, count: a.Count, back: back}
	if inDoubt {
		e.count = 0
	}
	c.events[of] = append(c.events[of], e)
	kind := "of what ran at once: "
	if g.runAt > g.at {
		kind = "of what had to wait: "
	}
	kind += subjects[of.subject].Name()
	if back > 0 {
		c.counts["refunds "+kind+", given back"]++
	} else {
		c.counts["refunds "+kind+", kept"]++
	}
}

func (c *checker) checkPromises() {
	for p, events := range c.events {
		c.checkPromise(p, events)
	}
	for _, kind := range slices.Sorted(maps.Keys(c.worst)) {
		c.Logf("worst excess of the promise: %-40s %9.6f of the capacity", kind, c.worst[kind])
	}
}

// checkPromise looks at one segment of events after another: from a Reset, or from when all earlier grants have been
// refilled, to the next one. Later grants cannot exceed the promise together with earlier ones.
func (c *checker) checkPromise(p place, events []event) {
	l := numbersOf(p)
	period := float64(l.Period.Microseconds())
	reset, begin := 0, 0
	var busy algebra.Micros // upper bound of when the granted tokens are refilled
	for i, e := range events {
		switch {
		case e.granted == nil || e.refunded && e.event < reset:
			c.checkSpan(p, l, events, begin, i)
			begin, reset = i+1, i+1
		case !e.refunded:
			if !l.Window && e.at >= busy {
				c.checkSpan(p, l, events, begin, i)
				begin = i
			}
			busy = min(max(busy, e.runAt)+algebra.Micros(e.count*period/l.Rate)+1, algebra.Max)
		}
	}
	c.checkSpan(p, l, events, begin, len(events))
}

func (c *checker) checkSpan(p place, l algebra.Limit, events []event, begin, end int) {
	var order []*granted
	for _, e := range events[begin:end] {
		if !e.refunded {
			order = append(order, e.granted)
		}
	}
	slices.SortStableFunc(order, func(a, b *granted) int { return cmp.Compare(a.runAt, b.runAt) })
	position := map[*granted]int{}
	spans := newSpans(len(order))
	for i, g := range order {
		position[g] = i
		if i > 0 {
			refilled := float64(l.UpTo(g.runAt)-l.UpTo(order[i-1].runAt)) / float64(l.Period.Microseconds()) * l.Rate
			spans.set(2*i-1, -refilled)
		}
	}
	kind := subjects[p.subject].Name()
	single, overlapping := false, false // true if refunds have given something back so far
	for i := begin; i < end; i++ {
		e := events[i]
		at, here := position[e.granted]
		switch {
		case e.refunded:
			if here {
				e.granted.count -= e.count
				spans.set(2*at, e.granted.count)
			}
			single = single || e.back > 0
			overlapping = overlapping || !l.Window && overlaps(events[:i], e)
			continue
		case !here:
			continue
		}
		spans.set(2*at, e.granted.count)
		excess, allowed := spans.most()-l.Capacity, 1e-6
		if !l.Window {
			allowed += l.Rate / float64(l.Period.Microseconds()) // that instant is rounded to the microsecond
		}
		of := kind
		switch {
		case overlapping:
			of, allowed = kind+", after overlapping refunds", l.Capacity-1e-9
		case single:
			of = kind + ", after refunds"
		}
		c.counts["grants whose promise was looked at: "+of]++
		if worst, ok := c.worst[of]; !ok || excess/l.Capacity > worst {
			c.worst[of] = excess / l.Capacity
		}
		if excess > allowed {
			c.fail("%v: the promise is broken at %v: by %v of a capacity of %v (overlapping refunds: %v)", p, e.runAt.Time(), excess, l.Capacity, overlapping)
		}
	}
}

// overlaps reports whether a refund that gives something back overlaps with an earlier one of another grant.
func overlaps(before []event, refund event) bool {
	if refund.back == 0 {
		return false
	}
	for i := len(before) - 1; i > refund.event; i-- {
		if e := before[i]; e.refunded && e.back > 0 && e.granted != refund.granted {
			return true
		}
	}
	return false
}

// spans finds the span with the greatest sum in a sequence of numbers.
type spans struct {
	tree []sums // the root is 1, the children of i are 2*i and 2*i+1
}

// sums are the greatest sums of a sequence: of a span from its beginning, to its end, and anywhere in it; and the sum of
// all.
type sums struct{ first, last, most, all float64 }

// newSpans is for n tokens, with a refill between each two of them.
func newSpans(n int) spans {
	size := 1
	for size < 2*n {
		size *= 2
	}
	return spans{make([]sums, 2*size)}
}

func (s spans) set(i int, to float64) {
	i += len(s.tree) / 2
	top := max(to, 0)
	s.tree[i] = sums{top, top, top, to}
	for i /= 2; i > 0; i /= 2 {
		a, b := s.tree[2*i], s.tree[2*i+1]
		s.tree[i] = sums{
			first: max(a.first, a.all+b.first),
			last:  max(b.last, b.all+a.last),
			most:  max(a.most, b.most, a.last+b.first),
			all:   a.all + b.all,
		}
	}
}

func (s spans) most() float64 { return s.tree[1].most }

func TestSpans(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		row := make([]float64, 1+r.IntN(12))
		of := newSpans(len(row))
		for range 20 {
			i := r.IntN(len(row))
			row[i] = float64(r.IntN(21) - 10)
			of.set(i, row[i])
			want := 0.0
			for i := range row {
				sum := 0.0
				for _, n := range row[i:] {
					sum += n
					want = max(want, sum)
				}
			}
			if got := of.most(); got != want {
				t.Fatalf("the greatest sum of %v: got %v, want %v", row, got, want)
			}
		}
	}
}

// The soak must notice broken promises.
func TestBrokenPromises(t *testing.T) {
	t.Parallel()
	bucket, window := place{0, "a"}, place{2, "a"} // 1 per second, capacity 4; 3 per second
	second := algebra.Micros(time.Second.Microseconds())
	take := func(n int64, of place, tokens float64, at algebra.Micros) func(*checker) {
		return func(c *checker) { c.grants(grantID{n, 0}, ask{of.subject, of.key, tokens}, at, at) }
	}
	reserve := func(n int64, of place, tokens float64, at, runAt algebra.Micros) func(*checker) {
		return func(c *checker) { c.grants(grantID{n, 0}, ask{of.subject, of.key, tokens}, at, runAt) }
	}
	refund := func(n int64, of place, tokens, back float64) func(*checker) {
		return func(c *checker) { c.refunded(grantID{n, 0}, ask{of.subject, of.key, tokens}, back, false) }
	}
	doubt := func(n int64, of place, tokens float64) func(*checker) {
		return func(c *checker) { c.doubt(grantID{n, 0}, ask{of.subject, of.key, tokens}) }
	}
	reset := func(c *checker) { c.wasReset(bucket) }
	begin := numbersOf(window).UpTo(algebra.At(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))
	for _, test := range []struct {
		name   string
		story  []func(*checker)
		broken bool
	}{
		{"a bucket, as much as it has", []func(*checker){take(1, bucket, 4, begin), take(2, bucket, 1, begin+second)}, false},
		{"a bucket, too early", []func(*checker){take(1, bucket, 4, begin), take(2, bucket, 1, begin+second*9/10)}, true},
		{"a bucket, two for one instant", []func(*checker){
			take(1, bucket, 4, begin), reserve(2, bucket, 1, begin, begin+second), reserve(3, bucket, 1, begin, begin+second),
		}, true},
		{"a bucket, promised before", []func(*checker){
			take(1, bucket, 4, begin), reserve(2, bucket, 1, begin, begin+2*second), reserve(3, bucket, 1, begin, begin+second),
		}, false},
		{"a bucket, what was refunded", []func(*checker){take(1, bucket, 4, begin), refund(1, bucket, 1, 1), take(2, bucket, 1, begin)}, false},
		{"a bucket, more than was refunded", []func(*checker){take(1, bucket, 4, begin), refund(1, bucket, 1, 1), take(2, bucket, 2, begin)}, true},
		{"a bucket, before it was refunded", []func(*checker){take(1, bucket, 4, begin), take(2, bucket, 1, begin), refund(1, bucket, 1, 1)}, true},
		{"a bucket, what may have been refunded", []func(*checker){doubt(1, bucket, 1), take(1, bucket, 4, begin), take(2, bucket, 1, begin)}, false},
		{"a bucket, one refund of what would have come back", []func(*checker){
			take(1, bucket, 3, begin), take(2, bucket, 4, begin+3*second), refund(1, bucket, 3, 3), take(3, bucket, 3, begin+3*second),
		}, true},
		{"a bucket, overlapping refunds", []func(*checker){
			take(1, bucket, 2, begin), take(2, bucket, 2, begin), refund(1, bucket, 2, 2), refund(2, bucket, 1, 1), take(3, bucket, 4, begin),
		}, false},
		{"a bucket, overlapping refunds of which one keeps all", []func(*checker){
			take(1, bucket, 2, begin), take(2, bucket, 2, begin), refund(1, bucket, 2, 2), refund(2, bucket, 1, 0), take(3, bucket, 4, begin),
		}, true},
		{"a bucket, overlapping refunds, by more than the capacity", []func(*checker){
			take(1, bucket, 2, begin), take(2, bucket, 2, begin), refund(1, bucket, 1, 1), refund(2, bucket, 1, 1), take(3, bucket, 7, begin),
		}, true},
		{"a bucket, long after overlapping refunds", []func(*checker){
			take(1, bucket, 2, begin), take(2, bucket, 2, begin), refund(1, bucket, 1, 1), refund(2, bucket, 1, 1),
			take(3, bucket, 4, begin+5*second), take(4, bucket, 1, begin+5*second),
		}, true},
		{"a bucket after a reset", []func(*checker){take(1, bucket, 4, begin), reset, take(2, bucket, 4, begin)}, false},
		{"a bucket after a reset, too much", []func(*checker){take(1, bucket, 4, begin), reset, take(2, bucket, 4, begin), take(3, bucket, 1, begin)}, true},
		{"a bucket after a refund of what was reset", []func(*checker){
			take(1, bucket, 4, begin), reset, take(2, bucket, 4, begin), refund(1, bucket, 4, 4), take(3, bucket, 4, begin),
		}, false},
		{"a window, all of each", []func(*checker){take(1, window, 3, begin), take(2, window, 3, begin+second)}, false},
		{"a window, too much of one", []func(*checker){take(1, window, 3, begin), take(2, window, 1, begin+second-1)}, true},
		{"a window, too much of a later one", []func(*checker){take(1, window, 2, begin+second), reserve(2, window, 2, begin, begin+second)}, true},
		{"a window, overlapping refunds", []func(*checker){
			take(1, window, 1, begin), take(2, window, 2, begin), refund(1, window, 1, 1), refund(2, window, 1, 1), take(3, window, 3, begin),
		}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			heard := &listener{TB: t}
			c := &checker{TB: heard, promises: newPromises(), counts: map[string]int{}}
			for _, happens := range test.story {
				happens(c)
			}
			c.checkPromises()
			if (heard.errors != nil) != test.broken {
				t.Errorf("broken: %v, but it says: %q", test.broken, heard.errors)
			}
		})
	}
}

// listener keeps errors to itself, so that the test can read them.
type listener struct {
	testing.TB
	errors []string
}

func (l *listener) Errorf(format string, args ...any) {
	l.errors = append(l.errors, fmt.Sprintf(format, args...))
}

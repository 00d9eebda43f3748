package ratelimit

import (
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// What a call is told about the future: when it would be granted, when the limit is full, when reserved work may run. An override that
// ends makes room for another one, for a block, or for the definition. Meanwhile nothing is written, so the rows are as they are now,
// and whatever numbers are in force at an instant decide about them, as the engine does.

// span is a time in which nothing ends. It lasts until the next one begins.
type span struct {
	from   algebra.Micros
	demand demand // by the numbers in force
	denied bool   // nothing is granted: by a block, a rate of 0, or a count that the numbers never grant
	free   bool   // everything is granted, and nothing is taken
}

// overrideEnds reports whether an override that is known for the demand has an end that is still to come.
func (c *call) overrideEnds(d *demand) bool {
	return c.inForce != nil && len(c.inForce[d.requests[0]].ends) > 0
}

// spans is how a demand is decided from now on. The first span is the present, by the demand's own numbers.
func (c *call) spans(does *rules, d *demand) []span {
	spans := []span{spanOf(does, algebra.Min, *d)}
	if !c.overrideEnds(d) {
		return spans
	}
	in := &c.inForce[d.requests[0]]
	for _, end := range in.ends {
		requests := make([]Request, len(d.requests))
		for i, place := range d.requests {
			requests[i] = c.asked[place]
			requests[i].limit, _ = c.overrides.limitInForce(does, requests[i].limit, in.lists, moment{end, end})
		}
		ds, rowless, err := demands(does, requests, pgtype.Timestamptz{Time: end.Time(), Valid: true})
		if err != nil && !errors.Is(err, ErrExceedsCapacity) {
			continue // which no numbers of an override can cause
		}
		setNumbers(does, ds, pgtype.Timestamptz{Time: end.Time(), Valid: true}, true) // whatever is owed: see unsure
		then := append(ds, rowless...)[0]
		if before := &spans[len(spans)-1].demand; before.limit == then.limit && before.tooMuch == then.tooMuch {
			continue // an override ends that has not decided: see repaid
		}
		spans = append(spans, spanOf(does, end, then))
	}
	return spans
}

func spanOf(does *rules, from algebra.Micros, d demand) span {
	return span{
		from: from, demand: d,
		denied: !does.ignoresCount && d.tooMuch || d.limit.empty() && !does.deniable || does.deniable && d.refused(),
		free:   d.limit.unlimited() || d.limit.empty() && does.deniable && d.count == 0,
	}
}

// find is when something happens in a span, if that lasts long enough: not before from. present has the demands that rows decide. until
// is the end of the span, or algebra.Forever.
type find func(present []*demand, from, until algebra.Micros) algebra.Micros

// when is the first instant, from now on, that find finds in one of the times in which nothing ends. Where a demand is denied, it does
// not look. Without such an instant, when is algebra.Forever.
func when(now algebra.Micros, demands [][]span, find find) algebra.Micros {
	present := make([]*demand, 0, len(demands))
	for from := now; ; {
		until, denied := algebra.Forever, false
		present = present[:0]
		for _, spans := range demands {
			i := len(spans) - 1
			for ; spans[i].from > from; i-- {
				until = min(until, spans[i].from)
			}
			if denied = denied || spans[i].denied; !spans[i].free {
				present = append(present, spans[i].demand.known(now, from))
			}
		}
		if !denied {
			if at := find(present, from, until); at < until {
				return at
			}
		}
		if until == algebra.Forever {
			return until
		}
		from = until
	}
}

// allSpans are the spans of each of the demands.
func (c *call) allSpans(ds ...[]demand) (all [][]span) {
	for _, ds := range ds {
		for i := range ds {
			all = append(all, c.spans(c.does, &ds[i]))
		}
	}
	return all
}

// never is the error of demands, of the first one whose count no numbers to come can grant either, whatever denies the others. One that is
// decided by itself is just denied.
func (c *call) never(err error) error {
	if !errors.Is(err, ErrExceedsCapacity) {
		return err
	}
	now := c.overrides.now(c.local)
	for i := range c.demands {
		if d := &c.demands[i]; d.tooMuch && !c.does.each && c.allowedAt(now, []demand{*d}) == algebra.Forever {
			return d.validate(c.does)
		}
	}
	return nil
}

// allowedAt is when neither a block nor a rate of 0 denies the demands, and the numbers can grant their counts. Whether the tokens are
// there is another question.
func (c *call) allowedAt(now algebra.Micros, ds ...[]demand) algebra.Micros {
	return when(now, c.allSpans(ds...), atOnce)
}

// blockedUntil is the RetryAt of a block: what allowedAt is or, if the numbers can never grant the counts, when it ends all the same.
func (c *call) blockedUntil(now algebra.Micros, ds ...[]demand) algebra.Micros {
	spans := c.allSpans(ds...)
	at := when(now, spans, atOnce)
	if at < algebra.Forever {
		return at
	}
	for _, spans := range spans {
		for i := range spans {
			spans[i].denied = spans[i].denied && !spans[i].demand.tooMuch
		}
	}
	return when(now, spans, atOnce)
}

func atOnce(_ []*demand, from, _ algebra.Micros) algebra.Micros { return from }

// grantedAt is when demands of the denied call, c.demands[i:j], would be granted together if nothing else is taken. A limit that is
// unlimited now was not asked, and counts as full.
func (c *call) grantedAt(a *answer, i, j int) algebra.Micros {
	if c.inForce == nil {
		present := make([]*demand, 0, 1)
		for ; i < j; i++ {
			if c.demands[i].tooMuch {
				return algebra.Forever
			}
			present = append(present, &c.demands[i])
		}
		return c.grants(present, a, a.at)
	}
	spans := c.allSpans(c.demands[i:j])
	if i == 0 && j == len(c.demands) {
		spans = append(spans, c.allSpans(c.rowless)...)
	}
	return when(a.at, spans, func(present []*demand, from, _ algebra.Micros) algebra.Micros { return c.grants(present, a, from) })
}

// grants is when demands would be granted together, from an instant on, by the numbers that they have.
func (c *call) grants(ds []*demand, a *answer, from algebra.Micros) algebra.Micros {
	switch {
	case c.patience < algebra.Forever && len(ds) == 1:
		return c.grantedInTime(ds[0], a, from)
	case c.reserves():
		return algebra.WhenReserved(c.reserved(ds, a, from), from, c.within)
	}
	at := from
	for _, d := range ds {
		rows := c.rowsOf(d, a)
		at = max(at, d.reaching(rows, from).When(rows, d.count, d.floor, from))
	}
	return at
}

// grantedInTime is when a Wait would be granted whose work may wait for c.patience, by numbers that change meanwhile. Once a slower
// refill comes into reach, what was granted before may be denied.
func (c *call) grantedInTime(d *demand, a *answer, from algebra.Micros) algebra.Micros {
	in, spans := *d, c.spans(standing, d)
	lowest := c.does.floor(&in.limit)
	granted := func(at algebra.Micros) bool {
		in.floor = max(lowest, -leastRefill(spans, at, at+c.patience))
		_, _, granted := algebra.Reserve(c.reserved([]*demand{&in}, a, at), at, algebra.Forever)
		return granted
	}
	for i := range spans {
		if until := spans[i].from - c.patience; until > from { // from then on, it reaches into that span
			if granted(until) {
				return algebra.First(from, func(at algebra.Micros) bool { return at >= until || granted(at) })
			}
			from = until + 1
		}
	}
	return algebra.First(from, granted)
}

// reserved are demands for algebra.Reserve. Lists of windows reach to where the limit is full, and what is then owed is refilled. That
// may be further than the lists of calls, and a call is denied if its work would run after the end of its own list.
func (c *call) reserved(ds []*demand, a *answer, now algebra.Micros) []algebra.Demand {
	asked, until := make([]algebra.Demand, 0, len(ds)), now
	for _, d := range ds {
		if d.numbers.Window && !d.numbers.Holds(d.count) { // its job always waits for the next window: see algebra.WhenReserved
			until = max(until, d.numbers.NextWindow(now))
		}
	}
	for _, d := range ds {
		rows, far := c.rowsOf(d, a), *d
		far.count = max(d.count, d.limit.numbers.Capacity) - d.floor
		of := algebra.Demand{Limit: far.reachingTo(until, rows, now), Rows: rows, Shards: d.limit.shards, Count: d.count, Lowest: d.lowest(), Floor: d.floor}
		if d.numbers.Windows != nil { // as many as this call has listed
			of.Listed = 1 + min(d.numbers.Listed(a.at), d.limit.ahead(c.does)+1)
		}
		asked = append(asked, of)
	}
	return asked
}

// rowsOf are the rows of a demand in the answer, whatever its numbers are.
func (c *call) rowsOf(d *demand, a *answer) []algebra.Row {
	for i := range c.demands {
		if i < len(a.rows) && c.demands[i].id() == d.id() {
			return a.rows[i]
		}
	}
	return nil
}

// fullAt is when a token bucket will be full if nothing is taken.
func (c *call) fullAt(d *demand, rows []algebra.Row, now algebra.Micros) algebra.Micros {
	if !c.overrideEnds(d) {
		numbers := d.reaching(rows, now)
		return numbers.When(rows, numbers.Capacity, 0, now)
	}
	return when(now, [][]span{c.spans(standing, d)}, func(present []*demand, from, _ algebra.Micros) algebra.Micros {
		for _, d := range present {
			numbers := d.reaching(rows, from)
			return numbers.When(rows, numbers.Capacity, 0, from)
		}
		return from
	})
}

// nextAt is when count tokens can be taken, for a Balance: not while the key is blocked.
func (c *call) nextAt(d *demand, rows []algebra.Row, count float64, now algebra.Micros) algebra.Micros {
	spans := c.spans(c.does, d)
	for i := range spans {
		spans[i].denied = spans[i].denied || spans[i].demand.limit.blocked || !spans[i].demand.limit.numbers.Holds(count)
	}
	return when(now, [][]span{spans}, func(present []*demand, from, _ algebra.Micros) algebra.Micros {
		for _, d := range present {
			more := *d
			more.count = count
			return more.reaching(rows, from).When(rows, count, 0, from)
		}
		return from
	})
}

// repaidAt is when nothing is owed: the work of a reservation may run, whatever other calls take meanwhile. Each of them makes the
// numbers of its time count for the time before it, so the slowest of both counts until an override ends.
func (c *call) repaidAt(d *demand, rows []algebra.Row, now algebra.Micros) algebra.Micros {
	if !c.overrideEnds(d) {
		return d.reaching(rows, now).Repaid(rows, now)
	}
	return repaid(c.spans(standing, d), rows, d.limit.shards, now)
}

func repaid(spans []span, rows []algebra.Row, shards int, now algebra.Micros) algebra.Micros {
	possible := [][]algebra.Row{rows} // by whether others have taken something at the end of an override
	at := when(now, [][]span{spans}, func(present []*demand, from, until algebra.Micros) algebra.Micros {
		at := from
		for _, d := range present {
			for _, rows := range possible {
				at = max(at, d.reaching(rows, from).Repaid(rows, from))
			}
			if at >= until {
				least := slices.MinFunc(possible, func(a, b []algebra.Row) int {
					return cmp.Compare(d.numbers.Total(a, until), d.numbers.Total(b, until))
				})
				possible = append(possible, d.numbers.Take(least, shards, 0, until))
			}
		}
		return at
	})
	return min(at, algebra.Max)
}

// sooner is the runAt of a granted Wait by the overrides that are known when it is called: others than at the grant may be in force since
// then. What was owed at the grant is repaid by the old numbers until now, and by the new ones from now on.
func (c *call) sooner(a *answer) func(local pgtype.Timestamptz) algebra.Micros {
	d, at, shards := c.demands[0], a.at, c.demands[0].limit.shards
	rows := slices.Clone(a.rows[0])
	for len(rows) < shards { // it took from one shard, which stands for all
		rows = append(rows, rows[0])
	}
	then := call{does: standing, asked: c.asked, overrides: c.overrides, local: c.local, inForce: c.inForce}
	before := then.spans(standing, &d)
	return func(local pgtype.Timestamptz) algebra.Micros {
		now := then.overrides.moment(local)
		requests, in := then.overrides.applied(standing, then.asked, pgtype.Timestamptz{Time: now.low.Time(), Valid: true})
		ds, rowless, err := demands(standing, requests, pgtype.Timestamptz{Time: now.low.Time(), Valid: true})
		if err != nil || now.low <= at {
			return algebra.Max
		}
		since := then
		since.inForce = in
		after := since.spans(standing, &append(ds, rowless...)[0])
		after[0].from = now.low
		spans := slices.DeleteFunc(slices.Clone(before), func(s span) bool { return s.from >= now.low })
		return repaid(append(spans, after...), rows, shards, at)
	}
}

// leastRefill is how many tokens a limit gets between two instants, whatever other calls take meanwhile, as for repaidAt. It is +Inf if
// the limit becomes unlimited.
func leastRefill(spans []span, from, to algebra.Micros) float64 {
	possible := []algebra.Row{{TS: from}}
	least := 0.0
	for i := range spans {
		until := to
		if i+1 < len(spans) {
			until = min(to, spans[i+1].from)
		}
		switch s := &spans[i]; {
		case until <= from:
		case s.from >= to:
			return least
		case s.free:
			return math.Inf(1)
		case s.demand.limit.numbers.Rate > 0: // slots refill nothing
			numbers := s.demand.numbers
			numbers.Capacity = math.Inf(1)
			least = numbers.Available(slices.MinFunc(possible, func(a, b algebra.Row) int {
				return cmp.Compare(numbers.Available(a, 1, until), numbers.Available(b, 1, until))
			}), 1, until)
			possible = append(possible, algebra.Row{Value: least, TS: until})
		}
	}
	return least
}

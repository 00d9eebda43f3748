package ratelimit

import (
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// What overrides make of a call: its requests get the limits in force. Nothing of it is sent.

// applied are the requests with the limits in force. at is the time of the call, if it is known.
func (o *overrides) applied(does *rules, requests []Request, at pgtype.Timestamptz) ([]Request, []inForce) {
	if o == nil {
		return requests, nil
	}
	table := o.table.Load()
	if table.count.Load() == 0 {
		return requests, nil
	}
	var applied []Request // with the limits in force; nil: they are as defined
	var in []inForce
	var now moment
	for i := range requests {
		r := &requests[i]
		if r.err != nil {
			continue
		}
		lists := [2][]override{table.of(limitKey{r.limit.name, r.key})}
		if r.key != "" {
			lists[1] = table.of(limitKey{r.limit.name, ""})
		}
		if lists[0] == nil && lists[1] == nil {
			continue
		}
		if applied == nil {
			applied, in, now = slices.Clone(requests), make([]inForce, len(requests)), o.moment(at)
		}
		same := func(other Request) bool { return other.key == r.key && other.limit == r.limit }
		if before := slices.IndexFunc(requests[:i], same); before >= 0 { // one limit for a call, whatever comes meanwhile
			applied[i].limit, in[i] = applied[before].limit, in[before]
		} else {
			applied[i].limit, in[i] = o.limitInForce(does, r.limit, lists, now)
			in[i].lists, in[i].ends = lists, endsOf(lists, now.low)
		}
	}
	if applied == nil {
		return requests, nil
	}
	return applied, in
}

// The values of [Balance.Decides].
const (
	byDefinition = "definition"
	byOverride   = "override"
	byBlock      = "block"
)

// inForce is the override that decides a request. The zero value is none.
type inForce struct {
	by    string
	until algebra.Micros

	lists [2][]override    // all that are known for the key, and for all keys
	ends  []algebra.Micros // of those that have not ended, in order: something else may decide from then on
}

// endsOf is when overrides end that have not, in order, each instant once.
func endsOf(lists [2][]override, now algebra.Micros) (ends []algebra.Micros) {
	for _, list := range lists {
		for i := range list {
			if until := list[i].until; until > now && until < algebra.Forever {
				ends = append(ends, until)
			}
		}
	}
	slices.Sort(ends)
	return slices.Compact(ends)
}

// limitInForce returns a limit under the override in force for a verb, if there is any: the key's own before that of all keys. A
// verb that a block does not deny gets the numbers that hold beside it. What may have ended already grants nothing more, and denies.
func (o *overrides) limitInForce(does *rules, limit Limit, lists [2][]override, now moment) (Limit, inForce) {
	var blocked, other inForce
search:
	for _, list := range lists {
		for _, in := range list {
			doubtful := o.stale() || in.until <= now.high
			switch {
			case in.until <= now.low:
			case in.effect == newNumbers:
				if under := limit.under(in, doubtful); under != limit { // else the definition goes on to decide
					limit, other = under, inForce{by: byOverride, until: in.until}
				}
				break search
			case in.effect == noLimit && does.liftable() && !doubtful:
				limit, other = limit.lifted(), inForce{by: byOverride, until: in.until}
				break search
			case in.effect == block && (does.deniable || does.answers == balances) && blocked.by == "":
				blocked = inForce{by: byBlock, until: in.until}
				if does.deniable && limit.numbers.Rate > 0 { // else other numbers may say that it is no plan that denies
					break search
				}
			}
		}
	}
	if blocked.by != "" {
		return limit.blockUntil(blocked.until), blocked
	}
	return limit, other
}

// under is the limit with the numbers of an override or, if that is in doubt, with those that are lower. It is ratelimit._under in SQL.
func (l Limit) under(in override, doubtful bool) Limit {
	if l.err != nil || l.unlimited() || l.unknown() {
		return l
	}
	defined := l
	l = l.markOverridden()
	if l.slots {
		return l.withSlots(defined, in.capacity, doubtful)
	}
	if defined.numbers.Rate == 0 { // of one key, by With, which has no bound then
		l.maxReserved = l.definition().maxReserved
	}
	n := &l.numbers
	if !math.IsNaN(in.capacity) {
		n.Capacity = in.capacity
	} else if n.Capacity == n.Rate && !math.IsNaN(in.rate) {
		n.Capacity = in.rate
	}
	if !math.IsNaN(in.rate) {
		n.Rate = in.rate
	}
	if !math.IsNaN(in.maxReserved) {
		l.maxReserved = in.maxReserved
	}
	if n.Rate == 0 {
		return defined
	}
	if doubtful {
		n.Rate, n.Capacity = min(n.Rate, defined.numbers.Rate), min(n.Capacity, defined.numbers.Capacity)
		l.maxReserved = min(l.maxReserved, defined.maxReserved)
	}
	return l
}

// lifted is an unlimited limit in place of this one.
func (l Limit) lifted() Limit {
	u := Unlimited(l.name)
	if l.slots { // they are counted all the same
		u = l
		u.numbers.Capacity = math.Inf(1)
	}
	u.defined, u.overridden = l.markOverridden().defined, true
	return u
}

// blockUntil is the limit under a block that ends at an instant.
func (l Limit) blockUntil(until algebra.Micros) Limit {
	l.blocked, l.until = true, until
	return l
}

// unblocked is the limit without a block.
func (l Limit) unblocked() Limit {
	l.blocked, l.until = false, 0
	return l
}

// moment is an instant of the database's clock, as far as it is known here.
type moment struct{ low, high algebra.Micros }

// doubt is how much is not known of it.
func (m moment) doubt() time.Duration { return m.high.Time().Sub(m.low.Time()) }

// moment is the database's time, unless the call has a time of its own.
func (o *overrides) moment(at pgtype.Timestamptz) moment {
	if at.Valid {
		return moment{algebra.At(at.Time), algebra.At(at.Time)}
	}
	now := started.Add(time.Since(started)) // whatever is set meanwhile
	if o == nil {
		return moment{algebra.At(time.Now()), algebra.At(time.Now())}
	} else if c := o.clocks.Load(); c != nil {
		return moment{algebra.At(now.Add(c.low)), algebra.At(now.Add(c.high))}
	}
	return moment{algebra.At(now), algebra.At(now)}
}

// now is the earliest that the time can be: a block that is over by it is over.
func (o *overrides) now(at pgtype.Timestamptz) algebra.Micros { return o.moment(at).low }

// stale reports whether the table was last read too long ago to trust what it grants.
func (o *overrides) stale() bool {
	return time.Since(started)-time.Duration(o.seen.Load()) > staleAfter
}

package world_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/aheadclock"
	"github.com/txlimit/txlimit/ratelimit"
)

// This file has the calls of a world that memory may decide: those by a Coalescer with Ahead. The world reads what a statement takes of the row
// beyond its call. Memory may grant that, for as long as Ahead and its window last, and nothing else; what is left of it comes back.

const (
	worldAhead = time.Second
	// worldTooLate is how old it is when it does not come back any more.
	worldTooLate = 3 * worldAhead
)

// worldLot is what a statement has taken ahead.
type worldLot struct {
	worldMoment
	of    worldKey
	limit ratelimit.Limit // in force
	reset time.Time       // of a window
	left  float64
	step  int
	stays bool // or not: a call that would have made the program forget it was refused, before it was sent or after
}

// worldMoment is when memory learned something: by the clock, and by another that does not step back with it.
type worldMoment struct{ at, latest time.Time }

func (w *everything) moment() worldMoment { return worldMoment{w.clock.At, w.latest} }

// age is the most time that can have passed since then. It is below zero if that is not known.
func (m worldMoment) age(now worldMoment) time.Duration {
	if now.at.Before(m.at) {
		return -1
	}
	return max(now.at.Sub(m.at), now.latest.Sub(m.latest))
}

// usable reports whether memory may grant it.
func (l *worldLot) usable(now worldMoment) bool { return l.lasts(now, worldAhead) }

func (l *worldLot) lasts(now worldMoment, most time.Duration) bool {
	age := l.age(now)
	return age >= 0 && age <= most && (l.limit.Config().Kind == "token bucket" || l.at.Add(age).Before(l.reset))
}

// comesBack is how much of it comes back to a limit that is not full.
func (l *worldLot) comesBack(now worldMoment) float64 {
	switch {
	case !l.lasts(now, worldTooLate):
		return 0
	case l.limit.Config().Kind == "token bucket":
		return max(0, l.left-*l.limit.Config().Rate*now.at.Sub(l.at).Seconds()/harness.Period(l.limit.Config()).Seconds())
	}
	return l.left
}

// worldMemory is what a program knows ahead.
type worldMemory struct {
	*ratelimit.Coalescer
	statements int
	lots       []*worldLot
	denials    []worldDenial
	asked      map[worldKey]int  // the step of the last statement: it does not know what others have taken since
	unsure     map[worldKey]bool // something may have been taken ahead that the world could not tell from what expired holds gave back
}

// worldDenial is a call that a statement has denied.
type worldDenial struct {
	worldMoment
	of    []worldKey
	count float64
}

func (w *everything) newMemory() *worldMemory {
	m := &worldMemory{asked: map[worldKey]int{}, unsure: map[worldKey]bool{}}
	m.Coalescer = &ratelimit.Coalescer{Pool: w.pool, Ahead: worldAhead, OnBatch: func(int) { m.statements++ }}
	aheadclock.Set(m.Coalescer, w.clock.Now, func() time.Time { return w.latest })
	return m
}

// forgets notes that a verb of this process has changed a key: its programs forget what was denied and, of some verbs, what is ahead.
func (w *everything) forgets(_ context.Context, d ratelimit.Decision) {
	if !slices.Contains([]string{"charge", "refund", "reset", "move", "pause", "resume", "settle", "release"}, d.Verb) {
		return
	}
	for _, s := range d.Result.Requests {
		is := func(id worldKey) bool {
			stored := w.stored(id.key)
			return w.limits[id.limit].Name() == s.Limit.Name() && (stored == nil && s.Key == "" || stored != nil && *stored == s.Key)
		}
		for _, p := range w.programs {
			if slices.Contains([]string{"reset", "move", "pause", "resume"}, d.Verb) {
				p.memory.lots = slices.DeleteFunc(p.memory.lots, func(l *worldLot) bool {
					refused := errors.Is(d.Err, ratelimit.ErrInvalid)
					l.stays = l.stays || is(l.of) && refused
					return is(l.of) && !refused
				})
			}
			p.memory.denials = slices.DeleteFunc(p.memory.denials, func(d worldDenial) bool { return slices.ContainsFunc(d.of, is) })
		}
	}
}

// foresees calls Consume some times in a row, so that some calls are decided in memory.
func (w *everything) foresees(ctx context.Context, p *worldProgram, s worldStep, r *rand.Rand) {
	ids := []worldKey{{s.Limit, s.Key}}
	if s.Other >= 0 {
		ids = append(ids, worldKey{s.Other, s.Key})
	}
	count := s.Count
	if capacity := w.balances(p, ids...)[0].Capacity; count <= 0 || r.IntN(4) > 0 {
		if count = 1; !math.IsInf(capacity, 1) {
			count = max(1, math.Floor(harness.OneOf(r, 0, 2, capacity/300, capacity/100)))
		}
	}
	for range 4 + r.IntN(8) { // of fewer, nothing is taken ahead
		if slices.ContainsFunc(w.balances(p, ids...), w.uneven) {
			return // one row may grant it, and another deny it
		}
		if w.foresee(ctx, p, ids, count); r.IntN(2) == 0 {
			w.refills(p)
		}
	}
}

// foresee is one such call.
func (w *everything) foresee(ctx context.Context, p *worldProgram, ids []worldKey, count float64) {
	var requests []ratelimit.Request
	for _, id := range ids {
		requests = append(requests, w.request(id.limit, id.key))
		w.meets(id, "do-consume", "way-ahead")
	}
	m, now := p.memory, w.clock.At
	before, rows, dead := w.balances(p, ids...), w.rows(), len(w.expired(ids...)) > 0
	want, statements := w.try(p, now, "consume", count, requests...), m.statements
	got := w.asked(ctx, p, m.Coalescer, "consume", count, requests...)
	what := fmt.Sprintf("a call for %v of %v, %d statements: %v, and on a copy %v; ahead: %v", count, ids, m.statements-statements, got, want, m.lots)
	after, changed := w.balances(p, ids...), w.rows() != rows
	w.counts(now, ids, count, got, want)
	asked := m.statements > statements || want.never || want.permanent || want.reason == ratelimit.ReasonBlock || want.reason == ratelimit.ReasonPlan
	for i, id := range ids { // other numbers void what is ahead
		if unlimited := math.IsInf(before[i].Capacity, 1); !unlimited && before[i].Decides != "block" {
			m.lots = slices.DeleteFunc(m.lots, func(l *worldLot) bool { return l.of == id && l.limit != before[i].Limit })
			continue
		}
		asked = asked || got.granted && len(ids) == 1
	}
	switch {
	case got.failed != nil, asked && !w.agrees(p, ids, got, want):
		w.failf("%s", what)
	case !got.granted && asked:
		m.denials = append(m.denials, worldDenial{w.moment(), ids, count})
		if changed && !w.resharded && !dead {
			w.failf("%s, and the rows changed", what)
		}
	case !got.granted:
		known := slices.ContainsFunc(m.denials, func(d worldDenial) bool {
			return slices.Equal(d.of, ids) && count >= d.count && d.age(w.moment()) >= 0 && d.age(w.moment()) <= worldAhead
		})
		if changed || !known || !got.retryAt.After(now) {
			w.failf("%s, changed: %v", what, changed)
		}
		for _, id := range ids {
			w.meets(id, "ahead")
		}
	case changed && !asked:
		w.failf("%s, and the rows changed", what)
	}
	if !got.granted {
		return
	}
	for i, id := range ids {
		if math.IsInf(before[i].Capacity, 1) || before[i].Decides == "block" {
			continue
		}
		if !asked {
			w.uses(id, m, before[i], after[i], got.result.Requests[i], count, what)
			w.meets(id, "ahead")
			continue
		}
		m.asked[id] = w.step
		w.grants(id, got, before[i], count)
		w.takesAhead(id, m, before[i], after[i], before[i].Remaining-after[i].Remaining-count, what)
	}
	if len(ids) == 1 && got.receipt != "" && asked {
		w.receipts = append(w.receipts, worldReceipt{of: ids[0], receipt: got.receipt, count: got.taken, at: now, before: before[0].Remaining, reset: before[0].ResetAt, step: w.step, window: w.window(ids[0])})
	}
}

// refills has a program take what its calls will ask for.
func (w *everything) refills(p *worldProgram) {
	ids, m := w.ids(), p.memory
	before := w.balances(p, ids...)
	aheadclock.Refill(m.Coalescer)
	for i, b := range w.balances(p, ids...) {
		if math.IsInf(b.Capacity, 1) || b.Decides == "block" || noRate(b) {
			continue
		}
		if w.takesAhead(ids[i], m, before[i], b, before[i].Remaining-b.Remaining, "a refill") {
			w.meets(ids[i], "ahead-early")
		}
	}
}

// takesAhead wants only plenty to be taken ahead, and reports whether something was.
func (w *everything) takesAhead(id worldKey, m *worldMemory, before, after ratelimit.Balance, extra float64, what string) bool {
	slack, whole := w.slack(before)+w.slack(after), math.Round(extra) // of a billion tokens, the slack is above one
	if !w.adds(before, id) {
		m.unsure[id] = true
		return false
	}
	if extra < -slack || slack < 0.5 && math.Abs(extra-whole) > slack || whole > 0 && after.Remaining < max(3*extra, 100-extra)-slack {
		w.failf("%s: %v of %v were taken ahead, of %v, and %v are left", what, extra, id, before.Remaining, after.Remaining)
	}
	if whole < 1 {
		return false
	}
	m.lots = append(m.lots, &worldLot{worldMoment: w.moment(), of: id, limit: before.Limit, reset: before.ResetAt, left: whole, step: w.step})
	w.meets(id, "ahead-taken")
	return true
}

// uses takes what memory has granted from what is ahead.
func (w *everything) uses(id worldKey, m *worldMemory, before, after ratelimit.Balance, status ratelimit.Status, count float64, what string) {
	ahead := 0.0
	var used *worldLot
	for _, l := range m.lots {
		if l.of != id {
			continue
		}
		ahead += l.left
		if used == nil && l.usable(w.moment()) && l.left >= count {
			used = l
		}
	}
	if used == nil && m.unsure[id] {
		return
	} else if used == nil {
		w.failf("%s: nothing of it was there", what)
	}
	used.left -= count
	if w.odd[id] > used.step {
		return
	}
	if before.Decides == "definition" { // it counts from when it was taken
		if w.log[id] == nil {
			w.log[id] = &worldLog{limit: w.own(id.limit, id.key)}
		}
		grants := w.log[id].grants
		at := len(grants)
		for at > 0 && grants[at-1].at.After(used.at) {
			at--
		}
		w.log[id].grants = slices.Insert(grants, at, worldGrant{at: used.at, reset: used.reset, count: count})
	}
	if remain := min(after.Remaining+ahead-count, after.Capacity); m.asked[id] == w.step && !m.unsure[id] && status.Remaining > remain+w.slack(after) {
		w.failf("%s: %v remain, and there are %v beside %v ahead", what, status.Remaining, after.Remaining, ahead-count)
	}
}

// givesBack wants to come back what a program has ahead and does not use: what it can still use, too, if it ends.
func (w *everything) givesBack(p *worldProgram, ends bool) {
	ids, now := w.ids(), w.clock.At
	before := w.balances(p, ids...)
	if ends {
		_ = p.memory.Close(w.Context())
	} else {
		aheadclock.Sweep(p.memory.Coalescer)
	}
	after := w.balances(p, ids...)
	for i, id := range ids {
		b, most, sure := before[i], 0.0, w.adds(before[i], id)
		p.memory.lots = slices.DeleteFunc(p.memory.lots, func(l *worldLot) bool {
			if l.of != id || !ends && l.usable(w.moment()) {
				return false
			}
			most += l.comesBack(w.moment())
			sure = sure && !l.stays && w.whole(b, id, l.step, now, b.ResetAt) && l.limit == b.Limit
			return true
		})
		if math.IsInf(b.Capacity, 1) || b.Decides == "block" || noRate(b) {
			continue
		}
		came, slack := after[i].Remaining-b.Remaining, w.slack(b)+w.slack(after[i])+1e-9*most
		if came < -slack || came > most+slack && !p.memory.unsure[id] || sure && came < min(most, b.Capacity-b.Remaining)-slack {
			w.failf("of %v, %v came back, and at most %v can (for sure: %v): before %s, after %s", id, came, most, sure, balanceText(b), balanceText(after[i]))
		}
		if came > slack {
			w.meets(id, "ahead-back")
		}
	}
}

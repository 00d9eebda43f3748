package world_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// This file has the holds of a world: work that takes tokens of a limit and, often, a slot of its key. What is there is counted from the list
// of holds. Only whether an expired one was given back already is read from its rows.

// worldSlots is how many works of a key may run at once, unless an operator has said otherwise.
const worldSlots = 3

var worldSlotsLimit = ratelimit.Slots("slots", worldSlots)

// worldHold is work under an id.
type worldHold struct {
	id        string
	of        worldKey
	token     string
	count     float64
	slot      bool
	until     time.Time // zero: it has no end
	at        time.Time
	step      int
	windowEnd time.Time // the ResetAt of the balance, when it was taken
	full      bool      // the tokens were counted when it was taken: the key was not unlimited, and its numbers were the definition's
	reset     bool      // its tokens are forgotten
	ended     string
	when      time.Time // of its end

	tokens, inSlots string // the states of its rows: "" if there is none with its token
	moved           string // the state of its tokens, if its id is another's
	goesOn          bool   // they are still to come back then
}

// slots are the requests for the slots of a key.
func (w *everything) slots(k int) ratelimit.Request {
	if w.keys[k] == nil {
		return worldSlotsLimit.Global()
	}
	return worldSlotsLimit.Key(w.keys[k]...)
}

func (w *everything) slotsOf(k int) int {
	global := slices.IndexFunc(w.keys, func(parts []string) bool { return parts == nil }) // an override without a key is for all
	for _, k := range []int{k, global} {
		if n, ok := w.slotsNow[k]; ok {
			return n
		}
	}
	return worldSlots
}

// looks reads the states of the rows of all holds. One that was given back has expired, or its key was reset.
func (w *everything) looks() {
	if len(w.holds) == 0 {
		return
	}
	rows, err := w.pool.Query(w.Context(), "SELECT name, id, state, coalesce(replace(token::text, '-', ''), '') FROM ratelimit.holds WHERE state <> 'released'") // no hold, but the mark of an end
	w.must(err)
	states := map[[3]string]string{}
	var name, id, state, token string
	_, err = pgx.ForEachRow(rows, []any{&name, &id, &state, &token}, func() error {
		if strings.HasPrefix(id, "~") {
			id = "~" // one that has expired, or lapsed, goes on without its id
		}
		states[[3]string{name, id, token}] = state
		return nil
	})
	w.must(err)
	for _, h := range w.holds {
		token, name := "", w.limits[h.of.limit].Name()
		if !h.until.IsZero() {
			token = h.token[1:33]
		}
		h.tokens, h.inSlots = states[[3]string{name, h.id, token}], states[[3]string{worldSlotsLimit.Name(), h.id, token}]
		h.moved = states[[3]string{name, "~", token}]
		h.goesOn = h.moved == "held"
		if h.until.IsZero() && h.ended != "" {
			h.tokens, h.inSlots = "", "" // an id without an end is everybody's
		}
		early := h.ended == "" && (h.until.IsZero() || h.until.After(w.latest))
		if early && (h.tokens != "held" && !h.reset || h.slot && h.inSlots != "held") {
			w.failf("hold %s of %v until %v has been given back before: %q, %q", h.id, h.of, h.until, h.tokens, h.inSlots)
		}
	}
}

// inTime reports whether a hold, or its slot, is held and has not expired.
func (w *everything) inTime(h *worldHold, state string) bool {
	return state == "held" && (h.until.IsZero() || h.until.After(w.clock.At))
}

// live are the works that have a slot of a key now.
func (w *everything) live(k int) (live []*worldHold) {
	for _, h := range w.holds {
		if h.of.key == k && w.inTime(h, h.inSlots) {
			live = append(live, h)
		}
	}
	return live
}

// expired are the holds of a key, or with a slot of it, that wait to be given back.
func (w *everything) expired(ids ...worldKey) (expired []*worldHold) {
	for _, h := range w.holds {
		of := slices.ContainsFunc(ids, func(id worldKey) bool { return id == h.of || id.key == h.of.key && h.inSlots == "held" })
		if of && !h.until.IsZero() && !h.until.After(w.clock.At) && (h.tokens == "held" || h.inSlots == "held" || h.goesOn) {
			expired = append(expired, h)
		}
	}
	return expired
}

// comesBack reports whether the tokens of a hold may be given back by then: it has expired, and its bucket refills.
func (w *everything) comesBack(h *worldHold, then time.Time) bool {
	return !h.until.IsZero() && !h.until.After(then) && (w.limits[h.of.limit].Config().Kind != "token bucket" || !w.liesAhead(h.of.limit, w.stored(h.of.key), then))
}

// expires reports whether tokens of a key come back after now, until then, since a hold ends by itself.
func (w *everything) expires(until time.Time, ids ...worldKey) bool {
	return slices.ContainsFunc(w.holds, func(h *worldHold) bool {
		return slices.Contains(ids, h.of) && (h.tokens == "held" || h.goesOn) && !w.comesBack(h, w.clock.At) && w.comesBack(h, until)
	})
}

// onHandle calls f with the handle of a step, and ends its transaction. committed: what it did stays.
func (w *everything) onHandle(ctx context.Context, p *worldProgram, s worldStep, f func(ratelimit.DB) error) (committed bool, err error) {
	rollback := func() error {
		if s.Rollback {
			return harness.ErrRollBack
		}
		return nil
	}
	switch s.Way {
	case "tx":
		err = pgx.BeginTxFunc(ctx, w.pool, pgx.TxOptions{IsoLevel: harness.Levels[s.Level]}, func(tx pgx.Tx) error { return errors.Join(f(tx), rollback()) })
	case "intx":
		err = p.asks.InTx(ctx, w.pool, func(_ context.Context, tx pgx.Tx) error { return errors.Join(f(tx), rollback()) }, ratelimit.Isolation(harness.Levels[s.Level]))
	case "insqltx":
		err = p.asks.InSQLTx(ctx, w.sqlDB, func(_ context.Context, tx *sql.Tx) error { return errors.Join(f(ratelimit.SQL(tx)), rollback()) }, ratelimit.Isolation(harness.Levels[s.Level]))
	case "sql":
		return true, f(ratelimit.SQL(w.sqlDB))
	case "coalescer":
		return true, f(p.coalescer)
	default:
		return true, f(w.pool)
	}
	return err == nil, err
}

// holdWay is the way of a call about holds: they are in no batch, no middleware, and SQL by hand has none.
func (s worldStep) holdWay() worldStep {
	switch s.Way {
	case "batch", "by hand", "each":
		s.Way = "tx"
	case "middleware", "rpc", "canceled":
		s.Way = "pool"
	}
	return s
}

// hold is a step in which work is delivered, perhaps again.
func (w *everything) hold(ctx context.Context, p *worldProgram, s worldStep, r *rand.Rand) {
	s = s.holdWay()
	k := worldKey{s.Limit, s.Key}
	job := r.IntN(5)
	for _, old := range w.expired(k) {
		if old.of == k && r.IntN(2) == 0 { // the work of a dead worker is delivered again
			_, _ = fmt.Sscanf(old.id[strings.LastIndex(old.id, "|")+1:], "%d", &job)
		}
	}
	h := &worldHold{id: fmt.Sprintf("job %d.%d|%d", k.limit, k.key, job), of: k, at: w.clock.At, slot: job%2 == 0, count: s.Count}
	ttl := min(max(s.For, 100*time.Millisecond), 366*24*time.Hour)
	switch {
	case job == 4:
		ttl = ratelimit.Forever
	case s.For == 0:
		ttl = time.Minute
	}
	if ttl > 0 {
		h.until = w.clock.At.Add(ttl)
	}
	w.looks()
	before := w.balances(p, k)[0]
	if w.uneven(before) {
		return
	}
	if h.count == worldAll {
		if h.count = max(before.Remaining, 0); math.IsInf(h.count, 1) || h.count < 1e-15 {
			h.count = 1
		}
	}
	requests := []ratelimit.Request{w.request(k.limit, k.key).Count(h.count)}
	if h.slot {
		requests = append(requests, w.slots(k.key))
	}
	what := fmt.Sprintf("a hold %q of %v of %v, with a slot: %t, until %v, by %s", h.id, h.count, k, h.slot, h.until, s.Way)
	tokens := w.try(p, w.clock.At, "consume", h.count, requests[0])
	live, expired, free := w.live(k.key), w.expired(k), true
	if h.slot {
		free = len(live) < w.slotsOf(k.key)
	}
	i := slices.IndexFunc(w.holds, func(other *worldHold) bool {
		return other.id == h.id && (w.inTime(other, other.tokens) || w.inTime(other, other.inSlots))
	})
	settled := slices.ContainsFunc(w.holds, func(other *worldHold) bool {
		return other.id == h.id && other.ended == "settled" && w.clock.At.Before(other.when.Add(24*time.Hour))
	})
	rows := w.rows()
	beneath, _ := w.underneath(k)
	sums := w.adds(before, k)

	var held ratelimit.Held
	var got worldAnswer
	committed, err := w.onHandle(ctx, p, s, func(db ratelimit.DB) error {
		var err error
		held, err = p.asks.Hold(ctx, db, h.id, ttl, requests...)
		got = answerOf(harness.ResultOf(held, err), err)
		return nil
	})
	if err != nil && !errors.Is(err, harness.ErrRollBack) {
		w.failf("%s: %v, %v", what, got, err)
	}
	if got.failed != nil {
		w.failf("%s: %v", what, got.failed)
	}
	w.meets(k, "do-hold", "way-"+s.Way)
	if h.slot {
		w.meets(k, "slots")
	}
	if s.Rollback && !committed {
		w.meets(k, "rollback")
	}
	after := w.balances(p, k)[0]
	if under, whole := w.underneath(k); before.Decides == "override" && math.IsInf(before.Capacity, 1) && math.Abs(under-beneath) > whole {
		w.failf("%s, while it is unlimited: %v, and without the override there were %v, and are %v", what, got, beneath, under)
	}
	w.looks()

	nothing := true // was taken
	switch why := tokens.reason; {
	case !tokens.never && why == ratelimit.ReasonBlock && h.slot && w.slotsOf(k.key) == 0: // which lasts longer
		if got.granted || got.reason != ratelimit.ReasonPlan {
			w.failf("%s, of no slots, and a Consume: %v: %v, %s", what, tokens, got, got.reason)
		}
	case tokens.never, why == ratelimit.ReasonBlock, why == ratelimit.ReasonPlan:
		if got.granted || tokens.never != got.never || !tokens.never && got.reason != why {
			w.failf("%s: %v, %s, but a Consume: %v, %s", what, got, got.reason, tokens, why)
		}
	case h.slot && w.slotsOf(k.key) == 0: // whatever the id is: the database is not asked
		if got.granted || got.reason != ratelimit.ReasonPlan {
			w.failf("%s, of no slots: %v, %s", what, got, got.reason)
		}
	case i >= 0 && w.holds[i].until.IsZero() && !w.holds[i].reset: // after a reset, a part of it is held
		if !got.granted || !held.Repeated || held.Token != h.id {
			w.failf("%s, which is held: %v, %+v", what, got, held)
		}
	case i >= 0:
		if got.granted || got.reason != ratelimit.ReasonHeld || !got.retryAt.Equal(w.holds[i].until) {
			w.failf("%s, which is held until %v: %v, %s", what, w.holds[i].until, got, got.reason)
		}
	case settled:
		if got.granted || got.reason != ratelimit.ReasonSettled || !got.permanent {
			w.failf("%s, which was settled: %v, %s", what, got, got.reason)
		}
	case !free, !tokens.granted:
		if got.granted || got.reason != ratelimit.ReasonQuota {
			w.failf("%s, %d live, and the tokens %v: %v, %s", what, len(live), tokens, got, got.reason)
		}
		w.holdRetries(ctx, p, k, ttl, requests, live, got, tokens, what)
	case !got.granted:
		w.failf("%s, %d live, and the tokens %v: %v, %s", what, len(live), tokens, got, got.reason)
	case got.granted:
		nothing = false
	}
	if held.Repeated != (got.granted && nothing) {
		w.failf("%s: Repeated is %t: %v", what, held.Repeated, got)
	}
	if nothing || !committed {
		if w.rows() != rows && !(committed && (len(expired) > 0 || w.resharded)) {
			w.failf("%s: %v, committed %t, and the rows changed:\n%s\nto\n%s", what, got, committed, rows, w.rows())
		}
		return
	}
	h.token, h.step, h.windowEnd, h.full = held.Token, w.step, before.ResetAt, before.Decides == "definition" && before.Remaining <= before.Capacity
	if !held.Until.Equal(h.until) || ttl < 0 != (h.token == h.id) {
		w.failf("%s: %+v", what, held)
	}
	back := 0.0 // at most
	for _, old := range expired {
		if old.of == k {
			back += old.count
		}
		if old.id == h.id {
			old.ended, old.when = "replaced", w.clock.At
		}
	}
	w.holds = append(w.holds, h)
	w.looks()
	delete(w.log, k)
	took, slack := before.Remaining-after.Remaining, w.slack(before)+w.slack(after)
	most := h.count
	if before.Limit.Config().Shards > 1 { // another shard does not wait for them
		most += back
	}
	if counts(before) && (took > most+slack || took < h.count-back-slack || len(expired) > 0 && sums && took < h.count-slack) {
		w.failf("%s, %v of expired ones: took %v; %v were there and %v are left", what, back, took, before.Remaining, after.Remaining)
	}
}

// underneath is what a key would have without overrides, once it has what expired holds hold: a Hold that needs it gives it back first. slack
// is what it may be rounded by.
func (w *everything) underneath(id worldKey) (remaining, slack float64) {
	limits := &ratelimit.Limiter{Clock: w.clock.Now}
	if noRate(w.balancesBy(limits, w.pool, id)[0]) {
		return 0, 0
	}
	b := w.givenBack(limits, id)
	return b.Remaining, w.slack(b)
}

// givenBack is the balance of a key once a Hold has given back what expired holds hold, on a copy.
func (w *everything) givenBack(limits *ratelimit.Limiter, id worldKey) (b ratelimit.Balance) {
	w.must(rolledBack(w.Context(), w.pool, func(tx pgx.Tx) {
		all := w.balancesBy(limits, tx, id)[0].Capacity
		_, err := limits.Hold(w.Context(), tx, "another", time.Minute, w.request(id.limit, id.key).Count(all))
		if b = w.balancesBy(limits, tx, id)[0]; err == nil {
			b.Remaining += all
		} else if !harness.Denied(err) {
			w.must(err)
		}
	}))
	return b
}

// counts reports whether a balance is one that calls change.
func counts(b ratelimit.Balance) bool {
	return !math.IsInf(b.Remaining, 0) && b.Decides != "block" && !noRate(b)
}

// holdRetries wants a hold to be granted at the RetryAt of a denial, if nothing else happens.
func (w *everything) holdRetries(ctx context.Context, p *worldProgram, k worldKey, ttl time.Duration, requests []ratelimit.Request, live []*worldHold, denial, tokens worldAnswer, what string) {
	w.looks()
	if denial.permanent {
		ends := !slices.ContainsFunc(live, func(h *worldHold) bool { return !h.until.IsZero() })
		if !tokens.permanent && !ends && len(live) < w.slotsOf(k.key)+1 {
			w.failf("%s: %v, and holds end", what, denial)
		}
		return
	}
	if !denial.retryAt.After(w.clock.At) {
		w.failf("%s: %v", what, denial)
	}
	if w.far(denial.retryAt, k) || len(w.pending(k)) > 0 {
		return
	}
	before := w.clock.At
	w.clock.At = denial.retryAt
	defer func() { w.clock.At = before }()
	w.must(rolledBack(ctx, w.pool, func(tx pgx.Tx) {
		if _, err := p.asks.Hold(ctx, tx, "another", ttl, requests...); err != nil {
			w.failf("%s: denied at %v until %v, and then: %v", what, before, denial.retryAt, err)
		}
	}))
}

// endHold is a step in which work ends: a Settle or a Release, of any hold that there ever was.
func (w *everything) endHold(ctx context.Context, p *worldProgram, s worldStep, r *rand.Rand) {
	s = s.holdWay()
	if r.IntN(6) == 0 {
		w.endStranger(ctx, p, s, r)
		return
	}
	if len(w.holds) == 0 {
		return
	}
	h := w.holds[len(w.holds)-1-r.IntN(min(len(w.holds), 4))]
	used := 0.0
	if s.Do == "settle" {
		used = h.count * harness.OneOf(r, 0, 0.5, 1, 1, 1.5)
	}
	if used < 1e-15 {
		used = 0
	}
	requests := []ratelimit.Request{w.request(h.of.limit, h.of.key).Count(used)}
	if h.slot {
		requests = append(requests, w.slots(h.of.key))
	}
	w.looks()
	was := *h
	if h.until.IsZero() && h.ended != "" {
		return // its id may be another's by now
	}
	before, rows := w.balances(p, h.of)[0], w.rows()
	adds := w.adds(before, h.of)
	if w.uneven(before) {
		return
	}
	if s.Do == "release" && was.tokens == "" { // its id is another's
		was.tokens = was.moved
	}
	what := fmt.Sprintf("%s of hold %q of %v of %v, used %v, rows %q and %q, ended %q, until %v", s.Do, h.id, h.count, h.of, used, h.tokens, h.inSlots, h.ended, h.until)
	var result ratelimit.Result
	var failed error
	// A version of the program that does not know all limits any more. Of keys with numbers of their own, nothing would come back.
	deployed := !h.until.IsZero() && r.IntN(3) == 0 && w.limits[h.of.limit].Config().Varies == ""
	limits, named := p.asks, requests
	if deployed {
		limits, named = &ratelimit.Limiter{Clock: w.clock.Now}, nil
		follow.With(limits, p.asks)
		if used = 0; s.Do == "settle" {
			used = h.count
		}
		if h.slot && r.IntN(2) == 0 { // it knows the slots
			_, err := limits.Balance(ctx, w.pool, w.slots(h.of.key))
			w.must(err)
		}
		what = fmt.Sprintf("by a program that does not know all limits, %s, used %v", what, used)
	}
	committed, err := w.onHandle(ctx, p, s, func(db ratelimit.DB) error {
		if s.Do == "release" {
			failed = harness.Second(limits.Release(ctx, db, h.token, named...))
		} else {
			result, failed = limits.Settle(ctx, db, h.token, named...)
		}
		return nil
	})
	if err != nil && !errors.Is(err, harness.ErrRollBack) {
		w.failf("%s: %v, %v", what, failed, err)
	}
	w.meets(h.of, "do-"+s.Do, "way-"+s.Way)
	if h.slot {
		w.meets(h.of, "slots")
	}
	after := w.balances(p, h.of)[0]
	gone := func(state string) bool {
		return state == "" || state == "lapsed" && w.clock.At.Sub(h.until) >= 7*24*time.Hour
	}
	lost := gone(was.tokens) || h.slot && (gone(was.inSlots) || was.inSlots == "lapsed")
	again := h.ended == "settled"
	switch {
	case failed != nil && (s.Do != "settle" || !errors.Is(failed, ratelimit.ErrHoldLost)):
		w.failf("%s: %v", what, failed)
	case failed != nil && !lost && !(again && !w.clock.At.Before(h.when.Add(24*time.Hour))) && !h.reset: // what a reset by the tool or the page forgets, it keeps for 7 days by the real clock
		w.failf("%s: %v", what, failed)
	case s.Do == "settle" && failed == nil && !again && (was.tokens == "" || h.slot && was.inSlots != "held"):
		w.failf("%s, and it is not lost", what)
	case failed == nil && again && s.Do == "settle" && !result.Repeated:
		w.failf("%s: not Repeated: %+v", what, result)
	}
	if failed != nil || again || !committed || was.tokens == "" && was.inSlots == "" {
		if committed && before.Remaining == before.Capacity { // a row that is full may be there, and what comes after an override would refill it
			after.NextAt = before.NextAt
		}
		if differ := w.same(before, after); differ != "" || !committed && w.rows() != rows {
			w.failf("%s: %v, committed %t, and changed:\n%s\n%s\nto\n%s", what, failed, committed, differ, rows, w.rows())
		}
		return
	}
	h.ended, h.when = map[string]string{"settle": "settled", "release": "released"}[s.Do], w.clock.At
	delete(w.log, h.of)
	w.looks()
	if !counts(before) || !counts(after) {
		return
	}
	back, slack, spare := after.Remaining-before.Remaining, w.slack(before)+w.slack(after)+1e-9*h.count, h.count-used
	held, whole := was.tokens == "held", h.full && w.whole(before, h.of, h.step, h.at, h.windowEnd)
	if held && !h.until.IsZero() && !h.until.After(w.clock.At) { // it was there before
		if back > slack || back < -used-slack || whole && adds && math.Abs(back+used) > slack {
			w.failf("%s: of the tokens of one that has expired, %v came back", what, back)
		}
		return
	}
	if s.Do == "settle" && adds && math.Abs(back-result.Requests[0].Refunded+result.Requests[0].Taken) > slack {
		w.failf("%s: %v came back and %v were charged; %v were there and %v are left", what, result.Requests[0].Refunded, result.Requests[0].Taken, before.Remaining, after.Remaining)
	}
	switch {
	case back > max(0, spare)+slack, was.tokens == "lapsed" && !h.reset && back > slack, h.reset && back > slack:
		w.failf("%s: %v came back", what, back)
	case back < min(0, spare)-slack && held, back < -used-slack:
		w.failf("%s: %v were charged", what, -back)
	case held && h.full && adds && before.Decides == "definition" && spare < 0 && math.Abs(back-spare) > slack:
		w.failf("%s: %v were charged", what, -back)
	case held && whole && adds && math.Abs(back-spare) > slack:
		w.failf("%s: %v came back, and nobody waits", what, back)
	}
}

// endStranger ends a hold that never was: it was rolled back. Nothing is written for it.
func (w *everything) endStranger(ctx context.Context, p *worldProgram, s worldStep, r *rand.Rand) {
	requests := []ratelimit.Request{w.request(s.Limit, s.Key).Count(r.Float64())}
	if r.IntN(2) == 0 {
		requests = append(requests, w.slots(s.Key))
	}
	var token string
	_ = rolledBack(ctx, w.pool, func(tx pgx.Tx) {
		held, _ := p.asks.Hold(ctx, tx, "nobody", time.Hour, requests...)
		token = held.Token
	})
	if token == "" { // it was denied
		return
	}
	before := w.rows()
	_, err := w.onHandle(ctx, p, s, func(db ratelimit.DB) error {
		if s.Do == "release" {
			return harness.Second(p.asks.Release(ctx, db, token, requests...))
		}
		if _, err := p.asks.Settle(ctx, db, token, requests...); !errors.Is(err, ratelimit.ErrHoldLost) {
			return fmt.Errorf("want that it is lost: %w", err)
		}
		return nil
	})
	if err != nil && !errors.Is(err, harness.ErrRollBack) || w.rows() != before {
		w.failf("%s of a hold of %v of limit %d and key %d that never was, by %s: %v, and the rows are\n%s\nand were\n%s", s.Do, requests, s.Limit, s.Key, s.Way, err, w.rows(), before)
	}
}

// slotsSay wants all ways to ask to say how many slots of a key are free: expired ones are.
func (w *everything) slotsSay(p *worldProgram, k int) {
	if len(w.holds) == 0 {
		return
	}
	w.looks()
	live, n := len(w.live(k)), w.slotsOf(k)
	balances, err := p.limits.Balance(w.Context(), w.pool, w.slots(k))
	w.must(err)
	if b := balances[0]; b.Remaining != float64(n-live) || b.Capacity != float64(n) || b.Used != float64(live) || math.Signbit(b.Used) != (b.Used < 0) {
		w.failf("%d works of key %d are live, of %d: %s", live, k, n, balanceText(b))
	}
	key := ""
	if stored := w.stored(k); stored != nil {
		key = *stored
	}
	var remaining float64
	err = w.pool.QueryRow(w.Context(), "SELECT remaining FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, $2, $3)",
		worldSlotsLimit.Name(), []string{key}, w.clock.At).Scan(&remaining)
	if errors.Is(err, pgx.ErrNoRows) && live == 0 {
		return
	}
	w.must(err)
	if remaining != float64(n-live) {
		w.failf("%d works of key %d are live, of %d: ratelimit.keys says that %v slots are free", live, k, n, remaining)
	}
}

// changeSlots is an operator's step: another number of slots, for one key or as defined.
func (w *everything) changeSlots(s worldStep, r *rand.Rand) {
	p, request := w.programs[0], w.slots(s.Key)
	if w.keys[s.Key] == nil {
		request = worldSlotsLimit.EveryKey()
	}
	_, err := p.limits.Restore(w.Context(), w.pool, request, ratelimit.End{Who: "ann"})
	w.must(err)
	delete(w.slotsNow, s.Key)
	if r.IntN(3) > 0 {
		n := r.IntN(5)
		_, err := p.limits.Override(w.Context(), w.pool, request, ratelimit.Terms{Forever: true, Who: "ann"}, ratelimit.Capacity(float64(n)))
		w.must(err)
		w.slotsNow[s.Key] = n
	}
	w.followed()
	w.slotsSay(p, s.Key)
}

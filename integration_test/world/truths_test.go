package world_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/url"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/ratelimit"
)

// polledPool counts the polls of Overrides, and those that have read something.
type polledPool struct {
	*pgxpool.Pool
	begun, ended atomic.Int64
}

func (p *polledPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	p.begun.Add(1)
	return polledRow{p.Pool.QueryRow(ctx, sql, args...), p}
}

type polledRow struct {
	pgx.Row
	pool *polledPool
}

func (r polledRow) Scan(dest ...any) error {
	err := r.Row.Scan(dest...)
	if err == nil {
		r.pool.ended.Add(1)
	}
	return err
}

// followed waits until all programs know the overrides: the first one has polled, and what it read is in force when it polls again.
func (w *everything) followed() {
	for i, p := range w.programs {
		if i > 0 {
			w.must(follow.Load(w.Context(), p.limits))
			continue
		}
		polls := p.polls
		for n, until := polls.begun.Load(), time.Now().Add(harness.Patience); polls.ended.Load() < n+2; time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				w.failf("a program that follows overrides polls no more")
			}
		}
	}
}

func (w *everything) ids() (ids []worldKey) {
	for i := range w.limits {
		for k := range w.keys {
			ids = append(ids, worldKey{i, k})
		}
	}
	return ids
}

func (w *everything) balances(p *worldProgram, ids ...worldKey) []ratelimit.Balance {
	return w.balancesBy(p.limits, w.pool, ids...)
}

func (w *everything) balancesBy(limits *ratelimit.Limiter, db ratelimit.DB, ids ...worldKey) []ratelimit.Balance {
	var requests []ratelimit.Request
	for _, id := range ids {
		requests = append(requests, w.request(id.limit, id.key))
	}
	balances, err := limits.Balance(w.Context(), db, requests...)
	w.must(err)
	return balances
}

// balanceAt is a balance at another instant.
func (w *everything) balanceAt(p *worldProgram, now time.Time, id worldKey) ratelimit.Balance {
	before := w.clock.At
	w.clock.At = now
	defer func() { w.clock.At = before }()
	return w.balances(p, id)[0]
}

// worldShards is the most shards of a limit.
const worldShards = 4

// slack is what a sum of a balance may be rounded by.
func (w *everything) slack(b ratelimit.Balance) float64 {
	if math.IsInf(b.Capacity, 1) {
		return 0
	}
	rows := 1.0
	if w.resharded {
		rows = worldShards
	}
	return 2*rows*harness.Tolerance(b.Limit) + 1e-9*math.Abs(b.Remaining) + 1e-12
}

// same says how two balances differ; "": not at all.
func (w *everything) same(a, b ratelimit.Balance) string {
	if (a.Remaining != b.Remaining && !harness.Near(a.Remaining, b.Remaining)) || a.Capacity != b.Capacity || !a.NextAt.Equal(b.NextAt) || !a.ResetAt.Equal(b.ResetAt) ||
		a.Decides != b.Decides || !a.Until.Equal(b.Until) || a.Key != b.Key {
		return fmt.Sprintf("%v\nand %v", balanceText(a), balanceText(b))
	}
	return ""
}

func balanceText(b ratelimit.Balance) string {
	return fmt.Sprintf("%v of %v, %v used, at %v, next at %v, resets at %v, by %s until %v, %v", b.Remaining, b.Capacity, b.Used, b.At, b.NextAt, b.ResetAt, b.Decides, b.Until, b.Limit)
}

// unchanged wants nothing that anybody can see to change.
func (w *everything) unchanged(what string, f func()) {
	ids := w.ids()
	before := w.balances(w.programs[0], ids...)
	f()
	for n, p := range w.programs {
		for i, b := range w.balances(p, ids...) {
			if differ := w.same(before[i], b); differ != "" {
				w.failf("%s changed what program %d says of %v:\n%s", what, n, ids[i], differ)
			}
		}
	}
}

// inForce is the override that decides about a key at an instant, or nil. besides: effects that do not count.
func (w *everything) inForce(id worldKey, at time.Time, besides ...string) (decides *worldOverride) {
	own := false
	for _, o := range w.made { // the newest last
		if o.limit != id.limit || o.removed || slices.Contains(besides, o.effect) || !o.until.IsZero() && !o.until.After(at) || o.key != nil && *o.key != id.key {
			continue
		}
		mine := o.key != nil || w.keys[id.key] == nil
		switch {
		case decides == nil, mine && !own:
			decides, own = o, mine
		case mine == own && (decides.effect != "block" || o.effect == "block"):
			decides = o
		}
	}
	return decides
}

// pending are the ends of overrides that may change a key's numbers.
func (w *everything) pending(ids ...worldKey) (ends []time.Time) {
	for _, o := range w.made {
		if !o.removed && o.until.After(w.clock.At) && slices.ContainsFunc(ids, func(id worldKey) bool { return o.limit == id.limit && (o.key == nil || *o.key == id.key) }) {
			ends = append(ends, o.until)
		}
	}
	return ends
}

// override is the step of an operator that decides something.
func (w *everything) override(s worldStep, r *rand.Rand) {
	o := &worldOverride{limit: s.Limit, effect: s.Do, madeIn: w.step}
	var key *string
	if w.keys[s.Key] != nil && r.IntN(3) > 0 {
		o.key, key = new(s.Key), w.stored(s.Key)
	}
	if s.For > 0 {
		o.until = w.clock.At.Add(s.For)
	}
	late := s.Do == "late"
	if late {
		s.Way = ""
		o.effect = harness.OneOf(r, "override", "block", "unlimited")
	}
	if o.effect == "override" {
		o.effect = "numbers"
		c := w.limits[s.Limit].Config()
		if r.IntN(3) > 0 {
			o.rate = new(harness.OneOf(r, *c.Rate*2, *c.Rate/4, 0.5, 1, 60))
		}
		if o.rate == nil || r.IntN(2) == 0 {
			o.capacity = new(harness.OneOf(r, *c.Capacity*3, *c.Capacity/2, 0.5, 1, 17))
		}
		if s.Count > 0 {
			o.rate, o.capacity = nil, new(s.Count)
		}
		if *c.Rate == 0 { // multiples of it are nothing to override with
			o.rate, o.capacity = new(harness.OneOf(r, 0.5, 1, 60)), new(cmp.Or(s.Count, harness.OneOf(r, 0.5, 1, 17)))
		}
	}
	for k := range w.keys {
		if id := (worldKey{s.Limit, k}); o.key == nil || *o.key == k {
			w.meets(id, "override-"+o.effect)
			w.steered(id, s.Way)
			if !o.until.IsZero() {
				w.meets(id, "override-with-end")
			}
			if o.key == nil && w.keys[k] != nil {
				w.meets(id, "override-of-all-keys")
			}
			if late {
				w.meets(id, "override-late")
			}
		}
	}
	var on ratelimit.DB = w.pool
	if late {
		if w.lateTx == nil {
			tx, err := w.pool.Begin(w.Context())
			w.must(err)
			w.lateTx = tx
		}
		on = w.lateTx
	}
	o.id = w.steers(on, s.Way, o, key)
	if late {
		w.late = append(w.late, o)
		return
	}
	w.made = append(w.made, o)
	w.changed(o.limit)
}

// steered notes in which way a decision about a key was made.
func (w *everything) steered(id worldKey, way string) {
	if way != "" {
		w.meets(id, "steer-"+way)
	}
}

// commitLate commits the overrides of a transaction that was open for some time. They were made before others that were committed earlier.
func (w *everything) commitLate() {
	if w.lateTx == nil {
		return
	}
	w.must(w.lateTx.Commit(w.Context()))
	w.lateTx = nil
	w.made = append(w.made, w.late...)
	slices.SortStableFunc(w.made, func(a, b *worldOverride) int { return a.madeIn - b.madeIn })
	for _, o := range w.late {
		w.changed(o.limit)
	}
	w.late = nil
}

// changed tells the programs that overrides of a limit have changed.
func (w *everything) changed(limit int) {
	for k := range w.keys {
		w.oddly(worldKey{limit, k})
	}
	w.followed()
}

// restore ends overrides, and its report is how many.
func (w *everything) restore(s worldStep, r *rand.Rand) {
	var key *string
	if w.keys[s.Key] != nil && r.IntN(3) > 0 {
		key = w.stored(s.Key)
	}
	sql := "SELECT ratelimit.restore($1, $2, every_key => $2::text IS NULL)"
	if s.Do == "unblock" {
		sql = "SELECT ratelimit.unblock($1, $2, every_key => $2::text IS NULL)"
	}
	var n, want int
	switch s.Way {
	case "tool":
		args := []string{s.Do, "--json"}
		if s.Do == "restore" {
			args = append(args, "--yes") // it asks, of every key
		}
		var of *int
		if key != nil {
			of = &s.Key
		}
		var ended struct{ Removed int }
		w.tool(w.url, &ended, append(args, w.named(s.Limit, of)...)...)
		n = ended.Removed
	case "page":
		form := url.Values{"action": {"restore"}, "shown": {w.shownFor(s.Limit, key)}}
		if s.Do == "unblock" {
			form.Set("effect", "block")
		}
		if w.post(s.Limit, key, form) == "restore" {
			n = 1
		}
	case "go":
		limits, request := w.programs[0].limits, w.limit(s.Limit).EveryKey()
		if key != nil {
			request = w.request(s.Limit, s.Key)
		}
		var err error
		if s.Do == "unblock" {
			n, err = limits.Unblock(w.Context(), w.pool, request, ratelimit.End{Who: "ann"})
		} else {
			n, err = limits.Restore(w.Context(), w.pool, request, ratelimit.End{Who: "ann"})
		}
		w.must(err)
	default:
		w.must(w.pool.QueryRow(w.Context(), sql, w.limits[s.Limit].Name(), key).Scan(&n))
	}
	for _, o := range w.made { // by the database's clock, none has ended
		if o.limit == s.Limit && !o.removed && (o.key == nil) == (key == nil) && (key == nil || *o.key == s.Key) && (s.Do == "restore" || o.effect == "block") {
			o.removed = true
			want++
			for k := range w.keys {
				if o.key == nil || *o.key == k {
					w.meets(worldKey{s.Limit, k}, "override-removed")
					w.steered(worldKey{s.Limit, k}, s.Way)
				}
			}
		}
	}
	if s.Way == "page" {
		want = min(want, 1) // it does not say how many
	}
	if n != want {
		w.failf("%s of %v, %v: %d ended, want %d", s.Do, s.Limit, key, n, want)
	}
	w.changed(s.Limit)
}

// before is the harness's before. The rows of a limit may still be of another number of shards: each has its rounding.
func (w *everything) before(l ratelimit.Limit, at time.Time) time.Time {
	if w.resharded {
		c := l.Config()
		c.Shards = worldShards
		l, _ = c.Limit()
	}
	return harness.Before(l, at)
}

// early is an instant before at, at which a call that is granted at that instant lacks more than rounding forgives.
func (w *everything) early(p *worldProgram, at time.Time, ids ...worldKey) time.Time {
	earliest := at.Add(-time.Microsecond)
	for _, id := range ids {
		for _, now := range []time.Time{w.clock.At, at.Add(-time.Microsecond), at} {
			if l := w.balanceAt(p, now, id).Limit; l.Config().Kind != "unlimited" && *l.Config().Rate != 0 && w.before(l, at).Before(earliest) {
				earliest = w.before(l, at)
			}
		}
	}
	return earliest
}

// far reports whether an instant is further away than a calendar's list of windows.
func (w *everything) far(at time.Time, ids ...worldKey) bool {
	for _, id := range ids {
		if c := w.limits[id.limit].Config(); c.Kind == "calendar window" && at.Sub(w.clock.At) > 90*worldPeriod(c) {
			return true
		}
	}
	return at.Year() >= 9990
}

// retries proves a denial: the same call is granted at RetryAt, and not before; or never.
func (w *everything) retries(p *worldProgram, ids []worldKey, verb string, count float64, denial worldAnswer, what string, requests ...ratelimit.Request) {
	now, r := w.clock.At, rand.New(rand.NewPCG(uint64(w.step), 3))
	if len(ids) > 1 {
		for _, b := range w.balances(p, ids...) {
			if math.IsInf(b.Capacity, 1) || b.Decides == "block" {
				return // what is unlimited until then was not asked
			}
		}
	}
	if len(w.expired(ids...)) > 0 {
		return // the call has given back what they hold, and the copies have not
	}
	ends := w.pending(ids...)
	instants := []time.Time{now.Add(time.Microsecond), now.Add(time.Second), now.Add(time.Duration(r.Int64N(int64(100 * time.Hour)))).Truncate(time.Microsecond), now.Add(400 * 24 * time.Hour)}
	for _, end := range ends {
		instants = append(instants, w.early(p, end, ids...), end, end.Add(time.Second))
	}
	until := time.Date(9990, 1, 1, 0, 0, 0, 0, time.UTC)
	switch {
	case denial.never, denial.permanent:
		instants = append(instants, now.Add(20*365*24*time.Hour))
	default:
		if after := denial.result.RetryAfter; !denial.retryAt.After(now) || after != min(denial.retryAt.Sub(now), math.MaxInt64/2) {
			w.failf("%s: denied at %v until %v, after %v", what, now, denial.retryAt, after)
		}
		if until = denial.retryAt; w.far(denial.retryAt, ids...) {
			return
		}
		then := w.try(p, denial.retryAt, verb, count, requests...)
		if quota := denial.reason == ratelimit.ReasonQuota; !then.granted && (quota || then.reason == ratelimit.ReasonBlock || then.reason == ratelimit.ReasonPlan) {
			w.failf("%s: denied at %v until %v, and then %v", what, now, denial.retryAt, then)
		}
		until = w.early(p, until, ids...)
		instants = append(instants, until, now.Add(denial.retryAt.Sub(now)/2).Truncate(time.Microsecond))
		if verb == "reserve" && len(ids) > 1 {
			return // it may be granted earlier
		}
	}
	for _, at := range instants {
		if !at.After(now) || at.After(until) || w.expires(at, ids...) {
			continue
		}
		if t := w.try(p, at, verb, count, requests...); t.granted {
			w.failf("%s: at %v %v, but it is granted at %v", what, now, denial, at)
		}
	}
}

// runs proves when the work of a reservation may run: when nothing is owed any more.
func (w *everything) runs(p *worldProgram, id worldKey, t worldAnswer, what string) {
	b := w.balances(p, id)[0]
	if b.Decides != "definition" || len(w.pending(id)) > 0 || w.far(t.runAt, id) {
		return
	}
	then := w.balanceAt(p, t.runAt, id)
	if then.Remaining < -w.slack(then) {
		w.failf("%s: runs at %v, and then %v are owed", what, t.runAt, -then.Remaining)
	}
	if early := w.early(p, t.runAt, id); early.After(w.clock.At) {
		if b := w.balanceAt(p, early, id); b.Remaining >= 0 && !w.expires(early, id) {
			w.failf("%s: runs at %v, and before, at %v: %v", what, t.runAt, early, balanceText(b))
		}
	}
}

// says proves what a balance says, and that all ways to ask say it.
func (w *everything) says(p *worldProgram, id worldKey) {
	b, now := w.balances(p, id)[0], w.clock.At
	what := fmt.Sprintf("%v: %s", id, balanceText(b))
	for n, other := range w.programs {
		if differ := w.same(b, w.balances(other, id)[0]); differ != "" {
			w.failf("program %d says\n%s", n, differ)
		}
	}
	decides, until := "definition", time.Time{}
	o := w.inForce(id, now)
	if nothing := o != nil && o.effect == "numbers" && o.rate == nil && noRate(b); o != nil && !nothing { // a capacity gives no rate
		if decides, until = "override", o.until; o.effect == "block" {
			decides = "block"
		}
		switch c := b.Limit.Config(); {
		case o.effect == "unlimited" && !math.IsInf(b.Remaining, 1), o.effect == "numbers" && (o.rate != nil && *c.Rate != *o.rate || o.capacity != nil && b.Capacity != *o.capacity):
			w.failf("%s, but %+v is in force", what, *o)
		}
	}
	if b.Decides != decides || !b.Until.Equal(until) || !b.At.Equal(now) {
		w.failf("%s, want it by %s until %v", what, decides, until)
	}
	request, varies := w.request(id.limit, id.key), w.limits[id.limit].Config().Varies != ""
	switch {
	case noRate(b):
		w.grantsNothing(p, id, b, what)
		return
	case decides == "block":
		if one := w.try(p, now, "consume", 1, request); one.granted || b.Remaining > 0 || one.reason != ratelimit.ReasonBlock && !one.never {
			w.failf("%s, and a call: %v, %s", what, one, one.reason)
		} else if !varies {
			if hand := w.tryByHand("consume", id, 1); !w.agrees(p, []worldKey{id}, hand, one) {
				w.failf("%s, and a call: %v, and by hand: %v, %v", what, one, hand, hand.failed)
			}
		}
		w.listed(p, id, b, what)
		return
	case math.IsInf(b.Capacity, 1):
		if many := w.try(p, now, "consume", 1e12, request); !many.granted {
			w.failf("%s, and a call: %v", what, many)
		}
		if !varies {
			if hand := w.tryByHand("consume", id, 1e12); !hand.granted {
				w.failf("%s, and a call by hand: %v, %v", what, hand, hand.failed)
			}
		}
		return
	}
	if math.Abs(b.Used-(b.Capacity-b.Remaining)) > w.slack(b) || b.Remaining > b.Capacity {
		w.failf("%s", what)
	}
	if w.looks(); len(w.expired(id)) > 0 {
		w.dead(id, b, what)
		if given := w.givenBack(p.asks, id); math.Abs(given.Remaining-b.Remaining) > w.slack(b)+w.slack(given) {
			w.failf("%s, and once a Hold gives back what expired ones hold: %s", what, balanceText(given))
		}
	}

	// What remains can be taken, and a hair more cannot.
	if r := b.Remaining; r >= 1e-12 {
		if t := w.try(p, now, "consume", r, request); !t.granted {
			w.failf("%s, and a call for that: %v", what, t)
		}
		if !varies {
			if t := w.tryByHand("consume", id, r); !t.granted {
				w.failf("%s, and SQL for that: %v, %v", what, t, t.failed)
			}
		}
	}
	if w.uneven(b) {
		return
	}
	hair := 2*w.slack(b) + 1e-9
	if t := w.try(p, now, "consume", max(b.Remaining, 0)+hair, request); t.granted {
		w.failf("%s, and a call for %v more is granted", what, hair)
	}
	could := func(now time.Time) float64 { return w.try(p, now, "take", 1e15, request).taken }
	had := could(now)
	if had < max(0, math.Floor(b.Remaining)) || had > max(0, math.Floor(b.Remaining+w.slack(b))) {
		w.failf("%s, and %v can be taken", what, had)
	}
	switch ends := w.pending(id); {
	case len(w.expired(id)) > 0 && len(ends) > 0: // other numbers count for what they held
	case b.NextAt.IsZero():
		if had+1 <= b.Capacity && len(ends) == 0 {
			w.failf("%s, never more than %v", what, had)
		}
	case !b.NextAt.After(now):
		w.failf("%s", what)
	case !w.far(b.NextAt, id):
		if n := could(b.NextAt); n <= had {
			w.failf("%s, but at NextAt %v can be taken, and %v now", what, n, had)
		}
		if early := w.early(p, b.NextAt, id); early.After(now) {
			if n := could(early); n > had && !w.expires(early, id) {
				w.failf("%s, but %v can be taken at %v, and %v now", what, n, early, had)
			}
		}
	}
	w.resets(p, id, b, what)
	w.listed(p, id, b, what)
}

// dead wants the balance of a window to have all that expired holds hold of it, if nothing else has happened to it.
func (w *everything) dead(id worldKey, b ratelimit.Balance, what string) {
	if b.Limit.Config().Kind == "token bucket" || w.resharded {
		return
	}
	var sum float64
	counted := false
	var oldest *time.Time // of the shards: one that was not taken from may be of a window before
	w.must(w.pool.QueryRow(w.Context(), "SELECT coalesce(sum(value), 0), min(ts) FROM ratelimit.limits WHERE name = $1 AND key = $2", b.Limit.Name(), b.Key).Scan(&sum, &oldest))
	for _, h := range w.expired(id) {
		switch {
		case h.goesOn:
			return
		case h.of != id || h.tokens != "held":
		case !h.full || !w.whole(b, id, h.step, h.at, h.windowEnd) || oldest != nil && oldest.Before(h.at):
			return
		default:
			sum += h.count
			counted = true
		}
	}
	if counted && math.Abs(min(sum, b.Capacity)-b.Remaining) > w.slack(b) {
		w.failf("%s, and with what expired holds hold there are %v", what, sum)
	}
}

// uneven reports whether a row of a sharded limit may have more tokens than all rows together, since others owe some: other numbers count for
// the time before them, too. What is granted then depends on the row that a call meets.
func (w *everything) uneven(b ratelimit.Balance) (owes bool) {
	if b.Limit.Config().Shards > 1 && slices.ContainsFunc(w.made, func(o *worldOverride) bool { return w.limits[o.limit].Name() == b.Limit.Name() }) {
		w.must(w.pool.QueryRow(w.Context(), "SELECT coalesce(min(value) < 0, false) FROM ratelimit.limits WHERE name = $1 AND key = $2", b.Limit.Name(), b.Key).Scan(&owes))
	}
	return owes
}

// noRate reports whether a key has a rate of 0.
func noRate(b ratelimit.Balance) bool {
	return !math.IsInf(b.Capacity, 1) && *b.Limit.Config().Rate == 0
}

// grantsNothing wants a key without a rate to be denied everything, however it asks, as long as nothing else is decided.
func (w *everything) grantsNothing(p *worldProgram, id worldKey, b ratelimit.Balance, what string) {
	one := w.try(p, w.clock.At, "consume", 1, w.request(id.limit, id.key))
	if one.granted || b.Remaining != 0 || b.Capacity != 0 || !b.NextAt.IsZero() || !b.ResetAt.IsZero() || one.reason != ratelimit.ReasonPlan {
		w.failf("%s, and a call: %v, %s", what, one, one.reason)
	}
	if w.limits[id.limit].Config().Varies == "" {
		if hand := w.tryByHand("consume", id, 1); !w.agrees(p, []worldKey{id}, hand, one) {
			w.failf("%s, and a call: %v, and by hand: %v, %v", what, one, hand, hand.failed)
		}
	}
	w.retries(p, []worldKey{id}, "consume", 1, one, what, w.request(id.limit, id.key))
	w.listed(p, id, b, what)
}

// resets proves ResetAt: full then, or the next window; and not before. A clock behind the row begins windows that refill nothing.
func (w *everything) resets(p *worldProgram, id worldKey, b ratelimit.Balance, what string) {
	if len(w.pending(id)) > 0 || w.far(b.ResetAt, id) || w.clock.At.Before(w.latest) || w.expires(b.ResetAt, id) {
		return
	}
	then := w.balanceAt(p, b.ResetAt, id)
	if b.Limit.Config().Kind == "token bucket" {
		if then.Remaining < then.Capacity-w.slack(then) || b.ResetAt.Before(b.At) {
			w.failf("%s, and at ResetAt %v", what, balanceText(then))
		}
		if early := w.before(b.Limit, b.ResetAt); early.After(b.At) {
			if e := w.balanceAt(p, early, id); e.Remaining >= e.Capacity {
				w.failf("%s, and before ResetAt %v", what, balanceText(e))
			}
		}
		return
	}
	last := w.balanceAt(p, b.ResetAt.Add(-time.Microsecond), id)
	want := min(b.Remaining+*b.Limit.Config().Rate, b.Capacity)
	full := (b.Limit.Config().Shards > 1 || w.resharded) && then.Remaining >= b.Remaining-w.slack(b) && then.Remaining < want // a shard holds its part at most
	if math.Abs(last.Remaining-b.Remaining) > w.slack(b) || !last.ResetAt.Equal(b.ResetAt) || !then.ResetAt.After(b.ResetAt) || math.Abs(then.Remaining-want) > w.slack(then) && !full {
		w.failf("%s, just before ResetAt\n%s, and at ResetAt, want %v,\n%s", what, balanceText(last), want, balanceText(then))
	}
}

// listed wants ratelimit.keys to say what the library says.
func (w *everything) listed(p *worldProgram, id worldKey, b ratelimit.Balance, what string) {
	if w.limits[id.limit].Config().Varies != "" {
		return
	}
	key := ""
	if stored := w.stored(id.key); stored != nil {
		key = *stored
	}
	var remaining float64
	var retryAt *time.Time
	err := w.pool.QueryRow(w.Context(), "SELECT remaining, CASE retry_at WHEN 'infinity' THEN '9999-12-31' ELSE retry_at END FROM ratelimit._keys($1, NULL, NULL, 'token bucket', NULL, NULL, NULL, NULL, $2, $3)",
		w.limits[id.limit].Name(), []string{key}, w.clock.At).Scan(&remaining, &retryAt)
	blocked := b.Decides == "block"
	if errors.Is(err, pgx.ErrNoRows) {
		if blocked && w.ownBlock(id) || !blocked && b.Remaining != b.Capacity {
			w.failf("%s, and ratelimit.keys has no such key", what)
		}
		return
	}
	w.must(err)
	if blocked && remaining > 0 || !blocked && math.Abs(remaining-b.Remaining) > w.slack(b) {
		w.failf("%s, and ratelimit.keys says that %v remain", what, remaining)
	}
	if b.Capacity > 0 && b.Capacity < 1 || w.holdsLess(id) {
		return
	}
	one := w.try(p, w.clock.At, "consume", 1, w.request(id.limit, id.key))
	if one.granted != (retryAt == nil) || retryAt != nil && !one.retryAt.IsZero() && !w.far(one.retryAt, id) && !w.resharded && !w.agrees(p, []worldKey{id}, worldAnswer{retryAt: *retryAt}, worldAnswer{retryAt: one.retryAt}) {
		w.failf("%s: one token %v; ratelimit.keys says %v", what, one, retryAt)
	}
	if one.permanent && retryAt.Year() < 9999 {
		w.failf("%s: one token %v; ratelimit.keys says %v", what, one, retryAt)
	}
}

// ownBlock reports whether a block of this one key decides about it.
func (w *everything) ownBlock(id worldKey) bool {
	o := w.inForce(id, w.clock.At)
	return o != nil && o.effect == "block" && o.key != nil
}

// holdsLess reports whether a capacity may be below one token before or after an override ends: then, what is listed is when it is full.
func (w *everything) holdsLess(id worldKey) bool {
	c := w.own(id.limit, id.key).Config()
	return slices.ContainsFunc(w.made, func(o *worldOverride) bool {
		return o.limit == id.limit && !o.removed && (*c.Capacity > 0 && *c.Capacity < 1 || o.capacity != nil && *o.capacity < 1 || o.rate != nil && *o.rate < 1)
	})
}

// worldLog is what was granted of a key by the definition, and given back.
type worldLog struct {
	limit  ratelimit.Limit
	grants []worldGrant
}

type worldGrant struct {
	at    time.Time
	reset time.Time // of a window: when the next one begins
	count float64   // below zero: given back
	owed  float64   // afterwards
	// window is the end of the window in which the work runs, of a fixed or calendar window that saves nothing up.
	window time.Time
}

// grants notes a grant. The log has no engine: it has sums.
func (w *everything) grants(id worldKey, t worldAnswer, before ratelimit.Balance, count float64) {
	if before.Decides != "definition" {
		delete(w.log, id)
		return
	}
	if w.log[id] == nil {
		w.log[id] = &worldLog{limit: w.own(id.limit, id.key)}
	}
	l := w.log[id]
	if t.taken > 0 {
		count = t.taken
	}
	after := w.balances(w.programs[0], id)[0]
	g := worldGrant{at: w.clock.At, reset: before.ResetAt, count: count, owed: max(0, -after.Remaining)}
	if c := l.limit.Config(); c.Kind != "token bucket" && *c.Capacity == *c.Rate && count <= *c.Capacity && c.Shards == 1 && !w.resharded && !w.clock.At.Before(w.latest) && len(w.pending(id)) == 0 {
		if g.window = before.ResetAt; t.runAt.After(w.clock.At) {
			g.window = w.balanceAt(w.programs[0], t.runAt, id).ResetAt
		}
	}
	l.grants = append(l.grants, g)
}

// window is that of the last grant.
func (w *everything) window(id worldKey) time.Time {
	if l := w.log[id]; l != nil {
		return l.grants[len(l.grants)-1].window
	}
	return time.Time{}
}

func (w *everything) gaveBack(id worldKey, count float64, window time.Time) {
	if l := w.log[id]; l != nil {
		l.grants = append(l.grants, worldGrant{at: w.clock.At, count: -count, window: window})
	}
}

// bounds wants no span and no window to have more than the definition allows.
func (w *everything) bounds() {
	for id, l := range w.log {
		c := l.limit.Config()
		inWindow := map[time.Time]float64{}
		for _, g := range l.grants {
			if inWindow[g.window] += g.count; !g.window.IsZero() && inWindow[g.window] > *c.Capacity+worldShards*harness.Tolerance(l.limit) {
				w.failf("%v: %v run in the window until %v, of %v", id, inWindow[g.window], g.window, l.limit)
			}
		}
		for i, first := range l.grants {
			sum := 0.0
			for _, last := range l.grants[i:] {
				sum += last.count
				if first.count <= 0 || last.count <= 0 {
					continue
				}
				var periods float64
				switch c.Kind {
				case "token bucket":
					periods = float64(last.at.Sub(first.at)) / float64(harness.Period(c))
				case "fixed window":
					periods = math.Round(float64(last.reset.Sub(first.reset)) / float64(harness.Period(c)))
				default:
					periods = calendarWindows(c, first.reset, last.reset)
				}
				if bound := *c.Capacity + periods**c.Rate + last.owed; sum > bound+worldShards*harness.Tolerance(l.limit)+1e-9*bound {
					w.failf("%v: %v granted from %v to %v, and %v are the most: %v\n%v", id, sum, first.at, last.at, bound, l.limit, l.grants)
				}
			}
		}
	}
}

// calendarWindows is how many windows lie between the ends of two.
func calendarWindows(c ratelimit.Config, from, to time.Time) float64 {
	zone, err := time.LoadLocation(c.Zone)
	if err != nil {
		panic(err)
	}
	from, to = from.In(zone), to.In(zone)
	months := float64(12*(to.Year()-from.Year()) + int(to.Month()-from.Month()))
	switch c.Period {
	case "1 day":
		return math.Round(to.Sub(from).Hours() / 24)
	case "1 week":
		return math.Round(to.Sub(from).Hours() / 24 / 7)
	case "1 quarter":
		return math.Round(months / 3)
	case "1 year":
		return math.Round(months / 12)
	}
	return months
}

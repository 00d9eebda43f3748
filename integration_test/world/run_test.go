package world_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/follow"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
	"github.com/txlimit/txlimit/ratelimit/usage"
)

// everything is a world in which everything happens. It plays scripts, and tries what the library says without the library's code.
type everything struct {
	testing.TB
	url      string
	pool     *pgxpool.Pool
	sqlDB    *sql.DB
	lossy    *lossyPool // nil: through a pooler
	hasClock bool       // the database's clock can be the world's
	home     string     // of the tool
	pairs    *worldPairs

	worldNumbers
	clock      *harness.Clock
	programs   []*worldProgram
	running    sync.WaitGroup
	made       []*worldOverride
	late       []*worldOverride // not committed
	lateTx     pgx.Tx
	receipts   []worldReceipt
	holds      []*worldHold
	slotsNow   map[int]int // by key: the slots by an override
	log        map[worldKey]*worldLog
	counted    []worldCount
	storedKeys map[int]string
	odd        map[worldKey]int       // the last step that did something else than take, charge and give back by the definition
	promised   map[worldKey]time.Time // until when a reservation waits
	features   map[worldKey]map[string]bool
	shards     int // added to those of the limits
	resharded  bool
	latest     time.Time // that the clock has shown
	step       int
}

// worldProgram is a process of the application.
type worldProgram struct {
	limits    *ratelimit.Limiter
	asks      *ratelimit.Limiter // for what is rolled back, and not to be counted
	polls     *polledPool
	recorder  *usage.Recorder
	coalescer *ratelimit.Coalescer
	memory    *worldMemory
	stop      context.CancelFunc
}

type worldKey struct{ limit, key int }

// worldOverride is what an operator has decided.
type worldOverride struct {
	id       int64
	limit    int
	key      *int // nil: all keys
	effect   string
	rate     *float64
	capacity *float64
	until    time.Time // zero: none
	removed  bool
	added    bool
	madeIn   int // the step
}

// worldReceipt is a grant that can be refunded.
type worldReceipt struct {
	of      worldKey
	receipt ratelimit.Receipt
	count   float64
	at      time.Time
	before  float64   // the balance before the grant
	reset   time.Time // of the balance
	step    int
	reserve bool
	window  time.Time // see worldGrant
}

// worldFailure is how a world fails.
type worldFailure struct{ text string }

func (w *everything) failf(format string, args ...any) {
	panic(worldFailure{fmt.Sprintf("step %d: ", w.step) + fmt.Sprintf(format, args...)})
}

func (w *everything) must(err error) {
	if err != nil {
		w.failf("%v", err)
	}
}

// play plays a script from the beginning, and returns what failed.
func (w *everything) play(script worldScript) (failed string) {
	w.worldNumbers = newWorldNumbers(script.Seed)
	w.clock, w.latest = &harness.Clock{At: w.start}, w.start
	w.made, w.late, w.receipts, w.counted, w.shards, w.resharded, w.step = nil, nil, nil, nil, 0, false, -1
	w.holds, w.slotsNow, w.storedKeys = nil, map[int]int{}, map[int]string{}
	w.log, w.odd, w.promised, w.features = map[worldKey]*worldLog{}, map[worldKey]int{}, map[worldKey]time.Time{}, map[worldKey]map[string]bool{}
	defer func() {
		if p := recover(); p != nil {
			f, ok := p.(worldFailure)
			if !ok {
				panic(p)
			}
			failed = f.text
		}
		w.end()
	}()
	_, err := w.pool.Exec(w.Context(), `TRUNCATE ratelimit.limits, ratelimit.definitions, ratelimit.overrides, ratelimit.usage, ratelimit.denials, ratelimit.holds, ratelimit.sweeps RESTART IDENTITY`)
	w.must(err)
	ctx := w.Context()
	w.programs = make([]*worldProgram, w.worldNumbers.programs)
	for i := range w.programs {
		w.restart(ctx, i)
	}
	if w.older != "" { // what counts is the newest
		var all []ratelimit.Limit
		for _, limit := range w.limits {
			all = append(all, withRate(limit, 5))
		}
		w.must(new(ratelimit.Limiter).Publish(ctx, w.pool, w.older, all...))
	}
	w.publish()
	for i, s := range script.Steps {
		w.step = i
		w.do(ctx, s)
	}
	w.step = len(script.Steps)
	for _, p := range w.programs {
		w.givesBack(p, true)
	}
	w.bounds()
	w.usage()
	w.pairs.met(w.features)
	return ""
}

// end ends what a script has begun.
func (w *everything) end() {
	if w.lateTx != nil {
		_ = w.lateTx.Rollback(context.WithoutCancel(w.Context()))
		w.lateTx = nil
	}
	for _, p := range w.programs {
		if p != nil {
			_ = p.coalescer.Close(w.Context()) // after faults, what is ahead may be lost
			_ = p.memory.Close(w.Context())
			p.stop()
		}
	}
	w.running.Wait()
	w.programs = nil
}

// restart starts a program anew. The first one follows overrides; the others read them whenever something has changed.
func (w *everything) restart(ctx context.Context, i int) {
	if p := w.programs[i]; p != nil {
		_ = p.coalescer.Close(w.Context()) // after faults, what is ahead may be lost
		_ = p.memory.Close(w.Context())
		w.must(p.recorder.Flush(ctx))
		p.stop()
	}
	ctx, stop := context.WithCancel(ctx)
	recorder := &usage.Recorder{DB: w.pool, Keep: 100 * 365 * 24 * time.Hour}
	p := &worldProgram{
		limits: &ratelimit.Limiter{Clock: w.clock.Now}, asks: &ratelimit.Limiter{Clock: w.clock.Now, Observer: w.forgets},
		polls: &polledPool{Pool: w.pool}, recorder: recorder, coalescer: &ratelimit.Coalescer{Pool: w.pool}, memory: w.newMemory(), stop: stop,
	}
	p.limits.Observer = func(ctx context.Context, d ratelimit.Decision) {
		recorder.Observe(ctx, d)
		w.forgets(ctx, d)
	}
	w.programs[i] = p
	follow.With(p.asks, follow.By(p.limits, follow.Settings{DB: p.polls, Every: 2 * time.Millisecond}))
	w.must(follow.Load(ctx, p.limits))
	if i == 0 {
		w.running.Go(func() { follow.Run(ctx, p.limits) })
	}
}

// limit is a limit as defined now.
func (w *everything) limit(i int) ratelimit.Limit { return w.sharded(w.limits[i]) }

func (w *everything) sharded(l ratelimit.Limit) ratelimit.Limit {
	if w.shards == 0 {
		return l
	}
	c := l.Config()
	c.Shards = 1 + (c.Shards-1+w.shards)%4
	l, err := c.Limit()
	w.must(err)
	return l
}

// own is the limit with the numbers of a key.
func (w *everything) own(i, k int) ratelimit.Limit {
	own, ok := w.worldNumbers.own[i][k]
	if !ok {
		return w.limit(i)
	}
	c := own.Config()
	options := []ratelimit.Option{ratelimit.Rate(*c.Rate)}
	if c.Kind == "calendar window" {
		options = append(options, ratelimit.Zone(c.Zone), ratelimit.Anchor(c.Anchor))
	}
	return w.limit(i).With(options...)
}

func (w *everything) request(i, k int) ratelimit.Request {
	if w.keys[k] == nil {
		return w.own(i, k).Global()
	}
	return w.own(i, k).Key(w.keys[k]...)
}

// stored is a key as people write it in SQL: one part as it is, several by ratelimit.key; NULL for a limit without keys.
func (w *everything) stored(k int) *string {
	parts := w.keys[k]
	if parts == nil {
		return nil
	}
	if w.storedKeys[k] == "" {
		var key string
		var again []string
		w.must(w.pool.QueryRow(w.Context(), "SELECT ratelimit.key(VARIADIC $1), ratelimit.key_parts(ratelimit.key(VARIADIC $1))", parts).Scan(&key, &again))
		if len(parts) == 1 && key != parts[0] || len(parts) > 1 && !slices.Equal(again, parts) {
			w.failf("the key of %q is %q, of %q", parts, key, again)
		}
		w.storedKeys[k] = key
	}
	return new(w.storedKeys[k])
}

// allLimits are the limits as defined now.
func (w *everything) allLimits() []ratelimit.Limit {
	all := []ratelimit.Limit{worldSlotsLimit}
	for i := range w.limits {
		all = append(all, w.limit(i))
	}
	return all
}

func (w *everything) publish() {
	w.must(new(ratelimit.Limiter).Publish(w.Context(), w.pool, "web", w.allLimits()...))
}

// rows are the rows of the limits, as far as anybody can see.
func (w *everything) rows() (text string) {
	w.must(w.pool.QueryRow(w.Context(), `SELECT coalesce(string_agg(concat_ws(' ', name, key, shard, shards, float8send(value), ts), E'\n' ORDER BY name, key, shard), '') FROM ratelimit.limits`).Scan(&text))
	return text
}

// meets notes that a feature has met a key.
func (w *everything) meets(k worldKey, features ...string) {
	if w.features[k] == nil {
		w.features[k] = map[string]bool{}
		c := w.limits[k.limit].Config()
		w.features[k][strings.ReplaceAll(c.Kind, " ", "-")] = true
		for feature, has := range map[string]bool{
			"sharded": c.Shards > 1, "varies": c.Varies != "", "own-numbers": w.own(k.limit, k.key) != w.limit(k.limit), "bounded-debt": c.MaxReserved != nil, "global": w.keys[k.key] == nil,
			"many-parts": len(w.keys[k.key]) > 1, "decimals": *c.Rate != math.Floor(*c.Rate) || *c.Capacity != math.Floor(*c.Capacity), "billion": *c.Rate >= 1e9,
			"other-version": w.older != "", "no-rate": *w.own(k.limit, k.key).Config().Rate == 0,
		} {
			if has {
				w.features[k][feature] = true
			}
		}
	}
	for _, feature := range features {
		w.features[k][feature] = true
	}
}

// meetsAll notes a feature of all keys of a limit; -1: of all limits.
func (w *everything) meetsAll(limit int, feature string) {
	for i := range w.limits {
		for k := range w.keys {
			if limit < 0 || i == limit {
				w.meets(worldKey{i, k}, feature)
			}
		}
	}
}

func (w *everything) do(ctx context.Context, s worldStep) {
	p, r := w.programs[s.Program], rand.New(rand.NewPCG(s.N, 0))
	ctx = shardpick.With(ctx, harness.RandomPick(r).Again())
	k := worldKey{s.Limit, s.Key}
	w.looks()
	for _, h := range w.expired(w.ids()...) { // any call may give it back
		delete(w.log, h.of)
		w.meets(h.of, "hold-expired")
	}
	switch s.Do {
	case "clock":
		w.bounds()
		w.flush()
		if s.For < 0 {
			w.meetsAll(-1, "clock-back")
			w.oddly(w.ids()...)
			w.log = map[worldKey]*worldLog{} // what is granted at an earlier instant was refilled later
		}
		w.clock.Advance(s.For)
		w.latest = harness.MaxTime(w.latest, w.clock.At)
		for _, p := range w.programs[1:] { // what they read now is as it was
			w.must(follow.Load(ctx, p.limits))
		}
		for k := range w.features {
			for _, o := range w.made {
				if o.limit == k.limit && (o.key == nil || *o.key == k.key) && !o.until.IsZero() && !o.removed && !o.until.After(w.clock.At) {
					w.meets(k, "override-ended")
				}
			}
		}
	case "override", "block", "unlimited", "late":
		w.override(s, r)
	case "commit":
		w.commitLate()
	case "restore", "unblock":
		w.restore(s, r)
	case "sweep":
		w.unchanged("a sweep", func() {
			before := w.countRows()
			deleted, err := p.limits.Sweep(ctx, w.pool, w.allLimits()...)
			w.must(err)
			if after := w.countRows(); before-after != int(deleted) {
				w.failf("a sweep says that it deleted %d rows: there were %d, and are %d", deleted, before, after)
			}
			w.looks()
			for _, h := range w.expired(w.ids()...) {
				o, b := w.inForce(h.of, w.clock.At, "block"), w.balances(p, h.of)[0]
				known := w.limits[h.of.limit].Config().Varies == "" && !noRate(b) && w.comesBack(h, w.clock.At) && (o == nil || o.effect != "unlimited")
				if known || h.inSlots == "held" {
					w.failf("a sweep left the expired hold %+v", *h)
				}
			}
		})
		w.meetsAll(-1, "sweep")
	case "publish":
		w.unchanged("publishing", w.publish)
		w.meetsAll(-1, "publish")
	case "restart":
		w.givesBack(p, true)
		w.unchanged("a restart", func() { w.restart(ctx, s.Program) })
		w.meetsAll(-1, "restart")
	case "reshard":
		w.reshard(ctx, r)
	case "add":
		w.add(s)
	case "move":
		w.move(p, s)
	case "pause", "resume", "reset":
		switch {
		case w.keys[s.Key] == nil: // refused where the limit has keys
		case s.Do == "pause":
			w.pause(p, s)
		case s.Do == "resume":
			w.resume(p, s)
		default:
			w.reset(p, s, r)
		}
	case "refund":
		w.refund(p, r)
	case "charge":
		w.charge(p, s)
	case "crowd":
		w.crowd(ctx, p, s, r)
	case "foresee":
		w.foresees(ctx, p, s, r)
	case "give back":
		w.givesBack(p, false)
	case "hold":
		w.hold(ctx, p, s, r)
	case "settle", "release":
		w.endHold(ctx, p, s, r)
	case "slots":
		w.changeSlots(s, r)
	case "give-up", "queue":
		if w.lossy == nil {
			break
		}
		if s.Do == "queue" {
			w.queue(p, s, r)
		} else {
			w.giveUp(p, s, r)
		}
	case "scramble":
		w.scramble(p, s)
	case "tool":
		w.asksTool(p, k)
	case "page":
		w.asksPage(p, k)
	case "usage":
		w.asksUsage(k)
	default:
		w.call(ctx, p, s)
	}
	w.says(w.programs[s.Program], k) // it may have been restarted
	w.slotsSay(w.programs[s.Program], s.Key)
}

func (w *everything) countRows() (n int) {
	w.must(w.pool.QueryRow(w.Context(), "SELECT count(*) FROM ratelimit.limits").Scan(&n))
	return n
}

// harness.RowsOf is how many rows a key has.
func (w *everything) rowsOf(id worldKey) (n int) {
	w.must(w.pool.QueryRow(w.Context(), "SELECT count(*) FROM ratelimit.limits WHERE name = $1 AND key = coalesce($2, '')", w.limits[id.limit].Name(), w.stored(id.key)).Scan(&n))
	return n
}

// goes is the way that a step can go: not every way has every verb, and SQL does not know a key's own numbers.
func (w *everything) goes(s worldStep) worldStep {
	varies := w.limits[s.Limit].Config().Varies != ""
	switch {
	case s.Do != "consume" && (s.Way == "batch" || s.Way == "middleware" || s.Way == "rpc"),
		s.Do == "wait" && (s.Way == "tx" || s.Way == "intx" || s.Way == "insqltx" || s.Way == "by hand"),
		s.Way == "each" && (s.Do != "consume" || s.Other >= 0),
		s.Way == "by hand" && (varies || s.Other >= 0):
		s.Way = "pool"
	}
	if s.Do == "wait" {
		s.Other = -1
	}
	return s
}

// call is a step that calls a verb which may be denied.
func (w *everything) call(ctx context.Context, p *worldProgram, s worldStep) {
	s = w.goes(s)
	ids := []worldKey{{s.Limit, s.Key}}
	if s.Other >= 0 {
		ids = append(ids, worldKey{s.Other, s.Key})
	}
	count := s.Count
	balances := w.balances(p, ids...)
	if slices.ContainsFunc(balances, w.uneven) {
		return // one row may grant it, and another deny it
	}
	if count == worldAll {
		if count = max(balances[0].Remaining, 0); math.IsInf(count, 1) || count < 1e-15 {
			count = 1
		}
	}
	if s.Do == "take" {
		count = max(1, math.Floor(count))
	}
	var requests []ratelimit.Request
	for _, id := range ids {
		requests = append(requests, w.request(id.limit, id.key))
	}
	before, dead := w.rows(), len(w.expired(ids...)) > 0
	what := fmt.Sprintf("%s of %v of %v by %s", s.Do, count, ids, s.Way)

	// First on a copy of the state.
	verb := s.Do
	if verb == "wait" {
		verb = "consume"
	}
	want := w.try(p, w.clock.At, verb, count, requests...)
	if rows := w.rows(); rows != before {
		w.failf("%s: a rollback changed the rows:\n%s\nto\n%s", what, before, rows)
	}
	if len(ids) == 1 && w.limits[s.Limit].Config().Varies == "" {
		hand := w.tryByHand(verb, ids[0], count)
		if !w.agrees(p, ids, hand, want) {
			w.failf("%s: SQL says %v (%v), the library %v", what, hand, hand.failed, want)
		}
	}
	if len(ids) > 1 && verb == "consume" {
		w.allByHand(ids, count, want, what)
	}
	if verb == "consume" {
		check := w.try(p, w.clock.At, "check", count, requests...)
		if same := w.agrees(p, ids, check, want); !same && !(w.resharded && check.agrees(want, w.clock.At, math.MaxInt64)) { // a denied Consume joins the rows, and Check does not
			w.failf("%s: Check says %v, Consume %v", what, check, want)
		}
	}

	soon := func(at time.Time) bool { return at.Before(w.clock.At.Add(2 * worldPatience)) }
	if s.Do == "wait" && !want.granted && !want.never && (!want.permanent && soon(want.retryAt) || slices.ContainsFunc(w.pending(ids...), soon)) {
		return // it would sleep, and the clock stands; what is denied for good, since less can be held soon, may be reserved
	}
	for _, id := range ids {
		w.meets(id, "do-"+s.Do, "way-"+strings.ReplaceAll(s.Way, " ", "-"))
		if s.Other >= 0 {
			w.meets(id, "several")
		}
		if s.Rollback {
			w.meets(id, "rollback")
		}
	}
	got, committed := w.way(ctx, p, s, count, requests...)
	if s.Way != "by hand" && got.failed == nil {
		w.counts(w.clock.At, ids, count, got, want)
	}
	if s.Way == "each" && want.never && got.permanent {
		got = want // no error, since it must not stop the others
	}
	switch {
	case got.failed != nil && s.Way == "canceled":
	case got.failed != nil:
		w.failf("%s: %v", what, got.failed)
	case s.Do == "wait" && got.granted != want.granted && !got.granted:
		w.failf("%s: %v, but there are the tokens", what, got)
	case s.Do != "wait" && !w.agrees(p, ids, got, want):
		w.failf("%s: %v, but on a copy %v", what, got, want)
	}
	after := w.balances(p, ids...)
	if !got.granted || !committed {
		rows := w.rows()
		merged := committed && (w.resharded || dead) // a call merges the rows of another number of shards, or gives back, and takes nothing
		for i := range ids {
			merged = merged && (balances[i].Remaining == after[i].Remaining || math.Abs(balances[i].Remaining-after[i].Remaining) <= w.slack(balances[i])) // both may be infinite
		}
		if rows != before && s.Do == "wait" && slices.ContainsFunc(ids, func(id worldKey) bool { return w.liesAhead(id.limit, w.stored(id.key), w.clock.At) }) {
			w.oddly(ids...)
			return // what it has taken and gives up in a pause repays debts alone: docs/refunds.md
		}
		if rows != before && !merged {
			w.failf("%s: %v, committed %t, and the rows changed:\n%s\nto\n%s", what, got, committed, before, rows)
		}
	} else {
		if match := shownTokens.FindStringSubmatch(got.shown); match != nil && len(ids) == 1 && after[0].Limit.Config().Shards == 1 {
			if shown, err := strconv.ParseFloat(match[1], 64); err != nil || shown != min(max(0, math.Floor(after[0].Remaining)), 999_999_999_999_999) {
				w.failf("%s: RateLimit: %s, and %v remain", what, got.shown, after[0].Remaining)
			}
		}
		for i, id := range ids {
			took, slack := balances[i].Remaining-after[i].Remaining, w.slack(balances[i])+w.slack(after[i])
			forfeits := s.Do == "reserve" && got.runAt.After(w.clock.At) // what is refilled or left until then
			if !math.IsInf(took, 0) && !math.IsNaN(took) && balances[i].Decides != "block" && (took < got.taken-slack || took > got.taken+slack && !forfeits) && w.adds(balances[i], id) {
				w.failf("%s: took %v of %v, and %v were there and %v are left", what, got.taken, id, balances[i].Remaining, after[i].Remaining)
			}
			if got.runAt.After(w.clock.At) {
				w.promised[id] = harness.MaxTime(w.promised[id], got.runAt)
			}
			w.grants(id, got, balances[i], count)
		}
		if got.receipt != "" && len(ids) == 1 {
			w.receipts = append(w.receipts, worldReceipt{ids[0], got.receipt, got.taken, w.clock.At, balances[0].Remaining, balances[0].ResetAt, w.step, got.runAt.After(w.clock.At), w.window(ids[0])})
		}
		if s.Do == "reserve" && len(ids) == 1 {
			w.runs(p, ids[0], got, what)
		}
	}
	if !want.granted {
		w.retries(p, ids, verb, count, want, what, requests...)
	}
}

// oddly notes that something else happens to keys than takes, charges and give-backs by the definition, at one clock.
func (w *everything) oddly(ids ...worldKey) {
	for _, id := range ids {
		w.odd[id] = w.step
		delete(w.log, id)
	}
}

// whole reports whether all of a call comes back to a balance, whatever else was taken, charged and given back since, in any order: in its
// window or, to a token bucket, at once, if no reservation waits.
func (w *everything) whole(b ratelimit.Balance, id worldKey, step int, at, reset time.Time) bool {
	same := at.Equal(w.clock.At)
	if b.Limit.Config().Kind != "token bucket" {
		same = reset.Equal(b.ResetAt)
	}
	return same && b.Decides == "definition" && w.odd[id] <= step && !w.promised[id].After(w.clock.At) && !w.clock.At.Before(w.latest) && !w.liesAhead(id.limit, w.stored(id.key), w.clock.At)
}

// adds reports whether what is taken and given back adds up beside expired holds: what comes back of these is less while a reservation
// waits, and fits below the capacity. Another shard than theirs does not wait for them.
func (w *everything) adds(b ratelimit.Balance, id worldKey) bool {
	return len(w.expired(id)) == 0 || b.Limit.Config().Shards == 1 && !w.promised[id].After(w.clock.At) && b.Remaining < b.Capacity-w.slack(b)
}

// liesAhead reports whether a row of a key is later than an instant: the key is paused then, however shortly, or the clock has stepped back.
func (w *everything) liesAhead(limit int, key *string, at time.Time) (ahead bool) {
	w.must(w.pool.QueryRow(w.Context(), "SELECT coalesce(max(ts) > $3, false) FROM ratelimit.limits WHERE name = $1 AND key = coalesce($2, '')", w.limits[limit].Name(), key, at).Scan(&ahead))
	return ahead
}

// worldCallers is how many calls come at once.
const worldCallers = 12

// crowd makes calls at once in a Coalescer. What is there is granted, and no more. Half of them may be by a clock that is ahead.
func (w *everything) crowd(ctx context.Context, p *worldProgram, s worldStep, r *rand.Rand) {
	id := worldKey{s.Limit, s.Key}
	count := s.Count
	if count <= 0 {
		count = 1
	}
	before := w.balances(p, id)[0]
	if before.Decides != "block" && before.Capacity >= 2*worldCallers && before.Capacity < 1e15 && r.IntN(3) > 0 { // enough for some of them
		if count = max(1, math.Floor(before.Capacity/(2*worldCallers))); before.Remaining > 5*count {
			w.charge(p, worldStep{Limit: s.Limit, Key: s.Key, Count: before.Remaining - math.Floor(2+4*r.Float64())*count})
			before = w.balances(p, id)[0]
		}
	}
	if w.uneven(before) {
		return // one row may grant what another denies
	}
	ahead := max(0, s.For)
	callers := []*ratelimit.Limiter{p.limits}
	if ahead > 0 {
		callers = append(callers, &ratelimit.Limiter{Clock: func() time.Time { return w.clock.Now().Add(ahead) }, Observer: p.recorder.Observe})
		follow.With(callers[1], p.limits)
		w.meets(id, "clocks-differ")
	}
	now, then := w.clock.At, w.clock.At.Add(ahead)
	changes := slices.ContainsFunc(w.pending(id), func(end time.Time) bool { return !end.After(then) }) // other numbers may show what was refilled before
	want := w.try(p, now, "consume", count, w.request(id.limit, id.key))
	late := w.try(p, then, "consume", count, w.request(id.limit, id.key))
	var mu sync.Mutex
	answers := make([][]worldAnswer, len(callers))
	var wg sync.WaitGroup
	for i := range worldCallers {
		of := i % len(callers)
		wg.Go(func() {
			t := answerOf(callers[of].Consume(ctx, p.coalescer, w.request(id.limit, id.key).Count(count)))
			mu.Lock()
			defer mu.Unlock()
			answers[of] = append(answers[of], t)
		})
	}
	wg.Wait()
	w.meets(id, "do-crowd", "way-coalescer")
	granted := 0
	for i, of := range answers {
		at := []time.Time{now, then}[i]
		for _, t := range of {
			w.counts(at, []worldKey{id}, count, t, t)
			switch {
			case t.failed != nil:
				w.failf("a crowd: %v", t.failed)
			case t.granted:
				granted++
			case !t.never && !t.permanent && !t.retryAt.After(at):
				w.failf("a crowd: denied at %v until %v", at, t.retryAt)
			}
		}
	}
	if ahead > 0 {
		w.oddly(id)
		delete(w.log, id) // of those by an earlier clock, nobody knows whether they were before or after the others
		w.flush()
		w.clock.At, w.latest = then, harness.MaxTime(w.latest, then)
	} else {
		for _, t := range answers[0] {
			if t.granted {
				w.grants(id, t, before, count)
			}
		}
	}
	after := w.balances(p, id)[0]
	what := fmt.Sprintf("a crowd of %d for %v each of %v, half of it %v ahead: %d granted, of %v %v are left", worldCallers, count, id, ahead, granted, before.Remaining, after.Remaining)
	if (want.granted || late.granted) != (granted > 0) {
		w.failf("%s; one call: %v, and ahead %v", what, want, late)
	}
	if math.IsInf(before.Capacity, 1) || before.Decides == "block" || math.IsInf(after.Capacity, 1) || after.Decides == "block" {
		return
	}
	if ahead == 0 && w.adds(before, id) && math.Abs(before.Remaining-after.Remaining-float64(granted)*count) > w.slack(before)+worldCallers*1e-9*count {
		w.failf("%s", what)
	}
	last := answers[len(answers)-1] // one of them was denied when there was no more than now
	if denied := slices.ContainsFunc(last, func(t worldAnswer) bool { return !t.granted && !t.never }); denied && !changes {
		if next := w.try(p, then, "consume", count, w.request(id.limit, id.key)); next.granted {
			w.failf("%s, and one more is granted", what)
		}
	}
}

func (w *everything) charge(p *worldProgram, s worldStep) {
	id := worldKey{s.Limit, s.Key}
	w.meets(id, "do-charge")
	before := w.balances(p, id)[0]
	result, err := p.limits.Charge(w.Context(), w.pool, w.request(id.limit, id.key).Count(s.Count))
	if err != nil {
		w.failf("charge: %v", err)
	}
	w.counted = append(w.counted, worldCount{of: id, at: w.clock.At, tokens: result.Requests[0].Taken})
	if noRate(before) || !w.adds(before, id) {
		return
	}
	if after := w.balances(p, id)[0]; !math.IsInf(before.Remaining, 1) && before.Decides != "block" && math.Abs(before.Remaining-s.Count-after.Remaining) > w.slack(before)+1e-9*s.Count {
		w.failf("a charge of %v of %v: %v were there, and %v are left", s.Count, id, before.Remaining, after.Remaining)
	}
}

// refund refunds one of the latest grants, or a part of it.
func (w *everything) refund(p *worldProgram, r *rand.Rand) {
	if len(w.receipts) == 0 {
		return
	}
	n := len(w.receipts) - 1 - r.IntN(min(len(w.receipts), 3))
	from := w.receipts[n]
	count := from.count * harness.OneOf(r, 1, 1, 0.5)
	if count < 1e-15 {
		return
	}
	w.receipts = slices.Delete(w.receipts, n, n+1)
	id := from.of
	w.meets(id, "do-refund")
	before, rows := w.balances(p, id)[0], w.rows()
	result, err := p.limits.Refund(w.Context(), w.pool, from.receipt, w.request(id.limit, id.key).Count(count))
	w.must(err)
	after, back := w.balances(p, id)[0], result.Requests[0].Refunded
	w.counted = append(w.counted, worldCount{of: id, at: w.clock.At, refunded: back})
	what := fmt.Sprintf("a refund of %v of %v to %v: %v came back, %v were there and are %v", count, from.count, id, back, before.Remaining, after.Remaining)
	slack := w.slack(before) + 1e-9*count
	switch {
	case back < 0, back > count+slack:
		w.failf("%s", what)
	case back == 0 && w.rows() != rows && before.Decides == "definition" && math.Abs(after.Remaining-before.Remaining) > slack:
		w.failf("%s, and the rows changed", what)
	case math.IsInf(before.Remaining, 1), before.Decides == "block", !w.adds(before, id):
	case math.Abs(before.Remaining+back-after.Remaining) > slack:
		w.failf("%s", what)
	case after.Remaining > max(after.Capacity, before.Remaining)+slack:
		w.failf("%s: above the capacity %v", what, after.Capacity)
	case !from.reserve && from.before <= before.Capacity && w.whole(before, id, from.step, from.at, from.reset) && math.Abs(back-count) > slack:
		w.failf("%s, and nobody waits", what)
	}
	w.gaveBack(id, back, from.window)
}

func (w *everything) reset(p *worldProgram, s worldStep, r *rand.Rand) {
	id := worldKey{s.Limit, s.Key}
	w.meets(id, "do-reset")
	switch {
	case s.Way == "tool":
		w.steered(id, s.Way)
		had := w.rowsOf(id)
		var reset struct{ Deleted int }
		w.tool(w.url, &reset, append([]string{"reset", "--json", "--yes"}, w.named(id.limit, &id.key)...)...)
		if had != reset.Deleted {
			w.failf("txlimit reset of %v says that it deleted %d of %d rows", id, reset.Deleted, had)
		}
	case s.Way == "page" && w.stored(id.key) != nil:
		w.steered(id, s.Way)
		w.post(id.limit, w.stored(id.key), url.Values{"action": {"reset"}})
	case r.IntN(2) == 0:
		w.must(p.limits.Reset(w.Context(), w.pool, w.request(id.limit, id.key)))
	default:
		var deleted int
		had := w.rowsOf(id)
		w.must(w.pool.QueryRow(w.Context(), "SELECT ratelimit.reset($1, $2, global => $3, who => 'ann')", w.limits[id.limit].Name(), w.stored(id.key), w.stored(id.key) == nil).Scan(&deleted))
		if had != deleted {
			w.failf("a reset of %v says that it deleted %d of %d rows", id, deleted, had)
		}
	}
	w.oddly(id)
	for _, h := range w.holds {
		if h.of == id {
			h.reset = true
		}
	}
	if b := w.balances(p, id)[0]; b.Decides != "block" && b.Remaining != b.Capacity {
		w.failf("%v was reset: %v of %v", id, b.Remaining, b.Capacity)
	}
}

// pause empties a limit and stops its refill: it never raises a balance, and never ends another pause sooner.
func (w *everything) pause(p *worldProgram, s worldStep) {
	id := worldKey{s.Limit, s.Key}
	before, rows := w.balances(p, id)[0], w.rows()
	lasts, most := min(s.For, 31*24*time.Hour), max(min(s.Count, 1e15), 0)
	if lasts > 0 {
		lasts = max(lasts, time.Millisecond)
	}
	until := w.clock.At.Add(lasts)
	request, bucket := w.request(id.limit, id.key).Count(most), w.own(id.limit, id.key).Config().Kind == "token bucket"
	came, err := p.limits.Pause(w.Context(), w.pool, lasts, request)
	switch {
	case !bucket && errors.Is(err, ratelimit.ErrInvalid) && w.rows() == rows:
		return
	case !bucket || err != nil:
		w.failf("pause of %v, a %s: %v", id, w.own(id.limit, id.key).Config().Kind, err)
	}
	w.meets(id, "do-pause")
	if s.For <= 0 {
		if !came.IsZero() || w.rows() != rows {
			w.failf("a pause of %v of %v is until %v", s.For, id, came)
		}
		return
	}
	w.oddly(id) // it only has less
	after := w.balances(p, id)[0]
	if math.IsInf(before.Capacity, 1) || noRate(before) {
		return
	}
	want := before.PausedUntil
	if until.After(want) {
		want = until
	}
	if !want.After(w.clock.At.Add(time.Second)) {
		want = time.Time{}
	}
	if after.Remaining > before.Remaining+1e-9*before.Capacity || after.Remaining > most+1e-9*before.Capacity && after.Decides != "block" || !after.PausedUntil.Equal(want) {
		w.failf("%v was paused until %v with %v: before %+v, after %+v", id, until, most, before, after)
	}
}

// resume ends a pause: nothing of the balance changes, and nothing is refilled for the time before.
func (w *everything) resume(p *worldProgram, s worldStep) {
	id := worldKey{s.Limit, s.Key}
	before, rows := w.balances(p, id)[0], w.rows()
	bucket := w.own(id.limit, id.key).Config().Kind == "token bucket"
	err := p.limits.Resume(w.Context(), w.pool, w.request(id.limit, id.key))
	switch {
	case !bucket && errors.Is(err, ratelimit.ErrInvalid) && w.rows() == rows:
		return
	case !bucket || err != nil:
		w.failf("resume of %v, a %s: %v", id, w.own(id.limit, id.key).Config().Kind, err)
	}
	w.meets(id, "do-resume")
	w.oddly(id)
	if after := w.balances(p, id)[0]; after.Remaining != before.Remaining && len(w.expired(id)) == 0 || !after.PausedUntil.IsZero() {
		w.failf("%v goes on: before %+v, after %+v", id, before, after)
	}
}

// move moves what is used of a limit to another one.
func (w *everything) move(p *worldProgram, s worldStep) {
	from, to := worldKey{s.Limit, s.Key}, worldKey{s.Other, s.Key}
	before, rows := w.balances(p, from, to), w.rows()
	err := p.limits.Move(w.Context(), w.pool, w.request(from.limit, from.key), w.request(to.limit, to.key))
	after := w.balances(p, from, to)
	a, b := w.own(from.limit, from.key).Config(), w.own(to.limit, to.key).Config()
	buckets := a.Kind == "token bucket" && b.Kind == "token bucket"
	alike := a.Kind == b.Kind && a.Period == b.Period && a.Zone == b.Zone && a.Anchor == b.Anchor
	switch {
	case errors.Is(err, ratelimit.ErrInvalid):
		if buckets || alike && a.Kind == "calendar window" || w.rows() != rows {
			w.failf("move from %v to %v: %v", from, to, err)
		}
		return
	case err != nil:
		w.failf("move from %v to %v: %v", from, to, err)
	case !buckets && !alike:
		w.failf("move from %v to %v, which refill at other instants", from, to)
	}
	w.meets(from, "do-move")
	w.meets(to, "do-move")
	w.oddly(to) // it only has less, but receipts of before count for more
	w.promised[to] = harness.MaxTime(w.promised[to], w.promised[from])
	if len(w.expired(from, to)) > 0 {
		return
	}
	for _, b := range before {
		if b.Decides == "block" || math.IsInf(b.Capacity, 1) || noRate(b) {
			return
		}
	}
	floor := 0.0
	if b.MaxReserved != nil {
		floor = -*b.MaxReserved
	}
	if before[1].Decides == "definition" { // an override may change what can be owed
		if want := min(before[1].Remaining, max(floor, before[1].Capacity-before[0].Used)); math.Abs(after[1].Remaining-want) > w.slack(before[0])+w.slack(before[1]) {
			w.failf("move from %+v to %+v: %v are left, want %v", before[0], before[1], after[1].Remaining, want)
		}
	}
	if after[1].Remaining > before[1].Remaining+w.slack(before[1]) || math.Abs(after[0].Remaining-before[0].Remaining) > w.slack(before[0]) {
		w.failf("move from %+v to %+v: %v and %v are left", before[0], before[1], after[0].Remaining, after[1].Remaining)
	}
}

// reshard changes the number of shards of all limits, in all programs.
func (w *everything) reshard(ctx context.Context, r *rand.Rand) {
	for _, p := range w.programs {
		w.givesBack(p, true)
	}
	ids := w.ids()
	before := w.balances(w.programs[0], ids...)
	w.shards, w.resharded = (w.shards+1+r.IntN(3))%4, true
	for i := range w.programs {
		w.restart(ctx, i)
	}
	w.publish()
	w.meetsAll(-1, "reshard")
	w.oddly(ids...)
	for i, b := range w.balances(w.programs[0], ids...) {
		if b.Remaining > before[i].Remaining+w.slack(b) {
			w.failf("other shards: %+v had %v", b, before[i].Remaining)
		}
	}
}

// add adds the tokens of the newest override, and its report is what it has added.
func (w *everything) add(s worldStep) {
	for _, o := range slices.Backward(w.made) {
		if o.limit != s.Limit || o.effect != "numbers" || o.removed {
			continue
		}
		key := ""
		if o.key != nil {
			key = *w.stored(*o.key)
		}
		sum := func() (sum float64) {
			w.must(w.pool.QueryRow(w.Context(), "SELECT coalesce(sum(value), 0) FROM ratelimit.limits WHERE name = $1 AND key = $2", w.limits[o.limit].Name(), key).Scan(&sum))
			return sum
		}
		var capacity *float64 // the program's, which it alone knows
		if c := w.limits[o.limit].Config(); c.Varies != "" {
			capacity = c.Capacity
		}
		var added float64
		before := sum()
		var err error
		if w.hasClock {
			w.session(func(conn *pgx.Conn) {
				err = conn.QueryRow(w.Context(), "SELECT ratelimit.add($1, $2)", o.id, capacity).Scan(&added)
			})
		} else {
			err = w.pool.QueryRow(w.Context(), "SELECT ratelimit.add($1, $2)", o.id, capacity).Scan(&added)
		}
		if o.added {
			before -= added // it was added before
		}
		after := sum()
		switch {
		case harness.SQLState(err) == "22023": // the capacity before is not known, or it is added to
			added, before = 0, after
		case harness.SQLState(err) == "55000" && w.liesAhead(o.limit, &key, w.clock.At):
			added, before = 0, after
		case err != nil:
			w.failf("ratelimit.add: %v", err)
		default:
			o.added = true
			w.meetsAll(o.limit, "add")
		}
		if added < 0 || math.Abs(after-before-added) > 1e-9*(math.Abs(after)+math.Abs(before)+added) {
			w.failf("ratelimit.add(%d) says that it added %v: there were %v, and are %v", o.id, added, before, after)
		}
		w.changed(o.limit)
		return
	}
}

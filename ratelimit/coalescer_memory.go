package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/aheadclock"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/handles"
	"github.com/txlimit/txlimit/internal/inschema"
)

// The side of a Coalescer with Ahead that has clocks, locks and statements. What it knows of a key is a forecast.

const (
	minAhead, longestAhead = time.Millisecond, time.Second
	// maxForecasts bounds the keys of a Coalescer that have a forecast. The calls for others are asked as without Ahead.
	maxForecasts = 10_000
	// leastSweep is the least time between two looks for what is not used.
	leastSweep = 5 * time.Millisecond
)

// memory has the forecasts of a Coalescer. Its parts have locks of their own, so that no call waits for all keys.
type memory struct {
	parts      [64]part
	forecasts  atomic.Int64
	unreported atomic.Int64 // calls that were decided in memory, and that OnBatch was not told of
	closed     atomic.Bool
	closing    sync.Once
	known      sync.Once // it is in remembering
	sweeping   atomic.Bool
	lost       error // why Close could not give something back; read after it
	returning  atomic.Pointer[returning]
	clock      func() time.Time // of a test: see package aheadclock
	latest     func() time.Time // of a test: what clock has shown, which it may be behind
}

// now is the time of this process.
func (m *memory) now() localTime {
	if m.clock != nil {
		return localTime{time.Duration(m.latest().UnixNano()), time.Duration(m.clock().UnixNano())}
	}
	return localNow()
}

// present is the instant of a test's clock; NULL: that of the database counts.
func (m *memory) present() (now pgtype.Timestamptz) {
	if m.clock != nil {
		now = pgtype.Timestamptz{Time: m.clock(), Valid: true}
	}
	return now
}

// Tests say by package aheadclock what time it is.
func init() {
	aheadclock.Set = func(coalescer any, now, latest func() time.Time) {
		m := &coalescer.(*Coalescer).memory
		m.clock, m.latest = now, latest
	}
	aheadclock.Sweep = func(coalescer any) { coalescer.(*Coalescer).sweep(false) }
	aheadclock.Refill = func(coalescer any) { c := coalescer.(*Coalescer); c.refill(c.Ahead / 4) }
}

type part struct {
	mu    sync.Mutex
	byKey map[limitKey]*forecast
}

// returning is what is on its way back. void waits for it.
type returning struct {
	mu   sync.Mutex
	keys map[limitKey]struct{}
	done chan struct{}
}

func (m *memory) part(id limitKey) *part {
	return &m.parts[maphash.Comparable(hashSeed, id)%uint64(len(m.parts))]
}

// of is the forecast of a demand, with the part's lock. It is nil if there are too many.
func (m *memory) of(p *part, d *demand, schema string) *forecast {
	id := d.id()
	if f := p.byKey[id]; f != nil && inschema.Same(f.schema, schema) {
		return f
	} else if f != nil || m.forecasts.Load() >= maxForecasts {
		return nil
	}
	if p.byKey == nil {
		p.byKey = map[limitKey]*forecast{}
	}
	f := &forecast{schema: schema, limit: d.limit}
	p.byKey[id] = f
	m.forecasts.Add(1)
	return f
}

// checkAhead checks the field Ahead, and that it stands alone.
func (c *Coalescer) checkAhead() error {
	if c.Ahead < minAhead || c.Ahead > longestAhead {
		return fmt.Errorf("%w: Coalescer.Ahead is %v, and not 0 or between %v and %v (a bare number in Go is nanoseconds)", ErrInvalid, c.Ahead, minAhead, longestAhead)
	}
	if c.AsyncCommit {
		return fmt.Errorf("%w: Coalescer.Ahead with AsyncCommit: after a crash of the server, tokens would come back that it has forgotten it took", ErrInvalid)
	}
	return nil
}

// foreseeable reports whether memory may decide the call: a Consume of whole tokens, by the clock of the database.
func (m *memory) foreseeable(c *call) bool {
	return c.verb == verbConsume && c.now.Valid == (m.clock != nil) && !c.goesAlone() && !anyOf(c.demands, func(d *demand) bool {
		return d.count < 1 || d.count != math.Trunc(d.count) || d.limit.maxReserved > 0 && !math.IsInf(d.limit.maxReserved, 1)
	})
}

var recalled = sync.Pool{New: func() any { return &answer{} }}

// recall decides a call in memory, if that has enough of each demand, or a denial. Otherwise it returns nil, and whether a statement for
// the call should take more.
func (c *Coalescer) recall(asked *call, result *Result) (decided, wants bool) {
	m, now := &c.memory, c.memory.now()
	if m.closed.Load() {
		return false, false
	}
	a, denial := recalled.Get().(*answer), (*answer)(nil)
	*a = answer{granted: true, at: algebra.Forever}
	defer recalled.Put(a)
	takenAt, hopeless := algebra.Forever, false // hopeless: memory will not have enough of one of several limits
	if len(asked.demands) > 1 {
		a.rows = make([][]algebra.Row, len(asked.demands))
	}
	lots, held := make([]*lot, 0, 4), make([]float64, 0, 4)
	for i := range asked.demands {
		d := &asked.demands[i]
		p := m.part(d.id())
		p.mu.Lock()
		var l *lot
		if f := m.of(p, d, asked.schema); f != nil {
			f.ask(&d.limit, d.count, now, c.Ahead)
			denial = cmp.Or(denial, f.denies(asked.demands, now, c.Ahead))
			if a.granted && denial == nil {
				var at algebra.Micros
				if l, at = f.take(d.count, now, c.Ahead); l != nil {
					a.at, takenAt = min(a.at, at), min(takenAt, l.at)
					lots, held = append(lots, l), append(held, l.row.Value)
					if len(asked.demands) == 1 {
						a.setRow(f.shown())
					} else {
						a.rows[i] = []algebra.Row{f.shown()}
					}
				}
			}
			wants = wants || l == nil && f.wants(now, c.Ahead, 0) >= 1
			hopeless = hopeless || l == nil && len(f.lots) == 0 && f.row.Value < plenty
		} else {
			hopeless = true
		}
		p.mu.Unlock()
		a.granted = a.granted && l != nil
	}
	if !a.granted {
		hopeless = hopeless && len(asked.demands) > 1
		wants = wants && !hopeless
		for i := range asked.demands { // all or nothing
			d := &asked.demands[i]
			p := m.part(d.id())
			p.mu.Lock()
			if i < len(lots) {
				lots[i].take(-d.count)
			}
			if f := p.byKey[d.id()]; f != nil && hopeless { // so nothing is taken of the others for such calls
				f.asked.add(d.count, -1)
			}
			p.mu.Unlock()
		}
		if a = denial; a == nil || asked.unsure(a) {
			c.sweepLater()
			return false, wants
		}
	}
	asked.fillRows(result, a)
	result.ahead = true
	for i := range asked.demands {
		for _, request := range asked.demands[i].requests {
			if a.granted { // a receipt is as if the call had been in the statement that took its tokens
				result.takenAt, result.Requests[request].took.held = takenAt, held[i]
			}
		}
	}
	if m.unreported.Add(1); m.closed.Load() { // no other statement will report it
		c.reportBatch(0, nil)
	}
	return true, false
}

// learn notes what a statement has decided about a call.
func (c *Coalescer) learn(asked *call, a *answer, sent localTime) {
	now, short := c.memory.now(), 0
	enough := func(i int) bool {
		d := &asked.demands[i]
		return a.granted || d.numbers.Enough(a.rows[i], d.count, d.floor, a.at)
	}
	for i := range asked.demands {
		if !enough(i) {
			short++
		}
	}
	for i := range asked.demands {
		d := &asked.demands[i]
		p := c.memory.part(d.id())
		p.mu.Lock()
		if f := p.byKey[d.id()]; f != nil && f.limit == d.limit && sent.mono > f.voided {
			left := algebra.Row{Value: d.numbers.Total(a.rows[i], a.at), TS: a.at}
			for _, row := range a.rows[i] {
				left.TS = max(left.TS, row.TS)
			}
			f.learn(left, enough(i), sent, now, c.Ahead)
			if short == 1 && !enough(i) {
				f.deny(asked.demands, a, i, sent)
			}
		}
		p.mu.Unlock()
	}
}

// extra is what a statement is asked to take ahead.
type extra struct {
	f     *forecast
	id    limitKey
	epoch int
}

// extra is what the key's statement should take ahead, if anything, with the part's lock.
func (c *Coalescer) extra(f *forecast, id limitKey, now localTime, early time.Duration) (e extra, d demand, wanted bool) {
	n := f.wants(now, c.Ahead, early)
	if n < 1 {
		return e, d, false
	}
	f.asking = true
	return extra{f, id, f.epoch}, demand{limit: f.limit, key: id.key, count: n, floor: floorAhead(n)}, true
}

// askAhead adds to a batch, after its calls, what is to be taken ahead of its keys. Nobody waits for these.
func (c *Coalescer) askAhead(b *batch) (extras []extra) {
	if c.Ahead == 0 {
		return nil
	}
	if b.flight.sent = c.memory.now(); b.apart || b.waiters[0].clock.Valid != (c.memory.clock != nil) {
		return nil
	}
	for _, w := range b.waiters {
		for i := range w.ds {
			d := &w.ds[i]
			p := c.memory.part(d.id())
			p.mu.Lock()
			if f := p.byKey[d.id()]; f != nil && f.schema == c.schema && f.limit == d.limit {
				if e, ahead, wanted := c.extra(f, d.id(), b.flight.sent, 0); wanted {
					ahead.numbers = d.numbers
					extras = append(extras, e)
					b.waiters = append(b.waiters, &waiter{ds: []demand{ahead}, left: true})
				}
			}
			p.mu.Unlock()
		}
	}
	return extras
}

// takeAhead takes out of a batch that was decided what askAhead has added to it.
func (c *Coalescer) takeAhead(b *batch, extras []extra, err error) {
	calls := len(b.waiters) - len(extras)
	for i, e := range extras {
		w := b.waiters[calls+i]
		c.land(e, &w.ds[0], &w.answer, b.flight.sent, err)
	}
	clear(b.waiters[calls:])
	b.waiters = b.waiters[:calls]
}

// land notes what a statement has taken ahead. What was committed is there for calls to come.
func (c *Coalescer) land(e extra, d *demand, a *answer, sent localTime, err error) {
	p := c.memory.part(e.id)
	p.mu.Lock()
	defer p.mu.Unlock()
	f, now := e.f, c.memory.now()
	if e.epoch == f.epoch { // else everything is void
		f.asking = false
	}
	if err != nil { // perhaps because of what it was to take ahead
		f.quiet = max(f.quiet, now.mono+c.Ahead)
	} else if a.granted && e.epoch == f.epoch && !c.memory.closed.Load() {
		l := lot{sent: sent, at: a.at, ends: algebra.Forever, row: a.rows[0][0], left: d.count}
		l.row.Value += d.count
		if d.numbers.Window {
			l.ends = d.numbers.NextWindow(a.at)
		}
		if l.ends != algebra.Max { // else its end is not known
			f.learn(a.rows[0][0], true, l.sent, now, c.Ahead)
			f.land(l, e.epoch)
		}
	}
}

// refill has more taken of keys of which what is there does not last until the next look, so that no call has to wait.
func (c *Coalescer) refill(early time.Duration) {
	c.mu.Lock()
	schema := c.schema
	c.mu.Unlock()
	var extras []extra
	var ds []demand
	now := c.memory.now()
	for i := range c.memory.parts {
		p := &c.memory.parts[i]
		p.mu.Lock()
		for id, f := range p.byKey {
			if f.schema != schema {
				continue
			}
			if e, d, wanted := c.extra(f, id, now, early); wanted {
				extras, ds = append(extras, e), append(ds, d)
			}
		}
		p.mu.Unlock()
	}
	clock := c.memory.present()
	setNumbers(verbs[verbConsume], ds, clock, false)
	var landing sync.WaitGroup // each by itself: places wait for it
	for i := range ds {
		c.mu.Lock()
		w := c.schedule.arrive(ds[i:i+1:i+1], clock, true, c.now(), c.Pace)
		w.ahead = true
		c.startAndUnlock()
		landing.Go(func() { c.refilled(w, extras[i]) })
	}
	landing.Wait()
}

// refilled waits for what is taken ahead of a key.
func (c *Coalescer) refilled(w *waiter, e extra) {
	<-w.done
	err, sent := w.err, localTime{}
	if w.direct { // after an error that it may be due to
		err = context.Canceled
		c.mu.Lock()
		c.schedule.landedAlone(w.ds, w.apart, true, err)
		c.startAndUnlock()
	}
	flight := w.flight
	if flight != nil {
		sent = flight.sent
	}
	c.land(e, &w.ds[0], &w.answer, sent, err)
	*w = waiter{done: w.done}
	waiters.Put(w)
	if flight != nil {
		flight.told.Done()
	}
}

// sweepLater looks for what is not used, some time later.
func (c *Coalescer) sweepLater() {
	if !c.memory.closed.Load() && !c.memory.sweeping.Swap(true) {
		if c.memory.known.Do(func() { remember(c) }); c.memory.clock != nil {
			return
		}
		every := max(c.Ahead/4, leastSweep)
		time.AfterFunc(every, func() {
			c.mu.Lock()
			if c.closed {
				c.mu.Unlock()
				return
			}
			c.calls.Add(1)
			c.mu.Unlock()
			defer c.calls.Done()
			c.calls.Go(func() { c.refill(every) })
			c.sweep(false)
			c.memory.sweeping.Store(false)
			if c.memory.forecasts.Load() > 0 {
				c.sweepLater()
			}
		})
	}
}

// unused is a lot of which something may come back.
type unused struct {
	id    limitKey
	limit Limit
	lot   lot
}

// sweep forgets what is of no use any more, and gives back what was not used: with all, also what could be.
func (c *Coalescer) sweep(all bool) {
	m, now := &c.memory, c.memory.now()
	r := &returning{keys: map[limitKey]struct{}{}, done: make(chan struct{})}
	m.returning.Store(r) // before anything is taken out
	defer close(r.done)
	var back []unused
	for i := range m.parts {
		p := &m.parts[i]
		p.mu.Lock()
		for id, f := range p.byKey {
			for _, l := range f.unused(now, c.Ahead, all) {
				back = append(back, unused{id, f.limit, l})
				r.mu.Lock()
				r.keys[id] = struct{}{}
				r.mu.Unlock()
			}
			if f.idle(now, c.Ahead) {
				delete(p.byKey, id)
				m.forecasts.Add(-1)
			}
		}
		p.mu.Unlock()
	}
	slices.SortFunc(back, func(x, y unused) int { // in the order of the locks
		return cmp.Or(strings.Compare(x.id.name, y.id.name), strings.Compare(x.id.key, y.id.key))
	})
	for len(back) > 0 { // together, as of the latest instant, if that is in the windows of all; of a key, one at a time
		at := slices.MaxFunc(back, func(x, y unused) int { return cmp.Compare(x.lot.at, y.lot.at) }).lot.at
		var together, others []unused
		for _, u := range back {
			if last := len(together) - 1; at < u.lot.ends && (last < 0 || together[last].id != u.id) && last+1 < maxBatch {
				together = append(together, u)
			} else {
				others = append(others, u)
			}
		}
		c.giveBack(together, at)
		back = others
	}
}

// giveBack gives back what lots have left, once: without an answer, it is lost.
func (c *Coalescer) giveBack(lots []unused, at algebra.Micros) {
	from, ds := &receipt{At: at.Time(), RunAt: at.Time()}, make([]demand, len(lots))
	now, oldest := c.memory.now(), algebra.Micros(0)
	for i := range lots {
		u := &lots[i]
		passed, _ := now.since(u.lot.sent)
		oldest = max(oldest, passed)
		from.Taken = append(from.Taken, taken{
			Limit: u.id.name, Key: u.id.key, Count: u.lot.left, Held: u.lot.held(&u.limit.numbers, at), Rows: 1, Shards: 1,
		})
		ds[i] = demand{limit: u.limit, key: u.id.key, count: u.lot.left}
	}
	ctx, cancel := context.WithTimeout(context.Background(), tooLate(c.Ahead)-time.Duration(oldest)*time.Microsecond)
	defer cancel()
	clock := c.memory.present()
	setNumbers(verbs[verbRefund], ds, clock, false)
	err := c.commit(ctx, func(db wire) error {
		_, err := db.ask(ctx, refund(from, ds, nullable(clock)))
		return err
	})
	if err != nil && c.memory.closed.Load() {
		c.memory.lost = err
	}
	c.reportBatch(0, err)
}

// closeAhead gives back all that is there.
func (c *Coalescer) closeAhead() {
	if c.Ahead != 0 {
		c.memory.closing.Do(func() {
			c.memory.closed.Store(true)
			c.sweep(true)
			c.reportBatch(0, nil)
		})
	}
}

// remembering are the Coalescers of the process that have decided in memory. They have to know what else is done with their keys.
var remembering struct {
	some atomic.Bool
	mu   sync.Mutex
	all  []weak.Pointer[Coalescer]
}

func remember(c *Coalescer) {
	remembering.mu.Lock()
	defer remembering.mu.Unlock()
	remembering.all = append(slices.DeleteFunc(remembering.all, func(p weak.Pointer[Coalescer]) bool {
		of := p.Value()
		return of == nil || of.memory.closed.Load()
	}), weak.Make(c))
	remembering.some.Store(true)
}

// forget makes all Coalescers of the process forget these keys, and waits for what of them is on its way back. On a handle that may have
// locked their rows, it does not wait: what is on its way would wait for it.
func forget(ctx context.Context, db DB, requests []Request) {
	eachRemembered(requests, func(c *Coalescer, r *Request) {
		id := limitKey{r.limit.name, r.key}
		if c.each(id, r.every, (*forecast).void); !handles.IsOne(db) {
			c.memory.awaits(ctx, id, r.every)
		}
	})
}

// doubt makes all Coalescers of the process forget what was denied of these keys. What they took ahead of them stays.
func doubt(requests []Request) {
	eachRemembered(requests, func(c *Coalescer, r *Request) {
		c.each(limitKey{r.limit.name, r.key}, false, (*forecast).doubt)
	})
}

func eachRemembered(requests []Request, do func(*Coalescer, *Request)) {
	if !remembering.some.Load() {
		return
	}
	remembering.mu.Lock()
	all := slices.Clone(remembering.all)
	remembering.mu.Unlock()
	for _, p := range all {
		c := p.Value()
		for i := 0; c != nil && i < len(requests); i++ {
			do(c, &requests[i])
		}
	}
}

// each changes what is known of a key, or of all keys of the limit.
func (c *Coalescer) each(id limitKey, every bool, change func(f *forecast, now localTime, ahead time.Duration)) {
	m, now := &c.memory, c.memory.now()
	if p := m.part(id); !every {
		p.mu.Lock()
		if f := p.byKey[id]; f != nil {
			change(f, now, c.Ahead)
		}
		p.mu.Unlock()
	}
	for i := 0; every && i < len(m.parts); i++ {
		p := &m.parts[i]
		p.mu.Lock()
		for of, f := range p.byKey {
			if of.name == id.name {
				change(f, now, c.Ahead)
			}
		}
		p.mu.Unlock()
	}
}

// awaits waits for what of a key, or of all keys of the limit, is on its way back.
func (m *memory) awaits(ctx context.Context, id limitKey, every bool) {
	if back := m.returning.Load(); back != nil && back.has(id, every) {
		select {
		case <-back.done:
		case <-ctx.Done():
		}
	}
}

func (r *returning) has(id limitKey, every bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for of := range r.keys {
		if of == id || every && of.name == id.name {
			return true
		}
	}
	return false
}

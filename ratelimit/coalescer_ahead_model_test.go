package ratelimit

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Up to two processes take tokens of one key ahead, use them and give them back. The model tries all orders of what can happen: statements
// that are decided late, outcomes that are not known, deaths, machines that are suspended, clocks that are set back, other numbers,
// a reset. It plays on the forecast of the Coalescer, and gives back by the rule of refunds that the database has. A statement takes its
// tokens whenever they are there: no promise rests on taking only plenty.
//
// The promise is checked at each grant. A call of a statement is granted when that is decided, as without Ahead.
//
//	token bucket  at most capacity + rate * (T + Ahead) in any span T
//	window        at most its rate, by the database's clock
//
// If one of the rules is left out, it is broken.

const modelTick = time.Second

// modelLeaves is a rule that the model leaves out.
type modelLeaves string

const (
	nothingOut          modelLeaves = "nothing"
	subtractsFromNext   modelLeaves = "give back, and do not subtract from the next statement"
	refundsByGap        modelLeaves = "of a bucket, n - rate * age comes back, and not the gap in the row"
	refundsAll          modelLeaves = "of a bucket, less than all comes back"
	refundsTwice        modelLeaves = "give back once"
	refundsUsed         modelLeaves = "what is given back is no longer used"
	usedBeforeCommit    modelLeaves = "use what is committed"
	countsFromAnswer    modelLeaves = "Ahead begins before the statement is sent"
	outlivesTheWindow   modelLeaves = "what is ahead ends with the window"
	ignoresWallClock    modelLeaves = "see by the wall clock that the machine was suspended"
	ignoresSetBack      modelLeaves = "and if that was set back"
	keepsOldNumbers     modelLeaves = "other numbers void what is ahead"
	landsOldNumbers     modelLeaves = "and what a statement has taken before"
	keepsThroughReset   modelLeaves = "a reset voids what is ahead"
	overtakesGivingBack modelLeaves = "a reset waits for what is on its way back"
)

// modelOf says what happens in a model.
type modelOf struct {
	before     algebra.Limit // and after a redefinition
	after      algebra.Limit
	processes  int
	ticks      int
	ahead      time.Duration
	prompt     bool      // statements are decided and answered at once
	unit       float64   // calls in memory ask for so many tokens; 0: for 1
	statements int       // of each process
	needs      []float64 // what the calls of a statement ask for
	extras     []float64
	suspends   int  // ticks in which the machine of a process stands still
	setBack    bool // its wall clock is then set back
	dies       bool
	redefines  bool
	resets     bool
	charges    float64   // by another program, once
	others     []float64 // what calls of other programs ask for: each once
}

type modelProcess struct {
	lots                []lot
	mono, wall          time.Duration
	epoch               int
	statements          int
	asks, decided, asOf bool // a statement is on its way; it is decided; by the numbers after the redefinition
	need, extra, minus  float64
	sent                localTime
	of                  lot
	ofEpoch             int
	back                []lot
	tried               bool // its outcome was not known
}

type modelState struct {
	now       int
	row       algebra.Row
	total     float64 // of the row now
	left      float64 // bucket: the most that may be granted now; window: what is left of it
	redefined bool
	did       bool // the reset
	charged   bool
	others    int // a bit for each of them
	dead      bool
	suspended int
	p         [2]modelProcess
}

func (s modelState) clone() *modelState {
	for i := range s.p {
		s.p[i].lots, s.p[i].back = append([]lot(nil), s.p[i].lots...), append([]lot(nil), s.p[i].back...)
	}
	return &s
}

// key is all of the state that matters.
func (s *modelState) key(b []byte) []byte {
	second := 0
	n := func(values ...int) {
		for _, v := range values {
			b = append(b, byte(v))
		}
	}
	bit := func(bits ...bool) {
		for _, v := range bits {
			if v {
				b = append(b, 1)
			} else {
				b = append(b, 0)
			}
		}
	}
	lots := func(lots []lot) {
		for _, l := range lots {
			n(int(l.sent.mono/modelTick), int(l.sent.wall/modelTick), int(l.at/1e6), int(l.left), int(l.row.Value-l.left))
		}
	}
	n(s.now, int(s.total), int(2*s.left), s.suspended, s.others)
	bit(s.redefined, s.did, s.charged, s.dead)
	common := len(b)
	for i := range s.p {
		p := &s.p[i]
		if i == 1 {
			second = len(b)
		}
		n(int((p.wall-p.mono)/modelTick), p.statements, len(p.lots)+8*len(p.back))
		bit(p.asks, p.decided, p.tried)
		lots(p.lots)
		lots(p.back)
		switch {
		case p.decided && p.epoch == p.ofEpoch:
			lots([]lot{p.of})
		case p.asks && !p.decided:
			n(int(p.need), int(p.extra), int(p.minus), int(p.sent.mono/modelTick), int(p.sent.wall/modelTick))
			bit(p.epoch == p.ofEpoch, p.asOf)
		}
	}
	if bytes.Compare(b[common:second], b[second:]) > 0 { // both processes are alike
		b = append(b, b[common:second]...)
		b = append(b[:common], b[second:]...)
	}
	return b
}

// model searches depth-first.
type model struct {
	modelOf
	out    modelLeaves
	seen   map[uint64]struct{}
	buffer []byte
	path   []happened
	broken string // how
}

func (m *model) run() {
	first := &modelState{row: algebra.Row{Value: m.before.Capacity}, left: m.most(&m.before)}
	m.seen = map[uint64]struct{}{}
	m.visit(first)
}

// most is what may be granted at one instant by a limit that was not used.
func (m *model) most(l *algebra.Limit) float64 {
	if l.Window {
		return l.Rate
	}
	return l.Capacity + l.Rate*m.ahead.Seconds()
}

func (m *model) numbers(redefined bool) *algebra.Limit {
	if redefined {
		return &m.after
	}
	return &m.before
}

// happened is one thing that has happened, and when.
type happened struct {
	now   int
	what  string
	about []any
}

// then goes on after something has happened.
func (m *model) then(s *modelState, what string, about ...any) {
	m.path = append(m.path, happened{s.now, what, about})
	m.visit(s)
	m.path = m.path[:len(m.path)-1]
}

// grants notes a grant.
func (m *model) grants(s *modelState, count float64, what string) {
	if s.left -= count; s.left < 0 && m.broken == "" {
		for _, h := range m.path {
			m.broken += fmt.Sprintf("%d: "+h.what+"\n\t", append([]any{h.now}, h.about...)...)
		}
		m.broken += fmt.Sprintf("%d: %s of %v: %v more than the promise", s.now, what, count, -s.left)
	}
}

func (p *modelProcess) local() localTime { return localTime{p.mono, p.wall} }

// forecast is what the product knows, of which only the lots count here.
func (p *modelProcess) forecast() *forecast {
	f := &forecast{epoch: p.epoch, row: algebra.Row{TS: 1}}
	for _, l := range p.lots {
		f.lots = append(f.lots, &l)
	}
	return f
}

func (p *modelProcess) set(f *forecast) {
	p.epoch, p.lots = f.epoch, p.lots[:0]
	for _, l := range f.lots {
		if l.left > 0 {
			p.lots = append(p.lots, *l)
		}
	}
}

func (m *model) visit(s *modelState) {
	if m.broken != "" {
		return
	}
	s.total = m.numbers(s.redefined).Total([]algebra.Row{s.row}, s.at())
	m.buffer = s.key(m.buffer[:0])
	key := maphash.Bytes(hashSeed, m.buffer)
	if _, found := m.seen[key]; found {
		return
	}
	m.seen[key] = struct{}{}
	m.passes(s)
	for i := range m.processes {
		m.process(s, i)
	}
	m.happens(s)
}

// passes lets time pass.
func (m *model) passes(s *modelState) {
	if s.now == m.ticks {
		return
	}
	for still := -1; still < m.processes; still++ {
		for _, back := range []bool{false, true} {
			if still < 0 && back || still >= 0 && s.suspended == m.suspends || back && !m.setBack {
				continue
			}
			next := s.clone()
			l := m.numbers(s.redefined)
			next.now++
			if window := int(l.Period / modelTick); !l.Window {
				next.left = min(next.left+l.Rate, m.most(l))
			} else if next.now%window == 0 {
				next.left = m.most(l)
			}
			for i := range next.p {
				p := &next.p[i]
				p.wall += modelTick
				if i != still {
					p.mono += modelTick
				} else if back {
					p.wall -= 10 * modelTick
				}
			}
			if still >= 0 {
				next.suspended++
			}
			m.then(next, "time passes, process %d stands still, its clock is set back: %v", still, back)
		}
	}
}

// process is what a process does, and what the database does for it.
func (m *model) process(s *modelState, i int) {
	p := &s.p[i]
	if !p.asks && p.statements < m.statements {
		for _, need := range m.needs {
			for _, extra := range m.extras {
				next := s.clone()
				q := &next.p[i]
				q.statements++
				q.asks, q.decided, q.asOf, q.need, q.extra, q.sent, q.ofEpoch, q.minus = true, false, s.redefined, need, extra, q.local(), q.epoch, 0
				if m.out == subtractsFromNext {
					f := q.forecast()
					for _, l := range f.unused(q.local(), m.ahead, false) {
						q.minus += l.left
					}
					q.set(f)
				}
				if m.prompt {
					m.decide(next, i)
				} else {
					m.then(next, "process %d asks for %v and %v", i, need, extra)
				}
			}
		}
	}
	switch {
	case p.asks && !p.decided:
		m.decide(s, i)
	case p.asks:
		next := s.clone()
		m.answer(next, i)
		m.then(next, "process %d gets the answer", i)
		if m.dies {
			next = s.clone()
			next.p[i].asks, next.p[i].decided = false, false
			m.then(next, "process %d gets no answer", i)
		}
	}
	if f := p.forecast(); len(f.lots) > 0 {
		if m.ignoresTime(f, p); m.use(f, p) {
			next := s.clone()
			next.p[i].set(f)
			m.grants(next, max(m.unit, 1), "a use")
			m.then(next, "process %d uses %v", i, max(m.unit, 1))
		}
	}
	if len(p.back) == 0 && m.out != subtractsFromNext {
		next := s.clone()
		q := &next.p[i]
		f := q.forecast()
		if q.back = f.unused(q.local(), m.ahead, false); len(q.back) > 0 {
			if m.out != refundsUsed {
				q.set(f)
			}
			if q.tried = false; m.prompt {
				m.comeBack(next, i)
			} else {
				m.then(next, "process %d gives back", i)
			}
		}
	}
	if len(p.back) > 0 {
		m.comeBack(s, i)
	}
}

// answer is the answer that a process gets.
func (m *model) answer(s *modelState, i int) {
	p := &s.p[i]
	l := p.of
	if m.out == countsFromAnswer {
		l.sent = p.local()
	}
	if m.out == landsOldNumbers {
		p.ofEpoch = p.epoch
	}
	if p.asks, p.decided = false, false; l.left > 0 {
		f := p.forecast()
		f.land(l, p.ofEpoch)
		p.set(f)
	}
}

// ignoresTime is about the rules for clocks.
func (m *model) ignoresTime(f *forecast, p *modelProcess) {
	for _, l := range f.lots {
		switch {
		case m.out == outlivesTheWindow:
			l.ends = algebra.Forever
		case m.out == ignoresWallClock:
			l.sent.wall += p.wall - l.sent.wall
		case m.out == ignoresSetBack && p.wall < l.sent.wall:
			l.sent.wall = p.wall
		}
	}
}

func (m *model) use(f *forecast, p *modelProcess) bool {
	l, _ := f.take(max(m.unit, 1), p.local(), m.ahead)
	return l != nil
}

func (s *modelState) at() algebra.Micros {
	return algebra.Micros(s.now) * algebra.Micros(modelTick.Microseconds())
}

// decide is the statement of a process at the database.
func (m *model) decide(s *modelState, i int) {
	for _, commits := range []bool{true, false} {
		if !commits && m.out != usedBeforeCommit {
			continue // as if it had not been sent
		}
		next := s.clone()
		q := &next.p[i]
		l, at := m.numbers(q.asOf), s.at()
		rows := []algebra.Row{s.row}
		available := l.Total(rows, at) + q.minus
		q.of = lot{sent: q.sent, at: at, ends: algebra.Forever}
		if l.Window {
			q.of.ends = l.NextWindow(at)
		}
		if available >= q.need {
			available -= q.need
			if commits {
				m.grants(next, q.need, "a statement")
			}
			if available >= q.extra {
				available -= q.extra
				q.of.left = q.extra
			}
			q.of.row = algebra.Row{Value: available + q.of.left, TS: at}
			if commits {
				next.row = algebra.Row{Value: min(available, l.Capacity), TS: max(at, s.row.TS)}
			}
		}
		if q.decided = true; m.prompt {
			m.answer(next, i)
		}
		m.then(next, "the statement of process %d is decided, commits: %v", i, commits)
	}
}

// comeBack is the statement by which a process gives back what it has not used.
func (m *model) comeBack(s *modelState, i int) {
	for _, known := range []bool{true, false} {
		next := s.clone()
		q := &next.p[i]
		l, at := *m.numbers(q.asOf), s.at()
		latest := q.back[len(q.back)-1].at // all come back as of then
		for _, of := range q.back {
			taken := algebra.Taken{At: latest, RunAt: latest, Count: of.left, Held: of.held(&l, latest), Part: 1}
			switch m.out {
			case refundsByGap:
				taken.Held = of.row.Value - of.left
			case refundsAll:
				taken.Held = -1000
				if !l.Window {
					taken.At = at
				}
			}
			rows := []algebra.Row{next.row}
			if n := l.Refund(rows, taken, of.left, at); n > 0 {
				next.row = l.Take(rows, 1, -n, at)[0]
			}
		}
		if again := !known && m.out == refundsTwice && !q.tried; !again {
			q.back = nil
		} else {
			q.tried = true
		}
		m.then(next, "what process %d gives back is decided, known: %v", i, known)
		if m.out != refundsTwice {
			return
		}
	}
}

// happens is what happens to all.
func (m *model) happens(s *modelState) {
	if m.dies && !s.dead {
		for i := range m.processes {
			next := s.clone()
			next.dead = true
			next.p[i] = modelProcess{mono: s.p[i].mono, wall: s.p[i].wall, statements: s.p[i].statements}
			m.then(next, "process %d dies and starts again", i)
		}
	}
	if m.charges > 0 && !s.charged {
		next := s.clone()
		next.charged = true
		next.row = m.numbers(s.redefined).Take([]algebra.Row{s.row}, 1, m.charges, s.at())[0]
		m.then(next, "%v are charged", m.charges)
	}
	for i, count := range m.others {
		l, rows := m.numbers(s.redefined), []algebra.Row{s.row}
		if s.others&(1<<i) == 0 && l.Total(rows, s.at()) >= count {
			next := s.clone()
			next.others |= 1 << i
			next.row = l.Take(rows, 1, count, s.at())[0]
			m.grants(next, count, "a call of another program")
			m.then(next, "another program takes %v", count)
		}
	}
	if m.redefines && !s.redefined && !m.inFlight(s) {
		next := s.clone()
		next.redefined, next.left = true, m.most(&m.after)
		m.voids(next, m.out != keepsOldNumbers)
		m.then(next, "it is redefined")
	}
	if m.resets && !s.did && !m.inFlight(s) {
		next := s.clone()
		l := m.numbers(s.redefined)
		next.did, next.left, next.row = true, m.most(l), algebra.Row{Value: l.Capacity, TS: s.at()}
		m.voids(next, m.out != keepsThroughReset)
		m.then(next, "it is reset")
	}
}

// inFlight reports whether a statement is not decided. What it takes counts by the promise of before, or it comes back, for
// which one waits.
func (m *model) inFlight(s *modelState) bool {
	for i := range s.p {
		if p := &s.p[i]; p.asks && !p.decided || len(p.back) > 0 && m.out != overtakesGivingBack {
			return true
		}
	}
	return false
}

func (m *model) voids(s *modelState, void bool) {
	for i := range s.p {
		if p := &s.p[i]; void {
			f := p.forecast()
			f.void(p.local(), m.ahead)
			p.set(f)
		}
	}
}

func TestNothingAheadBreaksThePromise(t *testing.T) {
	t.Parallel()
	bucket := algebra.Limit{Rate: 1, Period: modelTick, Capacity: 6}
	window := algebra.Limit{Rate: 4, Capacity: 4, Period: 3 * modelTick, Window: true}
	small := bucket
	small.Capacity = 2
	none, one := []float64{0}, []float64{1}
	half := modelTick / 2 // then lots are used in the tick in which they are taken, and may come back in the next one
	models := map[string]modelOf{
		"bucket": {before: bucket, processes: 2, ticks: 3, ahead: modelTick, statements: 2, prompt: true, unit: 3, needs: none, extras: []float64{3}},
		"bucket, in turn": {before: bucket, processes: 2, ticks: 3, ahead: half, statements: 2, prompt: true, unit: 9, needs: none, extras: []float64{3},
			others: []float64{4, 3}},
		"bucket, late": {before: bucket, processes: 1, ticks: 4, ahead: modelTick, statements: 2, needs: []float64{1, 4}, extras: []float64{4},
			others: []float64{5}},
		"bucket, two late": {before: bucket, processes: 2, ticks: 3, ahead: modelTick, statements: 1, unit: 2, needs: one, extras: []float64{4},
			others: []float64{4}},
		"bucket, suspended": {before: bucket, processes: 1, ticks: 4, ahead: modelTick, statements: 1, needs: one, extras: []float64{3},
			others: []float64{6}, suspends: 3, setBack: true, dies: true},
		"bucket, charged":   {before: bucket, processes: 2, ticks: 3, ahead: modelTick, statements: 1, needs: []float64{1, 6}, extras: []float64{4}, charges: 3},
		"bucket, redefined": {before: bucket, after: small, processes: 1, ticks: 4, ahead: modelTick, statements: 2, needs: one, extras: []float64{4, 1}, redefines: true},
		"bucket, reset": {before: bucket, processes: 1, ticks: 4, ahead: modelTick, statements: 2, needs: []float64{1, 5}, extras: []float64{5},
			others: []float64{4}, resets: true},
		"window":       {before: window, processes: 2, ticks: 4, ahead: modelTick, statements: 1, needs: one, extras: []float64{3}, others: []float64{3}},
		"window, late": {before: window, processes: 1, ticks: 5, ahead: modelTick, statements: 2, needs: one, extras: []float64{3}, others: []float64{3}},
		"window, suspended": {before: window, processes: 1, ticks: 4, ahead: modelTick, statements: 2, needs: one, extras: []float64{3},
			suspends: 3, setBack: true, dies: true},
		"window, dying": {before: window, processes: 2, ticks: 3, ahead: modelTick, statements: 1, needs: one, extras: []float64{3}, dies: true},
	}
	for _, row := range []struct {
		of     string
		out    modelLeaves
		breaks bool
	}{
		{"bucket", nothingOut, false}, {"bucket, in turn", nothingOut, false}, {"bucket, late", nothingOut, false}, {"bucket, two late", nothingOut, false}, {"bucket, suspended", nothingOut, false}, {"bucket, charged", nothingOut, false},
		{"bucket, redefined", nothingOut, false}, {"bucket, reset", nothingOut, false},
		{"window", nothingOut, false}, {"window, late", nothingOut, false}, {"window, suspended", nothingOut, false}, {"window, dying", nothingOut, false},
		{"bucket, late", subtractsFromNext, true}, {"window, late", subtractsFromNext, true},
		{"bucket, in turn", refundsByGap, true}, {"bucket, in turn", refundsAll, true},
		{"bucket, in turn", refundsTwice, true}, {"window", refundsTwice, true},
		{"bucket", refundsUsed, true}, {"window", refundsUsed, true},
		{"bucket, late", usedBeforeCommit, true}, {"window", usedBeforeCommit, true},
		{"bucket, late", countsFromAnswer, true}, {"window", countsFromAnswer, true},
		{"window", outlivesTheWindow, true},
		{"bucket, suspended", ignoresWallClock, true}, {"window, suspended", ignoresWallClock, true},
		{"bucket, suspended", ignoresSetBack, true}, {"window, suspended", ignoresSetBack, true},
		{"bucket, redefined", keepsOldNumbers, true}, {"bucket, redefined", landsOldNumbers, true},
		{"bucket, reset", keepsThroughReset, true}, {"bucket, reset", overtakesGivingBack, true},
	} {
		m := &model{modelOf: models[row.of], out: row.out}
		m.run()
		t.Logf("%s, left out: %s: %d states, broken: %v", row.of, row.out, len(m.seen), m.broken != "")
		if row.breaks != (m.broken != "") {
			t.Errorf("%s, left out: %s: broken: %v, want %v:\n\t%s", row.of, row.out, m.broken != "", row.breaks, m.broken)
		}
	}
}

package ratelimit

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

const (
	// maxPlaces is how many calls or batches are at the database at once: while one commits, the next is on its way.
	maxPlaces = 2
	// maxBatch bounds the calls of a statement.
	maxBatch = 1024
	// maxBlamed bounds how many blamed keys are remembered: some may never be asked for again.
	maxBlamed = 1 << 13
	// maxFailures is after how many failures calls are no longer decided again.
	maxFailures = 8
	// maxSharedFailures is the same for calls that share a key with all failed calls.
	maxSharedFailures = 4
)

// schedule says which calls a Coalescer sends, when, and which of them share a statement. It reads no clock, sends no
// statement and starts no goroutine: its methods are events, and time is an argument. So coalescer_schedule_test.go tests it
// in rows.
// Coalescer.mu guards it, with its waiters and flights. The zero value is ready.
//
// A call is at the database by itself, or in the flight of a batch; or it is queued. These are its moves:
//
//	arrive       by itself if a place is free, the queue is empty and nothing stands against it; or else queued
//	next         queued: into a flight, with the calls that can share the statement, or by itself after a refusal
//	landed       in flight: answered, or queued again if the error may be due to some of the calls. Calls that the statement
//	             left undecided change to a flight of their own, and only their keys stay busy
//	landedAlone  by itself: answered
//	leave        queued or in flight: gone. A flight whose callers have all left is canceled
//
// A call has a place, one of two, while it is at the database. After a batch, the place asks next for another one. It is
// given up when no call is ready. When a call may be ready and a place is free, arrive or fill takes the place and sets
// start: the Coalescer makes a goroutine of it. A call by itself has the place of its caller's goroutine.
//
// A queued call is ready if none of its keys is busy (at the database) or claimed (asked for by an earlier call that is not
// ready). A second statement for a key would only wait for its row.
//
// A statement that times out has probably waited for a locked row, and the error does not say for which. So its calls are
// decided again apart: one key, or one call for several keys, at a time. A key whose own statement has timed out is blamed.
// Its calls are apart until one is decided. All statements that are apart use one place, so locked rows leave the other one
// to the other calls. If one key after another fails, more than rows is locked, a table for example: then the calls that
// would be decided again return their errors.
type schedule struct {
	queue  []*waiter // in order of arrival, calls to be decided again first; empty if places is 0
	places int       // in use, each by a call or batch that is at the database or about to be sent
	due    time.Time // with a pace: when the next statement may begin

	busy    keySet // keys at the database, each in one statement
	claimed keySet // keys of queued calls that must not be overtaken, as of the last scan of the queue

	blamed      keySet // the last statement for this key alone timed out: its row may be locked
	apartFlying bool   // a statement of calls that are apart is at the database; there is at most one
	failures    int    // of such statements in a row, each for a key that was not blamed yet

	start bool // an answer: a place was taken for queued calls, and is to ask for its first batch
}

// waiter is a call that waits for its decision.
type waiter struct {
	ds    []demand
	clock pgtype.Timestamptz // the instant of its Limiter.Clock; calls of another instant share no statement
	// done receives once the call is decided or, if direct is set, once it may be sent by itself.
	done chan struct{}

	past   fate
	direct bool    // it may be sent by itself
	apart  bool    // it is sent by itself in the place for calls that are apart
	ahead  bool    // it is no call: it takes tokens ahead
	left   bool    // its caller no longer waits
	flight *flight // its statement; nil: none yet

	// The answer.
	err    error
	answer answer
}

// fate is what became of the statements that a queued call was in.
type fate int

const (
	unsent       fate = iota // there was none
	afterRefusal             // it failed for a reason that other calls may not share: the call is sent by itself
	afterTimeout             // it timed out: the call is decided apart, or returns waiter.err
	afterApart               // that timed out too, with calls for one blamed key: no other call shares its statement
)

// flight is one statement on its way to the database and back.
type flight struct {
	ctx     context.Context
	cancel  context.CancelFunc
	sent    localTime      // not after its statement, or the one before if that left calls undecided
	waiting int            // callers that wait for it
	decided bool           // its callers can no longer leave
	told    sync.WaitGroup // once it is decided: callers that do not have their answer yet
}

// newFlight puts waiters on a flight, including waiters that have left. It takes them from the flight that they were on.
func newFlight(waiters []*waiter) *flight {
	f := &flight{}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	for _, w := range waiters {
		if !w.left {
			f.waiting++
			if w.flight != nil {
				w.flight.waiting--
			}
		}
		w.flight = f
	}
	if f.waiting == 0 {
		f.cancel()
	}
	return f
}

var waiters = sync.Pool{New: func() any { return &waiter{done: make(chan struct{}, 1)} }}

// arrive takes a call in. Without a waiter in return, the call has a place, and is sent by itself. With queued, it is not: its statement
// is to take tokens ahead.
func (s *schedule) arrive(ds []demand, clock pgtype.Timestamptz, queued bool, now time.Time, pace time.Duration) *waiter {
	blamed := s.blamed.has(ds)
	if len(s.queue) == 0 {
		clear(s.claimed)
	}
	if s.places < maxPlaces && !s.waits(ds, blamed) && !s.claimed.has(ds) {
		s.places++
		if len(s.queue) == 0 && !blamed && !queued && s.takeTurn(now, pace) == 0 {
			s.busy.add(ds)
			return nil
		}
		s.start = true
	}
	w := waiters.Get().(*waiter)
	w.ds, w.clock = ds, clock
	s.queue = append(s.queue, w)
	return w
}

// leave takes a waiter out, unless it is decided or has a place. sent says that its statement is at the database. When the
// last waiter of a statement leaves, the statement is canceled.
func (s *schedule) leave(w *waiter) (left, sent bool) {
	switch f := w.flight; {
	case w.direct || f != nil && f.decided:
		return false, false
	case f == nil:
		s.queue = slices.DeleteFunc(s.queue, func(other *waiter) bool { return other == w })
		if len(w.ds) > 1 || w.past >= afterTimeout { // others may have waited for this one alone
			s.fill()
		}
		return true, false
	default:
		w.left = true
		if f.waiting--; f.waiting == 0 {
			f.cancel()
		}
		return true, true
	}
}

// next gives a place its next statement: it frees the keys of the batch, and moves calls that can share a statement from the
// queue to it. If wait is not 0, the place asks again after that. If no call is ready, the place is given up. If a call has
// to be sent by itself, it takes the place over.
func (s *schedule) next(b *batch, now time.Time, pace time.Duration) (send bool, wait time.Duration) {
	s.vacate(b)
	s.apartFlying = s.apartFlying && !b.apart
	b.apart = false
	clear(s.claimed)
	first := slices.IndexFunc(s.queue, s.ready)
	if first < 0 {
		s.places--
		return false, 0
	}
	w := s.queue[first]
	apart, lone := s.apart(w), w.past == afterRefusal
	if !apart && !lone {
		if wait = s.takeTurn(now, pace); wait > 0 {
			return false, wait
		}
	}
	if lone {
		s.queue = slices.Delete(s.queue, first, first+1)
		s.busy.add(w.ds)
		w.direct, w.apart = true, apart
		w.done <- struct{}{}
	} else {
		b.apart = apart
		s.take(b, first)
	}
	s.apartFlying = s.apartFlying || apart
	s.fill()
	return !lone, 0
}

// landed ends the statement of a batch: its waiters are answered, unless separate queues them again. The statement did not
// decide the others, which are no longer in the batch: they get a flight of their own, before they could no longer leave, and
// only their keys stay at the database.
func (s *schedule) landed(b *batch, err error, others []*waiter) (again bool, flightOfOthers *flight) {
	if s.separate(b, err) {
		return true, nil
	}
	if err == nil || !b.shared() && b.flight.ctx.Err() == nil { // else it was canceled, and nothing is known
		for _, w := range b.waiters {
			s.learn(w.ds, b.apart, err)
		}
	}
	if len(others) > 0 {
		flightOfOthers = newFlight(others)
		flightOfOthers.sent = b.flight.sent
		s.vacate(b)
		s.occupy(b, others)
		s.fill()
	}
	b.flight.decided = true
	b.flight.told.Add(b.flight.waiting)
	return false, flightOfOthers
}

// separate puts the calls of a batch back at the front of the queue if its error may be due to some of them: to be sent by
// themselves or, after a timeout, apart. It reports whether it has done so.
func (s *schedule) separate(b *batch, err error) (again bool) {
	past := afterRefusal
	switch {
	case ofSomeCalls(sqlState(err)):
		err = nil
	case !timedOut(err) || !b.shared() || b.flight.ctx.Err() != nil:
		return false
	case b.apart:
		past = afterApart
	default:
		past = afterTimeout
	}
	b.waiters = slices.DeleteFunc(b.waiters, func(w *waiter) bool { return w.left })
	slices.SortStableFunc(b.waiters, func(v, w *waiter) int { return cmp.Compare(len(v.ds), len(w.ds)) }) // single keys are decided sooner
	if !s.apartFlying && !slices.ContainsFunc(s.queue, func(w *waiter) bool { return w.past >= afterTimeout }) {
		s.failures = 0 // all earlier calls are decided
	}
	for _, w := range b.waiters {
		w.flight, w.past, w.err = nil, past, err
	}
	s.queue = slices.Insert(s.queue, 0, b.waiters...)
	return true
}

// landedAlone gives the place of a call that was sent by itself to the queue. ended says that its context has ended.
func (s *schedule) landedAlone(ds []demand, apart, ended bool, err error) {
	s.busy.remove(ds)
	s.apartFlying = s.apartFlying && !apart
	if err == nil || !ended { // else the error says nothing about the keys
		s.learn(ds, apart, err)
	}
	s.places--
	s.fill()
}

// fill takes a free place for queued calls.
func (s *schedule) fill() {
	if len(s.queue) > 0 && s.places < maxPlaces {
		s.places++
		s.start = true
	}
}

// apart reports whether a call must not share a statement with calls for other keys.
func (s *schedule) apart(w *waiter) bool { return w.past >= afterTimeout || s.blamed.has(w.ds) }

// waits reports whether a call has to wait for calls at the database.
func (s *schedule) waits(ds []demand, apart bool) bool {
	return s.busy.has(ds) || apart && s.apartFlying
}

// ready reports whether a queued call may be sent. If not, later calls must not overtake it with one of its keys. (For one
// key, and the first time, no note is needed: the same reason holds up the later calls too.)
func (s *schedule) ready(w *waiter) bool {
	if !s.waits(w.ds, s.apart(w)) && !s.claimed.has(w.ds) {
		return true
	}
	if len(w.ds) > 1 || w.past >= afterTimeout {
		s.claimed.add(w.ds)
	}
	return false
}

// take moves the first ready call, and the calls that can share its statement, from the queue to the batch.
func (s *schedule) take(b *batch, first int) {
	leader, rest := s.queue[first], s.queue[:first]
	for i, w := range s.queue[first:] {
		together := w == leader || s.ready(w) && s.together(leader, w, b.apart)
		if together && (w.past == afterRefusal || w.clock != leader.clock) || len(b.waiters) == maxBatch {
			rest = append(rest, s.queue[first+i:]...)
			break
		}
		if together {
			b.waiters = append(b.waiters, w)
		} else {
			rest = append(rest, w)
		}
	}
	clear(s.queue[len(rest):])
	s.queue = rest
	s.occupy(b, b.waiters)
	b.flight = newFlight(b.waiters)
}

// together reports whether a call may share another's statement. Calls that are apart may if both ask for the same single
// key, or if the same keys of both are blamed.
func (s *schedule) together(leader, w *waiter, apart bool) bool {
	switch {
	case !apart:
		return !s.apart(w)
	case len(leader.ds) == 1 && len(w.ds) == 1:
		return leader.ds[0].id() == w.ds[0].id()
	case leader.past == afterApart || w.past == afterApart:
		return false
	}
	blamed := s.blamedOf(leader.ds)
	return len(blamed) > 0 && slices.Equal(blamed, s.blamedOf(w.ds))
}

// blamedOf are the blamed keys among the demands'.
func (s *schedule) blamedOf(ds []demand) (ids []limitKey) {
	for i := range ds {
		if s.blamed.has(ds[i : i+1]) {
			ids = append(ids, ds[i].id())
		}
	}
	return ids
}

// occupy notes that the keys of these calls of a batch are at the database.
func (s *schedule) occupy(b *batch, waiters []*waiter) {
	for _, w := range waiters {
		for i := range w.ds {
			if one := w.ds[i : i+1]; !s.busy.has(one) {
				s.busy.add(one)
				b.busy = append(b.busy, w.ds[i].id())
			}
		}
	}
}

// vacate notes that they no longer are.
func (s *schedule) vacate(b *batch) {
	for _, id := range b.busy {
		delete(s.busy, id)
	}
	clear(b.busy)
	b.busy = b.busy[:0]
}

// takeTurn is how long the pace makes a statement wait. With 0, it may begin, and the next one is due a pace later.
func (s *schedule) takeTurn(now time.Time, pace time.Duration) time.Duration {
	if pace <= 0 {
		return 0
	}
	if wait := s.due.Sub(now); wait > 0 {
		return wait
	}
	s.due = now.Add(pace)
	return 0
}

// learn takes in how a statement for these demands alone has ended.
func (s *schedule) learn(ds []demand, apart bool, err error) {
	switch {
	case err == nil && apart:
		s.failures = 0
		s.blamed.remove(ds)
	case timedOut(err):
		guilty := s.blamedOf(ds) // blamed before; the others only share their statement
		if len(s.blamed) > maxBlamed {
			clear(s.blamed)
		}
		s.blamed.add(ds)
		if !apart {
			return
		}
		if len(guilty) < len(ds) {
			s.failures++
		}
		if len(guilty) > 0 && len(guilty) < len(ds) && s.failures >= maxSharedFailures {
			s.giveUp(func(w *waiter) bool {
				return w.past == afterApart && anyOf(w.ds, func(d *demand) bool { return slices.Contains(guilty, d.id()) })
			})
		}
	case err != nil && apart && sqlState(err) == "": // there is no connection
		s.failures = maxFailures
	}
	if s.failures >= maxFailures {
		s.failures = 0
		s.giveUp(func(w *waiter) bool { return w.past >= afterTimeout })
	}
}

// giveUp returns their last error to calls that would be decided again.
func (s *schedule) giveUp(on func(w *waiter) bool) {
	s.queue = slices.DeleteFunc(s.queue, func(w *waiter) bool {
		if on(w) {
			w.done <- struct{}{}
			return true
		}
		return false
	})
}

// timedOut reports whether the server ended a slow statement, perhaps because it waited for a lock. Nothing was decided.
func timedOut(err error) bool {
	state := sqlState(err)
	return state == "55P03" || state == "57014" // lock_not_available, query_canceled
}

// ofSomeCalls reports whether an error may be due to some of a statement's calls, and the others would be decided without
// them: rows to combine first, a key of another server, a text that the server cannot store, or what a trigger or a policy
// of the application raises, with whatever SQLSTATE. Nothing was decided. Errors of the connection, the server, the schema
// or the isolation level are those of every call.
func ofSomeCalls(state string) bool {
	if len(state) != 5 || state == "55P03" || state == stateIsolation || state == "40003" { // see timedOut; statement_completion_unknown
		return false
	}
	switch state[:2] {
	case "42":
		return state == "42501" // a policy may refuse a key
	case "08", "25", "28", "3D", "3F", "53", "57", "58", "F0", "XX":
		return false
	}
	return true
}

// keySet is a set of keys of limits.
type keySet map[limitKey]struct{}

// has reports whether one of the keys is in the set.
func (s keySet) has(ds []demand) bool {
	if len(s) == 0 {
		return false
	}
	for i := range ds {
		if _, found := s[ds[i].id()]; found {
			return true
		}
	}
	return false
}

func (s *keySet) add(ds []demand) {
	if *s == nil {
		*s = keySet{}
	}
	for i := range ds {
		(*s)[ds[i].id()] = struct{}{}
	}
}

func (s keySet) remove(ds []demand) {
	for i := range ds {
		delete(s, ds[i].id())
	}
}

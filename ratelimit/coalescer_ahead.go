package ratelimit

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// What a Coalescer with Ahead knows of one limit and key. It is pure: time is an argument, and the caller has the lock. So
// coalescer_ahead_model_test.go tries all that can happen with it, and coalescer_ahead_test.go has rows.

const (
	// plenty is the least balance of which tokens are taken ahead, and share the part of it that may be: a quarter.
	plenty, share = 100, 4
	// spread is how many standard deviations less than what was asked for are taken ahead. With 1, up to a quarter is not used, with 2 up to
	// twice as many calls are asked: TestLittleOfItIsNotUsed prints both shares.
	spread = 1.5
	// lateness is after how many times Ahead an idle key is forgotten, and what is not used no longer comes back: see tooLate.
	lateness = 3
	// maxLots bounds the lots of a key: each of them was too small for a call, so that another statement took more.
	maxLots = 4
)

// tooLate is how old a lot is when what is left of it no longer comes back. It keeps no promise, but bounds how long a Reset by another
// process can be undone. A statement of a busy machine may take most of a second.
func tooLate(ahead time.Duration) time.Duration { return max(lateness*ahead, time.Second) }

// localTime is an instant of this process. The monotonic clock stands still while a machine is suspended. The wall clock can be set.
type localTime struct{ mono, wall time.Duration }

func localNow() localTime {
	now := time.Now()
	return localTime{now.Sub(started), time.Duration(now.UnixNano())}
}

// since is the most time that can have passed since an earlier instant. It is not known if the wall clock was set back.
func (t localTime) since(before localTime) (passed algebra.Micros, known bool) {
	wall := t.wall - before.wall
	return algebra.Micros((max(t.mono-before.mono, wall) + time.Microsecond - 1) / time.Microsecond), wall >= 0
}

// lot is what one statement took of a limit and key for calls that were still to come.
type lot struct {
	sent localTime      // before the statement was sent
	at   algebra.Micros // of its decision, by the database's clock
	ends algebra.Micros // the window, by the database's clock; algebra.Forever: a token bucket
	row  algebra.Row    // after the statement, as if what is left of the lot had not been taken
	left float64        // tokens that no call has used
}

// instant is the latest that the database's clock can show now. A lot is usable until it is Ahead old, and in its window only.
func (l *lot) instant(now localTime, ahead time.Duration) (at algebra.Micros, usable bool) {
	passed, known := now.since(l.sent)
	at = l.at + passed
	return at, known && passed <= algebra.Micros(ahead.Microseconds()) && at < l.ends
}

// take uses tokens of the lot for a call. What a receipt of the call says is as if the call had been in the statement.
func (l *lot) take(count float64) {
	l.left -= count
	l.row.Value -= count
}

// held is what a receipt of an instant says was left by a statement that took what is left of the lot, from a full limit. So of a bucket, at
// most what is left less the refill since it was taken comes back, whatever others have taken. Without these tokens, the bucket would have been
// full for some of that time, and would have refilled less; not more than for all of it. The gap by which Refund gives back otherwise is wider:
// it has also what others have ahead, and two that give back by it give back more than both have taken.
func (l *lot) held(numbers *algebra.Limit, at algebra.Micros) float64 {
	held := numbers.Capacity - l.left
	if !numbers.Window {
		held += float64(at-l.at) / float64(numbers.Period.Microseconds()) * numbers.Rate
	}
	return held
}

// forecast is what is known of a limit and key: what is there for the calls to come, and how much they will ask for.
type forecast struct {
	schema string
	limit  Limit // all that follows is about these numbers
	lots   []*lot
	epoch  int  // what a statement took is lost if it was asked for in an earlier one
	asking bool // a statement on its way takes some ahead

	denied *denied

	row           algebra.Row   // what the last statement left
	sent          time.Duration // when that was sent
	trip          time.Duration // its round trip
	voided        time.Duration // what was sent until then is not learned
	quiet         time.Duration // nothing is taken ahead before: the key was denied, or not only consumed
	began         localTime     // the present span of Ahead
	asked, before counts        // in it, and in the one before
	last          time.Duration // when it was asked for
}

// counts are what calls have asked for.
type counts struct {
	sum     float64
	squares float64 // the sum of their squares, which is the variance of sum if calls come independently
}

func (c *counts) add(count, times float64) {
	c.sum = max(0, c.sum+times*count)
	c.squares = max(0, c.squares+times*count*count)
}

// ask notes that a call asks for tokens. By other numbers, all that was known is void.
func (f *forecast) ask(limit *Limit, count float64, now localTime, ahead time.Duration) {
	if f.limit != *limit {
		f.void(now, ahead)
		f.limit = *limit
	}
	if spans := (now.mono - f.began.mono) / ahead; spans > 0 {
		if f.before = f.asked; spans > 1 {
			f.before = counts{}
		}
		f.began, f.asked = now, counts{}
	}
	f.asked.add(count, 1)
	f.last = now.mono
}

// idle reports whether the key was not asked for so long that nothing of it is of use.
func (f *forecast) idle(now localTime, ahead time.Duration) bool {
	return now.mono-f.began.mono > lateness*ahead && len(f.lots) == 0 && !f.asking
}

// take grants tokens of the oldest lot that has enough. Without one, or in doubt, it returns nil.
func (f *forecast) take(count float64, now localTime, ahead time.Duration) (l *lot, at algebra.Micros) {
	known := f.sent >= f.voided && f.row != (algebra.Row{}) // else a result could not say what is left
	for i := 0; i < len(f.lots) && known; i++ {
		l := f.lots[i]
		if at, usable := l.instant(now, ahead); usable && l.left >= count {
			l.take(count)
			return l, at
		}
	}
	return nil, 0
}

// shown is the row as callers see it: as if what is there for the calls to come had not been taken.
func (f *forecast) shown() algebra.Row {
	row := f.row
	for _, l := range f.lots {
		row.Value += l.left
	}
	return row
}

// wants is how many tokens a statement should take ahead: what the calls of the last Ahead asked for, less 1.5 standard deviations of it, that of a
// round trip, in which nothing is there, and what is there already. So little of it is not used, of which a bucket loses what it refills
// meanwhile, and nothing is taken for a key with a call or two in Ahead. It is at most a share of what the row had when it was last asked, of
// which the statement makes sure: see floorAhead. With early, no call waits: it is nothing if what is there lasts for that long, and a round trip.
func (f *forecast) wants(now localTime, ahead, early time.Duration) float64 {
	if f.asking || now.mono < f.quiet || 2*f.trip > ahead || f.row.Value < plenty || early > 0 && now.mono-f.last > early {
		return 0
	}
	wanted := f.asked
	rest := max(0, 1-float64(now.mono-f.began.mono)/float64(ahead)) // of the span before, less than Ahead ago
	wanted.sum += f.before.sum * rest
	wanted.squares += f.before.squares * rest
	if early > 0 {
		early += f.trip
	}
	then, there, lots := localTime{now.mono + early, now.wall + early}, 0.0, 0
	for _, l := range f.lots {
		if l.left > 0 { // what is used up stays until a sweep
			lots++
		}
		if _, usable := l.instant(then, ahead); usable {
			there += l.left
		}
	}
	if lots >= maxLots || early > 0 && there >= wanted.sum*float64(early)/float64(ahead) {
		return 0
	}
	extra := math.Floor(min((wanted.sum-spread*math.Sqrt(wanted.squares))*(1-float64(f.trip)/float64(ahead))-there, f.row.Value/share))
	if extra*wanted.sum < wanted.squares {
		return 0 // a call of the usual count would not find enough
	}
	return max(extra, 0)
}

// floorAhead is the least balance that may be left by a statement that takes tokens ahead.
func floorAhead(count float64) float64 { return max((share-1)*count, plenty-count) }

// learn notes what a statement has left after one of its calls, and if that was denied. The last call of a statement leaves least.
func (f *forecast) learn(left algebra.Row, granted bool, sent, now localTime, ahead time.Duration) {
	later := cmp.Or(cmp.Compare(sent.mono, f.sent), cmp.Compare(left.TS, f.row.TS), cmp.Compare(f.row.Value, left.Value))
	if later > 0 || f.row == (algebra.Row{}) {
		f.row, f.sent, f.trip = left, sent.mono, now.mono-sent.mono
	}
	if !granted {
		f.quiet = max(f.quiet, now.mono+ahead)
	}
}

// land adds what a committed statement took ahead, unless everything is void since it was asked for.
func (f *forecast) land(l lot, epoch int) {
	if epoch == f.epoch {
		f.lots = append(f.lots, &l)
	}
}

// void forgets lots and denials: their tokens are lost. For a while, nothing more is taken ahead.
func (f *forecast) void(now localTime, ahead time.Duration) {
	f.doubt(now, ahead)
	f.lots, f.asking = nil, false
	f.epoch++
	f.quiet = max(f.quiet, now.mono+ahead)
}

// doubt forgets denials and what the row had, which a charge or a refund has changed. Lots stay, for calls after the next statement.
func (f *forecast) doubt(now localTime, _ time.Duration) {
	f.denied, f.row = nil, algebra.Row{}
	f.voided = now.mono
}

// unused takes out the lots that are no longer of use, and returns those of which something may come back: once, and not after their
// window, nor so late that others no longer expect it. With all, none is of use any more.
func (f *forecast) unused(now localTime, ahead time.Duration, all bool) (back []lot) {
	f.lots = slices.DeleteFunc(f.lots, func(l *lot) bool {
		if l.left == 0 {
			return true
		}
		at, usable := l.instant(now, ahead)
		usable = usable && !all
		if passed, known := now.since(l.sent); !usable && known && at < l.ends && passed <= algebra.Micros(tooLate(ahead).Microseconds()) {
			back = append(back, *l)
		}
		return !usable
	})
	return back
}

// denied is a call that a statement has denied.
type denied struct {
	sent localTime      // before the statement was sent
	at   algebra.Micros // of its decision, by the database's clock
	ds   []demand
	rows [][]algebra.Row
	of   int // the demand that was denied
}

// deny notes that a statement has denied a call, if just one of its demands was: this one's.
func (f *forecast) deny(ds []demand, a *answer, of int, sent localTime) {
	if f.denied == nil || f.denied.at < a.at {
		rows := make([][]algebra.Row, len(a.rows)) // those of an answer are used again
		for i := range rows {
			rows[i] = slices.Clone(a.rows[i])
		}
		f.denied = &denied{sent: sent, at: a.at, ds: slices.Clone(ds), rows: rows, of: of}
	}
}

// denies answers a call that asks for at least as much as one that was denied, until the tokens of the latter may be there, and
// for at most Ahead. Otherwise it returns nil.
func (f *forecast) denies(ds []demand, now localTime, ahead time.Duration) *answer {
	d := f.denied
	if d == nil || len(ds) != len(d.ds) {
		return nil
	}
	passed, known := now.since(d.sent)
	if !known || passed > algebra.Micros(ahead.Microseconds()) {
		f.denied = nil
		return nil
	}
	for i := range ds {
		if x, y := &ds[i], &d.ds[i]; x.key != y.key || x.limit != y.limit || x.floor != y.floor || x.count < y.count {
			return nil
		}
	}
	at, by := d.at+passed, &d.ds[d.of]
	if by.numbers.Enough(d.rows[d.of], by.count, by.floor, at) {
		return nil
	}
	return &answer{at: at, rows: d.rows}
}

package algebra

import (
	"math"
	"slices"
)

// This file has the two rules that keep the promises to reservations. Over any span, jobs that run when they were told to
// take at most the capacity and the refill of the span. Jobs of a fixed window fit into each window.

// Demand is a call's demand for one limit and key.
type Demand struct {
	Limit  Limit
	Rows   []Row
	Shards int
	Count  float64
	Lowest float64 // the balance that may be left: see Limit.Lowest
	Floor  float64 // for WhenReserved: the same without the tolerance
	Listed int     // of a calendar: how many windows a call lists, from the present one on; 0: all of Limit.Windows
}

// Forever is no bound on a wait: longer than from Min to Max.
const Forever Micros = math.MaxInt64 / 2

// Reserve decides demands together if their job may have to wait, but no longer than within. All of them may run at runAt.
// left is the balance that each limit has left, and granted reports whether the balances are enough. The balance of a limit
// that makes the job wait too long is -Inf.
//
// While the job waits, its tokens are there or come in, and the limit goes on refilling. Refill above the capacity until
// the job runs is forfeited: together with the job's tokens, it would be more than the capacity at once. (In a window,
// that is the rest of the present window, if the job runs in a later one.) A count above the capacity forfeits nothing,
// since no promise can hold for it. After the last of a calendar's Windows, or of those that a call lists, nothing is
// granted, since its refills are unknown.
func Reserve(ds []Demand, now, within Micros) (runAt Micros, left []float64, granted bool) {
	own := make([]Micros, len(ds)) // when each limit alone would let the job run
	runAt = now
	for i, d := range ds {
		own[i] = d.Limit.Repaid(d.Limit.Take(d.Rows, d.Shards, d.Count, now), now)
		runAt = max(runAt, own[i])
	}
	left = make([]float64, len(ds))
	granted = true
	for i, d := range ds {
		l := d.Limit
		left[i] = min(l.Total(d.Rows, now)-d.Count, l.Capacity)
		if runAt > now && l.Holds(d.Count) && (l.Window || runAt > own[i]) {
			// In this order, rounding cannot make the balance and the refill together negative when the job runs.
			left[i] = min(left[i], l.Capacity-d.Count-l.refill(earliest(d.Rows, now), runAt, 1))
		}
		if d.unknown(now, runAt) || own[i]-now > within {
			left[i] = math.Inf(-1)
		}
		granted = granted && d.Enough(left[i])
	}
	return runAt, left, granted
}

// earliest is the first instant, from now on, at which one of the rows refills. Rows used after now refill later.
func earliest(rows []Row, now Micros) Micros {
	first := latest(rows, now)
	for _, row := range rows {
		first = min(first, max(row.TS, now))
	}
	return first
}

// Enough reports whether the balance may be left. -Inf may never be left.
func (d Demand) Enough(left float64) bool { return !math.IsInf(left, -1) && left >= d.Lowest }

// WhenReserved is now if Reserve grants, or else the first instant at which it grants what is due (see [Limit.Due]), if nothing else
// is taken or given back. Beyond [Max], and beyond the last of a calendar's Windows, it is Max or, if limits that are full would not grant it
// either, [Forever]. For a count above the capacity of a window, there may be an earlier instant, since Reserve grants it for a while before
// each window.
func WhenReserved(ds []Demand, now, within Micros) Micros {
	granted := func(at Micros) bool {
		runAt, _, granted := Reserve(ds, at, within)
		return granted && runAt < Max
	}
	enough := func(at Micros) bool { return unknown(ds, at) || granted(at) } // once it is true, it mostly stays true
	if now >= Max || granted(now) {
		return now
	}
	full := slices.Clone(ds)
	ds = slices.Clone(ds)
	guess := now + 1
	for i := range ds {
		d := &ds[i]
		full[i].Rows = nil
		guess = max(guess, d.Limit.When(d.Rows, d.Count, d.Floor, now)) // without forfeits
		d.Lowest = d.Limit.Due(len(d.Rows), d.Count, d.Floor)
	}
	runAt, _, _ := Reserve(ds, guess, within)
	guess = max(guess, runAt-within)
	for _, d := range ds { // more than a window's capacity always waits for the next window, and others forfeit least just before that
		for _, at := range []Micros{now, guess} {
			if last := d.Limit.NextWindow(at) - 1; d.Limit.Window && !d.Limit.Holds(d.Count) && last > now && granted(last) {
				guess = last
				break
			}
		}
	}
	if at := firstAfter(now, guess, enough); at < Max && !unknown(ds, at) {
		return at
	}
	if _, _, ever := Reserve(full, now, within); !ever {
		return Forever
	}
	return Max
}

// unknown reports whether a call at now cannot know the refills until runAt: its list of windows ends before.
func (d Demand) unknown(now, runAt Micros) bool {
	l := d.Limit
	return l.Unknown(runAt) || d.Listed > 0 && l.number(runAt-1)-l.number(now) >= d.Listed-1
}

// unknown reports whether an instant lies after the last window of a calendar.
func unknown(ds []Demand, at Micros) bool {
	return slices.ContainsFunc(ds, func(d Demand) bool { return d.Limit.Unknown(at) })
}

// Taken describes a consumption, for a refund.
type Taken struct {
	At    Micros  // when it was decided
	RunAt Micros  // when the job was told to run
	Count float64 // tokens taken
	Held  float64 // tokens left afterwards in all rows that it was taken from
	Part  float64 // the part of the limit in these rows: 1, or 1/n for one of n shards

	Promised Micros // the latest instant at which any work of the limit and key was told to run, if it had to wait: see Promise
}

// Promise is when work may run that leaves a token bucket this balance in its rows, or 0 if it does not wait. A charge promises
// nothing: its floor is -Inf. What a reservation of a window, or of several limits, promises is the runAt of [Reserve].
func (l Limit) Promise(left, lowest float64, rows []Row, now Micros) Micros {
	if math.IsInf(lowest, -1) || left >= l.Lowest(0) {
		return 0
	}
	wait := float64(-left/l.Rate) * float64(float64(l.Period.Microseconds())/1e6*1e6) // rounded as by the database
	if !(wait < 3e15) {
		return Max
	}
	return min(latest(rows, now)+Micros(math.Ceil(wait)), Max)
}

// Refund is how many of count tokens a limit gets back: as many as break no promise, and fit.
//
//   - A token bucket gets the tokens that would still be missing by now if nothing else had been taken since. If work waits,
//     tokens that are owed are subtracted, since they are that work's. (Tokens missing in one shard refill at the rate of all
//     shards, since the balance may be spread over all of them at any time.) While it is paused, only what waiting work owes
//     comes back.
//   - A window gets everything in the window of the job, but no more than it lacked then, by its numbers of now. If other work
//     waits for a later window, it does while nothing is owed; a job that waits itself does if its window is the last one with
//     promised jobs. If the capacity is above the rate, that must stay so. A job of more than the capacity gets nothing back.
//
// Several overlapping refunds of a token bucket can exceed the promise together. Then this still holds: since the first
// use, the limit has granted at most the capacity and the refill of all that time. docs/refunds.md has the proof for fixed
// windows.
func (l Limit) Refund(rows []Row, taken Taken, count float64, now Micros) float64 {
	total, clock := l.Total(rows, now), now
	now = latest(rows, now)
	if now < taken.At {
		return 0 // the clock has stepped back, and these are other rows than before
	}
	count = max(min(count, l.Capacity-total), 0)
	waiting := taken.Promised != 0 && taken.Promised > clock // work that is promised
	missing := float64(l.Capacity*taken.Part) - taken.Held   // once it was taken
	if !l.Window {
		elapsed := now - taken.At
		owed := 0.0
		if waiting {
			owed = max(-total, 0)
		}
		if now > clock { // paused
			count = min(count, owed)
			if clock >= taken.At {
				elapsed = clock - taken.At
			}
		}
		refilled := float64(seconds(elapsed)*l.Rate) / (float64(l.Period.Microseconds()) / 1e6)
		return min(max(missing-refilled-owed, 0), count)
	}
	if missing < count+l.Lowest(0) {
		count = max(missing, 0)
	}
	// owes reports whether the limit still owes tokens that many windows from now.
	even := l.even(total)
	owes := func(total, windows float64) bool { return total+float64(windows*l.Rate) < even }
	wait := l.begun(now, taken.RunAt)
	if l.Windows != nil && (now < (*l.Windows)[0] || l.Unknown(taken.RunAt)) {
		wait = -1 // not all windows are known
	}
	switch {
	case !l.Holds(taken.Count), wait < 0, (wait > 0 || waiting) && owes(total, wait), wait > 0 && !owes(total, wait-1):
		return 0
	case wait > 0 && l.Capacity > l.Rate && !owes(total+count, wait-1):
		return 0
	}
	return count
}

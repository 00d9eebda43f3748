// Package algebra is the arithmetic of the limits: pure functions over a limit, its rows and an instant.
//
// It does the sums of _ratelimit_available and _ratelimit_apply in the same order and to the same bit, so that Go can say
// when the database will grant something. Products are converted to float64 before they are added to: Go may otherwise
// fuse the two operations (arm64), Postgres does not.
package algebra

import (
	"math"
	"time"
)

// Slack is how many tokens a sum over shards may lack through rounding. A single row is exact.
const Slack = 1e-9

// Bounds of rates; and of capacities, counts and what may be reserved where they are not 0. Tokens are doubles, exact for whole
// numbers far beyond MaxTokens.
const (
	MinTokens = 1e-15
	MaxTokens = 1e15
)

// Micros is an instant in microseconds since the Unix epoch: the database's resolution.
type Micros int64

// The instants that the arithmetic is defined for.
var (
	Min = At(time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC))
	Max = At(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)) - 1
)

// At truncates t to microseconds.
func At(t time.Time) Micros { return Micros(t.UnixMicro()) }

// Time is the inverse of At, in UTC.
func (m Micros) Time() time.Time { return time.UnixMicro(int64(m)).UTC() }

// Limit is a limit's numbers. A sharded limit has Rate/n, Capacity/n in each of n rows.
type Limit struct {
	Rate     float64 // tokens per Period
	Period   time.Duration
	Capacity float64
	Window   bool   // a fixed window, not a token bucket
	Start    Micros // of a fixed window: an instant of its grid before every other instant that occurs
}

// Row is the state that one row holds: what was left at its last use, and when that was.
type Row struct {
	Value float64
	TS    Micros
}

// UpTo is the instant up to which refills count at now: now itself for a token bucket, the start of the current window
// for a fixed window.
func (l Limit) UpTo(now Micros) Micros {
	if !l.Window {
		return now
	}
	period := Micros(l.Period.Microseconds())
	since := now - l.Start
	floor := since / period
	if since%period < 0 {
		floor--
	}
	return l.Start + floor*period
}

// Available is what a row holds at now, of a limit that has n rows.
//
//	token bucket:  min(capacity, value + elapsed*rate/period)
//	fixed window:  min(capacity, value + windows begun since ts * rate)
//
// Time that runs backwards refills nothing.
func (l Limit) Available(row Row, n int, now Micros) float64 {
	capacity := l.Capacity / float64(n)
	refill := l.refill(row.TS, now, float64(n))
	if available := row.Value + refill; available < capacity {
		return available
	}
	return capacity // if it is NaN, too, which is above all numbers in Postgres
}

// refill is what one of n rows gets from one instant to another, if it has room for it.
func (l Limit) refill(from, to Micros, n float64) float64 {
	rate, period := l.Rate/n, float64(l.Period.Microseconds())/1e6
	if l.Window {
		return float64(max(l.begun(from, to), 0) * rate)
	}
	return float64(max(seconds(to-from), 0)*rate) / period
}

// begun is how many windows have begun from one instant to another; below zero, if that lies before it.
func (l Limit) begun(from, to Micros) float64 {
	return math.RoundToEven(seconds(l.UpTo(to)-l.UpTo(from)) / (float64(l.Period.Microseconds()) / 1e6))
}

// Total is what all rows of a limit hold together at now. A limit without rows is full; and one whose rows are all full holds
// its capacity, though the sum of many shares may come out a little different. Other equal shares are multiplied: to add the
// same number again and again is to round in the same direction again and again, by more than a small count.
func (l Limit) Total(rows []Row, now Micros) float64 {
	if len(rows) == 0 {
		return l.Capacity
	}
	total, lowest, highest := 0.0, math.Inf(1), math.Inf(-1)
	for _, row := range rows {
		available := l.Available(row, len(rows), now)
		total += available
		lowest, highest = min(lowest, available), max(highest, available)
	}
	n := float64(len(rows))
	switch lowest {
	case l.Capacity / n:
		return l.Capacity
	case highest:
		return n * lowest
	}
	return total
}

// Enough says whether count can be taken at now, leaving at least floor, by a limit of so many shards.
func (l Limit) Enough(rows []Row, shards int, count, floor float64, now Micros) bool {
	return l.Total(rows, now)-count >= floor-slack(max(len(rows), shards))
}

// slack is what the sum over so many rows may lack.
func slack(rows int) float64 {
	if rows > 1 {
		return Slack
	}
	return 0
}

// Take is what the rows hold after count was taken at now (given back, if it is negative) by a limit of so many shards:
// what is left, at most the capacity, spread evenly.
func (l Limit) Take(rows []Row, shards int, count float64, now Micros) []Row {
	return l.Spread(rows, shards, min(l.Total(rows, now)-count, l.Capacity), now)
}

// Spread is what the rows of a limit of so many shards hold when what is left at now has been spread over them evenly.
func (l Limit) Spread(rows []Row, shards int, left float64, now Micros) []Row {
	after := make([]Row, shards)
	for i := range after {
		after[i] = Row{Value: left / float64(shards), TS: latest(rows, now)}
		if len(rows) == shards {
			after[i].TS = max(rows[i].TS, now)
		}
	}
	return after
}

// latest is now, or the latest use of the rows if the clock has stepped back behind it.
func latest(rows []Row, now Micros) Micros {
	for _, row := range rows {
		now = max(now, row.TS)
	}
	return now
}

// When is the first instant, not before now, at which count can be taken leaving at least floor if nobody else takes or
// gives anything: the first that satisfies Enough, which once true stays true, but for rounding. Beyond [Max] it is Max.
func (l Limit) When(rows []Row, shards int, count, floor float64, now Micros) Micros {
	enough := func(at Micros) bool { return l.Enough(rows, shards, count, floor, at) }
	if now >= Max || enough(now) {
		return now
	}
	// A quotient says where about; rounding makes it wrong by little.
	guess := now + 1
	periods := (floor + count - l.Total(rows, now)) / l.Rate
	if l.Window {
		periods = math.Ceil(periods)
	}
	if wait := float64(periods * float64(l.Period.Microseconds())); wait < float64(Max-now) {
		guess = max(guess, l.UpTo(now)+Micros(wait))
	}
	return firstAfter(now, guess, enough)
}

// firstAfter is the first instant that satisfies a predicate which does not hold before and, once true, stays true; Max if there is
// none. It begins at a guess.
func firstAfter(before, guess Micros, holds func(Micros) bool) Micros {
	last := Max
	for step := Micros(1); before < guess && guess < last; step *= 8 {
		if holds(guess) {
			last = guess
			guess -= min(step, last-before)
		} else {
			before = guess
			guess += min(step, last-before)
		}
	}
	for before+1 < last {
		mid := before + (last-before)/2
		if holds(mid) {
			last = mid
		} else {
			before = mid
		}
	}
	return last
}

// seconds is date_part('epoch', an interval of so many microseconds that subtracting two timestamps made): such an
// interval counts whole days apart.
func seconds(us Micros) float64 {
	const day = 24 * 60 * 60
	return float64(us%(day*1e6))/1e6 + float64(float64(us/(day*1e6))*day)
}

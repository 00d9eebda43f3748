// Package algebra is the arithmetic of the limits: pure functions over a limit, its rows and an instant.
//
// It does the sums of ratelimit_available and ratelimit_apply in the same order and to the same bit, so that Go can say
// when the database will grant something. Products are converted to float64 before they are added to: Go may otherwise
// fuse the two operations (arm64), Postgres does not.
package algebra

import (
	"math"
	"time"
)

// Slack is how many tokens a sum over shards may lack through rounding. A single row is exact.
const Slack = 1e-9

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
	rate, capacity, period := l.Rate/float64(n), l.Capacity/float64(n), float64(l.Period.Microseconds())/1e6
	var refill float64
	if l.Window {
		begun := math.RoundToEven(seconds(l.UpTo(now)-l.UpTo(row.TS)) / period)
		refill = float64(max(begun, 0) * rate)
	} else {
		refill = float64(max(seconds(now-row.TS), 0)*rate) / period
	}
	if available := row.Value + refill; available < capacity {
		return available
	}
	return capacity // if it is NaN, too, which is above all numbers in Postgres
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
	if max(len(rows), shards) > 1 {
		floor -= Slack
	}
	return l.Total(rows, now)-count >= floor
}

// Take is what the rows hold after count was taken at now (given back, if it is negative) by a limit of so many shards:
// what is left, at most the capacity, spread evenly.
func (l Limit) Take(rows []Row, shards int, count float64, now Micros) []Row {
	left := min(l.Total(rows, now)-count, l.Capacity) / float64(shards)
	latest := now
	for _, row := range rows {
		latest = max(latest, row.TS)
	}
	after := make([]Row, shards)
	for i := range after {
		after[i] = Row{Value: left, TS: latest}
		if len(rows) == shards {
			after[i].TS = max(rows[i].TS, now)
		}
	}
	return after
}

// When is the first instant, not before now, at which count can be taken leaving at least floor if nobody else takes or
// gives anything: the first that satisfies Enough, which once true stays true, but for rounding. Beyond [Max] it is Max.
func (l Limit) When(rows []Row, shards int, count, floor float64, now Micros) Micros {
	if now >= Max || l.Enough(rows, shards, count, floor, now) {
		return now
	}
	// Not before `before`, nor later than `last`. A quotient says where about; rounding makes it wrong by little.
	before, last := now, Max
	periods := (floor + count - l.Total(rows, now)) / l.Rate
	if l.Window {
		periods = math.Ceil(periods)
	}
	guess := before + 1
	if wait := float64(periods * float64(l.Period.Microseconds())); wait < float64(Max-now) {
		guess = max(guess, l.UpTo(now)+Micros(wait))
	}
	for step := Micros(1); before < guess && guess < last; step *= 8 {
		if l.Enough(rows, shards, count, floor, guess) {
			last = guess
			guess -= min(step, last-before)
		} else {
			before = guess
			guess += min(step, last-before)
		}
	}
	for before+1 < last {
		mid := before + (last-before)/2
		if l.Enough(rows, shards, count, floor, mid) {
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

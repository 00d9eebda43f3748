// Package algebra is the arithmetic of limits: pure functions of a limit, its rows and an instant.
//
// It does the sums of ratelimit._available and ratelimit._apply in the same order and to the same bit, so that Go can
// predict the database's decisions. Products are converted to float64 before they are added to. Otherwise Go may fuse the
// two operations (on arm64), and Postgres does not.
package algebra

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"sort"
	"time"
)

// The tolerance: rounding alone denies nothing. A call is granted if what is missing is at most this share of the range in which
// balances may lie, and at most this many tokens. So whole tokens stay exact at every capacity. ratelimit._tolerance has the
// same numbers.
const (
	toleranceShare  = 1e-9
	toleranceTokens = 1e-3
)

// sumTokens is how much of that a refill over several shards needs, to be due at the very microsecond.
const sumTokens = 1e-9

// Bounds of rates. They also bound capacities, counts and reservations other than 0. Tokens are doubles, which are exact
// for whole numbers far beyond MaxTokens.
const (
	MinTokens = 1e-15
	MaxTokens = 1e15
)

// Micros is an instant in microseconds since the Unix epoch: the database's resolution.
type Micros int64

// The arithmetic is defined from Min to Max.
var (
	Min = At(time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC))
	Max = At(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)) - 1
)

// At truncates t to microseconds.
func At(t time.Time) Micros { return Micros(t.UnixMicro()) }

// Time is the inverse of At, in UTC.
func (m Micros) Time() time.Time { return time.UnixMicro(int64(m)).UTC() }

// Limit is a limit's numbers. Each of the n rows of a sharded limit has Rate/n and Capacity/n.
type Limit struct {
	Rate     float64 // tokens per Period
	Period   time.Duration
	Capacity float64
	Window   bool   // a fixed or calendar window, not a token bucket
	Start    Micros // of a fixed window: an instant of its grid, before all other instants that occur

	// Windows is set for a calendar window: the starts of its windows around the present, in order, at least one. Refills
	// after the last one are not counted. Period is the longest that a window can be or, if windows before
	// the first one are not counted, 0. (It is a pointer so that limits can be compared.)
	Windows *[]Micros
}

// Grid is the start of a fixed window that has none of its own: the first instant, from the year 1 on, of the grid that belongs to
// a key or, if the limit has no keys, to its name.
func Grid(owner string, period time.Duration) Micros {
	h := sha256.Sum256([]byte(owner))
	return Min + Micros(binary.BigEndian.Uint64(h[:])>>1)%Micros(period.Microseconds())
}

// Row is the state of one row: the tokens left at its last use, and the instant of that use.
type Row struct {
	Value float64
	TS    Micros
}

// UpTo is the instant up to which refills count at now: now itself, or the start of the current window for a fixed window.
func (l Limit) UpTo(now Micros) Micros {
	if !l.Window || l.Windows != nil {
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

// Available is how many tokens a row holds at now. The limit has n rows.
//
//	token bucket:  min(capacity, value + elapsed*rate/period)
//	window:        min(capacity, value + windows begun since ts * rate)
//
// Time that runs backwards refills nothing.
func (l Limit) Available(row Row, n int, now Micros) float64 {
	capacity := l.Capacity / float64(n)
	refill := l.refill(row.TS, now, float64(n))
	if l.Windows != nil && l.Period == 0 && row.TS < (*l.Windows)[0] && row.Value+refill < capacity {
		refill = 0 // what the list does not fill is not known
	}
	if available := row.Value + refill; available < capacity {
		return available
	}
	return capacity // also for NaN, which is above all numbers in Postgres
}

// refill is how many tokens one of n rows gets between two instants, if it has room for them.
func (l Limit) refill(from, to Micros, n float64) float64 {
	rate, period := l.Rate/n, float64(l.Period.Microseconds())/1e6
	switch {
	case l.Windows != nil:
		return float64(max(l.begun(from, to)+l.unlisted(from, to), 0) * rate)
	case l.Window:
		return float64(max(l.begun(from, to), 0) * rate)
	}
	return float64(max(seconds(to-from), 0)*rate) / period
}

// begun is how many windows have begun between two instants. It is negative if to is before from. Of a calendar, only
// those in Windows are counted.
func (l Limit) begun(from, to Micros) float64 {
	if l.Windows != nil {
		return float64(l.number(to) - l.number(from))
	}
	return math.RoundToEven(seconds(l.UpTo(to)-l.UpTo(from)) / (float64(l.Period.Microseconds()) / 1e6))
}

// number is how many of a calendar's windows have begun by an instant.
func (l Limit) number(at Micros) int {
	return sort.Search(len(*l.Windows), func(i int) bool { return (*l.Windows)[i] > at })
}

// unlisted is a lower bound of how many of a calendar's windows have begun between two instants and before the first one
// in Windows: as many as if all were as long as the longest.
func (l Limit) unlisted(from, to Micros) float64 {
	first := (*l.Windows)[0]
	if from >= first || l.Period == 0 {
		return 0
	}
	return max(math.Ceil(seconds(min(first, to)-from)/(float64(l.Period.Microseconds())/1e6))-1, 0)
}

// NextWindow is when the next window begins, or Max if that is not known.
func (l Limit) NextWindow(now Micros) Micros {
	switch {
	case l.Windows == nil:
		return min(l.UpTo(now)+Micros(l.Period.Microseconds()), Max)
	case l.number(now) == len(*l.Windows):
		return Max
	}
	return (*l.Windows)[l.number(now)]
}

// Listed is how many of Windows begin after now.
func (l Limit) Listed(now Micros) int { return len(*l.Windows) - l.number(now) }

// Unknown reports whether refills at an instant are unknown, because it lies after the last window in Windows.
func (l Limit) Unknown(at Micros) bool {
	return l.Windows != nil && at > (*l.Windows)[len(*l.Windows)-1]
}

// Total is how many tokens all rows of a limit hold together at now. Without rows it is the capacity. If all rows are full
// it is the capacity too, although the sum of many shares may differ by rounding. Other equal shares are multiplied, since
// repeated addition would round in the same direction each time, by more than a small count.
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

// tolerance is how many tokens a call may lack because of rounding, if it may leave a balance of lowest.
func (l Limit) tolerance(lowest float64) float64 {
	return min(float64((l.Capacity-lowest)*toleranceShare), toleranceTokens)
}

// Lowest is the lowest balance that a call may leave if rounding alone must not deny it: floor, less the tolerance. No call leaves
// less, so the tolerance of several calls does not add up. The database gets it as the floor.
func (l Limit) Lowest(floor float64) float64 { return floor - l.tolerance(floor) }

// even is the balance from which on nothing is owed, for a limit whose balance is total now. A refill that repays a debt is rounded,
// too, also where the capacity is 0.
func (l Limit) even(total float64) float64 { return -l.tolerance(min(total, 0) - l.Rate) }

// Holds reports whether a full limit has count tokens.
func (l Limit) Holds(count float64) bool { return l.Capacity-count >= l.Lowest(0) }

// Due is the balance that a call leaves when its tokens have been refilled, in that many rows. A token bucket refills a rest in a
// moment, so there it is floor, without the tolerance: one token an hour is due in an hour, not a billionth earlier. (Or what is left
// of all that it can hold.) A window would refill a rest a window later.
func (l Limit) Due(rows int, count, floor float64) float64 {
	lowest := l.Lowest(floor)
	switch {
	case l.Window:
		return lowest
	case rows > 1:
		floor -= sumTokens
	}
	return max(lowest, min(floor, l.Capacity-count))
}

// Enough reports whether count can be taken at now, leaving at least floor, but for the tolerance.
func (l Limit) Enough(rows []Row, count, floor float64, now Micros) bool {
	return l.Total(rows, now)-count >= l.Lowest(floor)
}

// Whole is the largest whole number of tokens, up to most, that can be taken at now. It is below 1 if there is not one token.
func (l Limit) Whole(rows []Row, most float64, now Micros) float64 {
	return min(most, l.whole(l.Total(rows, now), l.Lowest(0)))
}

// whole is the largest whole number of tokens that can be taken from total and leaves at least lowest.
func (l Limit) whole(total, lowest float64) float64 {
	n := math.Floor(total - lowest)
	if total-n < lowest { // the difference was rounded up to a whole number
		n--
	}
	return n
}

// Shown is a balance as callers see it. If it lacks only the tolerance of a whole number, it is that number: so many tokens can be
// taken. What is less than the smallest count is 0, as is a debt that rounding alone makes.
func (l Limit) Shown(total float64) float64 {
	switch {
	case total >= MinTokens:
		return max(total, l.whole(total, l.Lowest(0)))
	case total >= l.even(total):
		return 0
	}
	return total
}

// Take returns the rows after count was taken at now, or given back if it is negative. The rest, at most the capacity, is
// spread evenly over the shards.
func (l Limit) Take(rows []Row, shards int, count float64, now Micros) []Row {
	return l.Spread(rows, shards, min(l.Total(rows, now)-count, l.Capacity), now)
}

// Spread returns the rows of a limit after the balance at now has been spread evenly over its shards.
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

// Move returns the rows of one limit and key after what is used of another was counted against it at now. The balance becomes the
// capacity less the tokens that are used of from, at least floor, and never more than it is. The rows of from stay as they are.
//
// The ts becomes the latest of all rows, also those of from, so that nothing is refilled for a time in which from was used already.
func (l Limit) Move(rows []Row, shards int, from Limit, used []Row, floor float64, now Micros) []Row {
	left := min(l.Total(rows, now), max(floor, l.Capacity-(from.Capacity-from.Total(used, now))))
	return l.Spread(nil, shards, left, latest(used, latest(rows, now)))
}

// Pause returns the rows after everything but most tokens was taken at now, and nothing is refilled before until. It never raises a balance,
// and what another pause has stopped until later stays stopped.
func (l Limit) Pause(rows []Row, most float64, until, now Micros) []Row {
	return l.Spread(nil, len(rows), min(l.Total(rows, now), most), latest(rows, max(until, now)))
}

// Resume returns the rows with the refill going on at now, where it goes on only later.
func Resume(rows []Row, now Micros) []Row {
	after := make([]Row, len(rows))
	for i, row := range rows {
		after[i] = Row{Value: row.Value, TS: min(row.TS, now)}
	}
	return after
}

// Paused is the instant before which nothing is refilled, if that is more than a second after now. A row that is read just after the clock
// may have been used a moment later, and is not paused.
func Paused(rows []Row, now Micros) (until Micros, paused bool) {
	until = latest(rows, now)
	return until, until > now+1e6
}

// latest is now, or the latest use of the rows if the clock has stepped back behind it.
func latest(rows []Row, now Micros) Micros {
	for _, row := range rows {
		now = max(now, row.TS)
	}
	return now
}

// Repaid is the first instant from now on at which nothing is owed, if nothing else is taken or given back meanwhile.
func (l Limit) Repaid(rows []Row, now Micros) Micros {
	if l.Window {
		return l.When(rows, 0, l.even(l.Total(rows, now)), now)
	}
	return l.When(rows, 0, 0, now)
}

// When is now if count can be taken, leaving at least floor, or else the first instant at which the tokens for it have been refilled
// (see [Limit.Due]). Nothing else is taken or given back meanwhile. Enough is true from then on, except for rounding. Beyond [Max]
// it is Max.
func (l Limit) When(rows []Row, count, floor float64, now Micros) Micros {
	if now >= Max || l.Enough(rows, count, floor, now) {
		return now
	}
	due := l.Due(len(rows), count, floor)
	refilled := func(at Micros) bool { return l.Total(rows, at)-count >= due }
	// A quotient gives an estimate, which rounding makes a little wrong.
	guess := now + 1
	periods := (floor + count - l.Total(rows, now)) / l.Rate
	if l.Window {
		periods = math.Ceil(periods)
	}
	if l.Windows != nil {
		if last := len(*l.Windows) - 1; l.number(now)+int(min(periods, 1e6))-1 <= last {
			guess = max(guess, (*l.Windows)[max(l.number(now)+int(periods)-1, 0)])
		}
	} else if wait := float64(periods * float64(l.Period.Microseconds())); wait < float64(Max-now) {
		guess = max(guess, l.UpTo(now)+Micros(wait))
	}
	return firstAfter(now, guess, refilled)
}

// First is the first instant, from now on, that satisfies holds, or [Max] if there is none. Once holds is true, it must stay true.
func First(now Micros, holds func(Micros) bool) Micros {
	if now >= Max || holds(now) {
		return now
	}
	return firstAfter(now, now+1, holds)
}

// firstAfter is the first instant, after before, that satisfies holds, or Max if there is none. Once holds is true, it must
// stay true. The search begins at guess.
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

// seconds is date_part('epoch', interval) for the difference of two timestamps. Such an interval counts whole days
// separately.
func seconds(us Micros) float64 {
	const day = 24 * 60 * 60
	return float64(us%(day*1e6))/1e6 + float64(float64(us/(day*1e6))*day)
}

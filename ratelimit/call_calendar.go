package ratelimit

import (
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Which windows of a calendar a call knows. Other kinds need no list.

const (
	// maxBack bounds, in windows, how far back the windows are listed.
	maxBack = 1000
	// maxDebt is how many windows of debt every call lists. A longer list costs time: 100 windows a fifth of a call.
	maxDebt = 12
	// maxWait bounds, in windows, how far ahead an instant is worked out.
	maxWait = 40_000
)

// setNumbers sets the demands' numbers. A calendar's windows are listed around now; old: also those for an old debt.
func setNumbers(does *rules, ds []demand, now pgtype.Timestamptz, old bool) {
	for i := range ds {
		d := &ds[i]
		d.numbers = d.limit.forKey(d.key)
		if d.limit.onCalendar() {
			at := time.Now()
			if now.Valid {
				at = now.Time
			}
			d.numbers.Windows, d.numbers.Period = d.limit.windows(does, algebra.At(at), old)
			d.numbers.Start = (*d.numbers.Windows)[0]
		}
	}
}

// windows is the list of a calendar's windows for a call. It reaches back so far that a row is full that owes no more than usual or,
// with old, a hundred windows: see [call.unsure]. longest is the longest window before the list, or 0 if those are not counted.
func (l Limit) windows(does *rules, now algebra.Micros, old bool) (windows *[]algebra.Micros, longest time.Duration) {
	owed := float64(maxDebt)                                                      // windows
	if old || does.owes != noTokens || does.refunds || does.moves || does.holds { // these verbs read or make debts
		owed, longest = maxAhead, l.calendar.Longest()
	} else if !math.IsInf(l.maxReserved, 1) {
		owed = max(owed, l.maxOwed()/l.numbers.Rate)
	}
	back := int(min(math.Ceil(l.numbers.Capacity/l.numbers.Rate+owed)+1, maxBack))
	if back == maxBack { // it may not fill a row
		longest = l.calendar.Longest()
	}
	return listAround(l.calendar, now, back, l.ahead(does)), longest
}

// ahead is how many windows after the present one a call lists at least. If its work may wait, a job after the end of the list would
// forfeit more than may be owed, unless the capacity is that of more windows, or the count is above it. Those jobs are denied.
func (l Limit) ahead(does *rules) int {
	if does.refunds || does.owes == upToMaxReserved {
		return 2 + int(min(math.Ceil((l.numbers.Capacity+l.maxOwed())/l.numbers.Rate), 2*maxAhead))
	}
	return 2
}

// reaching is the demand's numbers, with a list of windows that reaches to where its tokens will be there.
func (d *demand) reaching(rows []algebra.Row, now algebra.Micros) algebra.Limit {
	return d.reachingTo(now, rows, now)
}

// reachingTo is like reaching, with a list that reaches to an instant, too.
func (d *demand) reachingTo(until algebra.Micros, rows []algebra.Row, now algebra.Micros) algebra.Limit {
	numbers := d.numbers
	if numbers.Windows == nil || numbers.Unknown(now) {
		return numbers
	}
	windows := *numbers.Windows
	slowest := numbers.Rate / float64(max(len(rows), 1)) // all shards but one may be full
	missing := int(min(max(math.Ceil((d.count-numbers.Total(rows, now))/slowest), 0)+1, maxWait))
	latest := now // nothing is refilled before a row's instant, which may lie ahead
	for _, row := range rows {
		latest = max(latest, min(row.TS, algebra.Max))
	}
	present := d.limit.calendar.Number(now)
	if latest > now {
		missing = min(missing+d.limit.calendar.Number(latest)-present, maxWait)
	}
	if until > now {
		missing = max(missing, min(d.limit.calendar.Number(until)-present+1, maxWait))
	}
	if ahead := numbers.Listed(now); missing > ahead {
		last := d.limit.calendar.Number(windows[len(windows)-1])
		longer := slices.Concat(windows, d.limit.calendar.Between(last+1, last+missing-ahead))
		numbers.Windows = &longer
	}
	return numbers
}

// known is the demand itself or, if its calendar's list ends before a later instant, with the windows around that one.
func (d *demand) known(now, later algebra.Micros) *demand {
	if later <= now || !d.numbers.Unknown(later) {
		return d
	}
	around := []demand{*d}
	setNumbers(standing, around, pgtype.Timestamptz{Time: later.Time(), Valid: true}, false)
	return &around[0]
}

// unsure reports whether the call was denied although a calendar may have refilled enough: a row is older than the list of windows,
// and the list does not fill it.
func (c *call) unsure(a *answer) bool {
	if a.granted || c.old || !c.does.deniable {
		return false
	}
	for i, rows := range a.rows {
		l := c.demands[i].numbers
		n := len(rows)
		if l.Windows != nil && slices.ContainsFunc(rows, func(row algebra.Row) bool {
			return row.TS < (*l.Windows)[0] && l.Available(row, n, a.at) < l.Capacity/float64(n)
		}) {
			return true
		}
	}
	return false
}

// lookBack makes the lists of windows reach back far.
func (c *call) lookBack() {
	c.old = true
	setNumbers(c.does, c.demands, c.local, true)
}

package algebra

// This file has the two rules that keep what reservations were promised: that over any span, the jobs that run when they were told to
// take at most the capacity and what is refilled in the span, and that those of a fixed window fit each window.

// Demand is what a call asks of one limit and key.
type Demand struct {
	Limit  Limit
	Rows   []Row
	Shards int
	Count  float64
	Floor  float64 // the lowest balance that may be left
}

// Reserve decides demands together whose job may have to wait. It returns when the job may run, which is the same for all of them, and
// what each limit has left; granted says whether that is enough.
//
// While the job waits, its tokens are there already, or come in, and the limit goes on refilling. What would be refilled past the
// capacity until the job runs is forfeited: together with the job's tokens it would be more than the capacity at once. (In a fixed
// window that is what its present window has left when the job runs in a later one.) A count above the capacity forfeits nothing,
// since no promise can hold for it.
func Reserve(ds []Demand, now Micros) (runAt Micros, left []float64, granted bool) {
	own := make([]Micros, len(ds)) // when each limit alone would let the job run
	runAt = now
	for i, d := range ds {
		own[i] = d.Limit.When(d.Limit.Take(d.Rows, d.Shards, d.Count, now), d.Shards, 0, 0, now)
		runAt = max(runAt, own[i])
	}
	left = make([]float64, len(ds))
	granted = true
	for i, d := range ds {
		l := d.Limit
		left[i] = min(l.Total(d.Rows, now)-d.Count, l.Capacity)
		if runAt > now && d.Count <= l.Capacity && (l.Window || runAt > own[i]) {
			// In this order the sum of what is left and the refill is never below zero, by rounding, when the job runs.
			left[i] = min(left[i], l.Capacity-d.Count-l.refill(earliest(d.Rows, now), runAt, 1))
		}
		granted = granted && d.Enough(left[i])
	}
	return runAt, left, granted
}

// earliest is the earliest last use of the rows, if it is not before now: from when all of them are refilled at the latest.
func earliest(rows []Row, now Micros) Micros {
	first := latest(rows, now)
	for _, row := range rows {
		first = min(first, max(row.TS, now))
	}
	return first
}

// Enough says whether so much may be left, but for the rounding of a sum over shards.
func (d Demand) Enough(left float64) bool {
	return left >= d.Floor-slack(max(len(d.Rows), d.Shards))
}

// WhenReserved is the first instant, not before now, at which Reserve grants if nobody else takes or gives anything. Beyond [Max] it is
// Max.
func WhenReserved(ds []Demand, now Micros) Micros {
	enough := func(at Micros) bool {
		_, _, granted := Reserve(ds, at)
		return granted
	}
	if now >= Max || enough(now) {
		return now
	}
	guess := now + 1
	for _, d := range ds {
		guess = max(guess, d.Limit.When(d.Rows, d.Shards, d.Count, d.Floor, now)) // without what is forfeited
	}
	return firstAfter(now, guess, enough)
}

// Taken is what a refund has to know of a consumption.
type Taken struct {
	At    Micros  // when it was decided
	RunAt Micros  // when the job was told to run
	Count float64 // what was taken
	Held  float64 // what the rows that it took from held afterwards, together
	Part  float64 // which part of the limit they are: 1, or one of so many shards
}

// Refund is how many of count tokens a limit gets back. It gives back what harms no promise:
//
//   - a token bucket, what would still be missing by now if nobody else had taken anything since, less what waits. (What one shard
//     lacks is made up for at the rate of all of them, since what is left may be spread over all at any time.)
//   - a fixed window, all, if the window in which the job was to run is not over and is the last that anything was promised in. If the
//     job waits and the capacity is above the rate, that has to remain so. A job of more than the capacity gets nothing back.
//
// Several refunds of a token bucket that overlap can exceed the promise together. What holds then: since the first use, never more than
// the capacity and what was refilled in all that time. docs/refunds.md has the proof for fixed windows.
func (l Limit) Refund(rows []Row, taken Taken, count float64, now Micros) float64 {
	total := l.Total(rows, now)
	now = latest(rows, now)
	if now < taken.At || total >= l.Capacity {
		return 0 // the rows are not those that it was taken from, and the clock has stepped back; or they are full
	}
	if !l.Window {
		refilled := float64(seconds(now-taken.At)*l.Rate) / (float64(l.Period.Microseconds()) / 1e6)
		missing := float64(l.Capacity*taken.Part) - taken.Held - refilled
		return min(max(missing+min(total, 0), 0), count)
	}
	// Whether the limit owes anything still, so many windows from now.
	owes := func(total, windows float64) bool { return total+float64(windows*l.Rate) < -slack(len(rows)) }
	wait := l.begun(now, taken.RunAt)
	switch {
	case taken.Count > l.Capacity, wait < 0, owes(total, wait), wait > 0 && !owes(total, wait-1):
		return 0
	case wait > 0 && l.Capacity > l.Rate && !owes(total+count, wait-1):
		return 0
	}
	return count
}

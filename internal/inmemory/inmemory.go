// Package inmemory is a database in memory. It decides calls as the functions of migrations/engine do, to the same bit. Package
// ratelimittest wraps it for tests of users, package replay plays on it, and the library's own tests compare Postgres with it.
package inmemory

import (
	"math"
	"slices"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/decide"
)

// The values of the seam.
type (
	// ID is of a limit's rows.
	ID = decide.ID
	// Demand is one of a call.
	Demand = decide.Demand
	// Answer is the decision.
	Answer = decide.Answer
)

// Row is a row of ratelimit.limits. Its place in a list is its shard.
type Row struct {
	algebra.Row
	Shards   int            // the number of rows of the limit and key
	Promised algebra.Micros // the latest instant at which work that had to wait was told to run; 0: none
}

// Table is ratelimit.limits. The lists are never changed in place, so a copy of the map is a snapshot.
type Table map[ID][]Row

// Isolation is what the level of a transaction changes.
type Isolation bool

// Above READ COMMITTED, a call takes from the first of the two shards. In READ COMMITTED it takes from the fuller one.
const (
	ReadCommitted Isolation = false
	Higher        Isolation = true
)

// Consume takes the tokens of all demands, or of none. With reserve, their work may have to wait, but no longer than within.
func (t Table) Consume(ds []Demand, reserve bool, within algebra.Micros, level Isolation, now algebra.Micros) Answer {
	if d := ds[0]; len(ds) == 1 && d.Shards == 1 && !reserve && len(t[d.ID]) > 1 {
		if l := d.Limit; l.Windows != nil && l.Period == 0 && slices.ContainsFunc(t[d.ID], func(r Row) bool { return r.TS < (*l.Windows)[0] }) {
			return Answer{Rows: [][]algebra.Row{{{Value: math.Inf(-1), TS: algebra.Min}}}} // package ratelimit asks again, with a longer list
		}
		t.set(d, d.Limit.Take(t.rows(d.ID), 1, 0, now)) // ratelimit._consume merges the rows first, whatever its decision
	}
	if a, ok := t.fromOneRowEach(ds, reserve, level, now); ok {
		return a
	}
	demands := t.asked(ds)
	granted, lefts := enough(demands, now)
	runAt := now
	if reserve {
		runAt, lefts, granted = algebra.Reserve(demands, now, within)
	}
	if granted {
		before := t.all(ds)
		t.leave(ds, lefts, now)
		for i, d := range ds {
			switch {
			case !reserve:
				t.promise(d.ID, d.Limit.Promise(lefts[i], d.Lowest, before[i], now))
			case runAt > now:
				t.promise(d.ID, runAt)
			}
		}
	}
	return Answer{Granted: granted, Rows: t.all(ds)}
}

// Take takes as many tokens as all demands have, the same whole number of each, up to most. Their counts are 1.
func (t Table) Take(ds []Demand, most float64, now algebra.Micros) Answer {
	a := t.Check(ds, now)
	if !a.Granted {
		return a
	}
	demands := t.asked(ds)
	a.Taken = most
	for _, d := range demands {
		a.Taken = min(a.Taken, d.Limit.Whole(d.Rows, most, now))
	}
	for i := range demands {
		demands[i].Count = a.Taken
	}
	_, lefts := enough(demands, now)
	t.leave(ds, lefts, now)
	a.Rows = t.all(ds)
	return a
}

// Check reports whether all demands have enough, and changes nothing.
func (t Table) Check(ds []Demand, now algebra.Micros) Answer {
	granted, _ := enough(t.asked(ds), now)
	return Answer{Granted: granted, Rows: t.all(ds)}
}

// fromOneRowEach takes from one row of every limit, if each row has enough alone. A shard or a reservation takes only
// tokens that the row has.
func (t Table) fromOneRowEach(ds []Demand, reserve bool, level Isolation, now algebra.Micros) (a Answer, ok bool) {
	picked := make([]int, len(ds))
	for i, d := range ds {
		lowest := d.Lowest
		if d.Shards > 1 || reserve {
			lowest = 0
		}
		if picked[i] = t.pick(d, level, now); picked[i] < 0 || available(d, t[d.ID][picked[i]], now)-d.Count < lowest {
			return Answer{}, false
		}
	}
	a.Granted = true
	for i, d := range ds {
		rows := append([]Row(nil), t[d.ID]...)
		row := &rows[picked[i]]
		row.Value = available(d, *row, now) - d.Count
		row.TS = max(row.TS, now)
		t[d.ID] = rows
		a.Rows = append(a.Rows, []algebra.Row{row.Row})
		t.promise(d.ID, d.Limit.Promise(row.Value, d.Lowest, a.Rows[i], now))
	}
	return a, true
}

// pick returns the shard to take from, or -1 if the limit has no rows, or another number of rows than shards.
func (t Table) pick(d Demand, level Isolation, now algebra.Micros) int {
	rows := t[d.ID]
	if len(rows) != d.Shards {
		return -1
	}
	a, b := int(min(d.Pick[0], d.Pick[1])), int(max(d.Pick[0], d.Pick[1]))
	switch {
	case level == Higher:
		return int(d.Pick[0])
	case available(d, rows[b], now) > available(d, rows[a], now):
		return b
	}
	return a
}

// available returns the tokens in one of the demand's shards.
func available(d Demand, row Row, now algebra.Micros) float64 {
	return d.Limit.Available(row.Row, d.Shards, now)
}

// asked are the demands with their rows.
func (t Table) asked(ds []Demand) []algebra.Demand {
	demands := make([]algebra.Demand, len(ds))
	for i, d := range ds {
		demands[i] = algebra.Demand{Limit: d.Limit, Rows: t.rows(d.ID), Shards: d.Shards, Count: d.Count, Lowest: d.Lowest}
	}
	return demands
}

// enough reports whether all demands have enough, by all their rows. lefts is the balance that each limit would have left.
func enough(demands []algebra.Demand, now algebra.Micros) (granted bool, lefts []float64) {
	granted = true
	for _, d := range demands {
		left := d.Limit.Total(d.Rows, now) - d.Count
		granted = granted && d.Enough(left)
		lefts = append(lefts, min(left, d.Limit.Capacity))
	}
	return granted, lefts
}

// leave leaves the demands' limits a balance, in equal shares.
func (t Table) leave(ds []Demand, lefts []float64, now algebra.Micros) {
	for i, d := range ds {
		t.set(d, d.Limit.Spread(t.rows(d.ID), d.Shards, lefts[i], now))
	}
}

// Refund gives tokens back, as many as break no promise.
func (t Table) Refund(ds []Demand, taken []algebra.Taken, now algebra.Micros) Answer {
	a := Answer{Granted: true, Moved: make([]float64, len(ds))}
	for i, d := range ds {
		rows := t.rows(d.ID)
		if d.Shards = len(rows); d.Shards == 0 {
			continue
		}
		taken[i].Promised = t.promised(d.ID)
		if taken[i].Promised > now {
			a.Waiting = append(a.Waiting, i+1)
		}
		if a.Moved[i] = d.Limit.Refund(rows, taken[i], d.Count, now); a.Moved[i] > 0 {
			t.set(d, d.Limit.Take(rows, d.Shards, -a.Moved[i], now))
		}
	}
	a.Rows = t.all(ds)
	return a
}

// Move counts what is used of one limit and key against another, whose balance is floor or more afterwards. Rows that were missing
// are full.
func (t Table) Move(from, to Demand, floor float64, now algebra.Micros) {
	for _, d := range []Demand{from, to} {
		t.fill(d, now)
	}
	t.set(to, to.Limit.Move(t.rows(to.ID), to.Shards, from.Limit, t.rows(from.ID), floor, now))
	t.promise(to.ID, t.promised(from.ID))
}

// Pause empties token buckets to their counts, and refills nothing before until. It returns when all of them are
// refilled.
func (t Table) Pause(ds []Demand, until, now algebra.Micros) (ends algebra.Micros) {
	for _, d := range ds {
		t.fill(d, now)
		d.Shards = len(t[d.ID])
		rows := d.Limit.Pause(t.rows(d.ID), d.Count, until, now)
		t.set(d, rows)
		ends = max(ends, rows[0].TS)
	}
	return ends
}

// Resume ends pauses.
func (t Table) Resume(ds []Demand, now algebra.Micros) {
	for _, d := range ds {
		rows := t.rows(d.ID)
		if d.Shards = len(rows); d.Shards > 0 {
			t.set(d, algebra.Resume(rows, now))
		}
	}
}

// Reset makes limits full again.
func (t Table) Reset(ds []Demand) {
	for _, d := range ds {
		delete(t, d.ID)
	}
}

// fill makes the rows of a limit that has none: it is full.
func (t Table) fill(d Demand, now algebra.Micros) {
	if len(t[d.ID]) == 0 {
		t.set(d, d.Limit.Spread(nil, d.Shards, d.Limit.Capacity, now))
	}
}

func (t Table) set(d Demand, rows []algebra.Row) {
	promised := t.promised(d.ID)
	list := make([]Row, len(rows))
	for i, row := range rows {
		list[i] = Row{row, d.Shards, promised}
	}
	t[d.ID] = list
}

// promised is the latest instant at which work of a limit and key that had to wait was told to run.
func (t Table) promised(id ID) (at algebra.Micros) {
	for _, row := range t[id] {
		at = max(at, row.Promised)
	}
	return at
}

// promise notes in all rows that work was told to run at an instant.
func (t Table) promise(id ID, at algebra.Micros) {
	rows := slices.Clone(t[id])
	for i := range rows {
		rows[i].Promised = max(rows[i].Promised, at)
	}
	t[id] = rows
}

func (t Table) rows(id ID) []algebra.Row {
	var rows []algebra.Row
	for _, row := range t[id] {
		rows = append(rows, row.Row)
	}
	return rows
}

func (t Table) all(ds []Demand) [][]algebra.Row {
	all := make([][]algebra.Row, len(ds))
	for i, d := range ds {
		all[i] = t.rows(d.ID)
	}
	return all
}

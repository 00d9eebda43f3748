// Package inmemory decides calls on a table in memory, as the functions of migrations/engine do, to the same bit. It is the
// database of package ratelimittest, the decision of package replay, and the model that the library's own tests compare
// Postgres with.
package inmemory

import (
	"math"
	"slices"

	"github.com/txlimit/txlimit/internal/algebra"
)

// Consume lets package replay make package ratelimit decide on a [Table]. Package ratelimit sets it. Its type is
// func(*Limiter, Table, Limit, key string, count float64) (Result, algebra.Limit, error); this package cannot import those
// types.
var Consume any

// Mark is the argument of a method that only package ratelimittest can have. Package ratelimit recognizes its handles by
// that method.
type Mark struct{}

// ID is the key of a limit's rows.
type ID struct{ Name, Key string }

// Row is a row of rate_limits. Its place in a list is its shard.
type Row struct {
	algebra.Row
	Shards int // the number of rows of the limit and key
}

// Table is rate_limits. The lists are never changed in place, so a copy of the map is a snapshot.
type Table map[ID][]Row

// Demand is a call's demand for one limit and key.
type Demand struct {
	ID
	Limit  algebra.Limit
	Shards int
	Count  float64
	Floor  float64 // the lowest balance that may be left
	Most   float64 // above 0: take up to this many tokens; Count is then 1
	Pick   [2]int  // the shards to look at first
}

// Answer is the decision. Rows has the rows of each demand: after a grant the new ones, or the one shard that the tokens
// were taken from; otherwise those that led to the decision.
type Answer struct {
	Granted bool
	Rows    [][]algebra.Row
	Taken   float64 // from each demand with a Most, or 0
}

// Isolation is what the level of a transaction changes.
type Isolation bool

// Above READ COMMITTED, a call takes from the first of the two shards. In READ COMMITTED it takes from the fuller one.
const (
	ReadCommitted Isolation = false
	Higher        Isolation = true
)

// Consume takes the tokens of all demands, or of none. With reserve, their work may have to wait, but no longer than within.
func (t Table) Consume(ds []Demand, reserve bool, within algebra.Micros, level Isolation, now algebra.Micros) Answer {
	upTo := slices.ContainsFunc(ds, func(d Demand) bool { return d.Most > 0 })
	if d := ds[0]; !upTo && len(ds) == 1 && d.Shards == 1 && !reserve && len(t[d.ID]) > 1 {
		t.set(d, d.Limit.Take(t.rows(d.ID), 1, 0, now)) // _ratelimit_consume merges the rows first, whatever its decision
	}
	if !upTo { // upTo looks at all rows
		if a, ok := t.fromOneRowEach(ds, reserve, level, now); ok {
			return a
		}
	}
	a, lefts := t.decide(ds, reserve, within, now)
	if a.Granted {
		for i, d := range ds {
			t.set(d, d.Limit.Spread(t.rows(d.ID), d.Shards, lefts[i], now))
		}
	}
	a.Rows = t.all(ds)
	return a
}

// Check answers as Consume would, but changes nothing.
func (t Table) Check(ds []Demand, reserve bool, now algebra.Micros) Answer {
	a, _ := t.decide(ds, reserve, algebra.Forever, now)
	a.Rows = t.all(ds)
	return a
}

// fromOneRowEach takes from one row of every limit, if each row has enough alone. A shard or a reservation takes only
// tokens that the row has.
func (t Table) fromOneRowEach(ds []Demand, reserve bool, level Isolation, now algebra.Micros) (a Answer, ok bool) {
	picked := make([]int, len(ds))
	for i, d := range ds {
		floor := d.Floor
		if d.Shards > 1 || reserve {
			floor = 0
		}
		if picked[i] = t.pick(d, level, now); picked[i] < 0 || d.available(t[d.ID][picked[i]], now)-d.Count < floor {
			return Answer{}, false
		}
	}
	a.Granted = true
	for i, d := range ds {
		rows := append([]Row(nil), t[d.ID]...)
		row := &rows[picked[i]]
		row.Value = d.available(*row, now) - d.Count
		row.TS = max(row.TS, now)
		t[d.ID] = rows
		a.Rows = append(a.Rows, []algebra.Row{row.Row})
	}
	return a, true
}

// pick returns the shard to take from, or -1 if the limit has no rows, or another number of rows than shards.
func (t Table) pick(d Demand, level Isolation, now algebra.Micros) int {
	rows := t[d.ID]
	if len(rows) != d.Shards {
		return -1
	}
	a, b := min(d.Pick[0], d.Pick[1]), max(d.Pick[0], d.Pick[1])
	switch {
	case level == Higher:
		return d.Pick[0]
	case d.available(rows[b], now) > d.available(rows[a], now):
		return b
	}
	return a
}

// available returns the tokens in one of the demand's shards.
func (d Demand) available(row Row, now algebra.Micros) float64 {
	return d.Limit.Available(row.Row, d.Shards, now)
}

// decide decides on all rows of all limits. lefts is the balance that each limit would have left.
func (t Table) decide(ds []Demand, reserve bool, within, now algebra.Micros) (a Answer, lefts []float64) {
	demands := make([]algebra.Demand, len(ds))
	for i, d := range ds {
		demands[i] = algebra.Demand{Limit: d.Limit, Rows: t.rows(d.ID), Shards: d.Shards, Count: d.Count, Floor: d.Floor}
	}
	if reserve {
		_, lefts, a.Granted = algebra.Reserve(demands, now, within)
		return a, lefts
	}
	a.Granted = true
	for _, d := range demands {
		a.Granted = a.Granted && d.Enough(d.Limit.Total(d.Rows, now)-d.Count)
	}
	if a.Granted {
		a.Taken = whole(ds, demands, now)
	}
	for i, d := range demands {
		if ds[i].Most > 0 {
			d.Count = a.Taken
		}
		lefts = append(lefts, min(d.Limit.Total(d.Rows, now)-d.Count, d.Limit.Capacity))
	}
	return a, lefts
}

// whole returns how many tokens each demand with a Most can take: the same number for all, or 0.
func whole(ds []Demand, demands []algebra.Demand, now algebra.Micros) float64 {
	n := math.Inf(1)
	for i, d := range demands {
		if ds[i].Most > 0 {
			n = min(n, d.Limit.Whole(d.Rows, d.Shards, ds[i].Most, now))
		}
	}
	if math.IsInf(n, 1) {
		return 0
	}
	return n
}

// Refund gives tokens back, as many as break no promise. The answer has the rows as they were before.
func (t Table) Refund(ds []Demand, taken []algebra.Taken, now algebra.Micros) Answer {
	a := Answer{Granted: true, Rows: t.all(ds)}
	for i, d := range ds {
		rows := a.Rows[i]
		if len(rows) == 0 {
			continue
		}
		if back := d.Limit.Refund(rows, taken[i], d.Count, now); back > 0 {
			d.Shards = len(rows)
			t.set(d, d.Limit.Take(rows, len(rows), -back, now))
		}
	}
	return a
}

// Move counts what is used of one limit and key against another, whose balance is floor or more afterwards. Rows that were missing
// are full.
func (t Table) Move(from, to Demand, floor float64, now algebra.Micros) {
	for _, d := range []Demand{from, to} {
		if len(t[d.ID]) == 0 {
			t.set(d, d.Limit.Spread(nil, d.Shards, d.Limit.Capacity, now))
		}
	}
	t.set(to, to.Limit.Move(t.rows(to.ID), to.Shards, from.Limit, t.rows(from.ID), floor, now))
}

// Reset makes limits full again. It returns the number of deleted rows.
func (t Table) Reset(ids []ID) (deleted int) {
	for _, id := range ids {
		deleted += len(t[id])
		delete(t, id)
	}
	return deleted
}

func (t Table) set(d Demand, rows []algebra.Row) {
	list := make([]Row, len(rows))
	for i, row := range rows {
		list[i] = Row{row, d.Shards}
	}
	t[d.ID] = list
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

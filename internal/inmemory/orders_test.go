package inmemory

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// ended is a call that ends a hold, or a charge.
type ended struct {
	kind string // settle, lapse, late (a Settle after the lapse), charge
	job  int
	used float64
}

// ledger plays holds, their ends and charges on a table, beside plain sums.
type ledger struct {
	Table
	of    Demand
	taken []algebra.Taken
	kept  []float64 // by job: what did not come back when it lapsed
	sum   float64
}

func (l *ledger) take(count float64, now algebra.Micros) bool {
	d := l.of
	d.Count = count
	a := l.Consume([]Demand{d}, false, algebra.Forever, ReadCommitted, now)
	if a.Granted {
		held := 0.0
		for _, row := range a.Rows[0] {
			held += row.Value
		}
		part := float64(len(a.Rows[0])) / float64(d.Shards)
		l.taken = append(l.taken, algebra.Taken{At: now, RunAt: now, Count: count, Held: held, Part: part})
		l.kept = append(l.kept, count)
		l.sum -= count
	}
	return a.Granted
}

func (l *ledger) charge(count float64, now algebra.Micros) {
	d := l.of
	d.Count, d.Lowest = count, math.Inf(-1)
	l.Consume([]Demand{d}, false, algebra.Forever, ReadCommitted, now)
	l.sum -= count
}

func (l *ledger) giveBack(job int, count float64, now algebra.Micros) float64 {
	d := l.of
	d.Count = count
	l.sum += count
	return l.Refund([]Demand{d}, []algebra.Taken{l.taken[job]}, now).Moved[0]
}

func (l *ledger) end(e ended, now algebra.Micros) {
	switch {
	case e.kind == "charge":
		l.charge(e.used, now)
	case e.kind == "lapse":
		l.kept[e.job] -= l.giveBack(e.job, l.kept[e.job], now)
	case e.kind == "late":
		l.charge(max(e.used-l.kept[e.job], 0), now) // what it kept is paid
	case e.used > l.taken[e.job].Count:
		l.charge(e.used-l.taken[e.job].Count, now)
	default:
		l.giveBack(e.job, l.taken[e.job].Count-e.used, now)
	}
}

// TestOrders tries every order of up to five calls that end holds or charge, at one instant. What is left must not depend on the order
// and, while nothing was refilled since the holds, must be the plain sum.
func TestOrders(t *testing.T) {
	const noon = algebra.Micros(1_700_000_000_000_000)
	orders, differences := 0, 0
	for _, of := range orderLimits(noon) {
		for _, counts := range [][]float64{{5, 5}, {3, 6}, {4, 2, 3}} {
			for _, before := range []float64{0, 12} { // charged first
				for _, later := range []time.Duration{0, time.Second / 2} {
					for _, ends := range endings(counts) {
						sums := map[string]string{}
						permute(ends, func(order []ended) {
							l := &ledger{Table: Table{}, of: of, sum: of.Limit.Capacity}
							for _, count := range counts {
								if !l.take(count, noon) {
									return
								}
							}
							l.charge(before, noon)
							for _, e := range order {
								l.end(e, noon+algebra.Micros(later.Microseconds()))
							}
							left := of.Limit.Total(l.rows(of.ID), noon+algebra.Micros(later.Microseconds()))
							orders++
							sum := l.sum
							if !of.Limit.Window && later > 0 {
								sum = left // what was refilled meanwhile has come back already
							}
							if sums[fmt.Sprintf("%.6f", left)] = fmt.Sprint(order); math.Abs(left-sum) > 1e-6 || len(sums) > 1 {
								if differences++; differences < 5 {
									t.Errorf("%+v, %d shards: holds of %v, %v charged, after %v:\n%v\n%v are left, the plain sum is %v", of.Limit, of.Shards, counts, before, later, sums, left, l.sum)
								}
							}
						})
					}
				}
			}
		}
	}
	t.Logf("%d orders, %d differences", orders, differences)
}

func orderLimits(noon algebra.Micros) (limits []Demand) {
	months := []algebra.Micros{noon - 1e6, noon + 1e6, noon + 2e6, noon + 3e6, noon + 4e6}
	for _, shards := range []int{1, 2} {
		for _, rate := range []float64{4, 40} {
			l := algebra.Limit{Rate: rate, Period: time.Second, Capacity: 10}
			window, calendar := l, l
			window.Window, window.Start = true, noon%1e6
			calendar.Window, calendar.Windows = true, &months
			for _, l := range []algebra.Limit{l, window, calendar} {
				limits = append(limits, Demand{ID: ID{Name: "a", Key: "k"}, Limit: l, Shards: shards, Lowest: l.Lowest(0)})
			}
		}
	}
	return limits
}

// endings are what can be done with jobs of these counts, in up to five calls, as sets.
func endings(counts []float64) (all [][]ended) {
	all = [][]ended{{}}
	for job, count := range counts {
		var ways [][]ended
		for _, used := range []float64{0, count / 2, count + 1} {
			ways = append(ways, []ended{{"settle", job, used}})
		}
		ways = append(ways, []ended{{"lapse", job, 0}}, []ended{{"lapse", job, 0}, {"late", job, 1}})
		var more [][]ended
		for _, set := range all {
			for _, way := range ways {
				more = append(more, append(slices.Clip(set), way...))
			}
		}
		all = more
	}
	for _, set := range slices.Clone(all) {
		all = append(all, append(slices.Clip(set), ended{"charge", 0, 1}))
	}
	return slices.DeleteFunc(all, func(set []ended) bool { return len(set) < 2 || len(set) > 5 })
}

// permute calls f with every order in which a hold lapses before its late Settle.
func permute(set []ended, f func([]ended)) {
	var rec func(order, rest []ended)
	rec = func(order, rest []ended) {
		if len(rest) == 0 {
			f(order)
		}
		for i, e := range rest {
			if e.kind == "late" && slices.Contains(rest, ended{"lapse", e.job, 0}) {
				continue
			}
			rec(append(slices.Clip(order), e), slices.Delete(slices.Clone(rest), i, i+1))
		}
	}
	rec(nil, set)
}

package integration_test

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/txlimit/txlimit/internal/algebra"
)

// promised is what the jobs of one limit were promised: tokens that run at an instant. Those given back do not run.
type promised struct {
	at     algebra.Micros
	tokens float64
}

// excess is by how much jobs break the promise of their limit, in the span in which they do most: over any span they take at most
// the capacity and what is refilled in it, and those of a fixed window fit each window and any row of windows.
func excess(l algebra.Limit, jobs []promised) (worst float64) {
	jobs = slices.SortedFunc(slices.Values(jobs), func(a, b promised) int { return cmp.Compare(a.at, b.at) })
	period := float64(l.Period.Microseconds())
	for i := range jobs {
		tokens := 0.0
		for j := i; j < len(jobs); j++ {
			tokens += jobs[j].tokens
			refilled := float64(l.UpTo(jobs[j].at)-l.UpTo(jobs[i].at)) / period * l.Rate
			worst = max(worst, tokens-l.Capacity-refilled)
		}
	}
	return worst
}

// smallWorld is one in which all sequences of actions are tried, in the model.
type smallWorld struct {
	limits  []algebra.Limit
	shards  int
	counts  []float64 // that are consumed and reserved
	pick    int       // the shard that is tried first
	maxOwed float64
}

// smallState is what became of a small world. It is copied, never changed in place.
type smallState struct {
	now     algebra.Micros
	rows    [][]algebra.Row
	jobs    []smallJob
	refunds []smallRefund
	story   []string
}

type smallJob struct {
	began int // the action that it is
	runAt algebra.Micros
	parts []smallPart
}

// smallPart is what a job took of one limit.
type smallPart struct {
	limit int
	own   algebra.Micros // when that limit alone would let it run
	left  float64        // what was not given back
	taken algebra.Taken
}

// smallRefund is from when its job was granted to when it was refunded.
type smallRefund struct{ job, from, to int }

// overlapping says whether two refunds were under way at once.
func (s smallState) overlapping() bool {
	for i, a := range s.refunds {
		for _, b := range s.refunds[:i] {
			if a.from < b.to && b.from < a.to && a.job != b.job {
				return true
			}
		}
	}
	return false
}

func (w smallWorld) excess(s smallState, limit int, own bool) float64 {
	var jobs []promised
	for _, j := range s.jobs {
		for _, p := range j.parts {
			if p.limit != limit {
				continue
			}
			at := j.runAt
			if own {
				at = p.own
			}
			jobs = append(jobs, promised{at, p.left})
		}
	}
	return excess(w.limits[limit], jobs)
}

// consume asks for counts of some limits; with reserve, the job may wait.
func (w smallWorld) consume(s smallState, counts []float64, reserve bool) (smallState, bool) {
	job := smallJob{began: len(s.story), runAt: s.now}
	rows := slices.Clone(s.rows)
	byOne := true
	for i, count := range counts {
		if count > 0 {
			l := w.limits[i]
			if count > l.Capacity {
				return s, false
			}
			if w.shards == 1 {
				byOne = byOne && l.Enough(rows[i], 1, count, 0, s.now)
			} else {
				byOne = byOne && len(rows[i]) > 0 && l.Available(rows[i][w.pick], w.shards, s.now) >= count
			}
		}
	}
	var ds []algebra.Demand
	var places []int
	for i, count := range counts {
		if count == 0 {
			continue
		}
		l := w.limits[i]
		if byOne && w.shards > 1 {
			row := rows[i][w.pick]
			row = algebra.Row{Value: l.Available(row, w.shards, s.now) - count, TS: max(row.TS, s.now)}
			rows[i] = slices.Clone(rows[i])
			rows[i][w.pick] = row
			job.parts = append(job.parts, smallPart{i, s.now, count, algebra.Taken{At: s.now, RunAt: s.now, Count: count, Held: row.Value, Part: 1 / float64(w.shards)}})
			continue
		}
		floor := 0.0
		if reserve {
			floor = -w.maxOwed
		}
		ds = append(ds, algebra.Demand{Limit: l, Rows: rows[i], Shards: w.shards, Count: count, Floor: floor})
		places = append(places, i)
	}
	if len(ds) > 0 {
		runAt, left, granted := algebra.Reserve(ds, s.now)
		if !granted {
			return s, false
		}
		for k, d := range ds {
			i := places[k]
			rows[i] = d.Limit.Spread(d.Rows, d.Shards, left[k], s.now)
			job.parts = append(job.parts, smallPart{i, d.Limit.When(rows[i], w.shards, 0, 0, s.now), d.Count, algebra.Taken{At: s.now, RunAt: runAt, Count: d.Count, Held: held(rows[i]), Part: 1}})
		}
		job.runAt = runAt
	}
	s.rows = rows
	s.jobs = append(slices.Clip(s.jobs), job)
	return s, true
}

func held(rows []algebra.Row) (sum float64) {
	for _, row := range rows {
		sum += row.Value
	}
	return sum
}

// charge takes unconditionally.
func (w smallWorld) charge(s smallState, limit int, count float64) smallState {
	s.rows = slices.Clone(s.rows)
	s.rows[limit] = w.limits[limit].Take(s.rows[limit], w.shards, count, s.now)
	return s
}

// refund gives a part of a job back.
func (w smallWorld) refund(s smallState, job int, part float64) smallState {
	s.rows, s.jobs = slices.Clone(s.rows), slices.Clone(s.jobs)
	s.jobs[job].parts = slices.Clone(s.jobs[job].parts)
	for k := range s.jobs[job].parts {
		p := &s.jobs[job].parts[k]
		l, rows := w.limits[p.limit], s.rows[p.limit]
		asked := p.left * part
		if len(rows) > 0 {
			back := l.Refund(rows, p.taken, asked, s.now)
			p.taken.Held += min(back, max(-l.Total(rows, s.now), 0)) // what it has paid of a debt hides that somebody waits
			s.rows[p.limit] = l.Take(rows, len(rows), -back, s.now)
		}
		p.left -= asked
		p.taken.Held += asked // as if the job had taken less
	}
	s.refunds = append(slices.Clip(s.refunds), smallRefund{job, s.jobs[job].began, len(s.story)})
	return s
}

// actions are all that can be done.
func (w smallWorld) actions(s smallState) (after []smallState) {
	add := func(next smallState, format string, args ...any) {
		next.story = append(slices.Clip(s.story), fmt.Sprintf(format, args...))
		after = append(after, next)
	}
	for _, reserve := range []bool{false, true} {
		for i := range 1<<len(w.limits) - 1 {
			for _, count := range w.counts {
				counts := make([]float64, len(w.limits))
				for k := range counts {
					if (i+1)>>k&1 == 1 {
						counts[k] = count
					}
				}
				if next, ok := w.consume(s, counts, reserve); ok {
					add(next, "at %v: take %v, reserve %v", s.now, counts, reserve)
				}
			}
		}
	}
	add(w.charge(s, 0, 1), "at %v: charge 1", s.now)
	for j, job := range s.jobs {
		if job.parts[0].left > 0 {
			add(w.refund(s, j, 1), "at %v: refund job %d", s.now, j)
			add(w.refund(s, j, 0.5), "at %v: refund half of job %d", s.now, j)
		}
	}
	for _, step := range []time.Duration{time.Second / 2, time.Second, 2 * time.Second} {
		next := s
		next.now += algebra.Micros(step.Microseconds())
		add(next, "at %v: wait %v", s.now, step)
	}
	return after
}

type smallTally struct {
	sequences int
	worst     float64 // of token buckets with overlapping refunds, in capacities
}

// try tries all sequences of so many actions.
func (w smallWorld) try(t *testing.T, s smallState, actions int, tally *smallTally) {
	if actions == 0 {
		tally.sequences++
		return
	}
	for _, next := range w.actions(s) {
		if len(next.jobs) > len(s.jobs) {
			for i, l := range w.limits {
				for _, own := range []bool{false, true} {
					e := w.excess(next, i, own)
					if !own && len(next.refunds) > 0 && (!l.Window || l.Capacity > l.Rate) {
						continue // what the others wait for is not in its balance
					}
					overlapping := !l.Window && next.overlapping()
					if overlapping && e > 1e-9 {
						tally.worst = max(tally.worst, e/l.Capacity)
					}
					if e > 1e-9 && (!overlapping || e >= l.Capacity) {
						t.Fatalf("limit %d of %+v (own %v): %v too much\n%s\n%+v", i, w, own, e, strings.Join(next.story, "\n"), next.jobs)
					}
				}
			}
		}
		w.try(t, next, actions-1, tally)
		if t.Failed() {
			return
		}
	}
}

func TestReservationsKeepPromises(t *testing.T) {
	t.Parallel()
	bucket := func(capacity, rate float64) algebra.Limit {
		return algebra.Limit{Rate: rate, Period: time.Second, Capacity: capacity}
	}
	window := func(capacity, rate float64) algebra.Limit {
		return algebra.Limit{Rate: rate, Period: time.Second, Capacity: capacity, Window: true}
	}
	var worlds []smallWorld
	inf := math.Inf(1)
	for _, kind := range []func(c, r float64) algebra.Limit{window, bucket} {
		for _, capacity := range []float64{1, 2, 3} {
			for _, rate := range []float64{1, 2} {
				worlds = append(worlds, smallWorld{limits: []algebra.Limit{kind(capacity, rate)}, shards: 1, counts: []float64{1, 2, 3}[:int(capacity)], maxOwed: inf})
			}
		}
	}
	for _, shards := range []int{2, 3, 4} {
		for _, kind := range []func(c, r float64) algebra.Limit{window, bucket} {
			for pick := range 2 {
				worlds = append(worlds, smallWorld{limits: []algebra.Limit{kind(4, 2)}, shards: shards, counts: []float64{1, 2}, pick: pick, maxOwed: inf})
				worlds = append(worlds, smallWorld{limits: []algebra.Limit{kind(2, 4)}, shards: shards, counts: []float64{0.5, 1, 2}, pick: pick, maxOwed: inf})
			}
		}
	}
	two := func(a, b algebra.Limit, shards int, counts ...float64) smallWorld {
		b.Period *= 2
		b.Start = 500000
		return smallWorld{limits: []algebra.Limit{a, b}, shards: shards, counts: counts, maxOwed: inf}
	}
	for shards := 1; shards <= 2; shards++ {
		for _, a := range []algebra.Limit{window(2, 2), window(3, 1), bucket(2, 1), bucket(1, 2)} {
			for _, b := range []algebra.Limit{window(2, 2), window(3, 1), bucket(2, 1), bucket(1, 2)} {
				worlds = append(worlds, two(a, b, shards, 1, 2))
			}
		}
	}
	n := 5
	if e := os.Getenv("ACTIONS"); e != "" {
		fmt.Sscan(e, &n)
	}
	for _, w := range worlds {
		name := fmt.Sprintf("shards %d pick %d counts %v", w.shards, w.pick, w.counts)
		for _, l := range w.limits {
			name += fmt.Sprintf(", w %v cap %v rate %v", l.Window, l.Capacity, l.Rate)
		}
		t.Run(name, func(t *testing.T) {
			var tally smallTally
			start := algebra.At(noon)
			begin := time.Now()
			w.try(t, smallState{now: start, rows: make([][]algebra.Row, len(w.limits))}, n, &tally)
			t.Logf("%d sequences in %v, worst %v", tally.sequences, time.Since(begin), tally.worst)
		})
	}
}

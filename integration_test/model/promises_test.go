package model_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/integration_test/harness"
	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/inmemory"
	"github.com/txlimit/txlimit/internal/shardpick"
	"github.com/txlimit/txlimit/ratelimit"
)

// promises lets TestReservationsKeepPromises try longer sequences, and more of them on the database.
var promises = flag.Bool("promises", false, "look for longer sequences that break a promise, for minutes")

// TestReservationsKeepPromises looks for sequences of actions that break the promise. The promise: over any span, jobs that
// run at their instants take at most the capacity and the span's refill, and those of a fixed window fit each window. A job
// counts at the limit's own time to run. Refunded tokens do not run, charges are not counted, and a Reset or new numbers
// start a new promise.
func TestReservationsKeepPromises(t *testing.T) {
	t.Parallel()
	t.Run("every sequence in small worlds", testSmallWorlds)
	t.Run("concurrent callers", testPromisesOfConcurrentCallers)
}

// promised is the tokens of a job, and the instant at which it may run.
type promised struct {
	at     algebra.Micros
	tokens float64
}

// excess returns by how much jobs break their limit's promise, in the worst span. It sorts them.
func excess(l algebra.Limit, jobs []promised) (worst float64) {
	slices.SortFunc(jobs, func(a, b promised) int { return cmp.Compare(a.at, b.at) })
	for i := range jobs {
		tokens, from := 0.0, l.UpTo(jobs[i].at)
		for _, job := range jobs[i:] {
			tokens += job.tokens
			refilled := float64(l.UpTo(job.at)-from) / float64(l.Period.Microseconds()) * l.Rate
			worst = max(worst, tokens-l.Capacity-refilled)
		}
	}
	return worst
}

// rounding is the error that a sum may have, in tokens.
const rounding = 1e-6

// span is the life of a job from its grant to a partial refund, as numbers of actions.
type span struct{ job, from, to int }

// overlapping reports whether refunds of different jobs overlapped.
func overlapping(refunds []span) bool {
	for i, a := range refunds {
		for _, b := range refunds[:i] {
			if a.job != b.job && a.from < b.to && b.from < a.to {
				return true
			}
		}
	}
	return false
}

// broken returns by how much jobs break their limit's promise. If refunds of a token bucket overlap, it looks only at spans
// that start with the first job: from there, the jobs take at most the capacity and the refill.
func broken(l algebra.Limit, jobs []promised, refunds []span) float64 {
	if l.Window || !overlapping(refunds) {
		return excess(l, jobs)
	}
	tokens, worst := 0.0, 0.0
	slices.SortFunc(jobs, func(a, b promised) int { return cmp.Compare(a.at, b.at) })
	for _, job := range jobs {
		tokens += job.tokens
		worst = max(worst, tokens-l.Capacity-float64(job.at-jobs[0].at)/float64(l.Period.Microseconds())*l.Rate)
	}
	return worst
}

// smallWorld is a world in which the model tries all sequences of actions. Some of them also run on the database.
type smallWorld struct {
	limits []ratelimit.Limit
	counts []float64 // to consume and reserve
	pick   int       // the shard to look at first

	numbers []algebra.Limit
	shards  int
}

// smallAction takes counts (perhaps reserving), charges a token of the first limit, refunds a part of a job, or waits.
type smallAction struct {
	counts  []float64
	reserve bool
	charge  bool
	job     int
	part    float64
	wait    time.Duration
}

func (a smallAction) String() string {
	switch {
	case a.wait > 0:
		return fmt.Sprintf("wait %v", a.wait)
	case a.charge:
		return "charge 1"
	case a.part > 0:
		return fmt.Sprintf("refund %v of job %d", a.part, a.job)
	}
	return fmt.Sprintf("take %v, reserving: %v", a.counts, a.reserve)
}

// smallBegin is when a small world begins. Windows begin at noon: never when an action does.
var smallBegin = harness.Noon.Add(-250 * time.Millisecond)

// smallState is the state of a small world. It is copied, never changed in place.
type smallState struct {
	now     algebra.Micros
	rows    [][]algebra.Row
	waits   [4]algebra.Micros // by limit: until then, work waits
	jobs    []smallJob
	refunds []span
	done    []smallAction
}

type smallJob struct {
	began int // the number of its action
	runAt algebra.Micros
	parts []smallPart
}

// smallPart is what a job took from one limit.
type smallPart struct {
	limit int
	own   algebra.Micros // when that limit alone lets it run
	left  float64        // what was not refunded
	taken algebra.Taken
}

// try applies an action to a copy of the state.
func (w smallWorld) try(s smallState, a smallAction) (next smallState, granted bool) {
	granted = true
	switch {
	case a.wait > 0:
		s.now += algebra.Micros(a.wait.Microseconds())
	case a.charge:
		s = w.charge(s)
	case a.part > 0:
		s = w.refund(s, a)
	default:
		s, granted = w.take(s, a)
	}
	s.done = append(slices.Clip(s.done), a)
	return s, granted
}

// charge takes a token of the first limit, from one row if that row has it.
func (w smallWorld) charge(s smallState) smallState {
	l, rows := w.numbers[0], slices.Clone(s.rows[0])
	if len(rows) > 1 && l.Available(rows[w.pick], w.shards, s.now) >= 1 {
		rows[w.pick] = algebra.Row{Value: l.Available(rows[w.pick], w.shards, s.now) - 1, TS: max(rows[w.pick].TS, s.now)}
	} else {
		rows = l.Take(rows, w.shards, 1, s.now)
	}
	s.rows = slices.Clone(s.rows)
	s.rows[0] = rows
	return s
}

// take does what ratelimit._apply and its short forms do.
func (w smallWorld) take(s smallState, a smallAction) (smallState, bool) {
	job := smallJob{began: len(s.done), runAt: s.now}
	rows := slices.Clone(s.rows)
	atOnce := true // one row of each limit has enough
	for i, count := range a.counts {
		if count > w.numbers[i].Capacity {
			return s, false // it has no promise
		}
		if count > 0 && w.shards > 1 {
			atOnce = atOnce && len(rows[i]) > 0 && w.numbers[i].Available(rows[i][w.pick], w.shards, s.now) >= count
		} else if count > 0 {
			atOnce = atOnce && w.numbers[i].Enough(rows[i], count, 0, s.now)
		}
	}
	var ds []algebra.Demand
	var places []int
	for i, count := range a.counts {
		l := w.numbers[i]
		switch {
		case count == 0:
		case atOnce && w.shards > 1:
			row := rows[i][w.pick]
			row = algebra.Row{Value: l.Available(row, w.shards, s.now) - count, TS: max(row.TS, s.now)}
			rows[i] = slices.Clone(rows[i])
			rows[i][w.pick] = row
			taken := algebra.Taken{At: s.now, RunAt: s.now, Count: count, Held: row.Value, Part: 1 / float64(w.shards)}
			job.parts = append(job.parts, smallPart{i, s.now, count, taken})
		default:
			d := algebra.Demand{Limit: l, Rows: rows[i], Shards: w.shards, Count: count, Lowest: l.Lowest(0)}
			if a.reserve {
				d.Lowest = math.Inf(-1)
			}
			ds = append(ds, d)
			places = append(places, i)
		}
	}
	if len(ds) > 0 {
		runAt, lefts, granted := algebra.Reserve(ds, s.now, algebra.Forever)
		if !granted {
			return s, false
		}
		job.runAt = runAt
		for k, d := range ds {
			i := places[k]
			rows[i] = d.Limit.Spread(d.Rows, d.Shards, lefts[k], s.now)
			if runAt > s.now {
				s.waits[i] = max(s.waits[i], runAt)
			}
			held := 0.0
			for _, row := range rows[i] {
				held += row.Value
			}
			taken := algebra.Taken{At: s.now, RunAt: runAt, Count: d.Count, Held: held, Part: 1}
			job.parts = append(job.parts, smallPart{i, d.Limit.Repaid(rows[i], s.now), d.Count, taken})
		}
	}
	s.rows = rows
	s.jobs = append(slices.Clip(s.jobs), job)
	return s, true
}

func (w smallWorld) refund(s smallState, a smallAction) smallState {
	s.rows, s.jobs = slices.Clone(s.rows), slices.Clone(s.jobs)
	job := &s.jobs[a.job]
	job.parts = slices.Clone(job.parts)
	for k := range job.parts {
		p := &job.parts[k]
		l, rows := w.numbers[p.limit], s.rows[p.limit]
		asked := p.left * a.part
		p.taken.Promised = s.waits[p.limit]
		if back := l.Refund(rows, p.taken, asked, s.now); back > 0 && len(rows) > 0 {
			if p.taken.Promised > s.now {
				p.taken.Held += min(back, max(-l.Total(rows, s.now), 0))
			}
			s.rows[p.limit] = l.Take(rows, len(rows), -back, s.now)
		}
		p.left -= asked
		p.taken.Held += asked
	}
	s.refunds = append(slices.Clip(s.refunds), span{a.job, job.began, len(s.done)})
	return s
}

// actions returns all possible actions.
func (w smallWorld) actions(s smallState) (all []smallAction) {
	for _, reserve := range []bool{false, true} {
		for which := 1; which < 1<<len(w.limits); which++ {
			for _, count := range w.counts {
				a := smallAction{counts: make([]float64, len(w.limits)), reserve: reserve}
				for i := range a.counts {
					if which>>i&1 == 1 {
						a.counts[i] = count
					}
				}
				all = append(all, a)
			}
		}
	}
	all = append(all, smallAction{charge: true})
	for j, job := range s.jobs {
		if job.parts[0].left > 0 {
			all = append(all, smallAction{job: j, part: 1})
		}
		if job.parts[0].left > 0 && len(w.limits) == 1 {
			all = append(all, smallAction{job: j, part: 0.5})
		}
	}
	if len(w.limits) == 1 {
		all = append(all, smallAction{wait: time.Second / 2}, smallAction{wait: 2 * time.Second})
	}
	return append(all, smallAction{wait: time.Second})
}

// broken describes a broken promise, or returns an empty string.
func (w smallWorld) broken(s smallState) string {
	for i, l := range w.numbers {
		own, all := make([]promised, 0, 8), make([]promised, 0, 8) // at the limit's own time, and at the time of all limits
		for _, job := range s.jobs {
			for _, p := range job.parts {
				if p.limit == i {
					own = append(own, promised{p.own, p.left})
					all = append(all, promised{job.runAt, p.left})
				}
			}
		}
		if e := broken(l, own, s.refunds); e >= rounding {
			return fmt.Sprintf("%v: %v too much", w.limits[i], e)
		}
		// When all limits wait for one, the promise also holds at that time, as long as nothing is refunded.
		if e := excess(l, all); len(s.refunds) == 0 && e >= rounding {
			return fmt.Sprintf("%v, waiting for others: %v too much", w.limits[i], e)
		}
	}
	return ""
}

// every tries every sequence of a number of actions.
func (w smallWorld) every(t *testing.T, s smallState, actions int, ended func(smallState)) {
	if actions == 0 {
		ended(s)
		return
	}
	for _, a := range w.actions(s) {
		next, granted := w.try(s, a)
		if !granted {
			continue
		}
		if len(next.jobs) > len(s.jobs) {
			if how := w.broken(next); how != "" {
				t.Fatalf("%s\n%v\n%+v", how, next.done, next.jobs)
			}
		}
		w.every(t, next, actions-1, ended)
	}
}

// smallWorlds are limits of each kind, with a capacity below, at and above the rate, with shards, and two limits that wait
// for each other.
func smallWorlds() (worlds []smallWorld) {
	type define func(name string, rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Limit
	window := func(name string, rate float64, period time.Duration, options ...ratelimit.Option) ratelimit.Limit {
		return ratelimit.FixedWindow(name, rate, period, append(options, ratelimit.Start(harness.Noon))...)
	}
	kinds := []define{ratelimit.TokenBucket, window}
	add := func(pick int, counts []float64, limits ...ratelimit.Limit) {
		w := smallWorld{limits: limits, counts: counts, pick: pick, shards: limits[0].Config().Shards}
		for _, l := range limits {
			w.numbers = append(w.numbers, harness.Numbers(l, "k"))
		}
		worlds = append(worlds, w)
	}
	for _, kind := range kinds {
		for _, capacity := range []float64{1, 2, 3} {
			for _, rate := range []float64{1, 2} {
				add(0, []float64{1, 2, 3}[:int(capacity)], kind("a", rate, time.Second, ratelimit.Capacity(capacity)))
			}
		}
		for shards := 2; shards <= 4; shards++ {
			add(0, []float64{1, 2}, kind("a", 2, time.Second, ratelimit.Capacity(4), ratelimit.Shards(shards)))
			add(1, []float64{0.5, 1}, kind("a", 4, time.Second, ratelimit.Capacity(2), ratelimit.Shards(shards)))
		}
	}
	for i, a := range kinds {
		for k, b := range kinds {
			add(0, []float64{1}, a("a", 2, time.Second, ratelimit.Capacity(2)), b("b", 1, 2*time.Second, ratelimit.Capacity(float64(1+i+k))))
			add(1, []float64{1}, a("a", 1, time.Second, ratelimit.Capacity(2), ratelimit.Shards(2)), b("b", 2, 2*time.Second, ratelimit.Shards(2)))
		}
	}
	return worlds
}

func testSmallWorlds(t *testing.T) {
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 1)
	actions, sampled := 5, 4
	if testing.Short() {
		actions = 4
	}
	if *promises {
		actions, sampled = 6, 200
	}
	sequences := 0
	for _, w := range smallWorlds() {
		// A sample of all sequences also runs on the database.
		var sample []smallState
		ended := 0
		w.every(t, smallState{now: algebra.At(smallBegin), rows: make([][]algebra.Row, len(w.limits))}, actions, func(s smallState) {
			if ended++; len(sample) < sampled {
				sample = append(sample, s)
			} else if i := r.IntN(ended); i < sampled {
				sample[i] = s
			}
		})
		for _, s := range sample {
			w.replay(t, pool, s.done)
		}
		sequences += ended
	}
	t.Logf("%d sequences of %d actions", sequences, actions)
}

// replay runs a sequence on the database. Rows and answers must equal the model's.
func (w smallWorld) replay(t *testing.T, db ratelimit.DB, actions []smallAction) {
	t.Helper()
	limiter, clock := harness.NewLimiter()
	clock.At = smallBegin
	ctx := shardpick.With(t.Context(), func(int) (int, int) { return w.pick, w.pick })
	s := smallState{now: algebra.At(smallBegin), rows: make([][]algebra.Row, len(w.limits))}
	var receipts []ratelimit.Receipt
	for _, a := range actions {
		next, _ := w.try(s, a)
		var err error
		switch {
		case a.wait > 0:
			clock.Advance(a.wait)
		case a.charge:
			_, err = limiter.Charge(ctx, db, w.limits[0].Key("k"))
		case a.part > 0:
			var requests []ratelimit.Request
			for _, p := range s.jobs[a.job].parts {
				requests = append(requests, w.limits[p.limit].Key("k").Count(p.left*a.part))
			}
			var result ratelimit.Result
			result, err = limiter.Refund(ctx, db, receipts[a.job], requests...)
			receipts[a.job] = result.Receipt()
		default:
			var requests []ratelimit.Request
			for i, count := range a.counts {
				request := w.limits[i].Key("k").Count(count)
				if count > 0 {
					requests = append(requests, request)
				}
			}
			var result harness.Answered
			result, err = harness.Decide(ctx, limiter, db, a.reserve, requests...)
			receipts = append(receipts, result.Slip)
			if runAt := next.jobs[len(next.jobs)-1].runAt.Time(); err == nil && !result.RunAt.Equal(runAt) {
				t.Fatalf("%v\n%v: it may run at %v, by the model at %v", actions, a, result.RunAt, runAt)
			}
		}
		if err != nil {
			t.Fatalf("%v\n%v: %v", actions, a, err)
		}
		got, want := jsonTable(t, db), inmemory.Table{}
		for i, rows := range next.rows {
			for _, r := range rows {
				id := harness.RowsOf{Name: w.limits[i].Name(), Key: "k"}
				want[id] = append(want[id], inmemory.Row{Row: r, Shards: w.shards})
			}
		}
		if !maps.EqualFunc(got, want, slices.Equal) {
			t.Fatalf("%v\n%v: the table %v, the model %v", actions, a, got, want)
		}
		s = next
	}
	var requests []ratelimit.Request
	for _, l := range w.limits {
		requests = append(requests, l.Key("k"))
	}
	if err := limiter.Reset(ctx, db, requests...); err != nil {
		t.Fatal(err)
	}
}

// jsonTable is harness.ReadTable for any handle.
func jsonTable(t *testing.T, db ratelimit.DB) inmemory.Table {
	t.Helper()
	var text string
	err := db.QueryRow(t.Context(), `SELECT coalesce(json_agg(json_build_array(name, key, shards, value::text, (extract(epoch FROM ts) * 1000000)::bigint)
		ORDER BY name, key, shard), '[]')::text FROM ratelimit.limits`).Scan(&text)
	var rows [][]json.RawMessage
	if err == nil {
		err = json.Unmarshal([]byte(text), &rows)
	}
	m := inmemory.Table{}
	for _, columns := range rows {
		var id harness.RowsOf
		var shards int
		var value string
		var ts int64
		var v float64
		for i, into := range []any{&id.Name, &id.Key, &shards, &value, &ts} {
			err = errors.Join(err, json.Unmarshal(columns[i], into))
		}
		_, scanErr := fmt.Sscan(value, &v)
		err = errors.Join(err, scanErr)
		m[id] = append(m[id], inmemory.Row{Row: algebra.Row{Value: v, TS: algebra.Micros(ts)}, Shards: shards})
	}
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// testPromisesOfConcurrentCallers runs callers at once, in transactions of every level, on the pool and coalesced. The
// clock stands still while they call, so it is known when each job may run.
func testPromisesOfConcurrentCallers(t *testing.T) {
	r := harness.NewRand(t)
	pool := harness.NewPool(t, 8)
	coalescer := &ratelimit.Coalescer{Pool: pool}
	t.Cleanup(func() { harness.CloseCoalescer(t, coalescer) })
	limiter, clock := harness.NewLimiter()
	start := ratelimit.Start(harness.Noon)
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket("bucket", 20, time.Minute, ratelimit.Capacity(30)),
		ratelimit.TokenBucket("sharded", 20, time.Minute, ratelimit.Capacity(30), ratelimit.Shards(3)),
		ratelimit.FixedWindow("window", 30, time.Minute, start),
		ratelimit.FixedWindow("small window", 40, time.Minute, ratelimit.Capacity(20), start),
		ratelimit.FixedWindow("large window", 20, time.Minute, ratelimit.Capacity(30), ratelimit.Shards(2), start),
	}
	type job struct {
		receipt ratelimit.Receipt
		parts   map[string]*promised
	}
	var mu sync.Mutex
	var jobs []*job
	var granted, refunded int
	errRollback := errors.New("changed my mind")
	caller := func(r *rand.Rand) error {
		inTx := func(do func(ctx context.Context, db ratelimit.DB) error) error {
			if r.IntN(3) == 0 {
				return new(ratelimit.Limiter).Retry(t.Context(), func(ctx context.Context) error { return do(ctx, harness.OneOf[ratelimit.DB](r, pool, coalescer)) })
			}
			return limiter.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { return do(ctx, tx) },
				ratelimit.Isolation(harness.OneOf(r, harness.Levels...)), ratelimit.Attempts(1000))
		}
		var mine *job
		for range 3 {
			if mine != nil && r.IntN(2) == 0 { // refund half, or all
				var requests []ratelimit.Request
				half := harness.OneOf(r, 1, 0.5)
				for _, l := range limits {
					if p := mine.parts[l.Name()]; p != nil {
						requests = append(requests, l.Global().Count(p.tokens*half))
					}
				}
				var left ratelimit.Receipt
				err := inTx(func(ctx context.Context, db ratelimit.DB) error {
					result, err := limiter.Refund(ctx, db, mine.receipt, requests...)
					left = result.Receipt()
					return err
				})
				if err != nil {
					return err
				}
				mu.Lock()
				refunded++
				mine.receipt = left
				for _, p := range mine.parts {
					p.tokens -= p.tokens * half
				}
				mu.Unlock()
				mine = nil
				continue
			}
			var requests []ratelimit.Request
			reserve := r.IntN(3) > 0
			for _, l := range limits {
				if r.IntN(3) == 0 {
					requests = append(requests, l.Global().Count(harness.OneOf(r, 1.0, 3, 7)))
				}
			}
			if len(requests) == 0 {
				continue
			}
			var result harness.Answered
			err := inTx(func(ctx context.Context, db ratelimit.DB) (err error) {
				result, err = harness.Decide(ctx, limiter, db, reserve, requests...)
				if _, inTx := db.(pgx.Tx); err == nil && inTx && r.IntN(10) == 0 {
					err = errRollback
				}
				return err
			})
			if harness.Denied(err) || errors.Is(err, errRollback) {
				continue
			}
			if err != nil {
				return err
			}
			mine = &job{result.Slip, map[string]*promised{}}
			for _, s := range result.Requests {
				now := algebra.At(result.At) // the rows' ts, too, since the clock stands
				own := harness.Numbers(s.Limit, "").Repaid([]algebra.Row{{Value: s.Remaining, TS: now}}, now)
				mine.parts[s.Limit.Name()] = &promised{own, s.Count}
			}
			mu.Lock()
			granted++
			jobs = append(jobs, mine)
			mu.Unlock()
		}
		return nil
	}
	for range harness.Sized(25, 8) {
		var wg sync.WaitGroup
		for range 8 {
			r := rand.New(rand.NewPCG(r.Uint64(), 0))
			wg.Go(func() {
				if err := caller(r); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		clock.Advance(harness.OneOf(r, time.Second, 20*time.Second, time.Minute))
	}
	for _, l := range limits {
		n := harness.Numbers(l, "")
		var all []promised
		for _, j := range jobs {
			if p := j.parts[l.Name()]; p != nil {
				all = append(all, *p)
			}
		}
		refunds := []span{{1, 0, 2}, {2, 1, 3}} // they overlap
		if e := broken(n, all, refunds); e >= rounding {
			t.Errorf("%v: %v too much", l, e)
		}
	}
	if granted < 50 || refunded < 10 {
		t.Errorf("%d grants and %d refunds: this tested too little", granted, refunded)
	}
}

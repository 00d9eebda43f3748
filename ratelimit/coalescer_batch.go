package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// batch is the calls that one statement decides.
type batch struct {
	waiters []*waiter
	busy    []limitKey // its keys in schedule.busy, each once
	apart   bool       // its calls are apart
	flight  *flight
	of      []int // the group of each demand of the waiters, in order
	groups  []group
	order   []int32 // the indexes of the groups, in the order of the locks
	index   map[limitKey]int
	args    dbsqlc.CoalesceParams
	byOrd   []int32              // the group of each of args.Keys
	defs    []batchLimit         // args.Defs has their indexes + 1
	windows []pgtype.Timestamptz // of all calendars
	counts  []float64            // the sums
}

var batches = sync.Pool{New: func() any { return &batch{index: map[limitKey]int{}} }}

// batchLimit is a limit of a batch. Calls for one calendar have two lists of its windows if a window began between them, and two
// periods if only some of them count the windows before the list.
type batchLimit struct {
	limit   Limit
	windows *[]algebra.Micros
	period  time.Duration
}

// group is a batch's demands for one limit and key.
type group struct {
	first   *demand // unless mixed, all demands have its limit
	numbers algebra.Limit
	repeats int
	// mixed means that the demands differ, or are for what is ahead: the database and answerCall decide them one by one.
	mixed bool

	ord      int32 // the place in args.Keys, from 1: groups that are not mixed come first
	at       algebra.Micros
	after    float64
	known    bool // the database answered with a row
	inserted bool // there was no row before
	granted  int  // number of granted calls
	rows     []algebra.Row
	row      [1]algebra.Row
}

// shared reports whether some calls of the batch ask for keys that others do not ask for.
func (b *batch) shared() bool {
	return slices.ContainsFunc(b.waiters, func(w *waiter) bool { return len(w.ds) < len(b.busy) })
}

// calls is how many of the waiters are calls.
func (b *batch) calls() (n int) {
	for _, w := range b.waiters {
		if !w.ahead {
			n++
		}
	}
	return n
}

// clear forgets the contents of the batch, but keeps the memory.
func (b *batch) clear() {
	clear(b.waiters)
	clear(b.groups)
	clear(b.defs)
	clear(b.index)
	clear(b.args.Names)
	clear(b.args.Keys)
	b.waiters, b.flight, b.of, b.groups, b.order, b.byOrd, b.defs = b.waiters[:0], nil, b.of[:0], b.groups[:0], b.order[:0], b.byOrd[:0], b.defs[:0]
}

// group groups the demands by limit and key, and makes the statement's arguments.
func (b *batch) group() {
	for _, w := range b.waiters {
		for i := range w.ds {
			d := &w.ds[i]
			id := limitKey{d.limit.name, d.key}
			at, found := b.index[id]
			if !found {
				at = len(b.groups)
				b.index[id] = at
				b.groups = append(b.groups, group{first: d, numbers: d.numbers})
			}
			b.of = append(b.of, at)
			g := &b.groups[at]
			g.repeats++
			g.mixed = g.mixed || len(w.ds) > 1 || d.floor > 0 || g.repeats > 1 &&
				(d.count != g.first.count || d.count != math.Trunc(d.count) || d.floor != 0 || g.first.floor != 0 || d.limit != g.first.limit)
		}
	}

	// The arrays are empty, not nil: nil is NULL.
	a := &b.args
	*a = dbsqlc.CoalesceParams{
		Names: empty(a.Names), Rates: empty(a.Rates), Periods: empty(a.Periods), Capacities: empty(a.Capacities),
		Keys: empty(a.Keys), Defs: empty(a.Defs), Starts: empty(a.Starts),
		Repeats: empty(a.Repeats), Counts: empty(a.Counts), Floors: empty(a.Floors),
		Calls: empty(a.Calls), Asks: empty(a.Asks), AskDefs: empty(a.AskDefs), AskStarts: empty(a.AskStarts),
		AskCounts: empty(a.AskCounts), AskFloors: empty(a.AskFloors),
		Firsts: empty(a.Firsts), Lasts: empty(a.Lasts),
		Now: nullable(b.waiters[0].clock),
	}
	b.windows = b.windows[:0]
	for i := range b.groups {
		b.order = append(b.order, int32(i))
	}
	slices.SortFunc(b.order, func(i, j int32) int { // the order in which the database locks
		x, y := b.groups[i].first, b.groups[j].first
		return cmp.Or(strings.Compare(x.limit.name, y.limit.name), strings.Compare(x.key, y.key))
	})
	for _, mixed := range []bool{false, true} {
		for _, i := range b.order {
			g := &b.groups[i]
			if g.mixed != mixed {
				continue
			}
			g.ord = int32(len(a.Keys) + 1)
			a.Keys = append(a.Keys, g.first.key)
			a.Defs = append(a.Defs, b.def(g.first))
			if g.numbers.Window {
				for len(a.Starts) < len(a.Keys) {
					a.Starts = append(a.Starts, pgtype.Timestamptz{})
				}
				a.Starts[g.ord-1] = start(g.numbers)
			}
			if !mixed {
				a.Repeats = append(a.Repeats, int32(g.repeats))
				a.Counts = append(a.Counts, g.first.count)
				a.Floors = append(a.Floors, g.first.lowest())
			}
			b.byOrd = append(b.byOrd, i)
		}
	}
	for len(a.Starts) > 0 && len(a.Starts) < len(a.Keys) {
		a.Starts = append(a.Starts, pgtype.Timestamptz{})
	}
	if len(a.Repeats) == len(a.Keys) {
		return
	}
	of := b.of
	for call, w := range b.waiters {
		for i := range w.ds {
			d := &w.ds[i]
			at := of[i]
			if !b.groups[at].mixed {
				continue
			}
			a.Calls = append(a.Calls, int32(call))
			a.Asks = append(a.Asks, b.groups[at].ord)
			a.AskDefs = append(a.AskDefs, b.def(d))
			a.AskStarts = append(a.AskStarts, start(d.numbers))
			a.AskCounts = append(a.AskCounts, d.count)
			a.AskFloors = append(a.AskFloors, d.lowest())
		}
		of = of[len(w.ds):]
	}
}

func empty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s[:0]
}

// def is the number of a demand's limit among the statement's definitions. A limit may be among them more than once.
func (b *batch) def(d *demand) int32 {
	limit, numbers := &d.limit, &d.numbers
	for i := max(0, len(b.defs)-8); i < len(b.defs); i++ {
		if of := &b.defs[i]; of.windows == numbers.Windows && of.period == numbers.Period && of.limit == *limit {
			return int32(i + 1)
		}
	}
	a := &b.args
	a.Names = append(a.Names, limit.name)
	a.Rates = append(a.Rates, limit.numbers.Rate)
	a.Periods = append(a.Periods, numbers.Period)
	a.Capacities = append(a.Capacities, limit.numbers.Capacity)
	if numbers.Windows != nil {
		for len(a.Firsts) < len(b.defs) {
			a.Firsts, a.Lasts = append(a.Firsts, 0), append(a.Lasts, 0)
		}
		a.Firsts = append(a.Firsts, int32(len(b.windows)+1))
		b.windows = append(b.windows, windows(*numbers)...)
		a.Lasts = append(a.Lasts, int32(len(b.windows)))
		a.Windows = b.windows // otherwise NULL, which is faster
	}
	b.defs = append(b.defs, batchLimit{*limit, numbers.Windows, numbers.Period})
	return int32(len(b.defs))
}

// sums reports whether the statement can ask each key for the sum of its calls. All calls must be for one limit (a token
// bucket, if there are several keys) and must not reserve. Counts must be whole, so that nothing is rounded, and no sum may
// exceed the capacity.
func (b *batch) sums() bool {
	for i := range b.groups {
		g := &b.groups[i]
		// For repeated calls, group has already compared count and floor.
		if g.mixed || g.first.floor != 0 || g.first.count != math.Trunc(g.first.count) || g.sum() > g.numbers.Capacity {
			return false
		}
	}
	return len(b.defs) == 1 && (len(b.groups) == 1 || !b.groups[0].numbers.Window)
}

// sum is the total count of a group's calls.
func (g *group) sum() float64 { return g.first.count * float64(g.repeats) }

// consumeSums asks for the sums. The answer has the keys whose calls are all decided by that. It leaves out keys that have
// enough for only some of their calls.
func (b *batch) consumeSums(ctx context.Context, db wire) (answer dbsqlc.CoalesceRow, err error) {
	a := &b.args
	var row dbsqlc.ConsumeKeysRow
	if len(b.groups) == 1 {
		row, err = b.consumeOneKey(ctx, db)
	} else {
		b.counts = b.counts[:0]
		for i := range a.Keys {
			b.counts = append(b.counts, b.groups[b.byOrd[i]].sum())
		}
		row, err = db.queries().ConsumeKeys(ctx, dbsqlc.ConsumeKeysParams{
			Name: a.Names[0], Keys: a.Keys,
			Rate: a.Rates[0], Period: a.Periods[0], Capacity: a.Capacities[0],
			Counts: b.counts, Now: a.Now,
		})
	}
	if err != nil {
		return dbsqlc.CoalesceRow{}, err
	}
	answer = dbsqlc.CoalesceRow{ // all of the first Early are kept
		Seen: row.Seen, At: row.At, Early: row.Early,
		Ord: row.Ord[:0], Value: make([]float64, 0, len(row.Ord)), Ts: row.Ts[:0], After: row.Value[:0],
	}
	for i, ord := range row.Ord {
		g := &b.groups[b.byOrd[ord-1]]
		before, after := row.Value[i], row.Value[i]
		if i < int(row.Early.Int32) {
			before += g.sum() // exact, since all counts are whole
		} else if rows := []algebra.Row{{Value: before, TS: algebra.At(row.Ts[i].Time)}}; g.numbers.Enough(rows, g.first.count, g.first.floor, algebra.At(row.At.Time)) {
			continue // enough for some of the calls
		}
		answer.Ord = append(answer.Ord, ord)
		answer.Value = append(answer.Value, before)
		answer.Ts = append(answer.Ts, row.Ts[i])
		answer.After = append(answer.After, after)
	}
	return answer, nil
}

// consumeOneKey is consumeSums for a batch of one key. ratelimit._consume is faster, and also decides fixed windows and keys
// without a row. A denial is remembered.
func (b *batch) consumeOneKey(ctx context.Context, db wire) (dbsqlc.ConsumeKeysRow, error) {
	g := &b.groups[0]
	sum := *g.first
	sum.count = g.sum()
	a, err := db.ask(ctx, consume(sum, b.args.Now, deniedLately.expect(sum), false))
	if err != nil {
		return dbsqlc.ConsumeKeysRow{}, err
	}
	row, granted := a.row[0], int32(1)
	if !a.granted {
		granted = 0
		if retryAt := g.numbers.When(a.rows[0], g.first.count, g.first.floor, a.at); retryAt > a.at {
			deniedLately.remember(sum, retryAt.Time().Sub(a.at.Time()))
		}
	}
	at := pgtype.Timestamptz{Time: a.at.Time(), Valid: true}
	return dbsqlc.ConsumeKeysRow{
		Seen: at, At: at, Early: pgtype.Int4{Int32: granted, Valid: true},
		Ord: []int32{1}, Value: []float64{row.Value}, Ts: []pgtype.Timestamptz{{Time: row.TS.Time(), Valid: true}},
	}, nil
}

// keep keeps the calls for keys that the database has decided, and returns the others. Each call is for one key.
func (b *batch) keep(answer *dbsqlc.CoalesceRow) (others []*waiter) {
	if len(answer.Ord) == len(b.groups) {
		return nil
	}
	for _, ord := range answer.Ord {
		b.groups[b.byOrd[ord-1]].known = true
	}
	kept := 0
	for i, w := range b.waiters {
		if of := b.of[i]; b.groups[of].known {
			b.waiters[kept], b.of[kept] = w, of
			kept++
		} else {
			others = append(others, w)
		}
	}
	clear(b.waiters[kept:])
	b.waiters, b.of = b.waiters[:kept], b.of[:kept]
	return others
}

// undecided is how many keys the sums would not have decided: keys without a row, and keys with enough for only some calls.
func (b *batch) undecided() (n int) {
	for i := range b.groups {
		if g := &b.groups[i]; g.inserted || g.granted > 0 && g.granted < g.repeats {
			n++
		}
	}
	return n
}

// errDisagree is the error of a batch for which answerAll derives other decisions than the database's: a defect. The consumed
// tokens are lost, and no call is granted.
var errDisagree = fmt.Errorf("%w: the database and the library disagree about a decision", ErrUnknownOutcome)

// answerAll derives each call's answer from the states before the database's decisions.
func (b *batch) answerAll(row *dbsqlc.CoalesceRow) error {
	at, seen := algebra.At(row.At.Time), algebra.At(row.Seen.Time)
	for i := range b.groups {
		b.groups[i].at = at
	}
	for i, ord := range row.Ord {
		g := &b.groups[b.byOrd[ord-1]]
		g.known, g.after = true, row.After[i]
		g.row[0] = algebra.Row{Value: row.Value[i], TS: algebra.At(row.Ts[i].Time)}
		g.inserted = g.row[0].TS == seen // almost certainly
		g.rows = g.row[:]
		if math.IsNaN(row.Value[i]) { // the row was inserted
			g.rows = nil
		}
		g.at = at
		if i < int(row.Early.Int32) {
			g.at = seen
		}
	}
	of := b.of
	for _, w := range b.waiters {
		b.answerCall(w, of)
		of = of[len(w.ds):]
	}
	for i := range b.groups {
		if g := &b.groups[i]; len(g.rows) > 0 && (!g.known || g.row[0].Value != g.after) {
			return errDisagree
		}
	}
	return nil
}

// answerCall repeats the database's decision for one call. of has the groups of the call's demands.
func (b *batch) answerCall(w *waiter, of []int) {
	a := &w.answer
	a.granted = true
	for i := range w.ds {
		d := &w.ds[i]
		g := &b.groups[of[i]]
		a.at = g.at
		a.granted = a.granted && b.numbers(g, d).Enough(g.rows, d.count, d.floor, g.at)
	}
	a.rows = a.single[:]
	if len(w.ds) > 1 {
		a.rows = make([][]algebra.Row, len(w.ds))
	}
	for i := range w.ds {
		d := &w.ds[i]
		g := &b.groups[of[i]]
		if a.granted {
			g.granted++
			numbers := b.numbers(g, d)
			after := algebra.Row{Value: numbers.Total(g.rows, g.at) - d.count, TS: g.at}
			if len(g.rows) > 0 {
				after.TS = max(after.TS, g.row[0].TS)
			}
			g.row[0] = after
			g.rows = g.row[:]
		}
		if len(w.ds) == 1 && len(g.rows) > 0 {
			a.setRow(g.row[0])
		} else {
			a.rows[i] = slices.Clone(g.rows)
		}
	}
}

// numbers are the numbers of a demand's limit.
func (b *batch) numbers(g *group, d *demand) algebra.Limit {
	if !g.mixed {
		return g.numbers
	}
	return d.numbers
}

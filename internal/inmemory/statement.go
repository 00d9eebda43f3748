package inmemory

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/txlimit/txlimit/internal/algebra"
	"github.com/txlimit/txlimit/internal/dbsqlc"
)

// statement is a statement of package ratelimit, read from its arguments.
type statement struct {
	query   string // of dbsqlc
	op      string // of dbsqlc.Apply
	demands []Demand
	taken   []algebra.Taken // for a refund
	most    float64         // for a take
	reserve bool
	within  algebra.Micros // how long the work may wait
	lasts   time.Duration  // of a pause
	now     *time.Time     // nil: the clock of the database
	orRaise bool           // a denial is an error
}

// read reads a statement. Its arguments have the types that package ratelimit gives them, in the order of the query. It
// returns false for the SQL of others.
func read(query string, args []any) (s statement, ok bool) {
	if len(args) < 2 {
		return s, false
	}
	s.query, s.within = query, algebra.Forever
	a := arguments(args[1:]) // after pgx's query rewriter
	switch query {
	case dbsqlc.Consume:
		name, key := take[string](&a), take[string](&a)
		d := Demand{ID: ID{Name: name, Key: key}, Limit: a.limit(), Shards: 1}
		d.Count, d.Lowest = take[float64](&a), take[float64](&a)
		s.now = take[*time.Time](&a)
		take[bool](&a) // expect_denial changes no decision
		s.orRaise = take[bool](&a)
		s.demands = withWindows(&a, d)
	case dbsqlc.ConsumeSharded:
		name, key := take[string](&a), take[string](&a)
		d := Demand{ID: ID{Name: name, Key: key}, Limit: a.limit(), Shards: int(take[int32](&a))}
		d.Count, d.Lowest = take[float64](&a), take[float64](&a)
		d.Pick = [2]int{int(take[int32](&a)), int(take[int32](&a))}
		s.now, s.orRaise = take[*time.Time](&a), take[bool](&a)
		s.demands = withWindows(&a, d)
	case dbsqlc.ConsumeSeveral:
		s.demands = a.demands()
		a.counts(s.demands)
		a.floors(s.demands)
		s.now, s.orRaise = take[*time.Time](&a), take[bool](&a)
		a.windows(s.demands)
	case dbsqlc.Apply, dbsqlc.ApplyOne:
		s.op = take[string](&a)
		s.demands = a.demands()
		a.shards(s.demands)
		a.counts(s.demands)
		a.floors(s.demands)
		a.picks(s.demands)
		s.reserve, s.now, s.orRaise = take[bool](&a), take[*time.Time](&a), take[bool](&a)
		a.windows(s.demands)
		if mosts := take[[]float64](&a); mosts != nil {
			s.most = mosts[0] // they are all the same
		}
		if within := take[pgtype.Interval](&a); within.Valid {
			s.within = algebra.Micros(within.Microseconds)
		}
	case dbsqlc.Each:
		ends, names := take[[]int32](&a), take[[]string](&a)
		groups := a.numbers(names)
		a.starts(groups)
		a.shards(groups)
		a.floors(groups)
		a.picks(groups)
		keys, counts := take[[]string](&a), take[[]float64](&a)
		s.now = take[*time.Time](&a)
		a.windows(groups)
		for i, group := 0, 0; i < len(keys); i++ {
			if i == int(ends[group]) {
				group++
			}
			d := groups[group]
			d.Key, d.Count = keys[i], counts[i]
			s.demands = append(s.demands, d)
		}
	case dbsqlc.Refund, dbsqlc.RefundOne:
		s.demands = a.demands()
		a.counts(s.demands)
		taken, held, parts := take[[]float64](&a), take[[]float64](&a), take[[]float64](&a)
		at, runAt := take[pgtype.Timestamptz](&a), take[pgtype.Timestamptz](&a)
		s.now = take[*time.Time](&a)
		for i := range s.demands {
			s.taken = append(s.taken, algebra.Taken{At: algebra.At(at.Time), RunAt: algebra.At(runAt.Time), Count: taken[i], Held: held[i], Part: parts[i]})
		}
		a.windows(s.demands)
	case dbsqlc.Move:
		s.demands = a.demands()
		a.shards(s.demands)
		s.demands[1].Lowest = take[float64](&a)
		s.now = take[*time.Time](&a)
		a.windows(s.demands)
	case dbsqlc.Pause:
		s.demands = a.buckets()
		a.shards(s.demands)
		a.counts(s.demands)
		s.now, s.lasts = take[*time.Time](&a), take[time.Duration](&a)
	case dbsqlc.Resume:
		names, keys := take[[]string](&a), take[[]string](&a)
		for i := range names {
			s.demands = append(s.demands, Demand{ID: ID{Name: names[i], Key: keys[i]}})
		}
		s.now = take[*time.Time](&a)
	case dbsqlc.Reset:
		names, keys := take[[]string](&a), take[[]string](&a)
		for i := range names {
			s.demands = append(s.demands, Demand{ID: ID{Name: names[i], Key: keys[i]}})
		}
	default:
		return s, false
	}
	return s, true
}

// arguments are read one after another.
type arguments []any

func take[T any](a *arguments) T {
	v := (*a)[0].(T)
	*a = (*a)[1:]
	return v
}

// limit reads the numbers of one limit.
func (a *arguments) limit() algebra.Limit {
	l := algebra.Limit{Rate: take[float64](a), Period: take[time.Duration](a), Capacity: take[float64](a)}
	if start := take[*time.Time](a); start != nil {
		l.Window, l.Start = true, algebra.At(*start)
	}
	return l
}

// withWindows reads the windows of one limit, the last argument.
func withWindows(a *arguments, d Demand) []Demand {
	d.Limit.Windows = list(take[[]pgtype.Timestamptz](a))
	return []Demand{d}
}

// texts reads names or keys. A query for one limit has them as texts, not as arrays.
func (a *arguments) texts() []string {
	if _, one := (*a)[0].(string); one {
		return []string{take[string](a)}
	}
	return take[[]string](a)
}

// demands reads the names, keys and numbers of several limits.
func (a *arguments) demands() []Demand {
	ds := a.buckets()
	a.starts(ds)
	return ds
}

// buckets reads the names, keys and numbers of several token buckets.
func (a *arguments) buckets() []Demand {
	names, keys := a.texts(), a.texts()
	ds := a.numbers(names)
	for i := range ds {
		ds[i].Key = keys[i]
	}
	return ds
}

// numbers reads those of the limits of these names.
func (a *arguments) numbers(names []string) []Demand {
	rates, periods, capacities := take[[]float64](a), take[[]time.Duration](a), take[[]float64](a)
	ds := make([]Demand, len(names))
	for i := range ds {
		ds[i] = Demand{ID: ID{Name: names[i]}, Shards: 1, Limit: algebra.Limit{Rate: rates[i], Period: periods[i], Capacity: capacities[i]}}
	}
	return ds
}

// starts reads those of fixed windows.
func (a *arguments) starts(ds []Demand) {
	for i, start := range take[[]pgtype.Timestamptz](a) {
		if start.Valid {
			ds[i].Limit.Window, ds[i].Limit.Start = true, algebra.At(start.Time)
		}
	}
}

func (a *arguments) shards(ds []Demand) {
	for i, n := range take[[]int32](a) {
		ds[i].Shards = int(n)
	}
}

// picks reads the two shards to look at first.
func (a *arguments) picks(ds []Demand) {
	for place := range 2 {
		for i, shard := range take[[]int32](a) {
			ds[i].Pick[place] = int(shard)
		}
	}
}

func (a *arguments) counts(ds []Demand) {
	for i, count := range take[[]float64](a) {
		ds[i].Count = count
	}
}

func (a *arguments) floors(ds []Demand) {
	for i, floor := range take[[]float64](a) {
		ds[i].Lowest = floor
	}
}

// windows reads the windows of all calendars.
func (a *arguments) windows(ds []Demand) {
	all := take[[]pgtype.Timestamptz](a)
	firsts, lasts := take[[]pgtype.Int4](a), take[[]pgtype.Int4](a)
	for i := range firsts {
		if firsts[i].Valid {
			ds[i].Limit.Windows = list(all[firsts[i].Int32-1 : lasts[i].Int32])
		}
	}
}

func list(windows []pgtype.Timestamptz) *[]algebra.Micros {
	if windows == nil {
		return nil
	}
	starts := make([]algebra.Micros, len(windows))
	for i, at := range windows {
		starts[i] = algebra.At(at.Time)
	}
	return &starts
}

// run decides a statement, and answers in the form of its query.
func (s statement) run(t Table, level Isolation, now algebra.Micros) row {
	if s.now != nil {
		now = algebra.At(*s.now)
	}
	for _, d := range s.demands {
		if l := d.Limit; l.Windows != nil && (l.Unknown(now) || now < (*l.Windows)[0]) {
			return row{err: fmt.Errorf("ratelimittest: limit %q: the clock of the program is not the one of this database: "+
				"set Limiter.Clock to the Now of the DB", d.Name)}
		}
	}
	var a Answer
	switch {
	case s.query == dbsqlc.Reset:
		ids := make([]ID, len(s.demands))
		for i, d := range s.demands {
			ids[i] = d.ID
		}
		return row{value: int32(t.Reset(ids))}
	case s.query == dbsqlc.Each:
		answers := make([]Answer, len(s.demands))
		for i := range s.demands {
			if d := s.demands[i]; d.Limit.Capacity-d.Count < d.Lowest { // it is never granted: the rows say when other numbers will
				answers[i] = t.Check(s.demands[i:i+1], now)
				continue
			}
			answers[i] = t.Consume(s.demands[i:i+1], false, s.within, level, now)
		}
		return row{value: each(answers, now)}
	case s.query == dbsqlc.Pause:
		return row{value: t.Pause(s.demands, now+algebra.Micros(s.lasts.Microseconds()), now).Time()}
	case s.query == dbsqlc.Resume:
		return row{value: int32(t.Resume(s.demands, now))}
	case s.query == dbsqlc.Move:
		t.Move(s.demands[0], s.demands[1], s.demands[1].Lowest, now)
		return row{value: 0.0} // the balance, which nobody reads
	case s.query == dbsqlc.Refund, s.query == dbsqlc.RefundOne:
		return row{value: settled(t.Refund(s.demands, s.taken, now), now)}
	case s.op == "check":
		a = t.Check(s.demands, now)
	case s.op == "take":
		a = t.Take(s.demands, s.most, now)
	default:
		a = t.Consume(s.demands, s.reserve, s.within, level, now)
	}
	switch {
	case s.orRaise && !a.Granted:
		return row{err: s.denial(a, now)}
	case s.query == dbsqlc.Consume:
		return row{value: decision(a.Granted, now, a.Rows[0][0])}
	}
	return row{value: decisions(a, now)}
}

// denial is the error of ratelimit._raise.
func (s statement) denial(a Answer, now algebra.Micros) error {
	detail := struct {
		At    algebra.Micros   `json:"at"`
		Ord   []int            `json:"ord"`
		Value []float64        `json:"value"`
		Ts    []algebra.Micros `json:"ts"`
	}{now, []int{}, []float64{}, []algebra.Micros{}}
	var names []string
	for i, d := range s.demands {
		if !slices.Contains(names, d.Name) {
			names = append(names, d.Name)
		}
		for _, row := range a.Rows[i] {
			detail.Ord, detail.Value, detail.Ts = append(detail.Ord, i+1), append(detail.Value, row.Value), append(detail.Ts, row.TS)
		}
	}
	text, err := json.Marshal(detail)
	if err != nil {
		return err
	}
	return &pgconn.PgError{Severity: "ERROR", Code: "PT429", Message: "rate limit exceeded: " + strings.Join(names, ", "), Detail: string(text)}
}

// row is the answer to a statement of package ratelimit, or an error.
type row struct {
	value any // the columns, as []any, if there are several
	err   error
}

func (r row) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	columns, several := r.value.([]any)
	if !several {
		columns = []any{r.value}
	}
	for i := range dest {
		to, column := reflect.ValueOf(dest[i]), reflect.ValueOf(columns[min(i, len(columns)-1)])
		if len(dest) != len(columns) || to.Kind() != reflect.Pointer || to.Type().Elem() != column.Type() {
			return errors.New("ratelimittest: the answer is for package ratelimit only")
		}
		to.Elem().Set(column)
	}
	return nil
}

package soak

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/txlimit/txlimit/internal/algebra"
)

// What has to hold, by the records:
//
//   - The changes of a row are a chain, each from what the one before left, to what is in the table.
//   - A call in a transaction changes its rows as internal/algebra says, and is granted only if that says so: it is computed
//     again from the rows that the changes before have left. What is denied, or checks, changes nothing. Nothing else is
//     changed in such a transaction. What it was told (Result.At) is what was written.
//   - A transaction whose commit was acknowledged is in the record, one that surely failed is not.
//   - What is swept is full.
//   - A call outside of a transaction leaves no name in the record: its changes are those of a transaction without calls. None
//     leaves a balance that no call may leave; and for each key and kind of handle, what was taken in all is what was
//     acknowledged, and at most what has an unknown outcome besides. The same for what was given back, where no capacity cuts
//     it off; where one does, there are as many changes as refunds were acknowledged.
//   - In the span from any change to any other, a limit that is only consumed grants at most capacity + span*rate/period. This
//     is computed without the algebra.
type checker struct {
	*testing.T
	rows    map[place][]*algebra.Row // by shard
	pending map[string][]change      // by transaction: what no call has explained yet
	strict  map[place]*meter
	// inserted is the transactions that have inserted the rows that are there.
	inserted map[place]string
	counts   map[string]int
	errors   int
	app      string // application_name of the coalescers

	single map[account]*balance // of calls outside of transactions
	ops    map[int64]outcome    // of transactions that have ended, for their processes
	inLog  map[int64]bool       // of transactions that were committed
}

// place is a key of a limit.
type place struct {
	subject int
	key     string
}

// account is what is known of calls outside of transactions only in sum.
type account struct {
	place
	coalesced bool
}

type balance struct {
	taken, given     float64 // by the changes
	refunds          int     // changes that took nothing
	told, toldGiven  float64 // acknowledged
	toldRefunds      int
	maybe, maybeGive float64 // unknown
}

// meter is a leaky one, of what a limit has granted.
type meter struct{ level, last float64 }

// change is a change of a row.
type change struct {
	place
	shard    int
	old, new *algebra.Row // nil: none
	app, xid string
	at       algebra.Micros // when it was made
}

func (s *soak) check() {
	c := &checker{
		T: s.T, app: appName(s.seed, coalesced), counts: map[string]int{},
		rows: map[place][]*algebra.Row{}, pending: map[string][]change{}, strict: map[place]*meter{}, inserted: map[place]string{},
		single: map[account]*balance{}, ops: map[int64]outcome{}, inLog: map[int64]bool{},
	}
	files, err := filepath.Glob(filepath.Join(s.dir, "*"))
	noError(s, err)
	for _, file := range files {
		noError(s, c.readFile(file))
	}
	c.replay(s)
	c.compareWithTable(s)
	c.compareWithFiles()
	for _, what := range slices.Sorted(maps.Keys(c.counts)) {
		s.Logf("%9d %s", c.counts[what], what)
	}
	s.Logf("faults: %v", s.faults)
	c.wasASoak(s)
}

func (c *checker) fail(format string, args ...any) {
	c.Helper()
	if c.errors++; c.errors <= 20 {
		c.Errorf(format, args...)
	}
}

// readFile adds up what a process was told.
func (c *checker) readFile(file string) error {
	open := map[int64]line{} // calls that have no outcome yet
	err := readLines(file, func(l line) {
		if l.Outcome != "" {
			c.counts["operations: "+l.Handle+", "+string(l.Outcome)]++
		}
		switch before, single := open[l.Op]; {
		case l.Call != nil:
			open[l.Op] = l
		case single:
			delete(open, l.Op)
			c.told(before, l.Outcome)
		default:
			c.ops[l.Op] = l.Outcome
		}
	})
	for _, l := range open {
		c.counts["operations: "+l.Handle+", killed"]++
		c.told(l, unknown)
	}
	return err
}

func (c *checker) of(p place, coalesced bool) *balance {
	a := account{p, coalesced}
	if c.single[a] == nil {
		c.single[a] = &balance{}
	}
	return c.single[a]
}

func (c *checker) told(l line, told outcome) {
	c.counts["calls outside of transactions: "+l.Call.Verb]++
	for _, a := range l.Call.Asks {
		b := c.of(place{a.Subject, a.Key}, l.Handle == coalesced && (l.Call.Verb == "consume" || l.Call.Verb == "charge"))
		refund := l.Call.Verb == "refund"
		switch {
		case told == denied || told == failed || l.Call.Verb == "check" || l.Call.Verb == "reset":
		case told == committed && refund:
			b.toldGiven += a.Count
			b.toldRefunds++
		case told == committed:
			b.told += a.Count
		case refund:
			b.maybeGive += a.Count
		default:
			b.maybe += a.Count
		}
	}
}

// replay goes through all that was committed, each row's changes in the order of its versions.
func (c *checker) replay(s *soak) {
	bySubject := map[string]int{}
	for i, s := range subjects {
		bySubject[s.Name()] = i
	}
	// A transaction without calls is looked at when its last change has come.
	rows, err := s.admin.Query(s.Context(), `
		SELECT n, xid::text, '' AS call, 0 AS op, app, at, name, key, shard, old_value, old_ts, value, ts,
		       l.xid IS NULL AND n = max(n) OVER (PARTITION BY c.xid) AS last
		  FROM soak_changes AS c
		  LEFT JOIN (SELECT DISTINCT xid FROM soak_calls) AS l USING (xid)
		UNION ALL
		SELECT n, xid::text, call, op, '', now(), '', '', 0, NULL, NULL, NULL, NULL, false FROM soak_calls
		 ORDER BY n`)
	noError(c, err)
	var n, op int64
	var xid, text, app, name, key string
	var at time.Time
	var shard int
	var oldValue, value *float64
	var oldTS, ts *time.Time
	var last bool
	row := func(value *float64, ts *time.Time) *algebra.Row {
		if value == nil {
			return nil
		}
		return &algebra.Row{Value: *value, TS: algebra.At(*ts)}
	}
	_, err = pgx.ForEachRow(rows, []any{&n, &xid, &text, &op, &app, &at, &name, &key, &shard, &oldValue, &oldTS, &value, &ts, &last}, func() error {
		if text != "" {
			var made call
			if err := json.Unmarshal([]byte(text), &made); err != nil {
				return err
			}
			c.inLog[op] = true
			c.counts["calls in transactions: "+made.Verb]++
			if !made.Granted {
				c.counts["calls in transactions: denied"]++
			}
			c.made(op, made, c.pending[xid])
			delete(c.pending, xid)
			return nil
		}
		c.counts["changes of rows"]++
		c.pending[xid] = append(c.pending[xid], change{place{bySubject[name], key}, shard, row(oldValue, oldTS), row(value, ts), app, xid, algebra.At(at)})
		if last {
			c.madeOutside(c.pending[xid])
			delete(c.pending, xid)
		}
		return nil
	})
	noError(c, err)
	for xid, changes := range c.pending {
		c.fail("transaction %s changed what none of its calls did: %v", xid, changes)
	}
}

// byPlace sorts changes by their keys, in order.
func byPlace(changes []change) map[place][]change {
	of := map[place][]change{}
	for _, ch := range changes {
		of[ch.place] = append(of[ch.place], ch)
	}
	return of
}

// apply changes the rows of a key. It returns what they were before each change, and after all.
func (c *checker) apply(p place, changes []change) (states [][]*algebra.Row) {
	state := c.rows[p]
	if state == nil {
		state = make([]*algebra.Row, subjects[p.subject].Config().Shards)
	}
	states = append(states, state)
	for _, ch := range changes {
		state = slices.Clone(state)
		if was := state[ch.shard]; (was == nil) != (ch.old == nil) || was != nil && *was != *ch.old {
			c.fail("%v shard %d was changed from %v; the change before left %v", p, ch.shard, ch.old, was)
		}
		if ch.old != nil && ch.new != nil && ch.new.TS < ch.old.TS {
			c.fail("%v shard %d: ts went back from %v to %v", p, ch.shard, ch.old, ch.new)
		}
		if ch.old == nil {
			c.inserted[p] = ch.xid
		}
		state[ch.shard] = ch.new
		states = append(states, state)
	}
	c.rows[p] = state
	return states
}

// whole is the rows of a state, unless some are there and some are not.
func whole(state []*algebra.Row) (rows []algebra.Row, ok bool) {
	for _, row := range state {
		if row != nil {
			rows = append(rows, *row)
		}
	}
	return rows, len(rows) == 0 || len(rows) == len(state)
}

// decidedAt is the instant to which refills counted: if that is not known, what was written says enough, since a row whose
// ts is later is not refilled.
func decidedAt(changes []change) algebra.Micros {
	written := map[int]algebra.Micros{}
	for _, ch := range changes {
		if ch.new != nil {
			written[ch.shard] = ch.new.TS
		}
	}
	at := algebra.Max
	for _, ts := range written {
		at = min(at, ts)
	}
	return at
}

// made holds a call of a transaction against the algebra.
func (c *checker) made(op int64, made call, changes []change) {
	of := byPlace(changes)
	for _, a := range made.Asks {
		p := place{a.Subject, a.Key}
		states := c.apply(p, of[p])
		at, explained := algebra.At(made.At), false
		// A call for several limits that has lost a race gives back what it has taken, and begins again.
		for i := 0; i < len(states) && !explained; i++ {
			if made.At.IsZero() {
				at = decidedAt(of[p][i:])
			}
			explained = neutral(p, states[0], states[i], at) && c.explains(p, made, a, at, states[i], states[len(states)-1], of[p][i:])
		}
		if !explained {
			c.fail("operation %x: %+v\n at %v does not explain how %v went through %s", op, made, at.Time(), p, show(states))
		}
		c.measure(p, states, of[p])
		delete(of, p)
	}
	for p, changes := range of {
		c.fail("operation %x: %+v has changed %v: %v", op, made, p, changes)
	}
}

func show(states [][]*algebra.Row) string {
	var text strings.Builder
	for _, state := range states {
		text.WriteString("\n ")
		for _, row := range state {
			if row == nil {
				text.WriteString(" none")
				continue
			}
			fmt.Fprintf(&text, " %v at %v", row.Value, row.TS.Time().Format("05.000000"))
		}
	}
	return text.String()
}

// neutral says whether two states hold the same at an instant.
func neutral(p place, a, b []*algebra.Row, at algebra.Micros) bool {
	before, ok := whole(a)
	after, ok2 := whole(b)
	numbers := numbersOf(p)
	return ok && ok2 && near(numbers.Total(before, at), numbers.Total(after, at))
}

// explains says whether a call leads from one state to another.
func (c *checker) explains(p place, made call, a ask, at algebra.Micros, from, to []*algebra.Row, changes []change) bool {
	before, ok := whole(from)
	after, ok2 := whole(to)
	if !ok || !ok2 {
		return false
	}
	numbers, shards := numbersOf(p), len(from)
	switch {
	case made.Verb == "check" || !made.Granted:
		return len(changes) == 0
	case made.Snapshot != "" && (len(before) == 0 || len(changes) == 0 && !visible(c.inserted[p], made.Snapshot)):
		return len(changes) == 0
	case made.Verb == "reset":
		return len(after) == 0
	case made.Verb == "refund":
		latest := at
		for _, row := range before {
			latest = max(latest, row.TS)
		}
		count := -a.Count
		if numbers.Window && numbers.UpTo(algebra.At(made.ConsumedAt)) < numbers.UpTo(latest) {
			count = 0
		}
		return same(numbers.Take(before, shards, count, at), after)
	}
	floor := subjects[p.subject].lowest(made.Verb, a.Reserve)
	if len(changes) == 1 && shards > 1 { // one shard took, what it had
		i := changes[0].shard
		left := numbers.Available(before[i], shards, at) - a.Count
		return left >= 0 && left == after[i].Value && after[i].TS == max(before[i].TS, at)
	}
	return len(changes) > 0 && numbers.Enough(before, shards, a.Count, floor, at) && same(numbers.Take(before, shards, a.Count, at), after)
}

// visible says whether what a transaction has written can be seen by a snapshot, which is written as xmin:xmax:those in between
// that had not ended.
func visible(xid, snapshot string) bool {
	parts := strings.Split(snapshot, ":")
	var id, end uint64
	if _, err := fmt.Sscan(xid+" "+parts[1], &id, &end); err != nil {
		return true
	}
	return id < end && !slices.Contains(strings.Split(parts[2], ","), xid)
}

// same compares rows. The model has the instants to the microsecond but for a first use, for which they say nothing.
func same(want, got []algebra.Row) bool {
	return slices.EqualFunc(want, got, func(a, b algebra.Row) bool { return near(a.Value, b.Value) })
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(b)) }

// madeOutside adds up what a transaction without calls has changed.
func (c *checker) madeOutside(changes []change) {
	c.counts["transactions of calls outside of one"]++
	for p, changes := range byPlace(changes) {
		states := c.apply(p, changes)
		c.measure(p, states, changes)
		s := subjects[p.subject]
		before, ok := whole(states[0])
		after, ok2 := whole(states[len(states)-1])
		if !ok || !ok2 {
			c.fail("%v: some shards are missing:%s", p, show(states))
			continue
		}
		if len(after) == 0 {
			if at := changes[0].at; !s.reset && numbersOf(p).Total(before, at) < *s.Config().Capacity {
				c.fail("%v: deleted at %v, though it is not full and nobody resets it:%s", p, at.Time(), show(states))
			}
			continue
		}
		numbers, at := numbersOf(p), decidedAt(changes)
		taken, left, lowest := numbers.Total(before, at), 0.0, s.lowest("consume", s.reserved)
		if len(changes) == 1 && len(after) > 1 {
			i := changes[0].shard
			taken, left, lowest = numbers.Available(before[i], len(after), at)-after[i].Value, after[i].Value, 0
		} else {
			for _, row := range after {
				left += row.Value
			}
			taken -= left
		}
		switch {
		case taken > 1e-6:
			c.of(p, changes[0].app == c.app).taken += taken
			if left < lowest-1e-6 && !s.charged {
				c.fail("%v: over-granted: %v taken, %v left, where at least %v must be:%s", p, taken, left, lowest, show(states))
			}
		default:
			b := c.of(p, false)
			b.given -= taken
			b.refunds++
		}
	}
}

// measure holds what a limit has granted against its capacity and what flows off, by the clock that is in the rows.
func (c *checker) measure(p place, states [][]*algebra.Row, changes []change) {
	if s := subjects[p.subject]; !s.strict || len(changes) == 0 || states[len(states)-1][0] == nil {
		return
	}
	config, m := subjects[p.subject].Config(), c.strict[p]
	to := states[len(states)-1][0]
	now := float64(to.TS) / 1e6
	rate := config.Rate / time.Duration(config.Period).Seconds()
	// What was granted: the limit is not sharded, so the row says it without any model but the refill.
	taken := *config.Capacity - to.Value
	if from := states[0][0]; from != nil {
		taken = min(*config.Capacity, from.Value+max(0, float64(to.TS-from.TS))/1e6*rate) - to.Value
	}
	if m == nil {
		m = &meter{last: now}
		c.strict[p] = m
	}
	m.level = max(0, m.level-rate*(now-m.last)) + taken
	m.last = now
	if m.level > *config.Capacity+1e-6 {
		c.fail("%v: over-granted in some span: %v above the rate, the capacity is %v", p, m.level, *config.Capacity)
	}
}

func numbersOf(p place) algebra.Limit {
	c := subjects[p.subject].Config()
	n := algebra.Limit{Rate: c.Rate, Period: time.Duration(c.Period), Capacity: *c.Capacity, Window: c.Kind == "fixed window"}
	if n.Window {
		sum := sha256.Sum256([]byte(c.Name + "\x00" + p.key))
		n.Start = algebra.Min + algebra.Micros(binary.BigEndian.Uint64(sum[:])>>1)%algebra.Micros(n.Period.Microseconds())
	}
	return n
}

// compareWithTable holds the end of each chain against the table.
func (c *checker) compareWithTable(s *soak) {
	rows, err := s.admin.Query(s.Context(), `SELECT name, key, shard, shards, value, ts FROM rate_limits`)
	noError(c, err)
	inTable := map[place]int{}
	var name, key string
	var shard, shards int
	var value float64
	var ts time.Time
	_, err = pgx.ForEachRow(rows, []any{&name, &key, &shard, &shards, &value, &ts}, func() error {
		p := place{slices.IndexFunc(subjects, func(s subject) bool { return s.Name() == name }), key}
		inTable[p]++
		if state := c.rows[p]; state == nil || shards != len(state) || state[shard] == nil || *state[shard] != (algebra.Row{Value: value, TS: algebra.At(ts)}) {
			c.fail("%v shard %d of %d: the table has %v at %v, the changes led to%s", p, shard, shards, value, ts, show([][]*algebra.Row{state}))
		}
		return nil
	})
	noError(c, err)
	for p, state := range c.rows {
		if rows, _ := whole(state); len(rows) != inTable[p] {
			c.fail("%v: %d rows in the table, the changes led to %d", p, inTable[p], len(rows))
		}
	}
	c.counts["keys"] = len(c.rows)
}

// compareWithFiles holds what the processes were told against what was committed.
func (c *checker) compareWithFiles() {
	for op, told := range c.ops {
		switch in := c.inLog[op]; {
		case told == committed && !in:
			c.fail("operation %x was acknowledged, and is lost", op)
		case in && (told == failed || told == abandoned || told == denied):
			c.fail("operation %x was committed, and its caller was told: %s", op, told)
		case told == unknown && in:
			c.counts["transactions with an unknown outcome: they were committed"]++
		case told == unknown:
			c.counts["transactions with an unknown outcome: they were not"]++
		}
	}
	for op := range c.inLog {
		if _, ended := c.ops[op]; !ended {
			c.counts["transactions that were committed by a process that was killed before it knew"]++
		}
	}
	for a, b := range c.single {
		s, tolerance := subjects[a.subject], 1e-3
		if b.taken < b.told-tolerance || b.taken > b.told+b.maybe+tolerance {
			c.fail("%v: %v were taken; acknowledged were %v, unknown are %v", a, b.taken, b.told, b.maybe)
		}
		if b.given > b.toldGiven+b.maybeGive+tolerance {
			c.fail("%v: %v were given back; acknowledged were %v, unknown are %v", a, b.given, b.toldGiven, b.maybeGive)
		}
		if *s.Config().Capacity == plentiful && b.given < b.toldGiven-tolerance {
			c.fail("%v: lost refunds: %v were given back; acknowledged were %v", a, b.given, b.toldGiven)
		}
		if !s.reset && b.refunds < b.toldRefunds {
			c.fail("%v: lost refunds: %d were made, acknowledged were %d", a, b.refunds, b.toldRefunds)
		}
		if b.maybe == 0 && b.maybeGive == 0 {
			c.counts["accounts of calls outside of transactions: equal"]++
		} else {
			c.counts["accounts of calls outside of transactions: within what is unknown"]++
		}
	}
}

// wasASoak says whether everything has happened that the run is for.
func (c *checker) wasASoak(s *soak) {
	for _, fault := range []string{"connections terminated", "rows locked", "processes killed", "rows swept"} {
		if s.faults[fault] == 0 {
			c.Errorf("it never happened: %s", fault)
		}
	}
	for _, handle := range handles {
		if c.counts["operations: "+handle+", committed"] == 0 {
			c.Errorf("it never happened: %s committed", handle)
		}
	}
	denials := 0
	for _, handle := range handles[:outside] {
		n := c.counts["operations: "+handle+", denied"]
		if denials += n; n == 0 && *duration >= time.Minute {
			c.Errorf("it never happened: %s denied", handle)
		}
	}
	if denials == 0 || c.counts["calls in transactions: denied"] == 0 {
		c.Error("hardly anything was denied")
	}
	for _, verb := range []string{"consume", "check", "charge", "refund", "reset"} {
		if c.counts["calls in transactions: "+verb] == 0 || c.counts["calls outside of transactions: "+verb] == 0 {
			c.Errorf("it never happened: %s", verb)
		}
	}
	if c.counts["changes of rows"] < 1000 {
		c.Errorf("%d changes are no soak", c.counts["changes of rows"])
	}
}

package soak

import (
	"cmp"
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

// The records must satisfy this:
//
//   - The changes of a row are a chain: each starts from the result of the last one, and the chain ends in the table.
//   - A call in a transaction changes its rows as internal/algebra says, and is granted only if internal/algebra grants it. The
//     checker computes it again from the rows that the earlier changes left. A take takes the largest whole number that is
//     there, up to its own. A denial, a check or a balance changes nothing. Such a transaction makes no other change. The
//     caller's answer matches the change: the instants, the receipt and, of a key that the transaction has changed before,
//     the balance. Only a reservation says when the work may run.
//   - A transaction whose commit was acknowledged is in the record. One that certainly failed is not.
//   - A swept row was full.
//   - A call outside of a transaction leaves no name in the record: its changes are those of a transaction without calls. In the
//     same way, one call of the process that made it must explain each of these transactions: an acknowledged call, or one with
//     an unknown outcome. Each acknowledged call explains one, except a refund that must give nothing back. The instant of a
//     refund is known, since it had locked all rows by then (Result.At).
//   - All decisions of one statement of a Coalescer are one change. Each acknowledged grant is in one such change. For each key,
//     the tokens taken are those acknowledged, and at most those with an unknown outcome. No balance is lower than a call may
//     leave it.
//   - From any change to any other, a limit that is only consumed grants at most capacity + span*rate/period. This is computed
//     without the algebra.
//   - Grants keep their promise, whatever was reserved and refunded: see promise_test.go.
type checker struct {
	testing.TB
	promises
	seed    uint64
	rows    map[place][]*algebra.Row // by shard
	pending map[string][]change      // by transaction: the changes that no call has explained yet
	strict  map[place]*meter
	waits   map[place][]waits // which work was told to wait
	// inserted is the transactions that inserted the present rows.
	inserted map[place]string
	counts   map[string]int
	errors   int

	// Calls outside of transactions. The acknowledged ones are in order of their instants.
	alone    map[string][]*outsider // those that took tokens; by owner of all their keys
	doubtful map[string][]*outsider // calls with an unknown outcome
	shared   map[string][]sharer    // grants of a Coalescer, by owner of a key
	refunds  map[place][]sharer
	perhaps  map[string][]sharer // refunds with an unknown outcome, by owner of a key
	sums     map[place]*sum

	ops   map[int64]outcome // of transactions that have ended, for their processes
	inLog map[int64]bool    // of transactions that were committed

	changed map[changedBy]bool
}

// place is a key of a limit.
type place struct {
	subject int
	key     string
}

// changedBy is a key that a transaction has changed.
type changedBy struct {
	op int64
	place
}

// outsider is a call outside of a transaction.
type outsider struct {
	*tracked
	id grantID
}

// sharer is an ask of such a call.
type sharer struct {
	*outsider
	ask
	i int
}

// sum is the total of a Coalescer's decisions on a key.
type sum struct {
	taken float64 // according to the changes
	told  float64 // acknowledged
	maybe float64 // unknown
}

// meter is a leaky meter of a limit's grants.
type meter struct{ level, last float64 }

// change is a change of a row.
type change struct {
	place
	shard    int
	old, new *algebra.Row // nil: no row
	app, xid string
	at       algebra.Micros // its instant
}

// history is a transaction's changes of a key, and the rows before each of them and after the last.
type history struct {
	changes []change
	states  [][]*algebra.Row
}

func (h history) before() []*algebra.Row { return h.states[0] }
func (h history) after() []*algebra.Row  { return h.states[len(h.states)-1] }

// owner names the connections that may have changed some keys: a process's, by their application_name.
func owner(app string, places []place) string {
	names := []string{app}
	for _, p := range places {
		names = append(names, fmt.Sprint(p.subject, "/", p.key))
	}
	slices.Sort(names[1:])
	return strings.Join(names, " ")
}

func (c call) places() (places []place) {
	for _, a := range c.Asks {
		places = append(places, a.place())
	}
	return places
}

func (a ask) place() place { return place{a.Subject, a.Key} }

func (s *soak) check() {
	c := &checker{
		TB: s.T, promises: newPromises(), seed: s.seed, counts: map[string]int{},
		rows: map[place][]*algebra.Row{}, pending: map[string][]change{}, strict: map[place]*meter{}, inserted: map[place]string{},
		alone: map[string][]*outsider{}, doubtful: map[string][]*outsider{}, shared: map[string][]sharer{},
		refunds: map[place][]sharer{}, perhaps: map[string][]sharer{}, sums: map[place]*sum{},
		ops: map[int64]outcome{}, inLog: map[int64]bool{}, changed: map[changedBy]bool{},
	}
	files, err := filepath.Glob(filepath.Join(s.dir, "*"))
	noError(s, err)
	for _, file := range files {
		noError(s, c.readFile(file))
	}
	c.sort()
	c.replay(s)
	c.checkPromises()
	c.compareWithTable(s)
	c.compareWithFiles()
	c.checkHolds(s)
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

// readFile reads the answers that a process recorded.
func (c *checker) readFile(file string) error {
	process := filepath.Base(file)
	open := map[int64]line{} // calls without an outcome so far
	err := readLines(file, func(l line) {
		if l.Outcome != "" {
			c.counts["operations: "+l.Handle+", "+string(l.Outcome)]++
		}
		switch before, single := open[l.Op]; {
		case l.Outcome == "":
			open[l.Op] = l
		case single:
			delete(open, l.Op)
			if l.Call == nil {
				l.Call = before.Call
			}
			c.told(process, l)
		default:
			c.ops[l.Op] = l.Outcome
		}
	})
	for _, l := range open {
		c.counts["operations: "+l.Handle+", killed"]++
		l.Outcome = unknown
		c.told(process, l)
	}
	return err
}

// told records a call outside of a transaction.
func (c *checker) told(process string, l line) {
	verb, sure := l.Call.Verb, l.Outcome == committed
	c.counts["calls outside of transactions: "+verb]++
	if l.Outcome == denied || l.Outcome == failed || verb == "check" || verb == "balance" || verb == "reset" {
		return
	}
	pool := map[string]string{coalesced: coalesced, "sql.DB pgx": "pgx", "sql.DB postgres": "postgres"}[l.Handle]
	if pool == "" {
		pool = "pool"
	}
	app := appName(c.seed, pool+" "+process)
	o := &outsider{newTracked(*l.Call), grantID{l.Op, 0}}
	together := l.Handle == coalesced && verb != "refund" && verb != "take" && !l.Call.waits() &&
		!slices.ContainsFunc(l.Call.places(), place.sharded)
	if !together && verb != "refund" {
		of := c.doubtful
		if sure {
			of = c.alone
		}
		who := owner(app, l.Call.places())
		of[who] = append(of[who], o)
		return
	}
	for i, a := range l.Call.Asks {
		s, p, who := sharer{o, a, i}, a.place(), owner(app, []place{a.place()})
		switch {
		case verb == "refund" && sure:
			c.refunds[p] = append(c.refunds[p], s)
		case verb == "refund":
			c.perhaps[who] = append(c.perhaps[who], s)
			c.doubt(l.Call.Of, a)
		case sure:
			c.sum(p).told += a.Count
			if l.Call.takes() {
				c.shared[who] = append(c.shared[who], s)
			}
		default:
			c.sum(p).maybe += a.Count
		}
	}
}

func (c *checker) sum(p place) *sum {
	if c.sums[p] == nil {
		c.sums[p] = &sum{}
	}
	return c.sums[p]
}

// sort sorts the acknowledged calls by their instants.
func (c *checker) sort() {
	for _, of := range c.alone {
		slices.SortStableFunc(of, func(a, b *outsider) int { return a.At.Compare(b.At) })
	}
	byInstant := func(a, b sharer) int { return a.At.Compare(b.At) }
	for _, of := range c.shared {
		slices.SortStableFunc(of, byInstant)
	}
	for _, of := range c.refunds {
		slices.SortStableFunc(of, byInstant)
	}
}

// waits reports whether the call's work may have to wait in a way that forfeits tokens: a reservation of a window, or of
// several limits.
func (c call) waits() bool {
	return c.Verb == "reserve" && (len(c.Asks) > 1 || numbersOf(c.Asks[0].place()).Window)
}

func (p place) sharded() bool { return p.shards() > 1 }
func (p place) shards() int   { return subjects[p.subject].Config().Shards }

// replay goes through all committed changes, those of each row in the order of its versions.
func (c *checker) replay(s *soak) {
	bySubject := map[string]int{}
	for i, s := range subjects {
		bySubject[s.Name()] = i
	}
	c.waits = map[place][]waits{}
	promised, err := s.admin.Query(s.Context(), "SELECT name, key, at, promised FROM soak_promised")
	noError(c, err)
	var name, key string
	var at, until time.Time
	_, err = pgx.ForEachRow(promised, []any{&name, &key, &at, &until}, func() error {
		if i, known := bySubject[name]; known {
			c.waits[place{i, key}] = append(c.waits[place{i, key}], waits{algebra.At(at), algebra.At(until)})
		}
		return nil
	})
	noError(c, err)
	// A transaction without calls is checked after its last change.
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
	var xid, text, app string
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
		c.fail("transaction %s made a change that none of its calls explains: %v", xid, changes)
	}
	for p := range c.refunds {
		if s, back := c.due(p, algebra.Max); back > 0 {
			c.fail("operation %x: lost refund: %+v\n should have given %v back to %v", s.id.Op, s.call, back, p)
		}
	}
	for who, calls := range c.alone {
		for _, o := range calls {
			c.fail("operation %x was acknowledged, but is not in the record of %s: %+v", o.id.Op, who, o.call)
		}
	}
	for who, calls := range c.shared {
		for _, s := range calls {
			c.fail("operation %x was acknowledged, but its ask %d is not in the record of %s: %+v", s.id.Op, s.i, who, s.call)
		}
	}
}

// byPlace groups changes by key, in order.
func byPlace(changes []change) map[place][]change {
	of := map[place][]change{}
	for _, ch := range changes {
		of[ch.place] = append(of[ch.place], ch)
	}
	return of
}

// apply changes the rows of a key.
func (c *checker) apply(p place, changes []change) history {
	state := c.rows[p]
	if state == nil {
		state = make([]*algebra.Row, p.shards())
	}
	states := [][]*algebra.Row{state}
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
	c.measure(p, states, changes)
	return history{changes, states}
}

// whole returns the rows of a state. It is not ok if some rows exist and some do not.
func whole(state []*algebra.Row) (rows []algebra.Row, ok bool) {
	for _, row := range state {
		if row != nil {
			rows = append(rows, *row)
		}
	}
	return rows, len(rows) == 0 || len(rows) == len(state)
}

// decidedAt returns the instant up to which refills counted. If that is not recorded, the earliest written ts is enough,
// since a row with a later ts is not refilled.
func decidedAt(changes []change) algebra.Micros {
	type row struct {
		place
		shard int
	}
	written := map[row]algebra.Micros{}
	for _, ch := range changes {
		if ch.new != nil {
			written[row{ch.place, ch.shard}] = ch.new.TS
		}
	}
	at := algebra.Max
	for _, ts := range written {
		at = min(at, ts)
	}
	return at
}

// made compares a call in a transaction with the algebra.
func (c *checker) made(op int64, made call, changes []change) {
	of, did := byPlace(changes), map[place]history{}
	for _, p := range made.places() {
		if len(of[p]) > 0 {
			c.changed[changedBy{op, p}] = true
		}
		if len(of[p]) > 0 {
			if s, back := c.due(p, of[p][0].at); back > 0 {
				c.fail("operation %x: lost refund: %+v\n should have given %v back to %v", s.id.Op, s.call, back, p)
			}
		}
		did[p] = c.apply(p, of[p])
		delete(of, p)
	}
	if c.explains(made, did, changes) {
		c.follow(grantID{op, made.N}, newTracked(made), did, changes)
	} else {
		c.fail("operation %x: %+v does not explain %s", op, made, show(did))
	}
	for p, changes := range of {
		c.fail("operation %x: %+v has changed %v: %v", op, made, p, changes)
	}
	c.compareBalances(op, made)
}

// compareBalances compares what a transaction read of the rows that it has changed. Others may change the rest meanwhile.
func (c *checker) compareBalances(op int64, made call) {
	for i, balance := range made.Balance {
		p := made.Asks[i].place()
		rows, _ := whole(c.rows[p])
		if !c.changed[changedBy{op, p}] || p.sharded() || len(rows) == 0 {
			continue
		}
		c.counts["balances in transactions that were compared"]++
		if want := numbersOf(p).Total(rows, algebra.At(made.At)); !near(want, balance) {
			c.fail("operation %x read a balance of %v of %v at %v; its rows say %v", op, balance, p, made.At, want)
		}
	}
}

// at returns the instant of the call's decision.
func (c call) at(changes []change) algebra.Micros {
	if c.At.IsZero() {
		return decidedAt(changes)
	}
	return algebra.At(c.At)
}

// explains reports whether a call made these changes of its keys.
func (c *checker) explains(made call, did map[place]history, changes []change) bool {
	at := made.at(changes)
	oneShard := slices.ContainsFunc(made.places(), func(p place) bool { return p.sharded() && len(did[p].changes) == 1 })
	switch {
	case made.Granted && made.waits() && !oneShard:
		return explainsWaiting(made, did, at)
	case made.Granted && made.Verb == "take" && !tookAll(made, did, at):
		return false
	case made.waits(): // one row of each limit had enough, so it did not forfeit
		made.Verb = "consume"
	}
	for _, a := range made.Asks {
		p, explained := a.place(), false
		h := did[p]
		// A call for several limits that loses a race gives back its tokens and starts again.
		for i := 0; i < len(h.states) && !explained; i++ {
			explained = neutral(p, h.before(), h.states[i], at) && c.explainsOne(made, a, at, history{h.changes[i:], h.states[i:]})
		}
		if !explained {
			return false
		}
	}
	return true
}

// tookAll reports whether a take left no whole token, or took the most.
func tookAll(made call, did map[place]history, at algebra.Micros) bool {
	n := made.Asks[0].Count
	return n == made.Most || n < made.Most && n == mostOf(made, did, at)
}

// mostOf is how many tokens a take can take: a whole number, the same of each key.
func mostOf(made call, did map[place]history, at algebra.Micros) float64 {
	most := made.Most
	for _, p := range made.places() {
		before, _ := whole(did[p].before())
		most = min(most, numbersOf(p).Whole(before, made.Most, at))
	}
	return most
}

// explainsWaiting is explains for a reservation of a window, or of several limits. All rows of all limits decide it.
func explainsWaiting(made call, did map[place]history, at algebra.Micros) bool {
	var ds []algebra.Demand
	for _, a := range made.Asks {
		p := a.place()
		before, ok := whole(did[p].before())
		if !ok || len(did[p].changes) == 0 {
			return false
		}
		ds = append(ds, algebra.Demand{
			Limit: numbersOf(p), Rows: before, Shards: p.shards(), Count: a.Count, Lowest: numbersOf(p).Lowest(subjects[p.subject].lowest(made.Verb)),
		})
	}
	_, left, granted := algebra.Reserve(ds, at, algebra.Forever)
	for i, a := range made.Asks {
		after, ok := whole(did[a.place()].after())
		granted = granted && ok && same(ds[i].Limit.Spread(ds[i].Rows, ds[i].Shards, left[i], at), after)
	}
	return granted
}

func show(did map[place]history) string {
	var text strings.Builder
	for p, h := range did {
		fmt.Fprintf(&text, "\n %v, by %d changes:", p, len(h.changes))
		for _, state := range h.states {
			text.WriteString("\n ")
			for _, row := range state {
				if row == nil {
					text.WriteString(" none")
					continue
				}
				fmt.Fprintf(&text, " %v at %v", row.Value, row.TS.Time().Format("05.000000"))
			}
		}
	}
	return text.String()
}

// neutral reports whether two states have the same balance at an instant.
func neutral(p place, a, b []*algebra.Row, at algebra.Micros) bool {
	before, ok := whole(a)
	after, ok2 := whole(b)
	numbers := numbersOf(p)
	return ok && ok2 && near(numbers.Total(before, at), numbers.Total(after, at))
}

// explainsOne reports whether a call made these changes of one of its keys, and none before.
func (c *checker) explainsOne(made call, a ask, at algebra.Micros, h history) bool {
	p, changes := a.place(), h.changes
	before, ok := whole(h.before())
	after, ok2 := whole(h.after())
	if !ok || !ok2 {
		return false
	}
	numbers, shards := numbersOf(p), p.shards()
	switch {
	case made.Verb == "check" || made.Verb == "balance" || !made.Granted:
		return len(changes) == 0
	case made.Snapshot != "" && (len(before) == 0 || len(changes) == 0 && !visible(c.inserted[p], made.Snapshot)):
		return len(changes) == 0
	case made.Verb == "reset":
		return len(after) == 0
	case made.Verb == "refund":
		back := newTracked(made).back(c, a, before, at)
		if back == 0 || len(changes) == 0 {
			return back == 0 && len(changes) == 0
		}
		return same(numbers.Take(before, len(before), -back, at), after)
	}
	floor := subjects[p.subject].lowest(made.Verb)
	if len(changes) == 1 && shards > 1 && made.Verb != "take" { // one shard gave tokens that it had
		i := changes[0].shard
		left := numbers.Available(*h.before()[i], shards, at) - a.Count
		return left >= 0 && left == h.after()[i].Value && h.after()[i].TS == max(h.before()[i].TS, at)
	}
	return len(changes) > 0 && numbers.Enough(before, a.Count, floor, at) && same(numbers.Take(before, shards, a.Count, at), after)
}

// visible reports whether a snapshot sees the rows that a transaction wrote. A snapshot is written as xmin:xmax:running
// transactions in between.
func visible(xid, snapshot string) bool {
	parts := strings.Split(snapshot, ":")
	var id, end uint64
	if _, err := fmt.Sscan(xid+" "+parts[1], &id, &end); err != nil {
		return true
	}
	return id < end && !slices.Contains(strings.Split(parts[2], ","), xid)
}

func same(want, got []algebra.Row) bool {
	return slices.EqualFunc(want, got, func(a, b algebra.Row) bool { return near(a.Value, b.Value) && a.TS == b.TS })
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(b)) }

// madeOutside explains the changes of a transaction without calls.
func (c *checker) madeOutside(changes []change) {
	c.counts["transactions of calls outside of one"]++
	did := map[place]history{}
	for p, changes := range byPlace(changes) {
		s, back := c.due(p, changes[0].at)
		h := c.apply(p, changes)
		if back == 0 {
			did[p] = h
		} else if s.Granted = true; c.explainsOne(s.call, s.ask, algebra.At(s.At), h) {
			c.gaveBack(s.tracked, s.ask, h.before(), back)
		} else {
			c.fail("operation %x: lost refund: %+v\n should have given %v back, does not explain %s", s.id.Op, s.call, back, show(map[place]history{p: h}))
		}
	}
	if len(did) > 0 && !givenBack(did) && !c.deleted(did, changes[0].app) && !c.explained(did, changes) {
		c.fail("no call of %s explains %s", changes[0].app, show(did))
	}
}

// givenBack reports whether the changes cancel out: a call for several limits lost a race, or was part of a Coalescer's
// statement, and was denied.
func givenBack(did map[place]history) bool {
	for p, h := range did {
		if rows, _ := whole(h.after()); len(rows) == 0 || !neutral(p, h.before(), h.after(), decidedAt(h.changes)) {
			return false
		}
	}
	return true
}

// deleted reports whether rows were swept or, by one of the processes, reset.
func (c *checker) deleted(did map[place]history, app string) bool {
	deleted := false
	for p, h := range did {
		if rows, _ := whole(h.after()); len(rows) > 0 {
			continue
		}
		deleted = true
		before, _ := whole(h.before())
		switch at := h.changes[0].at; {
		case subjects[p.subject].reset && strings.HasPrefix(app, appName(c.seed, "")):
			c.wasReset(p)
		case numbersOf(p).Total(before, at) < numbersOf(p).Capacity:
			c.fail("deleted at %v, but it is not full and was not reset: %s", at.Time(), show(map[place]history{p: h}))
		}
	}
	return deleted
}

// explained finds the calls that took tokens, or may have given some back.
func (c *checker) explained(did map[place]history, changes []change) bool {
	app := changes[0].app
	who := owner(app, slices.Collect(maps.Keys(did)))
	// A call without a receipt may explain changes of several calls, when these left the instant in the row as it was. So it
	// comes after those whose receipts fit.
	for _, receipt := range []bool{true, false} {
		for i, o := range c.alone[who] {
			if algebra.At(o.At) > changes[len(changes)-1].at {
				break // it was later
			}
			if (o.Left != "") == receipt && c.explains(o.call, did, changes) && o.told(did, changes) {
				c.alone[who] = slices.Delete(c.alone[who], i, i+1)
				c.follow(o.id, o.tracked, did, changes)
				return true
			}
		}
	}
	mayBeTogether := strings.HasPrefix(app, appName(c.seed, coalesced)) && !slices.ContainsFunc(slices.Collect(maps.Keys(did)), place.sharded)
	if mayBeTogether && c.together(app, did, false) {
		return true
	}
	for i, o := range c.doubtful[who] {
		o.Granted = true
		if o.Verb == "take" {
			o.call = o.took(mostOf(o.call, did, o.at(changes)))
		}
		if c.explains(o.call, did, changes) {
			c.doubtful[who] = slices.Delete(c.doubtful[who], i, i+1)
			c.follow(o.id, o.tracked, did, changes)
			return true
		}
	}
	if c.mayHaveGivenBack(app, did) {
		return true
	}
	return mayBeTogether && c.together(app, did, true)
}

// told reports whether what a call's caller was told agrees with its changes: the receipt, if it has one, and when a reservation may
// run. Another call may have taken the same tokens.
func (o *outsider) told(did map[place]history, changes []change) bool {
	if !o.takes() || o.Left == "" && o.Verb != "reserve" {
		return true
	}
	want, _ := granting(o.call, did, changes)
	return (o.Left == "" || read(o.Left).equal(want)) && (o.Verb != "reserve" || o.RetryAt.Equal(want.RunAt))
}

func (c *checker) mayHaveGivenBack(app string, did map[place]history) bool {
	which := map[place]int{}
	for p, h := range did {
		which[p] = slices.IndexFunc(c.perhaps[owner(app, []place{p})], func(s sharer) bool {
			s.Granted = true
			return c.explainsOne(s.call, s.ask, decidedAt(h.changes), h)
		})
		if which[p] < 0 {
			return false
		}
	}
	for p, h := range did {
		who, i := owner(app, []place{p}), which[p]
		s := c.perhaps[who][i]
		c.perhaps[who] = slices.Delete(c.perhaps[who], i, i+1)
		before, _ := whole(h.before())
		c.gaveBack(s.tracked, s.ask, h.before(), s.back(c, s.ask, before, decidedAt(h.changes)))
	}
	return true
}

// together adds up a Coalescer's decision on several calls. Unless unknown is set, it must have been acknowledged to at
// least one of them.
func (c *checker) together(app string, did map[place]history, unknown bool) bool {
	known := map[place][]sharer{}
	for p, h := range did {
		if of := c.sharers(app, p, h); len(of) > 0 {
			known[p] = of
		}
	}
	if len(known) == 0 && !unknown {
		return false
	}
	for p, h := range did {
		s, left, taken := subjects[p.subject], h.after()[0], h.taken(p)
		c.sum(p).taken += taken
		lowest := s.lowest("reserve")
		if s.strict {
			lowest = 0
		}
		if taken < -1e-6 || left.Value < lowest-1e-6 && !s.charged {
			c.fail("over-granted: %v taken, %v left, where at least %v must be: %s", taken, left.Value, lowest, show(did))
		}
		who := owner(app, []place{p})
		c.shared[who] = slices.DeleteFunc(c.shared[who], func(s sharer) bool { return slices.Contains(known[p], s) })
		for _, s := range known[p] {
			runAt := numbersOf(p).Repaid([]algebra.Row{{Value: s.held(), TS: left.TS}}, algebra.At(s.At))
			c.compareRunAt(s.id, s.call, runAt)
			c.grants(s.id, s.ask, left.TS, runAt)
		}
	}
	return true
}

// sharers finds the calls for a key that a Coalescer has decided together: calls of one instant, by the row's value after
// each.
func (c *checker) sharers(app string, p place, h history) (most []sharer) {
	since, row, last := algebra.Min, h.after()[0], h.changes[len(h.changes)-1].at
	if h.before()[0] != nil {
		since = h.before()[0].TS
	}
	taken, least := h.taken(p), math.Inf(1)
	at := map[algebra.Micros][]sharer{}
	for _, s := range c.shared[owner(app, []place{p})] {
		decided := algebra.At(s.At)
		if decided > last {
			break
		}
		if row.TS == max(since, decided) && s.held() >= row.Value-1e-6 && s.held()+s.Count <= row.Value+taken+1e-6 {
			at[decided] = append(at[decided], s)
		}
	}
	for _, of := range at {
		left := taken
		for _, s := range of {
			left -= s.Count
		}
		if math.Abs(left) < least { // rarely does more than one instant fit
			most, least = of, math.Abs(left)
		}
	}
	return most
}

// held returns the tokens that were left in the ask's rows.
func (s sharer) held() float64 { return read(s.Left).Taken[s.i].Held }

// taken returns the tokens taken from a key's row, for any call.
func (h history) taken(p place) float64 {
	before, _ := whole(h.before())
	return numbersOf(p).Total(before, decidedAt(h.changes)) - h.after()[0].Value
}

// follow records the result of an explained call: its grants and refunds.
func (c *checker) follow(id grantID, r *tracked, did map[place]history, changes []change) {
	switch {
	case r.Verb == "reset":
		for p, h := range did {
			if len(h.changes) > 0 {
				c.wasReset(p)
			}
		}
	case r.Verb == "refund":
		for _, a := range r.Asks {
			h, back := did[a.place()], 0.0
			before, _ := whole(h.before())
			if len(h.changes) > 0 {
				back = r.back(c, a, before, r.at(changes))
			}
			c.gaveBack(r, a, h.before(), back)
		}
	case r.takes() && r.Granted:
		want, parts := granting(r.call, did, changes)
		c.compareRunAt(id, r.call, algebra.At(want.RunAt))
		for i, a := range r.Asks {
			c.grants(id, a, parts[i].ts, parts[i].runAt)
		}
		if r.Left != "" {
			c.compareReceipt(r.call, want)
		}
	}
}

// compareRunAt compares when the work may run, by the rows, with what its caller was told. A grant of any other verb than
// Reserve may run at once, and has no RetryAt.
func (c *checker) compareRunAt(id grantID, made call, runAt algebra.Micros) {
	told := made.RetryAt
	switch {
	case made.At.IsZero(): // its answer is not known
		return
	case made.Verb != "reserve" && told.IsZero():
		told = made.At
	case made.Verb != "reserve":
		c.fail("operation %x: %+v was granted, and has a RetryAt", id.Op, made)
	}
	if algebra.At(told) != runAt {
		c.fail("operation %x: %+v was told that it may run at %v; its rows say %v", id.Op, made, told, runAt.Time())
	}
}

// timing is the instant of an ask's grant, according to the rows that it took from, and the instant at which it may run.
type timing struct{ ts, runAt algebra.Micros }

// granting returns the receipt that a grant must have.
func granting(made call, did map[place]history, changes []change) (want receipt, parts []timing) {
	at := made.at(changes)
	runAt := at
	for _, a := range made.Asks {
		p, h := a.place(), did[a.place()]
		rows, _ := whole(h.after())
		if p.sharded() && len(h.changes) == 1 {
			rows = []algebra.Row{*h.changes[0].new}
		}
		took, part := taken{Limit: subjects[p.subject].Name(), Key: p.key, Count: a.Count, Rows: len(rows), Shards: p.shards()}, timing{ts: at}
		for _, row := range rows {
			took.Held += row.Value
			part.ts = max(part.ts, row.TS)
		}
		for len(rows) < p.shards() {
			rows = append(rows, rows[0])
		}
		part.runAt = numbersOf(p).Repaid(rows, at)
		runAt = max(runAt, part.runAt)
		want.Taken, parts = append(want.Taken, took), append(parts, part)
	}
	want.At, want.RunAt = at.Time(), runAt.Time()
	return want, parts
}

func (c *checker) compareReceipt(made call, want receipt) {
	if got := read(made.Left); !got.equal(want) {
		c.fail("the receipt of %+v\n should say %+v", made, want)
	}
}

func (r receipt) equal(want receipt) bool {
	sameTaken := func(a, b taken) bool {
		return a.Limit == b.Limit && a.Key == b.Key && a.Rows == b.Rows && a.Shards == b.Shards &&
			near(a.Count, b.Count) && near(a.Refunded, b.Refunded) && near(a.Held, b.Held)
	}
	return len(want.Taken) == 0 && len(r.Taken) == 0 || r.At.Equal(want.At) && r.RunAt.Equal(want.RunAt) && slices.EqualFunc(r.Taken, want.Taken, sameTaken)
}

// tracked is a call. For a refund, it has the receipt that the refund must return, as far as it has been followed.
type tracked struct {
	call
	left receipt
	open int // the number of asks that have not been followed
}

func newTracked(made call) *tracked { return &tracked{made, read(made.Receipt), len(made.Asks)} }

func (r *tracked) taken(a ask) *taken {
	for i := range r.left.Taken {
		if t := &r.left.Taken[i]; t.Limit == subjects[a.Subject].Name() && t.Key == a.Key {
			return t
		}
	}
	return nil
}

// back returns the tokens that a refund must give back to some rows.
func (r *tracked) back(c *checker, a ask, before []algebra.Row, at algebra.Micros) float64 {
	t := r.taken(a)
	if len(before) == 0 || t == nil {
		return 0
	}
	part := 1.0
	if t.Rows < t.Shards {
		part = 1 / float64(t.Shards)
	}
	return numbersOf(a.place()).Refund(before, algebra.Taken{
		At: algebra.At(r.left.At), RunAt: algebra.At(r.left.RunAt), Count: t.Count, Held: t.Held, Part: part,
		Promised: c.promised(a.place(), at),
	}, a.Count, at)
}

// promised is the latest instant at which work of a limit and key was told to run, as of an instant.
func (c *checker) promised(p place, at algebra.Micros) (latest algebra.Micros) {
	for _, w := range c.waits[p] {
		if w.from <= at {
			latest = max(latest, w.until)
		}
	}
	return latest
}

// waits is work that was told, at an instant, to run at another.
type waits struct{ from, until algebra.Micros }

// due returns the next refund outside of a transaction that was made before an instant and gives something back. The key's
// next change must be that refund's.
func (c *checker) due(p place, until algebra.Micros) (s sharer, back float64) {
	for len(c.refunds[p]) > 0 && algebra.At(c.refunds[p][0].At) <= until {
		s, c.refunds[p] = c.refunds[p][0], c.refunds[p][1:]
		before, _ := whole(c.rows[p])
		if back = s.back(c, s.ask, before, algebra.At(s.At)); back > 0 {
			return s, back
		}
		c.gaveBack(s.tracked, s.ask, c.rows[p], 0)
	}
	return s, 0
}

// gaveBack follows an ask of a refund.
func (c *checker) gaveBack(r *tracked, a ask, state []*algebra.Row, back float64) {
	p := a.place()
	t := r.taken(a)
	if at := algebra.At(r.At); back > 0 && c.promised(p, at) > at {
		before, _ := whole(state)
		t.Held += min(back, max(-numbersOf(p).Total(before, at), 0))
	}
	t.Held += a.Count
	t.Refunded += a.Count
	if r.open--; r.open == 0 && !r.At.IsZero() {
		r.left.Taken = slices.DeleteFunc(r.left.Taken, func(t taken) bool { return t.Count-t.Refunded <= 1e-12*t.Count })
		c.compareReceipt(r.call, r.left)
	}
	c.refunded(r.Of, a, back, r.At.IsZero())
}

// measure compares a limit's grants with its capacity and refill, by the clock in the rows.
func (c *checker) measure(p place, states [][]*algebra.Row, changes []change) {
	if s := subjects[p.subject]; !s.strict || len(changes) == 0 || states[len(states)-1][0] == nil {
		return
	}
	config, m := subjects[p.subject].Config(), c.strict[p]
	to := states[len(states)-1][0]
	now := float64(to.TS) / 1e6
	rate := *config.Rate / period(config).Seconds()
	// The granted tokens. The limit is not sharded, so the row shows them with no model but the refill.
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
	n := algebra.Limit{Rate: *c.Rate, Period: period(c), Capacity: *c.Capacity, Window: c.Kind == "fixed window"}
	if n.Window {
		sum := sha256.Sum256([]byte(cmp.Or(p.key, c.Name)))
		n.Start = algebra.Min + algebra.Micros(binary.BigEndian.Uint64(sum[:])>>1)%algebra.Micros(n.Period.Microseconds())
	}
	return n
}

// compareWithTable compares the end of each chain with the table.
func (c *checker) compareWithTable(s *soak) {
	rows, err := s.admin.Query(s.Context(), `SELECT name, key, shard, shards, value, ts FROM ratelimit.limits WHERE name NOT LIKE 'held %'`)
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
			c.fail("%v shard %d of %d: the table has %v at %v, the changes led to %s", p, shard, shards, value, ts, show(map[place]history{p: {states: [][]*algebra.Row{state}}}))
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

// compareWithFiles compares the processes' answers with the committed changes.
func (c *checker) compareWithFiles() {
	for op, told := range c.ops {
		switch in := c.inLog[op]; {
		case told == committed && !in:
			c.fail("operation %x was acknowledged, but is lost", op)
		case in && (told == failed || told == abandoned || told == denied):
			c.fail("operation %x was committed, but its caller's outcome is: %s", op, told)
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
	for p, sum := range c.sums {
		if sum.taken < sum.told-1e-3 || sum.taken > sum.told+sum.maybe+1e-3 {
			c.fail("%v: %v were taken through Coalescers; acknowledged were %v, unknown are %v", p, sum.taken, sum.told, sum.maybe)
		}
		if sum.maybe == 0 {
			c.counts["keys taken from through Coalescers: equal"]++
		} else {
			c.counts["keys taken from through Coalescers: within what is unknown"]++
		}
	}
}

// wasASoak wants everything that the run is for to have happened.
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
		c.Error("almost nothing was denied")
	}
	for _, verb := range []string{
		"consume", "reserve", "take", "check", "balance", "charge",
		"refund", "reset",
	} {
		if c.counts["calls in transactions: "+verb] == 0 || c.counts["calls outside of transactions: "+verb] == 0 {
			c.Errorf("it never happened: %s", verb)
		}
	}
	if c.counts["balances in transactions that were compared"] == 0 {
		c.Error("it never happened: a balance in a transaction that was compared")
	}
	for _, did := range []string{"given back", "kept"} {
		all := 0
		for _, s := range []string{"bucket", "sharded bucket", "window", "sharded window"} {
			n := c.counts["refunds of what had to wait: "+s+", "+did]
			if all += n; n == 0 && *duration >= 3*time.Minute {
				c.Errorf("it never happened: a refund of what had to wait for a %s was %s", s, did)
			}
		}
		if all == 0 {
			c.Errorf("it never happened: a refund of what had to wait was %s", did)
		}
	}
	if c.counts["changes of rows"] < enough {
		c.Errorf("%d changes: this tested too little", c.counts["changes of rows"])
	}
}
